//! Waits that are not satisfied, and streams that are given up.

use std::time::{Duration, Instant};

use gdsync::error::Error;
use gdsync::memory::Memory;
use gdsync::stream::{Batch, Cond, CudaStreamConfig, Stream};
use gdsync::verbs::{RecvWr, SendWr};

use super::common::{PATIENCE, connect, hca};
use super::place::places;

const LIMIT: Duration = Duration::from_millis(50);
/// What a released stream may take: the promise is 10 ms, and a loaded machine is late.
const SLACK: Duration = Duration::from_secs(5);

#[test]
fn a_message_that_never_comes_releases_the_stream() {
    for place in places() {
        let (a, b) = connect(place.side(&hca(), 64), place.side(&hca(), 64));
        let stream = place.stream(LIMIT);
        b.qp.post_recv(&[RecvWr { wr_id: 1, sges: &[b.mr.sge(0, 8).unwrap()] }]).unwrap();
        let got = stream.wait_recv(&b.qp).unwrap().completion();
        let start = Instant::now();
        let error = stream.synchronize(PATIENCE).unwrap_err();
        assert!(start.elapsed() < LIMIT + SLACK);
        let Error::StreamWait { what, .. } = &error else { panic!("{place:?}: {error}") };
        assert!(what.contains("receive completion"), "{what}");
        assert!(
            matches!(got.status(), Err(Error::QpStopped { .. } | Error::Completion(_))),
            "{:?}",
            got.status()
        );
        assert!(stream.send(&a.qp, &SendWr::nop()).is_err(), "a failed stream takes nothing more");
        assert_eq!(stream.query().pending, 0);
    }
}

#[test]
fn words_that_nobody_writes_release_the_stream() {
    for place in places() {
        for cond in [Cond::Geq, Cond::Eq, Cond::And, Cond::Nor] {
            let stream = place.stream(LIMIT);
            let words = Memory::alloc(64).unwrap();
            let (narrow, wide) = (words.word32(0).unwrap(), words.word64(8).unwrap());
            if cond == Cond::Nor {
                narrow.store(u32::MAX);
                wide.store(u64::MAX);
            }
            let mut batch = Batch::new();
            batch.wait_value32(&narrow, 5, cond);
            batch.wait_value64(&wide, 6, cond);
            stream.submit(&mut batch).unwrap();
            let error = stream.synchronize(PATIENCE).unwrap_err();
            assert!(
                matches!(&error, Error::StreamWait { what, .. } if what.contains("WAIT32")),
                "{place:?}: {error}"
            );
            assert_eq!(stream.query().pending, 0);
        }
    }
}

#[test]
fn dropping_a_blocked_stream_lets_go_of_the_gpu() {
    for place in places() {
        let words = Memory::alloc(64).unwrap();
        let word = words.word32(0).unwrap();
        for _ in 0..10 {
            let stream = place.stream(PATIENCE);
            stream.wait_value32(&word, 1, Cond::Eq).unwrap();
            stream.abort();
            assert!(matches!(stream.synchronize(PATIENCE), Err(Error::StreamAborted { .. })));
            word.store(0);
            let stream = place.stream(PATIENCE);
            stream.wait_value32(&word, 1, Cond::Eq).unwrap();
            drop(stream);
            word.store(0);
        }
    }
}

#[test]
fn a_full_stream_says_so_and_never_blocks() {
    for place in places() {
        let stream = place.stream(PATIENCE);
        let words = Memory::alloc(64).unwrap();
        let (gate, count) = (words.word32(0).unwrap(), words.word32(4).unwrap());
        stream.wait_value32(&gate, 1, Cond::Geq).unwrap();
        let full = (1..2000).find_map(|n| stream.write_value32(&count, n).err()).unwrap();
        assert!(matches!(full, Error::StreamFull { depth: 256, .. }), "{full}");
        gate.store(1);
        let mut batch = Batch::new();
        batch.write_value32(&count, 5000);
        stream.submit_within(&mut batch, PATIENCE).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        assert_eq!(count.load(), 5000);
    }
}

