//! What the tools measure with: patterns, batches of calls, CUDA.

use std::time::Instant;

use cudarc::driver::{result, sys};
use gdrcopy::cuda::raw::Api;
use gdrcopy::cuda::{CudaSource as _, EntryPoints};
use gdrcopy::{GpuBuffer, Mapping};
use gdsync::cuda::Gpu;
use gdsync::memory::Memory;

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

/// The version of CUDA that the driver offers, such as `13.0`.
pub(super) fn version() -> Option<String> {
    // SAFETY: the entry points are the driver's.
    let version = unsafe { EntryPoints::new(Api::load().ok()?) }.version().ok()?;
    Some(format!("{}.{}", version / 1000, version % 1000 / 10))
}

/// Host memory that the GPU knows as pinned.
pub(super) fn pinned(gpu: &Gpu, len: usize) -> gdsync::Result<Memory> {
    let memory = Memory::alloc(len)?;
    memory.gpu_addr(gpu)?;
    Ok(memory)
}

/// `cuMemcpy` in the current context, complete on return.
pub(super) fn memcpy(dst: u64, src: u64, len: usize) -> Result<()> {
    // SAFETY: the callers pass buffers of their own, of at least this length; CUDA checks addresses of GPUs.
    Ok(unsafe { sys::cuMemcpy(dst, src, len) }.result()?)
}

/// Fills memory of the current context's GPU with zeros, complete on return.
pub(super) fn clear(addr: u64, len: usize) -> Result<()> {
    // SAFETY: the callers pass GPU buffers of their own, of at least this length.
    unsafe { result::memset_d8_sync(addr, 0, len) }?;
    Ok(result::ctx::synchronize()?)
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
