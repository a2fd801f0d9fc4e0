//! Connections that librdmacm makes: on iWARP nothing else makes one.

use std::ffi::{CStr, c_void};
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Duration;
use std::{fmt, io};

use rdma_core_sys::RdmaCm;
use rdma_core_sys::cm::{
    rdma_cm_event, rdma_cm_event_type, rdma_cm_id, rdma_conn_param, rdma_event_channel, rdma_port_space,
};

use super::netaddr::{raw, with_raw};
use super::open::Open;
use gdsync_device::error::{Error, Result};

/// What a failed call of librdmacm means.
fn advice(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENOSYS) => {
            "/dev/infiniband/rdma_cm is not there: load the module (`sudo modprobe rdma_ucm`); in a container, pass the \
             device (`--device=/dev/infiniband`)"
        }
        Some(libc::EACCES | libc::EPERM) => {
            "the process may not use /dev/infiniband/rdma_cm: give it read and write access"
        }
        Some(libc::EMFILE) => "too many files are open: raise `ulimit -n`",
        Some(libc::ECONNREFUSED) => "nobody listens there: has the peer closed its device?",
        Some(libc::EHOSTUNREACH | libc::ENETUNREACH | libc::ETIMEDOUT) => {
            "the peer cannot be reached: check routes and firewalls (`ping`)"
        }
        _ => "the kernel's connection manager refused: look at `dmesg`",
    }
}

/// The error of the call that has just failed.
fn failed(call: &'static str, subject: impl fmt::Display) -> Error {
    let source = io::Error::last_os_error();
    let advice = advice(&source).to_owned();
    Error::Verbs { call, subject: subject.to_string(), source: Arc::new(source), advice }
}

/// Where events of connections arrive.
pub(crate) struct Channel {
    cm: &'static RdmaCm,
    raw: NonNull<rdma_event_channel>,
    fd: RawFd,
}

// SAFETY: librdmacm may be called from any thread.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("event channel of librdmacm")
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once; identifiers on it keep it.
        unsafe { self.cm.rdma_destroy_event_channel(self.raw.as_ptr()) };
    }
}

impl Channel {
    /// # Errors
    /// [`Error::Library`] without librdmacm; [`Error::Verbs`] where the kernel has no connection manager.
    pub(crate) fn create() -> Result<Self> {
        let cm = RdmaCm::load()?;
        // SAFETY: it may be called at any time.
        let raw = unsafe { cm.rdma_create_event_channel() };
        let raw = NonNull::new(raw).ok_or_else(|| failed("rdma_create_event_channel", "this machine"))?;
        // SAFETY: just created.
        let fd = unsafe { (*raw.as_ptr()).fd };
        let channel = Self { cm, raw, fd };
        super::events::set_nonblocking(fd)?;
        Ok(channel)
    }

    /// Readable when there is an event.
    pub(crate) fn fd(&self) -> RawFd {
        self.fd
    }

    /// Takes the next event; `None` when there is none.
    pub(crate) fn take(self: &Arc<Self>) -> io::Result<Option<Happened>> {
        let mut event = ptr::null_mut();
        // SAFETY: the channel exists, and does not block; a place for the answer.
        if unsafe { self.cm.rdma_get_cm_event(self.raw.as_ptr(), &raw mut event) } != 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) };
        }
        // SAFETY: the event that was just taken, which stays until it is acknowledged.
        let taken = unsafe { &*event };
        // SAFETY: as above.
        let happened = unsafe { self.read(taken) };
        // Destroying what it concerns waits for this.
        // SAFETY: the event that was just taken.
        unsafe { self.cm.rdma_ack_cm_event(event) };
        Ok(Some(happened))
    }

    /// # Safety
    /// `event` must be one of this channel that is not acknowledged.
    unsafe fn read(self: &Arc<Self>, event: &rdma_cm_event) -> Happened {
        let is_request = event.event == rdma_cm_event_type::RDMA_CM_EVENT_CONNECT_REQUEST;
        // SAFETY: identifiers are there as long as their events.
        let token = unsafe { token(event.id) }.load(Ordering::Acquire).addr();
        // SAFETY: identifiers for reliable connections have these parameters; all-zero where an event has none.
        let param = unsafe { event.param.conn };
        let data = NonNull::new(param.private_data.cast_mut().cast::<u8>()).map_or_else(Vec::new, |data| {
            // SAFETY: so many bytes are there, as long as the event.
            unsafe { std::slice::from_raw_parts(data.as_ptr(), param.private_data_len.into()) }.to_vec()
        });
        let request = NonNull::new(event.id).filter(|_| is_request);
        Happened {
            kind: event.event,
            status: event.status,
            token,
            data,
            request: request.map(|raw| Id { channel: self.clone(), raw }),
        }
    }
}

