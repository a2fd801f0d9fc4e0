//! `gdasync bench bandwidth`: bytes and messages per second between hosts and GPUs.

use std::hint::black_box;
use std::ops::Range;
use std::time::{Duration, Instant};

use clap::Args;
use cudarc::driver::{result, sys};
use gdasync::app_stream::{AppStream, Placed, Placement, own_gpu};
use gdasync::gdsync::cuda::Gpu;
use gdasync::gdsync::memory::Memory;
use gdasync::measure::{Samples, objection};
use gdasync::mp::{Communicator, Request};
use gdasync::pingpong::PTX;
use gdasync::results::{Checks, Output, Point, Result, Sheet, Unit, expected, size_label};
use serde_json::json;

use super::traffic::{Endpoint, QueuePairs, SLICES, Shape, Slots, in_slices};
use super::two_ranks;

#[derive(Args)]
#[command(after_long_help = "\
What the numbers mean: bandwidth is the bytes of a message over half of a round trip, which starts and ends where the payload \
is, copies included. `host to host` sends host memory. `GPU to GPU` has the payload of both ranks on their GPUs: with copies to \
a buffer that both CUDA and the network have pinned (GPUDirect version 1); without copies (GPUDirect RDMA). `peer to peer` has no messages: CUDA copies between two GPUs of one process (GPUDirect P2P). \
Local rank r uses GPU r modulo their number. The ratios are to memcpy by one CPU. Message rates: rank 0 sends as fast as \
--outstanding lets it, rank 1 receives by CPU, and the clock stops when rank 0 has the acknowledgement of the last message; \
`cpu` is posted and polled by the sending thread, in `stream` each batch sends what may be outstanding and waits for the \
completions. Their ratios are to the first point. min and p99 are the \
smallest value, and what 99 of 100 samples exceed.")]
pub(crate) struct Options {
    /// Message sizes in bytes, 1 to 1073741824 each. Message rates are measured up to 4096.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1 << 30),
          default_values_t = [8, 64, 512, 4096, 16384, 65536, 262_144, 1 << 20, 4 << 20, 16 << 20])]
    sizes: Vec<u32>,
    /// Round trips of each size and row [default: 1000, fewer for large messages].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    iters: Option<u32>,
    /// Messages in flight on a queue pair, 1 to 256 each.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 16, 64],
          value_parser = clap::value_parser!(u16).range(1..=256))]
    outstanding: Vec<u16>,
    /// Messages of a slice of a rate; 0 leaves rates out.
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(u32).range(..=10_000_000))]
    messages: u32,
    #[command(flatten)]
    placement: Placement,
    #[command(flatten)]
    checks: Checks,
    #[command(flatten)]
    output: Output,
}

const BANDWIDTH: &str = "bandwidth";
const MEMCPY: &str = "memcpy";
const PEERS: &str = "peer to peer";
/// The largest message whose rate is measured.
const RATED: u32 = 4096;
/// The rows of messages: where the payload is.
const ROWS: [(&str, Kind); 3] = [
    ("host to host", Kind::Host),
    ("GPU to GPU, shared pinned buffers", Kind::Copied),
    ("GPU to GPU, direct", Kind::Direct),
];
const RATE_SLICES: u64 = 20;

/// Moves messages there and back: round trips, and the number of wrong slots.
type Run<'a> = Box<dyn FnMut(usize, u64) -> Result<(Samples, u64)> + 'a>;

impl Options {
    pub(crate) fn run(&self) -> Result<()> {
        let timeout = self.checks.timeout();
        let placed = self.placement.open()?;
        let comm = two_ranks(placed.builder(), timeout)?;
        let mut sheet = Sheet::new(&self.output, comm.rank() == 0, self.sizes.len())?;
        self.bandwidths(&comm, &mut sheet)?;
        let app = AppStream::new(&placed, timeout, PTX)?;
        if self.messages > 0 {
            self.rates(&comm, &placed, &app, &mut sheet)?;
        }
        let own = own_gpu(&[]).map(|gpu| format!("GPU {}, {}", gpu.ordinal(), gpu.capabilities()));
        let gpus = comm.exchange(own.unwrap_or_default().as_bytes(), None)?;
        let gpus: Vec<_> =
            gpus.iter().map(|gpu| String::from_utf8_lossy(gpu)).filter(|gpu| !gpu.is_empty()).collect();
        let options = json!({
            "sizes": self.sizes, "iters": self.iters, "outstanding": self.outstanding,
            "messages": self.messages, "gpus": gpus,
            "stream": app.stream.kind(), "place": placed.describe(&comm)?,
        });
        drop(app);
        sheet.finish(comm, "bandwidth", options)
    }

