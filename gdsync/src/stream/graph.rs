//! Graphs: batches captured once and launched many times.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::batch::Batch;
use super::engine::Engine;
use super::op::Ops;
use super::record::{Part, Recording};
use super::{State, Stream, SubmitGuard, deadline};
use crate::nvtx::DOMAIN;
use crate::verbs::Completion;
use gdsync_device::error::{Error, Result};
use gdsync_device::fork_guard::ForkGuard;

/// Sends, waits and word operations that were captured, to be launched as often as one likes. On a GPU it is a CUDA graph
/// with whatever else was captured on the stream.
///
/// Each launch does what the same calls would do at that moment: its sends are new work requests of the same contents
/// behind all that was prepared before, with the data that their buffers hold when the HCA executes them (inline data and
/// immediates are those of the capture). A wait takes the next completions of its queue, as many as
/// in the capture; [`Batch::wait_all_sends`] all, and [`Batch::wait`] for a send of the graph those through that send of the
/// same launch. So eager work may stand
/// between launches, and one graph may be launched on several streams, one after the other.
pub struct Graph {
    kind: &'static str,
    batches: Vec<Vec<Part>>,
    /// What the engine made of it.
    made: Made,
}

/// What an engine made of a capture.
pub type Made = Arc<dyn Any + Send + Sync>;

/// A launch of a [`Graph`], or of [`KernelSteps`](super::KernelSteps).
#[derive(Clone, Debug)]
pub struct Launch {
    completions: Vec<Completion>,
    /// The stream, and the number of the submission there.
    stream: u64,
    seq: u64,
}

/// A capture under way: until it ends, what is submitted to the stream is recorded, not run.
///
/// Dropped before its end, it forgets what was recorded.
#[derive(Debug)]
#[must_use = "dropping it ends the capture"]
pub struct Capture {
    fork_guard: ForkGuard,
    stream: Stream,
    open: bool,
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graph({}, {} batches)", self.kind, self.batches.len())
    }
}

impl Stream {
    /// Captures what `record` submits to the stream: it is recorded, not run. On a CUDA stream this is a capture of CUDA
    /// (in relaxed mode), in which the application may launch kernels and copies on [`Stream::raw`].
    ///
    /// What is recorded is checked as if it were run: a wait needs a work request that is posted, also when that
    /// is a receive. At the end everything prepared for the capture is taken back, and receives are left for the first
    /// launch. Until then its queues are as if it were prepared: others cannot post behind it. The completions handed out
    /// meanwhile mean nothing; those of a launch are [`Launch::completions`].
    ///
    /// Waits for receives, words and sends keep the wait limit of the stream that a launch runs on.
    ///
    /// # Errors
    /// What `record` returns; [`Error::Cuda`]; [`Error::Unsupported`] within a capture; the error that failed the stream.
    /// Host functions are refused by [`Stream::submit`] with [`Error::Unsupported`].
    pub fn capture(&self, record: impl FnOnce(&Stream) -> Result<()>) -> Result<Graph> {
        let capture = self.begin_capture()?;
        record(self)?;
        capture.end()
    }

    /// Begins a capture: see [`Stream::capture`].
    ///
    /// # Errors
    /// As [`Stream::capture`].
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

    /// Makes recorded batches again, and has the engine take them as one submission, waiting for room until the deadline.
    pub(super) fn launch_again(
        &self,
        batches: &[Vec<Part>],
        deadline: Instant,
        mut launch: impl FnMut(&dyn Engine, &mut SubmitGuard, &mut Ops, &[usize]) -> Result<u64>,
    ) -> Result<Launch> {
        let stream = self.0.id;
        let mut batch = Batch::for_stream(stream);
        let mut completions = Vec::new();
        let mut ends = Vec::with_capacity(batches.len());
        let seq = self.while_full(deadline, || {
            let mut state = self.state()?;
            if state.recording.is_some() {
                return Err(within_capture("a launch"));
            }
            // Once, also where the stream is full at first.
            for parts in &batches[ends.len()..] {
                let again = parts.iter().try_for_each(|part| part.again(&mut batch, &mut completions));
                again.inspect_err(|_| batch.refuse(stream))?;
                batch.part = batch.len();
                ends.push(batch.part);
            }
            let State { used, guard, .. } = &mut *state;
            self.put((used, guard), &mut batch, |batch, guard| {
                launch(&*self.0.engine, guard, batch.ops(), &ends)
            })
        })?;
        self.hand_over(&mut batch);
        Ok(Launch { completions, stream, seq })
    }
}

