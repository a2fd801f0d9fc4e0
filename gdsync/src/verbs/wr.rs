//! Work requests and their completions.

use gdsync_device::CompletionError;

use mlx5_ring::{AddressVector, CqeOpcode, Opcode, Payload, SendOp, Syndrome, WqeFlags};

pub use mlx5_ring::{DataSeg as Sge, RemoteAddr};

/// A send work request. Built by the constructors, refined by the methods.
#[derive(Clone, Copy, Debug)]
pub struct SendWr<'a> {
    /// Returned in the completion.
    pub wr_id: u64,
    /// The operation.
    pub op: SendOp<'a>,
    /// Fence against earlier work, and solicited event.
    pub flags: WqeFlags,
}

impl<'a> SendWr<'a> {
    /// A request for any operation.
    pub fn new(op: SendOp<'a>) -> Self {
        Self { wr_id: 0, op, flags: WqeFlags::default() }
    }

    /// SEND of the SGEs' bytes. The request borrows its list:
    ///
    /// ```compile_fail,E0597
    /// # use gdsync::verbs::{Mr, Qp, SendWr};
    /// # fn post(qp: &Qp, mr: &Mr) {
    /// let wr = {
    ///     let list = [mr.sge(0, 8).unwrap()];
    ///     SendWr::send(&list) // the list ends here
    /// };
    /// qp.post_send(&[wr]);
    /// # }
    /// ```
    pub fn send(sges: &'a [Sge]) -> Self {
        Self::new(SendOp::Send { payload: Payload::Sges(sges), imm: None })
    }

    /// SEND of bytes that are copied into the queue now (inline data).
    pub fn send_inline(bytes: &'a [u8]) -> Self {
        Self::new(SendOp::Send { payload: Payload::Inline(bytes), imm: None })
    }

    /// Send of the SGEs' bytes on a [datagram](super::QpBuilder::datagrams) queue pair, to an address of
    /// [`Pd::datagram_address`](super::Pd::datagram_address).
    pub fn datagram(to: &'a AddressVector, sges: &'a [Sge]) -> Self {
        Self::new(SendOp::Datagram { to, payload: Payload::Sges(sges), imm: None })
    }

    /// RDMA WRITE to `remote`.
    pub fn write(remote: RemoteAddr, sges: &'a [Sge]) -> Self {
        Self::new(SendOp::Write { remote, payload: Payload::Sges(sges), imm: None })
    }

    /// RDMA WRITE of bytes that are copied into the queue now (inline data).
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

    /// NOP: a completion and nothing else.
    pub fn nop() -> Self {
        Self::new(SendOp::Nop)
    }

    /// Sets the id returned in the completion.
    #[must_use]
    pub fn id(mut self, wr_id: u64) -> Self {
        self.wr_id = wr_id;
        self
    }

    /// Adds immediate data to a SEND, WRITE or datagram. Has no effect on other operations.
    #[must_use]
    pub fn imm(mut self, value: u32) -> Self {
        if let SendOp::Send { imm, .. } | SendOp::Datagram { imm, .. } | SendOp::Write { imm, .. } =
            &mut self.op
        {
            *imm = Some(value);
        }
        self
    }

    /// Starts the request only after earlier READs and atomics of the queue have completed.
    #[must_use]
    pub fn fence(mut self) -> Self {
        self.flags.fence = true;
        self
    }
}

/// A receive work request. Built as a [`SendWr`] is.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct RecvWr<'a> {
    /// Returned in the completion.
    pub wr_id: u64,
    /// The buffers of the message, filled in order.
    pub sges: &'a [Sge],
}

impl<'a> RecvWr<'a> {
    /// A receive into the SGEs. None are needed for the immediate data of a WRITE.
    pub fn new(sges: &'a [Sge]) -> Self {
        Self { wr_id: 0, sges }
    }

    /// Sets the id returned in the completion.
    #[must_use]
    pub fn id(mut self, wr_id: u64) -> Self {
        self.wr_id = wr_id;
        self
    }
}

/// A work completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wc {
    /// The id of the work request.
    pub wr_id: u64,
    /// The queue pair.
    pub qpn: u32,
    /// The CQE opcode: send queue (requester) or receive queue (responder), and the kind of message.
    pub opcode: CqeOpcode,
    /// The send operation of a requester completion.
    pub send_opcode: Opcode,
    /// Bytes received, read, or returned by an atomic; 0 for other sends.
    pub byte_len: u32,
    /// Immediate data of a receive that has it.
    pub imm: Option<u32>,
    /// `None` on success.
    pub syndrome: Option<Syndrome>,
    /// The vendor syndrome of an error.
    pub vendor: u8,
    /// The request failed, and a memory region that it names is known to have been deregistered before its completion was
    /// read.
    pub deregistered: bool,
}

/// Who sent a datagram: see [`Completion::sender`](super::Completion::sender).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sender {
    /// Its queue pair, 24 bits.
    pub qpn: u32,
    /// The LID of its port; 0 on RoCE.
    pub lid: u16,
    /// Service level.
    pub sl: u8,
    /// Whether the GRH in the receive buffer counts.
    pub has_grh: bool,
}

impl Wc {
    /// Whether this completes a send.
    pub fn is_send(&self) -> bool {
        matches!(self.opcode, CqeOpcode::REQ | CqeOpcode::REQ_ERR)
    }

    /// Converts a failed completion to its error.
    ///
    /// # Errors
    /// The [`CompletionError`] of a failed completion.
    pub fn ok(self) -> Result<Self, CompletionError> {
        match self.syndrome {
            None => Ok(self),
            Some(syndrome) => Err(CompletionError {
                qpn: self.qpn,
                wr_id: self.wr_id,
                operation: if self.is_send() { Some(self.send_opcode) } else { None },
                syndrome,
                vendor: self.vendor,
                bytes: 0,
                deregistered: self.deregistered,
            }),
        }
    }
}
