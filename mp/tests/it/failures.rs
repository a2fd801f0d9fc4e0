//! Failures: bad arguments, wrong lengths, dead ranks, contradictory launchers.

use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, Output, Stdio, exit};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::common::{
    DONE, LONG, buffer, bytes, copying, ends_well, failed, free_port, host_buffer, is_part_of, job_test,
    kill, myself, own_gpu, says, send_and_wait, stop, stream, succeeds, syndrome,
};
use gdsync::mlx5::Syndrome;
use gdsync::stream::{HostStreamConfig, Stream, Via};
use gdsync::verbs::OnGpu;
use mp::launch::{Bootstrap, Launch};
use mp::{Communicator, Error, Exchange, Status};
use rustix::thread::sched_getaffinity;

job_test!(bad_arguments_are_refused, 1, |comm| {
    let (buffer, s) = (buffer(comm, 64), stream("refusing"));
    for rank in [1, 2, usize::MAX] {
        let errors = [
            comm.isend(&buffer, 0..8, rank).unwrap_err(),
            comm.irecv(&buffer, 0..8, rank).unwrap_err(),
            comm.isend_on_stream(&s, &buffer, 0..8, rank).unwrap_err(),
            comm.send_on_stream(&s, &buffer, 0..8, rank).unwrap_err(),
        ];
        for error in errors {
            assert!(matches!(error, Error::NoSuchRank { rank: r, size: 1 } if r == rank), "{error}");
        }
    }
    for range in [0..65, 64..65, 65..65, usize::MAX..usize::MAX, 0..usize::MAX] {
        for error in [comm.isend(&buffer, range.clone(), 0), comm.irecv(&buffer, range.clone(), 0)]
            .map(Result::unwrap_err)
        {
            assert!(
                matches!(
                    error,
                    Error::Message { rank: 0, cause: gdsync::Error::OutOfBounds { size: 64, .. }, .. }
                ),
                "{range:?}: {error}"
            );
            says(&error, &["rank 0: ", " rank 0: ", "do not fit in a memory of 64 bytes"]);
        }
    }
    #[expect(clippy::reversed_empty_ranges, reason = "what a user may compute")]
    let error = comm.isend(&buffer, 9..8, 0).unwrap_err();
    says(&error, &["9..8"]);
    let received = comm.irecv(&buffer, 56..64, 0).unwrap();
    buffer.memory().write(0, b"harmless").unwrap();
    let sent = comm.isend(&buffer, 0..8, 0).unwrap();
    // The longest timeout does not overflow.
    comm.wait_all([&received, &sent], Duration::MAX).unwrap();
    s.synchronize(Duration::MAX).unwrap();
    comm.barrier(Duration::MAX).unwrap();
    assert_eq!(bytes(&buffer, 56..64), b"harmless");
});

#[test]
fn bad_settings_are_refused() {
    let fails = |builder: mp::CommunicatorBuilder| builder.init().map(drop).unwrap_err().to_string();
    for depth in [0, 1 << 20] {
        let text = fails(Communicator::builder().spawn(1).depth(depth));
        says(&text, &[&format!("Builder::depth is {depth}"), "1 to 32768"]);
    }
    for pieces in [0, 31] {
        let text = fails(Communicator::builder().spawn(1).max_pieces(pieces));
        let named = format!("Builder::max_pieces is {pieces}");
        says(&text, &[&named, "1 to 30"]);
    }
    let text = fails(Communicator::builder().spawn(1).on_gpu(OnGpu::RECV_CQ));
    says(&text, &["RECV_CQ", "given a GPU"]);
    let text = fails(Communicator::builder().spawn(0));
    says(&text, &["size is 0"]);
    let text = fails(Communicator::builder());
    says(&text, &["no launcher", "mpirun", "WORLD_SIZE"]);
    drop(Communicator::builder().spawn(1).timeout(Duration::MAX).init().unwrap());
}

