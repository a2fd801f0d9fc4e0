//! Signals and operations on words of windows.

use crate::common::{LONG, buffer, bytes, job, message};
use gdsync::stream::Cond;
use mp::{Communicator, Error, Rma, Signal, Status};

/// Data is there when its signal is. The signal back says that it may be overwritten.
#[test]
fn a_signal_comes_after_its_data() {
    job("a_signal_comes_after_its_data", 2, |comm| {
        const LEN: usize = 3000;
        let (me, peer) = (comm.rank(), 1 - comm.rank());
        let (outbox, target) = (buffer(comm, LEN), buffer(comm, 16 + LEN));
        let window = comm.window(&target, 0..16 + LEN, LONG).unwrap();
        for n in 1..=500_u64 {
            let (i, len) = (usize::try_from(n).unwrap(), usize::try_from(n * 37 % LEN as u64).unwrap());
            if me == 0 {
                outbox.memory().write(0, &message(0, 1, i, len)).unwrap();
                let put = Rma::put(&outbox, 0..len, peer, 16).with_signal(Signal::set(0, n));
                let put = window.start(&put).unwrap();
                assert_eq!(comm.wait(&put, LONG).unwrap(), Status { rank: 1, bytes: len });
                assert_eq!(window.wait_signal(8, n, Cond::Geq, LONG).unwrap(), n);
            } else {
                assert_eq!(window.wait_signal(0, n, Cond::Geq, LONG).unwrap(), n);
                assert!(bytes(&target, 16..16 + len) == message(0, 1, i, len), "message {n}");
                let _detached = window.start(&Rma::signal(peer, Signal::set(8, n))).unwrap();
            }
        }
        window.destroy(LONG).unwrap();
    });
}

/// A counter that all ranks add to, behind data of theirs.
#[test]
fn signals_add_up() {
    job("signals_add_up", 4, |comm| {
        const ROUNDS: u64 = 100;
        let (me, all) = (comm.rank(), comm.size());
        let (outbox, target) = (buffer(comm, 64), buffer(comm, 8 + 64 * all));
        let window = comm.window(&target, 0..8 + 64 * all, LONG).unwrap();
        for round in 1..=ROUNDS {
            let n = usize::try_from(round).unwrap();
            for peer in 0..all {
                outbox.memory().write(0, &message(me, peer, n, 64)).unwrap();
                let put = Rma::put(&outbox, 0..64, peer, 8 + 64 * me).with_signal(Signal::add(0, 1));
                comm.wait(&window.start(&put).unwrap(), LONG).unwrap();
            }
            let all_of_them = round * all as u64;
            assert_eq!(window.wait_signal(0, all_of_them, Cond::Geq, LONG).unwrap(), all_of_them);
            for peer in 0..all {
                let range = 8 + 64 * peer..8 + 64 * (peer + 1);
                assert!(bytes(&target, range) == message(peer, me, n, 64), "round {round}, from {peer}");
            }
            comm.barrier(LONG).unwrap();
        }
        window.destroy(LONG).unwrap();
    });
}

/// Data in one window, the signal in another over the same connections.
#[test]
fn signals_may_be_in_a_window_beside() {
    job("signals_may_be_in_a_window_beside", 2, |comm| {
        let (me, peer) = (comm.rank(), 1 - comm.rank());
        let (outbox, target, words) = (buffer(comm, 4096), buffer(comm, 4096), buffer(comm, 64));
        let window = comm.window(&target, 0..4096, LONG).unwrap();
        let signals = window.beside(&words, 32..64, LONG).unwrap();
        let other = comm.window(&words, 0..32, LONG).unwrap();
        assert_eq!([&window, &signals, &other].map(|w| w.size_of(peer).unwrap()), [4096, 32, 32]);
        for n in 1..=100_u64 {
            outbox.memory().write(0, &message(me, peer, usize::try_from(n).unwrap(), 4096)).unwrap();
            let put = Rma::put(&outbox, 0..4096, peer, 0).with_signal(Signal::set(8, n).of(&signals));
            comm.wait(&window.start(&put).unwrap(), LONG).unwrap();
            signals.wait_signal(8, n, Cond::Eq, LONG).unwrap();
            assert!(target.memory().to_vec() == message(peer, me, usize::try_from(n).unwrap(), 4096));
            // Ordered too: a put through one window, a signal alone through the other.
            comm.barrier(LONG).unwrap();
            window.put(&outbox, 0..8, peer, 4088).unwrap();
            let _detached = signals.start(&Rma::signal(peer, Signal::set(16, n))).unwrap();
            signals.wait_signal(16, n, Cond::Eq, LONG).unwrap();
            assert_eq!(
                bytes(&target, 4088..4096),
                message(peer, me, usize::try_from(n).unwrap(), 8),
                "round {n}"
            );
            comm.barrier(LONG).unwrap();
        }
        let foreign = Rma::put(&outbox, 0..8, peer, 0).with_signal(Signal::set(0, 1).of(&other));
        let text = window.start(&foreign).unwrap_err().to_string();
        assert!(text.contains("Window::beside") && text.contains(&format!("rank {peer}")), "{text}");
        signals.destroy(LONG).unwrap();
        window.destroy(LONG).unwrap();
    });
}

