//! Messages between GPUs of a host through slots: a message of up to 256 KiB goes with flags in its data, which no fence has to order.
//!
//! The receiver has a [`Inbox`] in memory of its GPU, with a slot for each place that messages are for; the peer that sends opens it
//! ([`PeerInbox`]). The kernel of the sender's stream stores a message into the *lines* of its slot, half data and half flags; that of
//! the receiver's stream takes it from there to its place as it comes. Streams that leave copies to the copy engine, and longer
//! messages, copy into the place and then tell of it, as [`Batch::put_peer`] does. The sender waits for a word of its own GPU, which
//! tells of free places and whether the receiver takes messages from lines. The format is in `gdsync.cuh`.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::peer::{PeerCopy, Side, Slot, part};
use super::{Batch, Cond, Op, PeerSignal};
use gdsync_device::cuda::Gpu;
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
fn place(number: u64, places: usize) -> usize {
    usize::try_from(number.wrapping_sub(1) % places.max(1) as u64).unwrap_or_default()
}

/// What tells of a message: its number, and its bytes.
fn word(number: u64, len: u32) -> u64 {
    number << 33 | u64::from(len) << 1
}

/// The word of a slot that awaits message `number`, or one that tells of that many free places.
const fn free(number: u64) -> u64 {
    number << 1
}

/// Slots for the messages of a peer, in memory of this process' GPU that the peer has open.
pub struct Inbox {
    /// At the starts of the slots.
    words: Vec<Word64>,
    /// With their lengths.
    places: Vec<(Memory, usize)>,
    /// See [`By`].
    by: AtomicU8,
}

/// What the receiver's streams have that freed places: kernels take messages from lines.
enum By {
    Nobody = 0,
    Kernels = 1,
    CopyEngine = 2,
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
    /// [`Error::OutOfBounds`]; [`Error::Unsupported`] for memory that the CPU does not reach.
    pub fn new(memory: &Memory, places: &[(Memory, Range<usize>)]) -> Result<Arc<Self>> {
        let slots = slots(places.iter().map(|(_, range)| range.len()));
        let words = slots.iter().take(places.len()).map(|slot| memory.word64(*slot));
        let words = words.collect::<Result<_>>()?;
        let places =
            places.iter().map(|(memory, range)| part(memory, range.clone())).collect::<Result<_>>()?;
        Ok(Arc::new(Self { words, places, by: AtomicU8::new(By::Nobody as u8) }))
    }

    /// How many places it has.
    pub fn places(&self) -> usize {
        self.places.len()
    }

    /// Bytes of message `number`, unless there is a later one in its place.
    pub fn len_of(&self, number: u64) -> Option<usize> {
        let came = self.words.get(place(number, self.places.len()))?.load();
        let is_last = came >> 33 == word(number, 0) >> 33;
        usize::try_from(came >> 1 & u64::from(u32::MAX)).ok().filter(|_| is_last)
    }

    /// Whether kernels take messages, if this stream of kernels frees a place.
    pub(super) fn free_by_kernel(&self) -> bool {
        let by =
            self.by.compare_exchange(By::Nobody as u8, By::Kernels as u8, Ordering::SeqCst, Ordering::SeqCst);
        by.map_or_else(|by| by == By::Kernels as u8, |_| true)
    }

    /// For a stream that leaves copies to the copy engine, before it frees a place or waits for a message.
    pub(super) fn free_by_engine(&self) -> Result<()> {
        let engine = By::CopyEngine as u8;
        match self.by.compare_exchange(By::Nobody as u8, engine, Ordering::SeqCst, Ordering::SeqCst) {
            Err(by) if by != engine => Err(Error::Unsupported {
                what: "a message that may be in lines",
                by: "a stream that leaves copies to the copy engine, after streams with kernels have freed places",
                fix: "receive all messages on streams with the same CudaStreamConfig::copies",
            }),
            _ => Ok(()),
        }
    }

    /// The word of a message and the value that it reaches, the address of the place, and the bytes of its lines.
    pub(super) fn find(&self, number: u64, gpu: &Gpu) -> Result<(Place, u64, u64, u64)> {
        let index = place(number, self.places.len());
        let (place, len) = &self.places[index];
        let at = self.words[index].memory().place(gpu)?;
        Ok((at, word(number, 0), place.gpu_addr(gpu)?, lines_of(*len) as u64))
    }
}

/// The [`Inbox`] of a peer, open for the GPU of the streams that send.
#[derive(Debug)]
pub struct PeerInbox {
    memory: PeerMemory,
    start: usize,
    slots: Vec<usize>,
    places: Vec<PeerMemory>,
    free: Word64,
}

impl PeerInbox {
    /// The slots that begin at `start` in memory of the peer, the places, and the word of the own GPU that tells which are free.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn new(memory: PeerMemory, start: usize, places: Vec<PeerMemory>, free: Word64) -> Result<Arc<Self>> {
        let slots = slots(places.iter().map(PeerMemory::len));
        let len = slots.last().copied().unwrap_or(0);
        match start.checked_add(len) {
            Some(end) if end <= memory.len() => Ok(Arc::new(Self { memory, start, slots, places, free })),
            _ => Err(Error::OutOfBounds { offset: start, len, size: memory.len() }),
        }
    }
}

impl Batch {
    /// Sends message `number` to a peer, from 1 on, each once and in order: waits until its place is free, then puts `range` of `from`
    /// there. Two operations.
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
        let index = place(number, to.places.len());
        let place = to.places.get(index).filter(|place| len <= place.len()).ok_or(Error::OutOfBounds {
            offset: 0,
            len,
            size: to.places.get(index).map_or(0, PeerMemory::len),
        })?;
        self.wait_for_message(&to.free, free(number));
        let value = word(number, u32::try_from(len).unwrap_or(u32::MAX));
        let offset = to.start + to.slots[index];
        let signal = Some(PeerSignal { to: to.memory.clone(), offset, value, add: false });
        let copy = (len > 0).then(|| (Side::Own(from), Side::Peer(place.clone(), 0), len));
        let slot = match len <= lines_of(place.len()) {
            true => Slot::Out { free: to.free.clone(), number: free(number) },
            false => Slot::None,
        };
        self.ops.push(Op::Peer(Arc::new(PeerCopy { copy, signal, slot })));
        Ok(())
    }

    /// Tells the peer in a word of its GPU that the place of message `number` is free. One operation.
    ///
    /// # Errors
    /// As [`Batch::signal_peer`].
    pub fn free_in_inbox(
        &mut self,
        inbox: &Arc<Inbox>,
        number: u64,
        to: &PeerMemory,
        offset: usize,
    ) -> Result<()> {
        let signal = PeerSignal { to: to.clone(), offset, value: free(number), add: false };
        signal.check()?;
        let slot = Slot::Free(inbox.clone());
        self.ops.push(Op::Peer(Arc::new(PeerCopy { copy: None, signal: Some(signal), slot })));
        Ok(())
    }

    /// Waits until message `number` of the peer is in its place. Two operations.
    pub fn take_from_inbox(&mut self, inbox: &Arc<Inbox>, number: u64) {
        let word_of = &inbox.words[place(number, inbox.places.len())];
        self.wait_for_message(word_of, word(number, 0));
        let slot = Slot::Take(inbox.clone(), number);
        self.ops.push(Op::Peer(Arc::new(PeerCopy { copy: None, signal: None, slot })));
    }

    /// The wait of the message that follows.
    fn wait_for_message(&mut self, at: &Word64, value: u64) {
        self.ops.push(Op::Wait64 { at: at.clone(), value, cond: Cond::Geq, of: None, by_next: true });
    }
}
