//! No module: the NVIDIA driver's resource-manager interface.
//!
//! The driver maps GPU memory for the CPU on request of one of its clients. CUDA is such a client. This backend is another client in
//! the same process: it duplicates the objects that CUDA's memory consists of, and asks the driver to map them. CUDA names these
//! objects when it exports the memory ([`Cuda::objects`]): any GPU memory, of one allocation or of several adjacent ones.
//!
//! The interface is not documented for other clients. So it is proved with the backend's own memory at its first use on each GPU, in
//! both directions, and each mapping of the user's memory is compared with what CUDA shows before it is returned. The comparison never
//! writes to the user's memory, since a running kernel's result could be lost; so it cannot detect other memory with equal bytes. A
//! mapping that ends before the requested byte is not compared. Of a range beyond its allocation ([`PinFlags::WHOLE_PAGES`]), the part
//! in the allocation is compared.
//!
//! A pin keeps the memory: after a free the mapping shows the old bytes. Mappings are write-combined BAR1 mappings; each object takes
//! one open file. Measured on an H200 with driver 580.159.04.

pub(crate) mod abi;
mod client;

use std::collections::HashMap;
use std::ffi::CString;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;

use self::abi::{Escape, NvStatus};
use self::client::{Client, Object, refused};
use super::locate::{Part, locate};
use super::proof::{PROBE, Views};
use super::{Allocation, Backend, CudaAllocation, Pinned};
use crate::cpu_range::{CpuRange, Reservation};
use crate::cuda::{AllocKind, Cuda, CudaStatus, GpuInfo, MemoryKind, Objects, PointerInfo};
use crate::error::{Error, Result};
use crate::system::System;
use crate::types::{BackendKind, GPU_PAGE, MappingType, PinFlags, host_page};

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

    /// Opens the driver and proves that memory of the first GPU can be mapped.
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
        gpu.prove(&this.cuda)?;
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
        let gpu = self.gpu(part.memory.device)?;
        gpu.prove(&self.cuda)?;
        Ok(Box::new(RmPin::new(&gpu, &self.cuda, part, addr, len)?))
    }

    fn allocate_as(&self, device: i32, len: usize, kind: AllocKind) -> Result<Box<dyn Allocation>> {
        Ok(Box::new(CudaAllocation::of_kind(&self.cuda, device, len, kind)?))
    }
}

/// Bytes of scratch memory for the proof: more than a GPU page.
const SCRATCH: usize = 192 << 10;

/// The proof that memory of a GPU can be mapped.
#[derive(Debug, Default)]
struct Proof {
    works: bool,
    /// Kept until the backend closes: CUDA would wait for all work of the GPU to free it, perhaps for a stream that waits for the
    /// thread that pins here.
    scratch: Option<CudaAllocation>,
}

/// Adds the cause that the driver does not report.
fn explain(gpu: &Gpu, error: Error) -> Error {
    if matches!(error, Error::Rm { .. } | Error::Cuda { .. }) && gpu.is_confidential() {
        return Error::Unsupported {
            what: "mapping memory under confidential computing".into(),
            by: "the GPU, which hides it from the CPU",
            fix: "turn confidential computing off, or copy with CUDA",
        };
    }
    error
}

