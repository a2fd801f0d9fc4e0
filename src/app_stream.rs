//! The stream of a program: a host thread or a CUDA stream, where payload and queues are, and kernels.

use clap::{Args, ValueEnum};
use gdrcopy::cuda::raw::Api;
use gdrcopy::cuda::raw::layout::{Handle, STREAM_NON_BLOCKING};
use gdsync::cuda::Gpu;
use gdsync::memory::{Memory, Word32};
use gdsync::stream::{CudaStreamConfig, HostStreamConfig, Stream, Via};
use gdsync::verbs::{OnGpu, QpBuilder};
use mp::launch::Launch;
use mp::{Communicator, CommunicatorBuilder};
use rustix::thread::{CpuSet, sched_getaffinity};
use serde::Serialize;
use std::collections::BTreeSet;
use std::ffi::{CStr, c_void};
use std::fmt;
use std::ptr::null_mut;
use std::time::Duration;

use crate::measure::host;
use crate::results::Result;
use crate::terminal::name;

/// Options of streams and memory.
#[derive(Args, Clone, Debug)]
pub struct Placement {
    /// What runs the streams.
    #[arg(long, value_enum, default_value_t = Engine::Host)]
    stream: Engine,
    /// Memory of the payload.
    #[arg(long, value_enum, default_value_t = Place::Host)]
    payload: Place,
    /// What is in GPU memory, besides payload.
    #[arg(long, value_enum, default_value_t = Queues::Host)]
    placement: Queues,
    /// What runs the operations of a CUDA stream: memop, kernel or auto [default: memop].
    #[arg(long)]
    via: Option<Via>,
    /// GPUs by rank, by their CUDA ordinals [default: the local rank modulo the number of GPUs].
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    device: Vec<i32>,
}

/// What runs a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// A thread of the host.
    Host,
    /// A GPU.
    Cuda,
}

/// Which memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// Host memory.
    Host,
    /// Memory of the rank's GPU.
    Gpu,
    /// Outgoing payload in host memory, incoming payload in GPU memory, so neither side reads over the bus. For ping-pongs,
    /// which keep the two apart.
    Near,
}

/// Which queues are in the memory of the rank's GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Queues {
    /// Nothing.
    Host,
    /// Completion queues.
    Gpu,
    /// Completion queues and doorbell records.
    Words,
    /// Completion queues, doorbell records and send queues.
    All,
}

/// The choice of a rank, and its GPU if it needs one.
#[derive(Clone, Debug)]
pub struct Placed {
    options: Placement,
    /// What makes the copies of a CUDA stream to peers.
    pub copies: Via,
    /// The GPU, if one is used.
    pub gpu: Option<Gpu>,
}

impl Placement {
    /// CUDA streams and payload on GPUs, queues in host memory.
    pub fn on_gpus(via: Via, device: Vec<i32>) -> Self {
        let (stream, payload, placement) = (Engine::Cuda, Place::Gpu, Queues::Host);
        Self { stream, payload, placement, via: Some(via), device }
    }

    /// Whether kernels run the operations of the stream.
    pub fn is_by_kernel(&self) -> bool {
        self.stream == Engine::Cuda && self.via == Some(Via::Kernel)
    }

    /// Opens what the options ask for. Called before the communicator is made, which it is for.
    pub fn open(&self) -> Result<Placed> {
        if self.stream == Engine::Host && self.via.is_some() {
            return Err("--via is for --stream cuda".into());
        }
        let on_gpu =
            self.stream == Engine::Cuda || self.payload != Place::Host || self.placement != Queues::Host;
        if !on_gpu && !self.device.is_empty() {
            return Err("--device is for --stream cuda, --payload gpu or near, and --placement gpu".into());
        }
        let gpu = on_gpu.then(|| own_gpu(&self.device)).transpose()?;
        Ok(Placed { options: self.clone(), copies: Via::Auto, gpu })
    }
}

/// The GPU of this rank: the one at its place in the list, or of all GPUs the one that its local rank is due by turns. Called
/// before the communicator is made, or after.
pub fn own_gpu(listed: &[i32]) -> Result<Gpu> {
    // Without a launcher this process becomes rank 0.
    let (rank, local) = Launch::detect()?.map_or((0, 0), |launch| (launch.rank, launch.local_rank));
    let count = usize::try_from(Gpu::count()?)?;
    let turn = |number: usize, of: usize| number.checked_rem(of);
    let ordinal = match turn(rank, listed.len()) {
        Some(at) => listed[at],
        None => i32::try_from(turn(local, count).ok_or("CUDA shows no GPU to this process")?)?,
    };
    Ok(Gpu::open(ordinal)?)
}

