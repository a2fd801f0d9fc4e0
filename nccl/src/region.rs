//! Memory that all ranks have registered.

use std::ffi::{c_int, c_void};

use gdsync::cuda::Gpu;
use gdsync::memory::{Memory, Word64};
use gdsync::{Error, Result};
use mp::{Communicator, Registration, Rma, Window};
use parking_lot::Mutex;

use crate::abi::{FORCE_SO, PTR_HOST};

/// What is added to a word to satisfy every wait for it: larger than any count, and the sum compares as larger by signed and by unsigned
/// numbers.
pub(crate) const RELEASE: u64 = 1 << 62;

/// The part of this rank, and the window over the parts of all.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) registration: Registration,
    pub(crate) window: Window,
    /// Its words may be signals.
    pub(crate) has_signals: bool,
}

/// The memory that NCCL names.
///
/// # Safety
/// It must stay allocated until the last clone is dropped.
pub(crate) unsafe fn memory(data: *mut c_void, size: usize, kind: c_int) -> Result<Memory> {
    if kind == PTR_HOST {
        // SAFETY: the caller's promise.
        return unsafe { Memory::from_raw(data.cast(), size) };
    }
    // SAFETY: the caller's promise.
    let found = unsafe { Gpu::find(data.addr() as u64, size) }?;
    found.ok_or_else(|| Error::invalid("the memory to register", format!("{data:?}"), "memory of a GPU"))
}

impl Region {
    pub(crate) fn new(registration: Registration, window: Window, flags: u64) -> Self {
        Self { registration, window, has_signals: flags & FORCE_SO != 0 }
    }

    /// Adds [`RELEASE`] to all words that another region of the same memory has not released. By the device, so that no addition of
    /// another rank is lost; where that fails, by the CPU.
    pub(crate) fn release(&self, comm: &Communicator) -> Result<()> {
        static ONE_BY_ONE: Mutex<()> = Mutex::new(());
        let _others_wait = ONE_BY_ONE.lock();
        let (memory, own) = (self.registration.memory(), comm.rank());
        let words = || (0..memory.len() / 8).map(|word| word * 8);
        let by_device = || -> mp::Result<()> {
            // The CPU may not reach them.
            let seen = comm.register(&Memory::alloc(memory.len())?)?;
            drop(self.window.start(&Rma::get(&seen, 0..memory.len(), own, 0))?);
            self.window.flush(own, None)?;
            let is_released = |at: &usize| seen.memory().word64(*at).is_ok_and(|word| word.load() >= RELEASE);
            let add = |at| self.window.start(&Rma::accumulate(RELEASE, own, at)).map(drop);
            words().filter(|at| !is_released(at)).try_for_each(add)?;
            self.window.flush(own, None)
        };
        if by_device().is_ok() {
            return Ok(());
        }
        words().try_for_each(|at| {
            let word: Word64 = memory.word64(at)?;
            let now = word.load();
            if now < RELEASE {
                word.store(now + RELEASE);
            }
            Ok(())
        })
    }
}
