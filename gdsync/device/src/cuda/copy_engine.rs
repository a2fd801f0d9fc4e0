//! The copy engine of a GPU: a stream and the thread that feeds it, and memory of other processes opened by CUDA IPC.
//!
//! One stream of the highest priority runs all copies of a GPU, because each stream occupies a hardware channel. Behind each copy the
//! stream writes a number to a word in host memory, which waiters poll without calling CUDA.
//!
//! Only the thread calls CUDA, because calls may block on a lock of the driver. Then only copies are delayed.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::Condvar;
use gdrcopy::cuda::raw::layout::{Handle as RawHandle, MemOp, STREAM_NON_BLOCKING};
use gdrcopy::cuda::raw::pointer_info;
use gdrcopy::cuda::{CudaStatus, MemoryKind};
use gdsync_shm::Backoff;
use parking_lot::{Mutex, RwLock};

use super::Gpu;
use super::ipc::IpcOpening;
use crate::copy_engine::{CopyEngine, FRESH, Handle, Part, ProcessId, Source, Ticket};
use crate::error::{Error, Result};
use crate::memory::{Memory, Word32};

/// Interval of checks for copies that are over, to release their memory.
const REAP: Duration = Duration::from_millis(1);
/// Queries the stream for errors if a copy takes longer.
const SUSPICIOUS: Duration = Duration::from_secs(1);

/// Error of copies after a panic of the thread.
const PANICKED: &str =
    "the thread 'gdsync-copy' panicked; its message is on standard error: please report it";
/// Maximum wait for the thread on drop.
const PATIENCE: Duration = Duration::from_secs(2);

/// The copy engine of a GPU. Dropping it completes all copies first.
pub struct Engine {
    gpu: Gpu,
    shared: Arc<Shared>,
    /// The word that the stream writes.
    word: Word32,
}

#[derive(Default)]
struct Shared {
    jobs: Mutex<Jobs>,
    come: Condvar,
    /// Number of jobs, to poll without the lock.
    count: AtomicUsize,
    ended: Condvar,
}

#[derive(Default)]
struct Jobs {
    list: VecDeque<Job>,
    stop: bool,
    /// The thread has stopped using the GPU.
    is_over: bool,
}

enum Job {
    Copy { parts: Vec<Part>, ticket: Ticket },
    Forget(ProcessId),
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Engine of {:?}", self.gpu)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let mut jobs = self.shared.jobs.lock();
        jobs.stop = true;
        self.shared.come.notify_one();
        self.shared.ended.wait_while_for(&mut jobs, |jobs| !jobs.is_over, PATIENCE);
    }
}

