//! The rings of a queue pair as an HCA reads them: doorbell, doorbell record and WQEs, with the checks.

use std::sync::atomic::Ordering;

use gdsync_shm as protocol;
use mlx5_ring::{
    self as mlx5, BB, Cqe, CqeOpcode, Ctrl, DataSeg, DecodedOp, Doorbell, Opcode, Syndrome, low16,
};
use smallvec::SmallVec;

use crate::Gid;
use crate::error::Result;
use crate::memory::{Memory, Word64};
use crate::recorder::{By, Event, Log, Queue, Stage};
use crate::{HcaStats, OnGpu, Places, QpRequest, QpState};

/// The memory that an application and the HCA share for a queue pair.
#[derive(Debug)]
pub struct Rings {
    /// The queue pair number, 24 bits.
    pub qpn: u32,
    /// Sizes and completion queues.
    pub request: QpRequest,
    /// The send queue.
    pub sq: Memory,
    /// The receive queue.
    pub rq: Memory,
    /// The doorbell record, 8 bytes.
    pub record: Memory,
    /// Where doorbells for posted sends are written.
    pub doorbell: DoorbellSource,
    /// The flight recorder's log of the queue pair.
    pub qp_trace: QpTrace,
    /// For cards that flush up to the last doorbell, not up to the record: the block behind the last doorbell.
    pub named: Option<u64>,
}

/// Where the HCA learns of posted sends.
#[derive(Clone, Debug)]
pub enum DoorbellSource {
    /// A doorbell register.
    Register(Word64),
    /// Registers that doorbells of other queue pairs are written to as well.
    Shared([Word64; 4]),
    /// The send counter of the doorbell record, and its value when last taken.
    Record(u16),
}

/// A send WQE fetched from the ring.
#[derive(Debug)]
pub struct Wqe {
    /// Its control segment.
    pub ctrl: Ctrl,
    /// Its blocks, the last one padded. Almost every WQE has one or two.
    blocks: SmallVec<[u8; 2 * BB]>,
}

impl Wqe {
    /// The WQE's bytes, without the padding of its last block.
    pub fn as_bytes(&self) -> &[u8] {
        &self.blocks[..(usize::from(self.ctrl.ds) * 16).min(self.blocks.len())]
    }

    /// Number of blocks it occupies: at least one, so that a broken one can be skipped.
    pub fn blocks(&self) -> u64 {
        blocks(self.ctrl.ds)
    }
}

/// Number of blocks of a WQE of `ds` 16-byte segments.
fn blocks(ds: u8) -> u64 {
    u64::from(ds.clamp(1, mlx5::MAX_DS)).div_ceil(4)
}

impl Rings {
    /// Allocates empty rings for queue pair `qpn`, with a doorbell page of its own. Also returns the doorbell register.
    ///
    /// # Errors
    /// As [`Places::alloc`].
    pub fn alloc(qpn: u32, request: &QpRequest, places: &Places) -> Result<(Self, Word64)> {
        let sq = places.alloc(OnGpu::SEND_QUEUE, BB << request.log_sq)?;
        let rq = Memory::alloc(request.rq_stride << request.log_rq)?;
        let record = places.alloc(OnGpu::RECORDS, mlx5::QP_DBREC_SIZE)?;
        let doorbell = places.alloc(OnGpu::empty(), 4096)?.word64(mlx5::BF_OFFSET)?;
        doorbell.store(mlx5::EMPTY);
        let rings = Self {
            qpn,
            request: *request,
            sq,
            rq,
            record,
            doorbell: DoorbellSource::Register(doorbell.clone()),
            qp_trace: QpTrace::default(),
            named: None,
        };
        Ok((rings, doorbell))
    }

    /// The doorbell register, if there is one.
    pub fn register(&self) -> Option<&Word64> {
        match &self.doorbell {
            DoorbellSource::Register(register) => Some(register),
            DoorbellSource::Shared(_) | DoorbellSource::Record(_) => None,
        }
    }

    /// Resets the rings for the next connection.
    pub fn clear(&mut self) {
        self.qp_trace.reset();
        self.record.fill(0, 8, 0).expect("a doorbell record has 8 bytes");
        match &mut self.doorbell {
            DoorbellSource::Register(register) => register.store(mlx5::EMPTY),
            DoorbellSource::Shared(_) => while self.take_shared().is_some() {},
            DoorbellSource::Record(taken) => *taken = 0,
        }
        self.named = self.named.map(|_| 0);
    }

    fn record(&self, word: usize) -> u16 {
        protocol::recorded(self.record.atomic32(word).expect("doorbell records are aligned"))
    }

    /// The send producer index of the doorbell record, at or after `from`.
    pub fn send_record(&self, from: u64) -> u64 {
        mlx5::extend16(from, self.record(mlx5::QP_DBREC_SEND))
    }

    /// The block before which sends are flushed, at or after `from`.
    pub fn flush_end(&self, from: u64) -> u64 {
        let end = self.send_record(from);
        self.named.map_or(end, |named| end.min(named.max(from)))
    }

