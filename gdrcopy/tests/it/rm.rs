//! The resource manager's backend on a simulated driver: refusals, mappings, and every call failing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gdrcopy::cuda::{Cuda, MemoryKind};
use gdrcopy::system::System;
use gdrcopy::{Error, Gdr, Mapping, Pin, PinFlags, Result};
use gdsync_testkit::{
    CudaSettings, Live, Machine, Module, Object, RmSettings, SimulatedCuda, SimulatedKernel,
};

use crate::rig::{Interrupted, Rig, no_cuda, open_rm};
use crate::rm_abi::{Dup, Escape, NvStatus};

/// Addresses where no simulated allocation lies.
const RESERVED: u64 = 0x7e00_0000_0000;

fn with(settings: RmSettings) -> Rig {
    Rig::with(1, Module::default(), settings)
}

fn open(rig: &Rig) -> Gdr {
    open_rm(&rig.system).unwrap()
}

/// Writes to each byte what belongs to its address.
fn fill(rig: &Rig, gpu: i32, addr: u64, len: usize) {
    let bytes: Vec<u8> = (addr..addr + len as u64).map(pattern).collect();
    rig.write(gpu, addr, &bytes);
}

/// Filled memory.
fn alloc(rig: &Rig, gpu: i32, len: usize, kind: MemoryKind) -> u64 {
    let addr = rig.memory(gpu, len, kind);
    fill(rig, gpu, addr, len);
    addr
}

/// Adjacent, filled VMM mappings of one object each.
fn vmm(rig: &Rig, gpu: i32, sizes: &[usize]) -> u64 {
    let mut at = RESERVED;
    for &size in sizes {
        let object = Object::new(gpu, size).unwrap();
        rig.machine.memory.lock().insert(at, size, object, 0, MemoryKind::Vmm);
        fill(rig, gpu, at, size);
        at += size as u64;
    }
    RESERVED
}

/// The memory of GPUs.
const KINDS: [MemoryKind; 3] = [MemoryKind::Malloc, MemoryKind::Vmm, MemoryKind::Pool];

/// What a client of one GPU holds at rest.
const AT_REST: Live = Live { files: 2, clients: 1, objects: 1, mappings: 0 };

/// The byte at an address; different from that of near and of page-wise far addresses.
fn pattern(addr: u64) -> u8 {
    (addr.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56).to_le_bytes()[0]
}

fn pin(rm: &Gdr, addr: u64, len: usize) -> Result<Pin> {
    rm.pin_with(addr, len, PinFlags::empty())
}

fn map(rm: &Gdr, addr: u64, len: usize) -> Result<(Pin, Mapping)> {
    let pin = pin(rm, addr, len)?;
    let range = pin.map_pages(pin.info().mapped_size, None)?;
    Ok((pin, range))
}

fn refusal<T>(result: Result<T>) -> Error {
    match result {
        Ok(_) => panic!("accepted"),
        Err(error) => error,
    }
}

fn load(range: &Mapping, offset: usize) -> u8 {
    range.load(offset).unwrap()
}

fn store(range: &Mapping, offset: usize, byte: u8) {
    range.store(offset, byte).unwrap();
}

/// The user's part of a mapping shows each byte of `len` at `addr`.
fn check_bytes(pin: &Pin, range: &Mapping, addr: u64, len: usize) {
    let first = usize::try_from(addr - pin.info().va).unwrap();
    for at in 0..len {
        let wanted = pattern(addr + at as u64);
        assert_eq!(load(range, first + at), wanted, "byte {at} of {len} at {addr:#x}");
    }
}

fn text<T>(result: Result<T>) -> String {
    refusal(result).to_string()
}

#[test]
fn a_machine_without_driver_or_gpu_says_what_to_do() {
    let machine = Machine::new(1);
    let cuda = SimulatedCuda::new(&machine);
    let bare = Arc::new(SimulatedKernel::new(machine.clone()));
    let refused = |system: System| text(open_rm(&system));
    let error = refused(System::new(bare.clone(), Some(cuda as Arc<dyn Cuda>)));
    assert!(error.contains("/dev/nvidiactl") && error.contains("nvidia-modprobe"), "{error}");
    assert!(refused(System::new(bare, no_cuda())).contains("CUDA"));

    let none = Rig::with_gpus(0, Module::default());
    assert!(refused(none.system.clone()).contains("CUDA_VISIBLE_DEVICES"));
    none.check_clean();

    let rig = Rig::new(Module::default());
    for (node, fix) in [("/dev/nvidiactl", "permission"), ("/dev/nvidia0", "permission")] {
        rig.machine.fail(&format!("open {node}"), libc::EACCES);
        let error = refused(rig.system.clone());
        assert!(error.contains(node) && error.contains(fix), "{error}");
        rig.machine.fail(&format!("open {node}"), 0);
    }
    rig.check_clean();
}

