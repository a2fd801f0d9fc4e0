//! Which objects of the resource manager GPU memory consists of: seen when CUDA is about to export it.
//!
//! `cuMemGetHandleForAddressRange` exports any GPU memory as a dma-buf, and its `ioctl` (`NV_ESC_EXPORT_TO_DMABUF_FD`) names CUDA's
//! client, the objects, and the offset and size in each. CUDA does not report them otherwise. libcuda calls `ioctl` through an entry of
//! its global offset table. This module replaces that entry by a function that passes all calls on, except for the exports of a thread
//! that asks here: these it notes and answers by itself, and no dma-buf is made.
//!
//! - The entry is replaced at the first use and stays so. It could not be put back safely: another thread may be about to return to
//!   the function, and a second user of this technique may have chained itself behind it. So this library stays loaded, too.
//! - What the entry held, perhaps a preloaded `ioctl`, is called as before, with the same arguments.
//! - With full RELRO the entry is in read-only memory, which is made writable for the exchange. That happens in a callback of
//!   `dl_iterate_phdr`: the dynamic linker's lock keeps a second copy of this library from making the page read-only meanwhile.
//! - A libcuda without such an entry, or with an unknown size of the `ioctl`, is refused.

use std::ffi::{c_int, c_ulong, c_void};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::relocation::{keep_loaded, replace_import};
use crate::error::{Error, Result};

/// A part of an object of the resource manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The object's handle in CUDA's client.
    pub object: u32,
    /// First byte in the object.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// The objects of a range of GPU memory. They are only named: after a free a handle may be that of another object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Objects {
    /// CUDA's client of the resource manager.
    pub client: u32,
    /// In the order of addresses.
    pub pieces: Vec<Piece>,
}

impl Objects {
    /// Bytes; `None` for a sum that no range has.
    pub(super) fn len(&self) -> Option<u64> {
        self.pieces.iter().try_fold(0_u64, |sum, piece| sum.checked_add(piece.len))
    }
}

/// What one `ioctl` named.
enum Seen {
    Objects(Objects),
    /// A structure of another size.
    Unknown(usize),
}

/// The objects that `export` names, which calls the function at address `entry` of libcuda, and how it ended.
///
/// # Errors
/// Of an export that named nothing.
pub(super) fn named_by(entry: usize, export: impl Fn() -> Result<OwnedFd>) -> Result<(Objects, Result<()>)> {
    /// One thread asks at a time. Holds the address for which the entries were replaced.
    static ASKING: Mutex<usize> = Mutex::new(0);
    /// Threads that resolve the lazily bound `ioctl` at this moment overwrite the entry, each at most once.
    const ATTEMPTS: usize = 8;

    let mut replaced = ASKING.lock();
    for attempt in 0..ATTEMPTS {
        if attempt > 0 || *replaced != entry {
            let new = (answering_ioctl as *const ()).expose_provenance();
            keep_loaded(new).map_err(refuse)?;
            // SAFETY: it has the type of `ioctl` and passes the calls of others on; both libraries stay loaded.
            unsafe { replace_import(entry, c"ioctl", new, &NEXT) }.map_err(refuse)?;
            *replaced = entry;
        }
        let mut seen = Vec::new();
        let asker = Asker::new(&mut seen);
        let exported = export();
        drop(asker);
        if !seen.is_empty() {
            return Ok((join(seen)?, exported.map(drop)));
        }
        exported?;
    }
    Err(refuse("its exports do not pass through the `ioctl` of its global offset table"))
}

pub(super) fn refuse(why: impl Into<String>) -> Error {
    Error::Unsupported {
        what: format!("finding the objects of GPU memory ({})", why.into()),
        by: "this libcuda",
        fix: "use another backend (GDRCOPY_BACKEND), and report this with the driver's version",
    }
}

/// Joins the calls of one export: each names up to 128 objects.
fn join(seen: Vec<Seen>) -> Result<Objects> {
    let mut all = Objects::default();
    for call in seen {
        match call {
            Seen::Objects(some) if all.pieces.is_empty() || all.client == some.client => {
                all.client = some.client;
                all.pieces.extend(some.pieces);
            }
            Seen::Objects(_) => return Err(refuse("an export names two clients")),
            Seen::Unknown(size) => return Err(refuse(format!("its export takes {size} bytes"))),
        }
    }
    Ok(all)
}

/// The thread that asks, as `pthread_self` gives it; 0 for none.
static ASKER: AtomicU64 = AtomicU64::new(0);
/// Its process: in a forked child another thread may get the same number.
static ASKER_PROCESS: AtomicU32 = AtomicU32::new(0);
/// Where its exports are noted.
static SEEN: AtomicPtr<Vec<Seen>> = AtomicPtr::new(std::ptr::null_mut());

fn this_thread() -> u64 {
    // SAFETY: always callable.
    unsafe { libc::pthread_self() }
}

/// Has the exports of this thread answered until it is dropped.
struct Asker;

