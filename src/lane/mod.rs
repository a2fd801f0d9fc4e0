//! A stream for programs that run on a host thread or on a GPU: which of them, where the data is, and work between sends
//! and waits.

mod kernels;
mod place;
mod stream;

pub use kernels::{Kernel, Kernels};
pub use place::{Description, Engine, Place, Placed, Placement, Queues, own_gpu};
pub use stream::Lane;

/// What programs on a lane may fail with.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
