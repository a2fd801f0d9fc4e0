//! A module that takes mappings away when their memory is freed.

use gdrcopy::{Error, PinFlags};
use gdsync_testkit::Module;

use crate::rig::{Backend, End, Rig, in_child, peek};

const NONE: PinFlags = PinFlags::empty();
const VOLATILE: Module = Module {
    version: (2, 6),
    minimum_library: (2, 0),
    persistent: false,
    force_pcie: true,
    bar1: 1 << 30,
    mapping_type: gdrcopy::MappingType::WriteCombining,
};
/// More than the blocks that small allocations share and keep.
const SIZE: usize = 4 << 20;

#[test]
fn a_volatile_module_is_refused_with_the_fix() {
    for (version, fix) in [((2, 6), "use_persistent_mapping=1"), ((2, 4), "gdrdrv 2.5 or newer")] {
        let rig = Rig::new(Module { version, ..VOLATILE });
        let error = Backend::gdrdrv(&rig.system).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(fix) && text.contains("allow_volatile()"), "{text}");
        assert_eq!(rig.device.open_files(), 0);
    }
    // Persistent in fact, but it cannot say so.
    let rig = Rig::new(Module { version: (2, 4), persistent: true, ..VOLATILE });
    assert!(Backend::gdrdrv(&rig.system).is_err());
}

#[test]
fn a_free_sets_the_flag_and_prevents_mapping() {
    for version in [(2, 0), (2, 4), (2, 6)] {
        let rig = Rig::new(Module { version, ..VOLATILE });
        let gdrdrv = Backend::volatile_gdrdrv(&rig.system).unwrap();
        let (memory, other) = (gdrdrv.allocate(0, SIZE).unwrap(), gdrdrv.allocate(0, SIZE).unwrap());
        let pin = gdrdrv.pin(memory.addr(), SIZE, NONE).unwrap();
        let mapped = gdrdrv.pin(memory.addr(), SIZE, NONE).unwrap();
        let range = mapped.map(SIZE, None).unwrap();
        let neighbour = gdrdrv.pin(other.addr(), SIZE, NONE).unwrap();
        assert!(!pin.invalidated().unwrap());
        drop(memory);
        assert!(pin.invalidated().unwrap() && mapped.invalidated().unwrap());
        assert!(matches!(pin.map(SIZE, None), Err(Error::Invalidated)));
        // What was not freed goes on, and unmapping and unpinning work as ever.
        assert!(!neighbour.invalidated().unwrap());
        assert_eq!(peek(&neighbour.map(1, None).unwrap(), 0, 1), [0]);
        drop(range);
        mapped.unpin().unwrap();
        pin.unpin().unwrap();
    }
}

/// Maps, frees, and reads afterwards.
fn read_after_free(module: Module) -> End {
    in_child(|| {
        let rig = Rig::new(module);
        let Ok(gdrdrv) = Backend::volatile_gdrdrv(&rig.system) else { return false };
        let Ok(memory) = gdrdrv.allocate(0, SIZE) else { return false };
        let Ok(pin) = gdrdrv.pin(memory.addr(), SIZE, NONE) else { return false };
        let Ok(range) = pin.map(SIZE, None) else { return false };
        if memory.write(SIZE - 3, b"end").is_err() || peek(&range, SIZE - 3, 3) != b"end" {
            return false;
        }
        drop(memory);
        peek(&range, SIZE - 3, 3) == b"end"
    })
}

#[test]
fn access_to_freed_memory_raises_sigbus() {
    assert_eq!(read_after_free(VOLATILE), End::Killed(libc::SIGBUS));
    assert_eq!(read_after_free(Module::default()), End::Said(true));
}
