//! What a GPU can do for streams, how it runs their operations, and its calibration.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::Api;

use crate::error::{Error, Result};

/// What must be done, and by whom, before a GPU sees data from a network card.
///
/// A completion says that the card has written the data. That the GPU's own later work sees it follows from the PCIe
/// ordering that the driver states (`CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`).
///
/// The software HCA stores through the CPU's mapping, which is PCIe too. Unless nothing is needed it flushes
/// ([`Memory::flush`](crate::memory::Memory::flush)) before it writes the completion; what copy engines have moved needs none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// No flush: later work of the GPU that owns the memory sees the data once it has seen the completion.
    NotNeeded,
    /// The stream flushes (`CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES`).
    OnStream,
    /// The CPU flushes (`cuFlushGPUDirectRDMAWrites`) after the completion. Streams cannot, so their waits for payload that an mlx5 card
    /// writes to the GPU are refused.
    OnCpu,
    /// The driver has no flush; such waits are refused likewise.
    Impossible,
}

/// What a GPU and its driver support, from device attributes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// CUDA version of the driver, `1000 * major + 10 * minor`.
    pub driver_version: i32,
    /// Compute capability, major and minor.
    pub compute: (i32, i32),
    /// Waits and writes of 64 bits (attribute 122).
    pub memops_64bit: bool,
    /// Waits on the NOR condition (attribute 123), which waits for completions of success or failure need.
    pub memops_nor: bool,
    /// The flush needed after inbound writes (attributes 98, 117 and 118).
    pub flush: Flush,
    /// Inbound writes to its memory are ordered for all GPUs (attribute 118), so streams of other GPUs may wait for them.
    pub ordered_for_all: bool,
    /// Registered host memory has the same address on the GPU (attribute 91).
    pub same_address: bool,
    /// GPU memory can be exported as a dma-buf (attribute 124).
    pub dma_buf: bool,
}

/// `CU_DEVICE_ATTRIBUTE_*`.
mod attribute {
    pub(super) const COMPUTE_MAJOR: u32 = 75;
    pub(super) const COMPUTE_MINOR: u32 = 76;
    pub(super) const HOST_POINTER_OF_REGISTERED: u32 = 91;
    pub(super) const WAIT_FLUSH: u32 = 98;
    pub(super) const FLUSH_OPTIONS: u32 = 117;
    pub(super) const WRITES_ORDERING: u32 = 118;
    pub(super) const MEMOPS_64: u32 = 122;
    pub(super) const WAIT_NOR: u32 = 123;
    pub(super) const DMA_BUF: u32 = 124;
}

/// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER`.
const ORDERED_FOR_OWNER: i32 = 100;
/// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES`.
const ORDERED_FOR_ALL: i32 = 200;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST`.
const FLUSH_BY_HOST: i32 = 1;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_MEMOPS`.
const FLUSH_BY_MEMOPS: i32 = 2;

