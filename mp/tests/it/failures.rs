//! Failures: bad arguments, wrong lengths, dead ranks, contradictory launchers; and shrinking to the survivors.

use std::env;
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use crate::common::{
    LONG, buffer, bytes, failed, is_part_of, job, kill, message, myself, ranks, stream, syndrome, until,
};
use gdsync::mlx5::Syndrome;
use gdsync::verbs::OnGpu;
use mp::collective::{Collectives, Reduction};
use mp::launch::{Bootstrap, Launch};
use mp::{Communicator, Error, Exchange, Shrunk, Status};

#[test]
fn bad_arguments_are_refused() {
    job("bad_arguments_are_refused", 1, |comm| {
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
                    matches!(error, Error::Device(gdsync::Error::OutOfBounds { size: 64, .. })),
                    "{range:?}: {error}"
                );
            }
        }
        #[expect(clippy::reversed_empty_ranges, reason = "what a user may compute")]
        let error = comm.isend(&buffer, 9..8, 0).unwrap_err();
        assert!(error.to_string().contains("9..8"), "{error}");
        let received = comm.irecv(&buffer, 56..64, 0).unwrap();
        buffer.memory().write(0, b"harmless").unwrap();
        let sent = comm.isend(&buffer, 0..8, 0).unwrap();
        // The longest timeout does not overflow.
        comm.wait_all([&received, &sent], Duration::MAX).unwrap();
        s.synchronize(Duration::MAX).unwrap();
        comm.barrier(Duration::MAX).unwrap();
        assert_eq!(bytes(&buffer, 56..64), b"harmless");
    });
}

#[test]
fn bad_settings_are_refused() {
    let fails = |builder: mp::CommunicatorBuilder| builder.init().map(drop).unwrap_err().to_string();
    for depth in [0, 1 << 20] {
        let text = fails(Communicator::builder().spawn(1).depth(depth));
        assert!(
            text.contains(&format!("Builder::depth is {depth}")) && text.contains("1 to 32768"),
            "{text}"
        );
    }
    for pieces in [0, 31] {
        let text = fails(Communicator::builder().spawn(1).max_pieces(pieces));
        let named = format!("Builder::max_pieces is {pieces}");
        assert!(text.contains(&named) && text.contains("1 to 30"), "{text}");
    }
    let text = fails(Communicator::builder().spawn(1).on_gpu(OnGpu::RECV_CQ));
    assert!(text.contains("RECV_CQ") && text.contains("given a GPU"), "{text}");
    let text = fails(Communicator::builder().spawn(0));
    assert!(text.contains("size is 0"), "{text}");
    let text = fails(Communicator::builder());
    assert!(text.contains("no launcher") && text.contains("mpirun") && text.contains("WORLD_SIZE"), "{text}");
    drop(Communicator::builder().spawn(1).timeout(Duration::MAX).init().unwrap());
}

#[test]
fn longer_messages_fail_on_both_sides() {
    job("longer_messages_fail_on_both_sides", 3, |comm| {
        let (buffer, s) = (buffer(comm, 8192), stream("too short"));
        let peer = 1 - comm.rank().min(1);
        match comm.rank() {
            0 => {
                let received = comm.irecv(&buffer, 0..4999, 1).unwrap();
                comm.wait_on_stream(&s, &received).unwrap();
                comm.barrier(LONG).unwrap();
                failed(&comm.wait(&received, LONG).unwrap_err(), 1, &[Syndrome::LOC_LEN_ERR]);
                let error = s.synchronize(LONG).unwrap_err();
                assert!(matches!(error, gdsync::Error::Completion(_)), "{error}");
            }
            1 => {
                comm.barrier(LONG).unwrap();
                let sent = comm.isend_on_stream(&s, &buffer, 0..5000, 0).unwrap();
                failed(&comm.wait(&sent, LONG).unwrap_err(), 0, &[Syndrome::REM_INV_REQ_ERR]);
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
                assert_eq!(comm.wait(&received, LONG).unwrap(), Status { rank: peer, bytes: 8 });
            }
        }
    });
}

