//! Waits that nobody satisfies, and streams, queue pairs and devices that end while work is pending: by abort, reset, drop,
//! panic, or an error of CUDA.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use gdsync::error::Error;
use gdsync::memory::Memory;
use gdsync::mlx5::Syndrome;
use gdsync::stream::{Cond, CudaStreamConfig, Stream, Via};
use gdsync::verbs::{Qp, QpAttr, QpState, SendWr};

use super::gpus::Application;
use super::{FLUSH, Rig, Way, broke, matrix, on_gpu, patient, post_recvs, refuses};
use crate::common::{PATIENCE, Side, connect, gate, hca, until};
use crate::place::{Place, places_on};

/// How long streams wait in vain.
const LIMIT: Duration = Duration::from_millis(3);
const AT_ONCE: Duration = Duration::ZERO;

/// The stream failed for a reason, within `deadline`, and took the queue pair with it.
pub(crate) fn stopped(
    rig: &Rig<'_>,
    stream: &Stream,
    qp: &Qp,
    (since, deadline): (Instant, Duration),
    is: impl Fn(&Error) -> bool,
) {
    let error = rig.released(stream, since, deadline).unwrap_err();
    assert!(is(&error), "{error}");
    let text = error.to_string();
    let word = gate();
    let later = [
        stream.write_value32(&word, 1),
        stream.host_fn(|| {}),
        stream.capture(|_| Ok(())).map(drop),
        stream.synchronize(PATIENCE),
    ];
    later.into_iter().for_each(|refused| assert_eq!(refused.unwrap_err().to_string(), text));
    let root = qp.check().unwrap_err();
    assert!(matches!(&root, Error::QpStopped { reason, .. } if is(reason)), "{root}");
    refuses(stream, qp, &root);
}

/// The queue pair of a stream that failed works again at once, with another stream.
pub(crate) fn starts_again(rig: &Rig<'_>, a: &Side, b: &Side) {
    rig.recover(&rig.stream(), a, b);
}

/// GPU memory that is freed without this library.
struct DriverMemory<'p> {
    place: &'p Place,
    addr: u64,
}

impl<'p> DriverMemory<'p> {
    fn new(place: &'p Place) -> Self {
        let mut addr = 0;
        let _current = place.gpu.enter().unwrap();
        // SAFETY: a place for the answer; a context is current.
        unsafe { place.gpu.api().mem_alloc(&mut addr, 1 << 20) }.unwrap();
        Self { place, addr }
    }

    fn free(&self) {
        let _current = self.place.gpu.enter().unwrap();
        // SAFETY: allocated in `new`; nothing uses it.
        unsafe { self.place.gpu.api().mem_free(self.addr) }.unwrap();
    }
}

/// While one thread frees GPU memory, CUDA holds up all others until every stream is done.
#[test]
fn driver_is_held_up() {
    on_gpu(|bed, _| {
        for place in places_on(&bed.gpu) {
            let (held, bystander) = (place.stream(LIMIT), place.stream(LIMIT));
            let words = Memory::alloc(16).unwrap();
            let (never, other) = (words.word32(0).unwrap(), words.word32(8).unwrap());
            let memory = DriverMemory::new(&place);
            held.wait_value32(&never, 1, Cond::Eq).unwrap();
            std::thread::scope(|scope| {
                // Begins before the watchdog of the stream has looked at it.
                scope.spawn(|| memory.free());
                scope.spawn(|| {
                    bystander.write_value32(&other, 1).unwrap();
                    bystander.synchronize(PATIENCE).unwrap();
                });
                let error = held.synchronize(PATIENCE).unwrap_err();
                assert!(matches!(error, Error::StreamWait { .. }), "{place:?}: {error}");
            });
        }
    });
}

