//! 16-byte segments: data segments, remote addresses and the lists of receive WQEs, and why a WQE cannot be encoded.

use core::fmt;
use core::str::FromStr;

/// Bytes of a segment, the unit of `ds`.
pub const SEGMENT: usize = 16;

/// Byte count flag of inline data (`MLX5_INLINE_SEG`).
pub const INLINE: u32 = 0x8000_0000;

/// Key that terminates a receive WQE's list (`MLX5_INVALID_LKEY`).
pub const INVALID_LKEY: u32 = 0x100;

/// Data segment: scatter/gather entry (`mlx5_wqe_data_seg`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DataSeg {
    /// Address of the first byte.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// Key of the memory region.
    pub lkey: u32,
}

impl DataSeg {
    /// Terminator of a receive WQE with unused entries.
    pub(super) const TERMINATOR: Self = Self { addr: 0, len: 0, lkey: INVALID_LKEY };

    pub(super) const fn to_bytes(self) -> [u8; SEGMENT] {
        ((self.len as u128) << 96 | (self.lkey as u128) << 64 | self.addr as u128).to_be_bytes()
    }

    pub(super) const fn from_bytes(bytes: &[u8; SEGMENT]) -> Self {
        let [l0, l1, l2, l3, k0, k1, k2, k3, addr @ ..] = *bytes;
        Self {
            addr: u64::from_be_bytes(addr),
            len: u32::from_be_bytes([l0, l1, l2, l3]),
            lkey: u32::from_be_bytes([k0, k1, k2, k3]),
        }
    }
}

/// The non-empty SGEs, at most `max`. As in rdma-core, empty ones are dropped, because some adapters read them as 2^31
/// bytes.
pub(super) fn used_sges(
    sges: &[DataSeg],
    max: usize,
) -> Result<impl Iterator<Item = &DataSeg> + Clone, WqeError> {
    let used = sges.iter().filter(|sge| sge.len > 0);
    let got = used.clone().count();
    if got > max {
        return Err(WqeError::TooManySges { got, max });
    }
    match used.clone().find(|sge| sge.len > MAX_MESSAGE) {
        Some(sge) => Err(WqeError::SgeTooLong { len: sge.len, max: MAX_MESSAGE }),
        None => Ok(used),
    }
}

/// Address and key of a peer's memory: the remote address segment (`mlx5_wqe_raddr_seg`).
///
/// The peer sends it as bytes, or as text: `ADDR:RKEY` in hexadecimal digits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteAddr {
    /// Address, as the peer registered it.
    pub addr: u64,
    /// Key of the peer's memory region.
    pub rkey: u32,
}

impl RemoteAddr {
    /// Length of [`RemoteAddr::to_bytes`].
    pub const BYTES: usize = SEGMENT;

    /// The segment: address, key and four zeros, big endian.
    pub const fn to_bytes(self) -> [u8; Self::BYTES] {
        ((self.addr as u128) << 64 | (self.rkey as u128) << 32).to_be_bytes()
    }

    /// Reads what [`RemoteAddr::to_bytes`] wrote. The last four bytes are ignored.
    pub const fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let [a0, a1, a2, a3, a4, a5, a6, a7, k0, k1, k2, k3, ..] = *bytes;
        Self {
            addr: u64::from_be_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            rkey: u32::from_be_bytes([k0, k1, k2, k3]),
        }
    }
}

impl fmt::Display for RemoteAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}:{:x}", self.addr, self.rkey)
    }
}

/// A text that is not a [`RemoteAddr`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidRemoteAddr;

impl fmt::Display for InvalidRemoteAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a remote address is ADDR:RKEY in hexadecimal digits")
    }
}

impl core::error::Error for InvalidRemoteAddr {}

impl FromStr for RemoteAddr {
    type Err = InvalidRemoteAddr;

    fn from_str(text: &str) -> Result<Self, InvalidRemoteAddr> {
        let (addr, rkey) = text.split_once(':').ok_or(InvalidRemoteAddr)?;
        let addr = u64::from_str_radix(addr, 16).map_err(|_| InvalidRemoteAddr)?;
        let rkey = u32::from_str_radix(rkey, 16).map_err(|_| InvalidRemoteAddr)?;
        Ok(Self { addr, rkey })
    }
}