/// Rank 1 is killed while all ranks talk to all; the others see it in waits and on streams.
#[test]
fn dead_ranks_end_messages_and_waits() {
    const NAME: &str = "dead_ranks_end_messages_and_waits";
    if !is_part_of(NAME) {
        let output = myself(NAME).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(41), "{text}");
        assert_eq!(text.matches("survived").count(), 2, "{text}");
        return;
    }
    let comm = Communicator::builder().spawn(3).timeout(LONG).init().unwrap();
    let (buffer, s) = (buffer(&comm, 64), stream("survivor"));
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
    let sent = comm.send_on_stream(&s, &buffer, 8..16, other).unwrap();
    comm.wait_on_stream(&s, &received).unwrap();
    s.synchronize(LONG).unwrap();
    assert_eq!(comm.wait(&sent, LONG).unwrap(), Status { rank: other, bytes: 8 });
    // The communicator names the rank, too.
    let error = comm.barrier(LONG).unwrap_err();
    assert!(error.to_string().contains("rank 1"), "{error}");
    eprintln!("survived");
    if comm.rank() == 0 {
        let error = comm.clone().finalize(LONG).unwrap_err();
        assert!(error.to_string().contains("rank 1"), "{error}");
        until("rank 2 is told", || {
            std::fs::metadata(format!("/proc/{}", comm.child(2).unwrap())).is_err() || {
                let stat = std::fs::read_to_string(format!("/proc/{}/stat", comm.child(2).unwrap()));
                stat.is_ok_and(|stat| stat.contains(") Z "))
            }
        });
        std::process::exit(41);
    }
}

