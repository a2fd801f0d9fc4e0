//! `copybw`: bandwidth of copies through a mapping.

use std::sync::Barrier;

use clap::Args;
use serde::Serialize;

use super::Program;
use super::tools_shared::{Batches, PerCall, Timing};
use super::tools_shared::{Copies, Routines};
use super::tools_shared::{Failure, Result};
use super::tools_shared::{Common, Memory, bytes, usage};
use super::tools_shared::{Output, say};
use super::tools_shared::{compare, pattern};
use super::tools_shared::Report;
use super::tools_shared::{Mapped, Target};
use crate::measure::Machine;

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
    /// Copies to the GPU.
    #[arg(short = 'w', long, value_name = "COUNT", default_value_t = 10_000,
          value_parser = clap::value_parser!(u32).range(1..))]
    writes: u32,
    /// Copies from the GPU.
    #[arg(short = 'r', long, value_name = "COUNT", default_value_t = 100,
          value_parser = clap::value_parser!(u32).range(1..))]
    reads: u32,
    /// Threads that copy at the same time, each with a buffer and mapping of its own.
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,
}

#[derive(Serialize)]
struct Row {
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
struct Lane {
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
        let mut lanes = (0..self.threads)
            .map(|number| self.lane(number, &target, &output))
            .collect::<Result<Vec<_>>>()?;
        say!(output, "copy routines: {}", copies.describe(lanes[0].mapped.mapping.kind()))?;
        output.steps(2 * sizes.len());
        let mut results = Vec::new();
        for size in sizes {
            for (direction, calls) in [(Direction::Write, self.writes), (Direction::Read, self.reads)] {
                let batches = Batches::of(calls);
                output.step(format!("{size} bytes"));
                let (verb, noun) = direction.words();
                let (offset, calls) = (self.offset, batches.calls());
                say!(output, "{verb} test, size={size} offset={offset} num_iters={calls}")?;
                lanes.iter().try_for_each(|lane| lane.prepare(offset, size, direction))?;
                let row = self.measure(&mut lanes, size, batches, direction, copies)?;
                lanes.iter().try_for_each(|lane| lane.check(offset, size, direction))?;
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
                output.stepped();
            }
        }
        lanes.into_iter().try_for_each(|lane| lane.mapped.release(&output))?;
        let (machine, setup) = (Machine::here(), &target.setup);
        output.finish(&Report { tool: Self::NAME, machine, setup, parameters: self, results })
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
        let sweep = (0..usize::BITS).map(|shift| 1 << shift).take_while(|&size| size <= most);
        Ok(if self.sweep { sweep.collect() } else { vec![most] })
    }

    fn lane(&self, number: u16, target: &Target, output: &Output) -> Result<Lane> {
        let buffer = target.allocate(self.size, self.memory, output)?;
        let mapped = target.map(buffer, self.memory, output)?;
        let [data, around] = [0, 1].map(|part| pattern(2 * u32::from(number) + part, self.size));
        Ok(Lane { mapped, data, read: vec![0; self.size], around })
    }

    fn measure(
        &self,
        lanes: &mut [Lane],
        size: usize,
        batches: Batches,
        direction: Direction,
        copies: Copies,
    ) -> Result<Row> {
        let (start, offset) = (&Barrier::new(lanes.len()), self.offset);
        let timed: Vec<Result<Timing>> = std::thread::scope(|scope| {
            let copy = |Lane { mapped, data, read, .. }: &mut Lane| {
                let (mapping, data, read) = (&mapped.mapping, &data[..size], &mut read[..size]);
                start.wait();
                match direction {
                    Direction::Write => batches.time(|| Ok(copies.write(mapping, offset, data)?)),
                    Direction::Read => batches.time(|| Ok(copies.read(mapping, offset, read)?)),
                }
            };
            let threads: Vec<_> = lanes.iter_mut().map(|lane| scope.spawn(move || copy(lane))).collect();
            let died = |_| Err(Failure::failed("a copying thread panicked"));
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(died)).collect()
        });
        let timed = timed.into_iter().collect::<Result<Vec<_>>>()?;
        let mib_per_s = timed.iter().map(|timing| timing.mib_per_s(size)).sum();
        let all = timed.into_iter().reduce(Timing::append).expect("at least one thread");
        Ok(Row { direction, bytes: size, mib_per_s, copy: all.per_call() })
    }
}

impl Lane {
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
