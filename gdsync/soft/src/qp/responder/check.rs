//! REMOVE

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

/// Bytes of a request's extension header.
fn extension(op: PacketOp) -> Result<usize, Refusal> {
    match op {
        PacketOp::SEND => Ok(0),
        PacketOp::WRITE | PacketOp::READ => Ok(8),
        PacketOp::COMPARE_SWAP | PacketOp::FETCH_ADD => Ok(24),
        _ => Err(INVALID),
    }
}

/// Bytes of payload in a body, or of its reference.
fn payload(header: &Header, body: usize) -> Result<usize, Refusal> {
    body.checked_sub(extension(header.op)?).ok_or(INVALID)
}

/// Checks the lengths in a packet.
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
        // All packets but the last are full.
        _ if flags & packet::LAST == 0 => payload == SEGMENT,
        _ => payload <= SEGMENT,
    })
}

impl SoftQp {
    /// Checks the next request: its lengths, its place in the current message, and the message's length.
    ///
    /// All header fields of a request are checked here, before anything is done (InfiniBand architecture 9.7.4.1).
    /// Keys, rights and ranges are checked where memory is looked up.
    pub(super) fn check_request(&self, header: &Header, body: &Body<'_>) -> Result<(), Refusal> {
        sizes(header, body.len())?;
        let is_message = matches!(header.op, PacketOp::SEND | PacketOp::WRITE);
        let is_first = !is_message || header.flags & packet::FIRST != 0;
        let Some(current) = &self.resp.current else { return require(is_first) };
        // Only a SEND has consumed its receive.
        let is_same = current.counter.is_some() == (header.op == PacketOp::SEND);
        let received = current.received + payload(header, body.len())?;
        require(!is_first && is_same && received <= MAX_MESSAGE as usize)
    }
}
