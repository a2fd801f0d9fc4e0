//! Stream operations, with the semantics of CUDA's stream memory operations (`cuda.h`: `CUstreamBatchMemOpType`,
//! `CUstreamWaitValue_flags`).

use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::{fmt, iter};

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::inbox::Message;
use super::order::Numbers;
use super::peer::PeerCopy;
use super::place::Placing;
use crate::verbs::end::QueueEnd;
pub(crate) use crate::verbs::source::{Arrival, DoorbellValue, SendDoorbell, Source};
pub use mlx5_ring::Cond;

use gdsync_device::error::{Error, Result};
use gdsync_device::memory::{Word32, Word64};
use gdsync_device::recorder::{Awaited, NamedWords, Purpose};

/// The operations of a submission, mostly one or two.
pub(crate) type Ops = SmallVec<[Op; 2]>;

/// What a launch of a graph does not make anew.
pub(super) struct Kept {
    /// All operations in order: those that are the same in each launch but for the numbers of messages, and `None` for the others.
    pub(super) ops: Arc<[Option<Op>]>,
    pub(super) numbers: Numbers,
}

/// An operation of a submission.
pub(super) enum Queued<'a> {
    Own(&'a Op),
    /// Of a graph, with the number that it has in the launch.
    Message(Op),
}

impl Deref for Queued<'_> {
    type Target = Op;

    fn deref(&self) -> &Op {
        match self {
            Self::Own(op) => op,
            Self::Message(op) => op,
        }
    }
}

/// All operations of a submission, which is a launch if there are `kept` ones, and has made `own` anew.
pub(super) fn merged<'a>(kept: Option<&'a Kept>, own: &'a [Op]) -> impl Iterator<Item = Queued<'a>> {
    let (mut ops, mut own) = (kept.into_iter().flat_map(|kept| &*kept.ops), own.iter());
    iter::from_fn(move || match (ops.next().and_then(Option::as_ref), kept) {
        (Some(Op::Message(message)), Some(kept)) => {
            let mut message = message.clone();
            message.number = message.taken.behind(&kept.numbers);
            Some(Queued::Message(Op::Message(message)))
        }
        (Some(op), _) => Some(Queued::Own(op)),
        (None, _) => own.next().map(Queued::Own),
    })
}

/// One operation of a stream.
pub(crate) enum Op {
    /// Writes a 32-bit word after everything before it in the stream.
    Write32 {
        /// The word.
        at: Word32,
        /// Its new value.
        value: u32,
    },
    /// Writes a 64-bit word after everything before it in the stream.
    Write64 {
        /// The word.
        at: Word64,
        /// Its new value.
        value: u64,
    },
    /// Holds the stream until a 32-bit word satisfies a condition.
    Wait32 {
        /// The word.
        at: Word32,
        /// The operand of the condition.
        value: u32,
        /// The condition.
        cond: Cond,
        /// Whose peer writes it: once that queue pair has broken, the wait is over.
        of: Option<Arc<QueueEnd>>,
    },
    /// Holds the stream until a 64-bit word satisfies a condition.
    Wait64 {
        /// The word.
        at: Word64,
        /// The operand of the condition.
        value: u64,
        /// The condition.
        cond: Cond,
    },
    /// Rings the doorbell of a queue. The host engine also notifies the device.
    Trigger(Arc<dyn Source>, DoorbellValue),
    /// Posts receives, by the record of their queue. The host engine also notifies the device.
    PostRecv {
        /// The queue.
        source: Arc<dyn Source>,
        /// The receive word of the doorbell record.
        record: Word32,
        /// Its new value.
        value: u32,
    },
    /// Holds the stream until completion `n` of a queue has arrived, then moves the consumer index past it.
    Await(Arc<dyn Source>, u64),
    /// The [`Op::Await`] before it is over, too, when the upper half of a word has this value, where kernels wait.
    OrArrival {
        /// The word.
        at: Word64,
        /// Its upper half.
        number: u32,
    },
    /// Tells a peer of a receive that the stream posts: writes the first word of its line, unless the stream has failed.
    Tell {
        /// The word.
        line: Word64,
        /// Its new value.
        told: u64,
    },
    /// The [`Op::Await`] before it is left out where kernels have placed the send: see [`Op::Place`].
    UnlessPlaced,
    /// A system-scope memory barrier.
    Barrier,
    /// Copies between GPUs, and signals: see [`PeerCopy`].
    Peer(Arc<PeerCopy>),
    /// See [`Message`].
    Message(Message),
    /// Puts the payload of the send that follows into its receive: see [`Placing`]. A CPU leaves that to the device.
    Place(Arc<Placing>),
    /// Makes inbound writes to GPU memory, whose completion the stream has waited for, visible to later operations.
    Flush,
    /// Runs a function on the CPU, in stream order. The lock makes operations, and so graphs, `Sync`.
    HostFn(Mutex<Box<dyn FnOnce() + Send>>),
}

