//! Collectives that a stream starts and waits for.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use gdsync::stream::{Batch, Stream};
use gdsync_device::Condvar;
use parking_lot::Mutex;

use super::blocking::{Collectives, Due, Part, Step, check_values, combine};
use super::reduce::{Number, Reduction};
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::in_flight::Direction;
use crate::registration::Registration;
use crate::request::Request;
use crate::transport::refuse_in_capture;
use crate::wait::Deadline;

/// A collective that was queued on a stream. Dropping it changes nothing: the collective goes on.
///
/// [`Stream::synchronize`] reports failures; this also names the rank.
#[derive(Clone)]
#[must_use = "a collective nobody asks for may fail unnoticed"]
pub struct Pending {
    operation: &'static str,
    receives: Vec<Due>,
    sends: Vec<Request>,
    last: Arc<Last>,
}

/// The last step of a collective, by a host function of the stream.
#[derive(Default)]
struct Last {
    outcome: Mutex<Option<Result<()>>>,
    done: Condvar,
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pending({})", self.operation)
    }
}

impl Pending {
    /// Blocks until this rank has sent and received its messages, and has combined the values.
    ///
    /// # Errors
    /// [`Error::Message`] names the rank whose message failed or is late; [`Error::Collective`] for one that is in
    /// another collective; [`Error::Deadline`] when all messages came but the stream is late.
    pub fn wait(&self, timeout: Duration) -> Result<()> {
        let deadline = Deadline::after(timeout);
        for receive in &self.receives {
            receive.check(self.operation, receive.request.wait(deadline.remaining())?)?;
        }
        for send in &self.sends {
            send.wait(deadline.remaining())?;
        }
        let mut outcome = self.last.outcome.lock();
        while outcome.is_none() && !deadline.is_over() {
            self.last.done.wait_for(&mut outcome, deadline.remaining());
        }
        let late = || {
            let what =
                format!("{}: all its messages are here, but its stream is not through", self.operation);
            deadline.error(what, "see what holds the stream (`gdasync trace`)")
        };
        outcome.clone().unwrap_or_else(|| Err(late()))
    }
}

impl Last {
    fn finish(&self, outcome: Result<()>) {
        *self.outcome.lock() = Some(outcome);
        self.done.notify_all();
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
    /// # Errors
    /// [`Error::Message`] names a rank: its connection is broken, its queue stayed [full](Communicator#full-queues), or another stream
    /// uses it. [`Error::Device`]: the stream failed, or stayed full. Nothing is queued where something is full, unless another thread
    /// has taken the room meanwhile. The error of an earlier call.
    pub fn barrier_on_stream(&self, stream: &Stream) -> Result<Pending> {
        let all = || self.others().map(|rank| part(rank, &self.token, 0..0)).collect();
        self.enqueue("barrier", stream, Direct { sends: all(), receives: all(), ..Direct::default() })
    }

    /// Queues a [`Collectives::broadcast`].
    ///
    /// # Errors
    /// [`Error::Message`] and [`Error::Device`], as [`Collectives::barrier_on_stream`]; [`Error::NoSuchRank`].
    pub fn broadcast_on_stream(
        &self,
        stream: &Stream,
        buffer: &Registration,
        range: Range<usize>,
        root: usize,
    ) -> Result<Pending> {
        self.comm.peer(root)?;
        buffer.check_range(&range)?;
        let to = |rank| part(rank, buffer, range.clone());
        let (sends, receives) = match self.comm.rank() == root {
            true => (self.others().map(to).collect(), vec![]),
            false => (vec![], vec![to(root)]),
        };
        self.enqueue("broadcast", stream, Direct { sends, receives, handshake: true, then: None })
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
        let parts = self.parts(buffer, &range)?;
        let block = |rank| parts.bytes(&(rank..rank + 1));
        let sends = self.others().map(|rank| part(rank, buffer, block(self.comm.rank()))).collect();
        let receives = self.others().map(|rank| part(rank, buffer, block(rank))).collect();
        self.enqueue("allgather", stream, Direct { sends, receives, handshake: true, then: None })
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
        let all = || self.others().chain([self.comm.rank()]);
        let sends = all().map(|rank| part(rank, from.0, send.bytes(&(rank..rank + 1)))).collect();
        let receives = all().map(|rank| part(rank, to.0, recv.bytes(&(rank..rank + 1)))).collect();
        self.enqueue("alltoall", stream, Direct { sends, receives, handshake: true, then: None })
    }

    /// Queues a [`Collectives::allreduce`]: a host function of the stream combines the values, in rank order. Each rank
    /// sends its values to all others. A stream of a GPU takes 24 host functions: with more of these ahead of it the call waits
    /// for room.
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
        let (me, size, len) = (self.comm.rank(), self.comm.size(), range.len());
        let scratch = self.scratch.take(&self.comm, len * size)?;
        let values_of = move |rank| rank * len..(rank + 1) * len;
        let sends = self.others().map(|rank| part(rank, buffer, range.clone())).collect();
        let receives = self.others().map(|rank| part(rank, &scratch, values_of(rank))).collect();
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
        // After a later failure messages may still arrive in it.
        self.admit("allreduce", stream, &direct).inspect_err(|_| self.scratch.give_back(unused))?;
        self.submit("allreduce", stream, direct)
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        // From the next rank on, so that not all start with the same one.
        let (me, size) = (self.comm.rank(), self.comm.size());
        (1..size).map(move |step| (me + step) % size)
    }

