//! The two ends of a TCP link: packets as frames of a byte stream.
//!
//! A frame is the length of its body (32 bits, little-endian), the packet's header, and the body. Lengths are checked here,
//! everything else by the queue pair that the packet is for.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use smallvec::SmallVec;

use super::Sockets;
use crate::wire::FAR_SEGMENT;
use crate::wire::ring::{HEADER, Piece};
use gdsync_device::error::Result;

/// Bytes ahead of a body.
const PREFIX: usize = 4 + HEADER;
/// Bytes of a body: payload behind the longest extension header.
pub(in crate::wire) const MAX_BODY: usize = FAR_SEGMENT + 64;
/// Bytes that wait for the socket, and bytes taken from it. Several of the largest frames, so that the socket is called rarely.
const BUFFER: usize = 256 << 10;
/// From this many bytes on the socket is given what waits, before the step ends.
const ENOUGH: usize = 64 << 10;
/// From this many bytes on the socket takes a body from where the payload lies.
const DIRECT: usize = 32 << 10;
/// How long the end of a link waits for its last bytes to leave, and for the peer to close.
const FAREWELL: Duration = Duration::from_millis(200);

/// The connection of a link, which carries its packets, or only tells the end of the peer. Both ends of the link share it.
#[derive(Debug)]
pub(in crate::wire) struct Connection {
    pub(super) stream: TcpStream,
    alive: AtomicBool,
    sockets: Arc<Sockets>,
}

impl Connection {
    pub(super) fn new(stream: TcpStream, sockets: Arc<Sockets>) -> Arc<Self> {
        Arc::new(Self { stream, alive: AtomicBool::new(true), sockets })
    }

