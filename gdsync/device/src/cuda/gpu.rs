//! A GPU and the CUDA context that work runs in.

use std::ffi::CStr;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use gdrcopy::Gdr;
use gdrcopy::cuda::raw::layout::{CAPTURE_RELAXED, Handle, STREAM_NON_BLOCKING};
use gdrcopy::cuda::raw::{Api, Current};
use gdrcopy::cuda::{CudaStatus, sysfs_address};
use parking_lot::Mutex;

use super::capabilities::{Calibration, Capabilities};
use super::channels::ChannelPressure;
use super::deferred_free::{DeferredFree, DeferredFreeThread};
use super::driver_tasks::{DriverTask, DriverTasks};
use super::free_list::{Arena, FreeList};
use super::ipc::IpcHandles;
use super::kernel_exec::{Head, KernelExecutor, KernelOp, SMALL};
use super::other_processes::Sign;
use super::{Buffer, Engine, RawStream};
use crate::GpuNudge;
use crate::error::{Error, Result};
use crate::fork_guard::{ForkGuard, PerProcess};
use crate::memory::{Memory, page_round};

/// A GPU in one of its contexts. Clones share it.
///
/// Dropping the last clone, and everything created with it, gives memory back to CUDA, which may wait for streams of the application.
#[derive(Clone)]
pub struct Gpu(Arc<Inner>);

struct Inner {
    fork_guard: ForkGuard,
    api: Api,
    /// CUDA ordinal in this process.
    ordinal: i32,
    /// `CUdevice`.
    device: i32,
    context: Handle,
    /// The context is the primary one, retained by this.
    primary: bool,
    capabilities: Capabilities,
    /// Contexts of other GPUs that this one can access.
    reached: Mutex<Vec<Handle>>,
    gdr: Mutex<Option<Gdr>>,
    arena: Arena,
    free_list: FreeList,
    deferred_free: DeferredFreeThread,
    driver_tasks: DriverTasks,
    /// Loaded when opened, because loading later waits for streams.
    kernel_exec: Result<Arc<KernelExecutor>>,
    ipc_handles: IpcHandles,
    nudger: NudgerSlot,
    channel_pressure: Arc<ChannelPressure>,
    sign: Sign,
    /// Its address on the PCI bus.
    pci: Option<String>,
    calibration: Mutex<Option<Calibration>>,
    /// The copy engine while a device uses it; weak, because the engine holds the GPU.
    engine: Mutex<Weak<Engine>>,
}

/// The stream that wakes the other streams of a GPU.
pub type NudgerSlot = Mutex<Option<Weak<dyn GpuNudge>>>;

/// Keeps a context current: see [`Gpu::join`].
#[derive(Debug)]
pub struct Joined<'a>(Option<&'a Api>);

impl Drop for Joined<'_> {
    #[inline]
    fn drop(&mut self) {
        let Some(api) = self.0 else { return };
        let mut popped = 0;
        // SAFETY: `popped` is valid for writing; the context was pushed when this value was created.
        if let Err(error) = unsafe { api.ctx_pop_current(&mut popped) } {
            tracing::warn!(%error, "the CUDA context of the calling thread was not put back");
        }
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({})", self.0.ordinal)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.fork_guard.is_here() {
            return;
        }
        // SAFETY: the context is retained by this, or kept alive by the caller of `of_stream`.
        match unsafe { Current::enter(&self.api, self.context) } {
            Ok(_current) => {
                self.free_list.give_back(&self.api);
                if let Ok(kernel_exec) = &self.kernel_exec {
                    kernel_exec.unload(&self.api);
                }
            }
            Err(error) => tracing::debug!(%error, "GPU {}: memory not given back", self.ordinal),
        }
        if self.primary {
            // SAFETY: retained once, given back once.
            if let Err(error) = unsafe { self.api.primary_ctx_release(self.device) } {
                tracing::debug!(%error, "GPU {}: primary context not given back", self.ordinal);
            }
        }
    }
}

