//! Messages between GPUs of a host through slots: with flags in their data, which no fence has to order, if there is room for that.
//!
//! The receiver has a [`Inbox`] in memory of its GPU, with a slot for each place that messages are for; the peer that sends opens it
//! ([`PeerInbox`]). The kernel of the sender's stream stores a message into the *lines* of its slot, half data and half flags; that of
//! the receiver's stream takes it from there to its place as it comes. Other streams than those of kernels, and longer messages, copy
//! into the place and then tell of it, as [`Batch::put_peer`] does. The sender waits for a word of its own GPU, which
//! tells of free places and whether the receiver takes messages from lines. The format of slots is in `gdsync.cuh`.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use super::order::{Number, StreamOrder, Ticket};
use super::peer::{aligned, part, signal, within};
use super::{Batch, Cond, Op};
use crate::verbs::Qp;
use crate::verbs::end::QueueEnd;
use gdsync_device::cuda::Gpu;
use gdsync_device::cuda::kernel_exec::KernelOp;
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Memory, PeerMemory, Place, Word64};

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
#[inline]
fn place(number: u64, places: usize) -> usize {
    usize::try_from(number.wrapping_sub(1) % places.max(1) as u64).unwrap_or_default()
}

/// What tells of a message: its number, and its bytes.
pub(super) fn word(number: u64, len: u32) -> u64 {
    number << 33 | u64::from(len) << 1
}

/// The word that tells of so many free places; its lowest bit says whether messages may be in lines.
fn free(number: u64) -> u64 {
    word(number, 0)
}

/// Slots for the messages of a peer, in memory of this process' GPU that the peer has open.
pub struct Inbox {
    /// The order of the streams that take messages.
    pub order: StreamOrder,
    gpu: Gpu,
    /// At the starts of the slots.
    words: Vec<Word64>,
    /// With their lengths.
    places: Vec<(Memory, usize)>,
    /// Where the GPU has words and places.
    addrs: Vec<(Place, u64)>,
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

    /// Slots in memory that is 0, of [`Inbox::bytes`] of the places. A stream that waits for a message fails when the queue pair has
    /// broken, and breaks it when it fails: the next message would be taken for the one that is lost.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::InvalidArgument`] for memory that does not begin at a multiple of 16, and without places;
    /// [`Error::Unsupported`] for memory that the CPU does not reach.
    pub fn new(qp: &Qp, memory: &Memory, places: &[(Memory, Range<usize>)]) -> Result<Arc<Self>> {
        let slots = slots(places.iter().map(|(_, range)| range.len()));
        if places.is_empty() {
            return Err(no_places());
        }
        let (memory, _) = part(memory, 0..slots.last().copied().unwrap_or(0))?;
        aligned(memory.addr(), 16)?;
        let words = slots.iter().take(places.len()).map(|slot| memory.word64(*slot));
        let words = words.collect::<Result<Vec<_>>>()?;
        let places = places.iter().map(|(memory, range)| part(memory, range.clone()));
        let places = places.collect::<Result<Vec<_>>>()?;
        let (order, gpu) = (StreamOrder::new(qp), gpu_of(&memory)?);
        let addrs = |(word, (place, _)): (&Word64, &(Memory, usize))| {
            Ok((word.memory().place(&gpu)?, place.gpu_addr(&gpu)?))
        };
        let addrs = words.iter().zip(&places).map(addrs).collect::<Result<_>>()?;
        Ok(Arc::new(Self { order, gpu, words, places, addrs, by_kernels: OnceLock::new() }))
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
    /// The order of the streams that free places.
    pub order: StreamOrder,
    inbox: Arc<Inbox>,
    _to: PeerMemory,
    addr: u64,
}

impl FreePlaces {
    /// With the word at `offset` in memory of the peer.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::InvalidArgument`] if it is not aligned, or open for another GPU than that of the inbox.
    pub fn new(qp: &Qp, inbox: &Arc<Inbox>, to: PeerMemory, offset: usize) -> Result<Arc<Self>> {
        let addr = aligned(to.gpu_addr(&inbox.gpu, offset, 8)?, 8)?;
        Ok(Arc::new(Self { order: StreamOrder::new(qp), inbox: inbox.clone(), _to: to, addr }))
    }
}

/// What a stream does for the message of a number.
#[derive(Clone)]
pub(crate) struct Message {
    does: Does,
    pub(super) taken: Number,
    /// Its value in the last submission, or as a capture expects it; in a graph each launch has its own.
    pub(super) number: u64,
}

#[derive(Clone)]
enum Does {
    /// Waits until the place is free, then sends what is in this memory, if anything.
    Send(Arc<PeerInbox>, Option<Memory>),
    Free(Arc<FreePlaces>),
    /// Waits for it.
    Take(Arc<Inbox>),
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = self.number;
        match &self.does {
            Does::Send(_, from) => write!(f, "SEND message {number} <- {from:?}"),
            Does::Free(_) => write!(f, "FREE the place of message {number}"),
            Does::Take(_) => write!(f, "TAKE message {number}"),
        }
    }
}

