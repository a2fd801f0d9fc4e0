//! Every error a wire or a peer can cause, end to end: root cause first, flushes in order, states, later calls, recovery.

use std::time::{Duration, Instant};

use crate::common::{
    Side, assert_clean, bytes, counts, loopback, message, pair, received, reconnect, sent, until,
};
use gdsync::Error;
use gdsync::memory::Memory;
use gdsync::mlx5::{Opcode, Syndrome};
use gdsync::verbs::{Access, CompletionError, Mr, QpBuilder, QpState, RecvWr, SendWr, Sge};

const SIZE: usize = 64 << 10;
/// What the peer's queue pair comes to.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Peer {
    Fine,
    Broken,
}

/// A pair on one HCA, and one on two.
fn both(build: impl Fn(QpBuilder) -> QpBuilder + Copy) -> [(Side, Side); 2] {
    [loopback(SIZE, build), pair(SIZE, build)]
}

fn recv(side: &Side, wr_id: u64) {
    side.qp.post_recv(&[RecvWr::new(&[side.mr.sge(1024, 1024).unwrap()]).id(wr_id)]).unwrap();
}

fn completion(error: Error) -> CompletionError {
    match error {
        Error::Completion(error) => error,
        other => panic!("not the error of a completion: {other}"),
    }
}

fn assert_flushed(side: &Side, is_send: bool, ids: &[u64]) {
    for &id in ids {
        let wc = if is_send { sent(side) } else { received(side) };
        let error = wc.ok().unwrap_err();
        assert_eq!((error.wr_id, error.syndrome, error.qpn), (id, Syndrome::WR_FLUSH_ERR, side.qp.qpn()));
        assert!(error.is_flush() && error.to_string().contains("look for the first error"), "{error}");
    }
}

/// A queue pair that its peer broke. Of a card, the error says so; of the software HCA, there is only the flush of what was posted.
fn assert_broken_by_peer(side: &Side, wr_id: u64) {
    if counts(&side.context) {
        return assert_broken(side, Syndrome::WR_FLUSH_ERR, wr_id);
    }
    until(|| matches!(side.qp.check(), Err(Error::Device { .. } | Error::QpStopped { .. })));
    assert_eq!(side.qp.state(), QpState::ERR);
    let text = side.qp.check().unwrap_err().to_string();
    assert!(text.contains(&format!("QP {:#x}", side.qp.qpn())) && text.contains("peer"), "{text}");
}

/// Every later call of a broken queue pair returns this root cause, at once.
fn assert_broken(side: &Side, syndrome: Syndrome, wr_id: u64) {
    assert_eq!(side.qp.state(), QpState::ERR);
    let nop = [SendWr::nop()];
    let results = [
        side.qp.post_send(&nop).map(drop),
        side.qp.post_recv(&[RecvWr::new(&[])]).map(drop),
        side.qp.prepare_send(&nop).map(drop),
        side.qp.check(),
    ];
    for error in results.map(|r| completion(r.unwrap_err())) {
        assert_eq!((error.syndrome, error.wr_id), (syndrome, wr_id));
        let text = error.to_string();
        let names = [
            format!("QP {:#x}", side.qp.qpn()),
            format!("wr_id {wr_id}"),
            syndrome.name().unwrap().into(),
            "vendor code 0x0".into(),
        ];
        assert!(names.iter().all(|name| text.contains(name)), "{text}");
    }
}

fn recover(a: &Side, b: &Side) {
    reconnect(&a.qp, &b.qp);
    message(a, b, 4);
    message(b, a, 5);
}

/// Posts `bad` between good work, with receives on both sides, and looks at everything that comes of it.
fn fails(a: &Side, b: &Side, bad: SendWr<'_>, syndrome: Syndrome, peer: Peer) {
    let before = bytes(b, 0, SIZE);
    [21, 22].into_iter().for_each(|id| recv(a, id));
    [31, 32].into_iter().for_each(|id| recv(b, id));
    let after = [a.mr.sge(8192, 100).unwrap()];
    let wrs = [SendWr::nop().id(11), bad.id(12), SendWr::send(&after).id(13), SendWr::nop().id(14)];
    a.qp.post_send(&wrs).unwrap();
    assert_eq!(sent(a).ok().unwrap().wr_id, 11);
    let error = sent(a).ok().unwrap_err();
    assert_eq!((error.wr_id, error.syndrome), (12, syndrome), "{error}");
    assert_flushed(a, true, &[13, 14]);
    assert_flushed(a, false, &[21, 22]);
    assert_broken(a, syndrome, 12);
    match peer {
        Peer::Fine => {
            assert_eq!((b.qp.poll_recv(), b.qp.state()), (None, QpState::RTS));
            b.qp.check().unwrap();
        }
        Peer::Broken => {
            assert_flushed(b, false, &[31, 32]);
            assert_broken_by_peer(b, 31);
        }
    }
    assert!(bytes(b, 0, SIZE) == before, "a failed request changed the peer's memory");
    recover(a, b);
}

