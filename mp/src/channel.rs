//! Channels: messages between two ranks that graphs can repeat.
//!
//! Between GPUs of a host streams copy by themselves: see `near`, which needs none of what follows.
//!
//! Otherwise a channel has a queue pair for each direction. When a place is free, the receiver's stream sends an empty message the
//! other way, which is credit for one message; the sender's stream consumes one credit for each message. Both are ordinary work
//! requests, of which each launch posts its own. There are no counters, so a repeated launch cannot miscount.
//!
//! Receives are posted ahead, for the same places in turn, and replenished before each launch: a message never meets a missing
//! receive. The bound: the queues hold D sends and 3 D receives, and there are P places. Suppose the sender replenishes when R of
//! its sends are complete. Their credits are consumed, so it posts receives for almost R + 3 D. Before it replenishes again it has
//! sent at most R + 2 D messages: D that found room then, and D of the launch for which more became complete meanwhile. The receiver
//! gives at most R + 2 D + P credits for them. The same holds at the receiver, which has consumed all but P of the messages that
//! it gave credit for. So P may be up to D / 2.
//!
//! A dropped channel may have credits under way to it, and acknowledgements to send: its queue pairs stay with the transport, or
//! this rank would look dead to the other one.

mod near;

use std::any::Any;
use std::mem;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gdsync::recorder::Traffic;
use gdsync::stream::{Batch, PreparedSend, Replenish, Stream, StreamOrder};
use gdsync::verbs::{Qp, QpAddress, RecvWr, SendWr, Sge};
use parking_lot::Mutex;

use crate::communicator::{Communicator, refuse_over};
use crate::error::{Error, Result};
use crate::exchange::{CommonCall, agree, take};
use crate::in_flight::{Direction, Done, InFlightOp};
use crate::overlap::overlap;
use crate::path::BufferPath;
use crate::peer::Peer;
use crate::registration::{Piece, Registration};
use crate::request::Request;
use crate::transport::{Companion, KeyedPins, QpPair, at_once};
use crate::wait::Deadline;
use near::{Own, Reached, Theirs, Verdict, Way};

