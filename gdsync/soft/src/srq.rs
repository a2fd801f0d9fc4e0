//! Shared receive queues: a ring whose entries are linked, from which many queue pairs take receives.

use smallvec::SmallVec;

use crate::async_event::{AsyncEvent, AsyncEventQueue};
use gdsync_device::engine::Indices;
use gdsync_device::memory::Memory;
use gdsync_shm as protocol;
use mlx5_ring::{self as mlx5, DataSeg};

/// Scatter list of a receive.
pub(crate) type Sges = SmallVec<[DataSeg; 4]>;

/// The first SRQN, large enough to reveal byte-order mistakes.
const BASE: u32 = 0x5a1;

/// The shared receive queues of an HCA, by number.
#[derive(Debug, Default)]
pub(crate) struct Srqs(Vec<Option<Srq>>, Indices);

/// The receive at an index of the ring is filled, taken, and put back at the end of the list by the program, which sets
/// the link of the entry before it.
#[derive(Debug)]
struct Srq {
    ring: Memory,
    stride: usize,
    /// Its first word counts the receives posted, modulo 2^16.
    record: Memory,
    /// Receives are taken in the order of the ring: the links do not count.
    is_cyclic: bool,
    /// Index of the next receive.
    head: u16,
    taken: u64,
    /// Reports when fewer receives than this are left; 0 after the report.
    limit: u32,
}

impl Srqs {
    /// Adds a queue and returns its number; `None` if the ring holds no entry.
    pub(crate) fn create(
        &mut self,
        ring: Memory,
        stride: usize,
        record: Memory,
        is_cyclic: bool,
    ) -> Option<u32> {
        let is_usable = stride >= mlx5::SRQ_LINK + mlx5::SEGMENT && ring.len() >= stride;
        if !is_usable || record.atomic32(0).is_err() {
            return None;
        }
        let srq = Srq { ring, stride, record, is_cyclic, head: 0, taken: 0, limit: 0 };
        let index = self.1.take();
        self.0.resize_with(self.0.len().max(index + 1), || None);
        self.0[index] = Some(srq);
        Some(BASE + u32::try_from(index).ok()?)
    }

    pub(crate) fn destroy(&mut self, srqn: u32) {
        if self.slot(srqn).and_then(Option::take).is_some() {
            self.1.give_back((srqn - BASE) as usize);
        }
    }

    fn slot(&mut self, srqn: u32) -> Option<&mut Option<Srq>> {
        self.0.get_mut(srqn.checked_sub(BASE)? as usize)
    }

    fn get(&mut self, srqn: u32) -> Option<&mut Srq> {
        self.slot(srqn)?.as_mut()
    }

    /// Asks for an event when fewer than `limit` receives are left.
    pub(crate) fn set_limit(&mut self, srqn: u32, limit: u32, async_events: &mut AsyncEventQueue) {
        if let Some(srq) = self.get(srqn) {
            srq.limit = limit;
            srq.check_limit(srqn, async_events);
        }
    }

    /// The limit whose event is still to come; 0 for none.
    pub(crate) fn limit(&mut self, srqn: u32) -> u32 {
        self.get(srqn).map_or(0, |srq| srq.limit)
    }

    /// Whether a receive is posted.
    pub(crate) fn has_receive(&mut self, srqn: u32) -> bool {
        self.get(srqn).is_some_and(|srq| srq.left() > 0)
    }

    /// Takes the next receive, which there must be: its index and buffers.
    pub(crate) fn take(&mut self, srqn: u32, async_events: &mut AsyncEventQueue) -> Option<(u16, Sges)> {
        let srq = self.get(srqn)?;
        let index = srq.head;
        let (next, sges) = srq.read(index)?;
        srq.head = if srq.is_cyclic { index.wrapping_add(1) & srq.mask() } else { next };
        srq.taken += 1;
        srq.check_limit(srqn, async_events);
        Some((index, sges))
    }

    /// Buffers of a receive that was taken.
    pub(crate) fn read(&mut self, srqn: u32, index: u16) -> Option<Sges> {
        Some(self.get(srqn)?.read(index)?.1)
    }
}

impl Srq {
    /// Of indices, as a cyclic ring has a power of two of entries.
    fn mask(&self) -> u16 {
        u16::try_from(self.entries() - 1).unwrap_or(u16::MAX)
    }

    fn entries(&self) -> usize {
        self.ring.len() / self.stride
    }

    /// Number of receives posted and not taken; 0 if the record is out of range.
    fn left(&self) -> u64 {
        let record = self.record.atomic32(0).expect("checked when created");
        let left = mlx5::extend16(self.taken, protocol::recorded(record)) - self.taken;
        if left > self.entries() as u64 { 0 } else { left }
    }

    /// Link and buffers of an entry.
    fn read(&self, index: u16) -> Option<(u16, Sges)> {
        // The program writes the links.
        let at = usize::from(index) % self.entries() * self.stride;
        let mut wqe: SmallVec<[u8; 128]> = SmallVec::from_elem(0, self.stride);
        self.ring.read(at, &mut wqe).ok()?;
        let (link, sges) = wqe.split_first_chunk()?;
        Some((mlx5::srq_next(link), mlx5::decode_recv(sges).collect()))
    }

    fn check_limit(&mut self, srqn: u32, async_events: &mut AsyncEventQueue) {
        if self.left() < self.limit.into() {
            self.limit = 0;
            async_events.raise(AsyncEvent::SrqLimitReached(srqn));
        }
    }
}
