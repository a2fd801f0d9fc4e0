//! Launching: the bootstrap exchange, between threads in place of processes, and ranks as child processes.

use std::collections::HashSet;
use std::env;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio, exit};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use rustix::thread::sched_getaffinity;

use crate::common::{self, DONE, LONG, free_port, runs, until};
use mp::launch::{Bootstrap, Children, Launch, Launcher, MAX_PAYLOAD, Root, spawn_command, spawn_self};
use mp::{Communicator, Error};

/// For waits that time out.
const SHORT: Duration = Duration::from_millis(300);
/// What the program that starts itself is called.
const NAME: &str = "a-name-of-its-own";

fn launch(rank: usize, size: usize, root: &str) -> Launch {
    let (local_rank, local_size, root) = (rank, Some(size), Root::At(root.to_owned()));
    Launch { rank, size, local_rank, local_size, root, token: 7, launcher: Launcher::Env }
}

fn socket() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let root = listener.local_addr().unwrap().to_string();
    (listener, root)
}

/// Connects `size` ranks, runs `body` in each on its thread, and returns the results, by rank.
fn job<T: Send>(size: usize, body: impl Fn(Bootstrap) -> T + Sync) -> Vec<T> {
    let (listener, root) = socket();
    scope(|scope| {
        let (body, root) = (&body, &root);
        let connect = |rank| move || body(Bootstrap::connect(&launch(rank, size, root), LONG).unwrap());
        let others: Vec<_> = (1..size).map(|rank| scope.spawn(connect(rank))).collect();
        let first = body(Bootstrap::root(listener, &launch(0, size, root), LONG).unwrap());
        std::iter::once(first).chain(others.into_iter().map(|rank| rank.join().unwrap())).collect()
    })
}

/// Rank 0 of a job of this size connects and meets at a barrier with the ranks that `others` plays, which gets its address.
fn with_rank_0<T>(size: usize, others: impl FnOnce(&str) -> T) -> T {
    let (listener, root) = socket();
    scope(|scope| {
        let launch = launch(0, size, &root);
        let rank_0 = scope.spawn(move || Bootstrap::root(listener, &launch, LONG).unwrap().barrier(LONG));
        let result = others(&root);
        rank_0.join().unwrap().unwrap();
        result
    })
}

/// Plays a rank of such a job.
fn join(rank: usize, size: usize, root: &str) {
    Bootstrap::connect(&launch(rank, size, root), LONG).unwrap().barrier(LONG).unwrap();
}

/// Checks that an error of the bootstrap is about `peer`, perhaps with its address, and says these words.
#[track_caller]
fn blames(error: &Error, peer: &str, words: &[&str]) {
    match error {
        Error::Bootstrap { peer: blamed, .. } if blamed.split(" (").next() == Some(peer) => {
            let text = error.to_string();
            assert!(words.iter().all(|word| text.contains(word)), "{text}");
        }
        other => panic!("expected an error about {peer}, got {other:?}"),
    }
}

/// Checks that an error is a deadline that names this.
#[track_caller]
fn is_late(error: &Error, name: &str) {
    assert!(matches!(error, Error::Deadline { what, .. } if what.contains(name)), "{error}");
}

/// What `rank` contributes in `round`: lengths from 0 to 1 MiB.
fn contribution(rank: usize, round: usize) -> Vec<u8> {
    let length = [0, 1, 5000, 1 << 20][(rank + round) % 4];
    let seed = u8::try_from(rank * 16 + round).unwrap();
    (0..length).map(|i: usize| i.to_le_bytes()[0] ^ seed).collect()
}