impl Asker {
    fn new(seen: &mut Vec<Seen>) -> Self {
        SEEN.store(seen, Ordering::Relaxed);
        ASKER_PROCESS.store(std::process::id(), Ordering::Relaxed);
        ASKER.store(this_thread(), Ordering::Relaxed);
        Self
    }

    fn is_caller() -> bool {
        ASKER.load(Ordering::Relaxed) == this_thread()
            && ASKER_PROCESS.load(Ordering::Relaxed) == std::process::id()
    }
}

impl Drop for Asker {
    fn drop(&mut self) {
        ASKER.store(0, Ordering::Relaxed);
    }
}

type Ioctl = unsafe extern "C" fn(c_int, c_ulong, ...) -> c_int;

/// What the entry held: the address of an [`Ioctl`]. Set before the entry is replaced, and never changed.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// What libcuda calls as `ioctl`, from any thread. Calls that it passes on are as async-signal-safe as before.
unsafe extern "C" fn answering_ioctl(fd: c_int, request: c_ulong, arg: *mut c_void) -> c_int {
    if is_export(request) && Asker::is_caller() {
        // SAFETY: an export of this thread, whose argument is the structure of the request's size.
        return unsafe { answer(request, arg.cast()) };
    }
    let next = std::ptr::with_exposed_provenance::<c_void>(NEXT.load(Ordering::Acquire));
    // SAFETY: `replace_import` stored the function that the entry held, which libcuda would have called.
    let next: Ioctl = unsafe { std::mem::transmute(next) };
    // SAFETY: libcuda's own arguments.
    unsafe { next(fd, request, arg) }
}

/// Whether a request is `NV_ESC_EXPORT_TO_DMABUF_FD` (type `'F'`, number 217).
fn is_export(request: c_ulong) -> bool {
    request & 0xffff == c_ulong::from(b'F') << 8 | 217
}

/// Notes an export, and answers it with a descriptor in place of a dma-buf.
///
/// # Safety
/// The calling thread must be the one that asks, and `arg` must point to the structure of `request`, with nothing else using it.
unsafe fn answer(request: c_ulong, arg: *mut u8) -> c_int {
    let size = usize::try_from(request >> 16 & 0x3fff).unwrap_or_default();
    // SAFETY: the caller guarantees it.
    let bytes = unsafe { std::slice::from_raw_parts_mut(arg, size) };
    let (seen, is_done) = match parse(bytes) {
        Some(objects) => {
            let is_done = complete(bytes, &objects).is_some();
            (Seen::Objects(objects), is_done)
        }
        None => (Seen::Unknown(size), false),
    };
    // SAFETY: set by this thread, in a call of `named_by` that has not returned.
    unsafe { (*SEEN.load(Ordering::Relaxed)).push(seen) };
    if is_done { 0 } else { -1 }
}

/// `NV_DMABUF_EXPORT_MAX_HANDLES`.
const MOST: usize = 128;

/// Where `handles`, `offsets`, `sizes` and `status` are in `nv_ioctl_export_to_dma_buf_fd_t` of `nv-ioctl.h`, as the open kernel modules
/// 515 to 565 (2600 bytes) and 570 to 595 (2608) have it.
fn layout(size: usize) -> Option<[usize; 4]> {
    let handles: usize = match size {
        2600 => 32,
        2608 => 36,
        _ => return None,
    };
    let offsets = (handles + 4 * MOST).next_multiple_of(8);
    Some([handles, offsets, offsets + 8 * MOST, offsets + 16 * MOST])
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|word| u32::from_ne_bytes(*word))
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|long| u64::from_ne_bytes(*long))
}

/// Reads the structure of an export. `None` if its size is unknown.
fn parse(bytes: &[u8]) -> Option<Objects> {
    let [handles, offsets, sizes, _] = layout(bytes.len())?;
    let count = usize::try_from(word(bytes, 12)?).ok()?.min(MOST);
    let piece = |at| {
        let object = word(bytes, handles + 4 * at)?;
        Some(Piece { object, offset: long(bytes, offsets + 8 * at)?, len: long(bytes, sizes + 8 * at)? })
    };
    Some(Objects { client: word(bytes, 4)?, pieces: (0..count).map(piece).collect::<Option<_>>()? })
}

/// Completes the structure of an export: a new descriptor if it has none yet, and success. `None` if more bytes are named than are to be
/// exported, which the kernel refuses, too, or if there is no descriptor left.
fn complete(bytes: &mut [u8], objects: &Objects) -> Option<()> {
    let [.., status] = layout(bytes.len())?;
    if objects.len()? > long(bytes, 24)? {
        return None;
    }
    if word(bytes, 0)?.cast_signed() < 0 {
        // SAFETY: numbers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        bytes.get_mut(..4)?.copy_from_slice(&fd.to_ne_bytes());
        u32::try_from(fd).ok()?;
    }
    bytes.get_mut(status..status + 4)?.fill(0);
    Some(())
}
