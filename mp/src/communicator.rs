//! Communicators: ranks that can send messages to each other.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use gdsync::memory::Memory;
use gdsync::verbs::{Access, Context, Mr, Pd, RecvWr, Sge};
use parking_lot::Mutex;

use crate::bootstrap::Exchange;
use crate::builder::Builder;
use crate::cache::Cache;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::link::Link;
use crate::path::{self, Path, Plane};
use crate::peer::{Peer, Piece, Way};
use crate::request::{Part, Request, Status};
use crate::spawn::{Children, explain};
use crate::watch::{Alarm, Watch};
use crate::window::Lanes;

/// Ranks that can send messages to each other. Clones share it; any thread may use it.
#[derive(Clone, Debug)]
pub struct Communicator(pub(crate) Arc<Inner>);

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) rank: usize,
    pub(crate) context: Context,
    pub(crate) pd: Pd,
    /// The device for ranks of the same host, if messages with any go through it.
    pub(crate) near: Option<Plane>,
    pub(crate) paths: Vec<Path>,
    pub(crate) cache: Cache,
    pub(crate) alarm: Arc<Alarm>,
    /// Ends before the words go that the peers write.
    pub(crate) _watch: Option<Watch>,
    pub(crate) peers: Arc<[Peer]>,
    /// The words that the peers write.
    pub(crate) _credits: Registration,
    pub(crate) bootstrap: Mutex<Box<dyn Exchange>>,
    pub(crate) children: Mutex<Option<Children>>,
    /// As it was built.
    pub(crate) builder: Builder,
    /// The connections of windows, also of dropped ones while something of them is under way.
    pub(crate) lanes: Arc<Mutex<Vec<Arc<Lanes>>>>,
}

impl Inner {
    /// Whether all ranks are reached through the device for ranks of the same host. All ranks come to the same answer: each
    /// that is not has another that it is not reached by.
    pub(crate) fn is_all_near(&self) -> bool {
        self.near.is_some() && self.paths.iter().all(Path::is_near)
    }

    /// The device for ranks of the same host, or the other one, and the domain there.
    pub(crate) fn plane(&self, near: bool) -> (&Context, &Pd) {
        match &self.near {
            Some(plane) if near => (&plane.context, &plane.pd),
            _ => (&self.context, &self.pd),
        }
    }

    /// Registers memory with all devices that messages go through.
    pub(crate) fn register(&self, memory: &Memory, access: Access) -> gdsync::Result<Registration> {
        path::register(&self.pd, self.near.as_ref(), memory, access)
    }
}

/// Memory that messages can be sent from and received into. Clones share it.
#[derive(Clone, Debug)]
pub struct Registration(
    pub(crate) Mr,
    /// With the device for ranks of the same host, if there is one.
    pub(crate) Option<Mr>,
);

impl Registration {
    /// A part of the memory, which is registered as long as this is. Ranges count from its start.
    ///
    /// # Errors
    /// [`gdsync::Error::OutOfBounds`] when the part does not lie inside.
    pub fn part(&self, offset: usize, len: usize) -> gdsync::Result<Self> {
        let near = self.1.as_ref().map(|near| near.slice(offset, len)).transpose()?;
        Ok(Self(self.0.slice(offset, len)?, near))
    }

    /// Whether nothing else keeps the memory registered.
    pub(crate) fn is_only(&self) -> bool {
        self.0.is_only() && self.1.as_ref().is_none_or(Mr::is_only)
    }

    /// The registration with the device for ranks of the same host, or with the other one.
    #[inline]
    pub(crate) fn on(&self, near: bool) -> &Mr {
        self.1.as_ref().filter(|_| near).unwrap_or(&self.0)
    }

    /// A range of it, for one of the devices.
    // Always inline: a result in memory is read back before it is there.
    #[inline(always)]
    pub(crate) fn sge(&self, near: bool, range: &Range<usize>) -> Result<Sge> {
        let bytes = range.end.checked_sub(range.start).ok_or_else(|| ends_early(range))?;
        Ok(self.on(near).sge(range.start, bytes)?)
    }

    /// The memory.
    pub fn memory(&self) -> &Memory {
        self.0.memory()
    }
}

#[cold]
pub(crate) fn ends_early(range: &Range<usize>) -> gdsync::Error {
    let (value, expected) = (format!("{range:?}"), "one that does not end before it starts");
    gdsync::Error::InvalidArgument { what: "the range of the buffer", value, expected }
}

impl Communicator {
    /// Joins the job of the launcher that started this process.
    ///
    /// # Errors
    /// As [`Builder::init`].
    pub fn init() -> Result<Self> {
        Self::builder().init()
    }

