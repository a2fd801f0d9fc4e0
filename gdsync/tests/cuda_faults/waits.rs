//! Waits that nobody satisfies, and queue pairs that are aborted or reset under a stream that waits.

use std::time::{Duration, Instant};

use gdsync::error::Error;
use gdsync::memory::Memory;
use gdsync::mlx5::Syndrome;
use gdsync::stream::{Cond, Stream};
use gdsync::verbs::{Qp, QpAttr, QpBuilder, QpState, RecvWr, SendWr};

use super::bed::on_gpu;
use super::common::{PATIENCE, Side};
use super::matrix::{Rig, matrix};
use super::place::places_on;
use super::repeat::{broke, refuses};

/// How long streams wait in vain.
const LIMIT: Duration = Duration::from_millis(3);
const AT_ONCE: Duration = Duration::ZERO;
const FLUSH: Option<Syndrome> = Some(Syndrome::WR_FLUSH_ERR);

fn patient(q: QpBuilder) -> QpBuilder {
    q.rnr_retry(7).min_rnr_timer(1)
}

pub(crate) fn post_recvs(side: &Side, count: u64) {
    let wrs: Vec<_> = (0..count).map(|i| RecvWr { wr_id: 200 + i, sges: &[] }).collect();
    side.qp.post_recv(&wrs).unwrap();
}

/// The stream failed for a reason, within `deadline`, and took the queue pair with it.
pub(crate) fn stopped(
    rig: &Rig<'_>,
    stream: &Stream,
    qp: &Qp,
    (since, deadline): (Instant, Duration),
    is: impl Fn(&Error) -> bool,
) {
    let error = rig.released(stream, since, deadline).unwrap_err();
    assert!(is(&error), "{error}");
    let text = error.to_string();
    let word = Memory::alloc(4).unwrap().word32(0).unwrap();
    let later = [
        stream.write_value32(&word, 1),
        stream.host_fn(|| {}),
        stream.capture(|_| Ok(())).map(drop),
        stream.synchronize(PATIENCE),
    ];
    later.into_iter().for_each(|refused| assert_eq!(refused.unwrap_err().to_string(), text));
    let root = qp.check().unwrap_err();
    assert!(matches!(&root, Error::QpStopped { reason, .. } if is(reason)), "{root}");
    refuses(stream, qp, &root);
}

/// The queue pair of a stream that failed works again at once, with another stream.
pub(crate) fn starts_again(rig: &Rig<'_>, a: &Side, b: &Side) {
    rig.recover(&rig.stream(), a, b);
}

/// While one thread frees GPU memory, CUDA holds up all others until every stream is done.
#[test]
fn the_driver_is_held_up() {
    on_gpu(|bed, _| {
        for place in places_on(&bed.gpu) {
            let (held, bystander) = (place.stream(LIMIT), place.stream(LIMIT));
            let words = Memory::alloc(16).unwrap();
            let (never, other) = (words.word32(0).unwrap(), words.word32(8).unwrap());
            let api = place.gpu.api();
            let mut addr = 0;
            let current = place.gpu.enter().unwrap();
            // SAFETY: a place for the answer; a context is current.
            unsafe { api.mem_alloc(&mut addr, 1 << 20) }.unwrap();
            drop(current);
            held.wait_value32(&never, 1, Cond::Eq).unwrap();
            std::thread::scope(|scope| {
                // Begins before the watchdog of the stream has looked at it.
                scope.spawn(|| {
                    let _current = place.gpu.enter().unwrap();
                    // SAFETY: allocated above; nothing uses it.
                    unsafe { api.mem_free(addr) }.unwrap();
                });
                scope.spawn(|| {
                    bystander.write_value32(&other, 1).unwrap();
                    bystander.synchronize(PATIENCE).unwrap();
                });
                let error = held.synchronize(PATIENCE).unwrap_err();
                assert!(matches!(error, Error::StreamWait { .. }), "{place:?}: {error}");
            });
        }
    });
}

