//! The errors of this crate: what failed, why, and what the user can do about it.

use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use mlx5_ring::{Opcode, Syndrome, WqeError};

use crate::{QpState, own_rank};

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Error of this crate. Cheap to clone, because a failed queue pair or stream returns the same error from all calls. `{:?}` prints the
/// same text as `{}`.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is invalid.
    #[error("{what} is {value}: expected {expected}")]
    InvalidArgument {
        /// The argument.
        what: &'static str,
        /// Its value.
        value: String,
        /// The accepted values.
        expected: &'static str,
    },
    /// An access outside the memory.
    #[error("{len} bytes at offset {offset} do not fit in a memory of {size} bytes")]
    OutOfBounds {
        /// Offset of the access.
        offset: usize,
        /// Its length.
        len: usize,
        /// Size of the memory.
        size: usize,
    },
    /// A system call failed.
    #[error("{call}: {source}; {fix}")]
    Sys {
        /// The call.
        call: &'static str,
        /// The error of the system.
        source: Arc<io::Error>,
        /// What the user can do about it.
        fix: &'static str,
    },
    /// CUDA, or the mapping of GPU memory, failed.
    #[error("{what}: {source}")]
    Cuda {
        /// What failed.
        what: &'static str,
        /// The error, with what the user can do.
        source: Arc<gdrcopy::Error>,
    },
    /// GPU memory without a mapping for the CPU.
    #[error(
        "the CPU cannot reach the GPU memory at {addr:#x}: {why}; keep words and rings in memory of cudaMalloc, and copy \
         payload there with CUDA"
    )]
    NotMapped {
        /// Its address on the GPU.
        addr: u64,
        /// The reason.
        why: String,
    },
    /// No device has this name.
    #[error(
        "no RDMA device '{name}'; available: {available}; name one of these, in GDSYNC_DEVICE or to Device::find"
    )]
    NoDevice {
        /// The requested name.
        name: String,
        /// The names of the devices.
        available: String,
    },
    /// A library of rdma-core, or a function of it, is missing.
    #[error(transparent)]
    Library(#[from] rdma_core_sys::LoadError),
    /// A call of libibverbs or libmlx5 failed.
    #[error("{call} for {subject}: {source}; {advice}")]
    Verbs {
        /// The call.
        call: &'static str,
        /// The object it was called for.
        subject: String,
        /// The error of the library.
        source: Arc<io::Error>,
        /// What it means, and what the user can change.
        advice: String,
    },
    /// An RDMA device cannot be used as requested.
    #[error("{device} cannot be used: {why}")]
    Device {
        /// The device.
        device: String,
        /// The reason, and what the user can do.
        why: String,
    },
    /// The transport of the device is not supported.
    #[error(
        "{device} speaks {transport}, which is not supported; use an InfiniBand or RoCE device, or soft0 (GDSYNC_DEVICE)"
    )]
    UnsupportedTransport {
        /// The device.
        device: String,
        /// Its transport.
        transport: &'static str,
    },
    /// The device or this release does not support a feature.
    #[error("{what} is not supported by {by}; {fix}")]
    Unsupported {
        /// The feature.
        what: &'static str,
        /// What lacks it.
        by: &'static str,
        /// What to use instead.
        fix: &'static str,
    },
    /// A transition of a queue pair is not allowed, or its attributes are wrong.
    #[error("QP {qpn:#x}: cannot go from {from} to {to}: {why}")]
    Transition {
        /// The queue pair.
        qpn: u32,
        /// Its state.
        from: QpState,
        /// The requested state.
        to: QpState,
        /// The rule that it breaks.
        why: String,
    },
    /// The operation needs another queue pair state.
    #[error("QP {qpn:#x} is in state {state}: {what} needs {needs}")]
    WrongState {
        /// The queue pair.
        qpn: u32,
        /// Its state.
        state: QpState,
        /// The operation.
        what: &'static str,
        /// The states that allow it.
        needs: &'static str,
    },
    /// A work request cannot be encoded as a WQE.
    #[error("QP {qpn:#x}: {source}")]
    WorkRequest {
        /// The queue pair.
        qpn: u32,
        /// The reason.
        source: WqeError,
    },
    /// The queue is full.
    #[error(
        "{queue} of QP {qpn:#x} is full ({} of {depth} entries in use{}); \
         take completions (poll, or wait on the stream and let it pass) and wait with {}",
        outstanding + untaken,
        not_taken(*.untaken),
        room_advice(queue)
    )]
    QueueFull {
        /// Send queue or receive queue, or its completion queue.
        queue: &'static str,
        /// The queue pair.
        qpn: u32,
        /// Entries in use by outstanding requests. In a send queue a request takes one for each 64 bytes.
        outstanding: u64,
        /// The number of its entries.
        depth: u64,
        /// Slots of the completion queue used by completions that were not polled, and by other queues that share it.
        untaken: u64,
    },
    /// A wait without an outstanding work request to wait for.
    #[error(
        "QP {qpn:#x}: no {queue} work request is left to wait for; post it before the wait, or the stream would hang"
    )]
    NothingToWaitFor {
        /// "send" or "receive".
        queue: &'static str,
        /// The queue pair.
        qpn: u32,
    },
    /// A wait of a graph would not match the completion it was captured for.
    #[error(
        "the graph waits for its sends on the {queue} queue of QP {qpn:#x} in another way than when it was captured; \
         poll or wait for what was sent there before the launch, as it was then"
    )]
    GraphWaits {
        /// "send" or "receive".
        queue: &'static str,
        /// The queue pair.
        qpn: u32,
    },
    /// The queue is in use by another stream or by the CPU.
    #[error(
        "the {queue} queue of QP {qpn:#x} still belongs to {owner}; \
         let its outstanding work complete first, or use one QP per stream"
    )]
    Busy {
        /// "send" or "receive".
        queue: &'static str,
        /// The queue pair.
        qpn: u32,
        /// The owner.
        owner: String,
    },
    /// A prepared request was posted before an earlier one.
    #[error(
        "QP {qpn:#x}: prepared request {got} was posted before {expected}; post in prepare order, or drop the earlier one"
    )]
    OutOfOrder {
        /// The queue pair.
        qpn: u32,
        /// The request that must be posted first.
        expected: u64,
        /// The request that was posted.
        got: u64,
    },
    /// A work request failed, or was flushed after an earlier one failed.
    #[error(transparent)]
    Completion(#[from] CompletionError),
    /// The peer process is gone. The software HCA reports this at once; with cards, sends time out instead.
    #[error("QP {qpn:#x}: the process at its other end is gone; connect it again when there is one")]
    PeerGone {
        /// The queue pair.
        qpn: u32,
    },
    /// A CQE does not match the state of the queue; the queue cannot be used any more.
    #[error(
        "the {queue} queue of QP {qpn:#x} got a CQE for WQE {counter:#x} (format {format}) where {expected:#x} was next; \
         check that nobody else uses the queue, and that CQE compression and scatter-to-CQE are off"
    )]
    UnexpectedCqe {
        /// The queue pair.
        qpn: u32,
        /// "send" or "receive".
        queue: &'static str,
        /// The WQE that the CQE names.
        counter: u16,
        /// The WQE expected.
        expected: u16,
        /// Location of the payload according to the CQE; 0 is memory.
        format: u8,
    },
    /// The library moved the queue pair to ERR.
    #[error("QP {qpn:#x} was stopped: {reason}")]
    QpStopped {
        /// The queue pair.
        qpn: u32,
        /// The reason.
        reason: Arc<Error>,
    },
    /// The completion succeeded, but its details were overwritten.
    #[error(
        "QP {qpn:#x}: the completion succeeded, its details are forgotten; ask before the queue goes once round"
    )]
    Forgotten {
        /// The queue pair.
        qpn: u32,
    },
    /// The queue pair was reset before the work request completed.
    #[error("QP {qpn:#x} was reset before the work request completed; post it again")]
    Reset {
        /// The queue pair.
        qpn: u32,
    },
    /// The work request was taken back before it was submitted.
    #[error(
        "QP {qpn:#x}: the work request was taken back, as its batch or prepared send was dropped; it will never complete"
    )]
    TakenBack {
        /// The queue pair.
        qpn: u32,
    },
    /// The stream has the maximum number of pending submissions.
    #[error(
        "{} is full ({depth} submissions pending); synchronize, wait longer for room (Stream::with_timeout), or raise \
         the depth of its configuration",
        stream_label(stream)
    )]
    StreamFull {
        /// The stream.
        stream: String,
        /// The maximum.
        depth: usize,
    },
    /// The application ended the connection to the peer.
    #[error("the application gave the peer up")]
    GivenUp,
    /// The peer ended the connection.
    #[error(
        "the peer ended the connection: work of a stream there failed, it gave this one up, or it left; its own output says which"
    )]
    GivenUpByPeer,
    /// What uses the connection ended it, though both ends are alive: a call over several connections failed, at this end or at the
    /// peer, or its owner was dropped.
    #[error("{why}")]
    Aborted {
        /// What ended it, and what the user can do.
        why: String,
    },
    /// What failed is the connection to a rank: see `Qp::name_ranks`.
    #[error("connection{} to rank {rank}: {}", own_rank_label(), reason.of_rank())]
    Rank {
        /// The rank at the other end.
        rank: u32,
        /// The failure of the queue pair.
        reason: Arc<Error>,
    },
    /// The stream was aborted, by `Stream::abort` or because a panic dropped it.
    #[error("{} was aborted, by Stream::abort or by a panic that dropped it", stream_label(stream))]
    StreamAborted {
        /// The stream.
        stream: String,
    },
    /// A wait on a stream was not satisfied in time. The stream was released and does no more work.
    #[error("{} waited {} for {what}, or raise its wait_limit", stream_label(stream), rounded(*.after))]
    StreamWait {
        /// The stream.
        stream: String,
        /// What the wait was for, and what the user can do.
        what: String,
        /// The time limit of the wait.
        after: Duration,
    },
    /// A host function on the stream panicked. The stream does no more work.
    #[error("{}: a host function panicked: {message}", stream_label(stream))]
    HostFnPanicked {
        /// The stream.
        stream: String,
        /// The panic's message.
        message: String,
    },
    /// A blocking call did not finish in time. What it waited for goes on.
    #[error("{what} did not finish within {}: it waits for {awaited}", rounded(*.after))]
    Deadline {
        /// The call.
        what: String,
        /// Its time limit.
        after: Duration,
        /// What it waits for, and what the user can do.
        awaited: String,
    },
    /// A thread of this library panicked, with a message on standard error.
    #[error(
        "the thread '{thread}' of gdsync panicked, and what it served does no more work; its message is on standard error: \
         please report it, then open the device again"
    )]
    Panicked {
        /// The thread.
        thread: &'static str,
    },
    /// An object was used in a process that did not create it.
    #[error(
        "made by process {owner}, used by process {caller}; a forked child must open the device and make its streams itself"
    )]
    OtherProcess {
        /// The process that created it.
        owner: u32,
        /// The calling process.
        caller: u32,
    },
    /// The peer of a connection cannot be reached.
    #[error("peer {peer}: {why}")]
    Peer {
        /// The peer's address.
        peer: String,
        /// What happened, and what the user can do.
        why: String,
    },
}

