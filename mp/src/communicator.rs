//! Communicators: ranks that can send messages to each other.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gdsync::cuda::Gpu;
use gdsync::memory::Memory;
use gdsync::shm::back_off;
use gdsync::verbs::{Access, Context, Pd};
use gdsync_device::fork_guard::ForkGuard;
use parking_lot::{Mutex, MutexGuard};

use crate::cache::{Cache, CacheConfig, Cached};
use crate::credit::CreditFlag;
use crate::error::{Error, Result};
use crate::exchange::{Exchange, Spawned, say};
use crate::overlap::{OutstandingReceives, ReceiveClaims, overlap};
use crate::path::{BufferPath, DeviceDomain, GpuPath, IntraHostPath, NearPath, PeerPath};
use crate::peer::{Beside, Peer};
use crate::places::LINES;
use crate::registration::{DomainId, Piece, Registration};
use crate::request::{DOMAIN, Request, Status};
use crate::rma_queue::{AllRmaQueues, RmaQueues};
use crate::shm_fifo::fitting;
use crate::transport::QueueConfig;
use crate::wait::Deadline;
use crate::watchdog::{self, AllWatched, Watchdog};

/// Ranks that can send messages to each other. Clones share it; any thread may use it.
///
/// It belongs to the process that made it: in a forked child calls are refused ([`gdsync::Error::OtherProcess`]), and dropping it does
/// nothing.
///
/// # Timeouts
/// Nothing waits for ever. Calls that wait take a `Duration`, or `None` for [`Communicator::timeout`]: `comm.barrier(None)`.
///
/// # Full queues
/// Calls that start something, by the CPU, on a stream or in a batch, wait for room in a queue or a stream that is full, and move
/// messages along meanwhile. So a loop may start more than [`CommunicatorBuilder::depth`](crate::CommunicatorBuilder::depth)
/// operations without counting them. After [`Communicator::timeout`] the call fails with [`gdsync::Error::QueueFull`] or
/// [`gdsync::Error::StreamFull`], and has started nothing: where two ranks both send more than `depth` messages before either
/// receives, or a batch holds more than that. [`Communicator::with_timeout`] of zero makes these calls fail at once instead.
#[derive(Clone)]
pub struct Communicator(pub(crate) Arc<Inner>, pub(crate) Duration);

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Communicator(rank {} of {})", self.rank(), self.size())
    }
}

/// The settings of a communicator.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) context: Option<Context>,
    pub(crate) spawn: Option<usize>,
    pub(crate) size: Option<usize>,
    pub(crate) bind: bool,
    pub(crate) timeout: Duration,
    pub(crate) watch: bool,
    pub(crate) queues: QueueConfig,
    pub(crate) cache: CacheConfig,
    pub(crate) intra_host: IntraHostPath,
    pub(crate) gpu_path: GpuPath,
    pub(crate) near: NearPath,
    pub(crate) allow_overlap: bool,
}

