//! State of a proxy and one step of its work.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use rdma_core_sys::verbs::ibv_wc;

use super::device::{Channel, DeviceCq, limit};
use super::qp::{Env, ProxyQp};
use super::staging::Shadows;
use super::translate::Tag;
use crate::Open;
use gdsync_device::engine::{Cqs, Progress, WatchedDoorbells};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Memory, Word64};
use gdsync_device::{DoorbellSet, GpuNudge, MAX_QPS};
use gdsync_device::{HcaStats, QpState};

/// Completions per poll call.
const BURST: usize = 32;
/// Maximum polls per queue and step.
const ROUNDS: usize = 4;
/// Preferred size of the device's completion queues.
const CQ_ENTRIES: u32 = 8192;

#[derive(Debug)]
pub(super) struct Core {
    slots: Vec<Slot>,
    /// After the queue pairs, which use them.
    queues: Vec<DeviceCq>,
    channel: Arc<Channel>,
    open: Arc<Open>,
    pub(super) cqs: Cqs,
    pub(super) stats: HcaStats,
    /// By key: GPU memory that the device writes and that needs a flush.
    pub(super) unseen: Vec<(u32, Memory)>,
    /// Staging of memory that the device cannot register.
    pub(super) shadows: Shadows,
    outstanding: Arc<AtomicUsize>,
    watched: WatchedDoorbells,
    /// Queue pairs that wait for copies.
    copying: Vec<usize>,
    /// Queue pairs in ERR whose requests the device has not returned.
    draining: Vec<usize>,
    /// Buffer for completions.
    taken: Box<[ibv_wc]>,
    strict: bool,
}

#[derive(Debug, Default)]
struct Slot {
    /// First generation of the slot's next queue pair.
    generation: u16,
    qp: Option<Box<ProxyQp>>,
}

impl Core {
    pub(super) fn new(
        channel: Arc<Channel>,
        open: Arc<Open>,
        outstanding: Arc<AtomicUsize>,
        strict: bool,
    ) -> Self {
        Self {
            slots: Vec::new(),
            queues: Vec::new(),
            channel,
            open,
            cqs: Cqs::default(),
            stats: HcaStats::default(),
            unseen: Vec::new(),
            shadows: Shadows::default(),
            outstanding,
            watched: WatchedDoorbells::default(),
            copying: Vec::new(),
            draining: Vec::new(),
            taken: vec![ibv_wc::zeroed(); BURST].into(),
            strict,
        }
    }

