//! Chooses how to copy: by the CPU on the mapping, by several threads, or by CUDA's copy engine.
//!
//! No way is best at every size. For a few bytes, CPU stores are a hundred times faster; CPU loads from BAR1 are slower than the copy
//! engine from a few KiB on. The crossover depends on GPU, CPU and PCIe, so a [`Planner`] measures this machine once and then chooses
//! by size.

use std::fmt;
use std::num::NonZero;
use std::thread::Builder;
use std::time::Instant;

use parking_lot::Mutex;

use crate::copy;
use crate::cuda::Cuda;
use crate::error::Result;
use crate::gdr::Gdr;
use crate::mapping::Mapping;

/// The direction of a copy.
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
    /// This many threads, on the mapping.
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

/// Chooses the fastest way for each copy, from a calibration of this machine and one GPU. Any thread may use it.
#[derive(Clone, Debug)]
pub struct Planner {
    to_gpu: Table,
    from_gpu: Table,
}

/// Pieces of a copy by several threads begin at multiples of this, bytes: whole write-combining lines and pages.
const PIECE_ALIGN: usize = 4096;

impl Planner {
    /// Measures every way at sizes up to 64 MiB. Takes about a second, 64 MiB of GPU memory and as much host memory. The load of GPU
    /// and CPU should be that of later copies.
    ///
    /// # Errors
    /// As [`Gdr::alloc`], [`GpuBuffer::map`](crate::GpuBuffer::map) and [`Planner::write`].
    pub fn calibrate(gdr: &Gdr, device: i32) -> Result<Self> {
        calibrate(gdr, device)
    }

    /// The way chosen for each range of sizes.
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
    // The submission follows the stores on the same path to the GPU.
    copy::store_fence(mapping.kind());
    Some(found)
}

/// Lengths of the first and of every further piece of a copy by `n` threads; all but the first begin aligned.
fn cut(addr: usize, len: usize, n: NonZero<usize>) -> (usize, usize) {
    let skew = addr % PIECE_ALIGN;
    let each = (skew + len).div_ceil(n.get()).next_multiple_of(PIECE_ALIGN).max(PIECE_ALIGN);
    ((each - skew).min(len), each)
}

/// Copies the parts by one thread each, including this one. If the system refuses threads, the others take the remaining parts.
fn spread<T: AsRef<[u8]>>(
    offset: usize,
    parts: impl Iterator<Item = T> + Send,
    copy: impl Fn(usize, T) -> Result<()> + Sync,
) -> Result<()> {
    spread_to(Builder::new, offset, parts, copy)
}

/// [`spread`] with the caller's threads.
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

/// A measured copy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Bytes.
    pub len: usize,
    /// Time of one copy, microseconds.
    pub micros: f64,
}

/// The ways of one direction.
#[derive(Clone, Debug)]
pub struct Table {
    /// From this length on (bytes), this way; ascending, the first from 0.
    choices: Vec<(usize, Way)>,
    /// Shorter copies are the CPU's, without a look at the choices.
    cpu_below: usize,
}

/// Threads start late now and then: in a calibration, where they are started all the time, they must be so many times as
/// quick to be faster later.
const THREAD_MARGIN: f64 = 1.4;

/// Lengths at which ways are compared within a doubling.
const STEPS: usize = 16;

