//! The table of handles: its rules, real threads, and every interleaving of few.

mod handles;
mod loom;

// The library's own file, on the atomics of loom.
#[path = "../../src/handles.rs"]
#[expect(dead_code, unreachable_pub, reason = "public in the library, and used in part by the models")]
mod explored;

use gdsync_capi_support::process;

mod atomic {
    pub(crate) use ::loom::hint::spin_loop;
    pub(crate) use ::loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    pub(crate) use ::loom::thread::yield_now;
}