/// As `Display`, so that `main` and `unwrap` print what failed and what to do.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A stream as errors name it: `stream 'halo'`, or `stream 3` for one without a name, which has its number as its name; with the
/// rank of the process, if it is one.
pub fn stream_label(name: &str) -> String {
    let quote = if name.bytes().all(|byte| byte.is_ascii_digit()) { "" } else { "'" };
    format!("stream {quote}{name}{quote}{}", own_rank_label())
}

/// Whose a stream or a connection is.
fn own_rank_label() -> String {
    own_rank::get().map_or_else(String::new, |rank| format!(" of rank {rank}"))
}

/// How to wait for room in a queue of this name, and how to have more.
fn room_advice(queue: &str) -> &'static str {
    if queue.starts_with("receive") {
        "Qp::wait_recv_room, or raise QpBuilder::max_recv_wr"
    } else {
        "Qp::wait_send_room, or raise QpBuilder::max_send_wr"
    }
}

/// Explains a full queue to callers that wait on the CPU and never poll.
fn not_taken(untaken: u64) -> String {
    match untaken {
        0 => String::new(),
        n => format!(
            "; {n} completed and not taken, or of other queues: poll_send, poll_recv, Cq::drain and waits of streams take, \
             Completion::wait only looks"
        ),
    }
}

