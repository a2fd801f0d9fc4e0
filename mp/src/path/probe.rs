//! Path probes: two ranks of a host measure for all of it what messages cost.

use std::time::{Duration, Instant};

use gdsync::cuda::Gpu;
use gdsync::memory::Memory;
use gdsync::verbs::{Access, Completion, Context, Mr, Pd, Qp, QpAddress, RecvWr, SendWr};

use crate::error::Result;
use crate::exchange::Exchange;
use crate::wait::Deadline;

/// Round trips before those that are timed.
const WARM_UP: u32 = 10;

/// Bytes of the messages that compare devices: one for latency, one for bandwidth; and the round trips of each.
const DEVICE_SIZES: [usize; 2] = [8, 64 << 10];
const DEVICE_ROUNDS: u32 = 50;

/// Bytes of the messages that compare ways of GPU memory, and the round trips of each.
const GPU_SIZES: [usize; 6] = [8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10];
const GPU_ROUNDS: u32 = 20;

/// Has the two ranks of `pair` measure over connections that `make` makes, and returns what the first of them found, if it did, at
/// all ranks of this host. All ranks must call it, each with the pair of its host, if there is one.
///
/// # Errors
/// Of the exchange. What cannot be measured is left out.
fn probe(
    pair: Option<[usize; 2]>,
    make: impl FnOnce() -> gdsync::Result<Vec<End>>,
    measure: impl FnOnce(&[End], Duration) -> gdsync::Result<Vec<u8>>,
    exchange: &mut dyn Exchange,
    timeout: Duration,
) -> Result<Option<Vec<u8>>> {
    let deadline = Deadline::after(timeout);
    let role = pair.and_then(|pair| pair.iter().position(|&rank| rank == exchange.rank()));
    let made = role.map(|role| make().map(|ends| (role, ends)));
    let made = made.and_then(|made| made.inspect_err(|error| tracing::debug!(%error, "no measurement")).ok());
    let ends = made.iter().flat_map(|(_, ends)| ends);
    let addresses: Vec<u8> = ends.flat_map(|end| end.qp.address().to_bytes()).collect();
    let records = exchange.allgather(&addresses, deadline.remaining())?;
    // The others wait meanwhile.
    let patience = deadline.remaining() / 4;
    let found = match (made, pair) {
        (Some((role, mut ends)), Some(pair))
            if records.get(pair[1 - role]).is_some_and(|all| !all.is_empty()) =>
        {
            ends.iter_mut().for_each(|end| end.is_first = role == 0);
            let connected = connect(&ends, &records[pair[1 - role]]);
            let found = connected.and_then(|()| measure(&ends, patience));
            found
                .inspect_err(|error| tracing::info!(%error, "a path could not be measured"))
                .ok()
                .filter(|_| role == 0)
        }
        _ => None,
    };
    let found = exchange.allgather(&found.unwrap_or_default(), deadline.remaining())?;
    Ok(pair.and_then(|[first, _]| found.get(first).filter(|found| !found.is_empty()).cloned()))
}

fn connect(ends: &[End], theirs: &[u8]) -> gdsync::Result<()> {
    let (theirs, _) = theirs.as_chunks::<{ QpAddress::BYTES }>();
    ends.iter().zip(theirs).try_for_each(|(end, theirs)| end.qp.connect(QpAddress::from_bytes(theirs)?))
}

/// One side of a connection through one device.
struct End {
    qp: Qp,
    mr: Mr,
    /// It sends first.
    is_first: bool,
}

impl End {
    /// Not yet connected, for messages of up to half of this memory.
    fn new(pd: &Pd, memory: &Memory) -> gdsync::Result<Self> {
        let mr = pd.register(memory, Access::LOCAL_WRITE)?;
        let qp = pd.build_qp().max_send_wr(16).max_recv_wr(16).rnr_retry(7).build()?;
        Ok(Self { qp, mr, is_first: false })
    }

    /// The mean time of a round trip of so many bytes, over `rounds`.
    fn round_trip(&self, bytes: usize, rounds: u32, patience: Duration) -> gdsync::Result<Duration> {
        let deadline = Deadline::after(patience);
        let mut next = self.receive()?;
        let mut start = Instant::now();
        for round in 0..WARM_UP + rounds {
            if round == WARM_UP {
                start = Instant::now();
            }
            if self.is_first {
                self.send(bytes)?;
            }
            next.wait(deadline.remaining())?;
            if round + 1 < WARM_UP + rounds {
                next = self.receive()?;
            }
            if !self.is_first {
                self.send(bytes)?;
            }
            while self.qp.poll_send().is_some() {}
            while self.qp.poll_recv().is_some() {}
        }
        let cost = start.elapsed() / rounds;
        self.qp.wait_all_sends(deadline.remaining())?;
        Ok(cost)
    }

    fn receive(&self) -> gdsync::Result<Completion> {
        let half = self.mr.memory().len() / 2;
        self.qp.post_recv(&[RecvWr::new(&[self.mr.sge(half, half)?])])
    }

    fn send(&self, bytes: usize) -> gdsync::Result<()> {
        self.qp.post_send(&[SendWr::send(&[self.mr.sge(0, bytes)?])]).map(drop)
    }
}

/// The sum of a round trip of each size, by device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Costs {
    intra_host: Duration,
    other: Duration,
}