    fn bandwidths(&self, comm: &Communicator, sheet: &mut Sheet) -> Result<()> {
        let mut rows = self.rows(comm, sheet)?;
        for &bytes in &self.sizes {
            let bytes = usize::try_from(bytes)?;
            if !sheet.may_start(comm, size_label(bytes))? {
                continue;
            }
            let all = self.iters.map_or(((256 << 20) / bytes as u64).clamp(20, 1000), u64::from);
            let slices = (SLICES, all.div_ceil(SLICES));
            let all = in_slices(&mut rows, slices, sheet, |(_, run), count| run(bytes, count))?;
            for ((name, _), samples) in rows.iter().zip(&all).filter(|(_, samples)| samples.count() > 0) {
                // A round trip is two messages, and a byte per microsecond is 1e-3 GB/s.
                #[expect(clippy::cast_precision_loss, reason = "sizes are below 2^53")]
                let point = Point::rate(bytes as u64, samples, 2.0 * bytes as f64 / 1e3);
                sheet.add_point(BANDWIDTH, name, "bytes", Unit::GigabytesPerSecond, point);
            }
        }
        sheet.compare(BANDWIDTH, MEMCPY);
        Ok(())
    }

    /// The rows that this machine has, memcpy first; lists the others as skipped.
    fn rows<'a>(&'a self, comm: &'a Communicator, sheet: &mut Sheet) -> Result<Vec<(&'static str, Run<'a>)>> {
        let (checks, rank) = (&self.checks, comm.rank());
        let max = usize::try_from(self.sizes.iter().copied().max().unwrap_or(1))?;
        let mut copy = Memcpy { from: vec![0x5a; max], to: vec![0; max] };
        let nothing = || Ok((Samples::default(), 0));
        let memcpy: Run<'a> =
            Box::new(move |bytes, count| if rank == 0 { copy.run(bytes, count) } else { nothing() });
        let mut rows = vec![(MEMCPY, memcpy)];
        for (name, kind) in ROWS {
            let side = Side::new(kind, comm, checks, max);
            match objection(comm, side.as_ref().err().map(ToString::to_string))? {
                Some(reason) => sheet.skip(name, reason),
                None => {
                    let mut side = side?;
                    rows.push((name, Box::new(move |bytes, count| side.run(bytes, count))));
                }
            }
        }
        // Both GPUs belong to rank 0.
        let peers = (rank == 0).then(|| Peers::new(max)).transpose();
        match objection(comm, peers.as_ref().err().map(ToString::to_string))? {
            Some(reason) => sheet.skip(PEERS, reason),
            None => {
                let (peers, mut runs) = (peers?, 0);
                let run: Run<'a> = Box::new(move |bytes, count| {
                    runs += 1;
                    peers.as_ref().map_or_else(nothing, |peers| peers.run(bytes, count, runs))
                });
                rows.push((PEERS, run));
            }
        }
        Ok(rows)
    }

    /// Two sweeps: sizes at the largest depth, depths at the smallest size.
    fn rates(&self, comm: &Communicator, placed: &Placed, app: &AppStream, sheet: &mut Sheet) -> Result<()> {
        let most = self.outstanding.iter().copied().max().unwrap_or(1);
        let small = self.sizes.iter().copied().min().unwrap_or(8);
        let sizes = self.sizes.iter().filter(|bytes| **bytes <= RATED);
        let sizes = sizes.map(|&bytes| ("bytes", u64::from(bytes), most, bytes));
        let depths = self.outstanding.iter().map(|&depth| ("outstanding", u64::from(depth), depth, small));
        for (x, at, outstanding, bytes) in sizes.chain(depths) {
            if !sheet.may_start(comm, format!("rate, {at} {x}"))? {
                continue;
            }
            let shape = Shape { qps: 1, outstanding: outstanding.into(), bytes: usize::try_from(bytes)? };
            let all = self.rate(comm, placed, app, shape, sheet)?;
            for (name, samples) in ["cpu", "stream"].into_iter().zip(&all) {
                // A sample is the time of one message.
                let point = Point::rate(at, samples, 1e6);
                sheet.add_point(&format!("message rate by {x}"), name, x, Unit::PerSecond, point);
            }
        }
        for x in ["bytes", "outstanding"] {
            sheet.compare_with_first(&format!("message rate by {x}"));
        }
        Ok(())
    }

    fn rate(
        &self,
        comm: &Communicator,
        placed: &Placed,
        app: &AppStream,
        shape: Shape,
        sheet: &mut Sheet,
    ) -> Result<Vec<Samples>> {
        let queue_pairs = || QueuePairs::new(comm, comm.context(), &self.checks, shape, Some(placed));
        // Separate queue pairs for the stream: it takes completions that the CPU would poll.
        let mut both = [(queue_pairs()?, None), (queue_pairs()?, Some(&app.stream))];
        in_slices(&mut both, (RATE_SLICES, self.messages.into()), sheet, |(queue_pairs, stream), count| {
            let (time, wrong) = queue_pairs.flood(usize::try_from(count)?, *stream)?;
            Ok((Samples::of([time]), wrong))
        })
    }
}

