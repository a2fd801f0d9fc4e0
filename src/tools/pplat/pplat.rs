//! `pplat`: round trips between the CPU and a kernel that runs.

mod kernel;
mod place;
mod player;
mod rounds;

use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use gdrcopy::BackendKind;
use serde::Serialize;

use super::Program;
use super::tools_shared::{Failure, Result};
use super::tools_shared::{Common, Memory, bytes, usage};
use super::tools_shared::{Output, say};
use super::tools_shared::Report;
use super::tools_shared::Target;
use crate::measure::{Machine, Micros, Samples};
use kernel::Kernel;
use place::Place;
use player::Players;

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

/// Who begins a round.
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

/// Which memory.
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
struct Game {
    mode: Mode,
    /// All rounds, with those that warm up.
    rounds: u32,
    blocks: u32,
    threads: u32,
    /// Words of data.
    words: usize,
    flush: bool,
    /// After so long without an answer a side gives up.
    limit: Duration,
}

/// The memory of the game. Flags are words of 4 bytes that count the rounds.
#[derive(Debug)]
struct Board {
    /// One word, which every block polls.
    gpu_flag: Place,
    /// A word for each block, which the CPU polls.
    cpu_flags: Place,
    data: Option<Place>,
}

/// How it ended on the GPU's side.
#[derive(Clone, Debug, Default)]
struct Verdict {
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
        let game = self.game();
        self.explain(game, &output)?;
        let board = Arc::new(self.board(&target, game)?);
        let (samples, each, wrong_words) = if target.gdr.backend() == BackendKind::Host {
            say!(output, "NOTE: threads play the blocks")?;
            self.play(game, &board, Players::start(game, &board))
        } else {
            let kernel = Kernel::launch(game, &board, &target)?;
            self.play(game, &board, kernel)
        }?;
        let us = samples.micros(each);
        let Micros { min, p50, p99 } = us;
        say!(
            output,
            "Round-trip latency per iteration is (min) {min:.4}, (median) {p50:.4}, (p99) {p99:.4} us"
        )?;
        let (round_trips, round_trips_per_sample) = (self.iterations, each);
        let results = Results { round_trips, round_trips_per_sample, us, wrong_words };
        let (machine, setup) = (Machine::here(), &target.setup);
        output.finish(&Report { tool: Self::NAME, machine, setup, parameters: self, results })?;
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
    fn game(&self) -> Game {
        let (blocks, threads) = if self.size == 0 { (1, 1) } else { (self.blocks, self.threads) };
        Game {
            mode: self.mode,
            rounds: self.iterations + self.iterations.div_ceil(10),
            blocks,
            threads,
            words: self.size / 4,
            flush: self.flush,
            limit: Duration::from_secs(if self.timeout == 0 { 3600 } else { self.timeout }),
        }
    }

    fn explain(&self, game: Game, output: &Output) -> Result<()> {
        let rounds = self.iterations;
        if self.size == 0 {
            say!(
                output,
                "We will measure the visibility of the flag value only. Setting nblocks and nthreads to 1."
            )?;
            say!(output, "Running {rounds} iterations with flag size 4 bytes.")?;
        } else {
            let (blocks, threads) = (game.blocks, game.threads);
            say!(
                output,
                "Measuring the latency of data + flag model, with {blocks} blocks of {threads} threads."
            )?;
            say!(
                output,
                "Running {rounds} iterations with data size {} bytes and flag size 4 bytes.",
                self.size
            )?;
        }
        let (mode, clock) = match self.mode {
            Mode::CpuProduces => ("CPU produces and GPU consumes", "CPU"),
            Mode::GpuProduces => ("GPU produces and CPU consumes", "GPU"),
        };
        say!(output, "Benchmark mode: {mode}; the {clock} measures the time.")?;
        say!(output, "gpu alloc fn: {}", self.memory.alloc.name())
    }

    fn board(&self, target: &Target, game: Game) -> Result<Board> {
        let place = |at, words| Place::new(at, words, target, self.memory);
        let data = (game.words > 0).then(|| place(self.data, game.words)).transpose()?;
        let flags = game.blocks as usize;
        Ok(Board { gpu_flag: place(self.gpu_flag, 1)?, cpu_flags: place(self.cpu_flag, flags)?, data })
    }

    /// Plays the CPU's side and ends the other. Gives the times, how many rounds each is of, and the wrong words.
    fn play(&self, game: Game, board: &Board, gpu: impl Gpu) -> Result<(Samples, u32, u64)> {
        let played = rounds::play(game, board);
        // The other side is waited for in any case: it uses the board.
        let verdict = gpu.end();
        let played = played?;
        let verdict = verdict?;
        if verdict.blocks_gave_up > 0 {
            let (blocks, limit) = (verdict.blocks_gave_up, game.limit);
            return Err(Failure::failed(format_args!("{blocks} blocks saw no flag for {limit:?}")));
        }
        let warm_up = (game.rounds - self.iterations) as usize;
        let (samples, each) = match game.mode {
            Mode::CpuProduces => (rounds::samples(&played.times[warm_up..], 1), 1),
            Mode::GpuProduces => {
                let times: Vec<_> = verdict.times.windows(2).map(|t| t[1].saturating_sub(t[0])).collect();
                let times: Vec<_> = times[warm_up..].iter().copied().map(Duration::from_nanos).collect();
                let each = times.len().div_ceil(100);
                (rounds::samples(&times, each), u32::try_from(each).expect("a hundredth of a u32"))
            }
        };
        Ok((samples, each, played.wrong_words + u64::from(verdict.wrong_words)))
    }
}

/// The GPU's side while it plays.
trait Gpu {
    /// Waits for its end, which comes by itself within the limit of the game.
    fn end(self) -> Result<Verdict>;
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
            let name = kernel::name(mode);
            assert!(ptx.contains(&format!(".visible .entry {name}(")), "{name}");
            assert!(source.contains(&format!("void {name}(")), "{name}");
        }
        assert!(ptx.contains(".target sm_70"));
    }
}
