//! Ping-pong between two ranks, the payload checked in every iteration: the example `pingpong` and `gdasync bench latency`.

mod buffers;
mod exchange;

use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use gdsync::recorder::Marks;
use mp::{Communicator, IntraHostPath};
use serde_json::json;

pub use buffers::PTX;
pub use exchange::{PingPong, Work};

use crate::app_stream::{AppStream, Placement};
use crate::measure::{PAGE, Samples, poll, process_cpu, share_memory, thread_cpu};
use crate::results::{At, Checks, Output, Point, Result, Series, Sheet, Unit, plain_table, size_label};
use crate::terminal::name;

/// Options of a ping-pong.
#[derive(Args, Clone, Debug)]
#[group(skip)]
pub struct Options {
    /// How messages are driven.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Mode::Stream, Mode::Sync, Mode::Cpu])]
    modes: Vec<Mode>,
    /// Message sizes in bytes, 1 to 1073741824 each.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1 << 30),
          default_values_t = [8, 64, 512, 4096, 32768, 262_144, 1 << 20])]
    sizes: Vec<u32>,
    /// Iterations of each size [default: 2000, fewer for large messages].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    iters: Option<u32>,
    /// Iterations posted ahead in mode stream, and of a launch in modes graph and initiate, which run whole launches.
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
    #[command(flatten)]
    checks: Checks,
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

impl Options {
    fn check(&self) -> Result<()> {
        let [graph, initiate] = [Mode::Graph, Mode::Initiate].map(|mode| self.modes.contains(&mode));
        let forbidden = [
            (self.kernel_us > 0, "--kernel-us puts work on the stream"),
            (graph, "mode graph checks every message on the stream"),
            (initiate, "mode initiate is a kernel"),
        ];
        match forbidden.into_iter().find(|(is_asked, _)| self.no_kernels && *is_asked) {
            Some((_, what)) => Err(format!("{what}, which --no-kernels forbids").into()),
            None if initiate && !self.placement.is_by_kernel() => {
                Err("mode initiate needs --stream cuda --via kernel".into())
            }
            None => Ok(()),
        }
    }

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

/// The CPU time of iterations.
#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    thread: Duration,
    process: Duration,
}

impl Cost {
    fn add<T>(&mut self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let (thread, process) = (thread_cpu(), process_cpu());
        let result = work()?;
        self.thread += thread_cpu() - thread;
        self.process += process_cpu() - process;
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

/// The groups of series of CPU times.
const THREAD: &str = "CPU time per message, posting thread";
const PROCESS: &str = "CPU time per message, process";
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
        let x = bytes as u64;
        sheet.add_point(HALF_RTT, mode, "bytes", Unit::Micros, Point::time(x, &self.samples, 2));
        for (group, cost) in [(THREAD, self.cost.thread), (PROCESS, self.cost.process)] {
            sheet.add_point(group, mode, "bytes", Unit::Micros, Point::value(x, each(cost)));
        }
        sheet.wrong(self.errors);
    }
}

/// Runs all modes and sizes, prints a table, and writes the results. With `floor` also bounces a cache line between the CPUs and
/// flags between the streams; with `recorder` also runs each mode with the flight recorder paused.
pub fn run(options: &Options, output: &Output, floor: bool, recorder: bool) -> Result<()> {
    options.check()?;
    let timeout = options.checks.timeout();
    let placed = options.placement.open()?;
    // One transport for all modes: they differ in who drives it. Receives are posted a window ahead into two slots: the peer sends
    // the next message only after an answer to the one before.
    let builder = placed.builder().intra_host(IntraHostPath::Queues).allow_overlap(true);
    let comm = builder.spawn(2).size(2).timeout(timeout).init()?;
    let app = AppStream::new(&placed, timeout, PTX)?;
    let marks = recorder.then(recording).transpose()?;
    let mut sheet = Sheet::new(output, comm.rank() == 0, options.sizes.len())?;
    // Ranks on two hosts share no memory.
    let line = floor.then(|| Floor::new(&comm));
    if let Some(Err(error)) = &line {
        [CACHE_LINE, FLAGS].into_iter().for_each(|name| sheet.skip(name, error.to_string()));
    }
    for &bytes in &options.sizes {
        let bytes = usize::try_from(bytes)?;
        if !sheet.may_start(&comm, size_label(bytes))? {
            continue;
        }
        if let Some(Ok(line)) = &line {
            let (warm_up, total) = options.iterations(bytes);
            line.bounce(warm_up)?;
            let point = Point::time(bytes as u64, &line.bounce(total - warm_up)?, 2);
            sheet.add_point(HALF_RTT, CACHE_LINE, "bytes", Unit::Micros, point);
            exchange::flags(options, &comm, &app)?.add(&mut sheet, FLAGS, bytes);
        }
        for &mode in &options.modes {
            let run = || PingPong::new(options, &comm, &app, &placed, bytes)?.run(mode);
            if let Some(marks) = &marks {
                marks.pause(true);
                run()?.add(&mut sheet, &format!("{}, recorder paused", name(&mode)), bytes);
                marks.pause(false);
            }
            run()?.add(&mut sheet, &name(&mode), bytes);
        }
    }
    let has_line = matches!(line, Some(Ok(_)));
    sheet.compare(HALF_RTT, if has_line { CACHE_LINE } else { "sync" });
    [THREAD, PROCESS].into_iter().for_each(|group| sheet.compare(group, "sync"));
    let checked = match options.no_kernels && options.modes.contains(&Mode::Stream) {
        false => "every message was checked",
        true => "a time of mode stream is the mean of a window, whose last messages were checked",
    };
    let place = placed.describe(&comm)?;
    sheet.note = Some(format!("{place}{checked}"));
    if !floor {
        sheet.summary = Some(summary(&sheet, &options.modes, app.stream.kind()));
    }
    let options = json!({
        "sizes": options.sizes,
        "stream": app.stream.kind(),
        "place": place,
        "ahead": options.ahead,
        "work_us": options.kernel_us,
        "no_kernels": options.no_kernels,
    });
    drop(app);
    sheet.finish(comm, if floor { "latency" } else { "pingpong" }, options)
}

