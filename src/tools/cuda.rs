//! What the tools measure with: patterns, batches of calls, copy routines, CUDA.

use std::ffi::c_void;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use clap::Args;
use cudarc::driver::{CudaContext, result, sys};
use gdrcopy::copy::{self, Copier, Routine};
use gdrcopy::{Mapping, MappingType};
use serde::{Serialize, Serializer};

use super::{Failure, Result};
use crate::measure::{Micros, Samples};

/// `len` bytes that differ between seeds, at any offset and in any order of the words.
pub(super) fn pattern(seed: u32, len: usize) -> Vec<u8> {
    let mut state = u64::from(seed).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut bytes = Vec::with_capacity(len.next_multiple_of(8));
    while bytes.len() < len {
        // xorshift64, never 0 as the seed is not.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{what}: {wrong} of {len} bytes are wrong, the first at offset {first}: {found:#04x} instead of {expected:#04x}"
)]
pub(super) struct Mismatch {
    pub(super) what: String,
    pub(super) wrong: usize,
    pub(super) len: usize,
    pub(super) first: usize,
    pub(super) found: u8,
    pub(super) expected: u8,
}

pub(super) fn compare(what: &str, expected: &[u8], found: &[u8]) -> Result<(), Mismatch> {
    assert_eq!(expected.len(), found.len(), "the tools compare buffers of one length");
    if expected == found {
        return Ok(());
    }
    let mut wrong = expected.iter().zip(found).enumerate().filter(|(_, (expected, found))| expected != found);
    let (first, (&expected_byte, &found_byte)) = wrong.next().expect("they are not equal");
    let (what, wrong, len) = (what.to_owned(), wrong.count() + 1, expected.len());
    Err(Mismatch { what, wrong, len, first, found: found_byte, expected: expected_byte })
}

/// The most batches, as in GDRCopy's tools: calls are shorter than reading the clock.
pub(super) const MOST: u32 = 100;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Batches {
    pub(super) count: u32,
    pub(super) each: u32,
}

impl Batches {
    /// At least `calls` calls, in whole batches.
    pub(super) fn of(calls: u32) -> Self {
        let count = calls.clamp(1, MOST);
        Self { count, each: calls.div_ceil(count).max(1) }
    }

    pub(super) fn calls(self) -> u64 {
        u64::from(self.count) * u64::from(self.each)
    }

    /// Times the calls, after a tenth as many to warm up.
    pub(super) fn time(self, mut call: impl FnMut() -> Result<()>) -> Result<Timing> {
        for _ in 0..self.calls().div_ceil(10) {
            call()?;
        }
        let mut timing = Timing { batches: self, samples: Samples::default(), total: Duration::ZERO };
        for _ in 0..self.count {
            let start = Instant::now();
            for _ in 0..self.each {
                call()?;
            }
            timing.add(start.elapsed());
        }
        Ok(timing)
    }

    /// Like [`time`](Self::time), with an action before each call that is not timed.
    pub(super) fn time_each(
        self,
        mut before: impl FnMut() -> Result<()>,
        mut call: impl FnMut() -> Result<()>,
    ) -> Result<Timing> {
        let mut timing = Timing { batches: self, samples: Samples::default(), total: Duration::ZERO };
        for warm in 0..=self.count {
            let mut sum = Duration::ZERO;
            for _ in 0..self.each {
                before()?;
                let start = Instant::now();
                call()?;
                sum += start.elapsed();
            }
            if warm > 0 {
                timing.add(sum);
            }
        }
        Ok(timing)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Timing {
    pub(super) batches: Batches,
    pub(super) samples: Samples,
    pub(super) total: Duration,
}

/// Times of one call, in microseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct PerCall {
    /// Calls timed.
    pub(super) calls: u64,
    /// Calls in a batch: the times are averages over a batch.
    pub(super) batch: u32,
    #[serde(flatten)]
    pub(super) us: Micros,
    pub(super) mean: f64,
}

impl Timing {
    pub(super) fn add(&mut self, batch: Duration) {
        self.samples.add(batch);
        self.total += batch;
    }

    pub(super) fn per_call(&self) -> PerCall {
        let calls = self.samples.count() * u64::from(self.batches.each);
        let mean = self.total.as_secs_f64() * 1e6 / calls as f64;
        PerCall { calls, batch: self.batches.each, us: self.samples.micros(self.batches.each), mean }
    }

    /// The rate of calls that move `bytes` bytes each.
    pub(super) fn mib_per_s(&self, bytes: usize) -> f64 {
        bytes as f64 / f64::from(1 << 20) / (self.per_call().mean / 1e6)
    }

