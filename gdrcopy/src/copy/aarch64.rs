//! Vector copies of aarch64, in assembly for the reason given for x86-64: the access to the device is the point.

use std::arch::asm;

use super::routine::Routine;
use super::scalar::{FromDevice, ToDevice};
use super::vector::{CopyFn, routine};

/// NEON is part of the base architecture of Linux.
pub(super) fn detected(routine: Routine) -> bool {
    routine == Routine::Neon
}

/// For memory that is cached like the host's.
pub(super) const STORE_CACHED: CopyFn = store_neon;
pub(super) const LOAD_CACHED: CopyFn = load_neon;

pub(super) fn store(routine: Routine) -> Option<CopyFn> {
    (routine == Routine::Neon).then_some(store_neon)
}

pub(super) fn load(routine: Routine) -> Option<CopyFn> {
    (routine == Routine::Neon).then_some(load_neon)
}

routine!(store_neon, ToDevice, "neon", block, line, ());
routine!(load_neon, FromDevice, "neon", block, line, ());

/// # Safety
/// `src` must be valid for reads and `dst` for writes of 16 bytes.
#[inline]
unsafe fn block(dst: *mut u8, src: *const u8) {
    // SAFETY: the caller's promise.
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
    // SAFETY: the caller's promise. One instruction names four registers in sequence, so they are fixed.
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
