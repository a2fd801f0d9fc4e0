//! The CUDA engine: a CUDA stream that runs the operations.
//!
//! [`CudaEngine`] is the handle. `shared` has the state of handle and watchdog: queue, counters, failure, waiting
//! callers, host functions. `plan` turns operations into driver calls.
//! `graph` has captures, launches and kernel steps; `instance` has what is launched. `nudger` wakes the GPU's front
//! end. `watchdog` keeps deadlines and releases failed streams.
//!
//! Unlike a host stream, the driver cannot take work back. When a stream fails, its queue pairs are stopped first, so
//! that no later doorbell sends anything; then the waits are released one by one. Queued writes to application words
//! still happen ([`Via::MemOp`]), and so do application kernels.

mod graph;
mod instance;
mod nudger;
mod plan;
mod shared;
mod watchdog;

use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use gdrcopy::cuda::raw::layout::STREAM_NON_BLOCKING;
pub use gdsync_device::cuda::Via;

use self::shared::Shared;
pub(crate) use self::shared::SubmitGuard;
use super::engine::{Engine, Progress};
use super::graph::EngineGraph;
use super::op::{Kept, Op, Ops};
use super::{Batch, Cond, Stream, SubmitLock};
use gdsync_device::GpuNudge;
use gdsync_device::cuda::{Calibration, Gpu, RawStream, watch_activity};
use gdsync_device::error::{Error, Result};
use gdsync_device::fork_guard::ForkGuard;
use gdsync_device::memory::Memory;

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: RawStream = 2;

/// The engine of one CUDA stream.
///
/// After the last handle is dropped, the watchdog stays until pending work is done. The drop joins it if none is pending, or
/// the stream has failed: then the GPU releases its work in a fraction of a second, unless application kernels hold the
/// stream. A panic that drops the handle fails pending work.
pub(super) struct CudaEngine {
    fork_guard: ForkGuard,
    shared: Arc<Shared>,
    /// `Some` until the drop.
    watchdog: Option<JoinHandle<()>>,
}

impl CudaEngine {
    /// Creates a stream.
    pub(super) fn start(
        gpu: &Gpu,
        config: CudaStreamConfig,
        submit_lock: Arc<SubmitLock>,
    ) -> Result<Arc<Self>> {
        config.check()?;
        let current = gpu.enter()?;
        let mut stream = 0;
        // SAFETY: a place for the answer; a context is current.
        unsafe { gpu.api().stream_create(&mut stream, STREAM_NON_BLOCKING, 0) }
            .map_err(Error::cuda("making a stream"))?;
        drop(current);
        Self::with(gpu, (stream, true), config, submit_lock)
    }

    /// Uses a stream of the application, which must outlive the engine.
    pub(super) fn from_raw(
        gpu: &Gpu,
        stream: RawStream,
        config: CudaStreamConfig,
        submit_lock: Arc<SubmitLock>,
    ) -> Result<Arc<Self>> {
        config.check()?;
        if stream == PER_THREAD {
            return Err(Error::Unsupported {
                what: "the default stream of a thread",
                by: "this library, whose threads each have a different one",
                fix: "use Stream::cuda, or pass the legacy default stream",
            });
        }
        Self::with(gpu, (stream, false), config, submit_lock)
    }

    fn with(
        gpu: &Gpu,
        stream: (RawStream, bool),
        config: CudaStreamConfig,
        submit_lock: Arc<SubmitLock>,
    ) -> Result<Arc<Self>> {
        let shared = Shared::new(gpu, stream, config, submit_lock)?;
        let weak: Weak<Shared> = Arc::downgrade(&shared);
        watch_activity(weak);
        let watched = shared.clone();
        let watchdog = thread::Builder::new()
            .name("gdsync-watchdog".into())
            .spawn(move || watched.watch_guarded())
            .map_err(|e| {
                Error::os("pthread_create", e, "raise the thread limit (ulimit -u) or use fewer streams")
            })?;
        Ok(Arc::new(Self { fork_guard: ForkGuard::default(), shared, watchdog: Some(watchdog) }))
    }
}

impl Engine for CudaEngine {
    fn signals(&self) -> bool {
        false
    }

    fn nudger(&self) -> Option<&Arc<dyn GpuNudge>> {
        self.shared.nudger.as_ref()
    }

