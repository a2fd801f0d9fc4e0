//! The program's memory as the kernel sees it: addresses that may be wrong, and that fail with `EFAULT`.

use gdsync_device::memory::host_page;
use rustix::io::Errno;

use crate::abi::{Plain, bytes_of, read_padded};

/// The memory of a program.
pub(crate) trait User {
    /// Fills `out` from `addr` on.
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), Errno>;

    /// Writes to `addr`.
    fn write(&self, addr: u64, bytes: &[u8]) -> Result<(), Errno>;
}

/// The memory of this process, accessed by the kernel, which checks the addresses.
#[derive(Debug)]
pub(crate) struct ThisProcess;

/// A part of this process, for `process_vm_readv` and `process_vm_writev`.
fn part(addr: u64, len: usize) -> Result<libc::iovec, Errno> {
    let base = usize::try_from(addr).map_err(|_| Errno::FAULT)?;
    Ok(libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(base), iov_len: len })
}

/// Whether a call that should move `len` bytes moved all.
fn moved(count: isize, len: usize) -> Result<(), Errno> {
    if usize::try_from(count) == Ok(len) { Ok(()) } else { Err(Errno::FAULT) }
}

impl User for ThisProcess {
    fn read(&self, addr: u64, out: &mut [u8]) -> Result<(), Errno> {
        let local = libc::iovec { iov_base: out.as_mut_ptr().cast(), iov_len: out.len() };
        let remote = part(addr, out.len())?;
        // SAFETY: asks for the own number.
        let pid = unsafe { libc::getpid() };
        // SAFETY: the kernel writes to `out` and checks the other range.
        let count = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
        moved(count, out.len())
    }

    fn write(&self, addr: u64, bytes: &[u8]) -> Result<(), Errno> {
        let local = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let remote = part(addr, bytes.len())?;
        // SAFETY: asks for the own number.
        let pid = unsafe { libc::getpid() };
        // SAFETY: the kernel reads `bytes` and checks the other range, which the program gave to be written to.
        let count = unsafe { libc::process_vm_writev(pid, &raw const local, 1, &raw const remote, 1, 0) };
        moved(count, bytes.len())
    }
}

/// Where a response goes: `len` bytes of the program at `addr`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) addr: u64,
    pub(crate) len: usize,
}

impl Place {
    /// Writes as much of a structure as there is room for, as programs built for older kernels expect.
    pub(crate) fn put<T: Plain>(self, user: &dyn User, value: &T) -> Result<(), Errno> {
        let bytes = bytes_of(value);
        user.write(self.addr, &bytes[..bytes.len().min(self.len)])
    }

    /// The place behind the first `len` bytes.
    pub(crate) fn after(self, len: usize) -> Self {
        let len = len.min(self.len);
        Self { addr: self.addr.wrapping_add(len as u64), len: self.len - len }
    }
}

/// Reads a structure.
pub(crate) fn get<T: Plain>(user: &dyn User, addr: u64) -> Result<T, Errno> {
    let mut bytes = vec![0; size_of::<T>()];
    user.read(addr, &mut bytes)?;
    Ok(read_padded(&bytes))
}

/// Checks that memory for the card can be read, and written to unless `read_only`, and brings it in, as the kernel does
/// when it pins pages.
pub(crate) fn pin(addr: u64, len: u64, read_only: bool) -> Result<(), Errno> {
    let page = host_page() as u64;
    let end = addr.checked_add(len).filter(|&end| end <= i64::MAX.unsigned_abs()).ok_or(Errno::FAULT)?;
    let first = addr & !(page - 1);
    let size = end.next_multiple_of(page) - first;
    let (Ok(begin), Ok(length)) = (usize::try_from(first), usize::try_from(size)) else {
        return Err(Errno::FAULT);
    };
    let advice = if read_only { libc::MADV_POPULATE_READ } else { libc::MADV_POPULATE_WRITE };
    // SAFETY: populating changes no contents, and the kernel checks the range.
    let done = unsafe { libc::madvise(std::ptr::with_exposed_provenance_mut(begin), length, advice) };
    if done == 0 {
        return Ok(());
    }
    // EINVAL: an old kernel, memory of a device, which is always there, or pages without this right.
    if Errno::from_raw_os_error(last_errno()) != Errno::INVAL || !read_only && !is_writable(first, end) {
        return Err(Errno::FAULT);
    }
    (first..end).step_by(usize::try_from(page).map_err(|_| Errno::FAULT)?).try_for_each(|addr| {
        let mut byte = [0];
        ThisProcess.read(addr, &mut byte)
    })
}

