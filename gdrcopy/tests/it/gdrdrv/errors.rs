//! Each `errno` of the module becomes an error with a cause and a fix.

use std::sync::Arc;

use gdrcopy::cuda::{AllocKind, MemoryKind};
use gdrcopy::system::System;
use gdrcopy::{Error, MappingType, PinFlags, Result};
use gdsync_testkit::{Machine, Module, SimulatedKernel};

use crate::rig::{Backend, DEVICES, ENOTSUPP, Memory, Pinned, Rig, no_cuda};

fn refusal(system: &System) -> String {
    Backend::volatile_gdrdrv(system).unwrap_err().to_string()
}

#[test]
fn each_cause_has_its_own_fix() {
    let with_module = Rig::new(Module::default());
    let causes = [
        (libc::ENOENT, "sudo mknod /dev/gdrdrv"),
        (libc::ENXIO, "another module's number"),
        (libc::ENODEV, "another module's number"),
        (libc::EACCES, "chmod 666"),
        (libc::EPERM, "--device /dev/gdrdrv"),
        (libc::EMFILE, "ulimit -n"),
        (libc::ENFILE, "ulimit -n"),
        (libc::ENOMEM, "kernel log"),
    ];
    for (errno, fix) in causes {
        with_module.machine.fail("open /dev/gdrdrv", errno);
        let text = refusal(&with_module.system);
        assert!(text.contains(fix) && text.contains("major number 511"), "{errno}: {text}");
        let error = Backend::volatile_gdrdrv(&with_module.system).unwrap_err();
        assert_eq!(error.errno(), errno);
    }
    with_module.machine.fail("open /dev/gdrdrv", 0);
    Backend::gdrdrv(&with_module.system).unwrap();
}

#[test]
fn without_the_module_it_is_to_be_loaded() {
    // A block device of that name is not the module.
    let devices = DEVICES.replace("511 gdrdrv\n", "").replace("7 loop", "7 gdrdrv");
    let machine = Machine::new(1);
    let kernel = SimulatedKernel::new(machine.clone()).with_text("/proc/devices", &devices);
    let system = System::new(Arc::new(kernel), no_cuda());
    for errno in [libc::ENOENT, libc::ENXIO] {
        machine.fail("open /dev/gdrdrv", errno);
        let text = refusal(&system);
        assert!(text.contains("modprobe gdrdrv") && text.contains("module not loaded"), "{errno}: {text}");
    }
}

#[test]
fn an_unreadable_proc_is_reported() {
    let kernel = SimulatedKernel::new(Machine::new(1));
    let text = refusal(&System::new(Arc::new(kernel), no_cuda()));
    assert!(text.contains("/proc/devices unreadable"), "{text}");
}

#[test]
fn versions_that_do_not_fit_are_refused() {
    let cases = [
        (Module { version: (1, 5), ..Module::default() }, "load gdrdrv 2.5"),
        (Module { minimum_library: (2, 7), ..Module::default() }, "update this crate"),
    ];
    for (module, fix) in cases {
        let rig = Rig::new(module);
        let error = Backend::volatile_gdrdrv(&rig.system).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains(fix), "{error}");
        assert_eq!(rig.device.open_files(), 0);
    }
    // A higher major number that accepts this library is taken.
    let rig = Rig::new(Module { version: (3, 1), ..Module::default() });
    Backend::gdrdrv(&rig.system).unwrap();
}

#[test]
fn what_has_no_version_is_too_old_or_no_gdrdrv() {
    let rig = Rig::new(Module::default());
    for (errno, text) in [
        (libc::ENOTTY, "the device file has another module's number"),
        (libc::EINVAL, "the device file has another module's number"),
        (libc::EIO, "GET_VERSION"),
    ] {
        rig.machine.fail("gdrdrv version", errno);
        assert!(refusal(&rig.system).contains(text), "{}", refusal(&rig.system));
    }
}