impl Table {
    /// From curves, whose points may be in any order. A way counts only for sizes up to its last point, except that the way which
    /// is best there goes on for ever. Without any curve everything is copied by the CPU.
    pub fn new(mut curves: Vec<(Way, Vec<Point>)>) -> Self {
        curves.iter_mut().for_each(|(_, points)| points.sort_by_key(|p| p.len));
        let mut lengths: Vec<usize> = curves.iter().flat_map(|(_, points)| points).map(|p| p.len).collect();
        lengths.sort_unstable();
        lengths.dedup();
        let between = |pair: &[usize]| {
            let (from, step) = (pair[0], (pair[1] - pair[0]).div_ceil(STEPS));
            (from..pair[1]).step_by(step).collect::<Vec<_>>()
        };
        let grid = lengths.windows(2).flat_map(between).chain(lengths.last().copied());
        let mut choices = vec![];
        for len in grid {
            let best = curves
                .iter()
                .filter_map(|(way, points)| Some((*way, at(points, len)? * margin(*way))))
                .min_by(|a, b| a.1.total_cmp(&b.1));
            if let Some((way, _)) = best.filter(|(way, _)| choices.last().is_none_or(|(_, last)| last != way))
            {
                choices.push((len, way));
            }
        }
        match choices.first_mut() {
            Some(first) => first.0 = 0,
            None => choices.push((0, Way::Cpu)),
        }
        let cpu_below = match choices[..] {
            [(_, Way::Cpu), (next, _), ..] => next,
            [(_, Way::Cpu)] => usize::MAX,
            _ => 0,
        };
        Self { choices, cpu_below }
    }

    /// The way for a copy of `len` bytes.
    #[inline]
    pub fn way(&self, len: usize) -> Way {
        if len < self.cpu_below {
            return Way::Cpu;
        }
        let after = self.choices.partition_point(|&(from, _)| from <= len);
        self.choices[after - 1].1
    }

    /// The choices: from this length on (bytes), this way; ascending, the first from 0.
    pub fn choices(&self) -> &[(usize, Way)] {
        &self.choices
    }
}

fn margin(way: Way) -> f64 {
    if matches!(way, Way::Threads(_)) { THREAD_MARGIN } else { 1.0 }
}

/// The time of a copy of `len` bytes, straight between neighbouring points; none beyond the last.
fn at(points: &[Point], len: usize) -> Option<f64> {
    let after = points.partition_point(|p| p.len < len);
    let right = points.get(after)?;
    let Some(left) = after.checked_sub(1).map(|before| points[before]).filter(|_| right.len != len) else {
        return Some(right.micros);
    };
    let share = (len - left.len) as f64 / (right.len - left.len) as f64;
    Some(left.micros + share * (right.micros - left.micros))
}

/// Largest size measured, bytes.
const MAX: usize = 64 << 20;
/// No thread is used for less, bytes: starting one costs more than the copy.
const THREADS_FROM: usize = 128 << 10;
/// More threads than this have gained nothing anywhere.
const MAX_THREADS: usize = 8;
/// Copies of one size by one way: at most so many, and for at most so long.
const REPEATS: usize = 33;
const BUDGET_US: f64 = 2000.0;
/// A way this many times slower than the best, whose time already grows with the length, is not measured further.
const HOPELESS: f64 = 4.0;
/// The time of twice the length, if nothing but the length counts; a little less.
const LINEAR: f64 = 1.8;

fn calibrate(gdr: &Gdr, device: i32) -> Result<Planner> {
    let buffer = gdr.alloc(device, MAX)?;
    let mapping = buffer.map()?;
    let mut host = vec![0x5a_u8; MAX];
    let planner = Planner {
        to_gpu: curves(Direction::ToGpu, &mapping, &mut host)?,
        from_gpu: curves(Direction::FromGpu, &mapping, &mut host)?,
    };
    for direction in [Direction::ToGpu, Direction::FromGpu] {
        tracing::info!("GPU {device}, {direction:?}: {:?}", planner.table(direction).choices());
    }
    Ok(planner)
}

/// The ways that exist here.
fn ways(mapping: &Mapping) -> Vec<Way> {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let threads = (1..).map(|i| 1 << i).take_while(|&n| n <= cores.min(MAX_THREADS));
    let engine = mapping.cuda().map(|_| Way::CopyEngine);
    [Way::Cpu].into_iter().chain(engine).chain(threads.filter_map(NonZero::new).map(Way::Threads)).collect()
}

