//! Streams: those of torch, CuPy and others, which go on using them, and host streams.

use std::collections::{BTreeMap, VecDeque};
use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

use gdsync::cuda::{Gpu, RawStream};
use gdsync::stream::{Batch, Capture, CudaStreamConfig, Graph, HostStreamConfig, Launch, Stream as Queue};
use parking_lot::Mutex;
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::buffer::Part;
use crate::error::OrRaise;
use crate::wait::{is_full, is_late, seconds, seconds_or, sliced};
use crate::{Any, OnStream, of_torch};

/// Longer than the default of gdsync: kernels of the application between two waits count, too.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// A stream as this package uses it.
#[derive(Debug)]
pub(crate) struct Submitter {
    pub(crate) queue: Queue,
    /// Of a host stream only the wait limit counts.
    config: CudaStreamConfig,
    /// Held from the first operation of a call until the stream has all of them: threads do not mix theirs.
    pub(crate) order: Mutex<()>,
    capture: Mutex<Option<(Capture, Vec<Arc<Part>>)>>,
    /// Launches that may use their tensors still.
    launched: Mutex<VecDeque<(Launch, Arc<Recording>)>>,
}

/// The streams of others, by GPU and handle. They stay until they fail: torch has few, and never destroys them.
static ADOPTED: Mutex<BTreeMap<(i32, RawStream), Arc<Submitter>>> = Mutex::new(BTreeMap::new());

/// A stream of another library.
struct Foreign {
    gpu: i32,
    raw: RawStream,
    /// It never destroys its streams.
    is_of_torch: bool,
}

impl Submitter {
    fn new(queue: Queue, config: CudaStreamConfig) -> Self {
        let (order, capture, launched) = Default::default();
        Self { queue, config, order, capture, launched }
    }

    /// The stream that a call names. `None` is torch's current stream of the GPU, or no stream for memory of the CPU.
    pub(crate) fn of(
        stream: OnStream<'_, '_>,
        gpu: Option<i32>,
        py: Python<'_>,
    ) -> PyResult<Option<Arc<Self>>> {
        if let Some(Ok(stream)) = stream.map(|stream| stream.cast::<Stream>()) {
            return Ok(Some(stream.get().0.clone()));
        }
        match (stream, gpu) {
            (Some(stream), _) => Self::adopt(&Foreign::of(stream, gpu)?, py, |_| ()).map(Some),
            (None, Some(gpu)) => Self::adopt(&Foreign::current(py, gpu)?, py, |_| ()).map(Some),
            (None, None) => Ok(None),
        }
    }

    /// The stream, as `choose` wants it: before the first use.
    fn adopt(
        of: &Foreign,
        py: Python<'_>,
        choose: impl FnOnce(&mut CudaStreamConfig),
    ) -> PyResult<Arc<Self>> {
        let Foreign { gpu, raw, is_of_torch } = *of;
        let known = ADOPTED.lock().get(&(gpu, raw)).cloned();
        let may_be_destroyed = !is_of_torch;
        let config = CudaStreamConfig { wait_limit: WAIT_LIMIT, may_be_destroyed, ..Default::default() };
        let mut config = known.as_ref().map_or(config, |known| known.config.clone());
        choose(&mut config);
        if let Some(known) = known {
            if config == known.config {
                return Ok(known);
            }
            let CudaStreamConfig { wait_limit, via, .. } = known.config;
            return Err(PyValueError::new_err(format!(
                "the stream is in use, by {via} with a wait limit of {wait_limit:?}: choose before the first use"
            )));
        }
        // SAFETY: a stream of this GPU, as its object says, or who passes its number. Others may be destroyed: the configuration says so.
        let adopt = || unsafe { Queue::cuda_from_raw(&Gpu::open(gpu)?, raw, config.clone()) };
        let queue = py.detach(adopt).or_raise(py, "stream", None)?;
        let made = Arc::new(Self::new(queue, config));
        Ok(ADOPTED.lock().entry((gpu, raw)).or_insert(made).clone())
    }

