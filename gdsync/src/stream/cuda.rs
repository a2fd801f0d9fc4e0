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

mod calibrate;
mod coalesced;
mod completed;
mod config;
mod graph;
mod host_fn;
mod instance;
mod nudger;
mod plan;
mod shared;
mod steps;
mod waiters;
mod watchdog;

use std::fmt;
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::Instant;

pub use calibrate::calibrate;
pub use config::{CudaStreamConfig, Nudge};
use gdrcopy::cuda::raw::layout::STREAM_NON_BLOCKING;
pub use gdsync_device::cuda::Via;

use self::shared::Shared;
#[doc(hidden)]
pub use self::shared::SubmitGuard;
use super::engine::Engine;
use super::graph::Made;
use super::op::{Arrival, Bell, Op, Ops, Ring, Source};
use super::submit_lock::SubmitLock;
use gdsync_device::GpuNudge;
use gdsync_device::cuda::{Gpu, RawStream, mind};
use gdsync_device::error::{Error, Result};
use gdsync_device::fork_guard::ForkGuard;

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
        host_fn::refuse()
    }

    fn submit(&self, turn: &mut SubmitGuard, ops: &mut Ops) -> Result<u64> {
        self.fork_guard.check()?;
        self.shared.submit(turn, ops)
    }

    // Of the next three none is asked for in a child: its queue pairs have refused.

    fn trigger(
        &self,
        turn: &mut SubmitGuard,
        source: &Arc<dyn Source>,
        bell: &Bell,
        ring: Ring,
    ) -> Result<u64> {
        self.shared.trigger(turn, source, bell, ring)
    }

    fn wait(
        &self,
        turn: &mut SubmitGuard,
        source: &Arc<dyn Source>,
        arrival: &Arrival<'_>,
        n: u64,
    ) -> Result<u64> {
        self.shared.wait(turn, source, arrival, n)
    }

    fn hop(
        &self,
        turn: &mut SubmitGuard,
        trigger: (&Arc<dyn Source>, &Bell, Ring),
        wait: (&Arc<dyn Source>, &Arrival<'_>, u64),
    ) -> Result<u64> {
        self.shared.hop(turn, trigger, wait)
    }

    fn mark(&self, turn: &mut SubmitGuard) {
        // Not within a host function, where CUDA must not be called: then the watchdog sees to it.
        if self.fork_guard.is_here() && !host_fn::is_running() {
            self.shared.mark_in_turn(turn);
        }
    }

    fn begin_capture(&self, turn: &mut SubmitGuard) -> Result<()> {
        self.fork_guard.check()?;
        self.shared.begin_capture(turn)
    }

    fn record(&self, turn: &mut SubmitGuard, ops: &[Op]) -> Result<()> {
        self.fork_guard.check()?;
        self.shared.record(turn, ops)
    }

    fn end_capture(&self, turn: &mut SubmitGuard) -> Result<Made> {
        self.fork_guard.check()?;
        Ok(self.shared.end_capture(turn)?)
    }

    fn launch(&self, turn: &mut SubmitGuard, made: &Made, ops: &mut Ops, ends: &[usize]) -> Result<u64> {
        self.fork_guard.check()?;
        let exec = made.clone().downcast().map_err(|_| graph::elsewhere())?;
        self.shared.launch(turn, &exec, ops, ends)
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
        turn: &mut SubmitGuard,
        made: &Made,
        ops: &mut Ops,
        ends: &[usize],
        kernel: &mut dyn FnMut(u64) -> bool,
    ) -> Result<u64> {
        self.fork_guard.check()?;
        let step_pool = made.downcast_ref().ok_or_else(steps::elsewhere)?;
        self.shared.launch_steps(turn, step_pool, ops, ends, kernel)
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

    fn ask_room(&self, turn: &mut SubmitGuard, ops: usize, host_fns: usize) -> Result<()> {
        self.fork_guard.check()?;
        self.shared.ask_room(turn, ops, host_fns)
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
        if watchdog.thread().id() != thread::current().id() && !host_fn::is_running() {
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
