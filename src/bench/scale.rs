//! `gdasync bench scale`: latency and rate with many queue pairs and with many ranks.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use clap::Args;
use gdasync::gdsync::Device;
use gdasync::measure::Samples;
use gdasync::mp::launch::Launch;
use gdasync::mp::{self, Communicator, Request};
use gdasync::pingpong::{CACHE_LINE, Floor};
use gdasync::results::{Checks, Output, Point, Result, Sheet, Unit, all_ranks};
use serde_json::json;

use super::traffic::{Endpoint, QueuePairs, Shape};

#[derive(Args)]
#[command(after_long_help = "\
What the numbers mean: two ranks use queue pairs round-robin: half a round trip of 8 bytes, and messages per second with 64 in \
flight over all queue pairs, at least one on each; posted and polled by the CPU. Then ranks of this host form a ring: the time in \
which a token of 8 bytes gets to the next rank, and messages per second of all ranks together when each sends to the next. The \
ratios are to the first point: 1 queue pair, 2 ranks. `cache line` is the floor, measured at the same time. With more ranks than \
cores the figures include the scheduler.")]
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
}

const BYTES: usize = 8;
/// Messages in flight over all queue pairs, at least one on each.
const UNDER_WAY: usize = 64;

impl Options {
    pub(crate) fn run(&self) -> Result<()> {
        let timeout = self.checks.timeout();
        if Launch::detect()?.is_some_and(|launch| launch.size > 1 && launch.rank == 0) {
            return Err(
                "start this benchmark without a launcher: it starts jobs of several sizes itself".into()
            );
        }
        // Receives are posted far ahead into two slots: messages are counted.
        let builder = Communicator::builder().allow_overlap(true).bind(false).timeout(timeout);
        // The ranks that a job starts come here as well, and end with it.
        let job = |ranks: u16| builder.clone().spawn(ranks.into()).init();
        let comm = job(2)?;
        let (is_first, size) = (comm.rank() == 0, comm.size());
        let mut sheet = Sheet::new(&self.output, is_first, self.qps.len() + self.ranks.len())?;
        if size == 2 {
            self.queue_pairs(&comm, &mut sheet)?;
        }
        if self.ranks.iter().any(|ranks| usize::from(*ranks) == size) {
            self.ring(&comm, &mut sheet)?;
        }
        sheet.gather_wrong(&comm)?;
        let context = comm.context().clone();
        comm.finalize(None)?;
        if !is_first {
            return Ok(());
        }
        let mut last = Duration::ZERO;
        for &ranks in self.ranks.iter().filter(|ranks| **ranks != 2) {
            // Twice the ranks take at least twice as long.
            if sheet.has_less_than(2 * last) {
                sheet.out_of_time(format!("{ranks} ranks"));
                continue;
            }
            let (start, comm) = (Instant::now(), job(ranks)?);
            self.ring(&comm, &mut sheet)?;
            sheet.gather_wrong(&comm)?;
            comm.finalize(None)?;
            last = start.elapsed();
        }
        for figure in ["latency", "message rate"] {
            sheet.compare_with_first(&format!("{figure} by queue pairs"));
            sheet.compare_with_first(&format!("{figure} by ranks"));
        }
        let options = json!({
            "qps": self.qps, "ranks": self.ranks, "bytes": BYTES,
            "messages": self.messages, "slices": self.slices,
        });
        sheet.write("scale", &context, options)
    }

    /// Both ranks of a job: all numbers of queue pairs in turn, each on its own HCA.
    fn queue_pairs(&self, comm: &Communicator, sheet: &mut Sheet) -> Result<()> {
        let mut all = Vec::new();
        for &qps in &self.qps {
            if !sheet.may_start(comm, format!("{qps} queue pairs"))? {
                continue;
            }
            let qps = usize::from(qps);
            let shape = Shape { qps, outstanding: (UNDER_WAY / qps).max(1), bytes: BYTES };
            let queue_pairs = QueuePairs::new(comm, &Device::find(None)?.open()?, &self.checks, shape, None)?;
            all.push((qps as u64, queue_pairs, Samples::default(), Samples::default(), Samples::default()));
        }
        let (floor, messages) = (Floor::new(comm)?, usize::try_from(self.messages)?);
        // The first turn warms up.
        for turn in 0..=self.slices {
            if turn > 1 && !sheet.may_start(comm, format!("slice {turn} of queue pairs"))? {
                break;
            }
            for (_, queue_pairs, line, latency, rate) in &mut all {
                let messages = messages.max(queue_pairs.len());
                let bounced = floor.bounce(messages as u64)?;
                let (trips, wrong) = queue_pairs.ping(messages)?;
                let (time, also_wrong) = queue_pairs.flood(messages, None)?;
                sheet.wrong(wrong + also_wrong);
                if turn > 0 {
                    line.append(&bounced);
                    latency.append(&trips);
                    rate.add(time);
                }
            }
        }
        for &(qps, _, ref line, ref latency, ref rate) in &all {
            let (x, group) = ("queue pairs", "latency by queue pairs");
            sheet.add_point(group, CACHE_LINE, x, Unit::Micros, Point::time(qps, line, 2));
            sheet.add_point(group, "cpu", x, Unit::Micros, Point::time(qps, latency, 2));
            let rate = Point::rate(qps, rate, 1e6);
            sheet.add_point("message rate by queue pairs", "cpu", x, Unit::PerSecond, rate);
        }
        Ok(())
    }

