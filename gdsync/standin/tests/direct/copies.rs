//! Staged GPU memory while copies take long, or do not end: whoever is told that memory is his own finds it untouched.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use gdsync::Error;
use gdsync::cuda::Gpu;
use gdsync::verbs::{Access, QpAttr, QpState, RecvWr, SendWr};
use gdsync_testkit::driver::{self, Control};

use crate::common::{Side, pattern, received, reconnect, sent, until};
use crate::gpu::{DMA_BUF_SUPPORTED, bench_with, open_by};
use crate::staged::{End, LEN, bench, ends};

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: u32 = 2;

/// Begins what the end of a copy is needed for, and returns when that has begun and stays so.
fn amidst_a_copy(control: &Control, begin: impl FnOnce()) {
    control.hold_copies(0, true);
    begin();
    until(|| control.held_copies() == 1);
}

fn send(from: &End, mr: &gdsync::verbs::Mr, len: usize) {
    from.side.qp.post_send(&[SendWr::send(&[mr.sge(0, len).unwrap()])]).unwrap();
}

/// What a copy on its way out would overwrite comes after it.
#[test]
fn a_send_is_flushed_when_its_copy_has_ended() {
    let bench = bench();
    let (a, b) = ends(&bench.gpu);
    for len in [8, 100_000] {
        amidst_a_copy(&bench.control, || send(&a, &a.mr, len));
        a.side.qp.abort().unwrap();
        assert!((0..100).all(|_| a.side.qp.poll_send().is_none()), "flushed while a copy runs");
        bench.control.hold_copies(0, false);
        assert!(sent(&a.side).ok().unwrap_err().is_flush());
        reconnect(&a.side.qp, &b.side.qp);
        let data = pattern(len, len);
        b.side.memory().write(0, &data).unwrap();
        a.receive(0, len);
        send(&b, &b.side.mr, len);
        received(&a.side).ok().unwrap();
        sent(&b.side).ok().unwrap();
        assert!(a.bytes(0, len) == data);
    }
}

#[test]
fn a_receive_that_lands_is_told_when_it_has() {
    let bench = bench();
    let (a, b) = ends(&bench.gpu);
    let data = pattern(5000, 1);
    a.side.memory().write(0, &data).unwrap();
    for at in [0, 5000] {
        b.receive(at, 5000);
    }
    amidst_a_copy(&bench.control, || send(&a, &a.side.mr, 5000));
    b.side.qp.abort().unwrap();
    // Also when the device has had its time to give back what it has.
    let end = Instant::now() + Duration::from_millis(2500);
    while Instant::now() < end {
        assert!(b.side.qp.poll_recv().is_none(), "told while a copy runs");
        thread::sleep(Duration::from_millis(1));
    }
    bench.control.hold_copies(0, false);
    // It had come before; the other one had not.
    received(&b.side).ok().unwrap();
    assert!(received(&b.side).ok().unwrap_err().is_flush());
    assert!(b.bytes(0, 5000) == data);
}

/// Whoever ends something that copies use comes back when they have ended.
#[test]
fn reset_destruction_and_deregistration_wait_for_copies() {
    let bench = bench();
    let ended_amidst = |name: &str, lands: bool, end: &mut (dyn FnMut(&mut Option<End>) + Send)| {
        let (a, b) = ends(&bench.gpu);
        b.receive(0, 5000);
        amidst_a_copy(&bench.control, || send(&a, if lands { &a.side.mr } else { &a.mr }, 5000));
        let (mut it, _other) = if lands { (Some(b), a) } else { (Some(a), b) };
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                end(&mut it);
                is_over.store(true, Ordering::Release);
            });
            // As long as it takes to do it without a look at copies.
            thread::sleep(Duration::from_millis(50));
            assert!(!is_over.load(Ordering::Acquire), "{name} did not wait for a copy");
            bench.control.hold_copies(0, false);
        });
    };
    for lands in [false, true] {
        let mut reset = |end: &mut Option<End>| {
            end.as_ref().unwrap().side.qp.modify(&QpAttr::to(QpState::RESET)).unwrap()
        };
        ended_amidst("reset", lands, &mut reset);
        let mut kept = None;
        ended_amidst("destruction", lands, &mut |end| {
            let End { side, mr } = end.take().unwrap();
            drop(side);
            kept = Some(mr);
        });
        let mut kept = None;
        ended_amidst("deregistration", lands, &mut |end| {
            let End { side, mr } = end.take().unwrap();
            drop(mr);
            kept = Some(side);
        });
    }
}

