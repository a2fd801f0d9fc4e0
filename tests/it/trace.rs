//! `gdasync trace` on processes that run, hang, and were killed.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::common::{Scratch, command, fails, fifo, program, run, succeeds};
use gdasync::gdsync::memory::Memory;
use gdasync::gdsync::stream::{Cond, HostStreamConfig, Stream};
use gdasync::mp::Communicator;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

/// Generous: reached only by a test that fails.
const LONG: Duration = Duration::from_secs(120);
/// Set in the processes of a job: what it does.
const ROLE: &str = "GDSYNC_TEST_ROLE";
/// Messages each way before the job hangs.
const MESSAGES: u64 = 3;

/// Not a test of its own: a job of two ranks that exchange messages, and then, if it is to hang, each wait for one that the
/// other does not send: rank 0 on a stream, rank 1 on the CPU.
#[test]
fn job() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let comm = Communicator::builder().spawn(2).timeout(LONG).init().unwrap();
    let peer = 1 - comm.rank();
    let buffer = comm.register(&Memory::alloc(64).unwrap()).unwrap();
    let config = HostStreamConfig { name: "job".into(), wait_limit: LONG, ..HostStreamConfig::default() };
    let stream = Stream::host(config).unwrap();
    for _ in 0..MESSAGES {
        let received = comm.irecv(&buffer, 0..8, peer).unwrap();
        let sent = comm.isend_on_stream(&stream, &buffer, 8..16, peer).unwrap();
        comm.wait_on_stream(&stream, &sent).unwrap();
        stream.synchronize(LONG).unwrap();
        comm.wait_all([&received, &sent], LONG).unwrap();
    }
    if comm.rank() == 0 {
        println!("pids {} {}", std::process::id(), comm.child(1).unwrap());
    }
    match role.as_str() {
        "hang" => {
            let never = comm.irecv(&buffer, 0..8, peer).unwrap();
            if comm.rank() == 0 {
                comm.wait_on_stream(&stream, &never).unwrap();
                let _ = stream.synchronize(LONG);
            } else {
                let _ = comm.wait(&never, LONG);
            }
        }
        // Each on a stream: rank 0 sends what rank 1 does not receive, rank 1 waits for a signal.
        "words" => {
            let window = comm.window(&buffer, 0..64, LONG).unwrap();
            if comm.rank() == 0 {
                comm.send_on_stream(&stream, &buffer, 0..8, peer).unwrap();
            } else {
                window.wait_signal_on_stream(&stream, 16, 1, Cond::Geq).unwrap();
            }
            let _ = stream.synchronize(LONG);
        }
        // Until the test has looked, and lets go of the pipe.
        "end" => {
            if comm.rank() == 0 {
                std::io::stdin().read_line(&mut String::new()).unwrap();
            }
            comm.finalize(LONG).unwrap();
        }
        other => panic!("role {other}"),
    }
}

