//! Addresses of devices and queue pairs, and the random numbers in them.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// Where a queue pair can be reached: what two sides exchange before they connect.
///
/// The text form is `v1/gid/qpn/psn/lid/mtu`, all numbers but the version in hexadecimal, `mtu` the code of the binary
/// form. A peer without this library tells GID, QPN, PSN and LID by its own means: see [`QpAddress::new`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct QpAddress {
    /// The port of the HCA.
    pub gid: Gid,
    /// The queue pair, 24 bits.
    pub qpn: u32,
    /// The first packet sequence number it will send, 24 bits.
    pub psn: u32,
    /// The local identifier of the port, on InfiniBand; 0 elsewhere.
    pub lid: u16,
    /// The largest path MTU of its port in bytes, a power of two from 256 to 4096; `None` where it does not matter or is not
    /// known.
    pub mtu: Option<u32>,
}

/// The version of both forms.
const VERSION: u8 = 1;

impl QpAddress {
    /// Bytes of the binary form.
    pub const BYTES: usize = 28;

    /// The address of a queue pair on RoCE, on the software HCA, or of one whose LID and MTU follow.
    pub fn new(gid: Gid, qpn: u32, psn: u32) -> Self {
        Self { gid, qpn, psn, lid: 0, mtu: None }
    }

    /// With the LID of its port.
    #[must_use]
    pub fn with_lid(self, lid: u16) -> Self {
        Self { lid, ..self }
    }

    /// With the largest path MTU of its port, in bytes.
    #[must_use]
    pub fn with_mtu(self, mtu: u32) -> Self {
        Self { mtu: Some(mtu), ..self }
    }

    /// The binary form: version 1, MTU as InfiniBand codes it (1 for 256 to 5 for 4096, 0 for none), LID, QPN and PSN in
    /// network byte order, GID.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0] = VERSION;
        out[1] = self.mtu.map_or(0, mtu_code);
        out[2..4].copy_from_slice(&self.lid.to_be_bytes());
        out[4..8].copy_from_slice(&self.qpn.to_be_bytes());
        out[8..12].copy_from_slice(&self.psn.to_be_bytes());
        out[12..].copy_from_slice(&self.gid.0);
        out
    }

    /// Reads the binary form.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another version, or a number out of range.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Result<Self> {
        let &[version, mtu, lid0, lid1, ref rest @ ..] = bytes;
        if version != VERSION {
            let expected = "version 1: both sides must use releases of this library that agree";
            return Err(Error::invalid("version of a QP address", version, expected));
        }
        let (qpn, rest) = rest.split_first_chunk().expect("24 bytes hold 4");
        let (psn, gid) = rest.split_first_chunk().expect("20 bytes hold 4");
        let gid = gid.first_chunk().expect("16 bytes are left");
        let address = Self {
            gid: Gid(*gid),
            qpn: u32::from_be_bytes(*qpn),
            psn: u32::from_be_bytes(*psn),
            lid: u16::from_be_bytes([lid0, lid1]),
            mtu: None,
        };
        address.coded(mtu).ok_or_else(|| Error::invalid("QP address", format!("{bytes:x?}"), EXPECTED))
    }

    /// With the MTU of this code, if all is in range.
    fn coded(self, mtu: u8) -> Option<Self> {
        let mtu = if mtu == 0 { None } else { Some(mtu_bytes(mtu)?) };
        (self.qpn >> 24 == 0 && self.psn >> 24 == 0).then_some(Self { mtu, ..self })
    }
}

const EXPECTED: &str = "QPN and PSN of 24 bits, and an MTU code of 0 to 5";

/// The code of an MTU (`enum ibv_mtu`): 1 for 256 to 5 for 4096 and more.
pub fn mtu_code(bytes: u32) -> u8 {
    match bytes {
        0..=511 => 1,
        512..=1023 => 2,
        1024..=2047 => 3,
        2048..=4095 => 4,
        _ => 5,
    }
}

/// The MTU of a code, in bytes.
pub fn mtu_bytes(code: u8) -> Option<u32> {
    (1..=5).contains(&code).then(|| 128 << code)
}

impl fmt::Display for QpAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mtu = self.mtu.map_or(0, mtu_code);
        write!(f, "v{VERSION}/{}/{:x}/{:x}/{:x}/{mtu:x}", self.gid, self.qpn, self.psn, self.lid)
    }
}

