//! Shrinking to the ranks that are left.

use std::env;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::{Output, exit};
use std::thread::{scope, sleep, spawn};
use std::time::Duration;

use crate::common::{
    DONE, LONG, buffer, bytes, is_part_of, job_test, message, ranks, runs, says, stream, until,
};
use mp::collective::{Collectives, Reduction};
use mp::{Communicator, Error, Shrunk};

/// The exit code of a rank that has shrunk its communicator.
const SHRUNK: i32 = 44;

/// A test of shrinking, in processes that join by the variables of a launcher: none is the parent of another. `left` of them return
/// the communicator that they have shrunk to, which must work; all others are killed.
macro_rules! shrink_test {
    ($name:ident, $size:expr, $left:expr, $body:expr) => {
        #[test]
        fn $name() {
            shrinks(stringify!($name), $size, $left, $body);
        }
    };
}

#[track_caller]
fn shrinks(name: &str, size: usize, left: usize, body: impl FnOnce(Communicator) -> Communicator) {
    if is_part_of(name) {
        let shrunk = body(Communicator::builder().timeout(LONG).init().unwrap());
        play(&shrunk).unwrap();
        shrunk.finalize(LONG).unwrap();
        exit(SHRUNK);
    }
    let outputs = ranks(name, size);
    let text = |output: &Output| format!("{}: {}\n", output.status, String::from_utf8_lossy(&output.stderr));
    let all: String = outputs.iter().map(text).collect();
    let was_killed = |output: &&Output| output.status.signal() == Some(libc::SIGKILL);
    let (killed, others): (Vec<_>, Vec<_>) = outputs.iter().partition(was_killed);
    assert!(others.iter().all(|output| output.status.code() == Some(SHRUNK)), "{all}");
    assert_eq!((killed.len(), others.len()), (size - left, left), "{all}");
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
    let collectives = Collectives::new(comm, LONG)?;
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

/// In each round these ranks die at once, numbered as they are then; the others shrink, and play.
fn rounds(mut comm: Communicator, rounds: &[&[usize]]) -> Communicator {
    for dead in rounds {
        play(&comm).unwrap();
        if dead.contains(&comm.rank()) {
            die();
        }
        miss(&comm, dead[0]);
        let Shrunk { communicator, former, .. } = comm.shrink(LONG).unwrap();
        let left: Vec<_> = (0..comm.size()).filter(|rank| !dead.contains(rank)).collect();
        assert_eq!(former, left);
        assert_eq!((communicator.size(), former[communicator.rank()]), (left.len(), comm.rank()));
        says(&comm.finalize(LONG).unwrap_err(), &["this communicator", "that Communicator::shrink returns"]);
        comm = communicator;
    }
    comm
}

shrink_test!(a_rank_dies_and_three_go_on, 4, 3, |comm| rounds(comm, &[&[2]]));
shrink_test!(rank_0_dies_and_three_go_on, 4, 3, |comm| rounds(comm, &[&[0]]));
shrink_test!(two_at_once_die_of_eight_and_again, 8, 3, |comm| rounds(comm, &[&[0, 5], &[1, 2], &[3]]));
shrink_test!(rank_0_dies_over_and_over_until_one_is_left, 4, 1, |comm| rounds(comm, &[&[0], &[0], &[0]]));

// Rank 3 dies between two collectives: the others learn it in theirs, also from each other, and not by their timeout.
shrink_test!(a_rank_dies_among_collectives, 4, 3, |comm| {
    let (all, sum) = (Collectives::new(&comm, LONG).unwrap(), buffer(&comm, 8));
    let add = || all.allreduce::<u64>(&sum, 0..8, Reduction::Max, LONG);
    (0..10).for_each(|_| add().unwrap());
    // Where it dies, its HCA acknowledges nothing more.
    comm.barrier(LONG).unwrap();
    if comm.rank() == 3 {
        die();
    }
    let error = std::iter::repeat_with(add).find_map(Result::err).unwrap();
    assert!(error.is_rank_lost() && error.to_string().contains("allreduce with rank "), "{error}");
    let shrunk = comm.shrink(LONG).unwrap();
    assert_eq!(shrunk.former, [0, 1, 2]);
    shrunk.communicator
});

// Rank 1 leads after the death of rank 0, and dies as well, while the others dial it.
shrink_test!(the_next_leader_dies_too, 5, 3, |comm| {
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
    shrunk.communicator
});

// Rank 4 dies anywhere in the call; the others leave it out, or shrink again.
shrink_test!(a_rank_dies_during_the_shrink, 5, 3, |mut comm| {
    let first_rank = comm.rank();
    if first_rank == 1 {
        die();
    }
    miss(&comm, 1);
    if first_rank == 4 {
        let when = Duration::from_micros(u64::from(std::process::id() % 20_000));
        spawn(move || {
            sleep(when);
            die();
        });
    }
    loop {
        comm = comm.shrink(LONG).unwrap().communicator;
        if first_rank == 4 {
            sleep(LONG);
        }
        if comm.size() == 3 {
            return comm;
        }
        // The next use shows it.
        play(&comm).unwrap_err();
    }
});

// Only rank 1 notices anything; the others wait for it in a barrier.
shrink_test!(ranks_in_a_barrier_learn_of_a_shrink, 3, 3, |comm| {
    if comm.rank() != 1 {
        says(&comm.barrier(LONG).unwrap_err(), &["rank 1", "shrink"]);
    }
    let shrunk = comm.shrink(LONG).unwrap();
    assert_eq!(shrunk.former, [0, 1, 2], "nobody has died");
    shrunk.communicator
});

// No rank has died; rank 0 waits for rank 1, which shrinks.
shrink_test!(waiting_ranks_learn_of_a_shrink_soon, 2, 2, |comm| {
    if comm.rank() == 0 {
        // Not by the retries of a queue pair, which take long.
        says(&miss(&comm, 1), &[&gdsync::Error::GivenUpByPeer.to_string()]);
    }
    let shrunk = comm.shrink(LONG).unwrap();
    assert_eq!(shrunk.former, [0, 1]);
    shrunk.communicator
});

// Rank 2 hangs, and is not waited for, as any rank has given it up.
shrink_test!(given_up_ranks_are_left_out, 4, 4, |comm| {
    let pids = comm.exchange(std::process::id().to_string().as_bytes(), LONG).unwrap();
    if comm.rank() == 2 {
        // Its connections end. It gets the reason, unless it is too late.
        miss(&comm, 3);
        let error = comm.shrink(Duration::from_secs(1)).map(drop).unwrap_err();
        assert!(matches!(error, Error::Bootstrap { .. } | Error::Deadline { .. }), "{error}");
        exit(SHRUNK);
    }
    if comm.rank() == 3 {
        comm.give_up(2).unwrap();
    }
    let shrunk = comm.shrink(LONG).unwrap();
    assert_eq!(shrunk.former, [0, 1, 3]);
    play(&shrunk.communicator).unwrap();
    until("rank 2 ends", || !runs(String::from_utf8_lossy(&pids[2]).parse().unwrap()));
    shrunk.communicator
});

// Each waits for the other in vain, in a part of its own.
#[test]
fn close_ends_shrink() {
    const NAME: &str = "close_ends_shrink";
    if !is_part_of(NAME) {
        let outputs = ranks(NAME, 2);
        return assert!(outputs.iter().all(|output| output.status.code() == Some(SHRUNK)), "{outputs:#?}");
    }
    let comm = Communicator::builder().timeout(LONG).init().unwrap();
    for closes in [0, 1] {
        let part = comm.split(Some(0), 0, LONG).unwrap().unwrap();
        if comm.rank() == closes {
            let shrink = || part.shrink(Duration::from_secs(20)).unwrap_err();
            scope(|scope| {
                let waits = scope.spawn(shrink);
                sleep(Duration::from_millis(20));
                part.close();
                let error = waits.join().unwrap();
                assert!(matches!(error, Error::Closed { .. }), "{error}");
            });
            assert!(matches!(shrink(), Error::Closed { .. }));
        }
        comm.barrier(LONG).unwrap();
    }
    exit(SHRUNK);
}

// Rank 1 is alive and late: the others get its name, and may try again. It comes when both say by a file that they have it.
shrink_test!(late_ranks_are_named, 3, 3, |comm| {
    let pids = comm.exchange(std::process::id().to_string().as_bytes(), LONG).unwrap();
    let has_given_up = |rank: usize| {
        env::temp_dir().join(format!("gdsync-late-{}-{rank}", String::from_utf8_lossy(&pids[0])))
    };
    if comm.rank() != 1 {
        let error = comm.shrink(Duration::from_millis(300)).map(drop).unwrap_err();
        // Rank 2 may only know that rank 0 has not answered.
        let late = if comm.rank() == 0 || matches!(error, Error::Bootstrap { .. }) { 1 } else { 0 };
        says(&error, &[&format!("rank {late}")]);
        fs::write(has_given_up(comm.rank()), "").unwrap();
    } else {
        // Both have ended their connections.
        for rank in [0, 2] {
            miss(&comm, rank);
            until("both give up", || fs::exists(has_given_up(rank)).unwrap());
            fs::remove_file(has_given_up(rank)).unwrap();
        }
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
    shrunk.communicator
});

// The processes that rank 0 has started stay its children.
job_test!(children_are_kept, 4, |comm| {
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
    exit(if first { DONE } else { 0 });
});
