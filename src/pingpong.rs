//! Ping-pong between two ranks, the payload checked in every iteration: the example `pingpong` and `gdasync bench latency`.

mod buffers;
mod exchange;

use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use gdsync::recorder::Marks;
use mp::Communicator;
use serde_json::json;

pub use buffers::PTX;
pub use exchange::{PingPong, Work};

use crate::app_stream::{AppStream, Placement};
use crate::measure::{PAGE, SERVICES, Samples, process_cpu, share_memory, thread_cpu, threads_cpu};
use crate::results::{Output, Point, Result, Sheet, Unit, size_label};

/// Default iterations per launch of modes graph and initiate.
const LAUNCH: u32 = 50;

/// Options of a ping-pong.
#[derive(Args, Clone, Debug)]
#[group(skip)]
pub struct Options {
    /// How messages are driven.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Mode::Stream, Mode::Sync, Mode::Cpu])]
    modes: Vec<Mode>,
    /// Also run mode graph with this many iterations per launch, 1 to 200 [default in mode graph: 50].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=200))]
    graph: Option<u32>,
    /// Also run mode initiate with this many iterations per launch, 1 to 200 [default in mode initiate: 50].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=200))]
    initiate: Option<u32>,
    /// Message sizes in bytes, 1 to 1073741824 each.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1 << 30),
          default_values_t = [1, 8, 64, 512, 4096, 32768, 262_144, 1 << 20, 4 << 20])]
    sizes: Vec<u32>,
    /// Iterations of each size [default: 2000, fewer for large messages].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    iters: Option<u32>,
    /// Iterations posted ahead in mode stream.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=200))]
    ahead: u32,
    #[command(flatten)]
    placement: Placement,
    /// Microseconds of work on the stream before each send.
    #[arg(long, value_name = "US", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    kernel_us: u32,
    /// Put only sends and waits on the stream: the CPU checks the last messages of each window of mode stream, and every
    /// message of the other modes.
    #[arg(long)]
    no_kernels: bool,
    /// Rank 1 sends wrong data: for tests of the check.
    #[arg(long, hide = true)]
    wrong_bytes: bool,
    /// Seconds after which a wait fails, 1 to 86400.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
}

/// How messages are driven.
#[derive(Clone, Copy, ValueEnum, PartialEq, Debug)]
pub enum Mode {
    /// Sends and waits posted ahead on a stream, the CPU asleep.
    Stream,
    /// CUDA graphs: iterations captured once and launched repeatedly, on a connection of their own.
    Graph,
    /// A kernel that waits and sends by itself, for --stream cuda --via kernel.
    Initiate,
    /// The CPU waits for the stream and then posts.
    Sync,
    /// The CPU posts and polls, no stream.
    Cpu,
}

impl Mode {
    fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

impl Options {
    fn check(&self) -> Result<()> {
        let modes = self.modes();
        let conflict = match () {
            () if self.no_kernels && self.kernel_us > 0 => {
                "--kernel-us puts work on the stream, which --no-kernels forbids"
            }
            () if self.no_kernels && modes.contains(&Mode::Graph) => {
                "mode graph (--graph) checks every message on the stream, which --no-kernels forbids"
            }
            () if self.no_kernels && modes.contains(&Mode::Initiate) => {
                "mode initiate (--initiate) is a kernel, which --no-kernels forbids"
            }
            () if modes.contains(&Mode::Initiate) && !self.placement.is_by_kernel() => {
                "mode initiate (--initiate) needs --stream cuda --via kernel"
            }
            () => return Ok(()),
        };
        Err(conflict.into())
    }

    fn modes(&self) -> Vec<Mode> {
        let mut modes = self.modes.clone();
        let mut add = |asked: bool, mode, behind: &[Mode]| {
            if asked && !modes.contains(&mode) {
                let at = modes.iter().rposition(|known| behind.contains(known)).map_or(0, |at| at + 1);
                modes.insert(at, mode);
            }
        };
        add(self.graph.is_some(), Mode::Graph, &[Mode::Stream]);
        add(self.initiate.is_some(), Mode::Initiate, &[Mode::Stream, Mode::Graph]);
        modes
    }

    /// How long a wait may take.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    /// Work on the stream before each send.
    fn work(&self) -> Duration {
        Duration::from_micros(self.kernel_us.into())
    }

