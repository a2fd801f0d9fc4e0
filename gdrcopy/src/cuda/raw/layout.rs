//! Structures and constants of `cuda.h` (CUDA 12.8), as the entry points take them.

use std::ffi::c_void;

/// `CUcontext`, `CUstream`: addresses inside the driver, 0 for none. Only the driver looks behind them.
pub type Handle = usize;

/// `CU_POINTER_ATTRIBUTE_*`.
pub mod pointer_attribute {
    /// `CU_POINTER_ATTRIBUTE_CONTEXT`.
    pub const CONTEXT: u32 = 1;
    /// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`.
    pub const MEMORY_TYPE: u32 = 2;
    /// `CU_POINTER_ATTRIBUTE_DEVICE_POINTER`.
    pub const DEVICE_POINTER: u32 = 3;
    /// `CU_POINTER_ATTRIBUTE_HOST_POINTER`.
    pub const HOST_POINTER: u32 = 4;
    /// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`.
    pub const SYNC_MEMOPS: u32 = 6;
    /// `CU_POINTER_ATTRIBUTE_BUFFER_ID`.
    pub const BUFFER_ID: u32 = 7;
    /// `CU_POINTER_ATTRIBUTE_IS_MANAGED`.
    pub const IS_MANAGED: u32 = 8;
    /// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
    pub const DEVICE_ORDINAL: u32 = 9;
    /// `CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE`.
    pub const IS_LEGACY_CUDA_IPC_CAPABLE: u32 = 10;
    /// `CU_POINTER_ATTRIBUTE_RANGE_START_ADDR`.
    pub const RANGE_START_ADDR: u32 = 11;
    /// `CU_POINTER_ATTRIBUTE_RANGE_SIZE`.
    pub const RANGE_SIZE: u32 = 12;
    /// `CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES`.
    pub const ALLOWED_HANDLE_TYPES: u32 = 14;
    /// `CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE`.
    pub const MEMPOOL_HANDLE: u32 = 17;
    /// `CU_POINTER_ATTRIBUTE_MAPPING_SIZE`.
    pub const MAPPING_SIZE: u32 = 18;
    /// `CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR`.
    pub const MAPPING_BASE_ADDR: u32 = 19;
}

/// `CU_MEMORYTYPE_HOST`.
pub const MEMORY_TYPE_HOST: u32 = 1;
/// `CU_MEMORYTYPE_DEVICE`.
pub const MEMORY_TYPE_DEVICE: u32 = 2;

/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`.
pub const RDMA_WITH_VMM_SUPPORTED: u32 = 110;

/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`.
pub const RDMA_WRITES_ORDERING: u32 = 118;
/// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER`: from here on the GPU itself sees writes without a flush.
pub const ORDERING_OWNER: i32 = 100;

/// `CU_STREAM_NON_BLOCKING`: no order with the legacy stream.
pub const STREAM_NON_BLOCKING: u32 = 1;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
pub const CAPTURE_RELAXED: u32 = 2;

