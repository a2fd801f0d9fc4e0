//! What is under way with one rank: messages and news on one connection, in order, and on another the payload of long messages.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use gdsync::memory::Memory;

use super::header::{Header, Kind};
use super::request::{Incoming, Outcome, Outgoing, Status, finish};
use crate::communicator::{Communicator, Registration};
use crate::error::{Error, Result};
use crate::request::Request;

/// Bytes of a place for a message with its header: what fits through a slot.
const PLACE: usize = 4096;

/// Bytes of the longest message whose payload is sent before it is asked for.
pub(super) const EAGER: usize = PLACE - Header::BYTES;

/// Such messages that a rank keeps for another one: its memory for them is bounded by this.
pub(super) const CREDITS: u16 = 256;

/// Messages to a rank that are under way: announcements of these are kept there, a few words each.
const MOST: usize = 1 << 16;

/// Messages with headers in one direction that are under way on the connection, if that is deep enough.
const PLACES: usize = 32;

/// The connections with all ranks, and memory for what they carry.
#[derive(Debug)]
pub(super) struct Channels {
    pub(super) messages: Communicator,
    pub(super) payload: Communicator,
    /// Places for each rank.
    pub(super) inbox: Registration,
    /// Headers that leave.
    headers: Registration,
    pub(super) places: usize,
}

impl Channels {
    pub(super) fn new(messages: Communicator, payload: Communicator, depth: usize) -> Result<Self> {
        let (places, size) = (PLACES.min(depth), messages.size());
        let memory = |bytes: usize| Memory::alloc((size * places * bytes).max(1));
        let inbox = messages.register(&memory(PLACE)?)?;
        let headers = messages.register(&memory(Header::BYTES)?)?;
        Ok(Self { messages, payload, inbox, headers, places })
    }
}

/// Something for the rank that waits for its turn.
#[derive(Debug)]
enum Item {
    Send(Outgoing),
    Cleared { id: u64, bytes: u32 },
}

#[derive(Debug)]
pub(super) struct Peer {
    rank: usize,
    /// Why it cannot be reached.
    pub(super) lost: Option<Error>,
    /// For the next messages, oldest first, and how many have come.
    receives: VecDeque<Request>,
    received: usize,
    backlog: VecDeque<Item>,
    /// What has left and may not be complete, oldest first, and how many have left before.
    leaving: VecDeque<(Request, Option<(Outcome, Status)>)>,
    left: usize,
    /// Eager messages that it has room for.
    credits: u16,
    /// Those that we have room for again, and it does not know.
    owed: u16,
    announced: HashMap<u64, Outgoing>,
    next_id: u64,
    /// Payload that can be sent and received as soon as the connection has room, and that which is under way.
    cleared: VecDeque<(Outgoing, usize)>,
    matched: VecDeque<(Incoming, Status, u64)>,
    moving: [VecDeque<(Request, Outcome, Status)>; 2],
}

impl Peer {
    /// With receives posted.
    pub(super) fn new(rank: usize, channels: &Channels) -> Result<Self> {
        let (lost, next_id, announced) = <_>::default();
        let (receives, backlog, leaving, cleared, matched, moving) = <_>::default();
        let ([received, left], owed) = <_>::default();
        let credits = CREDITS;
        let mut peer = Self {
            rank,
            lost,
            receives,
            received,
            backlog,
            leaving,
            left,
            credits,
            owed,
            announced,
            next_id,
            cleared,
            matched,
            moving,
        };
        for place in 0..channels.places {
            peer.post(channels, place)?;
        }
        Ok(peer)
    }

    fn post(&mut self, channels: &Channels, place: usize) -> Result<()> {
        let at = (self.rank * channels.places + place) * PLACE;
        self.receives.push_back(channels.messages.irecv(&channels.inbox, at..at + PLACE, self.rank)?);
        Ok(())
    }

    /// The next thing that has come: where it is in the inbox, and its bytes. [`Peer::receive_again`] makes room for another.
    pub(super) fn next(&mut self, channels: &Channels) -> Result<Option<(usize, usize)>> {
        let Some(bytes) = self.receives.front().map(|first| done(&channels.messages, first)).transpose()?
        else {
            return Ok(None);
        };
        let at = (self.rank * channels.places + self.received % channels.places) * PLACE;
        Ok(bytes.map(|bytes| (at, bytes)))
    }

    pub(super) fn receive_again(&mut self, channels: &Channels) -> Result<()> {
        let place = self.received % channels.places;
        self.receives.pop_front();
        self.received += 1;
        self.post(channels, place)
    }

