//! One rank produces blocks of data on its stream, the other one consumes them on its stream, without the CPUs.
//!
//! Started alone it spawns its peer; under mpirun, srun or torchrun-style variables it joins. There are a few slots. The
//! consumer's stream gives each back with a message of no bytes, for which the producer's stream waits before it fills the
//! slot again; so the slower one sets the pace, and nothing is overwritten.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use gdasync::measure::{Pattern, size};
use gdasync::{note, out};
use gdsync::memory::Memory;
use gdsync::stream::{Batch, HostStreamConfig, Stream};
use mp::{Communicator, Registration};

/// Blocks posted ahead before the CPU waits for its stream.
const AHEAD: u64 = 64;

/// What the program may fail with.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// A producer and a consumer on streams of two processes, every block checked.
#[derive(Parser)]
#[command(version, after_help = "Example: cargo run --release --example producer_consumer -- --bytes 65536")]
struct Options {
    /// Blocks to make.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    blocks: u64,
    /// Bytes of a block.
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1 << 30))]
    bytes: u32,
    /// Blocks that can be under way.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    slots: u32,
    /// Microseconds that making a block takes beyond filling it.
    #[arg(long, value_name = "US", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    produce_us: u32,
    /// Microseconds that using a block takes beyond checking it.
    #[arg(long, value_name = "US", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    consume_us: u32,
    /// Seconds after which a wait is given up, 1 to 86400.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
}

/// The slots of a rank, and its stream.
struct Side<'a> {
    comm: &'a Communicator,
    stream: Stream,
    slots: Registration,
    bytes: usize,
    count: u64,
    pause: Duration,
    timeout: Duration,
    wrong: Arc<AtomicU64>,
}

impl Side<'_> {
    fn slot(&self, block: u64) -> Result<std::ops::Range<usize>> {
        let start = usize::try_from(block % self.count)? * self.bytes;
        Ok(start..start + self.bytes)
    }

    /// Adds to a batch what a kernel would do: `work` with a slot, and the pause.
    fn compute(
        &self,
        batch: &mut Batch,
        block: u64,
        work: fn(Pattern, &Memory, usize, usize) -> bool,
    ) -> Result<()> {
        let (memory, at, pause) = (self.slots.memory().clone(), self.slot(block)?, self.pause);
        let wrong = self.wrong.clone();
        batch.host_fn(move || {
            let start = Instant::now();
            if !work(Pattern::new(0, block), &memory, at.start, at.len()) {
                wrong.fetch_add(1, Ordering::Relaxed);
            }
            while start.elapsed() < pause {
                std::hint::spin_loop();
            }
        });
        Ok(())
    }

    fn produce(&self, blocks: u64) -> Result<()> {
        let mut given_back = std::collections::VecDeque::new();
        for block in 0..blocks {
            let mut batch = Batch::new();
            if block >= self.count {
                let free = given_back.pop_front().ok_or("no slot was ever given back")?;
                self.comm.wait_in_batch(&mut batch, &free)?;
            }
            self.compute(&mut batch, block, |pattern, memory, at, len| {
                pattern.fill(memory, at, len).is_ok()
            })?;
            given_back.push_back(self.comm.irecv(&self.slots, 0..0, 1)?);
            self.comm.isend_in_batch(&mut batch, &self.slots, self.slot(block)?, 1).map(drop)?;
            self.submit(batch, block)?;
        }
        let rest: Vec<_> = given_back.into();
        self.comm.wait_all_on_stream(&self.stream, &rest)?;
        Ok(self.stream.synchronize(self.timeout)?)
    }

    fn consume(&self, blocks: u64) -> Result<()> {
        for block in 0..blocks {
            let mut batch = Batch::new();
            let full = self.comm.irecv(&self.slots, self.slot(block)?, 0)?;
            self.comm.wait_in_batch(&mut batch, &full)?;
            self.compute(&mut batch, block, |pattern, memory, at, len| {
                matches!(pattern.check(memory, at, len), Ok(true))
            })?;
            self.comm.isend_in_batch(&mut batch, &self.slots, 0..0, 0).map(drop)?;
            self.submit(batch, block)?;
        }
        Ok(self.stream.synchronize(self.timeout)?)
    }

    fn submit(&self, mut batch: Batch, block: u64) -> Result<()> {
        self.stream.with_timeout(self.timeout).submit(&mut batch)?;
        if block % AHEAD == AHEAD - 1 {
            self.stream.synchronize(self.timeout)?;
        }
        Ok(())
    }
}

fn run(options: &Options) -> Result<()> {
    let timeout = Duration::from_secs(options.timeout);
    // The consumer posts receives into a slot again while older ones wait: the producer sends once the slot was given back.
    let comm = Communicator::builder().allow_overlap(true).spawn(2).size(2).timeout(timeout).init()?;
    let produces = comm.rank() == 0;
    let pause = if produces { options.produce_us } else { options.consume_us };
    let (bytes, count) = (usize::try_from(options.bytes)?, u64::from(options.slots));
    let config =
        HostStreamConfig { name: "blocks".into(), wait_limit: timeout, ..HostStreamConfig::default() };
    let side = Side {
        stream: Stream::host(config)?,
        slots: comm.register(&Memory::alloc(bytes * usize::try_from(count)?)?)?,
        comm: &comm,
        bytes,
        count,
        pause: Duration::from_micros(pause.into()),
        timeout,
        wrong: Arc::default(),
    };
    comm.barrier(timeout)?;
    let start = Instant::now();
    if produces { side.produce(options.blocks) } else { side.consume(options.blocks) }?;
    let time = start.elapsed();
    let wrong = comm.exchange(&side.wrong.load(Ordering::Relaxed).to_be_bytes(), timeout)?;
    let wrong: u64 = wrong.iter().filter_map(|w| w.first_chunk()).map(|w| u64::from_be_bytes(*w)).sum();
    // First: the peer has not failed where the output cannot be written.
    comm.finalize(timeout)?;
    if produces {
        let each = time.as_secs_f64() * 1e6 / options.blocks as f64;
        out!(
            "{} blocks of {} B over {} slots: {each:.2} us each, {wrong} wrong",
            options.blocks,
            size(bytes),
            count
        )?;
    }
    if wrong > 0 { Err("blocks arrived with wrong data".into()) } else { Ok(()) }
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            note!("producer_consumer: {error}");
            ExitCode::FAILURE
        }
    }
}
