//! Completion queues of engines: writing CQEs.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::{CqEvent, GpuNudge};
use crate::{CqParts, OnGpu, Places};
use mlx5_ring::{self as mlx5, CQE_OP_OWN_OFFSET, CQE_SIZE, Cqe, INITIAL_CQE};

/// The first CQN, large enough to reveal byte-order mistakes.
const BASE: u32 = 0x8a1;

/// Indices of objects. A freed one rests before it is given again, so that late events of its object do not meet the next one.
#[derive(Debug, Default)]
pub struct Indices {
    made: usize,
    free: VecDeque<usize>,
}

impl Indices {
    /// Freed indices that rest.
    const RESTING: usize = 64;

    /// An index that no object has.
    pub fn take(&mut self) -> usize {
        if self.free.len() > Self::RESTING
            && let Some(index) = self.free.pop_front()
        {
            return index;
        }
        self.made += 1;
        self.made - 1
    }

    /// Frees an index.
    pub fn give_back(&mut self, index: usize) {
        self.free.push_back(index);
    }
}

/// The completion queues of an engine.
#[derive(Debug, Default)]
pub struct Cqs {
    slots: Vec<Option<SoftCq>>,
    indices: Indices,
    /// Number of CQEs written, which is also their timestamp.
    written: u64,
    /// GPUs to nudge after the step.
    nudges: Vec<Arc<dyn GpuNudge>>,
    /// Queues that GPU streams wait on.
    attended: Vec<u32>,
    /// Queues with a completion channel.
    channels: Vec<u32>,
    /// Flushed requests complete with counter 0, as on some cards.
    pub hide_flush_counters: bool,
}

#[derive(Debug)]
struct SoftCq {
    ring: Memory,
    record: Memory,
    event: Arc<CqEvent>,
    log: u32,
    /// Bytes per entry; the CQE is its end.
    entry: usize,
    /// Number of completions written.
    produced: u64,
    /// GPU streams wait for completions before this number, as last read.
    until: u64,
    /// The consumer index last read from the doorbell record.
    consumed: u64,
    ignore_overrun: bool,
    overrun: bool,
    /// Listed in [`Cqs::attended`].
    attended: bool,
    /// Readers may check only the owner bit.
    by_owner: bool,
    /// Completion channel.
    channel: Option<Channel>,
}

/// Completion events of a queue, which its program asks for by the arm word of the doorbell record.
#[derive(Debug)]
struct Channel {
    notifier: Arc<dyn GpuNudge>,
    /// Sequence number of the arming that was answered last.
    answered: Option<u8>,
    /// Number of completions up to the last solicited one or error.
    solicited: u64,
}

/// The queue is full and dead: a card raises a CQ error event and writes no more completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overrun;

/// Allocates a queue of `1 << log` entries in the initial state; [`Cqs::adopt`] gives it its number.
///
/// # Errors
/// As [`Places::alloc`].
pub fn parts(log: u32, ring: OnGpu, places: &Places) -> Result<CqParts> {
    let ring = places.alloc(ring, CQE_SIZE << log)?;
    for slot in 0..1usize << log {
        ring.write(slot * CQE_SIZE, &INITIAL_CQE)?;
    }
    let record = places.alloc(OnGpu::RECORDS, mlx5::CQ_DBREC_SIZE)?;
    Ok(CqParts { cqn: 0, ring, record, event: Arc::default() })
}

impl Cqs {
    /// Registers a queue and returns it with its number. Overruns are not checked: gdsync reserves a slot before it posts, and asks
    /// cards to ignore overruns too.
    pub fn adopt(&mut self, parts: CqParts, log: u32) -> CqParts {
        let CqParts { ring, record, event, .. } = &parts;
        let cqn = self.create(ring.clone(), record.clone(), event.clone(), log, true);
        CqParts { cqn, ..parts }
    }

    /// Registers a queue of `1 << log` entries whose CQEs are in the initial state. Returns its number.
    pub fn create(
        &mut self,
        ring: Memory,
        record: Memory,
        event: Arc<CqEvent>,
        log: u32,
        ignore_overrun: bool,
    ) -> u32 {
        let cq = SoftCq {
            entry: ring.len() >> log,
            ring,
            record,
            event,
            log,
            produced: 0,
            until: 0,
            consumed: 0,
            ignore_overrun,
            overrun: false,
            attended: false,
            by_owner: true,
            channel: None,
        };
        let index = self.indices.take();
        self.slots.resize_with(self.slots.len().max(index + 1), || None);
        self.slots[index] = Some(cq);
        BASE + u32::try_from(index).expect("CQNs have 24 bits and memory ends before")
    }

