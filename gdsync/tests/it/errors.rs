//! Bad input to every public call: the right variant, and a message that names cause and fix; and what types refuse.

use std::time::Duration;

use gdsync::Device;
use gdsync::Error;
use gdsync::hca::{FaultPlan, Gid};
use gdsync::memory::Memory;
use gdsync::stream::{HostStreamConfig, Stream};
use gdsync::verbs::{Access, QpAddress, QpAttr, QpBuilder, QpState, RecvWr, SendWr, Sge};

use crate::child::rerun;
use crate::common::{PATIENCE, Side, hca, loopback};

/// The error of a call that must fail, whose message must hold all of `words`.
fn error<T>(result: Result<T, Error>, words: &[&str]) -> Error {
    let Err(error) = result else { panic!("accepted, but expected an error with {words:?}") };
    let text = error.to_string();
    assert!(words.iter().all(|word| text.contains(word)), "'{text}' lacks one of {words:?}");
    error
}

fn invalid<T>(result: Result<T, Error>, words: &[&str]) {
    let error = error(result, words);
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error:?}");
}

fn outside<T>(result: Result<T, Error>) {
    let error = error(result, &["do not fit in a memory of"]);
    assert!(matches!(error, Error::OutOfBounds { .. }), "{error:?}");
}

/// `soft0` would do without it, for who wanted a card.
#[test]
fn library_that_is_named_must_load() {
    const NOWHERE: &str = "/no/such/library.so";
    const ROLE: &str = "GDSYNC_TEST_NAMED";
    let Ok(variable) = std::env::var(ROLE) else {
        for variable in ["GDSYNC_LIBIBVERBS", "GDSYNC_LIBMLX5"] {
            let mut child = rerun("errors::library_that_is_named_must_load");
            child.env(ROLE, variable);
            child.env_remove("GDSYNC_DEVICE").env_remove("GDSYNC_PATH").env(variable, NOWHERE);
            let output = child.output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("1 passed"), "{text}");
        }
        return;
    };
    for name in [None, Some("mlx5_0")] {
        let error = error(Device::find(name), &[NOWHERE, &variable]);
        assert!(matches!(error, Error::Library(_)), "{error}");
    }
    assert!(Device::find(Some("soft0")).unwrap().is_software());
}

/// So that `fn main() -> gdsync::Result<()>` ends with the fix.
#[test]
fn debug_output_is_the_message() {
    let error = Device::find(Some("nope")).unwrap_err();
    let text = format!("{error:?}");
    assert_eq!(text, error.to_string());
    assert!(
        text.starts_with("no RDMA device 'nope'; available: ") && text.contains("name one of these"),
        "{text}"
    );
}

#[test]
fn memory_guards_its_bounds_and_alignment() {
    invalid(Memory::alloc(0), &["memory length is 0", "1 byte"]);
    invalid(Memory::alloc(usize::MAX), &["memory length"]);
    let memory = Memory::alloc(100).unwrap();
    outside(memory.read(100, &mut [0]));
    outside(memory.read(usize::MAX, &mut [0; 2]));
    outside(memory.write(99, &[0; 2]));
    outside(memory.fill(1, 100, 0));
    outside(memory.slice(50, 51));
    outside(memory.copy_from(0, &memory, 60, 41));
    outside(memory.copy_from(60, &memory, 0, 41));
    outside(memory.atomic32(97));
    outside(memory.word64(96));
    for offset in [1, 2, 3, 5] {
        invalid(memory.word32(offset), &["word address", "multiple of the word size"]);
        invalid(memory.word64(offset), &["word address", "multiple of the word size"]);
    }
    invalid(memory.atomic64(4), &["word address"]);
}

