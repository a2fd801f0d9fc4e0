//! Registered memory, pieces of it in messages, and GPU memory of other processes.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::with_exposed_provenance_mut;
use std::sync::Arc;

use gdsync::cuda::Gpu;
use gdsync::memory::{ExportedMemory, Memory, PeerMemory};
use gdsync_capi_support::handles::{Guard, Table};
use mp::cache::Cached;
use mp::{Piece, Registration};
use smallvec::SmallVec;

use crate::abi::{KINDS, Raw, gda_buf};
use crate::comm::{Comm, comm};
use crate::context::context;
use crate::guard::{Result, end, invalid, non_null, place, size, status, values};

const CACHED: u32 = 1;

/// Registered memory of a communicator.
#[derive(Debug)]
pub(crate) struct Mem {
    pub(crate) comm: Arc<Comm>,
    /// The handle of the communicator.
    of: Raw,
    registration: Kept,
}

#[derive(Debug)]
enum Kept {
    Whole(Registration),
    Cached(Cached),
}

impl Mem {
    pub(crate) fn registration(&self) -> &Registration {
        match &self.registration {
            Kept::Whole(registration) => registration,
            Kept::Cached(cached) => cached,
        }
    }
}

pub(crate) static MEMS: Table<Mem> = Table::new(4, &KINDS);
static PEER_MEMS: Table<PeerMemory> = Table::new(10, &KINDS);

/// The memory that the buffers of a call are in. It stays registered while this lives.
pub(crate) struct Buffers<'a> {
    bufs: &'a [gda_buf],
    mems: SmallVec<[Guard<Mem>; 2]>,
}

/// Pieces of a message, mostly few.
pub(crate) type Pieces<'a> = SmallVec<[Piece<'a>; 2]>;

impl gda_buf {
    pub(crate) fn range(&self) -> Result<Range<usize>> {
        let (start, len) = (size("offset", self.offset)?, size("len", self.len)?);
        let end = start.checked_add(len).ok_or_else(|| invalid("len", len, "a range of the memory"))?;
        Ok(start..end)
    }
}

impl<'a> Buffers<'a> {
    /// The buffers of a call.
    ///
    /// # Safety
    /// The pointer must be null or valid for `n` buffers.
    pub(crate) unsafe fn new(bufs: *const gda_buf, n: c_int) -> Result<Self> {
        // SAFETY: the caller vouches for the number.
        let bufs: &[gda_buf] = unsafe { values("bufs", bufs, n) }?;
        let mems = bufs.iter().map(|buf| MEMS.get(buf.mem)).collect::<std::result::Result<_, _>>()?;
        Ok(Self { bufs, mems })
    }

    /// The ranges.
    pub(crate) fn pieces(&self) -> Result<Pieces<'_>> {
        self.bufs.iter().zip(&self.mems).map(|(buf, mem)| Ok((mem.registration(), buf.range()?))).collect()
    }
}

/// A buffer of a call that waits: the memory may be deregistered meanwhile.
///
/// # Safety
/// The pointer must be null or valid.
pub(crate) unsafe fn kept(buf: *const gda_buf) -> Result<(Registration, Range<usize>)> {
    let buf = non_null("buf", buf.cast_mut())?;
    // SAFETY: not null, so valid: the caller guarantees it.
    let buf = unsafe { &*buf };
    Ok((MEMS.get(buf.mem)?.registration().clone(), buf.range()?))
}

