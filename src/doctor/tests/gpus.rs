//! GPUs.

use super::super::live::{Bar1, CudaFacts, attribute};
use super::super::machine::Machine;
use super::super::probe::Status::{Fail, Ok, Skip, Warn};
use super::rig::Case;

/// Sets an attribute of GPU 1.
fn set(machine: &mut Machine, number: u32, value: i32) {
    machine.cuda.facts.gpus[1].attributes.insert(number, value);
}

/// Has a GPU refuse contexts for its compute mode.
fn taken(machine: &mut Machine, gpu: usize, mode: i32) {
    let gpu = &mut machine.cuda.facts.gpus[gpu];
    gpu.attributes.insert(attribute::COMPUTE_MODE, mode);
    gpu.is_taken = true;
    for outcome in [&mut gpu.memop, &mut gpu.capture, &mut gpu.dma_buf] {
        *outcome = Some(Err("CUDA_ERROR_DEVICE_UNAVAILABLE".into()));
    }
}

pub(super) const CASES: &[Case] = &[
    Case {
        what: "no libcuda",
        change: |_, machine| {
            machine.cuda.facts.version = Some(Err("loading libcuda.so.1: no such file".into()))
        },
        says: &[("gpu.cuda", "", Fail, "libcuda.so.1", "NVIDIA_DRIVER_CAPABILITIES=compute")],
    },
    Case {
        what: "CUDA does not start",
        change: |_, machine| {
            machine.cuda.facts = CudaFacts {
                version: Some(Result::Ok(13000)),
                count: Some(Err("cuInit: 999".into())),
                gpus: Vec::new(),
            };
        },
        says: &[
            ("gpu.cuda", "", Fail, "cuInit: 999", "dmesg"),
            ("gpu.class", "", Skip, "", ""),
            ("gpu.rdma", "", Skip, "", ""),
            ("gpu.dma_buf", "", Skip, "", ""),
            ("gpu.memops", "", Skip, "", ""),
            ("gpu.flush", "", Skip, "", ""),
            ("gpu.memop_run", "", Skip, "", ""),
            ("gpu.capture", "", Skip, "", ""),
            ("gpu.uva", "", Skip, "", ""),
            ("gpu.peers", "", Skip, "", ""),
            ("gpu.bar1", "", Skip, "", ""),
            ("topology.gpu_gpu", "GPU0", Skip, "GPU1 SYS; NVML", ""),
            ("topology.gpu_gpu", "GPU1", Skip, "GPU0 SYS; NVML", ""),
        ],
    },
    Case {
        what: "CUDA hangs",
        change: |_, machine| {
            machine.cuda.facts.count = None;
            machine.cuda.trouble = Some("no answer within 4s, in cuInit".into());
        },
        says: &[("gpu.cuda", "", Fail, "in cuInit", "nvidia-smi")],
    },
    Case {
        what: "an old CUDA",
        change: |_, machine| machine.cuda.facts.version = Some(Result::Ok(11040)),
        says: &[("gpu.cuda", "", Fail, "older than 11.7", "driver 515")],
    },
    Case {
        what: "GPUs that are hidden",
        change: |_, machine| machine.cuda.facts.count = Some(Result::Ok(0)),
        says: &[("gpu.cuda", "", Warn, "0 GPU(s)", "CUDA_VISIBLE_DEVICES")],
    },
    Case {
        what: "a GPU that answers nothing",
        change: |_, machine| {
            machine.cuda.facts.gpus[1].attributes.clear();
            machine.cuda.trouble = Some("no answer within 4s".into());
        },
        says: &[("gpu.class", "GPU 1", Fail, "no answer", "Xid")],
    },
    Case {
        what: "a GPU that is too old",
        change: |_, machine| {
            set(machine, attribute::COMPUTE_MAJOR, 6);
            set(machine, attribute::COMPUTE_MINOR, 1);
        },
        says: &[("gpu.class", "GPU 1", Warn, "6.1 (Pascal): its streams cannot", "Volta")],
    },
    Case {
        what: "a GPU newer than the tables",
        change: |_, machine| set(machine, attribute::COMPUTE_MAJOR, 99),
        says: &[("gpu.class", "GPU 1", Ok, "newer than this program", "")],
    },
    Case {
        what: "no GPUDirect RDMA",
        change: |_, machine| set(machine, attribute::RDMA, 0),
        says: &[("gpu.rdma", "GPU 1", Warn, "staged", "data-centre")],
    },
    Case {
        what: "no dma-bufs",
        change: |_, machine| set(machine, attribute::DMA_BUF, 0),
        says: &[(
            "gpu.dma_buf",
            "GPU 1",
            Warn,
            "attribute 124 is 0; without nvidia-peermem too, payload is staged",
            "open kernel modules, or",
        )],
    },
    Case {
        what: "no dma-bufs and no peermem",
        change: |tree, machine| {
            set(machine, attribute::DMA_BUF, 0);
            set(machine, attribute::COMPUTE_MAJOR, 7);
            tree.remove("sys/module/nvidia_peermem");
        },
        says: &[
            ("gpu.class", "GPU 1", Ok, "Volta", ""),
            ("gpu.dma_buf", "GPU 1", Warn, "attribute 124", "do not drive this GPU"),
            (
                "modules.peermem",
                "",
                Warn,
                "stages it in pinned host memory: a copy",
                "modprobe nvidia-peermem",
            ),
        ],
    },
    Case {
        what: "a dma-buf that is claimed and refused",
        change: |_, machine| machine.cuda.facts.gpus[1].dma_buf = Some(Err("status 801".into())),
        says: &[("gpu.dma_buf", "GPU 1", Fail, "and yet: status 801", "peermem")],
    },
    Case {
        what: "no NOR waits",
        change: |_, machine| set(machine, attribute::WAIT_NOR, 0),
        says: &[("gpu.memops", "GPU 1", Fail, "no NOR waits", "Volta")],
    },
    Case {
        what: "inbound writes without order",
        change: |_, machine| set(machine, attribute::RDMA_WRITES_ORDERING, 0),
        says: &[("gpu.flush", "GPU 1", Warn, "only the CPU can flush", "host memory")],
    },
    Case {
        what: "inbound writes without order or flush",
        change: |_, machine| {
            set(machine, attribute::RDMA_WRITES_ORDERING, 0);
            set(machine, attribute::RDMA_FLUSH_OPTIONS, 0);
        },
        says: &[("gpu.flush", "GPU 1", Warn, "impossible", "newer driver")],
    },
    Case {
        what: "streams that flush",
        change: |_, machine| {
            set(machine, attribute::RDMA_WRITES_ORDERING, 0);
            set(machine, attribute::FLUSH_REMOTE_WRITES, 1);
        },
        says: &[("gpu.flush", "GPU 1", Ok, "streams flush", "")],
    },
    Case {
        what: "memory operations that do not run",
        change: |_, machine| {
            machine.cuda.facts.gpus[1].memop = Some(Err("what a stream wrote did not show".into()))
        },
        says: &[("gpu.memop_run", "GPU 1", Fail, "did not show", "host streams")],
    },
    Case {
        what: "a GPU that another process has for itself",
        change: |_, machine| taken(machine, 1, attribute::EXCLUSIVE),
        says: &[
            ("gpu.dma_buf", "GPU 1", Warn, "EXCLUSIVE_PROCESS", "try again when"),
            ("gpu.memop_run", "GPU 1", Warn, "EXCLUSIVE_PROCESS", "nvidia-smi -c DEFAULT"),
            ("gpu.capture", "GPU 1", Warn, "EXCLUSIVE_PROCESS", "try again when"),
        ],
    },
    Case {
        what: "the first GPU, had by another process",
        change: |_, machine| {
            taken(machine, 0, attribute::EXCLUSIVE);
            machine.mapping.facts.backends.iter_mut().for_each(|way| way.outcome = Err("taken".into()));
            machine.choice.facts.gpu = Some(Err("taken".into()));
        },
        says: &[
            ("gpu.dma_buf", "GPU 0", Warn, "EXCLUSIVE_PROCESS", ""),
            ("gpu.memop_run", "GPU 0", Warn, "EXCLUSIVE_PROCESS", ""),
            ("gpu.capture", "GPU 0", Warn, "EXCLUSIVE_PROCESS", ""),
            ("mapping.gdrdrv", "", Skip, "see gpu.memop_run", ""),
            ("mapping.dmabuf", "", Skip, "see gpu.memop_run", ""),
            ("mapping.rm", "", Skip, "see gpu.memop_run", ""),
            ("mapping.any", "", Skip, "see gpu.memop_run", ""),
            ("choice.streams", "", Warn, "may not be used now: taken", "another GPU"),
            ("choice.faster", "", Ok, "a thread triggers now", "gpu.cuda"),
        ],
    },
    Case {
        what: "a GPU that nobody may use",
        change: |_, machine| taken(machine, 1, attribute::PROHIBITED),
        says: &[
            ("gpu.dma_buf", "GPU 1", Fail, "PROHIBITED", "nvidia-smi -c DEFAULT"),
            ("gpu.memop_run", "GPU 1", Fail, "PROHIBITED", "nvidia-smi -c DEFAULT"),
            ("gpu.capture", "GPU 1", Fail, "PROHIBITED", "nvidia-smi -c DEFAULT"),
        ],
    },
    Case {
        what: "a capture that is refused",
        change: |_, machine| machine.cuda.facts.gpus[1].capture = Some(Err("status 900".into())),
        says: &[("gpu.capture", "GPU 1", Fail, "status 900", "CUDA 12")],
    },
    Case {
        what: "a probe that was killed before the capture",
        change: |_, machine| {
            machine.cuda.facts.gpus[1].capture = None;
            machine.cuda.trouble = Some("killed by signal 11, in capturing".into());
        },
        says: &[("gpu.capture", "GPU 1", Fail, "signal 11", "CUDA 12")],
    },
    Case {
        what: "two address spaces",
        change: |_, machine| set(machine, attribute::UNIFIED_ADDRESSING, 0),
        says: &[("gpu.uva", "GPU 1", Fail, "of their own", "64-bit")],
    },
    Case {
        what: "GPUs that do not reach each other",
        change: |_, machine| machine.cuda.facts.gpus[1].peers = [(0, false)].into(),
        says: &[("gpu.peers", "GPU 1", Warn, "does not reach GPU 0", "topo -p2p")],
    },
    Case {
        what: "a GPU alone",
        change: |_, machine| machine.cuda.facts.gpus[1].peers.clear(),
        says: &[("gpu.peers", "GPU 1", Skip, "no other GPU", "")],
    },
    Case {
        what: "BAR1 that is used up",
        change: |_, machine| {
            let bar1 = Bar1 { total: 256 << 30, free: 1 << 20, used: (256 << 30) - (1 << 20) };
            machine.cuda.facts.gpus[1].bar1 = Some(Result::Ok(bar1));
        },
        says: &[("gpu.bar1", "GPU 1", Fail, "1 MiB free", "end processes")],
    },
    Case {
        what: "a small BAR1",
        change: |_, machine| {
            let bar1 = Bar1 { total: 256 << 20, free: 250 << 20, used: 6 << 20 };
            machine.cuda.facts.gpus[1].bar1 = Some(Result::Ok(bar1));
        },
        says: &[("gpu.bar1", "GPU 1", Warn, "256 MiB in all", "resizable BAR")],
    },
    Case {
        what: "no NVML",
        change: |_, machine| machine.cuda.facts.gpus[1].bar1 = Some(Err("NVML is not here".into())),
        says: &[("gpu.bar1", "GPU 1", Ok, "256 GiB in all; used and free are not known", "")],
    },
    Case {
        what: "no NVML and no resources",
        change: |tree, machine| {
            machine.cuda.facts.gpus[1].bar1 = Some(Err("NVML is not here".into()));
            tree.remove("sys/bus/pci/devices/0000:83:00.0/resource");
        },
        says: &[("gpu.bar1", "GPU 1", Skip, "not known", "")],
    },
];
