//! Operations of all ranks together: barrier, broadcast, allgather, alltoall, allreduce.
//!
//! They are made of the messages that [`Communicator`] offers to everybody, and share its connections. So the rule for
//! messages holds for them too: between two ranks, messages and collectives must be started in the same order on both.
//! All ranks call the same collective with the same sizes, and all of them the blocking form or all the one on streams.
//!
//! The blocking forms relay: dissemination, binomial trees, recursive doubling, rings. On a stream every rank sends
//! straight to every other: a stream goes on after a wait that failed, and a relay would pass on what never came. There,
//! ranks tell each other first when their stream got so far: a buffer is not written before.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use gdsync::memory::Memory;
use parking_lot::Mutex;

use crate::communicator::{Communicator, Registration};
use crate::deadline::Deadline;
use crate::error::{Error, Result};

mod on_stream;
mod plan;
mod reduce;
mod schedule;

pub use on_stream::Pending;
pub use reduce::{Number, Reduction};

use plan::{Part, Round};
use schedule::{Exchange, Fold};

/// The collectives of a communicator: make one in every rank.
///
/// Threads may share it; their calls take turns. A call that fails after it has sent something leaves the ranks out of
/// step: every later call returns its error, and what the buffers hold is undefined.
///
/// ```no_run
/// use std::time::Duration;
/// use gdsync::memory::Memory;
/// use mp::Communicator;
/// use mp::collective::{Collectives, Reduction};
///
/// # fn main() -> mp::Result<()> {
/// let second = Duration::from_secs(1);
/// let comm = Communicator::builder().spawn(4).init()?;
/// let all = Collectives::new(&comm)?;
/// let sums = comm.register(&Memory::alloc(8 * 3)?)?;
/// sums.memory().write(8, &1.5_f64.to_ne_bytes())?;
/// all.allreduce::<f64>(&sums, 0..24, Reduction::Sum, second)?; // 0, 6, 0 in every rank
/// all.barrier(second)?;
/// # comm.finalize(second)
/// # }
/// ```
pub struct Collectives {
    comm: Communicator,
    /// For messages without bytes.
    token: Registration,
    /// Held through every call.
    failed: Mutex<Option<Error>>,
    scratch: Scratch,
}

impl fmt::Debug for Collectives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Collectives(rank {} of {})", self.comm.rank(), self.comm.size())
    }
}

/// Memory for values on their way, used again and again.
#[derive(Clone, Default)]
struct Scratch(Arc<Mutex<Vec<Registration>>>);

impl Scratch {
    fn take(&self, comm: &Communicator, len: usize) -> Result<Registration> {
        let mut free = self.0.lock();
        if let Some(at) = free.iter().position(|scratch| scratch.memory().len() >= len) {
            return Ok(free.swap_remove(at));
        }
        // Too small a one makes room for its successor.
        free.pop();
        comm.register(&Memory::alloc(len.max(4096).checked_next_power_of_two().unwrap_or(len))?)
    }

    /// Only when no message can arrive in it any more.
    fn give_back(&self, scratch: Registration) {
        self.0.lock().push(scratch);
    }
}

/// A range that is one part for each rank.
struct Parts {
    start: usize,
    part: usize,
}

impl Parts {
    fn bytes(&self, blocks: &Range<usize>) -> Range<usize> {
        self.start + blocks.start * self.part..self.start + blocks.end * self.part
    }
}

impl Collectives {
    /// The collectives of `comm`. Nothing is sent.
    ///
    /// # Errors
    /// [`Error::Device`] when a few bytes cannot be registered.
    pub fn new(comm: &Communicator) -> Result<Self> {
        let token = comm.register(&Memory::alloc(64)?)?;
        Ok(Self { comm: comm.clone(), token, failed: Mutex::default(), scratch: Scratch::default() })
    }

    /// The communicator.
    pub fn communicator(&self) -> &Communicator {
        &self.comm
    }

    /// Blocks until every rank has called it.
    ///
    /// # Errors
    /// [`Error::Message`] names the rank whose message failed or is late; [`Error::Collective`] for a rank that is in
    /// another collective; the error of an earlier call.
    pub fn barrier(&self, timeout: Duration) -> Result<()> {
        let rounds = schedule::barrier(self.comm.rank(), self.comm.size());
        let rounds = self.rounds(&rounds, &self.token, |_| 0..0, &self.token, |_| 0..0);
        self.run("barrier", rounds, timeout)
    }

