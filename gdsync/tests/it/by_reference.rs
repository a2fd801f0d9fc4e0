//! Messages whose payload is left to a copy engine: the same to the application, whatever the engine does.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use gdsync::Error;
use gdsync::hca::{FaultPlan, SoftHcaConfig};
use gdsync::mlx5::Syndrome;
use gdsync::verbs::{Context, QpBuilder, QpState, RecvWr, SendWr, Transport, Wc};

use crate::common::{
    PATIENCE, Side, assert_clean, bytes, connect, pattern, receive, received, reconnect, send, sent, until,
};
use crate::copy_engine::{Engine, Habits};

const SIZE: usize = 1 << 20;
/// Payload that is left to the engine.
const LEAST: usize = 1024;
const BIG: usize = 100_000;

fn patient(q: QpBuilder) -> QpBuilder {
    // Longer than a loaded machine keeps a side waiting.
    q.timeout(16).rnr_retry(7).min_rnr_timer(1).max_recv_sge(3).max_send_sge(2)
}

/// Two connected sides on HCAs of their own, over one engine.
fn pair_from(
    least: usize,
    habits: Habits,
    build: impl Fn(QpBuilder) -> QpBuilder,
) -> (Arc<Engine>, Side, Side) {
    let engine = Engine::start(habits);
    let side = || Side::new(&engine.hca(least), SIZE, &build);
    let (a, b) = connect(side(), side());
    a.memory().write(0, &pattern(SIZE, 1)).unwrap();
    (engine, a, b)
}

fn pair_with(habits: Habits, build: impl Fn(QpBuilder) -> QpBuilder) -> (Arc<Engine>, Side, Side) {
    pair_from(LEAST, habits, build)
}

fn pair() -> (Arc<Engine>, Side, Side) {
    pair_with(Habits::default(), patient)
}

/// The `n`-th of parts of `len` bytes.
fn part(n: u64, len: usize) -> usize {
    usize::try_from(n).unwrap() * len
}

fn begun(engine: &Engine) {
    until(|| engine.begun() > 0);
}

/// `end` returns when the copy that has begun, which is let go here, is over.
fn ends_with_the_copy(engine: &Engine, end: impl FnOnce() + Send + 'static) {
    let (told, tells) = channel();
    let ending = std::thread::spawn(move || {
        end();
        told.send(()).unwrap();
    });
    assert!(tells.recv_timeout(Duration::from_millis(50)).is_err(), "the memory is still written to");
    engine.stick(false);
    tells.recv_timeout(PATIENCE).unwrap();
    ending.join().unwrap();
}

fn transport(a: &Side, len: usize) -> Transport {
    a.qp.transfer_path(&a.mr, len).unwrap().transport()
}

#[test]
fn what_is_left_to_the_engine_can_be_changed() {
    let (engine, a, b) = pair();
    let transports = || [LEAST - 1, LEAST, BIG].map(|len| transport(&a, len));
    assert_eq!(transports(), [Transport::Cpu, Transport::PeerToPeer, Transport::PeerToPeer]);
    for (least, was) in [(usize::MAX, LEAST), (BIG, usize::MAX), (0, BIG)] {
        assert_eq!(a.context.set_by_reference(least), Some(was));
        let before = engine.begun();
        for (id, len) in (0..).zip([LEAST, BIG]) {
            receive(&b, id, 0, len);
            send(&a, id, 0, len);
            ok(&received(&b), id);
            ok(&sent(&a), id);
            let is_left = transport(&a, len) == Transport::PeerToPeer;
            assert_eq!(is_left, least <= len, "{}", a.qp.transfer_path(&a.mr, len).unwrap());
        }
        let left = [LEAST, BIG].iter().filter(|len| least <= **len).count();
        assert_eq!(engine.begun() - before, left as u64, "from {least} bytes on");
    }
    assert!(matches!(a.qp.transfer_path(&b.mr, 8), Err(Error::InvalidArgument { .. })), "of another device");
}

