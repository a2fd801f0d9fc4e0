//! Frames over non-blocking TCP connections, and the loop that serves several of them.
//!
//! A frame is a fixed header and a payload of bounded length, big-endian:
//!
//! | bytes | field |
//! |---|---|
//! | 0..4 | magic, `GDSB` |
//! | 4..6 | version |
//! | 6..8 | kind |
//! | 8..12 | the rank the frame is about |
//! | 12..16 | ranks of the job |
//! | 16..24 | job token |
//! | 24..28 | payload length |

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use gdsync::error::{printable, rounded};

use crate::error::{Error, Result};
use crate::exchange::{CommonCall, take};
use crate::wait::Deadline;

/// Most bytes one rank may contribute to an exchange.
pub const MAX_PAYLOAD: usize = 64 << 20;

pub(super) const FIX_ROOT: &str = "check that rank 0 runs, that MASTER_ADDR and MASTER_PORT name its host and port, \
                                   that each RANK is started once, and that no firewall is between";
pub(super) const FIX_FILES: &str = "raise the limit on open files (ulimit -n)";
pub(super) const FIX_NETWORK: &str = "check the network of this host";
pub(super) const FIX_DEAD: &str = "it ended, or left without Communicator::finalize, and its own output may say why; restart the job, or go on \
                        without it: Communicator::shrink";
/// For ranks that are late in a call of all ranks.
const FIX_LATE_CALL: &str = "all later calls of all ranks fail, but for Communicator::shrink if the job has begun; see what holds up the ranks \
                             that have not called it";
const FIX_FAILED: &str = "the call has failed at all ranks; restart the job, or, if it has begun, make a new communicator by \
                          Communicator::shrink";
const FIX_REFUSED: &str = "start all ranks with the same program, size and GDSYNC_JOB_TOKEN, and each rank once; \
                           or use another MASTER_PORT";
const FIX_PROTOCOL: &str =
    "run the same program and version in all ranks, and use a MASTER_PORT of their own";

/// First bytes of every frame.
const MAGIC: [u8; 4] = *b"GDSB";

/// Changes with the meaning of any field.
const VERSION: u16 = 3;

/// Length of the header.
pub(super) const HEADER: usize = 28;

/// The most that a wait sleeps before it looks at other things: whether another thread has closed what it waits with, and at connections
/// that have not introduced themselves.
pub(super) const TICK: Duration = Duration::from_millis(250);

/// Longest reason that is shown.
const MAX_TEXT: usize = 4096;

/// The kinds of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A rank introduces itself to rank 0.
    Hello,
    /// Rank 0: all ranks are here.
    Welcome,
    /// Rank 0 does not accept the sender of a hello; the payload says why.
    Refused,
    /// The job cannot go on because of the rank in the header; the payload says why.
    Failed,
    /// One rank's part of an exchange in this call.
    Call(CommonCall),
}

impl Kind {
    fn all() -> impl Iterator<Item = (u16, Self)> {
        let others = [Self::Hello, Self::Welcome, Self::Refused, Self::Failed];
        (1..).zip(others.into_iter().chain(CommonCall::ALL.map(Self::Call)))
    }

    fn to_wire(self) -> u16 {
        Self::all().find(|(_, kind)| *kind == self).map_or(0, |(value, _)| value)
    }

    fn from_wire(value: u16) -> Option<Self> {
        Self::all().find(|(other, _)| *other == value).map(|(_, kind)| kind)
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Hello | Self::Welcome => "start-up",
            Self::Refused => "refusal",
            Self::Failed => "failure",
            Self::Call(call) => call.name(),
        }
    }

    /// The error of a rank that is in this operation, `whose` in another one.
    fn instead_of(self, expected: Self, whose: &str) -> String {
        let init = Self::Call(CommonCall::Init);
        let fix = match self == init || expected == init {
            true => "call CommunicatorBuilder::init in all ranks, or init_over in all",
            false => "let all ranks make the same calls, in one order",
        };
        format!("it is in {}, and {whose} in {}: {fix}", self.name(), expected.name())
    }
}

