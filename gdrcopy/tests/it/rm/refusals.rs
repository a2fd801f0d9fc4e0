//! What is refused, and with which words.

use std::sync::Arc;

use super::*;
use crate::rig::no_cuda;

fn text<T>(result: Result<T>) -> String {
    refusal(result).to_string()
}

#[test]
fn a_machine_without_driver_or_gpu_says_what_to_do() {
    let machine = Machine::new(1);
    let cuda = SimulatedCuda::new(&machine);
    let bare = Arc::new(SimulatedKernel::new(machine.clone()));
    let open = |system: System| Backend::rm(&system).map(drop);
    let error = text(open(System::new(bare.clone(), Some(cuda as Arc<dyn Cuda>))));
    assert!(error.contains("/dev/nvidiactl") && error.contains("nvidia-modprobe"), "{error}");
    assert!(text(open(System::new(bare, no_cuda()))).contains("CUDA"));

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
        match Backend::rm(&bench.system) {
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
    assert!(text(Backend::rm(&bench.system)).contains("coherent"));
    bench.check_clean();

    let bench = Bench::with(1, RmSettings { confidential: true, ..RmSettings::default() });
    let error = refusal(Backend::rm(&bench.system));
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("confidential"), "{error}");
    bench.check_clean();
}

#[test]
fn a_gpu_that_the_driver_does_not_list_is_refused() {
    let bench = Bench::new(1);
    for (pci, words) in
        [("0000:ff:00.0", "does not list"), ("0001:0f:00.0", "does not list"), ("15", "hexadecimal")]
    {
        bench.machine.cuda.lock().pci = Some(pci.into());
        let error = text(Backend::rm(&bench.system));
        assert!(error.contains(words), "{error}");
    }
    bench.check_clean();
}

#[test]
fn the_name_tells_a_partition_where_the_driver_does_not() {
    let settings = RmSettings { knows_partitioned: false, ..RmSettings::default() };
    let bench = Bench::with(1, settings);
    bench.open();
    bench.machine.cuda.lock().name = "NVIDIA H200 MIG 1g.18gb".into();
    assert!(text(Backend::rm(&bench.system)).contains("MIG"));
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
    for (addr, len) in [(malloc, 1001), (malloc + 999, 2), (malloc, isize::MAX.unsigned_abs())] {
        assert!(matches!(pin(&rm, addr, len), Err(Error::BeyondAllocation { .. })), "{len}");
    }
    assert!(matches!(pin(&rm, malloc, usize::MAX), Err(Error::InvalidArgument { .. })));
    let vmm = bench.vmm(0, &[2 << 20, 2 << 20]);
    for len in [(4 << 20) + 1, isize::MAX.unsigned_abs()] {
        assert!(matches!(pin(&rm, vmm, len), Err(Error::BeyondAllocation { .. })), "{len}");
    }
    // What goes on behind is memory of another GPU.
    let other = Object::new(1, 2 << 20).unwrap();
    bench.machine.memory.lock().insert(vmm + (4 << 20), 2 << 20, other, 0, MemoryKind::Vmm);
    assert!(matches!(pin(&rm, vmm, 5 << 20), Err(Error::BeyondAllocation { .. })));
    drop(rm);
    bench.check_clean();
}
