//! The CUDA driver on the simulated one: the calls that it makes, and that it frees all it allocates.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Arc;

use gdrcopy::cuda::raw::Api;
use gdrcopy::cuda::raw::layout::{Handle, RDMA_WRITES_ORDERING, pointer_attribute as attribute};
use gdrcopy::cuda::{AllocKind, Cuda, CudaSource, CudaStatus, EntryPoints, MemoryKind, sysfs_address};
use gdrcopy::system::System;
use gdrcopy::{Error, Result};
use gdsync_testkit::driver::{Alive, Control, api, application_context, destroy_context};
use parking_lot::Mutex;
use rustix::io::{FdFlags, fcntl_getfd};

use crate::rig::{End, in_child, no_cuda};

const KINDS: [AllocKind; 2] = [AllocKind::Malloc, AllocKind::Vmm];
const LONG: usize = 1 << 20;

/// Calls an entry point, which must succeed.
macro_rules! cuda {
    ($entry:ident($($arg:expr),*)) => {
        // SAFETY: the driver checks what it is given; places for answers are the test's own.
        unsafe { api().$entry($($arg),*) }.unwrap()
    };
}

fn source(api: Api) -> EntryPoints {
    // SAFETY: the simulated driver does what the manual says of these entry points.
    unsafe { EntryPoints::new(api) }
}

/// The driver for one test.
struct Rig {
    cuda: Arc<dyn Cuda>,
    control: Control,
}

impl Rig {
    fn new() -> Self {
        let control = Control::take();
        Self { cuda: source(api()).initialise().unwrap(), control }
    }

    fn send(&self, device: i32, dst: u64, len: usize) -> Result<()> {
        let bytes = vec![7; len];
        // SAFETY: a whole vector.
        unsafe { self.cuda.copy_to_device(device, dst, bytes.as_ptr(), len) }
    }

    fn receive(&self, device: i32, src: u64) -> Vec<u8> {
        let mut bytes = vec![0; 8];
        // SAFETY: a whole vector.
        unsafe { self.cuda.copy_from_device(device, bytes.as_mut_ptr(), src, bytes.len()) }.unwrap();
        bytes
    }

    fn free(&self, addr: u64) -> Result<()> {
        // SAFETY: nothing uses it.
        unsafe { self.cuda.free(addr) }
    }

    /// Streams and pinned buffers of the library.
    fn kept(&self) -> (usize, usize) {
        let alive = self.control.alive();
        (alive.streams, alive.host_memory)
    }
}

/// Memory of GPU 1 in a context of the application.
struct App {
    context: Handle,
    addr: u64,
}

impl App {
    fn new() -> Self {
        let (context, mut addr) = (application_context(1), 0);
        cuda!(ctx_push_current(context));
        cuda!(mem_alloc(&mut addr, 2 * LONG));
        cuda!(ctx_pop_current(&mut 0));
        Self { context, addr }
    }
}

impl Drop for App {
    fn drop(&mut self) {
        destroy_context(self.context);
    }
}

fn current() -> Handle {
    let mut context = 0;
    cuda!(ctx_get_current(&mut context));
    context
}

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
fn what_is_missing_is_named_where_it_is_needed() {
    let rig = Rig::new();
    rig.control.fail("cuInit", CudaStatus::NO_DEVICE.0);
    let error = source(api()).initialise().unwrap_err();
    let text = error.to_string();
    assert_eq!(error.errno(), libc::ENODEV);
    assert!(text.contains("cuInit") && text.contains("no GPU is visible"), "{text}");
    // The version needs no initialisation.
    assert_eq!(source(Api { init: None, ..api() }).version().unwrap(), 13_000);
    rig.control.mend("cuInit");

    let lacks =
        |result: Result<()>, name| matches!(result, Err(Error::Unsupported { what, .. }) if what == name);
    assert!(lacks(source(Api::default()).initialise().map(drop), "cuInit"));
    let app = App::new();
    let old = source(Api { mem_get_handle_for_address_range: None, ..api() }).initialise().unwrap();
    assert!(lacks(old.dma_buf(app.addr, app.addr, 4096, true).map(drop), "cuMemGetHandleForAddressRange"));
    assert!(lacks(old.objects(app.addr, app.addr, 4096).map(drop), "cuMemGetHandleForAddressRange"));

    match System::real().cuda() {
        Err(error @ Error::Sys { .. }) => {
            let text = error.to_string();
            assert!(text.contains("libcuda") && text.contains("install the NVIDIA driver"), "{text}");
            assert_eq!(error.errno(), libc::ENOENT);
        }
        other => println!("skipped: there is a libcuda here: {other:?}"),
    }
    assert!(System::new(System::real().kernel().clone(), no_cuda()).cuda().is_err());
}

