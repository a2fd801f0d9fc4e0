//! Windows: memory of other ranks, read and written by themselves.

use crate::common::{LONG, buffer, bytes, job, job_with, message, until};
use gdsync::memory::Memory;
use gdsync::stream::Cond;
use mp::{Communicator, Error, MAX_INLINE, Rma, Signal, Status};

/// Every rank puts to every rank, itself too, and gets it back.
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
            assert_eq!(comm.wait(put, LONG).unwrap(), Status { rank: peer, bytes: len });
            assert_eq!(put.test().unwrap(), Some(Status { rank: peer, bytes: len }));
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

#[test]
fn a_rank_alone_puts_and_gets() {
    job("a_rank_alone_puts_and_gets", 1, puts_and_gets);
}

#[test]
fn two_ranks_put_and_get() {
    job("two_ranks_put_and_get", 2, puts_and_gets);
}

#[test]
fn four_ranks_put_and_get() {
    job("four_ranks_put_and_get", 4, puts_and_gets);
}

#[test]
fn sixteen_mebibytes_are_put_and_got() {
    const SIZE: usize = 16 << 20;
    job("sixteen_mebibytes_are_put_and_got", 2, |comm| {
        let (me, peer) = (comm.rank(), 1 - comm.rank());
        let (local, target) = (buffer(comm, SIZE), buffer(comm, SIZE));
        let window = comm.window(&target, 0..SIZE, LONG).unwrap();
        local.memory().write(0, &message(me, peer, 0, SIZE)).unwrap();
        window.put(&local, 0..SIZE, peer, 0).unwrap();
        window.flush(peer, LONG).unwrap();
        comm.barrier(LONG).unwrap();
        assert!(target.memory().to_vec() == message(peer, me, 0, SIZE));
        local.memory().fill(0, SIZE, 0).unwrap();
        let get = window.iget(&local, 0..SIZE, peer, 0).unwrap();
        assert_eq!(comm.wait(&get, LONG).unwrap(), Status { rank: peer, bytes: SIZE });
        assert!(local.memory().to_vec() == message(me, peer, 0, SIZE));
        window.destroy(LONG).unwrap();
    });
}

/// Only pages that are touched take memory.
#[test]
fn windows_may_be_larger_than_four_gibibytes() {
    const SIZE: usize = 5 << 30;
    job("windows_may_be_larger_than_four_gibibytes", 2, |comm| {
        let (me, peer) = (comm.rank(), 1 - comm.rank());
        let (local, target) = (buffer(comm, 4096), buffer(comm, SIZE));
        let window = comm.window(&target, 0..SIZE, LONG).unwrap();
        assert_eq!(window.size_of(peer).unwrap(), SIZE);
        local.memory().write(0, &message(me, peer, 0, 4096)).unwrap();
        let at = SIZE - 4096;
        window.put(&local, 0..4096, peer, at).unwrap();
        window.flush(peer, LONG).unwrap();
        comm.barrier(LONG).unwrap();
        assert!(bytes(&target, at..SIZE) == message(peer, me, 0, 4096));
        assert_eq!(bytes(&target, at - (4 << 30)..at - (4 << 30) + 64), [0; 64]);
        let error = window.put(&local, 0..4096, peer, at + 1).unwrap_err();
        assert!(matches!(error, Error::OutsideWindow { size: SIZE, .. }), "{error}");
        window.destroy(LONG).unwrap();
    });
}

#[test]
fn ranks_have_windows_of_their_own_sizes() {
    job("ranks_have_windows_of_their_own_sizes", 4, |comm| {
        let local = buffer(comm, 256);
        let target = buffer(comm, 256);
        let window = comm.window(&target, 8..8 + 64 * comm.rank(), LONG).unwrap();
        for rank in 0..4 {
            let size = 64 * rank;
            assert_eq!(window.size_of(rank).unwrap(), size);
            let accesses =
                [(size, 1), (size + 1, 0), (0, size + 1), (usize::MAX, 1), (usize::MAX, 0), (1, size)];
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
                assert!(error.to_string().contains(&format!("rank {rank}")), "{error}");
            }
            // What fits does, and nothing is an end too.
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
            assert!(matches!(error, Error::Device(gdsync::Error::OutOfBounds { size: 256, .. })), "{error}");
        }
        window.flush_all(LONG).unwrap();
        window.destroy(LONG).unwrap();
    });
}

