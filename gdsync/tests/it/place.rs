//! Where and how a test runs.

use std::iter;
use std::sync::OnceLock;
use std::time::Duration;

use gdsync::cuda::{Gpu, channels};
use gdsync::stream::{CudaStreamConfig, Stream, Via};
use gdsync::verbs::{Context, OnGpu, QpBuilder};
use parking_lot::{Condvar, Mutex};

use crate::common::{Side, connect, hca, is_device_named, stream_with};

/// A GPU, what runs streams on it, and what is in its memory.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) gpu: Gpu,
    pub(crate) via: Via,
    pub(crate) on_gpu: OnGpu,
}

/// Whether the first GPU is a real one; otherwise all are simulated.
pub(crate) fn is_real() -> bool {
    static REAL: OnceLock<bool> = OnceLock::new();
    *REAL.get_or_init(|| Gpu::open(0).inspect_err(|error| eprintln!("simulated: {error}")).is_ok())
}

/// A GPU by its ordinal, or `None` with a printed reason.
pub(crate) fn gpu(ordinal: i32) -> Option<Gpu> {
    let opened = if is_real() { Gpu::open(ordinal) } else { crate::simulated::gpu(ordinal) };
    opened.inspect_err(|error| eprintln!("skipped: {error}")).ok()
}

/// Every way to run a test here, on a GPU that the tests of a process share and that stays open: to open or close one, CUDA
/// waits for the streams of all tests.
pub(crate) fn places() -> impl Iterator<Item = Place> {
    if is_real() {
        PERMIT.with(|_| {});
    }
    shared(0).into_iter().flat_map(|gpu| places_on(&gpu))
}

/// A GPU that stays open, as streams of the tests are of its context.
pub(crate) fn shared(ordinal: i32) -> Option<Gpu> {
    static OPEN: Mutex<Vec<Gpu>> = Mutex::new(Vec::new());
    let mut open = OPEN.lock();
    if let Some(gpu) = open.iter().find(|gpu| gpu.ordinal() == ordinal) {
        return Some(gpu.clone());
    }
    let gpu = gpu(ordinal)?;
    open.push(gpu.clone());
    Some(gpu)
}

/// Tests that have streams on the GPU.
static AT_WORK: Mutex<usize> = Mutex::new(0);
static DONE: Condvar = Condvar::new();

thread_local! {
    /// The permit of a test, until its thread ends.
    static PERMIT: Permit = Permit::take();
}

struct Permit;

impl Permit {
    /// Waits for one of [`max_permits`]: a test has three streams at most that wait at a time, and if as many wait as the GPU
    /// has channels for a process, nothing else moves there.
    fn take() -> Self {
        let mut at_work = AT_WORK.lock();
        DONE.wait_while(&mut at_work, |at_work| *at_work >= max_permits());
        *at_work += 1;
        Self
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        *AT_WORK.lock() -= 1;
        DONE.notify_all();
    }
}

fn max_permits() -> usize {
    (channels::here() / 3).max(1)
}

/// All permits of a real GPU: no other test uses it meanwhile.
#[derive(Debug)]
pub(crate) struct WholeGpu;

impl WholeGpu {
    /// Waits until no other test has a permit; `None` on a simulated GPU, which has room for all.
    pub(crate) fn take() -> Option<Self> {
        if !is_real() {
            return None;
        }
        let mut at_work = AT_WORK.lock();
        DONE.wait_while(&mut at_work, |at_work| *at_work > 0);
        *at_work = max_permits();
        Some(Self)
    }
}

impl Drop for WholeGpu {
    fn drop(&mut self) {
        *AT_WORK.lock() = 0;
        DONE.notify_all();
    }
}

/// Every way to run a test on a GPU.
pub(crate) fn places_on(gpu: &Gpu) -> impl Iterator<Item = Place> + use<> {
    let gpu = gpu.clone();
    [Via::MemOp, Via::Kernel].into_iter().flat_map(move |via| {
        let gpu = gpu.clone();
        [OnGpu::empty(), OnGpu::SEND_CQ | OnGpu::RECV_CQ, OnGpu::all()].map(move |on_gpu| Place {
            gpu: gpu.clone(),
            via,
            on_gpu,
        })
    })
}

impl Place {
    pub(crate) fn side(
        &self,
        context: &Context,
        bytes: usize,
        build: impl Fn(QpBuilder) -> QpBuilder,
    ) -> Side {
        Side::new(context, bytes, |q| build(q).on_gpu(&self.gpu, self.on_gpu))
    }

    /// Two connected sides on HCAs of their own.
    pub(crate) fn pair(&self, bytes: usize, build: impl Fn(QpBuilder) -> QpBuilder) -> (Side, Side) {
        connect(self.side(&hca(), bytes, &build), self.side(&hca(), bytes, &build))
    }

    pub(crate) fn stream(&self, wait_limit: Duration) -> Stream {
        let config = CudaStreamConfig {
            name: format!("{} {:?}", self.via, self.on_gpu),
            wait_limit,
            via: self.via,
            ..CudaStreamConfig::default()
        };
        Stream::cuda(&self.gpu, config).unwrap()
    }
}

/// What `work` returns while the application captures the stream.
pub(crate) fn within_a_capture<T>(gpu: &Gpu, stream: &Stream, work: impl FnOnce() -> T) -> T {
    let (api, raw) = (gpu.api(), stream.raw().unwrap());
    let _current = gpu.enter().unwrap();
    // SAFETY: a stream of this context, in relaxed mode.
    unsafe { api.stream_begin_capture(raw, 2) }.unwrap();
    let done = work();
    let mut captured = 0;
    // SAFETY: a place for the graph.
    unsafe { api.stream_end_capture(raw, &mut captured) }.unwrap();
    // SAFETY: captured above.
    unsafe { api.graph_destroy(captured) }.unwrap();
    done
}

/// Where queue pairs and streams of a test are.
#[derive(Debug)]
pub(crate) enum Site {
    Host,
    Gpu(Place),
}

impl Site {
    pub(crate) fn side(
        &self,
        context: &Context,
        bytes: usize,
        build: impl Fn(QpBuilder) -> QpBuilder,
    ) -> Side {
        match self {
            Self::Host => Side::new(context, bytes, build),
            Self::Gpu(place) => place.side(context, bytes, build),
        }
    }

    pub(crate) fn pair(&self, bytes: usize, build: impl Fn(QpBuilder) -> QpBuilder) -> (Side, Side) {
        connect(self.side(&hca(), bytes, &build), self.side(&hca(), bytes, &build))
    }

    pub(crate) fn stream(&self, wait_limit: Duration) -> Stream {
        match self {
            Self::Host => stream_with("host", wait_limit),
            Self::Gpu(place) => place.stream(wait_limit),
        }
    }
}

/// The host, and every way to run on a GPU; a device of the machine only has the host.
pub(crate) fn sites() -> impl Iterator<Item = Site> {
    let gpu = (!is_device_named()).then(places).into_iter().flatten();
    iter::once(Site::Host).chain(gpu.map(Site::Gpu))
}