#[test]
fn memory_that_is_no_gpus_is_refused_by_kind() {
    let rig = Rig::new(Module::default());
    let rm = open(&rig);
    for (kind, words) in [(MemoryKind::Managed, "managed"), (MemoryKind::Host, "host memory")] {
        let addr = rig.memory(0, 4096, kind);
        let error = text(pin(&rm, addr, 16));
        assert!(error.contains(words), "{error}");
    }
    assert!(text(pin(&rm, RESERVED - 4096, 16)).contains("no CUDA memory"));
    drop(rm);
    rig.check_clean();
}

#[test]
fn gpus_that_cannot_be_mapped_are_refused() {
    let (confidential, partitioned) = (
        RmSettings { confidential: true, ..RmSettings::default() },
        RmSettings { partitioned: true, ..RmSettings::default() },
    );
    // A driver without the query; then the name tells a partition.
    let older = RmSettings { knows_partitioned: false, ..partitioned };
    type Change = fn(&mut CudaSettings);
    let cases: [(RmSettings, Change, &str); 8] = [
        (RmSettings::default(), |cuda| cuda.attributes.extend([(124, 0)]), "open kernel modules"),
        (confidential, |_| {}, "confidential"),
        (partitioned, |_| {}, "MIG"),
        (older, |cuda| cuda.name = "NVIDIA H200 MIG 1g.18gb".into(), "MIG"),
        (RmSettings::default(), |cuda| cuda.attributes.extend([(100, 1)]), "coherent"),
        (RmSettings::default(), |cuda| cuda.pci = Some("0000:ff:00.0".into()), "does not list"),
        (RmSettings::default(), |cuda| cuda.pci = Some("0001:0f:00.0".into()), "does not list"),
        (RmSettings::default(), |cuda| cuda.pci = Some("15".into()), "hexadecimal"),
    ];
    for (settings, change, words) in cases {
        let rig = with(settings);
        change(&mut rig.machine.cuda.lock());
        let error = text(open_rm(&rig.system));
        assert!(error.contains(words), "{error}");
        rig.check_clean();
    }
    open(&with(older));
}

#[test]
fn a_range_ends_before_memory_of_another_gpu() {
    let rig = Rig::with_gpus(2, Module::default());
    let rm = open(&rig);
    let vmm = vmm(&rig, 0, &[2 << 20, 2 << 20]);
    let other = Object::new(1, 2 << 20).unwrap();
    rig.machine.memory.lock().insert(vmm + (4 << 20), 2 << 20, other, 0, MemoryKind::Vmm);
    for len in [(4 << 20) + 1, 5 << 20, isize::MAX.unsigned_abs()] {
        assert!(matches!(pin(&rm, vmm, len), Err(Error::BeyondAllocation { .. })), "{len}");
    }
    drop(rm);
    rig.check_clean();
}

/// Calls whose fault is an `NV_STATUS`.
const CALLS: [&str; 9] = [
    "rm alloc",
    "rm id info",
    "rm alloc device",
    "rm alloc subdevice",
    "rm gpu info",
    "rm dup",
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

const CUDA_CALLS: [&str; 8] = [
    "cuDeviceGetCount",
    "cuDeviceGetAttribute",
    "cuPointerGetAttributes",
    "cuMemGetHandleForAddressRange",
    "cuMemAlloc",
    "cuMemCreate",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
];

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
        let rig = Rig::new(Module::default());
        rig.machine.fail(name, code);
        let opened = open_rm(&rig.system).map(drop);
        rig.machine.fail(name, 0);
        match opened {
            // Not needed for the proof, or answered otherwise.
            Ok(()) => assert!(
                is_of_drop(name) || ["rm gpu info", "cuMemCreate"].contains(&name),
                "{name} {code:#x}"
            ),
            Err(error) => check_error(&error, name, code),
        }
        assert_eq!(rig.machine.memory.lock().allocations(), 0, "{name} {code:#x}");
        if is_of_drop(name) {
            continue;
        }
        rig.check_clean();
        open(&rig);
        rig.check_clean();
    }
}