impl FromStr for QpAddress {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = || Error::invalid("QP address", text, "v1/gid/qpn/psn/lid/mtu, numbers in hexadecimal");
        let parts: Vec<_> = text.split('/').collect();
        let [version, gid, qpn, psn, lid, mtu] = parts[..] else { return Err(bad()) };
        if version != "v1" {
            return Err(bad());
        }
        let number = |text| u32::from_str_radix(text, 16).map_err(|_| bad());
        let address = Self {
            gid: gid.parse().map_err(|_| bad())?,
            qpn: number(qpn)?,
            psn: number(psn)?,
            lid: u16::try_from(number(lid)?).map_err(|_| bad())?,
            mtu: None,
        };
        let mtu = u8::try_from(number(mtu)?).map_err(|_| bad())?;
        address.coded(mtu).ok_or_else(bad)
    }
}

/// A GID: 128 bits, displayed as eight groups of hexadecimal digits. A software HCA has a random one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// Whether it is an IPv4-mapped address.
    pub fn is_ipv4(self) -> bool {
        self.0[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]
    }

    /// A random GID, in the range for local use.
    ///
    /// # Errors
    /// [`Error::Sys`] if the system has no random numbers.
    pub fn random() -> Result<Self> {
        let mut bytes = random()?;
        bytes[0] = 0xfd;
        Ok(Self(bytes))
    }
}

/// Random bytes from the kernel.
///
/// # Errors
/// [`Error::Sys`] if the system has no random numbers.
pub fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|e| Error::os("getrandom", e.into(), "the kernel has no random numbers: update it"))?;
    Ok(bytes)
}

/// A random packet sequence number of 24 bits.
///
/// # Errors
/// [`Error::Sys`] if the system has no random numbers.
pub fn random_psn() -> Result<u32> {
    let [a, b, c] = random()?;
    Ok(u32::from_be_bytes([0, a, b, c]))
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, [high, low]) in self.0.as_chunks::<2>().0.iter().enumerate() {
            write!(f, "{}{high:02x}{low:02x}", if i > 0 { ":" } else { "" })?;
        }
        Ok(())
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Gid {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = || Error::invalid("GID", text, "eight groups of four hexadecimal digits");
        let mut bytes = [0; 16];
        let mut groups = text.split(':');
        for pair in bytes.as_chunks_mut::<2>().0 {
            let group = groups.next().filter(|g| (1..=4).contains(&g.len())).ok_or_else(bad)?;
            *pair = u16::from_str_radix(group, 16).map_err(|_| bad())?.to_be_bytes();
        }
        if groups.next().is_some() { Err(bad()) } else { Ok(Self(bytes)) }
    }
}

/// A random permutation of `BITS`-bit numbers, so that queue pair numbers and keys cannot be guessed.
#[derive(Clone, Copy, Debug)]
pub struct Shuffle<const BITS: u32> {
    /// Odd, so that it has an inverse modulo a power of two.
    factor: u32,
    inverse: u32,
    offset: u32,
}

impl<const BITS: u32> Default for Shuffle<BITS> {
    /// The identity.
    fn default() -> Self {
        Self { factor: 1, inverse: 1, offset: 0 }
    }
}

impl<const BITS: u32> Shuffle<BITS> {
    const MASK: u32 = u32::MAX >> (32 - BITS);

    /// A random permutation.
    ///
    /// # Errors
    /// [`Error::Sys`] if the system has no random numbers.
    pub fn random() -> Result<Self> {
        let [a, b] = *random::<8>()?.as_chunks::<4>().0 else { unreachable!("eight bytes are two chunks") };
        let factor = u32::from_ne_bytes(a) | 1;
        // Newton's iteration: an odd number is its own inverse modulo 8, and each step doubles the number of correct bits.
        let inverse = (0..4)
            .fold(factor, |inverse, _| inverse.wrapping_mul(2u32.wrapping_sub(factor.wrapping_mul(inverse))));
        Ok(Self { factor, inverse, offset: u32::from_ne_bytes(b) })
    }

    /// The image of `number`.
    pub fn hide(self, number: u32) -> u32 {
        number.wrapping_mul(self.factor).wrapping_add(self.offset) & Self::MASK
    }