    pub(super) fn append(mut self, other: Self) -> Self {
        self.samples.append(&other.samples);
        self.total += other.total;
        self
    }
}

/// Copy routines for write-combining mappings.
#[derive(Args, Clone, Copy, Debug, Serialize)]
pub(super) struct Routines {
    /// Routine that writes: scalar, sse2, avx, avx512, movdir64b or neon [default: the best].
    #[arg(long, value_name = "ROUTINE")]
    #[serde(serialize_with = "name")]
    pub(super) store: Option<Routine>,
    /// Routine that reads: scalar, sse2, sse41, avx, avx2, avx512 or neon [default: the best].
    #[arg(long, value_name = "ROUTINE")]
    #[serde(serialize_with = "name")]
    pub(super) load: Option<Routine>,
}

pub(super) fn name<S: Serializer>(routine: &Option<Routine>, to: S) -> std::result::Result<S::Ok, S::Error> {
    routine.map(Routine::name).serialize(to)
}

/// Copies by the library's choice, or by chosen routines.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copies(Option<Copier>);

impl Routines {
    pub(super) fn copies(self) -> Result<Copies> {
        if self.store.is_none() && self.load.is_none() {
            return Ok(Copies(None));
        }
        let best = Copier::best();
        let (store, load) = (self.store.unwrap_or(best.store()), self.load.unwrap_or(best.load()));
        let copier = Copier::new(store, load).ok_or_else(|| {
            let wrong = if store.supported() && store.stores() { load } else { store };
            Failure::Usage(format!("{wrong} cannot do this on this CPU"))
        })?;
        Ok(Copies(Some(copier)))
    }
}

impl Copies {
    /// Which routines write to and read from a mapping of this type.
    pub(super) fn describe(&self, kind: MappingType) -> String {
        match kind {
            MappingType::WriteCombining => {
                let copier = self.0.as_ref().unwrap_or(Copier::best());
                format!("{} to the GPU, {} from it", copier.store(), copier.load())
            }
            MappingType::Cached => "those of any memory; the mapping is cached".into(),
            _ => "aligned words; the mapping is of device memory".into(),
        }
    }

    /// As [`Mapping::write`].
    #[inline]
    pub(super) fn write(&self, mapping: &Mapping, offset: usize, data: &[u8]) -> gdrcopy::Result<()> {
        let Some(copier) = &self.0 else { return mapping.write(offset, data) };
        let dst = at(mapping, offset, data.len())?;
        // SAFETY: `at` has checked the range, and a slice cannot overlap a mapping.
        unsafe { copier.to_device(mapping.kind(), dst, data.as_ptr(), data.len()) };
        copy::store_fence(mapping.kind());
        Ok(())
    }

    /// As [`Mapping::read`].
    #[inline]
    pub(super) fn read(&self, mapping: &Mapping, offset: usize, out: &mut [u8]) -> gdrcopy::Result<()> {
        let Some(copier) = &self.0 else { return mapping.read(offset, out) };
        let src = at(mapping, offset, out.len())?;
        // SAFETY: as in `write`, the other way round.
        unsafe { copier.from_device(mapping.kind(), out.as_mut_ptr(), src, out.len()) };
        copy::load_fence(mapping.kind());
        Ok(())
    }
}

pub(super) fn at(mapping: &Mapping, offset: usize, len: usize) -> gdrcopy::Result<*mut u8> {
    match offset.checked_add(len) {
        Some(end) if end <= mapping.len() => Ok(mapping.as_ptr().wrapping_add(offset)),
        _ => Err(gdrcopy::Error::OutOfBounds { offset, len, size: mapping.len() }),
    }
}

/// Whether there is a CUDA driver. Without one, calls of cudarc end the process.
pub(super) fn present() -> bool {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    // SAFETY: loading the driver's library runs its initialisers, which any use of CUDA does.
    *PRESENT.get_or_init(|| unsafe { sys::is_culib_present() })
}

/// The version of CUDA that the driver offers, such as `13.0`.
pub(super) fn version() -> Option<String> {
    if !present() {
        return None;
    }
    let mut version = 0;
    // SAFETY: `version` is valid for writing.
    let status = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    status.result().ok()?;
    Some(format!("{}.{}", version / 1000, version % 1000 / 10))
}

/// The primary context of a GPU, current in this thread.
pub(super) fn context(gpu: i32) -> Result<Arc<CudaContext>> {
    if !present() {
        return Err(Failure::failed("CUDA is needed for this, and libcuda.so.1 is not here"));
    }
    let ordinal = usize::try_from(gpu).map_err(|_| Failure::Usage(format!("there is no GPU {gpu}")))?;
    let context = CudaContext::new(ordinal).map_err(|e| Failure::failed(format_args!("GPU {gpu}: {e}")))?;
    context.bind_to_thread()?;
    Ok(context)
}

/// Pinned host memory that the GPU reaches at its address.
#[derive(Debug)]
pub(super) struct Pinned {
    pub(super) ptr: *mut u8,
    pub(super) len: usize,
    pub(super) context: Arc<CudaContext>,
}

// SAFETY: plain memory owned by this value; CUDA frees it from any thread.
unsafe impl Send for Pinned {}
// SAFETY: a shared reference gives out the address only.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(super) fn alloc(context: &Arc<CudaContext>, len: usize) -> Result<Self> {
        context.bind_to_thread()?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: a context is current.
        let ptr = unsafe { result::malloc_host(len, flags) }?.cast::<u8>();
        // SAFETY: just allocated with this length.
        unsafe { ptr.write_bytes(0, len) };
        Ok(Self { ptr, len, context: context.clone() })
    }

    /// Its address, for the CPU and for the GPU.
    pub(super) fn addr(&self) -> u64 {
        self.ptr.addr() as u64
    }

    /// The memory as words that the GPU may change at any time.
    pub(super) fn words(&self) -> &[AtomicU32] {
        // SAFETY: initialised, aligned to pages, alive as long as this value; and others may change atomics.
        unsafe { std::slice::from_raw_parts(self.ptr.cast(), self.len / 4) }
    }

    /// The bytes; the GPU must not write them meanwhile.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: initialised, and borrowed from this value alone.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated by `alloc`, used by nobody any more. Nothing can be done about a failure.
            let _ = unsafe { result::free_host(self.ptr.cast::<c_void>()) };
        }
    }
}

