//! CQEs: 64-byte completions and their owner bit.

use super::opcode::{CqeOpcode, Opcode, Syndrome};

/// Bytes of a CQE. In a ring of 128-byte entries it is the second half of each.
pub const CQE_SIZE: usize = 64;

/// Offset of the CQE's last 32-bit word, with the owner bit. The HCA writes it last.
pub const CQE_OP_OWN_OFFSET: usize = 60;

/// Initial content of every CQE slot.
///
/// The HCA writes owner 0 in the first lap, so an empty slot must have owner 1. rdma-core fills in `0xf0`, opcode
/// INVALID with owner 0: enough for pollers of the opcode, but a wait on the owner bit alone would pass at once.
pub const INITIAL_CQE: [u8; CQE_SIZE] = [0xff; CQE_SIZE];

/// Owner bit in the CQE's last word, as loaded little-endian.
const OWNER_BIT: u32 = 1 << 24;

/// A CQE (`mlx5_cqe64`, or `mlx5_err_cqe` for error opcodes) in native numbers.
///
/// The error layout has no `imm`, `byte_cnt`, `timestamp`, `slid` and `flags_rqpn`, the other no `syndrome` and `vendor`: they decode to 0,
/// and encoding drops them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cqe {
    /// Opcode, 4 bits.
    pub opcode: CqeOpcode,
    /// Owner bit; see [`lap`].
    pub owner: u8,
    /// Location of the payload, 2 bits: 0 is "in memory". Others (in the CQE, compressed) are not used.
    pub format: u8,
    /// The sender requested a solicited event.
    pub solicited: bool,
    /// QPN, 24 bits.
    pub qpn: u32,
    /// Sends: index of the WQE's first block. Receives: counter of the receive WQE.
    pub wqe_counter: u16,
    /// Bytes received, or returned by a read or atomic.
    pub byte_cnt: u32,
    /// Immediate data, as the sender's number.
    pub imm: u32,
    /// Opcode of the send WQE; 0 for receives.
    pub send_opcode: Opcode,
    /// Error syndrome.
    pub syndrome: Syndrome,
    /// Vendor-specific syndrome.
    pub vendor: u8,
    /// Free-running clock of the HCA.
    pub timestamp: u64,
    /// SRQ number, or user index of the queue pair.
    pub srqn_uidx: u32,
    /// LID of the sender of a datagram.
    pub slid: u16,
    /// QPN of the sender of a datagram (24 bits), its service level (4 bits; on RoCE 2 if the GRH is an IPv4 header), and
    /// whether there is a GRH (2 bits).
    pub flags_rqpn: u32,
}

impl Cqe {
    /// Decodes a CQE. The caller has checked [`owned_by_software`].
    pub fn decode(bytes: &[u8; CQE_SIZE]) -> Self {
        let [send_opcode, q0, q1, q2] = field(bytes, 56);
        let [op_own] = field(bytes, 63);
        let common = Self {
            opcode: CqeOpcode(op_own >> 4),
            owner: op_own & 1,
            format: op_own >> 2 & 3,
            solicited: op_own & 2 != 0,
            qpn: u32::from_be_bytes([0, q0, q1, q2]),
            wqe_counter: u16::from_be_bytes(field(bytes, 60)),
            send_opcode: Opcode(send_opcode),
            srqn_uidx: u32::from_be_bytes(field(bytes, 32)),
            ..Self::default()
        };
        if common.opcode.is_error() {
            let [vendor, syndrome] = field(bytes, 54);
            Self { vendor, syndrome: Syndrome(syndrome), ..common }
        } else {
            Self {
                imm: u32::from_be_bytes(field(bytes, 36)),
                byte_cnt: u32::from_be_bytes(field(bytes, 44)),
                timestamp: u64::from_be_bytes(field(bytes, 48)),
                slid: u16::from_be_bytes(field(bytes, 22)),
                flags_rqpn: u32::from_be_bytes(field(bytes, 24)),
                ..common
            }
        }
    }

