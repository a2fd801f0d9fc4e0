//! The state of a software HCA, and one step of its work.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::async_event::{AsyncEventQueue, AsyncEvents};
use super::cma::CmaPolicy;
use super::config::SoftHcaConfig;
use super::keys::Keys;
use super::links::{Body, Links};
use super::packet::Header;
use super::pending_flush::PendingFlush;
use super::qp::{Env, SoftQp};
use super::rx_hints::RxHints;
use super::wire::{LinkEnds, RxRing};
use gdsync_device::copy_engine::{CopyEngine, Ticket};
use gdsync_device::engine::{Cqs, Progress, WatchedDoorbells};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Memory, Word64};
use gdsync_device::{DoorbellSet, GpuNudge, MAX_QPS};
use gdsync_device::{FaultPlan, Faults, Gid, HcaStats, QpState, Shuffle, TransferPath};

/// Packets taken from one link before others get their turn.
const BURST: usize = 64;
/// Steps that the ringer of a doorbell runs at most.
const ROUNDS: usize = 8;
/// Steps between two looks at the clock.
const STEPS: u32 = 64;
/// Time between two looks at the timers.
const TICK: Duration = Duration::from_micros(20);
/// Queue pair numbers with a meaning of their own lie below, as do small ones, which would hide byte-order mistakes.
const FIRST_QPN: u32 = 0x100;
/// All queue pairs of a multicast group.
const MULTICAST: u32 = 0xff_ffff;

// On lines of its own: who runs it writes here all the time.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Core {
    /// The next step panics.
    #[cfg(test)]
    pub(crate) panics: bool,
    qpns: QpNumbers,
    pub(crate) keys: Keys,
    pub(crate) cqs: Cqs,
    pub(crate) faults: Faults,
    pub(crate) stats: HcaStats,
    async_events: AsyncEventQueue,
    pending_flush: PendingFlush,
    pub(crate) copy_engine: Arc<dyn CopyEngine>,
    /// Payload of so many bytes is left to copy engines.
    by_reference: usize,
    /// Which payload in host memory the peer reads.
    cma: CmaPolicy,
    /// When a long message, or a copy of one, last began that nobody was told of yet.
    copied: Option<Instant>,
    links: Links,
    /// The receiving ends of the links, by their numbers.
    rings: Vec<Option<RxRing>>,
    /// Boxed, so that one is cheaply taken out while it works with the rest.
    qps: Vec<Slot>,
    /// Queue pairs with work or timers.
    active: Vec<usize>,
    /// Queue pairs whose doorbell will be written by something that cannot tell us, and up to which block.
    watched: WatchedDoorbells,
    strict: bool,
    steps: u32,
    ticked: Instant,
    held_back: bool,
}

#[derive(Debug, Default)]
struct Slot {
    /// Changes with every queue pair in this slot, so that a stale packet does not meet its successor.
    generation: u32,
    qp: Option<Box<SoftQp>>,
}

/// How queue pairs are numbered: slot and generation, shuffled, so that who was not told a number cannot guess it.
#[derive(Clone, Copy, Debug)]
pub(super) struct QpNumbers(Shuffle<24>);

impl QpNumbers {
    pub(super) fn random() -> Result<Self> {
        Shuffle::random().map(Self)
    }

    pub(super) fn faults(self, plan: FaultPlan) -> Faults {
        Faults::new(plan, self.0)
    }

    /// The slot of a queue pair.
    #[inline]
    pub(super) fn index(self, qpn: u32) -> usize {
        self.0.find(qpn) as usize % MAX_QPS
    }

    /// The number of the next queue pair in a slot.
    fn next(self, index: usize, generation: &mut u32) -> u32 {
        let [index, slots] = [index, MAX_QPS].map(|n| u32::try_from(n).expect("at most MAX_QPS"));
        loop {
            *generation = (*generation + 1) % ((1 << 24) / slots);
            let qpn = self.0.hide(*generation * slots + index);
            if (FIRST_QPN..MULTICAST).contains(&qpn) {
                return qpn;
            }
        }
    }
}

impl Core {
    pub(crate) fn new(
        loopback: LinkEnds,
        config: &SoftHcaConfig,
        copy_engine: Arc<dyn CopyEngine>,
        async_events: Option<Arc<dyn AsyncEvents>>,
        qpns: QpNumbers,
    ) -> Result<Self> {
        let mut links = Links::default();
        let rings = vec![Some(links.add(loopback).1)];
        Ok(Self {
            #[cfg(test)]
            panics: false,
            qpns,
            keys: Keys::new()?,
            cqs: Cqs::default(),
            faults: qpns.faults(config.faults.clone()),
            stats: HcaStats::default(),
            async_events: AsyncEventQueue::new(async_events),
            pending_flush: PendingFlush::default(),
            copy_engine,
            by_reference: config.by_reference,
            cma: config.cma,
            copied: None,
            links,
            rings,
            qps: Vec::new(),
            active: Vec::new(),
            watched: WatchedDoorbells::default(),
            strict: config.strict,
            steps: 0,
            ticked: Instant::now(),
            held_back: false,
        })
    }

