//! Messages with tags, as MPI has them: a layer on [`Communicator`], which costs nothing where it is not used.
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
//! let seven = tagged.irecv(&buffer, 1024..2048, peer, 7)?; // what has tag 7 and is not for the first
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
//! the logarithm of how many there are.
//!
//! # Short and long messages
//!
//! Up to 4072 bytes of host memory are sent at once, behind a header, and a send is complete when they have left. A rank keeps up
//! to 256 such messages of each other rank (1 MiB) that no receive has taken. All others (longer ones, those of a GPU, and short
//! ones beyond 256) are announced, in a few words; when a receive has matched, their payload goes from the sender's buffer into the
//! receiver's, with no copy between, and the send is complete then. So ranks that only send fill no memory, but for the announcements
//! of up to 65536 sends under way between two ranks; one more is refused.
//!
//! # Who moves messages along
//!
//! Calls do; there is no thread for it. A call that starts a message only starts it. [`Request::wait`] and [`Request::test`],
//! probes and [`Tagged::progress`] move along all messages of the rank, of all threads. None but [`Request::wait`] and
//! [`Tagged::destroy`] blocks, so ranks may flood each other before they receive, and a wait for one message holds up no other. But a
//! rank that calls nothing for long keeps others waiting who send it announced messages.
//!
//! # Ranks that die
//!
//! fail what is under way with them. A receive from [`Source::Any`] goes on as long as another rank might send; it fails when all
//! others are gone. What had come from a rank whole can be received afterwards. [`Tagged::shrink`] goes on without them.
//!
//! # Memory of GPUs
//!
//! Messages from it are always announced. A short message of host memory can be received into it where the CPU reaches it
//! ([`Memory::is_mapped`](gdsync::memory::Memory::is_mapped)); where not, that receive alone fails.

mod engine;
mod header;
mod matching;
mod peer;
mod probe;
mod request;

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::thread::yield_now;
use std::time::Duration;

use parking_lot::Mutex;

pub use matching::{Source, Tag};
pub use probe::Message;
pub use request::{Request, Status};

use crate::collective::{check_range, invalid};
use crate::communicator::{Communicator, Registration};
use crate::deadline::Deadline;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::link::SILENCE;
use crate::shrink::Shrunk;
use engine::Engine;
use matching::Key;
use peer::Channels;
use request::{Incoming, Outgoing};

/// The tagged messages of a communicator: see [the module](self). Clones share it; any thread may use it.
///
/// It has connections of its own. Its messages never meet those of the communicator, nor those of another `Tagged`, and memory
/// registered with the communicator is for both.
#[derive(Clone, Debug)]
pub struct Tagged(Arc<Shared>);

/// What requests need of it.
pub(crate) struct Shared {
    messages: Communicator,
    payload: Communicator,
    engine: Mutex<Engine>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.messages.rank(), self.messages.size())
    }
}

impl Shared {
    /// Runs device work, as every wait does: without it messages would wait for a thread of the device. Returns whether there was
    /// any.
    fn progress(&self) -> bool {
        let inner = &self.messages.0;
        let near = inner.near.as_ref().is_some_and(|near| near.context.progress());
        inner.context.progress() || near
    }

    /// Moves all messages along. Returns whether there was device work.
    fn look(&self) -> bool {
        let helped = self.progress();
        self.engine.lock().look();
        helped
    }

    /// Asks ranks that are silent whether they are there.
    fn tend(&self) {
        self.messages.progress();
        self.payload.progress();
    }
}

