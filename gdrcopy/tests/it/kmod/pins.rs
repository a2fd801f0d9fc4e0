//! Pins: what they take, what they refuse, and their handles.

use super::rig::{Failing, Machine, Memory, Raw, counter, is_persistent};
use crate::gdrdrv_abi::{GetCallbackFlag, GetInfo, GetInfoV2, PinBuffer, PinBufferV2, ReqMappingType};
use gdsync_testkit::kmod::{self, CHUNK, Fault, Object};

const SIZE: u64 = 5 * CHUNK;

#[test]
fn both_requests_pin_and_both_infos_tell() {
    let Some(_machine) = Machine::new() else { return };
    let raw = Raw::open();
    let memory = Memory::new(SIZE);
    for handle in [raw.pin(memory.va, SIZE).unwrap(), raw.pin_v1(memory.va, SIZE).unwrap()] {
        let info = raw.info(handle).unwrap();
        assert_eq!((info.va, info.mapped_size, info.page_size), (memory.va, SIZE, 65536));
        assert_eq!((info.handle, info.mapping_type, info.pad), (handle, 0, 0));
        assert!(!cfg!(target_arch = "x86_64") || (info.tm_cycles > 0 && info.tsc_khz > 0), "{info:?}");
        let mut old = GetInfo { handle, ..Default::default() };
        raw.call(&mut old).unwrap();
        assert_eq!((old.va, old.mapped_size, old.page_size), (memory.va, SIZE, 65536));
        assert_eq!((old.mapped, old.wc_mapping), (0, 0));
        assert_eq!(raw.flag(handle), Ok(0));
    }
    assert_eq!((counter("pins"), counter("pinned_bytes"), counter("driver_page_tables")), (2, 2 * SIZE, 2));
    // Closing unpins.
    drop(raw);
    assert_eq!(kmod::state().unwrap().pins, 0);
}

#[test]
fn any_address_is_pinned_in_whole_pages_of_the_gpu() {
    let Some(_machine) = Machine::new() else { return };
    let raw = Raw::open();
    let memory = Memory::new(SIZE);
    for (offset, size, first, pages) in [
        (0, 1, 0, 1),
        (1, 1, 0, 1),
        (65_535, 2, 0, 2),
        (65_536, 65_536, 1, 1),
        (70_000, 200_000, 1, 4),
        (0, SIZE, 0, 5),
    ] {
        let handle = raw.pin(memory.va + offset, size).unwrap();
        let info = raw.info(handle).unwrap();
        assert_eq!(
            (info.va, info.mapped_size),
            (memory.va + first * CHUNK, pages * CHUNK),
            "{size} at {offset}"
        );
        // As ever: only what was asked for from the start of a page can be mapped.
        assert_eq!(
            raw.map(handle, CHUNK).map(drop),
            if offset % CHUNK == 0 { Ok(()) } else { Err(libc::EINVAL) }
        );
        raw.unpin(handle).unwrap();
    }
}

#[test]
fn several_allocations_side_by_side_are_one_range() {
    let Some(_machine) = Machine::new() else { return };
    let raw = Raw::open();
    let memory = Memory::new(2 * CHUNK);
    let next = Object::new(CHUNK, kmod::Backing::Ram).unwrap();
    next.show(memory.va + 2 * CHUNK, 0, CHUNK).unwrap();
    memory.write(2 * CHUNK - 1, b"a");
    std::os::unix::fs::FileExt::write_all_at(next.file(), b"b", 0).unwrap();
    let handle = raw.pin(memory.va, 3 * CHUNK).unwrap();
    let map = raw.map(handle, 3 * CHUNK).unwrap();
    assert_eq!(map.bytes(131_071..131_073), b"ab");
}

#[test]
fn bad_ranges_and_flags_are_einval() {
    let Some(_machine) = Machine::new() else { return };
    let raw = Raw::open();
    let memory = Memory::new(SIZE);
    let va = memory.va;
    let ranges = [
        (0, 1),
        (0, 0),
        (va, 0),
        (u64::MAX, 1),
        (u64::MAX, u64::MAX),
        (va, u64::MAX),
        // More pages than the driver can count.
        (va, 1 << 48),
        (va, 1 << 62),
        (va, u64::MAX - va),
        (u64::MAX - 65_535, 1),
        (va - 1, 1),
        (va - 1, 2),
        (va + SIZE, 1),
        (va, SIZE + 1),
        (1, 1),
    ];
    for (addr, size) in ranges {
        assert_eq!(raw.pin(addr, size), Err(libc::EINVAL), "{size:#x} at {addr:#x}");
        assert_eq!(raw.pin_v1(addr, size), Err(libc::EINVAL), "{size:#x} at {addr:#x}");
    }
    for bit in 1..32 {
        let mut request = PinBufferV2 { addr: va, size: 1, flags: 1 << bit, ..Default::default() };
        assert_eq!(raw.call(&mut request), Err(libc::EINVAL), "flag {bit}");
    }
    let forced = raw.call(&mut PinBufferV2 { addr: va, size: 1, flags: 1, ..Default::default() });
    assert_eq!(forced, if raw.attribute(2) == Ok(1) { Ok(()) } else { Err(libc::EINVAL) });
    // Tokens are for drivers that pin for others.
    for (p2p_token, va_space) in [(1, 0), (0, 1), (u64::MAX, u32::MAX)] {
        let mut request = PinBuffer { addr: va, size: 1, p2p_token, va_space, ..Default::default() };
        assert_eq!(raw.call(&mut request).is_ok(), !is_persistent(), "{p2p_token} {va_space}");
    }
}

