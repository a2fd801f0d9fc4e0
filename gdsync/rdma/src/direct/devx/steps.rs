//! Queue pair transitions as firmware commands, with the network path to the peer.

use rdma_core_sys::mlx5::ifc::{Opcode, path, qpc};
use rdma_core_sys::verbs::{ibv_access_flags as access, ibv_ah_attr, ibv_qp_attr, ibv_qp_attr_mask as mask};

use super::mailbox::{Command, MIGRATED, end, step};
use crate::{GidEntry, GidKind, LinkLayer};
use gdsync_device::QpState;
use gdsync_device::error::{Error, Result};

/// Optional parameter bits (`MLX5_QP_OPTPAR_*`).
const RRE: u32 = 1 << 1;
const RAE: u32 = 1 << 2;
const RWE: u32 = 1 << 3;
const RNR_TIMEOUT: u32 = 1 << 6;

/// `log_msg_max`: 1 GiB.
const LONGEST: u32 = 30;
/// `atomic_mode`: 8 bytes, as in InfiniBand.
const EIGHT_BYTES: u32 = 3;

/// Command for the checked transition `from` to `to` with `attr`; `given` is its path.
pub(super) fn command(
    qpn: u32,
    (from, to): (QpState, QpState),
    attr: &ibv_qp_attr,
    given: mask,
    route: Option<&Route>,
) -> Command {
    let opcode = match (from, to) {
        (_, QpState::ERR) => return end(Opcode::TO_ERR_QP, qpn),
        (_, QpState::RESET) => return end(Opcode::TO_RST_QP, qpn),
        (QpState::RESET, _) => Opcode::RST2INIT_QP,
        (QpState::INIT, QpState::INIT) => Opcode::INIT2INIT_QP,
        (QpState::INIT, _) => Opcode::INIT2RTR_QP,
        (QpState::RTR, _) => Opcode::RTR2RTS_QP,
        _ => Opcode::RTS2RTS_QP,
    };
    let has = |bit| given.contains(bit);
    // Required parameters need no bit.
    let mut optional = 0;
    if has(mask::IBV_QP_ACCESS_FLAGS) && opcode != Opcode::RST2INIT_QP {
        optional |= RRE | RAE | RWE;
    }
    if has(mask::IBV_QP_MIN_RNR_TIMER) && opcode != Opcode::INIT2RTR_QP {
        optional |= RNR_TIMEOUT;
    }
    let mut command = step(opcode, qpn, optional).set(qpc::PM_STATE, MIGRATED);
    if has(mask::IBV_QP_ACCESS_FLAGS) {
        let may = |bit| u32::from(attr.qp_access_flags.contains(bit));
        let atomic = may(access::IBV_ACCESS_REMOTE_ATOMIC);
        command = command
            .set(qpc::ATOMIC_MODE, atomic * EIGHT_BYTES)
            .set(qpc::RRE, may(access::IBV_ACCESS_REMOTE_READ))
            .set(qpc::RWE, may(access::IBV_ACCESS_REMOTE_WRITE))
            .set(qpc::RAE, atomic);
    }
    if has(mask::IBV_QP_PORT) {
        command = command
            .set(path::PKEY_INDEX, attr.pkey_index.into())
            .set(path::VHCA_PORT_NUM, attr.port_num.into());
    }
    if let Some(route) = route {
        command = route
            .put(command)
            .set(qpc::MTU, attr.path_mtu.0)
            .set(qpc::LOG_MSG_MAX, LONGEST)
            .set(qpc::REMOTE_QPN, attr.dest_qp_num)
            .set(qpc::NEXT_RCV_PSN, attr.rq_psn);
    }
    if has(mask::IBV_QP_MIN_RNR_TIMER) {
        command = command.set(qpc::MIN_RNR_NAK, attr.min_rnr_timer.into());
    }
    if has(mask::IBV_QP_MAX_DEST_RD_ATOMIC) {
        command = command.set(qpc::LOG_RRA_MAX, log(attr.max_dest_rd_atomic));
    }
    if has(mask::IBV_QP_MAX_QP_RD_ATOMIC) {
        command = command.set(qpc::LOG_SRA_MAX, log(attr.max_rd_atomic));
    }
    if has(mask::IBV_QP_SQ_PSN) {
        command = command
            .set(path::ACK_TIMEOUT, attr.timeout.into())
            .set(qpc::RETRY_COUNT, attr.retry_cnt.into())
            .set(qpc::RNR_RETRY, attr.rnr_retry.into())
            .set(qpc::NEXT_SEND_PSN, attr.sq_psn);
    }
    command
}

