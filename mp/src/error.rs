//! The errors of this crate: what failed, why, and what the user can do about it.

mod errno;

use std::num::NonZeroU32;
use std::ops::Range;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use gdsync::error::{printable, rounded};
use gdsync::mlx5::Syndrome;
use gdsync_device::own_rank;

/// What a process can do that joins its job once more.
pub(crate) const SECOND_INIT: &str =
    "use that Communicator, which clones and threads share; only all ranks at once can make another one";

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// The errors of this crate. Cheap to clone, as sticky errors are returned again and again. The text begins with the rank of this
/// process and has the cause; there is no [`source`](std::error::Error::source). `{:?}` prints the same text as `{}`.
#[derive(Clone)]
#[non_exhaustive]
pub enum Error {
    /// The variables of the launcher are missing, malformed or contradictory.
    Launch {
        /// The variable, its value, and what is wrong with it.
        what: String,
        /// What the user can do.
        fix: &'static str,
    },
    /// The exchange of addresses between the ranks failed.
    Bootstrap {
        /// The rank at fault, or its address.
        peer: String,
        /// What happened.
        what: String,
        /// The error of the system call that failed, if one did.
        cause: Option<Arc<io::Error>>,
        /// What the user can do.
        fix: &'static str,
    },
    /// Something did not happen in time.
    Deadline {
        /// The operation, and the late ranks.
        what: String,
        /// The time limit.
        after: Duration,
        /// What the user can do.
        fix: &'static str,
    },
    /// A child process or a thread could not be started or controlled.
    Spawn {
        /// What was tried.
        what: String,
        /// The error of the system call that failed, if one did.
        cause: Option<Arc<io::Error>>,
        /// What the user can do.
        fix: &'static str,
    },
    /// A child process failed; the others were stopped.
    Child {
        /// The rank of the child.
        rank: usize,
        /// Its exit code or signal.
        status: ExitStatus,
    },
    /// There is no such rank.
    NoSuchRank {
        /// The rank asked for.
        rank: usize,
        /// The number of ranks.
        size: usize,
    },
    /// A receive is given memory that an outstanding receive may still write.
    OverlappingReceives {
        /// The rank that is to be received from; `None` for any.
        rank: Option<usize>,
        /// The bytes of the buffer that is refused.
        range: Range<usize>,
        /// The rank that the outstanding receive is from; `None` for any.
        other_rank: Option<usize>,
        /// The bytes of its buffer.
        other_range: Range<usize>,
    },
    /// A wait for a message of a channel without a posted receive that it could be for.
    NoPostedReceive {
        /// The rank at the other end.
        rank: usize,
    },
    /// All places of a channel have a posted receive that no wait has been added for.
    NoFreePlace {
        /// The rank at the other end.
        rank: usize,
        /// The number of places.
        places: usize,
    },
    /// An access would leave the window of a rank.
    OutsideWindow {
        /// The rank whose window it is.
        rank: usize,
        /// What was tried.
        operation: &'static str,
        /// First byte of the access.
        offset: usize,
        /// Its length.
        len: usize,
        /// Bytes of the window.
        size: usize,
    },
    /// A message to or from a rank failed.
    Message {
        /// The rank at the other end.
        rank: usize,
        /// What was tried.
        operation: &'static str,
        /// Why.
        cause: gdsync::Error,
        /// Bytes of the message, if that has failed and they are known.
        bytes: Option<NonZeroU32>,
        /// Bytes of its receive, if they are known.
        room: Option<NonZeroU32>,
    },
    /// A rank called another collective, or with other arguments.
    Collective {
        /// The call of this rank: its name, its arguments and its number.
        call: String,
        /// The rank at the other end.
        rank: usize,
        /// What that rank did: the same of its call.
        what: String,
        /// What the user can do.
        fix: &'static str,
    },
    /// [`Communicator::finalize`](crate::Communicator::finalize) or [`Tagged::destroy`](crate::tagged::Tagged::destroy) was called with
    /// messages that nobody receives, or with work on streams that did not end. They are lost with the communicator.
    Unfinished {
        /// What was under way, with which ranks: how many messages, and their sizes.
        what: String,
        /// How long it was waited for.
        after: Duration,
    },
    /// A message does not fit into the receive that it matched. It is lost; nothing else is.
    Truncated {
        /// The rank that sent it.
        rank: usize,
        /// Its tag.
        tag: u64,
        /// Its length.
        bytes: usize,
        /// That of the receive.
        room: usize,
    },
    /// The program cancelled a receive before a message matched it.
    Cancelled,
    /// The program closed what this call used, perhaps while it waited.
    Closed {
        /// The object that was closed.
        what: &'static str,
    },
    /// The layer below failed.
    Device(gdsync::Error),
}