impl Error {
    /// An [`Error::InvalidArgument`].
    pub fn invalid(what: &'static str, value: impl ToString, expected: &'static str) -> Self {
        Self::InvalidArgument { what, value: value.to_string(), expected }
    }

    /// The text for the connection to a rank: advises in terms of ranks, and names the queue pair last.
    pub fn of_rank(&self) -> String {
        match self {
            Self::PeerGone { qpn } => {
                format!("its process is gone; go on without it (Communicator::shrink); QP {qpn:#x}")
            }
            Self::GivenUp => format!(
                "{self}; go on without it (Communicator::shrink), and after a shrink with windows and channels of the new communicator"
            ),
            Self::GivenUpByPeer => format!("{self}; go on without it (Communicator::shrink)"),
            Self::QueueFull { queue, qpn, outstanding, depth, untaken } => format!(
                "the {queue} is full ({} of {depth} in use); wait for requests, or raise CommunicatorBuilder::depth; QP {qpn:#x}",
                (outstanding + untaken).min(*depth)
            ),
            Self::Busy { queue, qpn, owner } if owner == "the CPU" => format!(
                "the {queue} queue still belongs to the CPU: wait for the requests of its messages with that rank first, and submit or drop \
                 batches; QP {qpn:#x}"
            ),
            Self::Busy { queue, qpn, owner } => format!(
                "the {queue} queue still belongs to {owner}; synchronize that first, or wait for its requests; QP {qpn:#x}"
            ),
            Self::OutOfOrder { qpn, .. } => format!(
                "an earlier message was prepared or added to a batch, and is not posted: post messages, and submit batches, in the order \
                 in which they were made, or drop the earlier one; QP {qpn:#x}"
            ),
            Self::QpStopped { reason, .. } => format!("the connection was ended: {}", reason.of_rank()),
            Self::Rank { reason, .. } => reason.of_rank(),
            Self::Completion(error) => error.of_rank(),
            other => other.to_string(),
        }
    }

