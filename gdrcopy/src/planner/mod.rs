//! Which way to copy: the CPU on the mapping, several threads, or CUDA's copy engine.
//!
//! No way is best at every size. CPU stores win by a factor of a hundred for a few bytes; CPU loads from BAR1 fall
//! behind the copy engine from a few KiB on; where the lines cross depends on GPU, CPU and PCIe. So a [`Planner`]
//! measures this machine once and then picks by size.

mod calibrate;
mod table;

use std::fmt;
use std::num::NonZero;

use crate::copy;
use crate::cuda::Cuda;
use crate::error::Result;
use crate::gdr::Gdr;
use crate::mapping::Mapping;

pub use table::{Point, Table};

/// Where the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From host memory to GPU memory.
    ToGpu,
    /// From GPU memory to host memory.
    FromGpu,
}

/// A way to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// This thread, on the mapping.
    Cpu,
    /// So many threads, on the mapping.
    Threads(NonZero<usize>),
    /// CUDA's copy engine.
    CopyEngine,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("CPU"),
            Self::Threads(n) => write!(f, "{n} threads"),
            Self::CopyEngine => f.write_str("copy engine"),
        }
    }
}

/// Picks the quickest way for each copy, from a calibration of this machine and one GPU. Any thread may use it.
#[derive(Clone, Debug)]
pub struct Planner {
    to_gpu: Table,
    from_gpu: Table,
}

/// Pieces of a copy by several threads begin at multiples of this, bytes: whole write-combining lines and pages.
const PIECE_ALIGN: usize = 4096;

impl Planner {
    /// Measures every way at every size that matters; takes about a second, 64 MiB of GPU memory and as much host
    /// memory. The GPU and the CPU should be as busy as they will be.
    ///
    /// # Errors
    /// What allocating and mapping say.
    pub fn calibrate(gdr: &Gdr, device: i32) -> Result<Self> {
        calibrate::run(gdr, device)
    }

    /// A planner of your own figures.
    pub fn from_tables(to_gpu: Table, from_gpu: Table) -> Self {
        Self { to_gpu, from_gpu }
    }

    /// What was measured, and the way picked for each range of sizes.
    pub fn table(&self, direction: Direction) -> &Table {
        match direction {
            Direction::ToGpu => &self.to_gpu,
            Direction::FromGpu => &self.from_gpu,
        }
    }

    /// The way for a copy of `len` bytes.
    #[inline]
    pub fn way(&self, direction: Direction, len: usize) -> Way {
        self.table(direction).way(len)
    }

    /// Writes by the best way; in order before every later store of this thread, as [`Mapping::write`].
    ///
    /// Memory that was freed under its mapping is always copied by the CPU: CUDA no longer knows it.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`](crate::Error::OutOfBounds), [`Error::Cuda`](crate::Error::Cuda).
    #[inline]
    pub fn write(&self, mapping: &Mapping, offset: usize, data: &[u8]) -> Result<()> {
        match self.way(Direction::ToGpu, data.len()) {
            Way::Cpu => mapping.write(offset, data),
            way => write_by(way, mapping, offset, data),
        }
    }

    /// Reads by the best way.
    ///
    /// # Errors
    /// As [`Planner::write`].
    #[inline]
    pub fn read(&self, mapping: &Mapping, offset: usize, out: &mut [u8]) -> Result<()> {
        match self.way(Direction::FromGpu, out.len()) {
            Way::Cpu => mapping.read(offset, out),
            way => read_by(way, mapping, offset, out),
        }
    }
}

/// Writes by a way of the caller's choice.
///
/// # Errors
/// As [`Planner::write`].
pub fn write_by(way: Way, mapping: &Mapping, offset: usize, data: &[u8]) -> Result<()> {
    let dst = mapping.at(offset, data.len())?;
    match way {
        Way::CopyEngine => {
            let Some((cuda, device)) = engine(mapping) else { return mapping.write(offset, data) };
            // SAFETY: the slice is readable for its length.
            unsafe { cuda.copy_to_device(device, mapping.addr() + offset as u64, data.as_ptr(), data.len()) }
        }
        Way::Threads(n) => {
            let (first, each) = cut(dst.addr(), data.len(), n);
            let (first, rest) = data.split_at(first);
            let parts = std::iter::once(first).chain(rest.chunks(each));
            spread(offset, parts, |at, part| mapping.write(at, part))
        }
        Way::Cpu => mapping.write(offset, data),
    }
}