impl Op {
    /// Whether its words are mapped for GPUs.
    pub(super) fn is_found(&self) -> bool {
        match self {
            Self::Trigger(source, _) => source.send_doorbell().is_none_or(SendDoorbell::is_found),
            Self::Await(source, n) => source.arrival(*n).is_found(),
            Self::Write32 { at, .. } | Self::Wait32 { at, .. } | Self::PostRecv { record: at, .. } => {
                at.memory().is_known_to_gpus()
            }
            Self::Write64 { at, .. }
            | Self::Wait64 { at, .. }
            | Self::OrArrival { at, .. }
            | Self::Tell { line: at, .. } => at.memory().is_known_to_gpus(),
            Self::Peer(copy) => copy.is_found(),
            Self::Message(message) => message.is_found(),
            Self::Place(placing) => placing.is_found(),
            Self::UnlessPlaced | Self::Barrier | Self::Flush | Self::HostFn(_) => true,
        }
    }

    /// What it waits for, for the flight recorder.
    pub(super) fn awaited(&self) -> Option<Awaited> {
        match self {
            Op::Await(source, n) => source.awaited(*n),
            Op::Wait32 { at, value, .. } => Some(Awaited::word(at.addr(), (*value).into())),
            Op::Message(message) => message.wait().map(|(at, _)| Awaited::word(at.addr(), message.number)),
            _ => self.wait64().map(|(at, value, _)| Awaited::word(at.addr(), value)),
        }
    }

    /// The 64-bit word that it waits for, and the condition.
    pub(super) fn wait64(&self) -> Option<(&Word64, u64, Cond)> {
        match self {
            Op::Wait64 { at, value, cond } => Some((at, *value, *cond)),
            Op::Message(message) => message.wait().map(|(at, value)| (at, value, Cond::Geq)),
            _ => None,
        }
    }

    /// What it waits for in vain, and what to do.
    pub(super) fn describe(&self) -> String {
        let (addr, value, word, cond) = match self {
            Op::Await(source, n) => return source.describe(*n),
            Op::Wait32 { at, value, cond, .. } => (at.addr(), u64::from(*value), u64::from(at.load()), cond),
            Op::Message(message) => match message.wait() {
                Some((at, value)) if Cond::Geq.holds64(at.load(), value) => {
                    return format!(
                        "the rest of a message (its word {:#x} has come, of {:#x}); see that the sender lives, and writes only what it tells of",
                        at.load(),
                        at.addr()
                    );
                }
                Some((at, value)) => return message.end().qp.describe_word(at.load(), value),
                None => return format!("{self:?}"),
            },
            Op::Wait64 { at, value, cond } => (at.addr(), *value, at.load(), cond),
            _ => return format!("{self:?}"),
        };
        let Some(words) = NamedWords::find(addr) else {
            return format!(
                "{self:?} (the word is {word:#x}); see that its writer lives (a peer that is gone ends waits for completions, not \
                 for words)"
            );
        };
        let awaited = words.awaited(addr, value);
        match words.purpose {
            Purpose::Receives { rank } => {
                format!("{awaited}: rank {rank} has posted {word}; post one there (Communicator::irecv)")
            }
            Purpose::Collectives { .. } => {
                format!(
                    "{awaited}, which it has not; call it there on a stream, too, or see what that rank waits for"
                )
            }
            _ => format!(
                "{awaited}, until it is Cond::{cond:?} {value} (it is {word}); see that another rank signals it (Communicator::lost \
                 names those that cannot)"
            ),
        }
    }