/// Looks until there is something.
fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LONG;
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(Instant::now() < end, "not seen: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A job, the folder of its recordings, and its two processes.
struct Job {
    rank0: Child,
    pids: [u32; 2],
    folder: TempDir,
}

impl Job {
    fn start(role: &str) -> Self {
        let folder = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut command = program(std::env::current_exe().unwrap());
        command.args(["--exact", "trace::job", "--nocapture", "--test-threads=1"]);
        command.env(ROLE, role).env("GDSYNC_RECORDER_DIR", folder.path()).env("GDSYNC_PATH", "soft");
        let mut rank0 = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(rank0.stdout.take().unwrap()).lines();
        let told = lines.find_map(|line| Some(line.unwrap().split_once("pids ")?.1.to_owned())).unwrap();
        let pids: Vec<_> = told.split(' ').map(|pid| pid.trim().parse().unwrap()).collect();
        // What the test harness in it prints later must find a reader.
        std::thread::spawn(move || lines.for_each(drop));
        Self { rank0, pids: [pids[0], pids[1]], folder }
    }

    fn trace(&self, args: &[&str]) -> Command {
        let mut command = command("gdasync trace");
        command.env("GDSYNC_RECORDER_DIR", self.folder.path()).args(args);
        command
    }

    /// What is told of these processes, and the exit status.
    fn json(&self, pids: &[u32]) -> (Value, i32) {
        let pids: Vec<_> = pids.iter().map(u32::to_string).collect();
        let mut args = vec!["--json", "--stuck-after", "0"];
        args.extend(pids.iter().map(String::as_str));
        let (output, out, err) = run(self.trace(&args));
        let code = output.status.code().unwrap();
        assert!(code == 0 || code == 3, "{code}: {err}");
        (serde_json::from_str(&out).unwrap(), code)
    }

    /// Both processes are there until this job is dropped, rank 1 at least unburied by rank 0.
    fn signal(&self, rank: usize, signal: Signal) {
        let pid = Pid::from_raw(self.pids[rank].cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Stops both ranks where each is in its last wait.
    fn stop_in_waits(&self) {
        until("both hang", || {
            for (rank, pid) in self.pids.iter().enumerate() {
                self.signal(rank, Signal::STOP);
                until("it stops", || is_stopped(*pid).then_some(()));
            }
            let (report, _) = self.json(&self.pids);
            let waits = |rank: usize| report["processes"][rank]["waits"].as_array().unwrap().clone();
            let hangs = |rank| waits(rank).iter().any(|wait| wait["sequence"] == MESSAGES);
            if [0, 1].into_iter().all(hangs) {
                return Some(());
            }
            [0, 1].into_iter().for_each(|rank| self.signal(rank, Signal::CONT));
            None
        });
    }
}

fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
}

impl Drop for Job {
    fn drop(&mut self) {
        // Gone already, where the test has ended it; rank 1 goes with it.
        let _ = self.rank0.kill();
        let _ = self.rank0.wait();
    }
}

/// The wait of a rank for the message that never comes.
fn check_wait(report: &Value, at: usize, job: &Job, rank: usize, by: &str, peer_state: &str) {
    let process = &report["processes"][at];
    let peer = 1 - rank;
    assert_eq!((&process["pid"], &process["rank"]), (&job.pids[rank].into(), &rank.into()), "{process:#}");
    let waits = process["waits"].as_array().unwrap();
    let wait =
        waits.iter().find(|wait| wait["sequence"] == MESSAGES).unwrap_or_else(|| panic!("{process:#}"));
    assert_eq!((&wait["stuck"], &wait["by"], &wait["queue"]), (&true.into(), &by.into(), &"receive".into()));
    assert_eq!((&wait["posted"], &wait["completed"]), (&(MESSAGES + 1).into(), &MESSAGES.into()), "{wait:#}");
    assert!(wait["last_state"].as_str().unwrap().starts_with("prepared "), "{wait:#}");
    let other = &wait["peer"];
    let named = (&other["rank"], &other["pid"], &other["state"]);
    assert_eq!(named, (&peer.into(), &job.pids[peer].into(), &peer_state.into()), "{wait:#}");
    assert_eq!(other["sends"]["completed"], MESSAGES - 1, "the peer has not sent it: {wait:#}");
}

#[test]
fn stuck_wait_is_reported_of_live_and_killed_processes() {
    let job = Job::start("hang");
    job.stop_in_waits();
    let (report, code) = job.json(&job.pids);
    assert_eq!(code, 3);
    check_wait(&report, 0, &job, 0, "host stream", "alive");
    check_wait(&report, 1, &job, 1, "CPU", "alive");

    job.signal(1, Signal::KILL);
    let (report, code) = until("rank 1 is dead", || {
        Some(job.json(&job.pids)).filter(|(report, _)| report["processes"][1]["state"] == "dead")
    });
    assert_eq!((code, &report["processes"][0]["state"]), (3, &"alive".into()));
    check_wait(&report, 0, &job, 0, "host stream", "dead");
    check_wait(&report, 1, &job, 1, "CPU", "alive");

    // The same for people, and by the name of the file.
    let file = report["processes"][1]["file"].as_str().unwrap();
    let (output, out, err) = run(job.trace(&[file]));
    assert_eq!(output.status.code(), Some(3), "{err}");
    let [pid0, pid1] = job.pids;
    for said in [
        &format!("process {pid1} "),
        ", rank 1, dead;",
        "STUCK for ",
        "waits for a message from rank 0 (receive 3 of QP 0x",
        "peer rank 0, QP 0x",
        &format!("process {pid0}, alive"),
        "last state: prepared ",
        "4 were posted to that queue and 3 completed",
        "queue pairs",
        "the last 20 records",
    ] {
        assert!(out.contains(said), "'{said}' is not in:\n{out}");
    }
    let list = succeeds(job.trace(&["--list"]));
    let is_listed =
        |pid: u32, state| list.lines().any(|line| line.contains(&pid.to_string()) && line.contains(state));
    assert!(is_listed(pid0, "alive") && is_listed(pid1, "dead"), "{list}");

    // What is dead can be removed, what lives not.
    let removed = succeeds(job.trace(&["--clean"]));
    assert_eq!(removed.trim(), file);
    let error = fails(job.trace(&[&pid1.to_string()]));
    assert!(error.contains("expected one that has a recording"), "{error}");
    assert_eq!(job.json(&[pid0]).1, 3);
}

/// What a stream waits for in a word is told with its purpose and its rank, not by its address.
#[test]
fn stuck_waits_for_words_are_told_by_their_purpose() {
    let job = Job::start("words");
    let purposes = [
        format!("a receive of rank 1 (message {})", MESSAGES + 1),
        "a signal at offset 16 of a window".into(),
    ];
    let waits = until("both wait", || {
        let (report, _) = job.json(&job.pids);
        let wait = |rank: usize| {
            let waits = report["processes"][rank]["waits"].as_array().unwrap();
            waits.iter().find(|wait| wait["purpose"] == purposes[rank].as_str()).cloned()
        };
        Some([wait(0)?, wait(1)?])
    });
    assert!(waits.iter().all(|wait| wait["by"] == "host stream" && wait["queue"] == "word"), "{waits:#?}");
    let other = &waits[0]["peer"];
    assert_eq!((&other["rank"], &other["pid"]), (&1.into(), &job.pids[1].into()), "{other:#}");
    assert!(waits[1]["peer"].is_null(), "any rank may signal");
    let targets = job.pids.map(|pid| pid.to_string());
    let (output, out, err) = run(job.trace(&["--stuck-after", "0", &targets[0], &targets[1]]));
    assert_eq!(output.status.code(), Some(3), "{err}");
    let [credit, signal] = &purposes;
    for said in [&format!("waits for {credit}, peer rank 1, QP 0x"), &format!("waits for {signal}\n")] {
        assert!(out.contains(said.as_str()), "'{said}' is not in:\n{out}");
    }
}

/// Files that others may leave in a folder that all may write to.
#[test]
fn foreign_and_broken_files_are_skipped_with_a_reason() {
    let mut job = Job::start("end");
    let pid = job.pids[0];
    let (report, _) = job.json(&[pid]);
    let real = PathBuf::from(report["processes"][0]["file"].as_str().unwrap());
    let name = |n: &str| job.folder.path().join(format!("gdsync-{pid}-{n}.rec"));
    std::fs::write(name("1"), "junk").unwrap();
    std::os::unix::fs::symlink(&real, name("2")).unwrap();
    fifo(&name("3"));
    // The recording of another process under this name.
    let rank1 = std::fs::read_dir(job.folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let is_rank1 = |path: &PathBuf| path.to_str().unwrap().contains(&format!("-{}-", job.pids[1]));
    std::fs::copy(rank1.into_iter().find(is_rank1).unwrap(), name("4")).unwrap();
    let mut other = std::fs::read(&real).unwrap();
    other[7] = b'0';
    std::fs::write(name("6"), other).unwrap();
    let mut reasons = vec![
        ("6", "written by another version"),
        ("1", "no header"),
        ("2", "regular file"),
        ("3", "regular file"),
        ("4", "of process "),
    ];
    std::fs::copy(&real, name("5")).unwrap();
    match std::os::unix::fs::chown(name("5"), Some(65_533), None) {
        Ok(()) => reasons.push(("5", "belongs to user 65533")),
        Err(_) => {
            eprintln!("SKIPPED in part: only root can give a file to another user");
            std::fs::remove_file(name("5")).unwrap();
        }
    }
    let (output, out, err) = run(job.trace(&[&pid.to_string()]));
    assert!(matches!(output.status.code(), Some(0 | 3)), "{err}");
    assert_eq!(out.matches(&format!("process {pid} ")).count(), 1, "{out}");
    for (n, reason) in reasons {
        let file = name(n).display().to_string();
        let is_told = |line: &str| line.contains(&file) && line.contains(reason);
        assert!(err.lines().any(is_told), "'{file}' and '{reason}' are not in:\n{err}");
    }
    let (output, out, err) = run(job.trace(&["--list"]));
    assert!(output.status.success() && err.contains("left out"), "{err}");
    assert_eq!(out.matches(".rec").count(), 2, "{out}");
    drop(job.rank0.stdin.take());
    assert!(job.rank0.wait().unwrap().success());
}

#[test]
fn heartbeats_do_not_hide_what_the_application_did() {
    // Only ranks that are waited for are asked whether they are alive.
    let job = Job::start("hang");
    let pid = job.pids[0].to_string();
    let scratch = Scratch::new("trace-heartbeats");
    let is_prepared =
        |event: &Value| event["name"].as_str().is_some_and(|name| name.starts_with("prepared send"));
    until("a heartbeat", || {
        succeeds(job.trace(&["--perfetto", scratch.text(), "--stuck-after", "86400", &pid]));
        let trace = scratch.json();
        let events = trace["traceEvents"].as_array().unwrap();
        let watchdog =
            events.iter().find(|event| event["args"]["name"] == "mp-watch").unwrap_or(&Value::Null);
        events.iter().find(|event| event["tid"] == watchdog["tid"] && is_prepared(event)).map(drop)
    });
    let (report, _) = job.json(&job.pids[..1]);
    let last = report["processes"][0]["last_records"].as_array().unwrap();
    assert_eq!(last.len(), 20);
    let of_watchdog = |line: &&Value| line["thread"] == "mp-watch" && line["stage"] == "prepared";
    assert_eq!(last.iter().find(of_watchdog), None);
}

#[test]
fn healthy_job_is_reported_exported_and_cleaned_up() {
    let mut job = Job::start("end");
    let pids = job.pids.map(|pid| pid.to_string());
    let targets = [pids[0].as_str(), pids[1].as_str()];

    // Rank 1 may wait to end, but for no message.
    let (report, _) = job.json(&job.pids);
    for rank in 0..2 {
        let process = &report["processes"][rank];
        assert_eq!((&process["rank"], &process["state"]), (&rank.into(), &"alive".into()), "{process:#}");
        assert_eq!((&process["torn"], &process["lost"]), (&0.into(), &0.into()), "{process:#}");
        assert!(!process["last_records"].as_array().unwrap().is_empty());
    }

    let scratch = Scratch::new("trace-perfetto");
    let path = scratch.text();
    succeeds(job.trace(&[&["--perfetto", path, "--stuck-after", "86400"][..], &targets].concat()));
    let trace = scratch.json();
    let events = trace["traceEvents"].as_array().unwrap();
    let count = |phase: &str| events.iter().filter(|event| event["ph"] == phase).count();
    assert!(count("i") > 0 && count("b") > 0 && count("b") == count("e"), "{}", events.len());
    for event in events {
        assert!(event["pid"].is_number() && event["name"].is_string(), "{event}");
        let is_timed = event["ph"] != "M";
        assert_eq!(event["ts"].as_f64().is_some_and(|ts| ts >= 0.0), is_timed, "{event}");
    }
    let named = events.iter().filter(|event| event["name"] == "process_name").count();
    assert_eq!(named, 2);

    drop(job.rank0.stdin.take());
    assert!(job.rank0.wait().unwrap().success());
    let left: Vec<_> =
        std::fs::read_dir(job.folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(left.is_empty(), "{left:?}");
    assert_eq!(succeeds(job.trace(&[])).lines().count(), 1, "only the heading");
}
