//! Orders of streams beside queue pairs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gdsync::Error;
use gdsync::memory::{Memory, Word64};
use gdsync::stream::{Batch, Cond, Replenish, Stream, StreamOrder, Ticket};

use crate::common::{PATIENCE, gate, pair, stream, stream_with, until};
use crate::peer_copies::Slots;
use crate::place::places;

/// Two streams of each kind.
fn streams() -> impl Iterator<Item = [Stream; 2]> {
    let of_gpus = places().map(|place| [(); 2].map(|()| place.stream(PATIENCE)));
    std::iter::once(["one", "other"].map(stream)).chain(of_gpus)
}

fn word() -> Word64 {
    Memory::alloc(8).unwrap().word64(0).unwrap()
}

/// A batch that follows, and sets a word.
fn following(order: &StreamOrder, word: &Word64, value: u64) -> (Batch, Ticket) {
    let mut batch = Batch::new();
    let ticket = batch.follow(order);
    batch.write_value64(word, value);
    (batch, ticket)
}

fn out_of_order(error: &Error) {
    assert!(matches!(error, Error::OutOfOrder { .. }), "{error}");
}

fn busy(error: &Error) {
    assert!(matches!(error, Error::Busy { queue: "send", .. }), "{error}");
}

#[test]
fn batches_are_submitted_in_the_order_in_which_they_follow() {
    let (a, _b) = pair(8, |q| q);
    for [s, other] in streams() {
        let (order, word) = (StreamOrder::new(&a.qp), word());
        let (mut first, ticket) = following(&order, &word, 1);
        let (mut second, later) = following(&order, &word, 2);
        (0..2).for_each(|_| out_of_order(&s.submit(&mut second).unwrap_err()));
        out_of_order(&order.check_idle().unwrap_err());
        assert!(order.has_unsubmitted() && ticket.is_unsubmitted() && !ticket.is_taken_back());
        let unsubmitted = ticket.wait(PATIENCE).unwrap_err().to_string();
        assert!(unsubmitted.contains("in a batch that was not submitted"), "{unsubmitted}");
        s.submit(&mut first).unwrap();
        assert!(!ticket.is_unsubmitted());
        s.submit(&mut second).unwrap();
        later.wait(PATIENCE).unwrap();
        assert!(ticket.is_done().unwrap() && later.is_done().unwrap());
        assert_eq!(word.load(), 2);
        order.check_idle().unwrap();
        // A dropped batch no longer counts.
        let (first, ticket) = following(&order, &word, 3);
        let (mut second, _) = following(&order, &word, 4);
        drop(first);
        assert!(ticket.is_taken_back());
        assert!(matches!(ticket.wait(PATIENCE), Err(Error::TakenBack { .. })));
        other.submit(&mut second).unwrap();
        order.wait_idle(PATIENCE).unwrap();
        assert_eq!(word.load(), 4);
    }
}

#[test]
fn one_stream_has_an_order_at_a_time() {
    let (a, _b) = pair(8, |q| q);
    for [s, other] in streams() {
        let (order, word, gate) = (StreamOrder::new(&a.qp), word(), gate());
        s.wait_value32(&gate, 1, Cond::Eq).unwrap();
        let (mut first, ticket) = following(&order, &word, 1);
        s.submit(&mut first).unwrap();
        let (mut second, later) = following(&order, &word, 2);
        (0..2).for_each(|_| busy(&other.submit(&mut second).unwrap_err()));
        busy(&other.submit(&mut second).unwrap_err());
        assert!(later.is_unsubmitted(), "the batch is as it was");
        assert!(matches!(ticket.wait(Duration::from_millis(5)), Err(Error::Deadline { .. })));
        assert!(matches!(order.wait_idle(Duration::ZERO), Err(Error::Deadline { .. })));
        assert!(!ticket.is_done().unwrap());
        // The same stream may go on.
        s.submit(&mut second).unwrap();
        busy(&order.check_idle().unwrap_err());
        gate.store(1);
        // A refusal has the stream tell when it is done.
        until(|| order.check_idle().is_ok());
        let (mut third, ticket) = following(&order, &word, 3);
        other.submit(&mut third).unwrap();
        ticket.wait(PATIENCE).unwrap();
        assert_eq!(word.load(), 3);
    }
}

