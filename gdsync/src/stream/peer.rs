//! Copies between GPUs of a host by streams, with a signal behind the data.
//!
//! A kernel of the stream, or its copy engine, stores into memory of the peer, over NVLink or PCIe; streams there wait for a word in their
//! own memory. No queue, doorbell or thread of a CPU is on the way.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::op::Op;
use super::{Batch, StateGuard, Stream};
use gdsync_device::cuda::Gpu;
use gdsync_device::cuda::kernel_exec::{KernelOp, Program};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Memory, PeerMemory};

/// A 64-bit word of a peer that a stream writes or adds to, behind the data that it has put there.
#[derive(Clone, Debug)]
pub struct PeerSignal {
    /// The memory of the word.
    pub to: PeerMemory,
    /// Its offset there, so that the word is aligned.
    pub offset: usize,
    /// Its new value, or what is added.
    pub value: u64,
    /// Whether to add. The addition is atomic to those of other GPUs by kernels, not to those of CPUs or of software HCAs. It needs
    /// [`PeerMemory::can_add`].
    pub add: bool,
}

impl PeerSignal {
    fn check(&self) -> Result<()> {
        within(&self.to, self.offset, 8)?;
        if self.add && !self.to.can_add() {
            return Err(Error::Unsupported {
                what: "adding to a word in memory of a peer",
                by: "the link between the GPUs, which has no atomics (PCIe)",
                fix: "write the signal's value instead of adding to it, or use a queue pair",
            });
        }
        Ok(())
    }
}

/// A copy, a signal, or a copy with a signal behind it.
pub(crate) struct PeerCopy {
    /// Source, destination and length.
    copy: Option<(Side, Side, usize)>,
    signal: Option<PeerSignal>,
}

/// One end of a copy.
enum Side {
    Own(Memory),
    /// Memory of a peer, from an offset on.
    Peer(PeerMemory, usize),
}

impl Side {
    fn addr(&self, gpu: &Gpu, len: usize) -> Result<u64> {
        match self {
            Self::Own(memory) => memory.gpu_addr(gpu),
            Self::Peer(memory, offset) => memory.gpu_addr(gpu, *offset, len),
        }
    }
}

impl fmt::Debug for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own(memory) => write!(f, "[{:#x}]", memory.addr()),
            Self::Peer(_, offset) => write!(f, "[peer + {offset:#x}]"),
        }
    }
}

impl fmt::Debug for PeerCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((from, to, len)) = &self.copy {
            write!(f, "COPY {to:?} <- {from:?} {len} B")?;
        }
        let Some(PeerSignal { offset, value, add, .. }) = &self.signal else { return Ok(()) };
        write!(f, "SIGNAL [peer + {offset:#x}] {} {value:#x}", if *add { "+=" } else { "<-" })
    }
}

impl PeerCopy {
    /// Whether its memory is mapped for GPUs.
    pub(super) fn is_found(&self) -> bool {
        let is_known = |side: &Side| match side {
            Side::Own(memory) => memory.is_known_to_gpus(),
            Side::Peer(..) => true,
        };
        self.copy.iter().all(|(from, to, _)| is_known(from) && is_known(to))
    }

    /// Adds what `gpu` does: kernels, or the copy engine and memory operations, for which a copy has the same steps.
    pub(super) fn add_steps(&self, gpu: &Gpu, by_kernel: bool, steps: &mut Program) -> Result<()> {
        if let Some((from, to, len)) = &self.copy {
            let (to, from) = (to.addr(gpu, *len)?, from.addr(gpu, *len)?);
            steps.extend_from_slice(&KernelOp::copy(to, from, *len as u64));
        }
        if let Some(PeerSignal { to, offset, value, add }) = &self.signal {
            let addr = aligned(to.gpu_addr(gpu, *offset, 8)?, 8)?;
            steps.push(signal(addr, *value, *add, by_kernel)?);
        }
        Ok(())
    }
}

impl Batch {
    /// Copies `range` of `from` to `offset` in memory of a peer, by a kernel of the stream; then signals, if asked to. Who has seen the
    /// signal sees the data, of this copy and of all earlier work of the stream. A stream that has failed copies and signals nothing.
    /// A word that the stream waits for just before must stay satisfied until the signal: several blocks may look at it.
    ///
    /// Streams of [`Via::MemOp`](super::Via::MemOp) launch a kernel for this, too, unless
    /// [`CudaStreamConfig::copies`](super::CudaStreamConfig::copies) leaves it to the copy engine, which promises less. Kernels use 16
    /// multiprocessors for more than 96 KiB, and 64 for more than 4 MiB. In [`KernelSteps`](super::KernelSteps) the application's block copies.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::Unsupported`] to add over PCIe. At submission [`Error::Unsupported`] on host streams, and to add
    /// where the copy engine copies; [`Error::InvalidArgument`] for memory that is open for another GPU; [`Error::Cuda`].
    pub fn put_peer(
        &mut self,
        from: &Memory,
        range: Range<usize>,
        to: &PeerMemory,
        offset: usize,
        signal: Option<PeerSignal>,
    ) -> Result<()> {
        let (from, len) = part(from, range)?;
        within(to, offset, len)?;
        self.peer(Side::Own(from), Side::Peer(to.clone(), offset), len, signal)
    }

