//! What mappings show.

use super::*;
use gdrcopy::{Attribute, BackendKind, MappingType};

#[test]
fn an_open_backend_holds_one_device_and_gives_everything_back() {
    let bench = Bench::new(2);
    let rm = bench.open();
    assert_eq!(rm.kind(), BackendKind::Rm);
    assert_eq!(bench.driver.live(), AT_REST);
    let scratch = bench.machine.memory.lock().allocations();
    assert!((1..=4).contains(&scratch), "{scratch} pieces of scratch memory are kept");
    let attributes =
        [Attribute::UsePersistentMapping, Attribute::SupportPinFlagForcePcie, Attribute::UsingDmaBufMmap];
    assert_eq!(attributes.map(|attribute| rm.attribute(attribute).unwrap()), [1, 1, 0]);
    drop(rm);
    bench.check_clean();
}

#[test]
fn parts_of_malloc_memory_are_shown_in_both_directions() {
    let bench = Bench::new(1);
    let rm = bench.open();
    for size in [1, 256, 700, 64 << 10, (64 << 10) + 512, 1 << 20, 3 << 20, (4 << 20) + 4096] {
        let base = bench.alloc(0, size, MemoryKind::Malloc);
        for (skip, len) in
            [(0, size), (size / 3, size - size / 3), (size - 1, 1), (size / 2, (size / 3).max(1))]
        {
            let addr = base + skip as u64;
            let (pin, range) = map(&rm, addr, len).unwrap();
            let end = pin.va() + pin.pinned_len() as u64;
            assert!(pin.va().is_multiple_of(PAGE) && end.is_multiple_of(PAGE));
            assert!(pin.va() <= addr && addr + len as u64 <= end);
            assert!(addr - pin.va() < PAGE && end - (addr + len as u64) < PAGE);
            assert_eq!((range.kind(), range.len()), (MappingType::WriteCombining, pin.pinned_len()));
            check_bytes(&pin, &range, addr, len);

            let first = usize::try_from(addr - pin.va()).unwrap();
            for at in [0, len / 2, len - 1] {
                store(&range, first + at, !pattern(addr + at as u64));
                assert_eq!(bench.read(0, addr + at as u64, 1), [!pattern(addr + at as u64)]);
            }
            range.unmap().unwrap();
            assert_eq!(bench.driver.live(), Live { objects: 2, ..AT_REST });
            pin.unpin().unwrap();
            assert_eq!(bench.driver.live(), AT_REST);
            bench.fill(0, base, size);
        }
    }
    drop(rm);
    bench.check_clean();
}

#[test]
fn a_revoked_range_gives_its_bar1_space_back() {
    let bench = Bench::new(1);
    let rm = bench.open();
    let sizes = [2 << 20, 4 << 20];
    let base = bench.vmm(0, &sizes);
    let (pin, range) = map(&rm, base, sizes.iter().sum()).unwrap();
    assert_eq!(bench.driver.live().mappings, 2);
    range.revoke().unwrap();
    assert_eq!(bench.driver.live(), Live { objects: AT_REST.objects + 2, ..AT_REST });
    pin.unpin().unwrap();
    drop(rm);
    bench.check_clean();
}

#[test]
fn vmm_ranges_over_several_objects_are_one_range() {
    let bench = Bench::new(1);
    let rm = bench.open();
    let (a, b, c) = (2 << 20, 4 << 20, 1 << 20);
    let base = bench.vmm(0, &[a, b, c]);
    for (skip, len, objects) in [
        (0, a + b + c, 3),
        (0, a, 1),
        (a, b, 1),
        (a - 1, 2, 2),
        (a - 70_000, b + 140_000, 3),
        (a + b, c, 1),
        (5, 1, 1),
    ] {
        let addr = base + skip as u64;
        let (pin, range) = map(&rm, addr, len).unwrap();
        assert_eq!(bench.driver.live().mappings, objects);
        check_bytes(&pin, &range, addr, len);
        let last = usize::try_from(addr - pin.va()).unwrap() + len - 1;
        store(&range, last, 7);
        assert_eq!(bench.read(0, addr + len as u64 - 1, 1), [7]);
        drop((range, pin));
        assert_eq!(bench.driver.live(), AT_REST);
        bench.fill(0, addr, len);
    }
    drop(rm);
    bench.check_clean();
}

#[test]
fn a_part_of_a_pin_may_be_mapped_again_and_again() {
    let bench = Bench::new(1);
    let rm = bench.open();
    let page = usize::try_from(PAGE).unwrap();
    let base = bench.vmm(0, &[2 * page, 4 * page]);
    let pin = pin(&rm, base, 6 * page).unwrap();
    for (len, objects) in [(1, 1), (2 * page, 1), (2 * page + 1, 2)] {
        let range = pin.map(len, Some(MappingType::WriteCombining)).unwrap();
        assert_eq!(range.len(), len);
        assert_eq!(bench.driver.live().mappings, objects);
        check_bytes(&pin, &range, base, len);
    }
    for len in [0, 6 * page + 1, usize::MAX] {
        assert!(matches!(pin.map(len, None), Err(Error::InvalidArgument { .. })), "{len}");
    }
    for kind in [MappingType::Cached, MappingType::Device] {
        assert!(matches!(pin.map(page, Some(kind)), Err(Error::Unsupported { .. })));
    }
    drop((pin, rm));
    bench.check_clean();
}

