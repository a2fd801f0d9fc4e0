//! Peer copies of channels: the sender's stream puts messages into the [`Inbox`] of the receiver's GPU; the receiver's stream tells of
//! free places in a word of the sender's GPU. Both count messages from 1.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use gdsync::cuda::{Flush, Gpu};
use gdsync::memory::{Memory, PeerMemory};
use gdsync::stream::{Batch, FreePlaces, Inbox, PeerInbox, StreamOrder, Ticket};
use gdsync::verbs::Qp;

use crate::communicator::Communicator;
use crate::error::Result;
use crate::exchange::take;
use crate::offer::{Offer, Reach, refuse_queues, zeroed};
use crate::path::NearPath;
use crate::registration::{Piece, Registration};

/// The memory of an end: the word of the free places that the other one has told of, and from here on the slots of the own places.
const SLOTS: usize = 64;

fn words_len(places: impl IntoIterator<Item = usize>) -> usize {
    SLOTS + Inbox::bytes(places)
}

/// Why a direction has no peer copies.
pub(super) type Reason = Cow<'static, str>;

/// What an end offers to the other one.
pub(super) struct Own {
    gpu: Option<Gpu>,
    words: Option<Memory>,
    /// Of the words, and of the places.
    offers: Vec<Offer>,
    places: Vec<(Memory, Range<usize>)>,
    exported: Vec<Memory>,
}

/// What the other end offers.
pub(super) struct Theirs {
    words: Offer,
    places: Vec<(Offer, usize)>,
}

/// What this end reaches of the other one, for messages to it and for messages from it.
pub(super) struct Reached {
    out: std::result::Result<(PeerMemory, Vec<PeerMemory>), Reason>,
    into: Reach,
}

impl Own {
    pub(super) fn new(comm: &Communicator, rank: usize, places: &[Piece<'_>]) -> Self {
        let near = comm.0.settings.near;
        let of_places = places.iter().find_map(|(buffer, _)| buffer.memory().gpu());
        let gpu = of_places.or(comm.0.settings.queues.gpu.as_ref()).cloned();
        let is_wanted = near != NearPath::Queues && comm.0.paths[rank].is_on_this_host();
        let words = gpu.as_ref().filter(|_| is_wanted).and_then(|gpu| {
            let made = zeroed(gpu, words_len(places.iter().map(|(_, range)| range.len())));
            made.inspect_err(|error| tracing::info!(%error, "no words for peer copies of a channel")).ok()
        });
        let mut exported = Vec::new();
        let mut offer = |memory: &Memory, range| {
            let (offer, memory) = match words {
                Some(_) => Offer::new(near, memory, &range),
                None => (Offer::none(near), None),
            };
            exported.extend(memory);
            offer
        };
        let of_words = words.as_ref().map_or_else(|| Offer::none(near), |words| offer(words, 0..words.len()));
        let of_places = places.iter().map(|(buffer, range)| offer(buffer.memory(), range.clone()));
        let offers = std::iter::once(of_words).chain(of_places).collect();
        let places = places.iter().map(|(buffer, range)| (buffer.memory().clone(), range.clone())).collect();
        Self { gpu, words, offers, places, exported }
    }

    /// The memory that it offers.
    pub(super) fn exported(&self) -> &[Memory] {
        &self.exported
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = (self.places.len() as u64).to_be_bytes().to_vec();
        self.offers.iter().for_each(|offer| bytes.extend(offer.to_bytes()));
        self.places.iter().for_each(|(_, range)| bytes.extend((range.len() as u64).to_be_bytes()));
        bytes
    }

    /// Opens what the other end offers.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) with [`NearPath::PeerCopies`] where GPU memory on this host is not reached.
    pub(super) fn reach(&self, comm: &Communicator, rank: usize, theirs: &Theirs) -> Result<Reached> {
        let gpu = self.gpu.as_ref();
        let open = |offer: &Offer, len| offer.open(comm, rank, gpu, len);
        let theirs_len = words_len(theirs.places.iter().map(|(_, len)| *len));
        let words = || match (open(&theirs.words, theirs_len), &self.words) {
            (Ok(_), None) => Err("the CPU of this rank does not reach its GPU memory".into()),
            (words, _) => words,
        };
        let out = match theirs.places.is_empty() {
            true => Err("the other rank has no places".into()),
            false => {
                let places: std::result::Result<Vec<_>, Reason> =
                    theirs.places.iter().map(|(offer, len)| open(offer, *len)).collect();
                words().and_then(|words| Ok((words, places?)))
            }
        };
        let into = match &self.offers[1..] {
            [] => Err("this rank has no places".into()),
            places if places.iter().all(Offer::is_open) => words(),
            _ => words().and(Err("a place of this rank is not in GPU memory of cudaMalloc".into())),
        };
        let has_to = |places: &mut dyn Iterator<Item = &Offer>| {
            let mut places = places.peekable();
            places.peek().is_some() && places.all(Offer::is_on_gpu)
        };
        let missing_out =
            out.as_ref().err().filter(|_| has_to(&mut theirs.places.iter().map(|(offer, _)| offer)));
        let missing = missing_out.or(into.as_ref().err().filter(|_| has_to(&mut self.offers[1..].iter())));
        if let Some(why) = missing.filter(|_| gpu.is_some() && comm.0.paths[rank].is_on_this_host()) {
            refuse_queues(comm, "the channel", rank, why)?;
        }
        Ok(Reached { out, into })
    }

    /// The ways of both directions, where both ends reach each other.
    pub(super) fn agree(
        self,
        comm: &Communicator,
        reached: Reached,
        theirs: Verdict,
        [out, into]: [&Qp; 2],
    ) -> gdsync::Result<[Way; 2]> {
        let other = || Reason::from("the other rank does not reach the GPU memory of this one");
        let (Some(words), ours) = (&self.words, reached.verdict()) else {
            let why = |of: Option<Reason>| Way::Queue(of.unwrap_or_else(other));
            return Ok([why(reached.out.err()), why(reached.into.err())]);
        };
        let sends = match reached.out {
            Ok((words_there, places)) if theirs.into => {
                Way::Out(Out(PeerInbox::new(out, words_there, SLOTS, places, words.word64(0)?)?))
            }
            reached => Way::Queue(reached.err().unwrap_or_else(other)),
        };
        let receives = match reached.into {
            Ok(words_there) if theirs.out => {
                let inbox = Inbox::new(into, &words.slice(SLOTS, words.len() - SLOTS)?, &self.places)?;
                Way::Into(Into {
                    free: FreePlaces::new(into, &inbox, words_there, 0)?,
                    inbox,
                    room: self.places.iter().map(|(_, range)| range.len()).max().unwrap_or(0),
                    needs_flush: words.gpu().is_some_and(|gpu| gpu.capabilities().flush != Flush::NotNeeded),
                })
            }
            reached => Way::Queue(reached.err().unwrap_or_else(other)),
        };
        if ours.out || ours.into {
            // The other rank may access it as long as it has the channel.
            comm.0.exports.lock().extend(self.exported);
        }
        Ok([sends, receives])
    }
}

impl Theirs {
    /// Reads what [`Own::to_bytes`] gave; `None` for anything else.
    pub(super) fn take(rest: &mut &[u8]) -> Option<Self> {
        let (count, behind) = rest.split_first_chunk()?;
        let count = usize::try_from(u64::from_be_bytes(*count)).ok()?;
        let len = count.checked_mul(Offer::BYTES + 8)?.checked_add(Offer::BYTES)?;
        let (mut own, behind) = behind.split_at_checked(len)?;
        *rest = behind;
        let words = Offer::from_bytes(&take(&mut own));
        let offers: Vec<_> = (0..count).map(|_| Offer::from_bytes(&take(&mut own))).collect();
        let len = |offer| Some((offer, usize::try_from(u64::from_be_bytes(take(&mut own))).ok()?));
        Some(Self { words, places: offers.into_iter().map(len).collect::<Option<_>>()? })
    }
}

/// What an end reaches, as it tells the other one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Verdict {
    out: bool,
    into: bool,
}

