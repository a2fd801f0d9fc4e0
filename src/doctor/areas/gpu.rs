//! GPUs: what CUDA says that they do, and whether they do it.

use super::super::live::{Bar1, GpuFacts, Live, attribute};
use super::super::machine::Machine;
use super::super::requirements::{self, CUDA};
use super::{Area, Check, Probe, bytes};

area! {
    GPU_AREA "gpu" "GPUs" asks [Live::Cuda] probes by probe_gpu;
    INIT "gpu.cuda" tried "loading libcuda.so.1, cuDriverGetVersion, cuInit, cuDeviceGetCount",
        why "streams of GPUs, and memory on them, come from CUDA; without it host streams do the same in a thread";
    CLASS "gpu.class" tried "name and compute capability",
        why "what a GPU can do for streams and for RDMA depends on its generation";
    RDMA "gpu.rdma" tried "attributes 116 (GPUDirect RDMA) and 110 (also with cuMemCreate)",
        why "with GPUDirect RDMA a network card reads and writes GPU memory itself; without it payload is staged";
    DMA_BUF "gpu.dma_buf" tried "attribute 124, and cuMemGetHandleForAddressRange of 2 MiB",
        why "RDMA devices register GPU memory by a dma-buf, without a module of NVIDIA's";
    MEMOPS "gpu.memops" tried "attributes 122 (64-bit operations) and 123 (NOR waits)",
        why "64-bit writes ring doorbells, and NOR waits also end when a completion is an error";
    FLUSH "gpu.flush" tried "attributes 118 (ordering of inbound writes), 117 (ways to flush) and 98 (flush on a stream)",
        why "a completion says that data was sent to GPU memory; whether the GPU sees it then follows from these";
    MEMOP "gpu.memop_run" tried "cuStreamBatchMemOp on a new stream: write, wait for the CPU, write",
        why "these operations trigger sends and await completions; an attribute does not tell whether they run here";
    CAPTURE "gpu.capture" tried "the same operations captured into a graph, which is launched",
        why "CUDA graphs of sends and waits need operations that can be captured";
    PEERS "gpu.peers" tried "cuDeviceCanAccessPeer to each other GPU",
        why "payload between GPUs that reach each other (NVLink, PCIe) is moved by a copy engine, without the host";
    BAR1 "gpu.bar1" tried "nvmlDeviceGetBAR1MemoryInfo, else the PCI resources in sysfs",
        why "cards and CPUs reach GPU memory through this window: what is registered or mapped at once has to fit";
}

/// The result where the compute mode of the GPU keeps this process from using it.
pub(super) fn taken(check: &Check, gpu: &GpuFacts) -> Option<Probe> {
    let fix = "`nvidia-smi -c DEFAULT` as root lets all processes use it";
    match gpu.attribute(attribute::COMPUTE_MODE) {
        _ if !gpu.is_taken => None,
        attribute::PROHIBITED => {
            Some(check.fail("not tried: its compute mode PROHIBITED lets nobody use it", fix))
        }
        _ => Some(check.warn(
            "not tried: its compute mode EXCLUSIVE_PROCESS lets one process use it, which is another one now",
            format!("try again when that one has ended (`nvidia-smi` names it); {fix}"),
        )),
    }
}

/// BAR1 with less left is about to fail.
const SMALL: u64 = 64 << 20;

fn probe_gpu(machine: &Machine) -> Vec<Probe> {
    let mut probes = vec![init(machine)];
    let gpus = &machine.cuda.facts.gpus;
    if gpus.is_empty() {
        probes.extend(GPU_AREA.checks[1..].iter().map(|check| check.skip("no GPU that CUDA shows")));
    }
    for gpu in gpus {
        let trouble = machine.cuda.trouble.as_deref().unwrap_or("not come to");
        let of = |probe: Probe| probe.about(format!("GPU {}", gpu.ordinal));
        if gpu.attributes.is_empty() {
            let fix = "try again with `--timeout 60`; look into `dmesg` for messages of NVRM (Xid)";
            probes.push(of(CLASS.fail(format!("CUDA told nothing of it: {trouble}"), fix)));
            continue;
        }
        let told = [class(gpu), rdma(machine, gpu), dma_buf(machine, gpu, trouble), memops(gpu)];
        let memop = trial(&MEMOP, gpu, gpu.memop.as_ref(), trouble, BUSY);
        let capture = trial(&CAPTURE, gpu, gpu.capture.as_ref(), trouble, NO_CAPTURE);
        let tried = [flush(machine, gpu), memop, capture, peers(gpu), bar1(machine, gpu)];
        probes.extend(told.into_iter().chain(tried).map(of));
    }
    probes
}

