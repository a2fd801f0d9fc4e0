//! Messages with tags and wildcards, as in MPI: a layer on [`Communicator`], which costs nothing if it is not used.
//!
//! ```no_run
//! use std::time::Duration;
//! use gdsync::memory::Memory;
//! use mp::Communicator;
//! use mp::tagged::{Source, Tag, Tagged};
//!
//! # fn main() -> mp::Result<()> {
//! let second = Duration::from_secs(1);
//! let comm = Communicator::builder().spawn(2).init()?;
//! let peer = 1 - comm.rank();
//! let tagged = Tagged::new(&comm, second)?; // by all ranks
//! let buffer = comm.register(&Memory::alloc(4096)?)?;
//!
//! let any = tagged.irecv(&buffer, 0..1024, Source::Any, Tag::Any)?;
//! let seven = tagged.irecv(&buffer, 1024..2048, peer, 7)?; // the first with tag 7 that `any` does not take
//! let sent = [9, 7].map(|tag| tagged.isend(&buffer, 2048..2056, peer, tag));
//! assert_eq!(any.wait(second)?.tag, 9);
//! assert_eq!(seven.wait(second)?.bytes, 8);
//! for sent in sent {
//!     sent?.wait(second)?;
//! }
//! tagged.destroy(second)?;
//! # comm.finalize(second)
//! # }
//! ```
//!
//! # Order
//!
//! A message goes to the oldest receive that takes it, and a receive gets the oldest message that it takes: of two messages
//! between the same ranks that one receive would take, the one sent first is received first. The time to find either grows with
//! the logarithm of their number.
//!
//! # Eager and rendezvous
//!
//! Up to 4072 bytes of host memory are sent eagerly, behind a header; the send is complete when they have left. A rank keeps up
//! to 256 such messages of each other rank (1 MiB) that no receive has matched; which are matched, the sender learns by a later
//! message of the same `Tagged`. All others (longer ones, those of a GPU, and short ones beyond the 256 as far as the sender knows)
//! are announced by a request to send; when a receive has matched, the receiver reads the payload from the sender's buffer into
//! its own by RDMA READ on the same queue pair, and finishes the send. So ranks that only send fill no memory except for the
//! announcements of up to 65536 sends under way between two ranks; one more is refused.
//!
//! Memory from the registration cache, which peers may not read, is registered again for each such message. GPU memory that the
//! device does not reach is copied to host memory first.
//!
//! # Progress
//!
//! Calls make progress; there is no thread for it. A call that starts a message only starts it. [`Request::wait`] and
//! [`Request::test`], probes and [`Tagged::progress`] move all messages of the rank along, of all threads. Only
//! [`Request::wait`] and [`Tagged::destroy`] block, so ranks may flood each other before they receive, and a wait for one message
//! holds up no other. But a rank that calls nothing for long keeps ranks waiting that send it announced messages.
//!
//! # Dead ranks
//!
//! The death of a rank fails what is under way with it. A receive from [`Source::Any`] goes on as long as another rank might send;
//! it fails when all others are lost. Messages that had arrived whole can be received afterwards. [`Tagged::shrink`] goes on
//! without dead ranks.
//!
//! # GPU memory
//!
//! Messages from it are always announced. A short message of host memory can be received into it where the CPU reaches it
//! ([`Memory::is_mapped`](gdsync::memory::Memory::is_mapped)); where not, that receive alone fails.

mod engine;
mod matching;

use std::fmt;
use std::hint::spin_loop;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gdsync::shm::back_off;
use parking_lot::Mutex;

pub use matching::{Source, Tag};

use crate::builder::{CommunicatorBuilder, Shrunk};
use crate::communicator::Communicator;
use crate::error::{Error, Result, rank_or_any};
use crate::exchange::CommonCall;
use crate::overlap::ReceiveClaims;
use crate::registration::Registration;
use crate::request::Status;
use crate::transport::SILENCE;
use crate::wait::Deadline;
use engine::{Connections, Engine, Incoming, Outcome, Outgoing, Unexpected, finish, status_of};
use matching::{Key, Place};

