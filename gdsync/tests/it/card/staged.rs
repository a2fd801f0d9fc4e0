//! GPU memory on a card that cannot register it: there are no dma-bufs of this (simulated) GPU, and no peer-memory module.
//! Also while copies take long or do not end: memory that is told to be free is touched by no copy any more.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use gdsync::Error;
use gdsync::cuda::Gpu;
use gdsync::rdma::Route;
use gdsync::verbs::{Access, Context, Mr, OnGpu, QpAttr, QpState, RecvWr, SendWr, Staging, Transport};

use super::setup::{Bench, DMA_BUF_SUPPORTED, assert_says, open_by, simulated_gpu};
use crate::child::own_process;
use crate::common::{Side, pattern, received, reconnect, sent, until};

const LEN: usize = 300_000;
/// `CUDA_ERROR_LAUNCH_FAILED`.
const LAUNCH_FAILED: u32 = 719;

fn bench() -> Bench {
    Bench::with(|control| control.attribute(0, DMA_BUF_SUPPORTED, 0))
}

/// A side, and a region of GPU memory.
struct End {
    side: Side,
    mr: Mr,
}

impl End {
    fn new(context: &Context, gpu: &Gpu) -> Self {
        let build =
            |q: gdsync::verbs::QpBuilder| q.max_send_sge(2).max_recv_sge(2).on_gpu(gpu, OnGpu::empty());
        let side = Side::new(context, LEN, build);
        let mr = side.pd.register(&gpu.alloc(LEN).unwrap(), Access::all()).unwrap();
        Self { side, mr }
    }

    fn receive(&self, at: usize, len: usize) {
        let sges = [self.mr.sge(at, len).unwrap()];
        self.side.qp.post_recv(&[RecvWr::new(&sges).id(1)]).unwrap();
    }

    fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.mr.memory().read(at, &mut out).unwrap();
        out
    }
}

fn ends(gpu: &Gpu) -> (End, End) {
    let context = open_by(None, Some(gpu)).unwrap();
    let (a, b) = (End::new(&context, gpu), End::new(&context, gpu));
    a.side.qp.connect(b.side.qp.address()).unwrap();
    b.side.qp.connect(a.side.qp.address()).unwrap();
    (a, b)
}

#[test]
#[ignore = "`card` runs it on the card"]
fn thread_stages_what_the_card_does_not_reach() {
    let bench = bench();
    let (a, b) = ends(&bench.gpu);
    assert_eq!(a.side.context.description(), "CPU proxy of mlx5_0");
    let path = a.side.qp.transfer_path(&a.mr, 100).unwrap();
    assert_eq!(path.transport(), Transport::Staging);
    for why in [a.side.context.not_direct().unwrap(), path.reason()] {
        assert!(why.contains("dma-buf") && why.contains("nvidia_peermem"), "{why}");
    }
    assert_eq!(a.side.qp.transfer_path(&a.side.mr, 100).unwrap().transport(), Transport::Card);
    for (round, len) in [1, 4096, 70_001, LEN - 40].into_iter().enumerate() {
        let data = pattern(len, round);
        a.mr.memory().write(11, &data).unwrap();
        b.mr.memory().fill(0, LEN, 0xee).unwrap();
        // Room for more than comes: what is behind stays.
        b.receive(7, len + 9);
        a.side.qp.post_send(&[SendWr::send(&[a.mr.sge(11, len).unwrap()])]).unwrap();
        sent(&a.side).ok().unwrap();
        assert_eq!(received(&b.side).ok().unwrap().byte_len as usize, len);
        assert!(b.bytes(7, len) == data, "{len} bytes");
        assert_eq!([b.bytes(0, 7), b.bytes(7 + len, 9)].concat(), [0xee; 16]);
    }
}

