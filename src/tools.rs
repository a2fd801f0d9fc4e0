//! The tools of GDRCopy with their options: does mapping GPU memory work on this machine, and how fast is it?
//!
//! Each is a program (`gdrcopy_copybw`) and a subcommand (`gdasync gdrcopy copybw`). They exit with 0 for success, 1 for a
//! failure, 2 for wrong options. This file has what they share: options, the GPU under test, output and JSON.

/// `say!(output, "{}", value)?` prints a line.
macro_rules! say {
    ($output:expr, $($format:tt)*) => { $output.line(format_args!($($format)*)) };
}

mod cuda;
mod perf;
mod pplat;
mod sanity;

use std::fmt::{Arguments, Display};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Args, Command, Subcommand, ValueEnum};
use gdrcopy::cuda::{AllocKind, GpuInfo};
use gdrcopy::{BackendKind, Gdr, GpuBuffer, Mapping, MappingType, Pin};
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};

use crate::measure::Machine;
use crate::{note, output};

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

    /// Runs the tool.
    fn run(&self) -> Result<(), Failure>;
}

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
    match tool.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Usage(message)) => command::<P>().error(ErrorKind::ValueValidation, message).exit(),
        Err(Failure::Failed(message)) => {
            note!("{}: {message}", P::NAME);
            ExitCode::FAILURE
        }
    }
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

/// Why a tool did not succeed.
#[derive(Debug)]
pub enum Failure {
    /// The options contradict each other.
    Usage(String),
    /// Something failed, or was found to be wrong.
    Failed(String),
}

impl Failure {
    fn failed(message: impl Display) -> Self {
        Self::Failed(message.to_string())
    }
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Failed(error.to_string())
    }
}

type Result<T, E = Failure> = std::result::Result<T, E>;

/// Options of every tool.
#[derive(Args, Clone, Debug)]
struct Common {
    /// GPU, as CUDA counts them.
    #[arg(short = 'd', long, value_name = "ORDINAL", default_value_t = 0)]
    gpu: i32,
    /// How to map: gdrdrv, dmabuf, rm or host [default: the first that works].
    #[arg(long, value_name = "BACKEND")]
    backend: Option<BackendKind>,
    /// Writes the results as JSON to this file, or with "-" to standard output and all else to standard error.
    #[arg(long, value_name = "FILE|-")]
    json: Option<PathBuf>,
}

/// Which memory to map, and how.
#[derive(Args, Clone, Copy, Debug, Serialize)]
struct Memory {
    /// How GPU memory is allocated.
    #[arg(short = 'a', long, value_enum, value_name = "FN", default_value_t = AllocFn::CuMemAlloc)]
    alloc: AllocFn,
    /// Caching type of the mapping.
    #[arg(short = 'M', long, value_enum, value_name = "TYPE", default_value_t = MapAs::Default)]
    mapping: MapAs,
}

/// How GPU memory is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
enum AllocFn {
    /// `cuMemAlloc`.
    #[value(name = "cuMemAlloc")]
    #[serde(rename = "cuMemAlloc")]
    CuMemAlloc,
    /// `cuMemCreate` and `cuMemMap`.
    #[value(name = "cuMemCreate")]
    #[serde(rename = "cuMemCreate")]
    CuMemCreate,
}

impl AllocFn {
    fn name(self) -> String {
        self.to_possible_value().expect("none is hidden").get_name().to_owned()
    }

    fn kind(self) -> AllocKind {
        match self {
            Self::CuMemAlloc => AllocKind::Malloc,
            Self::CuMemCreate => AllocKind::Vmm,
        }
    }
}

/// The caching type to ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum MapAs {
    /// The platform's.
    Default,
    /// Write combining.
    Wc,
    /// Cached.
    Cache,
    /// Device memory of Arm.
    Device,
}

