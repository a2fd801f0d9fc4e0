//! Windows of streams, and failures of windows: collective calls that disagree, dropped windows, dead ranks.

use std::process::exit;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::{
    DONE, LONG, buffer, bytes, ends_well, failed, job_test, job_with, kill, message, says, stream, until,
};
use gdsync::cuda::Gpu;
use gdsync::memory::Memory;
use gdsync::mlx5::Syndrome;
use gdsync::stream::{Batch, Cond, CudaStreamConfig, HostStreamConfig, Stream};
use mp::{Communicator, Error, Rma, Signal, Status};

/// One stream per rank puts with signals to all, itself included, and waits for theirs.
fn exchange(comm: &Communicator) {
    const LEN: usize = 5000;
    let (me, all) = (comm.rank(), comm.size());
    let (outbox, target) = (buffer(comm, all * LEN), buffer(comm, 64 * all + all * LEN));
    let window = comm.window(&target, 0..target.memory().len(), LONG).unwrap();
    let s = stream("exchange");
    let right = Arc::new(AtomicUsize::new(0));
    for n in 1..=30 {
        let len = move |from: usize| 1 + (n * 311 + from) % LEN;
        let mut puts = Vec::new();
        for peer in 0..all {
            // In stream order: the put takes what the buffer holds when the stream sends it.
            let memory = outbox.memory().clone();
            s.host_fn(move || memory.write(peer * LEN, &message(me, peer, n, len(me))).unwrap()).unwrap();
            let put = Rma::put(&outbox, peer * LEN..peer * LEN + len(me), peer, 64 * all + me * LEN);
            let put = put.with_signal(Signal::set(64 * me, n as u64));
            puts.push(window.start_on_stream(&s, &put).unwrap());
        }
        for peer in 0..all {
            window.wait_signal_on_stream(&s, 64 * peer, n as u64, Cond::Geq).unwrap();
            let (memory, right) = (target.memory().clone(), right.clone());
            s.host_fn(move || {
                let mut came = vec![0; len(peer)];
                memory.read(64 * all + peer * LEN, &mut came).unwrap();
                right.fetch_add(usize::from(came == message(peer, me, n, len(peer))), Ordering::Relaxed);
            })
            .unwrap();
        }
        comm.wait_all_on_stream(&s, &puts).unwrap();
        s.synchronize(LONG).unwrap();
        for (peer, put) in puts.iter().enumerate() {
            assert_eq!(put.test().unwrap(), Some(Status { rank: peer, bytes: len(me), tag: 0 }));
        }
        comm.barrier(LONG).unwrap();
    }
    assert_eq!(right.load(Ordering::Relaxed), 30 * all);
    window.destroy(LONG).unwrap();
}

// Each launch puts what the buffer holds, and signals again.
job_test!(graphs_repeat_puts_and_signals, 2, |comm| {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let (outbox, target) = (buffer(comm, 100), buffer(comm, 64 + 100));
    let window = comm.window(&target, 0..164, LONG).unwrap();
    let s = stream("graph");
    let graph = s.capture(|s| {
        let put = Rma::put(&outbox, 0..100, peer, 64).with_signal(Signal::add(0, 1));
        let put = window.start_on_stream(s, &put).unwrap();
        comm.wait_on_stream(s, &put).unwrap();
        gdsync::Result::Ok(())
    });
    let graph = graph.unwrap();
    for n in 1..=30 {
        outbox.memory().write(0, &message(me, peer, n, 100)).unwrap();
        graph.launch(&s).unwrap();
        window.wait_signal_on_stream(&s, 0, n as u64, Cond::Eq).unwrap();
        s.synchronize(LONG).unwrap();
        assert_eq!(bytes(&target, 64..164), message(peer, me, n, 100), "launch {n}");
        comm.barrier(LONG).unwrap();
    }
    window.destroy(LONG).unwrap();
});

job_test!(streams_put_with_signals, [2, 4], exchange);

