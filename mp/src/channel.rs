//! Channels: messages between two ranks that graphs can repeat.
//!
//! In each direction a channel has a queue pair of its own. The receiver's stream gives credit for one message by an empty
//! message the other way, as soon as a place is free, and the sender's stream takes one for each message that it sends. Both are
//! work requests like all others: a launch has its own, behind all that was there before. Nothing counts, so nothing can be
//! counted wrongly when it is repeated.
//!
//! Receives are posted ahead, for the same places again and again, and before each launch those that have come are replaced. A message
//! never meets a missing one. With room for D sends and 3 D receives, and P places, let the sender look when R of its sends are
//! complete: their credits are taken, so it posts receives for almost R + 3 D. Until it looks again it has sent R + 2 D messages at
//! most, D that found room then and D of the launch for which more became complete meanwhile, and the receiver gives no more than
//! R + 2 D + P credits for them. The receiver is safe alike, as it has taken all but P of the messages that it gave credit for. So P
//! may be D / 2.
//!
//! Who drops a channel may have credits under way to it that it will not use, and owe acknowledgements: its queue pairs stay with the
//! connection, or its rank would look dead to the other one.

use std::mem;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use gdsync::stream::{Batch, Replenish, Stream};
use gdsync::verbs::{Completion, Mr, Qp, QpAddress, RecvWr, SendWr, Sge};
use parking_lot::Mutex;

use crate::communicator::{Communicator, Registration};
use crate::deadline::Deadline;
use crate::ends::{Ends, agree};
use crate::error::{Error, Result};
use crate::link::{Keepers, Link};
use crate::peer::Piece;

/// A connection to one rank for messages that are sent again and again, from and to the same memory: in graphs
/// ([`Stream::capture`]), in steps of kernels ([`Stream::record_steps`]), and eagerly in between. It is what
/// `MPI_Send_init` and `MPI_Recv_init` are for, in stream order. Clones share it.
///
/// What it receives goes into its *places*, one after the other and round again. The receiver's stream says when the next one is
/// free ([`Channel::post_recv_in_batch`]); only then the sender's stream goes on to send, in each launch anew. So a sender may be
/// any number of launches ahead of the receiver: it waits, without a retry of the device, and its stream's wait limit holds.
///
/// A graph is right at each launch if it gives and awaits as many messages as a multiple of the places, so that each launch uses the
/// same ones: with two places, iterations that take turns between two buffers are captured two at a time. Let a graph wait for its own
/// sends only: the completion of an earlier one may be taken before a launch looks for it, which is refused then.
///
/// Its messages are apart from those of the communicator, and of other channels. What was sent through it stays registered
/// as long as the channel, or a graph that has messages of it. Its queue pairs stay until the communicator goes: use channels
/// again rather than make new ones.
///
/// ```
/// # use std::time::Duration;
/// # use gdsync::memory::Memory;
/// # use gdsync::stream::{Batch, HostStreamConfig, Stream};
/// # use mp::Communicator;
/// # fn main() -> mp::Result<()> {
/// let ten = Duration::from_secs(10);
/// let comm = Communicator::builder().spawn(1).init()?; // one rank is enough to try it
/// let peer = comm.rank();
/// let buffer = comm.register(&Memory::alloc(128)?)?;
/// let channels = comm.channels(&[(peer, &[(&buffer, 64..128)])], ten)?; // by all ranks
/// let channel = &channels[0];
///
/// let stream = Stream::host(HostStreamConfig::default())?;
/// let capture = stream.begin_capture()?;
/// let mut batch = Batch::new();
/// channel.post_recv_in_batch(&mut batch)?; // the place is free: credit for the sender of this launch
/// let sent = channel.send_in_batch(&mut batch, &buffer, 0..64)?; // waits for that
/// channel.wait_recv_in_batch(&mut batch)?; // the message is in its place
/// batch.wait(&sent)?; // and what was sent may be written again
/// stream.submit(&mut batch)?;
/// let graph = capture.end()?;
/// for round in 1..=10 {
///     buffer.memory().write(0, &[round; 64])?;
///     graph.launch(&stream)?;
///     stream.synchronize(ten)?;
///     assert_eq!(buffer.memory().to_vec()[64..], [round; 64]);
/// }
/// # comm.finalize(ten)
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Channel(Arc<Inner>);

#[derive(Debug)]
struct Inner {
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
    link: Arc<Link>,
    qp: Qp,
    /// Of both directions: the link knows of them.
    _ends: Arc<Ends>,
    /// Where what comes goes: the places of messages, or nowhere for credits.
    places: Vec<Option<Sge>>,
    posted: Mutex<Posted>,
}

