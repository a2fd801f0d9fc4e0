//! Memory regions, and what the kernel would pin: whether memory is there, may be written, and is made of pages.

use std::ffi::{c_int, c_void};
use std::fs;
use std::io::{BufRead, BufReader};

use gdsync::memory::Memory;
use gdsync::verbs::Access;
use rdma_core_sys::verbs::{ibv_access_flags as flags, ibv_mr, ibv_pd};

use crate::context::Context;
use crate::domain::Domain;
use crate::errno;
use crate::errno::complain;

/// `struct ibv_mr`, and what is behind it.
#[repr(C)]
struct Region {
    base: ibv_mr,
    key: u32,
    /// The mapping of a DMA-BUF.
    mapped: Option<Mapped>,
}

#[derive(Debug)]
pub(crate) struct Mapped {
    addr: *mut c_void,
    len: usize,
}

// SAFETY: an address range that this alone unmaps.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// `length` bytes of a DMA-BUF from `offset` on, and the address of the first. The DMA-BUF is reached through a mapping
    /// of it, so it must be one that can be mapped.
    ///
    /// # Errors
    /// `EINVAL`, or `EOPNOTSUPP` for one that cannot be mapped.
    pub(crate) fn dma_buf(fd: c_int, offset: u64, length: usize) -> Result<(Self, *mut c_void), c_int> {
        let first = usize::try_from(offset).unwrap_or(usize::MAX) % PAGE;
        let (Some(len), Ok(begin)) = (length.checked_add(first), i64::try_from(offset - first as u64)) else {
            return Err(libc::EINVAL);
        };
        // One of a simulated GPU stands where it begins in the memory that it is of; a real one has no position.
        // SAFETY: no pointers.
        let begin = begin + unsafe { libc::lseek(fd, 0, libc::SEEK_CUR) }.max(0);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh mapping touches no existing memory.
        let addr = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, fd, begin) };
        if addr == libc::MAP_FAILED {
            complain("a DMA-BUF cannot be mapped, so the software HCA does not reach it");
            return Err(libc::EOPNOTSUPP);
        }
        Ok((Self { addr, len }, addr.wrapping_byte_add(first)))
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: this module made the mapping, and the region that used it is gone.
        unsafe { libc::munmap(self.addr, self.len) };
    }
}

/// The rights of a region.
///
/// # Errors
/// `EINVAL` for those that the kernel refuses, `EOPNOTSUPP` for what this card does not do.
fn rights(access: flags) -> Result<Access, c_int> {
    // What is optional may be ignored.
    let access = access.difference(flags::IBV_ACCESS_OPTIONAL_RANGE);
    let plain = Access::from_bits(access.bits()).ok_or(libc::EOPNOTSUPP)?;
    let writes = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    if plain.intersects(writes) && !plain.contains(Access::LOCAL_WRITE) {
        return Err(libc::EINVAL);
    }
    Ok(plain)
}

unsafe fn register(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: flags,
    mapped: Option<Mapped>,
) -> Result<Box<Region>, c_int> {
    let rights = rights(access)?;
    if length == 0 {
        return Err(libc::EINVAL);
    }
    // The card writes nowhere without this right.
    pin(addr.addr(), length, rights.contains(Access::LOCAL_WRITE))?;
    // SAFETY: it is there, and the caller vouches that it stays until it is deregistered.
    let memory = unsafe { Memory::from_raw(addr.cast(), length) }.map_err(|_| libc::EINVAL)?;
    // SAFETY: the caller vouches for the domain.
    let context = unsafe { (*pd).context };
    // SAFETY: it is the domain's.
    let hca = unsafe { Context::of(context) }.hca;
    // SAFETY: as above.
    let domain = unsafe { Domain::of(pd) };
    let key = hca.card.register(domain.pdn(), &memory, iova, rights).map_err(|_| libc::ENOMEM)?;
    domain.add_user();
    let base = ibv_mr { context, pd, addr, length, handle: key >> 8, lkey: key, rkey: key };
    Ok(Box::new(Region { base, key, mapped }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: flags,
) -> *mut ibv_mr {
    // SAFETY: the caller vouches for the arguments.
    errno::hand_out(unsafe { register(pd, addr, length, addr as u64, access, None) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: flags,
) -> *mut ibv_mr {
    // SAFETY: the caller vouches for the arguments.
    errno::hand_out(unsafe { register(pd, addr, length, iova, access, None) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: flags,
) -> *mut ibv_mr {
    let (mapped, addr) = match Mapped::dma_buf(fd, offset, length) {
        Ok((mapped, addr)) => (Some(mapped), addr),
        Err(errno) => return errno::null(errno),
    };
    // SAFETY: the caller vouches for the domain, and the mapping goes with the region.
    errno::hand_out(unsafe { register(pd, addr, length, iova, access, mapped) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: the caller vouches for it: a box of this module.
    let Region { base, key, mapped } = *unsafe { Box::from_raw(mr.cast::<Region>()) };
    // SAFETY: a context outlives its regions.
    unsafe { Context::of(base.context) }.hca.card.deregister(key);
    // SAFETY: a domain with regions cannot be freed.
    unsafe { Domain::of(base.pd) }.remove_user();
    drop(mapped);
    0
}

/// Bytes of a page.
pub(crate) const PAGE: usize = 4096;

/// One mapping of this process.
struct Line {
    begin: usize,
    end: usize,
    writable: bool,
    /// It is that of a device: it may have no pages.
    is_device: bool,
}

/// Whether the kernel could pin `len` bytes at `addr`, to be written by the card where `write` says so.
///
/// # Errors
/// `EFAULT`.
pub(crate) fn pin(addr: usize, len: usize, write: bool) -> Result<(), c_int> {
    let end = addr.checked_add(len).ok_or(libc::EINVAL)?;
    let Ok(file) = fs::File::open("/proc/self/maps") else { return Ok(()) };
    let lines = BufReader::new(file).lines().map_while(Result::ok);
    let mut next = addr;
    // In the order of their addresses.
    for mapped in lines.filter_map(|line| header(&line)) {
        if mapped.begin <= next && next < mapped.end && next < end {
            if (write && !mapped.writable) || (mapped.is_device && has_no_pages(mapped.begin)) {
                return Err(libc::EFAULT);
            }
            next = mapped.end;
        }
    }
    if next >= end { Ok(()) } else { Err(libc::EFAULT) }
}

/// `begin-end rwxp offset device inode path`
fn header(line: &str) -> Option<Line> {
    let mut words = line.split_ascii_whitespace();
    let (begin, end) = words.next()?.split_once('-')?;
    let hex = |text| usize::from_str_radix(text, 16).ok();
    let writable = words.next()?.as_bytes().get(1) == Some(&b'w');
    let is_device = words.nth(3).is_some_and(|path| path.starts_with("/dev/"));
    Some(Line { begin: hex(begin)?, end: hex(end)?, writable, is_device })
}

/// Whether the mapping that begins there is of addresses without pages. Slow: the kernel looks at all of them.
fn has_no_pages(begin: usize) -> bool {
    let Ok(file) = fs::File::open("/proc/self/smaps") else { return false };
    let lines = BufReader::new(file).lines().map_while(Result::ok);
    let mut of_it = lines.skip_while(|line| header(line).is_none_or(|mapped| mapped.begin != begin));
    let flags = of_it.find_map(|line| line.strip_prefix("VmFlags:").map(str::to_owned));
    flags.is_some_and(|flags| flags.split_ascii_whitespace().any(|flag| matches!(flag, "io" | "pf")))
}
