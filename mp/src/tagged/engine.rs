//! The protocol of tagged messages: eager messages, and rendezvous by RDMA READ.
//!
//! All messages of two ranks go through one queue pair, each behind a [`Header`]. The payload of an eager message follows its
//! header. A longer one is announced by a request to send with the address of its payload; when a receive matches, the receiver
//! reads it by RDMA READ, and answers with a finish.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gdsync::memory::Memory;
use gdsync::verbs::{Access, RemoteAddr, SendWr};

use super::matching::{Arrival, Key, Matcher, Place, Source, Tag};
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::exchange::take;
use crate::overlap::ReceiveClaims;
use crate::peer::Peer;
use crate::registration::Registration;
use crate::request::{Request, Status};

/// Bytes of a cell for a message with its header: the most that the shared-memory FIFO takes.
const CELL: usize = 4096;

/// Bytes of the longest eager message.
const EAGER: usize = CELL - Header::BYTES;

/// Eager messages that a rank keeps for another one: a bound for its memory.
const CREDITS: u16 = 256;

/// Sends to a rank that are under way: the rank keeps the announcement of each.
const MAX_SENDS: usize = 1 << 16;

/// Messages in one direction that are under way on the queue pair, if that is deep enough.
const MAX_CELLS: usize = 32;

/// The outcome of a message, shared with its request.
pub(super) type Outcome = Arc<OnceLock<Result<Status>>>;

pub(super) fn finish(outcome: &Outcome, with: Result<Status>) {
    // Set once: by the one that takes the message out of a queue.
    let _ = outcome.set(with);
}

/// What a message on the queue pair is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Nothing but credits.
    Credits,
    /// An eager message; its payload is behind the header.
    Eager { tag: u64 },
    /// A message whose payload is at this address, until it is finished.
    RequestToSend { tag: u64, id: u64, bytes: u32, from: RemoteAddr },
    /// The receiver has read an announced message, or does not need to.
    Finish { id: u64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    kind: Kind,
    /// Eager messages that the receiver has room for again.
    credits: u16,
}

impl Header {
    const BYTES: usize = 24;
    /// With the address of a request to send.
    const MAX_BYTES: usize = Self::BYTES + 12;

    fn len(&self) -> usize {
        if matches!(self.kind, Kind::RequestToSend { .. }) { Self::MAX_BYTES } else { Self::BYTES }
    }

    fn to_bytes(self) -> [u8; Self::MAX_BYTES] {
        let nowhere = RemoteAddr { addr: 0, rkey: 0 };
        let (kind, tag, id, len, from) = match self.kind {
            Kind::Credits => (0, 0, 0, 0, nowhere),
            Kind::Eager { tag } => (1, tag, 0, 0, nowhere),
            Kind::RequestToSend { tag, id, bytes, from } => (2, tag, id, bytes, from),
            Kind::Finish { id } => (3, 0, id, 0, nowhere),
        };
        let mut bytes = [0; Self::MAX_BYTES];
        bytes[..8].copy_from_slice(&tag.to_le_bytes());
        bytes[8..16].copy_from_slice(&id.to_le_bytes());
        bytes[16..20].copy_from_slice(&len.to_le_bytes());
        bytes[20..22].copy_from_slice(&self.credits.to_le_bytes());
        bytes[22] = kind;
        bytes[24..32].copy_from_slice(&from.addr.to_le_bytes());
        bytes[32..36].copy_from_slice(&from.rkey.to_le_bytes());
        bytes
    }

    /// The header of a message; `None` for bytes that are none.
    fn from_bytes(message: &[u8]) -> Option<Self> {
        if message.len() < Self::BYTES {
            return None;
        }
        let rest = &mut &message[..];
        let [tag, id] = [take(rest), take(rest)].map(u64::from_le_bytes);
        let (bytes, credits) = (u32::from_le_bytes(take(rest)), u16::from_le_bytes(take(rest)));
        let [kind, _] = take(rest);
        let kind = match kind {
            0 => Kind::Credits,
            1 => Kind::Eager { tag },
            2 if message.len() >= Self::MAX_BYTES => {
                let (addr, rkey) = (u64::from_le_bytes(take(rest)), u32::from_le_bytes(take(rest)));
                Kind::RequestToSend { tag, id, bytes, from: RemoteAddr { addr, rkey } }
            }
            3 => Kind::Finish { id },
            _ => return None,
        };
        Some(Self { kind, credits })
    }
}

