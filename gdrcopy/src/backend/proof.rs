//! Proof that a mapping shows the memory that CUDA shows.
//!
//! A driver that maps the wrong pages does not say so; only data can tell.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{Ordering, fence};

use crate::cpu_range::CpuRange;
use crate::cuda::Cuda;
use crate::error::{Error, Result};

/// Bytes looked at in one place: one cache line.
pub(crate) const PROBE: usize = 64;
/// How often a mismatch is looked at again. If CUDA shows no change in all that time, the mapping is wrong; if it
/// does, nothing can be said.
const ATTEMPTS: u32 = 32;

const WRONG: &str = "this driver maps other memory than asked for; use another backend and report the driver";

/// Writes random bytes each way at each of `offsets` and looks at them from the other side. Overwrites
/// [`PROBE`] bytes at each, so this is for scratch memory. `addr` is the GPU address of the range's first byte.
pub(crate) fn nonce(
    cuda: &dyn Cuda,
    device: i32,
    addr: u64,
    range: &CpuRange,
    offsets: &[usize],
) -> Result<()> {
    // All places are written before any is looked at, so that two offsets with one memory are found.
    let written: Vec<_> = offsets.iter().map(|_| random()).collect();
    for (&offset, bytes) in offsets.iter().zip(&written) {
        // SAFETY: an array of that length.
        unsafe { cuda.copy_to_device(device, addr + offset as u64, bytes.as_ptr(), PROBE) }?;
    }
    for (&offset, bytes) in offsets.iter().zip(&written) {
        let mut seen = [0; PROBE];
        load(range, offset, &mut seen)?;
        expect(addr, offset, "the CPU does not see what CUDA wrote", &seen, bytes)?;
    }

    let written: Vec<_> = offsets.iter().map(|_| random()).collect();
    for (&offset, bytes) in offsets.iter().zip(&written) {
        store(range, offset, bytes)?;
    }
    for (&offset, bytes) in offsets.iter().zip(&written) {
        let mut seen = [0; PROBE];
        // The read pushes the writes ahead of itself through PCIe.
        load(range, offset, &mut seen)?;
        view(cuda, device, addr, offset, &mut seen)?;
        expect(addr, offset, "CUDA does not see what the CPU wrote", &seen, bytes)?;
    }
    Ok(())
}

/// Compares the first and the last up to [`PROBE`] of `len` bytes at `offset` of the range with what CUDA
/// shows there. Never writes, so it is for the user's memory; equal bytes elsewhere go unnoticed. `addr` is
/// the GPU address of the range's first byte.
pub(crate) fn compare(
    cuda: &dyn Cuda,
    device: i32,
    addr: u64,
    range: &CpuRange,
    offset: usize,
    len: usize,
) -> Result<()> {
    let probe = len.min(PROBE);
    settle(cuda, device, addr, range, offset, probe)?;
    if len > PROBE {
        settle(cuda, device, addr, range, offset + len - probe, probe)?;
    }
    Ok(())
}

fn settle(
    cuda: &dyn Cuda,
    device: i32,
    addr: u64,
    range: &CpuRange,
    offset: usize,
    len: usize,
) -> Result<()> {
    let (mut first, mut seen, mut now) = ([0; PROBE], [0; PROBE], [0; PROBE]);
    let (first, seen, now) = (&mut first[..len], &mut seen[..len], &mut now[..len]);
    view(cuda, device, addr, offset, first)?;
    now.copy_from_slice(first);
    let mut moves = false;
    for _ in 0..ATTEMPTS {
        load(range, offset, seen)?;
        // CUDA's view of just before, and of just after.
        if seen == now {
            return Ok(());
        }
        view(cuda, device, addr, offset, now)?;
        if seen == now {
            return Ok(());
        }
        moves |= now != first;
    }
    if !moves {
        return expect(addr, offset, "the CPU does not see what CUDA shows", seen, now);
    }
    Err(Error::ProofFailed {
        addr: addr + offset as u64,
        found: format!("it changed during {ATTEMPTS} comparisons with CUDA's view"),
        fix: "map the memory before the GPU or a network card writes to it",
    })
}

fn view(cuda: &dyn Cuda, device: i32, addr: u64, offset: usize, out: &mut [u8]) -> Result<()> {
    // SAFETY: a slice of that length.
    unsafe { cuda.copy_from_device(device, out.as_mut_ptr(), addr + offset as u64, out.len()) }
}

fn expect(addr: u64, offset: usize, what: &str, seen: &[u8], wanted: &[u8]) -> Result<()> {
    match seen.iter().zip(wanted).position(|(seen, wanted)| seen != wanted) {
        None => Ok(()),
        Some(at) => Err(Error::ProofFailed {
            addr: addr + (offset + at) as u64,
            found: format!("{what}: {:#04x} instead of {:#04x}", seen[at], wanted[at]),
            fix: WRONG,
        }),
    }
}

fn random() -> [u8; PROBE] {
    let source = RandomState::new();
    let mut bytes = [0; PROBE];
    for (index, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&source.hash_one(index).to_ne_bytes());
    }
    bytes
}

/// Reads through the mapping.
pub(super) fn load(range: &CpuRange, offset: usize, out: &mut [u8]) -> Result<()> {
    fence(Ordering::SeqCst);
    each(range, offset, out.len(), |ptr, at, len| {
        if len == 8 {
            // SAFETY: aligned and inside the mapping; volatile, since the GPU writes here too.
            let word = unsafe { ptr.cast::<u64>().read_volatile() };
            out[at..at + 8].copy_from_slice(&word.to_ne_bytes());
        } else {
            // SAFETY: as above.
            out[at] = unsafe { ptr.read_volatile() };
        }
    })
}

/// Writes through the mapping.
pub(super) fn store(range: &CpuRange, offset: usize, data: &[u8]) -> Result<()> {
    each(range, offset, data.len(), |ptr, at, len| {
        if let Ok(word) = data[at..at + len].try_into() {
            // SAFETY: aligned and inside the mapping; volatile, since the GPU reads here too.
            unsafe { ptr.cast::<u64>().write_volatile(u64::from_ne_bytes(word)) };
        } else {
            // SAFETY: as above.
            unsafe { ptr.write_volatile(data[at]) };
        }
    })?;
    fence(Ordering::SeqCst);
    Ok(())
}

/// Visits a part of the mapping in aligned words, and bytes where a word does not fit.
fn each(
    range: &CpuRange,
    offset: usize,
    len: usize,
    mut visit: impl FnMut(*mut u8, usize, usize),
) -> Result<()> {
    super::inside(offset, len, range.len())?;
    let mut at = 0;
    while at < len {
        // Mappings begin at a page, so the offset decides the alignment.
        let step = if (offset + at).is_multiple_of(8) && len - at >= 8 { 8 } else { 1 };
        // SAFETY: inside the mapping, checked above.
        let ptr = unsafe { range.ptr().as_ptr().add(offset + at) };
        visit(ptr, at, step);
        at += step;
    }
    Ok(())
}
