//! `gdasync bench trigger`: the time from a kernel of a CUDA stream to what it triggers, and from a completion to the kernel
//! behind the wait for it.

use std::cell::Cell;
use std::collections::VecDeque;
use std::ffi::CStr;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use gdasync::app_stream::{AppStream, Kernel, Kernels, Placed, Placement, ptx};
use gdasync::gdsync::cuda::Gpu;
use gdasync::gdsync::memory::{Memory, Word32};
use gdasync::gdsync::stream::{Batch, Cond, CudaStreamConfig, Graph, Stream, Via};
use gdasync::measure::{Random, Samples, poll};
use gdasync::results::{Point, Result, Sheet, Unit};
use gdasync::tools::nvidia_driver;
use serde_json::json;

use super::OneGpu;

#[derive(Args)]
#[command(after_long_help = "\
What the numbers mean: `trigger` is the time from the end of a kernel until the CPU sees the trigger; `wake` from the store of \
a completion until the CPU sees the word of the next kernel.")]
pub(crate) struct Options {
    /// Samples of each variant.
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(20..=1_000_000))]
    rounds: u64,
    /// Measure everything once for each of these numbers of other streams that are kept busy with kernels.
    #[arg(long, default_value = "0,8", value_delimiter = ',', num_args = 1..=8, value_name = "STREAMS",
          value_parser = clap::value_parser!(u8).range(0..=16))]
    busy: Vec<u8>,
    #[command(flatten)]
    one: OneGpu,
}

/// The variants of a group run in turn, in this many slices.
const SLICES: u64 = 10;
/// Rounds before each slice that do not count.
const WARM_UP: u64 = 10;
const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

impl Options {
    pub(crate) fn run(&self) -> Result<()> {
        let mut sheet = Sheet::new(&self.one.output, true, 2 * self.busy.len())?;
        let connections = spread_streams();
        let limit = Duration::from_secs(self.one.timeout);
        let placed = Placement::on_gpus(Via::MemOp, vec![self.one.device]).open()?;
        let app = AppStream::new(&placed, limit, PTX)?;
        let rig = Rig::new(&app, limit)?;
        let most = self.busy.iter().copied().max().unwrap_or(0);
        let busy = (0..most).map(|_| BusyStream::new(&placed, limit)).collect::<Result<Vec<_>>>()?;
        let mut groups = [("trigger", triggers(&rig)?), ("wake", wakes(&rig)?)];
        let (mut random, mut shares) = (Random::default(), Vec::new());
        for &streams in &self.busy {
            let series = if streams == 0 { "idle GPU".into() } else { format!("{streams} busy streams") };
            let share = beside(&busy[..streams.into()], limit, || {
                groups.iter_mut().try_for_each(|(group, variants)| {
                    sheet.step(format!("{series}: {group}"));
                    (0..SLICES).try_for_each(|_| {
                        let rounds = self.rounds.div_ceil(SLICES);
                        variants.iter_mut().try_for_each(|one| one.slice(&rig, rounds, &mut random))
                    })
                })
            })?;
            shares.extend(share.map(|share| (streams, share)));
            for (group, variants) in &mut groups {
                for Variant { name, samples, .. } in variants {
                    let point = Point::time(*name, &std::mem::take(samples), 1);
                    sheet.add_point(group, &series, "variant", Unit::Micros, point);
                }
            }
        }
        let options = json!({
            "rounds": self.rounds, "busy": self.busy, "driver": nvidia_driver(),
            "connections": connections, "backend": rig.gpu.gdr()?.to_string(), "busy_shares": shares,
        });
        let device = format!("GPU {}, {}", self.one.device, rig.gpu.capabilities());
        sheet.write_of("trigger", &device, "", options)
    }
}

/// Gives streams as many channels as possible, unless the user has set their number: two streams of one channel would wait
/// for each other. Returns the number.
fn spread_streams() -> String {
    std::env::var(CONNECTIONS).unwrap_or_else(|_| {
        // SAFETY: this process has no other thread yet.
        unsafe { std::env::set_var(CONNECTIONS, "32") };
        "32".into()
    })
}

/// The compiled kernels.
const PTX: &CStr = ptx(concat!(include_str!("trigger.ptx"), "\0"));

/// The argument of `await_gate`, as in the source; an address may be 0.
#[derive(Clone, Copy)]
#[repr(C)]
struct Gate {
    ready: u64,
    gate: u64,
    over: u64,
    limit_ns: u64,
}

