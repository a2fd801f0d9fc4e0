//! Completions that a stream has passed: the CPU takes note of them without looking at each.
//!
//! A look at a ring in GPU memory takes a microsecond, and one elsewhere a line from another core. Once a queue pair has
//! failed, all its completions are errors: where the last of several is none, those before are none either.

use std::sync::atomic::Ordering;

use super::{CqInner, CqState, SlotOwner};
use gdsync_shm::completion;
use mlx5_ring::{CQE_SIZE, Cqe};

impl CqInner {
    /// Reads completion `n`, which has arrived and whose slot cannot be used again now.
    pub(crate) fn cqe(&self, n: u64) -> Cqe {
        if self.has_lost.load(Ordering::Acquire)
            && let Some(cqe) = self.lost(n)
        {
            return cqe;
        }
        let mut bytes = [0; CQE_SIZE];
        self.parts.ring.read(self.index(n) * CQE_SIZE, &mut bytes).expect("CQEs lie in the ring");
        Cqe::decode(&bytes)
    }

    /// Takes note of completions that a stream has passed, if the last of them is a success. What they say is read when
    /// somebody asks.
    pub(super) fn skip_passed(&self, state: &mut CqState) {
        let [queue] = &*state.queues else { return };
        if state.in_stream == 0 || state.attached != 1 || !queue.may_skip(self.capacity()) {
            return;
        }
        state.passed = completion::passed(self.consumed.atomic(), state.passed);
        let by_stream =
            |n: &u64| matches!(state.slots[self.index(*n)].taken, SlotOwner::ByStream | SlotOwner::Covered);
        let end = (state.reaped..state.passed).find(|n| !by_stream(n)).unwrap_or(state.passed);
        if end < state.reaped + 2 || !self.has_arrived(end - 1) {
            return;
        }
        if queue.skip(state.reaped..end, &self.cqe(end - 1)) {
            for n in state.reaped..end {
                state.slots[self.index(n)].wc = None;
            }
            state.reaped = end;
        }
    }
}
