//! `gdasync bench scale`: what more queue pairs and more ranks cost.

mod circle;
mod job;

use std::time::Instant;

use clap::Args;
use gdasync::gdsync::Device;
use gdasync::measure::Samples;
use gdasync::measure::series::{Point, Series, Unit};
use gdasync::mp::Communicator;
use serde_json::json;

use super::Result;
use super::fleet::{Fleet, Shape};
use super::floor::Floor;
use super::sheet::{Checks, Output, Sheet};
use circle::Circle;
use job::{Job, Part};

/// Options of `gdasync bench scale`.
#[derive(Args)]
#[command(after_long_help = "\
What the numbers mean: two ranks with so many queue pairs, all in use by turns: half a round trip of 8 bytes, and messages per \
second with 64 under way over all queue pairs, but one at least over each; posted and polled by the CPU. Then so many ranks, processes \
of this host in a circle: the time in which a token of 8 bytes gets from one to the next, and messages per second when all send \
to the next at once, of all ranks together. The ratios are to the first point: 1 queue pair, 2 ranks. `cache line` is that of the \
same moment, without messages. More ranks than cores take turns on them: then the figures are those of the scheduler too.")]
pub(crate) struct Options {
    /// Queue pairs, 1 to 1024 each.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 16, 64, 256, 1024],
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    qps: Vec<u16>,
    /// Ranks, 2 to 64 each.
    #[arg(long, value_delimiter = ',', default_values_t = [2, 4, 8, 16, 32, 64],
          value_parser = clap::value_parser!(u16).range(2..=64))]
    ranks: Vec<u16>,
    /// Round trips of a slice, and messages of each rank; at least one for each queue pair.
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(2..=10_000_000))]
    messages: u32,
    /// Slices of each figure.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    slices: u32,
    #[command(flatten)]
    checks: Checks,
    #[command(flatten)]
    output: Output,
    /// What this process plays for another one.
    #[arg(long, hide = true)]
    part: Option<Part>,
}

const BYTES: usize = 8;
/// Messages under way over all queue pairs, but one at least over each.
const UNDER_WAY: usize = 64;

impl Options {
    pub(crate) fn run(&self) -> Result<()> {
        let timeout = self.checks.timeout();
        let mut sheet = Sheet::new(&self.output, self.part.is_none(), self.qps.len() + self.ranks.len())?;
        if let Some(part) = self.part {
            let comm = Job::join(timeout)?;
            match part {
                Part::Qps => self.queue_pairs(&comm, &mut sheet)?,
                Part::Ranks => drop(self.circle(&comm, &mut sheet)?),
            }
            sheet.tell(&comm, timeout)?;
            return Ok(comm.finalize(timeout)?);
        }
        let job = Job::start(2, Part::Qps, timeout)?;
        self.queue_pairs(&job.comm, &mut sheet)?;
        sheet.tell(&job.comm, timeout)?;
        let context = job.comm.context().clone();
        job.end(timeout)?;
        self.all_ranks(&mut sheet)?;
        let options = json!({
            "qps": self.qps,
            "ranks": self.ranks,
            "bytes": BYTES,
            "messages": self.messages,
            "slices": self.slices,
        });
        sheet.write("scale", &context, options)
    }

    /// Both ranks of a job: all numbers of queue pairs, each on an HCA of its own, by turns.
    fn queue_pairs(&self, comm: &Communicator, sheet: &mut Sheet) -> Result<()> {
        let (checks, timeout) = (&self.checks, self.checks.timeout());
        let mut fleets = Vec::new();
        for &qps in &self.qps {
            if !fleets.is_empty() && !sheet.goes_on(comm, timeout)? {
                sheet.out_of_time(format!("{qps} queue pairs"));
                continue;
            }
            sheet.step(format!("{qps} queue pairs"));
            let qps = usize::from(qps);
            let shape = Shape { qps, outstanding: (UNDER_WAY / qps).max(1), bytes: BYTES };
            let fleet = Fleet::new(comm, &Device::find(None)?.open()?, checks, shape, None)?;
            fleets.push((qps as u64, fleet, Samples::default(), Samples::default(), Samples::default()));
        }
        let (floor, messages) = (Floor::new(comm, timeout)?, usize::try_from(self.messages)?);
        // The first turn warms up.
        for turn in 0..=self.slices {
            if turn > 1 && !sheet.goes_on(comm, timeout)? {
                sheet.out_of_time(format!("slices of queue pairs from {turn} on"));
                break;
            }
            for (_, fleet, line, latency, rate) in &mut fleets {
                let messages = messages.max(fleet.len());
                let bounced = floor.bounce(messages as u64)?;
                let (trips, wrong) = fleet.ping(messages)?;
                let (time, also_wrong) = fleet.flood(messages, None)?;
                sheet.wrong(wrong + also_wrong);
                if turn > 0 {
                    line.append(&bounced);
                    latency.append(&trips);
                    rate.add(time);
                }
            }
        }
        let curve = |name: &str, unit| Series::new(format!("{name}, by queue pairs"), "queue pairs", unit);
        let mut lines = curve("cache line", Unit::Micros);
        let mut latencies = curve("latency", Unit::Micros);
        let mut rates = curve("rate", Unit::PerSecond);
        for (qps, _, line, latency, rate) in &fleets {
            lines.points.push(Point::time(*qps, line, 2));
            latencies.points.push(Point::time(*qps, latency, 2));
            rates.points.push(Point::rate(*qps, rate, 1e6));
        }
        latencies.compare_with_first();
        rates.compare_with_first();
        sheet.add([lines, latencies, rates]);
        Ok(())
    }

    /// All numbers of ranks, each a job of its own.
    fn all_ranks(&self, sheet: &mut Sheet) -> Result<()> {
        let timeout = self.checks.timeout();
        let curve = |name: &str, unit| Series::new(format!("{name}, by ranks"), "ranks", unit);
        let (mut hops, mut rates) = (curve("latency", Unit::Micros), curve("rate", Unit::PerSecond));
        let mut last = None;
        for &ranks in &self.ranks {
            // A job of twice the ranks takes at least twice as long.
            if sheet.is_over() || last.is_some_and(|took| sheet.has_less_than(2 * took)) {
                sheet.out_of_time(format!("{ranks} ranks"));
                continue;
            }
            sheet.step(format!("{ranks} ranks"));
            let start = Instant::now();
            let job = Job::start(ranks.into(), Part::Ranks, timeout)?;
            let (laps, times) = self.circle(&job.comm, sheet)?;
            sheet.tell(&job.comm, timeout)?;
            job.end(timeout)?;
            hops.points.push(Point::time(ranks.into(), &laps, ranks.into()));
            let amount = f64::from(ranks) * f64::from(self.messages) * 1e6;
            rates.points.push(Point::rate(ranks.into(), &times, amount));
            last = Some(start.elapsed());
        }
        hops.compare_with_first();
        rates.compare_with_first();
        sheet.add([hops, rates]);
        Ok(())
    }

    /// A rank of a job: laps of the token, and the times in which all have sent their messages.
    fn circle(&self, comm: &Communicator, sheet: &mut Sheet) -> Result<(Samples, Samples)> {
        let mut circle = Circle::new(comm, &self.checks)?;
        let (mut laps, mut times) = (Samples::default(), Samples::default());
        for turn in 0..=self.slices {
            let (lap, time) = (circle.token(sheet)?, circle.flood(self.messages, sheet)?);
            if turn > 0 {
                laps.append(&lap);
                times.add(time);
            }
            if turn > 0 && !sheet.goes_on(comm, self.checks.timeout())? {
                break;
            }
        }
        Ok((laps, times))
    }
}