impl Placed {
    fn on_gpu(&self) -> OnGpu {
        match self.options.placement {
            Queues::Host => OnGpu::empty(),
            Queues::Gpu => OnGpu::SEND_CQ | OnGpu::RECV_CQ,
            Queues::Words => OnGpu::all() - OnGpu::SEND_QUEUE,
            Queues::All => OnGpu::all(),
        }
    }

    /// A queue pair with its queues where they should be.
    pub fn queues(&self, qp: QpBuilder) -> QpBuilder {
        match &self.gpu {
            Some(gpu) => qp.on_gpu(gpu, self.on_gpu()),
            None => qp,
        }
    }

    /// A communicator whose queues are where they should be.
    pub fn builder(&self) -> CommunicatorBuilder {
        match &self.gpu {
            Some(gpu) => CommunicatorBuilder::default().gpu(gpu).on_gpu(self.on_gpu()),
            None => CommunicatorBuilder::default(),
        }
    }

    /// Memory for payload that leaves and arrives. That of a GPU is not zeroed.
    pub fn memory(&self, len: usize) -> Result<Memory> {
        match self.options.payload {
            Place::Near => {
                Err("--payload near is for ping-pongs, which keep what leaves apart from what arrives".into())
            }
            Place::Host | Place::Gpu => self.incoming(len),
        }
    }

    /// Memory for outgoing payload. That of a GPU is not zeroed.
    pub fn outgoing(&self, len: usize) -> Result<Memory> {
        self.memory_on(self.options.payload == Place::Gpu, len)
    }

    /// Memory for incoming payload. That of a GPU is not zeroed.
    pub fn incoming(&self, len: usize) -> Result<Memory> {
        self.memory_on(self.options.payload != Place::Host, len)
    }

    fn memory_on(&self, gpu: bool, len: usize) -> Result<Memory> {
        Ok(match self.gpu.as_ref().filter(|_| gpu) {
            Some(gpu) => gpu.alloc(len)?,
            None => Memory::alloc(len)?,
        })
    }

    /// In words, for all ranks.
    pub fn describe(&self, comm: &Communicator) -> Result<Description> {
        let gpu = self.gpu.as_ref().map(|gpu| format!("GPU {}, {}", gpu.ordinal(), gpu.capabilities()));
        let gpus = comm.exchange(gpu.unwrap_or_default().as_bytes(), None)?;
        let gpus = gpus.iter().filter(|gpu| !gpu.is_empty()).map(|gpu| String::from_utf8_lossy(gpu).into());
        let cpus = sched_getaffinity(None)?;
        let cpus: Vec<_> = (0..CpuSet::MAX_CPU).filter(|cpu| cpus.is_set(*cpu)).collect();
        let cpus = serde_json::to_vec(&(host()?, cpus))?;
        let cpus = comm.exchange(&cpus, None)?;
        let Placement { stream, payload, placement, via, .. } = &self.options;
        Ok(Description {
            payload: *payload,
            placement: *placement,
            via: (*stream == Engine::Cuda).then(|| via.unwrap_or_default().to_string()),
            gpus: gpus.collect(),
            cpus: cpus.iter().map(|rank| serde_json::from_slice(rank)).collect::<serde_json::Result<_>>()?,
        })
    }
}

/// The choice, for a report.
#[derive(Clone, Debug, Serialize)]
pub struct Description {
    payload: Place,
    placement: Queues,
    /// With CUDA streams.
    via: Option<String>,
    /// By rank, those that were used.
    gpus: Vec<String>,
    /// By rank, its host and the CPUs that it may use.
    cpus: Vec<(String, Vec<usize>)>,
}

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.gpus.is_empty() {
            return f.write_str(&cpus_line(&self.cpus));
        }
        for (rank, gpu) in self.gpus.iter().enumerate() {
            writeln!(f, "rank {rank}: {gpu}")?;
        }
        write!(f, "payload: {}, queues: {}", name(&self.payload), name(&self.placement))?;
        if let Some(via) = &self.via {
            write!(f, ", via: {via}")?;
        }
        writeln!(f)
    }
}

