//! Layouts of the firmware's commands, under the names of `mlx5_ifc.h`.
//!
//! Offsets count bits from the start of the structure, which the module names; from the most significant bit of the first
//! big-endian word, as in the manual.

use super::{devx_get, devx_set, devx_set64};

/// A field of at most 32 bits inside one word, or of 64 aligned bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    offset: usize,
    width: u32,
}

const fn field(offset: usize, width: u32) -> Field {
    Field { offset, width }
}

impl Field {
    /// This field of a structure that begins at bit `base`.
    #[must_use]
    pub const fn inside(self, base: usize) -> Self {
        Self { offset: base + self.offset, ..self }
    }

    /// Reads a field of at most 32 bits. One behind the end of the bytes is 0.
    #[must_use]
    pub fn get(self, bytes: &[u8]) -> u32 {
        let is_there = self.offset / 32 * 4 + 4 <= bytes.len();
        if is_there { devx_get(bytes, self.offset, self.width) } else { 0 }
    }

    /// Reads a field of 64 bits. One behind the end of the bytes is 0.
    #[must_use]
    pub fn get64(self, bytes: &[u8]) -> u64 {
        let bytes = bytes.get(self.offset / 8..).and_then(<[u8]>::first_chunk);
        bytes.map_or(0, |bytes| u64::from_be_bytes(*bytes))
    }

    /// Writes a field of at most 32 bits.
    ///
    /// # Panics
    /// If it is behind the end of the bytes.
    pub fn set(self, bytes: &mut [u8], value: u32) {
        devx_set(bytes, self.offset, self.width, value);
    }

    /// Writes a field of 64 bits.
    ///
    /// # Panics
    /// If it is behind the end of the bytes.
    pub fn set64(self, bytes: &mut [u8], value: u64) {
        devx_set64(bytes, self.offset, value);
    }
}