impl Engine {
    /// Starts the thread.
    ///
    /// # Errors
    /// [`Error::Cuda`], or [`Error::Sys`] if the system starts no thread.
    pub fn start(gpu: &Gpu) -> Result<Self> {
        let shared = Arc::<Shared>::default();
        let stream = CopyStream::open(gpu)?;
        let word = stream.word.clone();
        let worker = Worker {
            gpu: gpu.clone(),
            shared: shared.clone(),
            stream,
            running: VecDeque::new(),
            last: Instant::now(),
            broken: None,
        };
        std::thread::Builder::new()
            .name("gdsync-copy".into())
            .spawn(move || {
                let shared = worker.shared.clone();
                let panicked = catch_unwind(AssertUnwindSafe(|| worker.run())).is_err();
                let mut jobs = shared.jobs.lock();
                jobs.is_over = true;
                for job in jobs.list.drain(..) {
                    job.fail();
                }
                drop(jobs);
                shared.ended.notify_all();
                if panicked {
                    tracing::error!("{PANICKED}");
                }
            })
            .map_err(|e| Error::os("starting a thread", e, "raise the limit of processes (ulimit -u)"))?;
        Ok(Self { gpu: gpu.clone(), shared, word })
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// A number that changes when a copy ends.
    pub fn ended(&self) -> u32 {
        self.word.load()
    }

    /// Queues a copy.
    pub fn copy(&self, parts: Vec<Part>) -> Ticket {
        let ticket = Ticket::default();
        self.push(Job::Copy { parts, ticket: ticket.clone() });
        ticket
    }

    /// Closes memory of a process that is gone.
    pub fn forget(&self, process: ProcessId) {
        self.push(Job::Forget(process));
    }

    fn push(&self, job: Job) {
        let mut jobs = self.shared.jobs.lock();
        if jobs.is_over {
            return job.fail();
        }
        jobs.list.push_back(job);
        self.shared.count.store(jobs.list.len(), Ordering::Release);
        drop(jobs);
        self.shared.come.notify_one();
    }
}

/// The stream and the word that it writes.
struct CopyStream {
    stream: RawHandle,
    word: Word32,
    /// The word's address on the GPU.
    addr: u64,
    /// The number written behind the last copy.
    last: u32,
}

impl CopyStream {
    fn open(gpu: &Gpu) -> Result<Self> {
        let failed = Error::cuda("making a stream for copies");
        let memory = Memory::alloc(4096)?;
        let addr = memory.gpu_addr(gpu)?;
        let _current = gpu.enter()?;
        let (mut least, mut greatest, mut stream) = (0, 0, 0);
        // SAFETY: places for the answers; a context is current.
        unsafe { gpu.api().ctx_get_stream_priority_range(&mut least, &mut greatest) }.map_err(&failed)?;
        // SAFETY: a place for the answer; a context is current.
        unsafe { gpu.api().stream_create(&mut stream, STREAM_NON_BLOCKING, greatest) }.map_err(&failed)?;
        Ok(Self { stream, word: memory.word32(0)?, addr, last: 0 })
    }
}

struct Worker {
    gpu: Gpu,
    shared: Arc<Shared>,
    stream: CopyStream,
    running: VecDeque<Running>,
    /// Start of the last copy.
    last: Instant,
    /// Why the stream has failed, if it has.
    broken: Option<String>,
}

/// A copy under way and its resources.
struct Running {
    value: u32,
    ticket: Ticket,
    parts: Vec<Part>,
    opened: Vec<IpcOpening>,
    since: Instant,
    /// Why only a part of it was enqueued, if so.
    failure: Option<String>,
}

impl Drop for Running {
    /// Fails copies under way if the thread panics.
    fn drop(&mut self) {
        if !self.ticket.is_over() {
            self.ticket.fail(PANICKED);
            // Leaked, because the GPU may still access the memory.
            std::mem::forget((std::mem::take(&mut self.parts), std::mem::take(&mut self.opened)));
        }
    }
}

impl Job {
    fn fail(self) {
        if let Job::Copy { parts, ticket } = self {
            ticket.fail(PANICKED);
            release_parts(parts);
        }
    }
}

impl Worker {
    fn run(mut self) {
        let gpu = self.gpu.clone();
        let current = gpu.enter();
        if let Err(error) = &current {
            self.broken = Some(error.to_string());
        }
        while let Some(job) = self.next() {
            match job {
                Some(Job::Copy { parts, ticket }) => self.copy(parts, ticket),
                Some(Job::Forget(process)) => self.gpu.ipc_handles().close_idle(&self.gpu, Some(process)),
                None => {}
            }
            self.reap();
        }
        self.gpu.ipc_handles().close_idle(&self.gpu, None);
        // SAFETY: made here, destroyed once; nothing runs on it.
        if let Err(error) = unsafe { gpu.api().stream_destroy(self.stream.stream) } {
            tracing::debug!(%error, "a stream for copies was not destroyed");
        }
    }

    /// The next job; `Some(None)` to check the copies under way, `None` to stop.
    fn next(&self) -> Option<Option<Job>> {
        while self.shared.count.load(Ordering::Acquire) == 0 && Backoff::since(self.last, FRESH).spin() {}
        let mut jobs = self.shared.jobs.lock();
        if jobs.list.is_empty() {
            if !self.running.is_empty() {
                self.shared.come.wait_for(&mut jobs, REAP);
            } else if jobs.stop {
                return None;
            } else {
                self.shared.come.wait(&mut jobs);
            }
        }
        let job = jobs.list.pop_front();
        self.shared.count.store(jobs.list.len(), Ordering::Release);
        Some(job)
    }

