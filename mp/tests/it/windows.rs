//! Windows of the CPU: puts, gets, signals and atomics, and waits for words.

use std::thread;
use std::time::Duration;

use crate::common::{LONG, buffer, bytes, job_test, mapped, message, says, until};
use gdsync::memory::Memory;
use gdsync::stream::Cond;
use mp::collective::Collectives;
use mp::{Communicator, Error, MAX_INLINE, Rma, Signal, Status, wait_value32, wait_value64};

/// Every rank puts to every rank, itself included, and gets it back.
fn puts_and_gets(comm: &Communicator) {
    const ROOM: usize = 40_000;
    let (me, all) = (comm.rank(), comm.size());
    let (outbox, inbox) = (buffer(comm, all * ROOM), buffer(comm, all * ROOM));
    let target = buffer(comm, 64 + all * ROOM);
    // A window need not begin where its registration does.
    let window = comm.window(&target, 64..64 + all * ROOM, LONG).unwrap();
    let lengths = [0, 1, 3, 4, 8, 63, 64, 65, 1000, 4096, 4097, ROOM];
    for (n, len) in lengths.into_iter().enumerate() {
        let at = |rank: usize| rank * ROOM..rank * ROOM + len;
        let puts: Vec<_> = (0..all)
            .map(|peer| {
                outbox.memory().write(peer * ROOM, &message(me, peer, n, len)).unwrap();
                window.iput(&outbox, at(peer), peer, me * ROOM).unwrap()
            })
            .collect();
        for (peer, put) in puts.iter().enumerate() {
            assert_eq!(comm.wait(put, LONG).unwrap(), Status { rank: peer, bytes: len, tag: 0 });
            assert_eq!(put.test().unwrap(), Some(Status { rank: peer, bytes: len, tag: 0 }));
        }
        comm.barrier(LONG).unwrap();
        for peer in 0..all {
            let range = 64 + at(peer).start..64 + at(peer).end;
            assert!(bytes(&target, range) == message(peer, me, n, len), "{len} bytes from {peer}");
        }
        let get = |peer: usize| window.iget(&inbox, at(peer), peer, me * ROOM).unwrap();
        let gets: Vec<_> = (0..all).map(get).collect();
        for status in comm.wait_all(&gets, LONG).unwrap() {
            assert_eq!(status.bytes, len);
        }
        for peer in 0..all {
            assert!(bytes(&inbox, at(peer)) == message(me, peer, n, len), "{len} bytes back from {peer}");
        }
        comm.barrier(LONG).unwrap();
    }
    assert_eq!(bytes(&target, 0..64), [0; 64]);
    window.destroy(LONG).unwrap();
}

job_test!(ranks_put_and_get, [1, 2, 4], puts_and_gets);

// 16 MiB, and the end of a window beyond 4 GiB: only pages that are touched take memory.
job_test!(windows_may_be_large, 2, |comm| {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    for (size, len) in [(16 << 20, 16 << 20), (5 << 30, 4096)] {
        let (local, target, at) = (buffer(comm, len), buffer(comm, size), size - len);
        let window = comm.window(&target, 0..size, LONG).unwrap();
        assert_eq!(window.size_of(peer).unwrap(), size);
        local.memory().write(0, &message(me, peer, 0, len)).unwrap();
        window.put(&local, 0..len, peer, at).unwrap();
        window.flush(peer, LONG).unwrap();
        comm.barrier(LONG).unwrap();
        assert!(bytes(&target, at..size) == message(peer, me, 0, len));
        let wrapped = at % (4 << 30);
        assert!(wrapped == at || bytes(&target, wrapped..wrapped + 64) == [0; 64], "an offset of 32 bits");
        local.memory().fill(0, len, 0).unwrap();
        let get = window.iget(&local, 0..len, peer, at).unwrap();
        assert_eq!(comm.wait(&get, LONG).unwrap(), Status { rank: peer, bytes: len, tag: 0 });
        assert!(local.memory().to_vec() == message(me, peer, 0, len));
        let error = window.put(&local, 0..len, peer, at + 1).unwrap_err();
        assert!(matches!(error, Error::OutsideWindow { .. }), "{error}");
        window.destroy(LONG).unwrap();
    }
});

