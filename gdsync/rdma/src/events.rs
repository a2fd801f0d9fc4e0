//! What an RDMA device tells without being asked: queue pairs and ports that fail, the card that is gone.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::{fmt, io};

use parking_lot::Mutex;
use rdma_core_sys::verbs::{
    ibv_async_event, ibv_event_type, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_init_attr, ibv_qp_state,
};

use super::open::Open;
use gdsync_device::Health;
use gdsync_device::error::{Error, Result};

/// An asynchronous event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A queue pair failed without a completion.
    QueuePair { qpn: u32, kind: ibv_event_type },
    /// A completion queue failed, or ran over.
    CompletionQueue(FailedCq),
    /// The device is in a fatal state, or gone.
    Device,
    /// The state of a port changed.
    Port { number: u8, kind: ibv_event_type },
}

/// Which completion queue failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FailedCq {
    /// An `ibv_cq`, by its address.
    Object(usize),
    /// One that DevX made, by its number.
    Number(u32),
}

/// Another descriptor that tells of events.
pub(crate) trait More: Send + Sync {
    /// It stays open as long as this is there.
    fn fd(&self) -> i32;

    /// Takes one; `None` of those that nobody needs. The descriptor does not block.
    fn take(&self) -> io::Result<Option<Event>>;
}

/// A thread that reads the events of a device until this is dropped.
pub(crate) struct Events {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Events")
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        let one = 1u64;
        // SAFETY: eight bytes to an eventfd.
        unsafe { libc::write(self.stop.as_raw_fd(), (&raw const one).cast(), 8) };
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            // It panics only if `tell` does, which has been printed then.
            let _ = thread.join();
        }
    }
}

impl Events {
    /// Calls `tell` with each event of the device, and of `more`, in a thread of its own.
    ///
    /// # Errors
    /// [`Error::Sys`] when the system refuses a descriptor or a thread.
    pub(crate) fn read(
        open: &Arc<Open>,
        more: Option<Arc<dyn More>>,
        tell: impl Fn(Event) + Send + 'static,
    ) -> Result<Self> {
        // SAFETY: no pointers.
        let raw = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if raw < 0 {
            return Err(Error::last_os("eventfd", "raise the limit of open files (ulimit -n)"));
        }
        // SAFETY: just made.
        let stop = Arc::new(unsafe { OwnedFd::from_raw_fd(raw) });
        // SAFETY: the device is open.
        let fd = unsafe { (*open.context().as_ptr()).async_fd };
        set_nonblocking(fd)?;
        if let Some(more) = &more {
            set_nonblocking(more.fd())?;
        }
        let (open, until) = (open.clone(), stop.clone());
        let thread = std::thread::Builder::new()
            .name("gdsync-events".into())
            .spawn(move || {
                let read = || read_until_stopped(&open, fd, more, &until, &tell);
                if catch_unwind(AssertUnwindSafe(read)).is_err() {
                    // Nobody hears of failures any more: that is one.
                    let _ = catch_unwind(AssertUnwindSafe(|| tell(Event::Device)));
                }
            })
            .map_err(|e| Error::os("starting a thread", e, "raise the limit of processes (ulimit -u)"))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

fn read_until_stopped(
    open: &Open,
    fd: i32,
    more: Option<Arc<dyn More>>,
    stop: &OwnedFd,
    tell: &impl Fn(Event),
) {
    let mut more = more;
    while wait(fd, more.as_ref().map(|more| more.fd()), stop.as_raw_fd()) {
        match more.as_ref().map(|more| more.take()) {
            Some(Ok(Some(event))) => tell(event),
            Some(Err(error)) if error.kind() != io::ErrorKind::WouldBlock => {
                tracing::debug!(device = open.name(), %error, "events of DevX are not read any more");
                more = None;
            }
            _ => {}
        }
        match take(open) {
            Ok(Some(event)) => tell(event),
            Ok(None) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                tracing::error!(device = open.name(), %error, "events are not read any more");
                return tell(Event::Device);
            }
        }
    }
}

pub(super) fn set_nonblocking(fd: i32) -> Result<()> {
    // SAFETY: no pointers.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    // SAFETY: no pointers.
    if flags < 0 || unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
        return Err(Error::last_os(
            "fcntl",
            "the device gave no descriptor for its events: update rdma-core",
        ));
    }
    Ok(())
}

/// Returns true when there is an event, false when it is time to end.
fn wait(fd: i32, more: Option<i32>, stop: i32) -> bool {
    let entry = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // A negative one is not looked at.
    let mut fds = [entry(stop), entry(fd), entry(more.unwrap_or(-1))];
    loop {
        // SAFETY: three entries.
        let ready = unsafe { libc::poll(fds.as_mut_ptr(), 3, -1) };
        if ready >= 0 {
            return fds[0].revents == 0;
        }
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return false;
        }
    }
}

/// Takes one event; `None` for those that nobody needs.
fn take(open: &Open) -> io::Result<Option<Event>> {
    let mut raw = ibv_async_event::zeroed();
    // SAFETY: the device is open; a place for the answer. The descriptor does not block.
    if unsafe { open.verbs().ibv_get_async_event(open.context().as_ptr(), &raw mut raw) } != 0 {
        let error = io::Error::last_os_error();
        // Without a number it was cut short: there is nothing to read.
        return Err(if error.raw_os_error() == Some(0) { io::ErrorKind::WouldBlock.into() } else { error });
    }
    let event = read(&raw);
    // Destroying what it concerns waits for this.
    // SAFETY: the event that was just taken.
    unsafe { open.verbs().ibv_ack_async_event(&raw mut raw) };
    tracing::debug!(device = open.name(), kind = raw.event_type.name(), ?event, "asynchronous event");
    Ok(event)
}

