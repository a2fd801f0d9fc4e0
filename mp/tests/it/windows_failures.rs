//! Windows when things go wrong: collective calls that disagree, windows that are gone, ranks that die.

use std::time::Duration;

use crate::common::{LONG, buffer, bytes, failed, is_part_of, job, myself, stream, until};
use gdsync::mlx5::Syndrome;
use gdsync::stream::{Cond, HostStreamConfig, Stream};
use mp::{Communicator, Error, Rma, Signal};

/// The rank that asks for what cannot be hears why, the others who it was; and the next window works.
#[test]
fn a_rank_that_makes_no_window_is_named() {
    job("a_rank_that_makes_no_window_is_named", 3, |comm| {
        let target = buffer(comm, 64);
        let window = comm.window(&target, 0..64, LONG).unwrap();
        #[expect(clippy::reversed_empty_ranges, reason = "what a user may compute")]
        for range in [0..65, 65..65, 9..8, 0..usize::MAX] {
            let bad = comm.rank() == 1;
            let range = if bad { range } else { 0..64 };
            let errors = [
                comm.window(&target, range.clone(), LONG).unwrap_err(),
                window.beside(&target, range.clone(), LONG).unwrap_err(),
            ];
            for error in errors {
                if bad {
                    assert!(matches!(error, Error::Device(_)), "{range:?}: {error}");
                } else {
                    let text = error.to_string();
                    assert!(matches!(error, Error::Bootstrap { .. }) && text.contains("rank 1"), "{text}");
                }
            }
        }
        let beside = window.beside(&target, 8..8, LONG).unwrap();
        assert_eq!(beside.size_of(2).unwrap(), 0);
        let window = comm.window(&target, 0..64, LONG).unwrap();
        for rank in 0..3 {
            let _detached = window.start(&Rma::signal(rank, Signal::add(0, 1))).unwrap();
        }
        window.wait_signal(0, 3, Cond::Eq, LONG).unwrap();
        window.destroy(LONG).unwrap();
    });
}

/// The window of rank 1 is gone, and its key dead: what goes there fails, and nothing else does.
#[test]
fn a_window_that_is_gone_is_told_to_who_uses_it() {
    job("a_window_that_is_gone_is_told_to_who_uses_it", 3, |comm| {
        let (target, kept) = (buffer(comm, 64), buffer(comm, 64));
        let window = comm.window(&target, 0..64, LONG).unwrap();
        let beside = window.beside(&kept, 0..64, LONG).unwrap();
        let other = comm.window(&kept, 0..64, LONG).unwrap();
        if comm.rank() == 1 {
            drop((window, target));
            comm.barrier(LONG).unwrap();
        } else {
            let (local, s) = (buffer(comm, 64), stream("stranded"));
            comm.barrier(LONG).unwrap();
            // Nobody waits for this one; the next calls tell.
            let gone = [Syndrome::REM_ACCESS_ERR];
            window.put(&local, 0..8, 1, 0).unwrap();
            failed(&window.flush(1, LONG).unwrap_err(), 1, &gone);
            failed(&window.put(&local, 0..8, 1, 0).unwrap_err(), 1, &gone);
            failed(&window.start_on_stream(&s, &Rma::accumulate(1, 1, 0)).unwrap_err(), 1, &gone);
            failed(&window.flush_on_stream(&s, 1).unwrap_err(), 1, &gone);
            failed(&window.flush_all(LONG).unwrap_err(), 1, &gone);
            // The connection is shared.
            failed(&beside.put(&local, 0..8, 1, 0).unwrap_err(), 1, &gone);
            // To other ranks, and through other windows, all is well.
            let third = 2 - comm.rank();
            window.put(&local, 0..8, third, 0).unwrap();
            window.flush(third, LONG).unwrap();
            let signal = other.start(&Rma::signal(1, Signal::add(0, 1))).unwrap();
            comm.wait(&signal, LONG).unwrap();
            s.synchronize(LONG).unwrap();
        }
        if comm.rank() == 1 {
            other.wait_signal(0, 2, Cond::Eq, LONG).unwrap();
        }
        // All have been told, so that `finalize` has no more to say.
        comm.barrier(LONG).unwrap();
    });
}

