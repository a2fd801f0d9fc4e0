//! The simulated CUDA behind `gdrcopy::cuda::Cuda`.

use std::os::fd::AsFd;
use std::sync::Arc;

use gdrcopy::cuda::{AllocKind, Cuda, CudaStatus, MemoryKind};
use gdrcopy::{Error, Result};
use gdsync_testkit::{CLIENT, Machine, Object, SimulatedCuda, dma_buf_offset};

const RESERVED: u64 = 0x7e00_0000_0000;

fn machine() -> (Arc<Machine>, Arc<SimulatedCuda>) {
    let machine = Machine::new(2);
    let cuda = SimulatedCuda::new(&machine);
    (machine, cuda)
}

fn write(cuda: &dyn Cuda, device: i32, dst: u64, bytes: &[u8]) -> Result<()> {
    // SAFETY: a whole slice.
    unsafe { cuda.copy_to_device(device, dst, bytes.as_ptr(), bytes.len()) }
}

fn read(cuda: &dyn Cuda, device: i32, src: u64, len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    // SAFETY: a whole vector.
    unsafe { cuda.copy_from_device(device, bytes.as_mut_ptr(), src, len) }?;
    Ok(bytes)
}

fn status(error: Error) -> (&'static str, CudaStatus) {
    match error {
        Error::Cuda { call, status, .. } => (call, status),
        other => panic!("{other}"),
    }
}

#[test]
fn both_kinds_of_memory_are_aligned_and_keep_bytes_until_freed() {
    let (_machine, cuda) = machine();
    for kind in [AllocKind::Malloc, AllocKind::Vmm] {
        let addr = cuda.alloc(1, 100_000, kind).unwrap();
        let info = cuda.pointer(addr + 99_999).unwrap();
        assert!(addr.is_multiple_of(65536));
        assert!(info.base <= addr && addr + 100_000 <= info.base + info.size as u64, "{info:x?}");
        assert_eq!(info.device, 1);
        assert_eq!(info.exportable, kind == AllocKind::Vmm);
        write(&*cuda, 1, addr + 99_990, b"0123456789").unwrap();
        assert_eq!(read(&*cuda, 1, addr + 99_989, 11).unwrap(), b"\x000123456789");
        // SAFETY: nothing uses it.
        unsafe { cuda.free(addr) }.unwrap();
        assert_eq!(cuda.pointer(addr).unwrap().kind, MemoryKind::Unknown);
        // SAFETY: refused.
        assert!(matches!(unsafe { cuda.free(addr) }, Err(Error::InvalidArgument { what: "address", .. })));
    }
}

#[test]
fn a_full_gpu_is_exhausted_and_recovers() {
    let (_machine, cuda) = machine();
    let most = cuda.alloc(0, 1000 << 20, AllocKind::Vmm).unwrap();
    let error = cuda.alloc(0, 100 << 20, AllocKind::Malloc).unwrap_err();
    assert!(matches!(error, Error::Exhausted { what: "GPU memory", len: 104_857_600, .. }), "{error}");
    cuda.alloc(1, 100 << 20, AllocKind::Malloc).unwrap();
    // SAFETY: nothing uses it.
    unsafe { cuda.free(most) }.unwrap();
    cuda.alloc(0, 100 << 20, AllocKind::Malloc).unwrap();
    assert!(cuda.alloc(0, usize::MAX, AllocKind::Malloc).is_err());
    assert!(cuda.alloc(0, usize::MAX, AllocKind::Vmm).is_err());
}

#[test]
fn copies_stay_inside_their_allocations_and_gpu() {
    let (machine, cuda) = machine();
    let addr = machine.memory.lock().alloc(0, 4096, MemoryKind::Pool).unwrap();
    assert!(matches!(write(&*cuda, 1, addr, b"x"), Err(Error::InvalidArgument { what: "device", .. })));
    assert!(matches!(write(&*cuda, 0, addr - 1, b"x"), Err(Error::NotMappable { .. })));
    assert_eq!(status(write(&*cuda, 7, addr, b"x").unwrap_err()).1, CudaStatus::INVALID_DEVICE);
    assert_eq!(status(write(&*cuda, 0, addr + 4095, b"xy").unwrap_err()).1, CudaStatus::INVALID_VALUE);
    write(&*cuda, 0, addr + 4095, b"x").unwrap();
}

