//! Completions that will never come: of queue pairs that were stopped or reset.

use super::{CqInner, CqState, Taken};
use crate::mlx5::{self, CQE_SIZE, Cqe, CqeOpcode, Syndrome};
use crate::protocol::completion;
use crate::verbs::track::Tracker;

/// Vendor syndrome of completions that the library wrote in place of the device.
pub(crate) const POISON: u8 = 0x67;

impl CqInner {
    /// The queue pair is stopped, and still completion `n` did not come, for which a stream waits: writes one that says
    /// "flushed", as the device should have. Should it come after all, it replaces this one. A device that writes it at the same time
    /// leaves a mix of the two: both say that the request failed, since the queue pair is stopped, and so does the mix.
    pub(crate) fn poison(&self, n: u64, tracker: &Tracker) {
        self.reap();
        let _state = self.state.lock();
        if !tracker.awaited().contains(&n) {
            return;
        }
        let cqe = Cqe {
            opcode: if tracker.is_send { CqeOpcode::REQ_ERR } else { CqeOpcode::RESP_ERR },
            qpn: tracker.qpn,
            wqe_counter: tracker.wqe_counter(n),
            syndrome: Syndrome::WR_FLUSH_ERR,
            vendor: POISON,
            owner: mlx5::lap(n, self.log),
            ..Cqe::default()
        };
        let bytes = cqe.encode();
        let slot = self.index(n) * CQE_SIZE;
        self.parts.ring.write(slot, &bytes[..mlx5::CQE_OP_OWN_OFFSET]).expect("CQEs lie in the ring");
        let word = self.parts.ring.atomic32(slot + mlx5::CQE_OP_OWN_OFFSET).expect("CQE words are aligned");
        completion::publish(word, mlx5::op_own_word(&bytes));
        self.parts.ring.fence();
    }

    /// Takes back the claims of streams that gave up: none is there any more to pass them.
    pub(super) fn abandon(&self, state: &mut CqState) {
        for n in state.freed..state.reaped {
            let slot = &mut state.slots[self.index(n)];
            if matches!(slot.taken, Taken::ByStream | Taken::Covered) {
                slot.taken = Taken::Done;
            }
        }
        for n in state.reaped..state.claim_next {
            state.slots[self.index(n)].taken = Taken::No;
        }
        state.claim_next = state.claim_next.min(state.reaped).max(state.poll_next);
        state.in_stream = 0;
    }

    /// After a queue was reset: forgets its completions, those nobody polled and the `lost` ones that will never come.
    pub(crate) fn forget(&self, tracker: &Tracker, lost: u64) {
        let mut state = self.state.lock();
        self.reap_locked(&mut state);
        if state.attached == 1 {
            self.abandon(&mut state);
        }
        state.is_closed = false;
        self.room.free(lost);
        let CqState { slots, released, freed, reaped, .. } = &mut *state;
        for n in *freed..*reaped {
            let slot = &mut slots[self.index(n)];
            let of_queue =
                slot.wc.is_none_or(|(_, wc)| wc.qpn == tracker.qpn && wc.is_send() == tracker.is_send);
            if slot.taken == Taken::No && of_queue {
                slot.taken = Taken::Done;
            }
        }
        released.retain(|&n| slots[self.index(n)].taken == Taken::No);
        self.free(&mut state);
    }
}