// Operations start in stream order, and windows do not block each other.
job_test!(puts_and_gets_are_in_stream_order, 2, |comm| {
    let (local, target) = (buffer(comm, 64), buffer(comm, 64));
    let window = comm.window(&target, 0..64, LONG).unwrap();
    let other = comm.window(&target, 0..64, LONG).unwrap();
    if comm.rank() == 1 {
        target.memory().write(32, b"of the target").unwrap();
        comm.barrier(LONG).unwrap();
        comm.barrier(LONG).unwrap();
        assert_eq!(bytes(&target, 0..8), [0; 8]);
        assert_eq!(bytes(&target, 16..24), b"overtake");
        comm.barrier(LONG).unwrap();
        comm.barrier(LONG).unwrap();
        assert_eq!(bytes(&target, 0..8), b"released");
        return window.destroy(LONG).unwrap();
    }
    let s = stream("held");
    let word = local.memory().word32(56).unwrap();
    comm.barrier(LONG).unwrap();
    s.wait_value32(&word, 1, Cond::Eq).unwrap();
    let put = window.start_on_stream(&s, &Rma::put(&local, 0..8, 1, 0)).unwrap();
    let get = window.start_on_stream(&s, &Rma::get(&local, 16..29, 1, 32)).unwrap();
    comm.wait_on_stream(&s, &get).unwrap();
    // The queue pair belongs to the stream now; that of another window does not.
    let error = window.put(&local, 0..8, 1, 8).unwrap_err();
    assert!(
        matches!(error, Error::Message { rank: 1, cause: gdsync::Error::Busy { .. }, .. }),
        "the CPU may not overtake the stream: {error}"
    );
    let _detached = other.start(&Rma::put_bytes(b"overtake", 1, 16)).unwrap();
    other.flush(1, LONG).unwrap();
    comm.barrier(LONG).unwrap();
    comm.barrier(LONG).unwrap();
    assert_eq!((put.test().unwrap(), get.test().unwrap()), (None, None));
    local.memory().write(0, b"released").unwrap();
    word.store(1);
    window.flush(1, LONG).unwrap();
    assert_eq!(put.test().unwrap(), Some(Status { rank: 1, bytes: 8, tag: 0 }));
    assert_eq!(get.test().unwrap(), Some(Status { rank: 1, bytes: 13, tag: 0 }));
    assert_eq!(bytes(&local, 16..29), b"of the target");
    s.synchronize(LONG).unwrap();
    comm.barrier(LONG).unwrap();
    window.destroy(LONG).unwrap();
});

/// Operations of all kinds, prepared together, then started one by one or all at once.
fn prepared(comm: &Communicator, at_once: bool) {
    const AHEAD: usize = 20;
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let (outbox, target) = (buffer(comm, AHEAD * 100), buffer(comm, 32 + AHEAD * 100));
    let (back, drawn) = (buffer(comm, AHEAD * 100), buffer(comm, AHEAD * 8));
    let window = comm.window(&target, 0..32 + AHEAD * 100, LONG).unwrap();
    let s = stream("prepared");
    for round in 0..5 {
        let mut batches: Vec<Batch> = (0..if at_once { 1 } else { AHEAD }).map(|_| Batch::new()).collect();
        let mut requests = Vec::new();
        let done = |i: usize| (round * AHEAD + i + 1) as u64;
        for i in 0..AHEAD {
            outbox.memory().write(i * 100, &message(me, peer, round * AHEAD + i, 100)).unwrap();
            let batch = &mut batches[if at_once { 0 } else { i }];
            let range = i * 100..(i + 1) * 100;
            let operations = [
                Rma::put(&outbox, range.clone(), peer, 32 + i * 100).with_signal(Signal::set(0, done(i))),
                Rma::get(&back, range, peer, 32 + i * 100),
                Rma::fetch_add(3, peer, 8, &drawn, i * 8).fence(),
            ];
            for operation in &operations {
                requests.push(window.start_in_batch(batch, operation).unwrap());
            }
            comm.wait_in_batch(batch, requests.last().unwrap()).unwrap();
            window.wait_signal_in_batch(batch, 0, done(i), Cond::Geq).unwrap();
        }
        assert!(requests.iter().all(|request| request.test().unwrap().is_none()), "nothing leaves before");
        // A flush does not wait for what is only prepared.
        window.flush(peer, LONG).unwrap();
        comm.barrier(LONG).unwrap();
        batches.iter_mut().for_each(|batch| s.submit(batch).unwrap());
        s.synchronize(LONG).unwrap();
        for (n, status) in comm.wait_all(&requests, LONG).unwrap().into_iter().enumerate() {
            assert_eq!(status, Status { rank: peer, bytes: if n % 3 == 2 { 8 } else { 100 }, tag: 0 });
        }
        assert!(back.memory().to_vec() == outbox.memory().to_vec(), "round {round}");
        for i in 0..AHEAD {
            let expected = message(peer, me, round * AHEAD + i, 100);
            assert!(bytes(&target, 32 + i * 100..32 + (i + 1) * 100) == expected, "{round}, {i}");
            assert_eq!(drawn.memory().word64(i * 8).unwrap().load(), 3 * (done(i) - 1));
        }
        comm.barrier(LONG).unwrap();
    }
    window.destroy(LONG).unwrap();
}

