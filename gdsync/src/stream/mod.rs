//! Streams: queues of memory operations that run in order, on a host thread or on a GPU.
mod engine;
mod host;
mod op;

pub use engine::Engine;
pub use host::HostStreamConfig;
pub use op::{Cond, Op, Source};
