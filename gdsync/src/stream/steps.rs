//! Steps: sends and waits that a kernel of the application runs by itself.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;
use std::{fmt, result};

use super::graph::{Launch, Made, within_capture};
use super::record::{Part, Recording};
use super::{ReentrancyCheck, Stream, deadline};
use crate::nvtx::DOMAIN;
use gdsync_device::error::{Error, Result};

/// `gdsync.cuh`, the device code with which kernels run [`KernelSteps`]: for compilers like NVRTC that take headers as text.
/// As a file it is in the folder `include` of this crate.
pub const DEVICE_HEADER: &str = include_str!("../../include/gdsync.cuh");

/// Sends, waits and word operations that a kernel of the application runs by itself, step by step, between its own work:
/// no gap between kernels, no launch for each message. They are recorded once; each launch of the kernel has fresh work
/// requests, as a launch of a [`Graph`](super::Graph) has, and eager work may stand between launches.
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
///     Ok(())
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
/// # What a kernel does otherwise
///
/// - A step that it leaves, because it ends early or is never launched, is run behind it by the stream, so that no other
///   waits for it: its sends carry what their buffers hold then.
/// - A step that it runs again, or too early, does nothing, and the kernel is told (`gds::OUT_OF_ORDER`).
/// - A wait that takes longer than the stream's limit fails the stream: nothing is written from there on, the step and those
///   behind it return `gds::FAILED`, and every call on the stream tells the wait. A completion with an error ends the wait
///   (`gds::COMPLETION_ERROR`), the stream goes on, and [`Stream::synchronize`] tells, as ever.
/// - A kernel that does not end holds its stream, as any kernel does.
/// - The CPU, too, watches the waits, in case the kernel does not get to them: from when all before the launch is done it gives
///   the first that is not satisfied the stream's limit. So a kernel must come to a wait within that time, and a word that a step waits
///   for must satisfy it until the launch is over (completions do).
pub struct KernelSteps {
    batches: Vec<Vec<Part>>,
    made: Made,
}

impl fmt::Debug for KernelSteps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KernelSteps({})", self.len())
    }
}

/// Refuses a call within the launch of a kernel, which has the stream.
#[inline]
pub(super) fn refuse() -> Result<()> {
    match ReentrancyCheck::Launch.is_here() {
        false => Ok(()),
        true => Err(Error::Unsupported {
            what: "the use of a stream within the function that launches a kernel with steps",
            by: "its stream, which is taken meanwhile",
            fix: "only launch the kernel there",
        }),
    }
}

/// Ends the recording, also where what is recorded fails or panics.
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
    /// Records what `record` submits to the stream as steps of a kernel, a step for each submission. Nothing runs. It is
    /// checked as in [`Stream::capture`], and taken back at the end.
    ///
    /// # Errors
    /// What `record` returns; [`Error::Unsupported`] within a capture; of [`Stream::submit`] in it, for streams without
    /// [`Via::Kernel`](super::Via::Kernel), for host functions, and for waits whose flush only the stream can do; the error that failed the
    /// stream; [`Error::Cuda`] when there is no memory left.
    pub fn record_steps(&self, record: impl FnOnce(&Stream) -> Result<()>) -> Result<KernelSteps> {
        let mut state = self.state()?;
        if state.recording.is_some() {
            return Err(within_capture("a recording"));
        }
        self.0.engine.error().map_or(Ok(()), Err)?;
        state.recording = Some(Recording::of_steps());
        drop(state);
        let recorder = Recorder(self);
        record(self)?;
        let mut recording = recorder.end().unwrap_or_default();
        // It has ended; what is recorded from here on is another's.
        std::mem::forget(recorder);
        let made = self.0.engine.make_steps(recording.sizes.take().unwrap_or_default())?;
        Ok(KernelSteps { batches: recording.finish(), made })
    }
}

impl KernelSteps {
    /// How many steps there are.
    pub fn len(&self) -> usize {
        self.batches.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    /// Arms the steps behind everything submitted to the stream, and has `kernel` launch the kernel that runs them, once, on
    /// [`Stream::raw`]. It gets their address on the GPU, a `const gds::Program *`, and returns an error only if it has
    /// launched nothing; the GPU's context is current. The caller goes on at once.
    ///
    /// It counts as one submission. Receives that it waits for must have been posted. Three launches are pending at most, on
    /// all streams together: a fourth finds the stream full.
    ///
    /// # Errors
    /// As [`Graph::launch`](super::Graph::launch), and what `kernel` returns. Nothing is launched on any error.
    pub fn launch<E: From<Error>>(
        &self,
        stream: &Stream,
        kernel: impl FnOnce(u64) -> result::Result<(), E>,
    ) -> result::Result<Launch, E> {
        self.launch_within(stream, Duration::ZERO, kernel)
    }

    /// As [`KernelSteps::launch`], but waits for room in a full stream.
    ///
    /// # Errors
    /// As [`KernelSteps::launch`]; [`Error::StreamFull`] only after `timeout`.
    pub fn launch_within<E: From<Error>>(
        &self,
        stream: &Stream,
        timeout: Duration,
        kernel: impl FnOnce(u64) -> result::Result<(), E>,
    ) -> result::Result<Launch, E> {
        let _range = DOMAIN.range(c"launch");
        let mut kernel = Some(kernel);
        let mut said = None;
        let mut call = |program| {
            let Some(kernel) = kernel.take() else { return false };
            ReentrancyCheck::Launch.begin();
            let answer = catch_unwind(AssertUnwindSafe(|| kernel(program)));
            ReentrancyCheck::Launch.end();
            matches!(said.insert(answer), Ok(Ok(())))
        };
        let launch = stream.launch_again(&self.batches, deadline(timeout), |engine, guard, ops, ends| {
            engine.launch_steps(guard, &self.made, ops, ends, &mut call)
        });
        match said {
            None | Some(Ok(Ok(()))) => Ok(launch?),
            Some(Ok(Err(error))) => Err(error),
            Some(Err(panic)) => resume_unwind(panic),
        }
    }
}