pub(crate) fn rank_or_any(rank: Option<usize>) -> String {
    rank.map_or_else(|| "any rank".to_owned(), |rank| format!("rank {rank}"))
}

/// The word between an operation and the rank at its other end.
fn preposition(operation: &str) -> &'static str {
    match operation {
        _ if operation.contains("send") || operation.starts_with("put") || operation == "signal" => "to",
        _ if operation.contains("receive") || operation == "get" => "from",
        _ => "with",
    }
}

/// Why a message failed, in terms of ranks.
fn reason(cause: &gdsync::Error) -> String {
    match cause {
        gdsync::Error::Deadline { after, awaited, .. } => {
            format!("not complete within {}: it waits for {awaited}, or allow more time", rounded(*after))
        }
        other => other.of_rank(),
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(own) = own_rank::get() {
            write!(f, "rank {own}: ")?;
        }
        let cause = |cause: &Option<Arc<io::Error>>| {
            cause.as_ref().map(|error| format!(": {error}")).unwrap_or_default()
        };
        match self {
            Self::Launch { what, fix } => write!(f, "launch: {what}; {fix}"),
            Self::Bootstrap { peer, what, cause: why, fix } => {
                write!(f, "{peer}: {what}{}; {fix}", cause(why))
            }
            Self::Deadline { what, after, fix } => {
                write!(f, "{what}: not done within {}; {fix}, or allow more time", rounded(*after))
            }
            Self::Spawn { what, cause: why, fix } => write!(f, "spawn: {what}{}; {fix}", cause(why)),
            Self::Child { rank, status } => {
                write!(f, "rank {rank} ended with {status}; its own output says why")
            }
            Self::NoSuchRank { rank, size } => {
                write!(f, "there is no rank ")?;
                match rank.cast_signed() {
                    0.. => write!(f, "{rank}")?,
                    negative => write!(f, "{negative} (it was computed below 0)")?,
                }
                write!(f, ": the communicator has ranks 0 to {}", size - 1)
            }
            Self::OverlappingReceives { rank, range, other_rank, other_range } => write!(
                f,
                "the receive from {} into bytes {range:?} of its buffer overlaps the outstanding receive from {} into bytes \
                 {other_range:?} of its buffer, and a posted receive is active at once; give each its own bytes, wait for the \
                 earlier one first, or receive in stream order: sendrecv_on_stream, or Communicator::irecv_on_stream, \
                 send_on_stream, wait_on_stream",
                rank_or_any(*rank),
                rank_or_any(*other_rank)
            ),
            Self::NoFreePlace { rank, places } => write!(
                f,
                "all {places} places of the channel with rank {rank} have a posted receive that nothing waits for, and one more message \
                 would overwrite the first; add its wait before the next receive (Channel::wait_recv_in_batch or \
                 wait_recv_on_stream), or give Communicator::channels more places"
            ),
            Self::NoPostedReceive { rank } => write!(
                f,
                "each posted receive of the channel with rank {rank} has its wait already, so no message would come for another \
                 one; post a receive before it (Channel::post_recv_in_batch or post_recv_on_stream)"
            ),
            Self::OutsideWindow { rank, operation, offset, len, size } => write!(
                f,
                "{operation} of {len} bytes at offset {offset} leaves the window of rank {rank}, which has {size} bytes"
            ),
            Self::Message { rank, operation, cause, bytes, room } => {
                write!(f, "{operation} {} rank {rank}", preposition(operation))?;
                match (bytes, room) {
                    (None, None) => {}
                    (Some(bytes), None) => write!(f, " of {bytes} bytes")?,
                    (None, Some(room)) => write!(f, " into {room} bytes")?,
                    (Some(bytes), Some(room)) => write!(f, " of {bytes} bytes into {room}")?,
                }
                write!(f, ": {}", reason(cause))
            }
            Self::Collective { call, rank, what, fix } => {
                f.write_str(&Self::describe_collective(call, *rank, what, fix))
            }
            Self::Unfinished { what, after } => {
                let after = match after.is_zero() {
                    true => String::new(),
                    false => format!(" after {}", rounded(*after)),
                };
                write!(
                    f,
                    "unfinished{after}: {what}; receive each message, synchronize streams, and end or drop captures and batches, before the end"
                )
            }
            Self::Truncated { rank, tag, bytes, room } => write!(
                f,
                "the message of {bytes} bytes from rank {rank} with tag {tag} does not fit into the {room} bytes of its receive; \
                 ask for its size first (Tagged::improbe), or receive into more"
            ),
            Self::Cancelled => {
                f.write_str("the receive was cancelled before a message matched it; start another one")
            }
            Self::Closed { what } => {
                write!(f, "this program has closed {what}; let its calls return first, or expect this")
            }
            Self::Device(error) => error.fmt(f),
        }
    }
}

