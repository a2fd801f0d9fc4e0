//! Naturally aligned accesses of up to 8 bytes: the ends of stores, and whole copies where nothing else works.

/// Which side of a copy is the device.
pub(super) trait Direction {
    /// Address of the device side.
    fn device(dst: *mut u8, src: *const u8) -> usize;

    /// Copies one `T` in one access of the device.
    ///
    /// # Safety
    /// `src` must be valid for reads and `dst` for writes of a `T`. The device side must be aligned to it.
    unsafe fn word<T: Copy>(dst: *mut u8, src: *const u8);
}

/// From host memory to the device.
pub(super) enum ToDevice {}

impl Direction for ToDevice {
    #[inline]
    fn device(dst: *mut u8, _: *const u8) -> usize {
        dst.addr()
    }

    #[inline]
    unsafe fn word<T: Copy>(dst: *mut u8, src: *const u8) {
        // SAFETY: the caller guarantees that `src` is readable for a `T`.
        let value = unsafe { src.cast::<T>().read_unaligned() };
        // SAFETY: the caller guarantees that `dst` is writable for a `T`, and aligned.
        unsafe { dst.cast::<T>().write_volatile(value) };
    }
}

/// From the device to host memory.
pub(super) enum FromDevice {}

impl Direction for FromDevice {
    #[inline]
    fn device(_: *mut u8, src: *const u8) -> usize {
        src.addr()
    }

    #[inline]
    unsafe fn word<T: Copy>(dst: *mut u8, src: *const u8) {
        // SAFETY: the caller guarantees that `src` is readable for a `T`, and aligned.
        let value = unsafe { src.cast::<T>().read_volatile() };
        // SAFETY: the caller guarantees that `dst` is writable for a `T`.
        unsafe { dst.cast::<T>().write_unaligned(value) };
    }
}

/// Copies exactly one naturally aligned word, or returns false and does nothing.
///
/// # Safety
/// `src` must be valid for reads and `dst` for writes of `len` bytes.
#[inline]
pub(super) unsafe fn word<D: Direction>(dst: *mut u8, src: *const u8, len: usize) -> bool {
    let aligned = |size: usize| D::device(dst, src).is_multiple_of(size);
    match len {
        // SAFETY: the caller guarantees both ranges, and the alignment was checked.
        4 if aligned(4) => unsafe { D::word::<u32>(dst, src) },
        // SAFETY: the caller guarantees both ranges, and the alignment was checked.
        8 if aligned(8) => unsafe { D::word::<u64>(dst, src) },
        // SAFETY: the caller guarantees both ranges, and the alignment was checked.
        2 if aligned(2) => unsafe { D::word::<u16>(dst, src) },
        // SAFETY: the caller guarantees both ranges; bytes are always aligned.
        1 => unsafe { D::word::<u8>(dst, src) },
        _ => return false,
    }
    true
}

/// Copies the bytes before the first 16-byte boundary of the device, and returns how many. Where the range ends
/// first, what is left is shorter than 16 bytes and the device aligned for [`tail`].
///
/// # Safety
/// `src` must be valid for reads and `dst` for writes of `len` bytes.
#[inline]
pub(super) unsafe fn head<D: Direction>(dst: *mut u8, src: *const u8, len: usize) -> usize {
    let device = D::device(dst, src);
    let mut at = 0;
    // Each step clears the lowest set bit of the address. A step that does not fit ends them: no larger one does.
    macro_rules! step {
        ($word:ty) => {
            if (device + at) & size_of::<$word>() != 0 && len - at >= size_of::<$word>() {
                // SAFETY: the word lies in the range; the smaller steps have aligned the device.
                unsafe { D::word::<$word>(dst.wrapping_add(at), src.wrapping_add(at)) };
                at += size_of::<$word>();
            }
        };
    }
    step!(u8);
    step!(u16);
    step!(u32);
    step!(u64);
    at
}