job_test!(longer_messages_fail_on_both_sides, 3, |comm| {
    let (buffer, s) = (buffer(comm, 8192), stream("too short"));
    let peer = 1 - comm.rank().min(1);
    match comm.rank() {
        0 => {
            let received = comm.irecv(&buffer, 0..4999, 1).unwrap();
            comm.wait_on_stream(&s, &received).unwrap();
            comm.barrier(LONG).unwrap();
            let error = comm.wait(&received, LONG).unwrap_err();
            failed(&error, 1, &[Syndrome::LOC_LEN_ERR]);
            says(
                &error,
                &["rank 0: receive from rank 1 into 4999 bytes: the message is longer", "broken for good"],
            );
            let error = s.synchronize(LONG).unwrap_err();
            assert!(matches!(error, gdsync::Error::Rank { rank: 1, .. }), "{error}");
            says(
                &error,
                &["rank 1: the message is longer than its receive", "mp::tagged", "Communicator::shrink"],
            );
        }
        1 => {
            comm.barrier(LONG).unwrap();
            let sent = comm.isend_on_stream(&s, &buffer, 0..5000, 0).unwrap();
            let error = comm.wait(&sent, LONG).unwrap_err();
            failed(&error, 0, &[Syndrome::REM_INV_REQ_ERR]);
            says(
                &error,
                &["rank 1: send on stream to rank 0 of 5000 bytes: the message is longer", "broken for good"],
            );
            failed(&sent.test().unwrap_err(), 0, &[Syndrome::REM_INV_REQ_ERR]);
        }
        _ => comm.barrier(LONG).unwrap(),
    }
    if comm.rank() < 2 {
        // The connection is broken, and every call fails at once; calls for other ranks work.
        for error in
            [comm.isend(&buffer, 0..1, peer), comm.irecv(&buffer, 0..1, peer)].map(Result::unwrap_err)
        {
            assert!(matches!(&error, Error::Message { rank, .. } if *rank == peer), "{error}");
            assert!(!error.is_rank_lost(), "{error}");
        }
        comm.wait(&comm.isend(&buffer, 0..8, 2).unwrap(), LONG).unwrap();
    } else {
        for peer in [0, 1] {
            let received = comm.irecv(&buffer, 0..8, peer).unwrap();
            assert_eq!(comm.wait(&received, LONG).unwrap(), Status { rank: peer, bytes: 8, tag: 0 });
        }
    }
});

/// Waits in vain: the texts say which rank, which message, and what to do.
fn waits_in_vain(comm: &Communicator) {
    let buffer = buffer(comm, 64);
    let soon = Duration::from_millis(50);
    let short = |name: &str| {
        let config = HostStreamConfig { name: name.into(), wait_limit: soon, ..HostStreamConfig::default() };
        Stream::host(config).unwrap()
    };
    let text = |stream: &Stream| stream.synchronize(LONG).unwrap_err().to_string();
    if comm.rank() == 0 {
        // A wait of the CPU.
        let received = comm.irecv(&buffer, 0..8, 1).unwrap();
        let error = comm.wait(&received, soon).unwrap_err();
        says(
            &error,
            &[
                "rank 0: receive from rank 1: not complete within 50 ms",
                "it waits for a message from rank 1 (",
                "see that the rank sends it",
            ],
        );
        // A send of a stream without a receive at the other rank.
        let halo = short("halo");
        comm.send_on_stream(&halo, &buffer, 8..16, 1).unwrap();
        let said = "stream 'halo' of rank 0 waited 50 ms for a receive of rank 1 (message 1): rank 1 has posted 0; post one there \
                    (Communicator::irecv), or raise its wait_limit";
        assert_eq!(text(&halo), said);
    }
    comm.barrier(LONG).unwrap();
    if comm.rank() == 1 {
        // A receive that comes only after the send behind the same wait: the connection is still there, as rank 0 has stopped it
        // at its side only.
        let received = comm.irecv(&buffer, 0..8, 2).unwrap();
        let early = short("early");
        comm.wait_on_stream(&early, &received).unwrap();
        says(
            &text(&early),
            &[
                "stream 'early' of rank 1 waited 50 ms for a message from rank 2 (receive 0 of QP 0x",
                "behind a wait of its own stream",
            ],
        );
    }
    comm.barrier(LONG).unwrap();
}

job_test!(waits_in_vain_say_for_whom, 3, waits_in_vain);