/// As `Display`, so that `main` and `unwrap` print what failed and what to do.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}

/// The cause of an error that names the rank itself.
pub(crate) fn without_rank(cause: gdsync::Error) -> gdsync::Error {
    match cause {
        gdsync::Error::Rank { reason, .. } => Arc::unwrap_or_clone(reason),
        other => other,
    }
}

/// The error of a stream that knows the rank is one of a message with it.
impl From<gdsync::Error> for Error {
    fn from(error: gdsync::Error) -> Self {
        match error {
            gdsync::Error::Rank { rank, .. } => Self::message(rank as usize, "work of a stream", error),
            other => Self::Device(other),
        }
    }
}

/// Whether a queue pair failed because the other side cannot be reached.
pub(crate) fn is_peer_lost(error: &gdsync::Error) -> bool {
    use gdsync::Error as E;
    match error {
        E::PeerGone { .. } | E::Peer { .. } | E::GivenUp | E::GivenUpByPeer => true,
        E::Completion(failed) => failed.syndrome == Syndrome::RETRY_EXC_ERR,
        E::QpStopped { reason, .. } | E::Rank { reason, .. } => is_peer_lost(reason),
        _ => false,
    }
}

/// Whether a queue pair was ended by the rank at its other end, which lives.
pub(crate) fn is_given_up_by_peer(error: &gdsync::Error) -> bool {
    use gdsync::Error as E;
    match error {
        E::GivenUpByPeer => true,
        E::QpStopped { reason, .. } | E::Rank { reason, .. } => is_given_up_by_peer(reason),
        _ => false,
    }
}

/// Whether a failed collective ended the connection, here or at the other rank.
pub(crate) fn is_aborted(error: &gdsync::Error) -> bool {
    use gdsync::Error as E;
    match error {
        E::Aborted { .. } => true,
        E::QpStopped { reason, .. } | E::Rank { reason, .. } => is_aborted(reason),
        _ => false,
    }
}

impl Error {
    /// Whether a rank can no longer be reached: it died, does not answer, or one of the two gave the other up.
    /// [`Communicator::lost`](crate::Communicator::lost) says which, and [`Communicator::shrink`](crate::Communicator::shrink) goes
    /// on without it. An error of the exchange ([`Error::Bootstrap`]) does not tell, but names the rank.
    pub fn is_rank_lost(&self) -> bool {
        match self {
            Self::Message { cause, .. } | Self::Device(cause) => is_peer_lost(cause),
            Self::Child { .. } => true,
            _ => false,
        }
    }

    /// The error of one of several waits that had `limit` together.
    pub(crate) fn of_waits(mut self, limit: Duration) -> Self {
        if let Self::Deadline { after, .. }
        | Self::Message { cause: gdsync::Error::Deadline { after, .. }, .. } = &mut self
        {
            *after = limit;
        }
        self
    }

