//! Variables that change what CUDA, rdma-core and this library do.

use gdsync::cuda::channels;
use gdsync::rdma::DeviceConfig;

use super::super::machine::Machine;
use super::super::probe::{Check, Probe};

const CONNECTIONS: Check = Check {
    name: "environment.connections",
    tried: channels::VARIABLE,
    why: "as many streams blocked in waits as it says (8, if not set) stop everything else of the process on that GPU",
};
const OURS: Check = Check {
    name: "environment.variables",
    tried: "the variables GDSYNC_*, GDRCOPY_* and MP_*, read as the library does",
    why: "they overrule what is found here; a name with a slip is silently nothing",
};
const THEIRS: Check = Check {
    name: "environment.cuda",
    tried: "variables of CUDA, of drivers' containers and of rdma-core that change what streams and rings do",
    why: "a variable that somebody set once can hide GPUs or make every launch wait",
};

pub(in crate::doctor) const CHECKS: &[&Check] = &[&CONNECTIONS, &OURS, &THEIRS];

/// All that the crates of this repository read.
pub(in crate::doctor) const KNOWN: &[&str] = &[
    "GDSYNC_DEVICE",
    "GDSYNC_PATH",
    "GDSYNC_PORT",
    "GDSYNC_GID_INDEX",
    "GDSYNC_PKEY_INDEX",
    "GDSYNC_SERVICE_LEVEL",
    "GDSYNC_TRAFFIC_CLASS",
    "GDSYNC_LIBIBVERBS",
    "GDSYNC_LIBMLX5",
    "GDSYNC_FAULTS",
    "GDSYNC_BY_REFERENCE",
    "GDSYNC_CMA",
    "GDSYNC_STRICT",
    "GDSYNC_JOB_TOKEN",
    "GDSYNC_RECORDER",
    "GDSYNC_RECORDER_DIR",
    "GDRCOPY_BACKEND",
    "GDRCOPY_STORE",
    "GDRCOPY_LOAD",
    "GDRCOPY_USE_DMABUF_MMAP",
    "GDRCOPY_ENABLE_LOGGING",
    "GDRCOPY_LOG_LEVEL",
    "MP_GPU_PATH",
    "MP_LOCAL",
    "MP_REG_CACHE",
];

pub(in crate::doctor) fn probe(machine: &Machine) -> Vec<Probe> {
    vec![connections(machine), ours(machine), theirs(machine)]
}

fn connections(machine: &Machine) -> Probe {
    const FIX: &str = "unset CUDA_DEVICE_MAX_CONNECTIONS, or set it to 32 where many streams wait at once";
    match machine.variable(channels::VARIABLE).map(|text| (text, channels::asked(text))) {
        None => CONNECTIONS.ok(format!("not set: {} hardware queues", channels::USUAL)),
        Some((_, Some(1))) => CONNECTIONS.warn("1: a single stream that waits stops all others", FIX),
        Some((_, Some(count))) => CONNECTIONS.ok(format!("{count} hardware queues")),
        Some((text, None)) => CONNECTIONS.warn(format!("'{text}': CUDA takes 1 to 32"), FIX),
    }
}

fn is_ours(name: &str) -> bool {
    ["GDSYNC_", "GDRCOPY_"].iter().any(|prefix| name.starts_with(prefix))
        || matches!(name, "MP_GPU_PATH" | "MP_LOCAL" | "MP_REG_CACHE")
}

fn ours(machine: &Machine) -> Probe {
    let set: Vec<_> = machine.environment.iter().filter(|(name, _)| is_ours(name)).collect();
    let unknown = set.iter().map(|(name, _)| name.as_str()).filter(|name| !KNOWN.contains(name));
    // What tests and tools of this repository set for themselves.
    let unknown: Vec<_> =
        unknown.filter(|name| !name.contains("_TEST_") && !name.contains("_KMOD_")).collect();
    let found = set.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ");
    let lookup = |name: &str| machine.variable(name).map(str::to_owned);
    if let Err(error) = DeviceConfig::from_variables(lookup) {
        return OURS.fail(
            format!("{found}: {error}"),
            "correct or unset it; docs/reference.md has the table of all variables",
        );
    }
    if let Some(Err(error)) = machine.variable("GDRCOPY_BACKEND").map(str::parse::<gdrcopy::BackendKind>) {
        return OURS.fail(format!("{found}: {error}"), "correct or unset GDRCOPY_BACKEND");
    }
    match () {
        () if !unknown.is_empty() => OURS.warn(
            format!("{} is no variable of this library", unknown.join(", ")),
            "correct its name, or unset it; docs/reference.md has the table of all variables",
        ),
        () if set.is_empty() => OURS.ok("none set"),
        () => OURS.ok(found),
    }
}

fn theirs(machine: &Machine) -> Probe {
    let is = |name: &str, value: &str| machine.variable(name) == Some(value);
    let capabilities = machine.variable("NVIDIA_DRIVER_CAPABILITIES").unwrap_or("all");
    let troubles = [
        (
            is("CUDA_LAUNCH_BLOCKING", "1"),
            "CUDA_LAUNCH_BLOCKING=1 makes every launch wait, and a launch behind a wait hang",
        ),
        (
            machine
                .environment
                .get("CUDA_VISIBLE_DEVICES")
                .is_some_and(|list| list.trim().is_empty() || list.trim() == "-1"),
            "CUDA_VISIBLE_DEVICES hides all GPUs",
        ),
        (
            !["all", "compute"].iter().any(|word| capabilities.split(',').any(|part| part.trim() == *word)),
            "NVIDIA_DRIVER_CAPABILITIES has no `compute`, so this container got no libcuda",
        ),
        (
            is("MLX5_SHUT_UP_BF", "1"),
            "MLX5_SHUT_UP_BF=1 takes write combining from the doorbells of mlx5 cards",
        ),
    ];
    let troubles: Vec<_> = troubles.into_iter().filter_map(|(is_set, what)| is_set.then_some(what)).collect();
    if !troubles.is_empty() {
        return THEIRS.warn(troubles.join("; "), "unset it, or start the container with other values");
    }
    let prefixes = ["CUDA_", "MLX5_", "NVIDIA_VISIBLE", "NVIDIA_DRIVER", "RDMAV_"];
    let set =
        machine.environment.iter().filter(|(name, _)| prefixes.iter().any(|prefix| name.starts_with(prefix)));
    let set: Vec<_> = set.map(|(name, value)| format!("{name}={value}")).collect();
    THEIRS.ok(if set.is_empty() { "none set".into() } else { set.join(" ") })
}
