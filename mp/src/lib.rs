//! Messaging on GPU streams in the manner of LibMP: send and receive between ranks, started and awaited by the CPU or
//! by a stream.
//!
//! ```no_run
//! use std::time::Duration;
//! use gdsync::memory::Memory;
//! use gdsync::stream::{HostStreamConfig, Stream};
//! use mp::Communicator;
//!
//! # fn main() -> mp::Result<()> {
//! let second = Duration::from_secs(1);
//! let comm = Communicator::builder().spawn(2).init()?; // joins a launcher, or starts rank 1 itself
//! let peer = 1 - comm.rank();
//! let buffer = comm.register(&Memory::alloc(4096)?)?;
//! let stream = Stream::host(HostStreamConfig::default())?;
//!
//! let receive = comm.irecv(&buffer, 2048..4096, peer)?;
//! comm.isend_on_stream(&stream, &buffer, 0..2048, peer)?; // leaves when the stream gets there
//! comm.wait_on_stream(&stream, &receive)?; // the stream goes on when the message is in
//! stream.synchronize(second)?; // errors of the network come out here
//! comm.finalize(10 * second)
//! # }
//! ```
//!
//! Messages between two ranks arrive in the order they were sent; there are no tags. What a stream sends waits until the
//! receive is posted; where the CPU sends, the device pauses and tries again.
//!
//! A rank that dies fails what is under way with it, and no more: waits and streams end with an error that names it, within
//! seconds also where nothing was sent to it.

pub mod bootstrap;
mod builder;
pub mod cache;
mod communicator;
mod connect;
mod credit;
mod deadline;
pub mod error;
pub mod launch;
mod link;
mod on_stream;
mod peer;
mod request;
pub mod spawn;
mod watch;

pub use builder::Builder;
pub use communicator::{Communicator, Registration};
pub use error::{Error, Result};
pub use on_stream::PreparedMessage;
pub use peer::Piece;
pub use request::{Request, Status};
