//! Shared by all vector routines: lines of 64 bytes, and the parts of lines at the ends of a range.
//!
//! Each routine supplies the copies of one block and one line by its instructions; the device side is aligned to their size.

use std::mem::MaybeUninit;

use super::scalar::{Direction, FromDevice, ToDevice, head, tail};

/// Bytes in a line: the most that a core reads or writes over PCIe at once, and its unit of write combining.
const LINE: usize = 64;
/// Bytes in a block, the narrowest vector.
const BLOCK: usize = 16;

/// Copies `len` bytes from `src` to `dst`.
///
/// # Safety
/// Both must be valid for what the promises of the module above allow.
pub(super) type CopyFn = unsafe fn(dst: *mut u8, src: *const u8, len: usize);

/// Copies one block or one line.
///
/// # Safety
/// `src` must be valid for reads and `dst` for writes of so many bytes, and the device side aligned to them. This CPU must have the
/// instructions.
pub(super) type CopyOne = unsafe fn(dst: *mut u8, src: *const u8);

/// Copies a range: whole lines, and a [part](Parts::part) of a line at either end.
///
/// # Safety
/// As for [`Parts::part`], and this CPU must have the instructions of `line`.
#[inline(always)]
pub(super) unsafe fn copy<D: Parts>(dst: *mut u8, src: *const u8, len: usize, block: CopyOne, line: CopyOne) {
    let mut at = len.min(D::device(dst, src).wrapping_neg() % LINE);
    if at > 0 {
        // SAFETY: the caller guarantees the ranges; the first line extends at least that far.
        unsafe { D::part(dst, src, at, block) };
    }
    while len - at >= 4 * LINE {
        for _ in 0..4 {
            // SAFETY: the line lies in the range; the device is aligned to 64 from the first part on.
            unsafe { line(dst.wrapping_add(at), src.wrapping_add(at)) };
            at += LINE;
        }
    }
    while len - at >= LINE {
        // SAFETY: the line lies in the range; the device is aligned to 64 from the first part on.
        unsafe { line(dst.wrapping_add(at), src.wrapping_add(at)) };
        at += LINE;
    }
    if at < len {
        // SAFETY: the caller guarantees the ranges; a line begins here, and less than one is left.
        unsafe { D::part(dst.wrapping_add(at), src.wrapping_add(at), len - at, block) };
    }
}

/// How a direction copies less than a line.
pub(super) trait Parts: Direction {
    /// Copies `len` bytes that lie in one line of the device.
    ///
    /// # Safety
    /// `src` must be valid for reads and `dst` for writes of `len` bytes, and they must not overlap. If `src` is the
    /// device, all of the aligned blocks that the range touches must be readable. This CPU must have the instructions
    /// of `block`.
    unsafe fn part(dst: *mut u8, src: *const u8, len: usize, block: CopyOne);
}

impl Parts for ToDevice {
    /// In blocks, and in words where a block would write bytes of others.
    #[inline(always)]
    unsafe fn part(dst: *mut u8, src: *const u8, len: usize, block: CopyOne) {
        // SAFETY: the caller guarantees the ranges of `src` and `dst`.
        let mut at = unsafe { head::<Self>(dst, src, len) };
        while len - at >= BLOCK {
            // SAFETY: the block lies in the range; the head has aligned the device to 16.
            unsafe { block(dst.wrapping_add(at), src.wrapping_add(at)) };
            at += BLOCK;
        }
        // SAFETY: the caller guarantees the ranges; fewer than 16 bytes are left.
        unsafe { tail::<Self>(dst, src, at, len) };
    }
}

impl Parts for FromDevice {
    /// Loads whole blocks. Each load is a bus round trip, even of one byte, unless it follows a load of the same line: so all blocks
    /// are fetched first, then the requested bytes are copied out of them.
    #[inline(always)]
    unsafe fn part(dst: *mut u8, src: *const u8, len: usize, block: CopyOne) {
        #[repr(align(64))]
        struct Line(MaybeUninit<[u8; LINE]>);

        let mut fetched = Line(MaybeUninit::uninit());
        let bytes = fetched.0.as_mut_ptr().cast::<u8>();
        let start = src.addr() % LINE;
        let line = src.wrapping_sub(start);
        for at in (start - start % BLOCK..start + len).step_by(BLOCK) {
            // SAFETY: the range touches the block, and lies in one line, so that the block does.
            unsafe { block(bytes.wrapping_add(at), line.wrapping_add(at)) };
        }
        // SAFETY: the blocks have filled these bytes; the caller promised that `dst` takes them.
        unsafe { dst.copy_from_nonoverlapping(bytes.wrapping_add(start), len) };
    }
}

