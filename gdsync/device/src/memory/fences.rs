//! Counts fences for devices in tests: where they matter, nothing else tells on x86-64 whether they are there.

use std::cell::Cell;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

pub fn count() {
    COUNT.set(COUNT.get() + 1);
}

/// How many this thread has made while `f` ran.
pub fn during(f: impl FnOnce()) -> usize {
    let before = COUNT.get();
    f();
    COUNT.get() - before
}
