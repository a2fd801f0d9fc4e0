//! Sending ends of the links to other HCAs, with fault injection.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::packet::{self, Header};
use super::wire::{Ends, FarTx, MAX_RECORDS, Peer, Piece, PushError, Rx, Tx};
use crate::packet::Reference;
use gdsync_device::copy_engine::ProcessId;
use gdsync_device::error::Result;
use gdsync_device::memory::Process;
use gdsync_device::{Fate, Faults, HcaStats};
use mlx5_ring::Syndrome;

/// How long the ring of a link may be full before its peer counts as silent.
const STALL: Duration = Duration::from_millis(100);
/// Packets of a full ring, and the one that is being received.
const FULL_RING: u64 = MAX_RECORDS as u64 + 1;

/// Links of one HCA by index; indices are reused. Index 0 is the loopback.
#[derive(Debug, Default)]
pub(crate) struct Links(Vec<Option<Link>>);

#[derive(Debug)]
struct Link {
    peer: Peer,
    tx: Tx,
    /// The ring is corrupt; nothing more is sent.
    broken: bool,
    /// The corruption or the peer's death has been handled.
    down: bool,
    /// Packets were pushed that the peer does not know of, or that wait for a socket.
    undelivered: bool,
    /// Packets received. Each time that the receive ring is seen empty, it grows by a full ring of packets.
    drained: u64,
    /// Process of the peer, once it has sent references.
    process: Option<ProcessId>,
    /// PID of the peer in this process's namespace.
    pid: Option<libc::pid_t>,
    /// A test read of the peer's memory succeeded.
    readable: bool,
    /// Packets delayed by the fault plan.
    delayed: VecDeque<Delayed>,
    /// Since when the ring has been full.
    full_since: Option<Instant>,
}

/// A packet outside of a ring.
#[derive(Debug)]
pub(crate) struct OwnedPacket {
    pub(crate) header: Header,
    pub(crate) body: Vec<u8>,
}

impl OwnedPacket {
    /// Copies the parts of a packet.
    ///
    /// # Errors
    /// [`Syndrome::LOC_PROT_ERR`] if a piece cannot be read.
    pub(crate) fn copy(
        header: &Header,
        ext: &[u8],
        pieces: &[Piece<'_>],
    ) -> std::result::Result<Self, Syndrome> {
        let mut body = ext.to_vec();
        for piece in pieces {
            let at = body.len();
            body.resize(at + piece.len, 0);
            let read = piece.memory.read(piece.offset, &mut body[at..]);
            read.map_err(|_| Syndrome::LOC_PROT_ERR)?;
        }
        Ok(Self { header: *header, body })
    }
}

#[derive(Debug)]
struct Delayed {
    packet: OwnedPacket,
    /// `None`: until another packet has passed it.
    until: Option<Instant>,
}

impl Links {
    fn get(&self, index: usize) -> Option<&Link> {
        self.0.get(index)?.as_ref()
    }

    fn get_mut(&mut self, index: usize) -> Option<&mut Link> {
        self.0.get_mut(index)?.as_mut()
    }

    /// Adds a link. Returns its index and receiving end.
    pub(crate) fn add(&mut self, ends: Ends) -> (usize, Rx) {
        let peer = ends.peer();
        let (mut tx, rx) = ends.split();
        let pid = tx.pid();
        let index = self.0.iter().position(Option::is_none).unwrap_or(self.0.len());
        tx.begin(index);
        let link = Some(Link {
            peer,
            tx,
            broken: false,
            down: false,
            undelivered: false,
            drained: 0,
            process: None,
            pid,
            readable: false,
            delayed: VecDeque::new(),
            full_since: None,
        });
        match self.0.get_mut(index) {
            Some(slot) => *slot = link,
            None => self.0.push(link),
        }
        (index, rx)
    }

    /// Removes a link.
    pub(crate) fn remove(&mut self, index: usize) {
        if let Some(slot) = self.0.get_mut(index) {
            *slot = None;
        }
    }