#[test]
fn a_copy_crosses_adjacent_mappings() {
    let (machine, cuda) = machine();
    let mut memory = machine.memory.lock();
    let (a, b) = (Object::new(0, 1 << 21).unwrap(), Object::new(0, 1 << 21).unwrap());
    memory.insert(RESERVED, 1 << 20, a.clone(), 4096, MemoryKind::Vmm);
    memory.insert(RESERVED + (1 << 20), 1 << 20, b.clone(), 0, MemoryKind::Vmm);
    drop(memory);
    write(&*cuda, 0, RESERVED + (1 << 20) - 2, b"abcd").unwrap();
    let mut two = [0; 2];
    a.read((1 << 20) + 4096 - 2, &mut two).unwrap();
    assert_eq!(&two, b"ab");
    b.read(0, &mut two).unwrap();
    assert_eq!(&two, b"cd");
    assert_eq!(read(&*cuda, 0, RESERVED + (1 << 20) - 2, 4).unwrap(), b"abcd");
}

#[test]
fn an_ipc_handle_names_the_block_and_the_place_in_it() {
    let (machine, cuda) = machine();
    let first = machine.memory.lock().alloc(0, 700, MemoryKind::Malloc).unwrap();
    let second = machine.memory.lock().alloc(0, 256, MemoryKind::Malloc).unwrap();
    let handle = cuda.ipc_handle(second).unwrap();
    let word = |at: usize| u32::from_le_bytes(handle[at..at + 4].try_into().unwrap());
    assert_eq!(u64::from_le_bytes(handle[16..24].try_into().unwrap()), 256);
    assert_eq!((word(24), word(28), word(48)), (512, 1024, CLIENT));
    let object = machine.memory.lock().object_by_handle(word(52)).unwrap();
    write(&*cuda, 0, second, b"here").unwrap();
    let mut seen = [0; 4];
    object.read(1024, &mut seen).unwrap();
    assert_eq!(&seen, b"here");
    assert_eq!(cuda.ipc_handle(first).unwrap()[52..56], handle[52..56], "the two share a block");
    assert!(cuda.ipc_handle(second + 1).is_err(), "not the beginning of an allocation");
    let pool = machine.memory.lock().alloc(0, 256, MemoryKind::Pool).unwrap();
    assert_eq!(status(cuda.ipc_handle(pool).unwrap_err()), ("cuIpcGetMemHandle", CudaStatus::INVALID_VALUE));
}

#[test]
fn handles_of_freed_objects_vanish_unless_held() {
    let (machine, cuda) = machine();
    let base = machine.memory.lock().alloc(0, 4 << 20, MemoryKind::Malloc).unwrap();
    let handle = u32::from_le_bytes(cuda.ipc_handle(base).unwrap()[52..56].try_into().unwrap());
    let held = machine.memory.lock().object_by_handle(handle).unwrap();
    machine.memory.lock().free(base).unwrap();
    assert!(machine.memory.lock().object_by_handle(handle).is_some());
    drop(held);
    assert!(machine.memory.lock().object_by_handle(handle).is_none());
}

#[test]
fn an_exported_descriptor_leads_back_to_its_object() {
    let (machine, cuda) = machine();
    let addr = cuda.alloc(0, 1, AllocKind::Vmm).unwrap();
    let other = cuda.alloc(0, 1, AllocKind::Vmm).unwrap();
    let fd = cuda.export_fd(addr + 7).unwrap();
    let memory = machine.memory.lock();
    let found = memory.object_by_fd(fd.as_fd()).unwrap().unwrap();
    assert!(Arc::ptr_eq(&found, &memory.find(addr).unwrap().object));
    assert!(!Arc::ptr_eq(&found, &memory.find(other).unwrap().object));
    let foreign = std::fs::File::open("/proc/self/exe").unwrap();
    assert!(memory.object_by_fd(foreign.as_fd()).unwrap().is_none());
    drop(memory);
    machine.memory.lock().set_exportable(addr, false);
    assert!(!cuda.pointer(addr).unwrap().exportable);
    assert_eq!(status(cuda.export_fd(addr).unwrap_err()).0, "cuMemExportToShareableHandle");
    let malloc = cuda.alloc(0, 1, AllocKind::Malloc).unwrap();
    assert_eq!(status(cuda.export_fd(malloc).unwrap_err()).0, "cuMemRetainAllocationHandle");
}