impl Tagged {
    /// Makes connections for tagged messages between the ranks of `comm`. Every rank must call this, for all that it makes in the
    /// same order.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] names a rank that is gone, [`Error::Deadline`] one that is late; [`Error::Device`] from the device.
    pub fn new(comm: &Communicator, timeout: Duration) -> Result<Self> {
        let deadline = Deadline::after(timeout);
        let builder = &comm.0.builder;
        let messages = builder.clone().at_least_pieces(2).beside(comm, deadline)?;
        // What is wrong with a rank is seen by the others.
        let payload = builder.clone().watch(false).beside(comm, deadline)?;
        let engine = Engine::new(Channels::new(messages.clone(), payload.clone(), builder.queue_depth())?)?;
        Ok(Self(Arc::new(Shared { messages, payload, engine: Mutex::new(engine) })))
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
        self.0.messages.peer(rank)?;
        check_range(buffer, &range)?;
        if range.len() > gdsync::mlx5::MAX_MESSAGE as usize {
            return Err(invalid("the length of the message", range.len(), "at most 1 GiB"));
        }
        let (shared, outcome) = (self.0.clone(), Arc::new(OnceLock::new()));
        let status = Status { rank, tag, bytes: range.len() };
        let outgoing = Outgoing { outcome: outcome.clone(), buffer: buffer.clone(), range, status };
        shared.engine.lock().send(rank, outgoing)?;
        Ok(Request { shared, outcome, rank: Some(rank), place: None })
    }

    /// Starts a receive into the bytes `range` of `buffer`, of a message from a rank or [`Source::Any`], with a tag or
    /// [`Tag::Any`]. A message that is longer fails the receive, with [`Error::Truncated`], and nothing else.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`]; [`Error::Device`] for a range outside the buffer; [`Error::Message`] where nobody is left who might
    /// send.
    pub fn irecv(
        &self,
        buffer: &Registration,
        range: Range<usize>,
        source: impl Into<Source>,
        tag: impl Into<Tag>,
    ) -> Result<Request> {
        let key = self.key(source.into(), tag.into())?;
        check_range(buffer, &range)?;
        let (shared, outcome) = (self.0.clone(), Arc::new(OnceLock::new()));
        let incoming = Incoming { outcome: outcome.clone(), buffer: buffer.clone(), range };
        let place = shared.engine.lock().receive(key, incoming)?;
        Ok(Request { shared, outcome, rank: key.source(), place })
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
        requests.into_iter().map(|request| request.wait(deadline.remaining())).collect()
    }

    /// Moves messages along, and asks ranks that are silent whether they are there. Only needed by programs that neither wait nor
    /// test for long.
    pub fn progress(&self) {
        self.0.look();
        self.0.tend();
    }

    /// Ends what is under way with a rank, and all that would be: it notices as if this rank had died.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`].
    pub fn give_up(&self, rank: usize) -> Result<()> {
        self.0.messages.give_up(rank)?;
        self.0.engine.lock().look_at(rank);
        Ok(())
    }

    /// Makes connections for tagged messages between the ranks that [`Communicator::shrink`] has left, as [`Tagged::new`] does. All
    /// of them must call this.
    ///
    /// Here all that is under way ends with an error, also between ranks that are left: they number each other anew, and need not
    /// agree on what was to come. What had come whole can be received here afterwards; of complete short sends from a rank whose
    /// connection had ended before, the oldest 32 at most.
    ///
    /// # Errors
    /// As [`Tagged::new`].
    pub fn shrink(&self, left: &Shrunk, timeout: Duration) -> Result<Self> {
        for rank in 0..self.0.messages.size() {
            self.0.engine.lock().drain(rank);
            self.give_up(rank)?;
        }
        Self::new(&left.communicator, timeout)
    }

    /// Waits until all that this rank has sent, or has begun to receive, is through, and then for all ranks, which must call this
    /// too. Receives that no message has matched end nowhere: cancel them before.
    ///
    /// # Errors
    /// [`Error::Deadline`]; as [`Communicator::barrier`].
    pub fn destroy(self, timeout: Duration) -> Result<()> {
        let deadline = Deadline::after(timeout);
        let mut tended = Duration::ZERO;
        loop {
            self.0.look();
            if self.0.engine.lock().is_idle() {
                break;
            }
            let waited = deadline.elapsed();
            if waited >= tended + SILENCE {
                self.0.tend();
                tended = waited;
            }
            if deadline.is_over() {
                return Err(
                    deadline.error("waiting for the tagged messages that this rank has sent".to_owned())
                );
            }
            yield_now();
        }
        self.0.messages.barrier(deadline.remaining())
    }

    fn key(&self, source: Source, tag: Tag) -> Result<Key> {
        if let Source::Rank(rank) = source {
            self.0.messages.peer(rank)?;
        }
        Ok(Key::new(source, tag))
    }
}
