//! `copylat`: time of copies through a mapping.

use std::sync::Arc;

use clap::Args;
use cudarc::driver::CudaContext;
use gdrcopy::{BackendKind, MappingType};
use serde::Serialize;

use super::Program;
use super::tools_shared::{Batches, PerCall};
use super::tools_shared::{Copies, Routines};
use super::cuda::{self, Pinned};
use super::tools_shared::{Failure, Result};
use super::tools_shared::{Common, Memory, bytes, usage};
use super::tools_shared::{Output, say};
use super::tools_shared::{compare, pattern};
use super::tools_shared::Report;
use super::tools_shared::{Mapped, Target, type_name};
use crate::measure::{Machine, Micros};

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
    /// Copies to the GPU, for each size.
    #[arg(short = 'w', long, value_name = "COUNT", default_value_t = 10_000,
          value_parser = clap::value_parser!(u32).range(1..))]
    writes: u32,
    /// Copies from the GPU, for each size.
    #[arg(short = 'r', long, value_name = "COUNT", default_value_t = 100,
          value_parser = clap::value_parser!(u32).range(1..))]
    reads: u32,
    /// Times cuMemcpy too, both ways, with pinned host memory.
    #[arg(short = 'c', long = "cumemcpy")]
    cumemcpy: bool,
    /// Lets the GPU write the memory before each copy, so that the CPU's cache does not have it. Only for cached
    /// mappings.
    #[arg(short = 'C', long = "cold-cache")]
    cold_cache: bool,
}

#[derive(Serialize)]
struct Row {
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

/// The two sides of the copies.
struct Bench {
    mapped: Mapped,
    copies: Copies,
    cuda: Option<Cuda>,
    cold: bool,
    host: Vec<u8>,
    output: Output,
}

/// What copies by CUDA need.
struct Cuda {
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
        let cuda = (self.cumemcpy || self.cold_cache).then(|| Cuda::open(&target, self.size)).transpose()?;
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
        let sizes: Vec<_> =
            (0..usize::BITS).map(|shift| 1 << shift).take_while(|&b| b <= self.size).collect();
        output.steps(tests.len() * sizes.len());
        let mut bench =
            Bench { mapped, copies, cuda, cold: self.cold_cache, host: pattern(1, self.size), output };
        let mut results = Vec::new();
        for &test in tests {
            let batches = Batches::of(if test.writes() { self.writes } else { self.reads });
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
                results.push(Row { test, bytes, us });
                bench.output.stepped();
            }
        }
        say!(bench.output, "")?;
        bench.mapped.release(&bench.output)?;
        let (machine, setup) = (Machine::here(), &target.setup);
        bench.output.finish(&Report { tool: Self::NAME, machine, setup, parameters: self, results })
    }
}

impl Cuda {
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
        // What is to be overwritten must not look as if it had been.
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