/// The fixed part of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: Kind,
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) token: u64,
    pub(super) len: u32,
}

impl Header {
    fn encode(&self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        out[0..4].copy_from_slice(&MAGIC);
        out[4..6].copy_from_slice(&VERSION.to_be_bytes());
        out[6..8].copy_from_slice(&self.kind.to_wire().to_be_bytes());
        out[8..12].copy_from_slice(&self.rank.to_be_bytes());
        out[12..16].copy_from_slice(&self.size.to_be_bytes());
        out[16..24].copy_from_slice(&self.token.to_be_bytes());
        out[24..28].copy_from_slice(&self.len.to_be_bytes());
        out
    }

    /// Reads a header, or says what is wrong with it.
    pub(super) fn decode(bytes: &[u8; HEADER]) -> std::result::Result<Self, String> {
        let rest = &mut &bytes[..];
        if take(rest) != MAGIC {
            return Err("sent something that is not a gdsync bootstrap frame".to_owned());
        }
        let version = u16::from_be_bytes(take(rest));
        if version != VERSION {
            return Err(format!("speaks bootstrap version {version}, this rank version {VERSION}"));
        }
        let kind = u16::from_be_bytes(take(rest));
        let kind = Kind::from_wire(kind).ok_or_else(|| format!("sent a frame of unknown kind {kind}"))?;
        let [rank, size] = [take(rest), take(rest)].map(u32::from_be_bytes);
        let (token, len) = (u64::from_be_bytes(take(rest)), u32::from_be_bytes(take(rest)));
        Ok(Self { kind, rank, size, token, len })
    }
}

/// A frame that arrived.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) header: Header,
    pub(super) payload: Vec<u8>,
}

impl Frame {
    /// The payload of a refusal or failure, cut to a bounded length and safe to print.
    pub(super) fn text(&self) -> String {
        let end = self.payload.len().min(MAX_TEXT);
        printable(&String::from_utf8_lossy(&self.payload[..end]))
    }
}

/// The job a process belongs to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    pub(super) size: u32,
    pub(super) token: u64,
}

impl Job {
    /// Appends a frame about `rank` to `out`. The payload is at most 4 GiB; callers bound it lower.
    pub(super) fn put(&self, out: &mut Vec<u8>, kind: Kind, rank: u32, payload: &[u8]) {
        let len = u32::try_from(payload.len()).expect("callers bound the payload to 64 MiB");
        out.extend_from_slice(&Header { kind, rank, size: self.size, token: self.token, len }.encode());
        out.extend_from_slice(payload);
    }

    /// One frame about `rank`, ready to send.
    pub(super) fn frame(&self, kind: Kind, rank: u32, payload: &[u8]) -> Arc<[u8]> {
        let mut out = Vec::with_capacity(HEADER + payload.len());
        self.put(&mut out, kind, rank, payload);
        out.into()
    }
}

/// A connection to one peer.
pub(super) struct Conn {
    stream: TcpStream,
    /// Its name in errors.
    pub(super) peer: String,
    /// Longest payload accepted.
    pub(super) max_payload: usize,
    /// The frame that is arriving; never more than that one.
    input: Vec<u8>,
    /// The bytes that are being sent, and how many of them have left.
    output: Option<(Arc<[u8]>, usize)>,
    /// What it is told of a failure in place of the reason: the rank that it is about, and what happened.
    pub(super) told: Option<(u32, String)>,
}

impl fmt::Debug for Conn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Conn({})", self.peer)
    }
}

