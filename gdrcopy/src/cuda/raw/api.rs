//! The entry points of `libcuda` that mappings need.
//!
//! They are declared here with an integer result. `cudarc` declares them with its closed `CUresult` enum, and a
//! status of a newer driver that the enum lacks would be undefined behaviour; so `cudarc` only loads the library.

use std::ffi::{c_char, c_void};
use std::fmt;
use std::io;
use std::sync::OnceLock;

use cudarc::driver::sys;

use super::layout::{AccessDesc, AllocationProp, Handle, KernelNodeParams, MemOp, MemOpNodeParams};
use crate::cuda::CudaStatus;
use crate::cuda::status::name_of;
use crate::error::{Error, Result};

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
            /// Loads `libcuda`; it stays loaded.
            ///
            /// # Errors
            /// [`Error::Sys`] where there is none.
            pub fn load() -> Result<Self> {
                if !present() {
                    return Err(Error::sys("loading libcuda.so.1", not_found(), NO_LIBRARY));
                }
                // SAFETY: the library may be loaded at any time. The call would panic without one.
                let library = unsafe { sys::culib() };
                Ok(Self {
                    $(
                        // SAFETY: the type is that of the function in cuda.h.
                        $name: unsafe { library.get($symbol) }.ok().map(|entry| *entry),
                    )*
                })
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
                    // SAFETY: the caller vouches for the arguments.
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
    mem_free_async = "cuMemFreeAsync" (addr: u64, stream: Handle);
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
    mem_retain_allocation_handle = "cuMemRetainAllocationHandle" (memory: *mut u64, addr: *mut c_void);
    mem_export_to_shareable_handle = "cuMemExportToShareableHandle"
        (handle: *mut c_void, memory: u64, kind: u32, flags: u64);
    mem_get_handle_for_address_range = "cuMemGetHandleForAddressRange"
        (handle: *mut c_void, addr: u64, len: usize, kind: u32, flags: u64);
    flush_gpu_direct_rdma_writes = "cuFlushGPUDirectRDMAWrites" (target: u32, scope: u32);
    ctx_get_current = "cuCtxGetCurrent" (context: *mut Handle);
    ctx_get_device = "cuCtxGetDevice" (device: *mut i32);
    ctx_enable_peer_access = "cuCtxEnablePeerAccess" (peer: Handle, flags: u32);
    device_can_access_peer = "cuDeviceCanAccessPeer" (can: *mut i32, device: i32, peer: i32);
    mem_host_register = "cuMemHostRegister_v2" (addr: *mut c_void, len: usize, flags: u32);
    mem_host_unregister = "cuMemHostUnregister" (addr: *mut c_void);
    mem_host_get_device_pointer = "cuMemHostGetDevicePointer_v2" (addr: *mut u64, host: *mut c_void, flags: u32);
    stream_get_ctx = "cuStreamGetCtx" (stream: Handle, context: *mut Handle);
    stream_wait_event = "cuStreamWaitEvent" (stream: Handle, event: Handle, flags: u32);
    stream_batch_mem_op = "cuStreamBatchMemOp_v2" (stream: Handle, count: u32, ops: *mut MemOp, flags: u32);
    launch_host_func = "cuLaunchHostFunc" (stream: Handle, function: extern "C" fn(*mut c_void), data: *mut c_void);
    launch_kernel = "cuLaunchKernel"
        (function: Handle, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
         shared: u32, stream: Handle, params: *mut *mut c_void, extra: *mut *mut c_void);
    module_load_data = "cuModuleLoadData" (module: *mut Handle, image: *const c_void);
    module_unload = "cuModuleUnload" (module: Handle);
    module_get_function = "cuModuleGetFunction" (function: *mut Handle, module: Handle, name: *const c_char);
    func_load = "cuFuncLoad" (function: Handle);
    event_create = "cuEventCreate" (event: *mut Handle, flags: u32);
    event_record = "cuEventRecord" (event: Handle, stream: Handle);
    event_query = "cuEventQuery" (event: Handle);
    event_synchronize = "cuEventSynchronize" (event: Handle);
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

/// Whether there is a `libcuda`: looked for once, as a search goes through many names.
fn present() -> bool {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    // SAFETY: loading runs the initialisers of a library called libcuda, which may run at any time.
    *PRESENT.get_or_init(|| unsafe { sys::is_culib_present() })
}

#[cold]
fn missing(symbol: &'static str) -> Error {
    Error::Unsupported {
        what: name_of(symbol).into(),
        by: "the installed CUDA driver",
        fix: "install a driver of CUDA 11.7 or newer",
    }
}
