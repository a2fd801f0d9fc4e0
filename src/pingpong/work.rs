//! Work that keeps a stream busy.

use std::time::{Duration, Instant};

use gdsync::stream::Batch;

use crate::lane::{Kernel, Kernels, Lane, Result};

/// Work of a certain time: a host function that spins, or a kernel that does on a GPU.
#[derive(Debug)]
pub struct Work<'a> {
    lane: &'a Lane,
    time: Duration,
    kernel: Option<(&'a Kernels, Kernel<u64>)>,
}

impl<'a> Work<'a> {
    /// For a lane with the kernels of [`PTX`](super::PTX).
    ///
    /// # Errors
    /// Of the GPU driver.
    pub fn new(lane: &'a Lane, time: Duration) -> Result<Self> {
        let kernel = match &lane.kernels {
            // SAFETY: the parameter is one u64.
            Some(kernels) => Some((kernels, unsafe { kernels.find(c"work") }?)),
            None => None,
        };
        Ok(Self { lane, time, kernel })
    }

    /// Whether it takes no time, and nothing is put on the stream.
    pub fn is_none(&self) -> bool {
        self.time.is_zero()
    }

    /// Puts it on the stream.
    ///
    /// # Errors
    /// Of the stream.
    pub fn enqueue(&self) -> Result<()> {
        if self.is_none() {
            return Ok(());
        }
        let time = self.time;
        match &self.kernel {
            // SAFETY: the argument names no memory.
            Some((kernels, work)) => unsafe { kernels.launch(work, 1, 1, u64::try_from(time.as_nanos())?) },
            None => {
                let mut batch = Batch::new();
                batch.repeatable_host_fn(move || {
                    let start = Instant::now();
                    while start.elapsed() < time {
                        std::hint::spin_loop();
                    }
                });
                Ok(self.lane.stream.submit(&mut batch)?)
            }
        }
    }
}
