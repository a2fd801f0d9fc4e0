//! The messages of collectives: parts behind their headers, and those that a stream has started.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use gdsync_device::Condvar;
use parking_lot::Mutex;
use smallvec::{SmallVec, smallvec};

use super::call::{Call, SHORT, Slot, Slots};
use crate::communicator::Communicator;
use crate::error::Result;
use crate::overlap::ReceiveClaims;
use crate::registration::{Piece, Registration};
use crate::request::{Request, Status};

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
        // Unchecked: on a stream the next call of a collective may be enqueued while this one is under way, and its messages come later.
        let request = Request::received(peer, peer.receive(&pieces, || Ok(ReceiveClaims::new()))?);
        drop(pieces);
        Ok(Due { request, header, bytes })
    }
}

/// A receive under way.
#[derive(Debug)]
pub(super) struct Due {
    pub(super) request: Request,
    header: Option<Slot>,
    /// Bytes of the part that it expects.
    bytes: usize,
}

impl Due {
    /// Checks what came.
    pub(super) fn check(&self, call: &Call, status: Status) -> Result<()> {
        match &self.header {
            Some(slot) => call.check(status.rank, &slot.header()?, status.bytes, self.bytes),
            None => call.check_part(status.rank, status.bytes, self.bytes),
        }
    }
}

/// A collective that was queued on a stream, and its messages.
pub(super) struct Started {
    pub(super) call: Call,
    pub(super) receives: Vec<Due>,
    pub(super) sends: Vec<Request>,
    /// Of what it sends.
    pub(super) _header: Slot,
    pub(super) last: Last,
}

/// The last step of a collective, by a host function of the stream.
#[derive(Default)]
pub(super) struct Last {
    pub(super) outcome: Mutex<Option<Result<()>>>,
    pub(super) done: Condvar,
}

impl Started {
    /// Whether it is complete: `None` if not yet.
    pub(super) fn outcome(&self) -> Result<Option<()>> {
        let test =
            |request: &Request| request.test().map_err(|error| self.call.explain(error, Duration::ZERO));
        for due in &self.receives {
            let Some(status) = test(&due.request)? else { return Ok(None) };
            due.check(&self.call, status)?;
        }
        for send in &self.sends {
            if test(send)?.is_none() {
                return Ok(None);
            }
        }
        self.last.outcome.lock().clone().transpose()
    }

    /// Checks all messages, by the host function: a stream goes on after failures.
    pub(super) fn arrived(&self) -> Result<()> {
        let missing = |request: &Request| {
            let fix = "see Stream::synchronize for what ended its waits";
            let what = "had not done its part when the stream went on".to_owned();
            self.call.differs(request.rank(), what, fix)
        };
        for due in &self.receives {
            due.check(&self.call, due.request.test()?.ok_or_else(|| missing(&due.request))?)?;
        }
        self.sends.iter().try_for_each(|send| send.test()?.map(drop).ok_or_else(|| missing(send)))
    }
}

impl Last {
    pub(super) fn finish(&self, outcome: Result<()>) {
        *self.outcome.lock() = Some(outcome);
        self.done.notify_all();
    }
}
