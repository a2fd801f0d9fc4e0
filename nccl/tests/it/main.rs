//! The plug-in, loaded and called as NCCL does, by ranks that are processes: without NCCL and without a GPU.

mod faults;
mod header;
mod loom;
mod misuse;
mod nccl;
mod traffic;

// The library's own file, on the atomics of loom.
#[path = "../../src/release.rs"]
#[expect(dead_code, reason = "used in part by the models")]
mod release;

mod sync {
    pub(crate) use ::loom::sync::atomic::{AtomicU8, Ordering};

    /// Loom's, used as parking_lot's.
    #[derive(Debug)]
    pub(crate) struct Mutex<T>(::loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(::loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> ::loom::sync::MutexGuard<'_, T> {
            self.0.lock().unwrap()
        }
    }
}
