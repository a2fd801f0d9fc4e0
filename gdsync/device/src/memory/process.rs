//! Reads from host memory of another process by cross-memory attach (CMA).

use std::io;
use std::mem::MaybeUninit;

use super::Memory;

/// Bytes of a process's mark.
pub const MARK: usize = 12;

/// The effective user of this process.
pub fn user() -> libc::uid_t {
    // SAFETY: it only returns a number.
    unsafe { libc::geteuid() }
}

/// A process of this machine. Each read also reads its mark, to detect that another process has its PID now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// PID in the namespace of this process.
    pub pid: libc::pid_t,
    /// Random bytes that it has chosen.
    pub mark: [u8; MARK],
    /// Address of the mark in that process.
    pub mark_at: u64,
}

impl Process {
    /// Checks that the kernel permits reads.
    ///
    /// # Errors
    /// `EPERM` if not; `ESRCH` if the process is gone.
    pub fn probe(&self) -> io::Result<()> {
        // SAFETY: nothing is written.
        unsafe { self.read(0, std::ptr::null_mut(), 0) }
    }

    /// Reads `len` bytes at `from` to `to`, whose content is unspecified after a failure.
    ///
    /// # Safety
    /// `to` must be valid for writing.
    unsafe fn read(&self, from: u64, to: *mut u8, len: usize) -> io::Result<()> {
        let mut mark = MaybeUninit::<[u8; MARK]>::zeroed();
        let piece = |base: *mut u8, len| libc::iovec { iov_base: base.cast(), iov_len: len };
        let addr = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
        let there = |at: u64, len| piece(std::ptr::without_provenance_mut(addr(at)), len);
        let local = [piece(mark.as_mut_ptr().cast(), MARK), piece(to, len)];
        let remote = [there(self.mark_at, MARK), there(from, len)];
        // SAFETY: the local pieces are valid for writing, by contract; addresses of the other process are only numbers here.
        let got = unsafe { libc::process_vm_readv(self.pid, local.as_ptr(), 2, remote.as_ptr(), 2, 0) };
        let got = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
        // SAFETY: any bytes are valid, and all were written.
        if got >= MARK && unsafe { mark.assume_init() } != self.mark {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        if got == MARK + len { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EFAULT)) }
    }
}

impl Memory {
    /// The address of the bytes at `offset`, for processes that read them; `None` for GPU memory.
    pub fn host_addr(&self, offset: usize) -> Option<u64> {
        if !self.is_host() {
            return None;
        }
        Some(self.check(offset, 0).ok()?.addr().get() as u64)
    }

    /// Copies `len` bytes at address `from` of another process to `offset`.
    ///
    /// # Errors
    /// `ESRCH` if the process is gone, `EFAULT` if the address is not mapped there; any if this is GPU memory or the range is outside.
    pub fn read_from_process(&self, offset: usize, len: usize, of: &Process, from: u64) -> io::Result<()> {
        let to = self.check(offset, len).map_err(io::Error::other)?;
        if !self.is_host() {
            return Err(io::Error::other("it is memory of a GPU"));
        }
        // SAFETY: the range was checked, and is of host memory.
        unsafe { of.read(from, to.as_ptr(), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static OWN: [u8; MARK] = *b"mark of ours";

    fn this() -> Process {
        let pid = libc::pid_t::try_from(std::process::id()).unwrap();
        Process { pid, mark: OWN, mark_at: OWN.as_ptr().addr() as u64 }
    }

    #[test]
    fn bytes_are_read_from_the_process_that_has_the_mark() {
        let (from, to) = (Memory::alloc(100).unwrap(), Memory::alloc(100).unwrap());
        from.write(0, &[7; 100]).unwrap();
        let at = from.host_addr(10).unwrap();
        this().probe().unwrap();
        to.read_from_process(20, 30, &this(), at).unwrap();
        assert_eq!(to.to_vec(), [vec![0; 20], vec![7; 30], vec![0; 50]].concat());
        let raw = |result: io::Result<()>| result.unwrap_err().raw_os_error();
        let other = Process { mark: [1; MARK], ..this() };
        assert_eq!(raw(other.probe()), Some(libc::ESRCH));
        assert_eq!(raw(to.read_from_process(0, 1, &other, at)), Some(libc::ESRCH));
        assert_eq!(raw(to.read_from_process(0, 1, &this(), 8)), Some(libc::EFAULT), "nothing is there");
        assert_eq!(raw(Process { mark_at: 8, ..this() }.probe()), Some(libc::EFAULT));
        assert!(to.read_from_process(90, 11, &this(), at).is_err(), "out of bounds");
    }
}
