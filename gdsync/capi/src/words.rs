//! Words of the program that streams wait for and write, and memory for them.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};

use gdsync::cuda::Gpu;
use gdsync::memory::{Memory, Word32};
use parking_lot::Mutex;

use crate::abi::{MEMORY_GPU, MEMORY_HOST, MEMORY_MASK, gds_mem_desc};
use crate::guard::{Error, Result};
use gdsync_capi_support::pages;
use gdsync_capi_support::streams::current_gpu;

/// Memory of [`alloc`], by its address on the GPU, and its address for the CPU.
static MAPPED: Mutex<BTreeMap<u64, (Memory, usize)>> = Mutex::new(BTreeMap::new());

/// Checks the flags of a word: one kind of memory, and of `others` any.
pub(crate) fn check_flags(flags: c_int, others: c_int) -> Result<()> {
    let kind = flags & MEMORY_MASK;
    if kind.count_ones() == 1 && flags & !(MEMORY_MASK | others) == 0 {
        return Ok(());
    }
    Err(Error::invalid(
        "flags",
        format!("{flags:#x}"),
        "one of GDS_MEMORY_GPU, _HOST, _IO, and the flags of this call",
    ))
}

/// The word at an address of the program, for a stream of `gpu`, or for the CPU.
pub(crate) fn word(gpu: Option<&Gpu>, at: usize, flags: c_int) -> Result<Word32> {
    if at == 0 || !at.is_multiple_of(4) {
        return Err(Error::invalid("address of a word", format!("{at:#x}"), "a multiple of 4, not NULL"));
    }
    if let Some(word) = mapped(at) {
        return word;
    }
    let ptr = std::ptr::with_exposed_provenance_mut::<u8>(at);
    match (flags & MEMORY_MASK, gpu) {
        // SAFETY: the program keeps the word until the call returns.
        (MEMORY_HOST, None) => unsafe { Memory::from_raw(ptr, 4) }?.word32(0),
        // SAFETY: the program keeps the page mapped: see GDS_MEMORY_HOST in the header.
        (MEMORY_HOST, Some(_)) => unsafe { pages::word(at) },
        // SAFETY: the program keeps the memory until the stream has passed.
        (MEMORY_GPU, Some(gpu)) => unsafe { gpu.wrap(at as u64, 4) }?.word32(0),
        _ => Err(Error::Unsupported {
            what: "a word in this kind of memory",
            by: "this call",
            fix: "by the CPU only GDS_MEMORY_HOST and memory of gds_alloc_mapped_memory; by streams no GDS_MEMORY_IO",
        }),
    }
}

/// A word in memory of [`alloc`], by either address.
fn mapped(at: usize) -> Option<Result<Word32>> {
    let mapped = MAPPED.lock();
    mapped.iter().find_map(|(d_ptr, (memory, h_ptr))| {
        let offset = [usize::try_from(*d_ptr).ok()?, *h_ptr]
            .into_iter()
            .find_map(|base| at.checked_sub(base).filter(|at| *at < memory.len()))?;
        Some(memory.word32(offset))
    })
}

/// Allocates memory that the GPU of the current context and the CPU reach.
pub(crate) fn alloc(len: usize, flags: c_int) -> Result<gds_mem_desc> {
    let gpu = current_gpu()?;
    let memory = match flags {
        MEMORY_GPU => gpu.alloc(len)?,
        MEMORY_HOST => Memory::alloc(len)?,
        _ => return Err(Error::invalid("flags", flags, "GDS_MEMORY_GPU or GDS_MEMORY_HOST")),
    };
    let d_ptr = memory.gpu_addr(&gpu)?;
    let h_ptr = memory.atomic32(0)?.as_ptr().cast::<c_void>();
    MAPPED.lock().insert(d_ptr, (memory, h_ptr.expose_provenance()));
    Ok(gds_mem_desc { d_ptr, h_ptr, bar_ptr: h_ptr, flags, alloc_size: len, mh: 1 })
}

/// Frees memory of [`alloc`], when no stream has work with it.
pub(crate) fn free(d_ptr: u64) -> Result<()> {
    let freed = MAPPED.lock().remove(&d_ptr);
    let live = "memory of gds_alloc_mapped_memory that was not freed";
    freed.map(drop).ok_or_else(|| Error::invalid("d_ptr", format!("{d_ptr:#x}"), live))
}
