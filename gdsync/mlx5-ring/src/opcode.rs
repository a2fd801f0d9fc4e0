//! Opcodes of WQEs and CQEs, and error syndromes.

use core::fmt;

/// An 8-bit hardware code; unknown values are kept.
macro_rules! codes {
    ($(#[$doc:meta])* $name:ident { $($code:ident = $value:literal: $meaning:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
        #[repr(transparent)]
        pub struct $name(pub u8);

        impl $name {
            $(#[doc = concat!($meaning, ".")] pub const $code: Self = Self($value);)*

            /// Name, if known.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some(stringify!($code)),)*
                    _ => None,
                }
            }

            /// Meaning in words, if known.
            pub const fn meaning(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some($meaning),)*
                    _ => None,
                }
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.name() {
                    Some(name) => write!(f, "{}({name})", stringify!($name)),
                    None => write!(f, "{}({:#04x})", stringify!($name), self.0),
                }
            }
        }
    };
}

codes! {
    /// Opcode of a send WQE (`MLX5_OPCODE_*`).
    Opcode {
        NOP = 0x00: "does nothing, and completes",
        SEND_INVAL = 0x01: "send, and invalidate a key of the receiver",
        RDMA_WRITE = 0x08: "write to remote memory",
        RDMA_WRITE_IMM = 0x09: "write to remote memory, and complete a receive with immediate data",
        SEND = 0x0a: "send into the receiver's next receive WQE",
        SEND_IMM = 0x0b: "send with immediate data",
        TSO = 0x0e: "segmented send of a packet queue",
        WAIT = 0x0f: "hold the queue until another completion queue has advanced",
        RDMA_READ = 0x10: "read from remote memory",
        ATOMIC_CS = 0x11: "compare and swap a remote 64-bit word",
        ATOMIC_FA = 0x12: "fetch and add a remote 64-bit word",
        ATOMIC_MASKED_CS = 0x14: "compare and swap of chosen bits",
        ATOMIC_MASKED_FA = 0x15: "fetch and add of chosen fields",
        DUMP = 0x23: "read local memory and drop the bytes",
        UMR = 0x25: "change a memory key",
    }
}

codes! {
    /// Opcode of a CQE (`MLX5_CQE_*`): the upper four bits of its last byte.
    CqeOpcode {
        REQ = 0: "a send WQE is done",
        RESP_WR_IMM = 1: "a remote write with immediate data arrived",
        RESP_SEND = 2: "a send arrived",
        RESP_SEND_IMM = 3: "a send with immediate data arrived",
        RESP_SEND_INV = 4: "a send arrived that invalidated a key",
        RESIZE = 5: "the completion queue continues in its new buffer",
        NO_PACKET = 6: "no packet (tag matching)",
        SIG_ERR = 12: "a data signature was wrong",
        REQ_ERR = 13: "a send WQE failed or was flushed",
        RESP_ERR = 14: "a receive WQE failed or was flushed",
        INVALID = 15: "nothing was written here yet",
    }
}

codes! {
    /// Error syndrome (`MLX5_CQE_SYNDROME_*`), named after the verbs status (`IBV_WC_*`).
    Syndrome {
        LOC_LEN_ERR = 0x01: "local length error",
        LOC_QP_OP_ERR = 0x02: "local QP operation error",
        LOC_PROT_ERR = 0x04: "local protection error",
        WR_FLUSH_ERR = 0x05: "flushed, because the QP is in the error state",
        MW_BIND_ERR = 0x06: "memory window bind error",
        BAD_RESP_ERR = 0x10: "bad response error",
        LOC_ACCESS_ERR = 0x11: "local access error",
        REM_INV_REQ_ERR = 0x12: "remote invalid request error",
        REM_ACCESS_ERR = 0x13: "remote access error",
        REM_OP_ERR = 0x14: "remote operation error",
        RETRY_EXC_ERR = 0x15: "transport retry counter exceeded",
        RNR_RETRY_EXC_ERR = 0x16: "receiver-not-ready retry counter exceeded",
        REM_ABORT_ERR = 0x22: "remote aborted error",
        COPY_TIMEOUT = 0xf0: "copy of payload late; of the software HCA only",
    }
}

