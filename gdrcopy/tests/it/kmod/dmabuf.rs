//! Pins of dma-bufs: of the emulated GPU, of udmabuf, and by the backend where the GPU driver pins no addresses.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gdrcopy::{Error, PinFlags};
use gdsync_testkit::Module;
use gdsync_testkit::kmod::{self, Backing, CHUNK, Fault, Object, counter};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::{Failing, Machine, Map, Raw, backings, check};
use crate::contract::check_ranges;
use crate::gdrdrv_abi::{self as abi, PinDmaBuf};
use crate::rig::{End, Rig, in_child, open_volatile_gdrdrv, pattern, peek};

const SIZE: u64 = 5 * CHUNK;
const PAGE: u64 = 4096;

fn pin(raw: &Raw, fd: i32, offset: u64, size: u64) -> Result<u64, i32> {
    let mut request = PinDmaBuf { fd, offset, size, ..Default::default() };
    raw.call(&mut request).map(|()| request.handle)
}

/// A dma-buf that is pinned and mapped.
struct Exported {
    map: Map,
    handle: u64,
    fd: OwnedFd,
    object: Object,
    raw: Raw,
}

impl Exported {
    /// None where a step fails: a forked child must not panic.
    fn new() -> Option<Self> {
        let (raw, object) = (Raw::open(), Object::new(SIZE, Backing::Ram).ok()?);
        let fd = object.export(0, SIZE, false).ok()?;
        let handle = pin(&raw, fd.as_raw_fd(), 0, SIZE).ok()?;
        let map = raw.map(handle, SIZE).ok()?;
        Some(Self { map, handle, fd, object, raw })
    }
}

/// Also where the module cannot do this: then it must say so.
fn machine() -> Option<Machine> {
    let machine = Machine::new()?;
    let raw = Raw::open();
    if raw.attribute(abi::ATTR_EXTENSIONS) == Ok(abi::EXTENSION_DMABUF) {
        return Some(machine);
    }
    assert_eq!(pin(&raw, -1, 0, PAGE), Err(libc::EOPNOTSUPP));
    println!("skipped: no pins of dma-bufs here");
    None
}

#[test]
fn shows_the_exporters_bytes_wherever_they_lie() {
    let Some(_machine) = machine() else { return };
    for backing in backings() {
        let raw = Raw::open();
        let object = Object::new(SIZE, backing).unwrap();
        let model = pattern(3, 327_680);
        object.file().write_all_at(&model, 0).unwrap();
        let fd = object.export(CHUNK, SIZE - CHUNK, false).unwrap();
        let handle = pin(&raw, fd.as_raw_fd(), 2 * PAGE, CHUNK + PAGE).unwrap();
        drop(fd);
        let info = raw.info(handle).unwrap();
        assert_eq!((info.va, info.mapped_size, info.page_size), (2 * PAGE, CHUNK + PAGE, 4096));
        let map = raw.map(handle, CHUNK + PAGE).unwrap();
        let start = 65_536 + 2 * 4096;
        assert!(map.bytes(0..map.len) == model[start..][..map.len], "{backing:?}");
        map.store(map.len - 1, !model[start + map.len - 1]);
        let mut seen = [0];
        object.file().read_exact_at(&mut seen, (start + map.len - 1) as u64).unwrap();
        assert_eq!(seen, [!model[start + map.len - 1]]);
        assert_eq!(raw.info(handle).unwrap().mapping_type, if backing == Backing::Ram { 2 } else { 1 });
        assert_eq!(raw.flag(handle), Ok(0));
        // The mapping keeps the descriptor's file, that the pin, and that the memory.
        drop((raw, object));
        assert_eq!(map.load(0), model[start]);
    }
}

#[test]
fn a_move_is_followed() {
    let Some(_machine) = machine() else { return };
    let backings = backings();
    let Exported { raw, object, fd: _fd, handle, map } = Exported::new().unwrap();
    let (before, mut expected) = (counter("total_moved"), vec![0; 20]);
    for round in 0..20 {
        map.store(round, 100);
        expected[round] = 100;
        object.move_to(backings[round % backings.len()]).unwrap();
        assert_eq!(map.bytes(0..20), expected);
    }
    assert!(counter("total_moved") >= before + 20);
    // Moving what is not mapped, and what is not pinned any more.
    drop(map);
    object.move_to(Backing::Ram).unwrap();
    raw.unpin(handle).unwrap();
    object.move_to(Backing::Ram).unwrap();
}

