//! Queue pair transitions through libibverbs.

use std::fmt::Write;

use rdma_core_sys::verbs::{
    ibv_access_flags, ibv_ah_attr, ibv_gid, ibv_mtu, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask as mask,
    ibv_qp_state, ibv_wr_opcode,
};

use super::explain::{Asked, Call, Step, failed};
use super::open::Open;
use super::port::{GidKind, LinkLayer};
use gdsync_device::error::{Error, Result};
use gdsync_device::{Gid, QpAddress, QpAttr, QpState, mtu_code};

/// Local port properties that an address vector needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct From {
    pub(super) port: u8,
    pub(super) link: LinkLayer,
    pub(super) gid: Gid,
    pub(super) gid_index: u8,
    pub(super) gid_kind: GidKind,
    pub(super) mtu: Option<u32>,
    pub(super) needs_grh: bool,
    pub(super) pkey_index: u16,
    pub(super) service_level: u8,
    pub(super) traffic_class: u8,
    /// Q_Key of a datagram queue pair.
    pub(super) qkey: Option<u32>,
}

/// Hop limit of packets.
const HOPS: u8 = 64;

impl From {
    /// Address vector of a peer.
    fn route(&self, peer: &QpAddress) -> Result<ibv_ah_attr> {
        let refuse = |why: &str| Err(Error::Peer { peer: peer.to_string(), why: why.to_owned() });
        let mut route = ibv_ah_attr::zeroed();
        route.port_num = self.port;
        route.sl = self.service_level;
        let has_gid = peer.gid.0 != [0; 16];
        let is_global = match self.link {
            LinkLayer::Ethernet if !has_gid => return refuse("its address has no GID, which RoCE needs"),
            LinkLayer::Ethernet
                if self.gid_kind == GidKind::RoceV2 && self.gid.is_ipv4() != peer.gid.is_ipv4() =>
            {
                return refuse(
                    "one side has an IPv4 address and the other an IPv6 one: choose GIDs of one kind on both \
                     (GDSYNC_GID_INDEX)",
                );
            }
            LinkLayer::Ethernet => true,
            LinkLayer::InfiniBand | LinkLayer::Unknown => {
                // The first half is the subnet prefix.
                let is_elsewhere = has_gid && peer.gid.0[..8] != self.gid.0[..8];
                if peer.lid == 0 && !(is_elsewhere || self.needs_grh) {
                    return refuse(
                        "its address has no LID, which InfiniBand needs: is it on another link or route?",
                    );
                }
                route.dlid = peer.lid;
                has_gid && (is_elsewhere || self.needs_grh)
            }
        };
        if is_global {
            route.is_global = 1;
            route.grh.dgid = ibv_gid { raw: peer.gid.0 };
            route.grh.sgid_index = self.gid_index;
            route.grh.hop_limit = HOPS;
            route.grh.traffic_class = self.traffic_class;
        }
        Ok(route)
    }

    /// Path MTU: the smallest of the requested one and those of both ports.
    fn mtu(&self, asked: u32, peer: &QpAddress) -> u32 {
        asked.min(self.mtu.unwrap_or(asked)).min(peer.mtu.unwrap_or(asked))
    }

    /// Builds a transition that passed [`QpAttr::check`]; `psn` is the first send PSN.
    pub(super) fn build(&self, attr: &QpAttr, psn: u32) -> Result<(ibv_qp_attr, mask)> {
        let mut out = ibv_qp_attr::zeroed();
        let mut given = mask::IBV_QP_STATE;
        let state = attr.state.expect("a checked transition has a target");
        out.qp_state = ibv_qp_state(state.0.into());
        if let Some(access) = attr.access {
            // The values are the same.
            out.qp_access_flags = ibv_access_flags::from_bits_retain(access.bits());
            given |= mask::IBV_QP_ACCESS_FLAGS;
        }
        if state == QpState::INIT {
            out.pkey_index = self.pkey_index;
            out.port_num = self.port;
            given |= mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT;
            if let Some(qkey) = self.qkey {
                out.qkey = qkey;
                given |= mask::IBV_QP_QKEY;
            }
        }
        if let Some(remote) = &attr.remote {
            out.ah_attr = self.route(remote)?;
            out.dest_qp_num = remote.qpn;
            out.rq_psn = remote.psn;
            let mtu = self.mtu(attr.path_mtu.unwrap_or(4096), remote);
            out.path_mtu = ibv_mtu(mtu_code(mtu).into());
            given |= mask::IBV_QP_AV | mask::IBV_QP_DEST_QPN | mask::IBV_QP_RQ_PSN | mask::IBV_QP_PATH_MTU;
        }
        let mut set = |value: Option<u8>, field: &mut u8, bit| {
            if let Some(value) = value {
                *field = value;
                given |= bit;
            }
        };
        set(attr.max_dest_rd_atomic, &mut out.max_dest_rd_atomic, mask::IBV_QP_MAX_DEST_RD_ATOMIC);
        set(attr.min_rnr_timer, &mut out.min_rnr_timer, mask::IBV_QP_MIN_RNR_TIMER);
        set(attr.timeout, &mut out.timeout, mask::IBV_QP_TIMEOUT);
        set(attr.retry_cnt, &mut out.retry_cnt, mask::IBV_QP_RETRY_CNT);
        set(attr.rnr_retry, &mut out.rnr_retry, mask::IBV_QP_RNR_RETRY);
        set(attr.max_rd_atomic, &mut out.max_rd_atomic, mask::IBV_QP_MAX_QP_RD_ATOMIC);
        if attr.timeout.is_some() || self.qkey.is_some() && state == QpState::RTS {
            // RTR to RTS.
            out.sq_psn = psn;
            given |= mask::IBV_QP_SQ_PSN;
        }
        Ok((out, given))
    }
}

