//! The end of a communicator: what is still under way with other ranks, and `finalize`, which waits for it and names it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::peer::{Peer, Unfinished};
use crate::rma_queue::RmaQueues;
use crate::wait::{Deadline, back_off};

/// How long sends that no stream waits for may take to be received once all ranks finalize: no rank posts receives by the CPU then.
const UNRECEIVED: Duration = Duration::from_secs(1);

/// What a rank tells the others, with the milliseconds that it has left.
const NOTHING: u8 = 0;
const MESSAGES: u8 = 1;
const STREAMS: u8 = 2;

/// Sizes of messages, the first few of many.
fn sizes(all: &[usize]) -> String {
    const SHOWN: usize = 4;
    let shown: Vec<_> = all.iter().take(SHOWN).map(usize::to_string).collect();
    format!("{}{} bytes", shown.join(", "), if all.len() > SHOWN { ", ..." } else { "" })
}

/// So many of these.
fn count(all: &[usize], what: &str) -> String {
    format!("{} {what}{}", all.len(), if all.len() == 1 { "" } else { "s" })
}

fn describe(rank: usize, unfinished: &Unfinished) -> Vec<String> {
    let Unfinished { sends, unread, is_awaited } = unfinished;
    let mut parts = Vec::new();
    if !sends.is_empty() {
        parts.push(format!("{} to rank {rank} ({}) not received there", count(sends, "send"), sizes(sends)));
    }
    if !unread.is_empty() {
        parts.push(format!(
            "{} from rank {rank} ({}) not received here",
            count(unread, "message"),
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
        let of = |peer: &std::sync::Arc<Peer>| (peer.rank(), peer.unfinished());
        self.0.peers.iter().map(of).filter(|(_, unfinished)| !unfinished.is_empty()).collect()
    }

    /// Meets all ranks, and waits for what is under way on any.
    fn leave(&self, deadline: &Deadline) -> Result<()> {
        // What others sent before they came is here then. Also, the exchange notices ranks that are in another call.
        self.barrier(deadline.remaining())?;
        self.progress();
        let unfinished = self.unfinished();
        let state = match unfinished.iter().any(|(_, one)| one.is_awaited) {
            true => STREAMS,
            false if unfinished.is_empty() => NOTHING,
            false => MESSAGES,
        };
        let millis = u32::try_from(deadline.remaining().as_millis()).unwrap_or(u32::MAX);
        let told = [&[state][..], &millis.to_le_bytes()].concat();
        let states = self.exchange(&told, deadline.remaining())?;
        let (mut state, mut millis) = (state, millis);
        for (rank, theirs) in states.iter().enumerate() {
            let [theirs, left @ ..] = <[u8; 5]>::try_from(&theirs[..]).map_err(|_| {
                let what = "is in a call of all ranks while this one is in finalize";
                Error::bootstrap(
                    format!("rank {rank}"),
                    what,
                    "let all ranks make the same calls, in one order",
                )
            })?;
            (state, millis) = (state.max(theirs), millis.min(u32::from_le_bytes(left)));
        }
        // All ranks wait as long as the one with the least time left.
        let remaining = Duration::from_millis(millis.into());
        let limit = match state {
            NOTHING => return Ok(()),
            // The rest is for the ranks to meet again.
            MESSAGES => UNRECEIVED.min(remaining / 2),
            _ => remaining / 4 * 3,
        };
        let limit = Deadline::after(limit);
        let left = loop {
            let has_progressed = self.run_devices();
            self.progress();
            let left = self.unfinished();
            if left.is_empty() || limit.is_over() {
                break left;
            }
            if !has_progressed {
                back_off(limit.elapsed(), limit.remaining());
            }
        };
        // A rank that leaves ends what the others still do with it.
        let met = self.barrier(deadline.remaining());
        match left.iter().flat_map(|(rank, one)| describe(*rank, one)).collect::<Vec<_>>() {
            parts if parts.is_empty() => met,
            parts => Err(Error::Unfinished { what: parts.join("; "), after: limit.limit() }),
        }
    }

    /// Waits for the operations of windows, for all ranks, for what is still sent and for streams that wait for other ranks, then for
    /// the processes that [`CommunicatorBuilder::spawn`](crate::CommunicatorBuilder::spawn) started. If one of them fails, the others
    /// have two seconds to say what they have seen, and are killed then.
    ///
    /// Once all ranks have called it, sends that nobody receives have a second, and streams three quarters of the time that is left to
    /// the rank with the least. Receives of the CPU that got no message are dropped. Messages that nobody received are named, but for
    /// tagged ones, which [`Tagged::destroy`](crate::tagged::Tagged::destroy) names, and those of streams that have failed.
    ///
    /// All ranks call it before they end. A process that drops its communicator instead, while ranks that it has started work, says so
    /// on standard error and ends its connections. It waits for them, as long as
    /// [`CommunicatorBuilder::timeout`](crate::CommunicatorBuilder::timeout), then kills them, and names them. It exits with 1 if
    /// one was killed or has failed.
    ///
    /// # Errors
    /// [`Error::Message`] for an operation on a window that failed, unless a call on that window has reported it; [`Error::Bootstrap`]
    /// and [`Error::Deadline`] as [`Communicator::barrier`]; [`Error::Unfinished`] names messages that were not received, and streams
    /// that still wait; [`Error::Child`] for a process that failed.
    pub fn finalize(self, timeout: impl Into<Option<Duration>>) -> Result<()> {
        let deadline = Deadline::after(self.limit(timeout));
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
