//! How this card and its library differ from what most do, for tests. Nothing differs until a test says so.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::hca::Hca;

/// A difference, one bit each.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(crate) enum Quirk {
    /// Doorbells of queue pairs that are made are lost where the application rings them itself.
    Deaf = 1,
    /// The library is of rdma-core 28: completion queues take no parent domain.
    OldLibrary = 2,
    /// A queue pair in ERR flushes only the sends that a doorbell named.
    FlushesByDoorbell = 4,
    /// A queue pair goes to ERR up to 10 ms after it was told to.
    LateFlushes = 8,
    /// Completions of flushed requests do not say of which request they are.
    NoFlushCounters = 16,
}

static QUIRKS: AtomicU32 = AtomicU32::new(0);

impl Quirk {
    pub(crate) fn is_on(self) -> bool {
        QUIRKS.load(Ordering::SeqCst) & self as u32 != 0
    }
}

/// From now on the card has the quirks of these bits, and no others.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gdsync_standin_quirks(bits: u32) {
    QUIRKS.store(bits, Ordering::SeqCst);
    if let Ok(hca) = Hca::get() {
        hca.card.hide_flush_counters(Quirk::NoFlushCounters.is_on());
    }
}