    /// The receive producer index of the doorbell record, at or after `from`.
    pub fn recv_record(&self, from: u64) -> u64 {
        mlx5::extend16(from, self.record(mlx5::QP_DBREC_RECV))
    }

    /// Number of blocks of the send queue.
    pub fn blocks(&self) -> u64 {
        1 << self.request.log_sq
    }

    /// Number of entries of the receive queue.
    pub fn receives(&self) -> u64 {
        1 << self.request.log_rq
    }

    /// Offset of block `index` in the send queue.
    pub fn offset(&self, index: u64) -> usize {
        usize::try_from(index & (self.blocks() - 1)).expect("a ring index fits") * BB
    }

    /// Reads the send WQE that begins at block `index`; it may wrap around the end of the ring.
    pub fn fetch(&self, index: u64) -> Wqe {
        let mut blocks = SmallVec::new();
        let mut block = [0; BB];
        let mut read = |index: u64| {
            self.sq.read(self.offset(index), &mut block).expect("blocks lie in the ring");
            blocks.extend_from_slice(&block);
            mlx5::decode_ctrl(block.first_chunk().expect("a block holds a control segment"))
        };
        let ctrl = read(index);
        for next in 1..self::blocks(ctrl.ds).min(self.blocks()) {
            read(index + next);
        }
        Wqe { ctrl, blocks }
    }

    /// The buffers of receive `n`.
    pub fn receive(&self, n: u64) -> SmallVec<[DataSeg; 4]> {
        let at = usize::try_from(n & (self.receives() - 1)).expect("a ring index fits");
        let mut wqe: SmallVec<[u8; 64]> = SmallVec::from_elem(0, self.request.rq_stride);
        self.rq.read(at * self.request.rq_stride, &mut wqe).expect("entries lie in the ring");
        mlx5::decode_recv(&wqe).collect()
    }

    /// Whether the doorbell was rung and not taken.
    #[inline]
    pub fn is_rung(&self) -> bool {
        match &self.doorbell {
            DoorbellSource::Register(register) => protocol::is_rung(register.atomic()),
            DoorbellSource::Shared(registers) => {
                registers.iter().any(|register| self.names_this(register.load()))
            }
            DoorbellSource::Record(taken) => self.record(mlx5::QP_DBREC_SEND) != *taken,
        }
    }

    /// Takes the doorbell. Returns the block up to which WQEs may be fetched, if there is a new one; `head` is the next block to fetch.
    ///
    /// # Errors
    /// The syndrome with which the queue pair fails.
    pub fn take_doorbell(
        &mut self,
        head: u64,
        state: QpState,
        strict: bool,
        stats: &mut HcaStats,
    ) -> std::result::Result<Option<u64>, Syndrome> {
        let value = match &mut self.doorbell {
            DoorbellSource::Register(register) => protocol::take_doorbell(register.atomic()),
            DoorbellSource::Shared(_) => self.take_shared(),
            &mut DoorbellSource::Record(taken) => return Ok(self.take_record(taken, head, state, stats)),
        };
        let Some(value) = value else { return Ok(None) };
        stats.doorbells += 1;
        let doorbell = Doorbell::decode(value);
        if doorbell.qpn != self.qpn {
            stats.violation("a doorbell names another QP than the one whose register it was written to");
            return Ok(None);
        }
        if let Some(named) = &mut self.named {
            let last = mlx5::extend16(head, doorbell.index);
            let is_ahead = last - head < 1 << self.request.log_sq;
            *named = if is_ahead { last + blocks(doorbell.ds) } else { *named };
        }
        if state != QpState::RTS {
            // In ERR and SQE the record decides what is flushed; before RTS a card's behaviour is undefined.
            if !matches!(state, QpState::ERR | QpState::SQE) {
                stats.violation("a doorbell was rung before the QP was ready to send");
            }
            return Ok(None);
        }
        // Two forms are in use: the index of the last WQE with its opcode and size, or the next free index.
        let last_wqe = doorbell.opcode != Opcode::NOP || doorbell.ds != 0;
        let mut target = mlx5::extend16(head, doorbell.index);
        if last_wqe {
            // The last WQE lies before `head` if an earlier doorbell fetched it.
            if target - head >= self.blocks() {
                return Ok(None);
            }
            target += blocks(doorbell.ds);
        }
        if target - head > self.blocks() {
            if last_wqe {
                stats.violation("a doorbell runs ahead of the ring");
            }
            return Ok(None);
        }
        // A card would execute the work, but an error before the record is written would not flush it.
        let record = if strict { self.send_record(head) } else { target };
        if record < target || record - head > self.blocks() {
            stats.violation("a doorbell was rung before its doorbell record was written");
            return Err(Syndrome::LOC_QP_OP_ERR);
        }
        self.qp_trace.triggered(self.qpn);
        Ok(Some(target))
    }

    /// Whether a doorbell is one of this queue pair.
    fn names_this(&self, value: u64) -> bool {
        value != mlx5::EMPTY && Doorbell::decode(value).qpn == self.qpn
    }

