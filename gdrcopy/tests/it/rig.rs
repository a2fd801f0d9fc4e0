//! The library on simulated machines, one backend at a time, with the names that the tests use.

use std::ffi::{CStr, c_void};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gdrcopy::cuda::{Cuda, MemoryKind};
use gdrcopy::system::{Kernel, System};
use gdrcopy::{BackendKind, Error, Gdr, Mapping, Result};
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

/// Opens the library on one backend; gives the backend's own error, not the list of refusals.
pub(crate) fn open(system: &System, kind: BackendKind) -> Result<Gdr> {
    own_error(Gdr::builder().backend(kind).system(system.clone()).open())
}

pub(crate) fn open_gdrdrv(system: &System) -> Result<Gdr> {
    open(system, BackendKind::Gdrdrv)
}

/// Also on a module that takes mappings away when their memory is freed.
pub(crate) fn open_volatile_gdrdrv(system: &System) -> Result<Gdr> {
    own_error(Gdr::builder().backend(BackendKind::Gdrdrv).allow_volatile().system(system.clone()).open())
}

pub(crate) fn open_dmabuf(system: &System) -> Result<Gdr> {
    open(system, BackendKind::DmaBuf)
}

pub(crate) fn open_rm(system: &System) -> Result<Gdr> {
    open(system, BackendKind::Rm)
}

fn own_error(opened: Result<Gdr>) -> Result<Gdr> {
    opened.map_err(|error| match error {
        Error::NoBackend(mut refusals) if refusals.len() == 1 => refusals.remove(0).error,
        other => other,
    })
}

/// Every backend, each on a machine of its own, where it leaves nothing behind; on a real module that backend alone.
pub(crate) fn each(mut test: impl FnMut(&Rig, Gdr)) {
    let kinds = [BackendKind::Gdrdrv, BackendKind::DmaBuf, BackendKind::Rm, BackendKind::Host];
    for kind in &kinds[..if kmod::is_wanted() { 1 } else { kinds.len() }] {
        let rig = Rig::new(Module::default());
        let system = if *kind == BackendKind::Host { rig.without_cuda() } else { rig.system.clone() };
        test(&rig, open(&system, *kind).unwrap());
        rig.check_clean();
    }
}

/// What a mapping shows.
pub(crate) fn peek(mapping: &Mapping, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    mapping.read(offset, &mut bytes).unwrap();
    bytes
}

pub(crate) fn poke(mapping: &Mapping, offset: usize, bytes: &[u8]) {
    mapping.write(offset, bytes).unwrap();
}

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

/// Numbers that look random (a linear congruential generator of Knuth's).
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // The low bits have short periods.
        self.0.rotate_left(31)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() & 0x7fff_ffff).expect("31 bits") % end
    }
}

/// A kernel, or a device of it, under which memory changes while a call is on its way to it.
#[derive(Debug)]
pub(crate) struct Interrupted {
    kernel: Arc<dyn Kernel>,
    machine: Arc<Machine>,
    /// The call; any one without it.
    request: Option<u32>,
    change: fn(&Machine),
    armed: AtomicBool,
}

impl Interrupted {
    pub(crate) fn new(
        kernel: Arc<dyn Kernel>,
        machine: &Arc<Machine>,
        request: Option<u32>,
        change: fn(&Machine),
    ) -> Arc<Self> {
        Arc::new(Self { kernel, machine: machine.clone(), request, change, armed: AtomicBool::new(false) })
    }

    /// Has the change made before the next such call.
    pub(crate) fn arm(&self) {
        self.armed.store(true, Ordering::Relaxed);
    }
}

// SAFETY: the other kernel's mappings.
unsafe impl Kernel for Interrupted {
    fn open(&self, path: &CStr) -> io::Result<OwnedFd> {
        self.kernel.open(path)
    }

    unsafe fn ioctl(&self, fd: BorrowedFd<'_>, request: u32, arg: *mut c_void) -> io::Result<()> {
        let is_it = self.request.is_none_or(|wanted| wanted == request);
        if is_it && self.armed.swap(false, Ordering::Relaxed) {
            (self.change)(&self.machine);
        }
        // SAFETY: the caller guarantees it.
        unsafe { self.kernel.ioctl(fd, request, arg) }
    }

    unsafe fn mmap(
        &self,
        fd: BorrowedFd<'_>,
        len: usize,
        offset: u64,
        at: Option<NonNull<u8>>,
    ) -> io::Result<NonNull<u8>> {
        // SAFETY: the caller guarantees it.
        unsafe { self.kernel.mmap(fd, len, offset, at) }
    }
}
