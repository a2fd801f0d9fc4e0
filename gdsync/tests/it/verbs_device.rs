//! Queue pairs on an RDMA device of the machine: what only a real device does, and programs of others as peers.
//!
//! `GDSYNC_TEST_DEVICE` names the device; without it the first usable one is taken, and where there is none these tests say so
//! and do nothing. Soft-RoCE (`rdma link add rxe0 type rxe netdev DEV`) is enough. Error codes that differ between devices are
//! not looked at.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::child::{Peer, meet_parent, ping, pong, role};
use crate::common::{
    PATIENCE, Side, connect, message, named_device, receive, received, reconnect, sent, stream, until,
};
use gdsync::Device;
use gdsync::Error;
use gdsync::hca::FaultPlan;
use gdsync::mlx5::{Opcode, Syndrome};
use gdsync::verbs::{Context, QpBuilder, QpState, RecvWr, SendWr, Sge};

const SIZE: usize = 64 << 10;

/// The device, or nothing, with the reason printed.
fn device() -> Option<Context> {
    let found = named_device().or_else(|| {
        let usable = |device: &Device| !device.is_software() && device.refusal().is_none();
        Device::list().into_iter().find(usable).map(|device| device.open().unwrap())
    });
    if found.is_none() {
        println!("skipped: no RDMA device that can be used");
    }
    found
}

/// Two connected sides, each on the device opened anew.
fn pair(build: impl Fn(QpBuilder) -> QpBuilder) -> Option<(Side, Side)> {
    let (one, other) = (device()?, device()?);
    Some(connect(Side::new(&one, SIZE, &build), Side::new(&other, SIZE, &build)))
}

/// Whether the library reads the rings and asks the device for what stands there, as it does where the device does not.
fn is_proxy(context: &Context) -> bool {
    context.description().contains("proxy")
}

/// A message and its answer.
fn exchange(a: &Side, b: &Side, seed: u64) {
    message(a, b, seed);
    message(b, a, seed + 100);
}

fn recv(side: &Side, wr_id: u64) {
    receive(side, wr_id, 1024, 1024);
}

/// The syndromes of the next sends.
fn syndromes(side: &Side, ids: &[u64]) -> Vec<Option<Syndrome>> {
    let one = |&id: &u64| {
        let wc = sent(side);
        assert_eq!(wc.wr_id, id);
        wc.syndrome
    };
    ids.iter().map(one).collect()
}

const FLUSHED: Option<Syndrome> = Some(Syndrome::WR_FLUSH_ERR);

#[test]
fn device_says_how_it_is_used() {
    let Some(context) = device() else { return };
    let description = context.description();
    assert!(is_proxy(&context) || description.contains("mlx5 card"), "{description}");
    assert!(["RoCE", "InfiniBand"].iter().any(|wire| context.wire().contains(wire)), "{}", context.wire());
    let plan = FaultPlan { drop: 0.5, ..FaultPlan::default() };
    let error = context.inject(plan).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    context.inject(FaultPlan::default()).unwrap();
}

#[test]
fn wrong_rkey_fails_its_write_and_flushes_the_rest() {
    let Some((a, b)) = pair(|q| q) else { return };
    for round in 0..3 {
        for wr_id in 10..13 {
            recv(&b, wr_id);
        }
        let mut wrong = b.mr.remote(0).unwrap();
        wrong.rkey ^= 0x0100;
        let write = SendWr::write_inline(wrong, &[1; 8]);
        let send = SendWr::send(&[]);
        // The first is fine, and of the others only one exists on the device when it fails.
        a.qp.post_send(&[send.id(1)]).unwrap();
        assert_eq!(received(&b).ok().unwrap().wr_id, 10);
        a.qp.post_send(&[write.id(2), send.id(3), SendWr::nop().id(4), send.id(5)]).unwrap();
        let got = syndromes(&a, &[1, 2, 3, 4, 5]);
        assert_eq!(got, [None, Some(Syndrome::REM_ACCESS_ERR), FLUSHED, FLUSHED, FLUSHED]);
        let error = a.qp.check().unwrap_err();
        assert!(matches!(&error, Error::Completion(e) if e.wr_id == 2), "{error}");
        assert_eq!(a.qp.state(), QpState::ERR);
        b.qp.abort().unwrap();
        assert_eq!(
            [received(&b), received(&b)].map(|wc| (wc.wr_id, wc.syndrome)),
            [11, 12].map(|id| (id, FLUSHED))
        );
        reconnect(&a.qp, &b.qp);
        exchange(&a, &b, round);
    }
}

