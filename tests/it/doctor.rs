//! `gdasync doctor`, on this machine.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use super::card::has_rdma_core;
use super::common::{Scratch, command, fifo, run, succeeds};
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};
use serde_json::Value;
use tempfile::TempDir;

/// Without the variables of others that the doctor speaks of. Slow machines get time.
fn doctor(args: &str) -> Command {
    let timeout = if args.contains("--timeout") { "" } else { "--timeout 120" };
    let mut command = command(&format!("gdasync doctor {args} {timeout}"));
    for name in ["CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS"] {
        command.env_remove(name);
    }
    command
}

/// The probes, and the exit status, which must follow from them.
#[track_caller]
fn probes(command: Command) -> (i32, Vec<Value>) {
    let (output, out, err) = run(command);
    let report: Value = serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}\n{err}"));
    let probes = report["probes"].as_array().unwrap().clone();
    assert!(!probes.is_empty() && report["machine"]["kernel"].is_string(), "{report:#}");
    for probe in &probes {
        for field in ["name", "tried", "found", "why"] {
            assert!(probe[field].as_str().is_some_and(|text| !text.is_empty()), "{field}: {probe:#}");
        }
        let status = probe["status"].as_str().unwrap();
        assert!(["ok", "warn", "fail", "skip"].contains(&status), "{probe:#}");
        assert!(probe["fix"].is_string() || ["ok", "skip"].contains(&status), "{probe:#}");
    }
    let failed = probes.iter().any(|probe| probe["status"] == "fail");
    assert_eq!(output.status.code(), Some(i32::from(failed)), "{out}\n{err}");
    (i32::from(failed), probes)
}

fn of<'a>(probes: &'a [Value], name: &str) -> &'a Value {
    probes.iter().find(|probe| probe["name"] == name).unwrap_or_else(|| panic!("no {name} in {probes:#?}"))
}

fn is_empty(directory: &str) -> bool {
    fs::read_dir(directory).map_or(true, |mut entries| entries.next().is_none())
}

#[test]
fn machine_without_devices_passes() {
    let (_, probes) = probes(doctor("--json"));
    let listed = succeeds(doctor("--list"));
    let names = listed.lines().filter(|line| !line.starts_with(' '));
    let names: Vec<_> = names.filter_map(|line| line.split_whitespace().next()).collect();
    names.iter().for_each(|name| assert!(of(&probes, name)["why"].is_string()));
    assert!(names.len() > 30 && listed.contains("why: "), "{listed}");
    if Path::new("/proc/driver/nvidia").exists() || !is_empty("/sys/class/infiniband") {
        return eprintln!(
            "skipped: this machine has an NVIDIA driver or an RDMA device, which may have troubles"
        );
    }
    let failed: Vec<_> = probes.iter().filter(|probe| probe["status"] == "fail").collect();
    assert!(failed.is_empty(), "{failed:#?}");
    assert!(of(&probes, "choice.device")["found"].as_str().unwrap().starts_with("soft0"));
    assert!(of(&probes, "choice.streams")["found"].as_str().unwrap().contains("host streams"));
    let faster = of(&probes, "choice.faster");
    assert!(
        faster["status"] == "warn" && faster["fix"].as_str().unwrap().contains("RDMA device"),
        "{faster:#}"
    );
    let text = succeeds(doctor("--only choice"));
    for words in
        ["streams are threads of the host", "messages stay on this host", "CPU", "Try first: cargo run"]
    {
        assert!(text.contains(words), "{words}: {text}");
    }
    for name in ["gpu.cuda", "gpu.memop_run", "mapping.any", "rdma.card", "topology.gpu_hca"] {
        assert_eq!(of(&probes, name)["status"], "skip", "{probes:#?}");
    }
}

#[test]
fn gpus_of_this_machine_work() {
    if !Path::new("/proc/driver/nvidia/version").exists() {
        return eprintln!("skipped: no NVIDIA driver");
    }
    let (_, probes) = probes(doctor("--json --only driver,gpu,mapping,choice"));
    for name in [
        "driver.version",
        "gpu.cuda",
        "gpu.memops",
        "gpu.memop_run",
        "gpu.capture",
        "mapping.any",
        "choice.streams",
    ] {
        let wrong: Vec<_> =
            probes.iter().filter(|probe| probe["name"] == name && probe["status"] != "ok").collect();
        assert!(wrong.is_empty() && of(&probes, name)["status"] == "ok", "{wrong:#?}");
    }
}