#[test]
fn every_call_leaves_the_context_and_a_capture_alone() {
    let (rig, app) = (Rig::new(), App::new());
    let (cuda, addr) = (&*rig.cuda, app.addr);
    let calls: [(&str, &dyn Fn() -> Result<()>); 7] = [
        ("cuMemAlloc", &|| cuda.alloc(0, 1, AllocKind::Malloc).map(drop)),
        ("cuMemSetAccess", &|| cuda.alloc(1, 1, AllocKind::Vmm).map(drop)),
        ("cuMemcpyHtoDAsync", &|| rig.send(1, addr, 8)),
        ("cuStreamQuery", &|| rig.send(1, addr, 8)),
        ("cuMemGetHandleForAddressRange", &|| cuda.dma_buf(addr, addr, 4096, true).map(drop)),
        ("cuFlushGPUDirectRDMAWrites", &|| cuda.flush(1, addr)),
        ("cuCtxPushCurrent", &|| cuda.flush(1, addr)),
    ];
    rig.control.attribute(1, RDMA_WRITES_ORDERING, 0);
    for (name, call) in calls {
        for context in [0, app.context] {
            if context != 0 {
                cuda!(ctx_push_current(context));
            }
            call().unwrap();
            assert_eq!(current(), context, "{name}");
            rig.control.fail(name, CudaStatus::LAUNCH_FAILED.0);
            let error = call().unwrap_err();
            let expected = matches!(&error, Error::Cuda { call, status, .. } if (*call, *status) == (name, CudaStatus::LAUNCH_FAILED));
            assert!(expected, "{name}: {error}");
            assert_eq!(current(), context, "{name} failed");
            rig.control.mend(name);
            if context != 0 {
                cuda!(ctx_pop_current(&mut 0));
            }
        }
    }
    // A driver older than the capture modes says that it cannot.
    let old = source(Api { thread_exchange_stream_capture_mode: None, ..api() }).initialise().unwrap();
    let (mut stream, mut graph) = (0, 0);
    cuda!(ctx_push_current(app.context));
    cuda!(stream_create(&mut stream, 1, 0));
    cuda!(stream_begin_capture(stream, 0));
    calls.iter().for_each(|(_, call)| call().unwrap());
    cuda!(stream_end_capture(stream, &mut graph));
    assert_ne!(graph, 0, "not spoiled");
    cuda!(stream_begin_capture(stream, 0));
    let refused = old.alloc(0, 1, AllocKind::Malloc);
    assert!(matches!(refused, Err(Error::Cuda { status: CudaStatus(900), .. })), "{refused:?}");
    cuda!(ctx_pop_current(&mut 0));
}

#[test]
fn memory_is_made_aligned_and_given_back_whole() {
    let rig = Rig::new();
    for (kind, made) in [(AllocKind::Malloc, (1, 0)), (AllocKind::Vmm, (1, 1))] {
        let addr = rig.cuda.alloc(1, LONG + 1, kind).unwrap();
        let alive = rig.control.alive();
        assert!(addr.is_multiple_of(65_536));
        assert_eq!((alive.device_memory, alive.virtual_memory), made, "the mapping alone holds the memory");
        assert_eq!(rig.cuda.pointer(addr).unwrap().kind == MemoryKind::Vmm, kind == AllocKind::Vmm);
        rig.free(addr).unwrap();
        assert!(matches!(rig.free(addr), Err(Error::InvalidArgument { what: "address", .. })));
        assert_eq!(rig.control.alive(), Alive { retained: 1, ..Alive::default() });
        for len in [0, usize::MAX] {
            let refused = rig.cuda.alloc(1, len, kind);
            assert!(matches!(refused, Err(Error::InvalidArgument { what: "length", .. })));
        }
    }
}

