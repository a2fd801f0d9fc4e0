//! gdsync and the [`ibverbs`] crate, an independent client of libibverbs, on one RDMA device: both must see the same
//! devices, and queue pairs of one must talk to queue pairs of the other.
//!
//! `gdsync-interop [DEVICE]`; without a name the device that gdsync prefers. Its port 1 must be active. Exit status 1 says that
//! something differed or did not arrive.

mod foreign;
mod traffic;

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;
use std::collections::BTreeMap;
use std::mem::size_of;

use gdsync::Device;

/// A failed check, or a failed call of either side.
type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

/// For everything that must arrive.
const PATIENCE: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    match run(std::env::args().nth(1).as_deref()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("failed: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(name: Option<&str>) -> Result {
    compare()?;
    let device = Device::find(name)?;
    if device.is_software() {
        return Err("no RDMA device: soft0 is known to gdsync only".into());
    }
    traffic::run(&device)
}

/// Fails with `why` unless `good`.
fn check(good: bool, why: impl FnOnce() -> String) -> Result {
    if good { Ok(()) } else { Err(why().into()) }
}

/// The entries of port 1's GID table, by index.
type Gids = BTreeMap<u32, [u8; 16]>;

/// Compares names and GID tables of all devices.
pub(crate) fn compare() -> Result {
    let (ours, theirs) = (ours(), theirs()?);
    for (name, gids) in &theirs {
        println!("{name}: {} GIDs", gids.len());
    }
    check(ours == theirs, || format!("gdsync sees {ours:x?}, ibverbs sees {theirs:x?}"))?;
    println!("both sides see the same devices and GIDs");
    Ok(())
}

fn ours() -> BTreeMap<String, Gids> {
    let mut all = BTreeMap::new();
    for device in Device::list().iter().filter(|device| !device.is_software()) {
        let first = device.ports().iter().find(|port| port.number == 1);
        let gids = first.map(|port| port.gids.iter().map(|entry| (entry.index, entry.gid.0)).collect());
        all.insert(device.name().to_owned(), gids.unwrap_or_default());
    }
    all
}

fn theirs() -> Result<BTreeMap<String, Gids>> {
    let mut all = BTreeMap::new();
    for device in &ibverbs::devices()? {
        let name = device.name().ok_or("a device without a name")?.to_str()?.to_owned();
        let context = device.open().map_err(|error| format!("{name}: {error}"))?;
        let first = context.gid_table().iter().filter(|entry| entry.port_num == 1);
        all.insert(name, first.map(|entry| (entry.gid_index, gid_bytes(&entry.gid))).collect());
    }
    Ok(all)
}

/// A GID of the `ibverbs` crate in network byte order.
pub(crate) fn gid_bytes(gid: &ibverbs::Gid) -> [u8; 16] {
    let mut bytes = [0; 16];
    let (prefix, interface) = bytes.split_at_mut(size_of::<u64>());
    prefix.copy_from_slice(&gid.subnet_prefix().to_be_bytes());
    interface.copy_from_slice(&gid.interface_id().to_be_bytes());
    bytes
}
