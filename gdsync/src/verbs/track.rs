//! The bookkeeping of a queue's work requests between posting and completion.

use std::collections::VecDeque;
use std::mem;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use super::old_keys::KeyReader;
use super::wr::{Sender, Wc};
use gdsync_device::Health;
use gdsync_device::error::{CompletionError, Error};
use gdsync_device::recorder::{Awaited, By, Event, Log, Queue, Stage};
use gdsync_shm::{SpinLock, SpinLockGuard, producer_index};
use mlx5_ring::{Cqe, CqeOpcode, MAX_WQE_BYTES, Opcode, Syndrome, low16};

/// Resets of a queue that are remembered: a bound on its memory.
const LIVES: usize = 1024;

/// The owner of a send queue: it rings the doorbell.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Owner {
    Nobody,
    Cpu,
    Stream(u64),
}

#[derive(Debug)]
pub(crate) struct Tracker {
    pub(crate) qpn: u32,
    pub(crate) is_send: bool,
    health: Arc<Health>,
    /// Number of resets.
    life: AtomicUsize,
    /// Copies of `posted` and `retired` from the state, readable without its lock.
    posted: AtomicU64,
    retired: AtomicU64,
    /// Whether cancelled requests remain in the queue, because others follow them.
    has_gaps: AtomicU32,
    log: Log,
    /// Whether a card completes the requests: it does not record completions itself.
    is_card: bool,
    key_reader: OnceLock<KeyReader>,
    /// Copy of whether a stream owns the queue, readable without the lock.
    is_of_stream: AtomicBool,
    state: SpinLock<Track>,
}

/// The locked state of a [`Tracker`]. Counters never wrap; rings and records hold their low bits.
#[derive(Debug)]
pub(crate) struct Track {
    entries: Box<[Entry]>,
    /// Buffer for building a WQE; kept, because clearing it costs more than building.
    pub(crate) scratch: Box<[u8; MAX_WQE_BYTES]>,
    /// Requests written to the ring. In a queue with its own CQ, request `n` completes as CQE `n`.
    pub(crate) posted: u64,
    /// Requests completed.
    pub(crate) retired: u64,
    /// Requests before this number are exposed by a doorbell, on the CPU or in a stream.
    pub(crate) exposed: u64,
    /// Cancelled requests among them.
    pub(crate) gaps: u64,
    /// Producer index: basic blocks of a send queue, entries of a receive queue.
    pub(crate) head: u64,
    /// First block of the oldest outstanding request.
    pub(crate) tail: u64,
    pub(crate) owner: Owner,
    /// Requests completed at each reset. Higher numbers were reused after it.
    lives: VecDeque<u64>,
}

/// One request, in a cache line of its own.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
pub(crate) struct Entry {
    pub(crate) wr_id: u64,
    /// Index of the request's first block, and its block count.
    pub(crate) begin: u64,
    pub(crate) blocks: u8,
    /// Of a send the doorbell that exposes everything through it; of a completed receive its sender: LID, flags and QPN.
    pub(crate) doorbell: u64,
    pub(crate) ds: u8,
    pub(crate) cancelled: bool,
    /// Bytes of payload.
    pub(crate) len: u32,
    /// The result, once completed.
    pub(crate) wc: Option<Wc>,
    /// Whether it has completed with its CQE not yet decoded.
    pub(crate) skipped: bool,
}

const _: () = assert!(size_of::<Entry>() == 64);

impl Entry {
    /// Index of the block after the request.
    #[inline]
    pub(crate) fn end(&self) -> u64 {
        self.begin + u64::from(self.blocks)
    }
}

