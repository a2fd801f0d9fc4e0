//! What fails, a hundred times each: streams drain, errors tell the root cause, nothing is left behind.

mod common;
#[path = "common/repeat.rs"]
mod repeat;

use std::time::{Duration, Instant};

use common::{PATIENCE, Side, hca, stream, stream_with};
use gdsync::error::Error;
use gdsync::hca::FaultPlan;
use gdsync::memory::Memory;
use gdsync::mlx5::Syndrome;
use gdsync::stream::{Batch, Cond};
use gdsync::verbs::{Qp, QpState, SendWr};
use repeat::{
    BOTH, By, FLUSH, RETRY, await_receives, broke, fresh, hasty, lost_its_peer, messages, patient,
    post_recvs, refuses, repeat, sends, writes,
};

/// For sends that wait for a receive, and for waits that nobody satisfies.
const SHORT: Duration = Duration::from_millis(3);

fn syndromes() -> impl Iterator<Item = Syndrome> {
    (0..=u8::MAX).map(Syndrome).filter(|s| s.name().is_some())
}

fn until(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "{what}: not yet");
        std::thread::yield_now();
    }
}

/// Every syndrome on one of three requests, another one each time; `each` gets the three outcomes to expect.
fn inject_everywhere(mut each: impl FnMut(By, &Side, &Side, usize, Syndrome, [Option<Syndrome>; 3])) {
    let mut position = 0;
    repeat(|a, b| {
        for (syndrome, by) in syndromes().flat_map(|s| BOTH.map(|by| (s, by))) {
            let (a, b) = fresh(a, b, |q| q);
            let mut expected = [None, FLUSH, FLUSH];
            expected[..position].fill(None);
            expected[position] = Some(syndrome);
            each(by, &a, &b, position, syndrome, expected);
            // Every combination comes up: the number of pairs is no multiple of three.
            position = (position + 1) % 3;
        }
    });
}

#[test]
fn injected_send_errors() {
    inject_everywhere(|by, a, b, position, syndrome, expected| {
        let plan = FaultPlan { fail_send: Some((position as u64, syndrome)), ..FaultPlan::default() };
        a.context.inject(plan).unwrap();
        assert_eq!(sends(by, a, &writes(b), || {}), expected, "{by:?}");
        broke(a, 100 + position as u64, syndrome);
    });
}

#[test]
fn injected_receive_errors() {
    inject_everywhere(|by, a, b, position, syndrome, expected| {
        post_recvs(b, 3, &[]);
        let plan = FaultPlan { fail_recv: Some((position as u64, syndrome)), ..FaultPlan::default() };
        b.context.inject(plan).unwrap();
        let awaited = await_receives(by, b, 3);
        let sent = sends(by, a, &messages(), || {});
        assert_eq!(sent[position], Some(Syndrome::REM_OP_ERR), "{by:?}");
        broke(a, 100 + position as u64, Syndrome::REM_OP_ERR);
        assert_eq!(awaited.ended(), expected, "{by:?}");
        broke(b, 200 + position as u64, syndrome);
    });
}

#[test]
fn refusals_of_the_peer() {
    repeat(|a, b| {
        for by in BOTH {
            let (a, b) = fresh(a, b, |q| q);
            let mut wrs = writes(&b);
            let mut wrong = b.mr.remote(0).unwrap();
            wrong.rkey ^= 1;
            wrs[1] = SendWr::write_inline(wrong, b"x").id(101);
            assert_eq!(sends(by, &a, &wrs, || {}), [None, Some(Syndrome::REM_ACCESS_ERR), FLUSH]);
            broke(&a, 101, Syndrome::REM_ACCESS_ERR);

            let (a, b) = fresh(&a.context, &b.context, |q| q);
            post_recvs(&b, 1, &[b.mr.sge(0, 4).unwrap()]);
            let awaited = await_receives(by, &b, 1);
            let long = [a.mr.sge(0, 5).unwrap()];
            let outcome = sends(by, &a, &[SendWr::send(&long).id(100)], || {});
            assert_eq!(outcome, [Some(Syndrome::REM_INV_REQ_ERR)]);
            assert_eq!(awaited.ended(), [Some(Syndrome::LOC_LEN_ERR)]);
            broke(&a, 100, Syndrome::REM_INV_REQ_ERR);
            broke(&b, 200, Syndrome::LOC_LEN_ERR);
        }
    });
}

