//! Queue pairs on an iWARP device: connections, and what is different there.
//!
//! `GDSYNC_TEST_IWARP` names the device; without it these tests say so and do nothing. Soft iWARP
//! (`rdma link add siw0 type siw netdev DEV`) is enough.

use crate::child::{Peer, answer, ask, meet_parent, recv, role};
use crate::common::{PATIENCE, Side, bytes, connect, pattern, received, reconnect, sent, stream, until};
use gdsync::Error;
use gdsync::hca::Gid;
use gdsync::mlx5::{CqeOpcode, Opcode, Syndrome};
use gdsync::rdma::DeviceConfig;
use gdsync::stream::Batch;
use gdsync::verbs::{Access, Context, Device, QpAddress, QpAttr, QpBuilder, QpState, RecvWr, SendWr};

const SIZE: usize = 256 << 10;
const FLUSHED: Option<Syndrome> = Some(Syndrome::WR_FLUSH_ERR);

fn listed() -> Option<Device> {
    let name = std::env::var("GDSYNC_TEST_IWARP").ok().filter(|name| !name.is_empty());
    if name.is_none() {
        println!("skipped: GDSYNC_TEST_IWARP names no iWARP device");
    }
    Some(Device::find(Some(&name?)).unwrap())
}

fn device() -> Option<Context> {
    Some(listed()?.open().unwrap())
}

fn sides(build: impl Fn(QpBuilder) -> QpBuilder) -> Option<(Side, Side)> {
    let (one, other) = (device()?, device()?);
    Some((Side::new(&one, SIZE, &build), Side::new(&other, SIZE, &build)))
}

/// Two connected sides, each on the device opened anew.
fn pair(build: impl Fn(QpBuilder) -> QpBuilder) -> Option<(Side, Side)> {
    let (a, b) = sides(build)?;
    Some(connect(a, b))
}

/// A message and its answer.
fn exchange(a: &Side, b: &Side, seed: usize) {
    for (from, to) in [(a, b), (b, a)] {
        let data = pattern(100, seed);
        from.memory().write(0, &data).unwrap();
        recv(to, 7);
        from.qp.post_send(&[SendWr::send(&[from.mr.sge(0, 100).unwrap()])]).unwrap();
        let (wc, checks) = (received(to), [from, to].map(|side| side.qp.check()));
        assert_eq!((wc.syndrome, wc.byte_len), (None, 100), "round {seed}: {checks:?}");
        assert_eq!(sent(from).ok().unwrap().opcode, CqeOpcode::REQ);
        assert_eq!(bytes(to, 1024, 100), data);
    }
}

#[test]
fn device_says_what_it_is() {
    let Some(context) = device() else { return };
    assert_eq!(context.wire(), "iWARP");
    assert!(context.description().contains("proxy"), "{}", context.description());
    // An address of IPv4, and the port of its listener.
    let side = Side::new(&context, 4096, |q| q);
    let address = side.qp.address();
    assert_eq!(address.gid.0[..12], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]);
    assert_ne!(address.lid, 0);
    let config = DeviceConfig { gid_index: Some(0), ..DeviceConfig::default() };
    let error = listed().unwrap().open_with(&config).unwrap_err();
    assert!(error.to_string().contains("GDSYNC_GID_INDEX"), "{error}");
}

