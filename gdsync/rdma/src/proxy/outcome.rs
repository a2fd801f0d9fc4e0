//! REMOVE

use rdma_core_sys::verbs::{ibv_wc, ibv_wc_flags, ibv_wc_opcode, ibv_wc_status};

use mlx5_ring::{Cqe, CqeOpcode, Syndrome};

/// Syndrome of a failed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) syndrome: Syndrome,
    /// Vendor code.
    pub(super) vendor: u8,
}

impl Failure {
    pub(super) const FLUSHED: Self = Self { syndrome: Syndrome::WR_FLUSH_ERR, vendor: 0 };
    pub(super) const REFUSED: Self = Self { syndrome: Syndrome::LOC_QP_OP_ERR, vendor: 0 };
}

/// Syndrome of a status, if cards have one for it.
fn syndrome(status: ibv_wc_status) -> Option<Syndrome> {
    Some(match status {
        ibv_wc_status::IBV_WC_LOC_LEN_ERR => Syndrome::LOC_LEN_ERR,
        ibv_wc_status::IBV_WC_LOC_QP_OP_ERR => Syndrome::LOC_QP_OP_ERR,
        ibv_wc_status::IBV_WC_LOC_PROT_ERR => Syndrome::LOC_PROT_ERR,
        ibv_wc_status::IBV_WC_WR_FLUSH_ERR => Syndrome::WR_FLUSH_ERR,
        ibv_wc_status::IBV_WC_MW_BIND_ERR => Syndrome::MW_BIND_ERR,
        ibv_wc_status::IBV_WC_BAD_RESP_ERR => Syndrome::BAD_RESP_ERR,
        ibv_wc_status::IBV_WC_LOC_ACCESS_ERR => Syndrome::LOC_ACCESS_ERR,
        ibv_wc_status::IBV_WC_REM_INV_REQ_ERR | ibv_wc_status::IBV_WC_REM_INV_RD_REQ_ERR => {
            Syndrome::REM_INV_REQ_ERR
        }
        ibv_wc_status::IBV_WC_REM_ACCESS_ERR => Syndrome::REM_ACCESS_ERR,
        ibv_wc_status::IBV_WC_REM_OP_ERR => Syndrome::REM_OP_ERR,
        ibv_wc_status::IBV_WC_RETRY_EXC_ERR | ibv_wc_status::IBV_WC_RESP_TIMEOUT_ERR => {
            Syndrome::RETRY_EXC_ERR
        }
        ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR => Syndrome::RNR_RETRY_EXC_ERR,
        ibv_wc_status::IBV_WC_REM_ABORT_ERR => Syndrome::REM_ABORT_ERR,
        _ => return None,
    })
}

/// Result of a request. Statuses unknown to cards become local operation errors.
pub(super) fn outcome(wc: &ibv_wc) -> Result<(), Failure> {
    if wc.status == ibv_wc_status::IBV_WC_SUCCESS {
        return Ok(());
    }
    let vendor = u8::try_from(wc.vendor_err).unwrap_or(u8::MAX);
    Err(Failure { syndrome: syndrome(wc.status).unwrap_or(Syndrome::LOC_QP_OP_ERR), vendor })
}

/// Whether the status has no syndrome of its own.
pub(super) fn is_unnamed(wc: &ibv_wc) -> bool {
    wc.status != ibv_wc_status::IBV_WC_SUCCESS && syndrome(wc.status).is_none()
}

/// CQE of a receive, without QPN and counter.
pub(super) fn received(wc: &ibv_wc) -> Cqe {
    if let Err(Failure { syndrome, vendor }) = outcome(wc) {
        return Cqe { opcode: CqeOpcode::RESP_ERR, syndrome, vendor, ..Cqe::default() };
    }
    let has_imm = wc.wc_flags.contains(ibv_wc_flags::IBV_WC_WITH_IMM);
    let opcode = match wc.opcode {
        ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM => CqeOpcode::RESP_WR_IMM,
        _ if has_imm => CqeOpcode::RESP_SEND_IMM,
        _ => CqeOpcode::RESP_SEND,
    };
    let imm = if opcode == CqeOpcode::RESP_SEND { 0 } else { u32::from_be(wc.imm_data) };
    Cqe { opcode, byte_cnt: wc.byte_len, imm, ..Cqe::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wc(status: ibv_wc_status) -> ibv_wc {
        ibv_wc { status, ..ibv_wc::zeroed() }
    }

    #[test]
    fn statuses_map_to_syndromes_by_name() {
        let mut named = 0;
        for value in 1..=23 {
            let status = ibv_wc_status(value);
            let Err(Failure { syndrome, .. }) = outcome(&wc(status)) else {
                panic!("{status:?} is an error")
            };
            let name = status.name().unwrap().strip_prefix("IBV_WC_").unwrap();
            if syndrome.name() == Some(name) {
                named += 1;
                assert!(!is_unnamed(&wc(status)));
            } else {
                let known = matches!(name, "REM_INV_RD_REQ_ERR" | "RESP_TIMEOUT_ERR");
                assert_eq!(known, !is_unnamed(&wc(status)), "{name}");
                assert!(known || syndrome == Syndrome::LOC_QP_OP_ERR, "{name}: {syndrome}");
            }
        }
        assert_eq!(named, 13, "cards have 13 syndromes");
        assert_eq!(outcome(&wc(ibv_wc_status::IBV_WC_SUCCESS)), Ok(()));
        assert!(outcome(&wc(ibv_wc_status(99))).is_err());
    }

    #[test]
    fn vendor_codes_are_truncated() {
        let vendor = |vendor_err| {
            let wc = ibv_wc { vendor_err, ..wc(ibv_wc_status::IBV_WC_REM_ACCESS_ERR) };
            outcome(&wc).unwrap_err().vendor
        };
        assert_eq!([0, 0x88, 0x1234].map(vendor), [0, 0x88, 0xff]);
    }

    #[test]
    fn receive_cqes_match_the_send() {
        let imm = 0x0102_0304_u32;
        let with = |opcode, wc_flags| ibv_wc {
            opcode,
            wc_flags,
            byte_len: 7,
            imm_data: imm.to_be(),
            ..wc(ibv_wc_status::IBV_WC_SUCCESS)
        };
        let (none, imm_flag) = (ibv_wc_flags::empty(), ibv_wc_flags::IBV_WC_WITH_IMM);
        for (wc, opcode, expected) in [
            (with(ibv_wc_opcode::IBV_WC_RECV, none), CqeOpcode::RESP_SEND, 0),
            (with(ibv_wc_opcode::IBV_WC_RECV, imm_flag), CqeOpcode::RESP_SEND_IMM, imm),
            (with(ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM, imm_flag), CqeOpcode::RESP_WR_IMM, imm),
        ] {
            let cqe = Cqe::decode(&received(&wc).encode());
            assert_eq!((cqe.opcode, cqe.byte_cnt, cqe.imm), (opcode, 7, expected));
        }
        let failed = Cqe::decode(&received(&wc(ibv_wc_status::IBV_WC_LOC_LEN_ERR)).encode());
        assert_eq!((failed.opcode, failed.syndrome), (CqeOpcode::RESP_ERR, Syndrome::LOC_LEN_ERR));
    }
}
