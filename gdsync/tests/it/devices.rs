//! The RDMA devices of this machine: found, described, opened, and their failures explained. Without one, each test says so;
//! `tests/vm/run` has a machine with some, and `GDSYNC_LIBIBVERBS` can name a library that has one.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use gdsync::Device;
use gdsync::Error;
use gdsync::hca::Gid;
use gdsync::memory::Memory;
use gdsync::rdma::{DeviceConfig, LinkLayer, Route};
use gdsync::verbs::{Access, QpAddress, QpAttr, QpState};

/// The devices that can be used, the software HCA excepted.
fn usable() -> Vec<Device> {
    let found: Vec<_> =
        Device::list().into_iter().filter(|d| !d.is_software() && d.refusal().is_none()).collect();
    if found.is_empty() {
        println!("skipped: no RDMA device of this machine can be used");
    }
    found
}

/// The message of a call that must fail as RDMA devices do, which must hold all of `words`.
fn explained<T>(result: gdsync::Result<T>, words: &[&str]) {
    let Err(error) = result else { panic!("accepted, but expected an error with {words:?}") };
    let text = error.to_string();
    assert!(matches!(error, Error::Verbs { .. } | Error::Device { .. } | Error::Peer { .. }), "{error:?}");
    assert!(words.iter().all(|word| text.contains(word)), "'{text}' lacks one of {words:?}");
    println!("{text}");
}

#[test]
fn software_hca_is_always_listed_last() {
    let all = Device::list();
    let names: HashSet<_> = all.iter().map(Device::name).collect();
    assert_eq!(names.len(), all.len(), "{all:?}");
    let soft = all.last().unwrap();
    assert_eq!((soft.name(), soft.is_software(), soft.refusal()), ("soft0", true, None));
    assert!(soft.ports().is_empty() && soft.gpus().is_empty() && soft.pci_address().is_none());
    for device in all.iter().filter(|device| !device.is_software()) {
        println!(
            "{}: PCI {:?}, NUMA node {:?}, GPUs {:?}, {:?}, refused: {:?}",
            device.name(),
            device.pci_address(),
            device.numa_node(),
            device.gpus(),
            device.ports(),
            device.refusal()
        );
        assert_eq!(&Device::find(Some(device.name())).unwrap(), device);
    }
}

#[test]
fn what_is_preferred_can_be_used() {
    let preferred = Device::find(None).unwrap();
    assert_eq!(preferred.refusal(), None);
    assert_eq!(preferred.is_software(), usable().is_empty());
}

#[test]
fn what_is_refused_cannot_be_opened() {
    for device in Device::list() {
        if let Some(why) = device.refusal() {
            println!("{}: {why}", device.name());
            explained(device.open(), &["cannot be used"]);
        }
    }
}

#[test]
fn route_that_a_device_does_not_have_is_refused() {
    let mut config = DeviceConfig::default();
    for route in [Route::Direct, Route::Proxy] {
        config.route = Some(route);
        let error = Device::find(Some("soft0")).unwrap().open_with(&config).unwrap_err();
        for said in
            ["the path (GDSYNC_PATH, DeviceConfig::route) is", "needs an mlx5 card", "unset GDSYNC_PATH"]
        {
            assert!(error.to_string().contains(said), "{error}");
        }
    }
    config.route = Some(Route::Soft);
    for device in Device::list() {
        let context = device.open_with(&config).unwrap();
        assert_eq!((context.description(), context.not_direct()), ("software HCA", None));
    }
}

#[test]
fn open_device_tells_its_address() {
    for device in usable() {
        let context = device.open().unwrap();
        println!(
            "{}: {}, {}, {:?}",
            device.name(),
            context.description(),
            context.wire(),
            context.not_direct()
        );
        assert!(context.description().contains(device.name()));
        let pd = context.alloc_pd().unwrap();
        let address = pd.build_qp().build().unwrap().address();
        let port = device.ports().iter().find(|port| port.is_active()).unwrap();
        assert!(port.gids.iter().any(|entry| entry.gid == address.gid), "{address}");
        assert_eq!(address.gid, context.gid());
        assert!(address.mtu.is_some_and(|mtu| (256..=4096).contains(&mtu)), "{address}");
        assert_eq!(address.lid != 0, port.link == LinkLayer::InfiniBand);
    }
}

#[test]
fn every_gid_can_be_chosen_and_no_other() {
    for device in usable() {
        let port = device.ports().iter().find(|port| port.is_active()).unwrap();
        let mut config = DeviceConfig { port: Some(port.number), ..DeviceConfig::default() };
        for entry in port.gids.iter().take(4) {
            config.gid_index = Some(u8::try_from(entry.index).unwrap());
            assert_eq!(device.open_with(&config).unwrap().gid(), entry.gid);
        }
        let empty = (0..=255).find(|&index| port.gid(index).is_none()).unwrap();
        config.gid_index = Some(empty);
        let words = [&format!("entry {empty}"), "GDSYNC_GID_INDEX", &port.gids[0].gid.to_string()];
        explained(device.open_with(&config), &words);
        config = DeviceConfig { port: Some(200), ..DeviceConfig::default() };
        explained(device.open_with(&config), &["no port 200", "GDSYNC_PORT"]);
    }
}

#[test]
fn memory_that_cannot_be_locked_is_explained() {
    for device in usable() {
        let pd = device.open().unwrap().alloc_pd().unwrap();
        let len = 8192;
        let (none, flags) = (libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh mapping touches no existing memory.
        let raw = unsafe { libc::mmap(std::ptr::null_mut(), len, none, flags, -1, 0) };
        assert_ne!(raw, libc::MAP_FAILED);
        // SAFETY: it stays mapped, and nobody touches it: registering it fails.
        let memory = unsafe { Memory::from_raw(raw.cast(), len) }.unwrap();
        explained(pd.register(&memory, Access::LOCAL_WRITE), &["ibv_reg_mr", "8192 bytes", "mapped"]);
        // What can be is, and again after it was given back.
        let memory = Memory::alloc(len).unwrap();
        for _ in 0..3 {
            let mr = pd.register(&memory, Access::all()).unwrap();
            assert_ne!(mr.rkey(), 0);
        }
    }
}

#[test]
fn peer_that_is_nowhere_is_explained_soon() {
    for device in usable() {
        let pd = device.open().unwrap().alloc_pd().unwrap();
        let qp = pd.build_qp().build().unwrap();
        qp.init().unwrap();
        let own = qp.address();
        let rtr = |remote| {
            let attr = QpAttr::to(QpState::RTR).remote(remote).path_mtu(1024);
            qp.modify(&attr.max_dest_rd_atomic(1).min_rnr_timer(12))
        };
        let start = Instant::now();
        // 192.0.2.0/24 is for documentation; where a default route leads there, the packets are lost later.
        let mut nowhere = [0; 16];
        nowhere[10..].copy_from_slice(&[0xff, 0xff, 192, 0, 2, 1]);
        if rtr(QpAddress::new(Gid([0; 16]), 5, 5)).is_ok() {
            panic!("a peer without GID and LID was accepted");
        }
        match rtr(QpAddress::new(Gid(nowhere), 5, 5).with_lid(own.lid)) {
            Ok(()) => println!("{}: a route leads everywhere", device.name()),
            error => explained(error, &["GDSYNC_GID_INDEX"]),
        }
        assert!(start.elapsed() < Duration::from_secs(60));
        // It is left where it can be used.
        qp.modify(&QpAttr::to(QpState::RESET)).unwrap();
        qp.connect(qp.address()).unwrap();
    }
}
