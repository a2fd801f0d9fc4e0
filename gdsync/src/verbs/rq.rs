//! The receive queue: buffers posted by the CPU, early; their completions awaited by the CPU or a stream.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::cq::CqInner;
use super::qp::QpCore;
use super::track::{Entry, Track, Tracker};
use super::wr::RecvWr;
use crate::error::{Error, Result};
use crate::memory::{Memory, Word32};
use crate::mlx5;
use crate::stream::Source;

pub(crate) struct RecvQueue {
    pub(crate) qp: Arc<QpCore>,
    pub(crate) cq: Arc<CqInner>,
    pub(crate) tracker: Arc<Tracker>,
    ring: Memory,
    stride: usize,
    entries: u64,
    record: Word32,
}

impl fmt::Debug for RecvQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "receive queue of QP {:#x}", self.qp.qpn)
    }
}

impl RecvQueue {
    pub(crate) fn new(
        qp: Arc<QpCore>,
        cq: Arc<CqInner>,
        tracker: Arc<Tracker>,
        ring: Memory,
        stride: usize,
        record: &Memory,
    ) -> Result<Arc<Self>> {
        let entries = (ring.len() / stride) as u64;
        let record = record.word32(mlx5::QP_DBREC_RECV)?;
        Ok(Arc::new(Self { qp, cq, tracker, ring, stride, entries, record }))
    }

    pub(crate) fn post(&self, wrs: &[RecvWr<'_>]) -> Result<()> {
        self.qp.check_post("post_recv")?;
        for wr in wrs {
            let first = self.post_one(&mut self.tracker.lock(), wr);
            match first {
                Err(Error::QueueFull { .. }) => {
                    self.qp.provider.progress();
                    self.cq.reap();
                    self.qp.check_post("post_recv")?;
                    self.post_one(&mut self.tracker.lock(), wr)?;
                }
                other => other?,
            }
        }
        Ok(())
    }

    fn post_one(&self, track: &mut Track, wr: &RecvWr<'_>) -> Result<()> {
        let qpn = self.qp.qpn;
        let begin = track.head;
        if begin - track.tail >= self.entries || !track.has_entry() {
            let outstanding = begin - track.tail;
            return Err(Error::QueueFull { queue: "receive queue", qpn, outstanding, depth: self.entries });
        }
        let mut wqe = [0; mlx5::MAX_WQE_BYTES];
        let wqe = wqe.get_mut(..self.stride).expect("the builder keeps strides below a WQE's size");
        mlx5::encode_recv(wr.sges, self.stride, wqe).map_err(|e| Error::WorkRequest { qpn, source: e })?;
        if !self.cq.reserve() {
            let (outstanding, depth) = (track.posted - track.retired, self.cq.capacity());
            return Err(Error::QueueFull { queue: "receive completion queue", qpn, outstanding, depth });
        }
        let at = usize::try_from(begin & (self.entries - 1)).expect("a ring index fits in memory");
        self.ring.write(at * self.stride, wqe).expect("entries lie in the ring");
        track.push(Entry { wr_id: wr.wr_id, begin, end: begin + 1, ..Entry::default() });
        track.rung = track.posted;
        self.record.store(mlx5::recv_record(track.head));
        Ok(())
    }

    /// Forgets everything posted, after the queue pair was reset.
    pub(crate) fn reset(&self) {
        // What completed before the reset still counts; after this nothing more arrives.
        self.cq.reap();
        let lost = self.tracker.lock().reset();
        self.record.atomic().store(0, Ordering::Release);
        self.cq.forget(lost);
    }
}

impl Source for RecvQueue {
    fn progress(&self) -> bool {
        self.qp.provider.progress()
    }

    fn signal(&self) {
        self.qp.provider.ring(self.qp.qpn);
    }

    fn park(&self, ready: &dyn Fn() -> bool, timeout: Duration) {
        self.cq.park(ready, timeout);
    }

    fn fail(&self, reason: &Error) {
        self.qp.stop(reason);
    }

    fn describe(&self) -> String {
        format!("a receive completion of QP {:#x}", self.qp.qpn)
    }
}