#[test]
fn a_dma_buf_knows_where_it_begins_and_holds_the_memory() {
    let (machine, cuda) = machine();
    machine.memory.lock().alloc(0, 4096, MemoryKind::Malloc).unwrap();
    let addr = machine.memory.lock().alloc(0, 10_000, MemoryKind::Malloc).unwrap();
    write(&*cuda, 0, addr, b"kept").unwrap();
    let fd = cuda.dma_buf(addr, addr, 12_288, false).unwrap();
    assert_eq!(dma_buf_offset(fd.as_fd()).unwrap(), 4096);
    let object = machine.memory.lock().find(addr).unwrap().object.clone();
    assert_eq!(dma_buf_offset(object.fd()).unwrap(), 0);
    let found = machine.memory.lock().object_by_fd(fd.as_fd()).unwrap().unwrap();
    assert!(Arc::ptr_eq(&found, &object));
    machine.memory.lock().free(addr).unwrap();
    drop((object, found));
    let mut seen = [0; 4];
    std::os::unix::fs::FileExt::read_exact_at(&std::fs::File::from(fd), &mut seen, 4096).unwrap();
    assert_eq!(&seen, b"kept");
}

#[test]
fn a_dma_buf_needs_pages_of_gpu_memory_and_a_driver_that_makes_them() {
    let (machine, cuda) = machine();
    let addr = machine.memory.lock().alloc(0, 8192, MemoryKind::Pool).unwrap();
    for (from, len) in [(addr + 512, 4096), (addr, 4095), (addr, 0), (addr, 12_288), (addr + 8192, 4096)] {
        assert_eq!(status(cuda.dma_buf(addr, from, len, true).unwrap_err()).1, CudaStatus::INVALID_VALUE);
    }
    let nothing = cuda.dma_buf(addr - 1, addr, 8192, true);
    assert!(matches!(nothing, Err(Error::NotMappable { .. })), "{nothing:?}");
    let managed = machine.memory.lock().alloc(0, 8192, MemoryKind::Managed).unwrap();
    assert!(cuda.dma_buf(managed, managed, 4096, false).is_err());
    machine.cuda.lock().attributes.insert(124, 0);
    assert_eq!(status(cuda.dma_buf(addr, addr, 8192, true).unwrap_err()).1, CudaStatus::NOT_SUPPORTED);
}

#[test]
fn each_call_fails_with_the_fault_of_the_machine() {
    let (machine, cuda) = machine();
    let addr = cuda.alloc(0, 4096, AllocKind::Vmm).unwrap();
    // A GPU that needs the flush.
    machine.cuda.lock().attributes.insert(118, 0);
    let calls: [(&str, &dyn Fn() -> Result<()>); 11] = [
        ("cuDriverGetVersion", &|| cuda.driver_version().map(drop)),
        ("cuDeviceGetCount", &|| cuda.devices().map(drop)),
        ("cuDeviceGetAttribute", &|| cuda.device_attribute(0, 124).map(drop)),
        ("cuPointerGetAttributes", &|| cuda.pointer(addr).map(drop)),
        ("cuMemRetainAllocationHandle", &|| cuda.export_fd(addr).map(drop)),
        ("cuMemExportToShareableHandle", &|| cuda.export_fd(addr).map(drop)),
        ("cuMemGetHandleForAddressRange", &|| cuda.dma_buf(addr, addr, 4096, false).map(drop)),
        ("cuMemcpyHtoDAsync", &|| write(&*cuda, 0, addr, b"x")),
        ("cuMemcpyDtoHAsync", &|| read(&*cuda, 0, addr, 1).map(drop)),
        ("cuFlushGPUDirectRDMAWrites", &|| cuda.flush(0, addr)),
        ("cuMemCreate", &|| cuda.alloc(0, 1, AllocKind::Vmm).map(drop)),
    ];
    for (name, call) in calls {
        call().unwrap();
        machine.fail(name, 719);
        assert_eq!(status(call().unwrap_err()), (name, CudaStatus::LAUNCH_FAILED));
        machine.fail(name, 0);
        call().unwrap();
    }
}

#[test]
fn settings_are_those_of_the_machine() {
    let (machine, cuda) = machine();
    assert_eq!(cuda.driver_version().unwrap(), 13000);
    machine.cuda.lock().driver_version = 13030;
    assert_eq!(cuda.driver_version().unwrap(), 13030);
    assert_eq!(status(cuda.device_attribute(0, 152).unwrap_err()).1, CudaStatus::INVALID_VALUE);
    machine.cuda.lock().attributes.insert(152, 1);
    assert_eq!(cuda.device_attribute(0, 152).unwrap(), 1);
    let gpus = cuda.devices().unwrap();
    assert_eq!((gpus.len(), gpus[1].pci.as_str()), (2, "0000:10:00.0"));
}
