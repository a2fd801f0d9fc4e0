//! Flush CQEs that the library writes for requests of stopped or reset queue pairs that the device never completes.
//!
//! Without them, streams would wait forever. The device's CQE may still arrive and is never overwritten: only the owner
//! word is exchanged, and only while the device has not written it. The rest of the flush CQE is kept outside the ring.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{CqInner, CqState, Slot};
use crate::verbs::track::Tracker;
use gdsync_device::error::{Error, Result};
use mlx5_ring::{self as mlx5, Cqe, CqeOpcode, Syndrome};

/// Vendor syndrome of flush CQEs written by the library.
const FLUSH_VENDOR: u8 = 0x67;
/// A device in ERR whose doorbell was rung owes no more CQEs after this time without one.
const FLUSH_QUIET: Duration = Duration::from_secs(2);

/// A flush CQE in place of the device's.
#[derive(Debug)]
pub(super) struct FlushCqe {
    n: u64,
    /// Its owner word while the device has not written the slot. The counter differs from any that the device gives
    /// this request.
    word: u32,
    cqe: Cqe,
}

impl CqInner {
    /// Writes a flush CQE for completion `n` of a stopped queue pair, for which a stream waits. A late CQE of the
    /// device replaces it.
    pub(crate) fn write_flush_cqe(&self, n: u64, tracker: &Tracker) {
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
            vendor: FLUSH_VENDOR,
            owner: mlx5::lap(n, self.log),
            ..Cqe::default()
        };
        let marked = Cqe { wqe_counter: !cqe.wqe_counter, ..cqe };
        let word = mlx5::op_own_word(&marked.encode());
        let place = self.last_word(n);
        let mut lost = self.flushed.lock();
        lost.push(FlushCqe { n, word, cqe });
        self.has_flushed.store(true, Ordering::Release);
        let unless_here = |found| (!mlx5::owned_by_software(found, n, self.log)).then_some(word);
        if place.fetch_update(Ordering::AcqRel, Ordering::Acquire, unless_here).is_err() {
            lost.pop();
        }
        drop(lost);
        self.parts.ring.fence();
    }

    /// The flush CQE of completion `n`, if the device has not replaced it.
    pub(super) fn flush_cqe(&self, n: u64) -> Option<Cqe> {
        let lost = self.flushed.lock();
        let found = lost.iter().find(|lost| lost.n == n)?;
        (self.last_word(n).load(Ordering::Acquire) == found.word).then_some(found.cqe)
    }

    /// Number of flush CQEs that the device has not replaced.
    fn owed(&self) -> usize {
        let mut lost = self.flushed.lock();
        lost.retain(|lost| self.last_word(lost.n).load(Ordering::Acquire) == lost.word);
        self.has_flushed.store(!lost.is_empty(), Ordering::Release);
        lost.len()
    }

    /// Waits until the device has replaced all flush CQEs. Called in ERR before a reset: the device writes its next CQE
    /// after those.
    ///
    /// # Errors
    /// [`Error::Deadline`] when the device stops completing: its next CQE would then be in the wrong slot.
    pub(crate) fn wait_flushed(&self) -> Result<()> {
        let mut owed = (self.owed(), Instant::now());
        while owed.0 > 0 {
            if owed.1.elapsed() >= FLUSH_QUIET {
                let awaited = format!(
                    "{} completions that the device owes CQ {:#x}; destroy the queue pair instead",
                    owed.0,
                    self.cqn()
                );
                return Err(Error::late("flushing the requests from before the reset", FLUSH_QUIET, awaited));
            }
            std::thread::sleep(Duration::from_micros(50));
            let now = self.owed();
            if now != owed.0 {
                owed = (now, Instant::now());
            }
        }
        Ok(())
    }

    /// Checks that another queue pair may use this completion queue.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the device owes CQEs: it would write the next one to the wrong slot.
    pub(crate) fn check_flushed(&self) -> Result<()> {
        if self.owed() == 0 {
            return Ok(());
        }
        let value =
            format!("CQ {:#x}, to which the device owes completions of a stopped queue pair", self.cqn());
        Err(Error::invalid(
            "completion queue",
            value,
            "another one, or this one after a reset of that queue pair",
        ))
    }

    /// Releases the claims of failed streams, which will not pass them.
    pub(super) fn release_abandoned(&self, state: &mut CqState) {
        for n in state.freed..state.claim_next {
            let slot = &mut state.slots[self.index(n)];
            if let Slot::Claimed { .. } = slot {
                *slot = if n < state.reaped { Slot::Taken } else { Slot::Open };
            }
        }
        state.claim_next = state.claim_next.min(state.reaped).max(state.poll_next);
        state.in_stream = 0;
    }

    /// Discards, after a reset, the queue's unpolled completions and the `lost` ones that never arrive.
    pub(crate) fn discard(&self, tracker: &Tracker, lost: u64) {
        let mut state = self.state.lock();
        self.reap_locked(&mut state);
        if state.attached == 1 {
            self.release_abandoned(&mut state);
            // A stream may have passed completions that never come.
            state.passed = self.passed(state.passed).min(state.reaped);
            gdsync_shm::free_slots(self.consumed.atomic(), state.passed);
        }
        state.is_closed = false;
        self.room.free(lost);
        // The device owes nothing after a reset.
        self.flushed.lock().retain(|lost| lost.cqe.qpn != tracker.qpn);
        for n in state.freed..state.reaped {
            let slot = &mut state.slots[self.index(n)];
            if let Slot::Arrived((_, wc)) = slot
                && wc.qpn == tracker.qpn
                && wc.is_send() == tracker.is_send
            {
                *slot = Slot::Taken;
            }
        }
        self.free(&mut state);
    }
}
