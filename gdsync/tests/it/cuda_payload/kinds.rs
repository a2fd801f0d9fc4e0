//! Memory of every kind, filled and read by CUDA.

use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::place::{self, WholeGpu};
use gdrcopy::cuda::raw::Api;
use gdrcopy::cuda::raw::layout::{
    ACCESS_READ_WRITE, ALLOCATION_PINNED, AccessDesc, AllocationProp, GRANULARITY_MINIMUM, HANDLE_TYPE_FD,
    HOST_ALLOC_PORTABLE, Handle, LOCATION_DEVICE, MemLocation, STREAM_NON_BLOCKING,
};
use gdsync::cuda::Gpu;
use gdsync::memory::Memory;

/// As long as this lives, no other test uses the regions of [`region`], nor a real GPU.
pub(crate) fn alone() -> (MutexGuard<'static, ()>, Option<WholeGpu>) {
    static ALONE: Mutex<()> = Mutex::new(());
    (ALONE.lock().unwrap_or_else(PoisonError::into_inner), WholeGpu::take())
}

/// Where memory of a test comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `Memory::alloc`, which CUDA does not know.
    Plain,
    /// `cuMemHostAlloc`.
    Pinned,
    /// `cuMemHostRegister`.
    Registered,
    /// `Gpu::alloc`.
    Mapped,
    /// `cuMemAlloc`.
    Malloc,
    /// `cuMemCreate`.
    Vmm,
    /// `cuMemAllocAsync`.
    Pool,
    /// `cuMemAlloc`, wrapped where nothing can be mapped.
    Unmapped,
}

impl Kind {
    pub(crate) const ALL: [Self; 8] = [
        Self::Plain,
        Self::Pinned,
        Self::Registered,
        Self::Mapped,
        Self::Malloc,
        Self::Vmm,
        Self::Pool,
        Self::Unmapped,
    ];
}

/// Bytes of a region that messages of all lengths go between.
pub(crate) fn size() -> usize {
    if is_simulated() { MEDIUM } else { 64 << 20 }
}

/// Beyond all thresholds; the highest are a window of packets (1 MiB) and the slots that payload lands in (1.25 MiB).
const MEDIUM: usize = 4 << 20;

/// Lengths round the thresholds. Between memory of one kind, whatever it is, also all of a region; a message that goes from one
/// kind to another is handled alike from [`MEDIUM`] on.
pub(crate) fn lengths(from: Kind, to: Kind) -> impl Iterator<Item = usize> {
    let edges =
        [1, 64, 4095, 4096, 4097, 16 << 10, (32 << 10) - 1, 32 << 10, (32 << 10) + 1, 300_001, 1 << 20];
    let longest = if from == to { size() } else { MEDIUM };
    edges.into_iter().chain([longest - 7])
}

/// The two ends of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    From,
    To,
}

/// A region of [`size`] bytes for an end of a pair, made once: to make it takes longer than most messages. As
/// [`memory`].
pub(crate) fn region(gpu: &Gpu, kind: Kind, role: Role) -> Option<Memory> {
    type Known = (i32, Kind, Role, Option<Memory>);
    static KNOWN: Mutex<Vec<Known>> = Mutex::new(Vec::new());
    let mut known = KNOWN.lock().unwrap();
    let is_it = |one: &&Known| (one.0, one.1, one.2) == (gpu.ordinal(), kind, role);
    if let Some((.., memory)) = known.iter().find(is_it) {
        return memory.clone();
    }
    let made = memory(gpu, kind, size());
    known.push((gpu.ordinal(), kind, role, made.clone()));
    made
}

/// Whether the simulated driver is used.
pub(crate) fn is_simulated() -> bool {
    !place::is_real()
}

/// The same GPU, but nothing of it can be mapped.
fn without_mappings(gpu: &Gpu) -> Option<Gpu> {
    is_simulated().then(|| Gpu::open_with(*gpu.api(), gpu.ordinal(), None).unwrap())
}

/// A stream of this test's own on a GPU.
pub(crate) fn stream(gpu: &Gpu) -> Handle {
    static STREAMS: Mutex<Vec<(usize, Handle)>> = Mutex::new(Vec::new());
    let mut streams = STREAMS.lock().unwrap();
    let known = streams.iter().find(|(context, _)| *context == gpu.raw_context());
    if let Some((_, stream)) = known {
        return *stream;
    }
    let made = new_stream(gpu);
    streams.push((gpu.raw_context(), made));
    made
}

pub(crate) fn new_stream(gpu: &Gpu) -> Handle {
    let _current = gpu.enter().unwrap();
    let mut stream = 0;
    // SAFETY: a place for the answer; a context is current.
    unsafe { gpu.api().stream_create(&mut stream, STREAM_NON_BLOCKING, 0) }.unwrap();
    stream
}