#[test]
fn concurrent_moves_and_accesses() {
    let Some(_machine) = machine() else { return };
    let raw = Raw::open();
    let object = Object::new(SIZE, Backing::Ram).unwrap();
    let fd = object.export(0, SIZE, false).unwrap();
    let maps: Vec<Map> =
        (0..3).map(|_| raw.map(pin(&raw, fd.as_raw_fd(), 0, SIZE).unwrap(), SIZE).unwrap()).collect();
    std::thread::scope(|scope| {
        for (thread, map) in maps.into_iter().enumerate() {
            scope.spawn(move || {
                // Stale pages hold 0xEE; a store into one would be lost.
                for round in 0..20_000_usize {
                    let value = u8::try_from(round % 200).unwrap();
                    map.store(thread, value);
                    assert_eq!(map.load(thread), value);
                }
            });
        }
        for _ in 0..100 {
            object.move_to(Backing::Ram).unwrap();
        }
    });
}

#[test]
fn accesses_wait_for_the_exporters_copy() {
    let Some(_machine) = machine() else { return };
    let Exported { raw: _raw, object, fd: _fd, map, .. } = Exported::new().unwrap();
    map.store(0, 7);
    let copying = Failing::new(Fault::Copying, 1);
    object.move_to(Backing::Ram).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let done = &done;
        let reader = scope.spawn(move || (map.load(0), done.load(Ordering::SeqCst)));
        std::thread::sleep(Duration::from_millis(300));
        done.store(true, Ordering::SeqCst);
        drop(copying);
        assert_eq!(reader.join().unwrap(), (7, true));
    });
}

/// Pins, maps and moves a dma-buf whose exporter then copies, and waits for that until a signal comes: by an access of this
/// process, or of the kernel for it.
fn wait_until_killed(by_kernel: bool) -> bool {
    let Some(Exported { raw: _raw, object, fd: _fd, map, .. }) = Exported::new() else { return false };
    if kmod::set_fault(Fault::Copying, 1).is_err() || object.move_to(Backing::Ram).is_err() {
        return false;
    }
    let Ok((_reader, writer)) = std::io::pipe() else { return false };
    // SAFETY: a number.
    unsafe { libc::alarm(1) };
    if !by_kernel {
        return map.load(0) == 1;
    }
    // SAFETY: the kernel reads the byte, or says that it cannot.
    unsafe { libc::write(writer.as_raw_fd(), map.at(0).cast(), 1) == 1 }
}

#[test]
fn a_process_that_waits_for_a_copy_can_be_killed() {
    let Some(_machine) = machine() else { return };
    for by_kernel in [false, true] {
        let _copying = Failing::new(Fault::Copying, 0);
        let (ended, given_up) = (AtomicBool::new(false), AtomicBool::new(false));
        let end = std::thread::scope(|scope| {
            scope.spawn(|| {
                let deadline = Instant::now() + Duration::from_secs(30);
                while !ended.load(Ordering::SeqCst) && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(10));
                }
                if !ended.load(Ordering::SeqCst) {
                    given_up.store(true, Ordering::SeqCst);
                    kmod::set_fault(Fault::Copying, 0).expect("the driver's device");
                }
            });
            let end = in_child(|| wait_until_killed(by_kernel));
            ended.store(true, Ordering::SeqCst);
            end
        });
        assert_eq!((end, given_up.into_inner()), (End::Killed(libc::SIGALRM), false), "{by_kernel}");
    }
}

