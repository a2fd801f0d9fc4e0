//! A stock driver, through its resource manager.

use gdsync_testkit::RmSettings;

use crate::library::{Computer, Driver, SIZE};

fn computer() -> Computer {
    Computer::new(Driver::Rm(RmSettings::default()))
}

#[test]
fn it_maps_without_a_module() {
    let computer = computer();
    let library = computer.open().unwrap();
    // The interface that the library stands for.
    assert_eq!(library.version(), Ok((2, 6)));
    assert_eq!([1, 2, 3].map(|attribute| library.attribute(attribute)), [Ok(1), Ok(1), Ok(0)]);
    assert_eq!(library.attribute(4), Err(libc::EINVAL));
    let addr = library.alloc(SIZE).unwrap();
    for (at, size) in [(0, SIZE), (100, 5000), (65535, 20), (1, SIZE - 1)] {
        library.works_at(addr + at, size);
    }
    let mh = library.pin(addr, SIZE).unwrap();
    assert_eq!(library.callback_flag(mh), Ok(0));
    // All its mappings go through PCIe.
    library.unpin(library.pin_v2(addr, SIZE, 1).unwrap()).unwrap();
    assert_eq!(library.map_as(mh, SIZE, 2), Err(libc::EOPNOTSUPP));
    assert_eq!(library.map_as(mh, SIZE, 3), Err(libc::EOPNOTSUPP));
    library.map_as(mh, SIZE, 1).unwrap();
    assert_eq!(library.info(mh).unwrap().mapping_type, 1);
    library.close().unwrap();
    computer.check_clean();
}

/// The driver's statuses are no error numbers of C.
#[test]
fn failures_have_error_numbers_of_c_and_leave_nothing() {
    let computer = computer();
    let library = computer.open().unwrap();
    let addr = library.alloc(SIZE).unwrap();
    library.works_at(addr, SIZE);
    let mh = library.pin(addr, SIZE).unwrap();
    const NO_MEMORY: i32 = 0x51;
    const INVALID_STATE: i32 = 0x40;
    for status in [NO_MEMORY, INVALID_STATE] {
        let pinned = computer.failing("rm dup", status, || library.pin(addr, SIZE));
        assert_eq!(pinned, Err(libc::EIO), "{status:#x}");
    }
    assert_eq!(computer.failing("rm map", INVALID_STATE, || library.map(mh, SIZE)), Err(libc::EIO));
    assert_eq!(computer.failing("rm mmap", libc::EAGAIN, || library.map(mh, SIZE)), Err(libc::EAGAIN));
    // A mapping that shows other memory is not returned.
    assert_eq!(computer.failing("rm shift", 1, || library.map(mh, SIZE)), Err(libc::EIO));
    assert_eq!(computer.failing("cuMemcpyDtoHAsync", 2, || library.map(mh, SIZE)), Err(libc::ENOMEM));
    let base = library.map(mh, SIZE).unwrap();
    library.unmap(mh, base, SIZE).unwrap();
    library.unpin(mh).unwrap();
    library.works_at(addr, SIZE);
    library.close().unwrap();
    computer.check_clean();
}

#[test]
fn a_full_bar1_is_enomem() {
    let computer = Computer::new(Driver::Rm(RmSettings { bar1: 16 << 20, ..RmSettings::default() }));
    let library = computer.open().unwrap();
    let addr = library.alloc(32 << 20).unwrap();
    let mh = library.pin(addr, 32 << 20).unwrap();
    assert_eq!(library.map(mh, 32 << 20), Err(libc::ENOMEM));
    let base = library.map(mh, 4 << 20).unwrap();
    library.unmap(mh, base, 4 << 20).unwrap();
    library.close().unwrap();
    computer.check_clean();
}

#[test]
fn a_driver_that_refuses_does_not_open() {
    let computer = computer();
    for operation in ["open /dev/nvidiactl", "rm alloc", "cuDriverGetVersion"] {
        let opened = computer.failing(operation, libc::EACCES, || computer.open());
        assert_eq!(opened.unwrap_err(), libc::ENODEV, "{operation}");
    }
    computer.check_clean();
}
