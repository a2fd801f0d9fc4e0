//! What is missing is named, with what to install.

use std::path::Path;
use std::process::Command;

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

    // SAFETY: as above.
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

/// An older library does for all but the calls that it lacks.
#[test]
fn a_function_of_a_later_release_is_named_when_it_is_called() {
    // SAFETY: it is rdma-core's.
    let Ok(mut verbs) = (unsafe { Verbs::load_from(Path::new("libibverbs.so.1")) }) else {
        println!("skipped: libibverbs is not installed");
        return;
    };
    verbs.ibv_reg_dmabuf_mr = None;
    let none = std::ptr::null_mut();
    let access = rdma_core_sys::verbs::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE;
    // SAFETY: there is no function to call.
    let error = unsafe { verbs.ibv_reg_dmabuf_mr(none, 0, 4096, 0, -1, access) }.unwrap_err().to_string();
    for part in ["libibverbs.so.1", "ibv_reg_dmabuf_mr", "rdma-core 34"] {
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    }
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
