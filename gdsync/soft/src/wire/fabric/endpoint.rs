//! An endpoint of libfabric: its buffers, and the messages of its links.
//!
//! A message begins with the number that the receiver has given the link (64 bits, random), the message's number, and the number of
//! messages that its sender has taken of this link, each of 32 bits, little-endian. Packets follow as the [frames](crate::wire::tcp) of a
//! TCP link; a message without one only tells the last number. A side sends at most as many messages more than the other one has taken as
//! that one has offered in its greeting.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::FabricLink;
use super::objects::{Completion, Completions, MAX_NAME, Objects};
use super::survey::{self, error_text, refused};
use crate::wire::tcp::{Connection, FRAME, MAX_BODY, Offer, SILENCE};
use gdsync_device::error::Result;
use gdsync_device::random;
use rdma_core_sys::Fabric;
use rdma_core_sys::fabric as fi;

/// Bytes ahead of the packets.
const PREFIX: usize = 16;
/// Bytes of the longest message: the longest packet behind an acknowledgement.
pub(super) const MESSAGE: usize = PREFIX + FRAME + FRAME + MAX_BODY;
/// Distance of buffers.
const STRIDE: usize = MESSAGE.next_multiple_of(64);
/// Buffers that are allocated and registered together.
const CHUNK: usize = 32;
/// Messages that a peer may send ahead: a whole window of a queue pair; fewer on an endpoint with many links, whose receive
/// buffers these are.
pub(super) const CREDITS: [(usize, u32); 4] = [(8, 64), (32, 32), (64, 16), (usize::MAX, 8)];
/// Links that there is room for, however few receives a provider takes.
const FEW: usize = 8;
/// Receive buffers of a link besides those: two that only tell numbers may be on their way, and one is being handled.
const EXTRA: usize = 3;
/// Batches of completions in a row.
const ROUNDS: usize = 4;
/// Looks at the completions between two at the events.
const POLLS: u32 = 64;
/// How long a message that others have overtaken is waited for: long ones of some providers complete after later ones. Then it counts
/// as lost, and the queue pairs ask for its packets again.
const OVERTAKEN: Duration = Duration::from_secs(3);
/// Sleeps while nothing wakes it: an eighth of the time since the last message.
const SLEEPS: RangeInclusive<Duration> = Duration::from_micros(20)..=Duration::from_millis(20);
/// Before a sleep of this length it is worth a millisecond to clear a descriptor that stays readable.
const LONG_SLEEP: Duration = Duration::from_micros(500);
/// After a pause of this length, so many messages to and fro are a question whether this process lives, and the answer: the first sleep
/// is a long one.
const PAUSE: Duration = Duration::from_millis(10);
const FEW_MESSAGES: usize = 4;
/// Maximum sleep while the provider takes no message.
const BLOCKED_SLEEP: Duration = Duration::from_millis(1);
/// Maximum sleep otherwise, in case a provider's descriptor missed something.
const SLEEP: Duration = Duration::from_secs(1);

/// The endpoint of an HCA.
#[derive(Debug)]
pub(crate) struct Endpoint {
    /// What both sides must have: provider and protocol.
    carrier: String,
    /// Its name, which peers send to.
    name: Vec<u8>,
    /// A copy of the provider's descriptor to sleep on.
    fd: Option<OwnedFd>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    // Closed first: the buffers are its until then.
    objects: Objects,
    buffers: Buffers,
    links: HashMap<u64, Link>,
    /// Links that have ended, with the messages that the provider has not completed, and the address.
    ended: HashMap<u64, (usize, fi::fi_addr_t)>,
    /// Receive buffers, wherever they are.
    receiving: usize,
    /// Those that the provider did not take yet.
    unposted: Vec<usize>,
    /// Messages that wait to be taken.
    arrived: usize,
    /// Links whose peers are to be told how many messages were taken.
    untold: Vec<u64>,
    /// The provider has refused the last message.
    is_blocked: bool,
    polls: u32,
    /// When the provider had something last.
    worked: Instant,
    /// Messages that it has completed since the last [`PAUSE`].
    completed: usize,
}

