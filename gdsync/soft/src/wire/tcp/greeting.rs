//! How the two ends of a TCP link prove to each other that they belong to one job.
//!
//! ```text
//! connecting side                                  accepting side
//!   hello:  magic, to, from, largest body, nonce  ->
//!                                                 <- answer: magic, nonce, HMAC(secret, "answer" hello nonce)
//!   proof:  HMAC(secret, "proof" hello nonce)     ->
//!                                                 <- welcome: it has the link; or crossed: it has another, or makes it
//! ```
//!
//! The secret itself is not sent, and nonces make each proof good for one connection.

use hmac_sha256::HMAC;

use crate::wire::Peer;
use crate::wire::ring::MAX_BODY;
use gdsync_device::Gid;

/// First bytes of a hello and an answer: protocol and version.
const MAGIC: [u8; 8] = *b"gdsytcp1";
pub(super) const HELLO: usize = 64;
pub(super) const ANSWER: usize = 56;
pub(super) const PROOF: usize = 32;
pub(super) const NONCE: usize = 16;
/// Says that the accepting side has the link.
pub(super) const WELCOME: [u8; 1] = *b"w";
/// Says that there is a link already, or that the accepting side connects, too, and its connection will be the link.
pub(super) const CROSSED: [u8; 1] = *b"c";

/// What a connecting side says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) to: Peer,
    pub(super) from: Peer,
    pub(super) nonce: [u8; NONCE],
}

impl Hello {
    pub(super) fn to_bytes(self) -> [u8; HELLO] {
        let mut out = [0; HELLO];
        out[..8].copy_from_slice(&MAGIC);
        out[8..24].copy_from_slice(&self.to.gid.0);
        out[24..26].copy_from_slice(&self.to.port.to_be_bytes());
        out[26..42].copy_from_slice(&self.from.gid.0);
        out[42..44].copy_from_slice(&self.from.port.to_be_bytes());
        out[44..48].copy_from_slice(&u32::try_from(MAX_BODY).expect("a small constant").to_be_bytes());
        out[48..].copy_from_slice(&self.nonce);
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
        let hello = Self { to: peer(8), from: peer(26), nonce: std::array::from_fn(|i| bytes[48 + i]) };
        if bytes[..8] != MAGIC {
            return Err("not a greeting of this version");
        }
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

/// The authentication code of one side.
fn code(secret: u64, side: &[u8], hello: &[u8; HELLO], nonce: &[u8; NONCE]) -> [u8; PROOF] {
    let mut hmac = HMAC::new(secret.to_be_bytes());
    [side, hello, nonce].into_iter().for_each(|part| hmac.update(part));
    hmac.finalize()
}

/// Whether two codes are the same, in a time that does not depend on where they differ.
fn is_same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

/// The accepting side's answer.
pub(super) fn answer(secret: u64, hello: &[u8; HELLO], nonce: &[u8; NONCE]) -> [u8; ANSWER] {
    let mut out = [0; ANSWER];
    out[..8].copy_from_slice(&MAGIC);
    out[8..24].copy_from_slice(nonce);
    out[24..].copy_from_slice(&code(secret, b"answer", hello, nonce));
    out
}

/// Checks an answer. Returns the proof that this side sends.
///
/// # Errors
/// The text says what is wrong with the answer.
pub(super) fn check_answer(
    secret: u64,
    hello: &[u8; HELLO],
    bytes: &[u8; ANSWER],
) -> Result<[u8; PROOF], &'static str> {
    let nonce = std::array::from_fn(|i| bytes[8 + i]);
    if bytes[..8] != MAGIC {
        return Err("it answers as no software HCA of this version does");
    }
    if !is_same(bytes, &answer(secret, hello, &nonce)) {
        return Err("it has another GDSYNC_JOB_TOKEN: give both processes the same");
    }
    Ok(code(secret, b"proof", hello, &nonce))
}

/// Whether this is the proof of the side that sent `hello` and was answered with `nonce`.
pub(super) fn is_proof(secret: u64, hello: &[u8; HELLO], nonce: &[u8; NONCE], bytes: &[u8; PROOF]) -> bool {
    is_same(bytes, &code(secret, b"proof", hello, nonce))
}
