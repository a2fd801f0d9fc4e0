//! The iterations of one rank: rows at the edges first, so that the rest is computed while they travel.

use crate::grid::Block;
use crate::{Mode, Options};
use gdasync::app_stream::{AppStream, Kernel, Kernels, ptx};
use gdasync::results::Result;
use gdsync::stream::{Batch, Graph, Launch};
use mp::{Channel, Communicator, Piece, Registration, Request};
use std::collections::VecDeque;
use std::ffi::CStr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The iterations of one rank.
pub(crate) struct Solver<'a> {
    pub(crate) options: &'a Options,
    pub(crate) comm: &'a Communicator,
    pub(crate) app: &'a AppStream,
    pub(crate) relaxer: Relaxer<'a>,
    pub(crate) block: Block,
    pub(crate) buffer: Registration,
    pub(crate) neighbours: Vec<Neighbour>,
}

/// A rank above or below.
pub(crate) struct Neighbour {
    pub(crate) rank: usize,
    /// The row of this block that it needs.
    pub(crate) edge: usize,
    /// The row beside this block that it computes.
    pub(crate) halo: usize,
}

impl<'a> Solver<'a> {
    pub(crate) fn new(
        options: &'a Options,
        comm: &'a Communicator,
        app: &'a AppStream,
        relaxer: Relaxer<'a>,
        block: &Block,
        buffer: &Registration,
    ) -> Self {
        let (rank, rows) = (comm.rank(), block.rows);
        let above = rank.checked_sub(1).map(|rank| Neighbour { rank, edge: 1, halo: 0 });
        let below = Some(Neighbour { rank: rank + 1, edge: rows, halo: rows + 1 });
        let neighbours = above.into_iter().chain(below.filter(|below| below.rank < comm.size())).collect();
        let (block, buffer) = (block.clone(), buffer.clone());
        Self { options, comm, app, relaxer, block, buffer, neighbours }
    }

    /// Bytes that this rank sends in an iteration.
    pub(crate) fn halo_bytes(&self) -> usize {
        self.neighbours.len() * self.block.halo(0, 0).len()
    }

    /// Runs all iterations; the time of those after `warm_up` is returned.
    pub(crate) fn solve(&self, warm_up: u32) -> Result<Duration> {
        let total = self.options.iters;
        if self.options.mode != Mode::Sync {
            let channels = Channels::new(self)?;
            return self.time(warm_up, |iterations| channels.run(iterations));
        }
        let mut posted = 0..total;
        let mut receives = VecDeque::new();
        self.post_receives(&mut receives, posted.by_ref().take(2 * self.options.ahead as usize))?;
        self.time(warm_up, |iterations| self.run(iterations, &mut posted, &mut receives))
    }

    pub(crate) fn time(
        &self,
        warm_up: u32,
        mut run: impl FnMut(Range<u32>) -> Result<()>,
    ) -> Result<Duration> {
        self.comm.barrier(None)?;
        run(0..warm_up)?;
        self.comm.barrier(None)?;
        let start = Instant::now();
        run(warm_up..self.options.iters)?;
        Ok(start.elapsed())
    }

    /// The requests of an iteration are as many as there are neighbours.
    pub(crate) fn post_receives(
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

    pub(crate) fn run(
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
                self.drive_iteration(n, &receives)?;
            }
            self.finish()?;
            self.post_receives(receives, posted.by_ref().take(window as usize))?;
            start += window;
        }
        Ok(())
    }

    /// Waits for all that is posted.
    pub(crate) fn finish(&self) -> Result<()> {
        self.app.finish()?;
        self.relaxer.check()
    }

    pub(crate) fn submit(&self, batch: &mut Batch) -> Result<()> {
        // A single rank has no neighbours.
        if batch.is_empty() { Ok(()) } else { Ok(self.app.stream.submit(batch)?) }
    }

    /// An iteration whose messages the CPU sends and awaits.
    pub(crate) fn drive_iteration(&self, n: u32, receives: &[Request]) -> Result<()> {
        self.relaxer.edges(before(n))?;
        self.app.idle()?;
        let sent = self.neighbours.iter().map(|neighbour| {
            let edge = self.block.halo(after(n), neighbour.edge);
            self.comm.isend(&self.buffer, edge, neighbour.rank)
        });
        let sent: Vec<Request> = sent.collect::<mp::Result<_>>()?;
        self.relaxer.inside(before(n))?;
        self.comm.wait_all(receives.iter().chain(&sent), None)?;
        Ok(())
    }
}

