//! The driver on a table of counting functions.

use std::os::fd::AsRawFd;

use gdsync_testkit::process::{End, in_child};

use super::fake::{APPLICATION, CONTENT, PRIMARY, books};
use super::*;
use crate::cuda::raw::layout::{Handle, pointer_attribute as attribute};
use crate::cuda::{CudaStatus, MemoryKind};

#[test]
fn pci_addresses_become_those_of_sysfs() {
    assert_eq!(sysfs_address("0000:0F:00.0").unwrap(), "0000:0f:00.0");
    assert_eq!(sysfs_address("00000000:C1:1F.7").unwrap(), "0000:c1:1f.7");
    assert_eq!(sysfs_address("00010000:01:00.0").unwrap(), "10000:01:00.0");
    for wrong in ["", "0F:00.0", "0000:0F:00", "0000:0F:00.0.1", "0000:xx:00.0"] {
        assert_eq!(sysfs_address(wrong), None, "{wrong}");
    }
}

#[test]
fn a_machine_without_libcuda_says_what_to_install() {
    match Installed.initialise() {
        Err(error @ Error::Sys { .. }) => {
            let text = error.to_string();
            assert!(text.contains("libcuda") && text.contains("install the NVIDIA driver"), "{text}");
            assert_eq!(error.errno(), libc::ENOENT);
        }
        other => println!("skipped: there is a libcuda here: {other:?}"),
    }
}

fn driver() -> Driver {
    Driver::with(fake::api()).unwrap()
}

fn fail(call: &'static str, status: CudaStatus) {
    books(|books| books.failing.insert(call, status.0));
}

fn succeed() {
    books(|books| books.failing.clear());
}

fn called(name: &str) -> usize {
    books(|books| books.calls.iter().filter(|&&call| call == name).count())
}

fn know(addr: u64, attributes: &[(u32, u64)]) {
    books(|books| books.attributes.insert(addr, attributes.iter().copied().collect()));
}

/// Device memory of `cuMemAlloc` in a context.
fn know_malloc(addr: u64, context: Handle) {
    let attributes = [
        (attribute::CONTEXT, context as u64),
        (attribute::MEMORY_TYPE, 2),
        (attribute::DEVICE_ORDINAL, 1),
        (attribute::IS_LEGACY_CUDA_IPC_CAPABLE, 1),
        (attribute::BUFFER_ID, 77),
        (attribute::RANGE_START_ADDR, addr),
        (attribute::RANGE_SIZE, 4096),
    ];
    know(addr, &attributes);
}

fn send(driver: &Driver, device: i32, dst: u64) -> Result<()> {
    // SAFETY: a whole array.
    unsafe { driver.copy_to_device(device, dst, [1u8; 8].as_ptr(), 8) }
}

const ADDR: u64 = 0x7f12_3450_0000;

#[test]
fn a_machine_without_gpus_says_so() {
    let api = fake::api();
    fail("cuInit", CudaStatus::NO_DEVICE);
    let error = Driver::with(api).unwrap_err();
    assert_eq!(error.errno(), libc::ENODEV);
    let text = error.to_string();
    assert!(text.contains("cuInit") && text.contains("no GPU is visible"), "{text}");
}

#[test]
fn the_version_is_known_before_cuda_is_initialised() {
    let api = Api { init: None, ..fake::api() };
    assert_eq!(version(&api).unwrap(), 13000);
    fail("cuDriverGetVersion", CudaStatus::INVALID_VALUE);
    assert_eq!(version(&api).unwrap_err().errno(), libc::EINVAL);
}

#[test]
fn an_entry_point_that_the_driver_lacks_is_an_error_where_it_is_needed() {
    let api = Api { mem_get_handle_for_address_range: None, ..fake::api() };
    let driver = Driver::with(api).unwrap();
    know_malloc(ADDR, APPLICATION);
    let error = driver.dma_buf(ADDR, ADDR, 4096, true).unwrap_err();
    assert!(
        matches!(&error, Error::Unsupported { what, .. } if what == "cuMemGetHandleForAddressRange"),
        "{error}"
    );
    driver.ipc_handle(ADDR).unwrap();
    let error = Driver::with(Api::default()).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { what, .. } if what == "cuInit"), "{error}");
}