impl Conn {
    /// Takes over a connected socket. Until `max_payload` is raised, frames must be empty.
    pub(super) fn new(stream: TcpStream, peer: String) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, peer, max_payload: 0, input: Vec::new(), output: None, told: None })
    }

    /// The addresses of both ends.
    pub(super) fn addresses(&self) -> io::Result<(IpAddr, IpAddr)> {
        Ok((self.stream.local_addr()?.ip().to_canonical(), self.stream.peer_addr()?.ip().to_canonical()))
    }

    pub(super) fn fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }

    pub(super) fn fault(&self, what: impl Into<String>) -> Error {
        Error::bootstrap(&self.peer, what, FIX_PROTOCOL)
    }

    fn lost(&self, cause: io::Error) -> Error {
        Error::bootstrap_os(&self.peer, "the connection was lost", cause, FIX_DEAD)
    }

    fn closed(&self) -> Error {
        Error::bootstrap(&self.peer, "closed the connection", FIX_DEAD)
    }

    /// Queues `bytes`; everything before has left.
    pub(super) fn send(&mut self, bytes: Arc<[u8]>) {
        debug_assert!(self.output.is_none());
        self.output = Some((bytes, 0));
    }

    /// Writes what the socket takes now; true when nothing is left.
    pub(super) fn flush(&mut self) -> Result<bool> {
        while let Some((bytes, sent)) = &mut self.output {
            match self.stream.write(&bytes[*sent..]) {
                Ok(count) => *sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.lost(error)),
            }
            if *sent == bytes.len() {
                self.output = None;
            }
        }
        Ok(true)
    }

    fn header(&self) -> Result<Option<Header>> {
        let Some(bytes) = self.input.first_chunk() else { return Ok(None) };
        let header = Header::decode(bytes).map_err(|what| self.fault(what))?;
        if header.len as usize > self.max_payload {
            let what =
                format!("sent a message of {} bytes where {} are the limit", header.len, self.max_payload);
            return Err(self.fault(what));
        }
        Ok(Some(header))
    }

    /// Reads what has arrived of the current frame, and no byte of the next; true when it is whole.
    pub(super) fn fill(&mut self) -> Result<bool> {
        loop {
            let header = self.header()?;
            let total = HEADER + header.map_or(0, |header| header.len as usize);
            let missing = total - self.input.len();
            if missing == 0 {
                return Ok(true);
            }
            match (&self.stream).take(missing as u64).read_to_end(&mut self.input) {
                Ok(count) if count < missing => return Err(self.closed()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(self.lost(error)),
            }
        }
    }

    /// Takes the frame that [`Conn::fill`] found whole.
    pub(super) fn take_any(&mut self) -> Result<Frame> {
        let header = self.header()?.ok_or_else(|| self.fault("sent no whole frame"))?;
        let mut payload = std::mem::take(&mut self.input);
        payload.drain(..HEADER);
        Ok(Frame { header, payload })
    }

    /// As [`Conn::take_any`], for a frame of this kind; reports of failures are errors.
    pub(super) fn take(&mut self, kind: Kind) -> Result<Frame> {
        let frame = self.take_any()?;
        match frame.header.kind {
            // Rank 0 reports about others, the others only about themselves.
            Kind::Failed => {
                Err(Error::bootstrap(format!("rank {}", frame.header.rank), frame.text(), FIX_FAILED))
            }
            Kind::Refused => {
                let what = format!("refused this process: {}", frame.text());
                Err(Error::bootstrap(&self.peer, what, FIX_REFUSED))
            }
            got if got == kind => Ok(frame),
            got => {
                self.told = Some((0, kind.instead_of(got, "this rank")));
                Err(Error::bootstrap(&self.peer, got.instead_of(kind, "rank 0"), FIX_FAILED))
            }
        }
    }

    /// Checks that the peer is alive, and sends nothing.
    pub(super) fn expect_silence(&mut self, during: Kind) -> Result<()> {
        if self.fill()? {
            self.take(during)?;
            return Err(self.fault(format!("spoke twice in one {}", during.name())));
        }
        Ok(())
    }

    /// Checks that the peer is alive between two exchanges. A frame of the next one may be there, and stays.
    pub(super) fn check(&mut self) -> Result<()> {
        if !self.fill()? {
            return Ok(());
        }
        if self.header()?.is_some_and(|header| header.kind == Kind::Failed) {
            return self.take(Kind::Failed).map(drop);
        }
        match self.stream.peek(&mut [0]) {
            Ok(0) => Err(self.closed()),
            Err(error) if !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                Err(self.lost(error))
            }
            _ => Ok(()),
        }
    }

    /// Sends a last frame if that does not block, and ends this direction.
    pub(super) fn farewell(&mut self, frame: Arc<[u8]>) {
        if self.output.is_none() {
            self.send(frame);
            // The peer may be gone already.
            let _ = self.flush();
        }
        let _ = self.stream.shutdown(Shutdown::Write);
    }
}

