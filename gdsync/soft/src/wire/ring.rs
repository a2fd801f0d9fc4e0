//! Packet rings in shared memory, one per direction of a link, and the pool of their mappings.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;

use gdsync_device::error::{Error, Result};
use gdsync_device::memory::Memory;
use gdsync_shm::packet_ring::{self, Consumer, Corrupt, Found, LINE, Lines, Producer};

/// Bytes of a record's header.
pub(crate) const HEADER: usize = 28;
/// Maximum bytes of a record's body.
pub(crate) const MAX_BODY: usize = MAX_BODY_LEN as usize;
const MAX_BODY_LEN: u32 = 16 * 1024 + 64;
/// Bytes of all lines in a ring.
const LINES: usize = 512 * 1024;
/// Bytes of a ring: a line with the consumer position, then the lines.
pub(crate) const RING_BYTES: usize = LINE + LINES;

/// Maximum records in a ring.
pub(crate) const MAX_RECORDS: usize = LINES / LINE;

const _: () = assert!(packet_ring::carries((LINES / LINE) as u64, MAX_BODY_LEN));

/// A source range of a record's body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece<'a> {
    pub(crate) memory: &'a Memory,
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

#[derive(Debug)]
struct Ring(Memory);

impl Lines for Ring {
    type Marker = AtomicU32;
    type Position = AtomicU64;

    fn count(&self) -> u64 {
        (LINES / LINE) as u64
    }

    fn marker(&self, line: u64) -> &AtomicU32 {
        self.0.atomic32(at(line)).expect("lines are aligned and lie in the ring")
    }

    fn consumed(&self) -> &AtomicU64 {
        self.0.atomic64(0).expect("the ring starts with the position")
    }
}

/// Offset of a line.
fn at(line: u64) -> usize {
    LINE + usize::try_from(line).expect("lines fit in memory") * LINE
}

/// Why a record was not appended.
#[derive(Debug)]
pub(crate) enum PushError {
    Corrupt(Corrupt),
    /// A piece cannot be read: its program has unmapped it.
    Payload(Error),
}

impl From<Corrupt> for PushError {
    fn from(corrupt: Corrupt) -> Self {
        Self::Corrupt(corrupt)
    }
}

/// Producer end.
#[derive(Debug)]
pub(crate) struct TxRing {
    ring: Ring,
    producer: Producer,
    /// Keeps the ring mapped.
    _mapping: Option<Arc<Mapping>>,
}

impl TxRing {
    /// A ring over `memory` of [`RING_BYTES`] zero bytes.
    pub(super) fn new(memory: Memory) -> Self {
        Self { ring: Ring(memory), producer: Producer::default(), _mapping: None }
    }

    /// The ring at offset `begin` of a link's mapping.
    pub(super) fn of_link(mapping: &Arc<Mapping>, begin: usize) -> Result<Self> {
        let ring = Self::new(mapping.memory().slice(begin, RING_BYTES)?);
        Ok(Self { _mapping: Some(mapping.clone()), ..ring })
    }

    /// Prefetches the line of the next record for writing; the consumer polls it.
    #[inline]
    pub(crate) fn expect(&self) {
        self.ring.0.prefetch_to_write(at(self.producer.line(&self.ring)));
    }

    /// Whether the consumer has done with all records: [`RxRing::publish`].
    pub(crate) fn is_drained(&self) -> bool {
        self.producer.is_drained(&self.ring)
    }

