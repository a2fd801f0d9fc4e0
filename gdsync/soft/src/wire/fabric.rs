//! Links over libfabric: packets are messages of a reliable datagram endpoint.
//!
//! A TCP connection between the two hosts stays the [line](super::tcp) of a link: it greets, proves the job's secret, carries the
//! names of the endpoints, and tells the end of the peer's process. No provider tells that by itself. Of a provider only messages
//! are asked; their order is restored here, and [credits](endpoint) keep a sender from overrunning the receive buffers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use self::endpoint::Received;
use super::Peer;
use super::ring::{HEADER, Piece};
use super::tcp::{Connection, Frame, Offer, SILENCE, body_len, copy_packet};
use gdsync_device::error::Result;

pub(crate) use endpoint::Endpoint;
pub use survey::fabric_providers;

mod endpoint;
mod objects;
mod survey;

/// After the line has ended, packets that are still in the provider are waited for this long.
const LAST_PACKETS: Duration = Duration::from_millis(2);
/// How long the end of a link waits for its last packets to leave, and for the peer to close.
const FAREWELL: Duration = Duration::from_millis(200);
/// Pause between two looks at them.
const FAREWELL_PAUSE: Duration = Duration::from_micros(50);

/// This side's ends of a link.
#[derive(Debug)]
pub(crate) struct FabricEnds {
    pub(crate) peer: Peer,
    pub(crate) tx: FabricTx,
    pub(crate) rx: FabricRx,
}

impl FabricEnds {
    /// The link between two offers.
    ///
    /// # Errors
    /// The text says why not.
    pub(super) fn connect(
        endpoint: &Arc<Endpoint>,
        peer: Peer,
        line: Arc<Connection>,
        own: &Offer,
        theirs: &Offer,
    ) -> std::result::Result<Self, String> {
        endpoint.connect(own, theirs, line.clone())?;
        let link = Arc::new(Link { endpoint: endpoint.clone(), id: own.id, line });
        let rx = FabricRx { link: link.clone(), current: None, is_ready: false, ended: None };
        Ok(Self { peer, tx: FabricTx { link, is_begun: false, blocked: None }, rx })
    }
}

/// A link of an endpoint. Its two ends share it.
#[derive(Debug)]
struct Link {
    endpoint: Arc<Endpoint>,
    /// Its number at this side.
    id: u64,
    line: Arc<Connection>,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.endpoint.disconnect(self.id);
    }
}

/// Sending end.
#[derive(Debug)]
pub(crate) struct FabricTx {
    link: Arc<Link>,
    /// The HCA uses it.
    is_begun: bool,
    /// Since when a packet has had no room.
    blocked: Option<Instant>,
}

impl FabricTx {
    /// Watches the line of link `index`.
    pub(crate) fn begin(&mut self, index: usize) {
        self.is_begun = true;
        self.link.line.watch(index);
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.link.line.is_alive()
    }

    /// Whether the provider has sent all packets, and the last one had room.
    pub(crate) fn is_drained(&self) -> bool {
        self.blocked.is_none() && self.link.endpoint.is_sent(self.link.id)
    }

    /// Sends a packet. Returns false if there is no room. A peer that makes no room for [`SILENCE`] is gone.
    ///
    /// # Errors
    /// As reading a piece.
    pub(crate) fn try_push(
        &mut self,
        header: &[u8; HEADER],
        ext: &[u8],
        pieces: &[Piece<'_>],
    ) -> Result<bool> {
        let len = HEADER + body_len(ext, pieces);
        let endpoint = &self.link.endpoint;
        let is_sent = endpoint.send(self.link.id, len, |room| copy_packet(room, header, ext, pieces))?;
        self.blocked = if is_sent { None } else { self.blocked.or_else(|| Some(Instant::now())) };
        if self.blocked.is_some_and(|since| since.elapsed() > SILENCE) {
            self.link.line.lose(&"the peer takes no packets");
        }
        Ok(is_sent)
    }

    /// Ends the link of a dead peer: packets that were not taken are dropped.
    pub(crate) fn take_down(&self) {
        self.link.endpoint.disconnect(self.link.id);
    }

    /// Whether a packet that had no room may have some now.
    pub(crate) fn has_room(&self) -> bool {
        self.blocked.is_none() || self.link.endpoint.has_room(self.link.id)
    }
}

impl Drop for FabricTx {
    /// Waits until the packets have left and the peer has closed its end of the line: a provider may drop what it has not delivered
    /// when its endpoint closes.
    fn drop(&mut self) {
        if !(self.is_begun && self.is_alive()) {
            return;
        }
        let until = Instant::now() + FAREWELL;
        let goes_on = |is_over: bool| {
            self.link.endpoint.poll();
            std::thread::sleep(FAREWELL_PAUSE);
            !is_over && Instant::now() < until
        };
        while goes_on(self.link.endpoint.is_sent(self.link.id)) {}
        self.link.line.end();
        while goes_on(self.link.line.is_closed()) {}
        self.link.line.lose(&"it was closed");
    }
}

/// Receiving end.
#[derive(Debug)]
pub(crate) struct FabricRx {
    link: Arc<Link>,
    /// The packet that was shown and not popped.
    current: Option<Received>,
    /// The line may have ended.
    is_ready: bool,
    ended: Option<Instant>,
}

impl FabricRx {
    /// The line may have ended.
    pub(crate) fn set_ready(&mut self) {
        self.is_ready = true;
    }

    /// The next packet, if any.
    pub(crate) fn peek(&mut self) -> Option<Frame> {
        if self.current.is_none() {
            self.current = self.link.endpoint.take(self.link.id);
        }
        if let Some(received) = &self.current {
            let (header, body) =
                received.packet().split_first_chunk().expect("the endpoint checks the length");
            return Some(Frame { header: *header, body_len: body.len() });
        }
        if std::mem::take(&mut self.is_ready) && self.ended.is_none() && self.link.line.is_closed() {
            self.ended = Some(Instant::now());
        }
        if self.ended.is_some_and(|since| since.elapsed() > LAST_PACKETS) {
            self.link.line.lose(&"the peer closed it");
        }
        None
    }

    /// Whether a packet waits.
    pub(crate) fn has_packet(&mut self) -> bool {
        self.is_ready = true;
        self.peek().is_some()
    }

    /// Body of the packet that was shown.
    pub(crate) fn body(&self) -> &[u8] {
        self.current.as_ref().map_or(&[], |received| &received.packet()[HEADER..])
    }

    /// Frees the packet that was shown.
    pub(crate) fn pop(&mut self) {
        if let Some(received) = self.current.take() {
            self.link.endpoint.give_back(self.link.id, received);
        }
    }
}

impl Drop for FabricRx {
    fn drop(&mut self) {
        self.pop();
    }
}

#[cfg(test)]
mod tests;