/// Memory of a kind; `None`, with a printed reason, where there is none of it. It is not freed: a test ends soon.
pub(crate) fn memory(gpu: &Gpu, kind: Kind, len: usize) -> Option<Memory> {
    let _current = gpu.enter().unwrap();
    let api = gpu.api();
    let addr = match kind {
        Kind::Plain => return Some(Memory::alloc(len).unwrap()),
        Kind::Mapped => return Some(gpu.alloc(len).unwrap()),
        Kind::Pinned => {
            let mut ptr = std::ptr::null_mut();
            // SAFETY: a place for the answer.
            unsafe { api.mem_host_alloc(&mut ptr, len, HOST_ALLOC_PORTABLE) }.map(|()| ptr.addr() as u64)
        }
        Kind::Registered => {
            let plain = Memory::alloc(len).unwrap();
            let ptr = std::ptr::with_exposed_provenance_mut::<c_void>(usize::try_from(plain.addr()).unwrap());
            std::mem::forget(plain);
            // SAFETY: pages of the process, which stay.
            unsafe { api.mem_host_register(ptr, len, 3) }.map(|()| ptr.addr() as u64)
        }
        Kind::Malloc | Kind::Unmapped => {
            let mut addr = 0;
            // SAFETY: a place for the answer.
            unsafe { api.mem_alloc(&mut addr, len) }.map(|()| addr)
        }
        Kind::Vmm => virtual_memory(api, gpu.ordinal(), len),
        Kind::Pool => {
            let mut addr = 0;
            // SAFETY: a place for the answer, and a stream.
            let made = unsafe { api.mem_alloc_async(&mut addr, len, stream(gpu)) };
            // SAFETY: the stream is the test's own.
            made.and_then(|()| unsafe { api.stream_synchronize(stream(gpu)) }).map(|()| addr)
        }
    };
    let owner = if kind == Kind::Unmapped { without_mappings(gpu) } else { Some(gpu.clone()) };
    let told = match (addr, owner) {
        // SAFETY: never freed, and only touched through the result and by copies.
        (Ok(addr), Some(owner)) => return Some(unsafe { owner.wrap(addr, len) }.unwrap()),
        (Err(error), _) => error.to_string(),
        (_, None) => "only simulated".into(),
    };
    static TOLD: Mutex<Vec<Kind>> = Mutex::new(Vec::new());
    let mut known = TOLD.lock().unwrap();
    if !known.contains(&kind) {
        known.push(kind);
        eprintln!("skipped: no {kind:?} memory: {told}");
    }
    None
}

fn virtual_memory(api: &Api, device: i32, len: usize) -> gdrcopy::Result<u64> {
    let location = MemLocation { kind: LOCATION_DEVICE, id: device };
    let prop = AllocationProp {
        kind: ALLOCATION_PINNED,
        handle_types: HANDLE_TYPE_FD,
        location,
        win32_meta_data: 0,
        compression: 0,
        gpu_direct_rdma: 1,
        usage: 0,
        reserved: [0; 4],
    };
    let (mut granularity, mut handle, mut addr) = (0, 0, 0);
    // SAFETY: places for answers and a description.
    unsafe { api.mem_get_allocation_granularity(&mut granularity, &prop, GRANULARITY_MINIMUM) }?;
    let len = len.next_multiple_of(granularity);
    // SAFETY: a place for the answer and a description.
    unsafe { api.mem_create(&mut handle, len, &prop, 0) }?;
    // SAFETY: a place for the answer.
    unsafe { api.mem_address_reserve(&mut addr, len, 0, 0, 0) }?;
    // SAFETY: reserved above.
    unsafe { api.mem_map(addr, len, 0, handle, 0) }?;
    let access = AccessDesc { location, flags: ACCESS_READ_WRITE };
    // SAFETY: mapped above.
    unsafe { api.mem_set_access(addr, len, &access, 1) }?;
    Ok(addr)
}

/// Writes bytes as the application would.
pub(crate) fn put(gpu: &Gpu, memory: &Memory, at: usize, bytes: &[u8]) {
    if memory.gpu().is_none() {
        return memory.write(at, bytes).unwrap();
    }
    let _current = gpu.enter().unwrap();
    let (api, dst) = (gpu.api(), memory.addr() + at as u64);
    // SAFETY: the ranges are as long as said, and stay until the stream is done.
    unsafe { api.memcpy_to_device_async(dst, bytes.as_ptr().cast(), bytes.len(), stream(gpu)) }.unwrap();
    // SAFETY: a live stream.
    unsafe { api.stream_synchronize(stream(gpu)) }.unwrap();
}

/// Reads bytes as the application would.
pub(crate) fn get(gpu: &Gpu, memory: &Memory, at: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    if memory.gpu().is_none() {
        memory.read(at, &mut bytes).unwrap();
        return bytes;
    }
    let _current = gpu.enter().unwrap();
    let (api, src) = (gpu.api(), memory.addr() + at as u64);
    // SAFETY: as in `put`.
    unsafe { api.memcpy_to_host_async(bytes.as_mut_ptr().cast(), src, len, stream(gpu)) }.unwrap();
    // SAFETY: a live stream.
    unsafe { api.stream_synchronize(stream(gpu)) }.unwrap();
    bytes
}

/// Bytes that tell seed and place: 4 KiB blocks, each with its number in front.
pub(crate) fn data(len: usize, seed: usize) -> Vec<u8> {
    let block = crate::common::pattern(4096, seed);
    let mut out = Vec::with_capacity(len + 4096);
    for n in 0..len.div_ceil(4096) {
        let at = out.len();
        out.extend_from_slice(&block);
        out[at..at + 8].copy_from_slice(&(n as u64 ^ (seed as u64) << 32).to_le_bytes());
    }
    out.truncate(len);
    out
}
