//! Two processes: streams over the shared-memory wire, and what the survivor sees when the other is killed or stopped.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::child::{Peer, meet_parent, ping, pong, role};
use crate::common::{PATIENCE, Side, counts, hca, is_device_named, stream, tier};
use gdsync::error::Error;
use gdsync::mlx5::Syndrome;
use gdsync::verbs::{QpBuilder, SendWr};

/// Rounds that both sides post ahead.
const DEPTH: u64 = 32;

/// The acknowledge timeout runs out in 8 x 17 ms; the software HCA notices before that a peer has died. A device does not, and
/// one that is simulated needs longer to answer where all tests run at once.
fn build(q: QpBuilder) -> QpBuilder {
    q.timeout(if is_device_named() { 15 } else { 12 }).retry_cnt(7).rnr_retry(7).min_rnr_timer(1)
}

fn side() -> Side {
    Side::new(&hca(), 4096, build)
}

/// Not a test of its own: the other process of every test here.
#[test]
fn child() {
    let Some(role) = role() else { return };
    let side = side();
    meet_parent(&side);
    let s = stream("child");
    match role.as_str() {
        "pong" => {
            let rounds = 2000;
            println!("ready");
            for i in 0..rounds {
                pong(&s, &side, i).unwrap();
                if i % DEPTH == DEPTH - 1 {
                    s.synchronize(PATIENCE).unwrap();
                }
            }
            s.synchronize(PATIENCE).unwrap();
            println!("done {}", side.memory().word64(8).unwrap().load());
        }
        "silent" => {
            println!("ready");
            std::io::stdin().read_line(&mut String::new()).unwrap();
        }
        other => panic!("role {other}"),
    }
}

#[test]
fn streams_of_two_processes_play_ping_pong() {
    let side = side();
    let (mut peer, _) = Peer::start("processes::child", "pong", &side);
    let s = stream("parent");
    let right = Arc::default();
    for i in 0..2000 {
        ping(&s, &side, i, &right).unwrap();
        if i % DEPTH == DEPTH - 1 {
            s.synchronize(PATIENCE).unwrap();
        }
    }
    s.synchronize(PATIENCE).unwrap();
    assert_eq!(right.load(Ordering::Relaxed), 2000);
    assert_eq!(peer.hear("done").trim(), format!("done {}", 3 * 1999 + 1));
    assert_eq!(side.context.stats().violations, 0);
}

/// The error of a queue pair whose peer does not answer any more.
fn retry_exceeded(side: &Side) {
    let error = side.qp.check().unwrap_err();
    let Error::Completion(e) = &error else { panic!("{error}") };
    assert_eq!((e.qpn, e.syndrome), (side.qp.qpn(), Syndrome::RETRY_EXC_ERR));
    let text = error.to_string();
    assert!(text.contains("RETRY_EXC_ERR") && text.contains("the peer does not answer"), "{text}");
    assert_eq!(side.qp.post_send(&[SendWr::nop()]).unwrap_err().to_string(), text);
}

#[test]
fn sends_to_a_killed_peer_end_with_a_retry_error() {
    // A card takes all its timeouts, which are a second.
    for _ in 0..tier(3, 20, 20) {
        let side = side();
        // It posts no receives: the send stays under way until the process is gone.
        let (mut peer, _) = Peer::start("processes::child", "silent", &side);
        let s = stream("survivor");
        let sent = s.send(&side.qp, &SendWr::send(&[]).id(0x5e4d)).unwrap();
        s.wait_send(&side.qp).unwrap();
        assert!(matches!(s.synchronize(Duration::from_millis(2)), Err(Error::Deadline { .. })));
        let start = Instant::now();
        while counts(&side.context) && side.context.stats().wqes == 0 {
            assert!(start.elapsed() < PATIENCE, "the stream has not sent");
            std::thread::yield_now();
        }
        peer.kill();
        let error = s.synchronize(PATIENCE).unwrap_err();
        assert!(matches!(error, Error::Completion(e) if e.wr_id == 0x5e4d), "{error}");
        assert!(sent.status().is_err());
        retry_exceeded(&side);
    }
}

#[test]
fn stopped_peer_costs_the_timeouts() {
    for _ in 0..tier(1, 5, 5) {
        let side = side();
        let (peer, remote) = Peer::start("processes::child", "silent", &side);
        let s = stream("survivor");
        let write = || SendWr::write_inline(remote, &[1; 8]);
        s.send(&side.qp, &write().id(1)).unwrap();
        s.wait_send(&side.qp).unwrap();
        s.synchronize(PATIENCE).unwrap();
        // A busy peer may have been late before.
        let before = side.context.stats().retransmissions;
        peer.stop();
        s.send(&side.qp, &write().id(2)).unwrap();
        s.wait_send(&side.qp).unwrap();
        let error = s.synchronize(PATIENCE).unwrap_err();
        assert!(matches!(error, Error::Completion(e) if e.wr_id == 2), "{error}");
        retry_exceeded(&side);
        assert!(side.context.stats().retransmissions == before + 7 || !counts(&side.context));
        peer.resume();
    }
}

/// More is sent to a stopped peer than it has room for: the ring stays full, and nothing is sent again.
#[test]
fn peer_that_is_stopped_with_a_full_ring_costs_the_timeouts_too() {
    let side = Side::new(&hca(), 4096, |q| build(q).max_send_wr(1024));
    let (peer, remote) = Peer::start("processes::child", "silent", &side);
    peer.stop();
    let write = || SendWr::write_inline(remote, &[1; 8]);
    let sent: Vec<_> = (0..1000).map(|_| side.qp.post_send(&[write()]).unwrap()).collect();
    let first = sent[0].wait(PATIENCE).unwrap_err();
    assert!(matches!(first, Error::Completion(_)), "{first}");
    retry_exceeded(&side);
    peer.resume();
}

#[test]
fn peer_that_was_stopped_for_a_moment_is_not_lost() {
    let side = Side::new(&hca(), 4096, |q| q.timeout(16).retry_cnt(7));
    let (peer, remote) = Peer::start("processes::child", "silent", &side);
    for i in 0..10 {
        peer.stop();
        let sent = side.qp.post_send(&[SendWr::write_inline(remote, &[1; 8]).id(i)]).unwrap();
        assert!(matches!(sent.wait(Duration::from_millis(3)), Err(Error::Deadline { .. }) | Ok(_)));
        peer.resume();
        assert_eq!(sent.wait(PATIENCE).unwrap().wr_id, i);
    }
}
