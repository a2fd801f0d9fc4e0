//! An open RDMA device, with the port and GID of its queue pairs.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::verbs::{ibv_atomic_cap, ibv_context, ibv_device_attr};
use rdma_core_sys::{Mlx5, Verbs};

use super::config::DeviceConfig;
use super::list::{Handle, List};
use super::port::{GidEntry, GidKind, LinkLayer, Port};
use gdsync_device::error::{Error, Result};
use gdsync_device::{Access, MAX_RD_ATOMIC, QpAddress};

/// An open RDMA device, closed when the last `Arc` is dropped. Objects on it hold one.
pub struct Open {
    handle: Handle,
    attr: ibv_device_attr,
    port: Port,
    gid: GidEntry,
    /// Addresses must always have a GRH.
    needs_grh: bool,
    config: DeviceConfig,
}

impl fmt::Debug for Open {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} port {}", self.name(), self.port.number)
    }
}

impl Open {
    /// Opens device `name`.
    ///
    /// # Errors
    /// [`Error::Library`] without libibverbs; [`Error::NoDevice`] if there is no such device; [`Error::Verbs`] if a
    /// call fails; [`Error::UnsupportedTransport`] for iWARP; [`Error::Device`] if no port is usable.
    pub fn device(name: &str, config: &DeviceConfig) -> Result<Arc<Self>> {
        config.check()?;
        let list = List::get()?;
        let Some(listed) = list.devices().find(|listed| listed.name() == name) else {
            let names: Vec<_> = list.devices().map(|listed| listed.name()).collect();
            return Err(Error::NoDevice { name: name.to_owned(), available: names.join(", ") });
        };
        if listed.is_iwarp() {
            return Err(Error::UnsupportedTransport { device: name.to_owned(), transport: "iWARP" });
        }
        Self::with(listed.open()?, config)
    }

    /// Uses a device that the application has opened. It stays open when this is dropped, and the application reads its
    /// events.
    ///
    /// # Errors
    /// Those of [`Open::device`].
    ///
    /// # Safety
    /// `context` must be a context of libibverbs that stays open while the result and all that is made on it live.
    pub unsafe fn adopt(context: NonNull<ibv_context>, config: &DeviceConfig) -> Result<Arc<Self>> {
        config.check()?;
        // SAFETY: as the caller promises.
        Self::with(unsafe { Handle::adopt(context) }?, config)
    }

    fn with(handle: Handle, config: &DeviceConfig) -> Result<Arc<Self>> {
        let unusable = |why: String| Error::Device { device: handle.name.clone(), why };
        let attr = handle.attr()?;
        let (port, needs_grh) = choose_port(handle.ports()?, config.port).map_err(unusable)?;
        let gid = choose_gid(&port, config.gid_index).map_err(unusable)?;
        let open = Self { handle, attr, port, gid, needs_grh, config: config.clone() };
        tracing::debug!(device = open.name(), port = open.port.number, gid = %gid.gid, index = gid.index, "opened");
        Ok(Arc::new(open))
    }

    pub(crate) fn verbs(&self) -> &'static Verbs {
        self.handle.verbs
    }

    pub(crate) fn context(&self) -> NonNull<ibv_context> {
        *self.handle.raw
    }

    /// Name of the device.
    pub fn name(&self) -> &str {
        &self.handle.name
    }

    /// Whether the application has opened it, and reads its events.
    pub(crate) fn is_adopted(&self) -> bool {
        self.handle.is_adopted
    }

    /// Whether libmlx5 is its driver.
    pub(crate) fn is_mlx5(&self, mlx5: &Mlx5) -> bool {
        // SAFETY: the device is open while `self` lives.
        let device = unsafe { (*self.context().as_ptr()).device };
        // SAFETY: the open context holds a valid device.
        unsafe { mlx5.mlx5dv_is_supported(device) }
    }

    /// Limits of the device.
    pub(crate) fn attr(&self) -> &ibv_device_attr {
        &self.attr
    }

    /// Maximum outstanding READs and atomics per queue pair and direction, at most [`MAX_RD_ATOMIC`].
    pub(crate) fn rd_atomic(&self) -> u8 {
        let most = self.attr.max_qp_rd_atom.min(self.attr.max_qp_init_rd_atom);
        u8::try_from(most.clamp(0, MAX_RD_ATOMIC.into())).expect("at most 16")
    }

    /// Access flags that queue pairs may grant. Drivers refuse atomics if the device has none, as some virtual
    /// functions.
    pub(crate) fn rights(&self) -> Access {
        let has_atomics = self.attr.atomic_cap != ibv_atomic_cap::IBV_ATOMIC_NONE;
        if has_atomics {
            return Access::all();
        }
        tracing::debug!(
            device = self.name(),
            "no atomics (atomic_cap): queue pairs do not allow them to peers"
        );
        Access::all() - Access::REMOTE_ATOMIC
    }

    /// The port in use.
    pub(crate) fn port(&self) -> &Port {
        &self.port
    }

    /// The GID in use.
    pub(crate) fn gid(&self) -> GidEntry {
        self.gid
    }

    /// Index of the GID, for queue pairs.
    pub(crate) fn gid_index(&self) -> u8 {
        u8::try_from(self.gid.index).expect("only such entries are chosen")
    }

    pub(crate) fn needs_grh(&self) -> bool {
        self.needs_grh
    }

    pub(crate) fn config(&self) -> &DeviceConfig {
        &self.config
    }

    /// Address of a queue pair on this port.
    pub(crate) fn address(&self, qpn: u32, psn: u32) -> QpAddress {
        let lid = if self.port.link == LinkLayer::InfiniBand { self.port.lid } else { 0 };
        let address = QpAddress::new(self.gid.gid, qpn, psn).with_lid(lid);
        self.port.mtu.map_or(address, |mtu| address.with_mtu(mtu))
    }

    /// What packets travel over, for reports.
    pub(crate) fn link(&self) -> String {
        match (self.port.link, self.gid.kind) {
            (LinkLayer::Ethernet, GidKind::RoceV2) => "RoCE v2".into(),
            (LinkLayer::Ethernet, GidKind::IbOrRoceV1) => "RoCE v1".into(),
            (link, _) => link.to_string(),
        }
    }
}

