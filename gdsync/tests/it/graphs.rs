//! Graphs on streams of the host and of GPUs: launches between eager work, what fails in them, and what is refused.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::{
    PATIENCE, Side, assert_clean, counts, gate, gates, pair, reconnect, stream_with, tier, until, wrong_key,
};
use crate::peer_copies::Slots;
use crate::place::{Site, sites};
use gdsync::error::{Error, Result};
use gdsync::memory::{Memory, Word32};
use gdsync::stream::{Batch, Cond, Graph, Replenish, Stream};
use gdsync::verbs::{Completion, QpBuilder, RecvWr, SendWr};

macro_rules! everywhere {
    ($($test:ident: $body:expr;)*) => {$(
        #[test]
        fn $test() {
            for site in sites() {
                eprintln!("{site:?}");
                $body(&site);
            }
        }
    )*};
}

everywhere! {
    launches_and_eager_work_take_turns: mixed;
    launches_wait_for_what_comes_later: launched_ahead;
    launches_are_waited_for: waited_for;
    threads_launch_one_graph: by_threads;
    refused_launch_leaves_no_trace: refusals;
    failed_send_ends_a_launch_with_its_cause: a_send_fails;
    graph_outlives_queue_pair_and_stream: outlives_all;
    captures_that_fail_leave_no_trace: captures;
    words_are_waited_for_and_written_each_time: words;
    what_differs_stays_between_what_does_not: in_order;
}

/// Entries of each ring.
const RING: u64 = 8;
/// Rounds that run ahead of the check.
const AHEAD: usize = 2;
/// Inline, so that the second send of the graph takes two blocks.
const FIXED: [u8; 60] = *b"these bytes are those of the capture, in each of its launche";

/// What a round sent, in order: its number in the data, or the fixed bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Message {
    Number(u64),
    Fixed,
}

struct Mixed<'a> {
    b: &'a Side,
    posted: u64,
    seen: u64,
}

impl Mixed<'_> {
    fn post_recv(&mut self) {
        let slot = usize::try_from(self.posted % RING).unwrap() * 64;
        let sges = [self.b.mr.sge(slot, 64).unwrap()];
        let start = Instant::now();
        // The completion was seen; the stream may still have to pass it.
        while let Err(error) = self.b.qp.post_recv(&[RecvWr::new(&sges).id(self.posted)]) {
            assert!(matches!(error, Error::QueueFull { .. }) && start.elapsed() < PATIENCE, "{error}");
            std::thread::yield_now();
        }
        self.posted += 1;
    }

    /// The completions of a round that are those of receives say what was sent.
    fn check(&mut self, round: &Round) {
        for (sent, wr_id) in &round.sent {
            assert_eq!(sent.wait(PATIENCE).unwrap().wr_id, *wr_id, "{round:?}");
        }
        for (got, message) in &round.received {
            let wc = got.wait(PATIENCE).unwrap();
            assert_eq!(wc.wr_id, self.seen, "{round:?}");
            let slot = usize::try_from(self.seen % RING).unwrap() * 64;
            let mut data = [0; 64];
            self.b.memory().read(slot, &mut data).unwrap();
            match message {
                Message::Number(n) => assert_eq!(data[..8], n.to_ne_bytes(), "{round:?}"),
                Message::Fixed => assert_eq!((&data[..60], wc.imm), (&FIXED[..], Some(7)), "{round:?}"),
            }
            self.seen += 1;
            self.post_recv();
        }
    }
}

#[derive(Debug)]
struct Round {
    sent: Vec<(Completion, u64)>,
    received: Vec<(Completion, Message)>,
}