    /// An [`Error::Deadline`].
    pub fn late(what: impl Into<String>, after: Duration, awaited: impl Into<String>) -> Self {
        Self::Deadline { what: what.into(), after, awaited: awaited.into() }
    }

    /// Whether a resource that registrations use is exhausted: locked memory, keys, or the GPU's BAR1. With fewer registrations the
    /// call may succeed.
    pub fn is_exhausted(&self) -> bool {
        match self {
            Self::Verbs { source, .. } | Self::Sys { source, .. } => {
                matches!(source.raw_os_error(), Some(libc::ENOMEM | libc::ENOSPC | libc::EAGAIN))
            }
            Self::Cuda { source, .. } => matches!(**source, gdrcopy::Error::Exhausted { .. }),
            _ => false,
        }
    }

    /// The nearest error number of `errno.h`, for interfaces in C. Full queues and streams are `ENOMEM`, as in libibverbs.
    pub fn errno(&self) -> i32 {
        let known = |number: Option<i32>| number.filter(|&number| number > 0).unwrap_or(libc::EIO);
        match self {
            Self::InvalidArgument { .. }
            | Self::OutOfBounds { .. }
            | Self::NotMapped { .. }
            | Self::Transition { .. }
            | Self::WrongState { .. }
            | Self::WorkRequest { .. }
            | Self::NothingToWaitFor { .. }
            | Self::OutOfOrder { .. }
            | Self::UnexpectedCqe { .. } => libc::EINVAL,
            Self::Sys { source, .. } | Self::Verbs { source, .. } => known(source.raw_os_error()),
            Self::Cuda { source, .. } => known(Some(source.errno())),
            Self::NoDevice { .. } | Self::Library(_) | Self::Device { .. } => libc::ENODEV,
            Self::UnsupportedTransport { .. } | Self::Unsupported { .. } | Self::GraphWaits { .. } => {
                libc::EOPNOTSUPP
            }
            Self::QueueFull { .. } | Self::StreamFull { .. } => libc::ENOMEM,
            Self::Busy { .. } => libc::EBUSY,
            Self::PeerGone { .. }
            | Self::Peer { .. }
            | Self::GivenUp
            | Self::GivenUpByPeer
            | Self::Aborted { .. } => libc::ECONNRESET,
            Self::QpStopped { reason, .. } | Self::Rank { reason, .. } => reason.errno(),
            Self::StreamAborted { .. } => libc::ECANCELED,
            Self::StreamWait { .. } | Self::Deadline { .. } => libc::ETIMEDOUT,
            Self::OtherProcess { .. } => libc::EACCES,
            Self::Completion(_)
            | Self::Forgotten { .. }
            | Self::Reset { .. }
            | Self::TakenBack { .. }
            | Self::HostFnPanicked { .. }
            | Self::Panicked { .. } => libc::EIO,
        }
    }