/// The firmware takes powers of two; rounds down to stay within the peer's limit.
fn log(count: u8) -> u32 {
    count.max(1).ilog2()
}

/// A network path.
#[derive(Clone, Copy, Debug)]
pub(super) struct Route {
    pub(super) attr: ibv_ah_attr,
    pub(super) link: LinkLayer,
    pub(super) kind: GidKind,
    /// MAC address of the peer's port, on Ethernet.
    pub(super) mac: [u8; 6],
    pub(super) udp_port: u16,
}

/// UDP source port of a connection: equal on both sides, different between connections (`rdma_get_udp_sport` of Linux).
pub(super) fn udp_port(local_qpn: u32, remote_qpn: u32) -> u16 {
    let product = u64::from(local_qpn) * u64::from(remote_qpn);
    let folded = product ^ product >> 20 ^ product >> 40;
    let label = folded & 0xf_ffff;
    let port = (label & 0x3fff) ^ ((label & 0xf_c000) >> 14) | 0xc000;
    u16::try_from(port).expect("16 bits are left")
}

/// Kind of a GID. The firmware must know the RoCE version, which old kernels do not report.
///
/// # Errors
/// [`Error::Device`] if it is unknown.
pub(super) fn known_kind(link: LinkLayer, entry: GidEntry, device: &str) -> Result<GidKind> {
    if link != LinkLayer::Ethernet || entry.kind != GidKind::Unknown {
        return Ok(entry.kind);
    }
    if entry.gid.is_ipv4() {
        return Ok(GidKind::RoceV2);
    }
    let why = format!(
        "the kernel does not tell whether entry {} of its GID table is of RoCE v1 or v2, which queues in GPU memory need: choose an \
         entry with an IPv4 address (GDSYNC_GID_INDEX), which is taken for v2, or leave the queues in host memory (OnGpu::empty())",
        entry.index
    );
    Err(Error::Device { device: device.to_owned(), why })
}

impl Route {
    /// Writes the path into a command's context, as mlx5_ib does.
    pub(super) fn put(&self, command: Command) -> Command {
        let grh = &self.attr.grh;
        let sl = u32::from(self.attr.sl);
        let mut command = match self.link {
            LinkLayer::Ethernet => {
                let is_v2 = self.kind == GidKind::RoceV2;
                let command = command.put(path::RMAC, &self.mac).set(path::ETH_PRIO, sl & 7);
                if is_v2 {
                    command
                        .set(path::DSCP, u32::from(grh.traffic_class >> 2))
                        .set(path::UDP_SPORT, self.udp_port.into())
                } else {
                    command
                }
            }
            LinkLayer::InfiniBand | LinkLayer::Unknown => command
                .set(path::GRH, self.attr.is_global.into())
                .set(path::RLID, self.attr.dlid.into())
                .set(path::SL, sl),
        };
        if self.attr.is_global != 0 {
            // SAFETY: every bit pattern of the union is a valid byte array.
            let gid = unsafe { grh.dgid.raw };
            command = command
                .set(path::SRC_ADDR_INDEX, grh.sgid_index.into())
                .set(path::HOP_LIMIT, grh.hop_limit.into())
                .set(path::TCLASS, grh.traffic_class.into())
                .set(path::FLOW_LABEL, grh.flow_label & 0xf_ffff)
                .put(path::RGID, &gid);
        }
        command.set(path::VHCA_PORT_NUM, self.attr.port_num.into())
    }
}

#[cfg(test)]
mod tests {
    use rdma_core_sys::verbs::{ibv_ah_attr, ibv_gid, ibv_global_route, ibv_mtu};

    use super::*;
    use crate::{GidKind, LinkLayer};
    use gdsync_device::Gid;