impl MapAs {
    fn request(self) -> Option<MappingType> {
        match self {
            Self::Default => None,
            Self::Wc => Some(MappingType::WriteCombining),
            Self::Cache => Some(MappingType::Cached),
            Self::Device => Some(MappingType::Device),
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
    if fine { Ok(()) } else { Err(Failure::Usage(message())) }
}

struct Output {
    json: Option<Json>,
    bar: ProgressBar,
}

enum Json {
    Stdout,
    File(File),
}

impl Output {
    /// Creates the JSON file before anything is measured, so that a bad path fails early.
    fn open(json: Option<&Path>) -> Result<Self> {
        let open = |path: &Path| match path.to_str() {
            Some("-") => Ok(Json::Stdout),
            _ => File::create(path)
                .map(Json::File)
                .map_err(|e| Failure::failed(format_args!("--json {}: {e}", path.display()))),
        };
        Ok(Self { json: json.map(open).transpose()?, bar: ProgressBar::hidden() })
    }

    fn line(&self, line: Arguments<'_>) -> Result<()> {
        self.bar.suspend(|| match self.json {
            Some(Json::Stdout) => output::line(io::stderr(), line),
            _ => output::line(io::stdout(), line),
        })?;
        Ok(())
    }

    /// Shows progress of `steps` steps if standard error is a terminal.
    fn steps(&mut self, steps: usize) {
        let style = ProgressStyle::with_template("{elapsed_precise} {wide_bar} {pos}/{len} {msg}");
        self.bar = ProgressBar::new(steps as u64).with_style(style.expect("a constant template"));
    }

    fn step(&self, what: impl Into<String>) {
        if !self.bar.message().is_empty() {
            self.bar.inc(1);
        }
        self.bar.set_message(what.into());
    }

    /// Writes the JSON that was asked for.
    fn finish(self, report: &impl Serialize) -> Result<()> {
        self.bar.finish_and_clear();
        let to: Box<dyn Write> = match self.json {
            Some(Json::Stdout) => Box::new(io::stdout()),
            Some(Json::File(file)) => Box::new(file),
            None => return Ok(()),
        };
        let report = serde_json::to_string_pretty(report)?;
        Ok(output::line(to, format_args!("{report}"))?)
    }
}

/// The JSON of a tool.
#[derive(Serialize)]
struct Report<'a, P, R> {
    tool: &'static str,
    machine: Machine,
    #[serde(flatten)]
    setup: &'a Setup,
    /// The options.
    parameters: P,
    results: R,
}

/// Backend, drivers and GPU.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Setup {
    backend: String,
    /// Why earlier backends were not used.
    refused: Vec<String>,
    /// Version of the kernel module of the backend, where it has one.
    kernel_module: Option<String>,
    /// Version of NVIDIA's kernel driver.
    nvidia_driver: Option<String>,
    /// Version of CUDA that the driver offers.
    cuda: Option<String>,
    /// The GPU in use; none on a machine without.
    gpu: Option<Gpu>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Gpu {
    ordinal: i32,
    name: String,
    pci: String,
}

impl Setup {
    /// Prints the backend, and why no earlier one is used.
    fn tell(&self, output: &Output) -> Result<()> {
        let Self { backend, refused, .. } = self;
        let refused = refused.iter().map(|why| format!("; not {why}")).collect::<String>();
        say!(output, "backend: {backend}{refused}")?;
        match self.is_plain() {
            true => say!(output, "NOTE: no GPU takes part; all of it is about plain memory"),
            false => Ok(()),
        }
    }

    /// No GPU takes part.
    fn is_plain(&self) -> bool {
        self.backend == BackendKind::Host.name()
    }

