//! Transitions of queue pairs, checked as the kernel checks them (`qp_state_table` of `drivers/infiniband/core/verbs.c`).

use std::time::Duration;

use gdsync_device::error::Error;
use gdsync_device::{Access, Gid, QpAddress, QpAttr, QpState, mtu_bytes};
use rustix::io::Errno;

use super::device::MAX_RD_ATOMIC;
use super::qp::{Qp, QpType};
use super::{Context, Result};
use crate::abi::{
    ib_uverbs_ah_attr, ib_uverbs_ex_modify_qp, ib_uverbs_ex_modify_qp_resp, ib_uverbs_modify_qp,
    ib_uverbs_qp_dest, length,
};
use crate::address::Link;
use crate::command::Command;
use crate::log::{failure, log};
use crate::user::User;

/// How long a reset may wait for copies into the memory of a queue pair.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// `enum ib_qp_attr_mask`
mod mask {
    pub(super) const STATE: u32 = 1;
    pub(super) const CUR_STATE: u32 = 1 << 1;
    pub(super) const ACCESS_FLAGS: u32 = 1 << 3;
    pub(super) const PKEY_INDEX: u32 = 1 << 4;
    pub(super) const PORT: u32 = 1 << 5;
    pub(super) const QKEY: u32 = 1 << 6;
    pub(super) const AV: u32 = 1 << 7;
    pub(super) const PATH_MTU: u32 = 1 << 8;
    pub(super) const TIMEOUT: u32 = 1 << 9;
    pub(super) const RETRY_CNT: u32 = 1 << 10;
    pub(super) const RNR_RETRY: u32 = 1 << 11;
    pub(super) const RQ_PSN: u32 = 1 << 12;
    pub(super) const MAX_QP_RD_ATOMIC: u32 = 1 << 13;
    pub(super) const ALT_PATH: u32 = 1 << 14;
    pub(super) const MIN_RNR_TIMER: u32 = 1 << 15;
    pub(super) const SQ_PSN: u32 = 1 << 16;
    pub(super) const MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
    pub(super) const PATH_MIG_STATE: u32 = 1 << 18;
    pub(super) const DEST_QPN: u32 = 1 << 20;
    /// Of the standard: up to the destination.
    pub(super) const STANDARD: u32 = (1 << 21) - 1;
}

/// `enum ib_qp_state`
mod state {
    pub(super) const RESET: u8 = 0;
    pub(super) const INIT: u8 = 1;
    pub(super) const RTR: u8 = 2;
    pub(super) const RTS: u8 = 3;
    pub(super) const SQE: u8 = 5;
    pub(super) const ERR: u8 = 6;
}

/// A network path, as QP attributes and address handles name it.
pub(super) struct Route {
    pub(super) is_global: u8,
    pub(super) port_num: u8,
    pub(super) sgid_index: u8,
    pub(super) dlid: u16,
    pub(super) dgid: [u8; 16],
}

impl From<ib_uverbs_ah_attr> for Route {
    fn from(attr: ib_uverbs_ah_attr) -> Self {
        let ib_uverbs_ah_attr { grh, dlid, is_global, port_num, .. } = attr;
        Self { is_global, port_num, sgid_index: grh.sgid_index, dlid, dgid: grh.dgid }
    }
}

impl From<ib_uverbs_qp_dest> for Route {
    fn from(dest: ib_uverbs_qp_dest) -> Self {
        let ib_uverbs_qp_dest { dgid, dlid, sgid_index, is_global, port_num, .. } = dest;
        Self { is_global, port_num, sgid_index, dlid, dgid }
    }
}

impl Context {
    pub(super) fn modify_qp(&self, command: &Command<'_>) -> Result<()> {
        let request: ib_uverbs_modify_qp = command.request()?;
        self.modify(&request)
    }

    pub(super) fn modify_qp_extended(&self, user: &dyn User, command: &Command<'_>) -> Result<()> {
        let request: ib_uverbs_ex_modify_qp = command.request()?;
        self.modify(&request.base)?;
        let response_length = length::<ib_uverbs_ex_modify_qp_resp>();
        if command.response_len() > 0 {
            command.respond(user, &ib_uverbs_ex_modify_qp_resp { comp_mask: 0, response_length })?;
        }
        Ok(())
    }

