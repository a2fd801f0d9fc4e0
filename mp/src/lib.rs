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
//! # One-sided operations
//!
//! Ranks write and read each other's [`Window`]s by themselves. A [`Signal`] behind a put tells the target, whose CPU or
//! stream waits for it:
//!
//! ```no_run
//! # use std::time::Duration;
//! # use gdsync::stream::{Cond, Stream};
//! # use mp::{Communicator, Registration, Rma, Signal};
//! # fn step(comm: &Communicator, buffer: &Registration, stream: &Stream, peer: usize) -> mp::Result<()> {
//! let window = comm.window(buffer, 0..2048, Duration::from_secs(1))?; // by all ranks
//! let put = Rma::put(buffer, 2048..4000, peer, 64).with_signal(Signal::set(0, 1));
//! let put = window.start_on_stream(stream, &put)?; // leaves when the stream gets there
//! window.wait_signal_on_stream(stream, 0, 1, Cond::Geq)?; // the stream goes on when the peer's put is in
//! comm.wait_on_stream(stream, &put)?; // and when the buffer may be written again
//! # Ok(())
//! # }
//! ```
//!
//! | LibMP | here |
//! |---|---|
//! | `mp_window_create`, `mp_window_destroy` | [`Communicator::window`], [`Window::destroy`] or dropping it |
//! | `mp_iput`, `mp_iget` | [`Window::iput`], [`Window::iget`]; pieces by [`Rma::putv`], [`Rma::getv`] |
//! | `MP_PUT_INLINE` | [`Rma::put_bytes`] |
//! | `MP_PUT_NOWAIT` | [`Window::put`], and of any operation dropping its request; [`Window::flush`] |
//! | `mp_iput_on_stream`, `mp_iget_on_stream` | [`Window::iput_on_stream`], [`Window::iget_on_stream`] |
//! | `mp_put_prepare`, `mp_iput_post_on_stream` | [`Window::start_in_batch`], [`Stream::submit`](gdsync::stream::Stream::submit) |
//! | `mp_iput_post_all_on_stream` | the same, with all in one batch |
//! | `mp_wait32` | [`wait_value32`], [`wait_value64`]; [`Window::wait_signal`] |
//! | `mp_wait32_on_stream`, `mp_wait_dword_*_on_stream` | [`Stream::wait_value32`](gdsync::stream::Stream::wait_value32), [`Window::wait_signal_on_stream`] |
//! | none | [`Rma::with_signal`], [`Rma::fetch_add`], [`Rma::accumulate`], [`Rma::compare_swap`] |
//!
//! # Graphs
//!
//! Messages of a communicator are counted, each once: a graph or a kernel with steps refuses them. A [`Channel`] is for messages
//! that are repeated; each launch waits for credit of its own.
//!
//! # Messages
//!
//! Messages between two ranks arrive in the order they were sent, without tags: [`tagged`] is a layer above that has them. What
//! a stream sends waits until the receive is posted; where the CPU sends, the device pauses and tries again.
//!
//! Short messages between CPUs of a host are copied through shared memory, beside the device: see
//! [`Communicator::through_slots`]. A send is complete then when it is copied.
//!
//! A rank that dies fails what is under way with it, and no more: waits and streams end with an error that names it, within
//! seconds also where nothing was sent to it. A wait for a word or a [`Signal`] does not say whose it is, and goes on to its own
//! limit: [`Communicator::lost`] says who could not be reached then. A process that is stopped, by a debugger or a machine that sleeps,
//! is lost as well if anybody waits for it and it does not answer for about 9 s, also when it goes on later. The ranks that are left can go on in a new communicator:
//! [`Communicator::shrink`].

pub mod bootstrap;
mod builder;
pub mod cache;
mod channel;
pub mod collective;
mod communicator;
mod connect;
mod credit;
mod deadline;
mod ends;
pub mod error;
mod few;
mod held;
pub mod launch;
mod link;
mod on_stream;
mod path;
mod peer;
mod request;
mod shrink;
mod slots;
pub mod spawn;
pub mod tagged;
mod watch;
mod window;
mod word;

pub use builder::Builder;
pub use channel::Channel;
pub use communicator::{Communicator, Registration};
pub use error::{Error, Result};
pub use on_stream::PreparedMessage;
pub use path::{BufferPath, GpuPath, Local, Path};
pub use peer::Piece;
pub use request::{Request, Status};
pub use shrink::Shrunk;
pub use window::{MAX_INLINE, Rma, Signal, Window};
pub use word::{wait_value32, wait_value64};

/// What profilers show the ranges of messages in.
static DOMAIN: gdsync::nvtx::Domain = gdsync::nvtx::Domain::new(c"mp");
