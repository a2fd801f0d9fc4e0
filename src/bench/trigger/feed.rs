//! Work that keeps streams busy while something else is measured.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::gpu::{Batch, Gpu, Graph, Kernel, Op, Stream};
use super::scene::until;
use super::words::Word;
use crate::bench::Result;

/// What one submission is.
#[derive(Clone, Copy)]
pub(super) enum Work {
    /// A [`graph`] of kernels.
    Graph(Graph),
    /// One kernel of [`KERNEL`].
    Kernel,
    /// A batch of [`WRITES`] write MemOps.
    Writes,
}

/// How long a kernel spins.
pub(super) const KERNEL: Duration = Duration::from_micros(5);
/// Kernels of a graph.
const KERNELS: u32 = 64;
/// Operations of a batch.
const WRITES: u32 = 64;
/// Streams that one thread can keep filled.
const STREAMS: usize = 4;

impl Work {
    /// Submissions that may be pending: a few hundred microseconds of work.
    fn depth(self) -> u32 {
        match self {
            Self::Graph(_) => 3,
            Self::Kernel => 48,
            Self::Writes => 4,
        }
    }
}

/// A stream that is kept filled.
#[derive(Clone, Copy)]
pub(super) struct Lane {
    pub(super) stream: Stream,
    pub(super) work: Work,
    /// How many submissions are done.
    pub(super) done: Word,
    /// Where writes go that mean nothing.
    pub(super) scratch: Word,
}

/// A graph of kernels one after the other, the last of which counts in `done`: single launches of such short kernels
/// would keep neither the streams full nor the driver free.
pub(super) fn graph(gpu: &Gpu, stream: Stream, done: Word) -> Result<Graph> {
    gpu.graph(stream, || {
        (1..=KERNELS).try_for_each(|i| {
            gpu.launch(stream, Kernel::Spin { count: (i == KERNELS).then_some(done), time: KERNEL })
        })
    })
}

/// Threads that keep streams filled.
pub(super) struct Feeder {
    gpu: &'static Gpu,
    lanes: Vec<Lane>,
    start: Instant,
    /// What was done before.
    before: Vec<u32>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<std::result::Result<(), String>>>,
}

impl Feeder {
    pub(super) fn start(gpu: &'static Gpu, lanes: Vec<Lane>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let before = lanes.iter().map(|lane| lane.done.load()).collect();
        let start = Instant::now();
        let feed_some = |lanes: &[Lane]| {
            let (mut lanes, stop) = (Vec::from(lanes), stop.clone());
            thread::spawn(move || feed(gpu, &mut lanes, &stop).map_err(|e| e.to_string()))
        };
        let threads = lanes.chunks(STREAMS).map(feed_some).collect();
        Self { gpu, lanes, start, before, stop, threads }
    }

    /// Lets the streams run dry. Gives the share of the time for which kernels of a graph ran in each.
    pub(super) fn stop(self, limit: Duration) -> Result<f64> {
        let done = |(lane, before): (&Lane, &u32)| lane.done.load().wrapping_sub(*before);
        let submissions: u32 = self.lanes.iter().zip(&self.before).map(done).sum();
        let ran = (KERNELS * KERNEL).as_secs_f64() * f64::from(submissions);
        let lanes = f64::from(u32::try_from(self.lanes.len())?);
        let share = ran / self.start.elapsed().as_secs_f64() / lanes;
        self.stop.store(true, Ordering::Release);
        for thread in self.threads {
            thread.join().map_err(|_| "a thread that keeps streams filled panicked")??;
        }
        for lane in &self.lanes {
            until(limit, "a stream that was kept filled did not end", || self.gpu.idle(lane.stream))?;
        }
        Ok(share)
    }
}

/// Keeps the streams filled until told to stop.
fn feed(gpu: &Gpu, lanes: &mut [Lane], stop: &AtomicBool) -> Result<()> {
    let _current = gpu.enter()?;
    let mut issued: Vec<_> = lanes.iter().map(|lane| lane.done.load()).collect();
    while !stop.load(Ordering::Acquire) {
        for (lane, issued) in lanes.iter_mut().zip(&mut issued) {
            while issued.wrapping_sub(lane.done.load()) < lane.work.depth() && !stop.load(Ordering::Acquire) {
                *issued = issued.wrapping_add(1);
                lane.submit(gpu, *issued)?;
            }
        }
        thread::sleep(Duration::from_micros(1));
    }
    Ok(())
}

impl Lane {
    /// Submits work after which `number` submissions are done.
    fn submit(&self, gpu: &Gpu, number: u32) -> Result<()> {
        match self.work {
            Work::Graph(graph) => gpu.launch_graph(self.stream, graph),
            Work::Kernel => gpu.launch(self.stream, Kernel::Spin { count: Some(self.done), time: KERNEL }),
            Work::Writes => {
                let writes = (1..WRITES).map(|_| Op::Write(self.scratch, number));
                gpu.batch(self.stream, &mut Batch::new(writes.chain([Op::Write(self.done, number)])))
            }
        }
    }
}