impl Settings {
    /// Whether streams may put messages into receives of other ranks, and theirs into receives of this one.
    pub(crate) fn has_places(&self) -> bool {
        self.near != NearPath::Queues && self.queues.gpu.is_some() && self.queues.depth <= LINES
    }
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) rank: usize,
    pub(crate) fork_guard: ForkGuard,
    /// A forked child leaks it.
    pub(crate) exchange: Arc<Mutex<Box<dyn Exchange>>>,
    /// [`Exchange::close_flag`]
    pub(crate) is_closed: Arc<AtomicBool>,
    /// Dropped after the exchange, so that they learn that it is gone, and before the rest, which tells them, too.
    pub(crate) children: Spawned,
    /// [`Communicator::finalize`] has found nothing left at any rank.
    pub(crate) is_over: Arc<AtomicBool>,
    pub(crate) context: Context,
    pub(crate) pd: Pd,
    /// The device for ranks of the same host, if messages with any rank go through it.
    pub(crate) intra_host: Option<DeviceDomain>,
    pub(crate) domain: DomainId,
    pub(crate) paths: Vec<PeerPath>,
    pub(crate) cache: Cache,
    pub(crate) flag: Arc<CreditFlag>,
    /// Dropped before `credits`, which it uses.
    pub(crate) _watchdog: Option<Watchdog>,
    pub(crate) peers: Arc<[Arc<Peer>]>,
    /// The words that the peers write.
    pub(crate) credits: Registration,
    /// The connections of collectives, which the other ranks may still use after these were dropped here, with their words.
    pub(crate) besides: Mutex<Vec<Beside>>,
    pub(crate) settings: Settings,
    pub(crate) rma: AllRmaQueues,
    /// Parts of windows that kernels of other ranks may still access, also those of dropped windows.
    pub(crate) exports: Mutex<Vec<Memory>>,
    /// What the watchdog also looks after.
    pub(crate) watched: AllWatched,
    /// `None` if they may overlap.
    pub(crate) outstanding: Option<Arc<OutstandingReceives>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.fork_guard.may_end(&self.exchange) {
            return;
        }
        // After a failure, or a shrink, the others know already.
        let is_whole = !self.peers.iter().any(|peer| peer.transport.has_ended());
        if self.children.are_running() {
            // They learn it with their next wait for this rank, not by its timeout.
            let why = "this rank dropped its Communicator before that; keep it, and end with Communicator::finalize";
            let error = gdsync::Error::Aborted { why: why.to_owned() };
            self.peers.iter().for_each(|peer| peer.transport.fail(&error));
        }
        if self.peers.len() > 1 && is_whole && self.children.are_left_by_surprise() {
            say(&format!(
                "rank {} leaves without Communicator::finalize: the others fail in their next call that needs it",
                self.rank
            ));
        }
    }
}

impl Inner {
    /// Whether all ranks are reached through the intra-host device. All ranks come to the same answer: a rank that is not reached so
    /// does not reach the others so.
    pub(crate) fn is_all_intra_host(&self) -> bool {
        self.intra_host.is_some() && self.paths.iter().all(PeerPath::is_intra_host)
    }

    /// The intra-host device, or the other one, and the protection domain there.
    pub(crate) fn domain(&self, intra_host: bool) -> (&Context, &Pd) {
        match &self.intra_host {
            Some(domain) if intra_host => (&domain.context, &domain.pd),
            _ => (&self.context, &self.pd),
        }
    }

    /// Registers memory with all devices that messages go through.
    pub(crate) fn register(&self, memory: &Memory, access: Access) -> gdsync::Result<Registration> {
        let intra_host = self.intra_host.as_ref().map(|domain| domain.pd.register(memory, access));
        Ok(Registration::new(self.pd.register(memory, access)?, intra_host.transpose()?, self.domain))
    }
}

