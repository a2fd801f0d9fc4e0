//! REMOVE

use std::time::{Duration, Instant};

use smallvec::SmallVec;

use crate::links::Body;
use crate::packet::SEGMENT;
use gdsync_device::copy_engine::{CopyEngine, Part, Source, Ticket};
use gdsync_device::error::Result;
use gdsync_device::memory::Memory;

/// Packets staged at once: more than a peer has in flight.
const SLOTS: usize = 80;
/// Time limit of a copy; later ones are not waited for.
const LIMIT: Duration = Duration::from_secs(10);

/// Received packets of a queue pair on their way to memory that is not mapped.
#[derive(Debug, Default)]
pub(crate) struct ReceiveStaging {
    memory: Option<Memory>,
    /// Newest packet of each slot.
    slots: Vec<Option<Packet>>,
    next: usize,
    /// When the newest packet was staged.
    since: Option<Instant>,
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
        let waited_for = self.since.is_some_and(|since| since.elapsed() < LIMIT);
        let slots = if waited_for { &self.slots[..] } else { &[] };
        slots.iter().flatten().filter(|packet| !packet.ticket.is_over())
    }

    /// Whether copies are in progress.
    pub(super) fn is_busy(&self) -> bool {
        self.under_way().next().is_some()
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
        copy_engine: &dyn CopyEngine,
    ) -> Result<Ticket> {
        let memory = match &self.memory {
            Some(memory) => memory.clone(),
            None => {
                self.slots.resize_with(SLOTS, || None);
                self.memory.insert(Memory::alloc(SLOTS * SEGMENT)?).clone()
            }
        };
        let (slot, mut begin) = (self.next, self.next * SEGMENT);
        let keys = pieces.iter().map(|piece| piece.key).collect();
        let parts = pieces.into_iter().map(|Piece { from, memory: to, at, len, .. }| {
            body.copy_to(from, &memory, begin, len);
            let part = Part { from: Source::Here(memory.clone(), begin), to, at, len };
            begin += len;
            part
        });
        let ticket = copy_engine.start(parts.collect());
        self.slots[slot] = Some(Packet { ticket: ticket.clone(), keys });
        self.next = (slot + 1) % SLOTS;
        self.since = Some(Instant::now());
        Ok(ticket)
    }
}