#[test]
#[ignore = "`card` runs it on the card"]
fn reads_and_atomics_bring_into_gpu_memory_and_a_fence_waits_for_that() {
    let bench = bench();
    let (a, b) = ends(&bench.gpu);
    let data = pattern(100_000, 5);
    b.side.memory().write(0, &data).unwrap();
    let word = b.side.memory().word64(200_000).unwrap();
    word.store(41);
    b.receive(0, 100_000);
    let at = |offset| b.side.mr.remote(offset).unwrap();
    let here = |offset, len| [a.mr.sge(offset, len).unwrap()];
    a.side
        .qp
        .post_send(&[
            SendWr::read(at(0), &here(1000, 100_000)),
            SendWr::fetch_add(at(200_000), 1, here(200_008, 8)[0]),
            // Of what the read brings.
            SendWr::send(&here(1000, 100_000)).fence(),
            SendWr::write(at(250_000), &here(200_008, 8)),
        ])
        .unwrap();
    for _ in 0..4 {
        sent(&a.side).ok().unwrap();
    }
    received(&b.side).ok().unwrap();
    assert!(a.bytes(1000, 100_000) == data && b.bytes(0, 100_000) == data);
    assert_eq!((a.bytes(200_008, 8), word.load()), (41_u64.to_ne_bytes().to_vec(), 42));
    assert_eq!(b.side.memory().word64(250_000).unwrap().load(), 41);
}

/// A WRITE with an immediate value takes a receive, whose buffers stay as they are. What ends at once holds up no fence behind it.
#[test]
#[ignore = "`card` runs it on the card"]
fn receive_of_an_immediate_value_stays_as_it_was() {
    let bench = bench();
    let (a, b) = ends(&bench.gpu);
    let data = pattern(1000, 6);
    a.mr.memory().write(0, &data).unwrap();
    b.mr.memory().fill(0, LEN, 0xee).unwrap();
    b.receive(0, 2000);
    let payload = [a.mr.sge(0, 1000).unwrap()];
    let write = SendWr::write(b.side.mr.remote(0).unwrap(), &payload).imm(6).fence();
    a.side.qp.post_send(&[SendWr::nop(), write]).unwrap();
    sent(&a.side).ok().unwrap();
    sent(&a.side).ok().unwrap();
    assert_eq!(received(&b.side).ok().unwrap().imm, Some(6));
    let mut there = vec![0; 1000];
    b.side.memory().read(0, &mut there).unwrap();
    assert!(there == data);
    assert_eq!(b.bytes(0, 2000), [0xee; 2000]);
}

#[test]
#[ignore = "`card` runs it on the card"]
fn peers_cannot_name_it() {
    let bench = bench();
    let (a, b) = ends(&bench.gpu);
    let error = b.mr.remote(0).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    assert_says(&error, &["staged", "host memory", "dma-buf", "nvidia-peermem"]);
    // Nor by the key alone.
    let at = gdsync::verbs::RemoteAddr { addr: b.mr.memory().addr(), rkey: b.mr.rkey() };
    a.side.qp.post_send(&[SendWr::write(at, &[a.mr.sge(0, 8).unwrap()])]).unwrap();
    assert!(sent(&a.side).ok().is_err());
}

#[test]
#[ignore = "`card` runs it on the card"]
fn who_opens_the_device_decides() {
    let bench = Bench::with(|_| {});
    let (gpu, context) = (&bench.gpu, open_by(Some(Route::Proxy), Some(&bench.gpu)).unwrap());
    let side = Side::new(&context, 64, |q| q);
    let memory = gpu.alloc(4096).unwrap();
    let transport = || {
        let mr = side.pd.register(&memory, Access::LOCAL_WRITE)?;
        Ok::<_, Error>(side.qp.transfer_path(&mr, 8)?.transport())
    };
    assert_eq!(transport().unwrap(), Transport::CardFromGpu);
    assert_eq!(context.stage(Staging::Always), Some(Staging::Refused));
    assert_eq!(transport().unwrap(), Transport::Staging);
    assert_eq!(context.stage(Staging::Never), Some(Staging::Always));
    assert_eq!(transport().unwrap(), Transport::CardFromGpu);
    assert_eq!(open_by(Some(Route::Direct), None).unwrap().stage(Staging::Always), None);
}

