//! Copies between ranges of host memory that devices, other processes or other threads may use meanwhile.
//!
//! Every access is an instruction of its own in assembly: the compiler neither assumes that the bytes stay as they are, nor repeats or
//! invents an access. What races with a copy sees some bytes of before and some of after.

use std::arch::asm;

/// Copies of so many bytes on are left to the processor's own instruction, if both ranges begin at the same offset of a cache line:
/// otherwise it is up to 18 times slower than vectors.
#[cfg(target_arch = "x86_64")]
const STRING: usize = 1024;

/// Copies `len` bytes of host memory from `src` to `dst`; others may use either at the same time.
///
/// # Safety
/// `src` must be valid for reads and `dst` for writes of `len` bytes, and the two ranges must not overlap. What else in this process
/// accesses them meanwhile must do so by such copies, as a volatile or as an atomic.
#[inline]
pub unsafe fn copy_shared(dst: *mut u8, src: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= STRING && (dst.addr() ^ src.addr()).is_multiple_of(64) {
        // SAFETY: the caller guarantees the ranges; the direction flag is clear, as everywhere.
        unsafe {
            asm!(
                "rep movsb",
                inout("rcx") len => _,
                inout("rsi") src => _,
                inout("rdi") dst => _,
                options(nostack, preserves_flags),
            );
        }
        return;
    }
    let mut at = 0;
    macro_rules! step {
        ($loop:tt, $size:literal, $copy:ident) => {
            $loop len - at >= $size {
                // SAFETY: so many bytes are left in both ranges.
                unsafe { $copy(dst.wrapping_add(at), src.wrapping_add(at)) };
                at += $size;
            }
        };
    }
    step!(while, 64, copy64);
    step!(while, 16, copy16);
    step!(if, 8, copy8);
    step!(if, 4, copy4);
    step!(if, 2, copy2);
    step!(if, 1, copy1);
    debug_assert_eq!(at, len);
}

/// A copy of so many bytes at any address: all loads, then all stores.
macro_rules! copy {
    ($arch:literal, $name:ident, $class:ident, $($operation:literal)+, $($register:ident)+) => {
        /// # Safety
        /// `src` must be valid for reads and `dst` for writes of the bytes.
        #[cfg(target_arch = $arch)]
        #[inline(always)]
        unsafe fn $name(dst: *mut u8, src: *const u8) {
            // SAFETY: the caller guarantees the ranges of `src` and `dst`.
            unsafe {
                asm!(
                    $($operation,)+
                    src = in(reg) src,
                    dst = in(reg) dst,
                    $($register = out($class) _,)+
                    options(nostack, preserves_flags),
                );
            }
        }
    };
}

copy!("x86_64", copy1, reg_byte, "mov {a}, byte ptr [{src}]" "mov byte ptr [{dst}], {a}", a);
copy!("x86_64", copy2, reg, "mov {a:x}, word ptr [{src}]" "mov word ptr [{dst}], {a:x}", a);
copy!("x86_64", copy4, reg, "mov {a:e}, dword ptr [{src}]" "mov dword ptr [{dst}], {a:e}", a);
copy!("x86_64", copy8, reg, "mov {a}, qword ptr [{src}]" "mov qword ptr [{dst}], {a}", a);
copy!("x86_64", copy16, xmm_reg, "movdqu {a}, [{src}]" "movdqu [{dst}], {a}", a);
copy!(
    "x86_64", copy64, xmm_reg,
    "movdqu {a}, [{src}]" "movdqu {b}, [{src} + 16]" "movdqu {c}, [{src} + 32]" "movdqu {d}, [{src} + 48]"
    "movdqu [{dst}], {a}" "movdqu [{dst} + 16], {b}" "movdqu [{dst} + 32], {c}" "movdqu [{dst} + 48], {d}",
    a b c d
);
copy!("aarch64", copy1, reg, "ldrb {a:w}, [{src}]" "strb {a:w}, [{dst}]", a);
copy!("aarch64", copy2, reg, "ldrh {a:w}, [{src}]" "strh {a:w}, [{dst}]", a);
copy!("aarch64", copy4, reg, "ldr {a:w}, [{src}]" "str {a:w}, [{dst}]", a);
copy!("aarch64", copy8, reg, "ldr {a:x}, [{src}]" "str {a:x}, [{dst}]", a);
copy!("aarch64", copy16, vreg, "ldr {a:q}, [{src}]" "str {a:q}, [{dst}]", a);
copy!(
    "aarch64", copy64, vreg,
    "ldp {a:q}, {b:q}, [{src}]" "ldp {c:q}, {d:q}, [{src}, #32]"
    "stp {a:q}, {b:q}, [{dst}]" "stp {c:q}, {d:q}, [{dst}, #32]",
    a b c d
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bytes_are_copied_and_no_other() {
        let src: Vec<u8> = (0..4096u32).map(|i| i.to_le_bytes()[0] | 1).collect();
        for (from, to) in (0..16).flat_map(|from| (0..16).map(move |to| (from, to))) {
            for len in (0..200).chain([1024, 2000, 4000]) {
                let mut dst = vec![0; 4096];
                // SAFETY: both ranges lie in their arrays.
                unsafe {
                    copy_shared(dst.as_mut_ptr().wrapping_add(to), src.as_ptr().wrapping_add(from), len)
                };
                assert_eq!(dst[to..to + len], src[from..from + len], "{len} bytes from {from} to {to}");
                assert!(dst[..to].iter().chain(&dst[to + len..]).all(|&byte| byte == 0), "{len} at {to}");
            }
        }
    }
}
