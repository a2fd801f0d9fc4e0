//! Every call fails once, in several ways: a typed error, and nothing stays behind.

use super::*;
use crate::rm_status::NvStatus;

/// Calls whose fault is an `NV_STATUS`.
const CALLS: [&str; 10] = [
    "rm alloc",
    "rm id info",
    "rm alloc device",
    "rm alloc subdevice",
    "rm gpu info",
    "rm dup",
    "rm import",
    "rm map",
    "rm unmap",
    "rm free",
];

const STATUSES: [NvStatus; 7] = [
    NvStatus::INSUFFICIENT_RESOURCES,
    NvStatus::INSUFFICIENT_PERMISSIONS,
    NvStatus::INVALID_CLIENT,
    NvStatus::INVALID_OBJECT_HANDLE,
    NvStatus::NOT_SUPPORTED,
    NvStatus::GPU_IS_LOST,
    NvStatus(0xabcd),
];

/// Calls whose fault is an `errno`.
const ERRNO_CALLS: [&str; 11] = [
    "open /dev/nvidiactl",
    "open /dev/nvidia0",
    "ioctl rm alloc",
    "ioctl rm control",
    "ioctl rm dup",
    "ioctl rm map",
    "ioctl rm unmap",
    "ioctl rm free",
    "ioctl rm card info",
    "ioctl rm register fd",
    "rm mmap",
];

const CUDA_CALLS: [&str; 9] = [
    "cuDeviceGetCount",
    "cuDeviceGetAttribute",
    "cuPointerGetAttributes",
    "cuIpcGetMemHandle",
    "cuMemRetainAllocationHandle",
    "cuMemAlloc",
    "cuMemCreate",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
];

/// Every fault with its codes.
fn faults() -> Vec<(&'static str, i32)> {
    let statuses = STATUSES.map(|status| status.0.cast_signed());
    let rm = CALLS.iter().flat_map(|name| statuses.map(|code| (*name, code)));
    let errno =
        ERRNO_CALLS.iter().flat_map(|name| [libc::EINVAL, libc::EACCES, libc::EMFILE].map(|e| (*name, e)));
    let cuda = CUDA_CALLS.iter().flat_map(|name| [1, 2, 719].map(|code| (*name, code)));
    rm.chain(errno).chain(cuda).collect()
}

/// Calls that only drops make: their failure is logged.
fn is_of_drop(name: &str) -> bool {
    name.ends_with("unmap") || name.ends_with("free")
}

#[test]
fn opening_fails_cleanly_at_every_call() {
    for (name, code) in faults() {
        let bench = Bench::new(1);
        bench.machine.fail(name, code);
        let opened = Backend::rm(&bench.system).map(drop);
        bench.machine.fail(name, 0);
        match opened {
            // Not needed for the proof, or answered otherwise.
            Ok(()) => assert!(
                is_of_drop(name)
                    || ["rm import", "rm gpu info", "cuMemRetainAllocationHandle", "cuMemCreate"]
                        .contains(&name),
                "{name} {code:#x}"
            ),
            Err(error) => check_error(&error, name, code),
        }
        assert_eq!(bench.machine.memory.lock().allocations(), 0, "{name} {code:#x}");
        if is_of_drop(name) {
            continue;
        }
        bench.check_clean();
        bench.open();
        bench.check_clean();
    }
}

#[test]
fn pinning_and_mapping_fail_cleanly_at_every_call() {
    for kind in [MemoryKind::Malloc, MemoryKind::Vmm] {
        for (name, code) in faults() {
            let bench = Bench::new(1);
            let rm = bench.open();
            let len = 5 << 16;
            let addr = bench.alloc(0, len, kind);
            // The route is proved before anything fails.
            map(&rm, addr, len).unwrap();
            bench.machine.fail(name, code);
            let mapped = map(&rm, addr + 99_999, 4 << 15);
            if let Err(error) = &mapped {
                check_error(error, name, code);
            }
            drop(mapped);
            bench.machine.fail(name, 0);
            if !is_of_drop(name) {
                assert_eq!(bench.driver.live(), AT_REST, "{name} {code:#x}");
                let (pin, range) = map(&rm, addr, len).unwrap();
                check_bytes(&pin, &range, addr, 1000);
            }
            drop(rm);
            if is_of_drop(name) {
                assert_eq!(bench.driver.live(), Live::default(), "{name} {code:#x}");
            } else {
                bench.check_clean();
            }
        }
    }
}

/// The error names the cause.
fn check_error(error: &Error, name: &str, code: i32) {
    let text = error.to_string();
    match error {
        Error::Rm { call, status, fix, .. } => {
            assert_eq!((*call, *status), (name, code.cast_unsigned()), "{text}");
            assert!(!fix.is_empty());
        }
        Error::Exhausted { what, .. } => assert!(
            (*what, name, code) == ("BAR1 space", "rm map", 0x1a)
                || (*what, code) == ("GPU memory", 2) && name.starts_with("cuMem"),
            "{text}"
        ),
        Error::Sys { error, .. } => assert_eq!(error.raw_os_error(), Some(code), "{text}"),
        Error::Cuda { call, status, .. } => {
            assert_eq!((*call, status.0), (name, code.cast_unsigned()), "{text}");
        }
        other => panic!("{name} {code:#x}: {other}"),
    }
}

