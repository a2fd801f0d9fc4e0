//! Receive WQEs: scatter lists.

use super::error::WqeError;
use super::segment::{DataSeg, SEGMENT, used_sges};

/// Stride in bytes of receive WQEs with up to `max_sge` SGEs: a power of two.
pub const fn recv_stride(max_sge: u32) -> usize {
    let max_sge = if max_sge == 0 { 1 } else { max_sge as usize };
    max_sge.next_power_of_two() * SEGMENT
}

/// Encodes a receive WQE with this stride at the start of `out`. Empty SGEs are dropped.
///
/// A list shorter than the stride ends in a terminator, an SGE of length 0 with [`super::INVALID_LKEY`]; bytes behind
/// it are not written.
///
/// # Errors
/// [`WqeError::TooManySges`] if they do not fit in `out` or the stride, or [`WqeError::SgeTooLong`].
pub fn encode_recv(sges: &[DataSeg], stride: usize, out: &mut [u8]) -> Result<(), WqeError> {
    let (segments, _) = out.as_chunks_mut::<SEGMENT>();
    let room = segments.len().min(stride / SEGMENT);
    let list = used_sges(sges, room)?.copied().chain([DataSeg::TERMINATOR]);
    for (segment, entry) in segments[..room].iter_mut().zip(list) {
        *segment = entry.to_bytes();
    }
    Ok(())
}

/// The SGEs of a receive WQE up to the terminator, from all bytes of its stride.
///
/// Lengths are not checked; the HCA checks them and the keys when a message arrives.
pub fn decode_recv(wqe: &[u8]) -> impl Iterator<Item = DataSeg> + Clone + '_ {
    let (segments, _) = wqe.as_chunks::<SEGMENT>();
    let ends = |sge: &DataSeg| sge.len == 0 && sge.lkey == DataSeg::TERMINATOR.lkey;
    segments.iter().map(DataSeg::from_bytes).take_while(move |sge| !ends(sge))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::segment::MAX_MESSAGE;
    use super::super::tests::sges;
    use super::*;

    const SGE: DataSeg = DataSeg { addr: 0x0102_0304_0506_0708, len: 0x1000, lkey: 0x2122_2324 };
    const SGE_BYTES: [u8; 16] = [0, 0, 0x10, 0, 0x21, 0x22, 0x23, 0x24, 1, 2, 3, 4, 5, 6, 7, 8];
    const END: [u8; 16] = [0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];

    #[test]
    fn strides_are_powers_of_two() {
        assert_eq!([0, 1, 2, 3, 4, 5, 32, 33].map(recv_stride), [16, 16, 32, 64, 64, 128, 512, 1024]);
    }

    #[test]
    fn only_lists_shorter_than_the_stride_end_in_a_terminator() {
        let empty = DataSeg { len: 0, ..SGE };
        let old = [0xee; 16];
        let cases: [(&[DataSeg], [[u8; 16]; 4]); 4] = [
            (&[], [END, old, old, old]),
            (&[SGE], [SGE_BYTES, END, old, old]),
            (&[empty, SGE, empty, SGE, SGE], [SGE_BYTES, SGE_BYTES, SGE_BYTES, END]),
            (&[SGE; 4], [SGE_BYTES; 4]),
        ];
        for (sges, expected) in cases {
            let mut out = [0xee; 80];
            encode_recv(sges, 64, &mut out).unwrap();
            assert_eq!(out[..64], *expected.as_flattened());
            assert_eq!(out[64..], old, "the next WQE stays");
            let used = sges.iter().copied().filter(|sge| sge.len > 0);
            assert!(decode_recv(&out[..64]).eq(used));
        }
    }

    #[test]
    fn oversized_lists_are_refused_without_writing() {
        let mut out = [0xee; 64];
        let many = WqeError::TooManySges { got: 3, max: 2 };
        assert_eq!(encode_recv(&[SGE; 3], 32, &mut out), Err(many));
        assert_eq!(encode_recv(&[SGE; 3], 64, &mut out[..32]), Err(many));
        let long = DataSeg { len: MAX_MESSAGE + 1, ..SGE };
        let err = WqeError::SgeTooLong { len: MAX_MESSAGE + 1, max: MAX_MESSAGE };
        assert_eq!(encode_recv(&[SGE, long], 64, &mut out), Err(err));
        assert_eq!(out, [0xee; 64]);
        // The SGEs of a receive may exceed the maximum message together.
        let gib = DataSeg { len: MAX_MESSAGE, ..SGE };
        assert_eq!(encode_recv(&[gib; 4], 64, &mut out), Ok(()));
    }

    #[test]
    fn list_ends_only_at_empty_entry_with_invalid_key() {
        let empty = DataSeg { len: 0, ..SGE };
        let keyless = DataSeg { lkey: 0x100, ..SGE };
        let wqe = [empty.to_bytes(), keyless.to_bytes(), SGE_BYTES, END, SGE_BYTES].concat();
        assert!(decode_recv(&wqe).eq([empty, keyless, SGE]));
        assert_eq!(decode_recv(&[]).count(), 0);
    }

    proptest! {
        #[test]
        fn decode_inverts_encode(sges in sges(0..=16), spare in 0u32..8) {
            let stride = recv_stride(u32::try_from(sges.len()).unwrap() + spare);
            let mut out = vec![0xee; stride];
            encode_recv(&sges, stride, &mut out).unwrap();
            let used = sges.into_iter().filter(|sge| sge.len > 0);
            prop_assert!(decode_recv(&out).eq(used));
        }
    }
}
