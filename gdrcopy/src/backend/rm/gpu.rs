//! A GPU in the resource manager: found by its PCI address, opened and checked.

use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::Route;
use super::abi::{self, Escape};
use super::client::{self, Client, Object};
use super::proof::Proof;
use crate::cuda::{Cuda, GpuInfo};
use crate::error::{Error, Result};

/// `CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES`: 1 where CPU and GPU share a coherent link.
const COHERENT: u32 = 100;

/// An opened GPU.
#[derive(Debug)]
pub(crate) struct Gpu {
    // Fields are dropped in this order.
    device: Object,
    /// Keeps the GPU attached to the client.
    _file: OwnedFd,
    node: CString,
    /// CUDA device ordinal.
    pub(crate) ordinal: i32,
    malloc: Proof,
    vmm: Proof,
}

impl Gpu {
    pub(crate) fn open(client: &Arc<Client>, cuda: &dyn Cuda, info: &GpuInfo) -> Result<Self> {
        if cuda.device_attribute(info.ordinal, COHERENT)? != 0 {
            return Err(refuse("a GPU with a coherent link to the CPU", "use the gdrdrv or dmabuf backend"));
        }
        let card = find_card(client, info)?;
        let node = CString::new(format!("/dev/nvidia{}", card.minor)).expect("no NUL in digits");
        let file = client::open_node(&*client.kernel, &node)?;
        let mut register = abi::RegisterFd { control_fd: client.control_fd() };
        // SAFETY: no pointers. The call reports its failures as errno.
        unsafe { client::escape(&*client.kernel, file.as_fd(), &mut register) }?;

        let mut id = abi::IdInfo { gpu_id: card.gpu_id, ..Default::default() };
        // SAFETY: no pointers.
        unsafe { client.control(client.handle(), &mut id) }?;
        let mut params = abi::Device { instance: id.device, ..Default::default() };
        let device = client.alloc(client.handle(), &mut params)?;
        if is_partitioned(&device, id.subdevice, info)? {
            return Err(refuse("a multi-instance GPU (MIG)", "use the gdrdrv backend, or turn MIG off"));
        }
        let (malloc, vmm) = Default::default();
        Ok(Self { device, _file: file, node, ordinal: info.ordinal, malloc, vmm })
    }

    pub(crate) fn device(&self) -> u32 {
        self.device.handle()
    }

    pub(crate) fn client(&self) -> &Arc<Client> {
        self.device.client()
    }

    /// Whether memory that comes by a route can be mapped.
    pub(crate) fn proof(&self, route: Route) -> &Proof {
        match route {
            Route::Malloc => &self.malloc,
            Route::Vmm => &self.vmm,
        }
    }

    /// A file for one mapping.
    pub(crate) fn open_file(&self) -> Result<OwnedFd> {
        client::open_node(&*self.client().kernel, &self.node)
    }

    /// Whether confidential computing hides GPU memory from the CPU. `false` also where nobody can tell.
    pub(crate) fn is_confidential(&self) -> bool {
        let client = self.client();
        let mut params = abi::ConfidentialCompute { client: client.handle() };
        let Ok(object) = client.alloc(client.handle(), &mut params) else { return false };
        let mut capabilities = abi::CcCapabilities::default();
        // SAFETY: no pointers.
        let asked = unsafe { client.control(object.handle(), &mut capabilities) };
        asked.is_ok() && capabilities.feature != 0
    }
}

fn refuse(what: &str, fix: &'static str) -> Error {
    Error::Unsupported { what: format!("mapping memory of {what}"), by: "the rm backend", fix }
}

/// Domain, bus and device of a PCI address in text form.
fn parse_pci(text: &str) -> Option<(u32, u8, u8)> {
    let (domain, rest) = text.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (slot, _function) = rest.split_once('.')?;
    let hex = |digits| u32::from_str_radix(digits, 16).ok();
    Some((hex(domain)?, hex(bus)?.try_into().ok()?, hex(slot)?.try_into().ok()?))
}

/// The driver's entry for a GPU. CUDA's order and choice of GPUs are not the driver's.
fn find_card(client: &Client, info: &GpuInfo) -> Result<abi::Card> {
    let wanted = parse_pci(&info.pci).ok_or_else(|| {
        Error::invalid("PCI address of the GPU", &info.pci, "domain:bus:device.function in hexadecimal")
    })?;
    let mut cards = abi::Cards::default();
    // SAFETY: no pointers. The call reports its failures as errno.
    unsafe { client.escape(&mut cards) }?;
    let card =
        cards.0.into_iter().find(|card| card.valid != 0 && (card.domain, card.bus, card.slot) == wanted);
    card.ok_or_else(|| Error::Unsupported {
        what: format!("the GPU at {} ({})", info.pci, abi::Cards::NAME),
        by: "the kernel driver, which does not list it",
        fix: "use another backend (GDRCOPY_BACKEND)",
    })
}

/// Whether the GPU is in multi-instance mode.
fn is_partitioned(device: &Object, instance: u32, info: &GpuInfo) -> Result<bool> {
    let client = device.client();
    let subdevice = client.alloc(device.handle(), &mut abi::Subdevice { instance })?;
    let mut entry = abi::GpuInfoEntry { index: abi::GpuInfoEntry::SMC_MODE, data: 0 };
    let mut query = abi::GpuInfoQuery { entries: 1, list: client::address(&mut entry) };
    // SAFETY: `list` points to the one entry, which outlives the call.
    match unsafe { client.control(subdevice.handle(), &mut query) } {
        Ok(()) => Ok(entry.data == abi::GpuInfoEntry::SMC_ENABLED),
        // A query that the driver took over from older ones. CUDA puts the instance into the name.
        Err(Error::Rm { .. }) => Ok(info.name.contains(" MIG ")),
        Err(error) => Err(error),
    }
}