    /// Whether the peer has taken no packet for so long that it counts as silent.
    pub(crate) fn is_stalled(&self, index: usize) -> bool {
        self.get(index).and_then(|link| link.full_since).is_some_and(|since| since.elapsed() >= STALL)
    }

    /// Payload bytes per packet.
    pub(crate) fn segment(&self, index: usize) -> usize {
        self.get(index).map_or(packet::SEGMENT, |link| link.tx.segment())
    }

    /// Whether packets of a step leave together.
    pub(crate) fn joins_packets(&self, index: usize) -> bool {
        self.get(index).is_some_and(|link| matches!(link.tx, Tx::Far(_)))
    }

    /// Whether packets to this peer may name memory in place of payload.
    pub(crate) fn takes_references(&self, index: usize) -> bool {
        self.get(index).is_none_or(|link| link.tx.takes_references())
    }

    /// Whether the peer has not handled all packets that were sent to it, though its process lives and is not stopped, unless that
    /// `may_be_stopped`. Over TCP: whether its system has not received them, which TCP repeats, until it reports the end of the link.
    pub(crate) fn awaits_processor(&self, index: usize, may_be_stopped: bool) -> bool {
        let runs =
            |link: &Link| may_be_stopped || !link.tx.takes_references() || link.pid.is_some_and(may_run);
        self.get(index).is_some_and(|l| !l.down && !l.is_lost() && !l.tx.is_drained() && runs(l))
    }

    /// Index of a live link to `peer`.
    pub(crate) fn find(&self, peer: Peer) -> Option<usize> {
        let leads_there = |l: &Link| l.peer == peer && !l.down && !l.is_lost();
        self.0.iter().position(|link| link.as_ref().is_some_and(leads_there))
    }

    pub(crate) fn peer(&self, index: usize) -> Option<Peer> {
        self.get(index).map(|l| l.peer)
    }

    /// Whether the peer died or the ring is corrupt, and that has not been handled.
    pub(crate) fn is_newly_dead(&self, index: usize) -> bool {
        self.get(index).is_some_and(|l| !l.down && l.is_lost())
    }

    /// Whether a link is unusable.
    pub(crate) fn is_down(&self, index: usize) -> bool {
        self.get(index).is_none_or(|l| l.down)
    }

    /// Whether a link is unusable and not yet removed.
    pub(crate) fn is_left_over(&self, index: usize) -> bool {
        self.get(index).is_some_and(|l| l.down)
    }

    /// Marks a link unusable.
    pub(crate) fn take_down(&mut self, index: usize) {
        if let Some(link) = self.get_mut(index) {
            link.down = true;
            link.delayed.clear();
            link.tx.take_down();
        }
    }

    /// Prefetches the line of the next packet.
    #[inline]
    pub(crate) fn expect(&self, index: usize) {
        if let Some(link) = self.get(index) {
            link.tx.expect();
        }
    }

