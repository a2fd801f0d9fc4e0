//! Atomic operations on chosen bits of a remote word.

use super::opcode::Opcode;
use super::segment::SEGMENT;

/// An atomic operation of a card on a word of 8 bytes, or of 4 with the upper half of all values 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskedAtomic {
    /// Bytes of the word: 4 or 8.
    pub size: u8,
    /// What is done.
    pub op: MaskedOp,
}

/// What a [`MaskedAtomic`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskedOp {
    /// Where the word has the bits of `compare` that `compare_mask` names, those that `swap_mask` names become those of `swap`.
    CompareSwap {
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
        /// Bits compared.
        compare_mask: u64,
        /// Bits replaced.
        swap_mask: u64,
    },
    /// Adds to each of the fields that the word consists of.
    FetchAdd {
        /// Addend.
        add: u64,
        /// Highest bit of each field but the last: nothing is carried beyond.
        boundary: u64,
    },
}

impl MaskedAtomic {
    /// The word afterwards.
    #[must_use]
    pub const fn apply(self, word: u64) -> u64 {
        let new = match self.op {
            MaskedOp::CompareSwap { compare, swap, compare_mask, swap_mask } => {
                if (word ^ compare) & compare_mask == 0 { word & !swap_mask | swap & swap_mask } else { word }
            }
            // The sum of two bits without carry is their difference.
            MaskedOp::FetchAdd { add, boundary } => {
                (word & !boundary).wrapping_add(add & !boundary) ^ (word ^ add) & boundary
            }
        };
        new & self.mask()
    }

    /// The bits of the word.
    #[must_use]
    pub const fn mask(self) -> u64 {
        if self.size == 4 { u32::MAX as u64 } else { u64::MAX }
    }

    /// Segments of operands.
    pub(super) fn segments(opcode: Opcode, opmod: u8) -> u8 {
        if opcode == Opcode::ATOMIC_MASKED_CS && opmod == EIGHT_BYTES { 2 } else { 1 }
    }

    /// The operation of a WQE with these operands; `None` for an unknown `opmod`.
    pub(super) fn decode(opcode: Opcode, opmod: u8, operands: &[[u8; SEGMENT]]) -> Option<Self> {
        let mut words = [0; 4];
        let size = match opmod {
            FOUR_BYTES => {
                let halves = operands.as_flattened().as_chunks().0;
                words
                    .iter_mut()
                    .zip(halves)
                    .for_each(|(word, half)| *word = u32::from_be_bytes(*half).into());
                4
            }
            EIGHT_BYTES => {
                let whole = operands.as_flattened().as_chunks().0;
                words.iter_mut().zip(whole).for_each(|(word, whole)| *word = u64::from_be_bytes(*whole));
                8
            }
            _ => return None,
        };
        let [first, second, swap_mask, compare_mask] = words;
        let op = if opcode == Opcode::ATOMIC_MASKED_CS {
            MaskedOp::CompareSwap { swap: first, compare: second, swap_mask, compare_mask }
        } else {
            MaskedOp::FetchAdd { add: first, boundary: second }
        };
        Some(Self { size, op })
    }
}

/// `opmod` of an operation on so many bytes.
const FOUR_BYTES: u8 = 8;
const EIGHT_BYTES: u8 = 9;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_chosen_bits_are_compared_and_replaced() {
        let swap = |compare, compare_mask| MaskedOp::CompareSwap {
            compare,
            compare_mask,
            swap: 0xaaaa,
            swap_mask: 0x0ff0,
        };
        let apply = |size, op| MaskedAtomic { size, op }.apply(0x1_0000_1234);
        assert_eq!(apply(8, swap(0x0034, 0x00ff)), 0x1_0000_1aa4);
        assert_eq!(apply(8, swap(0x0035, 0x00ff)), 0x1_0000_1234);
        assert_eq!(apply(8, swap(0xffff, 0)), 0x1_0000_1aa4, "nothing is compared");
        assert_eq!(apply(4, swap(0x0034, 0x00ff)), 0x1aa4);
    }

    #[test]
    fn fields_are_added_apart() {
        let add = |size, word, add, boundary| {
            MaskedAtomic { size, op: MaskedOp::FetchAdd { add, boundary } }.apply(word)
        };
        assert_eq!(add(8, u64::MAX, 2, 0), 1, "one field");
        assert_eq!(add(4, 0xffff_ffff, 2, 0), 1);
        assert_eq!(add(8, 0x00ff_00ff, 0x0001_0001, 0x8080_8080), 0);
        // Fields of one bit each: exclusive or.
        assert_eq!(add(8, 0b1100, 0b1010, u64::MAX), 0b0110);
        for (word, addend) in [(0x7fff_ffff, 1), (0xffff, 0xffff_0001), (0x8000_8000, 0x8000_8000)] {
            let fields = |n: u64| [n & 0xffff, n >> 16];
            let [low, high] = [0, 1].map(|n| (fields(word)[n] + fields(addend)[n]) & 0xffff);
            assert_eq!(add(4, word, addend, 0x8000), high << 16 | low, "{word:#x} and {addend:#x}");
        }
    }
}