#[test]
fn the_second_object_of_a_range_fails_cleanly() {
    let settings = RmSettings { bar1: 5 << 20, ..RmSettings::default() };
    let bench = Bench::with(1, settings);
    let rm = bench.open();
    let base = bench.vmm(0, &[4 << 20, 2 << 20]);
    let pin = pin(&rm, base, 6 << 20).unwrap();
    let error = refusal(pin.map(6 << 20, None));
    assert!(matches!(error, Error::Exhausted { what: "BAR1 space", len: 0x20_0000, .. }), "{error}");
    assert_eq!(bench.driver.live(), Live { objects: 3, ..AT_REST });
    let range = pin.map(5 << 20, None).unwrap();
    check_bytes(&pin, &range, base, 5 << 20);
    drop((range, pin, rm));
    bench.check_clean();
}

#[test]
fn what_unpin_could_not_do_it_says() {
    let bench = Bench::new(1);
    let rm = bench.open();
    let addr = bench.alloc(0, 4096, MemoryKind::Malloc);
    let pin = pin(&rm, addr, 4096).unwrap();
    bench.machine.fail("rm free", 0x0f);
    let error = refusal(pin.unpin());
    assert!(matches!(error, Error::Rm { call: "rm free", status: 0x0f, .. }), "{error}");
}

#[test]
fn a_driver_that_maps_wrong_pages_is_found_out_at_the_start() {
    for fault in ["rm shift", "rm at start", "rm swap"] {
        let bench = Bench::new(1);
        bench.machine.fail(fault, 16);
        let error = refusal(Backend::rm(&bench.system));
        assert!(matches!(error, Error::ProofFailed { .. }), "{error}");
        bench.check_clean();
        assert_eq!(bench.machine.memory.lock().allocations(), 0);
    }
}

#[test]
fn an_attempt_that_failed_for_now_leaves_its_scratch_memory_to_the_next() {
    const INSUFFICIENT_RESOURCES: i32 = 0x1a;
    let bench = Bench::new(2);
    let rm = bench.open();
    let addr = bench.alloc(1, 4096, MemoryKind::Malloc);
    let allocations = || bench.machine.memory.lock().allocations();
    let before = allocations();
    bench.machine.fail("rm map", INSUFFICIENT_RESOURCES);
    for _ in 0..3 {
        assert!(matches!(refusal(map(&rm, addr, 4096)), Error::Exhausted { .. }));
        assert_eq!(allocations(), before + 1);
    }
    bench.machine.fail("rm map", 0);
    map(&rm, addr, 4096).unwrap();
    drop(rm);
    assert_eq!(allocations(), 1, "the user's");
    bench.check_clean();
}

#[test]
fn a_driver_that_maps_wrong_pages_later_is_found_out_by_the_bytes() {
    for fault in ["rm shift", "rm swap"] {
        for kind in [MemoryKind::Malloc, MemoryKind::Vmm] {
            let bench = Bench::new(1);
            let rm = bench.open();
            let addr = bench.alloc(0, 4 << 20, kind);
            let before = bench.read(0, addr, 4 << 20);
            map(&rm, addr, 4 << 20).unwrap();
            bench.machine.fail(fault, 16);
            let error = refusal(map(&rm, addr, 2 << 20));
            assert!(matches!(error, Error::ProofFailed { .. }), "{error}");
            assert_eq!(bench.driver.live(), AT_REST);
            assert_eq!(bench.read(0, addr, 4 << 20), before, "the user's memory is never written");
            drop(rm);
            bench.check_clean();
        }
    }
}

#[test]
fn a_vmm_mapping_that_begins_inside_its_object_is_found_out_by_the_bytes() {
    let bench = Bench::new(1);
    let rm = bench.open();
    let object = Object::new(0, 4 << 20).unwrap();
    bench.machine.memory.lock().insert(RESERVED, 2 << 20, object, 2 << 20, MemoryKind::Vmm);
    bench.fill(0, RESERVED, 2 << 20);
    assert!(matches!(map(&rm, RESERVED, 2 << 20), Err(Error::ProofFailed { .. })));
    drop(rm);
    bench.check_clean();
}

#[test]
fn a_route_that_failed_stays_refused_unless_asking_again_may_help() {
    let bench = Bench::new(1);
    let rm = bench.open();
    let addr = bench.alloc(0, 2 << 20, MemoryKind::Vmm);
    bench.machine.fail("rm map", NvStatus::INSUFFICIENT_RESOURCES.0.cast_signed());
    assert!(matches!(pin(&rm, addr, 1), Err(Error::Exhausted { .. })));
    bench.machine.fail("rm map", NvStatus::BUSY_RETRY.0.cast_signed());
    assert!(matches!(pin(&rm, addr, 1), Err(Error::Rm { status: 3, .. })));
    bench.machine.fail("rm map", NvStatus::NOT_SUPPORTED.0.cast_signed());
    assert!(matches!(pin(&rm, addr, 1), Err(Error::Rm { status: 0x56, .. })));
    bench.machine.fail("rm map", 0);
    let error = refusal(pin(&rm, addr, 1));
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("NOT_SUPPORTED"), "{error}");
    // The other route is another matter.
    let malloc = bench.alloc(0, 4096, MemoryKind::Malloc);
    map(&rm, malloc, 4096).unwrap();
    drop(rm);
    bench.check_clean();
}
