//! Each driver under the C functions, and the error numbers of its failures.

use gdrapi::{GPU_PAGE_SIZE, INFO_MAPPED, INFO_WC_MAPPING};
use gdrcopy::MappingType;
use gdsync_testkit::{Module, RmSettings};

use crate::library::{Computer, Driver, SIZE, load, store};

const PAGE: u64 = GPU_PAGE_SIZE as u64;
const VERSIONS: [(u16, u16); 7] = [(2, 0), (2, 1), (2, 2), (2, 3), (2, 4), (2, 5), (2, 6)];

fn computer(module: Module) -> Computer {
    Computer::new(Driver::Gdrdrv(module))
}

/// Every version, persistent and not.
fn modules() -> impl Iterator<Item = Module> {
    let modes = [true, false];
    VERSIONS
        .into_iter()
        .flat_map(move |version| modes.map(|persistent| Module { version, persistent, ..Module::default() }))
}

#[test]
fn every_version_maps_and_says_what_it_is() {
    for module in modules() {
        let computer = computer(module);
        let library = computer.open().unwrap();
        let (major, minor) = module.version;
        assert_eq!(library.version(), Ok((major.into(), minor.into())));
        // Versions before 2.5 do not report it.
        let told = i32::from(minor >= 5 && module.persistent);
        assert_eq!([1, 2, 3].map(|attribute| library.attribute(attribute)), [Ok(told), Ok(told), Ok(0)]);

        let addr = library.alloc(SIZE).unwrap();
        let mh = library.pin(addr, SIZE).unwrap();
        let info = library.info(mh).unwrap();
        assert_eq!((info.v1.va, info.v1.page_size, info.v1.bits, info.mapping_type), (addr, 65536, 0, 0));
        assert_eq!(info.v1.mapped_size, (SIZE as u64).next_multiple_of(PAGE));
        let base = library.map(mh, SIZE).unwrap();
        let info = library.info(mh).unwrap();
        assert_eq!((info.v1.bits, info.mapping_type), (INFO_MAPPED | INFO_WC_MAPPING, 1));
        assert_eq!(library.map(mh, SIZE), Err(libc::EAGAIN));
        library.unmap(mh, base, SIZE).unwrap();
        library.unpin(mh).unwrap();

        for (at, size) in [(0, SIZE), (PAGE, 100), (8, 8), (3 * PAGE - 1, 70_000), (1, SIZE - 1)] {
            library.works_at(addr + at, size);
        }

        let forced = library.pin_v2(addr, SIZE, 1);
        assert_eq!(forced.map(drop), if told == 1 { Ok(()) } else { Err(libc::EINVAL) }, "{module:?}");
        for unknown in [2, 3, 1 << 16, 1 << 16 | 1, 1 << 31] {
            assert_eq!(library.pin_v2(addr, SIZE, unknown), Err(libc::EINVAL), "{module:?}");
        }

        let (mapped, bare) = (library.pin(addr, SIZE).unwrap(), library.pin(addr, SIZE).unwrap());
        let base = library.map(mapped, SIZE).unwrap();
        store(mapped, base, b"kept").unwrap();
        assert_eq!(library.callback_flag(mapped), Ok(0));
        library.free(addr).unwrap();
        let flag = Ok(i32::from(!module.persistent));
        assert_eq!((library.callback_flag(mapped), library.callback_flag(bare)), (flag, flag));
        if module.persistent {
            assert_eq!(load(mapped, base, 4).unwrap(), b"kept");
            library.map(bare, SIZE).unwrap();
        } else {
            assert_eq!(library.map(bare, SIZE), Err(libc::EINVAL));
        }
        library.unmap(mapped, base, SIZE).unwrap();
        library.close().unwrap();
        computer.check_clean();
    }
}

#[test]
fn a_size_that_leaves_out_the_end_can_be_mapped() {
    let computer = computer(Module::default());
    let library = computer.open().unwrap();
    let addr = library.alloc(SIZE).unwrap();
    // The size counts from the pinned address; whole host pages are mapped.
    let mh = library.pin(addr + 100, 200_000).unwrap();
    let base = library.map(mh, 5000).unwrap();
    assert_eq!(load(mh, base.wrapping_byte_add(8191), 1), Ok(vec![0]));
    assert_eq!(load(mh, base.wrapping_byte_add(8191), 2), Err(libc::EINVAL));
    library.unmap(mh, base, 5000).unwrap();
    // All of it can be reached by either way of counting.
    for size in [200_000, 262_144] {
        let base = library.map(mh, size).unwrap();
        assert_eq!(load(mh, base.wrapping_byte_add(200_099), 1), Ok(vec![0]));
        library.unmap(mh, base, size).unwrap();
    }
    assert_eq!(library.map(mh, 262_145), Err(libc::EINVAL));
    library.close().unwrap();
}