#[test]
fn a_mapping_survives_the_freeing_of_its_memory() {
    let bench = Bench::new(1);
    let rm = bench.open();
    let base = bench.alloc(0, 3 << 20, MemoryKind::Malloc);
    let (pin, range) = map(&rm, base, 3 << 20).unwrap();
    bench.machine.memory.lock().free(base).unwrap();
    let other = bench.alloc(0, 3 << 20, MemoryKind::Malloc);
    check_bytes(&pin, &range, base, 3 << 20);
    store(&range, 0, !pattern(base));
    assert_eq!(bench.read(0, other, 1), [pattern(other)], "new memory is not touched");
    assert!(!pin.invalidated().unwrap());
    // Without CUDA's view there is nothing to compare with.
    drop(range);
    assert!(matches!(pin.map(4096, None), Err(Error::Invalidated)));
    // The address has other memory now: not this pin's.
    let object = Object::new(0, 4 << 20).unwrap();
    bench.machine.memory.lock().insert(base, 4 << 20, object, 0, MemoryKind::Malloc);
    assert!(matches!(pin.map(4096, None), Err(Error::Invalidated)));
    drop((pin, rm));
    bench.check_clean();
}

#[test]
fn each_gpu_is_found_by_its_address() {
    let bench = Bench::new(3);
    let rm = bench.open();
    for gpu in [2, 0, 1] {
        for kind in [MemoryKind::Malloc, MemoryKind::Vmm] {
            let addr = bench.alloc(gpu, 3 << 16, kind);
            let (pin, range) = map(&rm, addr + 5, 100_000).unwrap();
            check_bytes(&pin, &range, addr + 5, 100_000);
        }
    }
    assert_eq!(bench.driver.live(), Live { files: 4, clients: 1, objects: 3, mappings: 0 });
    drop(rm);
    bench.check_clean();
}

#[test]
fn memory_that_changes_during_the_comparison_is_looked_at_again() {
    let bench = Bench::new(1);
    let rm = bench.open();
    let base = bench.alloc(0, 4096, MemoryKind::Malloc);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut byte = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                byte ^= 1;
                // SAFETY: one byte.
                unsafe { bench.cuda.copy_to_device(0, base, &raw const byte, 1) }.unwrap();
            }
        });
        for _ in 0..200 {
            // Memory in motion may be refused as such, never as wrong.
            match map(&rm, base, 4096) {
                Ok(_) => {}
                Err(Error::ProofFailed { found, .. }) => assert!(found.contains("changed"), "{found}"),
                Err(other) => panic!("{other}"),
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    drop(rm);
    bench.check_clean();
}

#[test]
fn threads_pin_map_and_unmap_at_once() {
    let bench = Bench::new(2);
    let rm = bench.open();
    let own: Vec<(i32, u64, usize)> = (0..8)
        .map(|thread| {
            let kind = if thread % 2 == 0 { MemoryKind::Malloc } else { MemoryKind::Vmm };
            let (gpu, len) = (thread / 2 % 2, 2 << 20);
            (gpu, bench.alloc(gpu, len, kind), len)
        })
        .collect();
    let barrier = std::sync::Barrier::new(own.len());
    std::thread::scope(|scope| {
        for &(gpu, base, len) in &own {
            let (rm, bench, barrier) = (&rm, &bench, &barrier);
            scope.spawn(move || {
                barrier.wait();
                for round in 0..40 {
                    let skip = round * 5000;
                    let addr = base + skip as u64;
                    let (pin, range) = map(rm, addr, 9000).unwrap();
                    check_bytes(&pin, &range, addr, 9000);
                    let first = usize::try_from(addr - pin.va()).unwrap();
                    store(&range, first, 1);
                    assert_eq!(bench.read(gpu, addr, 1), [1]);
                    bench.fill(gpu, addr, 1);
                    assert!(skip + 9000 < len);
                }
            });
        }
    });
    drop(rm);
    bench.check_clean();
}

#[test]
fn a_forked_child_frees_nothing_of_its_parent() {
    let bench = Bench::new(1);
    let rm = bench.open();
    let base = bench.alloc(0, 1 << 20, MemoryKind::Malloc);
    let (pin, range) = map(&rm, base, 1 << 20).unwrap();
    let before = bench.driver.live();
    let (pin, range, rm) = (Box::new(pin), Box::new(range), Box::new(rm));
    // SAFETY: the child only drops, counts and leaves; it takes no lock that another thread can hold.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // The driver's tables were copied with the process, so a call of the child would show in them.
        let held = |live: Live| (live.clients, live.objects, live.mappings);
        let refused = pin.map(4096, None).is_err() && super::pin(&rm, base, 1).is_err();
        drop((range, pin));
        let untouched = held(bench.driver.live()) == held(before) && bench.driver.violations().is_empty();
        drop(rm);
        let left = bench.driver.violations();
        let only_closed = matches!(&left[..], [only] if only.contains("closing of its file"));
        // SAFETY: leaves without running anything else.
        unsafe { libc::_exit(i32::from(!(refused && untouched && only_closed))) };
    }
    let mut status = 0;
    // SAFETY: a child of this process and a place for its status.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    check_bytes(&pin, &range, base, 1 << 20);
    drop((range, pin, rm));
    bench.check_clean();
}
