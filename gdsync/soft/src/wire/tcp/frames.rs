//! The two ends of a link to another host: packets as frames of a byte stream, or of messages of libfabric.
//!
//! A frame is the length of its body (32 bits, little-endian), the packet's header, and the body. Lengths are checked here,
//! everything else by the queue pair that the packet is for.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::Sockets;
use crate::wire::fabric::{FabricLink, Received};
use crate::wire::ring::{HEADER, Piece};
use crate::wire::{FAR_SEGMENT, Peer};
use gdsync_device::error::Result;

/// Bytes of a frame ahead of its body.
pub(in crate::wire) const FRAME: usize = 4 + HEADER;
/// Bytes of a body: payload behind the longest extension header.
pub(in crate::wire) const MAX_BODY: usize = FAR_SEGMENT + 64;
/// Bytes that wait for the socket, and bytes taken from it. Several of the largest frames, so that the socket is called rarely.
const BUFFER: usize = 256 << 10;
/// From this many bytes on the socket is given what waits, before the step ends.
const ENOUGH: usize = 64 << 10;
/// From this many bytes on the socket takes a body from where the payload lies.
const DIRECT: usize = 32 << 10;
/// How long the ends of links wait for their last packets to leave, and for the peers to close.
const FAREWELL: Duration = Duration::from_millis(200);
/// Pause between two looks at them.
const FAREWELL_PAUSE: Duration = Duration::from_micros(50);
/// After the connection has ended, packets that are still in the provider are waited for this long.
const LAST_PACKETS: Duration = Duration::from_millis(2);

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

    /// Whether the peer has closed its end. What it has sent is lost.
    fn is_closed(&self) -> bool {
        let quiet = [io::ErrorKind::WouldBlock, io::ErrorKind::Interrupted];
        match (&self.stream).read(&mut [0; 4096]) {
            Ok(count) => count == 0,
            Err(error) => !quiet.contains(&error.kind()),
        }
    }

    /// This side sends nothing more.
    fn end(&self) {
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
#[derive(Debug, Default)]
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

/// This side's ends of a link.
#[derive(Debug)]
pub(crate) struct FarEnds {
    pub(crate) peer: Peer,
    pub(crate) tx: FarTx,
    pub(crate) rx: FarRx,
}

impl FarEnds {
    pub(super) fn new(peer: Peer, connection: &Arc<Connection>, fabric: Option<Arc<FabricLink>>) -> Self {
        let (waiting, source) = match &fabric {
            None => (Buffer::new(), Source::Socket(Buffer::new())),
            Some(link) => {
                let link = link.clone();
                (Buffer::default(), Source::Fabric { link, message: None, taken: 0, ended: None })
            }
        };
        let tx = FarTx { connection: connection.clone(), fabric, waiting, index: None, is_full: false };
        Self { peer, tx, rx: FarRx { connection: connection.clone(), source, is_ready: true } }
    }
}

/// Sending end.
#[derive(Debug)]
pub(crate) struct FarTx {
    pub(super) connection: Arc<Connection>,
    /// What carries the packets in place of the connection.
    fabric: Option<Arc<FabricLink>>,
    /// Bytes for the socket.
    waiting: Buffer,
    /// Index of the link, once it has one.
    index: Option<usize>,
    /// The socket is watched for room.
    is_full: bool,
}

impl FarTx {
    /// Watches the socket for link `index`.
    pub(crate) fn begin(&mut self, index: usize) {
        self.index = Some(index);
        if let Err(error) = self.connection.sockets.add(&self.connection.stream, index) {
            self.connection.lose(&error);
        }
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.connection.is_alive()
    }

    /// Whether the peer's system has received all bytes; over libfabric, whether the provider has sent all messages.
    pub(crate) fn is_drained(&self) -> bool {
        match &self.fabric {
            Some(link) => link.endpoint.is_sent(link.id),
            None => self.waiting.content().is_empty() && unacknowledged(&self.connection.stream) == 0,
        }
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
        let body = ext.len() + pieces.iter().map(|piece| piece.len).sum::<usize>();
        assert!(body <= MAX_BODY, "packets are cut to this size");
        let len = FRAME + body;
        let prefix = u32::try_from(body).expect("at most a segment").to_le_bytes();
        if let Some(link) = &self.fabric {
            let fill = |room: &mut [u8]| copy_frame(room, [&prefix, header, ext], pieces);
            return link.endpoint.push(link.id, len, fill);
        }
        if self.waiting.room(len).len() < len {
            self.flush();
            if self.waiting.room(len).len() < len {
                return Ok(false);
            }
        }
        let is_direct = body >= DIRECT && !self.is_full;
        let taken = if is_direct { self.write_through([&prefix, header, ext], pieces) } else { 0 };
        if taken == len {
            return Ok(true);
        }
        copy_frame(&mut self.waiting.room(len)[..len], [&prefix, header, ext], pieces)?;
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

    /// Gives the socket, or the provider, what it takes. Returns whether nothing waits any more.
    pub(crate) fn flush(&mut self) -> bool {
        if let Some(link) = &self.fabric {
            return link.endpoint.flush(link.id);
        }
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

    /// Ends the link of a dead peer: packets that were not taken are dropped.
    pub(crate) fn take_down(&self) {
        self.fabric.iter().for_each(|link| link.endpoint.disconnect(link.id));
    }

    fn watch_room(&mut self, is_full: bool) {
        if let Some(index) = self.index.filter(|_| self.is_full != is_full) {
            self.is_full = is_full;
            self.connection.sockets.watch_room(&self.connection.stream, index, is_full);
        }
    }
}

impl FarTx {
    /// Ends links: sends what waits, and reads until the peers have closed their ends. Bytes that arrive at a closed socket would
    /// discard those on their way to the peer, and a provider may drop what it has not delivered when its endpoint closes. All links
    /// have one deadline, so that peers that do not answer do not add up.
    pub(crate) fn end_all(mut links: Vec<&mut Self>) {
        let until = Instant::now() + FAREWELL;
        loop {
            links.retain_mut(|link| !link.has_parted());
            if links.is_empty() || Instant::now() >= until {
                break;
            }
            std::thread::sleep(FAREWELL_PAUSE);
        }
        links.iter().for_each(|link| link.connection.lose(&"it was closed"));
    }

    /// Goes on ending the link. Returns whether there is nothing to wait for any more.
    fn has_parted(&mut self) -> bool {
        if self.index.is_none() || !self.is_alive() {
            return true;
        }
        self.fabric.iter().for_each(|link| _ = link.endpoint.poll());
        if !(self.flush() && self.fabric.as_ref().is_none_or(|link| link.endpoint.is_sent(link.id))) {
            return false;
        }
        self.connection.end();
        let is_closed = self.connection.is_closed();
        if is_closed {
            self.connection.lose(&"it was closed");
        }
        is_closed
    }
}

impl Drop for FarTx {
    fn drop(&mut self) {
        Self::end_all(vec![self]);
    }
}

/// Copies a frame to `room`, which has its length: length, header and extension, then the pieces of the payload.
///
/// # Errors
/// As reading a piece.
fn copy_frame(mut room: &mut [u8], head: [&[u8]; 3], pieces: &[Piece<'_>]) -> Result<()> {
    for part in head {
        let to = room.split_off_mut(..part.len()).expect("it has room");
        to.copy_from_slice(part);
    }
    for piece in pieces {
        let to = room.split_off_mut(..piece.len).expect("it has room");
        piece.memory.read(piece.offset, to)?;
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
pub(crate) struct FarRx {
    connection: Arc<Connection>,
    source: Source,
    /// The socket may have something.
    is_ready: bool,
}

/// Where frames come from.
#[derive(Debug)]
enum Source {
    Socket(Buffer),
    /// A message of libfabric, of which `taken` bytes were popped. The connection tells the end.
    Fabric {
        link: Arc<FabricLink>,
        message: Option<Received>,
        taken: usize,
        ended: Option<Instant>,
    },
}

impl FarRx {
    /// The socket may have something.
    pub(crate) fn set_ready(&mut self) {
        self.is_ready = true;
    }

    fn content(&self) -> &[u8] {
        match &self.source {
            Source::Socket(received) => received.content(),
            Source::Fabric { message, taken, .. } => message.as_ref().map_or(&[], |m| &m.bytes()[*taken..]),
        }
    }

    /// The next packet, if any.
    pub(crate) fn peek(&mut self) -> Option<Frame> {
        loop {
            match first_frame(self.content()) {
                Ok(Some(frame)) => return Some(frame),
                Ok(None) if self.fill() => {}
                Ok(None) => return None,
                Err(why) => {
                    if self.connection.is_alive() {
                        tracing::error!(why, "software HCA: link taken down");
                    }
                    self.connection.lose(&why);
                    return None;
                }
            }
        }
    }

    /// Whether a packet waits.
    pub(crate) fn has_packet(&mut self) -> bool {
        // Also of a socket that is no longer watched. Beside libfabric it has none.
        self.is_ready |= matches!(self.source, Source::Socket(_));
        self.peek().is_some()
    }

    pub(crate) fn body(&self, frame: &Frame) -> &[u8] {
        &self.content()[FRAME..FRAME + frame.body_len]
    }

    /// Frees the bytes of a packet.
    pub(crate) fn pop(&mut self, frame: &Frame) {
        let taken = match &mut self.source {
            Source::Socket(received) => &mut received.begin,
            Source::Fabric { taken, .. } => taken,
        };
        *taken += FRAME + frame.body_len;
    }

    /// Takes what the socket has, or the next message. Returns whether there was something to take.
    fn fill(&mut self) -> bool {
        match &mut self.source {
            Source::Fabric { link, message, taken, ended } => {
                if let Some(old) = message.take() {
                    if old.bytes().len() != *taken {
                        self.connection.lose(&"the peer sent a part of a packet");
                    }
                    link.endpoint.give_back(link.id, old);
                }
                (*message, *taken) = (link.endpoint.take(link.id), 0);
                if message.is_some() {
                    return true;
                }
                if std::mem::take(&mut self.is_ready) && ended.is_none() && self.connection.is_closed() {
                    *ended = Some(Instant::now());
                }
                if ended.is_some_and(|since| since.elapsed() > LAST_PACKETS) {
                    self.connection.lose(&"the peer closed it");
                }
                return false;
            }
            Source::Socket(_) if !self.is_ready => return false,
            Source::Socket(received) => {
                let room = received.room(FRAME + MAX_BODY);
                let size = room.len();
                match (&self.connection.stream).read(room) {
                    Ok(0) => {
                        self.is_ready = false;
                        self.connection.lose(&"the peer closed it");
                    }
                    Ok(count) => {
                        received.end += count;
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
        true
    }
}

impl Drop for FarRx {
    fn drop(&mut self) {
        if let Source::Fabric { link, message, .. } = &mut self.source {
            message.take().into_iter().for_each(|old| link.endpoint.give_back(link.id, old));
        }
    }
}

/// The frame that begins these bytes, if they hold all of it.
fn first_frame(bytes: &[u8]) -> std::result::Result<Option<Frame>, &'static str> {
    let Some((prefix, rest)) = bytes.split_first_chunk::<FRAME>() else { return Ok(None) };
    let (len, header) = prefix.split_first_chunk().expect("a prefix holds a length");
    let body_len = u32::from_le_bytes(*len) as usize;
    if body_len > MAX_BODY {
        return Err("the peer sent a frame that is too long");
    }
    let header = header.try_into().expect("the rest of a prefix is a header");
    Ok((rest.len() >= body_len).then_some(Frame { header, body_len }))
}
