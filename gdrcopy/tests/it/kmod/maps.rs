//! Mappings of the module, and frees under volatile pins.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use gdsync_testkit::kmod::{self, Backing, CHUNK, Fault, counter};

use super::{Failing, Machine, Map, Mapped, Memory, Raw, backings, errno};
use crate::gdrdrv_abi::{GetInfo, ReqMappingType};
use crate::rig::{End, in_child, pattern};

const SIZE: u64 = 5 * CHUNK;
const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;
const WC: u32 = 1;
const CACHED: u32 = 2;

#[test]
fn both_sides_see_the_same_bytes() {
    let Some(_machine) = Machine::new() else { return };
    for backing in backings() {
        let raw = Raw::open();
        let memory = Memory::on(backing, SIZE).unwrap();
        let (old, new) = (pattern(1, 327_680), pattern(2, 327_680));
        memory.write(0, &old);
        let handle = raw.pin(memory.va, SIZE).unwrap();
        let map = raw.map(handle, SIZE).unwrap();
        assert!(map.bytes(0..map.len) == old, "{backing:?}");
        new.iter().enumerate().for_each(|(offset, byte)| map.store(offset, *byte));
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        assert!(memory.read(0, map.len) == new, "{backing:?}");
        let info = raw.info(handle).unwrap();
        assert_eq!(info.mapping_type, if backing == Backing::Ram { CACHED } else { WC });
        let mut old = GetInfo { handle, ..Default::default() };
        raw.call(&mut old).unwrap();
        assert_eq!((old.mapped, old.wc_mapping), (1, u32::from(backing == Backing::Bar)));
        map.unmap().unwrap();
        assert_eq!(raw.info(handle).unwrap().mapping_type, 0);
    }
}

#[test]
fn a_pin_is_mapped_again_in_any_length_up_to_its_own() {
    let Some((_machine, raw, memory)) = Machine::with_memory(SIZE) else { return };
    memory.write(0, &[9]);
    let handle = raw.pin(memory.va, SIZE).unwrap();
    for len in [1, 4096, 4097, CHUNK, SIZE - 1, SIZE] {
        let map = raw.map(handle, len).unwrap();
        assert_eq!(map.load(0), 9);
        map.load(map.len - 1);
    }
    assert_eq!(raw.map(handle, SIZE + 1).map(drop), Err(libc::EINVAL));
    assert_eq!(raw.map(handle, SIZE + CHUNK).map(drop), Err(libc::EINVAL));
    // The offset of a mapping is its handle and no other in the pin.
    for page in 1..SIZE / 4096 {
        assert_eq!(raw.map_as(handle + page, 4096, RW, libc::MAP_SHARED).map(drop), Err(libc::EINVAL));
    }
}

/// The original then took the mapping for gone, and did not take it away when the memory was freed.
#[test]
fn a_second_mapping_is_refused_and_the_first_unharmed() {
    let Some(_machine) = Machine::new() else { return };
    let Mapped { raw, memory, handle, map } = Mapped::new(Backing::Ram, SIZE).unwrap();
    for _ in 0..3 {
        assert_eq!(raw.map(handle, SIZE).map(drop), Err(libc::EINVAL));
        assert_eq!(raw.info(handle).unwrap().mapping_type, CACHED);
    }
    map.store(5, 3);
    assert_eq!(memory.read(5, 1), [3]);
    let other = raw.pin(memory.va, SIZE).unwrap();
    let second = raw.map(other, SIZE).unwrap();
    assert_eq!(second.load(5), 3);
}

