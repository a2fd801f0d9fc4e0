//! Mode graph: iterations are captured once and launched again and again. Two launches are under way, so that the stream
//! never runs dry; the CPU sleeps meanwhile.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use gdsync::stream::{Batch, Graph, Launch, Stream};

use super::judge::Judge;
use super::pair::Pair;
use super::player::Player;
use crate::lane::Result;

/// Launches under way.
const UNDER_WAY: usize = 2;

/// The launches that it takes to play so many iterations.
pub(super) struct Launches {
    /// Iterations of a launch, and its graph; at last one of fewer, if need be.
    graphs: Vec<(u64, Graph)>,
    each: u64,
    total: u64,
    pair: Pair,
}

impl Launches {
    /// Captures the graphs, which have `each` iterations, and posts the receives of the first launches.
    pub(super) fn new(
        player: &Player<'_>,
        judge: &dyn Judge,
        mut pair: Pair,
        each: u64,
        total: u64,
    ) -> Result<Self> {
        let each = each.min(total);
        pair.receive_before(total.min(UNDER_WAY as u64 * each))?;
        let counts = [each, total % each].into_iter().filter(|&count| count > 0);
        let graphs = counts.map(|count| Ok((count, capture(player, judge, &pair, count)?)));
        Ok(Self { graphs: graphs.collect::<Result<_>>()?, each, total, pair })
    }

    /// How many messages a queue needs room for: those of the launches under way, of the next, and of one that nobody has
    /// taken completions of yet.
    pub(super) fn room(each: u64) -> Result<usize> {
        Ok((UNDER_WAY + 2) * usize::try_from(each)?)
    }

    /// Launches until all iterations are queued. Receives are posted a launch before the peer can need them.
    pub(super) fn run(&mut self, stream: &Stream, timeout: Duration) -> Result<()> {
        let mut pace = Pace::default();
        let mut under_way = VecDeque::with_capacity(UNDER_WAY);
        let mut done = 0;
        while done < self.total {
            if under_way.len() == UNDER_WAY {
                let first: Option<Launch> = under_way.pop_front();
                first.map_or(Ok(()), |launch| pace.wait(&launch, stream, timeout))?;
            }
            let count = self.each.min(self.total - done);
            let graph = self.graphs.iter().find(|(of, _)| *of == count).map(|(_, graph)| graph);
            self.pair.receive_before(self.total.min(done + count + self.each))?;
            let launch = graph.ok_or("a graph for each launch")?.launch_within(stream, timeout)?;
            under_way.push_back(launch);
            done += count;
        }
        Ok(())
    }
}

/// Captures so many iterations.
fn capture(player: &Player<'_>, judge: &dyn Judge, pair: &Pair, count: u64) -> Result<Graph> {
    let stream = &player.lane.stream;
    let capture = stream.begin_capture()?;
    for _ in 0..count {
        let mut batch = Batch::new();
        if !player.serves() {
            batch.wait_recv(&pair.qp)?;
        }
        player.work_after(&mut batch)?;
        pair.send(&mut batch)?;
        if player.serves() {
            batch.wait_recv(&pair.qp)?;
        }
        // The buffer is filled anew below.
        batch.wait_all_sends(&pair.qp)?;
        stream.submit(&mut batch)?;
        judge.turn()?;
    }
    Ok(capture.end()?)
}

/// How long launches take.
#[derive(Default)]
struct Pace {
    last: Option<Instant>,
    each: Duration,
}

impl Pace {
    /// Waits for a launch; almost all of the time that the one before took, it does not even look:
    /// one more is under way.
    fn wait(&mut self, launch: &Launch, stream: &Stream, timeout: Duration) -> Result<()> {
        if let Some(last) = self.last {
            std::thread::sleep((self.each * 15 / 16).min(timeout).saturating_sub(last.elapsed()));
        }
        launch.wait(stream, timeout)?;
        let now = Instant::now();
        self.each = self.last.map_or(Duration::ZERO, |last| now - last);
        self.last = Some(now);
        Ok(())
    }
}
