//! What the tools measure with: patterns, batches of calls, CUDA.

use std::ffi::c_void;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use cudarc::driver::{CudaContext, result, sys};

use gdrcopy::cuda::raw::Api;
use gdrcopy::cuda::{CudaSource as _, EntryPoints};
use gdrcopy::{GpuBuffer, Mapping};

use super::Usage;
use crate::measure::{Pattern, Samples};

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// `len` bytes that differ between seeds, at any offset and in any order of the words.
pub(super) fn pattern(seed: u32, len: usize) -> Vec<u8> {
    Pattern::new(0, seed.into()).bytes(len)
}

/// Bytes that are not those expected, or cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Mismatch(String);

impl From<gdrcopy::Error> for Mismatch {
    fn from(error: gdrcopy::Error) -> Self {
        Self(error.to_string())
    }
}

/// Compares what CUDA reads from a buffer.
pub(super) fn compare_buffer(
    what: &str,
    buffer: &GpuBuffer,
    offset: usize,
    expected: &[u8],
) -> Result<(), Mismatch> {
    let mut found = vec![0; expected.len()];
    buffer.copy_out(offset, &mut found)?;
    compare(what, expected, &found)
}

/// Compares what the CPU reads through a mapping.
pub(super) fn compare_mapping(
    what: &str,
    mapping: &Mapping,
    offset: usize,
    expected: &[u8],
) -> Result<(), Mismatch> {
    let mut found = vec![0; expected.len()];
    mapping.read(offset, &mut found)?;
    compare(what, expected, &found)
}

pub(super) fn compare(what: &str, expected: &[u8], found: &[u8]) -> Result<(), Mismatch> {
    assert_eq!(expected.len(), found.len(), "the tools compare buffers of one length");
    let mut wrong = expected.iter().zip(found).enumerate().filter(|(_, (expected, found))| expected != found);
    let Some((first, (good, bad))) = wrong.next() else { return Ok(()) };
    let (wrong, len) = (wrong.count() + 1, expected.len());
    Err(Mismatch(format!(
        "{what}: {wrong} of {len} bytes are wrong, the first at offset {first}: {bad:#04x} instead of {good:#04x}"
    )))
}

/// The most batches, as in GDRCopy's tools: calls are shorter than reading the clock.
const BATCHES: u32 = 100;

/// Makes at least `calls` calls in batches, after a tenth as many to warm up: the times of the batches, and the calls of each.
pub(super) fn time(calls: u32, mut call: impl FnMut() -> Result<()>) -> Result<(Samples, u32)> {
    let mut samples = Samples::default();
    let (count, each) = (calls.min(BATCHES), calls.div_ceil(BATCHES));
    (0..calls.div_ceil(10)).try_for_each(|_| call())?;
    for _ in 0..count {
        let start = Instant::now();
        (0..each).try_for_each(|_| call())?;
        samples.add(start.elapsed());
    }
    Ok((samples, each))
}

/// Whether there is a CUDA driver. Without one, calls of cudarc end the process.
pub(super) fn present() -> bool {
    static PRESENT: OnceLock<bool> = OnceLock::new();
    // SAFETY: loading the driver's library runs its initialisers, which any use of CUDA does.
    *PRESENT.get_or_init(|| unsafe { sys::is_culib_present() })
}

/// The version of CUDA that the driver offers, such as `13.0`.
pub(super) fn version() -> Option<String> {
    // SAFETY: the entry points are the driver's.
    let version = unsafe { EntryPoints::new(Api::load().ok()?) }.version().ok()?;
    Some(format!("{}.{}", version / 1000, version % 1000 / 10))
}

/// The primary context of a GPU, current in this thread.
pub(super) fn context(gpu: i32) -> Result<Arc<CudaContext>> {
    if !present() {
        return Err("CUDA is needed for this, and libcuda.so.1 is not here".into());
    }
    let ordinal = usize::try_from(gpu).map_err(|_| Usage(format!("there is no GPU {gpu}")))?;
    let context = CudaContext::new(ordinal).map_err(|e| format!("GPU {gpu}: {e}"))?;
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
            compare("same", &good, &good.clone()).unwrap();
            for at in 0..len {
                let mut bad = good.clone();
                bad[at] ^= 0x80;
                let error = compare("flipped", &good, &bad).unwrap_err().to_string();
                let expected = format!("flipped: 1 of {len} bytes are wrong, the first at offset {at}: ");
                assert!(error.starts_with(&expected), "{error}");
            }
        }
        let good = pattern(1, 4096);
        compare("stale", &good, &pattern(2, 4096)).unwrap_err();
        for shift in [1, 4, 8, 64, 2048] {
            compare("shifted", &good[shift..], &good[..4096 - shift]).unwrap_err();
        }
    }

    #[test]
    fn every_call_is_made_and_counted() {
        for (calls, made) in [(1, 2), (7, 8), (100, 110), (250, 325)] {
            let mut count = 0;
            let call = || {
                count += 1;
                Ok(())
            };
            let (samples, each) = time(calls, call).unwrap();
            assert_eq!(
                (count, samples.count() * u64::from(each)),
                (made, u64::from(made - calls.div_ceil(10)))
            );
        }
    }
}
