//! Memory that both sides reach.

use std::sync::atomic::{AtomicU32, Ordering};

use gdrcopy::{BackendKind, GpuBuffer, Mapping};

use super::Where;
use super::super::tools_shared::{self, Pinned};
use super::super::tools_shared::Result;
use super::super::tools_shared::Memory;
use super::super::tools_shared::Target;

/// Words of memory that CPU and GPU reach.
#[derive(Debug)]
pub(super) enum Place {
    /// GPU memory, mapped.
    Gpu(Mapping, GpuBuffer),
    /// Host memory, pinned.
    Host(Pinned),
    /// Host memory where there is no GPU.
    Plain(Vec<AtomicU32>),
}

impl Place {
    /// So many words, all 0.
    pub(super) fn new(at: Where, words: usize, target: &Target, memory: Memory) -> Result<Self> {
        if at == Where::Gpumem {
            let buffer = target.gdr.alloc_with(target.gpu, words * 4, memory.alloc.kind())?;
            let mapping = buffer.pin()?.map_as(memory.mapping.request())?;
            return Ok(Self::Gpu(mapping, buffer));
        }
        if target.gdr.backend() == BackendKind::Host {
            return Ok(Self::Plain((0..words).map(|_| AtomicU32::new(0)).collect()));
        }
        Ok(Self::Host(Pinned::alloc(&cuda::context(target.gpu)?, words * 4)?))
    }

    /// The address for kernels; of no use where there is no GPU.
    pub(super) fn gpu_addr(&self) -> u64 {
        match self {
            Self::Gpu(_, buffer) => buffer.addr(),
            Self::Host(pinned) => pinned.addr(),
            Self::Plain(words) => words.as_ptr().addr() as u64,
        }
    }

    fn words(&self) -> Option<&[AtomicU32]> {
        match self {
            Self::Gpu(..) => None,
            Self::Host(pinned) => Some(pinned.words()),
            Self::Plain(words) => Some(words),
        }
    }

    /// Loads a word before all later loads.
    #[inline]
    pub(super) fn load(&self, index: usize) -> Result<u32> {
        match self {
            Self::Gpu(mapping, _) => Ok(mapping.load(index * 4)?),
            Self::Host(pinned) => Ok(pinned.words()[index].load(Ordering::Acquire)),
            Self::Plain(words) => Ok(words[index].load(Ordering::Acquire)),
        }
    }

    /// Stores a word after all earlier stores.
    #[inline]
    pub(super) fn store(&self, index: usize, value: u32) -> Result<()> {
        match self {
            Self::Gpu(mapping, _) => mapping.store(index * 4, value)?,
            Self::Host(pinned) => pinned.words()[index].store(value, Ordering::Release),
            Self::Plain(words) => words[index].store(value, Ordering::Release),
        }
        Ok(())
    }

    /// Writes bytes at the start, before all later stores.
    pub(super) fn write(&self, data: &[u8]) -> Result<()> {
        match (self, self.words()) {
            (Self::Gpu(mapping, _), _) => mapping.write(0, data)?,
            (_, words) => {
                for (word, bytes) in words.unwrap_or_default().iter().zip(data.as_chunks::<4>().0) {
                    word.store(u32::from_ne_bytes(*bytes), Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }

    /// Reads bytes from the start, before all later loads.
    pub(super) fn read(&self, out: &mut [u8]) -> Result<()> {
        match (self, self.words()) {
            (Self::Gpu(mapping, _), _) => mapping.read(0, out)?,
            (_, words) => {
                for (word, bytes) in words.unwrap_or_default().iter().zip(out.as_chunks_mut::<4>().0) {
                    *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
                }
            }
        }
        Ok(())
    }

    /// Returns when what was written is visible to kernels that run.
    pub(super) fn flush(&self) -> Result<()> {
        if let Self::Gpu(mapping, _) = self {
            mapping.flush()?;
        }
        Ok(())
    }
}
