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

/// An object that a call gets.
pub(crate) type Any<'a, 'py> = &'a Bound<'py, PyAny>;
/// The stream that a call gets, if any.
pub(crate) type OnStream<'a, 'py> = Option<Any<'a, 'py>>;

/// The extension module.
#[pymodule]
mod _gdasync {
    #[pymodule_export]
    use crate::{
        buffer::Buffer,
        channel::Channel,
        communicator::{Communicator, init},
        request::Request,
        stream::{Recorded, Stream},
        window::Window,
    };
}