/// Rank 0 gives up rank 1: what it has under way there ends, also on a stream, and nothing else.
#[test]
fn a_rank_that_is_given_up_ends_what_waits_for_it() {
    job("a_rank_that_is_given_up_ends_what_waits_for_it", 3, |comm| {
        let (local, target) = (buffer(comm, 64), buffer(comm, 64));
        let window = comm.window(&target, 0..64, LONG).unwrap();
        comm.barrier(LONG).unwrap();
        if comm.rank() == 0 {
            let (s, word) = (stream("held"), local.memory().word32(32).unwrap());
            s.wait_value32(&word, 1, Cond::Eq).unwrap();
            let put = window.iput_on_stream(&s, &local, 0..8, 1, 0).unwrap();
            window.flush_on_stream(&s, 1).unwrap();
            comm.give_up(1).unwrap();
            let error = comm.wait(&put, LONG).unwrap_err();
            assert!(matches!(error, Error::Message { rank: 1, .. }), "{error}");
            let error = window.put(&local, 0..8, 1, 0).unwrap_err();
            let text = error.to_string();
            assert!(text.contains("rank 1") && text.contains(&gdsync::Error::GivenUp.to_string()), "{text}");
            word.store(1);
            assert!(s.synchronize(LONG).is_err());
            window.put(&local, 0..8, 2, 0).unwrap();
            window.flush(2, LONG).unwrap();
        }
        comm.barrier(LONG).unwrap();
        assert_eq!(bytes(&target, 0..8), [0; 8]);
    });
}

/// Nobody asks after the put that fails, until the end.
#[test]
fn a_failure_that_nobody_asked_for_comes_out_at_the_end() {
    job("a_failure_that_nobody_asked_for_comes_out_at_the_end", 2, |comm| {
        let (target, kept) = (buffer(comm, 64), buffer(comm, 64));
        let window = comm.window(&target, 0..64, LONG).unwrap();
        // So that the connections stay.
        let _beside = window.beside(&kept, 0..64, LONG).unwrap();
        if comm.rank() == 1 {
            drop((window, target));
            comm.barrier(LONG).unwrap();
            return comm.barrier(LONG).unwrap();
        }
        comm.barrier(LONG).unwrap();
        window.put(&target, 0..8, 1, 0).unwrap();
        drop(window);
        // It meets the other rank at its barrier, but says what was lost.
        let error = comm.clone().finalize(LONG).unwrap_err();
        failed(&error, 1, &[Syndrome::REM_ACCESS_ERR]);
    });
}

#[test]
fn waits_for_signals_end() {
    job("waits_for_signals_end", 1, |comm| {
        let target = buffer(comm, 64);
        let window = comm.window(&target, 0..64, LONG).unwrap();
        let soon = Duration::from_millis(20);
        let error = window.wait_signal(8, 1, Cond::Geq, soon).unwrap_err();
        assert!(matches!(error, Error::Deadline { after, .. } if after == soon), "{error}");
        assert!(error.to_string().contains("Geq 0x1 (it is 0x0)"), "{error}");
        let config = HostStreamConfig { wait_limit: soon, ..HostStreamConfig::default() };
        let held = Stream::host(config).unwrap();
        window.wait_signal_on_stream(&held, 8, 1, Cond::Geq).unwrap();
        let text = held.synchronize(LONG).unwrap_err().to_string();
        let named = ["Geq 0x1", "peer that is gone", "wait_limit"];
        assert!(named.iter().all(|name| text.contains(name)), "{text}");
        // Nothing is put meanwhile, and the operations behind it still work.
        let _detached = window.start(&Rma::signal(0, Signal::set(8, 5))).unwrap();
        assert_eq!(window.wait_signal(8, 1, Cond::Geq, Duration::MAX).unwrap(), 5);
        for at in [57, 64, usize::MAX] {
            let errors = [
                window.wait_signal(at, 1, Cond::Geq, soon).map(drop).unwrap_err(),
                window.wait_signal_on_stream(&stream("refused"), at, 1, Cond::Geq).unwrap_err(),
                window.word32(at.max(61)).map(drop).unwrap_err(),
            ];
            for error in errors {
                assert!(matches!(error, Error::OutsideWindow { rank: 0, size: 64, .. }), "{error}");
            }
        }
        window.destroy(LONG).unwrap();
    });
}

