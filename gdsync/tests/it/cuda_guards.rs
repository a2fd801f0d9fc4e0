//! What a stream of a GPU survives: a driver that refuses, a GPU that is lost, misuse. On the simulated driver.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use gdsync::cuda::{Gpu, channels};
use gdsync::error::Error;
use gdsync::memory::Memory;
use gdsync::stream::{Batch, Cond, CudaStreamConfig, Stream, Via};
use gdsync::verbs::SendWr;
use gdsync_testkit::driver::Control;

use crate::child::is_own_process;
use crate::common::{PATIENCE, Side, connect, gate, gates, hca, loopback, until};
use crate::place::within_a_capture;

const WAYS: [Via; 2] = [Via::MemOp, Via::Kernel];

/// The driver for one test, and a GPU; `None` where the test has passed in a process of its own.
fn rig() -> Option<(Control, Gpu)> {
    is_own_process().then(|| (Control::take(), crate::simulated::gpu(0).unwrap()))
}

fn stream(gpu: &Gpu, via: Via, wait_limit: Duration) -> Stream {
    let config = CudaStreamConfig { via, wait_limit, ..CudaStreamConfig::default() };
    Stream::cuda(gpu, config).unwrap()
}

/// `CUDA_ERROR_OUT_OF_MEMORY`, which says nothing of what runs.
const FOR_NOW: u32 = 2;
/// The calls that submit.
const SUBMISSIONS: [&str; 2] = ["cuStreamBatchMemOp", "cuLaunchKernelEx"];
/// `CUDA_ERROR_LAUNCH_FAILED`.
const FOR_EVER: u32 = 719;

#[test]
fn mark_that_is_refused_fails_the_stream_and_stops_its_queues() {
    let Some((control, gpu)) = rig() else { return };
    for via in WAYS {
        let (a, b) = connect(
            Side::new(&hca(), 64, |q| q.on_gpu(&gpu, gdsync::verbs::OnGpu::empty())),
            Side::new(&hca(), 64, |q| q),
        );
        let stream = stream(&gpu, via, PATIENCE);
        let [gate, last] = gates();
        let mut batch = Batch::new();
        batch.wait_value32(&gate, 1, Cond::Geq);
        let send = batch.send(&a.qp, &SendWr::nop()).unwrap();
        batch.wait_send(&a.qp).unwrap();
        batch.write_value32(&last, 7);
        stream.submit(&mut batch).unwrap();
        SUBMISSIONS.iter().for_each(|call| control.fail(call, FOR_NOW));
        let start = Instant::now();
        let error = stream.synchronize(PATIENCE).unwrap_err();
        assert!(matches!(error, Error::Cuda { .. }), "{via}: {error}");
        assert!(start.elapsed() < PATIENCE / 2);
        assert!(
            matches!(send.status(), Err(Error::QpStopped { .. } | Error::Completion(_))),
            "{:?}",
            send.status()
        );
        // The wait was released, so that nothing is left on the GPU.
        assert_eq!(gate.load(), 1);
        SUBMISSIONS.iter().for_each(|call| control.mend(call));
        drop((stream, a, b));
    }
}

#[test]
fn memory_of_a_stream_is_not_given_away_while_marks_are_refused() {
    let Some((control, gpu)) = rig() else { return };
    for via in WAYS {
        let stream = stream(&gpu, via, PATIENCE);
        // No word releases what holds the stream.
        let (open, gate) = channel::<()>();
        let (tell, begun) = channel();
        let hold = move || {
            tell.send(()).unwrap();
            _ = gate.recv();
        };
        stream.host_fn(hold).unwrap();
        begun.recv_timeout(PATIENCE).unwrap();
        SUBMISSIONS.iter().for_each(|call| control.fail(call, FOR_NOW));
        // Refused where the watchdog was quicker.
        let _ = stream.host_fn(|| {});
        let error = stream.synchronize(Duration::from_millis(300)).unwrap_err();
        assert!(matches!(error, Error::Cuda { .. } | Error::Deadline { .. }), "{via}: {error}");
        until(|| stream.query().error.is_some());
        assert_ne!(stream.query().pending, 0, "{via}: what the GPU may still do is not over");
        drop(open);
        until(|| stream.query().pending == 0);
        let error = stream.synchronize(PATIENCE).unwrap_err();
        assert!(matches!(error, Error::Cuda { .. }), "{via}: {error}");
        SUBMISSIONS.iter().for_each(|call| control.mend(call));
    }
}