/// Each launch follows, as a batch does.
#[test]
fn graphs_follow_in_each_launch() {
    let (a, _b) = pair(8, |q| q);
    for [s, other] in streams() {
        let (order, word, gate) = (StreamOrder::new(&a.qp), word(), gate());
        let mut captured = None;
        let capture = s.begin_capture().unwrap();
        let (mut batch, ticket) = following(&order, &word, 1);
        s.submit(&mut batch).unwrap();
        out_of_order(&order.check_idle().unwrap_err());
        captured.replace(ticket);
        let graph = capture.end().unwrap();
        assert!(captured.unwrap().is_taken_back());
        order.check_idle().unwrap();
        s.wait_value32(&gate, 1, Cond::Eq).unwrap();
        graph.launch(&s).unwrap();
        busy(&graph.launch(&other).unwrap_err());
        let (mut batch, _) = following(&order, &word, 2);
        busy(&other.submit(&mut batch).unwrap_err());
        // A launch comes after the batch that follows already.
        out_of_order(&graph.launch(&s).unwrap_err());
        drop(batch);
        gate.store(1);
        order.wait_idle(PATIENCE).unwrap();
        assert_eq!(word.load(), 1);
        graph.launch(&other).unwrap();
        order.wait_idle(PATIENCE).unwrap();
    }
}

#[test]
fn failures_of_the_stream_are_told() {
    let (a, _b) = pair(8, |q| q);
    let limit = Duration::from_millis(30);
    let hosts = std::iter::once(stream_with("failing", limit));
    for s in hosts.chain(places().map(|place| place.stream(limit))) {
        let (order, word) = (StreamOrder::new(&a.qp), word());
        let (mut done, before) = following(&order, &word, 1);
        s.submit(&mut done).unwrap();
        before.wait(PATIENCE).unwrap();
        // With the wait, in one submission: the limit may be over before a second one.
        let mut lost = Batch::new();
        lost.wait_value32(&gate(), 1, Cond::Eq);
        let ticket = lost.follow(&order);
        lost.write_value64(&word, 2);
        s.submit(&mut lost).unwrap();
        let error = ticket.wait(PATIENCE).unwrap_err();
        assert!(matches!(error, Error::StreamWait { .. }), "{error}");
        assert!(matches!(order.wait_idle(PATIENCE), Err(Error::StreamWait { .. })));
        // Another stream may go on.
        let other = stream("next");
        let (mut batch, ticket) = following(&order, &word, 3);
        until(|| other.submit(&mut batch).is_ok());
        ticket.wait(PATIENCE).unwrap();
        assert_eq!(word.load(), 3);
    }
}

/// A stream waits for what another one does.
#[test]
fn streams_wait_for_tickets() {
    let (a, _b) = pair(8, |q| q);
    for [s, other] in streams() {
        let (order, gate, [word, seen]) = (StreamOrder::new(&a.qp), gate(), [word(), word()]);
        s.wait_value32(&gate, 1, Cond::Eq).unwrap();
        let (mut batch, ticket) = following(&order, &word, 1);
        ticket.wait_in_batch(&mut batch).unwrap();
        s.submit(&mut batch).unwrap();
        ticket.wait_on_stream(&s).unwrap();
        if s.kind() == "host" {
            let error = ticket.wait_on_stream(&other).unwrap_err();
            assert!(error.to_string().contains("wait for it on the CPU"), "{error}");
        } else {
            ticket.wait_on_stream(&other).unwrap();
            busy(&order.check_for(&other).unwrap_err());
            order.check_for(&s).unwrap();
            other.write_value64(&seen, 1).unwrap();
            assert!(matches!(other.synchronize(Duration::from_millis(5)), Err(Error::Deadline { .. })));
            assert_eq!(seen.load(), 0);
        }
        gate.store(1);
        s.synchronize(PATIENCE).unwrap();
        other.synchronize(PATIENCE).unwrap();
        assert_eq!((word.load(), seen.load()), (1, u64::from(s.kind() != "host")));
    }
}