/// An event.
#[derive(Debug)]
pub(crate) struct Happened {
    pub(crate) kind: rdma_cm_event_type,
    /// A negative error number, or why a peer refused.
    pub(crate) status: i32,
    /// What its identifier was created with; of a request, what the listener was.
    pub(crate) token: usize,
    /// What the peer sent along.
    pub(crate) data: Vec<u8>,
    /// The new connection of a request.
    pub(crate) request: Option<Id>,
}

/// What a connection is made for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    /// The number that the device gave the queue pair.
    pub(crate) number: u32,
    /// READs that the peer may have outstanding here, and this side there.
    pub(crate) reads: (u8, u8),
}

impl Offer {
    fn param(self, data: &[u8]) -> rdma_conn_param {
        rdma_conn_param {
            private_data: data.as_ptr().cast(),
            private_data_len: u8::try_from(data.len()).expect("few bytes are sent along"),
            responder_resources: self.reads.0,
            initiator_depth: self.reads.1,
            qp_num: self.number,
            ..rdma_conn_param::zeroed()
        }
    }
}

/// A connection, or what listens for them. Gone when this is dropped.
pub(crate) struct Id {
    channel: Arc<Channel>,
    raw: NonNull<rdma_cm_id>,
}

// SAFETY: librdmacm may be called from any thread.
unsafe impl Send for Id {}
// SAFETY: as above; the fields that the library changes are read only before there are events.
unsafe impl Sync for Id {}

impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("connection of librdmacm")
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once. Its events are acknowledged as soon as they are taken.
        if unsafe { self.channel.cm.rdma_destroy_id(self.raw.as_ptr()) } != 0 {
            tracing::debug!(error = %io::Error::last_os_error(), "a connection was not destroyed");
        }
    }
}

impl Id {
    /// One whose events carry `token`.
    pub(crate) fn create(channel: &Arc<Channel>, token: usize) -> Result<Self> {
        let (cm, mut raw) = (channel.cm, ptr::null_mut());
        let context = ptr::without_provenance_mut(token);
        let space = rdma_port_space::RDMA_PS_TCP;
        // SAFETY: the channel exists; a place for the answer.
        let status = unsafe { cm.rdma_create_id(channel.raw.as_ptr(), &raw mut raw, context, space) };
        match NonNull::new(raw).filter(|_| status == 0) {
            Some(raw) => Ok(Self { channel: channel.clone(), raw }),
            None => Err(failed("rdma_create_id", "this machine")),
        }
    }

    fn done(status: i32, call: &'static str, subject: impl fmt::Display) -> Result<()> {
        if status == 0 { Ok(()) } else { Err(failed(call, subject)) }
    }

    /// Gives it an address of this machine.
    pub(crate) fn bind(&self, here: SocketAddr) -> Result<()> {
        let status = with_raw(here, |addr| {
            // SAFETY: the identifier exists; an address that outlives the call.
            unsafe { self.channel.cm.rdma_bind_addr(self.raw.as_ptr(), addr) }
        });
        Self::done(status, "rdma_bind_addr", here)
    }