/// `CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES`: 1 where CPU and GPU share a coherent link.
const COHERENT: u32 = 100;
/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`.
const DMA_BUF: u32 = 124;

#[derive(Debug)]
struct Gpu {
    // Fields are dropped in this order.
    device: Object,
    /// Keeps the GPU attached to the client.
    _file: OwnedFd,
    node: CString,
    /// CUDA device ordinal.
    ordinal: i32,
    proof: Mutex<Proof>,
}

impl Gpu {
    fn open(client: &Arc<Client>, cuda: &dyn Cuda, info: &GpuInfo) -> Result<Self> {
        if cuda.device_attribute(info.ordinal, COHERENT)? != 0 {
            return Err(refuse("a GPU with a coherent link to the CPU", "use the gdrdrv or dmabuf backend"));
        }
        if cuda.device_attribute(info.ordinal, DMA_BUF)? == 0 {
            let fix = "install NVIDIA's open kernel modules (for GPUs from Turing on), or load gdrdrv";
            return Err(refuse("a GPU without dma-bufs", fix));
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
        Ok(Self { device, _file: file, node, ordinal: info.ordinal, proof: Mutex::default() })
    }

    fn device(&self) -> u32 {
        self.device.handle()
    }

    fn client(&self) -> &Arc<Client> {
        self.device.client()
    }

    /// Proves once that memory can be mapped.
    fn prove(self: &Arc<Self>, cuda: &Arc<dyn Cuda>) -> Result<()> {
        let mut proof = self.proof.lock();
        if !proof.works {
            self.try_mapping(cuda, &mut proof.scratch).map_err(|error| explain(self, error))?;
            tracing::debug!(gpu = self.ordinal, "resource-manager mappings proved");
            proof.works = true;
        }
        Ok(())
    }

    fn try_mapping(
        self: &Arc<Self>,
        cuda: &Arc<dyn Cuda>,
        scratch: &mut Option<CudaAllocation>,
    ) -> Result<()> {
        let scratch = match scratch {
            Some(scratch) => scratch,
            None => scratch.insert(CudaAllocation::new(cuda, self.ordinal, SCRATCH)?),
        };
        // The second range begins inside its object.
        for skip in [0, SCRATCH / 3] {
            let (addr, len) = (scratch.addr() + skip as u64, SCRATCH - skip);
            let pin = RmPin::new(self, cuda, locate(&**cuda, addr, len, PinFlags::empty())?, addr, len)?;
            let mut range = pin.map_unproven(pin.pinned_len())?;
            let first = range_len(addr - pin.va);
            let offsets = [first, first + len / 2 - 32, first + len - PROBE];
            Views { cuda: &**cuda, device: self.ordinal, addr: pin.va, range: &range }.nonce(&offsets)?;
            range.release()?;
            Box::new(pin).unpin()?;
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
    va: u64,
    /// Adjacent, in order of address.
    segments: Vec<Segment>,
    /// The requested range in each of its allocations; the rest may be other allocations or nothing. A mapping is returned only if
    /// these are live and have the same bytes.
    parts: Vec<Part>,
    /// Requested bytes after the last segment. A mapping has a hole there.
    hole: usize,
}

/// The pinned part of one object.
#[derive(Debug)]
struct Segment {
    memory: Arc<Memory>,
    /// Where in the object the part begins.
    offset: u64,
    len: usize,
}

impl RmPin {
    /// Pins a range whose first allocation was located.
    fn new(gpu: &Arc<Gpu>, cuda: &Arc<dyn Cuda>, first: Part, addr: u64, len: usize) -> Result<Self> {
        let range = addr..addr + len as u64;
        let parts = parts(&**cuda, first, &range)?;
        let (cuda, gpu, va) = (cuda.clone(), gpu.clone(), addr - addr % GPU_PAGE);
        let mut pin = Self { cuda, gpu, va, segments: Vec::new(), parts, hole: 0 };
        let filled = pin.fill(&range);
        // Unless all parts are live now, the handles may have named other memory already.
        pin.check_live().and(filled)?;
        Ok(pin)
    }

    /// Duplicates the objects of the range; each duplicate keeps its memory allocated.
    fn fill(&mut self, range: &Range<u64>) -> Result<()> {
        let (objects, end) = objects(&*self.cuda, &self.parts, self.va, range)?;
        let (client, device) = (self.gpu.client(), self.gpu.device());
        let mut known = HashMap::new();
        for piece in &objects.pieces {
            let memory = match known.get(&piece.object) {
                Some(memory) => Arc::clone(memory),
                None => {
                    let object = client.dup(device, objects.client, piece.object)?;
                    let memory = Arc::new(Memory { object, gpu: self.gpu.clone() });
                    known.insert(piece.object, memory.clone());
                    memory
                }
            };
            let len =
                usize::try_from(piece.len).map_err(|_| Error::invalid("length", piece.len, "a size"))?;
            self.segments.push(Segment { memory, offset: piece.offset, len });
        }
        self.hole = range_len(range.end.next_multiple_of(host_page() as u64).saturating_sub(end));
        Ok(())
    }

    fn check_live(&self) -> Result<()> {
        for part in &self.parts {
            if !part.is_live(&*self.cuda)? {
                return Err(Error::Invalidated);
            }
        }
        Ok(())
    }

    /// Maps the first `len` bytes without a comparison.
    fn map_unproven(&self, len: usize) -> Result<CpuRange> {
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
        reservation.into_range(MappingType::WriteCombining, Some(Box::new(mappings)))
    }
}

/// The allocations of a range. VMM memory may continue in adjacent mappings.
fn parts(cuda: &dyn Cuda, first: Part, range: &Range<u64>) -> Result<Vec<Part>> {
    let mut parts = vec![first];
    loop {
        let last = &parts[parts.len() - 1];
        let (memory, end) = (&last.memory, last.bytes()?.end);
        if end >= range.end || memory.kind != MemoryKind::Vmm {
            return Ok(parts);
        }
        let next = cuda.pointer(end)?;
        if next.kind != MemoryKind::Vmm || next.device != memory.device || next.base != end {
            return Err(beyond(range, memory));
        }
        parts.push(Part::of(next, range));
    }
}

/// The objects of the GPU pages of a range from `va` on; returns their end as well. CUDA refuses pages outside its block of memory:
/// blocks end at any multiple of 4 KiB. Then the objects end with the last allocation.
fn objects(cuda: &dyn Cuda, parts: &[Part], va: u64, range: &Range<u64>) -> Result<(Objects, u64)> {
    let (start, last) = (parts[0].bytes()?.start, &parts[parts.len() - 1]);
    let ask = |end: u64| Ok((cuda.objects(start, va, range_len(end - va))?, end));
    let pages = |end: u64| end.checked_next_multiple_of(GPU_PAGE).unwrap_or(u64::MAX - GPU_PAGE);
    let whole = pages(range.end);
    match ask(whole) {
        Err(Error::Cuda { status: CudaStatus::INVALID_VALUE, .. }) => {
            let end = last.bytes()?.end;
            // A range that was rounded to GPU pages may reach beyond a block.
            if range.end > pages(end) + GPU_PAGE {
                return Err(beyond(range, &last.memory));
            }
            ask(end.next_multiple_of(host_page() as u64).min(whole))
        }
        result => result,
    }
}

fn beyond(range: &Range<u64>, memory: &PointerInfo) -> Error {
    let len = range_len(range.end - range.start);
    Error::BeyondAllocation { addr: range.start, len, base: memory.base, size: memory.size }
}

/// A distance inside a pinned range, whose length is a `usize`.
#[expect(clippy::cast_possible_truncation, reason = "not longer than the range")]
fn range_len(distance: u64) -> usize {
    distance as usize
}

impl Pinned for RmPin {
    fn va(&self) -> u64 {
        self.va
    }

    fn pinned_len(&self) -> usize {
        self.backed_len() + self.hole
    }

    fn backed_len(&self) -> usize {
        self.segments.iter().map(|segment| segment.len).sum()
    }

    fn located(&self) -> Option<&Part> {
        self.parts.first()
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
        let range = self.map_unproven(len)?;
        self.parts.iter().try_for_each(|part| part.compare(&*self.cuda, self.va, &range))?;
        Ok(range)
    }

    fn unpin(self: Box<Self>) -> Result<()> {
        self.gpu.client().check_owner()?;
        let mut result = Ok(());
        for segment in self.segments {
            // A further segment or a mapping that is still there gives the memory back later.
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