    /// Brings the bytes `range` of `buffer` of rank `root` to all ranks.
    ///
    /// # Errors
    /// As [`Collectives::barrier`]; [`Error::NoSuchRank`]; [`Error::Device`] for a range outside the buffer.
    pub fn broadcast(
        &self,
        buffer: &Registration,
        range: Range<usize>,
        root: usize,
        timeout: Duration,
    ) -> Result<()> {
        self.check_rank(root)?;
        check_range(buffer, &range)?;
        let rounds = schedule::broadcast(self.comm.rank(), self.comm.size(), root);
        let whole = |_: &Range<usize>| range.clone();
        self.run("broadcast", self.rounds(&rounds, buffer, whole, buffer, whole), timeout)
    }

    /// Collects a part of every rank at every rank: `range` of `buffer` is one part of equal length for each, in rank
    /// order, and each rank has filled in its own.
    ///
    /// # Errors
    /// As [`Collectives::broadcast`], and [`Error::Device`] for a length that is not a multiple of the number of ranks.
    pub fn allgather(&self, buffer: &Registration, range: Range<usize>, timeout: Duration) -> Result<()> {
        let parts = self.parts(buffer, &range)?;
        let rounds = schedule::allgather(self.comm.rank(), self.comm.size());
        let bytes = |blocks: &Range<usize>| parts.bytes(blocks);
        self.run("allgather", self.rounds(&rounds, buffer, bytes, buffer, bytes), timeout)
    }

    /// Brings part r of `from` to rank r, where it becomes part q of `to`, if q is this rank. Both are one part of equal
    /// length for each rank, in rank order.
    ///
    /// # Errors
    /// As [`Collectives::allgather`], and [`Error::Device`] for two that overlap or differ in length.
    pub fn alltoall(
        &self,
        from: (&Registration, Range<usize>),
        to: (&Registration, Range<usize>),
        timeout: Duration,
    ) -> Result<()> {
        let (send, recv) = self.two_parts(&from, &to)?;
        let rounds = schedule::alltoall(self.comm.rank(), self.comm.size());
        let rounds =
            self.rounds(&rounds, from.0, |blocks| send.bytes(blocks), to.0, |blocks| recv.bytes(blocks));
        self.run("alltoall", rounds, timeout)
    }

    /// Combines the values in `range` of `buffer` of all ranks, one by one, and leaves the result in all of them, with
    /// the same bits. The CPU does it, in GPU memory through its mapping; it is meant for a few values: each rank sends all
    /// of them to log2(ranks) others.
    ///
    /// # Errors
    /// As [`Collectives::broadcast`]; [`Error::Device`] for GPU memory without a mapping, or a length that is not a whole
    /// number of values.
    pub fn allreduce<T: Number>(
        &self,
        buffer: &Registration,
        range: Range<usize>,
        how: Reduction,
        timeout: Duration,
    ) -> Result<()> {
        check_values::<T>(buffer, &range)?;
        let folds = schedule::allreduce(self.comm.rank(), self.comm.size());
        let len = range.len();
        let scratch = self.scratch.take(&self.comm, len * folds.len())?;
        let rounds = folds.into_iter().enumerate().map(|(i, fold)| {
            let part =
                |rank, buffer: &Registration, range| vec![Part { rank, buffer: buffer.clone(), range }];
            let own = |rank| part(rank, buffer, range.clone());
            let theirs = i * len..(i + 1) * len;
            let (buffer, from, at, slot) = (buffer.clone(), scratch.clone(), range.clone(), theirs.start);
            let combine = move || combine::<T>(&buffer, at, &from, [slot], how);
            match fold {
                Fold::Give(to) => Round { sends: own(to), ..Round::default() },
                Fold::Copy(from) => Round { receives: own(from), ..Round::default() },
                Fold::Take(from) => Round {
                    receives: part(from, &scratch, theirs),
                    then: Some(Box::new(combine)),
                    ..Round::default()
                },
                Fold::Swap(with) => Round {
                    sends: own(with),
                    receives: part(with, &scratch, theirs),
                    then: Some(Box::new(combine)),
                },
            }
        });
        self.run("allreduce", rounds.collect(), timeout)?;
        self.scratch.give_back(scratch);
        Ok(())
    }

