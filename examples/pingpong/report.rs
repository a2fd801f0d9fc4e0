//! What was measured.

use std::time::{Duration, Instant};

use comfy_table::{CellAlignment, Table, presets};
use gdasync::measure::{Machine, Micros, Samples, process_cpu, size, thread_cpu};
use serde::Serialize;

use crate::common::Description;
use crate::options::Mode;

#[derive(Serialize)]
pub(crate) struct Report {
    pub(crate) device: String,
    pub(crate) stream: &'static str,
    pub(crate) wire: String,
    pub(crate) ranks: usize,
    pub(crate) machine: Machine,
    pub(crate) settings: Settings,
    pub(crate) results: Vec<Line>,
}

/// What was asked for.
#[derive(Serialize)]
pub(crate) struct Settings {
    #[serde(flatten)]
    pub(crate) place: Description,
    pub(crate) ahead: u32,
    pub(crate) work_us: u128,
    pub(crate) no_kernels: bool,
}

#[derive(Serialize)]
pub(crate) struct Line {
    pub(crate) mode: Mode,
    pub(crate) bytes: usize,
    pub(crate) iters: u64,
    /// Half of the time from the start of a send to the end of the wait for the answer. On a GPU that is from the end of the
    /// kernel that prepares the send to the start of the one that checks the answer, whoever posts, work included.
    pub(crate) half_rtt_us: Micros,
    /// A whole iteration by the CPU's clock, with posting, preparing, checking and work: the run over its iterations.
    pub(crate) iteration_us: f64,
    /// CPU time of the application thread for each message it sends, without filling and checking buffers.
    pub(crate) cpu_us_per_msg: f64,
    /// CPU time of all threads of the process for each message it sends, filling and checking included.
    pub(crate) process_cpu_us_per_msg: f64,
    /// Messages with wrong data, on both sides.
    pub(crate) errors: u64,
}

/// What iterations cost.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cost {
    wall: Duration,
    thread: Duration,
    process: Duration,
}

impl Cost {
    /// Does some work, and adds what it costs.
    pub(crate) fn add<T, E>(&mut self, work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let (wall, thread, process) = (Instant::now(), thread_cpu(), process_cpu());
        let result = work()?;
        self.wall += wall.elapsed();
        self.thread += thread_cpu() - thread;
        self.process += process_cpu() - process;
        Ok(result)
    }

    /// Takes back what the calling thread did that is not counted for it.
    pub(crate) fn leave_out(&mut self, time: Duration) {
        self.thread = self.thread.saturating_sub(time);
    }
}

/// What one rank measured in one mode at one size.
pub(crate) struct Played {
    pub(crate) samples: Samples,
    /// Of all `iterations`, those that warm up included.
    pub(crate) cost: Cost,
    pub(crate) iterations: u64,
    pub(crate) errors: u64,
}

impl Played {
    /// The line of the report, with the errors of all ranks.
    pub(crate) fn line(&self, mode: Mode, bytes: usize, errors: u64) -> Line {
        #[expect(clippy::cast_precision_loss, reason = "iterations are few")]
        let each = |time: Duration| time.as_secs_f64() * 1e6 / self.iterations as f64;
        Line {
            mode,
            bytes,
            iters: self.samples.count(),
            half_rtt_us: self.samples.micros(2),
            iteration_us: each(self.cost.wall),
            cpu_us_per_msg: each(self.cost.thread),
            process_cpu_us_per_msg: each(self.cost.process),
            errors,
        }
    }
}

impl Report {
    pub(crate) fn print(&self) {
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
