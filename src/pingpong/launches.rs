//! Modes graph and initiate: iterations are captured or recorded once, and launched again and again. Two launches are under
//! way, so that the stream never runs dry; the CPU sleeps meanwhile.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use gdsync::stream::{Batch, Launch, Stream};

use super::judge::Judge;
use super::kernels::KernelJudge;
use super::pair::Pair;
use super::player::Player;
use crate::lane::Result;

/// Launches under way.
const UNDER_WAY: usize = 2;

/// Launches some iterations, and waits for room for so long.
type Lap<'a> = Box<dyn Fn(&Stream, Duration) -> Result<Launch> + 'a>;

/// The launches that it takes to play so many iterations.
pub(super) struct Launches<'a> {
    /// Iterations of a launch, and how it is launched; at last one of fewer, if need be.
    laps: Vec<(u64, Lap<'a>)>,
    each: u64,
    total: u64,
    pair: Pair,
}

impl<'a> Launches<'a> {
    /// Makes laps of `each` iterations, and posts the receives of the first launches.
    pub(super) fn new(
        mut pair: Pair,
        each: u64,
        total: u64,
        lap: impl Fn(&Pair, u64) -> Result<Lap<'a>>,
    ) -> Result<Self> {
        let each = each.min(total);
        pair.receive_before(total.min(UNDER_WAY as u64 * each))?;
        let counts = [each, total % each].into_iter().filter(|&count| count > 0);
        let laps = counts.map(|count| Ok((count, lap(&pair, count)?)));
        Ok(Self { laps: laps.collect::<Result<_>>()?, each, total, pair })
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
            let lap = self.laps.iter().find(|(of, _)| *of == count).map(|(_, lap)| lap);
            self.pair.receive_before(self.total.min(done + count + self.each))?;
            under_way.push_back(lap.ok_or("a lap for each launch")?(stream, timeout)?);
            done += count;
        }
        Ok(())
    }
}

/// Captures so many iterations as a graph.
pub(super) fn captured<'a>(
    player: &Player<'_>,
    judge: &dyn Judge,
    pair: &Pair,
    count: u64,
) -> Result<Lap<'a>> {
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
    let graph = capture.end()?;
    Ok(Box::new(move |stream, timeout| Ok(graph.launch_within(stream, timeout)?)))
}

/// Records so many iterations for a kernel that waits and sends by itself.
pub(super) fn initiated<'a>(
    player: &Player<'_>,
    judge: &'a KernelJudge<'_>,
    pair: &Pair,
    count: u64,
) -> Result<Lap<'a>> {
    let work = player.work_time();
    // Behind the work; without any it is one step with the send.
    let waits_first = !player.serves() && !work.is_zero();
    let steps = player.lane.stream.record_steps(|stream| {
        for _ in 0..count {
            let mut batch = Batch::new();
            if !player.serves() {
                batch.wait_recv(&pair.qp)?;
            }
            if waits_first {
                stream.submit(&mut batch)?;
            }
            pair.send(&mut batch)?;
            // The buffer is filled anew behind this. It has left before the answer comes.
            batch.wait_all_sends(&pair.qp)?;
            if player.serves() {
                batch.wait_recv(&pair.qp)?;
            }
            stream.submit(&mut batch)?;
        }
        Ok(())
    })?;
    Ok(Box::new(move |stream, timeout| {
        steps.launch_within(stream, timeout, |program| judge.initiate(program, count, work, waits_first))
    }))
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
