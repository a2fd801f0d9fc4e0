//! The stream of a program.

use std::ffi::CStr;
use std::time::Duration;

use gdsync::cuda::Gpu;
use gdsync::memory::{Memory, Word32};
use gdsync::stream::{CudaStreamConfig, HostStreamConfig, Stream};

use super::place::{Engine, Placed};
use super::{Kernels, Result};

/// Submissions that may be pending.
const DEPTH: usize = 512;

/// A stream, and the means to run the program's own work on it: host functions or kernels.
#[derive(Debug)]
pub struct Lane {
    /// The stream.
    pub stream: Stream,
    /// Where a GPU runs the stream.
    pub kernels: Option<Kernels>,
    gpu: Option<Gpu>,
    /// Written behind kernels, which the stream itself does not count.
    end: Word32,
    timeout: Duration,
}

impl Lane {
    /// A stream whose waits end after `timeout`. `ptx` has the kernels, for a GPU.
    ///
    /// # Errors
    /// Of the stream, and of the driver that compiles the kernels.
    pub fn new(placed: &Placed, timeout: Duration, ptx: &'static CStr) -> Result<Self> {
        let end = Memory::alloc(4)?.word32(0)?;
        let (stream, kernels) = match (&placed.gpu, placed.engine) {
            (Some(gpu), Engine::Cuda) => {
                let kernels = Kernels::load(gpu, ptx)?;
                let (via, nudge) = (placed.via, placed.nudge);
                let config =
                    CudaStreamConfig { depth: DEPTH, wait_limit: timeout, via, nudge, ..Default::default() };
                (kernels.lend(gpu, config)?, Some(kernels))
            }
            _ => {
                let config = HostStreamConfig { depth: 2 * DEPTH, wait_limit: timeout, ..Default::default() };
                (Stream::host(config)?, None)
            }
        };
        Ok(Self { stream, kernels, gpu: placed.gpu.clone(), end, timeout })
    }

    /// The GPU, where there is one.
    ///
    /// # Errors
    /// When there is none.
    pub fn gpu(&self) -> Result<&Gpu> {
        self.gpu.as_ref().ok_or_else(|| "there is no GPU".into())
    }

    /// Blocks until the stream is idle, kernels included, and reports what went wrong on it. The CPU sleeps meanwhile.
    ///
    /// # Errors
    /// Of what ran on the stream, and when it takes longer than its limit.
    pub fn finish(&self) -> Result<()> {
        if self.kernels.is_some() {
            self.stream.write_value32(&self.end, 1)?;
        }
        Ok(self.stream.synchronize(self.timeout)?)
    }

    /// Blocks until the stream is idle, as an application does that posts by CPU: on a GPU by `cuStreamSynchronize`.
    /// What went wrong on the stream is left to [`Lane::finish`].
    ///
    /// # Errors
    /// When it takes longer than the limit, and of the driver.
    pub fn idle(&self) -> Result<()> {
        match &self.kernels {
            Some(kernels) => kernels.synchronize(),
            None => Ok(self.stream.synchronize(self.timeout)?),
        }
    }

    /// Returns when no kernel runs any more, so that the memory they use can go. What is still held is given up.
    pub fn settle(&self) {
        let Some(kernels) = &self.kernels else { return };
        if self.stream.query().pending > 0 {
            self.stream.abort();
        }
        // What went wrong has been said.
        let _ = kernels.synchronize();
    }
}
