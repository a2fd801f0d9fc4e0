//! Batches that the calling thread runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::common::{PATIENCE, assert_clean, gate, pair, stream, wrong_key};
use gdsync::error::Error;
use gdsync::stream::{Batch, Cond};
use gdsync::verbs::{QpState, RecvWr, SendWr};

const SHORT: Duration = Duration::from_millis(10);

#[test]
fn caller_runs_a_batch_of_everything_in_order() {
    let (a, b) = pair(64, |q| q);
    for round in 1..=50u32 {
        b.qp.post_recv(&[RecvWr::new(&[b.mr.sge(0, 24).unwrap()]).id(round.into())]).unwrap();
        let seen = Arc::new(AtomicU32::new(0));
        let (note, arrived) = (seen.clone(), b.memory().word32(16).unwrap());
        let mut batch = Batch::new();
        batch.write_value32(&a.memory().word32(0).unwrap(), round);
        batch.write_value64(&a.memory().word64(8).unwrap(), 7);
        batch.write_memory(a.memory(), 16, &round.to_ne_bytes()).unwrap();
        batch.barrier();
        let sent = batch.send(&a.qp, &SendWr::send(&[a.mr.sge(0, 24).unwrap()]).id(5)).unwrap();
        batch.wait_send(&a.qp).unwrap();
        let got = batch.wait_recv(&b.qp).unwrap();
        batch.wait_value32(&b.memory().word32(0).unwrap(), round, Cond::Eq);
        batch.wait_value64(&b.memory().word64(8).unwrap(), 7, Cond::Eq);
        batch.host_fn(move || note.store(arrived.load(), Ordering::Relaxed));
        batch.run(PATIENCE).unwrap();
        assert!(batch.is_empty());
        assert_eq!(seen.load(Ordering::Relaxed), round);
        assert_eq!(sent.status().unwrap().unwrap().wr_id, 5);
        assert_eq!(got.status().unwrap().unwrap().wr_id, u64::from(round));
    }
    assert_clean(&[&a, &b]);
}

#[test]
fn wait_that_no_word_satisfies_is_refused_before_anything_runs() {
    let (a, _b) = pair(64, |q| q);
    let word = gate();
    let mut batch = Batch::new();
    batch.write_value32(&word, 1);
    let sent = batch.send(&a.qp, &SendWr::nop()).unwrap();
    batch.wait_value32(&word, 0, Cond::And);
    for _ in 0..2 {
        let refused = batch.run(SHORT);
        assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
    }
    assert_eq!((word.load(), batch.len(), sent.status().unwrap()), (0, 3, None));
    a.qp.check().unwrap();
}

#[test]
fn streams_and_the_caller_take_turns_on_a_queue_pair() {
    let (a, b) = pair(64, |q| q.max_send_wr(8));
    let s = stream("turns");
    for round in 0..100u8 {
        let mut batch = Batch::new();
        batch.send(&a.qp, &SendWr::write_inline(b.mr.remote(0).unwrap(), &[round])).unwrap();
        batch.wait_send(&a.qp).unwrap();
        if round % 2 == 0 {
            batch.run(PATIENCE).unwrap();
        } else {
            s.submit(&mut batch).unwrap();
            s.synchronize(PATIENCE).unwrap();
        }
        assert_eq!(b.memory().to_vec()[0], round);
    }
}

#[test]
fn deadline_is_for_the_whole_and_stops_the_queues() {
    let (a, b) = pair(64, |q| q);
    a.qp.post_recv(&[RecvWr::new(&[]).id(8)]).unwrap();
    let ran = Arc::new(AtomicU32::new(0));
    let late = ran.clone();
    let mut batch = Batch::new();
    // Two sleeps that together pass the deadline, though neither does alone.
    batch.host_fn(|| std::thread::sleep(SHORT));
    let awaited = batch.wait_recv(&a.qp).unwrap();
    let unsent = batch.send(&a.qp, &SendWr::write_inline(b.mr.remote(0).unwrap(), &[1])).unwrap();
    batch.host_fn(move || late.store(1, Ordering::Relaxed));
    let start = Instant::now();
    let error = batch.run(2 * SHORT).unwrap_err();
    assert!(matches!(error, Error::Deadline { after, .. } if after == 2 * SHORT), "{error}");
    assert!(start.elapsed() >= 2 * SHORT);
    assert!(batch.is_empty());
    assert_eq!(ran.load(Ordering::Relaxed), 0, "the rest is dropped");
    let stopped = a.qp.check().unwrap_err();
    assert!(
        matches!(&stopped, Error::QpStopped { reason, .. } if matches!(**reason, Error::Deadline { .. })),
        "{stopped}"
    );
    assert_eq!(a.qp.state(), QpState::ERR);
    assert!(awaited.status().is_err() && unsent.status().is_err());
    assert_eq!(a.qp.post_send(&[SendWr::nop()]).unwrap_err().to_string(), stopped.to_string());
    batch.host_fn(|| {});
    batch.run(PATIENCE).unwrap();
    assert_eq!(b.memory().to_vec()[0], 0);
}

#[test]
fn deadline_without_queues_stops_nothing() {
    let word = gate();
    let mut batch = Batch::new();
    batch.wait_value32(&word, 3, Cond::Eq);
    assert!(matches!(batch.run(Duration::ZERO), Err(Error::Deadline { .. })));
    batch.write_value32(&word, 3);
    batch.wait_value32(&word, 3, Cond::Eq);
    batch.run(Duration::ZERO).unwrap();
}

#[test]
fn failed_send_is_reported_when_all_has_run() {
    let (a, b) = pair(64, |q| q);
    let wrong = wrong_key(&b);
    let word = gate();
    let mut batch = Batch::new();
    batch.send(&a.qp, &SendWr::write_inline(wrong, &[1]).id(0xbad)).unwrap();
    batch.wait_send(&a.qp).unwrap();
    batch.write_value32(&word, 1);
    let error = batch.run(PATIENCE).unwrap_err();
    assert!(matches!(error, Error::Completion(e) if e.wr_id == 0xbad), "{error}");
    assert_eq!(word.load(), 1);
}

#[test]
fn panic_passes_through_and_stops_the_queues() {
    let (a, _b) = pair(64, |q| q);
    let mut batch = Batch::new();
    batch.host_fn(|| panic!("in the batch"));
    batch.send(&a.qp, &SendWr::nop()).unwrap();
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| batch.run(PATIENCE))).unwrap_err();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"in the batch"));
    assert!(a.qp.check().unwrap_err().to_string().contains("in the batch"));
}

#[test]
fn refused_batch_is_left_as_it_was() {
    let (a, b) = pair(64, |q| q);
    let first = a.qp.prepare_send(&[SendWr::write_inline(b.mr.remote(0).unwrap(), &[1])]).unwrap();
    let mut batch = Batch::new();
    batch.send(&a.qp, &SendWr::write_inline(b.mr.remote(0).unwrap(), &[2])).unwrap();
    let len = batch.len();
    assert!(matches!(batch.run(PATIENCE), Err(Error::OutOfOrder { .. })));
    assert_eq!(batch.len(), len);
    drop(first);
    batch.wait_send(&a.qp).unwrap();
    batch.run(PATIENCE).unwrap();
    assert_eq!(b.memory().to_vec()[0], 2);
}
