//! Sends by reference: the payload stays in place, and the peer copies it.
//!
//! A reference is one packet that covers the PSNs of all packets it replaces, so the bytes can be sent after all if the
//! peer refuses it. Up to [`WINDOW`] references are in flight. Other sends behind them wait for their acknowledgement,
//! so the peer need not reorder.
//!
//! The peer answers a duplicate reference with COPYING while it copies, which resets the retries. A send whose payload
//! the peer may be copying is withdrawn before it completes with an error: the application may then change the bytes,
//! and the peer must not deliver them.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::{Pending, Requester};
use crate::packet::Reference;
use crate::packet::{self, Header, PacketOp, ahead};
use crate::qp::{Env, SoftQp};
use gdsync_device::engine::Wqe;
use gdsync_device::memory::Memory;
use gdsync_device::{TransferPath, Transport};
use mlx5_ring::{DataSeg, DecodedOp, DecodedPayload};

/// References in flight.
const WINDOW: usize = 8;
/// Maximum refused regions per kind. Beyond it no reference of that kind is sent.
const MAX_REFUSED: usize = 64;
/// How long a WITHDRAW or REVOKE waits for room on the link.
const TIMEOUT: Duration = Duration::from_secs(1);

/// A region sent by reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Referred {
    /// Key of the region.
    key: u32,
    reader: Reader,
}

/// What reads the payload at the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reader {
    /// Its CPU, from host memory.
    Cpu,
    /// A copy engine, from GPU memory.
    CopyEngine,
}

/// References of a requester.
#[derive(Debug, Default)]
pub(super) struct References {
    /// Pending sends by reference.
    pending: usize,
    /// Regions that the peer refused.
    refused: SmallVec<[u32; 2]>,
    /// How many of them are read by copy engines.
    exports_refused: usize,
    /// The peer cannot read host memory of this process.
    is_unreadable: bool,
    /// References were withdrawn.
    withdrawn: bool,
    /// Since when a WITHDRAW or REVOKE waits for room.
    leaving: Option<Instant>,
}

impl Pending {
    /// Whether the peer may be copying the payload.
    pub(super) fn may_be_copied(&self) -> bool {
        self.reference_sent && !self.is_done()
    }
}

impl Requester {
    /// Whether references ahead of pending send `i` let it start.
    pub(super) fn may_begin(&self, i: usize) -> bool {
        if self.references.pending == 0 {
            return true;
        }
        let out = || self.pending.iter().take(i).filter(|p| p.referred.is_some() && !p.is_done());
        let Some(p) = self.pending.get(i).filter(|_| out().next().is_some()) else { return true };
        let reader = p.referred.map(|r| r.reader);
        // The peer's CPU and its copy engines are not ordered against each other.
        let may_join =
            || out().count() < WINDOW && out().all(|other| other.referred.map(|r| r.reader) == reader);
        p.packets == 0 || reader.is_some() && may_join()
    }

    /// Counts a pending send that begins or ends.
    pub(super) fn count_reference(&mut self, p: &Pending, begins: bool) {
        let count = &mut self.references.pending;
        *count = if begins {
            *count + usize::from(p.referred.is_some())
        } else {
            *count - usize::from(p.referred.is_some())
        };
    }
}

impl SoftQp {
    /// The region to reference for this message, or `None` to send bytes.
    pub(super) fn reference_for(
        &self,
        op: &DecodedOp,
        wqe: &Wqe,
        len: usize,
        env: &Env<'_>,
    ) -> Option<Referred> {
        let key = Self::one_buffer(op, wqe)?.lkey;
        if len == 0 || !env.links.takes_references(self.link) || self.is_refused(key) {
            return None;
        }
        if env.keys.export(key).is_some() {
            return (len >= env.by_reference).then_some(Referred { key, reader: Reader::CopyEngine });
        }
        self.may_be_read(key, len, env).then_some(Referred { key, reader: Reader::Cpu })
    }

    /// Whether the peer reads this region by cross-memory attach.
    fn may_be_read(&self, key: u32, len: usize, env: &Env<'_>) -> bool {
        env.cma.threshold().is_some_and(|least| len >= least)
            && !self.req.references.is_unreadable
            && env.links.takes_references(self.link)
            && env.keys.memory(key).is_some_and(Memory::is_host)
    }

