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
    run: Box<Run<'a>>,
}

type Run<'a> = dyn FnMut(&mut [u8]) -> Result<()> + 'a;

impl<'a> Lane<'a> {
    pub(super) fn new(name: impl Into<String>, run: impl FnMut(&mut [u8]) -> Result<()> + 'a) -> Self {
        Self { name: name.into(), run: Box::new(run) }
    }
}

/// Quick operations are timed so many at once that the clock's own cost vanishes.
const SAMPLE: Duration = Duration::from_micros(4);
/// At most so many samples of each lane.
const SAMPLES: usize = 2000;

/// Measures the lanes by turns: what else the machine does then hits all of them. Each gets about `budget`.
pub(super) fn by_turns(lanes: &mut [Lane<'_>], host: &mut [u8], budget: Duration) -> Result<Vec<Samples>> {
    let mut batches = Vec::new();
    for lane in lanes.iter_mut() {
        (lane.run)(host)?;
        let start = Instant::now();
        let mut calls = 0_u32;
        while calls < 3 || (start.elapsed() < SAMPLE && calls < 1000) {
            (lane.run)(host)?;
            calls += 1;
        }
        let once = start.elapsed() / calls;
        batches.push(u32::try_from(SAMPLE.as_nanos() / once.as_nanos().max(1))?.clamp(1, 1000));
    }
    let mut samples = vec![Samples::default(); lanes.len()];
    let start = Instant::now();
    let budget = budget * u32::try_from(lanes.len())?;
    for turn in 0..SAMPLES {
        if turn >= 5 && start.elapsed() > budget {
            break;
        }
        for ((lane, &batch), samples) in lanes.iter_mut().zip(&batches).zip(&mut samples) {
            let start = Instant::now();
            for _ in 0..batch {
                (lane.run)(host)?;
            }
            samples.add(start.elapsed() / batch);
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
