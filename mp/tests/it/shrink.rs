//! Ranks die, the others go on in a smaller communicator: who is left, in which order, and that it is a whole one.

use std::env;
use std::os::unix::process::ExitStatusExt;
use std::process::Output;
use std::thread::{sleep, spawn};
use std::time::Duration;

use crate::common::{LONG, buffer, bytes, is_part_of, message, ranks, stream, until};
use mp::collective::{Collectives, Reduction};
use mp::{Communicator, Error, Shrunk};

/// How a rank leaves that has seen everything through.
const DONE: i32 = 44;

/// What this rank was at first.
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

/// Everybody to everybody, by the CPU and by a stream, then a sum, a barrier and an exchange.
fn play(comm: &Communicator) -> mp::Result<()> {
    // One that has failed stays so.
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

/// The ranks `dead` of `comm` die, all at once; the others shrink, and play.
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

/// Runs the test `name` in `size` processes. Returns how many have seen everything through; all others were killed.
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

/// Rank 1 is to lead when rank 0 is gone, and dies as well, when the others are on their way to it.
#[test]
fn the_rank_that_would_lead_dies_too() {
    const NAME: &str = "the_rank_that_would_lead_dies_too";
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
        // The others knock meanwhile, or not yet: each must come through.
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

/// Rank 4 dies anywhere in the call; the others have it left out, or shrink again.
#[test]
fn a_rank_dies_in_the_middle_of_it() {
    const NAME: &str = "a_rank_dies_in_the_middle_of_it";
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
        // It is found out by the next use.
        play(&comm).unwrap_err();
    }
    play(&comm).unwrap();
    comm.finalize(LONG).unwrap();
    std::process::exit(DONE);
}

/// Only rank 1 notices anything; the others wait for it in a barrier.
#[test]
fn ranks_in_a_barrier_learn_that_one_shrinks() {
    const NAME: &str = "ranks_in_a_barrier_learn_that_one_shrinks";
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

/// Nobody has died, and rank 0 waits for rank 1, which shrinks.
#[test]
fn a_rank_that_waits_for_one_that_shrinks_learns_soon() {
    const NAME: &str = "a_rank_that_waits_for_one_that_shrinks_learns_soon";
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

/// Rank 2 hangs, and is not waited for: any rank may have given it up.
#[test]
fn a_rank_that_is_given_up_is_left_out() {
    const NAME: &str = "a_rank_that_is_given_up_is_left_out";
    if !is_part_of(NAME) {
        assert_eq!(done(NAME, 4), 4);
        return;
    }
    let comm = init();
    let pids = comm.exchange(std::process::id().to_string().as_bytes(), LONG).unwrap();
    if comm.rank() == 2 {
        // Its connections end, though it has done nothing. It is told why, or nothing if it is too late.
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

/// Rank 1 is there and does not come: the others are told its name, and may try again when it does.
#[test]
fn a_rank_that_is_late_is_named() {
    const NAME: &str = "a_rank_that_is_late_is_named";
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
        // Both have ended their connections; they are late by themselves, too.
        miss(&comm, 0);
        miss(&comm, 2);
        sleep(Duration::from_millis(300));
    }
    let shrunk = loop {
        match comm.shrink(LONG) {
            Ok(shrunk) => break shrunk,
            // Its second call was there before rank 0 had given up the first.
            Err(Error::Bootstrap { .. }) if comm.rank() == 2 => {}
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!(shrunk.former, [0, 1, 2]);
    play(&shrunk.communicator).unwrap();
    shrunk.communicator.finalize(LONG).unwrap();
    std::process::exit(DONE);
}

/// The ranks that rank 0 has started are its own afterwards, too.
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
        // The old one has nobody to meet.
        std::process::exit(if first { crate::common::DONE } else { 0 });
    });
}

/// Over an exchange of somebody else, which cannot do it.
#[test]
fn an_exchange_may_be_unable() {
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
