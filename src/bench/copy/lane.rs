//! Ways to do the same thing, measured by turns.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, sys};
use gdasync::measure::Samples;

use super::Result;

/// One way; it gets the host side of the copy.
pub(super) struct Lane<'a> {
    pub(super) name: String,
    quick: bool,
    run: Box<Run<'a>>,
}

type Run<'a> = dyn FnMut(&mut [u8]) -> Result<()> + 'a;

impl<'a> Lane<'a> {
    pub(super) fn new(name: impl Into<String>, run: impl FnMut(&mut [u8]) -> Result<()> + 'a) -> Self {
        Self { name: name.into(), quick: false, run: Box::new(run) }
    }

    /// A copy of nanoseconds: timed several at once.
    pub(super) fn quick(mut self) -> Self {
        self.quick = true;
        self
    }

    /// The same so many times in a row.
    pub(super) fn times(mut self, n: u32) -> Self {
        let name = std::mem::take(&mut self.name);
        Self::new(name, move |host| (0..n).try_for_each(|_| (self.run)(host)))
    }
}

/// Small CPU copies are timed so many at once that the clock's own cost vanishes, but too few to fill the bus's queue of
/// posted writes: then one would measure the bus.
const BATCH: u32 = 16;
const BATCH_BYTES: usize = 1024;
/// At most so many samples of each lane.
const SAMPLES: usize = 2000;
/// Pause before each sample, in which the bus goes quiet.
const PAUSE: Duration = Duration::from_micros(5);

/// Measures the lanes by turns, in an order that changes from turn to turn: what else the machine does then, and what the
/// lane before left behind, hits all of them. Each gets about `budget`.
pub(super) fn by_turns(lanes: &mut [Lane<'_>], host: &mut [u8], budget: Duration) -> Result<Vec<Samples>> {
    let many = u32::try_from(BATCH_BYTES / host.len().max(1))?.clamp(1, BATCH);
    for lane in lanes.iter_mut() {
        (lane.run)(host)?;
    }
    let mut samples = vec![Samples::default(); lanes.len()];
    let mut order: Vec<usize> = (0..lanes.len()).collect();
    let mut random = 0x9e37_79b9_u32;
    let start = Instant::now();
    let budget = budget * u32::try_from(lanes.len())?;
    for turn in 0..SAMPLES {
        if turn >= 5 && start.elapsed() > budget {
            break;
        }
        for i in (1..order.len()).rev() {
            // Numerical Recipes' generator is random enough for an order.
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            order.swap(i, usize::try_from(random >> 16)? % (i + 1));
        }
        for &i in &order {
            let pause = Instant::now();
            while pause.elapsed() < PAUSE {
                std::hint::spin_loop();
            }
            let batch = if lanes[i].quick { many } else { 1 };
            let start = Instant::now();
            for _ in 0..batch {
                (lanes[i].run)(host)?;
            }
            samples[i].add(start.elapsed() / batch);
        }
    }
    Ok(samples)
}

/// The baseline: CUDA's synchronous copies, as every program calls them.
pub(super) struct Cuda {
    context: Arc<CudaContext>,
    addr: u64,
}

impl Cuda {
    /// Copies to and from GPU memory at `addr`.
    pub(super) fn new(device: i32, addr: u64) -> Result<Self> {
        let context = CudaContext::new(usize::try_from(device)?)?;
        Ok(Self { context, addr })
    }

    /// `cuMemcpyHtoD` of pageable memory.
    pub(super) fn write(&self, data: &[u8]) -> Result<()> {
        self.context.bind_to_thread()?;
        // SAFETY: the benchmark's buffer on the GPU is as long as the longest host buffer.
        Ok(unsafe { sys::cuMemcpyHtoD_v2(self.addr, data.as_ptr().cast::<c_void>(), data.len()) }.result()?)
    }

    /// `cuMemcpyDtoH` into pageable memory.
    pub(super) fn read(&self, out: &mut [u8]) -> Result<()> {
        self.context.bind_to_thread()?;
        // SAFETY: as above.
        Ok(unsafe { sys::cuMemcpyDtoH_v2(out.as_mut_ptr().cast::<c_void>(), self.addr, out.len()) }
            .result()?)
    }
}