    fn kind(&self) -> &'static str {
        "cuda"
    }

    fn gpu(&self) -> Option<&Gpu> {
        Some(&self.shared.gpu)
    }

    fn raw(&self) -> Option<RawStream> {
        self.shared.expose_handle();
        Some(self.shared.stream)
    }

    fn check_reentrancy(&self) -> Result<()> {
        shared::refuse_in_host_fn()
    }

    fn submit(&self, guard: &mut SubmitGuard, ops: &mut Ops) -> Result<u64> {
        self.fork_guard.check()?;
        self.shared.submit(guard, ops)
    }

    fn mark(&self, guard: &mut SubmitGuard) {
        // CUDA must not be called within a host function: the watchdog marks the stream then.
        if self.fork_guard.is_here() && !shared::in_host_fn() {
            self.shared.mark_locked(guard);
        }
    }

    fn begin_capture(&self, guard: &mut SubmitGuard) -> Result<()> {
        self.fork_guard.check()?;
        self.shared.begin_capture(guard)
    }

    fn record(&self, guard: &mut SubmitGuard, ops: &[Op], anew: &[bool]) -> Result<()> {
        self.fork_guard.check()?;
        self.shared.record(guard, ops, anew)
    }

    fn end_capture(&self, guard: &mut SubmitGuard) -> Result<EngineGraph> {
        self.fork_guard.check()?;
        Ok(self.shared.end_capture(guard)?)
    }

    fn launch(&self, guard: &mut SubmitGuard, made: &EngineGraph, kept: Kept, ops: &mut Ops) -> Result<u64> {
        self.fork_guard.check()?;
        let exec = made.downcast_ref().ok_or_else(graph::other_gpu)?;
        self.shared.launch(guard, exec, kept, ops)
    }

    fn record_step(&self, ops: &[Op], anew: &[bool]) -> Result<EngineGraph> {
        self.fork_guard.check()?;
        Ok(Arc::new(self.shared.record_step(ops, anew)?))
    }

    fn make_steps(&self, steps: Vec<EngineGraph>) -> Result<EngineGraph> {
        self.fork_guard.check()?;
        Ok(self.shared.make_steps(steps)?)
    }

    fn launch_steps(
        &self,
        guard: &mut SubmitGuard,
        made: &EngineGraph,
        kept: Kept,
        ops: &mut Ops,
        kernel: &mut dyn FnMut(u64) -> bool,
    ) -> Result<u64> {
        self.fork_guard.check()?;
        let step_pool = made.downcast_ref().ok_or_else(graph::other_executor)?;
        self.shared.launch_steps(guard, step_pool, kept, ops, kernel)
    }

    fn completed(&self) -> u64 {
        self.shared.completed()
    }

    fn submitted(&self) -> u64 {
        self.shared.submitted()
    }

    fn wait_completed(&self, seq: u64, deadline: Instant) -> bool {
        !self.fork_guard.is_here() || self.shared.wait_completed(seq, deadline)
    }

    fn check_room(&self, guard: &mut SubmitGuard, ops: usize, host_fns: usize) -> Result<()> {
        self.fork_guard.check()?;
        self.shared.check_room(guard, ops, host_fns)
    }

    fn wait_room(&self, deadline: Instant) -> bool {
        !self.fork_guard.is_here()
            || self.shared.block_until(deadline, || self.shared.failed() || self.shared.has_room())
    }

    fn progress(&self) -> Arc<dyn Progress> {
        self.shared.clone()
    }

    fn holder(&self) -> Option<(String, Duration)> {
        self.fork_guard.is_here().then(|| self.shared.holder())?
    }

    fn fail(&self, error: Error) {
        if self.fork_guard.is_here() {
            self.shared.fail(error);
        }
    }

    fn error(&self) -> Option<Error> {
        self.fork_guard.check().err().or_else(|| self.shared.error())
    }
}

impl Drop for CudaEngine {
    fn drop(&mut self) {
        // A forked child has no watchdog thread, and CUDA does not work there.
        let Some(watchdog) = self.fork_guard.take_thread(&mut self.watchdog) else { return };
        let is_over = self.shared.close();
        if is_over && watchdog.thread().id() != thread::current().id() && !shared::in_host_fn() {
            // The watchdog reports its own panics.
            let _ = watchdog.join();
        }
    }
}

