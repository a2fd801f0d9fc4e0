//! Payload in host memory that crosses by cross-memory attach: messages that the receiver reads, and RDMA READs. The same to the
//! application as packets.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::by_reference::{Ask, REFUSED, ok, refusal};
use crate::child::{Peer, meet_parent, role};
use crate::common::{
    PATIENCE, Side, assert_clean, bytes, connect, is_device_named, pattern, receive, received, send, sent,
    until, wrong_key,
};
use gdsync::hca::{CmaPolicy, FaultPlan, SoftHcaConfig};
use gdsync::mlx5::{RemoteAddr, Syndrome};
use gdsync::verbs::{Access, Context, Mr, QpAttr, QpBuilder, QpState, SendWr, Transport};

const SIZE: usize = 8 << 20;
/// Several pieces, and some bytes.
const BIG: usize = (2 << 20) + 77;

/// What is sent.
fn data() -> &'static [u8] {
    static DATA: OnceLock<Vec<u8>> = OnceLock::new();
    DATA.get_or_init(|| pattern(SIZE, 1))
}

fn patient(q: QpBuilder) -> QpBuilder {
    q.timeout(14).retry_cnt(7).rnr_retry(7).min_rnr_timer(1).max_send_sge(3).max_recv_sge(3).max_recv_wr(64)
}

fn hca(cma: CmaPolicy) -> Context {
    Context::soft(&SoftHcaConfig { strict: true, cma, ..SoftHcaConfig::default() }).unwrap()
}

/// Two connected sides on HCAs of their own.
fn pair(cma: CmaPolicy) -> (Side, Side) {
    let side = || Side::new(&hca(cma), SIZE, patient);
    let (a, b) = connect(side(), side());
    a.memory().write(0, data()).unwrap();
    (a, b)
}

/// Not a test of its own: the other process of a test here.
#[test]
fn child() {
    if role().is_none() {
        return;
    }
    let side = Side::new(&hca(CmaPolicy::From(1)), SIZE, patient);
    side.memory().write(0, data()).unwrap();
    let remote = meet_parent(&side);
    println!("ready");
    let sge = [side.mr.sge(0, BIG).unwrap()];
    let wr = match role().as_deref() {
        Some("read") => SendWr::read(remote, &sge),
        Some("flood") => SendWr::send(&sge),
        // Until it is killed.
        _ => loop {
            std::thread::park();
        },
    };
    for id in 0.. {
        // Until the parent leaves.
        let done = side.qp.post_send(&[wr.id(id)]).and_then(|_| side.qp.send_cq().wait(PATIENCE));
        if done.is_err() || done.is_ok_and(|wc| wc.syndrome.is_some()) {
            break;
        }
    }
}

/// Reads `len` bytes of the peer to `to`.
fn read(side: &Side, id: u64, remote: RemoteAddr, to: usize, len: usize) {
    side.qp.post_send(&[SendWr::read(remote, &[side.mr.sge(to, len).unwrap()]).id(id)]).unwrap();
}

#[test]
fn reads_of_64_kib_and_more_are_copied_by_the_reader() {
    const LEAST: usize = 64 << 10;
    let (a, b) = pair(CmaPolicy::default());
    for (id, len) in (0..).zip([LEAST - 1, LEAST, BIG]) {
        read(&b, id, a.mr.remote(3).unwrap(), 0, len);
        ok(&sent(&b), id);
        assert!(bytes(&b, 0, len) == data()[3..3 + len]);
    }
    assert_eq!((a.context.stats().by_cma, b.context.stats().by_cma), (0, 2));
    assert_clean(&[&a, &b]);
}