    /// How a message of `len` bytes of this memory, in the region of this key, would leave by a queue pair.
    pub(super) fn transfer_path(
        &mut self,
        index: usize,
        key: u32,
        memory: &Memory,
        len: usize,
    ) -> TransferPath {
        let known = self.with(index, |qp, env| qp.transfer_path(key, memory, len, env));
        known.expect("the caller has the queue pair")
    }

    /// Returns from how many bytes on it was.
    pub(super) fn leave_by_reference(&mut self, bytes: usize) -> usize {
        std::mem::replace(&mut self.by_reference, bytes)
    }

    /// Runs `work` on a queue pair together with everything it needs.
    fn with<T>(&mut self, index: usize, work: impl FnOnce(&mut SoftQp, &mut Env<'_>) -> T) -> Option<T> {
        let mut qp = self.qps.get_mut(index)?.qp.take()?;
        let mut env = Env {
            keys: &self.keys,
            cqs: &mut self.cqs,
            links: &mut self.links,
            faults: &mut self.faults,
            stats: &mut self.stats,
            async_events: &mut self.async_events,
            pending_flush: &mut self.pending_flush,
            copy_engine: &*self.copy_engine,
            by_reference: self.by_reference,
            cma: self.cma,
            copied: &mut self.copied,
            strict: self.strict,
        };
        let result = work(&mut qp, &mut env);
        if !qp.active && qp.is_active() {
            qp.active = true;
            self.active.push(index);
        }
        self.qps[index].qp = Some(qp);
        Some(result)
    }

    /// The index of a queue pair that exists.
    fn find(&self, qpn: u32) -> Option<usize> {
        let i = self.qpns.index(qpn);
        self.qps.get(i).and_then(|slot| slot.qp.as_ref()).is_some_and(|qp| qp.rings.qpn == qpn).then_some(i)
    }

    /// Adds a queue pair that `make` builds for a QPN.
    pub(crate) fn add_qp(&mut self, make: impl FnOnce(u32) -> Box<SoftQp>) -> Result<()> {
        let i = self.qps.iter().position(|slot| slot.qp.is_none()).unwrap_or(self.qps.len());
        if i == MAX_QPS {
            return Err(Error::invalid("queue pairs", MAX_QPS + 1, "at most 16384 on one software HCA"));
        }
        if i == self.qps.len() {
            self.qps.push(Slot::default());
        }
        let slot = &mut self.qps[i];
        slot.qp = Some(make(self.qpns.next(i, &mut slot.generation)));
        Ok(())
    }

    /// Removes a queue pair; what it held is returned, to be let go outside of locks.
    pub(crate) fn remove_qp(&mut self, qpn: u32, rung: &DoorbellSet) -> Option<Box<SoftQp>> {
        let i = self.find(qpn)?;
        self.watched.forget(i, rung);
        self.active.retain(|&a| a != i);
        let qp = self.qps[i].qp.take();
        self.drop_dead_links();
        qp
    }

    /// Runs `work` on the queue pair `qpn`.
    pub(crate) fn with_qp<T>(
        &mut self,
        qpn: u32,
        work: impl FnOnce(&mut SoftQp, &mut Env<'_>) -> T,
    ) -> Option<T> {
        let i = self.find(qpn)?;
        self.with(i, work)
    }

    fn ring_index(&mut self, index: usize) {
        self.with(index, |qp, env| {
            qp.take_doorbell(env);
            qp.advance(env);
        });
    }

    /// Looks at this doorbell from now on, if it will be rung.
    fn watch(&mut self, i: usize, rung: &DoorbellSet) {
        if self.is_to_watch(i, rung) {
            self.watched.add(i);
        }
    }

    /// Whether more will be rung than was.
    fn is_to_watch(&self, i: usize, rung: &DoorbellSet) -> bool {
        let qp = self.qps.get(i).and_then(|slot| slot.qp.as_ref());
        qp.is_some_and(|qp| rung.is_to_watch(i, qp.req.head()))
    }

    /// Looks at this doorbell no more: the queue pair was reset, what was announced will not be rung.
    pub(crate) fn unwatch(&mut self, qpn: u32, rung: &DoorbellSet) {
        if let Some(i) = self.find(qpn) {
            self.watched.forget(i, rung);
        }
    }

    /// The links that there are, the one to itself among them, and the numbers that links ever had, for tests.
    #[cfg(test)]
    pub(super) fn count_links(&self) -> (usize, usize) {
        (self.rings.iter().flatten().count(), self.rings.len())
    }

    /// The link added last, for tests.
    #[cfg(test)]
    pub(super) fn newest_link(&self) -> usize {
        self.rings.len() - 1
    }

    /// Whether a link's peer is gone and nobody has acted on it, for tests.
    #[cfg(test)]
    pub(super) fn is_newly_dead(&self, link: usize) -> bool {
        self.links.is_newly_dead(link)
    }

    /// A living link to `peer`.
    pub(crate) fn link_to(&self, peer: Gid) -> Option<usize> {
        self.links.find(peer)
    }

    /// Adds a link; what lets other threads see its records goes to `peeks`.
    pub(crate) fn add_link(&mut self, ends: LinkEnds, rx_hints: &RxHints) -> usize {
        let (link, ring) = self.links.add(ends);
        if let Some((number, peek)) = ring.peeker() {
            rx_hints.add(number, peek);
        }
        self.rings.resize_with(self.rings.len().max(link + 1), || None);
        self.rings[link] = Some(ring);
        link
    }

    /// Lets go of the links that lead to nobody any more and that no queue pair is connected over.
    pub(crate) fn drop_dead_links(&mut self) {
        for link in 0..self.rings.len() {
            let is_used = || self.qps.iter().filter_map(|slot| slot.qp.as_ref()).any(|qp| qp.uses(link));
            if self.links.is_left_over(link) && !is_used() {
                self.links.remove(link);
                self.rings[link] = None;
            }
        }
    }

    /// The copies under way on a region.
    pub(crate) fn copies_on(&self, key: u32) -> Vec<Ticket> {
        self.active.iter().filter_map(|&i| self.qps[i].qp.as_ref()).flat_map(|qp| qp.copies_on(key)).collect()
    }

    /// Whether a packet of this peer waits: what it sent before it died still counts. Two links lead to a peer when both sides
    /// have made one at the same time.
    fn has_packet_of(&mut self, peer: Option<Gid>) -> bool {
        let links = &self.links;
        let mut rings = self.rings.iter_mut().enumerate().filter_map(|(l, ring)| Some((l, ring.as_mut()?)));
        rings.any(|(l, ring)| links.peer(l) == peer && !links.is_down(l) && ring.has_record())
    }

    fn look_at_watched(&mut self) -> bool {
        let mut worked = false;
        for at in 0..self.watched.len() {
            let before = self.stats.doorbells;
            self.ring_index(self.watched.get(at));
            worked |= self.stats.doorbells != before;
        }
        worked
    }

    fn receive(&mut self, link: usize) -> bool {
        if self.links.is_down(link) {
            return false;
        }
        let mut any = false;
        for _ in 0..BURST {
            let Some(ring) = self.rings[link].as_mut() else { break };
            let record = match ring.peek() {
                Ok(Some(record)) => record,
                Ok(None) => {
                    self.links.note_taken(link, false);
                    break;
                }
                Err(error) => {
                    tracing::error!(%error, "software HCA: link taken down");
                    self.bury(link);
                    break;
                }
            };
            any = true;
            self.links.note_taken(link, true);
            self.stats.packets_received += 1;
            let header = Header::from_bytes(&record.header);
            // The ring cannot be borrowed while the queue pair borrows the rest, so it steps aside.
            let Some(mut ring) = self.rings[link].take() else { break };
            if !self.faults.is_dead() {
                self.dispatch(link, &header, &Body { ring: &ring, record: &record, link });
            }
            if ring.pop(record) {
                self.links.ring_one(link);
            }
            self.rings[link] = Some(ring);
        }
        any
    }

    fn dispatch(&mut self, link: usize, header: &Header, body: &Body<'_>) {
        let peer = self.links.peer(link);
        let done = self.find(header.dst).and_then(|i| {
            self.with(i, |qp, env| {
                // Only the connected queue pair is heard.
                let from = qp.remote.is_some_and(|r| r.qpn == header.src && Some(r.gid) == peer);
                if from && header.is_response() {
                    qp.answered(header, body, env);
                    qp.advance(env);
                } else if from {
                    qp.requested(header, body, env);
                }
                from
            })
        });
        if done != Some(true) {
            self.stats.packets_discarded += 1;
        }
    }

    /// The process at the other end of a link is gone: fails what is connected to it.
    fn bury(&mut self, link: usize) {
        let peer = self.links.peer(link);
        self.links.take_down(link);
        if let Some(process) = self.links.process(link) {
            self.copy_engine.forget(process);
        }
        tracing::warn!(?peer, "software HCA: peer is gone");
        // A card does not notice: its timeouts run out.
        let is_card = self.async_events.is_heard();
        for i in 0..self.qps.len() {
            self.with(i, |qp, env| {
                let lost = qp.link == link || qp.remote.map(|r| r.gid) == peer;
                if lost && (!is_card || qp.is_copying()) && matches!(qp.state, QpState::RTR | QpState::RTS) {
                    qp.lose_peer(env);
                }
            });
        }
        self.drop_dead_links();
    }
}

impl Progress for Core {
    fn step(&mut self, rung: &DoorbellSet) -> bool {
        #[cfg(test)]
        assert!(!self.panics, "a test asked for it");
        let mut worked = false;
        let attended = rung.drain(|i| {
            self.ring_index(i);
            self.watch(i, rung);
            worked = true;
        });
        attended.into_iter().for_each(|cqn| self.cqs.attend(cqn));
        if !self.watched.is_empty() {
            worked |= self.look_at_watched();
        }
        // Backwards, because finished ones are swapped out.
        for at in (0..self.active.len()).rev() {
            let i = self.active[at];
            let state = self.with(i, |qp, env| {
                let any = qp.look_at_copies(env) | qp.advance(env) | qp.answer(env) | qp.leave(env);
                qp.active = qp.is_active();
                (any, qp.active)
            });
            let (any, active) = state.unwrap_or((false, false));
            worked |= any;
            if !active {
                self.active.swap_remove(at);
            }
        }
        for link in 0..self.rings.len() {
            worked |= self.receive(link);
        }
        for at in 0..self.active.len() {
            let i = self.active[at];
            if self.qps[i].qp.as_ref().is_some_and(|qp| qp.resp.is_copying()) {
                worked |= self.with(i, |qp, env| qp.conclude(env)).unwrap_or(false);
            }
        }
        self.steps = self.steps.wrapping_add(1);
        if self.steps.is_multiple_of(STEPS) && self.is_active() {
            let now = Instant::now();
            if now - self.ticked >= TICK {
                self.tick(now);
            }
        }
        self.links.ring();
        worked
    }

    // To the end if the peer is on this HCA: its state would have to move to another core's cache otherwise.
    fn ring(&mut self, index: usize, rung: &DoorbellSet) {
        self.ring_index(index);
        self.links.ring();
        for _ in 0..ROUNDS {
            if !self.step(rung) {
                break;
            }
        }
    }

    fn look_at_all(&mut self) {
        for i in 0..self.qps.len() {
            self.ring_index(i);
        }
    }

    fn tick(&mut self, now: Instant) {
        self.ticked = now;
        self.held_back = self.links.tick(now);
        for at in 0..self.active.len() {
            let i = self.active[at];
            self.with(i, |qp, env| qp.tick(now, env));
        }
        for link in 0..self.rings.len() {
            if self.links.is_newly_dead(link) && !self.has_packet_of(self.links.peer(link)) {
                self.bury(link);
            }
        }
        self.links.ring();
    }

    fn rest(&mut self, rung: &DoorbellSet) {
        let mut watched = std::mem::take(&mut self.watched);
        watched.retain(|i| self.is_to_watch(i, rung));
        self.watched = watched;
        self.cqs.rest();
    }

    fn doze(&self, rung: &DoorbellSet) {
        self.watched.doze(rung);
    }

    fn is_active(&self) -> bool {
        !self.active.is_empty() || self.held_back
    }

    fn has_arrivals(&mut self) -> bool {
        let links = &self.links;
        let mut rings = self.rings.iter_mut().enumerate().filter_map(|(l, ring)| Some((l, ring.as_mut()?)));
        rings.any(|(l, ring)| links.is_newly_dead(l) || !links.is_down(l) && ring.has_record())
    }

    fn is_watching(&self) -> bool {
        !self.watched.is_empty()
    }

    fn is_copying(&self) -> bool {
        self.active.iter().filter_map(|&i| self.qps[i].qp.as_ref()).any(|qp| qp.awaits_engines())
    }

    fn next_timer(&self) -> Option<Instant> {
        let qps = self.active.iter().filter_map(|&i| self.qps[i].qp.as_ref());
        qps.filter_map(|qp| qp.req.next_timer()).min()
    }

    fn newly_watched(&mut self) -> Option<Vec<Word64>> {
        let qps = &self.qps;
        self.watched.news(|i| qps[i].qp.as_ref().map(|qp| qp.rings.doorbell.clone()))
    }

    fn is_attended(&self) -> bool {
        self.cqs.is_attended()
    }

    fn take_copied(&mut self) -> Option<Instant> {
        self.copied.take()
    }

    fn take_nudges(&mut self) -> Vec<Arc<dyn GpuNudge>> {
        let mut nudges = self.cqs.take_nudges();
        nudges.extend(self.async_events.take());
        nudges
    }
}

impl SoftQp {
    /// Whether the step has to come back to it.
    fn is_active(&self) -> bool {
        (self.state == QpState::RTS && self.req.is_active())
            || (self.state == QpState::ERR && self.req.has_pending())
            || self.resp.is_active()
    }
}
