//! Properties of whole WQEs: encode and decode agree, and decoding never panics.

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
            DecodedPayload::Mixed(list) => panic!("nothing here encodes {list:?}"),
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
            other => panic!("nothing here encodes {other:?}"),
        }
    }
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
}

/// Decodes any bytes as all that a ring holds. Half of them are made to pass the checks of a control segment.
#[test]
fn no_bytes_hurt_the_decoders() {
    bolero::check!().with_max_len(1100).for_each(|bytes: &[u8]| {
        let mut bytes = bytes.to_vec();
        bytes.resize(bytes.len().max(CQE_SIZE), 0);
        let cqe = Cqe::decode(bytes.first_chunk().unwrap());
        assert_eq!(Cqe::decode(&cqe.encode()), cqe);
        Doorbell::decode(u64::from_be_bytes(*bytes.first_chunk().unwrap()));
        assert!(decode_recv(&bytes).count() <= bytes.len() / SEGMENT);
        if bytes[0] & 1 == 0 {
            let opcode = [0x00, 0x08, 0x09, 0x0a, 0x0b, 0x10, 0x11, 0x12][usize::from(bytes[1] & 7)];
            let ds = u8::try_from(bytes.len() / SEGMENT).unwrap().min(63);
            bytes[..8].copy_from_slice(&[0, 0, 0, opcode, 0, 0, 1, ds]);
            // Plausible lengths of SGEs and of inline data.
            for segment in bytes.chunks_exact_mut(SEGMENT).skip(1).filter(|segment| segment[0] & 3 > 0) {
                let kind = (segment[0] & 4) << 5;
                segment[..2].copy_from_slice(&[kind, 0]);
            }
        }
        let ctrl = decode_ctrl(bytes.first_chunk().unwrap());
        assert_eq!(ctrl.to_bytes(), bytes[..SEGMENT]);
        strict_violations(&ctrl, &bytes);
        if let Ok((op, _)) = decode_datagram(&ctrl, &bytes) {
            assert!(op.payload().is_some() || ctrl.opcode == Opcode::NOP);
        }
        let Ok(op) = decode_body(&ctrl, &bytes) else { return };
        if let Some(DecodedPayload::Mixed(list)) = op.payload() {
            let lens = list.iter(&bytes).map(|part| match part {
                PayloadPart::Inline(bytes) => bytes.len(),
                PayloadPart::Sge(sge) => sge.len as usize,
            });
            assert_eq!(lens.sum::<usize>(), list.total_bytes() as usize);
            return;
        }
        let plain = Plain::decoded(ctrl.opcode, op, &bytes);
        assert!(plain.sges.iter().all(|sge| (1..=MAX_MESSAGE).contains(&sge.len)));
        assert!(plain.sges.iter().map(|sge| u64::from(sge.len)).sum::<u64>() <= u64::from(MAX_MESSAGE));
        if ctrl.opcode == Opcode::RDMA_READ && plain.sges.is_empty() {
            // Not encoded here.
            return;
        }
        // Every other decoded WQE can be encoded again; only an empty inline segment becomes shorter.
        let again = encode(&plain.op(), 1, 0, WqeFlags::default()).unwrap();
        let saved =
            u8::from(matches!(bytes.get(usize::from(ctrl.ds - 1) * SEGMENT..), Some([0x80, 0, 0, 0, ..])));
        let same = again.ds() == ctrl.ds || again.ds() + saved == ctrl.ds;
        assert!(same || ctrl.opcode == Opcode::NOP);
        let bytes = again.as_bytes();
        let ctrl = decode_ctrl(bytes.first_chunk().unwrap());
        assert_eq!(Plain::decoded(ctrl.opcode, decode_body(&ctrl, bytes).unwrap(), bytes), plain);
    });
}
