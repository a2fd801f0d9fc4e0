//! Messages under way to and from one rank.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use gdsync::verbs::{Completion, Sge};
use parking_lot::Mutex;

use crate::communicator::Registration;
use crate::error::{Error, Result};
use crate::few::Few;
use crate::link::Link;
use crate::request::{Order, Part, Request, Status};
use crate::slots::Slots;

/// A part of a message: bytes of registered memory.
pub type Piece<'a> = (&'a Registration, Range<usize>);

/// A rank, and what is under way with it.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) link: Arc<Link>,
    /// In each direction: not more than the queues remember.
    held: [Mutex<Held>; 2],
}

/// Messages under way, oldest first, and their buffers: they stay registered though their request is dropped.
type Held = VecDeque<(Arc<Order>, Buffers)>;

/// Most messages have one; the others do not cost them an allocation.
type Buffers = (Option<Registration>, Box<[Registration]>);

/// Messages whose completions are taken together.
pub(crate) const DRAIN: u64 = 32;

/// Which of the two directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Send = 0,
    Recv = 1,
}

impl Peer {
    pub(crate) fn new(link: Link) -> Self {
        Self { link: Arc::new(link), held: Default::default() }
    }

    /// Puts a message into its queue by `post`, which gets its pieces, after recycling if the queue is full. Its buffers are
    /// held until it is complete.
    pub(crate) fn start<T>(
        &self,
        way: Way,
        operation: &'static str,
        pieces: &[Piece<'_>],
        post: impl FnMut(&Link, &[Sge]) -> gdsync::Result<(Completion, T)>,
    ) -> Result<(Request, T)> {
        match pieces {
            [piece] => self.hold(way, operation, pieces, &[self.sge(piece)?], post),
            _ => {
                let count = count(pieces);
                if count > self.link.pieces {
                    let source = gdsync::Error::InvalidArgument {
                        what: "pieces of a message",
                        value: count.to_string(),
                        expected: "at most Builder::max_pieces",
                    };
                    return Err(Error::Message { rank: self.link.rank, operation, source });
                }
                let sges = pieces.iter().map(|piece| self.sge(piece)).collect::<Result<Vec<_>>>()?;
                self.hold(way, operation, pieces, &sges, post)
            }
        }
    }

    fn sge(&self, (buffer, range): &Piece<'_>) -> Result<Sge> {
        let bytes = range.end.checked_sub(range.start).ok_or_else(|| gdsync::Error::InvalidArgument {
            what: "the range of the buffer",
            value: format!("{range:?}"),
            expected: "one that does not end before it starts",
        })?;
        Ok(buffer.on(self.link.near).sge(range.start, bytes)?)
    }

    fn hold<T>(
        &self,
        way: Way,
        operation: &'static str,
        pieces: &[Piece<'_>],
        sges: &[Sge],
        post: impl FnMut(&Link, &[Sge]) -> gdsync::Result<(Completion, T)>,
    ) -> Result<(Request, T)> {
        self.hold_in(&mut self.held[way as usize].lock(), way, operation, pieces, sges, post)
    }

    fn hold_in<T>(
        &self,
        held: &mut Held,
        way: Way,
        operation: &'static str,
        pieces: &[Piece<'_>],
        sges: &[Sge],
        mut post: impl FnMut(&Link, &[Sge]) -> gdsync::Result<(Completion, T)>,
    ) -> Result<(Request, T)> {
        // Held in the order of the queue, so that the oldest are recycled before the queue forgets them.
        if self.under_way(way, held) >= self.link.depth {
            self.poll();
            settle(held);
            self.link.recycle_slots();
        }
        let posted = match self.room(way, self.under_way(way, held)).and_then(|()| post(&self.link, sges)) {
            Err(gdsync::Error::QueueFull { .. }) if self.under_way(way, held) < self.link.depth => {
                self.poll();
                settle(held);
                post(&self.link, sges)
            }
            other => other,
        };
        let failed = |source| Error::Message { rank: self.link.rank, operation, source };
        let (completion, posted) = posted.map_err(failed)?;
        let bytes = sges.iter().map(|sge| sge.len as usize).sum();
        let order = Arc::new(Order { way, lane: None, operation, completion, bytes, kept: OnceLock::new() });
        let mut buffers = pieces.iter().map(|(buffer, _)| (*buffer).clone());
        held.push_back((order.clone(), (buffers.next(), buffers.collect())));
        if let (Way::Send, Some(slots)) = (way, &self.link.slots) {
            slots.sent(&order);
        }
        Ok((self.request(Part::Posted(order)), posted))
    }

    fn request(&self, part: Part) -> Request {
        Request { link: self.link.clone(), part }
    }

    /// Messages of one direction that are under way, of which these are held here.
    fn under_way(&self, way: Way, held: &Held) -> usize {
        let slots = self.link.slots.as_ref().filter(|_| way == Way::Recv);
        held.len() + slots.map_or(0, Slots::under_way)
    }

    /// Sends a message through a slot, if there are any and it can now.
    pub(crate) fn send(&self, pieces: &[Piece<'_>]) -> Result<Option<Request>> {
        let Some(slots) = &self.link.slots else { return Ok(None) };
        if self.link.is_ended() || !self.is_simple(pieces)? {
            return Ok(None);
        }
        let sent = slots.send(pieces);
        if sent.is_none() {
            self.link.end_if_refused();
        }
        Ok(sent.map(|(bytes, after)| self.request(Part::Copied { bytes, after })))
    }

    /// Whether there are not too many pieces; they lie inside their buffers.
    fn is_simple(&self, pieces: &[Piece<'_>]) -> Result<bool> {
        for piece in pieces {
            self.sge(piece)?;
        }
        Ok(count(pieces) <= self.link.pieces)
    }

    /// Starts a receive: through a slot if that is where its message comes, or else in the queue by `post`.
    pub(crate) fn receive(
        &self,
        pieces: &[Piece<'_>],
        post: impl FnMut(&Link, &[Sge]) -> gdsync::Result<(Completion, ())>,
    ) -> Result<Request> {
        const RECEIVE: &str = "receive";
        let Some(slots) = self.link.slots.as_ref().filter(|_| count(pieces) <= self.link.pieces) else {
            return Ok(self.start(Way::Recv, RECEIVE, pieces, post)?.0);
        };
        let sges = pieces.iter().map(|piece| self.sge(piece)).collect::<Result<Few<Sge>>>()?;
        let failed = |source| Error::Message { rank: self.link.rank, operation: RECEIVE, source };
        if slots.may_receive()
            && let Some(kept) = slots.receive(&self.link, pieces, || false).map_err(failed)?
        {
            return Ok(self.request(Part::Kept(kept)));
        }
        // While this is locked nobody else opens slots, nor posts a receive.
        let mut held = self.held[Way::Recv as usize].lock();
        let is_idle = || {
            settle(&mut held);
            held.is_empty()
        };
        if let Some(kept) = slots.receive(&self.link, pieces, is_idle).map_err(failed)? {
            return Ok(self.request(Part::Kept(kept)));
        }
        Ok(self.hold_in(&mut held, Way::Recv, RECEIVE, pieces, sges.as_slice(), post)?.0)
    }

    fn room(&self, way: Way, held: usize) -> gdsync::Result<()> {
        let link = &self.link;
        if held < link.depth {
            return Ok(());
        }
        let (qp, queue) = match way {
            Way::Send => (&link.ends.send, "send queue"),
            Way::Recv => (&link.ends.recv, "receive queue"),
        };
        qp.check()?;
        let (outstanding, depth) = (held as u64, link.depth as u64);
        Err(gdsync::Error::QueueFull { queue, qpn: qp.qpn(), outstanding, depth })
    }

    /// Recycles, and refuses unless `count` more messages can be started.
    pub(crate) fn has_room(&self, way: Way, count: usize, operation: &'static str) -> Result<()> {
        self.recycle();
        let held = self.under_way(way, &self.held[way as usize].lock());
        let depth = self.link.depth;
        let room = if held + count <= depth { Ok(()) } else { self.room(way, depth) };
        room.map_err(|source| Error::Message { rank: self.link.rank, operation, source })
    }

    /// Takes completions, so that the queues have room again.
    fn poll(&self) {
        [Way::Send, Way::Recv].into_iter().for_each(|way| self.link.queue(way).drain());
    }

    /// A message was seen to be complete: lets it and those before it go, and takes the completions of its queue now and then.
    pub(crate) fn finish(&self, order: &Arc<Order>, status: Status) {
        let Order { way, completion, .. } = &**order;
        let index = completion.index();
        if matches!(way, Way::Recv) {
            self.link.credits.arrived(completion);
        }
        let mut held = self.held[*way as usize].lock();
        // By whoever has seen a later one, too.
        let over = held.pop_front_if(|(front, _)| Arc::ptr_eq(front, order));
        if over.is_none() && held.front().is_some_and(|(front, _)| front.completion.index() <= index) {
            settle(&mut held);
        } else if let Some((order, _)) = &over {
            let _ = order.kept.set(status.bytes);
        }
        drop(held);
        if index.is_multiple_of(DRAIN) {
            self.link.queue(*way).drain();
        }
    }

    /// Takes completions, lets buffers go, and asks a silent rank whether it is there if something is under way.
    pub(crate) fn recycle(&self) {
        self.poll();
        let mut under_way = false;
        for held in &self.held {
            let mut held = held.lock();
            settle(&mut held);
            under_way |= !held.is_empty();
        }
        under_way |= self.link.recycle_slots();
        if under_way || self.link.check().is_err() {
            self.link.tend();
        }
    }
}

/// Pieces that take room: empty ones do not.
fn count(pieces: &[Piece<'_>]) -> usize {
    pieces.iter().filter(|(_, range)| !range.is_empty()).count()
}

/// Lets go of the messages that are complete, and keeps what came of them.
pub(crate) fn settle<T>(held: &mut VecDeque<(Arc<Order>, T)>) {
    while let Some((order, _)) = held.front() {
        match order.outcome() {
            Ok(None) => break,
            Ok(Some(bytes)) => {
                let _ = order.kept.set(bytes);
            }
            // The queue pair is broken, and stays so.
            Err(_) => {}
        }
        held.pop_front();
    }
}