    /// Appends a record with body `ext` and then `pieces`. Returns false if the ring is full.
    pub(crate) fn try_push(
        &mut self,
        header: &[u8; HEADER],
        ext: &[u8],
        pieces: &[Piece<'_>],
    ) -> std::result::Result<bool, PushError> {
        let body = ext.len() + pieces.iter().map(|p| p.len).sum::<usize>();
        assert!(body <= MAX_BODY, "packets are cut to the size of records");
        let len = u32::try_from(body).expect("checked above");
        let Some(line) = self.producer.reserve(&self.ring, len)? else { return Ok(false) };
        let memory = &self.ring.0;
        let place = |result: Result<()>| result.expect("reserved lines lie in the ring");
        let start = at(line);
        place(memory.write(start + 4, header));
        let mut to = start + 4 + HEADER;
        if !ext.is_empty() {
            place(memory.write(to, ext));
            to += ext.len();
        }
        for piece in pieces {
            memory.copy_from(to, piece.memory, piece.offset, piece.len).map_err(PushError::Payload)?;
            to += piece.len;
        }
        self.producer.publish(&self.ring, len);
        Ok(true)
    }
}

/// Consumer end.
#[derive(Debug)]
pub(crate) struct RxRing {
    ring: Ring,
    consumer: Consumer,
    hint: Arc<RxHint>,
    /// Offset of the ring in the mapping.
    begin: usize,
    /// Keeps the ring mapped.
    _mapping: Option<Arc<Mapping>>,
}

/// Whether a record waits, for threads without the consumer's lock. May be stale, or of the slot's previous link.
#[derive(Debug)]
pub(crate) struct RxHint {
    memory: Memory,
    /// Offset of the next record's marker.
    at: AtomicUsize,
}

impl RxHint {
    /// Over the mapping of a link, which may change.
    pub(super) fn into(memory: Memory) -> Self {
        Self { memory, at: AtomicUsize::new(at(0)) }
    }

    pub(crate) fn has_record(&self) -> bool {
        let marker = self.memory.atomic32(self.at.load(Ordering::Relaxed));
        marker.expect("lines are aligned and lie in the memory").load(Ordering::Relaxed) != 0
    }
}

/// A record that has not been popped.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) header: [u8; HEADER],
    pub(crate) body_len: usize,
    found: Found,
}

impl RxRing {
    /// A ring over `memory` of [`RING_BYTES`].
    pub(super) fn new(memory: Memory) -> Self {
        let hint = Arc::new(RxHint::into(memory.clone()));
        Self { ring: Ring(memory), consumer: Consumer::default(), hint, begin: 0, _mapping: None }
    }

    /// The ring at offset `begin` of a link's mapping.
    pub(super) fn of_link(mapping: &Arc<Mapping>, begin: usize) -> Result<Self> {
        let ring = Ring(mapping.memory().slice(begin, RING_BYTES)?);
        let (consumer, hint) = (Consumer::default(), mapping.hint().clone());
        hint.at.store(begin + at(0), Ordering::Relaxed);
        Ok(Self { ring, consumer, hint, begin, _mapping: Some(mapping.clone()) })
    }

    /// Whether the producer has written nothing more.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.consumer.is_empty(&self.ring)
    }

    /// The next record, if any.
    pub(crate) fn peek(&mut self) -> std::result::Result<Option<Record>, Corrupt> {
        let Some(found) = self.consumer.peek(&self.ring)? else { return Ok(None) };
        let mut header = [0; HEADER];
        self.ring.0.read(at(found.line) + 4, &mut header).expect("found records lie in the ring");
        Ok(Some(Record { header, body_len: found.len as usize, found }))
    }

    /// Whether a record waits.
    pub(crate) fn has_record(&mut self) -> bool {
        !matches!(self.consumer.peek(&self.ring), Ok(None))
    }

    fn body(&self, record: &Record, offset: usize, len: usize) -> Result<usize> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= record.body_len);
        if !inside {
            return Err(gdsync_device::Error::OutOfBounds { offset, len, size: record.body_len });
        }
        Ok(at(record.found.line) + 4 + HEADER + offset)
    }

    /// Copies body bytes out.
    pub(crate) fn read_body(&self, record: &Record, offset: usize, out: &mut [u8]) -> Result<()> {
        self.ring.0.read(self.body(record, offset, out.len())?, out)
    }

    /// Copies body bytes to `memory`.
    pub(crate) fn copy_body_to(
        &self,
        record: &Record,
        offset: usize,
        memory: &Memory,
        to: usize,
        len: usize,
    ) -> Result<()> {
        memory.copy_from(to, &self.ring.0, self.body(record, offset, len)?, len)
    }

    /// Shows the producer that nothing more will come of the records popped so far.
    pub(crate) fn publish(&mut self) {
        self.consumer.publish(&self.ring);
    }

    /// Frees the record's lines. Returns whether the producer may be waiting for them.
    pub(crate) fn pop(&mut self, record: Record) -> bool {
        let room = self.consumer.pop(&self.ring, record.found);
        let next = self.begin + at(self.consumer.line(&self.ring));
        self.hint.at.store(next, Ordering::Relaxed);
        room
    }
}

