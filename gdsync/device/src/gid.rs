//! The address of an HCA.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// A global identifier: 128 bits, written as eight groups of hexadecimal digits. A software HCA draws a random one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// Whether it is an IPv4 address, mapped into IPv6.
    pub fn is_ipv4(self) -> bool {
        self.0[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]
    }

    /// A random one, in the range for local use.
    pub fn random() -> Result<Self> {
        let mut bytes = random()?;
        bytes[0] = 0xfd;
        Ok(Self(bytes))
    }
}

/// Random bytes of the kernel.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|e| Error::os("getrandom", e.into(), "the kernel has no random numbers: update it"))?;
    Ok(bytes)
}

/// A random packet sequence number, 24 bits.
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
