//! What the examples share that run on a host thread or on a GPU: which of them, and where the data is.

mod kernels;
mod lane;
mod place;

pub(crate) use kernels::{Kernel, Kernels};
pub(crate) use lane::Lane;
pub(crate) use place::{Description, Placed, Placement};

/// What an example may fail with.
pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
