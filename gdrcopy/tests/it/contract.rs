//! What every backend must do: ranges, frees, forked children, and revoked mappings.

use std::ptr::NonNull;

use gdrcopy::{Attribute, BackendKind, Error, Gdr, MappingType, Pin, PinFlags, PinInfo, Result, host_page};

use rustix::process::{Resource, Rlimit, setrlimit};

use crate::rig::{End, Rig, address, each, in_child, open, pattern, peek, poke};

const NONE: PinFlags = PinFlags::empty();

/// Reads and writes ranges from both sides, and lets `look` see each pin.
pub(crate) fn check_ranges(backend: &Gdr, look: impl Fn(&Pin)) {
    const SIZE: usize = 300_000;
    let ranges = [
        (0, 1),
        (1, 7),
        (0, SIZE),
        (4095, 2),
        (65_535, 70_000),
        (123_457, 1),
        (65_536, 65_536),
        (SIZE - 5, 5),
    ];
    // The memory begins inside a block that allocations share.
    let _neighbour = backend.alloc(0, 700).unwrap();
    let memory = backend.alloc(0, SIZE).unwrap();
    let mut model = pattern(1, SIZE);
    memory.copy_in(0, &model).unwrap();
    for (seed, (offset, len)) in (2..).zip(ranges) {
        let addr = memory.addr() + offset as u64;
        let pin = backend.pin_with(addr, len, NONE).unwrap();
        look(&pin);
        let PinInfo { va, mapped_size, page_size, .. } = pin.info();
        assert!(va <= addr && va.is_multiple_of(u64::from(page_size)));
        assert!(mapped_size.is_multiple_of(page_size as usize));
        let skip = usize::try_from(addr - va).unwrap();
        assert!(skip < page_size as usize && skip + len <= mapped_size);

        let range = pin.map_pages(skip + len, None).unwrap();
        assert_eq!(range.len(), skip + len);
        assert_eq!(peek(&range, skip, len), model[offset..][..len], "{} {offset}", backend.backend());

        let news = pattern(seed, len);
        poke(&range, skip, &news);
        model[offset..][..len].copy_from_slice(&news);
        let mut whole = vec![0; SIZE];
        memory.copy_out(0, &mut whole).unwrap();
        assert!(whole == model, "{}: {len} bytes at {offset} went elsewhere", backend.backend());

        let news = pattern(seed + 100, len);
        memory.copy_in(offset, &news).unwrap();
        model[offset..][..len].copy_from_slice(&news);
        assert_eq!(peek(&range, skip, len), news);
        drop(range);
        pin.unpin().unwrap();
    }
}

#[test]
fn every_range_is_read_and_written_where_it_lies() {
    each(|_, backend| check_ranges(&backend, |_| {}));
}

#[test]
fn freed_memory_stays_under_its_mapping() {
    each(|_, backend| {
        let size = 3 << 20;
        let memory = backend.alloc(0, size).unwrap();
        let (old, new) = (pattern(1, size), pattern(2, size));
        memory.copy_in(0, &old).unwrap();
        let pin = backend.pin_with(memory.addr(), size, NONE).unwrap();
        let range = pin.map_pages(size, None).unwrap();
        drop(memory);

        let another = backend.alloc(0, size).unwrap();
        another.copy_in(0, &new).unwrap();
        assert!(peek(&range, 0, size) == old, "{}", backend.backend());
        poke(&range, size - 3, b"end");
        let mut seen = vec![0; size];
        another.copy_out(0, &mut seen).unwrap();
        assert!(seen == new, "{}", backend.backend());
        assert!(!pin.invalidated().unwrap());

        drop(range);
        pin.unpin().unwrap();
    });
}

