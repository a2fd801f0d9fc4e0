//! The interface between queues and streams: doorbells that a stream writes and completions that it waits for.

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
pub(crate) struct SendDoorbell {
    pub(crate) record: Word32,
    pub(crate) doorbell: Word64,
    /// The doorbell may be written before the record: the device needs the record only after a failure.
    pub(crate) record_may_lag: bool,
    /// Whether a card reads them. The software HCA is told of each doorbell of the CPU.
    pub(crate) by_card: bool,
    /// GPU addresses of record and doorbell.
    pub(crate) found: [Found; 2],
}

impl SendDoorbell {
    /// Whether both are mapped for GPUs.
    #[inline]
    pub(crate) fn is_found(&self) -> bool {
        self.found.iter().all(Found::is_known)
    }

    /// Rings on the CPU. Fences order record and doorbell where they are not in host memory, as registers of a card or
    /// GPU memory.
    pub(crate) fn ring(&self, value: DoorbellValue) {
        let (record, doorbell) = (&self.record, &self.doorbell);
        let fence = || doorbell.memory().fence();
        fence();
        let between = || {
            record.memory().fence();
            fence();
            if self.by_card {
                // A load flushes earlier stores to the same device, also to a GPU.
                record.atomic().load(Ordering::Acquire);
            }
        };
        gdsync_shm::ring_doorbell(record.atomic(), value.record, between, doorbell.atomic(), value.doorbell);
        fence();
    }
}

/// The values that a stream writes to a [`SendDoorbell`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DoorbellValue {
    pub(crate) record: u32,
    pub(crate) doorbell: u64,
}

/// The CQE that a stream wait polls, and the consumer index that it writes afterwards.
#[derive(Debug)]
pub(crate) struct Arrival<'a> {
    /// The ring, and the offset of the CQE's owner word in it.
    pub(crate) memory: &'a Memory,
    pub(crate) offset: usize,
    /// GPU addresses of the ring and of the consumer index.
    pub(crate) found: &'a [Found; 2],
    pub(crate) cond: Cond,
    pub(crate) value: u32,
    /// The consumer index, and its value after this completion.
    pub(crate) index: &'a Word32,
    pub(crate) passed: u32,
}

/// Whether a consumer index, as the record has it, is `passed` or behind it.
pub(crate) fn is_beyond(index: u32, passed: u32) -> bool {
    let [index, passed] = [index, passed].map(mlx5_ring::record_to_u24);
    index.wrapping_sub(passed) & 0xff_ffff < 1 << 23
}

impl Arrival<'_> {
    fn load(&self) -> u32 {
        let word = self.memory.atomic32(self.offset).expect("the word lies in the memory, aligned");
        word.load(Ordering::Acquire)
    }

    /// Checks whether the completion has arrived. Returns the current word if it has not.
    pub(crate) fn check(&self) -> std::result::Result<(), u32> {
        let word = self.load();
        if self.cond.holds32(word, self.value) { Ok(()) } else { Err(word) }
    }

    /// Whether ring and consumer index are mapped for GPUs.
    #[inline]
    pub(crate) fn is_found(&self) -> bool {
        self.found.iter().all(Found::is_known)
    }

    /// The GPU address of the owner word.
    #[inline]
    pub(crate) fn word_on(&self, gpu: &Gpu) -> Result<Place> {
        let Place { addr, is_near } = self.found[0].place(self.memory, gpu)?;
        Ok(Place { addr: addr + self.offset as u64, is_near })
    }

    /// The GPU address of the consumer index.
    #[inline]
    pub(crate) fn index_on(&self, gpu: &Gpu) -> Result<u64> {
        self.found[1].place(self.index.memory(), gpu).map(|place| place.addr)
    }
}

/// One queue of a queue pair, as stream operations name it. It rings a doorbell or completes work requests.
///
/// The host engine calls all methods. A GPU engine cannot run the device: it only maps addresses, and stops or releases
/// a queue after a failure.
pub(crate) trait Source: Send + Sync + fmt::Debug {
    /// Runs device work on the calling thread. Returns whether there was any.
    fn progress(&self) -> bool;

    /// Notifies the device of a doorbell write.
    fn signal(&self);

    /// Runs deferred device work, such as acknowledgements, after a wait that called [`Source::progress`]. Default:
    /// nothing.
    fn finish(&self) {}

    /// Wakes the thread that runs the device, if it sleeps. Runs no device work on the calling thread.
    fn wake(&self) {}

    /// Notifies the device again, while a GPU stream waits, of receives that the stream has posted without a doorbell. Default:
    /// nothing.
    fn remind(&self) {}

    /// Sleeps until `ready` may be true, or for `timeout`. Spurious returns are allowed.
    fn park(&self, ready: &dyn Fn() -> bool, timeout: Duration);

    /// Identifies the queue pair, which its two queues share.
    fn queue_pair(&self) -> usize;

    /// Stops the queue pair after a failure of the stream. Nothing more is sent; outstanding requests complete with an
    /// error. Idempotent.
    fn fail(&self, reason: &Error);

    /// The doorbell to write. `None` where [`Source::signal`] suffices.
    fn send_doorbell(&self) -> Option<&SendDoorbell> {
        None
    }

    /// The CQE of completion `n`.
    fn arrival(&self, n: u64) -> Arrival<'_>;

    /// Whether all completions before `n` have arrived, or are waited for.
    fn is_next(&self, n: u64) -> bool {
        let _ = n;
        true
    }

    /// Refuses a wait on a stream of `gpu` that may not see the payload of the completion.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    fn check_visible(&self, gpu: &Gpu) -> Result<()> {
        let _ = gpu;
        Ok(())
    }

    /// Writes a flush CQE for completion `n`, which the device does not complete. Satisfies waits for it.
    fn release(&self, n: u64) {
        let _ = n;
    }

    /// The error after which not even flush completions arrive.
    fn lost(&self) -> Option<Error> {
        None
    }

    /// How long a stopped queue may take to flush by itself. After that [`Source::release`] is called.
    fn flush_time(&self) -> Duration {
        Duration::ZERO
    }

    /// What a wait for completion `n` waits for, for the flight recorder.
    fn awaited(&self, n: u64) -> Option<Awaited> {
        let _ = n;
        None
    }

    /// Records that a stream has passed the wait for completion `n`.
    fn passed(&self, n: u64, by: By) {
        let _ = (n, by);
    }

    /// What a wait for completion `n` waits for, such as "send 3 of QP 0x123 to complete", and what to do.
    fn describe(&self, n: u64) -> String;
}
