//! Words that both CPU and GPU reach. They are never given back: a stream that is stuck may still use them.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

use gdasync::gdrcopy::{BackendKind, Gdr, Mapping};

use crate::bench::Result;

/// A word of 4 bytes with 8 bytes of place: 0 until something has happened, then 1 (or a count).
#[derive(Clone, Copy)]
pub(super) enum Word {
    /// Pinned host memory.
    Host(&'static AtomicU32),
    /// GPU memory, which the CPU reaches through a mapping, at this offset.
    Gpu(&'static Mapping, usize),
}

const INSIDE: &str = "words are inside their mapping and aligned";

impl Word {
    /// Its address for the GPU. Host memory of CUDA has the same for the CPU.
    pub(super) fn addr(self) -> u64 {
        match self {
            Self::Host(cell) => cell.as_ptr().addr() as u64,
            Self::Gpu(mapping, offset) => mapping.addr() + offset as u64,
        }
    }

    #[inline]
    pub(super) fn load(self) -> u32 {
        match self {
            Self::Host(cell) => cell.load(Ordering::Acquire),
            Self::Gpu(mapping, offset) => mapping.load(offset).expect(INSIDE),
        }
    }

    #[inline]
    pub(super) fn store(self, value: u32) {
        match self {
            Self::Host(cell) => cell.store(value, Ordering::Release),
            Self::Gpu(mapping, offset) => mapping.store(offset, value).expect(INSIDE),
        }
    }

    /// Makes it 0; the GPU sees that when this returns.
    pub(super) fn clear(self) -> Result<()> {
        self.store(0);
        if let Self::Gpu(mapping, _) = self {
            mapping.flush()?;
        }
        Ok(())
    }
}

/// Where words come from: one per cache line.
pub(super) struct Arena {
    host: &'static [AtomicU32],
    gpu: &'static Mapping,
    host_used: Cell<usize>,
    gpu_used: Cell<usize>,
}

/// Bytes of each kind of memory; a run with eight levels of `--busy` uses a tenth.
pub(super) const ARENA: usize = 1 << 20;
/// The longest cache line of the CPUs and GPUs that there are, bytes.
const LINE: usize = 128;

impl Arena {
    /// `host` is pinned memory.
    pub(super) fn new(gdr: &Gdr, device: i32, host: &'static [AtomicU32]) -> Result<Self> {
        if gdr.backend() == BackendKind::Host {
            return Err("GDRCOPY_BACKEND=host: this benchmark needs a mapping of GPU memory".into());
        }
        let buffer = gdr.alloc(device, ARENA)?;
        let gpu = Box::leak(Box::new(buffer.map()?));
        std::mem::forget(buffer);
        Ok(Self { host, gpu, host_used: Cell::new(0), gpu_used: Cell::new(0) })
    }

    /// A new word of host memory.
    pub(super) fn cell(&self) -> Result<&'static AtomicU32> {
        let index = take(&self.host_used, size_of_val(self.host))? / size_of::<u32>();
        Ok(&self.host[index])
    }

    /// A new word of host memory.
    pub(super) fn host(&self) -> Result<Word> {
        self.cell().map(Word::Host)
    }

    /// A new word of GPU memory.
    pub(super) fn gpu(&self) -> Result<Word> {
        Ok(Word::Gpu(self.gpu, take(&self.gpu_used, self.gpu.len())?))
    }
}

/// The offset of the next line.
fn take(used: &Cell<usize>, len: usize) -> Result<usize> {
    let offset = used.get();
    if offset + LINE > len {
        return Err("more words are needed than there are: use fewer values of --busy".into());
    }
    used.set(offset + LINE);
    Ok(offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_share_no_line_and_end_with_the_memory() {
        let used = Cell::new(0);
        assert_eq!([(); 3].map(|()| take(&used, 400).unwrap()), [0, LINE, 2 * LINE]);
        assert!(take(&used, 400).unwrap_err().to_string().contains("--busy"));
    }

    #[test]
    fn plain_memory_is_no_gpu() {
        let gdr = Gdr::builder().backend(BackendKind::Host).open().unwrap();
        assert!(Arena::new(&gdr, 0, &[]).err().unwrap().to_string().contains("GPU memory"));
    }
}
