//! Enumerates devices through libibverbs and queries them.

use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use rdma_core_sys::verbs::{
    ibv_context, ibv_device, ibv_device_attr, ibv_fork_status, ibv_gid_entry, ibv_gid_type, ibv_link_layer,
    ibv_port_attr, ibv_port_flags, ibv_transport_type,
};
use rdma_core_sys::{Mlx5, Verbs};

use super::explain::{Call, failed, failed_last};
use super::port::{GidEntry, GidKind, LinkLayer, Port, PortState};
use super::sysfs::{Class, SYSFS};
use crate::Raw;
use gdsync_device::Gid;
use gdsync_device::error::Result;

/// The device list of libibverbs.
pub(super) struct List {
    verbs: &'static Verbs,
    first: NonNull<*mut ibv_device>,
    len: usize,
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: returned by `ibv_get_device_list`, freed only here; open devices stay open.
        unsafe { self.verbs.ibv_free_device_list(self.first.as_ptr()) };
    }
}

impl List {
    /// Gets the list; [`Error::Library`](crate::Error::Library) without libibverbs.
    pub(super) fn get() -> Result<Self> {
        let verbs = Verbs::load()?;
        prepare_fork(verbs);
        let mut len = 0;
        // SAFETY: `count` is writable.
        let list = unsafe { verbs.ibv_get_device_list(&raw mut len) };
        let first = NonNull::new(list)
            .ok_or_else(|| failed_last("ibv_get_device_list", "this machine", &Call::Open { node: None }))?;
        Ok(Self { verbs, first, len: usize::try_from(len).unwrap_or(0) })
    }

    pub(super) fn devices(&self) -> impl Iterator<Item = Listed<'_>> {
        (0..self.len).filter_map(|at| {
            // SAFETY: the list has `count` entries.
            let place = unsafe { self.first.add(at) };
            // SAFETY: all entries below `count` are initialized.
            let device = NonNull::new(unsafe { place.read() })?;
            Some(Listed { list: self, device })
        })
    }
}

/// A listed device.
pub(super) struct Listed<'a> {
    list: &'a List,
    device: NonNull<ibv_device>,
}

impl Listed<'_> {
    pub(super) fn name(&self) -> String {
        // SAFETY: the list keeps the device alive.
        let name = unsafe { self.list.verbs.ibv_get_device_name(self.device.as_ptr()) };
        if name.is_null() {
            return String::new();
        }
        // SAFETY: libibverbs returns a C string that lives as long as the list.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    /// Device file that it is opened through.
    fn node(&self) -> Option<PathBuf> {
        // SAFETY: the list keeps the device alive; `dev_name` is an array in it.
        let name = unsafe { &raw const (*self.device.as_ptr()).dev_name };
        // SAFETY: libibverbs terminates the name.
        let name = unsafe { CStr::from_ptr(name.cast()) }.to_str().ok().filter(|name| !name.is_empty())?;
        Some(Path::new("/dev/infiniband").join(name))
    }

    pub(super) fn is_iwarp(&self) -> bool {
        // SAFETY: the list keeps the device alive.
        let transport = unsafe { (*self.device.as_ptr()).transport_type };
        transport == ibv_transport_type::IBV_TRANSPORT_IWARP
    }

    /// Whether libmlx5 is its driver.
    pub(super) fn is_mlx5(&self) -> bool {
        let asked = Mlx5::load().map(|mlx5| {
            // SAFETY: the list keeps the device alive.
            unsafe { mlx5.mlx5dv_is_supported(self.device.as_ptr()) }
        });
        asked.inspect_err(|error| tracing::debug!(%error, "no mlx5 cards")).unwrap_or(false)
    }

    pub(super) fn open(&self) -> Result<Handle> {
        // SAFETY: the list keeps the device alive.
        let context = unsafe { self.list.verbs.ibv_open_device(self.device.as_ptr()) };
        let context = NonNull::new(context)
            .ok_or_else(|| failed_last("ibv_open_device", self.name(), &Call::Open { node: self.node() }))?;
        Ok(Handle { verbs: self.list.verbs, raw: Raw(context), name: self.name(), is_adopted: false })
    }

    /// Queries the ports of the device; empty if it cannot be opened.
    pub(super) fn ask_ports(&self) -> Vec<Port> {
        let asked = self.open().and_then(|context| context.ports());
        asked
            .inspect_err(|error| tracing::debug!(%error, "a device does not tell its ports"))
            .map(|ports| ports.into_iter().map(|(port, _)| port).collect())
            .unwrap_or_default()
    }
}

/// Enables fork support where the kernel needs it.
fn prepare_fork(verbs: &Verbs) {
    let known = verbs.ibv_is_fork_initialized.map(|ask| {
        // SAFETY: may be called at any time.
        unsafe { ask() }
    });
    if matches!(known, Some(ibv_fork_status::IBV_FORK_UNNEEDED | ibv_fork_status::IBV_FORK_ENABLED)) {
        return;
    }
    // SAFETY: may be called at any time; it fails when called too late.
    let errno = unsafe { verbs.ibv_fork_init() };
    if errno != 0 {
        tracing::debug!(errno, "a fork of this process may break registered memory");
    }
}