/// A receive under way.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) outcome: Outcome,
    pub(super) buffer: Registration,
    pub(super) range: Range<usize>,
    /// The memory that it may write.
    pub(super) _claims: ReceiveClaims,
}

/// A send under way.
#[derive(Debug)]
pub(super) struct Outgoing {
    outcome: Outcome,
    buffer: Registration,
    range: Range<usize>,
    status: Status,
    /// Once it is to be announced.
    exposure: Option<Exposure>,
}

impl Outgoing {
    pub(super) fn new(outcome: Outcome, buffer: Registration, range: Range<usize>, status: Status) -> Self {
        Self { outcome, buffer, range, status, exposure: None }
    }

    fn is_short(&self) -> bool {
        self.range.len() <= EAGER && self.buffer.memory().is_host()
    }

    /// The address that the receiver reads from; `None` while the payload is being copied there.
    fn expose(&mut self, comm: &Communicator) -> Result<Option<RemoteAddr>> {
        if self.range.is_empty() {
            return Ok(Some(RemoteAddr { addr: 0, rkey: 0 }));
        }
        if self.exposure.is_none() {
            self.exposure = Exposure::new(comm, self.status.rank, &self.buffer, &self.range)?;
        }
        let Some(exposure) = &mut self.exposure else { return Ok(None) };
        if let Some(copy) = &exposure.copy {
            if copy.test()?.is_none() {
                return Ok(None);
            }
            copy.finish();
            exposure.copy = None;
        }
        Ok(Some(exposure.at))
    }
}

/// Payload that the receiver may read.
#[derive(Debug)]
struct Exposure {
    at: RemoteAddr,
    /// A registration for this message alone, if that of the buffer does not do.
    _registration: Option<Registration>,
    /// The copy to that memory, while it is under way.
    copy: Option<Request>,
}

impl Exposure {
    /// Of a range for a rank; `None` where a queue is full.
    fn new(
        comm: &Communicator,
        rank: usize,
        buffer: &Registration,
        range: &Range<usize>,
    ) -> Result<Option<Self>> {
        let intra_host = comm.peer(rank)?.transport.intra_host;
        let mr = buffer.mr(intra_host);
        if mr.access().contains(Access::REMOTE_READ)
            && let Ok(at) = mr.remote(range.start)
        {
            return Ok(Some(Self { at, _registration: None, copy: None }));
        }
        // From the registration cache: peers have no access.
        let part = buffer.memory().slice(range.start, range.len())?;
        if let Ok(registration) = comm.0.register(&part, Access::REMOTE_READ)
            && let Ok(at) = registration.mr(intra_host).remote(0)
        {
            return Ok(Some(Self { at, _registration: Some(registration), copy: None }));
        }
        // GPU memory that the device only reaches by staging: the own device copies it.
        let staging = comm.register(&Memory::alloc(range.len())?)?;
        let own = comm.peer(comm.rank())?;
        let to = staging.mr(own.transport.intra_host).remote(0)?;
        let Some(copy) = unless_full(
            own.one_sided("tagged send", (buffer, range.clone()), |sges| SendWr::write(to, sges)),
        )?
        else {
            return Ok(None);
        };
        let (at, copy) = (staging.mr(intra_host).remote(0)?, Some(Request::queued(own, copy)));
        Ok(Some(Self { at, _registration: Some(staging), copy }))
    }
}

/// A message that no receive has matched: its payload, or its announcement.
#[derive(Debug)]
pub(super) enum Payload {
    Eager(Vec<u8>),
    Announced { id: u64, bytes: usize, from: RemoteAddr },
}

/// A message that has arrived and was not received.
pub(super) type Unexpected = Arrival<Payload>;