#[test]
fn a_pin_of_freed_memory_maps_the_old_memory_or_nothing() {
    each(|_, backend| {
        let memory = backend.alloc(0, 3 << 20).unwrap();
        memory.copy_in(7, b"old").unwrap();
        let addr = memory.addr();
        let pin = backend.pin_with(addr, 4096, NONE).unwrap();
        drop(memory);
        match (backend.backend(), pin.map_pages(4096, None)) {
            // What cannot be compared with CUDA's view is not returned.
            (BackendKind::DmaBuf | BackendKind::Rm, Err(Error::Invalidated)) => {}
            (BackendKind::DmaBuf | BackendKind::Rm, other) => panic!("{other:?}"),
            (_, range) => assert_eq!(peek(&range.unwrap(), 7, 3), b"old"),
        }
        assert!(matches!(backend.pin_with(addr, 1, NONE), Err(Error::NotMappable { .. })));
    });
}

#[test]
fn a_pin_is_mapped_again_and_memory_is_pinned_twice() {
    each(|_, backend| {
        let memory = backend.alloc(0, 200_000).unwrap();
        let first = backend.pin_with(memory.addr(), 200_000, NONE).unwrap();
        let second = backend.pin_with(memory.addr() + 65_536, 100_000, NONE).unwrap();
        for round in 0..3 {
            let word = pattern(round, 16);
            let (a, b) = (first.map_pages(200_000, None).unwrap(), second.map_pages(100_000, None).unwrap());
            assert_ne!(a.as_ptr(), b.as_ptr());
            poke(&a, 65_536 + 5000, &word);
            assert_eq!(peek(&b, 5000, 16), word, "{}", backend.backend());
        }
        // A part, from the start on.
        assert_eq!(first.map_pages(1, None).unwrap().len(), 1);
        first.unpin().unwrap();
        assert!(second.map_pages(100_000, None).is_ok());
        drop(second);
    });
}

#[test]
fn ranges_that_are_not_one_allocation_are_refused() {
    each(|_, backend| {
        let memory = backend.alloc(0, 4 << 20).unwrap();
        let (addr, size) = (memory.addr(), memory.len());
        let pin = |addr, len| backend.pin_with(addr, len, NONE).map(drop);
        assert!(pin(addr, size).is_ok());
        // CUDA's allocation is a bit longer than asked for, to be aligned.
        assert!(matches!(pin(addr, size + 65_536), Err(Error::BeyondAllocation { .. })));
        assert!(matches!(
            pin(addr, usize::MAX),
            Err(Error::BeyondAllocation { .. } | Error::InvalidArgument { .. })
        ));
        assert!(matches!(pin(addr, 0), Err(Error::InvalidArgument { .. })));
        assert!(matches!(pin(64, 64), Err(Error::NotMappable { .. })));
        assert!(matches!(
            pin(u64::MAX - 5, 64),
            Err(Error::NotMappable { .. } | Error::InvalidArgument { .. })
        ));
        let local = 5;
        assert!(matches!(pin((&raw const local).addr() as u64, 4), Err(Error::NotMappable { .. })));
    });
}

#[test]
fn a_mapping_ends_with_its_pin() {
    each(|_, backend| {
        let memory = backend.alloc(0, 65_536).unwrap();
        let pin = backend.pin_with(memory.addr(), 65_536, NONE).unwrap();
        let beyond = pin.info().mapped_size + 1;
        for len in [0, beyond, usize::MAX] {
            assert!(matches!(pin.map_pages(len, None), Err(Error::InvalidArgument { .. })));
        }
        assert!(pin.map_pages(beyond - 1, None).is_ok());
    });
}

#[test]
fn a_type_that_is_not_there_is_refused_and_the_pin_goes_on() {
    each(|_, backend| {
        let memory = backend.alloc(0, 65_536).unwrap();
        let pin = backend.pin_with(memory.addr(), 65_536, NONE).unwrap();
        let native = pin.map_pages(1, None).unwrap().kind();
        let expected = match backend.backend() {
            BackendKind::Host => MappingType::Cached,
            _ => MappingType::WriteCombining,
        };
        assert_eq!(native, expected);
        for kind in [MappingType::WriteCombining, MappingType::Cached, MappingType::Device] {
            match pin.map_pages(1, Some(kind)) {
                Ok(range) => assert_eq!((kind, range.kind()), (native, native)),
                Err(Error::Unsupported { .. }) => assert_ne!(kind, native),
                Err(other) => panic!("{}: {other}", backend.backend()),
            }
        }
        assert_eq!(pin.map_pages(1, None).unwrap().kind(), native);
    });
}

