//! Memory files and mappings of them.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use gdrcopy::system::{Kernel, Linux};
use rustix::fs::MemfdFlags;
use rustix::mm::Advice;

/// A file of `len` zero bytes that exists as long as a descriptor or a mapping of it.
pub(crate) fn memory_file(name: &CStr, len: u64) -> io::Result<File> {
    let file = File::from(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?);
    file.set_len(len)?;
    Ok(file)
}

/// A mapping of a memory file; unmapped when dropped. Forked children have a hole there.
#[derive(Debug)]
pub(crate) struct Mapped {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: the value holds addresses only; it never accesses the bytes.
unsafe impl Send for Mapped {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapped {}

impl Mapped {
    pub(crate) fn new(file: &File, len: usize) -> io::Result<Self> {
        // SAFETY: no address is given, so no existing mapping changes.
        let ptr = unsafe { Linux.mmap(file.as_fd(), len, 0, None) }?;
        let mapped = Self { ptr, len };
        // SAFETY: the range is this value's own; the advice concerns fork only.
        unsafe { rustix::mm::madvise(ptr.as_ptr().cast(), len, Advice::LinuxDontFork) }?;
        Ok(mapped)
    }

    pub(crate) fn addr(&self) -> usize {
        self.ptr.as_ptr().expose_provenance()
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the range is this value's own, and the driver's tables no longer name it.
        unsafe { rustix::mm::munmap(self.ptr.as_ptr().cast(), self.len) }.expect("a mapping of its own");
    }
}
