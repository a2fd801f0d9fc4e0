//! Vector copies of x86-64.
//!
//! The accesses are written in assembly: which instruction meets the device is the point of them, and the compiler
//! must neither choose another encoding nor merge, drop or reorder them.

use std::arch::asm;
use std::arch::is_x86_feature_detected;
use std::arch::x86_64::{__cpuid, __cpuid_count, _mm_mfence, _mm_sfence, _mm256_zeroupper};

use super::Routine;
use super::scalar::{FromDevice, ToDevice};
use super::vector::{CopyFn, routine};
use crate::types::MappingType;

pub(super) fn detected(routine: Routine) -> bool {
    match routine {
        Routine::Sse2 => true,
        Routine::Sse41 => is_x86_feature_detected!("sse4.1"),
        Routine::Avx => is_x86_feature_detected!("avx"),
        Routine::Avx2 => is_x86_feature_detected!("avx2"),
        Routine::Avx512 => is_x86_feature_detected!("avx512f"),
        Routine::Scalar | Routine::Neon => false,
    }
}

/// CPUID leaf 7, ECX bit 28 (Intel SDM volume 2, CPUID). The operating system has no say in it.
pub(super) fn has_movdir64b() -> bool {
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).ecx & 1 << 28 != 0
}

/// For memory that is cached like the host's.
pub(super) const STORE_CACHED: CopyFn = store_cached;
pub(super) const LOAD_CACHED: CopyFn = load_sse2;

/// How a routine stores and loads.
pub(super) fn functions(routine: Routine) -> [Option<CopyFn>; 2] {
    match routine {
        Routine::Sse2 => [Some(store_sse2), Some(load_sse2)],
        Routine::Sse41 => [None, Some(load_sse41)],
        Routine::Avx => [Some(store_avx), Some(load_avx)],
        Routine::Avx2 => [None, Some(load_avx2)],
        Routine::Avx512 => [Some(store_avx512), Some(load_avx512)],
        Routine::Scalar | Routine::Neon => [None; 2],
    }
}

#[inline]
pub(super) fn store_fence(kind: MappingType) {
    if kind != MappingType::Cached {
        // SAFETY: SSE2 is part of x86-64.
        unsafe { _mm_sfence() };
    }
}

#[inline]
pub(super) fn load_fence(kind: MappingType) {
    if kind != MappingType::Cached {
        full_fence();
    }
}

#[inline]
pub(super) fn full_fence() {
    // SAFETY: SSE2 is part of x86-64.
    unsafe { _mm_mfence() };
}

routine!(store_cached, ToDevice, "sse2", store_cached_block, store_cached_line, ());

// The wide ones clear the upper halves of the registers behind them, or else all SSE code after them runs slower.
// The compiler does not see to that for assembly.
routine!(store_sse2, ToDevice, "sse2", store_block_sse, store_line_sse, ());
routine!(store_avx, ToDevice, "avx", store_block_avx, store_line_avx, _mm256_zeroupper());
routine!(store_avx512, ToDevice, "avx512f", store_block_avx, store_line_avx512, _mm256_zeroupper());

routine!(load_sse2, FromDevice, "sse2", load_block_sse2, load_line_sse2, ());
routine!(load_sse41, FromDevice, "sse4.1", load_block_sse41, load_line_sse41, ());
routine!(load_avx, FromDevice, "avx", load_block_avx, load_line_avx, _mm256_zeroupper());
routine!(load_avx2, FromDevice, "avx2", load_block_avx2, load_line_avx2, _mm256_zeroupper());
routine!(load_avx512, FromDevice, "avx512f", load_block_avx2, load_line_avx512, _mm256_zeroupper());

/// A copy of one to four registers: all loads, then all stores.
macro_rules! registers {
    ($name:ident, $feature:literal, $class:ident, $load:literal, $store:literal, $($register:ident $offset:literal)+) => {
        /// # Safety
        /// `src` must be valid for reads and `dst` for writes of the registers' bytes; the device side must be
        /// aligned to one register.
        #[inline]
        #[target_feature(enable = $feature)]
        unsafe fn $name(dst: *mut u8, src: *const u8) {
            // SAFETY: the caller guarantees the ranges of `src` and `dst`.
            unsafe {
                asm!(
                    $(concat!($load, " {", stringify!($register), "}, [{src} + ", $offset, "]"),)+
                    $(concat!($store, " [{dst} + ", $offset, "], {", stringify!($register), "}"),)+
                    src = in(reg) src,
                    dst = in(reg) dst,
                    $($register = out($class) _,)+
                    options(nostack, preserves_flags),
                );
            }
        }
    };
}

registers!(store_cached_block, "sse2", xmm_reg, "movdqu", "movdqa", a 0);
registers!(store_cached_line, "sse2", xmm_reg, "movdqu", "movdqa", a 0 b 16 c 32 d 48);

registers!(store_block_sse, "sse2", xmm_reg, "movdqu", "movntdq", a 0);
registers!(store_line_sse, "sse2", xmm_reg, "movdqu", "movntdq", a 0 b 16 c 32 d 48);
registers!(store_block_avx, "avx", xmm_reg, "vmovdqu", "vmovntdq", a 0);
registers!(store_line_avx, "avx", ymm_reg, "vmovdqu", "vmovntdq", a 0 b 32);
registers!(store_line_avx512, "avx512f", zmm_reg, "vmovdqu64", "vmovntdq", a 0);

registers!(load_block_sse2, "sse2", xmm_reg, "movdqa", "movdqu", a 0);
registers!(load_line_sse2, "sse2", xmm_reg, "movdqa", "movdqu", a 0 b 16 c 32 d 48);
registers!(load_block_sse41, "sse4.1", xmm_reg, "movntdqa", "movdqu", a 0);
registers!(load_line_sse41, "sse4.1", xmm_reg, "movntdqa", "movdqu", a 0 b 16 c 32 d 48);
registers!(load_block_avx, "avx", xmm_reg, "vmovdqa", "vmovdqu", a 0);
registers!(load_line_avx, "avx", ymm_reg, "vmovdqa", "vmovdqu", a 0 b 32);
registers!(load_block_avx2, "avx2", xmm_reg, "vmovntdqa", "vmovdqu", a 0);
registers!(load_line_avx2, "avx2", ymm_reg, "vmovntdqa", "vmovdqu", a 0 b 32);
registers!(load_line_avx512, "avx512f", zmm_reg, "vmovntdqa", "vmovdqu64", a 0);