#[test]
fn lost_gpu_is_noticed_though_all_is_marked() {
    for via in WAYS {
        let Some((control, gpu)) = rig() else { return };
        let stream = stream(&gpu, via, PATIENCE);
        let (open, gate) = channel::<()>();
        stream.host_fn(move || _ = gate.recv()).unwrap();
        // Puts a mark behind it.
        let late = stream.synchronize(Duration::from_millis(10)).unwrap_err();
        assert!(matches!(late, Error::Deadline { .. }), "{late}");
        control.break_context(gpu.raw_context(), FOR_EVER);
        drop(open);
        let error = stream.synchronize(PATIENCE).unwrap_err();
        assert!(matches!(error, Error::Cuda { .. }), "{via}: {error}");
        let start = Instant::now();
        drop(stream);
        assert!(start.elapsed() < PATIENCE / 8);
    }
}

#[test]
fn wait_that_was_passed_fails_no_stream() {
    let Some((_control, gpu)) = rig() else { return };
    for via in WAYS {
        let limit = Duration::from_secs(2);
        let stream = stream(&gpu, via, limit);
        let flag = gate();
        let mut batch = Batch::new();
        batch.wait_value32(&flag, 1, Cond::Eq);
        // Taken back by the stream itself: whoever looks later finds the wait not satisfied.
        batch.write_value32(&flag, 0);
        stream.submit(&mut batch).unwrap();
        flag.store(1);
        until(|| flag.load() == 0);
        until(|| {
            let status = stream.query();
            assert!(status.error.is_none(), "{via}: {:?}", status.error);
            status.pending == 0
        });
    }
}

#[test]
fn marks_count_as_calls() {
    let Some((control, gpu)) = rig() else { return };
    for via in WAYS {
        let config = gdsync::stream::CudaStreamConfig { via, depth: 512, ..Default::default() };
        let stream = gdsync::stream::Stream::cuda(&gpu, config).unwrap().with_timeout(Duration::ZERO);
        let [gate, count] = gates();
        stream.wait_value32(&gate, 1, Cond::Geq).unwrap();
        control.depth(600);
        let full = (1..600).find_map(|n| {
            let refused = stream.write_value32(&count, n).err();
            // Asks for a mark.
            let _ = stream.synchronize(Duration::ZERO);
            refused
        });
        assert!(matches!(full, Some(Error::StreamFull { .. })), "{via}: {full:?}");
        assert_eq!(control.blocked(), 0, "{via}: the driver blocked a caller");
        gate.store(1);
        stream.synchronize(PATIENCE).unwrap();
    }
}

/// While it takes one registration back, CUDA makes no other, and it takes none back while a stream waits.
#[test]
fn to_reach_new_memory_does_not_keep_a_stream_from_its_deadline() {
    let Some((control, gpu)) = rig() else { return };
    for via in WAYS {
        let stream = stream(&gpu, via, Duration::from_millis(300));
        let words = Memory::alloc(64).unwrap();
        stream.wait_value32(&words.word32(0).unwrap(), 1, Cond::Geq).unwrap();
        let stalled = control.stalled();
        std::thread::scope(|scope| {
            scope.spawn(|| drop_registered(&gpu));
            // Or the limit is over, where that thread is late.
            until(|| control.stalled() > stalled || stream.query().error.is_some());
            let fresh = Memory::alloc(64).unwrap();
            let start = Instant::now();
            let submitted = stream.write_value32(&fresh.word32(0).unwrap(), 1);
            assert!(start.elapsed() < PATIENCE / 2, "the wait was not released");
            let error = submitted.and_then(|()| stream.synchronize(PATIENCE)).unwrap_err();
            assert!(matches!(error, Error::StreamWait { .. }), "{error}");
        });
    }
}

/// Registers a page and takes the registration back, as an application does.
fn drop_registered(gpu: &gdsync::cuda::Gpu) {
    let page = Memory::alloc(4096).unwrap();
    let addr = std::ptr::with_exposed_provenance_mut(usize::try_from(page.addr()).unwrap());
    let _current = gpu.enter().unwrap();
    // SAFETY: a page of this function.
    unsafe { gpu.api().mem_host_register(addr, 4096, 3) }.unwrap();
    // SAFETY: registered above.
    unsafe { gpu.api().mem_host_unregister(addr) }.unwrap();
}

