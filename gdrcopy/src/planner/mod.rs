//! Which way to copy: the CPU on the mapping, several threads, or CUDA's copy engine.
//!
//! No way is best at every size. CPU stores win by a factor of a hundred for a few bytes; CPU loads from BAR1 fall
//! behind the copy engine from a few KiB on; where the lines cross depends on GPU, CPU and PCIe. So a [`Planner`]
//! measures this machine once and then picks by size.

mod calibrate;
mod table;

use std::fmt;
use std::num::NonZero;
use std::thread::Builder;

use parking_lot::Mutex;

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
    /// Memory that was freed under its mapping is always copied by the CPU: CUDA no longer knows it. Do not free it
    /// during a copy: the copy engine would go on with whatever is allocated there next.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`](crate::Error::OutOfBounds), [`Error::Cuda`](crate::Error::Cuda),
    /// [`Error::Timeout`](crate::Error::Timeout) as for [`GpuBuffer::copy_in`](crate::GpuBuffer::copy_in).
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
    let found = mapping.cuda()?;
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

/// Copies the parts by a thread for each, this one among them. Where the system gives fewer threads, each takes the
/// next part when it is done with one.
fn spread<T: AsRef<[u8]>>(
    offset: usize,
    parts: impl Iterator<Item = T> + Send,
    copy: impl Fn(usize, T) -> Result<()> + Sync,
) -> Result<()> {
    spread_to(Builder::new, offset, parts, copy)
}

/// The same with threads of the caller's choice.
fn spread_to<T: AsRef<[u8]>>(
    thread: impl Fn() -> Builder,
    mut offset: usize,
    parts: impl Iterator<Item = T> + Send,
    copy: impl Fn(usize, T) -> Result<()> + Sync,
) -> Result<()> {
    let (threads, _) = parts.size_hint();
    let parts = Mutex::new(parts.map(move |part| {
        let at = offset;
        offset += part.as_ref().len();
        (at, part)
    }));
    let next = || parts.lock().next();
    let work = || std::iter::from_fn(next).try_for_each(|(at, part)| copy(at, part));
    std::thread::scope(|scope| {
        let spawn = || thread().spawn_scoped(scope, work).inspect_err(fewer_threads);
        let others: Vec<_> = (1..threads).map_while(|_| spawn().ok()).collect();
        others.into_iter().fold(work(), |result, other| {
            result.and(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    })
}

fn fewer_threads(error: &std::io::Error) {
    tracing::warn!(%error, "a copy goes by fewer threads than planned: raise the limits on processes and memory");
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::Error;
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
    fn a_copy_does_without_the_threads_that_it_does_not_get() {
        let (data, copied) = (vec![7_u8; 1 << 20], Mutex::new(vec![0_u8; 1 << 20]));
        // Of every two threads, one has a stack that fits no address space.
        let asked = AtomicUsize::new(0);
        let thread = || match asked.fetch_add(1, Ordering::Relaxed) {
            n if n.is_multiple_of(2) => Builder::new(),
            _ => Builder::new().stack_size(1 << 60),
        };
        let copy = |at: usize, part: &[u8]| {
            copied.lock()[at..][..part.len()].copy_from_slice(part);
            Ok(())
        };
        spread_to(thread, 0, data.chunks(1 << 12), copy).unwrap();
        assert_eq!(asked.into_inner(), 2, "the second is refused, and no more are asked for");
        assert!(copied.into_inner() == data);
    }

    #[test]
    fn the_first_failure_of_a_part_is_that_of_the_copy() {
        let failing = |at, _: &[u8]| if at == 3 { Err(Error::Invalidated) } else { Ok(()) };
        assert!(matches!(spread(0, [0_u8; 9].chunks(1), failing), Err(Error::Invalidated)));
        assert!(spread(4, [0_u8; 9].chunks(1), failing).is_ok());
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
