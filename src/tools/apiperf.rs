//! `apiperf`: time of pinning, mapping, unmapping and unpinning.

use std::time::{Duration, Instant};

use clap::Args;
use gdrcopy::GpuBuffer;
use serde::Serialize;

use super::Program;
use super::tools_shared::Result;
use super::histogram::{Bin, histogram};
use super::tools_shared::{Common, Memory, bytes, usage};
use super::tools_shared::{Output, say};
use super::tools_shared::Report;
use super::tools_shared::Target;
use crate::measure::{Machine, Micros, Samples};

/// Time of pin, map, get_info, unmap and unpin, for sizes of 64 KiB, 128 KiB and so on.
#[derive(Args, Debug, Serialize)]
#[command(args_override_self = true)]
pub struct Apiperf {
    #[command(flatten)]
    #[serde(skip)]
    common: Common,
    #[command(flatten)]
    #[serde(flatten)]
    memory: Memory,
    /// The largest size.
    #[arg(short = 's', long, value_name = "BYTES", value_parser = bytes, default_value = "16M")]
    size: usize,
    /// Calls timed, for each size.
    #[arg(short = 'n', long, value_name = "COUNT", default_value_t = 100,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    iterations: u32,
    /// Calls before those.
    #[arg(short = 'w', long, value_name = "COUNT", default_value_t = 10)]
    warm_up: u32,
}

/// The smallest size, a GPU page.
const PAGE: usize = 64 << 10;
const BINS: usize = 10;

#[derive(Serialize)]
struct Row {
    bytes: usize,
    pin: Cost,
    map: Cost,
    get_info: Cost,
    unmap: Cost,
    unpin: Cost,
    pin_histogram: Vec<Bin>,
}

/// Times in microseconds.
#[derive(Clone, Copy, Serialize)]
struct Cost {
    #[serde(flatten)]
    us: Micros,
    mean: f64,
}

/// The steps of a cycle, in order.
const STEPS: [&str; 5] = ["pin", "map", "get_info", "unmap", "unpin"];

impl Program for Apiperf {
    const NAME: &'static str = "gdrcopy_apiperf";

    fn run(&self) -> Result<()> {
        usage(self.size >= PAGE, || format!("-s {}: the smallest size is {PAGE}, a GPU page", self.size))?;
        let sizes: Vec<_> =
            (0..usize::BITS).map(|shift| PAGE << shift).take_while(|&b| b <= self.size).collect();
        let mut output = Output::open(self.common.json.as_deref())?;
        let target = Target::open(&self.common, &output)?;
        let buffer = target.allocate(self.size, self.memory, &output)?;
        output.steps(sizes.len());
        let mut results = Vec::new();
        for bytes in sizes {
            output.step(format!("{bytes} bytes"));
            let row = self.measure(&target, &buffer, bytes)?;
            row.print(&output)?;
            results.push(row);
            output.stepped();
        }
        let (machine, setup) = (Machine::here(), &target.setup);
        output.finish(&Report { tool: Self::NAME, machine, setup, parameters: self, results })
    }
}

impl Apiperf {
    fn measure(&self, target: &Target, buffer: &GpuBuffer, bytes: usize) -> Result<Row> {
        for _ in 0..self.warm_up {
            self.cycle(target, buffer, bytes)?;
        }
        let cycles =
            (0..self.iterations).map(|_| self.cycle(target, buffer, bytes)).collect::<Result<Vec<_>>>()?;
        let [pin, map, get_info, unmap, unpin] = std::array::from_fn(|step| Cost::of(&cycles, step));
        let pins: Vec<_> = cycles.iter().map(|cycle| cycle[0]).collect();
        Ok(Row { bytes, pin, map, get_info, unmap, unpin, pin_histogram: histogram(&pins, BINS) })
    }

    /// The times of the steps.
    fn cycle(&self, target: &Target, buffer: &GpuBuffer, bytes: usize) -> Result<[Duration; STEPS.len()]> {
        let clock = Instant::now;
        let start = clock();
        let pin = target.gdr.pin(buffer.addr(), bytes)?;
        let pinned = clock();
        let mapping = pin.map_as(self.memory.mapping.request())?;
        let mapped = clock();
        std::hint::black_box(pin.info());
        let told = clock();
        mapping.unmap()?;
        let unmapped = clock();
        pin.unpin()?;
        let unpinned = clock();
        Ok([pinned - start, mapped - pinned, told - mapped, unmapped - told, unpinned - unmapped])
    }
}

impl Cost {
    fn of(cycles: &[[Duration; STEPS.len()]], step: usize) -> Self {
        let mut samples = Samples::default();
        cycles.iter().for_each(|cycle| samples.add(cycle[step]));
        let sum: Duration = cycles.iter().map(|cycle| cycle[step]).sum();
        Self { us: samples.micros(1), mean: sum.as_secs_f64() * 1e6 / cycles.len() as f64 }
    }
}

impl Row {
    fn print(&self, output: &Output) -> Result<()> {
        let costs = [self.pin, self.map, self.get_info, self.unmap, self.unpin];
        let line = |name: &str, value: fn(&Cost) -> f64| {
            let values = costs.iter().map(|cost| format!("\t{:.6}", value(cost)));
            say!(output, "{name}{}", values.collect::<String>())
        };
        say!(output, "Size(B){}", STEPS.map(|step| format!("\t{step}.Time(us)")).concat())?;
        line(&self.bytes.to_string(), |cost| cost.mean)?;
        line("min", |cost| cost.us.min)?;
        line("median", |cost| cost.us.p50)?;
        line("p99", |cost| cost.us.p99)?;
        say!(output, "Histogram of gdr_pin_buffer latency for {} bytes", self.bytes)?;
        for Bin { from_us, to_us, count } in &self.pin_histogram {
            say!(output, "[{from_us:.6}\t-\t{to_us:.6}]\t{count}")?;
        }
        say!(output, "")
    }
}
