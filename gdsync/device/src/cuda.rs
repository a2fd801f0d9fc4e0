//! GPUs, as streams and queues need them: contexts, capabilities, memory, registration of host memory.
//!
//! CUDA is found at run time; without it everything else of this crate works.
//!
//! # What waits for streams in the driver, and what that holds up
//!
//! A stream that waits for a message may wait long, and some calls of the driver wait with it, also when they have nothing to do
//! with the stream. Measured on an H200 (driver 580.159, CUDA 13.0) with one stream in a wait:
//!
//! | call | waits for all streams of the process | holds up meanwhile, in all threads |
//! |---|---|---|
//! | `cuMemFree`, `cuMemHostUnregister`, `cuModuleLoadData`, `cuModuleUnload` | always | kernel and graph launches, host functions, `cuMemAlloc`, `cuMemHostRegister`, `cuStreamCreate` |
//! | `cuStreamCreate` | when the driver's stock is used up: the 34th and 77th stream | the same |
//! | `cuGraphInstantiate` | the same, for the 10th and 31st graph with a kernel | the same |
//! | `cuStreamSynchronize`, `cuCtxSynchronize` | as they should | nothing |
//!
//! Stream memory operations and `cuStreamQuery` are never held up. So an application that frees memory in one thread while
//! another is about to launch what would end a wait has stopped itself; only the deadline of the wait ends that. This library
//! keeps deadlines without calling the driver, gives memory back only while no stream of its own has work and lets none begin
//! meanwhile, and has the driver fill its stock in [`Gpu::open`].

mod capabilities;
pub mod channels;
mod copy_engine;
mod deferred_free;
mod driver_tasks;
mod free_list;
mod gpu;
pub mod kernel_exec;
mod other_processes;
mod register;
mod reserve;

pub use capabilities::{Calibration, Capabilities, Flush, Via};
pub use channels::{ChannelPressure, Standing};
pub use copy_engine::{Engine, GpuCopyEngines};
pub use deferred_free::{Activity, gate, mind};
pub use driver_tasks::DriverTask;
pub use free_list::{Block, Buffer, Pages};
pub use gpu::{Gpu, Joined, NudgerSlot};
pub use kernel_exec::KernelExecutor;
pub use register::{Registered, is_registered};

/// `CUstream`, as an address. 0 and 1 are the legacy default stream, 2 the per-thread one.
pub type RawStream = usize;