fn curves(direction: Direction, mapping: &Mapping, host: &mut [u8]) -> Result<Table> {
    let mut curves: Vec<(Way, Vec<Point>)> = ways(mapping).into_iter().map(|way| (way, vec![])).collect();
    let mut alive: Vec<usize> = (0..curves.len()).collect();
    for len in (0..).map(|i| 1 << i).take_while(|&len| len <= MAX) {
        let host = &mut host[..len];
        let mut best = f64::INFINITY;
        for &i in &alive {
            let way = curves[i].0;
            if matches!(way, Way::Threads(_)) && len < THREADS_FROM {
                continue;
            }
            let micros = median(|| match direction {
                Direction::ToGpu => write_by(way, mapping, 0, host),
                Direction::FromGpu => read_by(way, mapping, 0, host),
            })?;
            curves[i].1.push(Point { len, micros });
            best = best.min(micros);
        }
        alive.retain(|&i| match &curves[i].1[..] {
            [.., before, last] if last.len == len => {
                last.micros < HOPELESS * best || last.micros < LINEAR * before.micros
            }
            _ => true,
        });
    }
    Ok(Table::new(curves))
}

/// The median time of a copy, microseconds.
fn median(mut copy: impl FnMut() -> Result<()>) -> Result<f64> {
    copy()?;
    let mut samples = Vec::with_capacity(REPEATS);
    let mut spent = 0.0;
    while samples.len() < 3 || (samples.len() < REPEATS && spent < BUDGET_US) {
        let start = Instant::now();
        copy()?;
        let micros = start.elapsed().as_secs_f64() * 1e6;
        spent += micros;
        samples.push(micros);
    }
    samples.sort_by(f64::total_cmp);
    Ok(samples[samples.len() / 2])
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::Error;
    use crate::types::BackendKind;

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
    fn a_copy_continues_with_fewer_threads() {
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
    fn the_first_error_of_a_part_is_returned() {
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

    fn line(fixed: f64, per_byte: f64, sizes: &[usize]) -> Vec<Point> {
        sizes.iter().map(|&len| Point { len, micros: fixed + per_byte * len as f64 }).collect()
    }

    #[test]
    fn the_fastest_way_is_chosen_on_both_sides_of_a_crossover() {
        let sizes: Vec<usize> = (0..=20).map(|i| 1 << i).collect();
        // They cross at 4,500 bytes.
        let curves = vec![
            (Way::Cpu, line(1.0, 0.001, &sizes)),
            (Way::CopyEngine, line(5.0, 0.001 - 4.0 / 4500.0, &sizes)),
        ];
        let table = Table::new(curves);
        assert_eq!(table.choices().len(), 2, "{:?}", table.choices());
        let crossing = table.choices()[1].0;
        assert!((4096..=4800).contains(&crossing), "{crossing}");
        assert_eq!(table.way(0), Way::Cpu);
        assert_eq!(table.way(crossing - 1), Way::Cpu);
        assert_eq!(table.way(crossing), Way::CopyEngine);
        assert_eq!(table.way(usize::MAX), Way::CopyEngine);
    }

    #[test]
    fn points_may_be_few_or_unordered() {
        assert_eq!(Table::new(vec![]).way(1 << 30), Way::Cpu);
        // A way counts only up to its last point.
        let cpu = line(0.1, 1.0, &[1, 2, 4]);
        let table =
            Table::new(vec![(Way::Cpu, cpu), (Way::CopyEngine, line(6.0, 0.001, &[1, 2, 4, 8, 1024]))]);
        assert_eq!((table.way(4), table.way(8)), (Way::Cpu, Way::CopyEngine));
        // In any order, and twice.
        let engine = line(1.0, 0.5, &[4096, 64, 64, 1]);
        let table = Table::new(vec![(Way::CopyEngine, engine), (Way::Cpu, line(0.1, 1.0, &[4096, 1]))]);
        assert_eq!((table.way(1), table.way(4096)), (Way::Cpu, Way::CopyEngine));
    }

    #[test]
    fn threads_need_a_margin() {
        let sizes = [1 << 20, 2 << 20, 4 << 20];
        let two = Way::Threads(NonZero::new(2).unwrap());
        for (speedup, wins) in [(1.3, false), (1.5, true)] {
            let curves = vec![(Way::Cpu, line(0.0, 1.0, &sizes)), (two, line(0.0, 1.0 / speedup, &sizes))];
            assert_eq!(Table::new(curves).way(4 << 20) == two, wins, "{speedup}");
        }
    }
}