/// Who is told that its memory was read may overwrite it.
#[test]
fn a_get_signals_after_it_has_read() {
    job("a_get_signals_after_it_has_read", 2, |comm| {
        const LEN: usize = 200_000;
        let (target, into) = (buffer(comm, 16 + LEN), buffer(comm, LEN));
        let window = comm.window(&target, 0..16 + LEN, LONG).unwrap();
        for n in 1..=50_u64 {
            let i = usize::try_from(n).unwrap();
            if comm.rank() == 0 {
                target.memory().write(16, &message(0, 1, i, LEN)).unwrap();
                let _detached = window.start(&Rma::signal(1, Signal::set(0, n))).unwrap();
                window.wait_signal(8, n, Cond::Geq, LONG).unwrap();
                target.memory().fill(16, LEN, 0xff).unwrap();
            } else {
                window.wait_signal(0, n, Cond::Geq, LONG).unwrap();
                let get = Rma::get(&into, 0..LEN, 0, 16).with_signal(Signal::set(8, n));
                comm.wait(&window.start(&get).unwrap(), LONG).unwrap();
                assert!(into.memory().to_vec() == message(0, 1, i, LEN), "round {n}");
            }
        }
        window.destroy(LONG).unwrap();
    });
}

/// Each value is drawn once, whoever draws.
fn draw(comm: &Communicator) {
    const DRAWS: u64 = 200;
    let all = comm.size() as u64;
    let (target, drawn) = (buffer(comm, 32), buffer(comm, 16));
    let window = comm.window(&target, 0..32, LONG).unwrap();
    let mut mine = Vec::new();
    for _ in 0..DRAWS {
        let draw = window.start(&Rma::fetch_add(1, 0, 8, &drawn, 8)).unwrap();
        assert_eq!(comm.wait(&draw, LONG).unwrap(), Status { rank: 0, bytes: 8 });
        mine.push(drawn.memory().word64(8).unwrap().load());
        // Nobody wants the result, and words wrap.
        let _detached = window.start(&Rma::accumulate(u64::MAX, 0, 16)).unwrap();
    }
    window.flush(0, LONG).unwrap();
    assert!(mine.is_sorted(), "what a rank draws later is more");
    let numbers: Vec<u8> = mine.iter().flat_map(|n| n.to_le_bytes()).collect();
    let mut seen = vec![0; usize::try_from(DRAWS * all).unwrap()];
    for of_rank in comm.exchange(&numbers, LONG).unwrap() {
        for number in of_rank.as_chunks::<8>().0 {
            seen[usize::try_from(u64::from_le_bytes(*number)).unwrap()] += 1;
        }
    }
    assert!(seen.iter().all(|&count| count == 1), "{seen:?}");
    if comm.rank() == 0 {
        assert_eq!(window.word64(8).unwrap().load(), DRAWS * all);
        assert_eq!(window.word64(16).unwrap().load(), (DRAWS * all).wrapping_neg());
        assert_eq!(window.word32(24).unwrap().load(), 0);
    }
    comm.barrier(LONG).unwrap();
    window.destroy(LONG).unwrap();
}

#[test]
fn two_ranks_draw_numbers() {
    job("two_ranks_draw_numbers", 2, draw);
}

#[test]
fn four_ranks_draw_numbers() {
    job("four_ranks_draw_numbers", 4, draw);
}

