//! The errors of this crate: what failed, why, and what the user can do about it.

use std::io;
use std::ops::Range;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use gdsync::error::printable;
use gdsync::mlx5::Syndrome;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// The errors of this crate. Cheap to clone, as sticky errors are returned again and again. The text has the cause; there is no
/// [`source`](std::error::Error::source).
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The variables of the launcher are missing, malformed or contradictory.
    #[error("launch: {what}; {fix}")]
    Launch {
        /// The variable, its value, and what is wrong with it.
        what: String,
        /// What the user can do.
        fix: &'static str,
    },
    /// The exchange of addresses between the ranks failed.
    #[error("bootstrap: {peer}: {what}{}; {fix}", suffix(.cause))]
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
    #[error("{what}: not done within {after:?}; look at what is named here first, or allow more time")]
    Deadline {
        /// The operation, and the late ranks.
        what: String,
        /// The time limit.
        after: Duration,
    },
    /// A child process or a thread could not be started or controlled.
    #[error("spawn: {what}{}; {fix}", suffix(.cause))]
    Spawn {
        /// What was tried.
        what: String,
        /// The error of the system call that failed, if one did.
        cause: Option<Arc<io::Error>>,
        /// What the user can do.
        fix: &'static str,
    },
    /// A child process failed; the others were stopped.
    #[error("rank {rank} ended with {status}; its own output says why")]
    Child {
        /// The rank of the child.
        rank: usize,
        /// Its exit code or signal.
        status: ExitStatus,
    },
    /// There is no such rank.
    #[error("rank {rank} does not exist: the communicator has ranks 0 to {}", size - 1)]
    NoSuchRank {
        /// The rank asked for.
        rank: usize,
        /// The number of ranks.
        size: usize,
    },
    /// A receive is given memory that an outstanding receive may still write.
    #[error(
        "the receive from {} into bytes {range:?} of its buffer overlaps the outstanding receive from {} into bytes {other_range:?} of \
         its buffer, and a posted receive is active at once; give each its own bytes, wait for the earlier one first, or receive in stream \
         order: Communicator::recv_on_stream",
        from(.rank),
        from(.other_rank)
    )]
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
    /// An access would leave the window of a rank.
    #[error(
        "{operation} of {len} bytes at offset {offset} leaves the window of rank {rank}, which has {size} bytes"
    )]
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
    #[error("{operation} with rank {rank}: {}", reason(.cause))]
    Message {
        /// The rank at the other end.
        rank: usize,
        /// What was tried.
        operation: &'static str,
        /// Why.
        cause: gdsync::Error,
    },
    /// A rank called another collective, or with another size.
    #[error(
        "{operation} with rank {rank}: {what}; let all ranks call the same collectives with the same sizes, in one order"
    )]
    Collective {
        /// The collective of this rank.
        operation: &'static str,
        /// The rank at the other end.
        rank: usize,
        /// What is wrong.
        what: String,
    },
    /// A message does not fit into the receive that it matched. It is lost; nothing else is.
    #[error(
        "the message of {bytes} bytes from rank {rank} with tag {tag:#x} does not fit into the {room} bytes of its receive; \
         ask for its size first (Tagged::improbe), or receive into more"
    )]
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
    #[error("the receive was cancelled before a message matched it; start another one")]
    Cancelled,
    /// The layer below failed.
    #[error(transparent)]
    Device(#[from] gdsync::Error),
}

fn suffix(cause: &Option<Arc<io::Error>>) -> String {
    cause.as_ref().map(|error| format!(": {error}")).unwrap_or_default()
}

fn from(rank: &Option<usize>) -> String {
    rank.map_or_else(|| "any rank".to_owned(), |rank| format!("rank {rank}"))
}

/// The cause of a failed message, with advice in terms of ranks in place of queue pairs.
fn reason(cause: &gdsync::Error) -> String {
    use gdsync::Error as E;
    match cause {
        E::PeerGone { qpn } => {
            format!("QP {qpn:#x}: the process of the rank is gone; go on without it: Communicator::shrink")
        }
        E::QueueFull { queue, qpn, outstanding, depth, .. } => format!(
            "the {queue} of QP {qpn:#x} is full ({outstanding} of {depth} under way); wait for requests, or build with a larger \
             CommunicatorBuilder::depth"
        ),
        E::Busy { queue, qpn, owner } => format!(
            "the {queue} queue of QP {qpn:#x} still belongs to {owner}; wait for the requests of that first"
        ),
        E::QpStopped { qpn, reason: why } => format!("QP {qpn:#x} was stopped: {}", reason(why)),
        other => other.to_string(),
    }
}

/// Whether a queue pair failed because the other side cannot be reached.
fn is_peer_lost(error: &gdsync::Error) -> bool {
    use gdsync::Error as E;
    match error {
        E::PeerGone { .. } | E::Peer { .. } | E::GivenUp | E::GivenUpByPeer => true,
        E::Completion(failed) => failed.syndrome == Syndrome::RETRY_EXC_ERR,
        E::QpStopped { reason, .. } => is_peer_lost(reason),
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
        Error::Message { rank: 3, operation: "send", cause }
    }

    #[test]
    fn advice_is_in_terms_of_ranks() {
        let full = E::QueueFull { queue: "send queue", qpn: 7, outstanding: 8, depth: 8, untaken: 0 };
        let stopped = E::QpStopped { qpn: 7, reason: Arc::new(E::PeerGone { qpn: 8 }) };
        for (error, advice) in [
            (full, "CommunicatorBuilder::depth"),
            (E::PeerGone { qpn: 7 }, "Communicator::shrink"),
            (stopped, "Communicator::shrink"),
        ] {
            let below = error.to_string();
            let text = message(error).to_string();
            assert!(text.contains("rank 3") && text.contains("QP 0x7") && text.contains(advice), "{text}");
            assert!(!text.contains(below.split_once("; ").unwrap().1), "{text}");
        }
    }

    #[test]
    fn lost_ranks_have_many_errors() {
        let failed = |syndrome| {
            E::from(CompletionError {
                qpn: 7,
                wr_id: 0,
                operation: None,
                syndrome,
                vendor: 0,
                deregistered: false,
            })
        };
        let stopped = |reason| E::QpStopped { qpn: 7, reason: Arc::new(reason) };
        let lost = [
            failed(Syndrome::RETRY_EXC_ERR),
            stopped(failed(Syndrome::RETRY_EXC_ERR)),
            E::PeerGone { qpn: 7 },
            stopped(E::GivenUpByPeer),
            E::GivenUp,
        ];
        let other =
            [failed(Syndrome::LOC_LEN_ERR), stopped(failed(Syndrome::REM_INV_REQ_ERR)), E::Reset { qpn: 7 }];
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
        assert_eq!(error.to_string(), "spawn: start rank 1: entity not found; check the path");
        assert!(std::error::Error::source(&error).is_none());
        assert!(std::error::Error::source(&message(E::GivenUp)).is_none());
    }
}
