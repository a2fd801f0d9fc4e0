//! GPU memory of the library's own.

use std::ptr::from_ref;

use super::Driver;
use super::context::Gpu;
use crate::cuda::raw::layout::{
    ACCESS_READ_WRITE, ALLOCATION_PINNED, AccessDesc, AllocationProp, GRANULARITY_MINIMUM, HANDLE_TYPE_FD,
    LOCATION_DEVICE, MemLocation, RDMA_WITH_VMM_SUPPORTED, pointer_attribute,
};
use crate::cuda::{AllocKind, CudaStatus};
use crate::error::{Error, Result};

/// GPU pages are this large for pinning; bytes.
const ALIGN: usize = 64 << 10;

/// How an allocation is undone.
#[derive(Clone, Copy, Debug)]
pub(super) enum Allocation {
    /// `cuMemAlloc` gave this address, at or before the one handed out.
    Malloc { ordinal: i32, raw: u64 },
    /// `cuMemMap` of this many bytes, in a reservation of the same size.
    Vmm { ordinal: i32, len: usize },
}

impl Driver {
    pub(super) fn allocate(&self, gpu: &Gpu, len: usize, kind: AllocKind) -> Result<u64> {
        if len == 0 {
            return Err(Error::invalid("length", len, "at least one byte"));
        }
        let _current = self.enter_primary(gpu)?;
        let made = match kind {
            AllocKind::Malloc => self.malloc(gpu, len),
            AllocKind::Vmm => self.vmm(gpu, len),
        };
        let (addr, allocation) = made.map_err(|error| match error {
            Error::Cuda { status: CudaStatus::OUT_OF_MEMORY, .. } => {
                Error::Exhausted { what: "GPU memory", len, fix: CudaStatus::OUT_OF_MEMORY.fix() }
            }
            other => other,
        })?;
        self.allocations.lock().insert(addr, allocation);
        Ok(addr)
    }

    /// # Safety
    /// As [`Cuda::free`](crate::cuda::Cuda::free).
    pub(super) unsafe fn give_back(&self, addr: u64) -> Result<()> {
        let allocation = self.allocations.lock().remove(&addr);
        match allocation {
            Some(Allocation::Malloc { ordinal, raw }) => {
                let _current = self.enter_primary(self.gpu(ordinal)?)?;
                // SAFETY: given by cuMemAlloc, not freed yet; the caller vouches that nothing uses it.
                unsafe { self.api.mem_free(raw) }
            }
            Some(Allocation::Vmm { ordinal, len }) => {
                let _current = self.enter_primary(self.gpu(ordinal)?)?;
                self.unmap(addr, len)
            }
            None => Err(Error::invalid(
                "address",
                format_args!("{addr:#x}"),
                "one that alloc gave, not freed yet",
            )),
        }
    }

    /// `cuMemAlloc` guarantees 256 bytes of alignment, so a bit more is asked for than needed.
    fn malloc(&self, gpu: &Gpu, len: usize) -> Result<(u64, Allocation)> {
        let more = len.checked_add(ALIGN - 1).ok_or(too_long(len))?;
        let mut raw = 0;
        // SAFETY: a place for the answer; a context is current.
        unsafe { self.api.mem_alloc(&mut raw, more) }?;
        if let Err(error) = self.set_sync_memops(raw) {
            // SAFETY: allocated above, known to nobody else.
            unsafe { self.api.mem_free(raw) }.unwrap_or_else(|error| leaked(raw, &error));
            return Err(error);
        }
        let addr = raw.next_multiple_of(ALIGN as u64);
        Ok((addr, Allocation::Malloc { ordinal: gpu.ordinal, raw }))
    }

    fn vmm(&self, gpu: &Gpu, len: usize) -> Result<(u64, Allocation)> {
        let location = MemLocation { kind: LOCATION_DEVICE, id: gpu.device };
        let prop = AllocationProp {
            kind: ALLOCATION_PINNED,
            handle_types: HANDLE_TYPE_FD,
            location,
            win32_meta_data: 0,
            compression: 0,
            gpu_direct_rdma: u8::from(self.attribute(gpu, RDMA_WITH_VMM_SUPPORTED)? != 0),
            usage: 0,
            reserved: [0; 4],
        };
        let mut granularity = 0;
        // SAFETY: a place for the answer and properties of the driver's layout.
        unsafe { self.api.mem_get_allocation_granularity(&mut granularity, &prop, GRANULARITY_MINIMUM) }?;
        let granularity = granularity.max(ALIGN);
        let len = len.checked_next_multiple_of(granularity).ok_or(too_long(len))?;
        let mut memory = 0;
        // SAFETY: a place for the answer and properties of the driver's layout.
        unsafe { self.api.mem_create(&mut memory, len, &prop, 0) }?;
        let shown = self.show(memory, len, granularity, location);
        // From here on the mapping alone holds the memory.
        // SAFETY: created above, given back once.
        unsafe { self.api.mem_release(memory) }.unwrap_or_else(|error| leaked(memory, &error));
        Ok((shown?, Allocation::Vmm { ordinal: gpu.ordinal, len }))
    }

    /// Maps memory at an address of its own and lets the GPU use it. Undoes all of it on failure.
    fn show(&self, memory: u64, len: usize, align: usize, location: MemLocation) -> Result<u64> {
        let mut addr = 0;
        // SAFETY: a place for the answer.
        unsafe { self.api.mem_address_reserve(&mut addr, len, align, 0, 0) }?;
        // SAFETY: the range was reserved for this, the memory has this length.
        if let Err(error) = unsafe { self.api.mem_map(addr, len, 0, memory, 0) } {
            self.unreserve(addr, len).unwrap_or_else(|error| leaked(addr, &error));
            return Err(error);
        }
        let access = AccessDesc { location, flags: ACCESS_READ_WRITE };
        // SAFETY: the range was mapped above; one description.
        let usable = unsafe { self.api.mem_set_access(addr, len, &access, 1) };
        if let Err(error) = usable {
            self.unmap(addr, len).unwrap_or_else(|error| leaked(addr, &error));
            return Err(error);
        }
        // Not every driver has the attribute for VMM memory; without it CUDA's own small copies to this memory
        // may still be on their way when they return. Copies of this crate wait in any case.
        if let Err(error) = self.set_sync_memops(addr) {
            tracing::debug!(%error, "VMM memory at {addr:#x} without SYNC_MEMOPS");
        }
        Ok(addr)
    }

    /// Undoes `cuMemMap` and the reservation.
    fn unmap(&self, addr: u64, len: usize) -> Result<()> {
        // SAFETY: a whole mapping made here that nothing uses any more.
        unsafe { self.api.mem_unmap(addr, len) }?;
        self.unreserve(addr, len)
    }

    fn unreserve(&self, addr: u64, len: usize) -> Result<()> {
        // SAFETY: a whole reservation made here, with nothing mapped in it.
        unsafe { self.api.mem_address_free(addr, len) }
    }

    fn set_sync_memops(&self, addr: u64) -> Result<()> {
        let on = 1u32;
        // SAFETY: the attribute takes a 32-bit number; the memory is live.
        unsafe { self.api.pointer_set_attribute(from_ref(&on).cast(), pointer_attribute::SYNC_MEMOPS, addr) }
    }
}

fn too_long(len: usize) -> Error {
    Error::invalid("length", len, "at most the memory of the GPU")
}

fn leaked(what: u64, error: &Error) {
    tracing::warn!(%error, "GPU memory {what:#x} stays allocated until the process ends");
}
