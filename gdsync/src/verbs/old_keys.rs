//! Keys of regions that were deregistered a while ago: they explain requests that fail because of them.

use std::collections::VecDeque;
use std::sync::Arc;

use gdsync_device::memory::Memory;
use mlx5_ring::{self as mlx5, BB, DataSeg, DecodedOp, DecodedPayload, SEGMENT};
use parking_lot::Mutex;

use super::track::Entry;

/// Keys that are remembered: more than requests are usually under way.
const MOST: usize = 4096;

/// The local keys of a protection domain that were deregistered last.
#[derive(Debug, Default)]
pub(crate) struct OldKeys(Mutex<VecDeque<u32>>);

impl OldKeys {
    /// A key is about to be deregistered.
    pub(crate) fn add(&self, lkey: u32) {
        let mut keys = self.0.lock();
        if keys.len() == MOST {
            keys.pop_front();
        }
        keys.push_back(lkey);
    }

    /// A device has given a key again.
    pub(crate) fn remove(&self, lkey: u32) {
        let mut keys = self.0.lock();
        // Devices rarely give a key again, and a look is quicker than a pass that moves keys.
        if keys.contains(&lkey) {
            keys.retain(|old| *old != lkey);
        }
    }

    fn contains(&self, lkey: u32) -> bool {
        self.0.lock().contains(&lkey)
    }
}

/// What requests a ring has.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ring {
    Sends,
    Datagrams,
    /// Entries of so many bytes.
    Receives(usize),
}

/// Reads the keys of requests in a ring.
#[derive(Debug)]
pub(crate) struct KeyReader {
    ring: Memory,
    kind: Ring,
    old_keys: Arc<OldKeys>,
}

impl KeyReader {
    pub(crate) fn new(ring: &Memory, kind: Ring, old_keys: &Arc<OldKeys>) -> Self {
        Self { ring: ring.clone(), kind, old_keys: old_keys.clone() }
    }

    pub(crate) fn is_of_datagrams(&self) -> bool {
        matches!(self.kind, Ring::Datagrams)
    }

    /// Whether a request names a key that was deregistered.
    pub(crate) fn names_old_key(&self, entry: &Entry) -> bool {
        let (unit, len) = match self.kind {
            Ring::Receives(stride) => (stride, stride),
            Ring::Sends | Ring::Datagrams => (BB, usize::from(entry.ds) * SEGMENT),
        };
        let mut wqe = vec![0; len];
        let units = (self.ring.len() / unit) as u64;
        let at = usize::try_from(entry.begin % units).expect("a ring index fits in memory") * unit;
        let to_end = wqe.len().min(self.ring.len() - at);
        let (head, wrapped) = wqe.split_at_mut(to_end);
        if self.ring.read(at, head).and_then(|()| self.ring.read(0, wrapped)).is_err() {
            return false;
        }
        let is_old = |seg: DataSeg| self.old_keys.contains(seg.lkey);
        let Some(first) = wqe.first_chunk() else { return false };
        let op = match self.kind {
            Ring::Receives(_) => return mlx5::decode_recv(&wqe).any(is_old),
            Ring::Sends => mlx5::decode_body(&mlx5::decode_ctrl(first), &wqe),
            Ring::Datagrams => mlx5::decode_datagram(&mlx5::decode_ctrl(first), &wqe).map(|(op, _)| op),
        };
        match op {
            Ok(
                DecodedOp::Send { payload: DecodedPayload::Sges(sges), .. }
                | DecodedOp::Write { payload: DecodedPayload::Sges(sges), .. }
                | DecodedOp::Read { sges, .. },
            ) => sges.iter(&wqe).any(is_old),
            Ok(DecodedOp::CompareSwap { result, .. } | DecodedOp::FetchAdd { result, .. }) => is_old(result),
            _ => false,
        }
    }
}
