//! `gdasync bench copy`: CPU mappings of GPU memory against CUDA's copies, in the same run.

mod lane;
mod report;

use std::cell::RefCell;
use std::num::NonZero;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use gdasync::gdrcopy::copy::{Copier, Routine, load_fence, store_fence};
use gdasync::gdrcopy::planner::{Direction, Way, read_by, write_by};
use gdasync::gdrcopy::{BackendKind, Gdr, Mapping, Planner};
use gdasync::measure::{Machine, create_json, write_json};
use indicatif::ProgressBar;

use super::Result;
use lane::{Cuda, Lane, by_turns};
use report::{Calibrated, Choice, Report, Row};

/// Options of `gdasync bench copy`.
#[derive(Args)]
pub(crate) struct Options {
    /// CUDA device.
    #[arg(long, default_value_t = 0)]
    device: i32,
    /// How to map: gdrdrv, dmabuf, rm or host. Default: the best that works.
    #[arg(long)]
    backend: Option<BackendKind>,
    /// Largest copy, bytes.
    #[arg(long, default_value_t = 64 << 20, value_parser = clap::value_parser!(u64).range(64..=1 << 30))]
    max_size: u64,
    /// Milliseconds spent on each figure.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    budget: u64,
    /// Writes the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Sizes at which routines and numbers of threads are compared, bytes.
const ROUTINE_SIZES: [usize; 6] = [4, 64, 512, 4 << 10, 64 << 10, 4 << 20];
const THREAD_SIZES: [usize; 3] = [1 << 20, 4 << 20, 16 << 20];
/// Sizes that are pinned and mapped, bytes.
const PIN_SIZES: [usize; 5] = [4 << 10, 64 << 10, 2 << 20, 64 << 20, 1 << 30];
/// Writes in a row.
const BURST: u32 = 10_000;
/// The planner is compared with the best of the others; so is the least that is possible.
const PLANNER: &str = "planner";
const BARE: &str = "bare word";

struct Bench {
    gdr: Gdr,
    device: i32,
    mapping: Mapping,
    cuda: Option<Cuda>,
    planner: Planner,
    max: usize,
    budget: Duration,
    bar: ProgressBar,
    rows: RefCell<Vec<Row>>,
}

impl Options {
    pub(crate) fn run(&self) -> Result<()> {
        let file = create_json(self.json.as_deref())?;
        let mut builder = Gdr::builder();
        if let Some(kind) = self.backend {
            builder = builder.backend(kind);
        }
        let gdr = builder.open()?;
        let max = usize::try_from(self.max_size)?;
        let buffer = gdr.alloc(self.device, max)?;
        let gpu = gdr.gpus()?.into_iter().find(|gpu| gpu.ordinal == self.device);
        let bar = ProgressBar::new_spinner();
        bar.enable_steady_tick(Duration::from_millis(200));
        bar.set_message("calibrating the planner");
        let bench = Bench {
            planner: Planner::calibrate(&gdr, self.device)?,
            mapping: buffer.map()?,
            cuda: gpu.is_some().then(|| Cuda::new(self.device, buffer.addr())).transpose()?,
            device: self.device,
            budget: Duration::from_millis(self.budget),
            rows: RefCell::default(),
            gdr,
            max,
            bar,
        };
        bench.ways(Direction::ToGpu)?;
        bench.ways(Direction::FromGpu)?;
        bench.routines()?;
        bench.threads()?;
        bench.rates()?;
        bench.pins()?;
        bench.bar.finish_and_clear();
        let plan = |direction| Choice::all(&bench.planner, direction);
        let report = Report {
            machine: Machine::here(),
            gpu: gpu.map_or("no GPU".into(), |gpu| format!("{} at {}", gpu.name, gpu.pci)),
            backend: bench.gdr.to_string(),
            store: Copier::best().store().to_string(),
            load: Copier::best().load().to_string(),
            plan: plan(Direction::ToGpu).into_iter().chain(plan(Direction::FromGpu)).collect(),
            calibration: Calibrated::all(&bench.planner),
            rows: bench.rows.take(),
        };
        report.print()?;
        write_json(file, &report)?;
        Ok(())
    }
}

/// A bare store or load of one word with its fence: what no library can undercut.
fn raw<'a>(direction: Direction, mapping: &'a Mapping, bytes: usize) -> Option<Lane<'a>> {
    let (ptr, kind) = (mapping.as_ptr(), mapping.kind());
    let run = move |_: &mut [u8]| {
        match (direction, bytes) {
            // SAFETY: the mapping is longer than a word and page-aligned.
            (Direction::ToGpu, 4) => unsafe { ptr.cast::<u32>().write_volatile(1) },
            // SAFETY: as above.
            (Direction::ToGpu, _) => unsafe { ptr.cast::<u64>().write_volatile(1) },
            // SAFETY: as above.
            (Direction::FromGpu, 4) => _ = unsafe { ptr.cast::<u32>().read_volatile() },
            // SAFETY: as above.
            (Direction::FromGpu, _) => _ = unsafe { ptr.cast::<u64>().read_volatile() },
        }
        match direction {
            Direction::ToGpu => store_fence(kind),
            Direction::FromGpu => load_fence(kind),
        }
        Ok(())
    };
    matches!(bytes, 4 | 8).then(|| quick_to_gpu(direction, Lane::new(BARE, run)))
}

