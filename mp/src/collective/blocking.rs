//! Blocking collectives: rounds of messages, one after the other.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use gdsync::memory::Memory;
use gdsync::recorder::Traffic;
use parking_lot::{Mutex, MutexGuard};

use super::call::{Call, HEADER, Operation, Slots};
use super::calls::Calls;
use super::message::{Arrival, Due, Part, Started};
use super::reduce::{ELEMENTS, Number, Reduction};
use super::schedule::{self, Exchange, Fold};
use crate::builder::CommunicatorBuilder;
use crate::communicator::Communicator;
use crate::error::{Error, Result, is_given_up_by_peer};
use crate::exchange::CommonCall;
use crate::registration::Registration;
use crate::request::Request;
use crate::wait::Deadline;

/// The collectives of a communicator.
///
/// It has queue pairs of its own: its messages do not mix with those of the communicator or of other `Collectives`. They end with the
/// connections of the communicator, and stay until it goes: reuse it.
///
/// Threads may share it; their calls run one at a time. A call that fails after it has sent something leaves the ranks out of
/// step: every later call returns its error, and the other ranks learn it in theirs. The contents of its buffers are undefined, and
/// may be written until the `Collectives` are dropped, which ends their connections.
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
/// let all = Collectives::new(&comm, second)?; // by all ranks
/// let sums = comm.register(&Memory::alloc(8 * 3)?)?;
/// sums.memory().write(8, &1.5_f64.to_ne_bytes())?;
/// all.allreduce::<f64>(&sums, 0..24, Reduction::Sum, second)?; // 0, 6, 0 in every rank
/// all.barrier(second)?;
/// # comm.finalize(second)
/// # }
/// ```
pub struct Collectives {
    pub(super) core: Arc<Core>,
    pub(super) slots: Arc<Slots>,
    pub(super) scratch: Scratch,
}

/// What those that are pending on streams share with the [`Collectives`]: the connections, and whether a call has failed.
pub(super) struct Core {
    /// The communicator of the application.
    comm: Communicator,
    /// The connections of the collectives: the same ranks.
    pub(super) context: Communicator,
    pub(super) calls: Arc<Calls>,
    /// Locked during every call.
    state: Mutex<State>,
}

/// How long a rank that has found another call waits until the others have its abort notice.
const ABORT_NOTICE: Duration = Duration::from_secs(1);

/// What the calls of this rank have come to.
#[derive(Default)]
pub(super) struct State {
    failed: Option<Error>,
    /// Calls so far.
    number: u64,
    /// Those on streams that nobody has seen complete, oldest first.
    pub(super) started: VecDeque<Arc<Started>>,
}

/// Whether a wait is over, and what it waits for goes on.
fn is_late(error: &Error) -> bool {
    matches!(error, Error::Deadline { .. } | Error::Message { cause: gdsync::Error::Deadline { .. }, .. })
}