#[test]
fn messages_of_all_sizes_arrive_whichever_side_begins() {
    let Some((a, b)) = sides(|q| q) else { return };
    // The order of the two calls is not that of the two sides.
    a.qp.connect(b.qp.address()).unwrap();
    recv(&a, 1);
    b.qp.connect(a.qp.address()).unwrap();
    // Each of them sends at once; one was asked for the connection.
    recv(&b, 1);
    for side in [&a, &b] {
        side.qp.post_send(&[SendWr::send(&[])]).unwrap();
    }
    for side in [&a, &b] {
        assert_eq!(received(side).ok().unwrap().byte_len, 0);
        sent(side).ok().unwrap();
    }
    for (seed, len) in [1, 8, 80, 81, 1000, 1400, 1500, 4096, 65_536, 131_072].into_iter().enumerate() {
        for (from, to) in [(&a, &b), (&b, &a)] {
            let data = pattern(len, seed);
            from.memory().write(0, &data).unwrap();
            to.qp.post_recv(&[RecvWr { wr_id: 5, sges: &[to.mr.sge(SIZE / 2, SIZE / 2).unwrap()] }]).unwrap();
            from.qp.post_send(&[SendWr::send(&[from.mr.sge(0, len).unwrap()]).id(9)]).unwrap();
            assert_eq!(received(to).ok().unwrap().byte_len as usize, len);
            assert_eq!(sent(from).ok().unwrap().wr_id, 9);
            assert_eq!(bytes(to, SIZE / 2, len), data);
        }
    }
    let small = b"inline";
    recv(&b, 3);
    a.qp.post_send(&[SendWr::send_inline(small)]).unwrap();
    assert_eq!(received(&b).ok().unwrap().byte_len, 6);
    assert_eq!(bytes(&b, 1024, 6), small);
}

#[test]
fn writes_and_reads_reach_the_memory_of_the_peer() {
    let Some((a, b)) = pair(|q| q) else { return };
    for (seed, len) in [1, 8, 1000, 65_536, 131_072].into_iter().enumerate() {
        let data = pattern(len, seed);
        a.memory().write(0, &data).unwrap();
        let source = [a.mr.sge(0, len).unwrap()];
        let write = SendWr::write(b.mr.remote(0).unwrap(), &source);
        // What is read is there: the write was before it.
        let back = [a.mr.sge(SIZE / 2, len).unwrap()];
        let read = SendWr::read(b.mr.remote(0).unwrap(), &back);
        a.qp.post_send(&[write, read]).unwrap();
        assert_eq!(sent(&a).ok().unwrap().send_opcode, Opcode::RDMA_WRITE);
        assert_eq!(sent(&a).ok().unwrap().byte_len as usize, len);
        assert_eq!(bytes(&b, 0, len), data);
        assert_eq!(bytes(&a, SIZE / 2, len), data);
    }
    assert_eq!(a.context.stats().violations, 0);
}

#[test]
fn what_iwarp_lacks_is_refused_with_its_cause() {
    let Some((a, b)) = pair(|q| q.max_send_sge(2)) else { return };
    let (remote, result) = (b.mr.remote(0).unwrap(), a.mr.sge(8, 8).unwrap());
    let two = [a.mr.sge(0, 8).unwrap(), a.mr.sge(8, 8).unwrap()];
    let lacking = [
        (SendWr::send(&[]).imm(7), "immediate"),
        (SendWr::write_inline(remote, &[1; 8]).imm(7), "immediate"),
        (SendWr::fetch_add(remote, 1, result), "atomic"),
        (SendWr::compare_swap(remote, 0, 1, result), "atomic"),
        (SendWr::read(remote, &two), "more than one buffer"),
    ];
    for (round, (wr, word)) in lacking.into_iter().enumerate() {
        a.qp.post_send(&[wr.id(1), SendWr::nop().id(2)]).unwrap();
        let first = sent(&a);
        assert_eq!((first.wr_id, first.syndrome), (1, Some(Syndrome::LOC_QP_OP_ERR)));
        assert_eq!(sent(&a).syndrome, FLUSHED);
        let error = a.qp.check().unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
        reconnect(&a.qp, &b.qp);
        exchange(&a, &b, round);
    }
    let error = a.qp.modify(&QpAttr::to(QpState::RTS).access(Access::empty())).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    exchange(&a, &b, 5);
}

#[test]
fn addresses_that_are_no_peers_are_refused() {
    let Some((a, b)) = sides(|q| q) else { return };
    a.qp.init().unwrap();
    let refused = |peer: QpAddress, word: &str| {
        let error = a.qp.connect(peer).unwrap_err();
        assert!(matches!(error, Error::Peer { .. }) && error.to_string().contains(word), "{error}");
        assert_eq!(a.qp.state(), QpState::INIT);
    };
    refused(a.qp.address(), "its own peer");
    refused(b.qp.address().with_lid(0), "port");
    refused(QpAddress::new(Gid([0; 16]), 5, 5).with_lid(4791), "port");
    let mut ipv6 = b.qp.address();
    ipv6.gid = Gid([0x20; 16]);
    refused(ipv6, "IPv6");
    connect(a, b);
}