    /// A rank of a job: laps of a token, and floods.
    fn ring(&self, comm: &Communicator, sheet: &mut Sheet) -> Result<()> {
        let (ring, ranks) = (Ring::new(comm, &self.checks)?, comm.size());
        let (mut laps, mut times) = (Samples::default(), Samples::default());
        sheet.step(format!("{ranks} ranks"));
        for turn in 0..=self.slices {
            let (lap, time) = (ring.token(sheet)?, ring.flood(self.messages, sheet)?);
            if turn > 0 {
                laps.append(&lap);
                times.add(time);
            }
            if turn > 0 && !sheet.may_start(comm, format!("slice {turn} of {ranks} ranks"))? {
                break;
            }
        }
        let (at, parts) = (ranks as u64, u32::try_from(ranks)?);
        let amount = f64::from(parts) * f64::from(self.messages) * 1e6;
        sheet.add_point("latency by ranks", "cpu", "ranks", Unit::Micros, Point::time(at, &laps, parts));
        sheet.add_point(
            "message rate by ranks",
            "cpu",
            "ranks",
            Unit::PerSecond,
            Point::rate(at, &times, amount),
        );
        Ok(())
    }
}

/// Laps of the token between two checks.
const LAPS: u32 = 10;
/// Messages in flight to and from a neighbour.
const IN_FLIGHT: u32 = 16;

/// One rank of a ring, in which each sends to the next.
struct Ring<'a>(Endpoint<'a>);

impl<'a> Ring<'a> {
    fn new(comm: &'a Communicator, checks: &'a Checks) -> Result<Self> {
        let (rank, size) = (comm.rank(), comm.size());
        let neighbours = ((rank + 1) % size, (rank + size - 1) % size);
        Ok(Self(Endpoint::new(comm, checks, BYTES, neighbours)?))
    }

    fn wait(&self, request: &Request) -> mp::Result<()> {
        self.0.comm.wait(request, None).map(drop)
    }

    /// Prepares the next run, and posts receives.
    fn prepare(&self, receives: u32) -> Result<VecDeque<Request>> {
        self.0.prepare(2)?;
        let receives = (0..receives).map(|n| self.0.receive(n.into())).collect::<mp::Result<_>>()?;
        self.0.comm.barrier(None)?;
        Ok(receives)
    }

    /// A token goes round: the laps at rank 0.
    fn token(&self, sheet: &mut Sheet) -> Result<Samples> {
        let receives = self.prepare(LAPS)?;
        let mut samples = Samples::default();
        for receive in &receives {
            let start = Instant::now();
            if self.0.comm.rank() == 0 {
                let sent = self.0.send()?;
                self.wait(receive)?;
                samples.add(start.elapsed());
                self.wait(&sent)?;
            } else {
                self.wait(receive)?;
                let sent = self.0.send()?;
                self.wait(&sent)?;
            }
        }
        sheet.wrong(self.0.wrong(LAPS.into())?);
        Ok(samples)
    }

    /// All ranks send `messages` messages at once: the time of the slowest.
    fn flood(&self, messages: u32, sheet: &mut Sheet) -> Result<Duration> {
        let mut receives = self.prepare(messages.min(IN_FLIGHT))?;
        let mut sends = VecDeque::new();
        let start = Instant::now();
        for n in 0..messages {
            sends.push_back(self.0.send()?);
            if n >= IN_FLIGHT {
                sends.pop_front().map(|oldest| self.wait(&oldest)).transpose()?;
            }
            receives.pop_front().map(|oldest| self.wait(&oldest)).transpose()?;
            if n + IN_FLIGHT < messages {
                receives.push_back(self.0.receive((n + IN_FLIGHT).into())?);
            }
        }
        self.0.comm.wait_all(&sends, None)?;
        let own = u64::try_from(start.elapsed().as_nanos())?;
        sheet.wrong(self.0.wrong(messages.into())?);
        let slowest = all_ranks(self.0.comm, own)?.into_iter().max();
        Ok(Duration::from_nanos(slowest.unwrap_or(own)))
    }
}
