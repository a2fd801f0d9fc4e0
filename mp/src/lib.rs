//! Messages between ranks, as in LibMP: sent and awaited by a GPU stream, a host stream or the CPU.
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
//! comm.send_on_stream(&stream, &buffer, 0..2048, peer)?; // sent by the stream
//! comm.wait_on_stream(&stream, &receive)?; // the stream goes on when the message is in
//! stream.synchronize(second)?; // errors of the network come out here
//! comm.finalize(10 * second)
//! # }
//! ```
//!
//! | start here | for |
//! |---|---|
//! | [`CommunicatorBuilder`], [`launch`] | joining a launcher's job, or starting the ranks |
//! | [`Communicator`], [`Request`] | messages by the CPU and by streams |
//! | [`Channel`] | messages that loops, graphs and kernels repeat |
//! | [`Window`], [`Rma`], [`Signal`] | one-sided operations |
//! | [`collective`], [`tagged`] | collectives; tags, as in MPI |
//! | [`RequestSet`], [`wait_any`] | requests of all kinds, event loops |
//! | [`cache`] | the registration cache |
//!
//! `docs/porting.md` has the equivalents of LibMP's and MPI's calls.
//!
//! # One-sided operations
//!
//! Ranks write and read each other's [`Window`]s without the owner. A [`Signal`] after a put notifies the target, whose CPU or
//! stream waits for it:
//!
//! ```no_run
//! # use std::time::Duration;
//! # use gdsync::stream::{Cond, Stream};
//! # use mp::{Communicator, Registration, Rma, Signal};
//! # fn step(comm: &Communicator, buffer: &Registration, stream: &Stream, peer: usize) -> mp::Result<()> {
//! let window = comm.window(buffer, 0..2048, Duration::from_secs(1))?; // by all ranks
//! let put = Rma::put(buffer, 2048..4000, peer, 64).with_signal(Signal::set(0, 1));
//! let put = window.start_on_stream(stream, &put)?; // sent by the stream
//! window.wait_signal_on_stream(stream, 0, 1, Cond::Geq)?; // the stream goes on when the peer's put is in
//! comm.wait_on_stream(stream, &put)?; // and when the buffer may be written again
//! # Ok(())
//! # }
//! ```
//!
//! # Graphs
//!
//! Messages of a communicator are counted once, so graphs and kernels with steps refuse them. A [`Channel`] is for repeated
//! messages; each launch waits for its own credit.
//!
//! # Messages
//!
//! Messages between two ranks arrive in the order they were sent, without tags: [`tagged`] is a layer above that has them. A
//! stream waits until the receive is posted before it sends; for sends of the CPU the device retries.
//!
//! Short messages between CPUs of a host are copied through a FIFO in shared memory, beside the device: see
//! [`Communicator::fifo_messages`]. Such a send is complete when it is copied.
//!
//! When a rank dies, operations with it fail, and no others: waits and streams end within seconds with an error that names
//! it, also if nothing was sent to it. A wait for a word or a [`Signal`] does not know whose it is, and goes on to its own limit;
//! [`Communicator::lost`] names the lost ranks then. A process that is stopped, by a debugger or a suspended machine, counts as lost if
//! another rank waits for it and it does not answer for about 5 s, with a card 9 s, even if it continues later. The survivors can go on in a new
//! communicator: [`Communicator::shrink`].
//!
//! # Memory model and safety
//!
//! Devices, other processes and GPUs write registered memory at any time. The crate reaches it only through
//! [`Memory`](gdsync::memory::Memory), by volatile or atomic accesses, and hands out no references to it. A completion makes the data
//! of its message visible to the thread that sees it, a stream's wait to the work that follows. The only unsafe functions are those
//! that take addresses: [`Communicator::register_cached`] and [`Communicator::register_cached_gpu`].
//!
//! # Features
//!
//! | feature | default | what |
//! |---|---|---|
//! | `nvtx` | no | ranges for NVIDIA's profilers |

mod builder;
pub mod cache;
mod channel;
pub mod collective;
mod communicator;
mod credit;
pub mod error;
mod exchange;
mod finalize;
mod in_flight;
pub mod launch;
mod offer;
mod on_stream;
mod overlap;
mod path;
mod peer;
mod places;
mod registration;
mod request;
mod request_set;
mod rma_queue;
mod shm_fifo;
mod shm_memory;
pub mod tagged;
mod transport;
mod wait;
mod watchdog;
mod window;

pub use builder::{CommunicatorBuilder, Shrunk};
pub use channel::Channel;
pub use communicator::Communicator;
pub use error::{Error, Result};
pub use exchange::Exchange;
pub use path::{BufferPath, GpuPath, IntraHostPath, NearPath, PeerPath};
pub use registration::{Piece, Registration};
pub use request::{Request, Status};
pub use request_set::{AnyRequest, RequestSet, wait_any};
pub use wait::{wait_value32, wait_value64};
pub use window::{MAX_INLINE, Rma, Signal, Window};
