//! Cards that complete what was outstanding, when a queue pair fails, in a way of their own.

use std::time::Duration;

use gdsync::Error;
use gdsync::cuda::Gpu;
use gdsync::rdma::{DeviceConfig, Route};
use gdsync::stream::{Batch, CudaStreamConfig, Stream};
use gdsync::verbs::{Context, Device, OnGpu, RecvWr, SendWr};
use gdsync_testkit::driver::{self, Control};

use crate::common::{PATIENCE, Side, connect, hca, received, reconnect, stream_with};
use crate::setup::CARD;
use crate::{FLUSHES_BY_DOORBELL, LATE_FLUSHES, NO_FLUSH_COUNTERS, Quirks, message};

fn open(gpu: &Gpu) -> Context {
    let config =
        DeviceConfig { route: Some(Route::Direct), gpu: Some(gpu.clone()), ..DeviceConfig::default() };
    Device::find(Some(CARD)).unwrap().open_with(&config).unwrap()
}

/// A stream of a GPU waits in vain for a message to `a`, and gives up. Behind that wait are sends that it never rings for, and waits
/// for them.
fn give_up(gpu: &Gpu, a: &Side, sends: u64) {
    let wait_limit = Duration::from_millis(20);
    let stream = Stream::cuda(gpu, CudaStreamConfig { wait_limit, ..CudaStreamConfig::default() }).unwrap();
    a.qp.post_recv(&[RecvWr { wr_id: 1, sges: &[] }]).unwrap();
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
    a.qp.post_recv(&[RecvWr { wr_id: 1, sges: &[] }]).unwrap();
    let mut batch = Batch::new();
    batch.wait_recv(&a.qp).unwrap();
    batch.send(&a.qp, &SendWr::nop()).unwrap();
    sender.submit(&mut batch).unwrap();
    let mut batch = Batch::new();
    batch.wait_send(&a.qp).unwrap();
    waiter.submit(&mut batch).unwrap();
    for stream in [sender, waiter] {
        let error = stream.synchronize(PATIENCE).unwrap_err();
        assert!(matches!(error, Error::StreamWait { .. } | Error::QpStopped { .. }), "{error:?}");
    }
}

/// Whatever happened to `a`: after a reset the completions must be where the library expects them.
fn stays_in_step(quirk: u32, happens: impl Fn(&Gpu, &Side, u64)) {
    let _quirks = Quirks::of(quirk);
    let _control = Control::take();
    let gpu = Gpu::open_with(driver::api(), 0, driver::gdr().ok()).unwrap();
    let side =
        || Side::new(&open(&gpu), 64, |q| q.max_send_wr(8).max_recv_wr(4).on_gpu(&gpu, OnGpu::empty()));
    let (a, b) = connect(side(), side());
    for round in 0..8 {
        happens(&gpu, &a, round);
        reconnect(&a.qp, &b.qp);
        message(&a, &b, round);
        message(&b, &a, round);
    }
    drop((a, b));
    gpu.reclaim(PATIENCE).unwrap();
}

#[test]
fn sends_that_were_never_rung_for_are_flushed_by_a_doorbell() {
    stays_in_step(FLUSHES_BY_DOORBELL, |gpu, a, _| hide(gpu, a));
}

#[test]
fn flushes_that_come_late_are_waited_for() {
    stays_in_step(LATE_FLUSHES, |gpu, a, round| give_up(gpu, a, 1 + round % 3));
    stays_in_step(LATE_FLUSHES, |gpu, a, _| hide(gpu, a));
}

#[test]
fn a_flush_with_another_counter_is_a_flush() {
    let _quirks = Quirks::of(NO_FLUSH_COUNTERS);
    let (a, _b) = connect(Side::new(&hca(), 64, |q| q), Side::new(&hca(), 64, |q| q));
    a.qp.post_recv(&[RecvWr { wr_id: 3, sges: &[] }; 3]).unwrap();
    a.qp.abort().unwrap();
    for _ in 0..3 {
        let error = received(&a).ok().unwrap_err();
        assert!(error.is_flush(), "{error}");
    }
    let error = a.qp.check().unwrap_err();
    assert!(matches!(&error, Error::Completion(failed) if failed.is_flush()), "{error:?}");
}