/// Stores are over when they have left the core; loads take a bus round trip each.
fn quick_to_gpu(direction: Direction, lane: Lane<'_>) -> Lane<'_> {
    if direction == Direction::ToGpu { lane.quick() } else { lane }
}

fn by<'a>(way: Way, direction: Direction, mapping: &'a Mapping) -> Lane<'a> {
    Lane::new(way.to_string(), move |host| {
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
    /// Measures lanes by turns and keeps the figures.
    fn measure(&self, group: &str, bytes: usize, mut lanes: Vec<Lane<'_>>) -> Result<()> {
        self.bar.set_message(format!("{group}, {bytes} bytes"));
        let samples = by_turns(&mut lanes, &mut vec![0x5a; bytes], self.budget)?;
        let micros: Vec<_> = samples.iter().map(|samples| samples.micros(1)).collect();
        let single = lanes.iter().zip(&micros).filter(|(lane, _)| ![PLANNER, BARE].contains(&&*lane.name));
        let best = single.map(|(_, us)| us.p50).fold(f64::INFINITY, f64::min);
        self.rows.borrow_mut().extend(
            lanes.into_iter().zip(micros).map(|(lane, us)| Row::new(group, bytes, lane.name, us, best)),
        );
        Ok(())
    }

    /// Every way at every size, and what the planner makes of it.
    fn ways(&self, direction: Direction) -> Result<()> {
        let Self { mapping, cuda, planner, .. } = self;
        for bytes in (0..).map(|i| 1 << i).take_while(|&bytes| bytes <= self.max) {
            let mut lanes: Vec<Lane> = raw(direction, mapping, bytes).into_iter().collect();
            lanes.push(quick_to_gpu(direction, by(Way::Cpu, direction, mapping)));
            if let Some(cuda) = cuda {
                lanes.push(by(Way::CopyEngine, direction, mapping));
                lanes.push(match direction {
                    Direction::ToGpu => Lane::new("cuMemcpyHtoD", |host| cuda.write(host)),
                    Direction::FromGpu => Lane::new("cuMemcpyDtoH", |host| cuda.read(host)),
                });
            }
            let planned = Lane::new(PLANNER, |host| {
                let done = match direction {
                    Direction::ToGpu => planner.write(mapping, 0, host),
                    Direction::FromGpu => planner.read(mapping, 0, host),
                };
                done.map_err(Into::into)
            });
            let by_cpu = planner.way(direction, bytes) == Way::Cpu;
            lanes.push(if by_cpu { quick_to_gpu(direction, planned) } else { planned });
            self.measure(report::name(direction), bytes, lanes)?;
        }
        Ok(())
    }

    /// Every copy routine of this CPU.
    fn routines(&self) -> Result<()> {
        let (ptr, kind) = (self.mapping.as_ptr(), self.mapping.kind());
        let fitting = |fits: fn(Routine) -> bool| {
            Routine::ALL.iter().copied().filter(move |&routine| routine.supported() && fits(routine))
        };
        for bytes in ROUTINE_SIZES.into_iter().filter(|&bytes| bytes <= self.max) {
            let stores = fitting(Routine::stores).filter_map(|r| Some((r, Copier::new(r, Routine::Scalar)?)));
            let lanes = stores.map(|(routine, copier)| {
                Lane::new(routine.to_string(), move |host| {
                    // SAFETY: the mapping is at least as long as the longest size measured.
                    unsafe { copier.to_device(kind, ptr, host.as_ptr(), host.len()) };
                    store_fence(kind);
                    Ok(())
                })
                .quick()
            });
            self.measure("stores", bytes, lanes.collect())?;
            let loads = fitting(Routine::loads).filter_map(|r| Some((r, Copier::new(Routine::Scalar, r)?)));
            let lanes = loads.map(|(routine, copier)| {
                Lane::new(routine.to_string(), move |host| {
                    // SAFETY: as above.
                    unsafe { copier.from_device(kind, host.as_mut_ptr(), ptr, host.len()) };
                    load_fence(kind);
                    Ok(())
                })
            });
            self.measure("loads", bytes, lanes.collect())?;
        }
        Ok(())
    }

    /// One copy by several threads.
    fn threads(&self) -> Result<()> {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        for (group, direction) in
            [("threads, to GPU", Direction::ToGpu), ("threads, from GPU", Direction::FromGpu)]
        {
            for bytes in THREAD_SIZES.into_iter().filter(|&bytes| bytes <= self.max) {
                let counts =
                    (1..).map(|i| 1 << i).take_while(|&n| n <= cores.min(16)).filter_map(NonZero::new);
                let ways = std::iter::once(Way::Cpu).chain(counts.map(Way::Threads));
                let lanes = ways.map(|way| by(way, direction, &self.mapping)).collect();
                self.measure(group, bytes, lanes)?;
            }
        }
        Ok(())
    }

    /// Small writes without a pause, until the bus is the limit.
    fn rates(&self) -> Result<()> {
        for bytes in [8, 64] {
            let lanes = raw(Direction::ToGpu, &self.mapping, bytes).into_iter();
            let lanes =
                lanes.chain([by(Way::Cpu, Direction::ToGpu, &self.mapping)]).map(|lane| lane.times(BURST));
            self.measure("10,000 writes in a row", bytes, lanes.collect())?;
        }
        Ok(())
    }

    /// Pinning, mapping and giving back.
    fn pins(&self) -> Result<()> {
        for bytes in PIN_SIZES {
            let buffer = self.gdr.alloc(self.device, bytes)?;
            let pin = buffer.pin()?;
            let lanes = vec![
                Lane::new("pin, unpin", |_: &mut [u8]| Ok(buffer.pin()?.unpin()?)),
                Lane::new("map, unmap", |_: &mut [u8]| Ok(pin.map()?.unmap()?)),
                Lane::new("pin, map, unmap, unpin", |_: &mut [u8]| Ok(buffer.map()?.unmap()?)),
            ];
            self.measure("pins", bytes, lanes)?;
        }
        Ok(())
    }
}
