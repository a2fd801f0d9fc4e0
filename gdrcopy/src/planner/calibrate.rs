//! Measures every way to copy at every size.

use std::num::NonZero;
use std::time::Instant;

use super::{Direction, Planner, Point, Table, Way, read_by, write_by};
use crate::error::Result;
use crate::gdr::Gdr;
use crate::mapping::Mapping;

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

pub(super) fn run(gdr: &Gdr, device: i32) -> Result<Planner> {
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
