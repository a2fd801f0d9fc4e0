//! Loops without a window of their own: waits for room in streams and in queues much smaller than the loop.

use std::time::Duration;

use gdsync::error::Error;
use gdsync::stream::{Batch, Cond};
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
            s.submit_within(&mut batch, PATIENCE).unwrap();
        }
        s.synchronize(PATIENCE).unwrap();
        assert_eq!(last.unwrap().status().unwrap().unwrap().wr_id, rounds() - 1);
        assert_clean(&[&a, &b]);
    }
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
            graph.launch_within(&s, PATIENCE).unwrap();
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
    let send = || s.send(&a.qp, &write_of(&b));
    while send().is_ok() {}
    let short = Duration::from_millis(5);
    let full = a.qp.wait_send_room(1, short).unwrap_err();
    assert!(matches!(full, Error::QueueFull { queue: "send queue", .. }), "{full}");
    let text = full.to_string();
    assert!(text.contains("Qp::wait_send_room, or raise QpBuilder::max_send_wr"), "{text}");
    held.store(1);
    s.synchronize(PATIENCE).unwrap();
    // Complete, and taken by nobody.
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
