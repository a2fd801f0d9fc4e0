//! Moves the messages of all ranks along.

use gdsync::memory::Memory;

use super::header::{Header, Kind};
use super::matching::{Arrival, Key, Matcher, Place, Source, Tag};
use super::peer::{Channels, Peer, fits};
use super::request::{Incoming, Outgoing, Status, finish};
use crate::error::{Error, Result};

/// A message that no receive has taken yet: its payload, or what it was announced by.
#[derive(Debug)]
pub(super) enum Message {
    Here(Vec<u8>),
    There { id: u64, bytes: usize },
}

impl Message {
    fn bytes(&self) -> usize {
        match self {
            Self::Here(payload) => payload.len(),
            Self::There { bytes, .. } => *bytes,
        }
    }
}

/// What has come and was not received.
pub(super) type Arrived = Arrival<Message>;

pub(super) fn status(arrived: &Arrived) -> Status {
    Status { rank: arrived.source, tag: arrived.tag, bytes: arrived.message.bytes() }
}

#[derive(Debug)]
pub(super) struct Engine {
    channels: Channels,
    peers: Vec<Peer>,
    matcher: Matcher<Incoming, Message>,
}

impl Engine {
    pub(super) fn new(channels: Channels) -> Result<Self> {
        let peers =
            (0..channels.messages.size()).map(|rank| Peer::new(rank, &channels)).collect::<Result<_>>()?;
        Ok(Self { channels, peers, matcher: Matcher::default() })
    }

    /// Moves all messages along. What [`Engine::poll_all`] does not look at is looked at, too.
    pub(super) fn look(&mut self) {
        (0..self.peers.len()).for_each(|rank| self.look_at(rank));
    }

    pub(super) fn look_at(&mut self, rank: usize) {
        if self.peers[rank].lost.is_none()
            && let Err(error) = self.peers[rank].look()
        {
            self.lose(rank, error);
        }
        self.poll(rank);
    }

    /// Takes all that has come from a rank.
    pub(super) fn drain(&mut self, rank: usize) {
        loop {
            let before = self.peers[rank].received;
            self.poll(rank);
            if self.peers[rank].received == before {
                return;
            }
        }
    }

    pub(super) fn poll_all(&mut self) {
        (0..self.peers.len()).for_each(|rank| self.poll(rank));
    }

    /// Takes what has come from a rank, and sends what there is room for.
    pub(super) fn poll(&mut self, rank: usize) {
        if self.peers[rank].lost.is_some() {
            return;
        }
        let taken = self.take_in(rank);
        if let Err(error) = taken.and_then(|()| self.peers[rank].flush(&self.channels)) {
            self.lose(rank, error);
        }
    }

    /// Takes what has come from a rank, also what came before it could not be reached any more.
    fn take_in(&mut self, rank: usize) -> Result<()> {
        let mut taken = Ok(());
        for _ in 0..self.channels.places {
            let Some((at, bytes)) = self.peers[rank].next(&self.channels)? else { break };
            taken = taken.and(self.take(rank, at, bytes));
            taken = taken.and(self.peers[rank].receive_again(&self.channels));
        }
        taken
    }

    /// Takes what is here in the inbox.
    fn take(&mut self, rank: usize, at: usize, bytes: usize) -> Result<()> {
        let inbox = self.channels.inbox.memory();
        let wrong = || {
            let (what, value) = ("what came from the rank", "something else".to_owned());
            let source =
                gdsync::Error::InvalidArgument { what, value, expected: "a tagged message of this version" };
            Error::Message { rank, operation: "tagged receive", source }
        };
        let payload = bytes.checked_sub(Header::BYTES).ok_or_else(wrong)?;
        let header = Header::read(inbox, at)?.ok_or_else(wrong)?;
        let peer = &mut self.peers[rank];
        peer.add_credits(header.credits);
        match header.kind {
            Kind::Credits => {}
            Kind::Cleared { id } => peer.clear(id, true).ok_or_else(wrong)?,
            Kind::Done { id } => peer.clear(id, false).ok_or_else(wrong)?,
            Kind::Announced { tag, id, bytes } => {
                let bytes = bytes as usize;
                match self.matcher.receive_for(rank, tag) {
                    Some(incoming) => peer.accept(incoming, Status { rank, tag, bytes }, id),
                    None => self.matcher.keep(rank, tag, Message::There { id, bytes }),
                }
            }
            Kind::Eager { tag } => match self.matcher.receive_for(rank, tag) {
                Some(incoming) => {
                    let status = Status { rank, tag, bytes: payload };
                    let from = at + Header::BYTES;
                    deliver(incoming, status, |to, start| to.copy_from(start, inbox, from, payload));
                    peer.give_credit();
                }
                None => {
                    let mut kept = vec![0; payload];
                    inbox.read(at + Header::BYTES, &mut kept)?;
                    self.matcher.keep(rank, tag, Message::Here(kept));
                }
            },
        }
        Ok(())
    }