#[test]
fn many_are_under_way_and_complete_in_order() {
    const MESSAGES: u64 = 40;
    let (engine, a, b) =
        pair_with(Habits { seed: 5, shuffles: true, pause: 50, ..Habits::default() }, patient);
    engine.hold(true);
    for id in 0..MESSAGES {
        let at = part(id, 20_000);
        receive(&b, id, at, 20_000);
        send(&a, id, at, 20_000);
    }
    until(|| engine.waiting() == 8);
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(engine.waiting(), 8, "the window");
    engine.hold(false);
    for id in 0..MESSAGES {
        ok(&received(&b), id);
        let at = part(id, 20_000);
        assert!(bytes(&b, at, 20_000) == pattern(SIZE, 1)[at..at + 20_000], "in place when it completes");
        ok(&sent(&a), id);
    }
    assert_eq!(b.context.stats().by_reference, MESSAGES);
    assert_clean(&[&a, &b]);
}

#[test]
fn what_comes_after_a_reference_waits_for_it() {
    let (engine, a, b) = pair();
    engine.hold(true);
    receive(&b, 1, 0, BIG);
    receive(&b, 2, BIG, 10);
    b.memory().write(2 * BIG, &[9; 8]).unwrap();
    send(&a, 1, 0, BIG);
    send(&a, 2, 0, 10);
    let read = [a.mr.sge(BIG, 8).unwrap()];
    a.qp.post_send(&[SendWr::read(b.mr.remote(2 * BIG).unwrap(), &read).id(3)]).unwrap();
    until(|| engine.waiting() == 1);
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!((a.qp.poll_send(), b.qp.poll_recv()), (None, None));
    engine.hold(false);
    for id in [1, 2] {
        ok(&received(&b), id);
    }
    for id in [1, 2, 3] {
        ok(&sent(&a), id);
    }
    assert_eq!(bytes(&a, BIG, 8), [9; 8]);
    assert_clean(&[&a, &b]);
}

#[test]
fn slow_copy_is_no_dead_peer() {
    let hasty = |q: QpBuilder| patient(q).timeout(13).retry_cnt(7);
    let (engine, a, b) = pair_with(Habits::default(), hasty);
    engine.stick(true);
    receive(&b, 1, 0, BIG);
    send(&a, 1, 0, BIG);
    begun(&engine);
    // More often than the retries allow.
    until(|| a.context.stats().retransmissions > 10);
    assert_eq!((a.qp.state(), a.qp.poll_send()), (QpState::RTS, None));
    engine.stick(false);
    ok(&received(&b), 1);
    ok(&sent(&a), 1);
    assert_eq!(engine.done(), 1, "it was copied once");
}

#[test]
fn refusal_of_a_later_message_says_nothing_of_an_earlier_one() {
    for fails in [0, 100] {
        let (engine, a, b) = pair_with(Habits { fails, ..Habits::default() }, patient);
        engine.hold(true);
        receive(&b, 1, 0, BIG);
        send(&a, 1, 0, BIG);
        // There is no receive for this one.
        send(&a, 2, BIG, BIG);
        until(|| b.context.stats().rnr_naks > 0);
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(a.qp.poll_send(), None, "the first is still being copied");
        engine.hold(false);
        ok(&received(&b), 1);
        ok(&sent(&a), 1);
        receive(&b, 2, BIG, BIG);
        ok(&received(&b), 2);
        ok(&sent(&a), 2);
        assert!(bytes(&b, 0, 2 * BIG) == pattern(SIZE, 1)[..2 * BIG]);
    }
}

#[test]
fn refusals_are_those_of_the_bytes() {
    let too_long: Ask = |a, b, len| {
        receive(b, 1, 0, len - 1);
        send(a, 1, 0, len);
    };
    let refused = |least, ask: Ask| {
        let (engine, a, b) = pair_from(least, Habits::default(), patient);
        ask(&a, &b, BIG);
        let refusal = refusal(&a, &b);
        assert_eq!(engine.done(), 0);
        refusal
    };
    for (i, ask) in REFUSED.into_iter().chain([too_long]).enumerate() {
        let (by_reference, as_bytes) = (refused(LEAST, ask), refused(usize::MAX, ask));
        assert_eq!(by_reference, as_bytes, "case {i}");
        assert!(by_reference.sent.syndrome.is_some());
    }
}

