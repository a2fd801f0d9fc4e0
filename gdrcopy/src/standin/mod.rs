//! A simulated machine for tests: GPU memory, CUDA and the kernel's device files, in this process.
//!
//! GPU memory is memory files; a "BAR1 mapping" is a mapping of such a file, so what one side writes the
//! other reads, freed memory stays while something holds it, and wrong offsets show wrong bytes.

mod cuda;
pub mod driver;
mod gdrdrv;
mod kernel;
mod memory;
pub mod provider;
pub(crate) mod real;
mod rm;
mod uninitialised;
mod vma;

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

pub use cuda::{CudaSettings, SimulatedCuda, pci};
pub use gdrdrv::{Gdrdrv, Module};
pub use kernel::{Device, DeviceEnd, FileId, SimulatedKernel};
pub use memory::{CLIENT, FreeWatcher, Memory, Object, VaRange, dma_buf_offset};
pub use rm::{Live, RmSettings, SimulatedRm};
pub use uninitialised::UninitialisedCuda;

/// The machine. Share it between its CUDA, its kernel and the test that plays with it.
#[derive(Debug)]
pub struct Machine {
    /// GPU memory and who holds it.
    pub memory: Mutex<Memory>,
    /// What CUDA says of itself.
    pub cuda: Mutex<CudaSettings>,
    faults: Mutex<HashMap<String, i32>>,
}

impl Machine {
    /// A machine with `gpus` GPUs of 1 GiB and as much BAR1 each.
    pub fn new(gpus: i32) -> Arc<Self> {
        let memory = Mutex::new(Memory::new(gpus));
        Arc::new(Self { memory, cuda: Mutex::default(), faults: Mutex::default() })
    }

    /// From now on the named operation fails with this code (an `errno`, a CUDA or a driver status, as the
    /// operation has it); 0 ends it. The names are those given to [`Machine::fault`] by the devices.
    pub fn fail(&self, operation: &str, code: i32) {
        let mut faults = self.faults.lock();
        if code == 0 {
            faults.remove(operation)
        } else {
            faults.insert(operation.into(), code)
        };
    }

    /// The code with which an operation shall fail.
    pub fn fault(&self, operation: &str) -> Option<i32> {
        self.faults.lock().get(operation).copied()
    }
}
