//! Peer copies of messages: the sender's stream copies the payload into the receive ([`gdsync::stream::Placement`]).
//!
//! The receiver shares a table for each direction. It holds one line per receive, written before the credit of the receive is sent,
//! and one slot per GPU allocation that receives are in, with its CUDA IPC handle. The sender opens each allocation once. It does so on
//! a thread of its own, because CUDA may block while streams wait. When an allocation is freed, its slot is reused with the next
//! generation. Beside them is a slot of *arrival words* in memory of the receiver's GPU, one per line: the sender's kernel writes number and
//! length there behind the payload, so a kernel of the receiver need not wait until the device has completed it.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Builder;

use gdsync::cuda::Gpu;
use gdsync::memory::{ExportedMemory, Memory, PeerMemory, WeakMemory, Word32, Word64};
use gdsync::stream::{Batch, OpenMemory, PeerSignal, Placement, ReceiveLine};
use parking_lot::Mutex;

use crate::path::{CopiesOrNot, NearPath};
use crate::registration::Piece;

/// Lines of a direction, which is the maximum of posted receives.
pub(crate) const LINES: usize = 1024;
/// Receives after which arrival words are cleared, a power of two.
const OLD: u32 = 1 << 30;
/// Allocations of a direction.
const SLOTS: usize = 64;
/// Offset of the number of allocations told so far, behind the lines.
const TOLD: usize = LINES * ReceiveLine::BYTES;
/// Offset of a word that is not 0 after an allocation could not be exported.
const REFUSED: usize = TOLD + 8;
/// Offset of the word that announces receives: see `credit`.
const READY: usize = TOLD + 16;
/// Offset of the slots, each a generation and an export.
const FIRST: usize = TOLD + 64;
const STRIDE: usize = 192;
/// Offset of one more, of the arrival words.
const ARRIVALS: usize = FIRST + SLOTS * STRIDE;

/// Bytes of a direction: whole pages.
pub(crate) const BYTES: usize = (ARRIVALS + STRIDE).next_multiple_of(4096);

/// Bytes of the arrival words of a direction.
pub(crate) const ARRIVAL_BYTES: usize = 8 * LINES;

const _: () = assert!(8 + ExportedMemory::BYTES <= STRIDE);

const WORDS: &str = "the words are aligned and inside";
const NO_HANDLE: &str =
    "GPU memory that is received into has no CUDA IPC handle: it needs memory of cudaMalloc (Gpu::alloc)";

/// Both directions between this rank and another rank of the host.
#[derive(Debug)]
pub(crate) struct Places {
    near: NearPath,
    own: Own,
    theirs: Arc<Theirs>,
}

/// Where a receive is. Generation 0: not in exported GPU memory, so no stream can copy into it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Place {
    slot: u8,
    generation: u16,
    offset: u64,
    len: u32,
}

impl Place {
    fn line(self, number: u32) -> ReceiveLine {
        let Self { slot, generation, offset, len } = self;
        ReceiveLine { number, len, slot, generation, offset }
    }
}

/// The table that this rank writes, of its receives.
#[derive(Debug)]
struct Own {
    table: Memory,
    known: Mutex<Known>,
    /// The arrival words, if the GPU's memory is mapped.
    arrivals: Option<Memory>,
}

#[derive(Debug)]
struct Known {
    memories: Vec<Told>,
    generations: [u16; SLOTS],
    told: u64,
}

/// An allocation with its slot; no slot if it could not be exported.
#[derive(Debug)]
struct Told {
    memory: WeakMemory,
    range: Range<u64>,
    slot: Option<u8>,
}

/// The table that the other rank writes, and what this rank has opened of it.
#[derive(Debug)]
struct Theirs {
    table: Memory,
    open: Arc<OpenMemory>,
    /// The number of allocations told when this rank last opened some.
    seen: AtomicU64,
    /// Whether any is open.
    any: AtomicBool,
    arrivals: OnceLock<PeerMemory>,
    /// The open generation of each slot, and why the last one could not be opened.
    opened: Mutex<([u16; SLOTS], Option<Cow<'static, str>>)>,
}

/// The piece of a message that has only one, in GPU memory.
fn single<'a, 'b>(pieces: &'a [Piece<'b>]) -> Option<&'a Piece<'b>> {
    match pieces {
        [piece] if !piece.1.is_empty() && piece.0.memory().gpu().is_some() => Some(piece),
        _ => None,
    }
}

