//! What is recorded: stages of work requests, and waits.

use std::fmt;

macro_rules! codes {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $code:literal, $text:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$variant_doc])* $variant = $code,)*
        }

        impl $name {
            /// All values.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The value with this code, if there is one.
            pub fn from_code(code: u8) -> Option<Self> {
                match code {
                    $($code => Some(Self::$variant),)*
                    _ => None,
                }
            }

            /// Short name.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }
    };
}

codes! {
    /// Stage of a work request or wait.
    Stage {
        /// A send was written to its queue, or a receive was posted.
        Prepared = 1, "prepared";
        /// A send was handed to a stream.
        Submitted = 2, "submitted";
        /// A wait was handed to a stream.
        WaitSubmitted = 3, "wait submitted";
        /// The stream refused a submission: the requests belong to the application again.
        Refused = 4, "refused";
        /// The CPU rings the doorbell of a card; the number is that of the last send posted.
        DoorbellRung = 5, "rung";
        /// The software HCA or the proxy took the doorbell; the number is that of the next send to fetch.
        Triggered = 6, "triggered";
        /// The software HCA or the proxy fetched the send from its ring.
        Fetched = 7, "fetched";
        /// The software HCA or the proxy wrote the completion, or the library found one that a card wrote.
        Completed = 8, "completed";
        /// The stream passed the wait for the completion, or the CPU polled it. For GPU streams, the time when the CPU noticed.
        Released = 9, "released";
        /// A wait began, because its condition did not hold.
        WaitBegun = 10, "wait begun";
        /// The wait was satisfied.
        WaitEnded = 11, "wait ended";
        /// The wait was given up: its deadline passed, or the stream failed.
        WaitGivenUp = 12, "wait given up";
        /// The library moved the queue pair to ERR.
        Stopped = 13, "stopped";
        /// The queue pair was connected.
        Connected = 14, "connected";
        /// A mark of the application: see [`Marks`](super::Marks).
        Mark = 15, "mark";
    }
}

codes! {
    /// Queue of an event.
    Queue {
        /// No queue: a mark, or a word in memory, whose address is the number.
        None = 0, "word";
        /// The send queue of a queue pair.
        Send = 1, "send";
        /// The receive queue of a queue pair.
        Receive = 2, "receive";
        /// A shared completion queue; its number is in place of the queue pair's.
        Shared = 3, "shared CQ";
    }
}

codes! {
    /// The kind of traffic on a queue pair between two ranks.
    Traffic {
        /// Messages.
        Messages = 1, "messages";
        /// Messages of a channel out; free places in.
        ChannelOut = 2, "channel out";
        /// Messages of a channel in; free places out.
        ChannelIn = 3, "channel in";
        /// Operations on the peer's window.
        Window = 4, "window";
        /// Announcements of receives.
        Announcements = 5, "announcements";
        /// Messages of collectives.
        Collectives = 6, "collectives";
    }
}

impl Traffic {
    /// What a wait for the next completion of a queue to or from `rank` waits for.
    pub fn awaited(self, queue: Queue, rank: u32) -> String {
        match (self, queue == Queue::Send) {
            (Self::Messages, true) => format!("its send to rank {rank} to complete"),
            (Self::Messages, false) => format!("a message from rank {rank}"),
            (Self::ChannelOut, true) => format!("its send to rank {rank} through a channel to complete"),
            (Self::ChannelOut, false) => format!("a free place of rank {rank} in its channel"),
            (Self::ChannelIn, true) => format!("its free place of a channel to be known to rank {rank}"),
            (Self::ChannelIn, false) => format!("a message from rank {rank} through a channel"),
            (Self::Window, _) => format!("its operation on the window of rank {rank} to complete"),
            (Self::Collectives, true) => format!("its part of a collective to reach rank {rank}"),
            (Self::Collectives, false) => format!("the part of rank {rank} of a collective"),
            (Self::Announcements, _) => format!("its announcement of receives to rank {rank} to complete"),
        }
    }
}

codes! {
    /// Originator of an event.
    By {
        /// A thread of the application or of the library.
        Cpu = 0, "CPU";
        /// The software HCA, the proxy, or a card.
        Hca = 1, "HCA";
        /// A stream that a host thread runs.
        HostStream = 2, "host stream";
        /// A stream of a GPU.
        CudaStream = 3, "CUDA stream";
    }
}