/// A link, by the number that this side has given it.
#[derive(Debug)]
struct Link {
    line: Arc<Connection>,
    peer: fi::fi_addr_t,
    /// The number that the peer has given it.
    peer_id: u64,
    /// The provider has not completed these messages.
    sending: usize,
    /// When it has completed the last one, or taken one after that.
    completed: Instant,
    /// Packets that leave as the next message: its buffer and length.
    waiting: Option<(usize, usize)>,
    /// Since when a packet has had no room.
    blocked: Option<Instant>,
    order: Order,
}

impl Link {
    /// A packet has no room. A peer that makes none for [`SILENCE`] is gone.
    fn block(&mut self) {
        if self.blocked.get_or_insert_with(Instant::now).elapsed() > SILENCE {
            self.line.lose(&"the peer takes no packets");
        }
    }
}

/// The numbers of a link's messages, both ways.
#[derive(Debug)]
struct Order {
    /// The number of the next message, and of the first one that the peer has no room for.
    sent: u32,
    limit: u32,
    /// What the peer has offered.
    offered: u32,
    /// What this side has offered.
    credits: u32,
    /// The number of the next message to take, and what the peer knows of it.
    next: u32,
    told: u32,
    /// Messages from `next` on that have arrived: buffer and length.
    window: VecDeque<Option<(usize, usize)>>,
    /// Since when the next one has been overtaken.
    overtaken: Option<Instant>,
}

impl Order {
    fn new(credits: u32, offered: u32) -> Self {
        let (window, overtaken) = Default::default();
        Self { sent: 0, limit: offered, offered, credits, next: 0, told: 0, window, overtaken }
    }

    fn has_room(&self) -> bool {
        self.sent != self.limit
    }

    /// The peer has taken so many messages. Of those that overtake each other, the newest counts.
    fn learn(&mut self, taken: u32) {
        if self.sent.wrapping_sub(taken) <= self.offered {
            let limit = taken.wrapping_add(self.offered);
            if limit.wrapping_sub(self.limit) <= self.offered {
                self.limit = limit;
            }
        }
    }

    /// Sorts in a message of this number. Returns false if it has come before, or the peer had no room for it.
    fn sort_in(&mut self, number: u32, message: (usize, usize)) -> bool {
        let at = number.wrapping_sub(self.next);
        // Doubles lie behind it.
        if at >= self.credits {
            return false;
        }
        let at = at as usize;
        if self.window.len() <= at {
            self.window.resize(at + 1, None);
        }
        let is_new = self.window[at].is_none();
        if is_new {
            self.window[at] = Some(message);
        }
        is_new
    }

    /// Takes the next message. One that others have overtaken for [`OVERTAKEN`] is passed over.
    fn take(&mut self) -> Option<(usize, usize)> {
        while !self.window.front()?.is_some() {
            let since = *self.overtaken.get_or_insert_with(Instant::now);
            if since.elapsed() < OVERTAKEN {
                return None;
            }
            self.window.pop_front();
            self.next = self.next.wrapping_add(1);
        }
        (self.next, self.overtaken) = (self.next.wrapping_add(1), None);
        self.window.pop_front()?
    }
}

/// What a message begins with: the number of the link, its own, and how many its sender has taken. `None` for a length that none has.
/// All that a peer, or a stranger, sends is checked here and in [`Order`], but for packets, which queue pairs check.
fn prefix(bytes: [u8; PREFIX], len: usize) -> Option<(u64, u32, u32)> {
    let word = |i: usize| u32::from_le_bytes(bytes.as_chunks::<4>().0[i]);
    let is_message = len == PREFIX || (PREFIX + FRAME..=MESSAGE).contains(&len);
    is_message.then(|| (u64::from(word(1)) << 32 | u64::from(word(0)), word(2), word(3)))
}

/// A message that was taken. It belongs to the receiving end until it is given back, and lies in a buffer of the endpoint.
#[derive(Debug)]
pub(in crate::wire) struct Received {
    index: usize,
    at: *const u8,
    len: usize,
}

// SAFETY: it is the only user of the bytes it points to.
unsafe impl Send for Received {}

impl Received {
    /// Its packets.
    pub(in crate::wire) fn bytes(&self) -> &[u8] {
        // SAFETY: the buffer is not the provider's until `self` is given back, and its holder keeps the endpoint.
        unsafe { std::slice::from_raw_parts(self.at, self.len) }
    }
}

/// What the provider did with a message.
enum Sent {
    Taken,
    NoRoom,
    Failed(String),
}

