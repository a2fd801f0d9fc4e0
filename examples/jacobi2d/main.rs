//! Jacobi iterations for the Laplace equation on a rectangle whose edges are fixed, split in blocks of rows over ranks.
//!
//! In every iteration a rank computes the first and the last of its rows, sends them to its neighbours, computes the rest
//! while they travel, and waits for the rows of its neighbours. Three modes:
//!
//! - `stream`: kernels, sends and waits of many iterations are posted ahead on a stream, the CPU sleeps;
//! - `graph`: they are captured once, and launched again and again;
//! - `sync`: the CPU waits for the rows, sends them, and waits for those of the neighbours.
//!
//! A stream is a host thread, or with `--stream cuda` one of a GPU. Rank 0 compares the result with a solution of its own.

mod grid;
mod solver;

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use gdasync::app_stream::{AppStream, Description, Placed, Placement};
use gdasync::measure::Machine;
use gdasync::results::{JsonFile, Result, all_ranks, sum};
use gdasync::terminal::parse;
use gdasync::{note, out};
use mp::Communicator;
use serde::Serialize;

use grid::{Block, Difference, Extent};
use solver::{Relaxer, Solver};

/// Jacobi iterations for the Laplace equation on a rectangle, split in blocks of rows over ranks that exchange halo rows on
/// streams. The result is compared with that of one process, to the last bit.
#[derive(Parser)]
#[command(
    version,
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
    /// Iterations; the first tenth is not timed.
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
    /// Everything enqueued ahead on a stream, through channels.
    Stream,
    /// The same as a graph, captured once and launched again and again.
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

#[derive(Serialize)]
struct Report {
    device: String,
    stream: &'static str,
    wire: String,
    ranks: usize,
    machine: Machine,
    #[serde(flatten)]
    place: Description,
    mode: Mode,
    nx: usize,
    ny: usize,
    iters: u32,
    /// Iterations that the time is of.
    timed: u32,
    /// Of the slowest rank.
    iteration_us: f64,
    /// Of all ranks, in an iteration.
    halo_bytes: u64,
    cells_per_s: f64,
    /// To the solution of one process; absent when it was not asked for.
    #[serde(flatten)]
    difference: Option<Difference>,
}

impl Report {
    fn print(&self) -> io::Result<()> {
        let Self { device, wire, stream, ranks, machine, place, nx, ny, iters, .. } = self;
        let mode = format!("{:?}", self.mode).to_lowercase();
        out!("{device} over {wire}, {stream} stream, {ranks} ranks, {} x {}", machine.cpus, machine.cpu)?;
        out!("{place}{nx} x {ny} cells, {iters} iterations, mode {mode}")?;
        out!("time per iteration: {:.2} us", self.iteration_us)?;
        out!("halo bytes per iteration: {}", self.halo_bytes)?;
        out!("cells per second: {:.4e}", self.cells_per_s)?;
        match self.difference {
            Some(Difference { max_difference, different_cells }) => {
                out!("difference to one process: at most {max_difference:e}, {different_cells} cells")
            }
            None => out!("not compared with one process"),
        }
    }
}

fn run(options: &Options) -> Result<bool> {
    let timeout = options.timeout();
    let placed = options.placement.open()?;
    // Receives are posted a window ahead: a neighbour sends a halo again only after it has got the one of this rank between.
    let mut builder = placed.builder().allow_overlap(true);
    if let Some(ranks) = options.ranks {
        builder = builder.size(ranks.into());
    }
    let comm = builder.spawn(options.ranks.unwrap_or(2).into()).timeout(timeout).init()?;
    let first = comm.rank() == 0;
    let file = JsonFile::create(options.json.as_deref().filter(|_| first))?;
    let report = solve(options, &placed, &comm)?;
    let written = match first {
        true => report.print().map_err(|error| error.to_string()).and_then(|()| file.write(&report)),
        false => Ok(()),
    };
    // First: the other ranks have not failed.
    comm.finalize(None)?;
    written?;
    Ok(report.difference.is_none_or(|difference| difference.different_cells == 0))
}

/// Solves and compares; only rank 0 knows the difference.
fn solve(options: &Options, placed: &Placed, comm: &Communicator) -> Result<Report> {
    let timeout = options.timeout();
    let (rank, ranks) = (comm.rank(), comm.size());
    let extent = Extent { nx: usize::try_from(options.nx)?, ny: usize::try_from(options.ny)? };
    if extent.ny < ranks {
        return Err(format!("--ny {}: {ranks} ranks need a row each", extent.ny).into());
    }
    let app = AppStream::new(placed, timeout, solver::PTX)?;
    let rows = extent.rows_of(rank, ranks);
    let memory = placed.memory(Block::bytes(extent, rows.len()))?;
    let block = Block::new(&memory, extent, rows)?;
    let buffer = comm.register(&memory)?;
    let relaxer = Relaxer::new(&app, &block, extent.width())?;
    let solver = Solver::new(options, comm, &app, relaxer, &block, &buffer);
    let warm_up = options.iters / 10;
    let own = u64::try_from(solver.solve(warm_up)?.as_nanos())?;
    let slowest = all_ranks(comm, own)?.into_iter().max().unwrap_or(own);
    let difference = match options.no_check {
        true => None,
        false => grid::compare(comm, extent, options.iters, &block, &buffer)?,
    };
    let timed = options.iters - warm_up;
    let iteration = Duration::from_nanos(slowest).as_secs_f64() / f64::from(timed);
    Ok(Report {
        device: comm.context().description().to_owned(),
        stream: app.stream.kind(),
        wire: comm.context().wire().to_owned(),
        ranks,
        machine: Machine::here(),
        place: placed.describe(comm)?,
        mode: options.mode,
        nx: extent.nx,
        ny: extent.ny,
        iters: options.iters,
        timed,
        iteration_us: iteration * 1e6,
        halo_bytes: sum(comm, solver.halo_bytes() as u64)?,
        cells_per_s: f64::from(options.nx) * f64::from(options.ny) / iteration,
        difference,
    })
}

fn main() -> ExitCode {
    gdasync::tools::log_to_stderr();
    let options = parse();
    match run(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            note!("jacobi2d: the result is not that of one process");
            ExitCode::FAILURE
        }
        Err(error) => {
            note!("jacobi2d: {error}");
            ExitCode::FAILURE
        }
    }
}
