//! Copies between memory of either kind and the CPU.

use gdrcopy::copy::{Copier, load_fence, store_fence};

use super::Reach;

/// Copies from host memory to memory of either kind, with a fence behind what goes through a mapping.
///
/// # Safety
/// Both ranges must be valid for `len` bytes, `dst` for writing. Only host memory may overlap.
#[inline]
pub(super) unsafe fn store(reach: Reach, src: *const u8, dst: *mut u8, len: usize) {
    match reach {
        // SAFETY: what the caller promised.
        Reach::Host | Reach::Engine => unsafe { copy(src, dst, len) },
        Reach::Mapped(kind) => {
            // SAFETY: what the caller promised; the destination is a mapping of this kind.
            unsafe { Copier::best().to_device(kind, dst, src, len) };
            store_fence(kind);
        }
    }
}

/// Copies from memory of either kind to host memory, with fences around what comes through a mapping.
///
/// # Safety
/// As [`store`].
#[inline]
pub(super) unsafe fn load(reach: Reach, src: *const u8, dst: *mut u8, len: usize) {
    match reach {
        // SAFETY: what the caller promised.
        Reach::Host | Reach::Engine => unsafe { copy(src, dst, len) },
        Reach::Mapped(kind) => {
            // After the word that announced the bytes: loads from a mapping are speculated.
            load_fence(kind);
            // SAFETY: what the caller promised; the source is a mapping of this kind.
            unsafe { Copier::best().from_device(kind, dst, src, len) };
            load_fence(kind);
        }
    }
}

/// One volatile access for a naturally aligned word, `memmove` otherwise: a device that races with
/// it sees words whole, and longer copies in any order.
///
/// # Safety
/// Both ranges must be valid for `len` bytes, `dst` for writing.
unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    if len == 8 && src.cast::<u64>().is_aligned() && dst.cast::<u64>().is_aligned() {
        // SAFETY: valid by contract, aligned by the test above.
        let word = unsafe { src.cast::<u64>().read_volatile() };
        // SAFETY: as above.
        unsafe { dst.cast::<u64>().write_volatile(word) };
    } else if len == 4 && src.cast::<u32>().is_aligned() && dst.cast::<u32>().is_aligned() {
        // SAFETY: valid by contract, aligned by the test above.
        let word = unsafe { src.cast::<u32>().read_volatile() };
        // SAFETY: as above.
        unsafe { dst.cast::<u32>().write_volatile(word) };
    } else {
        // SAFETY: valid by contract; `copy` allows overlap.
        unsafe { std::ptr::copy(src, dst, len) };
    }
}
