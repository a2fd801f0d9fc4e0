//! The control segment: the first 16 bytes of every send WQE.

use super::opcode::Opcode;
use super::segment::SEGMENT;

/// `fm_ce_se`: solicited event (`MLX5_WQE_CTRL_SOLICITED`).
pub const SOLICITED: u8 = 0x02;

/// `fm_ce_se`: always write a CQE (`MLX5_WQE_CTRL_CQ_UPDATE`).
pub const CE_ALWAYS: u8 = 0x08;

/// `fm_ce_se`: completion mode bits. 0 means "on error only".
pub const CE_MASK: u8 = 0x0c;

/// `fm_ce_se`: small fence of the initiator (`MLX5_WQE_CTRL_INITIATOR_SMALL_FENCE`).
pub const FM_INITIATOR_SMALL: u8 = 0x20;

/// `fm_ce_se`: wait for earlier reads and atomics.
pub const FM_FENCE: u8 = 0x40;

/// `fm_ce_se`: strong ordering.
pub const FM_STRONG_ORDERING: u8 = 0x60;

/// `fm_ce_se`: both fences, as rdma-core emits for `IBV_SEND_FENCE` (`MLX5_WQE_CTRL_FENCE`).
pub const FM_FENCE_AND_INITIATOR_SMALL: u8 = 0x80;

/// `fm_ce_se`: fence mode bits.
pub const FM_MASK: u8 = 0xe0;

/// `ds` bits of the last byte of the second word; the other two are reserved.
const DS_MASK: u8 = 0x3f;

/// Control segment (`mlx5_wqe_ctrl_seg`) with all bits, unchecked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ctrl {
    /// Operation modifier; 0 for all operations used here.
    pub opmod: u8,
    /// Index of the WQE's first block, modulo 2^16.
    pub index: u16,
    /// Opcode.
    pub opcode: Opcode,
    /// QPN, 24 bits.
    pub qpn: u32,
    /// Length of the WQE in 16-byte segments including this one, 6 bits.
    pub ds: u8,
    /// Reserved bits beside `ds`, in place (mask `0xc0`).
    pub reserved: u8,
    /// XOR signature; 0 when off, as here.
    pub signature: u8,
    /// Stream of a DC initiator; 0 on RC.
    pub stream_id: u16,
    /// Fence mode (bits 7:5), completion mode (3:2), solicited event (1).
    pub fm_ce_se: u8,
    /// Immediate data in wire order.
    pub imm: [u8; 4],
}

/// Offset of the immediate data in a WQE.
pub const CTRL_IMM_OFFSET: usize = 12;

impl Ctrl {
    /// The bytes in the ring. Excess bits of fields are dropped.
    pub const fn to_bytes(&self) -> [u8; SEGMENT] {
        let ds = self.ds & DS_MASK | self.reserved & !DS_MASK;
        // Built in registers: word loads of bytes stored one by one would stall.
        let high = (self.opmod as u64) << 56
            | (self.index as u64) << 40
            | (self.opcode.0 as u64) << 32
            | (self.qpn as u64 & 0xff_ffff) << 8
            | ds as u64;
        let low = (self.signature as u64) << 56
            | (self.stream_id as u64) << 40
            | (self.fm_ce_se as u64) << 32
            | u32::from_be_bytes(self.imm) as u64;
        ((high as u128) << 64 | low as u128).to_be_bytes()
    }

    /// Number of 64-byte blocks the WQE occupies.
    pub const fn blocks(&self) -> u16 {
        blocks(self.ds)
    }

    /// Whether the WQE waits for earlier reads and atomics.
    pub const fn fence(&self) -> bool {
        matches!(self.fm_ce_se & FM_MASK, FM_FENCE | FM_STRONG_ORDERING | FM_FENCE_AND_INITIATOR_SMALL)
    }

    /// Whether success writes a CQE (failure always does).
    pub const fn always_completes(&self) -> bool {
        self.fm_ce_se & CE_MASK == CE_ALWAYS
    }

    /// Whether the receiver raises a solicited event.
    pub const fn solicited(&self) -> bool {
        self.fm_ce_se & SOLICITED != 0
    }
}

/// Decodes a control segment without checks; see [`super::decode_body`] and [`super::strict_violations`].
pub const fn decode_ctrl(bytes: &[u8; SEGMENT]) -> Ctrl {
    let [opmod, i0, i1, opcode, q0, q1, q2, ds, signature, s0, s1, fm_ce_se, imm @ ..] = *bytes;
    Ctrl {
        opmod,
        index: u16::from_be_bytes([i0, i1]),
        opcode: Opcode(opcode),
        qpn: u32::from_be_bytes([0, q0, q1, q2]),
        ds: ds & DS_MASK,
        reserved: ds & !DS_MASK,
        signature,
        stream_id: u16::from_be_bytes([s0, s1]),
        fm_ce_se,
        imm,
    }
}

