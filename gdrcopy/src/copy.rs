//! Copies between host memory and mappings of GPU memory.
//!
//! A mapping through PCIe BAR1 is write combining: stores gather in the core's buffers and leave as bus writes of
//! up to 64 bytes, loads are not cached and each costs a bus round trip: about 1 us on an H200, for one byte as for
//! a line of 64. So the vector instruction matters, and the best one differs between storing and loading. A
//! [`Copier`] is one [`Routine`] for each direction.
//!
//! What every routine promises about the device side, for any alignment and length:
//! - no byte outside the range is written;
//! - no byte is read outside the aligned 16-byte blocks that the range touches, hence none of another page. Reading GPU memory has no
//!   side effects, so an unaligned end takes one load instead of one per word. [`Scalar`](Routine::Scalar) loads and loads from
//!   [`Device`](MappingType::Device) mappings stay inside the range;
//! - no byte is read or written twice;
//! - accesses go up in address, each aligned to its own size;
//! - a copy of 1, 2, 4 or 8 bytes that is naturally aligned there is one access, so it is never torn.
//!
//! The size of the accesses in longer copies is not specified. [`Cached`](MappingType::Cached) mappings are copied by plain vector loads
//! and stores, since streaming ones would need fences. The compiler never sees the device side as ordinary memory, since a GPU or
//! another thread may access it at the same time.
//!
//! Copies contain no fence: [`store_fence`], [`load_fence`] and [`full_fence`] order them.

mod scalar;
mod shared;
mod vector;

#[cfg(target_arch = "aarch64")]
#[path = "copy/aarch64.rs"]
mod arch;
#[cfg(target_arch = "x86_64")]
#[path = "copy/x86_64.rs"]
mod arch;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("copies and fences for mapped GPU memory are written for x86-64 and aarch64");

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{Ordering, compiler_fence};

pub use shared::copy_shared;

use crate::error::{Error, Result};
use crate::types::MappingType;
use scalar::{FromDevice, ToDevice};
use vector::CopyFn;

/// An instruction set to copy with. The widths are those of one access to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Routine {
    /// Words of 8 bytes and less, everywhere.
    Scalar,
    /// x86-64, 16 bytes: streaming stores (`movntdq`), plain loads (`movdqa`).
    Sse2,
    /// x86-64, 16 bytes: streaming loads (`movntdqa`). Its stores would be those of [`Sse2`](Self::Sse2).
    Sse41,
    /// x86-64, 32 bytes: streaming stores (`vmovntdq`), plain loads (`vmovdqa`).
    Avx,
    /// x86-64, 32 bytes: streaming loads (`vmovntdqa`). Its stores would be those of [`Avx`](Self::Avx).
    Avx2,
    /// x86-64, 64 bytes: streaming stores and loads.
    Avx512,
    /// aarch64, 64 bytes: four registers at a time (`st1`, `ld1`).
    Neon,
}

impl Routine {
    /// All routines, of every architecture.
    pub const ALL: [Self; 7] =
        [Self::Scalar, Self::Sse2, Self::Sse41, Self::Avx, Self::Avx2, Self::Avx512, Self::Neon];

    /// The name in logs, options, `GDRCOPY_STORE` and `GDRCOPY_LOAD`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Sse2 => "sse2",
            Self::Sse41 => "sse41",
            Self::Avx => "avx",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Neon => "neon",
        }
    }

    /// Whether this CPU, and its operating system, have the instructions.
    pub fn supported(self) -> bool {
        self == Self::Scalar || arch::detected(self)
    }

    /// Whether the routine copies to the device, where it is [`supported`](Self::supported).
    pub fn stores(self) -> bool {
        !matches!(self, Self::Sse41 | Self::Avx2)
    }
}

impl fmt::Display for Routine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Routine {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|routine| routine.name() == name).ok_or_else(|| {
            Error::invalid("copy routine", name, "scalar, sse2, sse41, avx, avx2, avx512 or neon")
        })
    }
}

/// The default is the first routine that this CPU has. On Sapphire Rapids and later (known by MOVDIR64B), with an H200:
/// - Stores: AVX-512 writes 64 bytes in 12 ns where AVX takes 30, and 32 KiB at 24.7 instead of 22.5 GB/s; from 64 KiB on
///   all are alike. MOVDIR64B itself is slower (17 instead of 21 GB/s).
/// - Loads: only the streaming ones (`movntdqa`) fetch 64 bytes in a bus round trip, and wide ones keep more of those
///   under way: SSE4.1 0.68 GB/s, AVX2 0.81, AVX-512 0.99; plain AVX 0.03.
const STORE_ORDER: [Routine; 5] =
    [Routine::Avx512, Routine::Avx, Routine::Sse2, Routine::Neon, Routine::Scalar];
