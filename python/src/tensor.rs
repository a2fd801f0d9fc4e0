//! The memory of tensors, by DLPack; what has it not is left to `_buffer.py`.

use std::ffi::{CStr, c_void};
use std::slice;

use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyDict};

use crate::{Any, of_torch};

/// Contiguous memory of an object, which stays while `keep` does.
#[derive(Debug)]
pub(crate) struct Tensor {
    pub(crate) addr: usize,
    pub(crate) len: usize,
    /// In memory of CUDA; if not, the CPU's.
    pub(crate) is_cuda: bool,
    /// DLPack's code and bits of its numbers, where they are known.
    pub(crate) number: Option<(u8, u8)>,
    pub(crate) keep: Py<PyAny>,
}

/// `DLTensor` of `dlpack.h`.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLManagedTensorVersioned`, of version 1.
#[repr(C)]
struct DlVersioned {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: *mut c_void,
    flags: u64,
    tensor: DlTensor,
}

const _: () = assert!(size_of::<DlTensor>() == 48 && size_of::<DlVersioned>() == 80);

const DL_CPU: i32 = 1;
const DL_CUDA: i32 = 2;
const DL_CUDA_HOST: i32 = 3;
const DL_CUDA_MANAGED: i32 = 13;
const DL_READ_ONLY: u64 = 1;
const VERSIONED: &CStr = c"dltensor_versioned";

impl Tensor {
    /// The memory of an object, which is received into if it is a `target`; of tensors of torch the number only if asked for.
    pub(crate) fn of(object: Any<'_, '_>, target: bool, asks_number: bool) -> PyResult<Self> {
        static TENSOR: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let py = object.py();
        if !asks_number
            && of_torch(py, &TENSOR, "torch", "Tensor")?.is_some_and(|kind| object.get_type().is(kind))
            && let Some(tensor) = Self::of_torch(object)?
        {
            return tensor.checked();
        }
        if object.hasattr(intern!(py, "__dlpack__"))? {
            return Self::of_dlpack(object, target);
        }
        let held = py.import("gdasync._buffer")?.getattr("hold")?.call1((object, target))?;
        let (addr, len, is_cuda, keep) = held.extract()?;
        Self { addr, len, is_cuda, number: None, keep }.checked()
    }

    /// A tensor of torch, without DLPack, which takes 4 to 7 us. `None` leaves to DLPack to say what it refuses.
    fn of_torch(object: Any<'_, '_>) -> PyResult<Option<Self>> {
        let py = object.py();
        let has = |name| object.getattr(name)?.is_truthy();
        let is = |name| object.call_method0(name)?.is_truthy();
        let is_cuda = has(intern!(py, "is_cuda"))?;
        let is_plain = (is_cuda || has(intern!(py, "is_cpu"))?)
            && !has(intern!(py, "requires_grad"))?
            && !is(intern!(py, "is_conj"))?
            && is(intern!(py, "is_contiguous"))?;
        // The tensor may get another storage (`tensor.data = ...`) before the operation is done.
        let storage = object.getattr_opt(intern!(py, "untyped_storage"))?;
        let Some(storage) = storage.filter(|_| is_plain) else { return Ok(None) };
        let addr = object.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let len = object.getattr(intern!(py, "nbytes"))?.extract()?;
        Ok(Some(Self { addr, len, is_cuda, number: None, keep: storage.call0()?.unbind() }))
    }

