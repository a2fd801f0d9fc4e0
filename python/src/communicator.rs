//! Communicators: messages, and calls of all ranks.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use gdsync::cuda::Gpu;
use mp::Registration;
use mp::collective::{Collectives, Reduction};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::buffer::{Buffer, Part};
use crate::channel::Channel;
use crate::error::OrRaise;
use crate::exchange::OfPython;
use crate::request::Request;
use crate::shared::Shared;
use crate::stream::Submitter;
use crate::wait::{on_thread, seconds};
use crate::window::Window;
use crate::{Any, OnStream};

#[pyclass(frozen, module = "gdasync")]
pub(crate) struct Communicator(Arc<Shared>);

/// Joins the ranks of a launcher, of an exchange, or of processes that it starts.
#[pyfunction]
pub(crate) fn init(
    py: Python<'_>,
    exchange: Option<Any<'_, '_>>,
    gpu: Option<i32>,
    spawn: Option<usize>,
    timeout: f64,
) -> PyResult<Communicator> {
    let mut builder = mp::Communicator::builder().timeout(seconds(timeout)?);
    if let Some(gpu) = gpu {
        builder = builder.gpu(&py.detach(|| Gpu::open(gpu)).or_raise(py, "init", None)?);
    }
    let made = match (exchange, spawn) {
        (Some(exchange), _) => {
            let exchange = OfPython::new(exchange)?;
            on_thread(py, move || builder.init_over(exchange))?
        }
        // Linux ends the processes with the thread that starts them.
        (None, Some(ranks)) => py.detach(|| builder.spawn(ranks).init()),
        (None, None) => on_thread(py, move || builder.init())?,
    };
    Ok(Communicator(Shared::new(made.or_raise(py, "init", None)?)))
}

impl Communicator {
    /// Starts a message, on a stream if there is one, which then `waits` for it, or not.
    fn start(
        &self,
        py: Python<'_>,
        (operation, rank): (&'static str, usize),
        part: &Arc<Part>,
        stream: Option<&Submitter>,
        (is_send, waits): (bool, bool),
    ) -> PyResult<Request> {
        let (shared, memory, range) = (&self.0, &part.registration, 0..part.len());
        let started = match stream {
            None => shared.start(py, (operation, rank), |comm| match is_send {
                true => comm.isend(memory, range.clone(), rank),
                false => comm.irecv(memory, range.clone(), rank),
            })?,
            Some(stream) => shared.submit(py, (operation, Some(rank)), stream, |comm, batch| {
                let started = match is_send {
                    true => comm.isend_in_batch(batch, memory, range.clone(), rank)?,
                    false => comm.irecv_in_batch(batch, memory, range.clone(), rank)?,
                };
                if waits {
                    comm.wait_in_batch(batch, &started)?;
                }
                Ok(started)
            })?,
        };
        Ok(Request::new(shared, operation, started, Some(part.clone()), stream))
    }

    /// As `start`, on the stream of the caller or of the tensor. Without one, the CPU `waits`, or not.
    fn message(
        &self,
        operation: &'static str,
        tensor: Any<'_, '_>,
        rank: usize,
        stream: OnStream<'_, '_>,
        (is_send, waits): (bool, bool),
    ) -> PyResult<Request> {
        let (py, part) = (tensor.py(), Part::of(&self.0.comm, tensor, !is_send, false)?);
        let stream = Submitter::of(stream, part.gpu, py)?;
        let request = self.start(py, (operation, rank), &part, stream.as_deref(), (is_send, waits))?;
        if waits && stream.is_none() {
            request.wait_for(py, None)?;
        }
        Ok(request)
    }

    /// Runs a collective; the first one makes what all need. A failed one takes it along.
    fn collective(
        &self,
        py: Python<'_>,
        operation: &str,
        timeout: Option<f64>,
        call: impl FnOnce(&Collectives, Duration) -> mp::Result<()> + Send + 'static,
    ) -> PyResult<()> {
        self.0.with_all(py, operation, timeout, move |shared, limit| {
            let mut made = shared.collectives(limit)?;
            let all = match made.take() {
                Some(all) => all,
                None => Arc::new(Collectives::new(&shared.comm, limit)?),
            };
            call(&all, limit)?;
            *made = Some(all);
            Ok(())
        })
    }
}

#[pymethods]
impl Communicator {
    #[getter]
    fn rank(&self) -> usize {
        self.0.comm.rank()
    }

