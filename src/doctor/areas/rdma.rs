//! rdma-core, every RDMA device (card, firmware, link, addresses, rights), and the memory that may be locked for it.

use std::path::Path;
use std::ptr;

use gdsync::rdma::{GidKind, LinkLayer, Port};
use rustix::mm::{MapFlags, MlockFlags, ProtFlags, mlock_with, mmap_anonymous, munmap};
use rustix::process::{Resource, getrlimit};

use super::super::live::{DeviceFacts, Live};
use super::super::machine::{Hca, Machine, Node};
use super::super::requirements::{
    self, DEDICATED_UAR, DMA_BUF_MR, DMA_BUF_UMEM, INFINIBAND, LIBIBVERBS, LIBMLX5, LINUX, MELLANOX, ROCE_V1,
    ROCE_V2, needs, numbers,
};
use super::{Area, Check, Probe, bytes};

area! {
    RDMA_AREA "rdma" "RDMA devices" asks [Live::Verbs] probes by probe_rdma;
    CORE "rdma.core" tried "loading libibverbs.so.1, and the version in the name of its file",
        why "every RDMA device is reached through rdma-core; without it messages stay on this host";
    MLX5 "rdma.mlx5" tried "loading libmlx5.so.1, and the version in the name of its file",
        why "direct verbs of libmlx5 make rings that cards read and GPUs trigger";
    KERNEL "rdma.kernel" tried "/proc/sys/kernel/osrelease",
        why "older kernels take no dma-bufs for RDMA, so GPU memory needs nvidia-peermem there";
    CARD "rdma.card" tried "driver, PCI device number, firmware and board in sysfs; opening it by libibverbs",
        why "mlx5 cards read our rings themselves; to others a thread posts";
    LINK "rdma.link" tried "state, rate and link layer of each port in sysfs",
        why "queue pairs need a port with a link";
    GIDS "rdma.gids" tried "the GID table of each port in sysfs",
        why "both sides must use addresses of one kind that can be routed to each other";
    NODE "rdma.node" tried "access(2) to /dev/infiniband/uverbsN",
        why "devices are opened through these files";
    DEVX "rdma.devx" tried "mlx5dv_open_device with DevX",
        why "queues in GPU memory, and kernels that post by themselves, take commands of our own (DevX)";
}

fn probe_rdma(machine: &Machine) -> Vec<Probe> {
    let hcas = machine.hcas();
    let mut probes = vec![core(machine, &hcas), mlx5(machine, &hcas), kernel(machine, &hcas)];
    if hcas.is_empty() {
        let none = match machine.has_sysfs() {
            true => "the kernel has no RDMA device",
            false => "not known whether there is an RDMA device: /sys is not mounted",
        };
        probes.extend(RDMA_AREA.checks[3..].iter().map(|check| check.skip(none)));
    }
    for hca in &hcas {
        let told = machine.verbs.facts.devices.iter().find(|device| device.name == hca.name);
        let each = [
            card(machine, hca, told),
            link(machine, hca),
            gids(hca),
            node(machine, hca),
            devx(machine, hca, told),
        ];
        probes.extend(each.map(|probe| probe.about(&hca.name)));
    }
    probes
}

/// The version of rdma-core that a library's file is of: `libibverbs.so.1.14.44.0` is of 44.0.
fn version_of(file: &Path) -> Option<(u32, u32)> {
    let name = file.file_name()?.to_str()?;
    let numbers: Vec<u32> =
        name.split_once(".so.")?.1.split('.').map_while(|part| part.parse().ok()).collect();
    if let [_, _, major, minor] = numbers[..] { Some((major, minor)) } else { None }
}

