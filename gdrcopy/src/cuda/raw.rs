//! The entry points of the CUDA driver as they are, for crates that drive streams. Applications have no use for them.
//!
//! They are declared with an integer result. `cudarc` declares them with its closed `CUresult` enum, and a status of a newer
//! driver that the enum lacks would be undefined behaviour; so `cudarc` only loads the library.

pub mod layout;

use std::ffi::{c_char, c_void};
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::sync::OnceLock;

use cudarc::driver::sys;

use self::layout::{
    AccessDesc, AllocationProp, CAPTURE_RELAXED, EdgeData, Handle, KernelNodeParams, LaunchConfig,
    MEMORY_TYPE_DEVICE, MEMORY_TYPE_HOST, MemOp, MemOpNodeParams, pointer_attribute as attribute,
};
use super::{CudaStatus, MemoryKind, PointerInfo};
use crate::error::{Error, Result, name_of};

/// Declares the table of entry points and a checked call for each.
macro_rules! entry_points {
    ($($name:ident = $symbol:literal ($($arg:ident: $ty:ty),*);)*) => {
        /// Entry points by address; those this driver lacks are `None`.
        #[derive(Clone, Copy, Default)]
        pub struct Api {
            $(
                #[doc = concat!("`", $symbol, "`")]
                pub $name: Option<unsafe extern "C" fn($($ty),*) -> u32>,
            )*
        }

        #[expect(clippy::too_many_arguments, reason = "those of the driver")]
        impl Api {
            /// Loads `libcuda`; it stays loaded, and its entry points are looked up once.
            ///
            /// # Errors
            /// [`Error::Sys`] where there is none.
            pub fn load() -> Result<Self> {
                static LOADED: OnceLock<Api> = OnceLock::new();
                if !present() {
                    return Err(Error::sys("loading libcuda.so.1", not_found(), NO_LIBRARY));
                }
                Ok(*LOADED.get_or_init(|| {
                    // SAFETY: the library may be loaded at any time. The call would panic without one.
                    let library = unsafe { sys::culib() };
                    Self {
                        $(
                            // SAFETY: the type is that of the function in cuda.h.
                            $name: unsafe { library.get($symbol) }.ok().map(|entry| *entry),
                        )*
                    }
                }))
            }

            $(
                /// Calls the entry point of this name.
                ///
                /// # Errors
                /// [`Error::Cuda`]; [`Error::Unsupported`] where this driver has no such entry point.
                ///
                /// # Safety
                /// The arguments must be what the CUDA driver's manual asks for.
                #[inline]
                pub unsafe fn $name(&self, $($arg: $ty),*) -> Result<()> {
                    let Some(entry) = self.$name else { return Err(missing($symbol)) };
                    // SAFETY: the caller guarantees the arguments.
                    CudaStatus(unsafe { entry($($arg),*) }).check($symbol)
                }
            )*
        }
    };
}

