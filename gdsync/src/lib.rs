//! GPUDirect Async: RDMA sends that a GPU stream triggers, and completions that a GPU stream waits for. The CPU enqueues both ahead
//! of time. Without a GPU a host thread is the stream; without a card a software HCA executes the requests.
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
//! let received = b.post_recv(&[RecvWr::new(&[buffer.sge(32, 32)?]).id(1)])?;
//! let stream = Stream::host(HostStreamConfig::default())?;
//! stream.send(&a, &SendWr::send(&[buffer.sge(0, 5)?]))?; // leaves when the stream gets here
//! stream.wait(&received)?; // holds the stream until the message is in
//! stream.synchronize(Duration::from_secs(10))?; // failures come out here
//! assert_eq!(&buffer.memory().to_vec()[32..37], b"hello");
//! # Ok(())
//! # }
//! ```
//!
//! | module | what |
//! |---|---|
//! | [`verbs`] | devices, memory regions, completion queues, reliable connected queue pairs |
//! | [`stream`] | sends and waits on streams: single, in batches, prepared, in graphs and kernels |
//! | [`memory`], [`cuda`] | host and GPU memory that devices access; GPUs and what they can do |
//! | [`hca`] | the software HCA and its fault injection |
//! | [`recorder`] | the flight recorder: when each request was enqueued, triggered, completed |
//! | [`nvtx`] | ranges for NVIDIA's profilers, with the feature `nvtx` |
//! | [`mlx5`] | the ring formats, byte for byte |
//!
//! Between ranks, with launchers, use `gdsync-mp`. `docs/porting.md` has the equivalents of libgdsync's calls.
//!
//! # Rules
//!
//! - **Order.** One stream at a time rings the doorbell of a queue pair. Sends leave in prepare order. Violations are
//!   refused at submission.
//! - **Completions.** Every work request has one. It is taken once, by `poll` or by a stream wait. A
//!   [`verbs::Completion`] can be queried at any time without taking it.
//! - **Failure.** An error completes the request, and so releases the stream. A stream's wait limit ends what never
//!   completes. A released stream does not imply that data arrived: [`stream::Stream::synchronize`] and the completion
//!   report errors.
//! - **Room.** Queues and streams are bounded. A full one returns an error at submission and never stalls later.
//! - **Threads.** Everything may be used from any thread.
//! - **Forks.** Objects belong to the process that created them. In a forked child, calls on them return
//!   [`Error::OtherProcess`], dropping does nothing, the bytes of [`memory::Memory::alloc`] are zeros, and GPU memory
//!   is not mapped. The child may open its own device. Dropping, polling and querying completions never block in a
//!   child. Other calls may block forever if a thread was inside the library during the fork: fork while none is.

mod device;
pub mod nvtx;
mod probe;
pub mod stream;
pub mod verbs;

/// The software HCA.
pub mod hca {
    pub use gdsync_device::GpuNudge;
    pub use gdsync_device::{FaultPlan, Gid, HcaStats};
    pub use gdsync_soft::{
        CmaPolicy, Interface, SoftHcaConfig, TCP, fabric_providers, interfaces, job_secret, join_job,
        tcp_address,
    };
}
pub use device::Device;
pub use gdsync_device::{Error, Result, copy_engine, cuda, env, error, memory, recorder};
pub use gdsync_rdma as rdma;
/// Lock-free hand-overs between threads, processes and devices: FIFO of short messages, packet rings, doorbells.
pub use gdsync_shm as shm;
pub use mlx5_ring as mlx5;

/// Version of this crate, as `major.minor.patch`.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
