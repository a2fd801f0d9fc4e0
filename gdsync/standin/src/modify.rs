//! `ibv_modify_qp`: checked as the kernel checks it (`qp_state_table` of its `drivers/infiniband/core/verbs.c`), then done by
//! the HCA.

use std::ffi::c_int;
use std::time::Duration;

use gdsync::Error;
use gdsync::hca::Gid;
use gdsync::verbs::{Access, QpAddress, QpAttr, QpState};
use rdma_core_sys::verbs::{
    ibv_access_flags as access, ibv_ah_attr, ibv_mtu, ibv_qp_attr, ibv_qp_attr_mask as mask, ibv_qp_state,
};

use crate::context::{ACTIVE_MTU, ENTRIES, PORT, ROUTED, has_atomics};
use crate::errno::complain;
use crate::hca::Quirk;
use crate::qp::Qp;

/// How long a peer may take to be found.
const PATIENCE: Duration = Duration::from_secs(10);
/// READs and atomics that may be outstanding.
pub(crate) const MAX_RD_ATOMIC: u8 = 16;

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_modify_qp(qp: &Qp, attr: &ibv_qp_attr, attr_mask: mask) -> c_int {
    match modify(qp, attr, attr_mask) {
        Ok(state) => {
            qp.show_state(state);
            0
        }
        Err(errno) => errno,
    }
}

fn modify(qp: &Qp, attr: &ibv_qp_attr, given: mask) -> Result<ibv_qp_state, c_int> {
    qp.finish();
    let state = qp.hca.card.state(qp.qpn).map_err(|_| libc::EINVAL)?;
    let from = ibv_qp_state(u32::from(state.0));
    if given.contains(mask::IBV_QP_CUR_STATE) && attr.cur_qp_state != from {
        return Err(libc::EINVAL);
    }
    let to = if given.contains(mask::IBV_QP_STATE) { attr.qp_state } else { from };
    check(from, to, given)?;
    let rights =
        if given.contains(mask::IBV_QP_ACCESS_FLAGS) { attr.qp_access_flags } else { access::empty() };
    if rights.contains(access::IBV_ACCESS_REMOTE_ATOMIC) && !has_atomics() {
        return Err(libc::EOPNOTSUPP);
    }
    ranges(attr, given)?;

    let has = |bit| given.contains(bit);
    let target = u8::try_from(to.0).map_err(|_| libc::EINVAL)?;
    let mut step = QpAttr::to(QpState(target));
    if has(mask::IBV_QP_ACCESS_FLAGS) {
        step.access = Some(Access::from_bits_truncate(attr.qp_access_flags.bits()));
    }
    if has(mask::IBV_QP_AV) {
        step.remote = Some(remote(attr)?);
    }
    step.path_mtu = has(mask::IBV_QP_PATH_MTU).then_some(128 << attr.path_mtu.0);
    step.max_dest_rd_atomic = has(mask::IBV_QP_MAX_DEST_RD_ATOMIC).then_some(attr.max_dest_rd_atomic);
    step.min_rnr_timer = has(mask::IBV_QP_MIN_RNR_TIMER).then_some(attr.min_rnr_timer);
    step.timeout = has(mask::IBV_QP_TIMEOUT).then_some(attr.timeout);
    step.retry_cnt = has(mask::IBV_QP_RETRY_CNT).then_some(attr.retry_cnt);
    step.rnr_retry = has(mask::IBV_QP_RNR_RETRY).then_some(attr.rnr_retry);
    step.max_rd_atomic = has(mask::IBV_QP_MAX_QP_RD_ATOMIC).then_some(attr.max_rd_atomic);
    if to == ibv_qp_state::IBV_QPS_ERR && Quirk::LateFlushes.is_on() {
        qp.fail_late();
        return Ok(to);
    }
    let psn = has(mask::IBV_QP_SQ_PSN).then_some(attr.sq_psn & 0x00ff_ffff);
    qp.hca.card.modify_qp(qp.qpn, &step, psn, PATIENCE).map_err(|error| refused(&error))?;
    if to == ibv_qp_state::IBV_QPS_RESET {
        qp.forget();
    }
    remember(&mut qp.attr.lock(), attr, given);
    Ok(to)
}

/// Why the HCA did not do it.
fn refused(error: &Error) -> c_int {
    complain(format!("ibv_modify_qp: {error}"));
    match error {
        Error::Peer { .. } | Error::Deadline { .. } => libc::ETIMEDOUT,
        _ => libc::EINVAL,
    }
}

/// # Errors
/// `EINVAL`
fn ranges(attr: &ibv_qp_attr, given: mask) -> Result<(), c_int> {
    let bad = [
        (mask::IBV_QP_PORT, attr.port_num != PORT),
        (mask::IBV_QP_PKEY_INDEX, attr.pkey_index != 0),
        (mask::IBV_QP_PATH_MTU, !(ibv_mtu::IBV_MTU_256..=ACTIVE_MTU).contains(&attr.path_mtu)),
        (mask::IBV_QP_MIN_RNR_TIMER, attr.min_rnr_timer > 31),
        (mask::IBV_QP_TIMEOUT, attr.timeout > 31),
        (mask::IBV_QP_RETRY_CNT, attr.retry_cnt > 7),
        (mask::IBV_QP_RNR_RETRY, attr.rnr_retry > 7),
        (mask::IBV_QP_MAX_DEST_RD_ATOMIC, attr.max_dest_rd_atomic > MAX_RD_ATOMIC),
        (mask::IBV_QP_MAX_QP_RD_ATOMIC, attr.max_rd_atomic > MAX_RD_ATOMIC),
        (mask::IBV_QP_DEST_QPN, attr.dest_qp_num >> 24 != 0),
        (mask::IBV_QP_ALT_PATH | mask::IBV_QP_PATH_MIG_STATE, true),
    ];
    if bad.iter().any(|&(bits, is_bad)| is_bad && given.intersects(bits)) {
        Err(libc::EINVAL)
    } else {
        Ok(())
    }
}

