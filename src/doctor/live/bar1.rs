//! The window to a GPU's memory, as NVML tells. NVML comes with the driver, and is found at run time.

use std::ffi::{CStr, CString, c_char, c_void};
use std::mem::transmute;

use serde::{Deserialize, Serialize};

/// `nvmlBAR1Memory_t`, bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub(in crate::doctor) struct Bar1 {
    pub(in crate::doctor) total: u64,
    pub(in crate::doctor) free: u64,
    pub(in crate::doctor) used: u64,
}

type Init = unsafe extern "C" fn() -> u32;
type ByPci = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> u32;
type Bar1Info = unsafe extern "C" fn(*mut c_void, *mut Bar1) -> u32;

const LIBRARY: &CStr = c"libnvidia-ml.so.1";

/// Of the GPU at this PCI address.
pub(super) fn of(pci: &str) -> Result<Bar1, String> {
    // SAFETY: a terminated name; NVML's initialisers may run at any time.
    let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        return Err(format!("NVML ({}) is not here", LIBRARY.to_string_lossy()));
    }
    let find = |name: &CStr| {
        // SAFETY: a loaded library, never closed, and a terminated name.
        let found = unsafe { libc::dlsym(library, name.as_ptr()) };
        if found.is_null() { Err(format!("NVML has no {}", name.to_string_lossy())) } else { Ok(found) }
    };
    // SAFETY: the type is that of the function in nvml.h.
    let init = unsafe { transmute::<*mut c_void, Init>(find(c"nvmlInit_v2")?) };
    // SAFETY: as above.
    let by_pci = unsafe { transmute::<*mut c_void, ByPci>(find(c"nvmlDeviceGetHandleByPciBusId_v2")?) };
    // SAFETY: as above.
    let info = unsafe { transmute::<*mut c_void, Bar1Info>(find(c"nvmlDeviceGetBAR1MemoryInfo")?) };
    let address = CString::new(pci).map_err(|error| error.to_string())?;
    let (mut device, mut bar1) = (std::ptr::null_mut(), Bar1::default());
    // SAFETY: it may be called at any time, and more than once.
    checked("nvmlInit", unsafe { init() })?;
    // SAFETY: a terminated address, and a place for the answer.
    checked("nvmlDeviceGetHandleByPciBusId", unsafe { by_pci(address.as_ptr(), &mut device) })?;
    // SAFETY: the device found above, and a place for the answer.
    checked("nvmlDeviceGetBAR1MemoryInfo", unsafe { info(device, &mut bar1) })?;
    Ok(bar1)
}

fn checked(call: &str, status: u32) -> Result<(), String> {
    if status == 0 { Ok(()) } else { Err(format!("{call}: NVML status {status}")) }
}
