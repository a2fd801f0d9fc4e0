//! What the calling thread is within, seldom, that must not use streams: one look tells of all.

use std::cell::Cell;

thread_local! {
    static WITHIN: Cell<u8> = const { Cell::new(0) };
}

/// A call out of the library.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
pub(super) enum ReentrancyCheck {
    /// Of the function that launches a kernel with steps.
    Launch = 1,
    /// Of a host function, by CUDA.
    HostFn = 2,
}

impl ReentrancyCheck {
    /// Whether the thread is within any.
    #[inline(always)]
    pub(super) fn any() -> bool {
        WITHIN.get() != 0
    }

    /// Whether it is within this one.
    #[inline]
    pub(super) fn is_here(self) -> bool {
        WITHIN.get() & self as u8 != 0
    }

    pub(super) fn begin(self) {
        WITHIN.set(WITHIN.get() | self as u8);
    }

    pub(super) fn end(self) {
        WITHIN.set(WITHIN.get() & !(self as u8));
    }
}
