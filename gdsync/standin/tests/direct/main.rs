//! Cards that read our rings themselves: the whole library on the route that mlx5 cards take, with the stand-in for a card.

#![allow(clippy::duplicate_mod, reason = "each file of tests brings what it shares with others")]

#[path = "../../../tests/batch_run.rs"]
mod batch_run;
#[path = "../../../tests/common/mod.rs"]
mod common;
mod device;
mod events;
mod gpu;
#[path = "../../../tests/common/peer.rs"]
mod peer;
mod processes;
mod queues;
#[path = "../../../tests/verbs.rs"]
mod verbs;
#[path = "../../../tests/wraps.rs"]
mod wraps;

use std::ffi::{CString, c_char, c_void};
use std::path::PathBuf;

/// The device of the stand-in.
const CARD: &str = "mlx5_standin";

#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = choose_the_card;

/// Before there are threads: the libraries are the stand-in, and tests run on its device.
extern "C" fn choose_the_card() {
    let library = library();
    for (name, value) in [
        ("GDSYNC_LIBIBVERBS", library.as_os_str()),
        ("GDSYNC_LIBMLX5", library.as_os_str()),
        ("GDSYNC_TEST_DEVICE", CARD.as_ref()),
        ("GDSYNC_PATH", "".as_ref()),
    ] {
        // SAFETY: no other thread is there yet.
        unsafe { std::env::set_var(name, value) };
    }
}

/// The stand-in, as cargo has built it for this test.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap_or_default();
    let mut places = test.ancestors().skip(1).take(2).map(|dir| dir.join("librdma_standin.so"));
    places.find(|path| path.exists()).unwrap_or_default()
}

/// What the stand-in has complained of so far in this process.
fn complaints() -> String {
    type Complaints = unsafe extern "C" fn(*mut c_char, usize) -> usize;
    let path = CString::new(library().into_os_string().into_encoded_bytes()).unwrap();
    // SAFETY: the library may be loaded at any time, and is already.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
    // SAFETY: the handle is that of a library.
    let entry = unsafe { libc::dlsym(handle, c"gdsync_standin_complaints".as_ptr()) };
    assert!(!entry.is_null());
    // SAFETY: the type is that of the function.
    let complaints = unsafe { std::mem::transmute::<*mut c_void, Complaints>(entry) };
    let mut text = vec![0u8; 1 << 16];
    // SAFETY: the buffer is that long.
    let len = unsafe { complaints(text.as_mut_ptr().cast(), text.len()) };
    text.truncate(len);
    String::from_utf8(text).unwrap()
}

/// As [`complaints`], without those of peers that were gone.
fn complaints_but_of_peers() -> String {
    let all = complaints();
    all.lines().filter(|line| !line.contains("peer")).collect()
}
