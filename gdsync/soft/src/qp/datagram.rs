//! Datagrams (UD): sends to any queue pair of the network, without acknowledgement.
//!
//! A datagram is one packet: the 40 bytes of its GRH, which the receive gets too, then the payload. It is lost if the
//! receiver has no receive posted or another Q_Key. While the [link](crate::peers) to a peer is being made, datagrams
//! for it are copied and complete; they are dropped if the peer does not answer. A burst of more, or one that fills the link,
//! waits a moment for room. If the peer stays silent, what follows is dropped at once.

use std::sync::Arc;

use smallvec::SmallVec;

use super::{Env, SoftQp};
use crate::links::OwnedPacket;
use crate::network::Network;
use crate::packet::{self, Header, PacketOp};
use crate::peers::Reach;
use crate::wire::{Body, Piece};
use gdsync_device::QpState;
use gdsync_device::engine::Wqe;
use mlx5_ring::{self as mlx5, AddressVector, Cqe, CqeOpcode, DecodedOp, Syndrome};

/// Bytes of a GRH.
const GRH: usize = 40;
/// Maximum payload.
pub(crate) const MAX_MTU: usize = 4096;
/// In a Q_Key of a WQE: the queue pair's own is used.
const OWN_QKEY: u32 = 1 << 31;

/// What a datagram queue pair has.
#[derive(Debug)]
pub(crate) struct Datagrams {
    qkey: u32,
    /// Maximum payload.
    mtu: usize,
    network: Arc<dyn Network>,
}

impl Datagrams {
    pub(crate) fn new(mtu: u32, network: Arc<dyn Network>) -> Box<Self> {
        Box::new(Self { qkey: 0, mtu: (mtu as usize).min(MAX_MTU), network })
    }

    pub(crate) fn set_qkey(&mut self, qkey: u32) {
        self.qkey = qkey;
    }
}

impl SoftQp {
    /// Sends datagrams while there are any. Returns whether there was one.
    pub(super) fn advance_datagrams(&mut self, env: &mut Env<'_>) -> bool {
        let mut worked = false;
        while self.state == QpState::RTS && self.req.has_unfetched() {
            let wqe = self.rings.fetch(self.req.head());
            let (index, opcode) = (wqe.ctrl.index, wqe.ctrl.opcode);
            let error = match self.send_datagram(&wqe, env) {
                Ok(false) => break,
                Ok(true) => None,
                Err(syndrome) => Some(syndrome),
            };
            worked = true;
            env.stats.wqes += 1;
            self.req.skip(wqe.blocks());
            if error.is_some() || wqe.ctrl.always_completes() {
                self.complete_send(index, opcode, error, 0, env);
            }
            if error.is_some() {
                self.state = QpState::SQE;
                self.flush_sends(env);
            }
        }
        worked
    }

