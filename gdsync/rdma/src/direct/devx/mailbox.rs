//! Firmware commands, made field by field.

use rdma_core_sys::mlx5::ifc::{Field, Opcode, Status, answer, cap, command, cqc, create_cq, create_qp, qpc};

/// Bytes of an answer with at most a number.
pub(super) const ANSWER: usize = command::SHORT;

/// A command.
#[derive(Clone, Debug)]
pub(super) struct Command {
    pub(super) opcode: Opcode,
    bytes: Vec<u8>,
    /// Bytes of the answer.
    pub(super) answer: usize,
    /// Offset of the context in bits.
    context: usize,
}

/// Status and syndrome of an answer.
pub(super) fn status(answer: &[u8]) -> (Status, u32) {
    let status = answer::STATUS.get(answer);
    (Status(u8::try_from(status).expect("8 bits")), answer::SYNDROME.get(answer))
}

impl Command {
    fn new(opcode: Opcode, len: usize, context: usize, answer: usize) -> Self {
        let mut bytes = vec![0; len];
        command::OPCODE.set(&mut bytes, opcode.0.into());
        Self { opcode, bytes, answer, context }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Sets a field of the command.
    fn head(mut self, field: Field, value: u32) -> Self {
        field.set(&mut self.bytes, value);
        self
    }

    /// Sets a 64-bit field of the command.
    fn head64(mut self, field: Field, value: u64) -> Self {
        field.set64(&mut self.bytes, value);
        self
    }

    /// Sets a field of the context.
    pub(super) fn set(self, field: Field, value: u32) -> Self {
        let field = field.inside(self.context);
        self.head(field, value)
    }

    /// Sets a 64-bit field of the context.
    fn set64(self, field: Field, value: u64) -> Self {
        let field = field.inside(self.context);
        self.head64(field, value)
    }

    /// Sets bytes of the context, from a bit on.
    pub(super) fn put(mut self, offset: usize, bytes: &[u8]) -> Self {
        let at = (self.context + offset) / 8;
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        self
    }
}

/// A location in registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) umem: u32,
    /// Offset in bytes.
    pub(super) offset: u64,
}

/// Fields of a completion queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct CqFields {
    pub(super) log_entries: u32,
    pub(super) uar_page: u32,
    pub(super) eqn: u32,
    pub(super) ring: Place,
    pub(super) record: Place,
}

/// CREATE_CQ: 64-byte CQEs, neither compressed nor collapsed, without overrun checks.
pub(super) fn create_cq(fields: &CqFields) -> Command {
    Command::new(Opcode::CREATE_CQ, command::LONG, create_cq::CONTEXT, ANSWER)
        .set(cqc::DBR_UMEM_VALID, 1)
        .set(cqc::OI, 1)
        .set(cqc::DBR_UMEM_ID, fields.record.umem)
        .set(cqc::LOG_CQ_SIZE, fields.log_entries)
        .set(cqc::UAR_PAGE, fields.uar_page)
        .set(cqc::C_EQN, fields.eqn)
        .set64(cqc::DBR_ADDR, fields.record.offset)
        .head64(create_cq::CQ_UMEM_OFFSET, fields.ring.offset)
        .head(create_cq::CQ_UMEM_ID, fields.ring.umem)
        .head(create_cq::CQ_UMEM_VALID, 1)
}

/// Fields of a queue pair.
#[derive(Clone, Copy, Debug)]
pub(super) struct QpFields {
    pub(super) pdn: u32,
    pub(super) send_cqn: u32,
    pub(super) recv_cqn: u32,
    /// Log of the number of 64-byte blocks.
    pub(super) log_sq: u32,
    pub(super) log_rq: u32,
    /// Log of the stride in 16-byte units.
    pub(super) log_rq_stride: u32,
    pub(super) uar_page: u32,
    /// The receive queue, followed by the send queue.
    pub(super) rings: Place,
    pub(super) record: Place,
}

/// CREATE_QP: reliable connected. `cs_req` and `cs_res` stay 0: payload never goes into a CQE.
pub(super) fn create_qp(fields: &QpFields) -> Command {
    Command::new(Opcode::CREATE_QP, command::LONG, create_qp::CONTEXT, ANSWER)
        .set(qpc::PM_STATE, MIGRATED)
        .set(qpc::PD, fields.pdn)
        .set(qpc::LOG_RQ_SIZE, fields.log_rq)
        .set(qpc::LOG_RQ_STRIDE, fields.log_rq_stride)
        .set(qpc::LOG_SQ_SIZE, fields.log_sq)
        .set(qpc::UAR_PAGE, fields.uar_page)
        .set(qpc::CQN_SND, fields.send_cqn)
        .set(qpc::CQN_RCV, fields.recv_cqn)
        .set64(qpc::DBR_ADDR, fields.record.offset)
        .set(qpc::DBR_UMEM_VALID, 1)
        .set(qpc::DBR_UMEM_ID, fields.record.umem)
        .head64(create_qp::WQ_UMEM_OFFSET, fields.rings.offset)
        .head(create_qp::WQ_UMEM_ID, fields.rings.umem)
        .head(create_qp::WQ_UMEM_VALID, 1)
}

/// `pm_state` without path migration.
pub(super) const MIGRATED: u32 = 3;

/// Transition of queue pair `qpn` with a context and `optional` parameter bits.
pub(super) fn step(opcode: Opcode, qpn: u32, optional: u32) -> Command {
    Command::new(opcode, command::LONG, create_qp::CONTEXT, ANSWER)
        .head(command::NUMBER, qpn)
        .head(command::OPT_PARAM_MASK, optional)
}

