//! Messages under way.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use gdsync::verbs::Completion;

use crate::deadline::Deadline;
use crate::ends::Ends;
use crate::error::{Error, Result};
use crate::link::{Link, SILENCE};
use crate::peer::Way;
use crate::slots::Receive;
use crate::window::Lane;

/// A message under way. Dropping it detaches: the message goes on, its resources come back by themselves.
#[derive(Clone, Debug)]
#[must_use = "a message nobody waits for may fail unnoticed"]
pub struct Request {
    rank: usize,
    pub(crate) part: Part,
}

/// Which way it takes.
#[derive(Clone, Debug)]
pub(crate) enum Part {
    /// Through a queue pair.
    Posted(Arc<Order>),
    /// It was sent through a slot, and is complete.
    Copied(usize),
    /// The same, but complete only with what was sent before it.
    Behind(Arc<Order>, usize),
    /// A receive of what comes through a slot, if slots do not close before.
    Kept(Arc<Link>, Arc<Receive>),
}

/// A message in a queue.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) operation: &'static str,
    /// The place in its queue.
    pub(crate) place: u64,
    /// How many places it takes: that one and those right before it.
    pub(crate) places: u32,
    pub(crate) bytes: usize,
}

/// What a message of a queue pair is, and where it went. There are no weak pointers to it: [`Held`](crate::held::Held) counts
/// on that.
pub(crate) struct Order {
    /// Here rather than in each request, which then counts as one holder of one thing.
    link: Arc<Link>,
    way: Way,
    pub(crate) places: u32,
    /// The connection, if it is an operation of a window.
    pub(crate) lane: Option<Weak<Lane>>,
    operation: &'static str,
    completion: Completion,
    bytes: usize,
    /// How many bytes came of it, from before the queue forgets.
    pub(crate) kept: Kept,
}

/// A number of bytes that becomes known once.
#[derive(Debug)]
pub(crate) struct Kept(AtomicU64);

impl Kept {
    const UNKNOWN: u64 = u64::MAX;

    fn get(&self) -> Option<usize> {
        let bytes = self.0.load(Ordering::Relaxed);
        (bytes != Self::UNKNOWN).then(|| usize::try_from(bytes).expect("it was one"))
    }

    #[inline]
    pub(crate) fn set(&self, bytes: usize) {
        self.0.store(bytes as u64, Ordering::Relaxed);
    }
}

impl Default for Kept {
    fn default() -> Self {
        Self(AtomicU64::new(Self::UNKNOWN))
    }
}

/// A message that is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// The rank at the other end.
    pub rank: usize,
    /// Bytes sent or received.
    pub bytes: usize,
}

/// Without the connection, which has orders.
impl fmt::Debug for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { way, operation, completion, bytes, .. } = self;
        write!(f, "Order {{ {way:?}, {operation}, {bytes} bytes, {completion:?} }}")
    }
}

impl Order {
    /// Of a message of these ends.
    #[cold]
    pub(crate) fn new(
        link: &Arc<Link>,
        ends: &Ends,
        way: Way,
        lane: Option<Weak<Lane>>,
        Message { operation, place, places, bytes }: Message,
    ) -> Self {
        let completion = match way {
            Way::Send => ends.send.send_completion(place),
            Way::Recv => ends.recv.recv_completion(place),
        };
        Self { link: link.clone(), way, places, lane, operation, completion, bytes, kept: Kept::default() }
    }

    /// The same of another message of the queue.
    #[inline]
    pub(crate) fn renew(&mut self, Message { operation, place, places, bytes }: Message) {
        self.completion.renew(place);
        (self.operation, self.places, self.bytes, self.kept) = (operation, places, bytes, Kept::default());
    }

    pub(crate) fn way(&self) -> Way {
        self.way
    }

    pub(crate) fn completion(&self) -> &Completion {
        &self.completion
    }

    /// The place in its queue.
    #[inline]
    pub(crate) fn index(&self) -> u64 {
        self.completion.index()
    }

    /// Bytes sent or received, or `None` while it is under way.
    pub(crate) fn outcome(&self) -> gdsync::Result<Option<usize>> {
        if let Some(len) = self.completion.known_len() {
            return Ok(Some(if self.way == Way::Send { self.bytes } else { len as usize }));
        }
        match self.completion.status() {
            Ok(wc) => Ok(wc.map(|wc| if wc.is_send() { self.bytes } else { wc.byte_len as usize })),
            // Success that was kept, if the queue has only forgotten it.
            Err(gdsync::Error::Forgotten { .. }) if self.kept.get().is_some() => Ok(self.kept.get()),
            Err(error) => Err(error),
        }
    }

