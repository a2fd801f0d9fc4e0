//! Which memory a pin takes itself for, and what of it mappings reach.

use std::sync::Arc;

use gdrcopy::cuda::MemoryKind;
use gdrcopy::planner::{Way, write_by};
use gdrcopy::system::System;
use gdrcopy::{BackendKind, Error, Mapping, PinFlags};
use gdsync_testkit::{Machine, Module, Object, SimulatedKernel};

use crate::rig::{DEVICES, Interrupted, Rig, open, open_gdrdrv, open_rm, pattern};

const NONE: PinFlags = PinFlags::empty();
const BASE: u64 = 0x7e00_0000_0000;
const PAGE: usize = 64 << 10;
const SIZE: usize = 2 << 20;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`.
const ORDERING: u32 = 118;

/// New memory at [`BASE`], in place of what was there.
fn give(machine: &Machine, len: usize) -> Arc<Object> {
    let object = Object::new(0, len).unwrap();
    let mut memory = machine.memory.lock();
    let _ = memory.free(BASE);
    memory.insert(BASE, len, object.clone(), 0, MemoryKind::Malloc);
    object
}

/// Whether the copy engine is used for a copy of a whole mapping. Writes zeros by the CPU where it is not.
pub(crate) fn is_copied_by_engine(machine: &Machine, mapping: &Mapping) -> bool {
    machine.fail("cuMemcpyHtoDAsync", 719);
    let copied = write_by(Way::CopyEngine, mapping, 0, &vec![0; mapping.len()]);
    machine.fail("cuMemcpyHtoDAsync", 0);
    copied.is_err()
}

#[test]
fn memory_that_comes_after_the_pin_is_not_the_pinned() {
    let rig = Rig::new(Module::default());
    for kind in [BackendKind::Gdrdrv, BackendKind::DmaBuf, BackendKind::Rm] {
        let gdr = open(&rig.system, kind).unwrap();
        let old = give(&rig.machine, SIZE);
        let pin = gdr.pin(BASE, SIZE).unwrap();
        let new = give(&rig.machine, SIZE);
        let mapping = match pin.map() {
            Err(Error::Invalidated) if kind != BackendKind::Gdrdrv => continue,
            mapped => mapped.unwrap(),
        };
        assert!(!is_copied_by_engine(&rig.machine, &mapping), "{kind}");
        let data = pattern(5, 1000);
        write_by(Way::CopyEngine, &mapping, 7, &data).unwrap();
        assert!(old.read(7, 1000).unwrap() == data && new.read(7, 1000).unwrap() == [0; 1000]);
    }
}

#[test]
fn memory_that_changes_on_the_way_to_the_module_is_refused() {
    let rig = Rig::new(Module::default());
    let make_anew = |machine: &Machine| drop(give(machine, SIZE));
    let late = Interrupted::new(rig.device.clone(), &rig.machine, None, make_anew);
    let kernel = SimulatedKernel::new(rig.machine.clone())
        .with_device("/dev/gdrdrv", late.clone())
        .with_text("/proc/devices", DEVICES);
    let system = System::new(Arc::new(kernel), Some(rig.cuda.clone()));
    let gdrdrv = open_gdrdrv(&system).unwrap();
    give(&rig.machine, SIZE);
    late.arm();
    assert!(matches!(gdrdrv.pin_with(BASE, SIZE, NONE), Err(Error::Invalidated)));
    assert_eq!(rig.device.live_pins(), 0);
    assert!(gdrdrv.pin_with(BASE, SIZE, NONE).is_ok());
}

#[test]
fn freed_memory_is_flushed_by_the_cpu_alone() {
    let rig = Rig::new(Module::default());
    let gdr = open_gdrdrv(&rig.system).unwrap();
    give(&rig.machine, SIZE);
    let mapping = gdr.pin(BASE, SIZE).unwrap().map().unwrap();
    rig.machine.fail("cuFlushGPUDirectRDMAWrites", 719);
    // The GPU needs no flush.
    mapping.flush().unwrap();
    rig.machine.cuda.lock().attributes.insert(ORDERING, 0);
    assert!(matches!(mapping.flush(), Err(Error::Cuda { call: "cuFlushGPUDirectRDMAWrites", .. })));
    rig.machine.memory.lock().free(BASE).unwrap();
    mapping.flush().unwrap();
}

#[test]
fn a_mapping_ends_where_the_memory_ends() {
    /// As of a `cuMemAlloc` of 5,000,000 bytes on an H200.
    const BYTES: usize = 5_001_216;
    let rig = Rig::new(Module::default());
    let gdr = open_rm(&rig.system).unwrap();
    let object = give(&rig.machine, BYTES);
    let rounded = BYTES.next_multiple_of(PAGE);
    for (skip, len) in
        [(0, rounded), (100, rounded - 100), (BYTES - 1, 5000), (BYTES - 8, 8), (0, rounded + PAGE)]
    {
        let pin = gdr.pin_with(BASE + skip as u64, len, PinFlags::WHOLE_PAGES).unwrap();
        let mapping = pin.map().unwrap();
        assert_eq!((mapping.addr(), mapping.len()), (BASE + skip as u64, BYTES - skip));
        let last = mapping.len() - 1;
        mapping.write(last, b"!").unwrap();
        assert_eq!(object.read(BYTES - 1, 1).unwrap(), b"!");
        object.write(BYTES - 1, &[0]).unwrap();
        let size = mapping.len();
        assert!(matches!(mapping.write(last, b"!!"), Err(Error::OutOfBounds { size: s, .. }) if s == size));
        assert!(mapping.read(size, &mut [0]).is_err() && mapping.load::<u8>(size).is_err());
        drop(mapping);
        // C programs may ask for all of it.
        let pinned = pin.info().mapped_size;
        assert_eq!(pin.map_pages(pinned, None).unwrap().len(), pinned);
    }
}