#[test]
fn pinning_and_mapping_fail_cleanly_at_every_call() {
    for kind in KINDS {
        for (name, code) in faults() {
            let rig = Rig::new(Module::default());
            let rm = open(&rig);
            let len = 5 << 16;
            let addr = alloc(&rig, 0, len, kind);
            // The route is proved before anything fails.
            map(&rm, addr, len).unwrap();
            rig.machine.fail(name, code);
            let mapped = map(&rm, addr + 99_999, 4 << 15);
            if let Err(error) = &mapped {
                check_error(error, name, code);
            }
            drop(mapped);
            rig.machine.fail(name, 0);
            if !is_of_drop(name) {
                assert_eq!(rig.rm.live(), AT_REST, "{name} {code:#x}");
                let (pin, range) = map(&rm, addr, len).unwrap();
                check_bytes(&pin, &range, addr, 1000);
            }
            drop(rm);
            if is_of_drop(name) {
                assert_eq!(rig.rm.live(), Live::default(), "{name} {code:#x}");
            } else {
                rig.check_clean();
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
    let rig = with(settings);
    let rm = open(&rig);
    let base = vmm(&rig, 0, &[4 << 20, 2 << 20]);
    let pin = pin(&rm, base, 6 << 20).unwrap();
    let error = refusal(pin.map_pages(6 << 20, None));
    assert!(matches!(error, Error::Exhausted { what: "BAR1 space", len: 0x20_0000, .. }), "{error}");
    assert_eq!(rig.rm.live(), Live { objects: 3, ..AT_REST });
    let range = pin.map_pages(5 << 20, None).unwrap();
    check_bytes(&pin, &range, base, 5 << 20);
    drop((range, pin, rm));
    rig.check_clean();
}

#[test]
fn unpin_returns_its_error() {
    let rig = Rig::new(Module::default());
    let rm = open(&rig);
    let addr = alloc(&rig, 0, 4096, MemoryKind::Malloc);
    let pin = pin(&rm, addr, 4096).unwrap();
    rig.machine.fail("rm free", 0x0f);
    let error = refusal(pin.unpin());
    assert!(matches!(error, Error::Rm { call: "rm free", status: 0x0f, .. }), "{error}");
}

#[test]
fn a_proof_that_failed_keeps_its_scratch_memory_and_is_tried_again() {
    let rig = Rig::with_gpus(2, Module::default());
    let rm = open(&rig);
    let addr = alloc(&rig, 1, 4096, MemoryKind::Malloc);
    let allocations = || rig.machine.memory.lock().allocations();
    let before = allocations();
    for status in [NvStatus::INSUFFICIENT_RESOURCES, NvStatus::BUSY_RETRY, NvStatus::NOT_SUPPORTED] {
        rig.machine.fail("rm map", status.0.cast_signed());
        match refusal(map(&rm, addr, 4096)) {
            Error::Exhausted { .. } => assert_eq!(status, NvStatus::INSUFFICIENT_RESOURCES),
            error => assert!(matches!(error, Error::Rm { status: told, .. } if told == status.0), "{error}"),
        }
        assert_eq!(allocations(), before + 1);
    }
    rig.machine.fail("rm map", 0);
    map(&rm, addr, 4096).unwrap();
    drop(rm);
    assert_eq!(allocations(), 1, "the user's");
    rig.check_clean();
}

#[test]
fn a_part_of_an_object_is_mapped() {
    let rig = Rig::new(Module::default());
    let rm = open(&rig);
    let object = Object::new(0, 4 << 20).unwrap();
    rig.machine.memory.lock().insert(RESERVED, 2 << 20, object, 2 << 20, MemoryKind::Vmm);
    fill(&rig, 0, RESERVED, 2 << 20);
    let (pin, range) = map(&rm, RESERVED + 4096, 1 << 20).unwrap();
    check_bytes(&pin, &range, RESERVED + 4096, 1 << 20);
    drop((range, pin));
    rig.machine.fail("rm at start", 1);
    assert!(matches!(map(&rm, RESERVED, 2 << 20), Err(Error::ProofFailed { .. })));
    drop(rm);
    rig.check_clean();
}

#[test]
fn an_object_under_two_addresses_is_held_once() {
    let rig = Rig::new(Module::default());
    let rm = open(&rig);
    let (half, object) = (1 << 20, Object::new(0, 2 << 20).unwrap());
    for (at, offset) in [(0, half), (half, 0)] {
        let base = RESERVED + at as u64;
        rig.machine.memory.lock().insert(base, half, object.clone(), offset, MemoryKind::Vmm);
        fill(&rig, 0, base, half);
    }
    let (pin, range) = map(&rm, RESERVED, 2 * half).unwrap();
    assert_eq!(rig.rm.live(), Live { files: 4, objects: 2, mappings: 2, ..AT_REST });
    check_bytes(&pin, &range, RESERVED, 2 * half);
    drop((range, pin, rm));
    rig.check_clean();
}

#[test]
fn memory_that_is_freed_on_the_way_is_refused() {
    let rig = Rig::new(Module::default());
    let kernel = rig.system.kernel().clone();
    let make_anew = |machine: &Machine| {
        let mut memory = machine.memory.lock();
        let old = memory.free(RESERVED).unwrap();
        memory.insert(RESERVED, old.len, Object::new(0, old.len).unwrap(), 0, old.kind);
    };
    let late = Interrupted::new(kernel, &rig.machine, Some(Dup::REQUEST), make_anew);
    let rm = open_rm(&System::new(late.clone(), Some(rig.cuda.clone()))).unwrap();
    let base = vmm(&rig, 0, &[2 << 20]);
    // With the object kept alive, its handle names it still; without, the handle names nothing.
    let kept = rig.machine.memory.lock().find(base).unwrap().object.clone();
    late.arm();
    assert!(matches!(pin(&rm, base, 4096), Err(Error::Invalidated)));
    drop(kept);
    late.arm();
    assert!(matches!(pin(&rm, base, 4096), Err(Error::Invalidated)));
    assert!(map(&rm, base, 4096).is_ok());
    drop(rm);
    rig.check_clean();
}

#[test]
fn a_revoked_range_releases_its_bar1_space() {
    let rig = Rig::new(Module::default());
    let rm = open(&rig);
    let sizes = [2 << 20, 4 << 20];
    let base = vmm(&rig, 0, &sizes);
    let (pin, range) = map(&rm, base, sizes.iter().sum()).unwrap();
    assert_eq!(rig.rm.live().mappings, 2);
    range.revoke().unwrap();
    assert_eq!(rig.rm.live(), Live { objects: AT_REST.objects + 2, ..AT_REST });
    pin.unpin().unwrap();
    drop(rm);
    rig.check_clean();
}

#[test]
fn vmm_ranges_over_several_objects_are_one_range() {
    let rig = Rig::new(Module::default());
    let rm = open(&rig);
    let (a, b, c) = (2 << 20, 4 << 20, 1 << 20);
    let base = vmm(&rig, 0, &[a, b, c]);
    for (skip, len, objects) in [
        (0, a + b + c, 3),
        (0, a, 1),
        (a, b, 1),
        (a - 1, 2, 2),
        (a - 70_000, b + 140_000, 3),
        (a + b, c, 1),
        (5, 1, 1),
    ] {
        let addr = base + skip as u64;
        let (pin, range) = map(&rm, addr, len).unwrap();
        assert_eq!(rig.rm.live().mappings, objects);
        check_bytes(&pin, &range, addr, len);
        let last = usize::try_from(addr - pin.info().va).unwrap() + len - 1;
        store(&range, last, 7);
        assert_eq!(rig.read(0, addr + len as u64 - 1, 1), [7]);
        drop((range, pin));
        assert_eq!(rig.rm.live(), AT_REST);
        fill(&rig, 0, addr, len);
    }
    drop(rm);
    rig.check_clean();
}

#[test]
fn each_gpu_is_found_by_its_address() {
    let rig = Rig::with_gpus(3, Module::default());
    let rm = open(&rig);
    for gpu in [2, 0, 1] {
        for kind in KINDS {
            let addr = alloc(&rig, gpu, 3 << 16, kind);
            let (pin, range) = map(&rm, addr + 5, 100_000).unwrap();
            check_bytes(&pin, &range, addr + 5, 100_000);
        }
    }
    assert_eq!(rig.rm.live(), Live { files: 4, clients: 1, objects: 3, mappings: 0 });
    drop(rm);
    rig.check_clean();
}

#[test]
fn memory_that_changes_is_compared_again() {
    let rig = Rig::new(Module::default());
    let rm = open(&rig);
    let base = alloc(&rig, 0, 4096, MemoryKind::Malloc);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut byte = 0;
            while !stop.load(Ordering::Relaxed) {
                byte ^= 1;
                rig.write(0, base, &[byte]);
            }
        });
        for _ in 0..200 {
            // Memory in motion may be refused as such, never as wrong.
            match map(&rm, base, 4096) {
                Ok(_) => {}
                Err(Error::ProofFailed { found, .. }) => assert!(found.contains("changed"), "{found}"),
                Err(other) => panic!("{other}"),
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    drop(rm);
    rig.check_clean();
}