#[test]
fn batch_that_the_driver_has_no_room_for_is_refused() {
    let Some((control, gpu)) = rig() else { return };
    for via in WAYS {
        let stream = stream(&gpu, via, PATIENCE);
        let words = Memory::alloc(64).unwrap();
        let gate = words.word32(0).unwrap();
        let mut functions = Batch::new();
        functions.wait_value32(&gate, 1, Cond::Geq);
        (0..300).for_each(|_| functions.host_fn(|| {}));
        let mut writes = Batch::new();
        writes.wait_value32(&gate, 1, Cond::Geq);
        (0..300_000).for_each(|n| writes.write_value32(&words.word32(4).unwrap(), n));
        for batch in [&mut functions, &mut writes] {
            let refused = stream.submit(batch);
            assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{via}: {refused:?}");
        }
        assert_eq!(control.blocked(), 0);
    }
}

/// Waits of the front end hold channels of the GPU, those of kernels do not.
#[test]
fn as_many_waits_as_the_gpu_has_channels_are_told_of() {
    let most = channels::here();
    for via in WAYS {
        for waiting in [most - 1, most] {
            // Its own GPU: no other streams.
            let Some((_control, gpu)) = rig() else { return };
            let words = Memory::alloc(4096).unwrap();
            let limit = Duration::from_secs(1);
            let streams: Vec<_> = (0..waiting).map(|_| stream(&gpu, via, limit)).collect();
            let start = Instant::now();
            for (n, stream) in streams.iter().enumerate() {
                stream.wait_value32(&words.word32(4 * n).unwrap(), 1, Cond::Geq).unwrap();
            }
            // The first may be over where this thread is late.
            let all_wait = start.elapsed() < limit;
            let error = |stream: &Stream| stream.synchronize(PATIENCE).unwrap_err();
            let errors: Vec<_> = streams.iter().map(error).collect();
            assert!(errors.iter().all(|error| matches!(error, Error::StreamWait { .. })), "{errors:?}");
            let told = errors.iter().any(|error| error.to_string().contains(channels::VARIABLE));
            let expected = via == Via::MemOp && waiting == most;
            assert!(told == expected || !all_wait, "{via}, {waiting}: {}", errors[0]);
        }
    }
}

#[test]
fn host_functions_cannot_use_streams_and_let_them_go() {
    let Some((_control, gpu)) = rig() else { return };
    for via in WAYS {
        let (first, second) = (stream(&gpu, via, PATIENCE), stream(&gpu, via, PATIENCE));
        let [word, gate] = gates();
        second.wait_value32(&gate, 1, Cond::Geq).unwrap();
        let (tx, rx) = channel();
        let (weak, other) = (first.clone(), second.clone());
        first
            .host_fn(move || {
                tx.send(weak.write_value32(&word, 1)).unwrap();
                tx.send(weak.capture(|_| Ok(())).map(drop)).unwrap();
                // Not even the last handle of a stream calls CUDA here.
                drop((weak, other));
            })
            .unwrap();
        for refused in [rx.recv_timeout(PATIENCE).unwrap(), rx.recv_timeout(PATIENCE).unwrap()] {
            assert!(matches!(refused, Err(Error::Unsupported { .. })), "{via}: {refused:?}");
        }
        first.synchronize(PATIENCE).unwrap();
        gate.store(1);
        second.synchronize(PATIENCE).unwrap();
    }
}

#[test]
fn stream_may_end_in_its_own_host_function() {
    let Some((control, gpu)) = rig() else { return };
    for via in WAYS {
        let streams = control.alive().streams;
        let own = stream(&gpu, via, PATIENCE);
        let (give, take) = channel::<Stream>();
        own.host_fn(move || drop(take.recv())).unwrap();
        give.send(own).unwrap();
        until(|| control.alive().streams <= streams);
    }
    assert_eq!(control.misplaced(), 0, "CUDA was called in a host function");
}