    /// The GPUs to nudge after the step.
    pub fn take_nudges(&mut self) -> Vec<Arc<dyn GpuNudge>> {
        std::mem::take(&mut self.nudges)
    }

    /// A GPU stream waits on this queue.
    pub fn attend(&mut self, cqn: u32) {
        let Some(Some(cq)) = slot(&mut self.slots, cqn) else { return };
        if !cq.attended {
            cq.attended = true;
            self.attended.push(cqn);
        }
    }

    /// Stops attending to queues that no GPU stream waits on.
    pub fn drop_idle_watches(&mut self) {
        let slots = &mut self.slots;
        self.attended.retain(|&cqn| {
            let Some(Some(cq)) = slot(slots, cqn) else { return false };
            cq.attended = !cq.event.may_unwatch(cq.produced);
            cq.attended
        });
    }

    /// Whether GPU streams wait on any queue, or did a moment ago.
    pub fn is_attended(&self) -> bool {
        !self.attended.is_empty()
    }

    /// Removes a completion queue.
    pub fn destroy(&mut self, cqn: u32) {
        self.attended.retain(|&other| other != cqn);
        self.channels.retain(|&other| other != cqn);
        if self.slot(cqn).and_then(Option::take).is_some() {
            self.indices.give_back((cqn - BASE) as usize);
        }
    }

    /// Whether a queue has this completion, by the low bits of its number, from 0. `None` if the queue is not there.
    pub fn has_completed(&mut self, cqn: u32, index: u32) -> Option<bool> {
        let produced = self.slot(cqn)?.as_ref()?.produced;
        let low = u32::try_from(produced & u64::from(u32::MAX)).unwrap_or_default();
        Some(low.wrapping_sub(index).cast_signed() > 0)
    }

    fn slot(&mut self, cqn: u32) -> Option<&mut Option<SoftCq>> {
        slot(&mut self.slots, cqn)
    }

    /// Writes the next CQE of a queue: the word with the owner bit last.
    ///
    /// # Errors
    /// [`Overrun`] if the queue is full, or was before.
    pub fn complete(&mut self, cqn: u32, mut cqe: Cqe) -> std::result::Result<(), Overrun> {
        self.written += 1;
        cqe.timestamp = self.written;
        if self.hide_flush_counters && cqe.syndrome == mlx5::Syndrome::WR_FLUSH_ERR {
            cqe.wqe_counter = 0;
        }
        let Some(Some(cq)) = slot(&mut self.slots, cqn) else { return Ok(()) };
        if cq.overrun || !cq.has_room() {
            cq.overrun = true;
            return Err(Overrun);
        }
        cqe.owner = mlx5::lap(cq.produced, cq.log);
        let bytes = cqe.encode();
        let slot = cq.offset(cq.produced);
        if cfg!(target_arch = "x86_64") && cq.ring.gpu().is_some() {
            // One burst: the copy stores upwards, so the owner bit goes last or together with the rest. A write-combining buffer
            // that is evicted early may leave in any order (Intel SDM), so a GPU may only check the owner bit, as streams do; the
            // CPU, which reads the rest, is ordered by its own load. Storing the word a second time would cost 0.2 us.
            cq.ring.write(slot, &bytes).expect("CQEs lie in the ring");
        } else {
            cq.ring.write(slot, &bytes[..CQE_OP_OWN_OFFSET]).expect("CQEs lie in the ring");
            let word = cq.ring.atomic32(slot + CQE_OP_OWN_OFFSET).expect("CQE words are aligned");
            gdsync_shm::publish_cqe(word, mlx5::op_own_word(&bytes));
            cq.ring.fence();
        }
        cq.event.raise();
        if let Some(nudger) = cq.event.nudger(cq.produced, &mut cq.until)
            && !self.nudges.iter().any(|known| Arc::ptr_eq(known, nudger))
        {
            self.nudges.push(nudger.clone());
        }
        cq.produced += 1;
        if let Some(channel) = cq.channel.as_mut().filter(|_| cqe.solicited || cqe.opcode.is_error()) {
            channel.solicited = cq.produced;
        }
        Ok(())
    }

