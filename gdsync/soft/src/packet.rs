//! Packet format between software HCAs: InfiniBand RC transport with larger packets.

use super::wire::HEADER;

/// Payload bytes per packet, in place of a card's path MTU.
pub(crate) const SEGMENT: usize = 16 * 1024;

/// Packet opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct PacketOp(pub(crate) u8);

impl PacketOp {
    pub(crate) const SEND: Self = Self(1);
    /// Extension header: remote address.
    pub(crate) const WRITE: Self = Self(2);
    /// Extension header: remote address. `len` is the number of bytes requested.
    pub(crate) const READ: Self = Self(3);
    /// Extension header: remote address, compare, swap.
    pub(crate) const COMPARE_SWAP: Self = Self(4);
    /// Extension header: remote address, addend, 0.
    pub(crate) const FETCH_ADD: Self = Self(5);
    /// Acknowledges all packets up to `psn`.
    pub(crate) const ACK: Self = Self(6);
    /// Negative acknowledgement of packet `psn`; `code` is the reason.
    pub(crate) const NAK: Self = Self(7);
    pub(crate) const READ_RESPONSE: Self = Self(8);
    /// Extension header: the old value.
    pub(crate) const ATOMIC_RESPONSE: Self = Self(9);
    /// The receiver is still copying the payload that packet `psn` references.
    pub(crate) const COPYING: Self = Self(10);
    /// Withdraws all unacknowledged references: their bytes may change, so they must not complete. `psn` is the first
    /// of the connection.
    pub(crate) const WITHDRAW: Self = Self(11);
}

pub(crate) const FIRST: u8 = 1;
pub(crate) const LAST: u8 = 2;
pub(crate) const IMM: u8 = 4;
pub(crate) const SOLICITED: u8 = 8;
/// The body ends in a reference to the payload instead of its `len` bytes. Such a message has one packet.
pub(crate) const REFERENCE: u8 = 16;

/// NAK code: packets before the received one were lost; `psn` is the expected one.
pub(crate) const NAK_SEQUENCE: u8 = 0;
/// NAK code: receiver not ready; `len` is the RNR timer code. Codes not listed here are requester syndromes.
pub(crate) const NAK_RNR: u8 = 1;
/// NAK code: the receiver cannot follow the reference in `psn`; the requester sends the bytes. No syndrome has this
/// number.
pub(crate) const NAK_REFERENCE: u8 = 0xfe;

/// Packet header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) op: PacketOp,
    pub(crate) flags: u8,
    pub(crate) code: u8,
    /// Destination QPN; `src` is the source QPN.
    pub(crate) dst: u32,
    pub(crate) src: u32,
    pub(crate) psn: u32,
    pub(crate) len: u32,
    pub(crate) imm: u32,
    pub(crate) rkey: u32,
}

impl Header {
    pub(crate) fn new(op: PacketOp, dst: u32, src: u32, psn: u32) -> Self {
        Self { op, flags: 0, code: 0, dst, src, psn, len: 0, imm: 0, rkey: 0 }
    }

    pub(crate) fn is_response(&self) -> bool {
        (PacketOp::ACK.0..=PacketOp::COPYING.0).contains(&self.op.0)
    }

    pub(crate) fn to_bytes(self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        out[..4].copy_from_slice(&[self.op.0, self.flags, self.code, 0]);
        let words = [self.dst, self.src, self.psn, self.len, self.imm, self.rkey];
        for (slot, word) in out[4..].as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *slot = word.to_le_bytes();
        }
        out
    }

    pub(crate) fn from_bytes(bytes: &[u8; HEADER]) -> Self {
        let word = |i: usize| u32::from_le_bytes(bytes.as_chunks::<4>().0[i]);
        let [op, flags, code, _] = bytes.as_chunks::<4>().0[0];
        Self {
            op: PacketOp(op),
            flags,
            code,
            dst: word(1),
            src: word(2),
            psn: word(3),
            len: word(4),
            imm: word(5),
            rkey: word(6),
        }
    }
}

/// Number of packets for `len` bytes, at least one.
pub(crate) fn segments(len: usize) -> u32 {
    u32::try_from(len.div_ceil(SEGMENT).max(1)).expect("messages are at most 1 GiB")
}

/// Signed distance from `from` to `psn`; negative if `psn` is older.
pub(crate) fn ahead(psn: u32, from: u32) -> i32 {
    psn.wrapping_sub(from).cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_round_trip() {
        let header = Header {
            op: PacketOp::WRITE,
            flags: FIRST | IMM,
            code: 0x13,
            dst: 0x123456,
            src: 0xabcdef,
            psn: u32::MAX,
            len: 77,
            imm: 0xdead_beef,
            rkey: 0x1234_5678,
        };
        assert_eq!(Header::from_bytes(&header.to_bytes()), header);
    }

    #[test]
    fn psn_arithmetic_wraps() {
        assert_eq!(ahead(1, u32::MAX), 2);
        assert_eq!(ahead(u32::MAX, 1), -2);
        assert_eq!([0, 1, SEGMENT, SEGMENT + 1].map(segments), [1, 1, 1, 2]);
    }
}