#[test]
fn an_abort_flushes_what_the_stream_has_rung_and_what_it_will_ring() {
    repeat(|a, b| {
        for unrung in 0..=3 {
            let (a, _b) = fresh(a, b, patient);
            let gate = Memory::alloc(4).unwrap().word32(0).unwrap();
            let s = stream("abort");
            let mut batch = Batch::new();
            let mut sent = Vec::new();
            for (i, wr) in messages().iter().enumerate() {
                if i == 3 - unrung {
                    batch.wait_value32(&gate, 1, Cond::Eq);
                }
                sent.push(batch.send(&a.qp, wr).unwrap());
            }
            let waits: Vec<_> = (0..3).map(|_| batch.wait_send(&a.qp).unwrap()).collect();
            s.submit(&mut batch).unwrap();
            a.qp.abort().unwrap();
            assert_eq!(a.qp.state(), QpState::ERR);
            gate.store(1);
            let error = s.synchronize(PATIENCE).unwrap_err();
            assert!(matches!(error, Error::Completion(e) if e.is_flush() && e.wr_id == 100), "{error}");
            for completion in sent.iter().chain(&waits) {
                assert!(matches!(completion.status(), Err(Error::Completion(e)) if e.is_flush()));
            }
            broke(&a, 100, Syndrome::WR_FLUSH_ERR);
        }
    });
}

#[test]
fn an_abort_flushes_what_the_cpu_posted() {
    repeat(|a, b| {
        let (a, _b) = fresh(a, b, patient);
        post_recvs(&a, 2, &[]);
        let awaited = await_receives(By::Cpu, &a, 2);
        assert_eq!(sends(By::Cpu, &a, &messages(), || a.qp.abort().unwrap()), [FLUSH; 3]);
        assert_eq!(awaited.ended(), [FLUSH; 2]);
        broke(&a, 100, Syndrome::WR_FLUSH_ERR);
    });
}

#[test]
fn the_peer_goes_away() {
    repeat(|_, _| {
        for by in BOTH {
            // No receive is posted: the sends are under way when the other HCA ends.
            let (a, b) = fresh(&hca(), &hca(), patient);
            let context = a.context.clone();
            let leave = || {
                until("the sends are under way", || context.stats().wqes == 3);
                drop(b);
            };
            assert_eq!(sends(by, &a, &messages(), leave), [RETRY, FLUSH, FLUSH]);
            broke(&a, 100, Syndrome::RETRY_EXC_ERR);

            let (a, b) = fresh(&hca(), &hca(), patient);
            post_recvs(&a, 2, &[]);
            let awaited = await_receives(by, &a, 2);
            drop(b);
            assert_eq!(awaited.ended(), [FLUSH; 2]);
            lost_its_peer(&a);
        }
    });
}

#[test]
fn the_peer_falls_silent() {
    repeat(|_, _| {
        for by in BOTH {
            let (a, b) = fresh(&hca(), &hca(), hasty);
            b.context.inject(FaultPlan { die_after: Some(0), ..FaultPlan::default() }).unwrap();
            assert_eq!(sends(by, &a, &writes(&b), || {}), [RETRY, FLUSH, FLUSH]);
            broke(&a, 100, Syndrome::RETRY_EXC_ERR);
            assert!(a.context.stats().retransmissions >= 1);
        }
    });
}

#[test]
fn the_peer_destroys_its_queue_pair() {
    repeat(|a, b| {
        for by in BOTH {
            let (a, b) = fresh(a, b, hasty);
            let wrs = writes(&b);
            drop(b);
            assert_eq!(sends(by, &a, &wrs, || {}), [RETRY, FLUSH, FLUSH]);
            broke(&a, 100, Syndrome::RETRY_EXC_ERR);
        }
    });
}

