//! Requests to the holder of a lock that may be held for long: a flag asks the holder to do the work on unlock.
//!
//! ```text
//! wants                                 unlocks
//!   wanted = 1                            wanted? then wanted = 0, do the work
//!   fence(SeqCst)                         unlock
//!   while wanted, and the lock is free:   as the other side from its second line on
//!     wanted = 0, do the work, unlock
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
pub fn end<W: Atom32, G>(
    wanted: &W,
    mut turn: G,
    try_lock: impl Fn() -> Option<G>,
    mut work: impl FnMut(&mut G),
) {
    if wanted.load(Relaxed) != 0 {
        wanted.store(0, Relaxed);
        work(&mut turn);
    }
    drop(turn);
    // Requested since then, by a thread that found the lock taken.
    if is_wanted(wanted) {
        retry(wanted, try_lock, work);
    }
}

/// Requests the work: does it now, or leaves it to the holder of the lock.
pub fn want<W: Atom32, G>(wanted: &W, try_lock: impl Fn() -> Option<G>, work: impl FnMut(&mut G)) {
    wanted.store(1, Relaxed);
    retry(wanted, try_lock, work);
}

#[inline]
fn is_wanted<W: Atom32>(wanted: &W) -> bool {
    W::fence(SeqCst);
    wanted.load(Relaxed) != 0
}

#[cold]
fn retry<W: Atom32, G>(wanted: &W, try_lock: impl Fn() -> Option<G>, mut work: impl FnMut(&mut G)) {
    while is_wanted(wanted)
        && let Some(mut turn) = try_lock()
    {
        wanted.store(0, Relaxed);
        work(&mut turn);
    }
}
