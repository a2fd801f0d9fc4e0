//! Requests that are written one at a time: the most frequent kind, a short one that nothing stands in the way of, in a straight line
//! from registers to the ring, and all others by what is there for lists.

use super::{Before, SendQueue, Sent, Written, written};
use crate::verbs::track::{Entry, Owner, Track};
use crate::verbs::wr::SendWr;
use gdsync_device::error::Result;
use mlx5_ring as mlx5;
use mlx5_ring::low16;

impl SendQueue {
    /// Writes a request and hands it to a stream: one more short one behind those of the same stream, the most frequent kind, in a
    /// straight line. `None` if there is anything else about it, and then nothing is done. Where a GPU will ring, the device is to
    /// be told: by [`SendQueue::watch_foreseen`].
    #[inline(always)]
    pub(crate) fn send_short(&self, wr: &SendWr<'_>, stream: u64, by_gpu: bool) -> Option<Sent> {
        let mut track = self.tracker.lock();
        let n = track.posted;
        if track.owner != Owner::Stream(stream) || track.rung != n || !self.qp.is_ready_to_send() {
            return None;
        }
        let before = Before { owner: track.owner, rung: n, gaps: track.gaps };
        let (end, doorbell, len) = self.write_short(&mut track, wr)?;
        track.rung = n + 1;
        self.tracker.tell(&track);
        if by_gpu {
            self.foresee(end);
        }
        drop(track);
        let is_told = self.qp.log.note_prepared(n, len, Some(stream));
        Some(Sent { sends: Written { range: n..n + 1, end, doorbell }, before, is_told })
    }

    /// As [`SendQueue::send_short`] of any.
    pub(crate) fn send_any(&self, wr: &SendWr<'_>, stream: u64, by_gpu: bool) -> Result<Sent> {
        self.with_room(|track| {
            let sent = self.send_one(track, wr, stream)?;
            if by_gpu {
                self.foresee(sent.sends.end);
            }
            Ok(sent)
        })
    }

    fn send_one(&self, track: &mut Track, wr: &SendWr<'_>, stream: u64) -> Result<Sent> {
        self.write_one(track, wr)?;
        let n = track.posted - 1;
        let before = match self.hand_over(track, &(n..n + 1), stream) {
            Ok(before) => before,
            Err(error) => {
                self.undo(track, &(n..n + 1));
                return Err(error);
            }
        };
        let is_told = self.qp.log.note_prepared(n, track.entry(n).len, Some(stream));
        Ok(Sent { sends: written(track, n..n + 1), before, is_told })
    }

    /// Writes a short request that is for no stream yet. `None` if there is anything else about it, or if it `may_be` none of this
    /// number, and then nothing is done.
    #[inline(always)]
    pub(crate) fn prepare_short(&self, wr: &SendWr<'_>, may_be: impl FnOnce(u64) -> bool) -> Option<Written> {
        let mut track = self.tracker.lock();
        let n = track.posted;
        if !may_be(n) || !self.qp.is_ready_to_send() {
            return None;
        }
        let (end, doorbell, len) = self.write_short(&mut track, wr)?;
        self.tracker.tell(&track);
        drop(track);
        self.qp.log.note_prepared(n, len, None);
        Some(Written { range: n..n + 1, end, doorbell })
    }

    /// Writes one more request behind `sends`, which were prepared for no stream yet. Returns whether it could: there may be another
    /// one behind them.
    #[inline(always)]
    pub(crate) fn prepare_behind(&self, sends: &mut Written, wr: &SendWr<'_>) -> Result<bool> {
        let Some(next) = self.prepare_short(wr, |n| n == sends.range.end) else {
            return self.prepare_any_behind(sends, wr);
        };
        *sends = Written { range: sends.range.start..next.range.end, ..next };
        Ok(true)
    }

    #[cold]
    #[inline(never)]
    fn prepare_any_behind(&self, sends: &mut Written, wr: &SendWr<'_>) -> Result<bool> {
        self.with_room(|track| {
            if track.posted != sends.range.end {
                return Ok(false);
            }
            self.write_one(track, wr)?;
            let n = sends.range.end;
            let entry = track.entry(n);
            sends.grow(entry);
            self.end.qp.log.note_prepared(n, entry.len, None);
            Ok(true)
        })
    }

    /// Writes a request of one block, and returns the index behind it, its doorbell, and its payload in bytes. `None` if it is of
    /// another kind, or if there is no room; then nothing is done.
    #[inline(always)]
    pub(super) fn write_short(&self, track: &mut Track, wr: &SendWr<'_>) -> Option<(u64, u64, u32)> {
        let begin = track.head;
        let mlx5::Short { block, ds, len } = mlx5::encode_short(&wr.op, self.qpn, low16(begin), wr.flags)?;
        let has_room = begin - track.tail < self.blocks && track.has_entry();
        // Of the slot behind the last one nobody reads before it is posted, so it may also be written for nothing.
        if !has_room || !self.ring.write_block(self.place(begin), &block) || !self.cq.reserve() {
            return None;
        }
        let (end, doorbell) = (begin + 1, mlx5::doorbell_word(block[0]));
        self.prefetch_behind(begin, end);
        track.push(Entry { wr_id: wr.wr_id, begin, blocks: 1, doorbell, ds, len, ..Entry::default() });
        Some((end, doorbell, len))
    }
}
