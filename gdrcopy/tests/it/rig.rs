//! The library on simulated machines, one backend at a time, with the names that the tests use.

use std::ptr::NonNull;
use std::sync::Arc;

use gdrcopy::cuda::{AllocKind, Cuda, MemoryKind};
use gdrcopy::system::System;
use gdrcopy::{Attribute, BackendKind, Error, Gdr, GpuBuffer, Mapping, MappingType, Pin, PinFlags, Result};
use gdsync_testkit::{
    Gdrdrv as Device, Live, Machine, Module, RmSettings, SimulatedCuda, SimulatedKernel, SimulatedRm, kmod,
};

pub(crate) use gdsync_testkit::process::{End, in_child};

/// GPU pages, bytes.
pub(crate) const GPU_PAGE: u64 = 64 << 10;
/// `ENOTSUPP`: a number of the kernel's own that NVIDIA's driver returns.
pub(crate) const ENOTSUPP: i32 = 524;
/// `/proc/devices` of a machine with the module.
pub(crate) const DEVICES: &str = "Character devices:\n  1 mem\n511 gdrdrv\n\nBlock devices:\n  7 loop\n";

/// A machine and what runs on it.
pub(crate) struct Rig {
    pub(crate) machine: Arc<Machine>,
    pub(crate) cuda: Arc<dyn Cuda>,
    pub(crate) device: Arc<Device>,
    pub(crate) rm: Arc<SimulatedRm>,
    pub(crate) system: System,
}

impl Rig {
    /// One GPU, CUDA 13.3, its driver and this module.
    pub(crate) fn new(module: Module) -> Self {
        Self::with_gpus(1, module)
    }

    pub(crate) fn with_gpus(gpus: i32, module: Module) -> Self {
        Self::with(gpus, module, RmSettings::default())
    }

    pub(crate) fn with(gpus: i32, module: Module, settings: RmSettings) -> Self {
        let machine = Machine::new(gpus);
        machine.cuda.lock().driver_version = 13030;
        let device = Device::new(&machine, module);
        let kernel = SimulatedKernel::new(machine.clone())
            .with_device("/dev/gdrdrv", device.clone())
            .with_text("/proc/devices", DEVICES);
        let rm = SimulatedRm::new(&machine, settings);
        let cuda: Arc<dyn Cuda> = SimulatedCuda::new(&machine);
        let system = System::new(Arc::new(rm.install(kernel)), Some(cuda.clone()));
        Self { machine, cuda, device, rm, system }
    }

    /// Memory of the application.
    pub(crate) fn memory(&self, gpu: i32, len: usize, kind: MemoryKind) -> u64 {
        self.machine.memory.lock().alloc(gpu, len, kind).unwrap()
    }

    /// Writes as the GPU does.
    pub(crate) fn write(&self, gpu: i32, addr: u64, bytes: &[u8]) {
        // SAFETY: a whole slice.
        unsafe { self.cuda.copy_to_device(gpu, addr, bytes.as_ptr(), bytes.len()) }.unwrap();
    }

    /// Reads as the GPU does.
    pub(crate) fn read(&self, gpu: i32, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: a whole vector.
        unsafe { self.cuda.copy_from_device(gpu, bytes.as_mut_ptr(), addr, len) }.unwrap();
        bytes
    }

    /// The drivers hold nothing, and nothing was done in a wrong order.
    pub(crate) fn check_clean(&self) {
        if !kmod::is_wanted() {
            assert_eq!(self.rm.live(), Live::default());
            assert_eq!(self.rm.violations(), [""; 0]);
        }
        assert_eq!(self.device.live_pins(), 0);
    }

    /// The same machine for a process without CUDA.
    pub(crate) fn without_cuda(&self) -> System {
        System::new(self.system.kernel().clone(), no_cuda())
    }
}

/// For a [`System`] without CUDA.
pub(crate) fn no_cuda() -> Option<Arc<dyn Cuda>> {
    None
}

/// The library, opened on one backend.
#[derive(Debug)]
pub(crate) struct Backend(pub(crate) Gdr);

impl Backend {
    /// The backend's own error is returned, not the list of refusals.
    pub(crate) fn open(system: &System, kind: BackendKind) -> Result<Self> {
        first_refusal(Gdr::builder().backend(kind).system(system.clone()).open())
    }

