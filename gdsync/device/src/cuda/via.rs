//! How a GPU runs the operations of a stream.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// What runs the operations of a stream on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Via {
    /// Stream memory operations, run by the GPU's front end: no SM is used, so kernels of other streams run undisturbed. An
    /// unmet wait is looked at again every few microseconds (8 on an idle H200).
    #[default]
    MemOp,
    /// A kernel of one thread for each submission. It notices what it waits for at once, keeps the deadline of a wait by
    /// itself, and writes nothing more after one that failed. It takes a slot of an SM while it waits; where several
    /// processes share the GPU without MPS, it keeps the others waiting for whole time slices.
    Kernel,
    /// Whichever was faster on this GPU: see `gdsync::stream::calibrate`.
    Auto,
}

impl fmt::Display for Via {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Via::MemOp => "memop",
            Via::Kernel => "kernel",
            Via::Auto => "auto",
        })
    }
}

impl FromStr for Via {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self> {
        match word {
            "memop" => Ok(Via::MemOp),
            "kernel" => Ok(Via::Kernel),
            "auto" => Ok(Via::Auto),
            _ => Err(Error::invalid("via", format!("'{word}'"), "memop, kernel or auto")),
        }
    }
}
