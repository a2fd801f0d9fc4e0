//! When the driver is used, and what is not returned.

use gdrcopy::cuda::{AllocKind, CudaStatus, MemoryKind};
use gdrcopy::{BackendKind, Error, MappingType, PinFlags};
use gdsync_testkit::Module;

use crate::rig::{ENOTSUPP, Rig, open, open_dmabuf, pattern, peek, poke};

const NONE: PinFlags = PinFlags::empty();
/// The simulated kernel's faults.
const MMAP: &str = "mmap of a dma-buf";
const WRONG_PAGE: &str = "wrong page of a dma-buf";

fn unsupported(error: Error) -> String {
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    error.to_string()
}

#[test]
fn an_older_cuda_is_not_tried() {
    let rig = Rig::new(Module::default());
    rig.machine.cuda.lock().driver_version = 13020;
    // A try would fail otherwise.
    rig.machine.fail("cuMemAlloc", 2);
    let text = unsupported(open_dmabuf(&rig.system).unwrap_err());
    assert!(text.contains("CUDA 13.2") && text.contains("13.3"), "{text}");
    unsupported(open_dmabuf(&rig.without_cuda()).unwrap_err());
}

#[test]
fn a_gpu_without_dma_bufs_is_refused() {
    let rig = Rig::new(Module::default());
    rig.machine.cuda.lock().attributes.insert(124, 0);
    let text = unsupported(open_dmabuf(&rig.system).unwrap_err());
    assert!(text.contains("open kernel modules"), "{text}");
}

#[test]
fn a_driver_that_does_not_map_is_refused() {
    let rig = Rig::new(Module::default());
    for errno in [ENOTSUPP, libc::EOPNOTSUPP, libc::ENODEV] {
        rig.machine.fail(MMAP, errno);
        let text = unsupported(open_dmabuf(&rig.system).unwrap_err());
        assert!(text.contains("mmap of a dma-buf"), "{text}");
    }
    rig.machine.fail(MMAP, libc::ENOMEM);
    assert!(matches!(open_dmabuf(&rig.system), Err(Error::Exhausted { .. })));
    rig.machine.fail(MMAP, libc::EACCES);
    assert_eq!(open_dmabuf(&rig.system).unwrap_err().errno(), libc::EACCES);
    rig.machine.fail(MMAP, 0);
    rig.machine.fail("cuMemGetHandleForAddressRange", 801);
    let error = open_dmabuf(&rig.system).unwrap_err();
    assert!(matches!(error, Error::Cuda { status: CudaStatus::NOT_SUPPORTED, .. }), "{error:?}");
}

#[test]
fn another_gpu_is_tried_at_its_first_pin() {
    let rig = Rig::with_gpus(2, Module::default());
    let dmabuf = open_dmabuf(&rig.system).unwrap();
    let [first, second] = [0, 1].map(|gpu| rig.memory(gpu, 4096, MemoryKind::Malloc));
    rig.machine.fail(WRONG_PAGE, 1);
    assert!(dmabuf.pin_with(first, 4096, NONE).is_ok());
    assert!(matches!(dmabuf.pin_with(second, 4096, NONE), Err(Error::ProofFailed { .. })));
    // A way through PCIe is another way.
    assert!(matches!(dmabuf.pin_with(first, 4096, PinFlags::FORCE_PCIE), Err(Error::ProofFailed { .. })));
    rig.machine.fail(WRONG_PAGE, 0);
    assert!(dmabuf.pin_with(second, 4096, NONE).is_ok());
    // One piece of scratch memory for each GPU, given back at the end: a pin must not wait as freeing does.
    let allocations = || rig.machine.memory.lock().allocations();
    assert_eq!(allocations(), 2 + 2);
    // Once is enough.
    rig.machine.fail("cuMemAlloc", 2);
    assert!(dmabuf.pin_with(second, 4096, NONE).is_ok());
    drop(dmabuf);
    assert_eq!(allocations(), 2);
}

#[test]
fn a_coherent_link_gives_cached_mappings_except_through_pcie() {
    let rig = Rig::new(Module::default());
    rig.machine.cuda.lock().attributes.insert(100, 1);
    let dmabuf = open_dmabuf(&rig.system).unwrap();
    let memory = dmabuf.alloc(0, 4096).unwrap();
    for (flags, native) in [(NONE, MappingType::Cached), (PinFlags::FORCE_PCIE, MappingType::WriteCombining)]
    {
        let pin = dmabuf.pin_with(memory.addr(), 4096, flags).unwrap();
        assert_eq!(pin.map_pages(1, None).unwrap().kind(), native);
        assert_eq!(pin.map_pages(1, Some(native)).unwrap().kind(), native);
        assert!(matches!(pin.map_pages(1, Some(MappingType::Device)), Err(Error::Unsupported { .. })));
    }
}

#[test]
fn each_piece_of_memory_gets_its_own_dma_buf() {
    let rig = Rig::new(Module::default());
    let dmabuf = open_dmabuf(&rig.system).unwrap();
    let piece = 2 << 20;
    let first = rig.cuda.alloc(0, piece, AllocKind::Vmm).unwrap();
    let second = rig.cuda.alloc(0, piece, AllocKind::Vmm).unwrap();
    assert_eq!(second, first + piece as u64);
    // The driver, as it is simulated, refuses a range over both.
    assert!(rig.cuda.dma_buf(first, first, 2 * piece, false).is_err());

    let len = piece + 77;
    let pin = dmabuf.pin_with(first + 1001, len, NONE).unwrap();
    let range = pin.map_pages(1001 + len, None).unwrap();
    let bytes = pattern(1, len);
    poke(&range, 1001, &bytes);
    let (head, tail) = bytes.split_at(piece - 1001);
    assert!(rig.read(0, first + 1001, head.len()) == head && rig.read(0, second, tail.len()) == tail);
    // A mapping may end before the second piece begins.
    drop(range);
    assert_eq!(pin.map_pages(4096, None).unwrap().len(), 4096);
    // What follows is of another kind, and shorter than asked for.
    let third = rig.memory(0, piece, MemoryKind::Pool);
    assert_eq!(third, second + piece as u64);
    assert!(matches!(dmabuf.pin_with(second, 2 * piece + 1, NONE), Err(Error::BeyondAllocation { .. })));
    assert!(dmabuf.pin_with(second, 2 * piece, NONE).is_ok());
    rig.machine.memory.lock().free(third).unwrap();
    // Nothing follows the second.
    assert!(matches!(dmabuf.pin_with(first, 2 * piece + 1, NONE), Err(Error::NotMappable { .. })));
}

