//! `gdasync bench stream`: what this library costs the CPU for each operation of a stream, on top of the driver's call.

mod cases;
mod driver;
mod graphs;
mod report;
#[cfg(feature = "standin")]
mod simulated;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use gdasync::gdrcopy::cuda::raw::Api;
use gdasync::gdsync::cuda::Gpu;
use gdasync::gdsync::stream::{CudaStreamConfig, Stream, Via};
use gdasync::gdsync::verbs::OnGpu;
use gdasync::measure::{Machine, Samples, create_json, write_json};
use indicatif::ProgressBar;

use super::Result;
use cases::{Case, GROUP, Sides, cases};
use driver::{Call, Raw};
use report::{Report, Row};

/// Options of `gdasync bench stream`.
#[derive(Args)]
pub(crate) struct Options {
    /// CUDA device.
    #[arg(long, default_value_t = 0)]
    device: i32,
    /// Calls of each kind.
    #[arg(long, default_value_t = 4000, value_parser = clap::value_parser!(u64).range(100..=1_000_000))]
    calls: u64,
    /// In place of single calls: launches of graphs with so many batches of a send and a wait for it, 1 to 200.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=200))]
    graph: Option<u32>,
    /// Seconds after which a wait is given up, 1 to 60.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=60))]
    timeout: u64,
    /// Writes the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Runs on a driver of no GPU, whose calls do next to nothing: for work on the library.
    #[cfg(feature = "standin")]
    #[arg(long, hide = true)]
    simulated: bool,
}

/// Where the calls go.
struct Machinery {
    gpu: Gpu,
    /// The same with entry points that note and time what is called.
    watched: Gpu,
    name: String,
    /// Lets the GPU run what is queued, or not; a real one always does.
    run: fn(bool),
}

impl Options {
    pub(crate) fn run(&self) -> Result<()> {
        let file = create_json(self.json.as_deref())?;
        let machinery = self.machinery()?;
        if let Some(hops) = self.graph {
            let report = graphs::Report::measure(self, machinery, hops)?;
            report.print()?;
            write_json(file, &report)?;
            return Ok(());
        }
        let timeout = self.timeout();
        let bar = ProgressBar::new_spinner();
        bar.enable_steady_tick(Duration::from_millis(500));
        let mut rows = Vec::new();
        for via in [Via::MemOp, Via::Kernel] {
            for (place, on_gpu) in [("host", OnGpu::empty()), ("GPU", OnGpu::all())] {
                bar.set_message(format!("{via}, queues in {place} memory"));
                let bench = Bench { machinery: &machinery, via, place, timeout, calls: self.calls };
                rows.extend(bench.measure(on_gpu)?);
            }
        }
        bar.finish_and_clear();
        let report = Report { machine: Machine::here(), gpu: machinery.name, rows };
        report.print()?;
        write_json(file, &report)?;
        Ok(())
    }

    fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    fn machinery(&self) -> Result<Machinery> {
        #[cfg(feature = "standin")]
        if self.simulated {
            return simulated::machinery(self.graph.is_some());
        }
        let (driver, open) = (Api::load()?, |api| Gpu::open_with(api, self.device, None));
        let (gpu, watched) = (open(driver)?, open(driver::watched(driver))?);
        let name = format!("GPU {}, {}", self.device, gpu.capabilities());
        Ok(Machinery { gpu, watched, name, run: |_| {} })
    }
}

/// Groups of calls that nobody counts.
const WARM_UP: u32 = 4;

struct Bench<'a> {
    machinery: &'a Machinery,
    via: Via,
    place: &'static str,
    timeout: Duration,
    calls: u64,
}

impl Bench<'_> {
    /// The cases by turns, each with its baseline.
    fn measure(&self, on_gpu: OnGpu) -> Result<Vec<Row>> {
        let gpu = &self.machinery.gpu;
        let _current = gpu.enter()?;
        let noted = self.noted(on_gpu)?;
        let (stream, sides) = self.rig(gpu, on_gpu)?;
        let raw = Raw::new(gpu)?;
        let mut lanes = Vec::new();
        for (mut case, noted) in cases(&sides, &stream)?.into_iter().zip(noted) {
            // The first calls are slower than the rest.
            for _ in 0..WARM_UP {
                self.by_library(&mut case, &sides, &stream, &mut Samples::default())?;
            }
            lanes.push((case, raw.calls(&noted, GROUP)?, Samples::default(), Samples::default()));
        }
        for _ in 0..self.calls.div_ceil(GROUP) {
            for (case, calls, library, driver) in &mut lanes {
                self.by_library(case, &sides, &stream, library)?;
                self.by_driver(&raw, calls, driver)?;
            }
        }
        let row = |(case, calls, library, driver): (Case<'_>, Vec<Call>, Samples, Samples)| {
            Row::new(case, (self.via, self.place), &calls, &library, &driver)
        };
        Ok(lanes.into_iter().map(row).collect())
    }

    fn rig(&self, gpu: &Gpu, on_gpu: OnGpu) -> Result<(Stream, Sides)> {
        let config = CudaStreamConfig { via: self.via, ..CudaStreamConfig::default() };
        Ok((Stream::cuda(gpu, config)?, Sides::new(gpu, on_gpu)?))
    }

    /// What the driver sees of a group of each case.
    fn noted(&self, on_gpu: OnGpu) -> Result<Vec<Vec<Call>>> {
        let (stream, sides) = self.rig(&self.machinery.watched, on_gpu)?;
        let handle = stream.raw().ok_or("a stream of a GPU has a handle")?;
        let noted = |mut case: Case<'_>| {
            let mut calls = Vec::new();
            // In the first group memory is made known to the GPU, which puts more marks.
            for _ in 0..WARM_UP {
                calls = self.group(&mut case, &sides, &stream, |call| {
                    driver::noting(handle, || (0..GROUP).try_for_each(|_| call()))
                })?;
            }
            Ok(calls)
        };
        cases(&sides, &stream)?.into_iter().map(noted).collect()
    }

    fn by_library(
        &self,
        case: &mut Case<'_>,
        sides: &Sides,
        stream: &Stream,
        samples: &mut Samples,
    ) -> Result<()> {
        self.group(case, sides, stream, |call| timed(samples, call))
    }

    /// Has `run` make a group of calls, on a stream that is dry before and after.
    fn group<T>(
        &self,
        case: &mut Case<'_>,
        sides: &Sides,
        stream: &Stream,
        run: impl FnOnce(&mut dyn FnMut() -> Result<()>) -> Result<T>,
    ) -> Result<T> {
        (case.before)()?;
        (self.machinery.run)(false);
        let done = run(&mut *case.call);
        self.drain(sides, stream)?;
        done
    }

    fn by_driver(&self, raw: &Raw<'_>, calls: &mut [Call], samples: &mut Samples) -> Result<()> {
        (self.machinery.run)(false);
        let done = timed(samples, || calls.iter_mut().try_for_each(|call| raw.make(call)));
        (self.machinery.run)(true);
        let start = Instant::now();
        while !raw.is_idle()? {
            if start.elapsed() > self.timeout {
                return Err("the GPU does not run what was queued".into());
            }
        }
        done
    }

    fn drain(&self, sides: &Sides, stream: &Stream) -> Result<()> {
        (self.machinery.run)(true);
        stream.synchronize(self.timeout)?;
        sides.drain(self.timeout)
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