#[test]
fn bad_arguments_and_exporters_that_refuse() {
    let Some(_machine) = machine() else { return };
    let raw = Raw::open();
    let object = Object::new(SIZE, Backing::Ram).unwrap();
    let fd = object.export(0, SIZE, false).unwrap();
    let number = fd.as_raw_fd();
    let plain = File::from(memfd_create(c"plain", MemfdFlags::CLOEXEC).unwrap());
    plain.set_len(SIZE).unwrap();
    let read_only = object.export(0, SIZE, true).unwrap();
    let cases = [
        (-1, 0, PAGE, libc::EBADF),
        (1 << 30, 0, PAGE, libc::EBADF),
        (plain.as_raw_fd(), 0, PAGE, libc::EINVAL),
        (raw.0.as_raw_fd(), 0, PAGE, libc::EINVAL),
        (read_only.as_raw_fd(), 0, PAGE, libc::EACCES),
        (number, 0, 0, libc::EINVAL),
        (number, 1, PAGE, libc::EINVAL),
        (number, 0, PAGE + 1, libc::EINVAL),
        (number, 0, SIZE + PAGE, libc::EINVAL),
        (number, SIZE, PAGE, libc::EINVAL),
        (number, u64::MAX - PAGE + 1, PAGE, libc::EINVAL),
        (number, PAGE, u64::MAX - PAGE + 1, libc::EINVAL),
    ];
    for (fd, offset, size, expected) in cases {
        assert_eq!(pin(&raw, fd, offset, size), Err(expected), "{size:#x} at {offset:#x} of {fd}");
    }
    for flags in [1, 1 << 31] {
        let mut request = PinDmaBuf { fd: number, flags, size: PAGE, ..Default::default() };
        assert_eq!(raw.call(&mut request), Err(libc::EINVAL));
    }
    for (fault, value, expected) in [
        (Fault::Attach, libc::ENOMEM, libc::ENOMEM),
        (Fault::Attach, libc::EOPNOTSUPP, libc::EOPNOTSUPP),
        // The kernel's own numbers are not for programs. NVIDIA's driver says 524 to importers it does not serve.
        (Fault::Attach, 524, libc::EOPNOTSUPP),
        (Fault::Attach, 517, libc::EIO),
        (Fault::Map, 524, libc::EOPNOTSUPP),
        (Fault::Map, libc::EBUSY, libc::EBUSY),
        (Fault::Map, libc::ENOMEM, libc::ENOMEM),
        (Fault::Odd, 1, libc::EIO),
    ] {
        let _failing = Failing::new(fault, value);
        assert_eq!(pin(&raw, number, 0, SIZE), Err(expected), "{fault:?}");
    }
    assert_eq!((counter("pins"), kmod::state().unwrap().attachments), (0, 0));
}

/// After a move the exporter may have no room any more.
#[test]
fn an_exporter_that_fails_a_pin_raises_sigbus() {
    let Some(_machine) = machine() else { return };
    let failing = Failing::new(Fault::Map, 0);
    let end = in_child(|| {
        let Some(Exported { raw: _raw, object, fd: _fd, map, .. }) = Exported::new() else { return false };
        map.store(0, 1);
        if kmod::set_fault(Fault::Map, libc::EIO).is_err() || object.move_to(Backing::Ram).is_err() {
            return false;
        }
        map.load(0) == 1
    });
    assert_eq!(end, End::Killed(libc::SIGBUS));
    drop(failing);
}

#[test]
fn unpinned_under_a_mapping_is_sigbus() {
    let Some(_machine) = machine() else { return };
    let end = in_child(|| {
        let Some(Exported { raw, object, fd, handle, map }) = Exported::new() else { return false };
        map.store(0, 1);
        drop((fd, object));
        raw.unpin(handle).is_ok() && map.load(0) == 1
    });
    assert_eq!(end, End::Killed(libc::SIGBUS));
}

#[repr(C)]
struct CreateUdmabuf {
    memfd: u32,
    flags: u32,
    offset: u64,
    size: u64,
}

