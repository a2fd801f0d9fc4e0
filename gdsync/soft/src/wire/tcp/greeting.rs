//! How the two ends of a TCP link prove to each other that they belong to one job, and agree on what carries their packets.
//!
//! ```text
//! connecting side                                         accepting side
//!   hello:  magic, to, from, largest body, nonce, offer  ->
//!                                                        <- answer: magic, nonce, offer, HMAC(secret, "answer" hello nonce offer)
//!   proof:  HMAC(secret, "proof" hello nonce)            ->
//!                                                        <- welcome: it has the link; or crossed: it has another, or makes it;
//!                                                           or full: it takes no more
//! ```
//!
//! The secret itself is not sent, and nonces make each proof good for one connection.

use hmac_sha256::HMAC;

use super::frames::MAX_BODY;
use crate::wire::Peer;
use gdsync_device::Gid;

/// First bytes of a hello and an answer: protocol and version.
const MAGIC: [u8; 8] = *b"gdsytcp3";
/// Bytes of the longest name of a carrier, and of an endpoint of libfabric.
const CARRIER: usize = 63;
const NAME: usize = 128;
/// Each text has a byte for its length.
const OFFER: usize = 1 + CARRIER + 8 + 4 + 1 + NAME;
pub(super) const HELLO: usize = 64 + OFFER;
/// What an answer says, ahead of its code.
const SAYS: usize = 24 + OFFER;
pub(super) const ANSWER: usize = SAYS + PROOF;
pub(super) const PROOF: usize = 32;
pub(super) const NONCE: usize = 16;
/// Says that the accepting side has the link.
pub(super) const WELCOME: [u8; 1] = *b"w";
/// Says that there is a link already, or that the accepting side connects, too, and its connection will be the link.
pub(super) const CROSSED: [u8; 1] = *b"c";
/// Says that the accepting side takes no more links, or none of this address.
pub(super) const FULL: [u8; 1] = *b"f";

/// What one side says of what carries the packets of the link. Over TCP that is its name alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::wire) struct Offer {
    /// Both sides must have the same.
    pub(in crate::wire) carrier: String,
    /// The number of the link at this side.
    pub(in crate::wire) id: u64,
    /// Packets that the peer may send ahead.
    pub(in crate::wire) credits: u32,
    /// The name of the endpoint.
    pub(in crate::wire) name: Vec<u8>,
}

impl Offer {
    fn to_bytes(&self) -> [u8; OFFER] {
        let mut out = [0; OFFER];
        let mut at = 0;
        let mut put = |bytes: &[u8], room: usize| {
            let bytes = &bytes[..bytes.len().min(room)];
            out[at..at + bytes.len()].copy_from_slice(bytes);
            at += room;
        };
        for (text, room) in [(self.carrier.as_bytes(), CARRIER), (&self.name, NAME)] {
            put(&[u8::try_from(text.len().min(room)).expect("at most 128")], 1);
            put(text, room);
        }
        put(&self.id.to_be_bytes(), 8);
        put(&self.credits.to_be_bytes(), 4);
        out
    }

    fn read(bytes: &[u8; OFFER]) -> Option<Self> {
        let (carrier, rest) = bytes.split_at(1 + CARRIER);
        let (name, rest) = rest.split_at(1 + NAME);
        let text = |bytes: &[u8]| bytes.get(1..=usize::from(bytes[0])).map(<[u8]>::to_vec);
        let (id, credits) = rest.split_first_chunk()?;
        let offer = Self {
            carrier: String::from_utf8(text(carrier)?).ok()?,
            id: u64::from_be_bytes(*id),
            credits: u32::from_be_bytes(*credits.first_chunk()?),
            name: text(name)?,
        };
        // Also what lies behind the texts.
        (offer.to_bytes() == *bytes).then_some(offer)
    }
}

/// What a connecting side says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) to: Peer,
    pub(super) from: Peer,
    pub(super) nonce: [u8; NONCE],
    pub(super) offer: Offer,
}