/// A batch with messages.
fn messages(ends: &Slots, count: usize) -> Batch {
    let mut batch = Batch::new();
    (0..count).for_each(|_| ends.pass(&mut batch, &ends.places).unwrap());
    batch
}

/// What an order adds to graphs; counts its launches.
#[derive(Debug)]
struct Hook(AtomicU64);

impl Replenish for Hook {
    fn replenish(&self) -> gdsync::Result<()> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// An order is asked for hooks when its batches are recorded, and only then. A refusal leaves the batch as it was.
#[test]
fn orders_have_hooks_in_graphs() {
    let (a, _b) = pair(8, |q| q);
    for [s, _] in streams() {
        let (order, word, calls) = (StreamOrder::new(&a.qp), word(), Arc::new(AtomicU64::new(0)));
        let (hook, seen) = (Arc::new(Hook(AtomicU64::new(0))), calls.clone());
        let launches = hook.clone();
        order.before_launches(move || match seen.fetch_add(1, Ordering::Relaxed) {
            0 => Err(Error::GivenUp),
            _ => Ok(vec![hook.clone()]),
        });
        s.submit(&mut following(&order, &word, 1).0).unwrap();
        assert_eq!(calls.load(Ordering::Relaxed), 0);
        let capture = s.begin_capture().unwrap();
        let (mut batch, ticket) = following(&order, &word, 2);
        assert!(matches!(s.submit(&mut batch), Err(Error::GivenUp)));
        assert!(ticket.is_unsubmitted() && batch.len() == 1);
        s.submit(&mut batch).unwrap();
        s.submit(&mut following(&order, &word, 3).0).unwrap();
        let graph = capture.end().unwrap();
        for n in 1..3 {
            graph.launch(&s).unwrap();
            assert_eq!(launches.0.load(Ordering::Relaxed), n, "once for both batches");
        }
        s.synchronize(PATIENCE).unwrap();
        assert_eq!((word.load(), calls.load(Ordering::Relaxed)), (3, 3));
    }
}

/// Messages are those that streams have got, in order: none of a batch that was dropped or refused, and those of each launch.
#[test]
fn messages_are_numbered_when_they_are_submitted() {
    for place in places() {
        let [s, other] = [(); 2].map(|()| place.stream(PATIENCE));
        let ends = Slots::new(&place.gpu, &place.gpu, &[8; 7]);
        let last = || {
            let orders = [&ends.free.order, &ends.to.order, &ends.inbox.order];
            let [free, sent, taken] = orders.map(StreamOrder::last_number);
            assert!(free == sent && sent == taken);
            sent
        };
        let arrived = |n| {
            let is_there = |n| ends.inbox.len_of(n) == Some(8);
            (n - 6..=n).all(is_there) && !is_there(n + 1)
        };
        s.submit(&mut messages(&ends, 2)).unwrap();
        let [dropped, mut first, mut second] = [3, 1, 2].map(|count| messages(&ends, count));
        assert_eq!(last(), 8);
        drop(dropped);
        assert_eq!(last(), 5);
        out_of_order(&s.submit(&mut second).unwrap_err());
        s.submit(&mut first).unwrap();
        s.submit(&mut second).unwrap();
        let graph = s.capture(|s| {
            s.submit(&mut messages(&ends, 1))?;
            s.submit(&mut messages(&ends, 2))?;
            assert_eq!(last(), 8);
            gdsync::Result::Ok(())
        });
        let (graph, gate) = (graph.unwrap(), gate());
        assert_eq!(last(), 5);
        for round in 0..3 {
            s.wait_value32(&gate, 1, Cond::Eq).unwrap();
            graph.launch(&s).unwrap();
            busy(&graph.launch(&other).unwrap_err());
            s.submit(&mut messages(&ends, 1)).unwrap();
            assert_eq!(last(), 5 + 4 * (round + 1));
            gate.store(1);
            s.synchronize(PATIENCE).unwrap();
            gate.store(0);
            assert!(arrived(5 + 4 * (round + 1)));
        }
        for refused in [stream("host").submit(&mut messages(&ends, 1)), messages(&ends, 1).run(PATIENCE)] {
            assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
        }
        graph.launch(&other).unwrap();
        other.synchronize(PATIENCE).unwrap();
        assert!(last() == 20 && arrived(20));
    }
}

/// Submits a wait for a message, or launches a graph with it.
fn take(ends: &Slots, s: &Stream, by_graph: bool) {
    let submit = || {
        let mut batch = Batch::new();
        _ = batch.take_from_inbox(&ends.inbox);
        s.submit(&mut batch)
    };
    match by_graph {
        false => submit().unwrap(),
        true => _ = s.capture(|_| submit()).unwrap().launch(s).unwrap(),
    }
}

/// A stream that waits for a message fails with the queue pair.
#[test]
fn waits_for_messages_end_with_the_queue_pair() {
    for (place, by_graph) in
        places().flat_map(|place| [false, true].map(|by_graph| (place.clone(), by_graph)))
    {
        let (s, ends) = (place.stream(PATIENCE), Slots::new(&place.gpu, &place.gpu, &[8]));
        take(&ends, &s, by_graph);
        assert!(matches!(s.synchronize(Duration::from_millis(5)), Err(Error::Deadline { .. })));
        ends.sides.0.qp.stop(&Error::GivenUp);
        let error = ends.inbox.order.wait_idle(PATIENCE).unwrap_err();
        let is_known =
            matches!(&error, Error::QpStopped { reason, .. } if matches!(**reason, Error::GivenUp));
        assert!(is_known, "{error}");
        assert!(s.synchronize(PATIENCE).is_err());
    }
}

/// A message that is lost with its stream would leave the next one in its place.
#[test]
fn streams_that_fail_take_the_queue_pairs_of_messages_along() {
    for (place, by_graph) in
        places().flat_map(|place| [false, true].map(|by_graph| (place.clone(), by_graph)))
    {
        let s = place.stream(Duration::from_millis(30));
        let ends = Slots::new(&place.gpu, &place.gpu, &[8]);
        take(&ends, &s, by_graph);
        let failed = s.synchronize(PATIENCE).unwrap_err();
        assert!(matches!(failed, Error::StreamWait { .. }), "{failed}");
        assert!(matches!(ends.sides.0.qp.check(), Err(Error::QpStopped { .. })));
    }
}

/// The CPU runs a batch when no stream has the order.
#[test]
fn batches_of_the_cpu_follow() {
    let (a, _b) = pair(8, |q| q);
    let (order, word, gate, s) = (StreamOrder::new(&a.qp), word(), gate(), stream("held"));
    s.wait_value32(&gate, 1, Cond::Eq).unwrap();
    s.submit(&mut following(&order, &word, 1).0).unwrap();
    let (mut batch, ticket) = following(&order, &word, 2);
    busy(&batch.run(PATIENCE).unwrap_err());
    assert!(ticket.is_unsubmitted(), "the batch is as it was");
    out_of_order(&following(&order, &word, 3).0.run(PATIENCE).unwrap_err());
    gate.store(1);
    order.wait_idle(PATIENCE).unwrap();
    batch.run(PATIENCE).unwrap();
    assert_eq!(word.load(), 2);
    order.check_idle().unwrap();
}