#[test]
fn ranks_exchange() {
    for size in [2, 5] {
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
    let root = format!("127.0.0.1:{}", free_port());
    scope(|scope| {
        scope.spawn(|| join(1, 2, &root));
        sleep(SHORT);
        join(0, 2, &root);
    });
}

#[test]
fn barriers_wait_for_all() {
    let arrived = AtomicUsize::new(0);
    job(4, |mut bootstrap| {
        if bootstrap.rank() == 3 {
            sleep(SHORT);
        }
        arrived.fetch_add(1, Ordering::SeqCst);
        bootstrap.barrier(LONG).unwrap();
        assert_eq!(arrived.load(Ordering::SeqCst), 4);
    });
}

#[test]
fn a_missing_rank_is_named_everywhere() {
    let (listener, root) = socket();
    scope(|scope| {
        let one = scope.spawn(|| Bootstrap::connect(&launch(1, 4, &root), LONG).unwrap_err());
        let error = Bootstrap::root(listener, &launch(0, 4, &root), Duration::from_secs(2)).unwrap_err();
        is_late(&error, "waiting for rank 2, rank 3 (CommunicatorBuilder::timeout)");
        blames(&one.join().unwrap(), "rank 2", &["rank 2, rank 3"]);
    });
}

#[test]
fn a_rank_0_that_does_not_answer_is_named() {
    // The port of tcpmux, without a server.
    let error = Bootstrap::connect(&launch(1, 2, "127.0.0.1:1"), SHORT).unwrap_err();
    blames(&error, "127.0.0.1:1", &["300ms", "refused"]);
    let (_silent, root) = socket();
    is_late(&Bootstrap::connect(&launch(1, 2, &root), SHORT).unwrap_err(), "rank 0");
}

/// A connection that has sent this, as a stranger might.
fn stranger(root: &str, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(root).unwrap();
    stream.write_all(bytes).unwrap();
    stream
}

/// What rank 0 answers to a stranger before it hangs up.
fn answer(mut stream: TcpStream) -> Vec<u8> {
    let mut answer = Vec::new();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.read_to_end(&mut answer).unwrap();
    answer
}

/// Header of a hello of this version, as the module documentation of the frame gives it.
fn hello(version: u8, rank: u32, size: u32) -> Vec<u8> {
    let mut bytes = [b"GDSB\x00", &[version, 0, 1][..]].concat();
    bytes.extend(rank.to_be_bytes());
    bytes.extend(size.to_be_bytes());
    bytes.extend(7_u64.to_be_bytes());
    bytes.extend([0; 4]);
    bytes
}

#[test]
fn foreign_connections_do_no_harm() {
    let started = Instant::now();
    with_rank_0(2, |root| {
        let mut huge = hello(3, 1, 2);
        huge[24..28].fill(0xff);
        let _silent = stranger(root, b"");
        let _garbage = stranger(root, b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n");
        let _partial = stranger(root, b"GDSB\x00\x03");
        let huge = stranger(root, &huge);
        drop(stranger(root, b""));
        join(1, 2, root);
        let answer = answer(huge);
        let text = String::from_utf8_lossy(&answer);
        assert!(text.contains("0 are the limit"), "nobody may make rank 0 hold bytes: {text}");
    });
    assert!(started.elapsed() < LONG, "no stranger was waited for to the end");
}

/// The job refuses them, and goes on.
#[test]
fn ranks_of_other_jobs_are_refused() {
    for (size, token, words) in [(2, 8, "job token"), (3, 7, "world size is 3, but 2")] {
        with_rank_0(2, |root| {
            let intruder = Launch { token, ..launch(1, size, root) };
            blames(&Bootstrap::connect(&intruder, LONG).unwrap_err(), "rank 0", &[words]);
            join(1, 2, root);
        });
    }
}

#[test]
fn a_refused_rank_explains_a_missing_one() {
    let (listener, root) = socket();
    scope(|scope| {
        scope.spawn(|| Bootstrap::connect(&launch(1, 3, &root), LONG).unwrap_err());
        let error = Bootstrap::root(listener, &launch(0, 2, &root), Duration::from_secs(2)).unwrap_err();
        is_late(&error, "waiting for rank 1 (CommunicatorBuilder::timeout) (rejected:");
        is_late(&error, "world size is 3");
    });
}

#[test]
fn ranks_are_unique() {
    with_rank_0(3, |root| {
        let (refusals, refusal) = mpsc::channel();
        scope(|scope| {
            for _ in 0..2 {
                let refusals = refusals.clone();
                scope.spawn(move || match Bootstrap::connect(&launch(1, 3, root), LONG) {
                    Ok(mut bootstrap) => bootstrap.barrier(LONG).unwrap(),
                    Err(error) => refusals.send(error).unwrap(),
                });
            }
            blames(&refusal.recv_timeout(LONG).unwrap(), "rank 0", &["rank 1 is taken"]);
            join(2, 3, root);
        });
        assert!(refusal.try_recv().is_err(), "only one of the two is refused");
    });
}

#[test]
fn a_rank_that_is_not_welcomed_learns_that_it_may_be_one_too_many() {
    let (listener, root) = socket();
    scope(|scope| {
        scope.spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut vec![0; hello(0, 1, 2).len()]).unwrap();
        });
        let error = Bootstrap::connect(&launch(1, 2, &root), LONG).unwrap_err();
        blames(
            &error,
            "rank 0",
            &["closed the connection", "had all its ranks already: see that each RANK is started once"],
        );
    });
}