#[test]
fn closing_gives_the_file_back() {
    let rig = Rig::new(Module::default());
    let gdrdrv = Backend::gdrdrv(&rig.system).unwrap();
    assert_eq!(rig.device.open_files(), 1);
    drop(gdrdrv);
    assert_eq!(rig.device.open_files(), 0);
}

const NONE: PinFlags = PinFlags::empty();

struct Opened {
    rig: Rig,
    gdrdrv: Backend,
    memory: Memory,
}

impl Opened {
    fn new() -> Self {
        let rig = Rig::new(Module::default());
        let gdrdrv = Backend::gdrdrv(&rig.system).unwrap();
        let memory = gdrdrv.allocate(0, 65_536).unwrap();
        Self { rig, gdrdrv, memory }
    }

    fn pin(&self, flags: PinFlags) -> Result<Pinned> {
        self.gdrdrv.pin(self.memory.addr(), 65_536, flags)
    }

    fn pinned(&self) -> Pinned {
        self.pin(NONE).unwrap()
    }

    fn fail(&self, operation: &str, errno: i32) {
        self.rig.machine.fail(&format!("gdrdrv {operation}"), errno);
    }
}

/// An error of a system call with this number and this in its text.
fn is_sys(error: &Error, errno: i32, text: &str) {
    assert!(matches!(error, Error::Sys { .. }), "{error:?}");
    assert_eq!(error.errno(), errno);
    assert!(error.to_string().contains(text), "{error}");
}

#[test]
fn of_a_pin() {
    let it = Opened::new();
    for (errno, text) in [
        (libc::EINVAL, "nv-p2p-dummy"),
        (libc::EFAULT, "build it anew"),
        (libc::EACCES, "after a fork"),
        (libc::EIO, "error state"),
        (libc::EBUSY, "try again"),
        (libc::ENODEV, "nvidia-smi"),
        (libc::ERANGE, "not expected"),
    ] {
        it.fail("pin", errno);
        is_sys(&it.pin(NONE).unwrap_err(), errno, text);
    }
    it.fail("pin", libc::ENOMEM);
    let error = it.pin(NONE).unwrap_err();
    assert!(matches!(error, Error::Exhausted { len: 65_536, .. }), "{error:?}");
    for errno in [ENOTSUPP, libc::EOPNOTSUPP] {
        it.fail("pin", errno);
        let error = it.pin(NONE).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }) && error.to_string().contains("MIG"), "{error}");
        let error = it.pin(PinFlags::FORCE_PCIE).unwrap_err();
        assert!(matches!(&error, Error::Unsupported { what, .. } if what == "FORCE_PCIE"), "{error}");
    }
    it.fail("pin", 0);
    assert_eq!(it.rig.device.live_pins(), 0);
    it.pin(NONE).unwrap();
}

#[test]
fn of_a_gpu_that_cannot() {
    let it = Opened::new();
    it.fail("pin", libc::EINVAL);
    it.rig.machine.cuda.lock().attributes.insert(116, 0);
    let error = it.pin(NONE).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }) && error.to_string().contains("GeForce"), "{error}");
    // CUDA's own failure comes first.
    it.rig.machine.cuda.lock().attributes.remove(&116);
    assert!(matches!(it.pin(NONE), Err(Error::Cuda { .. })));
}

#[test]
fn of_memory_that_is_not_made_for_it() {
    let it = Opened::new();
    it.fail("pin", libc::EINVAL);
    let vmm = it.rig.cuda.alloc(0, 1 << 21, AllocKind::Vmm).unwrap();
    is_sys(&it.gdrdrv.pin(vmm, 1, NONE).unwrap_err(), libc::EINVAL, "gpuDirectRDMACapable");
    let pool = it.rig.machine.memory.lock().alloc(0, 4096, MemoryKind::Pool).unwrap();
    is_sys(&it.gdrdrv.pin(pool, 1, NONE).unwrap_err(), libc::EINVAL, "cuMemAlloc");
    for kind in [MemoryKind::Managed, MemoryKind::Host] {
        let addr = it.rig.machine.memory.lock().alloc(0, 4096, kind).unwrap();
        assert!(matches!(it.gdrdrv.pin(addr, 1, NONE), Err(Error::NotMappable { .. })));
    }
}

