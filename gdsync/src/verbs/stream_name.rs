//! Names of streams. Queues know the streams that use them by number.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use gdsync_device::error::stream_label;
use gdsync_device::fork_guard::PerProcess;
use parking_lot::RwLock;

/// The number of the CPU while it runs a batch.
pub(crate) const CPU: u64 = 0;

/// The number of kernels that ring and wait by words: see `PreparedSend::words`.
pub(crate) const KERNELS: u64 = u64::MAX;

/// The names that applications gave.
static GIVEN: PerProcess<RwLock<BTreeMap<u64, Arc<str>>>> = PerProcess::new();

/// The number of a stream, from 1, and its name if it has one, until this is dropped.
#[derive(Debug)]
pub(crate) struct StreamName(u64);

impl StreamName {
    /// The next number. A stream whose name is empty gets it as its name.
    pub(crate) fn new(name: &mut String) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        if name.is_empty() {
            *name = id.to_string();
        } else {
            GIVEN.get().write().insert(id, name.as_str().into());
        }
        Self(id)
    }

    pub(crate) fn id(&self) -> u64 {
        self.0
    }
}

impl Drop for StreamName {
    fn drop(&mut self) {
        GIVEN.get().write().remove(&self.0);
    }
}

/// The stream of this number, as errors name it.
pub(crate) fn describe(id: u64) -> String {
    match GIVEN.get().read().get(&id) {
        _ if id == CPU => "the CPU, which runs a batch".to_owned(),
        _ if id == KERNELS => "the kernels that have the words of its requests".to_owned(),
        Some(name) => stream_label(name),
        None => stream_label(&id.to_string()),
    }
}
