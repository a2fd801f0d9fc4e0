//! What `Gpu::wrap` makes of addresses.

use gdsync::Error;
use gdsync::memory::Memory;

use super::kinds::{Kind, alone, get, gpu, is_simulated, memory, put};

#[test]
fn every_kind_is_told_apart() {
    let _alone = alone();
    let Some(gpu) = gpu(0) else { return };
    for kind in Kind::ALL {
        let Some(memory) = memory(&gpu, kind, 10_000) else { continue };
        let on_gpu = !matches!(kind, Kind::Plain | Kind::Pinned | Kind::Registered);
        assert_eq!(memory.gpu().is_some(), on_gpu, "{kind:?}");
        assert_eq!(memory.len(), 10_000);
        memory.gpu_addr(&gpu).unwrap();
        put(&gpu, &memory, 5, b"wrapped");
        if memory.is_mapped() {
            assert_eq!(&memory.to_vec()[5..12], b"wrapped", "{kind:?}");
            memory.write(6, b"R").unwrap();
            memory.word32(8).unwrap();
            assert_eq!(get(&gpu, &memory, 5, 7), b"wRapped");
        } else {
            let error = memory.write(6, b"R").unwrap_err();
            assert!(matches!(error, Error::NotMapped { .. }), "{error}");
            assert!(memory.word32(8).is_err() && memory.atomic64(8).is_err() && memory.to_vec().is_empty());
            assert!(memory.slice(0, 10_001).is_err());
            assert_eq!(memory.slice(100, 50).unwrap().addr(), memory.addr() + 100);
        }
        match kind {
            Kind::Pool if is_simulated() => {}
            Kind::Unmapped | Kind::Pool => assert!(!memory.is_mapped() || kind == Kind::Pool),
            _ => assert!(memory.is_mapped(), "{kind:?}"),
        }
    }
}

#[test]
fn what_is_no_memory_of_the_gpu_is_refused() {
    let _alone = alone();
    let Some(first) = gpu(0) else { return };
    let plain = Memory::alloc(4096).unwrap();
    // SAFETY: nothing comes of it.
    let unknown = unsafe { first.wrap(plain.addr(), 4096) }.unwrap_err();
    assert!(unknown.to_string().contains("from_raw"), "{unknown}");
    for kind in [Kind::Malloc, Kind::Pinned, Kind::Registered] {
        let memory = memory(&first, kind, 4096).unwrap();
        // SAFETY: as above.
        let outside = unsafe { first.wrap(memory.addr() + 1, 64 << 20) }.unwrap_err();
        assert!(outside.to_string().contains("inside one allocation"), "{outside}");
        // SAFETY: as above.
        assert!(unsafe { first.wrap(memory.addr(), 0) }.is_err());
    }
    if let Some(second) = gpu(1) {
        let memory = memory(&first, Kind::Malloc, 4096).unwrap();
        // SAFETY: as above.
        let other = unsafe { second.wrap(memory.addr(), 4096) }.unwrap_err();
        assert!(other.to_string().contains("GPU 0 for GPU 1"), "{other}");
    }
    let mut managed = 0;
    let current = first.enter().unwrap();
    // SAFETY: a place for the answer. `CU_MEM_ATTACH_GLOBAL`.
    match unsafe { first.api().mem_alloc_managed(&mut managed, 4096, 1) } {
        Ok(()) => {
            // SAFETY: as above.
            let error = unsafe { first.wrap(managed, 4096) }.unwrap_err();
            assert!(error.to_string().contains("managed memory"), "{error}");
        }
        Err(error) => eprintln!("skipped: no managed memory: {error}"),
    }
    drop(current);
}