fn init(machine: &Machine) -> Probe {
    let facts = &machine.cuda.facts;
    let trouble = |what: &str| {
        let fix = "look whether `nvidia-smi` answers, and into `dmesg` for messages of NVRM (Xid); try again with `--timeout 60`";
        INIT.fail(what.to_owned(), fix)
    };
    match (&facts.version, &facts.count, &machine.cuda.trouble) {
        (Some(Err(why)), ..) if machine.has_driver() => INIT.fail(
            why.as_str(),
            "install the user part of the driver (libcuda1, nvidia-driver-cuda-libs); a container gets it by \
             `--gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility`",
        ),
        (Some(Err(_)), ..) if machine.gpus().is_empty() => INIT.skip("no NVIDIA GPU, and no CUDA"),
        (Some(Err(why)), ..) => INIT.skip(format!("no CUDA: {why}")),
        (_, Some(Err(why)), _) if machine.has_driver() => INIT.fail(
            why.as_str(),
            "compare the versions of libcuda and of the kernel driver (`nvidia-smi` names both), and look into `dmesg` \
             for messages of NVRM",
        ),
        (_, Some(Err(why)), _) => INIT.skip(format!("libcuda is here, and no driver below it: {why}")),
        (_, None, Some(why)) => trouble(why),
        (Some(Ok(version)), Some(Ok(count)), _) => {
            let (major, minor) = (version / 1000, version % 1000 / 10);
            let found = format!("CUDA {major}.{minor}, {count} GPU(s)");
            match count {
                _ if !CUDA.is_met((major, minor)) => INIT.fail(
                    format!("{found}: older than {}, so no {}", CUDA.least(), CUDA.for_what()),
                    format!("install driver {} or newer", requirements::DRIVER.least()),
                ),
                0 => INIT.warn(found, "look at CUDA_VISIBLE_DEVICES, and start a container with `--gpus all`"),
                _ => INIT.ok(found),
            }
        }
        _ => trouble("CUDA was not asked"),
    }
}

fn class(gpu: &GpuFacts) -> Probe {
    let (major, minor) = gpu.compute();
    let known = requirements::generation((major, minor));
    let name = known.map_or("a generation newer than this program", |one| one.name);
    let found = format!("{} at {}, compute capability {major}.{minor} ({name})", gpu.name, gpu.pci);
    match known {
        Some(one) if !one.triggers => CLASS.warn(
            format!("{found}: its streams cannot trigger sends"),
            "use a GPU of Volta or newer, or host streams (`--stream host`)",
        ),
        _ => CLASS.ok(found),
    }
}

fn rdma(machine: &Machine, gpu: &GpuFacts) -> Probe {
    let (plain, vmm) = (gpu.attribute(attribute::RDMA), gpu.attribute(attribute::RDMA_WITH_VMM));
    match (plain != 0, vmm != 0) {
        (true, true) => RDMA.ok("yes, also for memory of cuMemCreate"),
        (true, false) => RDMA.ok("yes, for memory of cudaMalloc only"),
        (false, _) if machine.hcas().is_empty() => RDMA.ok("no; there is no RDMA device that would use it"),
        (false, _) => RDMA.warn(
            "no: payload in its memory is staged in pinned host memory by the CPU proxy, which costs a copy before and after each \
             message",
            "use a data-centre or RTX professional GPU; drivers of GeForce cards do not offer it",
        ),
    }
}

fn dma_buf(machine: &Machine, gpu: &GpuFacts, trouble: &str) -> Probe {
    let claims = gpu.attribute(attribute::DMA_BUF) != 0;
    let has_modules = requirements::generation(gpu.compute()).is_none_or(|one| one.open_modules);
    let fix = match has_modules {
        true => "install the open kernel modules, or load nvidia-peermem",
        false => "load nvidia-peermem: the open kernel modules do not drive this GPU",
    };
    if let Some(probe) = taken(&DMA_BUF, gpu).filter(|_| claims) {
        return probe;
    }
    match (claims, &gpu.dma_buf) {
        (false, _) if machine.hcas().is_empty() => {
            DMA_BUF.ok("no; there is no RDMA device that would register one")
        }
        (false, _) => DMA_BUF.warn(
            "no: attribute 124 is 0; without nvidia-peermem too, payload is staged by the CPU proxy",
            fix,
        ),
        (true, Some(Ok(found))) => DMA_BUF.ok(found.as_str()),
        (true, Some(Err(why))) => DMA_BUF.fail(format!("attribute 124 is 1, and yet: {why}"), fix),
        (true, None) => DMA_BUF.fail(format!("attribute 124 is 1; not tried: {trouble}"), fix),
    }
}

fn memops(gpu: &GpuFacts) -> Probe {
    let missing: Vec<_> = [(attribute::MEMOPS_64, "64-bit operations"), (attribute::WAIT_NOR, "NOR waits")]
        .into_iter()
        .filter_map(|(number, what)| (gpu.attribute(number) == 0).then_some(what))
        .collect();
    if missing.is_empty() {
        return MEMOPS.ok("64-bit operations and NOR waits");
    }
    let fix = "use a GPU of Volta or newer with a driver of CUDA 11.7 or newer, or host streams";
    MEMOPS.fail(format!("no {}", missing.join(", no ")), fix)
}

