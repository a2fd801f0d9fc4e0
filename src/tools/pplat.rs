//! `pplat`: round trips between the CPU and a running kernel.

use std::ffi::CStr;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use gdrcopy::{BackendKind, GpuBuffer, Mapping};
use gdsync::memory::Memory as HostMemory;
use gdsync::stream::Via;
use serde::Serialize;

use super::{Bench, Memory, Program, bytes, usage};
use crate::app_stream::{AppStream, Placement, ptx};
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

/// The memory that both sides use. Flags are words of 4 bytes that count the rounds.
#[derive(Debug)]
struct Shared {
    /// One word, which every block polls.
    gpu_flag: Place,
    /// A word for each block, which the CPU polls.
    cpu_flags: Place,
    data: Option<Place>,
}

/// The argument of both kernels, as in the source.
#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    gpu_flag: u64,
    cpu_flags: u64,
    rounds: u64,
    data: u64,
    words: u64,
    limit_ns: u64,
    verdict: u64,
    times: u64,
}

/// Bytes of `struct Verdict` in `pplat.cu`.
const VERDICT: usize = 8;

const PTX: &CStr = ptx(concat!(include_str!("pplat.ptx"), "\0"));

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
        if bench.gdr.backend() == BackendKind::Host {
            return Err("pplat needs a GPU; the host backend has none".into());
        }
        bench.sheet.step("round trips");
        let (samples, each, wrong) = self.exchange(&bench)?;
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
    /// Blocks and threads of the kernel.
    fn shape(&self) -> (u32, u32) {
        if self.size == 0 { (1, 1) } else { (self.blocks, self.threads) }
    }

    /// All rounds, with those that warm up.
    fn rounds(&self) -> u32 {
        self.iterations + self.iterations.div_ceil(10)
    }

    /// A side gives up after this long without an answer.
    fn limit(&self) -> Duration {
        Duration::from_secs(if self.timeout == 0 { 3600 } else { self.timeout })
    }

    /// Runs the kernel and the CPU's side. Gives the times, how many rounds each is of, and the wrong words.
    fn exchange(&self, bench: &Bench) -> Result<(Samples, u32, u64)> {
        let (blocks, threads) = self.shape();
        // A waiting block gives up after the limit.
        let end = self.limit() * 2 + Duration::from_secs(10);
        let app = AppStream::new(&Placement::on_gpus(Via::MemOp, vec![bench.gpu]).open()?, end, PTX)?;
        let kernels = app.kernels.as_ref().ok_or("no kernels")?;
        let name = match self.mode {
            Mode::CpuProduces => c"cpu_produces",
            Mode::GpuProduces => c"gpu_produces",
        };
        // SAFETY: the parameter of both has the layout of `Arguments`.
        let kernel = unsafe { kernels.find(name) }?;
        // All memory before the launch: CUDA may wait for kernels when it allocates.
        let place = |at, words| Place::new(at, words, bench, &self.memory);
        let shared = Shared {
            gpu_flag: place(self.gpu_flag, 1)?,
            cpu_flags: place(self.cpu_flag, blocks as usize)?,
            data: (self.size > 0).then(|| place(self.data, self.size / 4)).transpose()?,
        };
        let verdict = bench.gdr.alloc(bench.gpu, VERDICT)?;
        verdict.copy_in(0, &[0; VERDICT])?;
        let times = bench.gdr.alloc(bench.gpu, (self.rounds() as usize + 1) * 8)?;
        let addr = |place: &Place| place.gpu_addr(&app);
        let arguments = Arguments {
            gpu_flag: addr(&shared.gpu_flag)?,
            cpu_flags: addr(&shared.cpu_flags)?,
            rounds: self.rounds().into(),
            data: shared.data.as_ref().map_or(Ok(0), addr)?,
            words: self.size as u64 / 4,
            limit_ns: u64::try_from(self.limit().as_nanos())?,
            verdict: verdict.addr(),
            times: times.addr(),
        };
        // SAFETY: memory of these lengths, which is kept until the stream is idle.
        unsafe { kernels.launch(&kernel, blocks, threads, arguments) }?;
        let driven = self.drive(&shared);
        if let Err(error) = app.finish() {
            // Its memory must not be freed, and freeing would wait for ever.
            std::mem::forget((verdict, times, shared, app));
            let cause = driven.err().unwrap_or(error);
            return Err(format!(
                "the kernel did not end: {cause}; look for Xid messages in the kernel's log"
            )
            .into());
        }
        let (cpu_times, wrong) = driven?;
        let mut counts = [0; VERDICT];
        verdict.copy_out(0, &mut counts)?;
        let [wrong_words, gave_up] = [0, 1].map(|at| u32::from_ne_bytes(counts.as_chunks().0[at]));
        if gave_up > 0 {
            return Err(format!("{gave_up} blocks saw no flag for {:?}", self.limit()).into());
        }
        let (times, each) = match self.mode {
            Mode::CpuProduces => (cpu_times, 1),
            // The GPU's clock is too coarse for one round trip.
            Mode::GpuProduces => {
                let mut clock = vec![0; times.len()];
                times.copy_out(0, &mut clock)?;
                let time = |pair: &[[u8; 8]]| {
                    u64::from_ne_bytes(pair[1]).saturating_sub(u64::from_ne_bytes(pair[0]))
                };
                let times = clock.as_chunks::<8>().0.windows(2).map(time).map(Duration::from_nanos);
                (times.collect(), self.iterations.div_ceil(100))
            }
        };
        let warm_up = (self.rounds() - self.iterations) as usize;
        Ok((samples(&times[warm_up..], each as usize), each, wrong + u64::from(wrong_words)))
    }

    /// The CPU's side: with [`Mode::CpuProduces`] the times of the rounds, and the wrong words that it saw.
    fn drive(&self, shared: &Shared) -> Result<(Vec<Duration>, u64)> {
        // Data of odd and of even rounds.
        let words = self.size / 4;
        let data = [0, 1].map(|round| (0..words).flat_map(|i| expected(round, i).to_ne_bytes()).collect());
        self.answered(shared, 1)?;
        match self.mode {
            Mode::CpuProduces => Ok((self.produce(shared, &data)?, 0)),
            Mode::GpuProduces => Ok((Vec::new(), self.consume(shared, &data)?)),
        }
    }

    fn produce(&self, shared: &Shared, data: &[Vec<u8>; 2]) -> Result<Vec<Duration>> {
        let mut times = Vec::with_capacity(self.rounds() as usize);
        // The clock is read once in a round: the end of one is the beginning of the next.
        let mut last = Instant::now();
        for round in 1..=self.rounds() {
            if let Some(place) = &shared.data {
                place.write(&data[round as usize % 2])?;
                if self.flush {
                    place.flush()?;
                }
            }
            shared.gpu_flag.store(0, round)?;
            self.answered(shared, round + 1)?;
            let now = Instant::now();
            times.push(now - last);
            last = now;
        }
        Ok(times)
    }

    fn consume(&self, shared: &Shared, data: &[Vec<u8>; 2]) -> Result<u64> {
        let mut found = vec![0; self.size];
        let mut wrong_words = 0;
        shared.gpu_flag.store(0, 1)?;
        for round in 1..=self.rounds() {
            self.answered(shared, round + 1)?;
            if let Some(place) = &shared.data {
                place.read(&mut found)?;
                let good = &data[round as usize % 2];
                let words = good.as_chunks::<4>().0.iter().zip(found.as_chunks::<4>().0);
                wrong_words += words.filter(|(good, found)| good != found).count() as u64;
            }
            shared.gpu_flag.store(0, round + 1)?;
        }
        Ok(wrong_words)
    }

    /// Waits until the flags of all blocks have a value.
    fn answered(&self, shared: &Shared, value: u32) -> Result<()> {
        (0..self.shape().0).try_for_each(|block| {
            let flag = || Result::Ok((shared.cpu_flags.load(block as usize)? == value).then_some(()));
            let (round, limit) = (value - 1, self.limit());
            let fix =
                if round == 0 { "; a GPU runs only so many blocks at a time: see -B and -T" } else { "" };
            let error = || format!("timeout: block {block} did not answer round {round} in {limit:?}{fix}");
            Ok(poll(limit, flag)?.ok_or_else(error)?)
        })
    }
}

