//! No module: the NVIDIA driver's resource-manager interface.
//!
//! The driver maps GPU memory for the CPU on request of one of its clients. CUDA is such a client. This backend is another client in
//! the same process: it obtains a handle for CUDA's memory object and asks the driver to map it.
//!
//! - `cuMemCreate` memory is exported by CUDA as a file descriptor and imported.
//! - `cuMemAlloc` memory is duplicated from CUDA's client. The CUDA IPC handle contains the object's handles; its layout is not
//!   documented, so every number is compared with CUDA's information.
//! - Stream-ordered pool memory can be neither exported nor duplicated, and is refused.
//!
//! The interface is not documented for other clients. So each kind of memory is proved with the backend's own memory at its first use
//! on each GPU, in both directions, and each mapping of the user's memory is compared with what CUDA shows before it is returned. The
//! comparison never writes to the user's memory, since a running kernel's result could be lost; so it cannot detect other memory with
//! equal bytes. A mapping that ends before the requested byte is not compared. Of a range beyond its allocation
//! ([`PinFlags::WHOLE_PAGES`]), the part in the first allocation is compared.
//!
//! A pin keeps the memory: after a free the mapping shows the old bytes. Mappings are write-combined BAR1 mappings; each takes one
//! open file. Measured on an H200 with driver 580.159.04.

pub(crate) mod abi;
mod client;

use std::collections::HashMap;
use std::ffi::CString;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;

use self::abi::{Escape, NvStatus};
use self::client::{Block, Client, Object, refused};
use super::locate::{Part, locate};
use super::proof::Views;
use super::{Allocation, Backend, CudaAllocation, Pinned};
use crate::cpu_range::{CpuRange, Reservation};
use crate::cuda::{AllocKind, Cuda, GpuInfo, MemoryKind};
use crate::error::{Error, Result};
use crate::system::System;
use crate::types::{BackendKind, GPU_PAGE, MappingType, PinFlags, host_page};

/// The backend.
#[derive(Debug)]
pub(crate) struct Rm {
    cuda: Arc<dyn Cuda>,
    /// By CUDA ordinal, opened at first use. Dropped before the client.
    gpus: Mutex<HashMap<i32, Arc<Gpu>>>,
    client: Arc<Client>,
}

impl Rm {
    /// Whether there is CUDA and the driver accepts clients; does not initialise CUDA.
    pub(crate) fn survey(system: &System) -> Result<()> {
        system.cuda_version()?;
        Client::open(system.kernel.clone()).map(drop)
    }

    /// Opens the driver and proves that `cuMemAlloc` memory of the first GPU can be mapped.
    pub(crate) fn open(system: &System) -> Result<Self> {
        let cuda = system.cuda()?.clone();
        let client = Client::open(system.kernel.clone())?;
        let first = cuda.devices()?.first().map(|gpu| gpu.ordinal).ok_or_else(|| Error::Unsupported {
            what: "mapping GPU memory".into(),
            by: "this machine: CUDA shows no GPU",
            fix: "look at CUDA_VISIBLE_DEVICES, or use the host backend",
        })?;
        let this = Self { cuda, gpus: Mutex::default(), client };
        let gpu = this.gpu(first)?;
        gpu.prove(&this.cuda, AllocKind::Malloc)?;
        Ok(this)
    }

    fn gpu(&self, ordinal: i32) -> Result<Arc<Gpu>> {
        let mut gpus = self.gpus.lock();
        if let Some(gpu) = gpus.get(&ordinal) {
            return Ok(gpu.clone());
        }
        let info = self.cuda.devices()?.into_iter().find(|gpu| gpu.ordinal == ordinal);
        let info = info.ok_or_else(|| Error::invalid("device", ordinal, "a CUDA device of this process"))?;
        let gpu = Arc::new(Gpu::open(&self.client, &*self.cuda, &info)?);
        gpus.insert(ordinal, gpu.clone());
        Ok(gpu)
    }
}