pub(super) fn status_of(arrived: &Unexpected) -> Status {
    let bytes = match &arrived.message {
        Payload::Eager(payload) => payload.len(),
        Payload::Announced { bytes, .. } => *bytes,
    };
    Status { rank: arrived.source, tag: arrived.tag, bytes }
}

/// The queue pairs to all ranks, and the memory for their messages.
#[derive(Debug)]
pub(super) struct Connections {
    comm: Communicator,
    /// Cells for the messages of each rank.
    inbox: Registration,
    /// Headers that leave.
    headers: Registration,
    /// Of each rank and direction.
    cells: usize,
}

impl Connections {
    pub(super) fn new(comm: Communicator) -> Result<Self> {
        let (cells, size) = ((comm.0.settings.queues.depth / 2).clamp(1, MAX_CELLS), comm.size());
        let memory = |bytes: usize| Memory::alloc(size * cells * bytes);
        let inbox = comm.register(&memory(CELL)?)?;
        let headers = comm.register(&memory(Header::MAX_BYTES)?)?;
        Ok(Self { comm, inbox, headers, cells })
    }
}

/// A receive and the announced message that it gets.
#[derive(Debug)]
struct Matched {
    incoming: Incoming,
    status: Status,
    id: u64,
    from: RemoteAddr,
}

/// Something that waits to be sent.
#[derive(Debug)]
enum Item {
    Send(Box<Outgoing>),
    Finish { id: u64 },
}

/// What is under way with one rank.
#[derive(Debug, Default)]
struct TaggedPeer {
    rank: usize,
    /// Why it cannot be reached.
    lost: Option<Error>,
    /// For the next messages, oldest first, and how many have come.
    receives: VecDeque<Request>,
    received: usize,
    backlog: VecDeque<Item>,
    /// Messages that leave, oldest first, with the sends that are complete with them, and how many have left.
    leaving: VecDeque<(Request, Option<(Outcome, Status)>)>,
    left: usize,
    /// Eager messages that it has room for.
    credits: u16,
    /// Eager messages that we have room for again, and it does not know.
    owed: u16,
    unexpected: UnexpectedCounts,
    announced: HashMap<u64, Box<Outgoing>>,
    next_id: u64,
    /// Payload to be read when the queue has room, and READs under way, oldest first.
    matched: VecDeque<Matched>,
    reading: VecDeque<(Request, Matched)>,
}

/// Messages of a rank that no receive has taken.
#[derive(Debug, Default)]
struct UnexpectedCounts {
    eager: usize,
    announced: usize,
}

impl UnexpectedCounts {
    fn of(&mut self, payload: &Payload) -> (&mut usize, usize) {
        match payload {
            Payload::Eager(_) => (&mut self.eager, usize::from(CREDITS)),
            Payload::Announced { .. } => (&mut self.announced, MAX_SENDS),
        }
    }

    /// Whether the rank may have one more: by its credits, or the limit of its sends.
    fn add(&mut self, payload: &Payload) -> bool {
        let (count, most) = self.of(payload);
        *count += 1;
        *count <= most
    }

    fn remove(&mut self, payload: &Payload) {
        *self.of(payload).0 -= 1;
    }
}

impl TaggedPeer {
    /// With receives posted.
    fn new(rank: usize, connections: &Connections) -> Result<Self> {
        let mut peer = Self { rank, credits: CREDITS, ..Self::default() };
        peer.post_receives(connections)?;
        Ok(peer)
    }

    /// Posts receives for all free cells; the rest later where the queue still counts complete ones.
    fn post_receives(&mut self, connections: &Connections) -> Result<()> {
        while self.receives.len() < connections.cells {
            let at = self.inbox_cell(connections, self.received + self.receives.len());
            let posted = connections.comm.irecv(&connections.inbox, at..at + CELL, self.rank);
            let Some(receive) = unless_full(posted)? else { break };
            self.receives.push_back(receive);
        }
        Ok(())
    }

    fn inbox_cell(&self, connections: &Connections, n: usize) -> usize {
        (self.rank * connections.cells + n % connections.cells) * CELL
    }

