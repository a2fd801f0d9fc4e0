//! Copies from and to memory that its program may have unmapped: by the kernel, which checks the addresses.
//!
//! They go by way of a file in memory, of which each thread has one. `process_vm_readv` would do without it, but waits for threads that
//! map and unmap memory: up to a third of a second where 16 of them share two cores, against a microsecond.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};

use super::{Memory, memfd};
use crate::error::{Error, Result};
use crate::fork_guard::ForkGuard;

/// Bytes that are copied at once.
const SIZE: usize = 64 << 10;

/// A file in memory, and a mapping of it.
struct Bounce {
    file: OwnedFd,
    memory: Memory,
    /// A child has the file of its parent.
    fork_guard: ForkGuard,
}

thread_local! {
    static BOUNCE: RefCell<Option<Bounce>> = const { RefCell::new(None) };
}

impl Bounce {
    fn new() -> Result<Self> {
        let file = memfd(c"gdsync-bounce", SIZE)?;
        let memory = Memory::map_shared(file.as_fd(), SIZE)?;
        Ok(Self { file, memory, fork_guard: ForkGuard::default() })
    }

    /// Calls `copy` with that of this thread.
    fn with(copy: impl FnOnce(&Self) -> Result<()>) -> Result<()> {
        let used = BOUNCE.try_with(|bounce| {
            let mut bounce = bounce.borrow_mut();
            if bounce.as_ref().is_none_or(|bounce| !bounce.fork_guard.is_here()) {
                *bounce = Some(Self::new()?);
            }
            bounce.as_ref().map_or(Ok(()), copy)
        });
        used.unwrap_or_else(|_| Err(fault(io::ErrorKind::Other.into())))
    }
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
    Bounce::with(|bounce| {
        out.chunks_mut(SIZE).zip((0..).step_by(SIZE)).try_for_each(|(out, at)| {
            // SAFETY: the kernel checks the address, and only reads.
            let count =
                unsafe { libc::pwrite(bounce.file.as_raw_fd(), from.wrapping_add(at).cast(), out.len(), 0) };
            moved(count, out.len())?;
            bounce.memory.read(0, out)
        })
    })
}

/// Copies to the program.
///
/// # Safety
/// If `to` is mapped, the caller may write to it.
pub(super) unsafe fn store(data: &[u8], to: *mut u8) -> Result<()> {
    Bounce::with(|bounce| {
        data.chunks(SIZE).zip((0..).step_by(SIZE)).try_for_each(|(data, at)| {
            bounce.memory.write(0, data)?;
            // SAFETY: the kernel checks the address, and the caller may write there.
            let count =
                unsafe { libc::pread(bounce.file.as_raw_fd(), to.wrapping_add(at).cast(), data.len(), 0) };
            moved(count, data.len())
        })
    })
}