impl Gpu {
    /// Opens a GPU by its CUDA ordinal, in its primary context, which the CUDA runtime uses too.
    ///
    /// It stays open until the process ends: to close it, CUDA would wait for every stream of the process and block registrations of
    /// memory. Call this before any stream waits: it loads the kernels of [`Via::Kernel`](crate::cuda::Via::Kernel) and reserves room
    /// for 64 streams and 64 graphs, which would block later.
    ///
    /// # Errors
    /// [`Error::Cuda`] without CUDA or such a GPU; [`Error::Unsupported`] if the GPU or driver is too old.
    pub fn open(ordinal: i32) -> Result<Self> {
        let mut open = Self::open_list().lock();
        if let Some(gpu) = open.iter().find(|gpu| gpu.0.ordinal == ordinal) {
            return Ok(gpu.clone());
        }
        let api = Api::load().map_err(Error::cuda("loading CUDA"))?;
        let gpu = Self::open_with(api, ordinal, None)?;
        open.push(gpu.clone());
        Ok(gpu)
    }

    fn open_list() -> &'static Mutex<Vec<Gpu>> {
        static OPEN: PerProcess<Mutex<Vec<Gpu>>> = PerProcess::new();
        OPEN.get()
    }

    /// The GPUs opened by [`Gpu::open`] in this process.
    pub fn opened() -> Vec<Gpu> {
        Self::open_list().lock().clone()
    }

    /// Opens a GPU with the given entry points of the driver and `gdrcopy`, not shared with [`Gpu::open`].
    ///
    /// # Errors
    /// As [`Gpu::open`].
    pub fn open_with(api: Api, ordinal: i32, gdr: Option<Gdr>) -> Result<Self> {
        // SAFETY: no flags are defined.
        unsafe { api.init(0) }.map_err(Error::cuda("initialising CUDA"))?;
        let mut device = 0;
        // SAFETY: a place for the answer; the driver checks the ordinal.
        unsafe { api.device_get(&mut device, ordinal) }.map_err(Error::cuda("finding the GPU"))?;
        let capabilities = Capabilities::query(&api, device)?;
        capabilities.check()?;
        let mut context = 0;
        // SAFETY: a place for the answer and a device of this driver.
        unsafe { api.primary_ctx_retain(&mut context, device) }.map_err(Error::cuda("making a context"))?;
        Ok(Self::with(api, ordinal, device, context, true, capabilities, gdr))
    }

    /// The GPU and context of a stream of the application; for default streams, of the current context. It is that of [`Gpu::open`] if
    /// that has the same context; else it loads the kernels, for which CUDA may wait for streams.
    ///
    /// # Errors
    /// As [`Gpu::open`].
    ///
    /// # Safety
    /// `stream` must be valid, and its context must outlive the result, its clones and everything created with them.
    pub unsafe fn of_stream(stream: RawStream) -> Result<Self> {
        let api = Api::load().map_err(Error::cuda("loading CUDA"))?;
        // SAFETY: the caller vouches for the stream.
        let context = unsafe { context_of(&api, stream) }?;
        if let Some(gpu) = Self::open_list().lock().iter().find(|gpu| gpu.0.context == context) {
            return Ok(gpu.clone());
        }
        // SAFETY: the context of that stream, which outlives the result, as the caller promised.
        unsafe { Self::of_context(api, context, None) }
    }

    /// As [`Gpu::of_stream`], with the given entry points of the driver and `gdrcopy`.
    ///
    /// # Errors
    /// As [`Gpu::open`].
    ///
    /// # Safety
    /// As [`Gpu::of_stream`].
    pub unsafe fn of_stream_with(api: Api, stream: RawStream, gdr: Option<Gdr>) -> Result<Self> {
        // SAFETY: the caller vouches for the stream.
        let context = unsafe { context_of(&api, stream) }?;
        // SAFETY: the context of that stream, which outlives the result, as the caller promised.
        unsafe { Self::of_context(api, context, gdr) }
    }

    /// The GPU of a stream's context.
    ///
    /// # Safety
    /// The context must outlive the result, its clones and everything created with them.
    unsafe fn of_context(api: Api, context: Handle, gdr: Option<Gdr>) -> Result<Self> {
        let mut device = 0;
        // SAFETY: the caller vouches for the context.
        let current =
            unsafe { Current::enter(&api, context) }.map_err(Error::cuda("entering the stream's context"))?;
        // SAFETY: a place for the answer; a context is current.
        unsafe { api.ctx_get_device(&mut device) }.map_err(Error::cuda("finding the stream's GPU"))?;
        drop(current);
        let capabilities = Capabilities::query(&api, device)?;
        capabilities.check()?;
        // `CUdevice` and ordinal are the same number (cuDeviceGet).
        Ok(Self::with(api, device, device, context, false, capabilities, gdr))
    }

    fn with(
        api: Api,
        ordinal: i32,
        device: i32,
        context: Handle,
        primary: bool,
        capabilities: Capabilities,
        gdr: Option<Gdr>,
    ) -> Self {
        let (reached, arena, free_list, deferred_free, driver_tasks) = Default::default();
        let (ipc_handles, nudger, calibration, engine) = Default::default();
        let gdr = Mutex::new(gdr);
        let (name, pci) = pci_of(&api, device);
        let sign = Sign::new(&name);
        // SAFETY: retained by the caller, or kept alive as the maker of this value promised.
        let current =
            unsafe { Current::enter(&api, context) }.map_err(Error::cuda("entering the GPU's context"));
        let kernel_exec = current.and_then(|_current| {
            let kernel_exec = KernelExecutor::load(&api, &capabilities)?;
            reserve(&api, &kernel_exec);
            Ok(Arc::new(kernel_exec))
        });
        let inner = Inner {
            fork_guard: ForkGuard::default(),
            api,
            ordinal,
            device,
            context,
            primary,
            capabilities,
            reached,
            gdr,
            arena,
            free_list,
            deferred_free,
            driver_tasks,
            kernel_exec,
            ipc_handles,
            nudger,
            channel_pressure: ChannelPressure::of_context(context),
            sign,
            pci,
            calibration,
            engine,
        };
        Self(Arc::new(inner))
    }

    /// The number of GPUs visible to this process.
    ///
    /// # Errors
    /// [`Error::Cuda`] without CUDA.
    pub fn count() -> Result<i32> {
        let api = Api::load().map_err(Error::cuda("loading CUDA"))?;
        // SAFETY: no flags are defined.
        unsafe { api.init(0) }.map_err(Error::cuda("initialising CUDA"))?;
        Self::count_with(&api)
    }

    fn count_with(api: &Api) -> Result<i32> {
        let mut count = 0;
        // SAFETY: a place for the answer.
        unsafe { api.device_get_count(&mut count) }.map_err(Error::cuda("counting GPUs"))?;
        Ok(count)
    }

    /// The CUDA ordinal in this process.
    #[inline]
    pub fn ordinal(&self) -> i32 {
        self.0.ordinal
    }

    /// The PCI address as in sysfs, `domain:bus:device.function` in lower-case hexadecimal, if known.
    pub fn pci_address(&self) -> Option<&str> {
        self.0.pci.as_deref()
    }

    /// What it supports.
    pub fn capabilities(&self) -> &Capabilities {
        &self.0.capabilities
    }

    /// The context (`CUcontext`), for launching kernels in it.
    #[inline]
    pub fn raw_context(&self) -> usize {
        self.0.context
    }

    /// Whether this is the process that opened it; CUDA does not work in forked children.
    pub fn is_here(&self) -> bool {
        self.0.fork_guard.is_here()
    }

    /// The entry points of the driver.
    pub fn api(&self) -> &Api {
        &self.0.api
    }

    /// Makes its context current for the calling thread until the result is dropped, and keeps calls out of stream captures meanwhile.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn enter(&self) -> Result<Current<'_>> {
        // SAFETY: retained here, or kept alive as the maker of this value promised.
        unsafe { Current::enter(&self.0.api, self.0.context) }
            .map_err(Error::cuda("entering the GPU's context"))
    }

    /// Runs a call with its context current, as part of a capture if there is one. Fast if the context is current already.
    ///
    /// # Errors
    /// Of CUDA.
    #[inline]
    pub fn within<T>(&self, call: impl FnOnce(&Api) -> gdrcopy::Result<T>) -> gdrcopy::Result<T> {
        let _joined = self.join()?;
        call(&self.0.api)
    }

    /// Makes its context current until the result is dropped, as [`Gpu::within`].
    ///
    /// # Errors
    /// Of CUDA.
    #[inline]
    pub fn join(&self) -> gdrcopy::Result<Joined<'_>> {
        let api = &self.0.api;
        let mut current = 0;
        // SAFETY: a place for the answer.
        unsafe { api.ctx_get_current(&mut current) }?;
        let is_other = current != self.0.context;
        if is_other {
            // SAFETY: retained here, or kept alive as the maker of this value promised.
            unsafe { api.ctx_push_current(self.0.context) }?;
        }
        Ok(Joined(is_other.then_some(api)))
    }

    /// Makes sure that work of this GPU can use memory of another one.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the GPUs have no peer access.
    #[inline]
    pub fn reach(&self, other: &Gpu) -> Result<()> {
        if self.0.context == other.0.context { Ok(()) } else { self.reach_other(other) }
    }

    fn reach_other(&self, other: &Gpu) -> Result<()> {
        let (own, theirs) = (&*self.0, &*other.0);
        let mut reached = own.reached.lock();
        if reached.contains(&theirs.context) {
            return Ok(());
        }
        let _current = self.enter()?;
        // SAFETY: the other context is kept alive by its value.
        match unsafe { own.api.ctx_enable_peer_access(theirs.context, 0) } {
            Ok(()) | Err(gdrcopy::Error::Cuda { status: CudaStatus::PEER_ACCESS_ALREADY_ENABLED, .. }) => {
                reached.push(theirs.context);
                Ok(())
            }
            Err(error) => Err(Error::cuda("reaching the memory of another GPU")(error)),
        }
    }

    /// Whether its kernels can add to words of the GPU at this PCI address, as other kernels see it in one step: over NVLink, but mostly
    /// not over PCIe, and not if this process does not see that GPU.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if they do not access its memory at all; [`Error::Cuda`].
    pub fn adds_to(&self, pci: &str) -> Result<bool> {
        /// `CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED`, `CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED`.
        const ACCESS: u32 = 2;
        const ATOMICS: u32 = 3;
        if self.pci_address() == Some(pci) {
            return Ok(true);
        }
        let failed = Error::cuda("asking for the access to another GPU");
        let (api, mut found) = (&self.0.api, None);
        for device in 0..Self::count_with(api)? {
            found = found.or((pci_of(api, device).1.as_deref() == Some(pci)).then_some(device));
        }
        let Some(peer) = found else { return Ok(false) };
        let has = |attribute| {
            let mut value = 0;
            // SAFETY: a place for the answer; the driver checks the devices.
            unsafe { api.device_get_p2p_attribute(&mut value, attribute, self.0.device, peer) }
                .map(|()| value != 0)
                .map_err(&failed)
        };
        if !has(ACCESS)? {
            return Err(Error::Unsupported {
                what: "access to the memory of another GPU of this host",
                by: "the link between these GPUs (nvidia-smi topo -p2p r)",
                fix: "use GPUs with NVLink or peer access over PCIe, or a queue pair",
            });
        }
        has(ATOMICS)
    }

    /// Its copy engine, started by the first call.
    ///
    /// # Errors
    /// [`Error::Cuda`] and [`Error::Sys`] if its stream or thread cannot be made.
    pub fn engine(&self) -> Result<Arc<Engine>> {
        let mut slot = self.0.engine.lock();
        if let Some(engine) = slot.upgrade() {
            return Ok(engine);
        }
        let engine = Arc::new(Engine::start(self)?);
        *slot = Arc::downgrade(&engine);
        Ok(engine)
    }

    /// The mapper of its memory, opened by the first call.
    ///
    /// # Errors
    /// [`Error::Cuda`] if no backend of gdrcopy can map GPU memory.
    pub fn gdr(&self) -> Result<Gdr> {
        let mut slot = self.0.gdr.lock();
        if let Some(gdr) = &*slot {
            return Ok(gdr.clone());
        }
        let gdr = Gdr::builder().require_gpu().open().map_err(Error::cuda("mapping GPU memory"))?;
        Ok(slot.insert(gdr).clone())
    }

    /// The calibration, `made` by the first call.
    ///
    /// # Errors
    /// That of `make`.
    pub fn calibrated(&self, make: impl FnOnce() -> Result<Calibration>) -> Result<Calibration> {
        let mut slot = self.0.calibration.lock();
        match &*slot {
            Some(known) => Ok(known.clone()),
            None => Ok(slot.insert(make()?).clone()),
        }
    }

    /// Allocates GPU memory, mapped for the CPU. After the drop a thread frees it, because CUDA waits for all streams of the GPU.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the GPU has no memory, or the memory cannot be mapped, with the reasons of all backends.
    pub fn alloc(&self, len: usize) -> Result<Memory> {
        self.buffer(len).map(Memory::buffer)
    }

    /// Allocates GPU memory and maps it.
    ///
    /// # Errors
    /// As [`Gpu::alloc`].
    pub fn buffer(&self, len: usize) -> Result<Buffer> {
        let gdr = self.gdr()?;
        let alloc = || gdr.alloc(self.0.ordinal, len);
        let buffer = match alloc() {
            // Dropped memory may not be freed yet.
            Err(gdrcopy::Error::Exhausted { .. }) if self.0.deferred_free.finish_any() => alloc(),
            other => other,
        };
        let buffer = buffer.map_err(Error::cuda("allocating GPU memory"))?;
        let mapping = buffer.map().map_err(Error::cuda("mapping GPU memory"))?;
        Ok(Buffer::new(self, mapping, buffer))
    }

    /// Waits until all memory that was dropped is given back to CUDA. Then host memory of the application that this GPU has used may be
    /// unmapped (see [`Memory::from_raw`]). CUDA waits for all streams of the process.
    ///
    /// # Errors
    /// [`Error::Deadline`] after `timeout`: try again when no stream waits.
    pub fn reclaim(&self, timeout: Duration) -> Result<()> {
        let what = "giving memory back to CUDA";
        let is_done = self.0.deferred_free.finish(timeout);
        is_done.then_some(()).ok_or_else(|| Error::late(what, timeout, super::ALL_STREAMS))
    }

    /// Queues memory to be given back to CUDA.
    pub fn defer_free(&self, deferred: DeferredFree) {
        self.0.deferred_free.push(self.clone(), deferred);
    }

    /// Queues calls of the driver.
    pub fn driver_task(&self, driver_task: Weak<dyn DriverTask>) {
        self.0.driver_tasks.take(driver_task);
    }

    /// Removes calls of the driver; waits if they are being made.
    pub fn end_driver_task(&self, driver_task: &Weak<dyn DriverTask>) {
        self.0.driver_tasks.end(driver_task);
    }

    /// The memory that is to be given back to CUDA.
    pub(super) fn deferred_free(&self) -> &DeferredFreeThread {
        &self.0.deferred_free
    }

    /// The kernels that run stream operations.
    ///
    /// # Errors
    /// [`Error::Cuda`] if they could not be loaded.
    pub fn kernel_exec(&self) -> Result<Arc<KernelExecutor>> {
        self.0.kernel_exec.clone()
    }

    /// Allocates zeroed GPU memory for rings and words; small pieces share a block.
    ///
    /// # Errors
    /// As [`Gpu::alloc`].
    pub fn alloc_piece(&self, len: usize) -> Result<Memory> {
        self.0.arena.alloc(self, len)
    }

    /// Allocates zeroed, registered host memory.
    ///
    /// # Errors
    /// As [`Memory::alloc`] and [`Memory::gpu_addr`].
    pub fn alloc_host_piece(&self, len: usize) -> Result<Memory> {
        if let Some(pages) = self.0.free_list.take_host(page_round(len)?) {
            let memory = Memory::of_pages(self, pages, len);
            memory.fill(0, len, 0)?;
            return Ok(memory);
        }
        let memory = Memory::alloc(len)?;
        memory.gpu_addr(self)?;
        Ok(memory)
    }

    /// The memory of other processes that is open for it.
    pub fn ipc_handles(&self) -> &IpcHandles {
        &self.0.ipc_handles
    }

    /// The stream that wakes the other streams.
    pub fn nudger(&self) -> &NudgerSlot {
        &self.0.nudger
    }

    /// The counter of waiting streams.
    pub fn channel_pressure(&self) -> &ChannelPressure {
        &self.0.channel_pressure
    }

    /// Whether other processes with this library are known to use the GPU.
    pub fn is_shared_with_processes(&self) -> bool {
        self.0.sign.others().unwrap_or_else(|error| {
            tracing::debug!(%error, "it is not known who else uses the GPU");
            false
        })
    }

    /// Memory kept for the next user.
    pub fn free_list(&self) -> &FreeList {
        &self.0.free_list
    }
}

