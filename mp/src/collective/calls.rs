//! The calls of this rank, where the other ranks read them: ranks that wait for each other find that they have called differently.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gdsync::memory::Memory;
use gdsync::verbs::Completion;
use parking_lot::Mutex;

use super::call::{Call, HEADER, Operation, STEP};
use crate::communicator::Communicator;
use crate::credit::{self, CALLS_BYTES};
use crate::error::{Error, Result, is_aborted};
use crate::peer::Peer;
use crate::registration::Registration;
use crate::wait::Deadline;
use crate::watchdog::Watched;

/// Calls that are kept.
const KEPT: usize = CALLS_BYTES / STEP;

/// How long the watchdog waits for calls of other ranks. Those that come later it finds the next time.
const READ: Duration = Duration::from_millis(5);

/// How long a rank that ends its connections waits until the others have its note.
pub(super) const NOTE: Duration = Duration::from_secs(1);

/// The calls of this rank, and what it knows of those of the others.
///
/// A rank that waits for another one for long reads the calls there. Ranks with different roots of a broadcast might otherwise wait
/// for each other until their deadlines, as no header of one comes to the other.
pub(super) struct Calls {
    rank: usize,
    /// The last calls, by their number, from the middle of this memory on.
    own: Registration,
    peers: Arc<[Arc<Peer>]>,
    /// The same of each rank, as read last.
    theirs: Registration,
    /// The number of the last call of each rank, 0 before the first; [`UNREAD`] until it was read.
    seen: Vec<AtomicU64>,
    reading: Mutex<Reading>,
    /// A rank has called something else, or this one has ended its part.
    found: Mutex<Option<Error>>,
}

const UNREAD: u64 = u64::MAX;

#[derive(Default)]
struct Reading {
    /// By rank.
    under_way: Vec<Option<Completion>>,
    /// A rank that has called something else, and what. It may have been read while it was being written: it is believed when it is
    /// read again.
    suspect: Option<(usize, [u8; HEADER])>,
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Calls(rank {})", self.rank)
    }
}

/// The call with this number among those that are kept from `start` on.
fn kept(memory: &Memory, start: usize, number: u64) -> Result<Option<([u8; HEADER], Call)>> {
    let mut header = [0; HEADER];
    let slot = usize::try_from(number % KEPT as u64).expect("a small number");
    memory.read(start + slot * STEP, &mut header)?;
    Ok(Call::from_bytes(&header).filter(|call| call.number == number).map(|call| (header, call)))
}

impl Calls {
    pub(super) fn new(context: &Communicator) -> Result<Arc<Self>> {
        let (rank, size) = (context.rank(), context.size());
        let theirs = context.register(&Memory::alloc(size * CALLS_BYTES)?)?;
        let reading = Reading { under_way: vec![None; size], suspect: None };
        let calls = Arc::new(Self {
            rank,
            own: context.0.credits.clone(),
            peers: context.0.peers.clone(),
            theirs,
            seen: (0..size).map(|_| AtomicU64::new(UNREAD)).collect(),
            reading: Mutex::new(reading),
            found: Mutex::default(),
        });
        context.0.watched.lock().push(calls.clone());
        Ok(calls)
    }

    fn start(&self) -> usize {
        credit::calls_offset(self.peers.len())
    }

    /// Refuses later calls. Returns why.
    pub(super) fn refuse(&self) -> Error {
        self.found.lock().get_or_insert(Error::Closed { what: "the collectives" }).clone()
    }

    /// Refuses later calls, and ends those under way.
    pub(super) fn close(&self) {
        // No call has this number.
        let (operation, number) = (Operation::Barrier, 0);
        let none = Call { operation, is_on_stream: false, number, bytes: 0, has_given_up: true };
        self.end(&none, &self.refuse(), NOTE);
    }

    /// # Errors
    /// Why no call can be made.
    pub(super) fn check_open(&self) -> Result<()> {
        self.found.lock().clone().map_or(Ok(()), Err)
    }

    /// Shows a call to the other ranks.
    pub(super) fn publish(&self, call: &Call) -> Result<()> {
        let slot = usize::try_from(call.number % KEPT as u64).expect("a small number");
        Ok(self.own.memory().write(self.start() + slot * STEP, &call.to_bytes())?)
    }

    /// The call of this rank with this number, if it is kept.
    pub(super) fn own(&self, number: u64) -> Option<Call> {
        kept(self.own.memory(), self.start(), number).ok().flatten().map(|(_, call)| call)
    }