#[test]
fn wrong_lkey_fails_here() {
    let Some((a, b)) = pair(|q| q) else { return };
    recv(&b, 1);
    let bad = Sge { lkey: a.mr.lkey() ^ 0x0100, ..a.mr.sge(0, 64).unwrap() };
    a.qp.post_send(&[SendWr::send(&[bad]).id(1), SendWr::nop().id(2)]).unwrap();
    let got = syndromes(&a, &[1, 2]);
    assert!(got[0].is_some() && got[1] == FLUSHED, "{got:?}");
    assert!(a.qp.check().is_err());
    reconnect(&a.qp, &b.qp);
    exchange(&a, &b, 1);
}

#[test]
fn receive_that_is_too_short_fails_both_sides() {
    let Some((a, b)) = pair(|q| q) else { return };
    b.qp.post_recv(&[RecvWr::new(&[b.mr.sge(0, 8).unwrap()]).id(1)]).unwrap();
    recv(&b, 2);
    a.qp.post_send(&[SendWr::send(&[a.mr.sge(0, 64).unwrap()]).id(1)]).unwrap();
    assert!(syndromes(&a, &[1])[0].is_some());
    let (first, second) = (received(&b), received(&b));
    assert!(first.syndrome.is_some() && first.wr_id == 1, "{first:?}");
    assert_eq!((second.wr_id, second.syndrome), (2, FLUSHED));
    assert!(b.qp.check().is_err());
    reconnect(&a.qp, &b.qp);
    exchange(&a, &b, 2);
}

#[test]
fn no_receive_in_time_is_told_as_that() {
    let (Some(one), Some(other)) = (device(), device()) else { return };
    let (a, b) =
        connect(Side::new(&one, SIZE, |q| q.rnr_retry(1)), Side::new(&other, SIZE, |q| q.min_rnr_timer(1)));
    a.qp.post_send(&[SendWr::send(&[]).id(1), SendWr::send(&[]).id(2)]).unwrap();
    assert_eq!(syndromes(&a, &[1, 2]), [Some(Syndrome::RNR_RETRY_EXC_ERR), FLUSHED]);
    reconnect(&a.qp, &b.qp);
    // Its one retry may come before a receive that the proxy's thread posts.
    a.qp.post_send(&[SendWr::write_inline(b.mr.remote(0).unwrap(), &[1; 8])]).unwrap();
    sent(&a).ok().unwrap();
    message(&b, &a, 3);
}

/// What the device refuses when it is posted is an error of the work request, in its turn, and the queue pair says why.
#[test]
fn what_the_device_refuses_is_told_with_its_cause() {
    let Some((a, b)) = pair(|q| q) else { return };
    if !is_proxy(&a.context) {
        println!("skipped: a device that reads the ring takes what fits");
        return;
    }
    (0..3).for_each(|id| recv(&b, id));
    // Soft-RoCE's library takes no address that is no multiple of 8; others let the peer refuse it.
    let odd = b.mr.remote(4).unwrap();
    let add = SendWr::fetch_add(odd, 1, a.mr.sge(8, 8).unwrap()).id(2);
    a.qp.post_send(&[SendWr::send(&[]).id(1), add, SendWr::send(&[]).id(3)]).unwrap();
    let got = syndromes(&a, &[1, 2, 3]);
    assert!(got[0].is_none() && got[1].is_some() && got[2] == FLUSHED, "{got:?}");
    let error = a.qp.check().unwrap_err().to_string();
    if a.context.description().contains("rxe") {
        assert_eq!(got[1], Some(Syndrome::LOC_QP_OP_ERR));
        assert!(error.contains("ibv_post_send") && error.contains("atomic_cap"), "{error}");
    }
    reconnect(&a.qp, &b.qp);
    exchange(&a, &b, 4);
}

#[test]
fn aborted_queue_pair_gives_everything_back() {
    let Some((a, b)) = pair(|q| q.max_recv_wr(64).rnr_retry(7).min_rnr_timer(12)) else { return };
    for round in 0..10 {
        (0..64).for_each(|id| recv(&a, id));
        // Nothing is posted over there: they stay with the device.
        (0..10).for_each(|id| drop(a.qp.post_send(&[SendWr::send(&[]).id(id)]).unwrap()));
        a.qp.abort().unwrap();
        for id in 0..64 {
            let wc = received(&a);
            assert_eq!((wc.wr_id, wc.syndrome), (id, FLUSHED));
        }
        for id in 0..10 {
            let wc = sent(&a);
            assert_eq!(wc.wr_id, id);
            assert!(wc.syndrome.is_some());
        }
        reconnect(&a.qp, &b.qp);
        exchange(&a, &b, round);
    }
}

const ROUNDS: u64 = 300;