fn core(machine: &Machine, hcas: &[Hca]) -> Probe {
    let facts = &machine.verbs.facts;
    let fix = "install libibverbs1 and ibverbs-providers (Debian, Ubuntu) or libibverbs (Fedora, RHEL), of rdma-core 34 or newer";
    let silent = "see whether `ibv_devinfo` answers, and `dmesg` for messages of the card's driver; try again with `--timeout 60`";
    let file = match (&facts.libibverbs, &machine.verbs.trouble) {
        (_, Some(trouble)) => return CORE.fail(trouble.as_str(), silent),
        (Some(Ok(file)), _) => file,
        (Some(Err(why)), _) if hcas.is_empty() => return CORE.skip(why.as_str()),
        (Some(Err(why)), _) => return CORE.fail(why.as_str(), fix),
        (None, _) => return CORE.fail("libibverbs was not asked", fix),
    };
    let version = version_of(file);
    let found = match version {
        Some((major, minor)) => format!("rdma-core {major}.{minor} ({})", file.display()),
        None => format!("{}, of a version that its name does not tell", file.display()),
    };
    match &facts.no_list {
        Some(why) if !hcas.is_empty() => CORE.fail(format!("{found}: {why}"), "load the module ib_uverbs"),
        _ if let Some(lack) = LIBIBVERBS.lack(&found, version) => CORE.fail(lack, fix),
        _ if !facts.dma_bufs => {
            let (what, least) = (DMA_BUF_MR.for_what(), DMA_BUF_MR.least());
            CORE.warn(format!("{found} cannot register dma-bufs ({what} needs {least})"), fix)
        }
        _ => CORE.ok(found),
    }
}

fn mlx5(machine: &Machine, hcas: &[Hca]) -> Probe {
    let has_card = hcas.iter().any(|hca| hca.is_mlx5(&machine.system));
    let fix =
        "install ibverbs-providers (Debian, Ubuntu) or libibverbs (Fedora, RHEL), of rdma-core 43 or newer";
    let file = match &machine.verbs.facts.libmlx5 {
        Some(Ok(file)) => file,
        Some(Err(why)) if has_card => return MLX5.warn(format!("{why}: a thread posts to the card"), fix),
        Some(Err(why)) => return MLX5.skip(why.as_str()),
        None => return MLX5.skip("libibverbs is not here"),
    };
    let (name, version) = (file.display(), version_of(file));
    match version.filter(|_| has_card) {
        _ if let Some(lack) = LIBMLX5.lack(&name, version) => MLX5.warn(lack, fix),
        Some(pair) if !DMA_BUF_UMEM.is_met(pair) => {
            let found = format!("{name} is older than {}: no queues in GPU memory", DMA_BUF_UMEM.least());
            MLX5.warn(found, fix)
        }
        Some(pair) if !DEDICATED_UAR.is_met(pair) => {
            let least = DEDICATED_UAR.least();
            MLX5.ok(format!(
                "{name}, older than {least}: queue pairs in GPU memory share a doorbell register"
            ))
        }
        _ => MLX5.ok(name.to_string()),
    }
}

fn kernel(machine: &Machine, hcas: &[Hca]) -> Probe {
    let release = machine.system.text("/proc/sys/kernel/osrelease").unwrap_or_default();
    let found = format!("{} {release}", LINUX.name);
    match numbers(&release) {
        None => KERNEL.skip("the release of the kernel cannot be read"),
        version if let Some(lack) = LINUX.lack(&found, version.filter(|_| !hcas.is_empty())) => {
            KERNEL.warn(lack, "use a newer kernel, or load nvidia-peermem")
        }
        Some(_) => KERNEL.ok(found),
    }
}

fn card(machine: &Machine, hca: &Hca, told: Option<&DeviceFacts>) -> Probe {
    let system = &machine.system;
    let of = |file: &str| system.text(&format!("/sys/class/infiniband/{}/{file}", hca.name));
    let number = |file: &str| {
        let text = of(&format!("device/{file}"))?;
        u16::from_str_radix(text.trim_start_matches("0x"), 16).ok()
    };
    let known = number("device").filter(|_| number("vendor") == Some(MELLANOX)).and_then(requirements::card);
    let driver = hca.driver(system).unwrap_or_else(|| "software".into());
    let mut found = known
        .as_ref()
        .map_or_else(|| format!("driver {driver}"), |card| format!("{}, driver {driver}", card.name));
    for (what, file) in [("firmware", "fw_ver"), ("board", "board_id")] {
        found += &of(file).map(|text| format!(", {what} {text}")).unwrap_or_default();
    }
    if let Some(place) = &hca.place {
        found += &format!(", at {}", place.address);
    }
    let is_direct = hca.is_mlx5(system) && known.is_none_or(|card| card.is_direct);
    found += if is_direct { ": it reads our rings" } else { ": a thread posts to it" };
    let wrong_link = known.filter(|card| {
        let has =
            |link, word| card.links.contains(word) || hca.class.ports().iter().all(|port| port.link != link);
        !has(LinkLayer::InfiniBand, "InfiniBand") || !has(LinkLayer::Ethernet, "RoCE")
    });
    match told.and_then(|device| device.open.as_ref()) {
        _ if let Some(card) = wrong_link => CARD.warn(
            format!("{found}; its ports should be {}", card.links),
            "update firmware and driver; this program may mistake the card",
        ),
        Some(Ok(())) => CARD.ok(found),
        Some(Err(why)) => {
            CARD.fail(format!("{found}; it does not open: {why}"), "see rdma.node, and `ibv_devinfo`")
        }
        None => {
            let why = machine.verbs.trouble.as_deref().unwrap_or("libibverbs does not list it");
            CARD.fail(
                format!("{found}; {why}"),
                "load ib_uverbs and the driver's RDMA half (`modprobe ib_uverbs mlx5_ib`); install its provider \
                 (ibverbs-providers); a container takes `--device /dev/infiniband`",
            )
        }
    }
}

