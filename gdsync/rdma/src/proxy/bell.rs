//! What the proxy's thread sleeps on: a bell of this process, and the completions of the device.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use gdsync_device::error::{Error, Result};
use gdsync_shm::event_count;

/// One thread sleeps on it, any number ring it.
#[derive(Debug)]
pub(super) struct Bell {
    sleepers: AtomicU32,
    sequence: AtomicU32,
    /// An eventfd, readable when somebody has rung since the sleeper announced itself.
    fd: OwnedFd,
}

impl Bell {
    pub(super) fn create() -> Result<Self> {
        // SAFETY: no pointers.
        let raw = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if raw < 0 {
            return Err(Error::last_os("eventfd", "raise the limit of open files (ulimit -n)"));
        }
        // SAFETY: the descriptor is fresh and nobody else's.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        Ok(Self { sleepers: AtomicU32::new(0), sequence: AtomicU32::new(0), fd })
    }

    /// Wakes the sleeper. While nobody sleeps this costs a fence and a load.
    pub(super) fn ring(&self) {
        if event_count::ring(&self.sleepers, &self.sequence) {
            let one = 1u64;
            // SAFETY: eight bytes to an eventfd. It is only refused when the count is full, and then it is readable.
            unsafe { libc::write(self.fd.as_raw_fd(), (&raw const one).cast(), 8) };
        }
    }

    /// Sleeps unless `ready`, until rung, until `other` is readable, or for `timeout`. May return for no reason. Returns whether
    /// `other` is readable.
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
        // SAFETY: two entries, a time, no signal mask.
        let woken = unsafe { libc::ppoll(fds.as_mut_ptr(), 2, &raw const time, ptr::null()) };
        if woken > 0 && fds[0].revents != 0 {
            let mut count = 0u64;
            // SAFETY: eight bytes from an eventfd that does not block.
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
    fn no_ring_is_lost() {
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
    fn the_other_descriptor_wakes_too_and_time_passes() {
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