impl Verdict {
    pub(super) fn to_byte(self) -> u8 {
        u8::from(self.out) | u8::from(self.into) << 1
    }

    pub(super) fn from_byte(byte: u8) -> Self {
        Self { out: byte & 1 != 0, into: byte & 2 != 0 }
    }
}

impl Reached {
    pub(super) fn verdict(&self) -> Verdict {
        Verdict { out: self.out.is_ok(), into: self.into.is_ok() }
    }
}

/// What moves the messages of a direction.
#[derive(Debug)]
pub(super) enum Way {
    /// The queue pair, as there are no peer copies for this reason.
    Queue(Reason),
    Out(Out),
    Into(Into),
}

/// Messages to the other rank.
#[derive(Debug)]
pub(super) struct Out(pub(super) Arc<PeerInbox>);

/// Messages from the other rank.
#[derive(Debug)]
pub(super) struct Into {
    pub(super) inbox: Arc<Inbox>,
    pub(super) free: Arc<FreePlaces>,
    /// Bytes of the largest place.
    pub(super) room: usize,
    needs_flush: bool,
}

impl Way {
    /// The orders of its streams.
    pub(super) fn orders(&self) -> impl Iterator<Item = &StreamOrder> {
        let orders = match self {
            Self::Queue(_) => [None, None],
            Self::Out(out) => [Some(&out.0.order), None],
            Self::Into(into) => [Some(&into.free.order), Some(&into.inbox.order)],
        };
        orders.into_iter().flatten()
    }
}

impl Out {
    /// Adds a message, behind the wait for its place.
    pub(super) fn send(
        &self,
        batch: &mut Batch,
        buffer: &Registration,
        start: usize,
        len: u32,
    ) -> gdsync::Result<Ticket> {
        batch.send_to_inbox(&self.0, buffer.memory(), start..start + len as usize)
    }
}

impl Into {
    /// Messages whose place is free, and that have no wait.
    pub(super) fn unawaited(&self) -> u64 {
        // A batch with the place of a later wait may have been dropped.
        self.posted().saturating_sub(self.inbox.order.last_number())
    }

    /// Places that were freed so far.
    pub(super) fn posted(&self) -> u64 {
        self.free.order.last_number()
    }

    /// Tells that the next place is free.
    pub(super) fn post(&self, batch: &mut Batch) {
        _ = batch.free_in_inbox(&self.free);
    }

    /// Waits for the next message.
    pub(super) fn wait(&self, batch: &mut Batch) -> (Ticket, Arc<Inbox>) {
        let ticket = batch.take_from_inbox(&self.inbox);
        if self.needs_flush {
            batch.flush();
        }
        (ticket, self.inbox.clone())
    }
}
