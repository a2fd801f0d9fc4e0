//! Kernel steps: sends and waits that an application kernel runs by itself.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::{fmt, result};

use super::graph::{EngineGraph, Launch, within_capture};
use super::record::{Recorded, Recording};
use super::{ReentrancyCheck, Stream};
use crate::nvtx::DOMAIN;
use gdsync_device::error::{Error, Result};

/// `gdsync.cuh`, the device code for [`KernelSteps`], for compilers like NVRTC that take headers as text. The file is
/// in the folder `include` of this crate.
pub const DEVICE_HEADER: &str = include_str!("../../include/gdsync.cuh");

/// Sends, waits and word operations that an application kernel runs step by step between its own work: no gaps between
/// kernels, no launch per message. They are recorded once. Each launch has new work requests, like a launch of a
/// [`Graph`](super::Graph), and eager work may run between launches.
///
/// The kernel includes `gdsync.cuh` ([`DEVICE_HEADER`]) and gets the address of the steps:
///
/// ```c++
/// #include "gdsync.cuh"
///
/// extern "C" __global__ void bounce(const gds::Program *program, unsigned *data) // one block
/// {
///     gds::Steps steps(program);
///     for (gds::u32 i = 0; i < steps.count(); ++i) {
///         if (gds::block_step(steps, i) != gds::OK) // all threads call it; waits and sends
///             return;
///         data[threadIdx.x] += 1;
///     }
/// }
/// ```
///
/// ```no_run
/// # use std::time::Duration;
/// # use gdsync::cuda::Gpu;
/// # use gdsync::stream::{Batch, CudaStreamConfig, Stream, Via};
/// # use gdsync::verbs::{Mr, Qp, SendWr};
/// # fn launch_kernel(stream: gdsync::cuda::RawStream, program: u64) -> gdsync::Result<()> { Ok(()) }
/// # fn example(gpu: &Gpu, qp: &Qp, region: &Mr) -> gdsync::Result<()> {
/// let stream = Stream::cuda(gpu, CudaStreamConfig { via: Via::Kernel, ..CudaStreamConfig::default() })?;
/// let steps = stream.record_steps(|stream| {
///     for _ in 0..100 {
///         let mut step = Batch::new(); // each batch is a step
///         step.wait_recv(qp)?;
///         step.send(qp, &SendWr::send(&[region.sge(0, 128)?]))?;
///         step.wait_all_sends(qp)?;
///         stream.submit(&mut step)?;
///     }
///     gdsync::Result::Ok(())
/// })?;
/// let raw = stream.raw().expect("a CUDA stream");
/// let first = steps.launch(&stream, |program| launch_kernel(raw, program))?;
/// let second = steps.launch(&stream, |program| launch_kernel(raw, program))?; // while the first runs
/// first.wait(&stream, Duration::from_secs(10))?;
/// second.wait(&stream, Duration::from_secs(10))?;
/// # Ok(())
/// # }
/// ```
///
/// # Deviations by the kernel
///
/// - A step that the kernel skips, because it ends early or was not launched, is run afterwards by the stream, so that
///   its peers do not wait forever. Its sends carry the contents of their buffers at that time.
/// - A step that it runs twice or too early does nothing and returns `gds::OUT_OF_ORDER`.
/// - A wait that exceeds the stream's limit fails the stream: nothing is written from there on, this and later steps
///   return `gds::FAILED`, and every call on the stream returns the error. A completion with an error ends the wait
///   (`gds::COMPLETION_ERROR`), the stream continues, and [`Stream::synchronize`] reports it as usual.
/// - A kernel that does not end holds its stream, like any kernel.
/// - The CPU watches the waits too. Once all work before the launch is done, the first unsatisfied wait has the
///   stream's limit. So the kernel must reach each wait within that time, and a word that a step waits for must stay
///   satisfied until the launch is over (completions do).
pub struct KernelSteps {
    recorded: Recorded,
    made: EngineGraph,
}

