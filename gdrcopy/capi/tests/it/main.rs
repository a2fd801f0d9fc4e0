//! The C interface: layouts and symbols, C programs, simulated machines, and every interleaving of a copy with an unmapping.

mod c_abi;
mod drivers;
mod library;
mod loom;

// The library's own file, on the atomics of loom.
#[path = "../../src/window.rs"]
mod window;

mod atomic {
    pub(crate) use ::loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
}
