//! What CUDA says of each GPU, and what happens when it is tried.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::ffi::{CStr, c_char, c_void};
use std::fmt::{self, Display};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use gdrcopy::cuda::raw::layout::{
    CAPTURE_RELAXED, HOST_ALLOC_PORTABLE, Handle, MemOp, RANGE_HANDLE_DMA_BUF, STREAM_NON_BLOCKING,
};
use gdrcopy::cuda::raw::{Api, Current};
use gdrcopy::cuda::sysfs_address;
use serde::{Deserialize, Serialize};

use super::{Reporter, is_taken, retain};
use crate::measure::poll;
use crate::nvml::{Bar1, Nvml};

/// What a GPU may take for a few stream memory operations. Idle ones take microseconds.
const PATIENCE: Duration = Duration::from_millis(1500);

/// The outcome of a trial: what was seen, or the error.
pub(in crate::doctor) type Outcome = Result<String, String>;

/// What CUDA reported.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(in crate::doctor) struct CudaFacts {
    /// `1000 * major + 10 * minor`, or why there is no `libcuda`.
    pub(in crate::doctor) version: Option<Result<i32, String>>,
    /// The number of GPUs, or why CUDA does not start.
    pub(in crate::doctor) count: Option<Result<i32, String>>,
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
    /// Its memory in bytes.
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
    let mut facts = CudaFacts::default();
    let mut version = 0;
    // SAFETY: a place for the answer.
    let told = unsafe { api.driver_get_version(&mut version) };
    facts.version = Some(told.map(|()| version).map_err(text));
    reporter.facts(&facts);
    reporter.step("cuInit");
    let count = count(api);
    facts.count = Some(count.as_ref().copied().map_err(text));
    reporter.facts(&facts);
    let count = count.unwrap_or(0);
    reporter.step("loading NVML");
    let nvml = Nvml::load();
    for ordinal in 0..count {
        let mut gpu = GpuFacts { ordinal, ..GpuFacts::default() };
        let told = describe(api, &mut gpu, count, &nvml);
        facts.gpus.push(gpu);
        reporter.facts(&facts);
        if let Err(error) = told.and_then(|device| attempt(api, reporter, &mut facts, device, patience)) {
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
    facts
}

fn text(error: impl Display) -> String {
    error.to_string()
}

fn count(api: &Api) -> gdrcopy::Result<i32> {
    // SAFETY: no flags are defined.
    unsafe { api.init(0) }?;
    let mut count = 0;
    // SAFETY: a place for the answer.
    unsafe { api.device_get_count(&mut count) }?;
    Ok(count)
}

/// Asks what a GPU is and has, and gives its handle.
fn describe(api: &Api, gpu: &mut GpuFacts, count: i32, nvml: &Result<Nvml, String>) -> gdrcopy::Result<i32> {
    let mut device = 0;
    // SAFETY: a place for the answer; the driver checks the ordinal.
    unsafe { api.device_get(&mut device, gpu.ordinal) }?;
    let told = filled(|buffer, len| {
        // SAFETY: a buffer of this length.
        unsafe { api.device_get_name(buffer, len, device) }
    });
    gpu.name = told?;
    gpu.pci = address(api, device)?;
    for number in 1..=attribute::DMA_BUF {
        let mut value = 0;
        // SAFETY: a place for the answer; the driver checks the number.
        if unsafe { api.device_get_attribute(&mut value, number, device) }.is_ok() {
            gpu.attributes.insert(number, value);
        }
    }
    for other in (0..count).filter(|other| *other != gpu.ordinal) {
        let (mut peer, mut can) = (0, 0);
        // SAFETY: a place for the answer; the driver checks the ordinal.
        unsafe { api.device_get(&mut peer, other) }?;
        // SAFETY: a place for the answer, and devices of this driver.
        unsafe { api.device_can_access_peer(&mut can, device, peer) }?;
        gpu.peers.insert(other, can != 0);
        let pci = address(api, peer)?;
        if let Ok(nvml) = nvml
            && let Ok(joined) = nvml.nvlink(&gpu.pci, &pci)
        {
            gpu.nvlinks.insert(pci, joined);
        }
    }
    gpu.bar1 = Some(nvml.clone().and_then(|nvml| nvml.bar1(&gpu.pci)));
    Ok(device)
}

/// Tries on the last GPU what streams and RDMA devices need of it.
fn attempt(
    api: &Api,
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
    let bench = Bench::new(api, patience)?;
    let ran = bench.run().map_err(text);
    // A stuck stream would block the calls that follow.
    let is_stuck = ran.is_err();
    facts.last().memop = Some(ran);
    reporter.facts(facts);
    reporter.step(format!("capturing stream memory operations on GPU {number}"));
    let stuck = || Err("not tried, for the stream does not run".into());
    facts.last().capture = Some(if is_stuck { stuck() } else { bench.capture().map_err(text) });
    reporter.facts(facts);
    reporter.step(format!("exporting memory of GPU {number} as a dma-buf"));
    facts.last().dma_buf = Some(if is_stuck { stuck() } else { dma_buf(api).map_err(text) });
    Ok(())
}

/// The PCI address of a device, as sysfs writes it.
fn address(api: &Api, device: i32) -> gdrcopy::Result<String> {
    let told = filled(|buffer, len| {
        // SAFETY: a buffer of this length.
        unsafe { api.device_get_pci_bus_id(buffer, len, device) }
    });
    Ok(sysfs_address(&told?).unwrap_or_default())
}

/// Text that the driver writes into a buffer.
fn filled(fill: impl FnOnce(*mut c_char, i32) -> gdrcopy::Result<()>) -> gdrcopy::Result<String> {
    const LEN: u16 = 256;
    let mut buffer = [0u8; LEN as usize];
    fill(buffer.as_mut_ptr().cast(), LEN.into())?;
    Ok(CStr::from_bytes_until_nul(&buffer).unwrap_or_default().to_string_lossy().into_owned())
}

/// Exports one allocation.
fn dma_buf(api: &Api) -> gdrcopy::Result<String> {
    const LEN: usize = 2 << 20;
    let (mut addr, mut fd) = (0, -1);
    // SAFETY: a place for the answer; a context is current.
    unsafe { api.mem_alloc(&mut addr, LEN) }?;
    let place = (&raw mut fd).cast();
    // SAFETY: a place for the descriptor, which is an int; the memory was allocated above.
    let told = unsafe { api.mem_get_handle_for_address_range(place, addr, LEN, RANGE_HANDLE_DMA_BUF, 0) };
    if fd >= 0 {
        let fd: i32 = fd;
        // SAFETY: a descriptor of this process, closed once.
        unsafe { libc::close(fd) };
    }
    // SAFETY: allocated above, freed once; no stream uses it.
    unsafe { api.mem_free(addr) }?;
    told.map(|()| "2 MiB of its memory exported".into())
}

/// `CU_MEMHOSTALLOC_DEVICEMAP`.
const HOST_ALLOC_MAPPED: u32 = 2;
/// `CU_STREAM_WAIT_VALUE_EQ`.
const WAIT_EQUAL: u32 = 1;

/// A stream, and three words that it and the CPU share.
struct Bench<'a> {
    api: &'a Api,
    stream: Handle,
    words: NonNull<[AtomicU64; 3]>,
    /// The GPU's address of the first.
    addr: u64,
    /// What the GPU may take for a few operations.
    patience: Duration,
}

