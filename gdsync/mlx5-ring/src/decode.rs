//! Decoding of send WQEs: the errors that a card reports, and violations that it may tolerate.

use core::ops::Range;

use super::atomic::MaskedAtomic;
use super::ctrl::{CE_ALWAYS, CE_MASK, Ctrl, FM_FENCE_AND_INITIATOR_SMALL, FM_MASK, SOLICITED};
use super::opcode::{Opcode, Syndrome};
use super::segment::{DataSeg, INLINE, MAX_MESSAGE, RemoteAddr, SEGMENT};
use super::wqe::{MAX_DS, MAX_QPN};

/// Bytes of an inline segment's byte count.
const INLINE_HEADER: usize = 4;

/// A decoded operation. Payload stays in the WQE's bytes; nothing is copied or allocated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DecodedOp {
    /// NOP.
    Nop,
    /// Send.
    Send {
        /// Payload.
        payload: DecodedPayload,
        /// Immediate data.
        imm: Option<u32>,
    },
    /// RDMA write.
    Write {
        /// Destination.
        remote: RemoteAddr,
        /// Payload.
        payload: DecodedPayload,
        /// Immediate data.
        imm: Option<u32>,
    },
    /// RDMA read.
    Read {
        /// Source.
        remote: RemoteAddr,
        /// Destination; empty for a READ of no bytes.
        sges: SgeList,
    },
    /// Compare-and-swap of a remote 64-bit word.
    CompareSwap {
        /// The word. Its alignment is not checked here.
        remote: RemoteAddr,
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
        /// Destination of the old value, 8 bytes.
        result: DataSeg,
    },
    /// Fetch-and-add of a remote 64-bit word.
    FetchAdd {
        /// The word. Its alignment is not checked here.
        remote: RemoteAddr,
        /// Addend.
        add: u64,
        /// Destination of the old value, 8 bytes.
        result: DataSeg,
    },
    /// Atomic operation on chosen bits of a remote word.
    MaskedAtomic {
        /// The word. Its alignment is not checked here.
        remote: RemoteAddr,
        /// Operation.
        atomic: MaskedAtomic,
        /// Destination of the old value, as long as the word.
        result: DataSeg,
    },
    /// Holds the queue until a completion queue has this completion.
    Wait {
        /// Number of the completion queue.
        cqn: u32,
        /// Low bits of the completion's number, from 0.
        index: u32,
    },
}

impl DecodedOp {
    /// Payload of a send or RDMA write.
    pub const fn payload(&self) -> Option<&DecodedPayload> {
        match self {
            Self::Send { payload, .. } | Self::Write { payload, .. } => Some(payload),
            _ => None,
        }
    }
}

/// Location of a WQE's payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DecodedPayload {
    /// In these SGEs.
    Sges(SgeList),
    /// Inline, at this range of the WQE's bytes.
    Inline(Range<usize>),
    /// Segments of both kinds, or several inline ones.
    Mixed(MixedList),
}

impl DecodedPayload {
    /// Total length in bytes, at most [`MAX_MESSAGE`].
    pub const fn total_bytes(&self) -> usize {
        match self {
            Self::Inline(range) => range.end - range.start,
            Self::Sges(list) => list.total as usize,
            Self::Mixed(list) => list.total as usize,
        }
    }
}

/// A part of a payload of [`DecodedPayload::Mixed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadPart<'a> {
    /// These bytes of the WQE.
    Inline(&'a [u8]),
    /// In this SGE.
    Sge(DataSeg),
}

/// Inline and pointer segments of a WQE, still encoded in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MixedList {
    start: usize,
    end: usize,
    total: u32,
}

impl MixedList {
    /// Total length in bytes, at most [`MAX_MESSAGE`].
    pub const fn total_bytes(&self) -> u32 {
        self.total
    }

    /// The parts in order, from the bytes of the decoded WQE.
    pub fn iter(self, wqe: &[u8]) -> impl Iterator<Item = PayloadPart<'_>> {
        let (segments, _) = wqe.get(self.start..self.end).unwrap_or_default().as_chunks();
        let mut at = 0;
        core::iter::from_fn(move || {
            let (part, next) = mixed_part(segments, at).ok()??;
            at = next;
            Some(part)
        })
    }
}

