//! What all ways share: the GPU, its words and streams.

use std::time::Duration;

use gdasync::gdrcopy::Gdr;

use super::feed::{self, Feeder, Lane, Work};
use super::gpu::{Gpu, Kernel, Priority, Stream};
use super::scene::{Scene, See, Step};
use super::words::{Arena, Word};
use crate::bench::Result;

/// Streams are few and shared: the driver spreads them over channels (`CUDA_DEVICE_MAX_CONNECTIONS`), and two streams of
/// one channel would wait for each other.
pub(super) struct Lab {
    pub(super) gpu: &'static Gpu,
    pub(super) arena: Arena,
    /// The stream that is blocked and awaited.
    pub(super) work: Stream,
    /// The same with other priorities.
    pub(super) low: Stream,
    pub(super) high: Stream,
    /// Where the CPU submits to attract the GPU's attention.
    pub(super) nudge: Stream,
    pub(super) kick_high: Stream,
    /// A stream that some ways keep filled.
    pub(super) ticker: Stream,
    /// Streams kept filled while everything is measured, each with its work.
    busy: Vec<Lane>,
    /// After so long a kernel or host function that waits gives up: later than the CPU.
    pub(super) give_up: Duration,
    /// Where writes go that mean nothing.
    pub(super) scratch: Word,
}

impl Lab {
    /// With so many streams to keep filled, at most.
    pub(super) fn new(gpu: &'static Gpu, gdr: &Gdr, device: i32, busy: u32, limit: Duration) -> Result<Self> {
        let arena = Arena::new(gdr, device, gpu.pinned()?)?;
        let scratch = arena.host()?;
        let stream = |priority| gpu.stream(priority);
        let lane = |_| {
            let (stream, done) = (stream(Priority::Default)?, arena.host()?);
            Ok(Lane { stream, work: Work::Graph(feed::graph(gpu, stream, done)?), done, scratch })
        };
        Ok(Self {
            work: stream(Priority::Default)?,
            low: stream(Priority::Lowest)?,
            high: stream(Priority::Highest)?,
            nudge: stream(Priority::Default)?,
            kick_high: stream(Priority::Highest)?,
            ticker: stream(Priority::Default)?,
            busy: (0..busy).map(lane).collect::<Result<_>>()?,
            give_up: limit * 4,
            gpu,
            scratch,
            arena,
        })
    }

    /// Keeps so many streams filled.
    pub(super) fn busy(&self, streams: usize) -> Feeder {
        Feeder::start(self.gpu, self.busy[..streams].to_vec())
    }

    /// Keeps the ticker's stream filled.
    pub(super) fn company(&self, work: Work) -> Result<Box<dyn Fn() -> Result<Feeder>>> {
        let lane = Lane { stream: self.ticker, work, done: self.arena.host()?, scratch: self.scratch };
        let gpu = self.gpu;
        Ok(Box::new(move || Ok(Feeder::start(gpu, vec![lane]))))
    }

    /// A kernel that waits for the gate.
    pub(super) fn await_gate(&self, ready: Option<Word>, gate: Word, over: Option<Word>) -> Kernel {
        Kernel::AwaitGate { ready, gate, over, limit: self.give_up }
    }

    /// A scene on one stream, with the nudge streams in use as well.
    pub(super) fn scene(
        &self,
        stream: Stream,
        ready: Option<Word>,
        gate: Word,
        see: See,
        enqueue: Step,
    ) -> Scene {
        let (gpu, streams) = (self.gpu, [stream, self.nudge, self.kick_high]);
        let idle = move || {
            for stream in streams {
                if !gpu.idle(stream)? {
                    return Ok(false);
                }
            }
            Ok(true)
        };
        Scene { ready, gate, enqueue, act: None, see, idle: Box::new(idle), company: None }
    }
}
