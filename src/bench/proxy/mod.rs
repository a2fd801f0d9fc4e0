//! `gdasync bench proxy`: what the CPU proxy costs on top of the device's own interface, and to stage GPU memory.

mod staged;

use gdasync::out;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use gdasync::gdsync::cuda::Gpu;
use gdasync::gdsync::memory::Memory;
use gdasync::gdsync::rdma::{DeviceConfig, Route};
use gdasync::gdsync::stream::{Batch, HostStreamConfig, Stream};
use gdasync::gdsync::verbs::{Access, Context, Device, Mr, Qp, SendWr};
use gdasync::lane::own_gpu;
use gdasync::measure::{Machine, Micros, Samples, create_json, write_json};
use serde::Serialize;

use super::Result;
use super::bare::Bare;
use super::rows::Row;

/// Options of `gdasync bench proxy`.
#[derive(Args)]
pub(crate) struct Options {
    /// The RDMA device; left out, the one that GDSYNC_DEVICE names, or the nearest to a GPU.
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// Messages of each test.
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u64).range(100..=10_000_000))]
    rounds: u64,
    /// Measures staging instead: messages between host memory and GPU memory that is staged in host memory, of `--sizes`.
    #[arg(long)]
    staged: bool,
    /// Message sizes of `--staged` in bytes, 1 to 1073741824 each.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1 << 30),
          default_values_t = [8, 4096, 65536, 1 << 20, 16 << 20])]
    sizes: Vec<u32>,
    /// Stages memory of a simulated GPU, whose copies are memcpy in a thread.
    #[cfg(feature = "standin")]
    #[arg(long, hide = true)]
    simulated: bool,
    /// Seconds after which a wait is given up, 1 to 86400.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// Writes the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Serialize)]
struct Report<R> {
    device: String,
    wire: String,
    machine: Machine,
    results: Vec<R>,
}

/// Slices that the tests run in, by turns, for the reason that `bench hca` gives.
const SLICES: u64 = 20;
/// Messages under way in the rate tests.
pub(super) const WINDOW: u64 = 64;

const ONE: &str = "ibv_post_send, ibv_poll_cq: one at a time";
const MANY: &str = "ibv_post_send, ibv_poll_cq: one of many";

/// Our side: a queue pair of the proxy, connected to itself.
struct Ours {
    qp: Qp,
    mr: Mr,
    stream: Stream,
    timeout: Duration,
}

impl Ours {
    fn new(context: &Context, timeout: Duration) -> Result<Self> {
        let pd = context.alloc_pd()?;
        let mr = pd.register(&Memory::alloc(64)?, Access::all())?;
        let qp = pd.build_qp().max_send_wr(256).build()?;
        qp.connect(qp.address())?;
        let config = HostStreamConfig { wait_limit: timeout, ..HostStreamConfig::default() };
        Ok(Self { qp, mr, stream: Stream::host(config)?, timeout })
    }

    fn write(&self) -> Result<()> {
        self.qp.post_send(&[SendWr::write(self.mr.remote(8)?, &[self.mr.sge(0, 8)?])])?;
        Ok(())
    }

    /// Takes completions until at most `left` of `under_way` are left.
    fn drain(&self, under_way: &mut u64, left: u64) -> Result<()> {
        let end = Instant::now() + self.timeout;
        loop {
            match self.qp.poll_send() {
                Some(wc) => {
                    wc.ok()?;
                    *under_way -= 1;
                }
                None if *under_way <= left => return Ok(()),
                None if Instant::now() > end => return Err("no completion came".into()),
                None => {}
            }
        }
    }

    fn one(&self, rounds: u64, samples: &mut Samples) -> Result<()> {
        for _ in 0..rounds {
            let start = Instant::now();
            self.write()?;
            self.drain(&mut 1, 0)?;
            samples.add(start.elapsed());
        }
        Ok(())
    }

    fn many(&self, rounds: u64) -> Result<Duration> {
        let start = Instant::now();
        let mut under_way = 0;
        for _ in 0..rounds {
            self.write()?;
            under_way += 1;
            self.drain(&mut under_way, WINDOW - 1)?;
        }
        self.drain(&mut under_way, 0)?;
        Ok(start.elapsed() / u32::try_from(rounds)?)
    }