/// The PCI address of a device, as CUDA writes it and as in sysfs; empty if CUDA does not know it.
fn pci_of(api: &Api, device: i32) -> (String, Option<String>) {
    let mut pci = [0; 32];
    // SAFETY: the buffer has room for 31 characters and a zero.
    let named = unsafe { api.device_get_pci_bus_id(pci.as_mut_ptr().cast(), 32, device) };
    let pci = CStr::from_bytes_until_nul(&pci).unwrap_or_default().to_string_lossy();
    let pci = if named.is_ok() { pci.into_owned() } else { String::new() };
    let in_sysfs = sysfs_address(&pci);
    (pci, in_sysfs)
}

/// The context of a stream.
///
/// # Safety
/// The stream must be valid.
unsafe fn context_of(api: &Api, stream: RawStream) -> Result<Handle> {
    // SAFETY: no flags are defined.
    unsafe { api.init(0) }.map_err(Error::cuda("initialising CUDA"))?;
    let mut context = 0;
    // SAFETY: a place for the answer; the caller vouches for the stream.
    unsafe { api.stream_get_ctx(stream, &mut context) }
        .map_err(Error::cuda("finding the stream's context"))?;
    Ok(context)
}

/// Streams and graphs in the pool afterwards.
const STREAMS: usize = 64;
const GRAPHS: usize = 64;

