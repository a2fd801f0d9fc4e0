//! Staging through pinned host memory, for GPU memory that the CPU reads slowly or cannot reach.
//!
//! Outgoing payload is copied out in chunks by a copy engine, and packets are cut from them. One chunk is sent while
//! the next is copied. Incoming packets are put in host memory, and a copy engine copies them to their destination.

use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::{Env, SoftQp};
use crate::packet::FAR_SEGMENT;
use crate::wire::Body;
use gdsync_device::copy_engine::{CopyEngine, Part, Source, Status, Ticket};
use gdsync_device::error;
use gdsync_device::memory::Memory;
use mlx5_ring::{MaskedAtomic, Syndrome};

/// Bytes of a chunk: large against the startup of a copy engine (about 10 us).
const CHUNK: usize = 256 << 10;
/// Chunks being copied or sent.
const CHUNKS: usize = 2;
/// Up to this length the CPU reads through the mapping: 6 us on an H200, where a copy engine takes 10.
const SMALL: usize = 4 << 10;
/// Time limit of the two copies of an atomic operation, for which the HCA waits.
const ATOMIC_LIMIT: Duration = Duration::from_secs(1);
/// How long the HCA waits for copies that a packet must not overtake; most take 20 us.
const ORDER_LIMIT: Duration = Duration::from_millis(1);

/// Chunks of the message being sent.
#[derive(Debug, Default)]
pub(crate) struct Stage {
    memory: Option<Memory>,
    chunks: [Option<Chunk>; CHUNKS],
    /// A packet waits for a chunk.
    waits: bool,
}

#[derive(Debug)]
struct Chunk {
    message: u32,
    number: usize,
    ticket: Ticket,
    since: Instant,
}

/// Result of staging the bytes of a packet.
pub(super) enum Staged {
    /// Staged at this offset.
    Ready(Memory, usize),
    /// Being copied.
    Pending,
    /// The copy failed, or is late.
    Failed(Syndrome),
}

/// Memory, offset, length.
pub(super) type Range = (Memory, usize, usize);

impl Stage {
    /// Whether a packet waits for a chunk.
    pub(super) fn is_waiting(&self) -> bool {
        self.waits
    }

    /// Discards all chunks.
    pub(super) fn forget(&mut self) {
        self.waits = false;
        for chunk in &mut self.chunks {
            // An unfinished copy still writes to this memory, so it is leaked.
            if chunk.as_ref().is_some_and(|chunk| !chunk.ticket.is_over())
                && let Some(memory) = self.memory.take()
            {
                memory.release_in_background();
            }
            *chunk = None;
        }
    }

    /// Stages the bytes from `at` on of a message of `len` bytes, identified by `message`. `gather` lists the ranges of
    /// a part: offset, length.
    pub(super) fn stage(
        &mut self,
        message: u32,
        len: usize,
        at: usize,
        gather: impl Fn(usize, usize) -> Result<Vec<Range>, Syndrome>,
        (copy_engine, limit): (&dyn CopyEngine, Duration),
    ) -> Result<Staged, Syndrome> {
        let memory = match &self.memory {
            Some(memory) => memory.clone(),
            None => {
                let memory = Memory::alloc(CHUNKS * CHUNK).map_err(|_| Syndrome::LOC_QP_OP_ERR)?;
                self.memory.insert(memory).clone()
            }
        };
        let number = at / CHUNK;
        self.waits = true;
        for number in number..(number + CHUNKS).min(len.div_ceil(CHUNK)) {
            let slot = number % CHUNKS;
            let known = self.chunks[slot].as_ref();
            let is_it = known.is_some_and(|chunk| (chunk.message, chunk.number) == (message, number));
            // A chunk still being written for another message keeps its slot.
            if is_it || known.is_some_and(|chunk| !chunk.ticket.is_over()) {
                continue;
            }
            let (begin, mut to) = (number * CHUNK, slot * CHUNK);
            let parts = gather(begin, CHUNK.min(len - begin))?.into_iter().map(|(from, offset, len)| {
                let part = Part { from: Source::Here(from, offset), to: memory.clone(), at: to, len };
                to += len;
                part
            });
            let ticket = copy_engine.start(parts.collect());
            self.chunks[slot] = Some(Chunk { message, number, ticket, since: Instant::now() });
        }
        let slot = number % CHUNKS;
        let Some(chunk) = &self.chunks[slot] else { return Ok(Staged::Pending) };
        let is_it = (chunk.message, chunk.number) == (message, number);
        let staged = match chunk.ticket.status() {
            Status::Done if is_it => Staged::Ready(memory, slot * CHUNK + at % CHUNK),
            Status::Failed if is_it => {
                tracing::error!(reason = chunk.ticket.failure(), "staging of payload failed");
                self.chunks[slot] = None;
                Staged::Failed(Syndrome::LOC_QP_OP_ERR)
            }
            Status::Pending if chunk.since.elapsed() > limit => {
                tracing::error!(?limit, "staging of payload timed out");
                Staged::Failed(Syndrome::COPY_TIMEOUT)
            }
            _ => Staged::Pending,
        };
        self.waits = matches!(staged, Staged::Pending);
        Ok(staged)
    }
}

