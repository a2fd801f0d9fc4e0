//! A machine on which nothing is wrong, and what changes when something is.

use std::collections::BTreeMap;

use super::super::areas::AREAS;
use super::super::areas::limits::Limits;
use super::super::live::{
    Answer, Backend, Bar1, ChoiceFacts, CudaFacts, DeviceFacts, GpuFacts, MappingFacts, Route, VerbsFacts,
    attribute,
};
use super::super::machine::Machine;
use super::super::probe::{Probe, Status};
use super::super::system::System;
use super::tree::{GPUS, Tree};

fn told<T>(facts: T) -> Answer<T> {
    Answer { facts, trouble: None }
}

fn gpu(ordinal: i32, pci: &str) -> GpuFacts {
    let attributes = [
        (attribute::UNIFIED_ADDRESSING, 1),
        (attribute::COMPUTE_MAJOR, 9),
        (attribute::COMPUTE_MINOR, 0),
        (attribute::SAME_HOST_POINTER, 1),
        (attribute::FLUSH_REMOTE_WRITES, 0),
        (attribute::RDMA_WITH_VMM, 1),
        (attribute::RDMA, 1),
        (attribute::RDMA_FLUSH_OPTIONS, 1),
        (attribute::RDMA_WRITES_ORDERING, 100),
        (attribute::MEMOPS_64, 1),
        (attribute::WAIT_NOR, 1),
        (attribute::DMA_BUF, 1),
    ];
    GpuFacts {
        ordinal,
        name: "NVIDIA H200".into(),
        pci: pci.into(),
        attributes: attributes.into(),
        memory: Some(140 << 30),
        peers: [(1 - ordinal, true)].into(),
        nvlinks: GPUS.into_iter().filter(|other| *other != pci).map(|other| (other.into(), true)).collect(),
        is_taken: false,
        memop: Some(Ok("ran".into())),
        capture: Some(Ok("ran".into())),
        dma_buf: Some(Ok("exported".into())),
        bar1: Some(Ok(Bar1 { total: 256 << 30, free: 255 << 30, used: 1 << 30 })),
    }
}

/// The machine of a healthy tree.
pub(super) fn healthy(tree: &Tree) -> Machine {
    let backend = |name: &str| Backend { name: name.into(), outcome: Ok("mapped".into()) };
    let device =
        |name: &str| DeviceFacts { name: name.into(), mlx5: true, open: Some(Ok(())), devx: Some(Ok(())) };
    Machine {
        system: System::at(tree.root()),
        cuda: told(CudaFacts {
            version: Some(Ok(13000)),
            count: Some(Ok(2)),
            gpus: vec![gpu(0, GPUS[0]), gpu(1, GPUS[1])],
        }),
        mapping: told(MappingFacts { backends: ["gdrdrv", "dmabuf", "rm"].map(backend).into() }),
        verbs: told(VerbsFacts {
            libibverbs: Some(Ok("/usr/lib/libibverbs.so.1.14.52.0".into())),
            libmlx5: Some(Ok("/usr/lib/libmlx5.so.1.24.52.0".into())),
            dma_bufs: true,
            no_list: None,
            devices: ["mlx5_0", "mlx5_1"].map(device).into(),
        }),
        choice: told(ChoiceFacts {
            gpu: Some(Ok(GPUS[0].into())),
            device: Some(Ok("mlx5_0".into())),
            route: Some(Ok(Route::Direct)),
            wire: "RoCE v2".into(),
            not_direct: None,
        }),
        limits: Limits { memlock: None, ipc_lock: false, beyond: None },
        is_root: false,
        environment: BTreeMap::new(),
    }
}

pub(super) fn all(machine: &Machine) -> Vec<Probe> {
    AREAS.iter().flat_map(|area| (area.probe)(machine)).collect()
}

/// Something that goes wrong, and all that must be said of it and was not said before.
pub(super) struct Case {
    pub(super) what: &'static str,
    pub(super) change: fn(&Tree, &mut Machine),
    /// Name, device, status, and words of what was found and of the fix.
    pub(super) says: &'static [(&'static str, &'static str, Status, &'static str, &'static str)],
}

/// What two looks at a machine do not have in common, of the second.
fn changed(before: &[Probe], after: &[Probe]) -> Vec<Probe> {
    after.iter().filter(|probe| !before.contains(probe)).cloned().collect()
}

/// Makes it go wrong on a machine that is healthy but for `base`. Returns the probes that complained.
pub(super) fn check(
    case: &Case,
    base: impl Fn(&Tree, &mut Machine),
    look: impl Fn(&Machine) -> Vec<Probe>,
) -> Vec<&'static str> {
    let tree = Tree::healthy();
    let mut machine = healthy(&tree);
    base(&tree, &mut machine);
    let before = look(&machine);
    (case.change)(&tree, &mut machine);
    let mut said = changed(&before, &look(&machine));
    let mut complained = Vec::new();
    for (name, subject, status, found, fix) in case.says {
        let is_it = |probe: &Probe| {
            probe.name == *name && probe.subject.as_deref().unwrap_or("").starts_with(subject)
        };
        let at =
            said.iter().position(is_it).unwrap_or_else(|| panic!("{}: {name} says nothing new", case.what));
        let probe = said.remove(at);
        assert_eq!(probe.status, *status, "{}: {probe:?}", case.what);
        assert!(probe.found.contains(found), "{}: {probe:?}", case.what);
        assert!(probe.fix.as_deref().unwrap_or("").contains(fix), "{}: {probe:?}", case.what);
        if probe.status >= Status::Warn {
            assert!(probe.fix.is_some(), "{}: {probe:?}", case.what);
            complained.push(probe.name);
        }
    }
    assert!(said.is_empty(), "{}: also {said:#?}", case.what);
    complained
}