#[test]
fn mappings_of_two_types_show_the_same_memory() {
    let computer = computer(Module { mapping_type: MappingType::Cached, ..Module::default() });
    let library = computer.open().unwrap();
    let addr = library.alloc(SIZE).unwrap();
    let (one, two) = (library.pin(addr, SIZE).unwrap(), library.pin(addr, SIZE).unwrap());
    let (p, q) = (library.map_as(one, SIZE, 1).unwrap(), library.map_as(two, SIZE, 2).unwrap());
    for round in 0..100_u32 {
        let (from, at, to, seen) = if round % 2 == 0 { (one, p, two, q) } else { (two, q, one, p) };
        store(from, at, &round.to_le_bytes()).unwrap();
        assert_eq!(load(to, seen, 4).unwrap(), round.to_le_bytes());
    }
    library.close().unwrap();
    computer.check_clean();
}

#[test]
fn closing_releases_everything_and_returns_the_first_error() {
    for errno in [0, libc::EIO] {
        let computer = computer(Module::default());
        let library = computer.open().unwrap();
        let addr = library.alloc(SIZE).unwrap();
        let pins = [0; 5].map(|_| library.pin(addr, SIZE).unwrap());
        let mapped = pins.map(|mh| library.map(mh, SIZE).unwrap());
        let closed = computer.failing("gdrdrv unpin", errno, || library.close());
        assert_eq!(closed, if errno == 0 { Ok(()) } else { Err(errno) });
        computer.check_clean();
        assert!(computer.machine.memory.lock().find(addr).is_none(), "memory of gdrx_alloc is freed");
        assert_eq!(library.close(), Err(libc::EINVAL));
        for (mh, base) in pins.into_iter().zip(mapped) {
            assert_eq!(store(mh, base, b"x"), Err(libc::EINVAL));
            assert_eq!(library.unmap(mh, base, SIZE), Err(libc::EINVAL));
        }
    }
}

#[test]
fn what_cannot_be_pinned_is_refused() {
    let computer = computer(Module { bar1: 16 << 20, ..Module::default() });
    let library = computer.open().unwrap();
    let addr = library.alloc(SIZE).unwrap();
    // What the driver has for the memory and its alignment.
    let block = (SIZE.next_multiple_of(2 << 20) + GPU_PAGE_SIZE).next_multiple_of(2 << 20);
    for (at, size) in [(addr, block + 1), (addr + PAGE, block), (8, 8), (u64::MAX, 2), (addr, usize::MAX)] {
        assert_eq!(library.pin(at, size), Err(libc::EINVAL), "{at:#x} {size}");
    }
    let large = library.alloc(32 << 20).unwrap();
    assert_eq!(library.pin(large, 32 << 20), Err(libc::ENOMEM));
    let mh = library.pin(large, 15 << 20).unwrap();
    assert_eq!(library.pin(addr, SIZE), Err(libc::ENOMEM));
    library.unpin(mh).unwrap();
    library.works_at(addr, SIZE);
    library.close().unwrap();
    computer.check_clean();

    // The resource manager maps as late as it can.
    let computer = Computer::new(Driver::Rm(RmSettings { bar1: 16 << 20, ..RmSettings::default() }));
    let library = computer.open().unwrap();
    let addr = library.alloc(32 << 20).unwrap();
    let mh = library.pin(addr, 32 << 20).unwrap();
    assert_eq!(library.map(mh, 32 << 20), Err(libc::ENOMEM));
    library.map(mh, 4 << 20).unwrap();
    library.close().unwrap();
    computer.check_clean();
}

#[test]
fn a_driver_that_refuses_does_not_open() {
    let (gdrdrv, rm) = (Driver::Gdrdrv(Module::default()), Driver::Rm(RmSettings::default()));
    for (driver, operation, errno) in [
        (gdrdrv, "open /dev/gdrdrv", libc::ENOENT),
        (gdrdrv, "open /dev/gdrdrv", libc::EACCES),
        (gdrdrv, "gdrdrv version", libc::EIO),
        (gdrdrv, "gdrdrv attr", libc::EIO),
        (rm, "open /dev/nvidiactl", libc::EACCES),
        (rm, "rm alloc", libc::EACCES),
        (rm, "cuDriverGetVersion", libc::EACCES),
    ] {
        let computer = Computer::new(driver);
        let opened = computer.failing(operation, errno, || computer.open());
        assert_eq!(opened.unwrap_err(), libc::ENODEV, "{operation}");
        computer.check_clean();
    }
    let too_new = computer(Module { minimum_library: (2, 7), ..Module::default() });
    assert_eq!(too_new.open().unwrap_err(), libc::ENODEV);
}