#[test]
fn every_call_leaves_the_current_context_as_it_was() {
    let driver = driver();
    know_malloc(ADDR, 0xbeef);
    let calls: [(&str, &dyn Fn() -> Result<()>); 8] = [
        ("cuMemAlloc", &|| driver.alloc(0, 1, AllocKind::Malloc).map(drop)),
        ("cuMemSetAccess", &|| driver.alloc(1, 1, AllocKind::Vmm).map(drop)),
        ("cuMemcpyHtoDAsync", &|| send(&driver, 1, ADDR)),
        ("cuStreamQuery", &|| send(&driver, 1, ADDR)),
        ("cuIpcGetMemHandle", &|| driver.ipc_handle(ADDR).map(drop)),
        ("cuMemGetHandleForAddressRange", &|| driver.dma_buf(ADDR, ADDR, 4096, true).map(drop)),
        ("cuFlushGPUDirectRDMAWrites", &|| driver.flush(1, ADDR)),
        ("cuCtxPushCurrent", &|| driver.flush(1, ADDR)),
    ];
    for (name, call) in calls {
        for contexts in [vec![], vec![APPLICATION]] {
            books(|books| books.contexts.clone_from(&contexts));
            call().unwrap();
            assert_eq!(books(|books| books.contexts.clone()), contexts, "{name}");
            fail(name, CudaStatus::LAUNCH_FAILED);
            let error = call().unwrap_err();
            assert!(
                matches!(error, Error::Cuda { call, status: CudaStatus::LAUNCH_FAILED, .. } if call == name)
            );
            assert_eq!(books(|books| books.contexts.clone()), contexts, "{name} failed");
            succeed();
        }
    }
}

#[test]
fn a_capture_of_the_application_is_not_disturbed() {
    let capture = |driver: &Driver| {
        know_malloc(ADDR, 0xbeef);
        books(|books| (books.capturing, books.capture_mode) = (true, 1));
        let calls: [&dyn Fn() -> Result<()>; 6] = [
            &|| driver.alloc(0, 1, AllocKind::Malloc).map(drop),
            &|| driver.alloc(1, 1, AllocKind::Vmm).map(drop),
            &|| send(driver, 1, ADDR),
            &|| driver.ipc_handle(ADDR).map(drop),
            &|| driver.dma_buf(ADDR, ADDR, 4096, true).map(drop),
            &|| driver.flush(1, ADDR),
        ];
        calls.map(|call| {
            let result = call();
            assert_eq!(books(|books| books.capture_mode), 1);
            result
        })
    };
    capture(&driver()).into_iter().for_each(Result::unwrap);
    // A driver older than the modes: the call says so.
    let api = Api { thread_exchange_stream_capture_mode: None, ..fake::api() };
    let [alloc, ..] = capture(&Driver::with(api).unwrap());
    assert!(matches!(alloc, Err(Error::Cuda { status: CudaStatus(900), .. })));
}

#[test]
fn malloc_memory_is_aligned_and_freed_at_its_own_address() {
    let driver = driver();
    let addr = driver.alloc(0, 1 << 20, AllocKind::Malloc).unwrap();
    assert!(addr.is_multiple_of(65536));
    let (raw, len) = books(|books| books.memory.first_key_value().map(|(&raw, &len)| (raw, len))).unwrap();
    assert!(raw <= addr && addr + (1 << 20) <= raw + len as u64);
    // SAFETY: nothing uses it.
    unsafe { driver.free(addr) }.unwrap();
    assert!(books(|books| books.memory.is_empty()));
    // SAFETY: refused.
    assert!(matches!(unsafe { driver.free(addr) }, Err(Error::InvalidArgument { what: "address", .. })));
}