/// They take calls on streams only from a thread with a context: each makes it current, also in a row.
#[test]
fn older_drivers_have_a_context_for_each_call() {
    let Some((control, gpu)) = rig() else { return };
    drop(gpu);
    control.version(12_090);
    let gpu = crate::simulated::gpu(0).unwrap();
    for via in WAYS {
        let stream = stream(&gpu, via, PATIENCE);
        let (a, _b) = loopback(64, |q| q);
        let hops = || {
            for _ in 0..3 {
                stream.send(&a.qp, &SendWr::nop()).unwrap();
                stream.wait_send(&a.qp).unwrap();
            }
        };
        hops();
        std::thread::scope(|scope| scope.spawn(hops).join().unwrap());
        stream.synchronize(PATIENCE).unwrap();
    }
}

/// Who promises not to capture is not asked: broken, the promise puts what is submitted into the application's graph.
#[test]
fn capture_is_looked_for_unless_there_will_be_none() {
    let Some((_control, gpu)) = rig() else { return };
    for (via, looked_for) in WAYS.into_iter().flat_map(|via| [(via, true), (via, false)]) {
        let config = CudaStreamConfig { via, captured_by_others: looked_for, ..CudaStreamConfig::default() };
        let stream = Stream::cuda(&gpu, config).unwrap();
        let word = gate();
        stream.write_value32(&word, 1).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        let done = within_a_capture(&gpu, &stream, || stream.write_value32(&word, 2));
        assert_eq!(matches!(done, Err(Error::Unsupported { .. })), looked_for, "{via}: {done:?}");
        assert_eq!(word.load(), 1, "{via}: it was not run");
        if looked_for {
            stream.write_value32(&word, 3).unwrap();
            stream.synchronize(PATIENCE).unwrap();
            assert_eq!(word.load(), 3);
        }
    }
}

/// Memory of an application begins and ends anywhere; CUDA registers pages.
#[test]
fn parts_of_a_page_are_registered_once_and_for_all_of_their_users() {
    let Some((control, gpu)) = rig() else { return };
    for via in WAYS {
        let stream = stream(&gpu, via, PATIENCE);
        let pages = Memory::alloc(3 * 4096).unwrap();
        let part = |at: usize, len| {
            let first = std::ptr::with_exposed_provenance_mut::<u8>(usize::try_from(pages.addr()).unwrap());
            // SAFETY: inside the pages, which outlive the part.
            unsafe { Memory::from_raw(first.wrapping_add(at), len) }.unwrap()
        };
        let write = |memory: &Memory, at| {
            let word = memory.word32(at).unwrap();
            let before = word.load();
            stream.write_value32(&word, before + 1).unwrap();
            stream.synchronize(PATIENCE).unwrap();
            assert_eq!(word.load(), before + 1, "{via}");
        };
        let before = control.alive().registrations;
        let (first, long, inner) = (part(0, 64), part(64, 2 * 4096), part(2 * 4096, 128));
        write(&first, 0);
        // Of the page of the first and two others.
        write(&long, 8188);
        write(&inner, 124);
        assert_eq!(control.alive().registrations, before + 2);
        drop((first, long));
        // What nobody uses is given back, and only that.
        until(|| control.alive().registrations == before + 1);
        write(&inner, 0);
        drop(inner);
        until(|| control.alive().registrations == before);
        let last = part(4000, 200);
        write(&last, 196);
        drop(last);
        gpu.reclaim(PATIENCE).unwrap();
        assert_eq!(control.alive().registrations, before);
    }
}

#[test]
fn memory_that_the_application_registered_in_part_is_refused() {
    let Some((_control, gpu)) = rig() else { return };
    let stream = stream(&gpu, WAYS[0], PATIENCE);
    let pages = Memory::alloc(2 * 4096).unwrap();
    let first = std::ptr::with_exposed_provenance_mut(usize::try_from(pages.addr()).unwrap());
    let current = gpu.enter().unwrap();
    // SAFETY: a page of this test.
    unsafe { gpu.api().mem_host_register(first, 4096, 3) }.unwrap();
    drop(current);
    let refused = stream.write_value32(&pages.word32(0).unwrap(), 1);
    assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
    let current = gpu.enter().unwrap();
    // SAFETY: registered above.
    unsafe { gpu.api().mem_host_unregister(first) }.unwrap();
    drop(current);
    stream.write_value32(&pages.word32(0).unwrap(), 1).unwrap();
    stream.synchronize(PATIENCE).unwrap();
}
