//! `pplat`: round trips between the CPU and a running kernel.

use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use cudarc::driver::sys::{CUdevice_attribute, CUfunction};
use cudarc::driver::{CudaEvent, CudaStream, result};
use gdrcopy::{BackendKind, GpuBuffer, Mapping};
use serde::Serialize;

use super::cuda::{self, Pinned};
use super::{Common, Failure, Memory, Output, Program, Result, Target, bytes, usage};
use crate::measure::{Micros, Samples};

/// Round trips between CPU and GPU: one side writes data and a flag, the other polls, checks the data and answers.
#[derive(Args, Debug, Serialize)]
#[command(args_override_self = true)]
pub struct Pplat {
    #[command(flatten)]
    #[serde(skip)]
    common: Common,
    #[command(flatten)]
    #[serde(flatten)]
    memory: Memory,
    /// Round trips, after a tenth as many that warm up.
    #[arg(short = 't', long, value_name = "COUNT", default_value_t = 1000,
          value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    iterations: u32,
    /// Seconds after which either side gives up waiting for the other; 0 stands for an hour.
    #[arg(short = 'u', long, value_name = "SECONDS", default_value_t = 10,
          value_parser = clap::value_parser!(u64).range(..=86_400))]
    timeout: u64,
    /// Bytes of data in each round, a multiple of 4; 0 for the flags alone.
    #[arg(short = 's', long, value_name = "BYTES", value_parser = bytes, default_value_t = 0)]
    size: usize,
    /// Blocks of the kernel.
    #[arg(short = 'B', long, value_name = "COUNT", default_value_t = 8,
          value_parser = clap::value_parser!(u32).range(1..=65_535))]
    blocks: u32,
    /// Threads of a block.
    #[arg(short = 'T', long, value_name = "COUNT", default_value_t = 1024,
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: u32,
    /// 0: the CPU produces and the GPU consumes; 1: the other way round.
    #[arg(short = 'm', long, value_enum, default_value_t = Mode::CpuProduces)]
    mode: Mode,
    /// Where the flag is that the GPU polls.
    #[arg(short = 'G', long, value_enum, value_name = "PLACE", default_value_t = Where::Gpumem)]
    gpu_flag: Where,
    /// Where the flags are that the CPU polls.
    #[arg(short = 'C', long, value_enum, value_name = "PLACE", default_value_t = Where::Hostmem)]
    cpu_flag: Where,
    /// Where the data is.
    #[arg(short = 'D', long, value_enum, value_name = "PLACE", default_value_t = Where::Gpumem)]
    data: Where,
    /// Flushes the data to the GPU before the flag, with -m 0 and -s.
    #[arg(long)]
    flush: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
enum Mode {
    /// The CPU writes data and the GPU's flag.
    #[value(name = "0")]
    CpuProduces,
    /// The GPU writes data and the CPU's flags.
    #[value(name = "1")]
    GpuProduces,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Where {
    /// The GPU's, which the CPU reaches through a mapping.
    Gpumem,
    /// The host's, pinned, which the GPU reaches over the bus.
    Hostmem,
}

/// What both sides must agree on.
#[derive(Clone, Copy, Debug)]
struct Rounds {
    mode: Mode,
    /// All rounds, with those that warm up.
    rounds: u32,
    blocks: u32,
    threads: u32,
    /// Words of data.
    words: usize,
    flush: bool,
    /// A side gives up after this long without an answer.
    limit: Duration,
}

/// The memory that both sides use. Flags are words of 4 bytes that count the rounds.
#[derive(Debug)]
struct Shared {
    /// One word, which every block polls.
    gpu_flag: Place,
    /// A word for each block, which the CPU polls.
    cpu_flags: Place,
    data: Option<Place>,
}

/// How it ended on the GPU's side.
#[derive(Clone, Debug, Default)]
struct GpuSide {
    wrong_words: u32,
    blocks_gave_up: u32,
    /// With [`Mode::GpuProduces`]: the clock of block 0 at the start and after each round, nanoseconds.
    times: Vec<u64>,
}

#[derive(Serialize)]
struct Results {
    round_trips: u32,
    /// Round trips whose average is one sample: the GPU's clock is too coarse for one round trip.
    round_trips_per_sample: u32,
    #[serde(rename = "round_trip_us")]
    us: Micros,
    /// Words of data that did not have the value of their round.
    wrong_words: u64,
}

/// Word `index` of the data of a round, as in `pplat.cu`.
fn expected(round: u32, index: usize) -> u32 {
    let index = u32::try_from(index & 0xffff_ffff).expect("masked");
    index ^ if round % 2 == 1 { 0x5a5a_5a5a } else { 0xa5a5_a5a5 }
}

impl Program for Pplat {
    const NAME: &'static str = "gdrcopy_pplat";