    /// The SGE of a payload with exactly one.
    pub(super) fn one_buffer(op: &DecodedOp, wqe: &Wqe) -> Option<DataSeg> {
        let DecodedPayload::Sges(list) = op.payload()? else { return None };
        list.iter(wqe.as_bytes()).next().filter(|_| list.len() == 1)
    }

    fn is_refused(&self, key: u32) -> bool {
        let References { refused, exports_refused, .. } = &self.req.references;
        *exports_refused >= MAX_REFUSED || refused.contains(&key)
    }

    /// Transfer path of a message of `len` bytes of `memory`, whose key is `key`.
    pub(crate) fn transfer_path(&self, key: u32, memory: &Memory, len: usize, env: &Env<'_>) -> TransferPath {
        let least = env.by_reference.max(1);
        let is_near = env.links.takes_references(self.link);
        let is_exported = env.keys.export(key).is_some() && is_near;
        if len >= least && is_exported && !self.is_refused(key) {
            return TransferPath::new(Transport::PeerToPeer, format!("{len} bytes are at least {least}"));
        }
        if Self::is_staged(memory, len, env) {
            let reason = match () {
                () if !memory.is_mapped() => "it has no CPU mapping".into(),
                () if !is_near => "the peer may be on another host".into(),
                () if least == usize::MAX => "references are turned off".into(),
                () if len < least => {
                    format!("{len} bytes are below the {least} of references, and too many for CPU reads")
                        .into()
                }
                () if is_exported => Cow::Borrowed("the peer refused references to it; see the log"),
                () => Cow::Borrowed("it cannot be exported to peers"),
            };
            return TransferPath::new(Transport::Staging, reason);
        }
        if memory.gpu().is_some() {
            return TransferPath::new(
                Transport::Mapping,
                format!("{len} bytes are read through the mapping"),
            );
        }
        if !self.may_be_read(key, len, env) || self.is_refused(key) {
            return TransferPath::new(Transport::Cpu, "it is host memory");
        }
        TransferPath::new(Transport::Cma, format!("host memory, and {len} bytes reach the CMA minimum"))
    }

    /// Sends pending send `i` by reference. Returns whether it was sent, or `None` to send its bytes.
    pub(super) fn send_reference(
        &mut self,
        i: usize,
        wqe: &Wqe,
        op: &DecodedOp,
        env: &mut Env<'_>,
    ) -> Option<bool> {
        let remote = self.remote?;
        let p = &self.req.pending[i];
        if p.sent == p.packets {
            return Some(true);
        }
        let (psn, len, packets) = (p.psn, p.len, p.packets);
        let mut header = Header::new(PacketOp::SEND, remote.qpn, self.rings.qpn, psn);
        header.flags = packet::FIRST | packet::LAST | packet::REFERENCE;
        header.flags |= if wqe.ctrl.solicited() { packet::SOLICITED } else { 0 };
        header.len = u32::try_from(len).expect("messages are at most 1 GiB");
        let mut ext: SmallVec<[u8; 128]> = SmallVec::new();
        let (payload, imm) = match op {
            DecodedOp::Send { payload, imm } => (payload, imm),
            DecodedOp::Write { remote, payload, imm } => {
                (header.op, header.rkey) = (PacketOp::WRITE, remote.rkey);
                ext.extend_from_slice(&remote.addr.to_le_bytes());
                (payload, imm)
            }
            _ => return None,
        };
        if let Some(imm) = *imm {
            header.flags |= packet::IMM;
            header.imm = imm;
        }
        let DecodedPayload::Sges(list) = payload else { return None };
        let sge = list.iter(wqe.as_bytes()).next()?;
        let piece = match self.local(&sge, false, env) {
            Ok(piece) => piece,
            Err(syndrome) => {
                self.req.pending[i].error = Some(syndrome);
                return Some(false);
            }
        };
        let reference = match env.keys.export(sge.lkey) {
            Some(export) => export.reference(piece.offset),
            None => Reference::to_host(piece.memory.host_addr(piece.offset)?),
        };
        ext.extend_from_slice(&reference.to_bytes());
        // Nothing is read, so nothing fails.
        if env.links.send(self.link, &header, &ext, &[], self.packets, env.faults, env.stats) != Ok(true) {
            return Some(false);
        }
        self.packets += 1;
        self.req.note_sent(i, packets);
        let p = &mut self.req.pending[i];
        if !std::mem::replace(&mut p.reference_sent, true) {
            *env.copied = Some(Instant::now());
        }
        Some(true)
    }