    fn of_dlpack(object: Any<'_, '_>, target: bool) -> PyResult<Self> {
        let py = object.py();
        let (device, _): (i32, Py<PyAny>) = object.call_method0("__dlpack_device__")?.extract()?;
        let is_cuda = match device {
            DL_CPU | DL_CUDA_HOST => false,
            DL_CUDA | DL_CUDA_MANAGED => true,
            _ => {
                return Err(PyValueError::new_err(format!(
                    "the tensor is on a device of DLPack's type {device}: expected memory of the CPU or of CUDA"
                )));
            }
        };
        let options = PyDict::new(py);
        if is_cuda {
            // The stream that the operation is queued on orders it.
            options.set_item("stream", -1)?;
        }
        options.set_item("max_version", (1, 0))?;
        let capsule = match object.call_method("__dlpack__", (), Some(&options)) {
            // It knows no versions.
            Err(error) if error.is_instance_of::<PyTypeError>(py) => {
                options.del_item("max_version")?;
                object.call_method("__dlpack__", (), Some(&options))?
            }
            capsule => capsule?,
        };
        let capsule = capsule.cast_into::<PyCapsule>()?;
        let (tensor, flags) = if capsule.is_valid_checked(Some(VERSIONED)) {
            let versioned = capsule.pointer_checked(Some(VERSIONED))?.cast::<DlVersioned>();
            // SAFETY: a capsule of this name has this structure while nobody consumes it, and `keep` does not.
            let versioned = unsafe { versioned.as_ref() };
            if versioned.major != 1 {
                let text = format!("the tensor has version {} of DLPack: expected 1", versioned.major);
                return Err(PyBufferError::new_err(text));
            }
            (&versioned.tensor, versioned.flags)
        } else {
            let tensor = capsule.pointer_checked(Some(c"dltensor"))?.cast::<DlTensor>();
            // SAFETY: a capsule of this name begins with this structure, and stays while nobody consumes it.
            (unsafe { tensor.as_ref() }, 0)
        };
        if target && flags & DL_READ_ONLY != 0 {
            let text = "the tensor is read-only: receive into a copy of it, or make it writable";
            return Err(PyValueError::new_err(text));
        }
        let list = |first: *const i64| {
            let count = usize::try_from(tensor.ndim).unwrap_or(0);
            if count == 0 || first.is_null() {
                return None;
            }
            // SAFETY: not null, so as many as there are dimensions, by the definition of the structure.
            Some(unsafe { slice::from_raw_parts(first, count) }.to_vec())
        };
        let (shape, strides) = (list(tensor.shape).unwrap_or_default(), list(tensor.strides));
        let bits = usize::from(tensor.bits) * usize::from(tensor.lanes);
        let bits = contiguous(&shape, strides.as_deref())?.checked_mul(bits);
        let offset = usize::try_from(tensor.byte_offset).expect("64-bit hosts only");
        let number = (tensor.lanes == 1).then_some((tensor.code, tensor.bits));
        let (addr, keep) = (tensor.data.addr().wrapping_add(offset), capsule.into_any().unbind());
        let len = bits.ok_or_else(|| too_large(&shape))?.div_ceil(8);
        Self { addr, len, is_cuda, number, keep }.checked()
    }

    fn checked(self) -> PyResult<Self> {
        if self.addr == 0 || self.len == 0 {
            return Err(PyValueError::new_err("the tensor is empty: expected one byte or more"));
        }
        Ok(self)
    }
}

/// The number of elements, which follow each other as in C.
fn contiguous(shape: &[i64], strides: Option<&[i64]>) -> PyResult<usize> {
    if shape.contains(&0) {
        return Ok(0);
    }
    let mut count = 1;
    for (at, &size) in shape.iter().enumerate().rev() {
        let follows = strides.is_none_or(|strides| strides.get(at) == Some(&count));
        if size > 1 && !follows {
            return Err(PyValueError::new_err(
                "the tensor is not contiguous: pass tensor.contiguous(), or a part that is",
            ));
        }
        count = count.checked_mul(size).filter(|count| *count >= 0).ok_or_else(|| too_large(shape))?;
    }
    Ok(usize::try_from(count).unwrap_or(0))
}

fn too_large(shape: &[i64]) -> PyErr {
    PyValueError::new_err(format!("the shape is {shape:?}: expected sizes of a tensor in memory"))
}