/// Of waits in a row the first one stands for all: the watchdog knows of the others, too.
#[test]
fn the_last_of_waits_in_a_row() {
    matrix("the last of waits in a row", |rig| {
        let (a, b) = rig.pair(|q| q);
        post_recvs(&a, 3);
        b.qp.post_send(&[SendWr::send(&[]), SendWr::send(&[])]).unwrap();
        b.qp.wait_all_sends(PATIENCE).unwrap();
        let stream = rig.place.stream(LIMIT);
        let since = Instant::now();
        let [first, second, third] = [(); 3].map(|()| stream.wait_recv(&a.qp).unwrap().completion());
        stopped(
            rig,
            &stream,
            &a.qp,
            (since, LIMIT),
            |error| matches!(error, Error::StreamWait { what, .. } if what.contains("receive completion")),
        );
        for (completion, id) in [(first, 200), (second, 201)] {
            assert_eq!(completion.status().unwrap().unwrap().wr_id, id);
        }
        assert!(third.status().is_err());
        starts_again(rig, &a, &b);
    });
}

#[test]
fn a_message_that_is_never_sent() {
    matrix("a message that is never sent", |rig| {
        let (a, b) = rig.pair(|q| q);
        post_recvs(&a, 1);
        let stream = rig.place.stream(LIMIT);
        let behind = SendWr::write_inline(b.mr.remote(0).unwrap(), b"x");
        let since = Instant::now();
        let queued = rig
            .queue(&stream, |batch| {
                let got = batch.wait_recv(&a.qp)?;
                batch.send(&a.qp, &behind)?;
                Ok(vec![got, batch.wait_send(&a.qp)?])
            })
            .unwrap();
        let qpn = format!("QP {:#x}", a.qp.qpn());
        stopped(rig, &stream, &a.qp, (since, LIMIT), |error| {
            matches!(error, Error::StreamWait { what, after, .. }
                if what.contains("receive completion") && what.contains(&qpn) && *after == LIMIT)
        });
        assert!(since.elapsed() >= LIMIT);
        assert!(queued.completions.iter().all(|completion| completion.status().is_err()));
        assert_eq!(b.memory().to_vec()[0], 0, "the send behind the wait never started");
        starts_again(rig, &a, &b);
    });
}

#[test]
fn a_send_that_never_completes() {
    matrix("a send that never completes", |rig| {
        // The peer has no receive, and the sender asks for ever.
        let (a, b) = rig.pair(patient);
        let stream = rig.place.stream(LIMIT);
        let since = Instant::now();
        let queued = rig
            .queue(&stream, |batch| Ok(vec![batch.send(&a.qp, &SendWr::send(&[]))?, batch.wait_send(&a.qp)?]))
            .unwrap();
        stopped(
            rig,
            &stream,
            &a.qp,
            (since, LIMIT),
            |error| matches!(error, Error::StreamWait { what, .. } if what.contains("send completion")),
        );
        assert!(queued.completions.iter().all(|completion| completion.status().is_err()));
        starts_again(rig, &a, &b);
    });
}

#[test]
fn a_word_that_is_never_written() {
    matrix("a word that is never written", |rig| {
        let (a, b) = rig.pair(|q| q);
        let words = Memory::alloc(64).unwrap();
        for wide in [false, true] {
            let stream = rig.place.stream(LIMIT);
            let (narrow, long) = (words.word32(0).unwrap(), words.word64(8).unwrap());
            narrow.store(0);
            long.store(0);
            let since = Instant::now();
            rig.queue(&stream, |batch| {
                match wide {
                    true => batch.wait_value64(&long, 6, Cond::Eq),
                    false => batch.wait_value32(&narrow, 5, Cond::Geq),
                }
                batch.send(&a.qp, &SendWr::write_inline(b.mr.remote(0).unwrap(), b"x"))?;
                Ok(vec![batch.wait_send(&a.qp)?])
            })
            .unwrap();
            let name = if wide { "WAIT64" } else { "WAIT32" };
            stopped(
                rig,
                &stream,
                &a.qp,
                (since, LIMIT),
                |error| matches!(error, Error::StreamWait { what, .. } if what.contains(name)),
            );
            assert_eq!(b.memory().to_vec()[0], 0, "the send behind the wait never started");
            starts_again(rig, &a, &b);
            b.memory().fill(0, 8, 0).unwrap();
        }
    });
}