#[test]
fn no_receive_in_time() {
    repeat(|a, b| {
        for by in BOTH {
            // The acknowledge timeout is long: only the count of RNR retries can end this.
            let (a, _b) = fresh(a, b, |q| q.rnr_retry(2).min_rnr_timer(1));
            let expected = [Some(Syndrome::RNR_RETRY_EXC_ERR), FLUSH, FLUSH];
            assert_eq!(sends(by, &a, &messages(), || {}), expected);
            broke(&a, 100, Syndrome::RNR_RETRY_EXC_ERR);
        }
    });
}

/// The stream failed for `reason`, and took the queue pair with it.
fn stopped(s: &gdsync::stream::Stream, qp: &Qp, is: impl Fn(&Error) -> bool) {
    let error = s.synchronize(PATIENCE).unwrap_err();
    assert!(is(&error), "{error}");
    assert_eq!(s.query().pending, 0);
    let text = error.to_string();
    let word = Memory::alloc(4).unwrap().word32(0).unwrap();
    assert_eq!(s.write_value32(&word, 1).unwrap_err().to_string(), text);
    assert_eq!(s.host_fn(|| {}).unwrap_err().to_string(), text);
    let root = qp.check().unwrap_err();
    assert!(matches!(&root, Error::QpStopped { reason, .. } if is(reason)), "{root}");
    refuses(s, qp, &root);
}

#[test]
fn a_receive_that_never_comes_ends_at_the_wait_limit() {
    repeat(|a, b| {
        let (a, b) = fresh(a, b, |q| q);
        let awaited = post_recvs(&a, 1, &[]);
        let s = stream_with("limit", SHORT);
        s.wait_recv(&a.qp).unwrap();
        s.send(&a.qp, &writes(&b)[0]).unwrap();
        let qpn = format!("QP {:#x}", a.qp.qpn());
        stopped(&s, &a.qp, |error| {
            matches!(error, Error::StreamWait { stream, what, after }
                if stream == "limit" && what.contains(&qpn) && *after == SHORT)
        });
        assert!(awaited.status().is_err());
        assert_eq!(b.memory().to_vec()[0], 0, "the send behind the wait never started");
    });
}

#[test]
fn a_user_aborts() {
    repeat(|a, b| {
        let (a, _b) = fresh(a, b, patient);
        post_recvs(&a, 1, &[]);
        let s = stream("abort");
        let sent: Vec<_> = messages().iter().map(|wr| s.send(&a.qp, wr).unwrap().completion()).collect();
        s.wait_recv(&a.qp).unwrap();
        let late = s.clone();
        let waiter = std::thread::spawn(move || late.synchronize(PATIENCE));
        s.abort();
        assert!(matches!(waiter.join().unwrap(), Err(Error::StreamAborted { .. })));
        stopped(&s, &a.qp, |error| matches!(error, Error::StreamAborted { stream } if stream == "abort"));
        assert!(sent.iter().all(|completion| completion.status().is_err()));
    });
}

#[test]
fn dropping_the_stream_aborts_it() {
    repeat(|a, b| {
        let (a, _b) = fresh(a, b, |q| q);
        post_recvs(&a, 1, &[]);
        let s = stream("dropped");
        s.wait_recv(&a.qp).unwrap();
        drop(s);
        let root = a.qp.check().unwrap_err();
        assert!(
            matches!(&root, Error::QpStopped { reason, .. } if matches!(**reason, Error::StreamAborted { .. }))
        );
    });
}

#[test]
fn a_deadline_of_the_cpu_breaks_nothing() {
    repeat(|a, b| {
        let (a, b) = fresh(a, b, patient);
        let s = stream("deadline");
        let sent = s.send(&a.qp, &messages()[0]).unwrap().completion();
        s.wait_send(&a.qp).unwrap();
        assert!(matches!(s.synchronize(SHORT), Err(Error::Deadline { after: SHORT, .. })));
        assert!(matches!(sent.wait(Duration::ZERO), Err(Error::Deadline { .. })));
        assert!(matches!(a.qp.recv_cq().wait(Duration::ZERO), Err(Error::Deadline { .. })));
        post_recvs(&b, 1, &[]);
        s.synchronize(PATIENCE).unwrap();
        assert_eq!(sent.status().unwrap().unwrap().wr_id, 100);
    });
}
