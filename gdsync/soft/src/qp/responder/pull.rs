//! Payload in host memory of the peer's process: read from there, and partly written from there by the peer meanwhile, a round
//! in each step, so that nobody waits long for the HCA.
//!
//! Between two CPUs one copy of a long message takes as long as two that overlap. So in each round the second half is
//! [offered](crate::offers) to the peer: it writes while this side reads. What it has not claimed when this side is done
//! with the first half is taken back, and makes the next round: a peer that sleeps holds nobody up, and one that comes late
//! still helps.
//!
//! *What the peer has claimed it may write at any time until it says that it is done*, 20 to 50 us later unless it is stopped
//! (by a debugger, by SIGSTOP) or dies. Until then the copy is under way for everybody: its message does not complete and is not
//! flushed, its [`Ticket`](gdsync_device::copy_engine::Ticket) holds up whoever deregisters the region, resets or destroys the queue pair.
//! These wait for a limited time, and so does whoever waits for a completion. A peer that has ended [writes no
//! more](crate::links::Links::is_quiet). A queue pair that is destroyed all the same leaves the memory behind: it is never
//! freed. Memory that is only lent to this library is its owner's to keep: the log says so when its region went too early.
//!
//! The peer is told addresses inside of buffers that were checked against the receive or the key, and nothing else.

use std::io;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use crate::offers::Offer;
use crate::packet::{Header, PacketOp};
use crate::qp::Env;
use crate::reference::Reference;
use gdsync_device::copy_engine::FRESH;
use gdsync_device::memory::{Memory, Process, host_page};
use gdsync_shm::offer::Outcome;

/// Bytes of a round that this side does alone: 20 to 50 us.
const ALONE: usize = 512 << 10;
/// Bytes of a round that both sides share: 40 to 80 us, in which this one has the lock of the HCA.
const SHARED: usize = 2 << 20;
/// Less is not worth an offer: 64 KiB took 12 us with one, and 10 without.
const LEAST: usize = 128 << 10;
/// What this side reads more than the peer writes, which begins later: after a packet.
const LEAD: usize = 32 << 10;

/// A copy under way.
#[derive(Debug)]
pub(super) struct Pull {
    of: Process,
    /// What comes next there.
    from: u64,
    /// Where the rest goes: memory, first byte, length.
    to: SmallVec<[(Memory, usize, usize); 1]>,
    /// Bytes so far.
    done: usize,
    began: Option<Instant>,
    /// What the peer may be writing.
    claimed: Option<Claim>,
    /// Why it ends when the peer has done its part.
    ended: Option<io::Error>,
}

/// What the peer does of the bytes that come next.
#[derive(Clone, Copy, Debug)]
struct Claim {
    /// Of the offer.
    number: u64,
    len: usize,
    since: Instant,
}

/// How far it is.
#[derive(Debug)]
pub(super) enum Progress {
    /// There is more to copy.
    More,
    /// The peer is at it.
    Theirs,
    /// All is copied. How long it took.
    Over(Duration),
}

/// The peer, as a copy sees it.
#[derive(Debug)]
pub(super) struct Peer<'a, 'e> {
    pub(super) env: &'a mut Env<'e>,
    pub(super) link: usize,
    /// For offers.
    pub(super) header: Header,
    /// Packets sent.
    pub(super) packets: &'a mut u64,
}

impl Peer<'_, '_> {
    /// Offers `len` bytes of the message, from `skip` on, that go to this address. Returns the number of the offer.
    fn offer(&mut self, skip: usize, len: usize, to: u64) -> Option<u64> {
        let env = &mut *self.env;
        let number = env.links.offers(self.link)?.make()?;
        let len = u32::try_from(len).expect("a round is short");
        let header = Header { op: PacketOp::OFFER, len, ..self.header };
        let body = Offer { number, skip: skip as u64, to: Reference::to_host(to) }.to_bytes();
        // Without room it is not heard of, and taken back.
        if env.links.send(self.link, &header, &body, &[], *self.packets, env.faults, env.stats) {
            *self.packets += 1;
        }
        if env.faults.pause() > Duration::ZERO {
            env.links.ring();
            env.links.offers(self.link)?.await_claim(number, env.faults.pause());
        }
        Some(number)
    }