/// It is told, and its memory is left alone until it does end.
#[test]
fn a_copy_that_does_not_end_is_told_and_its_memory_kept() {
    let bench = bench();
    let (a, b) = ends(&bench.gpu);
    let is_told = |error: &Error| {
        for word in ["staged", "10s", "kept", "Xid"] {
            assert!(error.to_string().contains(word), "'{error}' lacks '{word}'");
        }
    };
    let other = a.side.pd.build_qp().build().unwrap();
    other.connect(other.address()).unwrap();
    amidst_a_copy(&bench.control, || send(&a, &a.mr, 5000));
    a.side.qp.abort().unwrap();
    assert!(sent(&a.side).ok().unwrap_err().is_flush());
    is_told(&a.side.qp.check().unwrap_err());
    // What it might overwrite.
    other.post_recv(&[RecvWr { wr_id: 1, sges: &[a.mr.sge(0, 8).unwrap()] }]).unwrap();
    until(|| other.check().is_err());
    is_told(&other.check().unwrap_err());
    let reset = || a.side.qp.modify(&QpAttr::to(QpState::RESET));
    is_told(&reset().unwrap_err());
    // All is well when it has ended.
    bench.control.hold_copies(0, false);
    until(|| reset().is_ok());
    reconnect(&a.side.qp, &b.side.qp);
    a.mr.memory().write(0, &pattern(5000, 2)).unwrap();
    b.receive(0, 5000);
    send(&a, &a.mr, 5000);
    received(&b.side).ok().unwrap();
    assert!(b.bytes(0, 5000) == pattern(5000, 2));
}

/// One that copies nothing holds up no other, and a message may be of the memory of both.
#[test]
fn every_gpu_copies_its_own_memory() {
    let bench = bench_with(|control| (0..2).for_each(|gpu| control.attribute(gpu, DMA_BUF_SUPPORTED, 0)));
    let second = Gpu::open_with(*bench.gpu.api(), 1, driver::gdr().ok()).unwrap();
    let context = open_by(None, Some(&bench.gpu)).unwrap();
    let first = End::new(&context, &bench.gpu);
    let [a, b] = [0; 2].map(|_| End::new(&context, &second));
    a.side.qp.connect(b.side.qp.address()).unwrap();
    b.side.qp.connect(a.side.qp.address()).unwrap();
    first.side.qp.connect(first.side.qp.address()).unwrap();
    amidst_a_copy(&bench.control, || send(&first, &first.mr, 5000));
    let data = pattern(LEN, 3);
    a.mr.memory().write(0, &data).unwrap();
    b.receive(0, LEN);
    send(&a, &a.mr, LEN);
    received(&b.side).ok().unwrap();
    assert!(b.bytes(0, LEN) == data);
    bench.control.hold_copies(0, false);
    // Half of it from each.
    let third = a.side.pd.register(&bench.gpu.alloc(5000).unwrap(), Access::LOCAL_WRITE).unwrap();
    third.memory().write(0, &data[..5000]).unwrap();
    b.receive(0, 10_000);
    let both = [third.sge(0, 5000).unwrap(), a.mr.sge(5000, 5000).unwrap()];
    a.side.qp.post_send(&[SendWr::send(&both)]).unwrap();
    received(&b.side).ok().unwrap();
    assert!(b.bytes(0, 10_000) == data[..10_000]);
    drop((a, b, first, third));
    second.reclaim(crate::common::PATIENCE).unwrap();
}

#[test]
fn a_gpu_without_a_copy_engine_is_refused_with_the_cause() {
    let bench = bench();
    let context = open_by(None, Some(&bench.gpu)).unwrap();
    let side = Side::new(&context, 64, |q| q);
    let memory = bench.gpu.alloc(64).unwrap();
    bench.control.fail("cuStreamCreateWithPriority", OUT_OF_MEMORY);
    let error = side.pd.register(&memory, Access::LOCAL_WRITE).unwrap_err();
    assert!(matches!(error, Error::Cuda { .. }), "{error:?}");
    for word in ["stream for copies", "OUT_OF_MEMORY"] {
        assert!(error.to_string().contains(word), "'{error}' lacks '{word}'");
    }
    bench.control.mend("cuStreamCreateWithPriority");
    side.pd.register(&memory, Access::LOCAL_WRITE).unwrap();
}
