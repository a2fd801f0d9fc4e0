//! How launches of kernels with steps fail, and what is refused.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use gdsync::Error;
use gdsync::memory::Memory;
use gdsync::stream::{Batch, Cond, KernelSteps, Stream, Via};
use gdsync::verbs::{RecvWr, SendWr};

use super::app::{App, kernel_places};
use super::common::{self, PATIENCE, Side};
use super::place::Place;
use super::simulated::{COMPLETION_ERROR, FAILED, OK};

const LIMIT: Duration = Duration::from_millis(50);

/// Launches a kernel that runs these steps.
fn launch(place: &Place, stream: &Stream, steps: &KernelSteps, side: &Side, order: &[u32]) -> App {
    let app = App::new(place, order);
    let launched = steps.launch(stream, |program| {
        app.launch(place, stream, program, side.memory(), 0);
        Ok::<_, Error>(())
    });
    launched.unwrap();
    app
}

/// Waits for a message, then sends one, as two steps.
fn answer(stream: &Stream, side: &Side, other: &Side) -> KernelSteps {
    let post = side.qp.post_recv(&[RecvWr { wr_id: 3, sges: &[side.mr.sge(64, 8).unwrap()] }]);
    post.unwrap();
    stream
        .record_steps(|stream| {
            stream.wait_recv(&side.qp)?;
            let mut batch = Batch::new();
            batch.send(&side.qp, &SendWr::write_inline(other.mr.remote(0)?, b"answer"))?;
            batch.wait_all_sends(&side.qp)?;
            stream.submit(&mut batch)
        })
        .unwrap()
}

#[test]
fn a_message_that_never_comes_ends_the_kernel() {
    for place in kernel_places() {
        for order in [&[0, 1][..], &[]] {
            let (a, b) = place.pair(256, |q| q);
            let stream = place.stream(LIMIT);
            let steps = answer(&stream, &b, &a);
            let start = Instant::now();
            // By a kernel; by what comes behind one that has left all.
            let app = launch(&place, &stream, &steps, &b, order);
            let next = steps.launch(&stream, |_| Ok::<_, Error>(()));
            assert!(matches!(next, Err(Error::NothingToWaitFor { .. })), "{next:?}");
            let error = stream.synchronize(PATIENCE).unwrap_err();
            let told =
                matches!(&error, Error::StreamWait { what, .. } if what.contains("receive completion"));
            assert!(told, "{error}");
            assert!(start.elapsed() >= LIMIT);
            assert_eq!(stream.query().pending, 0);
            if !order.is_empty() {
                assert_eq!(app.log()[0].0, FAILED);
                assert_eq!(app.log()[1].0, u64::MAX, "the kernel has left");
            }
            assert_eq!(a.memory().to_vec()[..6], [0; 6], "nothing is sent behind a wait that failed");
            assert!(b.qp.check().is_err());
            let next = steps.launch(&stream, |_| Ok::<_, Error>(())).unwrap_err();
            assert_eq!(next.to_string(), b.qp.check().unwrap_err().to_string());
        }
    }
}

/// The peer stops: the kernel hears of it in its step, the stream goes on, and everybody is told the cause.
#[test]
fn a_peer_that_goes_away_ends_the_step() {
    for place in kernel_places() {
        let (a, b) = place.pair(256, |q| q.timeout(12).retry_cnt(2));
        let stream = place.stream(PATIENCE);
        let steps = stream
            .record_steps(|stream| {
                for _ in 0..3 {
                    let mut batch = Batch::new();
                    batch.send(&a.qp, &SendWr::write_inline(b.mr.remote(0)?, b"hello").id(1))?;
                    batch.wait_all_sends(&a.qp)?;
                    stream.submit(&mut batch)?;
                }
                Ok(())
            })
            .unwrap();
        let app = launch(&place, &stream, &steps, &a, &[0, 1, 2]);
        stream.synchronize(PATIENCE).unwrap();
        assert_eq!(app.results(), [OK; 3]);
        b.qp.abort().unwrap();
        // It leaves two steps.
        let app = launch(&place, &stream, &steps, &a, &[0]);
        let error = stream.synchronize(PATIENCE).unwrap_err();
        assert!(matches!(&error, Error::Completion(c) if c.wr_id == 1 && !c.is_flush()), "{error}");
        assert_eq!(app.results(), [COMPLETION_ERROR]);
        let next = steps.launch(&stream, |_| Ok::<_, Error>(())).unwrap_err();
        assert_eq!(next.to_string(), error.to_string());
        assert!(stream.query().error.is_none(), "the queue pair failed, not the stream");
        common::until(|| stream.query().pending == 0);
    }
}