/// The baseline: copies of host memory by the CPU.
struct Memcpy {
    from: Vec<u8>,
    to: Vec<u8>,
}

impl Memcpy {
    fn run(&mut self, bytes: usize, count: u64) -> Result<(Samples, u64)> {
        // Small copies are timed together: the clock takes longer than one.
        let many = u32::try_from((4096 / bytes).max(1))?;
        let (mut samples, mut wrong) = (Samples::default(), 0);
        for n in 0..count {
            self.from[0] = n.to_le_bytes()[0];
            let start = Instant::now();
            for _ in 0..many {
                self.to[..bytes].copy_from_slice(black_box(&self.from[..bytes]));
                self.from[..bytes].copy_from_slice(black_box(&self.to[..bytes]));
            }
            samples.add((start.elapsed() / many).max(Duration::from_nanos(1)));
            wrong += u64::from(self.to[..bytes] != self.from[..bytes] || self.to[0] != n.to_le_bytes()[0]);
        }
        Ok((samples, wrong))
    }
}

/// Where the payload of a rank is, and how it gets to the wire.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// In host memory that is sent.
    Host,
    /// On a GPU; CUDA copies it to and from pinned memory that is sent.
    Copied,
    /// On a GPU, sent from there.
    Direct,
}

struct Side<'a> {
    end: Endpoint<'a>,
    /// The GPU and its payload, unless that is sent from where it is.
    copied: Option<(Gpu, Memory)>,
}

impl<'a> Side<'a> {
    /// For messages of at most `max` bytes.
    fn new(kind: Kind, comm: &'a Communicator, checks: &'a Checks, max: usize) -> Result<Self> {
        let (slots, peer) = (Slots::new(max), 1 - comm.rank());
        let mut copied = None;
        let wire = match kind {
            Kind::Direct => own_gpu(&[])?.alloc(slots.len())?,
            Kind::Host | Kind::Copied => Memory::alloc(slots.len())?,
        };
        if let Kind::Copied = kind {
            let gpu = own_gpu(&[])?;
            // Registers it with CUDA.
            wire.gpu_addr(&gpu)?;
            copied = Some((gpu.clone(), gpu.alloc(slots.len())?));
        }
        let payload = copied.as_ref().map_or(&wire, |(_, payload)| payload);
        let end = Endpoint::over(comm, checks, slots, (peer, peer), (&wire, payload))?;
        Ok(Self { end, copied })
    }

