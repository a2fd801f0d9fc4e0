//! How many channels CUDA gives a process on a GPU: it spreads the streams of a context over them.

use std::ops::RangeInclusive;

use crate::env::variable;

/// What says how many, before CUDA is initialised.
pub const VARIABLE: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// What it may say.
const TAKEN: RangeInclusive<usize> = 1..=32;
/// Where it says nothing of the kind.
pub const USUAL: usize = 8;

/// The channels that a value of the variable asks for, if CUDA takes it.
pub fn asked(value: &str) -> Option<usize> {
    value.trim().parse().ok().filter(|asked| TAKEN.contains(asked))
}

/// Those of this process.
pub fn here() -> usize {
    variable(VARIABLE).and_then(|value| asked(&value)).unwrap_or(USUAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuda_takes_one_to_thirty_two() {
        let values = ["1", "32", " 8 ", "0", "33", "-1", "many", ""];
        assert_eq!(values.map(asked), [Some(1), Some(32), Some(8), None, None, None, None, None]);
    }
}
