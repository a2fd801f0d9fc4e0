//! CUDA 13.3, whose dma-bufs can be mapped.

use crate::library::{Computer, Driver, SIZE};

#[test]
fn it_maps_without_a_module() {
    let computer = Computer::new(Driver::DmaBuf);
    let library = computer.open().unwrap();
    assert_eq!(library.version(), Ok((2, 6)));
    assert_eq!([1, 2, 3].map(|attribute| library.attribute(attribute)), [Ok(1); 3]);
    let addr = library.alloc(SIZE).unwrap();
    for (at, size) in [(0, SIZE), (100, 5000), (65535, 20), (1, SIZE - 1)] {
        library.works_at(addr + at, size);
    }
    let mh = library.pin_v2(addr, SIZE, 1).unwrap();
    assert_eq!(library.callback_flag(mh), Ok(0));
    assert_eq!(library.map_as(mh, SIZE, 2), Err(libc::EOPNOTSUPP));
    library.close().unwrap();
}

/// A `CUresult` is no error number of C.
#[test]
fn failures_have_error_numbers_of_c() {
    let computer = Computer::new(Driver::DmaBuf);
    let library = computer.open().unwrap();
    let addr = library.alloc(SIZE).unwrap();
    library.works_at(addr, SIZE);
    let statuses = [
        (1, libc::EINVAL),
        (2, libc::ENOMEM),
        (101, libc::EINVAL),
        (719, libc::EIO),
        (801, libc::EOPNOTSUPP),
        (999, libc::EIO),
    ];
    for (status, errno) in statuses {
        let pinned = computer.failing("cuMemGetHandleForAddressRange", status, || library.pin(addr, SIZE));
        assert_eq!(pinned, Err(errno), "{status}");
        assert_eq!(computer.failing("cuMemAlloc", status, || library.alloc(SIZE)), Err(errno), "{status}");
    }
    let mh = library.pin(addr, SIZE).unwrap();
    for errno in [libc::ENOMEM, libc::EAGAIN, libc::EPERM] {
        let mapped = computer.failing("mmap of a dma-buf", errno, || library.map(mh, SIZE));
        assert_eq!(mapped, Err(errno));
    }
    let mapped = computer.failing("wrong page of a dma-buf", 1, || library.map(mh, SIZE));
    assert_eq!(mapped, Err(libc::EIO), "a mapping that shows other memory is not handed out");
    library.map(mh, SIZE).unwrap();
    library.close().unwrap();
}