    /// Whether it is over; what came of it is kept, as the queue may forget it.
    pub(crate) fn keep(&self) -> bool {
        match self.outcome() {
            Ok(None) => false,
            Ok(Some(bytes)) => {
                self.kept.set(bytes);
                true
            }
            // The queue pair is broken, and stays so.
            Err(_) => true,
        }
    }

    fn is_message(&self, way: Way) -> bool {
        self.lane.is_none() && self.way == way
    }
}

impl Request {
    #[inline]
    pub(crate) fn posted(order: Arc<Order>) -> Self {
        Self { rank: order.link.rank, part: Part::Posted(order) }
    }

    #[inline]
    pub(crate) fn copied(rank: usize, bytes: usize, after: Option<Arc<Order>>) -> Self {
        let part = match after {
            None => Part::Copied(bytes),
            Some(before) => Part::Behind(before, bytes),
        };
        Self { rank, part }
    }

    #[inline]
    pub(crate) fn kept(link: &Arc<Link>, receive: Arc<Receive>) -> Self {
        Self { rank: link.rank, part: Part::Kept(link.clone(), receive) }
    }

    /// The connection, unless nothing is under way any more.
    pub(crate) fn link(&self) -> Option<&Link> {
        match &self.part {
            Part::Posted(order) | Part::Behind(order, _) => Some(&order.link),
            Part::Kept(link, _) => Some(link),
            Part::Copied(_) => None,
        }
    }

    /// Whether it is a message, not an operation of a window.
    pub(crate) fn is_message(&self) -> bool {
        !matches!(&self.part, Part::Posted(order) if order.lane.is_some())
    }

    /// The rank at the other end.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Whether the message is complete; `None` while it is under way. A complete send may be overwritten.
    ///
    /// # Errors
    /// [`Error::Message`] names the rank and why it failed.
    pub fn test(&self) -> Result<Option<Status>> {
        let bytes = self.outcome().map_err(|error| self.failed(error))?;
        Ok(bytes.map(|bytes| self.status(bytes)))
    }

    /// As [`Request::test`], for those who look again and again: of what comes through slots it looks at the next one only, so
    /// that the sender is not disturbed. Now and then they must test.
    #[inline]
    pub(crate) fn peek(&self) -> Result<Option<Status>> {
        match &self.part {
            Part::Kept(link, receive)
                if receive.is_kept()
                    && let Some(slots) = &link.slots =>
            {
                slots.take_next(link);
                Ok(receive.known().map(|bytes| self.status(bytes)))
            }
            _ => self.test(),
        }
    }

    fn outcome(&self) -> gdsync::Result<Option<usize>> {
        match &self.part {
            Part::Posted(order) => {
                // What came before it through slots is complete before it.
                if order.is_message(Way::Recv) {
                    order.link.take();
                }
                order.outcome()
            }
            Part::Copied(bytes) => Ok(Some(*bytes)),
            Part::Behind(before, bytes) => Ok(before.outcome()?.map(|_| *bytes)),
            Part::Kept(link, receive) => {
                if receive.known().is_none() {
                    link.take();
                }
                match receive.outcome()? {
                    None if receive.is_kept() => link.outcome_at_end(receive),
                    known => Ok(known),
                }
            }
        }
    }

    /// Blocks until the message is complete. Now and then it asks whether the other rank is still there.
    ///
    /// # Errors
    /// As [`Request::test`], and [`gdsync::Error::Deadline`] inside after `timeout`: the message goes on.
    pub fn wait(&self, timeout: Duration) -> Result<Status> {
        self.wait_and(timeout, || {
            self.link().iter().for_each(|link| {
                link.credits.catch_up_or_leave();
            });
        })
    }

    /// Tells the other rank of receives that were held back.
    pub(crate) fn catch_up(&self) {
        self.link().iter().for_each(|link| link.credits.catch_up());
    }

