//! The send queue: writes WQEs, which a doorbell of the CPU or of a stream exposes later.

use std::ops::Range;
use std::sync::Arc;
use std::{fmt, mem};

use super::end::QueueEnd;
use super::qp::QpCore;
use super::source::{DoorbellValue, SendDoorbell};
use super::stream_name;
use super::track::{Entry, Owner, Track};
use super::wr::SendWr;
use gdsync_device::DoorbellWatch;
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::Memory;
use gdsync_device::recorder::{By, Queue, Stage};
use mlx5_ring::low16;
use mlx5_ring::{self as mlx5, BB, MAX_WQE_BYTES};

pub(crate) struct SendQueue {
    pub(crate) end: Arc<QueueEnd>,
    ring: Memory,
    blocks: u64,
    limits: Limits,
    send_doorbell: Arc<SendDoorbell>,
    doorbell_watch: Option<DoorbellWatch>,
    qp: Arc<QpCore>,
    qpn: u32,
}

const INLINE: &str = "at most QpBuilder::max_inline: raise it (to 512 at most), or send from a region";

/// Limits of one request, as the QP was built.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) sges: usize,
    pub(crate) inline: usize,
    pub(crate) is_datagram: bool,
}

impl Limits {
    /// Blocks of the largest request: control segment, remote address or address vector, then SGEs or inline data.
    pub(crate) fn blocks(self) -> usize {
        let address = if self.is_datagram { mlx5::AddressVector::BYTES } else { 16 };
        (16 + address + (16 * self.sges).max((4 + self.inline).next_multiple_of(16))).div_ceil(BB)
    }

    #[inline]
    fn check(self, op: &mlx5::SendOp<'_>) -> Result<()> {
        use mlx5::{Payload, SendOp};
        let fits = match op {
            SendOp::Nop => true,
            SendOp::Datagram { .. } => self.is_datagram,
            _ => !self.is_datagram,
        };
        if !fits {
            let expected = "datagrams on a datagram queue pair, and on no other";
            return Err(Error::invalid("operation", format!("{op:?}"), expected));
        }
        match *op {
            SendOp::Send { payload: Payload::Inline(data), .. }
            | SendOp::Datagram { payload: Payload::Inline(data), .. }
            | SendOp::Write { payload: Payload::Inline(data), .. }
                if data.len() > self.inline =>
            {
                let value = format!("{}, where {} fit", data.len(), self.inline);
                Err(Error::invalid("inline data length", value, INLINE))
            }
            SendOp::Send { payload: Payload::Sges(sges), .. }
            | SendOp::Datagram { payload: Payload::Sges(sges), .. }
            | SendOp::Write { payload: Payload::Sges(sges), .. }
            | SendOp::Read { sges, .. }
                if sges.len() > self.sges =>
            {
                self.check_buffers(sges)
            }
            _ => Ok(()),
        }
    }

    #[cold]
    fn check_buffers(self, sges: &[mlx5::DataSeg]) -> Result<()> {
        // Empty SGEs are not written to the WQE.
        let buffers = sges.iter().filter(|sge| sge.len > 0).count();
        if buffers > self.sges {
            let value = format!("{buffers}, where {} fit", self.sges);
            let expected = "at most QpBuilder::max_send_sge: raise it";
            return Err(Error::invalid("the number of buffers of a send", value, expected));
        }
        Ok(())
    }
}

/// Distance in blocks between the block being written and the block being prefetched.
const AHEAD: u64 = 8;

/// Written requests, and the doorbell that exposes the last of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Written {
    pub(crate) range: Range<u64>,
    /// Index of the block after the last one.
    pub(crate) end: u64,
    doorbell: u64,
}

impl Written {
    /// The doorbell that starts everything through the last of these requests.
    pub(crate) fn doorbell_value(&self) -> DoorbellValue {
        DoorbellValue { record: mlx5::send_record(self.end), doorbell: self.doorbell }
    }
}

