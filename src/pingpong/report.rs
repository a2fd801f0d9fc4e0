//! What was measured.

use std::time::{Duration, Instant};

use crate::measure::{Machine, Micros, Samples, process_cpu, size, thread_cpu};
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use mp::Communicator;

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
    /// kernel that prepares the send to the start of the one that checks the answer, whoever posts, work included.
    pub half_rtt_us: Micros,
    /// A whole iteration by the CPU's clock, with posting, preparing, checking and work: the run over its iterations.
    pub iteration_us: f64,
    /// CPU time of the application thread for each message it sends, without filling and checking buffers.
    pub cpu_us_per_msg: f64,
    /// CPU time of all threads of the process for each message it sends, filling and checking included.
    pub process_cpu_us_per_msg: f64,
    /// Messages with wrong data, on both sides.
    pub errors: u64,
}

/// What iterations cost.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cost {
    wall: Duration,
    thread: Duration,
    process: Duration,
}

impl Cost {
    /// Does some work, and adds what it costs.
    pub(super) fn add<T>(&mut self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let (wall, thread, process) = (Instant::now(), thread_cpu(), process_cpu());
        let result = work()?;
        self.wall += wall.elapsed();
        self.thread += thread_cpu() - thread;
        self.process += process_cpu() - process;
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
            errors,
        })
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
        results: Vec<Line>,
    ) -> Result<Self> {
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
    pub fn print(&self) {
        println!(
            "{} over {}, {} stream, {} ranks, {} x {}",
            self.device, self.wire, self.stream, self.ranks, self.machine.cpus, self.machine.cpu
        );
        print!("{}", self.settings.place);
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
            "run us/iter",
            "CPU us/msg",
            "process",
            "errors",
        ]);
        for line in &self.results {
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
                format!("{:.2}", line.iteration_us),
                format!("{:.2}", line.cpu_us_per_msg),
                format!("{:.2}", line.process_cpu_us_per_msg),
                line.errors.to_string(),
            ]);
        }
        table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        println!("{table}");
        println!("Times are half round trips; bandwidth is bytes over the p50; {}.", self.checked());
    }

    fn checked(&self) -> &'static str {
        match self.settings.no_kernels && self.results.iter().any(|line| line.mode == Mode::Stream) {
            false => "every message was checked",
            true => "a time of mode stream is the mean of a window, whose last messages were checked",
        }
    }
}
