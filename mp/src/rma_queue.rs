//! The queue pairs of windows: one to each rank, beside those of messages, which they neither wait for nor hold up.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use gdsync::cuda::Flush;
use gdsync::memory::Memory;
use gdsync::stream::{Replenish, Stream, StreamOrder};
use gdsync::verbs::{Access, Mr, Pd, Qp, Sge};
use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::in_flight::{Direction, Done, InFlight, InFlightOp, pin};
use crate::overlap::ReceiveClaims;
use crate::peer::Peer;
use crate::registration::Piece;
use crate::transport::{Companion, QpPair};
use crate::wait::Deadline;

/// The queue pair to one rank, and its operations under way.
#[derive(Debug)]
pub(crate) struct RmaQueue {
    /// Its transport knows whether the rank is alive.
    pub(crate) peer: Arc<Peer>,
    pub(crate) qp: Arc<QpPair>,
    depth: usize,
    /// Whether an operation has failed.
    has_failed: AtomicBool,
    /// Whether a call has returned why the connection is broken.
    is_reported: AtomicBool,
    in_flight: Mutex<InFlight>,
    /// What streams copy beside the queue pair, and what they post to it where they do.
    pub(crate) order: StreamOrder,
    /// The last operation of the CPU.
    last_of_cpu: Mutex<Option<Arc<InFlightOp>>>,
    /// A stream was to copy since somebody has looked whether the rank is alive. No queue would notice.
    has_copied: AtomicBool,
    /// What streams have started: [`FRESH`], [`BY_QUEUE`] or [`BY_COPIES`].
    streams: AtomicU8,
}

/// No stream has started an operation.
const FRESH: u8 = 0;
/// Streams have, through the queue pair alone: no peer copies any more, which might overtake them.
const BY_QUEUE: u8 = 1;
/// Streams access memory of the rank by peer copies. What they start through the queue pair they wait for, so that nothing overtakes it.
const BY_COPIES: u8 = 2;

/// Launches of graphs with copies.
impl Replenish for RmaQueue {
    fn replenish(&self) -> gdsync::Result<()> {
        let rank = u32::try_from(self.peer.rank()).unwrap_or(u32::MAX);
        self.check_copies().map_err(|error| gdsync::Error::Rank { rank, reason: Arc::new(error) })
    }
}

impl Companion for RmaQueue {
    fn end(&self, error: &gdsync::Error) {
        self.qp.end(error);
    }

    fn is_awaited(&self) -> bool {
        self.qp.is_awaited()
    }

    fn has_unsubmitted(&self) -> bool {
        self.qp.has_unsubmitted() || !self.qp.send.is_broken() && self.order.has_unsubmitted()
    }
}

