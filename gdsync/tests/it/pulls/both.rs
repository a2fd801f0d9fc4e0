//! Copies that both sides make: the receiver reads one half, the sender writes the other.
//!
//! With a pause in the fault plan, the receiver waits until the sender has claimed its half, and the sender stops there.

use std::time::{Duration, Instant};

use gdsync::Error;
use gdsync::hca::{FaultPlan, Pulls};
use gdsync::mlx5::Syndrome;
use gdsync::verbs::{QpAttr, QpState};

use super::{BIG, SIZE, data, hca, ok, patient, receive};
use crate::child::Peer;
use crate::common::{PATIENCE, Side, bytes, is_device_named, received, until};

/// How long a half may take that is not to end in this test.
const EVER: &str = "pause 1000000";

/// A side, and a peer that sends to it without end.
fn start(role: &str, pause: Duration) -> (Side, Peer) {
    let side = Side::new(&hca(Pulls::From(1)), SIZE, patient);
    side.context.inject(FaultPlan { pause, ..FaultPlan::default() }).unwrap();
    let (peer, _) = Peer::start("pulls::child", role, &side);
    (side, peer)
}

/// Returns when the peer has claimed a half, and is in the middle of it.
fn claimed(side: &Side) {
    receive(side, 0, 0, BIG);
    until(|| {
        assert_eq!(side.qp.poll_recv(), None, "half of it is missing");
        let stats = side.context.stats();
        // An offer, beside refusals of what came before the receive.
        stats.packets_sent > stats.rnr_naks
    });
}

#[test]
fn sender_writes_its_half() {
    if is_device_named() {
        return;
    }
    let (side, _peer) = start("pause 1", PATIENCE);
    let began = Instant::now();
    for id in 0..20 {
        let at = usize::try_from(id).unwrap() * 1000;
        side.memory().fill(0, SIZE, 0).unwrap();
        receive(&side, id, at, BIG);
        ok(&received(&side), id);
        assert!(bytes(&side, at, BIG) == data()[..BIG]);
        assert!(bytes(&side, at + BIG, SIZE - at - BIG).iter().all(|byte| *byte == 0), "and no more");
    }
    assert!(began.elapsed() < PATIENCE, "offers that nobody claims are waited for");
    assert_eq!(side.context.stats().pulled, 20);
}

#[test]
fn sender_killed_in_its_half_releases_the_receiver() {
    if is_device_named() {
        return;
    }
    let (side, mut peer) = start(EVER, PATIENCE);
    claimed(&side);
    peer.kill();
    assert_eq!(received(&side).syndrome, Some(Syndrome::WR_FLUSH_ERR));
    side.qp.modify(&QpAttr::to(QpState::RESET)).unwrap();
}

#[test]
fn memory_is_busy_while_a_sender_is_stopped_in_its_half() {
    if is_device_named() {
        return;
    }
    // Time enough to stop it.
    let (side, peer) = start("pause 8000", PATIENCE);
    claimed(&side);
    peer.stop();
    // What waits has its deadline. An abort releases nothing that is still written to, and a reset says so.
    let late = |result: gdsync::Result<_>| matches!(result, Err(Error::Deadline { .. }));
    assert!(late(side.qp.recv_cq().wait(Duration::from_millis(50)).map(|_| ())));
    side.qp.abort().unwrap();
    assert!(late(side.qp.recv_cq().wait(Duration::from_millis(50)).map(|_| ())));
    assert!(late(side.qp.modify(&QpAttr::to(QpState::RESET))));
    peer.resume();
    assert_eq!(received(&side).syndrome, Some(Syndrome::WR_FLUSH_ERR));
    side.qp.modify(&QpAttr::to(QpState::RESET)).unwrap();
}

#[test]
fn region_does_not_go_while_a_sender_is_in_its_half() {
    if is_device_named() {
        return;
    }
    let (side, mut peer) = start(&format!("write, {EVER}"), PATIENCE);
    claimed(&side);
    let Side { mr, .. } = side;
    let going = std::thread::spawn(move || drop(mr));
    std::thread::sleep(Duration::from_millis(50));
    assert!(!going.is_finished());
    peer.kill();
    let killed = Instant::now();
    going.join().unwrap();
    assert!(killed.elapsed() < Duration::from_secs(6), "it waits for the dead, which have 12 s");
}

#[test]
fn memory_under_a_writer_is_never_freed() {
    if is_device_named() {
        return;
    }
    let (side, _peer) = start(EVER, PATIENCE);
    claimed(&side);
    let addr = side.memory().addr();
    // Waits as long as it does for any copy, and says so.
    drop(side);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ranges = maps.lines().filter_map(|line| line.split(' ').next()?.split_once('-'));
    let is_inside = |(begin, end): (&str, &str)| {
        let [begin, end] = [begin, end].map(|text| u64::from_str_radix(text, 16).unwrap());
        (begin..end).contains(&addr)
    };
    assert!(ranges.into_iter().any(is_inside), "it is still mapped");
}

#[test]
fn sender_that_may_not_write_leaves_all_to_the_receiver() {
    if is_device_named() {
        return;
    }
    let (side, _peer) = start("write refused", Duration::ZERO);
    for id in 0..20 {
        receive(&side, id, 0, BIG);
        ok(&received(&side), id);
        assert!(bytes(&side, 0, BIG) == data()[..BIG]);
        side.memory().fill(0, BIG, 0).unwrap();
    }
    assert_eq!(side.context.stats().pulled, 20);
}