    /// The peer is still copying the payload of `psn`: resets the retries.
    pub(super) fn copying(&mut self, psn: u32) {
        if self.req.find(psn).is_some_and(|p| p.may_be_copied()) {
            self.req.progressed();
        }
    }

    /// The peer refused the reference in `psn`: sends the bytes, also of later messages from this region.
    pub(super) fn reference_refused(&mut self, psn: u32, reason: u32, env: &mut Env<'_>) {
        if let Some(Referred { key, reader }) = self.req.find(psn).and_then(|p| p.referred) {
            let (reason, references) = (Reason(reason), &mut self.req.references);
            let is_host = reader == Reader::Cpu;
            let is_unreadable = is_host && reason == Reason::CANNOT_OPEN;
            references.is_unreadable |= is_unreadable;
            let (qpn, why) = (self.rings.qpn, reason.meaning());
            if is_unreadable {
                tracing::debug!(qpn, "the peer cannot read memory of this process; payload is sent");
            } else if !references.refused.contains(&key) {
                if is_host {
                    tracing::debug!(
                        qpn,
                        lkey = key,
                        why,
                        "the peer refused references to this region of host memory; payload is sent"
                    );
                } else {
                    tracing::warn!(
                        qpn,
                        lkey = key,
                        why,
                        "the peer refused references to this region; payload is staged through host memory"
                    );
                }
                references.refused.push(key);
                references.exports_refused += usize::from(!is_host);
                let host = references.refused.len() - references.exports_refused;
                references.is_unreadable |= host >= MAX_REFUSED;
            }
            let is_void = |r: Referred| r.key == key || is_unreadable && r.reader == Reader::Cpu;
            for p in self.req.pending.iter_mut().filter(|p| ahead(p.psn, psn) >= 0) {
                if p.referred.take_if(|r| is_void(*r)).is_some() {
                    references.pending -= 1;
                }
            }
        }
        self.retransmit(env);
    }

    /// Withdraws references that the peer may still be copying. Returns false while the link has no room.
    pub(crate) fn withdraw(&mut self, env: &mut Env<'_>) -> bool {
        let may_be_copied = self.req.pending.iter().any(Pending::may_be_copied);
        let is_due = may_be_copied && !self.req.references.withdrawn;
        let is_done = !is_due || self.take_back(PacketOp::WITHDRAW, env);
        self.req.references.withdrawn |= is_due && is_done;
        is_done
    }

    /// Sends a WITHDRAW or REVOKE. Returns false while the link has no room, up to [`TIMEOUT`].
    pub(crate) fn take_back(&mut self, op: PacketOp, env: &mut Env<'_>) -> bool {
        let Some(remote) = self.remote else { return true };
        let header = Header::new(op, remote.qpn, self.rings.qpn, self.psn);
        let leaving = &mut self.req.references.leaving;
        if !env.faults.is_dead() && !env.links.withdraw(self.link, &header) {
            if leaving.get_or_insert_with(Instant::now).elapsed() < TIMEOUT {
                return false;
            }
            tracing::warn!(
                qpn = self.rings.qpn,
                "the peer receives no packets and may complete a message whose send failed, or a READ of memory that \
                 is no longer registered"
            );
        }
        *leaving = None;
        true
    }
}

/// Why a peer refused a reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reason(pub(crate) u32);

impl Reason {
    pub(crate) const CANNOT_OPEN: Self = Self(1);
    pub(crate) const FAILED: Self = Self(2);

    fn meaning(self) -> &'static str {
        match self {
            Self::CANNOT_OPEN => {
                "the peer cannot open it: CUDA IPC needs cudaMalloc memory, no memory pool, and one container"
            }
            Self::FAILED => "the peer failed to copy it; see its log",
            _ => "unknown reason",
        }
    }
}