#[test]
fn small_memory_in_a_page_with_others_is_compared_by_itself() {
    let rig = Rig::new(Module::default());
    let dmabuf = open_dmabuf(&rig.system).unwrap();
    let [before, small, after] = [512, 5000, 512].map(|len| rig.memory(0, len, MemoryKind::Malloc));
    assert_eq!((small - before, after - small), (512, 5120));
    rig.machine.memory.lock().free(before).unwrap();
    let pin = dmabuf.pin_with(small, 5000, NONE).unwrap();
    assert!(pin.info().va < small && small.is_multiple_of(512));
    let skip = usize::try_from(small - pin.info().va).unwrap();
    poke(&pin.map_pages(skip + 5000, None).unwrap(), skip + 4999, b"x");
    assert_eq!(rig.read(0, small + 4999, 1), b"x");
}

#[test]
fn pages_beyond_an_allocation_depend_on_the_driver() {
    let rig = Rig::new(Module::default());
    let dmabuf = open_dmabuf(&rig.system).unwrap();
    let [start, small, last] = [5000, 256, 5000].map(|len| rig.memory(0, len, MemoryKind::Malloc));
    let (start, object) = (start & !0xfff, rig.machine.memory.lock().find(small).unwrap().object.clone());
    let bytes = pattern(1, object.size);
    object.write(0, &bytes).unwrap();
    let end = (last + 5000).next_multiple_of(4096);
    let len = usize::try_from(end - start).unwrap();
    let pin = dmabuf.pin_with(start, len, PinFlags::WHOLE_PAGES).unwrap();
    assert_eq!((pin.info().va, pin.info().mapped_size), (start, len));
    let range = pin.map_pages(len, None).unwrap();
    let first = usize::try_from(start - (small & !0x1f_ffff)).unwrap();
    assert!(peek(&range, 0, len) == bytes[first..][..len]);
    assert!(matches!(dmabuf.pin_with(start, len, NONE), Err(Error::BeyondAllocation { .. })));

    // The simulated driver gives no page without an allocation.
    let beyond = dmabuf.pin_with(start, len + 1, PinFlags::WHOLE_PAGES);
    assert!(matches!(beyond, Err(Error::BeyondAllocation { .. })), "{beyond:?}");
    // What is compared is the first allocation of the range, here the neighbour's.
    drop(range);
    rig.machine.memory.lock().free(start).unwrap();
    assert!(matches!(pin.map_pages(len, None), Err(Error::Invalidated)));
    // Now the first is the small one.
    let page = small & !0xfff;
    assert_ne!(page, small);
    let pin = dmabuf.pin_with(page, 4096, PinFlags::WHOLE_PAGES).unwrap();
    rig.machine.fail(WRONG_PAGE, 1);
    assert!(matches!(pin.map_pages(4096, None), Err(Error::ProofFailed { .. })));
    rig.machine.fail(WRONG_PAGE, 0);
    assert!(pin.map_pages(4096, None).is_ok());
}

const SIZE: usize = 2 << 20;

/// Backends without a module, and faults that make their drivers map the wrong pages.
const WRONG_PAGES: [(BackendKind, &str); 3] = [
    (BackendKind::DmaBuf, "wrong page of a dma-buf"),
    (BackendKind::Rm, "rm shift"),
    (BackendKind::Rm, "rm swap"),
];

#[test]
fn wrong_pages_are_detected_at_open() {
    for (kind, fault) in WRONG_PAGES.into_iter().chain([(BackendKind::Rm, "rm at start")]) {
        let rig = Rig::new(Module::default());
        rig.machine.fail(fault, 16);
        let error = open(&rig.system, kind).unwrap_err();
        assert!(matches!(error, Error::ProofFailed { .. }), "{fault}: {error}");
        assert_eq!(rig.machine.memory.lock().allocations(), 0);
        rig.check_clean();
    }
}

#[test]
fn wrong_pages_are_detected_at_map() {
    for (backend, fault) in WRONG_PAGES {
        for kind in [MemoryKind::Malloc, MemoryKind::Vmm] {
            let rig = Rig::new(Module::default());
            let gdr = open(&rig.system, backend).unwrap();
            let addr = rig.memory(0, 2 * SIZE, kind);
            let data = pattern(1, 2 * SIZE);
            rig.write(0, addr, &data);
            let pin = gdr.pin(addr, SIZE).unwrap();
            rig.machine.fail(fault, 16);
            let error = pin.map().unwrap_err();
            assert!(matches!(error, Error::ProofFailed { .. }), "{fault}: {error}");
            rig.machine.fail(fault, 0);
            assert!(peek(&pin.map().unwrap(), 0, SIZE) == data[..SIZE]);
            assert!(rig.read(0, addr, 2 * SIZE) == data, "the user's memory is never written");
            drop((pin, gdr));
            rig.check_clean();
        }
    }
}
