//! The C interface: layouts and symbols, C programs, simulated machines, and every interleaving of a copy with an unmapping.

mod common;
mod dmabuf;
mod exports;
mod first_use;
mod gdrdrv;
mod install;
mod layout;
mod library;
mod loom;
mod pages;
mod programs;
mod rm;

// The library's own file, on the atomics of loom.
#[path = "../../src/window.rs"]
mod window;

mod atomic {
    pub(crate) use ::loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
}