/// Number of 64-byte blocks of a WQE with `ds` segments.
pub const fn blocks(ds: u8) -> u16 {
    ds.div_ceil(4) as u16
}

/// Control segment of a NOP that replaces a prepared WQE.
///
/// It keeps the WQE's `ds`, so later indices stay right, and requests a CQE, so completions stay one to one. Segments
/// behind it are ignored. Uses the low 24 bits of `qpn` and the low 6 of `ds`.
pub fn nop_like(qpn: u32, index: u16, ds: u8) -> [u8; SEGMENT] {
    Ctrl { index, opcode: Opcode::NOP, qpn, ds, fm_ce_se: CE_ALWAYS, ..Ctrl::default() }.to_bytes()
}

/// Sets the index of an encoded WQE or control segment; nothing else depends on the place in the ring.
///
/// # Panics
/// If `wqe` is shorter than 3 bytes.
pub fn set_index(wqe: &mut [u8], index: u16) {
    wqe[1..3].copy_from_slice(&index.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::super::tests::changed;
    use super::*;

    #[test]
    fn every_field_has_its_bytes() {
        let zero = Ctrl::default();
        let full = Ctrl { ds: 0x3f, reserved: 0xc0, ..zero };
        let cases: [(Ctrl, &[(usize, u8)]); 10] = [
            (Ctrl { opmod: 0xa1, ..zero }, &[(0, 0xa1)]),
            (Ctrl { index: 0xa1b2, ..zero }, &[(1, 0xa1), (2, 0xb2)]),
            (Ctrl { opcode: Opcode(0xa1), ..zero }, &[(3, 0xa1)]),
            (Ctrl { qpn: 0xa1b2c3, ..zero }, &[(4, 0xa1), (5, 0xb2), (6, 0xc3)]),
            (Ctrl { ds: 0x3f, ..zero }, &[(7, 0x3f)]),
            (full, &[(7, 0xff)]),
            (Ctrl { signature: 0xa1, ..zero }, &[(8, 0xa1)]),
            (Ctrl { stream_id: 0xa1b2, ..zero }, &[(9, 0xa1), (10, 0xb2)]),
            (Ctrl { fm_ce_se: 0xa1, ..zero }, &[(11, 0xa1)]),
            (Ctrl { imm: [1, 2, 3, 4], ..zero }, &[(12, 1), (13, 2), (14, 3), (15, 4)]),
        ];
        for (ctrl, expected) in cases {
            assert_eq!(changed(&[0; 16], &ctrl.to_bytes()), expected, "{ctrl:?}");
            assert_eq!(decode_ctrl(&ctrl.to_bytes()), ctrl);
        }
    }

    #[test]
    fn bits_beyond_a_field_are_dropped() {
        let wide = Ctrl { qpn: 0xff00_0001, ds: 0xc1, reserved: 0x3f, ..Ctrl::default() };
        assert_eq!(decode_ctrl(&wide.to_bytes()), Ctrl { qpn: 1, ds: 1, ..Ctrl::default() });
    }

    #[test]
    fn blocks_round_up() {
        assert_eq!([1, 4, 5, 8, 9, 63].map(blocks), [1, 1, 2, 2, 3, 16]);
        assert_eq!(Ctrl { ds: 5, ..Ctrl::default() }.blocks(), 2);
    }

    #[test]
    fn flags_are_read_from_their_bits() {
        let with = |fm_ce_se| Ctrl { fm_ce_se, ..Ctrl::default() };
        let fences: Vec<_> = (0..8u8).filter(|fm| with(fm << 5).fence()).collect();
        assert_eq!(fences, [2, 3, 4]);
        let always: Vec<_> = (0..4u8).filter(|ce| with(ce << 2).always_completes()).collect();
        assert_eq!(always, [2]);
        assert!(with(0x02).solicited() && !with(0xfd).solicited());
    }

    #[test]
    fn only_the_index_changes() {
        let mut bytes = Ctrl { index: 0xffff, qpn: 0xff_ffff, ds: 0x3f, ..Ctrl::default() }.to_bytes();
        let before = decode_ctrl(&bytes);
        set_index(&mut bytes, 0xa1b2);
        assert_eq!(decode_ctrl(&bytes), Ctrl { index: 0xa1b2, ..before });
    }

    #[test]
    fn nop_keeps_index_and_size() {
        let expected = [0, 0x01, 0x2b, 0, 0x00, 0x01, 0x23, 7, 0, 0, 0, 8, 0, 0, 0, 0];
        assert_eq!(nop_like(0x123, 0x12b, 7), expected);
    }
}