    pub(crate) fn gdrdrv(system: &System) -> Result<Self> {
        Self::open(system, BackendKind::Gdrdrv)
    }

    /// Also on a module that takes mappings away when their memory is freed.
    pub(crate) fn volatile_gdrdrv(system: &System) -> Result<Self> {
        let builder = Gdr::builder().backend(BackendKind::Gdrdrv).allow_volatile();
        first_refusal(builder.system(system.clone()).open())
    }

    pub(crate) fn dmabuf(system: &System) -> Result<Self> {
        Self::open(system, BackendKind::DmaBuf)
    }

    pub(crate) fn rm(system: &System) -> Result<Self> {
        Self::open(system, BackendKind::Rm)
    }

    pub(crate) fn kind(&self) -> BackendKind {
        self.0.backend()
    }

    pub(crate) fn driver_version(&self) -> Option<(u16, u16)> {
        self.0.driver_version()
    }

    pub(crate) fn attribute(&self, attribute: Attribute) -> Result<u32> {
        self.0.attribute(attribute)
    }

    pub(crate) fn pin(&self, addr: u64, len: usize, flags: PinFlags) -> Result<Pinned> {
        self.0.pin_with(addr, len, flags).map(Pinned)
    }

    pub(crate) fn allocate(&self, device: i32, len: usize) -> Result<Memory> {
        self.0.alloc_with(device, len, AllocKind::Malloc).map(Memory)
    }
}

fn first_refusal(opened: Result<Gdr>) -> Result<Backend> {
    match opened {
        Ok(gdr) => Ok(Backend(gdr)),
        Err(Error::NoBackend(mut refusals)) if refusals.len() == 1 => Err(refusals.remove(0).error),
        Err(other) => Err(other),
    }
}

/// A pin. Mappings begin at the first pinned page, not at the byte that was asked for.
#[derive(Debug)]
pub(crate) struct Pinned(pub(crate) Pin);

impl Pinned {
    pub(crate) fn va(&self) -> u64 {
        self.0.info().va
    }

    pub(crate) fn pinned_len(&self) -> usize {
        self.0.info().mapped_size
    }

    pub(crate) fn page_size(&self) -> u32 {
        self.0.info().page_size
    }

    pub(crate) fn map(&self, len: usize, request: Option<MappingType>) -> Result<Mapping> {
        self.0.map_pages(len, request)
    }

    pub(crate) fn invalidated(&self) -> Result<bool> {
        self.0.invalidated()
    }

    pub(crate) fn unpin(self) -> Result<()> {
        self.0.unpin()
    }
}

/// GPU memory, read and written by the copy engine.
#[derive(Debug)]
pub(crate) struct Memory(GpuBuffer);

impl Memory {
    pub(crate) fn addr(&self) -> u64 {
        self.0.addr()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn write(&self, offset: usize, data: &[u8]) -> Result<()> {
        self.0.copy_in(offset, data)
    }

    pub(crate) fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.0.copy_out(offset, out)
    }
}

/// Every backend, each on a machine of its own, where it leaves nothing behind; on a real module that backend alone.
pub(crate) fn each(mut test: impl FnMut(&Rig, Backend)) {
    let kinds = [BackendKind::Gdrdrv, BackendKind::DmaBuf, BackendKind::Rm, BackendKind::Host];
    for kind in &kinds[..if kmod::is_wanted() { 1 } else { kinds.len() }] {
        let rig = Rig::new(Module::default());
        let system = if *kind == BackendKind::Host { rig.without_cuda() } else { rig.system.clone() };
        test(&rig, Backend::open(&system, *kind).unwrap());
        rig.check_clean();
    }
}

/// What a mapping shows.
pub(crate) fn peek(mapping: &Mapping, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    mapping.read(offset, &mut bytes).unwrap();
    bytes
}

/// Writes through a mapping.
pub(crate) fn poke(mapping: &Mapping, offset: usize, bytes: &[u8]) {
    mapping.write(offset, bytes).unwrap();
}

/// The first address of a mapping.
pub(crate) fn address(mapping: &Mapping) -> NonNull<u8> {
    NonNull::new(mapping.as_ptr()).unwrap()
}

/// Bytes that differ from place to place.
pub(crate) fn pattern(seed: u32, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_769) | 1;
    std::iter::repeat_with(|| {
        // xorshift32
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state.to_le_bytes()[1]
    })
    .take(len)
    .collect()
}