impl Message {
    /// Whether its memory is mapped for GPUs.
    pub(super) fn is_found(&self) -> bool {
        !matches!(&self.does, Does::Send(_, Some(from)) if !from.is_known_to_gpus())
    }

    /// The word that it waits for, until it has this value ([`Cond::Geq`]).
    pub(super) fn wait(&self) -> Option<(&Word64, u64)> {
        match &self.does {
            Does::Send(to, _) => Some((&to.free, free(self.number))),
            Does::Free(_) => None,
            Does::Take(inbox) => {
                Some((&inbox.words[place(self.number, inbox.words.len())], word(self.number, 0)))
            }
        }
    }

    /// Places that messages of its order are for in turn; one where the place does not matter.
    pub(super) fn places(&self) -> usize {
        match &self.does {
            Does::Send(to, _) => to.places.len(),
            Does::Free(_) => 1,
            Does::Take(inbox) => inbox.places.len(),
        }
    }

    /// The queue pair that a stream which waits breaks when it fails.
    pub(super) fn end(&self) -> &Arc<QueueEnd> {
        let order = match &self.does {
            Does::Send(to, _) => &to.order,
            Does::Free(places) => &places.order,
            Does::Take(inbox) => &inbox.order,
        };
        order.end()
    }

    /// Gives what the stream does for it as message `number`, where kernels run its `ops` but copies, and make its `copies`.
    #[inline]
    pub(super) fn add_steps(
        &self,
        number: u64,
        gpu: &Gpu,
        (ops, copies): (bool, bool),
        mut add: impl FnMut(&[KernelOp]),
    ) -> Result<()> {
        // Only kernels' own deadlines end a wait for lines.
        let lines = ops && copies;
        let signal = |addr, value| signal(addr, value, false, ops || copies);
        match &self.does {
            Does::Send(to, from) => {
                check_gpu(&to.gpu, gpu)?;
                let (ref place, told, into) = to.places[place(number, to.places.len())];
                let (len, size) = (from.as_ref().map_or(0, Memory::len), place.len());
                if len > size {
                    return Err(Error::OutOfBounds { offset: 0, len, size });
                }
                let value = word(number, u32::try_from(len).unwrap_or(u32::MAX));
                let (from, into) = match from {
                    Some(from) => (from.gpu_addr(gpu)?, into),
                    None => (told, told),
                };
                let wait = KernelOp::wait64(to.free_at, free(number), Cond::Geq);
                if lines && len <= to.lines {
                    add(&KernelOp::pack(wait, (told, into), (from, len as u64), value));
                } else {
                    add(&[wait]);
                    if len > 0 {
                        add(&KernelOp::copy(into, from, len as u64));
                    }
                    add(&[signal(told, value)?]);
                }
            }
            Does::Free(places) => {
                let FreePlaces { inbox, addr, .. } = &**places;
                check_gpu(&inbox.gpu, gpu)?;
                let in_lines = lines && inbox.free_by_kernels();
                if !in_lines {
                    inbox.free_without_lines()?;
                }
                let told = signal(*addr, free(number) | u64::from(in_lines))?;
                add(&[if in_lines { told.numbered() } else { told }]);
            }
            Does::Take(inbox) => {
                check_gpu(&inbox.gpu, gpu)?;
                let index = place(number, inbox.places.len());
                let (at, into) = inbox.addrs[index];
                let wait = KernelOp::wait64(at, word(number, 0), Cond::Geq);
                if lines {
                    add(&KernelOp::take(wait, into, lines_of(inbox.places[index].1) as u64));
                } else {
                    inbox.free_without_lines()?;
                    add(&[wait]);
                }
            }
        }
        Ok(())
    }
}

