//! What the driver says of an address.

use std::ffi::c_void;

use super::memory::{Kind, Region, find};
use super::{Outcome, address, context, get, get_all, put, require};
use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::layout::{MEMORY_TYPE_DEVICE, MEMORY_TYPE_HOST, pointer_attribute as asked_for};

/// `CU_POINTER_ATTRIBUTE_DEVICE_POINTER`, `CU_POINTER_ATTRIBUTE_HOST_POINTER`, `CU_POINTER_ATTRIBUTE_MAPPED`.
const DEVICE_POINTER: u32 = 3;
const HOST_POINTER: u32 = 4;
const MAPPED: u32 = 13;
/// Attributes from here on are newer than the driver.
const END: u32 = 21;
/// `CU_DEVICE_INVALID`.
const NO_DEVICE: i32 = -2;
/// The first bytes of this driver's IPC handles; the process, and the address of the memory follow.
const IPC: [u8; 8] = *b"sim-cuda";

/// An answer in the width that it has.
enum Answer {
    Narrow(u32),
    Wide(u64),
}

fn answer(region: Option<&Region>, asked: u32, addr: u64) -> Outcome<Answer> {
    use Answer::{Narrow, Wide};
    require((1..END).contains(&asked), CudaStatus::INVALID_VALUE)?;
    let device = region.is_some_and(|region| region.kind == Kind::Device);
    let of = |value: fn(&Region) -> usize| Wide(region.map_or(0, |region| value(region) as u64));
    Ok(match asked {
        asked_for::CONTEXT => of(|region| region.context.handle),
        asked_for::MEMORY_TYPE => Narrow(match region {
            Some(_) if device => MEMORY_TYPE_DEVICE,
            Some(_) => MEMORY_TYPE_HOST,
            None => 0,
        }),
        asked_for::DEVICE_ORDINAL => {
            Narrow(region.map_or(NO_DEVICE, |region| region.context.device).cast_unsigned())
        }
        asked_for::BUFFER_ID => of(|region| region.id),
        asked_for::RANGE_START_ADDR | asked_for::MAPPING_BASE_ADDR => of(|region| region.start),
        asked_for::RANGE_SIZE | asked_for::MAPPING_SIZE => of(|region| region.len),
        asked_for::IS_LEGACY_CUDA_IPC_CAPABLE => Narrow(device.into()),
        asked_for::SYNC_MEMOPS | asked_for::IS_MANAGED => Narrow(0),
        MAPPED => Narrow(region.is_some().into()),
        DEVICE_POINTER => Wide(region.map_or(0, |_| addr)),
        HOST_POINTER => Wide(region.filter(|_| !device).map_or(0, |_| addr)),
        _ => Wide(0),
    })
}

fn write(place: *mut c_void, answer: &Answer) -> Outcome {
    match *answer {
        Answer::Narrow(value) => put(place.cast(), value),
        Answer::Wide(value) => put(place.cast(), value),
    }
}

pub(super) fn attribute(place: *mut c_void, asked: u32, addr: u64) -> Outcome {
    let region = find(address(addr)?, 1).ok_or(CudaStatus::INVALID_VALUE)?;
    write(place, &answer(Some(&region), asked, addr)?)
}

pub(super) fn attributes(count: u32, asked: *const u32, places: *const *mut c_void, addr: u64) -> Outcome {
    let region = find(address(addr)?, 1);
    let (asked, places) = (get_all(asked, count)?, get_all(places, count)?);
    let answers: Vec<_> =
        asked.iter().map(|&asked| answer(region.as_deref(), asked, addr)).collect::<Outcome<_>>()?;
    places.iter().zip(&answers).try_for_each(|(&place, answer)| write(place, answer))
}

/// Copies here are always synchronous enough, so the one attribute that can be set changes nothing.
pub(super) fn set_attribute(value: *const c_void, asked: u32, addr: u64) -> Outcome {
    let known = find(address(addr)?, 1).is_some_and(|region| region.kind == Kind::Device);
    require(known && asked == asked_for::SYNC_MEMOPS, CudaStatus::INVALID_VALUE)?;
    require(get(value.cast::<u32>())? <= 1, CudaStatus::INVALID_VALUE)
}

pub(super) fn ipc_handle(handle: *mut [u8; 64], addr: u64) -> Outcome {
    context::current()?;
    let region = find(address(addr)?, 1).filter(|region| region.kind == Kind::Device);
    let region = region.ok_or(CudaStatus::INVALID_VALUE)?;
    let mut bytes = [0; 64];
    bytes[..8].copy_from_slice(&IPC);
    bytes[8..12].copy_from_slice(&std::process::id().to_ne_bytes());
    bytes[16..24].copy_from_slice(&region.start.to_ne_bytes());
    put(handle, bytes)
}

pub(super) fn open_ipc(addr: *mut u64, handle: [u8; 64], flags: u32) -> Outcome {
    context::current()?;
    require(!addr.is_null() && flags == 1 && handle.starts_with(&IPC), CudaStatus::INVALID_VALUE)?;
    let ours = handle[8..12] == std::process::id().to_ne_bytes();
    Err(if ours { CudaStatus::INVALID_CONTEXT } else { CudaStatus::NOT_SUPPORTED })
}

/// As nothing was opened, there is nothing to close.
pub(super) fn close_ipc(addr: u64) -> Outcome {
    context::current()?;
    address(addr)?;
    Err(CudaStatus::INVALID_VALUE)
}