/// Two streams, each with a graph, which send and receive by launches and eagerly in turn, through rings that go round
/// with every few messages.
fn mixed(site: &Site) {
    let rounds = match site {
        Site::Host => tier(200, 4000, 70_000),
        Site::Gpu(_) => tier(100, 1000, 20_000),
    };
    let small = |q: QpBuilder| q.max_send_wr(8).max_recv_wr(8).max_inline(60);
    let (a, b) = site.pair(1024, small);
    let (sa, sb) = (site.stream(PATIENCE), site.stream(PATIENCE));
    let mut mixed = Mixed { b: &b, posted: 0, seen: 0 };
    (0..RING).for_each(|_| mixed.post_recv());
    let number = a.memory().word64(0).unwrap();
    let ours = [a.mr.sge(0, 8).unwrap()];

    let send = sa
        .capture(|stream| {
            stream.send(&a.qp, &SendWr::send(&ours).id(11))?;
            let mut batch = Batch::new();
            batch.send(&a.qp, &SendWr::send_inline(&FIXED).imm(7).id(12))?;
            batch.wait_all_sends(&a.qp)?;
            stream.submit(&mut batch)
        })
        .unwrap();
    let receive = sb
        .capture(|stream| {
            stream.wait_recv(&b.qp)?;
            stream.wait_recv(&b.qp).map(drop)
        })
        .unwrap();

    let mut ahead = VecDeque::new();
    for round in 0..rounds {
        sa.write_value64(&number, round).unwrap();
        let eager = round % 3 == 1;
        let (sent, messages) = if eager {
            let mut batch = Batch::new();
            batch.send(&a.qp, &SendWr::send(&ours).id(round)).unwrap();
            let done = batch.wait_send(&a.qp).unwrap();
            sa.submit(&mut batch).unwrap();
            (vec![(done, round)], vec![Message::Number(round)])
        } else {
            let launch = send.launch(&sa).unwrap();
            let [first, second, all] = launch.completions() else { panic!("{launch:?}") };
            let ids = [(first, 11), (second, 12), (all, 12)];
            (ids.map(|(c, id)| (c.clone(), id)).to_vec(), vec![Message::Number(round), Message::Fixed])
        };
        let got = if eager || round % 5 == 0 {
            messages.iter().map(|_| sb.wait_recv(&b.qp).unwrap()).collect()
        } else {
            receive.launch(&sb).unwrap().completions().to_vec()
        };
        ahead.push_back(Round { sent, received: got.into_iter().zip(messages).collect() });
        if ahead.len() > AHEAD {
            mixed.check(&ahead.pop_front().unwrap());
        }
    }
    ahead.iter().for_each(|round| mixed.check(round));
    sa.synchronize(PATIENCE).unwrap();
    sb.synchronize(PATIENCE).unwrap();
    assert_eq!(mixed.seen, rounds + (0..rounds).filter(|round| round % 3 != 1).count() as u64);
    assert_clean(&[&a, &b]);
}

/// A graph that waits for a message and answers with another, launched far ahead of the peer.
fn launched_ahead(site: &Site) {
    let times: u32 = 30;
    let (a, b) = site.pair(256, |q| q.max_send_wr(64).max_recv_wr(64));
    let stream = site.stream(PATIENCE);
    let count = b.memory().word32(0).unwrap();
    let post = || b.qp.post_recv(&[RecvWr::new(&[b.mr.sge(64, 4).unwrap()])]).map(drop);
    post().unwrap();
    let answer = [b.mr.sge(64, 4).unwrap()];
    let echo = stream
        .capture(|stream| {
            let mut batch = Batch::new();
            batch.wait_recv(&b.qp)?;
            batch.send(&b.qp, &SendWr::send(&answer))?;
            batch.wait_send(&b.qp)?;
            batch.write_value32(&count, 1);
            stream.submit(&mut batch)
        })
        .unwrap();
    let mut launched = Vec::new();
    for n in 0..times {
        if n > 0 {
            post().unwrap();
        }
        a.qp.post_recv(&[RecvWr::new(&[a.mr.sge(8, 4).unwrap()]).id(n.into())]).unwrap();
        launched.push(echo.launch(&stream).unwrap());
    }
    assert_eq!(count.load(), 0, "all wait");
    for n in 0..times {
        let word = (n + 5).to_ne_bytes();
        a.qp.post_send(&[SendWr::send_inline(&word)]).unwrap();
        let wc = a.qp.recv_cq().wait(PATIENCE).unwrap();
        assert_eq!((wc.wr_id, wc.syndrome), (n.into(), None));
        let mut back = [0; 4];
        a.memory().read(8, &mut back).unwrap();
        assert_eq!(back, word);
    }
    stream.synchronize(PATIENCE).unwrap();
    assert_eq!(count.load(), 1);
    for launch in &launched {
        assert!(launch.completions().iter().all(|c| c.status().unwrap().is_some()));
    }
    assert_clean(&[&a, &b]);
}

