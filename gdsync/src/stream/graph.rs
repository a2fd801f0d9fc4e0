//! Graphs: batches captured once and launched many times.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, result};

use super::batch::Batch;
use super::engine::Engine;
use super::op::Kept;
use super::record::{Recorded, Recording};
use super::{Ops, State, Stream, SubmitGuard, deadline};
use crate::nvtx::DOMAIN;
use crate::verbs::Completion;
use gdsync_device::error::{Error, Result};
use gdsync_device::fork_guard::ForkGuard;

/// Captured sends, waits and word operations, which can be launched any number of times. On a GPU it is a CUDA graph,
/// with all other work captured on the stream.
///
/// Each launch does what the same calls would do at that time. Its sends are new work requests with the captured
/// contents, after everything prepared before; payload is read when the HCA executes them, inline data and immediates
/// are those of the capture. A wait takes as many of the next completions of its queue as in the capture;
/// [`Batch::wait_all_sends`] takes all; [`Batch::wait`] for a send of the graph takes those through that send of the
/// same launch. So eager work may run between launches, and one graph may be launched on several streams, one after the
/// other.
pub struct Graph {
    kind: &'static str,
    recorded: Recorded,
    /// The engine's part of the graph.
    made: EngineGraph,
}

/// An engine's part of a captured graph, or of a step of a kernel.
pub(super) type EngineGraph = Arc<dyn Any + Send + Sync>;

/// A launch of a [`Graph`], or of [`KernelSteps`](super::KernelSteps).
#[derive(Clone, Debug)]
pub struct Launch {
    completions: Vec<Completion>,
    /// The stream's id, and the number of the submission there.
    stream: u64,
    seq: u64,
}

/// A capture in progress: until it ends, submissions to the stream are recorded, not run.
///
/// Dropping it discards the recording.
#[derive(Debug)]
#[must_use = "dropping it ends the capture"]
pub struct Capture {
    fork_guard: ForkGuard,
    stream: Stream,
    open: bool,
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graph({}, {} batches)", self.kind, self.recorded.batches)
    }
}

impl Stream {
    /// Captures what `record` submits to the stream, without running it. On a CUDA stream this is a CUDA capture (in
    /// relaxed mode), in which the application may launch kernels and copies on [`Stream::raw`].
    ///
    /// Everything is checked as if it were run: a wait needs a posted work request, also for a receive. During the
    /// capture the queues hold the prepared requests: others cannot post after them. At the end the prepared sends and
    /// waits are dropped; receives stay for the first launch. Completions returned in the capture are not usable; those
    /// of a launch are [`Launch::completions`].
    ///
    /// A launch uses the wait limit of its stream. The error of `record` may be of any type; a closure that ends in `Ok(())` names it:
    /// `gdsync::Result::Ok(())`.
    ///
    /// # Errors
    /// The error of `record`; [`Error::Cuda`]; [`Error::Unsupported`] within a capture; the error that failed the
    /// stream. [`Stream::submit`] refuses host functions with [`Error::Unsupported`].
    pub fn capture<E: From<Error>>(
        &self,
        record: impl FnOnce(&Stream) -> result::Result<(), E>,
    ) -> result::Result<Graph, E> {
        let capture = self.begin_capture()?;
        record(self)?;
        Ok(capture.end()?)
    }

    /// Begins a capture, where no closure fits: see [`Stream::capture`].
    ///
    /// # Errors
    /// [`Error::Cuda`]; [`Error::Unsupported`] within a capture; the error that failed the stream.
    pub fn begin_capture(&self) -> Result<Capture> {
        let mut state = self.state()?;
        if state.recording.is_some() {
            return Err(within_capture("a capture"));
        }
        self.0.engine.error().map_or(Ok(()), Err)?;
        self.0.engine.begin_capture(&mut state.guard)?;
        state.recording = Some(Recording::default());
        Ok(Capture { fork_guard: ForkGuard::default(), stream: self.clone(), open: true })
    }

