//! A lock that is held for moments: to let it go is one store.
//!
//! Nobody is told that it is free. Who finds it taken looks again after a rest, and a rest must end by itself.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::Atom32;

/// Takes the lock if it is free.
#[inline(always)]
pub fn try_take(taken: &impl Atom32) -> bool {
    taken.swap(1, Acquire) == 0
}

/// Takes the lock; rests between two looks, `rest` being told how often it did.
#[inline(always)]
pub fn take(taken: &impl Atom32, rest: impl FnMut(u32)) {
    if !try_take(taken) {
        wait(taken, rest);
    }
}

#[cold]
#[inline(never)]
fn wait(taken: &impl Atom32, mut rest: impl FnMut(u32)) {
    let mut rests = 0;
    // Only looks while it is taken: the holder need not have the line back.
    while taken.load(Relaxed) != 0 || !try_take(taken) {
        rest(rests);
        rests = rests.saturating_add(1);
    }
}

/// Lets the lock go, which the caller has.
#[inline(always)]
pub fn give(taken: &impl Atom32) {
    taken.store(0, Release);
}
