//! Blocking collectives: rounds of messages, one after the other.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use gdsync::memory::Memory;
use parking_lot::Mutex;

use super::reduce::{Number, Reduction};
use super::schedule::{self, Exchange, Fold};
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::overlap::ReceiveClaims;
use crate::registration::Registration;
use crate::request::{Request, Status};
use crate::wait::Deadline;

/// The collectives of a communicator: make one in every rank.
///
/// Threads may share it; their calls run one at a time. A call that fails after it has sent something leaves the ranks out of
/// step: every later call returns its error, and the contents of the buffers are undefined.
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
    pub(super) comm: Communicator,
    /// For empty messages.
    pub(super) token: Registration,
    /// Locked during every call.
    failed: Mutex<Option<Error>>,
    pub(super) scratch: Scratch,
}

impl fmt::Debug for Collectives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Collectives(rank {} of {})", self.comm.rank(), self.comm.size())
    }
}

/// Reused memory for values of other ranks.
#[derive(Clone, Default)]
pub(super) struct Scratch(pub(super) Arc<Mutex<Vec<Registration>>>);

impl Scratch {
    pub(super) fn take(&self, comm: &Communicator, len: usize) -> Result<Registration> {
        let mut free = self.0.lock();
        if let Some(at) = free.iter().position(|scratch| scratch.memory().len() >= len) {
            return Ok(free.swap_remove(at));
        }
        // The new one replaces a smaller one.
        free.pop();
        comm.register(&Memory::alloc(len.max(4096).checked_next_power_of_two().unwrap_or(len))?)
    }

    /// To be called when no message can arrive in it any more.
    pub(super) fn give_back(&self, scratch: Registration) {
        self.0.lock().push(scratch);
    }
}

/// A range that is one part for each rank.
pub(super) struct Parts {
    start: usize,
    part: usize,
}

