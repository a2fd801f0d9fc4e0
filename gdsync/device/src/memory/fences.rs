//! Counts fences for devices in builds with debug assertions, because tests on x86-64 cannot observe them otherwise.

use std::cell::Cell;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

pub(super) fn count() {
    COUNT.set(COUNT.get() + 1);
}

/// Number of fences that this thread executed while `f` ran.
pub fn during(f: impl FnOnce()) -> usize {
    let before = COUNT.get();
    f();
    COUNT.get() - before
}
