//! The send queue: WQEs are written now and made visible by a doorbell later, from the CPU or from a stream.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::cq::CqInner;
use super::end::QueueEnd;
use super::qp::QpCore;
use super::source::{DoorbellValue, SendDoorbell};
use super::track::{Entry, Owner, Track, Tracker};
use super::wr::SendWr;
use gdsync_device::DoorbellWatch;
use gdsync_device::Provider;
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::Memory;
use gdsync_device::recorder::{By, Queue, Stage};
use gdsync_shm as protocol;
use mlx5_ring::low16;
use mlx5_ring::{self as mlx5, BB, MAX_WQE_BYTES};

pub(crate) struct SendQueue {
    pub(crate) end: Arc<QueueEnd>,
    ring: Memory,
    blocks: u64,
    most: Most,
    send_doorbell: Arc<SendDoorbell>,
    doorbell_watch: Option<DoorbellWatch>,
    /// Parts of the end: who sends need not look for them.
    tracker: Arc<Tracker>,
    cq: Arc<CqInner>,
    qp: Arc<QpCore>,
    qpn: u32,
}

/// What one request may have, as the QP was built.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Most {
    pub(crate) sges: usize,
    pub(crate) inline: usize,
}

impl Most {
    #[inline(always)]
    fn check(self, op: &mlx5::SendOp<'_>) -> Result<()> {
        use mlx5::{Payload, SendOp};
        match *op {
            SendOp::Send { payload: Payload::Inline(data), .. }
            | SendOp::Write { payload: Payload::Inline(data), .. }
                if data.len() > self.inline =>
            {
                let value = format!("{}, where {} fit", data.len(), self.inline);
                Err(Error::invalid("inline data length", value, "at most the QP's max_inline"))
            }
            SendOp::Send { payload: Payload::Sges(sges), .. }
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
        // Empty ones take no room.
        let buffers = sges.iter().filter(|sge| sge.len > 0).count();
        if buffers > self.sges {
            let value = format!("{buffers}, where {} fit", self.sges);
            return Err(Error::invalid("buffers of a send", value, "at most the QP's max_send_sge"));
        }
        Ok(())
    }
}

/// Blocks between the one that is written and the one that the CPU is told it will write.
const AHEAD: u64 = 8;

/// Requests that were written, and what makes the last of them visible.
#[derive(Clone, Debug)]
pub(crate) struct Written {
    pub(crate) range: Range<u64>,
    /// The index of the block after the last one.
    pub(crate) end: u64,
    doorbell: u64,
}

impl Written {
    /// One more behind them.
    fn grow(&mut self, entry: &Entry) {
        self.range.end += 1;
        (self.end, self.doorbell) = (entry.end(), entry.doorbell);
    }

    /// What makes the HCA start everything up to the end of them.
    #[inline]
    pub(crate) fn doorbell_value(&self) -> DoorbellValue {
        DoorbellValue { record: mlx5::send_record(self.end), doorbell: self.doorbell }
    }
}

/// Requests that were prepared.
pub(crate) struct Prepared {
    pub(crate) sends: Written,
    /// They were handed to a stream.
    pub(crate) before: Option<Before>,
    /// The flight recorder knows that.
    pub(crate) is_recorded: bool,
}

/// A request that was prepared and handed to a stream.
pub(crate) struct Sent {
    pub(crate) sends: Written,
    before: Before,
    /// The flight recorder knows of it.
    pub(crate) is_recorded: bool,
}

impl Sent {
    /// The same as one of several.
    pub(crate) fn prepared(self) -> Prepared {
        let Self { sends, before, is_recorded } = self;
        Prepared { sends, before: Some(before), is_recorded }
    }
}

/// A send as it was written, to be written again at other places of the ring.
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
        write!(f, "send queue of QP {:#x}", self.end.qp.qpn)
    }
}

impl SendQueue {
    pub(crate) fn new(
        end: Arc<QueueEnd>,
        ring: Memory,
        send_doorbell: Arc<SendDoorbell>,
        most: Most,
        doorbell_watch: Option<DoorbellWatch>,
    ) -> Arc<Self> {
        let blocks = (ring.len() / BB) as u64;
        let (tracker, cq, qp) = (end.tracker.clone(), end.cq.clone(), end.qp.clone());
        let qpn = qp.qpn;
        Arc::new(Self { end, ring, blocks, most, send_doorbell, doorbell_watch, tracker, cq, qp, qpn })
    }

