//! What a forked child may do: nothing, and without harm to its parent.

use gdrcopy::{BackendKind, Error, PinFlags, Result};

use crate::rig::{End, each, in_child, peek, poke};

const NONE: PinFlags = PinFlags::empty();

fn is_foreign<T>(result: Result<T>) -> bool {
    matches!(result, Err(Error::OtherProcess { .. }))
}

#[test]
fn a_child_can_do_nothing_with_its_parents_values() {
    each(|rig, backend| {
        let memory = backend.allocate(0, 65_536).unwrap();
        let pin = backend.pin(memory.addr(), 65_536, NONE).unwrap();
        let end = in_child(|| {
            is_foreign(backend.pin(memory.addr(), 1, NONE))
                && is_foreign(backend.allocate(0, 1))
                && is_foreign(memory.write(0, b"x"))
                && is_foreign(memory.read(0, &mut [0]))
                && is_foreign(pin.map(1, None))
        });
        assert_eq!(end, End::Said(true), "{}", backend.kind());
        assert_eq!(peek(&pin.map(1, None).unwrap(), 0, 1), [0]);
        drop(pin);
        assert_eq!(rig.device.live_pins(), 0);
    });
}

#[test]
fn a_childs_drops_leave_the_parents_values_alone() {
    each(|rig, backend| {
        let memory = backend.allocate(0, 65_536).unwrap();
        let pin = backend.pin(memory.addr(), 65_536, NONE).unwrap();
        let range = pin.map(65_536, None).unwrap();
        let (addr, is_host) = (memory.addr(), backend.kind() == BackendKind::Host);
        // Moved into the child's copy of the closure, which it drops; the parent's copy stays with the parent.
        let values = std::cell::Cell::new(Some((range, pin, memory, backend)));
        let end = in_child(|| {
            let before = rig.device.requests();
            drop(values.take());
            // The driver was asked for nothing, and CUDA neither.
            let there = rig.machine.memory.lock().find(addr).is_some();
            rig.device.requests() == before && there != is_host
        });
        assert_eq!(end, End::Said(true));
        let (range, pin, memory, backend) = values.take().unwrap();
        poke(&range, 9, b"parent");
        let mut seen = [0; 6];
        memory.read(9, &mut seen).unwrap();
        assert_eq!(&seen, b"parent", "{}", backend.kind());
        drop(range);
        drop(memory);
        pin.unpin().unwrap();
        assert_eq!(rig.device.live_pins(), 0);
    });
}

#[test]
fn a_child_cannot_unpin() {
    each(|_, backend| {
        let memory = backend.allocate(0, 65_536).unwrap();
        let pin = std::cell::Cell::new(Some(backend.pin(memory.addr(), 65_536, NONE).unwrap()));
        assert_eq!(in_child(|| pin.take().is_some_and(|pin| is_foreign(pin.unpin()))), End::Said(true));
        assert!(pin.take().unwrap().map(1, None).is_ok(), "{}", backend.kind());
    });
}

#[test]
fn a_child_has_a_hole_where_its_parent_has_a_mapping() {
    each(|_, backend| {
        let memory = backend.allocate(0, 65_536).unwrap();
        let pin = backend.pin(memory.addr(), 65_536, NONE).unwrap();
        let range = pin.map(65_536, None).unwrap();
        let end = in_child(|| peek(&range, 0, 1) == [0]);
        assert_eq!(end, End::Killed(libc::SIGSEGV), "{}", backend.kind());
        assert_eq!(peek(&range, 0, 1), [0]);
    });
}