impl Endpoint {
    /// Opens an endpoint of `name`, which is `PROVIDER` or `PROVIDER/DOMAIN`, at this address of the host, if its addresses are those
    /// of the internet.
    ///
    /// # Errors
    /// [`Error::Library`](gdsync_device::Error::Library) without libfabric; [`Error::Device`](gdsync_device::Error::Device) says what is missing.
    pub(crate) fn open(name: &str, ip: IpAddr) -> Result<Arc<Self>> {
        Self::of(Fabric::load()?, name, ip)
    }

    /// As [`Endpoint::open`], of this library.
    pub(super) fn of(table: &'static Fabric, name: &str, ip: IpAddr) -> Result<Arc<Self>> {
        let info = survey::choose(table, name, ip)?;
        let (provider, ep) = (info.provider(), info.ep());
        let carrier = format!("libfabric ({provider}, protocol {}.{})", ep.protocol, ep.protocol_version);
        let requests = (info.tx().size + info.rx().size).clamp(256, 1 << 16);
        let objects = Objects::open(info, name, requests)?;
        let own = objects.name().filter(|own| !own.is_empty());
        let own = own.ok_or_else(|| {
            refused(name, format!("the name of an endpoint is longer than {MAX_NAME} bytes"))
        })?;
        let state = State {
            objects,
            buffers: Buffers::default(),
            links: HashMap::new(),
            ended: HashMap::new(),
            receiving: 0,
            unposted: Vec::new(),
            arrived: 0,
            untold: Vec::new(),
            is_blocked: false,
            polls: 0,
            worked: Instant::now(),
            completed: 0,
        };
        let fd = state.objects.fd().and_then(|fd| fd.try_clone_to_owned().ok());
        Ok(Arc::new(Self { carrier, name: own, fd, state: Mutex::new(state) }))
    }

    /// What carries the packets.
    pub(crate) fn carrier(&self) -> &str {
        &self.carrier
    }

    /// The descriptor to sleep on, if the provider has one.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// What this side says in the greeting of a new link.
    ///
    /// # Errors
    /// [`Error::Sys`](gdsync_device::Error::Sys) without random numbers; [`Error::Device`](gdsync_device::Error::Device) if the provider takes no more receives.
    pub(in crate::wire) fn offer(&self) -> Result<Offer> {
        let state = self.state.lock();
        let most =
            CREDITS.iter().find(|(links, _)| state.links.len() < *links).map_or(0, |(_, credits)| *credits);
        let size = state.objects.info().rx().size;
        let left = (size / FEW).min(size.saturating_sub(state.wanted())).saturating_sub(EXTRA);
        let credits = most.min(u32::try_from(left).unwrap_or(most));
        if credits < 2 {
            let why = format!(
                "it takes {} receives (rx_attr.size), too few for one more peer",
                state.objects.info().rx().size
            );
            return Err(refused(&state.objects.info().provider(), why));
        }
        let id = u64::from_ne_bytes(random()?);
        Ok(Offer { carrier: self.carrier.clone(), id, credits, name: self.name.clone() })
    }

    /// Makes the link between two offers. Messages of the peer wait until they are taken.
    ///
    /// # Errors
    /// The text says why not.
    pub(in crate::wire) fn connect(
        self: &Arc<Self>,
        own: &Offer,
        theirs: &Offer,
        line: Arc<Connection>,
    ) -> std::result::Result<Arc<FabricLink>, String> {
        let mut state = self.state.lock();
        let is_text = state.objects.info().has_text_addresses();
        if !is_text && theirs.name.len() != self.name.len() || theirs.name.is_empty() {
            return Err(format!(
                "the name of its endpoint has {} bytes, here {}",
                theirs.name.len(),
                self.name.len()
            ));
        }
        let mut name = [0; MAX_NAME];
        let room = name.get_mut(..theirs.name.len()).filter(|_| theirs.name.len() < MAX_NAME);
        room.ok_or("the name of its endpoint is too long")?.copy_from_slice(&theirs.name);
        let peer = state.objects.insert(&name)?;
        let order = Order::new(own.credits, theirs.credits);
        let (peer_id, completed) = (theirs.id, Instant::now());
        let link = Link { line, peer, peer_id, sending: 0, completed, waiting: None, blocked: None, order };
        state.links.insert(own.id, link);
        let posted = state.post_receives();
        drop(state);
        let link = FabricLink { endpoint: self.clone(), id: own.id };
        posted.map(|()| Arc::new(link))
    }

