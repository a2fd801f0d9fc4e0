//! The ways to map GPU memory into the CPU's address space, each tried by itself.

use super::super::live::Backend;
use super::super::machine::Machine;
use super::super::probe::{Check, Probe};

const GDRDRV: Check = Check {
    name: "mapping.gdrdrv",
    tried: "mapping 64 KiB of GPU 0 by the kernel module gdrdrv, writing and reading it back",
    why: "CPU mappings cost 0.1 us where cudaMemcpy costs 5: rings, flags and small payload in GPU memory need them",
};
const DMABUF: Check = Check {
    name: "mapping.dmabuf",
    tried: "the same by mmap of a CUDA dma-buf",
    why: "needs no kernel module, from CUDA 13.3 on",
};
const RM: Check = Check {
    name: "mapping.rm",
    tried: "the same by the driver's own resource manager",
    why: "needs no kernel module and no privilege, on stock drivers",
};
const ANY: Check = Check {
    name: "mapping.any",
    tried: "the first of gdrdrv, dmabuf and rm that works",
    why: "without any, nothing of ours can be in GPU memory",
};

pub(in crate::doctor) const CHECKS: &[&Check] = &[&GDRDRV, &DMABUF, &RM, &ANY];

pub(in crate::doctor) fn probe(machine: &Machine) -> Vec<Probe> {
    let ways = [("gdrdrv", &GDRDRV), ("dmabuf", &DMABUF), ("rm", &RM)];
    if !machine.has_driver() {
        let none = "the NVIDIA driver is not loaded";
        return CHECKS.iter().map(|check| check.skip(none)).collect();
    }
    if machine.cuda.facts.gpus.first().is_some_and(|gpu| gpu.is_taken) {
        return CHECKS
            .iter()
            .map(|check| check.skip("GPU 0 may not be used now; see gpu.memop_run"))
            .collect();
    }
    let facts = &machine.mapping.facts;
    let of = |name: &str| facts.backends.iter().find(|backend| backend.name == name);
    let trouble = machine.mapping.trouble.as_deref().unwrap_or("not come to");
    let each = ways.map(|(name, check)| match of(name) {
        Some(Backend { outcome: Ok(found), .. }) => check.ok(found.as_str()),
        Some(Backend { outcome: Err(why), .. }) => check.skip(why.as_str()),
        None => check
            .fail(format!("not tried: {trouble}"), "try again with `--timeout 60`, and look into `dmesg`"),
    });
    let works = facts.backends.iter().find(|backend| backend.outcome.is_ok());
    let any = match (works, &machine.mapping.trouble) {
        (Some(backend), _) => ANY.ok(format!("{} serves", backend.name)),
        (None, Some(trouble)) => ANY.fail(trouble.as_str(), "try again with `--timeout 60`, and look into `dmesg`"),
        (None, None) => ANY.fail(
            "GPU memory cannot be mapped here",
            "see the reasons above; `GDRCOPY_BACKEND=rm RUST_LOG=debug gdasync gdrcopy sanity` says more; rings stay in \
             host memory meanwhile",
        ),
    };
    each.into_iter().chain([any]).collect()
}
