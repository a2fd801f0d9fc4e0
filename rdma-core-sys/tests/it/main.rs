//! The declarations against the headers, and libraries that are there, missing, or older.

mod layout;

use std::io;
use std::path::Path;
use std::process::Command;
use std::ptr;

use rdma_core_sys::{LoadError, Mlx5, Verbs};

#[test]
fn a_missing_library_is_named() {
    // SAFETY: there is nothing at this path to run.
    let error = unsafe { Verbs::load_from(Path::new("/nowhere/libibverbs.so.1")) }.unwrap_err();
    assert!(matches!(&error, LoadError::Library { library, .. } if library == "/nowhere/libibverbs.so.1"));
    let text = error.to_string();
    for part in ["/nowhere/libibverbs.so.1", "libibverbs1 (Debian, Ubuntu)", "Fedora", "GDSYNC_LIBIBVERBS"] {
        assert!(text.contains(part), "{text:?} lacks {part:?}");
    }

    // SAFETY: there is nothing at this path to run.
    let error = unsafe { Mlx5::load_from(Path::new("/nowhere/libmlx5.so.1")) }.unwrap_err().to_string();
    for part in ["/nowhere/libmlx5.so.1", "ibverbs-providers (Debian, Ubuntu)", "GDSYNC_LIBMLX5"] {
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    }
}

#[test]
fn a_missing_symbol_is_named() {
    // SAFETY: the C library is loaded already.
    let error = unsafe { Verbs::load_from(Path::new("libc.so.6")) }.unwrap_err();
    let LoadError::Symbol { library, symbol, fix } = &error else { panic!("{error}") };
    assert_eq!((library.as_str(), *symbol), ("libc.so.6", "ibv_get_device_list"));
    assert!(fix.contains("libibverbs1") && fix.contains("rdma-core"), "{fix}");
}

const CHILD: &str = "RDMA_CORE_SYS_TEST_CHILD";

/// The environment counts for `load`, and the error of the first time is that of every time.
#[test]
fn the_environment_names_the_library() {
    if std::env::var_os(CHILD).is_some() {
        let first = Verbs::load().unwrap_err();
        assert_eq!(first, Verbs::load().unwrap_err());
        assert!(matches!(first, LoadError::Library { library, .. } if library == "/nowhere/verbs.so"));
        assert!(Mlx5::load().unwrap_err().to_string().contains("/nowhere/mlx5.so"));
        return;
    }
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_environment_names_the_library"])
        .env(CHILD, "1")
        .env("GDSYNC_LIBIBVERBS", "/nowhere/verbs.so")
        .env("GDSYNC_LIBMLX5", "/nowhere/mlx5.so")
        .status()
        .unwrap();
    assert!(status.success());
}

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
    // SAFETY: the library has a text for each number.
    let text = unsafe { verbs.ibv_wc_status_str(ibv_wc_status::IBV_WC_WR_FLUSH_ERR) };
    // SAFETY: it is a constant of the library.
    let text = unsafe { std::ffi::CStr::from_ptr(text) };
    assert!(text.to_bytes().to_ascii_lowercase().starts_with(b"work request flushed"), "{text:?}");
}
