//! Requests: messages and one-sided operations under way.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use gdsync::memory::{Word32, Word64};
use gdsync::stream::{Cond, Ticket};
use gdsync::verbs::{Completion, Qp};

use crate::credit::aborted_by_peer;
use crate::error::{Error, Result, is_peer_lost, without_rank};
use crate::in_flight::{Direction, Done, InFlightOp};
use crate::peer::{Peer, Received, Sent};
use crate::rma_queue::RmaQueue;
use crate::shm_fifo::{FifoReceive, ShmFifo};
use crate::transport::{SILENCE, Transport};
use crate::wait::Deadline;

/// The domain of the ranges that profilers show.
pub(crate) static DOMAIN: gdsync::nvtx::Domain = gdsync::nvtx::Domain::new(c"mp");

/// A message under way. Dropping it detaches: the message goes on, and its resources are released when it is complete.
#[derive(Clone)]
#[must_use = "the message may be under way: wait for it before its memory is used again, or drop it with `_ =`"]
pub struct Request {
    rank: usize,
    state: State,
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let operation = match &self.state {
            State::Queue(_, op) | State::Rma(_, op) | State::Channel(.., op) => op.operation,
            State::Sent(_) | State::SentAfter(..) => "send",
            State::Fifo(..) => "receive",
        };
        write!(f, "Request({operation}, rank {})", self.rank)
    }
}

/// Where it is under way.
#[derive(Clone)]
enum State {
    /// In a queue of the rank's queue pair.
    Queue(Arc<Peer>, Arc<InFlightOp>),
    /// In a queue of a window.
    Rma(Arc<RmaQueue>, Arc<InFlightOp>),
    /// Of a channel, which has this queue pair.
    Channel(Arc<Peer>, Qp, Arc<InFlightOp>),
    /// Sent through the FIFO, and complete.
    Sent(usize),
    /// The same, but complete only after a send of the queue pair.
    SentAfter(Arc<Peer>, Arc<InFlightOp>, usize),
    /// A receive of the FIFO, which may be posted to the queue pair later.
    Fifo(Arc<Peer>, Arc<FifoReceive>),
}

/// What an operation that is complete says, as `MPI_Status`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// The rank at the other end.
    pub rank: usize,
    /// Bytes sent or received.
    pub bytes: usize,
    /// The tag of a [tagged](crate::tagged) message; 0 for all others.
    pub tag: u64,
}

