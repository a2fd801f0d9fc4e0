//! What the kernel would pin: whether memory is there, may be written, and is made of pages.

use std::ffi::c_int;
use std::fs;
use std::io::{BufRead, BufReader};

/// Bytes of a page.
pub(crate) const PAGE: usize = 4096;

/// One mapping of this process.
struct Mapped {
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
fn header(line: &str) -> Option<Mapped> {
    let mut words = line.split_ascii_whitespace();
    let (begin, end) = words.next()?.split_once('-')?;
    let hex = |text| usize::from_str_radix(text, 16).ok();
    let writable = words.next()?.as_bytes().get(1) == Some(&b'w');
    let is_device = words.nth(3).is_some_and(|path| path.starts_with("/dev/"));
    Some(Mapped { begin: hex(begin)?, end: hex(end)?, writable, is_device })
}

/// Whether the mapping that begins there is of addresses without pages. Slow: the kernel looks at all of them.
fn has_no_pages(begin: usize) -> bool {
    let Ok(file) = fs::File::open("/proc/self/smaps") else { return false };
    let lines = BufReader::new(file).lines().map_while(Result::ok);
    let mut of_it = lines.skip_while(|line| header(line).is_none_or(|mapped| mapped.begin != begin));
    let flags = of_it.find_map(|line| line.strip_prefix("VmFlags:").map(str::to_owned));
    flags.is_some_and(|flags| flags.split_ascii_whitespace().any(|flag| matches!(flag, "io" | "pf")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fresh pages with this protection at an address where the system puts nothing by itself: what is unmapped there stays
    /// so, whatever other threads map.
    fn map(at: usize, pages: usize, protection: c_int) -> usize {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: a fresh mapping touches no existing memory.
        let addr = unsafe { libc::mmap(at as *mut _, pages * PAGE, protection, flags, -1, 0) };
        assert_eq!(addr.addr(), at);
        at
    }

    fn unmap(addr: usize, pages: usize) {
        // SAFETY: a test's own pages, which nobody uses any more.
        assert_eq!(unsafe { libc::munmap(addr as *mut _, pages * PAGE) }, 0);
    }

    #[test]
    fn memory_must_be_there_as_a_whole() {
        let addr = map(0x2000_0000, 4, libc::PROT_READ | libc::PROT_WRITE);
        assert_eq!(pin(addr + 10, 4 * PAGE - 10, true), Ok(()));
        unmap(addr + 2 * PAGE, 1);
        assert_eq!(pin(addr, 2 * PAGE, true), Ok(()));
        assert_eq!(pin(addr, 2 * PAGE + 1, true), Err(libc::EFAULT));
        assert_eq!(pin(addr, 4 * PAGE, true), Err(libc::EFAULT));
        assert_eq!(pin(addr + 3 * PAGE, PAGE, true), Ok(()));
        unmap(addr, 4);
        assert_eq!(pin(addr, 1, false), Err(libc::EFAULT));
        assert_eq!(pin(usize::MAX, 2, false), Err(libc::EINVAL));
    }

    #[test]
    fn memory_for_writes_must_be_writable() {
        let addr = map(0x2100_0000, 1, libc::PROT_READ);
        assert_eq!(pin(addr, PAGE, false), Ok(()));
        assert_eq!(pin(addr, PAGE, true), Err(libc::EFAULT));
        unmap(addr, 1);
    }
}