#[test]
fn reads_of_any_alignment_bring_their_bytes_and_no_more() {
    let (a, b) = pair(CmaPolicy::From(1));
    let (mut expected, mut id) = (vec![0; SIZE], 0);
    for from in 0..8 {
        for to in 0..8 {
            for sizes in [&[1 + from][..], &[4097 + to, 0, 70_001], &[BIG, 3]] {
                let (mut at, mut begin, mut sges) = (from, to, Vec::new());
                for &size in sizes {
                    sges.push(b.mr.sge(begin, size).unwrap());
                    expected[begin..begin + size].copy_from_slice(&data()[at..at + size]);
                    // With a gap.
                    (at, begin) = (at + size, begin + size + 5);
                }
                b.qp.post_send(&[SendWr::read(a.mr.remote(from).unwrap(), &sges).id(id)]).unwrap();
                ok(&sent(&b), id);
                id += 1;
            }
        }
        assert!(bytes(&b, 0, SIZE) == expected, "from {from}");
    }
    assert_eq!(b.context.stats().by_cma, id);
}

/// Short ones are copied while long ones are, and atomics come between: in order all the same.
#[test]
fn reads_to_the_same_bytes_are_done_in_order() {
    let (a, b) = pair(CmaPolicy::From(1000));
    for round in 0..20 {
        let lens = [BIG, 70_000, 999, BIG / 2, 1001, 8];
        for (i, len) in lens.into_iter().enumerate() {
            read(&b, i as u64, a.mr.remote(i + round).unwrap(), 0, len);
        }
        (0..6).for_each(|id| ok(&sent(&b), id));
        let mut expected = vec![0; BIG];
        for (id, len) in lens.into_iter().enumerate() {
            expected[..len].copy_from_slice(&data()[id + round..id + round + len]);
        }
        assert!(bytes(&b, 0, BIG) == expected, "round {round}");
    }
}

#[test]
fn refusals_of_reads_are_those_of_the_bytes() {
    const NOT_READ: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_ATOMIC);
    let asks: [Ask; 6] = [
        |a, b, len| read(a, 1, wrong_key(b), 0, len),
        |a, b, len| {
            let remote = b.mr.remote(0).unwrap();
            read(a, 1, RemoteAddr { addr: remote.addr - 1, ..remote }, 0, len);
        },
        |a, b, len| read(a, 1, b.mr.remote(SIZE - len + 1).unwrap(), 0, len),
        |a, b, len| {
            // Leaked, so that it is registered while it is read.
            let mr = Box::leak(Box::new(b.pd.register(b.memory(), NOT_READ).unwrap()));
            read(a, 1, RemoteAddr { rkey: mr.rkey(), ..b.mr.remote(0).unwrap() }, 0, len);
        },
        |a, b, len| {
            let pd = b.context.alloc_pd().unwrap();
            let mr = Box::leak(Box::new(pd.register(b.memory(), Access::all()).unwrap()));
            read(a, 1, RemoteAddr { rkey: mr.rkey(), ..b.mr.remote(0).unwrap() }, 0, len);
        },
        // The key of the reader's own memory is dead.
        |a, b, len| {
            let mut sge = a.mr.sge(0, len).unwrap();
            sge.lkey ^= 1;
            a.qp.post_send(&[SendWr::read(b.mr.remote(0).unwrap(), &[sge]).id(1)]).unwrap();
        },
    ];
    for (i, ask) in asks.into_iter().enumerate() {
        let refused = |cma| {
            let (a, b) = pair(cma);
            ask(&a, &b, BIG);
            let refusal = refusal(&a, &b);
            assert!(bytes(&a, 0, SIZE) == data(), "nothing was written");
            refusal
        };
        let (by_reference, as_bytes) = (refused(CmaPolicy::From(1)), refused(CmaPolicy::Never));
        assert_eq!(by_reference, as_bytes, "case {i}");
        assert!(by_reference.sent.syndrome.is_some());
    }
    // Of the queue pair.
    for cma in [CmaPolicy::From(1), CmaPolicy::Never] {
        let side = |access| Side::new(&hca(cma), SIZE, |q| patient(q).access(access));
        let (a, b) = connect(side(Access::all()), side(NOT_READ));
        read(&a, 1, b.mr.remote(0).unwrap(), 0, BIG);
        assert_eq!(sent(&a).syndrome, Some(Syndrome::REM_INV_REQ_ERR));
    }
}

