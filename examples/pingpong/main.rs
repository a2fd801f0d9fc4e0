//! Ping-pong between two processes, with data checked on every iteration.
//!
//! Started alone it spawns its peer; under mpirun, srun or torchrun-style variables it joins. Modes:
//!
//! - `stream`: sends and waits of many iterations are posted ahead on a stream, the CPU sleeps;
//! - `sync`: the CPU waits for the stream, then posts the next send;
//! - `cpu`: no stream, the CPU posts and polls.
//!
//! Two more are for what repeats: `graph`, captured once and launched again and again, and on a GPU `initiate`, one kernel for many
//! iterations, which waits and sends by itself.
//!
//! A stream is a host thread, or with `--stream cuda` one of a GPU. There a kernel between two iterations checks what
//! arrived, prepares what leaves next and takes the time, in all three modes.
//!
//! This page has the frame of such a program. The messages are in `src/pingpong/player.rs`, what fills and checks the
//! buffers in `src/pingpong/judge.rs`; `gdasync bench` plays the same.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use gdasync::lane::{Lane, Result};
use gdasync::measure::{create_json, size, write_json};
use gdasync::note;
use gdasync::pingpong::{PTX, Player, Report, floor};
use indicatif::{ProgressBar, ProgressStyle};

/// Stream-triggered ping-pong between two processes, data checked on every iteration.
#[derive(Parser)]
#[command(
    version,
    about,
    after_help = "Example: cargo run --release --example pingpong -- --sizes 8,4096 --modes stream,cpu"
)]
struct Cli {
    #[command(flatten)]
    play: gdasync::pingpong::Options,
    /// Also bounces a flag in shared host memory between the streams of both ranks, without any message.
    #[arg(long)]
    floor: bool,
    /// Writes the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn run(Cli { play: options, floor: with_floor, json }: &Cli) -> Result<bool> {
    options.check()?;
    let timeout = options.timeout();
    let placed = options.placement.open()?;
    let comm = placed.builder().spawn(2).timeout(timeout).init()?;
    if comm.size() != 2 {
        return Err(format!("a ping-pong has 2 ranks, this job has {}", comm.size()).into());
    }
    let lane = Lane::new(&placed, timeout, PTX)?;
    let first = comm.rank() == 0;
    let file = create_json(json.as_deref().filter(|_| first))?;
    let steps = options.modes().len() * options.sizes.len();
    // Drawn on a terminal only, and never while a measurement runs.
    let bar = if first { ProgressBar::new(steps as u64) } else { ProgressBar::hidden() };
    bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}")?);
    let mut results = Vec::new();
    if *with_floor {
        results.push(floor(options, &comm, &lane)?);
    }
    for mode in options.modes() {
        for &bytes in &options.sizes {
            let bytes = usize::try_from(bytes)?;
            bar.set_message(format!("{mode:?}, {} B", size(bytes)));
            results.push(Player::new(options, &comm, &lane, &placed, bytes)?.play(mode)?);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let report = Report::new(options, &comm, &placed, &lane, results)?;
    let written = match first {
        true => report.print().and_then(|()| write_json(file, &report)),
        false => Ok(()),
    };
    // First: the peer has not failed.
    comm.finalize(timeout)?;
    written?;
    Ok(report.is_right())
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    match run(&Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            note!("pingpong: messages arrived with wrong data");
            ExitCode::FAILURE
        }
        Err(error) => {
            note!("pingpong: {error}");
            ExitCode::FAILURE
        }
    }
}
