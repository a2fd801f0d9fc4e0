//! `gdasync bench copy`: CPU mappings of GPU memory against CUDA copies.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use clap::Args;
use cudarc::driver::result;
use gdasync::gdrcopy::copy::{Copier, load_fence, store_fence};
use gdasync::gdrcopy::planner::{Direction, Way, read_by, write_by};
use gdasync::gdrcopy::{BackendKind, Gdr, Mapping, Planner};
use gdasync::gdsync::cuda::Gpu;
use gdasync::measure::{Random, Samples, size};
use gdasync::results::{Output, Point, Result, Sheet, Unit};
use serde_json::json;

#[derive(Args)]
#[command(after_long_help = "\
What the numbers mean: the time of one copy, and its ratio to the best single path (the planner: at most 1.05). `bare word` is \
a store or load with its fence: no library can be faster. All paths of a size run in turn, in random order. `GDRCOPY_STORE` and `GDRCOPY_LOAD` choose \
other copy routines.")]
pub(crate) struct Options {
    /// CUDA device.
    #[arg(long, default_value_t = 0)]
    device: i32,
    /// How to map: gdrdrv, dmabuf, rm or host. Default: the first that works.
    #[arg(long)]
    backend: Option<BackendKind>,
    /// Largest copy, bytes.
    #[arg(long, default_value_t = 64 << 20, value_parser = clap::value_parser!(u64).range(64..=1 << 30))]
    max_size: u64,
    /// Milliseconds spent on each figure.
    #[arg(long, value_name = "MS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    each_ms: u64,
    #[command(flatten)]
    output: Output,
}

/// Not among the single paths that ratios compare with.
const PLANNER: &str = "planner";
const BARE: &str = "bare word";

struct Bench {
    mapping: Mapping,
    has_gpu: bool,
    planner: Planner,
    max: usize,
    each: Duration,
    sheet: RefCell<Sheet>,
}

impl Options {
    pub(crate) fn run(&self) -> Result<()> {
        let sheet = Sheet::new(&self.output, true, 2 * (self.max_size.ilog2() as usize + 1))?;
        let builder = self.backend.into_iter().fold(Gdr::builder(), |builder, kind| builder.backend(kind));
        let gdr = builder.open()?;
        let max = usize::try_from(self.max_size)?;
        let buffer = gdr.alloc(self.device, max)?;
        let gpu = gdr.gpus()?.into_iter().find(|gpu| gpu.ordinal == self.device);
        let cuda = gpu.as_ref().map(|gpu| Gpu::open(gpu.ordinal)).transpose()?;
        let _current = cuda.as_ref().map(Gpu::enter).transpose()?;
        sheet.step("calibrating the planner");
        let bench = Bench {
            planner: Planner::calibrate(&gdr, self.device)?,
            mapping: buffer.map()?,
            has_gpu: gpu.is_some(),
            each: Duration::from_millis(self.each_ms),
            sheet: sheet.into(),
            max,
        };
        bench.paths(Direction::ToGpu)?;
        bench.paths(Direction::FromGpu)?;
        let Bench { planner, sheet, .. } = bench;
        let device = gpu.map_or("no GPU".into(), |gpu| format!("{} at {}", gpu.name, gpu.pci));
        let sheet = sheet.into_inner();
        let plan = |direction| -> Vec<_> {
            let choices = planner.table(direction).choices().iter();
            choices.map(|(from, way)| format!("from {from} bytes by {way}")).collect()
        };
        let options = json!({
            "max_size": self.max_size,
            "each_ms": self.each_ms,
            "backend": gdr.to_string(),
            "store": Copier::best().store().to_string(),
            "load": Copier::best().load().to_string(),
            "plan_to_gpu": plan(Direction::ToGpu),
            "plan_from_gpu": plan(Direction::FromGpu),
        });
        sheet.write_of("copy", &format!("{device}, mapped by {gdr}"), "", options)
    }
}

fn name(direction: Direction) -> &'static str {
    match direction {
        Direction::ToGpu => "to GPU",
        Direction::FromGpu => "from GPU",
    }
}

/// A store or load of one word with its fence: no library can be faster.
fn bare_word<'a>(direction: Direction, mapping: &'a Mapping, bytes: usize) -> Option<Path<'a>> {
    let (ptr, kind) = (mapping.as_ptr(), mapping.kind());
    let run = move |_: &mut [u8]| {
        match (direction, bytes) {
            // SAFETY: the mapping is longer than a word and page-aligned.
            (Direction::ToGpu, 4) => unsafe { ptr.cast::<u32>().write_volatile(1) },
            // SAFETY: the mapping is longer than a word and page-aligned.
            (Direction::ToGpu, _) => unsafe { ptr.cast::<u64>().write_volatile(1) },
            // SAFETY: the mapping is longer than a word and page-aligned.
            (Direction::FromGpu, 4) => _ = unsafe { ptr.cast::<u32>().read_volatile() },
            // SAFETY: the mapping is longer than a word and page-aligned.
            (Direction::FromGpu, _) => _ = unsafe { ptr.cast::<u64>().read_volatile() },
        }
        match direction {
            Direction::ToGpu => store_fence(kind),
            Direction::FromGpu => load_fence(kind),
        }
        Ok(())
    };
    matches!(bytes, 4 | 8).then(|| quick_to_gpu(direction, Path::new(BARE, run)))
}