    fn run(&self) -> Result<()> {
        usage(self.size.is_multiple_of(4), || format!("-s {}: not a multiple of 4", self.size))?;
        usage(!self.flush || (self.mode == Mode::CpuProduces && self.size > 0), || {
            "--flush is for data that the CPU writes: -m 0 and -s".into()
        })?;
        let output = Output::open(self.common.json.as_deref())?;
        let target = Target::open(&self.common, &output)?;
        let plan = self.plan();
        self.explain(plan, &output)?;
        let shared = Arc::new(self.shared(&target, plan)?);
        let (samples, each, wrong_words) = if target.gdr.backend() == BackendKind::Host {
            say!(output, "NOTE: threads take the place of the blocks")?;
            self.exchange(plan, &shared, Threads::start(plan, &shared))
        } else {
            let kernel = Kernel::launch(plan, &shared, &target)?;
            self.exchange(plan, &shared, kernel)
        }?;
        let us = samples.micros(each);
        let Micros { min, p50, p99 } = us;
        say!(
            output,
            "Round-trip latency per iteration is (min) {min:.4}, (median) {p50:.4}, (p99) {p99:.4} us"
        )?;
        let (round_trips, round_trips_per_sample) = (self.iterations, each);
        let results = Results { round_trips, round_trips_per_sample, us, wrong_words };
        target.finish(output, self, results)?;
        match (wrong_words, self.mode, self.flush) {
            (0, ..) => Ok(()),
            (wrong, Mode::CpuProduces, false) => Err(Failure::failed(format_args!(
                "the flag overtook the data: {wrong} words were stale; with --flush it must not"
            ))),
            (wrong, ..) => Err(Failure::failed(format_args!("{wrong} words of the data were wrong"))),
        }
    }
}

impl Pplat {
    fn plan(&self) -> Rounds {
        let (blocks, threads) = if self.size == 0 { (1, 1) } else { (self.blocks, self.threads) };
        Rounds {
            mode: self.mode,
            rounds: self.iterations + self.iterations.div_ceil(10),
            blocks,
            threads,
            words: self.size / 4,
            flush: self.flush,
            limit: Duration::from_secs(if self.timeout == 0 { 3600 } else { self.timeout }),
        }
    }

    fn explain(&self, plan: Rounds, output: &Output) -> Result<()> {
        let Self { iterations, size, .. } = self;
        let Rounds { blocks, threads, .. } = plan;
        let (what, data) = match size {
            0 => (
                "We will measure the visibility of the flag value only. Setting nblocks and nthreads to 1."
                    .into(),
                String::new(),
            ),
            _ => (
                format!(
                    "Measuring the latency of data + flag model, with {blocks} blocks of {threads} threads."
                ),
                format!("data size {size} bytes and "),
            ),
        };
        say!(output, "{what}")?;
        say!(output, "Running {iterations} iterations with {data}flag size 4 bytes.")?;
        let (mode, clock) = match self.mode {
            Mode::CpuProduces => ("CPU produces and GPU consumes", "CPU"),
            Mode::GpuProduces => ("GPU produces and CPU consumes", "GPU"),
        };
        say!(output, "Benchmark mode: {mode}; the {clock} measures the time.")?;
        say!(output, "gpu alloc fn: {}", self.memory.alloc.name())
    }