/// A written send, to be written again at another ring position.
pub(crate) struct Template {
    wr_id: u64,
    len: u32,
    wqe: Box<[u8]>,
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "send {:#x} of {} bytes", self.wr_id, self.wqe.len())
    }
}

impl fmt::Debug for SendQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "send queue of QP {:#x}", self.qpn)
    }
}

impl SendQueue {
    pub(crate) fn new(
        end: Arc<QueueEnd>,
        ring: Memory,
        send_doorbell: Arc<SendDoorbell>,
        limits: Limits,
        doorbell_watch: Option<DoorbellWatch>,
    ) -> Arc<Self> {
        let blocks = (ring.len() / BB) as u64;
        let (qp, qpn) = (end.qp.clone(), end.qp.qpn);
        Arc::new(Self { end, ring, blocks, limits, send_doorbell, doorbell_watch, qp, qpn })
    }

    /// The ring, the doorbell record, and the doorbell.
    pub(crate) fn places(&self) -> (&Memory, &Memory, &Memory) {
        (&self.ring, self.send_doorbell.record.memory(), self.send_doorbell.doorbell.memory())
    }

    /// Posts requests and rings the doorbell from the CPU.
    pub(crate) fn post(&self, wrs: &[SendWr<'_>]) -> Result<Range<u64>> {
        let range = self.with_room(|track| {
            if matches!(track.owner, Owner::Stream(_)) && !self.is_left(track) {
                return Err(self.busy(track.owner));
            }
            let range = self.write_all(track, wrs, Self::write_one)?;
            if range.is_empty() {
                return Ok(range);
            }
            self.note_prepared(track, &range, None);
            if let Err(error) = self.arrive().and_then(|()| self.expose(track, &range)) {
                self.undo(track, &range);
                return Err(error);
            }
            track.owner = Owner::Cpu;
            // Under the lock: an earlier producer index must not overwrite a later one.
            self.send_doorbell.ring(written(track, range.clone()).doorbell_value());
            if self.send_doorbell.by_card {
                // The software HCA records this event itself.
                self.qp.log.note(Stage::DoorbellRung, Queue::Send, By::Cpu, range.end - 1, 0);
            }
            Ok(range)
        })?;
        if !self.send_doorbell.by_card && !range.is_empty() {
            self.qp.provider.ring(self.qpn);
        }
        Ok(range)
    }

    /// Flushes the ring for a card that reads it. No-op for rings in host memory.
    fn arrive(&self) -> Result<()> {
        if self.send_doorbell.by_card { self.ring.flush() } else { Ok(()) }
    }

    /// Writes one or more requests without exposing them. With a `stream`, also submits them to it, as
    /// [`SendQueue::submit`] does. Returns whether the flight recorder has the submission.
    ///
    /// The requests and the queue's state before a submission go to places of the caller: copying
    /// them right after the ring's lines were written waits for these.
    pub(crate) fn prepare(
        &self,
        wrs: &[SendWr<'_>],
        stream: Option<OfStream>,
        (sends, before): (&mut Written, &mut Option<QueueState>),
    ) -> Result<bool> {
        self.with_room(|track| {
            let range = self.write_all(track, wrs, Self::write_one)?;
            *sends = written(track, range);
            if let Some(stream) = stream {
                *before = Some(QueueState::of(track));
                if let Err(error) = self.hand_over(track, sends, stream) {
                    *before = None;
                    self.undo(track, &mem::take(sends).range);
                    return Err(error);
                }
            }
            Ok(self.note_prepared(track, &sends.range, stream))
        })
    }

    /// Writes recorded sends again, like [`SendQueue::prepare`].
    pub(crate) fn prepare_again(&self, sends: &[Template]) -> Result<Written> {
        let again = |queue: &Self, track: &mut Track, send: &Template| {
            queue.put(track, send.wr_id, send.len, |out, index| {
                out[..send.wqe.len()].copy_from_slice(&send.wqe);
                mlx5::set_index(out, index);
                Ok(u8::try_from(send.wqe.len() / mlx5::SEGMENT).expect("written by `put`"))
            })
        };
        self.with_room(|track| {
            let range = self.write_all(track, sends, again)?;
            self.note_prepared(track, &range, None);
            Ok(written(track, range))
        })
    }

    /// Templates of prepared sends.
    pub(crate) fn templates(&self, range: &Range<u64>) -> Vec<Template> {
        let track = self.end.tracker.lock();
        let template = |n| {
            let entry = track.entry(n);
            let mut wqe = vec![0; usize::from(entry.ds) * mlx5::SEGMENT].into_boxed_slice();
            self.load(entry.begin, &mut wqe);
            Template { wr_id: entry.wr_id, len: entry.len, wqe }
        };
        range.clone().map(template).collect()
    }

    /// Runs `f` with the queue locked. Retries once, after reaping completions, if the queue was full or busy.
    fn with_room<T>(&self, mut f: impl FnMut(&mut Track) -> Result<T>) -> Result<T> {
        let mut is_retry = false;
        loop {
            let mut track = self.end.tracker.lock();
            // Checked under the lock. A reset changes the state before it takes this lock, so nothing is posted after a
            // reset.
            self.qp.check_send()?;
            let done = f(&mut track);
            self.end.tracker.publish(&track);
            drop(track);
            if is_retry || !matches!(done, Err(Error::QueueFull { .. } | Error::Busy { .. })) {
                return done;
            }
            is_retry = true;
            self.qp.provider.progress();
            self.end.cq.reap();
        }
    }

    /// Writes all sends or none.
    fn write_all<T>(
        &self,
        track: &mut Track,
        sends: &[T],
        one: impl Fn(&Self, &mut Track, &T) -> Result<()>,
    ) -> Result<Range<u64>> {
        let first = track.posted;
        for send in sends {
            if let Err(error) = one(self, track, send) {
                let range = first..track.posted;
                self.undo(track, &range);
                return Err(error);
            }
        }
        Ok(first..track.posted)
    }

    /// Prefetches the next ring lines for writing.
    #[inline]
    fn prefetch_behind(&self, begin: u64, end: u64) {
        // The HCA's core has read these lines in the previous lap.
        for block in begin..end {
            self.ring.prefetch_to_write(self.offset(block + AHEAD));
        }
        // The HCA's core may have fetched the next line again while it read earlier requests.
        self.ring.prefetch_to_write(self.offset(end));
    }

    fn write_one(&self, track: &mut Track, wr: &SendWr<'_>) -> Result<()> {
        self.limits.check(&wr.op)?;
        if wr.op.fetches() {
            self.end.fetches();
        }
        self.put(track, wr.wr_id, wr.op.payload_bytes(), |out, index| {
            mlx5::encode_into(out, &wr.op, self.qpn, index, wr.flags)
                .map_err(|source| Error::WorkRequest { qpn: self.qpn, source })
        })
    }

    /// Writes one WQE with `len` payload bytes. `encode` gets a buffer and the WQE index, and returns `ds`.
    #[inline]
    fn put(
        &self,
        track: &mut Track,
        wr_id: u64,
        len: u32,
        encode: impl FnOnce(&mut [u8; MAX_WQE_BYTES], u16) -> Result<u8>,
    ) -> Result<()> {
        let begin = track.head;
        let ds = encode(&mut track.scratch, low16(begin))?;
        let count = ds.div_ceil(4);
        let blocks = u64::from(count);
        if blocks > self.blocks {
            let value = format!("{blocks} blocks of 64 bytes");
            let expected =
                "at most the send queue: build the QP with a larger max_send_wr, max_send_sge or max_inline";
            return Err(Error::invalid("work request size", value, expected));
        }
        let end = begin + blocks;
        if end - track.tail > self.blocks || !track.has_entry() {
            return Err(self.full(track));
        }
        if !self.end.cq.reserve() {
            return Err(self.end.cq_full(track.posted - track.retired));
        }
        let first8 = *track.scratch.first_chunk().expect("a WQE has a control segment");
        let doorbell = mlx5::doorbell_word(first8);
        track.push(Entry { wr_id, begin, blocks: count, doorbell, ds, len, ..Entry::default() });
        // Last: copies behind the ring's stores wait for its lines.
        self.store(begin, &track.scratch[..usize::from(ds) * 16]);
        self.prefetch_behind(begin, end);
        Ok(())
    }

    #[cold]
    fn full(&self, track: &Track) -> Error {
        let (queue, depth) = ("send queue", self.blocks);
        Error::QueueFull { queue, qpn: self.qpn, outstanding: track.head - track.tail, depth, untaken: 0 }
    }

    /// Checks that `sends` requests of the largest size have room.
    pub(crate) fn check_room(&self, sends: usize) -> Result<()> {
        self.qp.check_send()?;
        let (sends, largest) = (sends as u64, self.limits.blocks() as u64);
        let blocks = sends.saturating_mul(largest);
        if blocks > self.blocks {
            return Err(Error::invalid("sends to have room for", sends, "at most QpBuilder::max_send_wr"));
        }
        let track = self.end.tracker.lock();
        if track.head - track.tail + blocks > self.blocks || !track.has_entries(sends) {
            return Err(self.full(&track));
        }
        let outstanding = track.posted - track.retired;
        drop(track);
        if self.end.cq.has_room(sends) { Ok(()) } else { Err(self.end.cq_full(outstanding)) }
    }

    /// The word by which a stream marks the last of written sends as placed, of a device that knows it.
    pub(crate) fn mark_of(&self, sends: &Written) -> Option<Memory> {
        let last = sends.range.end.checked_sub(1).filter(|_| self.qp.provider.is_software())?;
        let begin = self.end.tracker.lock().entry(last).begin;
        self.ring.slice(self.offset(begin) + mlx5::CTRL_IMM_OFFSET, 4).ok()
    }

    /// The byte offset of block `index` in the ring.
    #[inline]
    fn offset(&self, index: u64) -> usize {
        usize::try_from(index & (self.blocks - 1)).expect("a ring index fits in memory") * BB
    }

    /// Copies a WQE to block `index`, wrapping at the end of the ring.
    #[inline]
    fn store(&self, index: u64, bytes: &[u8]) {
        let at = self.offset(index);
        // WQE sizes are multiples of 16 bytes, ring sizes of 64.
        let words = bytes.as_chunks::<8>().0;
        let (head, wrapped) = words.split_at(words.len().min((self.ring.len() - at) / 8));
        self.ring.write_words(at, head).expect("split at the end of the ring");
        if !wrapped.is_empty() {
            self.ring.write_words(0, wrapped).expect("a WQE is shorter than the ring");
        }
    }

    /// Reads a WQE that [`SendQueue::store`] wrote.
    fn load(&self, index: u64, bytes: &mut [u8]) {
        let at = self.offset(index);
        let (head, wrapped) = bytes.split_at_mut(bytes.len().min(self.ring.len() - at));
        self.ring.read(at, head).expect("split at the end of the ring");
        self.ring.read(0, wrapped).expect("a WQE is shorter than the ring");
    }

    /// Checks that `range` is next in prepare order, and counts it as exposed.
    fn expose(&self, track: &mut Track, range: &Range<u64>) -> Result<()> {
        let mut next = track.exposed;
        while next < range.start && track.entry(next).cancelled {
            next += 1;
        }
        if next != range.start {
            return Err(Error::OutOfOrder { qpn: self.qpn, expected: next, got: range.start });
        }
        track.gaps += next - track.exposed;
        track.exposed = range.end;
        Ok(())
    }

    /// Cancels requests that no doorbell has exposed.
    fn undo(&self, track: &mut Track, range: &Range<u64>) {
        for n in range.clone() {
            let entry = *track.entry(n);
            // A later doorbell may expose it: it must do nothing and complete once.
            let nop = mlx5::nop_like(self.qpn, low16(entry.begin), entry.ds);
            self.store(entry.begin, &nop);
            let first8 = *nop.first_chunk().expect("a control segment has 16 bytes");
            let slot = track.entry_mut(n);
            slot.cancelled = true;
            slot.doorbell = mlx5::doorbell_word(first8);
        }
        let mut taken_back = 0;
        while track.posted > track.exposed && track.entry(track.posted - 1).cancelled {
            track.posted -= 1;
            track.head = track.entry(track.posted).begin;
            taken_back += 1;
        }
        if taken_back < range.end - range.start {
            self.end.tracker.publish_gaps(track);
        } else {
            self.end.tracker.publish(track);
        }
        self.end.cq.take_back(taken_back);
    }

    /// Cancels a dropped prepared range. No-op in a forked child.
    pub(crate) fn cancel(&self, range: &Range<u64>) {
        if self.qp.is_here() {
            self.undo(&mut self.end.tracker.lock(), range);
        }
    }

    fn busy(&self, owner: Owner) -> Error {
        let owner = match owner {
            Owner::Stream(id) => stream_name::describe(id),
            Owner::Cpu | Owner::Nobody => "the CPU".into(),
        };
        Error::Busy { queue: "send", qpn: self.qpn, owner }
    }

    /// Records that requests were written and, with a `stream`, submitted. Returns whether the submission is recorded.
    fn note_prepared(&self, track: &Track, range: &Range<u64>, stream: Option<OfStream>) -> bool {
        let (log, stream) = (&self.qp.log, stream.map(|stream| stream.id));
        range.clone().fold(true, |all, n| all & log.note_prepared(n, track.entry(n).len, stream))
    }

    /// Records a stage of consecutive requests.
    pub(crate) fn note(&self, stage: Stage, numbers: Range<u64>, stream: u64) {
        self.qp.log.note_in(stage, Queue::Send, stream, numbers);
    }

    /// Whether a failed stream left requests unexposed.
    pub(crate) fn has_unexposed(&self) -> bool {
        self.send_doorbell.record.load() != mlx5::send_record(self.end.tracker.lock().head)
    }

    /// Exposes those requests to the device, which is in the error state, before a reset. Their waits may have been
    /// released by flush CQEs of the library, and the next CQE must follow those. Rings the doorbell too: a card may
    /// not flush requests that only the record announces.
    pub(crate) fn expose_abandoned(&self) {
        let track = self.end.tracker.lock();
        let Some(last) = track.posted.checked_sub(1) else { return };
        self.send_doorbell.ring(written(&track, last..track.posted).doorbell_value());
        drop(track);
        self.qp.provider.ring(self.qpn);
    }

    /// Discards everything posted, after the device has reset the queue pair.
    pub(crate) fn reset(&self) {
        // Completions from before the reset still count. None arrive after it.
        self.end.cq.reap();
        let lost = self.end.tracker.reset();
        self.send_doorbell.record.store(0);
        self.end.cq.discard(&self.end.tracker, lost);
    }
}

fn written(track: &Track, range: Range<u64>) -> Written {
    let last = track.entry(range.end - 1);
    Written { range, end: last.end(), doorbell: last.doorbell }
}

/// The stream that requests are submitted to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OfStream {
    pub(crate) id: u64,
    /// Whether a GPU runs it, so that the device must watch for its doorbells and waits.
    pub(crate) by_gpu: bool,
}

/// The state of a queue before a submission, to undo it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueState {
    pub(super) owner: Owner,
    pub(super) exposed: u64,
    pub(super) gaps: u64,
}

