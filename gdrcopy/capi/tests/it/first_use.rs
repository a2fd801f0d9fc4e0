//! What waits for the first call that needs it.

use std::sync::Barrier;

use gdrcopy::cuda::MemoryKind;
use gdsync_testkit::{Module, RmSettings};

use crate::library::{Computer, Driver, Library, SIZE};

/// Memory that the application allocated.
fn memory(computer: &Computer) -> u64 {
    computer.machine.memory.lock().alloc(0, SIZE, MemoryKind::Malloc).unwrap()
}

#[test]
fn cuda_waits_for_the_first_pin() {
    let drivers = [
        (Driver::Gdrdrv(Module::default()), "gdrdrv", [1, 1, 0]),
        (Driver::DmaBuf, "dmabuf", [1, 1, 1]),
        (Driver::Rm(RmSettings::default()), "rm", [1, 1, 0]),
    ];
    for (driver, name, attributes) in drivers {
        let computer = Computer::new(driver);
        let library = computer.open().unwrap();
        let addr = memory(&computer);
        assert_eq!(library.version(), Ok((2, 6)));
        assert_eq!([1, 2, 3].map(|attribute| library.attribute(attribute)), attributes.map(Ok));
        let line = library.describe();
        assert!(line.starts_with(name), "{line}");
        assert_eq!(line.contains("(to be opened at first use)"), name != "gdrdrv", "{line}");
        computer.open().unwrap().close().unwrap();
        assert_eq!(computer.cuda.initialised(), 0, "{name}");

        let mh = library.pin(addr, SIZE).unwrap();
        assert_eq!(computer.cuda.initialised(), 1, "{name}");
        library.map(mh, SIZE).unwrap();
        let line = library.describe();
        assert!(line.starts_with(name) && !line.contains("first use"), "{line}");
        library.pin(addr, SIZE).unwrap();
        assert_eq!(computer.cuda.initialised(), 1, "{name}");
        library.close().unwrap();
        computer.check_clean();
    }
}

#[test]
fn what_fails_at_the_first_use_is_told_there_and_tried_again() {
    let computer = Computer::new(Driver::Rm(RmSettings::default()));
    let library = computer.open().unwrap();
    let addr = memory(&computer);
    for operation in
        ["cuInit", "open /dev/nvidiactl", "open /dev/nvidia1", "rm alloc device", "rm card info", "rm swap"]
    {
        let pinned = computer.failing(operation, libc::EACCES, || library.pin(addr, SIZE));
        assert_eq!(pinned.unwrap_err(), libc::ENODEV, "{operation}");
        let allocated = computer.failing(operation, libc::EACCES, || library.alloc(SIZE));
        assert_eq!(allocated, Err(libc::ENODEV), "{operation}");
        assert_eq!(library.attribute(1), Ok(1));
    }
    computer.check_clean();
    library.works_at(library.alloc(SIZE).unwrap(), SIZE);
    library.close().unwrap();
    computer.check_clean();
}

#[test]
fn threads_may_all_be_the_first() {
    let computer = Computer::new(Driver::Rm(RmSettings::default()));
    let library = computer.open().unwrap();
    let addr = memory(&computer);
    let (start, number) = (Barrier::new(8), library.0.addr());
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let library = Library(std::ptr::without_provenance_mut(number));
                start.wait();
                library.unpin(library.pin(addr, SIZE).unwrap()).unwrap();
            });
        }
    });
    assert_eq!(computer.cuda.initialised(), 1);
    assert_eq!(computer.rm.as_ref().unwrap().live().clients, 1);
    library.close().unwrap();
    computer.check_clean();
}
