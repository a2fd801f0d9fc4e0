//! Chooses the stand-in, and asks it what rdma-core's functions do not tell.
#![allow(dead_code, reason = "the program of `mp` uses a part")]

use std::env;
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::PathBuf;

/// The device of the stand-in.
pub(crate) const CARD: &str = "mlx5_standin";

/// Names the libraries, the device and the route. Before `main`: there must be no other thread.
pub(crate) fn use_the_stand_in(route: &str) {
    let library = library();
    for (name, value) in [
        ("GDSYNC_LIBIBVERBS", library.as_os_str()),
        ("GDSYNC_LIBMLX5", library.as_os_str()),
        ("GDSYNC_TEST_DEVICE", CARD.as_ref()),
        ("GDSYNC_PATH", route.as_ref()),
    ] {
        // SAFETY: the caller vouches that there is no other thread.
        unsafe { env::set_var(name, value) };
    }
}

/// The stand-in, as cargo has built it for this test; no path where it has not.
pub(crate) fn library() -> PathBuf {
    let test = env::current_exe().unwrap_or_default();
    let mut places = test.ancestors().skip(1).take(2).map(|dir| dir.join("librdma_standin.so"));
    places.find(|path| path.exists()).unwrap_or_default()
}

/// A function of the stand-in that rdma-core does not have.
pub(crate) fn entry(name: &CStr) -> *mut c_void {
    let path = CString::new(library().into_os_string().into_encoded_bytes()).unwrap();
    // SAFETY: the library may be loaded at any time, and is already.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
    // SAFETY: the handle is that of a library.
    let entry = unsafe { libc::dlsym(handle, name.as_ptr()) };
    assert!(!entry.is_null(), "{name:?}");
    entry
}

/// What the stand-in has complained of so far in this process.
pub(crate) fn complaints() -> String {
    type Complaints = unsafe extern "C" fn(*mut c_char, usize) -> usize;
    // SAFETY: the type is that of the function.
    let complaints: Complaints = unsafe { std::mem::transmute(entry(c"gdsync_standin_complaints")) };
    let mut text = vec![0u8; 1 << 16];
    // SAFETY: the buffer is that long.
    let len = unsafe { complaints(text.as_mut_ptr().cast(), text.len()) };
    text.truncate(len);
    String::from_utf8(text).unwrap()
}

/// How the device of the tests is used, and what its packets travel over.
pub(crate) fn used() -> (String, String) {
    let context = gdsync::Device::find(Some(CARD)).unwrap().open().unwrap();
    (context.description().to_owned(), context.wire().to_owned())
}