/// Of waits in a row the first one stands for all: the watchdog knows of the others, too.
#[test]
fn last_of_waits_in_a_row() {
    matrix("the last of waits in a row", |rig| {
        let (a, b) = rig.pair(|q| q);
        post_recvs(&a, 3, &[]);
        b.qp.post_send(&[SendWr::send(&[]), SendWr::send(&[])]).unwrap();
        b.qp.wait_all_sends(PATIENCE).unwrap();
        let stream = rig.stream_with(LIMIT);
        let since = Instant::now();
        let [first, second, third] = [(); 3].map(|()| stream.wait_recv(&a.qp).unwrap());
        stopped(
            rig,
            &stream,
            &a.qp,
            (since, LIMIT),
            |error| matches!(error, Error::StreamWait { what, .. } if what.contains("receive 2 (wr_id")),
        );
        for (completion, id) in [(first, 200), (second, 201)] {
            assert_eq!(completion.status().unwrap().unwrap().wr_id, id);
        }
        assert!(third.status().is_err());
        starts_again(rig, &a, &b);
    });
}

/// The watchdog had asked CUDA whether the stream is done when no wait held it. The answer comes when a kernel has given up.
#[test]
fn wait_that_a_kernel_gave_up_does_not_count_as_done() {
    on_gpu(|bed, _| {
        for place in places_on(&bed.gpu).filter(|place| place.via == Via::Kernel) {
            let stream = place.stream(LIMIT);
            let word = Memory::alloc(8).unwrap().word32(0).unwrap();
            let (go, gate) = mpsc::channel();
            let memory = DriverMemory::new(&place);
            word.store(1);
            stream.host_fn(move || gate.recv().unwrap()).unwrap();
            stream.wait_value32(&word, 1, Cond::Eq).unwrap();
            std::thread::scope(|scope| {
                // Holds up the query until the stream is idle.
                scope.spawn(|| memory.free());
                std::thread::sleep(10 * LIMIT);
                word.store(0);
                go.send(()).unwrap();
                let error = stream.synchronize(PATIENCE).unwrap_err();
                assert!(matches!(error, Error::StreamWait { .. }), "{place:?}: {error}");
            });
        }
    });
}

#[test]
fn message_that_is_never_sent() {
    matrix("a message that is never sent", |rig| {
        let (a, b) = rig.pair(|q| q);
        post_recvs(&a, 1, &[]);
        let stream = rig.stream_with(LIMIT);
        let behind = SendWr::write_inline(b.mr.remote(0).unwrap(), b"x");
        let since = Instant::now();
        let queued = rig
            .queue(&stream, |batch| {
                let got = batch.wait_recv(&a.qp)?;
                batch.send(&a.qp, &behind)?;
                Ok(vec![got, batch.wait_send(&a.qp)?])
            })
            .unwrap();
        let qpn = format!("QP {:#x}", a.qp.qpn());
        stopped(rig, &stream, &a.qp, (since, LIMIT), |error| {
            matches!(error, Error::StreamWait { what, after, .. }
                if what.contains("receive 0 (wr_id") && what.contains(&qpn) && *after == LIMIT)
        });
        assert!(since.elapsed() >= LIMIT);
        assert!(queued.completions.iter().all(|completion| completion.status().is_err()));
        assert_eq!(b.memory().to_vec()[0], 0, "the send behind the wait never started");
        starts_again(rig, &a, &b);
    });
}

#[test]
fn send_that_never_completes() {
    matrix("a send that never completes", |rig| {
        // The peer has no receive, and the sender asks for ever.
        let (a, b) = rig.pair(patient);
        let stream = rig.stream_with(LIMIT);
        let since = Instant::now();
        let queued = rig
            .queue(&stream, |batch| Ok(vec![batch.send(&a.qp, &SendWr::send(&[]))?, batch.wait_send(&a.qp)?]))
            .unwrap();
        stopped(
            rig,
            &stream,
            &a.qp,
            (since, LIMIT),
            |error| matches!(error, Error::StreamWait { what, .. } if what.contains("send 0 (wr_id")),
        );
        assert!(queued.completions.iter().all(|completion| completion.status().is_err()));
        starts_again(rig, &a, &b);
    });
}