// Rank 1 is killed while all ranks talk to all; the others see it in waits and on streams.
job_test!(dead_ranks_end_messages_and_waits, 3, |comm| {
    let (buffer, s) = (buffer(comm, 64), stream("survivor"));
    let play = |peer: usize| {
        let received = comm.irecv(&buffer, 0..8, peer)?;
        let sent = comm.isend(&buffer, 8..16, peer)?;
        comm.wait(&received, LONG)?;
        comm.wait(&sent, LONG)
    };
    if comm.rank() == 1 {
        while play(0).and_then(|_| play(2)).is_ok() {}
        panic!("rank 1 is killed before its game ends");
    }
    if comm.rank() == 0 {
        for _ in 0..20 {
            play(1).unwrap();
        }
        kill(comm.child(1).unwrap());
    }
    // By a wait on the CPU.
    let error = (0..).find_map(|_| play(1).err()).unwrap();
    failed(&error, 1, &[Syndrome::RETRY_EXC_ERR]);
    assert!(error.is_rank_lost() && error.to_string().contains("rank 1"), "{error}");
    // On a stream: its refusal names the rank, and so does the message.
    let refused = comm.isend_on_stream(&s, &buffer, 0..8, 1).unwrap_err();
    assert!(
        matches!(refused, Error::Message { rank: 1, .. }) && refused.to_string().contains("rank 1"),
        "{refused}"
    );
    // The survivors go on with each other.
    let other = 2 - comm.rank();
    let received = comm.irecv(&buffer, 0..8, other).unwrap();
    let sent = send_and_wait(comm, &s, &buffer, 8..16, other);
    comm.wait_on_stream(&s, &received).unwrap();
    s.synchronize(LONG).unwrap();
    assert_eq!(comm.wait(&sent, LONG).unwrap(), Status { rank: other, bytes: 8, tag: 0 });
    // The communicator names the rank, too.
    let error = comm.barrier(LONG).unwrap_err();
    says(&error, &["rank 1"]);
    if comm.rank() != 0 {
        exit(0);
    }
    ends_well(comm.child(2).unwrap());
    let error = comm.clone().finalize(LONG).unwrap_err();
    says(&error, &["rank 1"]);
    exit(DONE);
});

// Nothing is sent to the rank that dies, so that no send can fail. The wait itself notices.
job_test!(dead_ranks_end_receives, 2, Communicator::builder().watch(false), |comm| {
    if comm.rank() == 1 {
        sleep(2 * LONG);
    }
    let buffer = buffer(comm, 64);
    let received = comm.irecv(&buffer, 0..8, 1).unwrap();
    kill(comm.child(1).unwrap());
    let error = comm.wait(&received, LONG).unwrap_err();
    failed(&error, 1, &[Syndrome::RETRY_EXC_ERR]);
    assert!(error.is_rank_lost(), "{error}");
    exit(DONE);
});

// A stream that waits for a message of a dead rank goes on, and reports why.
job_test!(dead_ranks_release_streams, 2, |comm| {
    if comm.rank() == 1 {
        // It receives nothing: sends to it stay under way.
        sleep(2 * LONG);
    }
    let (buffer, s) = (buffer(comm, 64), stream("survivor"));
    let received = comm.irecv(&buffer, 0..8, 1).unwrap();
    let sent = send_and_wait(comm, &s, &buffer, 8..16, 1);
    comm.wait_on_stream(&s, &received).unwrap();
    assert!(matches!(s.synchronize(Duration::from_millis(20)), Err(gdsync::Error::Deadline { .. })));
    kill(comm.child(1).unwrap());
    let error = s.synchronize(LONG).unwrap_err();
    assert_eq!(syndrome(&error), Some(Syndrome::RETRY_EXC_ERR), "{error}");
    says(&error, &["rank 1: ", "go on without it (Communicator::shrink)"]);
    assert!(Error::from(error).is_rank_lost());
    assert_eq!(s.query().pending, 0);
    failed(&sent.test().unwrap_err(), 1, &[Syndrome::RETRY_EXC_ERR]);
    for error in [comm.wait(&received, LONG), comm.wait(&sent, LONG)].map(Result::unwrap_err) {
        assert!(matches!(error, Error::Message { rank: 1, .. }), "{error}");
    }
    exit(DONE);
});