/// A connection to one rank for messages that are sent again and again, from and to the same memory: in graphs
/// ([`Stream::capture`]), in steps of kernels ([`Stream::record_steps`]), and eagerly in between. It is what
/// `MPI_Send_init` and `MPI_Recv_init` are for, in stream order. Clones share it.
///
/// Messages are received into the *places* of the channel, in turn. The receiver's stream says when the next place is free
/// ([`Channel::post_recv_in_batch`]), in each launch anew; the sender's stream waits for that. So a sender may be any number of
/// launches ahead: it waits without retries of the device, up to its stream's wait limit.
///
/// Let a graph post and await a multiple of the number of places: with two places, capture iterations that alternate between two
/// buffers two at a time. A launch that would begin at another place than the first one is refused. Let a graph wait for its own
/// sends only: the completion of an earlier send may be consumed before a launch looks for it, and the launch is refused then.
///
/// Both ranks have the channel. It carries messages to each end that gave places: to both, or to one alone.
///
/// The messages of a channel do not mix with those of the communicator or of other channels. What was sent stays registered as long
/// as the channel, or a graph with messages of it. The queue pairs stay until the communicator goes: reuse channels.
///
/// ```
/// # use std::time::Duration;
/// # use gdsync::memory::Memory;
/// # use gdsync::stream::{HostStreamConfig, Stream};
/// # use mp::Communicator;
/// # fn main() -> mp::Result<()> {
/// let ten = Duration::from_secs(10);
/// let comm = Communicator::builder().spawn(1).init()?; // one rank is enough to try it
/// let peer = comm.rank();
/// let buffer = comm.register(&Memory::alloc(128)?)?;
/// let channel = comm.channel(peer, &[(&buffer, 64..128)], ten)?; // by all ranks
///
/// let stream = Stream::host(HostStreamConfig::default())?;
/// let graph = stream.capture(|stream| {
///     channel.post_recv_on_stream(stream)?; // the place is free: credit for the sender of this launch
///     let sent = channel.isend_on_stream(stream, &buffer, 0..64)?; // waits for that
///     let _received = channel.wait_recv_on_stream(stream)?; // the message is in its place
///     comm.wait_on_stream(stream, &sent) // and what was sent may be written again
/// })?;
/// for round in 1..=10 {
///     buffer.memory().write(0, &[round; 64])?;
///     graph.launch(&stream)?;
///     stream.synchronize(ten)?;
///     assert_eq!(buffer.memory().to_vec()[64..], [round; 64]);
/// }
/// # comm.finalize(ten)
/// # }
/// ```
///
/// # Peer copies
/// Where both ranks are on one host and all places of a direction are memory of a GPU (of `cudaMalloc`) that the sender's GPU reaches,
/// no queue pair is between: the sender's CUDA streams store messages into memory of the receiver's GPU, and its streams take them to
/// the places; messages of more than 8 KiB to places of more than 256 KiB go into the place at once. The GPU needs twice the
/// memory of the places for that, or 16 KiB for a longer one. Both ranks agree for each direction; [`Channel::path_of`] tells, or why not;
/// [`NearPath`](crate::NearPath) and `MP_NEAR` choose. The GPU of a rank is that of its places, else
/// [`CommunicatorBuilder::gpu`](crate::CommunicatorBuilder::gpu).
///
/// What differs: all streams of such a direction are of that GPU. Host streams are refused ([`gdsync::Error::Unsupported`]): the CPU does
/// not reach the other rank's GPU memory, and a copy by CUDA may block its thread as long as other streams wait. Use
/// [`NearPath::Queues`](crate::NearPath::Queues) for these.
/// Streams with the same [`CudaStreamConfig`](gdsync::stream::CudaStreamConfig) receive all messages of a channel: only kernels take
/// them to the places; to streams of memory operations they go into the places at once. A message says nothing of what its stream put into windows before: use [`Signal`](crate::Signal) for that.
/// A kernel that waits for a message to a place of more than 8 KiB holds 16 multiprocessors: let few streams of a GPU do so at once.
/// Any number of messages may be under way. A stream that waits for a rank that is lost fails, with the rank in its error. A graph that
/// sends, on a stream that leaves copies to the copy engine, is launched only where its messages go to the places of the capture; such
/// a stream may still copy after its failure. Batches are captured before their channel is dropped. Places stay allocated until the
/// communicator goes: [wrapped](gdsync::cuda::Gpu::wrap) memory must stay as long.
#[derive(Clone, Debug)]
pub struct Channel(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    comm: Communicator,
    /// Messages out, and credits in.
    out: Arc<Half>,
    /// Messages in, and credits out.
    into: Arc<Half>,
    /// Bytes of the smallest place of the other rank; `None` if it has none.
    room: Option<u64>,
}

/// One direction.
#[derive(Debug)]
struct Half {
    peer: Arc<Peer>,
    qp: Qp,
    /// [`Communicator::finalize`] has found nothing left at any rank.
    is_over: Arc<AtomicBool>,
    /// Of both directions: the transport stops them when it fails.
    ends: Arc<Ends>,
    way: Arc<Way>,
    /// The places of messages, or none for credits.
    places: Vec<Option<Sge>>,
    posted: Mutex<Posted>,
}

/// What ends with the connection.
#[derive(Debug)]
struct Ends {
    pair: Arc<QpPair>,
    ways: [Arc<Way>; 2],
}

impl Companion for Ends {
    fn end(&self, error: &gdsync::Error) {
        self.pair.end(error);
    }

    fn is_awaited(&self) -> bool {
        self.pair.is_awaited() || !self.pair.send.is_broken() && self.orders().any(StreamOrder::is_busy)
    }

    fn has_unsubmitted(&self) -> bool {
        let has_unsubmitted = || self.orders().any(StreamOrder::has_unsubmitted);
        self.pair.has_unsubmitted() || !self.pair.send.is_broken() && has_unsubmitted()
    }
}

impl Ends {
    fn orders(&self) -> impl Iterator<Item = &StreamOrder> {
        self.ways.iter().flat_map(|way| way.orders())
    }
}

#[derive(Debug)]
struct Posted {
    /// The place that the next receive is for.
    next: usize,
    /// Registrations that the device reads and writes.
    buffers: KeyedPins,
}

impl Half {
    fn new(
        comm: &Communicator,
        peer: &Arc<Peer>,
        qp: &Qp,
        (ends, way): (&Arc<Ends>, &Arc<Way>),
        places: Vec<Option<Sge>>,
        buffers: KeyedPins,
    ) -> Arc<Self> {
        let posted = Mutex::new(Posted { next: 0, buffers });
        let (peer, qp, is_over) = (peer.clone(), qp.clone(), comm.0.is_over.clone());
        let (ends, way) = (ends.clone(), way.clone());
        let half = Arc::new(Self { peer, qp, is_over, ends, way, places, posted });
        match &*half.way {
            Way::Queue(_) => {}
            Way::Out(out) => half.join_graphs(&out.0.order, false),
            Way::Into(into) => {
                half.join_graphs(&into.free.order, true);
                half.join_graphs(&into.inbox.order, false);
            }
        }
        half
    }