    /// Copies the payload to the memory that is sent, and sends it.
    fn send(&self) -> Result<Request> {
        if let Some((gpu, payload)) = &self.copied {
            copy(gpu, self.end.buffer.memory(), payload, self.end.slots.sent())?;
        }
        Ok(self.end.send()?)
    }

    /// Waits for message `n`, and copies it to the payload.
    fn wait(&self, receive: &Request, n: u64) -> Result<()> {
        self.end.comm.wait(receive, None)?;
        match &self.copied {
            Some((gpu, payload)) => copy(gpu, payload, self.end.buffer.memory(), self.end.slots.received(n)),
            None => Ok(()),
        }
    }

    /// Ping-pong from payload to payload: round trips at rank 0, and the number of wrong slots.
    fn run(&mut self, bytes: usize, count: u64) -> Result<(Samples, u64)> {
        self.end.slots = self.end.slots.of(bytes);
        let (end, pings) = (&self.end, self.end.comm.rank() == 0);
        end.prepare(2)?;
        let mut samples = Samples::default();
        let mut receive = end.receive(0)?;
        end.comm.barrier(None)?;
        for n in 0..count {
            let start = Instant::now();
            let sent = pings.then(|| self.send()).transpose()?;
            self.wait(&receive, n)?;
            if pings {
                samples.add(start.elapsed());
            }
            // Posted before rank 1 answers, and before rank 0 sends again: no message comes before its receive.
            if n + 1 < count {
                receive = end.receive(n + 1)?;
            }
            let sent = sent.map_or_else(|| self.send(), Ok)?;
            end.comm.wait(&sent, None)?;
        }
        Ok((samples, end.wrong(count)?))
    }
}

/// Copies this range by CUDA, complete on return.
fn copy(gpu: &Gpu, to: &Memory, from: &Memory, range: Range<usize>) -> Result<()> {
    let [to, from] = [to, from].map(|memory| memory.slice(range.start, range.len()));
    let _current = gpu.enter()?;
    // SAFETY: both have this length and live for the call.
    unsafe { sys::cuMemcpy(to?.addr(), from?.addr(), range.len()) }.result()?;
    // The call may return before pinned or short data is on the GPU, or before data is on another GPU.
    Ok(result::ctx::synchronize()?)
}

/// Memory of two GPUs of this process, of the first one for what leaves and for what comes back.
struct Peers {
    gpu: Gpu,
    near: Memory,
    far: Memory,
    back: Memory,
}

impl Peers {
    fn new(max: usize) -> Result<Self> {
        match Gpu::count()? {
            0 => return Err("CUDA shows no GPU to this process".into()),
            1 => return Err("it needs two GPUs, and CUDA shows one".into()),
            _ => {}
        }
        let (gpu, other) = (Gpu::open(0)?, Gpu::open(1)?);
        let explain = |error| format!("{error}: see nvidia-smi topo -p2p r");
        gpu.reach(&other).and_then(|()| other.reach(&gpu)).map_err(explain)?;
        Ok(Self { near: gpu.alloc(max)?, back: gpu.alloc(max)?, far: other.alloc(max)?, gpu })
    }

    /// Copies to the other GPU and back: the times, and 1 if wrong data came back.
    fn run(&self, bytes: usize, count: u64, run: u64) -> Result<(Samples, u64)> {
        let (pattern, Self { gpu, near, far, back }) = (expected(0, run), self);
        pattern.fill(near, 0, bytes)?;
        pattern.spoil(far, 0, bytes)?;
        pattern.spoil(back, 0, bytes)?;
        [near, far, back].into_iter().try_for_each(Memory::flush)?;
        let mut samples = Samples::default();
        for _ in 0..count {
            let start = Instant::now();
            copy(gpu, far, near, 0..bytes)?;
            copy(gpu, back, far, 0..bytes)?;
            samples.add(start.elapsed());
        }
        Ok((samples, u64::from(!pattern.check(back, 0, bytes)?)))
    }
}