impl Core {
    /// # Errors
    /// [`Error::Deadline`] while another thread is in a call.
    fn lock(&self, deadline: &Deadline) -> Result<MutexGuard<'_, State>> {
        self.state.try_lock_for(deadline.remaining()).ok_or_else(|| {
            let what = "waiting for the collective of another thread";
            deadline.error(what, "see what that waits for, or make Collectives for each thread")
        })
    }

    /// Forgets what is complete on streams.
    ///
    /// # Errors
    /// Of an earlier call.
    fn look_back(&self, state: &mut State, deadline: &Deadline) -> Result<()> {
        while state.failed.is_none()
            && let Some(first) = state.started.front().cloned()
        {
            match first.outcome() {
                Ok(None) => break,
                Ok(Some(())) => _ = state.started.pop_front(),
                Err(error) => self.fail(state, first.call, &error, deadline),
            }
        }
        state.failed.clone().map_or(Ok(()), Err)
    }

    /// Waits for what is under way on streams: their queues are theirs until then.
    ///
    /// # Errors
    /// Of an earlier call, also that it is late.
    fn wait_started(&self, state: &mut State, deadline: &Deadline) -> Result<()> {
        while let Some(first) = state.started.front().cloned() {
            if let Err(error) = first.wait(deadline) {
                if !is_late(&error) {
                    self.fail(state, first.call, &error, deadline);
                }
                return Err(error);
            }
            state.started.pop_front();
        }
        Ok(())
    }

    /// Waits for a call on a stream.
    pub(super) fn wait(&self, started: &Started, deadline: &Deadline) -> Result<()> {
        started.wait(deadline).inspect_err(|error| {
            // A call of another thread that has the lock finds it in the next one.
            if !is_late(error)
                && let Ok(mut state) = self.lock(deadline)
            {
                self.fail(&mut state, started.call, error, deadline);
            }
        })
    }

    /// Runs the part of a call that sends, after `admit`, which may refuse it, unless an earlier one has failed. Keeps its error, and
    /// tells the other ranks of it.
    pub(super) fn call<A, T>(
        &self,
        operation: Operation,
        is_on_stream: bool,
        bytes: usize,
        deadline: &Deadline,
        admit: impl FnOnce(&mut State) -> Result<A>,
        body: impl FnOnce(A, Call, &mut State) -> Result<T>,
    ) -> Result<T> {
        self.comm.refuse_finalized("a collective")?;
        let mut state = self.lock(deadline)?;
        self.look_back(&mut state, deadline)?;
        self.calls.check_open()?;
        let admitted = admit(&mut state)?;
        state.number += 1;
        let (number, bytes, has_given_up) = (state.number, bytes as u64, false);
        let call = Call { operation, is_on_stream, number, bytes, has_given_up };
        self.calls.publish(&call)?;
        body(admitted, call, &mut state).map_err(|error| {
            let error = self.calls.explain(&call, error, deadline.limit());
            self.fail(&mut state, call, &error, deadline);
            error
        })
    }

    /// Keeps the first error, which ends the part of this rank, and tells the others.
    #[cold]
    fn fail(&self, state: &mut State, call: Call, error: &Error, deadline: &Deadline) {
        if state.failed.is_none() {
            state.failed = Some(error.clone());
            self.abort(call, error, deadline);
        }
    }

    fn abort(&self, call: Call, error: &Error, deadline: &Deadline) {
        if error.is_rank_lost() {
            // The others learn it, also those that do not wait for the lost one.
            if let Error::Message { rank, cause, .. } = error
                && !is_given_up_by_peer(cause)
                && let Ok(peer) = self.comm.peer(*rank)
            {
                peer.transport.fail(cause);
            }
            self.context.0.peers.iter().for_each(|peer| peer.transport.fail(&gdsync::Error::GivenUp));
            return;
        }
        let sent = self.send_abort_notice(call).unwrap_or_default();
        if matches!(error, Error::Collective { .. }) {
            let limit = Deadline::after(ABORT_NOTICE.min(deadline.remaining()));
            sent.iter().for_each(|sent| _ = self.context.wait(sent, limit.remaining()));
            // Nothing is received any more that a rank still sends.
            self.calls.end(&call, error, deadline.remaining());
        }
    }

    /// Starts to tell the other ranks, as far as they are there and their queues have room, that nothing more comes.
    fn send_abort_notice(&self, call: Call) -> Result<Vec<Request>> {
        let call = Call { has_given_up: true, ..call };
        // In memory of its own: messages of the failed call may still come into the slots.
        let memory = Memory::alloc(HEADER)?;
        memory.write(0, &call.to_bytes())?;
        let (header, context) = (self.context.register(&memory)?, self.context.with_timeout(Duration::ZERO));
        Ok(self.others().filter_map(|rank| context.isend(&header, 0..HEADER, rank).ok()).collect())
    }

    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        // From the next rank on, so that not all start with the same one.
        let (me, size) = (self.context.rank(), self.context.size());
        (1..size).map(move |step| (me + step) % size)
    }
}

impl Drop for Collectives {
    fn drop(&mut self) {
        // Receives of a call that is late are still in buffers of the application.
        let core = &self.core;
        if core.comm.0.fork_guard.is_here()
            && let Ok(state) = core.lock(&Deadline::after(ABORT_NOTICE))
            && let (Some(error), Some(call)) = (&state.failed, core.calls.own(state.number))
        {
            core.calls.end(&call, error, ABORT_NOTICE);
        }
    }
}

