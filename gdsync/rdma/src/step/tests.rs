//! Attributes of each transition.

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
    }
}

fn infiniband() -> From {
    From { link: LinkLayer::InfiniBand, gid: LOCAL, gid_kind: GidKind::IbOrRoceV1, mtu: Some(4096), ..roce() }
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
