//! Memory that is freed under its pins: kept by persistent ones, taken from the others.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::rig::{Failing, Machine, Memory, Raw, backings, counter};
use crate::rig::{End, in_child};
use gdsync_testkit::kmod::{self, CHUNK, Fault};

const SIZE: u64 = 5 * CHUNK;

#[test]
fn persistent_pins_keep_what_is_freed() {
    let Some(_machine) = Machine::with_persistence(true) else { return };
    for backing in backings() {
        let raw = Raw::open();
        let memory = Memory::on(backing, SIZE).unwrap();
        let handle = raw.pin(memory.va, SIZE).unwrap();
        let map = raw.map(handle, SIZE).unwrap();
        map.store(0, 1);
        memory.free();
        drop(memory);
        // Somebody else's memory is elsewhere.
        let other = Memory::on(backing, SIZE).unwrap();
        other.write(0, &[2; 100]);
        map.store(1, 3);
        assert_eq!(map.bytes(0..3), [1, 3, 0]);
        assert_eq!((raw.flag(handle), other.read(0, 2)), (Ok(0), vec![2, 2]));
        assert_eq!(raw.pin(other.va - 1, 1), Err(libc::EINVAL));
        drop(map);
        assert_eq!(raw.map(handle, SIZE).unwrap().load(1), 3);
        raw.unpin(handle).unwrap();
    }
}

#[test]
fn a_free_takes_the_pages_and_is_told() {
    let Some(_machine) = Machine::with_persistence(false) else { return };
    let raw = Raw::open();
    let (memory, other) = (Memory::new(SIZE), Memory::new(SIZE));
    let mapped = raw.pin(memory.va, SIZE).unwrap();
    let unmapped = raw.pin(memory.va + CHUNK, CHUNK).unwrap();
    let neighbour = raw.pin(other.va, SIZE).unwrap();
    let (map, kept) = (raw.map(mapped, SIZE).unwrap(), raw.map(neighbour, SIZE).unwrap());
    map.store(0, 1);
    kept.store(0, 2);
    assert_eq!((raw.flag(mapped), raw.flag(unmapped)), (Ok(0), Ok(0)));
    let revoked = counter("total_revoked");
    memory.free();
    assert_eq!((raw.flag(mapped), raw.flag(unmapped), raw.flag(neighbour)), (Ok(1), Ok(1), Ok(0)));
    assert_eq!(counter("total_revoked"), revoked + 2);
    assert_eq!(counter("driver_page_tables"), 1);
    assert_eq!(kept.load(0), 2);
    for handle in [mapped, unmapped] {
        assert_eq!(raw.map(handle, CHUNK).map(drop), Err(libc::EINVAL));
        raw.unpin(handle).unwrap();
    }
}

/// In children, as the signal ends them.
#[test]
fn an_access_after_the_free_is_sigbus() {
    let Some(_machine) = Machine::with_persistence(false) else { return };
    for backing in backings() {
        for (touched, refused, store) in [
            (true, false, false),
            (true, true, false),
            (true, true, true),
            (false, false, false),
            (false, false, true),
        ] {
            let end = in_child(|| {
                let (raw, Ok(memory)) = (Raw::open(), Memory::on(backing, SIZE)) else { return false };
                let Ok(handle) = raw.pin(memory.va, SIZE) else { return false };
                let Ok(map) = raw.map(handle, SIZE) else { return false };
                if touched {
                    map.store(map.len - 1, 1);
                }
                // A refused mapping made the original forget the first.
                if refused && raw.map(handle, SIZE).is_ok() {
                    return false;
                }
                memory.free();
                if store {
                    map.store(map.len - 1, 2);
                }
                map.load(map.len - 1) == 1
            });
            assert_eq!(end, End::Killed(libc::SIGBUS), "{backing:?} {touched} {refused} {store}");
        }
    }
}

/// The callback comes before the driver's call has returned.
#[test]
fn memory_freed_while_it_is_being_pinned() {
    let Some(_machine) = Machine::with_persistence(false) else { return };
    let raw = Raw::open();
    let _slow = Failing::new(Fault::Delay, 300);
    let memory = Memory::new(SIZE);
    let before = kmod::state().unwrap();
    std::thread::scope(|scope| {
        let pin = scope.spawn(|| raw.pin(memory.va, SIZE));
        let deadline = Instant::now() + Duration::from_secs(20);
        while kmod::state().unwrap().pins == before.pins {
            assert!(Instant::now() < deadline, "not pinned");
            std::thread::yield_now();
        }
        memory.free();
        let handle = pin.join().unwrap().unwrap();
        assert_eq!(raw.flag(handle), Ok(1));
        raw.unpin(handle).unwrap();
    });
    assert_eq!(kmod::state().unwrap().callbacks, before.callbacks + 1);
}

/// What the driver calls back with must live until then.
#[test]
fn a_driver_that_keeps_pages_calls_back_later() {
    let Some(_machine) = Machine::with_persistence(false) else { return };
    let (raw, memory) = (Raw::open(), Memory::new(SIZE));
    let handle = raw.pin(memory.va, SIZE).unwrap();
    let before = kmod::state().unwrap();
    let failing = Failing::new(Fault::Put, libc::EIO);
    raw.unpin(handle).unwrap();
    assert_eq!(raw.unpin(handle), Err(libc::EINVAL));
    drop((failing, raw));
    assert_eq!((counter("pins"), counter("driver_page_tables")), (0, 1));
    // Others take what room is free.
    let other = Raw::open();
    let handles: Vec<_> = (0..200).map(|_| other.pin(memory.va, 1).unwrap()).collect();
    handles.iter().for_each(|handle| other.unpin(*handle).unwrap());
    memory.free();
    assert_eq!(kmod::state().unwrap().callbacks, before.callbacks + 1);
    assert_eq!(counter("driver_page_tables"), 0);
}

#[test]
fn frees_and_unpins_meet() {
    let Some(_machine) = Machine::with_persistence(false) else { return };
    let raw = Raw::open();
    for round in 0..300 {
        let memory = Memory::new(SIZE);
        let handles: Vec<_> = (0..3).map(|_| raw.pin(memory.va, SIZE).unwrap()).collect();
        let map = raw.map(handles[0], SIZE).unwrap();
        map.store(0, 1);
        let go = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !go.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
                memory.free();
            });
            scope.spawn(|| {
                while !go.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
                handles.iter().for_each(|handle| raw.unpin(*handle).unwrap());
            });
            go.store(true, Ordering::Relaxed);
        });
        assert_eq!(counter("pins"), 0, "{round}");
    }
}