#[test]
fn word_that_is_never_written() {
    matrix("a word that is never written", |rig| {
        let (a, b) = rig.pair(|q| q);
        let words = Memory::alloc(64).unwrap();
        for (wide, cond) in [(true, Cond::Eq), (false, Cond::Geq), (true, Cond::And), (false, Cond::Nor)] {
            let stream = rig.stream_with(LIMIT);
            let (narrow, long) = (words.word32(0).unwrap(), words.word64(8).unwrap());
            narrow.store(if cond == Cond::Nor { u32::MAX } else { 0 });
            long.store(0);
            let since = Instant::now();
            rig.queue(&stream, |batch| {
                match wide {
                    true => batch.wait_value64(&long, 6, cond),
                    false => batch.wait_value32(&narrow, 5, cond),
                }
                batch.send(&a.qp, &SendWr::write_inline(b.mr.remote(0).unwrap(), b"x"))?;
                Ok(vec![batch.wait_send(&a.qp)?])
            })
            .unwrap();
            let name = if wide { "WAIT64" } else { "WAIT32" };
            stopped(
                rig,
                &stream,
                &a.qp,
                (since, LIMIT),
                |error| matches!(error, Error::StreamWait { what, .. } if what.contains(name)),
            );
            assert_eq!(b.memory().to_vec()[0], 0, "the send behind the wait never started");
            starts_again(rig, &a, &b);
            b.memory().fill(0, 8, 0).unwrap();
        }
    });
}

#[test]
fn queue_pair_is_aborted() {
    matrix("an aborted queue pair", |rig| {
        let (a, b) = rig.pair(patient);
        let stream = rig.stream();
        // What the stream has rung.
        let wrs: [_; 3] = std::array::from_fn(|i| SendWr::send(&[]).id(100 + i as u64));
        let abort = || a.qp.abort().unwrap();
        assert_eq!(rig.sends(&stream, &a, &wrs, AT_ONCE, abort), [FLUSH; 3]);
        broke(&a, 100, Syndrome::WR_FLUSH_ERR);
        rig.recover(&stream, &a, &b);
        // What it will ring.
        let gate = gate();
        stream.wait_value32(&gate, 1, Cond::Eq).unwrap();
        let abort = || {
            a.qp.abort().unwrap();
            gate.store(1);
        };
        assert_eq!(rig.sends(&stream, &a, &wrs, AT_ONCE, abort), [FLUSH; 3]);
        broke(&a, 100, Syndrome::WR_FLUSH_ERR);
        rig.recover(&stream, &a, &b);
        // What it waits for.
        post_recvs(&a, 2, &[]);
        let awaited = rig.await_receives(&stream, &a, 2);
        let since = Instant::now();
        a.qp.abort().unwrap();
        assert_eq!(rig.receives(&stream, &a, &awaited, since, AT_ONCE), [FLUSH; 2]);
        broke(&a, 200, Syndrome::WR_FLUSH_ERR);
        rig.recover(&stream, &a, &b);
    });
}

#[test]
fn reset_is_refused_while_a_stream_waits() {
    matrix("a reset under a stream", |rig| {
        let (a, b) = rig.pair(|q| q);
        let stream = rig.stream();
        post_recvs(&a, 1, &[]);
        let awaited = rig.await_receives(&stream, &a, 1);
        for _ in 0..3 {
            let refused = a.qp.modify(&QpAttr::to(QpState::RESET)).unwrap_err();
            assert!(matches!(refused, Error::Busy { queue: "receive", .. }), "{refused}");
        }
        // It is as if nobody had tried.
        b.qp.post_send(&[SendWr::send(&[])]).unwrap();
        assert_eq!(rig.receives(&stream, &a, &awaited, Instant::now(), AT_ONCE), [None]);
        assert_eq!(b.qp.send_cq().wait(PATIENCE).unwrap().syndrome, None);
        rig.recover(&stream, &a, &b);
    });
}

#[test]
fn deadline_of_the_cpu_breaks_nothing() {
    matrix("a deadline of the CPU", |rig| {
        let (a, b) = rig.pair(|q| q);
        let stream = rig.stream();
        post_recvs(&a, 1, &[]);
        let awaited = rig.await_receives(&stream, &a, 1);
        assert!(matches!(stream.synchronize(LIMIT), Err(Error::Deadline { after: LIMIT, .. })));
        assert_eq!(stream.query().pending, 1);
        b.qp.post_send(&[SendWr::send(&[])]).unwrap();
        assert_eq!(rig.receives(&stream, &a, &awaited, Instant::now(), AT_ONCE), [None]);
        assert_eq!(b.qp.send_cq().wait(PATIENCE).unwrap().syndrome, None);
        rig.message(&stream, &a, &b, 5);
    });
}