    fn shared(&self, target: &Target, plan: Rounds) -> Result<Shared> {
        let place = |at, words| Place::new(at, words, target, self.memory);
        let data = (plan.words > 0).then(|| place(self.data, plan.words)).transpose()?;
        let flags = plan.blocks as usize;
        Ok(Shared { gpu_flag: place(self.gpu_flag, 1)?, cpu_flags: place(self.cpu_flag, flags)?, data })
    }

    /// Runs the CPU's side and ends the other. Gives the times, how many rounds each is of, and the wrong words.
    fn exchange(&self, plan: Rounds, shared: &Shared, gpu: impl Gpu) -> Result<(Samples, u32, u64)> {
        let cpu = drive(plan, shared);
        // The other side is waited for in any case: it uses the memory.
        let verdict = gpu.end();
        let cpu = cpu?;
        let verdict = verdict?;
        if verdict.blocks_gave_up > 0 {
            let (blocks, limit) = (verdict.blocks_gave_up, plan.limit);
            return Err(Failure::failed(format_args!("{blocks} blocks saw no flag for {limit:?}")));
        }
        let warm_up = (plan.rounds - self.iterations) as usize;
        let (samples, each) = match plan.mode {
            Mode::CpuProduces => (samples(&cpu.times[warm_up..], 1), 1),
            Mode::GpuProduces => {
                let times: Vec<_> = verdict.times.windows(2).map(|t| t[1].saturating_sub(t[0])).collect();
                let times: Vec<_> = times[warm_up..].iter().copied().map(Duration::from_nanos).collect();
                let each = times.len().div_ceil(100);
                (samples(&times, each), u32::try_from(each).expect("a hundredth of a u32"))
            }
        };
        Ok((samples, each, cpu.wrong_words + u64::from(verdict.wrong_words)))
    }
}

trait Gpu {
    /// Waits for its end, which comes by itself within the limit.
    fn end(self) -> Result<GpuSide>;
}

/// What the CPU saw.
#[derive(Debug, Default)]
struct CpuSide {
    /// With [`Mode::CpuProduces`]: the times of the rounds.
    times: Vec<Duration>,
    wrong_words: u64,
}

fn drive(plan: Rounds, shared: &Shared) -> Result<CpuSide> {
    // Data of odd and of even rounds.
    let data = [0, 1].map(|round| (0..plan.words).flat_map(|i| expected(round, i).to_ne_bytes()).collect());
    answered(plan, shared, 1)?;
    match plan.mode {
        Mode::CpuProduces => produce(plan, shared, &data),
        Mode::GpuProduces => consume(plan, shared, &data),
    }
}

fn produce(plan: Rounds, shared: &Shared, data: &[Vec<u8>; 2]) -> Result<CpuSide> {
    let mut times = Vec::with_capacity(plan.rounds as usize);
    // The clock is read once in a round: the end of one is the beginning of the next.
    let mut last = Instant::now();
    for round in 1..=plan.rounds {
        if let Some(place) = &shared.data {
            place.write(&data[round as usize % 2])?;
            if plan.flush {
                place.flush()?;
            }
        }
        shared.gpu_flag.store(0, round)?;
        answered(plan, shared, round + 1)?;
        let now = Instant::now();
        times.push(now - last);
        last = now;
    }
    Ok(CpuSide { times, wrong_words: 0 })
}

fn consume(plan: Rounds, shared: &Shared, data: &[Vec<u8>; 2]) -> Result<CpuSide> {
    let mut found = vec![0; plan.words * 4];
    let mut wrong_words = 0;
    shared.gpu_flag.store(0, 1)?;
    for round in 1..=plan.rounds {
        answered(plan, shared, round + 1)?;
        if let Some(place) = &shared.data {
            place.read(&mut found)?;
            let good = &data[round as usize % 2];
            if found != *good {
                let words = good.as_chunks::<4>().0.iter().zip(found.as_chunks::<4>().0);
                wrong_words += words.filter(|(good, found)| good != found).count() as u64;
            }
        }
        shared.gpu_flag.store(0, round + 1)?;
    }
    Ok(CpuSide { times: Vec::new(), wrong_words })
}

/// Waits until the flags of all blocks have a value.
fn answered(plan: Rounds, shared: &Shared, value: u32) -> Result<()> {
    (0..plan.blocks).try_for_each(|block| {
        let seen = await_flag(plan.limit, || Ok(shared.cpu_flags.load(block as usize)? == value))?;
        let error = || {
            let (round, limit) = (value - 1, plan.limit);
            Failure::failed(format_args!("timeout: block {block} did not answer round {round} in {limit:?}"))
        };
        if seen { Ok(()) } else { Err(error()) }
    })
}

/// Polls; false when the time is over.
fn await_flag(limit: Duration, mut seen: impl FnMut() -> Result<bool>) -> Result<bool> {
    let mut start = None;
    loop {
        // The clock is read, and the processor offered to others, only now and then.
        for _ in 0..4096 {
            if seen()? {
                return Ok(true);
            }
        }
        if start.get_or_insert_with(Instant::now).elapsed() > limit {
            return Ok(false);
        }
        std::thread::yield_now();
    }
}

/// Samples of averages over `each` rounds; rounds that do not fill a sample are left out.
fn samples(times: &[Duration], each: usize) -> Samples {
    let mut samples = Samples::default();
    times.chunks_exact(each).for_each(|rounds| samples.add(rounds.iter().sum()));
    samples
}

struct Threads(Vec<JoinHandle<Result<GpuSide>>>);

impl Threads {
    fn start(plan: Rounds, shared: &Arc<Shared>) -> Self {
        let epoch = Instant::now();
        let start = |block| {
            let shared = shared.clone();
            std::thread::spawn(move || run_block(plan, &shared, block, epoch))
        };
        Self((0..plan.blocks as usize).map(start).collect())
    }
}

impl Gpu for Threads {
    fn end(self) -> Result<GpuSide> {
        let mut all = GpuSide::default();
        for thread in self.0 {
            let one =
                thread.join().map_err(|_| Failure::failed("a thread in place of a block panicked"))??;
            all.wrong_words += one.wrong_words;
            all.blocks_gave_up += one.blocks_gave_up;
            all.times.extend(one.times);
        }
        Ok(all)
    }
}

fn run_block(plan: Rounds, shared: &Shared, block: usize, epoch: Instant) -> Result<GpuSide> {
    let mut verdict = GpuSide::default();
    let mine = (block..plan.words).step_by(plan.blocks as usize);
    let flag = |value| await_flag(plan.limit, || Ok(shared.gpu_flag.load(0)? == value));
    let now = || u64::try_from(epoch.elapsed().as_nanos()).unwrap_or(u64::MAX);
    shared.cpu_flags.store(block, 1)?;
    if plan.mode == Mode::GpuProduces {
        verdict.blocks_gave_up += u32::from(!flag(1)?);
        verdict.times.push(now());
    }
    for round in 1..=plan.rounds {
        if plan.mode == Mode::CpuProduces {
            if !flag(round)? {
                verdict.blocks_gave_up += 1;
                break;
            }
            for (place, i) in shared.data.iter().flat_map(|place| mine.clone().map(move |i| (place, i))) {
                verdict.wrong_words += u32::from(place.load(i)? != expected(round, i));
            }
            shared.cpu_flags.store(block, round + 1)?;
        } else if verdict.blocks_gave_up == 0 {
            for (place, i) in shared.data.iter().flat_map(|place| mine.clone().map(move |i| (place, i))) {
                place.store(i, expected(round, i))?;
            }
            shared.cpu_flags.store(block, round + 1)?;
            verdict.blocks_gave_up += u32::from(!flag(round + 1)?);
            verdict.times.push(now());
        }
    }
    if block > 0 {
        verdict.times.clear();
    }
    Ok(verdict)
}

/// A launched kernel, with all that it uses.
struct Kernel {
    plan: Rounds,
    done: CudaEvent,
    verdict: GpuBuffer,
    times: Option<GpuBuffer>,
    _stream: Arc<CudaStream>,
    shared: Arc<Shared>,
}

/// Bytes of `struct Verdict` in `pplat.cu`.
const VERDICT: usize = 8;

/// The kernel's name.
fn kernel_name(mode: Mode) -> &'static str {
    match mode {
        Mode::CpuProduces => "cpu_produces",
        Mode::GpuProduces => "gpu_produces",
    }
}

