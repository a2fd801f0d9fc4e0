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
const EAGER: usize = PLACE - Header::BYTES;

/// Such messages that a rank keeps for another one: its memory for them is bounded by this.
const CREDITS: u16 = 256;

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
        let (places, size) = ((depth / 2).clamp(1, PLACES), messages.size());
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
    Answer(Kind),
}

/// What is under way on a connection, oldest first, and what is complete with it.
type UnderWay = VecDeque<(Request, Option<(Outcome, Status)>)>;

#[derive(Debug, Default)]
pub(super) struct Peer {
    rank: usize,
    /// Why it cannot be reached.
    pub(super) lost: Option<Error>,
    /// For the next messages, oldest first, and how many have come.
    receives: VecDeque<Request>,
    pub(super) received: usize,
    backlog: VecDeque<Item>,
    /// With headers, and how many have left.
    leaving: UnderWay,
    left: usize,
    /// Eager messages that it has room for.
    credits: u16,
    /// Those that we have room for again, and it does not know.
    owed: u16,
    announced: HashMap<u64, Outgoing>,
    next_id: u64,
    /// Payload that can be sent and received as soon as the connection has room, and what is under way of both.
    cleared: VecDeque<Outgoing>,
    matched: VecDeque<(Incoming, Status, u64)>,
    moving: [UnderWay; 2],
}

impl Peer {
    /// With receives posted.
    pub(super) fn new(rank: usize, channels: &Channels) -> Result<Self> {
        let mut peer = Self { rank, credits: CREDITS, ..Self::default() };
        peer.fill(channels)?;
        Ok(peer)
    }

    /// Posts receives for all places that are free; where the queue still counts others, as it may for a while, later.
    fn fill(&mut self, channels: &Channels) -> Result<()> {
        while self.receives.len() < channels.places {
            let place = (self.received + self.receives.len()) % channels.places;
            let at = (self.rank * channels.places + place) * PLACE;
            let posted = channels.messages.irecv(&channels.inbox, at..at + PLACE, self.rank);
            let Some(receive) = unless_full(posted)? else { break };
            self.receives.push_back(receive);
        }
        Ok(())
    }

    /// The next thing that has come: where it is in the inbox, and its bytes. [`Peer::receive_again`] makes room for another.
    pub(super) fn next(&mut self, channels: &Channels) -> Result<Option<(usize, usize)>> {
        let Some(first) = self.receives.front() else { return Ok(None) };
        let Some(status) = first.peek()? else { return Ok(None) };
        channels.messages.wait(first, Duration::ZERO)?;
        let at = (self.rank * channels.places + self.received % channels.places) * PLACE;
        Ok(Some((at, status.bytes)))
    }

    /// Has what [`Peer::next`] does not look at looked at.
    pub(super) fn look(&self) -> Result<()> {
        self.receives.front().map_or(Ok(()), |first| first.test().map(drop))
    }