fn flush(machine: &Machine, gpu: &GpuFacts) -> Probe {
    let ordering = gpu.attribute(attribute::RDMA_WRITES_ORDERING);
    let options = gpu.attribute(attribute::RDMA_FLUSH_OPTIONS);
    let on_stream = gpu.attribute(attribute::FLUSH_REMOTE_WRITES) != 0 || options & 2 != 0;
    let values = format!(
        "ordering {ordering}, flush options {options}, on a stream {}",
        if on_stream { "yes" } else { "no" }
    );
    match () {
        () if ordering >= 100 => FLUSH.ok(format!("none needed: inbound writes come in order ({values})")),
        () if on_stream => FLUSH.ok(format!("streams flush ({values})")),
        () if machine.hcas().is_empty() => FLUSH.ok(format!("streams cannot ({values}); there is no RDMA device")),
        () if options & 1 != 0 => FLUSH.warn(
            format!("only the CPU can flush ({values}), so it takes part in every receive into GPU memory"),
            "receive into host memory, or use a GPU whose inbound writes are ordered (Volta and newer on x86)",
        ),
        () => FLUSH.warn(
            format!("impossible ({values}): streams may read stale data"),
            "receive into host memory, or install a newer driver",
        ),
    }
}

fn trial(
    check: &Check,
    gpu: &GpuFacts,
    outcome: Option<&Result<String, String>>,
    trouble: &str,
    fix: &str,
) -> Probe {
    if let Some(probe) = taken(check, gpu) {
        return probe;
    }
    match outcome {
        Some(Ok(found)) => check.ok(found.as_str()),
        Some(Err(why)) => check.fail(why.as_str(), fix),
        None => check.fail(format!("not done: {trouble}"), fix),
    }
}

const BUSY: &str = "see whether another process keeps the GPU busy (`nvidia-smi`), and `dmesg` for Xid; host streams work without";
const NO_CAPTURE: &str =
    "install a driver of CUDA 12 or newer; without capture, submit eagerly (`stream.submit`)";

fn peers(gpu: &GpuFacts) -> Probe {
    let list = |wanted: bool| {
        let of = gpu.peers.iter().filter(|(_, can)| **can == wanted).map(|(other, _)| format!("GPU {other}"));
        of.collect::<Vec<_>>().join(", ")
    };
    match (list(true), list(false)) {
        (yes, no) if yes.is_empty() && no.is_empty() => PEERS.skip("no other GPU"),
        (yes, no) if no.is_empty() => PEERS.ok(format!("reaches {yes}")),
        (yes, no) => PEERS.warn(
            format!("does not reach {no}{}", if yes.is_empty() { String::new() } else { format!("; reaches {yes}") }),
            "payload between them goes through the host; `nvidia-smi topo -p2p r` says why: NVLink, one host bridge, or a \
             driver that allows PCIe peer-to-peer is needed",
        ),
    }
}

fn bar1(machine: &Machine, gpu: &GpuFacts) -> Probe {
    let told = gpu.bar1.clone().unwrap_or_else(|| Err("NVML was not come to".into()));
    let fix =
        "switch on resizable BAR and decoding above 4G in the firmware, or keep registered regions small";
    let (total, free, found) = match told {
        Ok(Bar1 { total, free, used }) => {
            let found = format!("{} in all, {} used, {} free", bytes(total), bytes(used), bytes(free));
            (total, free, found)
        }
        Err(why) => match largest_window(machine, &gpu.pci) {
            Some(total) => {
                (total, total, format!("{} in all; used and free are not known: {why}", bytes(total)))
            }
            None => return BAR1.skip(format!("not known: {why}; sysfs has no resources of {}", gpu.pci)),
        },
    };
    match () {
        () if free < SMALL => BAR1.fail(
            format!("{found}: registrations and mappings will fail"),
            "end processes that map or register GPU memory, or reset the GPU when nobody uses it",
        ),
        () if gpu.memory.is_some_and(|memory| total < memory) => {
            let memory = gpu.memory.map(bytes).unwrap_or_default();
            BAR1.warn(format!("{found}, of {memory} of memory: not all of it can be reached at once"), fix)
        }
        () => BAR1.ok(found),
    }
}

/// The largest of its memory windows: BAR1 is.
fn largest_window(machine: &Machine, pci: &str) -> Option<u64> {
    let text = machine.system.text(&format!("{}/resource", machine.system.pci(pci)))?;
    let hex = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok();
    let size = |line: &str| {
        let mut words = line.split_whitespace();
        let (start, end) = (hex(words.next()?)?, hex(words.next()?)?);
        (end > start).then(|| end - start + 1)
    };
    text.lines().take(6).filter_map(size).max()
}
