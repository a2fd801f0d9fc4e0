//! Doorbell records (how far a queue is filled) and doorbell registers.
//!
//! Records are 32-bit words, doorbells 64-bit words. Both are native integers here: a store by a CPU or GPU puts the
//! right big-endian bytes in memory.

use super::ctrl::{Ctrl, decode_ctrl};
use super::opcode::Opcode;

/// Offset of the receive counter in a queue pair's doorbell record (`MLX5_RCV_DBR`).
pub const QP_DBREC_RECV: usize = 0;

/// Offset of the send counter in a queue pair's doorbell record (`MLX5_SND_DBR`).
pub const QP_DBREC_SEND: usize = 4;

/// Bytes of a queue pair's doorbell record.
pub const QP_DBREC_SIZE: usize = 8;

/// Offset of the consumer counter in a completion queue's doorbell record.
pub const CQ_DBREC_CI: usize = 0;

/// Offset of the arm word in a completion queue's doorbell record (`MLX5_CQ_ARM_DB`).
pub const CQ_DBREC_ARM: usize = 4;

/// Arm word of a queue that was never armed. A card writes it, because the first arming is 0, as a cleared record.
pub const NEVER_ARMED: u32 = u32::MAX;

/// Bytes of a completion queue's doorbell record: consumer counter and arm word.
pub const CQ_DBREC_SIZE: usize = 8;

/// Offset of the first doorbell register in its page (`MLX5_BF_OFFSET`).
pub const BF_OFFSET: usize = 0x800;

/// Empty value of a doorbell register in memory: QPN `0xffffff` does not exist.
pub const EMPTY: u64 = u64::MAX;

/// Send counter record; `pi` is the index of the next free block.
pub const fn send_record(pi: u64) -> u32 {
    let [.., hi, lo] = pi.to_be_bytes();
    u32::from_ne_bytes([0, 0, hi, lo])
}

/// Receive counter record; `head` is the number of receive WQEs posted.
pub const fn recv_record(head: u64) -> u32 {
    send_record(head)
}

/// Consumer counter record; `ci` is the number of CQEs consumed.
pub const fn cq_ci_record(ci: u64) -> u32 {
    let [.., hi, mid, lo] = ci.to_be_bytes();
    u32::from_ne_bytes([0, hi, mid, lo])
}

/// Request for a completion event: the arm word of a completion queue's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqArm {
    /// Number of events that the program has had, modulo 4.
    pub sequence: u8,
    /// Only solicited completions and errors count.
    pub solicited: bool,
    /// Completions from this one on count, modulo 2^24.
    pub ci: u32,
}

impl CqArm {
    /// Decodes the word; `None` if the queue was never armed.
    pub const fn decode(word: u32) -> Option<Self> {
        let [flags, ..] = word.to_ne_bytes();
        match word {
            NEVER_ARMED => None,
            _ => Some(Self { sequence: flags >> 4 & 3, solicited: flags & 1 != 0, ci: record_to_u24(word) }),
        }
    }

    /// Whether there is such a completion, if the last that may count is the one before `end`, at most 2^23 later or
    /// earlier than [`CqArm::ci`].
    pub const fn is_due(&self, end: u64) -> bool {
        (end.wrapping_sub(self.ci as u64) << 40).cast_signed() > 0
    }
}

/// The 16-bit counter in a queue pair's record.
pub const fn record_to_u16(record: u32) -> u16 {
    let [_, _, hi, lo] = record.to_ne_bytes();
    u16::from_be_bytes([hi, lo])
}

/// The 24-bit counter in a completion queue's record.
pub const fn record_to_u24(record: u32) -> u32 {
    let [_, hi, mid, lo] = record.to_ne_bytes();
    u32::from_be_bytes([0, hi, mid, lo])
}

/// The counter with these low 16 bits in `last .. last + 2^16`.
pub const fn extend16(last: u64, low: u16) -> u64 {
    extend(last, low as u64, 0xffff)
}

/// The counter with these low 24 bits in `last .. last + 2^24`.
pub const fn extend24(last: u64, low: u32) -> u64 {
    extend(last, low as u64, 0x00ff_ffff)
}

const fn extend(last: u64, low: u64, mask: u64) -> u64 {
    last.wrapping_add(low.wrapping_sub(last) & mask)
}

/// Doorbell for the last posted WQE, from the first 8 bytes of its control segment, as rdma-core writes it.
pub const fn doorbell_word(ctrl_first8: [u8; 8]) -> u64 {
    u64::from_le_bytes(ctrl_first8)
}

/// Doorbell for the next free block, without opcode and length. Uses the low 24 bits of `qpn`.
pub const fn next_pi_doorbell(qpn: u32, pi: u64) -> u64 {
    let [.., i0, i1] = pi.to_be_bytes();
    let [_, q0, q1, q2] = qpn.to_be_bytes();
    doorbell_word([0, i0, i1, 0, q0, q1, q2, 0])
}

/// Decoded doorbell.
///
/// With opcode 0 and length 0, `index` is the next free block; otherwise it is the first block of the last posted WQE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doorbell {
    /// QPN, 24 bits.
    pub qpn: u32,
    /// Low 16 bits of a block's index.
    pub index: u16,
    /// Opcode of the WQE.
    pub opcode: Opcode,
    /// Length of the WQE in segments.
    pub ds: u8,
}