/// Bytes between words: the longest cache line of known CPUs and GPUs.
const LINE: usize = 128;
/// Bytes of words in memory of the host, and of the GPU: three for each variant.
const WORDS: usize = 64 << 10;

/// What all variants share.
struct Rig<'a> {
    gpu: &'a Gpu,
    /// The stream that is blocked and awaited.
    app: &'a AppStream,
    kernels: &'a Kernels,
    await_gate: Kernel<Gate>,
    store_word: Kernel<u64>,
    /// Where the CPU submits work to nudge the GPU.
    nudge: Stream,
    limit: Duration,
    host: Memory,
    near: Memory,
    used: Cell<usize>,
    /// Target of writes without meaning.
    scratch: Word32,
}

impl<'a> Rig<'a> {
    fn new(app: &'a AppStream, limit: Duration) -> Result<Self> {
        let (gpu, kernels) = (app.gpu()?, app.kernels.as_ref().ok_or("no kernels")?);
        let (host, near) = (Memory::alloc(WORDS)?, gpu.alloc(WORDS)?);
        Ok(Self {
            // SAFETY: the parameter has the layout of `Gate`.
            await_gate: unsafe { kernels.find(c"await_gate") }?,
            // SAFETY: the parameter is one address.
            store_word: unsafe { kernels.find(c"store_word") }?,
            nudge: Stream::cuda(gpu, CudaStreamConfig { wait_limit: limit, ..Default::default() })?,
            used: Cell::new(LINE),
            scratch: host.word32(0)?,
            gpu,
            app,
            kernels,
            limit,
            host,
            near,
        })
    }

    /// New words, the gate in this memory.
    fn words(&self, gate: &Memory) -> Result<Words> {
        let at = self.used.replace(self.used.get() + 3 * LINE);
        let host = |at| self.host.word32(at);
        Ok(Words { ready: host(at)?, gate: gate.word32(at + LINE)?, over: host(at + 2 * LINE)? })
    }

    /// Launches the kernel that makes `over` 1.
    fn end(&self, words: &Words) -> Result<()> {
        let over = words.over.memory().gpu_addr(self.gpu)?;
        // SAFETY: a word of memory that this value keeps until the stream is idle.
        unsafe { self.kernels.launch(&self.store_word, 1, 1, over) }
    }

    /// Launches the kernel that makes `ready` 1, waits for the gate, and makes `over` 1 if it is to end there.
    fn wait(&self, words: &Words, ends: bool) -> Result<()> {
        let addr = |word: &Word32| word.memory().gpu_addr(self.gpu);
        let over = if ends { addr(&words.over)? } else { 0 };
        // Later than the CPU.
        let limit_ns = u64::try_from((self.limit * 4).as_nanos())?;
        let gate = Gate { ready: addr(&words.ready)?, gate: addr(&words.gate)?, over, limit_ns };
        // SAFETY: words of memory that this value keeps until the stream is idle.
        unsafe { self.kernels.launch(&self.await_gate, 1, 1, gate) }
    }
}

impl Drop for Rig<'_> {
    fn drop(&mut self) {
        self.app.settle();
    }
}

struct Words {
    /// Becomes 1 before the stream waits.
    ready: Word32,
    /// The CPU opens it by storing 1.
    gate: Word32,
    /// Becomes 1 at the end.
    over: Word32,
}

type Step<'a> = Box<dyn Fn(&Words) -> Result<()> + 'a>;

/// A stream blocked by a gate. The measured time is from opening the gate until the CPU sees the end.
struct Variant<'a> {
    name: &'static str,
    words: Words,
    /// Enqueues the wait and what follows.
    enqueue: Step<'a>,
    /// An action right after opening the gate.
    act: Step<'a>,
    /// Whether the stream waits, and says before that it does.
    waits: bool,
    /// Whether a word tells of the end; else `act` ends with it.
    tells: bool,
    samples: Samples,
}

/// Pauses so that the gate does not open in step with the polling of the GPU, from this many nanoseconds, and up to that many longer.
const PAUSE: (u64, u64) = (20_000, 40_000);

impl<'a> Variant<'a> {
    fn new(name: &'static str, words: Words, enqueue: impl Fn(&Words) -> Result<()> + 'a) -> Self {
        let (enqueue, act) = (Box::new(enqueue), Box::new(|_: &Words| Ok(())));
        Self { name, words, enqueue, act, waits: true, tells: true, samples: Samples::default() }
    }

