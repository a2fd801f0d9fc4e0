//! The exchange of addresses through an object of Python: a store of `torch.distributed`, or a communicator of MPI.

use std::time::Duration;

use mp::Exchange;
use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::Any;

/// An object with `rank`, `size` and `allgather(bytes, seconds)`.
#[derive(Debug)]
pub(crate) struct OfPython {
    object: Py<PyAny>,
    rank: usize,
    size: usize,
}

impl OfPython {
    pub(crate) fn new(object: Any<'_, '_>) -> PyResult<Self> {
        let (rank, size) = (object.getattr("rank")?.extract()?, object.getattr("size")?.extract()?);
        Ok(Self { object: object.clone().unbind(), rank, size })
    }
}

impl Exchange for OfPython {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn allgather(&mut self, bytes: &[u8], timeout: Duration) -> mp::Result<Vec<Vec<u8>>> {
        let gather = |py: Python<'_>| -> PyResult<_> {
            let arguments = (PyBytes::new(py, bytes), timeout.as_secs_f64());
            self.object.call_method1(py, "allgather", arguments)?.extract::<Vec<Vec<u8>>>(py)
        };
        let gathered = Python::try_attach(|py| {
            gather(py)
                .map_err(|error| (error.value(py).to_string(), error.is_instance_of::<PyTimeoutError>(py)))
        });
        match gathered.unwrap_or_else(|| Err(("the interpreter has ended".into(), false))) {
            Ok(all) => Ok(all),
            Err((what, true)) => Err(mp::Error::Deadline {
                what,
                after: timeout,
                fix: "see that all ranks of the group make the same calls",
            }),
            Err((what, false)) => Err(mp::Error::Bootstrap {
                peer: "the group".into(),
                what,
                cause: None,
                fix: "see that all ranks of the group live and make the same calls",
            }),
        }
    }
}
