//! REMOVE

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use smallvec::SmallVec;

use gdsync_device::copy_engine::{Part, Status, Ticket};
use gdsync_device::cuda::Engine;
use gdsync_device::error::Error;

/// Time limit of a copy, counted from the end of the copies before it.
const LIMIT: Duration = Duration::from_secs(10);

/// The copies of one message. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct Copy(Arc<UnderWay>);

#[derive(Debug)]
struct UnderWay {
    /// One for each engine.
    jobs: SmallVec<[(Arc<Engine>, Ticket); 1]>,
    clock: Mutex<Clock>,
}

/// Detects that copies make no progress.
#[derive(Clone, Copy, Debug)]
struct Clock {
    /// Copies ended by the engines.
    ended: u32,
    /// Time of the last change.
    since: Instant,
    is_late: bool,
}

impl Clock {
    /// Updates with the number of ended copies. Returns whether the limit is exceeded; this is final.
    fn look(&mut self, ended: u32, now: Instant) -> bool {
        if ended != self.ended {
            (self.ended, self.since) = (ended, now);
        }
        self.is_late |= now.saturating_duration_since(self.since) > LIMIT;
        self.is_late
    }
}

fn ended(jobs: &[(Arc<Engine>, Ticket)]) -> u32 {
    // Failed tickets say nothing of the others.
    let owing = jobs.iter().filter(|(_, ticket)| !ticket.is_over());
    owing.fold(0, |sum, (engine, _)| sum.wrapping_add(engine.ended()))
}

impl Copy {
    /// Starts each part on the engine of its source or destination GPU.
    pub(super) fn start(parts: impl Iterator<Item = (Arc<Engine>, Part)>) -> Self {
        let mut lists: SmallVec<[(Arc<Engine>, Vec<Part>); 1]> = SmallVec::new();
        for (engine, part) in parts.filter(|(_, part)| part.len > 0) {
            match lists.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &engine)) {
                Some((_, list)) => list.push(part),
                None => lists.push((engine, vec![part])),
            }
        }
        let start = |(engine, list): (Arc<Engine>, _)| {
            let ticket = engine.copy(list);
            (engine, ticket)
        };
        let jobs: SmallVec<_> = lists.into_iter().map(start).collect();
        let clock = Clock { ended: ended(&jobs), since: Instant::now(), is_late: false };
        Self(Arc::new(UnderWay { jobs, clock: Mutex::new(clock) }))
    }

    /// A copy that failed from the start.
    pub(super) fn refused(engine: &Arc<Engine>, why: &str) -> Self {
        let clock = Clock { ended: 0, since: Instant::now(), is_late: false };
        let jobs = SmallVec::from([(engine.clone(), Ticket::failed(why))]);
        Self(Arc::new(UnderWay { jobs, clock: Mutex::new(clock) }))
    }

    fn tickets(&self) -> impl Iterator<Item = &Ticket> {
        self.0.jobs.iter().map(|(_, ticket)| ticket)
    }

    /// Whether the engines no longer access its memory.
    pub(super) fn has_ended(&self) -> bool {
        self.tickets().all(Ticket::is_over)
    }

    /// Whether it ended or exceeded its limit.
    pub(super) fn is_over(&self) -> bool {
        self.has_ended() || self.0.clock.lock().look(ended(&self.0.jobs), Instant::now())
    }

    /// Whether it exceeded its limit and has not ended.
    pub(super) fn is_stuck(&self) -> bool {
        self.0.clock.lock().is_late && !self.has_ended()
    }

    /// Cancels what has not begun.
    pub(super) fn give_up(&self) {
        self.tickets().for_each(Ticket::cancel);
    }

    /// Why it failed, once it is over.
    pub(super) fn failure(&self, device: &str) -> Option<Error> {
        let ticket = self.tickets().find(|ticket| ticket.status() != Status::Done)?;
        let why = match ticket.status() {
            Status::Failed => ticket.failure().unwrap_or("its copy failed").to_owned(),
            _ => format!(
                "its GPU has ended no copy within {LIMIT:?}. Until it ends this one it may still write there: the memory is kept, \
                 requests and resets that concern it are refused. See `dmesg` (Xid) for what ails the GPU"
            ),
        };
        let why = format!("payload in GPU memory is staged in host memory, and cannot be: {why}");
        Some(Error::Device { device: device.to_owned(), why })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_in_queue_does_not_count_while_engine_progresses() {
        let begin = Instant::now();
        let mut clock = Clock { ended: 7, since: begin, is_late: false };
        let mut look = |ended, seconds| clock.look(ended, begin + Duration::from_secs(seconds));
        assert!((0..12).all(|n| !look(7 + n, 9 * u64::from(n))), "others before it end");
        assert!(!look(18, 109), "ten seconds since the last one was seen");
        assert!(look(18, 110));
        assert!(look(19, 111), "what was told stays so");
    }
}