    /// Nonzero bytes and their offsets.
    fn written(command: &Command) -> Vec<(usize, u8)> {
        command.bytes().iter().copied().enumerate().filter(|&(_, byte)| byte != 0).collect()
    }

    /// Offsets of the context and of its path.
    const CONTEXT: usize = 24;
    const PATH_AT: usize = CONTEXT + 24;

    #[test]
    fn init_sets_access_and_port() {
        let mut attr = ibv_qp_attr::zeroed();
        attr.qp_access_flags = access::IBV_ACCESS_REMOTE_WRITE | access::IBV_ACCESS_REMOTE_ATOMIC;
        (attr.port_num, attr.pkey_index) = (2, 0x0304);
        let given =
            mask::IBV_QP_STATE | mask::IBV_QP_ACCESS_FLAGS | mask::IBV_QP_PORT | mask::IBV_QP_PKEY_INDEX;
        let command = command(5, (QpState::RESET, QpState::INIT), &attr, given, None);
        let expected = [
            (0, 5),
            (1, 2),
            (11, 5),
            (CONTEXT + 2, 0x18),
            (PATH_AT + 2, 3),
            (PATH_AT + 3, 4),
            (PATH_AT + 37, 2),
            (CONTEXT + 145, 3),
            (CONTEXT + 146, 0b0110_0000),
        ];
        assert_eq!(written(&command), expected);
    }

    fn route(link: LinkLayer) -> Route {
        let mut attr = ibv_ah_attr::zeroed();
        (attr.is_global, attr.port_num, attr.sl, attr.dlid) = (1, 1, 5, 0x0708);
        attr.grh = ibv_global_route {
            dgid: ibv_gid { raw: [9; 16] },
            sgid_index: 3,
            hop_limit: 64,
            traffic_class: 0x68,
            ..ibv_global_route::zeroed()
        };
        Route { attr, link, kind: GidKind::RoceV2, mac: [1, 2, 3, 4, 5, 6], udp_port: 0xc0de }
    }

    #[test]
    fn rtr_sets_the_path() {
        let mut attr = ibv_qp_attr::zeroed();
        (attr.dest_qp_num, attr.rq_psn, attr.path_mtu) = (0x12_3456, 0x65_4321, ibv_mtu::IBV_MTU_4096);
        (attr.min_rnr_timer, attr.max_dest_rd_atomic) = (12, 16);
        let given = mask::IBV_QP_STATE | mask::IBV_QP_MIN_RNR_TIMER | mask::IBV_QP_MAX_DEST_RD_ATOMIC;
        let step = (QpState::INIT, QpState::RTR);
        let first = [
            (0, 5),
            (1, 3),
            (11, 1),
            (CONTEXT + 2, 0x18),
            (CONTEXT + 8, 5 << 5 | 30),
            (CONTEXT + 21, 0x12),
            (CONTEXT + 22, 0x34),
            (CONTEXT + 23, 0x56),
        ];
        let gid = (0..16).map(|n| (PATH_AT + 16 + n, 9));
        let last = [
            (CONTEXT + 145, 4 << 5),
            (CONTEXT + 148, 12),
            (CONTEXT + 149, 0x65),
            (CONTEXT + 150, 0x43),
            (CONTEXT + 151, 0x21),
        ];
        let roce = command(1, step, &attr, given, Some(&route(LinkLayer::Ethernet)));
        let middle = [(PATH_AT + 9, 3), (PATH_AT + 11, 64), (PATH_AT + 12, 0x06), (PATH_AT + 13, 0x80)];
        let mac = [1, 2, 3, 4, 5, 6].into_iter().enumerate().map(|(n, byte)| (PATH_AT + 38 + n, byte));
        let tail = [
            (PATH_AT + 33, 0x1a),
            (PATH_AT + 34, 0xc0),
            (PATH_AT + 35, 0xde),
            (PATH_AT + 36, 0x50),
            (PATH_AT + 37, 1),
        ];
        let expected: Vec<_> =
            first.into_iter().chain(middle).chain(gid.clone()).chain(tail).chain(mac).chain(last).collect();
        assert_eq!(written(&roce), expected);

        let ib = command(1, step, &attr, given, Some(&route(LinkLayer::InfiniBand)));
        let global = [(PATH_AT + 5, 0x80), (PATH_AT + 6, 7), (PATH_AT + 7, 8)];
        let tail = [(PATH_AT + 36, 0x05), (PATH_AT + 37, 1)];
        let expected: Vec<_> =
            first.into_iter().chain(global).chain(middle).chain(gid).chain(tail).chain(last).collect();
        assert_eq!(written(&ib), expected);
    }