    /// Has graphs with batches that follow an order of its way call its hooks.
    fn join_graphs(self: &Arc<Self>, order: &StreamOrder, frees_places: bool) {
        let half = Arc::downgrade(self);
        order.before_launches(move || {
            let half = half.upgrade().ok_or(gdsync::Error::Unsupported {
                what: "a message of a channel that was dropped",
                by: "graphs and steps of kernels, whose launches ask the channel",
                fix: "keep the Channel until its batches are captured",
            })?;
            Ok(half.hooks(frees_places))
        });
    }

    /// What launches of a graph call first: has receives posted; behind that, refuses other places if a batch of the graph frees some.
    fn hooks(self: &Arc<Self>, frees_places: bool) -> Vec<Arc<dyn Replenish>> {
        let mut hooks: Vec<Arc<dyn Replenish>> = vec![self.clone()];
        if frees_places {
            let (half, next) = (self.clone(), AtomicU64::new(0));
            hooks.push(Arc::new(SamePlace { half, first: OnceLock::new(), next }));
        }
        hooks
    }

    /// Adds its hooks to a batch.
    fn repeat(self: &Arc<Self>, batch: &mut Batch, frees_places: bool) {
        self.hooks(frees_places).iter().for_each(|hook| batch.before_launches(hook));
    }

    /// Writes a message, or credit for one, for a batch.
    fn prepare(&self, sges: &[Sge]) -> gdsync::Result<PreparedSend> {
        self.replenish()?;
        self.qp.prepare_send(&[SendWr::send(sges)])
    }

    /// Adds a message to a batch, behind a wait for its credit.
    fn send(
        self: &Arc<Self>,
        batch: &mut Batch,
        (buffer, start): (&Registration, usize),
        sge: Sge,
    ) -> gdsync::Result<Done> {
        if let Way::Out(out) = &*self.way {
            self.replenish()?;
            return Ok(Done::Stream(out.send(batch, buffer, start, sge.len)?));
        }
        let mr = buffer.mr(self.peer.transport.intra_host);
        self.posted.lock().buffers.entry(mr.lkey()).or_insert_with(|| mr.guard());
        let send = self.prepare(&[sge])?;
        batch.post_wait(self.qp.prepare_wait_recv()?);
        self.repeat(batch, false);
        Ok(batch.post(send).into())
    }

    /// Adds credit for a message to a batch, if a place is left for it.
    fn give_credit(self: &Arc<Self>, batch: &mut Batch) -> Result<()> {
        let failed = |cause| self.failed("receive through a channel", cause);
        if let Way::Into(into) = &*self.way {
            self.replenish().map_err(failed)?;
            // Two threads must not both take the last place.
            let _turn = self.posted.lock();
            self.check_places(self.unawaited() + 1)?;
            into.post(batch);
            return Ok(());
        }
        let credit = self.prepare(&[]).map_err(failed)?;
        // The credit that was prepared counts.
        self.check_places(self.unawaited())?;
        self.repeat(batch, true);
        drop(batch.post(credit));
        Ok(())
    }

    /// Refuses more messages without a wait than there are places.
    fn check_places(&self, unawaited: u64) -> Result<()> {
        match unawaited <= self.places.len() as u64 {
            true => Ok(()),
            false => Err(Error::NoFreePlace { rank: self.peer.rank(), places: self.places.len() }),
        }
    }

    /// Adds the wait for the next message to a batch.
    fn await_message(self: &Arc<Self>, batch: &mut Batch) -> gdsync::Result<Arc<InFlightOp>> {
        const OPERATION: &str = "wait for a message of a channel";
        self.replenish()?;
        if let Way::Into(into) = &*self.way {
            let (ticket, inbox) = into.wait(batch);
            return Ok(InFlightOp::awaited(OPERATION, ticket, into.room, inbox));
        }
        self.repeat(batch, false);
        let completion = batch.wait_recv(&self.qp)?;
        Ok(InFlightOp::new(Direction::Recv, OPERATION, completion, 1, 0))
    }

