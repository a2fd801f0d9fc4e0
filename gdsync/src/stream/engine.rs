//! What every stream engine offers: the host thread of [`super::host`], or a stream of a GPU.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use smallvec::smallvec;

use super::cuda::SubmitGuard;
use super::graph::Made;
use super::op::{Arrival, DoorbellValue, Op, Ops, SendDoorbell, Source};
use gdsync_device::GpuNudge;
use gdsync_device::cuda::RawStream;
use gdsync_device::error::{Error, Result};

/// Runs operations in order. The contract that [`super::Stream`] builds on:
///
/// - Submissions run in the order of `submit`, the operations of one in their order.
/// - A wait that is not satisfied within the engine's wait limit *fails the engine*: see [`Engine::fail`].
/// - A failed engine runs nothing more: what is pending is dropped, not executed, later submissions are refused
///   with the first error.
pub trait Engine: Send + Sync + fmt::Debug {
    /// The engine in one word: "host", "cuda".
    fn kind(&self) -> &'static str;

    /// The `CUstream` behind it, if there is one.
    fn raw(&self) -> Option<RawStream> {
        None
    }

    /// Whether the engine tells the device of each [`Op::Trigger`]. Where it does not, the HCA is told to watch doorbells instead, and that streams
    /// wait which cannot run it.
    fn signals(&self) -> bool;

    /// What makes such a stream look at the words that it waits for.
    fn nudger(&self) -> Option<&Arc<dyn GpuNudge>> {
        None
    }

    /// Refuses the calling thread, before it waits for anything, where the engine must not be called.
    ///
    /// # Errors
    /// Why not.
    fn refuse_here(&self) -> Result<()> {
        Ok(())
    }

    /// Queues operations; the caller has the turn of the stream. On refusal `ops` is left as it was.
    ///
    /// # Errors
    /// [`Error::StreamFull`] at the depth limit (the operations can be submitted again later), or the error the
    /// engine failed with.
    fn submit(&self, guard: &mut SubmitGuard, ops: &mut Ops) -> Result<u64>;

    /// Queues one [`Op::Trigger`] of a source that has this send_doorbell.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    fn trigger(
        &self,
        guard: &mut SubmitGuard,
        source: &Arc<dyn Source>,
        _send_doorbell: &SendDoorbell,
        value: DoorbellValue,
    ) -> Result<u64> {
        self.submit(guard, &mut smallvec![Op::Trigger(source.clone(), value)])
    }

    /// Queues one [`Op::Await`] of completion `n` of a source, which arrives there.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    fn wait(
        &self,
        guard: &mut SubmitGuard,
        source: &Arc<dyn Source>,
        _arrival: &Arrival<'_>,
        n: u64,
    ) -> Result<u64> {
        self.submit(guard, &mut smallvec![Op::Await(source.clone(), n)])
    }

    /// Queues both as one submission: the trigger, then the wait.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    fn hop(
        &self,
        guard: &mut SubmitGuard,
        (source, _, value): (&Arc<dyn Source>, &SendDoorbell, DoorbellValue),
        (end, _arrival, n): (&Arc<dyn Source>, &Arrival<'_>, u64),
    ) -> Result<u64> {
        self.submit(guard, &mut smallvec![Op::Trigger(source.clone(), value), Op::Await(end.clone(), n)])
    }

    /// Does what another thread wanted that did not have the turn.
    fn mark(&self, _guard: &mut SubmitGuard) {}

    /// From now on until [`Engine::end_capture`], batches come to [`Engine::record`], and nothing to the others. An engine
    /// that takes a graph as any submission has nothing to do here.
    ///
    /// # Errors
    /// What makes a capture impossible, or the error that the engine failed with.
    fn begin_capture(&self, _guard: &mut SubmitGuard) -> Result<()> {
        Ok(())
    }

    /// Records a batch.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    fn record(&self, _guard: &mut SubmitGuard, _ops: &[Op]) -> Result<()> {
        Ok(())
    }

    /// Ends the capture, also when it fails to make anything of it.
    ///
    /// # Errors
    /// Why there is nothing to launch.
    fn end_capture(&self, _guard: &mut SubmitGuard) -> Result<Made> {
        Ok(Arc::new(()))
    }

    /// Queues what was captured, once more, as one submission: the operations of all its batches, which end at `ends`.
    ///
    /// # Errors
    /// As [`Engine::submit`]; what was made by another engine may be refused.
    fn launch(&self, guard: &mut SubmitGuard, _made: &Made, ops: &mut Ops, _ends: &[usize]) -> Result<u64> {
        self.submit(guard, ops)
    }

    /// How many operations a batch has as a step of a kernel of the application.
    ///
    /// # Errors
    /// What makes it impossible.
    fn size_of_step(&self, _ops: &[Op]) -> Result<usize> {
        Err(no_kernels())
    }

    /// Makes room for steps of so many operations each.
    ///
    /// # Errors
    /// When there is none.
    fn make_steps(&self, _sizes: Vec<usize>) -> Result<Made> {
        Err(no_kernels())
    }

    /// Queues steps as one submission: their operations end at `ends`. `kernel` gets their address, and launches what runs
    /// them; if it says that it has not, nothing is queued, and the error means nothing.
    ///
    /// # Errors
    /// As [`Engine::launch`].
    fn launch_steps(
        &self,
        _guard: &mut SubmitGuard,
        _made: &Made,
        _ops: &mut Ops,
        _ends: &[usize],
        _kernel: &mut dyn FnMut(u64) -> bool,
    ) -> Result<u64> {
        Err(no_kernels())
    }

    /// The number of submissions that have fully run, or were dropped by a failure. Submission `s`, counted from
    /// 1 as `submit` returns it, is over when this is at least `s`.
    fn completed(&self) -> u64;

    /// The number of submissions accepted so far.
    fn submitted(&self) -> u64;

    /// Blocks until `completed() >= seq` or the deadline; returns whether it is.
    fn wait_completed(&self, seq: u64, deadline: Instant) -> bool;

    /// Whether a batch of so many operations, some of them host functions, would find room.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    fn ask_room(&self, guard: &mut SubmitGuard, ops: usize, host_fns: usize) -> Result<()>;

    /// Blocks until what was refused last would find room, or the deadline; returns whether it would.
    fn wait_room(&self, deadline: Instant) -> bool;

    /// Fails the engine with `error`, unless it failed before: first every [`super::Source`] of pending operations
    /// is told to [`super::Source::fail`], then the wait in progress is released and the rest is dropped.
    fn fail(&self, error: Error);

    /// What the engine failed with.
    fn error(&self) -> Option<Error>;
}

fn no_kernels() -> Error {
    Error::Unsupported {
        what: "steps of a kernel",
        by: "a stream without kernels",
        fix: "make the stream on a GPU, with Via::Kernel; or capture a Graph, which all streams launch",
    }
}
