//! When CUDA is touched, and what is known before.

use std::fmt;
use std::sync::{Arc, Barrier};

use gdrcopy::cuda::MemoryKind;
use gdrcopy::system::System;
use gdrcopy::{Attribute, BackendKind, Error, Gdr, GdrBuilder, Result, Survey};
use gdsync_testkit::{
    Gdrdrv as Module, Machine, RmSettings, SimulatedKernel, SimulatedRm, UninitialisedCuda,
};

use crate::rig::{End, in_child};

const LEN: usize = 1 << 20;
const ATTRIBUTES: [Attribute; 3] =
    [Attribute::UsePersistentMapping, Attribute::SupportPinFlagForcePcie, Attribute::UsingDmaBufMmap];

/// A machine whose CUDA is not initialised.
struct Bench {
    machine: Arc<Machine>,
    cuda: UninitialisedCuda,
    kernel: Arc<SimulatedKernel>,
}

impl Bench {
    /// A machine with these devices besides its GPU.
    fn with(devices: impl FnOnce(&Arc<Machine>, SimulatedKernel) -> SimulatedKernel) -> Self {
        let machine = Machine::new(1);
        let kernel = Arc::new(devices(&machine, SimulatedKernel::new(machine.clone())));
        Self { cuda: UninitialisedCuda::new(&machine), machine, kernel }
    }

    /// A stock driver.
    fn rm() -> Self {
        Self::with(|machine, kernel| SimulatedRm::new(machine, RmSettings::default()).install(kernel))
    }

    /// A stock driver of CUDA 13.3.
    fn dmabuf() -> Self {
        let bench = Self::rm();
        bench.machine.cuda.lock().driver_version = 13030;
        bench
    }

    fn gdrdrv() -> Self {
        Self::with(|machine, kernel| {
            kernel.with_device("/dev/gdrdrv", Module::new(machine, Default::default()))
        })
    }

    fn system(&self) -> System {
        System::new(self.kernel.clone(), self.cuda.clone())
    }

    fn builder(&self) -> GdrBuilder {
        let chosen = ["GDRCOPY_BACKEND", "GDRCOPY_USE_DMABUF_MMAP"].map(std::env::var_os);
        assert_eq!(chosen, [None, None], "unset it: these tests are of all backends");
        Gdr::builder().system(self.system())
    }

    fn memory(&self) -> u64 {
        self.machine.memory.lock().alloc(0, LEN, MemoryKind::Malloc).unwrap()
    }
}

fn attributes(survey: &Survey) -> [u32; 3] {
    ATTRIBUTES.map(|attribute| survey.attribute(attribute).unwrap())
}

fn refused(result: Result<impl fmt::Debug>) -> Vec<BackendKind> {
    match result.unwrap_err() {
        Error::NoBackend(refusals) => refusals.iter().map(|refusal| refusal.backend).collect(),
        other => panic!("{other}"),
    }
}

#[test]
fn a_survey_does_not_initialise_cuda_and_predicts_the_backend() {
    for (bench, kind) in [(Bench::rm(), BackendKind::Rm), (Bench::dmabuf(), BackendKind::DmaBuf)] {
        let survey = bench.builder().survey().unwrap();
        assert_eq!((survey.backend(), survey.driver_version()), (kind, None));
        let before = attributes(&survey);
        let line = survey.to_string();
        assert!(line.starts_with(&format!("{kind} (to be opened at first use); not gdrdrv: ")), "{line}");
        assert!(survey.opened().is_none());
        assert_eq!(bench.cuda.initialised(), 0);

        let gdr = survey.open().unwrap();
        assert_eq!(bench.cuda.initialised(), 1);
        gdr.map(bench.memory(), LEN).unwrap();
        assert!(std::ptr::eq(gdr, survey.open().unwrap()));
        assert_eq!(bench.cuda.initialised(), 1);
        assert_eq!((survey.backend(), gdr.backend(), attributes(&survey)), (kind, kind, before));
        assert!(survey.to_string().starts_with(&format!("{kind}; not gdrdrv: ")), "{survey}");
    }
}