    /// Ends a link. Packets that were not taken are dropped.
    pub(crate) fn disconnect(&self, id: u64) {
        let mut state = self.state.lock();
        let Some(link) = state.links.remove(&id) else { return };
        for (index, _) in link.order.window.into_iter().flatten() {
            state.arrived -= 1;
            state.post_receive(index);
        }
        link.waiting.into_iter().for_each(|(index, _)| state.buffers.free(index));
        match link.sending {
            0 => state.objects.remove(link.peer),
            sending => _ = state.ended.insert(id, (sending, link.peer)),
        }
    }

    /// Appends a packet of `len` bytes, which `fill` writes, to the message that waits. Returns false if there is no room.
    ///
    /// # Errors
    /// Those of `fill`.
    pub(in crate::wire) fn push(
        &self,
        id: u64,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<bool> {
        let mut state = self.state.lock();
        let state = &mut *state;
        let Some(link) = state.links.get(&id) else { return Ok(true) };
        if link.waiting.is_some_and(|(_, at)| at + len > MESSAGE) && !state.flush(id) {
            return Ok(false);
        }
        let Some(link) = state.links.get_mut(&id) else { return Ok(true) };
        let (index, at) = match link.waiting {
            Some(waiting) => waiting,
            None if !link.order.has_room() => {
                link.block();
                return Ok(false);
            }
            None => match state.buffers.take(&mut state.objects) {
                Ok(index) => (index, PREFIX),
                Err(why) => {
                    link.line.lose(&why);
                    return Ok(true);
                }
            },
        };
        let filled = fill(&mut state.buffers.room(index, at + len)[at..]);
        match filled {
            Ok(()) => link.waiting = Some((index, at + len)),
            Err(_) if at == PREFIX => state.buffers.free(index),
            Err(_) => {}
        }
        link.blocked = None;
        filled.map(|()| true)
    }

    /// Sends the message that waits on a link. Returns whether there is room, if there was none before.
    pub(in crate::wire) fn flush(&self, id: u64) -> bool {
        let mut state = self.state.lock();
        state.flush(id)
            && state.links.get(&id).is_none_or(|link| link.blocked.is_none() || link.order.has_room())
    }

    /// Whether the provider has completed all messages of a link. One that has completed none for [`SILENCE`] ends the link: no timeout
    /// counts meanwhile.
    pub(in crate::wire) fn is_sent(&self, id: u64) -> bool {
        let state = self.state.lock();
        let Some(link) = state.links.get(&id) else { return true };
        if link.sending > 0 && link.completed.elapsed() > SILENCE {
            link.line.lose(&"the provider sends nothing to the peer");
        }
        link.sending == 0 && link.waiting.is_none()
    }

    /// Takes the next message of a link.
    pub(in crate::wire) fn take(&self, id: u64) -> Option<Received> {
        let mut state = self.state.lock();
        let link = state.links.get_mut(&id)?;
        let (index, len) = link.order.take()?;
        state.arrived -= 1;
        let at = state.buffers.at(index).wrapping_add(PREFIX);
        Some(Received { index, at, len: len - PREFIX })
    }

    /// Frees a message. The peer learns it with the next one, or when it has half of its credits left.
    pub(in crate::wire) fn give_back(&self, id: u64, received: Received) {
        let mut state = self.state.lock();
        state.post_receive(received.index);
        let Some(link) = state.links.get(&id) else { return };
        let order = &link.order;
        if order.next.wrapping_sub(order.told) >= order.credits / 2 {
            state.untold.push(id);
            state.tell();
        }
    }

    /// Takes what has arrived, and lets the provider work. Returns whether anything has happened.
    pub(crate) fn poll(&self) -> bool {
        self.state.lock().poll()
    }

    /// Whether messages wait to be taken.
    pub(crate) fn has_arrived(&self) -> bool {
        self.state.lock().arrived > 0
    }

    /// The longest sleep from now on, and whether the descriptor ends it; `None` if something waits in the provider.
    pub(crate) fn sleep_limit(&self) -> Option<(Duration, bool)> {
        let mut state = self.state.lock();
        let Some(fd) = &self.fd else { return Some((state.sleep_time(), true)) };
        let is_readable = || {
            poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&Timespec::default()))
                .is_ok_and(|ready| ready > 0)
        };
        if !state.objects.may_sleep() || is_readable() && state.poll() {
            return None;
        }
        // That of `net` and `tcp` stays so in libfabric 1.17 and 1.18, whose `fi_trywait` does nothing: a read that waits clears it.
        if is_readable() {
            let time = state.sleep_time();
            // The read holds up senders.
            let is_worth_it = time >= LONG_SLEEP && state.worked.elapsed() >= LONG_SLEEP;
            if is_worth_it && state.poll_with(true) {
                return None;
            }
            if !is_worth_it || is_readable() {
                return Some((time, false));
            }
        }
        let is_quiet = !state.is_blocked && state.unposted.is_empty() && state.untold.is_empty();
        Some((if is_quiet { SLEEP } else { BLOCKED_SLEEP }, true))
    }
}

