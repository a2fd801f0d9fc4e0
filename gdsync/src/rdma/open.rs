//! An open RDMA device, with the port and the GID that its queue pairs use.

use std::ffi::CStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::verbs::{
    ibv_context, ibv_device, ibv_device_attr, ibv_fork_status, ibv_gid_entry, ibv_gid_type, ibv_link_layer,
    ibv_pd, ibv_port_attr, ibv_port_flags, ibv_transport_type,
};
use rdma_core_sys::{Mlx5, Verbs};

use super::config::DeviceConfig;
use super::explain::{Call, failed, failed_last};
use super::port::{GidEntry, GidKind, LinkLayer, Port, PortState};
use super::sysfs::{Class, SYSFS};
use crate::error::{Error, Result};
use crate::hca::Gid;
use crate::verbs::QpAddress;

/// An open RDMA device. Closed when the last clone of its `Arc` is gone: whoever makes something on it keeps one.
pub(crate) struct Open {
    verbs: &'static Verbs,
    context: NonNull<ibv_context>,
    name: String,
    attr: ibv_device_attr,
    port: Port,
    gid: GidEntry,
    /// Addresses between subnets are always written out.
    needs_grh: bool,
    config: DeviceConfig,
}

// SAFETY: libibverbs may be called from any thread; the rest is not changed after opening.
unsafe impl Send for Open {}
// SAFETY: as above.
unsafe impl Sync for Open {}

impl fmt::Debug for Open {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} port {}", self.name, self.port.number)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        // SAFETY: opened here, closed once; what was made on it keeps it, so nothing is left.
        let errno = unsafe { self.verbs.ibv_close_device(self.context.as_ptr()) };
        if errno != 0 {
            tracing::debug!(device = %self.name, errno, "a device was not closed");
        }
    }
}

/// The devices that libibverbs knows.
pub(super) struct List {
    verbs: &'static Verbs,
    first: NonNull<*mut ibv_device>,
    len: usize,
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: the list of `get`, freed once. Open devices stay open.
        unsafe { self.verbs.ibv_free_device_list(self.first.as_ptr()) };
    }
}

impl List {
    /// The list; [`Error::Library`] where there is no libibverbs.
    pub(super) fn get() -> Result<Self> {
        let verbs = Verbs::load()?;
        prepare_fork(verbs);
        let mut len = 0;
        // SAFETY: a place for the answer.
        let list = unsafe { verbs.ibv_get_device_list(&raw mut len) };
        let first = NonNull::new(list)
            .ok_or_else(|| failed_last("ibv_get_device_list", "this machine", &Call::Open { node: None }))?;
        Ok(Self { verbs, first, len: usize::try_from(len).unwrap_or(0) })
    }

    pub(super) fn devices(&self) -> impl Iterator<Item = Listed<'_>> {
        (0..self.len).filter_map(|at| {
            // SAFETY: the list has so many entries.
            let place = unsafe { self.first.add(at) };
            // SAFETY: entries are initialised.
            let device = NonNull::new(unsafe { place.read() })?;
            Some(Listed { list: self, device })
        })
    }
}

/// An entry of the list.
pub(super) struct Listed<'a> {
    list: &'a List,
    device: NonNull<ibv_device>,
}

impl Listed<'_> {
    pub(super) fn name(&self) -> String {
        // SAFETY: the device is listed.
        let name = unsafe { self.list.verbs.ibv_get_device_name(self.device.as_ptr()) };
        if name.is_null() {
            return String::new();
        }
        // SAFETY: libibverbs returns terminated text that lives as long as the list.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    /// The file that it is opened through.
    fn node(&self) -> Option<PathBuf> {
        // SAFETY: the device is listed, and its name an array of its own.
        let name = unsafe { &raw const (*self.device.as_ptr()).dev_name };
        // SAFETY: libibverbs keeps it terminated.
        let name = unsafe { CStr::from_ptr(name.cast()) }.to_str().ok().filter(|name| !name.is_empty())?;
        Some(Path::new("/dev/infiniband").join(name))
    }

    fn is_iwarp(&self) -> bool {
        // SAFETY: the device is listed.
        let transport = unsafe { (*self.device.as_ptr()).transport_type };
        transport == ibv_transport_type::IBV_TRANSPORT_IWARP
    }

    /// Whether libmlx5 drives it.
    pub(super) fn is_mlx5(&self) -> bool {
        let asked = Mlx5::load().map(|mlx5| {
            // SAFETY: the device is listed.
            unsafe { mlx5.mlx5dv_is_supported(self.device.as_ptr()) }
        });
        asked.inspect_err(|error| tracing::debug!(%error, "no mlx5 cards")).unwrap_or(false)
    }

    fn open(&self) -> Result<Context> {
        // SAFETY: the device is listed.
        let context = unsafe { self.list.verbs.ibv_open_device(self.device.as_ptr()) };
        let context = NonNull::new(context)
            .ok_or_else(|| failed_last("ibv_open_device", self.name(), &Call::Open { node: self.node() }))?;
        Ok(Context { verbs: self.list.verbs, context, name: self.name() })
    }

    /// Its ports, asked of the device itself; none where it cannot be opened.
    pub(super) fn ask_ports(&self) -> Vec<Port> {
        let asked = self.open().and_then(|context| context.ports());
        asked
            .inspect_err(|error| tracing::debug!(%error, "a device does not tell its ports"))
            .map(|ports| ports.into_iter().map(|(port, _)| port).collect())
            .unwrap_or_default()
    }
}

