//! `copybw`, `copylat` and `apiperf`: how fast copies through mappings are, and the calls that make mappings.

use std::hint::black_box;
use std::time::Instant;

use clap::Args;
use gdrcopy::{BackendKind, MappingType};
use gdsync::cuda::Gpu;
use serde::Serialize;

use super::cuda::{self, compare, compare_buffer, pattern, time};
use super::{Bench, Memory, Program, bytes, usage};
use crate::measure::Samples;
use crate::results::{Point, Result, Unit};

/// How often is copied.
#[derive(Args, Clone, Copy, Debug, Serialize)]
struct Counts {
    /// Copies to the GPU, for each size.
    #[arg(short = 'w', long, value_name = "COUNT", default_value_t = 10_000,
          value_parser = clap::value_parser!(u32).range(1..))]
    writes: u32,
    /// Copies from the GPU, for each size.
    #[arg(short = 'r', long, value_name = "COUNT", default_value_t = 100,
          value_parser = clap::value_parser!(u32).range(1..))]
    reads: u32,
}

/// The sizes from `first` on, doubled each time, up to and including `last`.
fn doubling(first: usize, last: usize) -> Vec<usize> {
    (0..usize::BITS).map(|shift| first << shift).take_while(|&size| size <= last).collect()
}

/// Bandwidth of copies to and from GPU memory through a CPU mapping, with the data checked.
#[derive(Args, Debug, Serialize)]
#[command(args_override_self = true)]
pub struct Copybw {
    #[command(flatten)]
    #[serde(flatten)]
    memory: Memory,
    /// Bytes allocated and mapped.
    #[arg(short = 's', long, value_name = "BYTES", value_parser = bytes, default_value = "128K")]
    size: usize,
    /// Bytes copied at a time, with -l the most [default: those allocated].
    #[arg(short = 'c', long, value_name = "BYTES", value_parser = bytes)]
    copy_size: Option<usize>,
    /// Where in the memory the copies begin.
    #[arg(short = 'o', long, value_name = "BYTES", value_parser = bytes, default_value_t = 0)]
    offset: usize,
    /// Copies of 1, 2, 4 bytes and so on, up to and including the size of -c.
    #[arg(short = 'l', long)]
    sweep: bool,
    #[command(flatten)]
    #[serde(flatten)]
    counts: Counts,
}

impl Program for Copybw {
    const NAME: &'static str = "gdrcopy_copybw";

    fn run(&self) -> Result<()> {
        let (offset, sizes) = (self.offset, self.sizes()?);
        let mut bench = Bench::open(&self.memory.common, sizes.len())?;
        let (buffer, mapping) = bench.map(self.size, &self.memory)?;
        let (data, around) = (pattern(1, self.size), pattern(2, self.size));
        let mut found = vec![0; self.size];
        for size in sizes {
            bench.sheet.step(format!("{size} bytes"));
            let data = &data[..size];
            buffer.copy_in(0, &around)?;
            let written = time(self.counts.writes, || Ok(mapping.write(offset, data)?))?;
            let mut expected = around.clone();
            expected[offset..offset + size].copy_from_slice(data);
            compare_buffer("written through the mapping", &buffer, 0, &expected)?;
            found.fill(0);
            let read = time(self.counts.reads, || Ok(mapping.read(offset, &mut found[..size])?))?;
            compare("read through the mapping", data, &found[..size])?;
            for (name, (samples, each)) in [("write", written), ("read", read)] {
                // Bytes of a batch in units of 1,000 per microsecond.
                #[expect(clippy::cast_precision_loss, reason = "sizes are below 2^53")]
                let amount = size as f64 * f64::from(each) / 1e3;
                let point = Point::rate(size as u64, &samples, amount);
                bench.sheet.add_point("bandwidth", name, "bytes", Unit::GigabytesPerSecond, point);
            }
        }
        bench.finish(self)
    }
}

impl Copybw {
    fn sizes(&self) -> Result<Vec<usize>> {
        let room = self.size.saturating_sub(self.offset);
        let most = self.copy_size.filter(|&size| !self.sweep || size < room).unwrap_or(room);
        usage(most > 0 && self.offset.checked_add(most).is_some_and(|end| end <= self.size), || {
            format!(
                "offset {} and copy size {most} do not fit into the {} bytes of -s",
                self.offset, self.size
            )
        })?;
        Ok(if self.sweep { doubling(1, most) } else { vec![most] })
    }
}

/// Time of copies to and from GPU memory through a CPU mapping, for sizes of 1, 2, 4 bytes and so on. The time of a write is
/// that until the CPU goes on: the data may still be on its way.
#[derive(Args, Debug, Serialize)]
#[command(args_override_self = true)]
pub struct Copylat {
    #[command(flatten)]
    #[serde(flatten)]
    memory: Memory,
    /// Bytes allocated and mapped, and the largest copy.
    #[arg(short = 's', long, value_name = "BYTES", value_parser = bytes, default_value = "16M")]
    size: usize,
    #[command(flatten)]
    #[serde(flatten)]
    counts: Counts,
    /// Times cuMemcpy too, both ways, with pinned host memory.
    #[arg(short = 'c', long = "cumemcpy")]
    cumemcpy: bool,
    /// Lets the GPU write the memory before each copy, so that the CPU's cache does not have it. Only for cached
    /// mappings.
    #[arg(short = 'C', long = "cold-cache")]
    cold_cache: bool,
}

impl Program for Copylat {
    const NAME: &'static str = "gdrcopy_copylat";

