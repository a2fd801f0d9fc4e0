//! Where the rings and words of a queue pair are.

use crate::cuda::Gpu;
use crate::error::Result;
use crate::memory::Memory;

bitflags::bitflags! {
    /// What of a queue pair is in GPU memory; the rest is in host memory.
    ///
    /// | libgdsync | here |
    /// |---|---|
    /// | `GDS_CREATE_QP_WQ_ON_GPU` | [`OnGpu::SEND_QUEUE`] |
    /// | `GDS_CREATE_QP_TX_CQ_ON_GPU` | [`OnGpu::SEND_CQ`] |
    /// | `GDS_CREATE_QP_RX_CQ_ON_GPU` | [`OnGpu::RECV_CQ`] |
    /// | `GDS_CREATE_QP_WQ_DBREC_ON_GPU` | [`OnGpu::RECORDS`] |
    ///
    /// A GPU looks at a completion queue in its own memory without using the bus. The CPU, and with it the software HCA,
    /// writes there about as quickly as to host memory, but every look takes it a microsecond. Doorbells are
    /// registers of the card and never move.
    ///
    /// Where mlx5 cards read the rings by themselves, any of these makes the queue pair by DevX, which needs a dma-buf of GPU
    /// memory for the card (Linux 6.1, rdma-core 43, the NVIDIA driver's open kernel modules) or nvidia-peermem: otherwise it is
    /// refused, with the reason.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct OnGpu: u32 {
        /// The send queue. The device must be able to read it there: the software HCA can, and so can mlx5 cards. There the
        /// receive queue lies beside it, in the same memory.
        const SEND_QUEUE = 1;
        /// The completion queue of sends, unless it is shared.
        const SEND_CQ = 2;
        /// The completion queue of receives, unless it is shared.
        const RECV_CQ = 4;
        /// The doorbell records: producer indices of the queue pair and consumer indices of its own completion queues.
        const RECORDS = 8;
    }
}

/// The GPU that drives a queue pair, and what is in its memory.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// The GPU; `None` where only CPUs use the queue pair.
    pub gpu: Option<Gpu>,
    /// What is in its memory.
    pub on_gpu: OnGpu,
}

impl Places {
    /// `len` zeroed bytes for `what`, where they belong, and known to the GPU.
    pub fn alloc(&self, what: OnGpu, len: usize) -> Result<Memory> {
        let Some(gpu) = &self.gpu else { return Memory::alloc(len) };
        if !what.is_empty() && self.on_gpu.contains(what) { gpu.piece(len) } else { gpu.host_piece(len) }
    }
}
