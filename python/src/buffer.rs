//! Registered memory of tensors.

use std::sync::Arc;
use std::time::Duration;

use gdsync::cuda::Gpu;
use gdsync::memory::{Memory, WeakMemory};
use mp::{Communicator, Registration};
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::Any;
use crate::error::OrRaise;
use crate::tensor::Tensor;

/// Memory that an operation uses, registered, with what keeps it.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) registration: Registration,
    /// The GPU whose memory it is.
    pub(crate) gpu: Option<i32>,
    /// See [`Tensor`].
    pub(crate) number: Option<(u8, u8)>,
    keep: Py<PyAny>,
}

/// Host memory that CUDA may still have registered, and what keeps it.
static UNTIL_RECLAIMED: Mutex<Vec<(WeakMemory, Py<PyAny>)>> = Mutex::new(Vec::new());

impl Drop for Part {
    fn drop(&mut self) {
        let memory = self.registration.memory();
        if memory.gpu().is_none() && memory.is_known_to_gpus() {
            let keep = Python::try_attach(|py| self.keep.clone_ref(py));
            let mut held = UNTIL_RECLAIMED.lock();
            held.extend(keep.map(|keep| (memory.downgrade(), keep)));
            let is_over = Gpu::opened().iter().all(|gpu| gpu.reclaim(Duration::ZERO).is_ok());
            let is_used = |(memory, _): &mut (WeakMemory, _)| !is_over || memory.upgrade().is_some();
            let over: Vec<_> = held.extract_if(.., |part| !is_used(part)).collect();
            // Unlocked first: dropping a tensor may run code of Python.
            drop(held);
            drop(over);
        }
    }
}

impl Part {
    /// The memory of a tensor or a [`Buffer`] for one operation, or for as long as it lives if others access it, too; its number then.
    pub(crate) fn of(
        comm: &Communicator,
        object: Any<'_, '_>,
        target: bool,
        for_peers: bool,
    ) -> PyResult<Arc<Self>> {
        let py = object.py();
        if let Ok(buffer) = object.cast::<Buffer>() {
            return Ok(buffer.get().0.clone());
        }
        let Tensor { addr, len, is_cuda, number, keep } = Tensor::of(object, target, for_peers)?;
        let registered = py.detach(|| register(comm, (addr, len), is_cuda, for_peers));
        match registered.or_raise(py, "register", None)? {
            Some((registration, gpu)) => Ok(Arc::new(Self { registration, gpu, number, keep })),
            None => Err(PyValueError::new_err(format!(
                "the tensor says that it is on a GPU, but CUDA knows no memory at {addr:#x} in this process"
            ))),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.registration.memory().len()
    }
}

/// Registers memory, and returns its GPU, too; `None` if CUDA does not know it.
fn register(
    comm: &Communicator,
    (addr, len): (usize, usize),
    is_cuda: bool,
    for_peers: bool,
) -> mp::Result<Option<(Registration, Option<i32>)>> {
    let (at, host) = (addr as u64, std::ptr::with_exposed_provenance_mut::<u8>(addr));
    if !is_cuda {
        // Not through the cache: nothing tells when host memory is unmapped.
        // SAFETY: `Part` keeps the object that has this memory until it is not used any more, also by GPUs.
        let memory = unsafe { Memory::from_raw(host, len) }?;
        return Ok(Some((comm.register(&memory)?, None)));
    }
    let Some(gpu) = Gpu::at(at)? else { return Ok(None) };
    let registration = match for_peers {
        // SAFETY: `Part` keeps the object that has this memory.
        true => unsafe { Gpu::find(at, len) }?.map(|memory| comm.register(&memory)).transpose()?,
        // SAFETY: the same; the cache uses what stays there only while CUDA proves that the memory is the same.
        false => Some((*unsafe { comm.register_cached_gpu(&gpu, at, len) }?).clone()),
    };
    Ok(registration.map(|registration| (registration, Some(gpu.ordinal()))))
}

/// A tensor that is registered once for many operations.
#[pyclass(frozen, module = "gdasync")]
#[derive(Debug)]
pub(crate) struct Buffer(pub(crate) Arc<Part>);

#[pymethods]
impl Buffer {
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.len()
    }

    fn part(&self, py: Python<'_>, offset: usize, nbytes: usize) -> PyResult<Self> {
        let registration = self.0.registration.slice(offset, nbytes).or_raise(py, "part", None)?;
        let keep = self.0.keep.clone_ref(py);
        Ok(Self(Arc::new(Part { registration, gpu: self.0.gpu, number: None, keep })))
    }
}