/// Where the kernel needs help to keep registered memory whole in a process that forks.
fn prepare_fork(verbs: &Verbs) {
    let known = verbs.ibv_is_fork_initialized.map(|ask| {
        // SAFETY: it may be called at any time.
        unsafe { ask() }
    });
    if matches!(known, Some(ibv_fork_status::IBV_FORK_UNNEEDED | ibv_fork_status::IBV_FORK_ENABLED)) {
        return;
    }
    // SAFETY: it may be called at any time, and refuses when it is too late.
    let errno = unsafe { verbs.ibv_fork_init() };
    if errno != 0 {
        tracing::debug!(errno, "a fork of this process may break registered memory");
    }
}

/// An open device, closed when this is dropped.
struct Context {
    verbs: &'static Verbs,
    context: NonNull<ibv_context>,
    name: String,
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: opened once, closed once; nothing was made on it.
        unsafe { self.verbs.ibv_close_device(self.context.as_ptr()) };
    }
}

impl Context {
    fn attr(&self) -> Result<ibv_device_attr> {
        let mut attr = ibv_device_attr::zeroed();
        // SAFETY: the device is open; a place for the answer.
        let errno = unsafe { self.verbs.ibv_query_device(self.context.as_ptr(), &raw mut attr) };
        if errno == 0 { Ok(attr) } else { Err(failed("ibv_query_device", &self.name, &Call::Other, errno)) }
    }

    /// Its ports, and whether addresses of each are always global.
    fn ports(&self) -> Result<Vec<(Port, bool)>> {
        let mut gids = self.gids(&mut Vec::new());
        let count = self.attr()?.phys_port_cnt;
        let ports = (1..=count).map(|number| {
            let mut attr = ibv_port_attr::zeroed();
            // SAFETY: the device is open.
            let errno = unsafe { self.verbs.query_port(self.context.as_ptr(), number, &mut attr) };
            if errno != 0 {
                return Err(failed("ibv_query_port", &self.name, &Call::Other, errno));
            }
            let link = match attr.link_layer {
                ibv_link_layer::IBV_LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
                // Devices of before RoCE do not tell.
                _ => LinkLayer::InfiniBand,
            };
            let own = gids.extract_if(.., |(port, _)| *port == u32::from(number)).map(|(_, gid)| gid);
            let mtu = u8::try_from(attr.active_mtu.0).ok().and_then(crate::verbs::mtu_bytes);
            let state = PortState(u8::try_from(attr.state.0).unwrap_or(0));
            let port = Port { number, state, link, lid: attr.lid, mtu, gids: own.collect() };
            Ok((port, attr.flags.contains(ibv_port_flags::IBV_QPF_GRH_REQUIRED)))
        });
        ports.collect()
    }

    /// The entries of its GID tables, by port.
    fn gids(&self, room: &mut Vec<ibv_gid_entry>) -> Vec<(u32, GidEntry)> {
        room.resize(4096, ibv_gid_entry::zeroed());
        // SAFETY: the device is open.
        let count = unsafe { self.verbs.query_gid_table(self.context.as_ptr(), room) };
        match count.map(usize::try_from) {
            Ok(Ok(count)) => {
                let entry = |entry: &ibv_gid_entry| {
                    let kind = match entry.gid_type {
                        ibv_gid_type::IBV_GID_TYPE_IB | ibv_gid_type::IBV_GID_TYPE_ROCE_V1 => {
                            GidKind::IbOrRoceV1
                        }
                        ibv_gid_type::IBV_GID_TYPE_ROCE_V2 => GidKind::RoceV2,
                        _ => GidKind::Unknown,
                    };
                    // SAFETY: all bytes of the union are plain.
                    let gid = Gid(unsafe { entry.gid.raw });
                    (entry.port_num, GidEntry { index: entry.gid_index, gid, kind })
                };
                room.iter().take(count).map(entry).collect()
            }
            // Before rdma-core 32.
            _ => {
                let ports = Class::of(Path::new(SYSFS), &self.name).map(|class| class.ports());
                let of = |port: Port| port.gids.into_iter().map(move |gid| (u32::from(port.number), gid));
                ports.into_iter().flatten().flat_map(of).collect()
            }
        }
    }
}

