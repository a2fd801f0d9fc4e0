//! CQE hand-over from the HCA to software, and the return of its slot.
//!
//! The HCA writes the CQE and the owner bit last. Software polls the owner bit, reads the CQE, and advances the
//! consumer index. Only then may the slot be reused, for completion `n + 2^log`.
//!
//! A stream does the same with its memory operations: it waits on the owner bit and writes the consumer index.

use std::sync::atomic::Ordering::{Acquire, Release};

use super::Atom32;

/// HCA: publishes a CQE whose other bytes are written.
pub fn publish(word: &impl Atom32, op_own_word: u32) {
    word.store(op_own_word, Release);
}

/// Whether completion `n` (from 0) of a queue with `2^log` slots is in its slot and may be read.
pub fn is_complete(word: &impl Atom32, n: u64, log: u32) -> bool {
    mlx5_ring::owned_by_software(word.load(Acquire), n, log)
}

/// Software: frees the slots of all completions before `ci`, which have been read.
pub fn free(record: &impl Atom32, ci: u64) {
    record.store(mlx5_ring::cq_ci_record(ci), Release);
}

/// Number of freed slots; `last` is the caller's previous value.
pub fn freed(record: &impl Atom32, last: u64) -> u64 {
    mlx5_ring::extend24(last, mlx5_ring::record_to_u24(record.load(Acquire)))
}
