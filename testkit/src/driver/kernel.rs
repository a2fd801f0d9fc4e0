//! Kernels: Rust functions under names, and launches of them.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::mem::MaybeUninit;

use gdrcopy::cuda::CudaStatus;
use gdrcopy::cuda::raw::layout::Handle;
use parking_lot::Mutex;

use super::handles::Table;
use super::{Outcome, get_all, require};

/// What a kernel is.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    /// Bytes of each parameter.
    params: &'static [usize],
    run: fn(&[*mut c_void]),
}

/// A kernel of a loaded module.
#[derive(Clone, Copy)]
pub(super) struct Function {
    pub(super) module: Handle,
    pub(super) context: Handle,
    pub(super) kernel: Kernel,
}

pub(super) static KERNELS: Mutex<BTreeMap<&'static str, Kernel>> = Mutex::new(BTreeMap::new());
/// Loaded modules, each with its context.
pub(super) static MODULES: Table<Handle> = Table::new();
pub(super) static FUNCTIONS: Table<Function> = Table::new();

/// Makes a function the kernel of this name in all modules; a later one of the same name replaces it.
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
