//! `copybw`, `copylat` and `apiperf`: how fast copies through mappings are, and the calls that make mappings.

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use clap::Args;
use cudarc::driver::CudaContext;
use gdrcopy::{BackendKind, GpuBuffer, MappingType};
use serde::Serialize;

use super::cuda::{self, Batches, Copies, PerCall, Pinned, Routines, Timing, compare, pattern};
use super::{Common, Failure, Mapped, Memory, Output, Program, Result, Target, bytes, type_name, usage};
use crate::measure::{Micros, Samples};

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
fn doubling(first: usize, last: usize) -> impl Iterator<Item = usize> {
    (0..usize::BITS).map(move |shift| first << shift).take_while(move |&size| size <= last)
}

/// Bandwidth of copies to and from GPU memory through a CPU mapping, with the data checked.
#[derive(Args, Debug, Serialize)]
#[command(args_override_self = true)]
pub struct Copybw {
    #[command(flatten)]
    #[serde(skip)]
    common: Common,
    #[command(flatten)]
    #[serde(flatten)]
    memory: Memory,
    #[command(flatten)]
    #[serde(flatten)]
    routines: Routines,
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
    /// Threads that copy at the same time, each with a buffer and mapping of its own.
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,
}

#[derive(Serialize)]
struct Bandwidth {
    direction: Direction,
    bytes: usize,
    /// All threads together.
    mib_per_s: f64,
    #[serde(rename = "copy_us")]
    copy: PerCall,
}

#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "lowercase")]
enum Direction {
    Write,
    Read,
}

/// A thread's buffer and what it copies.
struct Copying {
    mapped: Mapped,
    data: Vec<u8>,
    read: Vec<u8>,
    /// What lies around `data`, and in its place before it is written.
    around: Vec<u8>,
}

impl Program for Copybw {
    const NAME: &'static str = "gdrcopy_copybw";

    fn run(&self) -> Result<()> {
        let sizes = self.sizes()?;
        let copies = self.routines.copies()?;
        let mut output = Output::open(self.common.json.as_deref())?;
        let target = Target::open(&self.common, &output)?;
        say!(output, "testing size: {}", self.size)?;
        let mut threads = (0..self.threads)
            .map(|number| self.buffers(number, &target, &output))
            .collect::<Result<Vec<_>>>()?;
        say!(output, "copy routines: {}", copies.describe(threads[0].mapped.mapping.kind()))?;
        output.steps(2 * sizes.len());
        let mut results = Vec::new();
        for size in sizes {
            for (direction, calls) in
                [(Direction::Write, self.counts.writes), (Direction::Read, self.counts.reads)]
            {
                let batches = Batches::of(calls);
                output.step(format!("{size} bytes"));
                let (verb, noun) = direction.words();
                let (offset, calls) = (self.offset, batches.calls());
                say!(output, "{verb} test, size={size} offset={offset} num_iters={calls}")?;
                threads.iter().try_for_each(|thread| thread.prepare(offset, size, direction))?;
                let row = self.measure(&mut threads, size, batches, direction, copies)?;
                threads.iter().try_for_each(|thread| thread.check(offset, size, direction))?;
                let (mib, us) = (row.mib_per_s, &row.copy.us);
                say!(output, "{noun} BW: {mib:.2} MiB/s ({:.3} GB/s)", mib * f64::from(1 << 20) / 1e9)?;
                say!(
                    output,
                    "  a copy: min {:.4} us, median {:.4} us, p99 {:.4} us",
                    us.min,
                    us.p50,
                    us.p99
                )?;
                results.push(row);
            }
        }
        threads.into_iter().try_for_each(|thread| thread.mapped.release(&output))?;
        target.finish(output, self, results)
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
        Ok(if self.sweep { doubling(1, most).collect() } else { vec![most] })
    }

    fn buffers(&self, number: u16, target: &Target, output: &Output) -> Result<Copying> {
        let buffer = target.allocate(self.size, self.memory, output)?;
        let mapped = target.map(buffer, self.memory, output)?;
        let [data, around] = [0, 1].map(|part| pattern(2 * u32::from(number) + part, self.size));
        Ok(Copying { mapped, data, read: vec![0; self.size], around })
    }

