//! WQEs of datagram queue pairs (UD): an address vector between control segment and payload.

use super::address_vector::AddressVector;
use super::ctrl::Ctrl;
use super::decode::{DecodeError, DecodedOp, payload};
use super::opcode::Opcode;
use super::segment::SEGMENT;
use super::wqe::MAX_DS;

/// As [`decode_body`](super::decode_body), for a datagram queue pair: a send or a NOP, and where it goes.
///
/// # Errors
/// [`DecodeError`], which a card would report as an error completion.
pub fn decode_datagram(ctrl: &Ctrl, wqe: &[u8]) -> Result<(DecodedOp, AddressVector), DecodeError> {
    let &Ctrl { opcode, opmod, ds, .. } = ctrl;
    let min = match opcode {
        Opcode::NOP => return Ok((DecodedOp::Nop, AddressVector::default())),
        Opcode::SEND | Opcode::SEND_IMM => 4,
        _ => return Err(DecodeError::Opcode(opcode)),
    };
    if opmod != 0 {
        return Err(DecodeError::Opmod { opcode, opmod });
    }
    if ds < min {
        return Err(DecodeError::Ds { opcode, ds, min, max: MAX_DS });
    }
    let len = wqe.len();
    let wqe = wqe.get(..usize::from(ds) * SEGMENT).ok_or(DecodeError::Truncated { ds, len })?;
    let (segments, _) = wqe.as_chunks();
    let vector = wqe[SEGMENT..].first_chunk().and_then(AddressVector::from_bytes);
    let vector = vector.ok_or(DecodeError::CompactAddress)?;
    let imm = (opcode == Opcode::SEND_IMM).then_some(u32::from_be_bytes(ctrl.imm));
    Ok((DecodedOp::Send { payload: payload(segments, 4)?, imm }, vector))
}

#[cfg(test)]
mod tests {
    use super::super::{DataSeg, DecodedPayload, Payload, SendOp, WqeFlags, encode};
    use super::*;

    #[test]
    fn a_datagram_has_an_address_before_its_payload() {
        let vector = AddressVector { qkey: 5, qpn: 6, rgid: [7; 16], ..AddressVector::default() };
        let sge = DataSeg { addr: 0x1000, len: 9, lkey: 8 }.to_bytes();
        let decode = |opcode, ds: u8| {
            let ctrl = Ctrl { opcode, ds, imm: [0, 0, 0, 9], ..Ctrl::default() };
            let wqe = [&ctrl.to_bytes()[..], &vector.to_bytes(), &sge].concat();
            decode_datagram(&ctrl, &wqe)
        };
        let (op, to) = decode(Opcode::SEND_IMM, 5).unwrap();
        let DecodedOp::Send { payload: DecodedPayload::Sges(list), imm: Some(9) } = op else {
            panic!("{op:?}")
        };
        assert_eq!((list.total_bytes(), to), (9, vector));
        assert!(matches!(decode(Opcode::SEND, 4), Ok((DecodedOp::Send { imm: None, .. }, _))));
        let sges = [DataSeg { addr: 0x1000, len: 9, lkey: 8 }];
        let op = SendOp::Datagram { to: &vector, payload: Payload::Sges(&sges), imm: Some(9) };
        let encoded = encode(&op, 7, 0, WqeFlags::default()).unwrap();
        assert_eq!(
            (encoded.ds(), &encoded.as_bytes()[16..]),
            (5, &[&vector.to_bytes()[..], &sge].concat()[..])
        );
        assert_eq!((encoded.as_bytes()[3], op.payload_bytes()), (Opcode::SEND_IMM.0, 9));
        assert_eq!(decode(Opcode::NOP, 1).unwrap().0, DecodedOp::Nop);
        assert!(matches!(decode(Opcode::SEND, 3), Err(DecodeError::Ds { ds: 3, min: 4, .. })));
        assert!(matches!(decode(Opcode::SEND, 6), Err(DecodeError::Truncated { ds: 6, .. })));
        assert_eq!(decode(Opcode::RDMA_WRITE, 5), Err(DecodeError::Opcode(Opcode::RDMA_WRITE)));
        let ctrl = Ctrl { opcode: Opcode::SEND, ds: 4, ..Ctrl::default() };
        assert_eq!(decode_datagram(&ctrl, &[0; 64]), Err(DecodeError::CompactAddress));
    }
}
