//! Shared-memory links between the software HCAs of one host: two packet rings, set up over a Unix socket.

mod event_count;
mod port;
mod ring;

pub(crate) use event_count::EventCount;
pub(crate) use port::{LinkEnds, PeerSocket, Port};
pub(crate) use ring::{HEADER, MAX_RECORDS, Piece, Record, RxHints, RxRing, TxRing};
