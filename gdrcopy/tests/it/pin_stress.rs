//! Eight threads pin, map, copy, unmap and unpin on each backend; nothing is left behind. One test in a process of
//! its own, because it counts what the process holds.

use std::thread;

use gdrcopy::{BackendKind, Gdr, GpuBuffer, Result};
use gdsync_testkit::Module;
use gdsync_testkit::process::is_alone;

use crate::rig::{Numbers, Rig, open};

const THREADS: usize = 8;
const ROUNDS: usize = 60;
const SHARED: usize = 1 << 20;

/// What the process holds: descriptors, and mappings of memory files.
fn held() -> (usize, usize) {
    let descriptors = std::fs::read_dir("/proc/self/fd").expect("procfs").count();
    let maps = std::fs::read_to_string("/proc/self/maps").expect("procfs");
    (descriptors, maps.lines().filter(|line| line.contains("/memfd:")).count())
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
        let rig = Rig::new(Module::default());
        let gdr = open(&rig.system, kind).expect("a backend");
        // The simulated GPU keeps the blocks that it shares out, so the second time finds them there.
        stress(&gdr);
        let first = held();
        stress(&gdr);
        let second = held();
        assert_eq!(second.1, first.1, "{kind}: mappings");
        drop(gdr);
        rig.check_clean();
        assert_eq!(rig.device.open_files(), 0, "{kind}");
        drop(rig);
        assert_eq!(held(), before, "{kind}: descriptors and mappings");
    }
}
