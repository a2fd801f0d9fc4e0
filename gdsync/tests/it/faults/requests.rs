//! Work requests that fail: by injection, for what they ask of either side, and because a peer does not answer.

use std::time::{Duration, Instant};

use gdsync::error::Error;
use gdsync::hca::FaultPlan;
use gdsync::memory::Memory;
use gdsync::mlx5::Syndrome;
use gdsync::stream::Cond;
use gdsync::verbs::{Access, QpAttr, QpState, RecvWr, RemoteAddr, SendWr, Sge};

use super::{FLUSH, RETRY, Rig, broke, hasty, lost_its_peer, matrix, messages, patient, post_recvs, writes};
use crate::common::{PATIENCE, Side, connect, gate, hca, stream, until};

const AT_ONCE: Duration = Duration::ZERO;
/// The timers of [`hasty`]: two times 131 us without an answer.
const HASTY: Duration = Duration::from_micros(262);

/// Every syndrome, each at another one of three requests than the one before, with what comes of the three.
fn injected() -> impl Iterator<Item = (Syndrome, usize, [Option<Syndrome>; 3])> {
    let named = (0..=u8::MAX).map(Syndrome).filter(|syndrome| syndrome.name().is_some());
    named.enumerate().map(|(n, syndrome)| {
        let at = n % 3;
        let mut expected = [None, FLUSH, FLUSH];
        expected[..at].fill(None);
        expected[at] = Some(syndrome);
        (syndrome, at, expected)
    })
}

#[test]
fn injected_send_errors() {
    matrix("injected send errors", |rig| {
        let (a, b) = rig.pair(|q| q);
        let stream = rig.stream();
        for (syndrome, at, expected) in injected() {
            rig.a
                .inject(FaultPlan { fail_send: Some((at as u64, syndrome)), ..FaultPlan::default() })
                .unwrap();
            assert_eq!(rig.sends(&stream, &a, &writes(&b), AT_ONCE, || {}), expected);
            broke(&a, 100 + at as u64, syndrome);
            rig.recover(&stream, &a, &b);
        }
    });
}

#[test]
fn injected_receive_errors() {
    matrix("injected receive errors", |rig| {
        let (a, b) = rig.pair(|q| q);
        let (sa, sb) = (rig.stream(), rig.stream());
        for (syndrome, at, expected) in injected() {
            post_recvs(&b, 3, &[]);
            rig.b
                .inject(FaultPlan { fail_recv: Some((at as u64, syndrome)), ..FaultPlan::default() })
                .unwrap();
            let awaited = rig.await_receives(&sb, &b, 3);
            let since = Instant::now();
            let sent = rig.sends(&sa, &a, &messages(), AT_ONCE, || {});
            assert_eq!(sent[at], Some(Syndrome::REM_OP_ERR));
            broke(&a, 100 + at as u64, Syndrome::REM_OP_ERR);
            assert_eq!(rig.receives(&sb, &b, &awaited, since, AT_ONCE), expected);
            broke(&b, 200 + at as u64, syndrome);
            rig.recover(&sa, &a, &b);
        }
    });
}

/// The second of three requests fails at one of the sides.
fn fails(rig: &Rig<'_>, (a, b): &(Side, Side), bad: SendWr<'_>, syndrome: Syndrome) {
    let stream = rig.stream();
    let mut wrs = messages().map(|_| SendWr::nop());
    wrs[1] = bad;
    let wrs: Vec<_> = wrs.into_iter().zip(100..).map(|(wr, id)| wr.id(id)).collect();
    assert_eq!(rig.sends(&stream, a, &wrs, AT_ONCE, || {}), [None, Some(syndrome), FLUSH]);
    broke(a, 101, syndrome);
    rig.recover(&stream, a, b);
}

#[test]
fn memory_that_may_not_be_used() {
    matrix("wrong keys and places", |rig| {
        let pair = rig.pair(|q| q);
        let (a, b) = &pair;
        let local = [a.mr.sge(0, 8).unwrap()];
        let remote = b.mr.remote(64).unwrap();
        let wrong = RemoteAddr { rkey: remote.rkey ^ 0x800, ..remote };
        let beyond = RemoteAddr { addr: remote.addr + (1 << 40), ..remote };
        let odd = RemoteAddr { addr: remote.addr + 1, ..remote };
        let access = Syndrome::REM_ACCESS_ERR;
        fails(rig, &pair, SendWr::write(wrong, &local), access);
        fails(rig, &pair, SendWr::write_inline(beyond, b"x"), access);
        fails(rig, &pair, SendWr::read(wrong, &local), access);
        fails(rig, &pair, SendWr::fetch_add(wrong, 1, local[0]), access);
        fails(rig, &pair, SendWr::compare_swap(odd, 0, 1, local[0]), Syndrome::REM_INV_REQ_ERR);
        let stranger = [Sge { lkey: local[0].lkey ^ 0x800, ..local[0] }];
        fails(rig, &pair, SendWr::send(&stranger), Syndrome::LOC_PROT_ERR);
        fails(rig, &pair, SendWr::read(remote, &stranger), Syndrome::LOC_PROT_ERR);

        let closed = rig.pair(|q| q.access(Access::empty()));
        let remote = closed.1.mr.remote(0).unwrap();
        let stream = rig.stream();
        let sent = rig.sends(&stream, &closed.0, &[SendWr::write_inline(remote, b"x").id(1)], AT_ONCE, || {});
        assert_eq!(sent, [Some(Syndrome::REM_INV_REQ_ERR)]);
        broke(&closed.0, 1, Syndrome::REM_INV_REQ_ERR);
        rig.recover(&stream, &closed.0, &closed.1);
    });
}

