//! Copies from and to memory that its program may have unmapped: by the kernel, which checks the addresses.
//!
//! They go by way of a file in memory, of which each process has one. `process_vm_readv` would do without it, but waits for threads that
//! map and unmap memory: up to a third of a second where 16 of them share two cores, against a microsecond.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use parking_lot::Mutex;

use super::{Memory, memfd};
use crate::error::{Error, Result};
use crate::fork_guard::ForkGuard;

/// Bytes that are copied at once.
const SIZE: usize = 64 << 10;

/// A file in memory, and a mapping of it.
struct Bounce {
    file: OwnedFd,
    memory: Memory,
}

/// That of a process.
struct OfProcess {
    fork_guard: ForkGuard,
    bounce: Mutex<Bounce>,
}

/// That of this process or, in a forked child that has not copied yet, of its parent. Never freed: threads may use it until the
/// process ends.
static CURRENT: AtomicPtr<OfProcess> = AtomicPtr::new(ptr::null_mut());

impl OfProcess {
    /// That of this process, made by the first call.
    fn this() -> Result<&'static Self> {
        loop {
            let known = CURRENT.load(Ordering::Acquire);
            // SAFETY: null, or a box that is never freed, published with Release.
            if let Some(this) = unsafe { known.as_ref() }.filter(|known| known.fork_guard.is_here()) {
                return Ok(this);
            }
            let file = memfd(c"gdsync-bounce", SIZE)?;
            let memory = Memory::map_shared(file.as_fd(), SIZE)?;
            let bounce = Mutex::new(Bounce { file, memory });
            let new = Box::into_raw(Box::new(Self { fork_guard: ForkGuard::default(), bounce }));
            if CURRENT.compare_exchange(known, new, Ordering::AcqRel, Ordering::Acquire).is_err() {
                // SAFETY: it comes from `into_raw` above and was not published.
                drop(unsafe { Box::from_raw(new) });
            }
        }
    }
}

/// Opens the file, which else the first copy does.
pub(super) fn prepare() -> Result<()> {
    OfProcess::this().map(|_| ())
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
    let bounce = OfProcess::this()?.bounce.lock();
    out.chunks_mut(SIZE).zip((0..).step_by(SIZE)).try_for_each(|(out, at)| {
        // SAFETY: the kernel checks the address, and only reads.
        let count =
            unsafe { libc::pwrite(bounce.file.as_raw_fd(), from.wrapping_add(at).cast(), out.len(), 0) };
        moved(count, out.len())?;
        bounce.memory.read(0, out)
    })
}

/// Copies to the program.
///
/// # Safety
/// If `to` is mapped, the caller may write to it.
pub(super) unsafe fn store(data: &[u8], to: *mut u8) -> Result<()> {
    let bounce = OfProcess::this()?.bounce.lock();
    data.chunks(SIZE).zip((0..).step_by(SIZE)).try_for_each(|(data, at)| {
        bounce.memory.write(0, data)?;
        // SAFETY: the kernel checks the address, and the caller may write there.
        let count =
            unsafe { libc::pread(bounce.file.as_raw_fd(), to.wrapping_add(at).cast(), data.len(), 0) };
        moved(count, data.len())
    })
}
