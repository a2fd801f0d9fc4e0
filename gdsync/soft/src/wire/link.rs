//! The ends of a link, whatever carries its packets.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use super::port::{LinkEnds, PeerSocket, Port};
use super::ring::{HEADER, Piece, PushError, RING_BYTES, Record, RxRing, TxRing};
use super::tcp::{FarEnds, FarRx, FarTx, Frame, TcpPort};
use super::{Event, FAR_SEGMENT, SEGMENT};
use gdsync_device::error::Result;
use gdsync_device::memory::Memory;
use gdsync_device::{Gid, QpAddress};
use gdsync_shm::packet_ring::Corrupt;

/// An HCA, as its links know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Peer {
    /// The GID; over TCP an IP address.
    pub(crate) gid: Gid,
    /// The TCP port, which is the LID of addresses; 0 in shared memory.
    pub(crate) port: u16,
}

impl Peer {
    /// In shared memory.
    pub(crate) fn near(gid: Gid) -> Self {
        Self { gid, port: 0 }
    }

    /// At the other end of a TCP connection.
    pub(super) fn at(address: SocketAddr) -> Self {
        let ip = match address.ip() {
            std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            std::net::IpAddr::V6(v6) => v6,
        };
        Self { gid: Gid(ip.octets()), port: address.port() }
    }

    /// Where it listens.
    pub(super) fn address(self) -> SocketAddr {
        SocketAddr::new(std::net::Ipv6Addr::from(self.gid.0).to_canonical(), self.port)
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.port == 0 { write!(f, "{}", self.gid) } else { write!(f, "{}", self.address()) }
    }
}

/// What makes the links of an HCA.
#[derive(Debug)]
pub(crate) enum HcaPort {
    Memory(Port),
    Tcp(TcpPort),
}

impl HcaPort {
    /// The HCA that this address belongs to.
    pub(crate) fn peer_of(&self, remote: &QpAddress) -> Peer {
        match self {
            Self::Memory(_) => Peer::near(remote.gid),
            Self::Tcp(_) => Peer { gid: remote.gid, port: remote.lid },
        }
    }

    /// Connects to the HCA `peer`. Returns `None` if its own connection is the link.
    ///
    /// # Errors
    /// As [`Port::connect`] and [`TcpPort::connect`].
    pub(crate) fn connect(&self, peer: Peer, timeout: Duration) -> Result<Option<Ends>> {
        match self {
            Self::Memory(port) => port.connect(peer.gid, timeout).map(|ends| Some(Ends::Memory(ends))),
            Self::Tcp(port) => port.connect(peer, timeout).map(|ends| ends.map(Ends::Far)),
        }
    }

    /// Closes all links, and makes no more, after a panic.
    pub(crate) fn close(&self) {
        match self {
            Self::Memory(port) => port.close(),
            Self::Tcp(port) => port.close(),
        }
    }

    /// Whether peers connected since [`HcaPort::take_accepted`].
    pub(crate) fn has_accepted(&self) -> bool {
        match self {
            Self::Memory(port) => port.has_accepted(),
            Self::Tcp(port) => port.has_accepted(),
        }
    }

    /// Links that peers opened.
    pub(crate) fn take_accepted(&self) -> Vec<Ends> {
        match self {
            Self::Memory(port) => port.take_accepted().into_iter().map(Ends::Memory).collect(),
            Self::Tcp(port) => port.take_accepted().into_iter().map(Ends::Far).collect(),
        }
    }
}

/// Both ends of a link, of this side.
#[derive(Debug)]
pub(crate) enum Ends {
    Memory(LinkEnds),
    Far(FarEnds),
}

impl Ends {
    pub(crate) fn peer(&self) -> Peer {
        match self {
            Self::Memory(ends) => ends.peer,
            Self::Far(ends) => ends.peer,
        }
    }