    /// Makes what was recorded again and submits it as one submission, waiting for room in the stream and in the send queues.
    pub(super) fn launch_again(
        &self,
        recorded: &Recorded,
        mut launch: impl FnMut(&dyn Engine, &mut SubmitGuard, Kept, &mut Ops) -> Result<u64>,
    ) -> Result<Launch> {
        let (mut batch, mut completions, mut is_made) = (Batch::new(), Vec::new(), false);
        let submitted = self.with_room(None, |full| {
            let mut submit = || {
                let mut state = self.state()?;
                if state.recording.is_some() {
                    return Err(within_capture("a launch"));
                }
                // Made once, even if the stream is full at first.
                if !is_made {
                    recorded.again(&mut batch, &mut completions, full)?;
                    is_made = true;
                }
                let State { used, guard, .. } = &mut *state;
                self.put(used, &mut batch, |batch| {
                    let numbers = batch.follows.as_ref().map(|follows| follows.numbers.clone());
                    let kept = Kept { ops: recorded.ops.clone(), numbers: numbers.unwrap_or_default() };
                    launch(&*self.0.engine, guard, kept, &mut batch.ops)
                })
            };
            let submitted = submit();
            if let Err(Error::QueueFull { .. }) = submitted {
                // Takes back what was made, so that it does not fill the queue.
                (batch, completions, is_made) = Default::default();
            }
            submitted
        });
        let seq = submitted.map_err(|error| recorded.name_rank(error))?;
        self.notify(&batch);
        recorded.hooks.iter().for_each(|hook| hook.launched());
        Ok(Launch { completions, stream: self.id(), seq })
    }
}

impl Capture {
    /// Ends the capture and returns the graph.
    ///
    /// # Errors
    /// [`Error::Cuda`], also for errors of the application in the capture; the error that failed the stream.
    pub fn end(mut self) -> Result<Graph> {
        self.fork_guard.check()?;
        self.open = false;
        let (made, recording) = self.close();
        Ok(Graph { kind: self.stream.kind(), made: made?, recorded: recording.finish() })
    }

    fn close(&self) -> (Result<EngineGraph>, Recording) {
        let inner = &self.stream.0;
        // Under the submit lock: nothing runs before the engine has left the capture.
        let mut state = inner.lock();
        let made = inner.engine.end_capture(&mut state.guard);
        let made = inner.engine.error().map_or(made, Err);
        (made, state.recording.take().unwrap_or_default())
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if self.open
            && self.fork_guard.is_here()
            && let (Err(error), _) = self.close()
        {
            tracing::debug!(stream = self.stream.0.name, %error, "capture discarded");
        }
    }
}

impl Graph {
    /// Queues a launch after everything submitted to the stream, all or nothing. Waits for [room](Stream#room) in the stream and
    /// in the send queues of the graph, but not for the work.
    ///
    /// It counts as one submission. Receives that it waits for must be posted. A CUDA graph with four or more kernels
    /// of this library has at most three pending launches, on all streams together; a fourth waits.
    ///
    /// # Errors
    /// Nothing is launched on an error. Those of [`Qp::prepare_send`](crate::verbs::Qp::prepare_send),
    /// [`Qp::prepare_wait_recv`](crate::verbs::Qp::prepare_wait_recv) and [`Stream::submit`]; [`Error::GraphWaits`];
    /// [`Error::InvalidArgument`] for a stream of another kind; [`Error::Unsupported`] for a stream on another GPU, of
    /// another [`Via`](super::Via), or in a capture.
    pub fn launch(&self, stream: &Stream) -> Result<Launch> {
        let _range = DOMAIN.range(c"launch");
        if self.kind != stream.kind() {
            let expected = "a stream of the kind that the graph was captured on";
            return Err(Error::invalid("stream to launch a graph on", stream.kind(), expected));
        }
        stream.launch_again(&self.recorded, |engine, guard, kept, ops| {
            engine.launch(guard, &self.made, kept, ops)
        })
    }
}

impl Launch {
    /// The completions of this launch's sends and waits, in recording order: one for each call of the capture that
    /// returned one.
    pub fn completions(&self) -> &[Completion] {
        &self.completions
    }

    /// Blocks, asleep, until the stream has run this launch. On a GPU it may also wait for later launches, because the
    /// completion of several small graphs may be reported at once.
    ///
    /// A broken queue pair does not stop the stream: [`Stream::synchronize`] and the next launch report it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a stream other than the launch's; [`Error::Deadline`] after `timeout` (the work
    /// continues); the stream's error.
    pub fn wait(&self, stream: &Stream, timeout: Duration) -> Result<()> {
        super::steps::refuse_in_launch()?;
        if self.stream != stream.id() {
            let expected = "the stream of the launch";
            return Err(Error::invalid("stream to wait for a launch on", format!("{stream:?}"), expected));
        }
        if !stream.0.engine.wait_completed(self.seq, deadline(timeout)) {
            return Err(stream.late("a launch on", timeout));
        }
        stream.0.engine.error().map_or(Ok(()), Err)
    }
}

pub(super) fn within_capture(what: &'static str) -> Error {
    Error::Unsupported { what, by: "a stream that is being captured", fix: "end the capture first" }
}