impl Open {
    fn from(&self, qkey: Option<u32>) -> From {
        let (port, gid, config) = (self.port(), self.gid(), self.config());
        From {
            port: port.number,
            link: port.link,
            gid: gid.gid,
            gid_index: self.gid_index(),
            gid_kind: gid.kind,
            mtu: port.mtu,
            needs_grh: self.needs_grh(),
            pkey_index: config.pkey_index,
            service_level: config.service_level,
            traffic_class: config.traffic_class,
            qkey,
        }
    }

    /// Attributes of an address handle for a peer.
    ///
    /// # Errors
    /// [`Error::Peer`] for an address that this port cannot reach.
    pub(crate) fn route(&self, peer: &QpAddress) -> Result<ibv_ah_attr> {
        self.from(None).route(peer)
    }

    /// Builds a transition that passed [`QpAttr::check`] and its attribute mask; `psn` is the first send PSN, `qkey` of datagrams.
    ///
    /// # Errors
    /// [`Error::Peer`] for an address that this port cannot reach.
    pub(crate) fn step(&self, qkey: Option<u32>, psn: u32, attr: &QpAttr) -> Result<(ibv_qp_attr, mask)> {
        self.from(qkey).build(attr, psn)
    }

    /// Applies a transition that passed [`QpAttr::check`] to a queue pair in state `from`; `psn` is its first send PSN.
    ///
    /// # Errors
    /// [`Error::Peer`] for an address that this port cannot reach; [`Error::Verbs`] if the device refuses.
    ///
    /// # Safety
    /// `qp` must be a queue pair of this device that is not destroyed during the call.
    pub(crate) unsafe fn modify(
        &self,
        qp: *mut ibv_qp,
        qpn: u32,
        qkey: Option<u32>,
        psn: u32,
        from: QpState,
        attr: &QpAttr,
    ) -> Result<()> {
        let (mut raw, given) = self.step(qkey, psn, attr)?;
        // SAFETY: the caller guarantees that `qp` is live.
        let errno = unsafe { self.verbs().ibv_modify_qp(qp, &raw mut raw, given) };
        if errno == 0 {
            return Ok(());
        }
        let to = attr.state.unwrap_or(from);
        let limit = |most: i32| u64::try_from(most).unwrap_or(0);
        let asked =
            |what, value: Option<u8>, most| value.map(|value| Asked { what, value: value.into(), most });
        let asked = [
            asked("max_dest_rd_atomic", attr.max_dest_rd_atomic, limit(self.attr().max_qp_rd_atom)),
            asked("max_rd_atomic", attr.max_rd_atomic, limit(self.attr().max_qp_init_rd_atom)),
        ];
        let step = Step {
            from,
            to,
            attributes: describe(attr, &raw),
            port: self.port().number,
            gid_index: self.gid_index(),
            peer: attr.remote.map(|remote| remote.to_string()),
            asked: asked.into_iter().flatten().collect(),
        };
        let subject = format!("QP {qpn:#x} of {}", self.name());
        Err(failed("ibv_modify_qp", subject, &Call::Modify(step), errno))
    }
}

impl Open {
    /// Whether the device writes SENDs and WRITEs in address order, as seen by the CPU. Polling payload instead of
    /// completions requires it. `None` before rdma-core 36.
    ///
    /// # Safety
    /// `qp` must be a queue pair of this device that is not destroyed during the call.
    pub(crate) unsafe fn writes_in_order(&self, qp: *mut ibv_qp) -> Option<bool> {
        let ask = self.verbs().ibv_query_qp_data_in_order?;
        // SAFETY: the caller guarantees that `qp` is live; no flags are set.
        Some(
            [ibv_wr_opcode::IBV_WR_SEND, ibv_wr_opcode::IBV_WR_RDMA_WRITE]
                .into_iter()
                .all(|op| unsafe { ask(qp, op, 0) } == 1),
        )
    }
}