    /// Refuses a wait that no word can satisfy.
    pub(super) fn check(&self) -> Result<()> {
        let is_endless = match *self {
            Op::Wait32 { value, cond, .. } => cond.satisfy32(0, value).is_none(),
            Op::Wait64 { value, cond, .. } => cond.satisfy64(0, value).is_none(),
            _ => false,
        };
        match is_endless {
            true => Err(Error::invalid("wait", format!("{self:?}"), "a condition that some word satisfies")),
            false => Ok(()),
        }
    }

    /// Refuses what a CPU cannot run, too.
    pub(super) fn check_on_cpu(&self) -> Result<()> {
        match self {
            Op::Peer(_) | Op::Message(_) => Err(Error::Unsupported {
                what: "a copy to or from memory of a peer",
                by: "streams that a CPU runs",
                fix: "submit it to a stream of a GPU",
            }),
            _ => self.check(),
        }
    }

    /// Copies the operation; `None` for a host function, which can be called only once.
    pub(super) fn again(&self) -> Option<Self> {
        Some(match self {
            Op::Write32 { at, value } => Op::Write32 { at: at.clone(), value: *value },
            Op::Write64 { at, value } => Op::Write64 { at: at.clone(), value: *value },
            Op::Wait32 { at, value, cond, of } => {
                Op::Wait32 { at: at.clone(), value: *value, cond: *cond, of: of.clone() }
            }
            Op::Wait64 { at, value, cond } => Op::Wait64 { at: at.clone(), value: *value, cond: *cond },
            Op::Trigger(source, value) => Op::Trigger(source.clone(), *value),
            Op::PostRecv { source, record, value } => {
                Op::PostRecv { source: source.clone(), record: record.clone(), value: *value }
            }
            Op::Await(source, n) => Op::Await(source.clone(), *n),
            Op::OrArrival { at, number } => Op::OrArrival { at: at.clone(), number: *number },
            Op::Peer(copy) => Op::Peer(copy.clone()),
            Op::Message(message) => Op::Message(message.clone()),
            Op::Place(placing) => Op::Place(placing.clone()),
            Op::UnlessPlaced => Op::UnlessPlaced,
            Op::Tell { line, told } => Op::Tell { line: line.clone(), told: *told },
            Op::Barrier => Op::Barrier,
            Op::Flush => Op::Flush,
            Op::HostFn(_) => return None,
        })
    }
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::Write32 { at, value } => write!(f, "WRITE32 [{:#x}] <- {value:#x}", at.addr()),
            Op::Write64 { at, value } => write!(f, "WRITE64 [{:#x}] <- {value:#x}", at.addr()),
            Op::Wait32 { at, value, cond, .. } => write!(f, "WAIT32 [{:#x}] {cond:?} {value:#x}", at.addr()),
            Op::Wait64 { at, value, cond } => write!(f, "WAIT64 [{:#x}] {cond:?} {value:#x}", at.addr()),
            Op::Peer(copy) => write!(f, "{copy:?}"),
            Op::Message(message) => write!(f, "{message:?}"),
            Op::Place(placing) => write!(f, "{placing:?}"),
            Op::UnlessPlaced => f.write_str("UNLESS PLACED"),
            Op::Tell { line, told } => write!(f, "TELL [{:#x}] <- {told:#x}", line.addr()),
            Op::Barrier => f.write_str("BARRIER"),
            Op::Flush => f.write_str("FLUSH"),
            Op::Trigger(source, value) => write!(f, "TRIGGER {source:?} <- {:#x}", value.doorbell),
            Op::PostRecv { source, value, .. } => write!(f, "POSTRECV {source:?} <- {value:#x}"),
            Op::Await(source, n) => write!(f, "AWAIT {source:?} {n}"),
            Op::OrArrival { at, number } => write!(f, "OR [{:#x}] has {number}", at.addr()),
            Op::HostFn(_) => f.write_str("HOSTFN"),
        }
    }
}

