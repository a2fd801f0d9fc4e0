//! Connections of queue pairs on iWARP, made by librdmacm.
//!
//! Each open device listens on a port of its own, which addresses of its queue pairs tell in place of a LID. Both sides call
//! `connect`, in any order, and neither call waits: the side with the smaller address asks, and what it sends along says which
//! two queue pairs, in which of their lives, are meant. A request for one that is not there yet is kept a while.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rdma_core_sys::cm::rdma_cm_event_type as Kind;

use super::link::GONE;
use super::request::Request;
use crate::Open;
use crate::cm::{Channel, Happened, Id, Offer};
use crate::netaddr::{gid_of, ip_of, of_this_machine};
use gdsync_device::error::{Error, Result};
use gdsync_device::{Gid, QpAddress};

/// How long the two sides may take to find each other. Drivers allow 10 s between request and answer.
const LIMIT: Duration = Duration::from_secs(9);
/// How often unfinished connections are looked at.
const LOOK: Duration = Duration::from_millis(100);
/// Requests that are kept, or that the kernel keeps.
const BACKLOG: usize = 1024;
/// The token of the listener. Others count from here.
const LISTENER: usize = 0;

/// A connection that is wanted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    /// The queue pair, and the number of its life.
    pub(super) qpn: u32,
    pub(super) psn: u32,
    pub(super) peer: QpAddress,
    pub(super) offer: Offer,
}

/// What became of one.
#[derive(Debug)]
pub(super) struct Told {
    pub(super) qpn: u32,
    pub(super) psn: u32,
    /// Whether this side asked for the connection that is there now; or why there is none any more.
    pub(super) result: Result<bool>,
}

/// One between plan and end.
#[derive(Debug)]
struct Link {
    plan: Plan,
    is_active: bool,
    /// When the peer must have asked. As long again it may take to settle.
    deadline: Instant,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    id: Option<Id>,
    is_up: bool,
    /// Both sides know of it.
    is_settled: bool,
    /// It has failed, or nobody wants it any more.
    is_over: bool,
}

impl Link {
    fn tell(&self, result: Result<bool>, tell: &impl Fn(Told) -> bool) {
        let is_done = tell(Told { qpn: self.plan.qpn, psn: self.plan.psn, result });
        self.state.lock().is_settled |= is_done;
    }
}

impl State {
    fn is_unfinished(&self) -> bool {
        !self.is_settled && !self.is_over
    }
}

/// A request that no queue pair here waits for.
#[derive(Debug)]
struct Early {
    request: Request,
    id: Id,
    deadline: Instant,
}

#[derive(Debug, Default)]
struct Table {
    /// By token, and tokens by queue pair.
    links: HashMap<usize, Arc<Link>>,
    tokens: HashMap<u32, usize>,
    early: Vec<Early>,
}

#[derive(Debug)]
struct Shared {
    // Identifiers go before the channel, of which each keeps a clone.
    table: Mutex<Table>,
    channel: Arc<Channel>,
    ip: IpAddr,
    port: u16,
    next: AtomicUsize,
    device: String,
    bell: OwnedFd,
    is_over: AtomicBool,
}

/// Makes connections, in a thread of its own, until this is dropped.
#[derive(Debug)]
pub(super) struct Connector {
    shared: Arc<Shared>,
    _listener: Id,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Connector {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Release);
        self.shared.ring();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            // It panics only if `tell` does, which has been printed then.
            let _ = thread.join();
        }
    }
}

