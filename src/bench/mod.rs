//! `gdasync bench`: measurements that stay in the project.

use clap::Subcommand;

/// The benchmarks.
#[derive(Subcommand)]
pub(crate) enum Bench {}

impl Bench {
    pub(crate) fn run(self) -> Result<(), Box<dyn std::error::Error>> {
        match self {}
    }
}
