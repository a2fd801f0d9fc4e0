//! Structures and constants of `cuda.h` (CUDA 12.8), as the entry points take them.

use std::ffi::c_void;

use cudarc::driver::sys::CUdevice_attribute_enum::*;
use cudarc::driver::sys::*;

/// `CUcontext`, `CUstream`: addresses inside the driver, 0 for none. Only the driver looks behind them.
pub type Handle = usize;

/// Declares constants with the values of `cuda.h`.
macro_rules! constants {
    ($($(#[$meta:meta])* $name:ident: $ty:ty = $theirs:path;)*) => {$(
        #[doc = concat!("`", stringify!($theirs), "`")]
        ///
        $(#[$meta])*
        pub const $name: $ty = $theirs as $ty;
    )*};
}

/// `CU_POINTER_ATTRIBUTE_*`.
pub mod pointer_attribute {
    use cudarc::driver::sys::CUpointer_attribute_enum::*;

    constants! {
        CONTEXT: u32 = CU_POINTER_ATTRIBUTE_CONTEXT;
        MEMORY_TYPE: u32 = CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        DEVICE_POINTER: u32 = CU_POINTER_ATTRIBUTE_DEVICE_POINTER;
        HOST_POINTER: u32 = CU_POINTER_ATTRIBUTE_HOST_POINTER;
        SYNC_MEMOPS: u32 = CU_POINTER_ATTRIBUTE_SYNC_MEMOPS;
        BUFFER_ID: u32 = CU_POINTER_ATTRIBUTE_BUFFER_ID;
        IS_MANAGED: u32 = CU_POINTER_ATTRIBUTE_IS_MANAGED;
        DEVICE_ORDINAL: u32 = CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        IS_LEGACY_CUDA_IPC_CAPABLE: u32 = CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
        RANGE_START_ADDR: u32 = CU_POINTER_ATTRIBUTE_RANGE_START_ADDR;
        RANGE_SIZE: u32 = CU_POINTER_ATTRIBUTE_RANGE_SIZE;
        MEMPOOL_HANDLE: u32 = CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE;
        MAPPING_SIZE: u32 = CU_POINTER_ATTRIBUTE_MAPPING_SIZE;
        MAPPING_BASE_ADDR: u32 = CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR;
    }
}

constants! {
    RDMA_WITH_VMM_SUPPORTED: u32 = CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
    RDMA_WRITES_ORDERING: u32 = CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING;
    /// From here on the GPU itself sees writes without a flush.
    ORDERING_OWNER: i32 = CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER;
    MEMORY_TYPE_HOST: u32 = CUmemorytype::CU_MEMORYTYPE_HOST;
    MEMORY_TYPE_DEVICE: u32 = CUmemorytype::CU_MEMORYTYPE_DEVICE;
    /// No order with the legacy stream.
    STREAM_NON_BLOCKING: u32 = CUstream_flags::CU_STREAM_NON_BLOCKING;
    CAPTURE_RELAXED: u32 = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    /// Pinned for all contexts.
    HOST_ALLOC_PORTABLE: u32 = CU_MEMHOSTALLOC_PORTABLE;
    ALLOCATION_PINNED: u32 = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    LOCATION_DEVICE: u32 = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    GRANULARITY_MINIMUM: u32 = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    ACCESS_READ_WRITE: u32 = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    RANGE_HANDLE_DMA_BUF: u32 = CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
    FLUSH_CURRENT_CONTEXT: u32 = CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
    FLUSH_TO_OWNER: u32 = CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER;
    RANGE_FLAG_PCIE: u64 = CUmemRangeFlags_enum::CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE;
}

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub const HANDLE_TYPE_FD: u32 = 1;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MemLocation {
    /// `CU_MEM_LOCATION_TYPE_*`.
    pub kind: u32,
    /// The device.
    pub id: i32,
}

/// `CUmemAllocationProp`, with its `allocFlags` at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AllocationProp {
    /// `CU_MEM_ALLOCATION_TYPE_*`.
    pub kind: u32,
    /// `CU_MEM_HANDLE_TYPE_*` bits.
    pub handle_types: u32,
    /// Where the memory is.
    pub location: MemLocation,
    /// 0 on Linux.
    pub win32_meta_data: usize,
    /// `CU_MEM_ALLOCATION_COMP_*`.
    pub compression: u8,
    /// 1: GPUDirect RDMA reaches the memory.
    pub gpu_direct_rdma: u8,
    /// `CU_MEM_CREATE_USAGE_*` bits.
    pub usage: u16,
    /// 0.
    pub reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AccessDesc {
    /// Whose access it is.
    pub location: MemLocation,
    /// `CU_MEM_ACCESS_FLAGS_*`.
    pub flags: u32,
}

/// `CUstreamBatchMemOpParams`: one stream memory operation. Build them with the functions.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemOp {
    /// `CU_STREAM_MEM_OP_*`.
    pub operation: u32,
    /// Of a barrier: its flags.
    pub barrier: u32,
    /// The GPU's address of the word.
    pub address: u64,
    /// What is written or compared; 32-bit operations use the low half.
    pub value: u64,
    /// `CU_STREAM_WAIT_VALUE_*`, `CU_STREAM_WRITE_VALUE_*`.
    pub flags: u32,
    /// Not used.
    pub pad: u32,
    /// Not used: the address on the bus that the driver once cached.
    pub alias: u64,
    /// Not used.
    pub end: u64,
}

impl MemOp {
    /// `CU_STREAM_MEM_OP_WAIT_VALUE_32`.
    pub const WAIT_32: u32 = CUstreamBatchMemOpType_enum::CU_STREAM_MEM_OP_WAIT_VALUE_32 as u32;
    /// `CU_STREAM_MEM_OP_WRITE_VALUE_32`.
    pub const WRITE_32: u32 = CUstreamBatchMemOpType_enum::CU_STREAM_MEM_OP_WRITE_VALUE_32 as u32;
    /// `CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES`.
    pub const FLUSH: u32 = CUstreamBatchMemOpType_enum::CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES as u32;
    /// `CU_STREAM_MEM_OP_WAIT_VALUE_64`.
    pub const WAIT_64: u32 = CUstreamBatchMemOpType_enum::CU_STREAM_MEM_OP_WAIT_VALUE_64 as u32;
    /// `CU_STREAM_MEM_OP_WRITE_VALUE_64`.
    pub const WRITE_64: u32 = CUstreamBatchMemOpType_enum::CU_STREAM_MEM_OP_WRITE_VALUE_64 as u32;
    /// `CU_STREAM_MEM_OP_BARRIER`.
    pub const BARRIER: u32 = CUstreamBatchMemOpType_enum::CU_STREAM_MEM_OP_BARRIER as u32;
    /// `CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER`.
    pub const NO_BARRIER: u32 = 1;

    /// A write or a wait.
    pub fn word(operation: u32, address: u64, value: u64, flags: u32) -> Self {
        Self { operation, address, value, flags, ..Self::default() }
    }

    /// A barrier for the whole system (`CU_STREAM_MEMORY_BARRIER_TYPE_SYS`).
    pub fn barrier() -> Self {
        Self { operation: Self::BARRIER, ..Self::default() }
    }
}

/// `CUDA_BATCH_MEM_OP_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MemOpNodeParams {
    /// The context that the operations run in.
    pub context: Handle,
    /// How many there are.
    pub count: u32,
    /// They.
    pub ops: *mut MemOp,
    /// 0.
    pub flags: u32,
}

