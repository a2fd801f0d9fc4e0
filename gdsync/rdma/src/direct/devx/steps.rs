//! Queue pair transitions as firmware commands.

use rdma_core_sys::verbs::{ibv_access_flags as access, ibv_qp_attr, ibv_qp_attr_mask as mask};

use super::mailbox::{Command, MIGRATED, Opcode, end, step};
use super::path::Route;
use gdsync_device::QpState;

/// Optional parameter bits (`MLX5_QP_OPTPAR_*`).
const RRE: u32 = 1 << 1;
const RAE: u32 = 1 << 2;
const RWE: u32 = 1 << 3;
const RNR_TIMEOUT: u32 = 1 << 6;

/// `log_msg_max`: 1 GiB.
const LONGEST: u32 = 30;
/// `atomic_mode`: 8 bytes, as in InfiniBand.
const EIGHT_BYTES: u32 = 3;
/// Offset of the primary path in the context.
const PATH: usize = 0xc0;

/// Command for the checked transition `from` to `to` with `attr`; `given` is its path.
pub(super) fn command(
    qpn: u32,
    (from, to): (QpState, QpState),
    attr: &ibv_qp_attr,
    given: mask,
    route: Option<&Route>,
) -> Command {
    let opcode = match (from, to) {
        (_, QpState::ERR) => return end(Opcode::ToErr, qpn),
        (_, QpState::RESET) => return end(Opcode::ToRst, qpn),
        (QpState::RESET, _) => Opcode::Rst2Init,
        (QpState::INIT, QpState::INIT) => Opcode::Init2Init,
        (QpState::INIT, _) => Opcode::Init2Rtr,
        (QpState::RTR, _) => Opcode::Rtr2Rts,
        _ => Opcode::Rts2Rts,
    };
    let has = |bit| given.contains(bit);
    // Required parameters need no bit.
    let mut optional = 0;
    if has(mask::IBV_QP_ACCESS_FLAGS) && opcode != Opcode::Rst2Init {
        optional |= RRE | RAE | RWE;
    }
    if has(mask::IBV_QP_MIN_RNR_TIMER) && opcode != Opcode::Init2Rtr {
        optional |= RNR_TIMEOUT;
    }
    let mut command = step(opcode, qpn, optional).set(0x13, 2, MIGRATED);
    if has(mask::IBV_QP_ACCESS_FLAGS) {
        let may = |bit| u32::from(attr.qp_access_flags.contains(bit));
        let atomic = may(access::IBV_ACCESS_REMOTE_ATOMIC);
        command = command
            .set(0x48c, 4, atomic * EIGHT_BYTES)
            .set(0x490, 1, may(access::IBV_ACCESS_REMOTE_READ))
            .set(0x491, 1, may(access::IBV_ACCESS_REMOTE_WRITE))
            .set(0x492, 1, atomic);
    }
    if has(mask::IBV_QP_PORT) {
        command =
            command.set(PATH + 0x10, 16, attr.pkey_index.into()).set(PATH + 0x128, 8, attr.port_num.into());
    }
    if let Some(route) = route {
        command = route
            .put(command)
            .set(0x40, 3, attr.path_mtu.0)
            .set(0x43, 5, LONGEST)
            .set(0xa8, 24, attr.dest_qp_num)
            .set(0x4a8, 24, attr.rq_psn);
    }
    if has(mask::IBV_QP_MIN_RNR_TIMER) {
        command = command.set(0x4a3, 5, attr.min_rnr_timer.into());
    }
    if has(mask::IBV_QP_MAX_DEST_RD_ATOMIC) {
        command = command.set(0x488, 3, log(attr.max_dest_rd_atomic));
    }
    if has(mask::IBV_QP_MAX_QP_RD_ATOMIC) {
        command = command.set(0x388, 3, log(attr.max_rd_atomic));
    }
    if has(mask::IBV_QP_SQ_PSN) {
        command = command
            .set(PATH + 0x40, 5, attr.timeout.into())
            .set(0x38d, 3, attr.retry_cnt.into())
            .set(0x390, 3, attr.rnr_retry.into())
            .set(0x3c8, 24, attr.sq_psn);
    }
    command
}

/// The firmware takes powers of two; rounds down to stay within the peer's limit.
fn log(count: u8) -> u32 {
    count.max(1).ilog2()
}

#[cfg(test)]
#[path = "steps/tests.rs"]
mod tests;