/// Calls `start` with these buffers and their communicator. It must not wait.
///
/// # Safety
/// The pointer must be null or valid for `n` buffers.
#[inline]
pub(crate) unsafe fn with_pieces<T>(
    raw: Raw,
    bufs: *const gda_buf,
    n: c_int,
    start: impl Fn(&Arc<Comm>, &[Piece<'_>]) -> Result<T>,
) -> Result<T> {
    if n == 1 && !bufs.is_null() {
        // SAFETY: not null, so valid: the caller guarantees it.
        let buf = unsafe { &*bufs };
        let mem = MEMS.get(buf.mem)?;
        // Most messages: no list, and no look-up of the communicator, which the memory keeps.
        if mem.of == raw {
            mem.comm.check()?;
            return start(&mem.comm, &[(mem.registration(), buf.range()?)]);
        }
    }
    // SAFETY: the caller vouches for the number.
    let (comm, buffers) = (comm(raw)?, unsafe { Buffers::new(bufs, n) }?);
    if buffers.mems.iter().any(|mem| mem.of != raw) {
        return Err(invalid("the memory", "of another communicator", "registered with that of the call"));
    }
    comm.check()?;
    start(&comm, &buffers.pieces()?)
}

fn insert(of: Raw, comm: Arc<Comm>, registration: Kept, mem: *mut Raw) -> Result<()> {
    *place("mem", mem)? = MEMS.insert(Mem { comm, of, registration })?;
    Ok(())
}

/// See the header.
///
/// # Safety
/// The memory must stay allocated as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_mem_reg(
    raw: Raw,
    addr: *mut c_void,
    len: usize,
    flags: u32,
    mem: *mut Raw,
) -> c_int {
    status("gda_mem_reg", || {
        place("mem", mem)?;
        let (owner, ptr) = (comm(raw)?.clone(), non_null("addr", addr.cast::<u8>())?);
        if flags & !CACHED != 0 {
            return Err(invalid("flags", format_args!("{flags:#x}"), "GDA_CACHED or 0"));
        }
        let at = ptr.addr() as u64;
        let registration = if flags & CACHED == 0 {
            // SAFETY: the caller keeps it allocated.
            let memory = match unsafe { Gpu::find(at, len) }? {
                Some(memory) => memory,
                // SAFETY: the caller keeps it allocated.
                None => unsafe { Memory::from_raw(ptr, len) }?,
            };
            Kept::Whole(owner.comm.register(&memory)?)
        } else {
            Kept::Cached(match Gpu::at(at)? {
                // SAFETY: the caller keeps it allocated until it is deregistered.
                Some(gpu) => unsafe { owner.comm.register_cached_gpu(&gpu, at, len) }?,
                // SAFETY: the caller keeps it allocated, and tells before it is unmapped.
                None => unsafe { owner.comm.register_cached(ptr, len) }?,
            })
        };
        insert(raw, owner, registration, mem)
    })
}

/// See the header.
///
/// # Safety
/// `mem` must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_mem_reg_dmabuf(
    raw: Raw,
    fd: c_int,
    offset: u64,
    len: usize,
    mem: *mut Raw,
) -> c_int {
    status("gda_mem_reg_dmabuf", || {
        place("mem", mem)?;
        let owner = comm(raw)?.clone();
        if fd < 0 {
            return Err(invalid("fd", fd, "an open dma-buf"));
        }
        // SAFETY: open during the call: the caller guarantees it.
        let memory = Memory::of_dma_buf(unsafe { BorrowedFd::borrow_raw(fd) }, offset, len)?;
        let registration = owner.comm.register(&memory)?;
        insert(raw, owner, Kept::Whole(registration), mem)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_mem_invalidate(raw: Raw, addr: *mut c_void, len: usize) -> c_int {
    status("gda_mem_invalidate", || {
        comm(raw)?.comm.cache().invalidate(addr.addr() as u64, len);
        Ok(())
    })
}

/// See the header.
///
/// # Safety
/// `blob` must be null or valid for `GDA_EXPORT_BYTES` writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_mem_export(mem: Raw, blob: *mut c_void) -> c_int {
    status("gda_mem_export", || {
        let to = place("blob", blob.cast())?;
        *to = MEMS.get(mem)?.registration().memory().export()?.to_bytes();
        Ok(())
    })
}

/// See the header.
///
/// # Safety
/// `blob` must be null or valid for `GDA_EXPORT_BYTES`, `peer` and `addr` null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gda_mem_import(
    ctx: Raw,
    blob: *const c_void,
    peer: *mut Raw,
    addr: *mut *mut c_void,
) -> c_int {
    status("gda_mem_import", || {
        let (peer, addr, ctx) = (place("peer", peer)?, place("addr", addr)?, context(ctx)?);
        // SAFETY: the caller vouches for the length.
        let bytes = unsafe { blob.cast::<[u8; ExportedMemory::BYTES]>().as_ref() };
        let bytes = bytes.ok_or_else(|| invalid("blob", "NULL", "what gda_mem_export has written"))?;
        let gpu = ctx.gpu()?;
        let memory = PeerMemory::open(gpu, &ExportedMemory::from_bytes(bytes)?)?;
        let at = memory.gpu_addr(gpu, 0, memory.len())?;
        *peer = PEER_MEMS.insert(memory)?;
        *addr = with_exposed_provenance_mut(size("addr", at)?);
        Ok(())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_peer_mem_close(peer: Raw) -> c_int {
    end("gda_peer_mem_close", &PEER_MEMS, peer)
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gda_mem_dereg(mem: Raw) -> c_int {
    end("gda_mem_dereg", &MEMS, mem)
}
