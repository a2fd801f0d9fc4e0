//! A copy between GPU memory and its [shadow](super::shadow), as the proxy waits for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use smallvec::SmallVec;

use gdsync_device::copy_engine::{Part, Status, Ticket};
use gdsync_device::cuda::Engine;
use gdsync_device::error::Error;

/// How long a copy may take, from when its engine has ended those before it.
const LIMIT: Duration = Duration::from_secs(10);

/// The copies of one message. Clones are of the same ones.
#[derive(Clone, Debug)]
pub(super) struct Copy(Arc<UnderWay>);

#[derive(Debug)]
struct UnderWay {
    /// One for each engine.
    jobs: SmallVec<[(Arc<Engine>, Ticket); 1]>,
    clock: Mutex<Clock>,
}

/// How long nothing has come of it.
#[derive(Clone, Copy, Debug)]
struct Clock {
    /// Copies that its engines have ended.
    ended: u32,
    /// Since when these are all.
    since: Instant,
    is_late: bool,
}

impl Clock {
    /// Looks at how far the engines are. Returns whether they are waited for no more: once they are not, it stays so.
    fn look(&mut self, ended: u32, now: Instant) -> bool {
        if ended != self.ended {
            (self.ended, self.since) = (ended, now);
        }
        self.is_late |= now.saturating_duration_since(self.since) > LIMIT;
        self.is_late
    }
}

fn ended(jobs: &[(Arc<Engine>, Ticket)]) -> u32 {
    // One that has done its part says nothing of the others.
    let owing = jobs.iter().filter(|(_, ticket)| !ticket.is_over());
    owing.fold(0, |sum, (engine, _)| sum.wrapping_add(engine.ended()))
}

impl Copy {
    /// Begins it, each part by the engine of the GPU that it goes from or to.
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

    /// One that does not happen.
    pub(super) fn refused(engine: &Arc<Engine>, why: &str) -> Self {
        let clock = Clock { ended: 0, since: Instant::now(), is_late: false };
        let jobs = SmallVec::from([(engine.clone(), Ticket::failed(why))]);
        Self(Arc::new(UnderWay { jobs, clock: Mutex::new(clock) }))
    }

    fn tickets(&self) -> impl Iterator<Item = &Ticket> {
        self.0.jobs.iter().map(|(_, ticket)| ticket)
    }

    /// Whether the engines touch its bytes no more.
    pub(super) fn has_ended(&self) -> bool {
        self.tickets().all(Ticket::is_over)
    }

    /// Whether it is waited for no more: it has ended, or its time is over.
    pub(super) fn is_over(&self) -> bool {
        self.has_ended() || self.0.clock.lock().look(ended(&self.0.jobs), Instant::now())
    }

    /// Whether its time was over before it ended, which it has not yet.
    pub(super) fn is_stuck(&self) -> bool {
        self.0.clock.lock().is_late && !self.has_ended()
    }

    /// Nobody wants it any more: what has not begun will not happen.
    pub(super) fn give_up(&self) {
        self.tickets().for_each(Ticket::cancel);
    }

    /// Why the bytes are not in place, once it is over.
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
    fn time_in_the_queue_does_not_count_while_the_engine_works() {
        let begin = Instant::now();
        let mut clock = Clock { ended: 7, since: begin, is_late: false };
        let mut look = |ended, seconds| clock.look(ended, begin + Duration::from_secs(seconds));
        assert!((0..12).all(|n| !look(7 + n, 9 * u64::from(n))), "others before it end");
        assert!(!look(18, 109), "ten seconds since the last one was seen");
        assert!(look(18, 110));
        assert!(look(19, 111), "what was told stays so");
    }
}