/// `key` with one bit of each byte wrong, and a key of a region that is gone.
fn wrong_keys(side: &Side, key: u32) -> Vec<u32> {
    let dead = side.pd.register(&Memory::alloc(SIZE).unwrap(), Access::all()).unwrap();
    (0..4).map(|byte| key ^ 1 << (8 * byte + 3)).chain([0, dead.rkey()]).collect()
}

fn region(side: &Side, access: Access) -> Mr {
    side.pd.register(&Memory::alloc(SIZE).unwrap(), access).unwrap()
}

/// Local buffers that a request may not use; the last flag: only for writing there.
fn bad_buffers(side: &Side) -> Vec<(Sge, bool)> {
    let good = side.mr.sge(0, 8).unwrap();
    let end = side.mr.sge(SIZE - 8, 8).unwrap();
    let other = side.context.alloc_pd().unwrap().register(side.memory(), Access::all()).unwrap();
    // The region may die with this function: the key is wrong either way, but another domain must be alive to count.
    let keep = Box::leak(Box::new(other));
    let fixed = Box::leak(Box::new(region(side, Access::REMOTE_READ)));
    let mut all: Vec<_> =
        wrong_keys(side, good.lkey).into_iter().map(|lkey| (Sge { lkey, ..good }, false)).collect();
    all.push((keep.sge(0, 8).unwrap(), false));
    all.push((Sge { addr: end.addr + 1, ..end }, false));
    all.push((Sge { addr: good.addr - 1, ..good }, false));
    all.push((Sge { addr: u64::MAX - 3, ..good }, false));
    all.push((fixed.sge(0, 8).unwrap(), true));
    all
}

#[test]
fn buffers_that_must_not_be_used_fail_at_this_side() {
    for (a, b) in &both(|q| q) {
        let remote = b.mr.remote(64).unwrap();
        for (sge, only_write) in bad_buffers(a) {
            let list = [sge];
            let mut wrs = vec![SendWr::read(remote, &list), SendWr::fetch_add(remote, 0, sge)];
            if !only_write {
                wrs.extend([
                    SendWr::send(&list),
                    SendWr::write(remote, &list),
                    SendWr::compare_swap(remote, 1, 2, sge),
                ]);
            }
            for wr in wrs {
                fails(a, b, wr, Syndrome::LOC_PROT_ERR, Peer::Fine);
            }
        }
        assert_clean(&[a, b]);
    }
}

