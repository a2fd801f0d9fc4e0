//! What is refused, and with which words.

use std::sync::Arc;

use super::*;
use crate::backend::rm::handle::Block;
use crate::cuda::{GpuInfo, PointerInfo};

fn text<T>(result: Result<T>) -> String {
    refusal(result).to_string()
}

#[test]
fn a_machine_without_driver_or_gpu_says_what_to_do() {
    let machine = Machine::new(1);
    let cuda = SimulatedCuda::new(&machine);
    let bare = Arc::new(SimulatedKernel::new(machine.clone()));
    let open = |system: System| Rm::open(&system).map(drop);
    let error = text(open(System::simulated(bare.clone(), Some(cuda))));
    assert!(error.contains("/dev/nvidiactl") && error.contains("nvidia-modprobe"), "{error}");
    assert!(text(open(System::simulated(bare, None))).contains("CUDA"));

    let none = Bench::new(0);
    assert!(text(open(none.system.clone())).contains("CUDA_VISIBLE_DEVICES"));
    none.check_clean();

    let bench = Bench::new(1);
    for (node, fix) in [("/dev/nvidiactl", "permission"), ("/dev/nvidia0", "permission")] {
        bench.machine.fail(&format!("open {node}"), libc::EACCES);
        let error = text(open(bench.system.clone()));
        assert!(error.contains(node) && error.contains(fix), "{error}");
        bench.machine.fail(&format!("open {node}"), 0);
    }
    bench.check_clean();
}

#[test]
fn partitioned_gpus_are_refused() {
    for knows_partitioned in [true, false] {
        let settings = RmSettings { partitioned: true, knows_partitioned, ..RmSettings::default() };
        let bench = Bench::with(1, settings);
        match Rm::open(&bench.system) {
            Err(error) => assert!(knows_partitioned && error.to_string().contains("MIG"), "{error}"),
            // The simulated CUDA does not name the instance; a real one does, see below.
            Ok(_) => assert!(!knows_partitioned),
        }
        bench.check_clean();
    }
}

#[test]
fn coherent_and_confidential_gpus_are_refused() {
    let bench = Bench::new(1);
    bench.machine.cuda.lock().attributes.insert(100, 1);
    assert!(text(Rm::open(&bench.system)).contains("coherent"));
    bench.check_clean();

    let bench = Bench::with(1, RmSettings { confidential: true, ..RmSettings::default() });
    let error = refusal(Rm::open(&bench.system));
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("confidential"), "{error}");
    bench.check_clean();
}

#[test]
fn a_gpu_that_the_driver_does_not_list_is_refused() {
    let bench = Bench::new(1);
    let client = super::super::Client::open(bench.system.kernel.clone()).unwrap();
    for (pci, words) in
        [("0000:ff:00.0", "does not list"), ("0001:0f:00.0", "does not list"), ("15", "hexadecimal")]
    {
        let info = GpuInfo { ordinal: 0, pci: pci.into(), name: "GPU".into() };
        let error = text(super::super::Gpu::open(&client, &*bench.cuda, &info));
        assert!(error.contains(words), "{error}");
    }
    drop(client);
    bench.check_clean();
}

#[test]
fn the_name_tells_a_partition_where_the_driver_does_not() {
    let settings = RmSettings { knows_partitioned: false, ..RmSettings::default() };
    let bench = Bench::with(1, settings);
    let client = super::super::Client::open(bench.system.kernel.clone()).unwrap();
    let pci = crate::standin::pci(0);
    let open = |name: &str| {
        let info = GpuInfo { ordinal: 0, pci: pci.clone(), name: name.into() };
        super::super::Gpu::open(&client, &*bench.cuda, &info)
    };
    open("NVIDIA H200").unwrap();
    assert!(text(open("NVIDIA H200 MIG 1g.18gb")).contains("MIG"));
    drop(client);
    bench.check_clean();
}

