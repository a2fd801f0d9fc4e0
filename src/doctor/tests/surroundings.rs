//! Containers, variables, and what is chosen.

use super::super::live::Route;
use super::super::machine::Machine;
use super::super::probe::Status::{Fail, Ok, Skip, Warn};
use super::rig::Case;

fn set(machine: &mut Machine, name: &str, value: &str) {
    machine.environment.insert(name.into(), value.into());
}

pub(super) const CASES: &[Case] = &[
    Case {
        what: "a container that has all",
        change: |tree, _| tree.write(".dockerenv", ""),
        says: &[
            ("container.kind", "", Ok, "Docker", ""),
            ("container.devices", "", Ok, "have their files", ""),
        ],
    },
    Case {
        what: "a pod without RDMA's files",
        change: |tree, machine| {
            set(machine, "KUBERNETES_SERVICE_HOST", "10.0.0.1");
            tree.remove("dev/infiniband");
        },
        says: &[
            ("rdma.node", "mlx5_0", Fail, "missing", "--device /dev/infiniband"),
            ("rdma.node", "mlx5_1", Fail, "missing", "--device /dev/infiniband"),
            ("container.kind", "", Ok, "Kubernetes", ""),
            ("container.devices", "", Warn, "not given /dev/infiniband", "--cap-add IPC_LOCK"),
        ],
    },
    Case {
        what: "no /proc",
        change: |tree, _| tree.rename("proc/self", "proc/nobody"),
        says: &[
            ("container.mounts", "", Fail, "/proc is not mounted", "mount -t proc"),
            ("topology.cpus", "GPU0", Ok, "CPUs 0-63", ""),
            ("topology.cpus", "GPU1", Ok, "CPUs 64-127", ""),
            ("topology.cpus", "mlx5_0", Ok, "CPUs 0-63", ""),
            ("topology.cpus", "mlx5_1", Ok, "CPUs 64-127", ""),
        ],
    },
    Case {
        what: "one hardware queue",
        change: |_, machine| set(machine, "CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        says: &[
            ("environment.connections", "", Warn, "stops all others", "32"),
            ("environment.cuda", "", Ok, "CUDA_DEVICE_MAX_CONNECTIONS=1", ""),
        ],
    },
    Case {
        what: "hardware queues without number",
        change: |_, machine| set(machine, "CUDA_DEVICE_MAX_CONNECTIONS", "many"),
        says: &[
            ("environment.connections", "", Warn, "'many'", "unset"),
            ("environment.cuda", "", Ok, "many", ""),
        ],
    },
    Case {
        what: "a variable that is wrong",
        change: |_, machine| set(machine, "GDSYNC_PORT", "first"),
        says: &[("environment.variables", "", Fail, "GDSYNC_PORT is 'first'", "docs/reference.md")],
    },
    Case {
        what: "a backend that does not exist",
        change: |_, machine| set(machine, "GDRCOPY_BACKEND", "bar2"),
        says: &[("environment.variables", "", Fail, "bar2", "GDRCOPY_BACKEND")],
    },
    Case {
        what: "a variable with a slip in its name",
        change: |_, machine| set(machine, "GDSYNC_DEVISE", "mlx5_1"),
        says: &[("environment.variables", "", Warn, "GDSYNC_DEVISE is no variable", "its name")],
    },
    Case {
        what: "launches that wait",
        change: |_, machine| set(machine, "CUDA_LAUNCH_BLOCKING", "1"),
        says: &[("environment.cuda", "", Warn, "CUDA_LAUNCH_BLOCKING=1", "unset")],
    },
    Case {
        what: "GPUs that a variable hides",
        change: |_, machine| set(machine, "CUDA_VISIBLE_DEVICES", ""),
        says: &[("environment.cuda", "", Warn, "hides all GPUs", "unset")],
    },
    Case {
        what: "a container without compute",
        change: |_, machine| set(machine, "NVIDIA_DRIVER_CAPABILITIES", "utility"),
        says: &[("environment.cuda", "", Warn, "no `compute`", "container")],
    },
    Case {
        what: "a device that does not open",
        change: |_, machine| machine.choice.facts.route = Some(Err("Cannot allocate memory".into())),
        says: &[
            ("choice.device", "", Fail, "mlx5_0 does not open: Cannot allocate", "rdma and limits"),
            ("choice.faster", "", Skip, "nothing could be opened", ""),
        ],
    },
    Case {
        what: "a device that does not exist",
        change: |_, machine| {
            machine.choice.facts.device = Some(Err("no RDMA device 'mlx9'".into()));
            machine.choice.facts.route = None;
        },
        says: &[
            ("choice.device", "", Fail, "mlx9", "GDSYNC_DEVICE"),
            ("choice.faster", "", Skip, "nothing could be opened", ""),
        ],
    },
    Case {
        what: "opening that hangs",
        change: |_, machine| {
            machine.choice.facts.route = None;
            machine.choice.trouble = Some("no answer within 4s, in opening mlx5_0".into());
        },
        says: &[
            ("choice.device", "", Fail, "in opening mlx5_0", "GDSYNC_PATH=soft"),
            ("choice.faster", "", Skip, "nothing could be opened", ""),
        ],
    },
    Case {
        what: "a GPU that does not open",
        change: |_, machine| machine.choice.facts.gpu = Some(Err("cuInit: 999".into())),
        says: &[
            ("choice.streams", "", Fail, "999", "host streams"),
            ("choice.faster", "", Ok, "a thread triggers now", "gpu.cuda"),
        ],
    },
    Case {
        what: "doorbells that are refused",
        change: |_, machine| {
            machine.choice.facts.route = Some(Result::Ok(Route::Proxy));
            machine.choice.facts.not_direct = Some("set PeerMappingOverride=1".into());
        },
        says: &[
            ("choice.device", "", Ok, "mlx5_0 by the proxy", ""),
            ("choice.faster", "", Ok, "a thread takes part", "PeerMappingOverride=1"),
        ],
    },
    Case {
        what: "the proxy asked for",
        change: |_, machine| {
            machine.choice.facts.route = Some(Result::Ok(Route::Proxy));
            set(machine, "GDSYNC_PATH", "proxy");
        },
        says: &[
            ("environment.variables", "", Ok, "GDSYNC_PATH=proxy", ""),
            ("choice.device", "", Ok, "by the proxy", ""),
            ("choice.faster", "", Ok, "a thread takes part", "unset GDSYNC_PATH"),
        ],
    },
    Case {
        what: "the software HCA though there are cards",
        change: |_, machine| machine.choice.facts.route = Some(Result::Ok(Route::Soft)),
        says: &[
            ("choice.device", "", Ok, "the software HCA", ""),
            ("choice.faster", "", Ok, "no card takes part", "rdma.card"),
        ],
    },
];
