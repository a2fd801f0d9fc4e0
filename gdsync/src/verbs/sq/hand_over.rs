//! Requests that were written, on their way to a stream, whose doorbell will expose them, and to the device, which is told where it
//! cannot see the doorbell.

use std::ops::Range;

use super::{SendQueue, Written};
use crate::verbs::track::{Owner, Track};
use gdsync_device::error::Result;

/// Who owned a queue, and up to where it was exposed, before a range was submitted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Before {
    pub(super) owner: Owner,
    pub(super) rung: u64,
    pub(super) gaps: u64,
}

impl SendQueue {
    /// Hands prepared requests to a stream: after this the stream's doorbell will expose them. Where a GPU will ring, the device is to
    /// be told: by [`SendQueue::watch_foreseen`]. Returns what [`SendQueue::unsubmit`] needs.
    #[inline]
    pub(crate) fn submit(&self, sends: &Written, stream: u64, by_gpu: bool) -> Result<Before> {
        let mut track = self.tracker.lock();
        // One behind those of the same stream, as most are.
        let is_next = track.owner == Owner::Stream(stream) && track.rung == sends.range.start;
        if !(is_next && self.qp.is_ready_to_send()) {
            drop(track);
            return self.submit_any(sends, stream, by_gpu);
        }
        let before = Before { owner: track.owner, rung: track.rung, gaps: track.gaps };
        track.rung = sends.range.end;
        if by_gpu {
            self.foresee(sends.end);
        }
        Ok(before)
    }

    #[cold]
    #[inline(never)]
    fn submit_any(&self, sends: &Written, stream: u64, by_gpu: bool) -> Result<Before> {
        self.with_room(|track| {
            let before = self.hand_over(track, &sends.range, stream)?;
            if by_gpu {
                self.foresee(sends.end);
            }
            Ok(before)
        })
    }

    #[inline(always)]
    pub(super) fn hand_over(&self, track: &mut Track, range: &Range<u64>, stream: u64) -> Result<Before> {
        let before = Before { owner: track.owner, rung: track.rung, gaps: track.gaps };
        let theirs = !matches!(track.owner, Owner::Nobody) && track.owner != Owner::Stream(stream);
        if theirs && !track.is_idle() {
            return Err(self.busy(track.owner));
        }
        self.expose(track, range)?;
        track.owner = Owner::Stream(stream);
        Ok(before)
    }

    /// Undoes [`SendQueue::submit`], also of what was foreseen.
    pub(crate) fn unsubmit(&self, sends: &Written, before: Before) {
        let mut track = self.end.tracker.lock();
        if let Some(doorbell_watch) = &self.doorbell_watch {
            doorbell_watch.withdraw(sends.end, track.entry(before.rung).begin);
        }
        track.rung = before.rung;
        track.gaps = before.gaps;
        track.owner = before.owner;
    }

    /// Tells the device that a stream which cannot signal will ring up to the end of `sends`.
    pub(crate) fn watch(&self, sends: &Written) {
        self.qp.provider.watch(self.qpn, sends.end);
    }

    /// The same of sends up to block `end`, first under the lock of the queue.
    #[inline(always)]
    pub(super) fn foresee(&self, end: u64) {
        if let Some(doorbell_watch) = &self.doorbell_watch {
            doorbell_watch.foresee(end);
        }
    }

    /// And then, when the caller has let a lock go since.
    #[inline]
    pub(crate) fn watch_foreseen(&self, end: u64) {
        if self.doorbell_watch.as_ref().is_some_and(|doorbell_watch| !doorbell_watch.is_watched()) {
            self.qp.provider.watch(self.qpn, end);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::verbs::{Context, SendWr};
    use gdsync_soft::SoftHcaConfig;

    #[test]
    fn what_is_taken_back_is_foreseen_no_more() {
        let pd = Context::soft(&SoftHcaConfig::default()).unwrap().alloc_pd().unwrap();
        let (a, b) = (pd.build_qp().build().unwrap(), pd.build_qp().build().unwrap());
        a.connect(b.address()).unwrap();
        b.connect(a.address()).unwrap();
        let queue = &a.send;
        let foreseen = || queue.doorbell_watch.as_ref().unwrap().foreseen();
        let prepare = || queue.prepare(&[SendWr::nop(), SendWr::nop()], None).unwrap().sends;
        let [first, dropped, last] = [prepare(), prepare(), prepare()];
        // On a stream of the host nobody need foresee it.
        let before = queue.submit(&first, 1, false).unwrap();
        assert_eq!(foreseen(), 0);
        queue.unsubmit(&first, before);
        queue.submit(&first, 1, true).unwrap();
        assert_eq!(foreseen(), 2);
        queue.cancel(&dropped.range);
        let before = queue.submit(&last, 1, true).unwrap();
        assert_eq!(foreseen(), 6);
        queue.unsubmit(&last, before);
        assert_eq!(foreseen(), 2, "what is between them will not be rung either");
    }
}