/// A graph that waits until the first word is 1, and then writes 1 to the second.
pub(crate) fn gated(stream: &Stream) -> (Graph, Word32, Word32) {
    let [gate, count] = gates();
    let graph = stream
        .capture(|stream| {
            stream.wait_value32(&gate, 1, Cond::Eq)?;
            stream.write_value32(&count, 1)
        })
        .unwrap();
    (graph, gate, count)
}

/// A launch is waited for while another one is held.
fn waited_for(site: &Site) {
    let stream = site.stream(PATIENCE);
    let (graph, gate, count) = gated(&stream);
    for _ in 0..20 {
        gate.store(1);
        count.store(0);
        let first = graph.launch(&stream).unwrap();
        first.wait(&stream, PATIENCE).unwrap();
        assert_eq!(count.load(), 1, "all of it has run");
        gate.store(0);
        let second = graph.launch(&stream).unwrap();
        first.wait(&stream, Duration::ZERO).unwrap();
        let error = second.wait(&stream, Duration::from_millis(1)).unwrap_err();
        assert!(matches!(error, Error::Deadline { .. }), "{error}");
        gate.store(1);
        second.wait(&stream, PATIENCE).unwrap();
        assert_eq!(stream.query().pending, 0);
    }
    let other = site.stream(PATIENCE);
    let launch = graph.launch(&other).unwrap();
    assert!(matches!(launch.wait(&stream, PATIENCE), Err(Error::InvalidArgument { .. })));
    launch.wait(&other, PATIENCE).unwrap();
    gate.store(0);
    let held = graph.launch(&stream).unwrap();
    stream.abort();
    assert!(matches!(held.wait(&stream, PATIENCE), Err(Error::StreamAborted { .. })));
}

/// At the same time, on a stream that they share and on another one.
fn by_threads(site: &Site) {
    let stream = site.stream(PATIENCE);
    let (graph, gate, count) = gated(&stream);
    gate.store(1);
    let (graph, streams) = (&graph, [stream.clone(), stream, site.stream(PATIENCE)]);
    std::thread::scope(|scope| {
        for stream in &streams {
            scope.spawn(move || {
                let launches: Vec<_> = (0..20).map(|_| graph.launch(stream).unwrap()).collect();
                launches.iter().for_each(|launch| launch.wait(stream, PATIENCE).unwrap());
                stream.synchronize(PATIENCE).unwrap();
            });
        }
    });
    assert_eq!(count.load(), 1);
}