impl RmaQueue {
    /// Lets streams use peer copies from now on, unless they have started operations without.
    pub(crate) fn allow_copies(&self) {
        _ = self.streams.compare_exchange(FRESH, BY_COPIES, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Whether streams use peer copies.
    pub(crate) fn has_copies(&self) -> bool {
        self.streams.load(Ordering::Relaxed) == BY_COPIES
    }

    /// Whether a stream that starts an operation now shares the rank's memory with peer copies; without them there will be none.
    pub(crate) fn starts_beside_copies(&self) -> bool {
        let before = self.streams.compare_exchange(FRESH, BY_QUEUE, Ordering::Relaxed, Ordering::Relaxed);
        before == Err(BY_COPIES)
    }

    /// Posts an operation on `bytes` bytes that takes `wqes` work requests, after making room if the queue is full, and pins its
    /// buffers until it is complete.
    pub(crate) fn post(
        &self,
        operation: &'static str,
        bytes: usize,
        (pieces, intra_host): (&[Piece<'_>], bool),
        wqes: usize,
        by_cpu: bool,
        mut post: impl FnMut(&Qp) -> gdsync::Result<Done>,
    ) -> Result<Arc<InFlightOp>> {
        let mut in_flight = self.in_flight.lock();
        let failed = |cause| self.report(operation, cause);
        if in_flight.wqes() + wqes > self.depth {
            self.make_room_for(&mut in_flight, wqes).map_err(failed)?;
        }
        if in_flight.len() >= self.depth {
            in_flight.retire();
        }
        if by_cpu && self.has_copies() {
            self.qp.send.check().and_then(|()| self.order.check_idle()).map_err(failed)?;
        }
        if wqes == 0 {
            self.check_copies().map_err(failed)?;
        }
        let posted = post(&self.qp.send).or_else(|error| match error {
            gdsync::Error::QueueFull { .. } => {
                self.make_room(&mut in_flight);
                post(&self.qp.send)
            }
            other => Err(other),
        });
        let op = InFlightOp::new(Direction::Send, operation, posted.map_err(failed)?, wqes, bytes);
        in_flight.push(op.clone(), pin(pieces, intra_host, ReceiveClaims::new()));
        if by_cpu {
            *self.last_of_cpu.lock() = Some(op.clone());
        }
        Ok(op)
    }

    /// Refuses copies of streams while the CPU's operations are under way, or the rank is lost.
    fn check_copies(&self) -> gdsync::Result<()> {
        self.qp.send.check()?;
        self.has_copied.store(true, Ordering::Relaxed);
        let mut last = self.last_of_cpu.lock();
        let is_under_way = |last: &Arc<InFlightOp>| {
            if matches!(last.outcome(), Ok(None)) {
                self.qp.send.send_cq().drain();
            }
            matches!(last.outcome(), Ok(None))
        };
        if last.as_ref().is_some_and(is_under_way) {
            let (qpn, owner) = (self.qp.send.qpn(), "the CPU".to_owned());
            return Err(gdsync::Error::Busy { queue: "send", qpn, owner });
        }
        *last = None;
        Ok(())
    }

    #[cold]
    fn make_room_for(&self, in_flight: &mut InFlight, wqes: usize) -> gdsync::Result<()> {
        self.make_room(in_flight);
        if in_flight.wqes() + wqes <= self.depth {
            return Ok(());
        }
        self.qp.send.check()?;
        if wqes > self.depth {
            let expected = "at most CommunicatorBuilder::depth";
            return Err(gdsync::Error::invalid("work requests of the operation", wqes, expected));
        }
        let (outstanding, depth) = (in_flight.wqes() as u64, self.depth as u64);
        let (queue, qpn) = ("send queue", self.qp.send.qpn());
        Err(gdsync::Error::QueueFull { queue, qpn, outstanding, depth, untaken: 0 })
    }

    /// Takes completions, and removes complete operations.
    fn make_room(&self, in_flight: &mut InFlight) {
        self.qp.send.send_cq().drain();
        // Operations of dropped batches, if no later one has taken their place.
        in_flight.drop_taken_back();
        // Where one fails, so do all behind it.
        if in_flight.newest().is_some_and(|last| last.outcome().is_err()) && self.qp.send.check().is_err() {
            self.has_failed.store(true, Ordering::Relaxed);
        }
        in_flight.retire();
    }

    /// Takes completions, and releases buffers.
    pub(crate) fn recycle(&self) {
        self.make_room(&mut self.in_flight.lock());
        if self.has_copied.swap(false, Ordering::Relaxed) {
            self.peer.transport.tend();
        }
    }

    /// Waits for the queue, and for streams that copy.
    fn wait_all(&self, timeout: Duration) -> gdsync::Result<()> {
        let deadline = Deadline::after(timeout);
        let sent = self.qp.send.wait_all_sends(timeout);
        let copied = self.order.wait_idle(deadline.remaining());
        if copied.as_ref().is_err_and(|error| !matches!(error, gdsync::Error::Deadline { .. })) {
            self.has_failed.store(true, Ordering::Relaxed);
        }
        sent.map(drop).and(copied)
    }

    /// Blocks until nothing is under way.
    pub(crate) fn flush(&self, timeout: Duration) -> Result<()> {
        let flushed = self.wait_all(timeout);
        self.recycle();
        flushed.map_err(|cause| self.report("flush", cause))
    }

    /// Holds a stream until nothing is under way that is now.
    pub(crate) fn flush_on_stream(&self, stream: &Stream) -> Result<()> {
        let mut in_flight = self.in_flight.lock();
        self.make_room(&mut in_flight);
        let last = in_flight.ops().filter_map(|op| op.completion()).last();
        let flushed = match last {
            Some(last) => stream.wait(last),
            None => self.qp.send.check(),
        };
        let flushed = flushed.and_then(|()| self.order.check_for(stream));
        flushed.map_err(|cause| self.report("flush on stream", cause))
    }

    #[cold]
    fn report(&self, operation: &'static str, cause: gdsync::Error) -> Error {
        if self.qp.send.check().is_err() || self.has_failed.load(Ordering::Relaxed) {
            self.is_reported.store(true, Ordering::Relaxed);
        }
        Error::message(self.peer.rank(), operation, cause)
    }

    /// Whether something failed, and no call has said so.
    fn has_to_report(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed) && !self.is_reported.load(Ordering::Relaxed)
    }

    /// As [`RmaQueue::flush`], without failures that were reported, or that no operation met with.
    fn finish(&self, timeout: Duration) -> Result<()> {
        let flushed = self.wait_all(timeout);
        self.recycle();
        match flushed {
            Err(cause) if self.has_to_report() || matches!(cause, gdsync::Error::Deadline { .. }) => {
                Err(self.report("flush", cause))
            }
            _ => Ok(()),
        }
    }

    /// Whether nothing is under way, and nothing is to be reported.
    fn is_over(&self) -> bool {
        self.recycle();
        let is_busy = self.order.is_busy() || self.order.has_unsubmitted();
        self.in_flight.lock().is_empty() && !is_busy && !self.has_to_report()
    }
}

/// The queue pairs of all windows of a communicator, also those of dropped windows while anything is under way in them.
pub(crate) type AllRmaQueues = Arc<Mutex<Vec<Arc<RmaQueues>>>>;

/// The queue pairs of a window, or of several.
#[derive(Debug)]
pub(crate) struct RmaQueues {
    pub(crate) queues: Vec<Arc<RmaQueue>>,
    /// They go through the device for ranks of the same host.
    pub(crate) intra_host: bool,
    /// Unused results: a word for each rank.
    scratch: Mr,
    /// Whether a window is on a GPU that needs a flush to see what comes in.
    needs_flush: AtomicBool,
}

impl RmaQueues {
    /// Over connected queue pairs to these peers, in the protection domain of the device.
    pub(crate) fn new(
        peers: &[Arc<Peer>],
        (intra_host, pd): (bool, &Pd),
        depth: usize,
        pairs: Vec<QpPair>,
        all: &AllRmaQueues,
    ) -> Result<Arc<Self>> {
        let scratch = pd.register(&Memory::alloc(8 * pairs.len())?, Access::LOCAL_WRITE)?;
        let queue = |(peer, qp): (&Arc<Peer>, QpPair)| {
            let ([has_failed, is_reported, has_copied], in_flight, last_of_cpu) = Default::default();
            let streams = AtomicU8::new(FRESH);
            let (peer, qp) = (peer.clone(), Arc::new(qp));
            let order = StreamOrder::new(&qp.send);
            let queue = Arc::new(RmaQueue {
                peer,
                qp,
                depth,
                has_failed,
                is_reported,
                in_flight,
                order,
                last_of_cpu,
                has_copied,
                streams,
            });
            queue.peer.transport.accompany(&queue);
            queue
        };
        let queues = peers.iter().zip(pairs).map(queue).collect();
        let queues = Arc::new(Self { queues, intra_host, scratch, needs_flush: AtomicBool::new(false) });
        let mut all = all.lock();
        Self::recycle(&mut all);
        all.push(queues.clone());
        Ok(queues)
    }

    /// A window over these queue pairs is in this memory.
    pub(crate) fn lead_to(&self, memory: &Memory) {
        if memory.gpu().is_some_and(|gpu| gpu.capabilities().flush != Flush::NotNeeded) {
            self.needs_flush.store(true, Ordering::Relaxed);
        }
    }

    /// Whether a stream must flush after a wait for a signal.
    pub(crate) fn needs_flush(&self) -> bool {
        self.needs_flush.load(Ordering::Relaxed)
    }

    pub(crate) fn scratch(&self, rank: usize) -> gdsync::Result<Sge> {
        self.scratch.sge(8 * rank, 8)
    }

    /// Waits for all, also after one has failed; returns the first failure.
    pub(crate) fn flush(&self, deadline: &Deadline) -> Result<()> {
        self.queues.iter().map(|queue| queue.flush(deadline.remaining())).fold(Ok(()), Result::and)
    }

    /// Waits for the operations of all windows. Returns the first failure that was not reported.
    pub(crate) fn finish_all(all: &AllRmaQueues, deadline: &Deadline) -> Result<()> {
        let all = all.lock().clone();
        let queues = all.iter().flat_map(|queues| &queues.queues);
        queues.map(|queue| queue.finish(deadline.remaining())).fold(Ok(()), Result::and)
    }

    /// Moves operations along, and drops queue pairs that no window has any more.
    pub(crate) fn recycle(all: &mut Vec<Arc<Self>>) {
        all.retain(|queues| {
            queues.queues.iter().for_each(|queue| queue.recycle());
            !queues.is_over()
        });
    }

    fn is_over(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) == 1 && self.queues.iter().all(|queue| queue.is_over())
    }
}