#[test]
fn memory_is_mapped_without_a_module() {
    for (driver, attributes) in [(Driver::Rm(RmSettings::default()), [1, 1, 0]), (Driver::DmaBuf, [1, 1, 1])]
    {
        let computer = Computer::new(driver);
        let library = computer.open().unwrap();
        // The interface that the library stands for.
        assert_eq!(library.version(), Ok((2, 6)));
        assert_eq!([1, 2, 3].map(|attribute| library.attribute(attribute)), attributes.map(Ok));
        assert_eq!(library.attribute(4), Err(libc::EINVAL));
        let addr = library.alloc(SIZE).unwrap();
        for (at, size) in [(0, SIZE), (100, 5000), (65535, 20), (1, SIZE - 1)] {
            library.works_at(addr + at, size);
        }
        // All mappings go through PCIe.
        let mh = library.pin_v2(addr, SIZE, 1).unwrap();
        assert_eq!(library.callback_flag(mh), Ok(0));
        assert_eq!([2, 3].map(|kind| library.map_as(mh, SIZE, kind)), [Err(libc::EOPNOTSUPP); 2]);
        library.map_as(mh, SIZE, 1).unwrap();
        assert_eq!(library.info(mh).unwrap().mapping_type, 1);
        library.close().unwrap();
        computer.check_clean();
    }
}

/// What a program does while its driver refuses.
#[derive(Clone, Copy, Debug)]
enum Act {
    Alloc,
    Pin,
    Map,
    Flag,
}

/// Faults of each driver, with its own code and the error number that C gets. A `CUresult` or a status of the resource manager is
/// not an `errno`.
#[test]
fn failures_have_error_numbers_of_c_and_leave_nothing() {
    use Act::{Alloc, Flag, Map, Pin};
    let gdrdrv =
        [libc::EIO, libc::EACCES, libc::ENODEV, libc::ENOMEM, libc::EFAULT].into_iter().flat_map(|errno| {
            let acts =
                [("pin", Pin), ("info", Pin), ("flag", Flag), ("mmap", Map), ("info", Map), ("type", Map)];
            acts.map(|(request, act)| (format!("gdrdrv {request}"), errno, act, errno))
        });
    // The last is the kernel's own number, on GPUs whose memory the driver does not hold.
    let gdrdrv = gdrdrv.chain([
        ("gdrdrv pin".into(), libc::EINVAL, Pin, libc::EINVAL),
        ("gdrdrv pin".into(), 524, Pin, libc::EOPNOTSUPP),
    ]);
    let rm = [
        ("rm dup", 0x51, Pin, libc::EIO),
        ("rm dup", 0x40, Pin, libc::EIO),
        ("rm map", 0x40, Map, libc::EIO),
        ("rm mmap", libc::EAGAIN, Map, libc::EAGAIN),
        // A mapping that shows other memory is not returned.
        ("rm shift", 1, Map, libc::EIO),
        ("cuMemcpyDtoHAsync", 2, Map, libc::ENOMEM),
        ("cuMemAlloc", 719, Alloc, libc::EIO),
        ("cuMemAlloc", 2, Alloc, libc::ENOMEM),
    ];
    let dma_buf = [
        ("cuMemGetHandleForAddressRange", 1, Pin, libc::EINVAL),
        ("cuMemGetHandleForAddressRange", 101, Pin, libc::EINVAL),
        ("cuMemGetHandleForAddressRange", 801, Pin, libc::EOPNOTSUPP),
        ("cuMemGetHandleForAddressRange", 999, Pin, libc::EIO),
        ("mmap of a dma-buf", libc::ENOMEM, Map, libc::ENOMEM),
        ("mmap of a dma-buf", libc::EPERM, Map, libc::EPERM),
        ("wrong page of a dma-buf", 1, Map, libc::EIO),
    ];
    let named = |(name, code, act, errno): (&str, i32, Act, i32)| (name.to_owned(), code, act, errno);
    for (driver, faults) in [
        (Driver::Gdrdrv(Module::default()), gdrdrv.collect::<Vec<_>>()),
        (Driver::Rm(RmSettings::default()), rm.map(named).to_vec()),
        (Driver::DmaBuf, dma_buf.map(named).to_vec()),
    ] {
        let computer = Computer::new(driver);
        let library = computer.open().unwrap();
        let addr = library.alloc(SIZE).unwrap();
        library.works_at(addr, SIZE);
        let mh = library.pin(addr, SIZE).unwrap();
        for (name, code, act, errno) in faults {
            let done = computer.failing(&name, code, || match act {
                Alloc => library.alloc(SIZE).map(drop),
                Pin => library.pin(addr, SIZE).map(drop),
                Map => library.map(mh, SIZE).map(drop),
                Flag => library.callback_flag(mh).map(drop),
            });
            assert_eq!(done, Err(errno), "{name} {code}");
        }
        library.works_at(addr, SIZE);
        // The handle is gone also if the driver refuses.
        if let Driver::Gdrdrv(_) = driver {
            assert_eq!(computer.failing("gdrdrv unpin", libc::EIO, || library.unpin(mh)), Err(libc::EIO));
            assert_eq!(library.unpin(mh), Err(libc::EINVAL));
        }
        library.close().unwrap();
        computer.check_clean();
    }
}
