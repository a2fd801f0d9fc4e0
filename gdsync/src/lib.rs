//! Verbs queues whose sends are triggered, and whose completions are awaited, by a GPU stream.
mod env;
pub mod error;
pub mod hca;
pub mod memory;
pub mod mlx5;
pub mod protocol;
pub mod stream;
pub mod verbs;

pub use error::{Error, Result};
