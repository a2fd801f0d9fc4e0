//! Sends of streams whose payload the stream itself puts into the receive ([`gdsync::stream::Placement`]): what a rank tells another one
//! of its receives, and what it has open there.
//!
//! For each direction the receiver shares a table. It has a line for each receive, which is written before the receive is announced, and
//! the memory that receives are in, each with a number. The sender opens that memory once, by a thread of its own since CUDA may block
//! as long as streams wait. A number is given again when its memory was freed, with another generation.

use std::borrow::Cow;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::Builder;

use gdsync::cuda::Gpu;
use gdsync::memory::{ExportedMemory, Memory, PeerMemory, WeakMemory};
use gdsync::stream::{OpenMemory, Placement, ReceiveLine};
use parking_lot::Mutex;

use crate::path::{CopiesOrNot, NearPath};
use crate::registration::Piece;

/// What streams put into receives; the HCA moves the rest. Two H200s: it takes as long below, where a kernel has to find the receive
/// first. Above the kernel has several blocks, and their reads of the line, in memory of the host, take 1 us each, one after the other.
const LENGTHS: RangeInclusive<usize> = 4096..=96 << 10;
/// Lines of a direction: no more receives can be posted.
pub(crate) const LINES: usize = 1024;
/// Memories that can be told at a time.
const SLOTS: usize = 64;
/// Behind the lines: how many memories were told, and whether one could not be.
const TOLD: usize = LINES * ReceiveLine::BYTES;
const REFUSED: usize = TOLD + 8;
/// The memories: generation and export.
const FIRST: usize = TOLD + 64;
const STRIDE: usize = 192;

/// Bytes of a direction: whole pages.
pub(crate) const BYTES: usize = (FIRST + SLOTS * STRIDE).next_multiple_of(4096);

const _: () = assert!(8 + ExportedMemory::BYTES <= STRIDE);

const WORDS: &str = "the words are aligned and inside";
const NO_HANDLE: &str =
    "GPU memory that is received into has no CUDA IPC handle: it needs memory of cudaMalloc (Gpu::alloc)";

/// Both directions between this rank and another one of the host.
#[derive(Debug)]
pub(crate) struct Places {
    near: NearPath,
    own: Own,
    theirs: Arc<Theirs>,
}

/// Where a receive is; generation 0 where no stream can put anything.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Place {
    slot: u8,
    generation: u16,
    offset: u64,
    len: u32,
}

/// Receives of this rank.
#[derive(Debug)]
struct Own {
    table: Memory,
    known: Mutex<Known>,
}

#[derive(Debug)]
struct Known {
    memories: Vec<Told>,
    generations: [u16; SLOTS],
    told: u64,
}

/// Memory that was told, or that cannot be.
#[derive(Debug)]
struct Told {
    memory: WeakMemory,
    range: Range<u64>,
    slot: Option<u8>,
}

/// Receives of the other rank.
#[derive(Debug)]
struct Theirs {
    table: Memory,
    open: Arc<OpenMemory>,
    /// How many memories were told when this rank opened some last.
    seen: AtomicU64,
    any: AtomicBool,
    /// The generations that are open, and why one is not.
    opened: Mutex<([u16; SLOTS], Option<Cow<'static, str>>)>,
}

/// The only piece of a message, in memory of a GPU.
fn single<'a, 'b>(pieces: &'a [Piece<'b>]) -> Option<&'a Piece<'b>> {
    match pieces {
        [piece] if piece.1.len() >= *LENGTHS.start() && piece.0.memory().gpu().is_some() => Some(piece),
        _ => None,
    }
}

impl Places {
    /// Over the tables of messages to the rank, and from it. Maps them for the GPU, as no stream waits yet.
    pub(crate) fn new(gpu: &Gpu, near: NearPath, [theirs, own]: [Memory; 2]) -> gdsync::Result<Self> {
        theirs.gpu_addr(gpu)?;
        let known = Known { memories: Vec::new(), generations: [0; SLOTS], told: 0 };
        let theirs = Theirs {
            table: theirs,
            open: OpenMemory::new(gpu, SLOTS)?,
            seen: AtomicU64::new(0),
            any: AtomicBool::new(false),
            opened: Mutex::new(([0; SLOTS], None)),
        };
        Ok(Self { near, own: Own { table: own, known: Mutex::new(known) }, theirs: Arc::new(theirs) })
    }