/// The [`Inbox`] of a peer, open for the GPU of the streams that send.
#[derive(Debug)]
pub struct PeerInbox {
    /// The order of the streams that send.
    pub order: StreamOrder,
    gpu: Gpu,
    _memory: PeerMemory,
    /// Bytes that the lines of each slot have room for: graphs send the same to each place.
    lines: usize,
    /// With where the GPU has slot and place.
    places: Vec<(PeerMemory, u64, u64)>,
    free: Word64,
    free_at: Place,
}

impl PeerInbox {
    /// The slots that begin at `start` in memory of the peer, the places, and the word of the own GPU that tells which are free. For
    /// the queue pair see [`Inbox::new`].
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::InvalidArgument`] without places, for a word of the host, and for memory that is open for
    /// another GPU.
    pub fn new(
        qp: &Qp,
        memory: PeerMemory,
        start: usize,
        places: Vec<PeerMemory>,
        free: Word64,
    ) -> Result<Arc<Self>> {
        let lines = places.iter().map(|place| lines_of(place.len())).min().ok_or_else(no_places)?;
        let slots = slots(places.iter().map(PeerMemory::len));
        within(&memory, start, slots.last().copied().unwrap_or(0))?;
        let (order, gpu) = (StreamOrder::new(qp), gpu_of(free.memory())?);
        let addrs = |(place, slot): (PeerMemory, &usize)| {
            let slot = aligned(memory.gpu_addr(&gpu, start + slot, 8)?, 16)?;
            let into = place.gpu_addr(&gpu, 0, place.len())?;
            Ok((place, slot, into))
        };
        let places = places.into_iter().zip(&slots).map(addrs).collect::<Result<_>>()?;
        let free_at = free.memory().place(&gpu)?;
        Ok(Arc::new(Self { order, gpu, _memory: memory, lines, places, free, free_at }))
    }
}

fn gpu_of(memory: &Memory) -> Result<Gpu> {
    let gpu = memory.gpu().cloned();
    gpu.ok_or_else(|| Error::invalid("memory of an inbox", "memory of the host", "memory of a GPU"))
}

/// Refuses streams of another GPU.
#[inline]
fn check_gpu(own: &Gpu, gpu: &Gpu) -> Result<()> {
    match own.raw_context() == gpu.raw_context() {
        true => Ok(()),
        false => Err(Error::invalid("stream for an inbox", format!("of {gpu:?}"), "one of the inbox' GPU")),
    }
}

fn no_places() -> Error {
    Error::invalid("places of an inbox", "none", "at least one")
}

impl Batch {
    /// Sends the next message to a peer: waits until its place is free, then puts `range` of `from` there, as it is when the stream
    /// gets there. Messages are numbered from 1 on when a stream gets the batch, in each launch of a graph anew; a batch that is dropped
    /// has none.
    ///
    /// # Errors
    /// As [`Batch::put_peer`]; [`Error::OutOfBounds`] for any place, and at submission for its place.
    pub fn send_to_inbox(
        &mut self,
        to: &Arc<PeerInbox>,
        from: &Memory,
        range: Range<usize>,
    ) -> Result<Ticket> {
        let (from, len) = part(from, range)?;
        let room = to.places.iter().map(|(place, ..)| place.len()).max().unwrap_or(0);
        if len > room || u32::try_from(len).is_err() {
            return Err(Error::OutOfBounds { offset: 0, len, size: room });
        }
        Ok(self.message(&to.order, Does::Send(to.clone(), (len > 0).then_some(from))))
    }

    /// Tells the peer that the next place is free, behind the wait for the message before in it.
    pub fn free_in_inbox(&mut self, places: &Arc<FreePlaces>) -> Ticket {
        self.message(&places.order, Does::Free(places.clone()))
    }

    /// Waits until the next message of the peer is in its place.
    pub fn take_from_inbox(&mut self, inbox: &Arc<Inbox>) -> Ticket {
        self.message(&inbox.order, Does::Take(inbox.clone()))
    }

    fn message(&mut self, order: &StreamOrder, does: Does) -> Ticket {
        let ticket = self.number(order);
        self.ops.push(Op::Message(Message { does, taken: ticket.taken, number: 0 }));
        ticket
    }
}