/// Samples of averages over `each` rounds; rounds that do not fill a sample are left out.
fn samples(times: &[Duration], each: usize) -> Samples {
    Samples::of(times.chunks_exact(each).map(|rounds| rounds.iter().sum()))
}

/// Words of memory that CPU and GPU reach.
#[derive(Debug)]
enum Place {
    /// GPU memory, mapped.
    Gpu(Mapping, GpuBuffer),
    /// Host memory, which the GPU reaches over the bus.
    Host(HostMemory),
}

impl Place {
    /// `words` words, all 0.
    fn new(at: Where, words: usize, bench: &Bench, memory: &Memory) -> Result<Self> {
        if at == Where::Hostmem {
            return Ok(Self::Host(HostMemory::alloc(words * 4)?));
        }
        let (buffer, mapping) = bench.map(words * 4, memory)?;
        Ok(Self::Gpu(mapping, buffer))
    }

    /// The address for kernels.
    fn gpu_addr(&self, app: &AppStream) -> Result<u64> {
        match self {
            Self::Gpu(_, buffer) => Ok(buffer.addr()),
            Self::Host(memory) => Ok(memory.gpu_addr(app.gpu()?)?),
        }
    }

    /// Loads a word before all later loads.
    #[inline]
    fn load(&self, index: usize) -> Result<u32> {
        match self {
            Self::Gpu(mapping, _) => Ok(mapping.load(index * 4)?),
            Self::Host(memory) => Ok(memory.atomic32(index * 4)?.load(Ordering::Acquire)),
        }
    }

    /// Stores a word after all earlier stores.
    #[inline]
    fn store(&self, index: usize, value: u32) -> Result<()> {
        match self {
            Self::Gpu(mapping, _) => mapping.store(index * 4, value)?,
            Self::Host(memory) => memory.atomic32(index * 4)?.store(value, Ordering::Release),
        }
        Ok(())
    }

    /// Writes bytes at the start, before all later stores.
    fn write(&self, data: &[u8]) -> Result<()> {
        match self {
            Self::Gpu(mapping, _) => Ok(mapping.write(0, data)?),
            Self::Host(memory) => Ok(memory.write(0, data)?),
        }
    }

    /// Reads bytes from the start, before all later loads.
    fn read(&self, out: &mut [u8]) -> Result<()> {
        match self {
            Self::Gpu(mapping, _) => Ok(mapping.read(0, out)?),
            Self::Host(memory) => Ok(memory.read(0, out)?),
        }
    }

    /// Returns when what was written is visible to kernels that run.
    fn flush(&self) -> Result<()> {
        match self {
            Self::Gpu(mapping, _) => Ok(mapping.flush()?),
            Self::Host(_) => Ok(()),
        }
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
    fn samples_are_of_whole_groups() {
        let samples = samples(&[1, 3, 5, 7, 100].map(Duration::from_micros), 2);
        assert!(samples.count() == 2 && (samples.micros(0.0) - 4.0).abs() < 0.01);
    }
}
