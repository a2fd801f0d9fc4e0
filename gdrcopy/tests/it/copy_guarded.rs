//! Memory with inaccessible pages on both sides, so that an access outside it ends the test.

use std::ptr;

/// A mapping that starts and ends on a page boundary, where inaccessible pages follow.
pub(crate) struct Guarded {
    pages: *mut u8,
    page: usize,
    len: usize,
}

impl Guarded {
    /// `len` bytes, rounded up to pages.
    pub(crate) fn new(len: usize) -> Self {
        // SAFETY: a plain query.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).expect("page size");
        let len = len.next_multiple_of(page);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let pages = unsafe { libc::mmap(ptr::null_mut(), len + 2 * page, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(pages, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        let pages = pages.cast::<u8>();
        let inner = pages.wrapping_add(page).cast();
        // SAFETY: the pages are those mapped above.
        let rc = unsafe { libc::mprotect(inner, len, libc::PROT_READ | libc::PROT_WRITE) };
        assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
        Self { pages, page, len }
    }

    /// The byte at `offset`; the end is a place, too.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.len);
        self.pages.wrapping_add(self.page + offset)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's own, and nobody uses it any more.
        let rc = unsafe { libc::munmap(self.pages.cast(), self.len + 2 * self.page) };
        assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
    }
}