    pub(crate) fn split(self) -> (Tx, Rx) {
        match self {
            Self::Memory(LinkEnds { tx, rx, event, socket, .. }) => {
                (Tx::Memory { ring: tx, event, socket }, Rx::Memory(rx))
            }
            Self::Far(FarEnds { tx, rx, .. }) => (Tx::Far(tx), Rx::Far(rx)),
        }
    }
}

/// The link of an HCA to itself, over private memory.
pub(crate) fn loopback(own: Peer, event: Event) -> Result<Ends> {
    let memory = Memory::alloc(RING_BYTES)?;
    let (tx, rx) = (TxRing::new(memory.clone()), RxRing::new(memory));
    Ok(Ends::Memory(LinkEnds { peer: own, tx, rx, event, socket: PeerSocket::own() }))
}

/// Sending end.
#[derive(Debug)]
pub(crate) enum Tx {
    Memory { ring: TxRing, event: Event, socket: PeerSocket },
    Far(FarTx),
}

impl Tx {
    /// The link has got this index.
    pub(crate) fn begin(&mut self, index: usize) {
        match self {
            Self::Memory { .. } => {}
            Self::Far(tx) => tx.begin(index),
        }
    }

    /// Prefetches the line of the next packet.
    #[inline]
    pub(crate) fn expect(&self) {
        if let Self::Memory { ring, .. } = self {
            ring.expect();
        }
    }

    /// Whether the peer is alive.
    pub(crate) fn is_alive(&self) -> bool {
        match self {
            Self::Memory { socket, .. } => socket.is_alive(),
            Self::Far(tx) => tx.is_alive(),
        }
    }

    /// Whether the peer has taken all packets; over TCP, its system; over libfabric, the provider.
    pub(crate) fn is_drained(&self) -> bool {
        match self {
            Self::Memory { ring, .. } => ring.is_drained(),
            Self::Far(tx) => tx.is_drained(),
        }
    }

    /// Payload bytes per packet.
    pub(crate) fn segment(&self) -> usize {
        if self.takes_references() { SEGMENT } else { FAR_SEGMENT }
    }

    /// Whether packets may name memory of this process in place of payload: the peer is on this host.
    pub(crate) fn takes_references(&self) -> bool {
        matches!(self, Self::Memory { .. })
    }

    /// PID of the peer in this process's namespace, if it is on this host.
    pub(crate) fn pid(&self) -> Option<libc::pid_t> {
        if let Self::Memory { socket, .. } = self { socket.pid() } else { None }
    }

    /// Appends a packet. Returns false if there is no room.
    pub(crate) fn try_push(
        &mut self,
        header: &[u8; HEADER],
        ext: &[u8],
        pieces: &[Piece<'_>],
    ) -> std::result::Result<bool, PushError> {
        match self {
            Self::Memory { ring, .. } => ring.try_push(header, ext, pieces),
            Self::Far(tx) => tx.try_push(header, ext, pieces).map_err(PushError::Payload),
        }
    }

    /// Has appended packets delivered. Returns false if some wait for room.
    pub(crate) fn deliver(&mut self) -> bool {
        match self {
            Self::Memory { event, .. } => {
                event.notify();
                true
            }
            Self::Far(tx) => tx.flush(),
        }
    }

    /// The peer is gone, and this link not used any more.
    pub(crate) fn take_down(&self) {
        if let Self::Far(tx) = self {
            tx.take_down();
        }
    }

    /// Tells the peer that its ring has room.
    pub(crate) fn notify(&self) {
        if let Self::Memory { event, .. } = self {
            event.notify();
        }
    }
}

/// Receiving end.
#[derive(Debug)]
pub(crate) enum Rx {
    Memory(RxRing),
    Far(FarRx),
}

/// A received packet that has not been popped.
#[derive(Debug)]
pub(crate) enum Packet {
    Record(Record),
    Frame(Frame),
}

impl Packet {
    pub(crate) fn header(&self) -> &[u8; HEADER] {
        match self {
            Self::Record(record) => &record.header,
            Self::Frame(frame) => &frame.header,
        }
    }
}

impl Rx {
    /// The next packet, if any.
    ///
    /// # Errors
    /// If the peer wrote nonsense into its ring. Links to other hosts end by themselves then.
    #[inline]
    pub(crate) fn peek(&mut self) -> std::result::Result<Option<Packet>, Corrupt> {
        match self {
            Self::Memory(ring) => Ok(ring.peek()?.map(Packet::Record)),
            Self::Far(rx) => Ok(rx.peek().map(Packet::Frame)),
        }
    }

