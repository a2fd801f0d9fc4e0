//! Streams, queue pairs and devices that end while work is pending: by abort, by drop, by panic, by an error of CUDA.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use gdsync::error::Error;
use gdsync::memory::Memory;
use gdsync::stream::{Cond, CudaStreamConfig, Stream, Via};
use gdsync::verbs::{QpBuilder, SendWr};

use super::common::{PATIENCE, Side, connect, hca};
use super::matrix::{Rig, Way, matrix};
use super::place::Place;
use super::sharing::Application;
use super::waits::{post_recvs, starts_again, stopped};

const LIMIT: Duration = Duration::from_millis(3);
const AT_ONCE: Duration = Duration::ZERO;

fn patient(q: QpBuilder) -> QpBuilder {
    q.rnr_retry(7).min_rnr_timer(1)
}

/// A stream that sends what nobody receives, and waits for what nobody sends.
fn block(rig: &Rig<'_>, stream: &Stream, a: &Side) {
    post_recvs(a, 1);
    rig.queue(stream, |batch| {
        let sent = batch.send(&a.qp, &SendWr::send(&[]))?;
        Ok(vec![sent, batch.wait_recv(&a.qp)?, batch.wait_send(&a.qp)?])
    })
    .unwrap();
}

fn is_abort(error: &Error) -> bool {
    matches!(error, Error::StreamAborted { .. })
}

#[test]
fn a_stream_is_aborted() {
    matrix("an aborted stream", |rig| {
        let (a, b) = rig.pair(patient);
        let stream = rig.stream();
        block(rig, &stream, &a);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| stream.synchronize(PATIENCE));
            let since = Instant::now();
            stream.abort();
            stopped(rig, &stream, &a.qp, (since, AT_ONCE), is_abort);
            assert!(is_abort(&waiter.join().unwrap().unwrap_err()));
        });
        starts_again(rig, &a, &b);
    });
}

/// The queue pair was stopped by the end of its stream.
fn assert_stopped(a: &Side) {
    let root = a.qp.check().unwrap_err();
    assert!(matches!(&root, Error::QpStopped { reason, .. } if is_abort(reason)), "{root}");
}

#[test]
fn a_stream_is_dropped() {
    matrix("a dropped stream", |rig| {
        let (a, b) = rig.pair(patient);
        let stream = rig.stream();
        block(rig, &stream, &a);
        drop(stream);
        assert_stopped(&a);
        starts_again(rig, &a, &b);
    });
}

#[test]
fn a_host_function_panics() {
    matrix("a panic in a host function", |rig| {
        let (a, b) = rig.pair(patient);
        let stream = rig.stream();
        let gate = Memory::alloc(4).unwrap().word32(0).unwrap();
        stream.wait_value32(&gate, 1, Cond::Eq).unwrap();
        stream.host_fn(|| panic!("for the test")).unwrap();
        block(rig, &stream, &a);
        let since = Instant::now();
        gate.store(1);
        stopped(
            rig,
            &stream,
            &a.qp,
            (since, AT_ONCE),
            |error| matches!(error, Error::HostFnPanicked { message, .. } if message == "for the test"),
        );
        starts_again(rig, &a, &b);
    });
}

/// A failing test unwinds through everything while its streams wait.
#[test]
fn a_test_panics() {
    matrix("a panic in a test", |rig| {
        let (a, b) = connect(rig.side(&hca(), patient), rig.side(&hca(), patient));
        let failing = catch_unwind(AssertUnwindSafe(|| {
            // In the order in which they are dropped.
            let (a, b) = (a, b);
            let streams = [rig.stream(), rig.stream()];
            block(rig, &streams[0], &a);
            block(rig, &streams[1], &b);
            let gate = Memory::alloc(64).unwrap();
            let other = rig.stream();
            other.wait_value64(&gate.word64(0).unwrap(), 1, Cond::Eq).unwrap();
            let graph = other.capture(|stream| stream.write_value64(&gate.word64(8).unwrap(), 1)).unwrap();
            graph.launch(&other).unwrap();
            let _capture = streams[1].begin_capture().unwrap();
            // As a failed assertion does, but without its message.
            std::panic::resume_unwind(Box::new("a failed assertion"));
        }));
        assert!(failing.is_err());
        let (a, b) = rig.pair(patient);
        rig.message(&rig.stream(), &a, &b, 4);
    });
}

