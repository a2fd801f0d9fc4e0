//! What a message costs through each of two devices, as the first two ranks of a host find it.

use std::time::Duration;

use gdsync::memory::Memory;

use super::Plane;
use super::duel::{End, duel};
use crate::bootstrap::Exchange;
use crate::error::Result;

/// Bytes of the messages: what waits for the way, and what fills it.
const SIZES: [usize; 2] = [8, 64 << 10];
/// Round trips of each size.
const ROUNDS: u32 = 50;

/// A round trip of each size, together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Costs {
    pub(super) near: Duration,
    pub(super) far: Duration,
}

impl Costs {
    fn to_bytes(self) -> Vec<u8> {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).to_be_bytes();
        [nanos(self.near), nanos(self.far)].concat()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let ([near, far], []) = bytes.as_chunks::<8>() else { return None };
        let time = |nanos: &[u8; 8]| Duration::from_nanos(u64::from_be_bytes(*nanos));
        Some(Self { near: time(near), far: time(far) })
    }

    pub(super) fn is_near_better(self) -> bool {
        self.near <= self.far
    }

    pub(super) fn reason(self) -> String {
        let [near, far] = [self.near, self.far].map(|time| time.as_secs_f64() * 1e6);
        format!(
            "measured, a round trip of 8 bytes and of 64 KiB: {near:.1} us, {far:.1} us by the other device"
        )
    }
}

/// Has the first two ranks of each host play, and returns what those of this host found. All ranks must call it; `pair` are
/// the two of this host, if they shall.
///
/// # Errors
/// Of the exchange. What cannot be measured is not.
pub(super) fn measure(
    pair: Option<[usize; 2]>,
    planes: [Option<&Plane>; 2],
    bootstrap: &mut dyn Exchange,
    timeout: Duration,
) -> Result<Option<Costs>> {
    let make = || {
        let ends = planes.into_iter().flatten().map(|plane| End::new(plane, &Memory::alloc(2 * SIZES[1])?));
        ends.collect()
    };
    let play = |ends: &[End], patience: Duration| {
        // Both sides try both, so that neither waits for nothing.
        let cost = |end: &End| {
            SIZES
                .iter()
                .try_fold(Duration::ZERO, |all, &bytes| Ok(all + end.cost(bytes, ROUNDS, patience / 4)?))
        };
        let costs: Vec<_> = ends.iter().map(cost).collect();
        let costs = costs.into_iter().collect::<gdsync::Result<Vec<_>>>()?;
        Ok(match costs[..] {
            [near, far] => Costs { near, far }.to_bytes(),
            _ => Vec::new(),
        })
    };
    let found = duel(pair, make, play, bootstrap, timeout)?;
    Ok(found.and_then(|found| Costs::from_bytes(&found)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cheaper_device_is_chosen() {
        let costs = |near, far| Costs { near: Duration::from_nanos(near), far: Duration::from_nanos(far) };
        for (near, far, is_near) in [(1500, 2500, true), (2500, 1500, false), (1500, 1500, true)] {
            let costs = costs(near, far);
            assert_eq!(costs.is_near_better(), is_near, "{costs:?}");
            assert_eq!(Costs::from_bytes(&costs.to_bytes()), Some(costs));
        }
        assert!(costs(1500, 2500).reason().contains("1.5 us, 2.5 us"));
        assert_eq!((Costs::from_bytes(&[]), Costs::from_bytes(&[0; 17])), (None, None));
    }
}
