//! The Python package `gdasync`, over `mp`. What Python sees is described in `gdasync/_gdasync.pyi`.
//!
//! Calls that may wait release the interpreter's lock, look for signals ten times a second, and end by a deadline.
//! Tensors are kept until the operations on them are complete, see `shared`.

mod buffer;
mod channel;
mod communicator;
mod error;
mod exchange;
mod request;
mod shared;
mod stream;
mod tensor;
mod wait;
mod window;

use pyo3::prelude::*;

/// The extension module.
#[pymodule]
mod _gdasync {
    #[pymodule_export]
    use crate::buffer::Buffer;
    #[pymodule_export]
    use crate::channel::Channel;
    #[pymodule_export]
    use crate::communicator::{Communicator, init};
    #[pymodule_export]
    use crate::request::Request;
    #[pymodule_export]
    use crate::stream::{Recorded, Stream};
    #[pymodule_export]
    use crate::window::Window;
}
