//! The gdrdrv backend against every version and mode of the simulated module, and each `errno` of it.

use std::sync::Arc;

use MappingType::{Cached, Device, WriteCombining};
use gdrcopy::cuda::{AllocKind, MemoryKind};
use gdrcopy::system::System;
use gdrcopy::{Attribute, Error, Gdr, GpuBuffer, MappingType, Pin, PinFlags, Result};
use gdsync_testkit::{Machine, Module, SimulatedKernel};

use crate::rig::{
    DEVICES, ENOTSUPP, End, Rig, in_child, no_cuda, open_gdrdrv, open_volatile_gdrdrv, peek, poke,
};

const NONE: PinFlags = PinFlags::empty();

/// Pins, maps and looks at both sides.
fn works(gdrdrv: &Gdr) {
    let memory = gdrdrv.alloc(0, 200_000).unwrap();
    // Not at the start of a GPU page, which no version maps by itself.
    let pin = gdrdrv.pin_with(memory.addr() + 70_001, 100, NONE).unwrap();
    assert_eq!((pin.info().va, pin.info().mapped_size), (memory.addr() + 65_536, 65_536));
    assert_eq!(pin.info().page_size, 65_536);
    for request in [None, Some(MappingType::WriteCombining)] {
        let range = pin.map_pages(70_001 - 65_536 + 100, request).unwrap();
        assert_eq!(range.kind(), MappingType::WriteCombining);
        poke(&range, 70_001 - 65_536, b"word");
        let mut seen = [0; 4];
        memory.copy_out(70_001, &mut seen).unwrap();
        assert_eq!(&seen, b"word");
    }
    let wish = pin.map_pages(1, Some(MappingType::Cached));
    assert!(matches!(wish, Err(Error::Unsupported { .. })), "{wish:?}");
    assert!(!pin.invalidated().unwrap());
    assert_eq!(peek(&pin.map_pages(1, None).unwrap(), 0, 1), [0]);
    pin.unpin().unwrap();
}

#[test]
fn all_of_them_pin_and_map() {
    for version in [(2, 0), (2, 3), (2, 4), (2, 5), (2, 6), (2, 9)] {
        for persistent in [false, true] {
            let rig = Rig::new(Module { version, persistent, ..Module::default() });
            let gdrdrv = open_volatile_gdrdrv(&rig.system).unwrap();
            assert_eq!(gdrdrv.driver_version(), Some(version));
            works(&gdrdrv);
            assert_eq!(rig.device.live_pins(), 0);
            let told = u32::from(persistent && version >= (2, 5));
            assert_eq!(gdrdrv.attribute(Attribute::UsePersistentMapping).unwrap(), told);
            assert_eq!(gdrdrv.attribute(Attribute::SupportPinFlagForcePcie).unwrap(), told);
            assert_eq!(gdrdrv.attribute(Attribute::UsingDmaBufMmap).unwrap(), 0);
        }
    }
}

#[test]
fn without_cuda_the_module_checks_the_range() {
    let rig = Rig::new(Module::default());
    let gdrdrv = open_gdrdrv(&rig.without_cuda()).unwrap();
    let addr = rig.memory(0, 100, MemoryKind::Malloc);
    let pin = gdrdrv.pin_with(addr, 100, NONE).unwrap();
    assert_eq!(peek(&pin.map_pages(100, None).unwrap(), 0, 1), [0]);
    let refused = gdrdrv.pin_with(4096, 1, NONE).unwrap_err();
    assert_eq!(refused.errno(), libc::EINVAL);
    assert!(refused.to_string().contains("GPUDirect RDMA"), "{refused}");
    assert!(matches!(gdrdrv.alloc(0, 1), Err(Error::Unsupported { .. })));
}

#[test]
fn a_newer_module_without_newer_requests_gets_the_older_ones() {
    for errno in [libc::EINVAL, libc::ENOTTY, libc::EOPNOTSUPP] {
        let rig = Rig::new(Module::default());
        for request in ["pin v2", "info v2"] {
            rig.machine.fail(&format!("gdrdrv {request}"), errno);
        }
        if errno != libc::EOPNOTSUPP {
            rig.machine.fail("gdrdrv type", errno);
        }
        works(&open_gdrdrv(&rig.system).unwrap());
        assert_eq!(rig.device.live_pins(), 0);
    }
}

