//! One non-blocking connection that carries frames, and the loop that serves several of them.

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use super::frame::{Frame, HEADER, Header, Kind};
use crate::deadline::Deadline;
use crate::error::{Error, Result};

const FIX_DEAD: &str = "its own output says why it ended; restart the job";
const FIX_REFUSED: &str = "start all ranks with the same program, size and GDSYNC_JOB_TOKEN, and each rank once; \
                           or use another MASTER_PORT";
const FIX_PROTOCOL: &str =
    "run the same program and version in all ranks, and use a MASTER_PORT of their own";

/// A connection to one peer.
pub(super) struct Conn {
    stream: TcpStream,
    /// Who it is, for messages.
    pub(super) peer: String,
    /// Longest payload accepted.
    pub(super) max_payload: usize,
    /// The frame that is arriving; never more than that one.
    input: Vec<u8>,
    /// What leaves, and how much of it has.
    output: Option<(Arc<[u8]>, usize)>,
}

impl fmt::Debug for Conn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Conn({})", self.peer)
    }
}

impl Conn {
    /// Takes over a connected socket. Until somebody raises `max_payload`, frames must be empty.
    pub(super) fn new(stream: TcpStream, peer: String) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, peer, max_payload: 0, input: Vec::new(), output: None })
    }

    /// This end and the other.
    pub(super) fn addresses(&self) -> io::Result<(IpAddr, IpAddr)> {
        Ok((self.stream.local_addr()?.ip().to_canonical(), self.stream.peer_addr()?.ip().to_canonical()))
    }

    pub(super) fn fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }

    pub(super) fn fault(&self, what: impl Into<String>) -> Error {
        Error::bootstrap(&self.peer, what, FIX_PROTOCOL)
    }

    fn lost(&self, source: io::Error) -> Error {
        Error::bootstrap_os(&self.peer, "the connection was lost", source, FIX_DEAD)
    }

    fn closed(&self) -> Error {
        Error::bootstrap(&self.peer, "closed the connection", FIX_DEAD)
    }

    /// Makes `bytes` the next to leave; what was to leave before has left.
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

    /// Gives up what is to leave.
    pub(super) fn drop_output(&mut self) {
        self.output = None;
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

    /// As [`Conn::take_any`], for a frame that must be of this kind; bad news are errors in any case.
    pub(super) fn take(&mut self, kind: Kind) -> Result<Frame> {
        let frame = self.take_any()?;
        match frame.header.kind {
            // Rank 0 reports about others, the others only about themselves.
            Kind::Failed => {
                Err(Error::bootstrap(format!("rank {}", frame.header.rank), frame.text(), FIX_DEAD))
            }
            Kind::Refused => {
                let what = format!("refused this process: {}", frame.text());
                Err(Error::bootstrap(&self.peer, what, FIX_REFUSED))
            }
            got if got == kind => Ok(frame),
            got => Err(self.fault(got.instead_of(kind))),
        }
    }

    /// Looks whether the peer is there while it has nothing to say.
    pub(super) fn expect_silence(&mut self, during: Kind) -> Result<()> {
        if self.fill()? {
            self.take(during)?;
            return Err(self.fault(format!("spoke twice in one {}", during.name())));
        }
        Ok(())
    }

    /// Looks whether the peer is there between two exchanges; a frame of the next one may be there too,
    /// and stays.
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

    /// Says a last word if it can be said at once, and ends this direction.
    pub(super) fn farewell(&mut self, frame: Arc<[u8]>) {
        if self.output.is_none() {
            self.send(frame);
            // The peer may be gone already; then it needs no word.
            let _ = self.flush();
        }
        let _ = self.stream.shutdown(Shutdown::Write);
    }
}

/// An error, and the rank that is to blame for it.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) rank: u32,
    pub(super) error: Error,
}

impl Failure {
    /// Why, for the other ranks.
    pub(super) fn reason(&self) -> String {
        match &self.error {
            Error::Bootstrap { what, source: Some(source), .. } => format!("{what}: {source}"),
            Error::Bootstrap { what, .. } => what.clone(),
            other => other.to_string(),
        }
    }
}

/// What one connection still has to do.
pub(super) struct Step {
    pub(super) done: bool,
    /// Poll events that bring it further; 0 to leave it alone.
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
            let error = deadline.error(format!("{what}: waiting for {}", names.join(", ")));
            return Err(Failure { rank, error });
        }
        wait(&mut fds, deadline.remaining()).map_err(|error| Failure { rank: 0, error })?;
    }
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
