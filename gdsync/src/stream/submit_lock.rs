//! The turn of a stream: who has it submits, and calls the driver for it.
//!
//! It is held from the check of a batch until the engine has queued it: another thread's submission between would ring
//! doorbells backwards. What others find due meanwhile, as a mark of the stream, they leave to whoever has the turn.

use std::sync::atomic::AtomicU32;
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};

use super::State;
use gdsync_shm::submit_lock;

/// Whose turn it is. One for each stream, which its engine shares.
#[derive(Default)]
pub(super) struct SubmitLock {
    state: Mutex<State>,
    /// Something is due that somebody wanted who did not have the turn.
    wanted: AtomicU32,
}

impl SubmitLock {
    /// Waits for the turn. It must be ended by [`SubmitLock::end`].
    #[inline(always)]
    pub(super) fn take(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// As [`SubmitLock::take`], if nobody has it.
    pub(super) fn try_take(&self) -> Option<MutexGuard<'_, State>> {
        self.state.try_lock()
    }

    /// As [`SubmitLock::take`], until the deadline.
    pub(super) fn take_until(&self, deadline: Instant) -> Option<MutexGuard<'_, State>> {
        self.state.try_lock_until(deadline)
    }

    /// Ends a turn, and does what others wanted meanwhile.
    #[inline(always)]
    pub(super) fn end<'a>(&'a self, turn: MutexGuard<'a, State>, wanted: impl Fn(&mut State)) {
        submit_lock::end(&self.wanted, turn, || self.try_take(), |state| wanted(state));
    }

    /// Wants something done, by this thread or by whoever has the turn.
    pub(super) fn want(&self, wanted: impl Fn(&mut State)) {
        submit_lock::want(&self.wanted, || self.try_take(), |state| wanted(state));
    }
}
