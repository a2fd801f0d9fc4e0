//! The module of `kmod/` in the kernel that this runs on, in place of the simulated one: for the tests of `tests/vm`.
//! GPU memory is then that of the module's made-up GPU. One test at a time: counters are the machine's.

use std::ffi::c_void;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use super::provider::{Backing, CHUNK, Object};
use super::{Module, VaRange};
use crate::backend::gdrdrv::abi::{
    self, GetAttr, GetCallbackFlag, GetInfo, GetInfoV2, GetVersion, PATH, PinBuffer, PinBufferV2,
    ReqMappingType, Request, UnpinBuffer,
};
use crate::cuda::MemoryKind;
use crate::kernel::{Kernel, Linux};

/// Whether `GDRCOPY_TEST_KMOD` asks for it.
pub(crate) fn is_wanted() -> bool {
    std::env::var_os("GDRCOPY_TEST_KMOD").is_some()
}

pub(super) fn open() -> io::Result<OwnedFd> {
    Linux.open(PATH)
}

/// # Safety
/// `arg` must point to the structure of `request`.
pub(super) unsafe fn ioctl(fd: BorrowedFd<'_>, request: u32, arg: *mut c_void) -> io::Result<()> {
    // SAFETY: the caller vouches for `arg`.
    unsafe { Linux.ioctl(fd, request, arg) }
}

/// # Safety
/// With `at`, the range must be the caller's own, with nothing in it that is still of use.
pub(super) unsafe fn mmap(
    fd: BorrowedFd<'_>,
    len: usize,
    offset: u64,
    at: Option<NonNull<u8>>,
) -> io::Result<NonNull<u8>> {
    // SAFETY: the caller vouches for `at`.
    unsafe { Linux.mmap(fd, len, offset, at) }
}

/// Says of the module what the test wants to be said: a version, and whether it knows `FORCE_PCIE`.
///
/// # Safety
/// `arg` must point to the structure of `request`, answered.
pub(super) unsafe fn disguise(module: &Module, request: u32, arg: *mut c_void) {
    match request {
        GetVersion::CODE => {
            // SAFETY: the structure of the number.
            let answer = unsafe { &mut *arg.cast::<GetVersion>() };
            let (driver, library) = (module.version, module.minimum_library);
            answer.driver = abi::version(driver.0, driver.1);
            answer.minimum_library = abi::version(library.0, library.1);
        }
        GetAttr::CODE => {
            // SAFETY: the structure of the number.
            let answer = unsafe { &mut *arg.cast::<GetAttr>() };
            if answer.attr == abi::ATTR_FORCE_PCIE {
                answer.val &= u32::from(module.force_pcie);
            }
        }
        _ => {}
    }
}

/// Addresses that no machine of this process has had: the made-up GPU does not know of machines.
pub(super) fn addresses(first: u64) -> u64 {
    static MACHINES: AtomicU64 = AtomicU64::new(0);
    first + (MACHINES.fetch_add(1, Ordering::Relaxed) << 36)
}

/// A counter of the module.
pub(super) fn counter(name: &str) -> usize {
    let stats = std::fs::read_to_string("/proc/driver/gdrdrv/stats").expect("the module's counters");
    let value = stats.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    value.expect("a counter")
}

/// What the faults of a request are called.
pub(super) fn faults_of(code: u32) -> &'static [&'static str] {
    match code {
        PinBuffer::CODE => &["pin"],
        PinBufferV2::CODE => &["pin v2", "pin"],
        UnpinBuffer::CODE => &["unpin"],
        GetCallbackFlag::CODE => &["flag"],
        GetInfo::CODE => &["info"],
        GetInfoV2::CODE => &["info v2", "info"],
        GetAttr::CODE => &["attr"],
        ReqMappingType::CODE => &["type"],
        GetVersion::CODE => &["version"],
        _ => &[],
    }
}

/// Memory of the made-up GPU: behind PCI where there is room, as on a real one.
pub(super) fn memory(size: usize) -> io::Result<Object> {
    let size = (size as u64).next_multiple_of(CHUNK);
    Object::new(size, Backing::Bar).or_else(|_| Object::new(size, Backing::Ram))
}

/// The chunks that an allocation is shown with, by first address: what shares an object lies in its pages.
pub(super) fn chunks(range: &VaRange) -> (u64, u64, u64) {
    let (offset, len) = (range.offset as u64, range.len as u64);
    if range.kind == MemoryKind::Malloc {
        return (range.base - offset, 0, (range.object.size as u64).next_multiple_of(CHUNK));
    }
    let skip = offset % CHUNK;
    (range.base - skip, offset - skip, (skip + len).next_multiple_of(CHUNK))
}