impl Kernel {
    /// Launches; the kernel says in the CPU's flags when it runs.
    fn launch(plan: Rounds, shared: &Arc<Shared>, target: &Target) -> Result<Self> {
        let context = cuda::context(target.gpu)?;
        let image = concat!(include_str!("pplat.ptx"), "\0");
        // SAFETY: a terminated PTX text. The module stays loaded as long as the process lives.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) }
            .map_err(|e| Failure::failed(format_args!("the GPU driver cannot compile the kernels: {e}")))?;
        let name = CString::new(kernel_name(plan.mode))?;
        // SAFETY: the module is loaded.
        let function = unsafe { result::module::get_function(module, name) }?;
        let sms = context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        fits(function, sms, plan)?;

        // All memory before the launch: CUDA may wait for kernels when it allocates.
        let verdict = target.gdr.alloc(target.gpu, VERDICT)?;
        let times = (plan.mode == Mode::GpuProduces)
            .then(|| target.gdr.alloc(target.gpu, (plan.rounds as usize + 1) * 8))
            .transpose()?;
        let stream = context.new_stream()?;
        // In the order of the kernels' parameters, of which the call reads as many bytes as each has; `cpu_produces` does not
        // look at the last.
        let mut arguments = [
            shared.gpu_flag.gpu_addr(),
            shared.cpu_flags.gpu_addr(),
            plan.rounds.into(),
            shared.data.as_ref().map_or(0, Place::gpu_addr),
            plan.words as u64,
            u64::try_from(plan.limit.as_nanos()).unwrap_or(u64::MAX),
            verdict.addr(),
            times.as_ref().map_or(0, GpuBuffer::addr),
        ];
        let mut arguments = arguments.each_mut().map(|argument| (argument as *mut u64).cast::<c_void>());
        let (grid, block) = ((plan.blocks, 1, 1), (plan.threads, 1, 1));
        // SAFETY: the arguments are little-endian, at least as long as the parameters, and copied by the call; the memory
        // that they name is large enough and kept in the returned value until the kernel has ended.
        unsafe { result::launch_kernel(function, grid, block, 0, stream.cu_stream(), &mut arguments) }?;
        let done = stream.record_event(None)?;
        Ok(Self { plan, done, verdict, times, _stream: stream, shared: shared.clone() })
    }
}

