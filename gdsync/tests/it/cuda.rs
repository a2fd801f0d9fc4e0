//! Streams on GPUs: the same tests by memory operations and by kernels, with rings in host and in GPU memory.

mod graph_nodes;
mod rows;

use std::time::Duration;

use crate::common::{PATIENCE, connect, hca, tier};
use crate::place::{Place, places};
use gdsync::memory::Memory;
use gdsync::stream::Batch;
use gdsync::verbs::{OnGpu, RecvWr, SendWr};

#[test]
fn stream_sends_and_another_receives() {
    for place in places() {
        let (a, b) = connect(place.side(&hca(), 4096), place.side(&hca(), 4096));
        let (sa, sb) = (place.stream(PATIENCE), place.stream(PATIENCE));
        a.memory().write(0, b"over the stream").unwrap();
        b.qp.post_recv(&[RecvWr { wr_id: 9, sges: &[b.mr.sge(100, 50).unwrap()] }]).unwrap();
        let got = sb.wait_recv(&b.qp).unwrap();
        sa.send(&a.qp, &SendWr::send(&[a.mr.sge(0, 15).unwrap()]).id(5).imm(77)).unwrap();
        let sent = sa.wait_send(&a.qp).unwrap();
        sa.synchronize(PATIENCE).unwrap();
        sb.synchronize(PATIENCE).unwrap();
        assert_eq!(sent.status().unwrap().unwrap().wr_id, 5);
        let wc = got.status().unwrap().unwrap();
        assert_eq!((wc.wr_id, wc.byte_len, wc.imm), (9, 15, Some(77)), "{place:?}");
        let mut out = [0; 15];
        b.memory().read(100, &mut out).unwrap();
        assert_eq!(&out, b"over the stream");
        assert_eq!(a.context.stats().violations + b.context.stats().violations, 0);
    }
}

/// The first call of a row makes the context current for itself; the others leave the thread what it has.
#[test]
fn sends_and_waits_come_from_threads_with_another_context_or_none() {
    let elsewhere = crate::place::gpu(1);
    for place in places() {
        let (a, b) = connect(place.side(&hca(), 64), place.side(&hca(), 64));
        let stream = place.stream(PATIENCE);
        let (from, to) = (a.mr.sge(0, 8).unwrap(), b.mr.remote(8).unwrap());
        let word = a.memory().word64(0).unwrap();
        let send = |value| {
            stream.write_value64(&word, value).unwrap();
            for _ in 0..3 {
                stream.send(&a.qp, &SendWr::write(to, &[from])).unwrap();
                stream.wait_send(&a.qp).unwrap();
            }
        };
        send(1);
        std::thread::scope(|scope| {
            scope.spawn(|| send(2)).join().unwrap();
            if let Some(elsewhere) = &elsewhere {
                let other = || {
                    let _current = elsewhere.enter().unwrap();
                    send(3);
                };
                scope.spawn(other).join().unwrap();
            }
        });
        stream.synchronize(PATIENCE).unwrap();
        let last = 2 + u64::from(elsewhere.is_some());
        assert_eq!(b.memory().word64(8).unwrap().load(), last, "{place:?}");
    }
}

/// A chain through two streams: each answer is sent by the batch that waits for the question. Rings of 8 go round often.
#[test]
fn messages_bounce_between_two_streams() {
    let rounds = tier(100, 1000, 20_000);
    for place in places() {
        let small = |side: &Place| side.side_with(&hca(), 4096, |q| q.max_send_wr(8).max_recv_wr(8));
        let (a, b) = connect(small(&place), small(&place));
        let (sa, sb) = (place.stream(PATIENCE), place.stream(PATIENCE));
        let buffer = |side: &crate::common::Side| side.mr.sge(0, 8).unwrap();
        for round in 0..rounds {
            for side in [&a, &b] {
                let recv = RecvWr { wr_id: round, sges: &[side.mr.sge(64, 8).unwrap()] };
                while side.qp.post_recv(&[recv]).is_err() {
                    std::thread::sleep(Duration::from_micros(20));
                }
            }
            let mut first = Batch::new();
            retry(|| first.send(&a.qp, &SendWr::send(&[buffer(&a)]).id(round)).map(drop));
            first.wait_send(&a.qp).unwrap();
            first.wait_recv(&a.qp).unwrap();
            sa.submit_within(&mut first, PATIENCE).unwrap();
            let mut second = Batch::new();
            second.wait_recv(&b.qp).unwrap();
            retry(|| second.send(&b.qp, &SendWr::send(&[buffer(&b)]).id(round)).map(drop));
            second.wait_send(&b.qp).unwrap();
            sb.submit_within(&mut second, PATIENCE).unwrap();
        }
        sa.synchronize(PATIENCE).unwrap();
        sb.synchronize(PATIENCE).unwrap();
        assert_eq!(a.context.stats().violations + b.context.stats().violations, 0, "{place:?}");
        assert_eq!(a.context.stats().wqes + b.context.stats().wqes, 2 * rounds);
    }
}

/// Queues are bounded: a full one has room when the stream has moved on.
fn retry(mut attempt: impl FnMut() -> gdsync::Result<()>) {
    let start = std::time::Instant::now();
    while let Err(error) = attempt() {
        assert!(start.elapsed() < PATIENCE, "{error}");
        assert!(matches!(error, gdsync::Error::QueueFull { .. }), "{error}");
        std::thread::sleep(Duration::from_micros(20));
    }
}

#[test]
fn host_functions_run_in_order_and_words_are_written() {
    for place in places() {
        let stream = place.stream(PATIENCE);
        let words = Memory::alloc(64).unwrap();
        let (tx, rx) = std::sync::mpsc::channel();
        for n in 0..100u32 {
            let (word, tx) = (words.word32(0).unwrap(), tx.clone());
            let mut batch = Batch::new();
            batch.write_value32(&word, n);
            batch.host_fn(move || tx.send(word.load()).unwrap());
            batch.write_value32(&words.word32(4).unwrap(), n);
            stream.submit_within(&mut batch, PATIENCE).unwrap();
        }
        stream.synchronize(PATIENCE).unwrap();
        assert_eq!(rx.try_iter().collect::<Vec<_>>(), (0..100).collect::<Vec<_>>(), "{place:?}");
        assert_eq!(words.word32(4).unwrap().load(), 99);
    }
}

#[test]
fn long_batches_are_split() {
    for place in places() {
        let stream = place.stream(PATIENCE);
        let words = Memory::alloc(8 * 1000).unwrap();
        let mut batch = Batch::new();
        for n in 0..1000usize {
            batch.write_value64(&words.word64(8 * n).unwrap(), n as u64 + 1);
        }
        stream.submit(&mut batch).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        assert!((0..1000usize).all(|n| words.word64(8 * n).unwrap().load() == n as u64 + 1), "{place:?}");
    }
}

#[test]
fn everything_can_be_on_the_gpu() {
    for place in places().filter(|place| place.on_gpu == OnGpu::all()) {
        let side = place.side(&hca(), 64);
        drop(side);
    }
}
