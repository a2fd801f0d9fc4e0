//! A mapping that a simulated device made, as far as the device knows of it.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::Object;
use crate::kernel::{Kernel, Linux};
use crate::memory_file::{memory_file, take_away};

/// A mapping of physical memory in the user's address space. The user unmaps it without a word.
#[derive(Debug)]
pub(super) struct Vma {
    addr: usize,
    len: usize,
    /// What lies at the first byte.
    inode: u64,
    offset: u64,
}

impl Vma {
    /// Maps the first `len` bytes of `pieces` (object, first byte, bytes), one behind the other.
    ///
    /// # Safety
    /// With `at`, the range must be the caller's own reservation, with nothing in it.
    pub(super) unsafe fn new(
        pieces: &[(Arc<Object>, usize, usize)],
        len: usize,
        at: Option<NonNull<u8>>,
    ) -> io::Result<Self> {
        let Some((first, offset, _)) = pieces.first() else {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        };
        let inode = File::from(first.fd().try_clone_to_owned()?).metadata()?.ino();
        let start = at.map_or_else(|| reserve(len), Ok)?;
        let mut done = 0;
        for (object, offset, piece) in pieces {
            let part = (*piece).min(len - done);
            if part == 0 {
                break;
            }
            // SAFETY: inside the reservation.
            let here = unsafe { start.add(done) };
            // SAFETY: a part of the reservation that nothing was mapped into so far.
            unsafe { Linux.mmap(object.fd(), part, *offset as u64, Some(here)) }?;
            done += part;
        }
        Ok(Self { addr: start.as_ptr().expose_provenance(), len, inode, offset: *offset as u64 })
    }

    pub(super) fn ptr(&self) -> NonNull<u8> {
        NonNull::new(std::ptr::with_exposed_provenance_mut(self.addr)).expect("mapped above address 0")
    }

    /// Whether the two cover a common byte; then the older one is gone.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        self.addr < other.addr + other.len && other.addr < self.addr + self.len
    }

    /// Whether the user has not unmapped it.
    pub(super) fn is_there(&self) -> bool {
        fs::read_to_string("/proc/self/maps").is_ok_and(|maps| maps.lines().any(|line| self.shows(line)))
    }

    /// Whether a line of `/proc/self/maps` has this mapping, perhaps merged with a neighbour.
    fn shows(&self, line: &str) -> bool {
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let fields: Vec<_> = line.split_whitespace().collect();
        let [range, _, offset, _, inode, ..] = fields[..] else { return false };
        let Some((Some(start), Some(end))) = range.split_once('-').map(|(start, end)| (hex(start), hex(end)))
        else {
            return false;
        };
        let addr = self.addr as u64;
        (start..end).contains(&addr)
            && inode.parse() == Ok(self.inode)
            && hex(offset).is_some_and(|offset| offset + (addr - start) == self.offset)
    }

    /// Takes the pages away; the range stays, and an access raises `SIGBUS`.
    pub(super) fn zap(&self) {
        if !self.is_there() {
            return;
        }
        // SAFETY: the range is still what this device mapped; that its user loses it is the point.
        unsafe { take_away(self.ptr(), self.len) }.expect("room for a mapping");
    }
}

fn reserve(len: usize) -> io::Result<NonNull<u8>> {
    let file = memory_file(c"reserved", 0)?;
    // SAFETY: no place is asked for.
    unsafe { Linux.mmap(file.as_fd(), len, 0, None) }
}