#[test]
fn accesses_stay_inside_an_allocation() {
    each(|_, backend| {
        let memory = backend.alloc(0, 100).unwrap();
        assert_eq!(memory.len(), 100);
        let mut out = [0; 8];
        assert!(memory.copy_in(92, &out).is_ok() && memory.copy_out(92, &mut out).is_ok());
        assert!(matches!(memory.copy_in(93, &out), Err(Error::OutOfBounds { .. })));
        assert!(matches!(memory.copy_out(usize::MAX, &mut out), Err(Error::OutOfBounds { .. })));
        assert!(matches!(backend.alloc(0, 0), Err(Error::InvalidArgument { .. })));
        assert!(backend.alloc(7, 100).is_err());
        assert!(backend.alloc(-1, 100).is_err());
        // More than there is.
        if backend.backend() != BackendKind::Host {
            assert!(matches!(backend.alloc(0, 1 << 40), Err(Error::Exhausted { .. })));
        }
        assert!(backend.alloc(0, usize::MAX).is_err());
    });
}

#[test]
fn attributes_are_those_of_gdrcopy() {
    each(|_, backend| {
        let get = |attribute| backend.attribute(attribute).unwrap();
        let told = [
            get(Attribute::UsePersistentMapping),
            get(Attribute::SupportPinFlagForcePcie),
            get(Attribute::UsingDmaBufMmap),
        ];
        let (expected, version) = match backend.backend() {
            BackendKind::Gdrdrv => ([1, 1, 0], Some((2, 6))),
            BackendKind::DmaBuf => ([1, 1, 1], None),
            BackendKind::Rm => ([1, 1, 0], None),
            _ => ([1, 0, 0], None),
        };
        assert_eq!(told, expected);
        assert_eq!(backend.driver_version(), version);
        let memory = backend.alloc(0, 64).unwrap();
        let forced = backend.pin_with(memory.addr(), 64, PinFlags::FORCE_PCIE);
        assert_eq!(forced.is_ok(), told[1] == 1, "{forced:?}");
    });
}

fn is_foreign<T>(result: Result<T>) -> bool {
    matches!(result, Err(Error::OtherProcess { .. }))
}

#[test]
fn a_child_can_do_nothing_with_its_parents_values() {
    each(|_, backend| {
        let memory = backend.alloc(0, 65_536).unwrap();
        let pin = std::cell::Cell::new(Some(backend.pin_with(memory.addr(), 65_536, NONE).unwrap()));
        let end = in_child(|| {
            let Some(pin) = pin.take() else { return false };
            is_foreign(backend.pin_with(memory.addr(), 1, NONE))
                && is_foreign(backend.alloc(0, 1))
                && is_foreign(memory.copy_in(0, b"x"))
                && is_foreign(memory.copy_out(0, &mut [0]))
                && is_foreign(pin.map_pages(1, None))
                && is_foreign(pin.unpin())
        });
        assert_eq!(end, End::Said(true), "{}", backend.backend());
        let pin = pin.take().unwrap();
        let range = pin.map_pages(65_536, None).unwrap();
        // Where the parent has a mapping the child has a hole.
        assert_eq!(
            in_child(|| peek(&range, 0, 1) == [0]),
            End::Killed(libc::SIGSEGV),
            "{}",
            backend.backend()
        );
        assert_eq!(peek(&range, 0, 1), [0]);
    });
}

