//! The messages of collectives: parts behind their headers, and those that a stream has started.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use gdsync_device::Condvar;
use parking_lot::Mutex;
use smallvec::{SmallVec, smallvec};

use super::call::{Call, HEADER, SHORT, Slot, Slots};
use super::calls::{Calls, NOTE};
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::overlap::ReceiveClaims;
use crate::registration::{Piece, Registration};
use crate::request::{Request, Status};
use crate::wait::Deadline;

/// What a rank sends to another one, or receives from it.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) rank: usize,
    pub(super) buffer: Registration,
    pub(super) range: Range<usize>,
}

impl Part {
    /// Whether it is a message of its own behind its header.
    pub(super) fn is_long(&self) -> bool {
        self.range.len() > SHORT
    }

    /// The messages that bring it.
    pub(super) fn arrivals(self) -> impl Iterator<Item = Arrival> {
        let rest = self.is_long().then(|| Arrival { part: self.clone(), has_header: false });
        std::iter::once(Arrival { part: self, has_header: true }).chain(rest)
    }

    /// Sends it behind its header with `send`, which takes the pieces of a message.
    pub(super) fn send(
        &self,
        header: &Slot,
        mut send: impl FnMut(&[Piece<'_>]) -> Result<Request>,
    ) -> Result<SmallVec<[Request; 2]>> {
        let (header, part) = ((&header.buffer, header.range()), (&self.buffer, self.range.clone()));
        if self.is_long() {
            Ok(smallvec![send(&[header])?, send(&[part])?])
        } else {
            Ok(smallvec![send(&[header, part])?])
        }
    }
}

/// A message that is to be received: the header of a part, with the part if that is short, or a long part.
#[derive(Clone, Debug)]
pub(super) struct Arrival {
    part: Part,
    has_header: bool,
}

impl Arrival {
    pub(super) fn receive(&self, comm: &Communicator, slots: &Arc<Slots>) -> Result<Due> {
        let Part { rank, buffer, range } = &self.part;
        let header = self.has_header.then(|| slots.take(comm)).transpose()?;
        let bytes = if self.has_header && self.part.is_long() { 0 } else { range.len() };
        let part = (buffer, range.start..range.start + bytes);
        let pieces: SmallVec<[Piece<'_>; 3]> = match &header {
            Some(slot) => smallvec![(&slot.buffer, slot.range()), part, (&slots.spill, bytes..SHORT)],
            None => smallvec![part],
        };
        let peer = comm.peer(*rank)?;
        // Unchecked: on a stream the next call of a collective may be enqueued while this one is under way, and its messages come
        // later.
        let request = Request::received(peer, peer.receive(&pieces, || Ok(ReceiveClaims::new()))?);
        drop(pieces);
        Ok(Due { request, header, part: (buffer.clone(), range.start..range.start + bytes) })
    }
}

/// A receive under way.
#[derive(Debug)]
pub(super) struct Due {
    pub(super) request: Request,
    header: Option<Slot>,
    part: (Registration, Range<usize>),
}

impl Due {
    /// Checks what came.
    pub(super) fn check(&self, call: &Call, calls: &Calls, Status { rank, bytes, .. }: Status) -> Result<()> {
        let (buffer, due) = &self.part;
        match &self.header {
            Some(slot) => calls.check(call, rank, &slot.header()?, bytes, due.len()),
            // Perhaps an abort notice in its place: a long part is longer than that.
            None if bytes == HEADER => {
                let mut header = [0; HEADER];
                buffer.memory().read(due.start, &mut header)?;
                calls.check(call, rank, &header, bytes, due.len())
            }
            None => call.check_part(rank, bytes, due.len()),
        }
    }
}

/// A collective that was queued on a stream, and its messages.
pub(super) struct Started {
    pub(super) call: Call,
    /// [`Stream::id`](gdsync::stream::Stream::id)
    pub(super) stream: u64,
    pub(super) receives: Vec<Due>,
    pub(super) sends: Vec<Request>,
    /// Of what it sends.
    pub(super) header: Slot,
    pub(super) last: Last,
}

/// The last step of a collective, by a host function of the stream.
#[derive(Default)]
pub(super) struct Last {
    pub(super) outcome: Mutex<Option<Result<()>>>,
    pub(super) done: Condvar,
}

impl Started {
    fn calls(&self) -> &Calls {
        self.header.calls()
    }

    fn test(&self, request: &Request) -> Result<Option<Status>> {
        request.test().map_err(|error| self.calls().explain(&self.call, error, Duration::ZERO))
    }

    /// Whether it is complete: `None` if not yet.
    pub(super) fn outcome(&self) -> Result<Option<()>> {
        for due in &self.receives {
            let Some(status) = self.test(&due.request)? else { return Ok(None) };
            due.check(&self.call, self.calls(), status)?;
        }
        for send in &self.sends {
            if self.test(send)?.is_none() {
                return Ok(None);
            }
        }
        self.last.outcome.lock().clone().transpose()
    }

    /// Blocks until it is complete.
    ///
    /// # Errors
    /// [`Error::Message`], [`Error::Collective`]; [`Error::Deadline`] where all messages came.
    pub(super) fn wait(&self, deadline: &Deadline) -> Result<()> {
        let wait = |request: &Request| {
            let explain = |error| self.calls().explain(&self.call, error, deadline.limit());
            request.wait(deadline.remaining()).map_err(explain)
        };
        let check = |due: &Due| due.check(&self.call, self.calls(), wait(&due.request)?);
        self.receives.iter().try_for_each(check)?;
        self.sends.iter().try_for_each(|send| wait(send).map(drop))?;
        let mut outcome = self.last.outcome.lock();
        while outcome.is_none() && !deadline.is_over() {
            self.last.done.wait_for(&mut outcome, deadline.remaining());
        }
        let late = || {
            let what = format!("{}: all its messages are here, but its stream is not through", self.call);
            deadline.error(what, "see what holds the stream (`gdasync trace`)")
        };
        outcome.clone().unwrap_or_else(|| Err(late()))
    }

    /// Checks all messages, by the host function: a stream goes on after failures. Another call of a rank ends the connections, so
    /// that `Stream::synchronize` fails, too.
    pub(super) fn arrived(&self) -> Result<()> {
        let checked = self.check();
        if let Err(error @ Error::Collective { .. }) = &checked {
            self.calls().end(&self.call, error, NOTE);
        }
        checked
    }

    fn check(&self) -> Result<()> {
        let missing = |request: &Request| {
            let fix = "see Stream::synchronize for what ended its waits";
            let what = "had not done its part when the stream went on".to_owned();
            self.call.differs(request.rank(), what, fix)
        };
        for due in &self.receives {
            let status = self.test(&due.request)?.ok_or_else(|| missing(&due.request))?;
            due.check(&self.call, self.calls(), status)?;
        }
        self.sends.iter().try_for_each(|send| self.test(send)?.map(drop).ok_or_else(|| missing(send)))
    }
}

impl Last {
    pub(super) fn finish(&self, outcome: Result<()>) {
        *self.outcome.lock() = Some(outcome);
        self.done.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use gdsync::memory::Memory;

    use super::*;
    use crate::collective::call::Operation;

    const LONG: Duration = Duration::from_secs(60);

    /// The header was sent, and then the part could not be.
    #[test]
    fn abort_notices_are_read_in_place_of_a_part() -> Result<()> {
        let comm = Communicator::builder().spawn(1).init()?;
        let (slots, buffer) = (Slots::new(&comm)?, comm.register(&Memory::alloc(2 * SHORT)?)?);
        let part = Part { rank: 0, buffer, range: 0..SHORT + 1 };
        let due = Arrival { part, has_header: false }.receive(&comm, &slots)?;
        let operation = Operation::Allgather;
        let call = Call { operation, is_on_stream: false, number: 3, bytes: 64, has_given_up: false };
        let notice = slots.with_header(&comm, &Call { has_given_up: true, ..call })?;
        let sent = comm.isend(&notice.buffer, notice.range(), 0)?;
        let text = due.check(&call, &slots.calls, comm.wait(&due.request, LONG)?).unwrap_err().to_string();
        assert!(text.contains("rank 0 gave up its collectives"), "{text}");
        comm.wait(&sent, LONG)?;
        drop((due, notice, slots));
        comm.finalize(LONG)
    }
}
