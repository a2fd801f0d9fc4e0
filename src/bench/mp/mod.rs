//! `gdasync bench mp`: what messages between two processes cost, after LibMP's `mp_pingpong_all`.

mod calls;
mod game;
mod report;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use gdasync::gdsync::stream::{HostStreamConfig, Stream};
use gdasync::measure::{Machine, Samples, create_json, size, write_json};
use gdasync::mp::Communicator;
use gdasync::mp::tagged::Tagged;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::{Result, two_ranks};
use game::Game;
use report::{Line, Report};

/// Options of `gdasync bench mp`.
#[derive(Args)]
pub(crate) struct Options {
    /// Message sizes in bytes, 1 to 1073741824 each.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1 << 30),
          default_values_t = [8, 64, 512, 4096, 32768, 262_144, 1 << 20, 4 << 20, 16 << 20])]
    sizes: Vec<u32>,
    /// Columns.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Mode::ALL)]
    modes: Vec<Mode>,
    /// Iterations of each size [default: 20000, fewer for large messages].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    iters: Option<u32>,
    /// Microseconds of work before each send in the modes that have some: a host function that keeps the stream busy.
    #[arg(long, value_name = "US", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    work_us: u32,
    /// Rounds that measure what single calls cost on top of gdsync, of 64 calls each; 0 leaves them out.
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    calls: u32,
    /// Seconds after which a wait is given up, 1 to 86400.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// Writes the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// How messages are driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Mode {
    /// Ping-pong: the CPU sends and waits.
    Sync,
    /// The same, and before each send the CPU waits for work on a stream.
    SyncWork,
    /// Ping-pong: a stream sends and waits, many iterations are posted ahead.
    Async,
    /// The same, with the work on the stream before each send.
    AsyncWork,
    /// Ping-pong by the CPU, each message with a tag of its own.
    Tagged,
    /// One way, 16 messages under way, by the CPU.
    Rate,
}

impl Mode {
    const ALL: [Self; 6] =
        [Self::Sync, Self::SyncWork, Self::Async, Self::AsyncWork, Self::Tagged, Self::Rate];
}

/// Every column of a size runs in so many slices, by turns with the others, as in `bench hca`.
const SLICES: u64 = 5;

impl Options {
    /// Measured iterations of a slice.
    fn slice(&self, bytes: usize) -> u64 {
        let all = self.iters.map_or(((1 << 30) / bytes as u64).clamp(20, 20_000), u64::from);
        all.div_ceil(SLICES)
    }

    pub(crate) fn run(&self) -> Result<()> {
        let timeout = Duration::from_secs(self.timeout);
        let comm = two_ranks(timeout)?;
        let first = comm.rank() == 0;
        let file = create_json(self.json.as_deref().filter(|_| first))?;
        let bar = if first { ProgressBar::new(self.sizes.len() as u64) } else { ProgressBar::hidden() };
        bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}")?);
        let calls = calls::measure(&comm, self.calls, timeout)?;
        let config =
            HostStreamConfig { name: "mp".into(), wait_limit: timeout, ..HostStreamConfig::default() };
        let stream = Stream::host(config)?;
        let tagged = Tagged::new(&comm, timeout)?;
        let mut lines = Vec::new();
        for &bytes in &self.sizes {
            let bytes = usize::try_from(bytes)?;
            bar.set_message(format!("{} B", size(bytes)));
            lines.extend(self.of_size((&comm, &tagged), &stream, bytes, timeout)?);
            bar.inc(1);
        }
        bar.finish_and_clear();
        let wrong = lines.iter().map(|line| line.errors).sum::<u64>();
        let mut written = Ok(());
        if first {
            let context = comm.context();
            let (device, wire) = (context.description().to_owned(), context.wire().to_owned());
            let (machine, work_us) = (Machine::here(), self.work_us);
            let report = Report { device, wire, machine, work_us, calls, lines };
            written = report.print(&self.modes).and_then(|()| write_json(file, &report));
        }
        comm.finalize(timeout)?;
        written?;
        if wrong > 0 { Err(format!("{wrong} windows had wrong data").into()) } else { Ok(()) }
    }

    fn of_size(
        &self,
        (comm, tagged): (&Communicator, &Tagged),
        stream: &Stream,
        bytes: usize,
        timeout: Duration,
    ) -> Result<Vec<Line>> {
        let game =
            Game::new((comm, tagged), stream, bytes, Duration::from_micros(self.work_us.into()), timeout)?;
        let slice = self.slice(bytes);
        let mut results = vec![(Samples::default(), 0); self.modes.len()];
        for turn in 0..=SLICES {
            for (&mode, (samples, errors)) in self.modes.iter().zip(&mut results) {
                // The first turn warms up.
                let count = if turn == 0 { slice.div_ceil(10) } else { slice };
                let (times, wrong) = game.play(mode, count)?;
                *errors += wrong;
                if turn > 0 {
                    samples.append(&times);
                }
            }
        }
        let line = |(&mode, (samples, errors)): (&Mode, &(Samples, u64))| {
            // A round trip has two messages; a rate is of one.
            let us = samples.micros(if mode == Mode::Rate { 1 } else { 2 });
            let errors = comm.exchange(&errors.to_be_bytes(), timeout)?;
            let errors = errors.iter().filter_map(|e| e.first_chunk()).map(|e| u64::from_be_bytes(*e)).sum();
            Ok(Line { mode, bytes, iters: slice * SLICES, us, errors })
        };
        self.modes.iter().zip(&results).map(line).collect()
    }
}