    fn slice(&mut self, rig: &Rig<'_>, rounds: u64, random: &mut Random) -> Result<()> {
        for round in 0..WARM_UP + rounds {
            let time = self.round(rig, random).map_err(|error| format!("{}: {error}", self.name))?;
            if round >= WARM_UP {
                self.samples.add(time);
            }
        }
        Ok(())
    }

    /// Blocks the stream, opens the gate and measures the time until the end.
    fn round(&self, rig: &Rig<'_>, random: &mut Random) -> Result<Duration> {
        let Words { ready, gate, over } = &self.words;
        for word in [ready, gate, over] {
            word.store(0);
            word.memory().flush()?;
        }
        (self.enqueue)(&self.words)?;
        let until = |word: &Word32, what: &str| -> Result<()> {
            let set = poll(rig.limit, || Result::Ok((word.load() != 0).then_some(())))?;
            Ok(set.ok_or_else(|| format!("{what} within {:?}", rig.limit))?)
        };
        if self.waits {
            until(ready, "the stream did not come to its wait")?;
        }
        let (pause, start) = (Duration::from_nanos(PAUSE.0 + random.below(PAUSE.1)), Instant::now());
        while start.elapsed() < pause {
            std::hint::spin_loop();
        }
        if over.load() != 0 {
            return Err("it was over before the gate was opened".into());
        }
        let start = Instant::now();
        gate.store(1);
        (self.act)(&self.words)?;
        if self.tells {
            until(over, "the CPU did not see the word")?;
        }
        let time = start.elapsed();
        rig.app.finish()?;
        rig.nudge.synchronize(rig.limit)?;
        Ok(time)
    }
}

/// All ways to trigger, behind a kernel that waits for its gate, in GPU memory.
fn triggers<'a>(rig: &'a Rig<'_>) -> Result<Vec<Variant<'a>>> {
    let stream = &rig.app.stream;
    let behind_gate = |name, trigger: Step<'a>| {
        let enqueue = move |words: &Words| rig.wait(words, false).and_then(|()| trigger(words));
        Result::Ok(Variant::new(name, rig.words(&rig.near)?, enqueue))
    };
    let writes = |count: usize| -> Step<'a> {
        Box::new(move |words| {
            let mut batch = Batch::new();
            (1..count).for_each(|_| batch.write_value32(&rig.scratch, 1));
            batch.write_value32(&words.over, 1);
            Ok(stream.submit(&mut batch)?)
        })
    };
    let host_function = |words: &Words| {
        let over = words.over.clone();
        Ok(stream.host_fn(move || over.store(1))?)
    };
    // As MPI programs do it: the CPU waits for the stream, then acts.
    let synchronize = behind_gate("cuStreamSynchronize", Box::new(|_| Ok(())))?;
    let words = rig.words(&rig.near)?;
    let graph = stream.capture(|_| rig.wait(&words, false).and_then(|()| writes(1)(&words)))?;
    let launch = move |_: &Words| Ok(graph.launch(stream).map(drop)?);
    Ok(vec![
        kernel_itself("baseline: the kernel itself stores", rig)?,
        behind_gate("write MemOp, host word", writes(1))?,
        behind_gate("batch of 8 write MemOps", writes(8))?,
        behind_gate("batch of 64 write MemOps", writes(64))?,
        behind_gate("kernel of one thread", Box::new(|words| rig.end(words)))?,
        behind_gate("host function", Box::new(host_function))?,
        Variant { act: Box::new(|_| rig.app.idle()), tells: false, ..synchronize },
        Variant::new("graph: gate kernel, write MemOp", words, launch),
    ])
}

/// A kernel that polls the gate, in GPU memory, and goes on itself.
fn kernel_itself<'a>(name: &'static str, rig: &'a Rig<'_>) -> Result<Variant<'a>> {
    Ok(Variant::new(name, rig.words(&rig.near)?, |words| rig.wait(words, true)))
}