/// What a stream waits for in place of a message.
pub(crate) enum Awaited<'a> {
    /// The message is complete.
    Nothing,
    /// Or, of a receive, a word whose upper half has this value.
    Completion(&'a Completion, Option<(Word64, u32)>),
    /// Another stream.
    Stream(&'a Ticket),
    /// A word that reaches a value.
    Word(Word32, u32),
}

/// The FIFO of a receive that is in it.
fn fifo_of(peer: &Peer) -> &ShmFifo {
    peer.fifo.as_ref().expect("only a FIFO makes such receives")
}

impl Request {
    #[inline]
    pub(crate) fn queued(peer: &Arc<Peer>, op: Arc<InFlightOp>) -> Self {
        Self { rank: peer.rank(), state: State::Queue(peer.clone(), op) }
    }

    pub(crate) fn rma(queue: &Arc<RmaQueue>, op: Arc<InFlightOp>) -> Self {
        Self { rank: queue.peer.rank(), state: State::Rma(queue.clone(), op) }
    }

    pub(crate) fn of_channel(peer: &Arc<Peer>, qp: &Qp, op: Arc<InFlightOp>) -> Self {
        Self { rank: peer.rank(), state: State::Channel(peer.clone(), qp.clone(), op) }
    }

    #[inline]
    pub(crate) fn sent(peer: &Arc<Peer>, sent: Sent) -> Self {
        let state = match sent {
            Sent::Queue(op) => State::Queue(peer.clone(), op),
            Sent::Fifo(bytes, None) => State::Sent(bytes),
            Sent::Fifo(bytes, Some(op)) => State::SentAfter(peer.clone(), op, bytes),
        };
        Self { rank: peer.rank(), state }
    }

    #[inline]
    pub(crate) fn received(peer: &Arc<Peer>, received: Received) -> Self {
        let state = match received {
            Received::Queue(op) => State::Queue(peer.clone(), op),
            Received::Fifo(receive) => State::Fifo(peer.clone(), receive),
        };
        Self { rank: peer.rank(), state }
    }

    /// The peer, unless nothing is under way any more.
    pub(crate) fn peer(&self) -> Option<&Arc<Peer>> {
        match &self.state {
            State::Queue(peer, _)
            | State::Channel(peer, ..)
            | State::SentAfter(peer, ..)
            | State::Fifo(peer, _) => Some(peer),
            State::Rma(queue, _) => Some(&queue.peer),
            State::Sent(_) => None,
        }
    }

    fn transport(&self) -> Option<&Transport> {
        self.peer().map(|peer| &peer.transport)
    }

    /// Whether it is a message of the communicator, not an operation of a window or a channel.
    pub(crate) fn is_message(&self) -> bool {
        !matches!(self.state, State::Rma(..) | State::Channel(..))
    }

    /// The rank at the other end.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Whether the message is complete; `None` while it is under way. The buffer of a complete send may be overwritten.
    ///
    /// # Errors
    /// [`Error::Message`] names the rank and why it failed.
    pub fn test(&self) -> Result<Option<Status>> {
        let bytes = self.outcome().map_err(|error| self.failed(error))?;
        Ok(bytes.map(|bytes| self.status(bytes)))
    }

    /// As [`Request::test`], for callers that poll: of the FIFO it reads the next cell only, to leave the sender's cache lines alone.
    /// They must test now and then.
    #[inline]
    pub(crate) fn poll(&self) -> Result<Option<Status>> {
        match &self.state {
            State::Fifo(peer, receive) if receive.is_queued() => {
                fifo_of(peer).take_next(&peer.transport);
                Ok(receive.len().map(|bytes| self.status(bytes)))
            }
            _ => self.test(),
        }
    }

    fn outcome(&self) -> gdsync::Result<Option<usize>> {
        match &self.state {
            State::Queue(peer, op) => {
                if op.direction == Direction::Recv {
                    // What came through the FIFO before it is complete before it.
                    peer.take();
                }
                match op.outcome()? {
                    None => Ok(peer.seen(op)),
                    known => Ok(known),
                }
            }
            State::Rma(queue, op) => outcome_beside(&queue.qp.send, op),
            State::Channel(_, qp, op) => match outcome_beside(qp, op) {
                // The queue forgets successes.
                Err(gdsync::Error::Forgotten { .. }) => Ok(Some(op.bytes())),
                known => known,
            },
            State::Sent(bytes) => Ok(Some(*bytes)),
            State::SentAfter(_, op, bytes) => Ok(op.outcome()?.map(|_| *bytes)),
            State::Fifo(peer, receive) => {
                if receive.len().is_none() {
                    peer.take();
                }
                match receive.outcome()? {
                    None if receive.is_queued() => fifo_of(peer).outcome_at_end(&peer.transport, receive),
                    known => Ok(known),
                }
            }
        }
    }

    /// Blocks until the message is complete. Now and then it asks whether the other rank is alive.
    ///
    /// # Errors
    /// [`Error::Message`] names the rank and why the message failed; with [`gdsync::Error::Deadline`] inside after `timeout`: the
    /// message goes on.
    pub fn wait(&self, timeout: Duration) -> Result<Status> {
        self.wait_and(timeout, || {
            self.transport().iter().for_each(|transport| _ = transport.credits.catch_up_or_leave());
        })
    }

    /// Announces receives that were held back.
    pub(crate) fn catch_up(&self) {
        self.transport().iter().for_each(|transport| transport.credits.catch_up());
    }

    /// As [`Request::wait`]. Calls `meanwhile` once unless the message is complete soon.
    #[inline]
    pub(crate) fn wait_and(&self, timeout: Duration, meanwhile: impl FnOnce()) -> Result<Status> {
        let known = match &self.state {
            State::Sent(bytes) => Ok(Some(*bytes)),
            State::Fifo(peer, receive) => {
                let _range = DOMAIN.range(c"wait");
                Ok(fifo_of(peer).wait_shortly(&peer.transport, receive))
            }
            State::Queue(..) | State::Rma(..) | State::Channel(..) | State::SentAfter(..) => self.outcome(),
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
        let _range = DOMAIN.range(c"wait");
        let bytes = match &self.state {
            State::Fifo(peer, receive) => {
                let wait = |()| fifo_of(peer).wait(&peer.transport, receive, timeout, meanwhile);
                let waited = peer.transport.fork_guard.check().and_then(wait);
                waited.and_then(|waited| self.wait_in_queue(timeout, waited))
            }
            _ => known.and_then(|_| {
                meanwhile();
                self.wait_in_queue(timeout, Duration::ZERO)
            }),
        };
        bytes.map(|bytes| self.status(bytes)).map_err(|error| self.failed(error))
    }

    /// Waits for the completion of the queue pair, if there is one, after `waited`.
    fn wait_in_queue(&self, timeout: Duration, waited: Duration) -> gdsync::Result<usize> {
        if let Some(bytes) = self.outcome()? {
            return Ok(bytes);
        }
        if let Some((qp, op)) = self.beside()
            && let Done::Stream(ticket) = &op.done
        {
            self.wait_for_stream(qp, ticket, timeout.saturating_sub(waited))?;
            return Ok(op.outcome()?.unwrap_or_else(|| op.bytes()));
        }
        let (Some(completion), Some(transport)) = (self.completion(), self.transport()) else {
            let rank = self.rank;
            let awaited = format!("a message from rank {rank}; see that the rank sends it");
            return Err(gdsync::Error::late("waiting for a message", timeout, awaited));
        };
        if completion.is_unsubmitted() {
            return Err(gdsync::Error::InvalidArgument {
                what: "this message",
                value: "in a batch that was not submitted, or prepared and not posted".into(),
                expected: "Stream::submit for it before the wait",
            });
        }
        let deadline = Deadline::after(timeout.saturating_sub(waited));
        let pause = if transport.credits.flag.has_watchdog { Duration::MAX } else { SILENCE };
        loop {
            match completion.wait(deadline.remaining().min(pause)) {
                Err(gdsync::Error::Deadline { .. }) if !deadline.is_over() => transport.tend(),
                Err(gdsync::Error::Deadline { what, awaited, .. }) => {
                    let awaited = self.awaited_receive().unwrap_or_else(|| awaited.to_string());
                    return Err(gdsync::Error::late(what, timeout, awaited));
                }
                // It is known, or was forgotten and kept.
                _ => break,
            }
        }
        self.outcome()?.ok_or_else(|| match completion.is_taken_back() {
            true => gdsync::Error::InvalidArgument {
                what: "the batch of this message",
                value: "dropped before a stream got it".into(),
                expected: "Stream::submit for it before the wait",
            },
            false => {
                gdsync::Error::late("waiting for a completion", timeout, "what its queue has not told yet")
            }
        })
    }

    /// What streams may do beside a queue pair.
    fn beside(&self) -> Option<(&Qp, &InFlightOp)> {
        match &self.state {
            State::Rma(queue, op) => Some((&queue.qp.send, op)),
            State::Channel(_, qp, op) => Some((qp, op)),
            _ => None,
        }
    }

    /// Blocks until a stream has done it beside a queue pair.
    fn wait_for_stream(&self, qp: &Qp, ticket: &Ticket, timeout: Duration) -> gdsync::Result<()> {
        let deadline = Deadline::after(timeout);
        loop {
            match ticket.wait(deadline.remaining().min(SILENCE)) {
                Err(gdsync::Error::Deadline { .. }) if !deadline.is_over() => {
                    self.transport().iter().for_each(|transport| transport.tend());
                    qp.check()?;
                }
                Err(gdsync::Error::Deadline { what, awaited, .. }) => {
                    return Err(gdsync::Error::late(what, timeout, awaited.to_string()));
                }
                known => return known,
            }
        }
    }

    /// The receive that a message waits for, if it is not posted.
    fn awaited_receive(&self) -> Option<String> {
        let State::Queue(peer, op) = &self.state else { return None };
        let posted = peer.transport.credits.granted();
        let number = peer.transport.credits.number_of(op.index());
        let is_awaited =
            op.direction == Direction::Send && self.is_message() && !Cond::Geq.holds32(posted, number);
        is_awaited.then(|| {
            let rank = self.rank;
            match peer.fifo {
                // Messages of the FIFO do not count here.
                Some(_) => format!("a receive of rank {rank}, which has not posted it; post one there (Communicator::irecv)"),
                None => format!(
                    "receive {number} of rank {rank}: rank {rank} has posted {posted}; post one there (Communicator::irecv)"
                ),
            }
        })
    }

    fn completion(&self) -> Option<&Completion> {
        match &self.state {
            State::Queue(_, op) | State::Rma(_, op) | State::Channel(.., op) | State::SentAfter(_, op, _) => {
                op.completion()
            }
            State::Sent(_) => None,
            State::Fifo(_, receive) => receive.posted(),
        }
    }

    /// What a stream has to wait for.
    ///
    /// # Errors
    /// [`Error::Message`] names the rank and why it failed.
    pub(crate) fn for_stream(&self) -> Result<Awaited<'_>> {
        let peer = match &self.state {
            State::Queue(peer, op) if op.direction == Direction::Recv => Some(peer),
            State::Fifo(peer, _) => Some(peer),
            _ => None,
        };
        if let Some(peer) = peer
            && let Some(fifo) = &peer.fifo
        {
            fifo.settle_for_stream(&peer.transport).map_err(|error| self.failed(error))?;
        }
        let is_of_queue = matches!(self.state, State::Queue(..) | State::Rma(..) | State::Channel(..));
        if !is_of_queue && self.test()?.is_some() {
            return Ok(Awaited::Nothing);
        }
        if let State::Fifo(peer, receive) = &self.state
            && let Some((word, value)) = fifo_of(peer).awaited(receive).map_err(|error| self.failed(error))?
        {
            return Ok(Awaited::Word(word, value));
        }
        if let Some((_, op)) = self.beside()
            && let Done::Stream(ticket) = &op.done
        {
            return Ok(Awaited::Stream(ticket));
        }
        let Some(completion) = self.completion() else { return Ok(Awaited::Nothing) };
        let arrival = match &self.state {
            State::Queue(peer, op) if op.direction == Direction::Recv => peer.transport.arrival(op.index()),
            _ => None,
        };
        Ok(Awaited::Completion(completion, arrival))
    }

    /// Releases what the message held, once it is known to be complete.
    pub(crate) fn finish(&self) {
        match &self.state {
            State::Queue(peer, op) => peer.finish(op),
            State::Rma(queue, _) => queue.recycle(),
            State::Fifo(peer, receive) if receive.posted().is_some() => _ = peer.recycle_fifo(),
            State::Fifo(..) | State::Channel(..) | State::Sent(_) | State::SentAfter(..) => {}
        }
    }

    /// The error of this request for what a queue says.
    pub(crate) fn failed(&self, cause: gdsync::Error) -> Error {
        let cause = without_rank(cause);
        let is_flushed = matches!(&cause, gdsync::Error::Completion(error) if error.is_flush());
        let cause = match cause {
            // It was flushed with the connection, which has the reason.
            gdsync::Error::Completion(error) if error.is_flush() => {
                let known = match self.beside() {
                    Some((qp, _)) => qp.check().err(),
                    None => self.transport().and_then(|transport| transport.check().err()),
                };
                known.unwrap_or(error.into())
            }
            other => other,
        };
        // It may have stopped answering before it was asked.
        let is_aborted = |transport: &Transport| transport.credits.is_aborted();
        let cause = match is_peer_lost(&cause) && self.transport().is_some_and(is_aborted) {
            true => aborted_by_peer(),
            false => cause,
        };
        // Not where it ended with the connection: then another message was at fault.
        let is_its_own = matches!(cause, gdsync::Error::Completion(_)) && !is_flushed;
        let (operation, (bytes, room)) = match &self.state {
            State::Queue(_, op) if is_its_own => (op.operation, op.lengths()),
            State::Queue(_, op) | State::Rma(_, op) | State::Channel(.., op) => (op.operation, (None, None)),
            State::Sent(_) | State::SentAfter(..) => ("send", (None, None)),
            State::Fifo(_, receive) => ("receive", receive.lengths()),
        };
        Error::Message { rank: self.rank, operation, cause, bytes, room }
    }

    #[inline]
    fn status(&self, bytes: usize) -> Status {
        Status { rank: self.rank, bytes, tag: 0 }
    }
}

/// The outcome of what a queue pair or a stream beside it does, for who asks for it.
fn outcome_beside(qp: &Qp, op: &InFlightOp) -> gdsync::Result<Option<usize>> {
    let outcome = op.outcome()?;
    if let (Done::Stream(ticket), None) = (&op.done, outcome) {
        qp.check()?;
        ticket.ask();
        return op.outcome();
    }
    Ok(outcome)
}
