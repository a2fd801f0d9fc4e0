//! Ranges in whole GPU pages, as communication libraries round them.

use std::ops::Range;
use std::sync::Arc;

use gdrcopy::cuda::{AllocKind, MemoryKind};
use gdrcopy::planner::{Way, write_by};
use gdrcopy::{Error, Gdr, PinFlags};
use gdsync_testkit::{Module, Object};

use crate::located::is_copied_by_engine;
use crate::rig::{GPU_PAGE, Rig, open_dmabuf, open_gdrdrv, open_rm, pattern, peek, poke};

const WHOLE_PAGES: PinFlags = PinFlags::WHOLE_PAGES;
/// A block of memory that allocations share, at addresses where no other simulated allocation lies.
const BLOCK: u64 = 0x7e00_0000_0000;
const SIZE: usize = 2 << 20;

/// The address of a GPU page.
const fn page(number: u64) -> u64 {
    BLOCK + number * GPU_PAGE
}

/// The allocations: address and length.
const NEIGHBOUR: (u64, usize) = (page(3) - 512, 512 + 700);
const SMALL: (u64, usize) = (page(3) + 0x8000, 256);
const LONELY: (u64, usize) = (page(10) + 0x7100, 256);
const PAGES: (u64, usize) = (page(20), 2 << 16);
const LAST: (u64, usize) = (page(31) + 0x3000, 1000);

/// Ranges that leave their allocations but not the block, with the address of the user's memory.
const ROUNDED: [(Range<u64>, u64); 7] = [
    // From a neighbour's memory, around one's own, to nobody's.
    (page(3)..page(4), SMALL.0),
    (page(3)..SMALL.0 + 256, SMALL.0),
    (SMALL.0..page(4), SMALL.0),
    // Nothing on either side.
    (page(10)..page(11), LONELY.0),
    // Whole pages already, and one more.
    (page(20)..page(23), PAGES.0),
    (page(31)..page(32), LAST.0),
    // The whole block but its first pages.
    (page(3)..page(32), SMALL.0),
];

fn len(range: &Range<u64>) -> usize {
    usize::try_from(range.end - range.start).unwrap()
}

fn in_block(addr: u64) -> usize {
    len(&(BLOCK..addr))
}

/// A machine with the block, whose bytes are `pattern(1, SIZE)`.
fn block() -> (Rig, Arc<Object>) {
    let rig = Rig::new(Module::default());
    let object = Object::new(0, SIZE).unwrap();
    object.write(0, &pattern(1, SIZE)).unwrap();
    let mut memory = rig.machine.memory.lock();
    for (addr, len) in [NEIGHBOUR, SMALL, LONELY, PAGES, LAST] {
        memory.insert(addr, len, object.clone(), in_block(addr), MemoryKind::Malloc);
    }
    drop(memory);
    (rig, object)
}

/// The backends that pin in GPU pages.
fn each(mut test: impl FnMut(&Rig, &Object, Gdr)) {
    let (rig, object) = block();
    test(&rig, &object, open_gdrdrv(&rig.system).unwrap());
    let (rig, object) = block();
    test(&rig, &object, open_rm(&rig.system).unwrap());
}

#[test]
fn a_range_may_be_rounded_to_pages() {
    each(|_, object, backend| {
        let model = pattern(1, SIZE);
        for (range, user) in ROUNDED {
            let pin = backend.pin_with(range.start, len(&range), WHOLE_PAGES).unwrap();
            assert_eq!(pin.info().va, range.start - range.start % GPU_PAGE);
            let mapped = pin.map_pages(pin.info().mapped_size, None).unwrap();
            let whole = &model[in_block(pin.info().va)..][..pin.info().mapped_size];
            assert!(peek(&mapped, 0, whole.len()) == whole, "{}: {range:x?}", backend.backend());

            let (skip, old) = (len(&(pin.info().va..user)), &model[in_block(user)..][..2]);
            poke(&mapped, skip, b"me");
            let seen = object.read(in_block(user), 2).unwrap();
            assert_eq!(seen, b"me", "{}: {range:x?}", backend.backend());
            object.write(in_block(user), old).unwrap();
            assert_eq!(peek(&mapped, skip, 2), old);
        }
    });
}

#[test]
fn without_the_flag_each_is_refused() {
    each(|rig, _, backend| {
        for (range, _) in ROUNDED {
            match backend.pin_with(range.start, len(&range), PinFlags::empty()) {
                Err(Error::BeyondAllocation { .. }) => {
                    assert!(rig.machine.memory.lock().find(range.start).is_some());
                }
                Err(Error::NotMappable { .. }) => {
                    assert!(rig.machine.memory.lock().find(range.start).is_none());
                }
                other => panic!("{}: {range:x?}: {other:?}", backend.backend()),
            }
        }
        assert_eq!(rig.device.live_pins(), 0);
    });
}