/// The state that iteration `n` reads.
pub(crate) fn before(n: u32) -> usize {
    n as usize % 2
}

/// The state that iteration `n` writes.
pub(crate) fn after(n: u32) -> usize {
    1 - before(n)
}

/// Iterations on the stream, through channels: one by one, or captured as a graph with the remainder of a run one by one.
pub(crate) struct Channels<'a> {
    solver: &'a Solver<'a>,
    /// One to each neighbour.
    channels: Vec<Channel>,
    graph: Option<Graph>,
    /// Iterations of a launch; even, as the two states alternate.
    each: u32,
}

impl<'a> Channels<'a> {
    /// All ranks must call it.
    pub(crate) fn new(solver: &'a Solver<'a>) -> Result<Self> {
        // Rows arrive in the two states alternately.
        let places: Vec<[Piece<'_>; 2]> = solver
            .neighbours
            .iter()
            .map(|neighbour| [0, 1].map(|n| (&solver.buffer, solver.block.halo(after(n), neighbour.halo))))
            .collect();
        let wanted = solver.neighbours.iter().zip(&places);
        let wanted: Vec<_> = wanted.map(|(neighbour, places)| (neighbour.rank, &places[..])).collect();
        let channels = solver.comm.channels(&wanted, None)?;
        let stream = &solver.app.stream;
        let each = solver.options.ahead.next_multiple_of(2);
        let graph = match solver.options.mode {
            Mode::Graph => {
                let capture = stream.begin_capture()?;
                (0..each).try_for_each(|n| iteration(solver, &channels, n))?;
                Some(capture.end()?)
            }
            _ => None,
        };
        channels.iter().try_for_each(|channel| channel.post_recv_on_stream(stream))?;
        Ok(Self { solver, channels, graph, each })
    }

    pub(crate) fn run(&self, iterations: Range<u32>) -> Result<()> {
        let (stream, timeout) = (&self.solver.app.stream, self.solver.comm.timeout());
        let Range { start: mut n, end } = iterations;
        // One launch runs while the next one is made.
        let mut running: Option<Launch> = None;
        while n < end {
            if let Some(graph) = &self.graph
                && n.is_multiple_of(2)
                && self.each <= end - n
            {
                let launch = graph.launch(&stream.with_timeout(timeout))?;
                running.replace(launch).map_or(Ok(()), |before| before.wait(stream, timeout))?;
                n += self.each;
            } else {
                running.take().map_or(Ok(()), |launch| launch.wait(stream, timeout))?;
                iteration(self.solver, &self.channels, n)?;
                n += 1;
                if n.is_multiple_of(self.solver.options.ahead) {
                    self.solver.finish()?;
                }
            }
        }
        self.solver.finish()
    }
}

/// An iteration, without waiting for anything. Credit for the rows that its neighbours compute in it was given before.
pub(crate) fn iteration(solver: &Solver<'_>, channels: &[Channel], n: u32) -> Result<()> {
    solver.relaxer.edges(before(n))?;
    let mut batch = Batch::new();
    let send = |(neighbour, channel): (&Neighbour, &Channel)| {
        let lost = solver.options.lose == Some(n);
        let edge = if lost { solver.block.spare() } else { solver.block.halo(after(n), neighbour.edge) };
        channel.isend_in_batch(&mut batch, &solver.buffer, edge)
    };
    let sent = solver.neighbours.iter().zip(channels).map(send).collect::<mp::Result<Vec<_>>>()?;
    solver.submit(&mut batch)?;
    solver.relaxer.inside(before(n))?;
    for channel in channels {
        // The state before this iteration is no longer read: the next one may write its rows.
        channel.post_recv_in_batch(&mut batch)?;
        _ = channel.wait_recv_in_batch(&mut batch)?;
    }
    solver.submit(&mut batch)?;
    sent.iter().try_for_each(|sent| Ok(solver.comm.wait_on_stream(&solver.app.stream, sent)?))
}

/// The compiled kernel.
pub(crate) const PTX: &CStr = ptx(concat!(include_str!("../kernels/jacobi2d.ptx"), "\0"));

/// The argument of the kernel, as in the source.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Rows {
    pub(crate) current: u64,
    pub(crate) next: u64,
    pub(crate) width: u64,
    pub(crate) first: u64,
    pub(crate) step: u64,
    pub(crate) count: u64,
}