impl fmt::Debug for Collectives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Collectives(rank {} of {})", self.core.comm.rank(), self.core.comm.size())
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
    /// Connects the ranks of `comm` for collectives. Every rank must call this, in the same order if it makes several.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] names a rank that is gone, [`Error::Deadline`] one that is late; [`Error::Device`] from the device.
    pub fn new(comm: &Communicator, timeout: impl Into<Option<Duration>>) -> Result<Self> {
        let (_call, deadline) = (CommonCall::CollectivesNew.enter(), Deadline::after(comm.limit(timeout)));
        let mut builder = CommunicatorBuilder(comm.0.settings.clone());
        let queues = &mut builder.0.queues;
        // A header, the part, and room for what is not due; on streams also a ready message and a long part.
        (queues.max_pieces, queues.depth) = (queues.max_pieces.max(3), queues.depth.max(3));
        queues.traffic = Traffic::Collectives;
        let context = builder.build_beside(comm, deadline)?.with_timeout(comm.timeout());
        let peers = &context.0.peers;
        comm.0.besides.lock().push((peers.clone(), context.0.credits.clone()));
        comm.0.peers.iter().zip(peers.iter()).for_each(|(peer, beside)| peer.transport.accompany(beside));
        let slots = Slots::new(&context)?;
        let calls = slots.calls.clone();
        let core = Arc::new(Core { comm: comm.clone(), context, calls, state: Mutex::default() });
        Ok(Self { core, slots, scratch: Scratch::default() })
    }

    /// Ends the calls of all threads with [`Error::Closed`], and those of other ranks that need this one with [`Error::Collective`].
    /// Any thread may call it. It takes a second if a rank does not answer.
    pub fn close(&self) {
        self.core.calls.close();
    }

    /// Waits for the calls on streams, and then for all ranks, which must call this too, and gives the connections back. Without it
    /// they stay until the communicator goes. A call that another thread waits in is [closed](Collectives::close). The last
    /// [`Pending`](super::Pending) releases the memory.
    ///
    /// # Errors
    /// That of an earlier call, also where it is late; [`Error::Deadline`] for a rank that is late; [`Error::Bootstrap`] names a rank
    /// that is gone.
    pub fn destroy(&self, timeout: impl Into<Option<Duration>>) -> Result<()> {
        let (_call, Core { comm, context, .. }) = (CommonCall::CollectivesDestroy.enter(), &*self.core);
        comm.refuse_finalized("the end of collectives")?;
        let deadline = Deadline::after(comm.limit(timeout));
        if self.core.state.try_lock().is_none() {
            // It may wait for a rank that waits here.
            self.close();
        }
        let mut state = self.core.lock(&deadline)?;
        let earlier = self.core.look_back(&mut state, &deadline);
        let earlier = earlier.and_then(|()| self.core.wait_started(&mut state, &deadline));
        drop(state);
        self.core.calls.refuse();
        // Other ranks may still need what they have of this one.
        comm.barrier(deadline.remaining())?;
        comm.0.besides.lock().retain(|(peers, _)| !Arc::ptr_eq(peers, &context.0.peers));
        earlier
    }

    /// The communicator.
    pub fn communicator(&self) -> &Communicator {
        &self.core.comm
    }

    /// Blocks until every rank has called it.
    ///
    /// # Errors
    /// [`Error::Message`] names the rank whose message failed or is late; [`Error::Collective`] a rank that has called another
    /// collective, or with other arguments, or has given up; the error of an earlier call. Nothing is sent where calls on streams are
    /// not through in time, or ([`Error::Deadline`]) that of another thread, and ([`Error::Device`]) after
    /// [`Communicator::finalize`].
    pub fn barrier(&self, timeout: impl Into<Option<Duration>>) -> Result<()> {
        let rounds = schedule::barrier(self.core.comm.rank(), self.core.comm.size());
        let nothing = &self.slots.spill;
        let rounds = self.rounds(&rounds, nothing, |_| 0..0, nothing, |_| 0..0);
        self.run(Operation::Barrier, 0, rounds, timeout)
    }

    /// Copies the bytes `range` of `buffer` of rank `root` to all ranks.
    ///
    /// # Errors
    /// [`Error::Message`] and [`Error::Collective`] as [`Collectives::barrier`]; [`Error::Device`] for a root that is no rank, or a
    /// range outside the buffer.
    pub fn broadcast(
        &self,
        buffer: &Registration,
        range: Range<usize>,
        root: usize,
        timeout: impl Into<Option<Duration>>,
    ) -> Result<()> {
        self.check_root(root)?;
        buffer.check_range(&range)?;
        let rounds = schedule::broadcast(self.core.comm.rank(), self.core.comm.size(), root);
        let whole = |_: &Range<usize>| range.clone();
        let (operation, rounds) = (broadcast(root), self.rounds(&rounds, buffer, whole, buffer, whole));
        self.run(operation, range.len(), rounds, timeout)
    }

    /// Collects a part of every rank at every rank: `range` of `buffer` has one part of equal length for each rank, in rank order, and
    /// each rank has filled in its own.
    ///
    /// # Errors
    /// [`Error::Message`] and [`Error::Collective`], as [`Collectives::barrier`]; [`Error::Device`] for a range outside the buffer,
    /// or a length that is not a multiple of the number of ranks.
    pub fn allgather(
        &self,
        buffer: &Registration,
        range: Range<usize>,
        timeout: impl Into<Option<Duration>>,
    ) -> Result<()> {
        let parts = self.parts("the range of the allgather", buffer, &range)?;
        let rounds = schedule::allgather(self.core.comm.rank(), self.core.comm.size());
        let bytes = |blocks: &Range<usize>| parts.bytes(blocks);
        let rounds = self.rounds(&rounds, buffer, bytes, buffer, bytes);
        self.run(Operation::Allgather, range.len(), rounds, timeout)
    }

    /// Sends part r of `from` to rank r, and receives part r of `to` from there. Both ranges have one part of equal length for each
    /// rank, in rank order.
    ///
    /// # Errors
    /// [`Error::Message`], [`Error::Collective`] and [`Error::Device`], as [`Collectives::allgather`], also for two ranges that
    /// overlap or differ in length.
    pub fn alltoall(
        &self,
        from: (&Registration, Range<usize>),
        to: (&Registration, Range<usize>),
        timeout: impl Into<Option<Duration>>,
    ) -> Result<()> {
        let (send, recv) = self.two_parts(&from, &to)?;
        let rounds = schedule::alltoall(self.core.comm.rank(), self.core.comm.size());
        let rounds =
            self.rounds(&rounds, from.0, |blocks| send.bytes(blocks), to.0, |blocks| recv.bytes(blocks));
        self.run(Operation::Alltoall, from.1.len(), rounds, timeout)
    }

    /// Combines the values in `range` of `buffer` of all ranks, element by element; all ranks get the same bits. The CPU does it, in
    /// GPU memory through its mapping. It is meant for a few values: each rank sends all of them to log2(ranks) others.
    ///
    /// # Errors
    /// [`Error::Message`] and [`Error::Collective`], as [`Collectives::barrier`]; [`Error::Device`] for GPU memory without a
    /// mapping, or a length that is not a whole number of values.
    pub fn allreduce<T: Number>(
        &self,
        buffer: &Registration,
        range: Range<usize>,
        how: Reduction,
        timeout: impl Into<Option<Duration>>,
    ) -> Result<()> {
        check_values::<T>(buffer, &range)?;
        let folds = schedule::allreduce(self.core.comm.rank(), self.core.comm.size());
        let len = range.len();
        let scratch = self.scratch.take(&self.core.comm, len * folds.len())?;
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
        self.run(allreduce::<T>(how), len, rounds.collect(), timeout)?;
        self.scratch.give_back(scratch);
        Ok(())
    }

    fn run(
        &self,
        operation: Operation,
        bytes: usize,
        rounds: Vec<Round>,
        timeout: impl Into<Option<Duration>>,
    ) -> Result<()> {
        let (core, deadline) = (&self.core, Deadline::after(self.core.comm.limit(timeout)));
        let admit = |state: &mut State| core.wait_started(state, &deadline);
        core.call(operation, false, bytes, &deadline, admit, |(), call, _| {
            run(&core.context, &self.slots, call, rounds, &deadline)
        })
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

    pub(super) fn check_root(&self, root: usize) -> Result<()> {
        let size = self.core.comm.size();
        if root < size {
            return Ok(());
        }
        let value = format!("rank {root}, and the communicator has ranks 0 to {}", size - 1);
        Err(invalid("the root of the broadcast", value, "one of these"))
    }

    /// The parts of the range of a collective, which must be one for each rank.
    pub(super) fn parts(
        &self,
        what: &'static str,
        buffer: &Registration,
        range: &Range<usize>,
    ) -> Result<Parts> {
        buffer.check_range(range)?;
        let (len, size) = (range.len(), self.core.comm.size());
        if !len.is_multiple_of(size) {
            let value = format!("{len} bytes long, no multiple of the {size} ranks");
            return Err(invalid(what, value, "one part of equal length for each rank"));
        }
        Ok(Parts { start: range.start, part: len / size })
    }

    pub(super) fn two_parts(
        &self,
        from: &(&Registration, Range<usize>),
        to: &(&Registration, Range<usize>),
    ) -> Result<(Parts, Parts)> {
        const TO: &str = "the range to receive into of the alltoall";
        let sent = self.parts("the range to send of the alltoall", from.0, &from.1)?;
        let parts = (sent, self.parts(TO, to.0, &to.1)?);
        if parts.0.part != parts.1.part {
            let value = format!("{} bytes long, and the one to send {}", to.1.len(), from.1.len());
            return Err(invalid(TO, value, "equal lengths"));
        }
        let ends = |(buffer, range): &(&Registration, Range<usize>)| {
            let base = buffer.memory().addr();
            (base + range.start as u64, base + range.end as u64)
        };
        let (one, other) = (ends(from), ends(to));
        if one.0 < other.1 && other.0 < one.1 {
            let value = format!("bytes {:?}, which overlap those to send, bytes {:?}", to.1, from.1);
            return Err(invalid(TO, value, "bytes of its own"));
        }
        Ok(parts)
    }
}