/// Polls between two reads of the clock, which take as long as a message.
const POLLS: usize = 64;

/// The tagged messages of a communicator: see [the module](self). Clones share it; any thread may use it.
///
/// It has queue pairs of its own: its messages do not mix with those of the communicator or of another `Tagged`. Memory registered
/// with the communicator is for both.
#[derive(Clone, Debug)]
pub struct Tagged(Arc<Shared>);

/// The part that requests hold.
struct Shared {
    /// The communicator of the application.
    whole: Communicator,
    comm: Communicator,
    engine: Mutex<Engine>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.comm.rank(), self.comm.size())
    }
}

impl Shared {
    /// Moves all messages along. Returns whether there was device work.
    fn progress(&self) -> bool {
        let has_worked = self.comm.run_devices();
        self.engine.lock().progress();
        has_worked
    }

    /// Claims the memory of a receive; refuses memory of another one.
    fn claim(
        &self,
        buffer: &Registration,
        range: &Range<usize>,
        rank: Option<usize>,
    ) -> Result<ReceiveClaims> {
        match &self.comm.0.outstanding {
            Some(outstanding) => outstanding.claim(&[(buffer, range.clone())], rank, |_| _ = self.progress()),
            None => Ok(ReceiveClaims::new()),
        }
    }
}

impl Tagged {
    /// Connects the ranks of `comm` for tagged messages. Every rank must call this, in the same order if it makes several.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] names a rank that is gone, [`Error::Deadline`] one that is late; [`Error::Device`] from the device.
    pub fn new(comm: &Communicator, timeout: impl Into<Option<Duration>>) -> Result<Self> {
        let (_call, deadline) = (CommonCall::TaggedNew.enter(), Deadline::after(comm.limit(timeout)));
        let mut builder = CommunicatorBuilder(comm.0.settings.clone());
        // A header, and the payload.
        builder.0.queues.max_pieces = builder.0.queues.max_pieces.max(2);
        let counted = comm.0.peers.clone();
        let (whole, comm) =
            (comm.clone(), builder.build_beside(comm, deadline)?.with_timeout(comm.timeout()));
        // The engine never waits: it starts later what finds a full queue.
        let engine = Engine::new(Connections::new(comm.with_timeout(Duration::ZERO))?, counted)?;
        Ok(Self(Arc::new(Shared { whole, comm, engine: Mutex::new(engine) })))
    }

    /// Starts a send of the bytes `range` of `buffer` to a rank.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`]; [`Error::Device`] for a range outside the buffer, or of more than 1 GiB; [`Error::Message`] with the
    /// reason: the rank is gone, or 65536 sends to it are under way.
    pub fn isend(
        &self,
        buffer: &Registration,
        range: Range<usize>,
        rank: usize,
        tag: u64,
    ) -> Result<Request> {
        self.0.whole.open_peer(rank, "tagged send")?;
        buffer.check_range(&range)?;
        if range.len() > gdsync::mlx5::MAX_MESSAGE as usize {
            let (what, value) = ("the length of the message", range.len().to_string());
            let expected = "at most 1 GiB";
            return Err(Error::Device(gdsync::Error::InvalidArgument { what, value, expected }));
        }
        let (shared, outcome) = (self.0.clone(), Arc::new(OnceLock::new()));
        let status = Status { rank, tag, bytes: range.len() };
        shared.comm.while_full(|| {
            let outgoing = Outgoing::new(outcome.clone(), buffer.clone(), range.clone(), status);
            let sent = shared.engine.lock().send(rank, outgoing);
            sent.inspect_err(|_| _ = shared.progress())
        })?;
        Ok(Request { shared, outcome, rank: Some(rank), tag: tag.into(), is_send: true, place: None })
    }