    /// Keeps what a capture has recorded with its graph. Returns it if nothing is being captured.
    pub(crate) fn keep_in_capture(&self, part: Arc<Part>) -> Option<Arc<Part>> {
        match &mut *self.capture.lock() {
            Some((_, kept)) => {
                kept.push(part);
                None
            }
            None => Some(part),
        }
    }

    fn forget_launched(&self) {
        let is_pending = |launch: &Launch| {
            launch
                .wait(&self.queue, Duration::ZERO)
                .is_err_and(|error| matches!(error, gdsync::Error::Deadline { .. }))
        };
        let mut over = Vec::new();
        let mut launched = self.launched.lock();
        while launched.front().is_some_and(|(launch, _)| !is_pending(launch)) {
            over.extend(launched.pop_front());
        }
        // Unlocked first: dropping a tensor may run code of Python.
        drop(launched);
    }
}

impl Foreign {
    fn of(stream: Any<'_, '_>, gpu: Option<i32>) -> PyResult<Self> {
        let py = stream.py();
        let torch = stream.getattr_opt("cuda_stream")?;
        let raw: RawStream = if let Some(raw) = &torch {
            raw.extract()?
        } else if let Some(protocol) = stream.getattr_opt("__cuda_stream__")? {
            let answer = if protocol.is_callable() { protocol.call0()? } else { protocol };
            answer.extract::<(i32, RawStream)>()?.1
        } else {
            stream.extract().map_err(|_| {
                let name = stream.get_type().name().map(|name| name.to_string()).unwrap_or_default();
                PyTypeError::new_err(format!(
                    "'{name}' is no stream: expected gdasync.Stream, __cuda_stream__, cuda_stream or a number"
                ))
            })?
        };
        let index = stream.getattr_opt("device_index")?.map(|index| index.extract()).transpose()?;
        let gpu = match index.or(gpu) {
            Some(gpu) => gpu,
            // SAFETY: a stream of the caller's.
            None => py.detach(|| unsafe { Gpu::of_stream(raw) }).or_raise(py, "stream", None)?.ordinal(),
        };
        Ok(Self { gpu, raw, is_of_torch: torch.is_some() })
    }

    /// The current stream of torch; without torch, the default stream.
    fn current(py: Python<'_>, gpu: i32) -> PyResult<Self> {
        static CURRENT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let raw = match of_torch(py, &CURRENT, "torch._C", "_cuda_getCurrentRawStream")? {
            Some(current) => current.call1((gpu,))?.extract()?,
            None => 0,
        };
        Ok(Self { gpu, raw, is_of_torch: true })
    }
}

#[pyclass(frozen, module = "gdasync")]
#[derive(Debug)]
pub(crate) struct Stream(Arc<Submitter>);

#[pymethods]
impl Stream {
    #[new]
    #[pyo3(signature = (stream=None, *, via=None, wait_limit=None))]
    fn new(
        py: Python<'_>,
        stream: OnStream<'_, '_>,
        via: Option<&str>,
        wait_limit: Option<f64>,
    ) -> PyResult<Self> {
        let wait_limit = wait_limit.map(seconds).transpose()?;
        let via = via.map(str::parse).transpose();
        let via = via.map_err(|error: gdsync::Error| PyValueError::new_err(error.to_string()))?;
        let choose = |config: &mut CudaStreamConfig| {
            config.wait_limit = wait_limit.unwrap_or(config.wait_limit);
            config.via = via.unwrap_or(config.via);
        };
        let of = match stream {
            Some(stream) => Foreign::of(stream, None)?,
            None => {
                let gpu = py.import("torch.cuda")?.call_method0("current_device")?.extract()?;
                Foreign::current(py, gpu)?
            }
        };
        Submitter::adopt(&of, py, choose).map(Self)
    }

    #[staticmethod]
    #[pyo3(signature = (*, wait_limit=None))]
    fn host(py: Python<'_>, wait_limit: Option<f64>) -> PyResult<Self> {
        let wait_limit = seconds_or(wait_limit, WAIT_LIMIT)?;
        let host = HostStreamConfig { wait_limit, ..Default::default() };
        let queue = py.detach(|| Queue::host(host)).or_raise(py, "stream", None)?;
        Ok(Self(Arc::new(Submitter::new(queue, CudaStreamConfig { wait_limit, ..Default::default() }))))
    }