#[test]
fn injected_receive_error_comes_in_its_turn() {
    let (engine, a, b) = pair();
    b.context
        .inject(FaultPlan { fail_recv: Some((1, Syndrome::LOC_PROT_ERR)), ..FaultPlan::default() })
        .unwrap();
    engine.hold(true);
    for id in 0..3 {
        receive(&b, id, part(id, BIG), BIG);
        send(&a, id, 0, BIG);
    }
    until(|| engine.waiting() > 0);
    std::thread::sleep(Duration::from_millis(2));
    assert_eq!(b.qp.poll_recv(), None);
    engine.hold(false);
    let came: Vec<_> = (0..3).map(|_| received(&b)).map(|wc| (wc.wr_id, wc.syndrome)).collect();
    assert_eq!(came, [(0, None), (1, Some(Syndrome::LOC_PROT_ERR)), (2, Some(Syndrome::WR_FLUSH_ERR))]);
    let went: Vec<_> = (0..3).map(|_| sent(&a)).map(|wc| (wc.wr_id, wc.syndrome)).collect();
    assert_eq!(went, [(0, None), (1, Some(Syndrome::REM_OP_ERR)), (2, Some(Syndrome::WR_FLUSH_ERR))]);
}

#[test]
fn engine_that_fails_makes_the_bytes_be_sent() {
    for seed in 0..20 {
        let habits = Habits { seed, shuffles: true, pause: 20, fails: 100, ..Habits::default() };
        let (engine, a, b) = pair_with(habits, patient);
        assert_eq!(transport(&a, BIG), Transport::PeerToPeer);
        for id in 0..8 {
            let at = part(id, BIG);
            receive(&b, id, at, BIG);
            send(&a, id, at, BIG);
        }
        for id in 0..8 {
            ok(&received(&b), id);
            ok(&sent(&a), id);
        }
        assert!(bytes(&b, 0, 8 * BIG) == pattern(SIZE, 1)[..8 * BIG]);
        let stats = b.context.stats();
        assert_eq!((stats.by_reference, stats.references_refused, engine.done()), (0, 1, 0));
        assert_eq!(transport(&a, BIG), Transport::Cpu, "it was refused");
        assert_clean(&[&a, &b]);
    }
}

#[test]
fn copy_that_never_ends_fails_the_message() {
    let (engine, copy_limit) = (Engine::start(Habits::default()), Duration::from_secs(1));
    let hca = || Context::soft(&SoftHcaConfig { copy_limit, ..engine.config(LEAST) }).unwrap();
    let (a, b) = connect(Side::new(&hca(), SIZE, patient), Side::new(&hca(), SIZE, patient));
    engine.stick(true);
    receive(&b, 1, 0, BIG);
    send(&a, 1, 0, BIG);
    let start = Instant::now();
    let wc = sent(&a);
    assert_eq!(wc.syndrome, Some(Syndrome::REM_OP_ERR));
    assert!(start.elapsed() >= copy_limit);
    assert_eq!(received(&b).syndrome, Some(Syndrome::COPY_TIMEOUT));
    engine.stick(false);
}

#[test]
fn sender_that_goes_away_in_mid_copy() {
    let (engine, a, b) = pair();
    engine.stick(true);
    receive(&b, 1, 0, BIG);
    receive(&b, 2, 0, BIG);
    send(&a, 1, 0, BIG);
    begun(&engine);
    drop(a);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(b.qp.poll_recv(), None, "the buffer is still written to");
    engine.stick(false);
    for id in [1, 2] {
        let wc = received(&b);
        assert_eq!((wc.wr_id, wc.syndrome), (id, Some(Syndrome::WR_FLUSH_ERR)));
    }
}

#[test]
fn receiver_that_goes_away_in_mid_copy() {
    let (engine, a, b) = pair();
    engine.stick(true);
    receive(&b, 1, 0, BIG);
    send(&a, 1, 0, BIG);
    send(&a, 2, 0, 10);
    begun(&engine);
    ends_with_the_copy(&engine, move || drop(b));
    // The message was in place, but nobody told.
    let wcs: Vec<_> = (0..2).map(|_| sent(&a)).map(|wc| (wc.wr_id, wc.syndrome)).collect();
    assert_eq!(
        wcs[1],
        (2, Some(if wcs[0].1.is_none() { Syndrome::RETRY_EXC_ERR } else { Syndrome::WR_FLUSH_ERR }))
    );
}

