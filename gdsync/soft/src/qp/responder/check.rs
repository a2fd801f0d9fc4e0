//! The one place where the numbers of a request are checked, before anything is done for it.
//!
//! The peer's process is trusted with nothing but the memory that it holds keys of. Keys, rights and ranges are checked where memory is
//! looked up; this is about the packet itself, and its place among those before it (InfiniBand architecture 9.7.4.1).

use super::Refusal;
use crate::links::Body;
use crate::packet::{self, Header, PacketOp, SEGMENT};
use crate::qp::SoftQp;
use crate::reference::REFERENCE;
use mlx5_ring::{MAX_MESSAGE, Syndrome};

const INVALID: Refusal = Refusal::Remote(Syndrome::REM_INV_REQ_ERR);

fn require(is_fine: bool) -> Result<(), Refusal> {
    if is_fine { Ok(()) } else { Err(INVALID) }
}

/// Bytes of the extended header of a request.
fn extension(op: PacketOp) -> Result<usize, Refusal> {
    match op {
        PacketOp::SEND => Ok(0),
        PacketOp::WRITE | PacketOp::READ => Ok(8),
        PacketOp::COMPARE_SWAP | PacketOp::FETCH_ADD => Ok(24),
        _ => Err(INVALID),
    }
}

/// The bytes of payload in a body, or of the reference that stands for it.
fn payload(header: &Header, body: usize) -> Result<usize, Refusal> {
    body.checked_sub(extension(header.op)?).ok_or(INVALID)
}

/// Checks what a packet says of lengths.
pub(super) fn sizes(header: &Header, body: usize) -> Result<(), Refusal> {
    let payload = payload(header, body)?;
    let ends = packet::FIRST | packet::LAST;
    let flags = header.flags & ends;
    let is_message = matches!(header.op, PacketOp::SEND | PacketOp::WRITE);
    require(match flags {
        _ if !is_message => payload == 0 && header.len <= MAX_MESSAGE,
        _ if header.flags & packet::REFERENCE != 0 => {
            flags == ends && payload == REFERENCE && (1..=MAX_MESSAGE).contains(&header.len)
        }
        packet::LAST => (1..=SEGMENT).contains(&payload),
        // All but the last packet of a message are full.
        _ if flags & packet::LAST == 0 => payload == SEGMENT,
        _ => payload <= SEGMENT,
    })
}

impl SoftQp {
    /// Checks a request that comes next: its lengths, its place in the message that is being received, and the length of that.
    pub(super) fn check_request(&self, header: &Header, body: &Body<'_>) -> Result<(), Refusal> {
        sizes(header, body.len())?;
        let is_message = matches!(header.op, PacketOp::SEND | PacketOp::WRITE);
        let is_first = !is_message || header.flags & packet::FIRST != 0;
        let Some(current) = &self.resp.current else { return require(is_first) };
        // Only a SEND has taken its receive.
        let is_same = current.counter.is_some() == (header.op == PacketOp::SEND);
        let received = current.received + payload(header, body.len())?;
        require(!is_first && is_same && received <= MAX_MESSAGE as usize)
    }
}
