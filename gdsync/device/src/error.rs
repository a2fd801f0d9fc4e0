//! The errors of this crate: what failed, why, and what the user can do about it.

use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use mlx5_ring::{Opcode, Syndrome, WqeError};

use crate::QpState;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong. Cheap to clone: sticky errors are handed out again and again. `{:?}` prints what `{}` does.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument lies outside what the call accepts.
    #[error("{what} is {value}: expected {expected}")]
    InvalidArgument {
        /// The argument.
        what: &'static str,
        /// What was passed.
        value: String,
        /// What would have been accepted.
        expected: &'static str,
    },
    /// An access would leave its memory.
    #[error("{len} bytes at offset {offset} do not fit in a memory of {size} bytes")]
    OutOfBounds {
        /// First byte of the access.
        offset: usize,
        /// Its length.
        len: usize,
        /// The size of the memory.
        size: usize,
    },
    /// A system call failed.
    #[error("{call}: {source}; {fix}")]
    Sys {
        /// The call.
        call: &'static str,
        /// What the system said.
        source: Arc<io::Error>,
        /// What the user can do.
        fix: &'static str,
    },
    /// CUDA, or the mapping of GPU memory, failed.
    #[error("{what}: {source}")]
    Cuda {
        /// What was being done.
        what: &'static str,
        /// What was said, with the fix.
        source: Arc<gdrcopy::Error>,
    },
    /// GPU memory that the CPU cannot reach.
    #[error(
        "the CPU cannot reach the GPU memory at {addr:#x}: {why}; keep words and rings in memory of cudaMalloc, and copy \
         payload there with CUDA"
    )]
    NotMapped {
        /// Its address on the GPU.
        addr: u64,
        /// Why not.
        why: String,
    },
    /// There is no such device.
    #[error(
        "no RDMA device '{name}'; available: {available}; name one of these, in GDSYNC_DEVICE or to Device::find"
    )]
    NoDevice {
        /// The name asked for.
        name: String,
        /// The names that exist.
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
        /// What it was called for.
        subject: String,
        /// What the library said.
        source: Arc<io::Error>,
        /// What that means, and what the user can change.
        advice: String,
    },
    /// An RDMA device cannot be used as asked.
    #[error("{device} cannot be used: {why}")]
    Device {
        /// The device.
        device: String,
        /// Why not, and the fix.
        why: String,
    },
    /// The device speaks a transport that this library does not.
    #[error(
        "{device} speaks {transport}, which is not supported; use an InfiniBand or RoCE device, or soft0 (GDSYNC_DEVICE)"
    )]
    UnsupportedTransport {
        /// The device.
        device: String,
        /// What it speaks.
        transport: &'static str,
    },
    /// The device, or this release, does not do this.
    #[error("{what} is not supported by {by}; {fix}")]
    Unsupported {
        /// The feature.
        what: &'static str,
        /// Who refuses.
        by: &'static str,
        /// What to use instead.
        fix: &'static str,
    },
    /// A queue pair cannot go from its state to the one asked for, or attributes are wrong for the step.
    #[error("QP {qpn:#x}: cannot go from {from} to {to}: {why}")]
    Transition {
        /// The queue pair.
        qpn: u32,
        /// Its state.
        from: QpState,
        /// The state asked for.
        to: QpState,
        /// The rule that forbids it.
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
    /// A work request cannot be written as a WQE.
    #[error("QP {qpn:#x}: {source}")]
    WorkRequest {
        /// The queue pair.
        qpn: u32,
        /// What is wrong with it.
        source: WqeError,
    },
    /// The queue has no room for another work request now.
    #[error(
        "{queue} of QP {qpn:#x} is full ({outstanding} of {depth} outstanding{}); \
         take completions (poll, or wait on the stream and let it pass), or build the QP with a larger depth",
        not_taken(*.untaken)
    )]
    QueueFull {
        /// Send queue or receive queue, or its completion queue.
        queue: &'static str,
        /// The queue pair.
        qpn: u32,
        /// What is outstanding.
        outstanding: u64,
        /// What fits.
        depth: u64,
        /// Of a completion queue: what has completed, and still has its place because nobody took it. Of one that several queues
        /// share, what those have outstanding too.
        untaken: u64,
    },
    /// A wait was asked for, but no work request is left whose completion it could wait for.
    #[error(
        "QP {qpn:#x}: no {queue} work request is left to wait for; post it before the wait, or the stream would hang"
    )]
    NothingToWaitFor {
        /// "send" or "receive".
        queue: &'static str,
        /// The queue pair.
        qpn: u32,
    },
    /// A wait of a graph would not be for the completion that it was captured for.
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
        /// Who holds it.
        owner: String,
    },
    /// Prepared requests of a queue pair must be posted in the order they were prepared.
    #[error(
        "QP {qpn:#x}: prepared request {got} was posted before {expected}; post in prepare order, or drop the earlier one"
    )]
    OutOfOrder {
        /// The queue pair.
        qpn: u32,
        /// The one that must come first.
        expected: u64,
        /// The one that was posted.
        got: u64,
    },
    /// A work request failed, or was flushed because an earlier one had.
    #[error(transparent)]
    Completion(#[from] CompletionError),
    /// The process at the other end of the queue pair is gone. The software HCA knows at once; cards learn it from sends that
    /// nobody answers.
    #[error("QP {qpn:#x}: the process at its other end is gone; connect it again when there is one")]
    PeerGone {
        /// The queue pair.
        qpn: u32,
    },
    /// A CQE is not what the queue's bookkeeping expects; nothing after it can be trusted.
    #[error(
        "the {queue} queue of QP {qpn:#x} got a CQE for WQE {counter:#x} (format {format}) where {expected:#x} was next; \
         check that nobody else uses the queue, and that CQE compression and scatter-to-CQE are off"
    )]
    UnexpectedCqe {
        /// The queue pair.
        qpn: u32,
        /// "send" or "receive".
        queue: &'static str,
        /// The WQE the CQE names.
        counter: u16,
        /// The WQE that was next.
        expected: u16,
        /// Where the CQE says the payload is; 0 is memory.
        format: u8,
    },
    /// The library put this queue pair into the error state.
    #[error("QP {qpn:#x} was stopped: {reason}")]
    QpStopped {
        /// The queue pair.
        qpn: u32,
        /// Why.
        reason: Arc<Error>,
    },
    /// The completion succeeded, but was asked for too late: its slot was used again.
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
    /// The work request was taken back before a doorbell or a stream had it.
    #[error(
        "QP {qpn:#x}: the work request was taken back, as its batch or prepared send was dropped; it will never complete"
    )]
    TakenBack {
        /// The queue pair.
        qpn: u32,
    },
    /// The stream holds as many pending submissions as it may.
    #[error(
        "stream '{stream}' is full ({depth} submissions pending); synchronize, or submit with a deadline"
    )]
    StreamFull {
        /// The stream.
        stream: String,
        /// Its bound.
        depth: usize,
    },
    /// The application gave up the peer of a queue pair.
    #[error("the application gave the peer up")]
    GivenUp,
    /// The application at the other end of a queue pair gave this one up.
    #[error("the peer ended the connection: it gave this one up, or goes on without it")]
    GivenUpByPeer,
    /// The user aborted the stream.
    #[error("stream '{stream}' was aborted")]
    StreamAborted {
        /// The stream.
        stream: String,
    },
    /// A wait on a stream was not satisfied in time; the stream was released and does no more work.
    #[error(
        "stream '{stream}': wait for {what} was not satisfied within {after:?}; look at what should have (a peer that is gone \
         ends waits for completions, not for words), or raise wait_limit"
    )]
    StreamWait {
        /// The stream.
        stream: String,
        /// What it waited for.
        what: String,
        /// The deadline of the wait.
        after: Duration,
    },
    /// A host function on the stream panicked; the stream does no more work.
    #[error("stream '{stream}': a host function panicked: {message}")]
    HostFnPanicked {
        /// The stream.
        stream: String,
        /// The panic's message.
        message: String,
    },
    /// A call on the CPU did not finish in time. What it waited for goes on.
    #[error("{what} did not finish within {after:?}")]
    Deadline {
        /// The call.
        what: &'static str,
        /// Its deadline.
        after: Duration,
    },
    /// A thread of this library panicked. Its message is on standard error.
    #[error(
        "the thread '{thread}' of gdsync panicked, and what it served does no more work; its message is on standard error: \
         please report it, then open the device again"
    )]
    Panicked {
        /// The thread.
        thread: &'static str,
    },
    /// It belongs to the process that made it.
    #[error(
        "made by process {owner}, used by process {caller}; a forked child must open the device and make its streams itself"
    )]
    OtherProcess {
        /// The process that made it.
        owner: u32,
        /// The one that called.
        caller: u32,
    },
    /// The other side of a connection cannot be reached.
    #[error("peer {peer}: {why}")]
    Peer {
        /// The peer's address.
        peer: String,
        /// What happened, and the fix.
        why: String,
    },
}

