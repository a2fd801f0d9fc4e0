//! What the application should not do is refused, and does no harm.

use std::sync::mpsc::channel;
use std::time::Duration;

use gdsync::cuda::channels;
use gdsync::error::Error;
use gdsync::memory::Memory;
use gdsync::stream::{Batch, Cond, CudaStreamConfig, Stream, Via};
use gdsync::verbs::SendWr;
use gdsync_testkit::driver::Control;

use super::capture::within_a_capture;
use super::common::{PATIENCE, loopback};
use super::{WAYS, rig, simulated, stream, until};

#[test]
fn waits_that_nothing_satisfies_are_refused() {
    let (_control, gpu) = rig();
    for via in WAYS {
        let stream = stream(&gpu, via, PATIENCE);
        let words = Memory::alloc(64).unwrap();
        let (narrow, wide) = (words.word32(0).unwrap(), words.word64(8).unwrap());
        for refused in [
            stream.wait_value32(&narrow, 0, Cond::And),
            stream.wait_value32(&narrow, u32::MAX, Cond::Nor),
            stream.wait_value64(&wide, 0, Cond::And),
            stream.wait_value64(&wide, u64::MAX, Cond::Nor),
        ] {
            assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
        }
        stream.synchronize(PATIENCE).unwrap();
    }
}

#[test]
fn a_batch_that_the_driver_has_no_room_for_is_refused() {
    let (control, gpu) = rig();
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
            let (_control, gpu) = rig();
            let words = Memory::alloc(4096).unwrap();
            let limit = Duration::from_secs(1);
            let streams: Vec<_> = (0..waiting).map(|_| stream(&gpu, via, limit)).collect();
            for (n, stream) in streams.iter().enumerate() {
                stream.wait_value32(&words.word32(4 * n).unwrap(), 1, Cond::Geq).unwrap();
            }
            let error = |stream: &Stream| stream.synchronize(PATIENCE).unwrap_err();
            let errors: Vec<_> = streams.iter().map(error).collect();
            assert!(errors.iter().all(|error| matches!(error, Error::StreamWait { .. })), "{errors:?}");
            let told = errors.iter().any(|error| error.to_string().contains(channels::VARIABLE));
            assert_eq!(told, via == Via::MemOp && waiting == most, "{via}, {waiting}: {}", errors[0]);
        }
    }
}

#[test]
fn host_functions_cannot_use_streams_and_let_them_go() {
    let (_control, gpu) = rig();
    for via in WAYS {
        let (first, second) = (stream(&gpu, via, PATIENCE), stream(&gpu, via, PATIENCE));
        let words = Memory::alloc(64).unwrap();
        let (word, gate) = (words.word32(0).unwrap(), words.word32(4).unwrap());
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
fn a_stream_may_end_in_its_own_host_function() {
    let (control, gpu) = rig();
    for via in WAYS {
        let streams = control.alive().streams;
        let own = stream(&gpu, via, PATIENCE);
        let (give, take) = channel::<Stream>();
        own.host_fn(move || drop(take.recv())).unwrap();
        give.send(own).unwrap();
        until("the stream is destroyed", || control.alive().streams <= streams);
    }
    assert_eq!(control.misplaced(), 0, "CUDA was called in a host function");
}

/// A launch would become a part of the application's graph, and never run.
#[test]
fn a_graph_is_not_launched_into_a_capture_of_the_application() {
    let (_control, gpu) = rig();
    for via in WAYS {
        let stream = stream(&gpu, via, PATIENCE);
        let words = Memory::alloc(64).unwrap();
        let word = words.word32(0).unwrap();
        let graph = stream.capture(|stream| stream.write_value32(&word, 1)).unwrap();
        let refused = within_a_capture(&gpu, &stream, || graph.launch(&stream));
        assert!(matches!(refused, Err(Error::Unsupported { .. })), "{via}: {refused:?}");
        graph.launch(&stream).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        assert_eq!(word.load(), 1);
    }
}

/// They take calls on streams only from a thread with a context: each makes it current, also in a row.
#[test]
fn older_drivers_have_a_context_for_each_call() {
    let control = Control::take();
    control.version(12_090);
    let gpu = simulated::gpu(0).unwrap();
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
fn a_capture_is_looked_for_unless_there_will_be_none() {
    let (_control, gpu) = rig();
    for (via, looked_for) in WAYS.into_iter().flat_map(|via| [(via, true), (via, false)]) {
        let config = CudaStreamConfig { via, captured_by_others: looked_for, ..CudaStreamConfig::default() };
        let stream = Stream::cuda(&gpu, config).unwrap();
        let word = Memory::alloc(64).unwrap().word32(0).unwrap();
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
    let (control, gpu) = rig();
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
        until("a page is given back", || control.alive().registrations == before + 1);
        write(&inner, 0);
        drop(inner);
        until("all is given back", || control.alive().registrations == before);
        let last = part(4000, 200);
        write(&last, 196);
        drop(last);
        gpu.reclaim(PATIENCE).unwrap();
        assert_eq!(control.alive().registrations, before);
    }
}

#[test]
fn memory_that_the_application_registered_in_part_is_refused() {
    let (_control, gpu) = rig();
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