/// The peer that an address vector and its companions name.
fn remote(attr: &ibv_qp_attr) -> Result<QpAddress, c_int> {
    let ibv_ah_attr { grh, is_global, port_num, .. } = attr.ah_attr;
    // RoCE has no addresses but global ones.
    if port_num != PORT || is_global == 0 || grh.sgid_index >= ENTRIES {
        return Err(libc::EINVAL);
    }
    if grh.sgid_index != ROUTED {
        complain(format!("GID index {} leads nowhere: index {ROUTED} is RoCE v2", grh.sgid_index));
        return Err(libc::EINVAL);
    }
    if grh.hop_limit == 0 {
        complain("a path with hop limit 0 ends at the first router");
        return Err(libc::EINVAL);
    }
    // SAFETY: all fields of the union are plain bytes.
    let gid = Gid(unsafe { grh.dgid.raw });
    Ok(QpAddress::new(gid, attr.dest_qp_num, attr.rq_psn & 0x00ff_ffff))
}

/// For `ibv_query_qp`.
fn remember(known: &mut ibv_qp_attr, attr: &ibv_qp_attr, given: mask) {
    macro_rules! keep {
        ($($bit:ident: $($field:ident),*;)*) => {
            $(if given.contains(mask::$bit) {
                $(known.$field = attr.$field;)*
            })*
        };
    }
    keep! {
        IBV_QP_ACCESS_FLAGS: qp_access_flags;
        IBV_QP_PKEY_INDEX: pkey_index;
        IBV_QP_PORT: port_num;
        IBV_QP_AV: ah_attr;
        IBV_QP_PATH_MTU: path_mtu;
        IBV_QP_TIMEOUT: timeout;
        IBV_QP_RETRY_CNT: retry_cnt;
        IBV_QP_RNR_RETRY: rnr_retry;
        IBV_QP_RQ_PSN: rq_psn;
        IBV_QP_SQ_PSN: sq_psn;
        IBV_QP_MAX_QP_RD_ATOMIC: max_rd_atomic;
        IBV_QP_MAX_DEST_RD_ATOMIC: max_dest_rd_atomic;
        IBV_QP_MIN_RNR_TIMER: min_rnr_timer;
        IBV_QP_DEST_QPN: dest_qp_num;
    }
}

/// What a step takes: attributes that must be given, and those that may.
fn step(from: ibv_qp_state, to: ibv_qp_state) -> Option<(mask, mask)> {
    let first = mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS;
    let paths = mask::IBV_QP_ALT_PATH | mask::IBV_QP_PATH_MIG_STATE;
    let running = mask::IBV_QP_CUR_STATE | paths | mask::IBV_QP_ACCESS_FLAGS | mask::IBV_QP_MIN_RNR_TIMER;
    Some(match (from, to) {
        (_, ibv_qp_state::IBV_QPS_RESET | ibv_qp_state::IBV_QPS_ERR) => (mask::empty(), mask::empty()),
        (ibv_qp_state::IBV_QPS_RESET, ibv_qp_state::IBV_QPS_INIT) => (first, mask::empty()),
        (ibv_qp_state::IBV_QPS_INIT, ibv_qp_state::IBV_QPS_INIT) => (mask::empty(), first),
        (ibv_qp_state::IBV_QPS_INIT, ibv_qp_state::IBV_QPS_RTR) => (
            mask::IBV_QP_AV
                | mask::IBV_QP_PATH_MTU
                | mask::IBV_QP_DEST_QPN
                | mask::IBV_QP_RQ_PSN
                | mask::IBV_QP_MAX_DEST_RD_ATOMIC
                | mask::IBV_QP_MIN_RNR_TIMER,
            mask::IBV_QP_ALT_PATH | mask::IBV_QP_ACCESS_FLAGS | mask::IBV_QP_PKEY_INDEX,
        ),
        (ibv_qp_state::IBV_QPS_RTR, ibv_qp_state::IBV_QPS_RTS) => (
            mask::IBV_QP_TIMEOUT
                | mask::IBV_QP_RETRY_CNT
                | mask::IBV_QP_RNR_RETRY
                | mask::IBV_QP_SQ_PSN
                | mask::IBV_QP_MAX_QP_RD_ATOMIC,
            running,
        ),
        (ibv_qp_state::IBV_QPS_RTS, ibv_qp_state::IBV_QPS_RTS) => (mask::empty(), running),
        _ => return None,
    })
}

/// # Errors
/// `EINVAL` for a step that is not one, or attributes that do not belong to it.
pub(crate) fn check(from: ibv_qp_state, to: ibv_qp_state, given: mask) -> Result<(), c_int> {
    let (required, optional) = step(from, to).ok_or(libc::EINVAL)?;
    let allowed = required | optional | mask::IBV_QP_STATE;
    if given.contains(required) && allowed.contains(given) { Ok(()) } else { Err(libc::EINVAL) }
}
