//! Ping-pong between two processes, with data checked on every iteration.
//!
//! Started alone it spawns its peer; under mpirun, srun or torchrun-style variables it joins. Three modes:
//!
//! - `stream`: sends and waits of many iterations are posted ahead on a stream, the CPU sleeps;
//! - `sync`: the CPU waits for the stream, then posts the next send;
//! - `cpu`: no stream, the CPU posts and polls.

use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use comfy_table::{CellAlignment, Table, presets};
use gdasync::measure::{Machine, Micros, Pattern, Samples, size, thread_cpu};
use gdsync::memory::Memory;
use gdsync::stream::{HostStreamConfig, Stream};
use indicatif::{ProgressBar, ProgressStyle};
use mp::{Communicator, Registration, Request};
use serde::Serialize;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Stream-triggered ping-pong between two processes, data checked on every iteration.
#[derive(Parser)]
#[command(
    version,
    about,
    after_help = "Example: cargo run --release --example pingpong -- --sizes 8,4096 --modes stream,cpu"
)]
struct Options {
    /// How messages are driven.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Mode::Stream, Mode::Sync, Mode::Cpu])]
    modes: Vec<Mode>,
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
    /// Seconds after which a wait is given up, 1 to 86400.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// Writes the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum, Serialize, PartialEq, Debug)]
#[serde(rename_all = "lowercase")]
enum Mode {
    /// Everything posted ahead on a stream, the CPU asleep.
    Stream,
    /// The CPU waits for the stream and then posts.
    Sync,
    /// No stream.
    Cpu,
}

#[derive(Serialize)]
struct Report {
    device: &'static str,
    stream: &'static str,
    wire: &'static str,
    ranks: usize,
    machine: Machine,
    results: Vec<Line>,
}

#[derive(Serialize)]
struct Line {
    mode: Mode,
    bytes: usize,
    iters: u64,
    /// Half of the time from the start of a send to the end of the wait for the answer.
    half_rtt_us: Micros,
    /// CPU time of the application thread for each message it sends, without filling and checking buffers.
    cpu_us_per_msg: f64,
    /// Messages with wrong data, on both sides.
    errors: u64,
}

/// One rank's part in the ping-pong of one size.
struct Player {
    comm: Communicator,
    stream: Stream,
    peer: usize,
    bytes: usize,
    ahead: u64,
    timeout: Duration,
    table: Arc<Board>,
}

/// What host functions on the stream need: buffers, and the score.
struct Board {
    rank: u64,
    bytes: usize,
    /// Three slots: one to send from, two to receive into by turns.
    buffer: Registration,
    errors: AtomicU64,
}

impl Board {
    fn slot(&self, slot: usize) -> Range<usize> {
        // Slots start on cache lines.
        let start = slot * self.bytes.next_multiple_of(64);
        start..start + self.bytes
    }

    fn receive_slot(&self, n: u64) -> Range<usize> {
        self.slot(1 + usize::from(n % 2 == 1))
    }

    fn memory(&self) -> &Memory {
        self.buffer.memory()
    }

    /// Before iteration `n`: the message to send.
    fn fill(&self, n: u64) -> gdsync::Result<()> {
        Pattern::new(self.rank, n).fill(self.memory(), self.slot(0).start, self.bytes)
    }

    /// Before iteration `n`: makes sure that what is to arrive is not there yet.
    fn spoil(&self, n: u64) -> gdsync::Result<()> {
        Pattern::new(1 - self.rank, n).spoil(self.memory(), self.receive_slot(n).start, self.bytes)
    }