/// A peer that died is noticed after 4 x 134 ms: on a loaded machine one that lives needs some time to answer.
fn build(q: QpBuilder) -> QpBuilder {
    q.timeout(15).retry_cnt(3).rnr_retry(7).min_rnr_timer(1)
}

/// Not a test of its own: the other process, which answers and stays until it is killed.
#[test]
fn child() {
    let Some(role) = role() else { return };
    let side = Side::new(&device().unwrap(), SIZE, build);
    meet_parent(&side);
    println!("ready");
    let s = stream("child");
    for round in 0..if role == "pong" { ROUNDS } else { 0 } {
        pong(&s, &side, round).unwrap();
        s.synchronize(PATIENCE).unwrap();
    }
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

#[test]
fn two_processes_play_ping_pong() {
    let Some(context) = device() else { return };
    let side = Side::new(&context, SIZE, build);
    let (_peer, _) = Peer::start("verbs_device::child", "pong", &side);
    let (s, right) = (stream("parent"), Arc::default());
    for round in 0..ROUNDS {
        ping(&s, &side, round, &right).unwrap();
        s.synchronize(PATIENCE).unwrap();
    }
    assert_eq!(right.load(Ordering::Relaxed), ROUNDS);
}

#[test]
fn killed_peer_ends_sends_with_a_retry_error() {
    let Some(context) = device() else { return };
    let side = Side::new(&context, SIZE, build);
    let (mut peer, remote) = Peer::start("verbs_device::child", "silent", &side);
    let s = stream("survivor");
    let sges = [side.mr.sge(0, 8).unwrap()];
    let write = SendWr::write(remote, &sges);
    side.qp.post_send(&[write]).unwrap();
    sent(&side).ok().unwrap();
    peer.kill();
    s.send(&side.qp, &write.id(5)).unwrap();
    s.wait_send(&side.qp).unwrap();
    let error = s.synchronize(PATIENCE).unwrap_err();
    assert!(
        matches!(&error, Error::Completion(e) if e.syndrome == Syndrome::RETRY_EXC_ERR && e.wr_id == 5),
        "{error}"
    );
}

/// The sleeping service thread is woken by the device: nobody polls here.
#[test]
fn completions_wake_those_who_sleep() {
    let Some((a, b)) = pair(|q| q) else { return };
    let waiting = stream("waits");
    for i in 0..20 {
        recv(&b, i);
        waiting.wait_recv(&b.qp).unwrap();
        // Long enough for everybody to fall asleep.
        std::thread::sleep(Duration::from_millis(20));
        a.qp.post_send(&[SendWr::send(&[])]).unwrap();
        let start = Instant::now();
        waiting.synchronize(PATIENCE).unwrap();
        assert!(start.elapsed() < Duration::from_secs(5));
        sent(&a).ok().unwrap();
    }
}

/// `GDSYNC_TEST_NETDEV` is the network device below the RDMA device, which is taken down and up: not for machines in use.
#[test]
fn port_that_goes_down_breaks_its_queue_pairs() {
    let Ok(netdev) = std::env::var("GDSYNC_TEST_NETDEV") else {
        println!("skipped: GDSYNC_TEST_NETDEV names no network device that may be taken down");
        return;
    };
    let set = |state| {
        let status = std::process::Command::new("ip").args(["link", "set", "dev", &netdev, state]).status();
        assert!(status.unwrap().success(), "ip link set dev {netdev} {state}");
    };
    let Some((a, b)) = pair(|q| q) else { return };
    recv(&b, 1);
    let s = stream("waits");
    s.wait_recv(&b.qp).unwrap();
    set("down");
    let error = s.synchronize(PATIENCE).unwrap_err();
    set("up");
    assert!(error.to_string().contains("IBV_EVENT_PORT_ERR"), "{error}");
    assert!(a.qp.check().unwrap_err().to_string().contains("went down"));
    until(|| Device::list().iter().any(|device| !device.is_software() && device.refusal().is_none()));
    reconnect(&a.qp, &b.qp);
    exchange(&a, &b, 1);
}

#[test]
fn numbers_and_keys_are_those_of_the_device() {
    let Some((a, b)) = pair(|q| q) else { return };
    assert_ne!(a.qp.qpn(), b.qp.qpn(), "one device numbers them");
    assert_eq!(a.qp.address().gid, b.qp.address().gid);
    a.qp.post_send(&[SendWr::nop().id(9)]).unwrap();
    let wc = sent(&a).ok().unwrap();
    assert_eq!((wc.wr_id, wc.send_opcode), (9, Opcode::NOP));
    until(|| !is_proxy(&a.context) || a.context.stats().doorbells > 0);
}
