//! The error of a work request.

use std::fmt;

use mlx5_ring::{Opcode, Syndrome};

/// A work request that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletionError {
    /// The queue pair.
    pub qpn: u32,
    /// The id of the work request.
    pub wr_id: u64,
    /// The send operation, `None` for a receive.
    pub operation: Option<Opcode>,
    /// Why.
    pub syndrome: Syndrome,
    /// The vendor's own code; 0 from the software HCA.
    pub vendor: u8,
}

impl CompletionError {
    /// Whether the request was only flushed because an earlier one, or the user, broke the queue pair.
    pub fn is_flush(&self) -> bool {
        self.syndrome == Syndrome::WR_FLUSH_ERR
    }
}

impl std::error::Error for CompletionError {}

impl fmt::Display for CompletionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QP {:#x}: ", self.qpn)?;
        match self.operation {
            Some(opcode) => write!(f, "{opcode}")?,
            None => f.write_str("receive")?,
        }
        write!(f, " with wr_id {:#x} failed: {}, vendor code {:#x}", self.wr_id, self.syndrome, self.vendor)?;
        write!(f, "; {}", hint(self.syndrome))
    }
}

/// What to look at first.
fn hint(syndrome: Syndrome) -> &'static str {
    match syndrome {
        Syndrome::LOC_LEN_ERR => {
            "the message is longer than the buffers of the receive, or than the device allows"
        }
        Syndrome::LOC_QP_OP_ERR => "the work request is malformed or not allowed on this queue pair",
        Syndrome::LOC_PROT_ERR => {
            "check lkey, range and LOCAL_WRITE of the memory region, and that it is registered"
        }
        Syndrome::WR_FLUSH_ERR => {
            "an earlier failure or a stop of the queue pair flushed it; look for the first error"
        }
        Syndrome::REM_INV_REQ_ERR => {
            "the peer's receive was too short, or the operation is not enabled or misaligned there"
        }
        Syndrome::REM_ACCESS_ERR => {
            "check rkey, range and access rights of the peer's memory region and queue pair"
        }
        Syndrome::REM_OP_ERR => "the peer failed while handling the request; look at its error",
        Syndrome::RETRY_EXC_ERR => {
            "the peer does not answer: it died, its queue pair is gone or in error, or the network is down"
        }
        Syndrome::RNR_RETRY_EXC_ERR => {
            "the peer posted no receive in time; post receives earlier, or raise rnr_retry"
        }
        _ => "see the device's documentation",
    }
}