/// Maximum message and SGE length in bytes (1 GiB).
///
/// The field allows 2^31 - 1 and InfiniBand 2^31; 1 GiB is what every device takes (`log_msg_max` 30).
pub const MAX_MESSAGE: u32 = 1 << 30;

/// Why an operation cannot be encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WqeError {
    /// More SGEs than the WQE has room for, without empty ones.
    #[error("{got} buffers do not fit in one work request: at most {max} here")]
    TooManySges {
        /// Number of SGEs that are not empty.
        got: usize,
        /// Maximum.
        max: usize,
    },
    /// More inline bytes than the WQE has room for.
    #[error("{len} bytes do not fit inline: at most {max} here; send them from registered memory")]
    InlineTooLong {
        /// Length in bytes.
        len: usize,
        /// Maximum in bytes.
        max: usize,
    },
    /// An SGE exceeds the maximum length.
    #[error("a buffer of {len} bytes is too long: at most {max}; split it")]
    SgeTooLong {
        /// Length in bytes.
        len: u32,
        /// Maximum in bytes.
        max: u32,
    },
    /// The message exceeds the maximum length.
    #[error("a message of {len} bytes is too long: at most {max}; split it", max = MAX_MESSAGE)]
    TotalTooLong {
        /// Length in bytes.
        len: u64,
    },
    /// A read of zero bytes.
    #[error("a read needs a local buffer of at least one byte")]
    ReadNeedsBuffer,
    /// The result buffer of an atomic is not 8 bytes long.
    #[error("the result of an atomic takes 8 bytes, not {len}")]
    AtomicResult {
        /// Length in bytes.
        len: u32,
    },
    /// The QPN has more than 24 bits.
    #[error("{0:#x} is not a QPN: it has more than 24 bits")]
    Qpn(u32),
}

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

/// Bytes of the segment in front of the SGEs of a receive WQE in a shared receive queue (`mlx5_wqe_srq_next_seg`).
pub const SRQ_LINK: usize = SEGMENT;

/// Index of the WQE behind one of a shared receive queue, from its link segment.
pub const fn srq_next(link: &[u8; SRQ_LINK]) -> u16 {
    let [_, _, hi, lo, ..] = *link;
    u16::from_be_bytes([hi, lo])
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

    use super::super::tests::sges;
    use super::*;

    #[test]
    fn data_segment_bytes() {
        let seg = DataSeg { addr: 0x0102_0304_0506_0708, len: 0x1112_1314, lkey: 0x2122_2324 };
        let bytes = [0x11, 0x12, 0x13, 0x14, 0x21, 0x22, 0x23, 0x24, 1, 2, 3, 4, 5, 6, 7, 8];
        assert_eq!(seg.to_bytes(), bytes);
        assert_eq!(DataSeg::from_bytes(&bytes), seg);
    }

    #[test]
    fn remote_address_bytes() {
        let seg = RemoteAddr { addr: 0x0102_0304_0506_0708, rkey: 0x2122_2324 };
        let bytes = [1, 2, 3, 4, 5, 6, 7, 8, 0x21, 0x22, 0x23, 0x24, 0, 0, 0, 0];
        assert_eq!(seg.to_bytes(), bytes);
        assert_eq!(RemoteAddr::from_bytes(&bytes), seg);
        assert_eq!(seg.to_string(), "102030405060708:21222324");
        assert_eq!(seg.to_string().parse(), Ok(seg));
        for bad in ["", "1", ":1", "1:", "1:2:3", "g:1", "1:100000000", "10000000000000000:1"] {
            assert_eq!(bad.parse::<RemoteAddr>(), Err(InvalidRemoteAddr), "{bad}");
        }
    }

    #[test]
    fn terminator_is_the_invalid_key_in_big_endian() {
        let mut bytes = [0; SEGMENT];
        bytes[6] = 1;
        assert_eq!(DataSeg::TERMINATOR.to_bytes(), bytes);
    }

    const SGE: DataSeg = DataSeg { addr: 0x0102_0304_0506_0708, len: 0x1000, lkey: 0x2122_2324 };
    const SGE_BYTES: [u8; 16] = [0, 0, 0x10, 0, 0x21, 0x22, 0x23, 0x24, 1, 2, 3, 4, 5, 6, 7, 8];
    const END: [u8; 16] = [0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];

    #[test]
    fn links_of_shared_receive_queues_have_their_bytes() {
        assert_eq!(srq_next(&[9, 9, 0x12, 0x34, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9]), 0x1234);
    }

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
