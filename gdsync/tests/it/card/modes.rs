//! Cards and libraries that differ from what most do: what the library finds out, and what it does then.

use std::iter;
use std::time::Duration;

use gdsync::Error;
use gdsync::cuda::Gpu;
use gdsync::rdma::Route;
use gdsync::stream::{Batch, CudaStreamConfig, Stream};
use gdsync::verbs::{Context, OnGpu, RecvWr, SendWr};

use super::setup::{Bench, open, open_by};
use crate::child::own_process;
use crate::common::{PATIENCE, Side, connect, hca, message, received, reconnect, stream_with};

/// Messages travel whoever reads the rings.
fn talk(context: &Context) {
    let (a, b) = connect(Side::new(context, 64, |q| q), Side::new(context, 64, |q| q));
    message(&a, &b, 1);
}

#[test]
#[ignore = "`card` runs it on the card"]
fn without_modes_the_card_reads_the_rings() {
    own_process!();
    let context = hca();
    assert_eq!(context.not_direct(), None);
    talk(&context);
}

#[test]
#[ignore = "`card` runs it on the card"]
fn card_that_does_not_see_our_doorbells_is_left_to_the_proxy() {
    own_process!("GDASYNC_CARD_MODES" = "deaf=1");
    let context = hca();
    let why = context.not_direct().expect("the self-test fails");
    assert!(why.contains("rang its doorbell") && why.contains("no completion"), "{why}");
    assert!(context.description().contains("proxy"), "{}", context.description());
    talk(&context);
}

#[test]
#[ignore = "`card` runs it on the card"]
fn route_that_was_asked_for_is_not_tested() {
    own_process!("GDASYNC_CARD_MODES" = "deaf=1");
    let context = open_by(Some(Route::Direct), None).unwrap();
    assert_eq!((context.description(), context.not_direct()), ("mlx5 card mlx5_0", None));
}

#[test]
#[ignore = "`card` runs it on the card"]
fn library_that_is_too_old_is_left_to_the_proxy() {
    own_process!("GDASYNC_CARD_MODES" = "no-cq-ex");
    let context = hca();
    let why = context.not_direct().expect("no completion queue can be made");
    assert!(why.contains("rdma-core 31"), "{why}");
    talk(&context);
    let forced = open_by(Some(Route::Direct), None).unwrap();
    let error = forced.alloc_pd().unwrap().build_qp().build().unwrap_err();
    assert!(matches!(error, Error::Unsupported { by: "the installed libmlx5", .. }), "{error:?}");
}

/// A stream of a GPU waits in vain for a message to `a`, and gives up. Behind that wait are sends that it never rings for, and waits
/// for them.
fn give_up(gpu: &Gpu, a: &Side, sends: u64) {
    let wait_limit = Duration::from_millis(20);
    let stream = Stream::cuda(gpu, CudaStreamConfig { wait_limit, ..CudaStreamConfig::default() }).unwrap();
    a.qp.post_recv(&[RecvWr::new(&[]).id(1)]).unwrap();
    let mut batch = Batch::new();
    batch.wait_recv(&a.qp).unwrap();
    for _ in 0..sends {
        batch.send(&a.qp, &SendWr::nop()).unwrap();
        batch.wait_send(&a.qp).unwrap();
    }
    stream.submit(&mut batch).unwrap();
    let error = stream.synchronize(PATIENCE).unwrap_err();
    assert!(matches!(error, Error::StreamWait { .. }), "{error:?}");
}

/// A stream of the CPU gives up before it rings for a send, for which a stream of a GPU waits.
fn hide(gpu: &Gpu, a: &Side) {
    let wait_limit = Duration::from_millis(20);
    let sender = stream_with("sender", wait_limit);
    let waiter = Stream::cuda(gpu, CudaStreamConfig { wait_limit, ..CudaStreamConfig::default() }).unwrap();
    a.qp.post_recv(&[RecvWr::new(&[]).id(1)]).unwrap();
    let mut batch = Batch::new();
    batch.wait_recv(&a.qp).unwrap();
    batch.send(&a.qp, &SendWr::nop()).unwrap();
    sender.submit(&mut batch).unwrap();
    let mut batch = Batch::new();
    let waits = batch.wait_send(&a.qp).and_then(|_| waiter.submit(&mut batch));
    // The sender may have given up already, where this thread is late.
    assert!(matches!(waits, Ok(()) | Err(Error::QpStopped { .. })), "{waits:?}");
    for stream in iter::once(sender).chain(waits.is_ok().then_some(waiter)) {
        let error = stream.synchronize(PATIENCE).unwrap_err();
        assert!(matches!(error, Error::StreamWait { .. } | Error::QpStopped { .. }), "{error:?}");
    }
}

/// Whatever happened to `a`: after a reset the completions must be where the library expects them.
fn stays_in_step(happens: impl Fn(&Gpu, &Side, u64)) {
    let bench = Bench::take();
    let gpu = &bench.gpu;
    let side = || Side::new(&open(gpu), 64, |q| q.max_send_wr(8).max_recv_wr(4).on_gpu(gpu, OnGpu::empty()));
    let (a, b) = connect(side(), side());
    for round in 0..8 {
        happens(gpu, &a, round);
        reconnect(&a.qp, &b.qp);
        message(&a, &b, round);
        message(&b, &a, round);
    }
}

#[test]
#[ignore = "`card` runs it on the card"]
fn sends_that_were_never_rung_for_are_flushed_by_a_doorbell() {
    own_process!("GDASYNC_CARD_MODES" = "flush-by-doorbell");
    stays_in_step(|gpu, a, _| hide(gpu, a));
}

#[test]
#[ignore = "`card` runs it on the card"]
fn flushes_that_come_late_are_waited_for() {
    own_process!("GDASYNC_CARD_MODES" = "late-flush,register");
    stays_in_step(|gpu, a, round| give_up(gpu, a, 1 + round % 3));
    stays_in_step(|gpu, a, _| hide(gpu, a));
}

#[test]
#[ignore = "`card` runs it on the card"]
fn flush_with_another_counter_is_a_flush() {
    own_process!("GDASYNC_CARD_MODES" = "no-flush-counter");
    let (a, _b) = connect(Side::new(&hca(), 64, |q| q), Side::new(&hca(), 64, |q| q));
    a.qp.post_recv(&[RecvWr::new(&[]).id(3); 3]).unwrap();
    a.qp.abort().unwrap();
    for _ in 0..3 {
        let error = received(&a).ok().unwrap_err();
        assert!(error.is_flush(), "{error}");
    }
    let error = a.qp.check().unwrap_err();
    assert!(matches!(&error, Error::Completion(failed) if failed.is_flush()), "{error:?}");
}