#[derive(Debug)]
struct Posted {
    /// The place that the next receive is for.
    next: usize,
    /// Keys of what the device reads and writes, and what keeps it registered.
    buffers: Keepers,
}

impl Half {
    fn new(
        link: &Arc<Link>,
        qp: &Qp,
        ends: &Arc<Ends>,
        places: Vec<Option<Sge>>,
        buffers: Keepers,
    ) -> Arc<Self> {
        let posted = Mutex::new(Posted { next: 0, buffers });
        Arc::new(Self { link: link.clone(), qp: qp.clone(), _ends: ends.clone(), places, posted })
    }

    /// Keeps a buffer registered.
    fn keep(&self, buffer: &Mr) {
        self.posted.lock().buffers.entry(buffer.lkey()).or_insert_with(|| buffer.guard());
    }

    /// Adds a message, or credit for one, to a batch; a message takes a credit.
    fn send(
        self: &Arc<Self>,
        batch: &mut Batch,
        sges: &[Sge],
        takes_credit: bool,
    ) -> gdsync::Result<Completion> {
        self.replenish()?;
        let send = self.qp.prepare_send(&[SendWr::send(sges)])?;
        if takes_credit {
            batch.post_wait(self.qp.prepare_wait_recv()?);
        }
        self.repeat(batch);
        Ok(batch.post(send))
    }

    /// Has receives posted before each launch of a graph that the batch is recorded for.
    fn repeat(self: &Arc<Self>, batch: &mut Batch) {
        let this: Arc<dyn Replenish> = self.clone();
        batch.before_launches(&this);
    }

    fn failed(&self, operation: &'static str, source: gdsync::Error) -> Error {
        Error::Message { rank: self.link.rank, operation, source }
    }
}

impl Drop for Half {
    fn drop(&mut self) {
        let takes_credits = matches!(self.places[..], [None]);
        let is_sending = takes_credits && self.qp.wait_all_sends(Duration::ZERO).is_err();
        let mut buffers = mem::take(&mut self.posted.get_mut().buffers);
        if !is_sending {
            buffers.clear();
        }
        self.link.retire(&self.qp, buffers);
    }
}

