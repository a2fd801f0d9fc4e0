//! Structures and constants of `cuda.h` (CUDA 12.8), as the entry points take them.

/// `CUcontext`, `CUstream`: addresses inside the driver, 0 for none. Only the driver looks behind them.
pub(super) type Handle = usize;

/// `CU_POINTER_ATTRIBUTE_*`.
pub(super) mod pointer_attribute {
    pub(crate) const CONTEXT: u32 = 1;
    pub(crate) const MEMORY_TYPE: u32 = 2;
    pub(crate) const SYNC_MEMOPS: u32 = 6;
    pub(crate) const BUFFER_ID: u32 = 7;
    pub(crate) const IS_MANAGED: u32 = 8;
    pub(crate) const DEVICE_ORDINAL: u32 = 9;
    pub(crate) const IS_LEGACY_CUDA_IPC_CAPABLE: u32 = 10;
    pub(crate) const RANGE_START_ADDR: u32 = 11;
    pub(crate) const RANGE_SIZE: u32 = 12;
    pub(crate) const ALLOWED_HANDLE_TYPES: u32 = 14;
    pub(crate) const MEMPOOL_HANDLE: u32 = 17;
    pub(crate) const MAPPING_SIZE: u32 = 18;
    pub(crate) const MAPPING_BASE_ADDR: u32 = 19;
}

/// `CU_MEMORYTYPE_HOST`.
pub(super) const MEMORY_TYPE_HOST: u32 = 1;
/// `CU_MEMORYTYPE_DEVICE`.
pub(super) const MEMORY_TYPE_DEVICE: u32 = 2;

/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`.
pub(super) const RDMA_WITH_VMM_SUPPORTED: u32 = 110;

/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`.
pub(super) const RDMA_WRITES_ORDERING: u32 = 118;
/// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER`: from here on the GPU itself sees writes without a flush.
pub(super) const ORDERING_OWNER: i32 = 100;

/// `CU_STREAM_NON_BLOCKING`: no order with the legacy stream.
pub(super) const STREAM_NON_BLOCKING: u32 = 1;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
pub(super) const CAPTURE_RELAXED: u32 = 2;

/// `CU_MEMHOSTALLOC_PORTABLE`: pinned for all contexts.
pub(super) const HOST_ALLOC_PORTABLE: u32 = 1;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub(super) const ALLOCATION_PINNED: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(super) const HANDLE_TYPE_FD: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(super) const LOCATION_DEVICE: u32 = 1;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`.
pub(super) const GRANULARITY_MINIMUM: u32 = 0;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub(super) const ACCESS_READ_WRITE: u32 = 3;

/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
pub(super) const RANGE_HANDLE_DMA_BUF: u32 = 1;
/// `CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE`.
pub(super) const RANGE_FLAG_PCIE: u64 = 1;

/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX`.
pub(super) const FLUSH_CURRENT_CONTEXT: u32 = 0;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER`.
pub(super) const FLUSH_TO_OWNER: u32 = 100;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct MemLocation {
    pub(super) kind: u32,
    pub(super) id: i32,
}

/// `CUmemAllocationProp`, with its `allocFlags` at the end.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct AllocationProp {
    pub(super) kind: u32,
    pub(super) handle_types: u32,
    pub(super) location: MemLocation,
    pub(super) win32_meta_data: usize,
    pub(super) compression: u8,
    pub(super) gpu_direct_rdma: u8,
    pub(super) usage: u16,
    pub(super) reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct AccessDesc {
    pub(super) location: MemLocation,
    pub(super) flags: u32,
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
}