const LOAD_ORDER: [Routine; 6] =
    [Routine::Avx512, Routine::Avx2, Routine::Sse41, Routine::Sse2, Routine::Neon, Routine::Scalar];

/// Before that, on Skylake with a P100, AVX-512 stored no faster than AVX and loaded five times slower than SSE4.1
/// (NVIDIA/gdrcopy issue 24).
const OLD_STORE_ORDER: [Routine; 4] = [Routine::Avx, Routine::Sse2, Routine::Neon, Routine::Scalar];
const OLD_LOAD_ORDER: [Routine; 4] = [Routine::Sse41, Routine::Sse2, Routine::Neon, Routine::Scalar];

/// A routine for each direction.
#[derive(Clone, Copy, Debug)]
pub struct Copier {
    store: Routine,
    load: Routine,
    store_fn: CopyFn,
    load_fn: CopyFn,
}

impl Copier {
    /// The fastest routines of this CPU, found once.
    ///
    /// `GDRCOPY_STORE` and `GDRCOPY_LOAD` override them by [name](Routine::name). A name that is unknown, or of a
    /// routine that does not work here, is logged and ignored.
    pub fn best() -> &'static Self {
        static BEST: OnceLock<Copier> = OnceLock::new();
        BEST.get_or_init(|| {
            let (stores, loads) = if arch::has_movdir64b() {
                (&STORE_ORDER[..], &LOAD_ORDER[..])
            } else {
                (&OLD_STORE_ORDER[..], &OLD_LOAD_ORDER[..])
            };
            let (store, store_fn) = choose("GDRCOPY_STORE", stores, store_fn);
            let (load, load_fn) = choose("GDRCOPY_LOAD", loads, load_fn);
            Self { store, load, store_fn, load_fn }
        })
    }

    /// These routines, for comparing them; `None` where the CPU or the routine itself cannot do it.
    pub fn new(store: Routine, load: Routine) -> Option<Self> {
        Some(Self { store, load, store_fn: store_fn(store)?, load_fn: load_fn(load)? })
    }

    /// What stores to write-combining mappings.
    pub fn store(&self) -> Routine {
        self.store
    }

    /// What loads from write-combining mappings.
    pub fn load(&self) -> Routine {
        self.load
    }

    /// Copies `len` bytes of host memory at `src` to `dst` in a mapping of type `kind`.
    ///
    /// No fence: the stores may still be in the core when this returns, see [`store_fence`].
    ///
    /// # Safety
    /// `src` must be valid for reads and `dst` for writes of `len` bytes, and the two ranges must not overlap.
    /// `kind` must be the type of the mapping. What else in this process accesses `dst` meanwhile must do so by these
    /// copies, as a volatile or as an atomic; it sees, or leaves behind, some bytes of one and some of the other.
    #[inline]
    pub unsafe fn to_device(&self, kind: MappingType, dst: *mut u8, src: *const u8, len: usize) {
        // The device's memory changes outside the program: calls may not be merged with one another.
        compiler_fence(Ordering::SeqCst);
        // SAFETY: the caller guarantees the ranges of `src` and `dst`.
        let done = unsafe { scalar::word::<ToDevice>(dst, src, len) };
        if !done {
            match kind {
                // SAFETY: the caller guarantees the ranges; this CPU has the routine, see `store_fn`.
                MappingType::WriteCombining => unsafe { (self.store_fn)(dst, src, len) },
                // SAFETY: the caller guarantees the ranges; every CPU of this architecture has the routine.
                MappingType::Cached => unsafe { (arch::STORE_CACHED)(dst, src, len) },
                // SAFETY: the caller guarantees the ranges of `src` and `dst`.
                MappingType::Device => unsafe { scalar::copy::<ToDevice>(dst, src, len) },
            }
        }
        compiler_fence(Ordering::SeqCst);
    }

    /// Copies `len` bytes at `src` in a mapping of type `kind` to host memory at `dst`.
    ///
    /// No fence: a later load may be served from what an earlier one fetched, see [`load_fence`].
    ///
    /// # Safety
    /// `src` must be valid for reads and `dst` for writes of `len` bytes, and the two ranges must not overlap. The
    /// rest of the aligned 16-byte blocks at the ends of `src` must be readable, as it is in a mapping of pages; it
    /// may change. `kind` must be the type of the mapping. What else in this process writes to `src` meanwhile must do
    /// so by these copies, as a volatile or as an atomic; some bytes come from before it and some from after.
    #[inline]
    pub unsafe fn from_device(&self, kind: MappingType, dst: *mut u8, src: *const u8, len: usize) {
        compiler_fence(Ordering::SeqCst);
        // SAFETY: the caller guarantees the ranges of `src` and `dst`.
        let done = unsafe { scalar::word::<FromDevice>(dst, src, len) };
        if !done {
            match kind {
                // SAFETY: the caller guarantees the ranges; this CPU has the routine, see `load_fn`.
                MappingType::WriteCombining => unsafe { (self.load_fn)(dst, src, len) },
                // SAFETY: the caller guarantees the ranges; every CPU of this architecture has the routine.
                MappingType::Cached => unsafe { (arch::LOAD_CACHED)(dst, src, len) },
                // SAFETY: the caller guarantees the ranges of `src` and `dst`.
                MappingType::Device => unsafe { scalar::copy::<FromDevice>(dst, src, len) },
            }
        }
        compiler_fence(Ordering::SeqCst);
    }
}