/// A line about where ranks run, if there are several.
fn cpus_line(ranks: &[(String, Vec<usize>)]) -> String {
    let mut seen = BTreeSet::new();
    let is_apart = ranks.iter().all(|(host, cpus)| cpus.iter().all(|cpu| seen.insert((host, cpu))));
    let list = |cpus: &[usize]| {
        let ranges = cpus.chunk_by(|a, b| a + 1 == *b).map(|range| match range {
            [first, .., last] => format!("{first}-{last}"),
            one => one.iter().map(usize::to_string).collect(),
        });
        ranges.collect::<Vec<_>>().join(",")
    };
    match ranks {
        [] | [_] => String::new(),
        _ if is_apart && ranks.len() <= 8 => {
            let each = ranks.iter().enumerate().map(|(rank, (_, cpus))| format!("{rank} on {}", list(cpus)));
            format!("ranks have CPUs of their own: {}\n", each.collect::<Vec<_>>().join("; "))
        }
        _ if is_apart => "ranks have CPUs of their own\n".to_owned(),
        [(_, first), ..] => format!(
            "ranks are not bound: they share CPUs {}. On one core a message takes 10 us, on two 1 or less. Bind them with the launcher \
             (mpirun --bind-to core), or start no more ranks than there are cores, without MP_BIND=0\n",
            list(first)
        ),
    }
}

/// Submissions that may be pending.
const DEPTH: usize = 512;

/// A stream, and the means to run the program's own work on it: host functions or kernels.
#[derive(Debug)]
pub struct AppStream {
    /// The stream.
    pub stream: Stream,
    /// Where a GPU runs the stream.
    pub kernels: Option<Kernels>,
    gpu: Option<Gpu>,
    /// Written behind kernels, which the stream itself does not count.
    end: Word32,
    timeout: Duration,
}

impl AppStream {
    /// A stream whose waits end after `timeout`. `ptx` has the kernels, for a GPU.
    pub fn new(placed: &Placed, timeout: Duration, ptx: &'static CStr) -> Result<Self> {
        let end = Memory::alloc(4)?.word32(0)?;
        let (stream, kernels) = match (&placed.gpu, placed.options.stream) {
            (Some(gpu), Engine::Cuda) => {
                let kernels = Kernels::load(gpu, ptx)?;
                let (via, copies) = (placed.options.via.unwrap_or_default(), placed.copies);
                let config =
                    CudaStreamConfig { depth: DEPTH, wait_limit: timeout, via, copies, ..Default::default() };
                // Sends and waits run between the kernels.
                // SAFETY: the stream stays as long as the process.
                let stream = unsafe { Stream::cuda_from_raw(gpu, kernels.stream, config) }?;
                (stream, Some(kernels))
            }
            _ => {
                let config = HostStreamConfig { depth: 2 * DEPTH, wait_limit: timeout, ..Default::default() };
                (Stream::host(config)?, None)
            }
        };
        Ok(Self { stream, kernels, gpu: placed.gpu.clone(), end, timeout })
    }

    /// The GPU, where there is one.
    pub fn gpu(&self) -> Result<&Gpu> {
        self.gpu.as_ref().ok_or_else(|| "there is no GPU".into())
    }

    /// A kernel of this name, where a GPU runs the stream.
    ///
    /// # Safety
    /// As for [`Kernels::find`].
    pub unsafe fn find<A: Copy>(&self, name: &CStr) -> Result<Option<(&Kernels, Kernel<A>)>> {
        let Some(kernels) = &self.kernels else { return Ok(None) };
        // SAFETY: the caller vouches for the parameter.
        Ok(Some((kernels, unsafe { kernels.find(name) }?)))
    }

    /// Blocks until the stream is idle, kernels included, and reports what went wrong on it. The CPU sleeps meanwhile.
    pub fn finish(&self) -> Result<()> {
        if self.kernels.is_some() {
            self.stream.write_value32(&self.end, 1)?;
        }
        Ok(self.stream.synchronize(self.timeout)?)
    }

    /// Blocks until the stream is idle, as an application does that posts by CPU: on a GPU by `cuStreamSynchronize`.
    /// What went wrong on the stream is left to [`AppStream::finish`].
    pub fn idle(&self) -> Result<()> {
        match &self.kernels {
            Some(kernels) => kernels.synchronize(),
            None => Ok(self.stream.synchronize(self.timeout)?),
        }
    }

