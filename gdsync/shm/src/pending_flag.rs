//! Pending flag: leaves work to the holder of a lock, without waiting for the lock.
//!
//! ```text
//! leaves work                           holds the lock
//!   store the work                        flag set? clear it, do the work
//!   flag = 1                              unlock
//!   fence(SeqCst)                         fence(SeqCst)
//!   try to lock: done if that fails       flag set? then try to lock, and from the start
//! ```
//!
//! *No flag is lost.* The fences are totally ordered. If the holder's is second, it sees the flag, or the 0 of a thread
//! that cleared it. If it is first, the other side finds the lock free, or held by a thread whose fence is still to
//! come; so does a holder that sees the flag but cannot lock again. After the last of these fences nobody is left to
//! rely on.
//!
//! *The flag changes only by read-modify-write*: whoever clears it synchronizes with everybody that set it, and sees
//! all their work.

use std::sync::atomic::Ordering::{AcqRel, Relaxed, SeqCst};

use super::Atom32;

/// Sets the flag for work stored before. The caller must then try to lock, and if it succeeds call [`unlock`].
pub fn set<W: Atom32>(flag: &W) {
    flag.swap(1, AcqRel);
    W::fence(SeqCst);
}

/// Whether the flag is set; to be called after unlocking.
pub fn is_set<W: Atom32>(flag: &W) -> bool {
    W::fence(SeqCst);
    flag.load(Relaxed) != 0
}

/// Clears the flag. If it was set, the caller, who holds the lock, must do all stored work.
#[must_use = "there is work to do if the flag was set"]
pub fn take(flag: &impl Atom32) -> bool {
    flag.load(Relaxed) != 0 && flag.swap(0, AcqRel) != 0
}

/// Unlocks, and locks again for `work` while the flag is set and the lock is free. `work` must [`take`] the flag.
#[inline]
pub fn unlock<G>(
    flag: &impl Atom32,
    held: G,
    try_lock: impl Fn() -> Option<G>,
    mut work: impl FnMut(&mut G),
) {
    drop(held);
    while is_set(flag) {
        let Some(mut again) = try_lock() else { return };
        work(&mut again);
    }
}
