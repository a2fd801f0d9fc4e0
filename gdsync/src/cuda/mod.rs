//! GPUs, as streams and queues need them: contexts, capabilities, memory, registration of host memory.
//!
//! CUDA is found at run time; without it everything else of this crate works.

mod arena;
mod calibrate;
mod capabilities;
mod engine;
mod engines;
mod errands;
mod gpu;
mod handles;
mod kept;
mod neighbours;
mod reaper;
mod register;
mod wrap;

pub use calibrate::Calibration;
pub use capabilities::{Capabilities, Flush};
pub(crate) use engine::Engine;
pub(crate) use engines::Engines;
pub(crate) use errands::Errand;
pub use gpu::Gpu;
pub(crate) use kept::{Block, Buffer, Pages};
pub(crate) use reaper::{Activity, mind, pass};
pub(crate) use register::Registered;

/// `CUstream`, as an address. 0 and 1 are the legacy default stream, 2 the per-thread one.
pub type RawStream = usize;