impl Hello {
    pub(super) fn to_bytes(&self) -> [u8; HELLO] {
        let mut out = [0; HELLO];
        out[..8].copy_from_slice(&MAGIC);
        out[8..24].copy_from_slice(&self.to.gid.0);
        out[24..26].copy_from_slice(&self.to.port.to_be_bytes());
        out[26..42].copy_from_slice(&self.from.gid.0);
        out[42..44].copy_from_slice(&self.from.port.to_be_bytes());
        out[44..48].copy_from_slice(&u32::try_from(MAX_BODY).expect("a small constant").to_be_bytes());
        out[48..64].copy_from_slice(&self.nonce);
        out[64..].copy_from_slice(&self.offer.to_bytes());
        out
    }

    /// Reads a hello for `own`, from a socket whose other end has the address `from`.
    ///
    /// # Errors
    /// The text says what is wrong with the hello.
    pub(super) fn read(bytes: &[u8; HELLO], own: Peer, from: Gid) -> Result<Self, &'static str> {
        let peer = |at: usize| Peer {
            gid: Gid(std::array::from_fn(|i| bytes[at + i])),
            port: u16::from_be_bytes([bytes[at + 16], bytes[at + 17]]),
        };
        if bytes[..8] != MAGIC {
            return Err("not a greeting of this version");
        }
        let offer =
            bytes.last_chunk().and_then(Offer::read).ok_or("a greeting with an offer that has no sense")?;
        let nonce = std::array::from_fn(|i| bytes[48 + i]);
        let hello = Self { to: peer(8), from: peer(26), nonce, offer };
        // What differs is the sizes that this version does not have.
        if bytes[44..48] != hello.to_bytes()[44..48] {
            return Err("packets of another size: use the same version in both processes");
        }
        match () {
            () if hello.to != own => Err("a greeting for another process"),
            () if hello.from.gid != from || hello.from.port == 0 || hello.from == own => {
                Err("a process that claims the address of another one")
            }
            () => Ok(hello),
        }
    }
}

/// The authentication code of one side, over these parts.
fn code(secret: u64, parts: &[&[u8]]) -> [u8; PROOF] {
    let mut hmac = HMAC::new(secret.to_be_bytes());
    parts.iter().for_each(|part| hmac.update(part));
    hmac.finalize()
}

/// Whether two codes are the same, in a time that does not depend on where they differ.
fn is_same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

/// The accepting side's answer.
pub(super) fn answer(secret: u64, hello: &[u8; HELLO], nonce: &[u8; NONCE], offer: &Offer) -> [u8; ANSWER] {
    let mut out = [0; ANSWER];
    out[..8].copy_from_slice(&MAGIC);
    out[8..24].copy_from_slice(nonce);
    out[24..SAYS].copy_from_slice(&offer.to_bytes());
    let code = code(secret, &[b"answer", hello, &out[8..SAYS]]);
    out[SAYS..].copy_from_slice(&code);
    out
}

/// Checks an answer. Returns the proof that this side sends, and the offer of the other one.
///
/// # Errors
/// The text says what is wrong with the answer.
pub(super) fn check_answer(
    secret: u64,
    hello: &[u8; HELLO],
    bytes: &[u8; ANSWER],
) -> Result<([u8; PROOF], Offer), &'static str> {
    let (says, theirs) = bytes.split_at(SAYS);
    if says[..8] != MAGIC {
        return Err("it answers as no software HCA of this version does");
    }
    if !is_same(theirs, &code(secret, &[b"answer", hello, &says[8..]])) {
        return Err("it has another GDSYNC_JOB_TOKEN: give both processes the same");
    }
    let offer = says.last_chunk().and_then(Offer::read).ok_or("its offer has no sense")?;
    Ok((code(secret, &[b"proof", hello, &says[8..24]]), offer))
}

/// Whether this is the proof of the side that sent `hello` and was answered with `nonce`.
pub(super) fn is_proof(secret: u64, hello: &[u8; HELLO], nonce: &[u8; NONCE], bytes: &[u8; PROOF]) -> bool {
    is_same(bytes, &code(secret, &[b"proof", hello, nonce]))
}