/// How `routine` stores, if this CPU has it.
fn store_fn(routine: Routine) -> Option<CopyFn> {
    functions(routine)[0]
}

/// How `routine` loads, if this CPU has it.
fn load_fn(routine: Routine) -> Option<CopyFn> {
    functions(routine)[1]
}

/// How `routine` stores and loads, if this CPU has it.
fn functions(routine: Routine) -> [Option<CopyFn>; 2] {
    match routine {
        Routine::Scalar => [Some(scalar::copy::<ToDevice>), Some(scalar::copy::<FromDevice>)],
        _ if routine.supported() => arch::functions(routine),
        _ => [None; 2],
    }
}

/// The routine that the environment variable names, or else the first of `order` that works.
fn choose(
    variable: &'static str,
    order: &[Routine],
    find: fn(Routine) -> Option<CopyFn>,
) -> (Routine, CopyFn) {
    let asked = std::env::var_os(variable).map(|name| name.to_string_lossy().into_owned());
    choose_named(variable, asked.as_deref(), order, find)
}

fn choose_named(
    variable: &'static str,
    asked: Option<&str>,
    order: &[Routine],
    find: fn(Routine) -> Option<CopyFn>,
) -> (Routine, CopyFn) {
    let (default, default_fn) = order
        .iter()
        .find_map(|&routine| Some((routine, find(routine)?)))
        .expect("the scalar routine works everywhere");
    let Some(asked) = asked else { return (default, default_fn) };
    match asked.parse::<Routine>() {
        Err(error) => tracing::warn!("{variable} ignored, {default} is used: {error}"),
        Ok(routine) => match find(routine) {
            Some(copy) => return (routine, copy),
            None => {
                tracing::warn!("{variable} ignored, {default} is used: {routine} cannot do it on this CPU")
            }
        },
    }
    (default, default_fn)
}

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
    arch::store_fence(kind);
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
    arch::load_fence(kind);
    compiler_fence(Ordering::SeqCst);
}

/// All accesses of this thread, of any mapping or memory, come before all later ones.
///
/// Needed where a load must not pass an earlier store, or mappings of several types are in play. x86-64: `mfence`;
/// aarch64: `dsb sy`.
#[inline]
pub fn full_fence() {
    arch::full_fence();
    compiler_fence(Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_routine_has_functions_for_the_directions_it_names() {
        for routine in Routine::ALL {
            assert_eq!(store_fn(routine).is_some(), routine.stores() && routine.supported(), "{routine}");
            assert_eq!(load_fn(routine).is_some(), routine.supported(), "{routine}");
            let both = Copier::new(routine, routine);
            assert_eq!(both.is_some(), routine.stores() && routine.supported(), "{routine}: {both:?}");
        }
        assert!(Routine::Scalar.supported());
    }

    #[test]
    fn the_variable_names_a_routine_or_is_ignored() {
        let chosen = |asked| choose_named("GDRCOPY_STORE", asked, &STORE_ORDER, store_fn).0;
        let default = chosen(None);
        assert_eq!(chosen(Some("scalar")), Routine::Scalar);
        assert_ne!(default, Routine::Scalar, "all architectures here have something better");
        for ignored in ["", "Scalar", "memcpy", "avx2"] {
            assert_eq!(chosen(Some(ignored)), default, "{ignored}");
        }
    }

    #[test]
    fn names_read_back() {
        for routine in Routine::ALL {
            assert_eq!(routine.to_string().parse::<Routine>().unwrap(), routine);
        }
        let error = "sse3".parse::<Routine>().unwrap_err();
        assert!(error.to_string().contains("sse3"), "{error}");
    }
}