    fn modify(&self, attr: &ib_uverbs_modify_qp) -> Result<()> {
        let given = attr.attr_mask;
        if given & !mask::STANDARD != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        let qp = self.qps.get(attr.qp_handle)?;
        // One transition at a time.
        let mut known = qp.attr.lock();
        let from = qp.hca.card.state(qp.qpn).map_err(|_| Errno::INVAL)?.0;
        if given & mask::CUR_STATE != 0 && attr.cur_qp_state != from {
            return Err(Errno::INVAL);
        }
        let to = if given & mask::STATE != 0 { attr.qp_state } else { from };
        check(qp.kind, from, to, given)?;
        ranges(attr)?;
        let modes = &qp.hca.modes;
        let allows_atomics = attr.qp_access_flags & Access::REMOTE_ATOMIC.bits() != 0;
        if modes.no_atomics && given & mask::ACCESS_FLAGS != 0 && allows_atomics {
            // As mlx5_ib (`set_qpc_atomic_flags`).
            return Err(Errno::OPNOTSUPP);
        }
        if modes.late_flush && to == state::ERR {
            delay()?;
        }
        let step = self.step(&qp, attr, to)?;
        let psn = (given & mask::SQ_PSN != 0).then_some(attr.sq_psn & 0x00ff_ffff);
        qp.hca.card.modify_qp(qp.qpn, &step, psn, PATIENCE).map_err(|error| {
            log!("MODIFY_QP to {}: {error}", QpState(to));
            match error {
                Error::Deadline { .. } => Errno::TIMEDOUT,
                _ => Errno::INVAL,
            }
        })?;
        if given & mask::QKEY != 0 {
            qp.hca.card.set_qkey(qp.qpn, attr.qkey);
        }
        remember(&mut known, attr);
        Ok(())
    }

    /// What the HCA is told.
    fn step(&self, qp: &Qp, attr: &ib_uverbs_modify_qp, to: u8) -> Result<QpAttr> {
        let has = |bit| attr.attr_mask & bit != 0;
        let mut step = QpAttr::to(QpState(to));
        if has(mask::ACCESS_FLAGS) {
            step.access = Some(Access::from_bits_truncate(attr.qp_access_flags & Access::all().bits()));
        }
        if has(mask::AV) && qp.kind == QpType::Rc {
            let gid = self.check_path(&attr.dest.into())?;
            step.remote = Some(QpAddress::new(gid, attr.dest_qp_num, attr.rq_psn & 0x00ff_ffff));
        }
        step.path_mtu = has(mask::PATH_MTU).then(|| mtu_bytes(attr.path_mtu)).flatten();
        step.max_dest_rd_atomic = has(mask::MAX_DEST_RD_ATOMIC).then_some(attr.max_dest_rd_atomic);
        step.min_rnr_timer = has(mask::MIN_RNR_TIMER).then_some(attr.min_rnr_timer);
        step.timeout = has(mask::TIMEOUT).then_some(attr.timeout);
        step.retry_cnt = has(mask::RETRY_CNT).then_some(attr.retry_cnt);
        step.rnr_retry = has(mask::RNR_RETRY).then_some(attr.rnr_retry);
        step.max_rd_atomic = has(mask::MAX_QP_RD_ATOMIC).then_some(attr.max_rd_atomic);
        Ok(step)
    }

    /// The port that a route leads to.
    ///
    /// # Errors
    /// `EINVAL` for a route that a port of this link layer cannot take.
    pub(super) fn check_path(&self, route: &Route) -> Result<Gid> {
        let port = self.hca.port;
        if route.port_num != 1 {
            return Err(Errno::INVAL);
        }
        if route.is_global != 0 && port.gid(route.sgid_index.into()).is_none() {
            return Err(Errno::INVAL);
        }
        if port.link == Link::Ethernet && route.is_global == 0 {
            return Err(Errno::INVAL);
        }
        port.link.canonical(port.link.path(route.dlid, route.dgid)).ok_or_else(|| {
            let link = port.link;
            failure(format_args!(
                "no card on {link:?} has the address of the peer: start both with the same --link"
            ));
            Errno::INVAL
        })
    }
}

/// Waits up to 10 ms.
pub(super) fn delay() -> Result<()> {
    let [random, ..] = gdsync_device::random::<4>().map_err(|_| Errno::IO)?;
    std::thread::sleep(Duration::from_micros(u64::from(random) * 40));
    Ok(())
}

/// # Errors
/// `EINVAL`
fn ranges(attr: &ib_uverbs_modify_qp) -> Result<()> {
    let bad = [
        (mask::PORT, attr.port_num != 1),
        (mask::PKEY_INDEX, attr.pkey_index != 0),
        (mask::PATH_MTU, !(1..=5).contains(&attr.path_mtu)),
        (mask::MIN_RNR_TIMER, attr.min_rnr_timer > 31),
        (mask::TIMEOUT, attr.timeout > 31),
        (mask::RETRY_CNT, attr.retry_cnt > 7),
        (mask::RNR_RETRY, attr.rnr_retry > 7),
        (mask::MAX_DEST_RD_ATOMIC, attr.max_dest_rd_atomic > MAX_RD_ATOMIC),
        (mask::MAX_QP_RD_ATOMIC, attr.max_rd_atomic > MAX_RD_ATOMIC),
        (mask::DEST_QPN, attr.dest_qp_num >> 24 != 0),
        (mask::ALT_PATH | mask::PATH_MIG_STATE, true),
    ];
    let refused = bad.iter().any(|&(bits, is_bad)| is_bad && attr.attr_mask & bits != 0);
    if refused { Err(Errno::INVAL) } else { Ok(()) }
}

