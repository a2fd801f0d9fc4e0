//! The one thing that only NVML tells: how much of BAR1 is in use. The library is found at run time.

use std::ffi::{CStr, CString, c_char, c_int, c_void};

/// `nvmlBAR1Memory_t` of `nvml.h`, bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bar1 {
    pub(super) total: u64,
    pub(super) free: u64,
    pub(super) used: u64,
}

type Plain = unsafe extern "C" fn() -> c_int;
type FindDevice = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
type ReadBar1 = unsafe extern "C" fn(*mut c_void, *mut Bar1) -> c_int;

/// BAR1 of the GPU at a PCI address, or why it is not known.
pub(super) fn bar1(pci: &str) -> Result<Bar1, String> {
    // SAFETY: loading the library runs its initialisers. It is never unloaded.
    let library = unsafe { libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_NOW) };
    if library.is_null() {
        return Err("libnvidia-ml.so.1 is not here".into());
    }
    let find = |name: &CStr| {
        // SAFETY: the library is loaded and the name is terminated.
        let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
        if symbol.is_null() { Err(format!("libnvidia-ml.so.1 lacks {name:?}")) } else { Ok(symbol) }
    };
    let check = |name: &str, status: c_int| {
        if status == 0 { Ok(()) } else { Err(format!("{name}: status {status}")) }
    };
    // SAFETY: the prototype in `nvml.h`.
    let init = unsafe { std::mem::transmute::<*mut c_void, Plain>(find(c"nvmlInit_v2")?) };
    // SAFETY: as above.
    let shutdown = unsafe { std::mem::transmute::<*mut c_void, Plain>(find(c"nvmlShutdown")?) };
    let find_device = find(c"nvmlDeviceGetHandleByPciBusId_v2")?;
    // SAFETY: as above.
    let find_device = unsafe { std::mem::transmute::<*mut c_void, FindDevice>(find_device) };
    // SAFETY: as above.
    let read = unsafe { std::mem::transmute::<*mut c_void, ReadBar1>(find(c"nvmlDeviceGetBAR1MemoryInfo")?) };
    let pci = CString::new(pci).map_err(|e| e.to_string())?;

    // SAFETY: no arguments.
    check("nvmlInit", unsafe { init() })?;
    let mut device = std::ptr::null_mut();
    let mut bar1 = Bar1::default();
    // SAFETY: a terminated string, and `device` is valid for writing.
    let found = check("nvmlDeviceGetHandleByPciBusId", unsafe { find_device(pci.as_ptr(), &raw mut device) });
    let result = found.and_then(|()| {
        // SAFETY: the device was found, and `bar1` is valid for writing.
        check("nvmlDeviceGetBAR1MemoryInfo", unsafe { read(device, &raw mut bar1) })
    });
    // SAFETY: no arguments; nothing of NVML is used afterwards.
    unsafe { shutdown() };
    result.map(|()| bar1)
}