job_test!(windows_have_different_sizes, 4, |comm| {
    let local = buffer(comm, 256);
    let target = buffer(comm, 256);
    let window = comm.window(&target, 8..8 + 64 * comm.rank(), LONG).unwrap();
    for rank in 0..4 {
        let size = 64 * rank;
        assert_eq!(window.size_of(rank).unwrap(), size);
        let accesses = [(size, 1), (size + 1, 0), (0, size + 1), (usize::MAX, 1), (usize::MAX, 0), (1, size)];
        for (at, len) in accesses {
            let errors = [
                window.put(&local, 0..len, rank, at).unwrap_err(),
                window.iget(&local, 0..len, rank, at).map(drop).unwrap_err(),
            ];
            for (error, name) in errors.into_iter().zip(["put", "get"]) {
                match error {
                    Error::OutsideWindow { rank: r, operation, offset, len: l, size: s } => {
                        assert_eq!((r, operation, offset, l, s), (rank, name, at, len, size));
                    }
                    other => panic!("{other}"),
                }
            }
        }
        let word = window.start(&Rma::accumulate(1, rank, (size + 1).saturating_sub(8))).unwrap_err();
        let signal = window.start(&Rma::put(&local, 0..0, rank, 0).with_signal(Signal::set(size, 1)));
        for error in [word, signal.unwrap_err()] {
            assert!(matches!(error, Error::OutsideWindow { len: 8, .. }), "{error}");
            says(&error, &[&format!("rank {rank}")]);
        }
        // The last bytes, and none at the end, are inside.
        window.put(&local, 0..size, rank, 0).unwrap();
        window.put(&local, 0..0, rank, size).unwrap();
    }
    for rank in [4, usize::MAX] {
        let errors = [
            window.size_of(rank).map(drop),
            window.put(&local, 0..1, rank, 0),
            window.flush(rank, LONG),
            window.start(&Rma::signal(rank, Signal::set(0, 1))).map(drop),
        ];
        for error in errors.map(Result::unwrap_err) {
            assert!(matches!(error, Error::NoSuchRank { rank: r, size: 4 } if r == rank), "{error}");
        }
    }
    for range in [250..257, 257..257] {
        let error = window.put(&local, range, 3, 0).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Message { rank: 3, cause: gdsync::Error::OutOfBounds { size: 256, .. }, .. }
            ),
            "{error}"
        );
    }
    window.flush_all(LONG).unwrap();
    window.destroy(LONG).unwrap();
});

job_test!(vectored_puts_and_gets, 2, |comm| {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let (a, b, back) = (buffer(comm, 8192), buffer(comm, 8192), buffer(comm, 8192));
    let target = buffer(comm, 8192);
    let window = comm.window(&target, 0..8192, LONG).unwrap();
    for (n, count) in [0, 1, 2, 6, 7, 13, 40].into_iter().enumerate() {
        a.memory().write(0, &message(me, peer, n, 8192)).unwrap();
        b.memory().write(0, &message(peer, me, n + 100, 8192)).unwrap();
        let range = |i: usize| (i * 97) % 4000..(i * 97) % 4000 + (i * 31) % 150;
        let of = |i: usize| if i.is_multiple_of(3) { &a } else { &b };
        let pieces: Vec<_> = (0..count).map(|i| (of(i), range(i))).collect();
        let whole: Vec<u8> = (0..count).flat_map(|i| bytes(of(i), range(i))).collect();
        let put = window.start(&Rma::put_vectored(&pieces, peer, 16)).unwrap();
        assert_eq!(comm.wait(&put, LONG).unwrap(), Status { rank: peer, bytes: whole.len(), tag: 0 });
        // In reverse, so that each piece has another length.
        let places: Vec<_> = (0..count).rev().map(|i| (&back, 200 * i..200 * i + range(i).len())).collect();
        let get = window.start(&Rma::get_vectored(&places, peer, 16)).unwrap();
        assert_eq!(comm.wait(&get, LONG).unwrap(), Status { rank: peer, bytes: whole.len(), tag: 0 });
        let got: Vec<u8> = places.iter().flat_map(|(_, range)| bytes(&back, range.clone())).collect();
        assert!(got == whole, "{count} pieces");
    }
    let most = [(&a, 0..4096), (&b, 0..4096)];
    let error = window.start(&Rma::put_vectored(&most, peer, 1)).unwrap_err();
    assert!(matches!(error, Error::OutsideWindow { offset: 1, len: 8192, .. }), "{error}");
    window.destroy(LONG).unwrap();
});

