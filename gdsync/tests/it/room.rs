//! Loops without a window of their own: waits for room in streams and in queues much smaller than the loop.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gdsync::error::Error;
use gdsync::stream::{Batch, Cond, HostStreamConfig, Stream};
use gdsync::verbs::{QpBuilder, RecvWr, SendWr};

use crate::common::{PATIENCE, Side, assert_clean, gate, pair, stream, tier};
use crate::place::sites;

fn small(q: QpBuilder) -> QpBuilder {
    q.max_send_wr(4).max_recv_wr(4)
}

fn write_of(to: &Side) -> SendWr<'static> {
    SendWr::write(to.mr.remote(0).unwrap(), &[])
}

fn rounds() -> u64 {
    tier(200, 1000, 20_000)
}

#[test]
fn stream_loop_waits_for_room_in_stream_and_queues() {
    for site in sites() {
        let (a, b) = site.pair(64, small);
        let s = site.stream(PATIENCE);
        let mut last = None;
        for i in 0..rounds() {
            a.qp.wait_send_room(1, PATIENCE).unwrap();
            b.qp.wait_recv_room(1, PATIENCE).unwrap();
            b.qp.post_recv(&[RecvWr::new(&[]).id(i)]).unwrap();
            let mut batch = Batch::new();
            batch.send(&a.qp, &SendWr::send(&[]).id(i)).unwrap();
            batch.wait_send(&a.qp).unwrap();
            last = Some(batch.wait_recv(&b.qp).unwrap());
            s.submit(&mut batch).unwrap();
        }
        s.synchronize(PATIENCE).unwrap();
        assert_eq!(last.unwrap().status().unwrap().unwrap().wr_id, rounds() - 1);
        assert_clean(&[&a, &b]);
    }
}

/// Each call of a stream waits for room, in the stream and in the queue.
#[test]
fn calls_of_a_stream_wait_for_room() {
    for site in sites() {
        let (a, b) = site.pair(64, small);
        let s = site.stream(PATIENCE);
        let count = Arc::new(AtomicU64::new(0));
        for i in 0..rounds() {
            let (seen, memory) = (count.clone(), a.memory().word64(0).unwrap());
            s.host_fn(move || _ = seen.fetch_add(1, Ordering::Relaxed)).unwrap();
            s.write_value64(&memory, i).unwrap();
            s.post_recv(&b.qp, &RecvWr::new(&[]).id(i)).unwrap();
            s.send(&a.qp, &SendWr::send(&[]).id(i)).unwrap();
            s.wait_send(&a.qp).unwrap();
            s.wait_recv(&b.qp).unwrap();
        }
        s.synchronize(PATIENCE).unwrap();
        assert_eq!(count.load(Ordering::Relaxed), rounds());
        assert_clean(&[&a, &b]);
    }
}

/// A host function may use its stream, which would wait for itself if that waited for room.
#[test]
fn host_function_does_not_wait_for_room_in_its_own_stream() {
    let config = HostStreamConfig { depth: 2, wait_limit: PATIENCE, ..HostStreamConfig::default() };
    let s = Stream::host(config).unwrap();
    let (gate, other) = (gate(), s.clone());
    s.wait_value32(&gate, 1, Cond::Eq).unwrap();
    let (told, results) = std::sync::mpsc::channel();
    s.host_fn(move || {
        let start = Instant::now();
        let full = (0..3).find_map(|_| other.host_fn(|| ()).err());
        told.send((full, start.elapsed())).unwrap();
    })
    .unwrap();
    gate.store(1);
    let (full, after) = results.recv_timeout(PATIENCE).unwrap();
    assert!(
        matches!(full, Some(Error::StreamFull { depth: 2, .. })) && after < PATIENCE / 2,
        "{full:?} {after:?}"
    );
    s.synchronize(PATIENCE).unwrap();
}

#[test]
fn launches_wait_for_room_in_send_queues() {
    for site in sites() {
        let (a, b) = site.pair(64, small);
        let s = site.stream(PATIENCE);
        let graph = s
            .capture(|s| {
                (0..3).try_for_each(|_| s.send(&a.qp, &write_of(&b)).map(drop))?;
                let mut batch = Batch::new();
                batch.wait_all_sends(&a.qp)?;
                s.submit(&mut batch)
            })
            .unwrap();
        for _ in 0..rounds() {
            graph.launch(&s).unwrap();
        }
        s.synchronize(PATIENCE).unwrap();
        assert_clean(&[&a, &b]);
    }
}

/// As in verbs, the CPU makes room by taking a completion.
#[test]
fn cpu_loop_takes_a_completion_where_the_queue_is_full() {
    let (a, b) = pair(64, small);
    let (mut sent, mut taken) = (0, 0);
    while sent < rounds() {
        match a.qp.post_send(&[write_of(&b).id(sent)]) {
            Ok(_) => sent += 1,
            Err(Error::QueueFull { outstanding, depth, .. }) => {
                assert!(outstanding <= depth, "{outstanding} of {depth}");
                assert_eq!(a.qp.send_cq().wait(PATIENCE).unwrap().ok().unwrap().wr_id, taken);
                taken += 1;
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert_clean(&[&a, &b]);
}

#[test]
fn full_queue_is_told_at_the_end_of_the_time() {
    let (a, b) = pair(64, small);
    let held = gate();
    let s = stream("room");
    s.wait_value32(&held, 1, Cond::Eq).unwrap();
    let short = Duration::from_millis(5);
    let send = || s.with_timeout(short).send(&a.qp, &write_of(&b));
    while send().is_ok() {}
    let full = a.qp.wait_send_room(1, short).unwrap_err();
    assert!(matches!(full, Error::QueueFull { queue: "send queue", .. }), "{full}");
    let text = full.to_string();
    assert!(text.contains("Qp::wait_send_room, or raise QpBuilder::max_send_wr"), "{text}");
    held.store(1);
    s.synchronize(PATIENCE).unwrap();
    // Complete, and taken by nobody.
    a.qp.wait_all_sends(PATIENCE).unwrap();
    let full = a.qp.wait_send_room(4, short).unwrap_err();
    assert!(matches!(full, Error::QueueFull { queue: "send completion queue", untaken: 1.., .. }), "{full}");
    s.wait_send(&a.qp).unwrap();
    let mut all = Batch::new();
    all.wait_all_sends(&a.qp).unwrap();
    s.submit(&mut all).unwrap();
    a.qp.wait_send_room(4, PATIENCE).unwrap();
    while b.qp.post_recv(&[RecvWr::new(&[])]).is_ok() {}
    let full = b.qp.wait_recv_room(1, short).unwrap_err();
    assert!(full.to_string().contains("Qp::wait_recv_room, or raise QpBuilder::max_recv_wr"), "{full}");
    for more in [a.qp.wait_send_room(1000, PATIENCE), a.qp.wait_recv_room(1000, PATIENCE)] {
        assert!(matches!(more, Err(Error::InvalidArgument { .. })), "{more:?}");
    }
    a.qp.abort().unwrap();
    assert!(a.qp.wait_send_room(1, PATIENCE).is_err());
}
