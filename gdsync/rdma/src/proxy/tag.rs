//! REMOVE

/// Identifies a request at the device (`wr_id`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tag {
    /// Slot of its queue pair, below 2^14.
    pub(super) index: usize,
    /// Changes with every connection in this slot, so that late completions do not match the next.
    pub(super) generation: u16,
    pub(super) is_receive: bool,
    /// Low bits of its number in its queue.
    pub(super) number: u32,
}

impl Tag {
    pub(super) fn to_wr_id(self) -> u64 {
        let index = (self.index as u64) << 48;
        let is_receive = u64::from(self.is_receive) << 63;
        index | is_receive | u64::from(self.generation) << 32 | u64::from(self.number)
    }

    pub(super) fn from_wr_id(wr_id: u64) -> Self {
        let [i0, i1, g0, g1, number @ ..] = wr_id.to_be_bytes();
        Self {
            index: usize::from(u16::from_be_bytes([i0 & 0x3f, i1])),
            generation: u16::from_be_bytes([g0, g1]),
            is_receive: i0 & 0x80 != 0,
            number: u32::from_be_bytes(number),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn tag_round_trip(
            index in 0usize..1 << 14, generation: u16, is_receive: bool, number: u32,
        ) {
            let tag = Tag { index, generation, is_receive, number };
            prop_assert_eq!(Tag::from_wr_id(tag.to_wr_id()), tag);
        }
    }
}