    /// What a stream rings.
    #[inline]
    pub(crate) fn send_doorbell(&self) -> &SendDoorbell {
        &self.send_doorbell
    }

    /// The ring, the record's word, and the doorbell.
    pub(crate) fn places(&self) -> (&Memory, &Memory, &Memory) {
        (&self.ring, self.send_doorbell.record.memory(), self.send_doorbell.doorbell.memory())
    }

    /// Posts requests and rings the doorbell, from the CPU.
    // Always: as large as it is, it has two callers.
    #[inline(always)]
    pub(crate) fn post(&self, wrs: &[SendWr<'_>]) -> Result<Range<u64>> {
        let range = self.with_room(|track| {
            if matches!(track.owner, Owner::Stream(_)) && !track.is_idle() {
                return Err(self.busy(track.owner));
            }
            let range = self.write(track, wrs)?;
            if range.is_empty() {
                return Ok(range);
            }
            self.note_prepared(track, &range, None);
            if let Err(error) = self.arrive().and_then(|()| self.expose(track, &range)) {
                self.undo(track, &range);
                return Err(error);
            }
            track.owner = Owner::Cpu;
            let last = *track.entry(range.end - 1);
            // Under the lock: a later producer index must not be overtaken by an earlier one.
            // Nothing for a doorbell in memory; one of a card is in memory that the CPU writes when it likes.
            let settle = || self.send_doorbell.doorbell.memory().fence();
            settle();
            protocol::ring_doorbell(
                self.send_doorbell.record.atomic(),
                mlx5::send_record(last.end()),
                || {
                    self.send_doorbell.record.memory().fence();
                    settle();
                    if self.provider().reads_by_itself() {
                        // A load takes what was stored there before along, also to a GPU.
                        self.send_doorbell.record.atomic().load(Ordering::Acquire);
                        // The software HCA says so itself, at once.
                        self.end.qp.log.note(Stage::DoorbellSet, Queue::Send, By::Cpu, range.end - 1, 0);
                    }
                },
                self.send_doorbell.doorbell.atomic(),
                last.doorbell,
            );
            settle();
            Ok(range)
        })?;
        if !range.is_empty() {
            self.provider().ring(self.end.qp.qpn);
        }
        Ok(range)
    }

    /// Returns when requests that were written are where a card reads them. Nothing for a ring in host memory.
    fn arrive(&self) -> Result<()> {
        if self.provider().reads_by_itself() { self.ring.flush() } else { Ok(()) }
    }

    /// Writes requests, at least one, that nobody sees yet. With a `stream`, they are handed to it at once, as by
    /// [`SendQueue::submit`].
    pub(crate) fn prepare(&self, wrs: &[SendWr<'_>], stream: Option<u64>) -> Result<Prepared> {
        self.with_room(|track| {
            let range = self.write(track, wrs)?;
            self.prepared(track, range, stream)
        })
    }

    /// What was prepared, one by one.
    pub(crate) fn each(&self, range: Range<u64>) -> Vec<Written> {
        let track = self.end.tracker.lock();
        range.map(|n| written(&track, n..n + 1)).collect()
    }

    /// Hands requests that were written to their stream, if there is one.
    #[inline(always)]
    fn prepared(&self, track: &mut Track, range: Range<u64>, stream: Option<u64>) -> Result<Prepared> {
        let handed = stream.map(|stream| self.hand_over(track, &range, stream)).transpose();
        let before = handed.inspect_err(|_| self.undo(track, &range))?;
        let is_recorded = self.note_prepared(track, &range, stream);
        Ok(Prepared { sends: written(track, range), before, is_recorded })
    }

    /// Records that requests were written, and that they were handed to a stream. Returns whether the latter is told.
    #[inline(always)]
    fn note_prepared(&self, track: &Track, range: &Range<u64>, stream: Option<u64>) -> bool {
        let log = &self.end.qp.log;
        let mut is_recorded = true;
        for n in range.clone() {
            is_recorded &= log.note_prepared(n, track.entry(n).len, stream);
        }
        is_recorded
    }

    /// Writes sends again, as [`SendQueue::prepare`].
    pub(crate) fn prepare_again(&self, sends: &[Template], stream: Option<u64>) -> Result<Prepared> {
        let again = |track: &mut Track, send: &Template| {
            self.put(track, send.wr_id, send.len, |out, index| {
                out[..send.wqe.len()].copy_from_slice(&send.wqe);
                mlx5::set_index(out, index);
                Ok(u8::try_from(send.wqe.len() / mlx5::SEGMENT).expect("written by `put`"))
            })
        };
        self.with_room(|track| {
            let range = self.write_all(track, sends, again)?;
            self.prepared(track, range, stream)
        })
    }

    /// What was prepared, to be written again.
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

    /// Runs `f`, and once more after taking completions if there was no room or the queue was busy.
    #[inline(always)]
    fn with_room<T>(&self, mut f: impl FnMut(&mut Track) -> Result<T>) -> Result<T> {
        match self.locked(&mut f) {
            Err(Error::QueueFull { .. } | Error::Busy { .. }) => self.again(&mut f),
            other => other,
        }
    }

    #[inline(always)]
    fn locked<T>(&self, f: &mut impl FnMut(&mut Track) -> Result<T>) -> Result<T> {
        let mut track = self.end.tracker.lock();
        // Under the lock, which a reset takes after it has changed the state: nothing slips in behind it.
        self.end.qp.check_send()?;
        let done = f(&mut track);
        self.end.tracker.tell(&track);
        done
    }

    #[cold]
    #[inline(never)]
    fn again<T>(&self, mut f: &mut dyn FnMut(&mut Track) -> Result<T>) -> Result<T> {
        self.provider().progress();
        self.end.cq.reap();
        self.locked(&mut f)
    }

    #[inline(always)]
    fn write(&self, track: &mut Track, wrs: &[SendWr<'_>]) -> Result<Range<u64>> {
        self.write_all(track, wrs, |track, wr| self.write_one(track, wr))
    }

    /// Writes all or none.
    #[inline(always)]
    fn write_all<T>(
        &self,
        track: &mut Track,
        sends: &[T],
        one: impl Fn(&mut Track, &T) -> Result<()>,
    ) -> Result<Range<u64>> {
        let first = track.posted;
        for send in sends {
            if let Err(error) = one(track, send) {
                let range = first..track.posted;
                self.undo(track, &range);
                return Err(error);
            }
        }
        Ok(first..track.posted)
    }

    /// Has the lines come that are written next.
    #[inline(always)]
    fn prefetch_behind(&self, begin: u64, end: u64) {
        // The HCA has read there in the lap before.
        for block in begin..end {
            self.ring.prefetch_to_write(self.place(block + AHEAD));
        }
        // Its core may have taken the next one along since, reading what came before.
        self.ring.prefetch_to_write(self.place(end));
    }

    #[inline(always)]
    fn write_one(&self, track: &mut Track, wr: &SendWr<'_>) -> Result<()> {
        match self.write_short(track, wr) {
            Some(_) => Ok(()),
            None => self.write_any(track, wr),
        }
    }

    #[inline(never)]
    fn write_any(&self, track: &mut Track, wr: &SendWr<'_>) -> Result<()> {
        let qpn = self.end.qp.qpn;
        self.most.check(&wr.op)?;
        if wr.op.fetches() {
            self.end.fetches();
        }
        self.put(track, wr.wr_id, wr.op.payload_bytes(), |out, index| {
            mlx5::encode_into(out, &wr.op, qpn, index, wr.flags)
                .map_err(|e| Error::WorkRequest { qpn, source: e })
        })
    }

    /// Writes one WQE of `len` bytes of payload, which `encode` puts into a buffer, for the index that it is given; it returns its `ds`.
    #[inline(always)]
    fn put(
        &self,
        track: &mut Track,
        wr_id: u64,
        len: u32,
        encode: impl FnOnce(&mut [u8; MAX_WQE_BYTES], u16) -> Result<u8>,
    ) -> Result<()> {
        let qpn = self.end.qp.qpn;
        let begin = track.head;
        let ds = encode(&mut track.scratch, low16(begin))?;
        let few = ds.div_ceil(4);
        let blocks = u64::from(few);
        if blocks > self.blocks {
            let value = format!("{blocks} blocks of 64 bytes");
            let expected =
                "at most the send queue: build the QP with a larger max_send_wr, max_send_sge or max_inline";
            return Err(Error::invalid("work request size", value, expected));
        }
        let end = begin + blocks;
        if end - track.tail > self.blocks || !track.has_entry() {
            let outstanding = begin - track.tail;
            return Err(Error::QueueFull {
                queue: "send queue",
                qpn,
                outstanding,
                depth: self.blocks,
                untaken: 0,
            });
        }
        if !self.end.cq.reserve() {
            return Err(self.end.cq_full(track.posted - track.retired));
        }
        let bytes = &track.scratch[..usize::from(ds) * 16];
        self.store(begin, bytes);
        self.prefetch_behind(begin, end);
        let first8 = *bytes.first_chunk().expect("a WQE has a control segment");
        let doorbell = mlx5::doorbell_word(first8);
        track.push(Entry { wr_id, begin, blocks: few, doorbell, ds, len, ..Entry::default() });
        Ok(())
    }

    /// Where block `index` is in the ring, in bytes.
    #[inline(always)]
    fn place(&self, index: u64) -> usize {
        usize::try_from(index & (self.blocks - 1)).expect("a ring index fits in memory") * BB
    }

    /// Copies a WQE to block `index`, round the end of the ring if need be.
    #[inline(always)]
    fn store(&self, index: u64, bytes: &[u8]) {
        let at = self.place(index);
        // WQEs are made of 16 bytes, rings of 64.
        let words = bytes.as_chunks::<8>().0;
        let (head, wrapped) = words.split_at(words.len().min((self.ring.len() - at) / 8));
        self.ring.write_words(at, head).expect("split at the end of the ring");
        if !wrapped.is_empty() {
            self.ring.write_words(0, wrapped).expect("a WQE is shorter than the ring");
        }
    }

    /// Reads back what [`SendQueue::store`] wrote.
    fn load(&self, index: u64, bytes: &mut [u8]) {
        let at = self.place(index);
        let (head, wrapped) = bytes.split_at_mut(bytes.len().min(self.ring.len() - at));
        self.ring.read(at, head).expect("split at the end of the ring");
        self.ring.read(0, wrapped).expect("a WQE is shorter than the ring");
    }

    /// Checks that `range` is next in prepare order, and counts it as exposed by a doorbell.
    fn expose(&self, track: &mut Track, range: &Range<u64>) -> Result<()> {
        let mut next = track.exposed;
        while next < range.start && track.entry(next).cancelled {
            next += 1;
        }
        if next != range.start {
            return Err(Error::OutOfOrder { qpn: self.end.qp.qpn, expected: next, got: range.start });
        }
        track.gaps += next - track.exposed;
        track.exposed = range.end;
        Ok(())
    }

    /// Takes back requests that no doorbell has exposed.
    fn undo(&self, track: &mut Track, range: &Range<u64>) {
        for n in range.clone() {
            let entry = *track.entry(n);
            // In the ring a later doorbell may pass over it: it must do nothing and complete once.
            let nop = mlx5::nop_like(self.end.qp.qpn, low16(entry.begin), entry.ds);
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
            self.end.tracker.tell_gaps(track);
        } else {
            self.end.tracker.tell(track);
        }
        self.end.cq.take_back(taken_back);
    }

    /// A prepared range was dropped. In a child it is left.
    pub(crate) fn cancel(&self, range: &Range<u64>) {
        if self.qp.is_here() {
            self.undo(&mut self.end.tracker.lock(), range);
        }
    }

    fn busy(&self, owner: Owner) -> Error {
        let owner = match owner {
            Owner::Stream(id) => format!("stream {id}"),
            Owner::Cpu | Owner::Nobody => "the CPU".into(),
        };
        Error::Busy { queue: "send", qpn: self.end.qp.qpn, owner }
    }

    /// Records a stage of requests in a row.
    pub(crate) fn note(&self, stage: Stage, numbers: Range<u64>, stream: u64) {
        self.end.qp.log.note_in(stage, Queue::Send, stream, numbers);
    }

    fn provider(&self) -> &dyn Provider {
        &*self.end.qp.provider
    }

    /// Whether there are requests that a stream was to expose, and gave up.
    pub(crate) fn has_hidden(&self) -> bool {
        self.send_doorbell.record.load() != mlx5::send_record(self.end.tracker.lock().head)
    }

    /// Exposes them to the device, in the error state, before it is reset: their waits may have been released by completions
    /// in place of the device's, and the next one belongs behind those. By the doorbell too: it is not known that every card flushes what only the
    /// record tells.
    pub(crate) fn show_hidden(&self) {
        let track = self.end.tracker.lock();
        let Some(last) = track.posted.checked_sub(1) else { return };
        let value = written(&track, last..track.posted).doorbell_value();
        let settle = || {
            self.send_doorbell.record.memory().fence();
            self.send_doorbell.doorbell.memory().fence();
        };
        settle();
        self.send_doorbell.record.store(value.record);
        settle();
        self.send_doorbell.doorbell.store(value.doorbell);
        settle();
        drop(track);
        self.provider().ring(self.end.qp.qpn);
    }

    /// Forgets everything posted, after the queue pair was reset.
    pub(crate) fn reset(&self) {
        // What completed before the reset still counts; after this nothing more arrives.
        self.end.cq.reap();
        let lost = self.end.tracker.reset();
        self.send_doorbell.record.store(0);
        self.end.cq.forget(&self.end.tracker, lost);
    }
}

fn written(track: &Track, range: Range<u64>) -> Written {
    let last = track.entry(range.end - 1);
    Written { range, end: last.end(), doorbell: last.doorbell }
}

/// Who owned a queue, and up to where it was exposed, before a range was submitted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Before {
    pub(super) owner: Owner,
    pub(super) exposed: u64,
    pub(super) gaps: u64,
}

impl SendQueue {
    /// Hands prepared requests to a stream: after this the stream's doorbell will expose them. Where a GPU will ring, the device is to
    /// be told: by [`SendQueue::ensure_watched`]. Returns what [`SendQueue::unsubmit`] needs.
    #[inline]
    pub(crate) fn submit(&self, sends: &Written, stream: u64, by_gpu: bool) -> Result<Before> {
        let mut track = self.tracker.lock();
        // One behind those of the same stream, as most are.
        let is_next = track.owner == Owner::Stream(stream) && track.exposed == sends.range.start;
        if !(is_next && self.qp.is_ready_to_send()) {
            drop(track);
            return self.submit_any(sends, stream, by_gpu);
        }
        let before = Before { owner: track.owner, exposed: track.exposed, gaps: track.gaps };
        track.exposed = sends.range.end;
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
        let before = Before { owner: track.owner, exposed: track.exposed, gaps: track.gaps };
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
            doorbell_watch.withdraw(sends.end, track.entry(before.exposed).begin);
        }
        track.exposed = before.exposed;
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
    pub(crate) fn ensure_watched(&self, end: u64) {
        if self.doorbell_watch.as_ref().is_some_and(|doorbell_watch| !doorbell_watch.is_watched()) {
            self.qp.provider.watch(self.qpn, end);
        }
    }
}

impl SendQueue {
    /// Writes a request and hands it to a stream: one more short one behind those of the same stream, the most frequent kind, in a
    /// straight line. `None` if there is anything else about it, and then nothing is done. Where a GPU will ring, the device is to
    /// be told: by [`SendQueue::ensure_watched`].
    #[inline(always)]
    pub(crate) fn send_short(&self, wr: &SendWr<'_>, stream: u64, by_gpu: bool) -> Option<Sent> {
        let mut track = self.tracker.lock();
        let n = track.posted;
        if track.owner != Owner::Stream(stream) || track.exposed != n || !self.qp.is_ready_to_send() {
            return None;
        }
        let before = Before { owner: track.owner, exposed: n, gaps: track.gaps };
        let (end, doorbell, len) = self.write_short(&mut track, wr)?;
        track.exposed = n + 1;
        self.tracker.tell(&track);
        if by_gpu {
            self.foresee(end);
        }
        drop(track);
        let is_recorded = self.qp.log.note_prepared(n, len, Some(stream));
        Some(Sent { sends: Written { range: n..n + 1, end, doorbell }, before, is_recorded })
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
        let is_recorded = self.qp.log.note_prepared(n, track.entry(n).len, Some(stream));
        Ok(Sent { sends: written(track, n..n + 1), before, is_recorded })
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
        assert_eq!(foreseen(), 2, "what is between them will not be exposed either");
    }
}