impl Capture {
    /// Ends the capture and makes a graph of it.
    ///
    /// # Errors
    /// [`Error::Cuda`], also for what the application did in the capture; the error that failed the stream.
    pub fn end(mut self) -> Result<Graph> {
        self.fork_guard.check()?;
        self.open = false;
        let (made, recording) = self.close();
        Ok(Graph { kind: self.stream.kind(), made: made?, batches: recording.finish() })
    }

    fn close(&self) -> (Result<Made>, Recording) {
        let inner = &self.stream.0;
        // Under the lock: nothing is run before the engine has left the capture.
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
            tracing::debug!(stream = self.stream.0.name, %error, "capture given up");
        }
    }
}

impl Graph {
    /// Queues a launch behind everything submitted to the stream, all or nothing. The caller goes on at once.
    ///
    /// It counts as one submission. Receives that it waits for must have been posted. Of a CUDA graph with four kernels of
    /// this library or more, three launches are pending at most, on all streams together: a fourth finds the stream full.
    ///
    /// # Errors
    /// Nothing is launched on any error. Those of [`Qp::prepare_send`](crate::verbs::Qp::prepare_send),
    /// [`Qp::prepare_wait_recv`](crate::verbs::Qp::prepare_wait_recv) and [`Stream::submit`];
    /// [`Error::GraphWaits`]; [`Error::InvalidArgument`] for a stream of another kind than the captured one, [`Error::Unsupported`]
    /// for one on another GPU, of another [`Via`](super::Via), or in a capture.
    pub fn launch(&self, stream: &Stream) -> Result<Launch> {
        self.launch_within(stream, Duration::ZERO)
    }

    /// As [`Graph::launch`], but waits for room in a full stream.
    ///
    /// # Errors
    /// As [`Graph::launch`]; [`Error::StreamFull`] only after `timeout`.
    pub fn launch_within(&self, stream: &Stream, timeout: Duration) -> Result<Launch> {
        let _range = DOMAIN.range(c"launch");
        if self.kind != stream.kind() {
            let expected = "a stream of the kind that the graph was captured on";
            return Err(Error::invalid("stream to launch a graph on", stream.kind(), expected));
        }
        stream.launch_again(&self.batches, deadline(timeout), |engine, guard, ops, ends| {
            engine.launch(guard, &self.made, ops, ends)
        })
    }
}

impl Launch {
    /// The completions of the sends and waits of this launch, in the order of the recording: one for each call that returned
    /// one in the capture.
    pub fn completions(&self) -> &[Completion] {
        &self.completions
    }

    /// Blocks until the stream has run this launch, while those behind it go on; the CPU sleeps meanwhile. On a GPU, where
    /// small graphs and those behind them may be told over together, it may wait for launches behind this one, too.
    ///
    /// A queue pair that broke lets the stream go on: [`Stream::synchronize`] and the next launch tell.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another stream than it was launched on; [`Error::Deadline`] after `timeout` (the work
    /// goes on); the stream's error.
    pub fn wait(&self, stream: &Stream, timeout: Duration) -> Result<()> {
        super::steps::refuse()?;
        if self.stream != stream.0.id {
            let expected = "the stream of the launch";
            return Err(Error::invalid("stream to wait for a launch on", format!("{stream:?}"), expected));
        }
        if !stream.0.engine.wait_completed(self.seq, deadline(timeout)) {
            return Err(Error::Deadline { what: "launch", after: timeout });
        }
        stream.0.engine.error().map_or(Ok(()), Err)
    }
}

pub(super) fn within_capture(what: &'static str) -> Error {
    Error::Unsupported { what, by: "a stream that is being captured", fix: "end the capture first" }
}