#[test]
fn other_versions_are_refused_on_both_sides() {
    with_rank_0(2, |root| {
        let answer = answer(stranger(root, &hello(4, 1, 2)));
        assert_eq!(answer[..8], *b"GDSB\x00\x03\x00\x03");
        assert!(String::from_utf8_lossy(&answer[28..]).contains("version 4"));
        join(1, 2, root);
    });
    for (answer, expected) in [(&hello(4, 0, 2)[..], "version 4"), (&[b'x'; 28], "not a gdsync bootstrap")] {
        let (listener, root) = socket();
        scope(|scope| {
            scope.spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                stream.read_exact(&mut [0; 28]).unwrap();
                stream.write_all(answer).unwrap();
                let _ = stream.read_to_end(&mut Vec::new());
            });
            let error = Bootstrap::connect(&launch(1, 2, &root), LONG).unwrap_err();
            blames(&error, "rank 0", &[expected]);
        });
    }
}

/// The error is final.
#[test]
fn dead_ranks_are_reported_to_all() {
    job(4, |mut bootstrap| {
        if bootstrap.rank() != 2 {
            let error = bootstrap.allgather(&[1; 1000], LONG).unwrap_err();
            blames(&error, "rank 2", &["closed the connection"]);
            let later = bootstrap.barrier(LONG).unwrap_err();
            blames(&later, "rank 2", &["an earlier call of all ranks has failed", "closed the connection"]);
        }
    });
    job(3, |mut bootstrap| {
        if bootstrap.rank() != 0 {
            blames(&bootstrap.barrier(LONG).unwrap_err(), "rank 0", &[]);
        }
    });
}

#[test]
fn a_rank_that_gives_up_after_its_contribution_is_named() {
    let is_gone = AtomicBool::new(false);
    job(4, |mut bootstrap| {
        if bootstrap.rank() == 1 {
            is_late(&bootstrap.allgather(b"one", SHORT).unwrap_err(), "rank 0");
            return is_gone.store(true, Ordering::SeqCst);
        }
        if bootstrap.rank() == 3 {
            until("rank 1 gives up", || is_gone.load(Ordering::SeqCst));
        }
        let error = bootstrap.allgather(b"other", LONG).unwrap_err();
        let says =
            "it waited 300 ms for the others in exchange, and gave up; the call has failed at all ranks";
        blames(&error, "rank 1", &[says, "Communicator::shrink"]);
    });
}

/// That no later call of all ranks works.
fn says_over(error: &Error) {
    let text = error.to_string();
    assert!(text.contains("all later calls of all ranks fail, but for Communicator::shrink"), "{text}");
}

#[test]
fn a_late_rank_is_named() {
    let is_over = AtomicBool::new(false);
    job(3, |mut bootstrap| match bootstrap.rank() {
        0 => {
            let error = bootstrap.barrier(Duration::from_secs(2)).unwrap_err();
            is_over.store(true, Ordering::SeqCst);
            is_late(&error, "barrier: waiting for rank 2");
            says_over(&error);
        }
        rank => {
            if rank == 2 {
                until("rank 0 gives up", || is_over.load(Ordering::SeqCst));
            }
            let error = bootstrap.barrier(LONG).unwrap_err();
            let (peer, says) = match rank {
                1 => ("rank 2", "it did not call barrier within 2 s, and rank 0 gave up"),
                _ => (
                    "rank 0",
                    "it waited 2 s for this rank in barrier, and gave up (call it earlier, or allow more time there)",
                ),
            };
            blames(&error, peer, &[&format!("{says}; the call has failed at all ranks")]);
        }
    });
}

#[test]
fn different_operations_do_not_match() {
    job(2, |mut bootstrap| {
        let (error, peer, says) = match bootstrap.rank() {
            0 => (
                bootstrap.barrier(LONG).unwrap_err(),
                "rank 1",
                "it is in exchange, and rank 0 in barrier: let all ranks make the same calls",
            ),
            _ => (
                bootstrap.allgather(b"x", LONG).unwrap_err(),
                "rank 0",
                "it is in barrier, and this rank in exchange: let all ranks make the same calls",
            ),
        };
        blames(&error, peer, &[says]);
    });
}

#[test]
fn too_large_a_contribution_is_refused_before_anything_is_sent() {
    job(2, |mut bootstrap| {
        if bootstrap.rank() == 1 {
            let error = bootstrap.allgather(&vec![0; MAX_PAYLOAD + 1], LONG).unwrap_err();
            blames(&error, "this rank", &["too large"]);
        }
        assert_eq!(bootstrap.allgather(b"x", LONG).unwrap(), [b"x", b"x"]);
    });
}