/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for all contexts.
pub const HOST_ALLOC_PORTABLE: u32 = 1;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub const ALLOCATION_PINNED: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub const HANDLE_TYPE_FD: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub const LOCATION_DEVICE: u32 = 1;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`.
pub const GRANULARITY_MINIMUM: u32 = 0;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub const ACCESS_READ_WRITE: u32 = 3;

/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
pub const RANGE_HANDLE_DMA_BUF: u32 = 1;
/// `CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE`.
pub const RANGE_FLAG_PCIE: u64 = 1;

/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX`.
pub const FLUSH_CURRENT_CONTEXT: u32 = 0;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER`.
pub const FLUSH_TO_OWNER: u32 = 100;

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
    pub const WAIT_32: u32 = 1;
    /// `CU_STREAM_MEM_OP_WRITE_VALUE_32`.
    pub const WRITE_32: u32 = 2;
    /// `CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES`.
    pub const FLUSH: u32 = 3;
    /// `CU_STREAM_MEM_OP_WAIT_VALUE_64`.
    pub const WAIT_64: u32 = 4;
    /// `CU_STREAM_MEM_OP_WRITE_VALUE_64`.
    pub const WRITE_64: u32 = 5;
    /// `CU_STREAM_MEM_OP_BARRIER`.
    pub const BARRIER: u32 = 6;
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

#[cfg(test)]
mod tests {
    use std::mem::{align_of, offset_of, size_of};

    use cudarc::driver::sys;

    use super::*;

    #[test]
    fn structures_are_laid_out_as_in_cuda_h() {
        assert_eq!(size_of::<MemLocation>(), size_of::<sys::CUmemLocation>());
        assert_eq!(offset_of!(MemLocation, kind), offset_of!(sys::CUmemLocation, type_));
        assert_eq!(offset_of!(MemLocation, id), offset_of!(sys::CUmemLocation, id));

        assert_eq!(size_of::<AccessDesc>(), size_of::<sys::CUmemAccessDesc>());
        assert_eq!(offset_of!(AccessDesc, location), offset_of!(sys::CUmemAccessDesc, location));
        assert_eq!(offset_of!(AccessDesc, flags), offset_of!(sys::CUmemAccessDesc, flags));

        use sys::CUmemAllocationProp as Prop;
        type Flags = sys::CUmemAllocationProp_st__bindgen_ty_1;
        assert_eq!(size_of::<AllocationProp>(), size_of::<Prop>());
        assert_eq!(align_of::<AllocationProp>(), align_of::<Prop>());
        assert_eq!(offset_of!(AllocationProp, kind), offset_of!(Prop, type_));
        assert_eq!(offset_of!(AllocationProp, handle_types), offset_of!(Prop, requestedHandleTypes));
        assert_eq!(offset_of!(AllocationProp, location), offset_of!(Prop, location));
        assert_eq!(offset_of!(AllocationProp, win32_meta_data), offset_of!(Prop, win32HandleMetaData));
        let flags = offset_of!(Prop, allocFlags);
        assert_eq!(offset_of!(AllocationProp, compression), flags + offset_of!(Flags, compressionType));
        assert_eq!(
            offset_of!(AllocationProp, gpu_direct_rdma),
            flags + offset_of!(Flags, gpuDirectRDMACapable)
        );
        assert_eq!(offset_of!(AllocationProp, usage), flags + offset_of!(Flags, usage));
        assert_eq!(offset_of!(AllocationProp, reserved), flags + offset_of!(Flags, reserved));

        assert_eq!(size_of::<Handle>(), size_of::<sys::CUcontext>());
        assert_eq!(size_of::<sys::CUipcMemHandle>(), 64);
    }

    #[test]
    fn constants_are_those_of_cuda_h() {
        use sys::CUdevice_attribute as Device;
        use sys::CUpointer_attribute as Pointer;

        for (ours, theirs) in [
            (pointer_attribute::CONTEXT, Pointer::CU_POINTER_ATTRIBUTE_CONTEXT),
            (pointer_attribute::MEMORY_TYPE, Pointer::CU_POINTER_ATTRIBUTE_MEMORY_TYPE),
            (pointer_attribute::DEVICE_POINTER, Pointer::CU_POINTER_ATTRIBUTE_DEVICE_POINTER),
            (pointer_attribute::HOST_POINTER, Pointer::CU_POINTER_ATTRIBUTE_HOST_POINTER),
            (pointer_attribute::SYNC_MEMOPS, Pointer::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS),
            (pointer_attribute::BUFFER_ID, Pointer::CU_POINTER_ATTRIBUTE_BUFFER_ID),
            (pointer_attribute::IS_MANAGED, Pointer::CU_POINTER_ATTRIBUTE_IS_MANAGED),
            (pointer_attribute::DEVICE_ORDINAL, Pointer::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL),
            (
                pointer_attribute::IS_LEGACY_CUDA_IPC_CAPABLE,
                Pointer::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
            ),
            (pointer_attribute::RANGE_START_ADDR, Pointer::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR),
            (pointer_attribute::RANGE_SIZE, Pointer::CU_POINTER_ATTRIBUTE_RANGE_SIZE),
            (pointer_attribute::ALLOWED_HANDLE_TYPES, Pointer::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES),
            (pointer_attribute::MEMPOOL_HANDLE, Pointer::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE),
            (pointer_attribute::MAPPING_SIZE, Pointer::CU_POINTER_ATTRIBUTE_MAPPING_SIZE),
            (pointer_attribute::MAPPING_BASE_ADDR, Pointer::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR),
        ] {
            assert_eq!(ours, theirs as u32, "{theirs:?}");
        }
        for (ours, theirs) in [
            (
                RDMA_WITH_VMM_SUPPORTED,
                Device::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED as u32,
            ),
            (RDMA_WRITES_ORDERING, Device::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING as u32),
            (
                ORDERING_OWNER.unsigned_abs(),
                sys::CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER as u32,
            ),
            (MEMORY_TYPE_HOST, sys::CUmemorytype::CU_MEMORYTYPE_HOST as u32),
            (MEMORY_TYPE_DEVICE, sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32),
            (STREAM_NON_BLOCKING, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32),
            (CAPTURE_RELAXED, sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32),
            (HOST_ALLOC_PORTABLE, sys::CU_MEMHOSTALLOC_PORTABLE),
            (ALLOCATION_PINNED, sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED as u32),
            (LOCATION_DEVICE, sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32),
            (
                GRANULARITY_MINIMUM,
                sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM as u32,
            ),
            (ACCESS_READ_WRITE, sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as u32),
            (RANGE_HANDLE_DMA_BUF, sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD as u32),
            (
                FLUSH_CURRENT_CONTEXT,
                sys::CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
                    as u32,
            ),
            (
                FLUSH_TO_OWNER,
                sys::CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER as u32,
            ),
        ] {
            assert_eq!(ours, theirs);
        }
    }

    #[test]
    fn stream_structures_are_laid_out_as_in_cuda_h() {
        type Theirs = sys::CUstreamBatchMemOpParams_union;
        type Wait = sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWaitValueParams_st;
        type Write = sys::CUstreamBatchMemOpParams_union_CUstreamMemOpWriteValueParams_st;
        type Barrier = sys::CUstreamBatchMemOpParams_union_CUstreamMemOpMemoryBarrierParams_st;
        assert_eq!((size_of::<MemOp>(), align_of::<MemOp>()), (size_of::<Theirs>(), align_of::<Theirs>()));
        for (ours, wait, write) in [
            (offset_of!(MemOp, operation), offset_of!(Wait, operation), offset_of!(Write, operation)),
            (offset_of!(MemOp, address), offset_of!(Wait, address), offset_of!(Write, address)),
            (
                offset_of!(MemOp, value),
                offset_of!(Wait, __bindgen_anon_1),
                offset_of!(Write, __bindgen_anon_1),
            ),
            (offset_of!(MemOp, flags), offset_of!(Wait, flags), offset_of!(Write, flags)),
            (offset_of!(MemOp, alias), offset_of!(Wait, alias), offset_of!(Write, alias)),
        ] {
            assert_eq!((ours, ours), (wait, write));
        }
        assert_eq!(offset_of!(MemOp, barrier), offset_of!(Barrier, flags));
        use sys::CUstreamBatchMemOpType_enum as Op;
        let theirs = [
            Op::CU_STREAM_MEM_OP_WAIT_VALUE_32,
            Op::CU_STREAM_MEM_OP_WRITE_VALUE_32,
            Op::CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES,
            Op::CU_STREAM_MEM_OP_WAIT_VALUE_64,
            Op::CU_STREAM_MEM_OP_WRITE_VALUE_64,
            Op::CU_STREAM_MEM_OP_BARRIER,
        ];
        let ours =
            [MemOp::WAIT_32, MemOp::WRITE_32, MemOp::FLUSH, MemOp::WAIT_64, MemOp::WRITE_64, MemOp::BARRIER];
        assert_eq!(ours, theirs.map(|op| op as u32));

        type Node = sys::CUDA_BATCH_MEM_OP_NODE_PARAMS;
        assert_eq!(size_of::<MemOpNodeParams>(), size_of::<Node>());
        assert_eq!(offset_of!(MemOpNodeParams, count), offset_of!(Node, count));
        assert_eq!(offset_of!(MemOpNodeParams, ops), offset_of!(Node, paramArray));
        assert_eq!(offset_of!(MemOpNodeParams, flags), offset_of!(Node, flags));

        type Kernel = sys::CUDA_KERNEL_NODE_PARAMS_v2;
        assert_eq!(size_of::<KernelNodeParams>(), size_of::<Kernel>());
        assert_eq!(offset_of!(KernelNodeParams, grid), offset_of!(Kernel, gridDimX));
        assert_eq!(offset_of!(KernelNodeParams, block), offset_of!(Kernel, blockDimX));
        assert_eq!(offset_of!(KernelNodeParams, shared), offset_of!(Kernel, sharedMemBytes));
        assert_eq!(offset_of!(KernelNodeParams, params), offset_of!(Kernel, kernelParams));
        assert_eq!(offset_of!(KernelNodeParams, extra), offset_of!(Kernel, extra));
        assert_eq!(offset_of!(KernelNodeParams, kernel), offset_of!(Kernel, kern));
        assert_eq!(offset_of!(KernelNodeParams, context), offset_of!(Kernel, ctx));
    }
}