    /// Copies from `offset` in memory of a peer to `range` of `to`, as [`Batch::put_peer`] does.
    ///
    /// # Errors
    /// As [`Batch::put_peer`].
    pub fn get_peer(
        &mut self,
        from: &PeerMemory,
        offset: usize,
        to: &Memory,
        range: Range<usize>,
    ) -> Result<()> {
        let (to, len) = part(to, range)?;
        within(from, offset, len)?;
        self.peer(Side::Peer(from.clone(), offset), Side::Own(to), len, None)
    }

    /// Signals a peer behind all earlier work of the stream: see [`Batch::put_peer`].
    ///
    /// # Errors
    /// As [`Batch::put_peer`].
    pub fn signal_peer(&mut self, signal: PeerSignal) -> Result<()> {
        signal.check()?;
        self.ops.push(Op::Peer(Arc::new(PeerCopy { copy: None, signal: Some(signal) })));
        Ok(())
    }

    fn peer(&mut self, from: Side, to: Side, len: usize, signal: Option<PeerSignal>) -> Result<()> {
        signal.as_ref().map_or(Ok(()), PeerSignal::check)?;
        let copy = (len > 0).then_some((from, to, len));
        if copy.is_some() || signal.is_some() {
            self.ops.push(Op::Peer(Arc::new(PeerCopy { copy, signal })));
        }
        Ok(())
    }
}

impl Stream {
    /// Whether copies to or from memory that is open for this GPU can take the place of work requests now: on streams of the GPU, but not
    /// while kernel steps are recorded, as all of a block must run those with copies.
    pub fn takes_peer_copies(&self, gpu: &Gpu) -> bool {
        let is_of_gpu = self.0.engine.gpu().is_some_and(|own| own.raw_context() == gpu.raw_context());
        let records_steps =
            |state: &StateGuard<'_>| state.recording.as_ref().is_some_and(|r| r.steps.is_some());
        is_of_gpu && self.state().is_ok_and(|state| !records_steps(&state))
    }

    /// Copies to memory of a peer and signals, in stream order: see [`Batch::put_peer`].
    ///
    /// # Errors
    /// As [`Batch::put_peer`]; [`Error::StreamFull`]; the error that failed the stream.
    pub fn put_peer(
        &self,
        from: &Memory,
        range: Range<usize>,
        to: &PeerMemory,
        offset: usize,
        signal: Option<PeerSignal>,
    ) -> Result<()> {
        self.submit_one(None, |batch| batch.put_peer(from, range.clone(), to, offset, signal.clone()))
    }

    /// Copies from memory of a peer, in stream order: see [`Batch::get_peer`].
    ///
    /// # Errors
    /// As [`Stream::put_peer`].
    pub fn get_peer(&self, from: &PeerMemory, offset: usize, to: &Memory, range: Range<usize>) -> Result<()> {
        self.submit_one(None, |batch| batch.get_peer(from, offset, to, range.clone()))
    }

    /// Signals a peer, in stream order: see [`Batch::signal_peer`].
    ///
    /// # Errors
    /// As [`Stream::put_peer`].
    pub fn signal_peer(&self, signal: PeerSignal) -> Result<()> {
        self.submit_one(None, |batch| batch.signal_peer(signal.clone()))
    }
}

/// The range of own memory, and its length.
pub(super) fn part(memory: &Memory, range: Range<usize>) -> Result<(Memory, usize)> {
    let len = range.len();
    let part = if len == 0 { memory.clone() } else { memory.slice(range.start, len)? };
    Ok((part, len))
}

/// Writes a word of a peer, or adds to it, by a kernel or by a memory operation.
#[inline]
pub(super) fn signal(addr: u64, value: u64, add: bool, by_kernel: bool) -> Result<KernelOp> {
    match (by_kernel, add) {
        (true, _) => Ok(KernelOp::signal64(addr, value, add)),
        (false, false) => Ok(KernelOp::write64(addr, value)),
        (false, true) => Err(Error::Unsupported {
            what: "adding to a word in memory of a peer",
            by: "a stream that launches no kernel for it: its copies are left to the copy engine",
            fix: "write the signal's value instead of adding to it, or use a queue pair",
        }),
    }
}

/// The address of a word, which has to be a multiple of `to`.
pub(super) fn aligned(addr: u64, to: u64) -> Result<u64> {
    match addr.is_multiple_of(to) {
        true => Ok(addr),
        false if to == 16 => Err(Error::invalid("slots", format!("{addr:#x}"), "a multiple of 16")),
        false => Err(Error::invalid("signal of a peer", format!("{addr:#x}"), "an aligned 64-bit word")),
    }
}

/// Checks a range of memory of a peer.
pub(super) fn within(memory: &PeerMemory, offset: usize, len: usize) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= memory.len() => Ok(()),
        _ => Err(Error::OutOfBounds { offset, len, size: memory.len() }),
    }
}
