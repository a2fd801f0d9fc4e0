//! State of a software HCA and one step of its work.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::config::SoftHcaConfig;
use super::keys::Keys;
use super::links::Links;
use super::packet::{Header, PacketOp};
use super::qp::{Env, SoftQp, UNLINKED};
use super::wire::{Body, Ends, Peer, Rx, Sockets};
use crate::async_event::{AsyncEventQueue, AsyncEvents};
use crate::config::CmaPolicy;
use crate::keys::PendingFlush;
use crate::peers::Peers;
use crate::srq::Srqs;
use gdsync_device::copy_engine::{CopyEngine, Ticket};
use gdsync_device::engine::{Cqs, Progress, WatchedDoorbells};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Memory, Word64};
use gdsync_device::{DoorbellSet, GpuNudge, MAX_QPS};
use gdsync_device::{FaultPlan, Faults, HcaStats, QpState, Shuffle, TransferPath};

/// Maximum packets per link and step.
const BURST: usize = 64;
/// Maximum steps run by the thread that rings a doorbell.
const ROUNDS: usize = 8;
/// Steps between clock reads.
const STEPS: u32 = 64;
/// Up to this many sockets are read without asking the kernel which are ready.
const FEW_SOCKETS: u32 = 2;
/// Steps between looks for ended links, where packets arrive beside the sockets.
const STEPS_TO_ENDS: u32 = 16;
/// Interval between timer checks.
const TICK: Duration = Duration::from_micros(20);
/// Smallest QPN. Lower ones are reserved, and small numbers would hide byte-order mistakes.
const FIRST_QPN: u32 = 0x100;
/// QPN of multicast.
const MULTICAST: u32 = 0xff_ffff;

// Aligned to avoid false sharing: the stepping thread writes it continuously.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Core {
    /// Makes the next step panic.
    #[cfg(test)]
    pub(crate) panics: bool,
    qpns: QpNumbers,
    pub(crate) keys: Keys,
    pub(crate) cqs: Cqs,
    pub(crate) srqs: Srqs,
    pub(crate) peers: Peers,
    pub(crate) faults: Faults,
    pub(crate) stats: HcaStats,
    pub(crate) async_events: AsyncEventQueue,
    pending_flush: PendingFlush,
    pub(crate) copy_engine: Arc<dyn CopyEngine>,
    /// Minimum payload for references to GPU memory.
    by_reference: usize,
    copy_limit: Duration,
    /// Which host payloads the peer reads.
    cma: CmaPolicy,
    /// Start of the newest long message or copy that has not been reported yet.
    copied: Option<Instant>,
    links: Links,
    /// Receiving ends of the links, by link index. Boxed, as queue pairs are.
    rx: Vec<Option<Box<Rx>>>,
    /// Sockets of links over TCP.
    sockets: Option<Arc<Sockets>>,
    /// Boxed, so that taking one out to work on it is cheap.
    qps: Vec<Slot>,
    /// Indices of queue pairs with work or timers.
    active: Vec<usize>,
    /// Doorbells written without a call to the HCA, by GPUs.
    watched: WatchedDoorbells,
    strict: bool,
    steps: u32,
    ticked: Instant,
    has_delayed: bool,
}

#[derive(Debug, Default)]
struct Slot {
    /// Changes with every queue pair in this slot, so that stale packets do not match its successor.
    generation: u32,
    qp: Option<Box<SoftQp>>,
}

/// Assigns QPNs: generation and slot, shuffled, so that they are hard to guess.
#[derive(Clone, Copy, Debug)]
pub(super) struct QpNumbers(Shuffle<24>);

impl QpNumbers {
    pub(super) fn random() -> Result<Self> {
        Shuffle::random().map(Self)
    }

    pub(super) fn faults(self, plan: FaultPlan) -> Faults {
        Faults::new(plan, self.0)
    }

    /// Slot of a queue pair.
    #[inline]
    pub(super) fn index(self, qpn: u32) -> usize {
        self.0.find(qpn) as usize % MAX_QPS
    }

