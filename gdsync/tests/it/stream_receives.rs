//! Receives that a stream posts.

use std::sync::{Arc, Mutex};

use gdsync::error::Error;
use gdsync::memory::Word32;
use gdsync::stream::{Batch, Cond, Stream};
use gdsync::verbs::{Completion, QpAttr, QpState, RecvWr, SendWr};

use crate::common::{PATIENCE, Side, assert_clean, gate, pair, reconnect, stream, until};

/// Posts a receive of the first 8 bytes.
fn post(batch: &mut Batch, end: &Side) -> Completion {
    batch.post_recv(&end.qp, &RecvWr::new(&[end.mr.sge(0, 8).unwrap()]).id(3)).unwrap()
}

fn is_busy(error: &Error) -> bool {
    matches!(error, Error::Busy { queue: "receive", .. })
}

/// A stream that waits for a word, and the word.
fn held() -> (Stream, Word32) {
    let (s, gate) = (stream("held"), gate());
    s.wait_value32(&gate, 1, Cond::Geq).unwrap();
    (s, gate)
}

#[test]
fn one_buffer_receives_many_messages_in_stream_order() {
    const COUNT: usize = 40;
    let (a, b) = pair(8 * COUNT, |q| q.rnr_retry(7));
    let (s, gate) = held();
    let seen = Arc::new(Mutex::new(Vec::new()));
    for n in 0..COUNT {
        let mut batch = Batch::new();
        let posted = post(&mut batch, &b);
        batch.wait(&posted).unwrap();
        let (memory, seen) = (b.memory().clone(), seen.clone());
        batch.host_fn(move || seen.lock().unwrap().push(memory.word64(0).unwrap().load()));
        s.submit(&mut batch).unwrap();
        // The CPU sends before the stream posts.
        let at = 8 * n;
        a.memory().word64(at).unwrap().store(n as u64);
        a.qp.post_send(&[SendWr::send(&[a.mr.sge(at, 8).unwrap()])]).unwrap();
    }
    gate.store(1);
    s.synchronize(PATIENCE).unwrap();
    assert_eq!(*seen.lock().unwrap(), (0..COUNT as u64).collect::<Vec<_>>());
    // The CPU again: all were posted.
    let posted = b.qp.post_recv(&[RecvWr::new(&[b.mr.sge(0, 8).unwrap()]).id(4)]).unwrap();
    a.qp.post_send(&[SendWr::send(&[a.mr.sge(0, 8).unwrap()])]).unwrap();
    assert_eq!(posted.wait(PATIENCE).unwrap().wr_id, 4);
    assert_clean(&[&a, &b]);
}

#[test]
fn others_post_when_the_stream_has_posted_all() {
    let (a, b) = pair(64, |q| q.rnr_retry(7));
    let ((s, gate), other) = (held(), stream("other"));
    let by_cpu = || b.qp.post_recv(&[RecvWr::new(&[b.mr.sge(8, 8).unwrap()]).id(4)]);
    let mut batch = Batch::new();
    let first = post(&mut batch, &b);
    assert!(is_busy(&by_cpu().unwrap_err()), "a batch holds one");
    s.submit(&mut batch).unwrap();
    assert!(is_busy(&by_cpu().unwrap_err()), "the stream has not posted it");
    let second = post(&mut batch, &b);
    assert!(is_busy(&other.submit(&mut batch).unwrap_err()));
    gate.store(1);
    s.synchronize(PATIENCE).unwrap();
    // No message has come yet.
    other.submit(&mut batch).unwrap();
    other.synchronize(PATIENCE).unwrap();
    let third = by_cpu().unwrap();
    for completion in [first, second, third] {
        a.qp.post_send(&[SendWr::send(&[a.mr.sge(0, 8).unwrap()])]).unwrap();
        completion.wait(PATIENCE).unwrap();
    }
    assert_clean(&[&a, &b]);
}

#[test]
fn dropped_batches_take_their_receives_back() {
    let (a, b) = pair(64, |q| q.rnr_retry(7).max_recv_wr(4));
    let s = stream("receiver");
    for _ in 0..10 {
        let [mut first, mut second] = [Batch::new(), Batch::new()];
        let dropped = [post(&mut first, &b), post(&mut second, &b), post(&mut second, &b)];
        assert!(matches!(s.submit(&mut second), Err(Error::OutOfOrder { .. })));
        drop(first);
        assert!(matches!(s.submit(&mut second), Err(Error::OutOfOrder { .. })), "the one before is missing");
        drop(second);
        assert!(dropped.iter().all(Completion::is_taken_back));
    }
    let mut batch = Batch::new();
    let posted = post(&mut batch, &b);
    s.submit(&mut batch).unwrap();
    a.qp.post_send(&[SendWr::send(&[a.mr.sge(0, 8).unwrap()])]).unwrap();
    assert_eq!(posted.wait(PATIENCE).unwrap().wr_id, 3);
    s.synchronize(PATIENCE).unwrap();
    let capture = s.begin_capture().unwrap();
    let refused = s.post_recv(&b.qp, &RecvWr::new(&[]).id(3)).unwrap_err();
    assert!(matches!(refused, Error::Unsupported { .. }), "{refused}");
    drop(capture);
    assert_clean(&[&a, &b]);
}

#[test]
fn an_aborted_stream_ends_receives_that_it_has_not_posted() {
    let (a, b) = pair(64, |q| q.rnr_retry(7));
    let (s, _gate) = held();
    let mut batch = Batch::new();
    let posted = post(&mut batch, &b);
    s.submit(&mut batch).unwrap();
    s.abort();
    assert!(posted.wait(PATIENCE).is_err());
    assert!(s.synchronize(PATIENCE).is_err());
    assert!(b.qp.post_recv(&[RecvWr::new(&[]).id(4)]).is_err());
    drop(s);
    // After a reset it is as new.
    until(|| !matches!(b.qp.modify(&QpAttr::to(QpState::RESET)), Err(Error::Busy { .. })));
    reconnect(&a.qp, &b.qp);
    let posted = b.qp.post_recv(&[RecvWr::new(&[b.mr.sge(0, 8).unwrap()]).id(5)]).unwrap();
    a.qp.post_send(&[SendWr::send(&[a.mr.sge(8, 8).unwrap()])]).unwrap();
    assert_eq!(posted.wait(PATIENCE).unwrap().wr_id, 5);
}