    /// Runs `work` on a queue pair and the shared state.
    pub(super) fn with<T>(
        &mut self,
        index: usize,
        work: impl FnOnce(&mut ProxyQp, &mut Env<'_>) -> T,
    ) -> Option<T> {
        let qp = self.slots.get_mut(index)?.qp.as_mut()?;
        let mut env = Env {
            cqs: &mut self.cqs,
            stats: &mut self.stats,
            unseen: &self.unseen,
            shadows: &mut self.shadows,
            outstanding: &self.outstanding,
            strict: self.strict,
        };
        let result = work(qp, &mut env);
        if qp.deadline.is_some() && !qp.is_draining {
            qp.is_draining = true;
            self.draining.push(index);
        }
        let may_copy = !self.shadows.is_empty() || !qp.staged.is_in_place() || !qp.staged.has_left();
        if may_copy && qp.waits_for_copies() && !self.copying.contains(&index) {
            self.copying.push(index);
        }
        Some(result)
    }

    /// Index of a device completion queue in which room for `entries` more is reserved.
    pub(super) fn reserve(&mut self, entries: u32) -> Result<usize> {
        if let Some(at) = self.queues.iter_mut().position(|queue| queue.reserve(entries)) {
            return Ok(at);
        }
        let most = limit(self.open.attr().max_cqe);
        let mut queue = DeviceCq::create(&self.channel, entries.max(CQ_ENTRIES.min(most)))?;
        queue.reserve(entries);
        self.queues.push(queue);
        Ok(self.queues.len() - 1)
    }

    /// Returns reserved room, after the last completion of its queue pair.
    pub(super) fn release(&mut self, queue: usize, entries: u32) {
        // Unpolled completions still occupy room.
        self.poll();
        self.queues[queue].release(entries);
    }

    pub(super) fn queue(&self, at: usize) -> &DeviceCq {
        &self.queues[at]
    }

    /// Adds the queue pair that `make` builds for its slot and generation. Returns the slot.
    pub(super) fn add_qp(&mut self, make: impl FnOnce((usize, u16)) -> ProxyQp) -> Result<usize> {
        let index = self.slots.iter().position(|slot| slot.qp.is_none()).unwrap_or(self.slots.len());
        if index == MAX_QPS {
            return Err(Error::invalid("queue pairs", MAX_QPS + 1, "at most 16384 on one open device"));
        }
        if index == self.slots.len() {
            self.slots.push(Slot::default());
        }
        let slot = &mut self.slots[index];
        slot.qp = Some(Box::new(make((index, slot.generation))));
        Ok(index)
    }

    /// Removes a queue pair. The caller drops it outside of locks.
    pub(super) fn remove_qp(&mut self, index: usize, doorbells: &DoorbellSet) -> Option<Box<ProxyQp>> {
        self.with(index, |qp, env| qp.end(env))?;
        self.watched.forget(index, doorbells);
        self.draining.retain(|&other| other != index);
        self.copying.retain(|&other| other != index);
        let slot = &mut self.slots[index];
        let qp = slot.qp.take()?;
        slot.generation = qp.generation;
        Some(qp)
    }

    /// Stops polling a doorbell: announced doorbells will not be written.
    pub(super) fn unwatch(&mut self, index: usize, doorbells: &DoorbellSet) {
        self.watched.forget(index, doorbells);
    }

    fn read_doorbell(&mut self, index: usize) {
        self.with(index, |qp, env| qp.take_doorbell(env));
    }

    /// Whether an announced doorbell has not been written yet.
    fn must_poll(&self, index: usize, doorbells: &DoorbellSet) -> bool {
        let qp = self.slots.get(index).and_then(|slot| slot.qp.as_ref());
        qp.is_some_and(|qp| doorbells.must_poll(index, qp.head))
    }

    fn poll_watched(&mut self) -> bool {
        let mut worked = false;
        for at in 0..self.watched.len() {
            let index = self.watched.get(at);
            let qp = self.slots.get(index).and_then(|slot| slot.qp.as_ref());
            if qp.is_some_and(|qp| qp.rings.is_rung()) {
                self.read_doorbell(index);
                worked = true;
            }
        }
        worked
    }

    /// Takes receives that GPU streams have posted, which ring no doorbell. Returns whether there were any.
    fn poll_receives(&mut self) -> bool {
        let mut worked = false;
        for index in 0..self.slots.len() {
            if self.slots[index].qp.as_ref().is_some_and(|qp| qp.has_new_receives()) {
                self.read_doorbell(index);
                worked = true;
            }
        }
        worked
    }

    /// Continues after finished copies. Returns whether there were any.
    fn poll_copies(&mut self) -> bool {
        let before = self.copying.len();
        for at in (0..before).rev() {
            let waits = self.with(self.copying[at], |qp, env| {
                qp.copied(env);
                qp.waits_for_copies()
            });
            if waits != Some(true) {
                self.copying.swap_remove(at);
            }
        }
        self.copying.len() < before
    }

    /// Polls the device's completions. Returns whether there were any.
    pub(super) fn poll(&mut self) -> bool {
        let mut taken = std::mem::take(&mut self.taken);
        let mut worked = false;
        for at in 0..self.queues.len() {
            for _ in 0..ROUNDS {
                let count = self.queues[at].poll(&mut taken);
                worked |= count > 0;
                taken[..count].iter().for_each(|wc| self.completed(wc));
                if count < taken.len() {
                    break;
                }
            }
        }
        self.taken = taken;
        worked
    }

    fn completed(&mut self, wc: &ibv_wc) {
        let tag = Tag::from_wr_id(wc.wr_id);
        self.with(tag.index, |qp, env| {
            if qp.generation == tag.generation {
                qp.completed(tag, wc, env);
            }
        });
    }

    /// Arms the completion channel. The caller must poll once more after this.
    pub(super) fn arm(&self) {
        self.queues.iter().for_each(DeviceCq::arm);
    }

    /// Takes completion channel events.
    pub(super) fn take_events(&mut self) {
        while let Some(cq) = self.channel.take() {
            self.queues.iter().filter(|queue| queue.is(cq)).for_each(DeviceCq::disarm);
        }
    }

    /// Breaks queue pair `only`, if it failed and was not reset since, or all connected ones.
    pub(super) fn break_qps(&mut self, only: Option<usize>, cause: &Error) {
        let all = 0..self.slots.len();
        for index in all.filter(|&other| only.is_none_or(|only| only == other)) {
            self.with(index, |qp, env| {
                let is_now = only.is_none() || qp.device.has_failed();
                if qp.state != QpState::RESET && is_now {
                    qp.fail(Some(cause.clone()), env);
                }
            });
        }
    }

    /// Reclaims all requests from a lost device.
    pub(super) fn force(&mut self) {
        for index in 0..self.slots.len() {
            self.with(index, |qp, env| {
                if qp.state == QpState::ERR {
                    qp.force(env);
                }
            });
        }
    }
}

impl Progress for Core {
    fn step(&mut self, doorbells: &DoorbellSet) -> bool {
        let mut worked = false;
        let attended = doorbells.drain(|index| {
            self.read_doorbell(index);
            if self.must_poll(index, doorbells) {
                self.watched.add(index);
            }
            worked = true;
        });
        attended.into_iter().for_each(|cqn| self.cqs.attend(cqn));
        if !self.watched.is_empty() {
            worked |= self.poll_watched();
        }
        if self.cqs.is_attended() {
            worked |= self.poll_receives();
        }
        if !self.copying.is_empty() {
            worked |= self.poll_copies();
        }
        self.poll() || worked
    }

