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
use super::peer::aligned;
use super::{Batch, PeerSignal, PreparedSend, PreparedWait};
use crate::verbs::Completion;
use gdsync_device::PLACED;
use gdsync_device::cuda::Gpu;
use gdsync_device::cuda::kernel_exec::{KernelOp, Program, Receive};
use gdsync_device::error::Result;
use gdsync_device::memory::{Memory, PeerMemory, Word64};

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

    /// The line in this memory, as its owner has written it last.
    fn load(memory: &Memory) -> Result<Self> {
        let [told, place] =
            [memory.atomic64(0)?, memory.atomic64(8)?].map(|word| word.load(Ordering::Acquire));
        let [len, number] = [told, told >> 32].map(|half| u32::try_from(half & u64::from(u32::MAX)));
        let [first, second, slot, ..] = place.to_be_bytes();
        Ok(Self {
            number: number.unwrap_or_default(),
            len: len.unwrap_or_default(),
            slot,
            generation: u16::from_be_bytes([first, second]),
            offset: place & (Self::MAX_OFFSET - 1),
        })
    }

    /// Stores it. Whoever learns behind this that the receive is posted finds it.
    ///
    /// # Errors
    /// [`gdsync_device::error::Error::OutOfBounds`].
    pub fn store(&self, memory: &Memory, at: usize) -> Result<()> {
        self.prepare(memory, at)?;
        memory.atomic64(at)?.store(self.told(), Ordering::Release);
        Ok(())
    }

    /// Stores what nobody follows before the first word is written.
    fn prepare(&self, memory: &Memory, at: usize) -> Result<()> {
        memory.atomic64(at)?.store(0, Ordering::SeqCst);
        let place = u64::from(self.generation) << 48 | u64::from(self.slot) << 40 | self.offset;
        memory.atomic64(at + 8)?.store(place, Ordering::Release);
        Ok(())
    }

    /// The first word.
    fn told(&self) -> u64 {
        u64::from(self.number) << 32 | u64::from(self.len)
    }
}

/// The memory of a peer that is open for a GPU, by the numbers that the peer gave: kernels look it up here.
#[derive(Debug)]
pub struct OpenMemory {
    gpu: Gpu,
    table: Memory,
    /// With their generations.
    open: Mutex<Vec<Option<(u16, PeerMemory)>>>,
}

impl OpenMemory {
    /// Nothing yet, of so many numbers, at most 256.
    ///
    /// # Errors
    /// As [`Gpu::alloc`].
    pub fn new(gpu: &Gpu, slots: usize) -> Result<Arc<Self>> {
        // Kernels read it, best in their own memory, also where a line names a slot that there is not.
        const BYTES: usize = 16 * 256;
        let table = gpu.alloc_piece(BYTES).or_else(|_| gpu.alloc_host_piece(BYTES))?;
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
        open[usize::from(slot)] = Some((generation, memory));
        Ok(())
    }

    /// The memory of a receive of at least `len` bytes, with its offset there, if it is open.
    fn find(&self, line: &ReceiveLine, len: usize) -> Option<(PeerMemory, usize)> {
        let offset = usize::try_from(line.offset).ok()?;
        let open = self.open.lock();
        let (generation, memory) = open.get(usize::from(line.slot))?.as_ref()?;
        let is_right = *generation == line.generation && len <= line.len as usize;
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= memory.len());
        (is_right && is_inside).then(|| (memory.clone(), offset))
    }
}

/// The shortest payload for which a stream of memory operations launches a kernel.
const LEAST: usize = 4096;

/// Whether a stream of memory operations launches a kernel to tell of a receive, by the first word of its line.
pub(super) fn is_long(told: u64) -> bool {
    told & u64::from(u32::MAX) >= LEAST as u64
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
    /// Whether the receive is known to be posted: then the line is read now, and not by the kernel.
    pub is_posted: bool,
    /// The memory of the receiver that is open here.
    pub open: Arc<OpenMemory>,
    /// [`Qp::send_gaps`](crate::verbs::Qp::send_gaps), as the number was made with. If a batch before this one is dropped, so that there are
    /// more, the device moves the payload.
    pub gaps: u64,
    /// Tells the receiver, behind the payload: see [`Batch::wait_or_arrival`].
    pub told: Option<PeerSignal>,
}

/// A placement, and the word of the work request that says so.
pub(crate) struct Placing {
    placement: Placement,
    /// The receive, if it is known already.
    receive: Option<(PeerMemory, usize)>,
    mark: Memory,
    sent: Completion,
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