    /// Sends a packet. Returns false if the ring is full. Packets on a dead link are dropped.
    ///
    /// # Errors
    /// [`Syndrome::LOC_PROT_ERR`] if a piece cannot be read.
    #[expect(clippy::too_many_arguments, reason = "packet parts, fault plan and counters")]
    pub(crate) fn send(
        &mut self,
        index: usize,
        header: &Header,
        ext: &[u8],
        pieces: &[Piece<'_>],
        number: u64,
        faults: &mut Faults,
        stats: &mut HcaStats,
    ) -> std::result::Result<bool, Syndrome> {
        let unreadable = |_| Syndrome::LOC_PROT_ERR;
        let Some(link) = self.get_mut(index).filter(|l| !l.down && !l.broken) else { return Ok(true) };
        let fate = faults.fate(header.src, number);
        if fate == Fate::Pass && link.delayed.is_empty() {
            let sent = link.push(header, ext, pieces).map_err(unreadable)?;
            if sent {
                stats.packets_sent += 1;
                faults.count_packet();
            }
            return Ok(sent);
        }
        if fate != Fate::Pass {
            stats.packets_faulted += 1;
        }
        let hold = |until| Ok(Delayed { packet: OwnedPacket::copy(header, ext, pieces)?, until });
        match fate {
            Fate::Drop => {}
            Fate::Reorder => link.delayed.push_back(hold(None)?),
            Fate::Delay(by) => link.delayed.push_back(hold(Some(Instant::now() + by))?),
            Fate::Pass | Fate::Duplicate => {
                if !link.push(header, ext, pieces).map_err(unreadable)? {
                    return Ok(false);
                }
                if fate == Fate::Duplicate {
                    link.push(header, ext, pieces).map_err(unreadable)?;
                }
                link.release(|delayed| delayed.until.is_none());
            }
        }
        stats.packets_sent += 1;
        faults.count_packet();
        Ok(true)
    }

    /// Sends a WITHDRAW or REVOKE, bypassing the fault plan, and drops the sender's delayed references. Returns false if
    /// the ring is full.
    pub(crate) fn withdraw(&mut self, index: usize, header: &Header) -> bool {
        let Some(link) = self.get_mut(index).filter(|l| !l.down && !l.broken) else { return true };
        link.delayed
            .retain(|h| h.packet.header.src != header.src || h.packet.header.flags & packet::REFERENCE == 0);
        link.push_bytes(header, &[])
    }

    /// Records the process of the peer.
    pub(crate) fn note_process(&mut self, index: usize, process: ProcessId) {
        if let Some(link) = self.get_mut(index) {
            link.process = Some(process);
        }
    }

    /// Process of the peer, if it has sent references.
    pub(crate) fn process(&self, index: usize) -> Option<ProcessId> {
        self.get(index)?.process
    }

    /// Host memory that `reference` names, if this process may read it.
    pub(crate) fn host_memory(&mut self, index: usize, reference: &Reference) -> Option<(Process, u64)> {
        let link = self.get_mut(index)?;
        let found = reference.in_process(link.pid?)?;
        if !link.readable {
            if let Err(error) = found.0.probe() {
                tracing::debug!(peer = %link.peer, %error, "software HCA: the kernel denies process_vm_readv on the peer");
                return None;
            }
            link.readable = true;
        }
        Some(found)
    }

    /// Records whether a receive attempt found a packet.
    pub(crate) fn count_received(&mut self, index: usize, any: bool) {
        if let Some(link) = self.get_mut(index) {
            link.drained = link.drained.wrapping_add(if any { 1 } else { FULL_RING });
        }
    }

    /// For [`Links::has_drained_since`].
    pub(crate) fn drained(&self, index: usize) -> u64 {
        self.get(index).map_or(0, |l| l.drained)
    }

    /// Has pushed packets delivered. Returns whether a link that was full may have room.
    pub(crate) fn ring(&mut self) -> bool {
        let mut has_room = false;
        for link in self.0.iter_mut().flatten().filter(|link| link.undelivered) {
            link.undelivered = !link.tx.deliver();
            has_room |= !link.undelivered && link.full_since.is_some();
        }
        has_room
    }

    /// Notifies the peer of a link that its ring has room.
    pub(crate) fn notify_one(&self, index: usize) {
        if let Some(link) = self.get(index) {
            link.tx.notify();
        }
    }

    /// Whether everything that the peer had sent when [`Links::drained`] was `seen` has been received.
    pub(crate) fn has_drained_since(&self, index: usize, seen: u64) -> bool {
        // After a full ring of packets, everything sent before has been received.
        self.drained(index).wrapping_sub(seen) >= FULL_RING || self.is_down(index)
    }

    /// Sends delayed packets that are due. Returns whether any remain.
    pub(crate) fn tick(&mut self, now: Instant) -> bool {
        let mut left = false;
        for link in self.0.iter_mut().flatten() {
            link.release(|delayed| delayed.until.is_none_or(|until| now >= until));
            left |= !link.delayed.is_empty();
        }
        left
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        let links = self.0.iter_mut().flatten();
        FarTx::end_all(
            links.filter_map(|link| if let Tx::Far(tx) = &mut link.tx { Some(tx) } else { None }).collect(),
        );
    }
}

impl Link {
    fn is_lost(&self) -> bool {
        self.broken || !self.tx.is_alive()
    }