/// Copies what remains after `at`, where fewer than 16 bytes do.
///
/// # Safety
/// `src` must be valid for reads and `dst` for writes of `len` bytes. Fewer than 16 bytes must be left after `at`,
/// and the device there aligned to the greatest power of two in their number.
#[inline]
pub(super) unsafe fn tail<D: Direction>(dst: *mut u8, src: *const u8, mut at: usize, len: usize) {
    macro_rules! step {
        ($word:ty) => {
            if (len - at) & size_of::<$word>() != 0 {
                // SAFETY: the word lies in the range; from greatest to smallest, all are aligned.
                unsafe { D::word::<$word>(dst.wrapping_add(at), src.wrapping_add(at)) };
                at += size_of::<$word>();
            }
        };
    }
    step!(u64);
    step!(u32);
    step!(u16);
    step!(u8);
    debug_assert_eq!(at, len);
}

/// Copies the whole range in words.
///
/// # Safety
/// `src` must be valid for reads and `dst` for writes of `len` bytes, and they must not overlap.
pub(super) unsafe fn copy<D: Direction>(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: the caller guarantees the ranges.
    let mut at = unsafe { head::<D>(dst, src, len) };
    while len - at >= 8 {
        // SAFETY: the word lies in the range; the head has aligned the device to 16.
        unsafe { D::word::<u64>(dst.wrapping_add(at), src.wrapping_add(at)) };
        at += 8;
    }
    // SAFETY: the caller guarantees the ranges; fewer than 8 bytes are left.
    unsafe { tail::<D>(dst, src, at, len) };
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    thread_local! {
        static ACCESSES: RefCell<Vec<(usize, usize)>> = const { RefCell::new(Vec::new()) };
    }

    /// Records accesses of the device, `(address, size)`, and makes none.
    enum Recorded {}

    impl Direction for Recorded {
        fn device(dst: *mut u8, _: *const u8) -> usize {
            dst.addr()
        }

        unsafe fn word<T: Copy>(dst: *mut u8, _: *const u8) {
            ACCESSES.with_borrow_mut(|accesses| accesses.push((dst.addr(), size_of::<T>())));
        }
    }

    fn recorded(copy: impl FnOnce()) -> Vec<(usize, usize)> {
        copy();
        ACCESSES.take()
    }

    #[test]
    fn words_cover_the_range_once_upwards_and_aligned() {
        for start in 64..128 {
            for len in 0..100 {
                let dst = std::ptr::without_provenance_mut(start);
                // SAFETY: `Recorded` accesses no memory.
                let accesses = recorded(|| unsafe { copy::<Recorded>(dst, std::ptr::null(), len) });
                let mut at = start;
                for &(address, size) in &accesses {
                    assert_eq!(address, at, "{len} bytes at {start}: {accesses:?}");
                    assert!(address.is_multiple_of(size), "{len} bytes at {start}: {accesses:?}");
                    at += size;
                }
                assert_eq!(at, start + len, "{accesses:?}");
                let aligned = matches!(len, 1 | 2 | 4 | 8) && start.is_multiple_of(len);
                assert!(!aligned || accesses.len() == 1, "{len} bytes at {start}: {accesses:?}");
            }
        }
    }

    #[test]
    fn the_head_reaches_the_boundary_or_leaves_less_than_a_block() {
        for start in 64..96 {
            for len in 0..64 {
                let dst = std::ptr::without_provenance_mut(start);
                let mut at = 0;
                // SAFETY: `Recorded` accesses no memory.
                recorded(|| at = unsafe { head::<Recorded>(dst, std::ptr::null(), len) });
                assert!((start + at).is_multiple_of(16) || len - at < 16, "{len} bytes at {start}: {at}");
                assert!(at < 16);
            }
        }
    }

    #[test]
    fn only_an_aligned_word_is_taken_as_one() {
        for start in 64..80 {
            for len in 0..20 {
                let dst = std::ptr::without_provenance_mut(start);
                let mut taken = false;
                // SAFETY: `Recorded` accesses no memory.
                let accesses = recorded(|| taken = unsafe { word::<Recorded>(dst, std::ptr::null(), len) });
                assert_eq!(taken, matches!(len, 1 | 2 | 4 | 8) && start.is_multiple_of(len));
                assert_eq!(accesses, if taken { vec![(start, len)] } else { vec![] });
            }
        }
    }
}