/// Nothing is sent to the rank that dies, so that no send can fail.
#[test]
fn dead_ranks_end_receives() {
    const NAME: &str = "dead_ranks_end_receives";
    if !is_part_of(NAME) {
        let output = myself(NAME).output().unwrap();
        assert_eq!(output.status.code(), Some(41), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    // The wait itself notices.
    let comm = Communicator::builder().spawn(2).timeout(LONG).watch(false).init().unwrap();
    if comm.rank() == 1 {
        std::thread::sleep(2 * LONG);
    }
    let buffer = buffer(&comm, 64);
    let received = comm.irecv(&buffer, 0..8, 1).unwrap();
    kill(comm.child(1).unwrap());
    let error = comm.wait(&received, LONG).unwrap_err();
    failed(&error, 1, &[Syndrome::RETRY_EXC_ERR]);
    assert!(error.is_rank_lost(), "{error}");
    std::process::exit(41);
}

/// A stream that waits for a message of a dead rank goes on, and reports why.
#[test]
fn dead_ranks_release_streams() {
    const NAME: &str = "dead_ranks_release_streams";
    if !is_part_of(NAME) {
        let output = myself(NAME).output().unwrap();
        assert_eq!(output.status.code(), Some(41), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let comm = Communicator::builder().spawn(2).timeout(LONG).init().unwrap();
    if comm.rank() == 1 {
        // It receives nothing: sends to it stay under way.
        std::thread::sleep(2 * LONG);
    }
    let (buffer, s) = (buffer(&comm, 64), stream("survivor"));
    let received = comm.irecv(&buffer, 0..8, 1).unwrap();
    let sent = comm.send_on_stream(&s, &buffer, 8..16, 1).unwrap();
    comm.wait_on_stream(&s, &received).unwrap();
    assert!(matches!(s.synchronize(Duration::from_millis(20)), Err(gdsync::Error::Deadline { .. })));
    kill(comm.child(1).unwrap());
    let error = s.synchronize(LONG).unwrap_err();
    assert_eq!(syndrome(&error), Some(Syndrome::RETRY_EXC_ERR), "{error}");
    assert!(Error::from(error).is_rank_lost());
    assert_eq!(s.query().pending, 0);
    failed(&sent.test().unwrap_err(), 1, &[Syndrome::RETRY_EXC_ERR]);
    for error in [comm.wait(&received, LONG), comm.wait(&sent, LONG)].map(Result::unwrap_err) {
        assert!(matches!(error, Error::Message { rank: 1, .. }), "{error}");
    }
    std::process::exit(41);
}

/// One side ends one connection; the others, and the job, go on.
#[test]
fn given_up_ranks_are_lost_and_no_others() {
    job("given_up_ranks_are_lost_and_no_others", 3, |comm| {
        let (buffer, s) = (buffer(comm, 64), stream("given up"));
        match comm.rank() {
            0 => {
                let received = comm.irecv(&buffer, 0..8, 1).unwrap();
                comm.wait_on_stream(&s, &received).unwrap();
                assert_eq!(comm.lost(), []);
                comm.give_up(1).unwrap();
                let error = comm.wait(&received, LONG).unwrap_err();
                assert!(error.to_string().contains("gave the peer up"), "{error}");
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
}

/// A spawned rank ends before it joins, with any status, or later: its status is the error, long before the timeout.
#[test]
fn spawned_ranks_that_end_are_reported_by_status() {
    const NAME: &str = "spawned_ranks_that_end_are_reported_by_status";
    /// The exit code of rank 1, and whether it joins before.
    const END: &str = "GDSYNC_TEST_END";
    if !is_part_of(NAME) {
        for end in ["7", "0", "7 joined"] {
            let output = myself(NAME).env(END, end).output().unwrap();
            let text = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(41), "{end}: {text}");
        }
        return;
    }
    let end = env::var(END).unwrap();
    let code = end[..1].parse().unwrap();
    let is_child = Launch::detect().unwrap().is_some();
    if is_child && end.len() == 1 {
        std::process::exit(code);
    }
    let start = Instant::now();
    let joined = Communicator::builder().spawn(3).timeout(LONG).init();
    if is_child {
        std::process::exit(code);
    }
    let error = joined.and_then(|comm| comm.finalize(LONG)).unwrap_err();
    assert!(matches!(error, Error::Child { status, .. } if status.code() == Some(code)), "{error}");
    assert!(start.elapsed() < LONG / 3, "{:?}", start.elapsed());
    std::process::exit(41);
}

/// Returns a wrong number of parts from some call on.
#[test]
fn exchanges_with_missing_parts_are_refused() {
    #[derive(Debug)]
    struct Wrong {
        calls: usize,
        parts: usize,
    }

    impl Exchange for Wrong {
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

        fn barrier(&mut self, _: Duration) -> mp::Result<()> {
            Ok(())
        }
    }

    for parts in [0, 2] {
        let build = |calls| Communicator::builder().init_over(Wrong { calls, parts });
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

/// Rank 1 gives rank 0 up after its last message: rank 0 receives all, and then learns it soon, in a wait and on a stream. So does
/// rank 2, which sends to a rank that receives nothing.
#[test]
fn given_up_ranks_learn_it_soon() {
    job("given_up_ranks_learn_it_soon", 3, |comm| {
        let (buffer, s) = (buffer(comm, 1 << 20), stream("left"));
        let (small, large) = (0..8, 8..1 << 19);
        match comm.rank() {
            0 => {
                let received = [&small, &large].map(|range| comm.irecv(&buffer, range.clone(), 1).unwrap());
                let more =
                    [0, 8].map(|at| comm.irecv(&buffer, (1 << 19) + at..(1 << 19) + at + 8, 1).unwrap());
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
}

/// A port without a listener.
fn free_port() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port().to_string()
}

/// Starts ranks by hand, each with the variables of its launcher, and waits for all of them.
fn by_hand<const N: usize>(name: &str, ranks: &[[(&str, &str); N]], port: &str) -> Vec<Output> {
    let start = |vars: &[(&str, &str); N]| {
        let mut command: Command = myself(name);
        command.envs(vars.iter().copied()).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port);
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
        std::process::exit(43);
    }
    for (rank, size) in [("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")] {
        let ranks = ["0", "1"].map(|n| [(rank, n), (size, "2")]);
        for output in by_hand(NAME, &ranks, &free_port()) {
            assert_eq!(output.status.code(), Some(43), "{}", String::from_utf8_lossy(&output.stderr));
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
            error.contains("is in CommunicatorBuilder::init while")
                || error.contains("rank 0 is in CommunicatorBuilder::init"),
            "{error}"
        );
        assert!(
            error.contains("call CommunicatorBuilder::init in all ranks, or init_over in all"),
            "{error}"
        );
        return;
    }
    for who in ["0", "1", "2"] {
        let ranks = ["0", "1", "2"].map(|rank| [("RANK", rank), ("WORLD_SIZE", "3"), (INIT_BY, who)]);
        for output in by_hand(NAME, &ranks, &free_port()) {
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
    let says = |ranks: &[[(&str, &str); 2]], expected: &[&str]| {
        let text = by_hand(NAME, ranks, &free_port()).into_iter().map(|output| {
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            text.lines()
                .find_map(|line| line.split_once("error: "))
                .map(|(_, error)| error.to_owned())
                .expect(&text)
        });
        for text in text {
            assert!(expected.iter().any(|expected| text.contains(expected)), "{text}");
        }
    };
    says(&[[("RANK", "2"), ("WORLD_SIZE", "2")]], &["RANK is 2 but WORLD_SIZE is 2"]);
    says(&[[("RANK", "0"), ("LOCAL_RANK", "0")]], &["WORLD_SIZE is not set although RANK is '0'"]);
    says(&[[("RANK", "0"), ("WORLD_SIZE", "many")]], &["WORLD_SIZE is 'many'"]);
    says(&[[("RANK", "0"), ("WORLD_SIZE", "0")]], &["WORLD_SIZE is 0"]);
    // Rank 1 has another size; rank 0 rejects it and says so, too.
    says(&[[("RANK", "0"), ("WORLD_SIZE", "2")], [("RANK", "1"), ("WORLD_SIZE", "3")]], &["world size is 3"]);
}

/// The exit code of a rank that has completed the test.
const DONE: i32 = 44;

/// The first rank of this process.
fn first_rank() -> usize {
    env::var("RANK").unwrap().parse().unwrap()
}

fn init() -> Communicator {
    Communicator::builder().timeout(LONG).init().unwrap()
}

fn die() -> ! {
    // SAFETY: a plain call; the process ends here.
    unsafe { libc::raise(libc::SIGKILL) };
    unreachable!("killed")
}

/// All ranks to all ranks, by the CPU and by a stream, then a sum, a barrier and an exchange.
fn play(comm: &Communicator) -> mp::Result<()> {
    // A failed stream stays failed.
    let s = stream("left");
    let (me, all, len) = (comm.rank(), comm.size(), 3000);
    let (outbox, inbox) = (buffer(comm, all * len), buffer(comm, all * len));
    let range = |peer: usize| peer * len..(peer + 1) * len;
    let received =
        (0..all).map(|peer| comm.irecv(&inbox, range(peer), peer)).collect::<mp::Result<Vec<_>>>()?;
    let mut sent = Vec::new();
    for peer in 0..all {
        outbox.memory().write(peer * len, &message(me, peer, all, len)).unwrap();
        sent.push(match peer % 2 {
            0 => comm.isend(&outbox, range(peer), peer)?,
            _ => comm.isend_on_stream(&s, &outbox, range(peer), peer)?,
        });
    }
    comm.wait_all(received.iter().chain(&sent), LONG)?;
    s.synchronize(LONG)?;
    for peer in 0..all {
        assert!(bytes(&inbox, range(peer)) == message(peer, me, all, len), "from rank {peer} of {all}");
    }
    let collectives = Collectives::new(comm)?;
    let sum = buffer(comm, 8);
    sum.memory().write(0, &(1_u64 << me).to_ne_bytes()).unwrap();
    collectives.allreduce::<u64>(&sum, 0..8, Reduction::Sum, LONG)?;
    assert_eq!(bytes(&sum, 0..8), ((1_u64 << all) - 1).to_ne_bytes(), "one of each");
    comm.barrier(LONG)?;
    let ranks = comm.exchange(&[u8::try_from(me).unwrap()], LONG)?;
    assert!(ranks.iter().enumerate().all(|(rank, said)| said[..] == [u8::try_from(rank).unwrap()]));
    Ok(())
}

/// Waits until the connection to a rank breaks.
fn miss(comm: &Communicator, rank: usize) -> Error {
    let memory = buffer(comm, 8);
    let error = comm.irecv(&memory, 0..8, rank).and_then(|received| comm.wait(&received, LONG)).unwrap_err();
    assert!(matches!(error, Error::Message { rank: other, .. } if other == rank), "{error}");
    assert!(comm.lost().contains(&rank), "{:?}", comm.lost());
    error
}

/// The ranks `dead` of `comm` die at once; the others shrink, and play.
fn round(comm: &Communicator, dead: &[usize]) -> Communicator {
    play(comm).unwrap();
    if dead.contains(&comm.rank()) {
        die();
    }
    miss(comm, dead[0]);
    let Shrunk { communicator, former, .. } = comm.shrink(LONG).unwrap();
    let left: Vec<_> = (0..comm.size()).filter(|rank| !dead.contains(rank)).collect();
    assert_eq!(former, left);
    let error = comm.clone().finalize(LONG).unwrap_err().to_string();
    assert!(
        error.contains("this communicator") && error.contains("that Communicator::shrink returns"),
        "{error}"
    );
    assert_eq!((communicator.size(), former[communicator.rank()]), (left.len(), comm.rank()));
    play(&communicator).unwrap();
    communicator
}

/// Runs the test `name` in `size` processes. In round `n` the ranks `rounds[n]` die, numbered as they are then.
#[track_caller]
fn rounds(name: &str, size: usize, rounds: &[&[usize]]) {
    if is_part_of(name) {
        let mut comm = init();
        for dead in rounds {
            comm = round(&comm, dead);
        }
        assert_eq!(comm.size(), size - rounds.iter().map(|dead| dead.len()).sum::<usize>());
        comm.finalize(LONG).unwrap();
        std::process::exit(DONE);
    }
    let dead = rounds.iter().map(|dead| dead.len()).sum::<usize>();
    assert_eq!(done(name, size), size - dead);
}

/// Runs the test `name` in `size` processes. Returns how many have completed it; all others were killed.
#[track_caller]
fn done(name: &str, size: usize) -> usize {
    let outputs = ranks(name, size);
    let text = |output: &Output| format!("{}: {}\n", output.status, String::from_utf8_lossy(&output.stderr));
    let all: String = outputs.iter().map(text).collect();
    let has_done = |output: &&Output| match (output.status.signal(), output.status.code()) {
        (Some(libc::SIGKILL), _) => false,
        (_, Some(DONE)) => true,
        _ => panic!("{all}"),
    };
    outputs.iter().filter(has_done).count()
}

#[test]
fn a_rank_dies_and_three_go_on() {
    rounds("a_rank_dies_and_three_go_on", 4, &[&[2]]);
}

#[test]
fn rank_0_dies_and_three_go_on() {
    rounds("rank_0_dies_and_three_go_on", 4, &[&[0]]);
}

#[test]
fn two_at_once_die_of_eight_and_again() {
    rounds("two_at_once_die_of_eight_and_again", 8, &[&[0, 5], &[1, 2], &[3]]);
}

#[test]
fn rank_0_dies_over_and_over_until_one_is_left() {
    rounds("rank_0_dies_over_and_over_until_one_is_left", 4, &[&[0], &[0], &[0]]);
}

/// Rank 1 leads after the death of rank 0, and dies as well, while the others dial it.
#[test]
fn the_next_leader_dies_too() {
    const NAME: &str = "the_next_leader_dies_too";
    if !is_part_of(NAME) {
        assert_eq!(done(NAME, 5), 3);
        return;
    }
    let comm = init();
    if comm.rank() == 0 {
        die();
    }
    miss(&comm, 0);
    if comm.rank() == 1 {
        // The others may have dialled it already, or not.
        sleep(Duration::from_millis(50));
        die();
    }
    let shrunk = comm.shrink(LONG).unwrap();
    assert_eq!(shrunk.former, [2, 3, 4]);
    assert_eq!([1, 2, 3].map(|rank| shrunk.rank_of(rank)), [None, Some(0), Some(1)]);
    play(&shrunk.communicator).unwrap();
    shrunk.communicator.finalize(LONG).unwrap();
    std::process::exit(DONE);
}

/// Rank 4 dies anywhere in the call; the others leave it out, or shrink again.
#[test]
fn a_rank_dies_during_the_shrink() {
    const NAME: &str = "a_rank_dies_during_the_shrink";
    if !is_part_of(NAME) {
        assert_eq!(done(NAME, 5), 3);
        return;
    }
    let mut comm = init();
    if comm.rank() == 1 {
        die();
    }
    miss(&comm, 1);
    if first_rank() == 4 {
        let when = Duration::from_micros(u64::from(std::process::id() % 20_000));
        spawn(move || {
            sleep(when);
            die();
        });
    }
    loop {
        comm = comm.shrink(LONG).unwrap().communicator;
        if first_rank() == 4 {
            sleep(LONG);
        }
        if comm.size() == 3 {
            break;
        }
        // The next use shows it.
        play(&comm).unwrap_err();
    }
    play(&comm).unwrap();
    comm.finalize(LONG).unwrap();
    std::process::exit(DONE);
}

/// Only rank 1 notices anything; the others wait for it in a barrier.
#[test]
fn ranks_in_a_barrier_learn_of_a_shrink() {
    const NAME: &str = "ranks_in_a_barrier_learn_of_a_shrink";
    if !is_part_of(NAME) {
        assert_eq!(done(NAME, 3), 3);
        return;
    }
    let comm = init();
    if comm.rank() != 1 {
        let error = comm.barrier(LONG).unwrap_err().to_string();
        assert!(error.contains("rank 1") && error.contains("shrink"), "{error}");
    }
    let shrunk = comm.shrink(LONG).unwrap();
    assert_eq!(shrunk.former, [0, 1, 2], "nobody has died");
    play(&shrunk.communicator).unwrap();
    shrunk.communicator.finalize(LONG).unwrap();
    std::process::exit(DONE);
}

/// No rank has died; rank 0 waits for rank 1, which shrinks.
#[test]
fn waiting_ranks_learn_of_a_shrink_soon() {
    const NAME: &str = "waiting_ranks_learn_of_a_shrink_soon";
    if !is_part_of(NAME) {
        assert_eq!(done(NAME, 2), 2);
        return;
    }
    let comm = init();
    if comm.rank() == 0 {
        // Not by the retries of a queue pair, which take long.
        let error = miss(&comm, 1).to_string();
        assert!(error.contains(&gdsync::Error::GivenUpByPeer.to_string()), "{error}");
    }
    assert_eq!(comm.shrink(LONG).unwrap().former, [0, 1]);
    std::process::exit(DONE);
}

/// Rank 2 hangs, and is not waited for, as any rank has given it up.
#[test]
fn given_up_ranks_are_left_out() {
    const NAME: &str = "given_up_ranks_are_left_out";
    if !is_part_of(NAME) {
        assert_eq!(done(NAME, 4), 4);
        return;
    }
    let comm = init();
    let pids = comm.exchange(std::process::id().to_string().as_bytes(), LONG).unwrap();
    if comm.rank() == 2 {
        // Its connections end. It gets the reason, unless it is too late.
        miss(&comm, 3);
        let error = comm.shrink(Duration::from_secs(1)).map(drop).unwrap_err();
        assert!(matches!(error, Error::Bootstrap { .. } | Error::Deadline { .. }), "{error}");
        std::process::exit(DONE);
    }
    if comm.rank() == 3 {
        comm.give_up(2).unwrap();
    }
    let shrunk = comm.shrink(LONG).unwrap();
    assert_eq!(shrunk.former, [0, 1, 3]);
    play(&shrunk.communicator).unwrap();
    let stat = format!("/proc/{}/stat", String::from_utf8_lossy(&pids[2]));
    until("rank 2 ends", || std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") Z ")));
    shrunk.communicator.finalize(LONG).unwrap();
    std::process::exit(DONE);
}

/// Rank 1 is alive and late: the others get its name, and may try again.
#[test]
fn late_ranks_are_named() {
    const NAME: &str = "late_ranks_are_named";
    if !is_part_of(NAME) {
        assert_eq!(done(NAME, 3), 3);
        return;
    }
    let comm = init();
    if comm.rank() != 1 {
        let error = comm.shrink(Duration::from_millis(300)).map(drop).unwrap_err();
        // Rank 2 may only know that rank 0 has not answered.
        let name = format!(
            "rank {}",
            if comm.rank() == 0 || matches!(error, Error::Bootstrap { .. }) { 1 } else { 0 }
        );
        assert!(error.to_string().contains(&name), "{error}");
    } else {
        // Both have ended their connections, and are late themselves.
        miss(&comm, 0);
        miss(&comm, 2);
        sleep(Duration::from_millis(300));
    }
    let shrunk = loop {
        match comm.shrink(LONG) {
            Ok(shrunk) => break shrunk,
            // Its second call came before the first of rank 0 timed out.
            Err(Error::Bootstrap { .. }) if comm.rank() == 2 => {}
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!(shrunk.former, [0, 1, 2]);
    play(&shrunk.communicator).unwrap();
    shrunk.communicator.finalize(LONG).unwrap();
    std::process::exit(DONE);
}

/// The processes that rank 0 has started stay its children.
#[test]
fn children_are_kept() {
    const NAME: &str = "children_are_kept";
    crate::common::job(NAME, 4, |comm| {
        if comm.rank() == 1 {
            die();
        }
        miss(comm, 1);
        let Shrunk { communicator, former, .. } = comm.shrink(LONG).unwrap();
        assert_eq!(former, [0, 2, 3]);
        play(&communicator).unwrap();
        let first = communicator.rank() == 0;
        if first {
            assert!(communicator.child(1).is_some() && communicator.child(3).is_none());
            assert_eq!(comm.child(2), None, "they belong to the new one");
        }
        communicator.finalize(LONG).unwrap();
        // The old communicator is dropped.
        std::process::exit(if first { crate::common::DONE } else { 0 });
    });
}

/// Over a foreign exchange, which cannot regroup.
#[test]
fn foreign_exchanges_may_not_shrink() {
    #[derive(Debug)]
    struct Alone;

    impl mp::Exchange for Alone {
        fn rank(&self) -> usize {
            0
        }

        fn size(&self) -> usize {
            1
        }

        fn allgather(&mut self, bytes: &[u8], _: Duration) -> mp::Result<Vec<Vec<u8>>> {
            Ok(vec![bytes.to_vec()])
        }
    }

    let comm = Communicator::builder().init_over(Alone).unwrap();
    let error = comm.shrink(LONG).unwrap_err();
    assert!(matches!(error, Error::Bootstrap { .. }) && error.to_string().contains("restart"), "{error}");
    let comm = Communicator::builder().spawn(1).init().unwrap();
    let shrunk = comm.shrink(LONG).unwrap();
    assert_eq!((shrunk.former, shrunk.communicator.size()), (vec![0], 1));
}