    /// Maps errors of CUDA to [`Error::Cuda`].
    pub fn cuda(what: &'static str) -> impl Fn(gdrcopy::Error) -> Self {
        move |source| Self::Cuda { what, source: Arc::new(source) }
    }

    /// An [`Error::Sys`] from `errno`.
    pub fn last_os(call: &'static str, fix: &'static str) -> Self {
        Self::os(call, io::Error::last_os_error(), fix)
    }

    /// An [`Error::Sys`].
    pub fn os(call: &'static str, source: io::Error, fix: &'static str) -> Self {
        Self::Sys { call, source: Arc::new(source), fix }
    }
}

/// A duration as people say it: rounded to milliseconds, or to tenths of a second.
pub fn rounded(time: Duration) -> String {
    let micros = time.as_nanos().div_ceil(1000);
    let round = |unit: u128| (micros + unit / 2) / unit;
    match micros {
        0..1_000 => format!("{micros} us"),
        1_000..999_500 => format!("{} ms", round(1_000)),
        _ => match (round(100_000) / 10, round(100_000) % 10) {
            (seconds, 0) => format!("{seconds} s"),
            (seconds, tenths) => format!("{seconds}.{tenths} s"),
        },
    }
}

/// Escapes control and format characters in a text of another process or user, which could control a terminal or hide other text.
pub fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\'' | '"' | '\\' => out.push(c),
            _ => out.extend(c.escape_debug()),
        }
    }
    out
}

/// A work request that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletionError {
    /// The queue pair.
    pub qpn: u32,
    /// The `wr_id` of the work request.
    pub wr_id: u64,
    /// The opcode of a send; `None` for a receive.
    pub operation: Option<Opcode>,
    /// The syndrome.
    pub syndrome: Syndrome,
    /// The vendor code; 0 from the software HCA.
    pub vendor: u8,
    /// Bytes of the request: of a receive its room. 0 where they are not known.
    pub bytes: u32,
    /// A memory region that the request names was deregistered while it was under way.
    pub deregistered: bool,
}

impl CompletionError {
    /// A failure with a syndrome, of no known request.
    pub fn new(qpn: u32, operation: Option<Opcode>, syndrome: Syndrome) -> Self {
        Self { qpn, wr_id: 0, operation, syndrome, vendor: 0, bytes: 0, deregistered: false }
    }

