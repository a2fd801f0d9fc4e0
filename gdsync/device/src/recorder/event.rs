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
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The value of this number; `None` where none has it.
            pub fn from_code(code: u8) -> Option<Self> {
                match code {
                    $($code => Some(Self::$variant),)*
                    _ => None,
                }
            }

            /// In a word.
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
    /// What happened.
    Stage {
        /// A send was written to its queue, or a receive was posted.
        Prepared = 1, "prepared";
        /// A send was handed to a stream.
        Submitted = 2, "submitted";
        /// A wait was handed to a stream.
        WaitSubmitted = 3, "wait submitted";
        /// What was handed to a stream was refused: it is with the application again.
        Refused = 4, "refused";
        /// The CPU rings the doorbell of a card; the number is that of the last send exposed.
        DoorbellRung = 5, "rung";
        /// The software HCA or the proxy found the doorbell rung; the number is that of the next send to fetch.
        Triggered = 6, "triggered";
        /// The software HCA or the proxy took the send from its ring.
        Fetched = 7, "fetched";
        /// The completion was written, by the software HCA or the proxy; found, where a card writes it.
        Completed = 8, "completed";
        /// The stream passed the wait for the completion, or the CPU took it. Of a stream of a GPU this is when the CPU
        /// learnt of it.
        Released = 9, "released";
        /// A wait did not find what it waits for.
        WaitBegun = 10, "wait begun";
        /// It found it.
        WaitEnded = 11, "wait ended";
        /// It was given up: a deadline, or a stream that failed.
        WaitGivenUp = 12, "wait given up";
        /// The library put the queue pair into the error state.
        Stopped = 13, "stopped";
        /// The queue pair was connected.
        Connected = 14, "connected";
        /// A mark of the application: see [`Marks`](super::Marks).
        Mark = 15, "mark";
    }
}

codes! {
    /// What it happened to.
    Queue {
        /// No queue: a word in memory, whose address is the number; or a mark.
        None = 0, "word";
        /// The send queue of a queue pair.
        Send = 1, "send";
        /// The receive queue of a queue pair.
        Receive = 2, "receive";
        /// A completion queue that several queues share, whose number is in place of a queue pair's.
        Shared = 3, "shared CQ";
    }
}

codes! {
    /// Who did it.
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

/// Something that happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What.
    pub stage: Stage,
    /// To what.
    pub queue: Queue,
    /// By whom.
    pub by: By,
    /// The open device, numbered from 1 in each process: queue pairs of two may have the same number. 0 for words and marks.
    pub device: u8,
    /// The queue pair, 24 bits; 0 for words and marks.
    pub qpn: u32,
    /// The number of the work request in its queue, from 0, as `Completion::index` tells it;
    /// the address of a word; the number of a mark.
    pub number: u64,
    /// Bytes of the request or its completion; of a word, the low 32 bits of the value that is waited for; of a mark, its value.
    pub len: u32,
    /// The syndrome of a completion, 0 for success.
    pub status: u8,
    /// The low 16 bits of the number of the stream that it was handed to, 0 for none.
    pub stream: u16,
}

/// Words of a record.
pub(super) const WORDS: usize = 4;

impl Event {
    /// One of a work request.
    #[inline]
    pub fn of(stage: Stage, queue: Queue, by: By, qpn: u32, number: u64) -> Self {
        Self { stage, queue, by, device: 0, qpn, number, len: 0, status: 0, stream: 0 }
    }

    /// What follows the stamp in a record: the number, then the rest but for the check, which is the low 24 bits of the last.
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

    /// What [`Event::pack`] made; `None` of anything else.
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

/// What a wait waits for, and how far its queue is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Awaited {
    /// The queue, or none for a word.
    pub queue: Queue,
    /// Its device, as [`Event::device`].
    pub device: u8,
    /// Its queue pair, or the number of a shared completion queue.
    pub qpn: u32,
    /// The number of the work request, or the address of the word.
    pub number: u64,
    /// Of a word, the low 32 bits of the value.
    pub value: u32,
    /// Work requests posted to the queue when the wait began.
    pub posted: u64,
    /// Those of them that were completed.
    pub completed: u64,
}

impl Awaited {
    /// A word.
    pub fn word(address: u64, value: u64) -> Self {
        let [v0, v1, v2, v3, ..] = value.to_le_bytes();
        let value = u32::from_le_bytes([v0, v1, v2, v3]);
        Self { queue: Queue::None, device: 0, qpn: 0, number: address, value, posted: 0, completed: 0 }
    }

    /// The event of this stage.
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