/// What went wrong.
#[derive(Debug)]
enum Trouble {
    Call(gdrcopy::Error),
    Silent(&'static str, Duration),
    Hasty,
}

impl From<gdrcopy::Error> for Trouble {
    fn from(error: gdrcopy::Error) -> Self {
        Self::Call(error)
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Call(error) => error.fmt(f),
            Self::Silent(what, patience) => write!(f, "{what} did not show within {patience:?}"),
            Self::Hasty => f.write_str("the stream passed a wait that was not satisfied"),
        }
    }
}

impl<'a> Bench<'a> {
    /// In the current context.
    fn new(api: &'a Api, patience: Duration) -> gdrcopy::Result<Self> {
        let (mut host, mut addr, mut stream) = (std::ptr::null_mut::<c_void>(), 0, 0);
        // SAFETY: a place for the answer; a context is current.
        unsafe {
            api.mem_host_alloc(&mut host, gdrcopy::host_page(), HOST_ALLOC_PORTABLE | HOST_ALLOC_MAPPED)
        }?;
        // SAFETY: a place for the answer; the memory was allocated above.
        unsafe { api.mem_host_get_device_pointer(&mut addr, host, 0) }?;
        // SAFETY: a place for the answer; a context is current.
        unsafe { api.stream_create(&mut stream, STREAM_NON_BLOCKING, 0) }?;
        let words = NonNull::new(host.cast::<[AtomicU64; 3]>()).expect("the driver gave memory");
        Ok(Self { api, stream, words, addr, patience })
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        // SAFETY: a page of memory that is never freed, aligned to pages; everybody accesses its words atomically.
        let words = unsafe { self.words.as_ref() };
        &words[at]
    }