    fn measure(
        &self,
        threads: &mut [Copying],
        size: usize,
        batches: Batches,
        direction: Direction,
        copies: Copies,
    ) -> Result<Bandwidth> {
        let (start, offset) = (&Barrier::new(threads.len()), self.offset);
        let timed: Vec<Result<Timing>> = std::thread::scope(|scope| {
            let copy = |Copying { mapped, data, read, .. }: &mut Copying| {
                let (mapping, data, read) = (&mapped.mapping, &data[..size], &mut read[..size]);
                start.wait();
                match direction {
                    Direction::Write => batches.time(|| Ok(copies.write(mapping, offset, data)?)),
                    Direction::Read => batches.time(|| Ok(copies.read(mapping, offset, read)?)),
                }
            };
            let spawned: Vec<_> =
                threads.iter_mut().map(|thread| scope.spawn(move || copy(thread))).collect();
            let died = |_| Err(Failure::failed("a copying thread panicked"));
            spawned.into_iter().map(|thread| thread.join().unwrap_or_else(died)).collect()
        });
        let timed = timed.into_iter().collect::<Result<Vec<_>>>()?;
        let mib_per_s = timed.iter().map(|timing| timing.mib_per_s(size)).sum();
        let all = timed.into_iter().reduce(Timing::append).expect("at least one thread");
        Ok(Bandwidth { direction, bytes: size, mib_per_s, copy: all.per_call() })
    }
}

impl Copying {
    /// Puts into the whole buffer what the copies to come will change, or what they shall find.
    fn prepare(&self, offset: usize, size: usize, direction: Direction) -> Result<()> {
        self.mapped.buffer.copy_in(0, &self.around)?;
        if let Direction::Read = direction {
            self.mapped.buffer.copy_in(offset, &self.data[..size])?;
        }
        Ok(())
    }

    /// Checks what was copied, and for writes also that nothing else was.
    fn check(&self, offset: usize, size: usize, direction: Direction) -> Result<()> {
        match direction {
            Direction::Read => compare("read through the mapping", &self.data[..size], &self.read[..size])?,
            Direction::Write => {
                let mut expected = self.around.clone();
                expected[offset..offset + size].copy_from_slice(&self.data[..size]);
                let mut found = vec![0; expected.len()];
                self.mapped.buffer.copy_out(0, &mut found)?;
                compare("written through the mapping", &expected, &found)?;
            }
        }
        Ok(())
    }
}

impl Direction {
    fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::Write => ("writing", "write"),
            Self::Read => ("reading", "read"),
        }
    }
}

/// Time of copies to and from GPU memory through a CPU mapping, for sizes of 1, 2, 4 bytes and so on.
#[derive(Args, Debug, Serialize)]
#[command(args_override_self = true)]
pub struct Copylat {
    #[command(flatten)]
    #[serde(skip)]
    common: Common,
    #[command(flatten)]
    #[serde(flatten)]
    memory: Memory,
    #[command(flatten)]
    #[serde(flatten)]
    routines: Routines,
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

#[derive(Serialize)]
struct Latency {
    test: Test,
    bytes: usize,
    us: PerCall,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
enum Test {
    #[serde(rename = "cuMemcpy_H2D")]
    CudaToGpu,
    #[serde(rename = "cuMemcpy_D2H")]
    CudaFromGpu,
    #[serde(rename = "gdr_copy_to_mapping")]
    ToMapping,
    #[serde(rename = "gdr_copy_from_mapping")]
    FromMapping,
}

struct Bench {
    mapped: Mapped,
    copies: Copies,
    cuda: Option<CudaCopies>,
    cold: bool,
    host: Vec<u8>,
    output: Output,
}

struct CudaCopies {
    context: Arc<CudaContext>,
    host: Pinned,
}

impl Program for Copylat {
    const NAME: &'static str = "gdrcopy_copylat";

