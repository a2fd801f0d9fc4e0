//! `gdasync bench register`: what the registration cache costs, against registering and deregistering without it.

use gdasync::out;
use std::io;
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use gdasync::gdsync::cuda::Gpu;
use gdasync::gdsync::memory::Memory;
use gdasync::measure::{Machine, Micros, Samples, create_json, size, write_json};
use gdasync::mp::Communicator;
use gdasync::mp::cache::{CacheConfig, Cached};
use serde::Serialize;

use super::Result;

/// Options of `gdasync bench register`.
#[derive(Args)]
pub(crate) struct Options {
    /// Also measures memory of this CUDA device.
    #[arg(long, value_name = "ORDINAL")]
    gpu: Option<i32>,
    /// Calls of each kind.
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(2000..=100_000_000))]
    calls: u64,
    /// Bytes of each range.
    #[arg(long, default_value_t = 65_536, value_parser = clap::value_parser!(u64).range(4096..=16_777_216))]
    bytes: u64,
    /// Writes the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Serialize)]
struct Report {
    device: String,
    machine: Machine,
    bytes: u64,
    results: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    memory: &'static str,
    call: &'static str,
    /// One call, in microseconds; of calls that are timed together, their mean.
    us: Micros,
    /// The p50 over that of registering and deregistering without the cache.
    ratio: f64,
}

/// Slices that the calls are made in, by turns, for the reason that `bench hca` gives.
const SLICES: u64 = 20;
/// A call that takes less than the clock is timed together with others.
const TOGETHER: u64 = 50;
/// Entries of a cache that is well filled.
const MANY: usize = 1024;
/// Entries of a cache that is full.
const FEW: usize = 16;

/// Where the ranges are.
struct Place {
    name: &'static str,
    gpu: Option<Gpu>,
    memory: Memory,
    bytes: usize,
}

impl Place {
    /// The range of this number through a cache; it goes round.
    fn cached(&self, comm: &Communicator, n: usize, skip: usize) -> Result<Cached> {
        let at = n % MANY * self.bytes + skip;
        let (addr, len) = (self.memory.addr() + at as u64, self.bytes - skip);
        Ok(match &self.gpu {
            // SAFETY: the memory outlives all communicators.
            Some(gpu) => unsafe { comm.register_cached_gpu(gpu, addr, len) }?,
            None => {
                let ptr = std::ptr::with_exposed_provenance_mut(usize::try_from(addr)?);
                // SAFETY: as above; nobody has a reference to it.
                unsafe { comm.register_cached(ptr, len) }?
            }
        })
    }

    fn whole(&self, comm: &Communicator) -> Result<Cached> {
        self.cached(comm, 0, 0)
    }
}

fn communicator(entries: usize, announced: bool) -> Result<Communicator> {
    let mut config = CacheConfig::default();
    (config.entries, config.announced, config.bytes) = (entries, announced, u64::MAX);
    let comm = Communicator::builder().spawn(1).cache(config).init()?;
    let is_kept = comm.cache().config().keep == CacheConfig::default().keep;
    match (comm.size(), is_kept) {
        (1, true) => Ok(comm),
        (1, false) => Err("MP_REG_CACHE has switched off what is to be measured: unset it".into()),
        (size, _) => Err(format!("this benchmark has one rank, this job has {size}").into()),
    }
}

/// One kind of call, and how many are timed together.
struct Case<'a> {
    name: &'static str,
    together: u64,
    call: Box<dyn FnMut(usize) -> Result<()> + 'a>,
    samples: Samples,
    made: usize,
}

impl<'a> Case<'a> {
    fn new(name: &'static str, together: u64, call: impl FnMut(usize) -> Result<()> + 'a) -> Self {
        Self { name, together, call: Box::new(call), samples: Samples::default(), made: 0 }
    }

    fn run(&mut self, calls: u64) -> Result<()> {
        for _ in 0..calls / self.together {
            let start = Instant::now();
            for _ in 0..self.together {
                (self.call)(self.made)?;
                self.made += 1;
            }
            self.samples.add_mean(start.elapsed(), self.together);
        }
        Ok(())
    }
}

impl Options {
    pub(crate) fn run(&self) -> Result<()> {
        let file = create_json(self.json.as_deref())?;
        let bytes = usize::try_from(self.bytes)?;
        let mut places = vec![Place { name: "host", gpu: None, memory: Memory::alloc(bytes * MANY)?, bytes }];
        if let Some(ordinal) = self.gpu {
            let gpu = Gpu::open(ordinal)?;
            let memory = gpu.alloc(bytes * MANY)?;
            places.push(Place { name: "GPU", gpu: Some(gpu), memory, bytes });
        }
        let mut results = Vec::new();
        for place in &places {
            results.extend(self.measure(place)?);
        }
        let device = communicator(0, false)?.context().description().to_owned();
        let report = Report { device, machine: Machine::here(), bytes: self.bytes, results };
        report.print()?;
        write_json(file, &report)?;
        Ok(())
    }

