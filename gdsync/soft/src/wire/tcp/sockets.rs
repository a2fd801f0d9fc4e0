//! Sleep until a socket of an HCA is ready, or another thread wakes it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;

use crate::wire::fabric::Endpoint;
use gdsync_device::error::{Error, Result};

/// Stands for the descriptor of libfabric, in place of a link.
const ENDPOINT: u64 = u64::MAX;
/// Sockets taken from the kernel per call.
const BATCH: usize = 64;

/// The sockets of an HCA's links, and an event fd that wakes those who sleep on them. Any thread may sleep and notify.
#[derive(Debug)]
pub(crate) struct Sockets {
    epoll: OwnedFd,
    /// Readable while `signalled`.
    wake: OwnedFd,
    sleepers: AtomicU32,
    /// A notification has not been seen by all sleepers.
    signalled: Mutex<bool>,
    /// Number of links.
    links: AtomicU32,
    /// What carries packets beside them.
    endpoint: Option<Arc<Endpoint>>,
}

impl Sockets {
    pub(super) fn new(endpoint: Option<Arc<Endpoint>>) -> Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|e| Error::os("epoll_create1", e.into(), "raise the limit of open files (ulimit -n)"))?;
        if let Some(fd) = endpoint.as_ref().and_then(|endpoint| endpoint.fd()) {
            let (data, flags) = (epoll::EventData::new_u64(ENDPOINT), epoll::EventFlags::IN);
            epoll::add(&epoll, fd, data, flags)
                .map_err(|e| Error::os("epoll_ctl of libfabric's descriptor", e.into(), "report this"))?;
        }
        let (sleepers, links) = (AtomicU32::new(0), AtomicU32::new(0));
        Ok(Self {
            epoll,
            wake: gdsync_device::eventfd()?,
            sleepers,
            signalled: Mutex::new(false),
            links,
            endpoint,
        })
    }

    /// What carries packets beside the sockets.
    pub(crate) fn endpoint(&self) -> Option<&Arc<Endpoint>> {
        self.endpoint.as_ref()
    }

    /// Watches the socket of link `index`.
    pub(super) fn add(&self, socket: impl AsFd, index: usize) -> rustix::io::Result<()> {
        epoll::add(&self.epoll, socket, epoll::EventData::new_u64(index as u64), epoll::EventFlags::IN)?;
        self.links.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Watches the socket of link `index` for room, too, or no longer.
    pub(super) fn watch_room(&self, socket: impl AsFd, index: usize, room: bool) {
        let flags = if room { epoll::EventFlags::IN | epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
        // Fails only for sockets that are not watched.
        let _ = epoll::modify(&self.epoll, socket, epoll::EventData::new_u64(index as u64), flags);
    }

    /// Stops watching a socket.
    pub(super) fn remove(&self, socket: impl AsFd) {
        if epoll::delete(&self.epoll, socket).is_ok() {
            self.links.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Number of links whose sockets are watched.
    pub(crate) fn links(&self) -> u32 {
        self.links.load(Ordering::Relaxed)
    }

    /// Calls `ready` with the indices of links whose sockets are ready. Returns whether there were any. The descriptor of libfabric does
    /// not count: it stays readable after its packets were taken, until [`Endpoint::sleep_limit`].
    pub(crate) fn take_ready(&self, mut ready: impl FnMut(usize)) -> bool {
        let mut events = Vec::with_capacity(BATCH);
        // Without an event, as after an interruption, the next call looks again.
        let _ =
            epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&Timespec::default()));
        let links = events.iter().map(|event| event.data.u64()).filter(|link| *link != ENDPOINT);
        links.filter_map(|link| usize::try_from(link).ok()).inspect(|link| ready(*link)).count() > 0
    }

    /// Whether a socket is ready, or packets have arrived beside them.
    pub(crate) fn is_ready(&self) -> bool {
        let has_arrived = |endpoint: &Arc<Endpoint>| endpoint.poll() || endpoint.has_arrived();
        self.links() > 0 && (self.endpoint().is_some_and(has_arrived) || self.take_ready(|_| ()))
    }

    /// Wakes all sleepers. Without sleepers this costs a fence and a load.
    pub(crate) fn notify(&self) {
        // Orders the work before the look at the sleepers; a sleeper announces itself before it looks for work.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut signalled = self.signalled.lock();
        if self.sleepers.load(Ordering::Relaxed) > 0 && !std::mem::replace(&mut *signalled, true) {
            gdsync_device::signal_eventfd(&self.wake);
        }
    }

    /// Sleeps unless `ready`, until notified, until a socket is ready, or for `timeout`. May wake spuriously.
    pub(crate) fn sleep(&self, ready: &dyn Fn() -> bool, timeout: Duration) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let limit = || self.endpoint().map_or(Some((timeout, true)), |endpoint| endpoint.sleep_limit());
        if !ready()
            && let Some((limit, is_woken)) = limit()
        {
            let timeout = Timespec::try_from(timeout.min(limit)).ok();
            let mut fds = [&self.wake, &self.epoll].map(|fd| PollFd::new(fd, PollFlags::IN));
            let fds = if is_woken { &mut fds[..] } else { &mut fds[..1] };
            // Errors are ends of the sleep.
            let _: std::result::Result<usize, Errno> = poll(fds, timeout.as_ref());
        }
        // The last one out takes the signal: those still asleep must see it.
        let mut signalled = self.signalled.lock();
        if self.sleepers.fetch_sub(1, Ordering::SeqCst) == 1 && std::mem::take(&mut *signalled) {
            gdsync_device::clear_eventfd(&self.wake);
        }
    }
}
