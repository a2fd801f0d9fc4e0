//! Peer copies: the parts of a window that streams of this rank's GPU write and read directly.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gdsync::cuda::Gpu;
use gdsync::memory::{Memory, PeerMemory};
use gdsync::stream::{Batch, PeerSignal, Replenish, Stream};

use super::Part;
use crate::communicator::Communicator;
use crate::error::Result;
use crate::offer::{Offer, Reach, refuse_queues};
use crate::registration::Registration;

/// The parts of all ranks.
#[derive(Debug)]
pub(super) struct Near {
    /// The GPU that they are open for.
    gpu: Option<Gpu>,
    parts: Vec<Reach>,
    is_over: Arc<IsOver>,
}

/// Whether the window was destroyed: the owners of its parts may free them.
#[derive(Debug, Default)]
struct IsOver(AtomicBool);

impl IsOver {
    fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Replenish for IsOver {
    fn replenish(&self) -> gdsync::Result<()> {
        match self.get() {
            false => Ok(()),
            true => Err(gdsync::Error::Unsupported {
                what: "a launch of a graph with peer copies of a window that was destroyed",
                by: "the window, whose memory the other rank may have freed",
                fix: "destroy the window after the last launch",
            }),
        }
    }
}

impl Near {
    /// Opens the parts of ranks of this host for the GPU of the own part, or that of the communicator.
    ///
    /// # Errors
    /// [`Error::Device`] with [`NearPath::PeerCopies`] where GPU memory on this host is not reached.
    pub(super) fn open(comm: &Communicator, own: &Registration, parts: &[(Part, Offer)]) -> Result<Self> {
        let gpu = own.memory().gpu().or(comm.0.settings.queues.gpu.as_ref()).cloned();
        let open =
            |(rank, (part, offer)): (usize, &(Part, Offer))| offer.open(comm, rank, gpu.as_ref(), part.size);
        let reached: Vec<_> = parts.iter().enumerate().map(open).collect();
        for (rank, reach) in reached.iter().enumerate() {
            if let Err(why) = reach
                && gpu.is_some()
                && parts[rank].1.is_on_gpu()
                && comm.0.paths[rank].is_on_this_host()
            {
                refuse_queues(comm, "the window", rank, why)?;
            }
        }
        Ok(Self { gpu, parts: reached, is_over: Arc::default() })
    }

    /// The ranks whose parts are open.
    pub(super) fn ranks(&self) -> impl Iterator<Item = usize> {
        self.parts.iter().enumerate().filter(|(_, reach)| reach.is_ok()).map(|(rank, _)| rank)
    }

    /// Lets no more peer copies start.
    pub(super) fn end(&self) {
        self.is_over.0.store(true, Ordering::Relaxed);
    }

    /// Refuses launches of graphs after the end.
    pub(super) fn before_launches(&self) -> Arc<dyn Replenish> {
        self.is_over.clone()
    }

    /// The part of a rank, or why there are no peer copies to it.
    pub(super) fn part(&self, rank: usize) -> std::result::Result<&PeerMemory, &str> {
        match &self.parts[rank] {
            Ok(_) if self.is_over.get() => Err("the window was destroyed"),
            reach => reach.as_ref().map_err(|why| &**why),
        }
    }

    /// Whether a stream can take peer copies now.
    pub(super) fn is_for(&self, stream: &Stream) -> bool {
        self.gpu.as_ref().is_some_and(|gpu| stream.takes_peer_copies(gpu))
    }

    /// Whether streams of the GPU copy to or from this memory.
    pub(super) fn is_near(&self, memory: &Memory) -> bool {
        self.gpu.as_ref().is_some_and(|gpu| memory.is_on(gpu))
    }
}

/// What a stream does for an operation: a copy, a signal, or a copy and a signal behind it.
pub(super) struct PeerCopies<'a> {
    pub(super) copy: Option<Copy<'a>>,
    pub(super) signal: Option<PeerSignal>,
    pub(super) before_launches: [Arc<dyn Replenish>; 2],
}

/// A copy between own memory and that of another rank.
pub(super) struct Copy<'a> {
    /// To the other rank.
    pub(super) puts: bool,
    pub(super) local: &'a Memory,
    pub(super) range: Range<usize>,
    pub(super) target: &'a PeerMemory,
    pub(super) offset: usize,
}

impl PeerCopies<'_> {
    /// Adds it to a batch; on an error nothing is added.
    pub(super) fn add(&self, batch: &mut Batch) -> gdsync::Result<()> {
        self.before_launches.iter().for_each(|hook| batch.before_launches(hook));
        let signal = self.signal.clone();
        match &self.copy {
            Some(Copy { puts: true, local, range, target, offset }) => {
                return batch.put_peer(local, range.clone(), target, *offset, signal);
            }
            Some(Copy { local, range, target, offset, .. }) => {
                batch.get_peer(target, *offset, local, range.clone())?;
            }
            None => {}
        }
        // Its place was checked.
        signal.map_or(Ok(()), |signal| batch.signal_peer(signal))
    }
}