    fn streamed(&self, rounds: u64, samples: &mut Samples) -> Result<()> {
        for _ in 0..rounds {
            let mut batch = Batch::new();
            batch.send(&self.qp, &SendWr::write(self.mr.remote(8)?, &[self.mr.sge(0, 8)?]))?;
            batch.wait_send(&self.qp)?;
            let start = Instant::now();
            self.stream.submit(&mut batch)?;
            self.stream.synchronize(self.timeout)?;
            samples.add(start.elapsed());
        }
        Ok(())
    }
}

impl Options {
    pub(crate) fn run(&self) -> Result<()> {
        let timeout = Duration::from_secs(self.timeout);
        let device = Device::find(self.device.as_deref())?;
        if device.is_software() {
            return Err("there is no RDMA device that can be used: `rdma link add rxe0 type rxe netdev DEV` makes one".into());
        }
        let mut config = DeviceConfig::from_env()?;
        config.route = Some(Route::Proxy);
        let context = device.open_with(&config)?;
        let file = create_json(self.json.as_deref())?;
        if self.staged {
            let report = self.staged(&context, timeout)?;
            report.print()?;
            staged::print(&report.results)?;
            write_json(file, &report)?;
            return Ok(());
        }
        // In both, the queue pair is the only one, and connected to itself.
        let (ours, streamed) = (Ours::new(&context, timeout)?, Ours::new(&context, timeout)?);
        let bare = Bare::new(&device, &context, timeout)?;
        let slice = self.rounds / SLICES;
        let mut samples: [Samples; 5] = Default::default();
        for _ in 0..SLICES {
            bare.one(slice, &mut samples[0])?;
            ours.one(slice, &mut samples[1])?;
            streamed.streamed(slice, &mut samples[2])?;
            samples[3].add(bare.many(slice)?);
            samples[4].add(ours.many(slice)?);
        }
        let names = [
            (ONE, ONE),
            ("proxy, posted by the CPU: one at a time", ONE),
            ("proxy, triggered and awaited by a host stream", ONE),
            (MANY, MANY),
            ("proxy, posted by the CPU: one of many", MANY),
        ];
        let micros = samples.each_ref().map(|samples| samples.micros(1));
        let results = names.into_iter().zip(&micros).map(|((name, baseline), us)| {
            let base = if baseline == ONE { &micros[0] } else { &micros[3] };
            Row { name, us: *us, baseline, ratio: us.p50 / base.p50 }
        });
        let report = Report::new(&context, results.collect());
        report.print()?;
        report.print_rows()?;
        write_json(file, &report)?;
        Ok(())
    }

    fn staged(&self, context: &Context, timeout: Duration) -> Result<Report<staged::Row>> {
        let sizes = self
            .sizes
            .iter()
            .map(|&size| usize::try_from(size))
            .collect::<std::result::Result<Vec<_>, _>>()?;
        let rows = staged::measure(context, &self.gpu()?, &sizes, self.rounds, timeout)?;
        Ok(Report::new(context, rows))
    }

    fn gpu(&self) -> Result<Gpu> {
        #[cfg(feature = "standin")]
        if self.simulated {
            use gdsync_testkit::driver;
            return Ok(Gpu::open_with(driver::api(), 0, Some(driver::gdr()?))?);
        }
        own_gpu(&[])
    }
}

impl<R> Report<R> {
    fn new(context: &Context, results: Vec<R>) -> Self {
        let (device, wire) = (context.description().to_owned(), context.wire().to_owned());
        Self { device, wire, machine: Machine::here(), results }
    }

    fn print(&self) -> io::Result<()> {
        out!("{} over {}, {} x {}", self.device, self.wire, self.machine.cpus, self.machine.cpu)
    }
}

impl Report<Row> {
    fn print_rows(&self) -> io::Result<()> {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_header(["RDMA WRITE of 8 bytes, to itself", "p50 us", "p99 us", "min us", "ratio"]);
        for row in &self.results {
            let Micros { min, p50, p99 } = row.us;
            let numbers = [p50, p99, min].map(|us| format!("{us:.3}"));
            table.add_row(
                std::iter::once(row.name.to_owned()).chain(numbers).chain([format!("{:.2}", row.ratio)]),
            );
        }
        table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        out!("{table}")
    }
}
