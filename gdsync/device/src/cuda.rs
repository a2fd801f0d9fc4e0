//! GPUs: contexts, capabilities, memory, registration of host memory, kernels and copy engines.
//!
//! CUDA is loaded at run time; the rest of this crate works without it.
//!
//! # Calls of the driver that wait for streams
//!
//! A stream may wait long for a message. Some calls of the driver wait for all streams of the process, even unrelated ones, and block
//! other calls meanwhile. Measured on an H200 (driver 580.159, CUDA 13.0) with one stream in a wait:
//!
//! | call | waits for all streams of the process | blocks meanwhile, in all threads |
//! |---|---|---|
//! | `cuMemFree`, `cuMemHostUnregister`, `cuModuleLoadData`, `cuModuleUnload` | always | kernel and graph launches, host functions, `cuMemAlloc`, `cuMemHostRegister`, `cuStreamCreate` |
//! | `cuStreamCreate` | when the driver's pool is exhausted: at the 34th and 77th stream | the same |
//! | `cuGraphInstantiate` | likewise, at the 10th and 31st graph with a kernel | the same |
//! | `cuStreamSynchronize`, `cuCtxSynchronize` | by definition | nothing |
//!
//! Stream memory operations and `cuStreamQuery` never block. So an application deadlocks until the deadline of the wait, if one thread
//! frees memory while another is about to launch what would satisfy the wait. This library keeps deadlines without calling the driver,
//! gives memory back only while its streams are idle and holds submissions meanwhile, and has [`Gpu::open`] fill the driver's pool.

mod capabilities;
pub mod channels;
mod copy_engine;
mod deferred_free;
mod driver_tasks;
mod free_list;
mod gpu;
mod ipc;
pub mod kernel_exec;
mod other_processes;
mod register;

pub use capabilities::{Calibration, Capabilities, Flush, Via};
pub use channels::{ChannelPressure, WaitingStream};
pub use copy_engine::{Engine, GpuCopyEngines};
pub use deferred_free::{Activity, gate, watch_activity};
pub use driver_tasks::DriverTask;
pub use free_list::{Buffer, Pages};
pub use gpu::{Gpu, Joined, NudgerSlot};
pub use ipc::{IpcHandles, IpcOpening};
pub use kernel_exec::KernelExecutor;
pub use register::{Registered, is_registered};

/// What giving memory back waits for, and what to do.
const ALL_STREAMS: &str = "all streams of the process, as CUDA does; try again when no stream waits";

/// A `CUstream`. 0 and 1 are the legacy default stream, 2 is the per-thread default stream.
pub type RawStream = usize;
