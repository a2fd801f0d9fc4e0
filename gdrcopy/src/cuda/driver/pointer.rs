//! What CUDA knows of an address.

use std::ffi::c_void;

use crate::cuda::raw::Api;
use crate::cuda::raw::layout::{
    HANDLE_TYPE_FD, MEMORY_TYPE_DEVICE, MEMORY_TYPE_HOST, pointer_attribute as attribute,
};
use crate::cuda::{CudaStatus, MemoryKind, PointerInfo};
use crate::error::{Error, Result};

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
fn one_by_one<const N: usize>(api: &Api, addr: u64, asked: [u32; N]) -> Result<[u64; N]> {
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
pub fn info(api: &Api, addr: u64) -> Result<PointerInfo> {
    let [memory, managed, pool, ipc, device, buffer_id, fds, start, size, mapping_start, mapping_size] =
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
                attribute::ALLOWED_HANDLE_TYPES,
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
            return Ok(PointerInfo {
                kind: MemoryKind::Unknown,
                device,
                base: addr,
                size: 0,
                buffer_id,
                exportable: false,
            });
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
        exportable: vmm && fds & u64::from(HANDLE_TYPE_FD) != 0,
    })
}

/// A 32-bit answer, which the driver writes to the start of its place.
pub(super) fn number(answer: u64) -> u32 {
    let [a, b, c, d, ..] = answer.to_ne_bytes();
    u32::from_ne_bytes([a, b, c, d])
}