impl Open {
    /// Opens the device called `name`.
    ///
    /// # Errors
    /// [`Error::Library`], [`Error::NoDevice`], [`Error::Verbs`]; [`Error::Device`] where no port can be used.
    pub(crate) fn device(name: &str, config: &DeviceConfig) -> Result<Arc<Self>> {
        config.check()?;
        let list = List::get()?;
        let Some(listed) = list.devices().find(|listed| listed.name() == name) else {
            let names: Vec<_> = list.devices().map(|listed| listed.name()).collect();
            return Err(Error::NoDevice { name: name.to_owned(), available: names.join(", ") });
        };
        let unusable = |why: String| Error::Device { device: name.to_owned(), why };
        if listed.is_iwarp() {
            let why =
                "it speaks iWARP, whose connections only librdmacm makes: use an InfiniBand or RoCE device";
            return Err(unusable(why.into()));
        }
        let context = listed.open()?;
        let attr = context.attr()?;
        let (port, needs_grh) = choose_port(context.ports()?, config.port).map_err(unusable)?;
        let gid = choose_gid(&port, config.gid_index).map_err(unusable)?;
        let Context { verbs, context: raw, ref name } = context;
        let name = name.clone();
        // The value below closes it.
        std::mem::forget(context);
        let open = Self { verbs, context: raw, name, attr, port, gid, needs_grh, config: config.clone() };
        tracing::debug!(device = %open.name, port = open.port.number, gid = %gid.gid, index = gid.index, "opened");
        Ok(Arc::new(open))
    }

    pub(crate) fn verbs(&self) -> &'static Verbs {
        self.verbs
    }

    pub(crate) fn context(&self) -> NonNull<ibv_context> {
        self.context
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Whether libmlx5 drives it.
    pub(crate) fn is_mlx5(&self, mlx5: &Mlx5) -> bool {
        // SAFETY: the device is open.
        let device = unsafe { (*self.context.as_ptr()).device };
        // SAFETY: the device of an open context.
        unsafe { mlx5.mlx5dv_is_supported(device) }
    }

    /// The limits of the device.
    pub(crate) fn attr(&self) -> &ibv_device_attr {
        &self.attr
    }

    /// The port that is used.
    pub(crate) fn port(&self) -> &Port {
        &self.port
    }

    /// The GID that is used.
    pub(crate) fn gid(&self) -> GidEntry {
        self.gid
    }

    /// The index of the GID, as queue pairs name it.
    pub(crate) fn gid_index(&self) -> u8 {
        u8::try_from(self.gid.index).expect("only such entries are chosen")
    }

    pub(crate) fn needs_grh(&self) -> bool {
        self.needs_grh
    }

    pub(crate) fn config(&self) -> &DeviceConfig {
        &self.config
    }

    /// Where a peer finds a queue pair of this port.
    pub(crate) fn address(&self, qpn: u32, psn: u32) -> QpAddress {
        let lid = if self.port.link == LinkLayer::InfiniBand { self.port.lid } else { 0 };
        QpAddress { mtu: self.port.mtu, ..QpAddress::new(self.gid.gid, qpn, psn).with_lid(lid) }
    }

    /// What packets travel over, for reports.
    pub(crate) fn link(&self) -> String {
        match (self.port.link, self.gid.kind) {
            (LinkLayer::Ethernet, GidKind::RoceV2) => "RoCE v2".into(),
            (LinkLayer::Ethernet, GidKind::IbOrRoceV1) => "RoCE v1".into(),
            (link, _) => link.to_string(),
        }
    }

    /// Allocates a protection domain.
    pub(crate) fn alloc_pd(self: &Arc<Self>) -> Result<Domain> {
        // SAFETY: the device is open.
        let pd = unsafe { self.verbs.ibv_alloc_pd(self.context.as_ptr()) };
        let pd = NonNull::new(pd).ok_or_else(|| failed_last("ibv_alloc_pd", &self.name, &Call::Other))?;
        Ok(Domain { open: self.clone(), pd })
    }
}

/// A protection domain, freed when this is dropped: after all that was made in it.
pub(crate) struct Domain {
    open: Arc<Open>,
    pd: NonNull<ibv_pd>,
}

// SAFETY: libibverbs may be called from any thread.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "protection domain of {:?}", self.open)
    }
}

impl Domain {
    pub(crate) fn open(&self) -> &Arc<Open> {
        &self.open
    }

    pub(crate) fn raw(&self) -> NonNull<ibv_pd> {
        self.pd
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: allocated here, freed once.
        let errno = unsafe { self.open.verbs.ibv_dealloc_pd(self.pd.as_ptr()) };
        if errno != 0 {
            tracing::debug!(device = %self.open.name, errno, "a protection domain was not freed");
        }
    }
}

/// The port to use: the one asked for, or the first that packets can leave. Otherwise why none can be used.
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

/// The GID to use: the one asked for, or the best. Otherwise why there is none.
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
    use super::*;

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
    fn the_first_usable_port_is_taken_or_the_one_asked_for() {
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
    fn the_best_gid_is_taken_or_the_one_asked_for() {
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