    /// Starts to build a communicator.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The rank of this process, from 0.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.0.peers.len()
    }

    /// The device messages travel through; those between ranks of the same host may have another one: see
    /// [`Communicator::path`].
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// What the messages with a rank go through, and why.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`].
    pub fn path(&self, rank: usize) -> Result<&Path> {
        self.0.paths.get(rank).ok_or_else(|| Error::NoSuchRank { rank, size: self.size() })
    }

    /// Messages so far that took the way of short ones to and from a rank, through slots of shared memory: sent, and received.
    /// Both are 0 for a rank that has none: see [`Path::has_slots`].
    ///
    /// # Errors
    /// [`Error::NoSuchRank`].
    pub fn through_slots(&self, rank: usize) -> Result<(u64, u64)> {
        let slots = self.peer(rank)?.link.slots.as_ref();
        Ok(slots.map_or((0, 0), |slots| (slots.sent_count(), slots.received())))
    }

    /// The device that messages with a rank travel through.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`].
    pub fn device(&self, rank: usize) -> Result<&Context> {
        Ok(self.0.plane(self.path(rank)?.is_near()).0)
    }

    /// Registers memory for messages. GPU memory that the device does not reach may be staged in host memory: see
    /// [`Communicator::path_of`] and [`GpuPath`](crate::GpuPath).
    ///
    /// It stays registered until the last clone and the last message of it are gone; a message that nobody has waited for is gone
    /// after [`Communicator::progress`], or with [`Builder::watch`] after a quarter of a second. So it is after receives of up to
    /// 4 KiB from a rank of this host also where somebody has.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn register(&self, memory: &Memory) -> Result<Registration> {
        Ok(self.0.register(memory, Access::all())?)
    }

    #[inline]
    pub(crate) fn peer(&self, rank: usize) -> Result<&Peer> {
        self.0.peers.get(rank).ok_or_else(|| Error::NoSuchRank { rank, size: self.size() })
    }

    /// Starts a send of the bytes `range` of `buffer` to a rank.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`]; [`Error::Device`] for a range outside the buffer; [`Error::Message`] with the reason:
    /// the connection broke, too many messages are under way, or ([`gdsync::Error::Busy`]) a send to this rank that a stream
    /// started is not complete yet: see [`Communicator::isend_on_stream`].
    pub fn isend(&self, buffer: &Registration, range: Range<usize>, rank: usize) -> Result<Request> {
        self.isendv(&[(buffer, range)], rank)
    }

    /// As [`Communicator::isend`], of several pieces one after the other: as many as [`Builder::max_pieces`] says.
    ///
    /// # Errors
    /// As [`Communicator::isend`].
    pub fn isendv(&self, pieces: &[Piece<'_>], rank: usize) -> Result<Request> {
        let _range = crate::DOMAIN.range(c"isend");
        let post = |link: &Link, sges: &[Sge]| {
            let place = match &link.slots {
                None => link.send(sges)?,
                Some(slots) => slots.send_counted(pieces, || {
                    let place = link.send(sges)?;
                    Ok((place, link.number_among_sent(place)))
                })?,
            };
            Ok((place, ()))
        };
        let peer = self.peer(rank)?;
        match peer.send(pieces)? {
            Some(request) => Ok(request),
            None => Ok(peer.start(Way::Send, "send", pieces, post)?.0),
        }
    }

    /// Starts a receive from a rank into the bytes `range` of `buffer`. A longer message is an error on both
    /// sides, and ends the connection: nothing more is sent to this rank or received from it. With
    /// [`tagged`](crate::tagged) only the message is lost.
    ///
    /// # Errors
    /// As [`Communicator::isend`].
    pub fn irecv(&self, buffer: &Registration, range: Range<usize>, rank: usize) -> Result<Request> {
        self.irecvv(&[(buffer, range)], rank)
    }

    /// As [`Communicator::irecv`], into several pieces one after the other: as many as [`Builder::max_pieces`] says.
    ///
    /// # Errors
    /// As [`Communicator::isend`].
    pub fn irecvv(&self, pieces: &[Piece<'_>], rank: usize) -> Result<Request> {
        let _range = crate::DOMAIN.range(c"irecv");
        let post = |link: &Link, sges: &[Sge]| {
            let place = link.ends.recv.post_recv_index(&[RecvWr { wr_id: 0, sges }])?;
            link.credits.grant(place);
            Ok((place, ()))
        };
        self.peer(rank)?.receive(pieces, post)
    }

    /// Blocks until a message is complete.
    ///
    /// # Errors
    /// As [`Request::wait`].
    pub fn wait(&self, request: &Request, timeout: Duration) -> Result<Status> {
        let status = request.wait_and(timeout, || self.catch_up())?;
        match &request.part {
            Part::Posted(order) => match &order.lane {
                Some(lane) => lane.upgrade().iter().for_each(|lane| lane.recycle()),
                None => self.peer(request.rank())?.finish(order, status),
            },
            Part::Kept(link, receive) if receive.bound().is_some() => {
                link.recycle_slots();
            }
            Part::Kept(..) | Part::Copied(_) | Part::Behind(..) => {}
        }
        Ok(status)
    }

    /// Blocks until all messages are complete, or one has failed.
    ///
    /// # Errors
    /// As [`Request::wait`], for the first that fails; the timeout is for all together.
    pub fn wait_all<'a>(
        &self,
        requests: impl IntoIterator<Item = &'a Request>,
        timeout: Duration,
    ) -> Result<Vec<Status>> {
        let deadline = Deadline::after(timeout);
        requests.into_iter().map(|request| self.wait(request, deadline.remaining())).collect()
    }

    /// Moves messages along, takes back what finished ones held, and asks ranks that are silent whether they are there. Only
    /// needed by threads that neither wait nor send for long.
    pub fn progress(&self) {
        self.catch_up();
        self.0.peers.iter().for_each(Peer::recycle);
        Lanes::recycle(&mut self.0.lanes.lock());
    }

    /// Tells the other ranks of receives that were held back.
    fn catch_up(&self) {
        self.0.alarm.answer(&self.0.peers);
    }

    /// Whether a rank can be reached, as far as is known. It neither waits nor asks the rank.
    ///
    /// # Errors
    /// [`Error::Message`] says what ended the connection; [`Error::NoSuchRank`].
    pub fn check(&self, rank: usize) -> Result<()> {
        let link = &self.peer(rank)?.link;
        link.check().map_err(|source| Error::Message { rank, operation: "connection", source })
    }

    /// The ranks that can no longer be reached, as far as is known. What is under way with the others is not concerned.
    pub fn lost(&self) -> Vec<usize> {
        (0..self.size()).filter(|&rank| self.check(rank).is_err()).collect()
    }

    /// Ends the connection to a rank: all that is under way with it ends now, in waits and on streams, but for
    /// [waits for signals](crate::Window::wait_signal_on_stream), with an error that says so, and nothing more can be sent to it or
    /// received from it. It learns that when it waits for this rank, within a second ([`gdsync::Error::GivenUpByPeer`]). What was complete before is not lost.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`].
    pub fn give_up(&self, rank: usize) -> Result<()> {
        self.peer(rank)?.link.give_up();
        Ok(())
    }

    /// Blocks until all ranks are here. It uses the connections made at start, not the RDMA device: see
    /// [`Collectives::barrier`](crate::collective::Collectives::barrier) for that.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] names a rank that is gone, [`Error::Deadline`] one that is late.
    pub fn barrier(&self, timeout: Duration) -> Result<()> {
        self.catch_up();
        self.0.bootstrap.lock().barrier(timeout)
    }

    /// Collects a few bytes of every rank at every rank, in rank order: for addresses and keys, not for data.
    ///
    /// # Errors
    /// As [`Communicator::barrier`].
    pub fn exchange(&self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.catch_up();
        self.0.bootstrap.lock().allgather(bytes, timeout)
    }

    /// The process of a rank that [`Builder::spawn`] started from here.
    pub fn child(&self, rank: usize) -> Option<u32> {
        self.0.children.lock().as_ref()?.pid(rank)
    }

    /// Waits for what is under way in windows, for all ranks, then for the processes that [`Builder::spawn`] started.
    ///
    /// # Errors
    /// [`Error::Message`] for an operation on a window that failed, if no call on that window has told before; as
    /// [`Communicator::barrier`]; [`Error::Child`] for a process that failed.
    pub fn finalize(self, timeout: Duration) -> Result<()> {
        let deadline = Deadline::after(timeout);
        let flushed = self.flush_lanes(&deadline);
        // The others need not wait for a rank that this one cannot reach.
        let met = self.barrier(deadline.remaining());
        flushed.and(met).map_err(|error| explain(self.0.children.lock().as_mut(), error))?;
        match self.0.children.lock().take() {
            Some(children) => children.wait(deadline.remaining()),
            None => Ok(()),
        }
    }
}

/// The ranks of one communicator make another.
impl Exchange for Communicator {
    fn rank(&self) -> usize {
        self.rank()
    }

    fn size(&self) -> usize {
        self.size()
    }

    fn allgather(&mut self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.exchange(bytes, timeout)
    }

    fn regroup(&mut self, without: &[usize], timeout: Duration) -> Result<(Box<dyn Exchange>, Vec<usize>)> {
        Self::regroup(self, without, &Deadline::after(timeout))
    }
}
