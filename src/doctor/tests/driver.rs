//! The driver, the ways to map, and kernel modules.

use super::super::probe::Status::{Fail, Ok, Skip, Warn};
use super::rig::Case;

const PROPRIETARY: &str = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Sep";
const NO_DRIVER: &str = "not loaded";

pub(super) const CASES: &[Case] = &[
    Case {
        what: "an old driver",
        change: |tree, _| {
            tree.write(
                "proc/driver/nvidia/version",
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  510.47.03  Release",
            );
        },
        says: &[("driver.version", "", Fail, "510.47.03 is older than 515", "driver 515")],
    },
    Case {
        what: "a version that is no version",
        change: |tree, _| {
            tree.write("proc/driver/nvidia/version", "NVRM version: Open Kernel Module, built by hand")
        },
        says: &[("driver.version", "", Warn, "built by hand", "nvidia-smi")],
    },
    Case {
        what: "no driver",
        change: |tree, _| tree.remove("proc/driver/nvidia"),
        says: &[
            ("driver.version", "", Warn, "2 NVIDIA GPU(s) on the PCI bus, and no driver", "modprobe nvidia"),
            ("driver.flavour", "", Skip, NO_DRIVER, ""),
            ("driver.nodes", "", Skip, NO_DRIVER, ""),
            ("driver.doorbells", "", Skip, NO_DRIVER, ""),
            ("mapping.gdrdrv", "", Skip, NO_DRIVER, ""),
            ("mapping.dmabuf", "", Skip, NO_DRIVER, ""),
            ("mapping.rm", "", Skip, NO_DRIVER, ""),
            ("mapping.any", "", Skip, NO_DRIVER, ""),
            ("choice.faster", "", Ok, "a thread triggers now", "use a GPU of NVIDIA"),
        ],
    },
    Case {
        what: "the proprietary modules",
        change: |tree, _| {
            tree.write("proc/driver/nvidia/version", PROPRIETARY);
            tree.gdrdrv("2.6", "proprietary", "yes");
        },
        says: &[
            ("driver.flavour", "", Warn, "proprietary", "nvidia-open"),
            ("modules.gdrdrv", "", Ok, "built for the proprietary driver", ""),
        ],
    },
    Case {
        what: "a device file that is missing",
        change: |tree, _| tree.remove("dev/nvidia-uvm"),
        says: &[("driver.nodes", "", Fail, "missing: /dev/nvidia-uvm", "nvidia-modprobe")],
    },
    Case {
        what: "no device file of any GPU",
        change: |tree, _| ["dev/nvidia0", "dev/nvidia1"].iter().for_each(|file| tree.remove(file)),
        says: &[("driver.nodes", "", Fail, "/dev/nvidiaN of every GPU", "--gpus all")],
    },
    Case {
        what: "doorbells that only root may ring",
        change: |tree, _| {
            tree.write("proc/driver/nvidia/params", "EnableStreamMemOPs: 0\nRegistryDwords: \"\"")
        },
        says: &[("driver.doorbells", "", Warn, "only root's GPUs", "PeerMappingOverride=1")],
    },
    Case {
        what: "root without the option",
        change: |tree, machine| {
            tree.write("proc/driver/nvidia/params", "RegistryDwords: \"PeerMappingOverride=0; RMOther=1\"");
            machine.is_root = true;
        },
        says: &[("driver.doorbells", "", Ok, "root does not need it", "")],
    },
    Case {
        what: "gdrdrv does not map",
        change: |_, machine| {
            machine.mapping.facts.backends[0].outcome = Err("ioctl: Invalid argument".into())
        },
        says: &[
            ("mapping.gdrdrv", "", Skip, "Invalid argument", ""),
            ("mapping.any", "", Ok, "dmabuf serves", ""),
        ],
    },
    Case {
        what: "nothing maps",
        change: |_, machine| {
            machine
                .mapping
                .facts
                .backends
                .iter_mut()
                .for_each(|backend| backend.outcome = Err("refused".into()));
        },
        says: &[
            ("mapping.gdrdrv", "", Skip, "refused", ""),
            ("mapping.dmabuf", "", Skip, "refused", ""),
            ("mapping.rm", "", Skip, "refused", ""),
            ("mapping.any", "", Fail, "cannot be mapped", "GDRCOPY_BACKEND=rm"),
        ],
    },
    Case {
        what: "mapping hangs before all",
        change: |_, machine| {
            machine.mapping.facts.backends.clear();
            machine.mapping.trouble = Some("no answer within 4s".into());
        },
        says: &[
            ("mapping.gdrdrv", "", Fail, "no answer", "--timeout"),
            ("mapping.dmabuf", "", Fail, "no answer", "--timeout"),
            ("mapping.rm", "", Fail, "no answer", "--timeout"),
            ("mapping.any", "", Fail, "no answer", "--timeout"),
        ],
    },
    Case {
        what: "gdrdrv without a file",
        change: |tree, _| tree.remove("dev/gdrdrv"),
        says: &[("modules.gdrdrv", "", Warn, "there is no /dev/gdrdrv", "mknod")],
    },
    Case {
        what: "an old gdrdrv",
        change: |tree, _| tree.gdrdrv("1.3", "opensource", "yes"),
        says: &[("modules.gdrdrv", "", Fail, "version 1.3", "gdrdrv 2.6")],
    },
    Case {
        what: "gdrdrv for another driver",
        change: |tree, _| tree.gdrdrv("2.6", "proprietary", "yes"),
        says: &[("modules.gdrdrv", "", Warn, "the loaded driver is opensource", "build gdrdrv")],
    },
    Case {
        what: "gdrdrv whose mappings vanish",
        change: |tree, _| tree.gdrdrv("2.6", "opensource", "no"),
        says: &[("modules.gdrdrv", "", Warn, "without persistent mappings", "use_persistent_mapping=1")],
    },
    Case {
        what: "gdrdrv unloaded, its file left",
        change: |tree, _| tree.remove("proc/driver/gdrdrv"),
        says: &[("modules.gdrdrv", "", Warn, "the module is not loaded", "modprobe gdrdrv")],
    },
    Case {
        what: "no gdrdrv",
        change: |tree, _| {
            tree.remove("proc/driver/gdrdrv");
            tree.remove("dev/gdrdrv");
        },
        says: &[("modules.gdrdrv", "", Skip, NO_DRIVER, "")],
    },
    Case {
        what: "no peermem, but dma-bufs",
        change: |tree, _| tree.remove("sys/module/nvidia_peermem"),
        says: &[("modules.peermem", "", Skip, "not needed", "")],
    },
    Case {
        what: "the old peermem",
        change: |tree, _| {
            tree.remove("sys/module/nvidia_peermem");
            tree.write("sys/module/nv_peer_mem/refcnt", "0");
        },
        says: &[("modules.peermem", "", Warn, "nv_peer_mem is loaded", "modprobe nvidia-peermem")],
    },
];
