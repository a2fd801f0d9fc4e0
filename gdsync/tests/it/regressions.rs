//! Mistakes that were found in review, as a user would have met them.

use std::iter;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::common::{
    PATIENCE, Side, connect, gate, hca, loopback, pair, received, reconnect, sent, stream, until,
};
use gdsync::Error;
use gdsync::hca::FaultPlan;
use gdsync::stream::{Batch, Cond};
use gdsync::verbs::{Access, Completion, QpAttr, QpState, RecvWr, SendWr};

/// Every response behind a lost one used to ask for the whole rest again: the requests piled up at the responder, which
/// then refused one as too many and broke the queue pair.
#[test]
fn long_read_survives_losses() {
    let len = 4 << 20;
    for (seed, rd_atomic) in (0..10).flat_map(|seed| [(seed, 1), (seed, 16)]) {
        let (a, b) = pair(len, |q| q.timeout(11).rd_atomic(rd_atomic));
        b.memory().fill(0, len, 7).unwrap();
        b.context.inject(FaultPlan { seed, drop: 0.02, ..FaultPlan::default() }).unwrap();
        a.qp.post_send(&[SendWr::read(b.mr.remote(0).unwrap(), &[a.mr.sge(0, len).unwrap()])]).unwrap();
        sent(&a).ok().unwrap();
        assert!(a.memory().to_vec().iter().all(|&byte| byte == 7));
        let (lost, again) = (b.context.stats().packets_faulted, a.context.stats().retransmissions);
        assert!(again <= 2 * lost + 8, "seed {seed}: {lost} packets lost, {again} times gone back");
    }
}

/// The acknowledgement of a message that had completed went with its queue pair, and the sender was told that it was lost.
#[test]
fn what_is_complete_is_acknowledged_before_its_queue_pair_goes() {
    let leave: [fn(Side); 3] =
        [|side| side.qp.modify(&QpAttr::to(QpState::RESET)).unwrap(), |side| drop(side.qp), drop];
    for _ in 0..20 {
        for leave in leave {
            let (a, b) = pair(64, |q| q.timeout(10));
            b.qp.post_recv(&[RecvWr::new(&[]).id(1)]).unwrap();
            a.qp.post_send(&[SendWr::send(&[])]).unwrap();
            until(|| b.qp.poll_recv().is_some());
            leave(b);
            sent(&a).ok().unwrap();
        }
    }
}

/// A thread that polled without a pause kept the service thread away, and nobody looked at the links.
#[test]
fn hot_poller_learns_of_the_death_of_its_peer() {
    let (a, b) = pair(64, |q| q);
    a.qp.post_recv(&[RecvWr::new(&[]).id(1)]).unwrap();
    let (is_hot, is_dead) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let poller = scope.spawn(|| {
            let mut end = None;
            while end.is_none_or(|end| Instant::now() < end) {
                if let Some(wc) = a.qp.poll_recv() {
                    return Some(wc);
                }
                is_hot.store(true, Ordering::Relaxed);
                if is_dead.load(Ordering::Relaxed) {
                    end = end.or_else(|| Some(Instant::now() + PATIENCE));
                }
            }
            None
        });
        until(|| is_hot.load(Ordering::Relaxed));
        drop(b);
        is_dead.store(true, Ordering::Relaxed);
        assert!(poller.join().unwrap().expect("it polled in vain").ok().unwrap_err().is_flush());
    });
}

/// The HCA knew that the peer was gone, the library did not: a harmless change of an attribute brought the queue pair
/// back to RTS, and its receives were never flushed again.
#[test]
fn queue_pair_in_error_leaves_it_by_reset_only() {
    let (a, b) = pair(64, |q| q);
    a.qp.post_recv(&[RecvWr::new(&[]).id(1)]).unwrap();
    drop(b);
    let change = QpAttr::to(QpState::RTS).min_rnr_timer(1);
    let mut refused = None;
    until(|| {
        refused = a.qp.modify(&change).err();
        refused.is_some()
    });
    assert!(matches!(refused, Some(Error::Transition { from: QpState::ERR, .. })), "{refused:?}");
    assert!(received(&a).ok().unwrap_err().is_flush());
    let error = a.qp.post_recv(&[RecvWr::new(&[]).id(2)]).unwrap_err();
    assert!(matches!(error, Error::PeerGone { .. }), "{error}");
}

#[test]
fn longest_timeouts_are_no_panic() {
    let s = stream("patient");
    s.synchronize(Duration::MAX).unwrap();
    s.with_timeout(Duration::MAX).submit(&mut Batch::new()).unwrap();
    Batch::new().run(Duration::MAX).unwrap();
    let plan = FaultPlan { delay: (1.0, Duration::MAX), ..FaultPlan::default() };
    assert!(matches!(hca().inject(plan), Err(Error::InvalidArgument { what: "delay", .. })));
}

