//! `gdasync bench hca`: what the software HCA costs on top of the machine.

use gdasync::out;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use clap::Args;
use gdasync::gdsync::Device;
use gdasync::gdsync::memory::Memory;
use gdasync::gdsync::stream::{Cond, HostStreamConfig, Stream};
use gdasync::gdsync::verbs::{Context, QpAddress};
use gdasync::measure::{Machine, Micros, Samples, create_json, process_cpu, write_json};
use gdasync::mp::Communicator;
use indicatif::ProgressBar;
use serde::Serialize;

use super::floor::{Floor, bounce};
use super::link::Link;
use super::rows::{Row, table};
use super::{Result, two_ranks};

/// Options of `gdasync bench hca`.
#[derive(Args)]
pub(crate) struct Options {
    /// Round trips of each latency test.
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(100..=10_000_000))]
    rounds: u64,
    /// Seconds after which a wait is given up, 1 to 86400.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// Writes the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Serialize)]
struct Report {
    device: String,
    wire: String,
    machine: Machine,
    /// Half round trips, or for rates the times of one message.
    results: Vec<Row>,
}

/// Every test runs in so many slices, by turns with the others: what the cores of a virtual machine cost each other changes
/// from one second to the next, and a ratio must not compare two such moments.
const SLICES: u64 = 20;
const FLOOR_THREADS: &str = "floor: two threads, one cache line";
const FLOOR_PROCESSES: &str = "floor: two processes, one cache line";

struct Run<'a> {
    comm: &'a Communicator,
    options: &'a Options,
    timeout: Duration,
    bar: ProgressBar,
    rows: Vec<Row>,
}

impl Options {
    pub(crate) fn run(&self) -> Result<()> {
        let timeout = Duration::from_secs(self.timeout);
        let comm = two_ranks(timeout)?;
        let first = comm.rank() == 0;
        let file = create_json(self.json.as_deref().filter(|_| first))?;
        let bar = if first { ProgressBar::new(11) } else { ProgressBar::hidden() };
        let mut run = Run { comm: &comm, options: self, timeout, bar, rows: Vec::new() };
        if first {
            run.in_process()?;
        }
        comm.barrier(timeout * 4)?;
        run.two_processes()?;
        comm.barrier(timeout)?;
        let mut written = Ok(());
        if first {
            let idle = run.idle()?;
            run.bar.finish_and_clear();
            let context = comm.context();
            let (device, wire) = (context.description().to_owned(), context.wire().to_owned());
            let report = Report { device, wire, machine: Machine::here(), results: run.rows };
            written = report.print(idle).and_then(|()| write_json(file, &report));
        }
        comm.finalize(timeout)?;
        Ok(written?)
    }
}