#[test]
fn devices_and_keys_are_checked() {
    let missing = error(Device::find(Some("mlx5_9")), &["mlx5_9", "available: ", "soft0"]);
    assert!(matches!(missing, Error::NoDevice { .. }));
    assert_eq!(Device::find(Some("soft0")).ok().as_ref(), Device::list().last());

    let pd = hca().alloc_pd().unwrap();
    let memory = Memory::alloc(100).unwrap();
    for access in [Access::REMOTE_WRITE, Access::REMOTE_ATOMIC, Access::REMOTE_WRITE | Access::REMOTE_READ] {
        invalid(pd.register(&memory, access), &["access", "LOCAL_WRITE"]);
        pd.register(&memory, access | Access::LOCAL_WRITE).unwrap();
    }
    pd.register(&memory, Access::empty()).unwrap();
    let mr = pd.register(&memory, Access::REMOTE_READ).unwrap();
    outside(mr.sge(0, 101));
    outside(mr.sge(101, 0));
    outside(mr.sge(1, usize::MAX));
    outside(mr.remote(101));
    mr.remote(100).unwrap();
}

#[test]
fn sizes_of_queues_are_checked() {
    let context = hca();
    for entries in [0, (1 << 22) + 1, usize::MAX] {
        invalid(context.create_cq(entries), &["completion queue entries", "1 to 4194304"]);
    }
    let pd = context.alloc_pd().unwrap();
    let build = |f: fn(QpBuilder) -> QpBuilder| f(pd.build_qp()).build();
    for (bad, words) in [
        (build(|q| q.max_send_wr(0)), ["max_send_wr", "1 to 32768"]),
        (build(|q| q.max_send_wr(32769)), ["max_send_wr", "1 to 32768"]),
        (build(|q| q.max_recv_wr(0)), ["max_recv_wr", "1 to 32768"]),
        (build(|q| q.max_recv_wr(32769)), ["max_recv_wr", "1 to 32768"]),
        (build(|q| q.max_send_sge(0)), ["max_send_sge", "1 to 30"]),
        (build(|q| q.max_send_sge(31)), ["max_send_sge", "1 to 30"]),
        (build(|q| q.max_recv_sge(0)), ["max_recv_sge", "1 to 32"]),
        (build(|q| q.max_recv_sge(33)), ["max_recv_sge", "1 to 32"]),
        (build(|q| q.max_inline(513)), ["max_inline", "0 to 512"]),
        (build(|q| q.timeout(32)), ["timeout is 32", "at most 31"]),
        (build(|q| q.retry_cnt(8)), ["retry_cnt is 8", "at most 7"]),
        (build(|q| q.rnr_retry(8)), ["rnr_retry is 8", "at most 7"]),
        (build(|q| q.min_rnr_timer(32)), ["min_rnr_timer is 32", "at most 31"]),
        (build(|q| q.path_mtu(100)), ["path_mtu is 100", "256"]),
        (build(|q| q.path_mtu(1000)), ["path_mtu is 1000", "1024"]),
        (build(|q| q.path_mtu(8192)), ["path_mtu is 8192", "4096"]),
        (build(|q| q.rd_atomic(17)), ["rd_atomic is 17", "at most 16"]),
        (build(|q| q.max_send_wr(32768)), ["send queue", "fewer or smaller requests"]),
        (build(|q| q.max_send_wr(5000).max_send_sge(30)), ["send queue", "fewer or smaller requests"]),
    ] {
        invalid(bad, &words);
    }
    build(|q| q.max_send_wr(32768).max_inline(0)).unwrap();
    build(|q| q.max_recv_wr(32768)).unwrap();
    build(|q| q.timeout(31).retry_cnt(7).rnr_retry(7).min_rnr_timer(31).path_mtu(256).rd_atomic(0)).unwrap();
    build(|q| q.max_send_wr(1).max_recv_wr(1).max_recv_sge(32).max_send_sge(30).max_inline(512)).unwrap();
}