    /// Starts a receive into the bytes `range` of `buffer`, of a message from a rank or [`Source::Any`], with a tag or
    /// [`Tag::Any`]. A message that is longer fails the receive, with [`Error::Truncated`], and nothing else.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`]; [`Error::Device`] for a range outside the buffer; [`Error::OverlappingReceives`];
    /// [`Error::Message`] if all possible senders are lost.
    pub fn irecv(
        &self,
        buffer: &Registration,
        range: Range<usize>,
        source: impl Into<Source>,
        tag: impl Into<Tag>,
    ) -> Result<Request> {
        self.0.whole.refuse_finalized("a tagged receive")?;
        let tag = tag.into();
        let key = self.key(source.into(), tag)?;
        buffer.check_range(&range)?;
        let _claims = self.0.claim(buffer, &range, key.source())?;
        let (shared, outcome) = (self.0.clone(), Arc::new(OnceLock::new()));
        let incoming = Incoming { outcome: outcome.clone(), buffer: buffer.clone(), range, _claims };
        let place = shared.engine.lock().receive(key, incoming)?;
        Ok(Request { shared, outcome, rank: key.source(), tag, is_send: false, place })
    }

    /// Blocks until all messages are complete, or one has failed.
    ///
    /// # Errors
    /// The error of the first that fails, as [`Request::test`]; [`Error::Deadline`]: the timeout is for all together.
    pub fn wait_all<'a>(
        &self,
        requests: impl IntoIterator<Item = &'a Request>,
        timeout: impl Into<Option<Duration>>,
    ) -> Result<Vec<Status>> {
        let deadline = Deadline::after(self.0.comm.limit(timeout));
        let wait = |request: &Request| request.wait(deadline.remaining());
        requests.into_iter().map(|request| wait(request).map_err(|e| e.of_waits(deadline.limit()))).collect()
    }

    /// Moves messages along, and asks silent ranks whether they are alive. Only needed by programs that neither wait nor test for
    /// long.
    pub fn progress(&self) {
        self.0.progress();
        self.0.comm.progress();
    }

    /// Ends what is under way with a rank; nothing more can be sent to it or received from it. The rank notices as if this one had
    /// died.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`].
    pub fn give_up(&self, rank: usize) -> Result<()> {
        self.0.comm.give_up(rank)?;
        self.0.engine.lock().progress_with(rank);
        Ok(())
    }

    /// Connects the surviving ranks of [`Communicator::shrink`] for tagged messages, as [`Tagged::new`]. All of them must call this.
    ///
    /// All that is under way in this one ends with an error, also between survivors. Messages that had arrived whole can be received
    /// from this one afterwards; of complete short sends from a rank whose connection had ended before, the oldest 32 at most.
    ///
    /// # Errors
    /// [`Error::Bootstrap`], [`Error::Deadline`] and [`Error::Device`] as [`Tagged::new`].
    pub fn shrink(&self, survivors: &Shrunk, timeout: impl Into<Option<Duration>>) -> Result<Self> {
        for rank in 0..self.0.comm.size() {
            self.0.engine.lock().drain(rank);
            self.give_up(rank)?;
        }
        Self::new(&survivors.communicator, timeout)
    }

    /// Waits until all that this rank has sent, or has begun to receive, is complete, and then for all ranks, which must call this
    /// too. Cancel receives that no message has matched before.
    ///
    /// # Errors
    /// [`Error::Deadline`], also for a rank that is late; [`Error::Bootstrap`] names a rank that is gone; [`Error::Unfinished`] names
    /// messages that have come and were not received.
    pub fn destroy(self, timeout: impl Into<Option<Duration>>) -> Result<()> {
        let _call = CommonCall::TaggedDestroy.enter();
        self.0.whole.refuse_finalized("the end of tagged messages")?;
        let deadline = Deadline::after(self.0.comm.limit(timeout));
        self.progress_until(&deadline, Engine::is_idle, |engine| {
            let announced = list(&engine.announced(), "to");
            let what = format!("waiting until the tagged messages of this rank are received ({announced})");
            (what, "see that their ranks receive them (Tagged::irecv)")
        })?;
        let left = self.0.engine.lock().left();
        let left = self.0.comm.exchange(&left, deadline.remaining())?;
        // Messages that have left the other ranks may still be in the device here.
        self.progress_until(
            &deadline,
            |engine| engine.has_all(&left),
            |_| {
                (
                    "waiting for tagged messages that have left their ranks".into(),
                    "see whether a rank or the device is stuck",
                )
            },
        )?;
        let engine = self.0.engine.lock();
        match &engine.unreceived()[..] {
            [] => Ok(()),
            left => {
                left.iter().for_each(|status| engine.count(status));
                let what =
                    format!("tagged messages not received here ({}): {}", left.len(), list(left, "from"));
                Err(Error::Unfinished { what, after: deadline.elapsed() })
            }
        }
    }

    /// Moves messages along until `is_done`; `late` says what is awaited, and what to do.
    fn progress_until(
        &self,
        deadline: &Deadline,
        is_done: impl Fn(&Engine) -> bool,
        late: impl FnOnce(&Engine) -> (String, &'static str),
    ) -> Result<()> {
        let mut tended = Duration::ZERO;
        loop {
            self.0.progress();
            if is_done(&self.0.engine.lock()) {
                return Ok(());
            }
            let waited = deadline.elapsed();
            if waited >= tended + SILENCE {
                self.0.comm.progress();
                tended = waited;
            }
            if deadline.is_over() {
                let (what, fix) = late(&self.0.engine.lock());
                return Err(deadline.error(what, fix));
            }
            back_off(waited, deadline.remaining());
        }
    }

    fn key(&self, source: Source, tag: Tag) -> Result<Key> {
        if let Source::Rank(rank) = source {
            self.0.comm.peer(rank)?;
        }
        Ok(Key::new(source, tag))
    }
}

