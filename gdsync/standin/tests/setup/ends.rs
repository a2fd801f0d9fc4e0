//! What ends a pair of queue pairs, wherever their queues are. The modules of a test program that uses this are its crate's
//! `common` and `setup`.

use std::time::Duration;

use gdsync::Error;
use gdsync::mlx5::Syndrome;
use gdsync::stream::Batch;
use gdsync::verbs::{RecvWr, SendWr};

use crate::common::{PATIENCE, Side, bytes, pattern, received, reconnect, sent, stream_with};
use crate::setup::complaints_but_of_peers;

/// One message over the pair, with contents.
pub(crate) fn message(a: &Side, b: &Side, wr_id: u64) {
    let data = pattern(30, usize::try_from(wr_id & 0xff).unwrap());
    a.memory().write(0, &data).unwrap();
    b.qp.post_recv(&[RecvWr { wr_id: !wr_id, sges: &[b.mr.sge(32, 30).unwrap()] }]).unwrap();
    a.qp.post_send(&[SendWr::send(&[a.mr.sge(0, 30).unwrap()]).id(wr_id)]).unwrap();
    assert_eq!(sent(a).ok().unwrap().wr_id, wr_id);
    assert_eq!(received(b).ok().unwrap().wr_id, !wr_id);
    assert!(bytes(b, 32, 30) == data);
}

/// Of a pair with room for five receives.
pub(crate) fn receives_are_flushed_by_err(a: &Side, b: &Side) {
    for wr_id in 0..5 {
        b.qp.post_recv(&[RecvWr { wr_id, sges: &[b.mr.sge(0, 8).unwrap()] }]).unwrap();
    }
    b.qp.abort().unwrap();
    for wr_id in 0..5 {
        let error = received(b).ok().unwrap_err();
        assert!(error.is_flush() && error.wr_id == wr_id, "{error}");
    }
    // The other side notices when it sends.
    a.qp.post_send(&[SendWr::nop(), SendWr::send_inline(&[1; 8])]).unwrap();
    sent(a).ok().unwrap();
    assert!(sent(a).ok().is_err());
}

/// Of a pair with few and quick retries.
pub(crate) fn a_peer_without_receives_ends_the_retries(a: &Side) {
    a.qp.post_send(&[SendWr::send_inline(&[1; 8])]).unwrap();
    assert_eq!(sent(a).ok().unwrap_err().syndrome, Syndrome::RNR_RETRY_EXC_ERR);
}

/// Without a complaint but those `known`.
pub(crate) fn a_queue_pair_is_reset_and_used_again(a: &Side, b: &Side, known: &[String]) {
    for round in 0..10 {
        for i in 0..round % 6 {
            message(a, b, i);
        }
        if round % 2 == 0 {
            // With some outstanding.
            b.qp.post_recv(&[RecvWr { wr_id: 1, sges: &[] }]).unwrap();
            b.qp.abort().unwrap();
        }
        reconnect(&a.qp, &b.qp);
    }
    message(a, b, 99);
    assert_eq!(complaints_but_of_peers(), known);
}

/// A stream gives up waiting, the library completes in place of the card, and the queue pair is reset: what comes then must be
/// where both expect it.
pub(crate) fn after_a_stream_gave_up_the_completions_stay_in_step(a: &Side, b: &Side) {
    for round in 0..6 {
        let s = stream_with("impatient", Duration::from_millis(20));
        b.qp.post_recv(&[RecvWr { wr_id: 1, sges: &[] }]).unwrap();
        let mut batch = Batch::new();
        batch.wait_recv(&b.qp).unwrap();
        s.submit(&mut batch).unwrap();
        assert!(matches!(s.synchronize(PATIENCE), Err(Error::StreamWait { .. })), "round {round}");
        drop(s);
        reconnect(&a.qp, &b.qp);
        message(a, b, round);
    }
}
