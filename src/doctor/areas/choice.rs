//! What this library does here when nobody says what, and the one change that would make it faster.

use super::super::live::Route;
use super::super::machine::Machine;
use super::super::probe::{Check, Probe};

const DEVICE: Check = Check {
    name: "choice.device",
    tried: "opening the RDMA device that is nearest to GPU 0, as an application does that names none",
    why: "this is what an application gets",
};
const STREAMS: Check = Check {
    name: "choice.streams",
    tried: "opening GPU 0",
    why: "streams of a GPU trigger and wait by themselves; a host stream is a thread that does the same",
};
const FASTER: Check = Check {
    name: "choice.faster",
    tried: "what stands in the way of a card that a GPU triggers",
    why: "the first of these is worth more than all others",
};

pub(in crate::doctor) const CHECKS: &[&Check] = &[&DEVICE, &STREAMS, &FASTER];

pub(in crate::doctor) fn probe(machine: &Machine) -> Vec<Probe> {
    vec![device(machine), streams(machine), faster(machine)]
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
        (Some(Ok(Route::Soft)), _) => DEVICE
            .ok(format!("{name}, the software HCA, over {}: between processes of this host", facts.wire)),
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
    FASTER.ok(format!("one change would help: {now}")).advice(change)
}