    /// Whether the address it is bound to is of the port of this device that is used.
    pub(crate) fn is_on(&self, open: &Open) -> bool {
        // SAFETY: the identifier exists.
        let verbs = unsafe { (*self.raw.as_ptr()).verbs };
        // SAFETY: as above.
        let port = unsafe { (*self.raw.as_ptr()).port_num };
        if verbs.is_null() || port != open.port().number {
            return false;
        }
        // SAFETY: a context that librdmacm has opened, and never closes.
        let device = unsafe { (*verbs).device };
        // SAFETY: the device of an open context.
        let name = unsafe { open.verbs().ibv_get_device_name(device) };
        if name.is_null() {
            return false;
        }
        // SAFETY: libibverbs returns terminated text that lives as long as the device.
        unsafe { CStr::from_ptr(name) }.to_bytes() == open.name().as_bytes()
    }

    /// Listens for connections at the address it is bound to. Returns the port.
    pub(crate) fn listen(&self, backlog: i32) -> Result<u16> {
        // SAFETY: the identifier exists.
        let status = unsafe { self.channel.cm.rdma_listen(self.raw.as_ptr(), backlog) };
        Self::done(status, "rdma_listen", "this machine")?;
        // SAFETY: the identifier exists.
        Ok(u16::from_be(unsafe { self.channel.cm.rdma_get_src_port(self.raw.as_ptr()) }))
    }

    /// Looks for a way from this address to the peer: an event tells of the end.
    pub(crate) fn resolve_address(&self, here: SocketAddr, peer: SocketAddr, limit: Duration) -> Result<()> {
        let mut from = raw(here);
        let status = with_raw(peer, |to| {
            let here = (&raw mut from).cast();
            // SAFETY: the identifier exists; addresses that outlive the call.
            unsafe { self.channel.cm.rdma_resolve_addr(self.raw.as_ptr(), here, to, millis(limit)) }
        });
        Self::done(status, "rdma_resolve_addr", peer)
    }

    /// The second half of that.
    pub(crate) fn resolve_route(&self, limit: Duration) -> Result<()> {
        // SAFETY: the identifier exists.
        let status = unsafe { self.channel.cm.rdma_resolve_route(self.raw.as_ptr(), millis(limit)) };
        Self::done(status, "rdma_resolve_route", "the peer")
    }

    /// Asks the peer for a connection: an event tells of the end.
    pub(crate) fn connect(&self, offer: Offer, data: &[u8]) -> Result<()> {
        let mut param = offer.param(data);
        // SAFETY: the identifier exists; parameters and data outlive the call.
        let status = unsafe { self.channel.cm.rdma_connect(self.raw.as_ptr(), &raw mut param) };
        Self::done(status, "rdma_connect", "the peer")
    }

    /// Its events carry this token from now on.
    pub(crate) fn answers_to(&self, token: usize) {
        // SAFETY: the identifier exists.
        let place = unsafe { self::token(self.raw.as_ptr()) };
        place.store(ptr::without_provenance_mut(token), Ordering::Release);
    }

    /// Grants a request: an event tells of the end.
    pub(crate) fn accept(&self, offer: Offer) -> Result<()> {
        let mut param = offer.param(&[]);
        // SAFETY: the identifier exists; parameters outlive the call.
        let status = unsafe { self.channel.cm.rdma_accept(self.raw.as_ptr(), &raw mut param) };
        Self::done(status, "rdma_accept", "the peer")
    }

    /// Refuses a request.
    pub(crate) fn reject(self) {
        // SAFETY: the identifier exists; no data.
        if unsafe { self.channel.cm.rdma_reject(self.raw.as_ptr(), ptr::null(), 0) } != 0 {
            tracing::debug!(error = %io::Error::last_os_error(), "a connection was not refused");
        }
    }
}

/// The place of an identifier's token, which the library itself never looks at.
///
/// # Safety
/// The identifier must exist.
unsafe fn token<'a>(id: *mut rdma_cm_id) -> &'a AtomicPtr<c_void> {
    // SAFETY: as the caller says.
    let place = unsafe { &raw mut (*id).context };
    // SAFETY: aligned, and nobody writes it by other means once there are events.
    unsafe { AtomicPtr::from_ptr(place) }
}

fn millis(limit: Duration) -> i32 {
    i32::try_from(limit.as_millis()).unwrap_or(i32::MAX)
}