#[test]
fn keys_revoked_while_the_stream_is_held() {
    matrix("revoked keys", |rig| {
        let pair = rig.pair(|q| q);
        let (a, b) = &pair;
        let region = |side: &Side| side.pd.register(&Memory::alloc(64).unwrap(), Access::all()).unwrap();
        let gate = gate();
        for (ours, expected) in [(true, Syndrome::LOC_PROT_ERR), (false, Syndrome::REM_ACCESS_ERR)] {
            let stream = rig.stream();
            gate.store(0);
            stream.wait_value32(&gate, 1, Cond::Eq).unwrap();
            let mr = region(if ours { a } else { b });
            let (sge, remote) = match ours {
                true => (mr.sge(0, 8).unwrap(), b.mr.remote(0).unwrap()),
                false => (a.mr.sge(0, 8).unwrap(), mr.remote(0).unwrap()),
            };
            let revoke = || {
                drop(mr);
                gate.store(1);
            };
            let sges = [sge];
            let sent = rig.sends(&stream, a, &[SendWr::write(remote, &sges).id(5)], AT_ONCE, revoke);
            assert_eq!(sent, [Some(expected)]);
            broke(a, 5, expected);
            let root = a.qp.check().unwrap_err();
            assert!(matches!(&root, Error::Completion(e) if e.deregistered == ours), "{root}");
            let names_it = root.to_string().contains("was deregistered while the request was under way");
            assert_eq!(names_it, ours, "{root}");
            rig.recover(&stream, a, b);
        }
    });
}

#[test]
fn receive_whose_region_is_dropped() {
    matrix("a receive without its region", |rig| {
        let (a, b) = rig.pair(|q| q);
        let stream = rig.stream();
        // Behind the first, so that its entry is not at the start of the ring.
        for n in 0..3 {
            let mr = b.pd.register(&Memory::alloc(64).unwrap(), Access::all()).unwrap();
            post_recvs(&b, 1, &[mr.sge(0, 8).unwrap()]);
            if n == 2 {
                drop(mr);
                let sent =
                    rig.sends(&stream, &a, &[SendWr::send(&[a.mr.sge(0, 8).unwrap()]).id(1)], AT_ONCE, || {});
                assert_eq!(sent, [Some(Syndrome::REM_OP_ERR)]);
                let root = b.qp.check().unwrap_err();
                assert!(matches!(&root, Error::Completion(e) if e.deregistered), "{root}");
                let root = a.qp.check().unwrap_err();
                assert!(matches!(&root, Error::Completion(e) if !e.deregistered), "{root}");
            } else {
                a.qp.post_send(&[SendWr::send(&[a.mr.sge(0, 8).unwrap()])]).unwrap();
                for cq in [a.qp.send_cq(), b.qp.recv_cq()] {
                    cq.wait(PATIENCE).unwrap().ok().unwrap();
                }
            }
        }
        rig.recover(&stream, &a, &b);
    });
}

#[test]
fn receives_that_do_not_fit() {
    matrix("receives that do not fit", |rig| {
        let (a, b) = rig.pair(|q| q);
        let (sa, sb) = (rig.stream(), rig.stream());
        let (short, enough) = (b.mr.sge(0, 4).unwrap(), b.mr.sge(0, 5).unwrap());
        let stranger = Sge { lkey: enough.lkey ^ 0x800, ..enough };
        let long = [a.mr.sge(0, 5).unwrap()];
        for (sge, at_b, at_a) in [
            (short, Syndrome::LOC_LEN_ERR, Syndrome::REM_INV_REQ_ERR),
            (stranger, Syndrome::LOC_PROT_ERR, Syndrome::REM_OP_ERR),
        ] {
            post_recvs(&b, 2, &[sge]);
            let awaited = rig.await_receives(&sb, &b, 2);
            let since = Instant::now();
            let sent = rig.sends(&sa, &a, &[SendWr::send(&long).id(100)], AT_ONCE, || {});
            assert_eq!(sent, [Some(at_a)]);
            broke(&a, 100, at_a);
            assert_eq!(rig.receives(&sb, &b, &awaited, since, AT_ONCE), [Some(at_b), FLUSH]);
            broke(&b, 200, at_b);
            rig.recover(&sa, &a, &b);
        }
    });
}

