//! Memory held by dma-bufs.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use super::Machine;
use crate::backend::reservation::Reservation;
use crate::backend::{ENOTSUPP, MappingType, Part, PinFlags, Pinned, host_page, inside, locate, proof};
use crate::cpu_range::CpuRange;
use crate::cuda::{CudaStatus, MemoryKind};
use crate::error::{Error, Result};
use crate::fork::Owner;

/// `CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES` of `cuda.h`: the link is coherent.
const CU_HOST_PAGE_TABLES: u32 = 100;

/// A pin: the range in whole host pages, held until the descriptors are closed.
#[derive(Debug)]
pub(super) struct Pin {
    machine: Machine,
    owner: Owner,
    va: u64,
    len: usize,
    kind: MappingType,
    segments: Vec<Segment>,
}

/// A part of the range with one piece of physical memory: drivers have been seen to map only the first piece
/// of a dma-buf, so each gets its own.
#[derive(Debug)]
struct Segment {
    fd: OwnedFd,
    len: usize,
    /// What CUDA shows of what the user asked for.
    part: Part,
}

impl Pin {
    pub(super) fn new(machine: &Machine, addr: u64, len: usize, flags: PinFlags) -> Result<Self> {
        let page = host_page() as u64;
        let va = addr & !(page - 1);
        let end = addr.checked_add(len as u64).and_then(|end| end.checked_next_multiple_of(page));
        let span = end.and_then(|end| usize::try_from(end - va).ok());
        let (Some(end), Some(span)) = (end, span) else {
            return Err(Error::invalid("length", len, "within the address space"));
        };
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

    /// Exports the piece that begins at `va`; gives its end. CUDA decides about pages outside an allocation.
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
        // The descriptor holds the memory from here on; was it still the same?
        if !part.is_live(cuda)? {
            return Err(Error::Invalidated);
        }
        if pcie || cuda.device_attribute(memory.device, CU_HOST_PAGE_TABLES)? == 0 {
            self.kind = MappingType::WriteCombining;
        }
        self.segments.push(Segment { fd, len, part });
        Ok(stop)
    }

    /// Maps the first `len` bytes, for the proof only.
    pub(super) fn map_unproven(&self, len: usize) -> Result<CpuRange> {
        inside(0, len, self.len)?;
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

    /// Looks at both ends of each piece of what the user asked for.
    fn prove(&self, range: &CpuRange) -> Result<()> {
        let cuda = &*self.machine.cuda;
        let end = self.va + range.len() as u64;
        for segment in &self.segments {
            let Range { start: from, end: to } = segment.part.bytes()?;
            let Some(len) = end.min(to).checked_sub(from).filter(|len| *len > 0) else {
                continue;
            };
            // Freed memory has nothing to be compared with any more.
            if !segment.part.is_live(cuda)? {
                return Err(Error::Invalidated);
            }
            let size = |bytes: u64| {
                usize::try_from(bytes)
                    .map_err(|_| Error::invalid("length", bytes, "within the address space"))
            };
            proof::compare(
                cuda,
                segment.part.memory.device,
                self.va,
                range,
                size(from - self.va)?,
                size(len)?,
            )?;
        }
        Ok(())
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

    fn page_size(&self) -> u32 {
        u32::try_from(host_page()).expect("pages are small")
    }

    fn map(&self, len: usize, request: Option<MappingType>) -> Result<CpuRange> {
        self.owner.check()?;
        if let Some(other) = request.filter(|wish| *wish != self.kind) {
            return Err(Error::Unsupported {
                what: format!("a mapping of type {other:?}"),
                by: "the dma-buf of this memory",
                fix: "ask for no type; on coherent links pin with FORCE_PCIE for write combining",
            });
        }
        let range = self.map_unproven(len)?;
        self.prove(&range)?;
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
