//! `pplat`: round trips between the CPU and a running kernel.

use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use cudarc::driver::result;
use cudarc::driver::sys::{CUdevice_attribute, CUfunction};
use gdrcopy::{BackendKind, GpuBuffer, Mapping};
use serde::Serialize;

use super::cuda::{self, Pinned};
use super::{Bench, Memory, Program, bytes, usage};
use crate::measure::{Samples, poll};
use crate::results::{Point, Result, Unit};

/// Round trips between CPU and GPU: one side writes data and a flag, the other polls, checks the data and answers.
#[derive(Args, Debug, Serialize)]
#[command(args_override_self = true)]
pub struct Pplat {
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

/// Results of the GPU's side.
#[derive(Clone, Debug, Default)]
struct GpuSide {
    wrong_words: u32,
    blocks_gave_up: u32,
    /// With [`Mode::GpuProduces`]: the clock of block 0 at the start and after each round, nanoseconds.
    times: Vec<u64>,
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
        let mut bench = Bench::open(&self.memory.common, 1)?;
        bench.sheet.step("round trips");
        let plan = self.plan();
        let shared = Arc::new(self.shared(&bench, plan)?);
        let gpu: End = match bench.gdr.backend() {
            // Threads take the place of the blocks.
            BackendKind::Host => threads(plan, &shared),
            _ => kernel(plan, &shared, &bench)?,
        };
        let (samples, each, wrong) = self.exchange(plan, &shared, gpu)?;
        let name = match self.mode {
            Mode::CpuProduces => "CPU produces and GPU consumes",
            Mode::GpuProduces => "GPU produces and CPU consumes",
        };
        let point = Point::time(self.size as u64, &samples, each);
        bench.sheet.add_point("round trip", name, "bytes", Unit::Micros, point);
        bench.finish(self)?;
        match (wrong, self.mode, self.flush) {
            (0, ..) => Ok(()),
            (_, Mode::CpuProduces, false) => {
                Err(format!("the flag overtook the data: {wrong} words were stale; with --flush it must not")
                    .into())
            }
            _ => Err(format!("{wrong} words of the data were wrong").into()),
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

    fn shared(&self, bench: &Bench, plan: Rounds) -> Result<Shared> {
        let place = |at, words| Place::new(at, words, bench, &self.memory);
        let data = (plan.words > 0).then(|| place(self.data, plan.words)).transpose()?;
        let flags = plan.blocks as usize;
        Ok(Shared { gpu_flag: place(self.gpu_flag, 1)?, cpu_flags: place(self.cpu_flag, flags)?, data })
    }

    /// Runs the CPU's side and ends the other. Gives the times, how many rounds each is of, and the wrong words.
    fn exchange(&self, plan: Rounds, shared: &Shared, gpu: End) -> Result<(Samples, u32, u64)> {
        let cpu = drive(plan, shared);
        // The other side is waited for in any case: it uses the memory.
        let verdict = gpu();
        let ((times, wrong), verdict) = (cpu?, verdict?);
        if verdict.blocks_gave_up > 0 {
            let (blocks, limit) = (verdict.blocks_gave_up, plan.limit);
            return Err(format!("{blocks} blocks saw no flag for {limit:?}").into());
        }
        let warm_up = (plan.rounds - self.iterations) as usize;
        let (times, each) = match plan.mode {
            Mode::CpuProduces => (times, 1),
            // The GPU's clock is too coarse for one round trip.
            Mode::GpuProduces => {
                let time = |pair: &[u64]| Duration::from_nanos(pair[1].saturating_sub(pair[0]));
                (verdict.times.windows(2).map(time).collect(), self.iterations.div_ceil(100))
            }
        };
        Ok((samples(&times[warm_up..], each as usize), each, wrong + u64::from(verdict.wrong_words)))
    }
}

/// Waits for the end of the GPU's side, which comes by itself within the limit.
type End = Box<dyn FnOnce() -> Result<GpuSide>>;

/// The CPU's side: with [`Mode::CpuProduces`] the times of the rounds, and the wrong words that it saw.
fn drive(plan: Rounds, shared: &Shared) -> Result<(Vec<Duration>, u64)> {
    // Data of odd and of even rounds.
    let data = [0, 1].map(|round| (0..plan.words).flat_map(|i| expected(round, i).to_ne_bytes()).collect());
    answered(plan, shared, 1)?;
    match plan.mode {
        Mode::CpuProduces => Ok((produce(plan, shared, &data)?, 0)),
        Mode::GpuProduces => Ok((Vec::new(), consume(plan, shared, &data)?)),
    }
}

fn produce(plan: Rounds, shared: &Shared, data: &[Vec<u8>; 2]) -> Result<Vec<Duration>> {
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
    Ok(times)
}

fn consume(plan: Rounds, shared: &Shared, data: &[Vec<u8>; 2]) -> Result<u64> {
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
    Ok(wrong_words)
}

/// Waits until the flags of all blocks have a value.
fn answered(plan: Rounds, shared: &Shared, value: u32) -> Result<()> {
    (0..plan.blocks).try_for_each(|block| {
        let flag = || Result::Ok((shared.cpu_flags.load(block as usize)? == value).then_some(()));
        let (round, limit) = (value - 1, plan.limit);
        let error = || format!("timeout: block {block} did not answer round {round} in {limit:?}");
        Ok(poll(plan.limit, flag)?.ok_or_else(error)?)
    })
}

/// Samples of averages over `each` rounds; rounds that do not fill a sample are left out.
fn samples(times: &[Duration], each: usize) -> Samples {
    Samples::of(times.chunks_exact(each).map(|rounds| rounds.iter().sum()))
}

fn threads(plan: Rounds, shared: &Arc<Shared>) -> End {
    let epoch = Instant::now();
    let start = |block| {
        let shared = shared.clone();
        std::thread::spawn(move || run_block(plan, &shared, block, epoch).map_err(|error| error.to_string()))
    };
    let threads: Vec<_> = (0..plan.blocks as usize).map(start).collect();
    Box::new(|| {
        let mut all = GpuSide::default();
        for thread in threads {
            let one = thread.join().map_err(|_| "a thread in place of a block panicked")??;
            all.wrong_words += one.wrong_words;
            all.blocks_gave_up += one.blocks_gave_up;
            all.times.extend(one.times);
        }
        Ok(all)
    })
}

fn run_block(plan: Rounds, shared: &Shared, block: usize, epoch: Instant) -> Result<GpuSide> {
    let mut verdict = GpuSide::default();
    let mine = (block..plan.words).step_by(plan.blocks as usize);
    let flag = |value| {
        let seen = || Result::Ok((shared.gpu_flag.load(0)? == value).then_some(()));
        Result::Ok(poll(plan.limit, seen)?.is_some())
    };
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

/// Bytes of `struct Verdict` in `pplat.cu`.
const VERDICT: usize = 8;

fn kernel_name(mode: Mode) -> &'static str {
    match mode {
        Mode::CpuProduces => "cpu_produces",
        Mode::GpuProduces => "gpu_produces",
    }
}

/// Launches the kernel, which says in the CPU's flags when it runs.
fn kernel(plan: Rounds, shared: &Arc<Shared>, bench: &Bench) -> Result<End> {
    let context = cuda::context(bench.gpu)?;
    let image = concat!(include_str!("pplat.ptx"), "\0");
    // SAFETY: a terminated PTX text. The module stays loaded as long as the process lives.
    let module = unsafe { result::module::load_data(image.as_ptr().cast()) }
        .map_err(|e| format!("the GPU driver cannot compile the kernels: {e}"))?;
    let name = CString::new(kernel_name(plan.mode))?;
    // SAFETY: the module is loaded.
    let function = unsafe { result::module::get_function(module, name) }?;
    let sms = context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    fits(function, sms, plan)?;

    // All memory before the launch: CUDA may wait for kernels when it allocates.
    let verdict = bench.gdr.alloc(bench.gpu, VERDICT)?;
    let times = (plan.mode == Mode::GpuProduces)
        .then(|| bench.gdr.alloc(bench.gpu, (plan.rounds as usize + 1) * 8))
        .transpose()?;
    let stream = context.new_stream()?;
    // In the order of the kernels' parameters; the call reads only the bytes of each. `cpu_produces` ignores the last.
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
    // that they name is large enough and kept in the returned closure until the kernel has ended.
    unsafe { result::launch_kernel(function, grid, block, 0, stream.cu_stream(), &mut arguments) }?;
    let (done, used) = (stream.record_event(None)?, (shared.clone(), stream));
    Ok(Box::new(move || {
        // A waiting block gives up after the limit.
        let deadline = Instant::now() + plan.limit * 2 + Duration::from_secs(10);
        while !done.try_is_complete()? {
            if Instant::now() > deadline {
                // Its memory must not be freed, and freeing would wait for ever.
                std::mem::forget((verdict, times, used));
                return Err("the kernel did not end; look for Xid messages in the kernel's log".into());
            }
            sleep(Duration::from_millis(1));
        }
        let mut counts = [0; VERDICT];
        verdict.copy_out(0, &mut counts)?;
        let [wrong_words, blocks_gave_up] = [0, 1].map(|at| u32::from_ne_bytes(counts.as_chunks().0[at]));
        let mut bytes = vec![0; times.as_ref().map_or(0, GpuBuffer::len)];
        if let Some(times) = &times {
            times.copy_out(0, &mut bytes)?;
        }
        drop(used);
        let times = bytes.as_chunks::<8>().0.iter().map(|time| u64::from_ne_bytes(*time)).collect();
        Ok(GpuSide { wrong_words, blocks_gave_up, times })
    }))
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

/// Words of memory that CPU and GPU reach.
#[derive(Debug)]
enum Place {
    /// GPU memory, mapped.
    Gpu(Mapping, GpuBuffer),
    /// Host memory, pinned.
    Host(Pinned),
}

impl Place {
    /// `words` words, all 0.
    fn new(at: Where, words: usize, bench: &Bench, memory: &Memory) -> Result<Self> {
        // The host backend maps host memory.
        if at == Where::Gpumem || bench.gdr.backend() == BackendKind::Host {
            let (buffer, mapping) = bench.map(words * 4, memory)?;
            return Ok(Self::Gpu(mapping, buffer));
        }
        Ok(Self::Host(Pinned::alloc(&cuda::context(bench.gpu)?, words * 4)?))
    }

    /// The address for kernels; of no use where there is no GPU.
    fn gpu_addr(&self) -> u64 {
        match self {
            Self::Gpu(_, buffer) => buffer.addr(),
            Self::Host(pinned) => pinned.addr(),
        }
    }

    /// The words in host memory, or else the mapping of GPU memory.
    #[inline]
    fn words(&self) -> std::result::Result<&[AtomicU32], &Mapping> {
        match self {
            Self::Gpu(mapping, _) => Err(mapping),
            Self::Host(pinned) => Ok(pinned.words()),
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
    fn samples_are_of_whole_groups() {
        let samples = samples(&[1, 3, 5, 7, 100].map(Duration::from_micros), 2);
        assert!(samples.count() == 2 && (samples.micros(0.0) - 4.0).abs() < 0.01);
    }
}