    /// # Errors
    /// As reading a piece.
    fn push(&mut self, header: &Header, ext: &[u8], pieces: &[Piece<'_>]) -> Result<bool> {
        match self.tx.try_push(&header.to_bytes(), ext, pieces) {
            Ok(sent) => {
                self.undelivered |= sent;
                self.full_since = if sent { None } else { self.full_since.or_else(|| Some(Instant::now())) };
                Ok(sent)
            }
            Err(PushError::Payload(error)) => Err(error),
            Err(PushError::Corrupt(error)) => {
                tracing::error!(peer = %self.peer, %error, "software HCA: link taken down");
                self.broken = true;
                Ok(true)
            }
        }
    }

    fn push_bytes(&mut self, header: &Header, ext: &[u8]) -> bool {
        self.push(header, ext, &[]).expect("only pieces cannot be read")
    }

    fn release(&mut self, due: impl Fn(&Delayed) -> bool) {
        for delayed in std::mem::take(&mut self.delayed) {
            if !(due(&delayed) && self.push_bytes(&delayed.packet.header, &delayed.packet.body)) {
                self.delayed.push_back(delayed);
            }
        }
    }
}

/// Whether a process of this PID exists and is not stopped, as far as can be known.
fn may_run(pid: libc::pid_t) -> bool {
    if u32::try_from(pid) == Ok(std::process::id()) {
        return true;
    }
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name before the state may contain brackets.
    stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with(['T', 't', 'Z', 'X']))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::wire::{Event, EventCount, loopback};
    use gdsync_device::Gid;

    fn own() -> Ends {
        let event = Event::Memory(EventCount::create().unwrap());
        loopback(Peer::near(Gid([1; 16])), event).unwrap()
    }

    #[test]
    fn a_process_may_run_until_it_is_stopped_or_ends() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let pid = libc::pid_t::try_from(child.id()).unwrap();
        let becomes = |runs| {
            let start = Instant::now();
            while may_run(pid) != runs {
                assert!(start.elapsed() < Duration::from_secs(20), "it should be {runs}");
                std::thread::yield_now();
            }
        };
        assert!(may_run(pid) && may_run(std::process::id().cast_signed()));
        for (signal, runs) in [(libc::SIGSTOP, false), (libc::SIGCONT, true), (libc::SIGKILL, false)] {
            // SAFETY: a plain call; the child has not been waited for, so the number is still its own.
            assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
            becomes(runs);
        }
        child.wait().unwrap();
        assert!(!may_run(pid));
    }

    #[test]
    fn a_peer_that_takes_nothing_is_silent_until_it_takes_a_packet() {
        let mut links = Links::default();
        let (link, mut rx) = links.add(own());
        let header = Header::new(packet::PacketOp::DATAGRAM, 1, 2, 3);
        let push = |links: &mut Links| links.get_mut(link).unwrap().push_bytes(&header, &[0; 1000]);
        while push(&mut links) {
            assert!(!links.is_stalled(link));
        }
        let start = Instant::now();
        while !links.is_stalled(link) {
            assert!(start.elapsed() < Duration::from_secs(20), "it is full");
            assert!(!push(&mut links));
        }
        while let Some(packet) = rx.peek().unwrap() {
            rx.pop(packet);
        }
        assert!(links.is_stalled(link), "nothing was sent since");
        assert!(push(&mut links) && !links.is_stalled(link));
    }

    #[test]
    fn a_link_has_drained_when_it_was_seen_empty_or_after_a_full_ring_of_packets() {
        let mut links = Links::default();
        let (link, _rx) = links.add(own());
        for before in [0, 1, MAX_RECORDS - 1, MAX_RECORDS, 3 * MAX_RECORDS + 7] {
            (0..before).for_each(|_| links.count_received(link, true));
            let seen = links.drained(link);
            for received in 0..MAX_RECORDS {
                assert!(!links.has_drained_since(link, seen), "{received} packets, and {before} before");
                links.count_received(link, true);
            }
            links.count_received(link, true);
            assert!(links.has_drained_since(link, seen));
            let seen = links.drained(link);
            links.count_received(link, false);
            assert!(links.has_drained_since(link, seen));
        }
    }
}