entry_points! {
    init = "cuInit" (flags: u32);
    driver_get_version = "cuDriverGetVersion" (version: *mut i32);
    device_get_count = "cuDeviceGetCount" (count: *mut i32);
    device_get = "cuDeviceGet" (device: *mut i32, ordinal: i32);
    device_get_name = "cuDeviceGetName" (name: *mut c_char, len: i32, device: i32);
    device_get_pci_bus_id = "cuDeviceGetPCIBusId" (id: *mut c_char, len: i32, device: i32);
    device_get_attribute = "cuDeviceGetAttribute" (value: *mut i32, attribute: u32, device: i32);
    primary_ctx_retain = "cuDevicePrimaryCtxRetain" (context: *mut Handle, device: i32);
    primary_ctx_release = "cuDevicePrimaryCtxRelease_v2" (device: i32);
    primary_ctx_get_state = "cuDevicePrimaryCtxGetState" (device: i32, flags: *mut u32, active: *mut i32);
    ctx_push_current = "cuCtxPushCurrent_v2" (context: Handle);
    ctx_pop_current = "cuCtxPopCurrent_v2" (context: *mut Handle);
    thread_exchange_stream_capture_mode = "cuThreadExchangeStreamCaptureMode" (mode: *mut u32);
    pointer_get_attribute = "cuPointerGetAttribute" (data: *mut c_void, attribute: u32, addr: u64);
    pointer_get_attributes = "cuPointerGetAttributes"
        (count: u32, attributes: *const u32, data: *const *mut c_void, addr: u64);
    pointer_set_attribute = "cuPointerSetAttribute" (value: *const c_void, attribute: u32, addr: u64);
    ipc_get_mem_handle = "cuIpcGetMemHandle" (handle: *mut [u8; 64], addr: u64);
    mem_alloc = "cuMemAlloc_v2" (addr: *mut u64, len: usize);
    mem_free = "cuMemFree_v2" (addr: u64);
    mem_alloc_async = "cuMemAllocAsync" (addr: *mut u64, len: usize, stream: Handle);
    mem_alloc_managed = "cuMemAllocManaged" (addr: *mut u64, len: usize, flags: u32);
    mem_get_info = "cuMemGetInfo_v2" (free: *mut usize, total: *mut usize);
    mem_host_alloc = "cuMemHostAlloc" (addr: *mut *mut c_void, len: usize, flags: u32);
    mem_free_host = "cuMemFreeHost" (addr: *mut c_void);
    ctx_get_stream_priority_range = "cuCtxGetStreamPriorityRange" (least: *mut i32, greatest: *mut i32);
    stream_create = "cuStreamCreateWithPriority" (stream: *mut Handle, flags: u32, priority: i32);
    stream_query = "cuStreamQuery" (stream: Handle);
    stream_synchronize = "cuStreamSynchronize" (stream: Handle);
    stream_destroy = "cuStreamDestroy_v2" (stream: Handle);
    memcpy_to_device_async = "cuMemcpyHtoDAsync_v2" (dst: u64, src: *const c_void, len: usize, stream: Handle);
    memcpy_to_host_async = "cuMemcpyDtoHAsync_v2" (dst: *mut c_void, src: u64, len: usize, stream: Handle);
    mem_get_allocation_granularity = "cuMemGetAllocationGranularity"
        (granularity: *mut usize, prop: *const AllocationProp, option: u32);
    mem_create = "cuMemCreate" (memory: *mut u64, len: usize, prop: *const AllocationProp, flags: u64);
    mem_release = "cuMemRelease" (memory: u64);
    mem_address_reserve = "cuMemAddressReserve" (addr: *mut u64, len: usize, align: usize, hint: u64, flags: u64);
    mem_address_free = "cuMemAddressFree" (addr: u64, len: usize);
    mem_map = "cuMemMap" (addr: u64, len: usize, offset: usize, memory: u64, flags: u64);
    mem_unmap = "cuMemUnmap" (addr: u64, len: usize);
    mem_set_access = "cuMemSetAccess" (addr: u64, len: usize, access: *const AccessDesc, count: usize);
    mem_get_handle_for_address_range = "cuMemGetHandleForAddressRange"
        (handle: *mut c_void, addr: u64, len: usize, kind: u32, flags: u64);
    flush_gpu_direct_rdma_writes = "cuFlushGPUDirectRDMAWrites" (target: u32, scope: u32);
    ctx_get_current = "cuCtxGetCurrent" (context: *mut Handle);
    ctx_get_device = "cuCtxGetDevice" (device: *mut i32);
    ctx_get_id = "cuCtxGetId" (context: Handle, id: *mut u64);
    ctx_enable_peer_access = "cuCtxEnablePeerAccess" (peer: Handle, flags: u32);
    device_can_access_peer = "cuDeviceCanAccessPeer" (can: *mut i32, device: i32, peer: i32);
    device_get_p2p_attribute = "cuDeviceGetP2PAttribute" (value: *mut i32, attribute: u32, device: i32, peer: i32);
    mem_host_register = "cuMemHostRegister_v2" (addr: *mut c_void, len: usize, flags: u32);
    mem_host_unregister = "cuMemHostUnregister" (addr: *mut c_void);
    mem_host_get_device_pointer = "cuMemHostGetDevicePointer_v2" (addr: *mut u64, host: *mut c_void, flags: u32);
    stream_get_ctx = "cuStreamGetCtx" (stream: Handle, context: *mut Handle);
    stream_get_id = "cuStreamGetId" (stream: Handle, id: *mut u64);
    stream_batch_mem_op = "cuStreamBatchMemOp_v2" (stream: Handle, count: u32, ops: *mut MemOp, flags: u32);
    launch_host_func = "cuLaunchHostFunc" (stream: Handle, function: extern "C" fn(*mut c_void), data: *mut c_void);
    launch_kernel = "cuLaunchKernel"
        (function: Handle, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
         shared: u32, stream: Handle, params: *mut *mut c_void, extra: *mut *mut c_void);
    launch_kernel_ex = "cuLaunchKernelEx"
        (config: *const LaunchConfig, function: Handle, params: *mut *mut c_void, extra: *mut *mut c_void);
    module_load_data = "cuModuleLoadData" (module: *mut Handle, image: *const c_void);
    module_unload = "cuModuleUnload" (module: Handle);
    module_get_function = "cuModuleGetFunction" (function: *mut Handle, module: Handle, name: *const c_char);
    func_load = "cuFuncLoad" (function: Handle);
    event_create = "cuEventCreate" (event: *mut Handle, flags: u32);
    event_record = "cuEventRecord" (event: Handle, stream: Handle);
    event_query = "cuEventQuery" (event: Handle);
    event_destroy = "cuEventDestroy_v2" (event: Handle);
    memcpy_async = "cuMemcpyAsync" (dst: u64, src: u64, len: usize, stream: Handle);
    memcpy_peer_async = "cuMemcpyPeerAsync"
        (dst: u64, dst_context: Handle, src: u64, src_context: Handle, len: usize, stream: Handle);
    memset_d32_async = "cuMemsetD32Async" (dst: u64, value: u32, count: usize, stream: Handle);
    ipc_open_mem_handle = "cuIpcOpenMemHandle_v2" (addr: *mut u64, handle: [u8; 64], flags: u32);
    ipc_close_mem_handle = "cuIpcCloseMemHandle" (addr: u64);
    stream_begin_capture = "cuStreamBeginCapture_v2" (stream: Handle, mode: u32);
    stream_end_capture = "cuStreamEndCapture" (stream: Handle, graph: *mut Handle);
    stream_get_capture_info = "cuStreamGetCaptureInfo_v2"
        (stream: Handle, status: *mut u32, id: *mut u64, graph: *mut Handle, dependencies: *mut *const Handle,
         count: *mut usize);
    graph_instantiate = "cuGraphInstantiateWithFlags" (exec: *mut Handle, graph: Handle, flags: u64);
    graph_launch = "cuGraphLaunch" (exec: Handle, stream: Handle);
    graph_destroy = "cuGraphDestroy" (graph: Handle);
    graph_exec_destroy = "cuGraphExecDestroy" (exec: Handle);
    graph_node_get_dependencies = "cuGraphNodeGetDependencies_v2"
        (node: Handle, nodes: *mut Handle, edges: *mut EdgeData, count: *mut usize);
    graph_node_get_dependent_nodes = "cuGraphNodeGetDependentNodes_v2"
        (node: Handle, nodes: *mut Handle, edges: *mut EdgeData, count: *mut usize);
    graph_add_dependencies = "cuGraphAddDependencies_v2"
        (graph: Handle, from: *const Handle, to: *const Handle, edges: *const EdgeData, count: usize);
    graph_destroy_node = "cuGraphDestroyNode" (node: Handle);
    graph_exec_mem_op_node_set_params = "cuGraphExecBatchMemOpNodeSetParams"
        (exec: Handle, node: Handle, params: *const MemOpNodeParams);
    graph_exec_kernel_node_set_params = "cuGraphExecKernelNodeSetParams_v2"
        (exec: Handle, node: Handle, params: *const KernelNodeParams);
}

impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Api")
    }
}

const NO_LIBRARY: &str = "install the NVIDIA driver, or give the container its `compute` capability";

fn not_found() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOENT)
}

/// Whether there is a `libcuda`. Searched once, since the search tries many names.
fn present() -> bool {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    // SAFETY: loading runs the initialisers of a library called libcuda, which may run at any time.
    *PRESENT.get_or_init(|| unsafe { sys::is_culib_present() })
}

#[cold]
pub(super) fn missing(symbol: &'static str) -> Error {
    Error::Unsupported {
        what: name_of(symbol).into(),
        by: "the installed CUDA driver",
        fix: "install a driver of CUDA 11.7 or newer",
    }
}

/// Makes a context current for this thread; the drop restores the former one.
#[derive(Debug)]
#[must_use]
pub struct Current<'a> {
    api: &'a Api,
    _relaxed: Relaxed<'a>,
}

/// Relaxed capture mode for this thread; the drop restores the former mode. In any other mode an allocation, a new stream or a copy
/// would fail and invalidate a capture of the application, in this or another thread.
#[derive(Debug)]
#[must_use]
pub struct Relaxed<'a> {
    api: &'a Api,
    /// None if the driver has no capture modes.
    former: Option<u32>,
    _of_this_thread: PhantomData<*mut ()>,
}

impl<'a> Current<'a> {
    /// Makes a context current, with relaxed capture mode.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    ///
    /// # Safety
    /// The context must live.
    pub unsafe fn enter(api: &'a Api, context: Handle) -> Result<Self> {
        // SAFETY: the caller guarantees the context.
        unsafe { api.ctx_push_current(context) }?;
        Ok(Self { api, _relaxed: Relaxed::enter(api) })
    }
}

impl<'a> Relaxed<'a> {
    /// Sets relaxed capture mode.
    pub fn enter(api: &'a Api) -> Self {
        let mut mode = CAPTURE_RELAXED;
        // SAFETY: a mode, and a place for the former one.
        let former = unsafe { api.thread_exchange_stream_capture_mode(&mut mode) }.ok().map(|()| mode);
        Self { api, former, _of_this_thread: PhantomData }
    }
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        let Some(mut mode) = self.former else { return };
        // SAFETY: the mode that this thread had, and a place for the one that it has.
        if let Err(error) = unsafe { self.api.thread_exchange_stream_capture_mode(&mut mode) } {
            tracing::warn!(%error, "the capture mode of the calling thread was not restored");
        }
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut popped = 0;
        // SAFETY: pushed by this thread when this value was made.
        if let Err(error) = unsafe { self.api.ctx_pop_current(&mut popped) } {
            tracing::warn!(%error, "the CUDA context of the calling thread was not restored");
        }
    }
}

