//! Payload that proves itself: every message of every sender has bytes of its own.

use gdsync::memory::Memory;

/// The bytes of one message. A stale, short, torn or misplaced message does not match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern(u64);

/// An odd number whose multiples differ in all bytes (2^64 over the golden ratio).
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

impl Pattern {
    /// The bytes of message `number` of `sender`.
    pub fn new(sender: u64, number: u64) -> Self {
        let mut seed = (sender << 56 ^ number).wrapping_add(1).wrapping_mul(STEP);
        seed ^= seed >> 29;
        Self(seed.wrapping_mul(0xbf58_476d_1ce4_e5b9))
    }

    /// What a kernel needs to make the same bytes: word `i` of 8 bytes is `w ^ w >> 32`, little-endian, with
    /// `w = seed + (i + 1) * 0x9e37_79b9_7f4a_7c15`, wrapping.
    pub fn seed(self) -> u64 {
        self.0
    }

    /// The message, or with `flip` what its bytes never are.
    fn bytes(self, len: usize, flip: u64) -> Vec<u8> {
        let mut word = self.0;
        let mut out = Vec::with_capacity(len.next_multiple_of(8));
        while out.len() < len {
            word = word.wrapping_add(STEP);
            out.extend_from_slice(&(word ^ word >> 32 ^ flip).to_le_bytes());
        }
        out.truncate(len);
        out
    }

    /// Writes the message.
    ///
    /// # Errors
    /// [`gdsync::Error::OutOfBounds`].
    pub fn fill(self, memory: &Memory, offset: usize, len: usize) -> gdsync::Result<()> {
        memory.write(offset, &self.bytes(len, 0))
    }

    /// Makes sure that the message is not there yet: every byte is made different from what is expected.
    ///
    /// # Errors
    /// [`gdsync::Error::OutOfBounds`].
    pub fn spoil(self, memory: &Memory, offset: usize, len: usize) -> gdsync::Result<()> {
        memory.write(offset, &self.bytes(len, u64::MAX))
    }

    /// Whether the message is there, every byte of it.
    ///
    /// # Errors
    /// [`gdsync::Error::OutOfBounds`].
    pub fn check(self, memory: &Memory, offset: usize, len: usize) -> gdsync::Result<bool> {
        let mut found = vec![0; len];
        memory.read(offset, &mut found)?;
        Ok(found == self.bytes(len, 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_recognised_and_nothing_else_is() {
        let memory = Memory::alloc(1000).unwrap();
        let pattern = Pattern::new(1, 7);
        pattern.fill(&memory, 10, 900).unwrap();
        assert!(pattern.check(&memory, 10, 900).unwrap());
        assert!(!pattern.check(&memory, 11, 899).unwrap(), "moved by a byte");
        assert!(!Pattern::new(1, 8).check(&memory, 10, 900).unwrap(), "another message");
        assert!(!Pattern::new(0, 7).check(&memory, 10, 900).unwrap(), "another sender");
        for at in [10, 500, 909] {
            let mut byte = [0];
            memory.read(at, &mut byte).unwrap();
            memory.write(at, &[byte[0] ^ 1]).unwrap();
            assert!(!pattern.check(&memory, 10, 900).unwrap(), "one bit of byte {at}");
            memory.write(at, &byte).unwrap();
        }
        for len in 1..20 {
            pattern.spoil(&memory, 10, len).unwrap();
            assert!(!pattern.check(&memory, 10, len).unwrap(), "spoilt, {len} bytes");
        }
    }

    #[test]
    fn words_follow_from_the_seed() {
        let pattern = Pattern::new(1, 7);
        let word = |i: u64| pattern.seed().wrapping_add((i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let words = (0..100).flat_map(|i| (word(i) ^ word(i) >> 32).to_le_bytes());
        assert!(pattern.bytes(800, 0).into_iter().eq(words));
    }

    #[test]
    fn first_bytes_differ_between_neighbours() {
        let first = |n| Pattern::new(0, n).bytes(1, 0);
        let same = (0..1000).filter(|&n| first(n) == first(n + 1)).count();
        assert!(same < 20, "a message of one byte can be told from the one before: {same} of 1000 cannot");
    }
}