#[test]
fn abort_of_the_receiver_flushes_when_the_copy_is_over() {
    let (engine, a, b) = pair();
    engine.stick(true);
    for id in 1..=3 {
        receive(&b, id, part(id, BIG), BIG);
        send(&a, id, 0, BIG);
    }
    begun(&engine);
    b.qp.abort().unwrap();
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(b.qp.poll_recv(), None, "the buffer is still written to");
    engine.stick(false);
    for id in 1..=3 {
        let wc = received(&b);
        assert_eq!((wc.wr_id, wc.syndrome), (id, Some(Syndrome::WR_FLUSH_ERR)));
    }
    assert_eq!(engine.done(), 1, "what had not begun did not begin");
    reconnect(&a.qp, &b.qp);
    receive(&b, 7, 0, BIG);
    send(&a, 7, 0, BIG);
    ok(&received(&b), 7);
    assert!(bytes(&b, 0, BIG) == pattern(SIZE, 1)[..BIG]);
}

#[test]
fn sender_that_aborts_may_change_its_bytes() {
    for round in 0..50 {
        let (engine, a, b) = pair();
        engine.stick(true);
        receive(&b, 1, 0, BIG);
        send(&a, 1, 0, BIG);
        begun(&engine);
        a.qp.abort().unwrap();
        assert_eq!(sent(&a).syndrome, Some(Syndrome::WR_FLUSH_ERR));
        // The application has its buffer back.
        a.memory().fill(0, BIG, round).unwrap();
        engine.stick(false);
        until(|| engine.done() == 1);
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!(b.qp.poll_recv(), None, "the message never was");
        b.qp.abort().unwrap();
        let wc = received(&b);
        assert_eq!((wc.wr_id, wc.syndrome), (1, Some(Syndrome::WR_FLUSH_ERR)));
    }
}

#[test]
fn reset_waits_for_copies_and_forgets_them() {
    for resets_sender in [false, true] {
        let (engine, a, b) = pair();
        engine.stick(true);
        receive(&b, 1, 0, BIG);
        send(&a, 1, 0, BIG);
        begun(&engine);
        if resets_sender {
            // Nothing is copied into its memory: nothing to wait for. The peer takes the references for void.
            a.qp.modify(&gdsync::verbs::QpAttr::to(QpState::RESET)).unwrap();
        }
        let (one, other) = (a.qp.clone(), b.qp.clone());
        ends_with_the_copy(&engine, move || reconnect(&one, &other));
        b.memory().fill(0, SIZE, 0).unwrap();
        receive(&b, 2, BIG, BIG);
        send(&a, 2, 1, BIG);
        ok(&received(&b), 2);
        ok(&sent(&a), 2);
        assert!(bytes(&b, BIG, BIG) == pattern(SIZE, 1)[1..=BIG]);
        assert!(bytes(&b, 0, BIG) == vec![0; BIG], "nothing was written late");
        assert_eq!((a.qp.poll_send(), b.qp.poll_recv()), (None, None));
    }
}

#[test]
fn region_ends_when_the_copy_into_it_is_over() {
    let (engine, a, b) = pair();
    let target = gdsync::memory::Memory::alloc(BIG).unwrap();
    let mr = b.pd.register(&target, gdsync::verbs::Access::all()).unwrap();
    engine.stick(true);
    let sge = [a.mr.sge(0, BIG).unwrap()];
    a.qp.post_send(&[SendWr::write(mr.remote(0).unwrap(), &sge).id(1)]).unwrap();
    begun(&engine);
    ends_with_the_copy(&engine, move || drop(mr));
    ok(&sent(&a), 1);
    assert!(target.to_vec() == pattern(SIZE, 1)[..BIG]);
}