    /// Next QPN of a slot.
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
        loopback: Ends,
        sockets: Option<Arc<Sockets>>,
        config: &SoftHcaConfig,
        copy_engine: Arc<dyn CopyEngine>,
        async_events: Option<Arc<dyn AsyncEvents>>,
        qpns: QpNumbers,
    ) -> Result<Self> {
        let mut links = Links::default();
        let rx = vec![Some(Box::new(links.add(loopback).1))];
        Ok(Self {
            #[cfg(test)]
            panics: false,
            qpns,
            keys: Keys::new()?,
            cqs: Cqs::default(),
            srqs: Srqs::default(),
            peers: Peers::default(),
            faults: qpns.faults(config.faults.clone()),
            stats: HcaStats::default(),
            async_events: AsyncEventQueue::new(async_events),
            pending_flush: PendingFlush::default(),
            copy_engine,
            by_reference: config.by_reference,
            copy_limit: config.copy_limit(),
            cma: config.cma,
            copied: None,
            links,
            rx,
            sockets,
            qps: Vec::new(),
            active: Vec::new(),
            watched: WatchedDoorbells::default(),
            strict: config.strict,
            steps: 0,
            ticked: Instant::now(),
            has_delayed: false,
        })
    }

    /// Transfer path of a message of `len` bytes of `memory`, whose key is `key`.
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

    /// Sets the minimum payload for references and returns the previous one.
    pub(super) fn set_by_reference(&mut self, bytes: usize) -> usize {
        std::mem::replace(&mut self.by_reference, bytes)
    }

    /// Runs `work` on a queue pair and the shared state.
    fn with<T>(&mut self, index: usize, work: impl FnOnce(&mut SoftQp, &mut Env<'_>) -> T) -> Option<T> {
        let mut qp = self.qps.get_mut(index)?.qp.take()?;
        let mut env = Env {
            keys: &self.keys,
            cqs: &mut self.cqs,
            srqs: &mut self.srqs,
            peers: &mut self.peers,
            links: &mut self.links,
            faults: &mut self.faults,
            stats: &mut self.stats,
            async_events: &mut self.async_events,
            pending_flush: &mut self.pending_flush,
            copy_engine: &*self.copy_engine,
            by_reference: self.by_reference,
            copy_limit: self.copy_limit,
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

    /// Index of a queue pair, if it exists.
    fn find(&self, qpn: u32) -> Option<usize> {
        let i = self.qpns.index(qpn);
        self.qps.get(i).and_then(|slot| slot.qp.as_ref()).is_some_and(|qp| qp.rings.qpn == qpn).then_some(i)
    }

    /// Adds the queue pair that `make` builds for its QPN.
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

    /// Removes a queue pair. The caller drops it outside of locks.
    pub(crate) fn remove_qp(&mut self, qpn: u32, doorbells: &DoorbellSet) -> Option<Box<SoftQp>> {
        let i = self.find(qpn)?;
        self.watched.forget(i, doorbells);
        self.active.retain(|&a| a != i);
        let qp = self.qps[i].qp.take();
        self.drop_dead_links();
        qp
    }

    /// Runs `work` on queue pair `qpn`, and has its packets delivered: no step may follow.
    pub(crate) fn with_qp<T>(
        &mut self,
        qpn: u32,
        work: impl FnOnce(&mut SoftQp, &mut Env<'_>) -> T,
    ) -> Option<T> {
        let i = self.find(qpn)?;
        let result = self.with(i, work);
        self.links.ring();
        result
    }

    fn ring_index(&mut self, index: usize) {
        self.with(index, |qp, env| {
            // One write to a socket, or one message, takes both; a reply would overtake them otherwise.
            if env.links.joins_packets(qp.link) {
                qp.send_responses(env);
            }
            qp.take_doorbell(env);
            qp.advance(env);
        });
    }

    /// Starts to poll this doorbell if it was announced.
    fn watch(&mut self, i: usize, doorbells: &DoorbellSet) {
        if self.must_poll(i, doorbells) {
            self.watched.add(i);
        }
    }

    /// Whether an announced doorbell has not been written yet.
    fn must_poll(&self, i: usize, doorbells: &DoorbellSet) -> bool {
        let qp = self.qps.get(i).and_then(|slot| slot.qp.as_ref());
        qp.is_some_and(|qp| doorbells.must_poll(i, qp.req.head()))
    }

    /// Stops polling a doorbell: after a reset, announced doorbells will not be written.
    pub(crate) fn unwatch(&mut self, qpn: u32, doorbells: &DoorbellSet) {
        if let Some(i) = self.find(qpn) {
            self.watched.forget(i, doorbells);
        }
    }

    /// Number of links including the loopback, and of link slots, for tests.
    #[cfg(test)]
    pub(super) fn count_links(&self) -> (usize, usize) {
        (self.rx.iter().flatten().count(), self.rx.len())
    }

    /// Index of the newest link, for tests.
    #[cfg(test)]
    pub(super) fn newest_link(&self) -> usize {
        self.rx.len() - 1
    }

    /// Whether the peer of a link is gone and that has not been handled, for tests.
    #[cfg(test)]
    pub(super) fn is_newly_dead(&self, link: usize) -> bool {
        self.links.is_newly_dead(link)
    }

    /// Index of a live link to `peer`.
    pub(crate) fn link_to(&self, peer: Peer) -> Option<usize> {
        self.links.find(peer)
    }

    /// Adds a link. Datagrams that wait for it are sent, and queue pairs go on.
    pub(crate) fn add_link(&mut self, ends: Ends) -> usize {
        let peer = ends.peer();
        let (link, rx) = self.links.add(ends);
        self.rx.resize_with(self.rx.len().max(link + 1), || None);
        self.rx[link] = Some(Box::new(rx));
        for (packet, number) in self.peers.take_waiting(peer.gid) {
            let (header, faults, stats) = (&packet.header, &mut self.faults, &mut self.stats);
            let sent = self.links.send(link, header, &packet.body, &[], number, faults, stats);
            sent.expect("only pieces cannot be read");
        }
        for i in 0..self.qps.len() {
            self.with(i, |qp, env| {
                if qp.link == UNLINKED && qp.peer == Some(peer) {
                    qp.link = link;
                    qp.advance(env);
                }
            });
        }
        self.links.ring();
        link
    }

    /// Frees dead links over which no queue pair is connected.
    pub(crate) fn drop_dead_links(&mut self) {
        for link in 0..self.rx.len() {
            let is_used = || self.qps.iter().filter_map(|slot| slot.qp.as_ref()).any(|qp| qp.uses(link));
            if self.links.is_left_over(link) && !is_used() {
                self.links.remove(link);
                self.rx[link] = None;
            }
        }
    }

    /// Revokes references to a region in READ responses. Returns false while a link has no room.
    pub(crate) fn revoke(&mut self, key: u32) -> bool {
        let mut is_done = true;
        for i in 0..self.qps.len() {
            if self.qps[i].qp.as_ref().is_some_and(|qp| qp.resp.grants.contains(key)) {
                is_done &= self.with(i, |qp, env| qp.revoke(env)).unwrap_or(true);
            }
        }
        self.links.ring();
        is_done
    }

    /// Copies in progress into a region.
    pub(crate) fn copies_on(&self, key: u32) -> Vec<Ticket> {
        self.active.iter().filter_map(|&i| self.qps[i].qp.as_ref()).flat_map(|qp| qp.copies_on(key)).collect()
    }

    /// Whether a packet of this peer waits. Packets sent before the peer died are still processed. In shared memory there are two
    /// links to a peer if both sides connected at once.
    fn has_packet_of(&mut self, peer: Option<Peer>) -> bool {
        let links = &self.links;
        let mut ends = self.rx.iter_mut().enumerate().filter_map(|(l, rx)| Some((l, rx.as_mut()?)));
        ends.any(|(l, rx)| links.peer(l) == peer && !links.is_down(l) && rx.has_packet())
    }

    /// Whether a timeout has passed, but packets of the peer wait: this HCA had no time of a processor to take them.
    fn may_be_answered(&mut self, index: usize, now: Instant) -> bool {
        let qp = self.qps[index].qp.as_ref().filter(|qp| qp.req.is_late(now));
        let peer = qp.and_then(|qp| qp.peer);
        peer.is_some() && self.has_packet_of(peer)
    }

    fn poll_watched(&mut self) -> bool {
        let mut worked = false;
        for at in 0..self.watched.len() {
            let (index, before) = (self.watched.get(at), self.stats.doorbells);
            let qp = self.qps[index].qp.as_ref();
            // In ERR, requests are flushed as they are posted.
            if !qp.is_some_and(|qp| qp.rings.is_rung() || qp.state == QpState::ERR) {
                continue;
            }
            self.ring_index(index);
            worked |= self.stats.doorbells != before;
        }
        worked
    }

    fn receive(&mut self, link: usize) -> bool {
        let Some(rx) = &mut self.rx[link] else { return false };
        if self.links.is_down(link) {
            return false;
        }
        // Most links, at most steps.
        if rx.is_empty() {
            rx.publish();
            self.links.count_received(link, false);
            return false;
        }
        // Taken out, because the queue pairs borrow the rest of `self`.
        let Some(mut rx) = self.rx[link].take() else { return false };
        let (mut any, mut is_corrupt) = (false, false);
        for _ in 0..BURST {
            let packet = match rx.peek() {
                Ok(Some(packet)) => packet,
                Ok(None) => {
                    // Once the responses have left, which is at the beginning of the next step.
                    if !any || self.active.is_empty() {
                        rx.publish();
                    }
                    self.links.count_received(link, false);
                    break;
                }
                Err(error) => {
                    tracing::error!(%error, "software HCA: link taken down");
                    is_corrupt = true;
                    break;
                }
            };
            any = true;
            self.links.count_received(link, true);
            self.stats.packets_received += 1;
            let header = Header::from_bytes(packet.header());
            if !self.faults.is_dead() {
                self.dispatch(link, &header, &rx.body(&packet, link));
            }
            if rx.pop(packet) {
                self.links.notify_one(link);
            }
        }
        self.rx[link] = Some(rx);
        if is_corrupt {
            self.handle_peer_death(link);
        }
        any
    }

    /// Finds out which sockets have packets, and takes those that arrive beside them. Returns whether any did.
    fn look_at_sockets(&mut self) -> bool {
        let Some(sockets) = self.sockets.as_deref().filter(|sockets| sockets.links() > 0) else {
            return false;
        };
        let arrived = sockets.endpoint().map(|endpoint| endpoint.poll());
        let all = 0..self.rx.len();
        let mut look = |link: usize| {
            if let Some(Some(rx)) = self.rx.get_mut(link) {
                rx.set_ready();
            }
        };
        match arrived {
            // The sockets only tell ends.
            Some(_) if !self.steps.is_multiple_of(STEPS_TO_ENDS) => {}
            None if sockets.links() <= FEW_SOCKETS => all.for_each(look),
            _ => _ = sockets.take_ready(&mut look),
        }
        arrived.unwrap_or(false)
    }

    fn dispatch(&mut self, link: usize, header: &Header, body: &Body<'_>) {
        let peer = self.links.peer(link);
        let done = self.find(header.dst).and_then(|i| {
            self.with(i, |qp, env| {
                if header.op == PacketOp::DATAGRAM {
                    return qp.handle_datagram(header, body, env);
                }
                // Drop packets of any but the connected queue pair.
                let from = qp.peer == peer && qp.remote.is_some_and(|r| r.qpn == header.src);
                if from && header.is_response() {
                    qp.handle_response(header, body, env);
                    qp.advance(env);
                } else if from {
                    qp.handle_request(header, body, env);
                }
                from
            })
        });
        if done != Some(true) {
            self.stats.packets_discarded += 1;
        }
    }

    /// Fails the queue pairs connected to the dead peer of a link.
    fn handle_peer_death(&mut self, link: usize) {
        let peer = self.links.peer(link);
        self.links.take_down(link);
        if let Some(process) = self.links.process(link) {
            self.copy_engine.forget(process);
        }
        tracing::warn!(?peer, "software HCA: peer is gone");
        // A card does not notice, so its timeouts expire.
        let is_card = self.async_events.has_listener();
        // A peer that has connected again keeps its new link.
        let has_other = peer.is_some_and(|peer| self.links.find(peer).is_some());
        for i in 0..self.qps.len() {
            self.with(i, |qp, env| {
                let lost = qp.link == link || !has_other && qp.peer == peer;
                if lost && (!is_card || qp.is_copying()) && matches!(qp.state, QpState::RTR | QpState::RTS) {
                    qp.lose_peer(env);
                }
            });
        }
        self.drop_dead_links();
    }
}

impl Progress for Core {
    fn step(&mut self, doorbells: &DoorbellSet) -> bool {
        #[cfg(test)]
        assert!(!self.panics, "a test asked for it");
        let mut worked = false;
        if doorbells.seems_pending() {
            let attended = doorbells.drain(|i| {
                self.ring_index(i);
                self.watch(i, doorbells);
                worked = true;
            });
            attended.into_iter().for_each(|cqn| self.cqs.attend(cqn));
        }
        if !self.watched.is_empty() {
            worked |= self.poll_watched();
        }
        // Backwards, because of `swap_remove`.
        for at in (0..self.active.len()).rev() {
            let i = self.active[at];
            let state = self.with(i, |qp, env| {
                let any =
                    qp.poll_copies(env) | qp.advance(env) | qp.send_responses(env) | qp.resume_flush(env);
                qp.active = qp.is_active();
                (any, qp.active)
            });
            let (any, active) = state.unwrap_or((false, false));
            worked |= any;
            if !active {
                self.active.swap_remove(at);
            }
        }
        worked |= self.look_at_sockets();
        for link in 0..self.rx.len() {
            worked |= self.receive(link);
        }
        for at in 0..self.active.len() {
            let i = self.active[at];
            let is_due = |qp: &SoftQp| qp.resp.is_copying() || qp.resp.acks_now || qp.is_fetching();
            if self.qps[i].qp.as_deref().is_some_and(is_due) {
                let complete = |qp: &mut SoftQp, env: &mut Env<'_>| {
                    let any = (qp.resp.is_copying() && qp.complete_copies(env)) | qp.complete_fetches(env);
                    any | (std::mem::take(&mut qp.resp.acks_now) && qp.send_responses(env))
                };
                worked |= self.with(i, complete).unwrap_or(false);
            }
        }
        self.cqs.check_channels();
        self.steps = self.steps.wrapping_add(1);
        if self.steps.is_multiple_of(STEPS) && self.is_active() {
            let now = Instant::now();
            if now - self.ticked >= TICK {
                self.tick(now);
            }
        }
        worked | self.links.ring()
    }

    // Run to completion, in case the peer is on this HCA: its state is in this core's cache.
    fn ring(&mut self, index: usize, doorbells: &DoorbellSet) {
        self.ring_index(index);
        self.links.ring();
        for _ in 0..ROUNDS {
            if !self.step(doorbells) {
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
        self.has_delayed = self.links.tick(now);
        for at in 0..self.active.len() {
            let i = self.active[at];
            if !self.may_be_answered(i, now) {
                self.with(i, |qp, env| qp.tick(now, env));
            }
        }
        for link in 0..self.rx.len() {
            if self.links.is_newly_dead(link) && !self.has_packet_of(self.links.peer(link)) {
                self.handle_peer_death(link);
            }
        }
        self.links.ring();
    }

    fn drop_idle_watches(&mut self, doorbells: &DoorbellSet) {
        let mut watched = std::mem::take(&mut self.watched);
        watched.retain(|i| self.must_poll(i, doorbells));
        self.watched = watched;
        self.cqs.drop_idle_watches();
    }

    fn unwatch_all(&self, doorbells: &DoorbellSet) {
        self.watched.unwatch_all(doorbells);
    }

    fn is_active(&self) -> bool {
        !self.active.is_empty() || self.has_delayed
    }

    fn has_arrivals(&mut self) -> bool {
        if let Some(endpoint) = self.sockets.as_ref().and_then(|sockets| sockets.endpoint()) {
            endpoint.poll();
        }
        let links = &self.links;
        let mut ends = self.rx.iter_mut().enumerate().filter_map(|(l, rx)| Some((l, rx.as_mut()?)));
        ends.any(|(l, rx)| links.is_newly_dead(l) || !links.is_down(l) && rx.has_packet())
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
        self.watched.changed(|i| qps[i].qp.as_ref()?.rings.register().cloned())
    }

    fn longest_sleep(&self) -> Duration {
        // All else is announced, or comes with a packet. Only what streams post to a broken queue pair waits so long to be flushed.
        Duration::from_secs(1)
    }

    fn watch_sleep(&self) -> Duration {
        // Of a card, all doorbells are watched.
        Duration::from_millis(if self.async_events.has_listener() { 1 } else { 5 })
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
    /// Whether the queue pair needs further steps.
    fn is_active(&self) -> bool {
        (self.state == QpState::RTS && self.req.is_active()) || self.is_flushing() || self.resp.is_active()
    }
}
