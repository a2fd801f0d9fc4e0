//! `gdasync bench stream`: CPU time of the library for each operation on a CUDA stream, beyond the call of the driver.

mod driver;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use clap::Args;
use gdasync::gdrcopy::cuda::raw::Api;
use gdasync::gdsync::cuda::Gpu;
use gdasync::gdsync::hca::SoftHcaConfig;
use gdasync::gdsync::memory::Memory;
use gdasync::gdsync::stream::{Batch, CudaStreamConfig, Graph, Stream, Via};
use gdasync::gdsync::verbs::{Access, Context, Mr, OnGpu, Qp, RecvWr, SendWr, Sge};
use gdasync::measure::Samples;
use gdasync::results::{Output, Point, Result, Sheet, Unit};
use serde_json::json;

use driver::{Call, Raw, Spent};

/// Options of `gdasync bench stream`.
#[derive(Args)]
#[command(after_long_help = "\
What the numbers mean: the CPU time of a call, of the library and of the driver's call alone, made again with the same \
operations; the ratios are to the driver. `library, per operation` is the difference of the medians divided by the operations \
of a call; with `mean`, that of the means, which includes what happens only now and then. With --graph: launches of a graph \
whose hops are a send and a wait each, and what of them is cuGraphLaunch, node updates and the library.")]
pub(crate) struct Options {
    /// CUDA device.
    #[arg(long, default_value_t = 0)]
    device: i32,
    /// Calls of each kind.
    #[arg(long, default_value_t = 4000, value_parser = clap::value_parser!(u64).range(100..=1_000_000))]
    calls: u64,
    /// Instead of single calls, measure launches of graphs with this many sends and waits, 1 to 200.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=200))]
    graph: Option<u32>,
    /// Seconds after which a wait fails, 1 to 60.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=60))]
    timeout: u64,
    #[command(flatten)]
    output: Output,
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
        let mut sheet = Sheet::new(&self.output, true, VARIANTS.len())?;
        let (driver, open) = (Api::load()?, |api| Gpu::open_with(api, self.device, None));
        let (gpu, watched) = (open(driver)?, open(driver::watched(driver))?);
        let name = format!("GPU {}, {}", self.device, gpu.capabilities());
        let bench = Bench { gpu, watched, timeout: Duration::from_secs(self.timeout), calls: self.calls };
        for (via, place, on_gpu) in VARIANTS {
            sheet.step(format!("{via}, queues in {place} memory"));
            match self.graph {
                Some(hops) => bench.graphs(hops, via, (place, on_gpu), &mut sheet)?,
                None => bench.single_calls(via, (place, on_gpu), &mut sheet)?,
            }
        }
        let options = json!({ "calls": self.calls, "graph": self.graph });
        sheet.write_of("stream", &name, "", options)
    }
}

/// Groups of calls that warm up.
const WARM_UP: u32 = 4;

struct Bench {
    gpu: Gpu,
    /// The same GPU with entry points that record and time calls.
    watched: Gpu,
    timeout: Duration,
    calls: u64,
}

fn open(gpu: &Gpu, via: Via, on_gpu: OnGpu) -> Result<(Stream, Sides)> {
    let config = CudaStreamConfig { via, ..CudaStreamConfig::default() };
    Ok((Stream::cuda(gpu, config)?, Sides::new(gpu, on_gpu)?))
}

impl Bench {
    /// Launches of a graph of `hops` sends and waits.
    fn graphs(&self, hops: u32, via: Via, (place, on_gpu): (&str, OnGpu), sheet: &mut Sheet) -> Result<()> {
        const WARM_UP: u64 = 10;
        const PARTS: [&str; 4] = ["launch", "cuGraphLaunch", "node updates", "library"];
        let _current = self.watched.enter()?;
        let (stream, sides) = open(&self.watched, via, on_gpu)?;
        let graph: Graph = stream.capture(|stream| {
            (0..hops).try_for_each(|_| {
                let mut batch = Batch::new();
                sides.hop(&mut batch)?;
                stream.submit(&mut batch)
            })
        })?;
        let mut samples: [Samples; PARTS.len()] = Default::default();
        for n in 0..WARM_UP + self.calls.div_ceil(hops.into()) {
            let before = driver::spent();
            let start = Instant::now();
            graph.launch(&stream)?;
            let all = start.elapsed();
            let Spent { launches, nodes } = driver::spent().since(before);
            stream.synchronize(self.timeout)?;
            if n >= WARM_UP {
                let library = all.saturating_sub(launches + nodes);
                let times = [all, launches, nodes, library];
                samples.iter_mut().zip(times).for_each(|(samples, time)| samples.add(time));
            }
        }
        let group = format!("graph launch, queues in {place} memory");
        for (part, samples) in PARTS.into_iter().zip(&samples) {
            let (name, x) = (format!("{via}: {part}"), u64::from(hops));
            sheet.add_point(&group, &name, "hops", Unit::Micros, Point::time(x, samples, 1));
            let (group, mean) = (format!("mean per hop, queues in {place} memory"), samples.mean());
            let point = Point::value(x, mean / f64::from(hops));
            sheet.add_point(&group, &name, "hops", Unit::Micros, point);
        }
        Ok(())
    }

