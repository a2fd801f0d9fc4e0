//! What surrounds this process (container, variables), and what the library chooses in it.

use std::borrow::Cow;

use gdsync::cuda::channels;
use gdsync::env::{is_known, is_misspelt};
use gdsync::rdma::DeviceConfig;

use super::super::live::{Live, Route};
use super::super::machine::Machine;
use super::{Area, Check, Probe};

area! {
    CONTAINER_AREA "container" "Container" asks []
        probes by |machine| vec![CONTAINER.ok(kind(machine).unwrap_or_else(|| "none".into())), mounts(machine)];
    CONTAINER "container.kind" tried "/.dockerenv, /run/.containerenv, /run/systemd/container, /proc/1/cgroup and the environment",
        why "a container sees only the devices, limits and capabilities that it was given";
    MOUNTS "container.mounts" tried "/proc/self and /sys/class",
        why "devices, limits and paths are looked for in /sys and /proc, and a program that starts its ranks itself needs /proc";
}

fn mounts(machine: &Machine) -> Probe {
    match (machine.system.exists("/proc/self"), machine.has_sysfs()) {
        (true, true) => MOUNTS.ok("/proc and /sys are there"),
        (false, _) => MOUNTS.fail(
            "/proc is not mounted: what is said of GPUs, RDMA devices and the choice means nothing",
            "mount it (`mount -t proc proc /proc`); containers have it unless told otherwise",
        ),
        (true, false) => MOUNTS.warn(
            "/sys is not mounted: no device can be seen",
            "mount it (`mount -t sysfs sysfs /sys`); containers have it unless told otherwise",
        ),
    }
}

fn kind(machine: &Machine) -> Option<String> {
    let system = &machine.system;
    let file = |path: &str, name| system.exists(path).then_some(name);
    let cgroup = || {
        let groups = system.text("/proc/1/cgroup")?;
        ["docker", "kubepods", "containerd", "lxc"].into_iter().find(|word| groups.contains(word))
    };
    machine
        .variable("KUBERNETES_SERVICE_HOST")
        .and(Some("a Kubernetes pod"))
        .or_else(|| file("/.dockerenv", "Docker"))
        .or_else(|| file("/run/.containerenv", "Podman"))
        .map(str::to_owned)
        .or_else(|| system.text("/run/systemd/container"))
        .or_else(|| {
            let apptainer = machine.variable("APPTAINER_NAME").and(Some("Apptainer"));
            machine.variable("container").or(apptainer).or_else(cgroup).map(str::to_owned)
        })
}

