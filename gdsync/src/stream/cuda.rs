//! The CUDA engine: a stream of a GPU that runs the operations.
//!
//! [`CudaEngine`] is the handle; `shared` is what handle and watchdog have in common (the queue, the counters, the
//! failure); `row` has sends and waits that come one by one, or one of each; `callers` has those who wait; `retire` gives back what
//! is over; `plan` turns operations into calls of the driver, `lane` is the kernel that can run them in place of the GPU's front
//! end; `reserve` makes room for streams; `graph` has captures and their launches, `steps` what kernels of the application run, `instance` what
//! is launched; `watch` is the watchdog, `crowd` what it knows of other streams.
//!
//! What differs from a host stream: the driver takes nothing back. When a stream fails, its queue pairs are stopped first,
//! so that no doorbell behind the failed wait sends anything, then the waits are released one after the other; writes
//! to words of the application that are queued behind them still happen ([`Via::MemOp`]), and so do kernels of the
//! application.

mod coalesced;
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
#[doc(hidden)]
pub use self::shared::SubmitGuard;
use super::engine::Engine;
use super::graph::Made;
use super::op::{Arrival, DoorbellValue, Op, Ops, SendDoorbell, Source};
use super::{Batch, Cond, Stream, SubmitLock};
use gdsync_device::GpuNudge;
use gdsync_device::cuda::{Calibration, Gpu, RawStream, mind};
use gdsync_device::error::{Error, Result};
use gdsync_device::fork_guard::ForkGuard;
use gdsync_device::memory::Memory;

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: RawStream = 2;

/// A stream on a GPU.
///
/// Dropping the last handle fails what is pending with [`Error::StreamAborted`], and waits until the GPU has let go of
/// it: a fraction of a second unless kernels of the application hold the stream.
pub(super) struct CudaEngine {
    fork_guard: ForkGuard,
    shared: Arc<Shared>,
    /// Always there until the drop.
    watchdog: Option<JoinHandle<()>>,
}

impl CudaEngine {
    /// Makes a stream.
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