pub(super) fn invalid(what: &'static str, value: impl ToString, expected: &'static str) -> Error {
    Error::Device(gdsync::Error::InvalidArgument { what, value: value.to_string(), expected })
}

/// Refuses a range that is not a whole number of values, before anything is sent.
pub(super) fn check_values<T: Number>(buffer: &Registration, range: &Range<usize>) -> Result<()> {
    buffer.check_range(range)?;
    let (len, size) = (range.len(), size_of::<T>());
    if !len.is_multiple_of(size) {
        let of = ELEMENTS[usize::from(T::ELEMENT)];
        let value = format!("{len} bytes long, no multiple of {size}, the bytes of {of}");
        return Err(invalid("the range of the allreduce", value, "a whole number of values"));
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

/// What the CPU does with the messages of a round.
pub(super) type Step = Box<dyn FnOnce() -> Result<()> + Send>;

/// Messages that are under way together, and a step after all of them.
#[derive(Default)]
struct Round {
    sends: Vec<Part>,
    receives: Vec<Part>,
    then: Option<Step>,
}

pub(super) fn broadcast(root: usize) -> Operation {
    Operation::Broadcast { root: u32::try_from(root).expect("there are not so many ranks") }
}

pub(super) fn allreduce<T: Number>(how: Reduction) -> Operation {
    Operation::Allreduce { element: T::ELEMENT, how }
}

/// Runs the rounds.
fn run(
    comm: &Communicator,
    slots: &Arc<Slots>,
    call: Call,
    mut rounds: Vec<Round>,
    deadline: &Deadline,
) -> Result<()> {
    let take = |(index, round): (usize, &mut Round)| -> Vec<_> {
        let parts = std::mem::take(&mut round.receives).into_iter();
        parts.flat_map(Part::arrivals).map(|arrival| (index, arrival)).collect()
    };
    let mut ahead: VecDeque<(usize, Arrival)> = rounds.iter_mut().enumerate().flat_map(take).collect();
    let mut due: VecDeque<(usize, Due)> = VecDeque::new();
    let header = slots.with_header(comm, &call)?;
    for (index, round) in rounds.into_iter().enumerate() {
        // Also those of later rounds, as far as there is room: faster ranks then need not wait.
        while let Some((at, arrival)) = ahead.front() {
            match arrival.receive(comm, slots) {
                Ok(receive) => due.push_back((*at, receive)),
                Err(Error::Message { cause: gdsync::Error::QueueFull { .. }, .. }) if *at > index => break,
                Err(error) => return Err(error),
            }
            ahead.pop_front();
        }
        let send = |part: &Part| {
            part.send(&header, |pieces| {
                comm.with_timeout(deadline.remaining()).isend_vectored(pieces, part.rank)
            })
        };
        let sends: Result<Vec<_>> = round.sends.iter().map(send).collect();
        while let Some((_, receive)) = due.pop_front_if(|(at, _)| *at == index) {
            // What has come may say why a send failed.
            let limit = if sends.is_ok() { deadline.remaining() } else { Duration::ZERO };
            match comm.wait(&receive.request, limit) {
                Ok(status) => receive.check(&call, &slots.calls, status)?,
                Err(error) if sends.is_ok() => return Err(error),
                Err(_) => {}
            }
        }
        comm.wait_all(sends?.iter().flatten(), deadline.remaining())?;
        round.then.map_or(Ok(()), |then| then())?;
    }
    Ok(())
}
