//! Queues in GPU memory by DevX: the whole library on the route of kernels' queue pairs, with the stand-in for a card and the
//! simulated driver for a GPU. GPU memory goes to the card as dma-bufs, which the stand-in maps.

#![allow(clippy::duplicate_mod, reason = "each file of tests brings what it shares with others")]

#[path = "../../../tests/common/mod.rs"]
mod common;
mod descriptor;
mod ends;
mod mailboxes;
mod refusals;
mod traffic;

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::PathBuf;

use gdrcopy::standin::driver::{self, Control};
use gdsync::cuda::Gpu;
use gdsync::rdma::{DeviceConfig, Route};
use gdsync::verbs::{Context, Device, OnGpu, QpBuilder};

use crate::common::{PATIENCE, Side, connect};

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
        ("GDSYNC_PATH", "direct".as_ref()),
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

/// A function of the stand-in that rdma-core does not have.
fn entry(name: &CStr) -> *mut c_void {
    let path = CString::new(library().into_os_string().into_encoded_bytes()).unwrap();
    // SAFETY: the library may be loaded at any time, and is already.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
    // SAFETY: the handle is that of a library.
    let entry = unsafe { libc::dlsym(handle, name.as_ptr()) };
    assert!(!entry.is_null(), "{name:?}");
    entry
}

/// What the stand-in has complained of so far in this process, but of peers that were gone.
fn complaints() -> Vec<String> {
    type Complaints = unsafe extern "C" fn(*mut c_char, usize) -> usize;
    // SAFETY: the type is that of the function.
    let complaints: Complaints = unsafe { std::mem::transmute(entry(c"gdsync_standin_complaints")) };
    let mut text = vec![0u8; 1 << 16];
    // SAFETY: the buffer is that long.
    let len = unsafe { complaints(text.as_mut_ptr().cast(), text.len()) };
    text.truncate(len);
    let text = String::from_utf8(text).unwrap();
    text.lines().filter(|line| !line.contains("peer")).map(str::to_owned).collect()
}

/// Registered memory that the firmware knows: all of it, and what came as a dma-buf.
fn umems() -> [usize; 2] {
    // SAFETY: the type is that of the function.
    let count: extern "C" fn(bool) -> usize = unsafe { std::mem::transmute(entry(c"gdsync_standin_umems")) };
    [count(false), count(true)]
}

/// While it is there, the device has no DevX (0), or one that takes no dma-buf (1).
struct Less;

impl Less {
    fn of(level: u32) -> Self {
        set_level(level);
        Self
    }
}

impl Drop for Less {
    fn drop(&mut self) {
        set_level(2);
    }
}

fn set_level(level: u32) {
    // SAFETY: the type is that of the function.
    let set: extern "C" fn(u32) = unsafe { std::mem::transmute(entry(c"gdsync_standin_devx")) };
    set(level);
}

/// A simulated GPU for one test: the driver has forgotten all it knew when the next begins.
struct Bench {
    gpu: Gpu,
    control: Control,
}

impl Bench {
    fn take() -> Self {
        let control = Control::take();
        Self { gpu: gpu(), control }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let done = self.gpu.reclaim(PATIENCE);
        assert!(done.is_ok() || std::thread::panicking(), "{done:?}");
    }
}

fn gpu() -> Gpu {
    Gpu::open_with(driver::api(), 0, driver::gdr().ok()).unwrap()
}

fn open(gpu: &Gpu) -> Context {
    let config =
        DeviceConfig { route: Some(Route::Direct), gpu: Some(gpu.clone()), ..DeviceConfig::default() };
    Device::find(Some(CARD)).unwrap().open_with(&config).unwrap()
}

/// Two connected sides whose queues are on the GPU as far as `what` says.
fn pair(gpu: &Gpu, what: OnGpu, bytes: usize, build: impl Fn(QpBuilder) -> QpBuilder) -> (Side, Side) {
    let side = || Side::new(&open(gpu), bytes, |q| build(q.on_gpu(gpu, what)));
    connect(side(), side())
}
