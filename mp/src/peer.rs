//! A rank, the messages under way to and from it, and which way each message takes: the FIFO or the queue pair.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread::yield_now;
use std::time::Duration;

use gdsync::stream::{Batch, PreparedSend};
use gdsync::verbs::{Completion, SendWr, Sge};
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::in_flight::{Direction, InFlight, InFlightOp, pin};
use crate::overlap::ReceiveClaims;
use crate::places::Places;
use crate::registration::{Piece, Registration};
use crate::shm_fifo::{FifoReceive, ShmFifo};
use crate::transport::{Companion, DRAIN, Transport, mark_only_once};
use crate::wait::Deadline;

/// How long the completion of a message that a stream has seen may take: then its rank is lost, or about to be.
const FOLLOWS: Duration = Duration::from_secs(5);

/// A rank, and the operations under way with it.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) transport: Transport,
    pub(crate) fifo: Option<ShmFifo>,
    /// By direction.
    in_flight: [Mutex<InFlight>; 2],
    pub(crate) tagged: TaggedCounts,
}

/// Tagged messages to a rank that were sent, and from it that a receive has taken: so finalize finds those that none takes.
#[derive(Debug, Default)]
pub(crate) struct TaggedCounts {
    pub(crate) sent: AtomicU64,
    pub(crate) received: AtomicU64,
}

/// The peers of connections beside those of a communicator, and the words that they write.
pub(crate) type Beside = (Arc<[Arc<Peer>]>, Registration);

/// What is under way with a rank that finalizes: bytes of sends that it has not received, bytes of messages in the FIFO without a
/// receive, whether a stream waits for it, and whether a batch or a capture that no stream has got yet holds work with it.
#[derive(Debug, Default)]
pub(crate) struct Unfinished {
    pub(crate) sends: Vec<usize>,
    pub(crate) unread: Vec<usize>,
    pub(crate) is_awaited: bool,
    pub(crate) has_unsubmitted: bool,
}

impl Unfinished {
    pub(crate) fn is_empty(&self) -> bool {
        self.sends.is_empty() && self.unread.is_empty() && !self.is_awaited && !self.has_unsubmitted
    }
}

/// A send that was started.
pub(crate) enum Sent {
    /// Through the FIFO: its length, and the send of the queue pair before it, if that is under way.
    Fifo(usize, Option<Arc<InFlightOp>>),
    Queue(Arc<InFlightOp>),
}

/// A receive that was started.
pub(crate) enum Received {
    Fifo(Arc<FifoReceive>),
    Queue(Arc<InFlightOp>),
}

const RECEIVE_ON_STREAM: &str = "receive on stream";

/// Pieces as the device addresses them: mostly one.
type Sges = SmallVec<[Sge; 2]>;

