//! What a message costs through each of two devices, as the first two ranks of a host find it.

use std::time::{Duration, Instant};

use gdsync::memory::Memory;
use gdsync::verbs::{Access, Completion, Mr, Qp, QpAddress, RecvWr, SendWr};

use super::Plane;
use crate::bootstrap::Exchange;
use crate::deadline::Deadline;
use crate::error::Result;

/// Bytes of the messages: what waits for the way, and what fills it.
const SIZES: [usize; 2] = [8, 64 << 10];
/// Round trips of each size that are timed, behind some that are not.
const ROUNDS: u32 = 50;
const FIRST: u32 = 10;

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
    [near, far]: [Option<&Plane>; 2],
    bootstrap: &mut dyn Exchange,
    timeout: Duration,
) -> Result<Option<Costs>> {
    let deadline = Deadline::after(timeout);
    let role = pair.and_then(|pair| pair.iter().position(|&rank| rank == bootstrap.rank()));
    let ends = role.and_then(|_| {
        let ends = [End::new(near?), End::new(far?)];
        let [near, far] =
            ends.map(|end| end.inspect_err(|error| tracing::debug!(%error, "no measurement")).ok());
        Some([near?, far?])
    });
    let addresses = ends.iter().flatten().flat_map(|end| end.qp.address().to_bytes());
    let records = bootstrap.allgather(&addresses.collect::<Vec<_>>(), deadline.remaining())?;
    // The others wait meanwhile.
    let patience = deadline.remaining() / 4;
    let found = match (role, pair, &ends) {
        (Some(role), Some(pair), Some(ends)) => records
            .get(pair[1 - role])
            .and_then(|theirs| play(ends, theirs, role == 0, patience))
            .filter(|_| role == 0),
        _ => None,
    };
    let found = found.map(Costs::to_bytes).unwrap_or_default();
    let found = bootstrap.allgather(&found, deadline.remaining())?;
    Ok(pair.and_then(|[first, _]| Costs::from_bytes(found.get(first)?)))
}

fn play(ends: &[End; 2], theirs: &[u8], serves: bool, patience: Duration) -> Option<Costs> {
    let (theirs, []) = theirs.as_chunks::<{ QpAddress::BYTES }>() else { return None };
    let [near, far] = theirs else { return None };
    let cost = |end: &End, theirs: &[u8; QpAddress::BYTES]| {
        let cost = QpAddress::from_bytes(theirs).and_then(|theirs| end.cost(theirs, serves, patience));
        cost.inspect_err(|error| tracing::info!(%error, "a path could not be measured")).ok()
    };
    // Both sides try both, so that neither waits for nothing.
    let (near, far) = (cost(&ends[0], near), cost(&ends[1], far));
    Some(Costs { near: near?, far: far? })
}

/// One side of a connection through one device.
struct End {
    qp: Qp,
    mr: Mr,
}

impl End {
    fn new(plane: &Plane) -> gdsync::Result<Self> {
        let mr = plane.pd.register(&Memory::alloc(2 * SIZES[1])?, Access::LOCAL_WRITE)?;
        let qp = plane.pd.build_qp().max_send_wr(16).max_recv_wr(16).rnr_retry(7).build()?;
        Ok(Self { qp, mr })
    }

    /// A round trip of each size, together.
    fn cost(&self, theirs: QpAddress, serves: bool, patience: Duration) -> gdsync::Result<Duration> {
        let deadline = Deadline::after(patience);
        self.qp.connect(theirs)?;
        let mut cost = Duration::ZERO;
        let mut next = self.receive()?;
        for bytes in SIZES {
            let mut start = Instant::now();
            for round in 0..FIRST + ROUNDS {
                if round == FIRST {
                    start = Instant::now();
                }
                if serves {
                    self.send(bytes)?;
                }
                next.wait(deadline.remaining())?;
                next = self.receive()?;
                if !serves {
                    self.send(bytes)?;
                }
                while self.qp.poll_send().is_some() {}
                while self.qp.poll_recv().is_some() {}
            }
            cost += start.elapsed() / ROUNDS;
        }
        self.qp.wait_all_sends(deadline.remaining())?;
        Ok(cost)
    }

    fn receive(&self) -> gdsync::Result<Completion> {
        self.qp.post_recv(&[RecvWr { wr_id: 0, sges: &[self.mr.sge(SIZES[1], SIZES[1])?] }])
    }

    fn send(&self, bytes: usize) -> gdsync::Result<()> {
        self.qp.post_send(&[SendWr::send(&[self.mr.sge(0, bytes)?])]).map(drop)
    }
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