#[test]
fn vmm_memory_is_made_for_export_and_rdma_and_undone_whole() {
    let driver = driver();
    let addr = driver.alloc(1, 1, AllocKind::Vmm).unwrap();
    let prop = books(|books| books.last_prop).unwrap();
    assert_eq!((prop.kind, prop.handle_types, prop.gpu_direct_rdma), (1, 1, 1));
    assert_eq!((prop.location.kind, prop.location.id), (1, 1));
    books(|books| assert_eq!(books.mapped.get(&addr), Some(&(2 << 20))));
    assert!(books(|books| books.created.is_empty()), "the mapping alone holds the memory");
    // SAFETY: nothing uses it.
    unsafe { driver.free(addr) }.unwrap();
    books(|books| assert!(books.mapped.is_empty() && books.reserved.is_empty()));
}

#[test]
fn a_failed_allocation_leaves_nothing() {
    let driver = driver();
    for (kind, calls) in [
        (AllocKind::Malloc, &["cuMemAlloc", "cuPointerSetAttribute"][..]),
        (
            AllocKind::Vmm,
            &[
                "cuMemGetAllocationGranularity",
                "cuMemCreate",
                "cuMemAddressReserve",
                "cuMemMap",
                "cuMemSetAccess",
            ],
        ),
    ] {
        for &call in calls {
            fail(call, CudaStatus::OUT_OF_MEMORY);
            let error = driver.alloc(0, 5, kind).unwrap_err();
            assert!(matches!(error, Error::Exhausted { what: "GPU memory", len: 5, .. }), "{call}: {error}");
            books(|books| {
                assert!(books.memory.is_empty() && books.reserved.is_empty(), "{call}: {books:?}");
                assert!(books.mapped.is_empty() && books.created.is_empty(), "{call}: {books:?}");
            });
            succeed();
        }
        fail("cuPointerSetAttribute", CudaStatus::NOT_SUPPORTED);
        assert_eq!(driver.alloc(0, 1, kind).is_ok(), kind == AllocKind::Vmm, "VMM memory does without it");
        succeed();
        books(|books| (books.reserved.clear(), books.mapped.clear()));
        for len in [0, usize::MAX] {
            assert!(matches!(driver.alloc(0, len, kind), Err(Error::InvalidArgument { what: "length", .. })));
        }
    }
}

#[test]
fn copies_of_one_thread_share_one_stream_of_the_primary_context() {
    let driver = driver();
    know_malloc(ADDR, PRIMARY + 1);
    books(|books| books.retained.insert(1, 1));
    for _ in 0..3 {
        send(&driver, 1, ADDR).unwrap();
        let mut out = [0; 8];
        // SAFETY: a whole array.
        unsafe { driver.copy_from_device(1, out.as_mut_ptr(), ADDR, 8) }.unwrap();
        assert_eq!(out, [CONTENT; 8], "through the pinned buffer");
    }
    books(|books| {
        let (_, stream, ..) = books.copies[0];
        assert_eq!(books.copies, [(PRIMARY + 1, stream, ADDR, 8); 6]);
        assert_eq!(books.streams.len(), 1);
    });
    assert_eq!(called("cuStreamQuery"), 6);
    // Memory without a context of its own is reached from the same one.
    know(0x7f00_0000, &[(attribute::MEMORY_TYPE, 2), (attribute::DEVICE_ORDINAL, 1)]);
    send(&driver, 1, 0x7f00_0000).unwrap();
    books(|books| assert_eq!(books.streams.len(), 1));
    drop(driver);
    books(|books| {
        let rest = (books.streams.len(), books.pinned.len(), books.retained[&1]);
        assert_eq!(rest, (0, 0, 1), "the application's own hold on the context stays");
    });
}

#[test]
fn memory_of_another_context_is_copied_there_without_making_a_primary_one() {
    let driver = driver();
    know_malloc(ADDR, APPLICATION);
    send(&driver, 1, ADDR).unwrap();
    books(|books| {
        assert_eq!((books.copies[0].0, books.copies.len()), (APPLICATION, 1));
        assert!(books.streams.is_empty(), "the application may destroy its context at any time");
        assert!(books.retained.is_empty());
    });
}

