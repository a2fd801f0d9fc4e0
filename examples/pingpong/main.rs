//! Ping-pong between two processes, with data checked on every iteration.
//!
//! Started alone it spawns its peer; under mpirun, srun or torchrun-style variables it joins. Three modes:
//!
//! - `stream`: sends and waits of many iterations are posted ahead on a stream, the CPU sleeps;
//! - `sync`: the CPU waits for the stream, then posts the next send;
//! - `cpu`: no stream, the CPU posts and polls.
//!
//! A stream is a host thread, or with `--stream cuda` one of a GPU. There a kernel between two iterations checks what
//! arrived, prepares what leaves next and takes the time, in all three modes.

mod board;
#[path = "../common/mod.rs"]
mod common;
mod floor;
mod judge;
mod kernels;
mod options;
mod player;
mod report;
mod window;

use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use gdasync::measure::{Machine, size};
use indicatif::{ProgressBar, ProgressStyle};
use mp::Communicator;

use common::{Lane, Result};
use options::Options;
use player::Player;
use report::{Report, Settings};

fn run(options: &Options) -> Result<bool> {
    options.check()?;
    let timeout = options.timeout();
    let placed = options.placement.open()?;
    let comm = placed.builder().spawn(2).timeout(timeout).init()?;
    if comm.size() != 2 {
        return Err(format!("a ping-pong has 2 ranks, this job has {}", comm.size()).into());
    }
    let lane = Lane::new(&placed, timeout, kernels::PTX)?;
    let first = comm.rank() == 0;
    // A path that cannot be written to is better known before the measurement than after it.
    let json = options.json.as_ref().filter(|_| first);
    let create = |path: &PathBuf| File::create(path).map_err(|e| format!("--json {}: {e}", path.display()));
    let file = json.map(create).transpose()?;
    let steps = options.modes.len() * options.sizes.len();
    // Drawn on a terminal only, and never while a measurement runs.
    let bar = if first { ProgressBar::new(steps as u64) } else { ProgressBar::hidden() };
    bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}")?);
    let mut results = Vec::new();
    if options.floor {
        results.push(floor::measure(options, &comm, &lane)?);
    }
    for &mode in &options.modes {
        for &bytes in &options.sizes {
            let bytes = usize::try_from(bytes)?;
            bar.set_message(format!("{mode:?}, {} B", size(bytes)));
            let played = Player::new(options, &comm, &lane, &placed, bytes)?.play(mode)?;
            results.push(played.line(mode, bytes, total(&comm, played.errors, timeout)?));
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let settings = Settings {
        place: placed.describe(&comm, timeout)?,
        ahead: options.ahead,
        work_us: options.work().as_micros(),
        no_kernels: options.no_kernels,
    };
    let context = comm.context();
    let report = Report {
        device: context.description().to_owned(),
        stream: lane.stream.kind(),
        wire: context.wire().to_owned(),
        ranks: comm.size(),
        machine: Machine::here(),
        settings,
        results,
    };
    if first {
        report.print();
        if let Some(file) = file {
            serde_json::to_writer_pretty(file, &report)?;
        }
    }
    comm.finalize(timeout)?;
    Ok(report.results.iter().all(|line| line.errors == 0))
}

/// The errors of all ranks.
fn total(comm: &Communicator, own: u64, timeout: Duration) -> Result<u64> {
    let errors = comm.exchange(&own.to_be_bytes(), timeout)?;
    Ok(errors.iter().filter_map(|e| e.first_chunk()).map(|e| u64::from_be_bytes(*e)).sum())
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    let options = Options::parse();
    match run(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!("pingpong: messages arrived with wrong data");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("pingpong: {error}");
            ExitCode::FAILURE
        }
    }
}
