//! Registered memory, and pieces of it in messages.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use gdsync::cuda::Gpu;
use gdsync::memory::Memory;
use mp::cache::Cached;
use mp::{Piece, Registration};
use smallvec::SmallVec;

use crate::abi::{Raw, gda_buf};
use crate::comm::{Comm, comm};
use crate::guard::{Result, invalid, non_null, place, size, status, values};
use crate::handles::{Guard, Table};

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

pub(crate) static MEMS: Table<Mem> = Table::new(4);

/// The memory that the buffers of a call are in. It stays registered while this lives.
pub(crate) struct Buffers<'a> {
    bufs: &'a [gda_buf],
    mems: SmallVec<[Guard<Mem>; 2]>,
    /// If it is not that of the memory.
    comm: Option<Guard<Arc<Comm>>>,
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
    /// The buffers of a call with this communicator.
    ///
    /// # Safety
    /// The pointer must be null or valid for `n` buffers.
    #[inline]
    pub(crate) unsafe fn new(bufs: *const gda_buf, n: c_int) -> Result<Self> {
        // SAFETY: the caller vouches for the number.
        let bufs: &[gda_buf] = unsafe { values("bufs", bufs, n) }?;
        // Loops: to collect results costs as much as the rest of a short message's call.
        let mut mems = SmallVec::new();
        for buf in bufs {
            mems.push(MEMS.get(buf.mem)?);
        }
        Ok(Self { bufs, mems, comm: None })
    }

    /// One buffer.
    ///
    /// # Safety
    /// The pointer must be null or valid.
    pub(crate) unsafe fn one(buf: *const gda_buf) -> Result<Self> {
        non_null("buf", buf.cast_mut())?;
        // SAFETY: the caller vouches for it.
        unsafe { Self::new(buf, 1) }
    }

    /// The same, of a call with this communicator.
    ///
    /// # Safety
    /// As [`Buffers::new`].
    #[inline]
    pub(crate) unsafe fn of(raw: Raw, bufs: *const gda_buf, n: c_int) -> Result<Self> {
        // SAFETY: the caller vouches for the number.
        let mut this = unsafe { Self::new(bufs, n) }?;
        // One look-up less: memory keeps its communicator.
        if this.mems.is_empty() || this.mems.iter().any(|mem| mem.of != raw) {
            this.comm = Some(comm(raw)?);
        }
        if this.mems.iter().any(|mem| mem.of != raw) {
            return Err(invalid("the memory", "of another communicator", "registered with that of the call"));
        }
        this.comm().check()?;
        Ok(this)
    }

    /// The communicator of the call.
    pub(crate) fn comm(&self) -> &Arc<Comm> {
        let comm = self.comm.as_deref().or(self.mems.first().map(|first| &first.comm));
        comm.expect("looked up if there is no memory")
    }

    /// The ranges.
    #[inline]
    pub(crate) fn pieces(&self) -> Result<Pieces<'_>> {
        let mut pieces = Pieces::new();
        for (buf, mem) in self.bufs.iter().zip(&self.mems) {
            pieces.push((mem.registration(), buf.range()?));
        }
        Ok(pieces)
    }
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
#[unsafe(no_mangle)]
pub extern "C" fn gda_mem_dereg(mem: Raw) -> c_int {
    status("gda_mem_dereg", || MEMS.take(mem).map(drop))
}