impl Communicator {
    /// The rank of this process, from 0.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.0.peers.len()
    }

    /// How long a call waits that was given no other timeout, also for room in a full queue:
    /// [`CommunicatorBuilder::timeout`](crate::CommunicatorBuilder::timeout), unless [`Communicator::with_timeout`] says otherwise.
    pub fn timeout(&self) -> Duration {
        self.1
    }

    pub(crate) fn limit(&self, timeout: impl Into<Option<Duration>>) -> Duration {
        timeout.into().unwrap_or(self.1)
    }

    /// The same ranks and connections, with another [`Communicator::timeout`], also for windows, channels and collectives that are made
    /// with it. With zero a call that finds a queue full fails at once.
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Self(self.0.clone(), timeout)
    }

    /// Repeats an attempt, which starts nothing if it fails, while a queue or a stream is full.
    #[inline]
    pub(crate) fn while_full<T>(&self, attempt: impl FnMut() -> Result<T>) -> Result<T> {
        self.retry_while(Error::is_full, attempt)
    }

    /// As [`Communicator::while_full`], while it fails with an error that ends by itself.
    #[inline]
    pub(crate) fn retry_while<T>(
        &self,
        ends_by_itself: impl Fn(&Error) -> bool,
        mut attempt: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        match attempt() {
            Err(error) if ends_by_itself(&error) && !self.1.is_zero() => self.retry(ends_by_itself, attempt),
            other => other,
        }
    }

    #[cold]
    fn retry<T>(
        &self,
        ends_by_itself: impl Fn(&Error) -> bool,
        mut attempt: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        let deadline = Deadline::after(self.1);
        loop {
            let is_last = deadline.is_over();
            self.progress();
            let has_progressed = self.run_devices();
            match attempt() {
                Err(error) if ends_by_itself(&error) && !is_last => {
                    if !has_progressed {
                        back_off(deadline.elapsed(), deadline.remaining());
                    }
                }
                other => return other,
            }
        }
    }

    /// The device that messages go through; those between ranks of the same host may have another one: see
    /// [`Communicator::path`].
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// The path of messages with a rank, and why.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`].
    pub fn path(&self, rank: usize) -> Result<&PeerPath> {
        self.0.paths.get(rank).ok_or_else(|| Error::NoSuchRank { rank, size: self.size() })
    }

    /// The path of a message of the bytes `range` of `buffer` to a rank, and why: the device ([`Communicator::path`]), and what moves
    /// the bytes for it: the card, the CPU or a copy engine, directly or staged. It depends on the memory and the length. A message
    /// of several pieces is not fetched by a copy engine of the receiver. A receiver that cannot fetch a buffer refuses its first
    /// message, which is staged then, as later ones.
    ///
    /// [`BufferPath::peer_copies`] says whether CUDA streams of the [communicator's GPU](crate::CommunicatorBuilder::gpu) put the bytes
    /// into receives of the rank themselves, in GPU memory (of `cudaMalloc`) that it has received into before; streams of memory operations
    /// from 4 KiB on. The device then only completes these messages. So may do a rank of this host for messages of one piece into one
    /// piece. A failure of the connection does not stop a copy that was submitted.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`]; [`Error::Device`] for a range outside the buffer.
    pub fn path_of(&self, buffer: &Registration, range: Range<usize>, rank: usize) -> Result<BufferPath> {
        let path = self.path(rank)?.clone().with_fifo_if(fitting(&[(buffer, range.clone())]).is_some());
        let of_streams = buffer.memory().gpu().filter(|_| path.is_on_this_host() && rank != self.rank());
        let transport = &self.peer(rank)?.transport;
        let path = BufferPath::new(path, &transport.qp.send, buffer, &range)?;
        let Some(_) = of_streams else { return Ok(path) };
        let settings = &self.0.settings;
        Ok(path.with_copies(match transport.places() {
            _ if settings.near == NearPath::Queues => {
                Err("this rank asked for queue pairs (MP_NEAR, or the builder)".into())
            }
            _ if settings.queues.gpu.is_none() => {
                Err("this rank has no GPU: give one to CommunicatorBuilder::gpu".into())
            }
            _ if settings.queues.depth > LINES => Err("CommunicatorBuilder::depth is more than 1024".into()),
            _ if !self.device(rank)?.is_software() => Err("the device is no software HCA".into()),
            Some(places) => places.copies(buffer.memory(), range.len()),
            None => Err("the other rank has no GPU, asked for queue pairs, or shares no memory".into()),
        }))
    }

    /// Messages so far that went through the shared-memory FIFO to and from a rank: sent, and received. Both are 0 for a rank
    /// without one: see [`PeerPath::has_fifo`].
    ///
    /// # Errors
    /// [`Error::NoSuchRank`].
    pub fn fifo_messages(&self, rank: usize) -> Result<(u64, u64)> {
        let fifo = self.peer(rank)?.fifo.as_ref();
        Ok(fifo.map_or((0, 0), |fifo| (fifo.sent(), fifo.received())))
    }

    /// The device that messages with a rank go through.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`].
    pub fn device(&self, rank: usize) -> Result<&Context> {
        Ok(self.0.domain(self.path(rank)?.is_intra_host()).0)
    }

    /// Registers memory for messages. GPU memory that the device does not reach may be staged in host memory: see
    /// [`Communicator::path_of`] and [`GpuPath`](crate::GpuPath).
    ///
    /// It stays registered until the last clone and the last message of it are gone. A message that nobody has waited for is
    /// released by [`Communicator::progress`], or by the watchdog within a quarter of a second; so are receives of up to 4 KiB from
    /// a rank of this host in any case.
    ///
    /// # Errors
    /// [`Error::Device`] when a device refuses the memory.
    pub fn register(&self, memory: &Memory) -> Result<Registration> {
        Ok(self.0.register(memory, Access::all())?)
    }

    #[inline]
    pub(crate) fn peer(&self, rank: usize) -> Result<&Arc<Peer>> {
        self.0.peers.get(rank).ok_or_else(|| Error::NoSuchRank { rank, size: self.size() })
    }

    /// Starts a send of the bytes `range` of `buffer` to a rank.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`]; [`Error::Device`] for a range outside the buffer; [`Error::Message`] with the reason:
    /// the connection broke, the queue is [full](Communicator#full-queues), or ([`gdsync::Error::Busy`]) a send to this rank that a
    /// stream started is not complete yet: see [`Communicator::isend_on_stream`].
    pub fn isend(&self, buffer: &Registration, range: Range<usize>, rank: usize) -> Result<Request> {
        self.isend_vectored(&[(buffer, range)], rank)
    }

    /// As [`Communicator::isend`], of several pieces one after the other: at most
    /// [`CommunicatorBuilder::max_pieces`](crate::CommunicatorBuilder::max_pieces).
    ///
    /// # Errors
    /// [`Error::NoSuchRank`]; [`Error::Device`] for a range outside the buffer; [`Error::Message`] with the reason, also for too many
    /// pieces.
    pub fn isend_vectored(&self, pieces: &[Piece<'_>], rank: usize) -> Result<Request> {
        let _range = DOMAIN.range(c"isend");
        let peer = self.open_peer(rank, "send")?;
        self.while_full(|| Ok(Request::sent(peer, peer.send(pieces)?)))
    }

    /// Starts a receive from a rank into the bytes `range` of `buffer`. A longer message is an error on both
    /// sides, and ends the connection: nothing more is sent to this rank or received from it. With
    /// [`tagged`](crate::tagged) only the message is lost.
    ///
    /// **A posted receive is active at once.** The message may be written into the buffer at any time until the request is complete,
    /// also before a stream has got to work that was enqueued earlier. So outstanding receives of a communicator must not overlap,
    /// and a loop over one buffer on a stream needs [`Communicator::recv_on_stream`], which receives when the stream gets there. That
    /// a receive is apart from windows, places of channels and what is sent is not checked.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`]; [`Error::Device`] for a range outside the buffer; [`Error::OverlappingReceives`]; [`Error::Message`] with
    /// the reason.
    pub fn irecv(&self, buffer: &Registration, range: Range<usize>, rank: usize) -> Result<Request> {
        self.irecv_vectored(&[(buffer, range)], rank)
    }

    /// As [`Communicator::irecv`], into several pieces one after the other: at most
    /// [`CommunicatorBuilder::max_pieces`](crate::CommunicatorBuilder::max_pieces).
    ///
    /// # Errors
    /// [`Error::NoSuchRank`]; [`Error::Device`] for a range outside the buffer; [`Error::OverlappingReceives`], also of two pieces;
    /// [`Error::Message`] with the reason, also for too many pieces.
    pub fn irecv_vectored(&self, pieces: &[Piece<'_>], rank: usize) -> Result<Request> {
        let _range = DOMAIN.range(c"irecv");
        let peer = self.open_peer(rank, "receive")?;
        self.while_full(|| Ok(Request::received(peer, peer.receive(pieces, || self.claim(pieces, rank))?)))
    }

    /// Claims the memory of a receive; refuses memory of another one.
    #[inline]
    fn claim(&self, pieces: &[Piece<'_>], rank: usize) -> Result<ReceiveClaims> {
        match &self.0.outstanding {
            // A complete receive that nobody has waited for is released first.
            Some(outstanding) => outstanding.claim(pieces, Some(rank), |other| {
                let peer = other.and_then(|other| self.0.peers.get(other));
                peer.into_iter().for_each(|peer| peer.settle());
            }),
            None => Ok(ReceiveClaims::new()),
        }
    }

    /// Blocks until a message is complete.
    ///
    /// # Errors
    /// [`Error::Message`] names the rank and why the message failed, or that it is late.
    pub fn wait(&self, request: &Request, timeout: impl Into<Option<Duration>>) -> Result<Status> {
        let status = request.wait_and(self.limit(timeout), || self.catch_up())?;
        request.finish();
        Ok(status)
    }

    /// Sends a message to one rank and receives one from another or the same, and blocks until both are complete: as `MPI_Sendrecv`.
    /// Returns what was received. The two ranges must not overlap.
    ///
    /// # Errors
    /// [`Error::Message`] for ranges that overlap; those of [`Communicator::irecv`], [`Communicator::isend`] and
    /// [`Communicator::wait`]. What was started goes on then.
    pub fn sendrecv(
        &self,
        send: Piece<'_>,
        to: usize,
        receive: Piece<'_>,
        from: usize,
        timeout: impl Into<Option<Duration>>,
    ) -> Result<Status> {
        self.check_sendrecv(&send, to, &receive)?;
        let deadline = Deadline::after(self.limit(timeout));
        let receive = self.irecv_vectored(&[receive], from)?;
        let send = self.isend_vectored(&[send], to)?;
        let wait = |request| self.wait(request, deadline.remaining());
        wait(&send).and_then(|_| wait(&receive)).map_err(|error| error.of_waits(deadline.limit()))
    }

    /// Refuses the pieces of a sendrecv that overlap: either message might get the bytes of the other.
    pub(crate) fn check_sendrecv(&self, send: &Piece<'_>, to: usize, receive: &Piece<'_>) -> Result<()> {
        self.peer(to)?;
        if !overlap(send, receive) {
            return Ok(());
        }
        let cause = gdsync::Error::InvalidArgument {
            what: "the range to receive into",
            value: format!(
                "bytes {:?} of its buffer, which overlap the range to send, bytes {:?}",
                receive.1, send.1
            ),
            expected: "bytes of its own",
        };
        Err(Error::message(to, "sendrecv", cause))
    }

    /// Blocks until all messages are complete, or one has failed.
    ///
    /// # Errors
    /// [`Error::Message`] for the first that fails or is late; the timeout is for all together.
    pub fn wait_all<'a>(
        &self,
        requests: impl IntoIterator<Item = &'a Request>,
        timeout: impl Into<Option<Duration>>,
    ) -> Result<Vec<Status>> {
        let deadline = Deadline::after(self.limit(timeout));
        let wait = |request| self.wait(request, deadline.remaining());
        requests.into_iter().map(|request| wait(request).map_err(|e| e.of_waits(deadline.limit()))).collect()
    }

    /// Moves messages along, releases what complete ones held, and asks silent ranks whether they are alive. Only needed by threads
    /// that neither wait nor send for long.
    pub fn progress(&self) {
        if self.0.fork_guard.is_here() {
            self.run_devices();
            self.catch_up();
            self.0.peers.iter().for_each(|peer| peer.recycle());
            RmaQueues::recycle(&mut self.0.rma.lock());
        }
    }

    /// Runs device work: without it messages would wait for a thread of the device. Returns whether there was any.
    pub(crate) fn run_devices(&self) -> bool {
        let intra_host = self.0.intra_host.as_ref().is_some_and(|domain| domain.context.progress());
        self.0.context.progress() || intra_host
    }

    /// Announces receives that were held back to the ranks that wait for them.
    fn catch_up(&self) {
        if self.0.fork_guard.is_here() {
            watchdog::answer(&self.0.flag, &self.0.peers, |peer| {
                peer.transport.credits.catch_up_or_leave() | peer.take()
            });
        }
    }

    /// Whether a rank can be reached, as far as is known. It neither waits nor asks the rank.
    ///
    /// # Errors
    /// [`Error::Message`] says what ended the connection; [`Error::NoSuchRank`].
    pub fn check(&self, rank: usize) -> Result<()> {
        let transport = &self.peer(rank)?.transport;
        transport.check().map_err(|cause| Error::message(rank, "connection", cause))
    }

    /// The ranks that can no longer be reached, as far as is known. Messages with the others go on.
    pub fn lost(&self) -> Vec<usize> {
        (0..self.size()).filter(|&rank| self.check(rank).is_err()).collect()
    }

    /// Ends the connection to a rank: all that is under way with it ends now with an error, in waits and on streams, except
    /// [waits for signals](crate::Window::wait_signal_on_stream). Nothing more can be sent to it or received from it. The rank learns
    /// that within a second of waiting for this one ([`gdsync::Error::GivenUpByPeer`]). Complete messages are not lost.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`].
    pub fn give_up(&self, rank: usize) -> Result<()> {
        self.peer(rank)?.transport.give_up();
        Ok(())
    }

    /// Ends what any thread waits for with other ranks: the connections, as [`Communicator::give_up`], and within a quarter of a second
    /// calls of all ranks, here with [`Error::Closed`] and at the others with that as the reason. A foreign [`Exchange`] may leave its
    /// calls to their deadlines.
    pub fn close(&self) {
        self.0.is_closed.store(true, Ordering::Relaxed);
        self.0.peers.iter().for_each(|peer| peer.transport.give_up());
    }

    /// Blocks until all ranks have called it. It uses the connections made at start, not the RDMA device: see
    /// [`Collectives::barrier`](crate::collective::Collectives::barrier) for that.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] names a rank that is gone, [`Error::Deadline`] one that is late; [`Error::Device`] after
    /// [`Communicator::finalize`].
    pub fn barrier(&self, timeout: impl Into<Option<Duration>>) -> Result<()> {
        self.catch_up();
        let deadline = Deadline::after(self.limit(timeout));
        self.open_exchange(&deadline)?.barrier(deadline.remaining())
    }

    /// Collects a few bytes of every rank at every rank, in rank order: for addresses and keys, not for data.
    ///
    /// # Errors
    /// [`Error::Bootstrap`], [`Error::Deadline`] and [`Error::Device`], as [`Communicator::barrier`].
    pub fn exchange(&self, bytes: &[u8], timeout: impl Into<Option<Duration>>) -> Result<Vec<Vec<u8>>> {
        self.catch_up();
        let deadline = Deadline::after(self.limit(timeout));
        self.open_exchange(&deadline)?.allgather(bytes, deadline.remaining())
    }

    /// # Errors
    /// [`gdsync::Error::Unsupported`] after [`Communicator::finalize`]; [`gdsync::Error::OtherProcess`] in a forked child.
    pub(crate) fn refuse_finalized(&self, what: &'static str) -> gdsync::Result<()> {
        self.0.fork_guard.check()?;
        refuse_over(&self.0.is_over, what)
    }

    /// A rank that a message is started with.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`]; [`Error::Message`] after [`Communicator::finalize`].
    #[inline]
    pub(crate) fn open_peer(&self, rank: usize, operation: &'static str) -> Result<&Arc<Peer>> {
        let peer = self.peer(rank)?;
        self.refuse_finalized("a message").map_err(|cause| Error::message(rank, operation, cause))?;
        Ok(peer)
    }

    /// The exchange, for a call of all ranks.
    ///
    /// # Errors
    /// [`Error::Device`] after [`Communicator::finalize`]; [`Error::Deadline`] while another thread is in such a call.
    pub(crate) fn open_exchange(&self, deadline: &Deadline) -> Result<MutexGuard<'_, Box<dyn Exchange>>> {
        self.refuse_finalized("a call of all ranks")?;
        self.lock_exchange(deadline)
    }

    /// # Errors
    /// [`Error::Deadline`] while another thread is in a call of all ranks.
    pub(crate) fn lock_exchange(&self, deadline: &Deadline) -> Result<MutexGuard<'_, Box<dyn Exchange>>> {
        let what = "waiting for a barrier or another call of all ranks in another thread";
        let late = || deadline.error(what, "let that end first");
        self.0.exchange.try_lock_for(deadline.remaining()).ok_or_else(late)
    }

    /// The process of a rank that [`CommunicatorBuilder::spawn`](crate::CommunicatorBuilder::spawn) started from here.
    pub fn child(&self, rank: usize) -> Option<u32> {
        self.0.children.lock().as_ref()?.pid(rank)
    }
}

