//! Records in shared memory that one thread writes and another process may copy out at any time, without a lock.
//!
//! ```text
//! writer                                reader, twice
//!   check = 0                             data
//!   fence(Release)                        fence(Acquire)
//!   data                                  check
//!   check = its number, Release           both the same, and the check not 0: it is whole
//! ```
//!
//! *What is accepted is whole.* The first copy ends with the check of a record, so the second has the data of that record or
//! of a later one. Of a later one, it would find the check that was taken away before.

use std::sync::atomic::Ordering::{Relaxed, Release};

use super::Atom64;

/// Writes a record over the one that was there. The last value is its check: not 0, and another one than before.
#[inline]
pub fn write<W: Atom64, const N: usize>(words: &[W; N], values: [u64; N]) {
    words[N - 1].store(0, Relaxed);
    W::fence(Release);
    for (word, value) in words.iter().zip(values).take(N - 1) {
        word.store(value, Relaxed);
    }
    words[N - 1].store(values[N - 1], Release);
}

/// The record that was copied out twice, if it is whole.
pub fn settled<const N: usize>(first: [u64; N], second: [u64; N]) -> Option<[u64; N]> {
    (first == second && first[N - 1] != 0).then_some(second)
}