#[test]
fn a_copy_that_times_out_leaks_its_stream_and_bounce_buffer() {
    let driver = driver();
    know(ADDR, &[(attribute::MEMORY_TYPE, 2)]);
    fail("cuStreamQuery", CudaStatus::NOT_READY);
    assert!(matches!(send(&driver, 0, ADDR), Err(Error::Timeout { .. })));
    succeed();
    send(&driver, 0, ADDR).unwrap();
    // The GPU may still use the first pair, so nobody else may.
    books(|books| assert_eq!((books.streams.len(), books.pinned.len()), (2, 2)));
    drop(driver);
    books(|books| assert_eq!((books.streams.len(), books.pinned.len()), (1, 1)));
}

#[test]
fn a_failed_copy_is_waited_for_and_its_stream_reused_only_if_idle() {
    let driver = driver();
    know(ADDR, &[(attribute::MEMORY_TYPE, 2)]);
    for (len, wait) in [(8, "cuStreamQuery"), (1 << 20, "cuStreamSynchronize")] {
        // Pinned memory is not freed where it can be used again: that may wait for all work of the GPU.
        for (call, kept) in [("cuMemcpyHtoDAsync", 1), (wait, 0)] {
            let before = called(wait);
            fail(call, CudaStatus::ILLEGAL_ADDRESS);
            let bytes = vec![0; len];
            // SAFETY: a whole vector.
            let error = unsafe { driver.copy_to_device(0, ADDR, bytes.as_ptr(), len) }.unwrap_err();
            assert!(matches!(error, Error::Cuda { call: failed, .. } if failed == call), "{error}");
            assert_eq!(called(wait), before + 1, "{call}");
            books(|books| assert_eq!((books.streams.len(), books.pinned.len()), (kept, kept), "{call}"));
            succeed();
        }
    }
    // SAFETY: nothing is read.
    unsafe { driver.copy_to_device(0, ADDR, std::ptr::null(), 0) }.unwrap();
}

#[test]
fn kinds_of_memory_are_distinguished() {
    let driver = driver();
    let range =
        [(attribute::RANGE_START_ADDR, ADDR), (attribute::RANGE_SIZE, 8192), (attribute::BUFFER_ID, 9)];
    let device = (attribute::MEMORY_TYPE, 2);
    let cases: [(MemoryKind, &[(u32, u64)]); 6] = [
        (MemoryKind::Malloc, &[device, (attribute::IS_LEGACY_CUDA_IPC_CAPABLE, 1)]),
        (MemoryKind::Pool, &[device, (attribute::MEMPOOL_HANDLE, 0xffff)]),
        (MemoryKind::Vmm, &[device]),
        (MemoryKind::Managed, &[device, (attribute::IS_MANAGED, 1)]),
        (MemoryKind::Managed, &[(attribute::MEMORY_TYPE, 1), (attribute::IS_MANAGED, 1)]),
        (MemoryKind::Host, &[(attribute::MEMORY_TYPE, 1)]),
    ];
    for (kind, attributes) in cases {
        know(ADDR, &[attributes, &range].concat());
        let info = driver.pointer(ADDR).unwrap();
        assert_eq!(
            (info.kind, info.base, info.size, info.buffer_id),
            (kind, ADDR, 8192, 9),
            "{attributes:?}"
        );
        assert!(!info.exportable);
    }
    let unknown = driver.pointer(0x1234).unwrap();
    assert_eq!((unknown.kind, unknown.device, unknown.size), (MemoryKind::Unknown, -1, 0));
    assert!(matches!(driver.ipc_handle(0x1234), Err(Error::NotMappable { addr: 0x1234, .. })));
}