#[test]
fn a_failed_allocation_leaves_nothing() {
    let rig = Rig::new();
    let calls: [(AllocKind, &[&str]); 2] = [
        (AllocKind::Malloc, &["cuMemAlloc", "cuPointerSetAttribute"]),
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
    ];
    for (kind, calls) in calls {
        for call in calls {
            rig.control.fail(call, CudaStatus::OUT_OF_MEMORY.0);
            let error = rig.cuda.alloc(0, 5, kind).unwrap_err();
            assert!(matches!(error, Error::Exhausted { what: "GPU memory", len: 5, .. }), "{call}: {error}");
            assert_eq!(rig.control.alive(), Alive { retained: 1, ..Alive::default() }, "{call}");
            rig.control.mend(call);
        }
        rig.control.fail("cuPointerSetAttribute", CudaStatus::NOT_SUPPORTED.0);
        let made = rig.cuda.alloc(0, 1, kind);
        assert_eq!(made.is_ok(), kind == AllocKind::Vmm, "VMM memory does without it");
        made.map(|addr| rig.free(addr).unwrap()).ok();
        rig.control.mend("cuPointerSetAttribute");
    }
}

#[test]
fn the_primary_context_is_retained_once_and_keeps_one_stream() {
    let rig = Rig::new();
    assert_eq!(rig.control.alive(), Alive::default(), "nothing asked for one");
    let memory = KINDS.map(|kind| rig.cuda.alloc(1, 4096, kind).unwrap());
    for addr in [memory, memory].concat() {
        rig.send(1, addr, 8).unwrap();
        assert_eq!(rig.receive(1, addr), [7; 8]);
    }
    assert_eq!((rig.kept(), rig.control.calls("cuStreamQuery") >= 8), ((1, 1), true));
    memory.into_iter().for_each(|addr| rig.free(addr).unwrap());
    assert_eq!(rig.control.alive().retained, 1);
    // Also of the application's own hold on the context.
    cuda!(primary_ctx_retain(&mut 0, 1));
    drop(rig.cuda);
    assert_eq!(rig.control.alive(), Alive { retained: 1, ..Alive::default() });
    cuda!(primary_ctx_release(1));
}

#[test]
fn memory_of_another_context_is_copied_there_without_making_a_primary_one() {
    let (rig, app) = (Rig::new(), App::new());
    rig.send(1, app.addr, 8).unwrap();
    assert_eq!(rig.receive(1, app.addr), [7; 8]);
    let left = rig.control.alive();
    assert_eq!((left.streams, left.retained), (0, 0), "the application may destroy its context at any time");
    assert!(matches!(rig.send(0, app.addr, 8), Err(Error::InvalidArgument { what: "device", .. })));
    assert!(matches!(rig.send(1, 0x1234, 8), Err(Error::NotMappable { addr: 0x1234, .. })));
    assert!(matches!(rig.cuda.objects(0x1234, 0x1000, 4096), Err(Error::NotMappable { addr: 0x1234, .. })));
}

#[test]
fn a_failed_copy_is_waited_for_and_its_stream_reused_only_if_idle() {
    let rig = Rig::new();
    let addr = rig.cuda.alloc(0, LONG, AllocKind::Malloc).unwrap();
    for (len, wait) in [(8, "cuStreamQuery"), (LONG, "cuStreamSynchronize")] {
        // Pinned memory is not freed where it can be used again: that may wait for all work of the GPU.
        for (call, kept) in [("cuMemcpyHtoDAsync", 1), (wait, 0)] {
            let before = rig.control.calls(wait);
            rig.control.fail(call, CudaStatus::ILLEGAL_ADDRESS.0);
            let error = rig.send(0, addr, len).unwrap_err();
            assert!(matches!(error, Error::Cuda { call: failed, .. } if failed == call), "{error}");
            assert_eq!((rig.control.calls(wait), rig.kept()), (before + 1, (kept, kept)), "{call}");
            rig.control.mend(call);
        }
    }
    // SAFETY: nothing is read.
    unsafe { rig.cuda.copy_to_device(0, addr, std::ptr::null(), 0) }.unwrap();
}

