//! `gdasync bench trigger`: what it costs to have a stream trigger something, and to have it wait.

mod after_kernel;
mod barrier;
mod enqueue;
mod feed;
mod gpu;
mod lab;
mod register;
mod report;
mod scene;
mod wake;
mod watch;
mod words;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use gdasync::gdrcopy::Gdr;
use gdasync::measure::{Machine, create_json, write_json};
use indicatif::ProgressBar;

use super::Result;
use gpu::Gpu;
use lab::Lab;
use report::{Figure, Level, Report, Row};
use scene::{Pauses, Variant};
use watch::Watch;

/// Options of `gdasync bench trigger`.
#[derive(Args)]
pub(crate) struct Options {
    /// CUDA device.
    #[arg(long, default_value_t = 0)]
    device: i32,
    /// Samples of each way; registrations and barriers have a twentieth.
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(20..=1_000_000))]
    rounds: u64,
    /// Everything is measured once for each of these numbers of other streams that are kept filled with kernels.
    #[arg(long, default_value = "0,8", value_delimiter = ',', num_args = 1..=8, value_name = "STREAMS",
          value_parser = clap::value_parser!(u8).range(0..=16))]
    busy: Vec<u8>,
    /// Seconds after which a wait is given up, 1 to 60.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=60))]
    timeout: u64,
    /// Writes the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The ways of a group run by turns, in so many slices.
const SLICES: u64 = 10;
/// Registrations and barriers are measured so much less often.
const FEWER: u64 = 20;
const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

struct Bench {
    lab: Lab,
    watch: Watch,
    pauses: Pauses,
    bar: ProgressBar,
    rounds: u64,
    levels: Vec<Level>,
    rows: Vec<Row>,
}

impl Options {
    pub(crate) fn run(&self) -> Result<()> {
        let file = create_json(self.json.as_deref())?;
        let connections = spread_streams();
        let gdr = Gdr::builder().require_gpu().open()?;
        let watch = Watch::start(Duration::from_secs(self.timeout));
        watch.begin("opening the GPU", &[]);
        let gpu = Gpu::open(self.device)?;
        let _current = gpu.enter()?;
        let most = self.busy.iter().copied().max().unwrap_or(0);
        let lab = Lab::new(gpu, &gdr, self.device, most.into(), watch.limit())?;
        let bar = ProgressBar::new_spinner();
        bar.enable_steady_tick(Duration::from_millis(200));
        let mut bench = Bench {
            lab,
            watch,
            pauses: Pauses::default(),
            bar,
            rounds: self.rounds,
            levels: Vec::new(),
            rows: Vec::new(),
        };
        let run = bench.quiet().and_then(|()| self.busy.iter().try_for_each(|&busy| bench.level(busy)));
        bench.bar.finish_and_clear();
        bench.watch.begin("ending", &[]);
        let info = gdr.gpus()?.into_iter().find(|info| info.ordinal == self.device);
        let report = Report {
            machine: Machine::here(),
            gpu: info.map_or_else(String::new, |gpu| format!("{} at {}", gpu.name, gpu.pci)),
            driver: driver(),
            cuda: gpu.cuda.clone(),
            connections,
            backend: gdr.to_string(),
            levels: bench.levels,
            rows: bench.rows,
            incomplete: run.as_ref().err().map(ToString::to_string),
        };
        let written = report.print().and_then(|()| write_json(file, &report));
        // The driver's own clean-up waits for streams that are stuck: that is watched to the end of the process.
        std::mem::forget(bench.watch);
        run?;
        Ok(written?)
    }
}

/// Gives streams as many channels as there can be; what the user has set is kept. Says how many there are.
fn spread_streams() -> String {
    std::env::var(CONNECTIONS).unwrap_or_else(|_| {
        // SAFETY: this process has no other thread yet.
        unsafe { std::env::set_var(CONNECTIONS, "32") };
        "32".into()
    })
}

/// The version of the kernel driver.
fn driver() -> String {
    let version = std::fs::read_to_string("/sys/module/nvidia/version");
    version.map_or_else(|_| "unknown".into(), |version| version.trim().to_owned())
}

impl Bench {
    /// What is measured only with nothing else running: a registration might wait for streams that never end.
    fn quiet(&mut self) -> Result<()> {
        let calls = self.rounds / FEWER;
        self.bar.set_message("registrations");
        let figures = register::measure(&self.lab, calls, &self.watch)?;
        self.keep("register", 0, figures, 1);
        self.bar.set_message("barriers");
        let figures = barrier::measure(&self.lab, calls, &self.watch)?;
        self.keep("barrier", 0, figures, barrier::PARTS);
        Ok(())
    }

    /// All the rest, with so many other streams kept filled.
    fn level(&mut self, busy: u8) -> Result<()> {
        self.watch.begin("starting", &[]);
        let ways = [("trigger", after_kernel::variants(&self.lab)), ("wake", wake::variants(&self.lab))];
        let feeder = (busy > 0).then(|| self.lab.busy(busy.into()));
        let measured = ways
            .into_iter()
            .try_for_each(|(group, variants)| self.by_turns(group, busy, variants))
            .and_then(|()| self.enqueue(busy));
        let share = feeder.map(|feeder| feeder.stop(self.watch.limit())).transpose();
        measured?;
        self.levels.push(Level { busy, share: share? });
        Ok(())
    }

    fn by_turns(&mut self, group: &'static str, busy: u8, mut variants: Vec<Variant>) -> Result<()> {
        let mut turns = || {
            for slice in 1..=SLICES {
                for variant in &mut variants {
                    self.bar.set_message(format!(
                        "{busy} busy streams: {group}, slice {slice} of {SLICES}: {}",
                        variant.name()
                    ));
                    variant.slice(self.rounds.div_ceil(SLICES), &self.watch, &mut self.pauses)?;
                }
            }
            Ok(())
        };
        let run = turns();
        let figures = variants.into_iter().map(Variant::figure).collect();
        self.keep(group, busy, figures, 1);
        run
    }

    fn enqueue(&mut self, busy: u8) -> Result<()> {
        self.bar.set_message(format!("{busy} busy streams: time of calls"));
        let figures = enqueue::measure(&self.lab, self.rounds, &self.watch)?;
        self.keep("enqueue", busy, figures, 1);
        Ok(())
    }

    fn keep(&mut self, group: &'static str, busy: u8, figures: Vec<Figure>, parts: u32) {
        self.rows.extend(figures.into_iter().map(|figure| Row::new(group, busy, figure, parts)));
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        options: Options,
    }

    fn parse(args: &[&str]) -> std::result::Result<Options, clap::Error> {
        Cli::try_parse_from([&["trigger"], args].concat()).map(|cli| cli.options)
    }

    #[test]
    fn options_have_defaults_and_bounds() {
        let options = parse(&[]).unwrap();
        assert_eq!((options.device, options.rounds, options.timeout), (0, 2000, 2));
        assert_eq!((options.busy, options.json), (vec![0, 8], None));
        assert_eq!(parse(&["--busy", "4"]).unwrap().busy, [4]);
        assert_eq!(parse(&["--busy", "0,1,16"]).unwrap().busy, [0, 1, 16]);
        for bad in [&["--rounds", "19"], &["--busy", "17"], &["--busy", "a"], &["--timeout", "0"]] {
            assert!(parse(bad).err().unwrap().to_string().contains(bad[0]), "{bad:?}");
        }
    }
}
