//! Handles of objects, contexts, and each thread's stack of contexts.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::layout::Handle;
use parking_lot::Mutex;

use super::Outcome;

/// How many GPUs there are.
pub(super) const DEVICES: i32 = 2;
/// The highest priority of a stream; the lowest is 0.
pub(super) const GREATEST_PRIORITY: i32 = -5;

pub(super) static CONTEXTS: Table<Arc<Context>> = Table::new();
thread_local! {
    /// The contexts that this thread has pushed; the last is current.
    pub(super) static STACK: RefCell<Vec<Handle>> = const { RefCell::new(Vec::new()) };
}

/// A new number, larger than all earlier ones.
pub(super) fn number() -> Handle {
    static NEXT: AtomicUsize = AtomicUsize::new(0x1000);
    NEXT.fetch_add(0x10, Ordering::Relaxed)
}

/// Live objects of one kind.
pub(super) struct Table<T>(Mutex<BTreeMap<Handle, T>>);

impl<T: Clone> Table<T> {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// Adds the object that `make` returns for the new handle.
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

    /// Removes the objects for which `is_so` holds.
    pub(super) fn forget(&self, is_so: impl Fn(&T) -> bool) {
        let forgotten: Vec<T> =
            self.0.lock().extract_if(.., |_, value| is_so(value)).map(|(_, v)| v).collect();
        // Dropped outside of the lock.
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

/// A context.
pub(super) struct Context {
    pub(super) handle: Handle,
    pub(super) device: i32,
    /// The first error of its work; 0 for none.
    error: AtomicU32,
    /// Contexts whose memory its work may use.
    pub(super) peers: Mutex<BTreeSet<Handle>>,
}

impl Context {
    pub(super) fn make(device: i32) -> Handle {
        CONTEXTS.insert(|handle| {
            Arc::new(Self { handle, device, error: AtomicU32::new(0), peers: Mutex::default() })
        })
    }

    /// Returns the sticky error.
    pub(super) fn check(&self) -> Outcome {
        match self.error.load(Ordering::Acquire) {
            0 => Ok(()),
            status => Err(CudaStatus(status)),
        }
    }

    /// Sets the sticky error; the first one stays.
    pub(super) fn fail(&self, status: CudaStatus) {
        // An earlier error stays.
        _ = self.error.compare_exchange(0, status.0, Ordering::AcqRel, Ordering::Relaxed);
    }

    pub(super) fn mend(&self) {
        self.error.store(0, Ordering::Release);
    }

    /// Whether its work reaches the memory of another context.
    pub(super) fn reaches(&self, other: &Self) -> bool {
        self.device == other.device || self.peers.lock().contains(&other.handle)
    }
}

/// The context of this thread.
pub(super) fn current() -> Outcome<Arc<Context>> {
    let handle = STACK.with_borrow(|stack| stack.last().copied()).ok_or(CudaStatus::INVALID_CONTEXT)?;
    let context = CONTEXTS.get(handle).map_err(|_| CudaStatus::CONTEXT_IS_DESTROYED)?;
    context.check()?;
    Ok(context)
}