    fn measure(&self, place: &Place) -> Result<Vec<Row>> {
        let (one, full) = (communicator(1, false)?, communicator(FEW, false)?);
        let (many, announced) = (communicator(MANY, false)?, communicator(1, true)?);
        let held = communicator(1, false)?;
        let _held = place.whole(&held)?;
        for n in 0..MANY {
            place.cached(&many, n, 0)?;
        }
        // Registering GPU memory maps it too; so does this.
        let bare = |n: usize| {
            let at = n % MANY * place.bytes;
            let (addr, len) = (place.memory.addr() + at as u64, place.bytes);
            let memory = match &place.gpu {
                // SAFETY: the memory outlives the result.
                Some(gpu) => unsafe { gpu.wrap(addr, len) }?,
                None => {
                    let ptr = std::ptr::with_exposed_provenance_mut(usize::try_from(addr)?);
                    // SAFETY: as above; nobody has a reference to it.
                    unsafe { Memory::from_raw(ptr, len) }?
                }
            };
            one.register(&memory)?;
            Ok(())
        };
        let mut cases = vec![
            Case::new("register and deregister, without the cache", 1, bare),
            Case::new("hit: 1 entry", TOGETHER, |_| place.whole(&one).map(drop)),
            Case::new("hit: 1 entry, a part of it", TOGETHER, |_| place.cached(&one, 0, 64).map(drop)),
            Case::new("hit: 1024 entries, by turns", TOGETHER, |n| {
                place.cached(&many, n * 7 % MANY, 0).map(drop)
            }),
            Case::new("miss: the least used of 16 makes room", 1, |n| {
                place.cached(&full, n % (FEW + 1), 0).map(drop)
            }),
        ];
        if let Some(gpu) = &place.gpu {
            cases.push(Case::new("hit: proved by a handle", TOGETHER, |_| place.whole(&held).map(drop)));
            cases
                .push(Case::new("hit: frees are announced", TOGETHER, |_| place.whole(&announced).map(drop)));
            let addr = place.memory.addr();
            cases.push(Case::new("CUDA's number of an allocation, alone", TOGETHER, move |_| {
                gpu.buffer_id(addr)?;
                Ok(())
            }));
        }
        for _ in 0..SLICES {
            for case in &mut cases {
                case.run(self.calls / SLICES)?;
            }
        }
        let two = two_threads(place, &many, self.calls)?;
        let mut named: Vec<_> = cases.into_iter().map(|case| (case.name, case.samples)).collect();
        named.push(("hit: 1024 entries, two threads", two));
        let base = named[0].1.micros(1).p50;
        let row = |(call, samples): (&'static str, Samples)| {
            let us = samples.micros(1);
            Row { memory: place.name, call, us, ratio: us.p50 / base }
        };
        Ok(named.into_iter().map(row).collect())
    }
}

/// Two threads at one cache, each at entries of its own.
fn two_threads(place: &Place, comm: &Communicator, calls: u64) -> Result<Samples> {
    let play = |first: usize| -> Result<Samples> {
        let mut case =
            Case::new("", TOGETHER, |n| place.cached(comm, first + n * 7 % (MANY / 2), 0).map(drop));
        case.run(calls)?;
        Ok(case.samples)
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| play(MANY / 2).map_err(|error| error.to_string()));
        let mut samples = play(0)?;
        samples.append(&other.join().map_err(|_| "the other thread panicked")??);
        Ok(samples)
    })
}

impl Report {
    fn print(&self) -> io::Result<()> {
        out!("{}, {} x {}", self.device, self.machine.cpus, self.machine.cpu)?;
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        let bytes = usize::try_from(self.bytes).map(size).unwrap_or_default();
        table.set_header([
            "memory",
            &format!("ranges of {bytes} bytes"),
            "p50 ns",
            "p99 ns",
            "min ns",
            "ratio",
        ]);
        for row in &self.results {
            let Micros { min, p50, p99 } = row.us;
            let numbers = [p50, p99, min].map(|us| format!("{:.0}", us * 1e3));
            let names = [row.memory, row.call].map(str::to_owned);
            table.add_row(names.into_iter().chain(numbers).chain([format!("{:.3}", row.ratio)]));
        }
        table.column_iter_mut().skip(2).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        out!("{table}")
    }
}