#[test]
fn vmm_memory_is_reported_by_mapping_if_the_driver_can() {
    let driver = driver();
    let attributes = [
        (attribute::MEMORY_TYPE, 2),
        (attribute::ALLOWED_HANDLE_TYPES, 9),
        (attribute::RANGE_START_ADDR, ADDR),
        (attribute::RANGE_SIZE, 1 << 30),
        (attribute::MAPPING_BASE_ADDR, ADDR + (2 << 20)),
        (attribute::MAPPING_SIZE, 4 << 20),
    ];
    know(ADDR, &attributes);
    let info = driver.pointer(ADDR).unwrap();
    assert_eq!((info.base, info.size, info.exportable), (ADDR + (2 << 20), 4 << 20, true));
    assert_eq!(called("cuPointerGetAttribute"), 0);

    // A driver of CUDA 11.
    books(|books| books.attributes_end = Some(attribute::MAPPING_SIZE));
    let info = driver.pointer(ADDR).unwrap();
    assert_eq!((info.kind, info.base, info.size, info.exportable), (MemoryKind::Vmm, ADDR, 1 << 30, true));
    assert_eq!(driver.pointer(0x1234).unwrap().kind, MemoryKind::Unknown);

    fail("cuPointerGetAttribute", CudaStatus::NOT_INITIALIZED);
    assert!(matches!(driver.pointer(ADDR), Err(Error::Cuda { status: CudaStatus::NOT_INITIALIZED, .. })));
}

#[test]
fn descriptors_are_closed_on_exec_and_handles_released() {
    let driver = driver();
    know_malloc(ADDR, APPLICATION);
    // The pages of a dma-buf may begin at an address that CUDA does not know.
    for fd in [driver.export_fd(ADDR).unwrap(), driver.dma_buf(ADDR, ADDR - 4096, 8192, true).unwrap()] {
        // SAFETY: an open descriptor.
        assert_eq!(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) }, libc::FD_CLOEXEC);
    }
    fail("cuMemExportToShareableHandle", CudaStatus::INVALID_VALUE);
    driver.export_fd(ADDR).unwrap_err();
    books(|books| assert!(books.created.is_empty()));
}

#[test]
fn primary_contexts_are_retained_once_and_released_on_drop() {
    let driver = driver();
    books(|books| assert!(books.retained.is_empty(), "nothing asked for one"));
    know(ADDR, &[(attribute::MEMORY_TYPE, 2)]);
    for _ in 0..2 {
        driver.flush(0, ADDR).unwrap();
        driver.alloc(0, 1, AllocKind::Malloc).unwrap();
    }
    books(|books| assert_eq!(books.retained, [(0, 1)].into()));
    drop(driver);
    books(|books| assert_eq!(books.retained, [(0, 0)].into()));
}

#[test]
fn copies_need_live_memory_of_the_named_gpu() {
    let driver = driver();
    know_malloc(ADDR, APPLICATION);
    assert!(matches!(send(&driver, 0, ADDR), Err(Error::InvalidArgument { what: "device", .. })));
    assert!(matches!(send(&driver, 1, 0x1234), Err(Error::NotMappable { addr: 0x1234, .. })));
    books(|books| assert!(books.copies.is_empty()));
}

#[test]
fn a_forked_child_is_refused_and_releases_nothing() {
    let driver = driver();
    know_malloc(ADDR, APPLICATION);
    driver.flush(1, ADDR).unwrap();
    let calls = books(|books| books.calls.len());
    let kept = std::cell::Cell::new(Some(driver));
    let end = in_child(|| {
        let Some(driver) = kept.take() else { return false };
        let refused = |result: Result<()>| matches!(result, Err(Error::OtherProcess { .. }));
        let all = refused(driver.flush(1, ADDR))
            && refused(driver.pointer(ADDR).map(drop))
            && refused(driver.export_fd(ADDR).map(drop))
            && refused(driver.alloc(0, 1, AllocKind::Vmm).map(drop))
            && refused(send(&driver, 1, ADDR));
        drop(driver);
        all && books(|books| books.calls.len()) == calls
    });
    assert_eq!(end, End::Said(true));
    kept.take().unwrap().flush(1, ADDR).unwrap();
}