    /// The rank has room for more eager messages.
    pub(super) fn add_credits(&mut self, credits: u16) {
        self.credits = self.credits.saturating_add(credits).min(CREDITS);
    }

    /// Here is room for one more.
    pub(super) fn give_credit(&mut self) {
        self.owed = self.owed.saturating_add(1);
    }

    /// Takes a send on.
    ///
    /// # Errors
    /// [`gdsync::Error::QueueFull`] where too many are under way.
    pub(super) fn send(&mut self, outgoing: Outgoing) -> Result<()> {
        let under_way = self.backlog.len() + self.announced.len();
        if under_way >= MOST {
            let (outstanding, depth) = (under_way as u64, MOST as u64);
            let source = gdsync::Error::QueueFull { queue: "tagged sends", qpn: 0, outstanding, depth };
            return Err(Error::Message { rank: self.rank, operation: "tagged send", source });
        }
        self.backlog.push_back(Item::Send(outgoing));
        Ok(())
    }

    /// The rank wants so much of the payload of an announced message.
    pub(super) fn clear(&mut self, id: u64, bytes: usize) -> Option<()> {
        let outgoing = self.announced.remove(&id)?;
        match bytes {
            0 => finish(&outgoing.outcome, Ok(self.sent(&outgoing))),
            _ if bytes == outgoing.range.len() => self.cleared.push_back((outgoing, bytes)),
            _ => return None,
        }
        Some(())
    }

    fn sent(&self, outgoing: &Outgoing) -> Status {
        Status { rank: self.rank, tag: outgoing.tag, bytes: outgoing.range.len() }
    }

    /// A receive matches an announced message: has its payload come.
    pub(super) fn accept(&mut self, incoming: Incoming, status: Status, id: u64) {
        match &self.lost {
            Some(error) => finish(&incoming.outcome, Err(error.clone())),
            None => self.matched.push_back((incoming, status, id)),
        }
    }

    /// Whether nothing is under way that this rank has to see to.
    pub(super) fn is_idle(&self) -> bool {
        let waiting = self.backlog.len() + self.leaving.len() + self.announced.len();
        let payload =
            self.cleared.len() + self.matched.len() + self.moving.iter().map(VecDeque::len).sum::<usize>();
        self.lost.is_some() || waiting + payload == 0
    }

    /// Sees what is complete, and starts what there is room for.
    pub(super) fn flush(&mut self, channels: &Channels) -> Result<()> {
        self.settle(channels)?;
        while let Some((outgoing, bytes)) = self.cleared.front() {
            let range = outgoing.range.start..outgoing.range.start + bytes;
            let Some(request) = unless_full(channels.payload.isend(&outgoing.buffer, range, self.rank))?
            else {
                break;
            };
            let status = self.sent(outgoing);
            let sent = self.cleared.pop_front();
            self.moving[0].extend(sent.map(|(outgoing, _)| (request, outgoing.outcome, status)));
        }
        while let Some((incoming, status, id)) = self.matched.front() {
            let (id, bytes) = (*id, u32::try_from(status.bytes).unwrap_or_default());
            let does_fit = status.bytes <= incoming.range.len();
            if !does_fit || bytes == 0 {
                // Nothing is to be sent, and the sender is to know.
                self.backlog.push_back(Item::Cleared { id, bytes: 0 });
                if let Some((incoming, status, _)) = self.matched.pop_front() {
                    finish(&incoming.outcome, fits(&status, &incoming).map(|()| status));
                }
                continue;
            }
            let range = incoming.range.start..incoming.range.start + status.bytes;
            let Some(request) = unless_full(channels.payload.irecv(&incoming.buffer, range, self.rank))?
            else {
                break;
            };
            self.backlog.push_back(Item::Cleared { id, bytes });
            let matched = self.matched.pop_front();
            self.moving[1].extend(matched.map(|(incoming, status, _)| (request, incoming.outcome, status)));
        }
        while self.leaving.len() < channels.places && self.leave(channels)? {}
        Ok(())
    }

    /// Sees what is complete.
    fn settle(&mut self, channels: &Channels) -> Result<()> {
        while let Some((request, _)) = self.leaving.front()
            && done(&channels.messages, request)?.is_some()
        {
            if let Some((_, Some((outcome, status)))) = self.leaving.pop_front() {
                finish(&outcome, Ok(status));
            }
        }
        for moving in &mut self.moving {
            while let Some((request, ..)) = moving.front()
                && done(&channels.payload, request)?.is_some()
            {
                if let Some((_, outcome, status)) = moving.pop_front() {
                    finish(&outcome, Ok(status));
                }
            }
        }
        Ok(())
    }

