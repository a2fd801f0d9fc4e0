//! What CUDA says of each GPU, and what happens when it is tried.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::time::Duration;

use gdrcopy::cuda::raw::{Api, Current};
use gdrcopy::cuda::{AllocKind, Cuda, CudaSource, EntryPoints, GpuInfo};
use gdsync::cuda::Gpu;
use gdsync::memory::{Memory, Word64};
use gdsync::stream::{Batch, Cond, CudaStreamConfig, Stream, Via};
use serde::{Deserialize, Serialize};

use super::{Reporter, is_taken, retain};
use crate::measure::poll;
use crate::nvml::{Bar1, Nvml};
use crate::results;

/// What a GPU may take for a few stream memory operations. Idle ones take microseconds.
const PATIENCE: Duration = Duration::from_millis(1500);

/// The outcome of a trial: what was seen, or the error.
pub(in crate::doctor) type Outcome = Result<String, String>;

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(in crate::doctor) struct CudaFacts {
    /// `1000 * major + 10 * minor`, or why there is no `libcuda`.
    pub(in crate::doctor) version: Option<Result<u32, String>>,
    /// The number of GPUs, or why CUDA does not start.
    pub(in crate::doctor) count: Option<Result<usize, String>>,
    pub(in crate::doctor) gpus: Vec<GpuFacts>,
}

/// One GPU. `None`: not reached.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(in crate::doctor) struct GpuFacts {
    pub(in crate::doctor) ordinal: i32,
    pub(in crate::doctor) name: String,
    /// As sysfs writes it.
    pub(in crate::doctor) pci: String,
    /// Those up to the last of [`attribute`] that the driver knows.
    pub(in crate::doctor) attributes: BTreeMap<u32, i32>,
    pub(in crate::doctor) memory: Option<u64>,
    /// Whether it can use the memory of another GPU, by ordinal.
    pub(in crate::doctor) peers: BTreeMap<i32, bool>,
    /// Whether NVLink joins it to another GPU, by PCI address; GPUs that NVML did not answer for are missing.
    pub(in crate::doctor) nvlinks: BTreeMap<String, bool>,
    /// Its compute mode keeps this process out: nothing was tried.
    pub(in crate::doctor) is_taken: bool,
    pub(in crate::doctor) memop: Option<Outcome>,
    pub(in crate::doctor) capture: Option<Outcome>,
    pub(in crate::doctor) dma_buf: Option<Outcome>,
    pub(in crate::doctor) bar1: Option<Result<Bar1, String>>,
}

/// `CU_DEVICE_ATTRIBUTE_*`.
pub(in crate::doctor) mod attribute {
    pub(in crate::doctor) const COMPUTE_MODE: u32 = 20;
    pub(in crate::doctor) const COMPUTE_MAJOR: u32 = 75;
    pub(in crate::doctor) const COMPUTE_MINOR: u32 = 76;
    pub(in crate::doctor) const FLUSH_REMOTE_WRITES: u32 = 98;
    pub(in crate::doctor) const RDMA_WITH_VMM: u32 = 110;
    pub(in crate::doctor) const RDMA: u32 = 116;
    pub(in crate::doctor) const RDMA_FLUSH_OPTIONS: u32 = 117;
    pub(in crate::doctor) const RDMA_WRITES_ORDERING: u32 = 118;
    pub(in crate::doctor) const MEMOPS_64: u32 = 122;
    pub(in crate::doctor) const WAIT_NOR: u32 = 123;
    pub(in crate::doctor) const DMA_BUF: u32 = 124;

    /// Of [`COMPUTE_MODE`]: `CU_COMPUTEMODE_PROHIBITED`, `CU_COMPUTEMODE_EXCLUSIVE_PROCESS`.
    pub(in crate::doctor) const PROHIBITED: i32 = 2;
    #[cfg(test)]
    pub(in crate::doctor) const EXCLUSIVE: i32 = 3;
}

impl CudaFacts {
    /// The GPU that is looked at.
    fn last(&mut self) -> &mut GpuFacts {
        self.gpus.last_mut().expect("a GPU was added before")
    }
}

impl GpuFacts {
    /// An attribute; 0 where the driver does not know it.
    pub(in crate::doctor) fn attribute(&self, number: u32) -> i32 {
        self.attributes.get(&number).copied().unwrap_or(0)
    }

    /// Compute capability.
    pub(in crate::doctor) fn compute(&self) -> (u32, u32) {
        let number = |attribute| u32::try_from(self.attribute(attribute)).unwrap_or(0);
        (number(attribute::COMPUTE_MAJOR), number(attribute::COMPUTE_MINOR))
    }
}