#[test]
fn what_a_copy_that_timed_out_may_still_use_is_leaked() {
    let rig = Rig::new();
    let addr = rig.cuda.alloc(1, 4096, AllocKind::Malloc).unwrap();
    rig.control.fail("cuStreamQuery", CudaStatus::NOT_READY.0);
    assert!(matches!(rig.send(1, addr, 8), Err(Error::Timeout { .. })));
    rig.control.mend("cuStreamQuery");
    rig.send(1, addr, 8).unwrap();
    // The GPU may still use the first pair, so nobody else may.
    assert_eq!(rig.kept(), (2, 2));

    // Another context uses a bounce buffer of the primary one, which is then lost as well.
    let app = App::new();
    rig.send(1, app.addr, 8).unwrap();
    assert_eq!((rig.receive(1, app.addr), rig.kept()), (vec![7; 8], (2, 2)));
    let waits = rig.control.calls("cuStreamSynchronize");
    rig.send(1, app.addr, LONG).unwrap();
    assert_eq!(rig.control.calls("cuStreamSynchronize"), waits + 1, "too long for it");
    rig.control.fail("cuStreamQuery", CudaStatus::NOT_READY.0);
    assert!(matches!(rig.send(1, app.addr, 8), Err(Error::Timeout { .. })));
    rig.control.mend("cuStreamQuery");
    assert_eq!(rig.kept(), (3, 2));
    rig.send(1, app.addr, 8).unwrap();
    rig.control.fail("cuMemcpyHtoDAsync", CudaStatus::INVALID_VALUE.0);
    rig.send(1, app.addr, 8).unwrap_err();
    assert_eq!(rig.kept(), (4, 3));
    rig.control.mend("cuMemcpyHtoDAsync");
    // After a failed wait nothing that was lent is reused.
    rig.control.fail("cuStreamQuery", CudaStatus::ILLEGAL_ADDRESS.0);
    rig.send(1, app.addr, 8).unwrap_err();
    rig.control.mend("cuStreamQuery");
    rig.send(1, app.addr, 8).unwrap();
    assert_eq!((rig.control.calls("cuStreamSynchronize"), rig.kept()), (waits + 1, (5, 4)));
    rig.free(addr).unwrap();
    drop(rig.cuda);
    let alive = rig.control.alive();
    assert_eq!((alive.retained, alive.streams), (0, 1), "the lost one in the application's context");
}

#[test]
fn without_a_bounce_buffer_copies_are_waited_for() {
    let (rig, app) = (Rig::new(), App::new());
    // Makes the primary context.
    rig.cuda.alloc(1, 1, AllocKind::Malloc).unwrap();
    rig.control.fail("cuMemHostAlloc", CudaStatus::OUT_OF_MEMORY.0);
    rig.send(1, app.addr, 8).unwrap();
    assert_eq!((rig.control.calls("cuStreamQuery"), rig.control.calls("cuStreamSynchronize")), (0, 1));
}

#[test]
fn descriptors_are_closed_on_exec() {
    let (rig, app) = (Rig::new(), App::new());
    let fd = rig.cuda.dma_buf(app.addr, app.addr, 8192, true).unwrap();
    assert_eq!(fcntl_getfd(fd).unwrap(), FdFlags::CLOEXEC);
}

#[test]
fn a_forked_child_is_refused_and_releases_nothing() {
    let (Rig { cuda, control }, app) = (Rig::new(), App::new());
    cuda.alloc(1, 1, AllocKind::Malloc).unwrap();
    let calls = || ["cuCtxPushCurrent", "cuDevicePrimaryCtxRelease"].map(|name| control.calls(name));
    let (before, kept) = (calls(), Cell::new(Some(cuda)));
    let end = in_child(|| {
        let Some(cuda) = kept.take() else { return false };
        let refused = |result: Result<()>| matches!(result, Err(Error::OtherProcess { .. }));
        let all = refused(cuda.flush(1, app.addr))
            && refused(cuda.pointer(app.addr).map(drop))
            && refused(cuda.objects(app.addr, app.addr, 4096).map(drop))
            && refused(cuda.alloc(0, 1, AllocKind::Vmm).map(drop))
            // SAFETY: a whole array.
            && refused(unsafe { cuda.copy_to_device(1, app.addr, [1; 8].as_ptr(), 8) });
        drop(cuda);
        all && calls() == before
    });
    assert_eq!(end, End::Said(true));
    kept.take().unwrap().alloc(1, 1, AllocKind::Malloc).unwrap();
}

