//! The table of entry points.

use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::Api;
use gdrcopy::cuda::raw::layout::{
    AccessDesc, AllocationProp, Handle, KernelNodeParams, MemOp, MemOpNodeParams,
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

/// Makes entry points of the lines, each with its name in the manual, and the table of them.
macro_rules! table {
    ($($field:ident = $name:literal ($($arg:ident: $ty:ty),*) $body:expr;)*) => {
        /// The names of all entry points that there are.
        pub(super) const NAMES: &[&str] = &[$($name),*];

        /// The simulated driver's entry points. Those that are missing are `None`.
        #[expect(improper_ctypes_definitions, reason = "the table passes an IPC handle as an array")]
        pub fn api() -> Api {
            Api {
                $($field: {
                    extern "C" fn entry($($arg: $ty),*) -> u32 {
                        call($name, || $body)
                    }
                    Some(entry)
                },)*
                ..Api::default()
            }
        }
    };
}

table! {
    init = "cuInit" (flags: u32) context::init(flags);
    driver_get_version = "cuDriverGetVersion" (version: *mut i32) put(version, SETTINGS.lock().version);
    device_get_count = "cuDeviceGetCount" (count: *mut i32) put(count, DEVICES);
    device_get = "cuDeviceGet" (device: *mut i32, ordinal: i32) context::get_device(device, ordinal);
    device_get_name = "cuDeviceGetName" (name: *mut c_char, len: i32, device: i32)
        context::name(name, len, device);
    device_get_pci_bus_id = "cuDeviceGetPCIBusId" (id: *mut c_char, len: i32, device: i32)
        context::pci_bus_id(id, len, device);
    device_get_attribute = "cuDeviceGetAttribute" (value: *mut i32, attribute: u32, device: i32)
        context::attribute(value, attribute, device);
    primary_ctx_retain = "cuDevicePrimaryCtxRetain" (context: *mut Handle, device: i32)
        context::primary_retain(context, device);
    primary_ctx_release = "cuDevicePrimaryCtxRelease" (device: i32) context::primary_release(device);
    primary_ctx_get_state = "cuDevicePrimaryCtxGetState" (device: i32, flags: *mut u32, active: *mut i32)
        context::primary_state(device, flags, active);
    ctx_push_current = "cuCtxPushCurrent" (context: Handle) context::push(context);
    ctx_pop_current = "cuCtxPopCurrent" (context: *mut Handle) context::pop(context);
    ctx_get_current = "cuCtxGetCurrent" (context: *mut Handle) context::get_current(context);
    ctx_get_device = "cuCtxGetDevice" (device: *mut i32) context::current_device(device);
    ctx_get_stream_priority_range = "cuCtxGetStreamPriorityRange" (least: *mut i32, greatest: *mut i32)
        context::priorities(least, greatest);
    ctx_enable_peer_access = "cuCtxEnablePeerAccess" (peer: Handle, flags: u32)
        context::enable_peer_access(peer, flags);
    device_can_access_peer = "cuDeviceCanAccessPeer" (can: *mut i32, device: i32, peer: i32)
        context::can_access_peer(can, device, peer);
    flush_gpu_direct_rdma_writes = "cuFlushGPUDirectRDMAWrites" (target: u32, scope: u32)
        context::flush_writes(target, scope);
    thread_exchange_stream_capture_mode = "cuThreadExchangeStreamCaptureMode" (mode: *mut u32)
        context::exchange_mode(mode);
    pointer_get_attribute = "cuPointerGetAttribute" (data: *mut c_void, attribute: u32, addr: u64)
        memory::attribute(data, attribute, addr);
    pointer_get_attributes = "cuPointerGetAttributes"
        (count: u32, attributes: *const u32, data: *const *mut c_void, addr: u64)
        memory::attributes(count, attributes, data, addr);
    pointer_set_attribute = "cuPointerSetAttribute" (value: *const c_void, attribute: u32, addr: u64)
        memory::set_attribute(value, attribute, addr);
    ipc_get_mem_handle = "cuIpcGetMemHandle" (handle: *mut [u8; 64], addr: u64)
        memory::ipc_handle(handle, addr);
    ipc_open_mem_handle = "cuIpcOpenMemHandle" (addr: *mut u64, handle: [u8; 64], flags: u32)
        memory::open_ipc(addr, handle, flags);
    ipc_close_mem_handle = "cuIpcCloseMemHandle" (addr: u64) memory::close_ipc(addr);
    mem_alloc = "cuMemAlloc" (addr: *mut u64, len: usize) memory::alloc(addr, len);
    mem_free = "cuMemFree" (addr: u64) memory::free(addr);
    mem_get_info = "cuMemGetInfo" (free: *mut usize, total: *mut usize) memory::info(free, total);
    mem_get_handle_for_address_range = "cuMemGetHandleForAddressRange"
        (handle: *mut c_void, addr: u64, len: usize, kind: u32, _flags: u64)
        memory::dma_buf(handle, addr, len, kind);
    mem_host_alloc = "cuMemHostAlloc" (addr: *mut *mut c_void, len: usize, flags: u32)
        memory::host_alloc(addr, len, flags);
    mem_free_host = "cuMemFreeHost" (addr: *mut c_void) memory::free_host(addr);
    mem_host_register = "cuMemHostRegister" (addr: *mut c_void, len: usize, flags: u32)
        memory::register(addr, len, flags);
    mem_host_unregister = "cuMemHostUnregister" (addr: *mut c_void) memory::unregister(addr);
    mem_host_get_device_pointer = "cuMemHostGetDevicePointer" (addr: *mut u64, host: *mut c_void, flags: u32)
        memory::host_device_pointer(addr, host, flags);
    mem_get_allocation_granularity = "cuMemGetAllocationGranularity"
        (granularity: *mut usize, _prop: *const AllocationProp, _option: u32)
        memory::granularity(granularity);
    mem_create = "cuMemCreate" (memory: *mut u64, len: usize, prop: *const AllocationProp, _flags: u64)
        memory::create(memory, len, prop);
    mem_release = "cuMemRelease" (memory: u64) memory::release(memory);
    mem_address_reserve = "cuMemAddressReserve"
        (addr: *mut u64, len: usize, align: usize, _hint: u64, _flags: u64) memory::reserve(addr, len, align);
    mem_address_free = "cuMemAddressFree" (addr: u64, len: usize) memory::unreserve(addr, len);
    mem_map = "cuMemMap" (addr: u64, len: usize, _offset: usize, memory: u64, _flags: u64)
        memory::map(addr, len, memory);
    mem_unmap = "cuMemUnmap" (addr: u64, len: usize) memory::unmap(addr, len);
    mem_set_access = "cuMemSetAccess" (addr: u64, len: usize, access: *const AccessDesc, count: usize)
        memory::set_access(addr, len, access, count);
    mem_retain_allocation_handle = "cuMemRetainAllocationHandle" (memory: *mut u64, addr: *mut c_void)
        memory::retain(memory, addr);
    mem_export_to_shareable_handle = "cuMemExportToShareableHandle"
        (place: *mut c_void, memory: u64, kind: u32, _flags: u64) memory::export(place, memory, kind);
    stream_create = "cuStreamCreateWithPriority" (stream: *mut Handle, flags: u32, priority: i32)
        stream::create(stream, flags, priority);
    stream_query = "cuStreamQuery" (stream: Handle) stream::query(stream);
    stream_synchronize = "cuStreamSynchronize" (stream: Handle) stream::synchronize(stream);
    stream_destroy = "cuStreamDestroy" (stream: Handle) stream::destroy(stream);
    stream_get_ctx = "cuStreamGetCtx" (stream: Handle, context: *mut Handle)
        stream::get_context(stream, context);
    stream_wait_event = "cuStreamWaitEvent" (stream: Handle, event: Handle, flags: u32)
        objects::event_wait(stream, event, flags);
    stream_batch_mem_op = "cuStreamBatchMemOp" (stream: Handle, count: u32, ops: *mut MemOp, flags: u32)
        stream::batch_mem_op(stream, count, ops, flags);
    launch_host_func = "cuLaunchHostFunc"
        (stream: Handle, function: extern "C" fn(*mut c_void), data: *mut c_void)
        stream::launch_host(stream, function, data);
    launch_kernel = "cuLaunchKernel"
        (function: Handle, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
         _shared: u32, stream: Handle, params: *mut *mut c_void, extra: *mut *mut c_void) {
            let shape = Shape { grid: [grid_x, grid_y, grid_z], block: [block_x, block_y, block_z] };
            objects::launch_kernel(function, &shape, stream, params, extra)
        };
    module_load_data = "cuModuleLoadData" (module: *mut Handle, image: *const c_void)
        objects::load_module(module, image);
    module_unload = "cuModuleUnload" (module: Handle) objects::unload_module(module);
    module_get_function = "cuModuleGetFunction" (function: *mut Handle, module: Handle, name: *const c_char)
        objects::get_function(function, module, name);
    func_load = "cuFuncLoad" (function: Handle) objects::load_function(function);
    event_create = "cuEventCreate" (event: *mut Handle, flags: u32) objects::event_create(event, flags);
    event_record = "cuEventRecord" (event: Handle, stream: Handle) objects::event_record(event, stream);
    event_query = "cuEventQuery" (event: Handle) objects::event_query(event);
    event_synchronize = "cuEventSynchronize" (event: Handle) objects::event_synchronize(event);
    event_destroy = "cuEventDestroy" (event: Handle) objects::event_destroy(event);
    memcpy_to_device_async = "cuMemcpyHtoDAsync" (dst: u64, src: *const c_void, len: usize, stream: Handle)
        stream::copy_to_device(dst, src, len, stream);
    memcpy_to_host_async = "cuMemcpyDtoHAsync" (dst: *mut c_void, src: u64, len: usize, stream: Handle)
        stream::copy_to_host(dst, src, len, stream);
    memcpy_async = "cuMemcpyAsync" (dst: u64, src: u64, len: usize, stream: Handle)
        stream::copy_any(dst, src, len, stream);
    memcpy_peer_async = "cuMemcpyPeerAsync"
        (dst: u64, dst_context: Handle, src: u64, src_context: Handle, len: usize, stream: Handle)
        stream::copy_peer((dst, dst_context), (src, src_context), len, stream);
    memset_d32_async = "cuMemsetD32Async" (dst: u64, value: u32, count: usize, stream: Handle)
        stream::fill(dst, value, count, stream);
    stream_begin_capture = "cuStreamBeginCapture" (stream: Handle, mode: u32) stream::begin_capture(stream, mode);
    stream_end_capture = "cuStreamEndCapture" (stream: Handle, graph: *mut Handle)
        stream::end_capture(stream, graph);
    stream_get_capture_info = "cuStreamGetCaptureInfo"
        (stream: Handle, status: *mut u32, id: *mut u64, graph: *mut Handle, dependencies: *mut *const Handle,
         count: *mut usize)
        stream::capture_info(stream, status, id, graph, dependencies, count);
    graph_instantiate = "cuGraphInstantiateWithFlags" (exec: *mut Handle, graph: Handle, flags: u64)
        objects::instantiate(exec, graph, flags);
    graph_launch = "cuGraphLaunch" (exec: Handle, stream: Handle) objects::launch_graph(exec, stream);
    graph_destroy = "cuGraphDestroy" (graph: Handle) objects::destroy_graph(graph);
    graph_exec_destroy = "cuGraphExecDestroy" (exec: Handle) objects::destroy_exec(exec);
    graph_exec_mem_op_node_set_params = "cuGraphExecBatchMemOpNodeSetParams"
        (exec: Handle, node: Handle, params: *const MemOpNodeParams)
        objects::set_mem_ops(exec, node, params);
    graph_exec_kernel_node_set_params = "cuGraphExecKernelNodeSetParams"
        (exec: Handle, node: Handle, params: *const KernelNodeParams)
        objects::set_kernel(exec, node, params);
}