#[test]
fn peer_that_does_not_connect_is_told() {
    let Some((a, b)) = sides(|q| q) else { return };
    // Each of them once, as only one of them asks.
    for (one, other) in [(&a, &b), (&b, &a)] {
        one.qp.connect(other.qp.address()).unwrap();
        one.qp.post_send(&[SendWr::send(&[]).id(3)]).unwrap();
        let wc = sent(one);
        assert_eq!((wc.wr_id, wc.syndrome), (3, FLUSHED));
        let error = one.qp.check().unwrap_err().to_string();
        assert!(error.contains("within 9") || error.contains("it refused"), "{error}");
        one.qp.modify(&QpAttr::to(QpState::RESET)).unwrap();
    }
    let (a, b) = connect(a, b);
    exchange(&a, &b, 1);
}

#[test]
fn peer_that_is_gone_is_told() {
    let Some((a, b)) = sides(|q| q) else { return };
    let address = b.qp.address();
    drop(b);
    a.qp.init().unwrap();
    recv(&a, 1);
    // Whichever side was to ask.
    let error = match a.qp.connect(address) {
        Ok(()) => {
            assert_eq!(received(&a).syndrome, FLUSHED);
            a.qp.check().unwrap_err().to_string()
        }
        Err(error) => error.to_string(),
    };
    assert!(error.contains("nobody listens") || error.contains("within 9"), "{error}");
}

/// A reset on one side breaks the other one, and both connect again, many times.
#[test]
fn reset_breaks_the_peer_and_both_connect_again() {
    let Some((a, b)) = pair(|q| q) else { return };
    for round in 0..20 {
        exchange(&a, &b, round);
        let (one, other) = if round % 2 == 0 { (&a, &b) } else { (&b, &a) };
        recv(other, 4);
        one.qp.modify(&QpAttr::to(QpState::RESET)).unwrap();
        let wc = received(other);
        assert_eq!((wc.wr_id, wc.syndrome), (4, FLUSHED));
        until(|| other.qp.check().is_err());
        let error = other.qp.check().unwrap_err().to_string();
        assert!(error.contains("the peer reset or destroyed its queue pair"), "{error}");
        other.qp.modify(&QpAttr::to(QpState::RESET)).unwrap();
        one.qp.connect(other.qp.address()).unwrap();
        other.qp.connect(one.qp.address()).unwrap();
    }
}

/// There it is not the writer's completion that fails, but the connection.
#[test]
fn wrong_key_ends_the_connection() {
    let Some((a, b)) = pair(|q| q) else { return };
    for round in 0..3 {
        recv(&a, 1);
        recv(&b, 2);
        let mut wrong = b.mr.remote(0).unwrap();
        wrong.rkey ^= 0x0100;
        a.qp.post_send(&[SendWr::write_inline(wrong, &[1; 8])]).unwrap();
        assert_eq!([received(&a), received(&b)].map(|wc| wc.syndrome), [FLUSHED; 2]);
        for side in [&a, &b] {
            let error = side.qp.check().unwrap_err();
            assert!(matches!(error, Error::QpStopped { .. }), "{error}");
        }
        reconnect(&a.qp, &b.qp);
        exchange(&a, &b, round);
    }
}

#[test]
fn aborted_queue_pair_gives_everything_back() {
    let Some((a, b)) = pair(|q| q.max_recv_wr(64)) else { return };
    for round in 0..5 {
        (0..64).for_each(|id| recv(&a, id));
        a.qp.abort().unwrap();
        for id in 0..64 {
            let wc = received(&a);
            assert_eq!((wc.wr_id, wc.syndrome), (id, FLUSHED));
        }
        reconnect(&a.qp, &b.qp);
        exchange(&a, &b, round);
    }
}

