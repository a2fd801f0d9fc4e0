//! Launching: the bootstrap exchange, between threads in place of processes, and ranks as child processes.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio, exit};
use std::sync::mpsc;
use std::thread::sleep;
use std::time::{Duration, Instant};
use std::{env, thread};

use mp::launch::{Bootstrap, Children, Launch, Launcher, MAX_PAYLOAD, Root, spawn_command, spawn_self};
use mp::{Error, Result};

/// Generous: reached only by a test that fails.
const LONG: Duration = Duration::from_secs(60);

/// For waits that time out.
const SHORT: Duration = Duration::from_millis(300);

fn launch(rank: usize, size: usize, root: &str) -> Launch {
    Launch {
        rank,
        size,
        local_rank: rank,
        local_size: Some(size),
        root: Root::At(root.to_owned()),
        token: 7,
        launcher: Launcher::Env,
    }
}

fn socket() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let root = listener.local_addr().unwrap().to_string();
    (listener, root)
}

/// Connects `size` ranks, runs `body` in each on its thread, and returns the results, by rank.
fn job<T: Send>(size: usize, body: impl Fn(Bootstrap) -> T + Sync) -> Vec<T> {
    let (listener, root) = socket();
    thread::scope(|scope| {
        let (body, root) = (&body, &root);
        let others: Vec<_> = (1..size)
            .map(|rank| {
                scope.spawn(move || body(Bootstrap::connect(&launch(rank, size, root), LONG).unwrap()))
            })
            .collect();
        let first = body(Bootstrap::root(listener, &launch(0, size, root), LONG).unwrap());
        std::iter::once(first).chain(others.into_iter().map(|rank| rank.join().unwrap())).collect()
    })
}

/// The text of a bootstrap error about `peer`, perhaps with its address.
#[track_caller]
fn blames(error: &Error, peer: &str) -> String {
    match error {
        Error::Bootstrap { peer: blamed, .. } if blamed.split(" (").next() == Some(peer) => error.to_string(),
        other => panic!("expected an error about {peer}, got {other:?}"),
    }
}

/// What `rank` contributes in `round`: lengths from 0 to 1 MiB.
fn contribution(rank: usize, round: usize) -> Vec<u8> {
    let length = [0, 1, 5000, 1 << 20][(rank + round) % 4];
    let seed = u8::try_from(rank * 16 + round).unwrap();
    (0..length).map(|i: usize| i.to_le_bytes()[0] ^ seed).collect()
}

fn exchanges(size: usize) {
    job(size, |mut bootstrap| {
        assert_eq!(bootstrap.size(), size);
        for round in 0..4 {
            let all = bootstrap.allgather(&contribution(bootstrap.rank(), round), LONG).unwrap();
            let expected: Vec<_> = (0..size).map(|rank| contribution(rank, round)).collect();
            assert!(all == expected, "rank {} round {round}", bootstrap.rank());
            bootstrap.check().unwrap();
            bootstrap.barrier(LONG).unwrap();
        }
    });
}

#[test]
fn two_ranks_exchange() {
    exchanges(2);
}

#[test]
fn five_ranks_exchange() {
    exchanges(5);
}

#[test]
fn one_rank_needs_no_socket() {
    let mut bootstrap = Bootstrap::connect(&launch(0, 1, "no such host:1"), SHORT).unwrap();
    assert_eq!(bootstrap.allgather(b"x", SHORT).unwrap(), [b"x"]);
    bootstrap.barrier(SHORT).unwrap();
    bootstrap.check().unwrap();
}

#[test]
fn ranks_may_come_before_rank_0_listens() {
    // Below the ports that the system hands out to the other tests.
    let root = format!("127.0.0.1:{}", 20_000 + std::process::id() % 10_000);
    thread::scope(|scope| {
        let early = scope.spawn(|| Bootstrap::connect(&launch(1, 2, &root), LONG).unwrap().barrier(LONG));
        thread::sleep(SHORT);
        Bootstrap::connect(&launch(0, 2, &root), LONG).unwrap().barrier(LONG).unwrap();
        early.join().unwrap().unwrap();
    });
}

#[test]
fn barriers_wait_for_all() {
    let arrived = std::sync::atomic::AtomicUsize::new(0);
    job(4, |mut bootstrap| {
        if bootstrap.rank() == 3 {
            thread::sleep(SHORT);
        }
        arrived.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        bootstrap.barrier(LONG).unwrap();
        assert_eq!(arrived.load(std::sync::atomic::Ordering::SeqCst), 4);
    });
}