impl Tracker {
    /// For a queue of at most `entries` requests, a power of two.
    pub(crate) fn new(
        qpn: u32,
        is_send: bool,
        entries: usize,
        health: Arc<Health>,
        (log, is_card): (Log, bool),
    ) -> Arc<Self> {
        let entries = vec![Entry::default(); entries].into();
        let scratch = Box::new([0; MAX_WQE_BYTES]);
        let state = Track {
            entries,
            scratch,
            posted: 0,
            retired: 0,
            exposed: 0,
            gaps: 0,
            head: 0,
            tail: 0,
            owner: Owner::Nobody,
            lives: VecDeque::new(),
        };
        Arc::new(Self {
            qpn,
            is_send,
            health,
            life: AtomicUsize::new(0),
            posted: AtomicU64::new(0),
            retired: AtomicU64::new(0),
            has_gaps: AtomicU32::new(0),
            log,
            is_card,
            key_reader: OnceLock::new(),
            is_of_stream: AtomicBool::new(false),
            state: SpinLock::new(state),
        })
    }

    /// Explains failures by the keys in the ring.
    pub(crate) fn read_keys_by(&self, key_reader: KeyReader) {
        _ = self.key_reader.set(key_reader);
    }

    pub(crate) fn name(&self) -> &'static str {
        if self.is_send { "send" } else { "receive" }
    }

    /// The queue, for the flight recorder.
    pub(crate) fn queue(&self) -> Queue {
        if self.is_send { Queue::Send } else { Queue::Receive }
    }

    /// Publishes the number of posted requests for readers without the lock.
    #[inline]
    pub(crate) fn publish(&self, track: &Track) {
        producer_index::publish(&self.posted, &self.has_gaps, track.posted, false);
    }

    /// Like [`Tracker::publish`], and marks that cancelled requests remain in the queue.
    pub(crate) fn publish_gaps(&self, track: &Track) {
        producer_index::publish(&self.posted, &self.has_gaps, track.posted, true);
    }

    /// The number of posted requests, and the first request from `n` on that is not cancelled.
    #[inline]
    pub(crate) fn next_from(&self, n: u64) -> (u64, u64) {
        match producer_index::read(&self.posted, &self.has_gaps) {
            (_, true) => self.next_behind_gaps(n),
            (posted, false) => (posted, n),
        }
    }

    #[cold]
    fn next_behind_gaps(&self, n: u64) -> (u64, u64) {
        let track = self.lock();
        let next = (n..track.posted).find(|&n| !track.entry(n).cancelled);
        (track.posted, next.unwrap_or(n.max(track.posted)))
    }

    /// A wait for the completion of request `n`, for the flight recorder.
    pub(crate) fn awaits(&self, n: u64) -> Awaited {
        let [posted, completed] = [&self.posted, &self.retired].map(|count| count.load(Ordering::Relaxed));
        let device = self.log.device();
        Awaited { queue: self.queue(), device, qpn: self.qpn, number: n, value: 0, posted, completed }
    }

    /// A wait for the completion of request `n`, and what to do.
    pub(crate) fn describe(&self, n: u64) -> String {
        let track = self.lock();
        let is_posted = n < track.posted && track.posted - n <= track.entries.len() as u64;
        let id = match is_posted {
            true => format!("wr_id {}", track.entry(n).wr_id),
            false => "not posted".to_owned(),
        };
        let fix = if self.is_send { "posts receives" } else { "sends" };
        format!(
            "{} {n} ({id}) of QP {:#x} to complete; see that the peer lives and {fix}",
            self.name(),
            self.qpn
        )
    }

    #[inline]
    pub(crate) fn lock(&self) -> SpinLockGuard<'_, Track> {
        self.state.lock()
    }

    /// Requests posted.
    #[inline]
    pub(crate) fn posted(&self) -> u64 {
        producer_index::read(&self.posted, &self.has_gaps).0
    }

    /// Numbers of the outstanding requests.
    pub(crate) fn awaited(&self) -> Range<u64> {
        let track = self.lock();
        track.retired..track.posted
    }

    /// The low 16 bits of the request's first block index, as its CQE holds them.
    pub(crate) fn wqe_counter(&self, n: u64) -> u16 {
        low16(self.lock().entry(n).begin)
    }

    /// Numbers of the requests that were written for a stream, and not submitted to it.
    pub(crate) fn unsubmitted(&self) -> Range<u64> {
        let track = self.lock();
        track.exposed..track.posted
    }

    /// Number of outstanding requests.
    pub(crate) fn outstanding(&self) -> u64 {
        let track = self.lock();
        track.posted - track.retired
    }

    /// Whether a stream was the last to post, in a receive queue.
    #[inline]
    pub(crate) fn is_of_stream(&self) -> bool {
        self.is_of_stream.load(Ordering::Relaxed)
    }

    /// Sets the owner of a receive queue. Returns the one before.
    pub(crate) fn set_owner(&self, track: &mut Track, owner: Owner) -> Owner {
        self.is_of_stream.store(matches!(owner, Owner::Stream(_)), Ordering::Relaxed);
        mem::replace(&mut track.owner, owner)
    }

    /// Number of resets.
    #[inline]
    pub(crate) fn life(&self) -> usize {
        self.life.load(Ordering::Acquire)
    }

    /// Whether a reset discarded request `n`, made after `life` resets.
    pub(crate) fn is_lost(&self, n: u64, life: usize) -> bool {
        if life == self.life() {
            return false;
        }
        let track = self.lock();
        // Requests of a life that is not remembered any more count as lost.
        let at = (track.lives.len() + life).checked_sub(self.life());
        at.is_none_or(|at| track.lives.get(at).is_some_and(|&retired| n >= retired))
    }

    /// Resets the state: the ring starts at 0, outstanding requests are discarded. Returns their number.
    pub(crate) fn reset(&self) -> u64 {
        let mut track = self.lock();
        let retired = track.retired;
        if track.lives.len() == LIVES {
            track.lives.pop_front();
        }
        track.lives.push_back(retired);
        self.life.fetch_add(1, Ordering::Release);
        let lost = track.reset();
        self.has_gaps.store(0, Ordering::Relaxed);
        self.publish(&track);
        lost
    }

    /// The result of request `n`: `None` while outstanding, `Some(None)` when no longer known. `read_cqe` reads its
    /// CQE, which is still in its slot, if it was skipped.
    pub(crate) fn outcome(&self, n: u64, read_cqe: impl FnOnce() -> Cqe) -> Option<Option<Wc>> {
        let mut track = self.lock();
        if n >= track.retired {
            return None;
        }
        let is_known = track.posted - n <= track.entries.len() as u64;
        // Under the lock, so that no new request takes the slot.
        Some(is_known.then(|| self.decode_skipped(&mut track, n, read_cqe)).flatten())
    }

    /// The result of a completed request. Decodes its CQE if it was skipped.
    fn decode_skipped(&self, track: &mut Track, n: u64, read_cqe: impl FnOnce() -> Cqe) -> Option<Wc> {
        if track.entry(n).skipped {
            self.keep(track, n, &read_cqe());
            track.entry_mut(n).skipped = false;
        }
        track.entry(n).wc
    }

    /// Decodes all skipped CQEs while they are in the ring.
    pub(crate) fn decode_all_skipped(&self, read_cqe: impl Fn(u64) -> Cqe) {
        let mut track = self.lock();
        for n in track.posted.saturating_sub(track.entries.len() as u64)..track.retired {
            self.decode_skipped(&mut track, n, || read_cqe(n));
        }
    }

    /// Whether CQEs can be skipped in a completion queue of `slots` slots: they stay readable as long as a result may
    /// be queried, and the recorder needs no event for each.
    pub(crate) fn may_skip(&self, slots: u64) -> bool {
        let is_recorded = self.is_card && self.log.is_on();
        !is_recorded && self.lock().entries.len() as u64 <= slots
    }

    /// Retires requests without decoding their CQEs, given the last CQE. Returns `false`, with nothing done, if that is
    /// an error or belongs to another request.
    pub(crate) fn skip(&self, requests: Range<u64>, last: &Cqe) -> bool {
        let mut track = self.lock();
        let entry = *track.entry(requests.end - 1);
        let is_its_own = last.qpn == self.qpn && is_send_cqe(last) == self.is_send;
        let is_fine = is_its_own && !last.opcode.is_error() && matches_request(&entry, last);
        if track.retired != requests.start || track.posted < requests.end || !is_fine {
            return false;
        }
        requests.clone().for_each(|n| track.entry_mut(n).skipped = true);
        track.retired = requests.end;
        track.tail = entry.end();
        self.retired.store(track.retired, Ordering::Relaxed);
        true
    }

    /// Keeps what the CQE of request `n` says.
    fn keep(&self, track: &mut Track, n: u64, cqe: &Cqe) -> Wc {
        let wc = self.wc(track.entry(n), cqe);
        let entry = track.entry_mut(n);
        entry.wc = Some(wc);
        if !self.is_send {
            entry.doorbell = u64::from(cqe.slid) << 32 | u64::from(cqe.flags_rqpn);
        }
        wc
    }

    /// The sender of the datagram that completed receive `n` has, whose outcome is known.
    pub(crate) fn sender(&self, n: u64) -> Sender {
        let [_, _, lid @ .., flags, q0, q1, q2] = self.lock().entry(n).doorbell.to_be_bytes();
        Sender {
            qpn: u32::from_be_bytes([0, q0, q1, q2]),
            lid: u16::from_be_bytes(lid),
            sl: flags & 0xf,
            has_grh: flags >> 4 & 3 != 0,
        }
    }

    /// Decodes the CQE of a request.
    fn wc(&self, entry: &Entry, cqe: &Cqe) -> Wc {
        let failed = cqe.opcode.is_error();
        let names_old_key = || self.key_reader.get().is_some_and(|reader| reader.names_old_key(entry));
        let deregistered = failed && cqe.syndrome == Syndrome::LOC_PROT_ERR && names_old_key();
        Wc {
            wr_id: entry.wr_id,
            qpn: self.qpn,
            opcode: cqe.opcode,
            send_opcode: cqe.send_opcode,
            byte_len: byte_len(cqe),
            imm: matches!(cqe.opcode, CqeOpcode::RESP_SEND_IMM | CqeOpcode::RESP_WR_IMM).then_some(cqe.imm),
            syndrome: failed.then_some(cqe.syndrome),
            vendor: cqe.vendor,
            deregistered,
        }
    }

    /// Finds the queue of a CQE.
    pub(crate) fn find<'a>(queues: &'a [Arc<Tracker>], cqe: &Cqe) -> Option<&'a Arc<Tracker>> {
        queues.iter().find(|q| q.qpn == cqe.qpn && q.is_send == is_send_cqe(cqe))
    }

    /// Whether its requests are datagrams to send.
    pub(crate) fn is_of_datagrams(&self) -> bool {
        self.key_reader.get().is_some_and(KeyReader::is_of_datagrams)
    }

    /// Retires the oldest request. Returns its number, its completion, and whether it was cancelled.
    pub(crate) fn complete(&self, cqe: &Cqe) -> Option<(u64, Wc, bool)> {
        let mut track = self.state.lock();
        let n = track.retired;
        let entry = (n < track.posted).then(|| *track.entry(n))?;
        let wc = self.keep(&mut track, n, cqe);
        track.retired += 1;
        track.tail = entry.end();
        self.retired.store(track.retired, Ordering::Relaxed);
        drop(track);
        if self.is_card {
            self.log.note(|| {
                let (len, status) = (wc.byte_len, wc.syndrome.map_or(0, |syndrome| syndrome.0));
                let event = Event::of(Stage::Completed, self.queue(), By::Hca, self.qpn, n);
                Event { len, status, ..event }
            });
        }
        if let Err(error) = wc.ok() {
            self.health.record(CompletionError { bytes: entry.len, ..error }.into());
        }
        if cqe.opcode.is_error() && cqe.format == 0 && cqe.wqe_counter != low16(entry.begin) {
            // Old firmware may write wrong counters into flush CQEs. Their order identifies the request.
            let (counter, expected) = (cqe.wqe_counter, low16(entry.begin));
            tracing::debug!(
                qpn = self.qpn,
                counter,
                expected,
                "the counter of a failed completion is not its request's"
            );
        } else if !matches_request(&entry, cqe) {
            let (queue, expected) = (self.name(), low16(entry.begin));
            let (counter, format) = (cqe.wqe_counter, cqe.format);
            self.health.record(Error::UnexpectedCqe { qpn: self.qpn, queue, counter, expected, format });
        }
        Some((n, wc, entry.cancelled))
    }
}

