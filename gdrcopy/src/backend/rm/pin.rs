//! Pinned memory: duplicated handles of the objects under an address range.

use std::os::fd::AsFd;
use std::sync::Arc;

use super::handle::Block;
use super::mapping::{Bar1Mapping, Memory};
use super::{GPU_PAGE, Gpu};
use crate::backend::reservation::Reservation;
use crate::backend::{MappingType, Pinned, host_page, proof};
use crate::cpu_range::CpuRange;
use crate::cuda::{Cuda, MemoryKind, PointerInfo};
use crate::error::{Error, Result};

/// A pinned range. It holds the memory: after a free the old bytes stay until the pin goes.
#[derive(Debug)]
pub(crate) struct RmPin {
    cuda: Arc<dyn Cuda>,
    gpu: Arc<Gpu>,
    /// What the user asked for; the rest of the range may be other allocations or nothing.
    addr: u64,
    end: u64,
    /// Adjacent, in order of address.
    segments: Vec<Segment>,
}

/// The pinned part of one object.
#[derive(Debug)]
struct Segment {
    memory: Arc<Memory>,
    va: u64,
    len: usize,
    /// Where in the object the part begins.
    offset: u64,
    /// The user's first byte in it, and CUDA's number of its allocation.
    user: (u64, u64),
}

impl RmPin {
    /// Pins a range that begins in `memory`, on a GPU whose route for this kind of memory works.
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        cuda: &Arc<dyn Cuda>,
        mut memory: PointerInfo,
        addr: u64,
        len: usize,
    ) -> Result<Self> {
        let beyond = |at: &PointerInfo| Error::BeyondAllocation { addr, len, base: at.base, size: at.size };
        let end = addr.checked_add(len as u64).ok_or_else(|| beyond(&memory))?;
        let mut pin = Self { cuda: cuda.clone(), gpu: gpu.clone(), addr, end, segments: Vec::new() };
        let mut at = addr;
        loop {
            let segment = pin.hold(&memory, at)?;
            at = memory.base + memory.size as u64;
            pin.segments.push(segment);
            if at >= end {
                return Ok(pin);
            }
            let last = memory;
            memory = pin.cuda.pointer(at)?;
            if memory.kind != MemoryKind::Vmm || memory.device != last.device || memory.base != at {
                return Err(beyond(&last));
            }
        }
    }

    /// Duplicates the handle of the object at `at` and finds the part to pin.
    fn hold(&self, memory: &PointerInfo, at: u64) -> Result<Segment> {
        let client = self.gpu.client();
        let device = self.gpu.device();
        let (object, base, size) = if memory.kind == MemoryKind::Malloc {
            let block = Block::from_ipc(&self.cuda.ipc_handle(memory.base)?, memory)?;
            (client.dup(device, block.client, block.object)?, block.base, block.size)
        } else {
            if !memory.exportable {
                return Err(Error::NotMappable {
                    addr: at,
                    found: "memory that CUDA does not export",
                    fix: "create it with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
                });
            }
            if !memory.base.is_multiple_of(GPU_PAGE) || !(memory.size as u64).is_multiple_of(GPU_PAGE) {
                return Err(Error::NotMappable {
                    addr: at,
                    found: "memory mapped with a granularity below 64 KiB",
                    fix: "map it with the granularity that CUDA recommends",
                });
            }
            let fd = self.cuda.export_fd(at)?;
            (client.import(device, fd.as_fd())?, memory.base, memory.size as u64)
        };
        // Whole GPU pages, but nothing outside the object.
        let va = (at - at % GPU_PAGE).max(base);
        let end = self.end.checked_next_multiple_of(GPU_PAGE).unwrap_or(u64::MAX).min(base + size);
        Ok(Segment {
            memory: Memory::new(&self.gpu, object),
            va,
            len: usize::try_from(end - va)
                .map_err(|_| Error::invalid("length", end - va, "an address space's"))?,
            offset: va - base,
            user: (at, memory.buffer_id),
        })
    }

    /// Whether the range begins behind the first byte of its object.
    pub(crate) fn begins_inside_object(&self) -> bool {
        self.segments[0].offset != 0
    }

    /// Refuses a segment whose memory was freed: its bytes can no longer be compared.
    fn check_live(&self, segment: &Segment) -> Result<()> {
        let (addr, id) = segment.user;
        let memory = self.cuda.pointer(addr)?;
        let live = memory.kind != MemoryKind::Unknown && memory.buffer_id == id;
        if live { Ok(()) } else { Err(Error::Invalidated) }
    }

    /// Compares the user's part of a mapping with what CUDA shows.
    fn compare(&self, range: &CpuRange) -> Result<()> {
        let mapped = self.va() + range.len() as u64;
        for segment in &self.segments {
            let start = segment.va.max(self.addr);
            let end = (segment.va + segment.len as u64).min(self.end).min(mapped);
            if start >= end {
                continue;
            }
            self.check_live(segment)?;
            let offset = range_len(start - self.va());
            proof::compare(&*self.cuda, self.gpu.ordinal, self.va(), range, offset, range_len(end - start))
                // Freed meanwhile is another thing than wrong.
                .or_else(|error| self.check_live(segment).and(Err(error)))?;
        }
        Ok(())
    }
}

/// A distance inside a pinned range, whose length is a `usize`.
#[expect(clippy::cast_possible_truncation, reason = "not longer than the range")]
fn range_len(distance: u64) -> usize {
    distance as usize
}

impl Pinned for RmPin {
    fn va(&self) -> u64 {
        self.segments[0].va
    }

    fn pinned_len(&self) -> usize {
        self.segments.iter().map(|segment| segment.len).sum()
    }

    #[expect(clippy::cast_possible_truncation, reason = "64 KiB")]
    fn page_size(&self) -> u32 {
        GPU_PAGE as u32
    }

    fn map(&self, len: usize, request: Option<MappingType>) -> Result<CpuRange> {
        self.gpu.client().check_owner()?;
        if let Some(other) = request.filter(|&kind| kind != MappingType::WriteCombining) {
            return Err(Error::Unsupported {
                what: format!("a mapping of type {other:?}"),
                by: "the rm backend, whose mappings go through BAR1",
                fix: "ask for write combining, or for no type",
            });
        }
        let size = self.pinned_len();
        let len = match len.checked_next_multiple_of(host_page()) {
            Some(rounded) if rounded <= size && rounded > 0 => rounded,
            _ => return Err(Error::OutOfBounds { offset: 0, len, size }),
        };
        // On errors the reservation goes first, then what the resource manager holds.
        let mut mappings = Vec::new();
        let mut reservation = Reservation::new(len)?;
        let mut rest = len;
        for segment in &self.segments {
            let part = segment.len.min(rest);
            if part == 0 {
                break;
            }
            mappings.push(Bar1Mapping::append(&mut reservation, &segment.memory, segment.offset, part)?);
            rest -= part;
        }
        // WC: what the driver uses for BAR1 by default (`nvidia_mmap_helper` in `nv-mmap.c` of the open kernel
        // modules 580.142).
        let range = reservation.into_range(MappingType::WriteCombining, Some(Box::new(mappings)))?;
        self.compare(&range)?;
        Ok(range)
    }

    fn unpin(self: Box<Self>) -> Result<()> {
        self.gpu.client().check_owner()?;
        let mut result = Ok(());
        for segment in self.segments {
            // A mapping that is still there gives the memory back later.
            if let Some(memory) = Arc::into_inner(segment.memory) {
                result = result.and(memory.free());
            }
        }
        result
    }
}
