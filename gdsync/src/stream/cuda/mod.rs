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

mod callers;
mod config;
mod crowd;
mod graph;
mod host_fn;
mod instance;
mod kicker;
mod lane;
mod plan;
mod reserve;
mod retire;
mod row;
mod shared;
mod steps;
mod watch;

use std::fmt;
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::Instant;

pub use config::{CudaStreamConfig, Kick, Via};
use gdrcopy::cuda::raw::layout::STREAM_NON_BLOCKING;

pub(crate) use self::crowd::Crowd;
pub(crate) use self::kicker::Slot as KickerSlot;
pub(crate) use self::lane::Lane;
pub(crate) use self::reserve::reserve;
use self::shared::Shared;
#[doc(hidden)]
pub use self::shared::Turn;
use super::engine::Engine;
use super::graph::Made;
use super::op::{Arrival, Bell, Op, Ops, Ring, Source};
use super::turns::Turns;
use crate::cuda::{Gpu, RawStream, mind};
use crate::error::{Error, Result};
use crate::hca::Kicks;
use crate::home::Home;

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: RawStream = 2;

/// A stream on a GPU.
///
/// Dropping the last handle fails what is pending with [`Error::StreamAborted`], and waits until the GPU has let go of
/// it: a fraction of a second unless kernels of the application hold the stream.
pub(super) struct CudaEngine {
    home: Home,
    shared: Arc<Shared>,
    /// Always there until the drop.
    watchdog: Option<JoinHandle<()>>,
}

impl CudaEngine {
    /// Makes a stream.
    pub(super) fn start(gpu: &Gpu, config: CudaStreamConfig, turns: Arc<Turns>) -> Result<Arc<Self>> {
        config.check()?;
        let current = gpu.enter()?;
        let mut stream = 0;
        // SAFETY: a place for the answer; a context is current.
        unsafe { gpu.api().stream_create(&mut stream, STREAM_NON_BLOCKING, 0) }
            .map_err(Error::cuda("making a stream"))?;
        drop(current);
        Self::with(gpu, (stream, true), config, turns)
    }

    /// Takes a stream of the application into use, which must outlive the engine.
    pub(super) fn lent(
        gpu: &Gpu,
        stream: RawStream,
        config: CudaStreamConfig,
        turns: Arc<Turns>,
    ) -> Result<Arc<Self>> {
        config.check()?;
        if stream == PER_THREAD {
            return Err(Error::Unsupported {
                what: "the default stream of a thread",
                by: "streams, which several threads serve: in each of them it is another one",
                fix: "make a stream, or lend the legacy default stream",
            });
        }
        Self::with(gpu, (stream, false), config, turns)
    }

    fn with(
        gpu: &Gpu,
        stream: (RawStream, bool),
        config: CudaStreamConfig,
        turns: Arc<Turns>,
    ) -> Result<Arc<Self>> {
        let shared = Shared::new(gpu, stream, config, turns)?;
        let weak: Weak<Shared> = Arc::downgrade(&shared);
        mind(weak);
        let watched = shared.clone();
        let watchdog =
            thread::Builder::new().name("gdsync-watchdog".into()).spawn(move || watched.watch()).map_err(
                |e| Error::os("pthread_create", e, "raise the thread limit (ulimit -u) or use fewer streams"),
            )?;
        Ok(Arc::new(Self { home: Home::default(), shared, watchdog: Some(watchdog) }))
    }
}

impl Engine for CudaEngine {
    fn signals(&self) -> bool {
        false
    }

    fn kicker(&self) -> Option<&Arc<dyn Kicks>> {
        self.shared.kicker.as_ref()
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

    fn submit(&self, turn: &mut Turn, ops: &mut Ops) -> Result<u64> {
        self.home.check()?;
        self.shared.submit(turn, ops)
    }

    // Of the next three none is asked for in a child: its queue pairs have refused.

    fn trigger(&self, turn: &mut Turn, source: &Arc<dyn Source>, bell: &Bell, ring: Ring) -> Result<u64> {
        self.shared.trigger(turn, source, bell, ring)
    }

    fn wait(&self, turn: &mut Turn, source: &Arc<dyn Source>, arrival: &Arrival<'_>, n: u64) -> Result<u64> {
        self.shared.wait(turn, source, arrival, n)
    }

    fn hop(
        &self,
        turn: &mut Turn,
        trigger: (&Arc<dyn Source>, &Bell, Ring),
        wait: (&Arc<dyn Source>, &Arrival<'_>, u64),
    ) -> Result<u64> {
        self.shared.hop(turn, trigger, wait)
    }

    fn mark(&self, turn: &mut Turn) {
        // Not within a host function, where CUDA must not be called: then the watchdog sees to it.
        if self.home.is_here() && !host_fn::is_running() {
            self.shared.mark_in_turn(turn);
        }
    }

    fn begin_capture(&self, turn: &mut Turn) -> Result<()> {
        self.home.check()?;
        self.shared.begin_capture(turn)
    }

    fn record(&self, turn: &mut Turn, ops: &[Op]) -> Result<()> {
        self.home.check()?;
        self.shared.record(turn, ops)
    }

    fn end_capture(&self, turn: &mut Turn) -> Result<Made> {
        self.home.check()?;
        Ok(self.shared.end_capture(turn)?)
    }

    fn launch(&self, turn: &mut Turn, made: &Made, ops: &mut Ops, ends: &[usize]) -> Result<u64> {
        self.home.check()?;
        let exec = made.clone().downcast().map_err(|_| graph::elsewhere())?;
        self.shared.launch(turn, &exec, ops, ends)
    }

    fn size_of_step(&self, ops: &[Op]) -> Result<usize> {
        self.home.check()?;
        self.shared.size_of_step(ops)
    }

    fn make_steps(&self, sizes: Vec<usize>) -> Result<Made> {
        self.home.check()?;
        Ok(self.shared.make_steps(sizes)?)
    }

    fn launch_steps(
        &self,
        turn: &mut Turn,
        made: &Made,
        ops: &mut Ops,
        ends: &[usize],
        kernel: &mut dyn FnMut(u64) -> bool,
    ) -> Result<u64> {
        self.home.check()?;
        let armory = made.downcast_ref().ok_or_else(steps::elsewhere)?;
        self.shared.launch_steps(turn, armory, ops, ends, kernel)
    }

    fn completed(&self) -> u64 {
        self.shared.completed()
    }

    fn submitted(&self) -> u64 {
        self.shared.submitted()
    }

    fn wait_completed(&self, seq: u64, deadline: Instant) -> bool {
        !self.home.is_here() || self.shared.wait_completed(seq, deadline)
    }

    fn ask_room(&self, turn: &mut Turn, ops: usize, host_fns: usize) -> Result<()> {
        self.home.check()?;
        self.shared.ask_room(turn, ops, host_fns)
    }

    fn wait_room(&self, deadline: Instant) -> bool {
        !self.home.is_here()
            || self.shared.block_until(deadline, || self.shared.failed() || self.shared.has_room())
    }

    fn fail(&self, error: Error) {
        if self.home.is_here() {
            self.shared.fail(error);
        }
    }

    fn error(&self) -> Option<Error> {
        self.home.check().err().or_else(|| self.shared.error())
    }
}

impl Drop for CudaEngine {
    fn drop(&mut self) {
        // The watchdog is not in a forked child, where CUDA does not work either.
        let Some(watchdog) = self.home.take_thread(&mut self.watchdog) else { return };
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