impl Backend for Rm {
    fn kind(&self) -> BackendKind {
        BackendKind::Rm
    }

    /// [`PinFlags::FORCE_PCIE`] changes nothing: mappings always go through BAR1.
    fn pin(&self, addr: u64, len: usize, flags: PinFlags) -> Result<Box<dyn Pinned>> {
        self.client.check_owner()?;
        if len == 0 {
            return Err(Error::invalid("length", len, "at least one byte"));
        }
        let part = locate(&*self.cuda, addr, len, flags)?;
        let kind = match part.memory.kind {
            MemoryKind::Malloc => AllocKind::Malloc,
            MemoryKind::Vmm => AllocKind::Vmm,
            _ => {
                return Err(Error::NotMappable {
                    addr,
                    found: "memory of a stream-ordered pool, which has no handle to share",
                    fix: "allocate with cuMemAlloc or cuMemCreate, or use the gdrdrv or dmabuf backend",
                });
            }
        };
        let gpu = self.gpu(part.memory.device)?;
        gpu.prove(&self.cuda, kind)?;
        Ok(Box::new(RmPin::new(&gpu, &self.cuda, part, addr, len)?))
    }

    fn allocate_as(&self, device: i32, len: usize, kind: AllocKind) -> Result<Box<dyn Allocation>> {
        Ok(Box::new(CudaAllocation::of_kind(&self.cuda, device, len, kind)?))
    }
}

/// Bytes of scratch memory: more than a GPU page, and small enough to share a block with others.
const SCRATCH: usize = 192 << 10;
/// How many allocations are made to get one that does not begin its block.
const TRIES: usize = 4;

/// The proof that a kind of memory of a GPU can be mapped.
#[derive(Debug, Default)]
struct Proof {
    works: bool,
    /// Kept until the backend closes: CUDA would wait for all work of the GPU to free it, perhaps for a stream that waits for the
    /// thread that pins here.
    scratch: Vec<CudaAllocation>,
}

/// Adds the cause that the driver does not report.
fn explain(gpu: &Gpu, error: Error) -> Error {
    if matches!(error, Error::Rm { .. }) && gpu.is_confidential() {
        return Error::Unsupported {
            what: "mapping memory under confidential computing".into(),
            by: "the GPU, which hides it from the CPU",
            fix: "turn confidential computing off, or copy with CUDA",
        };
    }
    error
}

fn prove(
    gpu: &Arc<Gpu>,
    cuda: &Arc<dyn Cuda>,
    kind: AllocKind,
    scratch: &mut Vec<CudaAllocation>,
) -> Result<()> {
    for index in 0..TRIES {
        // An earlier attempt may have allocated it.
        if index == scratch.len() {
            scratch.push(CudaAllocation::of_kind(cuda, gpu.ordinal, SCRATCH, kind)?);
        }
        let scratch = &scratch[index];
        let part = locate(&**cuda, scratch.addr(), SCRATCH, PinFlags::empty())?;
        let pin = RmPin::new(gpu, cuda, part, scratch.addr(), SCRATCH)?;
        let inner = pin.segments[0].offset != 0;
        let mut range = pin.map(pin.pinned_len(), None)?;
        let first = usize::try_from(scratch.addr() - pin.va()).expect("pinned memory fits the address space");
        let offsets = [first, first + SCRATCH / 2 - 32, first + SCRATCH - 64];
        Views { cuda: &**cuda, device: gpu.ordinal, addr: pin.va(), range: &range }.nonce(&offsets)?;
        range.release()?;
        Box::new(pin).unpin()?;
        // CUDA gives every VMM allocation an object of its own.
        if inner || kind == AllocKind::Vmm {
            break;
        }
    }
    Ok(())
}

/// `CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES`: 1 where CPU and GPU share a coherent link.
const COHERENT: u32 = 100;

