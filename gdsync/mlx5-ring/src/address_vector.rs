//! The address of a datagram, as a WQE holds it.

use super::segment::SEGMENT;

/// Where a datagram goes: the extended address vector (`mlx5_wqe_av`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AddressVector {
    /// Q_Key.
    pub qkey: u32,
    /// QPN of the receiver, 24 bits. The bit of the extended form is added.
    pub qpn: u32,
    /// Service level, 4 bits.
    pub sl: u8,
    /// Code of the static rate, 4 bits; 0 is that of the link.
    pub static_rate: u8,
    /// Low 7 bits of the sender's LID that are not those of its port.
    pub src_path_bits: u8,
    /// LID of the receiver; on RoCE a hint of the UDP source port.
    pub rlid: u16,
    /// MAC address of the receiver.
    pub rmac: [u8; 6],
    /// Traffic class.
    pub tclass: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// On InfiniBand: whether [`AddressVector::rgid`] counts. Always clear on RoCE, where it does.
    pub has_grh: bool,
    /// Entry of the sender's GID table.
    pub sgid_index: u8,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// GID of the receiver.
    pub rgid: [u8; 16],
}

/// Bit of the extended form in the word with the QPN.
const EXTENDED: u32 = 1 << 31;

impl AddressVector {
    /// Bytes of an address vector.
    pub const BYTES: usize = 3 * SEGMENT;

    /// The bytes in the ring. Excess bits of fields are dropped.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.qkey.to_be_bytes());
        put(8, &(self.qpn & 0xff_ffff | EXTENDED).to_be_bytes());
        put(12, &[self.static_rate << 4 | self.sl & 0xf, self.src_path_bits & 0x7f]);
        put(14, &self.rlid.to_be_bytes());
        put(20, &self.rmac);
        put(26, &[self.tclass, self.hop_limit]);
        let grh =
            u32::from(self.has_grh) << 30 | u32::from(self.sgid_index) << 20 | self.flow_label & 0xf_ffff;
        put(28, &grh.to_be_bytes());
        put(32, &self.rgid);
        out
    }

    /// Decodes an address vector; `None` for the compact form, which needs a capability.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let word = |at: usize| u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let (dqp, grh) = (word(8), word(28));
        let [sgid_index, ..] = (grh << 4).to_be_bytes();
        let mut av = Self {
            qkey: word(0),
            qpn: dqp & 0xff_ffff,
            sl: bytes[12] & 0xf,
            static_rate: bytes[12] >> 4,
            src_path_bits: bytes[13] & 0x7f,
            rlid: u16::from_be_bytes([bytes[14], bytes[15]]),
            rmac: [0; 6],
            tclass: bytes[26],
            hop_limit: bytes[27],
            has_grh: grh >> 30 & 1 == 1,
            sgid_index,
            flow_label: grh & 0xf_ffff,
            rgid: [0; 16],
        };
        av.rmac.copy_from_slice(&bytes[20..26]);
        av.rgid.copy_from_slice(&bytes[32..]);
        (dqp & EXTENDED != 0).then_some(av)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::changed;
    use super::*;

    #[test]
    fn every_field_has_its_bytes() {
        let zero = AddressVector::default();
        let cases: [(AddressVector, &[(usize, u8)]); 13] = [
            (AddressVector { qkey: 0x0102_0304, ..zero }, &[(0, 1), (1, 2), (2, 3), (3, 4)]),
            (AddressVector { qpn: 0x01_0203, ..zero }, &[(9, 1), (10, 2), (11, 3)]),
            (AddressVector { sl: 0xf, ..zero }, &[(12, 0xf)]),
            (AddressVector { static_rate: 3, ..zero }, &[(12, 0x30)]),
            (AddressVector { src_path_bits: 0x7f, ..zero }, &[(13, 0x7f)]),
            (AddressVector { rlid: 0x0102, ..zero }, &[(14, 1), (15, 2)]),
            (
                AddressVector { rmac: [1, 2, 3, 4, 5, 6], ..zero },
                &[(20, 1), (21, 2), (22, 3), (23, 4), (24, 5), (25, 6)],
            ),
            (AddressVector { tclass: 106, ..zero }, &[(26, 106)]),
            (AddressVector { hop_limit: 255, ..zero }, &[(27, 255)]),
            (AddressVector { has_grh: true, ..zero }, &[(28, 0x40)]),
            (AddressVector { sgid_index: 3, ..zero }, &[(29, 0x30)]),
            (AddressVector { flow_label: 0x1_0203, ..zero }, &[(29, 1), (30, 2), (31, 3)]),
            (AddressVector { rgid: [7; 16], ..zero }, &core::array::from_fn::<_, 16, _>(|n| (32 + n, 7))),
        ];
        assert_eq!(changed(&[0; 48], &zero.to_bytes()), [(8, 0x80)]);
        for (vector, expected) in cases {
            assert_eq!(changed(&zero.to_bytes(), &vector.to_bytes()), expected, "{vector:?}");
            assert_eq!(AddressVector::from_bytes(&vector.to_bytes()), Some(vector));
        }
        assert_eq!(AddressVector::from_bytes(&[0; 48]), None, "compact");
    }

    proptest! {
        #[test]
        fn any_vector_survives(bytes: [u8; 48]) {
            if let Some(vector) = AddressVector::from_bytes(&bytes) {
                prop_assert_eq!(AddressVector::from_bytes(&vector.to_bytes()), Some(vector));
            }
        }
    }
}
