//! Encoding of send WQEs.

use super::ctrl::Ctrl;
use super::opcode::Opcode;
use super::segment::{DataSeg, INLINE, MAX_MESSAGE, RemoteAddr, SEGMENT, WqeError, used_sges};
use super::wqe::{MAX_DS, MAX_QPN, MAX_WQE_BYTES, Payload, SendOp, WqeBytes, WqeFlags};

/// Bytes of an inline segment's byte count.
const INLINE_HEADER: usize = 4;

/// Encodes an operation of queue pair `qpn`; `index` is its first block modulo 2^16.
///
/// # Errors
/// [`WqeError`] if the operation does not fit in a WQE.
pub fn encode(op: &SendOp<'_>, qpn: u32, index: u16, flags: WqeFlags) -> Result<WqeBytes, WqeError> {
    let mut wqe = WqeBytes { bytes: [0; MAX_WQE_BYTES], ds: 0 };
    wqe.ds = encode_into(&mut wqe.bytes, op, qpn, index, flags)?;
    Ok(wqe)
}

/// As [`encode`], into a reused buffer. Returns `ds`; the WQE occupies the first `ds * 16` bytes, and no others are
/// written.
///
/// # Errors
/// [`WqeError`] if the operation does not fit in a WQE; the buffer then holds parts of it.
pub fn encode_into(
    out: &mut [u8; MAX_WQE_BYTES],
    op: &SendOp<'_>,
    qpn: u32,
    index: u16,
    flags: WqeFlags,
) -> Result<u8, WqeError> {
    if qpn > MAX_QPN {
        return Err(WqeError::Qpn(qpn));
    }
    let mut body = Body { out, ds: 1 };
    let (opcode, imm) = match *op {
        SendOp::Nop => (Opcode::NOP, None),
        SendOp::Send { payload, imm } => {
            body.payload(payload)?;
            (if imm.is_some() { Opcode::SEND_IMM } else { Opcode::SEND }, imm)
        }
        SendOp::Datagram { to, payload, imm } => {
            to.to_bytes().as_chunks().0.iter().for_each(|segment| body.push(*segment));
            body.payload(payload)?;
            (if imm.is_some() { Opcode::SEND_IMM } else { Opcode::SEND }, imm)
        }
        SendOp::Write { remote, payload, imm } => {
            body.push(remote.to_bytes());
            body.payload(payload)?;
            (if imm.is_some() { Opcode::RDMA_WRITE_IMM } else { Opcode::RDMA_WRITE }, imm)
        }
        SendOp::Read { remote, sges } => {
            body.push(remote.to_bytes());
            if body.sges(sges)? == 0 {
                return Err(WqeError::ReadNeedsBuffer);
            }
            (Opcode::RDMA_READ, None)
        }
        SendOp::CompareSwap { remote, compare, swap, result } => {
            body.atomic(remote, swap, compare, result)?;
            (Opcode::ATOMIC_CS, None)
        }
        SendOp::FetchAdd { remote, add, result } => {
            body.atomic(remote, add, 0, result)?;
            (Opcode::ATOMIC_FA, None)
        }
    };
    body.put(0, &ctrl(qpn, index, flags, (opcode, imm), body.ds));
    Ok(body.ds)
}

/// The control segment.
#[inline]
fn ctrl(
    qpn: u32,
    index: u16,
    flags: WqeFlags,
    (opcode, imm): (Opcode, Option<u32>),
    ds: u8,
) -> [u8; SEGMENT] {
    let (fm_ce_se, imm) = (flags.fm_ce_se(), imm.unwrap_or(0).to_be_bytes());
    Ctrl { index, opcode, qpn, ds, fm_ce_se, imm, ..Ctrl::default() }.to_bytes()
}

/// Appends segments behind the control segment.
struct Body<'a> {
    out: &'a mut [u8; MAX_WQE_BYTES],
    ds: u8,
}