impl Connector {
    /// Listens on the device, and calls `tell` with what becomes of connections; until it returns true, again that they are made.
    ///
    /// # Errors
    /// [`Error::Library`] without librdmacm; [`Error::Verbs`]; [`Error::Device`] where it has no IP address.
    pub(super) fn start(open: &Open, tell: impl Fn(Told) -> bool + Send + 'static) -> Result<Self> {
        let channel = Arc::new(Channel::create()?);
        let (listener, ip) = bound(open, &channel)?;
        let port = listener.listen(i32::try_from(BACKLOG).expect("a small number"))?;
        // SAFETY: no pointers.
        let raw = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if raw < 0 {
            return Err(Error::last_os("eventfd", "raise the limit of open files (ulimit -n)"));
        }
        let shared = Arc::new(Shared {
            table: Mutex::default(),
            channel,
            ip,
            port,
            next: AtomicUsize::new(LISTENER + 1),
            device: open.name().to_owned(),
            // SAFETY: just made.
            bell: unsafe { OwnedFd::from_raw_fd(raw) },
            is_over: AtomicBool::new(false),
        });
        let serving = shared.clone();
        let thread = std::thread::Builder::new()
            .name("gdsync-connect".into())
            .spawn(move || serving.serve(&tell))
            .map_err(|e| Error::os("starting a thread", e, "raise the limit of processes (ulimit -u)"))?;
        Ok(Self { shared, _listener: listener, thread: Some(thread) })
    }

    pub(super) fn gid(&self) -> Gid {
        gid_of(self.shared.ip)
    }

    /// Where a peer finds a queue pair of this device.
    pub(super) fn address(&self, qpn: u32, psn: u32) -> QpAddress {
        self.shared.address(qpn, psn)
    }

    /// Whether an address can be a peer of this queue pair.
    ///
    /// # Errors
    /// [`Error::Peer`] otherwise.
    pub(super) fn check(&self, qpn: u32, peer: &QpAddress) -> Result<()> {
        let here = self.shared.address(qpn, 0);
        let is_ip = |gid| ip_of(gid).is_some();
        let why = if !is_ip(peer.gid) || peer.lid == 0 {
            "it told no IP address and port, which iWARP needs: is it on a device of another kind?"
        } else if ip_of(peer.gid).is_some_and(|ip| ip.is_ipv4()) != self.shared.ip.is_ipv4() {
            "one side has an IPv4 address and the other an IPv6 one: give both network interfaces addresses of one kind"
        } else if order(&here) == order(peer) {
            "a queue pair of iWARP cannot be its own peer: connect two"
        } else {
            return Ok(());
        };
        Err(Error::Peer { peer: peer.to_string(), why: why.into() })
    }

    /// Begins to make a connection. The peer has passed [`Connector::check`].
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub(super) fn begin(&self, plan: Plan) -> Result<()> {
        self.shared.begin(plan)
    }

    /// Ends the connection of a queue pair, made or not. Nothing of it is in the kernel's hands any more after this.
    pub(super) fn forget(&self, qpn: u32) {
        self.shared.forget(qpn);
    }
}

/// A listener on the first address of the device.
fn bound(open: &Open, channel: &Arc<Channel>) -> Result<(Id, IpAddr)> {
    let addresses = of_this_machine()
        .map_err(|e| Error::os("getifaddrs", e, "raise the limit of open files (ulimit -n)"))?;
    for ip in addresses {
        let id = Id::create(channel, LISTENER)?;
        // One that no RDMA device has is refused.
        match id.bind(SocketAddr::new(ip, 0)) {
            Ok(()) if id.is_on(open) => return Ok((id, ip)),
            Ok(()) => {}
            Err(error) => tracing::debug!(%ip, %error, "not an address of an RDMA device"),
        }
    }
    let why =
        "its network interface has no IP address: give it one (`ip addr add ADDRESS/24 dev DEV`)".into();
    Err(Error::Device { device: open.name().to_owned(), why })
}

/// Which of two sides asks: the smaller one.
fn order(address: &QpAddress) -> (Gid, u16, u32) {
    (address.gid, address.lid, address.qpn)
}

impl Shared {
    fn address(&self, qpn: u32, psn: u32) -> QpAddress {
        QpAddress::new(gid_of(self.ip), qpn, psn).with_lid(self.port)
    }