/// The next record of each link, for threads without the lock. A hint outlives its link, and shows no record then. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct RxHints(Arc<boxcar::Vec<Arc<RxHint>>>);

impl RxHints {
    /// Whether a packet may be waiting on any link.
    pub(crate) fn any(&self) -> bool {
        self.0.iter().any(|(_, hint)| hint.has_record())
    }
}

/// Mappings of an HCA, as many as it ever had links at once, and their hints. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct MappingPool {
    free: Arc<Mutex<Vec<Slot>>>,
    pub(super) rx_hints: RxHints,
}

#[derive(Clone, Debug)]
struct Slot {
    memory: Memory,
    hint: Arc<RxHint>,
}

/// A mapping of a link's file; returns to the pool on drop.
#[derive(Debug)]
pub(super) struct Mapping {
    slot: Slot,
    mappings: MappingPool,
}

impl MappingPool {
    /// Maps `len` bytes of a link's file. All files of an HCA have the same length.
    pub(super) fn map(&self, file: BorrowedFd<'_>, len: usize) -> Result<Arc<Mapping>> {
        let known = self.free.lock().pop();
        let slot = match known {
            Some(slot) => {
                if let Err(error) = slot.memory.remap(Some(file)) {
                    self.free.lock().push(slot);
                    return Err(error);
                }
                slot
            }
            None => {
                let memory = Memory::map_shared(file, len)?;
                let hint = Arc::new(RxHint::into(memory.clone()));
                self.rx_hints.0.push(hint.clone());
                Slot { memory, hint }
            }
        };
        Ok(Arc::new(Mapping { slot, mappings: self.clone() }))
    }
}

impl Mapping {
    pub(super) fn memory(&self) -> &Memory {
        &self.slot.memory
    }