/// `CUDA_KERNEL_NODE_PARAMS_v2`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct KernelNodeParams {
    /// The kernel.
    pub function: Handle,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory, bytes.
    pub shared: u32,
    /// Addresses of the parameters.
    pub params: *mut *mut c_void,
    /// Null, with `params`.
    pub extra: *mut *mut c_void,
    /// `CUkernel`: 0 for a function of a module.
    pub kernel: Handle,
    /// The context; 0 for the current one.
    pub context: Handle,
}

/// `CUgraphEdgeData`: the kind of a dependency. Zeros: the next node waits for the end of this one.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EdgeData(pub [u8; 8]);

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LaunchConfig {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory, bytes.
    pub shared: u32,
    /// The stream.
    pub stream: Handle,
    /// Attributes.
    pub attributes: *const LaunchAttribute,
    /// How many there are.
    pub count: u32,
}

/// `CUlaunchAttribute`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LaunchAttribute {
    id: u32,
    pad: u32,
    value: [u64; 8],
}

impl LaunchAttribute {
    /// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`: the kernel may start before the one ahead of it has ended, as soon as
    /// all blocks of that one allow it.
    pub const PROGRAMMATIC: Self = Self { id: 6, pad: 0, value: [1, 0, 0, 0, 0, 0, 0, 0] };
}