impl Parts {
    pub(super) fn bytes(&self, blocks: &Range<usize>) -> Range<usize> {
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
    pub fn barrier(&self, timeout: impl Into<Option<Duration>>) -> Result<()> {
        let rounds = schedule::barrier(self.comm.rank(), self.comm.size());
        let rounds = self.rounds(&rounds, &self.token, |_| 0..0, &self.token, |_| 0..0);
        self.run("barrier", rounds, self.comm.limit(timeout))
    }

    /// Copies the bytes `range` of `buffer` of rank `root` to all ranks.
    ///
    /// # Errors
    /// [`Error::Message`] and [`Error::Collective`] as [`Collectives::barrier`]; [`Error::NoSuchRank`]; [`Error::Device`] for a range
    /// outside the buffer.
    pub fn broadcast(
        &self,
        buffer: &Registration,
        range: Range<usize>,
        root: usize,
        timeout: impl Into<Option<Duration>>,
    ) -> Result<()> {
        self.comm.peer(root)?;
        buffer.check_range(&range)?;
        let rounds = schedule::broadcast(self.comm.rank(), self.comm.size(), root);
        let whole = |_: &Range<usize>| range.clone();
        self.run("broadcast", self.rounds(&rounds, buffer, whole, buffer, whole), self.comm.limit(timeout))
    }

    /// Collects a part of every rank at every rank: `range` of `buffer` has one part of equal length for each rank, in rank order, and
    /// each rank has filled in its own.
    ///
    /// # Errors
    /// [`Error::Message`] and [`Error::Collective`], as [`Collectives::barrier`]; [`Error::Device`] for a range outside the buffer, or a length that is not a multiple of the number of ranks.
    pub fn allgather(
        &self,
        buffer: &Registration,
        range: Range<usize>,
        timeout: impl Into<Option<Duration>>,
    ) -> Result<()> {
        let parts = self.parts(buffer, &range)?;
        let rounds = schedule::allgather(self.comm.rank(), self.comm.size());
        let bytes = |blocks: &Range<usize>| parts.bytes(blocks);
        self.run("allgather", self.rounds(&rounds, buffer, bytes, buffer, bytes), self.comm.limit(timeout))
    }

    /// Sends part r of `from` to rank r, and receives part r of `to` from there. Both ranges have one part of equal length for each rank,
    /// in rank order.
    ///
    /// # Errors
    /// [`Error::Message`], [`Error::Collective`] and [`Error::Device`], as [`Collectives::allgather`], also for two ranges that overlap or differ in length.
    pub fn alltoall(
        &self,
        from: (&Registration, Range<usize>),
        to: (&Registration, Range<usize>),
        timeout: impl Into<Option<Duration>>,
    ) -> Result<()> {
        let (send, recv) = self.two_parts(&from, &to)?;
        let rounds = schedule::alltoall(self.comm.rank(), self.comm.size());
        let rounds =
            self.rounds(&rounds, from.0, |blocks| send.bytes(blocks), to.0, |blocks| recv.bytes(blocks));
        self.run("alltoall", rounds, self.comm.limit(timeout))
    }

    /// Combines the values in `range` of `buffer` of all ranks, element by element; all ranks get the same bits. The CPU does it, in
    /// GPU memory through its mapping. It is meant for a few values: each rank sends all of them to log2(ranks) others.
    ///
    /// # Errors
    /// [`Error::Message`] and [`Error::Collective`], as [`Collectives::barrier`]; [`Error::Device`] for GPU memory without a mapping, or a length that is not a whole
    /// number of values.
    pub fn allreduce<T: Number>(
        &self,
        buffer: &Registration,
        range: Range<usize>,
        how: Reduction,
        timeout: impl Into<Option<Duration>>,
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
            let (buffer, from, at, offset) = (buffer.clone(), scratch.clone(), range.clone(), theirs.start);
            let combine = move || combine::<T>(&buffer, at, &from, [offset], how);
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
        self.run("allreduce", rounds.collect(), self.comm.limit(timeout))?;
        self.scratch.give_back(scratch);
        Ok(())
    }

    fn run(&self, operation: &'static str, rounds: Vec<Round>, timeout: Duration) -> Result<()> {
        let deadline = Deadline::after(timeout);
        self.unless_failed(|| run(&self.comm, operation, rounds, &deadline))
    }

    /// Runs what sends, unless an earlier call failed, and keeps its error.
    pub(super) fn unless_failed<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
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

    pub(super) fn parts(&self, buffer: &Registration, range: &Range<usize>) -> Result<Parts> {
        buffer.check_range(range)?;
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

    pub(super) fn two_parts(
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

fn invalid(what: &'static str, value: impl ToString, expected: &'static str) -> Error {
    Error::Device(gdsync::Error::InvalidArgument { what, value: value.to_string(), expected })
}

/// Refuses a range that is not a whole number of values, before anything is sent.
pub(super) fn check_values<T: Number>(buffer: &Registration, range: &Range<usize>) -> Result<()> {
    buffer.check_range(range)?;
    if !range.len().is_multiple_of(size_of::<T>()) {
        return Err(invalid("the length of the range", range.len(), "a whole number of values"));
    }
    Ok(())
}

/// Combines the values at `range` of `buffer` with those at `offsets` of `scratch`, in this order.
pub(super) fn combine<T: Number>(
    buffer: &Registration,
    range: Range<usize>,
    scratch: &Registration,
    offsets: impl IntoIterator<Item = usize>,
    how: Reduction,
) -> Result<()> {
    let (mut values, mut theirs) = (vec![0; range.len()], vec![0; range.len()]);
    buffer.memory().read(range.start, &mut values)?;
    for offset in offsets {
        scratch.memory().read(offset, &mut theirs)?;
        T::combine(&mut values, &theirs, how);
    }
    buffer.memory().write(range.start, &values)?;
    // A GPU may read them next.
    Ok(buffer.memory().flush()?)
}

/// One message of a round.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) rank: usize,
    pub(super) buffer: Registration,
    pub(super) range: Range<usize>,
}

/// What the CPU does with the messages of a round.
pub(super) type Step = Box<dyn FnOnce() -> Result<()> + Send>;

/// Messages that are under way together, and a step after all of them.
#[derive(Default)]
struct Round {
    sends: Vec<Part>,
    receives: Vec<Part>,
    then: Option<Step>,
}

/// A receive under way, and the length that it expects.
#[derive(Clone, Debug)]
pub(super) struct Due {
    pub(super) request: Request,
    pub(super) bytes: usize,
}

impl Due {
    pub(super) fn receive(comm: &Communicator, part: &Part) -> Result<Self> {
        let (peer, pieces) = (comm.peer(part.rank)?, [(&part.buffer, part.range.clone())]);
        // Unchecked: on a stream the next call of a collective may be enqueued while this one is under way, and its messages come later.
        let request = Request::received(peer, peer.receive(&pieces, || Ok(ReceiveClaims::new()))?);
        Ok(Self { request, bytes: part.range.len() })
    }

    /// Refuses another length: there are no tags, so lengths show a rank that is in another collective.
    pub(super) fn check(&self, operation: &'static str, status: Status) -> Result<()> {
        if status.bytes == self.bytes {
            return Ok(());
        }
        let what = format!("{} bytes came where {} were due", status.bytes, self.bytes);
        Err(Error::Collective { operation, rank: status.rank, what })
    }
}

/// Runs the rounds.
fn run(
    comm: &Communicator,
    operation: &'static str,
    mut rounds: Vec<Round>,
    deadline: &Deadline,
) -> Result<()> {
    let take = |(index, round): (usize, &mut Round)| -> Vec<_> {
        std::mem::take(&mut round.receives).into_iter().map(|part| (index, part)).collect()
    };
    let mut ahead: VecDeque<(usize, Part)> = rounds.iter_mut().enumerate().flat_map(take).collect();
    let mut due: VecDeque<(usize, Due)> = VecDeque::new();
    let comm = &comm.with_timeout(deadline.remaining());
    for (index, round) in rounds.into_iter().enumerate() {
        // Also those of later rounds, as far as there is room: faster ranks then need not wait.
        while let Some((at, part)) = ahead.front() {
            match Due::receive(comm, part) {
                Ok(receive) => due.push_back((*at, receive)),
                Err(Error::Message { cause: gdsync::Error::QueueFull { .. }, .. }) if *at > index => break,
                Err(error) => return Err(error),
            }
            ahead.pop_front();
        }
        let sends: Result<Vec<_>> =
            round.sends.iter().map(|part| comm.isend(&part.buffer, part.range.clone(), part.rank)).collect();
        while let Some((_, receive)) = due.pop_front_if(|(at, _)| *at == index) {
            receive.check(operation, comm.wait(&receive.request, deadline.remaining())?)?;
        }
        comm.wait_all(&sends?, deadline.remaining())?;
        round.then.map_or(Ok(()), |then| then())?;
    }
    Ok(())
}