impl State {
    /// Receive buffers that the links need.
    fn wanted(&self) -> usize {
        self.links.values().map(|link| link.order.credits as usize + EXTRA).sum()
    }

    /// Has as many buffers received into as the links need.
    ///
    /// # Errors
    /// What the library says.
    fn post_receives(&mut self) -> std::result::Result<(), String> {
        while self.receiving < self.wanted() {
            let index = self.buffers.take(&mut self.objects)?;
            self.receiving += 1;
            self.post_receive(index);
        }
        Ok(())
    }

    fn post_receive(&mut self, index: usize) {
        let code = self.buffers.receive(&self.objects, index);
        if code != 0 {
            self.unposted.push(index);
            if code != -fi::FI_EAGAIN {
                self.fail(&format!("fi_recv: {}", error_text(self.objects.info().table(), code)));
            }
        }
    }

    /// The endpoint carries nothing any more.
    fn fail(&self, why: &str) {
        self.links.values().for_each(|link| link.line.lose(&why));
    }

    fn sleep_time(&self) -> Duration {
        let least = if self.completed <= FEW_MESSAGES { LONG_SLEEP } else { *SLEEPS.start() };
        gdsync_shm::sleep_time(self.worked.elapsed(), least..=*SLEEPS.end())
    }

    fn poll(&mut self) -> bool {
        self.poll_with(false)
    }

    /// As [`Objects::poll`], which may wait.
    fn poll_with(&mut self, waits: bool) -> bool {
        let (mut any, mut completions) = (false, Completions::new());
        for _ in 0..ROUNDS {
            let is_full = self.objects.poll(&mut completions, waits).unwrap_or_else(|why| {
                self.fail(&why);
                false
            });
            if !completions.is_empty() {
                let last = std::mem::replace(&mut self.worked, Instant::now());
                let before = if self.worked - last >= PAUSE { 0 } else { self.completed };
                (any, self.completed) = (true, before + completions.len());
            }
            completions.drain(..).for_each(|completion| self.complete(completion));
            if !is_full {
                break;
            }
        }
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(POLLS)
            && let Some(why) = self.objects.event_error()
        {
            self.fail(&why);
        }
        std::mem::take(&mut self.unposted).into_iter().for_each(|index| self.post_receive(index));
        self.tell();
        any
    }

    fn complete(&mut self, completion: Completion) {
        let Some((index, owner)) = self.buffers.of(completion.context) else { return };
        match (owner, completion.result) {
            (Owner::Link(id), result) => {
                self.buffers.free(index);
                let Some(link) = self.links.get_mut(&id) else { return self.complete_ended(id) };
                link.sending -= 1;
                link.completed = Instant::now();
                if let Err(why) = result {
                    link.line.lose(&why);
                }
            }
            (Owner::Receiver, Ok(len)) => self.receive(index, len),
            (Owner::Receiver, Err(why)) => {
                tracing::error!(why, "software HCA: a receive of libfabric failed");
                self.fail(&why);
            }
            (Owner::Nobody, _) => {}
        }
    }

    /// The provider has completed a message of a link that has ended: the last one frees its address.
    fn complete_ended(&mut self, id: u64) {
        let Some((sending, peer)) = self.ended.get_mut(&id) else { return };
        *sending -= 1;
        if *sending == 0 {
            self.objects.remove(*peer);
            self.ended.remove(&id);
        }
    }

