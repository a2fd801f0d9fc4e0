//! The calls of collectives: what ranks tell each other of them in the header of each message, and the memory of the headers.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use gdsync::memory::Memory;
use parking_lot::Mutex;

use super::reduce::{ELEMENTS, Reduction};
use crate::communicator::Communicator;
use crate::error::{Error, Result, is_aborted};
use crate::exchange::take;
use crate::registration::Registration;

/// Bytes of a header.
pub(super) const HEADER: usize = 24;
/// Bytes of the longest message with a header: what the shared-memory FIFO takes. Each receive of a header has room for it.
const LONGEST: usize = 4096;
/// Bytes of the longest part that is in one message with its header. The header of a longer one is a message of its own before it.
pub(super) const SHORT: usize = LONGEST - HEADER;

const FIX: &str = "let all ranks call the same collectives with the same arguments, in one order";

/// A collective, with the arguments that all ranks must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Barrier,
    Broadcast {
        root: u32,
    },
    Allgather,
    Alltoall,
    /// Of the element with this index in [`ELEMENTS`].
    Allreduce {
        element: u8,
        how: Reduction,
    },
    /// The rank takes no more part: an earlier call of it has failed.
    GaveUp,
}

impl Operation {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Barrier => "barrier",
            Self::Broadcast { .. } => "broadcast",
            Self::Allgather => "allgather",
            Self::Alltoall => "alltoall",
            Self::Allreduce { .. } => "allreduce",
            Self::GaveUp => "end of collectives",
        }
    }
}

/// The order is that of the wire.
const REDUCTIONS: [Reduction; 3] = [Reduction::Sum, Reduction::Min, Reduction::Max];

/// A call of a collective: equal in all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Call {
    pub(super) operation: Operation,
    pub(super) is_on_stream: bool,
    /// From 1.
    pub(super) number: u64,
    /// Bytes of the range.
    pub(super) bytes: u64,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let form = if self.is_on_stream { "_on_stream" } else { "" };
        write!(f, "{}{form}", self.operation.name())?;
        match self.operation {
            Operation::Broadcast { root } => write!(f, "(root {root})")?,
            Operation::Allreduce { element, how } => {
                let how = format!("{how:?}").to_lowercase();
                write!(f, "({}, {how})", ELEMENTS[usize::from(element)])?;
            }
            _ => {}
        }
        write!(f, " #{}", self.number)?;
        match self.operation {
            Operation::Barrier | Operation::GaveUp => Ok(()),
            _ => write!(f, " of {} bytes", self.bytes),
        }
    }
}

impl Call {
    pub(super) fn to_bytes(self) -> [u8; HEADER] {
        let (operation, detail, element, root) = match self.operation {
            Operation::Barrier => (1, 0, 0, 0),
            Operation::Broadcast { root } => (2, 0, 0, root),
            Operation::Allgather => (3, 0, 0, 0),
            Operation::Alltoall => (4, 0, 0, 0),
            Operation::Allreduce { element, how } => {
                let how = REDUCTIONS.iter().zip(0..).find(|(other, _)| **other == how);
                (5, how.map_or(0, |(_, index)| index), element, 0)
            }
            Operation::GaveUp => (6, 0, 0, 0),
        };
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&[operation, detail, element, u8::from(self.is_on_stream)]);
        bytes[4..8].copy_from_slice(&u32::to_le_bytes(root));
        bytes[8..16].copy_from_slice(&self.number.to_le_bytes());
        bytes[16..].copy_from_slice(&self.bytes.to_le_bytes());
        bytes
    }

    /// The call of a header; `None` for bytes that are none.
    fn from_bytes(bytes: &[u8; HEADER]) -> Option<Self> {
        let rest = &mut &bytes[..];
        let [operation, detail, element, form] = take(rest);
        let root = u32::from_le_bytes(take(rest));
        let [number, len] = [take(rest), take(rest)].map(u64::from_le_bytes);
        let operation = match operation {
            1 => Operation::Barrier,
            2 => Operation::Broadcast { root },
            3 => Operation::Allgather,
            4 => Operation::Alltoall,
            5 => {
                ELEMENTS.get(usize::from(element))?;
                Operation::Allreduce { element, how: *REDUCTIONS.get(usize::from(detail))? }
            }
            6 => Operation::GaveUp,
            _ => return None,
        };
        let call = Self { operation, is_on_stream: form == 1, number, bytes: len };
        // What does not belong to the operation is 0.
        (call.to_bytes() == *bytes).then_some(call)
    }

    /// Checks a message of a rank: its header, and that it has `due` bytes behind it. What ranks send is checked here only.
    ///
    /// # Errors
    /// [`Error::Collective`].
    pub(super) fn check(&self, rank: usize, header: &[u8; HEADER], bytes: usize, due: usize) -> Result<()> {
        let other = Self::from_bytes(header).filter(|_| bytes >= HEADER);
        let (what, fix) = match other {
            Some(other) if other == *self && bytes - HEADER == due => return Ok(()),
            Some(other) if other == *self => (wrong_length(bytes - HEADER, due), FIX_PROGRAM),
            Some(Self { operation: Operation::GaveUp, .. }) => return Err(self.gave_up(rank)),
            Some(other) => (format!("called {other}"), FIX),
            None => ("sent something that is no collective".to_owned(), FIX_PROGRAM),
        };
        Err(self.differs(rank, what, fix))
    }

    /// Checks the length of a part that came behind its header.
    ///
    /// # Errors
    /// [`Error::Collective`].
    pub(super) fn check_part(&self, rank: usize, bytes: usize, due: usize) -> Result<()> {
        if bytes == due {
            return Ok(());
        }
        Err(self.differs(rank, wrong_length(bytes, due), FIX_PROGRAM))
    }

    pub(super) fn differs(&self, rank: usize, what: String, fix: &'static str) -> Error {
        Error::Collective { call: self.to_string(), rank, what, fix }
    }

    fn gave_up(&self, rank: usize) -> Error {
        let what = "gave up its collectives after an error of its own".to_owned();
        self.differs(rank, what, "see the error of that rank")
    }

    /// The error of a message of this call, in terms of the collective.
    pub(super) fn explain(&self, error: Error, limit: Duration) -> Error {
        match error.of_waits(limit) {
            Error::Message { rank, cause: gdsync::Error::Deadline { what, after, .. }, .. } => {
                let awaited = format!(
                    "rank {rank} to get through {self}; see whether that rank has called it, or for whom it waits itself"
                );
                Error::message(rank, self.operation.name(), gdsync::Error::late(what, after, awaited))
            }
            // The abort notice did not reach this rank.
            Error::Message { rank, cause, .. } if is_aborted(&cause) => self.gave_up(rank),
            Error::Message { rank, cause, .. } => Error::message(rank, self.operation.name(), cause),
            other => other,
        }
    }
}