area! {
    ENVIRONMENT_AREA "environment" "Environment" asks []
        probes by |machine| vec![connections(machine), ours(machine), theirs(machine)];
    CONNECTIONS "environment.connections" tried channels::VARIABLE,
        why "as many streams blocked in waits as it says (8, if not set) stop everything else of the process on that GPU";
    OURS "environment.variables" tried "the variables GDSYNC_*, GDRCOPY_* and MP_*, read as the library does",
        why "they overrule what is found here; a name with a slip is silently nothing";
    THEIRS "environment.cuda" tried "variables of CUDA, of drivers' containers and of rdma-core that change what streams and rings do",
        why "a variable that somebody set once can hide GPUs or make every launch wait";
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

fn ours(machine: &Machine) -> Probe {
    let misspelt: Vec<_> =
        machine.environment.keys().map(String::as_str).filter(|name| is_misspelt(name)).collect();
    let set: Vec<_> = machine.environment.iter().filter(|(name, _)| is_known(name)).collect();
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
        () if !misspelt.is_empty() => OURS.warn(
            format!("{} is no variable of this library", misspelt.join(", ")),
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

area! {
    CHOICE_AREA "choice" "What is used here" asks [Live::Cuda, Live::Choice]
        probes by |machine| vec![device(machine), streams(machine), faster(machine)];
    DEVICE "choice.device" tried "opening the RDMA device that is nearest to GPU 0, as an application does that names none",
        why "this is what an application gets";
    STREAMS "choice.streams" tried "opening GPU 0",
        why "streams of a GPU trigger and wait by themselves; a host stream is a thread that does the same";
    FASTER "choice.faster" tried "what stands in the way of a card that a GPU triggers",
        why "of all changes to this machine, this one gains most";
}

fn device(machine: &Machine) -> Probe {
    let facts = &machine.choice.facts;
    let again = "try again with `--timeout 60`; `GDSYNC_PATH=soft` uses no device";
    let name = match (&facts.device, &machine.choice.trouble) {
        (Some(Ok(name)), _) => name,
        (Some(Err(why)), _) => {
            return DEVICE.fail(why.as_str(), "correct or unset GDSYNC_DEVICE and GDSYNC_PATH");
        }
        (None, trouble) => return DEVICE.fail(trouble.as_deref().unwrap_or("nothing was told"), again),
    };
    match (&facts.route, &machine.choice.trouble) {
        (Some(Ok(Route::Soft)), _) => {
            let near = "between processes of this host";
            let reach: Cow<'_, str> = match &facts.tcp {
                _ if facts.reaches_other_hosts => {
                    "also between hosts; their ports must be open to each other".into()
                }
                Some(Ok(address)) => format!(
                    "{near}; ranks of mp on other hosts over TCP at {address}, on ports that the systems choose and that must be open"
                )
                .into(),
                Some(Err(why)) => format!("{near}; others are not reached: {why}").into(),
                None => near.into(),
            };
            DEVICE.ok(format!("{name}, the software HCA, over {}: {reach}", facts.wire))
        }
        (Some(Ok(Route::Proxy)), _) => {
            let why = facts.not_direct.as_deref().unwrap_or("the card does not read our rings");
            DEVICE
                .ok(format!("{name} by the proxy: a thread posts for the stream, over {}; {why}", facts.wire))
        }
        (Some(Ok(Route::Direct)), _) => {
            DEVICE.ok(format!("{name} direct: the card reads our rings, over {}", facts.wire))
        }
        (Some(Err(why)), _) => DEVICE.fail(
            format!("{name} does not open: {why}"),
            "follow the probes of rdma and limits; `GDSYNC_PATH=soft` uses no device",
        ),
        (None, trouble) => {
            DEVICE.fail(format!("{name}: {}", trouble.as_deref().unwrap_or("nothing was told")), again)
        }
    }
}

fn streams(machine: &Machine) -> Probe {
    match &machine.choice.facts.gpu {
        Some(Ok(address)) => STREAMS.ok(format!("of GPU 0 at {address}")),
        Some(Err(why)) if machine.cuda.facts.gpus.first().is_some_and(|gpu| gpu.is_taken) => STREAMS.warn(
            format!("host streams, for GPU 0 may not be used now: {why}"),
            "see gpu.memop_run; another GPU can be named when it is opened",
        ),
        Some(Err(why)) if machine.has_driver() => {
            STREAMS.fail(why.as_str(), "follow the probes of gpu and driver; host streams work without")
        }
        Some(Err(_)) => STREAMS.ok("host streams: a thread runs the operations"),
        None => STREAMS.fail(
            machine.choice.trouble.as_deref().unwrap_or("nothing was told"),
            "follow the probes of gpu and driver; host streams work without",
        ),
    }
}

fn faster(machine: &Machine) -> Probe {
    let facts = &machine.choice.facts;
    let (hcas, system) = (machine.hcas(), &machine.system);
    let has_gpu = matches!(facts.gpu, Some(Ok(_)));
    let route = facts.route.as_ref().and_then(|route| route.as_ref().ok());
    let is_chosen =
        ["GDSYNC_PATH", "GDSYNC_DEVICE"].into_iter().find(|name| machine.variable(name).is_some());
    let change: String = match route {
        None => return FASTER.skip("nothing could be opened; see choice.device"),
        Some(Route::Soft | Route::Proxy) if is_chosen.is_some() => {
            format!("unset {}, which chose this", is_chosen.unwrap_or_default())
        }
        Some(Route::Soft) if hcas.is_empty() => {
            "add an RDMA device; the kernel's Soft-RoCE reaches other hosts without \
                                                 (`rdma link add rxe0 type rxe netdev DEV`)"
                .into()
        }
        Some(Route::Soft) if !hcas.iter().any(|hca| hca.is_usable()) => {
            let refusal = hcas.iter().flat_map(|hca| hca.class.ports()).find_map(|port| port.refusal());
            format!("give the RDMA device a usable port: {}", refusal.unwrap_or_default())
        }
        Some(Route::Soft) => "make libibverbs list the RDMA device: see rdma.card and rdma.core".into(),
        Some(Route::Proxy) if !hcas.iter().any(|hca| hca.is_mlx5(system)) => {
            "use an mlx5 card (ConnectX-4 or newer), which reads the rings itself".into()
        }
        Some(Route::Proxy) => match &facts.not_direct {
            Some(why) => format!("let the card read the rings itself: {why}"),
            None => "let the card read the rings itself: see rdma.mlx5".into(),
        },
        Some(Route::Direct) if !machine.has_driver() => {
            "use a GPU of NVIDIA: its streams trigger without a thread".into()
        }
        Some(Route::Direct) if !has_gpu => "make the GPU work: see gpu.cuda".into(),
        Some(Route::Direct) => return FASTER.ok("nothing: a card that a GPU triggers"),
    };
    let now = match route {
        Some(Route::Soft) => "no card takes part now",
        Some(Route::Proxy) => "a thread takes part in every message now",
        _ => "a thread triggers now",
    };
    FASTER.warn(now, change)
}

/// What works here and what to try first. Empty if nothing could be opened.
pub(in crate::doctor) fn conclusion(machine: &Machine) -> String {
    let facts = &machine.choice.facts;
    let Some(Ok(route)) = &facts.route else { return String::new() };
    let device = facts.device.as_ref().and_then(|device| device.as_deref().ok()).unwrap_or("a card");
    let (streams, option) = match &facts.gpu {
        Some(Ok(_)) => ("streams run on the GPU", " -- --stream cuda"),
        _ => ("streams are threads of the host, for development without a GPU", ""),
    };
    let messages = match route {
        Route::Soft => "messages stay on this host".to_owned(),
        Route::Proxy => format!("messages leave by {device}, to which a thread posts"),
        Route::Direct => format!("messages leave by {device}, which reads the rings itself"),
    };
    let cpus = match std::thread::available_parallelism().map_or(1, usize::from) {
        1 => "There is one CPU: ranks share it, and a message between them takes 10 us instead of 1."
            .to_owned(),
        cpus => format!("There are {cpus} CPUs: as many ranks can have one each."),
    };
    format!(
        "Here {streams}, and {messages}. {cpus}\nTry first: cargo run --release --example pingpong{option}"
    )
}