/// Defines a routine: [`copy`] with `$block` and `$line`. `$end` follows, to leave the registers as other code
/// expects them. A macro, because all of it is to be inlined into a function of the routine's target feature.
macro_rules! routine {
    ($name:ident, $direction:ty, $feature:literal, $block:ident, $line:ident, $end:expr) => {
        /// # Safety
        /// `src` must be valid for reads and `dst` for writes of `len` bytes, and they must not overlap. If `src` is
        /// the device, all of the aligned blocks of 16 bytes that the range touches must be readable.
        #[target_feature(enable = $feature)]
        unsafe fn $name(dst: *mut u8, src: *const u8, len: usize) {
            // SAFETY: the caller guarantees the ranges; this function has the feature.
            unsafe { $crate::copy::vector::copy::<$direction>(dst, src, len, $block, $line) };
            $end
        }
    };
}
pub(super) use routine;

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[repr(align(64))]
    struct Lines([u8; 8 * LINE]);

    thread_local! {
        /// Addresses and sizes of the device's side.
        static ACCESSES: RefCell<Vec<(usize, usize)>> = const { RefCell::new(Vec::new()) };
    }

    /// A [`CopyOne`] of `SIZE` bytes that records its loads.
    ///
    /// # Safety
    /// As for [`CopyOne`].
    unsafe fn recorded<const SIZE: usize>(dst: *mut u8, src: *const u8) {
        ACCESSES.with_borrow_mut(|accesses| accesses.push((src.addr(), SIZE)));
        // SAFETY: the caller guarantees the ranges of `src` and `dst`.
        unsafe { dst.copy_from_nonoverlapping(src, SIZE) };
    }

    /// The loads of a copy of `len` bytes from `start` on, as offset and size. All that it does is among them.
    fn loads(start: usize, len: usize) -> Vec<(usize, usize)> {
        let device = Lines(std::array::from_fn(|i| (i % 251).to_le_bytes()[0] | 1));
        let mut host = [0; 8 * LINE];
        let (dst, src) = (host[5..].as_mut_ptr(), device.0.as_ptr());
        // SAFETY: the range and its lines lie in the two arrays.
        unsafe { copy::<FromDevice>(dst, src.wrapping_add(start), len, recorded::<BLOCK>, recorded::<LINE>) };
        assert_eq!(host[5..][..len], device.0[start..][..len]);
        assert!(host[..5].iter().chain(&host[5 + len..]).all(|&byte| byte == 0), "{len} bytes at {start}");
        ACCESSES.take().into_iter().map(|(address, size)| (address - src.addr(), size)).collect()
    }

    #[test]
    fn blocks_that_the_range_touches_are_loaded_once_upwards_and_nothing_else() {
        for start in 0..2 * LINE {
            for len in 0..5 * LINE {
                let accesses = loads(start, len);
                let mut at = start - start % BLOCK;
                for &(offset, size) in &accesses {
                    assert_eq!(offset, at, "{len} bytes at {start}: {accesses:?}");
                    assert!(offset.is_multiple_of(size), "{len} bytes at {start}: {accesses:?}");
                    at += size;
                }
                let end =
                    if len == 0 { start - start % BLOCK } else { (start + len).next_multiple_of(BLOCK) };
                assert_eq!(at, end, "{len} bytes at {start}: {accesses:?}");
            }
        }
    }

    #[test]
    fn loads_are_few() {
        let count = |start, len| loads(start, len).len();
        assert_eq!(count(3, 100), 7);
        assert_eq!(count(3, 5), 1);
        assert_eq!(count(20, 12), 1);
        assert_eq!(count(12, 8), 2, "over a boundary");
        assert_eq!(count(60, 3 * LINE), 7, "a block, two lines, four blocks");
    }
}
