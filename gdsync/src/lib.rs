//! Verbs queues whose sends are triggered, and whose completions are awaited, by a stream.
//!
//! GPUDirect Async lets the CPU prepare sends and waits ahead of time, and a stream of memory operations trigger them
//! in order. This crate has
//!
//! - [`verbs`]: devices, memory regions, completion queues and reliable connected queue pairs, on mlx5 rings;
//! - [`stream`]: sends and waits on streams, in batches with word waits and writes, or prepared first and posted
//!   later; here is the table of what libgdsync's functions are called now;
//! - [`hca`]: the software HCA that consumes the rings where there is no card, with faults on demand;
//! - [`memory`]: memory that a device may touch, and the only code that touches it;
//! - [`cuda`]: GPUs, their memory and what they can do;
//! - [`recorder`]: the flight recorder, which keeps when every request reached which stage;
//! - [`nvtx`]: ranges for profilers, with the feature of this name;
//! - [`mlx5`]: the ring formats, byte for byte.
//!
//! # A send on a stream
//!
//! ```
//! use std::time::Duration;
//! use gdsync::memory::Memory;
//! use gdsync::stream::{HostStreamConfig, Stream};
//! use gdsync::Device;
//! use gdsync::verbs::{Access, RecvWr, SendWr};
//!
//! # fn main() -> gdsync::Result<()> {
//! let pd = Device::find(None)?.open()?.alloc_pd()?;
//! let (a, b) = (pd.build_qp().build()?, pd.build_qp().build()?);
//! a.connect(b.address())?;
//! b.connect(a.address())?;
//! let buffer = pd.register(&Memory::alloc(64)?, Access::LOCAL_WRITE)?;
//! buffer.memory().write(0, b"hello")?;
//!
//! let received = b.post_recv(&[RecvWr { wr_id: 1, sges: &[buffer.sge(32, 32)?] }])?;
//! let stream = Stream::host(HostStreamConfig::default())?;
//! stream.send(&a, &SendWr::send(&[buffer.sge(0, 5)?]))?; // leaves when the stream gets here
//! stream.wait(&received)?; // holds the stream until the message is in
//! stream.synchronize(Duration::from_secs(10))?; // failures come out here
//! assert_eq!(&buffer.memory().to_vec()[32..37], b"hello");
//! # Ok(())
//! # }
//! ```
//!
//! # Rules
//!
//! - **Order.** One stream at a time rings the doorbell of a queue pair, and sends leave in the order they were
//!   prepared. What would break this is refused when it is enqueued.
//! - **Completions.** Every work request has one. It is taken once, by `poll` or by a stream's wait; a
//!   [`verbs::Completion`] can be asked at any time without taking it.
//! - **Failure.** An error completes, and so releases the stream; a stream's wait limit ends what never completes.
//!   A released stream does not mean that data arrived: [`stream::Stream::synchronize`] and the completion tell.
//! - **Room.** Queues and streams are bounded. A full one is an error at enqueue, never a stall later.
//! - **Threads.** Everything may be used from any thread.
//! - **Forks.** What was made belongs to the process that made it. In a child forked since, calls are refused with
//!   [`Error::OtherProcess`], dropping does nothing, and [`memory::Memory::alloc`]'s bytes are zeros. GPU memory is not there. The
//!   child may open a device of its own. What it drops, and completions that it polls or asks for, wait for nobody; other calls may
//!   wait for ever for a thread that was within the library when the process forked: fork while none is.

mod device;
pub mod nvtx;
mod probe;
pub mod stream;
pub mod verbs;

/// The software HCA.
pub mod hca {
    pub use gdsync_device::GpuNudge;
    pub use gdsync_device::{FaultPlan, Gid, HcaStats};
    pub use gdsync_soft::{AsyncEvent, AsyncEvents, Card, CardQp, CmaPolicy, SoftHcaConfig};
}
pub use device::Device;
pub use gdsync_device::{Error, Result, copy_engine, cuda, error, memory, recorder};
pub use gdsync_rdma as rdma;
#[doc(hidden)]
pub use gdsync_shm as protocol;
pub use mlx5_ring as mlx5;

/// Version of this crate, as `major.minor.patch`.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
