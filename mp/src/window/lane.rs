//! The connections that operations of windows take: apart from those of messages, which they neither wait for nor hold up.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gdsync::cuda::Flush;
use gdsync::memory::Memory;
use gdsync::stream::Stream;
use gdsync::verbs::{Access, Mr, Qp, Sge};
use parking_lot::Mutex;

use crate::communicator::Communicator;
use crate::deadline::Deadline;
use crate::ends::Ends;
use crate::error::{Error, Result};
use crate::held::Held;
use crate::link::Link;
use crate::peer::{Piece, Way};
use crate::request::{Message, Order, Request};

/// The connection to one rank.
#[derive(Debug)]
pub(crate) struct Lane {
    /// That of the messages, which knows whether the rank is there.
    link: Arc<Link>,
    pub(crate) ends: Arc<Ends>,
    depth: usize,
    /// Whether an operation has failed.
    lost: AtomicBool,
    /// Whether a call has returned why the connection is broken.
    told: AtomicBool,
    held: Mutex<Held>,
}

impl Lane {
    /// Posts an operation on `bytes` bytes that takes `wrs` work requests, after recycling if the queue is full, and keeps
    /// its buffers registered until it is complete.
    // Always inline, as Window::begin.
    #[inline(always)]
    pub(super) fn start(
        self: &Arc<Self>,
        operation: &'static str,
        bytes: usize,
        (pieces, near): (&[Piece<'_>], bool),
        wrs: usize,
        mut post: impl FnMut(&Qp) -> gdsync::Result<u64>,
    ) -> Result<Request> {
        // Held in the order of the queue, so that the oldest are recycled before the queue forgets them.
        let mut held = self.held.lock();
        held.prefetch();
        let failed = |source| self.tell(operation, source);
        if held.places() + wrs > self.depth {
            self.make_room_for(&mut held, wrs).map_err(failed)?;
        }
        // A result that is only passed on is copied, and that waits for its parts to be written.
        let place = match post(&self.ends.send) {
            Ok(place) => place,
            Err(error) => self.again(&mut held, error, &mut || post(&self.ends.send)).map_err(failed)?,
        };
        let lane = || Some(Arc::downgrade(self));
        let make = |message| Order::new(&self.link, &self.ends, Way::Send, lane(), message);
        let places = u32::try_from(wrs).expect("a queue has fewer");
        let order = held.add(Message { operation, place, places, bytes }, pieces, near, make);
        Ok(Request::posted(order))
    }

    /// Posts once more if it failed for lack of room that can be made.
    #[cold]
    fn again(
        &self,
        held: &mut Held,
        error: gdsync::Error,
        post: &mut dyn FnMut() -> gdsync::Result<u64>,
    ) -> gdsync::Result<u64> {
        if !matches!(error, gdsync::Error::QueueFull { .. }) {
            return Err(error);
        }
        self.make_room(held);
        post()
    }

    #[cold]
    fn make_room_for(&self, held: &mut Held, wrs: usize) -> gdsync::Result<()> {
        self.make_room(held);
        let wrs = held.places() + wrs;
        if wrs <= self.depth {
            return Ok(());
        }
        self.ends.send.check()?;
        let (outstanding, depth) = (wrs as u64, self.depth as u64);
        Err(gdsync::Error::QueueFull {
            queue: "send queue",
            qpn: self.ends.send.qpn(),
            outstanding,
            depth,
            untaken: 0,
        })
    }

    /// Takes completions, and lets go of what is complete.
    fn make_room(&self, held: &mut Held) {
        self.ends.send.send_cq().drain();
        // Those of dropped batches, whose places in the queue nobody has taken since.
        held.drop_newest(|order| order.completion().is_taken_back());
        // Where one fails, so do all behind it.
        if held.newest().is_some_and(|last| last.outcome().is_err()) && self.ends.send.check().is_err() {
            self.lost.store(true, Ordering::Relaxed);
        }
        held.settle();
    }

    /// Takes completions, and lets buffers go.
    pub(crate) fn recycle(&self) {
        self.make_room(&mut self.held.lock());
    }

    /// Blocks until nothing is under way.
    pub(super) fn flush(&self, timeout: Duration) -> Result<()> {
        let flushed = self.ends.send.wait_all_sends(timeout);
        self.recycle();
        flushed.map_err(|source| self.tell("flush", source))
    }

    /// Holds a stream until nothing is under way that is now.
    pub(super) fn flush_on_stream(&self, stream: &Stream) -> Result<()> {
        let mut held = self.held.lock();
        self.make_room(&mut held);
        let flushed = match held.newest() {
            Some(last) => stream.wait(last.completion()),
            None => self.ends.send.check(),
        };
        flushed.map_err(|source| self.tell("flush on stream", source))
    }

    #[cold]
    fn tell(&self, operation: &'static str, source: gdsync::Error) -> Error {
        if self.ends.send.check().is_err() {
            self.told.store(true, Ordering::Relaxed);
        }
        Error::Message { rank: self.link.rank, operation, source }
    }

    /// Whether something failed, and nobody knows.
    fn has_to_tell(&self) -> bool {
        self.lost.load(Ordering::Relaxed) && !self.told.load(Ordering::Relaxed)
    }

    /// As [`Lane::flush`], but a failure that somebody knows of, or that nothing met with, is none.
    fn finish(&self, timeout: Duration) -> Result<()> {
        let flushed = self.ends.send.wait_all_sends(timeout);
        self.recycle();
        match flushed {
            Err(source) if self.has_to_tell() || matches!(source, gdsync::Error::Deadline { .. }) => {
                Err(self.tell("flush", source))
            }
            _ => Ok(()),
        }
    }

    /// Whether nothing will come of it any more, and there is nothing to tell.
    fn is_over(&self) -> bool {
        self.recycle();
        self.held.lock().is_empty() && !self.has_to_tell()
    }
}

/// The connections of a window, or of several.
#[derive(Debug)]
pub(crate) struct Lanes {
    pub(super) lanes: Vec<Arc<Lane>>,
    /// Through the device for ranks of the same host.
    pub(super) near: bool,
    /// Where the results go that nobody wants: a word for each rank.
    scratch: Mr,
    /// Whether a window is on a GPU that does not see what comes in by itself.
    flushes: AtomicBool,
}

impl Lanes {
    pub(super) fn new(comm: &Communicator, near: bool, ends: Vec<Ends>) -> Result<Arc<Self>> {
        let (_, pd) = comm.0.plane(near);
        let scratch = pd.register(&Memory::alloc(8 * ends.len())?, Access::LOCAL_WRITE)?;
        let depth = comm.0.builder.queue_depth();
        let lane = |(rank, ends): (usize, Ends)| {
            let ([lost, told], held) = ([false; 2].map(AtomicBool::new), Mutex::default());
            let link = comm.0.peers[rank].link.clone();
            let ends = Arc::new(ends);
            link.accompany(&ends);
            Arc::new(Lane { link, ends, depth, lost, told, held })
        };
        let lanes = ends.into_iter().enumerate().map(lane).collect();
        let lanes = Arc::new(Self { lanes, near, scratch, flushes: AtomicBool::new(false) });
        let mut all = comm.0.lanes.lock();
        Self::recycle(&mut all);
        all.push(lanes.clone());
        Ok(lanes)
    }

    /// A window over these connections is in this memory.
    pub(super) fn lead_to(&self, memory: &Memory) {
        if memory.gpu().is_some_and(|gpu| gpu.capabilities().flush != Flush::NotNeeded) {
            self.flushes.store(true, Ordering::Relaxed);
        }
    }

    /// Whether a stream must flush behind a wait for a signal.
    pub(super) fn flushes(&self) -> bool {
        self.flushes.load(Ordering::Relaxed)
    }

    pub(super) fn scratch(&self, rank: usize) -> gdsync::Result<Sge> {
        self.scratch.sge(8 * rank, 8)
    }

    /// Waits for all of `lanes`, also after one has failed; returns the first failure.
    pub(super) fn flush(&self, deadline: &Deadline) -> Result<()> {
        let flush = |lane: &Arc<Lane>| lane.flush(deadline.remaining());
        self.lanes.iter().map(flush).fold(Ok(()), Result::and)
    }

    /// Moves operations along, and gives up connections that nobody needs.
    pub(crate) fn recycle(all: &mut Vec<Arc<Self>>) {
        all.retain(|lanes| {
            lanes.lanes.iter().for_each(|lane| lane.recycle());
            !lanes.is_over()
        });
    }

    /// Whether no window has them any more, nor anybody else a use for them.
    fn is_over(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) == 1 && self.lanes.iter().all(|lane| lane.is_over())
    }
}

impl Communicator {
    /// Waits for the operations of all windows. Returns the first failure that nobody was told of.
    pub(crate) fn flush_lanes(&self, deadline: &Deadline) -> Result<()> {
        let all = self.0.lanes.lock().clone();
        let lanes = all.iter().flat_map(|lanes| &lanes.lanes);
        lanes.map(|lane| lane.finish(deadline.remaining())).fold(Ok(()), Result::and)
    }
}
