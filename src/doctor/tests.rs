//! Each probe, made to complain; and the parts that find out.

mod cases;
mod trials;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::process::Command;
use std::time::Duration;

use super::areas::AREAS;
use super::areas::process::conclusion;
use super::areas::rdma::Limits;
use super::areas::{Probe, Status, area_of};
use super::live::{
    Answer, Bar1, ChoiceFacts, CudaFacts, DeviceFacts, FabricFacts, GpuFacts, MappingFacts, ProbeProcess,
    Route, VerbsFacts, attribute, limit,
};
use super::machine::{Machine, System};
use super::requirements::{
    CUDA, INFINIBAND, ROCE_V1, ROCE_V2, SOFTWARE, Software, card, generation, needs, numbers as numbers_of,
    rows,
};

use super::{Description, Report, text};
use cases::{BRIDGES, Case, GPUS, Tree};

fn told<T>(facts: T) -> Answer<T> {
    Answer { facts, trouble: None }
}

fn gpu(ordinal: i32, pci: &str) -> GpuFacts {
    let attributes = [
        (attribute::COMPUTE_MAJOR, 9),
        (attribute::COMPUTE_MINOR, 0),
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

fn healthy(tree: &Tree) -> Machine {
    let backend = |name: &str| (name.to_owned(), Ok("mapped".into()));
    let device =
        |name: &str| DeviceFacts { name: name.into(), mlx5: true, open: Some(Ok(())), devx: Some(Ok(())) };
    Machine {
        system: System::at(tree.root()),
        cuda: told(CudaFacts {
            version: Some(Ok(13000)),
            count: Some(Ok(2)),
            gpus: vec![gpu(0, GPUS[0]), gpu(1, GPUS[1])],
        }),
        mapping: told(MappingFacts {
            backends: ["gdrdrv", "dmabuf", "rm"].map(backend).into(),
            gdrapi: Some(Ok("rm".into())),
        }),
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
            tcp: Some(Ok("10.1.2.3".into())),
            wire: "RoCE v2".into(),
            reaches_other_hosts: true,
            not_direct: None,
        }),
        fabric: Some(told(FabricFacts {
            library: Some(Ok("libfabric 2.1 (/usr/lib/libfabric.so.1.28.0)".into())),
            providers: ["efa", "cxi", "tcp"].map(|name| (name.into(), Ok("messages in order".into()))).into(),
        })),
        limits: Limits { memlock: None, is_lifted: false },
        is_root: false,
        environment: BTreeMap::from([("SLINGSHOT_VNIS".into(), "4242".into())]),
    }
}

fn all(machine: &Machine) -> Vec<Probe> {
    AREAS.iter().flat_map(|area| (area.probe)(machine)).collect()
}

/// Sets an attribute of GPU 1.
fn set(machine: &mut Machine, number: u32, value: i32) {
    machine.cuda.facts.gpus[1].attributes.insert(number, value);
}

/// Has a GPU refuse contexts for its compute mode.
fn taken(machine: &mut Machine, gpu: usize, mode: i32) {
    let gpu = &mut machine.cuda.facts.gpus[gpu];
    gpu.attributes.insert(attribute::COMPUTE_MODE, mode);
    gpu.is_taken = true;
    for outcome in [&mut gpu.memop, &mut gpu.capture, &mut gpu.dma_buf] {
        *outcome = Some(Err("CUDA_ERROR_DEVICE_UNAVAILABLE".into()));
    }
}

fn set_variable(machine: &mut Machine, name: &str, value: &str) {
    machine.environment.insert(name.into(), value.into());
}

const NOBODY: libc::uid_t = 65534;

/// Makes the calling thread another user, and none of the others: the system call does what libc does for all.
fn change_user() -> bool {
    // SAFETY: plain numbers.
    unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) == 0 }
}

/// The probes as another user than root. `None` where root may not change its user.
fn as_other_user(machine: &Machine) -> Option<Vec<Probe>> {
    // SAFETY: it may be called at any time.
    let is_root = unsafe { libc::geteuid() } == 0;
    std::thread::scope(|scope| {
        let look = scope.spawn(|| (!is_root || change_user()).then(|| all(machine)));
        look.join().expect("the thread only looks")
    })
}

#[test]
fn healthy_machine_has_no_complaint() {
    let tree = Tree::healthy();
    let probes = all(&healthy(&tree));
    let complaints: Vec<_> = probes.iter().filter(|probe| probe.status != Status::Ok).collect();
    assert!(complaints.is_empty(), "{complaints:#?}");
    let names: BTreeSet<_> = probes.iter().map(|probe| probe.name).collect();
    let checks: BTreeSet<_> = AREAS.iter().flat_map(|area| area.checks).map(|check| check.name).collect();
    assert_eq!(names, checks, "every probe that is listed says something");
    for area in AREAS {
        assert!(area.checks.iter().all(|check| area_of(check.name) == area.name), "{}", area.name);
    }
}

