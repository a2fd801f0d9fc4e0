//! Violations in a send WQE that a card may tolerate and no correct producer writes.

use super::ctrl::{CE_ALWAYS, CE_MASK, Ctrl, FM_FENCE_AND_INITIATOR_SMALL, FM_MASK, SOLICITED};
use super::opcode::Opcode;

/// The first such violation in a WQE.
///
/// `wqe` holds the whole WQE. The checks of [`super::decode_body`] are not repeated.
pub fn strict_violations(ctrl: &Ctrl, wqe: &[u8]) -> Option<&'static str> {
    let has_remote = matches!(
        ctrl.opcode,
        Opcode::RDMA_WRITE
            | Opcode::RDMA_WRITE_IMM
            | Opcode::RDMA_READ
            | Opcode::ATOMIC_CS
            | Opcode::ATOMIC_FA
    );
    let ce = ctrl.fm_ce_se & CE_MASK;
    let checks = [
        (ctrl.reserved != 0, "the reserved bits beside ds are set"),
        (ctrl.signature != 0, "a signature is set, but signatures are off"),
        (ctrl.stream_id != 0, "a DCI stream is set on an RC queue pair"),
        (ctrl.fm_ce_se & !(FM_MASK | CE_MASK | SOLICITED) != 0, "reserved bits of fm_ce_se are set"),
        (ctrl.fm_ce_se & FM_MASK > FM_FENCE_AND_INITIATOR_SMALL, "the fence mode is unknown"),
        (ce != 0 && ce != CE_ALWAYS, "the completion mode is neither 'always' nor 'on error'"),
        (
            has_remote && wqe.get(28..32).is_some_and(|word| word != [0; 4]),
            "the reserved word of the remote address is set",
        ),
    ];
    checks.into_iter().find_map(|(violated, what)| violated.then_some(what))
}

#[cfg(test)]
mod tests {
    use super::super::ctrl::decode_ctrl;
    use super::*;

    #[test]
    fn strict_mode_names_each_violation() {
        let mut good = [
            Ctrl { opcode: Opcode::RDMA_WRITE, ds: 3, fm_ce_se: 0x08, ..Ctrl::default() }.to_bytes(),
            [0; 16],
            [1; 16],
        ]
        .concat();
        let check = |wqe: &[u8]| strict_violations(&decode_ctrl(wqe.first_chunk().unwrap()), wqe);
        assert_eq!(check(&good), None);
        for (at, value, word) in [
            (7, 0x43, "beside ds"),
            (7, 0x83, "beside ds"),
            (8, 1, "signature"),
            (9, 1, "stream"),
            (10, 1, "stream"),
            (11, 0x18, "reserved bits of fm_ce_se"),
            (11, 0x09, "reserved bits of fm_ce_se"),
            (11, 0xa8, "fence mode"),
            (11, 0xe8, "fence mode"),
            (11, 0x04, "completion mode"),
            (11, 0x0c, "completion mode"),
            (28, 1, "remote address"),
            (31, 1, "remote address"),
        ] {
            let old = core::mem::replace(&mut good[at], value);
            assert!(check(&good).is_some_and(|what| what.contains(word)), "{at} {value:#x}");
            good[at] = old;
        }
        for fm_ce_se in [0x00, 0x02, 0x0a, 0x28, 0x48, 0x68, 0x88, 0x8a] {
            good[11] = fm_ce_se;
            assert_eq!(check(&good), None, "{fm_ce_se:#x}");
        }
        // Only some operations have a remote address; for others the bytes mean something else.
        good[28] = 1;
        for (opcode, has_remote) in [
            (0x00, false),
            (0x08, true),
            (0x09, true),
            (0x0a, false),
            (0x0b, false),
            (0x10, true),
            (0x11, true),
            (0x12, true),
        ] {
            good[3] = opcode;
            assert_eq!(check(&good).is_some(), has_remote, "opcode {opcode:#x}");
        }
    }
}