#[test]
fn a_missing_rank_is_named_everywhere() {
    let (listener, root) = socket();
    thread::scope(|scope| {
        let one = scope.spawn(|| Bootstrap::connect(&launch(1, 4, &root), LONG).unwrap_err());
        let error = Bootstrap::root(listener, &launch(0, 4, &root), Duration::from_secs(2)).unwrap_err();
        assert!(
            matches!(&error, Error::Deadline { what, .. } if what.ends_with("rank 2, rank 3")),
            "{error}"
        );
        let message = blames(&one.join().unwrap(), "rank 2");
        assert!(message.contains("rank 2, rank 3"), "{message}");
    });
}

#[test]
fn an_absent_rank_0_is_named_with_its_address() {
    // The port of tcpmux, without a server.
    let error = Bootstrap::connect(&launch(1, 2, "127.0.0.1:1"), SHORT).unwrap_err();
    let message = blames(&error, "127.0.0.1:1");
    assert!(message.contains("300ms") && message.contains("refused"), "{message}");
}

#[test]
fn a_silent_rank_0_runs_into_the_deadline() {
    let (_listener, root) = socket();
    let error = Bootstrap::connect(&launch(1, 2, &root), SHORT).unwrap_err();
    assert!(matches!(&error, Error::Deadline { what, .. } if what.contains("rank 0")), "{error}");
}

#[test]
fn foreign_connections_do_no_harm() {
    let (listener, root) = socket();
    let silent = TcpStream::connect(&root).unwrap();
    let mut garbage = TcpStream::connect(&root).unwrap();
    garbage.write_all(b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n").unwrap();
    let mut partial = TcpStream::connect(&root).unwrap();
    partial.write_all(b"GDSB\x00\x02").unwrap();
    let mut huge = TcpStream::connect(&root).unwrap();
    let mut hello = hello(1, 2, 7);
    hello[24..28].fill(0xff);
    huge.write_all(&hello).unwrap();
    drop(TcpStream::connect(&root).unwrap());
    let started = Instant::now();
    thread::scope(|scope| {
        let one = scope.spawn(|| Bootstrap::connect(&launch(1, 2, &root), LONG).unwrap().barrier(LONG));
        Bootstrap::root(listener, &launch(0, 2, &root), LONG).unwrap().barrier(LONG).unwrap();
        one.join().unwrap().unwrap();
    });
    assert!(started.elapsed() < LONG, "no stranger was waited for to the end");
    let mut answer = Vec::new();
    huge.set_read_timeout(Some(LONG)).unwrap();
    huge.read_to_end(&mut answer).unwrap();
    assert!(
        String::from_utf8_lossy(&answer).contains("0 are the limit"),
        "nobody may make rank 0 hold bytes"
    );
    drop((silent, partial));
}

/// Header of a hello, as the module documentation of the frame gives it.
fn hello(rank: u32, size: u32, token: u64) -> Vec<u8> {
    let mut bytes = b"GDSB\x00\x02\x00\x01".to_vec();
    bytes.extend(rank.to_be_bytes());
    bytes.extend(size.to_be_bytes());
    bytes.extend(token.to_be_bytes());
    bytes.extend([0; 4]);
    bytes
}

/// A job of 2 refuses `intruder`, and goes on; returns the error of the intruder.
fn refused(intruder: impl Fn(&str) -> Launch + Sync) -> Error {
    let (listener, root) = socket();
    thread::scope(|scope| {
        let rank_0 =
            scope.spawn(|| Bootstrap::root(listener, &launch(0, 2, &root), LONG).unwrap().barrier(LONG));
        let error = Bootstrap::connect(&intruder(&root), LONG).unwrap_err();
        Bootstrap::connect(&launch(1, 2, &root), LONG).unwrap().barrier(LONG).unwrap();
        rank_0.join().unwrap().unwrap();
        error
    })
}

#[test]
fn another_token_is_refused() {
    let error = refused(|root| Launch { token: 8, ..launch(1, 2, root) });
    assert!(blames(&error, "rank 0").contains("job token"), "{error}");
}

#[test]
fn another_world_size_is_refused() {
    let error = refused(|root| launch(1, 3, root));
    assert!(blames(&error, "rank 0").contains("world size is 3, but 2"), "{error}");
}

#[test]
fn a_refused_rank_explains_a_missing_one() {
    let (listener, root) = socket();
    thread::scope(|scope| {
        let one = scope.spawn(|| Bootstrap::connect(&launch(1, 3, &root), LONG).unwrap_err());
        let error = Bootstrap::root(listener, &launch(0, 2, &root), Duration::from_secs(2)).unwrap_err();
        let message = error.to_string();
        assert!(
            message.contains("waiting for rank 1 (rejected:") && message.contains("world size is 3"),
            "{message}"
        );
        one.join().unwrap();
    });
}

#[test]
fn ranks_are_unique() {
    let (listener, root) = socket();
    thread::scope(|scope| {
        let (refusals, refusal) = mpsc::channel();
        let rank_0 =
            scope.spawn(|| Bootstrap::root(listener, &launch(0, 3, &root), LONG).unwrap().barrier(LONG));
        let twins: Vec<_> = (0..2)
            .map(|_| {
                let (refusals, root) = (refusals.clone(), &root);
                scope.spawn(move || match Bootstrap::connect(&launch(1, 3, root), LONG) {
                    Ok(mut bootstrap) => bootstrap.barrier(LONG).unwrap(),
                    Err(error) => refusals.send(error).unwrap(),
                })
            })
            .collect();
        let message = blames(&refusal.recv_timeout(LONG).unwrap(), "rank 0");
        assert!(message.contains("rank 1 is taken"), "{message}");
        Bootstrap::connect(&launch(2, 3, &root), LONG).unwrap().barrier(LONG).unwrap();
        rank_0.join().unwrap().unwrap();
        twins.into_iter().for_each(|twin| twin.join().unwrap());
        assert!(refusal.try_recv().is_err(), "only one of the two is refused");
    });
}

#[test]
fn other_versions_are_refused_on_both_sides() {
    let (listener, root) = socket();
    thread::scope(|scope| {
        let rank_0 =
            scope.spawn(|| Bootstrap::root(listener, &launch(0, 2, &root), LONG).unwrap().barrier(LONG));
        let mut newer = TcpStream::connect(&root).unwrap();
        newer.set_read_timeout(Some(LONG)).unwrap();
        let mut header = hello(1, 2, 7);
        header[5] = 3;
        newer.write_all(&header).unwrap();
        let mut answer = Vec::new();
        newer.read_to_end(&mut answer).unwrap();
        assert_eq!(answer[..8], *b"GDSB\x00\x02\x00\x03");
        assert!(String::from_utf8_lossy(&answer[28..]).contains("version 3"));
        Bootstrap::connect(&launch(1, 2, &root), LONG).unwrap().barrier(LONG).unwrap();
        rank_0.join().unwrap().unwrap();
    });
    for (answer, expected) in
        [(&header_of_version(3)[..], "version 3"), (&[b'x'; 28][..], "not a gdsync bootstrap")]
    {
        let (listener, root) = socket();
        thread::scope(|scope| {
            scope.spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                stream.read_exact(&mut [0; 28]).unwrap();
                stream.write_all(answer).unwrap();
                let _ = stream.read_to_end(&mut Vec::new());
            });
            let error = Bootstrap::connect(&launch(1, 2, &root), LONG).unwrap_err();
            assert!(blames(&error, "rank 0").contains(expected), "{error}");
        });
    }
}

