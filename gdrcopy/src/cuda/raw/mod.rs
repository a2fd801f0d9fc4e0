//! The entry points of the CUDA driver as they are, for the crates of this project that drive streams. Applications
//! have no use for them.

mod api;
mod context;
pub mod layout;

pub use super::driver::pointer_info;
pub use api::Api;
pub use context::{Current, Relaxed};
