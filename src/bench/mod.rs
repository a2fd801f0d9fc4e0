//! `gdasync bench`: measurements that stay in the project, each with its baseline in the same run.

mod floor;
mod hca;
mod link;

use clap::Subcommand;

/// What a benchmark may fail with.
pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// The benchmarks.
#[derive(Subcommand)]
pub(crate) enum Bench {
    /// Latency and rate of the software HCA, as ratios to two threads or processes that bounce a cache line.
    Hca(hca::Options),
}

impl Bench {
    pub(crate) fn run(self) -> Result<()> {
        match self {
            Bench::Hca(options) => options.run(),
        }
    }
}