    fn run(&self, operation: &'static str, rounds: Vec<Round>, timeout: Duration) -> Result<()> {
        let deadline = Deadline::after(timeout);
        self.sticky(|| plan::run(&self.comm, operation, rounds, &deadline))
    }

    /// Runs what sends, unless something failed before, and keeps its error.
    fn sticky<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut failed = self.failed.lock();
        match &*failed {
            Some(error) => Err(error.clone()),
            None => body().inspect_err(|error| *failed = Some(error.clone())),
        }
    }

    fn rounds(
        &self,
        exchanges: &[Exchange],
        from: &Registration,
        send: impl Fn(&Range<usize>) -> Range<usize>,
        to: &Registration,
        recv: impl Fn(&Range<usize>) -> Range<usize>,
    ) -> Vec<Round> {
        let part = |buffer: &Registration, rank, range| Part { rank, buffer: buffer.clone(), range };
        let round = |exchange: &Exchange| Round {
            sends: exchange.send.iter().map(|(rank, blocks)| part(from, *rank, send(blocks))).collect(),
            receives: exchange.recv.iter().map(|(rank, blocks)| part(to, *rank, recv(blocks))).collect(),
            then: None,
        };
        exchanges.iter().map(round).collect()
    }

    fn check_rank(&self, rank: usize) -> Result<()> {
        self.comm.peer(rank).map(drop)
    }

    fn parts(&self, buffer: &Registration, range: &Range<usize>) -> Result<Parts> {
        check_range(buffer, range)?;
        let size = self.comm.size();
        if !range.len().is_multiple_of(size) {
            return Err(invalid(
                "the length of the range",
                range.len(),
                "a part of equal length for each rank",
            ));
        }
        Ok(Parts { start: range.start, part: range.len() / size })
    }

    fn two_parts(
        &self,
        from: &(&Registration, Range<usize>),
        to: &(&Registration, Range<usize>),
    ) -> Result<(Parts, Parts)> {
        let parts = (self.parts(from.0, &from.1)?, self.parts(to.0, &to.1)?);
        if parts.0.part != parts.1.part {
            return Err(invalid("the length of the second range", to.1.len(), "that of the first"));
        }
        let ends = |(buffer, range): &(&Registration, Range<usize>)| {
            let base = buffer.memory().addr();
            (base + range.start as u64, base + range.end as u64)
        };
        let (one, other) = (ends(from), ends(to));
        if one.0 < other.1 && other.0 < one.1 {
            return Err(invalid(
                "the two ranges",
                format!("{:?} and {:?}", from.1, to.1),
                "apart from each other",
            ));
        }
        Ok(parts)
    }
}

pub(crate) fn invalid(what: &'static str, value: impl ToString, expected: &'static str) -> Error {
    Error::Device(gdsync::Error::InvalidArgument { what, value: value.to_string(), expected })
}

/// Before anything is sent: what is refused then leaves the ranks in step.
pub(crate) fn check_range(buffer: &Registration, range: &Range<usize>) -> Result<()> {
    let len = range.end.checked_sub(range.start);
    let len = len.ok_or_else(|| {
        invalid("the range", format!("{range:?}"), "one that does not end before it starts")
    })?;
    let (offset, size) = (range.start, buffer.memory().len());
    match size.checked_sub(offset).is_some_and(|rest| len <= rest) {
        true => Ok(()),
        false => Err(Error::Device(gdsync::Error::OutOfBounds { offset, len, size })),
    }
}

fn check_values<T: Number>(buffer: &Registration, range: &Range<usize>) -> Result<()> {
    check_range(buffer, range)?;
    if !range.len().is_multiple_of(size_of::<T>()) {
        return Err(invalid("the length of the range", range.len(), "a whole number of values"));
    }
    Ok(())
}

/// Combines the values at `range` of `buffer` with those in `slots` of `scratch`, in this order.
fn combine<T: Number>(
    buffer: &Registration,
    range: Range<usize>,
    scratch: &Registration,
    slots: impl IntoIterator<Item = usize>,
    how: Reduction,
) -> Result<()> {
    let (mut values, mut theirs) = (vec![0; range.len()], vec![0; range.len()]);
    buffer.memory().read(range.start, &mut values)?;
    for slot in slots {
        scratch.memory().read(slot, &mut theirs)?;
        T::combine(&mut values, &theirs, how);
    }
    buffer.memory().write(range.start, &values)?;
    // The GPU reads them next, if they are on one.
    Ok(buffer.memory().flush()?)
}