/// The error is final.
#[test]
fn check_finds_and_reports_dead_ranks() {
    job(3, |mut bootstrap| {
        if bootstrap.rank() != 2 {
            let mut found = None;
            until("check sees nothing", || {
                found = bootstrap.check().err();
                found.is_some()
            });
            blames(&found.unwrap(), "rank 2", &[]);
            blames(&bootstrap.allgather(b"", LONG).unwrap_err(), "rank 2", &[]);
        }
    });
}

#[test]
fn check_keeps_early_frames() {
    job(2, |mut bootstrap| {
        let started = Instant::now();
        while bootstrap.rank() == 0 && started.elapsed() < SHORT {
            bootstrap.check().unwrap();
        }
        assert_eq!(bootstrap.allgather(&[9; 3], LONG).unwrap(), [[9; 3], [9; 3]]);
    });
}

#[test]
fn contradictory_launches_are_refused() {
    let (listener, root) = socket();
    let bad = [launch(2, 2, &root), launch(0, 0, &root), launch(0, 1 << 20, &root), launch(1, 2, "nowhere")];
    for launch in bad {
        assert!(matches!(Bootstrap::connect(&launch, SHORT), Err(Error::Launch { .. })), "{launch:?}");
    }
    let error = Bootstrap::connect(&launch(0, 2, &root), SHORT).unwrap_err();
    blames(&error, &root, &["set MASTER_PORT"]);
    assert!(matches!(Bootstrap::root(listener, &launch(1, 2, &root), SHORT), Err(Error::Launch { .. })));
}

/// Tells a process of this program its role.
const ROLE: &str = "GDSYNC_TEST_ROLE";

/// A command that runs only this test, in `role`.
fn myself(entry: &str, role: &str) -> Command {
    let mut command = common::myself(entry);
    command.env(ROLE, role).stdout(Stdio::null());
    command
}

fn children(size: usize, role: &str) -> (Launch, TcpListener, Children) {
    spawn_command(size, |_| myself("launch::child", role)).unwrap()
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
    let distinct: HashSet<_> = pids.iter().collect();
    assert_eq!(distinct.len(), bootstrap.size(), "one process for each rank");
    bootstrap.barrier(LONG).unwrap();
}

