//! `gdasync bench stream`: CPU time of the library for each operation on a CUDA stream, beyond the call of the driver.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::rc::Rc;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use clap::Args;
use gdasync::gdrcopy::cuda::CudaStatus;
use gdasync::gdrcopy::cuda::raw::Api;
use gdasync::gdrcopy::cuda::raw::layout::{Handle, LaunchConfig, MemOp};
use gdasync::gdsync::cuda::Gpu;
use gdasync::gdsync::hca::SoftHcaConfig;
use gdasync::gdsync::memory::Memory;
use gdasync::gdsync::stream::{Batch, CudaStreamConfig, Stream, Via};
use gdasync::gdsync::verbs::{Access, Context, Mr, OnGpu, Qp, RecvWr, SendWr, Sge};
use gdasync::measure::{Samples, poll};
use gdasync::results::{Point, Result, Sheet, Unit};
use serde_json::json;

use super::OneGpu;

#[derive(Args)]
#[command(after_long_help = "\
What the numbers mean: the CPU time of a call, and what of it is spent in the call of the driver; the ratios are to the driver. \
`library, per operation` is the rest, divided by the operations of a call: the library and one reading of the clock.")]
pub(crate) struct Options {
    /// Calls of each kind.
    #[arg(long, default_value_t = 4000, value_parser = clap::value_parser!(u64).range(100..=1_000_000))]
    calls: u64,
    #[command(flatten)]
    one: OneGpu,
}

/// Executors and places of queues that are measured.
const VARIANTS: [(Via, &str, OnGpu); 4] = [
    (Via::MemOp, "host", OnGpu::empty()),
    (Via::MemOp, "GPU", OnGpu::all()),
    (Via::Kernel, "host", OnGpu::empty()),
    (Via::Kernel, "GPU", OnGpu::all()),
];

impl Options {
    pub(crate) fn run(&self) -> Result<()> {
        let mut sheet = Sheet::new(&self.one.output, true, VARIANTS.len())?;
        let gpu = Gpu::open_with(watched(Api::load()?), self.one.device, None)?;
        let name = format!("GPU {}, {}", self.one.device, gpu.capabilities());
        let bench = Bench { gpu, timeout: Duration::from_secs(self.one.timeout), calls: self.calls };
        for (via, place, on_gpu) in VARIANTS {
            sheet.step(format!("{via}, queues in {place} memory"));
            bench.measure(via, (place, on_gpu), &mut sheet)?;
        }
        let options = json!({ "calls": self.calls });
        sheet.write_of("stream", &name, "", options)
    }
}

/// Groups of calls that warm up.
const WARM_UP: u64 = 4;

struct Bench {
    gpu: Gpu,
    timeout: Duration,
    calls: u64,
}

impl Bench {
    fn measure(&self, via: Via, (place, on_gpu): (&str, OnGpu), sheet: &mut Sheet) -> Result<()> {
        let _current = self.gpu.enter()?;
        let stream = Stream::cuda(&self.gpu, CudaStreamConfig { via, ..CudaStreamConfig::default() })?;
        let sides = Sides::new(&self.gpu, on_gpu)?;
        let mut all: Vec<_> =
            cases(&sides, &stream)?.into_iter().map(|case| (case, Times::default())).collect();
        for group in 0..WARM_UP + self.calls.div_ceil(GROUP) {
            for (case, times) in &mut all {
                let new = self.group(case, &stream, &sides)?;
                if group >= WARM_UP {
                    times.iter_mut().zip(&new).for_each(|(times, new)| times.append(new));
                }
            }
        }
        let group = format!("CPU time of a call by {via}, queues in {place} memory");
        let per_operation = format!("library, per operation, queues in {place} memory");
        for (case, [whole, driver, library]) in all {
            for (name, samples) in [("whole", &whole), (DRIVER, &driver)] {
                sheet.add_point(&group, name, "call", Unit::Micros, Point::time(case.name, samples, 1));
            }
            let point = Point::time(case.name, &library, case.parts);
            sheet.add_point(&per_operation, &via.to_string(), "call", Unit::Micros, point);
        }
        sheet.compare(&group, DRIVER);
        Ok(())
    }

