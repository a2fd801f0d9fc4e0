//! What was measured of a GPU: which way of waiting is quicker.

use std::fmt;
use std::time::Duration;

use super::via::Via;

/// How long a stream of a GPU takes from the store that satisfies its wait to the CPU's seeing the write behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Calibration {
    /// Median and 99th percentile of [`Via::MemOp`].
    pub memop: (Duration, Duration),
    /// Median and 99th percentile of [`Via::Kernel`].
    pub kernel: (Duration, Duration),
    /// Other processes with this library use the GPU: kernels that wait would keep them from it.
    pub shared: bool,
    /// What is best: [`Via::MemOp`] or [`Via::Kernel`].
    pub via: Via,
}

impl fmt::Display for Calibration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = |(p50, p99): (Duration, Duration)| {
            format!("p50 {:.1} us, p99 {:.1} us", p50.as_secs_f64() * 1e6, p99.as_secs_f64() * 1e6)
        };
        let (memop, kernel) = (line(self.memop), line(self.kernel));
        write!(f, "a wait is noticed by a memory operation after {memop}, by a kernel after {kernel}: ")?;
        write!(f, "{}{}", self.via, if self.shared { ", since other processes use the GPU" } else { "" })
    }
}
