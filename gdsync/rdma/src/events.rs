//! Asynchronous events of RDMA devices: failed queue pairs and ports, lost devices.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
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
    /// A completion queue failed or overran.
    CompletionQueue(FailedCq),
    /// The device is in a fatal state or gone.
    Device,
    /// A port changed its state.
    Port { number: u8, kind: ibv_event_type },
}

/// The completion queue that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FailedCq {
    /// An `ibv_cq`, by address.
    Object(usize),
    /// A DevX queue, by number.
    Number(u32),
}

/// Another file descriptor with events.
pub(crate) trait EventSource: Send + Sync {
    /// The descriptor, open while this lives.
    fn fd(&self) -> i32;

    /// Takes an event without blocking; `None` for irrelevant ones.
    fn take(&self) -> io::Result<Option<Event>>;
}

/// Thread that reads a device's events until dropped.
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
        gdsync_device::signal_eventfd(&self.stop);
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            // Panics only if `handle` does; the hook has reported it.
            let _ = thread.join();
        }
    }
}

impl Events {
    /// Starts a thread that calls `handle` with each event of the device and of `more`.
    ///
    /// # Errors
    /// [`Error::Sys`] when a descriptor or thread cannot be created.
    pub(crate) fn read(
        open: &Arc<Open>,
        more: Option<Arc<dyn EventSource>>,
        handle: impl Fn(Event) + Send + 'static,
    ) -> Result<Self> {
        let stop = Arc::new(gdsync_device::eventfd()?);
        // SAFETY: the device is open while `open` lives.
        let fd = unsafe { (*open.context().as_ptr()).async_fd };
        set_nonblocking(fd)?;
        if let Some(more) = &more {
            set_nonblocking(more.fd())?;
        }
        let (open, until) = (open.clone(), stop.clone());
        let thread = std::thread::Builder::new()
            .name("gdsync-events".into())
            .spawn(move || {
                let read = || read_until_stopped(&open, fd, more, &until, &handle);
                if catch_unwind(AssertUnwindSafe(read)).is_err() {
                    // Without events, later failures would go unnoticed: report the device as failed.
                    let _ = catch_unwind(AssertUnwindSafe(|| handle(Event::Device)));
                }
            })
            .map_err(|e| Error::os("starting a thread", e, "raise the limit of processes (ulimit -u)"))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

fn read_until_stopped(
    open: &Open,
    fd: i32,
    more: Option<Arc<dyn EventSource>>,
    stop: &OwnedFd,
    handle: &impl Fn(Event),
) {
    let mut more = more;
    while wait(fd, more.as_ref().map(|more| more.fd()), stop.as_raw_fd()) {
        match more.as_ref().map(|more| more.take()) {
            Some(Ok(Some(event))) => handle(event),
            Some(Err(error)) if error.kind() != io::ErrorKind::WouldBlock => {
                tracing::debug!(device = open.name(), %error, "events of DevX are not read any more");
                more = None;
            }
            _ => {}
        }
        match take(open) {
            Ok(Some(event)) => handle(event),
            Ok(None) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                tracing::error!(device = open.name(), %error, "events are not read any more");
                return handle(Event::Device);
            }
        }
    }
}

pub(crate) fn set_nonblocking(fd: i32) -> Result<()> {
    // SAFETY: no pointers are passed.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    // SAFETY: no pointers are passed.
    if flags < 0 || unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
        return Err(Error::last_os(
            "fcntl",
            "the device gave no descriptor for its events: update rdma-core",
        ));
    }
    Ok(())
}

/// Returns true for an event, false to stop.
fn wait(fd: i32, more: Option<i32>, stop: i32) -> bool {
    let entry = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // `poll` ignores negative descriptors.
    let mut fds = [entry(stop), entry(fd), entry(more.unwrap_or(-1))];
    loop {
        // SAFETY: `entries` is valid for three entries.
        let ready = unsafe { libc::poll(fds.as_mut_ptr(), 3, -1) };
        if ready >= 0 {
            return fds[0].revents == 0;
        }
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return false;
        }
    }
}