    /// The next message that has arrived: its offset in the inbox, and its length. [`TaggedPeer::consume`] frees its cell.
    fn next(&mut self, connections: &Connections) -> Result<Option<(usize, usize)>> {
        let Some(first) = self.receives.front() else { return Ok(None) };
        let Some(status) = first.poll()? else { return Ok(None) };
        connections.comm.wait(first, Duration::ZERO)?;
        Ok(Some((self.inbox_cell(connections, self.received), status.bytes)))
    }

    /// Looks at all that [`TaggedPeer::next`] does not look at.
    fn test(&self) -> Result<()> {
        self.receives.front().map_or(Ok(()), |first| first.test().map(drop))
    }

    fn consume(&mut self, connections: &Connections) -> Result<()> {
        self.receives.pop_front();
        self.received += 1;
        self.post_receives(connections)
    }

    fn give_credit(&mut self) {
        self.owed = self.owed.saturating_add(1);
    }

    /// Queues a send.
    ///
    /// # Errors
    /// [`gdsync::Error::QueueFull`] where too many are under way.
    fn send(&mut self, outgoing: Outgoing) -> Result<()> {
        let under_way = self.backlog.len() + self.announced.len();
        if under_way >= MAX_SENDS {
            let (queue, qpn) = ("queue of tagged sends", 0);
            let (outstanding, depth) = (under_way as u64, MAX_SENDS as u64);
            let cause = gdsync::Error::QueueFull { queue, qpn, outstanding, depth, untaken: 0 };
            return Err(Error::message(self.rank, "tagged send", cause));
        }
        self.backlog.push_back(Item::Send(Box::new(outgoing)));
        Ok(())
    }

    /// A receive matches an announced message: reads its payload, if it fits.
    fn accept(&mut self, matched: Matched) {
        let Matched { incoming, status, id, .. } = &matched;
        let outcome = match &self.lost {
            Some(error) => Err(error.clone()),
            None => fits(status, incoming).map(|()| *status),
        };
        if outcome.is_ok() && status.bytes > 0 {
            self.matched.push_back(matched);
        } else {
            self.backlog.push_back(Item::Finish { id: *id });
            finish(&incoming.outcome, outcome);
        }
    }

    /// Whether nothing is under way that this rank has to complete.
    fn is_idle(&self) -> bool {
        let payload = self.matched.is_empty() && self.reading.is_empty();
        let messages = self.backlog.is_empty() && self.leaving.is_empty() && self.announced.is_empty();
        self.lost.is_some() || payload && messages
    }

    /// Finishes complete operations, and starts as many as there is room for.
    fn flush(&mut self, connections: &Connections) -> Result<()> {
        self.settle()?;
        self.post_receives(connections)?;
        let peer = connections.comm.peer(self.rank)?;
        while let Some(Matched { incoming, status, from, .. }) = self.matched.front() {
            let range = incoming.range.start..incoming.range.start + status.bytes;
            let piece = (&incoming.buffer, range);
            let read = peer.one_sided("tagged receive", piece, |sges| SendWr::read(*from, sges));
            let Some(op) = unless_full(read)? else { break };
            let matched = self.matched.pop_front();
            self.reading.extend(matched.map(|matched| (Request::queued(peer, op), matched)));
        }
        let mut has_left = false;
        while self.leaving.len() < connections.cells && self.leave(connections)? {
            has_left = true;
        }
        // Messages of the FIFO are complete already.
        if has_left { self.settle() } else { Ok(()) }
    }

    fn settle(&mut self) -> Result<()> {
        while let Some((request, _)) = self.leaving.front()
            && request.test()?.is_some()
        {
            request.finish();
            if let Some((_, Some((outcome, status)))) = self.leaving.pop_front() {
                finish(&outcome, Ok(status));
            }
        }
        while let Some((request, _)) = self.reading.front()
            && request.test()?.is_some()
        {
            request.finish();
            if let Some((_, Matched { incoming, status, id, .. })) = self.reading.pop_front() {
                finish(&incoming.outcome, Ok(status));
                self.backlog.push_back(Item::Finish { id });
            }
        }
        Ok(())
    }