impl Replenish for Half {
    fn replenish(&self) -> gdsync::Result<()> {
        let mut posted = self.posted.lock();
        // First: what is complete now has taken its receive.
        self.qp.send_cq().drain();
        while let Some(place) = self.places.get(posted.next) {
            match self.qp.post_recv(&[RecvWr { wr_id: 0, sges: place.as_slice() }]) {
                Ok(_) => posted.next = (posted.next + 1) % self.places.len(),
                Err(gdsync::Error::QueueFull { .. }) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Channel {
    /// The rank at the other end.
    pub fn rank(&self) -> usize {
        self.0.out.link.rank
    }

    /// Adds a message to a batch: it leaves when the stream gets there and the other rank's stream has freed the place for it, with
    /// what the buffer holds then. [`Batch::wait`] for what is returned holds the stream until the buffer may be written again.
    ///
    /// A batch that is dropped instead takes it back, the newest first. All of a channel's messages to one side are in one stream at
    /// a time.
    ///
    /// # Errors
    /// [`Error::Device`] for a range outside the buffer; [`Error::Message`] with the reason: the other rank has no place, or none
    /// that is so large, the connection broke, or more messages are under way than [`Builder::depth`](crate::Builder::depth) says.
    /// A [launch](gdsync::stream::Graph::launch) is refused for the last two as well.
    pub fn send_in_batch(
        &self,
        batch: &mut Batch,
        buffer: &Registration,
        range: Range<usize>,
    ) -> Result<Completion> {
        const OPERATION: &str = "send through a channel";
        let Inner { out, room, .. } = &*self.0;
        let sge = buffer.sge(out.link.near, &range)?;
        if room.is_none_or(|room| u64::from(sge.len) > room) {
            let source = gdsync::Error::InvalidArgument {
                what: "the message",
                value: format!("{} bytes", sge.len),
                expected: "one that fits into the smallest place that the other rank gave Communicator::channels",
            };
            return Err(out.failed(OPERATION, source));
        }
        out.keep(buffer.on(out.link.near));
        out.send(batch, &[sge], true).map_err(|source| out.failed(OPERATION, source))
    }

    /// Tells the other rank, when the stream gets there, that the next place is free: the message for it may come. Places are
    /// free once in a row, from the first one on; of those that are, there are never more than there are places.
    ///
    /// # Errors
    /// As [`Channel::send_in_batch`].
    pub fn post_recv_in_batch(&self, batch: &mut Batch) -> Result<()> {
        const OPERATION: &str = "receive through a channel";
        let into = &self.0.into;
        if into.places.is_empty() {
            let source = gdsync::Error::InvalidArgument {
                what: "the places of this rank",
                value: "none".into(),
                expected: "at least one, given to Communicator::channels",
            };
            return Err(into.failed(OPERATION, source));
        }
        into.send(batch, &[], false).map(drop).map_err(|source| into.failed(OPERATION, source))
    }

    /// Holds the stream until the next message is in its place: they come into the places in a row. What is returned says how long it
    /// was.
    ///
    /// # Errors
    /// As [`Channel::send_in_batch`].
    pub fn wait_recv_in_batch(&self, batch: &mut Batch) -> Result<Completion> {
        let into = &self.0.into;
        let wait = into.replenish().and_then(|()| batch.wait_recv(&into.qp));
        into.repeat(batch);
        wait.map_err(|source| into.failed("wait for a message of a channel", source))
    }

    /// As [`Channel::send_in_batch`], on a stream.
    ///
    /// # Errors
    /// As [`Channel::send_in_batch`], and inside [`Error::Message`] the stream's refusals.
    pub fn send_on_stream(
        &self,
        stream: &Stream,
        buffer: &Registration,
        range: Range<usize>,
    ) -> Result<Completion> {
        self.on(stream, |batch| self.send_in_batch(batch, buffer, range))
    }

    /// As [`Channel::post_recv_in_batch`], on a stream.
    ///
    /// # Errors
    /// As [`Channel::send_on_stream`].
    pub fn post_recv_on_stream(&self, stream: &Stream) -> Result<()> {
        self.on(stream, |batch| self.post_recv_in_batch(batch))
    }

    /// As [`Channel::wait_recv_in_batch`], on a stream.
    ///
    /// # Errors
    /// As [`Channel::send_on_stream`].
    pub fn wait_recv_on_stream(&self, stream: &Stream) -> Result<Completion> {
        self.on(stream, |batch| self.wait_recv_in_batch(batch))
    }

    fn on<T>(&self, stream: &Stream, add: impl FnOnce(&mut Batch) -> Result<T>) -> Result<T> {
        let mut batch = Batch::new();
        let added = add(&mut batch)?;
        stream.submit(&mut batch).map_err(|source| self.0.out.failed("channel on stream", source))?;
        Ok(added)
    }
}

/// What a rank tells the others of a channel.
struct Card {
    /// The other end.
    rank: u64,
    out: QpAddress,
    into: QpAddress,
    /// Bytes of the smallest place, and 1; 0 where there is none.
    room: u64,
}

impl Card {
    const BYTES: usize = 2 * QpAddress::BYTES + 16;

    fn to_bytes(&self) -> Vec<u8> {
        let numbers = [self.rank, self.room].map(u64::to_be_bytes);
        [numbers.as_flattened(), &self.out.to_bytes(), &self.into.to_bytes()].concat()
    }

    fn from_bytes(bytes: &[u8; Self::BYTES]) -> gdsync::Result<Self> {
        let (rank, rest) = bytes.split_first_chunk().expect("72 bytes hold 8");
        let (room, rest) = rest.split_first_chunk().expect("64 bytes hold 8");
        let (out, rest) = rest.split_first_chunk().expect("56 bytes hold 28");
        let into = rest.first_chunk().expect("28 bytes are left");
        let [rank, room] = [rank, room].map(|number| u64::from_be_bytes(*number));
        Ok(Self { rank, out: QpAddress::from_bytes(out)?, into: QpAddress::from_bytes(into)?, room })
    }
}

/// Queue pairs that are not connected yet.
struct Fresh {
    link: Arc<Link>,
    ends: Arc<Ends>,
    places: Vec<Sge>,
    buffers: Keepers,
}

impl Fresh {
    fn card(&self) -> Card {
        let smallest = self.places.iter().map(|place| u64::from(place.len) + 1).min();
        let (out, into) = (self.ends.send.address(), self.ends.recv.address());
        Card { rank: self.link.rank as u64, out, into, room: smallest.unwrap_or(0) }
    }

    /// Connects with the end of the other rank, and posts the first receives.
    fn connect(self, own: usize, theirs: &Card) -> gdsync::Result<Channel> {
        let Self { link, ends, places, buffers } = self;
        ends.name_ranks(own, link.rank);
        ends.send.connect(theirs.into)?;
        ends.recv.connect(theirs.out)?;
        link.accompany(&ends);
        let out = Half::new(&link, &ends.send, &ends, vec![None], Keepers::new());
        let places = places.into_iter().map(Some).collect();
        let into = Half::new(&link, &ends.recv, &ends, places, buffers);
        out.replenish()?;
        into.replenish()?;
        Ok(Channel(Arc::new(Inner { out, into, room: theirs.room.checked_sub(1) })))
    }
}

impl Communicator {
    /// Makes channels, each to a rank and with the places for what comes from there, in the order of the list. Every rank must call
    /// this, also with an empty list; both ranks of a channel must have it in theirs. Of several between the same ranks the first ones belong
    /// together, and so on. Without places a channel only sends.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`]; [`Error::Device`] for a range outside a registration, for more places than half of
    /// [`Builder::depth`](crate::Builder::depth), and from the device, whose queues must hold three times as many receives;
    /// [`Error::Bootstrap`] names a rank that is gone, could not make its channels, or has other ones in its list,
    /// [`Error::Deadline`] one that is late.
    pub fn channels(&self, wanted: &[(usize, &[Piece<'_>])], timeout: Duration) -> Result<Vec<Channel>> {
        let deadline = Deadline::after(timeout);
        let mut bootstrap = self.0.bootstrap.lock();
        let fresh = wanted.iter().map(|(rank, places)| self.fresh(*rank, places)).collect::<Result<Vec<_>>>();
        let mine: Option<Vec<_>> = fresh.as_ref().ok().map(|all| all.iter().map(Fresh::card).collect());
        // Without the first byte it has failed.
        let record = mine.map_or_else(Vec::new, |cards| {
            [vec![1], cards.iter().flat_map(Card::to_bytes).collect()].concat()
        });
        let records = bootstrap.allgather(&record, deadline.remaining())?;
        // Also a rank that has failed tells the others so below, and one that has not waits for that.
        let connected = fresh.and_then(|fresh| self.connect_channels(fresh, &records));
        agree(&mut **bootstrap, connected, "its channels", &deadline)
    }

    fn fresh(&self, rank: usize, places: &[Piece<'_>]) -> Result<Fresh> {
        let link = self.peer(rank)?.link.clone();
        let depth = self.0.builder.queue_depth();
        if places.len() > depth / 2 {
            return Err(Error::Device(gdsync::Error::InvalidArgument {
                what: "places of a channel",
                value: places.len().to_string(),
                expected: "at most half of Builder::depth",
            }));
        }
        let buffers = places.iter().map(|(buffer, _)| buffer.on(link.near));
        let buffers = buffers.map(|buffer| (buffer.lkey(), buffer.guard())).collect();
        let places = places.iter().map(|(buffer, range)| buffer.sge(link.near, range));
        let places = places.collect::<Result<Vec<_>>>()?;
        let build = || {
            // Every send takes one place of its queue: no more fit than were asked for, but for a power of two.
            let queues = self.0.builder.queue_pair(self.0.plane(link.near).1).max_recv_wr(3 * depth);
            queues.max_send_sge(1).max_recv_sge(1).max_inline(0).build()
        };
        let ends = Arc::new(Ends { send: build()?, recv: build()? });
        Ok(Fresh { link, ends, places, buffers })
    }

    /// Connects each with its other end.
    fn connect_channels(&self, fresh: Vec<Fresh>, records: &[Vec<u8>]) -> Result<Vec<Channel>> {
        let cards = records.iter().enumerate().map(|(rank, record)| cards_for(self.rank(), rank, record));
        let mut cards = cards.collect::<Result<Vec<_>>>()?;
        let other = |rank| {
            let what = "it has not as many channels with this rank in its list as this one with it";
            Error::bootstrap(format!("rank {rank}"), what, "let both ranks of each channel ask for it")
        };
        let connect = |fresh: Fresh| {
            let rank = fresh.link.rank;
            let theirs = cards[rank].next().ok_or_else(|| other(rank))?;
            let failed = |source| Error::Message { rank, operation: "connect a channel", source };
            fresh.connect(self.rank(), &theirs).map_err(failed)
        };
        let channels = fresh.into_iter().map(connect).collect::<Result<Vec<_>>>()?;
        match cards.iter_mut().position(|rest| rest.next().is_some()) {
            Some(rank) => Err(other(rank)),
            None => Ok(channels),
        }
    }
}

/// What rank `from` has told of its channels with `rank`, in order.
fn cards_for(rank: usize, from: usize, record: &[u8]) -> Result<std::vec::IntoIter<Card>> {
    let wrong = |what| Error::bootstrap(format!("rank {from}"), what, "see the error of that rank");
    let (_, cards) = record.split_first().ok_or_else(|| wrong("it could not make its channels"))?;
    let (cards, rest) = cards.as_chunks::<{ Card::BYTES }>();
    if !rest.is_empty() {
        return Err(wrong("its list of channels has a wrong form"));
    }
    let cards = cards.iter().map(Card::from_bytes).collect::<gdsync::Result<Vec<_>>>()?;
    Ok(cards.into_iter().filter(|card| card.rank == rank as u64).collect::<Vec<_>>().into_iter())
}