impl QueueState {
    fn of(track: &Track) -> Self {
        Self { owner: track.owner, exposed: track.exposed, gaps: track.gaps }
    }
}

impl SendQueue {
    /// Submits prepared requests to a stream, whose doorbell will expose them. For a GPU's, publishes the watch limit too:
    /// call [`SendQueue::ensure_watched`] after the unlock. Returns what [`SendQueue::unsubmit`] needs.
    pub(crate) fn submit(&self, sends: &Written, stream: OfStream) -> Result<QueueState> {
        self.with_room(|track| {
            let before = QueueState::of(track);
            self.hand_over(track, sends, stream).map(|()| before)
        })
    }

    /// Whether the owner has rung all doorbells: its requests are complete, or a stream has passed their completions, which may be to come.
    fn is_left(&self, track: &Track) -> bool {
        let is_passed = || matches!(track.owner, Owner::Stream(_)) && self.end.cq.is_passed_to(track.exposed);
        track.is_idle() || is_passed()
    }

    #[inline]
    fn hand_over(&self, track: &mut Track, sends: &Written, stream: OfStream) -> Result<()> {
        let is_others = !matches!(track.owner, Owner::Nobody) && track.owner != Owner::Stream(stream.id);
        if is_others && !self.is_left(track) {
            return Err(self.busy(track.owner));
        }
        self.expose(track, &sends.range)?;
        track.owner = Owner::Stream(stream.id);
        if let Some(doorbell_watch) = self.doorbell_watch.as_ref().filter(|_| stream.by_gpu) {
            doorbell_watch.publish(sends.end);
        }
        Ok(())
    }