// A stream that waits for the receive of a dead rank goes on, although no thread asks for the rank, and works on: also with a message
// under way that the rank could not acknowledge.
job_test!(dead_receivers_release_streams, 7, Communicator::builder().watch(false), |comm| {
    let (buffer, gpu) = (host_buffer(comm, 64), own_gpu());
    if comm.rank() > 0 {
        let _received = comm.irecv(&buffer, 0..8, 0).unwrap();
        comm.barrier(LONG).unwrap();
        sleep(2 * LONG);
    }
    comm.barrier(LONG).unwrap();
    let on_gpu = |via| copying(&gpu, via, Via::Auto);
    let streams = [stream("survivor"), on_gpu(Via::MemOp), on_gpu(Via::Kernel)];
    for (rank, s) in (1..).zip(streams.iter().flat_map(|s| [s, s])) {
        let is_stopped = rank % 2 == 0;
        if is_stopped {
            stop(comm.child(rank).unwrap());
        }
        let first = comm.isend_on_stream(s, &buffer, 0..8, rank).unwrap();
        let sent = send_and_wait(comm, s, &buffer, 0..8, rank);
        if is_stopped {
            assert!(!matches!(first.test(), Ok(Some(_))));
        } else {
            first.wait(LONG).unwrap();
            let held = s.synchronize(Duration::from_millis(20));
            assert!(matches!(held, Err(gdsync::Error::Deadline { .. })));
        }
        kill(comm.child(rank).unwrap());
        let error = s.synchronize(LONG).unwrap_err();
        assert_eq!(syndrome(&error), Some(Syndrome::RETRY_EXC_ERR), "{error}");
        says(&error, &[&format!("rank {rank}: ")]);
        failed(&comm.wait(&sent, LONG).unwrap_err(), rank, &[Syndrome::RETRY_EXC_ERR]);
        s.synchronize(LONG).unwrap();
    }
    exit(DONE);
});

// One side ends one connection; the others, and the job, go on.
job_test!(given_up_ranks_are_lost_and_no_others, 3, |comm| {
    let (buffer, s) = (buffer(comm, 64), stream("given up"));
    match comm.rank() {
        0 => {
            let received = comm.irecv(&buffer, 0..8, 1).unwrap();
            comm.wait_on_stream(&s, &received).unwrap();
            assert_eq!(comm.lost(), []);
            comm.give_up(1).unwrap();
            let error = comm.wait(&received, LONG).unwrap_err();
            says(&error, &["gave the peer up"]);
            assert!(s.synchronize(LONG).unwrap_err().to_string().contains("gave the peer up"));
            assert!(comm.check(1).unwrap_err().to_string().contains("rank 1"));
            assert!(matches!(comm.give_up(3), Err(Error::NoSuchRank { rank: 3, size: 3 })));
        }
        1 => {
            // It learns it when it waits.
            let received = comm.irecv(&buffer, 0..8, 0).unwrap();
            let error = comm.wait(&received, LONG).unwrap_err();
            assert!(is_left(&error, 0), "{error}");
        }
        _ => {}
    }
    let expected = [vec![1], vec![0], vec![]];
    assert_eq!(comm.lost(), expected[comm.rank()]);
    if comm.rank() != 2 {
        comm.wait(&comm.isend(&buffer, 0..8, 2).unwrap(), LONG).unwrap();
    } else {
        for peer in [0, 1] {
            comm.wait(&comm.irecv(&buffer, 0..8, peer).unwrap(), LONG).unwrap();
        }
    }
    comm.barrier(LONG).unwrap();
});

/// A spawned rank ends before it joins, with any status, or later: its status is the error, long before the timeout.
#[test]
fn spawned_ranks_that_end_are_reported_by_status() {
    const NAME: &str = "spawned_ranks_that_end_are_reported_by_status";
    /// The exit code of rank 1, and whether it joins before.
    const END: &str = "GDSYNC_TEST_END";
    if !is_part_of(NAME) {
        for end in ["7", "0", "7 joined"] {
            succeeds(myself(NAME).env(END, end));
        }
        return;
    }
    let end = env::var(END).unwrap();
    let code = end[..1].parse().unwrap();
    let is_child = Launch::detect().unwrap().is_some();
    if is_child && end.len() == 1 {
        exit(code);
    }
    // Two are bound to CPUs also where there are few.
    let ranks = if end == "7" { 2 } else { 3 };
    let (start, cpus) = (Instant::now(), sched_getaffinity(None).unwrap());
    let joined = Communicator::builder().spawn(ranks).timeout(LONG).init();
    if is_child {
        exit(code);
    }
    let error = joined.and_then(|comm| comm.finalize(LONG)).unwrap_err();
    assert!(matches!(error, Error::Child { status, .. } if status.code() == Some(code)), "{error}");
    assert_eq!(sched_getaffinity(None).unwrap(), cpus, "rank 0 stays bound");
    assert!(start.elapsed() < LONG / 3, "{:?}", start.elapsed());
    exit(DONE);
}

