//! Peer copies: the parts of a window that streams of this rank's GPU write and read directly.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gdsync::cuda::Gpu;
use gdsync::memory::{ExportedMemory, Memory, PeerMemory};
use gdsync::stream::{Batch, PeerSignal, Replenish, Stream};

use super::Part;
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::path::NearPath;
use crate::registration::Registration;

/// Why a rank does not export its part: the codes of the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Refusal {
    NotOnGpu = 1,
    NoHandle = 2,
    Queues = 3,
}

impl Refusal {
    fn reason(code: u8) -> &'static str {
        match code {
            1 => "the part of the other rank is not in GPU memory",
            2 => {
                "the GPU memory of the other rank has no CUDA IPC handle: it needs memory of cudaMalloc (Gpu::alloc)"
            }
            3 => "the other rank asked for queue pairs (MP_NEAR, or the builder)",
            _ => "the other rank does not export its memory",
        }
    }
}

/// What a rank tells the others about the memory of its part: 0 and the export, or why there is none.
pub(super) struct Offer([u8; Offer::BYTES]);

impl Offer {
    pub(super) const BYTES: usize = 1 + ExportedMemory::BYTES;

    /// Exports the part of this rank, if it may, and returns what the others will open.
    pub(super) fn new(
        near: NearPath,
        registration: &Registration,
        range: &Range<usize>,
    ) -> (Self, Option<Memory>) {
        match export(near, registration, range) {
            Ok((memory, exported)) => {
                let mut bytes = [0; Self::BYTES];
                bytes[1..].copy_from_slice(&exported.to_bytes());
                (Self(bytes), Some(memory))
            }
            Err(refusal) => {
                let mut bytes = [0; Self::BYTES];
                bytes[0] = refusal as u8;
                (Self(bytes), None)
            }
        }
    }

    pub(super) fn to_bytes(&self) -> [u8; Self::BYTES] {
        self.0
    }

    pub(super) fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        Self(*bytes)
    }

    /// Opens it for a GPU, or says why not.
    fn open(&self, gpu: &Gpu, part: &Part) -> Reach {
        match self.0[0] {
            0 => {}
            code => return Err(Refusal::reason(code).into()),
        }
        let opened =
            ExportedMemory::from_bytes(&self.0[1..]).and_then(|memory| PeerMemory::open(gpu, &memory));
        match opened {
            Ok(memory) if memory.len() == part.size => Ok(memory),
            Ok(_) => Err("the other rank exports other memory than its part".into()),
            Err(error) => Err(error.to_string().into()),
        }
    }
}

fn export(
    near: NearPath,
    registration: &Registration,
    range: &Range<usize>,
) -> std::result::Result<(Memory, ExportedMemory), Refusal> {
    let memory = registration.memory();
    match () {
        () if near == NearPath::Queues => return Err(Refusal::Queues),
        () if memory.gpu().is_none() || range.is_empty() => return Err(Refusal::NotOnGpu),
        () => {}
    }
    let exported = memory.slice(range.start, range.len()).and_then(|part| Ok((part.clone(), part.export()?)));
    exported.map_err(|error| {
        tracing::info!(%error, ?memory, "no peer copies into this part of a window");
        Refusal::NoHandle
    })
}

/// The part of a rank, open for the own GPU, or why it is not.
pub(super) type Reach = std::result::Result<PeerMemory, Cow<'static, str>>;

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
        let settings = &comm.0.settings;
        let gpu = own.memory().gpu().or(settings.queues.gpu.as_ref()).cloned();
        let open = |(rank, (part, offer)): (usize, &(Part, Offer))| {
            let path = &comm.0.paths[rank];
            match &gpu {
                _ if settings.near == NearPath::Queues => {
                    Err("this rank asked for queue pairs (MP_NEAR, or the builder)".into())
                }
                _ if !path.is_on_this_host() => Err("the rank is on another host".into()),
                None => Err("this rank has no GPU: give one to CommunicatorBuilder::gpu".into()),
                Some(gpu) => offer.open(gpu, part),
            }
        };
        let reached: Vec<_> = parts.iter().enumerate().map(open).collect();
        if settings.near == NearPath::PeerCopies {
            let is_wanted = |rank: usize| {
                let is_on_gpu = parts[rank].1.0[0] != Refusal::NotOnGpu as u8;
                gpu.is_some() && is_on_gpu && comm.0.paths[rank].is_on_this_host()
            };
            let mut missing = reached.iter().enumerate().filter(|(rank, _)| is_wanted(*rank));
            if let Some((rank, Err(why))) = missing.find(|(_, reach)| reach.is_err()) {
                return Err(Error::Device(gdsync::Error::InvalidArgument {
                    what: "the window",
                    value: format!("one without peer copies to rank {rank}: {why}"),
                    expected: "one with peer copies (NearPath::PeerCopies); MP_NEAR=auto uses queue pairs instead",
                }));
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
        let context = |gpu: &Gpu| gpu.raw_context();
        self.gpu.as_ref().is_some_and(|gpu| memory.gpu().map(context) == Some(context(gpu)))
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