    /// Takes a stream of the application into use, which must outlive the engine.
    pub(super) fn lent(
        gpu: &Gpu,
        stream: RawStream,
        config: CudaStreamConfig,
        submit_lock: Arc<SubmitLock>,
    ) -> Result<Arc<Self>> {
        config.check()?;
        if stream == PER_THREAD {
            return Err(Error::Unsupported {
                what: "the default stream of a thread",
                by: "streams, which several threads serve: in each of them it is another one",
                fix: "make a stream, or lend the legacy default stream",
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
        mind(weak);
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

    fn raw(&self) -> Option<RawStream> {
        self.shared.show();
        Some(self.shared.stream)
    }

    fn refuse_here(&self) -> Result<()> {
        shared::refuse_in_host_fn()
    }

    fn submit(&self, guard: &mut SubmitGuard, ops: &mut Ops) -> Result<u64> {
        self.fork_guard.check()?;
        self.shared.submit(guard, ops)
    }

    // Of the next three none is asked for in a child: its queue pairs have refused.

    fn trigger(
        &self,
        guard: &mut SubmitGuard,
        source: &Arc<dyn Source>,
        send_doorbell: &SendDoorbell,
        value: DoorbellValue,
    ) -> Result<u64> {
        self.shared.trigger(guard, source, send_doorbell, value)
    }

    fn wait(
        &self,
        guard: &mut SubmitGuard,
        source: &Arc<dyn Source>,
        arrival: &Arrival<'_>,
        n: u64,
    ) -> Result<u64> {
        self.shared.wait(guard, source, arrival, n)
    }

    fn hop(
        &self,
        guard: &mut SubmitGuard,
        trigger: (&Arc<dyn Source>, &SendDoorbell, DoorbellValue),
        wait: (&Arc<dyn Source>, &Arrival<'_>, u64),
    ) -> Result<u64> {
        self.shared.hop(guard, trigger, wait)
    }

    fn mark(&self, guard: &mut SubmitGuard) {
        // Not within a host function, where CUDA must not be called: then the watchdog sees to it.
        if self.fork_guard.is_here() && !shared::in_host_fn() {
            self.shared.mark_in_turn(guard);
        }
    }

    fn begin_capture(&self, guard: &mut SubmitGuard) -> Result<()> {
        self.fork_guard.check()?;
        self.shared.begin_capture(guard)
    }

    fn record(&self, guard: &mut SubmitGuard, ops: &[Op]) -> Result<()> {
        self.fork_guard.check()?;
        self.shared.record(guard, ops)
    }

    fn end_capture(&self, guard: &mut SubmitGuard) -> Result<Made> {
        self.fork_guard.check()?;
        Ok(self.shared.end_capture(guard)?)
    }

    fn launch(&self, guard: &mut SubmitGuard, made: &Made, ops: &mut Ops, ends: &[usize]) -> Result<u64> {
        self.fork_guard.check()?;
        let exec = made.clone().downcast().map_err(|_| graph::other_gpu())?;
        self.shared.launch(guard, &exec, ops, ends)
    }

    fn size_of_step(&self, ops: &[Op]) -> Result<usize> {
        self.fork_guard.check()?;
        self.shared.size_of_step(ops)
    }

    fn make_steps(&self, sizes: Vec<usize>) -> Result<Made> {
        self.fork_guard.check()?;
        Ok(self.shared.make_steps(sizes)?)
    }

    fn launch_steps(
        &self,
        guard: &mut SubmitGuard,
        made: &Made,
        ops: &mut Ops,
        ends: &[usize],
        kernel: &mut dyn FnMut(u64) -> bool,
    ) -> Result<u64> {
        self.fork_guard.check()?;
        let step_pool = made.downcast_ref().ok_or_else(graph::other_executor)?;
        self.shared.launch_steps(guard, step_pool, ops, ends, kernel)
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

    fn ask_room(&self, guard: &mut SubmitGuard, ops: usize, host_fns: usize) -> Result<()> {
        self.fork_guard.check()?;
        self.shared.ask_room(guard, ops, host_fns)
    }

    fn wait_room(&self, deadline: Instant) -> bool {
        !self.fork_guard.is_here()
            || self.shared.block_until(deadline, || self.shared.failed() || self.shared.has_room())
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
        // The watchdog is not in a forked child, where CUDA does not work either.
        let Some(watchdog) = self.fork_guard.take_thread(&mut self.watchdog) else { return };
        self.shared.close();
        if watchdog.thread().id() != thread::current().id() && !shared::in_host_fn() {
            // It catches nothing, and there is nobody to tell.
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

/// Whether the CPU, after it has written a completion that a GPU waits for, prods the GPU to look at it.
///
/// It does so with a memory operation on a stream of its own: 0.7 us of CPU time. Only the software HCA can; a card
/// writes its completions alone.
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
/// How a stream on a GPU behaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaStreamConfig {
    /// The stream's name in errors. Not empty.
    pub name: String,
    /// How many calls into the driver may be pending, 1 to 512: about one for each submission. From 1,020 on the driver blocks
    /// the caller, and whoever else calls it, until the stream moves; what the application has queued on the stream counts, too,
    /// and what is queued on other streams that share its channel of the GPU.
    pub depth: usize,
    /// How long a single wait may hold the stream before the stream fails. Not zero.
    ///
    /// It counts from when all that this library queued before the wait is done, but for host functions: these, and kernels
    /// that the application queued in between, count too.
    pub wait_limit: Duration,
    /// What runs the operations.
    pub via: Via,
    /// Whether the CPU prods the GPU after completions.
    pub nudge: Nudge,
    /// Whether the application, which knows the stream, may capture it by other means than [`Stream::capture`]: with
    /// `cuStreamBeginCapture`, or by an event of a stream that is being captured. Then CUDA is asked before each submission, which takes
    /// some 40 ns, and within such a capture none is taken. `false` is a promise: were it broken, sends and waits would go into
    /// that graph, and not run.
    ///
    /// [`Stream::capture`]: crate::stream::Stream::capture
    pub captured_by_others: bool,
}

impl Default for CudaStreamConfig {
    fn default() -> Self {
        Self {
            name: "cuda stream".to_owned(),
            depth: 256,
            wait_limit: Duration::from_secs(30),
            via: Via::default(),
            nudge: Nudge::default(),
            captured_by_others: true,
        }
    }
}

impl CudaStreamConfig {
    fn check(&self) -> Result<()> {
        if self.name.is_empty() {
            return Err(Error::invalid("stream name", "''", "a name"));
        }
        if !(1..=512).contains(&self.depth) {
            return Err(Error::invalid("stream depth", self.depth, "1 to 512 calls"));
        }
        if self.wait_limit.is_zero() {
            return Err(Error::invalid("stream wait limit", "0", "a duration above 0"));
        }
        Ok(())
    }
}

/// Wake-ups measured for each way.
const ROUNDS: u64 = 400;
/// A wake-up takes a few microseconds.
const PATIENCE: Duration = Duration::from_secs(2);

/// Measures how quickly streams notice what they wait for; takes a fraction of a second. Measured once for each
/// GPU of the process; what else runs on the GPU meanwhile, in this or other processes, counts.
///
/// # Errors
/// [`Error::Cuda`]; [`Error::Deadline`] when the GPU is kept from running anything.
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
        let number = u32::try_from(round).expect("few rounds");
        batch.wait_value32(&flag, number, Cond::Geq);
        batch.write_value64(&answer, round);
        stream.submit(&mut batch)?;
        // The stream is waiting by then, for a time that has nothing to do with the period of its looks.
        let pause = Instant::now() + Duration::from_micros(20 + round * 7919 % 31);
        while Instant::now() < pause {
            std::hint::spin_loop();
        }
        let start = Instant::now();
        flag.store(number);
        while answer.load() != round {
            if start.elapsed() > PATIENCE {
                return Err(Error::Deadline { what: "calibrating the GPU", after: PATIENCE });
            }
            std::hint::spin_loop();
        }
        times.push(start.elapsed());
    }
    stream.synchronize(PATIENCE)?;
    // The first ones find cold caches.
    let mut times = times.split_off(times.len() / 10);
    times.sort();
    Ok((times[times.len() / 2], times[times.len() * 99 / 100]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_back() {
        for via in [Via::MemOp, Via::Kernel, Via::Auto] {
            assert_eq!(via.to_string().parse::<Via>().unwrap(), via);
        }
        for nudge in [Nudge::Auto, Nudge::On, Nudge::Off] {
            assert_eq!(nudge.to_string().parse::<Nudge>().unwrap(), nudge);
        }
        assert!("MemOp".parse::<Via>().unwrap_err().to_string().contains("memop, kernel or auto"));
    }
}
