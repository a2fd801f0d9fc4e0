//! The backend on a simulated driver.

mod abi;
mod failures;
mod mappings;
mod refusals;

use std::sync::Arc;

use gdrcopy::cuda::{Cuda, MemoryKind};
use gdrcopy::system::System;
use gdrcopy::{Error, Mapping, PinFlags, Result};
use gdsync_testkit::{Live, Machine, Object, RmSettings, SimulatedCuda, SimulatedKernel, SimulatedRm};

use crate::rig::{Backend, GPU_PAGE as PAGE, Pinned};

/// Addresses where no simulated allocation lies.
const RESERVED: u64 = 0x7e00_0000_0000;

/// A machine with a driver.
struct Bench {
    machine: Arc<Machine>,
    driver: Arc<SimulatedRm>,
    cuda: Arc<SimulatedCuda>,
    system: System,
}

impl Bench {
    fn new(gpus: i32) -> Self {
        Self::with(gpus, RmSettings::default())
    }

    fn with(gpus: i32, settings: RmSettings) -> Self {
        let machine = Machine::new(gpus);
        let driver = SimulatedRm::new(&machine, settings);
        let kernel = driver.install(SimulatedKernel::new(machine.clone()));
        let cuda = SimulatedCuda::new(&machine);
        let system = System::new(Arc::new(kernel), Some(cuda.clone() as Arc<dyn Cuda>));
        Self { machine, driver, cuda, system }
    }

    fn open(&self) -> Backend {
        Backend::rm(&self.system).unwrap()
    }

    /// Memory made by the application, with bytes of its own.
    fn alloc(&self, gpu: i32, len: usize, kind: MemoryKind) -> u64 {
        let addr = self.machine.memory.lock().alloc(gpu, len, kind).unwrap();
        self.fill(gpu, addr, len);
        addr
    }

    /// Adjacent VMM mappings of one object each.
    fn vmm(&self, gpu: i32, sizes: &[usize]) -> u64 {
        let mut at = RESERVED;
        for &size in sizes {
            let object = Object::new(gpu, size).unwrap();
            self.machine.memory.lock().insert(at, size, object, 0, MemoryKind::Vmm);
            self.fill(gpu, at, size);
            at += size as u64;
        }
        RESERVED
    }

    /// Writes, as the GPU does, to each byte what belongs to its address.
    fn fill(&self, gpu: i32, addr: u64, len: usize) {
        let bytes: Vec<u8> = (addr..addr + len as u64).map(pattern).collect();
        // SAFETY: a whole vector.
        unsafe { self.cuda.copy_to_device(gpu, addr, bytes.as_ptr(), len) }.unwrap();
    }

    /// Reads as the GPU does.
    fn read(&self, gpu: i32, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: a whole vector.
        unsafe { self.cuda.copy_from_device(gpu, bytes.as_mut_ptr(), addr, len) }.unwrap();
        bytes
    }

    /// Nothing is left and nothing was done in a wrong order.
    fn check_clean(&self) {
        assert_eq!(self.driver.live(), Live::default());
        assert_eq!(self.driver.violations(), [""; 0]);
    }
}

/// What a client of one GPU holds at rest.
const AT_REST: Live = Live { files: 2, clients: 1, objects: 1, mappings: 0 };

/// The byte at an address; different from that of near and of page-wise far addresses.
fn pattern(addr: u64) -> u8 {
    (addr.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56).to_le_bytes()[0]
}

fn pin(rm: &Backend, addr: u64, len: usize) -> Result<Pinned> {
    rm.pin(addr, len, PinFlags::empty())
}

/// Pins and maps all of it.
fn map(rm: &Backend, addr: u64, len: usize) -> Result<(Pinned, Mapping)> {
    let pin = pin(rm, addr, len)?;
    let range = pin.map(pin.pinned_len(), None)?;
    Ok((pin, range))
}

fn refusal<T>(result: Result<T>) -> Error {
    match result {
        Ok(_) => panic!("accepted"),
        Err(error) => error,
    }
}

fn load(range: &Mapping, offset: usize) -> u8 {
    range.load(offset).unwrap()
}

fn store(range: &Mapping, offset: usize, byte: u8) {
    range.store(offset, byte).unwrap();
}

/// The user's part of a mapping shows each byte of `len` at `addr`.
fn check_bytes(pin: &Pinned, range: &Mapping, addr: u64, len: usize) {
    let first = usize::try_from(addr - pin.va()).unwrap();
    for at in 0..len {
        let wanted = pattern(addr + at as u64);
        assert_eq!(load(range, first + at), wanted, "byte {at} of {len} at {addr:#x}");
    }
}