    fn run(&self) -> Result<()> {
        usage(self.size > 0, || "-s 0: there is nothing to copy".into())?;
        let Counts { writes, reads } = self.counts;
        let sizes = doubling(1, self.size);
        let mut bench = Bench::open(&self.memory.common, sizes.len())?;
        let by_cuda = self.cumemcpy || self.cold_cache;
        if by_cuda && bench.gdr.backend() == BackendKind::Host {
            return Err("-c and -C need a GPU; the host backend has none".into());
        }
        let gpu = by_cuda.then(|| Gpu::open(bench.gpu)).transpose()?;
        let _current = gpu.as_ref().map(Gpu::enter).transpose()?;
        let (buffer, mapping) = bench.map(self.size, &self.memory)?;
        if self.cold_cache && mapping.kind() != MappingType::Cached {
            return Err(format!("-C needs a cached mapping; this one is {:?}", mapping.kind()).into());
        }
        let pinned = gpu.as_ref().filter(|_| self.cumemcpy);
        let pinned = pinned.map(|gpu| cuda::pinned(gpu, self.size)).transpose()?;
        let copies = |calls: u32, copy: &mut dyn FnMut() -> Result<()>| match self.cold_cache {
            false => time(calls, copy),
            true => {
                let mut samples = Samples::default();
                for _ in 0..calls {
                    cuda::clear(buffer.addr(), buffer.len())?;
                    let start = Instant::now();
                    copy()?;
                    samples.add(start.elapsed());
                }
                Ok((samples, 1))
            }
        };
        let mut found = vec![0; self.size];
        for bytes in sizes {
            bench.sheet.step(format!("{bytes} bytes"));
            let (good, found) = (pattern(1, bytes), &mut found[..bytes]);
            // The memory to be overwritten starts with other data.
            buffer.copy_in(0, &pattern(2, bytes))?;
            let mut rows =
                vec![("gdr_copy_to_mapping", copies(writes, &mut || Ok(mapping.write(0, &good)?))?)];
            compare_buffer("gdr_copy_to_mapping", &buffer, 0, &good)?;
            found.fill(0xff);
            rows.push(("gdr_copy_from_mapping", copies(reads, &mut || Ok(mapping.read(0, found)?))?));
            let expected = if self.cold_cache { &vec![0; bytes] } else { &good };
            compare("gdr_copy_from_mapping", expected, found)?;
            if let Some(pinned) = &pinned {
                pinned.write(0, &good)?;
                buffer.copy_in(0, &pattern(2, bytes))?;
                let (host, gpu) = (pinned.addr(), buffer.addr());
                rows.push(("cuMemcpy_H2D", time(writes, || cuda::memcpy(gpu, host, bytes))?));
                pinned.fill(0, bytes, 0)?;
                rows.push(("cuMemcpy_D2H", time(reads, || cuda::memcpy(host, gpu, bytes))?));
                pinned.read(0, found)?;
                compare("there and back by cuMemcpy", &good, found)?;
            }
            for (name, (samples, each)) in rows {
                let point = Point::time(bytes as u64, &samples, each);
                bench.sheet.add_point("time of a copy", name, "bytes", Unit::Micros, point);
            }
        }
        bench.finish(self)
    }
}

/// Time of pin, map, get_info, unmap and unpin, for sizes of 64 KiB, 128 KiB and so on.
#[derive(Args, Debug, Serialize)]
#[command(args_override_self = true)]
pub struct Apiperf {
    #[command(flatten)]
    #[serde(flatten)]
    memory: Memory,
    /// The largest size.
    #[arg(short = 's', long, value_name = "BYTES", value_parser = bytes, default_value = "16M")]
    size: usize,
    /// Calls timed, for each size.
    #[arg(short = 'n', long, value_name = "COUNT", default_value_t = 100,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    iterations: u32,
    /// Calls before those.
    #[arg(short = 'w', long, value_name = "COUNT", default_value_t = 10)]
    warm_up: u32,
}

/// The smallest size, a GPU page.
const PAGE: usize = 64 << 10;
const STEPS: [&str; 5] = ["pin", "map", "get_info", "unmap", "unpin"];

impl Program for Apiperf {
    const NAME: &'static str = "gdrcopy_apiperf";

    fn run(&self) -> Result<()> {
        usage(self.size >= PAGE, || format!("-s {}: the smallest size is {PAGE}, a GPU page", self.size))?;
        let sizes = doubling(PAGE, self.size);
        let mut bench = Bench::open(&self.memory.common, sizes.len())?;
        let buffer = bench.gdr.alloc_with(bench.gpu, self.size, self.memory.kind())?;
        for bytes in sizes {
            bench.sheet.step(format!("{bytes} bytes"));
            let mut samples: [Samples; STEPS.len()] = Default::default();
            for number in 0..u64::from(self.warm_up) + u64::from(self.iterations) {
                let mut clock = [Instant::now(); STEPS.len() + 1];
                let pin = bench.gdr.pin(buffer.addr(), bytes)?;
                clock[1] = Instant::now();
                let mapping = pin.map_as(self.memory.caching())?;
                clock[2] = Instant::now();
                black_box(pin.info());
                clock[3] = Instant::now();
                mapping.unmap()?;
                clock[4] = Instant::now();
                pin.unpin()?;
                clock[5] = Instant::now();
                if number >= self.warm_up.into() {
                    samples.iter_mut().zip(clock.windows(2)).for_each(|(one, two)| one.add(two[1] - two[0]));
                }
            }
            for (step, samples) in STEPS.into_iter().zip(&samples) {
                let point = Point::time(bytes as u64, samples, 1);
                bench.sheet.add_point("time of a call", step, "bytes", Unit::Micros, point);
            }
        }
        bench.finish(self)
    }
}
