//! Links between software HCAs: of one host over packet rings in shared memory, set up over a Unix socket; of any hosts over TCP
//! or libfabric.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub(crate) use fabric::Endpoint;
pub use fabric::fabric_providers;
use gdsync_device::error::Result;
use gdsync_device::memory::{Memory, Word32};
use gdsync_shm::event_count;
pub(crate) use link::{Body, Ends, HcaPort, Peer, Rx, Tx, loopback};
use parking_lot::Mutex;
pub(crate) use port::Port;
#[cfg(test)]
pub(crate) use port::{LinkEnds, name};
pub(crate) use ring::{HEADER, MAX_RECORDS, Piece, PushError, RxHints};
use rustix::thread::futex::{self, Timespec};
pub use tcp::TCP;
pub(crate) use tcp::{FarTx, Sockets, TcpPort};
pub use tcp::{Interface, interfaces, tcp_address};

mod fabric;
mod link;
mod port;
mod ring;
mod tcp;

/// Payload bytes per packet, in place of a card's path MTU.
pub(crate) const SEGMENT: usize = 16 * 1024;
/// Those of links to other hosts, whose systems and libraries take long for a packet.
pub(crate) const FAR_SEGMENT: usize = 64 * 1024;

/// Links of a port with which it takes no more of peers.
const MAX_LINKS: usize = 4096;
/// Connections that a port accepts in a row, before it turns to those that it has.
const ACCEPTS: usize = 16;
/// Maximum connections before their greeting.
const MAX_PENDING_GREETINGS: usize = 64;
/// Pause of a listener after accept fails, as when descriptors run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// Bytes of the shared memory file.
const SIZE: usize = 4096;
/// Offsets of the two words, on separate cache lines.
const SLEEPERS: usize = 0;
const SEQUENCE: usize = 64;

/// Links that peers opened and the HCA has not taken over.
#[derive(Debug)]
struct Accepted<T> {
    links: Mutex<Vec<T>>,
    any: AtomicBool,
}

impl<T> Default for Accepted<T> {
    fn default() -> Self {
        Self { links: Mutex::default(), any: AtomicBool::new(false) }
    }
}

impl<T> Accepted<T> {
    /// Adds the link that `make` returns, if any, and returns whether it did. Until `make` has returned, no link is taken.
    fn add(&self, make: impl FnOnce() -> Option<T>) -> bool {
        let mut links = self.links.lock();
        let made = make();
        let is_made = made.is_some();
        links.extend(made);
        if is_made {
            self.any.store(true, Ordering::Release);
        }
        is_made
    }

    /// Whether there are any.
    fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    fn take(&self) -> Vec<T> {
        let mut links = self.links.lock();
        self.any.store(false, Ordering::Release);
        std::mem::take(&mut *links)
    }
}

/// Threads of any process may sleep and notify. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct EventCount {
    sleepers: Word32,
    sequence: Word32,
    fd: Arc<OwnedFd>,
}

impl EventCount {
    pub(crate) fn create() -> Result<Self> {
        Self::open(gdsync_device::memfd(c"gdsync-bell", SIZE)?)
    }

    /// Maps a peer's event count after checking the size and seals of its file.
    pub(crate) fn open(fd: OwnedFd) -> Result<Self> {
        gdsync_device::check_memfd(&fd, SIZE)?;
        let memory = Memory::map_shared(fd.as_fd(), SIZE)?;
        let (sleepers, sequence) = (memory.word32(SLEEPERS)?, memory.word32(SEQUENCE)?);
        Ok(Self { sleepers, sequence, fd: Arc::new(fd) })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Wakes all sleepers. Without sleepers this costs a fence and a load.
    pub(crate) fn notify(&self) {
        if event_count::notify(self.sleepers.atomic(), self.sequence.atomic()) {
            self.wake();
        }
    }

    /// Wakes all sleepers even if a peer died between its two updates.
    pub(crate) fn notify_always(&self) {
        self.sequence.atomic().fetch_add(1, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        // Fails only for words that are not mapped.
        let _ = futex::wake(self.sequence.atomic(), futex::Flags::empty(), i32::MAX.unsigned_abs());
    }

    /// Sleeps unless `ready`, until notified or for `timeout`. May wake spuriously.
    pub(crate) fn sleep(&self, ready: &dyn Fn() -> bool, timeout: Duration) {
        let ticket = event_count::announce(self.sleepers.atomic(), self.sequence.atomic());
        if ready() {
            return;
        }
        let timeout = Timespec::try_from(timeout).ok();
        // Errors are ends of the sleep: the number has changed, a signal came, or the time is over.
        let _ = futex::wait(self.sequence.atomic(), futex::Flags::empty(), ticket, timeout.as_ref());
    }
}

/// Where the threads of an HCA sleep. Clones share it.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// Packets arrive through shared memory.
    Memory(EventCount),
    /// Packets arrive at sockets.
    Sockets(Arc<Sockets>),
}

impl Event {
    /// Wakes all sleepers. Without sleepers this costs a fence and a load.
    pub(crate) fn notify(&self) {
        match self {
            Self::Memory(event) => event.notify(),
            Self::Sockets(sockets) => sockets.notify(),
        }
    }

    /// Sleeps unless `ready`, until notified, until a packet may have arrived, or for `timeout`. May wake spuriously.
    pub(crate) fn sleep(&self, ready: &dyn Fn() -> bool, timeout: Duration) {
        match self {
            Self::Memory(event) => event.sleep(ready, timeout),
            Self::Sockets(sockets) => sockets.sleep(ready, timeout),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::time::Instant;

    use super::*;

    #[test]
    fn notify_wakes_sleeper_through_another_mapping() {
        let event = EventCount::create().unwrap();
        let other = EventCount::open(event.fd().try_clone_to_owned().unwrap()).unwrap();
        let work = Arc::new(AtomicU64::new(0));
        let seen = work.clone();
        let sleeper = std::thread::spawn(move || {
            let start = Instant::now();
            for n in 1..=1000 {
                while seen.load(Ordering::Acquire) < n {
                    event.sleep(&|| seen.load(Ordering::Acquire) >= n, Duration::from_secs(30));
                    assert!(start.elapsed() < Duration::from_secs(30), "a notification was lost");
                }
            }
        });
        for n in 1..=1000 {
            work.store(n, Ordering::Release);
            other.notify();
            if n % 100 == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        sleeper.join().unwrap();
    }

    #[test]
    fn sleep_times_out_without_notify() {
        let start = Instant::now();
        EventCount::create().unwrap().sleep(&|| false, Duration::from_millis(20));
        assert!(start.elapsed() >= Duration::from_millis(19));
    }
}