/// Rank 0 leaves without `finalize`: it says so, waits for rank 1, and its exit code tells how that ended.
#[test]
fn ranks_are_waited_for_without_finalize() {
    const NAME: &str = "ranks_are_waited_for_without_finalize";
    /// What rank 1 does when rank 0 is gone.
    const END: &str = "GDSYNC_TEST_END";
    let Ok(end) = env::var(END) else {
        let leaves =
            "mp: rank 0 leaves without Communicator::finalize while others work (rank 1): they have ";
        for (end, code, said) in [
            ("works", DONE, &[][..]),
            ("fails", 1, &["mp: rank 0: rank 1 ended with exit status: 7; its own output says why"]),
            ("hangs", 1, &["still runs after 2 s: killed"]),
        ] {
            let output = myself(NAME).env(END, end).output().unwrap();
            let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
            assert_eq!(output.status.code(), Some(code), "{end}: {err}");
            assert!(err.contains(leaves) && said.iter().all(|words| err.contains(words)), "{end}: {err}");
            assert!(end != "hangs" || !err.contains("its own output says why"), "it was killed here: {err}");
            assert!(end == "hangs" || out.contains("the work of rank 1"), "{end}: {out}");
        }
        return;
    };
    let comm = Communicator::builder().spawn(2).timeout(LONG).init().unwrap();
    if comm.rank() == 1 {
        // Until rank 0 has gone.
        comm.barrier(LONG).unwrap();
        says(&comm.barrier(LONG).unwrap_err(), &["rank 1: ", "rank 0"]);
        let received = comm.irecv(&buffer(&comm, 8), 0..8, 0).unwrap();
        assert!(is_left(&comm.wait(&received, LONG).unwrap_err(), 0));
        match end.as_str() {
            "hangs" => sleep(2 * LONG),
            _ => println!("the work of rank 1"),
        }
        exit(if end == "fails" { 7 } else { 0 });
    }
    comm.barrier(LONG).unwrap();
    match end.as_str() {
        // It has little time then.
        "hangs" => {
            let panics = move || {
                let _comm = comm;
                panic!("for the test");
            };
            catch_unwind(AssertUnwindSafe(panics)).unwrap_err();
        }
        _ => drop(comm),
    }
    exit(DONE);
}

/// Without children to wait for, too: the rank says that it leaves, and the others say who left.
#[test]
fn rank_that_leaves_without_finalize_says_so() {
    const NAME: &str = "rank_that_leaves_without_finalize_says_so";
    let leaves = "mp: rank 0 leaves without Communicator::finalize: the others fail";
    if !is_part_of(NAME) {
        let port = free_port().to_string();
        let start = |rank: &str| {
            let mut command = myself(NAME);
            command.envs([("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")]);
            command.env("MASTER_PORT", &port).stderr(Stdio::piped()).spawn().unwrap()
        };
        let ranks = ["0", "1"].map(start);
        let said = ranks.map(|rank| {
            let output = rank.wait_with_output().unwrap();
            let text = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(DONE), "{text}");
            text
        });
        assert!(said[0].contains(leaves) && !said[1].contains("leaves without"), "{said:?}");
        return;
    }
    let comm = Communicator::builder().timeout(LONG).init().unwrap();
    if comm.rank() == 1 {
        let error = comm.finalize(LONG).unwrap_err();
        // It closes the connection, or its system resets it.
        says(&error, &["rank 1: rank 0: ", "left without Communicator::finalize", "Communicator::shrink"]);
    } else {
        drop(comm);
    }
    exit(DONE);
}

/// The exchange of a rank alone, which returns a wrong number of parts in some call.
#[derive(Debug)]
struct Alone {
    /// Calls until then.
    calls: usize,
    parts: usize,
}