    /// After iteration `n`: looks at what arrived, and prepares the next two.
    fn turn(&self, n: u64) {
        let arrived =
            Pattern::new(1 - self.rank, n).check(self.memory(), self.receive_slot(n).start, self.bytes);
        let prepared = self.spoil(n + 2).and_then(|()| self.fill(n + 1));
        if !matches!(arrived, Ok(true)) || prepared.is_err() {
            self.errors.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Player {
    fn receive(&self, n: u64) -> mp::Result<Request> {
        self.comm.irecv(&self.table.buffer, self.table.receive_slot(n), self.peer)
    }

    /// Rank 0 serves, rank 1 returns.
    fn exchange(
        &self,
        send: impl FnOnce() -> mp::Result<Request>,
        wait: impl FnOnce() -> mp::Result<()>,
    ) -> mp::Result<Request> {
        if self.comm.rank() == 0 {
            let sent = send()?;
            wait().map(|()| sent)
        } else {
            wait()?;
            send()
        }
    }

    /// Plays `total` iterations in one mode; times of those from `warm_up` on are returned, and the CPU time of them all.
    fn play(&self, mode: Mode, warm_up: u64, total: u64) -> Result<(Samples, Duration)> {
        self.table.fill(0)?;
        self.table.spoil(0)?;
        self.table.spoil(1)?;
        // Receives are always posted a window before the peer can need them.
        let window = self.ahead;
        let mut receives: Vec<Request> =
            (0..total.min(2 * window)).map(|n| self.receive(n)).collect::<mp::Result<_>>()?;
        self.comm.barrier(self.timeout)?;
        let times: Arc<[AtomicU64]> = (0..total).map(|_| AtomicU64::new(0)).collect();
        let origin = Instant::now();
        let mut cpu = Duration::ZERO;
        let mut n = 0;
        while n < total {
            let end = total.min(n + window);
            let batch = &receives[..usize::try_from(end - n)?];
            let (before, mut idle) = (thread_cpu(), Duration::ZERO);
            match mode {
                Mode::Stream => self.stream_window(n, batch, &times, origin)?,
                Mode::Sync | Mode::Cpu => {
                    for (n, receive) in (n..end).zip(batch) {
                        idle += self.iteration(mode, n, receive, &times)?;
                    }
                }
            }
            cpu += (thread_cpu() - before).saturating_sub(idle);
            receives.drain(..usize::try_from(end - n)?);
            let posted = n + 2 * window;
            receives.extend(
                (posted.min(total)..(posted + window).min(total))
                    .map(|n| self.receive(n))
                    .collect::<mp::Result<Vec<_>>>()?,
            );
            n = end;
        }
        let mut samples = Samples::default();
        for time in &times[usize::try_from(warm_up)?..] {
            samples.add(Duration::from_nanos(time.load(Ordering::Relaxed)));
        }
        Ok((samples, cpu))
    }

    /// Posts a window of iterations ahead and sleeps until the stream has run them.
    fn stream_window(
        &self,
        first: u64,
        receives: &[Request],
        times: &Arc<[AtomicU64]>,
        origin: Instant,
    ) -> Result<()> {
        let started = Arc::new(AtomicU64::new(0));
        let now = move || u64::try_from(origin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let start = started.clone();
        self.stream.host_fn(move || start.store(now(), Ordering::Relaxed))?;
        for (n, receive) in (first..).zip(receives) {
            let send =
                || self.comm.send_on_stream(&self.stream, &self.table.buffer, self.table.slot(0), self.peer);
            let wait = || self.comm.wait_on_stream(&self.stream, receive);
            let sent = self.exchange(send, wait)?;
            // The buffer is filled anew below.
            self.comm.wait_on_stream(&self.stream, &sent)?;
            let (table, times, started) = (self.table.clone(), times.clone(), started.clone());
            self.stream.host_fn(move || {
                let time = now() - started.load(Ordering::Relaxed);
                times[usize::try_from(n).unwrap_or(0)].store(time, Ordering::Relaxed);
                table.turn(n);
                started.store(now(), Ordering::Relaxed);
            })?;
        }
        Ok(self.stream.synchronize(self.timeout)?)
    }

    /// One iteration driven by the CPU. Returns the time spent on checking.
    fn iteration(&self, mode: Mode, n: u64, receive: &Request, times: &[AtomicU64]) -> Result<Duration> {
        let send = || self.comm.isend(&self.table.buffer, self.table.slot(0), self.peer);
        let wait = || {
            if mode == Mode::Sync {
                self.comm.wait_on_stream(&self.stream, receive)?;
                self.stream.synchronize(self.timeout)?;
                Ok(())
            } else {
                self.comm.wait(receive, self.timeout).map(drop)
            }
        };
        let start = Instant::now();
        let sent = self.exchange(send, wait)?;
        let time = u64::try_from(start.elapsed().as_nanos())?;
        times[usize::try_from(n)?].store(time, Ordering::Relaxed);
        self.comm.wait(&sent, self.timeout)?;
        let start = Instant::now();
        self.table.turn(n);
        Ok(start.elapsed())
    }
}

fn run(options: &Options) -> Result<bool> {
    let timeout = Duration::from_secs(options.timeout);
    let comm = Communicator::builder().spawn(2).timeout(timeout).init()?;
    if comm.size() != 2 {
        return Err(format!("a ping-pong has 2 ranks, this job has {}", comm.size()).into());
    }
    let stream = Stream::host(HostStreamConfig { wait_limit: timeout, ..HostStreamConfig::default() })?;
    let first = comm.rank() == 0;
    // A path that cannot be written to is better known before the measurement than after it.
    let json = options.json.as_ref().filter(|_| first);
    let create = |path: &PathBuf| File::create(path).map_err(|e| format!("--json {}: {e}", path.display()));
    let file = json.map(create).transpose()?;
    let steps = options.modes.len() * options.sizes.len();
    // Drawn on a terminal only, and never while a measurement runs.
    let bar = if first { ProgressBar::new(steps as u64) } else { ProgressBar::hidden() };
    bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}")?);
    let mut results = Vec::new();
    for &mode in &options.modes {
        for &bytes in &options.sizes {
            let bytes = usize::try_from(bytes)?;
            bar.set_message(format!("{mode:?}, {} B", size(bytes)));
            let line = measure(options, &comm, &stream, mode, bytes, timeout)?;
            results.push(line);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let context = comm.context();
    let machine = Machine::here();
    let (device, wire) = (context.description(), context.wire());
    let report = Report { device, stream: stream.kind(), wire, ranks: comm.size(), machine, results };
    if first {
        print(&report);
        if let Some(file) = file {
            serde_json::to_writer_pretty(file, &report)?;
        }
    }
    comm.finalize(timeout)?;
    Ok(report.results.iter().all(|line| line.errors == 0))
}

/// Plays one size in one mode on both ranks; the errors of both are in the result.
fn measure(
    options: &Options,
    comm: &Communicator,
    stream: &Stream,
    mode: Mode,
    bytes: usize,
    timeout: Duration,
) -> Result<Line> {
    let slot = bytes.next_multiple_of(64);
    let buffer = comm.register(&Memory::alloc(3 * slot)?)?;
    let rank = u64::try_from(comm.rank())?;
    let table = Arc::new(Board { rank, bytes, buffer, errors: AtomicU64::new(0) });
    let player = Player {
        comm: comm.clone(),
        stream: stream.clone(),
        peer: 1 - comm.rank(),
        bytes,
        ahead: u64::from(options.ahead),
        timeout,
        table,
    };
    let iters = options.iters.map_or(((64 << 20) / player.bytes as u64).clamp(10, 2000), u64::from);
    let warm_up = (iters / 10).max(2);
    let (samples, cpu) = player.play(mode, warm_up, warm_up + iters)?;
    let own = player.table.errors.load(Ordering::Relaxed);
    let errors = comm.exchange(&own.to_be_bytes(), timeout)?;
    let errors = errors.iter().filter_map(|e| e.first_chunk()).map(|e| u64::from_be_bytes(*e)).sum();
    #[expect(clippy::cast_precision_loss, reason = "iterations are few")]
    let cpu_us_per_msg = cpu.as_secs_f64() * 1e6 / (warm_up + iters) as f64;
    Ok(Line { mode, bytes, iters: samples.count(), half_rtt_us: samples.micros(2), cpu_us_per_msg, errors })
}

fn print(report: &Report) {
    println!(
        "{} over {}, {} stream, {} ranks, {} x {}",
        report.device, report.wire, report.stream, report.ranks, report.machine.cpus, report.machine.cpu
    );
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header([
        "mode",
        "bytes",
        "iters",
        "p50 us",
        "p99 us",
        "min us",
        "MB/s",
        "CPU us/msg",
        "errors",
    ]);
    for line in &report.results {
        let Micros { min, p50, p99 } = line.half_rtt_us;
        #[expect(clippy::cast_precision_loss, reason = "message sizes are exact")]
        let bandwidth = line.bytes as f64 / p50;
        table.add_row([
            format!("{:?}", line.mode).to_lowercase(),
            size(line.bytes),
            line.iters.to_string(),
            format!("{p50:.2}"),
            format!("{p99:.2}"),
            format!("{min:.2}"),
            format!("{bandwidth:.1}"),
            format!("{:.2}", line.cpu_us_per_msg),
            line.errors.to_string(),
        ]);
    }
    table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    println!("{table}");
    println!("Times are half round trips; bandwidth is bytes over the p50; every message was checked.");
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    let options = Options::parse();
    match run(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!("pingpong: messages arrived with wrong data");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("pingpong: {error}");
            ExitCode::FAILURE
        }
    }
}
