//! The command-line tool.

mod bench;
mod trace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
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
    /// The tools of GDRCopy: do CPU mappings of GPU memory work here, and how fast are they?
    #[command(subcommand)]
    Gdrcopy(Tool),
    /// Shows what processes have recorded, also killed ones: which wait is stuck, on which peer and request.
    Trace(trace::Options),
}

fn main() -> ExitCode {
    gdasync::tools::log_to_stderr();
    match Cli::parse().command {
        Command::Gdrcopy(tool) => tool.run(),
        Command::Trace(options) => options.run(),
        Command::Bench(bench) => match bench.run() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("gdasync: {error}");
                ExitCode::FAILURE
            }
        },
    }
}
