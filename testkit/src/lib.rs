//! Test doubles of this project: a simulated machine with GPU memory, CUDA, `/dev/gdrdrv` and the resource manager, and a
//! simulated CUDA driver whose streams run.
//!
//! There are two simulations of CUDA. [`SimulatedCuda`] implements [`gdrcopy::cuda::Cuda`] on a [`Machine`], and a test
//! may have many: for tests of mappings. [`driver`] is a table of the driver's entry points, one per process: for tests of
//! streams, events, graphs and kernels.
//!
//! GPU memory is memory files; a BAR1 mapping is a mapping of such a file. So what one side writes the other reads, freed
//! memory stays while something holds it, and wrong offsets show wrong bytes.

#![allow(clippy::missing_errors_doc, reason = "test doubles, not for others")]

pub mod c;
pub mod card;
mod cuda;
pub mod driver;
mod gdrdrv;
mod kernel;
pub mod kernels;
pub mod kmod;
mod machine;
pub mod process;
mod rm;

pub use cuda::{SimulatedCuda, UninitialisedCuda};
pub use gdrdrv::{Gdrdrv, Module};
pub use kernel::{DeviceEnd, FileId, SimulatedKernel};
pub use machine::{CLIENT, CudaSettings, FreeWatcher, Machine, Memory, Object, VaRange, dma_buf_offset, pci};
pub use rm::{Live, RmSettings, SimulatedRm};

/// What a test takes in each tier of `GDSYNC_TEST_TIER`: `fast`, `full` (the default), `long`.
pub fn tier<T>(fast: T, full: T, long: T) -> T {
    match std::env::var("GDSYNC_TEST_TIER").as_deref() {
        Ok("fast") => fast,
        Ok("full" | "") | Err(_) => full,
        Ok("long") => long,
        Ok(other) => panic!("GDSYNC_TEST_TIER is '{other}', not fast, full or long"),
    }
}