#[test]
fn a_childs_drops_leave_the_parents_values_alone() {
    each(|rig, backend| {
        let memory = backend.alloc(0, 65_536).unwrap();
        let pin = backend.pin_with(memory.addr(), 65_536, NONE).unwrap();
        let range = pin.map_pages(65_536, None).unwrap();
        let (addr, kind) = (memory.addr(), backend.backend());
        // Moved into the child's copy of the closure, which it drops; the parent's copy stays with the parent.
        let values = std::cell::Cell::new(Some((range, pin, memory, backend)));
        let end = in_child(|| {
            let before = rig.device.requests();
            drop(values.take());
            // The driver was asked for nothing, and CUDA neither.
            let there = rig.machine.memory.lock().find(addr).is_some();
            // Without the closing of the file, a client that is gone would have been freed.
            let left = rig.rm.violations();
            let freed = match kind {
                BackendKind::Rm => !matches!(&left[..], [only] if only.contains("closing of its file")),
                _ => !left.is_empty(),
            };
            rig.device.requests() == before && there != (kind == BackendKind::Host) && !freed
        });
        assert_eq!(end, End::Said(true));
        let (range, pin, memory, backend) = values.take().unwrap();
        poke(&range, 9, b"parent");
        let mut seen = [0; 6];
        memory.copy_out(9, &mut seen).unwrap();
        assert_eq!(&seen, b"parent", "{}", backend.backend());
        drop(range);
        drop(memory);
        pin.unpin().unwrap();
    });
}

const SIZE: usize = 200_000;

/// Whether something is mapped in each page of the range.
fn is_taken(ptr: NonNull<u8>, len: usize) -> bool {
    let mut resident = vec![0; len.div_ceil(host_page())];
    // SAFETY: a byte for each page; the range itself is only asked about.
    unsafe { libc::mincore(ptr.as_ptr().cast(), len, resident.as_mut_ptr()) == 0 }
}

#[test]
fn the_addresses_stay_reserved_and_the_memory_is_released() {
    each(|_, backend| {
        let memory = backend.alloc(0, SIZE).unwrap();
        let pin = backend.pin_with(memory.addr(), SIZE, NONE).unwrap();
        let range = pin.map_pages(SIZE, None).unwrap();
        let (ptr, len) = (address(&range), range.len());
        poke(&range, 5, b"kept");
        range.revoke().unwrap();
        assert!(is_taken(ptr, len), "{}", backend.backend());
        // SAFETY: what is there belongs to nobody; that the access ends the child is what is expected.
        let touch = || unsafe { ptr.as_ptr().read_volatile() == 0 };
        assert_eq!(
            in_child(touch),
            End::Killed(libc::SIGSEGV),
            "no hole in a child of {}",
            backend.backend()
        );

        // Only the mapping is gone.
        let range = pin.map_pages(SIZE, None).unwrap();
        assert_ne!(address(&range), ptr);
        assert_eq!(peek(&range, 5, 4), b"kept");
        drop(range);
        pin.unpin().unwrap();
        assert!(is_taken(ptr, len), "{}", backend.backend());
    });
}

#[test]
fn a_child_revokes_nothing_of_its_parents() {
    each(|_, backend| {
        let memory = backend.alloc(0, SIZE).unwrap();
        let pin = backend.pin_with(memory.addr(), SIZE, NONE).unwrap();
        let range = std::cell::Cell::new(Some(pin.map_pages(SIZE, None).unwrap()));
        let end = in_child(|| {
            let Some(range) = range.take() else { return false };
            let (ptr, len) = (address(&range), range.len());
            range.revoke().is_ok() && !is_taken(ptr, len)
        });
        assert_eq!(end, End::Said(true), "{}", backend.backend());
        assert_eq!(peek(&range.take().unwrap(), 0, 1), [0]);
    });
}

#[test]
fn addresses_that_cannot_be_reserved_are_unmapped() {
    let end = in_child(|| {
        // An earlier revocation may have opened the file that this one wants. The parent keeps its own.
        // SAFETY: numbers; the child drops nothing that the parent opened.
        unsafe { libc::close_range(3, u32::MAX, 0) };
        let rig = Rig::new(Default::default());
        let Ok(host) = open(&rig.without_cuda(), BackendKind::Host) else { return false };
        let Ok(memory) = host.alloc(0, SIZE) else { return false };
        let Ok(pin) = host.pin_with(memory.addr(), SIZE, NONE) else { return false };
        let Ok(range) = pin.map_pages(SIZE, None) else { return false };
        let (ptr, len) = (address(&range), range.len());
        let none = Rlimit { current: Some(0), maximum: Some(0) };
        let _ = setrlimit(Resource::Nofile, none);
        is_taken(ptr, len) && range.revoke().is_ok() && !is_taken(ptr, len)
    });
    assert_eq!(end, End::Said(true));
}
