//! The command-line tool.

#![cfg_attr(
    not(test),
    deny(clippy::print_stderr, clippy::print_stdout, reason = "they panic; `out!` and `note!` do not")
)]

mod bench;
mod card;
mod plot;
mod trace;

use gdasync::note;
use gdasync::terminal::parse;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use gdasync::doctor::Doctor;
use gdasync::tools::Tool;

/// GPUDirect Async: benchmarks and tests of stream-triggered RDMA and of GPU memory mappings.
#[derive(Parser)]
#[command(version, about, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measures this machine, each figure with its baseline in the same run.
    #[command(subcommand)]
    Bench(bench::Bench),
    Card(card::Options),
    /// Probes this machine: what works, what does not, why it matters and what to do.
    Doctor(Doctor),
    /// The tools of GDRCopy: do CPU mappings of GPU memory work here, and how fast are they?
    #[command(subcommand)]
    Gdrcopy(Tool),
    /// Draws results as a picture, on logarithmic axes.
    Plot(plot::Options),
    /// Writes results as one page: pictures, tables, machine and command.
    Report(plot::ReportOptions),
    /// Shows what processes have recorded, also killed ones: which wait is stuck, on which peer and request.
    Trace(trace::Options),
}

fn main() -> ExitCode {
    gdasync::tools::log_to_stderr();
    match parse::<Cli>().command {
        Command::Doctor(doctor) => doctor.run(),
        Command::Gdrcopy(tool) => tool.run(),
        Command::Card(options) => end(options.run()),
        Command::Bench(bench) => end(bench.run().map(|()| ExitCode::SUCCESS)),
        Command::Plot(options) => end(options.run()),
        Command::Report(options) => end(options.run()),
        Command::Trace(options) => end(options.run()),
    }
}

/// The exit status, or the error for the user.
fn end<E: std::fmt::Display>(result: Result<ExitCode, E>) -> ExitCode {
    result.unwrap_or_else(|error| {
        note!("gdasync: {error}");
        ExitCode::FAILURE
    })
}
