//! How the queue pairs of all ranks find each other.

use std::time::Duration;

use gdsync::mlx5::RemoteAddr;
use gdsync::verbs::{Access, Pd, Qp, QpAddress, QpBuilder};

use crate::bootstrap::Exchange;
use crate::communicator::Registration;
use crate::credit::{self, Credits, Way};
use crate::error::{Error, Result};
use crate::link::{Link, Most};
use crate::path::{self, Planes};

/// The queue pairs of one rank at this one.
struct Ends {
    send: Qp,
    recv: Qp,
    credits: Qp,
}

/// What a rank tells another one: where its messages, its credits and the word for its receives are taken.
struct Card {
    messages: QpAddress,
    credits: QpAddress,
    word: RemoteAddr,
}

impl Card {
    const BYTES: usize = 2 * QpAddress::BYTES + 12;

    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = [self.messages.to_bytes(), self.credits.to_bytes()].concat();
        bytes.extend(self.word.addr.to_be_bytes());
        bytes.extend(self.word.rkey.to_be_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8; Self::BYTES]) -> gdsync::Result<Self> {
        let (messages, rest) = bytes.split_first_chunk().expect("68 bytes hold 28");
        let (credits, rest) = rest.split_first_chunk().expect("40 bytes hold 28");
        let (addr, rkey) = rest.split_first_chunk().expect("12 bytes hold 8");
        let rkey = rkey.first_chunk().expect("4 bytes are left");
        Ok(Self {
            messages: QpAddress::from_bytes(messages)?,
            credits: QpAddress::from_bytes(credits)?,
            word: RemoteAddr { addr: u64::from_be_bytes(*addr), rkey: u32::from_be_bytes(*rkey) },
        })
    }
}

/// Makes queue pairs with room for `most` messages to each rank by `build` and connects them with those of the other ranks. The region
/// must live as long as the links: it has the words that the others write.
pub(crate) fn connect(
    planes: &Planes,
    bootstrap: &mut dyn Exchange,
    most: Most,
    build: impl Fn(&Pd) -> QpBuilder,
    timeout: Duration,
) -> Result<(Vec<Link>, Registration)> {
    let (rank, size) = (bootstrap.rank(), bootstrap.size());
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let table = path::register(&planes.far.pd, planes.near.as_ref(), &credit::table(size)?, access)?;
    let ends = (0..size)
        .map(|peer| {
            let pd = planes.pd(peer);
            let send = build(pd).build()?;
            let recv = if peer == rank { build(pd).build()? } else { send.clone() };
            // Four seconds: a rank that is only slow must not be given up.
            let credits =
                pd.build_qp().max_send_wr(most.depth).max_recv_wr(1).max_inline(4).timeout(17).build()?;
            Ok(Ends { send, recv, credits })
        })
        .collect::<Result<Vec<_>>>()?;
    let mut cards = Vec::with_capacity(size * Card::BYTES);
    for (peer, ends) in ends.iter().enumerate() {
        let word = table.on(planes.is_near(peer)).remote(credit::place(peer))?;
        let card = Card { messages: ends.send.address(), credits: ends.credits.address(), word };
        cards.extend(card.to_bytes());
    }
    let cards = bootstrap.allgather(&cards, timeout)?;
    if cards.len() != size {
        let what = format!("gave the bytes of {} ranks, not of {size}", cards.len());
        return Err(Error::bootstrap("the exchange", what, "let allgather return a part of every rank"));
    }
    let links = ends.into_iter().zip(&cards).enumerate().map(|(peer, (ends, theirs))| {
        let (theirs, rest) = theirs.as_chunks::<{ Card::BYTES }>();
        let theirs = theirs.get(rank).filter(|_| theirs.len() == size && rest.is_empty());
        let theirs = theirs.ok_or_else(|| {
            let fix = "run the same version and number of ranks everywhere";
            Error::bootstrap(format!("rank {peer}"), "its address table has the wrong size", fix)
        })?;
        let failed = |source| Error::Message { rank: peer, operation: "connect", source };
        let theirs = Card::from_bytes(theirs).map_err(failed)?;
        let way = if peer == rank {
            ends.recv.connect(ends.send.address()).map_err(failed)?;
            ends.send.connect(ends.recv.address()).map_err(failed)?;
            Way::Own
        } else {
            ends.send.connect(theirs.messages).map_err(failed)?;
            ends.credits.connect(theirs.credits).map_err(failed)?;
            Way::Remote { qp: ends.credits, word: theirs.word }
        };
        let word = table.memory().word32(credit::place(peer))?;
        let credits = Credits::new(word, way);
        Ok(Link::new(peer, planes.is_near(peer), [ends.send, ends.recv], most, credits))
    });
    Ok((links.collect::<Result<_>>()?, table))
}