#[test]
fn a_failure_of_the_newer_request_is_not_hidden_by_the_older() {
    let rig = Rig::new(Module::default());
    let gdrdrv = open_gdrdrv(&rig.system).unwrap();
    let memory = gdrdrv.alloc(0, 64).unwrap();
    rig.machine.fail("gdrdrv pin v2", libc::ENOMEM);
    assert!(matches!(gdrdrv.pin_with(memory.addr(), 64, NONE), Err(Error::Exhausted { .. })));
    rig.machine.fail("gdrdrv pin v2", 0);
    rig.machine.fail("gdrdrv info v2", libc::EIO);
    assert_eq!(gdrdrv.pin_with(memory.addr(), 64, NONE).unwrap_err().errno(), libc::EIO);
    assert_eq!(rig.device.live_pins(), 0);
}

#[test]
fn force_pcie_needs_the_newer_pin() {
    for (module, good) in [
        (Module::default(), true),
        (Module { force_pcie: false, ..Module::default() }, false),
        (Module { persistent: false, ..Module::default() }, false),
        (Module { version: (2, 4), ..Module::default() }, false),
    ] {
        let rig = Rig::new(module);
        let gdrdrv = open_volatile_gdrdrv(&rig.system).unwrap();
        let memory = gdrdrv.alloc(0, 64).unwrap();
        match gdrdrv.pin_with(memory.addr(), 64, PinFlags::FORCE_PCIE) {
            Ok(_) => assert!(good, "{module:?}"),
            Err(Error::Unsupported { what, .. }) => assert!(!good && what == "FORCE_PCIE", "{module:?}"),
            Err(other) => panic!("{module:?}: {other}"),
        }
    }
}

/// What a platform gives, for each wish in turn on one pin.
fn maps(native: MappingType, version: (u16, u16), wishes: &[(Option<MappingType>, Option<MappingType>)]) {
    let rig = Rig::new(Module { mapping_type: native, version, ..Module::default() });
    let gdrdrv = open_volatile_gdrdrv(&rig.system).unwrap();
    let memory = gdrdrv.alloc(0, 65_536).unwrap();
    let pin = gdrdrv.pin_with(memory.addr(), 65_536, PinFlags::empty()).unwrap();
    for &(wish, expected) in wishes {
        match pin.map_pages(1, wish) {
            Ok(range) => assert_eq!(Some(range.kind()), expected, "{native:?} {wish:?}"),
            Err(Error::Unsupported { .. }) => assert_eq!(expected, None, "{native:?} {wish:?}"),
            Err(other) => panic!("{native:?} {wish:?}: {other}"),
        }
    }
}

#[test]
fn each_platform_and_version_has_its_mapping_types() {
    // A coherent link is cached and can be write-combined; an earlier wish is taken back.
    let (wc, cached, device) = (Some(WriteCombining), Some(Cached), Some(Device));
    maps(Cached, (2, 6), &[(None, cached), (wc, wc), (None, cached), (device, None), (cached, cached)]);
    // Some Arm platforms have device mappings only.
    maps(Device, (2, 6), &[(None, device), (wc, None), (device, device)]);
    // Older modules have one type.
    maps(Cached, (2, 4), &[(wc, None), (None, cached), (cached, cached)]);
    maps(Device, (2, 4), &[(None, device), (cached, None)]);
    maps(Cached, (2, 3), &[(wc, None), (None, cached)]);
}

/// Each `errno` of the module becomes an error with a cause and a fix.
mod errors {
    use super::*;