    fn copy(&mut self, parts: Vec<Part>, ticket: Ticket) {
        if !ticket.begin() {
            return release_parts(parts);
        }
        if let Some(why) = &self.broken {
            ticket.fail(why.clone());
            return release_parts(parts);
        }
        let mut opened = Vec::new();
        let failure = parts.iter().try_for_each(|part| self.begin(part, &mut opened)).err();
        let value = self.stream.last.wrapping_add(1);
        let mut write = MemOp::word(MemOp::WRITE_32, self.stream.addr, value.into(), 0);
        // SAFETY: one operation on a word that lives as long as this thread; the stream is ours.
        let marked = unsafe { self.gpu.api().stream_batch_mem_op(self.stream.stream, 1, &mut write, 0) };
        if let Err(error) = marked {
            // The end of the parts enqueued cannot be detected: their memory is leaked, and waiters time out.
            self.broken = Some(error.to_string());
            std::mem::forget((parts, opened));
            return;
        }
        self.stream.last = value;
        if failure.is_none() {
            ticket.done_at(self.stream.word.clone(), value);
        }
        let (since, failure) = (Instant::now(), failure.map(|error| error.to_string()));
        self.last = since;
        self.running.push_back(Running { value, ticket, parts, opened, since, failure });
    }

    /// Enqueues one part.
    fn begin(&mut self, part: &Part, opened: &mut Vec<IpcOpening>) -> Result<()> {
        let (api, own) = (self.gpu.api(), self.gpu.raw_context());
        let (to, to_context) = self.find(&part.to)?;
        let dst = to + part.at as u64;
        let (src, from_context) = match &part.from {
            Source::Here(memory, at) => {
                let (from, context) = self.find(memory)?;
                (from + *at as u64, context)
            }
            Source::Peer { process, handle, at } => {
                let opening = IpcOpening::new(&self.gpu, *process, handle, true)?;
                let base = opening.base();
                opened.push(opening);
                (base + handle.offset + at, Some(own))
            }
        };
        let done = match (to_context, from_context) {
            (Some(to), Some(from)) if to != from => {
                // SAFETY: both ranges are checked and owned until the copy is over; the contexts are those of the ranges.
                unsafe { api.memcpy_peer_async(dst, to, src, from, part.len, self.stream.stream) }
            }
            // SAFETY: both ranges are checked and owned until the copy is over; CUDA finds their location by address.
            _ => unsafe { api.memcpy_async(dst, src, part.len, self.stream.stream) },
        };
        done.map_err(Error::cuda("copying payload"))
    }

    /// Address of memory on the GPU, and its context unless it is host memory.
    fn find(&self, memory: &Memory) -> Result<(u64, Option<RawHandle>)> {
        let Some(owner) = memory.gpu() else { return Ok((memory.gpu_addr(&self.gpu)?, None)) };
        // Without peer access CUDA copies through host memory.
        if let Err(error) = self.gpu.reach(owner) {
            tracing::debug!(%error, "copies between two GPUs go through host memory");
        }
        Ok((memory.addr(), Some(owner.raw_context())))
    }

    /// Releases the resources of copies that are over.
    fn reap(&mut self) {
        let seen = self.stream.word.load();
        while self.running.front().is_some_and(|r| seen.wrapping_sub(r.value).cast_signed() >= 0) {
            let Some(mut copy) = self.running.pop_front() else { return };
            match copy.failure.take() {
                None => copy.ticket.done(),
                Some(why) => copy.ticket.fail(why),
            }
            release_parts(std::mem::take(&mut copy.parts));
        }
        if self.running.front().is_some_and(|r| r.since.elapsed() > SUSPICIOUS) {
            self.examine();
        }
    }