    fn run(&self) -> Result<()> {
        usage(self.size > 0, || "-s 0: there is nothing to copy".into())?;
        let copies = self.routines.copies()?;
        let mut output = Output::open(self.common.json.as_deref())?;
        let target = Target::open(&self.common, &output)?;
        let cuda =
            (self.cumemcpy || self.cold_cache).then(|| CudaCopies::open(&target, self.size)).transpose()?;
        let buffer = target.allocate(self.size, self.memory, &output)?;
        let mapped = target.map(buffer, self.memory, &output)?;
        let kind = mapped.mapping.kind();
        say!(output, "use cold cache: {}", if self.cold_cache { "yes" } else { "no" })?;
        if self.cold_cache && kind != MappingType::Cached {
            let name = type_name(kind);
            return Err(Failure::failed(format_args!("-C needs a cached mapping; this one is: {name}")));
        }
        say!(output, "copy routines: {}", copies.describe(kind))?;
        let tests = if self.cumemcpy { &Test::ALL[..] } else { &Test::ALL[2..] };
        let sizes: Vec<_> = doubling(1, self.size).collect();
        output.steps(tests.len() * sizes.len());
        let mut bench =
            Bench { mapped, copies, cuda, cold: self.cold_cache, host: pattern(1, self.size), output };
        let mut results = Vec::new();
        for &test in tests {
            let batches = Batches::of(if test.writes() { self.counts.writes } else { self.counts.reads });
            bench.announce(test, batches)?;
            for &bytes in &sizes {
                bench.output.step(format!("{} {bytes}", test.name()));
                let us = bench.measure(test, bytes, batches)?;
                let Micros { min, p50, p99 } = us.us;
                say!(
                    bench.output,
                    "{} \t {bytes:>8} \t {p50:>11.4} \t {min:>11.4} \t {p99:>11.4}",
                    test.name()
                )?;
                results.push(Latency { test, bytes, us });
            }
        }
        say!(bench.output, "")?;
        bench.mapped.release(&bench.output)?;
        target.finish(bench.output, self, results)
    }
}

impl CudaCopies {
    fn open(target: &Target, len: usize) -> Result<Self> {
        if target.gdr.backend() == BackendKind::Host {
            return Err(Failure::failed("-c and -C need a GPU; the host backend has none"));
        }
        let context = cuda::context(target.gpu)?;
        let mut host = Pinned::alloc(&context, len)?;
        host.bytes().copy_from_slice(&pattern(1, len));
        Ok(Self { context, host })
    }
}

impl Bench {
    fn announce(&self, test: Test, batches: Batches) -> Result<()> {
        let (output, name) = (&self.output, test.name());
        say!(output, "")?;
        say!(output, "{name} num iters for each size: {}", batches.calls())?;
        if test == Test::ToMapping {
            let text =
                "WARNING: the time until the CPU goes on. The data may still be on its way to the GPU.";
            say!(output, "{text}")?;
        }
        let tabs = if test.by_cuda() { "\t\t" } else { "\t\t\t" };
        say!(output, "Test {tabs} Size(B) \t Median Time(us) \t Min. Time(us) \t P99 Time(us)")
    }

    /// Times copies of one size and checks what they brought.
    fn measure(&mut self, test: Test, bytes: usize, batches: Batches) -> Result<PerCall> {
        let good = pattern(1, bytes);
        let Self { mapped, copies, cuda, cold, host, .. } = self;
        let (mapping, buffer) = (&mapped.mapping, &mapped.buffer);
        // The memory to be overwritten starts with other data.
        buffer.copy_in(0, &pattern(if test.writes() { 2 } else { 1 }, bytes))?;
        let by_cuda = cuda.as_mut().map(|cuda| (&*cuda.context, &mut cuda.host));
        let timing = match (test, by_cuda) {
            (Test::CudaToGpu, Some((_, pinned))) => {
                batches.time(|| cuda::memcpy(buffer.addr(), pinned.addr(), bytes))?
            }
            (Test::CudaFromGpu, Some((_, pinned))) => {
                pinned.bytes()[..bytes].fill(0);
                let timing = batches.time(|| cuda::memcpy(pinned.addr(), buffer.addr(), bytes))?;
                compare("read by cuMemcpy", &good, &pinned.bytes()[..bytes])?;
                timing
            }
            (Test::ToMapping, Some((context, _))) if *cold => batches.time_each(
                || cuda::clear(context, buffer.addr(), bytes),
                || Ok(copies.write(mapping, 0, &good)?),
            )?,
            (Test::FromMapping, Some((context, _))) if *cold => batches.time_each(
                || cuda::clear(context, buffer.addr(), bytes),
                || Ok(copies.read(mapping, 0, &mut host[..bytes])?),
            )?,
            (Test::ToMapping, _) => batches.time(|| Ok(copies.write(mapping, 0, &good)?))?,
            _ => batches.time(|| Ok(copies.read(mapping, 0, &mut host[..bytes])?))?,
        };
        if test.writes() {
            let mut found = vec![0; bytes];
            buffer.copy_out(0, &mut found)?;
            compare(test.name(), &good, &found)?;
        } else if test == Test::FromMapping {
            let expected = if *cold { vec![0; bytes] } else { good };
            compare(test.name(), &expected, &host[..bytes])?;
        }
        Ok(timing.per_call())
    }
}

impl Test {
    /// In the order of GDRCopy's tool; those by CUDA first.
    const ALL: [Self; 4] = [Self::CudaToGpu, Self::CudaFromGpu, Self::ToMapping, Self::FromMapping];