    /// Undoes [`SendQueue::submit`], including the watch limit.
    pub(crate) fn unsubmit(&self, sends: &Written, before: QueueState) {
        let mut track = self.end.tracker.lock();
        if let Some(doorbell_watch) = &self.doorbell_watch {
            doorbell_watch.withdraw(sends.end, track.entry(before.exposed).begin);
        }
        track.exposed = before.exposed;
        track.gaps = before.gaps;
        track.owner = before.owner;
    }

    /// Notifies the device if it is not watching the doorbell. Call after an unlock that is an atomic read-modify-write.
    #[inline]
    pub(crate) fn ensure_watched(&self, end: u64) {
        if self.doorbell_watch.as_ref().is_some_and(|doorbell_watch| !doorbell_watch.is_watched()) {
            self.qp.provider.watch(self.qpn, end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{OfStream, Written};
    use crate::verbs::{Context, SendWr};
    use gdsync_soft::SoftHcaConfig;

    #[test]
    fn cancelled_requests_leave_the_doorbell_watch() {
        let pd = Context::soft(&SoftHcaConfig::default()).unwrap().alloc_pd().unwrap();
        let (a, b) = (pd.build_qp().build().unwrap(), pd.build_qp().build().unwrap());
        a.connect(b.address()).unwrap();
        b.connect(a.address()).unwrap();
        let queue = &a.send;
        let watch_limit = || queue.doorbell_watch.as_ref().unwrap().published();
        let prepare = || {
            let mut sends = Written::default();
            queue.prepare(&[SendWr::nop(), SendWr::nop()], None, (&mut sends, &mut None)).unwrap();
            sends
        };
        let [first, dropped, last] = [prepare(), prepare(), prepare()];
        // A host stream needs no watch.
        let before = queue.submit(&first, OfStream { id: 1, by_gpu: false }).unwrap();
        assert_eq!(watch_limit(), 0);
        queue.unsubmit(&first, before);
        queue.submit(&first, OfStream { id: 1, by_gpu: true }).unwrap();
        assert_eq!(watch_limit(), 2);
        queue.cancel(&dropped.range);
        let before = queue.submit(&last, OfStream { id: 1, by_gpu: true }).unwrap();
        assert_eq!(watch_limit(), 6);
        queue.unsubmit(&last, before);
        assert_eq!(watch_limit(), 2, "the cancelled requests in between are excluded too");
    }
}