    /// Sorts in what has arrived.
    fn receive(&mut self, index: usize, len: usize) {
        let bytes = self.buffers.room(index, PREFIX).try_into().expect("of this length");
        let is_new = prefix(bytes, len).is_some_and(|(id, number, taken)| {
            let Some(Link { order, .. }) = self.links.get_mut(&id) else { return false };
            order.learn(taken);
            len > PREFIX && order.sort_in(number, (index, len))
        });
        if is_new {
            self.arrived += 1;
        } else {
            self.post_receive(index);
        }
    }

    /// Sends the message that waits on a link. Returns whether none waits any more.
    fn flush(&mut self, id: u64) -> bool {
        let Some(link) = self.links.get_mut(&id) else { return true };
        let Some((index, len)) = link.waiting else { return true };
        let sent = self.buffers.send(&self.objects, index, len, (id, link));
        self.is_blocked = matches!(sent, Sent::NoRoom);
        match sent {
            Sent::NoRoom => link.block(),
            Sent::Taken => link.order.sent = link.order.sent.wrapping_add(1),
            Sent::Failed(why) => link.line.lose(&why),
        }
        if !self.is_blocked {
            link.waiting = None;
        }
        !self.is_blocked
    }

    /// Tells peers how many messages were taken.
    fn tell(&mut self) {
        for id in std::mem::take(&mut self.untold) {
            let Some(link) = self.links.get_mut(&id).filter(|link| link.order.told != link.order.next) else {
                continue;
            };
            let Ok(index) = self.buffers.take(&mut self.objects) else { continue };
            match self.buffers.send(&self.objects, index, PREFIX, (id, link)) {
                Sent::Taken => {}
                Sent::NoRoom => {
                    self.buffers.free(index);
                    self.untold.push(id);
                }
                Sent::Failed(why) => link.line.lose(&why),
            }
        }
    }
}

/// Whose a buffer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Nobody,
    /// A message of this link, until it completes.
    Link(u64),
    /// The provider, or a message that has arrived.
    Receiver,
}

/// Buffers of messages, which are never freed while the endpoint is open.
#[derive(Debug, Default)]
struct Buffers {
    all: Vec<Buffer>,
    free: Vec<usize>,
    chunks: Vec<*mut [u8]>,
}

#[derive(Debug)]
struct Buffer {
    at: *mut u8,
    desc: *mut c_void,
    context: *mut Context,
    owner: Owner,
}

/// What the provider gets as the context of a request, and may write to.
#[repr(C)]
struct Context {
    internal: fi::fi_context2,
    index: usize,
}

// SAFETY: the pointers are to memory that only this object and the provider use, by turns.
unsafe impl Send for Buffers {}

impl Buffers {
    /// A free buffer.
    ///
    /// # Errors
    /// What the library says where it must register memory.
    fn take(&mut self, objects: &mut Objects) -> std::result::Result<usize, String> {
        if self.free.is_empty() {
            let chunk = Box::into_raw(vec![0_u8; CHUNK * STRIDE].into_boxed_slice());
            self.chunks.push(chunk);
            let desc = objects.register(chunk.cast(), CHUNK * STRIDE)?;
            for i in 0..CHUNK {
                let index = self.all.len();
                let context = Box::into_raw(Box::new(Context { internal: fi::fi_context2::zeroed(), index }));
                let at = chunk.cast::<u8>().wrapping_add(i * STRIDE);
                self.all.push(Buffer { at, desc, context, owner: Owner::Nobody });
                self.free.push(index);
            }
        }
        Ok(self.free.pop().expect("filled above"))
    }

    fn free(&mut self, index: usize) {
        self.all[index].owner = Owner::Nobody;
        self.free.push(index);
    }

    fn at(&self, index: usize) -> *mut u8 {
        self.all[index].at
    }

    /// The first bytes of a buffer that is not the provider's.
    fn room(&mut self, index: usize, len: usize) -> &mut [u8] {
        assert!(len <= MESSAGE, "packets are cut to the size of buffers");
        // SAFETY: a buffer is `STRIDE` bytes of a chunk; callers have it from `take` or a completion, so that the provider has not.
        unsafe { std::slice::from_raw_parts_mut(self.at(index), len) }
    }

