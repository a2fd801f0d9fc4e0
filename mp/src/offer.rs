//! What a rank tells the others of memory that streams of their GPUs may access, and how they open it.

use std::borrow::Cow;
use std::ops::Range;

use gdsync::cuda::Gpu;
use gdsync::memory::{ExportedMemory, Memory, PeerMemory};

use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::path::NearPath;

/// Why a rank does not export memory: the codes of the wire.
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
            1 => "the memory of the other rank is not of a GPU",
            2 => {
                "the GPU memory of the other rank has no CUDA IPC handle: it needs memory of cudaMalloc (Gpu::alloc)"
            }
            3 => "the other rank asked for queue pairs (MP_NEAR, or the builder)",
            _ => "the other rank does not export its memory",
        }
    }
}

/// Memory of a rank as the others open it: 0 and the export, or why there is none.
#[derive(Clone)]
pub(crate) struct Offer([u8; Offer::BYTES]);

impl Offer {
    pub(crate) const BYTES: usize = 1 + ExportedMemory::BYTES;

    /// Exports a range of memory, if this rank may, and returns what the others will open.
    pub(crate) fn new(near: NearPath, memory: &Memory, range: &Range<usize>) -> (Self, Option<Memory>) {
        let mut bytes = [0; Self::BYTES];
        match export(near, memory, range) {
            Ok((memory, exported)) => {
                bytes[1..].copy_from_slice(&exported.to_bytes());
                (Self(bytes), Some(memory))
            }
            Err(refusal) => {
                bytes[0] = refusal as u8;
                (Self(bytes), None)
            }
        }
    }

    /// Nothing.
    pub(crate) fn none(near: NearPath) -> Self {
        let mut bytes = [0; Self::BYTES];
        let refusal = if near == NearPath::Queues { Refusal::Queues } else { Refusal::NotOnGpu };
        bytes[0] = refusal as u8;
        Self(bytes)
    }

    /// Whether others can open it.
    pub(crate) fn is_open(&self) -> bool {
        self.0[0] == 0
    }

    pub(crate) fn to_bytes(&self) -> [u8; Self::BYTES] {
        self.0
    }

    pub(crate) fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        Self(*bytes)
    }

    /// Whether it is of GPU memory.
    pub(crate) fn is_on_gpu(&self) -> bool {
        self.0[0] != Refusal::NotOnGpu as u8
    }

    /// Opens what a rank offers, of so many bytes, for a GPU of this one; or says why not.
    pub(crate) fn open(&self, comm: &Communicator, rank: usize, gpu: Option<&Gpu>, len: usize) -> Reach {
        if comm.0.settings.near == NearPath::Queues {
            return Err("this rank asked for queue pairs (MP_NEAR, or the builder)".into());
        }
        if !comm.0.paths[rank].is_on_this_host() {
            return Err("the rank is on another host".into());
        }
        let gpu = gpu.ok_or("this rank has no GPU: give one to CommunicatorBuilder::gpu")?;
        match self.0[0] {
            0 => {}
            code => return Err(Refusal::reason(code).into()),
        }
        let exported = ExportedMemory::from_bytes(&self.0[1..]);
        match exported.and_then(|memory| PeerMemory::open(gpu, &memory)) {
            Ok(memory) if memory.len() == len => Ok(memory),
            Ok(_) => Err("the other rank exports other memory than it names".into()),
            Err(error) => Err(error.to_string().into()),
        }
    }
}

fn export(
    near: NearPath,
    memory: &Memory,
    range: &Range<usize>,
) -> std::result::Result<(Memory, ExportedMemory), Refusal> {
    match () {
        () if near == NearPath::Queues => return Err(Refusal::Queues),
        () if memory.gpu().is_none() || range.is_empty() => return Err(Refusal::NotOnGpu),
        () => {}
    }
    let exported = memory.slice(range.start, range.len()).and_then(|part| Ok((part.clone(), part.export()?)));
    exported.map_err(|error| {
        tracing::info!(%error, ?memory, "no peer copies into this memory");
        Refusal::NoHandle
    })
}

/// Memory of a GPU that is 0, with words for the CPU.
pub(crate) fn zeroed(gpu: &Gpu, len: usize) -> gdsync::Result<Memory> {
    let memory = gpu.alloc(len)?;
    memory.fill(0, memory.len(), 0)?;
    memory.flush()?;
    memory.word64(0)?;
    Ok(memory)
}

/// Memory of a rank, open for the own GPU, or why it is not.
pub(crate) type Reach = std::result::Result<PeerMemory, Cow<'static, str>>;

/// Refuses what has no peer copies to a rank where [`NearPath::PeerCopies`] wants them.
///
/// # Errors
/// [`Error::Device`].
pub(crate) fn refuse_queues(comm: &Communicator, what: &'static str, rank: usize, why: &str) -> Result<()> {
    match comm.0.settings.near {
        NearPath::PeerCopies => Err(Error::Device(gdsync::Error::InvalidArgument {
            what,
            value: format!("one without peer copies to rank {rank}: {why}"),
            expected: "one with peer copies (NearPath::PeerCopies); MP_NEAR=auto uses queue pairs instead",
        })),
        _ => Ok(()),
    }
}
