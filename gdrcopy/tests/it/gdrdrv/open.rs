//! Why the device does not open, and the fix that fits.

use std::sync::Arc;

use gdrcopy::Error;
use gdrcopy::system::System;
use gdsync_testkit::{Machine, Module, SimulatedKernel};

use crate::rig::{Backend, DEVICES, Rig, no_cuda};

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
fn an_unreadable_proc_is_told() {
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