    #[getter]
    fn size(&self) -> usize {
        self.0.comm.size()
    }

    fn path(&self, py: Python<'_>, rank: usize) -> PyResult<String> {
        self.0.comm.path(rank).map(ToString::to_string).or_raise(py, "path", Some(rank))
    }

    fn lost(&self) -> Vec<usize> {
        self.0.comm.lost()
    }

    fn register(&self, tensor: Any<'_, '_>) -> PyResult<Buffer> {
        Part::of(&self.0.comm, tensor, true, true).map(Buffer)
    }

    #[pyo3(signature = (tensor, rank, *, stream=None))]
    fn send(&self, tensor: Any<'_, '_>, rank: usize, stream: OnStream<'_, '_>) -> PyResult<()> {
        self.message("send", tensor, rank, stream, (true, true)).map(drop)
    }

    #[pyo3(signature = (tensor, rank, *, stream=None))]
    fn recv(&self, tensor: Any<'_, '_>, rank: usize, stream: OnStream<'_, '_>) -> PyResult<()> {
        self.message("recv", tensor, rank, stream, (false, true)).map(drop)
    }

    #[pyo3(signature = (tensor, to, into, source, *, stream=None))]
    fn sendrecv(
        &self,
        py: Python<'_>,
        tensor: Any<'_, '_>,
        to: usize,
        into: Any<'_, '_>,
        source: usize,
        stream: OnStream<'_, '_>,
    ) -> PyResult<()> {
        let (shared, operation) = (&self.0, "sendrecv");
        let part = |tensor, target| Part::of(&shared.comm, tensor, target, false);
        let (out, into) = (part(tensor, false)?, part(into, true)?);
        let Some(stream) = Submitter::of(stream, into.gpu.or(out.gpu), py)? else {
            let received = self.start(py, (operation, source), &into, None, (false, false))?;
            self.start(py, (operation, to), &out, None, (true, false))?.wait_for(py, None)?;
            return received.wait_for(py, None).map(drop);
        };
        let (sent, received) = shared.submit(py, (operation, Some(to)), &stream, |comm, batch| {
            let received = comm.irecv_in_batch(batch, &into.registration, 0..into.len(), source)?;
            let sent = comm.isend_in_batch(batch, &out.registration, 0..out.len(), to)?;
            comm.wait_in_batch(batch, &sent)?;
            comm.wait_in_batch(batch, &received)?;
            Ok((sent, received))
        })?;
        shared.keep(sent, out);
        shared.keep(received, into);
        Ok(())
    }

    #[pyo3(signature = (tensor, rank, *, stream=None))]
    fn isend(&self, tensor: Any<'_, '_>, rank: usize, stream: OnStream<'_, '_>) -> PyResult<Request> {
        self.message("isend", tensor, rank, stream, (true, false))
    }

    #[pyo3(signature = (tensor, rank, *, stream=None))]
    fn irecv(&self, tensor: Any<'_, '_>, rank: usize, stream: OnStream<'_, '_>) -> PyResult<Request> {
        self.message("irecv", tensor, rank, stream, (false, false))
    }

    #[pyo3(signature = (tensor, timeout=None))]
    fn window(&self, tensor: Any<'_, '_>, timeout: Option<f64>) -> PyResult<Window> {
        Window::make(&self.0, tensor, timeout, |comm, part, limit| {
            comm.window(&part.registration, 0..part.len(), limit)
        })
    }

