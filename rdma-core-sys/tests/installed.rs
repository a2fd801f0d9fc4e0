//! The installed library, where there is one. Without RDMA hardware it has no devices; it must say so.

use std::io;
use std::path::Path;
use std::ptr;

use rdma_core_sys::{LoadError, Verbs};

/// The installed library, not one that the environment names.
fn verbs() -> Option<Verbs> {
    // SAFETY: it is rdma-core's.
    match unsafe { Verbs::load_from(Path::new("libibverbs.so.1")) } {
        Ok(verbs) => Some(verbs),
        Err(LoadError::Library { cause, .. }) => {
            println!("skipped: {cause}");
            None
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn lists_devices_or_says_why_not() {
    let Some(verbs) = verbs() else { return };
    let mut count = -1;
    // SAFETY: the number is a local variable.
    let list = unsafe { verbs.ibv_get_device_list(&raw mut count) };
    if list.is_null() {
        // Without the kernel's module there is no list at all.
        assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::ENOSYS));
        return;
    }
    let mut device = list;
    for _ in 0..count {
        // SAFETY: the list has as many entries as the library said.
        let entry = unsafe { *device };
        // SAFETY: the entry is that of a listed device.
        let name = unsafe { verbs.ibv_get_device_name(entry) };
        assert!(!name.is_null());
        device = device.wrapping_add(1);
    }
    // SAFETY: the list ends with a null pointer.
    assert_eq!(unsafe { *device }, ptr::null_mut());
    // SAFETY: it is the library's list, freed once.
    unsafe { verbs.ibv_free_device_list(list) };
}

#[test]
fn names_events() {
    use rdma_core_sys::verbs::{ibv_event_type, ibv_wc_status};
    let Some(verbs) = verbs() else { return };
    // SAFETY: the library has a text for each number.
    let text = unsafe { verbs.ibv_event_type_str(ibv_event_type::IBV_EVENT_QP_ACCESS_ERR) };
    // SAFETY: it is a constant of the library.
    let text = unsafe { std::ffi::CStr::from_ptr(text) };
    assert_eq!(text.to_str(), Ok("local access violation work queue error"));
    // SAFETY: as above.
    let text = unsafe { verbs.ibv_wc_status_str(ibv_wc_status::IBV_WC_WR_FLUSH_ERR) };
    // SAFETY: as above.
    let text = unsafe { std::ffi::CStr::from_ptr(text) };
    assert!(text.to_bytes().to_ascii_lowercase().starts_with(b"work request flushed"), "{text:?}");
}
