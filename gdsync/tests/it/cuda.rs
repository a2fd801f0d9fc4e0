//! Streams on GPUs: the same tests by memory operations and by kernels, with rings in host and in GPU memory.

mod graph_nodes;

use std::time::Duration;

use gdsync::Error;
use gdsync::memory::Memory;
use gdsync::stream::{Batch, Cond, CudaStreamConfig, Stream};
use gdsync::verbs::{Completion, Qp, RecvWr, SendWr};

use crate::common::{PATIENCE, Side, gate, gates, until};
use crate::place::{Place, places, within_a_capture};

/// The first call of a row makes the context current for itself; the others leave the thread what it has.
#[test]
fn sends_and_waits_come_from_threads_with_another_context_or_none() {
    let elsewhere = crate::place::gpu(1);
    for place in places() {
        let (a, b) = place.pair(64, |q| q);
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

/// Adds a send, a wait, or both; a wait by itself is for a send of the CPU. Returns the last completion.
const SHORT: [fn(&mut Batch, &Qp) -> Completion; 3] = [
    |batch, qp| batch.send(qp, &SendWr::nop().id(2)).unwrap(),
    |batch, qp| {
        qp.post_send(&[SendWr::nop().id(2)]).unwrap();
        batch.wait_send(qp).unwrap()
    },
    |batch, qp| {
        batch.send(qp, &SendWr::nop().id(2)).unwrap();
        batch.wait_send(qp).unwrap()
    },
];

/// Sends `value` in one of the ways, and has the stream wait for it; what was sent, and what is waited for.
fn hop(stream: &Stream, (a, b): &(Side, Side), value: u64) -> [Completion; 2] {
    let bytes = value.to_ne_bytes();
    let send = SendWr::write_inline(b.mr.remote(0).unwrap(), &bytes).id(value);
    let mut batch = Batch::new();
    // In no order, so that each comes behind each.
    match value * value / 7 % 5 {
        0 => {
            let sent = stream.send(&a.qp, &send).unwrap();
            [sent, stream.wait_send(&a.qp).unwrap()]
        }
        1 => {
            let sent = batch.send(&a.qp, &send).unwrap();
            let passed = batch.wait_send(&a.qp).unwrap();
            assert_eq!(batch.len(), 2);
            stream.submit(&mut batch).unwrap();
            assert!(batch.is_empty());
            [sent, passed]
        }
        2 => {
            let sent = batch.send(&a.qp, &send).unwrap();
            stream.submit(&mut batch).unwrap();
            let passed = batch.wait_send(&a.qp).unwrap();
            stream.submit(&mut batch).unwrap();
            [sent, passed]
        }
        3 => {
            let prepared = a.qp.prepare_send(&[send]).unwrap();
            let sent = batch.post(prepared);
            stream.submit(&mut batch).unwrap();
            [sent, stream.wait_send(&a.qp).unwrap()]
        }
        _ => {
            let sent = stream.send(&a.qp, &send).unwrap();
            let passed = batch.post_wait(a.qp.prepare_wait_send().unwrap());
            stream.submit(&mut batch).unwrap();
            [sent, passed]
        }
    }
}

#[test]
fn short_batches_and_single_operations_keep_their_order() {
    for place in places() {
        let pairs = [place.pair(64, |q| q), place.pair(64, |q| q)];
        let stream = place.stream(PATIENCE);
        // The rings of 64 go round several times, and each round has more operations than there are between two marks.
        for round in 0..12 {
            let values = 30 * round..30 * (round + 1);
            let hops: Vec<_> = values
                .map(|value| (value, hop(&stream, &pairs[usize::from(value % 7 == 0)], value)))
                .collect();
            stream.synchronize(PATIENCE).unwrap();
            for (value, done) in hops {
                for completion in done {
                    assert_eq!(
                        completion.status().unwrap().expect("the stream waited for it").wr_id,
                        value,
                        "{place:?}"
                    );
                }
            }
            let last = pairs.each_ref().map(|(_, b)| b.memory().word64(0).unwrap().load());
            assert_eq!(last.into_iter().max(), Some(30 * (round + 1) - 1), "{place:?}");
        }
        for side in pairs.iter().flat_map(|(a, b)| [a, b]) {
            assert_eq!(side.context.stats().violations, 0, "{place:?}");
        }
    }
}

#[test]
fn short_batch_is_one_submission() {
    for place in places() {
        let pair = place.pair(64, |q| q);
        let stream = place.stream(PATIENCE);
        let gate = gate();
        stream.wait_value32(&gate, 1, Cond::Eq).unwrap();
        for n in 1..=40 {
            let mut batch = Batch::new();
            batch.send(&pair.0.qp, &SendWr::nop()).unwrap();
            batch.wait_send(&pair.0.qp).unwrap();
            stream.submit(&mut batch).unwrap();
            assert_eq!(stream.query().pending, 1 + n, "{place:?}");
        }
        gate.store(1);
        stream.synchronize(PATIENCE).unwrap();
    }
}

/// What a stream refuses is left as it was: another may have it, and when it is dropped the CPU may go on.
fn refuses(stream: &Stream, place: &Place, is_right: impl Fn(&Error) -> bool) {
    for add in SHORT {
        let (a, _b) = place.pair(64, |q| q);
        let mut batch = Batch::new();
        let done = add(&mut batch, &a.qp);
        let len = batch.len();
        for _ in 0..2 {
            let error = stream.submit(&mut batch).unwrap_err();
            assert!(is_right(&error), "{place:?}: {error}");
            assert_eq!(batch.len(), len);
        }
        let other = place.stream(PATIENCE);
        other.submit(&mut batch).unwrap();
        other.synchronize(PATIENCE).unwrap();
        assert_eq!(done.wait(PATIENCE).unwrap().wr_id, 2);
        add(&mut batch, &a.qp);
        assert!(is_right(&stream.submit(&mut batch).unwrap_err()));
        drop(batch);
        a.qp.post_send(&[SendWr::nop().id(3)]).unwrap();
        while a.qp.send_cq().wait(PATIENCE).unwrap().wr_id != 3 {}
    }
}

#[test]
fn full_stream_refuses_short_batches() {
    for place in places() {
        let stream = place.stream(PATIENCE).with_timeout(Duration::ZERO);
        let [gate, count] = gates();
        stream.wait_value32(&gate, 1, Cond::Eq).unwrap();
        while stream.write_value32(&count, 1).is_ok() {}
        refuses(&stream, &place, |error| matches!(error, Error::StreamFull { .. }));
        gate.store(1);
        stream.synchronize(PATIENCE).unwrap();
    }
}

#[test]
fn row_of_short_batches_ends_where_the_stream_is_full() {
    for place in places() {
        let (a, _b) = place.pair(64, |q| q.max_send_wr(1024));
        let stream = place.stream(PATIENCE);
        let gate = gate();
        stream.wait_value32(&gate, 1, Cond::Eq).unwrap();
        let mut batch = Batch::new();
        let full = (0..1000).find_map(|_| {
            SHORT[2](&mut batch, &a.qp);
            stream.with_timeout(Duration::ZERO).submit(&mut batch).err()
        });
        assert!(matches!(full, Some(Error::StreamFull { depth: 256, .. })), "{full:?}");
        // All calls but for the marks.
        assert!((230..=256).contains(&stream.query().pending), "{place:?}: {}", stream.query().pending);
        gate.store(1);
        stream.submit(&mut batch).unwrap();
        stream.synchronize(PATIENCE).unwrap();
    }
}

#[test]
fn failed_stream_refuses_short_batches() {
    for place in places() {
        let stream = place.stream(PATIENCE);
        stream.abort();
        refuses(&stream, &place, |error| matches!(error, Error::StreamAborted { .. }));
    }
}

#[test]
fn capture_of_the_application_refuses_short_batches() {
    for place in places() {
        let stream = place.stream(PATIENCE);
        within_a_capture(&place.gpu, &stream, || {
            refuses(&stream, &place, |error| matches!(error, Error::Unsupported { .. }));
        });
    }
}

/// Refused at the wait, when the send was handed over already.
#[test]
fn wait_out_of_order_takes_the_send_before_it_back() {
    for place in places() {
        let (a, _b) = place.pair(64, |q| q);
        let stream = place.stream(PATIENCE);
        a.qp.post_send(&[SendWr::nop().id(1)]).unwrap();
        let first = a.qp.prepare_wait_send().unwrap();
        let mut batch = Batch::new();
        let done = SHORT[2](&mut batch, &a.qp);
        // Until it completes, the queue belongs to the CPU.
        until(|| !matches!(stream.submit(&mut batch), Err(Error::Busy { .. })));
        for _ in 0..2 {
            let error = stream.submit(&mut batch).unwrap_err();
            assert!(matches!(error, Error::OutOfOrder { expected: 0, got: 1, .. }), "{error}");
        }
        let mut before = Batch::new();
        before.post_wait(first);
        stream.submit(&mut before).unwrap();
        stream.submit(&mut batch).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        assert_eq!(done.status().unwrap().expect("the stream waited for it").wr_id, 2);
    }
}

/// The last of a row is what it waits for in vain.
#[test]
fn wait_of_a_short_batch_in_a_row_has_its_deadline() {
    for place in places() {
        let (a, b) = place.pair(64, |q| q);
        a.qp.post_recv(&[RecvWr::new(&[]); 4]).unwrap();
        b.qp.post_send(&[SendWr::send(&[]); 3]).unwrap();
        (0..3).for_each(|_| _ = b.qp.send_cq().wait(PATIENCE).unwrap());
        let stream = place.stream(LIMIT);
        let mut batch = Batch::new();
        for _ in 0..4 {
            batch.send(&a.qp, &SendWr::nop()).unwrap();
            batch.wait_recv(&a.qp).unwrap();
            stream.submit(&mut batch).unwrap();
        }
        let error = stream.synchronize(PATIENCE).unwrap_err();
        let name = format!("receive 3 (wr_id 0) of QP {:#x} to complete", a.qp.qpn());
        assert!(
            matches!(&error, Error::StreamWait { what, after: LIMIT, .. } if what.contains(&name)),
            "{error}"
        );
        // Its queue pair was stopped.
        let refused = a.qp.post_send(&[SendWr::nop()]).unwrap_err();
        assert!(matches!(refused, Error::QpStopped { .. }), "{refused}");
    }
}

const LIMIT: Duration = Duration::from_millis(50);

/// Of host functions the driver takes few that have other work between them.
#[test]
fn host_functions_fill_a_stream_and_never_block() {
    for place in places() {
        let stream = place.stream(PATIENCE).with_timeout(Duration::ZERO);
        let [gate, count] = gates();
        stream.wait_value32(&gate, 1, Cond::Geq).unwrap();
        let pair = |n| {
            stream.write_value32(&count, n)?;
            let count = count.clone();
            stream.host_fn(move || count.store(100 * n))
        };
        let full = (1..200).find_map(|n| pair(n).err()).unwrap();
        assert!(matches!(full, Error::StreamFull { .. }), "{full}");
        assert_eq!((count.load(), stream.query().error.is_none()), (0, true));
        let room = |host_fns| stream.wait_room(1, host_fns);
        assert!(matches!(room(1), Err(Error::StreamFull { .. })));
        room(0).unwrap();
        gate.store(1);
        stream.with_timeout(PATIENCE).wait_room(1, 1).unwrap();
        stream.host_fn(|| ()).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        assert!(count.load() >= 20, "{}", count.load());
        stream.abort();
        assert!(matches!(room(0), Err(Error::StreamAborted { .. })));
    }
}

/// Nothing is noted of them one by one.
#[test]
fn sends_in_a_row_fill_a_stream_and_end_with_it() {
    const DEPTH: usize = 8;
    for place in places() {
        let (a, b) = place.pair(64, |q| q);
        let config = CudaStreamConfig { depth: DEPTH, via: place.via, ..CudaStreamConfig::default() };
        let stream = Stream::cuda(&place.gpu, config).unwrap().with_timeout(Duration::ZERO);
        let gate = gate();
        for round in 1..=3 {
            stream.wait_value32(&gate, round, Cond::Geq).unwrap();
            let (mut sent, mut full) = (Vec::new(), None);
            while full.is_none() {
                match stream.send(&a.qp, &SendWr::nop()) {
                    Ok(send) => sent.push(send),
                    Err(error) => full = Some(error),
                }
            }
            assert!(matches!(full, Some(Error::StreamFull { depth: DEPTH, .. })), "{place:?}: {full:?}");
            // Marks are calls, too: one behind each call where this thread is slow.
            assert!((DEPTH / 2 - 1..DEPTH).contains(&sent.len()), "{place:?}: {}", sent.len());
            assert_eq!(stream.query().pending, sent.len() as u64 + 1, "{place:?}");
            if round < 3 {
                gate.store(round);
                stream.synchronize(PATIENCE).unwrap();
                sent.iter().for_each(|send| assert!(send.wait(PATIENCE).is_ok()));
                continue;
            }
            stream.abort();
            assert!(matches!(stream.synchronize(PATIENCE), Err(Error::StreamAborted { .. })));
            sent.iter().for_each(|send| assert!(send.wait(PATIENCE).is_err(), "{place:?}: {send:?}"));
        }
        drop(b);
    }
}