#[test]
fn transitions_are_explained() {
    let side = Side::new(&hca(), 100, |q| q);
    let step = |attr: &QpAttr, words: &[&str]| {
        let error = error(side.qp.modify(attr), words);
        assert!(matches!(error, Error::Transition { .. }), "{error:?}");
    };
    let qpn = format!("QP {:#x}", side.qp.qpn());
    step(&QpAttr::to(QpState::RTS), &[&qpn, "from RESET to RTS", "the order is RESET, INIT, RTR, RTS"]);
    step(&QpAttr::to(QpState::INIT), &["access is required"]);
    step(&QpAttr::default(), &["no target state"]);
    side.qp.init().unwrap();
    step(&QpAttr::to(QpState::RTR), &["remote is required"]);
    let rtr = QpAttr::to(QpState::RTR).remote(side.qp.address()).max_dest_rd_atomic(1).min_rnr_timer(1);
    step(&rtr.clone().path_mtu(1500), &["path_mtu is 1500", "1024"]);
    step(&rtr.clone().path_mtu(8192), &["path_mtu is 8192"]);
    step(&rtr.clone().path_mtu(1024).min_rnr_timer(32), &["min_rnr_timer is 32, at most 31"]);
    step(&rtr.clone().path_mtu(1024).retry_cnt(1), &["retry_cnt is not allowed"]);
    assert_eq!(side.qp.state(), QpState::INIT, "a refused step changes nothing");
    let nobody = QpAddress::new(Gid([0xfd; 16]), 0x123, 0);
    for _ in 0..2 {
        let unknown = error(side.qp.connect(nobody), &["fdfd:fdfd"]);
        assert!(matches!(unknown, Error::Peer { .. }), "{unknown:?}");
    }
    side.qp.connect(side.qp.address()).unwrap();
    let again =
        error(side.qp.connect(side.qp.address()), &["from RTS to RTR", "it is connected already; reset it"]);
    assert!(matches!(again, Error::Transition { .. }));
}

#[test]
fn posting_needs_the_right_state() {
    let side = Side::new(&hca(), 100, |q| q);
    let wrong = |result: Result<(), Error>, words: &[&str]| {
        let error = error(result, words);
        assert!(matches!(error, Error::WrongState { .. }), "{error:?}");
    };
    let send = || side.qp.post_send(&[SendWr::nop()]).map(drop);
    let prepare = || side.qp.prepare_send(&[SendWr::nop()]).map(drop);
    let recv = || side.qp.post_recv(&[RecvWr::new(&[])]).map(drop);
    wrong(send(), &["state RESET", "post_send needs RTS (Qp::connect)"]);
    wrong(prepare(), &["state RESET", "needs RTS"]);
    wrong(recv(), &["state RESET", "post_recv needs INIT, RTR or RTS (Qp::init or Qp::connect)"]);
    side.qp.init().unwrap();
    wrong(send(), &["state INIT", "needs RTS"]);
    recv().unwrap();
    side.qp.abort().unwrap();
    wrong(recv(), &["state ERR"]);
    error(side.qp.connect(side.qp.address()), &["from ERR to RTR", "reset it first", "build another"]);
}

#[test]
fn work_requests_that_fit_nowhere_are_refused_and_leave_no_trace() {
    let (a, b) = loopback(4096, |q| q.max_send_wr(1).max_inline(20).max_send_sge(2).max_recv_sge(2));
    let sge = a.mr.sge(0, 1).unwrap();
    let remote = b.mr.remote(0).unwrap();
    let post = |wr: SendWr<'_>| a.qp.post_send(&[wr]).map(drop);
    invalid(a.qp.post_send(&[]), &["sends to post", "at least one"]);
    invalid(a.qp.post_recv(&[]), &["receives to post", "at least one"]);
    invalid(a.qp.prepare_send(&[]), &["sends to prepare", "at least one"]);
    invalid(
        post(SendWr::send_inline(&[0; 21])),
        &["inline data length is 21, where 20 fit", "QpBuilder::max_inline: raise it"],
    );
    invalid(post(SendWr::write_inline(remote, &[0; 21])), &["inline data length is 21", "max_inline"]);
    for sges in [3, 30, 63] {
        invalid(
            post(SendWr::send(&[sge; 63][..sges])),
            &["number of buffers of a send is", "QpBuilder::max_send_sge: raise it"],
        );
    }
    let wqe = |result, words: &[&str]| {
        let error = error(result, words);
        assert!(matches!(error, Error::WorkRequest { .. }), "{error:?}");
    };
    wqe(post(SendWr::read(remote, &[])), &["at least one byte"]);
    wqe(post(SendWr::fetch_add(remote, 1, Sge { len: 7, ..sge })), &["8 bytes, not 7"]);
    wqe(post(SendWr::compare_swap(remote, 1, 1, Sge { len: 16, ..sge })), &["8 bytes, not 16"]);
    wqe(post(SendWr::send(&[Sge { len: (1 << 30) + 1, ..sge }])), &["too long", "split it"]);
    wqe(post(SendWr::send(&[Sge { len: 1 << 30, ..sge }; 2])), &["too long", "split it"]);
    invalid(
        a.qp.post_recv(&[RecvWr::new(&[sge; 3])]),
        &["number of buffers of a receive is 3, where 2 fit", "QpBuilder::max_recv_sge: raise it"],
    );
    // Nothing of all that was posted, and the one block of the ring is free.
    for id in 0..3 {
        a.qp.post_send(&[SendWr::nop().id(id)]).unwrap();
        assert_eq!(a.qp.send_cq().wait(PATIENCE).unwrap().ok().unwrap().wr_id, id);
    }
}

