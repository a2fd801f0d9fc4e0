//! What goes wrong: bad arguments, wrong lengths, ranks that die, launchers that contradict themselves.

use std::env;
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::{LONG, buffer, bytes, failed, is_part_of, job, myself, stream, syndrome, until};
use gdsync::mlx5::Syndrome;
use gdsync::verbs::OnGpu;
use mp::Exchange;
use mp::launch::Bootstrap;
use mp::launch::Launch;
use mp::{Communicator, Error, Status};

#[test]
fn bad_arguments_are_refused_and_do_no_harm() {
    job("bad_arguments_are_refused_and_do_no_harm", 1, |comm| {
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
        // No time limit is too long.
        comm.wait_all([&received, &sent], Duration::MAX).unwrap();
        s.synchronize(Duration::MAX).unwrap();
        comm.barrier(Duration::MAX).unwrap();
        assert_eq!(bytes(&buffer, 56..64), b"harmless");
    });
}

#[test]
fn builders_say_what_is_wrong() {
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
fn a_message_longer_than_the_receive_fails_on_both_sides() {
    job("a_message_longer_than_the_receive_fails_on_both_sides", 3, |comm| {
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
            // The connection is broken, and every call says why at once; those to other ranks work.
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

/// Rank 1 is killed while everybody talks to everybody; the others see it in waits and on streams.
#[test]
fn the_death_of_a_rank_ends_what_waits_for_it() {
    const NAME: &str = "the_death_of_a_rank_ends_what_waits_for_it";
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
        let pid = i32::try_from(comm.child(1).unwrap()).unwrap();
        // SAFETY: a plain call; nobody has waited for the child, so the number is still its own.
        assert_eq!(unsafe { libc::kill(pid, libc::SIGKILL) }, 0);
    }
    // By a wait on the CPU.
    let error = (0..).find_map(|_| play(1).err()).unwrap();
    failed(&error, 1, &[Syndrome::RETRY_EXC_ERR]);
    assert!(error.is_rank_lost() && error.to_string().contains("rank 1"), "{error}");
    // On a stream: what it refuses names the rank, and so does the message that was to be sent.
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
    // The ranks know it too, by name.
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
fn a_receive_ends_when_the_rank_it_waits_for_dies() {
    const NAME: &str = "a_receive_ends_when_the_rank_it_waits_for_dies";
    if !is_part_of(NAME) {
        let output = myself(NAME).output().unwrap();
        assert_eq!(output.status.code(), Some(41), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    // The wait itself must notice.
    let comm = Communicator::builder().spawn(2).timeout(LONG).watch(false).init().unwrap();
    if comm.rank() == 1 {
        std::thread::sleep(2 * LONG);
    }
    let buffer = buffer(&comm, 64);
    let received = comm.irecv(&buffer, 0..8, 1).unwrap();
    let pid = i32::try_from(comm.child(1).unwrap()).unwrap();
    // SAFETY: a plain call; nobody has waited for the child, so the number is still its own.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGKILL) }, 0);
    let error = comm.wait(&received, LONG).unwrap_err();
    failed(&error, 1, &[Syndrome::RETRY_EXC_ERR]);
    assert!(error.is_rank_lost(), "{error}");
    std::process::exit(41);
}

/// A stream that holds for a message of a rank that dies goes on, and says why.
#[test]
fn a_stream_is_released_when_the_rank_it_waits_for_dies() {
    const NAME: &str = "a_stream_is_released_when_the_rank_it_waits_for_dies";
    if !is_part_of(NAME) {
        let output = myself(NAME).output().unwrap();
        assert_eq!(output.status.code(), Some(41), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let comm = Communicator::builder().spawn(2).timeout(LONG).init().unwrap();
    if comm.rank() == 1 {
        // It receives nothing, so that a send to it is under way until its end.
        std::thread::sleep(2 * LONG);
    }
    let (buffer, s) = (buffer(&comm, 64), stream("survivor"));
    let received = comm.irecv(&buffer, 0..8, 1).unwrap();
    let sent = comm.send_on_stream(&s, &buffer, 8..16, 1).unwrap();
    comm.wait_on_stream(&s, &received).unwrap();
    assert!(matches!(s.synchronize(Duration::from_millis(20)), Err(gdsync::Error::Deadline { .. })));
    let pid = i32::try_from(comm.child(1).unwrap()).unwrap();
    // SAFETY: a plain call; nobody has waited for the child, so the number is still its own.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGKILL) }, 0);
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

/// One connection ends, from one side; the others, and the job, go on.
#[test]
fn a_rank_that_is_given_up_is_lost_and_no_other() {
    job("a_rank_that_is_given_up_is_lost_and_no_other", 3, |comm| {
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
                // It learns by asking.
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

/// A rank that was spawned ends before it joins, well or not, or later: its status is the error, long before the timeout.
#[test]
fn a_spawned_rank_that_ends_is_told_by_its_status() {
    const NAME: &str = "a_spawned_rank_that_ends_is_told_by_its_status";
    /// How rank 1 ends, and whether it joins before.
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

/// Gives as many parts as it likes from some call on: each call of the library looks.
#[test]
fn an_exchange_that_leaves_ranks_out_is_told_so() {
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

/// Whether it says that a rank has ended the connection.
fn is_left(error: &Error, by: usize) -> bool {
    let is_said = error.to_string().contains(&gdsync::Error::GivenUpByPeer.to_string());
    matches!(error, Error::Message { rank, .. } if *rank == by) && is_said && error.is_rank_lost()
}

/// Rank 1 gives rank 0 up when its last message is out: rank 0 has them all, and learns by what it waits for then, soon, in a wait
/// and on a stream. So does rank 2, which sends to a rank that receives nothing.
#[test]
fn a_rank_learns_soon_that_it_was_given_up() {
    job("a_rank_learns_soon_that_it_was_given_up", 3, |comm| {
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

/// A port nobody listens at.
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

/// Two communicators of one process, over the same ranks: made in the same order everywhere.
#[test]
fn ranks_of_a_launcher_join_twice() {
    const NAME: &str = "ranks_of_a_launcher_join_twice";
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
fn two_ways_to_begin_are_told_apart() {
    const NAME: &str = "two_ways_to_begin_are_told_apart";
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
fn launchers_that_contradict_themselves_are_named() {
    const NAME: &str = "launchers_that_contradict_themselves_are_named";
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
    // Rank 1 counts three; rank 0 turns it away and says so, too.
    says(&[[("RANK", "0"), ("WORLD_SIZE", "2")], [("RANK", "1"), ("WORLD_SIZE", "3")]], &["world size is 3"]);
}