/// `cuMemcpy`, complete on return.
pub(super) fn memcpy(dst: u64, src: u64, len: usize) -> Result<()> {
    // SAFETY: the callers pass buffers of their own, of at least this length; CUDA checks addresses of GPUs.
    Ok(unsafe { sys::cuMemcpy(dst, src, len) }.result()?)
}

/// Fills GPU memory with zeros, complete on return.
pub(super) fn clear(context: &CudaContext, addr: u64, len: usize) -> Result<()> {
    // SAFETY: the callers pass GPU buffers of their own, of at least this length.
    unsafe { result::memset_d8_sync(addr, 0, len) }?;
    Ok(context.synchronize()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_bit_anywhere_is_found() {
        for len in [1, 7, 8, 9, 64, 1000] {
            let good = pattern(1, len);
            assert_eq!(good.len(), len);
            assert_eq!(compare("same", &good, &good.clone()), Ok(()));
            for at in 0..len {
                let mut bad = good.clone();
                bad[at] ^= 0x80;
                let error = compare("flipped", &good, &bad).unwrap_err();
                assert_eq!((error.first, error.wrong, error.len), (at, 1, len));
            }
        }
        let good = pattern(1, 4096);
        assert!(compare("stale", &good, &pattern(2, 4096)).is_err());
        for shift in [1, 4, 8, 64, 2048] {
            assert!(compare("shifted", &good[shift..], &good[..4096 - shift]).is_err());
        }
        let error = compare("all", &[0; 3], &[1; 3]).unwrap_err();
        let message = "all: 3 of 3 bytes are wrong, the first at offset 0: 0x01 instead of 0x00";
        assert_eq!(error.to_string(), message);
    }

    #[test]
    fn batches_hold_at_least_the_calls() {
        for calls in [0, 1, 2, 99, 100, 101, 199, 10_000, 12_345, u32::MAX] {
            let batches = Batches::of(calls);
            assert!(batches.count <= MOST && batches.calls() >= u64::from(calls.max(1)), "{batches:?}");
            assert!(batches.calls() < u64::from(calls.max(1)) + u64::from(MOST), "{batches:?}");
        }
    }

    #[test]
    fn every_call_is_made_and_counted() {
        let mut made = 0;
        let timing = Batches::of(250).time(|| {
            made += 1;
            Ok(())
        });
        let timing = timing.unwrap();
        assert_eq!((timing.per_call().calls, timing.per_call().batch), (300, 3));
        assert_eq!(timing.clone().append(timing).per_call().calls, 600);
        assert_eq!(made, 330);
        let (mut before, mut after) = (0, 0);
        let each = Batches::of(7).time_each(|| (before += 1, Ok(())).1, || (after += 1, Ok(())).1).unwrap();
        assert_eq!((before, after, each.per_call().calls), (8, 8, 7));
    }
}