/// What comes of three READs after which `end` gives the responder its memory back, in the middle of the copies, at another point
/// in each round. Returns how many were completed.
fn reads_until(
    build: fn(QpBuilder) -> QpBuilder,
    end: fn(&Side, Mr) -> Option<Mr>,
    causes: [Syndrome; 2],
) -> usize {
    let mut completed = 0;
    for round in 0..100 {
        let side = || Side::new(&hca(CmaPolicy::From(1)), SIZE, build);
        let (a, b) = connect(side(), side());
        b.memory().write(0, data()).unwrap();
        let lent = b.pd.register(b.memory(), Access::REMOTE_READ).unwrap();
        let place = |id: u64| usize::try_from(id).unwrap() * BIG;
        (0..3).for_each(|id| read(&a, id, lent.remote(7).unwrap(), place(id), BIG));
        let moment = Instant::now() + Duration::from_micros(20 * round);
        until(|| Instant::now() > moment);
        let _kept = end(&b, lent);
        // The application has its buffer back.
        b.memory().fill(0, SIZE, 0xff).unwrap();
        for id in 0..3 {
            let wc = sent(&a);
            assert_eq!(wc.wr_id, id);
            match wc.syndrome {
                None => {
                    completed += 1;
                    assert!(bytes(&a, place(id), BIG) == data()[7..7 + BIG], "round {round}, READ {id}");
                }
                Some(syndrome) => assert!(causes.contains(&syndrome), "{wc:?}"),
            }
        }
    }
    completed
}

#[test]
fn deregistered_memory_is_not_read() {
    let refused = [Syndrome::REM_ACCESS_ERR, Syndrome::WR_FLUSH_ERR];
    let completed = reads_until(patient, |_, _| None, refused);
    assert!(completed < 300, "some were refused");
}

#[test]
fn responder_that_aborts_may_change_its_bytes() {
    let lost = [Syndrome::RETRY_EXC_ERR, Syndrome::WR_FLUSH_ERR];
    let abort = |b: &Side, lent| {
        b.qp.abort().unwrap();
        // It stays registered: only the queue pair ends.
        Some(lent)
    };
    let completed = reads_until(|q| patient(q).timeout(9).retry_cnt(1), abort, lost);
    assert!(completed < 300, "some were lost");
}

#[test]
fn killed_responder_fails_reads() {
    if is_device_named() {
        return;
    }
    for round in 0..20 {
        let side = Side::new(&hca(CmaPolicy::From(1)), SIZE, |q| patient(q).max_send_wr(64));
        let (mut peer, remote) = Peer::start("cma::child", "lend", &side);
        (0..50).for_each(|id| read(&side, id, remote, 0, BIG));
        until(|| side.context.stats().by_cma > 0);
        std::thread::sleep(Duration::from_micros(100 * round));
        peer.kill();
        let done: Vec<_> = (0..50).map(|_| sent(&side)).collect();
        let came = done.iter().take_while(|wc| wc.syndrome.is_none()).count();
        assert!(done[came..].iter().all(|wc| wc.syndrome.is_some()), "{done:?}");
        assert!(done.iter().zip(0..).all(|(wc, id)| wc.wr_id == id), "{done:?}");
        // A READ that failed may have begun.
        assert!(came < 50 || bytes(&side, 0, BIG) == data()[..BIG]);
        until(|| side.qp.check().is_err());
    }
}

/// Only the reader copies: the region goes while it is stopped amidst its READs.
#[test]
fn stopped_reader_holds_nothing_up() {
    if is_device_named() {
        return;
    }
    let side = Side::new(&hca(CmaPolicy::From(1)), SIZE, patient);
    let (peer, _) = Peer::start("cma::child", "read", &side);
    until(|| side.context.stats().packets_sent > 10);
    peer.stop();
    let began = Instant::now();
    drop(side);
    assert!(began.elapsed() < Duration::from_secs(6), "it waits for the stopped, which have 12 s");
    peer.resume();
}