impl Exchange for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn allgather(&mut self, bytes: &[u8], _: Duration) -> mp::Result<Vec<Vec<u8>>> {
        let parts = if self.calls == 0 { self.parts } else { 1 };
        self.calls = self.calls.saturating_sub(1);
        Ok(vec![bytes.to_vec(); parts])
    }
}

#[test]
fn exchanges_with_missing_parts_are_refused() {
    for parts in [0, 2] {
        let build = |calls| Communicator::builder().init_over(Alone { calls, parts });
        let is_told = |error: Error| {
            let text = format!("gave the bytes of {parts} ranks, not of 1");
            assert!(matches!(error, Error::Bootstrap { .. }) && error.to_string().contains(&text), "{error}");
        };
        let calls = (0..20).find_map(|calls| build(calls).map_err(is_told).ok().map(|comm| (calls, comm)));
        let (calls, comm) = calls.expect("none of the calls was a wrong one");
        assert!(calls >= 2, "the paths and the addresses");
        is_told(comm.exchange(b"later", LONG).unwrap_err());
    }
}

/// Whether an error says that the peer has ended the connection.
fn is_left(error: &Error, by: usize) -> bool {
    let is_said = error.to_string().contains(&gdsync::Error::GivenUpByPeer.to_string());
    matches!(error, Error::Message { rank, .. } if *rank == by) && is_said && error.is_rank_lost()
}

// Rank 1 gives rank 0 up after its last message: rank 0 receives all, and then learns it soon, in a wait and on a stream. So does
// rank 2, which sends to a rank that receives nothing.
job_test!(given_up_ranks_learn_it_soon, 3, |comm| {
    let (buffer, s) = (buffer(comm, 1 << 20), stream("left"));
    let (small, large) = (0..8, 8..1 << 19);
    match comm.rank() {
        0 => {
            let received = [&small, &large].map(|range| comm.irecv(&buffer, range.clone(), 1).unwrap());
            let more = [0, 8].map(|at| comm.irecv(&buffer, (1 << 19) + at..(1 << 19) + at + 8, 1).unwrap());
            comm.wait_on_stream(&s, &more[0]).unwrap();
            comm.barrier(LONG).unwrap();
            comm.barrier(LONG).unwrap();
            let error = comm.wait(&more[1], LONG).unwrap_err();
            assert!(is_left(&error, 1), "{error}");
            s.synchronize(LONG).unwrap_err();
            comm.wait_all(&received, LONG).unwrap();
            assert!(bytes(&buffer, 0..1 << 19).iter().all(|&byte| byte == 7), "sent before");
        }
        1 => {
            buffer.memory().write(0, &[7; 1 << 19]).unwrap();
            comm.barrier(LONG).unwrap();
            let sent = [small, large].map(|range| comm.isend(&buffer, range, 0).unwrap());
            comm.wait_all(&sent, LONG).unwrap();
            [0, 2].iter().for_each(|&rank| comm.give_up(rank).unwrap());
            comm.barrier(LONG).unwrap();
        }
        _ => {
            comm.barrier(LONG).unwrap();
            comm.barrier(LONG).unwrap();
            let error = comm.wait(&comm.isend(&buffer, large, 1).unwrap(), LONG).unwrap_err();
            assert!(is_left(&error, 1), "{error}");
        }
    }
    comm.barrier(LONG).unwrap();
});

// The peer learns it by the announcement of the receive, which is a write of the library.
job_test!(streams_that_announce_receives_learn_that_they_were_given_up, 2, |comm| {
    let (buffer, s) = (buffer(comm, 64), stream("left"));
    if comm.rank() == 1 {
        comm.give_up(0).unwrap();
    }
    comm.barrier(LONG).unwrap();
    if comm.rank() == 0 {
        comm.recv_on_stream(&s, &buffer, 0..8, 1).unwrap();
        let error = s.synchronize(LONG).unwrap_err().into();
        assert!(is_left(&error, 1), "{error}");
    }
    comm.barrier(LONG).unwrap();
});

