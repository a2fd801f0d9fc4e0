//! The end of a communicator: what is still under way with other ranks, and `finalize`, which waits for it and names it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gdsync::shm::back_off;

use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::exchange::{CommonCall, take};
use crate::peer::{Peer, Unfinished};
use crate::rma_queue::RmaQueues;
use crate::wait::Deadline;

/// How long sends that no stream waits for may take to be received once all ranks finalize: no rank posts receives by the CPU then.
const UNRECEIVED: Duration = Duration::from_secs(1);

/// What a rank tells the others, with the milliseconds that it has left.
const NOTHING: u8 = 0;
const MESSAGES: u8 = 1;
const STREAMS: u8 = 2;
/// Work that no stream has got: nothing of it will come.
const UNSUBMITTED: u8 = 3;

/// What a rank tells another one of tagged messages: how many it has sent to it, and received from it.
const TAGGED_BYTES: usize = 20;

/// Sizes of messages, the first few of many.
fn sizes(all: &[usize]) -> String {
    const SHOWN: usize = 4;
    let shown: Vec<_> = all.iter().take(SHOWN).map(usize::to_string).collect();
    format!("{}{} bytes", shown.join(", "), if all.len() > SHOWN { ", ..." } else { "" })
}

/// So many of these.
fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

fn describe(rank: usize, unfinished: &Unfinished) -> Vec<String> {
    let Unfinished { sends, unread, is_awaited, has_unsubmitted } = unfinished;
    let mut parts = Vec::new();
    if *has_unsubmitted {
        // Its sends and waits are among the others.
        return vec![format!(
            "a capture that has not ended, or a batch not submitted, has work with rank {rank}"
        )];
    }
    if !sends.is_empty() {
        parts.push(format!(
            "{} to rank {rank} ({}) not received there",
            count(sends.len(), "send"),
            sizes(sends)
        ));
    }
    if !unread.is_empty() {
        parts.push(format!(
            "{} from rank {rank} ({}) not received here",
            count(unread.len(), "message"),
            sizes(unread)
        ));
    }
    if *is_awaited {
        parts.push(format!("work of a stream that waits for rank {rank}"));
    }
    parts
}

impl Communicator {
    fn unfinished(&self) -> Vec<(usize, Unfinished)> {
        let of = |peer: &Arc<Peer>| (peer.rank(), peer.unfinished());
        self.0.peers.iter().map(of).filter(|(_, unfinished)| !unfinished.is_empty()).collect()
    }

    /// What this rank tells the others of tagged messages: of each rank, if there were any.
    fn tagged(&self) -> Vec<u8> {
        let counts = |peer: &Arc<Peer>| {
            let [sent, received] =
                [&peer.tagged.sent, &peer.tagged.received].map(|n| n.load(Ordering::Relaxed));
            let rank = u32::try_from(peer.rank()).unwrap_or(u32::MAX);
            let is_any = sent + received > 0 && !peer.transport.has_ended();
            is_any.then(|| [&rank.to_le_bytes()[..], &sent.to_le_bytes(), &received.to_le_bytes()].concat())
        };
        self.0.peers.iter().filter_map(counts).flatten().collect()
    }

    /// Names the tagged messages with a rank, which has told `counts`, that no receive has taken.
    fn tagged_left(&self, rank: usize, counts: &[u8]) -> Vec<String> {
        let (rows, _) = counts.as_chunks::<TAGGED_BYTES>();
        let row = rows.iter().find_map(|row| {
            let rest = &mut &row[..];
            let to = u32::from_le_bytes(take(rest)) as usize;
            (to == self.rank()).then(|| [take(rest), take(rest)].map(u64::from_le_bytes))
        });
        // A rank that has exchanged none tells nothing.
        let [sent, received] = row.unwrap_or_default();
        let Some(peer) = self.0.peers.get(rank).filter(|peer| !peer.transport.has_ended()) else {
            return Vec::new();
        };
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let left = |more: u64, less: u64| usize::try_from(more.saturating_sub(less)).unwrap_or(usize::MAX);
        let to = left(of(&peer.tagged.sent), received);
        let from = left(sent, of(&peer.tagged.received));
        let mut parts = Vec::new();
        if to > 0 {
            parts.push(format!("{} to rank {rank} not received there", count(to, "tagged message")));
        }
        if from > 0 && rank != self.rank() {
            parts.push(format!("{} from rank {rank} not received here", count(from, "tagged message")));
        }
        parts
    }