/// SGEs of a WQE, still encoded in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SgeList {
    start: usize,
    end: usize,
    total: u32,
}

impl SgeList {
    /// Number of SGEs.
    pub const fn len(&self) -> usize {
        (self.end - self.start) / SEGMENT
    }

    /// Whether there are no SGEs, that is, the message has no bytes.
    pub const fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Total length in bytes, at most [`MAX_MESSAGE`].
    pub const fn total_bytes(&self) -> u32 {
        self.total
    }

    /// The SGEs, none of them empty, from the bytes of the decoded WQE.
    pub fn iter(self, wqe: &[u8]) -> impl Iterator<Item = DataSeg> + '_ {
        let (segments, _) = wqe.get(self.start..self.end).unwrap_or_default().as_chunks();
        segments.iter().map(DataSeg::from_bytes)
    }
}

/// Error in a WQE that a card reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// Unknown or unsupported opcode.
    #[error("opcode {0} is not supported")]
    Opcode(Opcode),
    /// Unsupported operation modifier.
    #[error("{opcode} has an opmod of {opmod:#x}, which is not supported")]
    Opmod {
        /// Opcode.
        opcode: Opcode,
        /// Modifier.
        opmod: u8,
    },
    /// Length not valid for the opcode: missing or excess segments.
    #[error("{opcode} has ds {ds}, expected {min} to {max}")]
    Ds {
        /// Opcode.
        opcode: Opcode,
        /// Length in segments.
        ds: u8,
        /// Minimum.
        min: u8,
        /// Maximum.
        max: u8,
    },
    /// Fewer bytes given than `ds` needs.
    #[error("ds {ds} is longer than the {len} bytes given")]
    Truncated {
        /// Length in segments.
        ds: u8,
        /// Bytes given.
        len: usize,
    },
    /// Empty data segment, which some adapters read as 2^31 bytes.
    #[error("segment {segment}: a buffer of 0 bytes")]
    EmptySge {
        /// Index in the WQE, from 0.
        segment: usize,
    },
    /// Inline data in a read or atomic.
    #[error("segment {segment}: misplaced inline data")]
    MisplacedInline {
        /// Index in the WQE, from 0.
        segment: usize,
    },
    /// Inline data that exceeds the WQE.
    #[error("{len} bytes of inline data in a WQE with room for {room}")]
    InlineTooLong {
        /// Length in bytes.
        len: usize,
        /// Room left by `ds`.
        room: usize,
    },
    /// The address of a datagram has the compact form.
    #[error("a compact address vector, which is not supported")]
    CompactAddress,
    /// The message exceeds the maximum length.
    #[error("a message of {len} bytes is too long: at most {max}", max = MAX_MESSAGE)]
    TooLong {
        /// Length in bytes.
        len: u64,
    },
    /// The result buffer of an atomic is not as long as the word.
    #[error("the result of an atomic takes {size} bytes, not {len}")]
    AtomicResult {
        /// Length in bytes.
        len: u32,
        /// Bytes of the word.
        size: u8,
    },
}

impl DecodeError {
    /// Syndrome of the WQE's CQE.
    pub const fn syndrome(&self) -> Syndrome {
        match self {
            Self::TooLong { .. } => Syndrome::LOC_LEN_ERR,
            _ => Syndrome::LOC_QP_OP_ERR,
        }
    }
}