/// Dials an address, until the deadline and no longer than `limit`.
pub(super) fn connect(address: SocketAddr, limit: Duration, deadline: &Deadline) -> io::Result<TcpStream> {
    // A limit of zero is an error.
    let limit = deadline.remaining().clamp(Duration::from_millis(1), limit);
    let stream = TcpStream::connect_timeout(&address, limit)?;
    // Without a listener, a socket that dials an ephemeral port can connect to itself.
    match stream.local_addr()? == stream.peer_addr()? {
        true => Err(ErrorKind::ConnectionRefused.into()),
        false => Ok(stream),
    }
}

/// An error, and the rank that caused it.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) rank: u32,
    pub(super) error: Error,
}

impl Failure {
    /// The reason, for the other ranks.
    pub(super) fn reason(&self) -> String {
        match &self.error {
            Error::Bootstrap { what, cause: Some(cause), .. } => format!("{what}: {cause}"),
            Error::Bootstrap { what, .. } => what.clone(),
            Error::Deadline { what, after, .. } => format!("{what}: not done within {}", rounded(*after)),
            Error::Closed { what } => format!("closed {what}"),
            other => other.to_string(),
        }
    }
}

/// The state of one connection in an operation.
pub(super) struct Step {
    pub(super) done: bool,
    /// Poll events to wait for; 0 for none.
    pub(super) events: i16,
}

/// Calls `step` for each connection, whenever one is ready, until all are done. `first` is the rank of
/// the first connection, `what` names the operation.
pub(super) fn drive(
    conns: &mut [Conn],
    first: u32,
    what: &str,
    deadline: &Deadline,
    mut step: impl FnMut(usize, &mut Conn) -> Result<Step>,
) -> std::result::Result<(), Failure> {
    let mut fds = Vec::with_capacity(conns.len());
    loop {
        fds.clear();
        let mut late = Vec::new();
        for ((index, conn), rank) in conns.iter_mut().enumerate().zip(first..) {
            let step = step(index, conn).map_err(|error| Failure { rank, error })?;
            let fd = if step.events == 0 { -1 } else { conn.fd() };
            fds.push(libc::pollfd { fd, events: step.events, revents: 0 });
            if !step.done {
                late.push((rank, index));
            }
        }
        let Some(&(rank, _)) = late.first() else { return Ok(()) };
        if deadline.is_over() {
            let names: Vec<&str> = late.iter().map(|&(_, index)| conns[index].peer.as_str()).collect();
            let error = deadline.error(format!("{what}: waiting for {}", names.join(", ")), FIX_LATE_CALL);
            return Err(Failure { rank, error });
        }
        wait(&mut fds, deadline.remaining().min(TICK)).map_err(|error| Failure { rank: 0, error })?;
    }
}

/// Sends the same bytes to ranks 1 and up, also after one is found dead, which is the error then.
pub(super) fn send_to_all(
    conns: &mut [Conn],
    bytes: &Arc<[u8]>,
    what: &str,
    deadline: &Deadline,
) -> std::result::Result<(), Failure> {
    conns.iter_mut().for_each(|conn| conn.send(bytes.clone()));
    let mut failed = None;
    drive(conns, 1, what, deadline, |index, conn| {
        let done = conn.flush().unwrap_or_else(|error| {
            let rank = u32::try_from(index + 1).expect("a rank");
            failed.get_or_insert(Failure { rank, error });
            conn.output = None;
            true
        });
        Ok(Step { done, events: if done { 0 } else { libc::POLLOUT } })
    })?;
    failed.map_or(Ok(()), Err)
}

