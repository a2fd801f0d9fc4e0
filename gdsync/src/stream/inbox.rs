//! Messages between GPUs of a host through slots: with flags in their data, which no fence has to order, if there is room for that.
//!
//! The receiver has a [`Inbox`] in memory of its GPU, with a slot for each place that messages are for; the peer that sends opens it
//! ([`PeerInbox`]). The kernel of the sender's stream stores a message into the *lines* of its slot, half data and half flags; that of
//! the receiver's stream takes it from there to its place as it comes. Other streams than those of kernels, and longer messages, copy
//! into the place and then tell of it, as [`Batch::put_peer`] does. The sender waits for a word of its own GPU, which
//! tells of free places and whether the receiver takes messages from lines. The format is in `gdsync.cuh`.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::peer::{aligned, part, signal, within};
use super::{Batch, Cond, Op};
use gdsync_device::cuda::Gpu;
use gdsync_device::cuda::kernel_exec::{KernelOp, Program};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Memory, PeerMemory, Word64};

/// Places up to this length have lines for all of it; longer ones for [`SHORT`] bytes, which one block takes.
const LONG: usize = 256 << 10;
const SHORT: usize = 8 << 10;

/// Bytes of a message that the lines of a slot have room for.
fn lines_of(place: usize) -> usize {
    if place <= LONG { place } else { SHORT }
}

/// Where the slots for places of these lengths begin, and where the last one ends.
fn slots(places: impl IntoIterator<Item = usize>) -> Vec<usize> {
    let bytes = |place| (16 + 2 * lines_of(place).next_multiple_of(8)).next_multiple_of(64);
    let ends = places.into_iter().scan(0, |end, place| {
        *end += bytes(place);
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

/// The index of the place of a message.
fn place(number: u64, places: usize) -> usize {
    usize::try_from(number.wrapping_sub(1) % places.max(1) as u64).unwrap_or_default()
}

/// What tells of a message: its number, and its bytes.
fn word(number: u64, len: u32) -> u64 {
    number << 33 | u64::from(len) << 1
}

/// The word that tells of so many free places; its lowest bit says whether messages may be in lines.
const fn free(number: u64) -> u64 {
    number << 1
}

/// Slots for the messages of a peer, in memory of this process' GPU that the peer has open.
pub struct Inbox {
    /// At the starts of the slots.
    words: Vec<Word64>,
    /// With their lengths.
    places: Vec<(Memory, usize)>,
    /// Whether kernels take messages from lines, as the stream decides that first frees a place.
    by_kernels: OnceLock<bool>,
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").field("places", &self.places).finish_non_exhaustive()
    }
}

impl Inbox {
    /// Bytes that the slots for places of these lengths take.
    pub fn bytes(places: impl IntoIterator<Item = usize>) -> usize {
        slots(places).last().copied().unwrap_or(0)
    }

    /// Slots in memory that is 0, of [`Inbox::bytes`] of the places.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::InvalidArgument`] for memory that does not begin at a multiple of 16, and without places;
    /// [`Error::Unsupported`] for memory that the CPU does not reach.
    pub fn new(memory: &Memory, places: &[(Memory, Range<usize>)]) -> Result<Arc<Self>> {
        let slots = slots(places.iter().map(|(_, range)| range.len()));
        if places.is_empty() {
            return Err(no_places());
        }
        let (memory, _) = part(memory, 0..slots.last().copied().unwrap_or(0))?;
        aligned(memory.addr(), 16)?;
        let words = slots.iter().take(places.len()).map(|slot| memory.word64(*slot));
        let words = words.collect::<Result<_>>()?;
        let places =
            places.iter().map(|(memory, range)| part(memory, range.clone())).collect::<Result<_>>()?;
        Ok(Arc::new(Self { words, places, by_kernels: OnceLock::new() }))
    }

    /// Bytes of message `number`, unless there is a later one in its place.
    pub fn len_of(&self, number: u64) -> Option<usize> {
        let index = place(number, self.places.len());
        let (came, (_, room)) = (self.words.get(index)?.load(), self.places.get(index)?);
        let is_last = came >> 33 == word(number, 0) >> 33;
        // The peer wrote it.
        let len = usize::try_from(came >> 1 & u64::from(u32::MAX)).ok()?.min(*room);
        is_last.then_some(len)
    }

    /// Whether messages come in lines, if kernels run all of a stream that frees a place.
    fn free_by_kernels(&self) -> bool {
        *self.by_kernels.get_or_init(|| true)
    }

    /// For another stream, before it frees a place or waits for a message.
    fn free_without_lines(&self) -> Result<()> {
        match self.by_kernels.get_or_init(|| false) {
            false => Ok(()),
            true => Err(Error::Unsupported {
                what: "a message that may be in lines",
                by: "a stream whose kernels do not run all of it, after streams of kernels have freed places",
                fix: "receive all messages on streams with the same `via` and `copies`",
            }),
        }
    }
}

/// An [`Inbox`], and the word of the peer's GPU that tells of its free places.
#[derive(Debug)]
pub struct FreePlaces {
    inbox: Arc<Inbox>,
    to: PeerMemory,
    offset: usize,
}

impl FreePlaces {
    /// With the word at `offset` in memory of the peer.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn new(inbox: &Arc<Inbox>, to: PeerMemory, offset: usize) -> Result<Arc<Self>> {
        within(&to, offset, 8)?;
        Ok(Arc::new(Self { inbox: inbox.clone(), to, offset }))
    }
}

/// What a stream does for the message of a number.
#[derive(Clone)]
pub(crate) enum Message {
    /// Sends what is in this memory, if anything.
    Out(Arc<PeerInbox>, u64, Option<Memory>),
    Free(Arc<FreePlaces>, u64),
    Take(Arc<Inbox>, u64),
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Out(_, number, from) => write!(f, "SEND message {number} <- {from:?}"),
            Self::Free(_, number) => write!(f, "FREE the place of message {number}"),
            Self::Take(_, number) => write!(f, "TAKE message {number}"),
        }
    }
}