    /// Takes a doorbell of this queue pair out of a shared register.
    fn take_shared(&self) -> Option<u64> {
        let DoorbellSource::Shared(registers) = &self.doorbell else { return None };
        registers.iter().find_map(|register| {
            let value = register.load();
            let is_taken = || {
                let register = register.atomic();
                register.compare_exchange(value, mlx5::EMPTY, Ordering::Acquire, Ordering::Relaxed).is_ok()
            };
            (self.names_this(value) && is_taken()).then_some(value)
        })
    }

    /// Takes a new send counter. Returns the block up to which WQEs may be fetched, if the queue pair may send.
    fn take_record(&mut self, taken: u16, head: u64, state: QpState, stats: &mut HcaStats) -> Option<u64> {
        let counter = self.record(mlx5::QP_DBREC_SEND);
        // Before RTS it stays to be taken.
        if counter == taken || !matches!(state, QpState::RTS | QpState::ERR) {
            return None;
        }
        self.doorbell = DoorbellSource::Record(counter);
        stats.doorbells += 1;
        let target = mlx5::extend16(head, counter);
        if target - head > self.blocks() {
            stats.violation("a doorbell record runs ahead of the ring");
            return None;
        }
        self.qp_trace.triggered(self.qpn);
        (state == QpState::RTS).then_some(target)
    }

    /// Decodes the WQE fetched at block `head`.
    ///
    /// # Errors
    /// The syndrome with which it fails.
    pub fn inspect(
        &self,
        wqe: &Wqe,
        head: u64,
        strict: bool,
        stats: &mut HcaStats,
    ) -> std::result::Result<DecodedOp, Syndrome> {
        self.check(wqe, head, strict, stats)?;
        mlx5::decode_body(&wqe.ctrl, wqe.as_bytes()).map_err(|error| {
            tracing::debug!(qpn = self.qpn, %error, "malformed WQE");
            error.syndrome()
        })
    }

    /// Checks that the WQE fetched at block `head` was written for it, and in strict mode also its reserved bits.
    ///
    /// # Errors
    /// The syndrome with which it fails.
    pub fn check(
        &self,
        wqe: &Wqe,
        head: u64,
        strict: bool,
        stats: &mut HcaStats,
    ) -> std::result::Result<(), Syndrome> {
        let stale = wqe.ctrl.index != low16(head) || wqe.ctrl.qpn != self.qpn;
        if stale {
            stats.violation("a doorbell exposed a WQE of another index or QP: it was not written yet");
            return Err(Syndrome::LOC_QP_OP_ERR);
        }
        if strict && let Some(what) = mlx5::strict_violations(&wqe.ctrl, wqe.as_bytes()) {
            stats.violation(what);
            return Err(Syndrome::LOC_QP_OP_ERR);
        }
        Ok(())
    }
}

/// Records the stages of a queue pair's requests in the flight recorder.
///
/// The rings hold only the low bits of request numbers. But each request is fetched once, in order, and completes once; after a reset
/// the numbers of requests that were dropped are used again.
#[derive(Debug, Default)]
pub struct QpTrace {
    log: Log,
    /// Number of sends fetched.
    fetched: u64,
    /// Numbers of sends and receives completed.
    sent: u64,
    received: u64,
}

impl QpTrace {
    /// For a queue pair of the device with this GID.
    ///
    /// # Errors
    /// As [`Log::open`].
    pub fn new(gid: Gid) -> Result<Self> {
        Ok(Self { log: Log::open()?.on(gid), ..Self::default() })
    }

    /// The doorbell was taken.
    #[inline]
    pub fn triggered(&self, qpn: u32) {
        self.log.note(|| Event::of(Stage::Triggered, Queue::Send, By::Hca, qpn, self.fetched));
    }

    /// A send was fetched.
    #[inline]
    pub fn fetched(&mut self, qpn: u32, len: usize) {
        let event = || Event::of(Stage::Fetched, Queue::Send, By::Hca, qpn, self.fetched);
        self.log.note(|| Event { len: u32::try_from(len).unwrap_or(u32::MAX), ..event() });
        self.fetched += 1;
    }

    /// A send was skipped, to be flushed.
    pub fn skipped(&mut self) {
        self.fetched += 1;
    }

    /// A completion is about to be written.
    #[inline]
    pub fn completed(&mut self, cqe: &Cqe) {
        let is_send = matches!(cqe.opcode, CqeOpcode::REQ | CqeOpcode::REQ_ERR);
        let (count, queue) =
            if is_send { (&mut self.sent, Queue::Send) } else { (&mut self.received, Queue::Receive) };
        let number = *count;
        *count += 1;
        self.log.note(|| {
            let status = if cqe.opcode.is_error() { cqe.syndrome.0 } else { 0 };
            let event = Event::of(Stage::Completed, queue, By::Hca, cqe.qpn, number);
            Event { len: cqe.byte_cnt, status, ..event }
        });
    }

    /// The queue pair was reset: requests that were fetched and not completed are dropped.
    pub fn reset(&mut self) {
        self.fetched = self.sent;
    }
}
