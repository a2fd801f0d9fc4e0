//! What others want of whoever has the turn, which is a lock that may be held for long: they leave it to the holder.
//!
//! ```text
//! wants                                 ends the turn
//!   wanted = 1                            wanted? then wanted = 0, do the work
//!   fence(SeqCst)                         unlock
//!   while wanted, and the lock is free:   as the other side from its second line on
//!     wanted = 0, do the work, unlock
//!     fence(SeqCst)
//! ```
//!
//! *Nothing wanted is lost.* The fences are totally ordered. If the one behind an unlock comes first, the other side finds the lock
//! free, or taken by somebody whose fence is still to come; else the load behind it sees what is wanted. What is wanted is all that
//! was there when it was: so it is taken back before the work begins, and who wants it meanwhile has it done again.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::Atom32;

/// Ends a turn, and does what others wanted meanwhile.
#[inline(always)]
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
    // Wanted since then, by somebody who found the turn taken.
    if is_wanted(wanted) {
        retry(wanted, try_lock, work);
    }
}

/// Wants the work done, by this thread or by whoever has the turn.
pub fn want<W: Atom32, G>(wanted: &W, try_lock: impl Fn() -> Option<G>, work: impl FnMut(&mut G)) {
    wanted.store(1, Relaxed);
    retry(wanted, try_lock, work);
}

#[inline(always)]
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
