//! The interface of stream engines: the host thread of [`super::host`], or a CUDA stream.

use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fmt, mem};

use super::cuda::SubmitGuard;
use super::graph::EngineGraph;
use super::op::{Kept, Op, Ops};
use gdsync_device::GpuNudge;
use gdsync_device::cuda::{Gpu, RawStream};
use gdsync_device::error::{Error, Result};
use gdsync_device::memory::Word64;

/// How far an engine is, also after its last handle was dropped.
pub(super) trait Progress: Send + Sync {
    /// As [`Engine::completed`].
    fn completed(&self) -> u64;

    /// Whether a submission has completed, and not by a failure.
    ///
    /// # Errors
    /// The error that failed the engine.
    fn is_done(&self, seq: u64) -> Result<bool>;

    /// Has a GPU tell when it has done what it has.
    fn ask(&self) {}

    /// As [`Engine::wait_completed`].
    fn wait_completed(&self, seq: u64, deadline: Instant) -> bool;

    /// A word that reaches the number of a submission when that has completed, once it was asked for.
    fn word(&self) -> Option<&Word64> {
        None
    }
}

/// Runs operations in order. [`super::Stream`] relies on:
///
/// - Submissions run in the order of `submit`, and the operations of each in their order.
/// - A wait not satisfied within the engine's wait limit *fails the engine*: see [`Engine::fail`].
/// - A failed engine runs nothing more: pending operations are dropped, later submissions are refused with the first
///   error.
pub(super) trait Engine: Send + Sync + fmt::Debug {
    /// The engine's name: "host" or "cuda".
    fn kind(&self) -> &'static str;

    /// The `CUstream` behind it, if there is one.
    fn raw(&self) -> Option<RawStream> {
        None
    }

    /// The GPU of a CUDA stream.
    fn gpu(&self) -> Option<&Gpu> {
        None
    }

    /// Whether the engine notifies the device of each [`Op::Trigger`]. If not, the HCA must watch doorbells, and
    /// waiting streams cannot run its work.
    fn signals(&self) -> bool;

    /// Makes a CUDA stream re-check the words that it waits for.
    fn nudger(&self) -> Option<&Arc<dyn GpuNudge>> {
        None
    }

    /// Refuses a call, before it blocks, from a thread that must not call the engine.
    ///
    /// # Errors
    /// [`Error::Unsupported`] within a host function.
    fn check_reentrancy(&self) -> Result<()> {
        Ok(())
    }

    /// Refuses a wait for the engine from a thread that the engine waits for.
    ///
    /// # Errors
    /// [`Error::Unsupported`] within a host function.
    fn check_wait(&self) -> Result<()> {
        self.check_reentrancy()
    }

    /// Queues operations. The caller holds the submit lock. On refusal `ops` is unchanged.
    ///
    /// # Errors
    /// [`Error::StreamFull`] at the depth limit (retry later), or the error that failed the engine.
    fn submit(&self, guard: &mut SubmitGuard, ops: &mut Ops) -> Result<u64>;

    /// Marks the stream on behalf of a thread that found the submit lock taken.
    fn mark(&self, _guard: &mut SubmitGuard) {}

    /// Until [`Engine::end_capture`], batches go to [`Engine::record`] and to nothing else. No-op for an engine that
    /// launches a graph like any submission.
    ///
    /// # Errors
    /// What prevents a capture, or the error that failed the engine.
    fn begin_capture(&self, _guard: &mut SubmitGuard) -> Result<()> {
        Ok(())
    }

    /// Records a batch. `anew` says of each operation whether launches make it anew.
    ///
    /// # Errors
    /// [`Error::StreamFull`], or the error that failed the engine.
    fn record(&self, _guard: &mut SubmitGuard, _ops: &[Op], _anew: &[bool]) -> Result<()> {
        Ok(())
    }