#[test]
fn a_flush_uses_the_context_of_the_memory_unless_writes_are_ordered_for_the_owner() {
    for (ordering, flushes) in [(0, true), (99, true), (100, false), (200, false)] {
        let driver = driver();
        books(|books| books.device_attributes.insert((1, RDMA_WRITES_ORDERING), ordering));
        know_malloc(ADDR, APPLICATION + 1);
        driver.flush(1, ADDR).unwrap();
        books(|books| assert!(books.retained.is_empty()));
        // Memory without a context of its own.
        know(ADDR, &[(attribute::MEMORY_TYPE, 2), (attribute::DEVICE_ORDINAL, 1)]);
        driver.flush(1, ADDR).unwrap();
        let expected: &[_] = if flushes { &[APPLICATION + 1, PRIMARY + 1] } else { &[] };
        assert_eq!(books(|books| books.flushes.clone()), expected, "{ordering}");
        assert_eq!(called("cuDeviceGetAttribute"), 1, "asked once");
        assert_eq!(driver.flush(1, 0x1234).is_err(), flushes);
    }
    // A driver without the attribute, after one that failed.
    let driver = driver();
    know_malloc(ADDR, APPLICATION);
    fail("cuDeviceGetAttribute", CudaStatus::LAUNCH_FAILED);
    assert!(matches!(driver.flush(1, ADDR), Err(Error::Cuda { call: "cuDeviceGetAttribute", .. })));
    fail("cuDeviceGetAttribute", CudaStatus::INVALID_VALUE);
    driver.flush(1, ADDR).unwrap();
    assert_eq!(books(|books| books.flushes.len()), 1);
    assert!(matches!(driver.flush(2, ADDR), Err(Error::InvalidArgument { what: "device", .. })));
}

#[test]
fn another_context_uses_a_bounce_buffer_of_the_primary_one() {
    let driver = driver();
    know_malloc(ADDR, APPLICATION);
    books(|books| books.retained.insert(1, 1));
    for _ in 0..2 {
        let mut out = [0; 8];
        // SAFETY: a whole array.
        unsafe { driver.copy_from_device(1, out.as_mut_ptr(), ADDR, 8) }.unwrap();
        assert_eq!(out, [CONTENT; 8]);
    }
    let (streams, long) = (called("cuStreamCreateWithPriority"), vec![0; 1 << 20]);
    // SAFETY: a whole vector.
    unsafe { driver.copy_to_device(1, ADDR, long.as_ptr(), long.len()) }.unwrap();
    let waits = (called("cuStreamQuery"), called("cuStreamSynchronize"));
    assert_eq!((waits, called("cuStreamCreateWithPriority")), ((2, 1), streams + 1), "too long for it");
    // Any other copy can be given up, and then what was lent is lost as well.
    fail("cuStreamQuery", CudaStatus::NOT_READY);
    assert!(matches!(send(&driver, 1, ADDR), Err(Error::Timeout { .. })));
    books(|books| assert_eq!((books.streams.len(), books.pinned.len()), (2, 1)));
    succeed();
    send(&driver, 1, ADDR).unwrap();
    fail("cuMemcpyHtoDAsync", CudaStatus::INVALID_VALUE);
    send(&driver, 1, ADDR).unwrap_err();
    books(|books| assert_eq!((books.streams.len(), books.pinned.len()), (3, 2)));
    fail("cuStreamQuery", CudaStatus::ILLEGAL_ADDRESS);
    send(&driver, 1, ADDR).unwrap_err();
    succeed();
    send(&driver, 1, ADDR).unwrap();
    assert_eq!(called("cuStreamSynchronize"), 1, "of the long one");
    books(|books| {
        assert!(books.copies.iter().all(|&(context, ..)| context == APPLICATION));
        assert_eq!(books.contexts, [APPLICATION]);
        assert_eq!((books.streams.len(), books.pinned.len()), (4, 3));
    });
    drop(driver);
    books(|books| assert_eq!((books.streams.len(), books.pinned.len()), (3, 2), "what was lost"));
}

#[test]
fn a_primary_context_without_a_bounce_buffer_provides_none() {
    let driver = driver();
    know_malloc(ADDR, APPLICATION);
    // Makes the primary context.
    driver.alloc(1, 1, AllocKind::Malloc).unwrap();
    fail("cuMemHostAlloc", CudaStatus::OUT_OF_MEMORY);
    send(&driver, 1, ADDR).unwrap();
    assert_eq!((called("cuStreamSynchronize"), books(|books| books.copies[0].0)), (1, APPLICATION));
}