const _: () = assert!(size_of::<Rows>() == 48, "as in the source");

/// Threads of a block of the kernel, the numbers that one computes at a time, and the most blocks: enough to fill a GPU.
pub(crate) const THREADS: u32 = 256;
pub(crate) const TILE: usize = 4 * THREADS as usize;
pub(crate) const MOST_BLOCKS: usize = 2048;

/// Computes rows on the stream.
pub(crate) struct Relaxer<'a> {
    pub(crate) app: &'a AppStream,
    pub(crate) block: Block,
    pub(crate) width: usize,
    /// The kernel, and the address of the block on its GPU.
    pub(crate) kernel: Option<(&'a Kernels, Kernel<Rows>, u64)>,
    /// A host function could not reach the block.
    pub(crate) failed: Arc<AtomicBool>,
}

impl<'a> Relaxer<'a> {
    pub(crate) fn new(app: &'a AppStream, block: &Block, width: usize) -> Result<Self> {
        let kernel = match &app.kernels {
            Some(kernels) => {
                // SAFETY: the parameter has the layout of `Rows`.
                let kernel = unsafe { kernels.find(c"relax") }?;
                Some((kernels, kernel, block.memory().gpu_addr(app.gpu()?)?))
            }
            None => None,
        };
        Ok(Self { app, block: block.clone(), width, kernel, failed: Arc::default() })
    }

    /// The rows that neighbours need, from `state` into the other one.
    pub(crate) fn edges(&self, state: usize) -> Result<()> {
        match self.block.rows {
            1 => self.rows(state, 1, 1, 1),
            rows => self.rows(state, 1, rows - 1, 2),
        }
    }

    /// All other rows.
    pub(crate) fn inside(&self, state: usize) -> Result<()> {
        match self.block.rows.saturating_sub(2) {
            0 => Ok(()),
            rows => self.rows(state, 2, 1, rows),
        }
    }

    pub(crate) fn rows(&self, state: usize, first: usize, step: usize, count: usize) -> Result<()> {
        let Some((kernels, kernel, addr)) = &self.kernel else {
            let (block, failed) = (self.block.clone(), self.failed.clone());
            let mut batch = Batch::new();
            batch.repeatable_host_fn(move || {
                if block.relax(state, (0..count).map(|row| first + row * step)).is_err() {
                    failed.store(true, Ordering::Relaxed);
                }
            });
            return Ok(self.app.stream.submit(&mut batch)?);
        };
        let rows = Rows {
            current: addr + self.block.state_at(state) as u64,
            next: addr + self.block.state_at(1 - state) as u64,
            width: self.width as u64,
            first: first as u64,
            step: step as u64,
            count: count as u64,
        };
        let tiles = count * (self.width - 2).div_ceil(TILE);
        // SAFETY: both states have these rows and those next to them, and the relaxer keeps them until the stream is idle.
        unsafe { kernels.launch(kernel, u32::try_from(tiles.min(MOST_BLOCKS))?, THREADS, rows) }
    }

    /// What went wrong on the stream, once it is idle.
    pub(crate) fn check(&self) -> Result<()> {
        match self.failed.load(Ordering::Relaxed) {
            true => Err("a host function could not reach its rows".into()),
            false => Ok(()),
        }
    }
}

impl Drop for Relaxer<'_> {
    fn drop(&mut self) {
        self.app.settle();
    }
}