impl fmt::Debug for CudaEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaEngine")
            .field("name", &self.shared.config.name)
            .field("submitted", &self.submitted())
            .field("completed", &self.completed())
            .field("error", &self.error())
            .finish()
    }
}

/// Whether the CPU nudges the GPU after writing a completion that the GPU waits for.
///
/// The nudge is a memory operation on a separate stream: 0.7 us of CPU time. Only the software HCA can nudge; a card
/// writes its completions without the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Nudge {
    /// For streams of [`Via::MemOp`], whose waits it shortens.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

impl fmt::Display for Nudge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Nudge::Auto => "auto",
            Nudge::On => "on",
            Nudge::Off => "off",
        })
    }
}

impl FromStr for Nudge {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self> {
        match word {
            "auto" => Ok(Nudge::Auto),
            "on" => Ok(Nudge::On),
            "off" => Ok(Nudge::Off),
            _ => Err(Error::invalid("nudge", format!("'{word}'"), "auto, on or off")),
        }
    }
}
/// Configuration of a CUDA stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaStreamConfig {
    /// The stream's name in errors. Empty, as by default, for its number.
    pub name: String,
    /// Maximum number of pending driver calls, 1 to 512: about one per submission. From 1,020 on the driver blocks the
    /// caller, and all other callers, until the stream moves. Work that the application queues on the stream, and work
    /// of other streams on the same hardware channel, count too.
    pub depth: usize,
    /// Time limit of a single wait, after which the stream fails. Not zero.
    ///
    /// It starts when all work that this library queued before the wait is done, except host functions: their time, and
    /// that of application kernels in between, counts.
    pub wait_limit: Duration,
    /// What executes the operations.
    pub via: Via,
    /// What copies to and from [memory of peers](crate::stream::Batch::put_peer): kernels ([`Via::Kernel`]), or the copy engine with a
    /// write of the signal behind it ([`Via::MemOp`]), which uses no SM. [`Via::Auto`], the default, takes kernels where they can
    /// be loaded.
    ///
    /// Between two H200s the copy engine is as fast as kernels on streams of memory operations (8 us for half a round trip of 8 bytes),
    /// and takes twice the time of kernels on streams of kernels. It also copies behind a wait that has failed its stream, and if `via`
    /// is [`Via::MemOp`], the signal is written then, too: see that peers do not go by it.
    pub copies: Via,
    /// Whether the CPU nudges the GPU after completions.
    pub nudge: Nudge,
    /// Whether the application may capture the stream by means other than [`Stream::capture`]: `cuStreamBeginCapture`,
    /// or an event of a captured stream. If so, each submission asks CUDA first (some 40 ns) and is refused in such a
    /// capture. With `false`, the application promises not to: otherwise sends and waits would become part of that
    /// graph and not run.
    ///
    /// [`Stream::capture`]: crate::stream::Stream::capture
    pub captured_by_others: bool,
    /// Whether the application may destroy a stream of its own while the `Stream` lives (default `false`). Each submission
    /// then marks its end, and only submissions call CUDA with the stream. Later submissions are errors of the application.
    pub may_be_destroyed: bool,
}

impl Default for CudaStreamConfig {
    fn default() -> Self {
        Self {
            name: String::new(),
            depth: 256,
            wait_limit: Duration::from_secs(30),
            via: Via::default(),
            copies: Via::Auto,
            nudge: Nudge::default(),
            captured_by_others: true,
            may_be_destroyed: false,
        }
    }
}

impl CudaStreamConfig {
    fn check(&self) -> Result<()> {
        if !(1..=512).contains(&self.depth) {
            return Err(Error::invalid("stream depth", self.depth, "1 to 512 calls"));
        }
        if self.wait_limit.is_zero() {
            return Err(Error::invalid("stream wait limit", "0", "a duration above 0"));
        }
        Ok(())
    }
}

/// Wake-ups measured per method.
const ROUNDS: u64 = 400;
/// Time limit of a wake-up, which normally takes microseconds.
const PATIENCE: Duration = Duration::from_secs(2);

