//! The application's side: what a CUDA program does next to the library, by raw entry points.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use cudarc::driver::sys;
use gdrcopy::cuda::raw::layout::{
    ACCESS_READ_WRITE, ALLOCATION_PINNED, AccessDesc, AllocationProp, LOCATION_DEVICE, MemLocation,
};

/// `CUcontext`, `CUstream`.
pub(crate) type Handle = usize;

/// An entry point of `libcuda` by symbol. `F` must be its type.
fn entry<F: Copy>(symbol: &str) -> F {
    // SAFETY: the tests have initialised CUDA, so the library is there.
    let library = unsafe { sys::culib() };
    // SAFETY: the callers below name the types of cuda.h.
    *unsafe { library.get::<F>(symbol) }.unwrap_or_else(|error| panic!("{symbol}: {error}"))
}

/// Calls an entry point: symbol, types and values of its arguments; panics unless it returns 0.
macro_rules! cu {
    ($symbol:literal $(, $value:expr => $ty:ty)*) => {{
        let entry: unsafe extern "C" fn($($ty),*) -> u32 = entry($symbol);
        // SAFETY: arguments as cuda.h wants them.
        let status = unsafe { entry($($value),*) };
        assert_eq!(status, 0, $symbol);
    }};
}

pub(crate) fn current_context() -> Handle {
    let mut context = 0;
    cu!("cuCtxGetCurrent", &mut context => *mut Handle);
    context
}

pub(crate) fn set_current(context: Handle) {
    cu!("cuCtxSetCurrent", context => Handle);
}

/// A context of the application's own on GPU 0, current until dropped.
pub(crate) struct OwnContext(pub(crate) Handle);

impl OwnContext {
    pub(crate) fn new() -> Self {
        let mut context = 0;
        cu!("cuCtxCreate_v2", &mut context => *mut Handle, 0 => u32, 0 => i32);
        Self(context)
    }
}

impl Drop for OwnContext {
    fn drop(&mut self) {
        cu!("cuCtxDestroy_v2", self.0 => Handle);
    }
}

/// The primary context of GPU 0, as the CUDA runtime uses it, current until dropped.
pub(crate) struct PrimaryContext(());

impl PrimaryContext {
    pub(crate) fn new() -> Self {
        let mut context = 0;
        cu!("cuDevicePrimaryCtxRetain", &mut context => *mut Handle, 0 => i32);
        set_current(context);
        Self(())
    }
}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        set_current(0);
        cu!("cuDevicePrimaryCtxRelease_v2", 0 => i32);
    }
}

pub(crate) fn malloc(len: usize) -> u64 {
    let mut addr = 0;
    cu!("cuMemAlloc_v2", &mut addr => *mut u64, len => usize);
    addr
}

pub(crate) fn malloc_managed(len: usize) -> u64 {
    const GLOBAL: u32 = 1;
    let mut addr = 0;
    cu!("cuMemAllocManaged", &mut addr => *mut u64, len => usize, GLOBAL => u32);
    addr
}

pub(crate) fn free(addr: u64) {
    cu!("cuMemFree_v2", addr => u64);
}

pub(crate) fn write(addr: u64, bytes: &[u8]) {
    cu!("cuMemcpyHtoD_v2", addr => u64, bytes.as_ptr().cast() => *const c_void, bytes.len() => usize);
    cu!("cuCtxSynchronize");
}

pub(crate) fn read(addr: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    cu!("cuMemcpyDtoH_v2", bytes.as_mut_ptr().cast() => *mut c_void, addr => u64, len => usize);
    bytes
}

/// From the default pool of the current GPU, ready for use.
pub(crate) fn malloc_from_pool(len: usize) -> u64 {
    let (mut addr, stream) = (0, Stream::new());
    cu!("cuMemAllocAsync", &mut addr => *mut u64, len => usize, stream.0 => Handle);
    stream.wait();
    addr
}

pub(crate) fn malloc_host(len: usize) -> u64 {
    let mut addr = 0;
    cu!("cuMemHostAlloc", &mut addr => *mut u64, len => usize, 0 => u32);
    addr
}

pub(crate) fn free_host(addr: u64) {
    cu!("cuMemFreeHost", addr => u64);
}

/// Two VMM allocations shown side by side in one reservation.
pub(crate) struct Neighbours {
    pub(crate) base: u64,
    len: usize,
    memory: [u64; 2],
}

impl Neighbours {
    /// Shows the memory at two addresses, `len` bytes each.
    pub(crate) fn new(addrs: [u64; 2], len: usize) -> Self {
        let mut base = 0;
        cu!("cuMemAddressReserve",
            &mut base => *mut u64, 2 * len => usize, 0 => usize, 0 => u64, 0 => u64);
        let memory = addrs.map(|addr| {
            let mut memory = 0;
            cu!("cuMemRetainAllocationHandle", &mut memory => *mut u64, addr => u64);
            memory
        });
        for (at, memory) in [base, base + len as u64].into_iter().zip(memory) {
            cu!("cuMemMap", at => u64, len => usize, 0 => usize, memory => u64, 0 => u64);
        }
        Self { base, len, memory }
    }
}