    /// Meets all ranks, and waits for what is under way on any.
    fn leave(&self, deadline: &Deadline) -> Result<()> {
        // What others sent before they came is here then. Also, the exchange notices ranks that are in another call.
        let tell = |bytes: &[u8]| self.lock_exchange(deadline)?.allgather(bytes, deadline.remaining());
        self.lock_exchange(deadline)?.barrier(deadline.remaining())?;
        self.progress();
        let unfinished = self.unfinished();
        let any = |is: fn(&Unfinished) -> bool| unfinished.iter().any(|(_, one)| is(one));
        let state = match () {
            () if any(|one| one.has_unsubmitted) => UNSUBMITTED,
            () if any(|one| one.is_awaited) => STREAMS,
            () if unfinished.is_empty() => NOTHING,
            () => MESSAGES,
        };
        let millis = u32::try_from(deadline.remaining().as_millis()).unwrap_or(u32::MAX);
        let told = [&[state][..], &millis.to_le_bytes(), &self.tagged()].concat();
        let states = tell(&told)?;
        let (mut state, mut millis, mut parts) = (state, millis, Vec::new());
        for (rank, theirs) in states.iter().enumerate() {
            let (&[theirs, ref left @ ..], tagged) = theirs.split_first_chunk::<5>().ok_or_else(|| {
                let what = "it is in another call of all ranks than finalize";
                Error::bootstrap(
                    format!("rank {rank}"),
                    what,
                    "let all ranks make the same calls, in one order",
                )
            })?;
            (state, millis) = (state.max(theirs), millis.min(u32::from_le_bytes(*left)));
            parts.extend(self.tagged_left(rank, tagged));
        }
        // All ranks wait as long as the one with the least time left.
        let remaining = Duration::from_millis(millis.into());
        let limit = match state {
            NOTHING | UNSUBMITTED => Duration::ZERO,
            // The rest is for the ranks to meet again.
            MESSAGES => UNRECEIVED.min(remaining / 2),
            _ => remaining / 4 * 3,
        };
        let limit = Deadline::after(limit);
        let mut met = Ok(true);
        if state != NOTHING {
            let left = self.wait_unfinished(&limit);
            parts.extend(left.iter().flat_map(|(rank, one)| describe(*rank, one)));
            // A rank that leaves ends what the others still do with it.
            met = tell(&[u8::from(left.is_empty())]).map(|all| all.iter().all(|done| done[..] == [1]));
        }
        // Ranks with something left may still receive it.
        self.0.is_over.store(matches!(met, Ok(true)), Ordering::Relaxed);
        parts.extend(unfinished.iter().filter_map(|(rank, _)| {
            let why = self.0.peers[*rank].given_up_by_stream()?;
            Some(format!("messages with rank {rank}: {why}"))
        }));
        match parts.is_empty() {
            true => met.map(drop),
            false => {
                let after = if limit.limit().is_zero() { Duration::ZERO } else { limit.elapsed() };
                Err(Error::Unfinished { what: parts.join("; "), after })
            }
        }
    }

    /// Returns what is still under way at the limit.
    fn wait_unfinished(&self, limit: &Deadline) -> Vec<(usize, Unfinished)> {
        loop {
            let has_progressed = self.run_devices();
            self.progress();
            let left = self.unfinished();
            if left.is_empty() || limit.is_over() {
                return left;
            }
            if !has_progressed {
                back_off(limit.elapsed(), limit.remaining());
            }
        }
    }

    /// Waits for the operations of windows, for all ranks, for what is still sent and for streams that wait for other ranks, then for
    /// the processes that [`CommunicatorBuilder::spawn`](crate::CommunicatorBuilder::spawn) started. If one of them fails, the others
    /// have two seconds to say what they have seen, and are killed then.
    ///
    /// Once all ranks have called it, sends that nobody receives have a second, and streams three quarters of the time that is left to
    /// the rank with the least; nothing is waited for while a capture has not ended, or a batch not submitted, that has work with a
    /// rank. Receives of the CPU that got no message are dropped. Messages that nobody received are named: those of
    /// the communicator, tagged ones, and those of streams that stop waiting for a rank meanwhile. Collectives and windows need not be
    /// destroyed before; their operations are complete afterwards. Once it has returned well at all ranks, nothing more can be
    /// started, also through clones of the communicator, and launches of graphs with channels are refused.
    ///
    /// All ranks call it before they end. A process that drops its communicator instead, while ranks that it has started work, says so
    /// on standard error and ends its connections. It waits for them, as long as
    /// [`CommunicatorBuilder::timeout`](crate::CommunicatorBuilder::timeout), then kills them, and names them. It exits with 1 if
    /// one was killed or has failed.
    ///
    /// # Errors
    /// [`Error::Message`] for an operation on a window that failed, unless a call on that window has reported it; [`Error::Bootstrap`]
    /// and [`Error::Deadline`] as [`Communicator::barrier`]; [`Error::Unfinished`] names messages that were not received, and streams
    /// that still wait or give up meanwhile; [`Error::Child`] for a process that failed.
    pub fn finalize(self, timeout: impl Into<Option<Duration>>) -> Result<()> {
        self.0.fork_guard.check()?;
        let (_call, deadline) = (CommonCall::Finalize.enter(), Deadline::after(self.limit(timeout)));
        self.0.children.is_finalized.store(true, Ordering::Relaxed);
        let flushed = RmaQueues::finish_all(&self.0.rma, &deadline);
        // The others need not wait for a rank that this one cannot reach.
        let (met, unfinished) = match self.leave(&deadline) {
            Err(error @ Error::Unfinished { .. }) => (Ok(()), Err(error)),
            other => (other, Ok(())),
        };
        flushed.and(met).map_err(|error| match &mut *self.0.children.lock() {
            Some(children) => children.explain(error),
            None => error,
        })?;
        let ended = match self.0.children.lock().take() {
            Some(children) => children.wait(deadline.remaining()),
            None => Ok(()),
        };
        unfinished.and(ended)
    }
}
