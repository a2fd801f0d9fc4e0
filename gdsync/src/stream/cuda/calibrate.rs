//! Which way of waiting is quicker on a GPU, by trying.

use std::time::{Duration, Instant};

use crate::stream::{Batch, Cond, CudaStreamConfig, Stream, Via};
use gdsync_device::cuda::{Calibration, Gpu};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::Memory;

/// Wake-ups measured for each way.
const ROUNDS: u64 = 400;
/// A wake-up takes a few microseconds.
const PATIENCE: Duration = Duration::from_secs(2);

/// Measures how quickly streams notice what they wait for; takes a fraction of a second. Measured once for each
/// GPU of the process; what else runs on the GPU meanwhile, in this or other processes, counts.
///
/// # Errors
/// [`Error::Cuda`]; [`Error::Deadline`] when the GPU is kept from running anything.
pub fn calibrate(gpu: &Gpu) -> Result<Calibration> {
    gpu.calibrated(|| {
        let (memop, kernel) = (measure(gpu, Via::MemOp)?, measure(gpu, Via::Kernel)?);
        let shared = gpu.is_shared_with_processes();
        let quicker = kernel.0 + kernel.1 < memop.0 + memop.1;
        let via = if quicker && !shared { Via::Kernel } else { Via::MemOp };
        Ok(Calibration { memop, kernel, shared, via })
    })
}

fn measure(gpu: &Gpu, via: Via) -> Result<(Duration, Duration)> {
    let config =
        CudaStreamConfig { name: format!("calibration of {via}"), via, ..CudaStreamConfig::default() };
    let stream = Stream::cuda(gpu, config)?;
    let words = Memory::alloc(256)?;
    let (flag, answer) = (words.word32(0)?, words.word64(128)?);
    let mut times = Vec::new();
    for round in 1..=ROUNDS {
        let mut batch = Batch::new();
        let number = u32::try_from(round).expect("few rounds");
        batch.wait_value32(&flag, number, Cond::Geq);
        batch.write_value64(&answer, round);
        stream.submit(&mut batch)?;
        // The stream is waiting by then, for a time that has nothing to do with the period of its looks.
        let pause = Instant::now() + Duration::from_micros(20 + round * 7919 % 31);
        while Instant::now() < pause {
            std::hint::spin_loop();
        }
        let start = Instant::now();
        flag.store(number);
        while answer.load() != round {
            if start.elapsed() > PATIENCE {
                return Err(Error::Deadline { what: "calibrating the GPU", after: PATIENCE });
            }
            std::hint::spin_loop();
        }
        times.push(start.elapsed());
    }
    stream.synchronize(PATIENCE)?;
    // The first ones find cold caches.
    let mut times = times.split_off(times.len() / 10);
    times.sort();
    Ok((times[times.len() / 2], times[times.len() * 99 / 100]))
}