#[test]
fn by_default_64_kib_and_more_are_read() {
    const LEAST: usize = 64 << 10;
    let (a, b) = pair(CmaPolicy::default());
    for (id, len) in (0..).zip([LEAST - 1, LEAST, BIG]) {
        receive(&b, id, 0, len);
        send(&a, id, 0, len);
        ok(&received(&b), id);
        ok(&sent(&a), id);
        assert!(bytes(&b, 0, len) == data()[..len]);
    }
    assert_eq!(b.context.stats().by_cma, 2);
    let path = |len| a.qp.transfer_path(&a.mr, len).unwrap().transport();
    assert_eq!([LEAST - 1, LEAST].map(path), [Transport::Cpu, Transport::Cma]);
}

#[test]
fn refusals_are_those_of_the_bytes() {
    let refused = |cma, ask: Ask| {
        let (a, b) = pair(cma);
        ask(&a, &b, BIG);
        let refusal = refusal(&a, &b);
        assert!(bytes(&b, 0, SIZE).iter().all(|byte| *byte == 0), "nothing was written");
        refusal
    };
    for (i, ask) in REFUSED.into_iter().enumerate() {
        let (read, as_bytes) = (refused(CmaPolicy::From(1), ask), refused(CmaPolicy::Never, ask));
        assert_eq!(read, as_bytes, "case {i}");
        assert!(read.sent.syndrome.is_some());
    }
    // Too long for the receive: of the bytes, some may be written first.
    let (a, b) = pair(CmaPolicy::From(1));
    receive(&b, 1, 0, BIG - 1);
    send(&a, 1, 0, BIG);
    assert_eq!(received(&b).syndrome, Some(Syndrome::LOC_LEN_ERR));
    assert_eq!(sent(&a).syndrome, Some(Syndrome::REM_INV_REQ_ERR));
}

#[test]
fn lossy_network_changes_nothing() {
    let (a, b) = pair(CmaPolicy::From(1));
    let plan = FaultPlan { seed: 5, drop: 0.05, duplicate: 0.1, reorder: 0.1, ..FaultPlan::default() };
    for side in [&a, &b] {
        side.context.inject(plan.clone()).unwrap();
    }
    for id in 0..100 {
        let at = usize::try_from(id).unwrap() * 1000;
        receive(&b, id, at, BIG);
        send(&a, id, at + 3, BIG);
        ok(&received(&b), id);
        ok(&sent(&a), id);
        assert!(bytes(&b, at, BIG) == data()[at + 3..at + 3 + BIG]);
    }
    assert_eq!(b.context.stats().by_cma, 100);
    for id in 0..100 {
        let at = usize::try_from(id).unwrap() * 1000;
        read(&b, id, a.mr.remote(at + 5).unwrap(), at, BIG);
        ok(&sent(&b), id);
        assert!(bytes(&b, at, BIG) == data()[at + 5..at + 5 + BIG]);
    }
    assert!(b.context.stats().by_cma > 100);
}

#[test]
fn sender_that_aborts_may_change_its_bytes() {
    let mut completed = 0;
    for round in 0..100 {
        let (a, b) = pair(CmaPolicy::From(1));
        let place = |id: u64| usize::try_from(id).unwrap() * BIG;
        for id in 0..3 {
            receive(&b, id, place(id), BIG);
            send(&a, id, 0, BIG);
        }
        // In the middle of the copies, at another point each time.
        let end = Instant::now() + Duration::from_micros(20 * round);
        until(|| Instant::now() > end);
        a.qp.abort().unwrap();
        // The application has its buffer back.
        a.memory().fill(0, BIG, 0xff).unwrap();
        std::thread::sleep(Duration::from_millis(1));
        while let Some(wc) = b.qp.poll_recv() {
            ok(&wc, wc.wr_id);
            completed += 1;
            assert!(bytes(&b, place(wc.wr_id), BIG) == data()[..BIG]);
        }
        b.qp.abort().unwrap();
    }
    assert!(completed < 300, "some were taken back");
}