job_test!(bytes_are_put_without_a_registration, 2, |comm| {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let target = buffer(comm, 128 * (MAX_INLINE + 1));
    let window = comm.window(&target, 0..target.memory().len(), LONG).unwrap();
    for len in 0..=MAX_INLINE {
        let mut bytes = message(me, peer, len, len);
        let _detached = window.start(&Rma::put_bytes(&bytes, peer, 128 * len)).unwrap();
        // They were copied.
        bytes.fill(0xee);
    }
    let error = window.start(&Rma::put_bytes(&[0; MAX_INLINE + 1], peer, 0)).unwrap_err();
    says(&error, &[&format!("rank {peer}"), "is 65: expected at most"]);
    window.flush_all(LONG).unwrap();
    comm.barrier(LONG).unwrap();
    for len in 0..=MAX_INLINE {
        let mut expected = message(peer, me, len, len);
        expected.resize(128, 0);
        assert!(bytes(&target, 128 * len..128 * (len + 1)) == expected, "{len} bytes");
    }
    window.destroy(LONG).unwrap();
});

// Each takes several work requests; all are tested after the queue has wrapped many times.
job_test!(requests_outlive_the_queue_depth, 2, Communicator::builder().depth(16), |comm| {
    let peer = 1 - comm.rank();
    let (local, target) = (buffer(comm, 64), buffer(comm, 128));
    let window = comm.window(&target, 0..128, LONG).unwrap();
    let pieces: Vec<_> = (0..40).map(|i| (&local, i..i + 1)).collect();
    let mut puts = Vec::new();
    for n in 0..300 {
        let put = Rma::put_vectored(&pieces[..n % 41], peer, 0).with_signal(Signal::set(48, n as u64));
        puts.push(window.start(&put).unwrap());
    }
    window.flush(peer, LONG).unwrap();
    for (n, put) in puts.iter().enumerate() {
        assert_eq!(put.test().unwrap(), Some(Status { rank: peer, bytes: n % 41, tag: 0 }), "put {n}");
    }
    assert_eq!(puts.len(), 300);
    // More than the queue can ever take.
    let pieces: Vec<_> = (0..64).flat_map(|_| [(&local, 0..1), (&local, 3..4)]).collect();
    let error = window.start(&Rma::put_vectored(&pieces, peer, 0)).unwrap_err();
    let is_refused = matches!(error, Error::Message { cause: gdsync::Error::InvalidArgument { .. }, .. });
    assert!(is_refused && error.to_string().contains("22"), "{error}");
    window.destroy(LONG).unwrap();
});

// Puts without a wait: the queues must not stay full, and nothing may be lost, also with the window dropped.
job_test!(puts_without_requests_arrive, 2, Communicator::builder().depth(64), |comm| {
    const COUNT: usize = 10_000;
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let (outbox, target) = (buffer(comm, COUNT), buffer(comm, COUNT));
    outbox.memory().write(0, &message(me, peer, 0, COUNT)).unwrap();
    // `_keep` keeps the key of the target alive; the window of the sender may go.
    let window = comm.window(&target, 0..COUNT, LONG).unwrap();
    let _keep = window.clone();
    for n in 0..COUNT {
        let n = (n * 7919) % COUNT;
        window.put(&outbox, n..n + 1, peer, n).unwrap();
    }
    drop((window, outbox));
    let expected = message(peer, me, 0, COUNT);
    until("puts are lost", || bytes(&target, 0..COUNT) == expected);
    comm.barrier(LONG).unwrap();
});

// The last clone of the window is dropped while its puts are under way.
job_test!(puts_of_a_dropped_window_arrive, 2, |comm| {
    const LEN: usize = 1 << 20;
    let target = buffer(comm, LEN);
    let window = comm.window(&target, 0..LEN, LONG).unwrap();
    if comm.rank() == 0 {
        let outbox = buffer(comm, 2 * LEN);
        outbox.memory().write(LEN, &message(0, 1, 1, LEN)).unwrap();
        for _ in 0..50 {
            window.put(&outbox, 0..LEN, 1, 0).unwrap();
        }
        window.put(&outbox, LEN..2 * LEN, 1, 0).unwrap();
        // `finalize` waits for them.
        drop((window, outbox));
    } else {
        let expected = message(0, 1, 1, LEN);
        until("the last put is lost", || bytes(&target, 0..LEN) == expected);
        // Rank 0 may not know yet that they arrived.
        std::mem::forget(window);
    }
});