    /// Sends the datagram of a WQE, or drops it. Returns false if it must wait.
    fn send_datagram(&mut self, wqe: &Wqe, env: &mut Env<'_>) -> Result<bool, Syndrome> {
        self.rings.check(wqe, self.req.head(), env.strict, env.stats)?;
        let bytes = wqe.as_bytes();
        let (op, to) = mlx5::decode_datagram(&wqe.ctrl, bytes).map_err(|error| error.syndrome())?;
        let DecodedOp::Send { payload, imm } = op else { return Ok(true) };
        let Some(datagrams) = &self.datagrams else { return Err(Syndrome::LOC_QP_OP_ERR) };
        let len = payload.total_bytes();
        if len > datagrams.mtu {
            return Err(Syndrome::LOC_LEN_ERR);
        }
        let network = &*datagrams.network;
        let has_grh = to.has_grh || network.lid() == 0;
        let (header, kind) = if has_grh { grh(network, &to, len) } else { ([0; GRH], 0) };
        let sl = if network.lid() == 0 { kind } else { to.sl };
        let mut ext = SmallVec::from_slice(&header);
        let qkey = if to.qkey & OWN_QKEY == 0 { to.qkey } else { datagrams.qkey };
        let (destination, slid) = (network.destination(&to), network.lid());
        let mut pieces: SmallVec<[Piece<'_>; 4]> = SmallVec::new();
        self.gather(&payload, bytes, 0, len, &mut ext, &mut pieces, env)?;
        if pieces.iter().any(|piece| !piece.memory.is_mapped()) {
            return Err(Syndrome::LOC_PROT_ERR);
        }
        let Some(destination) = destination else { return Ok(true) };
        // A datagram has no PSN; the place holds its LID and service level.
        let psn = u32::from(sl) << 16 | u32::from(slid);
        let mut header = Header::new(PacketOp::DATAGRAM, to.qpn, self.rings.qpn, psn);
        header.flags = packet::FIRST | packet::LAST;
        header.flags |= if wqe.ctrl.solicited() { packet::SOLICITED } else { 0 };
        header.flags |= if has_grh { packet::GRH } else { 0 };
        header.flags |= if imm.is_some() { packet::IMM } else { 0 };
        (header.imm, header.rkey) = (imm.unwrap_or(0), qkey);
        header.len = u32::try_from(len).expect("at most the MTU");
        let link = match env.peers.reach(destination, env.links) {
            Reach::Link(link) => link,
            Reach::Soon(waiting) => {
                waiting.push((OwnedPacket::copy(&header, &ext, &pieces)?, self.packets));
                self.packets += 1;
                return Ok(true);
            }
            Reach::Full => return Ok(false),
            Reach::Never => return Ok(true),
        };
        let sent = env.links.send(link, &header, &ext, &pieces, self.packets, env.faults, env.stats)?;
        self.packets += u64::from(sent);
        Ok(sent || env.links.is_stalled(link))
    }

    /// Receives a datagram, which any process of the user may have sent. Returns whether it was accepted.
    pub(crate) fn handle_datagram(&mut self, header: &Header, body: &Body<'_>, env: &mut Env<'_>) -> bool {
        let Some(datagrams) = &self.datagrams else { return false };
        let is_valid = is_datagram(header, body.len()) && header.rkey == datagrams.qkey;
        let receives = matches!(self.state, QpState::RTR | QpState::RTS | QpState::SQE);
        if !is_valid || !receives || !self.has_receive(env) {
            return false;
        }
        let (counter, mut sges) = self.take_receive(env);
        let capacity: usize = sges.iter().map(|sge| sge.len as usize).sum();
        // Only what is written has to be in its region: UCX posts buffers that end behind theirs.
        let mut left = u32::try_from(body.len()).unwrap_or(u32::MAX);
        sges.retain(|sge| {
            sge.len = sge.len.min(left);
            left -= sge.len;
            sge.len > 0
        });
        let placed = match env.faults.next_recv() {
            Some(syndrome) => Err(syndrome),
            None if body.len() > capacity => Err(Syndrome::LOC_LEN_ERR),
            None => sges.iter().try_for_each(|sge| {
                // Nothing is staged, so that a datagram completes at once.
                let is_mapped = self.local(sge, true, env)?.memory.is_mapped();
                if is_mapped { Ok(()) } else { Err(Syndrome::LOC_PROT_ERR) }
            }),
        };
        let placed = placed.and_then(|()| self.scatter(sges.iter().copied(), 0, body, 0, env));
        if let Err(syndrome) = placed {
            let cqe = Cqe { opcode: CqeOpcode::RESP_ERR, syndrome, ..Cqe::default() };
            self.complete_recv(cqe, counter, env);
            self.go_error(env);
            return true;
        }
        let has = |flag| u32::from(header.flags & flag != 0);
        let sender = header.src & 0xff_ffff | (header.psn >> 16) << 24 | has(packet::GRH) << 28;
        let is_imm = header.flags & packet::IMM != 0;
        let cqe = Cqe {
            opcode: if is_imm { CqeOpcode::RESP_SEND_IMM } else { CqeOpcode::RESP_SEND },
            byte_cnt: u32::try_from(body.len()).expect("at most the MTU and a GRH"),
            imm: header.imm,
            solicited: header.flags & packet::SOLICITED != 0,
            slid: mlx5::low16(header.psn.into()),
            flags_rqpn: sender,
            ..Cqe::default()
        };
        self.complete_recv(cqe, counter, env);
        true
    }
}

/// Whether the fields of a datagram are in range. This is the only check of them.
fn is_datagram(header: &Header, body: usize) -> bool {
    let ends = packet::FIRST | packet::LAST;
    let known = ends | packet::IMM | packet::SOLICITED | packet::GRH;
    let payload = header.len as usize;
    header.flags & ends == ends
        && header.flags & !known == 0
        && header.psn >> 20 == 0
        && payload <= MAX_MTU
        && body == GRH + payload
}

/// On RoCE, in place of the service level in a CQE: the GRH is an IPv4 header.
const IPV4: u8 = 2;

/// The GRH of a datagram, or what RoCE v2 puts in its place: between IPv4 addresses, 20 unused bytes and the IP header.
/// Also returns its kind, [`IPV4`] or 0.
fn grh(network: &dyn Network, to: &AddressVector, len: usize) -> ([u8; GRH], u8) {
    let (from, rgid) = (network.source(to.sgid_index), gdsync_device::Gid(to.rgid));
    let len = u16::try_from(len).unwrap_or(u16::MAX);
    let mut out = [0; GRH];
    let is_ipv4 = from.is_ipv4() && rgid.is_ipv4();
    if is_ipv4 {
        let (_, ip) = out.split_at_mut(GRH - 20);
        // IP, UDP, BTH and DETH headers, and the check sum.
        ip[2..4].copy_from_slice(&len.saturating_add(20 + 8 + 12 + 8 + 4).to_be_bytes());
        [ip[0], ip[1], ip[6], ip[8], ip[9]] = [0x45, to.tclass, 0x40, to.hop_limit, 17];
        ip[12..16].copy_from_slice(&from.0[12..]);
        ip[16..20].copy_from_slice(&rgid.0[12..]);
        let words = ip.as_chunks::<2>().0.iter().map(|word| u32::from(u16::from_be_bytes(*word)));
        let sum: u32 = words.sum();
        // The sum of ten words carries less than 16.
        let folded = (sum & 0xffff) + (sum >> 16);
        let folded = mlx5::low16(u64::from((folded & 0xffff) + (folded >> 16)));
        ip[10..12].copy_from_slice(&(!folded).to_be_bytes());
    } else {
        let word = 6 << 28 | u32::from(to.tclass) << 20 | to.flow_label & 0xf_ffff;
        out[..4].copy_from_slice(&word.to_be_bytes());
        out[4..6].copy_from_slice(&len.saturating_add(12 + 8 + 4).to_be_bytes());
        // The next header is a BTH.
        [out[6], out[7]] = [0x1b, to.hop_limit];
        out[8..24].copy_from_slice(&from.0);
        out[24..].copy_from_slice(&rgid.0);
    }
    (out, if is_ipv4 { IPV4 } else { 0 })
}