job_test!(prepared_operations_start_one_by_one, 2, |comm| prepared(comm, false));

job_test!(prepared_operations_start_all_at_once, 2, |comm| prepared(comm, true));

// Operations of a dropped batch do not run, and take no room.
job_test!(dropped_batches_do_no_harm, 2, Communicator::builder().depth(16), |comm| {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let (outbox, target) = (buffer(comm, 64), buffer(comm, 64));
    let window = comm.window(&target, 0..64, LONG).unwrap();
    let s = stream("dropped");
    for n in 1..=100_u64 {
        outbox.memory().write(0, &message(me, peer, usize::try_from(n).unwrap(), 48)).unwrap();
        let mut dropped = Batch::new();
        let put = window.start_in_batch(&mut dropped, &Rma::put(&outbox, 0..64, peer, 0)).unwrap();
        comm.wait_in_batch(&mut dropped, &put).unwrap();
        drop(dropped);
        window.flush(peer, LONG).unwrap();
        if n % 10 == 0 {
            let put = Rma::put(&outbox, 0..48, peer, 8).with_signal(Signal::set(56, n));
            let put = window.start_on_stream(&s, &put).unwrap();
            window.wait_signal_on_stream(&s, 56, n, Cond::Eq).unwrap();
            s.synchronize(LONG).unwrap();
            comm.wait(&put, LONG).unwrap();
            assert_eq!(bytes(&target, 0..8), [0; 8]);
            assert!(bytes(&target, 8..56) == message(peer, me, usize::try_from(n).unwrap(), 48));
            comm.barrier(LONG).unwrap();
        }
    }
    window.destroy(LONG).unwrap();
});

job_test!(streams_flush_a_rank, 2, |comm| {
    let (me, peer) = (comm.rank(), 1 - comm.rank());
    let (outbox, target) = (buffer(comm, 1 << 20), buffer(comm, 1 << 20));
    let window = comm.window(&target, 0..1 << 20, LONG).unwrap();
    let s = stream("flushing");
    let after = Arc::new(AtomicUsize::new(0));
    for n in 0..10 {
        outbox.memory().write(0, &message(me, peer, n, 1 << 20)).unwrap();
        let puts: Vec<_> = (0..4)
            .map(|i| {
                window.start_on_stream(&s, &Rma::put(&outbox, i << 18..(i + 1) << 18, peer, i << 18)).unwrap()
            })
            .collect();
        window.flush_on_stream(&s, peer).unwrap();
        // And again, with nothing to wait for.
        window.flush_on_stream(&s, peer).unwrap();
        let after = after.clone();
        s.host_fn(move || {
            let done = puts.iter().filter(|put| matches!(put.test(), Ok(Some(_)))).count();
            after.fetch_add(done, Ordering::Relaxed);
        })
        .unwrap();
        s.synchronize(LONG).unwrap();
        comm.barrier(LONG).unwrap();
        assert!(target.memory().to_vec() == message(peer, me, n, 1 << 20));
        comm.barrier(LONG).unwrap();
    }
    assert_eq!(after.load(Ordering::Relaxed), 40, "all are complete when the stream goes on");
    // Only one stream can wait for them; another gets an error.
    let (word, other) = (Memory::alloc(4).unwrap().word32(0).unwrap(), stream("second"));
    s.wait_value32(&word, 1, Cond::Eq).unwrap();
    let _detached = window.start_on_stream(&s, &Rma::put(&outbox, 0..8, peer, 0)).unwrap();
    window.flush_on_stream(&s, peer).unwrap();
    let error = window.flush_on_stream(&other, peer).unwrap_err();
    assert!(
        matches!(error, Error::Message { rank, cause: gdsync::Error::Busy { .. }, .. } if rank == peer),
        "{error}"
    );
    word.store(1);
    s.synchronize(LONG).unwrap();
    window.flush_on_stream(&other, peer).unwrap();
    other.synchronize(LONG).unwrap();
    let error = window.flush_on_stream(&s, 2).unwrap_err();
    assert!(matches!(error, Error::NoSuchRank { rank: 2, size: 2 }), "{error}");
    window.destroy(LONG).unwrap();
});

