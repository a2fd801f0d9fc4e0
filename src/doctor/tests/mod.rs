//! Each probe, made to complain; and the parts that find out.

mod alone;
mod ask;
mod documents;
mod driver;
mod gpus;
mod network;
mod rig;
mod surroundings;
mod text;
mod tree;
mod trials;

use std::collections::BTreeSet;

use super::areas::AREAS;
use super::probe::{Status, area_of};
use rig::{all, check, healthy};
use tree::Tree;

#[test]
fn a_healthy_machine_has_no_complaint() {
    let tree = Tree::healthy();
    let probes = all(&healthy(&tree));
    let complaints: Vec<_> = probes.iter().filter(|probe| probe.status != Status::Ok).collect();
    let expected = ["container.devices"];
    assert_eq!(complaints.iter().map(|probe| probe.name).collect::<Vec<_>>(), expected, "{complaints:#?}");
    let names: BTreeSet<_> = probes.iter().map(|probe| probe.name).collect();
    let checks: BTreeSet<_> = AREAS.iter().flat_map(|area| area.checks).map(|check| check.name).collect();
    assert_eq!(names, checks, "every probe that is listed says something");
    for area in AREAS {
        assert!(area.checks.iter().all(|check| area_of(check.name) == area.name), "{}", area.name);
    }
}

#[test]
fn each_trouble_is_told_by_its_probe_and_no_other() {
    let cases = [driver::CASES, gpus::CASES, network::CASES, surroundings::CASES].into_iter().flatten();
    let mut complained: BTreeSet<_> = cases.flat_map(|case| check(case, |_, _| {}, all)).collect();
    complained.extend(alone::complaints());
    let never = ["container.kind", "choice.faster"];
    let checks = AREAS.iter().flat_map(|area| area.checks).map(|check| check.name);
    let silent: Vec<_> = checks.filter(|name| !complained.contains(name) && !never.contains(name)).collect();
    assert!(silent.is_empty(), "no case makes these complain: {silent:?}");
}

#[test]
fn without_sysfs_nothing_is_called_absent() {
    let tree = Tree::healthy();
    tree.remove("sys");
    tree.remove("proc/driver");
    let mut machine = healthy(&tree);
    machine.cuda.facts = Default::default();
    let probes = all(&machine);
    let of = |name: &str| probes.iter().find(|probe| probe.name == name).expect("it says something");
    assert_eq!(of("container.mounts").status, Status::Warn);
    for name in ["driver.version", "rdma.card", "iommu.mode"] {
        assert!(of(name).status == Status::Skip && of(name).found.contains("not known"), "{:?}", of(name));
    }
}