/// Transition to ERR or RST, without parameters.
pub(super) fn end(opcode: Opcode, qpn: u32) -> Command {
    Command::new(opcode, command::SHORT, 0, ANSWER).head(command::NUMBER, qpn)
}

/// QUERY_QP; [`queried_state`] reads the answer.
pub(super) fn query_qp(qpn: u32) -> Command {
    Command::new(Opcode::QUERY_QP, command::SHORT, 0, command::LONG).head(command::NUMBER, qpn)
}

/// State in the answer of [`query_qp`]: 0 RST, 1 INIT, 2 RTR, 3 RTS, 6 ERR.
pub(super) fn queried_state(answer: &[u8]) -> u32 {
    qpc::STATE.inside(create_qp::CONTEXT).get(answer)
}

/// QUERY_HCA_CAP: current general capabilities.
pub(super) fn query_hca_cap() -> Command {
    Command::new(Opcode::QUERY_HCA_CAP, command::SHORT, 0, cap::ANSWER).head(command::OP_MOD, cap::GENERAL)
}

/// Maximum queue sizes of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    pub(super) log_max_qp: u32,
    pub(super) log_max_cq: u32,
}

impl Limits {
    /// Reads the answer of [`query_hca_cap`].
    pub(super) fn of(answer: &[u8]) -> Self {
        Self { log_max_qp: cap::LOG_MAX_QP_SZ.get(answer), log_max_cq: cap::LOG_MAX_CQ_SZ.get(answer) }
    }
}

/// Number of the created object.
pub(super) fn created(answer: &[u8]) -> u32 {
    answer::NUMBER.get(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nonzero bytes and their offsets.
    fn written(command: &Command) -> Vec<(usize, u8)> {
        command.bytes().iter().copied().enumerate().filter(|&(_, byte)| byte != 0).collect()
    }

    #[test]
    fn create_cq_bytes() {
        let command = create_cq(&CqFields {
            log_entries: 10,
            uar_page: 0x12_3456,
            eqn: 0x9a,
            ring: Place { umem: 0x0b0c_0d0e, offset: 0x1_0000 },
            record: Place { umem: 0x71, offset: 0x1f8 },
        });
        assert_eq!((command.bytes().len(), command.answer), (272, 16));
        let context = 16;
        let expected = [
            (0, 4),
            (context, 0x02),
            (context + 1, 0x02),
            (context + 7, 0x71),
            (context + 12, 10),
            (context + 13, 0x12),
            (context + 14, 0x34),
            (context + 15, 0x56),
            (context + 23, 0x9a),
            (context + 62, 0x01),
            (context + 63, 0xf8),
            (85, 0x01),
            (88, 0x0b),
            (89, 0x0c),
            (90, 0x0d),
            (91, 0x0e),
            (92, 0x80),
        ];
        assert_eq!(written(&command), expected);
    }

    #[test]
    fn create_qp_bytes() {
        let command = create_qp(&QpFields {
            pdn: 0x11_2233,
            send_cqn: 0x44_5566,
            recv_cqn: 0x77_8899,
            log_sq: 9,
            log_rq: 5,
            log_rq_stride: 2,
            uar_page: 0x0a_0b0c,
            rings: Place { umem: 0x21, offset: 0x40 },
            record: Place { umem: 0x22, offset: 0x800 },
        });
        assert_eq!((command.bytes().len(), command.answer), (272, 16));
        let context = 24;
        let expected = [
            (0, 5),
            (context + 2, 0x18),
            (context + 5, 0x11),
            (context + 6, 0x22),
            (context + 7, 0x33),
            (context + 9, 5 << 3 | 2),
            (context + 10, 9 << 3),
            (context + 13, 0x0a),
            (context + 14, 0x0b),
            (context + 15, 0x0c),
            (context + 125, 0x44),
            (context + 126, 0x55),
            (context + 127, 0x66),
            (context + 157, 0x77),
            (context + 158, 0x88),
            (context + 159, 0x99),
            (context + 166, 0x08),
            (context + 208, 0x10),
            (context + 231, 0x22),
            (263, 0x40),
            (267, 0x21),
            (268, 0x80),
        ];
        assert_eq!(written(&command), expected);
    }

    #[test]
    fn commands_without_a_context_are_short() {
        let command = end(Opcode::TO_ERR_QP, 0xab_cdef);
        assert_eq!((command.bytes().len(), command.answer), (16, 16));
        assert_eq!(written(&command), [(0, 5), (1, 7), (9, 0xab), (10, 0xcd), (11, 0xef)]);
        let command = query_qp(3);
        assert_eq!((written(&command), command.answer), (vec![(0, 5), (1, 0x0b), (11, 3)], 272));
        let command = query_hca_cap();
        assert_eq!((written(&command), command.answer), (vec![(0, 1), (7, 1)], 4112));
        let command = step(Opcode::RTS2RTS_QP, 1, 0x40);
        assert_eq!(written(&command), [(0, 5), (1, 5), (11, 1), (19, 0x40)]);
    }

    #[test]
    fn answers_are_read() {
        let mut answer = [0; 4112];
        answer[0] = 0x03;
        answer[4..8].copy_from_slice(&[0x00, 0x3b, 0x29, 0xff]);
        answer[8..12].copy_from_slice(&[0xee, 0x12, 0x34, 0x56]);
        assert_eq!((status(&answer), created(&answer)), ((Status::BAD_PARAM, 0x3b_29ff), 0x12_3456));
        (answer[16 + 0x11], answer[16 + 0x19]) = (15, 22);
        assert_eq!(Limits::of(&answer), Limits { log_max_qp: 15, log_max_cq: 22 });
        answer[24] = 0x6f;
        assert_eq!(queried_state(&answer), 6);
    }
}
