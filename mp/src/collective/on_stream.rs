//! Collectives that a stream starts and waits for. The last step of each is a host function, which checks what the ranks have called: the
//! stream compares no headers.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use gdsync::stream::{Batch, Stream};

use super::blocking::{Collectives, Core, State, Step, allreduce, broadcast, check_values, combine, invalid};
use super::call::{Call, Operation};
use super::message::{Last, Part, Started};
use super::reduce::{Number, Reduction};
#[cfg(doc)]
use crate::Communicator;
use crate::error::{Error, Result};
use crate::in_flight::Direction;
use crate::registration::{Piece, Registration};
use crate::transport::at_once;
use crate::wait::Deadline;

/// A collective that was queued on a stream. Dropping it changes nothing: the collective goes on.
///
/// [`Stream::synchronize`] reports failures of messages, and a rank that called something else: by then the work behind the collective
/// may have run, with old data. This also names the collective, and so does the next call of the [`Collectives`].
#[derive(Clone)]
#[must_use = "a collective nobody asks for may fail unnoticed"]
pub struct Pending(Arc<Started>, Arc<Core>);

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pending({})", self.0.call)
    }
}

impl Pending {
    /// Blocks until this rank has sent and received its messages, and has combined the values; `None` for the timeout of the
    /// communicator.
    ///
    /// # Errors
    /// [`Error::Message`] names the rank whose message failed or is late; [`Error::Collective`] one that has called another
    /// collective, or with other arguments, or has given up; [`Error::Deadline`] when all messages came but the stream is late.
    pub fn wait(&self, timeout: impl Into<Option<Duration>>) -> Result<()> {
        self.1.wait(&self.0, &Deadline::after(self.1.context.limit(timeout)))
    }
}

/// Messages that the stream sends all at once.
#[derive(Default)]
struct Direct {
    sends: Vec<Part>,
    receives: Vec<Part>,
    /// Senders wait for the stream of the receiver, as the buffers are the application's.
    handshake: bool,
    then: Option<Step>,
}

impl Collectives {
    /// Holds a stream until the streams of all ranks have arrived.
    ///
    /// The last step of each collective on a stream is a host function. A stream of a GPU takes 24 of them: with more ahead of it the
    /// call waits for room.
    ///
    /// # Errors
    /// [`Error::Message`] names a rank: its connection is broken, its queue stayed [full](Communicator#full-queues), or another stream
    /// uses it. [`Error::Device`]: the stream failed, or stayed full, or an earlier collective is not through on another stream.
    /// Nothing is queued then, unless another thread has taken the room meanwhile. [`Error::Deadline`]: another thread is in a
    /// call. The error of an earlier call.
    pub fn barrier_on_stream(&self, stream: &Stream) -> Result<Pending> {
        let all = || self.core.others().map(|rank| part(rank, &self.slots.spill, 0..0)).collect();
        let direct = Direct { sends: all(), receives: all(), ..Direct::default() };
        self.enqueue(Operation::Barrier, 0, stream, direct, None)
    }

    /// Queues a [`Collectives::broadcast`].
    ///
    /// # Errors
    /// [`Error::Message`] and [`Error::Device`], as [`Collectives::barrier_on_stream`] and [`Collectives::broadcast`].
    pub fn broadcast_on_stream(
        &self,
        stream: &Stream,
        buffer: &Registration,
        range: Range<usize>,
        root: usize,
    ) -> Result<Pending> {
        self.check_root(root)?;
        buffer.check_range(&range)?;
        let to = |rank| part(rank, buffer, range.clone());
        let (sends, receives) = match self.core.context.rank() == root {
            true => (self.core.others().map(to).collect(), vec![]),
            false => (vec![], vec![to(root)]),
        };
        let direct = Direct { sends, receives, handshake: true, then: None };
        self.enqueue(broadcast(root), range.len(), stream, direct, None)
    }

    /// Queues a [`Collectives::allgather`].
    ///
    /// # Errors
    /// [`Error::Message`] and [`Error::Device`], as [`Collectives::barrier_on_stream`] and [`Collectives::allgather`].
    pub fn allgather_on_stream(
        &self,
        stream: &Stream,
        buffer: &Registration,
        range: Range<usize>,
    ) -> Result<Pending> {
        let parts = self.parts("the range of the allgather", buffer, &range)?;
        let block = |rank| parts.bytes(&(rank..rank + 1));
        let sends =
            self.core.others().map(|rank| part(rank, buffer, block(self.core.context.rank()))).collect();
        let receives = self.core.others().map(|rank| part(rank, buffer, block(rank))).collect();
        let direct = Direct { sends, receives, handshake: true, then: None };
        self.enqueue(Operation::Allgather, range.len(), stream, direct, None)
    }