    /// Whether a packet waits.
    pub(crate) fn has_packet(&mut self) -> bool {
        match self {
            Self::Memory(ring) => ring.has_record(),
            Self::Far(rx) => rx.has_packet(),
        }
    }

    /// Whether the ring is empty. Sockets are asked by [`Rx::peek`].
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        matches!(self, Self::Memory(ring) if ring.is_empty())
    }

    /// Its socket may have something.
    pub(crate) fn set_ready(&mut self) {
        if let Self::Far(rx) = self {
            rx.set_ready();
        }
    }

    /// Shows the peer that nothing more will come of the packets popped so far.
    #[inline]
    pub(crate) fn publish(&mut self) {
        if let Self::Memory(ring) = self {
            ring.publish();
        }
    }

    /// Body of a packet that [`Rx::peek`] returned, received over link `link`.
    #[inline]
    pub(crate) fn body<'a>(&'a self, packet: &'a Packet, link: usize) -> Body<'a> {
        let source = match (self, packet) {
            (Self::Memory(ring), Packet::Record(record)) => Source::Ring(ring, record),
            (Self::Far(rx), Packet::Frame(frame)) => Source::Bytes(rx.body(frame)),
            _ => unreachable!("packets of rings are records, others are frames"),
        };
        Body { source, link }
    }

    /// Frees a packet. Returns whether the peer may be waiting for its room.
    #[inline]
    pub(crate) fn pop(&mut self, packet: Packet) -> bool {
        match (self, packet) {
            (Self::Memory(ring), Packet::Record(record)) => ring.pop(record),
            (Self::Far(rx), Packet::Frame(frame)) => {
                rx.pop(&frame);
                false
            }
            _ => unreachable!("packets of rings are records, others are frames"),
        }
    }
}

/// Body of a received packet, where it arrived.
#[derive(Debug)]
pub(crate) struct Body<'a> {
    source: Source<'a>,
    /// Index of the link.
    pub(crate) link: usize,
}

#[derive(Debug)]
enum Source<'a> {
    Ring(&'a RxRing, &'a Record),
    Bytes(&'a [u8]),
}

impl Body<'_> {
    pub(crate) fn len(&self) -> usize {
        match self.source {
            Source::Ring(_, record) => record.body_len,
            Source::Bytes(bytes) => bytes.len(),
        }
    }

    /// Copies a part.
    ///
    /// # Errors
    /// As [`Memory::copy_from`].
    pub(crate) fn copy_to(&self, at: usize, memory: &Memory, offset: usize, len: usize) -> Result<()> {
        match self.source {
            Source::Ring(ring, record) => ring.copy_body_to(record, at, memory, offset, len),
            Source::Bytes(bytes) => memory.write(offset, part(bytes, at, len)?),
        }
    }

    /// `N` bytes at offset `at`.
    pub(crate) fn array<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        let mut out = [0; N];
        match self.source {
            Source::Ring(ring, record) => ring.read_body(record, at, &mut out).ok()?,
            Source::Bytes(bytes) => out.copy_from_slice(part(bytes, at, N).ok()?),
        }
        Some(out)
    }

    /// The `i`-th little-endian 64-bit word.
    pub(crate) fn word(&self, i: usize) -> Option<u64> {
        self.array(8 * i).map(u64::from_le_bytes)
    }
}

fn part(bytes: &[u8], offset: usize, len: usize) -> Result<&[u8]> {
    let out_of_bounds = gdsync_device::Error::OutOfBounds { offset, len, size: bytes.len() };
    bytes.get(offset..).and_then(|rest| rest.get(..len)).ok_or(out_of_bounds)
}