#[test]
fn no_receive_in_time() {
    matrix("no receive in time", |rig| {
        // The acknowledge timeout is long: only the count of RNR retries can end this.
        let (a, b) = rig.pair(|q| q.rnr_retry(2).min_rnr_timer(1));
        let stream = rig.stream();
        let sent = rig.sends(&stream, &a, &messages(), Duration::from_micros(20), || {});
        assert_eq!(sent, [Some(Syndrome::RNR_RETRY_EXC_ERR), FLUSH, FLUSH]);
        broke(&a, 100, Syndrome::RNR_RETRY_EXC_ERR);
        rig.recover(&stream, &a, &b);
    });
}

#[test]
fn receive_posted_late_is_in_time() {
    matrix("a late receive", |rig| {
        let (a, b) = rig.pair(patient);
        let stream = rig.stream();
        let before = rig.b.stats().rnr_naks;
        let late = || {
            until(|| rig.b.stats().rnr_naks > before);
            post_recvs(&b, 1, &[]);
        };
        assert_eq!(rig.sends(&stream, &a, &messages()[..1], AT_ONCE, late), [None]);
        b.qp.recv_cq().wait(PATIENCE).unwrap().ok().unwrap();
        a.qp.check().unwrap();
    });
}

#[test]
fn peer_does_not_answer() {
    matrix("a reset, aborted, destroyed peer", |rig| {
        for end in [QpState::RESET, QpState::ERR] {
            let (a, b) = rig.pair(hasty);
            let stream = rig.stream();
            b.qp.modify(&QpAttr::to(end)).unwrap();
            assert_eq!(rig.sends(&stream, &a, &writes(&b), HASTY, || {}), [RETRY, FLUSH, FLUSH]);
            broke(&a, 100, Syndrome::RETRY_EXC_ERR);
            // The same queue pair, with another peer.
            let other = rig.side(&rig.b, |q| q);
            rig.recover(&stream, &a, &other);
        }
        let (a, b) = rig.pair(hasty);
        let (stream, wrs) = (rig.stream(), writes(&b));
        drop(b);
        assert_eq!(rig.sends(&stream, &a, &wrs, HASTY, || {}), [RETRY, FLUSH, FLUSH]);
        broke(&a, 100, Syndrome::RETRY_EXC_ERR);
        rig.recover(&stream, &a, &rig.side(&rig.b, |q| q));
    });
}

#[test]
fn peer_falls_silent() {
    matrix("a silent peer", |rig| {
        let (a, b) = connect(rig.side(&hca(), hasty), rig.side(&hca(), hasty));
        let stream = rig.stream();
        b.context.inject(FaultPlan { die_after: Some(0), ..FaultPlan::default() }).unwrap();
        assert_eq!(rig.sends(&stream, &a, &writes(&b), HASTY, || {}), [RETRY, FLUSH, FLUSH]);
        broke(&a, 100, Syndrome::RETRY_EXC_ERR);
        assert!(a.context.stats().retransmissions >= 1);
        rig.recover(&stream, &a, &rig.side(&rig.b, patient));
    });
}

#[test]
fn device_of_the_peer_goes_away() {
    matrix("a peer whose device goes away", |rig| {
        // No receive is posted: the sends are under way when the other device ends.
        let (a, b) = connect(rig.side(&hca(), patient), rig.side(&hca(), patient));
        let stream = rig.stream();
        let context = a.context.clone();
        let leave = || {
            until(|| context.stats().wqes == 3);
            drop(b);
        };
        assert_eq!(rig.sends(&stream, &a, &messages(), AT_ONCE, leave), [RETRY, FLUSH, FLUSH]);
        broke(&a, 100, Syndrome::RETRY_EXC_ERR);
        let other = rig.side(&rig.b, patient);
        rig.recover(&stream, &a, &other);

        let (a, b) = connect(rig.side(&hca(), patient), rig.side(&hca(), patient));
        post_recvs(&a, 2, &[]);
        let awaited = rig.await_receives(&stream, &a, 2);
        let since = Instant::now();
        drop(b);
        assert_eq!(rig.receives(&stream, &a, &awaited, since, AT_ONCE), [FLUSH; 2]);
        lost_its_peer(&a);
        rig.recover(&stream, &a, &rig.side(&rig.b, patient));
    });
}

/// Only later calls learn of it.
#[test]
fn peer_that_leaves_fails_no_work_that_was_complete() {
    let (a, b) = connect(Side::new(&hca(), 4096, patient), Side::new(&hca(), 4096, patient));
    b.qp.post_recv(&[RecvWr::new(&[])]).unwrap();
    let s = stream("complete");
    s.send(&a.qp, &SendWr::send(&[])).unwrap();
    s.wait_send(&a.qp).unwrap();
    until(|| s.query().pending == 0);
    drop(b);
    until(|| a.qp.check().is_err());
    s.synchronize(PATIENCE).unwrap();
    lost_its_peer(&a);
}
