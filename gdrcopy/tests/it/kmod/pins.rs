//! Requests of the module: numbers, pins, handles, owners, and the module without a GPU driver.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::ptr;
use std::time::{Duration, Instant};

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use gdsync_testkit::kmod::{self, Backing, CHUNK, Fault, Object, counter};

use super::{Failing, Machine, Map, Mapped, Memory, Raw, is_persistent};
use crate::gdrdrv_abi::{
    self as abi, GetAttr, GetCallbackFlag, GetInfo, GetInfoV2, GetVersion, PinBuffer, PinBufferV2, PinDmaBuf,
    ReqMappingType, Request, UnpinBuffer,
};
use crate::rig::{End, in_child};

const SIZE: u64 = 5 * CHUNK;

#[test]
fn both_requests_pin_and_both_infos_tell() {
    let Some((_machine, raw, memory)) = Machine::with_memory(SIZE) else { return };
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
    let Some((_machine, raw, memory)) = Machine::with_memory(SIZE) else { return };
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
    let Some((_machine, raw, memory)) = Machine::with_memory(2 * CHUNK) else { return };
    let next = Object::new(CHUNK, Backing::Ram).unwrap();
    next.show(memory.va + 2 * CHUNK, 0, CHUNK).unwrap();
    memory.write(2 * CHUNK - 1, b"a");
    std::os::unix::fs::FileExt::write_all_at(next.file(), b"b", 0).unwrap();
    let handle = raw.pin(memory.va, 3 * CHUNK).unwrap();
    let map = raw.map(handle, 3 * CHUNK).unwrap();
    assert_eq!(map.bytes(131_071..131_073), b"ab");
}

