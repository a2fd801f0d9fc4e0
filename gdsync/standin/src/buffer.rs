//! Memory of queues, as rdma-core asks the application for it.

use std::ffi::c_int;

use gdsync::memory::Memory;
use rdma_core_sys::verbs::IBV_ALLOCATOR_USE_DEFAULT;

use crate::complaint::complain;
use crate::domain::{Allocator, Domain};
use crate::{errno, pages};

/// What is asked for.
#[derive(Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) len: usize,
    pub(crate) align: usize,
    /// `MLX5DV_RES_TYPE_*`
    pub(crate) resource: u64,
    /// Whether the provider relies on the application to have cleared it.
    pub(crate) cleared: bool,
}

/// Memory of a queue, given back when this is dropped.
pub(crate) struct Buffer {
    addr: *mut u8,
    len: usize,
    from: From,
}

enum From {
    Application(Allocator, u64),
    Here { _memory: Memory },
}

impl Buffer {
    /// Asks the allocator of a parent domain; takes memory of this library where there is none, or it does not care.
    ///
    /// # Errors
    /// `EFAULT` for memory that cannot be pinned, `EINVAL` for memory that is not as it must be; where the allocator has
    /// none, what it left in `errno`.
    pub(crate) fn alloc(domain: Option<&Domain>, wanted: Wanted) -> Result<Self, c_int> {
        let Some(allocator) = domain.and_then(Domain::allocator) else { return Self::here(wanted.len) };
        let Allocator { domain, context, alloc, .. } = allocator;
        errno::set(libc::ENOMEM);
        // SAFETY: the application gave the function for this.
        let addr = unsafe { alloc(domain, context, wanted.len, wanted.align, wanted.resource) };
        if addr.addr() == IBV_ALLOCATOR_USE_DEFAULT.cast_unsigned() {
            return Self::here(wanted.len);
        }
        if addr.is_null() {
            return Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::ENOMEM));
        }
        let from = From::Application(allocator, wanted.resource);
        let buffer = Self { addr: addr.cast(), len: wanted.len, from };
        pages::pin(addr.addr(), wanted.len, true)?;
        buffer.check(wanted)?;
        Ok(buffer)
    }

    fn here(len: usize) -> Result<Self, c_int> {
        let memory = Memory::alloc(len).map_err(|_| libc::ENOMEM)?;
        Ok(Self { addr: memory.addr() as *mut u8, len, from: From::Here { _memory: memory } })
    }

    fn check(&self, wanted: Wanted) -> Result<(), c_int> {
        let Wanted { len, align, resource, cleared } = wanted;
        let resource = resource & 0xffff_ffff;
        if !self.addr.addr().is_multiple_of(align) {
            complain(format!("memory for resource {resource} at {:p} is not aligned to {align}", self.addr));
            return Err(libc::EINVAL);
        }
        if cleared && self.memory(0, len)?.to_vec().iter().any(|&byte| byte != 0) {
            complain(format!("memory for resource {resource} is not zero: rdma-core does not clear it"));
            return Err(libc::EINVAL);
        }
        Ok(())
    }

    /// The address of the byte at `offset`.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        self.addr.wrapping_add(offset)
    }

    /// A part of it as the HCA takes it. It must be gone before the buffer.
    pub(crate) fn memory(&self, offset: usize, len: usize) -> Result<Memory, c_int> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(libc::EINVAL);
        }
        // SAFETY: it was pinned, so it is there, and stays until this is dropped.
        unsafe { Memory::from_raw(self.at(offset), len) }.map_err(|_| libc::EINVAL)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let From::Application(Allocator { domain, context, free, .. }, resource) = self.from {
            // SAFETY: the application gave the function for this, and the memory comes from its sister.
            unsafe { free(domain, context, self.addr.cast(), resource) };
        }
    }
}
