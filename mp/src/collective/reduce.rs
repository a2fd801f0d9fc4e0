//! Reductions of values, with the same bits on every rank, whatever the order of the two operands.

use std::cmp::Ordering;
use std::fmt;

/// How an allreduce combines values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reduction {
    /// The sum; integers wrap around. Its rounding depends on the number of ranks.
    Sum,
    /// The minimum; -0.0 is less than 0.0.
    Min,
    /// The maximum; 0.0 is greater than -0.0.
    Max,
}

/// Values of an allreduce, in memory as this machine writes them. A NaN makes the result NaN.
///
/// Sealed: `f32`, `f64`, `i32`, `i64` and `u64` are numbers.
pub trait Number: sealed::Sealed + Copy + fmt::Debug + Send + 'static {}

pub(super) mod sealed {
    pub trait Sealed: Sized {
        /// Its index in [`ELEMENTS`](super::ELEMENTS).
        const ELEMENT: u8;
        /// Combines two slices of equal length, a whole number of values each, into the first.
        fn combine(into: &mut [u8], with: &[u8], how: super::Reduction);
    }
}

/// The names of all numbers, by their index on the wire.
pub(super) const ELEMENTS: [&str; 5] = ["f32", "f64", "i32", "i64", "u64"];

macro_rules! number {
    ($type:ty, $element:expr, $sum:expr, $min:expr, $max:expr) => {
        impl Number for $type {}
        impl sealed::Sealed for $type {
            const ELEMENT: u8 = $element;
            fn combine(into: &mut [u8], with: &[u8], how: Reduction) {
                let operation: fn($type, $type) -> $type = match how {
                    Reduction::Sum => $sum,
                    Reduction::Min => $min,
                    Reduction::Max => $max,
                };
                let (into, _) = into.as_chunks_mut::<{ size_of::<$type>() }>();
                let (with, _) = with.as_chunks::<{ size_of::<$type>() }>();
                for (a, b) in into.iter_mut().zip(with) {
                    *a = operation(<$type>::from_ne_bytes(*a), <$type>::from_ne_bytes(*b)).to_ne_bytes();
                }
            }
        }
    };
    (float $type:ty, $element:expr) => {
        number!(
            $type,
            $element,
            // One NaN for all: the bits that an addition keeps depend on the order of its operands.
            |a, b| if (a + b).is_nan() { <$type>::NAN } else { a + b },
            |a, b| match a.total_cmp(&b) {
                _ if a.is_nan() || b.is_nan() => <$type>::NAN,
                Ordering::Greater => b,
                _ => a,
            },
            |a, b| match a.total_cmp(&b) {
                _ if a.is_nan() || b.is_nan() => <$type>::NAN,
                Ordering::Less => b,
                _ => a,
            }
        );
    };
    (integer $type:ty, $element:expr) => {
        number!($type, $element, <$type>::wrapping_add, <$type as Ord>::min, <$type as Ord>::max);
    };
}

number!(float f32, 0);
number!(float f64, 1);
number!(integer i32, 2);
number!(integer i64, 3);
number!(integer u64, 4);

#[cfg(test)]
mod tests {
    use super::sealed::Sealed;
    use super::*;

    fn f64s(a: f64, b: f64, how: Reduction) -> u64 {
        let mut into = a.to_ne_bytes();
        f64::combine(&mut into, &b.to_ne_bytes(), how);
        u64::from_ne_bytes(into)
    }

    #[test]
    fn the_order_of_the_operands_changes_no_bit() {
        let odd_nan = f64::from_bits(f64::NAN.to_bits() | 7);
        let values =
            [0.0, -0.0, 1.5, -1.5, f64::MAX, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, -odd_nan, odd_nan];
        for how in [Reduction::Sum, Reduction::Min, Reduction::Max] {
            for a in values {
                for b in values {
                    assert_eq!(f64s(a, b, how), f64s(b, a, how), "{a} {b} {how:?}");
                    assert_eq!(
                        f64::from_bits(f64s(a, b, how)).is_nan(),
                        (a + b).is_nan() && how == Reduction::Sum || a.is_nan() || b.is_nan()
                    );
                }
            }
        }
        assert_eq!(f64s(0.0, -0.0, Reduction::Min), (-0.0_f64).to_bits());
        assert_eq!(f64s(-0.0, 0.0, Reduction::Max), 0.0_f64.to_bits());
        assert_eq!(f64s(1.5, -2.0, Reduction::Sum), (-0.5_f64).to_bits());
    }

    #[test]
    fn integers_wrap_and_every_value_is_combined() {
        let mut into: Vec<u8> = [i32::MAX, -5, 7].iter().flat_map(|v| v.to_ne_bytes()).collect();
        let with: Vec<u8> = [1, 3, -9].iter().flat_map(|v: &i32| v.to_ne_bytes()).collect();
        i32::combine(&mut into, &with, Reduction::Sum);
        let values: Vec<_> = into.as_chunks().0.iter().map(|v| i32::from_ne_bytes(*v)).collect();
        assert_eq!(values, [i32::MIN, -2, -2]);
        i32::combine(&mut into, &with, Reduction::Max);
        let values: Vec<_> = into.as_chunks().0.iter().map(|v| i32::from_ne_bytes(*v)).collect();
        assert_eq!(values, [1, 3, -2]);
    }
}
