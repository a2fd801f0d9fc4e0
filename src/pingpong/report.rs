//! What was measured.

use crate::out;
use std::io;
use std::time::{Duration, Instant};

use crate::measure::{Machine, Micros, SERVICES, Samples, process_cpu, size, thread_cpu, threads_cpu};
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use mp::Communicator;

use super::judge::{Judge, Verdict};
use super::options::{Mode, Options};
use crate::lane::{Description, Lane, Placed, Result};

/// A run of the ping-pong.
#[derive(Debug, Serialize)]
pub struct Report {
    device: String,
    stream: &'static str,
    wire: String,
    ranks: usize,
    machine: Machine,
    settings: Settings,
    results: Vec<Line>,
}

/// What was asked for.
#[derive(Debug, Serialize)]
struct Settings {
    #[serde(flatten)]
    place: Description,
    ahead: u32,
    graph: u64,
    initiate: u64,
    work_us: u128,
    no_kernels: bool,
}

/// One mode at one size.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    /// How messages were driven.
    pub mode: Mode,
    /// Bytes of a message.
    pub bytes: usize,
    /// Iterations that were measured.
    pub iters: u64,
    /// Half of the time from the start of a send to the end of the wait for the answer. On a GPU that is from the end of the
    /// kernel that prepares the send, when all see what it wrote, to the start of the one that checks the answer, whoever posts,
    /// work included.
    pub half_rtt_us: Micros,
    /// A whole iteration by the CPU's clock, with posting, preparing, checking and work: the run over its iterations.
    pub iteration_us: f64,
    /// CPU time of the application thread for each message it sends, without filling and checking buffers.
    pub cpu_us_per_msg: f64,
    /// CPU time of all threads of the process for each message it sends, filling and checking included.
    pub process_cpu_us_per_msg: f64,
    /// The same without the threads that do what a network card would, the software HCA's and the proxy's; `None` where the
    /// kernel does not tell.
    pub application_cpu_us_per_msg: Option<f64>,
    /// Messages with wrong data, on both sides.
    pub errors: u64,
    /// What it is of mode sync with the same bytes, where that was played too.
    pub of_sync: Option<OfSync>,
}

/// A line as parts of that of mode sync.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct OfSync {
    /// Of the p50 of half a round trip.
    pub half_rtt: f64,
    /// Of the CPU time of the application thread.
    pub cpu: f64,
    /// Of the CPU time of all threads but those that do what a network card would.
    pub application_cpu: Option<f64>,
}

/// What iterations cost.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    wall: Duration,
    thread: Duration,
    process: Duration,
    /// Of threads that do what a network card would.
    service: Option<Duration>,
}

impl Default for Cost {
    fn default() -> Self {
        let none = Duration::ZERO;
        Self { wall: none, thread: none, process: none, service: Some(none) }
    }
}

impl Cost {
    /// Does some work, and adds what it costs.
    pub(super) fn add<T>(&mut self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let service = threads_cpu(&SERVICES);
        let (wall, thread, process) = (Instant::now(), thread_cpu(), process_cpu());
        let result = work()?;
        self.wall += wall.elapsed();
        self.thread += thread_cpu() - thread;
        self.process += process_cpu() - process;
        let served =
            threads_cpu(&SERVICES).ok().zip(service.ok()).map(|(now, then)| now.saturating_sub(then));
        self.service = self.service.zip(served).map(|(sum, more)| sum + more);
        Ok(result)
    }

    /// Takes back what the calling thread did that is not counted for it.
    pub(super) fn leave_out(&mut self, time: Duration) {
        self.thread = self.thread.saturating_sub(time);
    }
}

/// What one rank measured in one mode at one size.
pub(super) struct Played {
    pub(super) samples: Samples,
    /// Of all `iterations`, those that warm up included.
    pub(super) cost: Cost,
    pub(super) iterations: u64,
    pub(super) errors: u64,
}

impl Played {
    /// What a judge found, but for the iterations that warm up.
    pub(super) fn judged(judge: &dyn Judge, cost: Cost, warm_up: u64) -> Result<Self> {
        let Verdict { times, errors } = judge.verdict()?;
        let mut samples = Samples::default();
        times
            .iter()
            .skip(usize::try_from(warm_up)?)
            .for_each(|time| samples.add(Duration::from_nanos(*time)));
        Ok(Self { samples, cost, iterations: times.len() as u64, errors })
    }

