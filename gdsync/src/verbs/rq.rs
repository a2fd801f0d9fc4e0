//! The receive queue. The CPU posts buffers; the CPU or a stream waits for their completions.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use super::end::QueueEnd;
use super::track::{Entry, Track};
use super::wr::RecvWr;
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Memory, Word32, host_fence};
use gdsync_device::recorder::{By, Queue, Stage};
use mlx5_ring as mlx5;

pub(crate) struct RecvQueue {
    pub(crate) end: Arc<QueueEnd>,
    ring: Memory,
    stride: usize,
    entries: u64,
    record: Word32,
}

impl fmt::Debug for RecvQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "receive queue of QP {:#x}", self.end.qp.qpn)
    }
}

impl RecvQueue {
    pub(crate) fn new(end: Arc<QueueEnd>, ring: Memory, stride: usize, record: &Memory) -> Result<Arc<Self>> {
        let entries = (ring.len() / stride) as u64;
        let record = record.word32(mlx5::QP_DBREC_RECV)?;
        Ok(Arc::new(Self { end, ring, stride, entries, record }))
    }

    /// The ring, the doorbell record, and the entry size in bytes.
    pub(crate) fn places(&self) -> (&Memory, &Memory, usize) {
        (&self.ring, self.record.memory(), self.stride)
    }

    #[inline]
    pub(crate) fn post(&self, wrs: &[RecvWr<'_>]) -> Result<Option<u64>> {
        let result = self.post_all(wrs);
        // Lets a device whose queue pair is in error flush the new receives.
        self.end.qp.provider.ring(self.end.qp.qpn);
        result
    }

    #[inline]
    fn post_all(&self, wrs: &[RecvWr<'_>]) -> Result<Option<u64>> {
        let (mut last, mut rest, mut reaped) = (None, wrs, false);
        while !rest.is_empty() {
            let (posted, result) = self.post_some(rest);
            last = posted.clone().last().or(last);
            rest = &rest[posted.clone().count()..];
            match result {
                // Retries once per receive that did not fit.
                Err(Error::QueueFull { .. }) if !reaped || !posted.is_empty() => {
                    self.end.qp.provider.progress();
                    self.end.cq.reap();
                    reaped = true;
                }
                other => other?,
            }
        }
        Ok(last)
    }

    /// Posts until one fails. Returns the posted range, and the error of the next request.
    fn post_some(&self, wrs: &[RecvWr<'_>]) -> (Range<u64>, Result<()>) {
        let mut track = self.end.tracker.lock();
        let (first, begin) = (track.posted, track.head);
        // Checked under the lock. A reset changes the state before it takes this lock, so nothing is posted after a
        // reset.
        let written = self.end.qp.check_recv();
        let written = written.and_then(|()| wrs.iter().try_for_each(|wr| self.write(&mut track, wr)));
        // The record may lie in other memory: the ring must be visible to the card first.
        if track.posted > first
            && self.end.qp.provider.reads_by_itself()
            && let Err(error) = self.ring.flush()
        {
            self.end.cq.take_back(track.posted - first);
            (track.posted, track.head) = (first, begin);
            return (first..first, Err(error));
        }
        let posted = first..track.posted;
        if !posted.is_empty() {
            track.exposed = track.posted;
            self.end.tracker.publish(&track);
            for n in posted.clone() {
                let len = track.entry(n).len;
                self.end.qp.log.note(Stage::Prepared, Queue::Receive, By::Cpu, n, len);
            }
            host_fence();
            self.record.store(mlx5::recv_record(track.head));
        }
        (posted, written)
    }

    /// Writes one receive, not yet visible to the device.
    fn write(&self, track: &mut Track, wr: &RecvWr<'_>) -> Result<()> {
        let qpn = self.end.qp.qpn;
        let begin = track.head;
        if begin - track.tail >= self.entries || !track.has_entry() {
            return Err(self.full(track));
        }
        let mut wqe: SmallVec<[u8; 64]> = SmallVec::from_elem(0, self.stride);
        mlx5::encode_recv(wr.sges, self.stride, &mut wqe)
            .map_err(|e| Error::WorkRequest { qpn, source: e })?;
        if !self.end.cq.reserve() {
            return Err(self.end.cq_full(track.posted - track.retired));
        }
        let at = usize::try_from(begin & (self.entries - 1)).expect("a ring index fits in memory");
        self.ring.write(at * self.stride, &wqe).expect("entries lie in the ring");
        let len = wr.sges.iter().fold(0u32, |sum, sge| sum.saturating_add(sge.len));
        track.push(Entry { wr_id: wr.wr_id, begin, blocks: 1, len, ..Entry::default() });
        Ok(())
    }

    #[cold]
    fn full(&self, track: &Track) -> Error {
        let (queue, qpn) = ("receive queue", self.end.qp.qpn);
        let outstanding = track.head - track.tail;
        Error::QueueFull { queue, qpn, outstanding, depth: self.entries, untaken: 0 }
    }

    /// Checks that `receives` requests have room.
    pub(crate) fn check_room(&self, receives: usize) -> Result<()> {
        self.end.qp.check_recv()?;
        let receives = receives as u64;
        if receives > self.entries {
            let expected = "at most QpBuilder::max_recv_wr";
            return Err(Error::invalid("receives to have room for", receives, expected));
        }
        let track = self.end.tracker.lock();
        if !track.has_entries(receives) {
            return Err(self.full(&track));
        }
        let outstanding = track.posted - track.retired;
        drop(track);
        if self.end.cq.has_room(receives) { Ok(()) } else { Err(self.end.cq_full(outstanding)) }
    }

    /// Discards everything posted, after the device has reset the queue pair.
    pub(crate) fn reset(&self) {
        // Completions from before the reset still count. None arrive after it.
        self.end.cq.reap();
        let lost = self.end.tracker.reset();
        self.record.store(0);
        self.end.cq.discard(&self.end.tracker, lost);
    }
}

#[cfg(test)]
mod tests {
    use crate::verbs::{Context, RecvWr};
    use gdsync_device::memory::fences;
    use gdsync_soft::SoftHcaConfig;

    #[test]
    fn a_device_fence_precedes_the_record() {
        let pd = Context::soft(&SoftHcaConfig::default()).unwrap().alloc_pd().unwrap();
        let qp = pd.build_qp().build().unwrap();
        qp.init().unwrap();
        let count = fences::during(|| drop(qp.post_recv(&[RecvWr::new(&[]); 4]).unwrap()));
        assert_eq!(count, 1);
    }
}
