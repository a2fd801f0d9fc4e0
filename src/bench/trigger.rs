//! `gdasync bench trigger`: the cost of triggering something from a CUDA stream, and of making a stream wait.

mod gpu;
mod rig;
mod variants;

use std::time::Duration;

use clap::Args;
use gdasync::gdrcopy::Gdr;
use gdasync::measure::Samples;
use gdasync::note;
use gdasync::results::{Point, Result, Sheet, Unit};
use gdasync::tools::nvidia_driver;
use serde_json::json;

use super::OneGpu;
use gpu::Gpu;
use rig::{Pauses, Rig, Variant};

/// Options of `gdasync bench trigger`.
#[derive(Args)]
#[command(after_long_help = "\
What the numbers mean: `trigger` is the time from the end of a kernel until the CPU sees the trigger; `wake` from the store of \
a completion until the CPU sees the word of the next kernel; `enqueue` the CPU time of a call.")]
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
const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

struct Bench {
    rig: Rig,
    limit: Duration,
    pauses: Pauses,
    sheet: Sheet,
    rounds: u64,
    /// Busy streams, and the share of the time in which a kernel ran in each.
    shares: Vec<(u8, f64)>,
}

struct Figure {
    name: &'static str,
    samples: Samples,
    failed: Option<String>,
}

impl Figure {
    fn new(name: &'static str) -> Self {
        Self { name, samples: Samples::default(), failed: None }
    }

    fn end(&mut self, result: Result<()>) {
        self.failed = result.err().map(|error| error.to_string());
    }
}

impl Options {
    pub(crate) fn run(&self) -> Result<()> {
        let sheet = Sheet::new(&self.one.output, true, 3 * self.busy.len())?;
        let connections = spread_streams();
        let gdr = Gdr::builder().require_gpu().open()?;
        let (gpu, limit) = (Gpu::open(self.one.device)?, Duration::from_secs(self.one.timeout));
        let _current = gpu.enter()?;
        let most = self.busy.iter().copied().max().unwrap_or(0);
        let rig = Rig::new(gpu, &gdr, self.one.device, most, limit)?;
        let (pauses, rounds, shares) = (Pauses::default(), self.rounds, Vec::new());
        let mut bench = Bench { rig, limit, pauses, sheet, rounds, shares };
        let run = self.busy.iter().try_for_each(|&busy| bench.level(busy));
        let Bench { mut sheet, shares, .. } = bench;
        if let Err(error) = &run {
            sheet.skip("the rest", error.to_string());
        }
        let info = gdr.gpus()?.into_iter().find(|info| info.ordinal == self.one.device);
        let device = info.map_or_else(String::new, |gpu| format!("{} at {}", gpu.name, gpu.pci));
        let driver = nvidia_driver().unwrap_or_else(|| "unknown".into());
        let options = json!({
            "rounds": self.rounds, "busy": self.busy, "driver": driver, "cuda": gpu.cuda,
            "connections": connections, "backend": gdr.to_string(), "busy_shares": shares,
        });
        let written = sheet.write_of("trigger", &device, "", options);
        if let Err(error) = run {
            note!("gdasync: {error}");
            // SAFETY: ends the process at once: the driver's own clean-up would wait for the blocked stream.
            unsafe { libc::_exit(1) };
        }
        written
    }
}

/// Gives streams as many channels as possible, unless the user has set their number. Returns the number.
fn spread_streams() -> String {
    std::env::var(CONNECTIONS).unwrap_or_else(|_| {
        // SAFETY: this process has no other thread yet.
        unsafe { std::env::set_var(CONNECTIONS, "32") };
        "32".into()
    })
}

impl Bench {
    /// All measurements, with `busy` other streams kept busy.
    fn level(&mut self, busy: u8) -> Result<()> {
        let groups = [("trigger", variants::triggers(&self.rig)), ("wake", variants::wakes(&self.rig))];
        let load = (busy > 0).then(|| self.rig.busy(busy.into()));
        let measured =
            groups.into_iter().try_for_each(|(group, variants)| self.in_turn(group, busy, variants));
        let measured = measured.and_then(|()| {
            self.sheet.step(format!("{busy} busy streams: time of calls"));
            let figures = variants::calls(&self.rig, self.rounds, self.limit)?;
            self.keep("enqueue", busy, figures);
            Ok(())
        });
        let share = load.map(|load| load.stop(self.limit)).transpose();
        measured?;
        self.shares.extend(share?.map(|share| (busy, share)));
        Ok(())
    }

    fn in_turn(&mut self, group: &'static str, busy: u8, mut variants: Vec<Variant>) -> Result<()> {
        self.sheet.step(format!("{busy} busy streams: {group}"));
        let rounds = self.rounds.div_ceil(SLICES);
        let run = (0..SLICES).try_for_each(|_| {
            let mut slice = |one: &mut Variant| one.slice(rounds, self.limit, &mut self.pauses);
            variants.iter_mut().try_for_each(&mut slice)
        });
        self.keep(group, busy, variants.into_iter().map(|variant| variant.figure).collect());
        run
    }

    /// Adds figures to the sheet.
    fn keep(&mut self, group: &str, busy: u8, figures: Vec<Figure>) {
        let series = if busy == 0 { "idle GPU".into() } else { format!("{busy} busy streams") };
        for Figure { name, samples, failed } in figures {
            match failed {
                Some(reason) => self.sheet.skip(format!("{group}: {name}, {series}"), reason),
                None => {
                    let point = Point::time(name, &samples, 1);
                    self.sheet.add_point(group, &series, "variant", Unit::Micros, point);
                }
            }
        }
    }
}