/// Decodes the WQE with control segment `ctrl`. `wqe` holds all its bytes including the control segment; bytes beyond
/// `ds * 16` are ignored.
///
/// # Errors
/// [`DecodeError`], which a card would report as an error completion.
pub fn decode_body(ctrl: &Ctrl, wqe: &[u8]) -> Result<DecodedOp, DecodeError> {
    let &Ctrl { opcode, opmod, ds, .. } = ctrl;
    let (min, max) = match opcode {
        Opcode::NOP | Opcode::SEND | Opcode::SEND_IMM => (1, MAX_DS),
        Opcode::RDMA_WRITE | Opcode::RDMA_WRITE_IMM | Opcode::RDMA_READ => (2, MAX_DS),
        Opcode::ATOMIC_CS | Opcode::ATOMIC_FA => (4, 4),
        Opcode::ATOMIC_MASKED_CS | Opcode::ATOMIC_MASKED_FA => {
            let ds = 3 + MaskedAtomic::segments(opcode, opmod);
            (ds, ds)
        }
        Opcode::WAIT => (2, 2),
        _ => return Err(DecodeError::Opcode(opcode)),
    };
    let is_masked = matches!(opcode, Opcode::ATOMIC_MASKED_CS | Opcode::ATOMIC_MASKED_FA);
    if opmod != 0 && !is_masked {
        return Err(DecodeError::Opmod { opcode, opmod });
    }
    if ds < min || ds > max {
        return Err(DecodeError::Ds { opcode, ds, min, max });
    }
    let len = wqe.len();
    let wqe = wqe.get(..usize::from(ds) * SEGMENT).ok_or(DecodeError::Truncated { ds, len })?;
    let (segments, _) = wqe.as_chunks();

    let number = u32::from_be_bytes(ctrl.imm);
    let imm = matches!(opcode, Opcode::SEND_IMM | Opcode::RDMA_WRITE_IMM).then_some(number);
    Ok(match opcode {
        Opcode::NOP => DecodedOp::Nop,
        Opcode::SEND | Opcode::SEND_IMM => DecodedOp::Send { payload: payload(segments, 1)?, imm },
        Opcode::RDMA_WRITE | Opcode::RDMA_WRITE_IMM => {
            let remote = RemoteAddr::from_bytes(&segments[1]);
            DecodedOp::Write { remote, payload: payload(segments, 2)?, imm }
        }
        Opcode::RDMA_READ => {
            let remote = RemoteAddr::from_bytes(&segments[1]);
            DecodedOp::Read { remote, sges: sge_list(segments, 2)? }
        }
        Opcode::WAIT => {
            let [_, _, index, cqn] = words(&segments[1]);
            DecodedOp::Wait { cqn: cqn & MAX_QPN, index }
        }
        Opcode::ATOMIC_MASKED_CS | Opcode::ATOMIC_MASKED_FA => {
            let (operands, last) = (&segments[2..segments.len() - 1], segments.len() - 1);
            let atomic = MaskedAtomic::decode(opcode, opmod, operands);
            let atomic = atomic.ok_or(DecodeError::Opmod { opcode, opmod })?;
            let result = atomic_result(segments, last, atomic.size)?;
            DecodedOp::MaskedAtomic { remote: RemoteAddr::from_bytes(&segments[1]), atomic, result }
        }
        _ => atomic(opcode, segments)?,
    })
}

pub(super) fn payload(segments: &[[u8; SEGMENT]], first: usize) -> Result<DecodedPayload, DecodeError> {
    match sge_list(segments, first) {
        Ok(list) => Ok(DecodedPayload::Sges(list)),
        Err(DecodeError::MisplacedInline { segment }) => inline_payload(segments, first, segment),
        Err(error) => Err(error),
    }
}

/// A payload with inline segments; `inline` is the first.
fn inline_payload(
    segments: &[[u8; SEGMENT]],
    first: usize,
    inline: usize,
) -> Result<DecodedPayload, DecodeError> {
    let (mut at, mut parts, mut total) = (first, 0, 0);
    while let Some((part, next)) = mixed_part(segments, at)? {
        total += match part {
            PayloadPart::Inline(bytes) => bytes.len() as u64,
            PayloadPart::Sge(sge) => u64::from(sge.len),
        };
        (at, parts) = (next, parts + 1);
    }
    let (start, end) = (first * SEGMENT, segments.len() * SEGMENT);
    match u32::try_from(total) {
        Ok(total) if inline == first && parts == 1 => {
            let start = start + INLINE_HEADER;
            Ok(DecodedPayload::Inline(start..start + total as usize))
        }
        Ok(total) if total <= MAX_MESSAGE => Ok(DecodedPayload::Mixed(MixedList { start, end, total })),
        _ => Err(DecodeError::TooLong { len: total }),
    }
}