fn link(machine: &Machine, hca: &Hca) -> Probe {
    if hca.class.is_iwarp() {
        return LINK.warn(
            "it speaks iWARP, which is not supported",
            "use an InfiniBand or RoCE device, or `GDSYNC_DEVICE=soft0`",
        );
    }
    let ports = hca.class.ports();
    let describe = |port: &Port| {
        let rate =
            machine.system.text(&format!("/sys/class/infiniband/{}/ports/{}/rate", hca.name, port.number));
        let rate = rate.map(|rate| format!(", {rate}")).unwrap_or_default();
        format!("port {} is {}, {}{rate}", port.number, port.state, port.link)
    };
    let found = ports.iter().map(describe).collect::<Vec<_>>().join("; ");
    let refusals: Vec<_> = ports.iter().filter(|port| !port.is_active()).filter_map(Port::refusal).collect();
    if ports.iter().any(Port::is_active) {
        return LINK.ok(found);
    }
    let fix =
        refusals.first().and_then(|text| text.split_once(": ")).map_or("check the cable", |(_, fix)| fix);
    LINK.warn(if found.is_empty() { "no port".into() } else { found }, fix)
}

fn gids(hca: &Hca) -> Probe {
    if hca.class.is_iwarp() {
        return GIDS.skip("iWARP is not supported");
    }
    let ports = hca.class.ports();
    let Some(port) = ports.iter().find(|port| port.is_active()) else {
        return GIDS.skip("no port has a link");
    };
    match port.best_gid() {
        None => {
            let fix = "give its network interface an address: `ip addr add ADDRESS/24 dev DEV`";
            GIDS.warn(format!("port {} has none", port.number), fix)
        }
        Some(_) if port.link == LinkLayer::InfiniBand && port.lid == 0 => GIDS.warn(
            format!("port {} has no LID: {} needs {}", port.number, INFINIBAND, needs(INFINIBAND)),
            "start a subnet manager (`opensm`) on one host of the network",
        ),
        Some(best) => {
            let (number, count, gid, index) = (port.number, port.gids.len(), best.gid, best.index);
            let is_link_local = gid.0[0] == 0xfe && gid.0[1] & 0xc0 == 0x80;
            let kind = match (port.link, best.kind) {
                (LinkLayer::InfiniBand, _) => INFINIBAND,
                (_, GidKind::IbOrRoceV1) => ROCE_V1,
                _ => ROCE_V2,
            };
            let found = format!("{count} at port {number}; {index} would be used: {gid} ({kind})");
            match port.link {
                LinkLayer::Ethernet if is_link_local || best.kind == GidKind::IbOrRoceV1 => GIDS.warn(
                    format!("{found}: peers must be in the same Ethernet segment"),
                    format!("give its network interface an address (`ip addr add ADDRESS/24 dev DEV`); {} needs {}", ROCE_V2, needs(ROCE_V2)),
                ),
                _ => GIDS.ok(found),
            }
        }
    }
}

fn node(machine: &Machine, hca: &Hca) -> Probe {
    let system = &machine.system;
    let is_its = |name: &String| {
        system.text(&format!("/sys/class/infiniband_verbs/{name}/ibdev")).as_ref() == Some(&hca.name)
    };
    let Some(name) = system.names("/sys/class/infiniband_verbs").into_iter().find(is_its) else {
        return NODE
            .fail("the kernel offers none for it", "load the module ib_uverbs (`modprobe ib_uverbs`)");
    };
    let path = format!("/dev/infiniband/{name}");
    match system.node(&path) {
        Node::Missing => NODE.fail(
            format!("{path} is missing"),
            "start the container with `--device /dev/infiniband`, and on the host's network (`--network host`); on a host look at \
             udev and rdma-core's rules",
        ),
        Node::Closed => NODE.fail(
            format!("{path} is closed to this user"),
            "install rdma-core, whose udev rule opens it to all, or `chmod 666` it; in a container pass it with `rw`",
        ),
        Node::Usable => NODE.ok(format!("{path} is open to this user")),
    }
}

