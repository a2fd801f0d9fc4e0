//! Copies from and to memory that its program may have unmapped: by the kernel, which checks the addresses.
//!
//! They go through a memory file; each process has one. `process_vm_readv` would do without it, but waits for threads
//! that map and unmap memory: up to a third of a second where 16 of them share two cores, against a microsecond.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

use parking_lot::Mutex;

use super::{Memory, memfd};
use crate::error::{Error, Result};
use crate::fork_guard::PerProcess;

/// Bytes that are copied at once.
const SIZE: usize = 64 << 10;

/// A file in memory, and a mapping of it.
struct Bounce {
    file: OwnedFd,
    memory: Memory,
}

static BOUNCE: PerProcess<Mutex<Bounce>> = PerProcess::new();

/// That of this process, made by the first call.
fn bounce() -> Result<&'static Mutex<Bounce>> {
    BOUNCE.get_or_try(|| {
        let file = memfd(c"gdsync-bounce", SIZE)?;
        let memory = Memory::map_shared(file.as_fd(), SIZE)?;
        Ok(Mutex::new(Bounce { file, memory }))
    })
}

/// Opens the file, which else the first copy does.
pub(super) fn prepare() -> Result<()> {
    bounce().map(|_| ())
}

fn fault(error: io::Error) -> Error {
    Error::os("a copy of registered memory", error, "deregister memory before it is unmapped")
}

/// Whether a call moved all.
fn moved(count: isize, len: usize) -> Result<()> {
    match usize::try_from(count) {
        Ok(count) if count == len => Ok(()),
        // It ended where nothing is mapped.
        Ok(_) => Err(fault(io::Error::from_raw_os_error(libc::EFAULT))),
        Err(_) => Err(fault(io::Error::last_os_error())),
    }
}

/// Copies from the program.
pub(super) fn load(from: *const u8, out: &mut [u8]) -> Result<()> {
    let bounce = bounce()?.lock();
    out.chunks_mut(SIZE).zip((0..).step_by(SIZE)).try_for_each(|(out, at)| {
        // SAFETY: the kernel checks the address, and only reads.
        let count =
            unsafe { libc::pwrite(bounce.file.as_raw_fd(), from.wrapping_add(at).cast(), out.len(), 0) };
        moved(count, out.len())?;
        bounce.memory.read(0, out)
    })
}

/// Copies to the program. What [`head`] leaves out is visible last: programs poll it, and the kernel copies in any order.
///
/// # Safety
/// If `to` is mapped, the caller may write to it.
pub(super) unsafe fn store(data: &[u8], to: *mut u8) -> Result<()> {
    let bounce = bounce()?.lock();
    let (first, last) = data.split_at(head(to.addr(), data.len()));
    let chunks = first.chunks(SIZE).zip((0..).step_by(SIZE)).chain([(last, first.len())]);
    chunks.filter(|(data, _)| !data.is_empty()).try_for_each(|(data, at)| {
        bounce.memory.write(0, data)?;
        // SAFETY: the kernel checks the address, and the caller may write there.
        let count =
            unsafe { libc::pread(bounce.file.as_raw_fd(), to.wrapping_add(at).cast(), data.len(), 0) };
        moved(count, data.len())
    })
}

/// How many of `len` bytes at `addr` come before the last 8, or before what of these is in the last cache line.
fn head(addr: usize, len: usize) -> usize {
    const LINE: usize = 64;
    let last = addr.wrapping_add(len).wrapping_sub(1) % LINE + 1;
    len - len.min(last).min(8)
}

/// Checks that a word may be written to, without a change: `FUTEX_WAKE_OP` adds 0 to it. Unlike `MADV_POPULATE_WRITE` it does not wait
/// for threads that map and unmap memory.
pub(super) fn check_writable(word: NonNull<u32>) -> Result<()> {
    static NOBODY_WAITS: AtomicU32 = AtomicU32::new(0);
    let (call, operation) = (libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG, libc::FUTEX_OP_ADD << 28);
    // SAFETY: the kernel checks the address of the word, and leaves it as it is.
    let done = unsafe {
        libc::syscall(libc::SYS_futex, NOBODY_WAITS.as_ptr(), call, 0, 0_usize, word.as_ptr(), operation)
    };
    if done < 0 { Err(fault(io::Error::last_os_error())) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::head;

    #[test]
    fn the_last_bytes_of_the_last_line_come_last() {
        for (addr, len, expected) in [
            (64, 0, 0),
            (64, 1, 0),
            (68, 8, 0),
            (64, 16, 8),
            (60, 8, 4),
            (64, 64, 56),
            (64, 68, 64),
            (0, 4096, 4088),
            (1, 4096, 4095),
        ] {
            assert_eq!(head(addr, len), expected, "{len} bytes at {addr}");
        }
    }
}
