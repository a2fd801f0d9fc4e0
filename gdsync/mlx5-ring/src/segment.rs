//! 16-byte segments: data segments and remote addresses.

pub use super::error::MAX_MESSAGE;
use super::error::WqeError;

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

/// Remote address segment (`mlx5_wqe_raddr_seg`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteAddr {
    /// Address, as the peer registered it.
    pub addr: u64,
    /// Key of the peer's memory region.
    pub rkey: u32,
}

impl RemoteAddr {
    pub(super) const fn to_bytes(self) -> [u8; SEGMENT] {
        ((self.addr as u128) << 64 | (self.rkey as u128) << 32).to_be_bytes()
    }

    /// The last four bytes are reserved; [`super::strict_violations`] checks them.
    pub(super) const fn from_bytes(bytes: &[u8; SEGMENT]) -> Self {
        let [a0, a1, a2, a3, a4, a5, a6, a7, k0, k1, k2, k3, ..] = *bytes;
        Self {
            addr: u64::from_be_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            rkey: u32::from_be_bytes([k0, k1, k2, k3]),
        }
    }
}

#[cfg(test)]
mod tests {
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
    }

    #[test]
    fn terminator_is_the_invalid_key_in_big_endian() {
        let mut bytes = [0; SEGMENT];
        bytes[6] = 1;
        assert_eq!(DataSeg::TERMINATOR.to_bytes(), bytes);
    }
}
