//! Spin lock for short, mostly uncontended sections: unlock is a release store, waiters poll and are never woken.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::Atom32;

/// Takes the lock if it is free.
#[inline]
pub fn try_take(taken: &impl Atom32) -> bool {
    taken.swap(1, Acquire) == 0
}

/// Takes the lock. `rest` pauses between polls; its argument counts the pauses. It must not wait for a wake-up.
#[inline]
pub fn take(taken: &impl Atom32, rest: impl FnMut(u32)) {
    if !try_take(taken) {
        wait(taken, rest);
    }
}

#[cold]
#[inline(never)]
fn wait(taken: &impl Atom32, mut rest: impl FnMut(u32)) {
    let mut rests = 0;
    // Polls with loads, so the holder keeps the cache line.
    while taken.load(Relaxed) != 0 || !try_take(taken) {
        rest(rests);
        rests = rests.saturating_add(1);
    }
}

/// Releases the lock, which the caller holds.
#[inline]
pub fn give(taken: &impl Atom32) {
    taken.store(0, Release);
}