/// Starts ranks by hand, each with the variables of its launcher, and waits for all of them.
fn by_hand<const N: usize>(name: &str, ranks: &[[(&str, &str); N]]) -> Vec<Output> {
    let port = free_port().to_string();
    let start = |vars: &[(&str, &str); N]| {
        let mut command: Command = myself(name);
        command.envs(vars.iter().copied()).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let children: Vec<_> = ranks.iter().map(start).collect();
    children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}

/// Two communicators of the same ranks, made in the same order everywhere.
#[test]
fn launched_ranks_join_twice() {
    const NAME: &str = "launched_ranks_join_twice";
    if is_part_of(NAME) {
        let comms = [(); 2].map(|()| Communicator::builder().spawn(7).timeout(LONG).init().unwrap());
        for comm in comms.iter().rev() {
            assert_eq!(comm.size(), 2);
            let peer = 1 - comm.rank();
            let buffer = buffer(comm, 2);
            let received = comm.irecv(&buffer, 0..1, peer).unwrap();
            let sent = comm.isend(&buffer, 1..2, peer).unwrap();
            comm.wait_all([&received, &sent], LONG).unwrap();
            assert_eq!(comm.child(1), None, "the launcher started it");
        }
        comms.into_iter().for_each(|comm| comm.finalize(LONG).unwrap());
        exit(DONE);
    }
    for (rank, size) in [("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")] {
        let ranks = ["0", "1"].map(|n| [(rank, n), (size, "2")]);
        for output in by_hand(NAME, &ranks) {
            assert_eq!(output.status.code(), Some(DONE), "{}", String::from_utf8_lossy(&output.stderr));
        }
    }
}

/// Some ranks call `init`, others `init_over` with a bootstrap of their own.
#[test]
fn init_and_init_over_do_not_mix() {
    const NAME: &str = "init_and_init_over_do_not_mix";
    /// The rank that calls `init`.
    const INIT_BY: &str = "GDSYNC_TEST_INIT_BY";
    if is_part_of(NAME) {
        let launch = Launch::detect().unwrap().unwrap();
        let builder = Communicator::builder().timeout(LONG);
        let error = match env::var(INIT_BY).unwrap().parse::<usize>().unwrap() == launch.rank {
            true => builder.init().map(drop),
            false => builder.init_over(Bootstrap::connect(&launch, LONG).unwrap()).map(drop),
        };
        let error = error.unwrap_err().to_string();
        eprintln!("{error}");
        assert!(
            error.contains("in CommunicatorBuilder::init, and ")
                || error.contains("in CommunicatorBuilder::init: call"),
            "{error}"
        );
        says(&error, &["call CommunicatorBuilder::init in all ranks, or init_over in all"]);
        return;
    }
    for who in ["0", "1", "2"] {
        let ranks = ["0", "1", "2"].map(|rank| [("RANK", rank), ("WORLD_SIZE", "3"), (INIT_BY, who)]);
        for output in by_hand(NAME, &ranks) {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
    }
}

#[test]
fn contradictory_launchers_are_named() {
    const NAME: &str = "contradictory_launchers_are_named";
    if is_part_of(NAME) {
        let error = Communicator::builder().timeout(Duration::from_secs(6)).init().map(drop).unwrap_err();
        eprintln!("error: {error}");
        return;
    }
    let no_number = &[[("RANK", "0"), ("WORLD_SIZE", "many")]];
    // Rank 1 has another size; rank 0 rejects it and says so, too.
    let two_sizes = &[[("RANK", "0"), ("WORLD_SIZE", "2")], [("RANK", "1"), ("WORLD_SIZE", "3")]];
    for (ranks, expected) in [(&no_number[..], "WORLD_SIZE is 'many'"), (two_sizes, "world size is 3")] {
        for output in by_hand(NAME, ranks) {
            let text = String::from_utf8_lossy(&output.stderr);
            assert!(text.lines().any(|line| line.contains("error: ") && line.contains(expected)), "{text}");
        }
    }
}

/// Over a foreign exchange, which cannot regroup; a rank alone has nothing to regroup.
#[test]
fn foreign_exchanges_may_not_shrink() {
    let comm = Communicator::builder().init_over(Alone { calls: usize::MAX, parts: 1 }).unwrap();
    let error = comm.shrink(LONG).unwrap_err();
    assert!(matches!(error, Error::Bootstrap { .. }) && error.to_string().contains("restart"), "{error}");
    let comm = Communicator::builder().spawn(1).init().unwrap();
    let shrunk = comm.shrink(LONG).unwrap();
    assert_eq!((shrunk.former, shrunk.communicator.size()), (vec![0], 1));
}