/// Rank 1 is killed; operations on it fail, on streams too, and all others go on.
#[test]
fn the_death_of_a_rank_fails_what_was_for_it() {
    const NAME: &str = "the_death_of_a_rank_fails_what_was_for_it";
    if !is_part_of(NAME) {
        let output = myself(NAME).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(41), "{text}");
        return assert_eq!(text.matches("survived").count(), 2, "{text}");
    }
    let comm = Communicator::builder().spawn(3).timeout(LONG).init().unwrap();
    let (local, target, s) = (buffer(&comm, 64), buffer(&comm, 64), stream("survivor"));
    let window = comm.window(&target, 0..64, LONG).unwrap();
    if comm.rank() == 1 {
        std::thread::sleep(2 * LONG);
    }
    let own = local.memory().word64(56).unwrap();
    own.store(7);
    if comm.rank() == 0 {
        window.put(&local, 0..8, 1, 0).unwrap();
        window.flush(1, LONG).unwrap();
        let pid = i32::try_from(comm.child(1).unwrap()).unwrap();
        // SAFETY: a plain call; nobody has waited for the child, so the number is still its own.
        assert_eq!(unsafe { libc::kill(pid, libc::SIGKILL) }, 0);
    }
    let gone = [Syndrome::RETRY_EXC_ERR, Syndrome::WR_FLUSH_ERR];
    // By a stream that holds for one of them: the put before the failure is known.
    let mut failure = None;
    until("the death goes unnoticed", || {
        let put = window.iput_on_stream(&s, &local, 0..8, 1, 0);
        let put = put.and_then(|put| comm.wait_on_stream(&s, &put).map(|()| put));
        // The stream is released in any case; who fails says so.
        let synchronized = s.synchronize(LONG);
        failure = match put.map(|put| comm.wait(&put, LONG).err()) {
            Ok(None) => None,
            Ok(Some(error)) | Err(error) => Some((error, synchronized)),
        };
        failure.is_some()
    });
    let (error, _) = failure.unwrap();
    failed(&error, 1, &gone);
    for error in [window.flush(1, LONG), window.flush_all(LONG), window.put(&local, 0..8, 1, 8)] {
        failed(&error.unwrap_err(), 1, &gone);
    }
    // The survivors go on with each other, through the same window.
    let other = 2 - comm.rank();
    let put = Rma::put(&local, 56..64, other, 8).with_signal(Signal::set(0, 1));
    let put = window.start_on_stream(&s, &put).unwrap();
    window.wait_signal_on_stream(&s, 0, 1, Cond::Eq).unwrap();
    s.synchronize(LONG).unwrap();
    comm.wait(&put, LONG).unwrap();
    window.flush(other, LONG).unwrap();
    assert_eq!(bytes(&target, 8..16), 7_u64.to_ne_bytes());
    // Each hears from the other that it is done, since no barrier is left.
    let _detached = window.start(&Rma::signal(other, Signal::set(16, 1))).unwrap();
    window.wait_signal(16, 1, Cond::Eq, LONG).unwrap();
    eprintln!("survived");
    if comm.rank() == 2 {
        // Rank 0 stays until this one has left.
        window.flush(0, LONG).unwrap();
    } else {
        until("rank 2 is still here", || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", comm.child(2).unwrap()));
            stat.map_or(true, |stat| stat.contains(") Z "))
        });
        std::process::exit(41);
    }
}