    /// Makes a group of calls on a stream that is idle before and after.
    fn group(&self, case: &mut Case<'_>, stream: &Stream, sides: &Sides) -> Result<Times> {
        let mut times = Times::default();
        (case.before)()?;
        for _ in 0..GROUP {
            spent();
            let start = Instant::now();
            (case.call)()?;
            let whole = start.elapsed();
            let driver = spent();
            let all = [whole, driver, whole.saturating_sub(driver)];
            times.iter_mut().zip(all).for_each(|(times, time)| times.add(time));
        }
        stream.synchronize(self.timeout)?;
        sides.ours.drain(self.timeout)?;
        sides.peer.drain(self.timeout)?;
        Ok(times)
    }
}

/// The times of whole calls, and what of them is the driver's and the library's.
type Times = [Samples; 3];

const DRIVER: &str = "driver";

/// Calls that are timed before the stream is synchronized.
const GROUP: u64 = 16;
/// Sends in the long batch.
const MANY: u32 = 16;
const LEN: usize = 8;
/// Time for the HCA to process what was posted.
const SETTLED: Duration = Duration::from_micros(50);

struct Case<'a> {
    name: &'static str,
    /// Operations in a call.
    parts: u32,
    before: Box<dyn FnMut() -> Result<()> + 'a>,
    call: Box<dyn FnMut() -> Result<()> + 'a>,
}

/// A queue pair that streams drive, and its peer on the same HCA.
struct Sides {
    ours: Side,
    peer: Side,
}

struct Side {
    qp: Qp,
    mr: Mr,
    /// Sends whose completions were not polled.
    sent: Cell<u64>,
}

impl Side {
    fn new(context: &Context, gpu: &Gpu, on_gpu: OnGpu) -> Result<Self> {
        let pd = context.alloc_pd()?;
        let mr = pd.register(&Memory::alloc(64)?, Access::all())?;
        let most = usize::try_from(u64::from(MANY) * GROUP)?;
        let qp = pd.build_qp().max_send_wr(most).max_recv_wr(64).on_gpu(gpu, on_gpu).build()?;
        Ok(Self { qp, mr, sent: Cell::new(0) })
    }

    fn sge(&self) -> Result<Sge> {
        Ok(self.mr.sge(0, LEN)?)
    }

    fn post(&self, send: SendWr<'_>) -> Result<()> {
        self.qp.post_send(&[send])?;
        Ok(())
    }

    fn count_sent(&self, count: u64) {
        self.sent.set(self.sent.get() + count);
    }

    fn drain(&self, timeout: Duration) -> Result<()> {
        while self.sent.get() > 0 {
            let wc = poll(timeout, || Result::Ok(self.qp.poll_send()))?;
            wc.ok_or("a send does not complete")?.ok()?;
            self.sent.set(self.sent.get() - 1);
        }
        Ok(())
    }
}

impl Sides {
    fn new(gpu: &Gpu, on_gpu: OnGpu) -> Result<Self> {
        let context = Context::soft(&SoftHcaConfig::default())?;
        let (ours, peer) = (Side::new(&context, gpu, on_gpu)?, Side::new(&context, gpu, OnGpu::empty())?);
        ours.qp.connect(peer.qp.address())?;
        peer.qp.connect(ours.qp.address())?;
        Ok(Self { ours, peer })
    }
}

/// Waits for the HCA, whose memory traffic would disturb the measurement.
fn settle() {
    let start = Instant::now();
    while start.elapsed() < SETTLED {
        std::hint::spin_loop();
    }
}

impl<'a> Case<'a> {
    fn new(name: &'static str, parts: u32, call: impl FnMut() -> Result<()> + 'a) -> Self {
        Self { name, parts, before: Box::new(|| Ok(())), call: Box::new(call) }
    }

    fn behind(self, before: impl FnMut() -> Result<()> + 'a) -> Self {
        Self { before: Box::new(before), ..self }
    }
}