job_test!(windows_come_and_go, 2, Communicator::builder().depth(16), |comm| {
    const SIZE: usize = 8 << 20;
    let peer = 1 - comm.rank();
    let round = |n: u64| {
        let target = comm.register(&Memory::alloc(SIZE).unwrap()).unwrap();
        let window = comm.window(&target, 0..SIZE, LONG).unwrap();
        let clone = window.clone();
        drop(window);
        let signalled = clone.start(&Rma::signal(peer, Signal::set(8, n))).unwrap();
        assert_eq!(clone.wait_signal(8, n, Cond::Eq, LONG).unwrap(), n);
        comm.wait(&signalled, LONG).unwrap();
        comm.barrier(LONG).unwrap();
    };
    (1..=5).for_each(round);
    let before = mapped();
    (6..=60).for_each(round);
    let grown = mapped().saturating_sub(before);
    assert!(grown < 20 * SIZE, "{grown} bytes are held");
});

// Data is visible when its signal is. The signal back allows overwriting it.
job_test!(signals_come_after_their_data, 2, |comm| {
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
            assert_eq!(comm.wait(&put, LONG).unwrap(), Status { rank: 1, bytes: len, tag: 0 });
            assert_eq!(window.wait_signal(8, n, Cond::Geq, LONG).unwrap(), n);
        } else {
            assert_eq!(window.wait_signal(0, n, Cond::Geq, LONG).unwrap(), n);
            assert!(bytes(&target, 16..16 + len) == message(0, 1, i, len), "message {n}");
            let _detached = window.start(&Rma::signal(peer, Signal::set(8, n))).unwrap();
        }
    }
    window.destroy(LONG).unwrap();
});

