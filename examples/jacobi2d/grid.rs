//! The grid: its fixed edges, the rows of a rank, and the comparison with a solution of one process.

use gdasync::results::Result;
use gdsync::memory::Memory;
use mp::{Communicator, Registration};
use serde::Serialize;
use std::ops::Range;
use std::time::Duration;

/// Bytes of a number.
pub(crate) const NUMBER: usize = size_of::<f64>();

/// Width and height without the fixed cells around.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) nx: usize,
    pub(crate) ny: usize,
}

impl Extent {
    /// Numbers of a row, with the fixed ones at both ends.
    pub(crate) fn width(self) -> usize {
        self.nx + 2
    }

    /// A row before the first iteration; row 0 and row `ny + 1` are fixed. The edges are uneven, the inside is 0.
    pub(crate) fn first_state(self, row: usize) -> Vec<f64> {
        let inside = |column| (1..=self.ny).contains(&row) && (1..=self.nx).contains(&column);
        let edge = |column| f64::from(u8::try_from((row * 37 + column * 101) % 251).unwrap_or(0)) / 251.0;
        (0..self.width()).map(|column| if inside(column) { 0.0 } else { edge(column) }).collect()
    }

    /// The rows of a rank: blocks as even as can be.
    pub(crate) fn rows_of(self, rank: usize, ranks: usize) -> Range<usize> {
        let start = |rank: usize| 1 + self.ny * rank / ranks;
        start(rank)..start(rank + 1)
    }
}

/// One cell from its four neighbours. Every solver here computes it in this order, so that all get the same bits.
pub(crate) fn relax_row(above: &[f64], here: &[f64], below: &[f64], next: &mut [f64]) {
    for (((above, below), sides), next) in
        above[1..].iter().zip(&below[1..]).zip(here.windows(3)).zip(&mut next[1..])
    {
        *next = ((above + below) + (sides[0] + sides[2])) * 0.25;
    }
}

/// Two states of a block of rows, each with a row above and one below it, and a spare row. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub(crate) memory: Memory,
    pub(crate) width: usize,
    /// Rows of the block itself: those from 1 on, between the two rows of its neighbours.
    pub(crate) rows: usize,
}

impl Block {
    /// The bytes of a block.
    pub(crate) fn bytes(extent: Extent, rows: usize) -> usize {
        (2 * (rows + 2) + 1) * extent.width() * NUMBER
    }

    /// A block in its memory, with both states as they are before the first iteration.
    pub(crate) fn new(memory: &Memory, extent: Extent, rows: Range<usize>) -> Result<Self> {
        let block = Self { memory: memory.clone(), width: extent.width(), rows: rows.len() };
        for state in [0, 1] {
            for row in 0..rows.len() + 2 {
                block.write_row(state, row, &extent.first_state(rows.start - 1 + row))?;
            }
        }
        block.memory.flush()?;
        Ok(block)
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Where a state begins, in bytes.
    pub(crate) fn state_at(&self, state: usize) -> usize {
        state * (self.rows + 2) * self.width * NUMBER
    }

    /// A whole row, in bytes.
    pub(crate) fn row(&self, state: usize, row: usize) -> Range<usize> {
        let start = self.state_at(state) + row * self.width * NUMBER;
        start..start + self.width * NUMBER
    }

    /// What neighbours get of a row: it without its fixed ends.
    pub(crate) fn halo(&self, state: usize, row: usize) -> Range<usize> {
        let Range { start, end } = self.row(state, row);
        start + NUMBER..end - NUMBER
    }

    /// A row that is never read.
    pub(crate) fn spare(&self) -> Range<usize> {
        self.halo(2, 0)
    }

    pub(crate) fn read_row(&self, state: usize, row: usize) -> Result<Vec<f64>> {
        let mut numbers = vec![0.0; self.width];
        self.memory.read_slice(self.row(state, row).start, &mut numbers)?;
        Ok(numbers)
    }

    pub(crate) fn write_row(&self, state: usize, row: usize, numbers: &[f64]) -> Result<()> {
        Ok(self.memory.write_slice(self.row(state, row).start, numbers)?)
    }

    /// Computes rows of the other state from `state`, on the CPU.
    pub(crate) fn relax(&self, state: usize, rows: impl Iterator<Item = usize>) -> Result<()> {
        // The rows around the last one computed: neighbours share two of three.
        let mut known: Option<(usize, [Vec<f64>; 3])> = None;
        for row in rows {
            let three = match known {
                Some((last, [_, here, below])) if last + 1 == row => {
                    [here, below, self.read_row(state, row + 1)?]
                }
                _ => [
                    self.read_row(state, row - 1)?,
                    self.read_row(state, row)?,
                    self.read_row(state, row + 1)?,
                ],
            };
            // Its fixed ends stay.
            let mut next = three[1].clone();
            relax_row(&three[0], &three[1], &three[2], &mut next);
            self.write_row(1 - state, row, &next)?;
            known = Some((row, three));
        }
        Ok(())
    }
}

/// How long the solution of rank 0 may take.
pub(crate) const ALONE: Duration = Duration::from_secs(3600);

/// How far two results are apart.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Difference {
    /// The largest, not a number if a cell is none.
    pub(crate) max_difference: f64,
    /// Cells whose bits differ.
    pub(crate) different_cells: u64,
}

impl Difference {
    pub(crate) fn add(&mut self, ours: &[f64], theirs: &[f64]) {
        for (ours, theirs) in ours.iter().zip(theirs) {
            let apart = (ours - theirs).abs();
            if apart.is_nan() || apart > self.max_difference {
                self.max_difference = apart;
            }
            self.different_cells += u64::from(ours.to_bits() != theirs.to_bits());
        }
    }
}

/// The whole grid after `iterations` iterations, row by row.
pub(crate) fn solve_alone(extent: Extent, iterations: u32) -> Vec<Vec<f64>> {
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
) -> Result<Option<Difference>> {
    let state = iterations as usize % 2;
    if comm.rank() > 0 {
        for row in 1..=block.rows {
            comm.wait(&comm.isend(buffer, block.row(state, row), 0)?, comm.timeout() + ALONE)?;
        }
        return Ok(None);
    }
    let whole = solve_alone(extent, iterations);
    let mut difference = Difference::default();
    for row in extent.rows_of(0, comm.size()) {
        difference.add(&block.read_row(state, row)?, &whole[row]);
    }
    let inbox = comm.register(&Memory::alloc(extent.width() * size_of::<f64>())?)?;
    let mut numbers = vec![0.0; extent.width()];
    for rank in 1..comm.size() {
        for row in extent.rows_of(rank, comm.size()) {
            comm.wait(&comm.irecv(&inbox, 0..inbox.memory().len(), rank)?, None)?;
            inbox.memory().read_slice(0, &mut numbers)?;
            difference.add(&numbers, &whole[row]);
        }
    }
    Ok(Some(difference))
}