    /// Whether the request was flushed, because an earlier failure or the user moved the queue pair to ERR.
    pub fn is_flush(&self) -> bool {
        self.syndrome == Syndrome::WR_FLUSH_ERR
    }

    /// Whether the peer allows no such request: its queue pair or its memory has no right for it.
    pub fn is_refusal(&self) -> bool {
        [Syndrome::REM_INV_REQ_ERR, Syndrome::REM_ACCESS_ERR].contains(&self.syndrome)
    }

    /// As [`Error::of_rank`].
    fn of_rank(&self) -> String {
        let Self { qpn, syndrome, bytes, .. } = *self;
        let bytes = if bytes == 0 { String::new() } else { format!(" of {bytes} bytes") };
        let why = match syndrome {
            Syndrome::RETRY_EXC_ERR => {
                "it does not answer: its process or host is gone, or the network is down; go on without it (Communicator::shrink)".into()
            }
            Syndrome::LOC_LEN_ERR => format!(
                "the message is longer than its receive{bytes} (messages match receives in the order of the calls); receive into more, or \
                 use mp::tagged for unknown lengths. The connection is broken for good: only Communicator::shrink makes a new one"
            ),
            Syndrome::REM_INV_REQ_ERR if self.operation.is_none_or(|opcode| opcode == Opcode::SEND) => format!(
                "the message{bytes} is longer than its receive there; send less, or use mp::tagged for unknown lengths. The \
                 connection is broken for good: only Communicator::shrink makes a new one"
            ),
            Syndrome::WR_FLUSH_ERR => {
                "an earlier failure of the connection ended it; look for the first error".into()
            }
            Syndrome::COPY_TIMEOUT => late_copy(self.bytes),
            _ => return self.to_string(),
        };
        format!("{why}; {syndrome} at QP {qpn:#x}")
    }
}

impl std::error::Error for CompletionError {}

impl fmt::Display for CompletionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QP {:#x}: ", self.qpn)?;
        match self.operation {
            Some(opcode) => write!(f, "{opcode}")?,
            None => f.write_str("receive")?,
        }
        write!(f, " with wr_id {} failed: {}, vendor code {:#x}", self.wr_id, self.syndrome, self.vendor)?;
        match self.syndrome {
            Syndrome::COPY_TIMEOUT => write!(f, "; {}", late_copy(self.bytes)),
            Syndrome::LOC_PROT_ERR if self.deregistered => write!(f, "; {DEREGISTERED}"),
            syndrome => write!(f, "; {}", hint(syndrome)),
        }
    }
}

const DEREGISTERED: &str = "its memory region was deregistered while the request was under way: keep the Mr, or an MrGuard of it, until \
     the request completes";

/// Why a copy of payload is late, and what to do.
fn late_copy(bytes: u32) -> String {
    let message = if bytes == 0 { String::new() } else { format!(" of up to {bytes} bytes") };
    format!(
        "the copy of a message{message} did not end in time (10 s by default), as other work holds up the GPU. CUDA runs nothing else of a \
         process while one of its streams waits for a message, if a kernel that was never launched before or a copy of memory that is \
         not pinned is queued behind the wait, or if as many streams wait as CUDA_DEVICE_MAX_CONNECTIONS (8): launch each kernel once \
         before, copy pinned memory, or set the variable to 32"
    )
}

