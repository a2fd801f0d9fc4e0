//! The driver refuses, or the GPU is lost.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use gdsync::error::Error;
use gdsync::memory::Memory;
use gdsync::stream::{Batch, Cond};
use gdsync::verbs::SendWr;

use super::common::{PATIENCE, Side, connect, hca};
use super::{WAYS, rig, stream, until};

/// `CUDA_ERROR_OUT_OF_MEMORY`, which says nothing of what runs.
const FOR_NOW: u32 = 2;
/// `CUDA_ERROR_LAUNCH_FAILED`.
const FOR_EVER: u32 = 719;

#[test]
fn a_mark_that_is_refused_fails_the_stream_and_stops_its_queues() {
    let (control, gpu) = rig();
    for via in WAYS {
        let (a, b) = connect(
            Side::new(&hca(), 64, |q| q.on_gpu(&gpu, gdsync::verbs::OnGpu::empty())),
            Side::new(&hca(), 64, |q| q),
        );
        let stream = stream(&gpu, via, PATIENCE);
        let words = Memory::alloc(64).unwrap();
        let (gate, last) = (words.word32(0).unwrap(), words.word32(4).unwrap());
        let mut batch = Batch::new();
        batch.wait_value32(&gate, 1, Cond::Geq);
        let send = batch.send(&a.qp, &SendWr::nop()).unwrap();
        batch.wait_send(&a.qp).unwrap();
        batch.write_value32(&last, 7);
        stream.submit(&mut batch).unwrap();
        for call in ["cuStreamBatchMemOp", "cuLaunchKernel"] {
            control.fail(call, FOR_NOW);
        }
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
        for call in ["cuStreamBatchMemOp", "cuLaunchKernel"] {
            control.mend(call);
        }
        drop((stream, a, b));
    }
}

#[test]
fn memory_of_a_stream_is_not_given_away_while_marks_are_refused() {
    let (control, gpu) = rig();
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
        for call in ["cuStreamBatchMemOp", "cuLaunchKernel"] {
            control.fail(call, FOR_NOW);
        }
        // Refused where the watchdog was quicker.
        let _ = stream.host_fn(|| {});
        let error = stream.synchronize(Duration::from_millis(300)).unwrap_err();
        assert!(matches!(error, Error::Cuda { .. } | Error::Deadline { .. }), "{via}: {error}");
        until("the stream fails", || stream.query().error.is_some());
        assert_ne!(stream.query().pending, 0, "{via}: what the GPU may still do is not over");
        drop(open);
        until("CUDA tells that all is done", || stream.query().pending == 0);
        let error = stream.synchronize(PATIENCE).unwrap_err();
        assert!(matches!(error, Error::Cuda { .. }), "{via}: {error}");
        for call in ["cuStreamBatchMemOp", "cuLaunchKernel"] {
            control.mend(call);
        }
    }
}

#[test]
fn a_lost_gpu_is_noticed_though_all_is_marked() {
    for via in WAYS {
        let (control, gpu) = rig();
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
fn a_wait_that_was_passed_fails_no_stream() {
    let (_control, gpu) = rig();
    for via in WAYS {
        let limit = Duration::from_millis(200);
        let stream = stream(&gpu, via, limit);
        let words = Memory::alloc(64).unwrap();
        let flag = words.word32(0).unwrap();
        let mut batch = Batch::new();
        batch.wait_value32(&flag, 1, Cond::Eq);
        // Taken back by the stream itself: whoever looks later finds the wait not satisfied.
        batch.write_value32(&flag, 0);
        stream.submit(&mut batch).unwrap();
        flag.store(1);
        until("the stream is through", || flag.load() == 0);
        until("it is known", || {
            let status = stream.query();
            assert!(status.error.is_none(), "{via}: {:?}", status.error);
            status.pending == 0
        });
    }
}

#[test]
fn marks_count_as_calls() {
    let (control, gpu) = rig();
    for via in WAYS {
        let config = gdsync::stream::CudaStreamConfig { via, depth: 512, ..Default::default() };
        let stream = gdsync::stream::Stream::cuda(&gpu, config).unwrap();
        let words = Memory::alloc(64).unwrap();
        let (gate, count) = (words.word32(0).unwrap(), words.word32(4).unwrap());
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
    let (control, gpu) = rig();
    for via in WAYS {
        let stream = stream(&gpu, via, Duration::from_millis(300));
        let words = Memory::alloc(64).unwrap();
        stream.wait_value32(&words.word32(0).unwrap(), 1, Cond::Geq).unwrap();
        let stalled = control.stalled();
        std::thread::scope(|scope| {
            scope.spawn(|| drop_registered(&gpu));
            until("CUDA takes it back", || control.stalled() > stalled);
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