#[cfg(test)]
mod tests {
    use std::mem::{align_of, offset_of, size_of};

    use cudarc::driver::sys;

    use super::*;

    /// Compares sizes, alignments and offsets of fields; a path of `cuda.h` may lead into a structure inside.
    macro_rules! same {
        ($($ours:ty as $theirs:ty { $($field:ident = $($path:ident).+),* $(,)? })*) => {$(
            assert_eq!(
                (size_of::<$ours>(), align_of::<$ours>()),
                (size_of::<$theirs>(), align_of::<$theirs>()),
                stringify!($ours)
            );
            $(assert_eq!(
                offset_of!($ours, $field),
                offset_of!($theirs, $($path).+),
                "{}.{}", stringify!($ours), stringify!($field)
            );)*
        )*};
    }

    #[test]
    fn structures_are_laid_out_as_in_cuda_h() {
        same! {
            MemLocation as sys::CUmemLocation { kind = type_, id = id }
            AccessDesc as sys::CUmemAccessDesc { location = location, flags = flags }
            AllocationProp as sys::CUmemAllocationProp {
                kind = type_, handle_types = requestedHandleTypes, location = location,
                win32_meta_data = win32HandleMetaData, compression = allocFlags.compressionType,
                gpu_direct_rdma = allocFlags.gpuDirectRDMACapable, usage = allocFlags.usage,
                reserved = allocFlags.reserved,
            }
            MemOp as sys::CUstreamBatchMemOpParams_union {}
            MemOpNodeParams as sys::CUDA_BATCH_MEM_OP_NODE_PARAMS {
                count = count, ops = paramArray, flags = flags,
            }
            KernelNodeParams as sys::CUDA_KERNEL_NODE_PARAMS_v2 {
                grid = gridDimX, block = blockDimX, shared = sharedMemBytes, params = kernelParams,
                extra = extra, kernel = kern, context = ctx,
            }
            LaunchConfig as sys::CUlaunchConfig {
                grid = gridDimX, block = blockDimX, shared = sharedMemBytes, stream = hStream, attributes = attrs,
                count = numAttrs,
            }
            EdgeData as sys::CUgraphEdgeData {}
            LaunchAttribute as sys::CUlaunchAttribute { id = id, value = value }
            Handle as sys::CUcontext {}
            [u8; 64] as [u8; size_of::<sys::CUipcMemHandle>()] {}
        }
        type Wait = sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st;
        type Write = sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st;
        type Barrier = sys::CUstreamBatchMemOpParams_union_CUstreamMemOpMemoryBarrierParams_st;
        macro_rules! fields {
            ($theirs:ty: $($field:ident = $path:ident),*) => {
                $(assert_eq!(offset_of!(MemOp, $field), offset_of!($theirs, $path), stringify!($field));)*
            };
        }
        fields!(Wait: operation = operation, address = address, value = __bindgen_anon_1, flags = flags, alias = alias);
        fields!(Write: operation = operation, address = address, value = __bindgen_anon_1, flags = flags, alias = alias);
        fields!(Barrier: operation = operation, barrier = flags);
    }
}
