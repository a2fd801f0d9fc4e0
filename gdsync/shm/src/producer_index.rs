//! How far a queue is posted, for those who do not take its lock.
//!
//! ```text
//! posts, with the lock                  looks, without
//!   gap = 1, if requests were taken       posted
//!   back that others are behind           gap
//!   posted = number
//! ```
//!
//! *Who sees a request that was posted behind a gap sees the gap*, and takes the lock to find out where it is. Only a request that was
//! taken back after it was seen is seen as it was before.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::{Atom32, Atom64};

/// Notes how many requests are posted, and with `is_gap` that some before were taken back.
#[inline(always)]
pub fn tell(posted: &impl Atom64, gap: &impl Atom32, number: u64, is_gap: bool) {
    if is_gap {
        gap.store(1, Relaxed);
    }
    posted.store(number, Release);
}

/// How many are posted, and whether some may have been taken back.
#[inline(always)]
pub fn look(posted: &impl Atom64, gap: &impl Atom32) -> (u64, bool) {
    let number = posted.load(Acquire);
    (number, gap.load(Relaxed) != 0)
}
