//! Handles, and what they stand for.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::Outcome;
use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::layout::Handle;

/// A number that nothing had before: larger than all given so far.
pub(super) fn number() -> Handle {
    static NEXT: AtomicUsize = AtomicUsize::new(0x1000);
    NEXT.fetch_add(0x10, Ordering::Relaxed)
}

/// What is alive of one kind.
pub(super) struct Table<T>(Mutex<BTreeMap<Handle, T>>);

impl<T: Clone> Table<T> {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// Adds what `make` gives for the new handle.
    pub(super) fn insert(&self, make: impl FnOnce(Handle) -> T) -> Handle {
        let handle = number();
        let value = make(handle);
        self.0.lock().insert(handle, value);
        handle
    }

    pub(super) fn get(&self, handle: Handle) -> Outcome<T> {
        self.0.lock().get(&handle).cloned().ok_or(CudaStatus::INVALID_HANDLE)
    }

    pub(super) fn remove(&self, handle: Handle) -> Outcome<T> {
        let removed = self.0.lock().remove(&handle);
        removed.ok_or(CudaStatus::INVALID_HANDLE)
    }

    /// Removes what is so.
    pub(super) fn forget(&self, is_so: impl Fn(&T) -> bool) {
        let forgotten: Vec<T> =
            self.0.lock().extract_if(.., |_, value| is_so(value)).map(|(_, v)| v).collect();
        // Not under the lock.
        drop(forgotten);
    }

    pub(super) fn for_each(&self, act: impl Fn(&T)) {
        self.0.lock().values().for_each(act);
    }

    /// How many there are with handles from `first` on.
    pub(super) fn since(&self, first: Handle) -> usize {
        self.0.lock().range(first..).count()
    }
}