#[test]
fn killed_sender_releases_the_receiver() {
    if is_device_named() {
        return;
    }
    for round in 0..20 {
        let side = Side::new(&hca(CmaPolicy::From(1)), SIZE, patient);
        let (mut peer, _) = Peer::start("cma::child", "flood", &side);
        (0..50).for_each(|id| receive(&side, id, 0, BIG));
        until(|| side.context.stats().by_cma > 0);
        std::thread::sleep(Duration::from_micros(100 * round));
        peer.kill();
        // Each receive completes: by a message that came before the kill, which may be all of them where this thread had no core
        // for a while, or by a flush.
        let done: Vec<_> = (0..50).map(|_| received(&side)).collect();
        let came = done.iter().take_while(|wc| wc.syndrome.is_none()).count();
        assert!(done[came..].iter().all(|wc| wc.syndrome == Some(Syndrome::WR_FLUSH_ERR)), "{done:?}");
        assert!(done.iter().zip(0..).all(|(wc, id)| wc.wr_id == id), "{done:?}");
        assert!(came == 0 || bytes(&side, 0, BIG) == data()[..BIG]);
        until(|| side.qp.check().is_err());
    }
}

/// Nobody but the receiver writes its memory: receives, queue pair and region go while the sender is stopped amidst its messages.
#[test]
fn stopped_sender_holds_nothing_up() {
    if is_device_named() {
        return;
    }
    let side = Side::new(&hca(CmaPolicy::From(1)), SIZE, patient);
    let (peer, _) = Peer::start("cma::child", "flood", &side);
    (0..50).for_each(|id| receive(&side, id, 0, BIG));
    until(|| side.context.stats().by_cma > 0);
    peer.stop();
    side.qp.abort().unwrap();
    let mut last = received(&side);
    while last.syndrome.is_none() {
        assert!(last.wr_id < 49, "it was aborted");
        last = received(&side);
    }
    assert_eq!(last.syndrome, Some(Syndrome::WR_FLUSH_ERR));
    side.qp.modify(&QpAttr::to(QpState::RESET)).unwrap();
    let began = Instant::now();
    drop(side);
    assert!(began.elapsed() < Duration::from_secs(6), "it waits for the stopped, which have 12 s");
    peer.resume();
}

/// From here on the kernel refuses a system call to this thread and those that it starts, as containers do.
fn forbid(call: libc::c_long) {
    let op = |code: u32, jt, jf, k| libc::sock_filter { code: u16::try_from(code).unwrap(), jt, jf, k };
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let call = u32::try_from(call).unwrap();
    let refusal = libc::SECCOMP_RET_ERRNO | u32::try_from(libc::EPERM).unwrap();
    let mut filter = [
        op(load, 0, 0, 0),
        op(equal, 0, 1, call),
        op(libc::BPF_RET, 0, 0, refusal),
        op(libc::BPF_RET, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: 4, filter: filter.as_mut_ptr() };
    // SAFETY: plain numbers.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    // SAFETY: the program is valid for the call.
    let rc = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    assert_eq!(rc, 0);
}

#[test]
fn where_the_kernel_refuses_all_is_sent() {
    std::thread::spawn(|| {
        forbid(libc::SYS_process_vm_readv);
        let (a, b) = pair(CmaPolicy::From(1));
        assert_eq!(a.qp.transfer_path(&a.mr, BIG).unwrap().transport(), Transport::Cma);
        for id in 0..20 {
            receive(&b, id, 0, BIG);
            send(&a, id, 5, BIG);
        }
        for id in 0..20 {
            ok(&received(&b), id);
            ok(&sent(&a), id);
        }
        assert!(bytes(&b, 0, BIG) == data()[5..5 + BIG]);
        let stats = b.context.stats();
        assert_eq!((stats.by_cma, stats.references_refused), (0, 1), "it is asked for once");
        assert_eq!(a.qp.transfer_path(&a.mr, BIG).unwrap().transport(), Transport::Cpu);
        (0..20).for_each(|id| read(&b, id, a.mr.remote(9).unwrap(), 1, BIG));
        (0..20).for_each(|id| ok(&sent(&b), id));
        assert!(bytes(&b, 1, BIG) == data()[9..9 + BIG]);
        let stats = b.context.stats();
        assert_eq!((stats.by_cma, stats.references_refused), (0, 2), "READs ask once more");
        assert_clean(&[&a, &b]);
    })
    .join()
    .unwrap();
}