const FIX_PROGRAM: &str = "run the same program and version in all ranks";

fn wrong_length(bytes: usize, due: usize) -> String {
    format!("sent {bytes} bytes where {due} were due")
}

/// Memory for headers, shared by the calls that are under way.
#[derive(Debug)]
pub(super) struct Slots {
    free: Mutex<Vec<(Registration, usize)>>,
    /// For what comes behind a header and has no place: the header says why.
    pub(super) spill: Registration,
}

/// The memory of one header. Dropping it frees it: to be done when no message can arrive in it any more.
#[derive(Debug)]
pub(super) struct Slot {
    slots: Arc<Slots>,
    pub(super) buffer: Registration,
    offset: usize,
}

impl Slots {
    /// Bytes between two.
    const STEP: usize = 32;

    pub(super) fn new(comm: &Communicator) -> Result<Arc<Self>> {
        let spill = comm.register(&Memory::alloc(LONGEST)?)?;
        Ok(Arc::new(Self { free: Mutex::default(), spill }))
    }

    pub(super) fn take(self: &Arc<Self>, comm: &Communicator) -> Result<Slot> {
        let mut free = self.free.lock();
        if free.is_empty() {
            let page = comm.register(&Memory::alloc(LONGEST)?)?;
            free.extend((0..LONGEST / Self::STEP).map(|slot| (page.clone(), slot * Self::STEP)));
        }
        let (buffer, offset) = free.pop().expect("there is one now");
        Ok(Slot { slots: self.clone(), buffer, offset })
    }

    /// A slot with the header of a call.
    pub(super) fn with_header(self: &Arc<Self>, comm: &Communicator, call: &Call) -> Result<Slot> {
        let slot = self.take(comm)?;
        slot.buffer.memory().write(slot.offset, &call.to_bytes())?;
        Ok(slot)
    }
}

impl Slot {
    pub(super) fn range(&self) -> Range<usize> {
        self.offset..self.offset + HEADER
    }

    pub(super) fn header(&self) -> Result<[u8; HEADER]> {
        let mut header = [0; HEADER];
        self.buffer.memory().read(self.offset, &mut header)?;
        Ok(header)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.slots.free.lock().push((self.buffer.clone(), self.offset));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(operation: Operation) -> Call {
        Call { operation, is_on_stream: false, number: 3, bytes: 64 }
    }

    #[test]
    fn calls_are_named_with_their_arguments() {
        let sum = call(Operation::Allreduce { element: 0, how: Reduction::Sum });
        assert_eq!(sum.to_string(), "allreduce(f32, sum) #3 of 64 bytes");
        assert_eq!(call(Operation::Broadcast { root: 7 }).to_string(), "broadcast(root 7) #3 of 64 bytes");
        let barrier = Call { is_on_stream: true, ..call(Operation::Barrier) };
        assert_eq!(barrier.to_string(), "barrier_on_stream #3");
    }

    /// Any header is that of the call, or an error that names the rank and can be printed.
    #[test]
    fn any_header_is_the_same_call_or_an_error() {
        bolero::check!().with_type::<(u8, [u8; HEADER], u8, u8)>().for_each(|(base, change, bytes, due)| {
            let all = [
                Operation::Barrier,
                Operation::Broadcast { root: 1 },
                Operation::Allgather,
                Operation::Alltoall,
                Operation::Allreduce { element: 4, how: Reduction::Max },
                Operation::GaveUp,
            ];
            let ours = call(all[usize::from(*base) % all.len()]);
            // Small changes of a good header.
            let mut header = ours.to_bytes();
            header.iter_mut().zip(change).for_each(|(byte, change)| *byte ^= change & change >> 4);
            if let Some(read) = Call::from_bytes(&header) {
                assert_eq!(read.to_bytes(), header, "there is one header for each call");
            }
            let (bytes, due) = (usize::from(*bytes), usize::from(*due));
            match ours.check(5, &header, bytes, due) {
                Ok(()) => assert!(header == ours.to_bytes() && bytes == HEADER + due),
                Err(error) => {
                    let text = error.to_string();
                    assert!(text.contains("rank 5") && text.contains(&ours.to_string()), "{text}");
                    assert!(!text.chars().any(char::is_control), "{text}");
                }
            }
        });
    }
}
