//! `mmap` of a CUDA dma-buf: no kernel module.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;

use super::locate::{Part, host_pages, locate};
use super::proof::{PROBE, Views};
use super::{Allocation, Backend, CudaAllocation, Pinned};
use crate::cpu_range::{CpuRange, Reservation};
use crate::cuda::{AllocKind, Cuda, CudaStatus, MemoryKind};
use crate::error::{Error, Result, check_bounds};
use crate::fork::Owner;
use crate::system::{Kernel, System};
use crate::types::{BackendKind, ENOTSUPP, MappingType, PinFlags, host_page};

/// The first CUDA whose driver maps dma-bufs of GPUs with memory of their own: 13.3.
const FIRST_CUDA: u32 = 13030;
/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED` of `cuda.h`.
const CU_DMA_BUF: u32 = 124;
/// Scratch memory for the proof, bytes: more than one 2 MiB page of the GPU.
const SCRATCH: usize = 4 << 20;

#[derive(Debug)]
pub(crate) struct DmaBuf {
    machine: Machine,
    owner: Owner,
    proofs: Mutex<Proofs>,
}

#[derive(Debug, Default)]
struct Proofs {
    /// Devices whose mappings were proved: ordinal, and [`PinFlags::FORCE_PCIE`] or none.
    proven: HashSet<(i32, PinFlags)>,
    /// Scratch memory by ordinal. Kept until the backend closes: CUDA would wait for all work of the GPU to free it, perhaps for a
    /// stream that waits for the thread that pins here.
    scratch: HashMap<i32, CudaAllocation>,
}

/// The kernel and CUDA, as pins need them.
#[derive(Clone, Debug)]
struct Machine {
    kernel: Arc<dyn Kernel>,
    cuda: Arc<dyn Cuda>,
}

impl DmaBuf {
    /// Whether the driver's version is one that maps dma-bufs; does not initialise CUDA.
    pub(crate) fn survey(system: &System) -> Result<()> {
        let version = system.cuda_version()?;
        if version < FIRST_CUDA {
            return Err(Error::Unsupported {
                what: format!("mmap of a dma-buf (CUDA {}.{})", version / 1000, version % 1000 / 10),
                by: "this NVIDIA driver",
                fix: "update to a driver with CUDA 13.3 or newer, load gdrdrv, or use the rm backend",
            });
        }
        Ok(())
    }

    /// Proves the driver on the first GPU that has dma-bufs. Other GPUs are proved at their first pin, since that makes a CUDA
    /// context there.
    pub(crate) fn open(system: &System) -> Result<Self> {
        Self::survey(system)?;
        let cuda = system.cuda()?;
        let machine = Machine { kernel: system.kernel.clone(), cuda: cuda.clone() };
        let this = Self { machine, owner: Owner::this_process(), proofs: Mutex::default() };
        for gpu in cuda.devices()? {
            if cuda.device_attribute(gpu.ordinal, CU_DMA_BUF)? != 0 {
                this.prove(gpu.ordinal, PinFlags::empty())?;
                return Ok(this);
            }
        }
        Err(no_dma_buf())
    }

    /// Proves once that mappings of a device show what CUDA shows.
    fn prove(&self, device: i32, flags: PinFlags) -> Result<()> {
        let flags = flags & PinFlags::FORCE_PCIE;
        let mut proofs = self.proofs.lock();
        let Proofs { proven, scratch } = &mut *proofs;
        if proven.contains(&(device, flags)) {
            return Ok(());
        }
        let cuda = &self.machine.cuda;
        if cuda.device_attribute(device, CU_DMA_BUF)? == 0 {
            return Err(no_dma_buf());
        }
        let scratch = match scratch.entry(device) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(CudaAllocation::new(cuda, device, SCRATCH)?),
        };
        // The second pin begins inside the memory, in its second large page.
        for start in [0, SCRATCH / 2 + host_page()] {
            let len = SCRATCH - start;
            let pin = Pin::new(&self.machine, scratch.addr() + start as u64, len, flags)?;
            let range = pin.map_unproven(len)?;
            let offsets = [0, len / 2, len - PROBE];
            Views { cuda: &**cuda, device, addr: pin.va(), range: &range }.nonce(&offsets)?;
        }
        proven.insert((device, flags));
        Ok(())
    }
}

fn no_dma_buf() -> Error {
    Error::Unsupported {
        what: "dma-buf".into(),
        by: "this GPU, its driver or this kernel",
        fix: "use NVIDIA's open kernel modules and Linux 5.12 or newer, or another backend",
    }
}

impl Backend for DmaBuf {
    fn kind(&self) -> BackendKind {
        BackendKind::DmaBuf
    }

    fn pin(&self, addr: u64, len: usize, flags: PinFlags) -> Result<Box<dyn Pinned>> {
        self.owner.check()?;
        if len == 0 {
            return Err(Error::invalid("length", len, "at least 1"));
        }
        self.prove(locate(&*self.machine.cuda, addr, len, flags)?.memory.device, flags)?;
        Ok(Box::new(Pin::new(&self.machine, addr, len, flags)?))
    }

    fn allocate_as(&self, device: i32, len: usize, kind: AllocKind) -> Result<Box<dyn Allocation>> {
        self.owner.check()?;
        Ok(Box::new(CudaAllocation::of_kind(&self.machine.cuda, device, len, kind)?))
    }
}

/// `CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES` of `cuda.h`: the link is coherent.
const CU_HOST_PAGE_TABLES: u32 = 100;

/// A pin: a range of whole host pages, pinned until the descriptors are closed.
#[derive(Debug)]
struct Pin {
    machine: Machine,
    owner: Owner,
    va: u64,
    len: usize,
    kind: MappingType,
    segments: Vec<Segment>,
}

/// A part of the range with one piece of physical memory. Each piece gets a dma-buf of its own: drivers have been seen to map only
/// the first piece of a dma-buf.
#[derive(Debug)]
struct Segment {
    fd: OwnedFd,
    len: usize,
    /// The part of the requested range in this allocation.
    part: Part,
}

impl Pin {
    fn new(machine: &Machine, addr: u64, len: usize, flags: PinFlags) -> Result<Self> {
        let (va, span) = host_pages(addr, len)?;
        let end = va + span as u64;
        let mut pin = Self {
            machine: machine.clone(),
            owner: Owner::this_process(),
            va,
            len: span,
            kind: MappingType::Cached,
            segments: Vec::new(),
        };
        let (mut at, wanted) = (va, addr..addr + len as u64);
        while at < end {
            at = pin.export(at, end, &wanted, flags)?;
        }
        Ok(pin)
    }

    /// Exports the piece that begins at `va` and returns its end. CUDA decides about pages outside an allocation.
    fn export(&mut self, va: u64, end: u64, wanted: &Range<u64>, flags: PinFlags) -> Result<u64> {
        let cuda = &*self.machine.cuda;
        // The first page may begin before the allocation.
        let inner = va.max(wanted.start);
        let rest = usize::try_from(wanted.end - inner).unwrap_or(usize::MAX);
        let part = locate(cuda, inner, rest, flags)?;
        let (memory, shown) = (part.memory, part.bytes()?);
        let stop = match memory.kind {
            MemoryKind::Vmm => shown.end.next_multiple_of(host_page() as u64).min(end),
            _ => end,
        };
        let len = usize::try_from(stop - va).map_err(|_| Error::invalid("length", stop - va, "a size"))?;
        let pcie = flags.contains(PinFlags::FORCE_PCIE);
        let fd = cuda.dma_buf(shown.start, va, len, pcie).map_err(|error| match error {
            Error::Cuda { status: CudaStatus::INVALID_VALUE, .. } if !part.holds(inner, rest) => {
                Error::BeyondAllocation { addr: inner, len: rest, base: memory.base, size: memory.size }
            }
            other => other,
        })?;
        // The descriptor keeps the memory from here on. Check that it is still the same.
        if !part.is_live(cuda)? {
            return Err(Error::Invalidated);
        }
        if pcie || cuda.device_attribute(memory.device, CU_HOST_PAGE_TABLES)? == 0 {
            self.kind = MappingType::WriteCombining;
        }
        self.segments.push(Segment { fd, len, part });
        Ok(stop)
    }

    /// Maps the first `len` bytes without a comparison.
    fn map_unproven(&self, len: usize) -> Result<CpuRange> {
        check_bounds(0, len, self.len)?;
        let len = len.max(1).next_multiple_of(host_page());
        let mut range = Reservation::new(len)?;
        let mut rest = len;
        for segment in &self.segments {
            let part = segment.len.min(rest);
            if part == 0 {
                break;
            }
            range.append(&*self.machine.kernel, segment.fd.as_fd(), part).map_err(|e| explain(part, e))?;
            rest -= part;
        }
        range.into_range(self.kind, None)
    }
}

impl Pinned for Pin {
    fn va(&self) -> u64 {
        self.va
    }

    fn pinned_len(&self) -> usize {
        self.len
    }

    fn located(&self) -> Option<&Part> {
        self.segments.first().map(|segment| &segment.part)
    }

    fn map(&self, len: usize, request: Option<MappingType>) -> Result<CpuRange> {
        self.owner.check()?;
        if let Some(other) = request.filter(|wish| *wish != self.kind) {
            let fix = "ask for no type; on coherent links pin with FORCE_PCIE for write combining";
            return Err(other.unsupported("the dma-buf of this memory", fix));
        }
        let range = self.map_unproven(len)?;
        self.segments
            .iter()
            .try_for_each(|segment| segment.part.compare(&*self.machine.cuda, self.va, &range))?;
        Ok(range)
    }

    fn unpin(self: Box<Self>) -> Result<()> {
        self.owner.check()
    }
}

fn explain(len: usize, error: io::Error) -> Error {
    match error.raw_os_error() {
        Some(ENOTSUPP | libc::EOPNOTSUPP | libc::ENODEV) => Error::Unsupported {
            what: "mmap of a dma-buf".into(),
            by: "this NVIDIA driver (before CUDA 13.3 for integrated GPUs only)",
            fix: "update the NVIDIA driver, load gdrdrv, or use the rm backend",
        },
        Some(libc::ENOMEM) => Error::Exhausted {
            what: "PCIe BAR1 space of the GPU, or address space",
            len,
            fix: "unpin memory (`nvidia-smi -q -d MEMORY` shows BAR1 use), or enable Resizable BAR in the BIOS",
        },
        _ => Error::sys(format!("mmap of {len} bytes of a dma-buf"), error, "see the kernel log"),
    }
}