/// A lock of compare-and-swap guards a number that ranks read, change and write back.
#[test]
fn ranks_take_turns_by_compare_and_swap() {
    job("ranks_take_turns_by_compare_and_swap", 4, |comm| {
        const ROUNDS: u64 = 25;
        let (target, local) = (buffer(comm, 16), buffer(comm, 24));
        let window = comm.window(&target, 0..16, LONG).unwrap();
        let me = comm.rank() as u64 + 1;
        let swap = |from: u64, to: u64| {
            let swap = Rma::compare_swap(from, to, 2, 0, &local, 0);
            comm.wait(&window.start(&swap).unwrap(), LONG).unwrap();
            local.memory().word64(0).unwrap().load()
        };
        let number = local.memory().word64(8).unwrap();
        for _ in 0..ROUNDS {
            crate::common::until("the lock is never free", || swap(0, me) == 0);
            comm.wait(&window.iget(&local, 8..16, 2, 8).unwrap(), LONG).unwrap();
            number.store(number.load() + me);
            window.put(&local, 8..16, 2, 8).unwrap();
            // In order behind the put.
            assert_eq!(swap(me, 0), me, "the lock was ours");
        }
        comm.barrier(LONG).unwrap();
        if comm.rank() == 2 {
            assert_eq!(window.word64(8).unwrap().load(), ROUNDS * (1 + 2 + 3 + 4));
            assert_eq!(window.word64(0).unwrap().load(), 0);
        }
        window.destroy(LONG).unwrap();
    });
}

#[test]
fn words_that_are_not_aligned_are_refused() {
    job("words_that_are_not_aligned_are_refused", 2, |comm| {
        let (target, local) = (buffer(comm, 64), buffer(comm, 64));
        let peer = 1 - comm.rank();
        // The window begins at 4: its aligned words are at 4, 12, ...
        let window = comm.window(&target, 4..64, LONG).unwrap();
        for at in [0, 5, 8] {
            let operations = [
                Rma::fetch_add(1, peer, at, &local, 0),
                Rma::accumulate(1, peer, at),
                Rma::compare_swap(0, 1, peer, at, &local, 0),
                Rma::signal(peer, Signal::set(at, 1)),
                Rma::put(&local, 0..8, peer, 0).with_signal(Signal::add(at, 1)),
            ];
            for operation in &operations {
                let text = window.start(operation).unwrap_err().to_string();
                assert!(
                    text.contains(&format!("rank {peer}")) && text.contains("a multiple of 8"),
                    "{operation:?}: {text}"
                );
            }
            assert!(window.word64(at).is_err());
        }
        for result in [57, 64, usize::MAX] {
            let error = window.start(&Rma::fetch_add(1, peer, 4, &local, result)).unwrap_err();
            assert!(matches!(error, Error::Device(gdsync::Error::OutOfBounds { .. })), "{error}");
        }
        let add = window.start(&Rma::accumulate(7, peer, 12)).unwrap();
        comm.wait(&add, LONG).unwrap();
        assert_eq!(window.wait_signal(12, 7, Cond::Eq, LONG).unwrap(), 7);
        comm.barrier(LONG).unwrap();
        assert_eq!(target.memory().word64(16).unwrap().load(), 7);
        window.destroy(LONG).unwrap();
    });
}

/// Four threads of each rank use a window at once, for operations of all kinds.
#[test]
fn four_threads_share_a_window() {
    job("four_threads_share_a_window", 2, |comm| {
        const COUNT: usize = 200;
        let (me, peer) = (comm.rank(), 1 - comm.rank());
        let target = buffer(comm, 4 * COUNT * 64 + 8);
        let window = comm.window(&target, 0..4 * COUNT * 64 + 8, LONG).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (comm, window) = (comm.clone(), window.clone());
                scope.spawn(move || {
                    let local = buffer(&comm, 136);
                    for i in 0..COUNT {
                        let n = thread * COUNT + i;
                        local.memory().write(0, &message(me, peer, n, 64)).unwrap();
                        let put = window.iput(&local, 0..64, peer, n * 64).unwrap();
                        let get = window.start(&Rma::get(&local, 64..128, peer, n * 64)).unwrap();
                        let count = Rma::fetch_add(1, peer, 4 * COUNT * 64, &local, 128);
                        let count = window.start(&count).unwrap();
                        comm.wait_all([&put, &get, &count], LONG).unwrap();
                        assert!(bytes(&local, 64..128) == message(me, peer, n, 64), "{n}");
                    }
                    window.flush_all(LONG).unwrap();
                });
            }
        });
        comm.barrier(LONG).unwrap();
        assert_eq!(window.word64(4 * COUNT * 64).unwrap().load(), 4 * COUNT as u64);
        for n in 0..4 * COUNT {
            assert!(bytes(&target, n * 64..n * 64 + 64) == message(peer, me, n, 64), "{n}");
        }
        window.destroy(LONG).unwrap();
    });
}