/// A mapping of this process.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) range: std::ops::Range<u64>,
    is_writable: bool,
    /// What is mapped, as the kernel names it.
    pub(crate) name: String,
}

/// The mappings that overlap a range.
pub(crate) fn mappings(range: std::ops::Range<u64>) -> Vec<Mapping> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let all = maps.lines().filter_map(Mapping::parse);
    all.filter(|mapping| mapping.range.start < range.end && range.start < mapping.range.end).collect()
}

impl Mapping {
    /// A line of `/proc/self/maps`.
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let (from, to) = words.next()?.split_once('-')?;
        let [from, to] = [from, to].map(|text| u64::from_str_radix(text, 16).ok());
        let is_writable = words.next()?.as_bytes().get(1) == Some(&b'w');
        // Offset, device and inode are between.
        Some(Self { range: from?..to?, is_writable, name: words.skip(3).collect::<Vec<_>>().join(" ") })
    }
}

/// Whether all mappings in this range may be written to.
fn is_writable(first: u64, end: u64) -> bool {
    let mappings = mappings(first..end);
    !mappings.is_empty() && mappings.iter().all(|mapping| mapping.is_writable)
}

/// `errno` of this thread.
pub(crate) fn last_errno() -> i32 {
    // SAFETY: it is the address of this thread's variable.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: it is always initialized.
    unsafe { *place }
}

/// Sets `errno` of this thread.
pub(crate) fn set_errno(errno: i32) {
    // SAFETY: it is the address of this thread's variable.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: it may be written at any time.
    unsafe { *place = errno };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_addresses_are_faults() {
        let mut out = [0; 8];
        for addr in [0, 8, u64::MAX, u64::MAX - 7, 1 << 46] {
            assert_eq!(ThisProcess.read(addr, &mut out), Err(Errno::FAULT), "{addr:#x}");
            assert_eq!(ThisProcess.write(addr, &out), Err(Errno::FAULT), "{addr:#x}");
            assert_eq!(pin(addr, 8, false), Err(Errno::FAULT), "{addr:#x}");
        }
        let value = 0x0102_0304_0506_0708_u64;
        let addr = &raw const value as u64;
        assert_eq!(get::<u64>(&ThisProcess, addr), Ok(value));
        assert_eq!(pin(addr, 8, false), Ok(()));
        assert_eq!(pin(addr, u64::MAX, false), Err(Errno::FAULT));
    }

    #[test]
    fn read_only_pages_are_pinned_only_for_reading() {
        static TEXT: &str = "in a segment without the right to write";
        let addr = TEXT.as_ptr() as u64;
        assert_eq!(pin(addr, 8, true), Ok(()));
        assert_eq!(pin(addr, 8, false), Err(Errno::FAULT));
    }

    #[test]
    fn mappings_have_ranges_rights_and_names() {
        let line = "7f00-8000 rw-s 00009000 00:01 4242                  /memfd:uverbs (deleted)";
        let expected =
            Mapping { range: 0x7f00..0x8000, is_writable: true, name: "/memfd:uverbs (deleted)".into() };
        assert_eq!(Mapping::parse(line), Some(expected));
        assert!(!Mapping::parse("1000-2000 r--p 00000000 00:00 0").unwrap().is_writable);
        assert_eq!(Mapping::parse("nonsense"), None);
        let here = mappings(line.as_ptr() as u64..line.as_ptr() as u64 + 1);
        assert!(matches!(&here[..], [Mapping { name, .. }] if name.starts_with('/')), "{here:?}");
    }

    #[test]
    fn a_response_is_cut_to_its_place() {
        let mut room = [0u8; 8];
        let place = Place { addr: room.as_mut_ptr() as u64, len: 6 };
        place.put(&ThisProcess, &u64::MAX).unwrap();
        assert_eq!(room, [255, 255, 255, 255, 255, 255, 0, 0]);
        assert_eq!(place.after(4), Place { addr: place.addr + 4, len: 2 });
        assert_eq!(place.after(40), Place { addr: place.addr + 6, len: 0 });
    }
}