fn header_of_version(version: u8) -> Vec<u8> {
    let mut header = hello(0, 2, 7);
    header[5] = version;
    header
}

#[test]
fn dead_ranks_are_reported_to_all() {
    let errors = job(4, |mut bootstrap| match bootstrap.rank() {
        2 => None,
        _ => {
            let error = bootstrap.allgather(&[1; 1000], LONG).unwrap_err();
            // The error is final.
            assert_eq!(bootstrap.barrier(LONG).unwrap_err().to_string(), error.to_string());
            Some(error)
        }
    });
    for error in errors.iter().flatten() {
        assert!(blames(error, "rank 2").contains("closed the connection"), "{error}");
    }
    assert_eq!(errors.iter().flatten().count(), 3);
}

#[test]
fn a_rank_that_gives_up_after_its_contribution_is_named() {
    let (gone, wait) = mpsc::channel();
    let (gone, wait) = (std::sync::Mutex::new(gone), std::sync::Mutex::new(wait));
    let errors = job(4, |mut bootstrap| match bootstrap.rank() {
        1 => {
            let error = bootstrap.allgather(b"one", SHORT).unwrap_err();
            gone.lock().unwrap().send(()).unwrap();
            assert!(matches!(&error, Error::Deadline { what, .. } if what.contains("rank 0")), "{error}");
            None
        }
        3 => {
            wait.lock().unwrap().recv_timeout(LONG).unwrap();
            Some(bootstrap.allgather(b"three", LONG).unwrap_err())
        }
        _ => Some(bootstrap.allgather(b"other", LONG).unwrap_err()),
    });
    for error in errors.iter().flatten() {
        assert!(blames(error, "rank 1").contains("not done within 300ms"), "{error}");
    }
}

#[test]
fn the_death_of_rank_0_is_seen_by_all() {
    job(3, |mut bootstrap| {
        if bootstrap.rank() != 0 {
            blames(&bootstrap.barrier(LONG).unwrap_err(), "rank 0");
        }
    });
}