/// Rings of 8 entries, gone round many times by a stream that nobody helps.
#[test]
fn stream_triggers_sends_for_many_laps() {
    let Some((a, b)) = pair(|q| q.max_send_wr(8).max_recv_wr(8)) else { return };
    let s = stream("device");
    for i in 0..200u64 {
        recv(&b, i);
        let mut batch = Batch::new();
        batch.write_value64(&a.memory().word64(0).unwrap(), i);
        batch.send(&a.qp, &SendWr::send(&[a.mr.sge(0, 8).unwrap()])).unwrap();
        batch.wait_send(&a.qp).unwrap();
        batch.wait_recv(&b.qp).unwrap();
        s.submit_within(&mut batch, PATIENCE).unwrap();
        s.synchronize(PATIENCE).unwrap();
        assert_eq!(b.memory().word64(1024).unwrap().load(), i);
    }
}

#[test]
fn graph_is_launched_many_times() {
    let Some((a, b)) = pair(|q| q.max_send_wr(16).max_recv_wr(16)) else { return };
    let s = stream("graphs");
    let counter = a.memory().word64(0).unwrap();
    let graph = s
        .capture(|g| {
            g.send(&a.qp, &SendWr::write(b.mr.remote(64)?, &[a.mr.sge(0, 8)?]))?;
            g.wait_send(&a.qp)?;
            g.send(&a.qp, &SendWr::read(b.mr.remote(64)?, &[a.mr.sge(8, 8)?]))?;
            g.wait_send(&a.qp).map(drop)
        })
        .unwrap();
    for n in 0..100 {
        counter.store(n);
        graph.launch(&s).unwrap();
        s.synchronize(PATIENCE).unwrap();
        assert_eq!(a.memory().word64(8).unwrap().load(), n);
    }
}

#[test]
fn many_queue_pairs_come_and_go() {
    let Some(context) = device() else { return };
    for round in 0..3 {
        let small = |q: QpBuilder| q.max_send_wr(4).max_recv_wr(4);
        let pair = |_| connect(Side::new(&context, 4096, small), Side::new(&context, 4096, small));
        let pairs: Vec<_> = (0..32).map(pair).collect();
        for (n, (a, b)) in pairs.iter().enumerate() {
            recv(b, n as u64);
            a.memory().write(0, &pattern(64, n + round)).unwrap();
            a.qp.post_send(&[SendWr::send(&[a.mr.sge(0, 64).unwrap()])]).unwrap();
        }
        for (n, (a, b)) in pairs.iter().enumerate().rev() {
            assert_eq!(received(b).ok().unwrap().wr_id, n as u64);
            assert_eq!(bytes(b, 1024, 64), pattern(64, n + round));
            sent(a).ok().unwrap();
        }
    }
}

/// Not a test of its own: the other process.
#[test]
fn child() {
    let Some(role) = role() else { return };
    let side = Side::new(&device().unwrap(), SIZE, |q| q);
    side.qp.init().unwrap();
    recv(&side, 0);
    meet_parent(&side);
    println!("ready");
    if role == "silent" {
        return drop(std::io::stdin().read_line(&mut String::new()));
    }
    answer(&side);
}

#[test]
fn two_processes_play_ping_pong() {
    let Some(context) = device() else { return };
    let side = Side::new(&context, SIZE, |q| q);
    let (mut peer, _) = Peer::start("verbs_iwarp::child", "pong", &side);
    ask(&side, &mut peer);
}

/// The connection goes with the process: nothing has to be sent to see that.
#[test]
fn killed_peer_breaks_the_queue_pair() {
    let Some(context) = device() else { return };
    let side = Side::new(&context, SIZE, |q| q);
    let (mut peer, _) = Peer::start("verbs_iwarp::child", "silent", &side);
    let s = stream("survivor");
    recv(&side, 1);
    s.wait_recv(&side.qp).unwrap();
    side.qp.post_send(&[SendWr::send(&[])]).unwrap();
    sent(&side).ok().unwrap();
    peer.kill();
    let error = s.synchronize(PATIENCE).unwrap_err();
    assert!(error.to_string().contains("or is gone"), "{error}");
}
