//! Tests: doorbells written by something that cannot call the library, as a GPU's stores.
//!
//! With the software HCA, or with the proxy of the device that `GDSYNC_TEST_DEVICE` names.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use crate::common::{PATIENCE, until};
use gdsync_device::memory::Memory;
use gdsync_device::{Access, CqParts, OnGpu, Places, Provider, QpAttr, QpParts, QpRequest, QpState};
use gdsync_rdma::proxy::Proxy;
use gdsync_rdma::{DeviceConfig, Open};
use gdsync_soft::{SoftHca, SoftHcaConfig};
use mlx5_ring::{self as mlx5, BB, CQE_OP_OWN_OFFSET, CQE_SIZE, Cqe, CqeOpcode, SendOp, Syndrome, WqeFlags};

/// Log2 of all rings.
const LOG: u32 = 3;

fn soft() -> SoftHca {
    SoftHca::start(&SoftHcaConfig { strict: true, ..SoftHcaConfig::default() }).unwrap()
}

/// A queue pair connected to itself, driven by hand. Nothing here calls `progress`: only the service thread works.
struct Raw {
    hca: Arc<dyn Provider>,
    qp: QpParts,
    send_cq: CqParts,
    recv_cq: CqParts,
    posted: u64,
}

impl Raw {
    fn new() -> Self {
        Self::over(match std::env::var("GDSYNC_TEST_DEVICE") {
            Ok(name) if !name.is_empty() => {
                let open = Open::device(&name, &DeviceConfig::default()).unwrap();
                Arc::new(Proxy::start(open, true).unwrap())
            }
            _ => Arc::new(soft()),
        })
    }

    fn over(hca: Arc<dyn Provider>) -> Self {
        let (send_cq, recv_cq) = (
            hca.create_cq(LOG, OnGpu::empty(), &Places::default()).unwrap(),
            hca.create_cq(LOG, OnGpu::empty(), &Places::default()).unwrap(),
        );
        let (send_cqn, recv_cqn) = (send_cq.cqn, recv_cq.cqn);
        let rq_stride = mlx5::recv_stride(1);
        let request = QpRequest {
            pdn: hca.alloc_pd().unwrap(),
            send_cqn,
            recv_cqn,
            log_sq: LOG,
            log_rq: LOG,
            rq_stride,
            max_send_sge: 1,
            max_inline: 64,
            qkey: None,
        };
        let qp = hca.create_qp(&request, &Places::default()).unwrap();
        let itself = hca.address(qp.qpn, qp.psn);
        let rtr = QpAttr::to(QpState::RTR).remote(itself).path_mtu(1024);
        let rts = QpAttr::to(QpState::RTS).timeout(14).retry_cnt(7).rnr_retry(6).max_rd_atomic(1);
        for attr in
            [QpAttr::to(QpState::INIT).access(Access::all()), rtr.max_dest_rd_atomic(1).min_rnr_timer(1), rts]
        {
            hca.modify_qp(qp.qpn, &attr, PATIENCE).unwrap();
        }
        Self { hca, qp, send_cq, recv_cq, posted: 0 }
    }

    /// Writes a WQE and its record, but not the doorbell, which is returned.
    fn write_nop(&mut self) -> u64 {
        let wqe = mlx5::encode(&SendOp::Nop, self.qp.qpn, mlx5_ring::low16(self.posted), WqeFlags::default())
            .unwrap();
        assert_eq!(wqe.blocks(), 1);
        let at = usize::try_from(self.posted % (1 << LOG)).unwrap() * BB;
        self.qp.sq.write(at, wqe.as_bytes()).unwrap();
        self.posted += 1;
        let record = self.qp.record.atomic32(mlx5::QP_DBREC_SEND).unwrap();
        record.store(mlx5::send_record(self.posted), Ordering::Release);
        mlx5::doorbell_word(wqe.first8())
    }

    /// Completion `n` of a queue, if it is there.
    fn completion(cq: &CqParts, n: u64) -> Option<Cqe> {
        let at = usize::try_from(n % (1 << LOG)).unwrap() * CQE_SIZE;
        let word = cq.ring.atomic32(at + CQE_OP_OWN_OFFSET).unwrap().load(Ordering::Acquire);
        mlx5::owned_by_software(word, n, LOG).then(|| {
            let mut bytes = [0; CQE_SIZE];
            cq.ring.read(at, &mut bytes).unwrap();
            Cqe::decode(&bytes)
        })
    }

    fn wait(cq: &CqParts, n: u64) -> Cqe {
        let mut found = None;
        until(|| {
            found = Self::completion(cq, n);
            found.is_some()
        });
        found.unwrap()
    }
}

#[test]
fn watched_doorbells_are_found() {
    let mut raw = Raw::new();
    for n in 0..100 {
        let doorbell = raw.write_nop();
        raw.hca.watch(raw.qp.qpn, raw.posted);
        // Later than the service thread looks busily, and sooner.
        thread::sleep(Duration::from_millis(n % 4));
        gdsync_shm::ring_doorbell(
            raw.qp.record.atomic32(mlx5::QP_DBREC_SEND).unwrap(),
            mlx5::send_record(raw.posted),
            || {},
            raw.qp.doorbell.atomic(),
            doorbell,
        );
        assert_eq!(Raw::wait(&raw.send_cq, n).opcode, CqeOpcode::REQ);
    }
    assert_eq!((raw.hca.stats().doorbells, raw.hca.stats().violations), (100, 0));
}

#[test]
fn doorbells_that_nobody_watches_are_found() {
    let mut raw = Raw::new();
    for n in 0..3 {
        let doorbell = raw.write_nop();
        raw.qp.doorbell.store(doorbell);
        assert_eq!(Raw::wait(&raw.send_cq, n).opcode, CqeOpcode::REQ);
    }
    assert_eq!(raw.hca.stats().doorbells, 3);
}