/// A source of a submission, and the index of the last operation that uses it.
pub(super) type Use = (usize, Arc<dyn Source>);

/// The distinct sources of a submission.
pub(super) fn sources_of(ops: impl IntoIterator<Item = impl Deref<Target = Op>>) -> Vec<Use> {
    let mut found: Vec<Use> = Vec::new();
    for (index, op) in ops.into_iter().enumerate() {
        let source = match &*op {
            Op::Trigger(source, _) | Op::PostRecv { source, .. } | Op::Await(source, _) => source,
            Op::Message(message) if message.wait().is_some() => message.end().source(),
            _ => continue,
        };
        match found.iter_mut().find(|(_, known)| Arc::ptr_eq(known, source)) {
            Some((last, _)) => *last = index,
            None => found.push((index, source.clone())),
        }
    }
    found
}

/// The sources to stop when a stream fails: one of each queue pair. A second stop could come after the application has
/// reset it.
pub(super) fn to_stop(sources: impl Iterator<Item = Arc<dyn Source>>) -> Vec<Arc<dyn Source>> {
    let mut chosen: Vec<Arc<dyn Source>> = Vec::new();
    for source in sources {
        if !chosen.iter().any(|known| known.queue_pair() == source.queue_pair()) {
            chosen.push(source);
        }
    }
    chosen
}

/// Logs the failure of a stream. Nobody else tells of one that was dropped.
pub(super) fn log_failure(stream: &str, is_dropped: bool, error: &Error) {
    if is_dropped {
        tracing::error!(stream, %error, "a dropped stream did not finish its work");
    } else {
        tracing::debug!(stream, %error, "stream failed");
    }
}

