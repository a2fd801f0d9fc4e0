//! Layouts of firmware commands. Offsets are in bits, as in `mlx5_ifc.h`.

use rdma_core_sys::mlx5::{devx_get, devx_set, devx_set64};

/// `MLX5_CMD_OP_*`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Opcode {
    QueryHcaCap = 0x100,
    CreateCq = 0x400,
    CreateQp = 0x500,
    Rst2Init = 0x502,
    Init2Rtr = 0x503,
    Rtr2Rts = 0x504,
    Rts2Rts = 0x505,
    ToErr = 0x507,
    ToRst = 0x50a,
    QueryQp = 0x50b,
    Init2Init = 0x50e,
}

impl Opcode {
    /// Name in the manual.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::QueryHcaCap => "QUERY_HCA_CAP",
            Self::CreateCq => "CREATE_CQ",
            Self::CreateQp => "CREATE_QP",
            Self::Rst2Init => "RST2INIT_QP",
            Self::Init2Rtr => "INIT2RTR_QP",
            Self::Rtr2Rts => "RTR2RTS_QP",
            Self::Rts2Rts => "RTS2RTS_QP",
            Self::ToErr => "2ERR_QP",
            Self::ToRst => "2RST_QP",
            Self::QueryQp => "QUERY_QP",
            Self::Init2Init => "INIT2INIT_QP",
        }
    }
}

/// Bytes of a command with a context: 272.
const LONG: usize = 0x880 / 8;
/// Bytes of a command with only a number.
const SHORT: usize = 0x80 / 8;
/// Bytes of an answer with at most a number.
pub(super) const ANSWER: usize = 0x80 / 8;

/// A command.
#[derive(Clone, Debug)]
pub(super) struct Command {
    pub(super) opcode: Opcode,
    bytes: Vec<u8>,
    /// Bytes of the answer.
    pub(super) answer: usize,
    /// Offset of the context in bytes.
    context: usize,
}

/// Status and syndrome of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Status {
    pub(super) status: u32,
    pub(super) syndrome: u32,
}

impl Status {
    pub(super) fn of(answer: &[u8]) -> Self {
        Self { status: devx_get(answer, 0, 8), syndrome: devx_get(answer, 0x20, 32) }
    }

    /// `MLX5_CMD_STAT_*`
    pub(super) fn name(self) -> &'static str {
        match self.status {
            0x00 => "no status of the firmware",
            0x01 => "internal error",
            0x02 => "bad operation",
            0x03 => "bad parameter",
            0x04 => "bad system state",
            0x05 => "bad resource",
            0x06 => "resource busy",
            0x08 => "limit exceeded",
            0x09 => "bad resource state",
            0x0a => "bad index",
            0x0f => "no resources",
            0x10 => "bad QP state",
            0x30 => "bad packet",
            0x40 => "bad size",
            0x50 => "bad input length",
            0x51 => "bad output length",
            _ => "unknown status",
        }
    }
}