impl Message {
    /// Whether its memory is mapped for GPUs.
    pub(super) fn is_found(&self) -> bool {
        !matches!(self, Self::Out(_, _, Some(from)) if !from.is_known_to_gpus())
    }

    /// Adds what the stream does, where kernels run its `ops` but copies, and make its `copies`.
    pub(super) fn add_steps(&self, gpu: &Gpu, ops: bool, copies: bool, steps: &mut Program) -> Result<()> {
        // Only kernels' own deadlines end a wait for lines.
        let lines = ops && copies;
        let signal = |addr, value| signal(addr, value, false, ops || copies);
        match self {
            Self::Out(to, number, from) => {
                let index = place(*number, to.places.len());
                let (into, len) = (&to.places[index], from.as_ref().map_or(0, Memory::len));
                let told = aligned(to.memory.gpu_addr(gpu, to.start + to.slots[index], 8)?, 16)?;
                let value = word(*number, u32::try_from(len).unwrap_or(u32::MAX));
                let into_at = into.gpu_addr(gpu, 0, len)?;
                let from = from.as_ref().map_or(Ok(told), |from| from.gpu_addr(gpu))?;
                if lines && len <= to.lines {
                    let wait = KernelOp::wait64(to.free.memory().place(gpu)?, free(*number), Cond::Geq);
                    let into_at = if len == 0 { told } else { into_at };
                    steps.extend_from_slice(&KernelOp::pack(
                        wait,
                        (told, into_at),
                        (from, len as u64),
                        value,
                    ));
                    return Ok(());
                }
                if len > 0 {
                    steps.extend_from_slice(&KernelOp::copy(into_at, from, len as u64));
                }
                steps.push(signal(told, value)?);
            }
            Self::Free(places, number) => {
                let FreePlaces { inbox, to, offset } = &**places;
                let in_lines = lines && inbox.free_by_kernels();
                if !in_lines {
                    inbox.free_without_lines()?;
                }
                let addr = aligned(to.gpu_addr(gpu, *offset, 8)?, 8)?;
                steps.push(signal(addr, free(*number) | u64::from(in_lines))?);
            }
            Self::Take(inbox, number) if lines => {
                let index = place(*number, inbox.places.len());
                let (into, len) = &inbox.places[index];
                let at = inbox.words[index].memory().place(gpu)?;
                let wait = KernelOp::wait64(at, word(*number, 0), Cond::Geq);
                steps.extend_from_slice(&KernelOp::take(wait, into.gpu_addr(gpu)?, lines_of(*len) as u64));
            }
            Self::Take(inbox, _) => inbox.free_without_lines()?,
        }
        Ok(())
    }
}