/// An exporter that does not move, in kernels that have it.
#[test]
fn udmabuf_is_mapped_too() {
    let Some(_machine) = machine() else { return };
    let Ok(device) = File::options().read(true).write(true).open("/dev/udmabuf") else {
        println!("skipped: no /dev/udmabuf in this kernel");
        return;
    };
    let file = File::from(memfd_create(c"udmabuf", MemfdFlags::ALLOW_SEALING).unwrap());
    file.set_len(SIZE).unwrap();
    file.write_all_at(b"hello", PAGE).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    let memfd = u32::try_from(file.as_raw_fd()).unwrap();
    let mut args = CreateUdmabuf { memfd, flags: 1, offset: 0, size: SIZE };
    // SAFETY: UDMABUF_CREATE with its structure.
    let fd = check(unsafe { libc::ioctl(device.as_raw_fd(), 0x4018_7542, &raw mut args) }).unwrap();
    // SAFETY: a new descriptor.
    let buffer = unsafe { OwnedFd::from_raw_fd(fd) };
    let raw = Raw::open();
    let handle = pin(&raw, buffer.as_raw_fd(), 0, SIZE).unwrap();
    let map = raw.map(handle, SIZE).unwrap();
    assert_eq!(map.bytes(4096..4101), b"hello");
    map.store(4096, b'j');
    let mut seen = [0; 5];
    file.read_exact_at(&mut seen, PAGE).unwrap();
    assert_eq!(&seen, b"jello");
}

const NONE: PinFlags = PinFlags::empty();
const BYTES: usize = 300_000;

/// The emulated GPU under a simulated CUDA.
fn backend_rig() -> Option<(Machine, Rig)> {
    let machine = Machine::new()?;
    let there = kmod::is_wanted() && Raw::open().attribute(abi::ATTR_EXTENSIONS) == Ok(abi::EXTENSION_DMABUF);
    if !there {
        println!("skipped: no pins of dma-bufs here, or GDRCOPY_TEST_KMOD is not set");
        return None;
    }
    Some((machine, Rig::new(Module::default())))
}

#[test]
fn every_range_is_read_and_written_where_it_lies() {
    let Some((_machine, rig)) = backend_rig() else { return };
    let gdrdrv = open_volatile_gdrdrv(&rig.system).unwrap();
    for errno in [libc::ENODEV, libc::EOPNOTSUPP, 524] {
        let _failing = Failing::new(Fault::Get, errno);
        check_ranges(&gdrdrv, |pin| {
            assert_eq!((pin.info().page_size, counter("dmabuf_attachments")), (4096, 1));
            assert!(!pin.invalidated().unwrap());
        });
    }
}

#[test]
fn freed_memory_stays_and_is_not_mapped_anew() {
    let Some((_machine, rig)) = backend_rig() else { return };
    let gdrdrv = open_volatile_gdrdrv(&rig.system).unwrap();
    let _failing = Failing::new(Fault::Get, 524);
    let size = 3 << 20;
    let memory = gdrdrv.alloc(0, size).unwrap();
    memory.copy_in(7, b"kept").unwrap();
    let pin = gdrdrv.pin_with(memory.addr(), size, NONE).unwrap();
    let range = pin.map_pages(size, None).unwrap();
    drop(memory);
    let _other = gdrdrv.alloc(0, size).unwrap();
    assert_eq!(peek(&range, 7, 4), b"kept");
    drop(range);
    assert!(matches!(pin.map_pages(size, None), Err(Error::Invalidated)));
    pin.unpin().unwrap();
}

#[test]
fn the_error_names_the_cause_if_both_ways_fail() {
    let Some((_machine, rig)) = backend_rig() else { return };
    let gdrdrv = open_volatile_gdrdrv(&rig.system).unwrap();
    let memory = gdrdrv.alloc(0, BYTES).unwrap();
    // What is wrong with the address or the memory is not tried another way.
    let failing = Failing::new(Fault::Get, libc::ENOMEM);
    assert!(matches!(gdrdrv.pin_with(memory.addr(), 1, NONE), Err(Error::Exhausted { .. })));
    drop(failing);
    let _failing = Failing::new(Fault::Get, libc::ENODEV);
    rig.machine.fail("cuMemGetHandleForAddressRange", 801);
    assert_eq!(gdrdrv.pin_with(memory.addr(), 1, NONE).unwrap_err().errno(), libc::ENODEV);
    rig.machine.fail("cuMemGetHandleForAddressRange", 0);
    let _peers = Failing::new(Fault::Attach, libc::EOPNOTSUPP);
    let error = gdrdrv.pin_with(memory.addr(), 1, NONE).unwrap_err();
    assert!(error.to_string().contains("PIN_DMABUF"), "{error}");
}