    /// Queues a [`Collectives::alltoall`].
    ///
    /// # Errors
    /// [`Error::Message`] and [`Error::Device`], as [`Collectives::barrier_on_stream`] and [`Collectives::alltoall`].
    pub fn alltoall_on_stream(
        &self,
        stream: &Stream,
        from: (&Registration, Range<usize>),
        to: (&Registration, Range<usize>),
    ) -> Result<Pending> {
        let (send, recv) = self.two_parts(&from, &to)?;
        let all = || self.core.others().chain([self.core.context.rank()]);
        let sends = all().map(|rank| part(rank, from.0, send.bytes(&(rank..rank + 1)))).collect();
        let receives = all().map(|rank| part(rank, to.0, recv.bytes(&(rank..rank + 1)))).collect();
        let direct = Direct { sends, receives, handshake: true, then: None };
        self.enqueue(Operation::Alltoall, from.1.len(), stream, direct, None)
    }

    /// Queues a [`Collectives::allreduce`]: a host function of the stream combines the values, in rank order. Each rank
    /// sends its values to all others.
    ///
    /// # Errors
    /// [`Error::Message`] and [`Error::Device`], as [`Collectives::barrier_on_stream`] and [`Collectives::allreduce`].
    pub fn allreduce_on_stream<T: Number>(
        &self,
        stream: &Stream,
        buffer: &Registration,
        range: Range<usize>,
        how: Reduction,
    ) -> Result<Pending> {
        check_values::<T>(buffer, &range)?;
        let (me, size, len) = (self.core.context.rank(), self.core.context.size(), range.len());
        let scratch = self.scratch.take(&self.core.context, len * size)?;
        let values_of = move |rank| rank * len..(rank + 1) * len;
        let sends = self.core.others().map(|rank| part(rank, buffer, range.clone())).collect();
        let receives = self.core.others().map(|rank| part(rank, &scratch, values_of(rank))).collect();
        let (buffer, pool, unused) = (buffer.clone(), self.scratch.clone(), scratch.clone());
        let then = move || {
            // In rank order, with the own values in their place, so that all ranks round alike.
            let mut values = vec![0; len];
            buffer.memory().read(range.start, &mut values)?;
            scratch.memory().write(values_of(me).start, &values)?;
            scratch.memory().read(0, &mut values)?;
            buffer.memory().write(range.start, &values)?;
            combine::<T>(&buffer, range, &scratch, (1..size).map(|rank| values_of(rank).start), how)?;
            pool.give_back(scratch);
            Ok(())
        };
        let direct = Direct { sends, receives, handshake: false, then: Some(Box::new(then)) };
        self.enqueue(allreduce::<T>(how), len, stream, direct, Some(unused))
    }

    /// Gives `scratch` back if nothing is sent; after a later failure messages may still arrive in it.
    fn enqueue(
        &self,
        operation: Operation,
        bytes: usize,
        stream: &Stream,
        direct: Direct,
        scratch: Option<Registration>,
    ) -> Result<Pending> {
        let (core, deadline) = (&self.core, Deadline::after(self.core.context.timeout()));
        let admit = |state: &mut State| match self.admit(state, stream, &direct, &deadline) {
            Ok(()) => Ok(direct),
            Err(error) => {
                scratch.into_iter().for_each(|unused| self.scratch.give_back(unused));
                Err(error)
            }
        };
        core.call(operation, true, bytes, &deadline, admit, |direct, call, state| {
            let started = direct.submit(self, &deadline, call, stream)?;
            state.started.push_back(started.clone());
            Ok(Pending(started, core.clone()))
        })
    }

    /// Refuses before anything is sent: the ranks stay in step.
    fn admit(&self, state: &State, stream: &Stream, direct: &Direct, deadline: &Deadline) -> Result<()> {
        if let Some(other) = state.started.iter().find(|started| started.stream != stream.id()) {
            let value = format!("another one than that of {}, which is not through", other.call);
            return Err(invalid(
                "the stream",
                value,
                "the same one, or wait for the earlier collective first",
            ));
        }
        stream.refuse_in_capture("a collective", "call it before or after the launch of the graph")?;
        let context = self.core.context.with_timeout(deadline.remaining());
        context.while_full(|| {
            at_once(stream).wait_room(direct.ops(), 1)?;
            // A ready message and the part each way.
            for part in direct.sends.iter().chain(&direct.receives) {
                let (peer, count) = (context.peer(part.rank)?, 2 + usize::from(part.is_long()));
                [Direction::Send, Direction::Recv]
                    .into_iter()
                    .try_for_each(|direction| peer.check_room(direction, count, "collective on stream"))?;
            }
            Ok(())
        })
    }
}

