//! Memory of GPUs that kernels of another GPU of the host access: exported by its owner, opened by a peer.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use gdrcopy::cuda::MemoryKind;
use gdrcopy::cuda::raw::pointer_info;
use parking_lot::Mutex;

use super::{Memory, WeakMemory};
use crate::copy_engine::{Handle, ProcessId, this_process};
use crate::cuda::{Gpu, IpcOpening};
use crate::error::{Error, Result};

/// Exported memory by number, for peers in the same process.
static EXPORTED: LazyLock<Mutex<HashMap<u64, WeakMemory>>> = LazyLock::new(Mutex::default);

/// The first bytes of an export.
const TAG: [u8; 8] = *b"gdspeer1";

/// GPU memory as its owner names it to peers: see [`Memory::export`].
#[derive(Clone, PartialEq, Eq)]
pub struct ExportedMemory {
    process: ProcessId,
    /// Its number in [`EXPORTED`] of that process.
    number: u64,
    handle: Handle,
    len: u64,
    /// The PCI address of its GPU, padded with zeros.
    pci: [u8; 16],
}

impl fmt::Debug for ExportedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ExportedMemory({}, {} B)", self.number, self.len)
    }
}

impl Memory {
    /// Exports the memory to peers on this host, which open it by [`PeerMemory::open`]. It must not be freed while they have it open:
    /// CUDA does not say what they would find then.
    ///
    /// # Errors
    /// [`Error::Unsupported`] unless it is memory of `cudaMalloc`: other memory has no IPC handle; [`Error::Cuda`].
    pub fn export(&self) -> Result<ExportedMemory> {
        let gpu = self.gpu().ok_or(Error::Unsupported {
            what: "access of another GPU to host memory as memory of a peer",
            by: "CUDA IPC",
            fix: "use memory of cudaMalloc, or a queue pair",
        })?;
        let failed = Error::cuda("exporting GPU memory to a peer");
        let _current = gpu.enter()?;
        let info = pointer_info(gpu.api(), self.addr()).map_err(&failed)?;
        if info.kind != MemoryKind::Malloc {
            return Err(Error::Unsupported {
                what: "access of another GPU to memory of a pool, of cuMemCreate or managed memory",
                by: "CUDA IPC",
                fix: "use memory of cudaMalloc (in PyTorch without expandable segments), or a queue pair",
            });
        }
        let mut ipc = [0; 64];
        // SAFETY: a place for the answer; the driver checks the address.
        unsafe { gpu.api().ipc_get_mem_handle(&mut ipc, info.base) }.map_err(&failed)?;
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let mut exported = EXPORTED.lock();
        exported.retain(|_, memory| memory.is_there());
        exported.insert(number, self.downgrade());
        let handle = Handle { ipc, buffer: info.buffer_id, offset: self.addr().saturating_sub(info.base) };
        let mut pci = [0; 16];
        let known = gpu.pci_address().unwrap_or_default().bytes();
        pci.iter_mut().zip(known).for_each(|(to, from)| *to = from);
        Ok(ExportedMemory { process: this_process(), number, handle, len: self.len() as u64, pci })
    }
}

impl ExportedMemory {
    /// Length of [`ExportedMemory::to_bytes`].
    pub const BYTES: usize = 136;

    /// Its bytes, for another process of this host.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let numbers = [self.number, self.handle.buffer, self.handle.offset, self.len].map(u64::to_le_bytes);
        let parts = [&TAG[..], &self.process, &self.handle.ipc, &self.pci];
        let all = parts.into_iter().chain(numbers.iter().map(|number| &number[..])).flatten();
        bytes.iter_mut().zip(all).for_each(|(to, from)| *to = *from);
        bytes
    }

    /// Reads what [`ExportedMemory::to_bytes`] gave in another process. Whether the memory is there [`PeerMemory::open`] checks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for other bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let parsed = || {
            let rest = bytes.strip_prefix(&TAG).filter(|_| bytes.len() == Self::BYTES)?;
            let (process, rest) = rest.split_first_chunk()?;
            let (ipc, rest) = rest.split_first_chunk()?;
            let (pci, rest) = rest.split_first_chunk()?;
            let (numbers, _) = rest.as_chunks::<8>();
            let number = |at: usize| numbers.get(at).map(|bytes| u64::from_le_bytes(*bytes));
            let handle = Handle { ipc: *ipc, buffer: number(1)?, offset: number(2)? };
            Some(Self { process: *process, number: number(0)?, handle, len: number(3)?, pci: *pci })
        };
        let expected = "the bytes that an export of the same release gave";
        parsed().ok_or_else(|| Error::invalid("exported memory", format!("{} bytes", bytes.len()), expected))
    }
}

