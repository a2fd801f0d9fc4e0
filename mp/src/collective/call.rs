//! The calls of collectives: what ranks tell each other of them in the header of each message, and the memory of the headers.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use gdsync::memory::Memory;
use parking_lot::Mutex;

use super::calls::Calls;
use super::reduce::{ELEMENTS, Reduction};
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::exchange::take;
use crate::registration::Registration;

/// Bytes of a header.
pub(super) const HEADER: usize = crate::credit::NOTE_BYTES;
/// Bytes between two headers in memory.
pub(super) const STEP: usize = 32;
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
}

impl Operation {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Barrier => "barrier",
            Self::Broadcast { .. } => "broadcast",
            Self::Allgather => "allgather",
            Self::Alltoall => "alltoall",
            Self::Allreduce { .. } => "allreduce",
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
    /// The rank takes no more part after this call, which has failed there.
    pub(super) has_given_up: bool,
}

/// Bits of a header.
const ON_STREAM: u8 = 1;
const GAVE_UP: u8 = 2;

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
            Operation::Barrier => Ok(()),
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
        };
        let bit = |is_set: bool, bit: u8| if is_set { bit } else { 0 };
        let bits = bit(self.is_on_stream, ON_STREAM) | bit(self.has_given_up, GAVE_UP);
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&[operation, detail, element, bits]);
        bytes[4..8].copy_from_slice(&u32::to_le_bytes(root));
        bytes[8..16].copy_from_slice(&self.number.to_le_bytes());
        bytes[16..].copy_from_slice(&self.bytes.to_le_bytes());
        bytes
    }

    /// The call of a header; `None` for bytes that are none.
    pub(super) fn from_bytes(bytes: &[u8; HEADER]) -> Option<Self> {
        let rest = &mut &bytes[..];
        let [operation, detail, element, bits] = take(rest);
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
            _ => return None,
        };
        let (is_on_stream, has_given_up) = (bits & ON_STREAM != 0, bits & GAVE_UP != 0);
        let call = Self { operation, is_on_stream, number, bytes: len, has_given_up };
        // What does not belong to the operation is 0.
        (call.to_bytes() == *bytes).then_some(call)
    }

    /// Checks a message of a rank: its header, and that it has `due` bytes behind it. What ranks send is checked here only. `own` are
    /// the calls of this rank by their number: the error is of that with the same one.
    ///
    /// # Errors
    /// [`Error::Collective`].
    pub(super) fn check(
        &self,
        rank: usize,
        header: &[u8; HEADER],
        bytes: usize,
        due: usize,
        own: impl Fn(u64) -> Option<Self>,
    ) -> Result<()> {
        let Some(sent) = Self::from_bytes(header).filter(|_| bytes >= HEADER) else {
            return Err(self.differs(rank, "sent something that is no collective".to_owned(), FIX_PROGRAM));
        };
        if sent == *self {
            return match bytes - HEADER == due {
                true => Ok(()),
                false => Err(self.differs(rank, wrong_length(bytes - HEADER, due), FIX_PROGRAM)),
            };
        }
        let other = Self { has_given_up: false, ..sent };
        let ours = if other.number == self.number { Some(*self) } else { own(other.number) };
        Err(match ours {
            Some(ours) if ours != other => ours.differs(rank, format!("called {other}"), FIX),
            _ if sent.has_given_up => self.gave_up(rank),
            _ => self.differs(rank, format!("called {other}"), FIX),
        })
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

    pub(super) fn gave_up(&self, rank: usize) -> Error {
        let what = "gave up its collectives, after an error or because it closed them".to_owned();
        self.differs(rank, what, "see the error of that rank")
    }

    /// What a message of a rank is waited for, where the last call there that is known has the number `seen`.
    pub(super) fn awaited(&self, rank: usize, seen: Option<u64>) -> String {
        let other = match self.operation {
            Operation::Barrier => " (Communicator::barrier is another one)",
            _ => "",
        };
        match seen {
            None => format!(
                "rank {rank} to get through {self}; see whether that rank has called it, or for whom it waits itself"
            ),
            Some(0) => {
                format!("rank {rank} to call {self} of these Collectives{other}; see what holds it up")
            }
            Some(seen) if seen < self.number => {
                format!("rank {rank} to call {self}, whose last call is #{seen}{other}; see what holds it up")
            }
            Some(_) => format!("rank {rank}, which has called {self} too; see for whom it waits itself"),
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
    pub(super) calls: Arc<Calls>,
}

/// The memory of one header. Dropping it frees it: to be done when no message can arrive in it any more.
#[derive(Debug)]
pub(super) struct Slot {
    slots: Arc<Slots>,
    pub(super) buffer: Registration,
    offset: usize,
}

impl Slots {
    pub(super) fn new(comm: &Communicator) -> Result<Arc<Self>> {
        let spill = comm.register(&Memory::alloc(LONGEST)?)?;
        Ok(Arc::new(Self { free: Mutex::default(), spill, calls: Calls::new(comm)? }))
    }

    pub(super) fn take(self: &Arc<Self>, comm: &Communicator) -> Result<Slot> {
        let mut free = self.free.lock();
        if free.is_empty() {
            let page = comm.register(&Memory::alloc(LONGEST)?)?;
            free.extend((0..LONGEST / STEP).map(|slot| (page.clone(), slot * STEP)));
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
    pub(super) fn calls(&self) -> &Calls {
        &self.slots.calls
    }

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
        Call { operation, is_on_stream: false, number: 3, bytes: 64, has_given_up: false }
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
            ];
            let ours = call(all[usize::from(*base) % all.len()]);
            let earlier = |number| (number < 3).then_some(Call { number, ..ours });
            // Small changes of a good header.
            let mut header = ours.to_bytes();
            header.iter_mut().zip(change).for_each(|(byte, change)| *byte ^= change & change >> 4);
            if let Some(read) = Call::from_bytes(&header) {
                assert_eq!(read.to_bytes(), header, "there is one header for each call");
            }
            let (bytes, due) = (usize::from(*bytes), usize::from(*due));
            match ours.check(5, &header, bytes, due, earlier) {
                Ok(()) => assert!(header == ours.to_bytes() && bytes == HEADER + due),
                Err(error) => {
                    let text = error.to_string();
                    let number = Call::from_bytes(&header).map_or(3, |call| call.number);
                    let named = earlier(number).unwrap_or(ours);
                    let says = [ours, named].map(|call| text.contains(&call.to_string()));
                    assert!(text.contains("rank 5") && says.contains(&true), "{text}");
                    assert!(!text.chars().any(char::is_control), "{text}");
                }
            }
        });
    }
}
