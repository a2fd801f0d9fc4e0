//! The command-line tool.

mod bench;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// GPUDirect Async: benchmarks of stream-triggered RDMA.
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
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    let Command::Bench(bench) = Cli::parse().command;
    match bench.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gdasync: {error}");
            ExitCode::FAILURE
        }
    }
}