    fn refusal(system: &System) -> String {
        open_volatile_gdrdrv(system).unwrap_err().to_string()
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
            let error = open_volatile_gdrdrv(&with_module.system).unwrap_err();
            assert_eq!(error.errno(), errno);
        }
        with_module.machine.fail("open /dev/gdrdrv", 0);
        open_gdrdrv(&with_module.system).unwrap();
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
            assert!(
                text.contains("modprobe gdrdrv") && text.contains("module not loaded"),
                "{errno}: {text}"
            );
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
            let error = open_volatile_gdrdrv(&rig.system).unwrap_err();
            assert!(matches!(error, Error::Unsupported { .. }), "{error}");
            assert!(error.to_string().contains(fix), "{error}");
            assert_eq!(rig.device.open_files(), 0);
        }
        // A higher major number that accepts this library is taken.
        let rig = Rig::new(Module { version: (3, 1), ..Module::default() });
        open_gdrdrv(&rig.system).unwrap();
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

    struct Opened {
        rig: Rig,
        gdrdrv: Gdr,
        memory: GpuBuffer,
    }

    impl Opened {
        fn new() -> Self {
            let rig = Rig::new(Module::default());
            let gdrdrv = open_gdrdrv(&rig.system).unwrap();
            let memory = gdrdrv.alloc(0, 65_536).unwrap();
            Self { rig, gdrdrv, memory }
        }

        fn pin(&self, flags: PinFlags) -> Result<Pin> {
            self.gdrdrv.pin_with(self.memory.addr(), 65_536, flags)
        }

        fn pinned(&self) -> Pin {
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
            assert!(
                matches!(error, Error::Unsupported { .. }) && error.to_string().contains("MIG"),
                "{error}"
            );
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
        assert!(
            matches!(error, Error::Unsupported { .. }) && error.to_string().contains("GeForce"),
            "{error}"
        );
        // CUDA's own failure comes first.
        it.rig.machine.cuda.lock().attributes.remove(&116);
        assert!(matches!(it.pin(NONE), Err(Error::Cuda { .. })));
    }

    #[test]
    fn of_memory_that_is_not_made_for_it() {
        let it = Opened::new();
        it.fail("pin", libc::EINVAL);
        let vmm = it.rig.cuda.alloc(0, 1 << 21, AllocKind::Vmm).unwrap();
        is_sys(&it.gdrdrv.pin_with(vmm, 1, NONE).unwrap_err(), libc::EINVAL, "gpuDirectRDMACapable");
        let pool = it.rig.memory(0, 4096, MemoryKind::Pool);
        is_sys(&it.gdrdrv.pin_with(pool, 1, NONE).unwrap_err(), libc::EINVAL, "cuMemAlloc");
        for kind in [MemoryKind::Managed, MemoryKind::Host] {
            let addr = it.rig.memory(0, 4096, kind);
            assert!(matches!(it.gdrdrv.pin_with(addr, 1, NONE), Err(Error::NotMappable { .. })));
        }
    }

    #[test]
    fn of_bar1_that_is_full_until_something_is_unpinned() {
        let rig = Rig::new(Module { bar1: 4 << 16, ..Module::default() });
        let gdrdrv = open_gdrdrv(&rig.system).unwrap();
        let memory = gdrdrv.alloc(0, 8 << 16).unwrap();
        let pin = |pages: usize| gdrdrv.pin_with(memory.addr(), pages << 16, NONE);
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
            is_sys(&pin.map_pages(1, None).unwrap_err(), errno, text);
        }
        it.fail("mmap", 0);
        let range = pin.map_pages(1, None).unwrap();
        // The front end lets no second one through; the driver neither.
        assert!(matches!(pin.map_pages(1, None), Err(Error::AlreadyMapped)));
        it.fail("type", libc::ENOTTY);
        assert!(matches!(pin.map_pages(1, None), Err(Error::AlreadyMapped)));
        drop(range);
        pin.map_pages(1, None).unwrap();
    }

    #[test]
    fn of_other_requests() {
        let it = Opened::new();
        let pin = it.pinned();
        let map = |wish| pin.map_pages(1, wish).unwrap_err();
        it.fail("type", libc::EOPNOTSUPP);
        assert!(matches!(map(Some(MappingType::WriteCombining)), Error::Unsupported { .. }));
        is_sys(&map(None), libc::EOPNOTSUPP, "REQ_MAPPING_TYPE");
        it.fail("type", libc::EIO);
        is_sys(&map(None), libc::EIO, "REQ_MAPPING_TYPE");
        it.fail("type", 0);
        it.fail("flag", libc::EIO);
        is_sys(&pin.invalidated().unwrap_err(), libc::EIO, "GET_CB_FLAG");
        it.fail("info", libc::EIO);
        is_sys(&map(None), libc::EIO, "GET_INFO");
        is_sys(&it.pin(NONE).unwrap_err(), libc::EIO, "GET_INFO");
        it.fail("info", 0);
        // None left anything behind.
        pin.map_pages(1, None).unwrap();
        assert_eq!(it.rig.device.live_pins(), 1);
        it.fail("attr", libc::EIO);
        is_sys(&open_gdrdrv(&it.rig.system).unwrap_err(), libc::EIO, "GET_ATTR");
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
}

