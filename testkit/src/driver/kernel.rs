//! Kernels: Rust functions under names.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::mem::MaybeUninit;

use parking_lot::Mutex;

use super::command::Command;
use super::context::current;
use super::handles::Table;
use super::stream::enqueue_anywhere;
use super::{Outcome, capture, get_all, put, queue, require, status};
use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::layout::Handle;

/// What a kernel is.
#[derive(Clone, Copy)]
struct Kernel {
    /// Bytes of each parameter.
    params: &'static [usize],
    run: fn(&[*mut c_void]),
}

/// A kernel of a loaded module.
#[derive(Clone, Copy)]
pub(super) struct Function {
    module: Handle,
    context: Handle,
    kernel: Kernel,
}

static KERNELS: Mutex<BTreeMap<&'static str, Kernel>> = Mutex::new(BTreeMap::new());
/// Loaded modules, each with its context.
pub(super) static MODULES: Table<Handle> = Table::new();
static FUNCTIONS: Table<Function> = Table::new();

/// Makes a function the kernel of this name in all modules; a kernel's later name-sake takes its place.
///
/// It runs once for a launch, whatever the grid, on the stream's thread, and gets the addresses of its parameters: copies,
/// as long as `params` says, aligned to 16 bytes. It may wait. It fails its context with 719 by a panic.
pub fn kernel(name: &'static str, params: &'static [usize], run: fn(&[*mut c_void])) {
    KERNELS.lock().insert(name, Kernel { params, run });
}

/// A kernel with its parameters.
#[derive(Clone)]
pub(super) struct Launch {
    kernel: Kernel,
    /// In units that are aligned as any parameter may need. Not all bytes of a structure need be written.
    params: Vec<Vec<MaybeUninit<u128>>>,
}

/// Blocks and threads.
pub(super) struct Shape {
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
}

impl Launch {
    /// Copies the parameters of a launch in a context.
    pub(super) fn new(
        context: Handle,
        function: Handle,
        shape: &Shape,
        params: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> Outcome<Self> {
        let Function { context: own, kernel, .. } = FUNCTIONS.get(function)?;
        require(own == context, CudaStatus::INVALID_HANDLE)?;
        let some = shape.grid.iter().chain(&shape.block).all(|&size| size > 0);
        let threads: u64 = shape.block.iter().map(|&size| u64::from(size)).product();
        require(some && threads <= 1024 && extra.is_null(), CudaStatus::INVALID_VALUE)?;
        let count = u32::try_from(kernel.params.len()).map_err(|_| CudaStatus::INVALID_VALUE)?;
        let places = if count == 0 { Vec::new() } else { get_all(params, count)? };
        let copied = places.iter().zip(kernel.params).map(|(&place, &size)| copy(place, size));
        Ok(Self { kernel, params: copied.collect::<Outcome<_>>()? })
    }

    pub(super) fn run(&self) {
        let mut params = self.params.clone();
        let places: Vec<*mut c_void> = params.iter_mut().map(|param| param.as_mut_ptr().cast()).collect();
        (self.kernel.run)(&places);
    }
}

fn copy(place: *const c_void, size: usize) -> Outcome<Vec<MaybeUninit<u128>>> {
    require(!place.is_null(), CudaStatus::INVALID_VALUE)?;
    let mut bytes = vec![MaybeUninit::zeroed(); size.div_ceil(size_of::<u128>())];
    let to = bytes.as_mut_ptr().cast::<MaybeUninit<u8>>();
    // SAFETY: the caller of the entry point passes so many bytes; there are as many in the copy.
    unsafe { to.copy_from_nonoverlapping(place.cast(), size) };
    Ok(bytes)
}

/// A context is gone, and its modules with it.
pub(super) fn forget(context: Handle) {
    MODULES.forget(|own| *own == context);
    FUNCTIONS.forget(|function| function.context == context);
}

pub(super) fn load(module: *mut Handle, image: *const c_void) -> Outcome {
    let context = current()?;
    capture::unsafe_call()?;
    require(!module.is_null(), CudaStatus::INVALID_VALUE)?;
    require(!image.is_null(), status::INVALID_IMAGE)?;
    queue::wait_for_idle(Some(context.device))?;
    put(module, MODULES.insert(|_| context.handle))
}

pub(super) fn unload(module: Handle) -> Outcome {
    let context = current()?;
    capture::unsafe_call()?;
    MODULES.get(module)?;
    queue::wait_for_idle(Some(context.device))?;
    MODULES.remove(module)?;
    FUNCTIONS.forget(|function| function.module == module);
    Ok(())
}

pub(super) fn get_function(function: *mut Handle, module: Handle, name: *const c_char) -> Outcome {
    require(!function.is_null() && !name.is_null(), CudaStatus::INVALID_VALUE)?;
    current()?;
    let context = MODULES.get(module)?;
    // SAFETY: the caller of the entry point passes a terminated string.
    let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| CudaStatus::NOT_FOUND)?;
    let kernel = KERNELS.lock().get(name).copied().ok_or(CudaStatus::NOT_FOUND)?;
    put(function, FUNCTIONS.insert(|_| Function { module, context, kernel }))
}

/// Kernels here are loaded with their module.
pub(super) fn load_function(function: Handle) -> Outcome {
    current()?;
    FUNCTIONS.get(function).map(drop)
}

pub(super) fn launch(
    function: Handle,
    shape: &Shape,
    stream: Handle,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Outcome {
    enqueue_anywhere(stream, |context| {
        Launch::new(context.handle, function, shape, params, extra).map(Command::Kernel)
    })
    .map(drop)
}
