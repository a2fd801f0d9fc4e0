//! Windows of operations that are all on the stream before the first may run, and are timed as a whole.

use std::time::{Duration, Instant};

use gdsync::memory::{Memory, Word32, Word64};
use gdsync::stream::{Batch, Cond};
use mp::Communicator;

use super::report::Cost;
use crate::lane::{Kernel, Kernels, Lane, Result};

/// Runs windows on the streams of both ranks; rank 0 begins.
pub(super) struct Windows<'a> {
    comm: &'a Communicator,
    lane: &'a Lane,
    clock: Clock<'a>,
    gate: Word32,
    opened: u32,
    timeout: Duration,
}

impl<'a> Windows<'a> {
    pub(super) fn new(comm: &'a Communicator, lane: &'a Lane, timeout: Duration) -> Result<Self> {
        let clock = Clock::new(lane)?;
        let gate = Memory::alloc(4)?.word32(0)?;
        Ok(Self { comm, lane, clock, gate, opened: 0, timeout })
    }

    /// Runs what `fill` adds to a batch. Returns how long the stream took, and what `fill` did; `cost` gets what posting and
    /// waiting cost, but for waiting until the other rank has posted.
    pub(super) fn run<T>(
        &mut self,
        cost: &mut Cost,
        fill: impl FnOnce(&mut Batch) -> Result<T>,
    ) -> Result<(Duration, T)> {
        let serves = self.comm.rank() == 0;
        let stream = &self.lane.stream;
        self.opened += 1;
        let opened = self.opened;
        let kept = cost.add(|| -> Result<_> {
            if serves {
                stream.wait_value32(&self.gate, opened, Cond::Geq)?;
            }
            self.clock.take(Side::Begin)?;
            let mut batch = Batch::new();
            let kept = fill(&mut batch)?;
            stream.submit(&mut batch)?;
            self.clock.take(Side::End)?;
            Ok(kept)
        })?;
        // Now everything is posted at both ends.
        self.comm.barrier(self.timeout)?;
        cost.add(|| {
            self.gate.store(opened);
            self.lane.finish()
        })?;
        Ok((self.clock.between()?, kept))
    }
}

#[derive(Clone, Copy)]
enum Side {
    Begin = 0,
    End = 8,
}

/// Reads the clock of what runs the stream, on the stream.
struct Clock<'a> {
    lane: &'a Lane,
    stamp: Option<(&'a Kernels, Kernel<u64>)>,
    origin: Instant,
    /// Begin and end in nanoseconds.
    memory: Memory,
}

impl<'a> Clock<'a> {
    fn new(lane: &'a Lane) -> Result<Self> {
        let stamp = match &lane.kernels {
            // SAFETY: the parameter is one address.
            Some(kernels) => Some((kernels, unsafe { kernels.find(c"stamp") }?)),
            None => None,
        };
        let clock = Self { lane, stamp, origin: Instant::now(), memory: Memory::alloc(16)? };
        // What CUDA loads or registers at the first use, it had better do before a stream is held.
        clock.take(Side::Begin)?;
        lane.idle()?;
        Ok(clock)
    }

    fn word(&self, side: Side) -> Result<Word64> {
        Ok(self.memory.word64(side as usize)?)
    }

    fn take(&self, side: Side) -> Result<()> {
        let word = self.word(side)?;
        match &self.stamp {
            Some((kernels, stamp)) => {
                let addr = word.memory().gpu_addr(self.lane.gpu()?)?;
                // SAFETY: a word, which this value keeps until the stream is idle.
                unsafe { kernels.launch(stamp, 1, 1, addr) }
            }
            None => {
                let origin = self.origin;
                let now = move || u64::try_from(origin.elapsed().as_nanos()).unwrap_or(u64::MAX);
                Ok(self.lane.stream.host_fn(move || word.store(now()))?)
            }
        }
    }

    fn between(&self) -> Result<Duration> {
        let time = self.word(Side::End)?.load().checked_sub(self.word(Side::Begin)?.load());
        Ok(Duration::from_nanos(time.ok_or("the clock of the stream went backwards")?))
    }
}

impl Drop for Clock<'_> {
    fn drop(&mut self) {
        self.lane.settle();
    }
}
