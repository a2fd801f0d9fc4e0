//! `gdasync bench rate`: messages per second, by what is outstanding, over how many queue pairs, of which size.

use clap::Args;
use gdasync::lane::{Lane, Placed, Placement};
use gdasync::measure::Samples;
use gdasync::measure::series::{Point, Series, Unit};
use gdasync::mp::Communicator;
use gdasync::pingpong::PTX;
use serde_json::json;

use super::Result;
use super::fleet::{Fleet, Shape};
use super::floor::Ring;
use super::sheet::{Checks, Output, Sheet};

/// Options of `gdasync bench rate`.
#[derive(Args)]
#[command(after_long_help = "\
What the numbers mean: rank 0 sends messages as fast as what may be outstanding lets it, rank 1 receives them by CPU, and the \
clock stops when rank 0 hears that all have come. `cpu` is posted and polled by the sending thread; in `stream` a batch of the \
stream sends what may be outstanding and waits for its completions, and runs dry every 256 messages of a queue pair. `floor` is a ring of 64 places in shared memory into which \
one CPU copies messages and from which the other takes them: the ratios are to its rate at the same size. min and p99 are of \
slices of a run: the slowest, and what 99 of 100 exceed. Three sweeps: over sizes, with the most outstanding on one queue pair; \
over what is outstanding, and over queue pairs with the most outstanding, both with the smallest size.")]
pub(crate) struct Options {
    /// Message sizes in bytes, 1 to 1048576 each.
    #[arg(long, value_delimiter = ',', default_values_t = [8, 64, 512, 4096],
          value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    sizes: Vec<u32>,
    /// Messages under way of a queue pair, 1 to 256 each.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 16, 64],
          value_parser = clap::value_parser!(u16).range(1..=256))]
    outstanding: Vec<u16>,
    /// Queue pairs, 1 to 64 each.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8],
          value_parser = clap::value_parser!(u16).range(1..=64))]
    qps: Vec<u16>,
    /// Messages of a slice.
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    messages: u32,
    /// Slices of each figure.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    slices: u32,
    #[command(flatten)]
    placement: Placement,
    #[command(flatten)]
    checks: Checks,
    #[command(flatten)]
    output: Output,
}

/// The curves of a sweep: those of the ways, and the floor.
struct Sweep {
    x: &'static str,
    curves: [Series; 3],
}

const WAYS: [&str; 2] = ["cpu", "stream"];
const FLOOR: &str = "floor";

impl Sweep {
    fn new(x: &'static str) -> Self {
        let curve = |name| Series::new(format!("{name}, by {x}"), x, Unit::PerSecond);
        Self { x, curves: [WAYS[0], WAYS[1], FLOOR].map(curve) }
    }
}

impl Options {
    pub(crate) fn run(&self) -> Result<()> {
        let timeout = self.checks.timeout();
        let placed = self.placement.open()?;
        let comm = super::pair(placed.builder(), timeout)?;
        let lane = Lane::new(&placed, timeout, PTX)?;
        let steps = self.sizes.len() + self.outstanding.len() + self.qps.len();
        let mut sheet = Sheet::new(&self.output, comm.rank() == 0, steps)?;
        let most = self.outstanding.iter().copied().max().unwrap_or(1);
        let small = self.sizes.iter().copied().min().unwrap_or(8);
        let shape = |qps: u16, outstanding: u16, bytes: u32| -> Result<Shape> {
            Ok(Shape { qps: qps.into(), outstanding: outstanding.into(), bytes: usize::try_from(bytes)? })
        };
        let mut sweeps = ["bytes", "outstanding", "queue pairs"].map(Sweep::new);
        let (mut points, mut no_floor) = (Vec::new(), None);
        for &bytes in &self.sizes {
            points.push((0, u64::from(bytes), shape(1, most, bytes)?));
        }
        for &outstanding in &self.outstanding {
            points.push((1, outstanding.into(), shape(1, outstanding, small)?));
        }
        for &qps in &self.qps {
            points.push((2, qps.into(), shape(qps, most, small)?));
        }
        for (i, (sweep, x, shape)) in points.into_iter().enumerate() {
            let what = format!("{x} {}", sweeps[sweep].x);
            if i > 0 && !sheet.goes_on(&comm, timeout)? {
                sheet.out_of_time(what);
                continue;
            }
            sheet.step(what);
            let rates = self.of_shape(&comm, &placed, &lane, shape, &mut sheet, &mut no_floor)?;
            for (curve, samples) in
                sweeps[sweep].curves.iter_mut().zip(&rates).filter(|(_, all)| all.count() > 0)
            {
                // A sample is the time of one message.
                curve.points.push(Point::rate(x, samples, 1e6));
            }
        }
        for Sweep { curves: [cpu, stream, floor], .. } in &mut sweeps {
            cpu.compare(floor);
            stream.compare(floor);
        }
        if let Some(reason) = no_floor {
            sheet.skip(FLOOR, reason);
        }
        sheet.add(sweeps.into_iter().flat_map(|sweep| sweep.curves));
        let options = json!({
            "sizes": self.sizes,
            "outstanding": self.outstanding,
            "qps": self.qps,
            "messages": self.messages,
            "slices": self.slices,
        });
        sheet.finish_lane(comm, lane, &placed, "rate", options, timeout)
    }

    /// Both ways and the floor by turns; the first turn warms up.
    fn of_shape(
        &self,
        comm: &Communicator,
        placed: &Placed,
        lane: &Lane,
        shape: Shape,
        sheet: &mut Sheet,
        no_floor: &mut Option<String>,
    ) -> Result<[Samples; 3]> {
        let (mut all, count): ([Samples; 3], _) = (Default::default(), usize::try_from(self.messages)?);
        let fleet = || Fleet::new(comm, comm.context(), &self.checks, shape, Some(placed));
        // A stream has queue pairs of its own: completions that it awaits are not polled.
        let mut fleets = [(fleet()?, None), (fleet()?, Some(&lane.stream))];
        // The same at both ranks: those on two hosts have none.
        let ring = Ring::new(comm, &self.checks, shape.bytes);
        let mut ring = ring.map_err(|error| *no_floor = Some(error.to_string())).ok();
        for turn in 0..=self.slices {
            let mut found = Vec::with_capacity(all.len());
            for (fleet, stream) in &mut fleets {
                found.push(fleet.flood(count, *stream)?);
            }
            if let Some(ring) = &mut ring {
                found.push(ring.flood(count)?);
            }
            for ((time, wrong), samples) in found.into_iter().zip(&mut all) {
                sheet.wrong(wrong);
                if turn > 0 {
                    samples.add(time);
                }
            }
        }
        Ok(all)
    }
}