/// The part of a payload that begins at segment `at`, and the segment behind it; `None` at the end.
fn mixed_part(
    segments: &[[u8; SEGMENT]],
    at: usize,
) -> Result<Option<(PayloadPart<'_>, usize)>, DecodeError> {
    let Some(bytes) = segments.get(at) else { return Ok(None) };
    let sge = DataSeg::from_bytes(bytes);
    match sge.len {
        0 => Err(DecodeError::EmptySge { segment: at }),
        count if count & INLINE == 0 => Ok(Some((PayloadPart::Sge(sge), at + 1))),
        count => {
            let len = (count & !INLINE) as usize;
            let rest = &segments[at..].as_flattened()[INLINE_HEADER..];
            let data = rest.get(..len).ok_or(DecodeError::InlineTooLong { len, room: rest.len() })?;
            Ok(Some((PayloadPart::Inline(data), at + (INLINE_HEADER + len).div_ceil(SEGMENT))))
        }
    }
}

fn sge_list(segments: &[[u8; SEGMENT]], first: usize) -> Result<SgeList, DecodeError> {
    let mut len = 0;
    for (segment, bytes) in segments.iter().enumerate().skip(first) {
        match DataSeg::from_bytes(bytes).len {
            0 => return Err(DecodeError::EmptySge { segment }),
            count if count & INLINE != 0 => return Err(DecodeError::MisplacedInline { segment }),
            count => len += u64::from(count),
        }
    }
    match u32::try_from(len) {
        Ok(total) if total <= MAX_MESSAGE => {
            Ok(SgeList { start: first * SEGMENT, end: segments.len() * SEGMENT, total })
        }
        _ => Err(DecodeError::TooLong { len }),
    }
}

fn atomic(opcode: Opcode, segments: &[[u8; SEGMENT]]) -> Result<DecodedOp, DecodeError> {
    let remote = RemoteAddr::from_bytes(&segments[1]);
    let [swap_or_add, compare] = halves(&segments[2]);
    let result = atomic_result(segments, 3, 8)?;
    Ok(if opcode == Opcode::ATOMIC_CS {
        DecodedOp::CompareSwap { remote, compare, swap: swap_or_add, result }
    } else {
        // The second operand of a fetch-and-add is undefined; rdma-core leaves stale bytes there.
        DecodedOp::FetchAdd { remote, add: swap_or_add, result }
    })
}

/// Where the old value of a word of `size` bytes goes: the SGE in `segment`.
fn atomic_result(segments: &[[u8; SEGMENT]], segment: usize, size: u8) -> Result<DataSeg, DecodeError> {
    let result = DataSeg::from_bytes(&segments[segment]);
    match result.len {
        len if len == u32::from(size) => Ok(result),
        len if len & INLINE != 0 => Err(DecodeError::MisplacedInline { segment }),
        len => Err(DecodeError::AtomicResult { len, size }),
    }
}

fn words(segment: &[u8; SEGMENT]) -> [u32; 4] {
    let mut words = [0; 4];
    words.iter_mut().zip(segment.as_chunks().0).for_each(|(word, bytes)| *word = u32::from_be_bytes(*bytes));
    words
}

