//! Properties of whole WQEs: encode and decode agree, and decoding never panics.

use proptest::collection::vec;
use proptest::prelude::*;

pub(super) use super::strategies::sges;
use super::strategies::{Plain, legal};
use super::*;

/// Offsets where two equally long encodings differ, with the second's bytes.
pub(super) fn changed(base: &[u8], other: &[u8]) -> Vec<(usize, u8)> {
    assert_eq!(base.len(), other.len());
    (0..).zip(other.iter().copied()).filter(|&(at, byte)| base[at] != byte).collect()
}

impl Plain {
    /// The operation after encoding and decoding.
    fn decoded(opcode: Opcode, op: DecodedOp, wqe: &[u8]) -> Self {
        let data = |payload| match payload {
            DecodedPayload::Sges(sges) => (sges.iter(wqe).collect(), vec![]),
            DecodedPayload::Inline(range) => (vec![], wqe[range].to_vec()),
        };
        let base = Self { opcode, ..Self::default() };
        match op {
            DecodedOp::Nop => base,
            DecodedOp::Send { payload, imm } => {
                let (sges, inline) = data(payload);
                Self { sges, inline, imm, ..base }
            }
            DecodedOp::Write { remote, payload, imm } => {
                let (sges, inline) = data(payload);
                Self { remote, sges, inline, imm, ..base }
            }
            DecodedOp::Read { remote, sges } => Self { remote, sges: sges.iter(wqe).collect(), ..base },
            DecodedOp::CompareSwap { remote, compare, swap, result } => {
                Self { remote, operands: [swap, compare], sges: vec![result], ..base }
            }
            DecodedOp::FetchAdd { remote, add, result } => {
                Self { remote, operands: [add, 0], sges: vec![result], ..base }
            }
        }
    }
}

/// Bytes that resemble a WQE enough to pass the control segment's checks.
fn nearly_a_wqe() -> impl Strategy<Value = Vec<u8>> {
    let opcode = prop::sample::select(vec![0x00, 0x08, 0x09, 0x0a, 0x0b, 0x10, 0x11, 0x12]);
    let count = prop_oneof![Just(0), Just(8), 0..64u32, (0..1100u32).prop_map(|n| n | INLINE), any::<u32>()];
    let segment =
        (count, any::<[u8; 12]>()).prop_map(|(count, rest)| [&count.to_be_bytes()[..], &rest].concat());
    (opcode, 0u8..64, any::<[u8; 8]>(), vec(segment, 0..64)).prop_map(|(opcode, ds, rest, segments)| {
        [&[0, 0, 0, opcode, 0, 0, 1, ds][..], &rest, &segments.concat()].concat()
    })
}

proptest! {
    #[test]
    fn decode_inverts_encode(
        plain in legal(),
        qpn in 0..=MAX_QPN,
        index: u16,
        (fence, solicited) in any::<(bool, bool)>(),
    ) {
        let wqe = encode(&plain.op(), qpn, index, WqeFlags { fence, solicited }).unwrap();
        let bytes = wqe.as_bytes();
        let ctrl = decode_ctrl(bytes.first_chunk().unwrap());
        prop_assert_eq!((ctrl.qpn, ctrl.index, ctrl.ds, ctrl.opcode), (qpn, index, wqe.ds(), plain.opcode));
        prop_assert_eq!(bytes.len(), usize::from(ctrl.ds) * SEGMENT);
        prop_assert_eq!((ctrl.fence(), ctrl.solicited(), ctrl.always_completes()), (fence, solicited, true));
        prop_assert_eq!(strict_violations(&ctrl, bytes), None);

        let rung = Doorbell::decode(doorbell_word(wqe.first8()));
        prop_assert_eq!((rung.qpn, rung.index, rung.opcode, rung.ds), (qpn, index, ctrl.opcode, ctrl.ds));

        let got = Plain::decoded(ctrl.opcode, decode_body(&ctrl, bytes).unwrap(), bytes);
        let mut expected = plain;
        expected.sges.retain(|sge| sge.len > 0);
        prop_assert_eq!(got, expected);
    }

    #[test]
    fn a_buffer_in_use_again_gives_the_same_wqe(first in legal(), second in legal()) {
        let fresh = encode(&second.op(), 1, 2, WqeFlags::default()).unwrap();
        let mut out = [0xee; MAX_WQE_BYTES];
        encode_into(&mut out, &first.op(), 1, 2, WqeFlags::default()).unwrap();
        let ds = encode_into(&mut out, &second.op(), 1, 2, WqeFlags::default()).unwrap();
        prop_assert_eq!(&out[..usize::from(ds) * SEGMENT], fresh.as_bytes());
    }

    #[test]
    fn a_wqe_given_up_becomes_a_nop(plain in legal(), index: u16) {
        let wqe = encode(&plain.op(), 5, index, WqeFlags::default()).unwrap();
        let mut bytes = wqe.as_bytes().to_vec();
        bytes[..SEGMENT].copy_from_slice(&nop_like(5, index, wqe.ds()));
        let ctrl = decode_ctrl(bytes.first_chunk().unwrap());
        prop_assert_eq!((ctrl.index, ctrl.blocks(), ctrl.always_completes()), (index, wqe.blocks(), true));
        prop_assert_eq!(decode_body(&ctrl, &bytes), Ok(DecodedOp::Nop));
        prop_assert_eq!(strict_violations(&ctrl, &bytes), None);
    }

    #[test]
    fn no_bytes_hurt_the_decoder(bytes in prop_oneof![vec(any::<u8>(), 16..1100), nearly_a_wqe()]) {
        let ctrl = decode_ctrl(bytes.first_chunk().unwrap());
        strict_violations(&ctrl, &bytes);
        let Ok(op) = decode_body(&ctrl, &bytes) else { return Ok(()) };
        let plain = Plain::decoded(ctrl.opcode, op, &bytes);
        prop_assert!(plain.sges.iter().all(|sge| (1..=MAX_MESSAGE).contains(&sge.len)));
        prop_assert!(plain.sges.iter().map(|sge| u64::from(sge.len)).sum::<u64>() <= u64::from(MAX_MESSAGE));
        // Every decoded WQE can be encoded again; only an empty inline segment becomes shorter.
        let again = encode(&plain.op(), 1, 0, WqeFlags::default()).unwrap();
        let saved = u8::from(matches!(bytes.get(usize::from(ctrl.ds - 1) * SEGMENT..), Some([0x80, 0, 0, 0, ..])));
        let same = again.ds() == ctrl.ds || again.ds() + saved == ctrl.ds;
        prop_assert!(same || ctrl.opcode == Opcode::NOP);
        let bytes = again.as_bytes();
        let ctrl = decode_ctrl(bytes.first_chunk().unwrap());
        prop_assert_eq!(Plain::decoded(ctrl.opcode, decode_body(&ctrl, bytes).unwrap(), bytes), plain);
    }

    #[test]
    fn control_segments_keep_every_bit(bytes: [u8; SEGMENT]) {
        prop_assert_eq!(decode_ctrl(&bytes).to_bytes(), bytes);
    }
}