// Two streams put to one rank at the same time, each through a window of its own.
job_test!(streams_with_own_windows_are_independent, 2, |comm| {
    const COUNT: u64 = 100;
    let peer = 1 - comm.rank();
    let target = buffer(comm, 16);
    let windows = [(); 2].map(|()| comm.window(&target, 0..16, LONG).unwrap());
    std::thread::scope(|scope| {
        for (i, window) in windows.iter().enumerate() {
            scope.spawn(move || {
                let s = stream("own");
                for n in 1..=COUNT {
                    let signal = Rma::signal(peer, Signal::set(8 * i, n));
                    let _detached = window.start_on_stream(&s, &signal).unwrap();
                    window.wait_signal_on_stream(&s, 8 * i, n, Cond::Geq).unwrap();
                    s.synchronize(LONG).unwrap();
                }
            });
        }
    });
    until("a signal is lost", || {
        windows.iter().enumerate().all(|(i, window)| window.word64(8 * i).unwrap().load() == COUNT)
    });
    windows.into_iter().for_each(|window| window.destroy(LONG).unwrap());
});

/// Windows in GPU memory, signals in host memory beside them, both streams on the GPU.
#[test]
fn a_gpu_puts_and_waits() {
    const NAME: &str = "a_gpu_puts_and_waits";
    let gpu = match Gpu::count().and_then(|_| Gpu::open(0)) {
        Ok(gpu) => gpu,
        Err(reason) => return eprintln!("skipped: {reason}"),
    };
    job_with(NAME, 2, Communicator::builder().gpu(&gpu), |comm| {
        const LEN: usize = 1 << 20;
        let (me, peer) = (comm.rank(), 1 - comm.rank());
        let [outbox, target] = [(); 2].map(|()| comm.register(&gpu.alloc(LEN).unwrap()).unwrap());
        let words = comm.register(&Memory::alloc(64).unwrap()).unwrap();
        let window = comm.window(&target, 0..LEN, LONG).unwrap();
        let signals = window.beside(&words, 0..64, LONG).unwrap();
        let config = CudaStreamConfig { name: "puts".into(), ..CudaStreamConfig::default() };
        let s = Stream::cuda(&gpu, config).unwrap();
        for n in 1..=50_u64 {
            let (i, len) = (usize::try_from(n).unwrap(), LEN >> (n % 20));
            outbox.memory().write(0, &message(me, peer, i, len)).unwrap();
            outbox.memory().flush().unwrap();
            let put = Rma::put(&outbox, 0..len, peer, 0).with_signal(Signal::set(0, n).of(&signals));
            let put = window.start_on_stream(&s, &put).unwrap();
            signals.wait_signal_on_stream(&s, 0, n, Cond::Geq).unwrap();
            comm.wait_on_stream(&s, &put).unwrap();
            s.synchronize(LONG).unwrap();
            assert!(bytes(&target, 0..len) == message(peer, me, i, len), "round {n}");
            comm.barrier(LONG).unwrap();
            let get = window.start_on_stream(&s, &Rma::get(&outbox, 0..len, peer, 0)).unwrap();
            comm.wait_on_stream(&s, &get).unwrap();
            s.synchronize(LONG).unwrap();
            assert!(bytes(&outbox, 0..len) == message(me, peer, i, len), "round {n}, back");
            comm.barrier(LONG).unwrap();
        }
        signals.destroy(LONG).unwrap();
        window.destroy(LONG).unwrap();
    });
}