/// As Display: what failed and the fix, also where a program's `main` returns it or `unwrap` panics with it.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Who only waits on the CPU sees every completion come, and must be told why the queue is full all the same.
fn not_taken(untaken: u64) -> String {
    match untaken {
        0 => String::new(),
        n => format!(
            ", {n} completed and not taken, or of other queues: poll_send, poll_recv, Cq::drain and waits of streams take, \
             Completion::wait only looks"
        ),
    }
}

impl Error {
    /// An argument out of range: which, what was passed, what is accepted.
    pub fn invalid(what: &'static str, value: impl ToString, expected: &'static str) -> Self {
        Self::InvalidArgument { what, value: value.to_string(), expected }
    }

    /// Whether something had run out that other registrations hold: memory that may be locked, keys, the GPU's window
    /// (BAR1). With fewer of them the same call may succeed.
    pub fn is_exhausted(&self) -> bool {
        match self {
            Self::Verbs { source, .. } | Self::Sys { source, .. } => {
                matches!(source.raw_os_error(), Some(libc::ENOMEM | libc::ENOSPC | libc::EAGAIN))
            }
            Self::Cuda { source, .. } => matches!(**source, gdrcopy::Error::Exhausted { .. }),
            _ => false,
        }
    }

    /// Wraps what CUDA said while this was being done.
    pub fn cuda(what: &'static str) -> impl Fn(gdrcopy::Error) -> Self {
        move |source| Self::Cuda { what, source: Arc::new(source) }
    }