pub(super) fn probe(reporter: &Reporter) {
    reporter.step("loading libcuda.so.1");
    match Api::load() {
        Ok(api) => drop(explore(&api, reporter, PATIENCE)),
        Err(error) => {
            reporter.facts(&CudaFacts { version: Some(Err(error.to_string())), ..CudaFacts::default() })
        }
    }
}

/// Asks and tries everything.
pub(in crate::doctor) fn explore(api: &Api, reporter: &Reporter, patience: Duration) -> CudaFacts {
    // SAFETY: the entry points are those of the driver, or of a test's.
    let driver = unsafe { EntryPoints::new(*api) };
    let mut facts = CudaFacts { version: Some(driver.version().map_err(text)), ..CudaFacts::default() };
    reporter.facts(&facts);
    reporter.step("cuInit");
    let cuda = driver.initialise().and_then(|cuda| Ok((cuda.devices()?, cuda)));
    facts.count = Some(cuda.as_ref().map(|(gpus, _)| gpus.len()).map_err(text));
    reporter.facts(&facts);
    let Ok((gpus, cuda)) = cuda else { return facts };
    reporter.step("loading NVML");
    let nvml = Nvml::load();
    for gpu in &gpus {
        let GpuInfo { ordinal, name, pci } = gpu.clone();
        facts.gpus.push(GpuFacts { ordinal, name, pci, ..GpuFacts::default() });
        reporter.step(format!("asking what GPU {ordinal} can do"));
        let told = describe(api, &*cuda, facts.last(), &gpus, &nvml);
        reporter.facts(&facts);
        let tried = told.and_then(|device| attempt(api, &*cuda, reporter, &mut facts, device, patience));
        if let Err(error) = tried {
            let gpu = facts.last();
            gpu.is_taken = is_taken(&error);
            // No context, so nothing was tried: each trial gets this error.
            let error = text(error);
            for outcome in [&mut gpu.memop, &mut gpu.capture, &mut gpu.dma_buf] {
                outcome.get_or_insert_with(|| Err(error.clone()));
            }
        }
        reporter.facts(&facts);
    }
    // Giving contexts back may wait for a GPU that hangs.
    std::mem::forget(cuda);
    facts
}

fn text(error: impl Display) -> String {
    error.to_string()
}

fn handle(api: &Api, ordinal: i32) -> gdrcopy::Result<i32> {
    let mut device = 0;
    // SAFETY: a place for the answer; the driver checks the ordinal.
    unsafe { api.device_get(&mut device, ordinal) }.map(|()| device)
}

/// Asks what a GPU can do, alone and with the others, and gives its handle.
fn describe(
    api: &Api,
    cuda: &dyn Cuda,
    gpu: &mut GpuFacts,
    all: &[GpuInfo],
    nvml: &Result<Nvml, String>,
) -> gdrcopy::Result<i32> {
    let device = handle(api, gpu.ordinal)?;
    let ask = |number| Some((number, cuda.device_attribute(gpu.ordinal, number).ok()?));
    gpu.attributes = (1..=attribute::DMA_BUF).filter_map(ask).collect();
    for GpuInfo { ordinal, pci, .. } in all.iter().filter(|other| other.ordinal != gpu.ordinal) {
        let (peer, mut can) = (handle(api, *ordinal)?, 0);
        // SAFETY: a place for the answer, and devices of this driver.
        unsafe { api.device_can_access_peer(&mut can, device, peer) }?;
        gpu.peers.insert(*ordinal, can != 0);
        let joined = nvml.as_ref().ok().and_then(|nvml| nvml.nvlink(&gpu.pci, pci).ok());
        gpu.nvlinks.extend(joined.map(|joined| (pci.clone(), joined)));
    }
    gpu.bar1 = Some(nvml.clone().and_then(|nvml| nvml.bar1(&gpu.pci)));
    Ok(device)
}