    fn ring(&self) {
        let one = 1u64;
        // SAFETY: eight bytes to an eventfd. One that is full wakes as well.
        unsafe { libc::write(self.bell.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    fn begin(&self, plan: Plan) -> Result<()> {
        self.forget(plan.qpn);
        let is_active = order(&self.address(plan.qpn, plan.psn)) < order(&plan.peer);
        let token = self.next.fetch_add(1, Ordering::Relaxed);
        let deadline = Instant::now() + LIMIT;
        let link = Link { plan, is_active, deadline, state: Mutex::default() };
        let link = Arc::new(link);
        let mut table = self.table.lock();
        table.tokens.insert(plan.qpn, token);
        table.links.insert(token, link.clone());
        let meant = |early: &mut Early| early.request.is_for(&plan);
        let early = if is_active { None } else { table.early.extract_if(.., meant).last() };
        drop(table);
        self.ring();
        let begun = match early {
            Some(early) => self.accept(token, &link, early.id),
            None if is_active => self.ask(token, &link),
            None => Ok(()),
        };
        begun.inspect_err(|_| self.forget(plan.qpn))
    }

    /// The active side looks for the peer.
    fn ask(&self, token: usize, link: &Link) -> Result<()> {
        let peer = &link.plan.peer;
        let ip = ip_of(peer.gid).expect("it was checked");
        // Events of it are not looked at before it is in its place.
        let mut state = link.state.lock();
        if !state.is_over {
            let id = Id::create(&self.channel, token)?;
            id.resolve_address(SocketAddr::new(self.ip, 0), SocketAddr::new(ip, peer.lid), LIMIT)?;
            state.id = Some(id);
        }
        Ok(())
    }

    /// The passive side grants a request.
    fn accept(&self, token: usize, link: &Link, id: Id) -> Result<()> {
        let mut state = link.state.lock();
        if state.is_over || state.id.is_some() {
            drop(state);
            id.reject();
            return Ok(());
        }
        id.answers_to(token);
        let accepted = id.accept(link.plan.offer);
        state.id = Some(id);
        accepted
    }

    fn forget(&self, qpn: u32) {
        let link = {
            let mut table = self.table.lock();
            table.tokens.remove(&qpn).and_then(|token| table.links.remove(&token))
        };
        if let Some(link) = link {
            let mut state = link.state.lock();
            state.is_over = true;
            // Under the lock: who comes later finds it gone.
            state.id = None;
        }
    }

    /// The thread.
    fn serve(&self, tell: &impl Fn(Told) -> bool) {
        while !self.is_over.load(Ordering::Acquire) {
            let is_unfinished = {
                let table = self.table.lock();
                !table.early.is_empty() || table.links.values().any(|link| link.state.lock().is_unfinished())
            };
            self.wait(if is_unfinished { Some(LOOK) } else { None });
            loop {
                match self.channel.take() {
                    Ok(Some(happened)) => self.happened(happened, tell),
                    Ok(None) => break,
                    Err(error) => {
                        tracing::error!(device = self.device, %error, "an event of a connection is lost");
                        // Not at once again; what waits for it has a deadline.
                        std::thread::sleep(LOOK);
                        break;
                    }
                }
            }
            self.look_at_clock(tell);
        }
    }

    /// Until there is an event, somebody rings, or so long.
    fn wait(&self, limit: Option<Duration>) {
        let entry = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut fds = [entry(self.channel.fd()), entry(self.bell.as_raw_fd())];
        let limit = limit.map_or(-1, |limit| i32::try_from(limit.as_millis()).unwrap_or(i32::MAX));
        // SAFETY: two entries.
        unsafe { libc::poll(fds.as_mut_ptr(), 2, limit) };
        let mut rung = 0u64;
        // SAFETY: eight bytes from an eventfd, which does not block.
        unsafe { libc::read(self.bell.as_raw_fd(), (&raw mut rung).cast(), 8) };
    }

    fn happened(&self, happened: Happened, tell: &impl Fn(Told) -> bool) {
        tracing::debug!(
            device = self.device,
            kind = happened.kind.name(),
            status = happened.status,
            "connection"
        );
        if let Some(id) = happened.request {
            return self.requested(&happened.data, id, tell);
        }
        let link = self.table.lock().links.get(&happened.token).cloned();
        // Otherwise it is gone meanwhile.
        let Some(link) = link else { return };
        let mut state = link.state.lock();
        let State { id: Some(id), is_over: false, .. } = &*state else { return };
        let result = match happened.kind {
            Kind::RDMA_CM_EVENT_ADDR_RESOLVED => id.resolve_route(LIMIT).map(|()| None),
            Kind::RDMA_CM_EVENT_ROUTE_RESOLVED => {
                let here = self.address(link.plan.qpn, link.plan.psn);
                let request = Request { from: here, qpn: link.plan.peer.qpn, psn: link.plan.peer.psn };
                id.connect(link.plan.offer, &request.to_bytes()).map(|()| None)
            }
            Kind::RDMA_CM_EVENT_ESTABLISHED => {
                state.is_up = true;
                Ok(Some(link.is_active))
            }
            Kind::RDMA_CM_EVENT_ADDR_CHANGE | Kind::RDMA_CM_EVENT_TIMEWAIT_EXIT => Ok(None),
            ended => Err(self.ended(&link.plan, ended, happened.status)),
        };
        state.is_over = result.is_err();
        drop(state);
        if let Some(result) = result.transpose() {
            link.tell(result, tell);
        }
    }

    /// Why there is no connection any more.
    fn ended(&self, plan: &Plan, kind: Kind, status: i32) -> Error {
        let name = kind.name().unwrap_or("an event without a name");
        let why = match kind {
            Kind::RDMA_CM_EVENT_DISCONNECTED => GONE,
            Kind::RDMA_CM_EVENT_REJECTED => {
                "it refused: has it connected to this queue pair within 9 s, and by the address that it has now?"
            }
            Kind::RDMA_CM_EVENT_DEVICE_REMOVAL => "the device here is gone: open it again",
            _ => "it cannot be reached: check that it still runs, routes and firewalls (`ping`)",
        };
        Error::Peer { peer: plan.peer.to_string(), why: format!("{why} ({name} {status}, {})", self.device) }
    }

    fn requested(&self, data: &[u8], id: Id, tell: &impl Fn(Told) -> bool) {
        let Some(request) = Request::from_bytes(data) else {
            tracing::warn!(device = self.device, "a program without this library asked for a connection");
            return id.reject();
        };
        let mut table = self.table.lock();
        let token = table.tokens.get(&request.qpn).copied();
        let found = token.and_then(|token| Some((token, table.links.get(&token)?.clone())));
        let found = found.filter(|(_, link)| !link.is_active && request.is_for(&link.plan));
        let Some((token, link)) = found else {
            if table.early.len() < BACKLOG {
                table.early.push(Early { request, id, deadline: Instant::now() + LIMIT });
            } else {
                drop(table);
                id.reject();
            }
            return;
        };
        drop(table);
        if let Err(error) = self.accept(token, &link, id) {
            link.state.lock().is_over = true;
            link.tell(Err(error), tell);
        }
    }

    /// Gives up what took too long.
    fn look_at_clock(&self, tell: &impl Fn(Told) -> bool) {
        let now = Instant::now();
        let mut table = self.table.lock();
        let late: Vec<_> = table.early.extract_if(.., |early| now >= early.deadline).collect();
        let links: Vec<_> = table.links.values().cloned().collect();
        drop(table);
        late.into_iter().for_each(|early| early.id.reject());
        for link in links {
            let mut state = link.state.lock();
            if !state.is_unfinished() {
                continue;
            }
            // The kernel tells the end of what it has begun.
            let is_up = state.is_up;
            let is_late = match state.id {
                Some(_) => is_up && now >= link.deadline + LIMIT,
                None => now >= link.deadline,
            };
            state.is_over = is_late;
            drop(state);
            if is_late {
                let silent = if is_up { "sent nothing" } else { "did not connect to this queue pair" };
                let why = format!("it {silent} within {LIMIT:?} ({})", self.device);
                link.tell(Err(Error::Peer { peer: link.plan.peer.to_string(), why }), tell);
            } else if is_up {
                link.tell(Ok(link.is_active), tell);
            }
        }
    }
}
