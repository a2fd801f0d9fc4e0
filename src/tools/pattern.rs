//! Bytes that prove that a copy brought them, and the comparison that finds where it did not.

/// `len` bytes that differ between seeds, at any offset and in any order of the words.
pub(super) fn pattern(seed: u32, len: usize) -> Vec<u8> {
    let mut state = u64::from(seed).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut bytes = Vec::with_capacity(len.next_multiple_of(8));
    while bytes.len() < len {
        // xorshift64, never 0 as the seed is not.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// What a comparison found.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what}: {wrong} of {len} bytes are wrong, the first at offset {first}: {found:#04x} instead of {expected:#04x}"
)]
pub(super) struct Mismatch {
    what: String,
    wrong: usize,
    len: usize,
    first: usize,
    found: u8,
    expected: u8,
}

/// Compares every byte.
pub(super) fn compare(what: &str, expected: &[u8], found: &[u8]) -> Result<(), Mismatch> {
    assert_eq!(expected.len(), found.len(), "the tools compare buffers of one length");
    if expected == found {
        return Ok(());
    }
    let mut wrong = expected.iter().zip(found).enumerate().filter(|(_, (expected, found))| expected != found);
    let (first, (&expected_byte, &found_byte)) = wrong.next().expect("they are not equal");
    let (what, wrong, len) = (what.to_owned(), wrong.count() + 1, expected.len());
    Err(Mismatch { what, wrong, len, first, found: found_byte, expected: expected_byte })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_bit_anywhere_is_found() {
        for len in [1, 7, 8, 9, 64, 1000] {
            let good = pattern(1, len);
            assert_eq!(good.len(), len);
            assert_eq!(compare("same", &good, &good.clone()), Ok(()));
            for at in 0..len {
                let mut bad = good.clone();
                bad[at] ^= 0x80;
                let error = compare("flipped", &good, &bad).unwrap_err();
                assert_eq!((error.first, error.wrong, error.len), (at, 1, len));
            }
        }
        let error = compare("all", &[0; 3], &[1; 3]).unwrap_err();
        let message = "all: 3 of 3 bytes are wrong, the first at offset 0: 0x01 instead of 0x00";
        assert_eq!(error.to_string(), message);
    }

    #[test]
    fn stale_and_shifted_data_is_found() {
        let good = pattern(1, 4096);
        assert!(compare("stale", &good, &pattern(2, 4096)).is_err());
        for shift in [1, 4, 8, 64, 2048] {
            assert!(compare("shifted", &good[shift..], &good[..4096 - shift]).is_err());
        }
    }
}