    /// The error of a call of all ranks, returned again by a later one.
    pub(crate) fn of_earlier_call(mut self) -> Self {
        if let Self::Deadline { what, .. } | Self::Bootstrap { what, .. } = &mut self {
            *what = format!("an earlier call of all ranks has failed: {what}");
        }
        self
    }

    /// The error of a process that has joined its job before.
    pub(crate) fn of_second_init(self) -> Self {
        match self {
            Self::Deadline { what, .. } | Self::Bootstrap { what, .. } => Self::launch(
                format!("this process has joined its job already, and the other ranks join none ({what})"),
                SECOND_INIT,
            ),
            other => other,
        }
    }

    /// Whether a queue or a stream has no room now.
    pub(crate) fn is_full(&self) -> bool {
        use gdsync::Error::{QueueFull, StreamFull};
        matches!(self, Self::Message { cause, .. } | Self::Device(cause) if matches!(cause, QueueFull { .. } | StreamFull { .. }))
    }

    /// The text of [`Error::Collective`].
    pub(crate) fn describe_collective(call: &str, rank: usize, what: &str, fix: &str) -> String {
        format!("rank {rank} {what} where this rank called {call}; {fix}")
    }

    pub(crate) fn message(rank: usize, operation: &'static str, cause: gdsync::Error) -> Self {
        Self::Message { rank, operation, cause: without_rank(cause), bytes: None, room: None }
    }

    pub(crate) fn launch(what: impl Into<String>, fix: &'static str) -> Self {
        // It names what variables say.
        Self::Launch { what: printable(&what.into()), fix }
    }

    pub(crate) fn bootstrap(peer: impl Into<String>, what: impl Into<String>, fix: &'static str) -> Self {
        Self::Bootstrap { peer: peer.into(), what: what.into(), cause: None, fix }
    }

    pub(crate) fn bootstrap_os(
        peer: impl Into<String>,
        what: impl Into<String>,
        cause: io::Error,
        fix: &'static str,
    ) -> Self {
        Self::Bootstrap { peer: peer.into(), what: what.into(), cause: Some(Arc::new(cause)), fix }
    }