    /// Sends the next item of the backlog, or credits if many are owed. Returns whether there may be more to send.
    fn leave(&mut self, connections: &Connections) -> Result<bool> {
        let comm = &connections.comm;
        let kind = match self.backlog.front_mut() {
            Some(Item::Send(outgoing)) => {
                let tag = outgoing.status.tag;
                if outgoing.is_short() && self.credits > 0 {
                    Kind::Eager { tag }
                } else {
                    let bytes =
                        u32::try_from(outgoing.range.len()).expect("Tagged::isend refuses more than 1 GiB");
                    match outgoing.expose(comm) {
                        Ok(Some(from)) => Kind::RequestToSend { tag, id: self.next_id, bytes, from },
                        Ok(None) => return Ok(false),
                        Err(error) => {
                            // Of this message alone.
                            finish(&outgoing.outcome, Err(error));
                            self.backlog.pop_front();
                            return Ok(true);
                        }
                    }
                }
            }
            Some(Item::Finish { id }) => Kind::Finish { id: *id },
            None if self.owed >= CREDITS / 2 => Kind::Credits,
            None => return Ok(false),
        };
        let at = (self.rank * connections.cells + self.left % connections.cells) * Header::MAX_BYTES;
        let header = Header { kind, credits: self.owed };
        connections.headers.memory().write(at, &header.to_bytes())?;
        let head = (&connections.headers, at..at + header.len());
        let posted = match (kind, self.backlog.front()) {
            (Kind::Eager { .. }, Some(Item::Send(outgoing))) => {
                let payload = (&outgoing.buffer, outgoing.range.clone());
                comm.isend_vectored(&[head, payload], self.rank)
            }
            _ => comm.isend_vectored(&[head], self.rank),
        };
        let Some(request) = unless_full(posted)? else { return Ok(false) };
        (self.left, self.owed) = (self.left + 1, 0);
        let mut completes = None;
        if let Some(Item::Send(outgoing)) = self.backlog.pop_front() {
            if let Kind::RequestToSend { id, .. } = kind {
                self.next_id += 1;
                self.announced.insert(id, outgoing);
            } else {
                self.credits -= 1;
                completes = Some((outgoing.outcome, outgoing.status));
            }
        }
        self.leaving.push_back((request, completes));
        Ok(true)
    }

    /// The rank cannot be reached any more: ends all operations with it.
    fn fail(&mut self, error: &Error) {
        // What is complete stays so; an error here is of the same cause.
        let _ = self.settle();
        let backlog = self.backlog.drain(..).filter_map(|item| match item {
            Item::Send(outgoing) => Some(outgoing.outcome),
            Item::Finish { .. } => None,
        });
        let sends = self.announced.drain().map(|(_, outgoing)| outgoing.outcome);
        let leaving = self.leaving.drain(..).filter_map(|(_, completes)| Some(completes?.0));
        let reading = self.reading.drain(..).map(|(_, matched)| matched);
        let receives = self.matched.drain(..).chain(reading).map(|matched| matched.incoming.outcome);
        let all = backlog.chain(sends).chain(leaving).chain(receives);
        all.for_each(|outcome| finish(&outcome, Err(error.clone())));
    }
}

/// The tagged messages of all ranks.
#[derive(Debug)]
pub(super) struct Engine {
    connections: Connections,
    peers: Vec<TaggedPeer>,
    matcher: Matcher<Incoming, Payload>,
    /// Those of the communicator, which counts the messages of all.
    counted: Arc<[Arc<Peer>]>,
}

impl Engine {
    pub(super) fn new(connections: Connections, counted: Arc<[Arc<Peer>]>) -> Result<Self> {
        let ranks = 0..connections.comm.size();
        let peers = ranks.map(|rank| TaggedPeer::new(rank, &connections)).collect::<Result<_>>()?;
        Ok(Self { connections, peers, matcher: Matcher::default(), counted })
    }

    /// Moves all messages along, also those that [`Engine::poll`] does not look at.
    pub(super) fn progress(&mut self) {
        (0..self.peers.len()).for_each(|rank| self.progress_with(rank));
    }

    pub(super) fn progress_with(&mut self, rank: usize) {
        if self.peers[rank].lost.is_none()
            && let Err(error) = self.peers[rank].test()
        {
            self.lose(rank, error);
        }
        self.poll_rank(rank);
    }