impl Drop for Neighbours {
    fn drop(&mut self) {
        cu!("cuMemUnmap", self.base => u64, 2 * self.len => usize);
        cu!("cuMemAddressFree", self.base => u64, 2 * self.len => usize);
        for memory in self.memory {
            cu!("cuMemRelease", memory => u64);
        }
    }
}

/// VMM memory of several chunks, side by side.
pub(crate) struct Chunks {
    pub(crate) base: u64,
    pub(crate) len: usize,
}

impl Chunks {
    /// `count` chunks of 2 MiB, with the handle type for descriptors or none, for GPUDirect RDMA or not.
    pub(crate) fn new(count: usize, handle_types: u32, gpu_direct_rdma: u8) -> Self {
        const CHUNK: usize = 2 << 20;
        let location = MemLocation { kind: LOCATION_DEVICE, id: 0 };
        let prop = AllocationProp {
            kind: ALLOCATION_PINNED,
            handle_types,
            location,
            win32_meta_data: 0,
            compression: 0,
            gpu_direct_rdma,
            usage: 0,
            reserved: [0; 4],
        };
        let (mut base, len) = (0, count * CHUNK);
        cu!("cuMemAddressReserve", &mut base => *mut u64, len => usize, 0 => usize, 0 => u64, 0 => u64);
        for at in (base..base + len as u64).step_by(CHUNK) {
            let mut memory = 0;
            cu!("cuMemCreate",
                &mut memory => *mut u64, CHUNK => usize, &prop => *const AllocationProp, 0 => u64);
            cu!("cuMemMap", at => u64, CHUNK => usize, 0 => usize, memory => u64, 0 => u64);
            cu!("cuMemRelease", memory => u64);
        }
        let access = AccessDesc { location, flags: ACCESS_READ_WRITE };
        cu!("cuMemSetAccess", base => u64, len => usize, &access => *const AccessDesc, 1 => usize);
        Self { base, len }
    }
}

impl Drop for Chunks {
    fn drop(&mut self) {
        cu!("cuMemUnmap", self.base => u64, self.len => usize);
        cu!("cuMemAddressFree", self.base => u64, self.len => usize);
    }
}

/// A blocking stream: one that the legacy stream waits for.
pub(crate) struct Stream(Handle);

impl Stream {
    pub(crate) fn new() -> Self {
        let mut stream = 0;
        cu!("cuStreamCreate", &mut stream => *mut Handle, 0 => u32);
        Self(stream)
    }

    pub(crate) fn wait(&self) {
        cu!("cuStreamSynchronize", self.0 => Handle);
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        cu!("cuStreamDestroy_v2", self.0 => Handle);
    }
}

/// A stream whose work is captured into a graph.
pub(crate) struct Capture(Stream);

impl Capture {
    /// In the mode of this number (`CUstreamCaptureMode`).
    pub(crate) fn new(mode: u32) -> Self {
        let stream = Stream::new();
        cu!("cuStreamBeginCapture_v2", stream.0 => Handle, mode => u32);
        Self(stream)
    }

    /// Panics if the capture was spoiled.
    pub(crate) fn end(self) {
        let mut graph = 0;
        cu!("cuStreamEndCapture", self.0.0 => Handle, &mut graph => *mut Handle);
        cu!("cuGraphDestroy", graph => Handle);
    }
}

/// A stream held in a host function until this is dropped.
pub(crate) struct HeldByHostFunction {
    stream: Stream,
    release: Option<Sender<()>>,
}

extern "C" fn hold(channel: *mut c_void) {
    // SAFETY: made by `Box::into_raw` below, given to this one call.
    let channel = unsafe { Box::from_raw(channel.cast::<Receiver<()>>()) };
    // An error here is the release: the sender is gone.
    let _ = channel.recv_timeout(Duration::from_secs(120));
}

impl HeldByHostFunction {
    pub(crate) fn new() -> Self {
        let stream = Stream::new();
        let (release, held) = channel::<()>();
        let argument = Box::into_raw(Box::new(held)).cast::<c_void>();
        cu!("cuLaunchHostFunc",
            stream.0 => Handle, hold => extern "C" fn(*mut c_void), argument => *mut c_void);
        Self { stream, release: Some(release) }
    }
}

impl Drop for HeldByHostFunction {
    fn drop(&mut self) {
        self.release = None;
        self.stream.wait();
    }
}

/// Streams held in waits for a word in host memory until this is dropped.
pub(crate) struct HeldByWaits {
    streams: Vec<Stream>,
    word: u64,
}

impl HeldByWaits {
    pub(crate) fn new(count: usize) -> Self {
        const GEQ: u32 = 0;
        let held = Self { streams: (0..count).map(|_| Stream::new()).collect(), word: malloc_host(4096) };
        held.word().store(0, Ordering::SeqCst);
        for stream in &held.streams {
            cu!("cuStreamWaitValue32_v2",
                stream.0 => Handle, held.word => u64, 1 => u32, GEQ => u32);
        }
        held
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: the start of a page of host memory, which lives as long as `self`.
        unsafe { AtomicU32::from_ptr(usize::try_from(self.word).unwrap() as *mut u32) }
    }
}

impl Drop for HeldByWaits {
    fn drop(&mut self) {
        self.word().store(1, Ordering::SeqCst);
        self.streams.iter().for_each(Stream::wait);
        free_host(self.word);
    }
}