    /// Places that were freed so far, those of batches that no stream has got included. Launches of graphs are counted where they go.
    fn freed(&self) -> u64 {
        match &*self.way {
            Way::Into(into) => into.posted(),
            _ => self.qp.sends(),
        }
    }

    /// Messages that credit was given for, and that have no wait.
    fn unawaited(&self) -> u64 {
        match &*self.way {
            Way::Into(into) => into.unawaited(),
            _ => self.qp.sends().saturating_sub(self.qp.recv_cq().claimed()),
        }
    }

    fn failed(&self, operation: &'static str, cause: gdsync::Error) -> Error {
        Error::message(self.peer.rank(), operation, cause)
    }
}

impl Drop for Half {
    fn drop(&mut self) {
        let sends_messages = matches!(self.places[..], [None]);
        let is_sending = sends_messages && self.qp.wait_all_sends(Duration::ZERO).is_err();
        let mut buffers = mem::take(&mut self.posted.get_mut().buffers);
        if !is_sending {
            buffers.clear();
        }
        self.peer.transport.retire(self.ends.clone(), buffers);
    }
}

impl Replenish for Half {
    fn replenish(&self) -> gdsync::Result<()> {
        refuse_over(&self.is_over, "a message of a channel")?;
        if !matches!(*self.way, Way::Queue(_)) {
            // Nothing is posted to the queue pair, so no completion tells of a failure.
            return if self.qp.is_broken() { self.qp.check() } else { Ok(()) };
        }
        let mut posted = self.posted.lock();
        // First: a completion drained here has consumed its receive.
        self.qp.send_cq().drain();
        while let Some(place) = self.places.get(posted.next) {
            match self.qp.post_recv(&[RecvWr::new(place.as_slice())]) {
                Ok(_) => posted.next = (posted.next + 1) % self.places.len(),
                Err(gdsync::Error::QueueFull { .. }) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Refuses launches of a graph that begin at another place than the first one: what the graph does with the places would be done
/// with others. Launches of one graph by several threads at once are not told apart.
#[derive(Debug)]
struct SamePlace {
    half: Arc<Half>,
    first: OnceLock<u64>,
    /// Of the launch that was tried last.
    next: AtomicU64,
}

impl Replenish for SamePlace {
    fn replenish(&self) -> gdsync::Result<()> {
        let place = self.half.freed() % self.half.places.len() as u64;
        self.next.store(place, Ordering::Relaxed);
        match self.first.get().is_none_or(|first| *first == place) {
            true => Ok(()),
            false => Err(gdsync::Error::Unsupported {
                what: "a launch whose receives are for other places of the channel than those of its first launch",
                by: "a graph, which uses the same memory each time",
                fix: "capture as many iterations as the channel has places (with two, one for each), or a graph for each place, launched \
                      in turn, or give Communicator::channels one place",
            }),
        }
    }

    fn launched(&self) {
        self.first.get_or_init(|| self.next.load(Ordering::Relaxed));
    }

    fn is(&self, earlier: &dyn Replenish) -> bool {
        let earlier = (earlier as &dyn Any).downcast_ref::<Self>();
        earlier.is_some_and(|earlier| Arc::ptr_eq(&earlier.half, &self.half))
    }
}

impl Channel {
    /// The rank at the other end.
    pub fn rank(&self) -> usize {
        self.0.out.peer.rank()
    }

    /// What a message of the bytes `range` of `buffer` would take to the other rank, and why: as [`Communicator::path_of`], by the
    /// queue pair of the channel, or with [peer copies](Channel#peer-copies).
    ///
    /// # Errors
    /// [`Error::Device`] for a range outside the buffer.
    pub fn path_of(&self, buffer: &Registration, range: Range<usize>) -> Result<BufferPath> {
        let Inner { comm, out, .. } = &*self.0;
        let path = comm.path(self.rank())?.clone().with_fifo_if(false);
        let path = BufferPath::new(path, &out.qp, buffer, &range)?;
        Ok(path.with_copies(match &*out.way {
            Way::Queue(why) => Err(why.clone()),
            _ => Ok(()),
        }))
    }

    /// Adds a message to a batch: the stream sends it when the other rank's stream has freed the place for it, with what the buffer
    /// holds when the stream gets there. [`Communicator::wait_in_batch`] for the returned request holds the stream until the buffer may be written again.
    ///
    /// A dropped batch takes the message back; drop the newest first. The request of a capture is void. All messages of a channel in
    /// one direction are in one stream at a time.
    ///
    /// # Errors
    /// [`Error::Message`] with the reason: the range is outside the buffer, the other rank has no place, or a
    /// smaller one, the connection broke, or more messages are under way than
    /// [`CommunicatorBuilder::depth`](crate::CommunicatorBuilder::depth). A [launch](gdsync::stream::Graph::launch) is refused for
    /// the last two as well.
    pub fn isend_in_batch(
        &self,
        batch: &mut Batch,
        buffer: &Registration,
        range: Range<usize>,
    ) -> Result<Request> {
        const OPERATION: &str = "send through a channel";
        let Inner { comm, out, room, .. } = &*self.0;
        let transport = &out.peer.transport;
        let sge = buffer
            .check_domain(transport.domain)
            .and_then(|()| buffer.sge(transport.intra_host, &range))
            .map_err(|cause| out.failed(OPERATION, cause))?;
        if room.is_none_or(|room| u64::from(sge.len) > room) {
            let cause = gdsync::Error::InvalidArgument {
                what: "the message",
                value: match room {
                    Some(room) => format!("{} bytes long, and the smallest place there {room}", sge.len),
                    None => format!("{} bytes long", sge.len),
                },
                expected: match room {
                    Some(_) => {
                        "one that fits into each place that the other rank gave Communicator::channels"
                    }
                    None => "none, as the other rank gave Communicator::channels no place for it",
                },
            };
            return Err(out.failed(OPERATION, cause));
        }
        let sent = comm.while_full(|| {
            out.send(batch, (buffer, range.start), sge).map_err(|cause| out.failed(OPERATION, cause))
        })?;
        let wqes = usize::from(matches!(sent, Done::Queue(_)));
        let op = InFlightOp::new(Direction::Send, OPERATION, sent, wqes, sge.len as usize);
        Ok(Request::of_channel(&out.peer, &out.qp, op))
    }

    /// Gives the other rank, when the stream gets there, credit for a message into the next place: places are freed in turn, from the
    /// first one on. Each needs its wait ([`Channel::wait_recv_in_batch`]): no more than there are places may be without one. Both
    /// count when they are added, those of a capture until it ends and then in each launch. A launch is only refused
    /// ([`gdsync::Error::Unsupported`]) if it begins at another place than the first one of its graph.
    ///
    /// # Errors
    /// [`Error::NoFreePlace`] when all places were freed and no wait has been added; [`Error::Message`] with the reason: there is no
    /// place, the connection broke, or too many messages are under way.
    pub fn post_recv_in_batch(&self, batch: &mut Batch) -> Result<()> {
        let Inner { comm, into, .. } = &*self.0;
        if into.places.is_empty() {
            let cause = gdsync::Error::InvalidArgument {
                what: "the number of places of this rank",
                value: "0".into(),
                expected: "at least 1, given to Communicator::channels",
            };
            return Err(into.failed("receive through a channel", cause));
        }
        comm.while_full(|| into.give_credit(batch))
    }

    /// Holds the stream until the next message is in its place. The [`Status`](crate::Status) of the returned request has its length;
    /// with peer copies as long as no later message is in the place, and then the length of the largest place. Give credit for the
    /// message before ([`Channel::post_recv_in_batch`]): the sender's stream waits for that.
    ///
    /// # Errors
    /// [`Error::NoPostedReceive`] when each posted receive has a wait; [`Error::Message`] with the reason: the connection broke.
    pub fn wait_recv_in_batch(&self, batch: &mut Batch) -> Result<Request> {
        let into = &self.0.into;
        if into.unawaited() == 0 {
            return Err(Error::NoPostedReceive { rank: self.rank() });
        }
        let op = into.await_message(batch);
        let op = op.map_err(|cause| into.failed("wait for a message of a channel", cause))?;
        Ok(Request::of_channel(&into.peer, &into.qp, op))
    }

    /// As [`Channel::isend_in_batch`], on a stream.
    ///
    /// # Errors
    /// [`Error::Message`], as [`Channel::isend_in_batch`], also with the refusal of the stream.
    pub fn isend_on_stream(
        &self,
        stream: &Stream,
        buffer: &Registration,
        range: Range<usize>,
    ) -> Result<Request> {
        self.on(stream, |batch| self.isend_in_batch(batch, buffer, range))
    }

    /// As [`Channel::post_recv_in_batch`], on a stream.
    ///
    /// # Errors
    /// [`Error::NoFreePlace`]; [`Error::Message`] with the reason, also with the refusal of the stream.
    pub fn post_recv_on_stream(&self, stream: &Stream) -> Result<()> {
        self.on(stream, |batch| self.post_recv_in_batch(batch))
    }

    /// As [`Channel::wait_recv_in_batch`], on a stream.
    ///
    /// # Errors
    /// [`Error::NoPostedReceive`]; [`Error::Message`] with the reason, also with the refusal of the stream.
    pub fn wait_recv_on_stream(&self, stream: &Stream) -> Result<Request> {
        self.on(stream, |batch| self.wait_recv_in_batch(batch))
    }

    fn on<T>(&self, stream: &Stream, add: impl FnOnce(&mut Batch) -> Result<T>) -> Result<T> {
        let (mut batch, stream) = (Batch::new(), at_once(stream));
        let added = add(&mut batch)?;
        let Inner { comm, out, .. } = &*self.0;
        comm.while_full(|| {
            stream.submit(&mut batch).map_err(|cause| out.failed("channel on stream", cause))
        })?;
        Ok(added)
    }
}

/// A channel, as a rank describes it to the others.
struct Card {
    theirs: Description,
    near: Theirs,
}

struct Description {
    /// The rank at the other end.
    rank: u64,
    out: QpAddress,
    into: QpAddress,
    /// Bytes of the smallest place plus 1; 0 where there is none.
    room: u64,
}

impl Description {
    const BYTES: usize = 2 * QpAddress::BYTES + 16;

    fn to_bytes(&self) -> Vec<u8> {
        let numbers = [self.rank, self.room].map(u64::to_be_bytes);
        [numbers.as_flattened(), &self.out.to_bytes(), &self.into.to_bytes()].concat()
    }

    fn from_bytes(bytes: &[u8; Self::BYTES]) -> gdsync::Result<Self> {
        let rest = &mut &bytes[..];
        let [rank, room] = [take(rest), take(rest)].map(u64::from_be_bytes);
        let (out, into) = (QpAddress::from_bytes(&take(rest))?, QpAddress::from_bytes(&take(rest))?);
        Ok(Self { rank, out, into, room })
    }
}

/// A channel that is not connected yet.
struct Unconnected {
    peer: Arc<Peer>,
    pair: Arc<QpPair>,
    places: Vec<Sge>,
    buffers: KeyedPins,
    near: Own,
}

/// What [`Communicator::channels`] knows of a channel before both ends agree: its own end, the other one, and what it reaches there.
type Paired = (Unconnected, Description, Reached);

impl Unconnected {
    /// What the other rank must know.
    fn card(&self) -> Vec<u8> {
        [self.description().to_bytes(), self.near.to_bytes()].concat()
    }

    fn description(&self) -> Description {
        let smallest = self.places.iter().map(|place| u64::from(place.len) + 1).min();
        let (out, into) = (self.pair.send.address(), self.pair.recv.address());
        Description { rank: self.peer.rank() as u64, out, into, room: smallest.unwrap_or(0) }
    }

    /// Connects with the end of the other rank, and posts the first receives.
    fn connect(
        self,
        comm: &Communicator,
        theirs: &Description,
        reached: Reached,
        verdict: Verdict,
    ) -> gdsync::Result<Channel> {
        let Self { peer, pair, places, buffers, near } = self;
        pair.name_ranks(comm.rank(), peer.rank(), [Traffic::ChannelOut, Traffic::ChannelIn]);
        pair.send.connect(theirs.into)?;
        pair.recv.connect(theirs.out)?;
        let ways = near.agree(comm, reached, verdict, [&pair.send, &pair.recv])?.map(Arc::new);
        let ends = Arc::new(Ends { pair, ways });
        peer.transport.accompany(&ends);
        let [sends, receives] = &ends.ways;
        let out = Half::new(comm, &peer, &ends.pair.send, (&ends, sends), vec![None], KeyedPins::new());
        let places = places.into_iter().map(Some).collect();
        let into = Half::new(comm, &peer, &ends.pair.recv, (&ends, receives), places, buffers);
        out.replenish()?;
        into.replenish()?;
        Ok(Channel(Arc::new(Inner { comm: comm.clone(), out, into, room: theirs.room.checked_sub(1) })))
    }
}

impl Communicator {
    /// Makes channels, in the order of the list: each to a rank, with the places for what comes from there. Every rank must call this,
    /// also with an empty list, and both ranks of a channel must list it.
    ///
    /// Without places (`&[]`) this end only sends: the channel of one direction is `&[]` at the sender, and places at the receiver.
    /// Several between the same ranks are paired in order: the n-th that one rank lists with the other is the n-th that the other lists
    /// with it. So in a ring of two ranks, with a channel to each side, one of them lists its channels the other way round.
    ///
    /// The places of a channel must not overlap. That they are apart from other channels, receives and windows is not checked.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`]; [`Error::Message`] for places of a channel that overlap; [`Error::Device`] for a range outside a
    /// registration, for a registration of another communicator, for more places than half of
    /// [`CommunicatorBuilder::depth`](crate::CommunicatorBuilder::depth), and from the device, whose queues must hold three times
    /// as many receives; [`Error::Bootstrap`] names a rank that is gone, could not make its channels, or has other ones in its
    /// list, [`Error::Deadline`] one that is late.
    pub fn channels(
        &self,
        wanted: &[(usize, &[Piece<'_>])],
        timeout: impl Into<Option<Duration>>,
    ) -> Result<Vec<Channel>> {
        let (_call, deadline) = (CommonCall::Channels.enter(), Deadline::after(self.limit(timeout)));
        let mut exchange = self.open_exchange(&deadline)?;
        let built =
            wanted.iter().map(|(rank, places)| self.build_channel(*rank, places)).collect::<Result<Vec<_>>>();
        // An empty record says that it has failed.
        let record = match &built {
            Ok(all) => [vec![1], all.iter().flat_map(Unconnected::card).collect()].concat(),
            Err(_) => Vec::new(),
        };
        let records = exchange.allgather(&record, deadline.remaining())?;
        // Each rank reports its failure to the others, or learns theirs.
        // Others may be opening it, also where this rank fails.
        let offered: Vec<_> = built.iter().flatten().flat_map(|own| own.near.exported().to_vec()).collect();
        let paired = built.and_then(|built| self.pair_channels(built, &records));
        let verdicts = paired.iter().flatten().flat_map(|(own, _, reached)| {
            let rank = (own.peer.rank() as u64).to_be_bytes();
            rank.into_iter().chain([reached.verdict().to_byte()])
        });
        let verdicts = exchange.allgather(&verdicts.collect::<Vec<_>>(), deadline.remaining())?;
        drop(offered);
        let connected = paired.and_then(|paired| self.connect_channels(paired, &verdicts));
        agree(&mut **exchange, connected, "its channels", &deadline)
    }

    /// Makes one channel, to a rank, as [`Communicator::channels`] does: every rank must call this, or that.
    ///
    /// # Errors
    /// Those of [`Communicator::channels`].
    pub fn channel(
        &self,
        rank: usize,
        places: &[Piece<'_>],
        timeout: impl Into<Option<Duration>>,
    ) -> Result<Channel> {
        Ok(self.channels(&[(rank, places)], timeout)?.swap_remove(0))
    }

    fn build_channel(&self, rank: usize, places: &[Piece<'_>]) -> Result<Unconnected> {
        let peer = self.peer(rank)?.clone();
        let (depth, intra_host) = (self.0.settings.queues.depth, peer.transport.intra_host);
        if places.len() > depth / 2 {
            return Err(Error::Device(gdsync::Error::InvalidArgument {
                what: "places of a channel",
                value: places.len().to_string(),
                expected: "at most half of CommunicatorBuilder::depth",
            }));
        }
        places.iter().try_for_each(|(buffer, _)| buffer.check_domain(peer.transport.domain))?;
        let buffers = places.iter().map(|(buffer, _)| buffer.mr(intra_host));
        let buffers = buffers.map(|buffer| (buffer.lkey(), buffer.guard())).collect();
        let sges = places.iter().map(|(buffer, range)| buffer.sge(intra_host, range));
        let sges = sges.collect::<gdsync::Result<Vec<_>>>()?;
        refuse_overlap(places).map_err(|cause| Error::message(rank, "channel", cause))?;
        let build = || {
            // With one SGE each send takes one slot of the queue: it is not deeper than asked for.
            let queues = self.0.settings.queues.build_qp(self.0.domain(intra_host).1).max_recv_wr(3 * depth);
            queues.max_send_sge(1).max_recv_sge(1).max_inline(0).build()
        };
        let pair = Arc::new(QpPair { send: build()?, recv: build()? });
        let near = Own::new(self, rank, places);
        Ok(Unconnected { peer, pair, places: sges, buffers, near })
    }

    /// Finds the other end of each.
    fn pair_channels(&self, built: Vec<Unconnected>, records: &[Vec<u8>]) -> Result<Vec<Paired>> {
        let cards = records.iter().enumerate().map(|(rank, record)| cards_for(self.rank(), rank, record));
        let mut cards = cards.collect::<Result<Vec<_>>>()?;
        let mut counts: Vec<_> = cards.iter().map(|theirs| (theirs.len(), 0)).collect();
        built.iter().for_each(|channel| counts[channel.peer.rank()].1 += 1);
        let other = |rank: usize| {
            let (theirs, ours) = counts[rank];
            let what = format!("it lists {theirs} channels with this rank, and this rank {ours} with it");
            Error::bootstrap(format!("rank {rank}"), what, "let both ranks of each channel list it")
        };
        let pair = |channel: Unconnected| {
            let rank = channel.peer.rank();
            let card = cards[rank].next().ok_or_else(|| other(rank))?;
            Ok((channel, card))
        };
        let paired = built.into_iter().map(pair).collect::<Result<Vec<_>>>()?;
        if let Some(rank) = cards.iter_mut().position(|rest| rest.next().is_some()) {
            return Err(other(rank));
        }
        let reach = |(channel, Card { theirs, near }): (Unconnected, Card)| {
            let reached = channel.near.reach(self, channel.peer.rank(), &near)?;
            Ok((channel, theirs, reached))
        };
        paired.into_iter().map(reach).collect()
    }

    /// Connects each with its other end, by the way that both reach.
    fn connect_channels(&self, paired: Vec<Paired>, verdicts: &[Vec<u8>]) -> Result<Vec<Channel>> {
        let own = (self.rank() as u64).to_be_bytes();
        let verdicts_of = |record: &Vec<u8>| {
            let (verdicts, _) = record.as_chunks::<9>();
            let for_own = verdicts.iter().filter_map(|verdict| verdict.strip_prefix(&own));
            for_own.flatten().map(|byte| Verdict::from_byte(*byte)).collect::<Vec<_>>().into_iter()
        };
        let mut verdicts: Vec<_> = verdicts.iter().map(verdicts_of).collect();
        let connect = |(channel, theirs, reached): Paired| {
            let rank = channel.peer.rank();
            let failed = |cause| Error::message(rank, "connect a channel", cause);
            // A rank that has failed says so next.
            let verdict = verdicts[rank].next().unwrap_or_default();
            channel.connect(self, &theirs, reached, verdict).map_err(failed)
        };
        paired.into_iter().map(connect).collect()
    }
}

/// Refuses places that overlap: a message would overwrite one that was not read yet.
fn refuse_overlap(places: &[Piece<'_>]) -> gdsync::Result<()> {
    // By address, so that only neighbours need be compared.
    let mut sorted: Vec<_> = places.iter().filter(|(_, range)| !range.is_empty()).collect();
    sorted.sort_by_key(|(buffer, range)| buffer.memory().addr() + range.start as u64);
    match sorted.windows(2).find(|pair| overlap(pair[0], pair[1])) {
        Some(pair) => Err(gdsync::Error::InvalidArgument {
            what: "a place",
            value: format!(
                "bytes {:?} of its buffer, which overlap another one, bytes {:?}",
                pair[0].1, pair[1].1
            ),
            expected: "bytes of its own for each place of a channel",
        }),
        None => Ok(()),
    }
}

/// The channels of rank `from` with `rank`, in order.
fn cards_for(rank: usize, from: usize, record: &[u8]) -> Result<std::vec::IntoIter<Card>> {
    let wrong = |what| Error::bootstrap(format!("rank {from}"), what, "see the error of that rank");
    let (_, mut rest) = record.split_first().ok_or_else(|| wrong("it could not make its channels"))?;
    let malformed = || wrong("its list of channels is malformed");
    let mut cards = Vec::new();
    while !rest.is_empty() {
        let (description, behind) = rest.split_first_chunk().ok_or_else(malformed)?;
        rest = behind;
        let theirs = Description::from_bytes(description)?;
        let near = Theirs::take(&mut rest).ok_or_else(malformed)?;
        cards.push(Card { theirs, near });
    }
    cards.retain(|card| card.theirs.rank == rank as u64);
    Ok(cards.into_iter())
}
