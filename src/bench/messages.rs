//! `gdasync bench messages`: the messaging layer: latency, rate, and the cost of calls.

use std::collections::VecDeque;
use std::time::Instant;

use clap::{Args, ValueEnum};
use gdasync::gdsync::memory::Memory;
use gdasync::gdsync::stream::{Batch, HostStreamConfig, Stream};
use gdasync::gdsync::verbs::{Access, Mr, Qp, RecvWr, RemoteAddr, SendWr, Sge, Wc};
use gdasync::measure::{Samples, connect, poll};
use gdasync::mp::tagged::{self, Tagged};
use gdasync::mp::{self, Communicator, CommunicatorBuilder, Registration, Request, Window};
use gdasync::results::{Checks, Output, Point, Result, Sheet, Unit, size_label};
use gdasync::terminal::name;
use serde_json::json;

use super::traffic::{Endpoint, SLICES, in_slices};
use super::two_ranks;

#[derive(Args)]
#[command(after_long_help = "\
What the numbers mean: ping-pong is half a round trip, the mean of windows of 100 iterations; from 64 KiB on by the CPU, a single \
one. The ratios are to mode sync. \
`time per message` is that of one of 16 in flight. Calls: the time of one call with 8 bytes, of mp and of gdsync below it.")]
pub(crate) struct Options {
    /// Message sizes in bytes, 1 to 1073741824 each.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1 << 30),
          default_values_t = [8, 64, 512, 4096, 32768, 262_144, 1 << 20, 4 << 20, 16 << 20])]
    sizes: Vec<u32>,
    /// Modes to measure.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Mode::Sync, Mode::Async, Mode::Tagged, Mode::Rate])]
    modes: Vec<Mode>,
    /// Iterations of each size [default: 20000, fewer for large messages].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    iters: Option<u32>,
    /// Rounds of 64 calls that measure what a call adds to gdsync's; 0 leaves them out.
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    calls: u32,
    #[command(flatten)]
    checks: Checks,
    #[command(flatten)]
    output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// Ping-pong: the CPU sends and waits.
    Sync,
    /// Ping-pong: a stream sends and waits, many iterations are posted ahead.
    Async,
    /// Ping-pong by the CPU, each message with its own tag.
    Tagged,
    /// One way by the CPU, 16 messages in flight.
    Rate,
}

/// Iterations of a window: all receives are posted before it starts.
const WINDOW: u64 = 100;
/// From this size on, round trips by the CPU are timed one by one, as `ucx_perftest` does: a mean shows what else the cores did.
const TIMED_SINGLY: usize = 64 << 10;
/// Messages in flight when a rate is measured.
const IN_FLIGHT: usize = 16;
const PING_PONG: &str = "half round trip";
const RATE: &str = "time per message";
const CALLS: &str = "calls with 8 bytes";

impl Options {
    pub(crate) fn run(&self) -> Result<()> {
        let timeout = self.checks.timeout();
        let comm = two_ranks(CommunicatorBuilder::default(), timeout)?;
        let mut sheet = Sheet::new(&self.output, comm.rank() == 0, self.sizes.len())?;
        let config = HostStreamConfig { name: "mp".into(), wait_limit: timeout, ..Default::default() };
        let stream = Stream::host(config)?;
        let tagged = Tagged::new(&comm, None)?;
        for &bytes in &self.sizes {
            let bytes = usize::try_from(bytes)?;
            if !sheet.may_start(&comm, size_label(bytes))? {
                continue;
            }
            self.of_size((&comm, &tagged), &stream, bytes, &mut sheet)?;
        }
        sheet.compare(PING_PONG, "sync");
        if self.calls > 0 {
            sheet.step("calls");
            calls(&comm, self.calls, &mut sheet)?;
        }
        let options = json!({ "sizes": self.sizes, "iters": self.iters, "calls": self.calls });
        sheet.finish(comm, "messages", options)
    }

    fn of_size(
        &self,
        (comm, tagged): (&Communicator, &Tagged),
        stream: &Stream,
        bytes: usize,
        sheet: &mut Sheet,
    ) -> Result<()> {
        let windows = Windows::new((comm, tagged), stream, bytes, &self.checks)?;
        let all = self.iters.map_or(((1 << 30) / bytes as u64).clamp(20, 20_000), u64::from);
        let mut modes = self.modes.clone();
        let all = in_slices(&mut modes, (SLICES, all.div_ceil(SLICES)), sheet, |mode, count| {
            windows.run(*mode, count)
        })?;
        for (&mode, samples) in self.modes.iter().zip(&all) {
            // A round trip is two messages.
            let (group, parts) = if mode == Mode::Rate { (RATE, 1) } else { (PING_PONG, 2) };
            let point = Point::time(bytes as u64, samples, parts);
            sheet.add_point(group, &name(&mode), "bytes", Unit::Micros, point);
        }
        Ok(())
    }
}

/// Windows of messages of one size between two ranks, timed as a whole and checked afterwards.
struct Windows<'a> {
    end: Endpoint<'a>,
    tagged: &'a Tagged,
    stream: &'a Stream,
    bytes: usize,
}

