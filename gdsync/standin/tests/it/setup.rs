//! Chooses the stand-in, asks it what rdma-core's functions do not tell, and opens its device with simulated GPUs.
#![allow(dead_code, reason = "the program of `mp` uses a part")]

use std::env;
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::PathBuf;

use gdsync::Device;
use gdsync::cuda::Gpu;
use gdsync::rdma::{DeviceConfig, Route};
use gdsync::verbs::Context;
use gdsync_testkit::driver::{self, Control};

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
    let context = Device::find(Some(CARD)).unwrap().open().unwrap();
    (context.description().to_owned(), context.wire().to_owned())
}

/// A setting of the stand-in, until this is dropped.
pub(crate) struct Setting {
    set: extern "C" fn(u32),
    usual: u32,
}

impl Setting {
    /// `name` is a function that sets a number, which usually is `usual`.
    pub(crate) fn of(name: &CStr, value: u32, usual: u32) -> Self {
        // SAFETY: the type is that of all settings.
        let set: extern "C" fn(u32) = unsafe { std::mem::transmute(entry(name)) };
        set(value);
        Self { set, usual }
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        (self.set)(self.usual);
    }
}

/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`.
pub(crate) const DMA_BUF_SUPPORTED: u32 = 124;

/// A simulated GPU for one test: the driver has forgotten all it knew when the next begins.
pub(crate) struct Bench {
    pub(crate) gpu: Gpu,
    pub(crate) control: Control,
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.control.mend("cuMemHostRegister");
        let done = self.gpu.reclaim(std::time::Duration::from_secs(20));
        assert!(done.is_ok() || std::thread::panicking(), "{done:?}");
    }
}

impl Bench {
    pub(crate) fn take() -> Self {
        Self::with(|_| {})
    }

    pub(crate) fn with(settings: impl FnOnce(&Control)) -> Self {
        let control = Control::take();
        settings(&control);
        Self { gpu: simulated_gpu(0), control }
    }
}

pub(crate) fn simulated_gpu(ordinal: i32) -> Gpu {
    Gpu::open_with(driver::api(), ordinal, driver::gdr().ok()).unwrap()
}

/// Opens the device by a route, or as it chooses, for a GPU.
pub(crate) fn open_by(route: Option<Route>, gpu: Option<&Gpu>) -> gdsync::Result<Context> {
    let config = DeviceConfig { route, gpu: gpu.cloned(), ..DeviceConfig::default() };
    Device::find(Some(CARD)).unwrap().open_with(&config)
}

/// Opens the device so that it reads the rings itself.
pub(crate) fn open(gpu: &Gpu) -> Context {
    open_by(Some(Route::Direct), Some(gpu)).unwrap()
}

/// A message has all these words.
pub(crate) fn assert_says(message: &impl ToString, words: &[&str]) {
    let text = message.to_string();
    for word in words {
        assert!(text.contains(word), "'{text}' lacks '{word}'");
    }
}