    fn ring(&mut self, index: usize, _doorbells: &DoorbellSet) {
        self.read_doorbell(index);
    }

    fn look_at_all(&mut self) {
        (0..self.slots.len()).for_each(|index| self.read_doorbell(index));
    }

    fn tick(&mut self, now: Instant) {
        for at in (0..self.draining.len()).rev() {
            let index = self.draining[at];
            let draining = self.with(index, |qp, env| {
                qp.tick(now, env);
                qp.is_draining = qp.deadline.is_some();
                qp.is_draining
            });
            if draining != Some(true) {
                self.draining.swap_remove(at);
            }
        }
    }

    fn drop_idle_watches(&mut self, doorbells: &DoorbellSet) {
        let mut watched = std::mem::take(&mut self.watched);
        watched.retain(|index| self.must_poll(index, doorbells));
        self.watched = watched;
        self.cqs.drop_idle_watches();
    }

    fn unwatch_all(&self, doorbells: &DoorbellSet) {
        self.watched.unwatch_all(doorbells);
    }

    /// Requests at the device need no steps: the completion channel reports them.
    fn is_active(&self) -> bool {
        !self.draining.is_empty() || !self.copying.is_empty()
    }

    fn has_arrivals(&mut self) -> bool {
        false
    }

    fn is_watching(&self) -> bool {
        !self.watched.is_empty()
    }

    fn is_copying(&self) -> bool {
        !self.copying.is_empty()
    }

    fn is_attended(&self) -> bool {
        self.cqs.is_attended()
    }

    fn next_timer(&self) -> Option<Instant> {
        let qps = self.draining.iter().filter_map(|&index| self.slots[index].qp.as_ref());
        qps.filter_map(|qp| qp.deadline).min()
    }

    fn take_copied(&mut self) -> Option<Instant> {
        self.shadows.take_begun()
    }

    fn newly_watched(&mut self) -> Option<Vec<Word64>> {
        let slots = &self.slots;
        self.watched.changed(|index| slots[index].qp.as_ref()?.rings.register().cloned())
    }

    fn take_nudges(&mut self) -> Vec<Arc<dyn GpuNudge>> {
        self.cqs.take_nudges()
    }
}
