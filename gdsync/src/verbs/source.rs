//! Queues as streams use them: the doorbell that a stream writes, and where a completion arrives that it waits for.

use std::fmt;
use std::sync::atomic::Ordering;
use std::time::Duration;

use gdsync_device::cuda::Gpu;
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Found, Memory, Place, Word32, Word64};
use gdsync_device::recorder::{Awaited, By};
use mlx5_ring::Cond;

/// The doorbell of a send queue and its record, as streams write them.
#[derive(Debug)]
pub struct SendDoorbell {
    pub(crate) record: Word32,
    pub(crate) doorbell: Word64,
    /// The doorbell may be written first: somebody waits for it, and only a failure needs the record.
    pub(crate) record_may_lag: bool,
    /// Where a GPU finds record and doorbell.
    pub(crate) found: [Found; 2],
}

impl SendDoorbell {
    /// Whether GPUs know both.
    #[inline]
    pub(crate) fn is_found(&self) -> bool {
        self.found.iter().all(Found::is_known)
    }
}

/// What a stream writes to a [`SendDoorbell`].
#[derive(Clone, Copy, Debug, Default)]
pub struct DoorbellValue {
    pub(crate) record: u32,
    pub(crate) doorbell: u64,
}

/// Where a completion arrives, and how a stream passes it.
#[derive(Debug)]
pub struct Arrival<'a> {
    /// Its word is at this offset.
    pub(crate) memory: &'a Memory,
    pub(crate) offset: usize,
    /// Where a GPU finds the memory, and the consumer index.
    pub(crate) found: &'a [Found; 2],
    pub(crate) cond: Cond,
    pub(crate) value: u32,
    /// The consumer index, and its value behind the completion.
    pub(crate) index: &'a Word32,
    pub(crate) passed: u32,
}

impl Arrival<'_> {
    fn load(&self) -> u32 {
        let word = self.memory.atomic32(self.offset).expect("the word lies in the memory, aligned");
        word.load(Ordering::Acquire)
    }

    /// Whether it has arrived; the word if not.
    pub(crate) fn look(&self) -> std::result::Result<(), u32> {
        let word = self.load();
        if self.cond.holds32(word, self.value) { Ok(()) } else { Err(word) }
    }

    /// Whether GPUs know where.
    #[inline]
    pub(crate) fn is_found(&self) -> bool {
        self.found.iter().all(Found::is_known)
    }

    /// Where a GPU finds its word.
    #[inline]
    pub(crate) fn word_on(&self, gpu: &Gpu) -> Result<Place> {
        let Place { addr, is_near } = self.found[0].place(self.memory, gpu)?;
        Ok(Place { addr: addr + self.offset as u64, is_near })
    }

    /// Where a GPU finds the consumer index.
    #[inline]
    pub(crate) fn index_on(&self, gpu: &Gpu) -> Result<u64> {
        self.found[1].place(self.index.memory(), gpu).map(|place| place.addr)
    }
}

/// A queue of the device: who writes the word that a wait looks at, or consumes the doorbell that a stream rings.
///
/// An engine whose thread runs on the CPU uses it to help and to sleep; a GPU engine cannot, and only
/// uses [`Source::fail`].
pub trait Source: Send + Sync + fmt::Debug {
    /// Runs some of the device's work on the calling thread. Returns whether anything was done.
    fn progress(&self) -> bool;

    /// Tells the device that a doorbell was written.
    fn signal(&self);

    /// The calling thread ran the device for a wait and now turns to something else: what the device put off because it
    /// was not urgent, as an acknowledgement, should be done now. By default there is no such thing.
    fn finish(&self) {}

    /// Wakes whoever runs the device, if it sleeps while there is work; the calling thread runs nothing of it.
    fn wake(&self) {}

    /// Sleeps until `ready` may have become true, or for `timeout`. Spurious returns are allowed.
    fn park(&self, ready: &dyn Fn() -> bool, timeout: Duration);

    /// The stream gives up: stop the queue behind this source, so that nothing more leaves it and every
    /// completion it still owes arrives as an error. Idempotent.
    fn fail(&self, reason: &Error);

    /// What a stream rings; none where to be told is enough.
    fn send_doorbell(&self) -> Option<&SendDoorbell> {
        None
    }

    /// Where completion `n` arrives.
    fn arrival(&self, n: u64) -> Arrival<'_>;

    /// Refuses a wait of a stream of this GPU where the GPU may not see the payload behind it.
    fn check_visible(&self, gpu: &Gpu) -> Result<()> {
        let _ = gpu;
        Ok(())
    }

    /// Completion `n` will not come: puts one there that says so, and satisfies waits for it.
    fn release(&self, n: u64) {
        let _ = n;
    }

    /// Why no completion will come any more, not even one that says so.
    fn lost(&self) -> Option<Error> {
        None
    }

    /// How long a queue that was stopped has to complete everything by itself, before completions are put in place of its own.
    fn flush_time(&self) -> Duration {
        Duration::ZERO
    }

    /// What a wait for completion `n` waits for, to the flight recorder.
    fn awaited(&self, n: u64) -> Option<Awaited> {
        let _ = n;
        None
    }

    /// A stream has passed the wait for completion `n`: for the flight recorder.
    fn passed(&self, n: u64, by: By) {
        let _ = (n, by);
    }

    /// What a wait on this source waits for, for error messages ("send completion 7 of QP 0x123").
    fn describe(&self) -> String;
}