/// Keeps what was given, for QUERY_QP.
fn remember(known: &mut ib_uverbs_modify_qp, attr: &ib_uverbs_modify_qp) {
    macro_rules! keep {
        ($($bit:ident: $field:ident;)*) => {
            $(if attr.attr_mask & mask::$bit != 0 {
                known.$field = attr.$field;
            })*
        };
    }
    keep! {
        ACCESS_FLAGS: qp_access_flags;
        PKEY_INDEX: pkey_index;
        PORT: port_num;
        QKEY: qkey;
        AV: dest;
        PATH_MTU: path_mtu;
        TIMEOUT: timeout;
        RETRY_CNT: retry_cnt;
        RNR_RETRY: rnr_retry;
        RQ_PSN: rq_psn;
        SQ_PSN: sq_psn;
        MAX_QP_RD_ATOMIC: max_rd_atomic;
        MAX_DEST_RD_ATOMIC: max_dest_rd_atomic;
        MIN_RNR_TIMER: min_rnr_timer;
        DEST_QPN: dest_qp_num;
    }
}

/// Attributes that a transition needs, and those that it may have.
fn transition(kind: QpType, from: u8, to: u8) -> Option<(u32, u32)> {
    const PATHS: u32 = mask::ALT_PATH | mask::PATH_MIG_STATE;
    const RUNNING: u32 = mask::CUR_STATE | PATHS | mask::ACCESS_FLAGS | mask::MIN_RNR_TIMER;
    let first =
        mask::PKEY_INDEX | mask::PORT | if kind == QpType::Rc { mask::ACCESS_FLAGS } else { mask::QKEY };
    Some(match (from, to) {
        (_, state::RESET | state::ERR) => (0, 0),
        (state::RESET, state::INIT) => (first, 0),
        (state::INIT, state::INIT) => (0, first),
        (state::INIT, state::RTR) if kind == QpType::Ud => (0, mask::PKEY_INDEX | mask::QKEY),
        (state::RTR, state::RTS) if kind == QpType::Ud => (mask::SQ_PSN, mask::CUR_STATE | mask::QKEY),
        (state::RTS | state::SQE, state::RTS) if kind == QpType::Ud => (0, mask::CUR_STATE | mask::QKEY),
        (state::INIT, state::RTR) => (
            mask::AV
                | mask::PATH_MTU
                | mask::DEST_QPN
                | mask::RQ_PSN
                | mask::MAX_DEST_RD_ATOMIC
                | mask::MIN_RNR_TIMER,
            mask::ALT_PATH | mask::ACCESS_FLAGS | mask::PKEY_INDEX,
        ),
        (state::RTR, state::RTS) => (
            mask::TIMEOUT | mask::RETRY_CNT | mask::RNR_RETRY | mask::SQ_PSN | mask::MAX_QP_RD_ATOMIC,
            RUNNING,
        ),
        (state::RTS, state::RTS) => (0, RUNNING),
        _ => return None,
    })
}

/// # Errors
/// `EINVAL` for a transition that is not one, or attributes that do not belong to it.
fn check(kind: QpType, from: u8, to: u8, given: u32) -> Result<()> {
    let (required, optional) = transition(kind, from, to).ok_or(Errno::INVAL)?;
    let allowed = required | optional | mask::STATE | mask::CUR_STATE;
    let fits = given & required == required && given & !allowed == 0;
    if fits { Ok(()) } else { Err(Errno::INVAL) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transitions_of_programs_are_accepted() {
        let steps =
            [(0, 1, 0x39), (1, 2, 0x0012_9181), (2, 3, 0x0001_2e01), (3, 6, 1), (6, 0, 1), (3, 3, 0x9)];
        for (from, to, given) in steps {
            assert_eq!(check(QpType::Rc, from, to, given), Ok(()), "{from} to {to}");
        }
    }

    #[test]
    fn datagrams_need_no_address() {
        let steps = [(0, 1, 0x71), (1, 2, 1), (2, 3, 0x0001_0001), (3, 3, 0x41), (5, 3, 3), (3, 6, 1)];
        for (from, to, given) in steps {
            assert_eq!(check(QpType::Ud, from, to, given), Ok(()), "{from} to {to}");
        }
        for (from, to, given) in [(0, 1, 0x39), (1, 2, 0x0012_9181), (2, 3, 1)] {
            assert_eq!(check(QpType::Ud, from, to, given), Err(Errno::INVAL), "{from} to {to}");
        }
    }

    #[test]
    fn other_transitions_and_attributes_are_refused() {
        for (from, to, given) in [
            (0, 2, 0x0012_9181),
            (1, 3, 0x0001_2e01),
            (6, 1, 0x39),
            (0, 1, 0x31),
            (0, 1, 0x39 | mask::QKEY),
            (3, 6, 1 | mask::PORT),
            (5, 3, 1),
            (0, 9, 1),
        ] {
            assert_eq!(check(QpType::Rc, from, to, given), Err(Errno::INVAL), "{from} to {to}: {given:#x}");
        }
    }
}
