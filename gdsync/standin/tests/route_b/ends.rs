//! Everything that ends a queue pair of DevX, and what comes after.

use std::time::Duration;

use gdsync::Error;
use gdsync::mlx5::Syndrome;
use gdsync::stream::Batch;
use gdsync::verbs::{Access, OnGpu, QpAttr, QpState, RecvWr, SendWr};

use crate::common::{PATIENCE, Side, connect, received, reconnect, sent, stream_with};
use crate::traffic::message;
use crate::{Bench, complaints, open, pair};

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
    let gpu = bench.gpu.clone();
    let (a, b) = pair(&gpu, OnGpu::all(), 64, |q| q.max_recv_wr(8));
    for wr_id in 0..5 {
        b.qp.post_recv(&[RecvWr { wr_id, sges: &[b.mr.sge(0, 8).unwrap()] }]).unwrap();
    }
    b.qp.abort().unwrap();
    for wr_id in 0..5 {
        let error = received(&b).ok().unwrap_err();
        assert!(error.is_flush() && error.wr_id == wr_id, "{error}");
    }
    a.qp.post_send(&[SendWr::nop(), SendWr::send_inline(&[1; 8])]).unwrap();
    sent(&a).ok().unwrap();
    assert!(sent(&a).ok().is_err());
}

#[test]
fn a_peer_without_receives_ends_the_retries() {
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    let (a, _b) = pair(&gpu, OnGpu::all(), 64, |q| q.min_rnr_timer(1).rnr_retry(1).timeout(8).retry_cnt(1));
    a.qp.post_send(&[SendWr::send_inline(&[1; 8])]).unwrap();
    assert_eq!(sent(&a).ok().unwrap_err().syndrome, Syndrome::RNR_RETRY_EXC_ERR);
}

#[test]
fn a_queue_pair_is_reset_and_used_again() {
    let bench = Bench::take();
    let known = complaints();
    let gpu = bench.gpu.clone();
    let (a, b) = pair(&gpu, OnGpu::all(), 64, |q| q.max_send_wr(4).max_recv_wr(4));
    for round in 0..10 {
        for i in 0..round % 6 {
            message(&a, &b, i);
        }
        if round % 2 == 0 {
            // With some outstanding.
            b.qp.post_recv(&[RecvWr { wr_id: 1, sges: &[] }]).unwrap();
            b.qp.abort().unwrap();
        }
        reconnect(&a.qp, &b.qp);
    }
    message(&a, &b, 99);
    assert_eq!(complaints(), known);
}

/// A stream gives up waiting, the library completes in place of the card, and the queue pair is reset.
#[test]
fn after_a_stream_gave_up_the_completions_stay_in_step() {
    let bench = Bench::take();
    let gpu = bench.gpu.clone();
    let (a, b) = pair(&gpu, OnGpu::all(), 64, |q| q.max_send_wr(4).max_recv_wr(4));
    for round in 0..6 {
        let s = stream_with("impatient", Duration::from_millis(20));
        b.qp.post_recv(&[RecvWr { wr_id: 1, sges: &[] }]).unwrap();
        let mut batch = Batch::new();
        batch.wait_recv(&b.qp).unwrap();
        s.submit(&mut batch).unwrap();
        assert!(matches!(s.synchronize(PATIENCE), Err(Error::StreamWait { .. })), "round {round}");
        drop(s);
        reconnect(&a.qp, &b.qp);
        message(&a, &b, round);
    }
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
