//! The CUDA driver on a real GPU. Without one, every test says so and passes.

mod app;
mod mapped;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gdrcopy::Error;
use gdrcopy::cuda::{AllocKind, Cuda, MemoryKind};
use gdrcopy::system::System;

const KINDS: [AllocKind; 2] = [AllocKind::Malloc, AllocKind::Vmm];

/// Far more than any call takes that is not held up.
const PATIENCE: Duration = Duration::from_secs(20);

/// The driver, and the GPU for this test alone: one test's freeing would wait for another's held streams.
fn gpu() -> Option<(Arc<dyn Cuda>, MutexGuard<'static, ()>)> {
    static GPU: Mutex<()> = Mutex::new(());
    let guard = GPU.lock().unwrap_or_else(PoisonError::into_inner);
    match System::real().cuda() {
        Ok(cuda) => Some((cuda.clone(), guard)),
        Err(why) => {
            println!("skipped: {why}");
            None
        }
    }
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i % 251).to_le_bytes()[0] ^ seed).collect()
}

fn write(cuda: &dyn Cuda, dst: u64, bytes: &[u8]) -> Result<(), Error> {
    // SAFETY: a whole slice.
    unsafe { cuda.copy_to_device(0, dst, bytes.as_ptr(), bytes.len()) }
}

fn read(cuda: &dyn Cuda, src: u64, len: usize) -> Result<Vec<u8>, Error> {
    let mut bytes = vec![0xee; len];
    // SAFETY: a whole vector.
    unsafe { cuda.copy_from_device(0, bytes.as_mut_ptr(), src, len) }?;
    Ok(bytes)
}

fn free(cuda: &dyn Cuda, addr: u64) {
    // SAFETY: the tests free what they no longer use.
    unsafe { cuda.free(addr) }.unwrap();
}

fn close_on_exec(fd: &OwnedFd) -> bool {
    rustix::io::fcntl_getfd(fd).unwrap() == rustix::io::FdFlags::CLOEXEC
}

#[test]
fn gpus_are_named_as_in_sysfs() {
    let Some((cuda, _gpu)) = gpu() else { return };
    println!("CUDA {}", cuda.driver_version().unwrap());
    let gpus = cuda.devices().unwrap();
    assert!(!gpus.is_empty());
    for gpu in gpus {
        println!("{gpu:?}");
        for attribute in [102, 103, 110, 116, 117, 118, 124, 152] {
            println!("  attribute {attribute}: {:?}", cuda.device_attribute(gpu.ordinal, attribute).ok());
        }
        assert!(std::path::Path::new("/sys/bus/pci/devices").join(&gpu.pci).exists(), "{}", gpu.pci);
    }
    assert!(cuda.device_attribute(1000, 18).is_err());
}

#[test]
fn memory_of_both_kinds_is_aligned_holds_bytes_and_goes() {
    let Some((cuda, _gpu)) = gpu() else { return };
    for kind in KINDS {
        for len in [1, 4096, 65_536, 100_000, (2 << 20) + 1] {
            let addr = cuda.alloc(0, len, kind).unwrap();
            let info = cuda.pointer(addr).unwrap();
            println!("{kind:?} of {len} bytes at {addr:#x}: {info:x?}");
            assert!(addr.is_multiple_of(65_536));
            assert_eq!((info.kind == MemoryKind::Malloc, info.device), (kind == AllocKind::Malloc, 0));
            assert_eq!(info.kind == MemoryKind::Vmm, kind == AllocKind::Vmm);
            assert!(info.base <= addr && addr + len as u64 <= info.base + info.size as u64);
            let last = cuda.pointer(addr + len as u64 - 1).unwrap();
            assert_eq!((last.base, last.size, last.buffer_id), (info.base, info.size, info.buffer_id));
            free(&*cuda, addr);
            assert_eq!(cuda.pointer(addr).unwrap().kind, MemoryKind::Unknown, "freed");
        }
        let error = cuda.alloc(0, 1 << 43, kind).unwrap_err();
        assert!(matches!(error, Error::Exhausted { what: "GPU memory", .. }), "{kind:?}: {error}");
    }
}

#[test]
fn kinds_of_foreign_memory_are_told_apart() {
    let Some((cuda, _gpu)) = gpu() else { return };
    let _context = app::PrimaryContext::new();
    let kind = |addr| {
        let info = cuda.pointer(addr).unwrap();
        println!("{addr:#x}: {info:x?}");
        info.kind
    };

    let malloc = app::malloc(300);
    assert_eq!(kind(malloc + 299), MemoryKind::Malloc);
    app::free(malloc);
    assert_eq!(kind(malloc), MemoryKind::Unknown);

    let pool = app::malloc_from_pool(300);
    assert_eq!(kind(pool), MemoryKind::Pool);
    write(&*cuda, pool, b"pool").unwrap();
    assert_eq!(read(&*cuda, pool, 4).unwrap(), b"pool");
    app::free(pool);

    let managed = app::malloc_managed(300);
    assert_eq!(kind(managed), MemoryKind::Managed);
    app::free(managed);

    let host = app::malloc_host(300);
    assert_eq!(kind(host), MemoryKind::Host);
    app::free_host(host);

    let heap = vec![0u8; 1 << 20];
    assert_eq!(kind(heap.as_ptr().addr() as u64), MemoryKind::Unknown);
    assert_eq!(kind(0), MemoryKind::Unknown);
    assert_eq!(kind(u64::MAX), MemoryKind::Unknown);
}

