//! What a request for a connection says: which two queue pairs are meant.

use super::connector::Plan;
use gdsync_device::QpAddress;

/// Names the protocol, in this version.
const MAGIC: [u8; 8] = *b"gdsync\0\x01";

/// A request for a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    /// Who asks.
    pub(super) from: QpAddress,
    /// Who is asked: a queue pair, and the number of its life.
    pub(super) qpn: u32,
    pub(super) psn: u32,
}

impl Request {
    const BYTES: usize = 16 + QpAddress::BYTES;

    pub(super) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[..8].copy_from_slice(&MAGIC);
        out[8..12].copy_from_slice(&self.qpn.to_be_bytes());
        out[12..16].copy_from_slice(&self.psn.to_be_bytes());
        out[16..].copy_from_slice(&self.from.to_bytes());
        out
    }

    /// `None` for what another program sent. Drivers may add bytes.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let rest = bytes.strip_prefix(&MAGIC)?;
        let (qpn, rest) = rest.split_first_chunk()?;
        let (psn, rest) = rest.split_first_chunk()?;
        let from = QpAddress::from_bytes(rest.first_chunk()?).ok()?;
        Some(Self { from, qpn: u32::from_be_bytes(*qpn), psn: u32::from_be_bytes(*psn) })
    }

    /// Whether a queue pair waits for just this one: of this peer, and for this life of both.
    pub(super) fn is_for(&self, plan: &Plan) -> bool {
        let QpAddress { gid, qpn, psn, lid, .. } = plan.peer;
        let from = &self.from;
        (from.gid, from.qpn, from.psn, from.lid) == (gid, qpn, psn, lid)
            && (self.qpn, self.psn) == (plan.qpn, plan.psn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cm::Offer;
    use gdsync_device::Gid;

    fn request() -> Request {
        Request { from: QpAddress::new(Gid([9; 16]), 0x12_3456, 0xab_cdef).with_lid(4791), qpn: 7, psn: 8 }
    }

    #[test]
    fn requests_survive() {
        let mut bytes = request().to_bytes().to_vec();
        assert_eq!(Request::from_bytes(&bytes), Some(request()));
        bytes.extend([0; 8]);
        assert_eq!(Request::from_bytes(&bytes), Some(request()));
    }

    #[test]
    fn what_others_send_is_no_request() {
        let good = request().to_bytes();
        assert_eq!([&[][..], &good[..43], b"hello"].map(Request::from_bytes), [None; 3]);
        for at in [0, 7, 16] {
            let mut bytes = good;
            bytes[at] ^= 0x80;
            assert_eq!(Request::from_bytes(&bytes), None, "byte {at}");
        }
    }

    #[test]
    fn a_former_life_is_not_meant() {
        let Request { from, qpn, psn } = request();
        let plan = Plan { qpn, psn, peer: from, offer: Offer { number: 1, reads: (1, 1) } };
        assert!(request().is_for(&plan));
        assert!(!request().is_for(&Plan { psn: psn + 1, ..plan }));
        assert!(!request().is_for(&Plan { peer: QpAddress::new(from.gid, from.qpn, 1), ..plan }));
        assert!(!request().is_for(&Plan { peer: from.with_lid(1), ..plan }));
    }
}