    /// Both sides see its end.
    pub(super) fn close(&self) {
        // It may have ended already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    pub(in crate::wire) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    /// Watches the socket for link `index`.
    pub(in crate::wire) fn watch(&self, index: usize) {
        if let Err(error) = self.sockets.add(&self.stream, index) {
            self.lose(&error);
        }
    }

    /// Whether the peer has closed a connection that carries nothing, or sent something.
    pub(in crate::wire) fn is_closed(&self) -> bool {
        let quiet = [io::ErrorKind::WouldBlock, io::ErrorKind::Interrupted];
        !matches!((&self.stream).read(&mut [0]), Err(error) if quiet.contains(&error.kind()))
    }

    /// This side sends nothing more.
    pub(in crate::wire) fn end(&self) {
        // The peer may have closed it already.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// The connection carries nothing any more.
    pub(in crate::wire) fn lose(&self, why: &dyn std::fmt::Display) {
        if self.alive.swap(false, Ordering::AcqRel) {
            tracing::debug!(%why, "software HCA: link ended");
            self.sockets.remove(&self.stream);
            self.end();
        }
    }
}

/// Bytes in order: appended at the end, taken from the front.
#[derive(Debug)]
struct Buffer {
    bytes: Vec<u8>,
    begin: usize,
    end: usize,
}

impl Buffer {
    fn new() -> Self {
        Self { bytes: vec![0; BUFFER], begin: 0, end: 0 }
    }

    fn content(&self) -> &[u8] {
        &self.bytes[self.begin..self.end]
    }

    /// The room behind the content, of at least `len` bytes if that many are free.
    fn room(&mut self, len: usize) -> &mut [u8] {
        if self.begin == self.end {
            (self.begin, self.end) = (0, 0);
        } else if BUFFER - self.end < len {
            self.bytes.copy_within(self.begin..self.end, 0);
            (self.begin, self.end) = (0, self.end - self.begin);
        }
        &mut self.bytes[self.end..]
    }
}

/// Sending end.
#[derive(Debug)]
pub(crate) struct TcpTx {
    connection: Arc<Connection>,
    waiting: Buffer,
    /// Index of the link, once it has one.
    index: Option<usize>,
    /// The socket is watched for room.
    is_full: bool,
}

impl TcpTx {
    pub(super) fn new(connection: Arc<Connection>) -> Self {
        Self { connection, waiting: Buffer::new(), index: None, is_full: false }
    }

    /// Watches the socket for link `index`.
    pub(crate) fn begin(&mut self, index: usize) {
        self.index = Some(index);
        self.connection.watch(index);
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.connection.is_alive()
    }

    /// Whether the peer's system has received all bytes.
    pub(crate) fn is_drained(&self) -> bool {
        self.waiting.content().is_empty() && unacknowledged(&self.connection.stream) == 0
    }

    /// Appends a frame. Returns false if there is no room.
    ///
    /// # Errors
    /// As reading a piece.
    pub(crate) fn try_push(
        &mut self,
        header: &[u8; HEADER],
        ext: &[u8],
        pieces: &[Piece<'_>],
    ) -> Result<bool> {
        let body = body_len(ext, pieces);
        let len = PREFIX + body;
        if self.waiting.room(len).len() < len {
            self.flush();
            if self.waiting.room(len).len() < len {
                return Ok(false);
            }
        }
        let prefix = u32::try_from(body).expect("at most a segment").to_le_bytes();
        let is_direct = body >= DIRECT && !self.is_full;
        let taken = if is_direct { self.write_through([&prefix, header, ext], pieces) } else { 0 };
        if taken == len {
            return Ok(true);
        }
        let room = &mut self.waiting.room(len)[..len];
        let (begin, packet) = room.split_at_mut(prefix.len());
        begin.copy_from_slice(&prefix);
        copy_packet(packet, header, ext, pieces)?;
        self.waiting.end += len;
        self.waiting.begin += taken;
        if self.waiting.content().len() >= ENOUGH {
            self.flush();
        }
        Ok(true)
    }

    /// Gives the socket what waits and a packet, whose payload stays where it lies. Returns how much of the packet it has taken: nothing
    /// before all that waits, and of memory that may be unmapped.
    fn write_through(&mut self, head: [&[u8]; 3], pieces: &[Piece<'_>]) -> usize {
        let mut parts: SmallVec<[libc::iovec; 8]> = SmallVec::new();
        let part = |at: *const u8, len| libc::iovec { iov_base: at.cast_mut().cast(), iov_len: len };
        let waiting = self.waiting.content();
        parts.extend([waiting].into_iter().chain(head).map(|bytes| part(bytes.as_ptr(), bytes.len())));
        for piece in pieces {
            let Some(at) = piece.memory.host_bytes(piece.offset, piece.len) else { return 0 };
            parts.push(part(at.as_ptr(), piece.len));
        }
        // SAFETY: null pointers and zeros are an empty message.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = (parts.as_mut_ptr(), parts.len());
        let (fd, flags) = (self.connection.stream.as_raw_fd(), libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT);
        // SAFETY: the parts are bytes of slices, and of memory that the pieces borrow; the kernel only reads them.
        let count = unsafe { libc::sendmsg(fd, &raw const message, flags) };
        // The next write finds an error again.
        let count = usize::try_from(count).unwrap_or(0);
        let of_waiting = count.min(self.waiting.content().len());
        self.waiting.begin += of_waiting;
        count - of_waiting
    }

    /// Gives the socket what it takes. Returns whether nothing waits any more.
    pub(crate) fn flush(&mut self) -> bool {
        while self.connection.is_alive() && !self.waiting.content().is_empty() {
            match (&self.connection.stream).write(self.waiting.content()) {
                Ok(count) => self.waiting.begin += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.watch_room(true);
                    return false;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => self.connection.lose(&error),
            }
        }
        self.watch_room(false);
        true
    }

    fn watch_room(&mut self, is_full: bool) {
        if let Some(index) = self.index.filter(|_| self.is_full != is_full) {
            self.is_full = is_full;
            self.connection.sockets.watch_room(&self.connection.stream, index, is_full);
        }
    }
}

impl Drop for TcpTx {
    /// Sends what waits, and reads until the peer has closed its end: bytes that arrive at a closed socket would discard those
    /// on their way to the peer.
    fn drop(&mut self) {
        if !self.connection.is_alive() {
            return;
        }
        let mut stream = &self.connection.stream;
        let mut farewell = || {
            stream.set_nonblocking(false)?;
            stream.set_write_timeout(Some(FAREWELL))?;
            stream.set_read_timeout(Some(FAREWELL))?;
            stream.write_all(self.waiting.content())?;
            stream.shutdown(Shutdown::Write)?;
            while stream.read(&mut [0; 4096])? > 0 {}
            Ok::<_, io::Error>(())
        };
        // Nobody is left to be told.
        let _ = farewell();
        self.connection.lose(&"it was closed");
    }
}

/// Bytes of a packet's body.
pub(in crate::wire) fn body_len(ext: &[u8], pieces: &[Piece<'_>]) -> usize {
    let len = ext.len() + pieces.iter().map(|piece| piece.len).sum::<usize>();
    assert!(len <= MAX_BODY, "packets are cut to this size");
    len
}

/// Copies a packet to `room`, which has its length.
///
/// # Errors
/// As reading a piece.
pub(in crate::wire) fn copy_packet(
    room: &mut [u8],
    header: &[u8; HEADER],
    ext: &[u8],
    pieces: &[Piece<'_>],
) -> Result<()> {
    let (to, room) = room.split_at_mut(HEADER);
    to.copy_from_slice(header);
    let (to, mut room) = room.split_at_mut(ext.len());
    to.copy_from_slice(ext);
    for piece in pieces {
        let (to, rest) = room.split_at_mut(piece.len);
        piece.memory.read(piece.offset, to)?;
        room = rest;
    }
    Ok(())
}

/// Bytes that the peer's system has not acknowledged.
fn unacknowledged(stream: &TcpStream) -> usize {
    let mut count: libc::c_int = 0;
    // SAFETY: the request writes an integer to `count`.
    let done = unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut count) };
    if done == 0 { usize::try_from(count).unwrap_or(0) } else { 0 }
}

/// A received packet, still in the buffer.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) header: [u8; HEADER],
    pub(crate) body_len: usize,
}

/// Receiving end.
#[derive(Debug)]
pub(crate) struct TcpRx {
    connection: Arc<Connection>,
    received: Buffer,
    /// The socket may have more bytes.
    is_ready: bool,
}

impl TcpRx {
    pub(super) fn new(connection: Arc<Connection>) -> Self {
        Self { connection, received: Buffer::new(), is_ready: true }
    }

    /// The socket may have bytes.
    pub(crate) fn set_ready(&mut self) {
        self.is_ready = true;
    }

    /// The next packet, if any.
    pub(crate) fn peek(&mut self) -> Option<Frame> {
        loop {
            match first_frame(self.received.content()) {
                Ok(Some(frame)) => return Some(frame),
                Ok(None) if self.is_ready => self.fill(),
                Ok(None) => return None,
                Err(why) => {
                    if self.connection.is_alive() {
                        tracing::error!(why, "software HCA: TCP link taken down");
                    }
                    self.connection.lose(&why);
                    return None;
                }
            }
        }
    }

    /// Whether a packet waits.
    pub(crate) fn has_packet(&mut self) -> bool {
        // Also of a socket that is no longer watched.
        self.is_ready = true;
        self.peek().is_some()
    }

    pub(crate) fn body(&self, frame: &Frame) -> &[u8] {
        &self.received.content()[PREFIX..PREFIX + frame.body_len]
    }

    /// Frees the bytes of a packet.
    pub(crate) fn pop(&mut self, frame: &Frame) {
        self.received.begin += PREFIX + frame.body_len;
    }

    /// Takes what the socket has.
    fn fill(&mut self) {
        let room = self.received.room(PREFIX + MAX_BODY);
        let size = room.len();
        match (&self.connection.stream).read(room) {
            Ok(0) => {
                self.is_ready = false;
                self.connection.lose(&"the peer closed it");
            }
            Ok(count) => {
                self.received.end += count;
                self.is_ready = count == size;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                self.is_ready = false;
                if error.kind() != io::ErrorKind::WouldBlock {
                    self.connection.lose(&error);
                }
            }
        }
    }
}

/// The frame that begins these bytes, if they hold all of it.
fn first_frame(bytes: &[u8]) -> std::result::Result<Option<Frame>, &'static str> {
    let Some((prefix, rest)) = bytes.split_first_chunk::<PREFIX>() else { return Ok(None) };
    let (len, header) = prefix.split_first_chunk().expect("a prefix holds a length");
    let body_len = u32::from_le_bytes(*len) as usize;
    if body_len > MAX_BODY {
        return Err("the peer sent a frame that is too long");
    }
    let header = header.try_into().expect("the rest of a prefix is a header");
    Ok((rest.len() >= body_len).then_some(Frame { header, body_len }))
}