/// An opened GPU.
#[derive(Debug)]
struct Gpu {
    // Fields are dropped in this order.
    device: Object,
    /// Keeps the GPU attached to the client.
    _file: OwnedFd,
    node: CString,
    /// CUDA device ordinal.
    ordinal: i32,
    /// By [`AllocKind`].
    proofs: [Mutex<Proof>; 2],
}

impl Gpu {
    fn open(client: &Arc<Client>, cuda: &dyn Cuda, info: &GpuInfo) -> Result<Self> {
        if cuda.device_attribute(info.ordinal, COHERENT)? != 0 {
            return Err(refuse("a GPU with a coherent link to the CPU", "use the gdrdrv or dmabuf backend"));
        }
        let card = find_card(client, info)?;
        let node = CString::new(format!("/dev/nvidia{}", card.minor)).expect("no NUL in digits");
        let file = client::open_node(&*client.kernel, &node)?;
        let mut register = abi::RegisterFd { control_fd: client.control_fd() };
        // SAFETY: no pointers. The call reports its failures as errno.
        unsafe { client::escape(&*client.kernel, file.as_fd(), &mut register) }?;

        let mut id = abi::IdInfo { gpu_id: card.gpu_id, ..Default::default() };
        // SAFETY: no pointers.
        unsafe { client.control(client.handle(), &mut id) }?;
        let mut params = abi::Device { instance: id.device, ..Default::default() };
        let device = client.alloc(client.handle(), &mut params)?;
        if is_partitioned(&device, id.subdevice, info)? {
            return Err(refuse("a multi-instance GPU (MIG)", "use the gdrdrv backend, or turn MIG off"));
        }
        Ok(Self { device, _file: file, node, ordinal: info.ordinal, proofs: Default::default() })
    }

    fn device(&self) -> u32 {
        self.device.handle()
    }

    fn client(&self) -> &Arc<Client> {
        self.device.client()
    }

    /// Proves once that a kind of memory can be mapped.
    fn prove(self: &Arc<Self>, cuda: &Arc<dyn Cuda>, kind: AllocKind) -> Result<()> {
        let mut proof = self.proofs[kind as usize].lock();
        if !proof.works {
            prove(self, cuda, kind, &mut proof.scratch).map_err(|error| explain(self, error))?;
            tracing::debug!(gpu = self.ordinal, ?kind, "resource-manager mappings proved");
            proof.works = true;
        }
        Ok(())
    }

    /// Whether confidential computing hides GPU memory from the CPU; `false` also if the driver does not report it.
    fn is_confidential(&self) -> bool {
        let client = self.client();
        let mut params = abi::ConfidentialCompute { client: client.handle() };
        let Ok(object) = client.alloc(client.handle(), &mut params) else { return false };
        let mut capabilities = abi::CcCapabilities::default();
        // SAFETY: no pointers.
        let asked = unsafe { client.control(object.handle(), &mut capabilities) };
        asked.is_ok() && capabilities.feature != 0
    }
}

fn refuse(what: &str, fix: &'static str) -> Error {
    Error::Unsupported { what: format!("mapping memory of {what}"), by: "the rm backend", fix }
}

/// Domain, bus and device of a PCI address in text form.
fn parse_pci(text: &str) -> Option<(u32, u8, u8)> {
    let (domain, rest) = text.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (slot, _function) = rest.split_once('.')?;
    let hex = |digits| u32::from_str_radix(digits, 16).ok();
    Some((hex(domain)?, hex(bus)?.try_into().ok()?, hex(slot)?.try_into().ok()?))
}

/// The driver's entry for a GPU. CUDA's order and choice of GPUs are not the driver's.
fn find_card(client: &Client, info: &GpuInfo) -> Result<abi::Card> {
    let wanted = parse_pci(&info.pci).ok_or_else(|| {
        Error::invalid("PCI address of the GPU", &info.pci, "domain:bus:device.function in hexadecimal")
    })?;
    let mut cards = abi::Cards::default();
    // SAFETY: no pointers. The call reports its failures as errno.
    unsafe { client.escape(&mut cards) }?;
    let card =
        cards.0.into_iter().find(|card| card.valid != 0 && (card.domain, card.bus, card.slot) == wanted);
    card.ok_or_else(|| Error::Unsupported {
        what: format!("the GPU at {} ({})", info.pci, abi::Cards::NAME),
        by: "the kernel driver, which does not list it",
        fix: "use another backend (GDRCOPY_BACKEND)",
    })
}