    /// The number whose image is `hidden`.
    #[inline]
    pub fn find(self, hidden: u32) -> u32 {
        hidden.wrapping_sub(self.offset).wrapping_mul(self.inverse) & Self::MASK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address() -> QpAddress {
        QpAddress::new(Gid([7; 16]), 0x12_3456, 0xab_cdef)
    }

    #[test]
    fn addresses_survive_both_forms() {
        for address in [address(), address().with_lid(0xc001), address().with_lid(3).with_mtu(2048)] {
            assert_eq!(QpAddress::from_bytes(&address.to_bytes()).unwrap(), address);
            assert_eq!(address.to_string().parse::<QpAddress>().unwrap(), address);
        }
    }

    #[test]
    fn the_forms_are_fixed() {
        let address = address().with_lid(0x0102).with_mtu(4096);
        let mut bytes = [7; QpAddress::BYTES];
        bytes[..12].copy_from_slice(&[1, 5, 1, 2, 0, 0x12, 0x34, 0x56, 0, 0xab, 0xcd, 0xef]);
        assert_eq!(address.to_bytes(), bytes);
        let gid = "0707:0707:0707:0707:0707:0707:0707:0707";
        assert_eq!(address.to_string(), format!("v1/{gid}/123456/abcdef/102/5"));
    }

    #[test]
    fn wrong_forms_are_refused() {
        let good = address().to_bytes();
        for (at, byte) in [(0, 0), (0, 2), (1, 6), (4, 1), (8, 1)] {
            let mut bytes = good;
            bytes[at] = byte;
            assert!(QpAddress::from_bytes(&bytes).is_err(), "byte {at} = {byte}");
        }
        let gid = address().gid;
        for bad in [
            "",
            "v1/1/2/3/4/5",
            &format!("{gid}/1/1"),
            &format!("v2/{gid}/1/1/0/0"),
            &format!("v1/{gid}/1000000/0/0/0"),
            &format!("v1/{gid}/0/1000000/0/0"),
            &format!("v1/{gid}/1/1/10000/0"),
            &format!("v1/{gid}/1/1/0/6"),
            &format!("v1/{gid}/1/1/0/0/0"),
            &format!("v1/{gid}/1/1/0"),
            &format!("v1/{gid}/1/1/0/-1"),
        ] {
            assert!(bad.parse::<QpAddress>().is_err(), "{bad}");
        }
    }

    #[test]
    fn mtus_have_codes() {
        let sizes = [256, 512, 1024, 2048, 4096];
        for (code, bytes) in (1..).zip(sizes) {
            assert_eq!((mtu_code(bytes), mtu_bytes(code)), (code, Some(bytes)));
        }
        assert_eq!((mtu_bytes(0), mtu_bytes(6)), (None, None));
    }

    #[test]
    fn text_and_back() {
        let gid = Gid::random().unwrap();
        assert_eq!(gid.to_string().parse::<Gid>().unwrap(), gid);
        assert_eq!(gid.to_string().len(), 39);
        assert_ne!(gid, Gid::random().unwrap());
        for bad in ["", "1:2", "0:0:0:0:0:0:0:0:0", "g:0:0:0:0:0:0:0", "12345:0:0:0:0:0:0:0", ":::::::"] {
            assert!(bad.parse::<Gid>().is_err(), "{bad}");
        }
    }

    fn is_one_to_one<const BITS: u32>() {
        let shuffle = Shuffle::<BITS>::random().unwrap();
        for number in (0..1 << 12).chain([Shuffle::<BITS>::MASK]) {
            let hidden = shuffle.hide(number);
            assert!(hidden <= Shuffle::<BITS>::MASK);
            assert_eq!(shuffle.find(hidden), number, "{shuffle:?}");
        }
    }

    #[test]
    fn each_number_is_found_again() {
        for _ in 0..100 {
            is_one_to_one::<24>();
            is_one_to_one::<32>();
        }
    }

    #[test]
    fn no_two_maps_are_the_same() {
        let first: Vec<u32> = (0..8).map(|_| Shuffle::<24>::random().unwrap().hide(0)).collect();
        assert!(first.iter().any(|number| *number != first[0]), "{first:?}");
    }
}
