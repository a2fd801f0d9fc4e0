//! Standing orders: work that will come by itself up to some number is looked at until then, and need not be told of while
//! it is.
//!
//! ```text
//! orders                                looks
//!   until = number; if it was more,       reached a number below until? then look on
//!     until = max(until, what it was)     watched = 0
//!   watched? then done                    until beyond the number? then watched = 1: if it was 0, look on
//!   watched = 1: if it was 0, tell
//! ```
//!
//! *No order is lost.* All of these are in one total order. If the look at `watched` comes before its being cleared, the
//! last look at `until` sees the order, or a smaller one of somebody who puts back what it was, and then looks at `watched`
//! himself. If it comes after, it sees 0, or the 1 of somebody who tells or looks on.

use std::sync::atomic::Ordering::SeqCst;

use super::{Atom32, Atom64};

/// Orders work up to `number`. Returns whether the caller must tell.
#[must_use = "nobody looks unless told"]
#[inline]
pub fn order(until: &impl Atom64, watched: &impl Atom32, number: u64) -> bool {
    // Not a maximum: most orders are the largest so far, and to exchange takes the line once, where a maximum reads it first.
    let before = until.swap(number, SeqCst);
    if before > number {
        until.fetch_max(before, SeqCst);
    }
    watched.load(SeqCst) == 0 && watched.swap(1, SeqCst) == 0
}

/// Whether whoever looks must look on, having reached `number`. If not, the next order is told.
#[must_use = "orders to come are not told if this is true"]
pub fn is_due(until: &impl Atom64, watched: &impl Atom32, number: u64) -> bool {
    let more = || until.load(SeqCst) > number;
    if more() {
        return true;
    }
    watched.store(0, SeqCst);
    more() && watched.swap(1, SeqCst) == 0
}