/// The [`Inbox`] of a peer, open for the GPU of the streams that send.
#[derive(Debug)]
pub struct PeerInbox {
    memory: PeerMemory,
    start: usize,
    slots: Vec<usize>,
    /// Bytes that the lines of each slot have room for: graphs send the same to each place.
    lines: usize,
    places: Vec<PeerMemory>,
    free: Word64,
}

impl PeerInbox {
    /// The slots that begin at `start` in memory of the peer, the places, and the word of the own GPU that tells which are free.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::InvalidArgument`] without places.
    pub fn new(memory: PeerMemory, start: usize, places: Vec<PeerMemory>, free: Word64) -> Result<Arc<Self>> {
        let lines = places.iter().map(|place| lines_of(place.len())).min().ok_or_else(no_places)?;
        let slots = slots(places.iter().map(PeerMemory::len));
        within(&memory, start, slots.last().copied().unwrap_or(0))?;
        Ok(Arc::new(Self { memory, start, slots, lines, places, free }))
    }
}

fn no_places() -> Error {
    Error::invalid("places of an inbox", "none", "at least one")
}

impl Batch {
    /// Sends message `number` to a peer, from 1 on, each once and in order: waits until its place is free, then puts `range` of `from`
    /// there, as it is when the stream gets there. Two operations.
    ///
    /// # Errors
    /// As [`Batch::put_peer`].
    pub fn send_to_inbox(
        &mut self,
        to: &Arc<PeerInbox>,
        number: u64,
        from: &Memory,
        range: Range<usize>,
    ) -> Result<()> {
        let (from, len) = part(from, range)?;
        let place = &to.places[place(number, to.places.len())];
        if len > place.len() || u32::try_from(len).is_err() {
            return Err(Error::OutOfBounds { offset: 0, len, size: place.len() });
        }
        self.wait_for_message(&to.free, free(number), len <= to.lines);
        self.ops.push(Op::Message(Message::Out(to.clone(), number, (len > 0).then_some(from))));
        Ok(())
    }

    /// Tells the peer that the place of message `number` is free, behind the wait for the one before in it. One operation.
    pub fn free_in_inbox(&mut self, places: &Arc<FreePlaces>, number: u64) {
        self.ops.push(Op::Message(Message::Free(places.clone(), number)));
    }

    /// Waits until message `number` of the peer is in its place. Two operations.
    pub fn take_from_inbox(&mut self, inbox: &Arc<Inbox>, number: u64) {
        let word_of = &inbox.words[place(number, inbox.places.len())];
        self.wait_for_message(word_of, word(number, 0), true);
        self.ops.push(Op::Message(Message::Take(inbox.clone(), number)));
    }

    /// The wait of the message that follows, which does it by itself if it is in lines.
    fn wait_for_message(&mut self, at: &Word64, value: u64, by_next: bool) {
        self.ops.push(Op::Wait64 { at: at.clone(), value, cond: Cond::Geq, of: None, by_next });
    }
}