/// What the doctor says of each trouble that it does not say of a healthy machine. Returns the probes that complained.
fn reports_on(
    cases: &[Case],
    look: impl Fn(&Machine) -> Vec<Probe>,
    complained: &mut BTreeSet<&'static str>,
) -> String {
    let mut text = String::new();
    for (what, change) in cases {
        let tree = Tree::healthy();
        let mut machine = healthy(&tree);
        let before = look(&machine);
        change(&tree, &mut machine);
        writeln!(text, "{what}").unwrap();
        for probe in look(&machine).into_iter().filter(|probe| !before.contains(probe)) {
            let Probe { name, subject, status, found, fix, .. } = probe;
            let subject = subject.map(|subject| format!(" {subject}")).unwrap_or_default();
            writeln!(text, "  {status} {name}{subject}: {found}").unwrap();
            fix.iter().for_each(|fix| writeln!(text, "    fix: {fix}").unwrap());
            if status >= Status::Warn {
                assert!(fix.is_some(), "{what}: {name} has no fix");
                complained.insert(name);
            }
        }
    }
    text
}

#[test]
fn every_fault_is_reported_by_its_probe_only() {
    let mut complained = BTreeSet::new();
    for (name, cases) in [
        ("driver", cases::DRIVER),
        ("gpus", cases::CUDA),
        ("network", cases::NETWORK),
        ("surroundings", cases::SURROUNDINGS),
    ] {
        insta::assert_snapshot!(name, reports_on(cases, all, &mut complained));
    }
    let never = ["container.kind", "fabric.provider"];
    let checks = AREAS.iter().flat_map(|area| area.checks).map(|check| check.name);
    let silent: Vec<_> = checks.filter(|name| !complained.contains(name) && !never.contains(name)).collect();
    assert!(silent.is_empty(), "no case makes these complain: {silent:?}");
}

