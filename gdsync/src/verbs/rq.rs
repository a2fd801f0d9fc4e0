//! The receive queue. The CPU writes receives; the CPU or a stream posts them and waits for their completions.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use super::end::QueueEnd;
use super::sq::OfStream;
use super::stream_name;
use super::track::{Entry, Owner, Track};
use super::wr::RecvWr;
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Memory, Word32, host_fence};
use gdsync_device::recorder::{By, Queue, Stage};
use mlx5_ring::{self as mlx5, WqeError};

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
        if self.end.qp.health.wants_receive_calls() {
            self.end.qp.provider.ring(self.end.qp.qpn);
        }
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
        let written = self.end.qp.check_recv().and_then(|()| self.check_free(&track));
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
            self.end.tracker.set_owner(&mut track, Owner::Cpu);
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

    /// Refuses posting by the CPU while a stream has not posted all of its receives, or a batch holds some.
    fn check_free(&self, track: &Track) -> Result<()> {
        if track.posted > track.exposed {
            return Err(self.busy("a batch with receives that was not submitted".into()));
        }
        self.check_owner(track, track.head, Owner::Cpu)
    }

    /// Refuses `user` while another stream has not posted its receives, those before producer index `next`.
    fn check_owner(&self, track: &Track, next: u64, user: Owner) -> Result<()> {
        match track.owner {
            Owner::Stream(id) if track.owner != user && self.record.load() != mlx5::recv_record(next) => {
                Err(self.busy(stream_name::describe(id)))
            }
            _ => Ok(()),
        }
    }

    #[cold]
    fn busy(&self, owner: String) -> Error {
        Error::Busy { queue: "receive", qpn: self.end.qp.qpn, owner }
    }

    /// Writes a receive that a stream will post. Returns its number.
    pub(crate) fn prepare(&self, wr: &RecvWr<'_>) -> Result<u64> {
        match self.try_prepare(wr) {
            Err(Error::QueueFull { .. }) => {
                self.end.qp.provider.progress();
                self.end.cq.reap();
                self.try_prepare(wr)
            }
            other => other,
        }
    }

    fn try_prepare(&self, wr: &RecvWr<'_>) -> Result<u64> {
        let mut track = self.end.tracker.lock();
        self.end.qp.check_recv()?;
        self.write(&mut track, wr)?;
        let n = track.posted - 1;
        // As for receives of the CPU: the ring must be visible to the card first.
        if self.end.qp.provider.reads_by_itself()
            && let Err(error) = self.ring.flush()
        {
            self.take_back(&mut track, n);
            return Err(error);
        }
        host_fence();
        self.end.tracker.publish(&track);
        self.end.qp.log.note(Stage::Prepared, Queue::Receive, By::Cpu, n, track.entry(n).len);
        Ok(n)
    }

    /// The record word that a stream writes to post receive `n`, and its value.
    pub(crate) fn record_of(&self, n: u64) -> (Word32, u32) {
        (self.record.clone(), mlx5::recv_record(self.end.tracker.lock().entry(n).end()))
    }

    /// Submits prepared receive `n` to a stream, which will post it. Returns the owner before, for [`RecvQueue::unsubmit`].
    pub(crate) fn submit(&self, n: u64, stream: OfStream) -> Result<Owner> {
        let mut track = self.end.tracker.lock();
        self.end.qp.check_recv()?;
        let owner = Owner::Stream(stream.id);
        self.check_owner(&track, track.entry(track.exposed).begin, owner)?;
        if track.exposed != n {
            return Err(Error::OutOfOrder { qpn: self.end.qp.qpn, expected: track.exposed, got: n });
        }
        track.exposed = n + 1;
        Ok(self.end.tracker.set_owner(&mut track, owner))
    }

    /// Undoes [`RecvQueue::submit`].
    pub(crate) fn unsubmit(&self, n: u64, before: Owner) {
        let mut track = self.end.tracker.lock();
        track.exposed = n;
        self.end.tracker.set_owner(&mut track, before);
    }

    /// Takes back prepared receive `n`, which was not submitted. No-op in a forked child.
    pub(crate) fn cancel(&self, n: u64) {
        if self.end.qp.is_here() {
            self.take_back(&mut self.end.tracker.lock(), n);
        }
    }

    /// Takes back receive `n` once those behind it are taken back.
    fn take_back(&self, track: &mut Track, n: u64) {
        track.entry_mut(n).cancelled = true;
        let before = track.posted;
        while track.posted > track.exposed && track.entry(track.posted - 1).cancelled {
            track.posted -= 1;
            track.head = track.entry(track.posted).begin;
        }
        self.end.tracker.publish(track);
        self.end.cq.take_back(before - track.posted);
    }

    /// Whether a failed stream left receives that it did not post.
    pub(crate) fn has_unexposed(&self) -> bool {
        self.record.load() != mlx5::recv_record(self.end.tracker.lock().head)
    }

    /// Exposes those receives to the device, which is in the error state, before a reset, as the send queue does.
    pub(crate) fn expose_abandoned(&self) {
        self.record.store(mlx5::recv_record(self.end.tracker.lock().head));
        self.end.qp.provider.ring(self.end.qp.qpn);
    }

    /// Writes one receive, not yet visible to the device.
    fn write(&self, track: &mut Track, wr: &RecvWr<'_>) -> Result<()> {
        let qpn = self.end.qp.qpn;
        let begin = track.head;
        if begin - track.tail >= self.entries || !track.has_entry() {
            return Err(self.full(track));
        }
        let mut wqe: SmallVec<[u8; 64]> = SmallVec::from_elem(0, self.stride);
        mlx5::encode_recv(wr.sges, self.stride, &mut wqe).map_err(|error| match error {
            WqeError::TooManySges { got, max } => {
                let value = format!("{got}, where {max} fit");
                Error::invalid(
                    "the number of buffers of a receive",
                    value,
                    "at most QpBuilder::max_recv_sge: raise it",
                )
            }
            source => Error::WorkRequest { qpn, source },
        })?;
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
    use crate::verbs::{Context, Qp, RecvWr};
    use gdsync_device::memory::fences;
    use gdsync_device::{QpAttr, QpState};
    use gdsync_soft::SoftHcaConfig;

    fn queue_pair() -> Qp {
        let pd = Context::soft(&SoftHcaConfig::default()).unwrap().alloc_pd().unwrap();
        let qp = pd.build_qp().build().unwrap();
        qp.init().unwrap();
        qp
    }

    #[test]
    fn the_software_hca_wants_calls_for_receives_only_in_the_error_state() {
        let qp = queue_pair();
        for _ in 0..2 {
            assert!(!qp.core().health.wants_receive_calls());
            qp.modify(&QpAttr::to(QpState::ERR)).unwrap();
            assert!(qp.core().health.wants_receive_calls());
            qp.modify(&QpAttr::to(QpState::RESET)).unwrap();
            qp.init().unwrap();
        }
    }

    #[test]
    fn a_device_fence_precedes_the_record() {
        let qp = queue_pair();
        let count = fences::during(|| drop(qp.post_recv(&[RecvWr::new(&[]); 4]).unwrap()));
        assert_eq!(count, 1);
    }
}