/// The registration cache.
impl Communicator {
    /// Registers `len` bytes of host memory for messages, or finds them registered: see [the cache](crate::cache).
    ///
    /// # Errors
    /// [`Error::Device`] for no bytes, a null pointer or a range that wraps, and when the device refuses the registration though
    /// the cache has evicted all that is idle.
    ///
    /// # Safety
    /// The range must stay mapped, readable and writable until the result, its clones and all messages on it are gone, and
    /// until [`Cache::invalidate`] was called for it. While messages on it are under way no Rust reference to it may be used,
    /// except to read what is only sent. Once a GPU has used it, [`Memory::from_raw`] says what else must be waited for.
    pub unsafe fn register_cached(&self, ptr: *mut u8, len: usize) -> Result<Cached> {
        // SAFETY: the caller upholds the contract of this function, which is that of `cached` for host memory.
        unsafe { self.cached(None, ptr.expose_provenance() as u64, len) }
    }

    /// Registers `len` bytes at an address of GPU memory for messages, or finds them registered: see
    /// [the cache](crate::cache). The memory may be of every kind that [`Gpu::wrap`] takes.
    ///
    /// # Errors
    /// [`Error::Device`] for no bytes, for what [`Gpu::wrap`] refuses, and when the device refuses the registration though the
    /// cache has evicted all that is idle.
    ///
    /// # Safety
    /// The memory must stay allocated until the result, its clones and all messages on it are gone, and with
    /// [`CacheConfig::announced`] until [`Cache::invalidate`] was called for it.
    pub unsafe fn register_cached_gpu(&self, gpu: &Gpu, addr: u64, len: usize) -> Result<Cached> {
        // SAFETY: the caller upholds the contract of this function, which is that of `cached` for GPU memory.
        unsafe { self.cached(Some(gpu), addr, len) }
    }

