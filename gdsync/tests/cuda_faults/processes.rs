//! Two processes with streams on one GPU, one of which is killed in the middle of a ping-pong.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gdsync::error::{Error, Result};
use gdsync::stream::{Batch, Stream};
use gdsync::verbs::{QpAttr, QpBuilder, QpState, RecvWr, SendWr};

use super::bed::on_gpu;
use super::common::{PATIENCE, Side, assert_clean, hca};
use super::peer::{Peer, meet_parent, role};
use super::place::{self, Place, places_on};

/// Rounds that both sides queue ahead.
const DEPTH: u64 = 16;
/// Rounds of a game that is played to its end.
const ROUNDS: u64 = 200;
/// What a release may take after the death, on a loaded machine.
const SLACK: Duration = Duration::from_secs(5);

/// The acknowledge timeout runs out in 8 x 268 ms; a peer that died is noticed before.
fn side(place: &Place) -> Side {
    place.side_with(&hca(), 4096, |q: QpBuilder| q.timeout(16).retry_cnt(7).rnr_retry(7).min_rnr_timer(1))
}

/// Not a test of its own: the other process, which sends back what it gets until it is killed. Its role is a place.
#[test]
fn child() {
    let Some(role) = role() else { return };
    let gpu = place::gpu(0).unwrap();
    let place = places_on(&gpu).nth(role.parse().unwrap()).unwrap();
    let side = side(&place);
    let stream = place.stream(PATIENCE);
    meet_parent(&side);
    println!("ready");
    for i in 0.. {
        // A child whose parent is gone just ends.
        if pong(&stream, &side, i).is_err() || i % DEPTH == 0 && stream.synchronize(PATIENCE).is_err() {
            return;
        }
    }
}

fn pong(stream: &Stream, side: &Side, i: u64) -> Result<()> {
    let sge = side.mr.sge(8, 8)?;
    side.qp.post_recv(&[RecvWr { wr_id: i, sges: &[sge] }])?;
    let mut batch = Batch::new();
    batch.wait_recv(&side.qp)?;
    batch.send(&side.qp, &SendWr::send(&[sge]).id(i))?;
    batch.wait_send(&side.qp)?;
    stream.submit_within(&mut batch, PATIENCE)
}

/// One round; a right answer is counted, in stream order.
fn ping(stream: &Stream, side: &Side, i: u64, right: &Arc<AtomicU64>) -> Result<()> {
    side.qp.post_recv(&[RecvWr { wr_id: i, sges: &[side.mr.sge(8, 8)?] }])?;
    let mut batch = Batch::new();
    batch.write_value64(&side.memory().word64(0)?, 3 * i + 1);
    batch.send(&side.qp, &SendWr::send(&[side.mr.sge(0, 8)?]).id(i))?;
    batch.wait_send(&side.qp)?;
    batch.wait_recv(&side.qp)?;
    let (answer, right) = (side.memory().word64(8)?, right.clone());
    batch.host_fn(move || {
        right.fetch_add((answer.load() == 3 * i + 1).into(), Ordering::Relaxed);
    });
    stream.submit_within(&mut batch, PATIENCE)
}

/// Plays to the end of the rounds.
fn play(stream: &Stream, side: &Side) {
    let right = Arc::default();
    for i in 0..ROUNDS {
        ping(stream, side, i, &right).unwrap();
        if i % DEPTH == 0 {
            stream.synchronize(PATIENCE).unwrap();
        }
    }
    stream.synchronize(PATIENCE).unwrap();
    assert_eq!(right.load(Ordering::Relaxed), ROUNDS);
}

/// Plays on until the peer, killed `after` so long, is missed. The error that told so, and the time since the death.
fn play_until_death(stream: &Stream, side: &Side, peer: &mut Peer, after: Duration) -> (Error, Duration) {
    let right = Arc::default();
    let end = Instant::now() + after;
    let mut died = None;
    for i in 0.. {
        if died.is_none() && Instant::now() > end {
            peer.kill();
            died = Some(Instant::now());
        }
        let played = ping(stream, side, i, &right);
        let played = if i % DEPTH == 0 { played.and(stream.synchronize(PATIENCE)) } else { played };
        if let Err(error) = played {
            return (error, died.expect("it lived").elapsed());
        }
    }
    unreachable!("without end")
}

#[test]
fn a_killed_process_releases_the_other_one() {
    // Whether a send was under way depends on the moment.
    let tells_the_death = |error: &Error| matches!(error, Error::Completion(_) | Error::PeerGone { .. });
    on_gpu(|bed, _| {
        for (n, place) in places_on(&bed.gpu).enumerate() {
            let side = side(&place);
            let stream = place.stream(PATIENCE);
            let start = || Peer::start("processes::child", &n.to_string(), &side).0;
            for round in 0..2 {
                let mut peer = start();
                let after = Duration::from_millis(2 + 5 * round);
                let (error, took) = play_until_death(&stream, &side, &mut peer, after);
                eprintln!("{} {:?}: told {took:?} after the death: {error}", place.via, place.on_gpu);
                assert!(tells_the_death(&error), "{error}");
                assert!(took < SLACK, "{took:?}");
                let drained = stream.synchronize(PATIENCE);
                assert!(drained.as_ref().map_or_else(tells_the_death, |()| true), "{drained:?}");
                assert_eq!(stream.query().pending, 0);
                assert!(stream.query().error.is_none(), "the queue pair failed, not the stream");
                // The next peer, a process that has just come to the GPU, finds all as before.
                side.qp.modify(&QpAttr::to(QpState::RESET)).unwrap();
            }
            let _peer = start();
            play(&stream, &side);
            assert_clean(&[&side]);
        }
    });
}

/// A stream that waits for the peer alone, and for nothing that can be answered any more.
#[test]
fn a_stream_that_waits_for_a_killed_process_is_released() {
    on_gpu(|bed, _| {
        for (n, place) in places_on(&bed.gpu).enumerate() {
            let side = side(&place);
            let stream = place.stream(PATIENCE);
            let (mut peer, _) = Peer::start("processes::child", &n.to_string(), &side);
            let right = Arc::default();
            ping(&stream, &side, 0, &right).unwrap();
            stream.synchronize(PATIENCE).unwrap();
            side.qp.post_recv(&[RecvWr { wr_id: 77, sges: &[] }]).unwrap();
            let got = stream.wait_recv(&side.qp).unwrap().completion();
            assert!(matches!(stream.synchronize(Duration::from_millis(2)), Err(Error::Deadline { .. })));
            peer.kill();
            let died = Instant::now();
            let error = stream.synchronize(PATIENCE).unwrap_err();
            assert!(died.elapsed() < SLACK, "{:?}", died.elapsed());
            assert!(matches!(error, Error::PeerGone { qpn } if qpn == side.qp.qpn()), "{error}");
            assert!(matches!(got.status(), Err(Error::Completion(c)) if c.wr_id == 77 && c.is_flush()));
            assert_eq!(stream.query().pending, 0);
        }
    });
}
