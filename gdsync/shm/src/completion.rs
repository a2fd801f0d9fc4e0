//! A completion goes from the HCA to software, and its slot comes back.
//!
//! The HCA writes the bytes of a CQE and then the word with the owner bit. Software sees that word turn, reads the
//! bytes, and moves the consumer index past them: only then may the slot be written again, for completion `n + 2^log`.
//!
//! A stream does the same with the operations it has: it waits on the word and writes the consumer index.

use std::sync::atomic::Ordering::{Acquire, Release};

use super::Atom32;

/// The HCA publishes a CQE whose other bytes it has written.
pub fn publish(word: &impl Atom32, op_own_word: u32) {
    word.store(op_own_word, Release);
}

/// Whether completion `n` (from 0) of a queue with `2^log` slots is in its slot, so that its bytes may be read.
pub fn is_complete(word: &impl Atom32, n: u64, log: u32) -> bool {
    mlx5_ring::owned_by_software(word.load(Acquire), n, log)
}

/// Software gives back the slots of all completions before `ci`, whose bytes it has read.
pub fn pass(record: &impl Atom32, ci: u64) {
    record.store(mlx5_ring::cq_ci_record(ci), Release);
}

/// The completions that were passed, `last` being what the caller knew of it: their slots may be written again.
pub fn passed(record: &impl Atom32, last: u64) -> u64 {
    mlx5_ring::extend24(last, mlx5_ring::record_to_u24(record.load(Acquire)))
}