#[test]
fn types_are_those_of_the_memory() {
    let Some(_machine) = Machine::new() else { return };
    let raw = Raw::open();
    for backing in backings() {
        let memory = Memory::on(backing, SIZE).unwrap();
        let handle = raw.pin(memory.va, SIZE).unwrap();
        let native = if backing == Backing::Ram { CACHED } else { WC };
        for mapping_type in 0..6 {
            let expected = match mapping_type {
                0 => Ok(()),
                wish if wish == native => Ok(()),
                1..=3 => Err(libc::EOPNOTSUPP),
                _ => Err(libc::EINVAL),
            };
            let mut request = ReqMappingType { handle, mapping_type, ..Default::default() };
            assert_eq!(raw.call(&mut request), expected, "{backing:?} {mapping_type}");
        }
        let map = raw.map(handle, SIZE).unwrap();
        assert_eq!(raw.info(handle).unwrap().mapping_type, native);
        let mut request = ReqMappingType { handle, mapping_type: native, ..Default::default() };
        assert_eq!(raw.call(&mut request), Err(libc::EBUSY));
        if backing == Backing::Bar {
            map.load(0);
            let list = std::fs::read_to_string("/sys/kernel/debug/x86/pat_memtype_list").unwrap();
            assert!(list.contains("write-combining"), "{list}");
        }
    }
}

#[test]
fn only_shared_mappings_that_are_not_executed() {
    let Some((_machine, raw, memory)) = Machine::with_memory(SIZE) else { return };
    let handle = raw.pin(memory.va, SIZE).unwrap();
    for (prot, flags) in [
        (RW, libc::MAP_PRIVATE),
        (libc::PROT_READ, libc::MAP_PRIVATE),
        (RW | libc::PROT_EXEC, libc::MAP_SHARED),
        (libc::PROT_EXEC, libc::MAP_SHARED),
    ] {
        assert_eq!(raw.map_as(handle, SIZE, prot, flags).map(drop), Err(libc::EINVAL), "{prot} {flags}");
    }
    let map = raw.map_as(handle, SIZE, libc::PROT_READ, libc::MAP_SHARED | libc::MAP_POPULATE).unwrap();
    assert_eq!(map.load(0), 0);
    assert_eq!(map.protect(0, map.len, libc::PROT_READ | libc::PROT_EXEC), Err(libc::EACCES));
    map.protect(0, map.len, RW).unwrap();
    map.store(0, 1);
    map.protect(0, map.len, libc::PROT_READ).unwrap();
    assert_eq!(memory.read(0, 1), [1]);
}

/// Each of these left pages mapped that the original had forgotten.
#[test]
fn no_part_is_unmapped_moved_grown_or_copied() {
    let Some(_machine) = Machine::new() else { return };
    let Mapped { raw, memory: _memory, handle, map } = Mapped::new(Backing::Ram, SIZE).unwrap();
    map.store(map.len - 1, 1);
    let page = 4096;
    for (offset, len) in [(0, page), (map.len - page, page), (page, page), (0, map.len - page)] {
        assert_eq!(map.unmap_part(offset, len), Err(libc::EINVAL), "{len} at {offset}");
        assert_eq!(map.protect(offset, len, libc::PROT_READ), Err(libc::EINVAL), "{len} at {offset}");
    }
    let maymove = libc::MREMAP_MAYMOVE;
    for (old, new, flags, fails) in [
        (map.len, map.len + page, 0, true),
        (map.len, map.len + page, maymove, true),
        (map.len, map.len - page, 0, true),
        (page, map.len, maymove, true),
        (0, map.len, maymove, true),
        (map.len, map.len, maymove, false),
    ] {
        // SAFETY: this test's own mapping, which the kernel leaves alone or releases as it was.
        let raw = unsafe { libc::mremap(map.ptr.as_ptr().cast(), old, new, flags) };
        assert_eq!(raw == libc::MAP_FAILED, fails, "{old} {new} {flags}");
    }
    // SAFETY: a new place, at which nothing else is.
    let room =
        unsafe { mmap_anonymous(std::ptr::null_mut(), map.len, ProtFlags::empty(), MapFlags::PRIVATE) }
            .unwrap();
    for flags in [0, libc::MREMAP_DONTUNMAP] {
        let flags = flags | maymove | libc::MREMAP_FIXED;
        // SAFETY: to a place of this test's own.
        let moved = unsafe { libc::mremap(map.ptr.as_ptr().cast(), map.len, map.len, flags, room) };
        assert_eq!(moved, libc::MAP_FAILED, "{flags}");
        let why = errno(&std::io::Error::last_os_error());
        assert!(matches!(why, libc::EINVAL | libc::EFAULT), "{why}");
    }
    for advice in [libc::MADV_DOFORK, libc::MADV_DODUMP] {
        // SAFETY: about the whole mapping.
        let done = unsafe { libc::madvise(map.ptr.as_ptr().cast(), map.len, advice) };
        assert_ne!(done, 0, "{advice}");
    }
    // It is where it was, is one mapping, and goes as a whole.
    assert_eq!(map.load(map.len - 1), 1);
    assert_eq!(raw.info(handle).unwrap().mapping_type, CACHED);
    assert_eq!(counter("mappings"), 1);
    raw.unpin(handle).unwrap();
    let (ptr, len) = (map.ptr, map.len);
    assert_eq!(in_child(|| Map { ptr, len }.load(0) == 0), End::Killed(libc::SIGSEGV));
}