#[test]
fn pieces_are_put_and_got_in_one_go() {
    job("pieces_are_put_and_got_in_one_go", 2, |comm| {
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
            assert_eq!(comm.wait(&put, LONG).unwrap(), Status { rank: peer, bytes: whole.len() });
            // The other way round, so that each piece has another length.
            let places: Vec<_> =
                (0..count).rev().map(|i| (&back, 200 * i..200 * i + range(i).len())).collect();
            let get = window.start(&Rma::get_vectored(&places, peer, 16)).unwrap();
            assert_eq!(comm.wait(&get, LONG).unwrap(), Status { rank: peer, bytes: whole.len() });
            let got: Vec<u8> = places.iter().flat_map(|(_, range)| bytes(&back, range.clone())).collect();
            assert!(got == whole, "{count} pieces");
        }
        let most = [(&a, 0..4096), (&b, 0..4096)];
        let error = window.start(&Rma::put_vectored(&most, peer, 1)).unwrap_err();
        assert!(matches!(error, Error::OutsideWindow { offset: 1, len: 8192, .. }), "{error}");
        window.destroy(LONG).unwrap();
    });
}

#[test]
fn bytes_are_put_without_a_registration() {
    job("bytes_are_put_without_a_registration", 2, |comm| {
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
        let text = error.to_string();
        assert!(text.contains(&format!("rank {peer}")) && text.contains("is 65: expected at most"), "{text}");
        window.flush_all(LONG).unwrap();
        comm.barrier(LONG).unwrap();
        for len in 0..=MAX_INLINE {
            let mut expected = message(peer, me, len, len);
            expected.resize(128, 0);
            assert!(bytes(&target, 128 * len..128 * (len + 1)) == expected, "{len} bytes");
        }
        window.destroy(LONG).unwrap();
    });
}

/// Each takes several places in the queue; all are asked for after it went round many times.
#[test]
fn requests_outlive_the_depth_of_the_queues() {
    let builder = Communicator::builder().depth(16);
    job_with("requests_outlive_the_depth_of_the_queues", 2, builder, |comm| {
        let peer = 1 - comm.rank();
        let (local, target) = (buffer(comm, 64), buffer(comm, 128));
        let window = comm.window(&target, 0..128, LONG).unwrap();
        let pieces: Vec<_> = (0..40).map(|i| (&local, i..i + 1)).collect();
        let mut puts = Vec::new();
        for n in 0..300 {
            let put = Rma::put_vectored(&pieces[..n % 41], peer, 0).with_signal(Signal::set(48, n as u64));
            until("the queue stays full", || match window.start(&put) {
                Ok(put) => {
                    puts.push(put);
                    true
                }
                Err(Error::Message { cause: gdsync::Error::QueueFull { .. }, .. }) => false,
                Err(other) => panic!("{other}"),
            });
        }
        window.flush(peer, LONG).unwrap();
        for (n, put) in puts.iter().enumerate() {
            assert_eq!(put.test().unwrap(), Some(Status { rank: peer, bytes: n % 41 }), "put {n}");
        }
        assert_eq!(puts.len(), 300);
        // More than the queue can ever take.
        let pieces: Vec<_> = (0..64).flat_map(|_| [(&local, 0..1), (&local, 3..4)]).collect();
        let error = window.start(&Rma::put_vectored(&pieces, peer, 0)).unwrap_err();
        let full = matches!(
            error,
            Error::Message { cause: gdsync::Error::QueueFull { outstanding: 22, depth: 16, .. }, .. }
        );
        assert!(full, "{error}");
        window.destroy(LONG).unwrap();
    });
}

/// Nobody waits for any of them; queues must not fill up, and nothing may be lost, not even with the window.
#[test]
fn puts_that_nobody_waits_for_arrive() {
    let builder = Communicator::builder().depth(64);
    job_with("puts_that_nobody_waits_for_arrive", 2, builder, |comm| {
        const COUNT: usize = 10_000;
        let (me, peer) = (comm.rank(), 1 - comm.rank());
        let (outbox, target) = (buffer(comm, COUNT), buffer(comm, COUNT));
        outbox.memory().write(0, &message(me, peer, 0, COUNT)).unwrap();
        // The key of this one lives as long as `_keep`, the window of the sender need not.
        let window = comm.window(&target, 0..COUNT, LONG).unwrap();
        let _keep = window.clone();
        for n in 0..COUNT {
            let n = (n * 7919) % COUNT;
            while let Err(error) = window.put(&outbox, n..n + 1, peer, n) {
                let full = matches!(error, Error::Message { cause: gdsync::Error::QueueFull { .. }, .. });
                assert!(full, "{error}");
            }
        }
        drop((window, outbox));
        let expected = message(peer, me, 0, COUNT);
        until("puts are lost", || bytes(&target, 0..COUNT) == expected);
        comm.barrier(LONG).unwrap();
    });
}

/// The last clone of the window is dropped while its puts are under way.
#[test]
fn puts_of_a_dropped_window_arrive() {
    job("puts_of_a_dropped_window_arrive", 2, |comm| {
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
}

/// Bytes of address space this process has mapped.
fn mapped() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    4096 * pages.split(' ').next().unwrap().parse::<usize>().unwrap()
}

#[test]
fn windows_come_and_go() {
    const SIZE: usize = 8 << 20;
    job_with("windows_come_and_go", 2, Communicator::builder().depth(16), |comm| {
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
}
