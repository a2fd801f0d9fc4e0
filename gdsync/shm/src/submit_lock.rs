//! Requests to the holder of a lock that may be held for long: a flag asks the holder to do the work on unlock.
//!
//! ```text
//! requests                              unlocks
//!   requested = 1                         requested? then requested = 0, do the work
//!   fence(SeqCst)                         unlock
//!   while requested, and the lock is free:  as the other side from its second line on
//!     requested = 0, do the work, unlock
//!     fence(SeqCst)
//! ```
//!
//! *No request is lost.* The fences are totally ordered. If the fence after an unlock is first, the other side finds
//! the lock free, or held by a thread whose fence is still to come; otherwise the load after it sees the flag. The flag
//! is cleared before the work begins, so a request during the work causes another round.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::Atom32;

/// Unlocks, and does the work that others requested meanwhile.
#[inline]
pub fn unlock<W: Atom32, G>(
    requested: &W,
    mut guard: G,
    try_lock: impl Fn() -> Option<G>,
    mut work: impl FnMut(&mut G),
) {
    if requested.load(Relaxed) != 0 {
        requested.store(0, Relaxed);
        work(&mut guard);
    }
    drop(guard);
    // Requested since then, by a thread that found the lock taken.
    if is_requested(requested) {
        retry(requested, try_lock, work);
    }
}

/// Requests the work: does it now, or leaves it to the holder of the lock.
pub fn request<W: Atom32, G>(requested: &W, try_lock: impl Fn() -> Option<G>, work: impl FnMut(&mut G)) {
    requested.store(1, Relaxed);
    retry(requested, try_lock, work);
}

#[inline]
fn is_requested<W: Atom32>(requested: &W) -> bool {
    W::fence(SeqCst);
    requested.load(Relaxed) != 0
}

#[cold]
fn retry<W: Atom32, G>(requested: &W, try_lock: impl Fn() -> Option<G>, mut work: impl FnMut(&mut G)) {
    while is_requested(requested)
        && let Some(mut guard) = try_lock()
    {
        requested.store(0, Relaxed);
        work(&mut guard);
    }
}