#[test]
fn of_bar1_that_is_full_until_something_is_unpinned() {
    let rig = Rig::new(Module { bar1: 4 << 16, ..Module::default() });
    let gdrdrv = Backend::gdrdrv(&rig.system).unwrap();
    let memory = gdrdrv.allocate(0, 8 << 16).unwrap();
    let pin = |pages: usize| gdrdrv.pin(memory.addr(), pages << 16, NONE);
    assert!(matches!(pin(5), Err(Error::Exhausted { .. })));
    let held = pin(3).unwrap();
    assert!(matches!(pin(2), Err(Error::Exhausted { .. })));
    let more = pin(1).unwrap();
    drop(held);
    assert!(pin(3).is_ok());
    drop(more);
    assert!(pin(4).is_ok());
}

#[test]
fn of_a_mapping() {
    let it = Opened::new();
    let pin = it.pinned();
    for (errno, text) in [
        (libc::EAGAIN, "nopat"),
        (libc::ENOMEM, "max_map_count"),
        (libc::EACCES, "after a fork"),
        (libc::EIO, "error state"),
        (libc::EINVAL, "not expected"),
    ] {
        it.fail("mmap", errno);
        is_sys(&pin.map(1, None).unwrap_err(), errno, text);
    }
    it.fail("mmap", 0);
    let range = pin.map(1, None).unwrap();
    // The front end lets no second one through; the driver neither.
    assert!(matches!(pin.map(1, None), Err(Error::AlreadyMapped)));
    it.fail("type", libc::ENOTTY);
    assert!(matches!(pin.map(1, None), Err(Error::AlreadyMapped)));
    drop(range);
    pin.map(1, None).unwrap();
}

#[test]
fn of_a_type_request() {
    let it = Opened::new();
    let pin = it.pinned();
    it.fail("type", libc::EOPNOTSUPP);
    let error = pin.map(1, Some(MappingType::WriteCombining)).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    is_sys(&pin.map(1, None).unwrap_err(), libc::EOPNOTSUPP, "REQ_MAPPING_TYPE");
    it.fail("type", libc::EIO);
    is_sys(&pin.map(1, None).unwrap_err(), libc::EIO, "REQ_MAPPING_TYPE");
}

#[test]
fn of_questions() {
    let it = Opened::new();
    let pin = it.pinned();
    it.fail("flag", libc::EIO);
    is_sys(&pin.invalidated().unwrap_err(), libc::EIO, "GET_CB_FLAG");
    it.fail("info", libc::EIO);
    is_sys(&pin.map(1, None).unwrap_err(), libc::EIO, "GET_INFO");
    is_sys(&it.pin(NONE).unwrap_err(), libc::EIO, "GET_INFO");
    it.fail("info", 0);
    // Neither left anything behind.
    pin.map(1, None).unwrap();
    assert_eq!(it.rig.device.live_pins(), 1);
    it.fail("attr", libc::EIO);
    is_sys(&Backend::gdrdrv(&it.rig.system).unwrap_err(), libc::EIO, "GET_ATTR");
}

#[test]
fn of_a_driver_that_pins_something_else() {
    let it = Opened::new();
    it.fail("wrong page", 1);
    let error = it.pin(NONE).unwrap_err();
    assert!(matches!(error, Error::ProofFailed { .. }), "{error:?}");
    assert_eq!(it.rig.device.live_pins(), 0);
}

#[test]
fn of_an_unpin() {
    let it = Opened::new();
    it.fail("unpin", libc::EACCES);
    is_sys(&it.pinned().unpin().unwrap_err(), libc::EACCES, "UNPIN_BUFFER");
    // A drop has nobody to tell.
    drop(it.pinned());
    assert_eq!(it.rig.device.live_pins(), 2);
    // Closing the file takes them all.
    drop((it.gdrdrv, it.memory));
    assert_eq!(it.rig.device.live_pins(), 0);
}