    /// Takes all that has come from a rank.
    pub(super) fn drain(&mut self, rank: usize) {
        loop {
            let before = self.peers[rank].received;
            self.poll_rank(rank);
            if self.peers[rank].received == before {
                return;
            }
        }
    }

    /// Takes the messages of a rank or of all ranks, and sends as many as there is room for.
    pub(super) fn poll(&mut self, rank: Option<usize>) {
        match rank {
            Some(rank) => self.poll_rank(rank),
            None => (0..self.peers.len()).for_each(|rank| self.poll_rank(rank)),
        }
    }

    fn poll_rank(&mut self, rank: usize) {
        if self.peers[rank].lost.is_some() {
            return;
        }
        let taken = self.take_from(rank);
        if let Err(error) = taken.and_then(|()| self.peers[rank].flush(&self.connections)) {
            self.lose(rank, error);
        }
    }

    /// Takes the messages of a rank, also those that came before it was lost.
    fn take_from(&mut self, rank: usize) -> Result<()> {
        let mut taken = Ok(());
        for _ in 0..self.connections.cells {
            let Some((at, bytes)) = self.peers[rank].next(&self.connections)? else { break };
            taken = taken.and(self.take(rank, at, bytes));
            taken = taken.and(self.peers[rank].consume(&self.connections));
        }
        taken
    }

    /// Takes a message out of the inbox.
    fn take(&mut self, rank: usize, at: usize, bytes: usize) -> Result<()> {
        let inbox = self.connections.inbox.memory();
        let malformed = || refused(rank, "something else", "a tagged message of this version");
        let mut head = [0; Header::MAX_BYTES];
        let head = &mut head[..bytes.min(Header::MAX_BYTES)];
        inbox.read(at, head)?;
        let header = Header::from_bytes(head).ok_or_else(malformed)?;
        let counted = &self.counted[rank].tagged.received;
        let payload = bytes - Header::BYTES;
        let peer = &mut self.peers[rank];
        peer.credits = peer.credits.saturating_add(header.credits).min(CREDITS);
        match header.kind {
            Kind::Credits => {}
            Kind::Finish { id } => {
                let outgoing = peer.announced.remove(&id).ok_or_else(malformed)?;
                finish(&outgoing.outcome, Ok(outgoing.status));
            }
            Kind::RequestToSend { tag, id, bytes, from } => {
                let bytes = bytes as usize;
                match self.matcher.receive_for(rank, tag) {
                    Some(incoming) => {
                        counted.fetch_add(1, Ordering::Relaxed);
                        peer.accept(Matched { incoming, status: Status { rank, tag, bytes }, id, from });
                    }
                    None => self.keep(rank, tag, Payload::Announced { id, bytes, from })?,
                }
            }
            Kind::Eager { tag } => match self.matcher.receive_for(rank, tag) {
                Some(incoming) => {
                    counted.fetch_add(1, Ordering::Relaxed);
                    let status = Status { rank, tag, bytes: payload };
                    let from = at + Header::BYTES;
                    deliver(incoming, status, |to, start| to.copy_from(start, inbox, from, payload));
                    peer.give_credit();
                }
                None => {
                    let mut kept = vec![0; payload];
                    inbox.read(at + Header::BYTES, &mut kept)?;
                    self.keep(rank, tag, Payload::Eager(kept))?;
                }
            },
        }
        Ok(())
    }

    /// Keeps a message that no receive waits for.
    fn keep(&mut self, rank: usize, tag: u64, payload: Payload) -> Result<()> {
        if !self.peers[rank].unexpected.add(&payload) {
            return Err(refused(rank, "one for which it has no credit", "as many as it has credits for"));
        }
        self.matcher.keep(rank, tag, payload);
        Ok(())
    }

    /// Starts a send.
    pub(super) fn send(&mut self, rank: usize, outgoing: Outgoing) -> Result<()> {
        let peer = &mut self.peers[rank];
        if let Some(error) = &peer.lost {
            return Err(error.clone());
        }
        peer.send(outgoing)?;
        self.counted[rank].tagged.sent.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = peer.flush(&self.connections) {
            self.lose(rank, error);
        }
        Ok(())
    }