#[test]
fn neighbours_in_one_reservation_are_two_mappings() {
    let Some((cuda, _gpu)) = gpu() else { return };
    let _context = app::PrimaryContext::new();
    let len = 2 << 20;
    let parts = [(); 2].map(|()| cuda.alloc(0, len, AllocKind::Vmm).unwrap());
    let both = app::Neighbours::new(parts, len);
    for at in [both.base, both.base + len as u64] {
        let info = cuda.pointer(at + 5).unwrap();
        println!("{info:x?}");
        assert_eq!((info.kind, info.base, info.size), (MemoryKind::Vmm, at, len));
    }
    drop(both);
    parts.into_iter().for_each(|addr| free(&*cuda, addr));
}

#[test]
fn memory_is_exported_and_its_objects_are_named() {
    let Some((cuda, _gpu)) = gpu() else { return };
    let [vmm, malloc] = [AllocKind::Vmm, AllocKind::Malloc].map(|kind| cuda.alloc(0, 4 << 20, kind).unwrap());
    for addr in [vmm, malloc] {
        if cuda.device_attribute(0, 124).unwrap() == 0 {
            println!("skipped: no dma-buf export here");
            break;
        }
        let objects = cuda.objects(addr, addr + 65_536, 1 << 20).unwrap();
        println!("{objects:x?}");
        assert_eq!(objects.pieces.iter().map(|piece| piece.len).sum::<u64>(), 1 << 20);
        for pcie in [false, true] {
            match cuda.dma_buf(addr, addr, 65_536, pcie) {
                Ok(fd) => assert!(close_on_exec(&fd)),
                Err(error) => {
                    println!("dma-buf, PCIe {pcie}: {error}");
                    assert!(pcie, "{error}");
                }
            }
        }
        assert!(cuda.dma_buf(addr, addr, 100, false).is_err(), "not whole pages");
    }
    free(&*cuda, vmm);
    free(&*cuda, malloc);
}

#[test]
fn the_callers_context_is_unchanged() {
    let Some((cuda, _gpu)) = gpu() else { return };
    let all = |expected| {
        let check = |call: &str| assert_eq!(app::current_context(), expected, "{call}");
        for kind in KINDS {
            let addr = cuda.alloc(0, 8192, kind).unwrap();
            check("alloc");
            write(&*cuda, addr, b"there").unwrap();
            assert_eq!(read(&*cuda, addr, 5).unwrap(), b"there");
            check("copy");
            let _ = cuda.dma_buf(addr, addr, 4096, false);
            check("dma_buf");
            let _ = cuda.objects(addr, addr, 4096);
            check("objects");
            cuda.flush(0, addr).unwrap();
            check("flush");
            free(&*cuda, addr);
            check("free");
        }
    };
    app::set_current(0);
    all(0);
    let context = app::OwnContext::new();
    all(context.0);
}

/// By that number it is known that an address no longer means the memory that was pinned.
#[test]
fn an_address_that_is_used_again_has_another_number() {
    let Some((cuda, _gpu)) = gpu() else { return };
    let _context = app::PrimaryContext::new();
    let len = 2 << 20;
    let again = |name: &str, make: &dyn Fn() -> u64, free: &dyn Fn(u64)| {
        let (mut numbers, mut again) = (HashMap::new(), 0);
        for _ in 0..20 {
            let addr = make();
            let number = cuda.buffer_id(addr).unwrap();
            assert_ne!(number, 0, "{name}");
            again += u32::from(numbers.insert(addr, number).is_some_and(|old| {
                assert_ne!(old, number, "{name}");
                true
            }));
            free(addr);
            assert_ne!(cuda.buffer_id(addr).unwrap(), number, "{name}, freed");
        }
        println!("{name}: {again} of 20 at an address used before");
    };
    again("cuMemAlloc", &|| app::malloc(len), &app::free);
    again("cuMemCreate", &|| cuda.alloc(0, len, AllocKind::Vmm).unwrap(), &|addr| free(&*cuda, addr));
    again("cuMemAllocAsync", &|| app::malloc_from_pool(len), &app::free);

    let [a, b] = [(); 2].map(|()| cuda.alloc(0, len, AllocKind::Vmm).unwrap());
    let shown = [[a, b], [b, a]].map(|parts| {
        let both = app::Neighbours::new(parts, len);
        (both.base, cuda.buffer_id(both.base).unwrap())
    });
    println!("other memory mapped: {shown:x?}");
    assert_ne!(shown[0], shown[1]);
    [a, b].into_iter().for_each(|addr| free(&*cuda, addr));
}