    #[pyo3(signature = (wanted, timeout=None))]
    fn channels(
        &self,
        py: Python<'_>,
        wanted: Vec<(usize, Vec<Bound<'_, PyAny>>)>,
        timeout: Option<f64>,
    ) -> PyResult<Vec<Channel>> {
        let place = |place| Part::of(&self.0.comm, place, true, true);
        let parts = wanted.iter().map(|(_, places)| places.iter().map(place).collect());
        let parts = parts.collect::<PyResult<Vec<Vec<Arc<Part>>>>>()?;
        let (ranks, held): (Vec<_>, _) = (wanted.iter().map(|(rank, _)| *rank).collect(), parts.clone());
        let make = move |shared: &Shared, limit| {
            let pieces =
                held.iter().map(|parts| parts.iter().map(|part| (&part.registration, 0..part.len())));
            let pieces: Vec<Vec<_>> = pieces.map(Iterator::collect).collect();
            let list: Vec<_> = ranks.into_iter().zip(pieces.iter().map(Vec::as_slice)).collect();
            shared.comm.channels(&list, limit)
        };
        let made = self.0.with_all(py, "channels", timeout, make)?.into_iter().zip(parts);
        Ok(made.map(|(channel, places)| Channel::new(&self.0, channel, places)).collect())
    }

    #[pyo3(signature = (timeout=None))]
    fn barrier(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        self.collective(py, "barrier", timeout, Collectives::barrier)
    }

    #[pyo3(signature = (tensor, op="sum", timeout=None))]
    fn allreduce(&self, tensor: Any<'_, '_>, op: &str, timeout: Option<f64>) -> PyResult<()> {
        let how = match op {
            "sum" => Reduction::Sum,
            "min" => Reduction::Min,
            "max" => Reduction::Max,
            _ => return Err(PyValueError::new_err(format!("op is '{op}': expected sum, min or max"))),
        };
        let part = Part::of(&self.0.comm, tensor, true, true)?;
        if part.gpu.is_some() {
            return Err(PyTypeError::new_err("allreduce combines by the CPU: pass a tensor in its memory"));
        }
        type Allreduce = fn(&Collectives, &Registration, Range<usize>, Reduction, Duration) -> mp::Result<()>;
        let allreduce: Allreduce = match part.number {
            Some((0, 32)) => Collectives::allreduce::<i32>,
            Some((0, 64)) => Collectives::allreduce::<i64>,
            Some((1, 64)) => Collectives::allreduce::<u64>,
            Some((2, 32)) => Collectives::allreduce::<f32>,
            Some((2, 64)) => Collectives::allreduce::<f64>,
            _ => {
                let text = "allreduce is of numbers: expected int32, int64, uint64, float32 or float64";
                return Err(PyTypeError::new_err(text));
            }
        };
        self.collective(tensor.py(), "allreduce", timeout, move |all, limit| {
            allreduce(all, &part.registration, 0..part.len(), how, limit)
        })
    }

    #[pyo3(signature = (timeout=None))]
    fn shrink(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Self> {
        let shrunk = self.0.with_all(py, "shrink", timeout, |shared, limit| shared.comm.shrink(limit))?;
        Ok(Self(Shared::new(shrunk.communicator)))
    }

    #[pyo3(signature = (timeout=None))]
    fn finalize(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        self.0.with_all(py, "finalize", timeout, |shared, limit| {
            drop(shared.collectives(limit)?.take());
            mp::Communicator::clone(&shared.comm).finalize(limit)
        })
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// Finalizes, unless an exception is under way: that would wait for what has failed.
    #[pyo3(signature = (kind, _value, _traceback))]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: Option<Any<'_, '_>>,
        _value: Option<Any<'_, '_>>,
        _traceback: Option<Any<'_, '_>>,
    ) -> PyResult<()> {
        if kind.is_none() { self.finalize(py, None) } else { Ok(()) }
    }

    fn __repr__(&self) -> String {
        format!("Communicator(rank {} of {})", self.rank(), self.size())
    }
}