    /// A write, a wait for an answer of the CPU, and a write behind it.
    fn ops(&self, value: u64) -> [MemOp; 4] {
        [
            MemOp::word(MemOp::WRITE_64, self.addr, value, 0),
            MemOp::word(MemOp::WAIT_64, self.addr + 8, value, WAIT_EQUAL),
            MemOp::barrier(),
            MemOp::word(MemOp::WRITE_64, self.addr + 16, value, 0),
        ]
    }

    fn submit(&self, value: u64) -> gdrcopy::Result<()> {
        let mut ops = self.ops(value);
        // SAFETY: four operations, on words that stay, and a live stream.
        unsafe { self.api.stream_batch_mem_op(self.stream, 4, ops.as_mut_ptr(), 0) }
    }

    /// The CPU's part of it.
    fn follow(&self, value: u64) -> Result<(), Trouble> {
        let silent = |what| Err(Trouble::Silent(what, self.patience));
        let first = self.shows(0, value);
        let hasty = self.word(2).load(Ordering::Acquire) == value;
        // Also where nothing showed: no stream may stay behind that waits.
        self.word(1).store(value, Ordering::Release);
        match () {
            () if !first => silent("what a stream wrote"),
            () if hasty => Err(Trouble::Hasty),
            () if !self.shows(2, value) => silent("what a stream wrote behind a satisfied wait"),
            () => Ok(()),
        }
    }

    /// Whether a word gets this value in time.
    fn shows(&self, at: usize, value: u64) -> bool {
        let seen = || Ok::<_, Infallible>((self.word(at).load(Ordering::Acquire) == value).then_some(()));
        poll(self.patience, seen) == Ok(Some(()))
    }

    /// Runs the operations.
    fn run(&self) -> Result<String, Trouble> {
        self.submit(0x1_0000_0001)?;
        self.follow(0x1_0000_0001)?;
        Ok("a write, a wait for the CPU, a barrier and a write ran".into())
    }

    /// Captures the operations, and runs them as a graph.
    fn capture(&self) -> Result<String, Trouble> {
        const VALUE: u64 = 0x2_0000_0002;
        let (api, stream) = (self.api, self.stream);
        let (mut graph, mut exec) = (0, 0);
        // SAFETY: a live stream.
        unsafe { api.stream_begin_capture(stream, CAPTURE_RELAXED) }?;
        let captured = self.submit(VALUE);
        // SAFETY: a place for the answer; the capture was begun above.
        let ended = unsafe { api.stream_end_capture(stream, &mut graph) };
        captured?;
        ended?;
        // SAFETY: a place for the answer, and the graph that was captured.
        unsafe { api.graph_instantiate(&mut exec, graph, 0) }?;
        if self.word(0).load(Ordering::Acquire) == VALUE {
            return Err(Trouble::Hasty);
        }
        // SAFETY: the graph made above, on a live stream.
        unsafe { api.graph_launch(exec, stream) }?;
        self.follow(VALUE)?;
        Ok("the same, captured and launched as a graph".into())
    }
}