    /// Starts a receive. Returns where it waits, if it does.
    pub(super) fn receive(&mut self, key: Key, incoming: Incoming) -> Result<Option<Place>> {
        if let Some(arrived) = self.matcher.take(key) {
            self.give(arrived, incoming);
            return Ok(None);
        }
        match self.why_silent(&key) {
            Some(error) => Err(error),
            None => Ok(Some(self.matcher.post(key, incoming))),
        }
    }

    /// Gives a message that has arrived to a receive.
    pub(super) fn give(&mut self, arrived: Unexpected, incoming: Incoming) {
        let status = status_of(&arrived);
        self.count(&status);
        let peer = &mut self.peers[status.rank];
        peer.unexpected.remove(&arrived.message);
        match arrived.message {
            Payload::Eager(payload) => {
                deliver(incoming, status, |to, start| to.write(start, &payload));
                peer.give_credit();
            }
            Payload::Announced { id, from, .. } => peer.accept(Matched { incoming, status, id, from }),
        }
        self.poll_rank(status.rank);
    }

    /// Takes the oldest message that a receive would get.
    pub(super) fn take_out(&mut self, key: Key) -> Result<Option<Unexpected>> {
        match self.find(key)? {
            Some(_) => Ok(self.matcher.take(key)),
            None => Ok(None),
        }
    }

    /// The oldest message that a receive would get.
    pub(super) fn find(&mut self, key: Key) -> Result<Option<Status>> {
        self.progress();
        match self.matcher.find(key).map(status_of) {
            Some(status) => Ok(Some(status)),
            None => self.why_silent(&key).map_or(Ok(None), Err),
        }
    }

    /// Returns what [`Engine::take_out`] took: a receive may have come for it since.
    pub(super) fn put_back(&mut self, arrived: Unexpected) {
        match self.matcher.receive_for(arrived.source, arrived.tag) {
            Some(incoming) => self.give(arrived, incoming),
            None => self.matcher.put_back(arrived),
        }
    }

    pub(super) fn cancel(&mut self, place: Place) -> Option<Incoming> {
        self.matcher.cancel(place)
    }

    /// Messages that have come and that no receive has taken.
    pub(super) fn unreceived(&self) -> Vec<Status> {
        self.matcher.messages().map(status_of).collect()
    }

    /// Counts a message that a receive takes, or an error names.
    pub(super) fn count(&self, status: &Status) {
        self.counted[status.rank].tagged.received.fetch_add(1, Ordering::Relaxed);
    }

    /// Messages that were announced, and that their ranks have not taken.
    pub(super) fn announced(&self) -> Vec<Status> {
        self.peers.iter().flat_map(|peer| peer.announced.values().map(|send| send.status)).collect()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.peers.iter().all(TaggedPeer::is_idle)
    }

    /// For each rank how many messages have left for it and are complete, for [`Engine::has_all`] there.
    pub(super) fn left(&self) -> Vec<u8> {
        let complete = |peer: &TaggedPeer| ((peer.left - peer.leaving.len()) as u64).to_le_bytes();
        self.peers.iter().flat_map(complete).collect()
    }

    /// Whether all has come that had left the other ranks, but for those that are lost.
    pub(super) fn has_all(&self, left: &[Vec<u8>]) -> bool {
        let me = self.connections.comm.rank();
        self.peers.iter().zip(left).all(|(peer, left)| {
            let left = left.as_chunks().0.get(me).map_or(0, |count| u64::from_le_bytes(*count));
            peer.lost.is_some() || peer.received as u64 >= left
        })
    }

    /// Why no message will come for such a receive.
    fn why_silent(&self, key: &Key) -> Option<Error> {
        let me = self.connections.comm.rank();
        match key.source() {
            Some(rank) => self.peers[rank].lost.clone(),
            None => {
                // This rank could still send to itself, but a receive from any rank means the others.
                let mut others =
                    self.peers.iter().enumerate().filter(|(rank, _)| *rank != me).map(|(_, peer)| &peer.lost);
                let first = others.next()?.clone()?;
                others.all(Option::is_some).then_some(first)
            }
        }
    }

