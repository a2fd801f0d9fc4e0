//! Completions that will never come: of queue pairs that were stopped or reset.

//!
//! The library writes one in their place, or streams would wait for ever. The device's own may still come, at any moment, and is never
//! overwritten: only the word with the owner bit is exchanged, and only while the device has not written it. The rest of such a completion is
//! kept beside the ring.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{CqInner, CqState, SlotOwner};
use crate::verbs::track::Tracker;
use gdsync_device::error::{Error, Result};
use mlx5_ring::{self as mlx5, Cqe, CqeOpcode, Syndrome};

/// Vendor syndrome of completions that the library wrote in place of the device.
const POISON: u8 = 0x67;
/// How long nothing may come, of a queue pair in ERR whose doorbell was rung, before the device is taken to owe nothing more.
const QUIET: Duration = Duration::from_secs(2);

/// A completion in place of the device's.
#[derive(Debug)]
pub(super) struct FlushCqe {
    n: u64,
    /// What its last word is as long as the device has not written there: with a counter that the device does not give this request.
    word: u32,
    cqe: Cqe,
}

impl CqInner {
    /// The queue pair is stopped, and still completion `n` did not come, for which a stream waits: puts one there that says
    /// "flushed", as the device should have. Should it come after all, it replaces this one.
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
        let marked = Cqe { wqe_counter: !cqe.wqe_counter, ..cqe };
        let word = mlx5::op_own_word(&marked.encode());
        let place = self.last_word(n);
        let mut lost = self.lost.lock();
        lost.push(FlushCqe { n, word, cqe });
        self.has_lost.store(true, Ordering::Release);
        let unless_here = |found| (!mlx5::owned_by_software(found, n, self.log)).then_some(word);
        if place.fetch_update(Ordering::AcqRel, Ordering::Acquire, unless_here).is_err() {
            lost.pop();
        }
        drop(lost);
        self.parts.ring.fence();
    }

    /// Completion `n`, if it is one in place of the device's, which has not come.
    pub(super) fn lost(&self, n: u64) -> Option<Cqe> {
        let lost = self.lost.lock();
        let found = lost.iter().find(|lost| lost.n == n)?;
        (self.last_word(n).load(Ordering::Acquire) == found.word).then_some(found.cqe)
    }

    /// Completions that the device still owes.
    fn owed(&self) -> usize {
        let mut lost = self.lost.lock();
        lost.retain(|lost| self.last_word(lost.n).load(Ordering::Acquire) == lost.word);
        self.has_lost.store(!lost.is_empty(), Ordering::Release);
        lost.len()
    }

    /// The queue pair is in ERR and is to be reset: waits until the device has completed all in whose place the library did. The next
    /// completion belongs behind those.
    ///
    /// # Errors
    /// [`Error::Deadline`] when nothing comes for a while: the device completes the next request where nobody looks for it.
    pub(crate) fn settle(&self) -> Result<()> {
        let mut owed = (self.owed(), Instant::now());
        while owed.0 > 0 {
            if owed.1.elapsed() >= QUIET {
                let what = "the card's completion of what was posted before the reset; destroy the queue pair instead: it";
                return Err(Error::Deadline { what, after: QUIET });
            }
            std::thread::sleep(Duration::from_micros(50));
            let now = self.owed();
            if now != owed.0 {
                owed = (now, Instant::now());
            }
        }
        Ok(())
    }

    /// Whether another queue pair may complete here.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where the device owes completions: it would write the next one where nobody looks for it.
    pub(crate) fn check_settled(&self) -> Result<()> {
        if self.owed() == 0 {
            return Ok(());
        }
        let value = format!(
            "CQ {:#x}, to which the device owes completions of a queue pair that was stopped",
            self.cqn()
        );
        Err(Error::invalid(
            "completion queue",
            value,
            "another one, or this one once that queue pair was reset",
        ))
    }

    /// Takes back the claims of streams that gave up: none is there any more to pass them.
    pub(super) fn abandon(&self, state: &mut CqState) {
        for n in state.freed..state.reaped {
            let slot = &mut state.slots[self.index(n)];
            if matches!(slot.taken, SlotOwner::ByStream | SlotOwner::Covered) {
                slot.taken = SlotOwner::Done;
            }
        }
        for n in state.reaped..state.claim_next {
            state.slots[self.index(n)].taken = SlotOwner::No;
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
        // The device has begun anew.
        self.lost.lock().retain(|lost| lost.cqe.qpn != tracker.qpn);
        let CqState { slots, released, freed, reaped, .. } = &mut *state;
        for n in *freed..*reaped {
            let slot = &mut slots[self.index(n)];
            let of_queue =
                slot.wc.is_none_or(|(_, wc)| wc.qpn == tracker.qpn && wc.is_send() == tracker.is_send);
            if slot.taken == SlotOwner::No && of_queue {
                slot.taken = SlotOwner::Done;
            }
        }
        released.retain(|&n| slots[self.index(n)].taken == SlotOwner::No);
        self.free(&mut state);
    }
}