/// Attributes of a transition, for messages.
fn describe(attr: &QpAttr, raw: &ibv_qp_attr) -> String {
    let mut text = String::new();
    let mut add = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            let comma = if text.is_empty() { "" } else { ", " };
            write!(text, "{comma}{name} {value}").expect("text can be written to a string");
        }
    };
    add("access", attr.access.map(|access| format!("{access:?}")));
    add("remote", attr.remote.map(|remote| remote.to_string()));
    add("path_mtu", attr.path_mtu.map(|_| (128u32 << raw.path_mtu.0).to_string()));
    add("max_dest_rd_atomic", attr.max_dest_rd_atomic.map(|v| v.to_string()));
    add("min_rnr_timer", attr.min_rnr_timer.map(|v| v.to_string()));
    add("timeout", attr.timeout.map(|v| v.to_string()));
    add("retry_cnt", attr.retry_cnt.map(|v| v.to_string()));
    add("rnr_retry", attr.rnr_retry.map(|v| v.to_string()));
    add("max_rd_atomic", attr.max_rd_atomic.map(|v| v.to_string()));
    if text.is_empty() { "no attributes".into() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gdsync_device::Access;

    const IPV4: Gid = Gid([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1]);
    const LOCAL: Gid = Gid([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);

    fn roce() -> From {
        From {
            port: 2,
            link: LinkLayer::Ethernet,
            gid: IPV4,
            gid_index: 3,
            gid_kind: GidKind::RoceV2,
            mtu: Some(1024),
            needs_grh: false,
            pkey_index: 1,
            service_level: 4,
            traffic_class: 106,
            qkey: None,
        }
    }

    fn infiniband() -> From {
        From {
            link: LinkLayer::InfiniBand,
            gid: LOCAL,
            gid_kind: GidKind::IbOrRoceV1,
            mtu: Some(4096),
            ..roce()
        }
    }

    fn peer(gid: Gid) -> QpAddress {
        QpAddress::new(gid, 0x11, 0x22)
    }

    fn rtr(remote: QpAddress) -> QpAttr {
        QpAttr::to(QpState::RTR).remote(remote).path_mtu(4096).max_dest_rd_atomic(16).min_rnr_timer(12)
    }

    #[test]
    fn each_transition_sets_the_required_attributes() {
        let from = roce();
        let (_, reset) = from.build(&QpAttr::to(QpState::RESET), 0).unwrap();
        let (_, error) = from.build(&QpAttr::to(QpState::ERR), 0).unwrap();
        assert_eq!((reset, error), (mask::IBV_QP_STATE, mask::IBV_QP_STATE));

        let access = Access::REMOTE_WRITE | Access::REMOTE_READ;
        let (attr, given) = from.build(&QpAttr::to(QpState::INIT).access(access), 0).unwrap();
        let expected =
            mask::IBV_QP_STATE | mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS;
        assert_eq!(given, expected);
        assert_eq!((attr.pkey_index, attr.port_num, attr.qp_state.0), (1, 2, 1));
        let flags = ibv_access_flags::IBV_ACCESS_REMOTE_WRITE | ibv_access_flags::IBV_ACCESS_REMOTE_READ;
        assert_eq!(attr.qp_access_flags, flags);

        let (attr, given) = from.build(&rtr(peer(IPV4)), 7).unwrap();
        let expected = mask::IBV_QP_STATE
            | mask::IBV_QP_AV
            | mask::IBV_QP_PATH_MTU
            | mask::IBV_QP_DEST_QPN
            | mask::IBV_QP_RQ_PSN
            | mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | mask::IBV_QP_MIN_RNR_TIMER;
        assert_eq!(given, expected);
        assert_eq!(
            (attr.dest_qp_num, attr.rq_psn, attr.max_dest_rd_atomic, attr.min_rnr_timer),
            (0x11, 0x22, 16, 12)
        );

        let rts = QpAttr::to(QpState::RTS).timeout(14).retry_cnt(7).rnr_retry(6).max_rd_atomic(8);
        let (attr, given) = from.build(&rts, 0xabc).unwrap();
        let expected = mask::IBV_QP_STATE
            | mask::IBV_QP_SQ_PSN
            | mask::IBV_QP_TIMEOUT
            | mask::IBV_QP_RETRY_CNT
            | mask::IBV_QP_RNR_RETRY
            | mask::IBV_QP_MAX_QP_RD_ATOMIC;
        assert_eq!(given, expected);
        assert_eq!(
            (attr.sq_psn, attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.max_rd_atomic),
            (0xabc, 14, 7, 6, 8)
        );

        let datagrams = From { qkey: Some(9), ..from };
        let (attr, given) = datagrams.build(&QpAttr::to(QpState::INIT), 0).unwrap();
        let expected = mask::IBV_QP_STATE | mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_QKEY;
        assert_eq!((attr.qkey, given), (9, expected));
        let (_, given) = datagrams.build(&QpAttr::to(QpState::RTR), 0).unwrap();
        assert_eq!(given, mask::IBV_QP_STATE);
        let (attr, given) = datagrams.build(&QpAttr::to(QpState::RTS), 0xabc).unwrap();
        assert_eq!((attr.sq_psn, given), (0xabc, mask::IBV_QP_STATE | mask::IBV_QP_SQ_PSN));

        // A change in RTS.
        let (_, given) = from.build(&QpAttr::to(QpState::RTS).min_rnr_timer(1), 0).unwrap();
        assert_eq!(given, mask::IBV_QP_STATE | mask::IBV_QP_MIN_RNR_TIMER);
    }

    #[test]
    fn roce_addresses_are_global() {
        let (attr, _) = roce().build(&rtr(peer(IPV4)), 0).unwrap();
        let route = attr.ah_attr;
        assert_eq!((route.is_global, route.port_num, route.sl, route.dlid), (1, 2, 4, 0));
        assert_eq!((route.grh.sgid_index, route.grh.hop_limit, route.grh.traffic_class), (3, HOPS, 106));
        // SAFETY: every bit pattern of the union is a valid byte array.
        assert_eq!(unsafe { route.grh.dgid.raw }, IPV4.0);
    }

    #[test]
    fn infiniband_addresses_are_lids_and_global_between_subnets() {
        let (attr, _) = infiniband().build(&rtr(peer(LOCAL).with_lid(9)), 0).unwrap();
        assert_eq!((attr.ah_attr.is_global, attr.ah_attr.dlid), (0, 9));
        // A peer of another program that sends no GID.
        let (attr, _) = infiniband().build(&rtr(peer(Gid([0; 16])).with_lid(9)), 0).unwrap();
        assert_eq!((attr.ah_attr.is_global, attr.ah_attr.dlid), (0, 9));
        let mut elsewhere = LOCAL;
        elsewhere.0[7] = 1;
        let (attr, _) = infiniband().build(&rtr(peer(elsewhere).with_lid(9)), 0).unwrap();
        assert_eq!((attr.ah_attr.is_global, attr.ah_attr.dlid), (1, 9));
        let always = From { needs_grh: true, ..infiniband() };
        assert_eq!(always.build(&rtr(peer(LOCAL).with_lid(9)), 0).unwrap().0.ah_attr.is_global, 1);
    }

    #[test]
    fn path_mtu_is_the_minimum() {
        let code = |from: From, remote| from.build(&rtr(remote), 0).unwrap().0.path_mtu;
        assert_eq!(code(roce(), peer(IPV4)), ibv_mtu::IBV_MTU_1024);
        assert_eq!(code(roce(), peer(IPV4).with_mtu(4096)), ibv_mtu::IBV_MTU_1024);
        assert_eq!(code(roce(), peer(IPV4).with_mtu(512)), ibv_mtu::IBV_MTU_512);
        assert_eq!(code(From { mtu: None, ..roce() }, peer(IPV4)), ibv_mtu::IBV_MTU_4096);
        assert_eq!(code(From { mtu: None, ..roce() }, peer(IPV4).with_mtu(2048)), ibv_mtu::IBV_MTU_2048);
    }

    #[test]
    fn unreachable_addresses_are_refused() {
        let why = |from: From, remote| match from.build(&rtr(remote), 0) {
            Err(Error::Peer { why, .. }) => why,
            other => panic!("{:?}", other.map(|_| ())),
        };
        assert!(why(roce(), peer(Gid([0; 16]))).contains("no GID"));
        assert!(why(roce(), peer(LOCAL)).contains("GDSYNC_GID_INDEX"));
        assert!(why(infiniband(), peer(LOCAL)).contains("no LID"));
        // RoCE v1 has no IP header.
        assert!(From { gid_kind: GidKind::IbOrRoceV1, ..roce() }.build(&rtr(peer(LOCAL)), 0).is_ok());
    }

    #[test]
    fn attributes_are_described_as_sent() {
        let attr = rtr(peer(IPV4));
        let (raw, _) = roce().build(&attr, 0).unwrap();
        let text = describe(&attr, &raw);
        assert!(text.contains("path_mtu 1024") && text.contains("max_dest_rd_atomic 16"), "{text}");
        assert_eq!(describe(&QpAttr::to(QpState::ERR), &raw), "no attributes");
    }
}