    fn by_cuda(self) -> bool {
        matches!(self, Self::CudaToGpu | Self::CudaFromGpu)
    }

    fn writes(self) -> bool {
        matches!(self, Self::CudaToGpu | Self::ToMapping)
    }

    fn name(self) -> &'static str {
        match self {
            Self::CudaToGpu => "cuMemcpy_H2D",
            Self::CudaFromGpu => "cuMemcpy_D2H",
            Self::ToMapping => "gdr_copy_to_mapping",
            Self::FromMapping => "gdr_copy_from_mapping",
        }
    }
}

/// Time of pin, map, get_info, unmap and unpin, for sizes of 64 KiB, 128 KiB and so on.
#[derive(Args, Debug, Serialize)]
#[command(args_override_self = true)]
pub struct Apiperf {
    #[command(flatten)]
    #[serde(skip)]
    common: Common,
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
const BINS: usize = 10;

#[derive(Serialize)]
struct Costs {
    bytes: usize,
    pin: Cost,
    map: Cost,
    get_info: Cost,
    unmap: Cost,
    unpin: Cost,
    pin_histogram: Vec<Bin>,
}

/// Times in microseconds.
#[derive(Clone, Copy, Serialize)]
struct Cost {
    #[serde(flatten)]
    us: Micros,
    mean: f64,
}

/// The steps of a cycle, in order.
const STEPS: [&str; 5] = ["pin", "map", "get_info", "unmap", "unpin"];

impl Program for Apiperf {
    const NAME: &'static str = "gdrcopy_apiperf";

    fn run(&self) -> Result<()> {
        usage(self.size >= PAGE, || format!("-s {}: the smallest size is {PAGE}, a GPU page", self.size))?;
        let sizes: Vec<_> = doubling(PAGE, self.size).collect();
        let mut output = Output::open(self.common.json.as_deref())?;
        let target = Target::open(&self.common, &output)?;
        let buffer = target.allocate(self.size, self.memory, &output)?;
        output.steps(sizes.len());
        let mut results = Vec::new();
        for bytes in sizes {
            output.step(format!("{bytes} bytes"));
            let row = self.measure(&target, &buffer, bytes)?;
            row.print(&output)?;
            results.push(row);
        }
        target.finish(output, self, results)
    }
}

impl Apiperf {
    fn measure(&self, target: &Target, buffer: &GpuBuffer, bytes: usize) -> Result<Costs> {
        for _ in 0..self.warm_up {
            self.cycle(target, buffer, bytes)?;
        }
        let cycles =
            (0..self.iterations).map(|_| self.cycle(target, buffer, bytes)).collect::<Result<Vec<_>>>()?;
        let [pin, map, get_info, unmap, unpin] = std::array::from_fn(|step| Cost::of(&cycles, step));
        let pins: Vec<_> = cycles.iter().map(|cycle| cycle[0]).collect();
        Ok(Costs { bytes, pin, map, get_info, unmap, unpin, pin_histogram: histogram(&pins, BINS) })
    }