impl Capabilities {
    /// Queries the driver.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn query(api: &Api, device: i32) -> Result<Self> {
        let ask = |number| -> Result<i32> {
            let mut value = 0;
            // SAFETY: a place for the answer; the driver checks the number.
            match unsafe { api.device_get_attribute(&mut value, number, device) } {
                // The driver is older than the attribute.
                Err(gdrcopy::Error::Cuda { status: CudaStatus::INVALID_VALUE, .. }) => Ok(0),
                other => other.map(|()| value).map_err(Error::cuda("asking for a device attribute")),
            }
        };
        let mut driver_version = 0;
        // SAFETY: a place for the answer.
        unsafe { api.driver_get_version(&mut driver_version) }
            .map_err(Error::cuda("asking for the version"))?;
        let (ordering, options) = (ask(attribute::WRITES_ORDERING)?, ask(attribute::FLUSH_OPTIONS)?);
        let on_stream = ask(attribute::WAIT_FLUSH)? != 0 || options & FLUSH_BY_MEMOPS != 0;
        Ok(Self {
            driver_version,
            compute: (ask(attribute::COMPUTE_MAJOR)?, ask(attribute::COMPUTE_MINOR)?),
            memops_64bit: ask(attribute::MEMOPS_64)? != 0,
            memops_nor: ask(attribute::WAIT_NOR)? != 0,
            flush: Self::decide(ordering, on_stream, options),
            ordered_for_all: ordering >= ORDERED_FOR_ALL,
            same_address: ask(attribute::HOST_POINTER_OF_REGISTERED)? != 0,
            dma_buf: ask(attribute::DMA_BUF)? != 0,
        })
    }

    fn decide(ordering: i32, on_stream: bool, options: i32) -> Flush {
        match () {
            () if ordering >= ORDERED_FOR_OWNER => Flush::NotNeeded,
            () if on_stream => Flush::OnStream,
            () if options & FLUSH_BY_HOST != 0 => Flush::OnCpu,
            () => Flush::Impossible,
        }
    }

    /// Checks that streams can ring doorbells and wait for completions of success or failure.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn check(&self) -> Result<()> {
        let lacks = |what| Error::Unsupported {
            what,
            by: "this GPU or driver",
            fix: "use a GPU of Volta or newer with a driver of CUDA 11.7 or newer, or a host stream",
        };
        if !self.memops_64bit {
            return Err(lacks(
                "writing 64-bit words on a stream (device attribute 122), which rings doorbells,",
            ));
        }
        if !self.memops_nor {
            let what = "the NOR condition of stream waits (device attribute 123), which also errors satisfy,";
            return Err(lacks(what));
        }
        Ok(())
    }
}

impl fmt::Display for Capabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.compute;
        let (version, sub) = (self.driver_version / 1000, self.driver_version % 1000 / 10);
        write!(f, "compute capability {major}.{minor}, CUDA {version}.{sub}, 64-bit memory operations ")?;
        let word = |yes| if yes { "yes" } else { "no" };
        write!(f, "{}, NOR waits {}, ", word(self.memops_64bit), word(self.memops_nor))?;
        f.write_str(match self.flush {
            Flush::NotNeeded => "inbound writes need no flush",
            Flush::OnStream => "inbound writes are flushed by the stream",
            Flush::OnCpu => "inbound writes are flushed by the CPU",
            Flush::Impossible => "inbound writes cannot be flushed",
        })
    }
}

/// Latencies of waits: from the store that satisfies a wait of a stream until the CPU sees the write behind the wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Calibration {
    /// Median and 99th percentile of [`Via::MemOp`].
    pub memop: (Duration, Duration),
    /// Median and 99th percentile of [`Via::Kernel`].
    pub kernel: (Duration, Duration),
    /// Other processes with this library use the GPU, which waiting kernels would block.
    pub shared: bool,
    /// The better one: [`Via::MemOp`] or [`Via::Kernel`].
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

/// How a GPU runs the operations of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Via {
    /// By stream memory operations of the GPU's front end. They use no SM, so kernels of other streams run undisturbed. The front end
    /// polls a wait every few microseconds (8 on an idle H200).
    #[default]
    MemOp,
    /// By a kernel of one thread for each submission. It sees a satisfied wait at once, enforces the time limit itself, and writes
    /// nothing after a failed wait. It occupies a slot of an SM while it waits. If several processes share the GPU without MPS, it
    /// blocks the others for whole time slices.
    Kernel,
    /// Whichever was faster on this GPU: see `gdsync::stream::calibrate`.
    Auto,
}

impl fmt::Display for Via {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Via::MemOp => "memop",
            Via::Kernel => "kernel",
            Via::Auto => "auto",
        })
    }
}

impl FromStr for Via {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self> {
        match word {
            "memop" => Ok(Via::MemOp),
            "kernel" => Ok(Via::Kernel),
            "auto" => Ok(Via::Auto),
            _ => Err(Error::invalid("via", format!("'{word}'"), "memop, kernel or auto")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flush_follows_from_ordering_and_options() {
        for (ordering, on_stream, options, flush) in [
            (200, true, 3, Flush::NotNeeded),
            (100, false, 1, Flush::NotNeeded),
            (0, true, 1, Flush::OnStream),
            (0, false, 1, Flush::OnCpu),
            (0, false, 0, Flush::Impossible),
        ] {
            assert_eq!(
                Capabilities::decide(ordering, on_stream, options),
                flush,
                "{ordering} {on_stream} {options}"
            );
        }
    }
}
