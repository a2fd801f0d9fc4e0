//! Ranks as processes: this test binary starts itself again, and [`child`] or [`parent`] take over.

use std::env;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio, exit};
use std::thread::sleep;
use std::time::{Duration, Instant};

use mp::Error;
use mp::launch::Bootstrap;
use mp::launch::Launch;
use mp::launch::{Children, spawn_command, spawn_self};

/// Generous: reached only by a test that fails.
const LONG: Duration = Duration::from_secs(60);

/// Tells a process of this binary what it is to do.
const ROLE: &str = "GDSYNC_TEST_ROLE";

/// A command that runs only the test `entry` of this binary, in `role`.
fn myself(entry: &str, role: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .args(["--exact", &format!("spawn::{entry}"), "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .stdout(Stdio::null());
    command
}

fn children(size: usize, role: &str) -> (Launch, std::net::TcpListener, Children) {
    spawn_command(size, |_| myself("child", role)).unwrap()
}

/// Not a test of its own: what a child process does.
#[test]
fn child() {
    let Ok(role) = env::var(ROLE) else { return };
    let launch = Launch::detect().unwrap().expect("started with the variables of a launcher");
    match role.as_str() {
        "exchange" => exchange(Bootstrap::connect(&launch, LONG).unwrap()),
        "survive" => {
            let error = Bootstrap::connect(&launch, LONG).unwrap().barrier(LONG).unwrap_err();
            assert!(error.to_string().contains("rank 2"), "{error}");
            exit(9);
        }
        "fail" if launch.rank == 2 => exit(7),
        // Longer than any test waits, so that only a kill ends it in time.
        "fail" | "sleep" => sleep(2 * LONG),
        other => panic!("no such role: {other}"),
    }
}

fn exchange(mut bootstrap: Bootstrap) {
    let own = format!("rank {}", bootstrap.rank());
    let all = bootstrap.allgather(own.as_bytes(), LONG).unwrap();
    let expected: Vec<_> = (0..bootstrap.size()).map(|rank| format!("rank {rank}").into_bytes()).collect();
    assert_eq!(all, expected);
    let pids = bootstrap.allgather(&std::process::id().to_be_bytes(), LONG).unwrap();
    let distinct: std::collections::HashSet<_> = pids.iter().collect();
    assert_eq!(distinct.len(), bootstrap.size(), "one process for each rank");
    bootstrap.barrier(LONG).unwrap();
}

/// Not a test of its own: a process that is rank 0 of its own program, or one of its children.
#[test]
fn parent() {
    match env::var(ROLE).as_deref() {
        Ok("self") => match Launch::detect().unwrap() {
            None => {
                let (launch, listener, children) = spawn_self(3).unwrap();
                exchange(Bootstrap::root(listener, &launch, LONG).unwrap());
                children.wait(LONG).unwrap();
                exit(40);
            }
            Some(launch) => {
                let again = spawn_self(2).map(drop);
                assert!(
                    matches!(again, Err(Error::Launch { .. })),
                    "a child must not start children without end"
                );
                exchange(Bootstrap::connect(&launch, LONG).unwrap());
            }
        },
        Ok("orphan") => {
            let (_launch, _listener, children) = children(2, "sleep");
            eprintln!("pid {}", children.pid(1).unwrap());
            sleep(2 * LONG);
        }
        _ => {}
    }
}

/// True while a process runs: not gone, and not a zombie that nobody reaps.
fn runs(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name in parentheses.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

#[track_caller]
fn ends(pid: u32) {
    let started = Instant::now();
    while runs(pid) {
        assert!(started.elapsed() < LONG, "process {pid} still runs");
        sleep(Duration::from_millis(5));
    }
}

#[test]
fn children_exchange_with_rank_0() {
    let (launch, listener, children) = children(3, "exchange");
    exchange(Bootstrap::root(listener, &launch, LONG).unwrap());
    children.wait(LONG).unwrap();
}

#[test]
fn a_program_starts_itself() {
    let mut command = myself("parent", "self");
    // Whatever started the tests is not the launcher of this job.
    let launchers =
        ["RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"];
    for name in launchers.into_iter().chain(["SLURM_PROCID"]) {
        command.env_remove(name);
    }
    // The parent leaves with a code of its own, so that a filter that matches no test is seen.
    assert_eq!(command.status().unwrap().code(), Some(40));
}

#[test]
fn one_rank_has_no_children() {
    let (launch, _listener, mut children) = children(1, "sleep");
    assert_eq!((launch.rank, launch.size, children.pid(1)), (0, 1, None));
    assert!(children.failed().is_none());
    children.wait(LONG).unwrap();
}

#[test]
fn a_failing_child_is_named_and_the_others_are_killed() {
    let (_launch, _listener, children) = children(4, "fail");
    let pids: Vec<u32> = (1..4).map(|rank| children.pid(rank).unwrap()).collect();
    match children.wait(LONG) {
        Err(Error::Child { rank, status }) => assert_eq!((rank, status.code()), (2, Some(7))),
        other => panic!("expected the failure of rank 2, got {other:?}"),
    }
    assert!(pids.iter().all(|&pid| !runs(pid)), "the others are reaped");
}

/// Waits until the first child that has failed is `rank`.
#[track_caller]
fn ended(children: &mut Children, rank: usize) -> ExitStatus {
    let started = Instant::now();
    loop {
        match children.failed() {
            Some(Error::Child { rank: failed, status }) if failed == rank => return status,
            Some(Error::Child { .. }) | None => {}
            Some(error) => panic!("unexpected: {error}"),
        }
        assert!(started.elapsed() < LONG, "the end of rank {rank} is not seen");
        sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_killed_child_is_named_with_its_signal() {
    let (_launch, _listener, mut children) = children(3, "sleep");
    assert!(children.failed().is_none());
    children.kill(2).unwrap();
    assert_eq!(ended(&mut children, 2).signal(), Some(libc::SIGKILL));
    children.kill(2).expect("killing the dead is no error");
    assert!(matches!(children.kill(0), Err(Error::Spawn { .. })));
    assert!(matches!(children.kill(3), Err(Error::Spawn { .. })));
}

#[test]
fn the_death_of_a_process_reaches_its_peers() {
    let (launch, listener, mut children) = children(3, "survive");
    let mut bootstrap = Bootstrap::root(listener, &launch, LONG).unwrap();
    children.kill(2).unwrap();
    ended(&mut children, 2);
    let error = bootstrap.barrier(LONG).unwrap_err();
    assert!(error.to_string().contains("rank 2"), "{error}");
    assert_eq!(ended(&mut children, 1).code(), Some(9), "rank 1 was told of rank 2");
}

#[test]
fn waiting_has_a_deadline() {
    let (_launch, _listener, children) = children(2, "sleep");
    let (pid, started) = (children.pid(1).unwrap(), Instant::now());
    let error = children.wait(Duration::from_millis(100)).unwrap_err();
    assert!(started.elapsed() < LONG, "the child is not killed");
    assert!(matches!(&error, Error::Deadline { what, .. } if what.contains("rank 1")), "{error}");
    assert!(!runs(pid));
}

#[test]
fn dropping_the_children_ends_them() {
    let (_launch, _listener, children) = children(3, "sleep");
    let pids = [1, 2].map(|rank| children.pid(rank).unwrap());
    assert!(pids.into_iter().all(runs));
    let started = Instant::now();
    drop(children);
    assert!(started.elapsed() < LONG, "the children are not killed");
    assert!(!pids.into_iter().any(runs));
}

#[test]
fn children_die_with_their_parent() {
    let mut parent = myself("parent", "orphan").stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(parent.stderr.take().unwrap()).lines();
    let pid = lines.map(|line| line.unwrap()).find_map(|line| line.strip_prefix("pid ")?.parse().ok());
    let pid = pid.expect("the parent prints the process id of its child");
    assert!(runs(pid));
    parent.kill().unwrap();
    parent.wait().unwrap();
    ends(pid);
}

#[test]
fn a_program_that_does_not_exist_is_named() {
    let error = spawn_command(2, |_| Command::new("/no/such/program")).unwrap_err();
    let message = error.to_string();
    assert!(matches!(error, Error::Spawn { .. }) && message.contains("/no/such/program"), "{message}");
}

#[test]
fn the_size_is_checked() {
    assert!(matches!(spawn_command(0, |_| Command::new("true")), Err(Error::Launch { .. })));
}