/// The times of single round trips, if they are wanted.
struct Single(Option<Samples>);

impl Single {
    fn time(&mut self, round: impl FnOnce() -> Result<()>) -> Result<()> {
        let Some(times) = &mut self.0 else { return round() };
        let start = Instant::now();
        round()?;
        times.add(start.elapsed());
        Ok(())
    }
}

impl<'a> Windows<'a> {
    fn new(
        (comm, tagged): (&'a Communicator, &'a Tagged),
        stream: &'a Stream,
        bytes: usize,
        checks: &'a Checks,
    ) -> Result<Self> {
        let peer = 1 - comm.rank();
        let end = Endpoint::new(comm, checks, bytes, (peer, peer))?;
        Ok(Self { end, tagged, stream, bytes })
    }

    /// Runs `count` iterations: the times of round trips, or of messages for a rate, and the number of wrong slots.
    fn run(&self, mode: Mode, count: u64) -> Result<(Samples, u64)> {
        let (mut samples, mut wrong, mut left) = (Samples::default(), 0, count);
        while left > 0 {
            let window = left.min(WINDOW);
            let receives = if mode == Mode::Rate && self.pings() { 0 } else { window };
            self.end.prepare(receives)?;
            // All receives are posted first, so no message waits for its receive.
            let (plain, tagged) = if mode == Mode::Tagged { (0, receives) } else { (receives, 0) };
            let received: Vec<_> = (0..plain).map(|n| self.end.receive(n)).collect::<mp::Result<_>>()?;
            let tagged: Vec<_> = (0..tagged)
                .map(|n| self.tagged.irecv(&self.end.buffer, self.end.slots.received(n), self.end.to, n))
                .collect::<mp::Result<_>>()?;
            self.end.comm.barrier(None)?;
            let mut single = Single((self.bytes >= TIMED_SINGLY).then(Samples::default));
            let start = Instant::now();
            match mode {
                Mode::Sync => self.by_cpu(&received, &mut single)?,
                Mode::Async => self.by_stream(&received)?,
                Mode::Tagged => self.by_tag(&tagged, &mut single)?,
                Mode::Rate => self.one_way(&received, window)?,
            }
            match single.0 {
                Some(times) if times.count() > 0 => samples.append(&times),
                _ => samples.add_mean(start.elapsed(), window),
            }
            wrong += self.end.wrong(receives)?;
            left -= window;
        }
        Ok((samples, wrong))
    }

    fn pings(&self) -> bool {
        self.end.comm.rank() == 0
    }

    fn by_cpu(&self, received: &[Request], single: &mut Single) -> Result<()> {
        received.iter().try_for_each(|receive| {
            single.time(|| {
                let sent = self.pings().then(|| self.end.send()).transpose()?;
                self.end.comm.wait(receive, None)?;
                let sent = sent.map_or_else(|| self.end.send(), Ok)?;
                Ok(self.end.comm.wait(&sent, None).map(drop)?)
            })
        })
    }

    fn by_tag(&self, received: &[tagged::Request], single: &mut Single) -> Result<()> {
        (0..).zip(received).try_for_each(|(tag, receive)| {
            single.time(|| {
                let send = || self.tagged.isend(&self.end.buffer, self.end.slots.sent(), self.end.to, tag);
                let sent = self.pings().then(send).transpose()?;
                receive.wait(None)?;
                Ok(sent.map_or_else(send, Ok)?.wait(None).map(drop)?)
            })
        })
    }

    fn by_stream(&self, received: &[Request]) -> Result<()> {
        let mut batch = Batch::new();
        let mut last = None;
        for receive in received {
            if !self.pings() {
                self.end.comm.wait_in_batch(&mut batch, receive)?;
            }
            last = Some(self.end.comm.isend_in_batch(
                &mut batch,
                &self.end.buffer,
                self.end.slots.sent(),
                self.end.to,
            )?);
            if self.pings() {
                self.end.comm.wait_in_batch(&mut batch, receive)?;
            }
            self.stream.with_timeout(self.end.comm.timeout()).submit(&mut batch)?;
        }
        if let Some(last) = last {
            self.end.comm.wait_on_stream(self.stream, &last)?;
        }
        Ok(self.stream.synchronize(self.end.comm.timeout())?)
    }

    fn one_way(&self, received: &[Request], window: u64) -> Result<()> {
        if self.pings() {
            let mut in_flight = VecDeque::new();
            for _ in 0..window {
                in_flight.push_back(self.end.send()?);
                if in_flight.len() == IN_FLIGHT {
                    in_flight.pop_front().map(|oldest| self.end.comm.wait(&oldest, None)).transpose()?;
                }
            }
            self.end.comm.wait_all(&in_flight, None)?;
        } else {
            self.end.comm.wait_all(received, None)?;
        }
        Ok(())
    }
}

/// Calls that are timed together.
const BURST: usize = 64;

const NAMES: [&str; 5] =
    ["post a receive", "post a send", "complete an arrived receive", "start a put", "start a get"];

/// Times of the calls, in this order.
type Times = [Samples; NAMES.len()];