fn devx(machine: &Machine, hca: &Hca, told: Option<&DeviceFacts>) -> Probe {
    match told.and_then(|device| device.devx.as_ref()) {
        _ if !hca.is_mlx5(&machine.system) => DEVX.skip("no mlx5 card"),
        Some(Ok(())) => DEVX.ok("allowed to this user"),
        Some(Err(why)) => DEVX.warn(
            format!("refused ({why}): no queues in GPU memory"),
            "set UCTX_EN=1 by `mlxconfig` and restart the card's firmware; some commands need CAP_NET_RAW",
        ),
        None => DEVX.skip("the device was not opened by libmlx5"),
    }
}

/// What limits the memory that network cards may use.
#[derive(Clone, Copy, Debug)]
pub(in crate::doctor) struct Limits {
    /// `RLIMIT_MEMLOCK` in bytes; `None` for no limit.
    pub(in crate::doctor) memlock: Option<u64>,
    /// Whether more than the limit could be locked, as with an effective `CAP_IPC_LOCK`; in a user namespace it has no effect.
    pub(in crate::doctor) is_lifted: bool,
}

area! {
    LIMITS_AREA "limits" "Limits" asks [] probes by |machine| vec![memlock(machine)];
    MEMLOCK "limits.memlock" tried "getrlimit(RLIMIT_MEMLOCK), and mlock of more than that",
        why "an RDMA device can only use memory that is locked: rings, buffers and registered regions count";
}

/// What a few queue pairs with their buffers take.
const NEEDED: u64 = 1 << 20;
/// What applications register without thinking.
const COMFORTABLE: u64 = 1 << 30;
const FIX: &str = "raise it: `ulimit -l unlimited`, `* - memlock unlimited` in /etc/security/limits.conf, \
                   LimitMEMLOCK=infinity of the service, or `--ulimit memlock=-1` of the container";

impl Limits {
    /// The limits of this process. Memory that is locked as a trial is unlocked again.
    pub(in crate::doctor) fn here() -> Self {
        let memlock = getrlimit(Resource::Memlock).current;
        let is_lifted = memlock.is_some_and(|limit| limit < COMFORTABLE && locks_more(limit));
        Self { memlock, is_lifted }
    }
}

/// Whether more than the limit can be locked.
fn locks_more(limit: u64) -> bool {
    let page = gdrcopy::host_page() as u64;
    let Ok(len) = usize::try_from(limit.next_multiple_of(page) + page) else { return false };
    let kind = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping wherever the kernel likes.
    let Ok(at) = (unsafe { mmap_anonymous(ptr::null_mut(), len, ProtFlags::empty(), kind) }) else {
        return false;
    };
    // SAFETY: the mapping made above. Its pages cannot be touched, so none is made when they are locked on fault.
    let locked = unsafe { mlock_with(at, len, MlockFlags::ONFAULT) };
    // SAFETY: the mapping made above; nothing uses it.
    let _ = unsafe { munmap(at, len) };
    locked.is_ok()
}

fn memlock(machine: &Machine) -> Probe {
    let Limits { memlock, is_lifted } = machine.limits;
    let Some(limit) = memlock else { return MEMLOCK.ok("no limit") };
    if is_lifted {
        return MEMLOCK.ok(format!("the limit of {} does not count: CAP_IPC_LOCK lifts it", bytes(limit)));
    }
    let found = format!("{} may be locked", bytes(limit));
    match limit {
        _ if machine.hcas().is_empty() => {
            MEMLOCK.ok(format!("{found}; there is no RDMA device that needs it"))
        }
        limit if limit < NEEDED => MEMLOCK.fail(format!("{found}, too little for queue pairs"), FIX),
        limit if limit < COMFORTABLE => {
            MEMLOCK.warn(format!("{found}, so larger buffers cannot be registered"), FIX)
        }
        _ => MEMLOCK.ok(found),
    }
}