fn read(raw: &ibv_async_event) -> Option<Event> {
    let kind = raw.event_type;
    match kind {
        ibv_event_type::IBV_EVENT_QP_FATAL
        | ibv_event_type::IBV_EVENT_QP_REQ_ERR
        | ibv_event_type::IBV_EVENT_QP_ACCESS_ERR => {
            // SAFETY: events of this kind are of a queue pair.
            let qp = unsafe { raw.element.qp };
            // SAFETY: it is not destroyed before the event is acknowledged.
            let qpn = unsafe { (*qp).qp_num };
            Some(Event::QueuePair { qpn, kind })
        }
        ibv_event_type::IBV_EVENT_CQ_ERR => {
            // SAFETY: events of this kind are of a completion queue.
            let cq = unsafe { raw.element.cq };
            Some(Event::CompletionQueue(FailedCq::Object(cq.addr())))
        }
        ibv_event_type::IBV_EVENT_DEVICE_FATAL => Some(Event::Device),
        ibv_event_type::IBV_EVENT_PORT_ERR
        | ibv_event_type::IBV_EVENT_PORT_ACTIVE
        | ibv_event_type::IBV_EVENT_LID_CHANGE
        | ibv_event_type::IBV_EVENT_GID_CHANGE => {
            // SAFETY: events of this kind are of a port.
            let number = unsafe { raw.element.port_num };
            Some(Event::Port { number: u8::try_from(number).unwrap_or(0), kind })
        }
        _ => None,
    }
}

impl Open {
    /// Whether the device has a queue pair in ERR. An event of it may be of a life that a reset has ended: then it has not.
    /// To be asked while nobody resets it.
    ///
    /// # Safety
    /// `qp` must be a queue pair of this device that is not destroyed.
    pub(crate) unsafe fn has_failed(&self, qp: *mut ibv_qp) -> bool {
        let (mut attr, mut init) = (ibv_qp_attr::zeroed(), ibv_qp_init_attr::zeroed());
        let (state, verbs) = (ibv_qp_attr_mask::IBV_QP_STATE, self.verbs());
        // SAFETY: as the caller says; places for the answers.
        let errno = unsafe { verbs.ibv_query_qp(qp, &raw mut attr, state, &raw mut init) };
        errno != 0 || attr.qp_state == ibv_qp_state::IBV_QPS_ERR
    }
}

/// Where failures of the queue pairs of a device are recorded.
#[derive(Debug, Default)]
pub(crate) struct Healths(Mutex<HashMap<u32, Weak<Health>>>);

impl Healths {
    /// Those of this queue pair are recorded there.
    pub(crate) fn add(&self, qpn: u32, health: &Arc<Health>) {
        self.0.lock().insert(qpn, Arc::downgrade(health));
    }

    /// The queue pair is gone.
    pub(crate) fn remove(&self, qpn: u32) {
        self.0.lock().remove(&qpn);
    }

    /// Records what an event means, for the queue pairs that it concerns: `of_cq` says whether one of these uses a
    /// completion queue.
    pub(crate) fn tell(&self, open: &Open, event: Event, of_cq: impl Fn(u32, FailedCq) -> bool) {
        let Some(error) = event.cause(open) else {
            if let Event::Port { number, kind } = event {
                tracing::warn!(device = open.name(), port = number, event = kind.name(), "a port changed");
            }
            return;
        };
        tracing::error!(%error);
        let concerns = |qpn: u32| match event {
            Event::QueuePair { qpn: of, .. } => of == qpn,
            Event::CompletionQueue(cq) => of_cq(qpn, cq),
            Event::Device => true,
            Event::Port { .. } => false,
        };
        let healths = self.0.lock();
        for (_, health) in healths.iter().filter(|(qpn, _)| concerns(**qpn)) {
            if let Some(health) = health.upgrade() {
                health.record(error.clone());
            }
        }
    }
}

impl Event {
    /// What it means for a queue pair of the device `open`, if it breaks it: a queue pair that is concerned itself, or any
    /// one where the whole device is.
    pub(crate) fn cause(self, open: &Open) -> Option<Error> {
        let why = match self {
            Self::QueuePair { qpn, kind } => {
                let what = match kind {
                    ibv_event_type::IBV_EVENT_QP_ACCESS_ERR => {
                        "a peer asked for what the queue pair or region does not allow (IBV_EVENT_QP_ACCESS_ERR)"
                    }
                    ibv_event_type::IBV_EVENT_QP_REQ_ERR => {
                        "a peer sent a request that is not valid (IBV_EVENT_QP_REQ_ERR)"
                    }
                    _ => "the card gave it up (IBV_EVENT_QP_FATAL): look at `dmesg`",
                };
                format!("QP {qpn:#x}: {what}")
            }
            Self::CompletionQueue(_) => {
                "a completion queue failed (IBV_EVENT_CQ_ERR): look at `dmesg`, and build the queue pair again".into()
            }
            Self::Device => {
                "it is in a fatal state or gone (IBV_EVENT_DEVICE_FATAL): look at `dmesg`, and open it again".into()
            }
            Self::Port { .. } => return None,
        };
        Some(Error::Device { device: open.name().to_owned(), why })
    }
}