/// An open device, closed on drop unless the application has opened it.
pub(super) struct Handle {
    pub(super) verbs: &'static Verbs,
    pub(super) raw: Raw<ibv_context>,
    pub(super) name: String,
    /// The application has opened it, closes it, and reads its events.
    pub(super) is_adopted: bool,
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.is_adopted {
            return;
        }
        // SAFETY: opened once, closed only here; objects on the device keep this handle, so none are left.
        let errno = unsafe { self.verbs.ibv_close_device(self.raw.as_ptr()) };
        if errno != 0 {
            tracing::debug!(device = %self.name, errno, "a device was not closed");
        }
    }
}

impl Handle {
    /// A device that the application has opened.
    ///
    /// # Safety
    /// `context` must be one of libibverbs and stay open while the result lives.
    pub(super) unsafe fn adopt(context: NonNull<ibv_context>) -> Result<Self> {
        let verbs = Verbs::load()?;
        // SAFETY: the context is open.
        let device = unsafe { (*context.as_ptr()).device };
        // SAFETY: the device of an open context.
        let name = unsafe { verbs.ibv_get_device_name(device) };
        // SAFETY: libibverbs returns a C string of the device, which lives as long as the context.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        Ok(Self { verbs, raw: Raw(context), name, is_adopted: true })
    }

    pub(super) fn attr(&self) -> Result<ibv_device_attr> {
        let mut attr = ibv_device_attr::zeroed();
        // SAFETY: the device is open and `attr` is writable.
        let errno = unsafe { self.verbs.ibv_query_device(self.raw.as_ptr(), &raw mut attr) };
        if errno == 0 { Ok(attr) } else { Err(failed("ibv_query_device", &self.name, &Call::Other, errno)) }
    }

    /// Its ports, each with whether its addresses must be global (GRH).
    pub(super) fn ports(&self) -> Result<Vec<(Port, bool)>> {
        let mut gids = self.gids();
        let count = self.attr()?.phys_port_cnt;
        let ports = (1..=count).map(|number| {
            let mut attr = ibv_port_attr::zeroed();
            // SAFETY: the device is open and `attr` is writable.
            let errno = unsafe { self.verbs.query_port(self.raw.as_ptr(), number, &mut attr) };
            if errno != 0 {
                return Err(failed("ibv_query_port", &self.name, &Call::Other, errno));
            }
            let link = match attr.link_layer {
                ibv_link_layer::IBV_LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
                // Drivers older than RoCE do not report the link layer.
                _ => LinkLayer::InfiniBand,
            };
            let own = gids.extract_if(.., |(port, _)| *port == u32::from(number)).map(|(_, gid)| gid);
            let mtu = u8::try_from(attr.active_mtu.0).ok().and_then(gdsync_device::mtu_bytes);
            let state = PortState(u8::try_from(attr.state.0).unwrap_or(0));
            let port = Port { number, state, link, lid: attr.lid, mtu, gids: own.collect() };
            Ok((port, attr.flags.contains(ibv_port_flags::IBV_QPF_GRH_REQUIRED)))
        });
        ports.collect()
    }

    /// GID table entries by port.
    fn gids(&self) -> Vec<(u32, GidEntry)> {
        // More do not fit into the kernel's command, and libibverbs then reads sysfs.
        let mut room = vec![ibv_gid_entry::zeroed(); usize::from(u16::MAX) / size_of::<ibv_gid_entry>()];
        // SAFETY: the device is open and `room` is writable for its length.
        let count = unsafe { self.verbs.query_gid_table(self.raw.as_ptr(), &mut room) };
        match count.map(usize::try_from) {
            Some(Ok(count)) => {
                let entry = |entry: &ibv_gid_entry| {
                    let kind = match entry.gid_type {
                        ibv_gid_type::IBV_GID_TYPE_IB | ibv_gid_type::IBV_GID_TYPE_ROCE_V1 => {
                            GidKind::IbOrRoceV1
                        }
                        ibv_gid_type::IBV_GID_TYPE_ROCE_V2 => GidKind::RoceV2,
                        _ => GidKind::Unknown,
                    };
                    // SAFETY: every bit pattern of the union is a valid byte array.
                    let gid = Gid(unsafe { entry.gid.raw });
                    (entry.port_num, GidEntry { index: entry.gid_index, gid, kind })
                };
                room.iter().take(count).map(entry).collect()
            }
            // rdma-core before 32.
            _ => {
                let ports = Class::of(Path::new(SYSFS), &self.name).map(|class| class.ports());
                let of = |port: Port| port.gids.into_iter().map(move |gid| (u32::from(port.number), gid));
                ports.into_iter().flatten().flat_map(of).collect()
            }
        }
    }
}