impl fmt::Debug for KernelSteps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KernelSteps({})", self.len())
    }
}

/// Refuses a call within a function that is called under the submit lock.
#[inline]
pub(super) fn refuse_in_launch() -> Result<()> {
    match ReentrancyCheck::Launch.is_here() {
        false => Ok(()),
        true => Err(Error::Unsupported {
            what: "the use of a stream within a function that launches a kernel with steps",
            by: "the stream, which is locked during the call",
            fix: "only launch the kernel there",
        }),
    }
}

/// Ends the recording, even if it fails or panics.
struct Recorder<'a>(&'a Stream);

impl Recorder<'_> {
    fn end(&self) -> Option<Recording> {
        self.0.0.lock().recording.take()
    }
}

impl Drop for Recorder<'_> {
    fn drop(&mut self) {
        drop(self.end());
    }
}

impl Stream {
    /// Records what `record` submits to the stream as steps of a kernel, one per submission. Nothing runs. Checked like
    /// [`Stream::capture`], and dropped at the end.
    ///
    /// # Errors
    /// The error of `record`; [`Error::Unsupported`] within a capture, for streams without
    /// [`Via::Kernel`](super::Via::Kernel), and, from [`Stream::submit`], for host functions and for waits whose flush
    /// only the stream can do; the error that failed the stream; [`Error::Cuda`] when out of memory.
    pub fn record_steps<E: From<Error>>(
        &self,
        record: impl FnOnce(&Stream) -> result::Result<(), E>,
    ) -> result::Result<KernelSteps, E> {
        let mut state = self.state()?;
        if state.recording.is_some() {
            return Err(within_capture("a recording").into());
        }
        self.0.engine.error().map_or(Ok(()), Err)?;
        state.recording = Some(Recording::of_steps());
        drop(state);
        let recorder = Recorder(self);
        record(self)?;
        let mut recording = recorder.end().unwrap_or_default();
        // Already ended; a later recording belongs to another caller.
        std::mem::forget(recorder);
        let made = self.0.engine.make_steps(recording.steps.take().unwrap_or_default())?;
        Ok(KernelSteps { recorded: recording.finish(), made })
    }
}

impl KernelSteps {
    /// The number of steps.
    pub fn len(&self) -> usize {
        self.recorded.batches
    }

    /// Whether there are no steps.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Queues the steps after everything submitted to the stream. Calls `kernel` once, to launch the kernel that runs
    /// them on [`Stream::raw`], with the GPU's context current. `kernel` gets the steps' GPU address, a `const
    /// gds::Program *`, and must return an error only if it launched nothing. Waits for room as [`Graph::launch`](super::Graph::launch).
    ///
    /// It counts as one submission. Receives that it waits for must be posted. At most three launches are pending, on
    /// all streams together; a fourth waits.
    ///
    /// # Errors
    /// Those of [`Graph::launch`](super::Graph::launch), and the error of `kernel`. Nothing is launched on an error.
    pub fn launch<E: From<Error>>(
        &self,
        stream: &Stream,
        kernel: impl FnOnce(u64) -> result::Result<(), E>,
    ) -> result::Result<Launch, E> {
        let _range = DOMAIN.range(c"launch");
        let mut kernel = Some(kernel);
        let mut result = None;
        let mut call = |program| {
            let Some(kernel) = kernel.take() else { return false };
            ReentrancyCheck::Launch.begin();
            let answer = catch_unwind(AssertUnwindSafe(|| kernel(program)));
            ReentrancyCheck::Launch.end();
            matches!(result.insert(answer), Ok(Ok(())))
        };
        let launch = stream.launch_again(&self.recorded, |engine, guard, kept, ops| {
            engine.launch_steps(guard, &self.made, kept, ops, &mut call)
        });
        match result {
            None | Some(Ok(Ok(()))) => Ok(launch?),
            Some(Ok(Err(error))) => Err(error),
            Some(Err(panic)) => resume_unwind(panic),
        }
    }
}