/// The first few of many messages.
fn list(all: &[Status], preposition: &str) -> String {
    const SHOWN: usize = 4;
    let one = |Status { rank, tag, bytes }: &Status| {
        format!("{bytes} bytes with tag {tag} {preposition} rank {rank}")
    };
    let shown: Vec<_> = all.iter().take(SHOWN).map(one).collect();
    format!("{}{}", shown.join(", "), if all.len() > SHOWN { ", ..." } else { "" })
}

/// A message taken by [`Tagged::improbe`], which no receive gets. Dropped without a receive it returns to its place among the others.
#[derive(Debug)]
#[must_use = "dropped, the message returns to its place"]
pub struct Message {
    shared: Arc<Shared>,
    status: Status,
    arrived: Option<Unexpected>,
}

impl Message {
    /// Its sender, tag and length.
    pub fn status(&self) -> Status {
        self.status
    }

    /// Starts to receive it into the bytes `range` of `buffer`.
    ///
    /// # Errors
    /// [`Error::Device`] for a range outside the buffer, [`Error::OverlappingReceives`]: the message returns to its place.
    pub fn irecv(mut self, buffer: &Registration, range: Range<usize>) -> Result<Request> {
        buffer.check_range(&range)?;
        let _claims = self.shared.claim(buffer, &range, Some(self.status.rank))?;
        let (shared, outcome) = (self.shared.clone(), Arc::new(OnceLock::new()));
        let incoming = Incoming { outcome: outcome.clone(), buffer: buffer.clone(), range, _claims };
        if let Some(arrived) = self.arrived.take() {
            shared.engine.lock().give(arrived, incoming);
        }
        let Status { rank, tag, .. } = self.status;
        Ok(Request { shared, outcome, rank: Some(rank), tag: tag.into(), is_send: false, place: None })
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        if let Some(arrived) = self.arrived.take() {
            self.shared.engine.lock().put_back(arrived);
        }
    }
}

impl Tagged {
    /// The message that a receive would get now, without taking it; `None` if there is none.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`]; [`Error::Message`] if all possible senders are lost.
    pub fn iprobe(&self, source: impl Into<Source>, tag: impl Into<Tag>) -> Result<Option<Status>> {
        let key = self.key(source.into(), tag.into())?;
        self.0.engine.lock().find(key)
    }