    /// Sends the next item of the backlog, or credits if many are owed. Returns whether there may be more to send.
    fn leave(&mut self, channels: &Channels) -> Result<bool> {
        let kind = match self.backlog.front() {
            Some(Item::Send(outgoing)) if self.credits > 0 && is_eager(outgoing) => {
                Kind::Eager { tag: outgoing.tag }
            }
            Some(Item::Send(outgoing)) => {
                let bytes = u32::try_from(outgoing.range.len()).unwrap_or(u32::MAX);
                Kind::Announced { tag: outgoing.tag, id: self.next_id, bytes }
            }
            Some(&Item::Cleared { id, bytes }) => Kind::Cleared { id, bytes },
            None if self.owed >= CREDITS / 2 => Kind::Credits,
            None => return Ok(false),
        };
        let at = (self.rank * channels.places + self.left % channels.places) * Header::BYTES;
        let headers = &channels.headers;
        Header { kind, credits: self.owed }.write(headers.memory(), at)?;
        let header = (headers, at..at + Header::BYTES);
        let posted = match self.backlog.front() {
            Some(Item::Send(Outgoing { buffer, range, .. })) if matches!(kind, Kind::Eager { .. }) => {
                channels.messages.isendv(&[header, (buffer, range.clone())], self.rank)
            }
            _ => channels.messages.isendv(&[header], self.rank),
        };
        let Some(request) = unless_full(posted)? else { return Ok(false) };
        self.left += 1;
        self.owed = 0;
        let mut eager = None;
        if let Some(Item::Send(outgoing)) = self.backlog.pop_front() {
            if let Kind::Announced { id, .. } = kind {
                self.next_id += 1;
                self.announced.insert(id, outgoing);
            } else {
                self.credits -= 1;
                eager = Some((outgoing.outcome.clone(), self.sent(&outgoing)));
            }
        }
        match eager {
            // Copied.
            Some((outcome, status))
                if self.leaving.is_empty() && done(&channels.messages, &request)?.is_some() =>
            {
                finish(&outcome, Ok(status));
            }
            eager => self.leaving.push_back((request, eager)),
        }
        Ok(true)
    }

    /// The rank cannot be reached any more: ends what is under way with it.
    pub(super) fn fail(&mut self, channels: &Channels, error: &Error) {
        let _ = self.settle(channels);
        let backlog = self.backlog.drain(..).filter_map(|item| match item {
            Item::Send(outgoing) => Some(outgoing.outcome),
            Item::Cleared { .. } => None,
        });
        let leaving = self.leaving.drain(..).filter_map(|(_, eager)| eager.map(|(outcome, _)| outcome));
        let announced = self.announced.drain().map(|(_, outgoing)| outgoing.outcome);
        let cleared = self.cleared.drain(..).map(|(outgoing, _)| outgoing.outcome);
        let matched = self.matched.drain(..).map(|(incoming, ..)| incoming.outcome);
        let moving =
            self.moving.iter_mut().flat_map(|moving| moving.drain(..)).map(|(_, outcome, _)| outcome);
        let all = backlog.chain(leaving).chain(announced).chain(cleared).chain(matched).chain(moving);
        all.for_each(|outcome| finish(&outcome, Err(error.clone())));
    }
}

/// Whether the payload can be sent at once.
fn is_eager(outgoing: &Outgoing) -> bool {
    outgoing.range.len() <= EAGER && outgoing.buffer.memory().is_host()
}

/// Refuses a message that is longer than its receive.
pub(super) fn fits(status: &Status, incoming: &Incoming) -> Result<()> {
    let (&Status { rank, tag, bytes }, room) = (status, incoming.range.len());
    if bytes > room { Err(Error::Truncated { rank, tag, bytes, room }) } else { Ok(()) }
}

/// The bytes of a message that is complete, whose buffer may go then.
fn done(on: &Communicator, request: &Request) -> Result<Option<usize>> {
    match request.test()? {
        Some(_) => Ok(Some(on.wait(request, Duration::ZERO)?.bytes)),
        None => Ok(None),
    }
}

/// `None` where the connection has no room now.
fn unless_full(posted: Result<Request>) -> Result<Option<Request>> {
    match posted {
        Ok(request) => Ok(Some(request)),
        Err(Error::Message { source: gdsync::Error::QueueFull { .. }, .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