/// Blocks that wait for each other must run at the same time.
fn fits(function: CUfunction, sms: i32, plan: Rounds) -> Result<()> {
    let threads = i32::try_from(plan.threads).expect("1024 at most");
    // SAFETY: the function was found in a loaded module.
    let each = unsafe { result::occupancy::max_active_block_per_multiprocessor(function, threads, 0) }?;
    let most = u32::try_from(each * sms).unwrap_or(0);
    usage(plan.blocks <= most, || {
        format!("-B {}: this GPU runs at most {most} blocks of {threads} threads at a time", plan.blocks)
    })
}

impl Gpu for Kernel {
    fn end(self) -> Result<GpuSide> {
        // A waiting block gives up after the limit.
        let deadline = Instant::now() + self.plan.limit * 2 + Duration::from_secs(10);
        while !self.done.try_is_complete()? {
            if Instant::now() > deadline {
                // Its memory must not be freed, and freeing would wait for ever.
                std::mem::forget(self.shared.clone());
                std::mem::forget(self);
                return Err(Failure::failed(
                    "the kernel did not end; look for Xid messages in the kernel's log",
                ));
            }
            sleep(Duration::from_millis(1));
        }
        let mut counts = [0; VERDICT];
        self.verdict.copy_out(0, &mut counts)?;
        let [wrong_words, blocks_gave_up] = [0, 1].map(|at| u32::from_ne_bytes(counts.as_chunks().0[at]));
        let mut bytes = vec![0; self.times.as_ref().map_or(0, GpuBuffer::len)];
        if let Some(times) = &self.times {
            times.copy_out(0, &mut bytes)?;
        }
        let times = bytes.as_chunks::<8>().0.iter().map(|time| u64::from_ne_bytes(*time)).collect();
        Ok(GpuSide { wrong_words, blocks_gave_up, times })
    }
}