/// Measures how quickly streams notice a satisfied wait. Takes a fraction of a second; done once for each GPU of the
/// process. Other work on the GPU, of this or other processes, affects the result.
///
/// # Errors
/// [`Error::Cuda`]; [`Error::Deadline`] when the GPU runs nothing in time.
pub fn calibrate(gpu: &Gpu) -> Result<Calibration> {
    gpu.calibrated(|| {
        let (memop, kernel) = (measure(gpu, Via::MemOp)?, measure(gpu, Via::Kernel)?);
        let shared = gpu.is_shared_with_processes();
        let quicker = kernel.0 + kernel.1 < memop.0 + memop.1;
        let via = if quicker && !shared { Via::Kernel } else { Via::MemOp };
        Ok(Calibration { memop, kernel, shared, via })
    })
}

fn measure(gpu: &Gpu, via: Via) -> Result<(Duration, Duration)> {
    let config =
        CudaStreamConfig { name: format!("calibration of {via}"), via, ..CudaStreamConfig::default() };
    let stream = Stream::cuda(gpu, config)?;
    let words = Memory::alloc(256)?;
    let (flag, answer) = (words.word32(0)?, words.word64(128)?);
    let mut times = Vec::new();
    for round in 1..=ROUNDS {
        let mut batch = Batch::new();
        let number = u32::try_from(round).expect("ROUNDS fits in 32 bits");
        batch.wait_value32(&flag, number, Cond::Geq);
        batch.write_value64(&answer, round);
        stream.submit(&mut batch)?;
        // Lets the stream wait for a time unrelated to its polling period.
        let pause = Instant::now() + Duration::from_micros(20 + round * 7919 % 31);
        while Instant::now() < pause {
            std::hint::spin_loop();
        }
        let start = Instant::now();
        flag.store(number);
        while answer.load() != round {
            if start.elapsed() > PATIENCE {
                let awaited = "the GPU to run a wait and a write; see that no other work keeps it busy";
                return Err(Error::late("calibrating the GPU", PATIENCE, awaited));
            }
            std::hint::spin_loop();
        }
        times.push(start.elapsed());
    }
    stream.synchronize(PATIENCE)?;
    // Drops the first tenth: cold caches.
    let mut times = times.split_off(times.len() / 10);
    times.sort();
    Ok((times[times.len() / 2], times[times.len() * 99 / 100]))
}

#[cfg(test)]
mod tests {
    use gdsync_soft::SoftHcaConfig;
    use gdsync_testkit::driver;

    use super::*;
    use crate::verbs::sq::OfStream;
    use crate::verbs::{Context, SendWr};

    #[test]
    fn via_and_nudge_parse_their_display() {
        for via in [Via::MemOp, Via::Kernel, Via::Auto] {
            assert_eq!(via.to_string().parse::<Via>().unwrap(), via);
        }
        for nudge in [Nudge::Auto, Nudge::On, Nudge::Off] {
            assert_eq!(nudge.to_string().parse::<Nudge>().unwrap(), nudge);
        }
        assert!("MemOp".parse::<Via>().unwrap_err().to_string().contains("memop, kernel or auto"));
    }

    #[test]
    fn the_device_does_not_attend_to_a_refused_wait() {
        let _control = driver::Control::take();
        let gpu = Gpu::open_with(driver::api(), 0, driver::gdr().ok()).unwrap();
        let pd = Context::soft(&SoftHcaConfig::default()).unwrap().alloc_pd().unwrap();
        let (a, b) = (pd.build_qp().build().unwrap(), pd.build_qp().build().unwrap());
        a.connect(b.address()).unwrap();
        b.connect(a.address()).unwrap();
        let stream = Stream::cuda(&gpu, CudaStreamConfig::default()).unwrap();
        let may_unwatch = || a.send.end.cq.parts().event.may_unwatch(0);
        let mut batch = Batch::new();
        batch.send(&a, &SendWr::nop()).unwrap();
        batch.wait_send(&a).unwrap();
        batch.mark(OfStream { id: 7, by_gpu: true }).unwrap();
        assert!(!may_unwatch(), "a submitted wait is below the watch limit");
        batch.unmark();
        stream.abort();
        assert!(matches!(stream.submit(&mut batch), Err(Error::StreamAborted { .. })));
        assert!(may_unwatch());
    }
}