impl SoftQp {
    /// Whether a message of `len` bytes in this memory is staged.
    pub(super) fn is_staged(memory: &Memory, len: usize, env: &Env<'_>) -> bool {
        !memory.is_mapped() || len > SMALL && env.copy_engine.stages(memory)
    }
}

/// Packets staged at once: more than a peer has in flight.
const SLOTS: usize = 80;

/// Received packets of a queue pair on their way to memory that is not mapped.
#[derive(Debug, Default)]
pub(crate) struct ReceiveStaging {
    memory: Option<Memory>,
    /// Newest packet of each slot.
    slots: Vec<Option<Packet>>,
    next: usize,
    /// When the newest packet is given up.
    end: Option<Instant>,
}

#[derive(Debug)]
struct Packet {
    ticket: Ticket,
    keys: SmallVec<[u32; 2]>,
}

/// Destination of a part of a packet.
pub(super) struct Piece {
    /// Offset in the packet.
    pub(super) from: usize,
    /// Key of the region.
    pub(super) key: u32,
    pub(super) memory: Memory,
    pub(super) at: usize,
    pub(super) len: usize,
}

impl ReceiveStaging {
    fn under_way(&self) -> impl Iterator<Item = &Packet> {
        let waited_for = self.end.is_some_and(|end| Instant::now() < end);
        let slots = if waited_for { &self.slots[..] } else { &[] };
        slots.iter().flatten().filter(|packet| !packet.ticket.is_over())
    }

    /// Whether copies are in progress.
    pub(super) fn is_busy(&self) -> bool {
        self.under_way().next().is_some()
    }

    /// Waits a moment for the copies in progress. Returns whether their bytes are all in place.
    pub(super) fn settle(&self) -> bool {
        let end = Instant::now() + ORDER_LIMIT;
        self.under_way().all(|packet| packet.ticket.wait(end) && packet.ticket.status() == Status::Done)
    }

    /// Whether a slot is free.
    pub(super) fn has_room(&self) -> bool {
        self.slots.get(self.next).and_then(Option::as_ref).is_none_or(|packet| packet.ticket.is_over())
    }

    /// Copies in progress, all or those into a region.
    pub(super) fn copies(&self, key: Option<u32>) -> impl Iterator<Item = Ticket> {
        let into = self.under_way().filter(move |packet| key.is_none_or(|key| packet.keys.contains(&key)));
        into.map(|packet| packet.ticket.clone())
    }

    /// Stages a packet and starts to copy `pieces` of it to their destinations.
    pub(super) fn put(
        &mut self,
        body: &Body<'_>,
        pieces: Vec<Piece>,
        (copy_engine, limit): (&dyn CopyEngine, Duration),
    ) -> error::Result<Ticket> {
        let memory = self.memory()?;
        let (slot, mut begin) = (self.next, self.next * FAR_SEGMENT);
        let keys = pieces.iter().map(|piece| piece.key).collect();
        let parts = pieces.into_iter().map(|Piece { from, memory: to, at, len, .. }| {
            body.copy_to(from, &memory, begin, len)?;
            let part = Part { from: Source::Here(memory.clone(), begin), to, at, len };
            begin += len;
            Ok(part)
        });
        let ticket = copy_engine.start(parts.collect::<error::Result<_>>()?);
        self.slots[slot] = Some(Packet { ticket: ticket.clone(), keys });
        self.next = (slot + 1) % SLOTS;
        self.end = Some(Instant::now() + limit);
        Ok(ticket)
    }

    /// The slots, and a word behind them for atomic operations.
    fn memory(&mut self) -> error::Result<Memory> {
        if let Some(memory) = &self.memory {
            return Ok(memory.clone());
        }
        self.slots.resize_with(SLOTS, || None);
        Ok(self.memory.insert(Memory::alloc(SLOTS * FAR_SEGMENT + 8)?).clone())
    }