    fn settle(&mut self, number: u64) -> Outcome {
        let gone = self.env.links.is_quiet(self.link);
        match self.env.links.offers(self.link).map_or(Outcome::Refused, |offers| offers.settle(number)) {
            Outcome::Theirs if gone => Outcome::Refused,
            outcome => outcome,
        }
    }
}

impl Pull {
    pub(super) fn new(of: Process, from: u64, to: SmallVec<[(Memory, usize, usize); 1]>) -> Self {
        Self { of, from, to, done: 0, began: None, claimed: None, ended: None }
    }

    /// Copies the next round, or looks whether the peer is done with its part of the last.
    pub(super) fn go_on(&mut self, peer: &mut Peer<'_, '_>) -> io::Result<Progress> {
        let began = *self.began.get_or_insert_with(Instant::now);
        let offered = match self.claimed {
            None => self.read_round(peer)?,
            claimed => claimed,
        };
        if let Some(offered) = offered {
            let outcome = peer.settle(offered.number);
            self.claimed = (outcome == Outcome::Theirs).then_some(offered);
            match (outcome, self.ended.take()) {
                (Outcome::Theirs, ended) => {
                    self.ended = ended;
                    return Ok(Progress::Theirs);
                }
                (_, Some(error)) => return Err(error),
                (Outcome::Done, None) => self.pass(offered.len),
                (Outcome::Ours | Outcome::Refused, None) => {}
            }
        }
        Ok(if self.to.is_empty() { Progress::Over(began.elapsed()) } else { Progress::More })
    }

    /// It is not wanted any more.
    pub(super) fn give_up(&mut self) {
        self.ended = Some(io::Error::other("it was given up"));
    }

    /// Whether the peer has had its part for long.
    pub(super) fn is_late(&self) -> bool {
        self.claimed.is_some_and(|claim| claim.since.elapsed() > FRESH)
    }

    /// Offers the second half of the next round, or a little less, and reads the rest; without an offer, that is all.
    fn read_round(&mut self, peer: &mut Peer<'_, '_>) -> io::Result<Option<Claim>> {
        if let Some(error) = self.ended.take() {
            return Err(error);
        }
        let Some((memory, at, len)) = self.to.first() else { return Ok(None) };
        let (round, start) = (SHARED.min(*len), memory.host_addr(*at).filter(|_| *len >= LEAST));
        let offered = start.and_then(|start| {
            // A share begins with a page, so that both sides do not meet in one.
            let middle = (start + ((round + LEAD) / 2) as u64).next_multiple_of(host_page() as u64);
            let first = usize::try_from(middle - start).ok()?;
            let len = round.checked_sub(first).filter(|&len| len > 0)?;
            let number = peer.offer(self.done + first, len, middle)?;
            Some((first, Claim { number, len, since: Instant::now() }))
        });
        let Some((first, claim)) = offered else { return self.read(ALONE.min(*len)).map(|()| None) };
        // If it fails, it ends when the offer is over.
        self.ended = self.read(first).err();
        Ok(Some(claim))
    }

    /// Reads the next bytes, which have one place.
    fn read(&mut self, len: usize) -> io::Result<()> {
        let Some((memory, at, _)) = self.to.first() else { return Ok(()) };
        memory.pull(*at, len, &self.of, self.from)?;
        self.pass(len);
        Ok(())
    }

    /// The next bytes, which have one place, are there.
    fn pass(&mut self, len: usize) {
        self.from += len as u64;
        self.done += len;
        let Some((_, at, left)) = self.to.first_mut() else { return };
        (*at, *left) = (*at + len, *left - len);
        if *left == 0 {
            self.to.remove(0);
        }
    }
}

impl Drop for Pull {
    fn drop(&mut self) {
        if self.claimed.is_some() {
            tracing::error!(
                "memory of a queue pair that was destroyed is kept: the process at the other end has begun to write \
                 there, and does not go on"
            );
            // Never freed: see above.
            std::mem::forget(std::mem::take(&mut self.to));
        }
    }
}