    /// Returns when no kernel runs any more, so that the memory they use can go. What is still held is given up.
    pub fn settle(&self) {
        let Some(kernels) = &self.kernels else { return };
        if self.stream.query().pending > 0 {
            self.stream.abort();
        }
        // What went wrong has been said.
        let _ = kernels.synchronize();
    }
}

/// A PTX text that ends with NUL, as the driver takes it.
pub const fn ptx(text: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("a text without NUL, and one at its end"),
    }
}

/// A stream and a module of kernels. Both stay as long as the process: nothing can outlive them.
#[derive(Debug)]
pub struct Kernels {
    gpu: Gpu,
    stream: Handle,
    module: Handle,
}

/// A kernel of a loaded module, whose only parameter is an `A`.
#[derive(Debug)]
pub struct Kernel<A> {
    function: Handle,
    argument: std::marker::PhantomData<A>,
}

impl Kernels {
    /// Makes a stream, and loads kernels from their PTX text. The GPU is current for this thread from here on, as applications
    /// have it.
    pub fn load(gpu: &Gpu, ptx: &'static CStr) -> Result<Self> {
        let (api, mut stream, mut module) = (gpu.api(), 0, 0);
        // SAFETY: the context stays as long as the process, as the stream keeps its GPU.
        unsafe { api.ctx_push_current(gpu.raw_context()) }?;
        // SAFETY: a place for the answer.
        unsafe { api.stream_create(&raw mut stream, STREAM_NON_BLOCKING, 0) }?;
        // SAFETY: a place for the answer, and a terminated PTX text.
        unsafe { api.module_load_data(&raw mut module, ptx.as_ptr().cast()) }
            .map_err(|e| format!("the GPU driver cannot compile the kernels: {e}"))?;
        Ok(Self { gpu: gpu.clone(), stream, module })
    }

    /// Finds a kernel.
    ///
    /// # Safety
    /// Its only parameter must have the layout of `A`.
    pub unsafe fn find<A: Copy>(&self, name: &CStr) -> Result<Kernel<A>> {
        let (api, mut function) = (self.gpu.api(), 0);
        // SAFETY: a place for the answer; the module stays loaded, and the name ends with a 0.
        unsafe { api.module_get_function(&raw mut function, self.module, name.as_ptr()) }
            .map_err(|e| format!("kernel {}: {e}", name.to_string_lossy()))?;
        Ok(Kernel { function, argument: std::marker::PhantomData })
    }

    /// Launches a kernel on the stream.
    ///
    /// # Safety
    /// The memory that the argument names must be what the kernel takes it for, until the kernel has ended.
    pub unsafe fn launch<A: Copy>(
        &self,
        kernel: &Kernel<A>,
        blocks: u32,
        threads: u32,
        mut argument: A,
    ) -> Result<()> {
        let mut arguments: [*mut c_void; 1] = [(&raw mut argument).cast()];
        let (function, params) = (kernel.function, arguments.as_mut_ptr());
        // SAFETY: the argument is of the kernel's type and copied by the call; the caller vouches for what it names.
        let call = |api: &Api| unsafe {
            api.launch_kernel(function, blocks, 1, 1, threads, 1, 1, 0, self.stream, params, null_mut())
        };
        Ok(self.gpu.within(call)?)
    }

    /// The stream, for libraries that put their own work on it.
    pub fn stream(&self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.stream)
    }

    /// Blocks until everything on the stream is done, which its wait limit bounds.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream stays.
        Ok(self.gpu.within(|api| unsafe { api.stream_synchronize(self.stream) })?)
    }
}

#[cfg(test)]
mod tests {
    use super::cpus_line;

    #[test]
    fn cpus_are_shared_only_on_one_host() {
        let ranks = |hosts: [&str; 2], cpus: [&[usize]; 2]| {
            cpus_line(&[0, 1].map(|rank| (hosts[rank].to_owned(), cpus[rank].to_vec())))
        };
        let own = "ranks have CPUs of their own: ";
        assert_eq!(ranks(["a", "a"], [&[0, 4, 1, 2, 3], &[5]]), format!("{own}0 on 0,4,1-3; 1 on 5\n"));
        assert_eq!(ranks(["a", "b"], [&[0, 1], &[0, 1]]), format!("{own}0 on 0-1; 1 on 0-1\n"));
        let shared = ranks(["a", "a"], [&[0, 1], &[1]]);
        assert!(shared.starts_with("ranks are not bound: they share CPUs 0-1. "), "{shared}");
        assert_eq!(cpus_line(&[("a".into(), vec![0])]), "");
    }
}