/// Bytes received, read, or returned by an atomic. Cards leave the count of other sends undefined.
fn byte_len(cqe: &Cqe) -> u32 {
    match (cqe.opcode, cqe.send_opcode) {
        (opcode, _) if opcode.is_error() => 0,
        (CqeOpcode::REQ, Opcode::ATOMIC_CS | Opcode::ATOMIC_FA) => 8,
        (CqeOpcode::REQ, Opcode::RDMA_READ) => cqe.byte_cnt,
        (CqeOpcode::REQ, _) => 0,
        _ => cqe.byte_cnt,
    }
}

fn is_send_cqe(cqe: &Cqe) -> bool {
    matches!(cqe.opcode, CqeOpcode::REQ | CqeOpcode::REQ_ERR)
}

/// Whether a CQE has no inline payload, no compression, and the counter of this request. The bookkeeping relies on all
/// three.
fn matches_request(entry: &Entry, cqe: &Cqe) -> bool {
    cqe.format == 0 && cqe.wqe_counter == low16(entry.begin)
}

impl Track {
    #[inline]
    fn at(&self, n: u64) -> usize {
        usize::try_from(n).expect("64-bit hosts only") & (self.entries.len() - 1)
    }

    #[inline]
    pub(crate) fn entry(&self, n: u64) -> &Entry {
        &self.entries[self.at(n)]
    }

