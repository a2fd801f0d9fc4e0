//! Iterations as a graph: halo rows travel through channels, whose messages can be repeated.

use std::ops::Range;

use gdsync::stream::{Batch, Graph, Launch};
use mp::{Channel, Piece};

use crate::solver::{Neighbour, Solver, after, before};
use gdasync::lane::Result;

/// Iterations that are captured once. Those that a launch would be too many for are posted one by one, through the same
/// channels.
pub(crate) struct Repeated<'a> {
    solver: &'a Solver<'a>,
    /// One to each neighbour.
    channels: Vec<Channel>,
    graph: Graph,
    /// Iterations of a launch, which begins with an even one: both states take turns.
    each: u32,
}

impl<'a> Repeated<'a> {
    /// All ranks must call it.
    pub(crate) fn new(solver: &'a Solver<'a>) -> Result<Self> {
        // Rows come into both states by turns.
        let places: Vec<[Piece<'_>; 2]> = solver
            .neighbours
            .iter()
            .map(|neighbour| [0, 1].map(|n| (&solver.buffer, solver.block.halo(after(n), neighbour.halo))))
            .collect();
        let wanted = solver.neighbours.iter().zip(&places);
        let wanted: Vec<_> = wanted.map(|(neighbour, places)| (neighbour.rank, &places[..])).collect();
        let channels = solver.comm.channels(&wanted, solver.timeout)?;
        let stream = &solver.lane.stream;
        let each = solver.options.ahead.next_multiple_of(2);
        let capture = stream.begin_capture()?;
        (0..each).try_for_each(|n| iteration(solver, &channels, n))?;
        let graph = capture.end()?;
        channels.iter().try_for_each(|channel| channel.post_recv_on_stream(stream))?;
        Ok(Self { solver, channels, graph, each })
    }

    pub(crate) fn run(&self, iterations: Range<u32>) -> Result<()> {
        let (stream, timeout) = (&self.solver.lane.stream, self.solver.timeout);
        let Range { start: mut n, end } = iterations;
        // One launch runs while the next one is made.
        let mut running: Option<Launch> = None;
        while n < end {
            if n.is_multiple_of(2) && self.each <= end - n {
                let launch = self.graph.launch_within(stream, timeout)?;
                running.replace(launch).map_or(Ok(()), |before| before.wait(stream, timeout))?;
                n += self.each;
            } else {
                running.take().map_or(Ok(()), |launch| launch.wait(stream, timeout))?;
                iteration(self.solver, &self.channels, n)?;
                n += 1;
            }
        }
        self.solver.finish()
    }
}

/// An iteration, without waiting for anything. Credit for the rows that its neighbours compute in it was given before.
fn iteration(solver: &Solver<'_>, channels: &[Channel], n: u32) -> Result<()> {
    solver.relaxer.edges(before(n))?;
    let mut batch = Batch::new();
    let send = |(neighbour, channel): (&Neighbour, &Channel)| {
        let lost = solver.options.lose == Some(n);
        let edge = if lost { solver.block.spare() } else { solver.block.halo(after(n), neighbour.edge) };
        channel.send_in_batch(&mut batch, &solver.buffer, edge)
    };
    let sent = solver.neighbours.iter().zip(channels).map(send).collect::<mp::Result<Vec<_>>>()?;
    solver.submit(&mut batch)?;
    solver.relaxer.inside(before(n))?;
    for channel in channels {
        // Nobody reads the state before this iteration any more: its rows may be written by the next one.
        channel.post_recv_in_batch(&mut batch)?;
        channel.wait_recv_in_batch(&mut batch)?;
    }
    sent.iter().try_for_each(|sent| batch.wait(sent))?;
    solver.submit(&mut batch)
}
