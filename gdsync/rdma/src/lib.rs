//! RDMA devices: enumeration, choice of device, port and GID, errors, and the two device back ends: [`direct`] and
//! [`proxy`].
//!
//! Devices are found through libibverbs, which is loaded at run time if present.
//!
//! # What is chosen
//!
//! - **Device**: the first usable one among those nearest to a GPU; `soft0` if there is none. `GDSYNC_DEVICE`, or a
//!   name, overrides.
//! - **Port**: the first that is ACTIVE and has an address. `GDSYNC_PORT` overrides.
//! - **GID**: RoCE v2 before v1; an IPv4-mapped address before a global one before a link-local one. `GDSYNC_GID_INDEX`
//!   overrides. Both sides must use GIDs of the same kind.
//! - **Path MTU**: the smallest of the requested one and the MTUs of both ports.
//! - **iWARP** is not supported: such a device is never chosen, and opening one fails.
//! - **Registration**: host memory by its address; GPU memory by dma-buf, else by nvidia-peermem. Without either, the
//!   error says what both need. Regions that the device writes keep PCIe ordering, so data is in place when its
//!   completion is.

mod config;
pub mod direct;
mod events;
mod explain;
mod list;
mod open;
mod port;
pub mod proxy;
mod region;
mod step;
mod survey;
mod sysfs;

pub use config::{DeviceConfig, Route};
pub use open::Open;
pub use port::{GidEntry, GidKind, LinkLayer, Port, PortState};
pub use survey::{NearGpu, Survey, preferred};
pub use sysfs::{Class as SysfsDevice, Distance, Place, gpus};

pub(crate) use events::{Event, EventSource, Events, FailedCq, HealthMap, set_nonblocking};
pub(crate) use region::{Domain, Objects, Pages, Region, has_peermem};

use std::ops::Deref;
use std::path::Path;
use std::ptr::NonNull;

use gdsync_device::env::variable;
use gdsync_device::error::Result;
use rdma_core_sys::{Mlx5, Verbs};

/// Pointer to an object of libibverbs or libmlx5, which any thread may use.
pub(crate) struct Raw<T>(NonNull<T>);

// SAFETY: libibverbs and libmlx5 are thread-safe, and all objects are accessed through their functions, except for fields that are
// constant after creation.
unsafe impl<T> Send for Raw<T> {}
// SAFETY: as for `Send`: the libraries synchronize concurrent calls.
unsafe impl<T> Sync for Raw<T> {}

impl<T> Deref for Raw<T> {
    type Target = NonNull<T>;

    fn deref(&self) -> &NonNull<T> {
        &self.0
    }
}

/// Checks that libraries named by the environment load.
///
/// # Errors
/// [`Error::Library`](gdsync_device::Error::Library) if one does not: a named library is required.
pub fn check_named() -> Result<()> {
    if variable("GDSYNC_LIBIBVERBS").is_some() {
        Verbs::load()?;
    }
    if variable("GDSYNC_LIBMLX5").is_some() {
        Mlx5::load()?;
    }
    Ok(())
}

/// The RDMA devices of this machine; empty without libibverbs.
pub fn survey() -> Vec<Survey> {
    let list = match list::List::get() {
        Ok(list) => list,
        Err(error) => {
            tracing::debug!(%error, "no RDMA devices");
            return Vec::new();
        }
    };
    let sysfs = Path::new(sysfs::SYSFS);
    let mut listed = list.devices().peekable();
    let gpus = listed.peek().map(|_| sysfs::gpus(sysfs)).unwrap_or_default();
    listed.map(|one| Survey::of(sysfs, &one.name(), one.is_mlx5(), &gpus, || one.ask_ports())).collect()
}
