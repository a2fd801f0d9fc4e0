//! Everything that ends a queue pair of DevX, and what comes after.

use gdsync::Error;
use gdsync::mlx5::Syndrome;
use gdsync::verbs::{Access, OnGpu, QpAttr, QpBuilder, QpState, RecvWr, SendWr};

use crate::common::{Side, connect, received, reconnect, sent, until};
use crate::setup::complaints_but_of_peers;
use crate::shared::{self, message};
use crate::{Bench, open, pair};

#[test]
fn a_wrong_key_is_the_root_cause_and_the_rest_is_flushed() {
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    let (a, b) = pair(&gpu, OnGpu::all(), 64, |q| q);
    let mut wrong = b.mr.remote(0).unwrap();
    wrong.rkey ^= 1;
    let nop = SendWr::nop().id(8);
    b.qp.post_recv(&[RecvWr { wr_id: 5, sges: &[b.mr.sge(0, 8).unwrap()] }]).unwrap();
    a.qp.post_send(&[SendWr::write_inline(wrong, &[1; 4]).id(7), nop]).unwrap();
    let error = sent(&a).ok().unwrap_err();
    assert_eq!((error.wr_id, error.syndrome), (7, Syndrome::REM_ACCESS_ERR));
    let error = sent(&a).ok().unwrap_err();
    assert!(error.is_flush() && error.wr_id == 8, "{error}");
    assert_eq!(a.qp.state(), QpState::ERR);
    // The other side has no completion of its own: what is posted there is flushed.
    let error = received(&b).ok().unwrap_err();
    assert!(error.is_flush() && error.wr_id == 5, "{error}");
    reconnect(&a.qp, &b.qp);
    message(&a, &b, 1);
}

#[test]
fn receives_are_flushed_by_err() {
    let bench = Bench::take();
    let (a, b) = pair(&bench.gpu, OnGpu::all(), 64, |q| q.max_recv_wr(8));
    shared::receives_are_flushed_by_err(&a, &b);
}

#[test]
fn a_peer_without_receives_ends_the_retries() {
    let bench = Bench::take();
    let quick = |q: QpBuilder| q.min_rnr_timer(1).rnr_retry(1).timeout(8).retry_cnt(1);
    let (a, _b) = pair(&bench.gpu, OnGpu::all(), 64, quick);
    shared::a_peer_without_receives_ends_the_retries(&a);
}

#[test]
fn a_queue_pair_is_reset_and_used_again() {
    let bench = Bench::take();
    let known = complaints_but_of_peers();
    let (a, b) = pair(&bench.gpu, OnGpu::all(), 64, |q| q.max_send_wr(4).max_recv_wr(4));
    shared::a_queue_pair_is_reset_and_used_again(&a, &b, &known);
}

#[test]
fn after_a_stream_gave_up_the_completions_stay_in_step() {
    let bench = Bench::take();
    let (a, b) = pair(&bench.gpu, OnGpu::all(), 64, |q| q.max_send_wr(4).max_recv_wr(4));
    shared::after_a_stream_gave_up_the_completions_stay_in_step(&a, &b);
}

/// Steps that repeat a state, with their optional attributes.
#[test]
fn rights_and_pauses_are_changed_between_the_steps() {
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    let side = |context| Side::new(context, 64, |q| q.on_gpu(&gpu, OnGpu::all()));
    let context = open(&gpu);
    let a = side(&context);
    a.qp.init().unwrap();
    a.qp.modify(&QpAttr::to(QpState::INIT).access(Access::REMOTE_READ)).unwrap();
    a.qp.modify(&QpAttr::to(QpState::RESET)).unwrap();
    let (a, b) = connect(a, side(&context));
    // No more writes to b.
    b.qp.modify(&QpAttr::to(QpState::RTS).min_rnr_timer(3).access(Access::REMOTE_READ)).unwrap();
    a.qp.post_send(&[SendWr::read(b.mr.remote(0).unwrap(), &[a.mr.sge(0, 8).unwrap()])]).unwrap();
    sent(&a).ok().unwrap();
    a.qp.post_send(&[SendWr::write_inline(b.mr.remote(0).unwrap(), &[1; 8])]).unwrap();
    assert_eq!(sent(&a).ok().unwrap_err().syndrome, Syndrome::REM_INV_REQ_ERR);
    // A step out of turn never reaches the card.
    let rts = QpAttr::to(QpState::RTS).timeout(1).retry_cnt(1).rnr_retry(1).max_rd_atomic(1);
    assert!(matches!(a.qp.modify(&rts), Err(Error::Transition { .. })));
}

/// It posted nothing, so no completion tells it.
#[test]
fn a_target_learns_that_a_peer_was_refused() {
    let bench = Bench::take();
    for what in [OnGpu::all(), OnGpu::SEND_QUEUE, OnGpu::empty()] {
        let (a, b) = pair(&bench.gpu, what, 64, |q| q);
        let mut wrong = b.mr.remote(0).unwrap();
        wrong.rkey ^= 1;
        a.qp.post_send(&[SendWr::write_inline(wrong, &[1; 4])]).unwrap();
        sent(&a).ok().unwrap_err();
        until(|| b.qp.state() == QpState::ERR);
        let text = b.qp.check().unwrap_err().to_string();
        let qpn = format!("{:#x}", b.qp.qpn());
        assert!(text.contains("IBV_EVENT_QP_ACCESS_ERR") && text.contains(&qpn), "{what:?}: {text}");
        // Others are not concerned, and a new life begins without it.
        let (c, d) = pair(&bench.gpu, what, 64, |q| q);
        message(&c, &d, 1);
        reconnect(&a.qp, &b.qp);
        message(&a, &b, 2);
    }
}
