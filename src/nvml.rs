//! NVML, loaded at run time: BAR1 of GPUs, and NVLink between them.

use std::ffi::{CString, c_char, c_int, c_void};

use serde::{Deserialize, Serialize};

use crate::declare;
use crate::library::{checked, load};

/// `nvmlBAR1Memory_t`, bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub(crate) struct Bar1 {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
}

type Device = *mut c_void;

const LIBRARY: &str = "libnvidia-ml.so.1";
/// `NVML_P2P_CAPS_INDEX_NVLINK`.
const NVLINK: u32 = 2;
/// `NVML_P2P_STATUS_OK`.
const JOINED: u32 = 0;

declare! {
    /// The functions that are used.
    struct Functions {
        init: "nvmlInit_v2" () -> c_int;
        by_pci: "nvmlDeviceGetHandleByPciBusId_v2" (pci: *const c_char, device: *mut Device) -> c_int;
        bar1: "nvmlDeviceGetBAR1MemoryInfo" (device: Device, bar1: *mut Bar1) -> c_int;
        peer_status: "nvmlDeviceGetP2PStatus" (one: Device, other: Device, index: u32, status: *mut u32) -> c_int;
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Nvml(Functions);

impl Nvml {
    /// Loads the library, and has it look for GPUs.
    pub(crate) fn load() -> Result<Self, String> {
        let library = load(LIBRARY).map_err(|_| format!("NVML ({LIBRARY}) is not here"))?;
        // SAFETY: the types are those of nvml.h.
        let functions = unsafe { Functions::find(library) }.map_err(|error| format!("NVML: {error}"))?;
        // SAFETY: it may be called at any time.
        checked("nvmlInit", unsafe { (functions.init)() })?;
        Ok(Self(functions))
    }

    fn device(&self, pci: &str) -> Result<Device, String> {
        let address = CString::new(pci).map_err(|error| error.to_string())?;
        let mut device = std::ptr::null_mut();
        // SAFETY: a terminated address, and a place for the answer.
        checked("nvmlDeviceGetHandleByPciBusId", unsafe { (self.0.by_pci)(address.as_ptr(), &mut device) })?;
        Ok(device)
    }

    /// The window of the GPU at this PCI address.
    pub(crate) fn bar1(&self, pci: &str) -> Result<Bar1, String> {
        let (device, mut bar1) = (self.device(pci)?, Bar1::default());
        // SAFETY: a device of NVML, and a place for the answer.
        checked("nvmlDeviceGetBAR1MemoryInfo", unsafe { (self.0.bar1)(device, &mut bar1) })?;
        Ok(bar1)
    }

    /// Whether NVLink joins the GPUs at these PCI addresses.
    pub(crate) fn nvlink(&self, one: &str, other: &str) -> Result<bool, String> {
        let (one, other, mut status) = (self.device(one)?, self.device(other)?, JOINED);
        // SAFETY: devices of NVML, and a place for the answer.
        let told = unsafe { (self.0.peer_status)(one, other, NVLINK, &mut status) };
        checked("nvmlDeviceGetP2PStatus", told)?;
        Ok(status == JOINED)
    }
}