    #[test]
    fn rts_sets_timeouts_and_retries() {
        let mut attr = ibv_qp_attr::zeroed();
        (attr.timeout, attr.retry_cnt, attr.rnr_retry) = (20, 7, 6);
        (attr.sq_psn, attr.max_rd_atomic) = (0xab_cdef, 4);
        let given = mask::IBV_QP_STATE | mask::IBV_QP_SQ_PSN | mask::IBV_QP_MAX_QP_RD_ATOMIC;
        let command = command(1, (QpState::RTR, QpState::RTS), &attr, given, None);
        let expected = [
            (0, 5),
            (1, 4),
            (11, 1),
            (CONTEXT + 2, 0x18),
            (PATH_AT + 8, 20 << 3),
            (CONTEXT + 113, 2 << 5 | 7),
            (CONTEXT + 114, 6 << 5),
            (CONTEXT + 121, 0xab),
            (CONTEXT + 122, 0xcd),
            (CONTEXT + 123, 0xef),
        ];
        assert_eq!(written(&command), expected);
    }

    #[test]
    fn optional_parameters_are_marked() {
        let mut attr = ibv_qp_attr::zeroed();
        attr.min_rnr_timer = 3;
        let given = mask::IBV_QP_STATE | mask::IBV_QP_MIN_RNR_TIMER | mask::IBV_QP_ACCESS_FLAGS;
        let command = command(1, (QpState::RTS, QpState::RTS), &attr, given, None);
        let expected = [(0, 5), (1, 5), (11, 1), (19, 0x4e), (CONTEXT + 2, 0x18), (CONTEXT + 148, 3)];
        assert_eq!(written(&command), expected);
    }

    #[test]
    fn connections_have_distinct_udp_ports() {
        assert_eq!(udp_port(0x12, 0x34), udp_port(0x34, 0x12));
        assert_ne!(udp_port(0x12, 0x34), udp_port(0x12, 0x35));
        assert!((0..1000).all(|n| udp_port(n * 7919, 0xff_ffff - n) >= 0xc000));
    }

    fn gid(bytes: &[(usize, u8)]) -> Gid {
        let mut gid = [0; 16];
        bytes.iter().for_each(|&(at, byte)| gid[at] = byte);
        Gid(gid)
    }

    #[test]
    fn unknown_gid_kind_is_v2_if_ipv4_else_refused() {
        use GidKind::{IbOrRoceV1, RoceV2, Unknown};
        let ipv4 = gid(&[(10, 0xff), (11, 0xff), (12, 10), (15, 1)]);
        let other = gid(&[(0, 0xfe), (1, 0x80), (15, 1)]);
        let known = |link, gid, kind| known_kind(link, GidEntry { index: 3, gid, kind }, "mlx5_0");
        assert_eq!(known(LinkLayer::Ethernet, ipv4, Unknown).unwrap(), RoceV2);
        assert_eq!(known(LinkLayer::Ethernet, ipv4, IbOrRoceV1).unwrap(), IbOrRoceV1);
        assert_eq!(known(LinkLayer::Ethernet, other, RoceV2).unwrap(), RoceV2);
        assert_eq!(known(LinkLayer::InfiniBand, other, Unknown).unwrap(), Unknown);
        let text = known(LinkLayer::Ethernet, other, Unknown).unwrap_err().to_string();
        for word in ["mlx5_0", "entry 3", "RoCE v1 or v2", "GDSYNC_GID_INDEX", "OnGpu::empty()"] {
            assert!(text.contains(word), "'{text}' lacks '{word}'");
        }
    }
}