#[test]
fn a_flush_uses_the_context_of_the_memory_unless_writes_are_ordered_for_the_owner() {
    const FLUSH: &str = "cuFlushGPUDirectRDMAWrites";
    for (ordering, flushes) in [(0, 2), (99, 2), (100, 0), (200, 0)] {
        let (rig, app) = (Rig::new(), App::new());
        rig.control.attribute(1, RDMA_WRITES_ORDERING, ordering);
        for _ in 0..2 {
            rig.cuda.flush(1, app.addr).unwrap();
        }
        assert_eq!((rig.control.calls(FLUSH), rig.control.alive().retained), (flushes, 0), "{ordering}");
        assert_eq!(rig.control.calls("cuDeviceGetAttribute"), 1, "asked once");
        assert_eq!(rig.cuda.flush(1, 0x1234).is_err(), flushes > 0);
    }
    // A driver without the attribute, after one that failed.
    let (rig, app) = (Rig::new(), App::new());
    rig.control.fail("cuDeviceGetAttribute", CudaStatus::LAUNCH_FAILED.0);
    assert!(matches!(rig.cuda.flush(1, app.addr), Err(Error::Cuda { call: "cuDeviceGetAttribute", .. })));
    rig.control.fail("cuDeviceGetAttribute", CudaStatus::INVALID_VALUE.0);
    rig.cuda.flush(1, app.addr).unwrap();
    assert_eq!(rig.control.calls(FLUSH), 1);
    assert!(matches!(rig.cuda.flush(2, app.addr), Err(Error::InvalidArgument { what: "device", .. })));
}

/// What CUDA says of every address, and from which attribute on it is older than the question.
static TOLD: Mutex<(BTreeMap<u32, u64>, u32)> = Mutex::new((BTreeMap::new(), u32::MAX));

extern "C" fn told(place: *mut c_void, asked: u32, _addr: u64) -> u32 {
    let told = TOLD.lock();
    let Some(&value) = told.0.get(&asked).filter(|_| asked < told.1) else { return 1 };
    let narrow = [attribute::MEMORY_TYPE, attribute::IS_MANAGED, attribute::DEVICE_ORDINAL].contains(&asked);
    match u32::try_from(value) {
        // SAFETY: a place for a number of 32 bits.
        Ok(value) if narrow => unsafe { place.cast::<u32>().write(value) },
        // SAFETY: a place for a number of 64 bits.
        _ => unsafe { place.cast::<u64>().write(value) },
    }
    0
}

extern "C" fn all_told(count: u32, asked: *const u32, places: *const *mut c_void, addr: u64) -> u32 {
    let newest = TOLD.lock().1;
    // SAFETY: the caller passes `count` numbers.
    let asked = unsafe { std::slice::from_raw_parts(asked, count as usize) };
    // SAFETY: the caller passes `count` places.
    let places = unsafe { std::slice::from_raw_parts(places, count as usize) };
    for (&asked, &place) in asked.iter().zip(places) {
        if asked >= newest {
            return 1;
        }
        // Unknown fields stay 0.
        told(place, asked, addr);
    }
    0
}

#[test]
fn kinds_of_memory_are_distinguished() {
    const ADDR: u64 = 0x7f12_3450_0000;
    let _rig = Rig::new();
    let cuda =
        source(Api { pointer_get_attribute: Some(told), pointer_get_attributes: Some(all_told), ..api() });
    let cuda = cuda.initialise().unwrap();
    let range =
        [(attribute::RANGE_START_ADDR, ADDR), (attribute::RANGE_SIZE, 1 << 30), (attribute::BUFFER_ID, 9)];
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
        *TOLD.lock() = (attributes.iter().chain(&range).copied().collect(), u32::MAX);
        let info = cuda.pointer(ADDR).unwrap();
        let seen = (info.kind, info.base, info.size, info.buffer_id);
        assert_eq!(seen, (kind, ADDR, 1 << 30, 9), "{attributes:?}");
    }
    // VMM memory is reported by mapping, if the driver can: not one of CUDA 11.
    let mapping = [(attribute::MAPPING_BASE_ADDR, ADDR + (2 << 20)), (attribute::MAPPING_SIZE, 4 << 20)];
    for (newest, base, size) in
        [(u32::MAX, ADDR + (2 << 20), 4 << 20), (attribute::MAPPING_SIZE, ADDR, 1 << 30)]
    {
        *TOLD.lock() = ([device].iter().chain(&range).chain(&mapping).copied().collect(), newest);
        let info = cuda.pointer(ADDR).unwrap();
        assert_eq!((info.kind, info.base, info.size), (MemoryKind::Vmm, base, size));
    }
    *TOLD.lock() = (BTreeMap::new(), attribute::MAPPING_SIZE);
    let unknown = cuda.pointer(0x1234).unwrap();
    assert_eq!((unknown.kind, unknown.device, unknown.size), (MemoryKind::Unknown, -1, 0));
}