    /// The bytes in the ring. Excess bits of fields are dropped, reserved bytes are 0.
    pub fn encode(&self) -> [u8; CQE_SIZE] {
        let mut out = [0; CQE_SIZE];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(32, &self.srqn_uidx.to_be_bytes());
        if self.opcode.is_error() {
            put(54, &[self.vendor, self.syndrome.0]);
        } else {
            put(22, &self.slid.to_be_bytes());
            put(24, &self.flags_rqpn.to_be_bytes());
            put(36, &self.imm.to_be_bytes());
            put(44, &self.byte_cnt.to_be_bytes());
            put(48, &self.timestamp.to_be_bytes());
        }
        put(56, &self.qpn.to_be_bytes());
        put(56, &[self.send_opcode.0]);
        put(60, &self.wqe_counter.to_be_bytes());
        let solicited = u8::from(self.solicited);
        put(63, &[self.opcode.0 << 4 | (self.format & 3) << 2 | solicited << 1 | self.owner & 1]);
        out
    }
}

/// The bytes of a field at a constant offset.
fn field<const N: usize>(bytes: &[u8; CQE_SIZE], at: usize) -> [u8; N] {
    *bytes[at..].first_chunk().expect("fields lie inside the CQE")
}

/// The last word of a CQE, loaded and stored whole. It must be stored after all other bytes.
pub fn op_own_word(bytes: &[u8; CQE_SIZE]) -> u32 {
    u32::from_le_bytes(field(bytes, CQE_OP_OWN_OFFSET))
}

/// Owner bit of completion `n` (from 0) in a queue of `2^log2` slots: changes with every lap.
pub const fn lap(n: u64, log2: u32) -> u8 {
    match n.checked_shr(log2) {
        Some(lap) if lap & 1 == 1 => 1,
        _ => 0,
    }
}

/// Whether completion `n` (from 0) has arrived, by its slot's last word.
///
/// The rest of the CQE may be read after an acquire fence.
pub const fn owned_by_software(op_own_word: u32, n: u64, log2: u32) -> bool {
    let [_, _, _, op_own] = op_own_word.to_le_bytes();
    op_own >> 4 != CqeOpcode::INVALID.0 && op_own & 1 == lap(n, log2)
}

/// Wait condition and operand on the slot's last word for completion `n` (from 0).
///
/// It tests only the owner bit, so error completions pass it too. The slot must start as [`INITIAL_CQE`], and
/// completion `n + 2^log2` must not arrive before the wait has passed.
pub const fn wait_condition(n: u64, log2: u32) -> (Cond, u32) {
    match lap(n, log2) {
        0 => (Cond::Nor, !OWNER_BIT),
        _ => (Cond::And, OWNER_BIT),
    }
}

/// When a wait passes, for the word `w` and the operand `v`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cond {
    /// `w - v >= 0` as a signed, cyclic comparison (`CU_STREAM_WAIT_VALUE_GEQ`).
    Geq,
    /// `w == v` (`CU_STREAM_WAIT_VALUE_EQ`).
    Eq,
    /// `(w & v) != 0` (`CU_STREAM_WAIT_VALUE_AND`).
    And,
    /// `!(w | v) != 0` (`CU_STREAM_WAIT_VALUE_NOR`).
    Nor,
}

impl Cond {
    /// Value in `cuda.h`.
    pub fn code(self) -> u16 {
        match self {
            Cond::Geq => 0,
            Cond::Eq => 1,
            Cond::And => 2,
            Cond::Nor => 3,
        }
    }
}

macro_rules! conditions {
    ($($word:ident, $holds:ident, $satisfy:ident, $bits:literal;)*) => {
        impl Cond {$(
            #[doc = concat!("Whether a ", $bits, "-bit word satisfies the condition.")]
            pub fn $holds(self, word: $word, value: $word) -> bool {
                match self {
                    Cond::Geq => word.wrapping_sub(value).cast_signed() >= 0,
                    Cond::Eq => word == value,
                    Cond::And => word & value != 0,
                    Cond::Nor => !(word | value) != 0,
                }
            }

            #[doc = concat!("The ", $bits, "-bit value nearest to `word` that satisfies the condition, if any.")]
            pub fn $satisfy(self, word: $word, value: $word) -> Option<$word> {
                let lowest = |bits: $word| bits & bits.wrapping_neg();
                let to = match self {
                    _ if self.$holds(word, value) => word,
                    Cond::Geq | Cond::Eq => value,
                    Cond::And => word | lowest(value),
                    Cond::Nor => word & !lowest(!value),
                };
                self.$holds(to, value).then_some(to)
            }
        )*}
    };
}

