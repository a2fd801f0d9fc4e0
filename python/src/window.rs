//! Windows: memory that the other ranks read and write.

use std::sync::Arc;
use std::time::Duration;

use gdsync::stream::Cond;
use mp::{Rma, Signal};
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::buffer::Part;
use crate::request::Request;
use crate::shared::Shared;
use crate::stream::Submitter;
use crate::{Any, OnStream};

#[pyclass(frozen, module = "gdasync")]
pub(crate) struct Window {
    shared: Arc<Shared>,
    /// `None` when it is closed.
    window: Mutex<Option<mp::Window>>,
    part: Arc<Part>,
}

/// Word, `"add"` or `"set"`, value.
type PySignal = (usize, String, u64);

fn signal((word, how, value): &PySignal) -> PyResult<Signal<'static>> {
    match how.as_str() {
        "add" => Ok(Signal::add(*word, *value)),
        "set" => Ok(Signal::set(*word, *value)),
        _ => Err(PyValueError::new_err(format!(
            "the signal is '{how}': expected (word, 'add' or 'set', value)"
        ))),
    }
}

impl Window {
    /// Makes a window of a tensor, with all ranks.
    pub(crate) fn make(
        shared: &Arc<Shared>,
        tensor: Any<'_, '_>,
        timeout: Option<f64>,
        make: impl FnOnce(&mp::Communicator, &Part, Duration) -> mp::Result<mp::Window> + Send + 'static,
    ) -> PyResult<Self> {
        let part = Part::of(&shared.comm, tensor, true, true)?;
        let (held, py) = (part.clone(), tensor.py());
        let made =
            shared.with_all(py, "window", timeout, move |shared, limit| make(&shared.comm, &held, limit))?;
        shared.expose([part.clone()]);
        Ok(Self { shared: shared.clone(), window: Mutex::new(Some(made)), part })
    }

    fn open(&self) -> PyResult<mp::Window> {
        self.window.lock().clone().ok_or_else(|| PyValueError::new_err("the window is closed"))
    }

    /// Starts an operation, on the memory of `part` if it has some, in the order of a stream if there is one.
    fn start<'a>(
        &self,
        py: Python<'_>,
        (operation, rank): (&'static str, usize),
        part: Option<&Arc<Part>>,
        stream: OnStream<'_, '_>,
        rma: impl Fn() -> Rma<'a> + Sync,
    ) -> PyResult<Request> {
        let (shared, window) = (&self.shared, self.open()?);
        let stream = Submitter::of(stream, part.unwrap_or(&self.part).gpu, py)?;
        let started = match &stream {
            None => shared.start(py, (operation, rank), |_| window.start(&rma()))?,
            Some(stream) => shared.submit(py, (operation, Some(rank)), stream, |_, batch| {
                window.start_in_batch(batch, &rma())
            })?,
        };
        Ok(Request::new(shared, operation, started, part.cloned(), stream.as_deref()))
    }
}

#[pymethods]
impl Window {
    #[pyo3(signature = (tensor, rank, offset=0, *, signal=None, signal_in=None, stream=None))]
    fn put(
        &self,
        tensor: Any<'_, '_>,
        rank: usize,
        offset: usize,
        signal: Option<PySignal>,
        signal_in: Option<&Bound<'_, Self>>,
        stream: OnStream<'_, '_>,
    ) -> PyResult<Request> {
        if signal.is_none() && signal_in.is_some() {
            return Err(PyValueError::new_err(
                "signal_in without signal: expected signal=(word, 'add' or 'set', value)",
            ));
        }
        let part = Part::of(&self.shared.comm, tensor, false, false)?;
        let signal = signal.as_ref().map(self::signal).transpose()?;
        let words = signal_in.map(|window| window.get().open()).transpose()?;
        self.start(tensor.py(), ("put", rank), Some(&part), stream, || {
            let put = Rma::put(&part.registration, 0..part.len(), rank, offset);
            match (signal.clone(), &words) {
                (Some(signal), Some(words)) => put.with_signal(signal.of(words)),
                (Some(signal), None) => put.with_signal(signal),
                (None, _) => put,
            }
        })
    }

    #[pyo3(signature = (tensor, rank, offset=0, *, stream=None))]
    fn get(
        &self,
        tensor: Any<'_, '_>,
        rank: usize,
        offset: usize,
        stream: OnStream<'_, '_>,
    ) -> PyResult<Request> {
        let part = Part::of(&self.shared.comm, tensor, true, false)?;
        self.start(tensor.py(), ("get", rank), Some(&part), stream, || {
            Rma::get(&part.registration, 0..part.len(), rank, offset)
        })
    }

    #[pyo3(signature = (rank, signal, *, stream=None))]
    fn signal(
        &self,
        py: Python<'_>,
        rank: usize,
        signal: PySignal,
        stream: OnStream<'_, '_>,
    ) -> PyResult<()> {
        let signal = self::signal(&signal)?;
        self.start(py, ("signal", rank), None, stream, || Rma::signal(rank, signal.clone())).map(drop)
    }

    #[pyo3(signature = (word, value, *, stream=None, timeout=None))]
    fn wait_signal(
        &self,
        py: Python<'_>,
        word: usize,
        value: u64,
        stream: OnStream<'_, '_>,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let window = self.open()?;
        match Submitter::of(stream, self.part.gpu, py)? {
            Some(stream) => self.shared.submit(py, ("wait_signal", None), &stream, |_, batch| {
                window.wait_signal_in_batch(batch, word, value, Cond::Geq)
            }),
            None => {
                let wait = |slice| window.wait_signal(word, value, Cond::Geq, slice).map(drop);
                self.shared.wait(py, ("wait_signal", None), timeout, wait)
            }
        }
    }

    #[pyo3(signature = (rank, *, timeout=None))]
    fn flush(&self, py: Python<'_>, rank: usize, timeout: Option<f64>) -> PyResult<()> {
        let window = self.open()?;
        self.shared.wait(py, ("flush", Some(rank)), timeout, |slice| window.flush(rank, slice))
    }

    #[pyo3(signature = (tensor, timeout=None))]
    fn beside(&self, tensor: Any<'_, '_>, timeout: Option<f64>) -> PyResult<Self> {
        let window = self.open()?;
        Self::make(&self.shared, tensor, timeout, move |_, part, limit| {
            window.beside(&part.registration, 0..part.len(), limit)
        })
    }

    #[pyo3(signature = (timeout=None))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        // A wrong one leaves the window open.
        self.shared.limit(timeout)?;
        let Some(window) = self.window.lock().take() else { return Ok(()) };
        let held = self.part.clone();
        let destroy = move |_: &Shared, limit| {
            let _held = held;
            window.destroy(limit)
        };
        self.shared.with_all(py, "close", timeout, destroy)?;
        self.shared.conceal(&self.part);
        Ok(())
    }
}