/// The queue pair says why, and works again once the copies do.
#[test]
#[ignore = "`card` runs it on the card"]
fn copy_that_fails_breaks_the_queue_pair() {
    let bench = bench();
    let (a, b) = ends(&bench.gpu);
    let control = &bench.control;
    let why = |error: Error| {
        assert_says(&error, &["staged", "copying payload"]);
    };
    let send = |mr: &Mr| a.side.qp.post_send(&[SendWr::send(&[mr.sge(0, 5000).unwrap()])]).unwrap();
    let again = || {
        control.mend("cuMemcpyAsync");
        reconnect(&a.side.qp, &b.side.qp);
        a.mr.memory().write(0, &pattern(5000, 9)).unwrap();
        b.receive(0, 5000);
        send(&a.mr);
        sent(&a.side).ok().unwrap();
        received(&b.side).ok().unwrap();
        assert!(b.bytes(0, 5000) == pattern(5000, 9));
    };
    // On its way out, on its way in, and what a read brings.
    control.fail("cuMemcpyAsync", LAUNCH_FAILED);
    send(&a.mr);
    assert!(sent(&a.side).ok().is_err());
    why(a.side.qp.check().unwrap_err());
    again();
    control.fail("cuMemcpyAsync", LAUNCH_FAILED);
    b.receive(0, 5000);
    send(&a.side.mr);
    assert!(received(&b.side).ok().is_err());
    why(b.side.qp.check().unwrap_err());
    again();
    control.fail("cuMemcpyAsync", LAUNCH_FAILED);
    let here = [a.mr.sge(0, 8).unwrap()];
    a.side.qp.post_send(&[SendWr::read(b.side.mr.remote(0).unwrap(), &here)]).unwrap();
    assert!(sent(&a.side).ok().is_err());
    why(a.side.qp.check().unwrap_err());
    again();
}

/// Everything posted has one completion when the queue pair breaks amidst copies.
#[test]
#[ignore = "`card` runs it on the card"]
fn abort_amidst_copies_flushes_the_rest() {
    let bench = bench();
    let (a, b) = ends(&bench.gpu);
    for round in 0..20 {
        for n in 0..20 {
            b.receive(n * 10_000, 10_000);
        }
        for n in 0..20 {
            a.side.qp.post_send(&[SendWr::send(&[a.mr.sge(n * 10_000, 10_000).unwrap()])]).unwrap();
        }
        for _ in 0..round {
            sent(&a.side).ok().unwrap();
        }
        a.side.qp.abort().unwrap();
        b.side.qp.abort().unwrap();
        (round..20).for_each(|_| _ = sent(&a.side));
        (0..20).for_each(|_| _ = received(&b.side));
        assert!(a.side.qp.poll_send().is_none() && b.side.qp.poll_recv().is_none());
        reconnect(&a.side.qp, &b.side.qp);
    }
}

/// Memory that only copy engines reach.
#[test]
#[ignore = "`card` runs it on the card"]
fn memory_without_a_mapping_is_staged_too() {
    let bench = bench();
    let (a, b) = ends(&bench.gpu);
    let gpu = Gpu::open_with(*bench.gpu.api(), 0, None).unwrap();
    let mut addr = 0;
    {
        let _current = gpu.enter().unwrap();
        // SAFETY: a place for the address; a context is current.
        unsafe { gpu.api().mem_alloc(&mut addr, 8192) }.unwrap();
    }
    // SAFETY: it is never freed.
    let memory = unsafe { gpu.wrap(addr, 8192) }.unwrap();
    assert!(!memory.is_mapped());
    let mr = a.side.pd.register(&memory, Access::LOCAL_WRITE).unwrap();
    let there = [mr.sge(96, 4000).unwrap()];
    let data = pattern(4000, 1);
    b.mr.memory().write(0, &data).unwrap();
    a.side.qp.post_recv(&[RecvWr::new(&there).id(1)]).unwrap();
    b.side.qp.post_send(&[SendWr::send(&[b.mr.sge(0, 4000).unwrap()])]).unwrap();
    received(&a.side).ok().unwrap();
    b.receive(10_000, 4000);
    a.side.qp.post_send(&[SendWr::send(&there)]).unwrap();
    received(&b.side).ok().unwrap();
    assert!(b.bytes(10_000, 4000) == data);
}

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: u32 = 2;

/// Begins what the end of a copy is needed for, and returns when that has begun and stays so. Memory dropped before is freed
/// first: CUDA frees it when all streams are idle, and holds up other calls until then. For the same reason in a process of its
/// own: other tests free memory.
fn amidst_a_copy(bench: &Bench, begin: impl FnOnce()) {
    bench.gpu.reclaim(crate::common::PATIENCE).unwrap();
    bench.control.hold_copies(0, true);
    begin();
    until(|| bench.control.held_copies() == 1);
}

