//! Fields of the firmware's commands: `DEVX_SET` and `DEVX_GET`, by offset instead of name.
//!
//! Offsets count bits from the most significant bit of the first big-endian word, as the manual does.

/// Writes the low `width` bits of `value` at bit `offset`.
///
/// # Panics
/// If the field leaves its word of 32 bits, or the command.
pub fn devx_set(command: &mut [u8], offset: usize, width: u32, value: u32) {
    let (word, shift, mask) = field(offset, width);
    let bytes: &mut [u8; 4] = command[word..].first_chunk_mut().expect("a field inside the command");
    let others = u32::from_be_bytes(*bytes) & !(mask << shift);
    *bytes = (others | (value & mask) << shift).to_be_bytes();
}

/// Reads `width` bits at bit `offset`.
///
/// # Panics
/// If the field leaves its word of 32 bits, or the command.
#[must_use]
pub fn devx_get(command: &[u8], offset: usize, width: u32) -> u32 {
    let (word, shift, mask) = field(offset, width);
    let bytes: &[u8; 4] = command[word..].first_chunk().expect("a field inside the command");
    u32::from_be_bytes(*bytes) >> shift & mask
}

/// Writes the 64 bits at bit `offset`.
///
/// # Panics
/// If the field is not aligned, or leaves the command.
pub fn devx_set64(command: &mut [u8], offset: usize, value: u64) {
    assert!(offset.is_multiple_of(64), "a field of 64 bits at bit {offset}");
    let bytes = command[offset / 8..].first_chunk_mut().expect("a field inside the command");
    *bytes = value.to_be_bytes();
}

/// Reads the 64 bits at bit `offset`.
///
/// # Panics
/// If the field is not aligned, or leaves the command.
#[must_use]
pub fn devx_get64(command: &[u8], offset: usize) -> u64 {
    assert!(offset.is_multiple_of(64), "a field of 64 bits at bit {offset}");
    u64::from_be_bytes(*command[offset / 8..].first_chunk().expect("a field inside the command"))
}

/// The byte of the field's word, how far it is from the right, and its mask there.
fn field(offset: usize, width: u32) -> (usize, u32, u32) {
    let begin = u32::try_from(offset % 32).unwrap_or_default();
    assert!((1..=32 - begin).contains(&width), "a field of {width} bits at bit {offset}");
    (offset / 32 * 4, 32 - begin - width, u32::MAX >> (32 - width))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_lie_where_the_manual_says() {
        let mut command = [0u8; 16];
        devx_set(&mut command, 0x00, 16, 0x400);
        devx_set(&mut command, 0x2e, 1, 1);
        devx_set(&mut command, 0x28, 6, 0xff);
        devx_set64(&mut command, 0x40, 0x0102_0304_0506_0708);
        assert_eq!(command, [4, 0, 0, 0, 0, 0xfe, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(devx_get(&command, 0, 16), 0x400);
        assert_eq!(devx_get(&command, 0x28, 8), 0xfe);
        assert_eq!(devx_get(&command, 0x60, 32), 0x0506_0708);
        assert_eq!(devx_get64(&command, 0x40), 0x0102_0304_0506_0708);
        // What lies beside a field stays.
        devx_set(&mut command, 0x2c, 2, 0);
        assert_eq!(devx_get(&command, 0x20, 32), 0x00f2_0000);
    }
}