fn burst(samples: &mut Samples, call: impl FnMut(usize) -> Result<()>) -> Result<()> {
    let start = Instant::now();
    (0..BURST).try_for_each(call)?;
    samples.add_mean(start.elapsed(), BURST as u64);
    Ok(())
}

/// A queue pair without the messaging layer.
struct Bare {
    qp: Qp,
    mr: Mr,
    remote: RemoteAddr,
}

impl Bare {
    fn new(comm: &Communicator) -> Result<Self> {
        let pd = comm.context().alloc_pd()?;
        let mr = pd.register(&Memory::alloc(64)?, Access::all())?;
        let queues = pd.build_qp().max_send_wr(512).max_recv_wr(512).max_send_sge(2).max_recv_sge(2);
        let qp = queues.rnr_retry(7).timeout(17).build()?;
        connect(comm, [&qp].into_iter())?;
        let remotes = comm.exchange(&mr.remote(0)?.to_bytes(), None)?;
        let remote = remotes[1 - comm.rank()].first_chunk().ok_or("a short address")?;
        Ok(Self { qp, mr, remote: RemoteAddr::from_bytes(remote) })
    }

    fn round(&self, comm: &Communicator, times: &mut Times) -> Result<()> {
        let [receive, send, complete, put, get] = times;
        burst(receive, |_| Ok(self.qp.post_recv(&[RecvWr::new(&[self.mr.sge(0, 8)?])]).map(drop)?))?;
        self.posts(comm, send, |sges| SendWr::send(sges))?;
        // All messages have arrived.
        burst(complete, |_| take(comm, || self.qp.poll_recv()))?;
        self.posts(comm, put, |sges| SendWr::write(self.remote, sges))?;
        self.posts(comm, get, |sges| SendWr::read(self.remote, sges))
    }

    fn posts(
        &self,
        comm: &Communicator,
        samples: &mut Samples,
        request: impl for<'a> Fn(&'a [Sge]) -> SendWr<'a>,
    ) -> Result<()> {
        let post = || Ok(self.qp.post_send(&[request(&[self.mr.sge(8, 8)?])]).map(drop)?);
        by_turns(comm, samples, post, |_| {
            // As mp waits: a wait hands the device to the service thread, which slows the next burst.
            self.qp.wait_all_sends(comm.timeout())?;
            (0..BURST).try_for_each(|_| take(comm, || self.qp.poll_send()))
        })
    }
}

/// Lets one rank after the other start a burst and complete it: otherwise the calls of each would also process the messages of the
/// other.
fn by_turns<T>(
    comm: &Communicator,
    samples: &mut Samples,
    mut start: impl FnMut() -> Result<T>,
    complete: impl Fn(Vec<T>) -> Result<()>,
) -> Result<()> {
    comm.barrier(None)?;
    for rank in 0..comm.size() {
        if rank == comm.rank() {
            let mut started = Vec::with_capacity(BURST);
            burst(samples, |_| {
                started.push(start()?);
                Ok(())
            })?;
            complete(started)?;
        }
        comm.barrier(None)?;
    }
    Ok(())
}

fn take(comm: &Communicator, completion: impl Fn() -> Option<Wc>) -> Result<()> {
    poll(comm.timeout(), || Result::Ok(completion()))?.ok_or("no completion came")?.ok()?;
    Ok(())
}

fn round(comm: &Communicator, (buffer, window): (&Registration, &Window), times: &mut Times) -> Result<()> {
    let ([receive, send, complete, put, get], peer) = (times, 1 - comm.rank());
    let done = |started: Vec<Request>| Ok(comm.wait_all(&started, None).map(drop)?);
    let mut received = Vec::with_capacity(BURST);
    burst(receive, |n| {
        received.push(comm.irecv(buffer, 16 + 8 * n..24 + 8 * n, peer)?);
        Ok(())
    })?;
    by_turns(comm, send, || Ok(comm.isend(buffer, 8..16, peer)?), done)?;
    burst(complete, |n| Ok(comm.wait(&received[n], None).map(drop)?))?;
    by_turns(comm, put, || Ok(window.iput(buffer, 8..16, peer, 0)?), done)?;
    by_turns(comm, get, || Ok(window.iget(buffer, 8..16, peer, 0)?), done)
}

/// Measures the calls of mp and of gdsync by queue pairs, in turn.
fn calls(comm: &Communicator, rounds: u32, sheet: &mut Sheet) -> Result<()> {
    let bare = Bare::new(comm)?;
    let buffer = comm.register(&Memory::alloc(16 + 8 * BURST)?)?;
    let window = comm.window(&buffer, 0..8, None)?;
    let (mut theirs, mut ours) = (Times::default(), Times::default());
    for _ in 0..rounds {
        bare.round(comm, &mut theirs)?;
        round(comm, (&buffer, &window), &mut ours)?;
    }
    window.destroy(None)?;
    for (name, times) in [("gdsync", theirs), ("mp", ours)] {
        for (call, samples) in NAMES.into_iter().zip(&times) {
            sheet.add_point(CALLS, name, "call", Unit::Micros, Point::time(call, samples, 1));
        }
    }
    sheet.compare(CALLS, "gdsync");
    Ok(())
}