fn part(rank: usize, buffer: &Registration, range: Range<usize>) -> Part {
    Part { rank, buffer: buffer.clone(), range }
}

impl Direct {
    /// A bound for the operations of the stream.
    fn ops(&self) -> usize {
        // A wait for credit, a send, and a wait for each message and ready message; one more for the host function.
        const EACH: usize = 3;
        let messages = |part: &Part| 1 + usize::from(part.is_long()) + usize::from(self.handshake);
        self.sends.iter().chain(&self.receives).map(messages).sum::<usize>() * EACH + 1
    }

    fn submit(
        self,
        all: &Collectives,
        deadline: &Deadline,
        call: Call,
        stream: &Stream,
    ) -> Result<Arc<Started>> {
        let (comm, slots) = (&all.core.context.with_timeout(deadline.remaining()), &all.slots);
        let (mut batch, stream) = (Batch::new(), at_once(stream));
        let header = slots.with_header(comm, &call)?;
        let (mut receives, mut sends, mut ready) = (Vec::new(), Vec::new(), BTreeMap::new());
        let receive = |part: Part| part.arrivals().map(|arrival| arrival.receive(comm, slots));
        if self.handshake {
            // The own rank needs none.
            let other = |part: &&Part| part.rank != comm.rank();
            for to in self.sends.iter().filter(other) {
                let due = receive(part(to.rank, &slots.spill, 0..0)).collect::<Result<Vec<_>>>()?;
                ready.insert(to.rank, due);
            }
            for from in self.receives.iter().filter(other) {
                sends.push(comm.isend_in_batch(&mut batch, &header.buffer, header.range(), from.rank)?);
            }
        }
        let data = self.receives.into_iter().flat_map(receive).collect::<Result<Vec<_>>>()?;
        for part in &self.sends {
            for due in ready.remove(&part.rank).into_iter().flatten() {
                comm.wait_in_batch(&mut batch, &due.request)?;
                receives.push(due);
            }
            let send = |pieces: &[Piece<'_>]| comm.isend_vectored_in_batch(&mut batch, pieces, part.rank);
            sends.extend(part.send(&header, send)?);
        }
        receives.extend(data);
        let waits = receives.iter().map(|due| &due.request).chain(&sends);
        waits.into_iter().try_for_each(|request| comm.wait_in_batch(&mut batch, request))?;
        let (stream_id, last) = (stream.id(), Last::default());
        let started = Arc::new(Started { call, stream: stream_id, receives, sends, header, last });
        let (checked, then) = (started.clone(), self.then);
        batch.host_fn(move || {
            let arrived = checked.arrived();
            checked.last.finish(arrived.and_then(|()| then.map_or(Ok(()), |then| then())));
        });
        // Another thread may have taken the room, and another stream may not be past its last wait though the messages are complete.
        let passes =
            |error: &Error| error.is_full() || matches!(error, Error::Device(gdsync::Error::Busy { .. }));
        comm.retry_while(passes, || Ok(stream.submit(&mut batch)?))?;
        Ok(started)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::communicator::Communicator;
    use gdsync::memory::Memory;
    use gdsync::stream::HostStreamConfig;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn refused_collectives_return_their_scratch() -> Result<()> {
        let comm = Communicator::builder().spawn(1).init()?;
        let (all, buffer) = (Collectives::new(&comm, LONG)?, comm.register(&Memory::alloc(64)?)?);
        let stream = Stream::host(HostStreamConfig::default())?;
        let start = || all.allreduce_on_stream::<u64>(&stream, &buffer, 0..64, Reduction::Sum);
        let free = || all.scratch.0.lock().iter().map(|one| one.memory().addr()).collect::<Vec<_>>();
        start()?.wait(LONG)?;
        let first = free();
        assert_eq!(first.len(), 1);
        let capture = stream.begin_capture()?;
        for _ in 0..2 {
            let error = start().unwrap_err();
            assert!(error.to_string().contains("a collective is not supported"), "{error}");
            assert_eq!(free(), first, "neither given back to the device nor another one");
        }
        drop(capture);
        start()?.wait(LONG)?;
        assert_eq!(free(), first);
        drop(all);
        comm.finalize(LONG)
    }
}
