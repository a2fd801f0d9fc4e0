//! `gdasync bench recorder`: what the flight recorder costs.

use gdasync::out;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use gdasync::gdsync::hca::SoftHcaConfig;
use gdasync::gdsync::memory::Memory;
use gdasync::gdsync::recorder::Marks;
use gdasync::gdsync::stream::{HostStreamConfig, Stream};
use gdasync::gdsync::verbs::{Access, Context, Mr, Qp, RecvWr, SendWr};
use gdasync::measure::{Machine, Samples, create_json, write_json};
use serde::Serialize;

use super::Result;
use super::rows::{Row, table};

/// Options of `gdasync bench recorder`.
#[derive(Args)]
pub(crate) struct Options {
    /// Messages of each test.
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(100..=10_000_000))]
    rounds: u64,
    /// Writes the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Serialize)]
struct Report {
    machine: Machine,
    results: Vec<Row>,
}

/// Every test runs in so many slices, by turns with its baseline.
const SLICES: u64 = 50;
/// Stamps between two looks at the clock.
const STAMPS: u32 = 1000;
/// How long a message may take.
const PATIENCE: Duration = Duration::from_secs(60);

impl Options {
    pub(crate) fn run(&self) -> Result<()> {
        let file = create_json(self.json.as_deref())?;
        let marks = Marks::open()?;
        if !marks.is_recording() {
            return Err("nothing is recorded: unset GDSYNC_RECORDER, and make room in /dev/shm".into());
        }
        let bed = Bed::new()?;
        let slice = self.rounds / SLICES + 1;
        let [mut now, mut stamp]: [Samples; 2] = Default::default();
        let [mut cpu, mut cpu_off, mut streamed, mut streamed_off]: [Samples; 4] = Default::default();
        for _ in 0..SLICES {
            now.add(time(|n| _ = std::hint::black_box((Instant::now(), n))));
            stamp.add(time(|n| marks.mark(n.into(), n)));
            for (off, [by_cpu, by_stream]) in
                [(true, [&mut cpu_off, &mut streamed_off]), (false, [&mut cpu, &mut streamed])]
            {
                marks.pause(off);
                bed.by_cpu(slice, by_cpu)?;
                bed.by_stream(slice, by_stream)?;
            }
        }
        let mut results = Vec::new();
        let mut pair = |[base, name]: [&'static str; 2], [was, is]: [&Samples; 2], parts| {
            let (was, is) = (was.micros(parts), is.micros(parts));
            results.push(Row { name: base, us: was, baseline: base, ratio: 1.0 });
            results.push(Row { name, us: is, baseline: base, ratio: is.p50 / was.p50 });
        };
        pair(["Instant::now", "a stamp"], [&now, &stamp], STAMPS);
        pair(
            ["posted and polled by the CPU, paused", "posted and polled by the CPU, recorded"],
            [&cpu_off, &cpu],
            1,
        );
        pair(
            ["sent and awaited by a stream, paused", "sent and awaited by a stream, recorded"],
            [&streamed_off, &streamed],
            1,
        );
        let report = Report { machine: Machine::here(), results };
        report.print()?;
        write_json(file, &report)?;
        Ok(())
    }
}

/// The time of so many stamps.
fn time(mut stamp: impl FnMut(u32)) -> Duration {
    let start = Instant::now();
    (0..STAMPS).for_each(&mut stamp);
    start.elapsed()
}

/// Two queue pairs of one device and a stream.
struct Bed {
    a: Qp,
    b: Qp,
    mr: Mr,
    stream: Stream,
    _context: Context,
}

impl Bed {
    fn new() -> Result<Self> {
        let context = Context::soft(&SoftHcaConfig::default())?;
        let pd = context.alloc_pd()?;
        let (a, b) = (pd.build_qp().build()?, pd.build_qp().build()?);
        a.connect(b.address())?;
        b.connect(a.address())?;
        let mr = pd.register(&Memory::alloc(64)?, Access::all())?;
        let config = HostStreamConfig { wait_limit: PATIENCE, ..HostStreamConfig::default() };
        Ok(Self { a, b, mr, stream: Stream::host(config)?, _context: context })
    }

    /// Messages of 8 bytes, all by this thread.
    fn by_cpu(&self, rounds: u64, samples: &mut Samples) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let arrived = |poll: &dyn Fn() -> Option<gdasync::gdsync::verbs::Wc>| -> Result<()> {
            loop {
                if let Some(wc) = poll() {
                    wc.ok()?;
                    return Ok(());
                }
                if Instant::now() > deadline {
                    return Err("a message did not arrive".into());
                }
            }
        };
        for n in 0..rounds {
            let start = Instant::now();
            self.b.post_recv(&[RecvWr { wr_id: n, sges: &[self.mr.sge(8, 8)?] }])?;
            self.a.post_send(&[SendWr::send_inline(&n.to_le_bytes())])?;
            arrived(&|| self.b.poll_recv())?;
            arrived(&|| self.a.poll_send())?;
            samples.add(start.elapsed());
        }
        Ok(())
    }

    /// Messages of 8 bytes that a stream sends and awaits.
    fn by_stream(&self, rounds: u64, samples: &mut Samples) -> Result<()> {
        for n in 0..rounds {
            let start = Instant::now();
            self.b.post_recv(&[RecvWr { wr_id: n, sges: &[self.mr.sge(8, 8)?] }])?;
            self.stream.send(&self.a, &SendWr::send_inline(&n.to_le_bytes()))?;
            self.stream.wait_recv(&self.b)?;
            self.stream.wait_send(&self.a)?;
            self.stream.synchronize(PATIENCE)?;
            samples.add(start.elapsed());
        }
        Ok(())
    }
}

impl Report {
    fn print(&self) -> io::Result<()> {
        out!("flight recorder, {} x {}", self.machine.cpus, self.machine.cpu)?;
        out!("{}", table("", &self.results, 4))
    }
}
