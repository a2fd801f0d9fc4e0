//! Requests: operations under way.

use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::OnStream;
use crate::buffer::Part;
use crate::error::OrRaise;
use crate::shared::Shared;
use crate::stream::Submitter;

#[pyclass(frozen, module = "gdasync")]
pub(crate) struct Request {
    shared: Arc<Shared>,
    operation: &'static str,
    request: mp::Request,
    gpu: Option<i32>,
    /// Its memory, until it is known to be complete.
    part: Mutex<Option<Arc<Part>>>,
}

impl Request {
    /// A request, or nothing more to do with it in a capture.
    pub(crate) fn new(
        shared: &Arc<Shared>,
        operation: &'static str,
        request: mp::Request,
        part: Option<Arc<Part>>,
        stream: Option<&Submitter>,
    ) -> Self {
        let gpu = part.as_ref().and_then(|part| part.gpu);
        let part = match stream {
            Some(stream) => part.and_then(|part| stream.keep_in_capture(part)),
            None => part,
        };
        Self { shared: shared.clone(), operation, request, gpu, part: Mutex::new(part) }
    }

    /// Waits for it.
    pub(crate) fn wait_for(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<usize> {
        let wait = |slice| self.shared.comm.wait(&self.request, slice);
        let status = self.shared.wait(py, (self.operation, Some(self.request.rank())), timeout, wait)?;
        drop(self.part.lock().take());
        Ok(status.bytes)
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if let Some(part) = self.part.get_mut().take() {
            self.shared.keep(self.request.clone(), part);
        }
    }
}

#[pymethods]
impl Request {
    #[getter]
    fn rank(&self) -> usize {
        self.request.rank()
    }

    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<usize> {
        self.wait_for(py, timeout)
    }

    fn test(&self, py: Python<'_>) -> PyResult<Option<usize>> {
        let known =
            py.detach(|| self.request.test()).or_raise(py, self.operation, Some(self.request.rank()))?;
        if known.is_some() {
            drop(self.part.lock().take());
        }
        Ok(known.map(|status| status.bytes))
    }

    #[pyo3(signature = (stream=None))]
    fn wait_on(&self, py: Python<'_>, stream: OnStream<'_, '_>) -> PyResult<()> {
        let stream = Submitter::of(stream, self.gpu, py)?.ok_or_else(needs_stream)?;
        let of = ("wait_on", Some(self.request.rank()));
        self.shared.submit(py, of, &stream, |comm, batch| comm.wait_in_batch(batch, &self.request))
    }
}

/// The call is for streams, and none is known.
pub(crate) fn needs_stream() -> PyErr {
    PyValueError::new_err(
        "memory of the CPU has no current stream: pass stream=, for example gdasync.Stream.host()",
    )
}
