//! NVML, loaded at run time: BAR1 of GPUs, and NVLink between them.

use std::ffi::{CString, c_char, c_void};

use libloading::Library;
use serde::{Deserialize, Serialize};

/// `nvmlBAR1Memory_t`, bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub(crate) struct Bar1 {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
}

type Device = *mut c_void;
type Init = unsafe extern "C" fn() -> u32;
type ByPci = unsafe extern "C" fn(*const c_char, *mut Device) -> u32;
type Bar1Info = unsafe extern "C" fn(Device, *mut Bar1) -> u32;
type PeerStatus = unsafe extern "C" fn(Device, Device, u32, *mut u32) -> u32;

const LIBRARY: &str = "libnvidia-ml.so.1";
/// `NVML_P2P_CAPS_INDEX_NVLINK`.
const NVLINK: u32 = 2;
/// `NVML_P2P_STATUS_OK`.
const JOINED: u32 = 0;

/// The functions that are used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Nvml {
    by_pci: ByPci,
    bar1: Bar1Info,
    peer_status: PeerStatus,
}

impl Nvml {
    /// Loads the library, and has it look for GPUs.
    pub(crate) fn load() -> Result<Self, String> {
        // SAFETY: the library's initialisers may run at any time.
        let library =
            unsafe { Library::new(LIBRARY) }.map_err(|_| format!("NVML ({LIBRARY}) is not here"))?;
        // It stays loaded.
        let library = Box::leak(Box::new(library));
        let failed = |error: libloading::Error| format!("NVML: {error}");
        // SAFETY: the type is that of the function in nvml.h.
        let init = unsafe { library.get::<Init>("nvmlInit_v2") }.map_err(failed)?;
        // SAFETY: the type is that of the function in nvml.h.
        let by_pci = *unsafe { library.get("nvmlDeviceGetHandleByPciBusId_v2") }.map_err(failed)?;
        // SAFETY: the type is that of the function in nvml.h.
        let bar1 = *unsafe { library.get("nvmlDeviceGetBAR1MemoryInfo") }.map_err(failed)?;
        // SAFETY: the type is that of the function in nvml.h.
        let peer_status = *unsafe { library.get("nvmlDeviceGetP2PStatus") }.map_err(failed)?;
        // SAFETY: it may be called at any time.
        checked("nvmlInit", unsafe { init() })?;
        Ok(Self { by_pci, bar1, peer_status })
    }

    fn device(&self, pci: &str) -> Result<Device, String> {
        let address = CString::new(pci).map_err(|error| error.to_string())?;
        let mut device = std::ptr::null_mut();
        // SAFETY: a terminated address, and a place for the answer.
        checked("nvmlDeviceGetHandleByPciBusId", unsafe { (self.by_pci)(address.as_ptr(), &mut device) })?;
        Ok(device)
    }

    /// The window of the GPU at this PCI address.
    pub(crate) fn bar1(&self, pci: &str) -> Result<Bar1, String> {
        let (device, mut bar1) = (self.device(pci)?, Bar1::default());
        // SAFETY: a device of NVML, and a place for the answer.
        checked("nvmlDeviceGetBAR1MemoryInfo", unsafe { (self.bar1)(device, &mut bar1) })?;
        Ok(bar1)
    }

    /// Whether NVLink joins the GPUs at these PCI addresses.
    pub(crate) fn nvlink(&self, one: &str, other: &str) -> Result<bool, String> {
        let (one, other, mut status) = (self.device(one)?, self.device(other)?, JOINED);
        // SAFETY: devices of NVML, and a place for the answer.
        let told = unsafe { (self.peer_status)(one, other, NVLINK, &mut status) };
        checked("nvmlDeviceGetP2PStatus", told)?;
        Ok(status == JOINED)
    }
}

fn checked(call: &str, status: u32) -> Result<(), String> {
    if status == 0 { Ok(()) } else { Err(format!("{call}: NVML status {status}")) }
}