#[test]
fn fault_plans_and_stream_configurations_are_checked() {
    let context = hca();
    for (plan, what) in [
        (FaultPlan { drop: 1.1, ..FaultPlan::default() }, "drop probability"),
        (FaultPlan { duplicate: -0.1, ..FaultPlan::default() }, "duplicate probability"),
        (FaultPlan { reorder: f64::NAN, ..FaultPlan::default() }, "reorder probability"),
        (FaultPlan { delay: (2.0, Duration::ZERO), ..FaultPlan::default() }, "delay probability"),
    ] {
        invalid(context.inject(plan), &[what, "0 to 1"]);
    }
    invalid("drop".parse::<FaultPlan>(), &["fault", "drop=P"]);
    let host = |f: fn(&mut HostStreamConfig)| {
        let mut config = HostStreamConfig::default();
        f(&mut config);
        Stream::host(config)
    };
    assert!(host(|c| c.name.clear()).is_ok(), "it has its number as its name");
    invalid(host(|c| c.name = "a\0b".into()), &["stream name", "NUL"]);
    invalid(host(|c| c.depth = 0), &["stream depth", "at least 1"]);
    invalid(host(|c| c.wait_limit = Duration::ZERO), &["stream wait limit", "above 0"]);
}

/// Which queue pair, queue and request.
#[test]
fn deadlines_of_the_cpu_say_what_it_waits_for() {
    let (a, b) = loopback(64, |q| q.rnr_retry(7));
    let soon = Duration::from_millis(1);
    let late = |result: Result<(), Error>, words: &[&str]| {
        assert!(matches!(error(result, words), Error::Deadline { after, .. } if after == soon));
    };
    let qpn = a.qp.qpn();
    let nothing = format!("within 1 ms: it waits for receive 0 (not posted) of QP {qpn:#x} to complete; see");
    late(a.qp.recv_cq().wait(soon).map(drop), &["waiting for a completion did not finish", &nothing]);
    let received = a.qp.post_recv(&[RecvWr::new(&[]).id(7)]).unwrap();
    let receive = format!("it waits for receive 0 (wr_id 7) of QP {qpn:#x} to complete");
    late(received.wait(soon).map(drop), &[&receive, "see that the peer lives and sends"]);
    late(a.qp.recv_cq().wait(soon).map(drop), &[&receive]);
    // The peer has posted no receive.
    let sent = a.qp.post_send(&[SendWr::send(&[]).id(8)]).unwrap();
    let send = format!("it waits for send 0 (wr_id 8) of QP {qpn:#x} to complete");
    late(sent.wait(soon).map(drop), &[&send, "see that the peer lives and posts receives"]);
    late(a.qp.wait_all_sends(soon), &["waiting for all sends did not finish within 1 ms: ", &send]);
    drop(b);
}