/// The original gave the last pin of the file instead.
#[test]
fn an_unknown_handle_is_nobody_elses() {
    let Some(_machine) = Machine::new() else { return };
    let (raw, other) = (Raw::open(), Raw::open());
    let memory = Memory::new(SIZE);
    let foreign = other.pin(memory.va, SIZE).unwrap();
    let gone = raw.pin(memory.va, SIZE).unwrap();
    let kept = raw.pin(memory.va, SIZE).unwrap();
    let map = raw.map(kept, SIZE).unwrap();
    raw.unpin(gone).unwrap();
    let beyond = raw.pin(memory.va, SIZE).unwrap();
    raw.unpin(beyond).unwrap();
    for handle in [gone, kept + 1, beyond, u64::MAX, u64::MAX >> 12, kept ^ 1 << 32, 1 << 63] {
        assert_eq!(raw.unpin(handle), Err(libc::EINVAL), "{handle:#x}");
        assert_eq!(raw.call(&mut GetCallbackFlag { handle, ..Default::default() }), Err(libc::EINVAL));
        assert_eq!(raw.call(&mut GetInfo { handle, ..Default::default() }), Err(libc::EINVAL));
        assert_eq!(raw.call(&mut GetInfoV2 { handle, ..Default::default() }), Err(libc::EINVAL));
        assert_eq!(raw.call(&mut ReqMappingType { handle, ..Default::default() }), Err(libc::EINVAL));
        if handle < 1 << 50 {
            assert_eq!(raw.map(handle, CHUNK).map(drop), Err(libc::EINVAL), "{handle:#x}");
        }
    }
    map.store(0, 7);
    assert_eq!(memory.read(0, 1), [7]);
    assert_eq!(other.info(foreign).unwrap().mapped_size, SIZE);
}

#[test]
fn handles_are_disjoint_page_offsets_and_never_come_back() {
    let Some(_machine) = Machine::new() else { return };
    let raw = Raw::open();
    let memory = Memory::new(SIZE);
    let first: u64 = std::fs::read_to_string("/sys/module/gdrdrv/parameters/first_handle")
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    let mut next = first;
    for pages in [1, 5, 2, 1, 3] {
        let handle = raw.pin(memory.va, pages * CHUNK).unwrap();
        assert_eq!(handle, next);
        next += pages * CHUNK / 4096;
        raw.unpin(handle).unwrap();
        assert_eq!(raw.unpin(handle), Err(libc::EINVAL));
    }
    // Of another file they begin anew.
    assert_eq!(Raw::open().pin(memory.va, 1), Ok(first));
}

#[test]
fn of_many_threads_one_unpins() {
    let Some(_machine) = Machine::new() else { return };
    let raw = Raw::open();
    let memory = Memory::new(SIZE);
    for _ in 0..50 {
        let handle = raw.pin(memory.va, SIZE).unwrap();
        let unpinned = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| raw.unpin(handle))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).filter(Result::is_ok).count()
        });
        assert_eq!(unpinned, 1);
    }
}

#[test]
fn what_the_gpu_driver_refuses_is_passed_on_and_leaves_nothing() {
    let Some(_machine) = Machine::new() else { return };
    let raw = Raw::open();
    let memory = Memory::new(SIZE);
    let cases = [
        (Fault::Get, libc::ENOMEM, libc::ENOMEM),
        (Fault::Get, libc::EINVAL, libc::EINVAL),
        (Fault::Get, libc::EIO, libc::EIO),
        (Fault::Get, libc::EBUSY, libc::EBUSY),
        (Fault::Get, libc::ENODEV, libc::ENODEV),
        // The kernel's own number is not for programs; no errno at all neither.
        (Fault::Get, 524, libc::EOPNOTSUPP),
        (Fault::Get, 517, libc::EIO),
        (Fault::Get, 99_999, libc::EIO),
        (Fault::Get, -1, libc::EIO),
        (Fault::Version, 0x0003_0000, libc::EFAULT),
        (Fault::Version, 0x0000_0005, libc::EFAULT),
        (Fault::PageSize, 1, libc::EINVAL),
        (Fault::PageSize, 3, libc::EINVAL),
        (Fault::PageSize, 100, libc::EINVAL),
        (Fault::Entries, 1, libc::EIO),
        (Fault::Entries, -1, libc::EIO),
        (Fault::Misaligned, 1, libc::EIO),
        (Fault::NoTable, 1, libc::EIO),
    ];
    let before = kmod::state().unwrap();
    for (fault, value, expected) in cases {
        let failing = Failing::new(fault, value);
        assert_eq!(raw.pin(memory.va, SIZE), Err(expected), "{fault:?} {value}");
        assert_eq!(raw.pin_v1(memory.va, SIZE), Err(expected), "{fault:?} {value}");
        drop(failing);
        assert_eq!(kmod::state().unwrap(), before, "{fault:?} {value}");
        assert_eq!(counter("driver_page_tables"), 0);
    }
    for version in [0x0001_0002, 0x0001_0003, 0x0002_0000, 0x0002_0009] {
        let _failing = Failing::new(Fault::Version, version);
        raw.unpin(raw.pin(memory.va, SIZE).unwrap()).unwrap();
    }
    // It may keep the pages of an unpinned pin.
    let handle = raw.pin(memory.va, SIZE).unwrap();
    let _failing = Failing::new(Fault::Put, libc::EIO);
    raw.unpin(handle).unwrap();
    memory.free();
}