/// Whether the GPU is in multi-instance mode.
fn is_partitioned(device: &Object, instance: u32, info: &GpuInfo) -> Result<bool> {
    let client = device.client();
    let subdevice = client.alloc(device.handle(), &mut abi::Subdevice { instance })?;
    let mut entry = abi::GpuInfoEntry { index: abi::GpuInfoEntry::SMC_MODE, data: 0 };
    let mut query = abi::GpuInfoQuery { entries: 1, list: client::address(&mut entry) };
    // SAFETY: `list` points to the one entry, which outlives the call.
    match unsafe { client.control(subdevice.handle(), &mut query) } {
        Ok(()) => Ok(entry.data == abi::GpuInfoEntry::SMC_ENABLED),
        // The driver lacks the query. CUDA puts the instance into the name.
        Err(Error::Rm { .. }) => Ok(info.name.contains(" MIG ")),
        Err(error) => Err(error),
    }
}

/// A pinned range. It holds the memory: after a free the old bytes stay until the pin goes.
#[derive(Debug)]
struct RmPin {
    cuda: Arc<dyn Cuda>,
    gpu: Arc<Gpu>,
    /// Adjacent, in order of address.
    segments: Vec<Segment>,
    /// Requested bytes after the last object. A mapping has a hole there.
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
    /// The part of the requested range in this allocation; the rest may be other allocations or nothing. A mapping is returned only
    /// if the allocation is live and has the same bytes.
    part: Part,
}

/// A memory object with a handle of this client.
#[derive(Debug)]
struct MemoryObject {
    object: Object,
    /// Its address.
    base: u64,
    /// Its size, bytes.
    size: u64,
}

impl MemoryObject {
    fn end(&self) -> u64 {
        self.base.saturating_add(self.size)
    }
}

