//! Functions that take descriptors: `read`, `write`, `ioctl`, those that close and duplicate, and `socket`.

use std::ffi::{c_int, c_uint, c_ulong, c_void};

use rustix::io::Errno;

use super::{descriptor, finish, inside, next};
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

/// Whether a read of a channel has no room for an event, which a kernel refuses.
fn is_too_small(fd: c_int, count: usize) -> bool {
    match descriptor(fd) {
        Some(Open::Channel(context)) => {
            inside(|| context.upgrade()?.event_size(fd)).flatten().is_some_and(|size| count < size)
        }
        _ => false,
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn read(fd: c_int, buffer: *mut c_void, count: usize) -> isize {
    if is_too_small(fd, count) {
        return finish(|| Err(Errno::INVAL));
    }
    next!(read(fd => c_int, buffer => *mut c_void, count => usize) -> isize, else -1)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn __read_chk(fd: c_int, buffer: *mut c_void, count: usize, size: usize) -> isize {
    if is_too_small(fd, count) {
        return finish(|| Err(Errno::INVAL));
    }
    next!(__read_chk(fd => c_int, buffer => *mut c_void, count => usize, size => usize) -> isize, else -1)
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

/// A descriptor is closed.
fn forget(fd: c_int) {
    if may_be_ours(fd) {
        finish(|| {
            Process::forget(fd);
            Ok(0)
        });
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn close(fd: c_int) -> c_int {
    forget(fd);
    next!(close(fd => c_int) -> c_int, else -1)
}

/// Descriptors in a range are closed, not the last one.
fn forget_range(range: std::ops::Range<c_int>) {
    finish(|| {
        Process::forget_range(range);
        Ok(0)
    });
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    if flags & libc::CLOSE_RANGE_CLOEXEC.cast_signed() == 0 && first <= last {
        let number = |fd: c_uint| c_int::try_from(fd).unwrap_or(c_int::MAX);
        forget_range(number(first)..number(last).saturating_add(1));
    }
    next!(close_range(first => c_uint, last => c_uint, flags => c_int) -> c_int, else {
        finish(|| Err(Errno::NOSYS))
    })
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn closefrom(first: c_int) {
    forget_range(first.max(0)..c_int::MAX);
    next!(closefrom(first => c_int) -> (), else ());
}

/// A call duplicated a descriptor. Returns the new one, or -1.
fn duplicated(fd: c_int, new: c_int) -> c_int {
    if new >= 0 && new != fd {
        // What it was is closed.
        forget(new);
        if may_be_ours(fd) {
            finish(|| {
                Process::duplicated(fd, new);
                Ok(0)
            });
        }
    }
    new
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn dup(fd: c_int) -> c_int {
    duplicated(fd, next!(dup(fd => c_int) -> c_int, else -1))
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn dup2(fd: c_int, to: c_int) -> c_int {
    duplicated(fd, next!(dup2(fd => c_int, to => c_int) -> c_int, else -1))
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    duplicated(fd, next!(dup3(fd => c_int, to => c_int, flags => c_int) -> c_int, else -1))
}

macro_rules! fcntls {
    ($($name:ident)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub(crate) extern "C" fn $name(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
            let done = next!($name(fd => c_int, command => c_int, argument => c_ulong) -> c_int, else -1);
            match command {
                libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => duplicated(fd, done),
                _ => done,
            }
        }
    )*};
}

fcntls! { fcntl fcntl64 }

#[cfg_attr(not(test), unsafe(no_mangle))]
pub(crate) extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    if domain == libc::AF_NETLINK && protocol == NETLINK_RDMA {
        return finish(|| Err(Errno::PROTONOSUPPORT));
    }
    next!(socket(domain => c_int, kind => c_int, protocol => c_int) -> c_int, else -1)
}

#[cfg(test)]
mod tests {
    use super::super::files::open;
    use super::*;

    fn is_dir(fd: c_int) -> bool {
        matches!(descriptor(fd), Some(Open::Dir(_)))
    }

    #[test]
    fn duplicates_are_known_and_closed_ones_are_not() {
        let fd = open(c"/sys/class/infiniband".as_ptr(), libc::O_DIRECTORY, 0);
        let file = open(c"/dev/null".as_ptr(), libc::O_RDONLY, 0);
        // Numbers that no other test gets.
        let duplicates = [
            dup(fd),
            dup2(fd, 1000),
            dup3(fd, 1001, libc::O_CLOEXEC),
            fcntl(fd, libc::F_DUPFD, 1002),
            fcntl64(fd, libc::F_DUPFD_CLOEXEC, 1003),
        ];
        assert_eq!(close(fd), 0);
        assert!(!is_dir(fd));
        assert!(duplicates.iter().all(|&fd| is_dir(fd)), "{duplicates:?}");
        assert_eq!(dup2(file, 1000), 1000);
        assert!(!is_dir(1000), "it was replaced");
        assert_eq!(dup2(duplicates[0], duplicates[0]), duplicates[0]);
        assert!(is_dir(duplicates[0]));
        assert_eq!(dup2(-1, 1001), -1);
        assert!(is_dir(1001), "nothing was replaced");
        let cloexec = libc::CLOSE_RANGE_CLOEXEC.cast_signed();
        assert_eq!(
            (close_range(1001, 1002, cloexec), is_dir(1001)),
            (0, true),
            "only when a program is executed"
        );
        assert_eq!(close_range(1001, 1002, 0), 0);
        assert_eq!([1001, 1002, 1003].map(is_dir), [false, false, true]);
        for fd in [file, 1000, 1003, duplicates[0]] {
            assert_eq!(close(fd), 0);
        }
    }
}