    /// Iterations that warm up, and all iterations.
    fn iterations(&self, bytes: usize) -> (u64, u64) {
        let measured = self.iters.map_or(((64 << 20) / bytes as u64).clamp(10, 2000), u64::from);
        let warm_up = (measured / 10).max(2);
        (warm_up, warm_up + measured)
    }
}

/// The time and CPU time of iterations.
#[derive(Clone, Copy, Debug)]
struct Cost {
    wall: Duration,
    thread: Duration,
    process: Duration,
    /// Of the threads that stand in for a network card; `None` if the kernel does not tell.
    service: Option<Duration>,
}

impl Default for Cost {
    fn default() -> Self {
        let none = Duration::ZERO;
        Self { wall: none, thread: none, process: none, service: Some(none) }
    }
}

impl Cost {
    fn add<T>(&mut self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let service = threads_cpu(&SERVICES);
        let (wall, thread, process) = (Instant::now(), thread_cpu(), process_cpu());
        let result = work()?;
        self.wall += wall.elapsed();
        self.thread += thread_cpu() - thread;
        self.process += process_cpu() - process;
        let served = threads_cpu(&SERVICES).ok().zip(service.ok());
        let served = served.map(|(now, then)| now.saturating_sub(then));
        self.service = self.service.zip(served).map(|(sum, more)| sum + more);
        Ok(result)
    }

    /// Subtracts CPU time that the calling thread spent on filling and checking buffers.
    fn leave_out(&mut self, time: Duration) {
        self.thread = self.thread.saturating_sub(time);
    }
}

/// What one rank measured in one mode at one size.
#[derive(Debug)]
pub struct Measured {
    samples: Samples,
    /// Of all iterations, including warm-up.
    cost: Cost,
    iterations: u64,
    errors: u64,
}

/// Groups of series of costs: wall time of an iteration; CPU time of a message: of the posting thread, of the process without
/// service threads, of the process.
const COSTS: [&str; 4] = [
    "whole iteration",
    "CPU time per message, posting thread",
    "CPU time per message, application",
    "CPU time per message, process",
];
/// The group of series of latencies.
pub const HALF_RTT: &str = "half round trip";
/// The baseline of latencies: a cache line that the CPUs of both processes bounce.
pub const CACHE_LINE: &str = "cache line";
const FLAGS: &str = "stream flags";

impl Measured {
    /// Adds the points of one mode at one size.
    fn add(&self, sheet: &mut Sheet, mode: &str, bytes: usize) {
        #[expect(clippy::cast_precision_loss, reason = "iterations are few")]
        let each = |time: Duration| time.as_secs_f64() * 1e6 / self.iterations as f64;
        let Cost { wall, thread, process, service } = self.cost;
        let application = service.map(|service| process.saturating_sub(service));
        let x = bytes as u64;
        sheet.add_point(HALF_RTT, mode, "bytes", Unit::Micros, Point::time(x, &self.samples, 2));
        for (group, cost) in COSTS.into_iter().zip([Some(wall), Some(thread), application, Some(process)]) {
            if let Some(cost) = cost {
                sheet.add_point(group, mode, "bytes", Unit::Micros, Point::value(x, each(cost)));
            }
        }
        sheet.wrong(self.errors);
    }
}

/// Runs all modes and sizes, and prints and writes the results. With `floor`, also bounces a cache line between the CPUs and
/// flags between the streams; with `recorder`, also runs each mode with the flight recorder paused.
pub fn run(options: &Options, output: &Output, benchmark: &str, floor: bool, recorder: bool) -> Result<()> {
    options.check()?;
    let timeout = options.timeout();
    let placed = options.placement.open()?;
    // Receives are posted a window ahead into two slots: the peer sends the next message only after an answer to the one before.
    let comm = placed.builder().allow_overlap(true).spawn(2).timeout(timeout).init()?;
    if comm.size() != 2 {
        return Err(format!("a ping-pong has 2 ranks, this job has {}", comm.size()).into());
    }
    let app = AppStream::new(&placed, timeout, PTX)?;
    let marks = recorder.then(recording).transpose()?;
    let mut sheet = Sheet::new(output, comm.rank() == 0, options.sizes.len())?;
    // Ranks on two hosts share no memory.
    let line = floor.then(|| Floor::new(&comm, timeout));
    if let Some(Err(error)) = &line {
        [CACHE_LINE, FLAGS].into_iter().for_each(|name| sheet.skip(name, error.to_string()));
    }
    for &bytes in &options.sizes {
        let bytes = usize::try_from(bytes)?;
        if !sheet.may_start(&comm, size_label(bytes), timeout)? {
            continue;
        }
        if let Some(Ok(line)) = &line {
            let (warm_up, total) = options.iterations(bytes);
            line.bounce(warm_up)?;
            let point = Point::time(bytes as u64, &line.bounce(total - warm_up)?, 2);
            sheet.add_point(HALF_RTT, CACHE_LINE, "bytes", Unit::Micros, point);
            exchange::flags(options, &comm, &app)?.add(&mut sheet, FLAGS, bytes);
        }
        for mode in options.modes() {
            let run = || PingPong::new(options, &comm, &app, &placed, bytes)?.run(mode);
            if let Some(marks) = &marks {
                marks.pause(true);
                run()?.add(&mut sheet, &format!("{}, recorder paused", mode.name()), bytes);
                marks.pause(false);
            }
            run()?.add(&mut sheet, &mode.name(), bytes);
        }
    }
    let has_line = matches!(line, Some(Ok(_)));
    sheet.compare(HALF_RTT, if has_line { CACHE_LINE } else { "sync" });
    COSTS.into_iter().for_each(|group| sheet.compare(group, "sync"));
    let checked = match options.no_kernels && options.modes().contains(&Mode::Stream) {
        false => "every message was checked",
        true => "a time of mode stream is the mean of a window, whose last messages were checked",
    };
    let place = placed.describe(&comm, timeout)?;
    sheet.set_note(format!("{place}{checked}"));
    let options = json!({
        "sizes": options.sizes,
        "stream": app.stream.kind(),
        "place": place,
        "ahead": options.ahead,
        "graph": options.graph.unwrap_or(LAUNCH),
        "initiate": options.initiate.unwrap_or(LAUNCH),
        "work_us": options.kernel_us,
        "no_kernels": options.no_kernels,
    });
    drop(app);
    sheet.finish(comm, benchmark, options, timeout)
}

fn recording() -> Result<Marks> {
    let marks = Marks::open()?;
    match marks.is_recording() {
        true => Ok(marks),
        false => Err("nothing is recorded: unset GDSYNC_RECORDER, and make room in /dev/shm".into()),
    }
}

/// A cache line of shared memory that the CPUs of two ranks bounce: the floor of message latency.
#[derive(Debug)]
pub struct Floor<'a> {
    comm: &'a Communicator,
    line: gdsync::memory::Memory,
    timeout: Duration,
}