impl Places {
    /// From the tables for messages to the other rank and from it, and arrival words. Maps them for the GPU now, while no stream waits.
    pub(crate) fn new(
        gpu: &Gpu,
        near: NearPath,
        [theirs, own]: [Memory; 2],
        arrivals: Option<Memory>,
    ) -> gdsync::Result<Self> {
        theirs.gpu_addr(gpu)?;
        own.gpu_addr(gpu)?;
        let known = Known { memories: Vec::new(), generations: [0; SLOTS], told: 0 };
        let theirs = Theirs {
            table: theirs,
            open: OpenMemory::new(gpu, SLOTS)?,
            seen: AtomicU64::new(0),
            any: AtomicBool::new(false),
            arrivals: OnceLock::new(),
            opened: Mutex::new(([0; SLOTS], None)),
        };
        let own = Own { table: own, known: Mutex::new(known), arrivals };
        Ok(Self { near, own, theirs: Arc::new(theirs) })
    }

    /// The words that announce receives: those of the other rank, and those of this one.
    pub(crate) fn ready(&self) -> [Word32; 2] {
        [&self.theirs.table, &self.own.table].map(|table| table.word32(READY).expect(WORDS))
    }

    /// Finds where a receive is, before it is posted. Tells the allocation to the other rank if it is new.
    ///
    /// # Errors
    /// GPU memory that cannot be exported, where [`NearPath::PeerCopies`] wants that.
    pub(crate) fn place(&self, pieces: &[Piece<'_>]) -> gdsync::Result<Place> {
        let Some((buffer, range)) = single(pieces) else { return Ok(Place::default()) };
        let addr = buffer.memory().addr() + range.start as u64;
        let range = addr..addr + range.len() as u64;
        let found = self.own.find(buffer.memory(), range);
        match found {
            None if self.near == NearPath::PeerCopies => Err(refused("the receive", NO_HANDLE)),
            found => Ok(found.unwrap_or_default()),
        }
    }

    /// Writes the line of a posted receive, before its credit is sent.
    pub(crate) fn tell(&self, number: u32, place: Place) {
        self.renew(number);
        place.line(number).store(&self.own.table, place_of(number)).expect(WORDS);
    }

    /// Adds to a batch that the stream does, before it posts the receive.
    pub(crate) fn tell_in_batch(&self, batch: &mut Batch, number: u32, place: Place) -> gdsync::Result<()> {
        self.renew(number);
        match place.generation {
            // Nothing follows the line that is there.
            0 => Ok(()),
            _ => batch.tell_receive(&place.line(number), &self.own.table, place_of(number)),
        }
    }

    /// The word that a kernel of the other rank writes behind the message of a receive: its number and its length.
    pub(crate) fn arrival(&self, number: u32) -> Option<Word64> {
        self.own.arrivals.as_ref()?.word64(arrival_of(number)).ok()
    }

    /// Clears the arrival word of a receive now and then, so that numbers which come again mean nothing. If that of a message is lost, its
    /// stream waits for the completion.
    fn renew(&self, number: u32) {
        if ((number & (OLD - 1)) as usize) < LINES
            && let Some(word) = self.arrival(number)
        {
            word.store(outdated(number));
        }
    }

    /// Clears all lines.
    pub(crate) fn end(&self) {
        let table = &self.own.table;
        (0..LINES)
            .for_each(|at| table.atomic64(at * ReceiveLine::BYTES).expect(WORDS).store(0, Ordering::Relaxed));
    }

    /// The payload of a message of these pieces, if a stream can copy it into the receive.
    ///
    /// # Errors
    /// Memory of the other rank that cannot be opened, where [`NearPath::PeerCopies`] wants that.
    pub(crate) fn payload(&self, pieces: &[Piece<'_>]) -> gdsync::Result<Option<Memory>> {
        let Some((buffer, range)) = single(pieces) else { return Ok(None) };
        let Theirs { open, any, opened, .. } = &*self.theirs;
        if !buffer.memory().is_on(open.gpu()) {
            return Ok(None);
        }
        self.look();
        if self.near == NearPath::PeerCopies
            && let Some(why) = opened.try_lock().and_then(|opened| opened.1.clone())
        {
            return Err(refused("the send", &why));
        }
        match any.load(Ordering::Acquire) {
            true => buffer.memory().slice(range.start, range.len()).map(Some),
            false => Ok(None),
        }
    }

    /// The copy of a payload into receive `number`, counted without so many cancelled sends; it may be posted already.
    pub(crate) fn placement(
        &self,
        (number, gaps): (u32, u64),
        payload: &Memory,
        is_posted: bool,
    ) -> Option<Placement> {
        let Theirs { table, open, arrivals, .. } = &*self.theirs;
        let line = table.slice(place_of(number), ReceiveLine::BYTES).ok()?;
        let told = arrivals.get().map(|to| PeerSignal {
            to: to.clone(),
            offset: arrival_of(number),
            value: u64::from(number) << 32 | payload.len() as u64,
            add: false,
        });
        Some(Placement { payload: payload.clone(), line, number, is_posted, open: open.clone(), gaps, told })
    }

    /// Opens allocations that the other rank has told since the last call.
    pub(crate) fn look(&self) {
        let told = self.theirs.table.atomic64(TOLD).expect(WORDS).load(Ordering::Acquire);
        if self.theirs.seen.load(Ordering::Relaxed) == told
            || self.theirs.seen.swap(told, Ordering::Relaxed) == told
        {
            return;
        }
        let theirs = self.theirs.clone();
        let started = Builder::new().name("mp-open".into()).spawn(move || theirs.open_all());
        if let Err(error) = started {
            let why = format!("no thread could be started to open the memory of the other rank ({error})");
            self.theirs.opened.lock().1 = Some(why.into());
        }
    }

    /// Whether streams copy a payload into receives of the other rank, or why not.
    pub(crate) fn copies(&self, payload: &Memory, len: usize) -> CopiesOrNot {
        self.look();
        let Theirs { table, open, any, opened, .. } = &*self.theirs;
        let refused = || table.atomic64(REFUSED).expect(WORDS).load(Ordering::Relaxed) != 0;
        match () {
            () if len == 0 => Err("the message is empty".into()),
            () if !payload.is_on(open.gpu()) => Err("the memory is not of the communicator's GPU".into()),
            () if let Some(why) = opened.try_lock().and_then(|opened| opened.1.clone()) => Err(why),
            () if any.load(Ordering::Acquire) => Ok(()),
            () if refused() => Err(NO_HANDLE.into()),
            () => Err("so far no receive there is in GPU memory that this rank has opened".into()),
        }
    }
}

impl Own {
    /// The place of a range of memory. Tells its allocation if it is new.
    fn find(&self, memory: &Memory, range: Range<u64>) -> Option<Place> {
        let mut known = self.known.lock();
        let is_of = |told: &Told| told.range.start <= range.start && range.end <= told.range.end;
        let found = known.memories.iter().position(|told| is_of(told) && told.memory.is_there());
        let at = match found {
            Some(at) => at,
            None => self.tell_memory(&mut known, memory),
        };
        let Told { range: whole, slot, .. } = &known.memories[at];
        let (slot, offset) = ((*slot)?, range.start - whole.start);
        let len = u32::try_from(range.end - range.start).ok().filter(|_| offset < ReceiveLine::MAX_OFFSET)?;
        Some(Place { slot, generation: known.generations[usize::from(slot)], offset, len })
    }

    #[cold]
    fn tell_memory(&self, known: &mut Known, memory: &Memory) -> usize {
        known.memories.retain(|told| told.memory.is_there());
        let is_free = |slot: &u8| known.memories.iter().all(|told| told.slot != Some(*slot));
        let slot = (0..=u8::MAX).take(SLOTS).find(is_free);
        let exported = slot.ok_or("too many memories").and_then(|slot| {
            let exported =
                memory.export().inspect_err(|error| tracing::info!(%error, "no peer copies into receives"));
            Ok((slot, exported.map_err(|_| NO_HANDLE)?))
        });
        if let Ok((slot, exported)) = &exported {
            let generation = &mut known.generations[usize::from(*slot)];
            *generation = generation.checked_add(1).unwrap_or(1);
            self.tell_export(FIRST + STRIDE * usize::from(*slot), *generation, exported);
            if known.told == 0 {
                self.tell_arrivals();
            }
            known.told += 1;
            self.table.atomic64(TOLD).expect(WORDS).store(known.told, Ordering::SeqCst);
        } else {
            self.table.atomic64(REFUSED).expect(WORDS).store(1, Ordering::Relaxed);
        }
        let range = memory.addr()..memory.addr() + memory.len() as u64;
        known.memories.push(Told {
            memory: memory.downgrade(),
            range,
            slot: exported.ok().map(|(slot, _)| slot),
        });
        known.memories.len() - 1
    }

    /// Writes an export to a slot.
    fn tell_export(&self, at: usize, generation: u16, exported: &ExportedMemory) {
        let word = self.table.atomic64(at).expect(WORDS);
        // 0 until the export is written: the other rank skips the slot meanwhile.
        word.store(0, Ordering::SeqCst);
        self.table.write(at + 8, &exported.to_bytes()).expect(WORDS);
        word.store(u64::from(generation), Ordering::SeqCst);
    }

    /// Tells the arrival words. Without them streams wait for completions.
    fn tell_arrivals(&self) {
        match self.arrivals.as_ref().map(Memory::export) {
            Some(Ok(exported)) => self.tell_export(ARRIVALS, 1, &exported),
            Some(Err(error)) => tracing::info!(%error, "streams wait for completions of receives"),
            None => {}
        }
    }
}

impl Theirs {
    fn open_all(&self) {
        let mut opened = self.opened.lock();
        let (generations, why) = &mut *opened;
        if self.arrivals.get().is_none() {
            match self.told(ARRIVALS, 0).map(|(_, memory)| memory) {
                Some(Ok(memory)) if memory.len() == ARRIVAL_BYTES => _ = self.arrivals.set(memory),
                Some(Ok(_)) => {
                    tracing::info!("arrival words of another length: streams there wait for completions")
                }
                Some(Err(error)) => tracing::info!(%error, "streams there wait for completions of receives"),
                None => {}
            }
        }
        for (slot, known) in (0..=u8::MAX).zip(generations) {
            let Some((new, memory)) = self.told(FIRST + STRIDE * usize::from(slot), *known) else { continue };
            match memory.and_then(|memory| self.open.set(slot, new, memory)) {
                Ok(()) => {
                    (*known, *why) = (new, None);
                    self.any.store(true, Ordering::Release);
                }
                Err(error) => {
                    tracing::info!(%error, "no peer copies into receives of a rank");
                    *why = Some(error.to_string().into());
                }
            }
        }
    }

    /// The memory of a slot, opened, and its generation, unless that is known.
    fn told(&self, at: usize, known: u16) -> Option<(u16, gdsync::Result<PeerMemory>)> {
        let generation = || self.table.atomic64(at).expect(WORDS).load(Ordering::SeqCst);
        let (before, mut bytes) = (generation(), [0; ExportedMemory::BYTES]);
        self.table.read(at + 8, &mut bytes).expect(WORDS);
        let new = u16::try_from(before).ok().filter(|new| *new != 0 && *new != known)?;
        let open = || PeerMemory::open(self.open.gpu(), &ExportedMemory::from_bytes(&bytes)?);
        (generation() == before).then(|| (new, open()))
    }
}

/// The offset of the arrival word of a receive.
fn arrival_of(number: u32) -> usize {
    number as usize % LINES * 8
}

/// An arrival word that is not of this receive, nor of another one in its slot.
fn outdated(number: u32) -> u64 {
    u64::from(number.wrapping_add(1)) << 32
}

/// The offset of the line of a receive.
fn place_of(number: u32) -> usize {
    number as usize % LINES * ReceiveLine::BYTES
}

fn refused(what: &'static str, why: &str) -> gdsync::Error {
    gdsync::Error::InvalidArgument {
        what,
        value: format!("one without peer copies: {why}"),
        expected: "one with peer copies (NearPath::PeerCopies); MP_NEAR=auto uses the queue pair instead",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrival_words_that_are_cleared_are_of_no_receive() {
        for number in [0, 1, OLD, u32::MAX] {
            let of = u32::try_from(outdated(number) >> 32).unwrap();
            assert_ne!(arrival_of(of), arrival_of(number));
        }
    }
}