/// Of host functions the driver takes few that have other work between them.
#[test]
fn host_functions_fill_a_stream_and_never_block() {
    for place in places() {
        let stream = place.stream(PATIENCE);
        let words = Memory::alloc(64).unwrap();
        let (gate, count) = (words.word32(0).unwrap(), words.word32(4).unwrap());
        stream.wait_value32(&gate, 1, Cond::Geq).unwrap();
        let pair = |n| {
            stream.write_value32(&count, n)?;
            let count = count.clone();
            stream.host_fn(move || count.store(100 * n))
        };
        let full = (1..200).find_map(|n| pair(n).err()).unwrap();
        assert!(matches!(full, Error::StreamFull { .. }), "{full}");
        assert_eq!((count.load(), stream.query().error.is_none()), (0, true));
        let room = |host_fns| stream.wait_room(1, host_fns, Duration::ZERO);
        assert!(matches!(room(1), Err(Error::StreamFull { .. })));
        room(0).unwrap();
        gate.store(1);
        stream.wait_room(1, 1, PATIENCE).unwrap();
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
        let (a, b) = connect(place.side(&hca(), 64), place.side(&hca(), 64));
        let config = CudaStreamConfig { depth: DEPTH, via: place.via, ..CudaStreamConfig::default() };
        let stream = Stream::cuda(&place.gpu, config).unwrap();
        let gate = Memory::alloc(64).unwrap().word32(0).unwrap();
        for round in 1..=3 {
            stream.wait_value32(&gate, round, Cond::Geq).unwrap();
            let (mut sent, mut full) = (Vec::new(), None);
            while full.is_none() {
                match stream.send(&a.qp, &SendWr::nop()) {
                    Ok(send) => sent.push(send.completion()),
                    Err(error) => full = Some(error),
                }
            }
            assert!(matches!(full, Some(Error::StreamFull { depth: DEPTH, .. })), "{place:?}: {full:?}");
            // Marks are calls, too.
            assert!((DEPTH - 3..DEPTH).contains(&sent.len()), "{place:?}: {}", sent.len());
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

/// Of sends and waits in a row the watchdog knows how many waits there are.
#[test]
fn waits_between_sends_in_a_row_are_kept_to_their_deadline() {
    for place in places() {
        let (a, b) = connect(place.side(&hca(), 64), place.side(&hca(), 64));
        let stream = place.stream(LIMIT);
        a.qp.post_recv(&[RecvWr { wr_id: 0, sges: &[] }; 3]).unwrap();
        b.qp.post_send(&[SendWr::send(&[]), SendWr::send(&[])]).unwrap();
        let mut got = Vec::new();
        for _ in 0..3 {
            stream.send(&a.qp, &SendWr::nop()).unwrap();
            got.push(stream.wait_recv(&a.qp).unwrap().completion());
        }
        let behind = stream.send(&a.qp, &SendWr::nop()).unwrap().completion();
        let error = stream.synchronize(PATIENCE).unwrap_err();
        let Error::StreamWait { what, .. } = &error else { panic!("{place:?}: {error}") };
        assert!(what.contains("receive completion"), "{place:?}: {what}");
        let came: Vec<_> = got.iter().map(|got| got.wait(PATIENCE).is_ok()).collect();
        assert_eq!(came, [true, true, false], "{place:?}");
        assert!(behind.wait(PATIENCE).is_err(), "{place:?}: its doorbell is behind the wait that failed");
    }
}

#[test]
fn an_error_completion_releases_the_stream_and_is_told() {
    for place in places() {
        let (a, b) = connect(place.side(&hca(), 64), place.side(&hca(), 64));
        let stream = place.stream(PATIENCE);
        let good = a.mr.sge(0, 8).unwrap();
        let bad = gdsync::verbs::Sge { lkey: good.lkey ^ 0xff, ..good };
        let mut batch = Batch::new();
        let failed = batch.send(&a.qp, &SendWr::send(&[bad])).unwrap();
        let flushed = batch.send(&a.qp, &SendWr::send(&[good])).unwrap();
        batch.wait_all_sends(&a.qp).unwrap();
        stream.submit(&mut batch).unwrap();
        let error = stream.synchronize(PATIENCE).unwrap_err();
        assert!(matches!(&error, Error::Completion(c) if !c.is_flush()), "{place:?}: {error}");
        assert!(failed.status().is_err() && flushed.status().is_err());
        drop(b);
    }
}

#[test]
fn a_panic_in_a_host_function_fails_the_stream() {
    for place in places() {
        let stream = place.stream(PATIENCE);
        stream.host_fn(|| panic!("for the test")).unwrap();
        let error = stream.synchronize(PATIENCE).unwrap_err();
        assert!(
            matches!(&error, Error::HostFnPanicked { message, .. } if message == "for the test"),
            "{error}"
        );
    }
}