#[test]
fn staged_payload_goes_out_in_chunks() {
    let (engine, a, b) = pair_from(
        usize::MAX,
        Habits { seed: 3, shuffles: true, pause: 100, stages: true, ..Habits::default() },
        patient,
    );
    let data = pattern(SIZE, 1);
    a.memory().write(0, &data).unwrap();
    let (len, chunks) = (700_000, 3);
    receive(&b, 1, 0, SIZE);
    send(&a, 1, 9, len);
    ok(&received(&b), 1);
    ok(&sent(&a), 1);
    assert!(bytes(&b, 0, len) == data[9..9 + len]);
    assert_eq!(engine.done(), chunks);
    // The answer to a READ too; what is small is read at once.
    a.memory().fill(0, SIZE, 0).unwrap();
    for (id, len, more) in [(2, len, chunks), (3, 4096, 0)] {
        let read = [a.mr.sge(5, len).unwrap()];
        let before = engine.done();
        a.qp.post_send(&[SendWr::read(b.mr.remote(0).unwrap(), &read).id(id)]).unwrap();
        ok(&sent(&a), id);
        assert!(bytes(&a, 5, len) == data[9..9 + len]);
        assert_eq!(engine.done(), before + more);
    }
    // Where staging fails the CPU does it.
    let (_engine, a, b) =
        pair_from(usize::MAX, Habits { stages: true, fails: 100, ..Habits::default() }, patient);
    a.memory().write(0, &data).unwrap();
    receive(&b, 1, 0, SIZE);
    send(&a, 1, 9, len);
    ok(&received(&b), 1);
    assert!(bytes(&b, 0, len) == data[9..9 + len]);
    assert_clean(&[&a, &b]);
}

#[test]
fn staging_goes_on_where_streams_and_queues_are_reset() {
    let (engine, a, b) = pair_from(usize::MAX, Habits { stages: true, ..Habits::default() }, patient);
    for round in 0..20 {
        a.memory().write(0, &pattern(SIZE, round)).unwrap();
        engine.hold(true);
        receive(&b, 1, 0, SIZE);
        send(&a, 1, 0, SIZE);
        until(|| engine.waiting() == 2);
        reconnect(&a.qp, &b.qp);
        a.memory().write(0, &pattern(SIZE, round + 1)).unwrap();
        receive(&b, 2, 0, SIZE);
        send(&a, 2, 0, SIZE);
        engine.hold(false);
        ok(&received(&b), 2);
        ok(&sent(&a), 2);
        assert!(bytes(&b, 0, SIZE) == pattern(SIZE, round + 1), "round {round}");
    }
}

pub(crate) fn ok(wc: &Wc, id: u64) {
    assert_eq!((wc.wr_id, wc.syndrome), (id, None), "{wc:?}");
}

/// Posts, between two sides, a message of so many bytes that is refused before any are written.
pub(crate) type Ask = fn(&Side, &Side, usize);

pub(crate) const REFUSED: [Ask; 4] = [
    // The receive names a dead key.
    |a, b, len| {
        let mut sge = b.mr.sge(0, len).unwrap();
        sge.lkey ^= 1;
        b.qp.post_recv(&[RecvWr::new(&[sge]).id(1)]).unwrap();
        send(a, 1, 0, len);
    },
    // The write does.
    |a, b, len| {
        let mut remote = b.mr.remote(0).unwrap();
        remote.rkey ^= 1;
        a.qp.post_send(&[SendWr::write(remote, &[a.mr.sge(0, len).unwrap()]).id(1)]).unwrap();
    },
    // It begins outside of the region.
    |a, b, len| {
        let mut remote = b.mr.remote(0).unwrap();
        remote.addr -= 1;
        a.qp.post_send(&[SendWr::write(remote, &[a.mr.sge(0, len).unwrap()]).id(1)]).unwrap();
    },
    // The sender's key is dead.
    |a, b, len| {
        receive(b, 1, 0, len);
        let mut sge = a.mr.sge(0, len).unwrap();
        sge.lkey ^= 1;
        a.qp.post_send(&[SendWr::send(&[sge]).id(1)]).unwrap();
    },
];

/// What both sides see of what was refused.
#[derive(Debug, PartialEq)]
pub(crate) struct Refusal {
    pub(crate) sent: Wc,
    received: Option<Wc>,
    state: QpState,
}

/// What comes of something that is refused.
pub(crate) fn refusal(a: &Side, b: &Side) -> Refusal {
    let sent = Wc { qpn: 0, ..sent(a) };
    let received = b.qp.recv_cq().wait(Duration::from_millis(200)).ok().map(|wc| Wc { qpn: 0, ..wc });
    Refusal { sent, received, state: a.qp.state() }
}