    fn enqueue(&self, operation: &'static str, stream: &Stream, direct: Direct) -> Result<Pending> {
        self.admit(operation, stream, &direct)?;
        self.submit(operation, stream, direct)
    }

    /// Refuses before anything is sent: the ranks stay in step.
    fn admit(&self, operation: &'static str, stream: &Stream, direct: &Direct) -> Result<()> {
        self.unless_failed(|| Ok(()))?;
        refuse_in_capture(stream)?;
        self.comm.while_full(|| {
            stream.wait_room(direct.ops(), usize::from(direct.then.is_some()), Duration::ZERO)?;
            // A ready message and a message each way.
            for part in direct.sends.iter().chain(&direct.receives) {
                let peer = self.comm.peer(part.rank)?;
                [Direction::Send, Direction::Recv]
                    .into_iter()
                    .try_for_each(|direction| peer.check_room(direction, 2, operation))?;
            }
            Ok(())
        })
    }

    fn submit(&self, operation: &'static str, stream: &Stream, direct: Direct) -> Result<Pending> {
        self.unless_failed(|| direct.submit(&self.comm, &self.token, operation, stream))
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
        let messages = (self.sends.len() + self.receives.len()) * if self.handshake { 2 } else { 1 };
        messages * EACH + 1
    }

    fn submit(
        self,
        comm: &Communicator,
        token: &Registration,
        operation: &'static str,
        stream: &Stream,
    ) -> Result<Pending> {
        let mut batch = Batch::new();
        let (mut receives, mut sends, mut ready) = (Vec::new(), Vec::new(), BTreeMap::new());
        if self.handshake {
            // The own rank needs none.
            let other = |part: &&Part| part.rank != comm.rank();
            for part in self.sends.iter().filter(other) {
                ready.insert(part.rank, Due::receive(comm, &self::part(part.rank, token, 0..0))?);
            }
            for part in self.receives.iter().filter(other) {
                sends.push(comm.isend_in_batch(&mut batch, token, 0..0, part.rank)?);
            }
        }
        let data = self.receives.iter().map(|part| Due::receive(comm, part)).collect::<Result<Vec<_>>>()?;
        for part in &self.sends {
            if let Some(ready) = ready.remove(&part.rank) {
                comm.wait_in_batch(&mut batch, &ready.request)?;
                receives.push(ready);
            }
            sends.push(comm.isend_in_batch(&mut batch, &part.buffer, part.range.clone(), part.rank)?);
        }
        receives.extend(data);
        let waits = receives.iter().map(|due| &due.request).chain(&sends);
        waits.into_iter().try_for_each(|request| comm.wait_in_batch(&mut batch, request))?;
        let last = Arc::new(Last::default());
        match self.then {
            None => last.finish(Ok(())),
            Some(then) => {
                let (receives, sends, last) = (receives.clone(), sends.clone(), last.clone());
                batch.host_fn(move || {
                    last.finish(arrived(operation, &receives, &sends).and_then(|()| then()))
                });
            }
        }
        // Another thread may have taken the room.
        comm.while_full(|| Ok(stream.submit(&mut batch)?))?;
        Ok(Pending { operation, receives, sends, last })
    }
}

/// Checks all messages, by the host function: a stream goes on after failures.
fn arrived(operation: &'static str, receives: &[Due], sends: &[Request]) -> Result<()> {
    let missing = |request: &Request| {
        let what = "the stream went on though the message is not complete".to_owned();
        Error::Collective { operation, rank: request.rank(), what }
    };
    for receive in receives {
        receive.check(operation, receive.request.test()?.ok_or_else(|| missing(&receive.request))?)?;
    }
    sends.iter().try_for_each(|send| send.test()?.map(drop).ok_or_else(|| missing(send)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use gdsync::memory::Memory;
    use gdsync::stream::HostStreamConfig;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn refused_collectives_return_their_scratch() -> Result<()> {
        let comm = Communicator::builder().spawn(1).init()?;
        let (all, buffer) = (Collectives::new(&comm)?, comm.register(&Memory::alloc(64)?)?);
        let stream = Stream::host(HostStreamConfig::default())?;
        let start = || all.allreduce_on_stream::<u64>(&stream, &buffer, 0..64, Reduction::Sum);
        let free = || all.scratch.0.lock().iter().map(|one| one.memory().addr()).collect::<Vec<_>>();
        start()?.wait(LONG)?;
        let first = free();
        assert_eq!(first.len(), 1);
        let capture = stream.begin_capture()?;
        for _ in 0..2 {
            assert!(matches!(start(), Err(Error::Device(gdsync::Error::Unsupported { .. }))));
            assert_eq!(free(), first, "neither given back to the device nor another one");
        }
        drop(capture);
        start()?.wait(LONG)?;
        assert_eq!(free(), first);
        drop(all);
        comm.finalize(LONG)
    }
}