/// Pieces that take an SGE: empty ones do not.
fn count(pieces: &[Piece<'_>]) -> usize {
    pieces.iter().filter(|(_, range)| !range.is_empty()).count()
}

/// Lets a message of the FIFO into its receive when a stream gets there. Dropping it takes the receive back.
struct Gate {
    peer: Arc<Peer>,
    receive: Arc<FifoReceive>,
}

impl Gate {
    fn open(self) {
        let Peer { fifo, transport, .. } = &*self.peer;
        fifo.iter().for_each(|fifo| fifo.let_in(transport, &self.receive));
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        let Peer { fifo, transport, .. } = &*self.peer;
        fifo.iter().for_each(|fifo| fifo.take_back(transport, &self.receive));
    }
}

/// A message that is sent.
fn sent<'a, 'b>(pieces: &'a [Piece<'b>], sges: &'a [Sge]) -> (&'a [Piece<'b>], &'a [Sge], ReceiveClaims) {
    (pieces, sges, ReceiveClaims::new())
}

/// The connection of collectives to the same rank.
impl Companion for Peer {
    fn end(&self, error: &gdsync::Error) {
        self.transport.fail(error);
    }

    fn is_awaited(&self) -> bool {
        self.transport.qp.is_awaited()
    }

    fn has_unsubmitted(&self) -> bool {
        self.transport.qp.has_unsubmitted()
    }
}

impl Peer {
    pub(crate) fn new(transport: Transport) -> Self {
        let fifo = transport.fifo.clone().map(ShmFifo::new);
        Self { transport, fifo, in_flight: Default::default(), tagged: TaggedCounts::default() }
    }

    pub(crate) fn rank(&self) -> usize {
        self.transport.rank
    }

    fn failed(&self, operation: &'static str, cause: gdsync::Error) -> Error {
        Error::message(self.rank(), operation, cause)
    }

    /// The pieces of a message, which are not too many and lie inside their buffers.
    pub(crate) fn sges(&self, operation: &'static str, pieces: &[Piece<'_>]) -> Result<Sges> {
        if count(pieces) > self.transport.max_pieces {
            let cause = gdsync::Error::InvalidArgument {
                what: "number of pieces",
                value: count(pieces).to_string(),
                expected: "at most CommunicatorBuilder::max_pieces, which may be raised",
            };
            return Err(self.failed(operation, cause));
        }
        let mut sges = Sges::new();
        for (buffer, range) in pieces {
            let sge = buffer.check_domain(self.transport.domain);
            let sge = sge.and_then(|()| buffer.sge(self.transport.intra_host, range));
            sges.push(sge.map_err(|cause| self.failed(operation, cause))?);
        }
        Ok(sges)
    }

    /// Posts an operation to a queue with `post`, after making room if the queue is full, and pins its buffers until it is complete.
    fn post_locked<T>(
        &self,
        in_flight: &mut InFlight,
        direction: Direction,
        operation: &'static str,
        (pieces, sges, claims): (&[Piece<'_>], &[Sge], ReceiveClaims),
        mut post: impl FnMut(&Self, &[Sge]) -> gdsync::Result<(Completion, T)>,
    ) -> Result<(Arc<InFlightOp>, T)> {
        let failed = |cause| self.failed(operation, cause);
        let depth = self.transport.depth;
        if self.under_way(direction, in_flight) >= depth {
            self.make_room(direction, in_flight).map_err(failed)?;
        }
        let posted = post(self, sges).or_else(|error| match error {
            gdsync::Error::QueueFull { .. } if self.under_way(direction, in_flight) < depth => {
                self.make_room(direction, in_flight)?;
                post(self, sges)
            }
            other => Err(other),
        });
        let (completion, other) = posted.map_err(failed)?;
        let bytes = sges.iter().map(|sge| sge.len as usize).sum();
        let op = InFlightOp::new(direction, operation, completion, 1, bytes);
        in_flight.push(op.clone(), pin(pieces, self.transport.intra_host, claims));
        Ok((op, other))
    }

    /// Removes complete operations, to make room for one more message.
    #[cold]
    fn make_room(&self, direction: Direction, in_flight: &mut InFlight) -> gdsync::Result<()> {
        self.drain();
        in_flight.drop_taken_back();
        in_flight.retire();
        self.fifo.iter().for_each(|fifo| _ = fifo.recycle(&self.transport));
        match self.under_way(direction, in_flight) {
            outstanding if outstanding < self.transport.depth => Ok(()),
            outstanding => self.transport.refuse_full(direction, outstanding),
        }
    }

    /// Messages of one direction that are under way, those of the queue included.
    fn under_way(&self, direction: Direction, in_flight: &InFlight) -> usize {
        let fifo = self.fifo.as_ref().filter(|_| direction == Direction::Recv);
        in_flight.wqes() + fifo.map_or(0, ShmFifo::under_way)
    }

    /// Takes completions, so that the queues have room again.
    fn drain(&self) {
        [Direction::Send, Direction::Recv]
            .into_iter()
            .for_each(|direction| self.transport.cq(direction).drain());
    }

    /// Refuses unless `count` more messages can be started.
    ///
    /// # Errors
    /// [`Error::Message`], with [`gdsync::Error::QueueFull`] or what ended the connection.
    pub(crate) fn check_room(
        &self,
        direction: Direction,
        count: usize,
        operation: &'static str,
    ) -> Result<()> {
        self.recycle();
        let under_way = self.under_way(direction, &self.in_flight[direction as usize].lock());
        let depth = self.transport.depth;
        if under_way + count <= depth {
            return Ok(());
        }
        self.transport.refuse_full(direction, under_way).map_err(|cause| self.failed(operation, cause))
    }

    /// Sends a message by the CPU.
    pub(crate) fn send(&self, pieces: &[Piece<'_>]) -> Result<Sent> {
        const SEND: &str = "send";
        let sges = self.sges(SEND, pieces)?;
        if let Some(fifo) = &self.fifo
            && !self.transport.has_ended()
        {
            if let Some((bytes, after)) = fifo.send(pieces) {
                return Ok(Sent::Fifo(bytes, after));
            }
            self.transport.fail_if_refused();
        }
        let post = |peer: &Self, sges: &[Sge]| {
            let send = || peer.transport.send(sges);
            let completion = match &peer.fifo {
                None => send()?,
                Some(fifo) => fifo.send_by_queue(Some(pieces), || {
                    let completion = send()?;
                    let number = peer.transport.message_number(completion.index());
                    Ok((completion, Some(number)))
                })?,
            };
            Ok((completion, ()))
        };
        Ok(Sent::Queue(self.send_with(SEND, (pieces, &sges), post)?.0))
    }

    /// Starts a message that takes the queue pair, with `post`.
    pub(crate) fn send_with<T>(
        &self,
        operation: &'static str,
        (pieces, sges): (&[Piece<'_>], &[Sge]),
        post: impl FnMut(&Self, &[Sge]) -> gdsync::Result<(Completion, T)>,
    ) -> Result<(Arc<InFlightOp>, T)> {
        let mut in_flight = self.in_flight[Direction::Send as usize].lock();
        let (op, other) =
            self.post_locked(&mut in_flight, Direction::Send, operation, sent(pieces, sges), post)?;
        // The lock keeps other threads from sending the next message before.
        self.fifo.iter().for_each(|fifo| fifo.set_last(&op));
        Ok((op, other))
    }

    /// Prepares a send that a stream starts.
    pub(crate) fn prepare_send(&self, sges: &[Sge]) -> gdsync::Result<PreparedSend> {
        match &self.fifo {
            Some(fifo) => fifo.send_by_queue(None, || Ok((self.transport.prepare_send(sges)?, None))),
            None => self.transport.prepare_send(sges),
        }
    }

    /// Adds a send to a batch.
    pub(crate) fn send_in_batch(
        &self,
        batch: &mut Batch,
        pieces: &[Piece<'_>],
        sges: &[Sge],
    ) -> gdsync::Result<Completion> {
        let payload = self.transport.payload(pieces)?;
        Ok(self.transport.send_in_batch(batch, self.prepare_send(sges)?, payload.as_ref()))
    }

    /// Starts to read from memory of the rank into a piece, or to write a piece there, by the queue of the messages.
    pub(crate) fn one_sided(
        &self,
        operation: &'static str,
        piece: Piece<'_>,
        wr: impl for<'a> Fn(&'a [Sge]) -> SendWr<'a>,
    ) -> Result<Arc<InFlightOp>> {
        let pieces = &[piece];
        let sges = self.sges(operation, pieces)?;
        let post = |peer: &Self, sges: &[Sge]| Ok((peer.transport.post_one_sided(wr(sges))?, ()));
        let mut in_flight = self.in_flight[Direction::Send as usize].lock();
        Ok(self.post_locked(&mut in_flight, Direction::Send, operation, sent(pieces, &sges), post)?.0)
    }

    /// Starts a receive: in the FIFO if its message comes there, or else in the queue pair. `claim` claims its memory.
    pub(crate) fn receive(
        &self,
        pieces: &[Piece<'_>],
        claim: impl FnOnce() -> Result<ReceiveClaims>,
    ) -> Result<Received> {
        const RECEIVE: &str = "receive";
        let sges = self.sges(RECEIVE, pieces)?;
        let mut claims = claim()?;
        let failed = |cause| self.failed(RECEIVE, cause);
        let transport = &self.transport;
        let mut by_fifo = |fifo: &ShmFifo| fifo.receive(transport, pieces, &mut claims).map_err(failed);
        if let Some(fifo) = &self.fifo
            && let Some(receive) = by_fifo(fifo)?
        {
            return Ok(Received::Fifo(receive));
        }
        // The lock keeps other threads from opening the FIFO and from posting receives.
        let mut in_flight = self.in_flight[Direction::Recv as usize].lock();
        if let Some(fifo) = &self.fifo {
            fifo.maybe_open(transport, pieces, || {
                in_flight.retire();
                in_flight.ops().cloned().collect()
            });
            if let Some(receive) = by_fifo(fifo)? {
                return Ok(Received::Fifo(receive));
            }
        }
        let place = transport.place(pieces).map_err(failed)?;
        let post = |peer: &Self, sges: &[Sge]| Ok((peer.transport.receive(sges, place)?, ()));
        let message = (pieces, &sges[..], claims);
        let posted = self.post_locked(&mut in_flight, Direction::Recv, RECEIVE, message, post);
        // A stream that has receives to post does not let the FIFO open.
        let refused = posted.as_ref().err().and(self.fifo.as_ref());
        refused.into_iter().for_each(ShmFifo::count_again);
        let (op, ()) = posted?;
        Ok(Received::Queue(op))
    }

    /// Adds a receive to a batch: it is active when the stream gets there.
    pub(crate) fn receive_in_batch(
        self: &Arc<Self>,
        batch: &mut Batch,
        pieces: &[Piece<'_>],
    ) -> Result<Received> {
        let sges = self.sges(RECEIVE_ON_STREAM, pieces)?;
        // The lock keeps other threads from opening the FIFO and from posting receives.
        let mut in_flight = self.in_flight[Direction::Recv as usize].lock();
        in_flight.drop_taken_back();
        if let Some(fifo) = &self.fifo
            && let Some(receive) = fifo
                .receive_in_order(&self.transport, pieces)
                .map_err(|cause| self.failed(RECEIVE_ON_STREAM, cause))?
        {
            // Its message is in the FIFO already: the stream lets it into the buffer.
            let gate = Gate { peer: self.clone(), receive: receive.clone() };
            mark_only_once(batch);
            batch.report(&self.transport.qp.recv);
            batch.host_fn(move || gate.open());
            return Ok(Received::Fifo(receive));
        }
        let place = self.transport.place(pieces).map_err(|cause| self.failed(RECEIVE_ON_STREAM, cause))?;
        let post = |peer: &Self, sges: &[Sge]| Ok((peer.transport.receive_in_batch(batch, sges, place)?, ()));
        let message = (pieces, &sges[..], ReceiveClaims::new());
        let (op, ()) = self.post_locked(&mut in_flight, Direction::Recv, RECEIVE_ON_STREAM, message, post)?;
        Ok(Received::Queue(op))
    }

    /// Somebody has seen that a message is complete: removes it and those before it, and takes completions now and then.
    pub(crate) fn finish(&self, op: &InFlightOp) {
        if op.direction == Direction::Recv {
            self.transport.credits.arrived(op.index());
        }
        self.in_flight[op.direction as usize].lock().retire_until(op);
        if op.index().is_multiple_of(DRAIN) {
            self.transport.cq(op.direction).drain();
        }
    }

    /// Takes messages out of the FIFO. Returns whether receives wait for more.
    pub(crate) fn take(&self) -> bool {
        self.fifo.as_ref().is_some_and(|fifo| fifo.take(&self.transport, true))
    }

    /// As [`Peer::take`], and drops finished receives. Returns whether receives are under way in the FIFO.
    pub(crate) fn recycle_fifo(&self) -> bool {
        self.fifo.as_ref().is_some_and(|fifo| fifo.recycle(&self.transport))
    }

    /// Announces receives, and takes messages, for the watchdog. Returns whether it must poll.
    pub(crate) fn watch(&self) -> bool {
        self.transport.credits.catch_up();
        self.transport.places.iter().for_each(Places::look);
        self.fifo.as_ref().is_some_and(|fifo| fifo.watch(&self.transport))
    }

    /// What is under way, but for receives of the CPU: nothing once the connection has ended.
    pub(crate) fn unfinished(&self) -> Unfinished {
        if self.transport.has_ended() {
            return Unfinished::default();
        }
        let [sends, receives] = self.in_flight.each_ref().map(|in_flight| {
            let mut in_flight = in_flight.lock();
            in_flight.drop_taken_back();
            in_flight.retire();
            let mut ops = in_flight.ops().cloned().collect::<Vec<_>>();
            // Queues complete in order: those before a complete one were taken back.
            let over = ops.iter().rposition(|op| !matches!(op.outcome(), Ok(None)));
            ops.drain(..over.map_or(0, |last| last + 1));
            ops
        });
        let is_by_stream = receives.iter().any(|op| op.operation == RECEIVE_ON_STREAM);
        let companions = self.transport.companions();
        let is_awaited = is_by_stream
            || self.transport.qp.is_awaited()
            || companions.iter().any(|companion| companion.is_awaited());
        let has_unsubmitted = self.transport.qp.has_unsubmitted()
            || companions.iter().any(|companion| companion.has_unsubmitted());
        let unread = self.fifo.as_ref().map(ShmFifo::unread).unwrap_or_default();
        let sends = sends.iter().map(|op| op.bytes()).collect();
        Unfinished { sends, unread, is_awaited, has_unsubmitted }
    }

    /// Whether messages are under way, as far as anybody has looked.
    pub(crate) fn is_awaited(&self) -> bool {
        self.in_flight.iter().any(|in_flight| !in_flight.lock().is_empty()) || self.recycle_fifo()
    }

    /// Why a stream of this rank has ended the connection: it had waited too long for the rank.
    pub(crate) fn given_up_by_stream(&self) -> Option<gdsync::Error> {
        let error = self.transport.check().err()?;
        let gdsync::Error::QpStopped { reason, .. } = error else { return None };
        matches!(*reason, gdsync::Error::StreamWait { .. }).then(|| Arc::unwrap_or_clone(reason))
    }

    /// Bytes of a message that a stream has seen, or whose payload it has put into the receive: the completion follows.
    pub(crate) fn seen(&self, op: &InFlightOp) -> Option<usize> {
        self.transport.places()?;
        op.completion().filter(|completion| completion.is_passed())?;
        if op.direction == Direction::Send {
            return Some(op.bytes());
        }
        let (word, number) = self.transport.arrival(op.index())?;
        let word = word.load();
        // The peer wrote it.
        let len = usize::try_from(word & u64::from(u32::MAX)).ok()?.min(op.bytes());
        (word >> 32 == u64::from(number)).then_some(len)
    }

    /// As [`Peer::recycle`], and waits for the completions of receives whose messages streams have seen.
    #[cold]
    pub(crate) fn settle(&self) {
        self.recycle();
        let ops: Vec<_> = self.in_flight[Direction::Recv as usize].lock().ops().cloned().collect();
        let deadline = Deadline::after(FOLLOWS);
        for op in ops.iter().filter(|op| self.seen(op).is_some()) {
            while matches!(op.outcome(), Ok(None)) && !deadline.is_over() {
                yield_now();
                self.recycle();
            }
        }
        // The last one has ended, perhaps with the connection.
        self.recycle();
    }

    /// Takes completions, releases buffers, and asks a silent rank whether it is alive if anything is under way.
    pub(crate) fn recycle(&self) {
        self.drain();
        let mut is_awaited = false;
        for in_flight in &self.in_flight {
            let mut in_flight = in_flight.lock();
            in_flight.drop_taken_back();
            in_flight.retire();
            is_awaited |= !in_flight.is_empty();
        }
        is_awaited |= self.recycle_fifo();
        if is_awaited
            || self.transport.companions().iter().any(|companion| companion.is_awaited())
            || self.transport.check().is_err()
        {
            self.transport.tend();
        }
    }
}