macro_rules! fields {
    ($($(#[$doc:meta])* $name:ident = ($offset:expr, $width:expr);)*) => {
        $($(#[$doc])* #[allow(missing_docs, reason = "the names of the manual")] pub const $name: Field = field($offset, $width);)*
    };
}

macro_rules! numbers {
    ($(#[$doc:meta])* $type:ident: $int:ty, $unknown:literal; $($name:ident = $value:literal, $text:literal;)*) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $type(pub $int);

        #[allow(missing_docs, reason = "the names of the manual")]
        impl $type {
            $(pub const $name: Self = Self($value);)*

            /// Its name in the manual.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                    _ => $unknown,
                }
            }
        }
    };
}

numbers! {
    /// `MLX5_CMD_OP_*`
    Opcode: u16, "an unknown command";
    QUERY_HCA_CAP = 0x100, "QUERY_HCA_CAP";
    CREATE_CQ = 0x400, "CREATE_CQ";
    QUERY_CQ = 0x402, "QUERY_CQ";
    CREATE_QP = 0x500, "CREATE_QP";
    RST2INIT_QP = 0x502, "RST2INIT_QP";
    INIT2RTR_QP = 0x503, "INIT2RTR_QP";
    RTR2RTS_QP = 0x504, "RTR2RTS_QP";
    RTS2RTS_QP = 0x505, "RTS2RTS_QP";
    TO_ERR_QP = 0x507, "2ERR_QP";
    TO_RST_QP = 0x50a, "2RST_QP";
    QUERY_QP = 0x50b, "QUERY_QP";
    INIT2INIT_QP = 0x50e, "INIT2INIT_QP";
    QUERY_ROCE_ADDRESS = 0x760, "QUERY_ROCE_ADDRESS";
    QUERY_LAG = 0x842, "QUERY_LAG";
    CREATE_RMP = 0x90c, "CREATE_RMP";
}

numbers! {
    /// `MLX5_CMD_STAT_*`
    Status: u8, "unknown status";
    OK = 0x00, "no status of the firmware";
    INT_ERR = 0x01, "internal error";
    BAD_OP = 0x02, "bad operation";
    BAD_PARAM = 0x03, "bad parameter";
    BAD_SYS_STATE = 0x04, "bad system state";
    BAD_RES = 0x05, "bad resource";
    RES_BUSY = 0x06, "resource busy";
    LIM_ERR = 0x08, "limit exceeded";
    BAD_RES_STATE = 0x09, "bad resource state";
    BAD_INDEX = 0x0a, "bad index";
    NO_RES = 0x0f, "no resources";
    BAD_QP_STATE = 0x10, "bad QP state";
    BAD_PKT = 0x30, "bad packet";
    BAD_SIZE = 0x40, "bad size";
    BAD_INPUT_LEN = 0x50, "bad input length";
    BAD_OUTPUT_LEN = 0x51, "bad output length";
}

/// `MLX5_EVENT_TYPE_*`
pub mod event {
    /// Completion.
    pub const COMP: u16 = 0x00;
    /// A completion queue failed.
    pub const CQ_ERROR: u16 = 0x04;
    /// A queue pair failed.
    pub const WQ_CATAS_ERROR: u16 = 0x05;
    /// A request was invalid.
    pub const WQ_INVAL_REQ_ERROR: u16 = 0x10;
    /// A request had no right.
    pub const WQ_ACCESS_ERROR: u16 = 0x11;
    /// A queue pair with a shared receive queue takes no more receives.
    pub const SRQ_LAST_WQE: u16 = 0x13;
    /// A shared receive queue has fewer receives than its limit.
    pub const SRQ_RQ_LIMIT: u16 = 0x14;
}

/// What commands have in common.
pub mod command {
    use super::{Field, field};

    /// Bytes of a command with only a number, and of an answer to one that returns at most a number.
    pub const SHORT: usize = 0x80 / 8;
    /// Bytes of a command, or an answer, with the context of a queue.
    pub const LONG: usize = 0x880 / 8;

    fields! {
        OPCODE = (0x00, 16);
        OP_MOD = (0x30, 16);
        /// The number of the queue.
        NUMBER = (0x48, 24);
        /// Which optional parameters a transition has.
        OPT_PARAM_MASK = (0x80, 32);
    }
}

/// What answers have in common.
pub mod answer {
    use super::{Field, field};

    fields! {
        STATUS = (0x00, 8);
        SYNDROME = (0x20, 32);
        /// The number of what was created.
        NUMBER = (0x48, 24);
    }
}

/// CREATE_CQ around its context ([`cqc`]).
pub mod create_cq {
    use super::{Field, field};

    /// Where the context begins, also in the answer of QUERY_CQ.
    pub const CONTEXT: usize = 0x80;

    fields! {
        CQ_UMEM_OFFSET = (0x280, 64);
        CQ_UMEM_ID = (0x2c0, 32);
        CQ_UMEM_VALID = (0x2e0, 1);
    }
}

/// Context of a completion queue.
pub mod cqc {
    use super::{Field, field};

    fields! {
        DBR_UMEM_VALID = (0x06, 1);
        CQE_SZ = (0x08, 3);
        CC = (0x0b, 1);
        OI = (0x0e, 1);
        CQE_COMP_EN = (0x11, 1);
        DBR_UMEM_ID = (0x20, 32);
        PAGE_OFFSET = (0x54, 6);
        LOG_CQ_SIZE = (0x63, 5);
        UAR_PAGE = (0x68, 24);
        C_EQN = (0xb8, 8);
        LOG_PAGE_SIZE = (0xc3, 5);
        DBR_ADDR = (0x1c0, 64);
    }
}

/// CREATE_QP around its context ([`qpc`]).
pub mod create_qp {
    use super::{Field, field};

    /// Where the context begins, also in transitions and in the answer of QUERY_QP.
    pub const CONTEXT: usize = 0xc0;

    fields! {
        WQ_UMEM_OFFSET = (0x800, 64);
        WQ_UMEM_ID = (0x840, 32);
        WQ_UMEM_VALID = (0x860, 1);
    }
}

/// Context of a queue pair.
pub mod qpc {
    use super::{Field, field};

    fields! {
        STATE = (0x00, 4);
        ST = (0x08, 8);
        PM_STATE = (0x13, 2);
        PD = (0x28, 24);
        MTU = (0x40, 3);
        LOG_MSG_MAX = (0x43, 5);
        LOG_RQ_SIZE = (0x49, 4);
        LOG_RQ_STRIDE = (0x4d, 3);
        NO_SQ = (0x50, 1);
        LOG_SQ_SIZE = (0x51, 4);
        UAR_PAGE = (0x68, 24);
        SEND_DBR_MODE = (0x80, 2);
        USER_INDEX = (0x88, 24);
        LOG_PAGE_SIZE = (0xa3, 5);
        REMOTE_QPN = (0xa8, 24);
        LOG_SRA_MAX = (0x388, 3);
        RETRY_COUNT = (0x38d, 3);
        RNR_RETRY = (0x390, 3);
        NEXT_SEND_PSN = (0x3c8, 24);
        CQN_SND = (0x3e8, 24);
        LOG_RRA_MAX = (0x488, 3);
        ATOMIC_MODE = (0x48c, 4);
        RRE = (0x490, 1);
        RWE = (0x491, 1);
        RAE = (0x492, 1);
        PAGE_OFFSET = (0x494, 6);
        MIN_RNR_NAK = (0x4a3, 5);
        NEXT_RCV_PSN = (0x4a8, 24);
        CQN_RCV = (0x4e8, 24);
        DBR_ADDR = (0x500, 64);
        RQ_TYPE = (0x565, 3);
        SRQN_RMPN = (0x568, 24);
        CS_REQ = (0x630, 8);
        CS_RES = (0x638, 8);
        DBR_UMEM_VALID = (0x683, 1);
        DBR_UMEM_ID = (0x720, 32);
    }
}

/// The primary path of a queue pair, from the start of [`qpc`].
pub mod path {
    use super::{Field, field};

    const PRIMARY: usize = 0xc0;
    /// The peer's GID: 16 bytes.
    pub const RGID: usize = PRIMARY + 0x80;
    /// The MAC address of the peer's port: 6 bytes.
    pub const RMAC: usize = PRIMARY + 0x130;

    fields! {
        PKEY_INDEX = (PRIMARY + 0x10, 16);
        GRH = (PRIMARY + 0x28, 1);
        RLID = (PRIMARY + 0x30, 16);
        ACK_TIMEOUT = (PRIMARY + 0x40, 5);
        SRC_ADDR_INDEX = (PRIMARY + 0x48, 8);
        HOP_LIMIT = (PRIMARY + 0x58, 8);
        TCLASS = (PRIMARY + 0x64, 8);
        FLOW_LABEL = (PRIMARY + 0x6c, 20);
        DSCP = (PRIMARY + 0x10a, 6);
        UDP_SPORT = (PRIMARY + 0x110, 16);
        ETH_PRIO = (PRIMARY + 0x121, 3);
        SL = (PRIMARY + 0x124, 4);
        VHCA_PORT_NUM = (PRIMARY + 0x128, 8);
    }
}

/// The work queue of a receive memory pool, from the start of CREATE_RMP.
pub mod rmp_wq {
    use super::{Field, field};

    const WQ: usize = 0x100 + 0x180;

    fields! {
        WQ_TYPE = (WQ, 4);
        PD = (WQ + 0x48, 24);
        DBR_ADDR = (WQ + 0x80, 64);
        LOG_WQ_STRIDE = (WQ + 0x10c, 4);
        LOG_WQ_SZ = (WQ + 0x11b, 5);
        DBR_UMEM_ID = (WQ + 0x140, 32);
        WQ_UMEM_ID = (WQ + 0x160, 32);
        WQ_UMEM_OFFSET = (WQ + 0x180, 64);
    }
}

/// General capabilities, from the start of the answer of QUERY_HCA_CAP.
pub mod cap {
    use super::{Field, field};

    const CAPABILITY: usize = 0x80;
    /// Bytes of the answer.
    pub const ANSWER: usize = (CAPABILITY + 0x8000) / 8;
    /// `op_mod` of the current general capabilities.
    pub const GENERAL: u32 = 1;

    fields! {
        LOG_MAX_SRQ_SZ = (CAPABILITY + 0x80, 8);
        LOG_MAX_QP_SZ = (CAPABILITY + 0x88, 8);
        LOG_MAX_QP = (CAPABILITY + 0x9b, 5);
        LOG_MAX_CQ_SZ = (CAPABILITY + 0xc8, 8);
        LOG_MAX_CQ = (CAPABILITY + 0xdb, 5);
        PORT_TYPE = (CAPABILITY + 0x1b6, 2);
        LOG_MAX_MSG = (CAPABILITY + 0x1c3, 5);
        CQE_VERSION = (CAPABILITY + 0x1fc, 4);
        ATOMIC = (CAPABILITY + 0x21e, 1);
        RC = (CAPABILITY + 0x23f, 1);
        MAX_WQE_SZ_SQ = (CAPABILITY + 0x290, 16);
        MAX_WQE_SZ_RQ = (CAPABILITY + 0x2b0, 16);
        LOG_MAX_RMP = (CAPABILITY + 0x383, 5);
    }
}

/// Capabilities of RoCE, from the start of the answer of QUERY_HCA_CAP.
pub mod roce_cap {
    use super::{Field, field};

    const CAPABILITY: usize = 0x80;
    /// Of `op_mod`, above the bit for the current values.
    pub const TYPE: u32 = 4;

    fields! {
        MAX_SRC_UDP_PORT = (CAPABILITY + 0xc0, 16);
        MIN_SRC_UDP_PORT = (CAPABILITY + 0xd0, 16);
        ADDRESS_TABLE_SIZE = (CAPABILITY + 0xf0, 16);
    }
}

/// Capabilities of atomics, from the start of the answer of QUERY_HCA_CAP.
pub mod atomic_cap {
    use super::{Field, field};

    const CAPABILITY: usize = 0x80;
    /// Of `op_mod`, above the bit for the current values.
    pub const TYPE: u32 = 3;

    fields! {
        REQ_8B_ENDIANNESS_MODE = (CAPABILITY + 0x40, 2);
        SUPPORTED_REQ_8B_ENDIANNESS_MODE_1 = (CAPABILITY + 0x46, 1);
        OPERATIONS = (CAPABILITY + 0x90, 16);
        SIZE_QP = (CAPABILITY + 0xb0, 16);
        SIZE_DC = (CAPABILITY + 0xd0, 16);
    }
}

/// QUERY_ROCE_ADDRESS: the entry in the command, and the fields of the answer.
pub mod query_roce_address {
    use super::{Field, field};

    const ADDRESS: usize = 0x80;
    /// Bytes of the answer.
    pub const ANSWER: usize = (ADDRESS + 0x100) / 8;
    /// 16 bytes.
    pub const SOURCE_L3_ADDRESS: usize = ADDRESS;
    /// 6 bytes.
    pub const SOURCE_MAC: usize = ADDRESS + 0x90;

    fields! {
        INDEX = (0x40, 16);
        ROCE_L3_TYPE = (ADDRESS + 0xd4, 4);
        ROCE_VERSION = (ADDRESS + 0xd8, 8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_behind_the_end_are_zero() {
        let mut bytes = [0xff; 12];
        for (offset, width, value) in [(0x00, 8, 0xff), (0x58, 8, 0xff), (0x60, 8, 0), (0xffff_ffe0, 32, 0)] {
            assert_eq!(field(offset, width).get(&bytes), value, "{offset:#x}");
        }
        assert_eq!((field(0, 64).get64(&bytes), field(0x40, 64).get64(&bytes)), (u64::MAX, 0));
        assert_eq!(field(8, 4).inside(0x20).get(&[0, 0, 0, 0, 0, 0x30, 0, 0]), 3);
        field(4, 4).inside(0x40).set(&mut bytes, 0);
        assert_eq!(bytes[8], 0xf0);
    }

    /// The bytes that a field of ones has, by `mlx5_ifc.h` of NVIDIA's DOCA (`create_rmp_in`, `query_hca_cap_out`).
    #[test]
    fn receive_pools_and_capabilities_are_where_the_manual_has_them() {
        let golden: &[(Field, usize, &[u8])] = &[
            (rmp_wq::WQ_TYPE, 0x50, &[0xf0]),
            (rmp_wq::PD, 0x59, &[0xff; 3]),
            (rmp_wq::DBR_ADDR, 0x60, &[0xff; 8]),
            (rmp_wq::LOG_WQ_STRIDE, 0x71, &[0x0f]),
            (rmp_wq::LOG_WQ_SZ, 0x73, &[0x1f]),
            (rmp_wq::DBR_UMEM_ID, 0x78, &[0xff; 4]),
            (rmp_wq::WQ_UMEM_ID, 0x7c, &[0xff; 4]),
            (rmp_wq::WQ_UMEM_OFFSET, 0x80, &[0xff; 8]),
            (cap::LOG_MAX_SRQ_SZ, 0x20, &[0xff]),
            (cap::LOG_MAX_QP_SZ, 0x21, &[0xff]),
            (cap::LOG_MAX_QP, 0x23, &[0x1f]),
            (cap::LOG_MAX_CQ_SZ, 0x29, &[0xff]),
            (cap::LOG_MAX_CQ, 0x2b, &[0x1f]),
            (cap::PORT_TYPE, 0x46, &[0x03]),
            (cap::LOG_MAX_MSG, 0x48, &[0x1f]),
            (cap::CQE_VERSION, 0x4f, &[0x0f]),
            (cap::ATOMIC, 0x53, &[0x02]),
            (cap::RC, 0x57, &[0x01]),
            (cap::MAX_WQE_SZ_SQ, 0x62, &[0xff; 2]),
            (cap::MAX_WQE_SZ_RQ, 0x66, &[0xff; 2]),
            (cap::LOG_MAX_RMP, 0x80, &[0x1f]),
            (roce_cap::MAX_SRC_UDP_PORT, 0x28, &[0xff; 2]),
            (roce_cap::MIN_SRC_UDP_PORT, 0x2a, &[0xff; 2]),
            (roce_cap::ADDRESS_TABLE_SIZE, 0x2e, &[0xff; 2]),
            (atomic_cap::REQ_8B_ENDIANNESS_MODE, 0x18, &[0xc0]),
            (atomic_cap::SUPPORTED_REQ_8B_ENDIANNESS_MODE_1, 0x18, &[0x02]),
            (atomic_cap::OPERATIONS, 0x22, &[0xff; 2]),
            (atomic_cap::SIZE_QP, 0x26, &[0xff; 2]),
            (atomic_cap::SIZE_DC, 0x2a, &[0xff; 2]),
        ];
        for &(field, at, ones) in golden {
            let (mut bytes, mut expected) = ([0; 0x100], [0; 0x100]);
            expected[at..at + ones.len()].copy_from_slice(ones);
            match field.width {
                64 => field.set64(&mut bytes, u64::MAX),
                width => field.set(&mut bytes, u32::MAX >> (32 - width)),
            }
            assert_eq!(bytes, expected, "{field:x?}");
        }
    }

    #[test]
    fn numbers_have_names() {
        assert_eq!((Opcode(0x50a).name(), Opcode(9).name()), ("2RST_QP", "an unknown command"));
        assert_eq!((Status(3).name(), Status(0x77).name()), ("bad parameter", "unknown status"));
    }
}
