//! Eight threads pin, map, copy, unmap and unpin on each backend; nothing is left behind. One test in a process of
//! its own, because it counts what the process holds.

use std::sync::Arc;
use std::thread;

use gdrcopy::cuda::Cuda;
use gdrcopy::system::System;
use gdrcopy::{BackendKind, Gdr, GpuBuffer, Result};
use gdsync_testkit::process::is_alone;
use gdsync_testkit::{
    Gdrdrv, Live, Machine, Module, RmSettings, SimulatedCuda, SimulatedKernel, SimulatedRm,
};

const THREADS: usize = 8;
const ROUNDS: usize = 60;
const SHARED: usize = 1 << 20;

/// What the process holds: descriptors, and mappings of memory files.
fn held() -> (usize, usize) {
    let descriptors = std::fs::read_dir("/proc/self/fd").expect("procfs").count();
    let maps = std::fs::read_to_string("/proc/self/maps").expect("procfs");
    (descriptors, maps.lines().filter(|line| line.contains("/memfd:")).count())
}

/// Numbers that differ from thread to thread (a linear congruential generator of Knuth's).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).expect("31 bits") % end
    }
}

/// Maps any part of a buffer that other threads use too, but writes only its own slice.
fn share(gdr: &Gdr, buffer: &GpuBuffer, thread: usize, numbers: &mut Numbers) -> Result<()> {
    let slice = SHARED / THREADS;
    let (start, end) = (numbers.below(thread * slice + 1), (thread + 1) * slice + numbers.below(1000));
    let end = end.min(SHARED);
    let pin = gdr.pin(buffer.addr() + start as u64, end - start)?;
    let mapping = pin.map()?;
    let byte = u8::try_from(numbers.below(256)).expect("a byte");
    let own = thread * slice - start + numbers.below(slice - 300);
    mapping.write(own, &[byte; 300])?;
    let mut seen = [0; 300];
    mapping.read(own, &mut seen)?;
    assert_eq!(seen, [byte; 300]);
    if numbers.below(2) == 0 {
        // The mapping keeps the pin.
        drop(pin);
        mapping.read(own, &mut seen)?;
        assert_eq!(seen, [byte; 300]);
        return Ok(());
    }
    drop(mapping);
    pin.unpin()
}

/// Memory of its own, freed before or after the mapping.
fn own(gdr: &Gdr, numbers: &mut Numbers) -> Result<()> {
    let len = 1 + numbers.below(200_000);
    let buffer = gdr.alloc(0, len)?;
    let at = numbers.below(len);
    let mapping = gdr.map(buffer.addr() + at as u64, len - at)?;
    mapping.write(len - at - 1, &[77])?;
    if numbers.below(2) == 0 {
        drop(buffer);
    }
    let mut seen = [0];
    mapping.read(len - at - 1, &mut seen)?;
    assert_eq!(seen, [77]);
    Ok(())
}

fn stress(gdr: &Gdr) {
    let buffer = gdr.alloc(0, SHARED).expect("memory");
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let buffer = &buffer;
            scope.spawn(move || {
                let mut numbers = Numbers(thread as u64);
                for _ in 0..ROUNDS {
                    share(gdr, buffer, thread, &mut numbers).expect("a shared buffer");
                    own(gdr, &mut numbers).expect("a buffer of one's own");
                }
            });
        }
    });
}

#[test]
fn nothing_is_left_behind() {
    if !is_alone("pin_stress::nothing_is_left_behind") {
        return;
    }
    // On our module in a real kernel (tests/vm/run kmod) there is that backend alone.
    let all = [BackendKind::Gdrdrv, BackendKind::DmaBuf, BackendKind::Rm, BackendKind::Host];
    let kinds = if std::env::var_os("GDRCOPY_TEST_KMOD").is_some() { &all[..1] } else { &all };
    for &kind in kinds {
        let before = held();
        let machine = Machine::new(1);
        machine.cuda.lock().driver_version = 13030;
        let device = Gdrdrv::new(&machine, Module::default());
        let kernel = SimulatedKernel::new(machine.clone()).with_device("/dev/gdrdrv", device.clone());
        let cuda: Arc<dyn Cuda> = SimulatedCuda::new(&machine);
        let rm = SimulatedRm::new(&machine, RmSettings::default());
        let system = System::new(Arc::new(rm.install(kernel)), Some(cuda));
        let gdr = Gdr::builder().backend(kind).system(system).open().expect("a backend");
        // The simulated GPU keeps the blocks that it shares out, so the second time finds them there.
        stress(&gdr);
        let first = held();
        stress(&gdr);
        let second = held();
        assert_eq!(second.1, first.1, "{kind}: mappings");
        assert_eq!(device.live_pins(), 0, "{kind}");
        drop(gdr);
        assert_eq!(device.open_files(), 0, "{kind}");
        assert_eq!((rm.live(), rm.violations()), (Live::default(), vec![]), "{kind}");
        drop((machine, device, rm));
        assert_eq!(held(), before, "{kind}: descriptors and mappings");
    }
}