#[test]
fn closed_device_files_are_reported() {
    let tree = Tree::healthy();
    if as_other_user(&healthy(&tree)).is_none() {
        eprintln!("skipped: this root may not become another user, and opens everything");
        return;
    }
    let look = |machine: &Machine| as_other_user(machine).expect("as a moment ago");
    insta::assert_snapshot!("alone", reports_on(cases::ALONE, look, &mut BTreeSet::new()));
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

#[test]
fn paths_between_gpus_are_distinguished() {
    let bridge = "pci0000:00/0000:00:05.0";
    let switch = "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:02.0";
    for (below, joined, status, found) in [
        (bridge, Some(true), Status::Ok, "GPU1 NV, GPU2 NV: NVLink"),
        (bridge, Some(false), Status::Warn, "GPU1 PHB, GPU2 NV: some traffic passes a host bridge"),
        (bridge, None, Status::Skip, "GPU1 PHB, GPU2 NV; NVML could not be asked"),
        (switch, Some(false), Status::Ok, "GPU1 PIX, GPU2 NV: no host bridge"),
        (switch, None, Status::Ok, "GPU1 PIX, GPU2 NV: no host bridge"),
    ] {
        let tree = Tree::healthy();
        tree.pci(&format!("{below}/0000:09:00.0"), "0x030200", ("0x10de", "0x2335"), ("0", "0-63"));
        let mut machine = healthy(&tree);
        let links = &mut machine.cuda.facts.gpus[0].nvlinks;
        links.extend(joined.map(|joined| ("0000:09:00.0".to_owned(), joined)));
        let probes = all(&machine);
        let peers = probes.iter().find(|probe| probe.name == "topology.gpu_gpu").expect("of GPU0");
        assert!(peers.status == status && peers.found.starts_with(found), "{joined:?}: {peers:?}");
    }
}

fn report_text(tree: &Tree) -> String {
    let machine = healthy(tree);
    let (probes, conclusion) = (all(&machine), conclusion(&machine));
    text(&Report { machine: Description::here(), probes, conclusion }).unwrap()
}

/// Words with the spaces of columns between them.
fn has(text: &str, words: &str) -> bool {
    text.lines().any(|line| line.split_whitespace().collect::<Vec<_>>().join(" ").contains(words))
}

#[test]
fn report_merges_devices_and_explains_what_is_wrong() {
    let tree = Tree::healthy();
    let text = report_text(&tree);
    for words in [
        "ok gpu.memop_run GPU 0, GPU 1: ran",
        "ok rdma.devx mlx5_0, mlx5_1: allowed to this user",
        "ok, 0 warn, 0 fail, 0 skip",
        "Here streams run on the GPU, and messages leave by mlx5_0, which reads the rings itself.",
        "Try first: cargo run --release --example pingpong -- --stream cuda",
    ] {
        assert!(has(&text, words), "{words}: {text}");
    }
    assert!(!text.contains("why:") && !text.contains("fix:"), "{text}");
    tree.bridge(BRIDGES[0], 0x1c);
    tree.remove("dev/nvidia-uvm");
    let text = report_text(&tree);
    for words in [
        "FAIL driver.nodes missing: /dev/nvidia-uvm",
        "why: CUDA reaches the driver through these files",
        "fix: run `nvidia-modprobe -u -c 0`",
        "warn iommu.acs requests are redirected by 0000:00:01.0",
        "fix: switch ACS off",
        "ok, 1 warn, 1 fail, 0 skip",
        "Repair what says FAIL first.",
    ] {
        assert!(has(&text, words), "{words}: {text}");
    }
}

#[test]
fn requirements_are_read_from_their_document() {
    let mut seen = BTreeSet::new();
    let numbers = rows("card").flat_map(|[_, numbers, _, _]| numbers.split(", "));
    assert!(numbers.map(|number| u16::from_str_radix(number, 16).unwrap()).all(|number| seen.insert(number)));
    assert_eq!((seen.len(), rows::<4>("generation").count()), (28, 11));
    assert!(rows("software").map(|[name, _, _]| name).eq(SOFTWARE.map(|software| software.name)));
    let is_whole =
        |software: &Software| numbers_of(software.least()).is_some() && !software.for_what().is_empty();
    assert!(SOFTWARE.iter().all(is_whole));
    assert!([INFINIBAND, ROCE_V2, ROCE_V1].iter().all(|link| !needs(link).is_empty()));
    assert!(!CUDA.is_met((11, 6)) && CUDA.is_met((11, 7)) && CUDA.is_met((12, 0)));
    assert!(card(0x1003).is_some_and(|card| !card.is_direct && card.links == "InfiniBand, RoCE"));
    assert!(generation((7, 0)).is_some_and(|volta| volta.triggers && !volta.open_modules));
    let cards = [0x1021, 0x1025, 0x1572].map(|device| card(device).map(|card| card.name));
    assert_eq!(cards, [Some("ConnectX-7"), Some("ConnectX-9"), None]);
    let generations = [(7, 5), (8, 6), (8, 9), (10, 3), (10, 7)].map(|one| generation(one).unwrap().name);
    assert_eq!(generations, ["Turing", "Ampere", "Ada", "Blackwell", "Rubin"]);
    assert!(generation((99, 0)).is_none());
}

/// Longer than any test runs.
const LONG: Duration = Duration::from_secs(600);

fn ask(script: &str, limit: Duration) -> Answer<CudaFacts> {
    let mut shell = Command::new("sh");
    shell.args(["-c", script]);
    ProbeProcess::start(shell, limit).unwrap().answer()
}

const FACTS: &str = r#"echo '{"Facts":{"version":{"Ok":13000},"count":null,"gpus":[]}}';"#;

#[test]
fn facts_survive_a_failing_process() {
    for (end, trouble) in [
        ("", None),
        ("echo a library says hello; echo '{\"Facts\":'; exit 0", None),
        ("echo '{\"Step\":\"cuInit\"}'; exit 3", Some("exit status: 3, in cuInit")),
        ("echo '{\"Step\":\"cuInit\"}'; kill -9 $$", Some("killed by signal 9, in cuInit")),
    ] {
        let answer = ask(&format!("{FACTS} {end}"), LONG);
        assert_eq!(answer.facts.version, Some(Ok(13000)), "{end}");
        match trouble {
            None => assert_eq!(answer.trouble, None, "{end}"),
            Some(words) => {
                assert!(answer.trouble.as_deref().unwrap().contains(words), "{:?}", answer.trouble)
            }
        }
    }
}

#[test]
fn deadlines_end_waits() {
    // A process that says nothing, and one whose pipe a grandchild keeps open.
    for script in ["exec sleep 1000", "sleep 20 & exit 0"] {
        let answer = ask(script, Duration::from_millis(50));
        assert!(answer.trouble.unwrap().contains("no answer within 50ms"), "{script}");
        assert_eq!(answer.facts.version, None);
    }
    assert_eq!([0, 1, 2, 8].map(|gpus| limit(gpus).as_secs()), [4, 4, 5, 11], "many GPUs may take longer");
}