    /// Changes a word by copying it out and back, behind the copies in progress. Waits for both copies, some 20 us, so atomic
    /// operations of the HCA exclude each other. They do not exclude the GPU. Returns the old value; `None` if a copy failed.
    pub(super) fn change(
        &mut self,
        memory: &Memory,
        at: usize,
        atomic: MaskedAtomic,
        copy_engine: &dyn CopyEngine,
    ) -> Option<u64> {
        let (here, place) = (self.memory().ok()?, SLOTS * FAR_SEGMENT);
        let end = Instant::now() + ATOMIC_LIMIT;
        let copy = |from: (&Memory, usize), to: (&Memory, usize)| {
            let from = Source::Here(from.0.clone(), from.1);
            let len = usize::from(atomic.size);
            let ticket = copy_engine.start(vec![Part { from, to: to.0.clone(), at: to.1, len }]);
            (ticket.wait(end) && matches!(ticket.status(), Status::Done)).then_some(())
        };
        copy((memory, at), (&here, place))?;
        let word = here.word64(place).ok()?;
        let old = word.load() & atomic.mask();
        word.store(atomic.apply(old));
        copy((&here, place), (memory, at)).map(|()| old)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use gdsync_device::copy_engine::{Handle, ProcessId};
    use gdsync_device::cuda::Gpu;

    /// Copies only in `run`.
    #[derive(Debug, Default)]
    struct OnDemand(Mutex<Vec<(Vec<Part>, Ticket)>>);

    impl OnDemand {
        fn run(&self) -> usize {
            let jobs = std::mem::take(&mut *self.0.lock().unwrap());
            for (parts, ticket) in &jobs {
                for Part { from, to, at, len } in parts {
                    let Source::Here(memory, from) = from else { panic!("another process") };
                    to.copy_from(*at, memory, *from, *len).unwrap();
                }
                ticket.done();
            }
            jobs.len()
        }
    }

    impl CopyEngine for OnDemand {
        fn adopt(&self, _: &Gpu) {}
        fn export(&self, _: &Memory) -> Option<Handle> {
            None
        }
        fn stages(&self, _: &Memory) -> bool {
            true
        }
        fn start(&self, parts: Vec<Part>) -> Ticket {
            let ticket = Ticket::default();
            self.0.lock().unwrap().push((parts, ticket.clone()));
            ticket
        }
        fn forget(&self, _: ProcessId) {}
    }

    #[test]
    fn chunks_are_staged_ahead_and_only_once() {
        let len = 2 * CHUNK + 100;
        let source = Memory::alloc(len).unwrap();
        let bytes: Vec<u8> = (0..len).map(|i| (i / 100).to_le_bytes()[0]).collect();
        source.write(0, &bytes).unwrap();
        let (engine, mut stage) = (OnDemand::default(), Stage::default());
        // The message has two SGEs.
        let gather = |at: usize, n: usize| {
            let first = n.min((CHUNK / 2).saturating_sub(at));
            let both = [(source.clone(), at, first), (source.clone(), at + first, n - first)];
            Ok(both.into_iter().filter(|range| range.2 > 0).collect())
        };
        let mut copies = 0;
        for at in (0..len).step_by(16 << 10) {
            let mut tries = 0;
            let (memory, offset) = loop {
                match stage.stage(7, len, at, gather, (&engine, Duration::MAX)).unwrap() {
                    Staged::Ready(memory, offset) => break (memory, offset),
                    Staged::Pending => assert!(stage.is_waiting()),
                    Staged::Failed(_) => panic!("failed"),
                }
                copies += engine.run();
                tries += 1;
                assert!(tries < 3, "at {at}");
            };
            assert!(!stage.is_waiting());
            let mut out = vec![0; (len - at).min(16 << 10)];
            memory.read(offset, &mut out).unwrap();
            assert!(out == bytes[at..at + out.len()], "at {at}");
        }
        assert_eq!(copies + engine.run(), 3);
        // Another message gets neither these bytes nor a slot that is still being written.
        assert!(matches!(stage.stage(8, len, 0, gather, (&engine, Duration::MAX)).unwrap(), Staged::Pending));
        assert!(matches!(stage.stage(9, len, 0, gather, (&engine, Duration::MAX)).unwrap(), Staged::Pending));
        assert_eq!(engine.run(), 2);
        assert!(matches!(stage.stage(9, len, 0, gather, (&engine, Duration::MAX)).unwrap(), Staged::Pending));
        engine.run();
        assert!(matches!(
            stage.stage(9, len, 0, gather, (&engine, Duration::MAX)).unwrap(),
            Staged::Ready(..)
        ));
    }
}