/// One thread's `synchronize` took the queue pairs of what another thread had submitted meanwhile, whose failure was
/// then reported to nobody.
#[test]
fn what_others_submitted_is_theirs_to_hear_of() {
    let (a, _b) = pair(64, |q| q);
    let s = stream("shared");
    let gate = gate();
    s.wait_value32(&gate, 1, Cond::Geq).unwrap();
    let (other, (tell, told)) = (s.clone(), mpsc::channel());
    let first = std::thread::spawn(move || {
        // SAFETY: no arguments.
        tell.send(unsafe { libc::gettid() }).unwrap();
        other.synchronize(PATIENCE)
    });
    // Asleep, it waits for what has been submitted so far.
    let stat = format!("/proc/self/task/{}/stat", told.recv().unwrap());
    until(|| std::fs::read_to_string(&stat).unwrap().contains(") S "));
    a.qp.post_recv(&[RecvWr::new(&[]).id(1)]).unwrap();
    s.wait_recv(&a.qp).unwrap();
    gate.store(1);
    first.join().unwrap().unwrap();
    a.qp.abort().unwrap();
    assert!(matches!(s.synchronize(PATIENCE), Err(Error::Completion(_))));
}

/// The prepared wait had claimed the completion, so nothing was added to the batch; but it was in no stream either, and
/// the batch ran past a message that had not come.
#[test]
fn what_a_prepared_wait_holds_is_not_taken_for_awaited() {
    let (a, _b) = pair(64, |q| q);
    let completion = a.qp.post_recv(&[RecvWr::new(&[]).id(1)]).unwrap();
    let held = a.qp.prepare_wait_recv().unwrap();
    let mut batch = Batch::new();
    batch.wait(&completion).unwrap();
    let busy = batch.run(PATIENCE).unwrap_err();
    assert!(matches!(&busy, Error::Busy { owner, .. } if owner.contains("prepared wait")), "{busy}");
    // Both in one batch is fine.
    let mut batch = Batch::new();
    batch.post_wait(held);
    batch.wait(&completion).unwrap();
    assert!(matches!(batch.run(Duration::from_millis(10)), Err(Error::Deadline { .. })));
}

/// Both connections began with the same sequence number, so the late message filled the receive of the new one.
#[test]
fn late_packet_of_the_former_connection_is_not_taken() {
    let (a, b) = loopback(64, |q| q);
    let (before, received_before) = (a.qp.address(), a.context.stats().packets_received);
    a.context.inject(FaultPlan { delay: (1.0, Duration::from_millis(100)), ..FaultPlan::default() }).unwrap();
    a.qp.post_send(&[SendWr::send_inline(b"old")]).unwrap();
    // The service thread may be the one that sends it.
    until(|| a.context.stats().packets_faulted > 0);
    a.context.inject(FaultPlan::default()).unwrap();
    reconnect(&a.qp, &b.qp);
    assert_ne!(a.qp.address(), before);
    b.qp.post_recv(&[RecvWr::new(&[b.mr.sge(0, 8).unwrap()]).id(1)]).unwrap();
    until(|| a.context.stats().packets_received > received_before);
    assert_eq!(b.qp.poll_recv(), None);
    a.qp.post_send(&[SendWr::send_inline(b"newer")]).unwrap();
    assert_eq!(received(&b).ok().unwrap().byte_len, 5);
}

/// The stream rang the doorbell of a connection that was gone: the WQE in the ring was sent a second time, and its
/// completion, which nobody had a slot for, left the credits below zero.
#[test]
fn send_that_a_stream_has_left_holds_off_a_reset() {
    let (a, b) = loopback(64, |q| q.max_send_wr(4));
    let s = stream("late");
    let gate = gate();
    s.wait_value32(&gate, 1, Cond::Geq).unwrap();
    let completion = s.send(&a.qp, &SendWr::write_inline(b.mr.remote(0).unwrap(), b"x")).unwrap();
    let busy = a.qp.modify(&QpAttr::to(QpState::RESET)).unwrap_err();
    assert!(matches!(&busy, Error::Busy { queue: "send", owner, .. } if owner.contains("stream")), "{busy}");
    gate.store(1);
    s.synchronize(PATIENCE).unwrap();
    completion.wait(PATIENCE).unwrap();
    reconnect(&a.qp, &b.qp);
    a.qp.post_send(&[SendWr::nop()]).unwrap();
    sent(&a).ok().unwrap();
}