    /// Starts a send.
    pub(super) fn send(&mut self, rank: usize, outgoing: Outgoing) -> Result<()> {
        let peer = &mut self.peers[rank];
        if let Some(error) = &peer.lost {
            return Err(error.clone());
        }
        peer.send(outgoing)?;
        if let Err(error) = peer.flush(&self.channels) {
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
        match self.silence(&key) {
            Some(error) => Err(error),
            None => Ok(Some(self.matcher.post(key, incoming))),
        }
    }

    /// Gives a message that has come to a receive.
    pub(super) fn give(&mut self, arrived: Arrived, incoming: Incoming) {
        let status = status(&arrived);
        let peer = &mut self.peers[status.rank];
        match arrived.message {
            Message::Here(payload) => {
                deliver(incoming, status, |to, start| to.write(start, &payload));
                peer.give_credit();
            }
            Message::There { id, .. } => peer.accept(incoming, status, id),
        }
        self.poll(status.rank);
    }

    /// Takes the oldest message that a receive would get.
    pub(super) fn take_out(&mut self, key: Key) -> Result<Option<Arrived>> {
        match self.find(key)? {
            Some(_) => Ok(self.matcher.take(key)),
            None => Ok(None),
        }
    }

    /// The oldest message that a receive would get.
    pub(super) fn find(&mut self, key: Key) -> Result<Option<Status>> {
        self.look();
        match self.matcher.find(key).map(status) {
            Some(status) => Ok(Some(status)),
            None => self.silence(&key).map_or(Ok(None), Err),
        }
    }

    /// Takes back what [`Engine::take_out`] gave: a receive may have come for it since.
    pub(super) fn put_back(&mut self, arrived: Arrived) {
        match self.matcher.receive_for(arrived.source, arrived.tag) {
            Some(incoming) => self.give(arrived, incoming),
            None => self.matcher.put_back(arrived),
        }
    }

    pub(super) fn cancel(&mut self, place: Place) -> Option<Incoming> {
        self.matcher.cancel(place)
    }

    pub(super) fn is_idle(&self) -> bool {
        self.peers.iter().all(Peer::is_idle)
    }

    /// Why nothing will come for such a receive.
    fn silence(&self, key: &Key) -> Option<Error> {
        let me = self.channels.messages.rank();
        match key.source() {
            Some(rank) => self.peers[rank].lost.clone(),
            None => {
                // This rank could still send to itself, but who waits for anybody means the others.
                let mut others =
                    self.peers.iter().enumerate().filter(|(rank, _)| *rank != me).map(|(_, peer)| &peer.lost);
                let first = others.next()?.clone()?;
                others.all(Option::is_some).then_some(first)
            }
        }
    }

    /// A rank cannot be reached any more: ends what has to do with it.
    fn lose(&mut self, rank: usize, error: Error) {
        let Channels { messages, payload, .. } = &self.channels;
        // So that it knows, too, if it is there.
        [messages, payload].into_iter().for_each(|channel| _ = channel.give_up(rank));
        self.peers[rank].lost = Some(error.clone());
        // What had come before, and was sent.
        let _ = self.take_in(rank);
        self.peers[rank].fail(&self.channels, &error);
        let is_alone = self.silence(&Key::new(Source::Any, Tag::Any)).is_some();
        let ended = self.matcher.cancel_if(|key| key.source().map_or(is_alone, |source| source == rank));
        ended.into_iter().for_each(|incoming| finish(&incoming.outcome, Err(error.clone())));
    }
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