#[test]
fn a_stream_that_is_aborted_releases_the_kernel() {
    for place in kernel_places() {
        let (a, b) = place.pair(256, |q| q);
        let stream = place.stream(PATIENCE);
        let steps = answer(&stream, &b, &a);
        let start = Instant::now();
        let _app = launch(&place, &stream, &steps, &b, &[0, 1]);
        stream.abort();
        let error = stream.synchronize(PATIENCE).unwrap_err();
        assert!(matches!(error, Error::StreamAborted { .. }), "{error}");
        assert!(start.elapsed() < PATIENCE);
        assert_eq!((stream.query().pending, &a.memory().to_vec()[..6]), (0, &[0; 6][..]));
    }
}

/// A kernel that cannot be launched leaves no trace; within the launch the stream is taken.
#[test]
fn a_launch_that_fails_leaves_no_trace() {
    for place in kernel_places() {
        let (a, b) = place.pair(256, |q| q.max_send_wr(4));
        let stream = place.stream(PATIENCE);
        let steps = stream
            .record_steps(|stream| {
                let mut batch = Batch::new();
                batch.send(&a.qp, &SendWr::fetch_add(b.mr.remote(0)?, 1, a.mr.sge(128, 8)?))?;
                batch.wait_all_sends(&a.qp)?;
                stream.submit(&mut batch)
            })
            .unwrap();
        for round in 1..=20 {
            let refused = steps.launch(&stream, |_| {
                let word = a.memory().word32(192).unwrap();
                for error in [
                    stream.write_value32(&word, 1).unwrap_err(),
                    stream.synchronize(PATIENCE).unwrap_err(),
                    stream.begin_capture().unwrap_err(),
                    stream.submit(&mut Batch::new()).unwrap_err(),
                    steps.launch(&stream, |_| Ok::<_, Error>(())).unwrap_err(),
                ] {
                    assert!(error.to_string().contains("launches a kernel"), "{error}");
                }
                Err(Box::<dyn std::error::Error>::from("no such kernel"))
            });
            assert_eq!(refused.unwrap_err().to_string(), "no such kernel");
            let panics = || steps.launch(&stream, |_| -> Result<(), Error> { panic!("for the test") });
            assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
            let app = launch(&place, &stream, &steps, &a, &[0]);
            stream.synchronize(PATIENCE).unwrap();
            assert_eq!((app.results(), b.memory().word64(0).unwrap().load()), (vec![OK], round));
        }
        common::assert_clean(&[&a, &b]);
    }
}

/// Three launches are pending at most. One that finds no room leaves no trace, and may wait for it.
#[test]
fn launches_wait_for_room() {
    for place in kernel_places() {
        let stream = place.stream(PATIENCE);
        let words = Memory::alloc(64).unwrap();
        let (gate, word) = (words.word32(0).unwrap(), words.word32(4).unwrap());
        let steps = stream
            .record_steps(|stream| {
                stream.wait_value32(&gate, 1, Cond::Geq)?;
                stream.write_value32(&word, 5)
            })
            .unwrap();
        let nothing = |_| Ok::<_, Error>(());
        (0..3).for_each(|_| drop(steps.launch(&stream, nothing).unwrap()));
        for _ in 0..3 {
            let full = steps.launch_within(&stream, Duration::from_millis(2), nothing).unwrap_err();
            assert!(matches!(full, Error::StreamFull { .. }), "{full}");
        }
        assert_eq!((stream.query().pending, word.load()), (3, 0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(2));
                gate.store(1);
            });
            steps.launch_within(&stream, PATIENCE, nothing).unwrap().wait(&stream, PATIENCE).unwrap();
        });
        assert_eq!((stream.query().pending, word.load()), (0, 5));
    }
}

#[test]
fn what_a_kernel_cannot_do_is_refused() {
    for place in kernel_places() {
        let record = |stream: &Stream| {
            let words = Memory::alloc(64).unwrap();
            stream.record_steps(|stream| stream.write_value32(&words.word32(0)?, 1))
        };
        let by_memops = Place { via: Via::MemOp, ..place.clone() }.stream(PATIENCE);
        for stream in [&by_memops, &common::stream("host")] {
            let error = record(stream).unwrap_err();
            assert!(matches!(error, Error::Unsupported { .. }), "{error}");
            assert!(error.to_string().contains("Via"), "{error}");
        }
        let stream = place.stream(PATIENCE);
        let steps = record(&stream).unwrap();
        let error = steps.launch(&by_memops, |_| Ok::<_, Error>(())).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        let refused = stream.record_steps(|stream| {
            let mut batch = Batch::new();
            batch.repeatable_host_fn(|| {});
            stream.submit(&mut batch)
        });
        assert!(refused.unwrap_err().to_string().contains("host function"));
        // Nothing is recorded any more.
        let nothing = stream.record_steps(|stream| {
            assert!(matches!(stream.record_steps(|_| Ok(())), Err(Error::Unsupported { .. })));
            assert!(matches!(stream.begin_capture(), Err(Error::Unsupported { .. })));
            Ok(())
        });
        let nothing = nothing.unwrap();
        assert!(nothing.is_empty());
        nothing.launch(&stream, |_| Ok::<_, Error>(())).unwrap().wait(&stream, PATIENCE).unwrap();
        stream.synchronize(PATIENCE).unwrap();
    }
}
