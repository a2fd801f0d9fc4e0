//! Sends whose payload the stream itself puts into the receive: the work request then only carries the completion.
//!
//! Receives stay posted in their queue. Beside that the peer tells where each one is, in a *line* of shared memory, before it says that
//! the receive is posted. The sender's kernel reads the line when the stream gets there, copies, and marks the work request as placed;
//! without a line, or where the memory is not open, the device moves the payload as always. So order, matching and completions are
//! those of the queue, whatever the kernel finds.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use super::op::Op;
use super::{Batch, PreparedSend};
use crate::verbs::Completion;
use gdsync_device::PLACED;
use gdsync_device::cuda::Gpu;
use gdsync_device::cuda::kernel_exec::KernelOp;
use gdsync_device::error::Result;
use gdsync_device::memory::{Memory, PeerMemory};

/// Where a receive is, as its owner tells it to a peer on this host: in which exported memory, and where there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiveLine {
    /// The number of the receive among those of the peer, modulo 2^32.
    pub number: u32,
    /// Its length.
    pub len: u32,
    /// The number of the memory in [`OpenMemory`].
    pub slot: u8,
    /// Which of the memories that have had this number: not 0.
    pub generation: u16,
    /// The offset there.
    pub offset: u64,
}

impl ReceiveLine {
    /// Length in shared memory, and alignment.
    pub const BYTES: usize = 16;

    /// The largest offset plus 1.
    pub const MAX_OFFSET: u64 = 1 << 40;

    /// Stores it. Whoever learns behind this that the receive is posted finds it.
    ///
    /// # Errors
    /// [`gdsync_device::error::Error::OutOfBounds`].
    pub fn store(&self, memory: &Memory, at: usize) -> Result<()> {
        let place = u64::from(self.generation) << 48 | u64::from(self.slot) << 40 | self.offset;
        memory.atomic64(at + 8)?.store(place, Ordering::Release);
        let told = u64::from(self.number) << 32 | u64::from(self.len);
        memory.atomic64(at)?.store(told, Ordering::Release);
        Ok(())
    }
}

/// The memory of a peer that is open for a GPU, by the numbers that the peer gave: kernels look it up here.
#[derive(Debug)]
pub struct OpenMemory {
    gpu: Gpu,
    table: Memory,
    open: Mutex<Vec<Option<PeerMemory>>>,
}

impl OpenMemory {
    /// Nothing yet, of so many numbers, at most 256.
    ///
    /// # Errors
    /// As [`Gpu::alloc`].
    pub fn new(gpu: &Gpu, slots: usize) -> Result<Arc<Self>> {
        // Kernels read it, best in their own memory.
        let table = gpu.alloc_piece(16 * slots).or_else(|_| gpu.alloc_host_piece(16 * slots))?;
        table.fill(0, table.len(), 0)?;
        table.flush()?;
        Ok(Arc::new(Self { gpu: gpu.clone(), table, open: Mutex::new(vec![None; slots]) }))
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Opens the memory of a slot, in place of an earlier generation. No receive of that one may be posted any more.
    ///
    /// # Errors
    /// [`gdsync_device::error::Error::InvalidArgument`] for memory that is open for another GPU;
    /// [`gdsync_device::error::Error::OutOfBounds`] for a slot that there is not.
    pub fn set(&self, slot: u8, generation: u16, memory: PeerMemory) -> Result<()> {
        let base = memory.gpu_addr(&self.gpu, 0, memory.len())?;
        let at = 16 * usize::from(slot);
        let room = u64::from(generation) << 48 | memory.len() as u64;
        let [address, word] = [self.table.word64(at)?, self.table.word64(at + 8)?];
        let mut open = self.open.lock();
        for (to, value) in [(&word, 0), (&address, base), (&word, room)] {
            to.store(value);
            self.table.fence();
        }
        self.table.flush()?;
        open[usize::from(slot)] = Some(memory);
        Ok(())
    }
}

/// What a stream needs to put the payload of a send into its receive.
#[derive(Clone, Debug)]
pub struct Placement {
    /// The whole payload of the send, in memory of the GPU.
    pub payload: Memory,
    /// The [`ReceiveLine`] of the receive, in shared memory.
    pub line: Memory,
    /// The number of the receive.
    pub number: u32,
    /// The memory of the receiver that is open here.
    pub open: Arc<OpenMemory>,
}

/// A placement, and the word of the work request that says so.
pub(crate) struct Placing {
    placement: Placement,
    mark: Memory,
}

impl fmt::Debug for Placing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Placement { payload, number, .. } = &self.placement;
        write!(f, "PLACE receive {number} <- [{:#x}] {} B", payload.addr(), payload.len())
    }
}

impl Placing {
    /// Whether its memory is mapped for GPUs.
    pub(super) fn is_found(&self) -> bool {
        let Placement { payload, line, open, .. } = &self.placement;
        [payload, line, &open.table, &self.mark].iter().all(|memory| memory.is_known_to_gpus())
    }

    /// What the kernels of `gpu` do; `None` on another GPU than the memory is open for.
    pub(super) fn steps(&self, gpu: &Gpu) -> Result<Option<[KernelOp; 4]>> {
        let Placement { payload, line, number, open } = &self.placement;
        if gpu.raw_context() != open.gpu.raw_context() {
            return Ok(None);
        }
        let (line, table, mark) = (line.gpu_addr(gpu)?, open.table.gpu_addr(gpu)?, self.mark.gpu_addr(gpu)?);
        let from = (payload.gpu_addr(gpu)?, payload.len() as u64);
        Ok(Some(KernelOp::place((line, *number), table, from, (mark, PLACED))))
    }
}

impl Batch {
    /// As [`Batch::post`], of one send without immediate data whose receive is posted when the stream gets there (the batch waits for
    /// that): a kernel of the stream puts the payload into the receive, if that is in memory that is open, and the device, a software
    /// HCA, only completes both. Otherwise the device moves the payload: so do host streams, streams of other GPUs, those that leave
    /// [copies](super::CudaStreamConfig::copies) to the copy engine, and other devices.
    pub fn post_placed(&mut self, send: PreparedSend, placement: Placement) -> Completion {
        if let Some(mark) = send.queue.mark_of(&send.sends) {
            self.ops.push(Op::Place(Arc::new(Placing { placement, mark })));
            // The number and the mark are of one message.
            _ = self.only_once.get_or_insert((
                "a send into a receive that a peer has told of",
                "Batch::post, which leaves it to the device",
            ));
        }
        self.post(send)
    }
}