    pub(super) fn receive_again(&mut self, channels: &Channels) -> Result<()> {
        self.receives.pop_front();
        self.received += 1;
        self.fill(channels)
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
            let (qpn, outstanding, depth) = (0, under_way as u64, MOST as u64);
            let source = gdsync::Error::QueueFull {
                queue: "queue of tagged sends",
                qpn,
                outstanding,
                depth,
                untaken: 0,
            };
            return Err(Error::Message { rank: self.rank, operation: "tagged send", source });
        }
        self.backlog.push_back(Item::Send(outgoing));
        Ok(())
    }

    /// The rank wants the payload of an announced message, or is done with it. `None` if there is no such message.
    pub(super) fn clear(&mut self, id: u64, is_wanted: bool) -> Option<()> {
        let outgoing = self.announced.remove(&id)?;
        match is_wanted {
            true => self.cleared.push_back(outgoing),
            false => finish(&outgoing.outcome, Ok(outgoing.status)),
        }
        Some(())
    }

    /// A receive matches an announced message: has its payload come.
    pub(super) fn accept(&mut self, incoming: Incoming, status: Status, id: u64) {
        let outcome = match &self.lost {
            Some(error) => Err(error.clone()),
            None => fits(&status, &incoming).map(|()| status),
        };
        if outcome.is_ok() && status.bytes > 0 {
            self.matched.push_back((incoming, status, id));
        } else {
            self.backlog.push_back(Item::Answer(Kind::Done { id }));
            finish(&incoming.outcome, outcome);
        }
    }

    /// Whether nothing is under way that this rank has to see to.
    pub(super) fn is_idle(&self) -> bool {
        let payload =
            self.cleared.is_empty() && self.matched.is_empty() && self.moving.iter().all(UnderWay::is_empty);
        let messages = self.backlog.is_empty() && self.leaving.is_empty() && self.announced.is_empty();
        self.lost.is_some() || payload && messages
    }

    /// Sees what is complete, and starts what there is room for.
    pub(super) fn flush(&mut self, channels: &Channels) -> Result<()> {
        let (rank, payload) = (self.rank, &channels.payload);
        self.settle(channels)?;
        self.fill(channels)?;
        while let Some(Outgoing { buffer, range, .. }) = self.cleared.front() {
            let Some(request) = unless_full(payload.isend(buffer, range.clone(), rank))? else { break };
            let sent = self.cleared.pop_front();
            self.moving[0].extend(sent.map(|sent| (request, Some((sent.outcome, sent.status)))));
        }
        while let Some((Incoming { buffer, range, .. }, status, id)) = self.matched.front() {
            let range = range.start..range.start + status.bytes;
            let Some(request) = unless_full(payload.irecv(buffer, range, rank))? else { break };
            self.backlog.push_back(Item::Answer(Kind::Cleared { id: *id }));
            let matched = self.matched.pop_front();
            self.moving[1].extend(matched.map(|(to, status, _)| (request, Some((to.outcome, status)))));
        }
        let mut has_left = false;
        while self.leaving.len() < channels.places && self.leave(channels)? {
            has_left = true;
        }
        // What was copied is complete already.
        if has_left { settle(&mut self.leaving, &channels.messages) } else { Ok(()) }
    }

    fn settle(&mut self, channels: &Channels) -> Result<()> {
        settle(&mut self.leaving, &channels.messages)?;
        self.moving.iter_mut().try_for_each(|moving| settle(moving, &channels.payload))
    }

    /// Sends the next item of the backlog, or credits if many are owed. Returns whether there may be more to send.
    fn leave(&mut self, channels: &Channels) -> Result<bool> {
        let mut pieces = [None, None];
        let kind = match self.backlog.front() {
            Some(Item::Send(Outgoing { buffer, range, status, .. })) => {
                let (tag, is_short) = (status.tag, range.len() <= EAGER && buffer.memory().is_host());
                if is_short && self.credits > 0 {
                    pieces[1] = Some((buffer, range.clone()));
                    Kind::Eager { tag }
                } else {
                    let bytes = u32::try_from(range.len()).expect("at most 1 GiB: Tagged::isend looks");
                    Kind::Announced { tag, id: self.next_id, bytes }
                }
            }
            Some(Item::Answer(kind)) => *kind,
            None if self.owed >= CREDITS / 2 => Kind::Credits,
            None => return Ok(false),
        };
        let at = (self.rank * channels.places + self.left % channels.places) * Header::BYTES;
        Header { kind, credits: self.owed }.write(channels.headers.memory(), at)?;
        pieces[0] = Some((&channels.headers, at..at + Header::BYTES));
        let posted = match pieces {
            [Some(header), Some(payload)] => channels.messages.isendv(&[header, payload], self.rank),
            [header, _] => channels.messages.isendv(header.as_slice(), self.rank),
        };
        let Some(request) = unless_full(posted)? else { return Ok(false) };
        (self.left, self.owed) = (self.left + 1, 0);
        let mut ends = None;
        if let Some(Item::Send(outgoing)) = self.backlog.pop_front() {
            if let Kind::Announced { id, .. } = kind {
                self.next_id += 1;
                self.announced.insert(id, outgoing);
            } else {
                self.credits -= 1;
                ends = Some((outgoing.outcome, outgoing.status));
            }
        }
        self.leaving.push_back((request, ends));
        Ok(true)
    }

    /// The rank cannot be reached any more: ends what is under way with it.
    pub(super) fn fail(&mut self, channels: &Channels, error: &Error) {
        // What is complete in one queue is, whatever another met with.
        let _ = settle(&mut self.leaving, &channels.messages);
        for moving in &mut self.moving {
            let _ = settle(moving, &channels.payload);
        }
        let backlog = self.backlog.drain(..).filter_map(|item| match item {
            Item::Send(outgoing) => Some(outgoing.outcome),
            Item::Answer(_) => None,
        });
        let sends = self.announced.drain().map(|(_, outgoing)| outgoing).chain(self.cleared.drain(..));
        let sends = sends.map(|outgoing| outgoing.outcome);
        let matched = self.matched.drain(..).map(|(incoming, ..)| incoming.outcome);
        let queues = [&mut self.leaving].into_iter().chain(&mut self.moving);
        let under_way = queues.flat_map(|queue| queue.drain(..)).filter_map(|(_, ends)| Some(ends?.0));
        let all = backlog.chain(sends).chain(matched).chain(under_way);
        all.for_each(|outcome| finish(&outcome, Err(error.clone())));
    }
}

/// Completes what is.
fn settle(under_way: &mut UnderWay, on: &Communicator) -> Result<()> {
    while let Some((request, _)) = under_way.front()
        && request.test()?.is_some()
    {
        // Its buffer may go.
        on.wait(request, Duration::ZERO)?;
        if let Some((_, Some((outcome, status)))) = under_way.pop_front() {
            finish(&outcome, Ok(status));
        }
    }
    Ok(())
}

/// Refuses a message that is longer than its receive.
pub(super) fn fits(status: &Status, incoming: &Incoming) -> Result<()> {
    let (&Status { rank, tag, bytes }, room) = (status, incoming.range.len());
    if bytes > room { Err(Error::Truncated { rank, tag, bytes, room }) } else { Ok(()) }
}

/// `None` where the connection has no room now.
fn unless_full(posted: Result<Request>) -> Result<Option<Request>> {
    match posted {
        Ok(request) => Ok(Some(request)),
        Err(Error::Message { source: gdsync::Error::QueueFull { .. }, .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
