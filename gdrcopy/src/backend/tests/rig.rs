//! Simulated machines, and children to crash in.

use std::sync::Arc;

use crate::backend::dmabuf::DmaBuf;
use crate::backend::gdrdrv::Gdrdrv;
use crate::backend::host::Host;
use crate::backend::{Backend, proof};
use crate::cpu_range::CpuRange;
use crate::cuda::Cuda;
use crate::standin::{
    Gdrdrv as Device, Machine, Module, RmSettings, SimulatedCuda, SimulatedKernel, SimulatedRm,
};
use crate::system::System;

/// `/proc/devices` of a machine with the module.
pub(crate) const DEVICES: &str = "Character devices:\n  1 mem\n511 gdrdrv\n\nBlock devices:\n  7 loop\n";

/// A machine and what runs on it.
pub(crate) struct Rig {
    pub(crate) machine: Arc<Machine>,
    pub(crate) cuda: Arc<dyn Cuda>,
    pub(crate) device: Arc<Device>,
    pub(crate) system: System,
}

impl Rig {
    /// One GPU, CUDA 13.3, its driver and this module.
    pub(crate) fn new(module: Module) -> Self {
        Self::with_gpus(1, module)
    }

    /// Several GPUs.
    pub(crate) fn with_gpus(gpus: i32, module: Module) -> Self {
        let machine = Machine::new(gpus);
        machine.cuda.lock().driver_version = 13030;
        let device = Device::new(&machine, module);
        let kernel = SimulatedKernel::new(machine.clone())
            .with_device("/dev/gdrdrv", device.clone())
            .with_text("/proc/devices", DEVICES);
        let kernel = SimulatedRm::new(&machine, RmSettings::default()).install(kernel);
        let cuda: Arc<dyn Cuda> = SimulatedCuda::new(&machine);
        let system = System::simulated(Arc::new(kernel), Some(cuda.clone()));
        Self { machine, cuda, device, system }
    }

    /// The same machine for a process without CUDA.
    pub(crate) fn without_cuda(&self) -> System {
        System::simulated(self.system.kernel.clone(), None)
    }
}

/// Every backend of this folder, each on a machine of its own; on a real module that backend alone.
pub(crate) fn each(mut test: impl FnMut(&Rig, Box<dyn Backend>)) {
    let rig = Rig::new(Module::default());
    test(&rig, Box::new(Gdrdrv::open(&rig.system, false).unwrap()));
    if crate::standin::real::is_wanted() {
        return;
    }
    let rig = Rig::new(Module::default());
    test(&rig, Box::new(DmaBuf::open(&rig.system).unwrap()));
    let rig = Rig::new(Module::default());
    test(&rig, Box::new(Host::open(&rig.without_cuda()).unwrap()));
}

/// What a mapping shows.
pub(crate) fn peek(range: &CpuRange, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    proof::load(range, offset, &mut bytes).unwrap();
    bytes
}

/// Writes through a mapping.
pub(crate) fn poke(range: &CpuRange, offset: usize, bytes: &[u8]) {
    proof::store(range, offset, bytes).unwrap();
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

/// How a child ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// It gave this answer.
    Said(bool),
    /// A signal killed it.
    Killed(i32),
}

/// Runs something in a forked child, for at most 20 s. It must not print or panic: another thread of the parent
/// may have held the lock of the output.
pub(crate) fn in_child(act: impl FnOnce() -> bool) -> End {
    // SAFETY: the child only runs `act` and leaves without the parent's exit handlers.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork: {}", std::io::Error::last_os_error());
    if child == 0 {
        let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: a valid structure.
        unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const no_core) };
        // SAFETY: a number.
        unsafe { libc::alarm(20) };
        let said = act();
        // SAFETY: ends this process, which has nothing to clean up.
        unsafe { libc::_exit((!said).into()) };
    }
    let mut status = 0;
    // SAFETY: a place for the status of the child above.
    let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(ended, child);
    if libc::WIFSIGNALED(status) {
        End::Killed(libc::WTERMSIG(status))
    } else {
        End::Said(libc::WEXITSTATUS(status) == 0)
    }
}