/// All ways to wait, each followed by a kernel.
fn wakes<'a>(rig: &'a Rig<'_>) -> Result<Vec<Variant<'a>>> {
    let then_kernel = |name, gate, wait: Step<'a>| {
        let enqueue = move |words: &Words| wait(words).and_then(|()| rig.end(words));
        Result::Ok(Variant::new(name, rig.words(gate)?, enqueue))
    };
    let waits = |times: usize| -> Step<'a> {
        Box::new(move |words| {
            let mut batch = Batch::new();
            batch.write_value32(&words.ready, 1);
            (0..times).for_each(|_| batch.wait_value32(&words.gate, 1, Cond::Geq));
            Ok(rig.app.stream.submit(&mut batch)?)
        })
    };
    // As MPI programs do it: nothing waits in the stream, the CPU launches the kernel when it has seen the completion.
    let launched =
        Variant::new("baseline: the CPU sees it and launches the kernel", rig.words(&rig.host)?, |_| Ok(()));
    // After its store the CPU makes the front end poll, by a write on a stream that has nothing else to do.
    let nudge = |_: &Words| Ok(rig.nudge.write_value32(&rig.scratch, 1)?);
    let nudged = then_kernel("MemOp wait, host word, nudge: write MemOp", &rig.host, waits(1))?;
    let polls = Box::new(|words: &Words| rig.wait(words, false));
    Ok(vec![
        Variant { waits: false, act: Box::new(|words| rig.end(words)), ..launched },
        then_kernel("MemOp wait, host word", &rig.host, waits(1))?,
        then_kernel("MemOp wait, GPU word", &rig.near, waits(1))?,
        then_kernel("MemOp wait 8 times in a batch, host word", &rig.host, waits(8))?,
        Variant { act: Box::new(nudge), ..nudged },
        then_kernel("kernel that polls a host word, then the kernel", &rig.host, polls)?,
        kernel_itself("the kernel itself polls a GPU word", rig)?,
    ])
}

const SPIN: Duration = Duration::from_micros(5);
/// Kernels of a launch, which is a graph: single launches of such short kernels would not fill a stream.
const KERNELS: u32 = 64;
/// Pending launches: a few hundred microseconds of work.
const DEPTH: usize = 3;

struct BusyStream {
    stream: Stream,
    graph: Graph,
}

impl BusyStream {
    fn new(placed: &Placed, limit: Duration) -> Result<Self> {
        let app = AppStream::new(placed, limit, PTX)?;
        let kernels = app.kernels.as_ref().ok_or("no kernels")?;
        // SAFETY: the parameter is one u64.
        let spin: Kernel<u64> = unsafe { kernels.find(c"spin") }?;
        let capture = app.stream.begin_capture()?;
        for _ in 0..KERNELS {
            // SAFETY: the argument names no memory.
            unsafe { kernels.launch(&spin, 1, 1, u64::try_from(SPIN.as_nanos())?) }?;
        }
        Ok(Self { graph: capture.end()?, stream: app.stream })
    }

    /// Keeps the stream filled while the measurement lives. Returns how many launches ended.
    fn feed(&self, measurement: &Weak<()>, limit: Duration) -> gdasync::gdsync::Result<u32> {
        let (mut pending, mut ended) = (VecDeque::new(), 0);
        loop {
            let is_over = measurement.strong_count() == 0;
            if !is_over {
                pending.push_back(self.graph.launch(&self.stream)?);
            }
            if is_over || pending.len() == DEPTH {
                let Some(first) = pending.pop_front() else { return Ok(ended) };
                first.wait(&self.stream, limit)?;
                ended += 1;
            }
        }
    }
}

/// Measures while the streams are kept busy. Returns the share of the time in which a kernel ran in each, if there are any.
fn beside(busy: &[BusyStream], limit: Duration, measure: impl FnOnce() -> Result<()>) -> Result<Option<f64>> {
    // Gone also if the measurement panics: the threads end then, too.
    let measurement = Arc::new(());
    let (alive, start) = (&Arc::downgrade(&measurement), Instant::now());
    thread::scope(|scope| {
        let feed = |one| scope.spawn(move || BusyStream::feed(one, alive, limit));
        let threads: Vec<_> = busy.iter().map(feed).collect();
        let measured = measure();
        drop(measurement);
        let mut launches = 0;
        for thread in threads {
            launches += thread.join().map_err(|_| "a thread that keeps a stream filled panicked")??;
        }
        measured?;
        let ran = (KERNELS * SPIN).as_secs_f64() * f64::from(launches);
        let streams = f64::from(u32::try_from(busy.len())?);
        Ok((streams > 0.0).then(|| ran / start.elapsed().as_secs_f64() / streams))
    })
}