/// Asks for several attributes of an address at once. An attribute that the address has not is 0, and so are
/// all of an address that CUDA does not know.
pub(super) fn attributes<const N: usize>(api: &Api, addr: u64, asked: [u32; N]) -> Result<[u64; N]> {
    let mut answers = [0; N];
    let places: [*mut c_void; N] = answers.each_mut().map(|answer| std::ptr::from_mut::<u64>(answer).cast());
    let count = u32::try_from(N).unwrap_or(u32::MAX);
    // SAFETY: as many attributes and places as said; no answer is longer than eight bytes.
    match unsafe { api.pointer_get_attributes(count, asked.as_ptr(), places.as_ptr(), addr) } {
        // One of the attributes is newer than the driver, or no context exists yet.
        Err(Error::Cuda { status: CudaStatus::INVALID_VALUE | CudaStatus::INVALID_CONTEXT, .. }) => {
            one_by_one(api, addr, asked)
        }
        result => result.map(|()| answers),
    }
}

/// As [`attributes`], for drivers that do not know all of them.
pub(super) fn one_by_one<const N: usize>(api: &Api, addr: u64, asked: [u32; N]) -> Result<[u64; N]> {
    let mut answers = [0; N];
    for (answer, asked) in answers.iter_mut().zip(asked) {
        let place = std::ptr::from_mut::<u64>(answer);
        // SAFETY: a place for the answer, which is not longer than eight bytes.
        match unsafe { api.pointer_get_attribute(place.cast(), asked, addr) } {
            Err(Error::Cuda {
                status: CudaStatus::INVALID_VALUE | CudaStatus::INVALID_CONTEXT | CudaStatus::NOT_SUPPORTED,
                ..
            }) => *answer = 0,
            result => result?,
        }
    }
    Ok(answers)
}

/// The number of the allocation at an address, 0 where there is none.
pub(super) fn buffer_id(api: &Api, addr: u64) -> Result<u64> {
    let [id] = one_by_one(api, addr, [attribute::BUFFER_ID])?;
    Ok(id)
}

/// What lies at an address; one that CUDA does not know is [`MemoryKind::Unknown`].
///
/// # Errors
/// [`Error::Cuda`].
pub fn pointer_info(api: &Api, addr: u64) -> Result<PointerInfo> {
    let [memory, managed, pool, ipc, device, buffer_id, start, size, mapping_start, mapping_size] =
        attributes(
            api,
            addr,
            [
                attribute::MEMORY_TYPE,
                attribute::IS_MANAGED,
                attribute::MEMPOOL_HANDLE,
                attribute::IS_LEGACY_CUDA_IPC_CAPABLE,
                attribute::DEVICE_ORDINAL,
                attribute::BUFFER_ID,
                attribute::RANGE_START_ADDR,
                attribute::RANGE_SIZE,
                attribute::MAPPING_BASE_ADDR,
                attribute::MAPPING_SIZE,
            ],
        )?;
    let kind = match number(memory) {
        MEMORY_TYPE_HOST | MEMORY_TYPE_DEVICE if managed != 0 => MemoryKind::Managed,
        MEMORY_TYPE_HOST => MemoryKind::Host,
        MEMORY_TYPE_DEVICE if pool != 0 => MemoryKind::Pool,
        MEMORY_TYPE_DEVICE if ipc != 0 => MemoryKind::Malloc,
        MEMORY_TYPE_DEVICE => MemoryKind::Vmm,
        _ => {
            let device = -1;
            return Ok(PointerInfo { kind: MemoryKind::Unknown, device, base: addr, size: 0, buffer_id });
        }
    };
    // The range of VMM memory is the whole reservation. Drivers before CUDA 12 do not tell single mappings.
    let vmm = kind == MemoryKind::Vmm;
    let (base, size) = if vmm && mapping_size != 0 { (mapping_start, mapping_size) } else { (start, size) };
    Ok(PointerInfo {
        kind,
        device: number(device).cast_signed(),
        base,
        size: usize::from_ne_bytes(size.to_ne_bytes()),
        buffer_id,
    })
}

/// A 32-bit answer, which the driver writes to the start of its place.
pub(super) fn number(answer: u64) -> u32 {
    let [a, b, c, d, ..] = answer.to_ne_bytes();
    u32::from_ne_bytes([a, b, c, d])
}
