//! Mapping types of the platforms that there are.

use gdrcopy::{Error, MappingType, PinFlags};
use gdsync_testkit::Module;

use crate::rig::{Backend, Rig};

use MappingType::{Cached, Device, WriteCombining};

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