#[test]
fn a_capture_stays_valid() {
    const GLOBAL: u32 = 0;
    const THREAD_LOCAL: u32 = 1;
    let Some((cuda, _gpu)) = gpu() else { return };
    let _context = app::PrimaryContext::new();
    for mode in [GLOBAL, THREAD_LOCAL] {
        let capture = app::Capture::new(mode);
        let work = || {
            for (kind, len) in KINDS.into_iter().zip([8, 1 << 20]) {
                let addr = cuda.alloc(0, len, kind).unwrap();
                write(&*cuda, addr, &pattern(len, 1)).unwrap();
                assert!(read(&*cuda, addr, len).unwrap() == pattern(len, 1));
                let _ = (cuda.objects(addr, addr, 65_536), cuda.dma_buf(addr, addr, 65_536, false));
                cuda.flush(0, addr).unwrap();
                free(&*cuda, addr);
            }
        };
        // From the capturing thread, and from another.
        work();
        std::thread::scope(|scope| scope.spawn(work).join().unwrap());
        capture.end();
    }
}

/// Runs every call that must not wait for the application's streams; the step that hangs is named.
fn nothing_waits(cuda: &Arc<dyn Cuda>, held: impl FnOnce() -> Box<dyn Send>) {
    let memory = KINDS.map(|kind| cuda.alloc(0, 1 << 20, kind).unwrap());
    let held = held();
    let (step, steps) = channel();
    let of_thread = cuda.clone();
    let worker = std::thread::spawn(move || {
        let cuda = &*of_thread;
        for addr in memory {
            for len in [8, 1 << 20] {
                step.send("copy_to_device").unwrap();
                write(cuda, addr, &pattern(len, 3)).unwrap();
                step.send("copy_from_device").unwrap();
                assert!(read(cuda, addr, len).unwrap() == pattern(len, 3));
            }
            step.send("pointer").unwrap();
            cuda.pointer(addr).unwrap();
            step.send("dma_buf").unwrap();
            let _ = cuda.dma_buf(addr, addr, 65_536, false);
            step.send("objects").unwrap();
            let _ = cuda.objects(addr, addr, 65_536);
            step.send("flush").unwrap();
            cuda.flush(0, addr).unwrap();
        }
        let more = KINDS.map(|kind| {
            step.send(if kind == AllocKind::Malloc { "alloc, Malloc" } else { "alloc, Vmm" }).unwrap();
            cuda.alloc(0, 1 << 20, kind).unwrap()
        });
        step.send("done").unwrap();
        more
    });
    let mut last = "start";
    // The step at which it hangs, if it does.
    let mut hangs = || loop {
        match steps.recv_timeout(PATIENCE) {
            Ok(step) => last = step,
            Err(RecvTimeoutError::Disconnected) => break None,
            Err(RecvTimeoutError::Timeout) => break Some(last),
        }
    };
    let waited = hangs();
    drop(held);
    assert_eq!(hangs(), None, "for good");
    let more = worker.join().unwrap();
    memory.into_iter().chain(more).for_each(|addr| free(&**cuda, addr));
    assert_eq!(waited, None, "waited for a stream of the application");
    assert_eq!(last, "done");
}

#[test]
fn nothing_waits_for_held_streams() {
    let Some((cuda, _gpu)) = gpu() else { return };
    let _context = app::PrimaryContext::new();
    nothing_waits(&cuda, || Box::new(app::HeldByHostFunction::new()));
    nothing_waits(&cuda, || Box::new(app::HeldByWaits::new(6)));
}

/// Waits in as many streams as there are hardware queues (`CUDA_DEVICE_MAX_CONNECTIONS`, at most 32) stop all others.
#[test]
fn copies_time_out_when_waits_occupy_all_queues() {
    let Some((cuda, _gpu)) = gpu() else { return };
    let _context = app::PrimaryContext::new();
    let addr = cuda.alloc(0, 4096, AllocKind::Malloc).unwrap();
    write(&*cuda, addr, b"before").unwrap();
    let held = app::HeldByWaits::new(40);
    assert!(matches!(write(&*cuda, addr, b"during"), Err(Error::Timeout { .. })));
    // Another stream may be lucky.
    assert!(matches!(read(&*cuda, addr, 6), Ok(_) | Err(Error::Timeout { .. })));
    drop(held);
    write(&*cuda, addr, b"after!").unwrap();
    assert_eq!(read(&*cuda, addr, 6).unwrap(), b"after!");
    free(&*cuda, addr);
}