/// GPU memory of a peer, open for one GPU of this process. Clones share the opening, which ends with the last one.
#[derive(Clone, Debug)]
pub struct PeerMemory {
    len: usize,
    can_add: bool,
    origin: Origin,
}

#[derive(Clone, Debug)]
enum Origin {
    /// Of this process.
    Here(Memory),
    /// Of another one: the opening and the address of the first byte.
    Opened(Arc<IpcOpening>, u64),
}

impl PeerMemory {
    /// Opens memory for the streams of `gpu`, which has to reach the GPU that the memory is on: the same GPU, or one with peer access.
    /// An allocation is opened once, however often this is called. Call it before streams wait: CUDA may block.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the GPUs have no peer access; [`Error::Cuda`] if the memory was freed, or in another container;
    /// [`Error::InvalidArgument`] if it is not in the allocation that it names.
    pub fn open(gpu: &Gpu, exported: &ExportedMemory) -> Result<Self> {
        let ExportedMemory { process, number, ref handle, len, ref pci } = *exported;
        let gone = |what| Error::invalid("exported memory", what, "memory that its owner has not freed");
        let len = usize::try_from(len).map_err(|_| gone("longer than the address space"))?;
        let end = pci.iter().position(|byte| *byte == 0).unwrap_or(pci.len());
        let can_add = gpu.adds_to(&String::from_utf8_lossy(&pci[..end]))?;
        if process == this_process() {
            let memory = EXPORTED.lock().get(&number).and_then(WeakMemory::upgrade);
            let memory = memory.filter(|memory| memory.len() == len).ok_or_else(|| gone("freed"))?;
            memory.gpu_addr(gpu)?;
            return Ok(Self { len, can_add, origin: Origin::Here(memory) });
        }
        let opening = IpcOpening::new(gpu, process, handle, false)?;
        let size = {
            let _current = gpu.enter()?;
            pointer_info(gpu.api(), opening.base()).map_err(Error::cuda("opening memory of a peer"))?.size
        };
        let end = handle.offset.checked_add(len as u64);
        if len == 0 || end.is_none_or(|end| end > size as u64) {
            let value = format!("{len} bytes at {:#x} of an allocation of {size} bytes", handle.offset);
            return Err(Error::invalid("exported memory", value, "a part of the allocation that it names"));
        }
        let addr = opening.base() + handle.offset;
        Ok(Self { len, can_add, origin: Origin::Opened(Arc::new(opening), addr) })
    }

    /// Length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "never empty, as Memory")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether kernels can add to its words in one step, as other GPUs see it. Over PCIe they mostly cannot.
    pub fn can_add(&self) -> bool {
        self.can_add
    }

    /// The address for `gpu` of `len` bytes at `offset`.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::InvalidArgument`] if it is open for another GPU.
    #[inline]
    pub fn gpu_addr(&self, gpu: &Gpu, offset: usize, len: usize) -> Result<u64> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Error::OutOfBounds { offset, len, size: self.len });
        }
        let first = match &self.origin {
            Origin::Here(memory) => memory.gpu_addr(gpu)?,
            Origin::Opened(opening, addr) if opening.gpu().raw_context() == gpu.raw_context() => *addr,
            Origin::Opened(opening, _) => {
                let value = format!("open for {:?}, used on {gpu:?}", opening.gpu());
                return Err(Error::invalid("memory of a peer", value, "memory opened for the stream's GPU"));
            }
        };
        Ok(first + offset as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_exports_are_checked() {
        let handle = Handle { ipc: std::array::from_fn(|i| u8::try_from(i).unwrap()), buffer: 3, offset: 4 };
        let exported = ExportedMemory { process: [7; 16], number: 2, handle, len: 5, pci: [6; 16] };
        let bytes = exported.to_bytes();
        assert_eq!(ExportedMemory::from_bytes(&bytes).unwrap(), exported);
        let mut other = bytes;
        other[3] ^= 1;
        for wrong in [&bytes[..135], &[&bytes[..], &[0]].concat(), &other, &[]] {
            assert!(ExportedMemory::from_bytes(wrong).is_err(), "{wrong:?}");
        }
    }
}
