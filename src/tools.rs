//! The tools of GDRCopy with their options: does mapping GPU memory work on this machine, and how fast is it?
//!
//! Each is a program (`gdrcopy_copybw`) and a subcommand (`gdasync gdrcopy copybw`). They exit with 0 for success, 1 for a
//! failure, 2 for wrong options. This file has what they share: options, the GPU under test, and their start and end.

mod cuda;
mod perf;
mod pplat;
mod sanity;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Args, Command, Subcommand};
use gdrcopy::cuda::AllocKind;
use gdrcopy::{BackendKind, Gdr, GpuBuffer, Mapping, MappingType};
use serde::Serialize;
use serde_json::json;

use crate::note;
use crate::results::{Output, Result, Sheet};

pub use perf::{Apiperf, Copybw, Copylat};
pub use pplat::Pplat;
pub use sanity::Sanity;

/// The tools as subcommands.
#[derive(Debug, Subcommand)]
#[expect(missing_docs, reason = "each has its own")]
pub enum Tool {
    Sanity(Sanity),
    Copybw(Copybw),
    Copylat(Copylat),
    Apiperf(Apiperf),
    Pplat(Pplat),
}

/// A tool, with its options.
pub trait Program: Args {
    /// The name of the program that is this tool alone.
    const NAME: &'static str;

    /// Runs the tool. It fails with [`Usage`] if the options contradict each other.
    fn run(&self) -> Result<()>;
}

/// Options that contradict each other, or the machine.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Usage(String);

impl Tool {
    /// Runs the tool and prints a failure.
    pub fn run(&self) -> ExitCode {
        match self {
            Self::Sanity(tool) => tell(tool),
            Self::Copybw(tool) => tell(tool),
            Self::Copylat(tool) => tell(tool),
            Self::Apiperf(tool) => tell(tool),
            Self::Pplat(tool) => tell(tool),
        }
    }
}

fn command<P: Program>() -> Command {
    P::augment_args(Command::new(P::NAME).version(env!("CARGO_PKG_VERSION")))
}

fn tell<P: Program>(tool: &P) -> ExitCode {
    let Err(error) = tool.run() else { return ExitCode::SUCCESS };
    if error.is::<Usage>() {
        command::<P>().error(ErrorKind::ValueValidation, error).exit()
    }
    note!("{}: {error}", P::NAME);
    ExitCode::FAILURE
}

/// The main function of a program that is one tool.
pub fn main<P: Program>() -> ExitCode {
    log_to_stderr();
    let matches = command::<P>().get_matches();
    let tool = P::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    tell(&tool)
}

/// Sends the logs that `RUST_LOG` asks for to standard error.
pub fn log_to_stderr() {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
}

/// Options of every tool.
#[derive(Args, Clone, Debug)]
struct Common {
    /// GPU, as CUDA counts them.
    #[arg(short = 'd', long, value_name = "ORDINAL", default_value_t = 0)]
    gpu: i32,
    /// How to map: gdrdrv, dmabuf, rm or host [default: the first that works].
    #[arg(long, value_name = "BACKEND")]
    backend: Option<BackendKind>,
    /// Write the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Common {
    fn open(&self) -> gdrcopy::Result<Gdr> {
        self.backend.into_iter().fold(Gdr::builder(), |builder, kind| builder.backend(kind)).open()
    }

    /// The GPU and the backend, or [`Usage`] where there is no such GPU.
    fn device(&self, gdr: &Gdr) -> Result<String> {
        if gdr.backend() == BackendKind::Host && self.gpu == 0 {
            return Ok(format!("no GPU takes part: all of it is about plain memory, mapped by {gdr}"));
        }
        let gpus = gdr.gpus()?;
        let gpu = gpus.iter().find(|gpu| gpu.ordinal == self.gpu).ok_or_else(|| {
            Usage(format!("there is no GPU {}; CUDA shows {} of them", self.gpu, gpus.len()))
        })?;
        Ok(format!("{} at {}, mapped by {gdr}", gpu.name, gpu.pci))
    }
}