/// Stores complete when they have left the core; each load takes a bus round trip.
fn quick_to_gpu(direction: Direction, path: Path<'_>) -> Path<'_> {
    if direction == Direction::ToGpu { path.quick() } else { path }
}

fn mapped<'a>(way: Way, direction: Direction, mapping: &'a Mapping) -> Path<'a> {
    Path::new(way.to_string(), move |host| {
        let done = match (direction, way) {
            (Direction::ToGpu, Way::Cpu) => mapping.write(0, host),
            (Direction::FromGpu, Way::Cpu) => mapping.read(0, host),
            (Direction::ToGpu, _) => write_by(way, mapping, 0, host),
            (Direction::FromGpu, _) => read_by(way, mapping, 0, host),
        };
        done.map_err(Into::into)
    })
}

impl Bench {
    /// Measures all paths of a size in turn. Ratios are to the best single path.
    fn measure(&self, group: &str, bytes: usize, mut paths: Vec<Path<'_>>) -> Result<()> {
        self.sheet.borrow().step(format!("{group}, {} bytes", size(bytes)));
        let samples = in_turn(&mut paths, &mut vec![0x5a; bytes], self.each)?;
        let mut sheet = self.sheet.borrow_mut();
        for (path, samples) in paths.iter().zip(&samples) {
            let point = Point::time(bytes as u64, samples, 1);
            sheet.add_point(group, &path.name, "bytes", Unit::Micros, point);
        }
        sheet.compare_with_best(group, &[PLANNER, BARE], "best single path");
        Ok(())
    }

    /// Every path at every size, and the choice of the planner.
    fn paths(&self, direction: Direction) -> Result<()> {
        let Self { mapping, has_gpu, planner, .. } = self;
        for bytes in (0..).map(|i| 1 << i).take_while(|&bytes| bytes <= self.max) {
            let mut paths: Vec<Path> = bare_word(direction, mapping, bytes).into_iter().collect();
            paths.push(quick_to_gpu(direction, mapped(Way::Cpu, direction, mapping)));
            if *has_gpu {
                paths.push(mapped(Way::CopyEngine, direction, mapping));
                paths.push(by_cuda(direction, mapping.addr()));
            }
            let planned = Path::new(PLANNER, |host| {
                let done = match direction {
                    Direction::ToGpu => planner.write(mapping, 0, host),
                    Direction::FromGpu => planner.read(mapping, 0, host),
                };
                done.map_err(Into::into)
            });
            let by_cpu = planner.way(direction, bytes) == Way::Cpu;
            paths.push(if by_cpu { quick_to_gpu(direction, planned) } else { planned });
            self.measure(name(direction), bytes, paths)?;
        }
        Ok(())
    }
}

/// A path of a copy; it is given the host side.
struct Path<'a> {
    name: String,
    quick: bool,
    run: Box<Run<'a>>,
}

type Run<'a> = dyn FnMut(&mut [u8]) -> Result<()> + 'a;

impl<'a> Path<'a> {
    fn new(name: impl Into<String>, run: impl FnMut(&mut [u8]) -> Result<()> + 'a) -> Self {
        Self { name: name.into(), quick: false, run: Box::new(run) }
    }

    /// A copy of nanoseconds: several are timed together.
    fn quick(mut self) -> Self {
        self.quick = true;
        self
    }
}

/// Small CPU copies timed together: enough to hide the cost of the clock, too few to fill the bus's queue of posted writes.
const BATCH: u32 = 16;
const BATCH_BYTES: usize = 1024;
const SAMPLES: usize = 2000;
/// Pause before each sample, so that the bus is idle.
const PAUSE: Duration = Duration::from_micros(5);

/// Measures the paths in turn, in an order that changes each time, so that other load hits all of them. Each takes about
/// `budget`.
fn in_turn(paths: &mut [Path<'_>], host: &mut [u8], budget: Duration) -> Result<Vec<Samples>> {
    let many = u32::try_from(BATCH_BYTES / host.len().max(1))?.clamp(1, BATCH);
    for path in paths.iter_mut() {
        (path.run)(host)?;
    }
    let mut samples = vec![Samples::default(); paths.len()];
    let mut order: Vec<usize> = (0..paths.len()).collect();
    let mut random = Random::default();
    let start = Instant::now();
    let budget = budget * u32::try_from(paths.len())?;
    for turn in 0..SAMPLES {
        if turn >= 5 && start.elapsed() > budget {
            break;
        }
        for i in (1..order.len()).rev() {
            order.swap(i, usize::try_from(random.below(i as u64 + 1))?);
        }
        for &i in &order {
            let pause = Instant::now();
            while pause.elapsed() < PAUSE {
                std::hint::spin_loop();
            }
            let batch = if paths[i].quick { many } else { 1 };
            let start = Instant::now();
            for _ in 0..batch {
                (paths[i].run)(host)?;
            }
            samples[i].add(start.elapsed() / batch);
        }
    }
    Ok(samples)
}

/// The baseline: a synchronous copy of CUDA in the current context.
fn by_cuda<'a>(direction: Direction, addr: u64) -> Path<'a> {
    // SAFETY: the benchmark's buffer on the GPU is as long as the longest host buffer.
    let write = move |host: &mut [u8]| Ok(unsafe { result::memcpy_htod_sync(addr, host) }?);
    // SAFETY: the benchmark's buffer on the GPU is as long as the longest host buffer.
    let read = move |host: &mut [u8]| Ok(unsafe { result::memcpy_dtoh_sync(host, addr) }?);
    match direction {
        Direction::ToGpu => Path::new("cuMemcpyHtoD", write),
        Direction::FromGpu => Path::new("cuMemcpyDtoH", read),
    }
}