/// A recorded event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Stage.
    pub stage: Stage,
    /// Queue.
    pub queue: Queue,
    /// Originator.
    pub by: By,
    /// The device, numbered from 1 in each process, because queue pair numbers are per device. 0 for words and marks.
    pub device: u8,
    /// The queue pair, 24 bits; 0 for words and marks.
    pub qpn: u32,
    /// Number of the work request in its queue, from 0 (`Completion::index`); address of a word; number of a mark.
    pub number: u64,
    /// Bytes of the request or its completion; the low 32 bits of the awaited value of a word; the value of a mark.
    pub len: u32,
    /// The syndrome of a completion, 0 for success.
    pub status: u8,
    /// The low 16 bits of the number of the stream, 0 for none.
    pub stream: u16,
}

/// Words of a record.
pub(super) const WORDS: usize = 4;

impl Event {
    /// An event of a work request.
    #[inline]
    pub fn of(stage: Stage, queue: Queue, by: By, qpn: u32, number: u64) -> Self {
        Self { stage, queue, by, device: 0, qpn, number, len: 0, status: 0, stream: 0 }
    }

    /// The words behind the stamp in a record. The low 24 bits of the last one are left for the check.
    #[inline]
    pub fn pack(&self) -> [u64; 3] {
        let kind = u64::from(self.qpn & 0xff_ffff) | u64::from(self.stage as u8) << 24;
        let rest = u64::from(self.device) << 24
            | u64::from(self.queue as u8) << 32
            | u64::from(self.by as u8) << 34
            | u64::from(self.status) << 40
            | u64::from(self.stream) << 48;
        [self.number, u64::from(self.len) | kind << 32, rest]
    }

    /// The event that [`Event::pack`] has packed, if the codes are known.
    pub fn unpack([number, middle, rest]: [u64; 3]) -> Option<Self> {
        let [l0, l1, l2, l3, q0, q1, q2, stage] = middle.to_le_bytes();
        let [_, _, _, device, flags, status, s0, s1] = rest.to_le_bytes();
        Some(Self {
            stage: Stage::from_code(stage)?,
            queue: Queue::from_code(flags & 3)?,
            by: By::from_code(flags >> 2)?,
            device,
            qpn: u32::from_le_bytes([q0, q1, q2, 0]),
            number,
            len: u32::from_le_bytes([l0, l1, l2, l3]),
            status,
            stream: u16::from_le_bytes([s0, s1]),
        })
    }
}

/// What a wait waits for, and the state of its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Awaited {
    /// The queue; none for a word.
    pub queue: Queue,
    /// The device, as [`Event::device`].
    pub device: u8,
    /// The queue pair, or the number of a shared completion queue.
    pub qpn: u32,
    /// Number of the work request, or address of the word.
    pub number: u64,
    /// The low 32 bits of the awaited value of a word.
    pub value: u32,
    /// Work requests posted to the queue when the wait began.
    pub posted: u64,
    /// How many of them were completed.
    pub completed: u64,
}

impl Awaited {
    /// A wait for a word.
    pub fn word(address: u64, value: u64) -> Self {
        let [v0, v1, v2, v3, ..] = value.to_le_bytes();
        let value = u32::from_le_bytes([v0, v1, v2, v3]);
        Self { queue: Queue::None, device: 0, qpn: 0, number: address, value, posted: 0, completed: 0 }
    }

    /// An event of the wait.
    pub fn event(&self, stage: Stage, by: By) -> Event {
        let Self { queue, device, qpn, number, value, .. } = *self;
        Event { device, len: value, ..Event::of(stage, queue, by, qpn, number) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::layout::CHECK;
    use super::*;

    proptest! {
        #[test]
        fn events_fit_in_their_words(
            stage in prop::sample::select(Stage::ALL),
            queue in prop::sample::select(Queue::ALL),
            by in prop::sample::select(By::ALL),
            (device, qpn, number) in (any::<u8>(), 0..1u32 << 24, any::<u64>()),
            (len, status, stream) in (any::<u32>(), any::<u8>(), any::<u16>()),
            check in 0..1u64 << 24,
        ) {
            let event = Event { stage, queue, by, device, qpn, number, len, status, stream };
            let [a, b, c] = event.pack();
            prop_assert_eq!(c & CHECK, 0, "room for the check");
            prop_assert_eq!(Event::unpack([a, b, c | check]), Some(event));
        }

        #[test]
        fn anything_else_is_refused_or_read(words in any::<[u64; 3]>()) {
            if let Some(event) = Event::unpack(words) {
                let again = event.pack();
                prop_assert_eq!([again[0], again[1]], [words[0], words[1]]);
            }
        }
    }
}
