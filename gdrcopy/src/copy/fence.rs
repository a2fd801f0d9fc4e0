//! Fences: in which order this thread's accesses leave and reach the core.
//!
//! They say nothing about a kernel that is already running on the GPU: it may see data late or out of order unless
//! it acquires it by itself. Work submitted to a stream after the fence sees everything before it.

use std::sync::atomic::{Ordering, compiler_fence};

use crate::MappingType;

/// Everything this thread stored to mappings of type `kind` before is on its way before any of its later stores.
///
/// Needed between data and a flag, a doorbell, or a message to another thread that speaks of the data.
///
/// - x86-64: `sfence`, which also empties the write-combining buffers. Stores to cached memory are in order anyway.
/// - aarch64: `dsb st` for write combining, since a mere `dmb` orders the stores but may leave the last ones in a
///   gathering buffer; it waits until they have been taken. `dmb oshst` otherwise: the GPU is outside the inner
///   shareable domain.
#[inline]
pub fn store_fence(kind: MappingType) {
    imp::store(kind);
    compiler_fence(Ordering::SeqCst);
}

/// No load after this one is served before any load of this thread from mappings of type `kind` that came before,
/// nor from what those had fetched.
///
/// Needed between a flag read from the device and the data it announces: a streaming load of 16 bytes may fetch 64,
/// and a load of the other 48 be served from them.
///
/// - x86-64: `mfence` for write combining, which is what drops the buffers of streaming loads; loads of cached
///   memory are in order anyway.
/// - aarch64: `dmb oshld`.
#[inline]
pub fn load_fence(kind: MappingType) {
    imp::load(kind);
    compiler_fence(Ordering::SeqCst);
}

/// All accesses of this thread, of any mapping or memory, come before all later ones.
///
/// Needed where a load must not pass an earlier store, or mappings of several types are in play. x86-64: `mfence`;
/// aarch64: `dsb sy`.
#[inline]
pub fn full_fence() {
    imp::full();
    compiler_fence(Ordering::SeqCst);
}

#[cfg(target_arch = "x86_64")]
mod imp {
    use std::arch::x86_64::{_mm_mfence, _mm_sfence};

    use crate::MappingType;

    #[inline]
    pub(super) fn store(kind: MappingType) {
        if kind != MappingType::Cached {
            // SAFETY: SSE2 is part of x86-64.
            unsafe { _mm_sfence() };
        }
    }

    #[inline]
    pub(super) fn load(kind: MappingType) {
        if kind != MappingType::Cached {
            // SAFETY: as above.
            unsafe { _mm_mfence() };
        }
    }

    #[inline]
    pub(super) fn full() {
        // SAFETY: as above.
        unsafe { _mm_mfence() };
    }
}

#[cfg(target_arch = "aarch64")]
mod imp {
    use std::arch::asm;

    use crate::MappingType;

    #[inline]
    pub(super) fn store(kind: MappingType) {
        if kind == MappingType::WriteCombining {
            // SAFETY: a barrier has no operands and changes no register.
            unsafe { asm!("dsb st", options(nostack, preserves_flags)) };
        } else {
            // SAFETY: as above.
            unsafe { asm!("dmb oshst", options(nostack, preserves_flags)) };
        }
    }

    #[inline]
    pub(super) fn load(_: MappingType) {
        // SAFETY: as above.
        unsafe { asm!("dmb oshld", options(nostack, preserves_flags)) };
    }

    #[inline]
    pub(super) fn full() {
        // SAFETY: as above.
        unsafe { asm!("dsb sy", options(nostack, preserves_flags)) };
    }
}