/// Nobody passes the waits of a stream that gave up: the queue pair could never be reset, and its room on a completion
/// queue of the user's was lost.
#[test]
fn queue_pair_of_a_stream_that_gave_up_can_be_used_again() {
    let (a, b) = loopback(64, |q| q.max_send_wr(4).max_recv_wr(4));
    for _ in 0..3 {
        let s = stream("hopeless");
        a.qp.post_recv(&[RecvWr::new(&[]).id(1); 3]).unwrap();
        s.wait_recv(&a.qp).unwrap();
        s.wait_recv(&a.qp).unwrap();
        s.send(&a.qp, &SendWr::send(&[])).unwrap();
        s.wait_send(&a.qp).unwrap();
        s.abort();
        s.synchronize(PATIENCE).unwrap_err();
        reconnect(&a.qp, &b.qp);
        for id in 0..9 {
            a.qp.post_recv(&[RecvWr::new(&[]).id(id)]).unwrap();
            b.qp.post_send(&[SendWr::send(&[]).id(id)]).unwrap();
            assert_eq!([received(&a), sent(&b)].map(|wc| wc.ok().unwrap().wr_id), [id; 2]);
            a.qp.post_send(&[SendWr::nop().id(id)]).unwrap();
            assert_eq!(sent(&a).ok().unwrap().wr_id, id);
        }
    }
}

/// Numbers of requests that a reset swept away are given again: the old handle told of a stranger's success.
#[test]
fn completion_swept_away_by_a_reset_says_so() {
    let (a, b) = loopback(64, |q| q);
    let done = a.qp.post_send(&[SendWr::nop().id(1)]).unwrap();
    done.wait(PATIENCE).unwrap();
    let lost = a.qp.post_send(&[SendWr::send(&[]).id(2)]).unwrap();
    reconnect(&a.qp, &b.qp);
    a.qp.post_send(&[SendWr::nop().id(3)]).unwrap().wait(PATIENCE).unwrap();
    assert!(matches!(lost.status(), Err(Error::Reset { .. })));
    assert!(matches!(Batch::new().wait(&lost), Err(Error::Reset { .. })));
    assert_eq!(done.status().unwrap().unwrap().wr_id, 1);
}

/// What a stream had claimed of a queue pair that was then destroyed was never polled from the next one.
#[test]
fn completion_queue_outlives_the_claims_of_a_stream_that_gave_up() {
    let context = hca();
    let cq = context.create_cq(4).unwrap();
    let (a, b) = connect(Side::new(&context, 64, |q| q.send_cq(&cq)), Side::new(&context, 64, |q| q));
    let s = stream("hopeless");
    let gate = gate();
    s.wait_value32(&gate, 1, Cond::Geq).unwrap();
    for _ in 0..2 {
        s.send(&a.qp, &SendWr::write_inline(b.mr.remote(0).unwrap(), b"x")).unwrap();
    }
    s.wait_send(&a.qp).unwrap();
    s.abort();
    s.synchronize(PATIENCE).unwrap_err();
    drop((a, s));
    let (a, _b) = connect(Side::new(&context, 64, |q| q.send_cq(&cq)), Side::new(&context, 64, |q| q));
    for id in 0..20 {
        a.qp.post_send(&[SendWr::nop().id(id)]).unwrap();
        assert_eq!(cq.wait(PATIENCE).unwrap().ok().unwrap().wr_id, id);
    }
}

/// Between two questions of a wait, whether its request has completed and whether it was taken back, a reset gave the number away:
/// nobody had taken anything back.
#[test]
fn who_waits_is_told_of_a_reset() {
    let (a, _b) = pair(64, |q| q);
    let (ask, asked) = mpsc::channel::<Completion>();
    let (tell, told) = mpsc::channel();
    // So short that it never sleeps.
    let spell = Duration::from_micros(40);
    let waiter = std::thread::spawn(move || {
        for completion in asked {
            tell.send(None).unwrap();
            let is_late = |error: &Error| matches!(error, Error::Deadline { .. });
            let error = iter::repeat_with(|| completion.wait(spell).unwrap_err()).find(|e| !is_late(e));
            tell.send(error).unwrap();
        }
    });
    a.qp.modify(&QpAttr::to(QpState::RESET)).unwrap();
    for _ in 0..2000 {
        a.qp.modify(&QpAttr::to(QpState::INIT).access(Access::empty())).unwrap();
        ask.send(a.qp.post_recv(&[RecvWr::new(&[]).id(1)]).unwrap()).unwrap();
        // It asks all the time from now on.
        assert!(told.recv_timeout(PATIENCE).unwrap().is_none());
        a.qp.modify(&QpAttr::to(QpState::RESET)).unwrap();
        let error = told.recv_timeout(PATIENCE).unwrap();
        assert!(matches!(error, Some(Error::Reset { .. })), "{error:?}");
    }
    drop(ask);
    waiter.join().unwrap();
}