#[test]
fn a_queue_pair_is_aborted() {
    matrix("an aborted queue pair", |rig| {
        let (a, b) = rig.pair(patient);
        let stream = rig.stream();
        // What the stream has rung.
        let wrs: [_; 3] = std::array::from_fn(|i| SendWr::send(&[]).id(100 + i as u64));
        let abort = || a.qp.abort().unwrap();
        assert_eq!(rig.sends(&stream, &a, &wrs, AT_ONCE, abort), [FLUSH; 3]);
        broke(&a, 100, Syndrome::WR_FLUSH_ERR);
        rig.recover(&stream, &a, &b);
        // What it will ring.
        let gate = Memory::alloc(4).unwrap().word32(0).unwrap();
        stream.wait_value32(&gate, 1, Cond::Eq).unwrap();
        let abort = || {
            a.qp.abort().unwrap();
            gate.store(1);
        };
        assert_eq!(rig.sends(&stream, &a, &wrs, AT_ONCE, abort), [FLUSH; 3]);
        broke(&a, 100, Syndrome::WR_FLUSH_ERR);
        rig.recover(&stream, &a, &b);
        // What it waits for.
        post_recvs(&a, 2);
        let awaited = rig.await_receives(&stream, &a, 2);
        let since = Instant::now();
        a.qp.abort().unwrap();
        assert_eq!(rig.receives(&stream, &a, &awaited, since, AT_ONCE), [FLUSH; 2]);
        broke(&a, 200, Syndrome::WR_FLUSH_ERR);
        rig.recover(&stream, &a, &b);
    });
}

#[test]
fn a_reset_is_refused_while_a_stream_waits() {
    matrix("a reset under a stream", |rig| {
        let (a, b) = rig.pair(|q| q);
        let stream = rig.stream();
        post_recvs(&a, 1);
        let awaited = rig.await_receives(&stream, &a, 1);
        for _ in 0..3 {
            let refused = a.qp.modify(&QpAttr::to(QpState::RESET)).unwrap_err();
            assert!(matches!(refused, Error::Busy { queue: "receive", .. }), "{refused}");
        }
        // It is as if nobody had tried.
        b.qp.post_send(&[SendWr::send(&[])]).unwrap();
        assert_eq!(rig.receives(&stream, &a, &awaited, Instant::now(), AT_ONCE), [None]);
        assert_eq!(b.qp.send_cq().wait(PATIENCE).unwrap().syndrome, None);
        rig.recover(&stream, &a, &b);
    });
}

#[test]
fn a_deadline_of_the_cpu_breaks_nothing() {
    matrix("a deadline of the CPU", |rig| {
        let (a, b) = rig.pair(|q| q);
        let stream = rig.stream();
        post_recvs(&a, 1);
        let awaited = rig.await_receives(&stream, &a, 1);
        assert!(matches!(stream.synchronize(LIMIT), Err(Error::Deadline { after: LIMIT, .. })));
        assert_eq!(stream.query().pending, 1);
        b.qp.post_send(&[SendWr::send(&[])]).unwrap();
        assert_eq!(rig.receives(&stream, &a, &awaited, Instant::now(), AT_ONCE), [None]);
        assert_eq!(b.qp.send_cq().wait(PATIENCE).unwrap().syndrome, None);
        rig.message(&stream, &a, &b, 5);
    });
}