    fn of(gdr: &Gdr, gpus: &[GpuInfo], ordinal: i32) -> Self {
        let gpu = gpus
            .iter()
            .find(|gpu| gpu.ordinal == ordinal && gdr.backend() != BackendKind::Host)
            .map(|gpu| Gpu { ordinal, name: gpu.name.clone(), pci: gpu.pci.clone() });
        Self {
            backend: gdr.backend().name().to_owned(),
            refused: gdr.refusals().iter().map(ToString::to_string).collect(),
            kernel_module: gdr.driver_version().map(|(major, minor)| format!("{major}.{minor}")),
            nvidia_driver: nvidia_driver(),
            cuda: cuda::version(),
            gpu,
        }
    }
}

/// Version of NVIDIA's kernel driver, where it is loaded.
pub fn nvidia_driver() -> Option<String> {
    fs::read_to_string("/sys/module/nvidia/version").ok().map(|version| version.trim().to_owned())
}

/// The opened library and the chosen GPU.
struct Target {
    gdr: Gdr,
    gpu: i32,
    setup: Setup,
}

/// Mapped memory. The fields drop in this order.
struct Mapped {
    mapping: Mapping,
    pin: Pin,
    buffer: GpuBuffer,
}

impl Target {
    /// Opens the library and prints the GPUs.
    fn open(common: &Common, output: &Output) -> Result<Self> {
        let builder = common.backend.into_iter().fold(Gdr::builder(), |builder, kind| builder.backend(kind));
        let gdr = builder.open()?;
        let gpus = gdr.gpus()?;
        for gpu in &gpus {
            let bus = gpu.pci.split_once('.').map_or(&*gpu.pci, |(bus, _)| bus);
            say!(output, "GPU id:{}; name: {}; Bus id: {bus}", gpu.ordinal, gpu.name)?;
        }
        let gpu = common.gpu;
        if gdr.backend() != BackendKind::Host && gpus.iter().all(|found| found.ordinal != gpu) {
            return Err(Failure::Usage(format!("there is no GPU {gpu}; CUDA shows {} of them", gpus.len())));
        }
        say!(output, "selecting device {gpu}")?;
        let setup = Setup::of(&gdr, &gpus, gpu);
        setup.tell(output)?;
        Ok(Self { setup, gdr, gpu })
    }

    /// Allocates memory and prints its address.
    fn allocate(&self, len: usize, memory: Memory, output: &Output) -> Result<GpuBuffer> {
        let buffer = self.gdr.alloc_with(self.gpu, len, memory.alloc.kind())?;
        say!(output, "gpu alloc fn: {}", memory.alloc.name())?;
        say!(output, "device ptr: {:#x}", buffer.addr())?;
        say!(output, "allocated size: {len}")?;
        Ok(buffer)
    }

    /// Pins and maps memory and prints the result.
    fn map(&self, buffer: GpuBuffer, memory: Memory, output: &Output) -> Result<Mapped> {
        let pin = buffer.pin()?;
        let mapping = pin.map_as(memory.mapping.request())?;
        let info = pin.info();
        let skip = pin.addr() - info.va;
        let write_combining = mapping.kind() == MappingType::WriteCombining;
        say!(output, "map_d_ptr: {:#x}", mapping.as_ptr().addr() as u64 - skip)?;
        say!(output, "info.va: {:x}", info.va)?;
        say!(output, "info.mapped_size: {}", info.mapped_size)?;
        say!(output, "info.page_size: {}", info.page_size)?;
        say!(output, "info.mapped: {}", u8::from(info.mapped))?;
        say!(output, "info.wc_mapping: {}", u8::from(write_combining))?;
        say!(output, "page offset: {skip}")?;
        say!(output, "user-space pointer: {:#x}", mapping.as_ptr().addr())?;
        say!(output, "mapping type: {}", type_name(mapping.kind()))?;
        Ok(Mapped { mapping, pin, buffer })
    }
}

impl Target {
    fn finish<P: Program + Serialize>(
        &self,
        output: Output,
        tool: &P,
        results: impl Serialize,
    ) -> Result<()> {
        let (machine, setup) = (Machine::here(), &self.setup);
        output.finish(&Report { tool: P::NAME, machine, setup, parameters: tool, results })
    }
}

impl Mapped {
    fn release(self, output: &Output) -> Result<()> {
        say!(output, "unmapping buffer")?;
        self.mapping.unmap()?;
        say!(output, "unpinning buffer")?;
        self.pin.unpin()?;
        drop(self.buffer);
        Ok(())
    }
}

/// The names of GDRCopy's `gdr_get_mapping_type_string`.
fn type_name(kind: MappingType) -> &'static str {
    match kind {
        MappingType::WriteCombining => "Write Combining",
        MappingType::Cached => "Caching",
        MappingType::Device => "Device",
        _ => "unknown",
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