// The rank with the bad request gets the reason, the others its rank; and the next window works.
job_test!(ranks_that_cannot_make_a_window_are_named, 3, |comm| {
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

// The window of rank 1 is dropped, and its key dead: operations on it fail, and no others.
job_test!(operations_on_dropped_windows_fail, 3, |comm| {
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
        // Without a wait; the next calls report it.
        let gone = [Syndrome::REM_ACCESS_ERR];
        window.put(&local, 0..8, 1, 0).unwrap();
        failed(&window.flush(1, LONG).unwrap_err(), 1, &gone);
        failed(&window.put(&local, 0..8, 1, 0).unwrap_err(), 1, &gone);
        failed(&window.start_on_stream(&s, &Rma::accumulate(1, 1, 0)).unwrap_err(), 1, &gone);
        failed(&window.flush_on_stream(&s, 1).unwrap_err(), 1, &gone);
        failed(&window.flush_all(LONG).unwrap_err(), 1, &gone);
        // The connection is shared.
        failed(&beside.put(&local, 0..8, 1, 0).unwrap_err(), 1, &gone);
        // Other ranks and other windows work.
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
    // All failures are reported, so that `finalize` succeeds.
    comm.barrier(LONG).unwrap();
});

// Rank 0 gives up rank 1: its operations there end, also on a stream, and no others.
job_test!(given_up_ranks_end_operations, 3, |comm| {
    let (local, target) = (buffer(comm, 64), buffer(comm, 64));
    let window = comm.window(&target, 0..64, LONG).unwrap();
    comm.barrier(LONG).unwrap();
    if comm.rank() == 0 {
        let (s, word) = (stream("held"), local.memory().word32(32).unwrap());
        s.wait_value32(&word, 1, Cond::Eq).unwrap();
        let put = window.start_on_stream(&s, &Rma::put(&local, 0..8, 1, 0)).unwrap();
        window.flush_on_stream(&s, 1).unwrap();
        comm.give_up(1).unwrap();
        let error = comm.wait(&put, LONG).unwrap_err();
        assert!(matches!(error, Error::Message { rank: 1, .. }), "{error}");
        let error = window.put(&local, 0..8, 1, 0).unwrap_err();
        says(&error, &["rank 1", &gdsync::Error::GivenUp.to_string()]);
        word.store(1);
        assert!(s.synchronize(LONG).is_err());
        window.put(&local, 0..8, 2, 0).unwrap();
        window.flush(2, LONG).unwrap();
    }
    comm.barrier(LONG).unwrap();
    assert_eq!(bytes(&target, 0..8), [0; 8]);
});

// No call asks for the failed put until the end.
job_test!(unreported_failures_are_reported_by_finalize, 2, |comm| {
    let (target, kept) = (buffer(comm, 64), buffer(comm, 64));
    let window = comm.window(&target, 0..64, LONG).unwrap();
    // Keeps the connections.
    let _beside = window.beside(&kept, 0..64, LONG).unwrap();
    if comm.rank() == 1 {
        drop((window, target));
        comm.barrier(LONG).unwrap();
        return comm.clone().finalize(LONG).unwrap();
    }
    comm.barrier(LONG).unwrap();
    window.put(&target, 0..8, 1, 0).unwrap();
    drop(window);
    // It meets the other rank, and reports the failure.
    let error = comm.clone().finalize(LONG).unwrap_err();
    failed(&error, 1, &[Syndrome::REM_ACCESS_ERR]);
});

job_test!(waits_for_signals_time_out, 1, |comm| {
    let target = buffer(comm, 64);
    let window = comm.window(&target, 0..64, LONG).unwrap();
    let soon = Duration::from_millis(20);
    let error = window.wait_signal(8, 1, Cond::Geq, soon).unwrap_err();
    assert!(matches!(error, Error::Deadline { after, .. } if after == soon), "{error}");
    let named = "rank 0: wait for a signal at offset 8 of the window of rank 0, until it is Cond::Geq 1 (it is 0; no rank is known to \
                 be lost): not done within 20 ms; see that another rank signals it (Rma::signal";
    says(&error, &[named]);
    let config = HostStreamConfig { wait_limit: soon, ..HostStreamConfig::default() };
    let held = Stream::host(config).unwrap();
    window.wait_signal_on_stream(&held, 8, 1, Cond::Geq).unwrap();
    let text = held.synchronize(LONG).unwrap_err().to_string();
    let named = [
        "of rank 0 waited 20 ms for a signal at offset 8 of a window, until it is Cond::Geq 1 (it is 0)",
        "Communicator::lost",
        "or raise its wait_limit",
    ];
    assert!(named.iter().all(|name| text.contains(name)), "{text}");
    // Later operations still work.
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

// Rank 1 is killed; operations on it fail, also on streams, and all others go on.
job_test!(dead_ranks_fail_operations, 3, |comm| {
    let (local, target, s) = (buffer(comm, 64), buffer(comm, 64), stream("survivor"));
    let window = comm.window(&target, 0..64, LONG).unwrap();
    if comm.rank() == 1 {
        std::thread::sleep(2 * LONG);
    }
    let own = local.memory().word64(56).unwrap();
    own.store(7);
    if comm.rank() == 0 {
        window.put(&local, 0..8, 1, 0).unwrap();
        window.flush(1, LONG).unwrap();
        kill(comm.child(1).unwrap());
    }
    let gone = [Syndrome::RETRY_EXC_ERR, Syndrome::WR_FLUSH_ERR];
    // On a stream that waits for a put made before the failure is known.
    let mut failure = None;
    until("the death goes unnoticed", || {
        let put = window.start_on_stream(&s, &Rma::put(&local, 0..8, 1, 0));
        let put = put.and_then(|put| comm.wait_on_stream(&s, &put).map(|()| put));
        // The stream is released in any case; the request has the reason.
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
    // Signals in place of a barrier, which needs all ranks.
    let _detached = window.start(&Rma::signal(other, Signal::set(16, 1))).unwrap();
    window.wait_signal(16, 1, Cond::Eq, LONG).unwrap();
    if comm.rank() == 2 {
        // Rank 0 exits after this one.
        window.flush(0, LONG).unwrap();
        exit(0);
    }
    ends_well(comm.child(2).unwrap());
    exit(DONE);
});