impl Body<'_> {
    #[inline]
    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.out[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn end(&self) -> usize {
        usize::from(self.ds) * SEGMENT
    }

    /// Segments that still fit.
    fn room(&self) -> usize {
        usize::from(MAX_DS - self.ds)
    }

    #[inline]
    fn push(&mut self, segment: [u8; SEGMENT]) {
        self.put(self.end(), &segment);
        self.ds += 1;
    }

    #[inline]
    fn payload(&mut self, payload: Payload<'_>) -> Result<(), WqeError> {
        match payload {
            Payload::Sges(sges) => self.sges(sges).map(drop),
            Payload::Inline(bytes) => self.inline(bytes),
        }
    }

    /// Returns the length of the message.
    #[inline]
    fn sges(&mut self, sges: &[DataSeg]) -> Result<u64, WqeError> {
        if let [sge] = sges
            && (1..=MAX_MESSAGE).contains(&sge.len)
            && self.room() > 0
        {
            // Most have one SGE.
            self.push(sge.to_bytes());
            return Ok(sge.len.into());
        }
        let mut len = 0;
        for sge in used_sges(sges, self.room())? {
            len += u64::from(sge.len);
            self.push(sge.to_bytes());
        }
        if len > u64::from(MAX_MESSAGE) { Err(WqeError::TotalTooLong { len }) } else { Ok(len) }
    }

    fn inline(&mut self, bytes: &[u8]) -> Result<(), WqeError> {
        let max = self.room() * SEGMENT - INLINE_HEADER;
        let len = match u32::try_from(bytes.len()) {
            // rdma-core emits no segment for an empty inline payload.
            Ok(0) => return Ok(()),
            Ok(len) if bytes.len() <= max => len,
            _ => return Err(WqeError::InlineTooLong { len: bytes.len(), max }),
        };
        self.put(self.end(), &(INLINE | len).to_be_bytes());
        let start = self.end() + INLINE_HEADER;
        self.put(start, bytes);
        let used = start + bytes.len();
        let end = used.next_multiple_of(SEGMENT);
        self.out[used..end].fill(0);
        self.ds = u8::try_from(end / SEGMENT).expect("checked against the room of a WQE");
        Ok(())
    }

    fn atomic(
        &mut self,
        remote: RemoteAddr,
        swap_or_add: u64,
        compare: u64,
        result: DataSeg,
    ) -> Result<(), WqeError> {
        if result.len != 8 {
            return Err(WqeError::AtomicResult { len: result.len });
        }
        self.push(remote.to_bytes());
        self.push((u128::from(swap_or_add) << 64 | u128::from(compare)).to_be_bytes());
        self.push(result.to_bytes());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::changed;
    use super::*;

    const REMOTE: RemoteAddr = RemoteAddr { addr: 0x1122_3344_5566_7788, rkey: 0x99aa_bbcc };
    const SGE: DataSeg = DataSeg { addr: 0x0102_0304_0506_0708, len: 0x1000, lkey: 0x2122_2324 };
    const RESULT: DataSeg = DataSeg { len: 8, ..SGE };
    const PLAIN: WqeFlags = WqeFlags { fence: false, solicited: false };

    fn bytes(op: &SendOp<'_>) -> Vec<u8> {
        encode(op, 0x123, 0x12b, PLAIN).unwrap().as_bytes().to_vec()
    }

    fn send(payload: Payload<'_>) -> SendOp<'_> {
        SendOp::Send { payload, imm: None }
    }

    fn write(payload: Payload<'_>) -> SendOp<'_> {
        SendOp::Write { remote: REMOTE, payload, imm: None }
    }

    /// The worked example: a write at block 299 of QP 0x123 with one buffer.
    #[test]
    fn write_with_one_buffer() {
        let wqe = encode(&write(Payload::Sges(&[SGE])), 0x123, 299, PLAIN).unwrap();
        let expected = [
            [0x00, 0x01, 0x2b, 0x08, 0x00, 0x01, 0x23, 0x03, 0, 0, 0, 0x08, 0, 0, 0, 0],
            [0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0, 0, 0, 0],
            [0, 0, 0x10, 0, 0x21, 0x22, 0x23, 0x24, 1, 2, 3, 4, 5, 6, 7, 8],
        ];
        assert_eq!(wqe.as_bytes(), expected.as_flattened());
        assert_eq!((wqe.ds(), wqe.blocks()), (3, 1));
        assert_eq!(wqe.first8(), [0, 1, 0x2b, 8, 0, 1, 0x23, 3]);
    }

    #[test]
    fn atomics_hold_big_endian_operands() {
        let cs = SendOp::CompareSwap {
            remote: REMOTE,
            compare: 0x0807_0605_0403_0201,
            swap: 0x1817_1615_1413_1211,
            result: RESULT,
        };
        let wqe = bytes(&cs);
        assert_eq!(wqe.len(), 64);
        assert_eq!((wqe[3], wqe[7]), (0x11, 4));
        assert_eq!(wqe[16..32], REMOTE.to_bytes());
        let operands = [0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11, 8, 7, 6, 5, 4, 3, 2, 1];
        assert_eq!(wqe[32..48], operands);
        assert_eq!(wqe[48..], [0, 0, 0, 8, 0x21, 0x22, 0x23, 0x24, 1, 2, 3, 4, 5, 6, 7, 8]);

        let fa = bytes(&SendOp::FetchAdd { remote: REMOTE, add: 0x1817_1615_1413_1211, result: RESULT });
        assert_eq!(fa[3], 0x12);
        assert_eq!((&fa[32..40], &fa[40..48]), (&operands[..8], &[0; 8][..]));
        assert_eq!(fa[48..], wqe[48..]);
    }

    #[test]
    fn opcode_and_length_of_every_operation() {
        let sges = [SGE, SGE];
        let two = Payload::Sges(&sges);
        let cases = [
            (SendOp::Nop, 0x00, 1),
            (send(two), 0x0a, 3),
            (SendOp::Send { payload: two, imm: Some(0) }, 0x0b, 3),
            (write(two), 0x08, 4),
            (SendOp::Write { remote: REMOTE, payload: two, imm: Some(0) }, 0x09, 4),
            (SendOp::Read { remote: REMOTE, sges: &sges }, 0x10, 4),
            (SendOp::CompareSwap { remote: REMOTE, compare: 0, swap: 0, result: RESULT }, 0x11, 4),
            (SendOp::FetchAdd { remote: REMOTE, add: 0, result: RESULT }, 0x12, 4),
            (send(Payload::Sges(&[])), 0x0a, 1),
            (write(Payload::Sges(&[])), 0x08, 2),
        ];
        for (op, opcode, ds) in cases {
            let wqe = bytes(&op);
            assert_eq!((wqe[0], wqe[3], wqe[7]), (0, opcode, ds), "{op:?}");
            assert_eq!(wqe.len(), usize::from(ds) * 16);
        }
    }

    #[test]
    fn each_input_changes_only_its_bytes() {
        let sge = [DataSeg::default(), DataSeg { len: 1, ..DataSeg::default() }];
        let op = |remote, sges, imm| SendOp::Write { remote, payload: Payload::Sges(sges), imm };
        let (zero, one) = (RemoteAddr::default(), &sge[1..]);
        let enc =
            |op: &SendOp<'_>, qpn, index, flags| encode(op, qpn, index, flags).unwrap().as_bytes().to_vec();
        let base = enc(&op(zero, one, Some(0)), 0, 0, PLAIN);

        let flags = |fence, solicited| WqeFlags { fence, solicited };
        let far = RemoteAddr { addr: 0x0102_0304_0506_0708, rkey: 0 };
        let keyed = RemoteAddr { addr: 0, rkey: 0x0102_0304 };
        let long = [DataSeg { len: 0x0102_0304, ..sge[1] }];
        let lkey = [DataSeg { lkey: 0x0102_0304, ..sge[1] }];
        let addr = [DataSeg { addr: 0x0102_0304_0506_0708, ..sge[1] }];
        let cases = [
            (enc(&op(zero, one, Some(0)), 0x01_0203, 0, PLAIN), 4, vec![1, 2, 3]),
            (enc(&op(zero, one, Some(0)), 0, 0x0102, PLAIN), 1, vec![1, 2]),
            (enc(&op(zero, one, Some(0x0102_0304)), 0, 0, PLAIN), 12, vec![1, 2, 3, 4]),
            (enc(&op(zero, one, None), 0, 0, PLAIN), 3, vec![0x08]),
            (enc(&op(zero, one, Some(0)), 0, 0, flags(true, false)), 11, vec![0x88]),
            (enc(&op(zero, one, Some(0)), 0, 0, flags(false, true)), 11, vec![0x0a]),
            (enc(&op(zero, one, Some(0)), 0, 0, flags(true, true)), 11, vec![0x8a]),
            (enc(&op(far, one, Some(0)), 0, 0, PLAIN), 16, vec![1, 2, 3, 4, 5, 6, 7, 8]),
            (enc(&op(keyed, one, Some(0)), 0, 0, PLAIN), 24, vec![1, 2, 3, 4]),
            (enc(&op(zero, &long, Some(0)), 0, 0, PLAIN), 32, vec![1, 2, 3, 4]),
            (enc(&op(zero, &lkey, Some(0)), 0, 0, PLAIN), 36, vec![1, 2, 3, 4]),
            (enc(&op(zero, &addr, Some(0)), 0, 0, PLAIN), 40, vec![1, 2, 3, 4, 5, 6, 7, 8]),
        ];
        for (wqe, at, expected) in cases {
            let expected: Vec<_> = (at..).zip(expected).collect();
            assert_eq!(changed(&base, &wqe), expected);
        }
    }

    #[test]
    fn empty_buffers_are_dropped() {
        let none = DataSeg { len: 0, ..SGE };
        let two = bytes(&send(Payload::Sges(&[SGE, SGE])));
        assert_eq!(bytes(&send(Payload::Sges(&[none, SGE, none, SGE, none]))), two);
        assert_eq!(bytes(&send(Payload::Sges(&[none; 100]))).len(), 16);
    }

    #[test]
    fn inline_bytes_are_padded_to_whole_segments() {
        let data: Vec<u8> = (1..=60).collect();
        let segments =
            [(0, 0), (1, 1), (11, 1), (12, 1), (13, 2), (28, 2), (29, 3), (44, 3), (45, 4), (60, 4)];
        let mut out = [0xee; MAX_WQE_BYTES];
        for (len, extra) in segments {
            let op = write(Payload::Inline(&data[..len]));
            let ds = encode_into(&mut out, &op, 1, 0, PLAIN).unwrap();
            assert_eq!(ds, 2 + extra, "{len}");
            let end = usize::from(ds) * 16;
            if len > 0 {
                let count = u8::try_from(len).unwrap();
                assert_eq!(out[32..36], [0x80, 0, 0, count]);
                assert_eq!(out[36..36 + len], data[..len]);
                assert!(out[36 + len..end].iter().all(|&b| b == 0), "padding of {len}");
            }
            assert_eq!(out[end], 0xee, "nothing is written behind the WQE");
            out[..end].fill(0xee);
        }
    }

    #[test]
    fn longest_wqes_fit_and_longer_ones_fail() {
        let sges = [DataSeg { len: 16, ..SGE }; 63];
        let raw = [7; 1024];
        let ds = |op: &SendOp<'_>| encode(op, 1, 0, PLAIN).map(|w| (w.ds(), w.blocks()));
        let read = |n| SendOp::Read { remote: REMOTE, sges: &sges[..n] };

        assert_eq!(ds(&send(Payload::Sges(&sges[..62]))), Ok((63, 16)));
        assert_eq!(ds(&send(Payload::Sges(&sges[..63]))), Err(WqeError::TooManySges { got: 63, max: 62 }));
        assert_eq!(ds(&write(Payload::Sges(&sges[..61]))), Ok((63, 16)));
        assert_eq!(ds(&write(Payload::Sges(&sges[..62]))), Err(WqeError::TooManySges { got: 62, max: 61 }));
        assert_eq!(ds(&read(61)), Ok((63, 16)));
        assert_eq!(ds(&read(62)), Err(WqeError::TooManySges { got: 62, max: 61 }));

        assert_eq!(ds(&send(Payload::Inline(&raw[..988]))), Ok((63, 16)));
        assert_eq!(
            ds(&send(Payload::Inline(&raw[..989]))),
            Err(WqeError::InlineTooLong { len: 989, max: 988 })
        );
        assert_eq!(ds(&write(Payload::Inline(&raw[..972]))), Ok((63, 16)));
        assert_eq!(
            ds(&write(Payload::Inline(&raw[..973]))),
            Err(WqeError::InlineTooLong { len: 973, max: 972 })
        );
    }

    #[test]
    fn messages_are_limited_to_one_gib() {
        let len = |len| DataSeg { len, ..SGE };
        let enc = |sges: &[DataSeg]| encode(&send(Payload::Sges(sges)), 1, 0, PLAIN).map(|w| w.ds());
        assert_eq!(enc(&[len(1 << 30)]), Ok(2));
        let too_long = WqeError::SgeTooLong { len: (1 << 30) + 1, max: 1 << 30 };
        assert_eq!(enc(&[len(1), len((1 << 30) + 1)]), Err(too_long));
        assert_eq!(enc(&[len((1 << 30) - 1), len(1)]), Ok(3));
        assert_eq!(enc(&[len(1 << 30), len(1)]), Err(WqeError::TotalTooLong { len: (1 << 30) + 1 }));
        assert_eq!(enc(&[len(1 << 30); 5]), Err(WqeError::TotalTooLong { len: 5 << 30 }));
    }

    #[test]
    fn invalid_operations_are_refused() {
        let enc = |op, qpn| encode(&op, qpn, 0, PLAIN).map(|w| w.ds());
        assert_eq!(enc(SendOp::Read { remote: REMOTE, sges: &[] }, 1), Err(WqeError::ReadNeedsBuffer));
        let empty = [DataSeg { len: 0, ..SGE }];
        assert_eq!(enc(SendOp::Read { remote: REMOTE, sges: &empty }, 1), Err(WqeError::ReadNeedsBuffer));
        let result = DataSeg { len: 4, ..SGE };
        let fa = SendOp::FetchAdd { remote: REMOTE, add: 1, result };
        assert_eq!(enc(fa, 1), Err(WqeError::AtomicResult { len: 4 }));
        let cs = SendOp::CompareSwap { remote: REMOTE, compare: 0, swap: 1, result };
        assert_eq!(enc(cs, 1), Err(WqeError::AtomicResult { len: 4 }));
        assert_eq!(enc(SendOp::Nop, 0x00ff_ffff), Ok(1));
        assert_eq!(enc(SendOp::Nop, 0x0100_0000), Err(WqeError::Qpn(0x0100_0000)));
    }
}
