//! `gdasync bench overlap`: how much of an exchange of messages hides behind work on the stream.

use std::time::{Duration, Instant};

use clap::Args;
use gdasync::gdsync::stream::Batch;
use gdasync::lane::{Lane, Placed, Placement};
use gdasync::measure::Samples;
use gdasync::measure::series::{Point, Series, Unit};
use gdasync::mp::{self, Communicator, Registration, Request};
use gdasync::pingpong::{PTX, Work};
use serde_json::json;

use super::Result;
use super::sheet::{Checks, Output, Sheet, expected};
use super::slots::Slots;

/// Options of `gdasync bench overlap`.
#[derive(Args)]
#[command(after_long_help = "\
What the numbers mean: in every iteration both ranks send a message to each other, work for some microseconds on their streams \
(a host function that spins, or a kernel), and wait for both messages. `compute` is the time of an iteration without messages, \
`both` with them, and their ratio what messages cost beside work; `exchange` is without work. `hidden` is the fraction of the \
exchange that took no time, 1 - (both - compute) / exchange: 1 is perfect, 0 as if one came after the other, and less where \
they hinder each other. Ways: `stream` has everything posted ahead on the stream; `cpu` has the CPU post the messages before \
the work, wait for the work, then for the messages; `serial` posts them after the work and hides nothing: the baseline.")]
pub(crate) struct Options {
    /// Bytes of a message, 1 to 1073741824.
    #[arg(long, default_value_t = 65536, value_parser = clap::value_parser!(u32).range(1..=1 << 30))]
    bytes: u32,
    /// Microseconds of work, 1 to 1000000 each.
    #[arg(long, value_name = "US", value_delimiter = ',', default_values_t = [3, 10, 30, 100, 300, 1000],
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    work_us: Vec<u32>,
    /// Iterations of a window, which is timed as a whole.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(2..=100))]
    ahead: u32,
    /// Windows of each figure.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    windows: u32,
    #[command(flatten)]
    placement: Placement,
    #[command(flatten)]
    checks: Checks,
    #[command(flatten)]
    output: Output,
}

/// Who posts messages, and when.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Stream,
    Cpu,
    Serial,
}

const WAYS: [(Way, &str); 3] = [(Way::Stream, "stream"), (Way::Cpu, "cpu"), (Way::Serial, "serial")];

/// One rank's part.
struct Player<'a> {
    comm: &'a Communicator,
    lane: &'a Lane,
    checks: &'a Checks,
    buffer: Registration,
    slots: Slots,
    peer: usize,
    timeout: Duration,
    /// Windows with messages so far: each has bytes of its own.
    window: u64,
}

/// The times of one way with some work.
#[derive(Default)]
struct Times {
    compute: Samples,
    exchange: Samples,
    both: Samples,
}

impl Options {
    pub(crate) fn run(&self) -> Result<()> {
        let timeout = self.checks.timeout();
        let placed = self.placement.open()?;
        let comm = super::pair(placed.builder(), timeout)?;
        let lane = Lane::new(&placed, timeout, PTX)?;
        let mut sheet = Sheet::new(&self.output, comm.rank() == 0, self.work_us.len())?;
        let mut player = Player::new(self, &comm, &lane, &placed)?;
        let curves = |name: &str| {
            let curve = |part, unit| Series::new(format!("{name}: {part}"), "us of work", unit);
            let [compute, exchange, both] =
                ["compute", "exchange", "both"].map(|part| curve(part, Unit::Micros));
            [compute, exchange, both, curve("hidden", Unit::Ratio)]
        };
        let mut all = WAYS.map(|(_, name)| curves(name));
        for (i, &us) in self.work_us.iter().enumerate() {
            if i > 0 && !sheet.goes_on(&comm, timeout)? {
                sheet.out_of_time(format!("{us} us of work"));
                continue;
            }
            sheet.step(format!("{us} us of work"));
            for (times, curves) in self.of_work(&mut player, us, &mut sheet)?.iter().zip(&mut all) {
                let [compute, exchange, both] = [&times.compute, &times.exchange, &times.both]
                    .map(|times| Point::time(us.into(), times, 1));
                let hidden = 1.0 - (both.p50 - compute.p50) / exchange.p50;
                let points = [compute, exchange, both, Point::value(us.into(), hidden)];
                curves.iter_mut().zip(points).for_each(|(curve, point)| curve.points.push(point));
            }
        }
        for [compute, _, both, _] in &mut all {
            both.compare(compute);
        }
        sheet.add(all.into_iter().flatten());
        let options = json!({
            "bytes": self.bytes,
            "work_us": self.work_us,
            "ahead": self.ahead,
            "windows": self.windows,
        });
        sheet.finish_lane(comm, lane, &placed, "overlap", options, timeout)
    }