impl RmPin {
    /// Pins a range that was located, on a GPU where this kind of memory is proved.
    fn new(gpu: &Arc<Gpu>, cuda: &Arc<dyn Cuda>, mut part: Part, addr: u64, len: usize) -> Result<Self> {
        let beyond = |base, size| Error::BeyondAllocation { addr, len, base, size };
        let mut pin = Self { cuda: cuda.clone(), gpu: gpu.clone(), segments: Vec::new(), hole: 0 };
        let mut rest = addr..addr + len as u64;
        loop {
            let object = pin.object(&part, rest.start)?;
            let end = object.end();
            if part.memory.kind == MemoryKind::Malloc {
                // The range may go beyond the allocation, but not beyond its block, except for the last page: blocks end at
                // any multiple of 4 KiB, and a range rounded to GPU pages reaches beyond.
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

    /// A handle for the memory object at `at`; the object may be a block with more allocations.
    fn object(&self, part: &Part, at: u64) -> Result<MemoryObject> {
        let (client, device, memory) = (self.gpu.client(), self.gpu.device(), &part.memory);
        part.bytes()?;
        if memory.kind == MemoryKind::Malloc {
            let Block { client: source, object, base, size } =
                Block::from_ipc(&self.cuda.ipc_handle(memory.base)?, memory)?;
            return Ok(MemoryObject { object: client.dup(device, source, object)?, base, size });
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
        Ok(MemoryObject {
            object: client.import(device, fd.as_fd())?,
            base: memory.base,
            size: memory.size as u64,
        })
    }

    /// The part of an object that a range needs: whole GPU pages, but nothing outside the object.
    fn segment(&self, found: MemoryObject, part: &Part, range: &Range<u64>) -> Result<Segment> {
        let va = (range.start - range.start % GPU_PAGE).max(found.base);
        let end = range.end.checked_next_multiple_of(GPU_PAGE).unwrap_or(u64::MAX).min(found.end());
        Ok(Segment {
            memory: Arc::new(Memory { object: found.object, gpu: self.gpu.clone() }),
            va,
            len: usize::try_from(end - va)
                .map_err(|_| Error::invalid("length", end - va, "an address space's"))?,
            offset: va - found.base,
            part: part.clone(),
        })
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
            let by = "the rm backend, whose mappings go through BAR1";
            return Err(other.unsupported(by, "ask for write combining, or for no type"));
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
        self.segments.iter().try_for_each(|segment| segment.part.compare(&*self.cuda, self.va(), &range))?;
        Ok(range)
    }

    fn unpin(self: Box<Self>) -> Result<()> {
        self.gpu.client().check_owner()?;
        let mut result = Ok(());
        for segment in self.segments {
            // A mapping that is still there gives the memory back later.
            if let Some(memory) = Arc::into_inner(segment.memory) {
                result = result.and(memory.object.free());
            }
        }
        result
    }
}

/// GPU memory that a handle of this client keeps.
#[derive(Debug)]
struct Memory {
    // Fields are dropped in this order.
    object: Object,
    gpu: Arc<Gpu>,
}

/// BAR1 space of a mapping; released when dropped, after the `munmap`.
#[derive(Debug)]
struct Bar1Mapping {
    linear: u64,
    memory: Arc<Memory>,
    /// The file whose `mmap` this is.
    file: OwnedFd,
}

impl Bar1Mapping {
    /// Maps `len` bytes at `offset` of an object after the filled part of the range.
    fn append(range: &mut Reservation, memory: &Arc<Memory>, offset: u64, len: usize) -> Result<Self> {
        let gpu = &memory.gpu;
        let client = gpu.client();
        let file = client::open_node(&*client.kernel, &gpu.node)?;
        let mut map = abi::Map {
            client: client.handle(),
            device: gpu.device(),
            memory: memory.object.handle(),
            offset,
            length: len as u64,
            flags: abi::Map::FLAGS,
            fd: file.as_raw_fd(),
            ..Default::default()
        };
        // SAFETY: no pointers.
        let status = unsafe { client.escape(&mut map) }?;
        if status != NvStatus::OK {
            return Err(refused_mapping(status, len));
        }
        let mapping = Bar1Mapping { linear: map.linear, memory: memory.clone(), file };
        range.append(&*client.kernel, mapping.file.as_fd(), len).map_err(|error| {
            Error::sys(format!("mmap of {len} B of BAR1"), error, "see the kernel's log for NVRM messages")
        })?;
        Ok(mapping)
    }
}

impl Drop for Bar1Mapping {
    fn drop(&mut self) {
        let client = self.memory.gpu.client();
        // In a forked child the mapping is the parent's.
        if client.check_owner().is_err() {
            return;
        }
        let mut unmap = abi::Unmap {
            client: client.handle(),
            device: self.memory.gpu.device(),
            memory: self.memory.object.handle(),
            linear: self.linear,
            ..Default::default()
        };
        // SAFETY: no pointers.
        let error = match unsafe { client.escape(&mut unmap) } {
            Ok(NvStatus::OK) => return,
            Ok(status) => refused(status, abi::Unmap::NAME),
            Err(error) => error,
        };
        tracing::warn!(%error, "BAR1 mapping of object {:#x} not released", self.memory.object.handle());
    }
}

/// The error of a refused mapping of `len` bytes. Resources that run out here are BAR1 space.
fn refused_mapping(status: NvStatus, len: usize) -> Error {
    match status {
        NvStatus::INSUFFICIENT_RESOURCES | NvStatus::NO_MEMORY => Error::Exhausted {
            what: "BAR1 space",
            len,
            fix: "unmap something, map less at a time, or enable a resizable BAR (nvidia-smi -q shows BAR1)",
        },
        _ => refused(status, abi::Map::NAME),
    }
}
