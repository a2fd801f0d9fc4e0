//! Shared-memory links between the software HCAs of one host: two packet rings, set up over a Unix socket.

mod bell;
mod fds;
mod port;
mod ring;
mod span;

pub(crate) use bell::Bell;
pub(crate) use port::{Line, LinkEnds, Port};
pub(crate) use ring::{HEADER, MOST_RECORDS, Peek, Piece, Record, RxRing, TxRing};