/// A module that takes mappings away when their memory is freed.
mod volatile {
    use super::*;

    fn volatile() -> Module {
        Module { persistent: false, ..Module::default() }
    }

    /// More than the blocks that small allocations share and keep.
    const SIZE: usize = 4 << 20;

    #[test]
    fn a_volatile_module_is_refused_with_the_fix() {
        for (version, fix) in [((2, 6), "use_persistent_mapping=1"), ((2, 4), "gdrdrv 2.5 or newer")] {
            let rig = Rig::new(Module { version, ..volatile() });
            let error = open_gdrdrv(&rig.system).unwrap_err();
            assert!(matches!(error, Error::Unsupported { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains(fix) && text.contains("allow_volatile()"), "{text}");
            assert_eq!(rig.device.open_files(), 0);
        }
        // Persistent in fact, but it cannot say so.
        let rig = Rig::new(Module { version: (2, 4), persistent: true, ..volatile() });
        assert!(open_gdrdrv(&rig.system).is_err());
    }

    #[test]
    fn a_free_sets_the_flag_and_prevents_mapping() {
        for version in [(2, 0), (2, 4), (2, 6)] {
            let rig = Rig::new(Module { version, ..volatile() });
            let gdrdrv = open_volatile_gdrdrv(&rig.system).unwrap();
            let (memory, other) = (gdrdrv.alloc(0, SIZE).unwrap(), gdrdrv.alloc(0, SIZE).unwrap());
            let pin = gdrdrv.pin_with(memory.addr(), SIZE, NONE).unwrap();
            let mapped = gdrdrv.pin_with(memory.addr(), SIZE, NONE).unwrap();
            let range = mapped.map_pages(SIZE, None).unwrap();
            let neighbour = gdrdrv.pin_with(other.addr(), SIZE, NONE).unwrap();
            assert!(!pin.invalidated().unwrap());
            drop(memory);
            assert!(pin.invalidated().unwrap() && mapped.invalidated().unwrap());
            assert!(matches!(pin.map_pages(SIZE, None), Err(Error::Invalidated)));
            // Mappings of other memory stay valid; unmap and unpin still work.
            assert!(!neighbour.invalidated().unwrap());
            assert_eq!(peek(&neighbour.map_pages(1, None).unwrap(), 0, 1), [0]);
            drop(range);
            mapped.unpin().unwrap();
            pin.unpin().unwrap();
        }
    }

    /// Maps, frees, and reads afterwards.
    fn read_after_free(module: Module) -> End {
        in_child(|| {
            let rig = Rig::new(module);
            let Ok(gdrdrv) = open_volatile_gdrdrv(&rig.system) else { return false };
            let Ok(memory) = gdrdrv.alloc(0, SIZE) else { return false };
            let Ok(pin) = gdrdrv.pin_with(memory.addr(), SIZE, NONE) else { return false };
            let Ok(range) = pin.map_pages(SIZE, None) else { return false };
            if memory.copy_in(SIZE - 3, b"end").is_err() || peek(&range, SIZE - 3, 3) != b"end" {
                return false;
            }
            drop(memory);
            peek(&range, SIZE - 3, 3) == b"end"
        })
    }

    #[test]
    fn access_to_freed_memory_raises_sigbus() {
        assert_eq!(read_after_free(volatile()), End::Killed(libc::SIGBUS));
        assert_eq!(read_after_free(Module::default()), End::Said(true));
    }
}