impl Doorbell {
    /// Decodes the 64-bit register value, which must not be [`EMPTY`].
    pub const fn decode(word: u64) -> Self {
        let [b0, b1, b2, b3, b4, b5, b6, b7] = word.to_le_bytes();
        let Ctrl { qpn, index, opcode, ds, .. } =
            decode_ctrl(&[b0, b1, b2, b3, b4, b5, b6, b7, 0, 0, 0, 0, 0, 0, 0, 0]);
        Self { qpn, index, opcode, ds }
    }
}

/// Low 16 bits of a counter.
#[expect(clippy::cast_possible_truncation, reason = "the wire carries the counter modulo 2^16")]
pub fn low16(counter: u64) -> u16 {
    counter as u16
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn records_of_the_worked_example() {
        assert_eq!(send_record(300), 0x2c01_0000);
        assert_eq!(send_record(300).to_le_bytes(), [0, 0, 0x01, 0x2c]);
        assert_eq!(recv_record(300), 0x2c01_0000);
        assert_eq!(cq_ci_record(71), 0x4700_0000);
        assert_eq!(cq_ci_record(0x12_3456).to_le_bytes(), [0, 0x12, 0x34, 0x56]);
    }

    #[test]
    fn records_hold_the_low_bits() {
        assert_eq!(send_record(0x1_0000), 0);
        assert_eq!(send_record(0xffff_ffff_ffff_1234).to_le_bytes(), [0, 0, 0x12, 0x34]);
        assert_eq!(cq_ci_record(0xffff_ffff_ff12_3456).to_le_bytes(), [0, 0x12, 0x34, 0x56]);
        assert_eq!(record_to_u16(u32::from_le_bytes([0xff, 0xff, 0x12, 0x34])), 0x1234);
        assert_eq!(record_to_u24(u32::from_le_bytes([0xff, 0x12, 0x34, 0x56])), 0x12_3456);
    }

    #[test]
    fn doorbells_of_the_worked_example() {
        let last = doorbell_word([0, 0x01, 0x2b, 8, 0, 0x01, 0x23, 3]);
        assert_eq!(last, 0x0323_0100_082b_0100);
        let named = Doorbell { qpn: 0x123, index: 0x12b, opcode: Opcode::RDMA_WRITE, ds: 3 };
        assert_eq!(Doorbell::decode(last), named);

        let next = next_pi_doorbell(0x123, 300);
        assert_eq!(next, 0x0023_0100_002c_0100);
        let free = Doorbell { qpn: 0x123, index: 300, opcode: Opcode::NOP, ds: 0 };
        assert_eq!(Doorbell::decode(next), free);
        assert_eq!(next_pi_doorbell(0xff00_0123, 0x1_0000 + 300), next);
    }

    #[test]
    fn empty_register_has_no_valid_qpn() {
        assert_eq!(Doorbell::decode(EMPTY).qpn, 0x00ff_ffff);
    }

    #[test]
    fn arm_words_have_sequence_mode_and_counter() {
        let word = u32::from_ne_bytes([0x21, 0x12, 0x34, 0x56]);
        assert_eq!(CqArm::decode(word), Some(CqArm { sequence: 2, solicited: true, ci: 0x12_3456 }));
        assert_eq!(CqArm::decode(0), Some(CqArm { sequence: 0, solicited: false, ci: 0 }));
        assert_eq!(CqArm::decode(NEVER_ARMED), None);
        let arm = |ci| CqArm { sequence: 0, solicited: false, ci };
        assert!(!arm(7).is_due(7) && arm(7).is_due(8) && !arm(7).is_due(0));
        // Across the wrap of the counter.
        assert!(arm(0xff_ffff).is_due(0x100_0000) && !arm(1).is_due(0x100_0000) && !arm(1).is_due(0xff_ffff));
    }

    #[test]
    fn counters_are_extended_across_their_wrap() {
        assert_eq!(extend16(0, 0), 0);
        assert_eq!(extend16(0x0fff0, 0xfff0), 0x0fff0);
        assert_eq!(extend16(0x0fff0, 0x0010), 0x1_0010);
        assert_eq!(extend16(0x1_0000, 0xffff), 0x1_ffff);
        assert_eq!(extend24(0x00ff_ffff, 0), 0x0100_0000);
        assert_eq!(extend24(0x0500_0010, 0x10), 0x0500_0010);
        assert_eq!(extend24(0, 0xff00_0007), 7);
    }

    proptest! {
        #[test]
        fn extension_finds_the_counter_it_was_cut_from(last: u64, ahead in 0u64..1 << 24) {
            let pi = last.wrapping_add(ahead & 0xffff);
            prop_assert_eq!(extend16(last, record_to_u16(send_record(pi))), pi);
            let ci = last.wrapping_add(ahead);
            prop_assert_eq!(extend24(last, record_to_u24(cq_ci_record(ci))), ci);
        }

        #[test]
        fn doorbells_keep_queue_and_index(qpn in 0u32..1 << 24, pi: u64) {
            let rung = Doorbell::decode(next_pi_doorbell(qpn, pi));
            prop_assert_eq!((rung.qpn, rung.index), (qpn, record_to_u16(send_record(pi))));
        }
    }
}
