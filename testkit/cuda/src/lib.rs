//! The simulated CUDA driver as a library: under the name `libcuda.so.1` a program takes it for the driver's.
//!
//! It exports the entry points of [`gdsync_testkit::driver`].

/// What a test waits for where it has a driver: makes sure that this library has the entry points.
pub fn entry_points() -> usize {
    let api = gdsync_testkit::driver::api();
    api.init.map_or(0, |entry| entry as usize)
}

/// Makes the kernels of gdsync known, so that streams by kernels work. Before a GPU is opened.
#[unsafe(no_mangle)]
pub extern "C" fn simulated_cuda_kernels() {
    gdsync_testkit::kernels::register();
}
