//! Ping-pong between two processes, the payload checked in every iteration.
//!
//! Started alone it starts its peer; under mpirun, srun or torchrun-style variables it joins. Modes:
//!
//! - `stream`: sends and waits of many iterations are posted ahead on a stream, the CPU sleeps;
//! - `graph`: iterations are captured once as a graph and launched repeatedly;
//! - `initiate`: one kernel waits and sends by itself, for many iterations;
//! - `sync`: the CPU waits for the stream, then posts the next send;
//! - `cpu`: no stream, the CPU posts and polls.
//!
//! A stream is a host thread, or with `--stream cuda` a CUDA stream. There a kernel between two iterations checks what
//! arrived, prepares the next message and takes the time.
//!
//! The messages are in `src/pingpong/exchange.rs`, the buffers in `src/pingpong/buffers.rs`; `gdasync bench latency` runs
//! the same.

use std::process::ExitCode;

use clap::Parser;
use gdasync::terminal::parse;
use gdasync::{note, pingpong, results};

/// Stream-triggered ping-pong between two processes, data checked on every iteration.
#[derive(Parser)]
#[command(
    version,
    after_help = "Example: cargo run --release --example pingpong -- --sizes 8,4096 --modes stream,cpu"
)]
struct Cli {
    #[command(flatten)]
    pingpong: pingpong::Options,
    #[command(flatten)]
    output: results::Output,
}

fn main() -> ExitCode {
    gdasync::tools::log_to_stderr();
    let Cli { pingpong, output } = parse();
    match pingpong::run(&pingpong, &output, false, false) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            note!("pingpong: {error}");
            ExitCode::FAILURE
        }
    }
}
