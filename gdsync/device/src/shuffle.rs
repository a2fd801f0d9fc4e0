//! Numbers of queue pairs and memory keys that cannot be guessed.

use super::gid;
use crate::error::Result;

/// A random one-to-one map of `BITS`-bit numbers. Whoever does not see its results cannot tell which numbers an HCA has given.
#[derive(Clone, Copy, Debug)]
pub struct Shuffle<const BITS: u32> {
    /// Odd, so that it has an inverse modulo a power of two.
    factor: u32,
    inverse: u32,
    offset: u32,
}

impl<const BITS: u32> Default for Shuffle<BITS> {
    /// Each number is itself.
    fn default() -> Self {
        Self { factor: 1, inverse: 1, offset: 0 }
    }
}

impl<const BITS: u32> Shuffle<BITS> {
    const MASK: u32 = u32::MAX >> (32 - BITS);

    /// A map drawn at random.
    ///
    /// # Errors
    /// [`Error::Sys`](crate::Error::Sys) where the system has no random numbers.
    pub fn random() -> Result<Self> {
        let [a, b] = *gid::random::<8>()?.as_chunks::<4>().0 else {
            unreachable!("eight bytes are two chunks")
        };
        let factor = u32::from_ne_bytes(a) | 1;
        // Newton's iteration: an odd number is its own inverse modulo 8, and each step doubles the bits that are right.
        let inverse = (0..4)
            .fold(factor, |inverse, _| inverse.wrapping_mul(2u32.wrapping_sub(factor.wrapping_mul(inverse))));
        Ok(Self { factor, inverse, offset: u32::from_ne_bytes(b) })
    }

    /// The number that stands for `number`.
    pub fn hide(self, number: u32) -> u32 {
        number.wrapping_mul(self.factor).wrapping_add(self.offset) & Self::MASK
    }

    /// The number that `hidden` stands for.
    #[inline]
    pub fn find(self, hidden: u32) -> u32 {
        hidden.wrapping_sub(self.offset).wrapping_mul(self.inverse) & Self::MASK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_one_to_one<const BITS: u32>() {
        let shuffle = Shuffle::<BITS>::random().unwrap();
        for number in (0..1 << 12).chain([Shuffle::<BITS>::MASK]) {
            let hidden = shuffle.hide(number);
            assert!(hidden <= Shuffle::<BITS>::MASK);
            assert_eq!(shuffle.find(hidden), number, "{shuffle:?}");
        }
    }

    #[test]
    fn each_number_is_found_again() {
        for _ in 0..100 {
            is_one_to_one::<24>();
            is_one_to_one::<32>();
        }
    }

    #[test]
    fn no_two_maps_are_the_same() {
        let first: Vec<u32> = (0..8).map(|_| Shuffle::<24>::random().unwrap().hide(0)).collect();
        assert!(first.iter().any(|number| *number != first[0]), "{first:?}");
    }
}
