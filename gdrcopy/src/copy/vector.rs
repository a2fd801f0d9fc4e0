//! What all vector routines have in common: words, 16-byte blocks, lines of 64 bytes, blocks, words.

/// Bytes in a line: the most that a core reads or writes over PCIe at once, and its unit of write combining.
pub(super) const LINE: usize = 64;
/// Bytes in a block, the narrowest vector.
pub(super) const BLOCK: usize = 16;

/// Defines a routine: `$block` copies one block whose device side is aligned to 16 bytes, `$line` one line whose
/// device side is aligned to 64. `$end` follows the lines, to leave the registers as other code expects them. A
/// macro, because all three are to be inlined into a function of their own target feature.
macro_rules! routine {
    ($name:ident, $direction:ty, $feature:literal, $block:ident, $line:ident, $end:expr) => {
        /// # Safety
        /// `src` must be valid for reads and `dst` for writes of `len` bytes, and they must not overlap.
        #[target_feature(enable = $feature)]
        unsafe fn $name(dst: *mut u8, src: *const u8, len: usize) {
            use $crate::copy::scalar::{Direction, head, tail};
            use $crate::copy::vector::{BLOCK, LINE};

            // SAFETY: what the caller promised.
            let mut at = unsafe { head::<$direction>(dst, src, len) };
            let device = <$direction>::device(dst, src);
            while len - at >= BLOCK && !(device + at).is_multiple_of(LINE) {
                // SAFETY: the block lies in the range; the head has aligned the device to 16.
                unsafe { $block(dst.wrapping_add(at), src.wrapping_add(at)) };
                at += BLOCK;
            }
            if len - at >= LINE {
                while len - at >= 4 * LINE {
                    for _ in 0..4 {
                        // SAFETY: the line lies in the range; the blocks have aligned the device to 64.
                        unsafe { $line(dst.wrapping_add(at), src.wrapping_add(at)) };
                        at += LINE;
                    }
                }
                while len - at >= LINE {
                    // SAFETY: as above.
                    unsafe { $line(dst.wrapping_add(at), src.wrapping_add(at)) };
                    at += LINE;
                }
                $end
            }
            while len - at >= BLOCK {
                // SAFETY: the block lies in the range; the device is aligned to 64 here.
                unsafe { $block(dst.wrapping_add(at), src.wrapping_add(at)) };
                at += BLOCK;
            }
            // SAFETY: what the caller promised; fewer than 16 bytes are left.
            unsafe { tail::<$direction>(dst, src, at, len) };
        }
    };
}
pub(super) use routine;
