//! The iterations of one rank: rows at the edges first, so that the rest is computed while they travel.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use gdsync::stream::Batch;
use mp::{Communicator, Registration, Request};

use crate::grid::Block;
use crate::options::{Mode, Options};
use crate::relax::Relaxer;
use crate::repeat::Repeated;
use gdasync::lane::{Lane, Result};

/// The iterations of one rank.
pub(crate) struct Solver<'a> {
    pub(super) options: &'a Options,
    pub(super) comm: &'a Communicator,
    pub(super) lane: &'a Lane,
    pub(super) relaxer: Relaxer<'a>,
    pub(super) block: Block,
    pub(super) buffer: Registration,
    pub(super) neighbours: Vec<Neighbour>,
    pub(super) timeout: Duration,
}

/// A rank above or below.
pub(super) struct Neighbour {
    pub(super) rank: usize,
    /// The row of this block that it needs.
    pub(super) edge: usize,
    /// The row beside this block that it computes.
    pub(super) halo: usize,
}

impl<'a> Solver<'a> {
    pub(crate) fn new(
        options: &'a Options,
        comm: &'a Communicator,
        lane: &'a Lane,
        relaxer: Relaxer<'a>,
        block: &Block,
        buffer: &Registration,
    ) -> Self {
        let (rank, rows) = (comm.rank(), block.rows);
        let above = rank.checked_sub(1).map(|rank| Neighbour { rank, edge: 1, halo: 0 });
        let below = Some(Neighbour { rank: rank + 1, edge: rows, halo: rows + 1 });
        let neighbours = above.into_iter().chain(below.filter(|below| below.rank < comm.size())).collect();
        let (block, buffer, timeout) = (block.clone(), buffer.clone(), options.timeout());
        Self { options, comm, lane, relaxer, block, buffer, neighbours, timeout }
    }

    /// Bytes that this rank sends in an iteration.
    pub(crate) fn halo_bytes(&self) -> usize {
        self.neighbours.len() * self.block.halo(0, 0).len()
    }

    /// Runs all iterations; the time of those after `warm_up` is returned.
    pub(crate) fn solve(&self, warm_up: u32) -> Result<Duration> {
        let total = self.options.iters;
        if self.options.mode == Mode::Graph {
            let repeated = Repeated::new(self)?;
            return self.time(warm_up, |iterations| repeated.run(iterations));
        }
        let mut posted = 0..total;
        let mut receives = VecDeque::new();
        self.post_receives(&mut receives, posted.by_ref().take(2 * self.options.ahead as usize))?;
        self.time(warm_up, |iterations| self.run(iterations, &mut posted, &mut receives))
    }

    fn time(&self, warm_up: u32, mut run: impl FnMut(Range<u32>) -> Result<()>) -> Result<Duration> {
        self.comm.barrier(self.timeout)?;
        run(0..warm_up)?;
        self.comm.barrier(self.timeout)?;
        let start = Instant::now();
        run(warm_up..self.options.iters)?;
        Ok(start.elapsed())
    }

    /// The requests of an iteration are as many as there are neighbours.
    fn post_receives(
        &self,
        receives: &mut VecDeque<Vec<Request>>,
        iterations: impl Iterator<Item = u32>,
    ) -> Result<()> {
        for n in iterations {
            let receive = |neighbour: &Neighbour| {
                let lost = self.options.lose == Some(n);
                let halo = if lost { self.block.spare() } else { self.block.halo(after(n), neighbour.halo) };
                self.comm.irecv(&self.buffer, halo, neighbour.rank)
            };
            receives.push_back(self.neighbours.iter().map(receive).collect::<mp::Result<_>>()?);
        }
        Ok(())
    }

    fn run(
        &self,
        iterations: Range<u32>,
        posted: &mut Range<u32>,
        receives: &mut VecDeque<Vec<Request>>,
    ) -> Result<()> {
        let Range { mut start, end } = iterations;
        while start < end {
            // Receives are always posted a window before a neighbour can need them.
            let window = self.options.ahead.min(end - start);
            for n in start..start + window {
                let receives = receives.pop_front().ok_or("an iteration without its receives")?;
                match self.options.mode {
                    Mode::Sync => self.drive_iteration(n, &receives)?,
                    Mode::Stream | Mode::Graph => self.post_iteration(n, &receives)?,
                }
            }
            self.finish()?;
            self.post_receives(receives, posted.by_ref().take(window as usize))?;
            start += window;
        }
        Ok(())
    }

    /// An iteration posted on the stream, without waiting for anything.
    fn post_iteration(&self, n: u32, receives: &[Request]) -> Result<()> {
        self.relaxer.edges(before(n))?;
        let mut batch = Batch::new();
        let sent = self.neighbours.iter().map(|neighbour| {
            let edge = self.block.halo(after(n), neighbour.edge);
            self.comm.isend_in_batch(&mut batch, &self.buffer, edge, neighbour.rank)
        });
        let sent: Vec<Request> = sent.collect::<mp::Result<_>>()?;
        self.submit(&mut batch)?;
        self.relaxer.inside(before(n))?;
        for request in receives.iter().chain(&sent) {
            self.comm.wait_in_batch(&mut batch, request)?;
        }
        self.submit(&mut batch)
    }

    /// Waits for all that is posted.
    pub(super) fn finish(&self) -> Result<()> {
        self.lane.finish()?;
        self.relaxer.check()
    }

    pub(super) fn submit(&self, batch: &mut Batch) -> Result<()> {
        // A single rank has nobody to talk to.
        if batch.is_empty() { Ok(()) } else { Ok(self.lane.stream.submit(batch)?) }
    }

    /// An iteration whose messages the CPU sends and awaits.
    fn drive_iteration(&self, n: u32, receives: &[Request]) -> Result<()> {
        self.relaxer.edges(before(n))?;
        self.lane.idle()?;
        let sent = self.neighbours.iter().map(|neighbour| {
            let edge = self.block.halo(after(n), neighbour.edge);
            self.comm.isend(&self.buffer, edge, neighbour.rank)
        });
        let sent: Vec<Request> = sent.collect::<mp::Result<_>>()?;
        self.relaxer.inside(before(n))?;
        self.comm.wait_all(receives.iter().chain(&sent), self.timeout)?;
        Ok(())
    }
}

/// The state that iteration `n` reads.
pub(super) fn before(n: u32) -> usize {
    n as usize % 2
}

/// The state that iteration `n` writes.
pub(super) fn after(n: u32) -> usize {
    1 - before(n)
}
