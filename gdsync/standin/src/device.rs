//! The list of devices: one.

use std::cell::UnsafeCell;
use std::ffi::{c_char, c_int};
use std::ptr;

use rdma_core_sys::verbs::{ibv_device, ibv_node_type, ibv_transport_type};

use crate::hca::Hca;

/// Its name.
const NAME: &[u8] = b"mlx5_standin";

struct Listed(UnsafeCell<ibv_device>);

// SAFETY: nobody writes to it.
unsafe impl Sync for Listed {}

static DEVICE: Listed = Listed(UnsafeCell::new(ibv_device {
    node_type: ibv_node_type::IBV_NODE_CA,
    transport_type: ibv_transport_type::IBV_TRANSPORT_IB,
    name: name(NAME),
    dev_name: name(b"uverbs_standin"),
    ..ibv_device::zeroed()
}));

const fn name(text: &[u8]) -> [c_char; 64] {
    let mut name = [0; 64];
    let mut n = 0;
    while n < text.len() {
        name[n] = text[n].cast_signed();
        n += 1;
    }
    name
}

/// Whether the device is that of this library.
pub(crate) fn is_ours(device: *mut ibv_device) -> bool {
    ptr::eq(device, DEVICE.0.get())
}

/// The GUID, big-endian: the half of the address that names the interface.
pub(crate) fn guid(hca: &Hca) -> u64 {
    let [_, _, _, _, _, _, _, _, half @ ..] = hca.card.gid().0;
    u64::from_ne_bytes(half)
}

/// # Safety
/// As its manual page asks.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_device_list(num_devices: *mut c_int) -> *mut *mut ibv_device {
    if !num_devices.is_null() {
        // SAFETY: the caller vouches for the place.
        unsafe { num_devices.write(1) };
    }
    Box::into_raw(Box::new([DEVICE.0.get(), ptr::null_mut()])).cast()
}

/// # Safety
/// As its manual page asks.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    // SAFETY: the caller vouches for it: a box of the function above.
    drop(unsafe { Box::from_raw(list.cast::<[*mut ibv_device; 2]>()) });
}

/// # Safety
/// As its manual page asks.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: the caller vouches for the device.
    unsafe { (&raw const (*device).name).cast() }
}

/// # Safety
/// As its manual page asks.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_device_guid(_device: *mut ibv_device) -> u64 {
    Hca::get().map_or(0, guid)
}

/// # Safety
/// As its manual page asks.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_get_device_index(_device: *mut ibv_device) -> c_int {
    -1
}