    /// A rank cannot be reached any more: ends what concerns it.
    fn lose(&mut self, rank: usize, error: Error) {
        // So that the rank learns it, if it is alive.
        let _ = self.connections.comm.give_up(rank);
        self.peers[rank].lost = Some(error.clone());
        // What had come before.
        let _ = self.take_from(rank);
        self.peers[rank].fail(&error);
        let is_alone = self.why_silent(&Key::new(Source::Any, Tag::Any)).is_some();
        let ended = self.matcher.cancel_if(|key| key.source().map_or(is_alone, |source| source == rank));
        ended.into_iter().for_each(|incoming| finish(&incoming.outcome, Err(error.clone())));
    }
}

/// The error for a message that a rank must not send.
fn refused(rank: usize, value: &str, expected: &'static str) -> Error {
    let (what, value) = ("the message of the rank", value.to_owned());
    let cause = gdsync::Error::InvalidArgument { what, value, expected };
    Error::message(rank, "tagged receive", cause)
}

/// Completes a receive with payload that `copy` brings.
fn deliver(incoming: Incoming, status: Status, copy: impl FnOnce(&Memory, usize) -> gdsync::Result<()>) {
    let memory = incoming.buffer.memory();
    let delivered = fits(&status, &incoming).and_then(|()| {
        copy(memory, incoming.range.start)?;
        if !memory.is_host() {
            memory.flush()?;
        }
        Ok(status)
    });
    finish(&incoming.outcome, delivered);
}

/// Refuses a message that is longer than its receive.
fn fits(status: &Status, incoming: &Incoming) -> Result<()> {
    let (&Status { rank, tag, bytes }, room) = (status, incoming.range.len());
    if bytes > room { Err(Error::Truncated { rank, tag, bytes, room }) } else { Ok(()) }
}

/// `None` where the queue has no room now.
fn unless_full<T>(posted: Result<T>) -> Result<Option<T>> {
    match posted {
        Ok(posted) => Ok(Some(posted)),
        Err(Error::Message { cause: gdsync::Error::QueueFull { .. }, .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_decoded_as_encoded() {
        let (tag, id, bytes) = (u64::MAX - 1, 1 << 40, u32::MAX - 2);
        let from = RemoteAddr { addr: u64::MAX - 3, rkey: 0x1234_5678 };
        let kinds = [
            Kind::Credits,
            Kind::Eager { tag },
            Kind::RequestToSend { tag, id, bytes, from },
            Kind::Finish { id },
        ];
        for (credits, kind) in (7..).zip(kinds) {
            let header = Header { kind, credits };
            let encoded = header.to_bytes();
            assert_eq!(Header::from_bytes(&encoded[..header.len()]), Some(header));
            assert_eq!(Header::from_bytes(&encoded[..header.len() - 1]), None, "cut off");
        }
        let mut unknown = Header { kind: Kind::Credits, credits: 0 }.to_bytes();
        unknown[22] = 9;
        assert_eq!(Header::from_bytes(&unknown), None);
    }

    /// A rank that ignores its credits must not fill the memory.
    #[test]
    fn unexpected_messages_are_limited_to_the_credits() {
        let (eager, mut counts) = (Payload::Eager(Vec::new()), UnexpectedCounts::default());
        assert!((0..CREDITS).all(|_| counts.add(&eager)));
        counts.remove(&eager);
        assert!(counts.add(&eager) && !counts.add(&eager));
        let from = RemoteAddr { addr: 0, rkey: 0 };
        let announced = Payload::Announced { id: 0, bytes: 1 << 20, from };
        assert!((0..MAX_SENDS).all(|_| counts.add(&announced)) && !counts.add(&announced));
    }

    #[test]
    fn any_bytes_are_a_header_or_none() {
        bolero::check!().for_each(|bytes: &[u8]| {
            if let Some(header) = Header::from_bytes(bytes) {
                assert!(header.len() <= bytes.len());
                assert_eq!(Header::from_bytes(&header.to_bytes()), Some(header));
            }
        });
    }
}
