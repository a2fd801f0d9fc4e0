//! Hand-overs between software and HCA: WQE, doorbell record and doorbell in one direction, CQE and consumer index in the other.
//!
//! A WQE is visible before the record, and the record before the doorbell (mlx5: `udma_to_device_barrier` before the record,
//! `mmio_wc_start` before the register). The HCA writes the owner bit of a CQE last. Software polls the owner bit, reads the CQE, and
//! advances the consumer index; only then may the slot be reused, for completion `n + 2^log`. Streams do the same with memory operations.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

use super::{Atom32, Atom64};
use mlx5_ring::EMPTY;

/// Publishes the producer index, then writes the doorbell. The WQEs must be written. `fence` orders a record in GPU
/// memory before the doorbell.
pub fn ring_doorbell(
    record: &impl Atom32,
    pi: u32,
    fence: impl FnOnce(),
    doorbell: &impl Atom64,
    value: u64,
) {
    record.store(pi, Release);
    fence();
    doorbell.store(value, Release);
}

/// Producer index in a queue pair's doorbell record. WQEs before it may be read, rung or not.
pub fn recorded(record: &impl Atom32) -> u16 {
    mlx5_ring::record_to_u16(record.load(Acquire))
}

/// Whether a doorbell is set. A hint: earlier writes are not visible yet.
pub fn is_rung(doorbell: &impl Atom64) -> bool {
    doorbell.load(Relaxed) != EMPTY
}

/// HCA: takes the doorbell rung since the last call, if any.
///
/// An exchange, because two equal doorbells in a row must both be seen. Doorbells are cumulative, so overwriting one
/// loses nothing.
pub fn take_doorbell(doorbell: &impl Atom64) -> Option<u64> {
    if !is_rung(doorbell) {
        return None;
    }
    let value = doorbell.swap(EMPTY, Acquire);
    (value != EMPTY).then_some(value)
}

/// HCA: wants a call for receives whose producer index its next read of the record does not see.
pub fn request_calls<A: Atom32>(calls: &A) {
    calls.store(1, Relaxed);
    A::fence(SeqCst);
}

/// Software: whether the HCA wants a call for receives whose producer index was just stored. If not, its next read sees that index:
/// of the two fences, the second one's thread loads what the first one's thread stored.
#[must_use = "the HCA may never look at the receives"]
#[inline]
pub fn wants_calls<A: Atom32>(calls: &A) -> bool {
    A::fence(SeqCst);
    calls.load(Relaxed) != 0
}

/// HCA: publishes a CQE whose other bytes are written.
pub fn publish_cqe(word: &impl Atom32, op_own_word: u32) {
    word.store(op_own_word, Release);
}

/// Whether completion `n` (from 0) of a queue with `2^log` slots is in its slot and may be read.
pub fn is_complete(word: &impl Atom32, n: u64, log: u32) -> bool {
    mlx5_ring::owned_by_software(word.load(Acquire), n, log)
}

/// Software: frees the slots of all completions before `ci`, which have been read.
pub fn free_slots(record: &impl Atom32, ci: u64) {
    record.store(mlx5_ring::cq_ci_record(ci), Release);
}

/// Number of freed slots; `last` is the caller's previous value.
pub fn freed_slots(record: &impl Atom32, last: u64) -> u64 {
    mlx5_ring::extend24(last, mlx5_ring::record_to_u24(record.load(Acquire)))
}