#[test]
fn a_range_that_leaves_the_block_is_refused() {
    each(|rig, _, backend| {
        let pin = |range: Range<u64>| backend.pin_with(range.start, len(&range), WHOLE_PAGES).map(drop);
        let (base, size) = LAST;
        for range in [page(31)..page(34), LAST.0..page(33) + 1, page(31)..page(1000)] {
            match pin(range.clone()) {
                Err(Error::BeyondAllocation { addr, len: told, base: b, size: s }) => {
                    assert_eq!((addr, told, b, s), (range.start, len(&range), base, size));
                }
                other => panic!("{}: {range:x?}: {other:?}", backend.backend()),
            }
        }
        // Nothing is in the first page; what comes later does not count.
        for range in [page(0) - GPU_PAGE..page(4), page(9)..page(11), page(12)..page(13), 8..16] {
            assert!(matches!(pin(range.clone()), Err(Error::NotMappable { .. })), "{range:x?}");
        }
        for len in [usize::MAX, usize::try_from(u64::MAX - SMALL.0).unwrap()] {
            let pinned = backend.pin_with(SMALL.0, len, WHOLE_PAGES);
            let refused = matches!(
                pinned,
                Err(Error::BeyondAllocation { .. } | Error::InvalidArgument { .. } | Error::Exhausted { .. })
            );
            assert!(refused, "{}: {len}: {pinned:?}", backend.backend());
        }
        // Memory that is no GPU's has no pages of one around it.
        let host = rig.memory(0, 512, MemoryKind::Host);
        assert!(matches!(pin(host..host + GPU_PAGE), Err(Error::NotMappable { .. })));
        assert_eq!(rig.device.live_pins(), 0);
    });
}

#[test]
fn vmm_memory_has_nothing_around_it() {
    let (rig, _) = block();
    let rm = open_rm(&rig.system).unwrap();
    let object = Object::new(0, SIZE).unwrap();
    let (before, base) = (page(1000), page(1001));
    rig.machine.memory.lock().insert(base, SIZE, object, 0, MemoryKind::Vmm);
    let pin = |range: Range<u64>| rm.pin_with(range.start, len(&range), WHOLE_PAGES).map(drop);
    let end = base + SIZE as u64;
    assert!(pin(base..end).is_ok());
    assert!(matches!(pin(before..end), Err(Error::NotMappable { .. })));
    assert!(matches!(pin(base - 1..end), Err(Error::NotMappable { .. })));
    assert!(matches!(pin(base..end + 1), Err(Error::BeyondAllocation { .. })));
}

#[test]
fn the_copy_engine_is_not_used_outside_the_allocation() {
    let (rig, object) = block();
    let gdr = open_rm(&rig.system).unwrap();
    let bytes = pattern(2, len(&(page(3)..page(4))));
    let pin = gdr.pin_with(page(3), bytes.len(), WHOLE_PAGES).unwrap();
    let mapping = pin.map().unwrap();
    assert!(!is_copied_by_engine(&rig.machine, &mapping));
    write_by(Way::CopyEngine, &mapping, 0, &bytes).unwrap();
    assert!(object.read(in_block(page(3)), bytes.len()).unwrap() == bytes);
    // The GPU is known all the same.
    mapping.flush().unwrap();
    rig.machine.cuda.lock().attributes.insert(118, 0);
    rig.machine.fail("cuFlushGPUDirectRDMAWrites", 719);
    assert!(matches!(mapping.flush(), Err(Error::Cuda { .. })));
    // What is in one allocation is copied as ever.
    let pin = gdr.pin_with(SMALL.0, SMALL.1, WHOLE_PAGES).unwrap();
    assert!(is_copied_by_engine(&rig.machine, &pin.map().unwrap()));
}

#[test]
fn memory_without_bounds_is_refused_where_they_are_needed() {
    let (rig, _) = block();
    let rm = open_rm(&rig.system).unwrap();
    let dmabuf = open_dmabuf(&rig.system).unwrap();
    let gdrdrv = open_gdrdrv(&rig.system).unwrap();
    let vmm = rig.cuda.alloc(0, SIZE, AllocKind::Vmm).unwrap();
    // The ways are proved before.
    assert!(rm.pin_with(vmm, 5000, WHOLE_PAGES).is_ok());
    rig.machine.fail("no bounds", 1);
    for flags in [PinFlags::empty(), WHOLE_PAGES] {
        for backend in [&rm, &dmabuf] {
            match backend.pin_with(vmm, 5000, flags) {
                Err(Error::NotMappable { found, .. }) => assert!(found.contains("bounds"), "{found}"),
                other => panic!("{}: {other:?}", backend.backend()),
            }
        }
        assert!(gdrdrv.pin_with(vmm, 5000, flags).is_ok());
    }
}
