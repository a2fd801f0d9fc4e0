//! Two ranks of a host that find out for all of it what messages cost.

use std::time::{Duration, Instant};

use gdsync::memory::Memory;
use gdsync::verbs::{Access, Completion, Mr, Qp, QpAddress, RecvWr, SendWr};

use super::Plane;
use crate::bootstrap::Exchange;
use crate::deadline::Deadline;
use crate::error::Result;

/// Round trips before those that are timed.
const FIRST: u32 = 10;

/// Has the two ranks of `pair` play over connections that `make` makes, and returns what the first of them found, if it did, at
/// all ranks of this host. All ranks must call it, each with the pair of its host, if there is one.
///
/// # Errors
/// Of the exchange. What cannot be measured is not.
pub(super) fn duel(
    pair: Option<[usize; 2]>,
    make: impl FnOnce() -> gdsync::Result<Vec<End>>,
    play: impl FnOnce(&[End], Duration) -> gdsync::Result<Vec<u8>>,
    bootstrap: &mut dyn Exchange,
    timeout: Duration,
) -> Result<Option<Vec<u8>>> {
    let deadline = Deadline::after(timeout);
    let role = pair.and_then(|pair| pair.iter().position(|&rank| rank == bootstrap.rank()));
    let made = role.map(|role| make().map(|ends| (role, ends)));
    let made = made.and_then(|made| made.inspect_err(|error| tracing::debug!(%error, "no measurement")).ok());
    let ends = made.iter().flat_map(|(_, ends)| ends);
    let addresses: Vec<u8> = ends.flat_map(|end| end.qp.address().to_bytes()).collect();
    let records = bootstrap.allgather(&addresses, deadline.remaining())?;
    // The others wait meanwhile.
    let patience = deadline.remaining() / 4;
    let found = match (made, pair) {
        (Some((role, mut ends)), Some(pair))
            if records.get(pair[1 - role]).is_some_and(|all| !all.is_empty()) =>
        {
            ends.iter_mut().for_each(|end| end.serves = role == 0);
            let connected = connect(&ends, &records[pair[1 - role]]);
            let found = connected.and_then(|()| play(&ends, patience));
            found
                .inspect_err(|error| tracing::info!(%error, "a path could not be measured"))
                .ok()
                .filter(|_| role == 0)
        }
        _ => None,
    };
    let found = bootstrap.allgather(&found.unwrap_or_default(), deadline.remaining())?;
    Ok(pair.and_then(|[first, _]| found.get(first).filter(|found| !found.is_empty()).cloned()))
}

fn connect(ends: &[End], theirs: &[u8]) -> gdsync::Result<()> {
    let (theirs, _) = theirs.as_chunks::<{ QpAddress::BYTES }>();
    ends.iter().zip(theirs).try_for_each(|(end, theirs)| end.qp.connect(QpAddress::from_bytes(theirs)?))
}

/// One side of a connection through one device.
pub(super) struct End {
    qp: Qp,
    mr: Mr,
    /// It begins.
    serves: bool,
}

impl End {
    /// Of messages that fill a half of this memory at most.
    pub(super) fn new(plane: &Plane, memory: &Memory) -> gdsync::Result<Self> {
        let mr = plane.pd.register(memory, Access::LOCAL_WRITE)?;
        let qp = plane.pd.build_qp().max_send_wr(16).max_recv_wr(16).rnr_retry(7).build()?;
        Ok(Self { qp, mr, serves: false })
    }

    /// A round trip of so many bytes, of `rounds`.
    pub(super) fn cost(&self, bytes: usize, rounds: u32, patience: Duration) -> gdsync::Result<Duration> {
        let deadline = Deadline::after(patience);
        let mut next = self.receive()?;
        let mut start = Instant::now();
        for round in 0..FIRST + rounds {
            if round == FIRST {
                start = Instant::now();
            }
            if self.serves {
                self.send(bytes)?;
            }
            next.wait(deadline.remaining())?;
            if round + 1 < FIRST + rounds {
                next = self.receive()?;
            }
            if !self.serves {
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
        self.qp.post_recv(&[RecvWr { wr_id: 0, sges: &[self.mr.sge(half, half)?] }])
    }

    fn send(&self, bytes: usize) -> gdsync::Result<()> {
        self.qp.post_send(&[SendWr::send(&[self.mr.sge(0, bytes)?])]).map(drop)
    }
}
