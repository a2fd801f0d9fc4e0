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
use pyo3::sync::PyOnceLock;

/// An object that a call gets.
pub(crate) type Any<'a, 'py> = &'a Bound<'py, PyAny>;
/// The stream that a call gets, if any.
pub(crate) type OnStream<'a, 'py> = Option<Any<'a, 'py>>;

/// An attribute of a module of torch, which is looked up once; `None` while the program has not imported torch.
pub(crate) fn of_torch<'a, 'py>(
    py: Python<'py>,
    found: &'a PyOnceLock<Py<PyAny>>,
    module: &str,
    name: &str,
) -> PyResult<Option<&'a Bound<'py, PyAny>>> {
    if found.get(py).is_none() && !py.import("sys")?.getattr("modules")?.contains("torch")? {
        return Ok(None);
    }
    let find = || Ok(py.import(module)?.getattr(name)?.unbind());
    found.get_or_try_init(py, find).map(|found| Some(found.bind(py)))
}

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
