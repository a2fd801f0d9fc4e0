//! Counts fences for devices in builds with debug assertions: on x86-64 nothing else tells a test whether they are there.

use std::cell::Cell;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

pub(super) fn count() {
    COUNT.set(COUNT.get() + 1);
}

/// How many this thread has made while `f` ran.
pub fn during(f: impl FnOnce()) -> usize {
    let before = COUNT.get();
    f();
    COUNT.get() - before
}
