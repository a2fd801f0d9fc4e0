//! Seqlock: one writer, readers in other processes, no lock.
//!
//! ```text
//! writer                                reader, twice
//!   check = 0                             data
//!   fence(Release)                        fence(Acquire)
//!   data                                  check
//!   check = its number, Release           both the same, and the check not 0: it is whole
//! ```
//!
//! *An accepted record is whole.* The first copy ends with a record's check, so the second copy holds the data of that
//! record or of a later one. If it were of a later one, the check would have been cleared before.

use std::sync::atomic::Ordering::{Relaxed, Release};

use super::Atom64;

/// Writes a record. The last value is its check: not 0, and different from the previous one.
#[inline]
pub fn write<W: Atom64, const N: usize>(words: &[W; N], values: [u64; N]) {
    words[N - 1].store(0, Relaxed);
    W::fence(Release);
    for (word, value) in words.iter().zip(values).take(N - 1) {
        word.store(value, Relaxed);
    }
    words[N - 1].store(values[N - 1], Release);
}

/// The record, if both copies agree and are whole.
pub fn accept<const N: usize>(first: [u64; N], second: [u64; N]) -> Option<[u64; N]> {
    (first == second && first[N - 1] != 0).then_some(second)
}
