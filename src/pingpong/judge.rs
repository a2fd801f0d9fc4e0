//! Who fills and checks the buffers, and takes the times: host functions, or kernels.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gdsync::stream::{Batch, Stream};

use super::board::Board;
use super::kernels::KernelJudge;
use super::options::Options;
use crate::lane::{Lane, Result};
use crate::measure::thread_cpu;

/// What came of all iterations.
pub(super) struct Verdict {
    /// Nanoseconds of each.
    pub(super) times: Vec<u64>,
    pub(super) errors: u64,
}

/// Fills and checks the buffers of a rank, and takes the times.
pub(super) trait Judge {
    /// Whether it does so on the stream in the modes too whose messages the CPU posts.
    fn always_on_stream(&self) -> bool;

    /// On the stream: the clock starts.
    fn start(&self) -> Result<()>;

    /// On the stream, also in a capture, after an iteration: the clock stops, what arrived is checked, the next message is
    /// prepared, the clock starts. Iterations are counted where they run.
    fn turn(&self) -> Result<()>;

    /// After an iteration that the CPU posted, which took so long. Returns the CPU time of checking.
    fn turn_by_cpu(&self, time: Duration) -> Result<Duration>;

    /// When all is done.
    fn verdict(&self) -> Result<Verdict>;
}

/// The judge that the options ask for.
pub(super) fn judge<'a>(
    options: &Options,
    lane: &'a Lane,
    board: &Board,
    total: u64,
) -> Result<Box<dyn Judge + 'a>> {
    board.prepare()?;
    Ok(match &lane.kernels {
        Some(kernels) if !options.no_kernels => Box::new(KernelJudge::new(kernels, lane, board, total)?),
        _ => Box::new(HostJudge::new(&lane.stream, board, total)),
    })
}

/// Host functions, or the thread that posts.
struct HostJudge<'a> {
    stream: &'a Stream,
    score: Arc<Score>,
}

struct Score {
    board: Board,
    origin: Instant,
    started: AtomicU64,
    turns: AtomicU64,
    times: Vec<AtomicU64>,
    errors: AtomicU64,
}

impl Score {
    fn now(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// After an iteration that took so long.
    fn turn(&self, time: u64) {
        let n = self.turns.fetch_add(1, Ordering::Relaxed);
        if let Some(place) = usize::try_from(n).ok().and_then(|n| self.times.get(n)) {
            place.store(time, Ordering::Relaxed);
        }
        if !matches!(self.board.turn(n), Ok(true)) {
            self.errors.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn start(&self) {
        self.started.store(self.now(), Ordering::Relaxed);
    }
}

impl<'a> HostJudge<'a> {
    fn new(stream: &'a Stream, board: &Board, total: u64) -> Self {
        let times = (0..total).map(|_| AtomicU64::new(0)).collect();
        let (board, origin) = (board.clone(), Instant::now());
        let [started, turns, errors] = [0; 3].map(AtomicU64::new);
        Self { stream, score: Arc::new(Score { board, origin, started, turns, times, errors }) }
    }
}

impl Judge for HostJudge<'_> {
    fn always_on_stream(&self) -> bool {
        false
    }

    fn start(&self) -> Result<()> {
        let score = self.score.clone();
        Ok(self.stream.host_fn(move || score.start())?)
    }

    fn turn(&self) -> Result<()> {
        let score = self.score.clone();
        let mut batch = Batch::new();
        batch.repeatable_host_fn(move || {
            score.turn(score.now() - score.started.load(Ordering::Relaxed));
            score.start();
        });
        Ok(self.stream.submit(&mut batch)?)
    }

    fn turn_by_cpu(&self, time: Duration) -> Result<Duration> {
        let start = thread_cpu();
        self.score.turn(u64::try_from(time.as_nanos())?);
        Ok(thread_cpu() - start)
    }

    fn verdict(&self) -> Result<Verdict> {
        let (turns, total) = (self.score.turns.load(Ordering::Relaxed), self.score.times.len());
        if usize::try_from(turns)? != total {
            return Err(format!("{turns} of {total} messages were checked").into());
        }
        let times = self.score.times.iter().map(|time| time.load(Ordering::Relaxed)).collect();
        Ok(Verdict { times, errors: self.score.errors.load(Ordering::Relaxed) })
    }
}