// A counter that all ranks add to, after their data.
job_test!(signals_add_up, 4, |comm| {
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

// Data in one window, the signal in another over the same connections.
job_test!(signals_go_to_a_window_beside, 2, |comm| {
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
        // Also ordered: a put through one window, a signal alone through the other.
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
    says(&window.start(&foreign).unwrap_err(), &["Window::beside", &format!("rank {peer}")]);
    signals.destroy(LONG).unwrap();
    window.destroy(LONG).unwrap();
});

// The same memory over the connections of another window: the signal of that one comes behind the put.
job_test!(a_window_goes_through_the_connections_of_another, 2, |comm| {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let (outbox, target, words) = (buffer(comm, 4096), buffer(comm, 4096), buffer(comm, 8));
    let (window, signals) = (comm.window(&target, 0..4096, LONG), comm.window(&words, 0..8, LONG));
    let (window, signals) = (window.unwrap(), signals.unwrap());
    let put = Rma::put(&outbox, 0..4096, peer, 0);
    let put = |signals| put.clone().with_signal(Signal::add(0, 1).of(signals));
    says(&window.start(&put(&signals)).unwrap_err(), &["Window::beside"]);
    let through = window.through(&signals).unwrap();
    for n in 1..=100_u64 {
        outbox.memory().write(0, &message(me, peer, usize::try_from(n).unwrap(), 4096)).unwrap();
        comm.wait(&through.start(&put(&signals)).unwrap(), LONG).unwrap();
        signals.wait_signal(0, n, Cond::Eq, LONG).unwrap();
        assert!(target.memory().to_vec() == message(peer, me, usize::try_from(n).unwrap(), 4096));
        comm.barrier(LONG).unwrap();
    }
    let other = Communicator::builder().timeout(LONG).init_over(comm.clone()).unwrap();
    let foreign = other.window(&buffer(&other, 8), 0..8, LONG).unwrap();
    says(&window.through(&foreign).unwrap_err(), &["of another communicator"]);
});

// After the signal the source may be overwritten.
job_test!(gets_signal_after_reading, 2, |comm| {
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

/// Each value is drawn by one rank.
fn draw(comm: &Communicator) {
    const DRAWS: u64 = 200;
    let all = comm.size() as u64;
    let (target, drawn) = (buffer(comm, 32), buffer(comm, 16));
    let window = comm.window(&target, 0..32, LONG).unwrap();
    let mut mine = Vec::new();
    for _ in 0..DRAWS {
        let draw = window.start(&Rma::fetch_add(1, 0, 8, &drawn, 8)).unwrap();
        assert_eq!(comm.wait(&draw, LONG).unwrap(), Status { rank: 0, bytes: 8, tag: 0 });
        mine.push(drawn.memory().word64(8).unwrap().load());
        // Without a result; words wrap.
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

job_test!(ranks_draw_numbers, [2, 4], draw);

// A lock of compare-and-swap guards a number that ranks read, change and write back.
job_test!(compare_and_swap_makes_a_lock, 4, |comm| {
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
        // Ordered after the put.
        assert_eq!(swap(me, 0), me, "the lock was ours");
    }
    comm.barrier(LONG).unwrap();
    if comm.rank() == 2 {
        assert_eq!(window.word64(8).unwrap().load(), ROUNDS * (1 + 2 + 3 + 4));
        assert_eq!(window.word64(0).unwrap().load(), 0);
    }
    window.destroy(LONG).unwrap();
});

job_test!(unaligned_words_are_refused, 2, |comm| {
    let (target, local) = (buffer(comm, 64), buffer(comm, 64));
    let peer = 1 - comm.rank();
    // The window starts at 4: its aligned words are at 4, 12, ...
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
        assert!(matches!(error, Error::Message { cause: gdsync::Error::OutOfBounds { .. }, .. }), "{error}");
    }
    let add = window.start(&Rma::accumulate(7, peer, 12)).unwrap();
    comm.wait(&add, LONG).unwrap();
    assert_eq!(window.wait_signal(12, 7, Cond::Eq, LONG).unwrap(), 7);
    comm.barrier(LONG).unwrap();
    assert_eq!(target.memory().word64(16).unwrap().load(), 7);
    window.destroy(LONG).unwrap();
});

// Four threads of each rank use a window at once, for operations of all kinds.
job_test!(four_threads_share_a_window, 2, |comm| {
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

const NOW: Duration = Duration::ZERO;

/// Word, operand, and whether the condition holds, as CUDA defines its stream waits.
const CASES: [(Cond, u32, u32, bool); 18] = [
    (Cond::Geq, 5, 5, true),
    (Cond::Geq, 6, 5, true),
    (Cond::Geq, 4, 5, false),
    // Cyclic.
    (Cond::Geq, 2, u32::MAX, true),
    (Cond::Geq, u32::MAX, 2, false),
    (Cond::Geq, 1 << 31, 0, false),
    (Cond::Eq, 5, 5, true),
    // LibMP used "greater" here.
    (Cond::Eq, 6, 5, false),
    (Cond::Eq, 4, 5, false),
    (Cond::And, 0b110, 0b010, true),
    (Cond::And, 0b101, 0b010, false),
    (Cond::And, 0, u32::MAX, false),
    (Cond::And, 1 << 31, u32::MAX, true),
    (Cond::Nor, 0, 0, true),
    (Cond::Nor, u32::MAX, 0, false),
    (Cond::Nor, u32::MAX - 1, 1, false),
    (Cond::Nor, u32::MAX - 3, 1, true),
    (Cond::Nor, 0, u32::MAX - 1, true),
];

fn wide(half: u32) -> u64 {
    u64::from(half) << 32 | u64::from(half)
}

#[test]
fn conditions_hold_as_on_streams() {
    let memory = Memory::alloc(16).unwrap();
    let (narrow, long) = (memory.word32(0).unwrap(), memory.word64(8).unwrap());
    for (cond, word, value, holds) in CASES {
        narrow.store(word);
        let found = wait_value32(&narrow, value, cond, NOW);
        assert_eq!(found.is_ok(), holds, "32: {word:#x} {cond:?} {value:#x}");
        if holds {
            assert_eq!(found.unwrap(), word);
        }
        long.store(wide(word));
        let found = wait_value64(&long, wide(value), cond, NOW);
        assert_eq!(found.is_ok(), holds, "64: {word:#x} {cond:?} {value:#x}");
    }
}

#[test]
fn deadlines_name_the_word() {
    let memory = Memory::alloc(16).unwrap();
    let (narrow, long) = (memory.word32(0).unwrap(), memory.word64(8).unwrap());
    narrow.store(0x17);
    let text = wait_value32(&narrow, 0x18, Cond::Geq, Duration::from_millis(5)).unwrap_err().to_string();
    let addr = format!("{:#x}", narrow.addr());
    says(&text, &[&addr, "Geq 0x18 (it is 0x17)", "5 ms"]);
    let error = wait_value64(&long, 1, Cond::Eq, NOW).unwrap_err();
    assert!(matches!(error, Error::Deadline { after: NOW, .. }), "{error}");
}

/// Also with an endless timeout.
#[test]
fn conditions_that_no_word_satisfies_are_refused() {
    let memory = Memory::alloc(16).unwrap();
    let (narrow, long) = (memory.word32(0).unwrap(), memory.word64(8).unwrap());
    let errors = [
        wait_value32(&narrow, 0, Cond::And, Duration::MAX).map(drop),
        wait_value32(&narrow, u32::MAX, Cond::Nor, Duration::MAX).map(drop),
        wait_value64(&long, 0, Cond::And, Duration::MAX).map(drop),
        wait_value64(&long, u64::MAX, Cond::Nor, Duration::MAX).map(drop),
    ];
    for error in errors.map(Result::unwrap_err) {
        says(&error, &["a condition that some word satisfies"]);
    }
    assert_eq!(wait_value64(&long, u64::from(u32::MAX), Cond::Nor, NOW).unwrap(), 0);
}

/// Data written before the word is visible after it, however long the other thread pauses.
#[test]
fn writes_of_another_thread_are_seen() {
    let memory = Memory::alloc(64).unwrap();
    let [ping, pong] = [0, 8].map(|at| memory.word64(at).unwrap());
    let (data, echo) = (memory.word32(16).unwrap(), memory.word32(20).unwrap());
    thread::scope(|scope| {
        scope.spawn(|| {
            for n in 1..=200_u32 {
                assert_eq!(wait_value64(&ping, n.into(), Cond::Geq, LONG).unwrap(), n.into());
                echo.store(data.load() + 1);
                if n % 50 == 0 {
                    // Long enough that the other side sleeps.
                    thread::sleep(Duration::from_millis(2));
                }
                pong.store(n.into());
            }
        });
        for n in 1..=200_u32 {
            data.store(n);
            ping.store(n.into());
            wait_value64(&pong, n.into(), Cond::Eq, LONG).unwrap();
            assert_eq!(wait_value32(&echo, n + 1, Cond::Eq, NOW).unwrap(), n + 1);
        }
    });
}

job_test!(windows_refuse_registrations_of_another_communicator, 2, |comm| {
    let other = Communicator::builder().timeout(LONG).init_over(comm.clone()).unwrap();
    let (own, foreign) = (buffer(comm, 64), buffer(&other, 64));
    says(
        &comm.window(&foreign, 0..8, LONG).unwrap_err(),
        &["the buffer of the window is registered with another communicator"],
    );
    says(
        &comm.window(&own, 1..66, LONG).unwrap_err(),
        &["the window is 65 bytes at offset 1 of a buffer of 64 bytes: expected bytes inside the buffer"],
    );
    let words = ["is registered with another communicator"];
    let window = comm.window(&own, 0..64, LONG).unwrap();
    says(&window.beside(&foreign, 0..8, LONG).unwrap_err(), &words);
    says(&window.put(&foreign, 0..8, 1 - comm.rank(), 0).unwrap_err(), &words);
    let error = window.word64(12).unwrap_err();
    says(&error, &["offset of the word in its window is 12", "a multiple of 8 bytes"]);
    window.word32(12).unwrap();
});

job_test!(windows_and_collectives_refuse_operations_after_finalize, 2, |comm| {
    let other = Communicator::builder().timeout(LONG).init_over(comm.clone()).unwrap();
    let memory = buffer(&other, 64);
    let window = other.window(&memory, 0..64, LONG).unwrap();
    let all = Collectives::new(&other, LONG).unwrap();
    other.finalize(LONG).unwrap();
    says(&all.barrier(LONG).unwrap_err(), &["a collective is not supported", "after Communicator::finalize"]);
    says(&all.destroy(LONG).unwrap_err(), &["after Communicator::finalize; finalize last"]);
    let error = window.put(&memory, 0..8, 1 - comm.rank(), 8).unwrap_err();
    says(&error, &["put to rank", "after Communicator::finalize"]);
    let error = window.destroy(LONG).unwrap_err();
    says(&error, &["the end of a window", "after Communicator::finalize; finalize last"]);
});
