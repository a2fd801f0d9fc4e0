//! Work requests and their completions.

use gdsync_device::CompletionError;

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