#[test]
fn memory_without_a_handle_is_refused_by_kind() {
    let bench = Bench::new(1);
    let rm = bench.open();
    let words = [
        (MemoryKind::Pool, "stream-ordered pool"),
        (MemoryKind::Managed, "managed"),
        (MemoryKind::Host, "host memory"),
    ];
    for (kind, words) in words {
        let addr = bench.machine.memory.lock().alloc(0, 4096, kind).unwrap();
        let error = text(pin(&rm, addr, 16));
        assert!(error.contains(words), "{error}");
    }
    assert!(text(pin(&rm, RESERVED - 4096, 16)).contains("no CUDA memory"));

    let vmm = bench.alloc(0, 2 << 20, MemoryKind::Vmm);
    bench.machine.memory.lock().set_exportable(vmm, false);
    let error = text(pin(&rm, vmm, 16));
    assert!(error.contains("CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"), "{error}");
    drop(rm);
    bench.check_clean();
}

#[test]
fn ranges_beyond_their_memory_are_refused() {
    let bench = Bench::new(2);
    let rm = bench.open();
    let malloc = bench.alloc(0, 1000, MemoryKind::Malloc);
    assert!(matches!(pin(&rm, malloc, 0), Err(Error::InvalidArgument { .. })));
    for (addr, len) in [(malloc, 1001), (malloc + 999, 2), (malloc, usize::MAX)] {
        assert!(matches!(pin(&rm, addr, len), Err(Error::BeyondAllocation { .. })), "{len}");
    }
    let vmm = bench.vmm(0, &[2 << 20, 2 << 20]);
    for len in [(4 << 20) + 1, usize::MAX] {
        assert!(matches!(pin(&rm, vmm, len), Err(Error::BeyondAllocation { .. })), "{len}");
    }
    // What goes on behind is memory of another GPU.
    let other = Object::new(1, 2 << 20).unwrap();
    bench.machine.memory.lock().insert(vmm + (4 << 20), 2 << 20, other, 0, MemoryKind::Vmm);
    assert!(matches!(pin(&rm, vmm, 5 << 20), Err(Error::BeyondAllocation { .. })));
    drop(rm);
    bench.check_clean();
}

/// A handle as an H200 gives it, and what CUDA says of the same memory.
fn handle() -> ([u8; 64], PointerInfo) {
    let mut handle = [0; 64];
    handle[16..24].copy_from_slice(&1000u64.to_le_bytes());
    handle[24..28].copy_from_slice(&512u32.to_le_bytes());
    handle[28..32].copy_from_slice(&0x1200u32.to_le_bytes());
    handle[48..52].copy_from_slice(&0xc1d0_0042u32.to_le_bytes());
    handle[52..56].copy_from_slice(&0x5c00_0009u32.to_le_bytes());
    let memory = PointerInfo {
        kind: MemoryKind::Malloc,
        device: 0,
        base: 0x7f00_0020_1200,
        size: 1000,
        buffer_id: 5,
        exportable: false,
    };
    (handle, memory)
}

#[test]
fn a_handle_names_the_block() {
    let (handle, memory) = handle();
    let block = Block::from_ipc(&handle, &memory).unwrap();
    let wanted = Block { client: 0xc1d0_0042, object: 0x5c00_0009, base: 0x7f00_0020_0000, size: 2 << 20 };
    assert_eq!(block, wanted);
}

#[test]
fn a_handle_that_disagrees_with_cuda_is_refused() {
    let (good, memory) = handle();
    let changed: [(usize, u32, &str); 9] = [
        (48, 0xc1e0_0042, "no client"),
        (48, 0, "no client"),
        (52, 0, "no object"),
        (16, 999, "size"),
        (20, 1, "size"),
        (24, 0, "size"),
        (24, 1, "inside its block"),
        (28, 0x1300, "GPU page"),
        (28, (2 << 20) - 500, "inside its block"),
    ];
    for (at, value, words) in changed {
        let mut handle = good;
        handle[at..at + 4].copy_from_slice(&value.to_le_bytes());
        let error = text(Block::from_ipc(&handle, &memory));
        assert!(error.contains(words) && error.contains("differently"), "{at} {value:#x}: {error}");
    }
    // Any other layout: the same numbers elsewhere.
    for turn in [4, 8, 16, 32] {
        let mut handle = good;
        handle.rotate_left(turn);
        assert!(Block::from_ipc(&handle, &memory).is_err(), "{turn}");
    }
}