    /// The buffer of a completed request, and whose it is.
    fn of(&self, context: *mut c_void) -> Option<(usize, Owner)> {
        if context.is_null() {
            return None;
        }
        // SAFETY: contexts of requests are those of buffers, which live as long as `self`.
        let index = unsafe { (*context.cast::<Context>()).index };
        self.all.get(index).map(|buffer| (index, buffer.owner))
    }

    /// Has a message received into a buffer.
    fn receive(&mut self, objects: &Objects, index: usize) -> isize {
        let buffer = &mut self.all[index];
        buffer.owner = Owner::Receiver;
        // SAFETY: the buffer has `MESSAGE` bytes, is given to the provider until its completion, and freed after the objects.
        unsafe { objects.receive(buffer.at, MESSAGE, buffer.desc, buffer.context.cast()) }
    }

    /// Sends a message over a link. The buffer is freed when the provider has sent it or failed; the caller keeps it without room.
    fn send(&mut self, objects: &Objects, index: usize, len: usize, (id, link): (u64, &mut Link)) -> Sent {
        let room = self.room(index, PREFIX);
        room[..8].copy_from_slice(&link.peer_id.to_le_bytes());
        room[8..12].copy_from_slice(&link.order.sent.to_le_bytes());
        room[12..].copy_from_slice(&link.order.next.to_le_bytes());
        let is_injected = len <= objects.info().tx().inject_size;
        let buffer = &mut self.all[index];
        let message = (buffer.at.cast_const(), len);
        let code = if is_injected {
            // SAFETY: the buffer holds the message, which is short enough.
            unsafe { objects.inject(message, link.peer) }
        } else {
            buffer.owner = Owner::Link(id);
            // SAFETY: the buffer holds the message, is the provider's until its completion, and freed after the objects.
            unsafe { objects.send(message, buffer.desc, link.peer, buffer.context.cast()) }
        };
        if code == -fi::FI_EAGAIN {
            return Sent::NoRoom;
        }
        if code != 0 || is_injected {
            self.free(index);
        }
        if code != 0 {
            return Sent::Failed(format!("fi_send: {}", error_text(objects.info().table(), code)));
        }
        link.order.told = link.order.next;
        if !is_injected {
            if link.sending == 0 {
                link.completed = Instant::now();
            }
            link.sending += 1;
        }
        Sent::Taken
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        for buffer in &self.all {
            // SAFETY: it was made by `Box::into_raw`, and the objects of the provider are closed.
            drop(unsafe { Box::from_raw(buffer.context) });
        }
        for chunk in &self.chunks {
            // SAFETY: it was made by `Box::into_raw`, and the objects of the provider are closed.
            drop(unsafe { Box::from_raw(*chunk) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_peers_send_breaks_the_numbers_of_a_link() {
        type Step = (u8, i8, [u8; PREFIX], usize);
        bolero::check!().with_type::<(u8, u8, Vec<Step>)>().for_each(|(credits, offered, steps)| {
            let [credits, offered] = [credits, offered].map(|count| u32::from(*count) + 2);
            let (mut order, mut waiting) = (Order::new(credits, offered), 0);
            for (kind, near, bytes, len) in steps {
                match kind % 4 {
                    0 if order.has_room() => order.sent = order.sent.wrapping_add(1),
                    1 => {
                        if let Some((number, _)) = order.take() {
                            assert_eq!(number + 1, order.next as usize, "messages are taken in their order");
                            waiting -= 1;
                        }
                    }
                    kind => {
                        let Some((_, number, taken)) = prefix(*bytes, len % (2 * MESSAGE)) else { continue };
                        // Near those of this side, mostly: others are not taken.
                        let of = |own: u32, any| match kind {
                            3 => any,
                            _ => own.wrapping_add_signed((*near).into()),
                        };
                        order.learn(of(order.sent, taken));
                        let number = of(order.next, number);
                        waiting += usize::from(order.sort_in(number, (number as usize, *len)));
                    }
                }
                assert_eq!(order.window.iter().flatten().count(), waiting);
                assert!(order.window.len() <= credits as usize, "memory is bounded by what was offered");
                assert!(order.limit.wrapping_sub(order.sent) <= offered, "nobody offers more than at first");
            }
        });
    }
}