/// Fills the driver's pool of streams and graphs; what is created and destroyed here stays in it. The context must be current.
///
/// When the pool is exhausted the driver waits for every stream of the process: on an H200 (driver 580) at the 34th and 77th stream, and
/// at the 10th and 31st graph with a kernel.
pub(super) fn reserve(api: &Api, kernel_exec: &KernelExecutor) {
    let (mut streams, mut graphs) = (Vec::new(), Vec::new());
    if let Err(error) = make(api, kernel_exec, &mut streams, &mut graphs) {
        tracing::debug!(%error, "streams and graphs are not reserved");
    }
    let mut gone = Vec::new();
    for exec in graphs {
        // SAFETY: created by `make`, never launched.
        gone.push(unsafe { api.graph_exec_destroy(exec) });
    }
    for stream in streams {
        // SAFETY: created by `make`, without work.
        gone.push(unsafe { api.stream_destroy(stream) });
    }
    if let Some(error) = gone.into_iter().find_map(std::result::Result::err) {
        tracing::debug!(%error, "a stream or graph is leaked");
    }
}

fn make(
    api: &Api,
    kernel_exec: &KernelExecutor,
    streams: &mut Vec<Handle>,
    graphs: &mut Vec<Handle>,
) -> gdrcopy::Result<()> {
    for _ in 0..STREAMS {
        let mut stream = 0;
        // SAFETY: a place for the answer.
        unsafe { api.stream_create(&mut stream, STREAM_NON_BLOCKING, 0) }?;
        streams.push(stream);
    }
    let graph = kernels(api, kernel_exec, streams[0])?;
    let mut instantiate = || {
        let mut exec = 0;
        // SAFETY: a place for the answer, a graph, no flags.
        unsafe { api.graph_instantiate(&mut exec, graph, 0) }?;
        graphs.push(exec);
        Ok(())
    };
    let made = (0..GRAPHS).try_for_each(|_| instantiate());
    // SAFETY: captured here.
    made.and(unsafe { api.graph_destroy(graph) })
}

/// A graph of both kernels, without operations.
fn kernels(api: &Api, kernel_exec: &KernelExecutor, stream: Handle) -> gdrcopy::Result<Handle> {
    let head = Head { status: 0, limit_ns: 0, submission: 0, count: 0 };
    // SAFETY: an idle stream of this context.
    unsafe { api.stream_begin_capture(stream, CAPTURE_RELAXED) }?;
    let launched = kernel_exec
        .launch(api, stream, head, &[], false)
        .and_then(|()| kernel_exec.launch(api, stream, head, &[KernelOp::BARRIER; SMALL + 1], false));
    let mut graph = 0;
    // SAFETY: a stream that is being captured, and a place for the graph.
    let ended = unsafe { api.stream_end_capture(stream, &mut graph) };
    launched.and(ended).map(|()| graph)
}

#[cfg(test)]
mod tests {
    use gdsync_testkit::process::{End, in_child};

    use super::*;

    #[test]
    fn a_forked_child_asks_for_gpus_while_its_parent_opens_one() {
        let _held = Gpu::open_list().lock();
        assert_eq!(in_child(|| Gpu::opened().is_empty() && Gpu::open(-1).is_err()), End::Said(true));
    }
}