#[test]
fn bad_ranges_and_flags_are_einval() {
    let Some((_machine, raw, memory)) = Machine::with_memory(SIZE) else { return };
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
fn an_unknown_handle_is_refused() {
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
fn handles_are_disjoint_page_offsets_and_never_reused() {
    let Some((_machine, raw, memory)) = Machine::with_memory(SIZE) else { return };
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
fn one_of_many_threads_unpins() {
    let Some((_machine, raw, memory)) = Machine::with_memory(SIZE) else { return };
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
fn errors_of_the_gpu_driver_are_returned_and_leave_nothing() {
    let Some((_machine, raw, memory)) = Machine::with_memory(SIZE) else { return };
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

pub(super) const REQUESTS: [u32; 10] = [
    PinBuffer::CODE,
    UnpinBuffer::CODE,
    GetCallbackFlag::CODE,
    GetInfo::CODE,
    GetInfoV2::CODE,
    GetAttr::CODE,
    PinBufferV2::CODE,
    ReqMappingType::CODE,
    PinDmaBuf::CODE,
    GetVersion::CODE,
];

#[test]
fn version_and_attributes_are_those_of_gdrcopy_2_6() {
    let Some(_machine) = Machine::new() else { return };
    let raw = Raw::open();
    let mut version = GetVersion::default();
    raw.call(&mut version).unwrap();
    assert_eq!((version.driver, version.minimum_library), (0x0002_0006, 0x0002_0000));
    for attribute in [abi::ATTR_PERSISTENT, abi::ATTR_FORCE_PCIE] {
        assert!(raw.attribute(attribute).unwrap() <= 1);
    }
    for unknown in [0, 3, 4, 0xfff, u32::MAX] {
        assert_eq!(raw.attribute(unknown), Err(libc::EINVAL), "{unknown}");
    }
    assert!(raw.attribute(abi::ATTR_EXTENSIONS).unwrap() <= 1);
}

#[test]
fn procfs_files_of_gdrcopy_exist() {
    let Some(_machine) = Machine::new() else { return };
    let devices = std::fs::read_to_string("/proc/devices").unwrap();
    assert!(devices.lines().any(|line| line.trim().ends_with(" gdrdrv")), "{devices}");
    let params = std::fs::read_to_string("/proc/driver/gdrdrv/params").unwrap();
    for line in ["Version: 2.6", "Use persistent mapping: ", "dbg_enabled: 0", "info_enabled: 0"] {
        assert!(params.lines().any(|found| found.starts_with(line)), "{line}: {params}");
    }
    assert_eq!(std::fs::read_to_string("/proc/driver/gdrdrv/nv_get_pages_refcount").unwrap(), "0\n");
}

#[test]
fn unknown_numbers_are_enotty_and_other_types_einval() {
    let Some(_machine) = Machine::new() else { return };
    let raw = Raw::open();
    let mut room = [0_u64; 64];
    for (magic, expected) in
        [(0xDA, libc::ENOTTY), (0xD9, libc::EINVAL), (0xDB, libc::EINVAL), (0x47, libc::EINVAL)]
    {
        for nr in 0..=0xff {
            for high in [0xC008_0000, 0, 0xC001_0000, 0x8028_0000, 0xFFFF_0000_u32] {
                let code = high | magic << 8 | nr;
                if !REQUESTS.contains(&code) {
                    assert_eq!(raw.ioctl(code, room.as_mut_ptr().cast()), Err(expected), "{code:#x}");
                }
            }
        }
    }
}

#[test]
fn addresses_that_are_no_memory_are_efault() {
    let Some(_machine) = Machine::new() else { return };
    let raw = Raw::open();
    for code in REQUESTS {
        for bad in [
            ptr::null_mut(),
            ptr::without_provenance_mut(0xFFFF_8000_0000_0000),
            ptr::without_provenance_mut(8),
        ] {
            assert_eq!(raw.ioctl(code, bad), Err(libc::EFAULT), "{code:#x}");
        }
    }
}

/// A page that can be read only, with a request in it.
fn read_only<R: Request>(request: R) -> *mut R {
    let (len, prot) = (4096, ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: a new mapping; it stays until the process ends.
    let page = unsafe { mmap_anonymous(ptr::null_mut(), len, prot, MapFlags::PRIVATE) }.unwrap();
    // SAFETY: room for it, aligned.
    unsafe { page.cast::<R>().write(request) };
    // SAFETY: this test's own page.
    unsafe { mprotect(page, len, MprotectFlags::READ) }.unwrap();
    page.cast()
}

#[test]
fn an_answer_that_cannot_be_delivered_undoes_the_pin() {
    let Some((_machine, raw, memory)) = Machine::with_memory(1 << 20) else { return };
    let (addr, size) = (memory.va, memory.len);
    let old = read_only(PinBuffer { addr, size, ..Default::default() });
    assert_eq!(raw.ioctl(PinBuffer::CODE, old.cast()), Err(libc::EFAULT));
    let new = read_only(PinBufferV2 { addr, size, ..Default::default() });
    assert_eq!(raw.ioctl(PinBufferV2::CODE, new.cast()), Err(libc::EFAULT));
    assert_eq!(counter("pins"), 0);
    // What needs no answer works from there.
    let handle = raw.pin(addr, size).unwrap();
    raw.ioctl(UnpinBuffer::CODE, read_only(UnpinBuffer { handle }).cast()).unwrap();
}

#[test]
fn pins_of_addresses_are_enodev_and_all_else_works() {
    if std::env::var("GDRCOPY_TEST_KMOD_DRIVER").as_deref() != Ok("none") {
        println!("skipped: GDRCOPY_TEST_KMOD_DRIVER does not say that there is none");
        return;
    }
    let raw = Raw::open();
    for _ in 0..100 {
        assert_eq!(raw.pin(1 << 40, 65536), Err(libc::ENODEV));
        assert_eq!(raw.pin_v1(1 << 40, 65536), Err(libc::ENODEV));
    }
    // What is wrong with the request is told first.
    assert_eq!(raw.pin(0, 65536), Err(libc::EINVAL));
    assert_eq!(raw.unpin(0), Err(libc::EINVAL));
    assert_eq!(raw.attribute(abi::ATTR_PERSISTENT), Ok(1));
}

const OWNED: u64 = 3 * CHUNK;

/// Every request, and a mapping.
fn everything_is_refused(raw: &Raw, handle: u64, va: u64) -> bool {
    let no = Err(libc::EACCES);
    raw.pin(va, CHUNK) == Err(libc::EACCES)
        && raw.pin_v1(va, CHUNK) == Err(libc::EACCES)
        && raw.unpin(handle) == no
        && raw.info(handle).map(drop) == no
        && raw.flag(handle).map(drop) == no
        && raw.attribute(1).map(drop) == no
        && raw.map(handle, CHUNK).map(drop) == no
}

#[test]
fn a_child_has_neither_mapping_nor_access() {
    let Some(_machine) = Machine::new() else { return };
    let Mapped { raw, memory, handle, map } = Mapped::new(Backing::Ram, OWNED).unwrap();
    map.store(0, 1);
    assert_eq!(in_child(|| everything_is_refused(&raw, handle, memory.va)), End::Said(true));
    assert_eq!(in_child(|| map.load(0) == 1), End::Killed(libc::SIGSEGV));
    // What the child opens itself is its own.
    let end = in_child(|| {
        let Some(Mapped { raw, memory, handle, map }) = Mapped::new(Backing::Ram, OWNED) else {
            return false;
        };
        map.store(0, 2);
        memory.read(0, 1) == [2] && raw.unpin(handle).is_ok()
    });
    assert_eq!(end, End::Said(true));
    assert_eq!((map.load(0), memory.read(0, 1)), (1, vec![1]));
    raw.unpin(handle).unwrap();
}

#[test]
fn another_processs_memory_is_not_pinned() {
    let Some(_machine) = Machine::new() else { return };
    let memory = Memory::new(OWNED);
    assert_eq!(in_child(|| Raw::open().pin(memory.va, OWNED) == Err(libc::EINVAL)), End::Said(true));
}

/// Passes a descriptor as programs do that share them.
fn send(socket: &UnixStream, fd: BorrowedFd<'_>) -> bool {
    let (mut space, fds) = ([MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))], [fd]);
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds))
        && sendmsg(socket, &[IoSlice::new(&[0])], &mut control, SendFlags::empty()) == Ok(1)
}

fn receive(socket: &UnixStream) -> OwnedFd {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    recvmsg(socket, &mut [IoSliceMut::new(&mut [0])], &mut control, RecvFlags::empty()).unwrap();
    let rights = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    rights.unwrap()
}

#[test]
fn a_passed_descriptor_serves_no_other_process() {
    let Some(_machine) = Machine::new() else { return };
    let memory = Memory::new(OWNED);
    let (here, there) = UnixStream::pair().unwrap();
    // From a child that opened it, with a pin in it, to this process.
    let end = in_child(|| {
        let (raw, memory) = (Raw::open(), Memory::new(OWNED));
        raw.pin(memory.va, OWNED).is_ok() && send(&there, raw.0.as_fd())
    });
    assert_eq!(end, End::Said(true));
    let fd = receive(&here);
    let raw = Raw(fd);
    // The child has ended, its number may be given to others: they are not it.
    assert!(everything_is_refused(&raw, 0, memory.va));
    for _ in 0..20 {
        assert_eq!(in_child(|| everything_is_refused(&raw, 0, memory.va)), End::Said(true));
    }
    // Persistent pins of the dead live on until the last descriptor is closed, by whomever.
    assert_eq!(counter("pins"), 1);
    drop(raw);
    assert_eq!(counter("pins"), 0);
    assert_eq!(kmod::state().unwrap().pins, 0);
}

#[test]
fn the_last_to_close_may_be_a_child() {
    let Some(_machine) = Machine::new() else { return };
    let memory = Memory::new(OWNED);
    let (here, there) = UnixStream::pair().unwrap();
    let raw = Raw::open();
    raw.pin(memory.va, OWNED).unwrap();
    // SAFETY: the child waits for a byte and leaves.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        drop(here);
        std::io::Read::read_exact(&mut &there, &mut [0]).ok();
        // SAFETY: ends this process.
        unsafe { libc::_exit(0) };
    }
    drop(raw);
    assert_eq!(counter("pins"), 1);
    std::io::Write::write_all(&mut &here, &[1]).unwrap();
    let mut status = 0;
    // SAFETY: a place for the status of the child above.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    let deadline = Instant::now() + Duration::from_secs(20);
    while counter("pins") != 0 {
        assert!(Instant::now() < deadline);
        std::thread::yield_now();
    }
}

/// Processes that die with everything open, in either order of closing.
#[test]
fn a_process_that_dies_leaves_nothing() {
    let Some(_machine) = Machine::new() else { return };
    for device_first in [true, false] {
        let end = in_child(|| {
            let first = device_first.then(Raw::open);
            let memory = Memory::new(OWNED);
            let raw = first.unwrap_or_else(Raw::open);
            let mut maps: Vec<Map> = Vec::new();
            for _ in 0..10 {
                let Ok(handle) = raw.pin(memory.va, OWNED) else { return false };
                let Ok(map) = raw.map(handle, OWNED) else { return false };
                map.store(0, 1);
                maps.push(map);
            }
            // SAFETY: ends this process.
            unsafe { libc::raise(libc::SIGKILL) };
            false
        });
        assert_eq!(end, End::Killed(libc::SIGKILL));
        assert_eq!(kmod::state().unwrap().pins, 0);
        assert_eq!(counter("mappings"), 0);
    }
}