/// Tries on the last GPU what streams and RDMA devices need of it.
fn attempt(
    api: &Api,
    cuda: &dyn Cuda,
    reporter: &Reporter,
    facts: &mut CudaFacts,
    device: i32,
    patience: Duration,
) -> gdrcopy::Result<()> {
    let number = facts.last().ordinal;
    reporter.step(format!("making a context on GPU {number}"));
    let context = retain(api, device)?;
    // SAFETY: retained above.
    let _current = unsafe { Current::enter(api, context) }?;
    let (mut free, mut total) = (0, 0);
    // SAFETY: places for the answers; a context is current.
    facts.last().memory = unsafe { api.mem_get_info(&mut free, &mut total) }.is_ok().then_some(total as u64);
    reporter.step(format!("running stream memory operations on GPU {number}"));
    let bench = Bench::new(api, number, patience).map_err(text);
    let ran = bench.as_ref().map_err(Clone::clone).and_then(|bench| bench.run().map_err(text));
    // A stuck stream would block the calls that follow.
    let stuck = || Err("not tried, for the stream does not run".into());
    let running = bench.as_ref().ok().filter(|_| ran.is_ok());
    facts.last().memop = Some(ran);
    reporter.facts(facts);
    reporter.step(format!("capturing stream memory operations on GPU {number}"));
    facts.last().capture = Some(running.map_or_else(stuck, |bench| bench.capture().map_err(text)));
    reporter.facts(facts);
    reporter.step(format!("exporting memory of GPU {number} as a dma-buf"));
    facts.last().dma_buf = Some(running.map_or_else(stuck, |_| dma_buf(cuda, number).map_err(text)));
    if running.is_none() {
        // Giving a stream back may wait for a GPU that hangs.
        std::mem::forget(bench);
    }
    Ok(())
}

/// Exports one allocation.
fn dma_buf(cuda: &dyn Cuda, ordinal: i32) -> gdrcopy::Result<String> {
    const LEN: usize = 2 << 20;
    let addr = cuda.alloc(ordinal, LEN, AllocKind::Malloc)?;
    let exported = cuda.dma_buf(addr, addr, LEN, false);
    // SAFETY: allocated above; no stream uses it.
    unsafe { cuda.free(addr) }?;
    exported.map(|_| "2 MiB of its memory exported".into())
}

/// A stream, and three words that it and the CPU share.
struct Bench {
    stream: Stream,
    words: [Word64; 3],
    /// What the GPU may take for a few operations.
    patience: Duration,
}

const HASTY: &str = "the stream passed a wait that was not satisfied";

impl Bench {
    fn new(api: &Api, ordinal: i32, patience: Duration) -> gdsync::Result<Self> {
        let gpu = Gpu::open_with(*api, ordinal, None)?;
        // Later than what is looked for here.
        let config = CudaStreamConfig { wait_limit: patience * 2, via: Via::MemOp, ..Default::default() };
        let (stream, memory) = (Stream::cuda(&gpu, config)?, Memory::alloc(24)?);
        Ok(Self { stream, words: [memory.word64(0)?, memory.word64(8)?, memory.word64(16)?], patience })
    }

    /// A write, a wait for an answer of the CPU, and a write behind it.
    fn submit(&self, value: u64) -> gdsync::Result<()> {
        let (mut batch, [first, answer, last]) = (Batch::new(), &self.words);
        batch.write_value64(first, value);
        batch.wait_value64(answer, value, Cond::Eq);
        batch.write_value64(last, value);
        self.stream.submit(&mut batch)
    }

    /// The CPU's part of it.
    fn follow(&self, value: u64) -> results::Result<()> {
        let silent = |what| Err(format!("{what} did not show within {:?}", self.patience).into());
        let [first, answer, last] = &self.words;
        let begins = self.shows(first, value);
        let hasty = last.load() == value;
        // Also where nothing showed: no stream may stay behind that waits.
        answer.store(value);
        match () {
            () if !begins? => silent("what a stream wrote"),
            () if hasty => Err(HASTY.into()),
            () if !self.shows(last, value)? => silent("what a stream wrote behind a satisfied wait"),
            () => Ok(()),
        }
    }

    /// Whether a word gets this value in time; the error of the stream if it has failed.
    fn shows(&self, word: &Word64, value: u64) -> gdsync::Result<bool> {
        let seen = || match self.stream.query().error {
            _ if word.load() == value => Ok(Some(())),
            Some(error) => Err(error),
            None => Ok(None),
        };
        Ok(poll(self.patience, seen)?.is_some())
    }

    fn run(&self) -> results::Result<String> {
        self.submit(0x1_0000_0001)?;
        self.follow(0x1_0000_0001)?;
        Ok("a write, a wait for the CPU and a write ran".into())
    }

    /// Captures the operations, and runs them as a graph.
    fn capture(&self) -> results::Result<String> {
        const VALUE: u64 = 0x2_0000_0002;
        let graph = self.stream.capture(|_| self.submit(VALUE))?;
        if self.words[0].load() == VALUE {
            return Err(HASTY.into());
        }
        graph.launch(&self.stream)?;
        self.follow(VALUE)?;
        Ok("the same, captured and launched as a graph".into())
    }
}
