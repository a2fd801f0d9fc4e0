//! Doorbell watch: while a poller watches a doorbell up to number N, producers below N need not notify it.
//!
//! ```text
//! producer                              poller
//!   until = number; if it was more,       reached a number below until? then poll on
//!     until = max(until, what it was)     watched = 0
//!   fence(SeqCst)                         fence(SeqCst)
//!   watched? then done                    until beyond the number? then watched = 1: if it was 0, poll on
//!   watched = 1: if it was 0, notify
//! ```
//!
//! *No request is lost.* The fences are totally ordered. If the producer's is first, the poller's last load of `until`
//! sees its number, or a smaller one of a producer that restores the maximum and then reads `watched` itself. If it is
//! second, the load of `watched` sees 0, or the 1 of a thread that notifies or polls on.
//!
//! A producer with a lock under which numbers only grow needs no exchange: it calls [`publish`] under the lock, and
//! later [`is_watched`] tells whether that is enough. [`withdraw`] takes back a number that will not come, if it is
//! still the last.
//!
//! A poller that polls rarely may clear `watched` at any time: the next producer notifies it.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};

use super::{Atom32, Atom64};

/// Requests polling up to `number`. Returns whether the caller must notify the poller.
#[must_use = "the poller sleeps unless notified"]
#[inline]
pub fn request<A: Atom32>(until: &impl Atom64, watched: &A, number: u64) -> bool {
    // Not a maximum: most numbers are the largest so far, and an exchange takes the cache line once, where a maximum
    // loads it first.
    let before = until.swap(number, AcqRel);
    if before > number {
        until.fetch_max(before, AcqRel);
    }
    A::fence(SeqCst);
    watched.load(Relaxed) == 0 && watched.swap(1, AcqRel) == 0
}

/// Requests polling up to `number`, the largest so far, under the lock that orders the numbers.
#[inline]
pub fn publish(until: &impl Atom64, number: u64) {
    until.store(number, Relaxed);
}

/// Whether the poller watches the number passed to [`publish`]. If not, the caller must [`request`] it.
#[must_use = "the poller sleeps unless notified"]
#[inline]
pub fn is_watched<A: Atom32>(watched: &A) -> bool {
    A::fence(SeqCst);
    watched.load(Relaxed) != 0
}

/// Takes back the last [`publish`], unless `until` has changed since.
pub fn withdraw(until: &impl Atom64, number: u64, before: u64) {
    // A failed exchange means that a later request counts.
    let _ = until.compare_exchange(number, before, AcqRel, Relaxed);
}

/// Poller: whether to poll on after reaching `number`. If not, the next producer notifies.
#[must_use = "producers do not notify while this is true"]
pub fn must_poll<A: Atom32>(until: &impl Atom64, watched: &A, number: u64) -> bool {
    let more = || until.load(Acquire) > number;
    if more() {
        return true;
    }
    watched.store(0, Release);
    A::fence(SeqCst);
    more() && watched.swap(1, AcqRel) == 0
}
