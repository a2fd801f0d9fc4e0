//! The devices that NCCL can choose from: those of the machine, or the software HCA.

use std::ffi::{CString, c_int};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::ptr;
use std::sync::OnceLock;

use gdsync::rdma::PortState;
use gdsync::{Device, Error, Result};

use crate::abi::{GIN_PROXY, PTR_CUDA, PTR_HOST, Properties};

/// A device, with the texts that NCCL keeps.
struct Listed {
    device: Device,
    name: CString,
    pci_path: Option<CString>,
}

/// The list does not change while the process runs.
fn listed() -> &'static [Listed] {
    static LISTED: OnceLock<Vec<Listed>> = OnceLock::new();
    LISTED.get_or_init(|| {
        // GDSYNC_DEVICE names one.
        let chosen = std::env::var_os("GDSYNC_DEVICE").filter(|name| !name.is_empty());
        let mut devices: Vec<Device> = match chosen.and_then(|_| Device::find(None).ok()) {
            Some(one) => vec![one],
            None => Device::list().into_iter().filter(|device| device.refusal().is_none()).collect(),
        };
        // NCCL spreads over all that it sees: the software HCA is for machines without a card.
        if devices.len() > 1 {
            devices.retain(|device| !device.is_software());
        }
        devices.into_iter().map(Listed::new).collect()
    })
}

impl Listed {
    fn new(device: Device) -> Self {
        let name = CString::new(format!("gda-{}", device.name())).unwrap_or_default();
        let path = device.pci_address().map(|address| format!("/sys/bus/pci/devices/{address}"));
        let path =
            path.and_then(|path| CString::new(fs::canonicalize(path).ok()?.as_os_str().as_bytes()).ok());
        Self { device, name, pci_path: path }
    }
}

/// How many there are.
pub(crate) fn count() -> usize {
    listed().len()
}

fn get(number: c_int) -> Result<&'static Listed> {
    let found = usize::try_from(number).ok().and_then(|number| listed().get(number));
    found.ok_or_else(|| Error::invalid("the number of the device", number, "below the number of devices"))
}

/// A device of the list.
pub(crate) fn open(number: c_int) -> Result<gdsync::verbs::Context> {
    get(number)?.device.open()
}

/// What NCCL is told of it.
pub(crate) fn properties(number: c_int) -> Result<Properties> {
    let Listed { device, name, pci_path } = get(number)?;
    let port = device.ports().iter().find(|port| port.state == PortState::ACTIVE);
    let mut devs = [0; 8];
    devs[0] = number;
    Ok(Properties {
        name: name.as_ptr(),
        pci_path: pci_path.as_ref().map_or(ptr::null(), |path| path.as_ptr()),
        guid: u64::from(number.unsigned_abs()) + 1,
        // Registration makes dma-bufs of its own where a card needs them.
        ptr_support: PTR_HOST | PTR_CUDA,
        reg_is_global: 0,
        force_flush: 0,
        // The rate of a port is not asked for: NCCL only compares devices by it.
        speed: 100_000,
        port: port.map_or(1, |port| port.number.into()),
        latency: 0.0,
        max_comms: 1 << 20,
        max_recvs: MAX_RECVS,
        net_device_type: GIN_PROXY,
        net_device_version: 0,
        ndevs: 1,
        devs,
        max_p2p_bytes: 1 << 40,
        max_coll_bytes: 1 << 40,
        max_multi_request_size: 1,
        rail_id: -1,
        plane_id: -1,
    })
}

/// NCCL keeps at most 32 times as many requests to a rank under way, each of two work requests: as many as [`DEPTH`].
const MAX_RECVS: c_int = 8;
/// Work requests to a rank, in each context.
pub(crate) const DEPTH: usize = 512;
