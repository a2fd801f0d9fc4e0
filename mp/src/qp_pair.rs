//! Queue pairs to other ranks: how they are built and connected.

use gdsync::cuda::Gpu;
use gdsync::verbs::{OnGpu, Pd, Qp, QpAddress, QpBuilder};

/// Acknowledge timeout of all queue pairs: about a second, eight times before a rank counts as lost. On a busy machine only a
/// thread of the device may answer, and a slow rank must not be lost.
pub(crate) const ACK_TIMEOUT: u8 = 18;

/// What the queue pairs of messages are built with.
#[derive(Clone, Debug)]
pub(crate) struct QueueConfig {
    /// Messages in each direction.
    pub(crate) depth: usize,
    /// Pieces of a message.
    pub(crate) max_pieces: u32,
    pub(crate) gpu: Option<Gpu>,
    pub(crate) on_gpu: OnGpu,
}

impl QueueConfig {
    pub(crate) fn build_qp(&self, pd: &Pd) -> QpBuilder {
        // Retries for a missing receive without end: the deadlines of waits end what never comes.
        let builder = pd.build_qp().max_send_wr(self.depth).max_recv_wr(self.depth).rnr_retry(7);
        let builder = builder.timeout(ACK_TIMEOUT);
        let builder = builder.max_send_sge(self.max_pieces as usize).max_recv_sge(self.max_pieces);
        match &self.gpu {
            Some(gpu) => builder.on_gpu(gpu, self.on_gpu),
            None => builder,
        }
    }
}

/// The queue pair to one rank; for the own rank two that are connected to each other.
#[derive(Debug)]
pub(crate) struct QpPair {
    /// Sends to the rank.
    pub(crate) send: Qp,
    /// Receives from the rank: the same queue pair, except for the own rank.
    pub(crate) recv: Qp,
}

impl QpPair {
    /// Builds without connecting; a second queue pair for the own rank.
    pub(crate) fn build(is_own: bool, build: impl Fn() -> QpBuilder) -> gdsync::Result<Self> {
        let send = build().build()?;
        let recv = if is_own { build().build()? } else { send.clone() };
        Ok(Self { send, recv })
    }

    /// What the other rank connects to.
    pub(crate) fn address(&self) -> QpAddress {
        self.send.address()
    }

    /// Connects to the other rank, which has this address; the two of the own rank to each other.
    pub(crate) fn connect(&self, theirs: QpAddress) -> gdsync::Result<()> {
        if self.send.qpn() == self.recv.qpn() {
            return self.send.connect(theirs);
        }
        self.recv.connect(self.send.address())?;
        self.send.connect(self.recv.address())
    }

    /// Ends what is under way: see [`Qp::stop`].
    pub(crate) fn stop(&self, error: &gdsync::Error) {
        self.send.stop(error);
        self.recv.stop(error);
    }

    /// Whether a stream waits for completions of either.
    pub(crate) fn is_awaited(&self) -> bool {
        self.send.is_awaited() || self.recv.is_awaited()
    }

    /// Names both ranks in the flight recorder.
    pub(crate) fn name_ranks(&self, own: usize, other: usize) {
        self.send.name_ranks(own, other);
        self.recv.name_ranks(own, other);
    }
}