#[test]
fn a_late_rank_is_named() {
    let (over, wait) = mpsc::channel();
    let (over, wait) = (std::sync::Mutex::new(over), std::sync::Mutex::new(wait));
    job(3, |mut bootstrap| match bootstrap.rank() {
        0 => {
            let error = bootstrap.barrier(Duration::from_secs(2)).unwrap_err();
            over.lock().unwrap().send(()).unwrap();
            assert!(
                matches!(&error, Error::Deadline { what, .. } if what.contains("waiting for rank 2 (")),
                "{error}"
            );
        }
        1 => {
            blames(&bootstrap.barrier(LONG).unwrap_err(), "rank 2");
        }
        _ => wait.lock().unwrap().recv_timeout(LONG).unwrap(),
    });
}

#[test]
fn different_operations_do_not_match() {
    let errors = job(2, |mut bootstrap| match bootstrap.rank() {
        0 => bootstrap.barrier(LONG).unwrap_err(),
        _ => bootstrap.allgather(b"x", LONG).unwrap_err(),
    });
    for error in &errors {
        assert!(blames(error, "rank 1").contains("is in allgather while rank 0 is in barrier"), "{error}");
    }
}

#[test]
fn too_large_a_contribution_is_refused_before_anything_is_sent() {
    job(2, |mut bootstrap| {
        if bootstrap.rank() == 1 {
            let error = bootstrap.allgather(&vec![0; MAX_PAYLOAD + 1], LONG).unwrap_err();
            assert!(blames(&error, "this rank").contains("too large"), "{error}");
        }
        assert_eq!(bootstrap.allgather(b"x", LONG).unwrap(), [b"x", b"x"]);
    });
}

/// Calls `check` until it fails.
fn check_fails(bootstrap: &mut Bootstrap) -> Error {
    let started = Instant::now();
    while started.elapsed() < LONG {
        if let Err(error) = bootstrap.check() {
            return error;
        }
        thread::sleep(Duration::from_millis(1));
    }
    panic!("check saw nothing");
}

#[test]
fn check_finds_and_reports_dead_ranks() {
    job(3, |mut bootstrap| match bootstrap.rank() {
        2 => {}
        _ => {
            blames(&check_fails(&mut bootstrap), "rank 2");
            // The error is final.
            blames(&bootstrap.allgather(b"", LONG).unwrap_err(), "rank 2");
        }
    });
}

#[test]
fn check_keeps_early_frames() {
    let result: Vec<Result<_>> = job(2, |mut bootstrap| {
        if bootstrap.rank() == 0 {
            let started = Instant::now();
            while started.elapsed() < SHORT {
                bootstrap.check()?;
            }
        }
        bootstrap.allgather(&[9; 3], LONG)
    });
    for all in result {
        assert_eq!(all.unwrap(), [[9; 3], [9; 3]]);
    }
}

#[test]
fn contradictory_launches_are_refused() {
    let (listener, root) = socket();
    let bad = [launch(2, 2, &root), launch(0, 0, &root), launch(0, 1 << 20, &root)];
    for launch in bad {
        assert!(matches!(Bootstrap::connect(&launch, SHORT), Err(Error::Launch { .. })), "{launch:?}");
    }
    assert!(matches!(Bootstrap::connect(&launch(1, 2, "nowhere"), SHORT), Err(Error::Launch { .. })));
    assert!(matches!(Bootstrap::root(listener, &launch(1, 2, &root), SHORT), Err(Error::Launch { .. })));
}

#[test]
fn a_taken_port_is_named() {
    let (_listener, root) = socket();
    let error = Bootstrap::connect(&launch(0, 2, &root), SHORT).unwrap_err();
    assert!(blames(&error, &root).contains("set MASTER_PORT"), "{error}");
}

/// Tells a process of this program its role.
const ROLE: &str = "GDSYNC_TEST_ROLE";

/// A command that runs only the test `entry` of this binary, in `role`.
fn myself(entry: &str, role: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .args(["--exact", &format!("launch::{entry}"), "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .stdout(Stdio::null());
    command
}

fn children(size: usize, role: &str) -> (Launch, std::net::TcpListener, Children) {
    spawn_command(size, |_| myself("child", role)).unwrap()
}

/// Not a test: the code of a child process.
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

/// Not a test: the code of a process that is rank 0, or one of its children.
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

/// Whether a process runs, and is no zombie.
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
    // A launcher of the tests is not the launcher of this job.
    let launchers =
        ["RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"];
    for name in launchers.into_iter().chain(["SLURM_PROCID"]) {
        command.env_remove(name);
    }
    // The parent has an exit code of its own, so that a filter that matches no test fails.
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