#[test]
fn a_mapping_over_another_ends_all_of_it() {
    let Some(_machine) = Machine::new() else { return };
    let Mapped { raw, memory: _memory, handle, map } = Mapped::new(Backing::Ram, SIZE).unwrap();
    let (prot, flags) = (libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED);
    // SAFETY: over half of this test's own mapping.
    let over = unsafe { libc::mmap(map.ptr.as_ptr().cast(), (map.len / 2) & !4095, prot, flags, -1, 0) };
    assert_eq!(over, libc::MAP_FAILED);
    assert_eq!(raw.info(handle).unwrap().mapping_type, CACHED);
    // SAFETY: over all of it.
    let over = unsafe { libc::mmap(map.ptr.as_ptr().cast(), map.len, prot, flags, -1, 0) };
    assert_ne!(over, libc::MAP_FAILED);
    assert_eq!(raw.info(handle).unwrap().mapping_type, 0);
    drop(raw.map(handle, SIZE).unwrap());
}

#[test]
fn a_mapping_outlives_the_descriptor_but_not_the_pin() {
    let Some(_machine) = Machine::new() else { return };
    let Mapped { raw, memory, map, .. } = Mapped::new(Backing::Ram, SIZE).unwrap();
    drop(raw);
    map.store(77, 5);
    assert_eq!(memory.read(77, 1), [5]);
    map.unmap().unwrap();
    assert_eq!(counter("pins"), 0);

    // In a child, since it ends by a signal. What it opened goes with it.
    for touched in [true, false] {
        let end = in_child(|| {
            let Some(Mapped { raw, memory: _memory, handle, map }) = Mapped::new(Backing::Ram, SIZE) else {
                return false;
            };
            if touched {
                map.store(0, 1);
            }
            if raw.unpin(handle).is_err() {
                return false;
            }
            map.load(0) == 1
        });
        assert_eq!(end, End::Killed(libc::SIGBUS), "{touched}");
    }
}

#[test]
fn persistent_pins_keep_what_is_freed() {
    let Some(_machine) = Machine::with_persistence(true) else { return };
    for backing in backings() {
        let Mapped { raw, memory, handle, map } = Mapped::new(backing, SIZE).unwrap();
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
fn a_free_revokes_the_pages_and_sets_the_flag() {
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
                let Some(Mapped { raw, memory, handle, map }) = Mapped::new(backing, SIZE) else {
                    return false;
                };
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
fn concurrent_frees_and_unpins() {
    let Some(_machine) = Machine::with_persistence(false) else { return };
    let raw = Raw::open();
    for round in 0..300 {
        let memory = Memory::new(SIZE);
        let handles: Vec<_> = (0..3).map(|_| raw.pin(memory.va, SIZE).unwrap()).collect();
        let map = raw.map(handles[0], SIZE).unwrap();
        map.store(0, 1);
        let start = Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                start.wait();
                memory.free();
            });
            start.wait();
            handles.iter().for_each(|handle| raw.unpin(*handle).unwrap());
        });
        assert_eq!(counter("pins"), 0, "{round}");
    }
}