    /// The registration cache.
    pub fn cache(&self) -> &Cache {
        &self.0.cache
    }

    /// # Safety
    /// For host memory as [`Communicator::register_cached`], for GPU memory as [`Communicator::register_cached_gpu`].
    unsafe fn cached(&self, gpu: Option<&Gpu>, addr: u64, len: usize) -> Result<Cached> {
        let end = addr.checked_add(len as u64).filter(|_| addr != 0 && len != 0);
        let end = end.ok_or_else(|| gdsync::Error::InvalidArgument {
            what: "memory range",
            value: format!("{len} bytes at {addr:#x}"),
            expected: "a non-null address and at least one byte, inside the address space",
        })?;
        // Peers get no rights: the registration outlives its handle.
        let register = |memory: &_| self.0.register(memory, Access::LOCAL_WRITE);
        // SAFETY: the caller keeps the memory allocated as long as `Cache::get` asks for.
        Ok(unsafe { self.0.cache.get(gpu, &(addr..end), register) }?)
    }
}

/// The ranks of one communicator can make another.
/// # Errors
/// [`gdsync::Error::Unsupported`] after [`Communicator::finalize`].
#[inline]
pub(crate) fn refuse_over(is_over: &AtomicBool, what: &'static str) -> gdsync::Result<()> {
    if !is_over.load(Ordering::Relaxed) {
        return Ok(());
    }
    let by = "a communicator after Communicator::finalize";
    Err(gdsync::Error::Unsupported { what, by, fix: "finalize last" })
}

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

    fn barrier(&mut self, timeout: Duration) -> Result<()> {
        Self::barrier(self, timeout)
    }

    fn regroup(&mut self, without: &[usize], timeout: Duration) -> Result<(Box<dyn Exchange>, Vec<usize>)> {
        Self::regroup(self, without, &Deadline::after(timeout))
    }
}
