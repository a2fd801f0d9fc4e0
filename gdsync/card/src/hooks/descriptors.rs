//! Functions that take descriptors: `write`, `ioctl`, `close`, `dup`, and `socket`.

use std::ffi::{c_int, c_ulong, c_void};

use rustix::io::Errno;

use super::{descriptor, finish, next};
use crate::process::{Open, Process, may_be_ours};
use crate::user::{ThisProcess, User as _};

/// `_IOWR(0x1b, 1, struct ib_uverbs_ioctl_hdr)`
const RDMA_VERBS_IOCTL: c_ulong = 0xc018_1b01;
/// `NETLINK_RDMA`. Without it, libibverbs reads sysfs.
const NETLINK_RDMA: c_int = 20;
/// The longest command, of 2^16 words of each kind.
const MAX_COMMAND: usize = 1 << 20;

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn write(fd: c_int, buffer: *const c_void, count: usize) -> isize {
    match descriptor(fd) {
        Some(Open::Device { context, .. }) => finish(|| {
            if count > MAX_COMMAND {
                return Err(Errno::INVAL);
            }
            let mut bytes = vec![0; count];
            ThisProcess.read(buffer as u64, &mut bytes)?;
            Process::this().write(&context, &bytes)?;
            isize::try_from(count).map_err(|_| Errno::INVAL)
        }),
        // The parent's objects are not here.
        Some(Open::Inherited) => finish(|| Err(Errno::IO)),
        Some(Open::Dir(_)) => finish(|| Err(Errno::BADF)),
        Some(Open::Channel(_)) | None => {
            next!(write(fd => c_int, buffer => *const c_void, count => usize) -> isize, else -1)
        }
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    match descriptor(fd) {
        Some(Open::Device { context, .. }) => finish(|| {
            if request != RDMA_VERBS_IOCTL {
                return Err(Errno::NOTTY);
            }
            Process::this().ioctl(&context, argument as u64).map(|()| 0)
        }),
        Some(Open::Inherited) if request == RDMA_VERBS_IOCTL => finish(|| Err(Errno::IO)),
        _ => {
            next!(ioctl(fd => c_int, request => c_ulong, argument => *mut c_void) -> c_int, else -1)
        }
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn close(fd: c_int) -> c_int {
    if may_be_ours(fd) {
        finish(|| {
            Process::forget(fd);
            Ok(0)
        });
    }
    next!(close(fd => c_int) -> c_int, else -1)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn dup(fd: c_int) -> c_int {
    let new = next!(dup(fd => c_int) -> c_int, else -1);
    if new >= 0 && may_be_ours(fd) {
        finish(|| {
            Process::duplicated(fd, new);
            Ok(0)
        });
    }
    new
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    if domain == libc::AF_NETLINK && protocol == NETLINK_RDMA {
        return finish(|| Err(Errno::PROTONOSUPPORT));
    }
    next!(socket(domain => c_int, kind => c_int, protocol => c_int) -> c_int, else -1)
}
