//! The gdrdrv backend against every version and mode of the simulated module.

mod errors;
mod requests;
mod volatile;

use MappingType::{Cached, Device, WriteCombining};
use gdrcopy::{Attribute, Error, MappingType, PinFlags};
use gdsync_testkit::Module;

use crate::rig::{Backend, Rig, peek, poke};

const NONE: PinFlags = PinFlags::empty();

/// Pins, maps and looks at both sides.
fn works(gdrdrv: &Backend) {
    let memory = gdrdrv.allocate(0, 200_000).unwrap();
    // Not at the start of a GPU page, which no version maps by itself.
    let pin = gdrdrv.pin(memory.addr() + 70_001, 100, NONE).unwrap();
    assert_eq!((pin.va(), pin.pinned_len()), (memory.addr() + 65_536, 65_536));
    assert_eq!(pin.page_size(), 65_536);
    for request in [None, Some(MappingType::WriteCombining)] {
        let range = pin.map(70_001 - 65_536 + 100, request).unwrap();
        assert_eq!(range.kind(), MappingType::WriteCombining);
        poke(&range, 70_001 - 65_536, b"word");
        let mut seen = [0; 4];
        memory.read(70_001, &mut seen).unwrap();
        assert_eq!(&seen, b"word");
    }
    let wish = pin.map(1, Some(MappingType::Cached));
    assert!(matches!(wish, Err(Error::Unsupported { .. })), "{wish:?}");
    assert!(!pin.invalidated().unwrap());
    assert_eq!(peek(&pin.map(1, None).unwrap(), 0, 1), [0]);
    pin.unpin().unwrap();
}

#[test]
fn all_of_them_pin_and_map() {
    for version in [(2, 0), (2, 3), (2, 4), (2, 5), (2, 6), (2, 9)] {
        for persistent in [false, true] {
            let rig = Rig::new(Module { version, persistent, ..Module::default() });
            let gdrdrv = Backend::volatile_gdrdrv(&rig.system).unwrap();
            assert_eq!(gdrdrv.driver_version(), Some(version));
            works(&gdrdrv);
            assert_eq!(rig.device.live_pins(), 0);
            let told = u32::from(persistent && version >= (2, 5));
            assert_eq!(gdrdrv.attribute(Attribute::UsePersistentMapping).unwrap(), told);
            assert_eq!(gdrdrv.attribute(Attribute::SupportPinFlagForcePcie).unwrap(), told);
            assert_eq!(gdrdrv.attribute(Attribute::UsingDmaBufMmap).unwrap(), 0);
        }
    }
}

#[test]
fn without_cuda_the_module_checks_the_range() {
    let rig = Rig::new(Module::default());
    let gdrdrv = Backend::gdrdrv(&rig.without_cuda()).unwrap();
    let addr = rig.machine.memory.lock().alloc(0, 100, gdrcopy::cuda::MemoryKind::Malloc).unwrap();
    let pin = gdrdrv.pin(addr, 100, NONE).unwrap();
    assert_eq!(peek(&pin.map(100, None).unwrap(), 0, 1), [0]);
    let refused = gdrdrv.pin(4096, 1, NONE).unwrap_err();
    assert_eq!(refused.errno(), libc::EINVAL);
    assert!(refused.to_string().contains("GPUDirect RDMA"), "{refused}");
    assert!(matches!(gdrdrv.allocate(0, 1), Err(Error::Unsupported { .. })));
}

#[test]
fn a_newer_module_without_newer_requests_gets_the_older_ones() {
    for errno in [libc::EINVAL, libc::ENOTTY, libc::EOPNOTSUPP] {
        let rig = Rig::new(Module::default());
        for request in ["pin v2", "info v2"] {
            rig.machine.fail(&format!("gdrdrv {request}"), errno);
        }
        if errno != libc::EOPNOTSUPP {
            rig.machine.fail("gdrdrv type", errno);
        }
        works(&Backend::gdrdrv(&rig.system).unwrap());
        assert_eq!(rig.device.live_pins(), 0);
    }
}

#[test]
fn a_failure_of_the_newer_request_is_not_hidden_by_the_older() {
    let rig = Rig::new(Module::default());
    let gdrdrv = Backend::gdrdrv(&rig.system).unwrap();
    let memory = gdrdrv.allocate(0, 64).unwrap();
    rig.machine.fail("gdrdrv pin v2", libc::ENOMEM);
    assert!(matches!(gdrdrv.pin(memory.addr(), 64, NONE), Err(Error::Exhausted { .. })));
    rig.machine.fail("gdrdrv pin v2", 0);
    rig.machine.fail("gdrdrv info v2", libc::EIO);
    assert_eq!(gdrdrv.pin(memory.addr(), 64, NONE).unwrap_err().errno(), libc::EIO);
    assert_eq!(rig.device.live_pins(), 0);
}

#[test]
fn force_pcie_needs_the_newer_pin() {
    for (module, good) in [
        (Module::default(), true),
        (Module { force_pcie: false, ..Module::default() }, false),
        (Module { persistent: false, ..Module::default() }, false),
        (Module { version: (2, 4), ..Module::default() }, false),
    ] {
        let rig = Rig::new(module);
        let gdrdrv = Backend::volatile_gdrdrv(&rig.system).unwrap();
        let memory = gdrdrv.allocate(0, 64).unwrap();
        match gdrdrv.pin(memory.addr(), 64, PinFlags::FORCE_PCIE) {
            Ok(_) => assert!(good, "{module:?}"),
            Err(Error::Unsupported { what, .. }) => assert!(!good && what == "FORCE_PCIE", "{module:?}"),
            Err(other) => panic!("{module:?}: {other}"),
        }
    }
}

/// What a platform gives, for each wish in turn on one pin.
fn maps(native: MappingType, version: (u16, u16), wishes: &[(Option<MappingType>, Option<MappingType>)]) {
    let rig = Rig::new(Module { mapping_type: native, version, ..Module::default() });
    let gdrdrv = Backend::volatile_gdrdrv(&rig.system).unwrap();
    let memory = gdrdrv.allocate(0, 65_536).unwrap();
    let pin = gdrdrv.pin(memory.addr(), 65_536, PinFlags::empty()).unwrap();
    for &(wish, expected) in wishes {
        match pin.map(1, wish) {
            Ok(range) => assert_eq!(Some(range.kind()), expected, "{native:?} {wish:?}"),
            Err(Error::Unsupported { .. }) => assert_eq!(expected, None, "{native:?} {wish:?}"),
            Err(other) => panic!("{native:?} {wish:?}: {other}"),
        }
    }
}

#[test]
fn a_coherent_link_is_cached_and_can_be_write_combined() {
    let wishes = [
        (None, Some(Cached)),
        (Some(WriteCombining), Some(WriteCombining)),
        // An earlier wish is taken back.
        (None, Some(Cached)),
        (Some(Device), None),
        (Some(Cached), Some(Cached)),
    ];
    maps(Cached, (2, 6), &wishes);
}

#[test]
fn some_arm_platforms_have_device_mappings_only() {
    let wishes = [(None, Some(Device)), (Some(WriteCombining), None), (Some(Device), Some(Device))];
    maps(Device, (2, 6), &wishes);
}

#[test]
fn older_modules_have_one_type() {
    maps(Cached, (2, 4), &[(Some(WriteCombining), None), (None, Some(Cached)), (Some(Cached), Some(Cached))]);
    maps(Device, (2, 4), &[(None, Some(Device)), (Some(Cached), None)]);
    maps(Cached, (2, 3), &[(Some(WriteCombining), None), (None, Some(Cached))]);
}
