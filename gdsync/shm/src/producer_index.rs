//! Producer index of a queue, for threads that do not hold the queue's lock.
//!
//! ```text
//! producer, with the lock               reader, without
//!   gap = 1, if requests before this      posted
//!   one were taken back                   gap
//!   posted = number
//! ```
//!
//! *A reader that sees a request behind a gap also sees the gap*, and takes the lock to locate it. A request taken back
//! after the read is still counted.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::{Atom32, Atom64};

/// Stores the number of posted requests; `is_gap` if some before were taken back.
#[inline]
pub fn publish(posted: &impl Atom64, gap: &impl Atom32, number: u64, is_gap: bool) {
    if is_gap {
        gap.store(1, Relaxed);
    }
    posted.store(number, Release);
}

/// Number of posted requests, and whether some may have been taken back.
#[inline]
pub fn read(posted: &impl Atom64, gap: &impl Atom32) -> (u64, bool) {
    let number = posted.load(Acquire);
    (number, gap.load(Relaxed) != 0)
}
