//! Pinned memory: duplicated handles of the objects under an address range.

use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;

use super::Gpu;
use super::client::Object;
use super::handle::Block;
use super::mapping::{Bar1Mapping, Memory};
use crate::backend::reservation::Reservation;
use crate::backend::{GPU_PAGE, MappingType, Part, Pinned, host_page, proof};
use crate::cpu_range::CpuRange;
use crate::cuda::{Cuda, MemoryKind};
use crate::error::{Error, Result};

/// A pinned range. It holds the memory: after a free the old bytes stay until the pin goes.
#[derive(Debug)]
pub(crate) struct RmPin {
    cuda: Arc<dyn Cuda>,
    gpu: Arc<Gpu>,
    /// Adjacent, in order of address.
    segments: Vec<Segment>,
    /// Bytes behind the last object that were asked for as well. A mapping has a hole there.
    hole: usize,
}

/// The pinned part of one object.
#[derive(Debug)]
struct Segment {
    memory: Arc<Memory>,
    va: u64,
    len: usize,
    /// Where in the object the part begins.
    offset: u64,
    /// What CUDA shows of what the user asked for; the rest may be other allocations or nothing. No mapping is handed out
    /// unless it is live and has the same bytes.
    part: Part,
}

/// An object with a handle of our own.
#[derive(Debug)]
struct Found {
    object: Object,
    /// Its address.
    base: u64,
    /// Its size, bytes.
    size: u64,
}

impl Found {
    fn end(&self) -> u64 {
        self.base.saturating_add(self.size)
    }
}

impl RmPin {
    /// Pins a range that was located, on a GPU whose route for this kind of memory works.
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        cuda: &Arc<dyn Cuda>,
        mut part: Part,
        addr: u64,
        len: usize,
    ) -> Result<Self> {
        let beyond = |base, size| Error::BeyondAllocation { addr, len, base, size };
        let mut pin = Self { cuda: cuda.clone(), gpu: gpu.clone(), segments: Vec::new(), hole: 0 };
        let mut rest = addr..addr + len as u64;
        loop {
            let object = pin.object(&part, rest.start)?;
            let end = object.end();
            if part.memory.kind == MemoryKind::Malloc {
                // The range may leave the allocation, but not the block that it is a part of, except for its last page:
                // blocks end at any multiple of 4 KiB, and who rounds to GPU pages asks for what is not there.
                let last = end.checked_next_multiple_of(GPU_PAGE).unwrap_or(end).saturating_add(GPU_PAGE);
                if rest.start < object.base || rest.end > last {
                    return Err(beyond(object.base, range_len(object.size)));
                }
                let asked = rest.end.next_multiple_of(host_page() as u64);
                pin.hole = range_len(asked.saturating_sub(end));
            }
            pin.segments.push(pin.segment(object, &part, &rest)?);
            if end >= rest.end || pin.hole > 0 {
                return Ok(pin);
            }
            rest.start = end;
            let memory = pin.cuda.pointer(rest.start)?;
            let last = part.memory;
            if memory.kind != MemoryKind::Vmm || memory.device != last.device || memory.base != rest.start {
                return Err(beyond(last.base, last.size));
            }
            part = Part::of(memory, &rest);
        }
    }

    /// A handle of our own for the object of this memory, which is to be at `at`, or that and more in one block.
    fn object(&self, part: &Part, at: u64) -> Result<Found> {
        let (client, device, memory) = (self.gpu.client(), self.gpu.device(), &part.memory);
        part.bytes()?;
        if memory.kind == MemoryKind::Malloc {
            let Block { client: source, object, base, size } =
                Block::from_ipc(&self.cuda.ipc_handle(memory.base)?, memory)?;
            return Ok(Found { object: client.dup(device, source, object)?, base, size });
        }
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
        Ok(Found { object: client.import(device, fd.as_fd())?, base: memory.base, size: memory.size as u64 })
    }

    /// The part of an object that a range needs: whole GPU pages, but nothing outside the object.
    fn segment(&self, found: Found, part: &Part, range: &Range<u64>) -> Result<Segment> {
        let va = (range.start - range.start % GPU_PAGE).max(found.base);
        let end = range.end.checked_next_multiple_of(GPU_PAGE).unwrap_or(u64::MAX).min(found.end());
        Ok(Segment {
            memory: Memory::new(&self.gpu, found.object),
            va,
            len: usize::try_from(end - va)
                .map_err(|_| Error::invalid("length", end - va, "an address space's"))?,
            offset: va - found.base,
            part: part.clone(),
        })
    }

    /// Whether the range begins behind the first byte of its object.
    pub(crate) fn begins_inside_object(&self) -> bool {
        self.segments[0].offset != 0
    }

    /// Refuses a segment whose memory was freed: its bytes can no longer be compared.
    fn check_live(&self, segment: &Segment) -> Result<()> {
        let memory = self.cuda.pointer(segment.part.start())?;
        let live = memory.kind != MemoryKind::Unknown && memory.buffer_id == segment.part.memory.buffer_id;
        if live { Ok(()) } else { Err(Error::Invalidated) }
    }

    /// Compares what CUDA shows of the user's range with the mapping.
    fn compare(&self, range: &CpuRange) -> Result<()> {
        let mapped = self.va() + range.len() as u64;
        for segment in &self.segments {
            let Range { start, end } = segment.part.bytes()?;
            let end = end.min(mapped);
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
        self.backed_len() + self.hole
    }

    fn backed_len(&self) -> usize {
        self.segments.iter().map(|segment| segment.len).sum()
    }

    fn located(&self) -> Option<&Part> {
        self.segments.first().map(|segment| &segment.part)
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
