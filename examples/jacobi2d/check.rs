//! The comparison with one process that has the whole grid.

use std::time::Duration;

use gdsync::memory::Memory;
use mp::{Communicator, Registration};
use serde::Serialize;

use crate::grid::{Block, Extent, numbers, relax_row};
use gdasync::lane::Result;

/// How long the solution of rank 0 may take.
const ALONE: Duration = Duration::from_secs(3600);

/// How far two results are apart.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Difference {
    /// The largest, not a number if a cell is none.
    pub(crate) max_difference: f64,
    /// Cells whose bits differ.
    pub(crate) different_cells: u64,
}

impl Difference {
    fn add(&mut self, ours: &[f64], theirs: &[f64]) {
        for (ours, theirs) in ours.iter().zip(theirs) {
            let apart = (ours - theirs).abs();
            if apart.is_nan() || apart > self.max_difference {
                self.max_difference = apart;
            }
            self.different_cells += u64::from(ours.to_bits() != theirs.to_bits());
        }
    }
}

/// The whole grid after so many iterations, row by row.
fn solve_alone(extent: Extent, iterations: u32) -> Vec<Vec<f64>> {
    let mut current: Vec<Vec<f64>> = (0..extent.ny + 2).map(|row| extent.first_state(row)).collect();
    let mut next = current.clone();
    for _ in 0..iterations {
        for row in 1..=extent.ny {
            relax_row(&current[row - 1], &current[row], &current[row + 1], &mut next[row]);
        }
        std::mem::swap(&mut current, &mut next);
    }
    current
}

/// Brings the final rows of all ranks to rank 0, which compares them with a solution of its own; `None` on the others.
pub(crate) fn compare(
    comm: &Communicator,
    extent: Extent,
    iterations: u32,
    block: &Block,
    buffer: &Registration,
    timeout: Duration,
) -> Result<Option<Difference>> {
    let state = iterations as usize % 2;
    if comm.rank() > 0 {
        for row in 1..=block.rows {
            comm.wait(&comm.isend(buffer, block.row(state, row), 0)?, timeout + ALONE)?;
        }
        return Ok(None);
    }
    let whole = solve_alone(extent, iterations);
    let mut difference = Difference::default();
    for row in extent.rows_of(0, comm.size()) {
        difference.add(&block.read_row(state, row)?, &whole[row]);
    }
    let inbox = comm.register(&Memory::alloc(extent.width() * size_of::<f64>())?)?;
    for rank in 1..comm.size() {
        for row in extent.rows_of(rank, comm.size()) {
            comm.wait(&comm.irecv(&inbox, 0..inbox.memory().len(), rank)?, timeout)?;
            difference.add(&numbers(&inbox.memory().to_vec()), &whole[row]);
        }
    }
    Ok(Some(difference))
}