#[test]
fn remote_memory_that_must_not_be_touched_fails_at_both_sides() {
    for (a, b) in &both(|q| q) {
        let local = [a.mr.sge(0, 8).unwrap()];
        let good = b.mr.remote(64).unwrap();
        let end = b.mr.remote(SIZE).unwrap();
        let no_read = region(b, Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        let no_write = region(b, Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC);
        let no_atomic = region(b, Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE);
        let alien = b.context.alloc_pd().unwrap().register(b.memory(), Access::all()).unwrap();
        let mut remotes = vec![];
        for rkey in wrong_keys(b, good.rkey) {
            remotes.push(gdsync::verbs::RemoteAddr { rkey, ..good });
        }
        remotes.push(alien.remote(64).unwrap());
        remotes.push(end);
        remotes.push(gdsync::verbs::RemoteAddr { addr: b.mr.remote(0).unwrap().addr - 8, ..good });
        let reads = remotes.iter().copied().chain([no_read.remote(0).unwrap()]);
        let writes = remotes.iter().copied().chain([no_write.remote(0).unwrap()]);
        let atomics = remotes.iter().copied().chain([no_atomic.remote(0).unwrap()]);
        reads.for_each(|r| fails(a, b, SendWr::read(r, &local), Syndrome::REM_ACCESS_ERR, Peer::Broken));
        for r in writes {
            fails(a, b, SendWr::write(r, &local), Syndrome::REM_ACCESS_ERR, Peer::Broken);
            fails(a, b, SendWr::write_inline(r, b"x").imm(1), Syndrome::REM_ACCESS_ERR, Peer::Broken);
        }
        for r in atomics {
            fails(a, b, SendWr::fetch_add(r, 1, local[0]), Syndrome::REM_ACCESS_ERR, Peer::Broken);
            fails(a, b, SendWr::compare_swap(r, 0, 1, local[0]), Syndrome::REM_ACCESS_ERR, Peer::Broken);
        }
        for offset in 1..8 {
            let r = b.mr.remote(64 + offset).unwrap();
            fails(a, b, SendWr::fetch_add(r, 1, local[0]), Syndrome::REM_INV_REQ_ERR, Peer::Broken);
        }
        assert_clean(&[a, b]);
    }
}

#[test]
fn operations_that_the_queue_pair_does_not_allow_are_invalid_requests() {
    for (a, b) in &both(|q| q.access(Access::empty())) {
        let local = [a.mr.sge(0, 8).unwrap()];
        let remote = b.mr.remote(64).unwrap();
        for wr in [
            SendWr::read(remote, &local),
            SendWr::write(remote, &local),
            SendWr::write(remote, &[]),
            SendWr::fetch_add(remote, 1, local[0]),
            SendWr::compare_swap(remote, 0, 1, local[0]),
        ] {
            fails(a, b, wr, Syndrome::REM_INV_REQ_ERR, Peer::Broken);
        }
        assert_clean(&[a, b]);
    }
}

/// A request that fails on the receive it meets: what the receiver and what the sender sees.
fn fails_on_receive(a: &Side, b: &Side, sges: &[Sge], len: usize, at_b: Syndrome, at_a: Syndrome) {
    b.qp.post_recv(&[RecvWr::new(sges).id(41)]).unwrap();
    recv(b, 42);
    a.qp.post_send(&[SendWr::send(&[a.mr.sge(0, len).unwrap()]).id(51), SendWr::nop().id(52)]).unwrap();
    let error = received(b).ok().unwrap_err();
    assert_eq!((error.wr_id, error.syndrome, error.operation), (41, at_b, None));
    assert!(error.to_string().contains("receive"), "{error}");
    assert_flushed(b, false, &[42]);
    assert_broken(b, at_b, 41);
    let error = sent(a).ok().unwrap_err();
    assert_eq!((error.wr_id, error.syndrome, error.operation), (51, at_a, Some(Opcode::SEND)));
    assert_flushed(a, true, &[52]);
    assert_broken(a, at_a, 51);
    recover(a, b);
}

#[test]
fn receives_that_are_too_short_or_have_bad_buffers_fail_at_both_sides() {
    for (a, b) in &both(|q| q.max_recv_sge(2)) {
        let part = |len| b.mr.sge(0, len).unwrap();
        for (sges, len) in [
            (vec![part(99)], 100),
            (vec![part(50), part(49)], 100),
            (vec![], 1),
            (vec![part(SIZE / 2)], SIZE / 2 + 1),
            (vec![part(100)], SIZE),
        ] {
            fails_on_receive(a, b, &sges, len, Syndrome::LOC_LEN_ERR, Syndrome::REM_INV_REQ_ERR);
        }
        for (sge, _) in bad_buffers(b) {
            fails_on_receive(a, b, &[sge], 8, Syndrome::LOC_PROT_ERR, Syndrome::REM_OP_ERR);
        }
        assert_clean(&[a, b]);
    }
}

/// A queue pair that its peer broke has no completion to tell it, until something is posted.
#[test]
fn receive_posted_after_the_peer_broke_the_queue_pair_is_flushed_at_once() {
    for (a, b) in &both(|q| q) {
        let mut times = Vec::new();
        for _ in 0..3 {
            let nowhere = gdsync::verbs::RemoteAddr { addr: 0, rkey: 1 };
            a.qp.post_send(&[SendWr::write_inline(nowhere, b"x")]).unwrap();
            assert_eq!(sent(a).ok().unwrap_err().syndrome, Syndrome::REM_ACCESS_ERR);
            // Refused where an event has told this side.
            if counts(&b.context) || b.qp.check().is_ok() {
                let start = Instant::now();
                recv(b, 91);
                let mut got = None;
                until(|| {
                    got = b.qp.poll_recv();
                    got.is_some()
                });
                times.push(start.elapsed());
                assert_eq!(got.unwrap().syndrome, Some(Syndrome::WR_FLUSH_ERR));
            }
            assert_broken_by_peer(b, 91);
            recover(a, b);
        }
        // The service thread would find the receive after a second.
        let is_slow = times.iter().min().is_some_and(|&time| time > Duration::from_millis(500));
        assert!(!is_slow, "{times:?}");
        assert_clean(&[a, b]);
    }
}