    /// Measures the cases in turn, each with its baseline.
    fn single_calls(&self, via: Via, (place, on_gpu): (&str, OnGpu), sheet: &mut Sheet) -> Result<()> {
        let gpu = &self.gpu;
        let _current = gpu.enter()?;
        let recorded = self.recorded(via, on_gpu)?;
        let (stream, sides) = open(gpu, via, on_gpu)?;
        let streams = (&stream, &sides);
        let raw = Raw::new(gpu)?;
        let mut all = Vec::new();
        for (mut case, recorded) in cases(&sides, &stream)?.into_iter().zip(recorded) {
            for _ in 0..WARM_UP {
                self.group(&mut case, streams, |call| timed(&mut Samples::default(), call))?;
            }
            all.push((case, raw.calls(&recorded, GROUP)?, Samples::default(), Samples::default()));
        }
        for _ in 0..self.calls.div_ceil(GROUP) {
            for (case, calls, library, driver) in &mut all {
                self.group(case, streams, |call| timed(library, call))?;
                self.by_driver(&raw, calls, driver)?;
            }
        }
        let group = format!("CPU time of a call, queues in {place} memory");
        let [ours, theirs] = ["library", "driver alone"].map(|who| format!("{via}: {who}"));
        for (case, _, library, driver) in all {
            let (total, base) = (Point::time(case.name, &library, 1), Point::time(case.name, &driver, 1));
            let each = |us: f64| Point::value(case.name, us / f64::from(case.parts));
            let per_operation = format!("library, per operation, queues in {place} memory");
            for (name, us) in [("", total.p50 - base.p50), (", mean", library.mean() - driver.mean())] {
                let name = format!("{via}{name}");
                sheet.add_point(&per_operation, &name, "call", Unit::Micros, each(us));
            }
            let total = Point { ratio: Some(total.p50 / base.p50), ..total };
            sheet.add_point(&group, &theirs, "call", Unit::Micros, base);
            sheet.add_point(&group, &ours, "call", Unit::Micros, total);
        }
        sheet.set_baseline(&group, &ours, &theirs);
        Ok(())
    }

    /// The driver calls of a group of each case.
    fn recorded(&self, via: Via, on_gpu: OnGpu) -> Result<Vec<Vec<Call>>> {
        let (stream, sides) = open(&self.watched, via, on_gpu)?;
        let handle = stream.raw().ok_or("a stream of a GPU has a handle")?;
        let recorded = |mut case: Case<'_>| {
            let mut calls = Vec::new();
            // The first group registers memory with the GPU, which adds operations.
            for _ in 0..WARM_UP {
                calls = self.group(&mut case, (&stream, &sides), |call| {
                    driver::recording(handle, || (0..GROUP).try_for_each(|_| call()))
                })?;
            }
            Ok(calls)
        };
        cases(&sides, &stream)?.into_iter().map(recorded).collect()
    }

    /// Makes a group of calls on a stream that is idle before and after.
    fn group<T>(
        &self,
        case: &mut Case<'_>,
        (stream, sides): (&Stream, &Sides),
        run: impl FnOnce(&mut dyn FnMut() -> Result<()>) -> Result<T>,
    ) -> Result<T> {
        (case.before)()?;
        let done = run(&mut *case.call);
        stream.synchronize(self.timeout)?;
        sides.ours.drain(self.timeout)?;
        sides.peer.drain(self.timeout)?;
        done
    }

    fn by_driver(&self, raw: &Raw<'_>, calls: &mut [Call], samples: &mut Samples) -> Result<()> {
        let done = timed(samples, || calls.iter_mut().try_for_each(|call| raw.make(call)));
        let start = Instant::now();
        while !raw.is_idle()? {
            if start.elapsed() > self.timeout {
                return Err("the GPU does not run what was queued".into());
            }
        }
        done
    }
}

/// Times a group of calls one by one.
fn timed(samples: &mut Samples, mut call: impl FnMut() -> Result<()>) -> Result<()> {
    for _ in 0..GROUP {
        let start = Instant::now();
        call()?;
        samples.add(start.elapsed());
    }
    Ok(())
}

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
        let start = Instant::now();
        while self.sent.get() > 0 {
            match self.qp.poll_send() {
                Some(wc) => {
                    wc.ok()?;
                    self.sent.set(self.sent.get() - 1);
                }
                None if start.elapsed() > timeout => return Err("a send does not complete".into()),
                None => {}
            }
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

    /// Adds a send and a wait for it.
    fn hop(&self, batch: &mut Batch) -> gdasync::gdsync::Result<()> {
        let (from, to) = (self.ours.mr.sge(0, LEN)?, self.peer.mr.remote(0)?);
        batch.send(&self.ours.qp, &SendWr::write(to, &[from]))?;
        batch.wait_send(&self.ours.qp).map(drop)
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
