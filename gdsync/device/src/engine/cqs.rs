//! The completion queues of the software HCA: writing CQEs.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::{CqEvent, GpuNudge};
use crate::{CqParts, OnGpu, Places};
use gdsync_shm::completion;
use mlx5_ring::{self as mlx5, CQE_OP_OWN_OFFSET, CQE_SIZE, Cqe, INITIAL_CQE};

/// First CQN: small numbers would hide byte-order mistakes.
const BASE: u32 = 0x8a1;

/// The completion queues of a device that runs on a CPU.
#[derive(Debug, Default)]
pub struct Cqs {
    slots: Vec<Option<SoftCq>>,
    /// CQEs written, also the clock of their timestamps.
    written: u64,
    /// GPUs to be nudged for what was written.
    nudges: Vec<Arc<dyn GpuNudge>>,
    /// Queues that streams of GPUs wait on: they see what is written, but cannot help.
    attended: Vec<u32>,
    /// Completions of flushed requests have counter 0.
    pub hide_flush_counters: bool,
}

#[derive(Debug)]
struct SoftCq {
    ring: Memory,
    record: Memory,
    event: Arc<CqEvent>,
    log: u32,
    /// Completions written.
    produced: u64,
    /// Streams of GPUs wait for completions before this one, as far as is known.
    until: u64,
    /// The consumer index last read from the doorbell record.
    consumed: u64,
    ignore_overrun: bool,
    overrun: bool,
    /// Listed as attended.
    attended: bool,
    /// Its readers may look at the owner bit alone.
    by_owner: bool,
}

/// The queue is full: a card raises a CQ error event, and no completion is ever written again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overrun;

/// The memory of a queue of `1 << log` entries, in the initial state, without a number yet.
pub fn parts(log: u32, ring: OnGpu, places: &Places) -> Result<CqParts> {
    let ring = places.alloc(ring, CQE_SIZE << log)?;
    for slot in 0..1usize << log {
        ring.write(slot * CQE_SIZE, &INITIAL_CQE)?;
    }
    let record = places.alloc(OnGpu::RECORDS, mlx5::CQ_DBREC_SIZE)?;
    Ok(CqParts { cqn: 0, ring, record, event: Arc::default() })
}

impl Cqs {
    /// Takes the memory of a queue into service. A full one is written over: work is only posted with a slot set aside for its
    /// completion, and gdsync asks the same of a card.
    pub fn adopt(&mut self, parts: CqParts, log: u32) -> CqParts {
        let CqParts { ring, record, event, .. } = &parts;
        let cqn = self.create(ring.clone(), record.clone(), event.clone(), log, true);
        CqParts { cqn, ..parts }
    }

    /// Takes `ring` and `record` into service; the CQEs must be in the initial state.
    pub fn create(
        &mut self,
        ring: Memory,
        record: Memory,
        event: Arc<CqEvent>,
        log: u32,
        ignore_overrun: bool,
    ) -> u32 {
        let cq = SoftCq {
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
        };
        let index = self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len());
        if index == self.slots.len() {
            self.slots.push(None);
        }
        self.slots[index] = Some(cq);
        BASE + u32::try_from(index).expect("CQNs have 24 bits and memory ends before")
    }

    /// The GPUs to be nudged, once the core is let go.
    pub fn take_nudges(&mut self) -> Vec<Arc<dyn GpuNudge>> {
        std::mem::take(&mut self.nudges)
    }

    /// A stream of a GPU waits on this queue.
    pub fn attend(&mut self, cqn: u32) {
        let Some(Some(cq)) = slot(&mut self.slots, cqn) else { return };
        if !cq.attended {
            cq.attended = true;
            self.attended.push(cqn);
        }
    }

    /// Nothing has happened for a while: attends no more to queues that no stream of a GPU waits on. Before that the next wait
    /// may come any moment, and need not tell.
    pub fn drop_idle_watches(&mut self) {
        let slots = &mut self.slots;
        self.attended.retain(|&cqn| {
            let Some(Some(cq)) = slot(slots, cqn) else { return false };
            cq.attended = !cq.event.may_unwatch(cq.produced);
            cq.attended
        });
    }

    /// Whether streams of GPUs wait on any queue, or did a moment ago.
    pub fn is_attended(&self) -> bool {
        !self.attended.is_empty()
    }

    /// Takes a completion queue out of service.
    pub fn destroy(&mut self, cqn: u32) {
        self.attended.retain(|&other| other != cqn);
        if let Some(slot) = self.slot(cqn) {
            *slot = None;
        }
    }

    fn slot(&mut self, cqn: u32) -> Option<&mut Option<SoftCq>> {
        slot(&mut self.slots, cqn)
    }

    /// Writes the next CQE of a queue: the bytes first, then the word with the owner bit.
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
        let slot = usize::try_from(cq.produced & ((1 << cq.log) - 1)).expect("a ring index fits") * CQE_SIZE;
        if cfg!(target_arch = "x86_64") && cq.ring.gpu().is_some() {
            // One burst: the copy stores upwards, so the owner bit goes last or with all the rest. A buffer that is evicted before it is
            // full may leave in any order by Intel's manual, hence a GPU may only look at the owner bit, as streams do: the CPU,
            // which reads the rest, is ordered behind by its own load. The word a second time would cost 0.2 us.
            cq.ring.write(slot, &bytes).expect("CQEs lie in the ring");
        } else {
            cq.ring.write(slot, &bytes[..CQE_OP_OWN_OFFSET]).expect("CQEs lie in the ring");
            let word = cq.ring.atomic32(slot + CQE_OP_OWN_OFFSET).expect("CQE words are aligned");
            completion::publish(word, mlx5::op_own_word(&bytes));
            cq.ring.fence();
        }
        cq.event.raise();
        if let Some(nudger) = cq.event.nudger(cq.produced, &mut cq.until)
            && !self.nudges.iter().any(|known| Arc::ptr_eq(known, nudger))
        {
            self.nudges.push(nudger.clone());
        }
        cq.produced += 1;
        Ok(())
    }

    /// Whether readers of a queue may look at the owner bit alone, as they may unless this is called.
    pub fn read_by_owner(&mut self, cqn: u32, by_owner: bool) {
        if let Some(Some(cq)) = self.slot(cqn) {
            cq.by_owner = by_owner;
        }
    }

    /// What a card would punish: a CQE that looks written before it was.
    pub fn check_initial(&mut self, cqn: u32) -> Result<()> {
        let Some(Some(cq)) = self.slot(cqn) else { return Ok(()) };
        if cq.produced > 0 || !cq.by_owner {
            return Ok(());
        }
        for n in 0..1usize << cq.log {
            let word = cq.ring.atomic32(n * CQE_SIZE + CQE_OP_OWN_OFFSET)?.load(Ordering::Acquire);
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
    fn has_room(&mut self) -> bool {
        // A consumer that gave up may be ahead, past completions that are only written now.
        let is_room = |cq: &Self| cq.produced.saturating_sub(cq.consumed) < 1 << cq.log;
        if self.ignore_overrun || is_room(self) {
            return true;
        }
        let record = self.record.atomic32(0).expect("doorbell records are aligned");
        self.consumed = completion::freed(record, self.consumed);
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