/// Which memory to map, and how.
#[derive(Args, Clone, Debug, Serialize)]
struct Memory {
    #[command(flatten)]
    #[serde(skip)]
    common: Common,
    /// How GPU memory is allocated.
    #[arg(short = 'a', long, value_name = "FN", value_parser = ["cuMemAlloc", "cuMemCreate"],
          default_value = "cuMemAlloc")]
    alloc: String,
    /// Caching type of the mapping: the platform's, write combining, cached, or device memory of Arm.
    #[arg(short = 'M', long, value_name = "TYPE", value_parser = ["default", "wc", "cache", "device"],
          default_value = "default")]
    mapping: String,
}

impl Memory {
    fn kind(&self) -> AllocKind {
        if self.alloc == "cuMemCreate" { AllocKind::Vmm } else { AllocKind::Malloc }
    }

    fn caching(&self) -> Option<MappingType> {
        match self.mapping.as_str() {
            "wc" => Some(MappingType::WriteCombining),
            "cache" => Some(MappingType::Cached),
            "device" => Some(MappingType::Device),
            _ => None,
        }
    }
}

/// Parses a number of bytes, at least 1: `4096`, `0x1000`, `4K`, `4Ki`, `16M`, `1G`; all are powers of 1024.
fn bytes(text: &str) -> std::result::Result<usize, String> {
    let expected = || "expected a number of bytes such as 4096, 0x1000, 64K, 16M or 1G".to_owned();
    let short = text.strip_suffix('i').unwrap_or(text);
    let (digits, shift) = match short.chars().last() {
        Some('k' | 'K') => (&short[..short.len() - 1], 10),
        Some('m' | 'M') => (&short[..short.len() - 1], 20),
        Some('g' | 'G') => (&short[..short.len() - 1], 30),
        _ => (text, 0),
    };
    let number = match digits.strip_prefix("0x") {
        Some(hex) => usize::from_str_radix(hex, 16),
        None => digits.parse(),
    };
    let number = number.map_err(|_| expected())?;
    // A buffer of this size and its copies must fit into the address space.
    number.checked_mul(1 << shift).filter(|&bytes| bytes <= 1 << 46).ok_or_else(expected)
}

/// Fails as wrong usage unless `fine`.
fn usage(fine: bool, message: impl FnOnce() -> String) -> Result<()> {
    if fine { Ok(()) } else { Err(Usage(message()).into()) }
}

/// Version of NVIDIA's kernel driver, where it is loaded.
pub fn nvidia_driver() -> Option<String> {
    fs::read_to_string("/sys/module/nvidia/version").ok().map(|version| version.trim().to_owned())
}

fn versions(gdr: &Gdr) -> serde_json::Value {
    json!({
        "kernel_module": gdr.driver_version().map(|(major, minor)| format!("{major}.{minor}")),
        "nvidia_driver": nvidia_driver(),
        "cuda": cuda::version(),
    })
}

/// The opened library, the chosen GPU, and the results.
struct Bench {
    gdr: Gdr,
    gpu: i32,
    device: String,
    sheet: Sheet,
}

impl Bench {
    /// Opens the library, for results of `steps` steps.
    fn open(common: &Common, steps: usize) -> Result<Self> {
        let sheet = Sheet::new(&Output::to(common.json.clone()), true, steps)?;
        let gdr = common.open()?;
        Ok(Self { device: common.device(&gdr)?, gpu: common.gpu, gdr, sheet })
    }

    fn map(&self, len: usize, memory: &Memory) -> Result<(GpuBuffer, Mapping)> {
        let buffer = self.gdr.alloc_with(self.gpu, len, memory.kind())?;
        let mapping = buffer.pin()?.map_as(memory.caching())?;
        Ok((buffer, mapping))
    }

    fn finish<P: Program + Serialize>(self, tool: &P) -> Result<()> {
        let options = json!({ "parameters": tool, "versions": versions(&self.gdr) });
        self.sheet.write_of(P::NAME, &self.device, "", options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_they_are_written() {
        for (text, expected) in
            [("0", 0), ("131072", 131_072), ("0x10", 16), ("64K", 65536), ("2Mi", 2 << 20), ("1g", 1 << 30)]
        {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
        for text in ["", "K", "i", "-1", "1.5M", "12 K", "0x", "5i", "99999999999G", "1T", "Ä"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }
}
