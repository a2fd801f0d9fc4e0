//! How the queue pairs of all ranks find each other.

use std::sync::Arc;
use std::time::Duration;

use gdsync::mlx5::RemoteAddr;
use gdsync::verbs::{Access, Pd, QpAddress, QpBuilder};

use crate::bootstrap::Exchange;
use crate::communicator::Registration;
use crate::credit::{self, Credits, Way};
use crate::ends::{ACK_TIMEOUT, Ends, row};
use crate::error::{Error, Result};
use crate::link::{Link, Most};
use crate::path::{self, Planes};
use crate::watch::Alarm;

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

/// Makes queue pairs with room for `most` messages to each rank by `build` and connects them with those of the other ranks.
/// The region must live as long as the links: it has the words that the others write.
pub(crate) fn connect(
    planes: &mut Planes,
    bootstrap: &mut dyn Exchange,
    most: Most,
    build: impl Fn(&Pd) -> QpBuilder,
    alarm: &Arc<Alarm>,
    timeout: Duration,
) -> Result<(Vec<Link>, Registration)> {
    let (rank, size) = (bootstrap.rank(), bootstrap.size());
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let table = path::register(&planes.far.pd, planes.near.as_ref(), &credit::table(size)?, access)?;
    let ends = (0..size)
        .map(|peer| {
            let pd = planes.pd(peer);
            let queues = pd.build_qp().max_send_wr(most.depth).max_recv_wr(1).max_inline(credit::BYTES);
            let credits = queues.timeout(ACK_TIMEOUT).build()?;
            Ok((Ends::build(peer == rank, || build(pd))?, credits))
        })
        .collect::<Result<Vec<_>>>()?;
    let mut cards = Vec::with_capacity(size * Card::BYTES);
    for (peer, (messages, credits)) in ends.iter().enumerate() {
        let word = table.on(planes.is_near(peer)).remote(credit::place(peer))?;
        let card = Card { messages: messages.address(), credits: credits.address(), word };
        cards.extend(card.to_bytes());
    }
    let cards = bootstrap.allgather(&cards, timeout)?;
    let links = ends.into_iter().zip(&cards).enumerate().map(|(peer, ((messages, credits), theirs))| {
        let failed = |source| Error::Message { rank: peer, operation: "connect", source };
        let theirs = Card::from_bytes(row(theirs, peer, rank, size)?).map_err(failed)?;
        messages.name_ranks(rank, peer);
        credits.name_ranks(rank, peer);
        messages.connect(theirs.messages).map_err(failed)?;
        let way = match peer == rank {
            true => Way::Own,
            false => {
                credits.connect(theirs.credits).map_err(failed)?;
                Way::Remote { qp: credits, word: theirs.word }
            }
        };
        let credits = Credits::new(table.memory(), peer, way, alarm.clone())?;
        let slots = planes.slots.get_mut(peer).and_then(Option::take);
        Ok(Link::new(peer, planes.is_near(peer), messages, most, credits, slots))
    });
    Ok((links.collect::<Result<_>>()?, table))
}
