//! What others want of whoever has the turn, which is a lock that may be held for long: they leave it to the holder.
//!
//! ```text
//! wants                                 ends the turn
//!   wanted = 1                            wanted? then wanted = 0, do the work
//!   while wanted, and the lock is free:   unlock
//!     wanted = 0, do the work, unlock     as the other side from its second line on
//! ```
//!
//! *Nothing wanted is lost.* The store and the loads of `wanted` behind an unlock are in one total order. If the load comes first,
//! the other side finds the lock free, or taken by somebody whose load is still to come; else it sees what is wanted. What is wanted
//! is all that was there when it was: so it is taken back before the work begins, and who wants it meanwhile has it done again.
//!
//! For that neither the unlock may be put off behind the load, nor the store behind the look at the lock, as they are not where both
//! are read-modify-writes of x86, which the model assumes. Elsewhere what is wanted may lie until the next turn, so somebody must
//! look now and then who does not rely on this: of a stream the watchdog.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::Atom32;

/// Ends a turn, and does what others wanted meanwhile.
#[inline(always)]
pub fn end<G>(
    wanted: &impl Atom32,
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
    if wanted.load(SeqCst) != 0 {
        retry(wanted, try_lock, work);
    }
}

/// Wants the work done, by this thread or by whoever has the turn.
pub fn want<G>(wanted: &impl Atom32, try_lock: impl Fn() -> Option<G>, work: impl FnMut(&mut G)) {
    wanted.store(1, SeqCst);
    retry(wanted, try_lock, work);
}

#[cold]
fn retry<G>(wanted: &impl Atom32, try_lock: impl Fn() -> Option<G>, mut work: impl FnMut(&mut G)) {
    while wanted.load(SeqCst) != 0
        && let Some(mut turn) = try_lock()
    {
        wanted.store(0, Relaxed);
        work(&mut turn);
    }
}