/// A stream that sends what nobody receives, and waits for what nobody sends.
fn block(rig: &Rig<'_>, stream: &Stream, a: &Side) {
    post_recvs(a, 1, &[]);
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
fn stream_is_aborted() {
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

#[test]
fn dropped_stream_finishes_its_work() {
    matrix("a dropped stream", |rig| {
        let (a, b) = rig.pair(patient);
        let stream = rig.stream();
        block(rig, &stream, &a);
        drop(stream);
        post_recvs(&b, 1, &[]);
        b.qp.post_send(&[SendWr::send(&[])]).unwrap();
        for cq in [b.qp.send_cq(), b.qp.recv_cq()] {
            cq.wait(PATIENCE).unwrap().ok().unwrap();
        }
        // The stream has taken what it waited for, and given the queue pair back.
        until(|| !a.qp.is_awaited());
        a.qp.check().unwrap();
        rig.message(&rig.stream(), &a, &b, 5);
    });
}

/// Nobody sends: the limit of the wait ends the stream, and the queue pair says why.
#[test]
fn dropped_stream_keeps_its_wait_limit() {
    matrix("a dropped stream that is stuck", |rig| {
        let (a, b) = rig.pair(patient);
        let stream = rig.stream_with(LIMIT);
        block(rig, &stream, &a);
        drop(stream);
        until(|| a.qp.check().is_err());
        let root = a.qp.check().unwrap_err();
        let is_late = |reason: &Error| matches!(reason, Error::StreamWait { .. });
        assert!(matches!(&root, Error::QpStopped { reason, .. } if is_late(reason)), "{root}");
        // The stream may still be dropping its work.
        until(|| a.qp.modify(&QpAttr::to(QpState::RESET)).is_ok());
        starts_again(rig, &a, &b);
    });
}

#[test]
fn host_function_panics() {
    matrix("a panic in a host function", |rig| {
        let (a, b) = rig.pair(patient);
        let stream = rig.stream();
        let gate = gate();
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
fn test_panics() {
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
fn stream_keeps_the_device_that_it_waits_for() {
    matrix("a device without handles", |rig| {
        let gone = |a: Side| {
            let stream = rig.stream_with(LIMIT);
            post_recvs(&a, 1, &[]);
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
        post_recvs(&a, 1, &[]);
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
fn context_fails() {
    const LAUNCH_FAILED: u32 = 719;
    matrix("a failed context", |rig| {
        // A real one would take the process's other tests with it.
        let (Some(control), Some(place)) = (&rig.bed.control, rig.place) else { return };
        let app = Application::new(rig.bed);
        let place = Place { gpu: app.gpu(app.stream), ..place.clone() };
        {
            let failing = Rig::new(Some(&place), rig.way, rig.bed);
            let (a, _b) = failing.pair(patient);
            let stream = failing.stream();
            block(&failing, &stream, &a);
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
fn driver_refuses_a_submission() {
    matrix("a submission that the driver refuses", |rig| {
        let (Some(control), Some(place)) = (&rig.bed.control, rig.place) else { return };
        let (a, b) = rig.pair(patient);
        let stream = rig.stream();
        // CUDA knows it: before it is told of a new one, the stream is marked.
        let word = gate();
        stream.write_value32(&word, 0).unwrap();
        block(rig, &stream, &a);
        let call = match (rig.way, place.via) {
            (Way::Graph, _) => "cuGraphLaunch",
            (Way::Eager, Via::Kernel) => "cuLaunchKernelEx",
            (Way::Eager, _) => "cuStreamBatchMemOp",
        };
        control.fail_once(call, 0, 2);
        let since = Instant::now();
        // A mark that is late may be what the driver refuses.
        let refused = |error: &Error| {
            matches!(error, Error::Cuda { what: "submitting to the stream" | "marking the stream", .. })
        };
        // It may be on its way, so the stream fails, not the call.
        let queued = rig.queue(&stream, |batch| {
            batch.write_value32(&word, 1);
            Ok(Vec::new())
        });
        assert!(queued.as_ref().err().is_none_or(refused), "{:?}", queued.err());
        stopped(rig, &stream, &a.qp, (since, AT_ONCE), refused);
        starts_again(rig, &a, &b);
    });
}