fn send(from: &End, mr: &gdsync::verbs::Mr, len: usize) {
    from.side.qp.post_send(&[SendWr::send(&[mr.sge(0, len).unwrap()])]).unwrap();
}

/// What a copy on its way out would overwrite comes after it.
#[test]
#[ignore = "`card` runs it on the card"]
fn send_is_flushed_when_its_copy_has_ended() {
    own_process!();
    let bench = bench();
    let (a, b) = ends(&bench.gpu);
    for len in [8, 100_000] {
        amidst_a_copy(&bench, || send(&a, &a.mr, len));
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
#[ignore = "`card` runs it on the card"]
fn receive_that_lands_is_told_when_it_has() {
    own_process!();
    let bench = bench();
    let (a, b) = ends(&bench.gpu);
    let data = pattern(5000, 1);
    a.side.memory().write(0, &data).unwrap();
    for at in [0, 5000] {
        b.receive(at, 5000);
    }
    amidst_a_copy(&bench, || send(&a, &a.side.mr, 5000));
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
#[ignore = "`card` runs it on the card"]
fn reset_destruction_and_deregistration_wait_for_copies() {
    own_process!();
    let bench = bench();
    let ended_amidst = |name: &str, lands: bool, end: &mut (dyn FnMut(&mut Option<End>) + Send)| {
        let (a, b) = ends(&bench.gpu);
        b.receive(0, 5000);
        amidst_a_copy(&bench, || send(&a, if lands { &a.side.mr } else { &a.mr }, 5000));
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
#[ignore = "`card` runs it on the card"]
fn copy_that_does_not_end_is_told_and_its_memory_kept() {
    own_process!();
    let bench = bench();
    let (a, b) = ends(&bench.gpu);
    let is_told = |error: &Error| {
        assert_says(&error, &["staged", "10s", "kept", "Xid"]);
    };
    let other = a.side.pd.build_qp().build().unwrap();
    other.connect(other.address()).unwrap();
    amidst_a_copy(&bench, || send(&a, &a.mr, 5000));
    a.side.qp.abort().unwrap();
    assert!(sent(&a.side).ok().unwrap_err().is_flush());
    is_told(&a.side.qp.check().unwrap_err());
    // What it might overwrite.
    other.post_recv(&[RecvWr::new(&[a.mr.sge(0, 8).unwrap()]).id(1)]).unwrap();
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
#[ignore = "`card` runs it on the card"]
fn every_gpu_copies_its_own_memory() {
    own_process!();
    let bench = Bench::with(|control| (0..2).for_each(|gpu| control.attribute(gpu, DMA_BUF_SUPPORTED, 0)));
    let second = simulated_gpu(1);
    let context = open_by(None, Some(&bench.gpu)).unwrap();
    let first = End::new(&context, &bench.gpu);
    let [a, b] = [0; 2].map(|_| End::new(&context, &second));
    a.side.qp.connect(b.side.qp.address()).unwrap();
    b.side.qp.connect(a.side.qp.address()).unwrap();
    first.side.qp.connect(first.side.qp.address()).unwrap();
    amidst_a_copy(&bench, || send(&first, &first.mr, 5000));
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
#[ignore = "`card` runs it on the card"]
fn gpu_without_a_copy_engine_is_refused_with_the_cause() {
    let bench = bench();
    let context = open_by(None, Some(&bench.gpu)).unwrap();
    let side = Side::new(&context, 64, |q| q);
    let memory = bench.gpu.alloc(64).unwrap();
    bench.control.fail("cuStreamCreateWithPriority", OUT_OF_MEMORY);
    let error = side.pd.register(&memory, Access::LOCAL_WRITE).unwrap_err();
    assert!(matches!(error, Error::Cuda { .. }), "{error:?}");
    assert_says(&error, &["stream for copies", "OUT_OF_MEMORY"]);
    bench.control.mend("cuStreamCreateWithPriority");
    side.pd.register(&memory, Access::LOCAL_WRITE).unwrap();
}