/// Stops sources after a failure of the stream, and drops them: a queue pair that they hold cannot be reset. A panic prevents
/// neither the others from being stopped, nor the release.
pub(super) fn stop(stream: &str, sources: Vec<Arc<dyn Source>>, error: &Error) {
    for source in sources {
        if catch_unwind(AssertUnwindSafe(|| source.fail(error))).is_err() {
            tracing::error!(stream, ?source, "a source panicked while it was stopped");
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Cond::{self, And, Eq, Geq, Nor};

    const TOP: u32 = 1 << 31;
    const MAX: u32 = u32::MAX;

    #[test]
    fn conditions_match_cuda() {
        for (cond, word, value, holds) in [
            (Geq, 5, 5, true),
            (Geq, 6, 5, true),
            (Geq, 4, 5, false),
            // Cyclic: up to half the range ahead counts as reached.
            (Geq, 0, MAX, true),
            (Geq, MAX, 0, false),
            (Geq, 3, MAX - 3, true),
            (Geq, TOP - 1, 0, true),
            (Geq, TOP, 0, false),
            (Geq, TOP, 1, true),
            (Geq, 0, TOP, false),
            (Geq, 0, TOP + 1, true),
            (Geq, MAX, MAX, true),
            (Eq, 0, 0, true),
            (Eq, MAX, MAX, true),
            (Eq, TOP, 0, false),
            (And, 0b110, 0b010, true),
            (And, 0b101, 0b010, false),
            (And, MAX, 0, false),
            (And, TOP, TOP, true),
            (And, TOP, TOP - 1, false),
            // Holds while word and value leave any bit clear.
            (Nor, 0, 0, true),
            (Nor, MAX, 0, false),
            (Nor, 0, MAX, false),
            (Nor, MAX - 1, 0, true),
            (Nor, MAX - 1, 1, false),
            (Nor, TOP, TOP - 1, false),
            (Nor, TOP, TOP - 2, true),
        ] {
            assert_eq!(cond.holds32(word, value), holds, "32: {word:#x} {cond:?} {value:#x}");
            if cond != Geq {
                // Duplicated halves: the 64-bit result equals the 32-bit result.
                let [word, value] = [word, value].map(|half| u64::from(half) << 32 | u64::from(half));
                assert_eq!(cond.holds64(word, value), holds, "64: {word:#x} {cond:?} {value:#x}");
            }
        }
    }

    #[test]
    fn geq_is_cyclic_in_64_bits() {
        const TOP: u64 = 1 << 63;
        const MAX: u64 = u64::MAX;
        for (word, value, holds) in [
            (0, 0, true),
            (1, 0, true),
            (0, 1, false),
            (0, MAX, true),
            (MAX, 0, false),
            (TOP - 1, 0, true),
            (TOP, 0, false),
            (0, TOP, false),
            (TOP, 1, true),
            // A 32-bit comparison would see these the other way.
            (1 << 32, 1, true),
            (u64::from(u32::MAX), 0, true),
            (1 << 31, 0, true),
        ] {
            assert_eq!(Geq.holds64(word, value), holds, "{word:#x} >= {value:#x}");
        }
    }

    /// The formulas of `cuda.h` in unbounded integers, for words of `bits` bits.
    fn formula(cond: Cond, word: u64, value: u64, bits: u32) -> bool {
        let (word, value, circle) = (i128::from(word), i128::from(value), 1_i128 << bits);
        match cond {
            Geq => (word - value).rem_euclid(circle) < circle / 2,
            Eq => word == value,
            And => (0..bits).any(|bit| word >> bit & 1 == 1 && value >> bit & 1 == 1),
            Nor => (0..bits).any(|bit| word >> bit & 1 == 0 && value >> bit & 1 == 0),
        }
    }

    /// Any value, with the edges (ends, middle, few bits clear or set) frequent.
    fn operand() -> impl Strategy<Value = u64> {
        let edge = prop::sample::select(vec![0, 1 << 31, 1 << 32, 1 << 63, u64::MAX, u64::from(u32::MAX)]);
        prop_oneof![
            any::<u64>(),
            (edge, 0..3_u64).prop_map(|(edge, more)| edge.wrapping_add(more).wrapping_sub(1)),
            (0..64_u32).prop_map(|bit| 1 << bit),
            (0..64_u32).prop_map(|bit| !(1 << bit)),
        ]
    }

    proptest! {
        #[test]
        fn satisfy_returns_a_word_that_holds(word in operand(), value in operand()) {
            for cond in [Geq, Eq, And, Nor] {
                let possible = match cond {
                    And => value != 0,
                    Nor => value != u64::MAX,
                    Geq | Eq => true,
                };
                let to = cond.satisfy64(word, value);
                prop_assert_eq!(to.is_some(), possible);
                prop_assert!(to.is_none_or(|to| cond.holds64(to, value)));
                if cond.holds64(word, value) {
                    prop_assert_eq!(to, Some(word), "left alone");
                }
                let [word, value] = [word, value].map(|wide| u32::try_from(wide & u64::from(u32::MAX)).expect("masked"));
                prop_assert!(cond.satisfy32(word, value).is_none_or(|to| cond.holds32(to, value)));
                prop_assert!(cond.satisfy32(word, value).is_some() || (cond == And && value == 0) || (cond == Nor && value == MAX));
            }
        }

        #[test]
        fn conditions_match_the_formulas(word in operand(), value in operand(), near in any::<bool>(), off in -2..=2_i64) {
            let value = if near { word.wrapping_add_signed(off) } else { value };
            for cond in [Geq, Eq, And, Nor] {
                prop_assert_eq!(cond.holds64(word, value), formula(cond, word, value, 64), "{:?}", cond);
                let [word, value] = [word, value].map(|wide| u32::try_from(wide & u64::from(u32::MAX)).expect("masked"));
                let expected = formula(cond, word.into(), value.into(), 32);
                prop_assert_eq!(cond.holds32(word, value), expected, "{:?}", cond);
            }
        }
    }
}
