//! Work requests and their completions.

use std::fmt;

use mlx5_ring::{CqeOpcode, Opcode, Payload, RemoteAddr, SendOp, Syndrome, WqeFlags};

pub use mlx5_ring::DataSeg as Sge;

/// A send work request. Make one with the constructors, refine it with the methods.
#[derive(Clone, Copy, Debug)]
pub struct SendWr<'a> {
    /// Handed back in the completion.
    pub wr_id: u64,
    /// What to do.
    pub op: SendOp<'a>,
    /// Order against earlier work, and solicited event.
    pub flags: WqeFlags,
}

impl<'a> SendWr<'a> {
    /// A request for any operation.
    pub fn new(op: SendOp<'a>) -> Self {
        Self { wr_id: 0, op, flags: WqeFlags::default() }
    }

    /// SEND of the bytes the SGEs name.
    pub fn send(sges: &'a [Sge]) -> Self {
        Self::new(SendOp::Send { payload: Payload::Sges(sges), imm: None })
    }

    /// SEND of bytes that are copied into the queue now.
    pub fn send_inline(bytes: &'a [u8]) -> Self {
        Self::new(SendOp::Send { payload: Payload::Inline(bytes), imm: None })
    }

    /// RDMA WRITE to `remote`.
    pub fn write(remote: RemoteAddr, sges: &'a [Sge]) -> Self {
        Self::new(SendOp::Write { remote, payload: Payload::Sges(sges), imm: None })
    }

    /// RDMA WRITE of bytes that are copied into the queue now.
    pub fn write_inline(remote: RemoteAddr, bytes: &'a [u8]) -> Self {
        Self::new(SendOp::Write { remote, payload: Payload::Inline(bytes), imm: None })
    }

    /// RDMA READ from `remote` into the SGEs.
    pub fn read(remote: RemoteAddr, sges: &'a [Sge]) -> Self {
        Self::new(SendOp::Read { remote, sges })
    }

    /// Compare and swap of the aligned 64-bit word at `remote`; its old value goes to `result`.
    pub fn compare_swap(remote: RemoteAddr, compare: u64, swap: u64, result: Sge) -> Self {
        Self::new(SendOp::CompareSwap { remote, compare, swap, result })
    }

    /// Adds to the aligned 64-bit word at `remote`; its old value goes to `result`.
    pub fn fetch_add(remote: RemoteAddr, add: u64, result: Sge) -> Self {
        Self::new(SendOp::FetchAdd { remote, add, result })
    }

    /// Nothing but a completion.
    pub fn nop() -> Self {
        Self::new(SendOp::Nop)
    }

    /// Sets the id handed back in the completion.
    #[must_use]
    pub fn id(mut self, wr_id: u64) -> Self {
        self.wr_id = wr_id;
        self
    }

    /// Adds immediate data to a SEND or WRITE; other operations have none and stay as they are.
    #[must_use]
    pub fn imm(mut self, value: u32) -> Self {
        if let SendOp::Send { imm, .. } | SendOp::Write { imm, .. } = &mut self.op {
            *imm = Some(value);
        }
        self
    }

    /// Holds the request until earlier READs and atomics of the queue are complete.
    #[must_use]
    pub fn fence(mut self) -> Self {
        self.flags.fence = true;
        self
    }
}

/// A receive work request.
#[derive(Clone, Copy, Debug)]
pub struct RecvWr<'a> {
    /// Handed back in the completion.
    pub wr_id: u64,
    /// Where the message goes, in order.
    pub sges: &'a [Sge],
}

/// A work completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wc {
    /// The id of the work request.
    pub wr_id: u64,
    /// The queue pair.
    pub qpn: u32,
    /// Which queue: requester (send) or responder (receive), and what kind of message.
    pub opcode: CqeOpcode,
    /// The send operation of a requester completion.
    pub send_opcode: Opcode,
    /// Bytes received, read, or returned by an atomic; 0 for other sends.
    pub byte_len: u32,
    /// Immediate data of a receive that has it.
    pub imm: Option<u32>,
    /// `None` on success.
    pub syndrome: Option<Syndrome>,
    /// The vendor's own code of an error.
    pub vendor: u8,
}

impl Wc {
    /// Whether this completes a work request of the send queue.
    pub fn is_send(&self) -> bool {
        matches!(self.opcode, CqeOpcode::REQ | CqeOpcode::REQ_ERR)
    }

    /// The completion on success, the typed error otherwise.
    ///
    /// # Errors
    /// The [`CompletionError`] this completion carries.
    pub fn ok(self) -> Result<Self, CompletionError> {
        match self.syndrome {
            None => Ok(self),
            Some(syndrome) => Err(CompletionError {
                qpn: self.qpn,
                wr_id: self.wr_id,
                operation: if self.is_send() { Some(self.send_opcode) } else { None },
                syndrome,
                vendor: self.vendor,
            }),
        }
    }
}

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
