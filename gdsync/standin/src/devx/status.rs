//! What the firmware says of a command: status and syndrome.

use std::ffi::c_int;

use rdma_core_sys::mlx5::devx_set;

use crate::complaint::complain;

/// A command that was not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    status: u32,
    syndrome: u32,
}

/// The syndromes of this firmware, which are no card's, begin here.
const SYNDROMES: u32 = 0x005d_0000;

/// Reasons. Each says the rule that was broken, as it is one that a program could not break by accident of a peer; its
/// number is the syndrome's low half.
pub(super) mod refuse {
    use super::{Refusal, SYNDROMES, complain};

    fn because(status: u32, number: u32, why: impl Into<String>) -> Refusal {
        let why = why.into();
        complain(format!("DevX: {why}"));
        Refusal { status, syndrome: SYNDROMES | number }
    }

    /// `BAD_OP`
    pub(in crate::devx) fn operation(number: u32, why: impl Into<String>) -> Refusal {
        because(0x02, number, why)
    }

    /// `BAD_PARAM`
    pub(in crate::devx) fn parameter(number: u32, why: impl Into<String>) -> Refusal {
        because(0x03, number, why)
    }

    /// `BAD_RES`
    pub(in crate::devx) fn resource(number: u32, why: impl Into<String>) -> Refusal {
        because(0x05, number, why)
    }

    /// `LIM_ERR`
    pub(in crate::devx) fn limit(number: u32, why: impl Into<String>) -> Refusal {
        because(0x08, number, why)
    }

    /// `BAD_SIZE`
    pub(in crate::devx) fn size(number: u32, why: impl Into<String>) -> Refusal {
        because(0x40, number, why)
    }

    /// `BAD_INP_LEN` or `BAD_OUTP_LEN`
    pub(in crate::devx) fn length(is_input: bool) -> Refusal {
        because(if is_input { 0x50 } else { 0x51 }, 8, "a mailbox is too short")
    }

    /// `BAD_QP_STATE`, which a failure may bring about: no complaint.
    pub(in crate::devx) fn state() -> Refusal {
        Refusal { status: 0x10, syndrome: SYNDROMES | 9 }
    }
}

impl Refusal {
    /// Writes it into an answer. Returns the number that libmlx5 makes of it.
    pub(super) fn answer(self, output: &mut [u8]) -> c_int {
        if output.len() >= 16 {
            output.fill(0);
            devx_set(output, 0, 8, self.status);
            devx_set(output, 0x20, 32, self.syndrome);
        }
        match self.status {
            0x08 => libc::ENOMEM,
            0x50 | 0x51 => libc::EIO,
            _ => libc::EINVAL,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_written_and_has_a_number() {
        let mut output = [0xff; 16];
        assert_eq!(refuse::limit(3, "test").answer(&mut output), libc::ENOMEM);
        assert_eq!(output[..8], [0x08, 0, 0, 0, 0, 0x5d, 0, 3]);
        assert_eq!(refuse::state().answer(&mut output), libc::EINVAL);
        assert_eq!(output[0], 0x10);
        assert_eq!(refuse::length(true).answer(&mut []), libc::EIO);
    }
}
