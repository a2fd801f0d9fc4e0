//! Callers that wait: for submissions to be over, for room, for the end.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::plan;
use super::shared::{Shared, SubmitGuard};
use gdsync_device::error::{Error, Result};
use gdsync_shm::{Backoff, nap};

/// How long a caller spins for a completion before it sleeps.
const CALLER_SPIN: Duration = Duration::from_micros(20);
/// The shortest sleep of a caller for whom a late look costs nothing.
const IDLE_NAP: Duration = Duration::from_micros(50);
/// The longest sleep of a caller between two looks.
const CALLER_NAP: Duration = Duration::from_millis(1);

impl Shared {
    /// Blocks a caller until a submission is over, or the deadline. What made it end early is known by then.
    pub(super) fn wait_completed(&self, seq: u64, deadline: Instant) -> bool {
        // With work behind it nothing is lost by a late look.
        let spin = if seq < self.submitted() { Duration::ZERO } else { CALLER_SPIN };
        if !self.block(deadline, spin, || self.completed() >= seq) {
            return false;
        }
        // Another thread may still be telling the sources, or be about to let go what was held: memory and queue pairs.
        let is_told = || !self.failed() || self.released.load(Ordering::Acquire);
        self.block_until(deadline, || is_told() && self.has_let_go())
    }

    /// Blocks a caller until `done`, or the deadline.
    pub(super) fn block_until(&self, deadline: Instant, done: impl Fn() -> bool) -> bool {
        self.block(deadline, CALLER_SPIN, done)
    }

    /// As [`Shared::block_until`]; it spins for `spin` before it sleeps, and sleeps shorter if it does.
    fn block(&self, deadline: Instant, spin: Duration, done: impl Fn() -> bool) -> bool {
        let least = if spin.is_zero() { IDLE_NAP } else { CALLER_SPIN };
        if done() {
            return true;
        }
        self.put_mark();
        let start = Instant::now();
        let backoff = Backoff::since(start, spin);
        loop {
            if done() {
                return true;
            }
            let now = Instant::now();
            if now >= deadline {
                return false;
            }
            let waited = now - start;
            if !backoff.spin_after(waited) {
                // The end of a stream that has failed is near, however long it was held.
                let most = if self.failed() { IDLE_NAP } else { CALLER_NAP };
                std::thread::sleep(nap(waited, least..=most).min(deadline - now));
            }
        }
    }

    /// Refuses what a submission of so many operations and host functions would be refused for.
    pub(super) fn ask_room(&self, turn: &mut SubmitGuard, ops: usize, host_fns: usize) -> Result<()> {
        if self.failed() {
            return Err(self.why_failed());
        }
        // More than it takes in all, by this count: then it must be dry, and need not be dryer.
        let calls = plan::most_calls(ops, host_fns, self.by_kernel()).min(self.config.depth);
        let mut state = self.lock();
        self.end_row(turn, &mut state);
        let done = self.retire(&mut state);
        if self.full(&state, calls, host_fns) {
            return Err(self.no_room(turn, state, (calls, host_fns)));
        }
        drop(state);
        drop(done);
        Ok(())
    }

    pub(super) fn has_room(&self) -> bool {
        let mut state = self.lock();
        let done = self.retire(&mut state);
        let (calls, host_fns) = state.wanted;
        let room = !self.full(&state, calls.max(1), host_fns);
        let pool = state.wanted_pool.clone();
        drop(state);
        drop(done);
        room && pool.and_then(|pool| pool.upgrade()).is_none_or(|pool| pool.is_free())
    }

    /// The last handle is gone.
    pub(super) fn close(&self) {
        if self.completed() < self.submitted() {
            self.put_mark();
            // Most streams are synchronized before they are dropped; then this finds them done.
            if !self.block_until(Instant::now() + CALLER_NAP, || self.completed() >= self.submitted()) {
                self.fail(Error::StreamAborted { stream: self.config.name.clone() });
            }
        }
        let _state = self.lock();
        self.closing.store(true, Ordering::Release);
        self.work.notify_one();
    }
}
