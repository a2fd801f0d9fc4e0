//! The table of entry points.

use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::Api;
use gdrcopy::cuda::raw::layout::{
    AccessDesc, AllocationProp, EdgeData, Handle, KernelNodeParams, LaunchConfig, MemOp, MemOpNodeParams,
};

use super::context::DEVICES;
use super::control::SETTINGS;
use super::objects::Shape;
use super::{Outcome, context, control, memory, objects, put, queue, stream};

/// What works before `cuInit`.
const EARLY: [&str; 2] = ["cuInit", "cuDriverGetVersion"];

/// One call; it never unwinds.
fn call(name: &'static str, act: impl FnOnce() -> Outcome) -> u32 {
    let entered = || {
        control::enter(name)?;
        queue::not_working()?;
        if !EARLY.contains(&name) {
            context::initialised()?;
        }
        act()
    };
    match catch_unwind(AssertUnwindSafe(entered)) {
        Ok(Ok(())) => 0,
        Ok(Err(status)) => status.0,
        Err(_) => CudaStatus::UNKNOWN.0,
    }
}

/// The name in the manual: a symbol without its version.
const fn name_of(symbol: &'static str) -> &'static str {
    match symbol.as_bytes() {
        [name @ .., b'_', b'v', b'2'] => symbol.split_at(name.len()).0,
        _ => symbol,
    }
}

/// Makes entry points of the lines, each with its symbol in the driver's library, and the table of them. An entry point does what an
/// expression says, or what a function of the same arguments does. They are exported, for the library `gdsync-simulated-cuda`.
macro_rules! table {
    (@act ($($arg:ident),*) => $function:path) => { $function($($arg),*) };
    (@act ($($arg:ident),*) $body:expr) => { $body };
    ($($field:ident = $symbol:literal ($($arg:ident: $ty:ty),*) $(=> $function:path)? $({ $body:expr })?;)*) => {
        /// The names of all entry points that there are.
        pub(super) const NAMES: &[&str] = &[$(name_of($symbol)),*];

        /// The simulated driver's entry points. Those that are missing are `None`.
        #[expect(improper_ctypes_definitions, reason = "the table passes an IPC handle as an array")]
        pub fn api() -> Api {
            Api {
                $($field: {
                    #[unsafe(export_name = $symbol)]
                    extern "C" fn entry($($arg: $ty),*) -> u32 {
                        call(name_of($symbol), || table!(@act ($($arg),*) $(=> $function)? $($body)?))
                    }
                    Some(entry)
                },)*
                ..Api::default()
            }
        }
    };
}

table! {
    init = "cuInit" (flags: u32) => context::init;
    driver_get_version = "cuDriverGetVersion" (version: *mut i32) { put(version, SETTINGS.lock().version) };
    device_get_count = "cuDeviceGetCount" (count: *mut i32) { put(count, DEVICES) };
    device_get = "cuDeviceGet" (device: *mut i32, ordinal: i32) => context::get_device;
    device_get_name = "cuDeviceGetName" (name: *mut c_char, len: i32, device: i32) => context::name;
    device_get_pci_bus_id = "cuDeviceGetPCIBusId"
        (id: *mut c_char, len: i32, device: i32) => context::pci_bus_id;
    device_get_attribute = "cuDeviceGetAttribute"
        (value: *mut i32, attribute: u32, device: i32) => context::attribute;
    primary_ctx_retain = "cuDevicePrimaryCtxRetain"
        (context: *mut Handle, device: i32) => context::primary_retain;
    primary_ctx_release = "cuDevicePrimaryCtxRelease_v2" (device: i32) => context::primary_release;
    primary_ctx_get_state = "cuDevicePrimaryCtxGetState"
        (device: i32, flags: *mut u32, active: *mut i32) => context::primary_state;
    ctx_push_current = "cuCtxPushCurrent_v2" (context: Handle) => context::push;
    ctx_pop_current = "cuCtxPopCurrent_v2" (context: *mut Handle) => context::pop;
    ctx_get_current = "cuCtxGetCurrent" (context: *mut Handle) => context::get_current;
    ctx_get_device = "cuCtxGetDevice" (device: *mut i32) => context::current_device;
    ctx_get_id = "cuCtxGetId" (context: Handle, id: *mut u64) => context::get_id;
    ctx_get_stream_priority_range = "cuCtxGetStreamPriorityRange"
        (least: *mut i32, greatest: *mut i32) => context::priorities;
    ctx_enable_peer_access = "cuCtxEnablePeerAccess"
        (peer: Handle, flags: u32) => context::enable_peer_access;
    device_can_access_peer = "cuDeviceCanAccessPeer"
        (can: *mut i32, device: i32, peer: i32) => context::can_access_peer;
    device_get_p2p_attribute = "cuDeviceGetP2PAttribute"
        (value: *mut i32, attribute: u32, device: i32, peer: i32) => context::p2p_attribute;
    flush_gpu_direct_rdma_writes = "cuFlushGPUDirectRDMAWrites"
        (target: u32, scope: u32) => context::flush_writes;
    thread_exchange_stream_capture_mode = "cuThreadExchangeStreamCaptureMode"
        (mode: *mut u32) => context::exchange_mode;
    pointer_get_attribute = "cuPointerGetAttribute"
        (data: *mut c_void, attribute: u32, addr: u64) => memory::attribute;
    pointer_get_attributes = "cuPointerGetAttributes"
        (count: u32, attributes: *const u32, data: *const *mut c_void, addr: u64) => memory::attributes;
    pointer_set_attribute = "cuPointerSetAttribute"
        (value: *const c_void, attribute: u32, addr: u64) => memory::set_attribute;
    ipc_get_mem_handle = "cuIpcGetMemHandle" (handle: *mut [u8; 64], addr: u64) => memory::ipc_handle;
    ipc_open_mem_handle = "cuIpcOpenMemHandle_v2"
        (addr: *mut u64, handle: [u8; 64], flags: u32) => memory::open_ipc;
    ipc_close_mem_handle = "cuIpcCloseMemHandle" (addr: u64) => memory::close_ipc;
    mem_alloc = "cuMemAlloc_v2" (addr: *mut u64, len: usize) => memory::alloc;
    mem_free = "cuMemFree_v2" (addr: u64) => memory::free;
    mem_get_info = "cuMemGetInfo_v2" (free: *mut usize, total: *mut usize) => memory::info;
    mem_get_handle_for_address_range = "cuMemGetHandleForAddressRange"
        (handle: *mut c_void, addr: u64, len: usize, kind: u32, _flags: u64)
        { memory::dma_buf(handle, addr, len, kind) };
    mem_host_alloc = "cuMemHostAlloc" (addr: *mut *mut c_void, len: usize, flags: u32) => memory::host_alloc;
    mem_free_host = "cuMemFreeHost" (addr: *mut c_void) => memory::free_host;
    mem_host_register = "cuMemHostRegister_v2" (addr: *mut c_void, len: usize, flags: u32) => memory::register;
    mem_host_unregister = "cuMemHostUnregister" (addr: *mut c_void) => memory::unregister;
    mem_host_get_device_pointer = "cuMemHostGetDevicePointer_v2"
        (addr: *mut u64, host: *mut c_void, flags: u32) => memory::host_device_pointer;
    mem_get_allocation_granularity = "cuMemGetAllocationGranularity"
        (granularity: *mut usize, _prop: *const AllocationProp, _option: u32)
        { memory::granularity(granularity) };
    mem_create = "cuMemCreate" (memory: *mut u64, len: usize, prop: *const AllocationProp, _flags: u64)
        { memory::create(memory, len, prop) };
    mem_release = "cuMemRelease" (memory: u64) => memory::release;
    mem_address_reserve = "cuMemAddressReserve"
        (addr: *mut u64, len: usize, align: usize, _hint: u64, _flags: u64) { memory::reserve(addr, len, align) };
    mem_address_free = "cuMemAddressFree" (addr: u64, len: usize) => memory::unreserve;
    mem_map = "cuMemMap" (addr: u64, len: usize, _offset: usize, memory: u64, _flags: u64)
        { memory::map(addr, len, memory) };
    mem_unmap = "cuMemUnmap" (addr: u64, len: usize) => memory::unmap;
    mem_set_access = "cuMemSetAccess"
        (addr: u64, len: usize, access: *const AccessDesc, count: usize) => memory::set_access;
    stream_create = "cuStreamCreateWithPriority"
        (stream: *mut Handle, flags: u32, priority: i32) => stream::create;
    stream_query = "cuStreamQuery" (stream: Handle) => stream::query;
    stream_synchronize = "cuStreamSynchronize" (stream: Handle) => stream::synchronize;
    stream_destroy = "cuStreamDestroy_v2" (stream: Handle) => stream::destroy;
    stream_get_ctx = "cuStreamGetCtx" (stream: Handle, context: *mut Handle) => stream::get_context;
    stream_get_id = "cuStreamGetId" (stream: Handle, id: *mut u64) => stream::get_id;
    stream_batch_mem_op = "cuStreamBatchMemOp_v2"
        (stream: Handle, count: u32, ops: *mut MemOp, flags: u32) => stream::batch_mem_op;
    launch_host_func = "cuLaunchHostFunc"
        (stream: Handle, function: extern "C" fn(*mut c_void), data: *mut c_void) => stream::launch_host;
    launch_kernel = "cuLaunchKernel"
        (function: Handle, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
         _shared: u32, stream: Handle, params: *mut *mut c_void, extra: *mut *mut c_void) {{
            let shape = Shape { grid: [grid_x, grid_y, grid_z], block: [block_x, block_y, block_z] };
            objects::launch_kernel(function, &shape, stream, params, extra)
        }};
    launch_kernel_ex = "cuLaunchKernelEx"
        (config: *const LaunchConfig, function: Handle, params: *mut *mut c_void, extra: *mut *mut c_void)
        => objects::launch_kernel_ex;
    module_load_data = "cuModuleLoadData" (module: *mut Handle, image: *const c_void) => objects::load_module;
    module_unload = "cuModuleUnload" (module: Handle) => objects::unload_module;
    module_get_function = "cuModuleGetFunction"
        (function: *mut Handle, module: Handle, name: *const c_char) => objects::get_function;
    func_load = "cuFuncLoad" (function: Handle) => objects::load_function;
    event_create = "cuEventCreate" (event: *mut Handle, flags: u32) => objects::event_create;
    event_record = "cuEventRecord" (event: Handle, stream: Handle) => objects::event_record;
    event_query = "cuEventQuery" (event: Handle) => objects::event_query;
    event_destroy = "cuEventDestroy_v2" (event: Handle) => objects::event_destroy;
    memcpy_to_device_async = "cuMemcpyHtoDAsync_v2"
        (dst: u64, src: *const c_void, len: usize, stream: Handle) => stream::copy_to_device;
    memcpy_to_host_async = "cuMemcpyDtoHAsync_v2"
        (dst: *mut c_void, src: u64, len: usize, stream: Handle) => stream::copy_to_host;
    memcpy_async = "cuMemcpyAsync" (dst: u64, src: u64, len: usize, stream: Handle) => stream::copy_any;
    memcpy_peer_async = "cuMemcpyPeerAsync"
        (dst: u64, dst_context: Handle, src: u64, src_context: Handle, len: usize, stream: Handle)
        { stream::copy_peer((dst, dst_context), (src, src_context), len, stream) };
    memset_d32_async = "cuMemsetD32Async"
        (dst: u64, value: u32, count: usize, stream: Handle) => stream::fill;
    stream_begin_capture = "cuStreamBeginCapture_v2" (stream: Handle, mode: u32) => stream::begin_capture;
    stream_end_capture = "cuStreamEndCapture" (stream: Handle, graph: *mut Handle) => stream::end_capture;
    stream_get_capture_info = "cuStreamGetCaptureInfo_v2"
        (stream: Handle, status: *mut u32, id: *mut u64, graph: *mut Handle, dependencies: *mut *const Handle,
         count: *mut usize)
        => stream::capture_info;
    graph_instantiate = "cuGraphInstantiateWithFlags"
        (exec: *mut Handle, graph: Handle, flags: u64) => objects::instantiate;
    graph_launch = "cuGraphLaunch" (exec: Handle, stream: Handle) => objects::launch_graph;
    graph_destroy = "cuGraphDestroy" (graph: Handle) => objects::destroy_graph;
    graph_exec_destroy = "cuGraphExecDestroy" (exec: Handle) => objects::destroy_exec;
    graph_node_get_dependencies = "cuGraphNodeGetDependencies_v2"
        (node: Handle, nodes: *mut Handle, edges: *mut EdgeData, count: *mut usize)
        { objects::neighbour(node, false, nodes, edges, count) };
    graph_node_get_dependent_nodes = "cuGraphNodeGetDependentNodes_v2"
        (node: Handle, nodes: *mut Handle, edges: *mut EdgeData, count: *mut usize)
        { objects::neighbour(node, true, nodes, edges, count) };
    graph_add_dependencies = "cuGraphAddDependencies_v2"
        (graph: Handle, from: *const Handle, to: *const Handle, _edges: *const EdgeData, count: usize)
        { objects::add_dependencies(graph, from, to, count) };
    graph_destroy_node = "cuGraphDestroyNode" (node: Handle) => objects::destroy_node;
    graph_exec_mem_op_node_set_params = "cuGraphExecBatchMemOpNodeSetParams"
        (exec: Handle, node: Handle, params: *const MemOpNodeParams) => objects::set_mem_ops;
    graph_exec_kernel_node_set_params = "cuGraphExecKernelNodeSetParams_v2"
        (exec: Handle, node: Handle, params: *const KernelNodeParams) => objects::set_kernel;
}
