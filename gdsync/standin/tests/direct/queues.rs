//! Rings that go round, and everything that ends a queue pair.

use gdsync::Error;
use gdsync::mlx5::Syndrome;
use gdsync::stream::Batch;
use gdsync::verbs::{Access, QpAttr, QpState, RecvWr, SendWr};

use crate::common::{PATIENCE, Side, bytes, connect, hca, loopback, pair, pattern, received, sent, stream};
use crate::ends::{self, message};

/// More than two laps of every ring, on each side.
#[test]
fn rings_go_round() {
    let (a, b) = pair(64, |q| q.max_send_wr(4).max_recv_wr(4));
    for round in 0..40 {
        message(&a, &b, round);
        message(&b, &a, round + 1000);
    }
}

/// A stream rings the doorbells, and waits by the owner bit, over more than two laps: a completion queue that begins with owner 0
/// would let it through before the first message.
#[test]
fn streams_send_and_wait_over_laps() {
    let (a, b) = pair(4096, |q| q.max_send_wr(4).max_recv_wr(4));
    let (sa, sb) = (stream("sender"), stream("receiver"));
    for round in 0..20usize {
        let data = pattern(1000, round);
        a.memory().write(0, &data).unwrap();
        b.qp.post_recv(&[RecvWr { wr_id: 1, sges: &[b.mr.sge(2000, 1000).unwrap()] }]).unwrap();
        let mut wait = Batch::new();
        wait.wait_recv(&b.qp).unwrap();
        sb.submit(&mut wait).unwrap();
        let mut send = Batch::new();
        send.send(&a.qp, &SendWr::send(&[a.mr.sge(0, 1000).unwrap()])).unwrap();
        send.wait_send(&a.qp).unwrap();
        sa.submit(&mut send).unwrap();
        sb.synchronize(PATIENCE).unwrap();
        assert!(bytes(&b, 2000, 1000) == data, "round {round}");
        sa.synchronize(PATIENCE).unwrap();
    }
}

#[test]
fn a_wrong_key_is_the_root_cause_and_the_rest_is_flushed() {
    let (a, b) = pair(64, |q| q);
    let mut wrong = b.mr.remote(0).unwrap();
    wrong.rkey ^= 1;
    a.qp.post_send(&[SendWr::write_inline(wrong, &[1; 4]).id(7)]).unwrap();
    let error = sent(&a).ok().unwrap_err();
    assert_eq!((error.wr_id, error.syndrome), (7, Syndrome::REM_ACCESS_ERR));
    assert_eq!(a.qp.state(), QpState::ERR);
    assert!(a.qp.check().unwrap_err().to_string().contains("0x7"));
    assert!(matches!(a.qp.post_send(&[SendWr::nop()]), Err(Error::Completion(_))));
}

#[test]
fn receives_are_flushed_by_err() {
    let (a, b) = pair(64, |q| q.max_recv_wr(8));
    ends::receives_are_flushed_by_err(&a, &b);
}

#[test]
fn a_peer_without_receives_ends_the_retries() {
    let (a, _b) = pair(64, |q| q.min_rnr_timer(1).rnr_retry(1).timeout(8).retry_cnt(1));
    ends::a_peer_without_receives_ends_the_retries(&a);
}

#[test]
fn a_queue_pair_is_reset_and_used_again() {
    let (a, b) = pair(64, |q| q.max_send_wr(4).max_recv_wr(4));
    ends::a_queue_pair_is_reset_and_used_again(&a, &b, &[]);
}

#[test]
fn after_a_stream_gave_up_the_completions_stay_in_step() {
    let (a, b) = pair(64, |q| q.max_send_wr(4).max_recv_wr(4));
    ends::after_a_stream_gave_up_the_completions_stay_in_step(&a, &b);
}

#[test]
fn transitions_out_of_turn_never_reach_the_card() {
    let side = Side::new(&hca(), 64, |q| q);
    let rts = QpAttr::to(QpState::RTS).timeout(1).retry_cnt(1).rnr_retry(1).max_rd_atomic(1);
    assert!(matches!(side.qp.modify(&rts), Err(Error::Transition { .. })));
    side.qp.init().unwrap();
    side.qp.modify(&QpAttr::to(QpState::INIT).access(Access::REMOTE_READ)).unwrap();
    side.qp.modify(&QpAttr::to(QpState::RESET)).unwrap();
    let (a, b) = connect(side, Side::new(&hca(), 64, |q| q));
    a.qp.modify(&QpAttr::to(QpState::RTS).min_rnr_timer(3).access(Access::all())).unwrap();
    message(&a, &b, 1);
}

#[test]
fn a_queue_pair_speaks_to_itself() {
    let context = hca();
    let side = Side::new(&context, 64, |q| q);
    side.qp.connect(side.qp.address()).unwrap();
    side.qp.post_recv(&[RecvWr { wr_id: 3, sges: &[side.mr.sge(8, 8).unwrap()] }]).unwrap();
    side.qp.post_send(&[SendWr::send_inline(b"to self!")]).unwrap();
    sent(&side).ok().unwrap();
    assert_eq!(received(&side).ok().unwrap().wr_id, 3);
    assert_eq!(bytes(&side, 8, 8), b"to self!");
    let (a, b) = loopback(64, |q| q);
    message(&a, &b, 2);
    assert_eq!(a.qp.writes_in_order(), a.qp.writes_in_order());
}