    pub(crate) fn spawn(what: impl Into<String>, cause: io::Error, fix: &'static str) -> Self {
        Self::Spawn { what: what.into(), cause: Some(Arc::new(cause)), fix }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gdsync::Error as E;
    use gdsync::verbs::CompletionError;

    use super::*;

    fn message(cause: E) -> Error {
        Error::message(3, "send", cause)
    }

    #[test]
    fn waits_together_name_the_limit_of_all() {
        let late = |what: &str| E::late(what, Duration::from_micros(3), "a message");
        for error in [
            message(late("waiting for a completion")),
            Error::Deadline { what: "x".into(), after: Duration::ZERO, fix: "" },
        ] {
            let text = error.of_waits(Duration::from_millis(20)).to_string();
            assert!(text.contains("within 20 ms"), "{text}");
        }
    }

    /// The sentences of failed messages: which peer, what, why, and what to do; the queue pair last.
    #[test]
    fn messages_say_which_rank_what_why_and_what_to_do() {
        let late =
            |awaited| E::late("waiting for a completion", Duration::from_nanos(9_999_999_750), awaited);
        let failed = |syndrome| E::from(CompletionError::new(7, None, syndrome));
        let full = E::QueueFull { queue: "send queue", qpn: 7, outstanding: 514, depth: 512, untaken: 0 };
        let gone = E::QpStopped { qpn: 7, reason: Arc::new(E::PeerGone { qpn: 7 }) };
        let broken = "The connection is broken for good: only Communicator::shrink makes a new one";
        for (error, says) in [
            (
                Error::message(
                    1,
                    "receive",
                    late("a message from rank 1 (receive 3 of QP 0x7); see that it sends it"),
                ),
                &[
                    "receive from rank 1: not complete within 10 s: it waits for a message from rank 1 (receive 3 of QP 0x7); see \
                     that it sends it, or allow more time",
                ][..],
            ),
            (
                Error::message(1, "send", full),
                &["send to rank 1: the send queue is full (512 of 512 in use)", "depth; QP 0x7"],
            ),
            (
                Error::message(1, "send on stream", gone),
                &["stream to rank 1: ", "Communicator::shrink); QP 0x7"],
            ),
            (
                Error::Message {
                    rank: 1,
                    operation: "receive",
                    cause: failed(Syndrome::LOC_LEN_ERR),
                    bytes: NonZeroU32::new(16),
                    room: NonZeroU32::new(8),
                },
                &[
                    "receive from rank 1 of 16 bytes into 8: ",
                    "longer than its receive",
                    "mp::tagged",
                    broken,
                ],
            ),
            (
                Error::Message {
                    rank: 1,
                    operation: "send",
                    cause: failed(Syndrome::REM_INV_REQ_ERR),
                    bytes: NonZeroU32::new(16),
                    room: None,
                },
                &["send to rank 1 of 16 bytes: ", "longer than its receive there", "mp::tagged", broken],
            ),
        ] {
            let text = error.to_string();
            assert!(says.iter().all(|words| text.contains(words)), "{text}");
            assert!(!text.contains("514") && !text.contains("connect it again"), "{text}");
        }
    }

    #[test]
    fn ranks_below_zero_are_shown_as_that() {
        let text = Error::NoSuchRank { rank: 1usize.wrapping_sub(3), size: 2 }.to_string();
        assert!(
            text.ends_with(
                "there is no rank -2 (it was computed below 0): the communicator has ranks 0 to 1"
            )
        );
        let text = Error::NoSuchRank { rank: 7, size: 2 }.to_string();
        assert!(text.ends_with("there is no rank 7: the communicator has ranks 0 to 1"), "{text}");
    }

    #[test]
    fn errors_of_streams_that_know_the_rank_are_of_a_message() {
        let error = E::Rank { rank: 2, reason: Arc::new(E::PeerGone { qpn: 7 }) };
        let text = error.to_string();
        assert!(
            text.contains(" to rank 2: ") && text.ends_with("QP 0x7") && text.contains("shrink"),
            "{text}"
        );
        let error = Error::from(error);
        assert!(matches!(error, Error::Message { rank: 2, cause: E::PeerGone { .. }, .. }), "{error}");
        assert!(error.is_rank_lost());
    }

    #[test]
    fn lost_ranks_have_many_errors() {
        let failed = |syndrome| E::from(CompletionError::new(7, None, syndrome));
        let stopped = |reason| E::QpStopped { qpn: 7, reason: Arc::new(reason) };
        let lost = [
            failed(Syndrome::RETRY_EXC_ERR),
            stopped(failed(Syndrome::RETRY_EXC_ERR)),
            E::PeerGone { qpn: 7 },
            stopped(E::GivenUpByPeer),
            E::GivenUp,
        ];
        let other = [
            failed(Syndrome::LOC_LEN_ERR),
            stopped(failed(Syndrome::REM_INV_REQ_ERR)),
            stopped(E::Aborted { why: String::new() }),
            E::Reset { qpn: 7 },
        ];
        for (errors, is_lost) in [(&lost[..], true), (&other[..], false)] {
            for error in errors {
                assert_eq!(message(error.clone()).is_rank_lost(), is_lost, "{error}");
                assert_eq!(Error::from(error.clone()).is_rank_lost(), is_lost, "{error}");
            }
        }
        assert!(!Error::Cancelled.is_rank_lost());
    }

    #[test]
    fn the_text_has_the_cause_and_source_has_not() {
        let error = Error::spawn("start rank 1", io::ErrorKind::NotFound.into(), "check the path");
        assert!(
            error.to_string().ends_with("spawn: start rank 1: entity not found; check the path"),
            "{error}"
        );
        assert_eq!(format!("{error:?}"), error.to_string());
        assert!(std::error::Error::source(&error).is_none());
        assert!(std::error::Error::source(&message(E::GivenUp)).is_none());
    }
}
