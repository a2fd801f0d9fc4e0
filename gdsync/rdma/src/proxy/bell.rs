//! Event count of a process over an eventfd, slept on together with the device's completion channel.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use gdsync_device::error::{Error, Result};
use gdsync_shm::event_count;

/// One thread sleeps; any thread notifies.
#[derive(Debug)]
pub(super) struct Bell {
    sleepers: AtomicU32,
    sequence: AtomicU32,
    /// Eventfd, readable when notified since the sleeper announced itself.
    fd: OwnedFd,
}

impl Bell {
    pub(super) fn create() -> Result<Self> {
        // SAFETY: no pointers are passed.
        let raw = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if raw < 0 {
            return Err(Error::last_os("eventfd", "raise the limit of open files (ulimit -n)"));
        }
        // SAFETY: `eventfd` returned this descriptor; nothing else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        Ok(Self { sleepers: AtomicU32::new(0), sequence: AtomicU32::new(0), fd })
    }

    /// Wakes the sleeper. Without one this costs a fence and a load.
    pub(super) fn ring(&self) {
        if event_count::ring(&self.sleepers, &self.sequence) {
            let one = 1u64;
            // SAFETY: `one` has eight bytes. The write fails only when the counter is full, and then the eventfd is
            // readable.
            unsafe { libc::write(self.fd.as_raw_fd(), (&raw const one).cast(), 8) };
        }
    }

    /// Sleeps unless `ready`, until notified, until `other` is readable, or for `timeout`. May wake spuriously. Returns
    /// whether `other` is readable.
    pub(super) fn sleep(&self, other: RawFd, ready: &dyn Fn() -> bool, timeout: Duration) -> bool {
        event_count::announce(&self.sleepers, &self.sequence);
        if ready() {
            return false;
        }
        let entry = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut fds = [entry(self.fd.as_raw_fd()), entry(other)];
        let time = libc::timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        // SAFETY: the array has two entries, and the timeout is on the stack; no signal mask is set.
        let woken = unsafe { libc::ppoll(fds.as_mut_ptr(), 2, &raw const time, ptr::null()) };
        if woken > 0 && fds[0].revents != 0 {
            let mut count = 0u64;
            // SAFETY: the buffer has eight bytes, and the eventfd does not block.
            unsafe { libc::read(self.fd.as_raw_fd(), (&raw mut count).cast(), 8) };
        }
        woken > 0 && fds[1].revents != 0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Instant;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    #[test]
    fn no_notification_is_lost() {
        let bell = Arc::new(Bell::create().unwrap());
        let work = Arc::new(AtomicU64::new(0));
        let (ringer, published) = (bell.clone(), work.clone());
        let thread = std::thread::spawn(move || {
            for n in 1..=2000 {
                published.store(n, Ordering::Release);
                ringer.ring();
                if n % 200 == 0 {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        let quiet = Bell::create().unwrap();
        let start = Instant::now();
        let mut seen = 0;
        while seen < 2000 {
            bell.sleep(quiet.fd.as_raw_fd(), &|| work.load(Ordering::Acquire) > seen, PATIENCE);
            seen = work.load(Ordering::Acquire);
            assert!(start.elapsed() < PATIENCE, "a ring was lost");
        }
        thread.join().unwrap();
    }

    #[test]
    fn other_descriptor_and_timeout_wake_the_sleeper() {
        let (bell, other) = (Bell::create().unwrap(), Bell::create().unwrap());
        let fd = other.fd.as_raw_fd();
        let start = Instant::now();
        assert!(!bell.sleep(fd, &|| false, Duration::from_millis(20)));
        assert!(start.elapsed() >= Duration::from_millis(19));
        other.sleepers.store(1, Ordering::Release);
        other.ring();
        assert!(bell.sleep(fd, &|| false, PATIENCE));
        assert!(start.elapsed() < PATIENCE);
    }
}