impl Run<'_> {
    fn row(&mut self, name: &'static str, us: Micros, baseline: &'static str) {
        let base = self.rows.iter().find(|row| row.name == baseline).map_or(us.p50, |row| row.us.p50);
        self.rows.push(Row { name, us, baseline, ratio: us.p50 / base });
        self.bar.inc(1);
    }

    fn link(&self, context: &Context) -> Result<Link> {
        Link::new(context, self.timeout)
    }

    /// Two connected links on one HCA.
    fn pair(&self, context: &Context) -> Result<(Link, Link)> {
        let (a, b) = (self.link(context)?, self.link(context)?);
        a.qp.connect(b.qp.address())?;
        b.qp.connect(a.qp.address())?;
        Ok((a, b))
    }

    /// Plays both sides of a game on two threads; the times of the first count.
    fn both(play: impl Fn(bool) -> Result<Samples> + Sync) -> Result<Samples> {
        std::thread::scope(|scope| {
            let other = scope.spawn(|| play(false).map_err(|e| e.to_string()));
            let samples = play(true);
            other.join().map_err(|_| "the other thread panicked")??;
            samples
        })
    }

    fn in_process(&mut self) -> Result<()> {
        let (slice, timeout) = (self.options.rounds / SLICES, self.timeout);
        let line = Memory::alloc(64)?;
        let one = "one process: posted by the CPU";
        let names = [
            (FLOOR_THREADS, FLOOR_THREADS),
            (one, FLOOR_THREADS),
            ("the same with 64 connected QPs, one active", one),
            ("the same with 1024 connected QPs, one active", one),
            ("one process: triggered by streams", FLOOR_THREADS),
        ];
        // Each on an HCA of its own, so that only its own queue pairs are there.
        let mut connected = Vec::new();
        for qps in [1, 64, 1024] {
            let context = Device::find(None)?.open()?;
            let pairs = (0..qps).map(|_| self.pair(&context)).collect::<Result<Vec<_>>>()?;
            pairs[0].0.prepare(64)?;
            pairs[0].1.prepare(64)?;
            connected.push(pairs);
        }
        let (a, b) = self.pair(self.comm.context())?;
        let streams = [self.stream("ping")?, self.stream("pong")?];
        let mut samples: [Samples; 5] = Default::default();
        for _ in 0..SLICES {
            samples[0].append(&Self::both(|serves| bounce(line.atomic64(0)?, serves, slice, timeout))?);
            for (pairs, samples) in connected.iter().zip(&mut samples[1..]) {
                let (a, b) = &pairs[0];
                samples.append(&Self::both(|serves| if serves { a } else { b }.cpu(serves, slice))?);
            }
            a.prepare(Link::stream_receives(slice))?;
            b.prepare(Link::stream_receives(slice))?;
            samples[4].append(&Self::both(|serves| {
                if serves { a.stream(&streams[0], true, slice) } else { b.stream(&streams[1], false, slice) }
            })?);
            line.atomic64(0)?.store(0, Ordering::Release);
        }
        for ((name, baseline), samples) in names.into_iter().zip(&samples) {
            self.row(name, samples.micros(2), baseline);
        }
        Ok(())
    }

    fn stream(&self, name: &str) -> Result<Stream> {
        let config =
            HostStreamConfig { name: name.into(), wait_limit: self.timeout, ..HostStreamConfig::default() };
        Ok(Stream::host(config)?)
    }

    /// A link to the other process.
    fn across(&self) -> Result<Link> {
        let link = self.link(self.comm.context())?;
        let addresses = self.comm.exchange(&link.qp.address().to_bytes(), self.timeout)?;
        let theirs = addresses[1 - self.comm.rank()].first_chunk().ok_or("a short address")?;
        link.qp.connect(QpAddress::from_bytes(theirs)?)?;
        Ok(link)
    }

    fn two_processes(&mut self) -> Result<()> {
        let (rounds, timeout, serves) = (self.options.rounds, self.timeout, self.comm.rank() == 0);
        let floor = Floor::new(self.comm, timeout)?;
        let (cpu, rate, streamed) = (self.across()?, self.across()?, self.across()?);
        let stream = self.stream("ping")?;
        cpu.prepare(64)?;
        rate.prepare(64)?;
        let slice = rounds / SLICES;
        let mut samples: [Samples; 4] = Default::default();
        for _ in 0..SLICES {
            samples[0].append(&floor.bounce(slice)?);
            samples[1].append(&cpu.cpu(serves, slice)?);
            samples[2].add(2 * rate.rate(serves, slice)?);
            streamed.prepare(Link::stream_receives(slice))?;
            self.comm.barrier(timeout)?;
            samples[3].append(&streamed.stream(&stream, serves, slice)?);
        }
        let names = [
            FLOOR_PROCESSES,
            "two processes: posted by the CPU",
            "two processes: one message of many",
            "two processes: triggered by streams",
        ];
        for (name, samples) in names.into_iter().zip(&samples) {
            self.row(name, samples.micros(2), FLOOR_PROCESSES);
        }
        Ok(())
    }

    /// CPU time of this process while eight streams wait for a second, in percent of a core.
    fn idle(&mut self) -> Result<f64> {
        let context = self.comm.context().clone();
        let waiting: Vec<_> = (0..8).map(|_| self.pair(&context)).collect::<Result<_>>()?;
        let word = Memory::alloc(4)?.word32(0)?;
        let streams = waiting
            .iter()
            .enumerate()
            .map(|(i, (a, _))| {
                let stream = self.stream(&format!("idle{i}"))?;
                a.prepare(1)?;
                // Half of them wait for a message, half for a word that nobody announces.
                if i % 2 == 0 {
                    stream.wait_recv(&a.qp)?;
                } else {
                    stream.wait_value32(&word, 1, Cond::Eq)?
                }
                Ok(stream)
            })
            .collect::<Result<Vec<_>>>()?;
        std::thread::sleep(Duration::from_millis(100));
        let (cpu, start) = (process_cpu(), Instant::now());
        std::thread::sleep(Duration::from_secs(1));
        let percent = (process_cpu() - cpu).as_secs_f64() / start.elapsed().as_secs_f64() * 100.0;
        streams.iter().for_each(Stream::abort);
        self.bar.inc(1);
        Ok(percent)
    }
}

impl Report {
    fn print(&self, idle: f64) -> io::Result<()> {
        out!("{} over {}, {} x {}", self.device, self.wire, self.machine.cpus, self.machine.cpu)?;
        out!("{}", table("8 bytes, half round trip", &self.results, 3))?;
        out!("CPU of 8 streams that wait: {idle:.2} % of a core")
    }
}