    /// Adds what the kernels of `gpu` do, which run all `ops` or only copies: nothing on another GPU than the memory is open for, and for
    /// another message.
    pub(super) fn add_steps(&self, gpu: &Gpu, ops: bool, steps: &mut Program) -> Result<()> {
        let Placement { payload, line, number, open, gaps, told, .. } = &self.placement;
        let is_other =
            gpu.raw_context() != open.gpu.raw_context() || *gaps != self.sent.end.tracker.lock().gaps;
        if is_other || !ops && payload.len() < LEAST {
            return Ok(());
        }
        let into = match &self.receive {
            Some((memory, offset)) => Receive::At(memory.gpu_addr(gpu, *offset, payload.len())?),
            None => {
                let (line, table) = (line.gpu_addr(gpu)?, open.table.gpu_addr(gpu)?);
                Receive::Find { line, number: *number, table }
            }
        };
        let told = match told {
            Some(told) => Some((aligned(told.to.gpu_addr(gpu, told.offset, 8)?, 8)?, told.value)),
            None => None,
        };
        let (from, mark) = ((payload.gpu_addr(gpu)?, payload.len() as u64), self.mark.gpu_addr(gpu)?);
        steps.extend(KernelOp::place(into, from, told, (mark, PLACED)));
        Ok(())
    }
}

impl Batch {
    /// As [`Batch::post`], of one send without immediate data whose receive is posted when the stream gets there (the batch waits for
    /// that): a kernel of the stream puts the payload into the receive, if that is in memory that is open, and the device, a software
    /// HCA, only completes both. Otherwise the device moves the payload: so do host streams, streams of other GPUs, those that leave
    /// [copies](super::CudaStreamConfig::copies) to the copy engine, and other devices.
    pub fn post_placed(&mut self, send: PreparedSend, placement: Placement) -> Completion {
        if let Some(mark) = send.queue.mark_of(&send.sends) {
            let line =
                || ReceiveLine::load(&placement.line).ok().filter(|line| line.number == placement.number);
            let receive = placement.is_posted.then(line).flatten();
            let receive = receive.and_then(|line| placement.open.find(&line, placement.payload.len()));
            let sent = send.completion();
            self.ops.push(Op::Place(Arc::new(Placing { placement, receive, mark, sent })));
            // The number and the mark are of one message.
            _ = self.only_once.get_or_insert((
                "a send into a receive that a peer has told of",
                "Batch::post, which leaves it to the device",
            ));
        }
        self.post(send)
    }

    /// Tells a peer of a receive, whose line is at `at` of the memory, when the stream gets there, unless it has failed. Streams of memory
    /// operations leave short receives out.
    ///
    /// # Errors
    /// [`gdsync_device::error::Error::OutOfBounds`].
    pub fn tell_receive(&mut self, line: &ReceiveLine, memory: &Memory, at: usize) -> Result<()> {
        line.prepare(memory, at)?;
        self.ops.push(Op::Tell { line: memory.word64(at)?, told: line.told() });
        Ok(())
    }

    /// As [`Batch::wait`], for a send. If it was [posted](Batch::post_placed) last in this batch, kernels that have put its payload into the
    /// receive go on at once, as the memory may be written again; the completion follows. Only if no earlier completion is waited for with
    /// it.
    ///
    /// # Errors
    /// As [`Batch::wait`].
    pub fn wait_unless_placed(&mut self, completion: &Completion) -> Result<()> {
        let last = self.ops.iter().rev().find_map(|op| match op {
            Op::Place(placing) => Some(Some(&placing.sent)),
            // Another copy.
            Op::Peer(_) | Op::Message(_) => Some(None),
            _ => None,
        });
        match last.flatten().is_some_and(|sent| sent.is(completion)) {
            true => self.wait_with(completion, Op::UnlessPlaced),
            false => self.wait(completion),
        }
    }

    /// As [`Batch::wait`], for a receive. Kernels also go on when the upper half of `word`, in memory of their GPU, is `number`: a peer writes
    /// it behind a payload that it has [put](Batch::post_placed) into the receive, whose completion follows. Only if no earlier completion
    /// is waited for with it; then it says nothing of earlier ones.
    ///
    /// # Errors
    /// As [`Batch::wait`].
    pub fn wait_or_arrival(&mut self, completion: &Completion, word: &Word64, number: u32) -> Result<()> {
        self.wait_with(completion, Op::OrArrival { at: word.clone(), number })
    }

    /// Waits, with what ends the wait before its completion if that is the only one.
    fn wait_with(&mut self, completion: &Completion, earlier: Op) -> Result<()> {
        let claimed = self.waits.len();
        self.wait(completion)?;
        if self.waits.get(claimed).is_some_and(PreparedWait::is_for_one) {
            self.ops.push(earlier);
            _ = self.only_once.get_or_insert((
                "a wait that may end before its completion",
                "a wait for the completion alone",
            ));
        }
        Ok(())
    }
}