impl Costs {
    fn to_bytes(self) -> Vec<u8> {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).to_be_bytes();
        [nanos(self.intra_host), nanos(self.other)].concat()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let ([intra_host, other], []) = bytes.as_chunks::<8>() else { return None };
        let time = |nanos: &[u8; 8]| Duration::from_nanos(u64::from_be_bytes(*nanos));
        Some(Self { intra_host: time(intra_host), other: time(other) })
    }

    pub(super) fn is_intra_host_better(self) -> bool {
        self.intra_host <= self.other
    }

    pub(super) fn reason(self) -> String {
        let [intra_host, other] = [self.intra_host, self.other].map(|time| time.as_secs_f64() * 1e6);
        format!(
            "measured, a round trip of 8 bytes and of 64 KiB: {intra_host:.1} us, {other:.1} us by the other device"
        )
    }
}

/// Has the ranks of `pair` compare the intra-host device with the other one, and returns what those of this host found. All ranks
/// must call it.
///
/// # Errors
/// Of the exchange.
pub(super) fn compare_devices(
    pair: Option<[usize; 2]>,
    pds: [Option<&Pd>; 2],
    exchange: &mut dyn Exchange,
    timeout: Duration,
) -> Result<Option<Costs>> {
    let make = || {
        let ends = pds.into_iter().flatten().map(|pd| End::new(pd, &Memory::alloc(2 * DEVICE_SIZES[1])?));
        ends.collect()
    };
    let measure = |ends: &[End], patience: Duration| {
        // Both sides measure both, also after a failure: neither waits for the other in vain.
        let cost = |end: &End| {
            DEVICE_SIZES.iter().try_fold(Duration::ZERO, |all, &bytes| {
                Ok(all + end.round_trip(bytes, DEVICE_ROUNDS, patience / 4)?)
            })
        };
        let costs: Vec<_> = ends.iter().map(cost).collect();
        let costs = costs.into_iter().collect::<gdsync::Result<Vec<_>>>()?;
        Ok(match costs[..] {
            [intra_host, other] => Costs { intra_host, other }.to_bytes(),
            _ => Vec::new(),
        })
    };
    let found = probe(pair, make, measure, exchange, timeout)?;
    Ok(found.and_then(|found| Costs::from_bytes(&found)))
}

/// Has the two ranks of `pair` send each other GPU memory through this device, fetched and staged, and configures the devices of
/// all ranks that were given the pair. All ranks must call it.
///
/// # Errors
/// Of the exchange.
pub(super) fn compare_gpu_paths(
    pair: Option<[usize; 2]>,
    (context, pd): (&Context, &Pd),
    gpu: Option<&Gpu>,
    exchange: &mut dyn Exchange,
    timeout: Duration,
) -> Result<()> {
    let mut before = None;
    let make = || match gpu {
        Some(gpu) => Ok(vec![End::new(pd, &gpu.alloc(2 * GPU_SIZES[GPU_SIZES.len() - 1])?)?]),
        None => Ok(Vec::new()),
    };
    let measure = |ends: &[End], patience: Duration| {
        let mut costs = [[Duration::ZERO; 2]; GPU_SIZES.len()];
        for end in ends {
            for (&bytes, costs) in GPU_SIZES.iter().zip(&mut costs) {
                for (least, cost) in [0, usize::MAX].into_iter().zip(costs) {
                    let was = context.set_by_reference(least);
                    before = before.or(was);
                    *cost = end.round_trip(bytes, GPU_ROUNDS, patience / 4)?;
                }
            }
        }
        Ok((least(&costs) as u64).to_be_bytes().to_vec())
    };
    let found = probe(pair, make, measure, exchange, timeout)?;
    let found = found.and_then(|found| Some(u64::from_be_bytes(*found.first_chunk()?)));
    if let Some(least) = found.and_then(|least| usize::try_from(least).ok()).or(before) {
        tracing::info!(
            least,
            "payload in GPU memory of so many bytes is fetched by copy engines of receivers"
        );
        context.set_by_reference(least);
    }
    Ok(())
}

/// The length from which on fetching is not slower than staging.
fn least(costs: &[[Duration; 2]; GPU_SIZES.len()]) -> usize {
    let slower = costs.iter().rposition(|[fetched, staged]| fetched > staged);
    GPU_SIZES.get(slower.map_or(0, |last| last + 1)).copied().unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cheaper_device_is_chosen() {
        let costs =
            |near, far| Costs { intra_host: Duration::from_nanos(near), other: Duration::from_nanos(far) };
        for (near, far, is_near) in [(1500, 2500, true), (2500, 1500, false), (1500, 1500, true)] {
            let costs = costs(near, far);
            assert_eq!(costs.is_intra_host_better(), is_near, "{costs:?}");
            assert_eq!(Costs::from_bytes(&costs.to_bytes()), Some(costs));
        }
        assert!(costs(1500, 2500).reason().contains("1.5 us, 2.5 us"));
        assert_eq!((Costs::from_bytes(&[]), Costs::from_bytes(&[0; 17])), (None, None));
    }

    #[test]
    fn longer_payload_is_never_slower_fetched() {
        let staged = Duration::from_micros(30);
        let costs = |fetched: [u64; GPU_SIZES.len()]| fetched.map(|us| [Duration::from_micros(us), staged]);
        assert_eq!(least(&costs([20; 6])), GPU_SIZES[0]);
        assert_eq!(least(&costs([40, 40, 30, 29, 20, 20])), GPU_SIZES[2]);
        assert_eq!(least(&costs([40, 20, 40, 20, 20, 20])), GPU_SIZES[3], "one is fast by chance");
        assert_eq!(least(&costs([20, 20, 20, 20, 20, 40])), usize::MAX);
    }
}
