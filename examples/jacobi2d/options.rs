//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use serde::Serialize;

use gdasync::lane::Placement;

/// Jacobi iterations for the Laplace equation on a rectangle, split in blocks of rows over ranks that exchange halo rows on
/// streams. The result is compared with that of one process, to the last bit.
#[derive(Parser)]
#[command(
    version,
    about,
    after_help = "Example: cargo run --release --example jacobi2d -- --nx 2048 --ny 2048 --ranks 2 --mode sync"
)]
pub(crate) struct Options {
    /// How halo rows are exchanged.
    #[arg(long, value_enum, default_value_t = Mode::Stream)]
    pub(crate) mode: Mode,
    /// Columns, without the fixed ones at both sides.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) nx: u32,
    /// Rows, without the fixed ones above and below.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) ny: u32,
    /// Iterations, of which the first tenth is not timed.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) iters: u32,
    /// Ranks, where no launcher says how many [default: 2].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) ranks: Option<u16>,
    /// Iterations posted ahead in mode stream, or in a launch of mode graph, which makes it an even number.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=200))]
    pub(crate) ahead: u32,
    #[command(flatten)]
    pub(crate) placement: Placement,
    /// Does not compare the result: for grids that take one process too long.
    #[arg(long)]
    pub(crate) no_check: bool,
    /// Seconds after which a wait is given up, 1 to 86400.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// Writes the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Loses the halo rows of this iteration: the comparison must notice.
    #[arg(long, hide = true)]
    pub(crate) lose: Option<u32>,
}

/// How halo rows are exchanged.
#[derive(Clone, Copy, ValueEnum, Serialize, PartialEq, Debug)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mode {
    /// Everything posted ahead on a stream, the CPU asleep.
    Stream,
    /// As a graph, captured once and launched again and again, through channels.
    Graph,
    /// The CPU waits for the stream, then sends, and waits for what it receives.
    Sync,
}

impl Options {
    /// After how long a wait is given up.
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }
}