/// What to check first.
fn hint(syndrome: Syndrome) -> &'static str {
    match syndrome {
        Syndrome::LOC_LEN_ERR => {
            "the message is longer than the buffers of the receive, or than the device allows"
        }
        Syndrome::LOC_QP_OP_ERR => "the work request is malformed or not allowed on this queue pair",
        Syndrome::LOC_PROT_ERR => {
            "the memory region was dropped too early, is of another Pd than the queue pair, lacks LOCAL_WRITE, or has another lkey or \
             range; keep it until the request is complete"
        }
        Syndrome::WR_FLUSH_ERR => {
            "an earlier failure or a stop of the queue pair flushed it; look for the first error"
        }
        Syndrome::REM_INV_REQ_ERR => {
            "the peer's receive was too short, or the operation is not enabled or misaligned there"
        }
        Syndrome::REM_ACCESS_ERR => {
            "check rkey, range and access rights of the peer's memory region and queue pair"
        }
        Syndrome::REM_OP_ERR => "the peer failed while handling the request; look at its error",
        Syndrome::RETRY_EXC_ERR => {
            "the peer does not answer: it died, its queue pair is gone, in error or not connected to this one, or the network is down"
        }
        Syndrome::RNR_RETRY_EXC_ERR => {
            "the peer posted no receive in time; post receives earlier, or raise rnr_retry"
        }
        _ => "see the device's documentation",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_rounded_for_people() {
        for (nanos, text) in [
            (0, "0 us"),
            (20_000, "20 us"),
            (1_000_000, "1 ms"),
            (299_999_999, "300 ms"),
            (999_000_000, "999 ms"),
            (999_999_750, "1 s"),
            (1_449_000_000, "1.4 s"),
            (9_999_999_750, "10 s"),
            (30_000_000_000, "30 s"),
        ] {
            assert_eq!(rounded(Duration::from_nanos(nanos)), text);
        }
    }

    #[test]
    fn errors_of_ranks_speak_of_ranks_and_have_the_queue_pair_last() {
        let completion = |syndrome| Error::from(CompletionError::new(7, None, syndrome));
        let rank = |reason| Error::Rank { rank: 3, reason: Arc::new(reason) }.to_string();
        let stopped = |reason| Error::QpStopped { qpn: 7, reason: Arc::new(reason) };
        let full = Error::QueueFull { queue: "send queue", qpn: 7, outstanding: 514, depth: 512, untaken: 0 };
        for (error, says) in [
            (
                Error::PeerGone { qpn: 7 },
                "rank 3: its process is gone; go on without it (Communicator::shrink)",
            ),
            (completion(Syndrome::RETRY_EXC_ERR), "go on without it (Communicator::shrink)"),
            (
                completion(Syndrome::LOC_LEN_ERR),
                "mp::tagged for unknown lengths. The connection is broken for good",
            ),
            (
                full,
                "rank 3: the send queue is full (512 of 512 in use); wait for requests, or raise CommunicatorBuilder::depth",
            ),
        ] {
            for text in [rank(error.clone()), rank(stopped(error))] {
                assert!(text.starts_with("connection to rank 3: ") && text.ends_with("QP 0x7"), "{text}");
                assert!(text.contains(says.trim_start_matches("rank 3: ")), "{text}");
                assert!(!text.contains("connect it again"), "{text}");
            }
        }
        assert!(rank(stopped(Error::GivenUp)).contains("Communicator::shrink"));
    }

    #[test]
    fn late_copies_are_named_with_their_limit_and_a_fix() {
        let late = CompletionError { bytes: 4096, ..CompletionError::new(7, None, Syndrome::COPY_TIMEOUT) };
        for text in [late.to_string(), late.of_rank()] {
            assert!(text.contains("of up to 4096 bytes did not end in time (10 s by default)"), "{text}");
            assert!(text.contains("launch each kernel once before"), "{text}");
        }
    }

    #[test]
    fn control_and_format_characters_are_escaped_and_words_are_not() {
        for (text, shown) in [
            ("/usr/bin/it's \"C:\\\" 100 %, déjà vu 東", "/usr/bin/it's \"C:\\\" 100 %, déjà vu 東"),
            ("\x1b[31mEV\x07G", "\\u{1b}[31mEV\\u{7}G"),
            ("a\r\nb\u{9b}2J\u{202e}c", "a\\r\\nb\\u{9b}2J\\u{202e}c"),
        ] {
            assert_eq!(printable(text), shown);
        }
    }
}
