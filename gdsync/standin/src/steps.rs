//! The transitions of a reliable connected queue pair and the attributes of each (`qp_state_table` of the kernel's
//! `drivers/infiniband/core/verbs.c`).

use std::ffi::c_int;

use rdma_core_sys::verbs::{ibv_qp_attr_mask as mask, ibv_qp_state as state};

/// What a step takes: attributes that must be given, and those that may.
fn step(from: state, to: state) -> Option<(mask, mask)> {
    let first = mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS;
    let paths = mask::IBV_QP_ALT_PATH | mask::IBV_QP_PATH_MIG_STATE;
    let running = mask::IBV_QP_CUR_STATE | paths | mask::IBV_QP_ACCESS_FLAGS | mask::IBV_QP_MIN_RNR_TIMER;
    Some(match (from, to) {
        (_, state::IBV_QPS_RESET | state::IBV_QPS_ERR) => (mask::empty(), mask::empty()),
        (state::IBV_QPS_RESET, state::IBV_QPS_INIT) => (first, mask::empty()),
        (state::IBV_QPS_INIT, state::IBV_QPS_INIT) => (mask::empty(), first),
        (state::IBV_QPS_INIT, state::IBV_QPS_RTR) => (
            mask::IBV_QP_AV
                | mask::IBV_QP_PATH_MTU
                | mask::IBV_QP_DEST_QPN
                | mask::IBV_QP_RQ_PSN
                | mask::IBV_QP_MAX_DEST_RD_ATOMIC
                | mask::IBV_QP_MIN_RNR_TIMER,
            mask::IBV_QP_ALT_PATH | mask::IBV_QP_ACCESS_FLAGS | mask::IBV_QP_PKEY_INDEX,
        ),
        (state::IBV_QPS_RTR, state::IBV_QPS_RTS) => (
            mask::IBV_QP_TIMEOUT
                | mask::IBV_QP_RETRY_CNT
                | mask::IBV_QP_RNR_RETRY
                | mask::IBV_QP_SQ_PSN
                | mask::IBV_QP_MAX_QP_RD_ATOMIC,
            running,
        ),
        (state::IBV_QPS_RTS, state::IBV_QPS_RTS) => (mask::empty(), running),
        _ => return None,
    })
}

/// # Errors
/// `EINVAL` for a step that is not one, or attributes that do not belong to it.
pub(crate) fn check(from: state, to: state, given: mask) -> Result<(), c_int> {
    let (required, optional) = step(from, to).ok_or(libc::EINVAL)?;
    let allowed = required | optional | mask::IBV_QP_STATE;
    if given.contains(required) && allowed.contains(given) { Ok(()) } else { Err(libc::EINVAL) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LADDER: [state; 4] =
        [state::IBV_QPS_RESET, state::IBV_QPS_INIT, state::IBV_QPS_RTR, state::IBV_QPS_RTS];

    #[test]
    fn each_rung_takes_its_attributes_and_misses_each_of_them() {
        for pair in LADDER.windows(2) {
            let (required, optional) = step(pair[0], pair[1]).unwrap();
            let given = required | mask::IBV_QP_STATE;
            assert_eq!(check(pair[0], pair[1], given), Ok(()));
            assert_eq!(check(pair[0], pair[1], given | optional), Ok(()));
            for one in required {
                assert_eq!(check(pair[0], pair[1], given - one), Err(libc::EINVAL), "{one:?} is missing");
            }
            let others = mask::IBV_QP_QKEY | mask::IBV_QP_CAP | mask::IBV_QP_EN_SQD_ASYNC_NOTIFY;
            for other in others {
                assert_eq!(
                    check(pair[0], pair[1], given | other),
                    Err(libc::EINVAL),
                    "{other:?} is too much"
                );
            }
        }
    }

    #[test]
    fn no_rung_is_left_out() {
        let all = mask::all();
        for (n, &from) in LADDER.iter().enumerate() {
            for (m, &to) in LADDER.iter().enumerate().skip(1) {
                let is_step =
                    m == n + 1 || (m == n && (to == state::IBV_QPS_INIT || to == state::IBV_QPS_RTS));
                assert_eq!(step(from, to).is_some(), is_step, "{from:?} to {to:?}");
            }
            for end in [state::IBV_QPS_RESET, state::IBV_QPS_ERR] {
                assert_eq!(check(from, end, mask::IBV_QP_STATE), Ok(()));
                assert_eq!(check(from, end, all), Err(libc::EINVAL));
            }
        }
        assert_eq!(check(state::IBV_QPS_ERR, state::IBV_QPS_RTS, mask::IBV_QP_STATE), Err(libc::EINVAL));
    }
}