fn cases<'a>(sides: &'a Sides, stream: &'a Stream) -> Result<Vec<Case<'a>>> {
    let Sides { ours, peer } = sides;
    let (qp, to) = (&ours.qp, peer.mr.remote(0)?);
    let (sges, theirs) = ([ours.sge()?], [peer.sge()?]);
    let prepared = Rc::new(RefCell::new(Vec::new()));
    let posted = prepared.clone();
    let send = move || {
        stream.send(qp, &SendWr::write(to, &sges))?;
        ours.count_sent(1);
        Ok(())
    };
    let by_turns = move || {
        stream.send(qp, &SendWr::write(to, &sges))?;
        Ok(stream.wait_send(qp).map(drop)?)
    };
    let both = move || {
        let mut batch = Batch::new();
        batch.send(qp, &SendWr::write(to, &sges))?;
        batch.wait_send(qp)?;
        Ok(stream.submit(&mut batch)?)
    };
    let posted_sends = move || {
        (0..GROUP).try_for_each(|_| ours.post(SendWr::write(to, &sges)))?;
        settle();
        Ok(())
    };
    let arrived = move || {
        for _ in 0..GROUP {
            qp.post_recv(&[RecvWr::new(&sges)])?;
            peer.post(SendWr::send(&theirs))?;
            peer.count_sent(1);
        }
        settle();
        Ok(())
    };
    let prepare = move || {
        for _ in 0..GROUP {
            prepared.borrow_mut().push(qp.prepare_send(&[SendWr::write(to, &sges)])?);
        }
        // In the order in which they were prepared.
        prepared.borrow_mut().reverse();
        Ok(())
    };
    let post = move || {
        let send = posted.borrow_mut().pop().ok_or("more calls than were prepared")?;
        let mut batch = Batch::new();
        batch.post(send);
        stream.submit(&mut batch)?;
        ours.count_sent(1);
        Ok(())
    };
    let many = move || {
        let mut batch = Batch::new();
        (0..MANY).try_for_each(|_| batch.send(qp, &SendWr::write(to, &sges)).map(drop))?;
        stream.submit(&mut batch)?;
        ours.count_sent(MANY.into());
        Ok(())
    };
    Ok(vec![
        Case::new("send", 1, send),
        Case::new("wait for a send", 1, move || Ok(stream.wait_send(qp).map(drop)?)).behind(posted_sends),
        Case::new("wait for a receive", 1, move || Ok(stream.wait_recv(qp).map(drop)?)).behind(arrived),
        Case::new("send, wait, by turns", 2, by_turns),
        Case::new("send and wait, one batch", 2, both),
        Case::new("prepared send", 1, post).behind(prepare),
        Case::new("16 sends, one batch", MANY, many),
    ])
}

/// What [`watched`] calls.
static ENTRY_POINTS: OnceLock<Api> = OnceLock::new();

thread_local! {
    static SPENT: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// The entry points of `driver`; [`spent`] counts the time in those that trigger and wait.
fn watched(driver: Api) -> Api {
    let driver = ENTRY_POINTS.get_or_init(|| driver);
    Api { stream_batch_mem_op: Some(batch_mem_op), launch_kernel_ex: Some(launch_kernel), ..*driver }
}

/// The time that this thread has spent in the driver since it last asked.
fn spent() -> Duration {
    SPENT.take()
}

/// Makes a call and counts its time.
fn timed<P>(entry: fn(&Api) -> Option<P>, call: impl FnOnce(P) -> u32) -> u32 {
    let driver = ENTRY_POINTS.get().expect("these entry points are only in a table of `watched`");
    let Some(entry) = entry(driver) else { return CudaStatus::NOT_SUPPORTED.0 };
    let start = Instant::now();
    let status = call(entry);
    SPENT.set(SPENT.get() + start.elapsed());
    status
}

unsafe extern "C" fn batch_mem_op(stream: Handle, count: u32, ops: *mut MemOp, flags: u32) -> u32 {
    // SAFETY: the caller's arguments.
    timed(|driver| driver.stream_batch_mem_op, |entry| unsafe { entry(stream, count, ops, flags) })
}

unsafe extern "C" fn launch_kernel(
    config: *const LaunchConfig,
    function: Handle,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> u32 {
    // SAFETY: the caller's arguments.
    timed(|driver| driver.launch_kernel_ex, |entry| unsafe { entry(config, function, params, extra) })
}