impl CqeOpcode {
    /// Whether a CQE with this opcode has the error layout.
    pub const fn is_error(self) -> bool {
        matches!(self, Self::REQ_ERR | Self::RESP_ERR)
    }
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        name_or_hex(self.name(), self.0, f)
    }
}

impl fmt::Display for CqeOpcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        name_or_hex(self.name(), self.0, f)
    }
}

fn name_or_hex(name: Option<&str>, value: u8, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match name {
        Some(name) => f.pad(name),
        None => write!(f, "{value:#04x}"),
    }
}

impl fmt::Display for Syndrome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.meaning(), self.name()) {
            (Some(meaning), Some(name)) => write!(f, "{meaning} ({name}, {:#04x})", self.0),
            _ => write!(f, "unknown syndrome ({:#04x})", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All codes with a name, in order.
    fn names(of: impl Fn(u8) -> Option<&'static str>) -> String {
        (0..=255).filter_map(|code| Some(format!("{code:#04x} {}", of(code)?))).collect::<Vec<_>>().join(", ")
    }

    #[test]
    fn codes_have_the_values_of_the_header() {
        let opcodes = "0x00 NOP, 0x01 SEND_INVAL, 0x08 RDMA_WRITE, 0x09 RDMA_WRITE_IMM, 0x0a SEND, 0x0b SEND_IMM, 0x0e TSO, \
                       0x0f WAIT, 0x10 RDMA_READ, 0x11 ATOMIC_CS, 0x12 ATOMIC_FA, 0x14 ATOMIC_MASKED_CS, 0x15 ATOMIC_MASKED_FA, \
                       0x23 DUMP, 0x25 UMR";
        let syndromes = "0x01 LOC_LEN_ERR, 0x02 LOC_QP_OP_ERR, 0x04 LOC_PROT_ERR, 0x05 WR_FLUSH_ERR, 0x06 MW_BIND_ERR, \
                         0x10 BAD_RESP_ERR, 0x11 LOC_ACCESS_ERR, 0x12 REM_INV_REQ_ERR, 0x13 REM_ACCESS_ERR, 0x14 REM_OP_ERR, \
                         0x15 RETRY_EXC_ERR, 0x16 RNR_RETRY_EXC_ERR, 0x22 REM_ABORT_ERR, 0xf0 COPY_TIMEOUT";
        let completions = "0x00 REQ, 0x01 RESP_WR_IMM, 0x02 RESP_SEND, 0x03 RESP_SEND_IMM, 0x04 RESP_SEND_INV, 0x05 RESIZE, \
                           0x06 NO_PACKET, 0x0c SIG_ERR, 0x0d REQ_ERR, 0x0e RESP_ERR, 0x0f INVALID";
        assert_eq!(names(|code| Opcode(code).name()), opcodes);
        assert_eq!(names(|code| Syndrome(code).name()), syndromes);
        assert_eq!(names(|code| CqeOpcode(code).name()), completions);
        let errors: Vec<_> = (0..=255).filter(|&code| CqeOpcode(code).is_error()).collect();
        assert_eq!(errors, [13, 14]);
    }

    #[test]
    fn known_values_print_by_name_and_others_in_hex() {
        assert_eq!(Syndrome(0x13).to_string(), "remote access error (REM_ACCESS_ERR, 0x13)");
        assert_eq!(Syndrome(0x7f).to_string(), "unknown syndrome (0x7f)");
        assert_eq!(format!("{:?} {}", Opcode(8), Opcode(8)), "Opcode(RDMA_WRITE) RDMA_WRITE");
        assert_eq!(format!("{:?} {}", Opcode(7), Opcode(7)), "Opcode(0x07) 0x07");
        assert_eq!(format!("{:?} {}", CqeOpcode(13), CqeOpcode(9)), "CqeOpcode(REQ_ERR) 0x09");
    }
}