fn halves(segment: &[u8; SEGMENT]) -> [u64; 2] {
    let [a0, a1, a2, a3, a4, a5, a6, a7, low @ ..] = *segment;
    [u64::from_be_bytes([a0, a1, a2, a3, a4, a5, a6, a7]), u64::from_be_bytes(low)]
}

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
            | Opcode::ATOMIC_MASKED_CS
            | Opcode::ATOMIC_MASKED_FA
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
    use super::super::atomic::MaskedOp;
    use super::super::ctrl::decode_ctrl;
    use super::*;

    /// Builds a WQE from control fields and 16-byte segments.
    fn decode(opcode: Opcode, body: &[[u8; 16]]) -> Result<DecodedOp, DecodeError> {
        let ds = u8::try_from(1 + body.len()).unwrap();
        let ctrl = Ctrl { opcode, ds, ..Ctrl::default() };
        decode_body(&ctrl, &[&[ctrl.to_bytes()], body].concat().concat())
    }

    fn sge(len: u32) -> [u8; 16] {
        DataSeg { addr: 0x1000, len, lkey: 7 }.to_bytes()
    }

    const REMOTE: [u8; 16] = [0; 16];

    #[test]
    fn only_supported_opcodes_are_accepted() {
        let accepted = [0x00, 0x08, 0x09, 0x0a, 0x0b, 0x0f, 0x10, 0x11, 0x12, 0x14, 0x15];
        for opcode in (0..=255).map(Opcode).filter(|op| !accepted.contains(&op.0)) {
            let err = decode(opcode, &[REMOTE, REMOTE, sge(8)]).unwrap_err();
            assert_eq!(err, DecodeError::Opcode(opcode));
            assert_eq!(err.syndrome(), Syndrome::LOC_QP_OP_ERR);
        }
    }

    #[test]
    fn nonzero_opmod_is_refused() {
        let ctrl = Ctrl { opcode: Opcode::SEND, opmod: 8, ds: 1, ..Ctrl::default() };
        let err = decode_body(&ctrl, &ctrl.to_bytes()).unwrap_err();
        assert_eq!(err, DecodeError::Opmod { opcode: Opcode::SEND, opmod: 8 });
    }

    #[test]
    fn opcodes_limit_their_length() {
        for (opcode, min, max) in [
            (0x00, 1, 63),
            (0x0a, 1, 63),
            (0x0b, 1, 63),
            (0x08, 2, 63),
            (0x09, 2, 63),
            (0x10, 2, 63),
            (0x0f, 2, 2),
            (0x11, 4, 4),
            (0x12, 4, 4),
        ] {
            let opcode = Opcode(opcode);
            // Each segment that is read as an SGE has 8 bytes.
            let wqe = sge(8).repeat(64);
            for ds in 0..=64 {
                let got = decode_body(&Ctrl { opcode, ds, ..Ctrl::default() }, &wqe);
                let expected = DecodeError::Ds { opcode, ds, min, max };
                let ok = (min..=max).contains(&ds);
                assert_eq!(got.err(), (!ok).then_some(expected), "{opcode} {ds}");
            }
        }
    }

    #[test]
    fn missing_bytes_fail_and_excess_bytes_are_ignored() {
        let ctrl = Ctrl { opcode: Opcode::SEND, ds: 2, ..Ctrl::default() };
        let wqe = [ctrl.to_bytes(), sge(1), [0; 16]].concat();
        assert_eq!(decode_body(&ctrl, &wqe[..31]), Err(DecodeError::Truncated { ds: 2, len: 31 }));
        assert_eq!(decode_body(&ctrl, &wqe), decode_body(&ctrl, &wqe[..32]));
        assert!(decode_body(&ctrl, &wqe).is_ok());
    }

    #[test]
    fn empty_or_inline_buffers_are_refused() {
        for (opcode, header) in [(Opcode::SEND, 0), (Opcode::RDMA_WRITE, 1), (Opcode::RDMA_READ, 1)] {
            let at = |segment: usize| segment + header;
            let body = |segs: &[[u8; 16]]| [&[REMOTE][..header], segs].concat();
            let empty = decode(opcode, &body(&[sge(1), sge(0)]));
            assert_eq!(empty, Err(DecodeError::EmptySge { segment: at(2) }));
        }
        let read = decode(Opcode::RDMA_READ, &[REMOTE, sge(INLINE | 1)]);
        assert_eq!(read, Err(DecodeError::MisplacedInline { segment: 2 }));
    }

    #[test]
    fn inline_data_lies_in_its_segments() {
        let send = |len: u32, segments: usize| {
            decode(Opcode::SEND, &[&[sge(INLINE | len)][..], &vec![[0; 16]; segments - 1]].concat())
        };
        let inline = |range| Ok(DecodedOp::Send { payload: DecodedPayload::Inline(range), imm: None });
        assert_eq!(send(0, 1), inline(20..20));
        assert_eq!(send(12, 1), inline(20..32));
        assert_eq!(send(13, 1), Err(DecodeError::InlineTooLong { len: 13, room: 12 }));
        assert_eq!(send(13, 2), inline(20..33));
        assert_eq!(send(28, 2), inline(20..48));
        // The segment behind it is an SGE.
        assert_eq!(send(12, 2), Err(DecodeError::EmptySge { segment: 2 }));
        assert_eq!(send(988, 62), inline(20..1008));
        let max = (INLINE - 1) as usize;
        assert_eq!(send(INLINE - 1, 62), Err(DecodeError::InlineTooLong { len: max, room: 988 }));
    }

    #[test]
    fn inline_and_pointer_segments_may_be_mixed() {
        let inline = |len: u8| {
            let mut segment = [len; 16];
            segment[..4].copy_from_slice(&(INLINE | u32::from(len)).to_be_bytes());
            segment
        };
        let (a, b) = (DataSeg { addr: 0x1000, len: 100, lkey: 7 }, DataSeg { addr: 0x1000, len: 5, lkey: 7 });
        let parts = |body: &[[u8; 16]]| {
            let wqe = [&[[0; 16]], body].concat().concat();
            match decode(Opcode::SEND, body) {
                Ok(DecodedOp::Send { payload: DecodedPayload::Mixed(list), .. }) => {
                    let parts = list.iter(&wqe).map(|part| match part {
                        PayloadPart::Inline(bytes) => (bytes.to_vec(), None),
                        PayloadPart::Sge(sge) => (vec![], Some(sge)),
                    });
                    Ok((list.total_bytes(), parts.collect::<Vec<_>>()))
                }
                Ok(other) => panic!("{other:?}"),
                Err(error) => Err(error),
            }
        };
        // UCX's header of 10 bytes before a buffer, and every other order.
        let (head, tail) = ((vec![10; 10], None), (vec![3; 3], None));
        assert_eq!(parts(&[inline(10), sge(100)]), Ok((110, vec![head.clone(), (vec![], Some(a))])));
        assert_eq!(
            parts(&[sge(100), inline(10), sge(5), inline(3)]),
            Ok((118, vec![(vec![], Some(a)), head.clone(), (vec![], Some(b)), tail.clone()]))
        );
        assert_eq!(parts(&[inline(10), inline(3)]), Ok((13, vec![head, tail])));
        assert_eq!(parts(&[sge(1), inline(13)]), Err(DecodeError::InlineTooLong { len: 13, room: 12 }));
        assert_eq!(parts(&[inline(3), sge(0)]), Err(DecodeError::EmptySge { segment: 2 }));
        let len = u64::from(MAX_MESSAGE) + 3;
        assert_eq!(parts(&[inline(3), sge(MAX_MESSAGE)]), Err(DecodeError::TooLong { len }));
    }

    #[test]
    fn oversized_messages_get_length_syndrome() {
        let gib = 1 << 30;
        let ok = decode(Opcode::SEND, &[sge(gib - 1), sge(1)]);
        let Ok(DecodedOp::Send { payload: DecodedPayload::Sges(sges), .. }) = ok else { panic!("{ok:?}") };
        assert_eq!((sges.len(), sges.is_empty(), sges.total_bytes()), (2, false, gib));
        let err = decode(Opcode::RDMA_READ, &[REMOTE, sge(gib), sge(1)]).unwrap_err();
        assert_eq!(err, DecodeError::TooLong { len: u64::from(gib) + 1 });
        assert_eq!(err.syndrome(), Syndrome::LOC_LEN_ERR);
        let wide = decode(Opcode::SEND, &[sge(INLINE - 1); 62]).unwrap_err();
        assert_eq!(wide, DecodeError::TooLong { len: 62 * u64::from(INLINE - 1) });
    }

    /// As UCX (`uct_rc_mlx5_txqp_dptr_post`) and DOCA GPUNetIO (`doca_gpu_dev_verbs_wqe_prepare_wait`) write them.
    #[test]
    fn masked_atomics_and_waits_are_decoded() {
        let masked = |opcode, opmod, operands: &[[u8; 16]], len| {
            let body = [&[REMOTE], operands, &[sge(len)]].concat();
            let ctrl = Ctrl { opcode, opmod, ds: u8::try_from(1 + body.len()).unwrap(), ..Ctrl::default() };
            match decode_body(&ctrl, &[&[ctrl.to_bytes()], &body[..]].concat().concat()) {
                Ok(DecodedOp::MaskedAtomic { atomic: MaskedAtomic { size, op }, result, .. }) => {
                    assert_eq!((u32::from(size), result.len), (len, len));
                    Ok(op)
                }
                Ok(other) => panic!("{other:?}"),
                Err(error) => Err(error),
            }
        };
        let (cs, fa) = (Opcode::ATOMIC_MASKED_CS, Opcode::ATOMIC_MASKED_FA);
        let (four, eight) = ([1, 2, 3, 4].map(u32::to_be_bytes), [[1u64, 2], [3, 4]]);
        let four = *four.concat().first_chunk().unwrap();
        let eight = eight.map(|half| *half.map(u64::to_be_bytes).concat().first_chunk().unwrap());
        let swap = MaskedOp::CompareSwap { swap: 1, compare: 2, swap_mask: 3, compare_mask: 4 };
        let add = MaskedOp::FetchAdd { add: 1, boundary: 2 };
        assert_eq!(masked(cs, 8, &[four], 4), Ok(swap));
        assert_eq!(masked(cs, 9, &eight, 8), Ok(swap));
        assert_eq!(masked(fa, 8, &[four], 4), Ok(add));
        assert_eq!(masked(fa, 9, &eight[..1], 8), Ok(add));
        assert_eq!(masked(fa, 8, &[four], 8), Err(DecodeError::AtomicResult { len: 8, size: 4 }));
        assert_eq!(masked(cs, 9, &eight[..1], 8).unwrap_err().syndrome(), Syndrome::LOC_QP_OP_ERR);
        for opmod in [0, 1, 7, 10] {
            assert_eq!(masked(fa, opmod, &[four], 8), Err(DecodeError::Opmod { opcode: fa, opmod }));
        }
        let wait = [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 0, 0xa, 0xb, 0xc];
        assert_eq!(decode(Opcode::WAIT, &[wait]), Ok(DecodedOp::Wait { cqn: 0xa_0b0c, index: 0x1_0203 }));
    }

    #[test]
    fn atomic_result_must_have_eight_bytes() {
        for opcode in [Opcode::ATOMIC_CS, Opcode::ATOMIC_FA] {
            let atomic = |len| decode(opcode, &[REMOTE, [0; 16], sge(len)]);
            assert!(atomic(8).is_ok());
            assert_eq!(atomic(4), Err(DecodeError::AtomicResult { len: 4, size: 8 }));
            assert_eq!(atomic(0), Err(DecodeError::AtomicResult { len: 0, size: 8 }));
            assert_eq!(atomic(INLINE | 8), Err(DecodeError::MisplacedInline { segment: 3 }));
        }
    }

    #[test]
    fn immediate_data_is_read_for_imm_opcodes_only() {
        let with = |opcode| {
            let ctrl = Ctrl { opcode, ds: 2, imm: [1, 2, 3, 4], ..Ctrl::default() };
            match decode_body(&ctrl, &[ctrl.to_bytes(), sge(1)].concat()) {
                Ok(DecodedOp::Send { imm, .. } | DecodedOp::Write { imm, .. }) => imm,
                other => panic!("{other:?}"),
            }
        };
        let imm = [Opcode::SEND, Opcode::SEND_IMM, Opcode::RDMA_WRITE, Opcode::RDMA_WRITE_IMM].map(with);
        assert_eq!(imm, [None, Some(0x0102_0304), None, Some(0x0102_0304)]);
    }

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
        for opcode in [0x00, 0x08, 0x09, 0x0a, 0x0b, 0x10, 0x11, 0x12] {
            good[3] = opcode;
            let has_remote = ![0x00, 0x0a, 0x0b].contains(&opcode);
            assert_eq!(check(&good).is_some(), has_remote, "opcode {opcode:#x}");
        }
    }
}