/// The requested port, or the first usable one, or the reason why there is none.
fn choose_port(ports: Vec<(Port, bool)>, wanted: Option<u8>) -> std::result::Result<(Port, bool), String> {
    let numbers: Vec<_> = ports.iter().map(|(port, _)| port.number.to_string()).collect();
    if let Some(number) = wanted {
        let numbers = numbers.join(", ");
        let found = ports.into_iter().find(|(port, _)| port.number == number);
        let found =
            found.ok_or_else(|| format!("it has no port {number}, its ports are {numbers} (GDSYNC_PORT)"))?;
        return found.0.refusal().map_or(Ok(found), Err);
    }
    let mut refusals = Vec::new();
    for (port, needs_grh) in ports {
        match port.refusal() {
            None => return Ok((port, needs_grh)),
            Some(why) => refusals.push(why),
        }
    }
    Err(if refusals.is_empty() { "it has no port".into() } else { refusals.join("; ") })
}

/// The requested GID, or the best one, or the reason why there is none.
fn choose_gid(port: &Port, wanted: Option<u8>) -> std::result::Result<GidEntry, String> {
    match wanted {
        None => port.best_gid().ok_or_else(|| format!("port {} has no GID", port.number)),
        Some(index) => port.gid(index).ok_or_else(|| {
            let (number, table) = (port.number, port.table());
            format!("entry {index} of the GID table of port {number} is empty (GDSYNC_GID_INDEX); the table: {table}")
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::super::port::PortState;
    use super::*;
    use gdsync_device::Gid;

    fn port(number: u8, state: PortState) -> (Port, bool) {
        let gid = |index, last| {
            let mut gid = Gid([0; 16]);
            (gid.0[0], gid.0[15]) = (0x20, last);
            GidEntry { index, gid, kind: GidKind::RoceV2 }
        };
        let gids = vec![gid(1, 1), gid(3, 2)];
        (Port { number, state, link: LinkLayer::Ethernet, lid: 0, mtu: Some(1024), gids }, false)
    }

    #[test]
    fn first_usable_or_requested_port_is_chosen() {
        let ports = || vec![port(1, PortState::DOWN), port(2, PortState::ACTIVE)];
        assert_eq!(choose_port(ports(), None).unwrap().0.number, 2);
        assert_eq!(choose_port(ports(), Some(2)).unwrap().0.number, 2);
        assert!(choose_port(ports(), Some(1)).unwrap_err().contains("port 1 is DOWN"));
        let why = choose_port(ports(), Some(3)).unwrap_err();
        assert!(why.contains("no port 3, its ports are 1, 2 (GDSYNC_PORT)"), "{why}");
        assert!(choose_port(vec![port(1, PortState::DOWN)], None).unwrap_err().contains("port 1 is DOWN"));
        assert!(choose_port(Vec::new(), None).unwrap_err().contains("no port"));
    }

    #[test]
    fn best_or_requested_gid_is_chosen() {
        let (port, _) = port(1, PortState::ACTIVE);
        assert_eq!(choose_gid(&port, None).unwrap().index, 1);
        assert_eq!(choose_gid(&port, Some(3)).unwrap().index, 3);
        let why = choose_gid(&port, Some(2)).unwrap_err();
        assert!(
            why.contains("entry 2") && why.contains("GDSYNC_GID_INDEX") && why.contains("1 = 2000:"),
            "{why}"
        );
        assert!(why.contains("(RoCE v2), 3 = "), "{why}");
    }
}
