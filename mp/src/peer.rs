//! Messages under way to and from one rank.

use std::ops::Range;
use std::slice;
use std::sync::Arc;

use gdsync::verbs::Sge;
use parking_lot::Mutex;

use crate::communicator::Registration;
use crate::error::{Error, Result};
use crate::held::Held;
use crate::link::Link;
use crate::request::{Message, Order, Request, Status};
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

    /// Puts a message into its queue by `post`, which gets its pieces and returns its place there, after recycling if the queue
    /// is full. Its buffers are held until it is complete.
    pub(crate) fn start<T>(
        &self,
        way: Way,
        operation: &'static str,
        pieces: &[Piece<'_>],
        post: impl FnMut(&Link, &[Sge]) -> gdsync::Result<(u64, T)>,
    ) -> Result<(Request, T)> {
        self.hold(&mut self.held[way as usize].lock(), way, operation, pieces, post)
    }

    /// The pieces of a message, which are not too many and lie inside their buffers.
    fn sges(&self, operation: &'static str, pieces: &[Piece<'_>]) -> Result<Vec<Sge>> {
        if count(pieces) > self.link.pieces {
            return Err(self.too_many(operation, pieces));
        }
        pieces.iter().map(|piece| self.sge(piece)).collect()
    }

    fn too_many(&self, operation: &'static str, pieces: &[Piece<'_>]) -> Error {
        let source = gdsync::Error::InvalidArgument {
            what: "pieces of a message",
            value: count(pieces).to_string(),
            expected: "at most Builder::max_pieces",
        };
        self.failed(operation, source)
    }

    fn failed(&self, operation: &'static str, source: gdsync::Error) -> Error {
        Error::Message { rank: self.link.rank, operation, source }
    }

    // Always, as Registration::sge.
    #[inline(always)]
    fn sge(&self, (buffer, range): &Piece<'_>) -> Result<Sge> {
        buffer.sge(self.link.near, range)
    }

    fn hold<T>(
        &self,
        held: &mut Held,
        way: Way,
        operation: &'static str,
        pieces: &[Piece<'_>],
        mut post: impl FnMut(&Link, &[Sge]) -> gdsync::Result<(u64, T)>,
    ) -> Result<(Request, T)> {
        let (one, several);
        let (sges, bytes) = match pieces {
            [piece] => {
                one = self.sge(piece)?;
                (slice::from_ref(&one), one.len as usize)
            }
            _ => {
                several = self.sges(operation, pieces)?;
                (&several[..], several.iter().map(|sge| sge.len as usize).sum())
            }
        };
        let failed = |source| self.failed(operation, source);
        held.prefetch();
        // Held in the order of the queue, so that the oldest are recycled before the queue forgets them.
        if self.under_way(way, held) >= self.link.depth {
            self.make_room(way, held).map_err(failed)?;
        }
        // A result that is only passed on is copied, and that waits for its parts to be written.
        let (place, posted) = match post(&self.link, sges) {
            Ok(posted) => posted,
            Err(error) => self.again(way, held, error, &mut || post(&self.link, sges)).map_err(failed)?,
        };
        let make = |message| Order::new(&self.link, &self.link.ends, way, None, message);
        let message = Message { operation, place, places: 1, bytes };
        let order = held.add(message, pieces, self.link.near, make);
        if let (Way::Send, Some(slots)) = (way, &self.link.slots) {
            slots.sent(&order);
        }
        Ok((Request::posted(order), posted))
    }

    /// Posts once more if it failed for lack of room that can be made.
    #[cold]
    fn again<T>(
        &self,
        way: Way,
        held: &mut Held,
        error: gdsync::Error,
        post: &mut dyn FnMut() -> gdsync::Result<T>,
    ) -> gdsync::Result<T> {
        if !matches!(error, gdsync::Error::QueueFull { .. }) || self.under_way(way, held) >= self.link.depth {
            return Err(error);
        }
        self.make_room(way, held)?;
        post()
    }

    /// Lets go of what is complete, for one more message.
    #[cold]
    fn make_room(&self, way: Way, held: &mut Held) -> gdsync::Result<()> {
        self.poll();
        held.drop_newest(|order| order.completion().is_taken_back());
        held.settle();
        self.link.recycle_slots();
        self.room(way, self.under_way(way, held))
    }

    /// Messages of one direction that are under way, of which these are held here.
    fn under_way(&self, way: Way, held: &Held) -> usize {
        let slots = self.link.slots.as_ref().filter(|_| way == Way::Recv);
        held.places() + slots.map_or(0, Slots::under_way)
    }

    /// Sends a message through a slot, if there are any and it can now.
    #[inline]
    pub(crate) fn send(&self, pieces: &[Piece<'_>]) -> Result<Option<Request>> {
        self.link.slots.as_ref().map_or(Ok(None), |slots| self.send_through(slots, pieces))
    }

    fn send_through(&self, slots: &Slots, pieces: &[Piece<'_>]) -> Result<Option<Request>> {
        if self.link.is_ended() || !self.is_simple(pieces)? {
            return Ok(None);
        }
        let sent = slots.send(pieces);
        if sent.is_none() {
            self.link.end_if_refused();
        }
        Ok(sent.map(|(bytes, after)| Request::copied(self.link.rank, bytes, after)))
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
        post: impl FnMut(&Link, &[Sge]) -> gdsync::Result<(u64, ())>,
    ) -> Result<Request> {
        const RECEIVE: &str = "receive";
        let held = &self.held[Way::Recv as usize];
        let mut held = match &self.link.slots {
            None => held.lock(),
            Some(slots) => {
                if !self.is_simple(pieces)? {
                    return Err(self.too_many(RECEIVE, pieces));
                }
                let failed = |source| self.failed(RECEIVE, source);
                if slots.may_receive()
                    && let Some(kept) = slots.keep(&self.link, pieces).map_err(failed)?
                {
                    return Ok(Request::kept(&self.link, kept));
                }
                // While this is locked nobody else opens slots, nor posts a receive.
                let mut held = held.lock();
                slots.open(&self.link, pieces, || {
                    held.settle();
                    held.orders().cloned().collect()
                });
                if slots.may_receive()
                    && let Some(kept) = slots.keep(&self.link, pieces).map_err(failed)?
                {
                    return Ok(Request::kept(&self.link, kept));
                }
                held
            }
        };
        Ok(self.hold(&mut held, Way::Recv, RECEIVE, pieces, post)?.0)
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
        Err(gdsync::Error::QueueFull { queue, qpn: qp.qpn(), outstanding, depth, untaken: 0 })
    }

    /// Recycles, and refuses unless `count` more messages can be started.
    pub(crate) fn has_room(&self, way: Way, count: usize, operation: &'static str) -> Result<()> {
        self.recycle();
        let held = self.under_way(way, &self.held[way as usize].lock());
        let depth = self.link.depth;
        let room = if held + count <= depth { Ok(()) } else { self.room(way, depth) };
        room.map_err(|source| self.failed(operation, source))
    }

    /// Takes completions, so that the queues have room again.
    fn poll(&self) {
        [Way::Send, Way::Recv].into_iter().for_each(|way| self.link.queue(way).drain());
    }

    /// A message was seen to be complete: lets it and those before it go, and takes the completions of its queue now and then.
    pub(crate) fn finish(&self, order: &Arc<Order>, status: Status) {
        let (way, index) = (order.way(), order.index());
        if matches!(way, Way::Recv) {
            self.link.credits.arrived(index);
        }
        self.held[way as usize].lock().finish(order, status.bytes);
        if index.is_multiple_of(DRAIN) {
            self.link.queue(way).drain();
        }
    }

    /// Takes completions, lets buffers go, and asks a silent rank whether it is there if something is under way.
    pub(crate) fn recycle(&self) {
        self.poll();
        let mut under_way = false;
        for held in &self.held {
            let mut held = held.lock();
            held.drop_newest(|order| order.completion().is_taken_back());
            held.settle();
            under_way |= !held.is_empty();
        }
        under_way |= self.link.recycle_slots();
        if under_way || self.link.is_awaited_beside() || self.link.check().is_err() {
            self.link.tend();
        }
    }
}

impl Drop for Peer {
    /// What is under way is held by its requests alone from here on, and holds the connection itself.
    fn drop(&mut self) {
        self.link.slots.iter().for_each(Slots::forget_orders);
    }
}

/// Pieces that take room: empty ones do not.
fn count(pieces: &[Piece<'_>]) -> usize {
    pieces.iter().filter(|(_, range)| !range.is_empty()).count()
}