    #[inline]
    pub(crate) fn entry_mut(&mut self, n: u64) -> &mut Entry {
        let at = self.at(n);
        &mut self.entries[at]
    }

    /// Whether the table has room for one more request.
    #[inline]
    pub(crate) fn has_entry(&self) -> bool {
        self.has_entries(1)
    }

    /// Whether the table has room for `count` more requests.
    #[inline]
    pub(crate) fn has_entries(&self, count: u64) -> bool {
        self.posted - self.retired + count <= self.entries.len() as u64
    }

    /// Appends a request.
    #[inline]
    pub(crate) fn push(&mut self, entry: Entry) {
        self.head = entry.end();
        *self.entry_mut(self.posted) = entry;
        self.posted += 1;
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.retired == self.exposed
    }

    fn reset(&mut self) -> u64 {
        let lost = self.posted - self.retired;
        self.posted = self.retired;
        self.exposed = self.retired;
        self.head = 0;
        self.tail = 0;
        self.owner = Owner::Nobody;
        lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cqe_of_another_request_or_format_breaks_the_queue() {
        let good = Cqe { qpn: 5, wqe_counter: 0, ..Cqe::default() };
        let bad = [Cqe { wqe_counter: 1, ..good }, Cqe { format: 1, ..good }];
        for (cqe, fine) in [(good, true), (bad[0], false), (bad[1], false)] {
            let health = Arc::new(Health::default());
            let tracker = Tracker::new(5, true, 4, health.clone(), (Log::default(), false));
            tracker.lock().push(Entry { blocks: 1, ..Entry::default() });
            assert!(tracker.complete(&cqe).is_some());
            assert_eq!(health.check().is_ok(), fine, "{:?}", health.check());
        }
    }

    #[test]
    fn byte_len_is_read_only_where_cards_define_it() {
        let req = |send_opcode| Cqe { opcode: CqeOpcode::REQ, send_opcode, byte_cnt: 77, ..Cqe::default() };
        for (opcode, len) in [
            (Opcode::NOP, 0),
            (Opcode::SEND, 0),
            (Opcode::SEND_IMM, 0),
            (Opcode::RDMA_WRITE, 0),
            (Opcode::RDMA_WRITE_IMM, 0),
            (Opcode::RDMA_READ, 77),
            (Opcode::ATOMIC_CS, 8),
            (Opcode::ATOMIC_FA, 8),
        ] {
            assert_eq!(byte_len(&req(opcode)), len, "{opcode:?}");
        }
        let received = Cqe { opcode: CqeOpcode::RESP_SEND, ..req(Opcode::SEND) };
        assert_eq!(byte_len(&received), 77);
        assert_eq!(byte_len(&Cqe { opcode: CqeOpcode::RESP_ERR, ..received }), 0);
        let (_, tracker, _) = four();
        let written = Cqe { qpn: 5, ..req(Opcode::RDMA_WRITE) };
        assert_eq!(tracker.complete(&written).map(|(_, wc, _)| wc.byte_len), Some(0));
    }

    /// Four requests and their CQEs.
    fn four() -> (Arc<Health>, Arc<Tracker>, impl Fn(u64) -> Cqe) {
        let health = Arc::new(Health::default());
        let tracker = Tracker::new(5, true, 4, health.clone(), (Log::default(), false));
        for n in 0..4 {
            tracker.lock().push(Entry { wr_id: 10 + n, begin: n, blocks: 1, ..Entry::default() });
        }
        let send_opcode = Opcode::RDMA_READ;
        let cqe = move |n| Cqe { qpn: 5, wqe_counter: low16(n), byte_cnt: 7, send_opcode, ..Cqe::default() };
        (health, tracker, cqe)
    }

    #[test]
    fn requests_before_a_reset_stay_lost_and_few_resets_are_remembered() {
        let (_, tracker, cqe) = four();
        assert!(tracker.skip(0..2, &cqe(1)));
        for resets in 0..3 * LIVES {
            let lost = [0, 1, 2, 3].map(|n| tracker.is_lost(n, 0));
            let is_old = resets > LIVES;
            assert_eq!(lost, [is_old, is_old, resets > 0, resets > 0], "{resets} resets");
            assert!(!tracker.is_lost(2, tracker.life()));
            tracker.reset();
        }
        assert_eq!(tracker.lock().lives.len(), LIVES);
    }

    #[test]
    fn a_skipped_cqe_is_decoded_once_on_demand() {
        let (health, tracker, cqe) = four();
        assert!(tracker.may_skip(4) && !tracker.may_skip(2), "its CQE may be gone");
        assert!(tracker.skip(0..2, &cqe(1)));
        assert_eq!((tracker.awaited(), tracker.lock().tail), (2..4, 2));
        for expected in [1, 0] {
            let reads = std::cell::Cell::new(0);
            let seen = tracker.outcome(0, || (reads.set(reads.get() + 1), cqe(0)).1);
            let wc = seen.flatten().expect("it has completed");
            assert_eq!((reads.get(), wc.wr_id, wc.byte_len), (expected, 10, 7));
        }
        assert!(tracker.outcome(2, || unreachable!("it has not arrived")).is_none());
        tracker.decode_all_skipped(&cqe);
        let known = tracker.outcome(1, || unreachable!("already decoded"));
        assert_eq!(known.flatten().map(|wc| wc.wr_id), Some(11));
        // A new request takes its slot: its CQE must not be read any more.
        tracker.skip(2..4, &cqe(3));
        tracker.lock().push(Entry { blocks: 5, ..Entry::default() });
        assert!(matches!(tracker.outcome(0, || unreachable!("overwritten")), Some(None)));
        assert!(health.check().is_ok());
    }

    #[test]
    fn errors_and_unexpected_cqes_are_not_skipped() {
        let (_, tracker, cqe) = four();
        let good = cqe(1);
        for bad in [
            Cqe { opcode: CqeOpcode::REQ_ERR, ..good },
            Cqe { opcode: CqeOpcode::RESP_SEND, ..good },
            Cqe { qpn: 6, ..good },
            Cqe { wqe_counter: 0, ..good },
            Cqe { format: 1, ..good },
        ] {
            assert!(!tracker.skip(0..2, &bad), "{bad:?}");
        }
        assert!(!tracker.skip(1..2, &good), "0 is outstanding");
        assert!(!tracker.skip(0..5, &Cqe { wqe_counter: 0, ..good }), "only four were posted");
        assert_eq!(tracker.awaited(), 0..4);
    }
}