/// Not a test: the code of a process that is rank 0, or one of its children.
#[test]
fn parent() {
    match env::var(ROLE).as_deref() {
        Ok("self") if env::args().next().as_deref() != Some(NAME) => panic!("started under another name"),
        Ok("self") => match Launch::detect().unwrap() {
            None => {
                let (launch, listener, children) = spawn_self(3).unwrap();
                exchange(Bootstrap::root(listener, &launch, LONG).unwrap());
                children.wait(LONG).unwrap();
                exit(DONE);
            }
            Some(launch) => {
                let again = spawn_self(2).map(drop).unwrap_err();
                let is_refused = matches!(again, Error::Launch { .. });
                assert!(is_refused, "a child must not start children without end: {again}");
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

#[test]
fn children_exchange_with_rank_0() {
    let (launch, listener, children) = children(3, "exchange");
    exchange(Bootstrap::root(listener, &launch, LONG).unwrap());
    children.wait(LONG).unwrap();
}

#[test]
fn a_program_starts_itself() {
    common::succeeds(myself("launch::parent", "self").arg0(NAME));
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
    let pids = [1, 2, 3].map(|rank| children.pid(rank).unwrap());
    match children.wait(LONG) {
        Err(Error::Child { rank, status }) => assert_eq!((rank, status.code()), (2, Some(7))),
        other => panic!("expected the failure of rank 2, got {other:?}"),
    }
    assert!(!pids.into_iter().any(runs), "the others are reaped");
}

/// Waits until the first child that has failed is `rank`.
#[track_caller]
fn ended(children: &mut Children, rank: usize) -> ExitStatus {
    let mut found = None;
    until("the end of the rank is not seen", || {
        found = match children.failed() {
            Some(Error::Child { rank: failed, status }) if failed == rank => Some(status),
            Some(Error::Child { .. }) | None => None,
            Some(error) => panic!("unexpected: {error}"),
        };
        found.is_some()
    });
    found.unwrap()
}

#[test]
fn a_killed_child_is_named_with_its_signal() {
    let (_launch, _listener, mut children) = children(3, "sleep");
    assert!(children.failed().is_none());
    children.kill(2).unwrap();
    assert_eq!(ended(&mut children, 2).signal(), Some(libc::SIGKILL));
    children.kill(2).expect("killing the dead is no error");
    assert!([0, 3].iter().all(|&rank| matches!(children.kill(rank), Err(Error::Spawn { .. }))));
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
fn children_end_with_their_owner() {
    for waits in [true, false] {
        let (_launch, _listener, children) = children(3, "sleep");
        let pids = [1, 2].map(|rank| children.pid(rank).unwrap());
        assert!(pids.into_iter().all(runs));
        let started = Instant::now();
        match waits {
            true => is_late(&children.wait(Duration::from_millis(100)).unwrap_err(), "rank 1"),
            false => drop(children),
        }
        assert!(started.elapsed() < LONG, "the children are not killed");
        assert!(!pids.into_iter().any(runs));
    }
}

#[test]
fn children_die_with_their_parent() {
    let mut parent = myself("launch::parent", "orphan").stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(parent.stderr.take().unwrap()).lines();
    let pid = lines.map(|line| line.unwrap()).find_map(|line| line.strip_prefix("pid ")?.parse().ok());
    let pid = pid.expect("the parent prints the process id of its child");
    assert!(runs(pid));
    parent.kill().unwrap();
    parent.wait().unwrap();
    until("the child still runs", || !runs(pid));
}

#[test]
fn bad_commands_are_refused() {
    let error = spawn_command(2, |_| Command::new("/no/such/program")).unwrap_err();
    let message = error.to_string();
    assert!(matches!(error, Error::Spawn { .. }) && message.contains("/no/such/program"), "{message}");
    assert!(matches!(spawn_command(0, |_| Command::new("true")), Err(Error::Launch { .. })));
}

/// The CPUs of every rank, also of threads that it starts after it has joined.
fn cpus_of_ranks(comm: &Communicator) -> Vec<String> {
    let own = || format!("{:?}", sched_getaffinity(None).unwrap());
    let all = comm.exchange(own().as_bytes(), LONG).unwrap();
    assert_eq!(std::thread::spawn(own).join().unwrap(), own());
    all.into_iter().map(|cpus| String::from_utf8(cpus).unwrap()).collect()
}

/// Also in later jobs of the process. Not if that is switched off, or if there are too few.
#[test]
fn spawned_ranks_are_bound_to_cpus_of_their_own() {
    const NAME: &str = "spawned_ranks_are_bound_to_cpus_of_their_own";
    if !common::is_part_of(NAME) {
        let run = |bind| common::succeeds(common::myself(NAME).env("MP_BIND", bind));
        return ["", "0", "1"].into_iter().for_each(run);
    }
    let variable = env::var("MP_BIND").unwrap();
    // In rank 0, which starts the others, those that the jobs divide.
    let before = sched_getaffinity(None).unwrap();
    let cpus = before.count() as usize;
    for (asked, ranks) in [(true, 2), (false, 2), (true, 2), (true, cpus + 1)] {
        let comm = Communicator::builder().spawn(ranks).bind(asked).timeout(LONG).init().unwrap();
        let (rank, of_ranks) = (comm.rank(), cpus_of_ranks(&comm));
        comm.finalize(LONG).unwrap();
        if rank > 0 {
            return;
        }
        assert_eq!(sched_getaffinity(None).unwrap(), before, "after the job");
        let is_bound = ranks <= cpus && if variable.is_empty() { asked } else { variable == "1" };
        let all = format!("{before:?}");
        match is_bound {
            true => assert!(of_ranks[0] != of_ranks[1] && !of_ranks.contains(&all), "{of_ranks:?} of {all}"),
            false => assert!(of_ranks.iter().all(|cpus| *cpus == all), "{of_ranks:?} of {all}"),
        }
    }
    exit(DONE);
}

/// Before anybody is waited for.
#[test]
fn another_number_of_ranks_is_refused() {
    const NAME: &str = "another_number_of_ranks_is_refused";
    if !common::is_part_of(NAME) {
        common::succeeds(&mut common::rank_command(NAME, 2, 3, "9"));
        return common::succeeds(&mut common::myself(NAME));
    }
    let ranks = if env::var_os("RANK").is_some() { "3 ranks" } else { "4 ranks" };
    let error = Communicator::builder().spawn(4).size(2).timeout(LONG).init().unwrap_err();
    assert!(matches!(error, Error::Launch { .. }), "{error}");
    common::says(&error, &["this job has", ranks, "needs 2", "mpirun -n"]);
    exit(DONE);
}