    /// Everything by turns; the first turn warms up.
    fn of_work(&self, player: &mut Player<'_>, us: u32, sheet: &mut Sheet) -> Result<[Times; 3]> {
        let (none, some) = (
            Work::new(player.lane, Duration::ZERO)?,
            Work::new(player.lane, Duration::from_micros(us.into()))?,
        );
        let mut all: [Times; 3] = Default::default();
        for turn in 0..=self.windows {
            for ((way, _), times) in WAYS.iter().zip(&mut all) {
                let compute = player.compute(*way, &some, self.ahead)?;
                let (exchange, wrong) = player.exchange(*way, &none, self.ahead)?;
                let (both, also_wrong) = player.exchange(*way, &some, self.ahead)?;
                sheet.wrong(wrong + also_wrong);
                if turn > 0 {
                    times.compute.add(compute / self.ahead);
                    times.exchange.add(exchange / self.ahead);
                    times.both.add(both / self.ahead);
                }
            }
        }
        Ok(all)
    }
}

impl<'a> Player<'a> {
    fn new(options: &'a Options, comm: &'a Communicator, lane: &'a Lane, placed: &Placed) -> Result<Self> {
        let slots = Slots::new(usize::try_from(options.bytes)?);
        let buffer = comm.register(&placed.memory(slots.len())?)?;
        let (checks, timeout) = (&options.checks, options.checks.timeout());
        Ok(Self { comm, lane, checks, buffer, slots, peer: 1 - comm.rank(), timeout, window: 0 })
    }

    /// Times a window without messages.
    fn compute(&self, way: Way, work: &Work<'_>, count: u32) -> Result<Duration> {
        self.comm.barrier(self.timeout)?;
        let start = Instant::now();
        for _ in 0..count {
            work.enqueue()?;
            if way != Way::Stream {
                self.lane.idle()?;
            }
        }
        self.lane.finish()?;
        Ok(start.elapsed())
    }

    /// Times a window of exchanges with work. Also returns how many of the receiving slots had wrong data.
    fn exchange(&mut self, way: Way, work: &Work<'_>, count: u32) -> Result<(Duration, u64)> {
        self.window += 1;
        let (memory, slots) = (self.buffer.memory(), self.slots);
        let theirs = expected(self.peer, self.window);
        slots.fill(memory, self.checks.sent(self.comm.rank(), self.window))?;
        slots.spoil(memory, theirs, count.into())?;
        memory.flush()?;
        let receive = |n: u32| self.comm.irecv(&self.buffer, slots.received(n.into()), self.peer);
        let receives = (0..count).map(receive);
        let receives = receives.collect::<mp::Result<Vec<_>>>()?;
        self.comm.barrier(self.timeout)?;
        let start = Instant::now();
        for receive in &receives {
            match way {
                Way::Stream => self.on_stream(work, receive)?,
                Way::Cpu => {
                    let sent = self.send()?;
                    work.enqueue()?;
                    self.lane.idle()?;
                    self.comm.wait_all([receive, &sent], self.timeout)?;
                }
                Way::Serial => {
                    work.enqueue()?;
                    self.lane.idle()?;
                    let sent = self.send()?;
                    self.comm.wait_all([receive, &sent], self.timeout)?;
                }
            }
        }
        self.lane.finish()?;
        let time = start.elapsed();
        Ok((time, slots.wrong(memory, theirs, count.into())?))
    }

    fn send(&self) -> mp::Result<Request> {
        self.comm.isend(&self.buffer, self.slots.sent(), self.peer)
    }

    fn on_stream(&self, work: &Work<'_>, receive: &Request) -> Result<()> {
        let mut batch = Batch::new();
        let sent = self.comm.isend_in_batch(&mut batch, &self.buffer, self.slots.sent(), self.peer)?;
        self.lane.stream.submit_within(&mut batch, self.timeout)?;
        work.enqueue()?;
        self.comm.wait_in_batch(&mut batch, receive)?;
        self.comm.wait_in_batch(&mut batch, &sent)?;
        Ok(self.lane.stream.submit_within(&mut batch, self.timeout)?)
    }
}
