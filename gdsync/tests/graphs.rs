//! Graphs on streams of the host.

mod common;
#[path = "common/replay.rs"]
mod replay;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{PATIENCE, Side, hca, pair, stream_with, until};
use gdsync::error::Error;
use gdsync::memory::Memory;
use gdsync::stream::{Batch, Replenish, Stream};
use gdsync::verbs::{QpBuilder, SendWr};
use replay::Site;

struct Host;

impl Site for Host {
    fn side(&self, bytes: usize, build: &dyn Fn(QpBuilder) -> QpBuilder) -> Side {
        Side::new(&hca(), bytes, build)
    }

    fn stream(&self, wait_limit: Duration) -> Stream {
        stream_with("graphs", wait_limit)
    }
}

/// The producer index of the sends wraps, three blocks a launch.
#[test]
fn launches_and_eager_work_take_turns() {
    replay::mixed(&Host, replay::replays(40_000));
}

#[test]
fn launches_wait_for_what_comes_later() {
    replay::launched_ahead(&Host, 30);
}

#[test]
fn launches_are_waited_for() {
    replay::waited_for(&Host);
}

/// One doorbell starts them, but each can be asked for, and waited for.
#[test]
fn sends_in_a_row_have_completions_of_their_own() {
    let (a, _b) = pair(64, |q| q);
    let stream = stream_with("row", PATIENCE);
    let graph = stream
        .capture(|stream| {
            let mut batch = Batch::new();
            let sends = [7, 8, 9].map(|id| batch.send(&a.qp, &SendWr::nop().id(id)).unwrap());
            batch.wait(&sends[1])?;
            batch.wait_all_sends(&a.qp)?;
            assert_eq!(batch.len(), 3);
            stream.submit(&mut batch)
        })
        .unwrap();
    for _ in 0..3 {
        let launch = graph.launch(&stream).unwrap();
        stream.synchronize(PATIENCE).unwrap();
        let ids = launch.completions().iter().map(|sent| sent.status().unwrap().unwrap().wr_id);
        assert_eq!(ids.collect::<Vec<_>>(), [7, 8, 9, 9]);
    }
}

/// Each launch calls it, in its place; the stream keeps it as long as it may.
#[test]
fn host_functions_are_repeated() {
    let stream = stream_with("repeats", PATIENCE);
    let words = Memory::alloc(64).unwrap();
    let word = words.word32(0).unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let called = seen.clone();
    let look = word.clone();
    let graph = stream
        .capture(|stream| {
            let mut batch = Batch::new();
            batch.write_value32(&word, 1);
            batch.repeatable_host_fn(move || called.lock().unwrap().push(look.load()));
            batch.write_value32(&word, 2);
            stream.submit(&mut batch)?;
            batch.host_fn(|| {});
            assert!(matches!(stream.submit(&mut batch), Err(Error::Unsupported { .. })), "only once");
            Ok(())
        })
        .unwrap();
    assert!(seen.lock().unwrap().is_empty(), "nothing runs in a capture");
    for _ in 0..3 {
        graph.launch(&stream).unwrap();
        stream.write_value32(&word, 7).unwrap();
    }
    let mut eager = Batch::new();
    let (called, look) = (seen.clone(), word.clone());
    eager.repeatable_host_fn(move || called.lock().unwrap().push(look.load()));
    stream.submit(&mut eager).unwrap();
    stream.synchronize(PATIENCE).unwrap();
    assert_eq!(*seen.lock().unwrap(), [1, 1, 1, 7]);
    assert!(Arc::strong_count(&seen) > 1, "the graph has its function");
    drop((graph, eager));
    until(|| Arc::strong_count(&seen) == 1);
}

#[test]
fn a_launch_that_is_refused_leaves_no_trace() {
    replay::refusals(&Host);
}

#[test]
fn a_failed_send_ends_a_launch_with_its_cause() {
    replay::a_send_fails(&Host);
}

#[test]
fn a_peer_that_goes_away_ends_a_launch() {
    replay::the_peer_goes_away(&Host);
}

#[test]
fn a_message_that_never_comes_ends_a_launch() {
    replay::a_message_never_comes(&Host);
}

#[test]
fn a_graph_outlives_queue_pair_and_stream() {
    replay::outlives_all(&Host);
}

#[test]
fn captures_that_fail_leave_no_trace() {
    replay::captures(&Host);
}

#[test]
fn words_are_waited_for_and_written_each_time() {
    replay::words(&Host);
}

/// It comes once before each launch, however many batches ask for it, and may refuse.
#[test]
fn layers_above_come_before_each_launch() {
    #[derive(Debug, Default)]
    struct Above {
        calls: AtomicU32,
        refuses: AtomicBool,
    }
    impl Replenish for Above {
        fn replenish(&self) -> gdsync::Result<()> {
            self.calls.fetch_add(1, Ordering::Relaxed);
            if self.refuses.load(Ordering::Relaxed) { Err(Error::GivenUp) } else { Ok(()) }
        }
    }
    let stream = stream_with("above", PATIENCE);
    let words = Memory::alloc(64).unwrap();
    let word = words.word32(0).unwrap();
    let above = Arc::new(Above::default());
    let who: Arc<dyn Replenish> = above.clone();
    let mut batch = Batch::new();
    let graph = stream.capture(|stream| {
        for value in [1, 2] {
            batch.write_value32(&word, value);
            batch.before_launches(&who);
            batch.before_launches(&who);
            stream.submit(&mut batch)?;
        }
        batch.only_once("this", "do that");
        let error = stream.submit(&mut batch).unwrap_err().to_string();
        assert!(error.contains("this") && error.contains("do that"), "{error}");
        assert!(stream.refuse_in_capture("this", "do that").is_err());
        Ok(())
    });
    let graph = graph.unwrap();
    stream.refuse_in_capture("this", "do that").unwrap();
    stream.submit(&mut batch).unwrap();
    assert_eq!(above.calls.load(Ordering::Relaxed), 0);
    for n in 1..=3 {
        graph.launch(&stream).unwrap();
        assert_eq!(above.calls.load(Ordering::Relaxed), n);
    }
    stream.synchronize(PATIENCE).unwrap();
    above.refuses.store(true, Ordering::Relaxed);
    word.store(7);
    assert!(matches!(graph.launch(&stream), Err(Error::GivenUp)));
    stream.synchronize(PATIENCE).unwrap();
    assert_eq!(word.load(), 7, "nothing was launched");
}
