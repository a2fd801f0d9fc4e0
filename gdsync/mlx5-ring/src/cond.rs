//! Wait conditions of CUDA stream memory operations (`cuda.h`: `CUstreamWaitValue_flags`).

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

    /// The value nearest to `word` that satisfies the condition, if any.
    pub fn satisfy32(self, word: u32, value: u32) -> Option<u32> {
        let lowest = |bits: u32| bits & bits.wrapping_neg();
        let to = match self {
            _ if self.holds32(word, value) => word,
            Cond::Geq | Cond::Eq => value,
            Cond::And => word | lowest(value),
            Cond::Nor => word & !lowest(!value),
        };
        self.holds32(to, value).then_some(to)
    }

    /// The 64-bit value nearest to `word` that satisfies the condition, if any.
    pub fn satisfy64(self, word: u64, value: u64) -> Option<u64> {
        let lowest = |bits: u64| bits & bits.wrapping_neg();
        let to = match self {
            _ if self.holds64(word, value) => word,
            Cond::Geq | Cond::Eq => value,
            Cond::And => word | lowest(value),
            Cond::Nor => word & !lowest(!value),
        };
        self.holds64(to, value).then_some(to)
    }

    /// Whether a 32-bit word satisfies the condition.
    pub fn holds32(self, word: u32, value: u32) -> bool {
        match self {
            Cond::Geq => word.wrapping_sub(value).cast_signed() >= 0,
            Cond::Eq => word == value,
            Cond::And => word & value != 0,
            Cond::Nor => !(word | value) != 0,
        }
    }

    /// Whether a 64-bit word satisfies the condition.
    pub fn holds64(self, word: u64, value: u64) -> bool {
        match self {
            Cond::Geq => word.wrapping_sub(value).cast_signed() >= 0,
            Cond::Eq => word == value,
            Cond::And => word & value != 0,
            Cond::Nor => !(word | value) != 0,
        }
    }
}