    /// Where a receive is, before it is posted.
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

    /// Tells of a receive that was posted, before it is announced.
    pub(crate) fn tell(&self, number: u32, Place { slot, generation, offset, len }: Place) {
        let line = ReceiveLine { number, len, slot, generation, offset };
        line.store(&self.own.table, place_of(number)).expect(WORDS);
    }

    /// Tells of no receive any more.
    pub(crate) fn end(&self) {
        let table = &self.own.table;
        (0..LINES)
            .for_each(|at| table.atomic64(at * ReceiveLine::BYTES).expect(WORDS).store(0, Ordering::Relaxed));
    }

    /// What a stream can put into a receive itself, of a message of these pieces.
    ///
    /// # Errors
    /// Memory of the other rank that cannot be opened, where [`NearPath::PeerCopies`] wants that.
    pub(crate) fn payload(&self, pieces: &[Piece<'_>]) -> gdsync::Result<Option<Memory>> {
        let Some((buffer, range)) = single(pieces) else { return Ok(None) };
        let Theirs { open, any, opened, .. } = &*self.theirs;
        if !LENGTHS.contains(&range.len()) || !is_on(buffer.memory(), open.gpu()) {
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

    /// How it puts a payload into this receive.
    pub(crate) fn placement(&self, number: u32, payload: &Memory) -> Option<Placement> {
        let Theirs { table, open, .. } = &*self.theirs;
        let line = table.slice(place_of(number), ReceiveLine::BYTES).ok()?;
        Some(Placement { payload: payload.clone(), line, number, open: open.clone() })
    }

    /// Opens what the other rank has told of since.
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

    /// Whether streams put a payload into receives of the other rank, or why not.
    pub(crate) fn copies(&self, payload: &Memory, len: usize) -> CopiesOrNot {
        self.look();
        let Theirs { table, open, any, opened, .. } = &*self.theirs;
        let refused = || table.atomic64(REFUSED).expect(WORDS).load(Ordering::Relaxed) != 0;
        match () {
            () if !LENGTHS.contains(&len) => {
                let (least, most) = LENGTHS.into_inner();
                Err(format!("the device moves {len} bytes as fast; streams put {least} to {most}").into())
            }
            () if !is_on(payload, open.gpu()) => Err("the memory is not of the communicator's GPU".into()),
            () if let Some(why) = opened.try_lock().and_then(|opened| opened.1.clone()) => Err(why),
            () if any.load(Ordering::Acquire) => Ok(()),
            () if refused() => Err(NO_HANDLE.into()),
            () => Err("so far no receive there is in GPU memory that this rank has opened".into()),
        }
    }
}

impl Own {
    /// The place of a range of memory, which is told if it is new.
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
            let at = FIRST + STRIDE * usize::from(*slot);
            let word = self.table.atomic64(at).expect(WORDS);
            // The other rank does not open what it reads between these.
            word.store(0, Ordering::SeqCst);
            self.table.write(at + 8, &exported.to_bytes()).expect(WORDS);
            word.store(u64::from(*generation), Ordering::SeqCst);
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
}

impl Theirs {
    fn open_all(&self) {
        let mut opened = self.opened.lock();
        let (generations, why) = &mut *opened;
        for (slot, known) in (0..=u8::MAX).zip(generations) {
            let at = FIRST + STRIDE * usize::from(slot);
            let generation = || self.table.atomic64(at).expect(WORDS).load(Ordering::SeqCst);
            let (before, mut bytes) = (generation(), [0; ExportedMemory::BYTES]);
            self.table.read(at + 8, &mut bytes).expect(WORDS);
            let Some(new) = u16::try_from(before).ok().filter(|new| *new != 0 && new != known) else {
                continue;
            };
            if generation() != before {
                continue;
            }
            let memory =
                ExportedMemory::from_bytes(&bytes).and_then(|told| PeerMemory::open(self.open.gpu(), &told));
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
}

fn is_on(memory: &Memory, gpu: &Gpu) -> bool {
    memory.gpu().is_some_and(|own| own.raw_context() == gpu.raw_context())
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