    /// Checks whether the stream has failed.
    fn examine(&mut self) {
        // SAFETY: the stream is ours.
        match unsafe { self.gpu.api().stream_query(self.stream.stream) } {
            Ok(()) | Err(gdrcopy::Error::Cuda { status: CudaStatus::NOT_READY, .. }) => {}
            Err(error) => {
                tracing::error!(%error, gpu = ?self.gpu, "the GPU copies nothing any more");
                let why = error.to_string();
                for mut copy in self.running.drain(..) {
                    copy.ticket.fail(why.clone());
                    release_parts(std::mem::take(&mut copy.parts));
                }
                self.broken = Some(why);
            }
        }
    }
}

fn release_parts(parts: Vec<Part>) {
    for Part { from, to, .. } in parts {
        to.release_in_background();
        if let Source::Here(memory, _) = from {
            memory.release_in_background();
        }
    }
}

/// The engines of all GPUs whose memory is registered or that drive a queue pair.
#[derive(Default)]
pub struct GpuCopyEngines(RwLock<Vec<Arc<Engine>>>);

impl fmt::Debug for GpuCopyEngines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.read().iter().map(|engine| engine.gpu())).finish()
    }
}

impl GpuCopyEngines {
    /// The engine of the destination's GPU, or the first one; so copies to the same memory are in order.
    fn of(&self, parts: &[Part]) -> Option<Arc<Engine>> {
        let engines = self.0.read();
        let of = |gpu: &Gpu| engines.iter().find(|e| e.gpu().raw_context() == gpu.raw_context());
        let to = parts.iter().find_map(|part| part.to.gpu().and_then(of));
        to.or(engines.first()).cloned()
    }
}

impl CopyEngine for GpuCopyEngines {
    fn adopt(&self, gpu: &Gpu) {
        let is_known =
            |engines: &[Arc<Engine>]| engines.iter().any(|e| e.gpu().raw_context() == gpu.raw_context());
        if is_known(&self.0.read()) {
            return;
        }
        // Without the lock, because the HCA takes it under its own lock.
        match gpu.engine() {
            Ok(engine) => {
                let mut engines = self.0.write();
                if !is_known(&engines) {
                    engines.push(engine);
                }
            }
            Err(error) => tracing::warn!(%error, ?gpu, "no copy engine: the CPU moves all payload"),
        }
    }

    fn export(&self, memory: &Memory) -> Option<Handle> {
        let gpu = memory.gpu()?;
        handle(gpu, memory.addr())
            .inspect_err(|error| tracing::debug!(%error, ?memory, "peers cannot be referred to this memory"))
            .ok()
    }

    fn stages(&self, memory: &Memory) -> bool {
        memory.gpu().is_some()
    }

    fn start(&self, parts: Vec<Part>) -> Ticket {
        match self.of(&parts) {
            Some(engine) => engine.copy(parts),
            None => {
                Ticket::failed("no GPU is known here: register GPU memory, or build a queue pair on a GPU")
            }
        }
    }

    fn forget(&self, process: ProcessId) {
        self.0.read().iter().for_each(|engine| engine.forget(process));
    }
}

/// The handle of the memory at an address.
fn handle(gpu: &Gpu, addr: u64) -> Result<Handle> {
    let failed = Error::cuda("exporting GPU memory");
    let _current = gpu.enter()?;
    let info = pointer_info(gpu.api(), addr).map_err(&failed)?;
    let (buffer, offset) = (info.buffer_id, addr.saturating_sub(info.base));
    let mut ipc = [0; 64];
    if info.kind == MemoryKind::Malloc {
        // SAFETY: a place for the answer; the driver checks the address.
        if let Err(error) = unsafe { gpu.api().ipc_get_mem_handle(&mut ipc, info.base) } {
            tracing::debug!(%error, "other processes cannot open this memory");
            ipc = [0; 64];
        }
    }
    Ok(Handle { ipc, buffer, offset })
}
