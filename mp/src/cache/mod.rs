//! The registration cache: registrations of the application's own memory that outlive their use, so that memory which is
//! sent from again and again is registered once.
//!
//! [`Communicator::register_cached`](crate::Communicator::register_cached) takes host memory by its address,
//! [`Communicator::register_cached_gpu`](crate::Communicator::register_cached_gpu) GPU memory. What they return is used as a
//! [`Registration`]; after it is gone the registration stays, until room is needed or the memory is known to be gone.
//!
//! # Memory that was freed
//!
//! A device goes on with the pages that were at an address when it was registered, whatever is there now. What proves that
//! they are still the same:
//!
//! | memory | the proof | what the application does |
//! |---|---|---|
//! | GPU memory | its number in CUDA (`CU_POINTER_ATTRIBUTE_BUFFER_ID`), which no later allocation gets: asked for at every use, unless a handle of the same registration is alive | nothing |
//! | GPU memory, [`CacheConfig::announced`] | none is asked for | calls [`Cache::invalidate`] before it frees |
//! | host memory | there is none: this library does not hook `free` and `munmap`, as MPI libraries do | calls [`Cache::invalidate`] before it unmaps or frees, or has host memory not kept: [`Keep::Gpu`] |
//!
//! GPU memory that was freed is noticed when its address is used again, or by a few looks at every miss; until then the
//! registration may hold its pages.
//!
//! # What is kept
//!
//! Ranges of addresses that do not overlap, each with one registration. A range inside one of them is a hit. A range that
//! overlaps some is registered together with them. Nothing is rounded up to pages: only what the application has named is
//! registered. Peers get no rights to it, as they would keep them when the handle is gone.
//!
//! Not more is kept than [`CacheConfig`] says. What was not used for longest goes first, and also when a device refuses a
//! registration for lack of room. What is in use never goes; what does not fit beside it is registered for its handle alone.

mod config;
mod handle;
mod index;
mod register;
mod room;
mod store;
#[cfg(test)]
mod tests;

pub use config::{CacheConfig, Keep};
pub use handle::Cached;
pub use store::{Cache, CacheStats};

#[cfg(doc)]
use crate::communicator::Registration;