    /// Goes on in another ring of the same entries, whose CQEs are in the initial state. A CQE in the old ring says so.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown or full queue, or a ring too short for its unread completions.
    pub fn resize(&mut self, cqn: u32, ring: Memory) -> Result<()> {
        let cq = self.slot(cqn).and_then(Option::as_mut);
        let cq = cq.ok_or_else(|| Error::invalid("CQN", cqn, "a completion queue of this HCA"))?;
        let log = (ring.len() / cq.entry).ilog2();
        cq.consumed = gdsync_shm::freed_slots(cq.record.atomic32(0)?, cq.consumed);
        let unread = cq.produced.saturating_sub(cq.consumed);
        let room = 1u64 << log.min(cq.log);
        if cq.overrun || unread >= room {
            return Err(Error::invalid("entries of a completion queue", room, "more than what is unread"));
        }
        self.complete(cqn, Cqe { opcode: mlx5::CqeOpcode::RESIZE, ..Cqe::default() }).expect("it has room");
        let cq = self.slot(cqn).and_then(Option::as_mut).expect("it was there");
        (cq.ring, cq.log) = (ring, log);
        Ok(())
    }

    /// Gives a queue a completion channel: `notifier` is called once each time that the program arms the queue, when a
    /// completion that it asks for has arrived.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] if the doorbell record has no arm word.
    pub fn set_channel(&mut self, cqn: u32, notifier: Arc<dyn GpuNudge>) -> Result<()> {
        let Some(Some(cq)) = slot(&mut self.slots, cqn) else { return Ok(()) };
        cq.record.atomic32(mlx5::CQ_DBREC_ARM)?.store(mlx5::NEVER_ARMED, Ordering::Release);
        cq.channel = Some(Channel { notifier, answered: None, solicited: 0 });
        self.channels.push(cqn);
        Ok(())
    }

    /// Notifies the armed queues whose condition holds.
    pub fn check_channels(&mut self) {
        for &cqn in &self.channels {
            let Some(Some(cq)) = slot(&mut self.slots, cqn) else { continue };
            let (Some(channel), Ok(word)) = (&mut cq.channel, cq.record.atomic32(mlx5::CQ_DBREC_ARM)) else {
                continue;
            };
            let Some(arm) = mlx5::CqArm::decode(word.load(Ordering::Acquire)) else { continue };
            // One that is long ago is as none, and 24 bits do not tell it from one to come. A ring has at most 2^22 entries.
            let solicited = channel.solicited.max(cq.produced.saturating_sub(1 << 22));
            let end = if arm.solicited { solicited } else { cq.produced };
            if channel.answered != Some(arm.sequence) && arm.is_due(end) {
                channel.answered = Some(arm.sequence);
                self.nudges.push(channel.notifier.clone());
            }
        }
    }

    /// Sets whether readers may check only the owner bit (the default).
    pub fn read_by_owner(&mut self, cqn: u32, by_owner: bool) {
        if let Some(Some(cq)) = self.slot(cqn) {
            cq.by_owner = by_owner;
        }
    }

    /// Checks the initial state of a new queue, if its readers check only the owner bit.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a CQE that looks written: a wait for it would pass at once.
    pub fn check_initial(&mut self, cqn: u32) -> Result<()> {
        let Some(Some(cq)) = self.slot(cqn) else { return Ok(()) };
        if cq.produced > 0 || !cq.by_owner {
            return Ok(());
        }
        for n in 0..1 << cq.log {
            let word = cq.ring.atomic32(cq.offset(n) + CQE_OP_OWN_OFFSET)?.load(Ordering::Acquire);
            let [.., op_own] = word.to_ne_bytes();
            if op_own & 1 == 0 || op_own >> 4 != 15 {
                let value = format!("{op_own:#04x} in slot {n} of CQ {cqn:#x}");
                return Err(Error::invalid("op_own of a fresh CQE", value, "opcode 15 and owner 1 (0xff)"));
            }
        }
        Ok(())
    }
}

fn slot(slots: &mut [Option<SoftCq>], cqn: u32) -> Option<&mut Option<SoftCq>> {
    slots.get_mut(cqn.checked_sub(BASE)? as usize)
}

impl SoftCq {
    /// Offset of the CQE of completion `n` in the ring.
    fn offset(&self, n: u64) -> usize {
        let slot = usize::try_from(n & ((1 << self.log) - 1)).expect("a ring index fits");
        (slot + 1) * self.entry - CQE_SIZE
    }