#[test]
fn a_file_gets_the_json_and_the_terminal_the_text() {
    let file = Scratch::new("doctor");
    let args = format!("--only limits environment.cuda --json {}", file.text());
    let text = succeeds(doctor(&args));
    let names: Vec<_> =
        file.json()["probes"].as_array().unwrap().iter().map(|probe| probe["name"].clone()).collect();
    assert_eq!(names, ["limits.memlock", "environment.cuda"]);
    for words in ["gdasync doctor", "\nLimits\n", "limits.memlock"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(!text.contains("choice.device"), "{text}");
    let text = succeeds(doctor("--only gpu"));
    if text.contains("no GPU that CUDA shows") {
        let names = "(class, rdma, dma_buf, memops, flush, memop_run, capture, peers, bar1)";
        assert!(
            text.contains("gpu.* ") && text.contains(names),
            "what is skipped for one reason takes one line: {text}"
        );
    }
}

#[test]
fn missing_device_fails() {
    let mut command = doctor("--json --only choice,limits");
    command.env("GDSYNC_DEVICE", "mlx5_99");
    let (status, probes) = probes(command);
    assert_eq!(status, 1);
    let device = of(&probes, "choice.device");
    assert!(
        device["status"] == "fail" && device["found"].as_str().unwrap().contains("mlx5_99"),
        "{device:#}"
    );
    assert_ne!(of(&probes, "limits.memlock")["status"], "fail");
}

/// In a child between fork and exec: only system calls.
fn lower_limits() -> std::io::Result<()> {
    setrlimit(Resource::Memlock, Rlimit { current: Some(64 << 10), maximum: Some(64 << 10) })?;
    // Where it is refused, the process has no capabilities.
    let _ = remove_capability_from_bounding_set(CapabilitySet::IPC_LOCK);
    Ok(())
}

#[test]
fn lowered_limits_are_found() {
    let root = TempDir::new().unwrap();
    fs::create_dir_all(root.path().join("sys/class/infiniband/rxe0/ports")).unwrap();
    let mut command = doctor(&format!("--json --only limits --root {}", root.path().display()));
    // SAFETY: only system calls.
    unsafe { command.pre_exec(lower_limits) };
    let (status, probes) = probes(command);
    assert_eq!(status, 1, "{probes:#?}");
    let memlock = of(&probes, "limits.memlock");
    assert!(
        memlock["status"] == "fail" && memlock["found"].as_str().unwrap().contains("64 KiB"),
        "{memlock:#}"
    );
    assert!(memlock["fix"].as_str().unwrap().contains("ulimit -l unlimited"), "{memlock:#}");
}

fn failed(probes: &[Value]) -> Vec<&str> {
    let failed = probes.iter().filter(|probe| probe["status"] == "fail");
    failed.map(|probe| probe["name"].as_str().unwrap()).collect()
}

#[test]
fn blocking_library_affects_no_other_probe() {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("libibverbs.so.1");
    fifo(&path);
    let mut command = doctor("--json --only rdma.core,limits,environment --timeout 3");
    command.env("GDSYNC_LIBIBVERBS", &path);
    let (_, probes) = probes(command);
    assert_eq!(failed(&probes), ["rdma.core"], "{probes:#?}");
    assert!(
        of(&probes, "rdma.core")["found"].as_str().unwrap().contains("no answer within 3s"),
        "{probes:#?}"
    );
}

#[test]
fn hanging_driver_affects_no_other_probe() {
    let root = TempDir::new().unwrap();
    let port = root.path().join("sys/class/infiniband/mlx5_0/ports/1");
    fs::create_dir_all(&port).unwrap();
    fifo(&port.join("state"));
    let args = "--json --only rdma.link,rdma.gids,limits,environment --timeout 3";
    let (_, probes) = probes(doctor(&format!("{args} --root {}", root.path().display())));
    assert_eq!(failed(&probes), ["rdma.link", "rdma.gids"], "{probes:#?}");
    assert!(of(&probes, "rdma.link")["found"].as_str().unwrap().contains("did not answer"), "{probes:#?}");
}

#[test]
fn card_is_opened_and_chosen() {
    if !has_rdma_core() {
        return;
    }
    let doctor = format!("{} doctor --json --only rdma,choice --timeout 120", env!("CARGO_BIN_EXE_gdasync"));
    let command = command(&format!("gdasync card -- {doctor}"));
    let (_, probes) = probes(command);
    let found = |name: &str| of(&probes, name)["found"].as_str().unwrap().to_owned();
    for name in ["rdma.card", "rdma.devx"] {
        assert_eq!(of(&probes, name)["status"], "ok", "{probes:#?}");
        assert_eq!(of(&probes, name)["subject"], "mlx5_0");
    }
    assert!(found("rdma.core").contains("libibverbs.so"), "{probes:#?}");
    assert!(found("rdma.card").contains("it reads our rings"), "{probes:#?}");
    assert!(found("choice.device").starts_with("mlx5_0 direct"), "{probes:#?}");
    assert!(found("rdma.node").contains("uverbs0 is open"), "{probes:#?}");
}