#[test]
fn gdrdrv_initialises_cuda_for_pins_only() {
    let bench = Bench::gdrdrv();
    let survey = bench.builder().survey().unwrap();
    let gdr = survey.open().unwrap();
    assert_eq!((survey.driver_version(), attributes(&survey)), (Some((2, 6)), [1, 1, 0]));
    assert_eq!(survey.to_string(), "gdrdrv");
    let at_once = bench.builder().open().unwrap();
    assert_eq!(bench.cuda.initialised(), 0);
    gdr.map(bench.memory(), LEN).unwrap();
    gdr.map(bench.memory(), LEN).unwrap();
    assert_eq!(bench.cuda.initialised(), 1);
    at_once.map(bench.memory(), LEN).unwrap();
    assert_eq!(bench.cuda.initialised(), 2, "each has its own");
}

#[test]
fn the_host_backend_needs_no_cuda() {
    let bench = Bench::rm();
    let survey = bench.builder().backend(BackendKind::Host).survey().unwrap();
    assert_eq!(attributes(&survey), [1, 0, 0]);
    let buffer = survey.open().unwrap().alloc(0, LEN).unwrap();
    buffer.map().unwrap().write(0, b"plain").unwrap();
    assert_eq!(bench.cuda.initialised(), 0);
}

#[test]
fn a_backend_that_cannot_work_is_refused_by_the_survey() {
    let all = [BackendKind::Gdrdrv, BackendKind::DmaBuf, BackendKind::Rm];
    let bench = Bench::rm();
    for (operation, code) in
        [("open /dev/nvidiactl", libc::EACCES), ("rm alloc", 1), ("cuDriverGetVersion", 34)]
    {
        bench.machine.fail(operation, code);
        assert_eq!(refused(bench.builder().require_gpu().survey()), all, "{operation}");
        assert_eq!(bench.builder().survey().unwrap().backend(), BackendKind::Host);
        assert_eq!(refused(bench.builder().backend(BackendKind::Rm).survey()), [BackendKind::Rm]);
        bench.machine.fail(operation, 0);
    }
    let old = bench.builder().backend(BackendKind::DmaBuf).survey().unwrap_err().to_string();
    assert!(old.contains("CUDA 13.0"), "{old}");
    assert_eq!(bench.cuda.initialised(), 0);
}

#[test]
fn opening_that_failed_is_tried_again() {
    let bench = Bench::rm();
    let survey = bench.builder().require_gpu().survey().unwrap();
    for (times, (operation, code)) in
        [("cuInit", 100), ("rm swap", 1), ("open /dev/nvidia0", libc::EACCES)].into_iter().enumerate()
    {
        bench.machine.fail(operation, code);
        assert_eq!(refused(survey.open()).last(), Some(&BackendKind::Rm), "{operation}");
        assert_eq!(bench.cuda.initialised(), [1, 2, 2][times]);
        assert_eq!((survey.backend(), survey.opened().is_none()), (BackendKind::Rm, true));
        bench.machine.fail(operation, 0);
    }
    survey.open().unwrap().map(bench.memory(), LEN).unwrap();
}

#[test]
fn open_falls_back_to_a_later_backend() {
    let bench = Bench::dmabuf();
    let survey = bench.builder().survey().unwrap();
    assert_eq!((survey.backend(), attributes(&survey)), (BackendKind::DmaBuf, [1, 1, 1]));
    bench.machine.fail("wrong page of a dma-buf", 1);
    survey.open().unwrap().map(bench.memory(), LEN).unwrap();
    assert_eq!((survey.backend(), attributes(&survey)), (BackendKind::Rm, [1, 1, 0]));
    assert!(survey.to_string().contains("not dmabuf: "), "{survey}");
}

#[test]
fn concurrent_threads_open_once() {
    let bench = Bench::rm();
    let survey = bench.builder().survey().unwrap();
    let memory = bench.memory();
    let start = Barrier::new(8);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                start.wait();
                survey.open().unwrap().pin(memory, LEN).unwrap();
            });
        }
    });
    assert_eq!(bench.cuda.initialised(), 1);
}

#[test]
fn a_child_may_initialise_cuda_if_its_parent_has_not() {
    let bench = Bench::rm();
    let survey = bench.builder().survey().unwrap();
    let system = bench.system();
    let end = in_child(|| {
        let foreign = matches!(survey.open(), Err(Error::OtherProcess { .. }));
        foreign && bench.cuda.initialised() == 0 && system.cuda().is_ok() && bench.cuda.initialised() == 1
    });
    assert_eq!(end, End::Said(true));
    assert_eq!(bench.cuda.initialised(), 0);
    system.cuda().unwrap();
    survey.open().unwrap();
}