    /// As [`Request::wait`], and calls `meanwhile` once unless it is complete soon.
    #[inline]
    pub(crate) fn wait_and(&self, timeout: Duration, meanwhile: impl FnOnce()) -> Result<Status> {
        let known = match &self.part {
            Part::Copied(bytes) => Ok(Some(*bytes)),
            Part::Kept(link, receive) => {
                let _range = crate::DOMAIN.range(c"wait");
                Ok(link.slots.as_ref().and_then(|slots| slots.wait_shortly(link, receive)))
            }
            Part::Posted(..) | Part::Behind(..) => self.outcome(),
        };
        match known {
            Ok(Some(bytes)) => Ok(self.status(bytes)),
            known => self.wait_longer(known, timeout, meanwhile),
        }
    }

    #[cold]
    fn wait_longer(
        &self,
        known: gdsync::Result<Option<usize>>,
        timeout: Duration,
        meanwhile: impl FnOnce(),
    ) -> Result<Status> {
        let bytes = match &self.part {
            Part::Kept(link, receive) if let Some(slots) = &link.slots => {
                let _range = crate::DOMAIN.range(c"wait");
                let waited = slots.wait(link, receive, timeout, meanwhile);
                waited.and_then(|waited| self.wait_long(timeout, waited))
            }
            _ => known.and_then(|_| {
                let _range = crate::DOMAIN.range(c"wait");
                meanwhile();
                self.wait_long(timeout, Duration::ZERO)
            }),
        };
        bytes.map(|bytes| self.status(bytes)).map_err(|error| self.failed(error))
    }

    /// Waits for the completion, if there is one, after `waited`.
    fn wait_long(&self, timeout: Duration, waited: Duration) -> gdsync::Result<usize> {
        if let Some(bytes) = self.outcome()? {
            return Ok(bytes);
        }
        let (Some(completion), Some(link)) = (self.completion(), self.link()) else {
            return Err(gdsync::Error::Deadline { what: "waiting for a message", after: timeout });
        };
        let deadline = Deadline::after(timeout.saturating_sub(waited));
        loop {
            match completion.wait(deadline.remaining().min(SILENCE)) {
                Err(gdsync::Error::Deadline { .. }) if !deadline.is_over() => link.tend(),
                Err(gdsync::Error::Deadline { what, .. }) => {
                    return Err(gdsync::Error::Deadline { what, after: timeout });
                }
                // It is known, or was forgotten and kept.
                _ => break,
            }
        }
        let pending = gdsync::Error::Deadline { what: "waiting for a completion", after: timeout };
        self.outcome()?.ok_or(pending)
    }

    fn completion(&self) -> Option<&Completion> {
        match &self.part {
            Part::Posted(order) | Part::Behind(order, _) => Some(order.completion()),
            Part::Copied(_) => None,
            Part::Kept(_, receive) => receive.bound(),
        }
    }

    /// What a stream has to wait for; `None` where the message is complete.
    ///
    /// # Errors
    /// As [`Request::test`].
    pub(crate) fn for_stream(&self) -> Result<Option<&Completion>> {
        let link = match &self.part {
            Part::Posted(order) if order.is_message(Way::Recv) => Some(&order.link),
            Part::Kept(link, _) => Some(link),
            Part::Posted(..) | Part::Copied(_) | Part::Behind(..) => None,
        };
        if let Some(link) = link
            && let Some(slots) = &link.slots
        {
            slots.settle_for_stream(link).map_err(|error| self.failed(error))?;
        }
        if !matches!(self.part, Part::Posted(..)) && self.test()?.is_some() {
            return Ok(None);
        }
        Ok(self.completion())
    }

    pub(crate) fn failed(&self, source: gdsync::Error) -> Error {
        let source = match source {
            // It went down with the connection: that has the reason.
            gdsync::Error::Completion(error) if error.is_flush() => {
                let lane = match &self.part {
                    Part::Posted(order) => order.lane.as_ref(),
                    Part::Copied(_) | Part::Behind(..) | Part::Kept(..) => None,
                };
                let known = match lane {
                    Some(lane) => lane.upgrade().and_then(|lane| lane.ends.send.check().err()),
                    None => self.link().and_then(|link| link.check().err()),
                };
                known.unwrap_or(error.into())
            }
            other => other,
        };
        let operation = match &self.part {
            Part::Posted(order) => order.operation,
            Part::Copied(_) | Part::Behind(..) => "send",
            Part::Kept(..) => "receive",
        };
        Error::Message { rank: self.rank, operation, source }
    }

    #[inline]
    fn status(&self, bytes: usize) -> Status {
        Status { rank: self.rank, bytes }
    }
}
