//! The turn of a stream: who has it submits, and calls the driver for it.
//!
//! It is held from the check of a batch until the engine has queued it: another thread's submission between would ring
//! doorbells backwards. What others find due meanwhile, as a mark of the stream, they leave to whoever has the turn.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};

use super::State;

/// Whose turn it is. One for each stream, which its engine shares.
#[derive(Default)]
pub(super) struct Turns {
    state: Mutex<State>,
    /// Something is due that somebody wanted who did not have the turn.
    wanted: AtomicBool,
}

impl Turns {
    /// Waits for the turn. It must be ended by [`Turns::end`].
    #[inline(always)]
    pub(super) fn take(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// As [`Turns::take`], if nobody has it.
    pub(super) fn try_take(&self) -> Option<MutexGuard<'_, State>> {
        self.state.try_lock()
    }

    /// As [`Turns::take`], until the deadline.
    pub(super) fn take_until(&self, deadline: Instant) -> Option<MutexGuard<'_, State>> {
        self.state.try_lock_until(deadline)
    }

    /// Ends a turn, and does what others wanted meanwhile.
    #[inline(always)]
    pub(super) fn end<'a>(&'a self, mut turn: MutexGuard<'a, State>, wanted: impl Fn(&mut State)) {
        if self.wanted.load(Ordering::Relaxed) {
            self.wanted.store(false, Ordering::Relaxed);
            wanted(&mut turn);
        }
        drop(turn);
        // Wanted since then, by somebody who found the turn taken. If this misses it, the watchdog does not.
        if self.wanted.load(Ordering::SeqCst) {
            self.retry(wanted);
        }
    }

    #[cold]
    fn retry(&self, wanted: impl Fn(&mut State)) {
        while self.wanted.load(Ordering::SeqCst)
            && let Some(mut turn) = self.state.try_lock()
        {
            self.wanted.store(false, Ordering::Relaxed);
            wanted(&mut turn);
        }
    }

    /// Wants something done, by this thread or by whoever has the turn.
    pub(super) fn want(&self, wanted: impl Fn(&mut State)) {
        self.wanted.store(true, Ordering::SeqCst);
        self.retry(wanted);
    }
}