/// A row for each size, with the time of a message and the posting thread's CPU time for it in each mode; and what to see in it.
fn summary(sheet: &Sheet, modes: &[Mode], stream: &str) -> String {
    let names: Vec<String> = modes.iter().map(name).collect();
    let header = names.iter().map(|name| format!("{name} us"));
    let header = header.chain(names.iter().map(|name| format!("{name} CPU us")));
    let mut table = plain_table(["bytes".to_owned()].into_iter().chain(header), 0..=2 * names.len());
    let columns = [HALF_RTT, THREAD].map(|group| names.iter().map(move |name| sheet.find(group, name)));
    let columns: Vec<_> = columns.into_iter().flatten().flatten().collect();
    let rows = columns.first().map_or(&[][..], |first| &first.points);
    for Point { x, .. } in rows {
        let value = |series: &&Series| series.at(x).map_or(String::new(), |point| short(point.p50));
        table.add_row([x.to_string()].into_iter().chain(columns.iter().map(value)));
    }
    let mut text = format!(
        "us: half a round trip, median. CPU us: what a message costs the thread that posts it.\n\n{table}\n"
    );
    if let Some(sentence) = rows.first().and_then(|first| conclusion(sheet, &first.x)) {
        text += &format!("\n{sentence}");
    }
    if stream == "host" {
        text += "\nA host stream is a thread that stands in for a GPU while you develop: for the order of operations and for errors. \
                 Its times say nothing about a GPU.\nAll modes use the same queues; MP_LOCAL=soft lets short messages of mode cpu take \
                 a FIFO in shared memory.";
    }
    text
}

/// What streams save, at the size of this position.
fn conclusion(sheet: &Sheet, x: &At) -> Option<String> {
    let of = |group, mode| Some(sheet.find(group, mode)?.at(x)?.p50);
    let stream = of(THREAD, "stream")?;
    let others = ["sync", "cpu"].into_iter().filter_map(|mode| Some((mode, of(THREAD, mode)?)));
    let others: Vec<_> = others.map(|(mode, cpu)| format!("{} in {mode}", short(cpu))).collect();
    let than =
        if others.is_empty() { String::new() } else { format!(", instead of {}", others.join(" and ")) };
    Some(format!("Mode stream, {x} bytes: {} us of the posting CPU per message{than}.", short(stream)))
}

/// Three digits.
fn short(value: f64) -> String {
    match value {
        large if large >= 99.95 => format!("{large:.0}"),
        middle if middle >= 9.995 => format!("{middle:.1}"),
        small => format!("{small:.2}"),
    }
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
}

impl<'a> Floor<'a> {
    /// Shares the line; both ranks call this.
    pub fn new(comm: &'a Communicator) -> Result<Self> {
        Ok(Self { comm, line: share_memory(comm, PAGE)? })
    }

    /// Round trips as rank 0 measures them.
    pub fn bounce(&self, rounds: u64) -> Result<Samples> {
        use std::sync::atomic::Ordering;
        let (line, pings) = (self.line.atomic64(0)?, self.comm.rank() == 0);
        self.comm.barrier(None)?;
        let mut samples = Samples::default();
        for n in 0..rounds {
            let (mine, theirs) = if pings { (2 * n + 1, 2 * n + 2) } else { (2 * n + 2, 2 * n + 1) };
            let start = Instant::now();
            if pings {
                line.store(mine, Ordering::Release);
            }
            let seen = || Result::Ok((line.load(Ordering::Acquire) == theirs).then_some(()));
            poll(self.comm.timeout(), seen)?.ok_or("the other process does not answer")?;
            if pings {
                samples.add(start.elapsed());
            } else {
                line.store(mine, Ordering::Release);
            }
        }
        self.comm.barrier(None)?;
        line.store(0, Ordering::Release);
        Ok(samples)
    }
}