/// Takes an event; `None` for irrelevant ones.
fn take(open: &Open) -> io::Result<Option<Event>> {
    let mut raw = ibv_async_event::zeroed();
    // SAFETY: the device is open and `raw` is writable; the descriptor does not block.
    if unsafe { open.verbs().ibv_get_async_event(open.context().as_ptr(), &raw mut raw) } != 0 {
        let error = io::Error::last_os_error();
        // Without `errno`, the read was short: no event.
        return Err(if error.raw_os_error() == Some(0) { io::ErrorKind::WouldBlock.into() } else { error });
    }
    let event = read(&raw);
    // Destroying the object of an event waits for this acknowledgement.
    // SAFETY: `ibv_get_async_event` returned this event.
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
            // SAFETY: events of this type hold a queue pair.
            let qp = unsafe { raw.element.qp };
            // SAFETY: the queue pair is not destroyed before the event is acknowledged.
            let qpn = unsafe { (*qp).qp_num };
            Some(Event::QueuePair { qpn, kind })
        }
        ibv_event_type::IBV_EVENT_CQ_ERR => {
            // SAFETY: events of this type hold a completion queue.
            let cq = unsafe { raw.element.cq };
            Some(Event::CompletionQueue(FailedCq::Object(cq.addr())))
        }
        ibv_event_type::IBV_EVENT_DEVICE_FATAL => Some(Event::Device),
        ibv_event_type::IBV_EVENT_PORT_ERR
        | ibv_event_type::IBV_EVENT_PORT_ACTIVE
        | ibv_event_type::IBV_EVENT_LID_CHANGE
        | ibv_event_type::IBV_EVENT_GID_CHANGE => {
            // SAFETY: events of this type hold a port number.
            let number = unsafe { raw.element.port_num };
            Some(Event::Port { number: u8::try_from(number).unwrap_or(0), kind })
        }
        _ => None,
    }
}

impl Open {
    /// Whether the queue pair is in ERR. An event may stem from before a reset. Call it while nobody resets the queue
    /// pair.
    ///
    /// # Safety
    /// `qp` must be a live queue pair of this device.
    pub(crate) unsafe fn has_failed(&self, qp: *mut ibv_qp) -> bool {
        let (mut attr, mut init) = (ibv_qp_attr::zeroed(), ibv_qp_init_attr::zeroed());
        let (state, verbs) = (ibv_qp_attr_mask::IBV_QP_STATE, self.verbs());
        // SAFETY: the caller guarantees `qp`; both attributes are writable.
        let errno = unsafe { verbs.ibv_query_qp(qp, &raw mut attr, state, &raw mut init) };
        errno != 0 || attr.qp_state == ibv_qp_state::IBV_QPS_ERR
    }
}

/// Sticky errors of a device's queue pairs, by QPN.
#[derive(Debug, Default)]
pub(crate) struct HealthMap(Mutex<HashMap<u32, Weak<Health>>>);

impl HealthMap {
    /// Records failures of queue pair `qpn` in `health`.
    pub(crate) fn add(&self, qpn: u32, health: &Arc<Health>) {
        self.0.lock().insert(qpn, Arc::downgrade(health));
    }

    /// Removes a destroyed queue pair.
    pub(crate) fn remove(&self, qpn: u32) {
        self.0.lock().remove(&qpn);
    }

    /// Records an event for the queue pairs it concerns; `of_cq` tells whether one uses a completion queue.
    pub(crate) fn record(&self, open: &Open, event: Event, of_cq: impl Fn(u32, FailedCq) -> bool) {
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
    /// Error that the event means for a concerned queue pair of device `open`, if it breaks it.
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
                    _ => "the card stopped it (IBV_EVENT_QP_FATAL): check `dmesg`",
                };
                format!("QP {qpn:#x}: {what}")
            }
            Self::CompletionQueue(_) => {
                "a completion queue failed (IBV_EVENT_CQ_ERR): check `dmesg`, and build the queue pair again"
                    .into()
            }
            Self::Device => {
                "it is in a fatal state or gone (IBV_EVENT_DEVICE_FATAL): check `dmesg`, and open it again"
                    .into()
            }
            Self::Port { .. } => return None,
        };
        Some(Error::Device { device: open.name().to_owned(), why })
    }
}