conditions! {
    u32, holds32, satisfy32, "32";
    u64, holds64, satisfy64, "64";
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::changed;
    use super::*;

    #[test]
    fn every_field_has_its_bytes() {
        let zero = Cqe::default();
        let cases: [(Cqe, &[(usize, u8)]); 14] = [
            (Cqe { srqn_uidx: 0x0102_0304, ..zero }, &[(32, 1), (33, 2), (34, 3), (35, 4)]),
            (Cqe { slid: 0x0102, ..zero }, &[(22, 1), (23, 2)]),
            (Cqe { flags_rqpn: 0x0102_0304, ..zero }, &[(24, 1), (25, 2), (26, 3), (27, 4)]),
            (Cqe { imm: 0x0102_0304, ..zero }, &[(36, 1), (37, 2), (38, 3), (39, 4)]),
            (Cqe { byte_cnt: 0x0102_0304, ..zero }, &[(44, 1), (45, 2), (46, 3), (47, 4)]),
            (
                Cqe { timestamp: 0x0102_0304_0506_0708, ..zero },
                &[(48, 1), (49, 2), (50, 3), (51, 4), (52, 5), (53, 6), (54, 7), (55, 8)],
            ),
            (Cqe { send_opcode: Opcode::RDMA_READ, ..zero }, &[(56, 0x10)]),
            (Cqe { qpn: 0x01_0203, ..zero }, &[(57, 1), (58, 2), (59, 3)]),
            (Cqe { wqe_counter: 0x0102, ..zero }, &[(60, 1), (61, 2)]),
            (Cqe { opcode: CqeOpcode::RESP_SEND_IMM, ..zero }, &[(63, 0x30)]),
            (Cqe { format: 3, ..zero }, &[(63, 0x0c)]),
            (Cqe { format: 1, ..zero }, &[(63, 0x04)]),
            (Cqe { solicited: true, ..zero }, &[(63, 0x02)]),
            (Cqe { owner: 1, ..zero }, &[(63, 0x01)]),
        ];
        for (cqe, expected) in cases {
            assert_eq!(changed(&[0; 64], &cqe.encode()), expected, "{cqe:?}");
            assert_eq!(Cqe::decode(&cqe.encode()), cqe);
        }
    }

    #[test]
    fn errors_have_their_own_layout() {
        let flushed = Cqe {
            opcode: CqeOpcode::REQ_ERR,
            owner: 1,
            qpn: 0x123,
            wqe_counter: 0x12b,
            send_opcode: Opcode::RDMA_WRITE,
            syndrome: Syndrome::WR_FLUSH_ERR,
            vendor: 0xf9,
            ..Cqe::default()
        };
        let bytes = flushed.encode();
        let expected =
            [(54, 0xf9), (55, 5), (56, 8), (58, 1), (59, 0x23), (60, 0x01), (61, 0x2b), (63, 0xd1)];
        assert_eq!(changed(&[0; 64], &bytes), expected);
        assert_eq!(Cqe::decode(&bytes), flushed);

        let receive = Cqe { opcode: CqeOpcode::RESP_ERR, syndrome: Syndrome(1), ..Cqe::default() };
        assert_eq!(changed(&[0; 64], &receive.encode()), [(55, 1), (63, 0xe0)]);
        // Fields of the other layout must not reach the syndrome's bytes.
        let busy = Cqe { imm: !0, byte_cnt: !0, timestamp: !0, ..receive };
        assert_eq!(busy.encode(), receive.encode());
    }

    #[test]
    fn bits_beyond_a_field_are_dropped() {
        let wide = Cqe { opcode: CqeOpcode(0x12), owner: 2, format: 4, qpn: 0xff00_0001, ..Cqe::default() };
        let cut = Cqe { opcode: CqeOpcode(2), qpn: 1, ..Cqe::default() };
        assert_eq!(wide.encode(), cut.encode());
    }

    /// The worked example: completions 69 and 70 of a queue with 64 slots, in its second lap.
    #[test]
    fn wait_of_the_worked_example() {
        let (cond, value) = wait_condition(70, 6);
        assert_eq!((cond, value), (Cond::And, 0x0100_0000));
        assert_eq!(wait_condition(6, 6), (Cond::Nor, 0xfeff_ffff));
        let good = Cqe { owner: 1, wqe_counter: 0x12b, ..Cqe::default() };
        let bad = Cqe { opcode: CqeOpcode::REQ_ERR, ..good };
        for (cqe, op_own) in [(good, 0x01), (bad, 0xd1)] {
            let bytes = cqe.encode();
            assert_eq!(bytes[60..], [0x01, 0x2b, 0, op_own]);
            let word = op_own_word(&bytes);
            assert_eq!(word, u32::from_le_bytes([0x01, 0x2b, 0, op_own]));
            assert!(cond.holds32(word, value) && owned_by_software(word, 70, 6));
        }
    }

    /// In every slot, over several laps: waits block on old content and pass on new content of any opcode.
    #[test]
    fn waits_and_polls_follow_the_owner_bit_over_many_laps() {
        let opcodes = [0, 1, 2, 3, 4, 13, 14].map(CqeOpcode);
        for log2 in 0..4 {
            let slots = 1usize << log2;
            let mut ring = vec![INITIAL_CQE; slots];
            for n in 0..5 * slots {
                let at = n % slots;
                let n = n as u64;
                let (cond, value) = wait_condition(n, log2);
                let arrived = |ring: &[[u8; 64]]| {
                    let word = op_own_word(&ring[at]);
                    (cond.holds32(word, value), owned_by_software(word, n, log2))
                };
                assert_eq!(arrived(&ring), (false, false), "n {n} of 2^{log2}");
                for opcode in opcodes {
                    let cqe = Cqe { opcode, owner: lap(n, log2), wqe_counter: 0xffff, ..Cqe::default() };
                    ring[at] = cqe.encode();
                    assert_eq!(arrived(&ring), (true, true), "n {n} of 2^{log2}, {opcode}");
                }
            }
        }
    }

    #[test]
    fn laps_alternate_across_every_wrap() {
        assert_eq!([0, 63, 64, 69, 127, 128].map(|n| lap(n, 6)), [0, 0, 1, 1, 1, 0]);
        assert_eq!([0, 1, 2].map(|n| lap(n, 0)), [0, 1, 0]);
        assert_eq!((lap(u64::MAX, 24), lap(1 << 63, 63), lap(u64::MAX, 64)), (1, 1, 0));
    }

    /// Why slots must not start as in rdma-core.
    #[test]
    fn initial_content_blocks_waits_of_the_first_lap() {
        let (cond, value) = wait_condition(0, 6);
        assert!(!cond.holds32(op_own_word(&INITIAL_CQE), value));
        assert!(cond.holds32(0xf000_0000, value));
        assert!(!owned_by_software(0xf000_0000, 0, 6));
    }

    prop_compose! {
        fn any_cqe()(
            numbers: [u32; 4],
            slid: u16,
            timestamp: u64,
            wqe_counter: u16,
            opcode in 0u8..16,
            (owner, format, solicited) in (0u8..2, 0u8..4, any::<bool>()),
            codes: [u8; 3],
            qpn in 0u32..1 << 24,
        ) -> Cqe {
            let opcode = CqeOpcode(opcode);
            let common = Cqe {
                opcode, owner, format, solicited, qpn, wqe_counter,
                send_opcode: Opcode(codes[0]), srqn_uidx: numbers[0], ..Cqe::default()
            };
            if opcode.is_error() {
                Cqe { syndrome: Syndrome(codes[1]), vendor: codes[2], ..common }
            } else {
                Cqe { imm: numbers[1], byte_cnt: numbers[2], timestamp, slid, flags_rqpn: numbers[3], ..common }
            }
        }
    }

    proptest! {
        #[test]
        fn decode_inverts_encode(cqe in any_cqe()) {
            prop_assert_eq!(Cqe::decode(&cqe.encode()), cqe);
        }

        #[test]
        fn waits_agree_with_polls(word: u32, n: u64, log2 in 0u32..=24) {
            let (cond, value) = wait_condition(n, log2);
            let valid = word >> 28 != 15;
            prop_assert_eq!(owned_by_software(word, n, log2), valid && cond.holds32(word, value));
        }
    }
}