#[test]
fn a_stream_keeps_the_device_that_it_waits_for() {
    matrix("a device without handles", |rig| {
        let gone = |a: Side| {
            let stream = rig.place.stream(LIMIT);
            post_recvs(&a, 1);
            let since = Instant::now();
            let queued = rig.await_receives(&stream, &a, 1);
            drop(a);
            (stream, queued, since)
        };
        // Nobody else has the device, so nobody can send: the wait limit ends it.
        let own = hca();
        let (a, b) = connect(rig.side(&own, |q| q), rig.side(&own, |q| q));
        drop((own, b));
        let (stream, queued, since) = gone(a);
        let error = rig.released(&stream, since, LIMIT).unwrap_err();
        assert!(matches!(error, Error::StreamWait { .. }), "{error}");
        assert!(queued.completions[0].status().is_err());

        // A peer can still send.
        let (a, b) = connect(rig.side(&hca(), |q| q), rig.side(&rig.b, |q| q));
        let stream = rig.stream();
        post_recvs(&a, 1);
        let queued = rig.await_receives(&stream, &a, 1);
        drop(a);
        b.qp.post_send(&[SendWr::send(&[]).id(3)]).unwrap();
        rig.released(&stream, Instant::now(), AT_ONCE).unwrap();
        assert_eq!(queued.completions[0].status().unwrap().unwrap().wr_id, 200);
        assert_eq!(b.qp.send_cq().wait(PATIENCE).unwrap().ok().unwrap().wr_id, 3);
    });
}

/// An error of running work sticks to the context in CUDA: nothing in it goes on, and other contexts do not notice.
#[test]
fn a_context_fails() {
    const LAUNCH_FAILED: u32 = 719;
    matrix("a failed context", |rig| {
        // A real one would take the process's other tests with it.
        let Some(control) = &rig.bed.control else { return };
        let app = Application::new(rig.bed);
        let place = Place { gpu: app.gpu(app.stream), ..rig.place.clone() };
        {
            let doomed = Rig::new(&place, rig.way, rig.bed);
            let (a, _b) = doomed.pair(patient);
            let stream = doomed.stream();
            block(&doomed, &stream, &a);
            control.break_context(app.context, LAUNCH_FAILED);
            let since = Instant::now();
            stream.abort();
            let error = rig.released(&stream, since, AT_ONCE).unwrap_err();
            assert!(is_abort(&error), "{error}");
            let refused = Stream::cuda(&place.gpu, CudaStreamConfig::default()).unwrap_err();
            assert!(
                matches!(refused, Error::Cuda { .. }) && refused.to_string().contains("719"),
                "{refused}"
            );
        }
        drop(place);
        app.lose();
        let (a, b) = rig.pair(patient);
        rig.message(&rig.stream(), &a, &b, 6);
    });
}

#[test]
fn the_driver_refuses_a_submission() {
    matrix("a submission that the driver refuses", |rig| {
        let Some(control) = &rig.bed.control else { return };
        let (a, b) = rig.pair(patient);
        let stream = rig.stream();
        // CUDA knows it: before it is told of a new one, the stream is marked.
        let word = Memory::alloc(4).unwrap().word32(0).unwrap();
        stream.write_value32(&word, 0).unwrap();
        block(rig, &stream, &a);
        let call = match (rig.way, rig.place.via) {
            (Way::Graph, _) => "cuGraphLaunch",
            (Way::Eager, Via::Kernel) => "cuLaunchKernel",
            (Way::Eager, _) => "cuStreamBatchMemOp",
        };
        control.fail_once(call, 0, 2);
        let since = Instant::now();
        // It may be on its way, so the stream fails, not the call.
        rig.queue(&stream, |batch| {
            batch.write_value32(&word, 1);
            Ok(Vec::new())
        })
        .unwrap();
        stopped(rig, &stream, &a.qp, (since, AT_ONCE), |error| {
            matches!(error, Error::Cuda { what: "submitting to the stream", .. })
        });
        starts_again(rig, &a, &b);
    });
}