    /// What `errno` says of the system call that just failed, and the fix.
    pub fn last_os(call: &'static str, fix: &'static str) -> Self {
        Self::os(call, io::Error::last_os_error(), fix)
    }

    /// A failed system call, and the fix.
    pub fn os(call: &'static str, source: io::Error, fix: &'static str) -> Self {
        Self::Sys { call, source: Arc::new(source), fix }
    }
}

/// A text of another process or user, made safe to print: control and format characters are escaped, so that it cannot command a
/// terminal or hide what stands beside it.
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

#[cfg(test)]
mod printable_tests {
    use super::printable;

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

/// A work request that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletionError {
    /// The queue pair.
    pub qpn: u32,
    /// The id of the work request.
    pub wr_id: u64,
    /// The send operation, `None` for a receive.
    pub operation: Option<Opcode>,
    /// Why.
    pub syndrome: Syndrome,
    /// The vendor's own code; 0 from the software HCA.
    pub vendor: u8,
}

impl CompletionError {
    /// Whether the request was only flushed because an earlier one, or the user, broke the queue pair.
    pub fn is_flush(&self) -> bool {
        self.syndrome == Syndrome::WR_FLUSH_ERR
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
        write!(f, " with wr_id {:#x} failed: {}, vendor code {:#x}", self.wr_id, self.syndrome, self.vendor)?;
        write!(f, "; {}", hint(self.syndrome))
    }
}

/// What to look at first.
fn hint(syndrome: Syndrome) -> &'static str {
    match syndrome {
        Syndrome::LOC_LEN_ERR => {
            "the message is longer than the buffers of the receive, or than the device allows"
        }
        Syndrome::LOC_QP_OP_ERR => "the work request is malformed or not allowed on this queue pair",
        Syndrome::LOC_PROT_ERR => {
            "check lkey, range and LOCAL_WRITE of the memory region, and that it is registered"
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
            "the peer does not answer: it died, its queue pair is gone or in error, or the network is down"
        }
        Syndrome::RNR_RETRY_EXC_ERR => {
            "the peer posted no receive in time; post receives earlier, or raise rnr_retry"
        }
        _ => "see the device's documentation",
    }
}