/// Reads by a way of the caller's choice.
///
/// # Errors
/// As [`Planner::write`].
pub fn read_by(way: Way, mapping: &Mapping, offset: usize, out: &mut [u8]) -> Result<()> {
    let src = mapping.at(offset, out.len())?;
    match way {
        Way::CopyEngine => {
            let Some((cuda, device)) = engine(mapping) else { return mapping.read(offset, out) };
            let src = mapping.addr() + offset as u64;
            // SAFETY: the slice is writable for its length.
            unsafe { cuda.copy_from_device(device, out.as_mut_ptr(), src, out.len()) }
        }
        Way::Threads(n) => {
            let (first, each) = cut(src.addr(), out.len(), n);
            let (first, rest) = out.split_at_mut(first);
            let parts = std::iter::once(first).chain(rest.chunks_mut(each));
            spread(offset, parts, |at, part| mapping.read(at, part))
        }
        Way::Cpu => mapping.read(offset, out),
    }
}

/// CUDA and the GPU whose copy engine reaches this memory, ready for a copy that comes after this thread's stores.
fn engine(mapping: &Mapping) -> Option<(&dyn Cuda, i32)> {
    let found = mapping.held().cuda()?;
    // The submission goes to the GPU by the same path as the stores, behind them.
    copy::store_fence(mapping.kind());
    Some(found)
}

/// Lengths of the first and of every further piece of a copy by `n` threads; all but the first begin aligned.
fn cut(addr: usize, len: usize, n: NonZero<usize>) -> (usize, usize) {
    let skew = addr % PIECE_ALIGN;
    let each = (skew + len).div_ceil(n.get()).next_multiple_of(PIECE_ALIGN).max(PIECE_ALIGN);
    ((each - skew).min(len), each)
}

/// Copies each part by a thread of its own, the first by this one.
fn spread<T: AsRef<[u8]> + Send>(
    mut offset: usize,
    mut parts: impl Iterator<Item = T>,
    copy: impl Fn(usize, T) -> Result<()> + Sync,
) -> Result<()> {
    let mut place = move |part: T| {
        let at = offset;
        offset += part.as_ref().len();
        (at, part)
    };
    let first = parts.next().map(&mut place);
    let copy = &copy;
    std::thread::scope(|scope| {
        let others: Vec<_> = parts.map(place).map(|(at, part)| scope.spawn(move || copy(at, part))).collect();
        let mine = first.map_or(Ok(()), |(at, part)| copy(at, part));
        others.into_iter().fold(mine, |result, other| {
            result.and(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::BackendKind;

    #[test]
    fn pieces_cover_the_copy_and_begin_aligned() {
        for addr in [0, 1, 64, 4095, 4096, 12345] {
            for len in [0, 1, 4095, 4096, 4097, 1 << 20] {
                for n in 1..9 {
                    let (first, each) = cut(addr, len, NonZero::new(n).unwrap());
                    assert!(first <= len);
                    assert!(first == len || (addr + first).is_multiple_of(PIECE_ALIGN));
                    assert!((len - first).div_ceil(each) < n, "{addr} {len} {n}");
                }
            }
        }
    }

    #[test]
    fn every_way_moves_the_same_bytes() {
        let gdr = Gdr::builder().backend(BackendKind::Host).open().unwrap();
        let buffer = gdr.alloc(0, 100_000).unwrap();
        let mapping = buffer.map().unwrap();
        let threads = |n| Way::Threads(NonZero::new(n).unwrap());
        for (i, way) in
            [Way::Cpu, threads(2), threads(3), threads(64), Way::CopyEngine].into_iter().enumerate()
        {
            let data: Vec<u8> =
                (0..90_000_usize).map(|x| (x.wrapping_mul(31 + i) >> 3).to_le_bytes()[0]).collect();
            write_by(way, &mapping, 777, &data).unwrap();
            let mut back = vec![0; data.len()];
            buffer.copy_out(777, &mut back).unwrap();
            assert_eq!(back, data, "{way}");
            back.fill(0);
            read_by(way, &mapping, 777, &mut back).unwrap();
            assert_eq!(back, data, "{way}");
            assert!(write_by(way, &mapping, 777, &vec![0; 100_000]).is_err());
        }
    }
}
