//! Shared by the libraries for C: guards around calls, handles, the streams of a program, and the pages of its words.

pub mod guard;
pub mod handles;
pub mod pages;
pub mod process;
pub mod streams;

/// What [`handles`] is made of; loom's in its models.
mod atomic {
    pub(crate) use std::hint::spin_loop;
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    pub(crate) use std::thread::yield_now;
}