    #[getter]
    fn is_cuda(&self) -> bool {
        self.0.queue.kind() == "cuda"
    }

    fn __cuda_stream__(&self) -> PyResult<(i32, RawStream)> {
        let raw = self.0.queue.raw();
        raw.map(|raw| (0, raw)).ok_or_else(|| PyTypeError::new_err("a host stream is no stream of CUDA"))
    }

    fn call(&self, py: Python<'_>, function: Py<PyAny>) -> PyResult<()> {
        if self.is_cuda() {
            let text = "a stream of CUDA cannot call Python, which may wait for CUDA: launch a kernel";
            return Err(PyTypeError::new_err(text));
        }
        let run = move || {
            let called =
                Python::try_attach(|py| function.call0(py).map(drop).map_err(|error| error.to_string()));
            if let Some(Err(text)) = called {
                // The stream fails with this text.
                resume_unwind(Box::new(text));
            }
        };
        let mut batch = Batch::new();
        batch.host_fn(run);
        let submit = |slice| Ok(self.0.queue.with_timeout(slice).submit(&mut batch)?);
        sliced(py, self.0.config.wait_limit, is_full, submit)?.or_raise(py, "call", None)
    }

    #[pyo3(signature = (timeout=None))]
    fn synchronize(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let limit = seconds_or(timeout, self.0.config.wait_limit)?;
        let synchronize = |slice| Ok(self.0.queue.synchronize(slice)?);
        let done = sliced(py, limit, is_late, synchronize)?.or_raise(py, "synchronize", None);
        self.0.forget_launched();
        let status = self.0.queue.query();
        if status.error.is_some() && status.pending == 0 {
            // Reported, and nothing of it runs: the next call adopts the stream anew.
            ADOPTED.lock().retain(|_, adopted| !Arc::ptr_eq(adopted, &self.0));
        }
        done
    }

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let checked = py.detach(|| match self.0.queue.query().error {
            Some(error) => Err(error),
            None => match self.0.queue.synchronize(Duration::ZERO) {
                Err(gdsync::Error::Deadline { .. }) => Ok(()),
                checked => checked,
            },
        });
        checked.or_raise(py, "check", None)
    }

    fn _begin_capture(&self, py: Python<'_>) -> PyResult<()> {
        let capture = py.detach(|| self.0.queue.begin_capture()).or_raise(py, "capture", None)?;
        *self.0.capture.lock() = Some((capture, Vec::new()));
        Ok(())
    }

    fn _end_capture(&self, py: Python<'_>) -> PyResult<Recorded> {
        let Some((capture, parts)) = self.0.capture.lock().take() else {
            return Err(PyRuntimeError::new_err("the stream is not being captured"));
        };
        let graph = py.detach(|| capture.end()).or_raise(py, "capture", None)?;
        Ok(Recorded(Arc::new(Recording { graph: Mutex::new(graph), _parts: parts })))
    }

    fn _discard_capture(&self, py: Python<'_>) {
        let discarded = self.0.capture.lock().take();
        if let Some((capture, _parts)) = discarded {
            py.detach(|| drop(capture));
        }
    }
}

/// A graph, and the tensors that it uses.
#[derive(Debug)]
struct Recording {
    graph: Mutex<Graph>,
    _parts: Vec<Arc<Part>>,
}

/// A captured graph: `gdasync.Graph` has it.
#[pyclass(frozen, module = "gdasync._gdasync", name = "_Recorded")]
#[derive(Debug)]
pub(crate) struct Recorded(Arc<Recording>);

#[pymethods]
impl Recorded {
    #[pyo3(signature = (stream, timeout=None))]
    fn launch(&self, py: Python<'_>, stream: &Bound<'_, Stream>, timeout: Option<f64>) -> PyResult<()> {
        let on = &stream.get().0;
        let limit = seconds_or(timeout, on.config.wait_limit)?;
        let launch = |slice| Ok(self.0.graph.lock().launch(&on.queue.with_timeout(slice))?);
        let launch = sliced(py, limit, is_full, launch)?.or_raise(py, "replay", None)?;
        on.forget_launched();
        on.launched.lock().push_back((launch, self.0.clone()));
        Ok(())
    }
}