    /// The line of the report, with the errors of all ranks.
    pub(super) fn line(
        &self,
        comm: &Communicator,
        mode: Mode,
        bytes: usize,
        timeout: Duration,
    ) -> Result<Line> {
        let errors = comm.exchange(&self.errors.to_be_bytes(), timeout)?;
        let errors = errors.iter().filter_map(|e| e.first_chunk()).map(|e| u64::from_be_bytes(*e)).sum();
        #[expect(clippy::cast_precision_loss, reason = "iterations are few")]
        let each = |time: Duration| time.as_secs_f64() * 1e6 / self.iterations as f64;
        Ok(Line {
            mode,
            bytes,
            iters: self.samples.count(),
            half_rtt_us: self.samples.micros(2),
            iteration_us: each(self.cost.wall),
            cpu_us_per_msg: each(self.cost.thread),
            process_cpu_us_per_msg: each(self.cost.process),
            application_cpu_us_per_msg: self
                .cost
                .service
                .map(|of| each(self.cost.process.saturating_sub(of))),
            errors,
            of_sync: None,
        })
    }
}

impl Line {
    fn of(&self, sync: &Self) -> OfSync {
        let [ours, theirs] = [self, sync].map(|line| line.application_cpu_us_per_msg);
        OfSync {
            half_rtt: self.half_rtt_us.p50 / sync.half_rtt_us.p50,
            cpu: self.cpu_us_per_msg / sync.cpu_us_per_msg,
            application_cpu: ours.zip(theirs).map(|(ours, theirs)| ours / theirs),
        }
    }
}

impl Report {
    /// Of a run with these options.
    ///
    /// # Errors
    /// Of the exchange between the ranks.
    pub fn new(
        options: &Options,
        comm: &Communicator,
        placed: &Placed,
        lane: &Lane,
        mut results: Vec<Line>,
    ) -> Result<Self> {
        let syncs: Vec<_> = results.iter().filter(|line| line.mode == Mode::Sync).cloned().collect();
        for line in &mut results {
            line.of_sync = syncs.iter().find(|sync| sync.bytes == line.bytes).map(|sync| line.of(sync));
        }
        let context = comm.context();
        Ok(Self {
            device: context.description().to_owned(),
            stream: lane.stream.kind(),
            wire: context.wire().to_owned(),
            ranks: comm.size(),
            machine: Machine::here(),
            settings: Settings {
                place: placed.describe(comm, options.timeout())?,
                ahead: options.ahead,
                graph: options.graph(),
                initiate: options.initiate(),
                work_us: options.work().as_micros(),
                no_kernels: options.no_kernels,
            },
            results,
        })
    }

    /// Whether every message arrived as it was sent.
    pub fn is_right(&self) -> bool {
        self.results.iter().all(|line| line.errors == 0)
    }

    /// Prints the table.
    ///
    /// # Errors
    /// Standard output cannot be written.
    pub fn print(&self) -> io::Result<()> {
        out!(
            "{} over {}, {} stream, {} ranks, {} x {}",
            self.device,
            self.wire,
            self.stream,
            self.ranks,
            self.machine.cpus,
            self.machine.cpu
        )?;
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_header([
            "mode",
            "bytes",
            "iters",
            "p50 us",
            "of sync",
            "p99 us",
            "min us",
            "MB/s",
            "run us/iter",
            "CPU us/msg",
            "of sync",
            "application",
            "of sync",
            "process",
            "errors",
        ]);
        for line in &self.results {
            let Micros { min, p50, p99 } = line.half_rtt_us;
            #[expect(clippy::cast_precision_loss, reason = "message sizes are exact")]
            let bandwidth = line.bytes as f64 / p50;
            let ratio = |of: Option<f64>| of.map_or_else(|| "-".to_owned(), |of| format!("{of:.3}"));
            table.add_row([
                format!("{:?}", line.mode).to_lowercase(),
                size(line.bytes),
                line.iters.to_string(),
                format!("{p50:.2}"),
                ratio(line.of_sync.map(|of| of.half_rtt)),
                format!("{p99:.2}"),
                format!("{min:.2}"),
                format!("{bandwidth:.1}"),
                format!("{:.2}", line.iteration_us),
                format!("{:.2}", line.cpu_us_per_msg),
                ratio(line.of_sync.map(|of| of.cpu)),
                line.application_cpu_us_per_msg.map_or_else(|| "-".to_owned(), |us| format!("{us:.2}")),
                ratio(line.of_sync.and_then(|of| of.application_cpu)),
                format!("{:.2}", line.process_cpu_us_per_msg),
                line.errors.to_string(),
            ]);
        }
        table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        out!("{}{table}", self.settings.place)?;
        out!("Times are half round trips; bandwidth is bytes over the p50; {}.", self.checked())?;
        out!(
            "CPU: of the thread that posts, of the application (all but the threads that do what a network card would: \
             the software HCA's, the proxy's), of the process."
        )
    }

    fn checked(&self) -> &'static str {
        match self.settings.no_kernels && self.results.iter().any(|line| line.mode == Mode::Stream) {
            false => "every message was checked",
            true => "a time of mode stream is the mean of a window, whose last messages were checked",
        }
    }
}
