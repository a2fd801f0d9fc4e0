//! Finds the CUDA allocation of an address range.

use std::ops::Range;

use super::proof::Views;
use crate::cpu_range::CpuRange;
use crate::cuda::{Cuda, MemoryKind, PointerInfo, unknown};
use crate::error::{Error, Result};
use crate::types::{GPU_PAGE, PinFlags, host_page};

/// Alignment of CUDA's allocations, bytes: "at least 256" (CUDA C++ Programming Guide 13.0, "Device Memory Accesses").
const GRAIN: u64 = 256;

/// The part of a range that lies in one CUDA allocation.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) memory: PointerInfo,
    bytes: Range<u64>,
}

impl Part {
    /// The part of a range that lies in this memory.
    pub(crate) fn of(memory: PointerInfo, range: &Range<u64>) -> Self {
        let end = memory.base.saturating_add(memory.size as u64);
        Self { memory, bytes: range.start.max(memory.base)..range.end.min(end) }
    }

    /// The addresses, at least one.
    ///
    /// # Errors
    /// [`Error::NotMappable`] if CUDA does not tell where the memory begins and ends.
    pub(crate) fn bytes(&self) -> Result<Range<u64>> {
        if self.bytes.is_empty() {
            return Err(Error::NotMappable {
                addr: self.bytes.start,
                found: "memory whose bounds CUDA does not tell",
                fix: "allocate with cuMemAlloc or cuMemCreate in this process, or use the gdrdrv backend",
            });
        }
        Ok(self.bytes.clone())
    }

    /// Its first address.
    pub(crate) fn start(&self) -> u64 {
        self.bytes.start
    }

    /// Whether the allocation is live. CUDA may have freed it and given the address to another one.
    pub(crate) fn is_live(&self, cuda: &dyn Cuda) -> Result<bool> {
        Ok(cuda.buffer_id(self.start())? == self.memory.buffer_id)
    }

    /// Compares both ends of the part with a mapping that begins at GPU address `va`, as far as the mapping reaches.
    ///
    /// # Errors
    /// [`Error::Invalidated`] if the memory was freed: CUDA shows nothing of it to compare with.
    pub(crate) fn compare(&self, cuda: &dyn Cuda, va: u64, range: &CpuRange) -> Result<()> {
        let shown = self.bytes()?;
        let (from, to) = (shown.start.max(va), shown.end.min(va + range.len() as u64));
        if from >= to {
            return Ok(());
        }
        let check_live = || if self.is_live(cuda)? { Ok(()) } else { Err(Error::Invalidated) };
        check_live()?;
        let size = |bytes: u64| usize::try_from(bytes).map_err(|_| Error::invalid("length", bytes, "a size"));
        let views = Views { cuda, device: self.memory.device, addr: va, range };
        views
            .compare(size(from - va)?, size(to - from)?)
            // The memory may have been freed meanwhile.
            .or_else(|error| check_live().and(Err(error)))
    }

    /// Whether these addresses are all within the allocation.
    pub(crate) fn holds(&self, addr: u64, len: usize) -> bool {
        self.bytes.start <= addr && addr.checked_add(len as u64).is_some_and(|end| end <= self.bytes.end)
    }
}

/// Finds the allocation at the beginning of a range. Refuses memory that cannot be mapped and, without
/// [`PinFlags::WHOLE_PAGES`], a range beyond the allocation. A VMM range may continue in the next mapping: its backend checks that.
pub(crate) fn locate(cuda: &dyn Cuda, addr: u64, len: usize, flags: PinFlags) -> Result<Part> {
    let beyond =
        |memory: &PointerInfo| Error::BeyondAllocation { addr, len, base: memory.base, size: memory.size };
    let whole_pages = flags.contains(PinFlags::WHOLE_PAGES);
    let mut memory = cuda.pointer(addr)?;
    if memory.kind == MemoryKind::Unknown && whole_pages {
        memory = next(cuda, addr, len)?.unwrap_or(memory);
    }
    let (found, fix) = match memory.kind {
        MemoryKind::Malloc | MemoryKind::Vmm | MemoryKind::Pool => {
            let end = addr.checked_add(len as u64).ok_or_else(|| beyond(&memory))?;
            let part = Part::of(memory, &(addr..end));
            let may_go_on = whole_pages || memory.kind == MemoryKind::Vmm;
            return if may_go_on || part.holds(addr, len) { Ok(part) } else { Err(beyond(&memory)) };
        }
        MemoryKind::Managed => ("managed memory, which moves", "allocate with cuMemAlloc or cuMemCreate"),
        MemoryKind::Host => ("host memory", "use it directly; only GPU memory needs a mapping"),
        MemoryKind::Unknown => return Err(unknown(addr)),
    };
    Err(Error::NotMappable { addr, found, fix })
}

/// The host pages around a range: their address and length.
pub(crate) fn host_pages(addr: u64, len: usize) -> Result<(u64, usize)> {
    let page = host_page() as u64;
    let va = addr & !(page - 1);
    let end = addr.checked_add(len as u64).and_then(|end| end.checked_next_multiple_of(page));
    let span = end.and_then(|end| usize::try_from(end - va).ok());
    Ok((va, span.ok_or_else(|| Error::invalid("length", len, "within the address space"))?))
}

/// The first allocation that begins after the first byte of a range, in the same GPU page.
fn next(cuda: &dyn Cuda, addr: u64, len: usize) -> Result<Option<PointerInfo>> {
    let page = (addr | (GPU_PAGE - 1)).saturating_add(1);
    let end = addr.saturating_add(len as u64).min(page);
    let mut at = addr;
    while let Some(place) = at.checked_add(1).and_then(|at| at.checked_next_multiple_of(GRAIN)) {
        if place >= end {
            break;
        }
        if cuda.buffer_id(place)? != 0 {
            return cuda.pointer(place).map(Some);
        }
        at = place;
    }
    Ok(None)
}