impl<'a> Floor<'a> {
    /// Shares the line; both ranks call this.
    pub fn new(comm: &'a Communicator, timeout: Duration) -> Result<Self> {
        Ok(Self { comm, line: share_memory(comm, PAGE, timeout)?, timeout })
    }

    /// Round trips as rank 0 measures them.
    pub fn bounce(&self, rounds: u64) -> Result<Samples> {
        use std::sync::atomic::Ordering;
        let (line, pings) = (self.line.atomic64(0)?, self.comm.rank() == 0);
        self.comm.barrier(self.timeout)?;
        let mut samples = Samples::default();
        for n in 0..rounds {
            let (mine, theirs) = if pings { (2 * n + 1, 2 * n + 2) } else { (2 * n + 2, 2 * n + 1) };
            let start = Instant::now();
            if pings {
                line.store(mine, Ordering::Release);
            }
            await_value(line, theirs, start, self.timeout)?;
            if pings {
                samples.add(start.elapsed());
            } else {
                line.store(mine, Ordering::Release);
            }
        }
        self.comm.barrier(self.timeout)?;
        line.store(0, Ordering::Release);
        Ok(samples)
    }
}

/// Spins until the word has this value; yields the core now and then.
pub fn await_value(
    word: &std::sync::atomic::AtomicU64,
    value: u64,
    since: Instant,
    timeout: Duration,
) -> Result<()> {
    let mut spins = 0u32;
    while word.load(std::sync::atomic::Ordering::Acquire) != value {
        spins = spins.wrapping_add(1);
        if spins.is_multiple_of(1 << 12) {
            if since.elapsed() > timeout {
                return Err("the other process does not answer".into());
            }
            std::thread::yield_now();
        }
    }
    Ok(())
}