    fn cycle(&self, target: &Target, buffer: &GpuBuffer, bytes: usize) -> Result<[Duration; STEPS.len()]> {
        let mut clock = [Instant::now(); STEPS.len() + 1];
        let pin = target.gdr.pin(buffer.addr(), bytes)?;
        clock[1] = Instant::now();
        let mapping = pin.map_as(self.memory.mapping.request())?;
        clock[2] = Instant::now();
        std::hint::black_box(pin.info());
        clock[3] = Instant::now();
        mapping.unmap()?;
        clock[4] = Instant::now();
        pin.unpin()?;
        clock[5] = Instant::now();
        Ok(std::array::from_fn(|step| clock[step + 1] - clock[step]))
    }
}

impl Cost {
    fn of(cycles: &[[Duration; STEPS.len()]], step: usize) -> Self {
        let mut samples = Samples::default();
        cycles.iter().for_each(|cycle| samples.add(cycle[step]));
        let sum: Duration = cycles.iter().map(|cycle| cycle[step]).sum();
        Self { us: samples.micros(1), mean: sum.as_secs_f64() * 1e6 / cycles.len() as f64 }
    }
}

impl Costs {
    fn print(&self, output: &Output) -> Result<()> {
        let costs = [self.pin, self.map, self.get_info, self.unmap, self.unpin];
        let line = |name: &str, value: fn(&Cost) -> f64| {
            let values = costs.iter().map(|cost| format!("\t{:.6}", value(cost)));
            say!(output, "{name}{}", values.collect::<String>())
        };
        say!(output, "Size(B){}", STEPS.map(|step| format!("\t{step}.Time(us)")).concat())?;
        line(&self.bytes.to_string(), |cost| cost.mean)?;
        line("min", |cost| cost.us.min)?;
        line("median", |cost| cost.us.p50)?;
        line("p99", |cost| cost.us.p99)?;
        say!(output, "Histogram of gdr_pin_buffer latency for {} bytes", self.bytes)?;
        for Bin { from_us, to_us, count } in &self.pin_histogram {
            say!(output, "[{from_us:.6}\t-\t{to_us:.6}]\t{count}")?;
        }
        say!(output, "")
    }
}

/// Times from `from_us` on and below `to_us`; the last bin includes its end.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Bin {
    from_us: f64,
    to_us: f64,
    count: usize,
}

/// `bins` bins of one width from the smallest to the largest time. Every time is in exactly one.
fn histogram(times: &[Duration], bins: usize) -> Vec<Bin> {
    let (Some(&min), Some(&max)) = (times.iter().min(), times.iter().max()) else { return Vec::new() };
    // In nanoseconds, with integers: edges are computed once, for counting and for printing.
    let span = (max - min).as_nanos();
    let edge = |i: usize| min.as_nanos() + span * i as u128 / bins as u128;
    let mut counts = vec![0; bins];
    for time in times {
        let above = (1..bins).take_while(|&i| time.as_nanos() >= edge(i)).count();
        counts[above] += 1;
    }
    let us = |i| edge(i) as f64 / 1e3;
    let bin = |(i, count)| Bin { from_us: us(i), to_us: us(i + 1), count };
    counts.into_iter().enumerate().map(bin).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(times: &[u64], bins: usize) -> Vec<usize> {
        let times: Vec<_> = times.iter().copied().map(Duration::from_nanos).collect();
        let bins = histogram(&times, bins);
        for pair in bins.windows(2) {
            assert_eq!(pair[0].to_us, pair[1].from_us);
        }
        bins.iter().map(|bin| bin.count).collect()
    }

    #[test]
    fn every_time_is_in_the_bin_whose_edges_hold_it() {
        assert_eq!(counts(&[1000, 1100, 1199, 1200, 1999, 2000], 5), [3, 1, 0, 0, 2]);
        assert_eq!(counts(&[7, 7, 7], 3), [0, 0, 3], "no width: all edges are one");
        assert_eq!(counts(&[5, 6], 10).iter().sum::<usize>(), 2);
        assert!(histogram(&[], 10).is_empty());
        let bins = histogram(&[1000, 3000].map(Duration::from_nanos), 2);
        let expected =
            [Bin { from_us: 1.0, to_us: 2.0, count: 1 }, Bin { from_us: 2.0, to_us: 3.0, count: 1 }];
        assert_eq!(bins, expected);
    }
}