    pub(super) fn hint(&self) -> &Arc<RxHint> {
        &self.slot.hint
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        match self.slot.memory.remap(None) {
            Ok(()) => self.mappings.free.lock().push(self.slot.clone()),
            // Leaked: its content is unknown.
            Err(error) => {
                tracing::warn!(%error, "software HCA: memory of a closed link leaks")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    fn pair() -> (TxRing, RxRing, Memory) {
        let memory = Memory::alloc(RING_BYTES).unwrap();
        (TxRing::new(memory.clone()), RxRing::new(memory.clone()), memory)
    }

    fn header(n: u64) -> [u8; HEADER] {
        std::array::from_fn(|i| n.to_le_bytes()[i % 8] ^ i.to_le_bytes()[0])
    }

    fn body(n: u64, len: usize) -> Vec<u8> {
        (0..len).map(|i| (n.wrapping_mul(31) + i as u64).to_le_bytes()[0]).collect()
    }

    fn push(tx: &mut TxRing, n: u64, len: usize) -> bool {
        let bytes = body(n, len);
        let (ext, rest) = bytes.split_at(len.min(24));
        let memory = Memory::alloc(rest.len().max(1)).unwrap();
        memory.write(0, rest).unwrap();
        let pieces = [Piece { memory: &memory, offset: 0, len: rest.len() }];
        tx.try_push(&header(n), ext, &pieces).unwrap()
    }

    fn pop(rx: &mut RxRing, n: u64, len: usize) -> bool {
        let Some(record) = rx.peek().unwrap() else { return false };
        assert_eq!(record.header, header(n));
        assert_eq!(record.body_len, len);
        let mut bytes = vec![0; len];
        rx.read_body(&record, 0, &mut bytes).unwrap();
        assert_eq!(bytes, body(n, len));
        assert!(rx.read_body(&record, 1, &mut bytes).is_err() || len == 0);
        rx.pop(record);
        true
    }

    proptest! {
        #[test]
        fn ring_is_a_fifo(steps in prop::collection::vec((any::<bool>(), 0..=MAX_BODY), 0..400)) {
            let (mut tx, mut rx, _) = pair();
            let mut model = VecDeque::new();
            let (mut next, mut first) = (0, 0);
            for (is_push, len) in steps {
                if is_push {
                    if push(&mut tx, next, len) {
                        model.push_back(len);
                        next += 1;
                    } else {
                        prop_assert!(model.iter().sum::<usize>() > LINES / 4, "refused with enough room");
                    }
                } else {
                    let expected = model.pop_front();
                    prop_assert_eq!(pop(&mut rx, first, expected.unwrap_or(0)), expected.is_some());
                    first += u64::from(expected.is_some());
                }
            }
        }
    }

    #[test]
    fn two_threads_over_many_laps() {
        const RECORDS: u64 = 300_000;
        let size = |n: u64| [0, 8, 31, 32, 33, 96, 97, 500, 4096][(n % 9) as usize];
        let (mut tx, mut rx, _) = pair();
        let producer = std::thread::spawn(move || {
            for n in 0..RECORDS {
                let bytes = body(n, size(n));
                while !tx.try_push(&header(n), &bytes, &[]).unwrap() {
                    std::thread::yield_now();
                }
            }
        });
        for n in 0..RECORDS {
            while !pop(&mut rx, n, size(n)) {
                std::thread::yield_now();
            }
        }
        producer.join().unwrap();
        assert!(!rx.has_record());
    }

    #[test]
    fn empty_ring_fits_largest_record_at_any_position() {
        let (mut tx, mut rx, _) = pair();
        for n in 0..200 {
            assert!(push(&mut tx, n, MAX_BODY), "record {n}");
            assert!(pop(&mut rx, n, MAX_BODY));
        }
    }

    #[test]
    fn corrupt_marker_or_position_is_an_error() {
        let (mut tx, mut rx, memory) = pair();
        for marker in [1, u32::MAX, 1 << 30, 1 << 31 | 600_000] {
            memory.write(LINE, &marker.to_le_bytes()).unwrap();
            assert!(rx.peek().is_err(), "{marker:#x}");
        }
        memory.write(0, &u64::MAX.to_le_bytes()).unwrap();
        let broken = (0..100).find_map(|_| tx.try_push(&[0; HEADER], &[0; MAX_BODY], &[]).err());
        assert!(matches!(broken, Some(PushError::Corrupt(Corrupt { what: "position", .. }))), "{broken:?}");
    }

    #[test]
    fn any_words_in_the_ring_are_survived() {
        bolero::check!().with_type::<Vec<(u8, u32)>>().for_each(|steps| {
            let (mut tx, mut rx, memory) = pair();
            for &(step, value) in steps {
                let line = rx.consumer.line(&rx.ring) + u64::from(step / 8);
                match step % 4 {
                    0 => memory.write(at(line % 8192), &value.to_le_bytes()).unwrap(),
                    1 => memory.write(0, &u64::from(value >> 8).to_le_bytes()).unwrap(),
                    2 => _ = tx.try_push(&header(1), &body(1, value as usize % MAX_BODY), &[]),
                    _ => {
                        let Ok(Some(record)) = rx.peek() else { continue };
                        rx.read_body(&record, 0, &mut vec![0; record.body_len]).unwrap();
                        rx.pop(record);
                    }
                }
            }
        });
    }
}
