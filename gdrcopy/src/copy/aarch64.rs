//! Vector copies of aarch64, in assembly for the reason given for x86-64: the access to the device is the point.

use std::arch::asm;

use super::Routine;
use super::scalar::{FromDevice, ToDevice};
use super::vector::{CopyFn, routine};
use crate::types::MappingType;

/// NEON is part of the base architecture of Linux.
pub(super) fn detected(routine: Routine) -> bool {
    routine == Routine::Neon
}

/// An instruction of x86-64.
pub(super) fn has_movdir64b() -> bool {
    false
}

/// For memory that is cached like the host's.
pub(super) const STORE_CACHED: CopyFn = store_neon;
pub(super) const LOAD_CACHED: CopyFn = load_neon;

/// How a routine stores and loads.
pub(super) fn functions(routine: Routine) -> [Option<CopyFn>; 2] {
    match routine {
        Routine::Neon => [Some(store_neon), Some(load_neon)],
        _ => [None; 2],
    }
}

/// Makes a barrier.
macro_rules! barrier {
    ($name:literal) => {
        // SAFETY: a barrier has no operands and changes no register.
        unsafe { asm!($name, options(nostack, preserves_flags)) }
    };
}

#[inline]
pub(super) fn store_fence(kind: MappingType) {
    if kind == MappingType::WriteCombining { barrier!("dsb st") } else { barrier!("dmb oshst") }
}

#[inline]
pub(super) fn load_fence(_: MappingType) {
    barrier!("dmb oshld");
}

#[inline]
pub(super) fn full_fence() {
    barrier!("dsb sy");
}

routine!(store_neon, ToDevice, "neon", block, line, ());
routine!(load_neon, FromDevice, "neon", block, line, ());

/// # Safety
/// `src` must be valid for reads and `dst` for writes of 16 bytes.
#[inline]
unsafe fn block(dst: *mut u8, src: *const u8) {
    // SAFETY: the caller guarantees the ranges of `src` and `dst`.
    unsafe {
        asm!(
            "ldr {a:q}, [{src}]",
            "str {a:q}, [{dst}]",
            src = in(reg) src,
            dst = in(reg) dst,
            a = out(vreg) _,
            options(nostack, preserves_flags),
        );
    }
}

/// # Safety
/// `src` must be valid for reads and `dst` for writes of 64 bytes.
#[inline]
unsafe fn line(dst: *mut u8, src: *const u8) {
    // SAFETY: the caller guarantees the ranges. One instruction names four registers in sequence, so they are fixed.
    unsafe {
        asm!(
            "ld1 {{v0.16b, v1.16b, v2.16b, v3.16b}}, [{src}]",
            "st1 {{v0.16b, v1.16b, v2.16b, v3.16b}}, [{dst}]",
            src = in(reg) src,
            dst = in(reg) dst,
            out("v0") _,
            out("v1") _,
            out("v2") _,
            out("v3") _,
            options(nostack, preserves_flags),
        );
    }
}
