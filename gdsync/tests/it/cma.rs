//! Messages from host memory that the receiver reads by cross-memory attach: the same to the application as those that are sent.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::by_reference::{Ask, REFUSED, ok, refusal};
use crate::child::{Peer, meet_parent, role};
use crate::common::{
    Side, assert_clean, bytes, connect, is_device_named, pattern, receive, received, send, sent, until,
};
use gdsync::hca::{CmaPolicy, FaultPlan, SoftHcaConfig};
use gdsync::mlx5::Syndrome;
use gdsync::verbs::{Context, QpAttr, QpBuilder, QpState, SendWr, Transport};

const SIZE: usize = 8 << 20;
/// Several pieces, and some bytes.
const BIG: usize = (2 << 20) + 77;

/// What is sent.
fn data() -> &'static [u8] {
    static DATA: OnceLock<Vec<u8>> = OnceLock::new();
    DATA.get_or_init(|| pattern(SIZE, 1))
}

fn patient(q: QpBuilder) -> QpBuilder {
    q.timeout(14).retry_cnt(7).rnr_retry(7).min_rnr_timer(1).max_recv_sge(3).max_recv_wr(64)
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
    meet_parent(&side);
    println!("ready");
    let sge = [side.mr.sge(0, BIG).unwrap()];
    for id in 0.. {
        side.qp.post_send(&[SendWr::send(&sge).id(id)]).unwrap();
        if sent(&side).syndrome.is_some() {
            break;
        }
    }
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
        assert_clean(&[&a, &b]);
    })
    .join()
    .unwrap();
}