/// Words of memory that CPU and GPU reach.
#[derive(Debug)]
enum Place {
    /// GPU memory, mapped.
    Gpu(Mapping, GpuBuffer),
    /// Host memory, pinned.
    Host(Pinned),
    /// Host memory where there is no GPU.
    Plain(Vec<AtomicU32>),
}

impl Place {
    /// `words` words, all 0.
    fn new(at: Where, words: usize, target: &Target, memory: Memory) -> Result<Self> {
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
    fn gpu_addr(&self) -> u64 {
        match self {
            Self::Gpu(_, buffer) => buffer.addr(),
            Self::Host(pinned) => pinned.addr(),
            Self::Plain(words) => words.as_ptr().addr() as u64,
        }
    }

    /// The words in host memory, or else the mapping of GPU memory.
    #[inline]
    fn words(&self) -> std::result::Result<&[AtomicU32], &Mapping> {
        match self {
            Self::Gpu(mapping, _) => Err(mapping),
            Self::Host(pinned) => Ok(pinned.words()),
            Self::Plain(words) => Ok(words),
        }
    }

    /// Loads a word before all later loads.
    #[inline]
    fn load(&self, index: usize) -> Result<u32> {
        match self.words() {
            Ok(words) => Ok(words[index].load(Ordering::Acquire)),
            Err(mapping) => Ok(mapping.load(index * 4)?),
        }
    }

    /// Stores a word after all earlier stores.
    #[inline]
    fn store(&self, index: usize, value: u32) -> Result<()> {
        match self.words() {
            Ok(words) => words[index].store(value, Ordering::Release),
            Err(mapping) => mapping.store(index * 4, value)?,
        }
        Ok(())
    }

    /// Writes bytes at the start, before all later stores.
    fn write(&self, data: &[u8]) -> Result<()> {
        match self.words() {
            Err(mapping) => mapping.write(0, data)?,
            Ok(words) => {
                for (word, bytes) in words.iter().zip(data.as_chunks::<4>().0) {
                    word.store(u32::from_ne_bytes(*bytes), Ordering::Relaxed);
                }
            }
        }
        Ok(())
    }

    /// Reads bytes from the start, before all later loads.
    fn read(&self, out: &mut [u8]) -> Result<()> {
        match self.words() {
            Err(mapping) => mapping.read(0, out)?,
            Ok(words) => {
                for (word, bytes) in words.iter().zip(out.as_chunks_mut::<4>().0) {
                    *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
                }
            }
        }
        Ok(())
    }

    /// Returns when what was written is visible to kernels that run.
    fn flush(&self) -> Result<()> {
        if let Self::Gpu(mapping, _) = self {
            mapping.flush()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_differs_between_rounds_and_words() {
        for index in [0, 1, 1000, 1 << 30] {
            assert_eq!(expected(1, index), expected(3, index));
            assert_eq!(
                expected(1, index),
                !expected(2, index),
                "no bit of a round is that of the one before"
            );
            assert_ne!(expected(1, index), expected(1, index + 1));
        }
    }

    #[test]
    fn the_compiled_kernels_are_those_that_are_launched() {
        let (source, ptx) = (include_str!("pplat.cu"), include_str!("pplat.ptx"));
        for mode in [Mode::CpuProduces, Mode::GpuProduces] {
            let name = kernel_name(mode);
            assert!(ptx.contains(&format!(".visible .entry {name}(")), "{name}");
            assert!(source.contains(&format!("void {name}(")), "{name}");
        }
        assert!(ptx.contains(".target sm_70"));
    }

    #[test]
    fn waits_end_and_samples_are_of_whole_groups() {
        let samples = samples(&[1, 3, 5, 7, 100].map(Duration::from_micros), 2);
        assert!(samples.count() == 2 && (samples.micros(2).min - 2.0).abs() < 0.01);
        assert!(!await_flag(Duration::ZERO, || Ok(false)).unwrap());
        let mut polls = 0;
        assert!(await_flag(Duration::ZERO, || Ok((polls += 1, polls == 3).1)).unwrap());
        assert!(await_flag(Duration::MAX, || Err(Failure::failed("broken"))).is_err());
    }
}