    fn has_room(&mut self) -> bool {
        // The consumer index may be ahead, if the consumer gave up before these completions.
        let is_room = |cq: &Self| cq.produced.saturating_sub(cq.consumed) < 1 << cq.log;
        if self.ignore_overrun || is_room(self) {
            return true;
        }
        let record = self.record.atomic32(0).expect("doorbell records are aligned");
        self.consumed = gdsync_shm::freed_slots(record, self.consumed);
        is_room(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlx5_ring::{CqeOpcode, owned_by_software};

    fn queue(ignore_overrun: bool) -> (Cqs, u32, Memory, Memory) {
        let CqParts { ring, record, event, .. } = parts(1, OnGpu::empty(), &Places::default()).unwrap();
        let mut cqs = Cqs::default();
        let cqn = cqs.create(ring.clone(), record.clone(), event, 1, ignore_overrun);
        (cqs, cqn, ring, record)
    }

    fn word(ring: &Memory, n: u64) -> u32 {
        ring.atomic32(usize::from(n % 2 == 1) * CQE_SIZE + CQE_OP_OWN_OFFSET).unwrap().load(Ordering::Acquire)
    }

    #[test]
    fn two_slots_alternate_their_owner_for_many_laps() {
        let (mut cqs, cqn, ring, record) = queue(false);
        for n in 0..200_000 {
            assert!(!owned_by_software(word(&ring, n), n, 1), "completion {n} is not there yet");
            cqs.complete(cqn, Cqe { opcode: CqeOpcode::REQ, ..Cqe::default() }).unwrap();
            assert!(owned_by_software(word(&ring, n), n, 1), "completion {n} is there");
            record.atomic32(0).unwrap().store(mlx5::cq_ci_record(n + 1), Ordering::Release);
        }
    }

    #[test]
    fn a_cqe_is_the_end_of_its_entry() {
        let CqParts { record, event, .. } = parts(1, OnGpu::empty(), &Places::default()).unwrap();
        let ring = Memory::alloc(4 * CQE_SIZE).unwrap();
        ring.fill(0, 4 * CQE_SIZE, 0xf0).unwrap();
        let mut cqs = Cqs::default();
        let cqn = cqs.create(ring.clone(), record, event, 1, true);
        for n in 0..3 {
            cqs.complete(cqn, Cqe { opcode: CqeOpcode::RESP_SEND, byte_cnt: n, ..Cqe::default() }).unwrap();
        }
        let entry = |n: usize| *ring.to_vec()[n * CQE_SIZE..].first_chunk::<CQE_SIZE>().unwrap();
        assert_eq!([0, 2].map(entry), [[0xf0; CQE_SIZE]; 2], "the first half is not written");
        assert_eq!([1, 3].map(|n| Cqe::decode(&entry(n)).byte_cnt), [2, 1]);
    }

    #[test]
    fn a_full_queue_is_dead_for_ever() {
        let (mut cqs, cqn, ring, record) = queue(false);
        for _ in 0..2 {
            cqs.complete(cqn, Cqe::default()).unwrap();
        }
        assert_eq!(cqs.complete(cqn, Cqe::default()), Err(Overrun));
        record.atomic32(0).unwrap().store(mlx5::cq_ci_record(2), Ordering::Release);
        assert_eq!(cqs.complete(cqn, Cqe::default()), Err(Overrun), "room comes too late");
        assert_eq!(word(&ring, 0).to_ne_bytes()[3] & 1, 0, "nothing was overwritten");
    }

    #[derive(Debug, Default)]
    struct Count(std::sync::atomic::AtomicUsize);

    impl GpuNudge for Count {
        fn nudge(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn an_armed_queue_is_answered_once_by_what_it_was_armed_for() {
        let (mut cqs, cqn, _ring, record) = queue(true);
        let count = Arc::<Count>::default();
        cqs.set_channel(cqn, count.clone()).unwrap();
        let arm = |cqs: &mut Cqs, word: Option<[u8; 4]>, cqe: Option<(CqeOpcode, bool)>| {
            let place = record.atomic32(mlx5::CQ_DBREC_ARM).unwrap();
            word.inspect(|word| place.store(u32::from_ne_bytes(*word), Ordering::Release));
            cqe.inspect(|&(opcode, solicited)| {
                cqs.complete(cqn, Cqe { opcode, solicited, ..Cqe::default() }).unwrap()
            });
            cqs.check_channels();
            cqs.take_nudges().iter().for_each(|nudge| nudge.nudge());
            count.0.swap(0, Ordering::Relaxed)
        };
        let plain = Some((CqeOpcode::RESP_SEND, false));
        assert_eq!(arm(&mut cqs, None, plain), 0, "it was not armed");
        assert_eq!(arm(&mut cqs, Some([0; 4]), None), 1, "completion 0 is there");
        assert_eq!(arm(&mut cqs, None, plain), 0, "once");
        assert_eq!(arm(&mut cqs, Some([0x10, 0, 0, 2]), None), 0, "completion 2 is not there");
        assert_eq!(arm(&mut cqs, None, plain), 1);
        assert_eq!(arm(&mut cqs, Some([0x21, 0, 0, 3]), plain), 0, "not solicited");
        assert_eq!(arm(&mut cqs, None, Some((CqeOpcode::RESP_SEND, true))), 1);
        assert_eq!(
            arm(&mut cqs, Some([0x31, 0, 0, 5]), Some((CqeOpcode::REQ_ERR, false))),
            1,
            "an error counts"
        );
        // Armed for solicited ones, then for any, before there was an event.
        assert_eq!(arm(&mut cqs, Some([0x01, 0, 0, 6]), plain), 0);
        assert_eq!(arm(&mut cqs, Some([0x00, 0, 0, 6]), None), 1);
    }

    #[test]
    fn a_solicited_completion_of_long_ago_is_none() {
        let (mut cqs, cqn, _ring, record) = queue(true);
        let count = Arc::<Count>::default();
        cqs.set_channel(cqn, count.clone()).unwrap();
        for produced in [1 << 22, (1 << 23) + 1, 1 << 24, (1 << 24) + 7] {
            slot(&mut cqs.slots, cqn).unwrap().as_mut().unwrap().produced = produced;
            let arm = mlx5::cq_ci_record(produced) | u32::from_ne_bytes([1, 0, 0, 0]);
            record.atomic32(mlx5::CQ_DBREC_ARM).unwrap().store(arm, Ordering::Release);
            cqs.check_channels();
            assert!(cqs.take_nudges().is_empty(), "nothing solicited since {produced}");
        }
    }

    #[test]
    fn numbers_rest_before_they_are_used_again() {
        let mut cqs = Cqs::default();
        let create = |cqs: &mut Cqs| {
            let CqParts { ring, record, event, .. } = parts(1, OnGpu::empty(), &Places::default()).unwrap();
            cqs.create(ring, record, event, 1, true)
        };
        let mut last = VecDeque::new();
        for _ in 0..1000 {
            let cqn = create(&mut cqs);
            assert!(!last.contains(&cqn), "{cqn:#x}");
            cqs.destroy(cqn);
            cqs.destroy(cqn);
            last.push_front(cqn);
            last.truncate(60);
        }
        assert!(cqs.slots.len() < 100, "numbers are used again");
    }

    #[test]
    fn a_resized_queue_goes_on_in_its_new_ring() {
        let (mut cqs, cqn, old, record) = queue(false);
        let new = parts(2, OnGpu::empty(), &Places::default()).unwrap().ring;
        let complete = |cqs: &mut Cqs| cqs.complete(cqn, Cqe { opcode: CqeOpcode::REQ, ..Cqe::default() });
        let cqe = |ring: &Memory, n: usize| Cqe::decode(ring.to_vec()[n * CQE_SIZE..].first_chunk().unwrap());
        for _ in 0..2 {
            complete(&mut cqs).unwrap();
        }
        assert!(cqs.resize(cqn, new.clone()).is_err(), "the old ring has no room to say so");
        record.atomic32(0).unwrap().store(mlx5::cq_ci_record(1), Ordering::Release);
        cqs.resize(cqn, new.clone()).unwrap();
        assert_eq!([0, 1].map(|n| cqe(&old, n).opcode), [CqeOpcode::RESIZE, CqeOpcode::REQ]);
        complete(&mut cqs).unwrap();
        assert_eq!([1, 2, 3].map(|n| cqe(&new, n).opcode.0), [15, 15, 0], "completion 3 is in slot 3 of 4");
        record.atomic32(0).unwrap().store(mlx5::cq_ci_record(3), Ordering::Release);
        complete(&mut cqs).unwrap();
        assert_eq!((cqe(&new, 0).opcode, cqe(&new, 0).owner), (CqeOpcode::REQ, 1), "the second lap of four");
    }

    #[test]
    fn overrun_can_be_ignored() {
        let (mut cqs, cqn, ring, _record) = queue(true);
        for _ in 0..3 {
            cqs.complete(cqn, Cqe::default()).unwrap();
        }
        assert_eq!(word(&ring, 0).to_ne_bytes()[3] & 1, 1, "the third overwrote the first");
    }

    #[test]
    fn a_ring_initialised_as_rdma_core_does_is_refused() {
        let (mut cqs, cqn, ring, _record) = queue(false);
        cqs.check_initial(cqn).unwrap();
        ring.write(CQE_SIZE + 63, &[0xf0]).unwrap();
        let error = cqs.check_initial(cqn).unwrap_err().to_string();
        assert!(error.contains("0xf0 in slot 1"), "{error}");
    }
}