    /// The error of a message of a call, in terms of the collective.
    pub(super) fn explain(&self, call: &Call, error: Error, limit: Duration) -> Error {
        match error.of_waits(limit) {
            Error::Message { rank, cause, .. } if is_aborted(&cause) => {
                let found = self.found.lock().clone();
                let note = self.peers[rank].transport.credits.abort_note();
                let told = note.and_then(|note| self.check(call, rank, &note, HEADER, 0).err());
                // Without a note the abort notice did not reach this rank.
                found.or(told).unwrap_or_else(|| call.gave_up(rank))
            }
            Error::Message { rank, cause: gdsync::Error::Deadline { what, after, .. }, .. } => {
                let seen = self.seen[rank].load(Ordering::Relaxed);
                let awaited = call.awaited(rank, (seen != UNREAD).then_some(seen));
                Error::message(rank, call.operation.name(), gdsync::Error::late(what, after, awaited))
            }
            Error::Message { rank, cause, .. } => Error::message(rank, call.operation.name(), cause),
            other => other,
        }
    }

    /// Checks a message of a rank, as [`Call::check`].
    ///
    /// # Errors
    /// [`Error::Collective`].
    pub(super) fn check(
        &self,
        call: &Call,
        rank: usize,
        header: &[u8; HEADER],
        bytes: usize,
        due: usize,
    ) -> Result<()> {
        call.check(rank, header, bytes, due, |number| self.own(number))
    }

    /// Ends the connections because of a failed call, with a note to the other ranks. No rank is lost.
    pub(super) fn end(&self, call: &Call, error: &Error, limit: Duration) {
        let (note, limit) =
            (Call { has_given_up: true, ..*call }.to_bytes(), Deadline::after(NOTE.min(limit)));
        let told: Vec<_> =
            self.peers.iter().filter_map(|peer| peer.transport.credits.tell_abort(&note)).collect();
        told.iter().for_each(|told| _ = told.wait(limit.remaining()));
        let why = match error {
            Error::Collective { call, rank, what, fix } => Error::describe_collective(call, *rank, what, fix),
            Error::Closed { .. } => error.to_string(),
            _ => format!("{call} has failed at this rank; see its error"),
        };
        self.peers.iter().for_each(|peer| peer.transport.fail(&gdsync::Error::Aborted { why: why.clone() }));
    }

    /// The first call that a rank has made differently: of this rank, and the header there.
    fn differing(&self, rank: usize) -> Result<Option<(Call, [u8; HEADER])>> {
        let theirs = self.theirs.memory();
        let newest = (0..KEPT).try_fold(0, |newest, slot| {
            let mut header = [0; HEADER];
            theirs.read(rank * CALLS_BYTES + slot * STEP, &mut header)?;
            Ok::<_, Error>(Call::from_bytes(&header).map_or(newest, |call| call.number.max(newest)))
        })?;
        self.seen[rank].store(newest, Ordering::Relaxed);
        for number in newest.saturating_sub(KEPT as u64 - 1)..=newest {
            let theirs = kept(theirs, rank * CALLS_BYTES, number)?;
            if let (Some(own), Some((header, call))) = (self.own(number), theirs)
                && own != call
            {
                return Ok(Some((own, header)));
            }
        }
        Ok(None)
    }

    /// Starts to read the calls of the ranks that this one waits for, and takes what was read. Returns a call that has failed
    /// because of a rank.
    fn read(&self, reading: &mut Reading) -> Result<Option<(Call, Error)>> {
        let limit = Deadline::after(READ);
        let others = || self.peers.iter().filter(|peer| peer.rank() != self.rank);
        for peer in others() {
            let (rank, credits) = (peer.rank(), &peer.transport.credits);
            if let Some(note) = credits.abort_note()
                && let Some(own) = Call::from_bytes(&note).and_then(|call| self.own(call.number))
                && let Err(error) = self.check(&own, rank, &note, HEADER, 0)
            {
                return Ok(Some((own, error)));
            }
            if reading.under_way[rank].is_none() && peer.is_awaited() {
                let range = rank * CALLS_BYTES..(rank + 1) * CALLS_BYTES;
                let into = self.theirs.sge(peer.transport.intra_host, &range)?;
                reading.under_way[rank] = credits.read_calls(self.rank, self.peers.len(), into);
            }
        }
        let before = reading.suspect.take();
        for rank in others().map(|peer| peer.rank()) {
            let read = reading.under_way[rank].as_ref().map(|read| read.wait(limit.remaining()));
            match read {
                None | Some(Err(gdsync::Error::Deadline { .. })) => continue,
                Some(read) => {
                    reading.under_way[rank] = None;
                    if !read.is_ok_and(|wc| wc.ok().is_ok()) {
                        continue;
                    }
                }
            }
            if let Some((own, header)) = self.differing(rank)? {
                if before == Some((rank, header))
                    && let Err(error) = self.check(&own, rank, &header, HEADER, 0)
                {
                    return Ok(Some((own, error)));
                }
                reading.suspect.get_or_insert((rank, header));
            }
        }
        Ok(None)
    }
}

impl Watched for Calls {
    fn look(&self) {
        if self.found.lock().is_some() || self.peers.iter().any(|peer| peer.transport.has_ended()) {
            return;
        }
        // What cannot be read now is found by the deadline of the call.
        if let Ok(Some((call, error))) = self.read(&mut self.reading.lock()) {
            *self.found.lock() = Some(error.clone());
            self.end(&call, &error, NOTE);
        }
    }
}
