//! A CUDA stream of the program's own, and kernels that are launched on it.

use std::ffi::{CStr, c_void};
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, result, sys};
use gdsync::cuda::Gpu;
use gdsync::stream::{CudaStreamConfig, Stream};

use super::Result;

/// A stream and a module of kernels. Both stay as long as the process: nothing can outlive them.
#[derive(Debug)]
pub struct Kernels {
    stream: &'static Arc<CudaStream>,
    module: sys::CUmodule,
}

/// A kernel of a loaded module, whose only parameter is an `A`.
#[derive(Debug)]
pub struct Kernel<A> {
    function: sys::CUfunction,
    argument: std::marker::PhantomData<A>,
}

impl Kernels {
    /// Makes a stream, and loads kernels from their PTX text.
    ///
    /// # Errors
    /// Of the driver.
    pub fn load(gpu: &Gpu, ptx: &'static CStr) -> Result<Self> {
        // SAFETY: loading the driver's library runs its initialisers, which any use of CUDA does.
        if !unsafe { sys::is_culib_present() } {
            return Err("libcuda.so.1 cannot be loaded a second time".into());
        }
        let context = CudaContext::new(usize::try_from(gpu.ordinal())?)?;
        context.bind_to_thread()?;
        let stream = Box::leak(Box::new(context.new_stream()?));
        // SAFETY: a terminated PTX text.
        let module = unsafe { result::module::load_data(ptx.as_ptr().cast()) }
            .map_err(|e| format!("the GPU driver cannot compile the kernels: {e}"))?;
        Ok(Self { stream, module })
    }

    /// Finds a kernel.
    ///
    /// # Errors
    /// When there is no kernel of that name.
    ///
    /// # Safety
    /// Its only parameter must have the layout of `A`.
    pub unsafe fn find<A: Copy>(&self, name: &CStr) -> Result<Kernel<A>> {
        // SAFETY: the module stays loaded.
        let function = unsafe { result::module::get_function(self.module, name.to_owned()) }
            .map_err(|e| format!("kernel {}: {e}", name.to_string_lossy()))?;
        Ok(Kernel { function, argument: std::marker::PhantomData })
    }

    /// Launches a kernel on the stream.
    ///
    /// # Errors
    /// Of the driver.
    ///
    /// # Safety
    /// The memory that the argument names must be what the kernel takes it for, until the kernel has ended.
    pub unsafe fn launch<A: Copy>(
        &self,
        kernel: &Kernel<A>,
        blocks: u32,
        threads: u32,
        mut argument: A,
    ) -> Result<()> {
        let mut arguments: [*mut c_void; 1] = [(&raw mut argument).cast()];
        let (grid, block) = ((blocks, 1, 1), (threads, 1, 1));
        self.stream.context().bind_to_thread()?;
        // SAFETY: the argument is of the kernel's type and copied by the call; the caller vouches for what it names.
        unsafe {
            result::launch_kernel(kernel.function, grid, block, 0, self.stream.cu_stream(), &mut arguments)
        }?;
        Ok(())
    }

    /// Lends the stream, so that sends and waits run between the kernels.
    ///
    /// # Errors
    /// Of the stream.
    pub fn lend(&self, gpu: &Gpu, config: CudaStreamConfig) -> Result<Stream> {
        // SAFETY: the stream stays as long as the process.
        Ok(unsafe { Stream::cuda_from_raw(gpu, self.stream.cu_stream().addr(), config) }?)
    }

    /// Blocks until everything on the stream is done, which its wait limit bounds.
    ///
    /// # Errors
    /// Of the driver.
    pub fn synchronize(&self) -> Result<()> {
        Ok(self.stream.synchronize()?)
    }
}
