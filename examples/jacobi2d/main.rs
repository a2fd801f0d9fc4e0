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

mod check;
mod grid;
mod options;
mod relax;
mod repeat;
mod solver;

use std::io;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use gdasync::measure::{Machine, create_json, write_json};
use gdasync::{note, out};
use mp::Communicator;
use serde::Serialize;

use check::Difference;
use gdasync::lane::{Description, Lane, Placed, Result};
use grid::{Block, Extent};
use options::{Mode, Options};
use relax::Relaxer;
use solver::Solver;

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
    halo_bytes: usize,
    cells_per_s: f64,
    /// To the solution of one process; absent when it was not asked for.
    #[serde(flatten)]
    difference: Option<Difference>,
}

impl Report {
    fn print(&self) -> io::Result<()> {
        out!(
            "{} over {}, {} stream, {} ranks, {} x {}",
            self.device,
            self.wire,
            self.stream,
            self.ranks,
            self.machine.cpus,
            self.machine.cpu
        )?;
        out!(
            "{}{} x {} cells, {} iterations, mode {}",
            self.place,
            self.nx,
            self.ny,
            self.iters,
            format!("{:?}", self.mode).to_lowercase()
        )?;
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
    let comm = placed.builder().spawn(options.ranks.unwrap_or(2).into()).timeout(timeout).init()?;
    let first = comm.rank() == 0;
    if options.ranks.is_some_and(|asked| usize::from(asked) != comm.size()) {
        return Err(format!("--ranks is not the {} ranks that the launcher started", comm.size()).into());
    }
    let file = create_json(options.json.as_deref().filter(|_| first))?;
    let report = solve(options, &placed, &comm)?;
    let written = match first {
        true => report.print().and_then(|()| write_json(file, &report)),
        false => Ok(()),
    };
    // First: the other ranks have not failed.
    comm.finalize(timeout)?;
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
    let lane = Lane::new(placed, timeout, relax::PTX)?;
    let rows = extent.rows_of(rank, ranks);
    let memory = placed.memory(Block::bytes(extent, rows.len()))?;
    let block = Block::new(&memory, extent, rows)?;
    let buffer = comm.register(&memory)?;
    let relaxer = Relaxer::new(&lane, &block, extent.width())?;
    let solver = Solver::new(options, comm, &lane, relaxer, &block, &buffer);
    let warm_up = options.iters / 10;
    let time = slowest(comm, solver.solve(warm_up)?, timeout)?;
    let difference = match options.no_check {
        true => None,
        false => check::compare(comm, extent, options.iters, &block, &buffer, timeout)?,
    };
    let timed = options.iters - warm_up;
    let iteration = time.as_secs_f64() / f64::from(timed);
    Ok(Report {
        device: comm.context().description().to_owned(),
        stream: lane.stream.kind(),
        wire: comm.context().wire().to_owned(),
        ranks,
        machine: Machine::here(),
        place: placed.describe(comm, timeout)?,
        mode: options.mode,
        nx: extent.nx,
        ny: extent.ny,
        iters: options.iters,
        timed,
        iteration_us: iteration * 1e6,
        halo_bytes: sum(comm, solver.halo_bytes(), timeout)?,
        cells_per_s: f64::from(options.nx) * f64::from(options.ny) / iteration,
        difference,
    })
}

/// The longest time of a rank.
fn slowest(comm: &Communicator, own: Duration, timeout: Duration) -> Result<Duration> {
    let times = comm.exchange(&u64::try_from(own.as_nanos())?.to_be_bytes(), timeout)?;
    let longest =
        times.iter().filter_map(|time| time.first_chunk()).map(|time| u64::from_be_bytes(*time)).max();
    Ok(Duration::from_nanos(longest.unwrap_or(0)))
}

/// The numbers of all ranks together.
fn sum(comm: &Communicator, own: usize, timeout: Duration) -> Result<usize> {
    let numbers = comm.exchange(&own.to_be_bytes(), timeout)?;
    Ok(numbers
        .iter()
        .filter_map(|number| number.first_chunk())
        .map(|number| usize::from_be_bytes(*number))
        .sum())
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
            note!("jacobi2d: the result is not that of one process");
            ExitCode::FAILURE
        }
        Err(error) => {
            note!("jacobi2d: {error}");
            ExitCode::FAILURE
        }
    }
}