    /// Ends the capture, even when it returns an error.
    ///
    /// # Errors
    /// What makes the capture useless.
    fn end_capture(&self, _guard: &mut SubmitGuard) -> Result<EngineGraph> {
        Ok(Arc::new(()))
    }

    /// Queues one launch of a capture as one submission: the operations that were `kept`, and those that the launch has made anew. On
    /// refusal `ops` is unchanged.
    ///
    /// # Errors
    /// [`Error::StreamFull`]; [`Error::Unsupported`] for a capture of an incompatible engine; the error that failed the
    /// engine.
    fn launch(&self, guard: &mut SubmitGuard, _made: &EngineGraph, kept: Kept, ops: &mut Ops) -> Result<u64> {
        let mut own = mem::take(ops).into_iter();
        let mut all = Ops::with_capacity(kept.ops.len());
        all.extend(kept.ops.iter().filter_map(|op| op.as_ref().map_or_else(|| own.next(), Op::again)));
        let submitted = self.submit(guard, &mut all);
        if submitted.is_err() {
            ops.extend(all.into_iter().zip(&*kept.ops).filter(|(_, kept)| kept.is_none()).map(|(op, _)| op));
        }
        submitted
    }

    /// Records a batch as a step of an application kernel, as [`Engine::record`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] where kernels cannot run the batch.
    fn record_step(&self, _ops: &[Op], _anew: &[bool]) -> Result<EngineGraph> {
        Err(no_kernels())
    }

    /// Makes the steps of a kernel.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without kernels; [`Error::Cuda`] when out of memory.
    fn make_steps(&self, _steps: Vec<EngineGraph>) -> Result<EngineGraph> {
        Err(no_kernels())
    }

    /// Queues steps as one submission, as [`Engine::launch`]. `kernel` gets their address and launches the kernel that runs them. If it
    /// returns `false`, nothing is queued, and the returned error has no meaning.
    ///
    /// # Errors
    /// [`Error::StreamFull`]; [`Error::Unsupported`] for steps of an incompatible engine; the error that failed the
    /// engine.
    fn launch_steps(
        &self,
        _guard: &mut SubmitGuard,
        _made: &EngineGraph,
        _kept: Kept,
        _ops: &mut Ops,
        _kernel: &mut dyn FnMut(u64) -> bool,
    ) -> Result<u64> {
        Err(no_kernels())
    }

    /// The number of submissions that have completed, or were dropped by a failure. Submissions are numbered from 1.
    fn completed(&self) -> u64;

    /// The number of accepted submissions.
    fn submitted(&self) -> u64;

    /// Blocks until `completed() >= seq` or the deadline. Returns whether it completed.
    fn wait_completed(&self, seq: u64, deadline: Instant) -> bool;

    /// Checks that a batch of `ops` operations, `host_fns` of them host functions, has room.
    ///
    /// # Errors
    /// [`Error::StreamFull`], or the error that failed the engine.
    fn check_room(&self, guard: &mut SubmitGuard, ops: usize, host_fns: usize) -> Result<()>;

    /// Blocks until the last refused submission has room, or the deadline. Returns whether it has.
    fn wait_room(&self, deadline: Instant) -> bool;

    /// How far it is, without keeping it.
    fn progress(&self) -> Arc<dyn Progress>;

    /// What the wait that holds the stream waits for, with what to do, and the time until the wait limit.
    fn holder(&self) -> Option<(String, Duration)>;

    /// Fails the engine with `error`, unless it failed before: calls [`super::Source::fail`] for each source of pending
    /// operations, releases the current wait, and drops the rest.
    fn fail(&self, error: Error);

    /// The error that failed the engine.
    fn error(&self) -> Option<Error>;
}

fn no_kernels() -> Error {
    Error::Unsupported {
        what: "steps of a kernel",
        by: "a stream without kernels",
        fix: "make the stream on a GPU, with Via::Kernel; or capture a Graph, which all streams launch",
    }
}
