//! Standing orders: work that will come by itself up to some number is looked at until then, and need not be told of while
//! it is.
//!
//! ```text
//! orders                                looks
//!   until = number; if it was more,       reached a number below until? then look on
//!     until = max(until, what it was)     watched = 0
//!   fence(SeqCst)                         fence(SeqCst)
//!   watched? then done                    until beyond the number? then watched = 1: if it was 0, look on
//!   watched = 1: if it was 0, tell
//! ```
//!
//! *No order is lost.* The fences are totally ordered. If the one of the order comes first, the last look at `until` sees the order,
//! or a smaller one of somebody who puts back what it was, and then looks at `watched` himself. If it comes second, the look at
//! `watched` sees 0, or the 1 of somebody who tells or looks on.
//!
//! Who has a lock under which numbers only grow can order without an exchange: [`foresee`]s under the lock, and later
//! [`is_looked_at`] says whether that will do. What was foreseen and will not come is taken back by [`withdraw`], while it keeps the
//! number.
//!
//! Who looks only now and then can clear `watched` at any time: then the next order is told.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};

use super::{Atom32, Atom64};

/// Orders work up to `number`. Returns whether the caller must tell.
#[must_use = "nobody looks unless told"]
#[inline]
pub fn order<A: Atom32>(until: &impl Atom64, watched: &A, number: u64) -> bool {
    // Not a maximum: most orders are the largest so far, and to exchange takes the line once, where a maximum reads it first.
    let before = until.swap(number, AcqRel);
    if before > number {
        until.fetch_max(before, AcqRel);
    }
    A::fence(SeqCst);
    watched.load(Relaxed) == 0 && watched.swap(1, AcqRel) == 0
}

/// Has work looked at up to `number`, which is larger than all before, under the lock that makes it so.
#[inline(always)]
pub fn foresee(until: &impl Atom64, number: u64) {
    until.store(number, Relaxed);
}

/// Whether what the caller foresaw is looked at. If not, he orders it.
#[must_use = "nobody looks unless told"]
#[inline(always)]
pub fn is_looked_at<A: Atom32>(watched: &A) -> bool {
    A::fence(SeqCst);
    watched.load(Relaxed) != 0
}

/// Takes back what was foreseen, unless there are further orders by now: then those count.
pub fn withdraw(until: &impl Atom64, number: u64, before: u64) {
    // Nobody need know.
    let _ = until.compare_exchange(number, before, AcqRel, Relaxed);
}

/// Whether whoever looks must look on, having reached `number`. If not, the next order is told.
#[must_use = "orders to come are not told if this is true"]
pub fn is_due<A: Atom32>(until: &impl Atom64, watched: &A, number: u64) -> bool {
    let more = || until.load(Acquire) > number;
    if more() {
        return true;
    }
    watched.store(0, Release);
    A::fence(SeqCst);
    more() && watched.swap(1, AcqRel) == 0
}
