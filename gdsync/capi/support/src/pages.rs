//! Pages with words of the program, which stay registered with CUDA.

use std::collections::HashMap;

use gdsync::Result;
use gdsync::memory::{Memory, Word32, host_page};
use parking_lot::Mutex;

/// Host pages that stay registered.
static PAGES: Mutex<Option<Pages>> = Mutex::new(None);

/// How many pages: 64 MiB on hosts with pages of 4 KiB.
const KEPT: usize = 16384;

#[derive(Default)]
struct Pages {
    /// By address, with the time of the last use.
    pages: HashMap<usize, (Memory, u64)>,
    uses: u64,
}

/// The word at an address of host memory, for streams and kernels. Its page is registered with CUDA at first use and stays so.
///
/// # Errors
/// [`gdsync::Error::InvalidArgument`] for an address that is 0 or no multiple of 4.
///
/// # Safety
/// The program must keep the page mapped.
pub unsafe fn word(at: usize) -> Result<Word32> {
    let offset = at % host_page();
    // SAFETY: the caller's promise.
    unsafe { page(at - offset) }?.word32(offset)
}

/// # Safety
/// As [`word`].
unsafe fn page(at: usize) -> Result<Memory> {
    let mut pages = PAGES.lock();
    let Pages { pages, uses } = pages.get_or_insert_default();
    *uses += 1;
    if let Some((memory, used)) = pages.get_mut(&at) {
        *used = *uses;
        return Ok(memory.clone());
    }
    let ptr = std::ptr::with_exposed_provenance_mut::<u8>(at);
    // SAFETY: the page has a word of the program, which keeps it mapped.
    let memory = unsafe { Memory::from_raw(ptr, host_page()) }?;
    if pages.len() >= KEPT
        && let Some(oldest) = pages.iter().min_by_key(|(_, (_, used))| *used).map(|(at, _)| *at)
    {
        pages.remove(&oldest);
    }
    pages.insert(at, (memory.clone(), *uses));
    Ok(memory)
}
