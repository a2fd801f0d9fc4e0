//! What goes over the wire: a fixed header and a payload of bounded length, big-endian.
//!
//! | bytes | field |
//! |---|---|
//! | 0..4 | magic, `GDSB` |
//! | 4..6 | version |
//! | 6..8 | kind |
//! | 8..12 | the rank the frame is about |
//! | 12..16 | ranks of the job |
//! | 16..24 | job token |
//! | 24..28 | payload length |

use gdsync::error::printable;

/// First bytes of every frame.
const MAGIC: [u8; 4] = *b"GDSB";

/// Changes with the meaning of any field.
const VERSION: u16 = 2;

/// Length of the header.
pub(super) const HEADER: usize = 28;

/// Longest reason that is shown.
const MAX_TEXT: usize = 4096;

/// What a frame says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Kind {
    /// A rank introduces itself to rank 0.
    Hello = 1,
    /// Rank 0: all ranks are here.
    Welcome = 2,
    /// Rank 0 does not accept the sender of a hello; the payload says why.
    Refused = 3,
    /// One rank's part of a barrier.
    Barrier = 4,
    /// One rank's part of an allgather.
    Allgather = 5,
    /// The job cannot go on because of the rank in the header; the payload says why.
    Failed = 6,
    /// One rank's part of what [`Builder::init`](crate::Builder::init) exchanges before it builds the communicator.
    Init = 7,
}

impl Kind {
    fn from_wire(value: u16) -> Option<Self> {
        use Kind::{Allgather, Barrier, Failed, Hello, Init, Refused, Welcome};
        let all = [Hello, Welcome, Refused, Barrier, Allgather, Failed, Init];
        all.into_iter().find(|&kind| kind as u16 == value)
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Hello | Self::Welcome => "start-up",
            Self::Refused => "refusal",
            Self::Barrier => "barrier",
            Self::Allgather => "allgather",
            Self::Failed => "failure",
            Self::Init => "Builder::init",
        }
    }

    /// What is wrong with a rank in this operation. Rank 0 finds it, and all are told.
    pub(super) fn instead_of(self, expected: Self) -> String {
        let what = format!("is in {} while rank 0 is in {}", self.name(), expected.name());
        match self == Self::Init || expected == Self::Init {
            true => format!("{what}: call Builder::init in all ranks, or Builder::init_over in all"),
            false => what,
        }
    }
}

/// The fixed part of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: Kind,
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) token: u64,
    pub(super) len: u32,
}

impl Header {
    fn encode(&self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        out[0..4].copy_from_slice(&MAGIC);
        out[4..6].copy_from_slice(&VERSION.to_be_bytes());
        out[6..8].copy_from_slice(&(self.kind as u16).to_be_bytes());
        out[8..12].copy_from_slice(&self.rank.to_be_bytes());
        out[12..16].copy_from_slice(&self.size.to_be_bytes());
        out[16..24].copy_from_slice(&self.token.to_be_bytes());
        out[24..28].copy_from_slice(&self.len.to_be_bytes());
        out
    }

    /// Reads a header, or says what is wrong with it.
    pub(super) fn decode(bytes: &[u8; HEADER]) -> Result<Self, String> {
        let [m0, m1, m2, m3, v0, v1, k0, k1, r0, r1, r2, r3, s0, s1, s2, s3, token @ .., l0, l1, l2, l3] =
            *bytes;
        if [m0, m1, m2, m3] != MAGIC {
            return Err("sent something that is not a gdsync bootstrap frame".to_owned());
        }
        let version = u16::from_be_bytes([v0, v1]);
        if version != VERSION {
            return Err(format!("speaks bootstrap version {version}, this rank version {VERSION}"));
        }
        let kind = u16::from_be_bytes([k0, k1]);
        Ok(Self {
            kind: Kind::from_wire(kind).ok_or_else(|| format!("sent a frame of unknown kind {kind}"))?,
            rank: u32::from_be_bytes([r0, r1, r2, r3]),
            size: u32::from_be_bytes([s0, s1, s2, s3]),
            token: u64::from_be_bytes(token),
            len: u32::from_be_bytes([l0, l1, l2, l3]),
        })
    }
}

/// A frame that arrived.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) header: Header,
    pub(super) payload: Vec<u8>,
}

impl Frame {
    /// The payload of a refusal or failure, cut to what a message can bear and safe to print.
    pub(super) fn text(&self) -> String {
        let end = self.payload.len().min(MAX_TEXT);
        printable(&String::from_utf8_lossy(&self.payload[..end]))
    }
}

/// The job a process belongs to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    pub(super) size: u32,
    pub(super) token: u64,
}

impl Job {
    /// Appends a frame about `rank` to `out`. The payload is at most 4 GiB; callers bound it lower.
    pub(super) fn put(&self, out: &mut Vec<u8>, kind: Kind, rank: u32, payload: &[u8]) {
        let len = u32::try_from(payload.len()).expect("callers bound the payload to 64 MiB");
        out.extend_from_slice(&Header { kind, rank, size: self.size, token: self.token, len }.encode());
        out.extend_from_slice(payload);
    }

    /// One frame about `rank`, ready to send.
    pub(super) fn frame(&self, kind: Kind, rank: u32, payload: &[u8]) -> std::sync::Arc<[u8]> {
        let mut out = Vec::with_capacity(HEADER + payload.len());
        self.put(&mut out, kind, rank, payload);
        out.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded() -> [u8; HEADER] {
        Header {
            kind: Kind::Failed,
            rank: 0x0102_0304,
            size: 0x0506_0708,
            token: 0x1112_1314_1516_1718,
            len: 9,
        }
        .encode()
    }

    #[test]
    fn layout_is_fixed() {
        let expected = b"GDSB\x00\x02\x00\x06\x01\x02\x03\x04\x05\x06\x07\x08\
                         \x11\x12\x13\x14\x15\x16\x17\x18\x00\x00\x00\x09";
        assert_eq!(&encoded(), expected);
    }

    #[test]
    fn decode_reverses_encode() {
        let header = Header::decode(&encoded()).unwrap();
        assert_eq!(header.encode(), encoded());
    }

    #[test]
    fn texts_of_peers_are_safe_to_print() {
        let header = Header::decode(&encoded()).unwrap();
        let frame = Frame { header, payload: b"rank 1: \x1b]0;title\x07 \xff".to_vec() };
        assert_eq!(frame.text(), "rank 1: \\u{1b}]0;title\\u{7} \u{fffd}");
    }

    #[test]
    fn foreign_bytes_are_named() {
        let broken = |at: usize, value: u8| {
            let mut bytes = encoded();
            bytes[at] = value;
            Header::decode(&bytes).unwrap_err()
        };
        assert!(broken(0, b'H').contains("not a gdsync bootstrap frame"));
        assert!(broken(5, 9).contains("version 9"));
        assert!(broken(7, 77).contains("unknown kind 77"));
    }
}