/// Sleeps until one of the descriptors is ready, a signal arrives, or `limit` is over.
pub(super) fn wait(fds: &mut [libc::pollfd], limit: Duration) -> Result<()> {
    // Rounded up, so that a rest below a millisecond does not spin.
    let ms = i32::try_from(limit.as_millis()).map_or(i32::MAX, |ms| ms.saturating_add(1));
    // SAFETY: the slice is exclusive, and its length is passed with it.
    let ready = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, ms) };
    if ready < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != ErrorKind::Interrupted {
            let fix = "raise the limit on open files (ulimit -n) above the number of ranks";
            return Err(Error::bootstrap_os("this rank", "poll", error, fix));
        }
    }
    Ok(())
}

/// Tells the peers that the job cannot go on, as far as they still listen.
pub(super) fn announce(peers: &mut [Conn], job: &Job, failure: &Failure) {
    for conn in peers {
        let (rank, what) = conn.told.take().unwrap_or_else(|| (failure.rank, failure.reason()));
        conn.farewell(job.frame(Kind::Failed, rank, what.as_bytes()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded() -> [u8; HEADER] {
        Header {
            kind: Kind::Failed,
            rank: 0x0102_0304,
            size: 0x0506_0708,
            token: 0x1112_1314_1516_1718,
            len: 9,
        }
        .encode()
    }

    #[test]
    fn layout_is_fixed() {
        let expected = b"GDSB\x00\x03\x00\x04\x01\x02\x03\x04\x05\x06\x07\x08\
                         \x11\x12\x13\x14\x15\x16\x17\x18\x00\x00\x00\x09";
        assert_eq!(&encoded(), expected);
    }

    #[test]
    fn decode_reverses_encode() {
        let header = Header::decode(&encoded()).unwrap();
        assert_eq!(header.encode(), encoded());
    }

    #[test]
    fn texts_of_peers_are_safe_to_print() {
        let header = Header::decode(&encoded()).unwrap();
        let frame = Frame { header, payload: b"rank 1: \x1b]0;title\x07 \xff".to_vec() };
        assert_eq!(frame.text(), "rank 1: \\u{1b}]0;title\\u{7} \u{fffd}");
    }

    #[test]
    fn foreign_bytes_are_named() {
        let broken = |at: usize, value: u8| {
            let mut bytes = encoded();
            bytes[at] = value;
            Header::decode(&bytes).unwrap_err()
        };
        assert!(broken(0, b'H').contains("not a gdsync bootstrap frame"));
        assert!(broken(5, 9).contains("version 9"));
        assert!(broken(7, 77).contains("unknown kind 77"));
    }
    /// A peer that sends any bytes, or frames with any of their bytes changed, and hangs up.
    #[test]
    fn any_bytes_are_a_frame_or_an_error() {
        const MOST: usize = 100;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        bolero::check!().with_type::<(bool, Vec<u8>)>().for_each(|(is_frame, bytes)| {
            let mut sent = if *is_frame { encoded().to_vec() } else { Vec::new() };
            sent.iter_mut().zip(bytes).for_each(|(byte, change)| *byte ^= change);
            sent.extend(bytes.iter().skip(sent.len()));
            let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let mut conn = Conn::new(listener.accept().unwrap().0, "the peer".to_owned()).unwrap();
            conn.max_payload = MOST;
            peer.write_all(&sent).unwrap();
            drop(peer);
            let mut rest = &sent[..];
            // The bytes may come in pieces.
            while let Ok(is_whole) = conn.fill() {
                if is_whole {
                    let frame = conn.take_any().unwrap();
                    let (head, payload) = rest.split_first_chunk::<HEADER>().unwrap();
                    assert_eq!(frame.header.encode(), *head);
                    assert_eq!(frame.payload, payload[..frame.header.len as usize]);
                    assert!(frame.payload.len() <= MOST && !frame.text().chars().any(char::is_control));
                    rest = &payload[frame.payload.len()..];
                }
            }
        });
    }
}