/// What a launch is refused for leaves no trace, and the next launch finds all as before.
fn refusals(site: &Site) {
    let (a, b) = site.pair(256, |q| q.max_send_wr(4).max_inline(0).max_recv_wr(16));
    let stream = site.stream(PATIENCE);
    let ours = [a.mr.sge(0, 8).unwrap()];
    let post = || b.qp.post_recv(&[RecvWr::new(&[b.mr.sge(64, 8).unwrap()])]).map(drop);
    post().unwrap();
    let graph = stream
        .capture(|stream| {
            stream.send(&a.qp, &SendWr::send(&ours))?;
            stream.wait_send(&a.qp)?;
            stream.wait_recv(&b.qp).map(drop)
        })
        .unwrap();
    assert_eq!(a.context.stats().wqes, 0, "nothing runs in a capture");
    graph.launch(&stream).unwrap();
    for _ in 0..20 {
        let error = graph.launch(&stream).unwrap_err();
        assert!(matches!(error, Error::NothingToWaitFor { queue: "receive", .. }), "{error}");
    }
    stream.synchronize(PATIENCE).unwrap();
    assert_eq!(stream.query().pending, 0);
    post().unwrap();

    // Another's prepared send stands before.
    let prepared = a.qp.prepare_send(&[SendWr::nop()]).unwrap();
    let error = graph.launch(&stream).unwrap_err();
    assert!(matches!(error, Error::OutOfOrder { .. }), "{error}");
    drop(prepared);
    graph.launch(&stream).unwrap();
    stream.synchronize(PATIENCE).unwrap();

    // Another stream has the queue.
    let gate = b.memory().word32(0).unwrap();
    let other = site.stream(PATIENCE);
    other.wait_value32(&gate, 1, Cond::Eq).unwrap();
    other.send(&a.qp, &SendWr::nop()).unwrap();
    other.wait_send(&a.qp).unwrap();
    post().unwrap();
    let error = graph.launch(&stream).unwrap_err();
    assert!(matches!(error, Error::Busy { queue: "send", .. }), "{error}");
    gate.store(1);
    other.synchronize(PATIENCE).unwrap();
    graph.launch(&stream).unwrap();
    stream.synchronize(PATIENCE).unwrap();

    // No room in the ring.
    stream.wait_value32(&gate, 2, Cond::Eq).unwrap();
    let mut launched = 0;
    let full = loop {
        post().unwrap();
        match graph.launch(&stream.with_timeout(Duration::ZERO)) {
            Ok(_) => launched += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(full, Error::QueueFull { queue: "send queue", .. }), "{full}");
    assert_eq!(launched, 4);
    gate.store(2);
    stream.synchronize(PATIENCE).unwrap();
    graph.launch(&stream).unwrap();
    stream.synchronize(PATIENCE).unwrap();
    assert_eq!(b.qp.poll_recv(), None);
    let wqes = b.context.stats().wqes + a.context.stats().wqes;
    assert!(wqes == 3 + 1 + 4 + 1 || !counts(&a.context), "as many as were accepted: {wqes}");
    assert_clean(&[&a, &b]);
}

/// A send that fails in a launch: the rest of it drains, the cause is told, and later launches are refused with it.
fn a_send_fails(site: &Site) {
    let (a, b) = site.pair(256, |q| q);
    let stream = site.stream(PATIENCE);
    let end = a.memory().word32(128).unwrap();
    let wrong = wrong_key(&b);
    let graph = stream
        .capture(|stream| {
            let mut batch = Batch::new();
            batch.send(&a.qp, &SendWr::write_inline(b.mr.remote(0).unwrap(), b"right").id(1))?;
            batch.send(&a.qp, &SendWr::write_inline(wrong, b"wrong").id(2))?;
            batch.send(&a.qp, &SendWr::nop().id(3))?;
            batch.wait_all_sends(&a.qp)?;
            batch.write_value32(&end, 9);
            stream.submit(&mut batch)
        })
        .unwrap();
    let launch = graph.launch(&stream).unwrap();
    let error = stream.synchronize(PATIENCE).unwrap_err();
    assert!(matches!(&error, Error::Completion(c) if c.wr_id == 2 && !c.is_flush()), "{error}");
    assert_eq!(end.load(), 9, "an error ends a wait");
    let [first, second, third, _] = launch.completions() else { panic!("{launch:?}") };
    assert_eq!(first.status().unwrap().unwrap().wr_id, 1);
    assert!(matches!(second.status(), Err(Error::Completion(c)) if !c.is_flush()));
    assert!(matches!(third.status(), Err(Error::Completion(c)) if c.is_flush()));
    assert_eq!(graph.launch(&stream).unwrap_err().to_string(), error.to_string());
    assert!(stream.query().error.is_none(), "the queue pair failed, not the stream");
    until(|| stream.query().pending == 0);

    // Reset and connected again, the same graph finds the same.
    reconnect(&a.qp, &b.qp);
    graph.launch(&stream).unwrap();
    assert!(matches!(stream.synchronize(PATIENCE), Err(Error::Completion(c)) if c.wr_id == 2));
}

/// A graph has all it needs, whatever else is gone.
fn outlives_all(site: &Site) {
    let (a, b) = site.pair(256, |q| q);
    let graph: Graph = {
        let stream = site.stream(PATIENCE);
        let remote = b.mr.remote(0).unwrap();
        stream
            .capture(|stream| {
                stream.send(&a.qp, &SendWr::write_inline(remote, b"last words"))?;
                stream.wait_send(&a.qp).map(drop)
            })
            .unwrap()
    };
    let Side { qp, .. } = a;
    drop(qp);
    let stream = site.stream(PATIENCE);
    let launch = graph.launch(&stream).unwrap();
    drop(graph);
    stream.synchronize(PATIENCE).unwrap();
    assert!(launch.completions()[0].status().unwrap().is_some());
    assert_eq!(b.memory().to_vec()[..10], *b"last words");
}

/// What may not be in a capture, and what becomes of one that fails.
fn captures(site: &Site) {
    let (a, b) = site.pair(256, |q| q.max_send_wr(4).max_inline(16));
    let stream = site.stream(PATIENCE);
    let word = b.memory().word32(128).unwrap();
    let write = |bytes| SendWr::write_inline(b.mr.remote(0).unwrap(), bytes);
    for _ in 0..20 {
        let failed: Result<Graph> = stream.capture(|stream| {
            stream.write_value32(&word, 1)?;
            stream.send(&a.qp, &write(b"a"))?;
            let refused = stream.host_fn(|| {}).unwrap_err();
            assert!(refused.to_string().contains("host function in a graph"), "{refused}");
            assert!(matches!(stream.begin_capture(), Err(Error::Unsupported { .. })));
            let error = stream.synchronize(PATIENCE).unwrap_err().to_string();
            assert!(
                error.contains("synchronizing is not supported by a stream that is being captured"),
                "{error}"
            );
            stream.wait_send(&a.qp)?;
            stream.wait_send(&a.qp).map(drop)
        });
        assert!(matches!(failed, Err(Error::NothingToWaitFor { queue: "send", .. })), "{failed:?}");
        let capture = stream.begin_capture().unwrap();
        stream.send(&a.qp, &write(b"b")).unwrap();
        drop(capture);
        let panics = || stream.capture::<Error>(|_| panic!("for the test"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
        let nothing = stream.capture(|_| gdsync::Result::Ok(())).unwrap();
        let capture = stream.begin_capture().unwrap();
        let error = nothing.launch(&stream).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        nothing.launch(&site.stream(PATIENCE)).unwrap();
        let again = capture.end().unwrap();
        assert!(again.launch(&stream).unwrap().completions().is_empty());
        stream.synchronize(PATIENCE).unwrap();
    }
    assert_eq!((word.load(), a.context.stats().wqes), (0, 0), "nothing ran, nothing is left in the ring");

    stream.abort();
    assert!(matches!(stream.begin_capture().and_then(|c| c.end()), Err(Error::StreamAborted { .. })));
}

/// Words and plain memory, without any queue.
fn words(site: &Site) {
    let stream = site.stream(PATIENCE);
    let memory = Memory::alloc(64).unwrap();
    let (gate, out, wide) = (memory.word32(0).unwrap(), memory.word32(4).unwrap(), memory.word64(8).unwrap());
    let graph = stream
        .capture(|stream| {
            stream.wait_value32(&gate, 1, Cond::Eq)?;
            stream.write_value64(&wide, u64::MAX)?;
            let mut batch = Batch::new();
            batch.write_value32(&gate, 0);
            batch.barrier();
            batch.write_memory(&memory, 16, b"12345678")?;
            batch.write_value32(&out, 1);
            stream.submit(&mut batch)
        })
        .unwrap();
    for _ in 0..50 {
        memory.fill(0, 64, 0).unwrap();
        graph.launch(&stream).unwrap();
        gate.store(1);
        stream.synchronize(PATIENCE).unwrap();
        assert_eq!((gate.load(), out.load(), wide.load()), (0, 1, u64::MAX));
        assert_eq!(memory.to_vec()[16..24], *b"12345678");
    }
}

/// Sends, waits for completions and messages between words that stay the same: no doorbell starts an earlier or a later send.
fn in_order(site: &Site) {
    let (a, b) = site.pair(64, |q| q);
    let stream = site.stream(PATIENCE);
    let (from, to) = (a.memory().word32(0).unwrap(), b.memory().word32(0).unwrap());
    let ends =
        if let Site::Gpu(place) = site { Some(Slots::new(&place.gpu, &place.gpu, &[8; 3])) } else { None };
    let send = |batch: &mut Batch| {
        let ours = [a.mr.sge(0, 4).unwrap()];
        batch.send(&a.qp, &SendWr::write(b.mr.remote(0).unwrap(), &ours))
    };
    let message = |batch: &mut Batch| ends.as_ref().map_or(Ok(()), |ends| ends.pass(batch, &ends.places));
    let graph = stream.capture(|stream| {
        let mut batch = Batch::new();
        for value in [5, 6, 7] {
            batch.write_value32(&from, value);
            send(&mut batch)?;
            batch.wait_value32(&to, value, Cond::Eq);
            if value == 6 {
                message(&mut batch)?;
                batch.wait_send(&a.qp)?;
                message(&mut batch)?;
                stream.submit(&mut batch)?;
            }
        }
        message(&mut batch)?;
        batch.wait_all_sends(&a.qp)?;
        batch.write_value32(&from, 0);
        stream.submit(&mut batch)
    });
    let graph = graph.unwrap();
    for launch in 1..=30 {
        graph.launch(&stream).unwrap();
        if launch % 3 == 0 {
            stream.synchronize(PATIENCE).unwrap();
            assert_eq!((from.load(), to.load()), (0, 7));
            let is_there = |ends: &Slots| (0..3).all(|n| ends.inbox.len_of(3 * launch - n) == Some(8));
            assert!(ends.as_ref().is_none_or(is_there));
        }
    }
    assert_clean(&[&a, &b]);
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
    let word = gate();
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
            gdsync::Result::Ok(())
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
    /// One for each batch, of which a graph needs one.
    #[derive(Debug)]
    struct Same(Arc<AtomicU32>);
    impl Replenish for Same {
        fn replenish(&self) -> gdsync::Result<()> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }

        fn is(&self, earlier: &dyn Replenish) -> bool {
            (earlier as &dyn Any).is::<Self>()
        }
    }
    let stream = stream_with("above", PATIENCE);
    let word = gate();
    let (above, same) = (Arc::new(Above::default()), Arc::new(AtomicU32::new(0)));
    let who: Arc<dyn Replenish> = above.clone();
    let mut batch = Batch::new();
    let graph = stream.capture(|stream| {
        for value in [1, 2] {
            batch.write_value32(&word, value);
            batch.before_launches(&who);
            batch.before_launches(&who);
            batch.before_launches(&(Arc::new(Same(same.clone())) as Arc<dyn Replenish>));
            stream.submit(&mut batch)?;
        }
        batch.only_once("this", "do that");
        let error = stream.submit(&mut batch).unwrap_err().to_string();
        assert!(error.contains("this") && error.contains("do that"), "{error}");
        assert!(stream.refuse_in_capture("this", "do that").is_err());
        gdsync::Result::Ok(())
    });
    let graph = graph.unwrap();
    stream.refuse_in_capture("this", "do that").unwrap();
    stream.submit(&mut batch).unwrap();
    assert_eq!(above.calls.load(Ordering::Relaxed), 0);
    for n in 1..=3 {
        graph.launch(&stream).unwrap();
        assert_eq!([&above.calls, &*same].map(|calls| calls.load(Ordering::Relaxed)), [n, n]);
    }
    stream.synchronize(PATIENCE).unwrap();
    above.refuses.store(true, Ordering::Relaxed);
    word.store(7);
    assert!(matches!(graph.launch(&stream), Err(Error::GivenUp)));
    stream.synchronize(PATIENCE).unwrap();
    assert_eq!(word.load(), 7, "nothing was launched");
}
