//! Messaging on GPU streams in the manner of LibMP.
pub mod bootstrap;
mod deadline;
pub mod error;
pub mod launch;
pub mod spawn;

pub use error::{Error, Result};