    /// As [`Tagged::iprobe`], and takes the message: no other receive gets it, and it can be received into as much memory as it
    /// needs.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`]; [`Error::Message`] if all possible senders are lost.
    pub fn improbe(&self, source: impl Into<Source>, tag: impl Into<Tag>) -> Result<Option<Message>> {
        let key = self.key(source.into(), tag.into())?;
        let arrived = self.0.engine.lock().take_out(key)?;
        let message =
            |arrived| Message { shared: self.0.clone(), status: status_of(&arrived), arrived: Some(arrived) };
        Ok(arrived.map(message))
    }
}

/// A tagged message under way. Dropping it detaches: the message goes on with later calls.
#[derive(Clone, Debug)]
#[must_use = "the message may be under way: wait for it before its memory is used again, or drop it with `_ =`"]
pub struct Request {
    shared: Arc<Shared>,
    outcome: Outcome,
    /// The rank at the other end, if it is known.
    rank: Option<usize>,
    tag: Tag,
    is_send: bool,
    /// Where it waits for a message, if it does.
    place: Option<Place>,
}

impl Request {
    fn known(&self) -> Option<Result<Status>> {
        self.outcome.get().cloned()
    }

    /// Whether the message is complete; `None` while it is under way. Moves messages along. The buffer of a complete send may be
    /// overwritten; the message need not have been received.
    ///
    /// # Errors
    /// [`Error::Message`] names the rank and why it failed; [`Error::Truncated`]; [`Error::Cancelled`].
    pub fn test(&self) -> Result<Option<Status>> {
        if self.outcome.get().is_none() {
            self.shared.progress();
        }
        self.known().transpose()
    }

    #[cold]
    fn late(&self, deadline: &Deadline) -> Error {
        let (kind, fix) = match self.is_send {
            true => ("send to", "see that the rank receives it (Tagged::irecv)"),
            false => (
                "receive from",
                "see that it is sent with that tag (Tagged::isend), by the same Tagged: the first, the second, ... that all ranks made",
            ),
        };
        let is_of = |status: &Status| self.rank.is_none_or(|rank| rank == status.rank);
        let other = (!self.is_send).then(|| self.shared.engine.lock().unreceived().into_iter().find(is_of));
        let other = other.flatten().map_or_else(String::new, |Status { rank, tag, .. }| {
            format!(" (rank {rank} has sent one with tag {tag}, which nobody receives)")
        });
        let rank = rank_or_any(self.rank);
        deadline.error(format!("tagged {kind} {rank} with {}{other}", self.tag), fix)
    }

    /// Blocks until the message is complete; `None` for the timeout of the communicator. Moves all messages of this rank along, also those
    /// of other requests.
    ///
    /// # Errors
    /// [`Error::Message`], [`Error::Truncated`] and [`Error::Cancelled`], as [`Request::test`]; [`Error::Deadline`] after
    /// `timeout`: the message goes on.
    pub fn wait(&self, timeout: impl Into<Option<Duration>>) -> Result<Status> {
        let deadline = Deadline::after(self.shared.comm.limit(timeout));
        let mut tended = Duration::ZERO;
        loop {
            let mut has_worked = false;
            for _ in 0..POLLS {
                if let Some(known) = self.known() {
                    return known;
                }
                self.shared.engine.lock().poll(self.rank);
                has_worked |= self.shared.comm.run_devices();
                spin_loop();
            }
            // Others may wait for this rank meanwhile.
            has_worked |= self.shared.progress();
            let waited = deadline.elapsed();
            if deadline.is_over() {
                return Err(self.late(&deadline));
            }
            if waited >= tended + SILENCE {
                self.shared.comm.progress();
                tended = waited;
            }
            if !has_worked {
                back_off(waited, deadline.remaining());
            }
        }
    }

    /// Cancels a receive that no message has matched, and returns whether it did: its buffer is free then, and the request ends with
    /// [`Error::Cancelled`].
    pub fn cancel(&self) -> bool {
        let receive = self.place.and_then(|place| self.shared.engine.lock().cancel(place));
        if let Some(receive) = &receive {
            finish(&receive.outcome, Err(Error::Cancelled));
        }
        receive.is_some()
    }
}
