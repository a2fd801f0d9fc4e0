//! An HCA that nobody runs while its peer acts.

use super::*;
use crate::hca::served::Steps as _;
use crate::mlx5::{self, CQE_SIZE, Cqe, CqeOpcode, SendOp, WqeFlags};
use crate::protocol;

const PATIENCE: Duration = Duration::from_secs(20);

struct Side {
    hca: SoftHca,
    recv_cq: CqParts,
    qp: QpParts,
}

impl Side {
    fn new() -> Self {
        let hca = SoftHca::start(&SoftHcaConfig::default()).unwrap();
        let (send_cq, recv_cq) = (
            hca.create_cq(3, OnGpu::empty(), &Places::default()).unwrap(),
            hca.create_cq(3, OnGpu::empty(), &Places::default()).unwrap(),
        );
        let (send_cqn, recv_cqn, rq_stride) = (send_cq.cqn, recv_cq.cqn, mlx5::recv_stride(1));
        let request = QpRequest {
            pdn: 1,
            send_cqn,
            recv_cqn,
            log_sq: 3,
            log_rq: 3,
            rq_stride,
            max_send_sge: 1,
            max_inline: 64,
        };
        let qp = hca.create_qp(&request, &Places::default()).unwrap();
        Self { hca, recv_cq, qp }
    }

    fn connect(&self, to: &Self) {
        let remote = to.hca.address(to.qp.qpn, to.qp.psn);
        let rtr = QpAttr::to(QpState::RTR).remote(remote).path_mtu(1024).max_dest_rd_atomic(1);
        let rts = QpAttr::to(QpState::RTS).timeout(14).retry_cnt(7).rnr_retry(6).max_rd_atomic(1);
        let init = QpAttr::to(QpState::INIT).access(Access::all());
        for attr in [init, rtr.min_rnr_timer(1), rts] {
            self.hca.modify_qp(self.qp.qpn, &attr, PATIENCE).unwrap();
        }
    }

    /// Posts a SEND of no bytes.
    fn send(&self) {
        let send = SendOp::Send { payload: mlx5::Payload::Sges(&[]), imm: None };
        let wqe = mlx5::encode(&send, self.qp.qpn, 0, WqeFlags::default()).unwrap();
        self.qp.sq.write(0, wqe.as_bytes()).unwrap();
        let record = self.qp.record.atomic32(mlx5::QP_DBREC_SEND).unwrap();
        let doorbell = mlx5::doorbell_word(wqe.first8());
        protocol::ring_doorbell(record, mlx5::send_record(1), || {}, self.qp.doorbell.atomic(), doorbell);
        self.hca.ring(self.qp.qpn);
    }
}

#[test]
fn what_a_peer_sent_before_it_died_arrives() {
    let (a, b) = (Side::new(), Side::new());
    a.connect(&b);
    b.connect(&a);
    a.qp.rq.write(0, &[0; 16]).unwrap();
    let record = a.qp.record.atomic32(mlx5::QP_DBREC_RECV).unwrap();
    record.store(mlx5::recv_record(1), Ordering::Release);
    // Nobody runs this HCA while the peer sends and dies.
    let mut core = a.hca.shared.core.lock();
    a.hca.shared.accept(&mut core);
    b.send();
    let start = Instant::now();
    // Where another thread ran that HCA just now, the send leaves a moment later.
    while b.hca.stats().packets_sent == 0 {
        assert!(start.elapsed() < PATIENCE, "nothing was sent");
        std::thread::yield_now();
    }
    drop(b);
    let link = core.newest_link();
    while !core.is_newly_dead(link) {
        assert!(start.elapsed() < PATIENCE, "nobody noticed");
        std::thread::yield_now();
    }
    // The peer may have made a second link, and that is the one it has used.
    a.hca.shared.accept(&mut core);
    core.tick(Instant::now());
    while core.step(&a.hca.shared.rung) {}
    let mut cqe = [0; CQE_SIZE];
    a.recv_cq.ring.read(0, &mut cqe).unwrap();
    assert_eq!(Cqe::decode(&cqe).opcode, CqeOpcode::RESP_SEND);
}