impl Command {
    fn new(opcode: Opcode, len: usize, context: usize, answer: usize) -> Self {
        let mut bytes = vec![0; len];
        devx_set(&mut bytes, 0, 16, u32::from(opcode as u16));
        Self { opcode, bytes, answer, context }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Sets a field of the command.
    fn head(mut self, offset: usize, width: u32, value: u32) -> Self {
        devx_set(&mut self.bytes, offset, width, value);
        self
    }

    /// Sets a 64-bit field of the command.
    fn head64(mut self, offset: usize, value: u64) -> Self {
        devx_set64(&mut self.bytes, offset, value);
        self
    }

    /// Sets a field of the context.
    pub(super) fn set(self, offset: usize, width: u32, value: u32) -> Self {
        let at = self.context + offset;
        self.head(at, width, value)
    }

    /// Sets a 64-bit field of the context.
    fn set64(self, offset: usize, value: u64) -> Self {
        let at = self.context + offset;
        self.head64(at, value)
    }

    /// Sets bytes of the context.
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
    Command::new(Opcode::CreateCq, LONG, 0x80, ANSWER)
        .set(0x06, 1, 1) // dbr_umem_valid
        .set(0x0e, 1, 1) // oi
        .set(0x20, 32, fields.record.umem)
        .set(0x63, 5, fields.log_entries)
        .set(0x68, 24, fields.uar_page)
        .set(0xb8, 8, fields.eqn)
        .set64(0x1c0, fields.record.offset)
        .head64(0x280, fields.ring.offset)
        .head(0x2c0, 32, fields.ring.umem)
        .head(0x2e0, 1, 1) // cq_umem_valid
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
    Command::new(Opcode::CreateQp, LONG, 0xc0, ANSWER)
        .set(0x13, 2, MIGRATED)
        .set(0x28, 24, fields.pdn)
        .set(0x49, 4, fields.log_rq)
        .set(0x4d, 3, fields.log_rq_stride)
        .set(0x51, 4, fields.log_sq)
        .set(0x68, 24, fields.uar_page)
        .set(0x3e8, 24, fields.send_cqn)
        .set(0x4e8, 24, fields.recv_cqn)
        .set64(0x500, fields.record.offset)
        .set(0x683, 1, 1) // dbr_umem_valid
        .set(0x720, 32, fields.record.umem)
        .head64(0x800, fields.rings.offset)
        .head(0x840, 32, fields.rings.umem)
        .head(0x860, 1, 1) // wq_umem_valid
}

/// `pm_state` without path migration.
pub(super) const MIGRATED: u32 = 3;

/// Transition of queue pair `qpn` with a context and `optional` parameter bits.
pub(super) fn step(opcode: Opcode, qpn: u32, optional: u32) -> Command {
    Command::new(opcode, LONG, 0xc0, ANSWER).head(0x48, 24, qpn).head(0x80, 32, optional)
}

/// Transition to ERR or RST, without parameters.
pub(super) fn end(opcode: Opcode, qpn: u32) -> Command {
    Command::new(opcode, SHORT, 0, ANSWER).head(0x48, 24, qpn)
}

/// QUERY_QP; [`queried_state`] reads the answer.
pub(super) fn query_qp(qpn: u32) -> Command {
    Command::new(Opcode::QueryQp, SHORT, 0, LONG).head(0x48, 24, qpn)
}

/// State in the answer of [`query_qp`]: 0 RST, 1 INIT, 2 RTR, 3 RTS, 6 ERR.
pub(super) fn queried_state(answer: &[u8]) -> u32 {
    devx_get(answer, 0xc0, 4)
}

/// QUERY_HCA_CAP: current general capabilities.
pub(super) fn query_hca_cap() -> Command {
    Command::new(Opcode::QueryHcaCap, SHORT, 0, (0x80 + 0x8000) / 8).head(0x30, 16, 1)
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
        Self { log_max_qp: devx_get(answer, 0x80 + 0x88, 8), log_max_cq: devx_get(answer, 0x80 + 0xc8, 8) }
    }
}

/// Number of the created object.
pub(super) fn created(answer: &[u8]) -> u32 {
    devx_get(answer, 0x48, 24)
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
        let command = end(Opcode::ToErr, 0xab_cdef);
        assert_eq!((command.bytes().len(), command.answer), (16, 16));
        assert_eq!(written(&command), [(0, 5), (1, 7), (9, 0xab), (10, 0xcd), (11, 0xef)]);
        let command = query_qp(3);
        assert_eq!((written(&command), command.answer), (vec![(0, 5), (1, 0x0b), (11, 3)], 272));
        let command = query_hca_cap();
        assert_eq!((written(&command), command.answer), (vec![(0, 1), (7, 1)], 4112));
        let command = step(Opcode::Rts2Rts, 1, 0x40);
        assert_eq!(written(&command), [(0, 5), (1, 5), (11, 1), (19, 0x40)]);
    }

    #[test]
    fn answers_are_read() {
        let mut answer = [0; 4112];
        answer[0] = 0x03;
        answer[4..8].copy_from_slice(&[0x00, 0x3b, 0x29, 0xff]);
        answer[8..12].copy_from_slice(&[0xee, 0x12, 0x34, 0x56]);
        let status = Status::of(&answer);
        assert_eq!(status, Status { status: 3, syndrome: 0x3b_29ff });
        assert_eq!((status.name(), created(&answer)), ("bad parameter", 0x12_3456));
        (answer[16 + 0x11], answer[16 + 0x19]) = (15, 22);
        assert_eq!(Limits::of(&answer), Limits { log_max_qp: 15, log_max_cq: 22 });
        answer[24] = 0x6f;
        assert_eq!(queried_state(&answer), 6);
    }
}