#[test]
fn the_other_form_of_a_doorbell_is_understood() {
    let mut raw = Raw::new();
    raw.write_nop();
    raw.write_nop();
    raw.hca.watch(raw.qp.qpn, raw.posted);
    raw.qp.doorbell.store(mlx5::next_pi_doorbell(raw.qp.qpn, raw.posted));
    assert_eq!([0, 1].map(|n| Raw::wait(&raw.send_cq, n).opcode), [CqeOpcode::REQ; 2]);
}

#[test]
fn a_record_without_a_doorbell_starts_nothing() {
    let mut raw = Raw::new();
    let doorbell = raw.write_nop();
    raw.hca.watch(raw.qp.qpn, raw.posted);
    thread::sleep(Duration::from_millis(250));
    assert_eq!(Raw::completion(&raw.send_cq, 0), None);
    assert_eq!(raw.hca.stats().wqes, 0);
    raw.qp.doorbell.store(doorbell);
    Raw::wait(&raw.send_cq, 0);
}

#[test]
fn a_doorbell_before_its_record_is_an_error_in_strict_mode() {
    let mut raw = Raw::new();
    let doorbell = raw.write_nop();
    raw.qp.record.atomic32(mlx5::QP_DBREC_SEND).unwrap().store(mlx5::send_record(0), Ordering::Release);
    raw.hca.watch(raw.qp.qpn, raw.posted);
    raw.qp.doorbell.store(doorbell);
    until(|| raw.hca.stats().violations > 0);
    assert!(raw.hca.stats().last_violation.unwrap().contains("before its doorbell record"));
    assert_eq!(raw.hca.stats().wqes, 0);
}

#[test]
fn what_is_rung_in_the_error_state_is_flushed() {
    let mut raw = Raw::new();
    raw.hca.modify_qp(raw.qp.qpn, &QpAttr::to(QpState::ERR), PATIENCE).unwrap();
    let flushed = |cqe: Cqe, opcode| assert_eq!((cqe.opcode, cqe.syndrome), (opcode, Syndrome::WR_FLUSH_ERR));
    // As a stream does that was told nothing: with the announcement, and without.
    let doorbell = raw.write_nop();
    raw.hca.watch(raw.qp.qpn, raw.posted);
    raw.qp.doorbell.store(doorbell);
    flushed(Raw::wait(&raw.send_cq, 0), CqeOpcode::REQ_ERR);
    let doorbell = raw.write_nop();
    raw.qp.doorbell.store(doorbell);
    flushed(Raw::wait(&raw.send_cq, 1), CqeOpcode::REQ_ERR);
    // Receives have no doorbell at all.
    let record = raw.qp.record.atomic32(mlx5::QP_DBREC_RECV).unwrap();
    record.store(mlx5::recv_record(1), Ordering::Release);
    flushed(Raw::wait(&raw.recv_cq, 0), CqeOpcode::RESP_ERR);
}

#[test]
fn a_writer_thread_is_never_missed() {
    let mut raw = Raw::new();
    let register = raw.qp.doorbell.clone();
    let word = Memory::alloc(8).unwrap().word64(0).unwrap();
    word.store(mlx5::EMPTY);
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let (mailbox, end) = (word.clone(), stop.clone());
    // Stands for a GPU: it only loads and stores.
    let gpu = thread::spawn(move || {
        while !end.load(Ordering::Acquire) {
            let value = mailbox.atomic().swap(mlx5::EMPTY, Ordering::AcqRel);
            if value == mlx5::EMPTY {
                thread::yield_now();
            } else {
                register.store(value);
            }
        }
    });
    for n in 0..2000 {
        let doorbell = raw.write_nop();
        raw.hca.watch(raw.qp.qpn, raw.posted);
        word.store(doorbell);
        Raw::wait(&raw.send_cq, n);
    }
    stop.store(true, Ordering::Release);
    gpu.join().unwrap();
    assert_eq!(raw.hca.stats().wqes, 2000);
}

#[test]
fn a_reset_ends_the_watch() {
    let hca = Arc::new(soft());
    let raw = Raw::over(hca.clone());
    hca.watch(raw.qp.qpn, 1);
    assert!(hca.is_watching());
    hca.modify_qp(raw.qp.qpn, &QpAttr::to(QpState::RESET), PATIENCE).unwrap();
    assert!(!hca.is_watching(), "what was watched will not be rung");
}

#[test]
fn who_dozes_has_the_next_doorbell_told() {
    let mut raw = Raw::new();
    let doorbell_watch = raw.qp.doorbell_watch.take().unwrap();
    raw.hca.watch(raw.qp.qpn, 1);
    for n in 0..3 {
        until(|| !doorbell_watch.is_watched());
        let doorbell = raw.write_nop();
        // One more than is rung: it goes on watching.
        doorbell_watch.publish(raw.posted + 1);
        if !doorbell_watch.is_watched() {
            raw.hca.watch(raw.qp.qpn, raw.posted + 1);
        }
        raw.qp.doorbell.store(doorbell);
        assert_eq!(Raw::wait(&raw.send_cq, n).opcode, CqeOpcode::REQ);
    }
}

#[test]
fn what_is_withdrawn_is_not_watched_for() {
    let hca = Arc::new(soft());
    let mut raw = Raw::over(hca.clone());
    let doorbell_watch = raw.qp.doorbell_watch.take().unwrap();
    raw.hca.watch(raw.qp.qpn, 1);
    doorbell_watch.withdraw(2, 1);
    thread::sleep(Duration::from_millis(5));
    assert!(hca.is_watching(), "that was another one");
    doorbell_watch.withdraw(1, 0);
    until(|| !hca.is_watching());
}
