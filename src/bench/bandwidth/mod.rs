//! `gdasync bench bandwidth`: the picture of GPUDirect, from host memory over copies to GPU memory that is sent directly.

mod cuda;
mod end;

use std::hint::black_box;
use std::time::{Duration, Instant};

use clap::Args;
use gdasync::lane::own_gpu;
use gdasync::measure::series::{Point, Series, Unit};
use gdasync::measure::{Samples, size};
use gdasync::mp::Communicator;
use serde_json::json;

use super::sheet::{Checks, Output, Sheet, objection};
use super::{Result, two_ranks};
use cuda::Peers;
use end::{End, Kind};

/// Options of `gdasync bench bandwidth`.
#[derive(Args)]
#[command(after_long_help = "\
What the numbers mean: bytes of a message over half of a round trip, which begins and ends where the payload is: copies between \
it and what is sent are part of it. `host to host` sends host memory. `host to GPU` has the payload of one rank on its GPU: CUDA \
copies it, from and to memory that is pageable or pinned. `GPU to GPU` has both there: with copies to memory that CUDA has \
pinned and by the CPU from there to memory that is sent; with copies to one buffer that both CUDA and the network have pinned \
(GPUDirect version 1); without copies, the memory of the GPU itself is sent (GPUDirect RDMA). `peer to peer` has no messages: CUDA \
copies from one GPU of a process to another (GPUDirect P2P). Local rank r uses GPU r modulo their number. The ratios are to memcpy by \
one CPU, in the same slices. p99 and min are of round trips: what 99 of 100 exceed, and the slowest.")]
pub(crate) struct Options {
    /// Message sizes in bytes, 1 to 1073741824 each.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1 << 30),
          default_values_t = [64, 512, 4096, 16384, 65536, 262_144, 1 << 20, 4 << 20, 16 << 20])]
    sizes: Vec<u32>,
    /// Round trips of each size and row [default: 1000, fewer for large messages].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    iters: Option<u32>,
    #[command(flatten)]
    checks: Checks,
    #[command(flatten)]
    output: Output,
}

const MEMCPY: &str = "memcpy";
const PEERS: &str = "peer to peer";
/// The rows of messages, with the ends of rank 0 and rank 1.
const ROWS: [(&str, [Kind; 2]); 6] = [
    ("host to host", [Kind::Host, Kind::Host]),
    ("host to GPU, pageable", [Kind::Host, Kind::Copied { pinned: false }]),
    ("host to GPU, pinned", [Kind::Host, Kind::Copied { pinned: true }]),
    ("GPU to GPU, copies", [Kind::CopiedTwice, Kind::CopiedTwice]),
    ("GPU to GPU, shared pinned buffers", [Kind::Copied { pinned: true }, Kind::Copied { pinned: true }]),
    ("GPU to GPU, direct", [Kind::Direct, Kind::Direct]),
];

/// Every row of a size runs in so many slices, by turns with the others, as in `bench hca`.
const SLICES: u64 = 5;

/// Something that moves messages there and back: round trips, and wrong slots.
type Play<'a> = Box<dyn FnMut(usize, u64) -> Result<(Samples, u64)> + 'a>;

impl Options {
    /// Round trips of a slice.
    fn slice(&self, bytes: usize) -> u64 {
        let all = self.iters.map_or(((256 << 20) / bytes as u64).clamp(20, 1000), u64::from);
        all.div_ceil(SLICES)
    }

    pub(crate) fn run(&self) -> Result<()> {
        let timeout = self.checks.timeout();
        let comm = two_ranks(timeout)?;
        let mut sheet = Sheet::new(&self.output, comm.rank() == 0, self.sizes.len())?;
        let mut rows = self.rows(&comm, &mut sheet)?;
        for (i, &bytes) in self.sizes.iter().enumerate() {
            let bytes = usize::try_from(bytes)?;
            if i > 0 && !sheet.goes_on(&comm, timeout)? {
                sheet.out_of_time(format!("{bytes} bytes"));
                continue;
            }
            sheet.step(format!("{} B", size(bytes)));
            let mut all = vec![Samples::default(); rows.len()];
            // The first turn warms up.
            for turn in 0..=SLICES {
                let count = if turn == 0 { self.slice(bytes).div_ceil(10) } else { self.slice(bytes) };
                for ((_, play), samples) in rows.iter_mut().zip(&mut all) {
                    let (times, wrong) = play(bytes, count)?;
                    sheet.wrong(wrong);
                    if turn > 0 {
                        samples.append(&times);
                    }
                }
            }
            for ((curve, _), samples) in rows.iter_mut().zip(&all).filter(|(_, samples)| samples.count() > 0)
            {
                // There and back are two messages; bytes in a microsecond are 1000 to a gigabyte in a second.
                #[expect(clippy::cast_precision_loss, reason = "sizes are below 2^53")]
                curve.points.push(Point::rate(bytes as u64, samples, 2.0 * bytes as f64 / 1e3));
            }
        }
        let mut curves: Vec<_> = rows.into_iter().map(|(curve, _)| curve).collect();
        if let Some((memcpy, others)) = curves.split_first_mut() {
            others.iter_mut().for_each(|curve| curve.compare(memcpy));
        }
        sheet.add(curves);
        let own = own_gpu(&[]).map(|gpu| format!("GPU {}, {}", gpu.ordinal(), gpu.capabilities()));
        let gpus = comm.exchange(own.unwrap_or_default().as_bytes(), timeout)?;
        let gpus: Vec<_> =
            gpus.iter().map(|gpu| String::from_utf8_lossy(gpu)).filter(|gpu| !gpu.is_empty()).collect();
        let options = json!({ "sizes": self.sizes, "iters": self.iters, "gpus": gpus });
        sheet.finish(comm, "bandwidth", options, timeout)
    }

    /// The rows that can be had, memcpy first; the others are noted.
    fn rows<'a>(&'a self, comm: &'a Communicator, sheet: &mut Sheet) -> Result<Vec<(Series, Play<'a>)>> {
        let (checks, timeout, rank) = (&self.checks, self.checks.timeout(), comm.rank());
        let max = usize::try_from(self.sizes.iter().copied().max().unwrap_or(1))?;
        let curve = |name| Series::new(name, "bytes", Unit::GigabytesPerSecond);
        let mut copy = Memcpy { from: vec![0x5a; max], to: vec![0; max] };
        let nothing = || Ok((Samples::default(), 0));
        let memcpy: Play<'a> =
            Box::new(move |bytes, count| if rank == 0 { copy.play(bytes, count) } else { nothing() });
        let mut rows = vec![(curve(MEMCPY), memcpy)];
        for (name, kinds) in ROWS {
            let end = End::new(kinds[rank], comm, checks, max);
            match objection(comm, end.as_ref().err().map(ToString::to_string), timeout)? {
                Some(reason) => sheet.skip(name, reason),
                None => {
                    let mut end = end?;
                    rows.push((curve(name), Box::new(move |bytes, count| end.play(bytes, count))));
                }
            }
        }
        // Both GPUs belong to rank 0.
        let peers = (rank == 0).then(|| Peers::new(max)).transpose();
        match objection(comm, peers.as_ref().err().map(ToString::to_string), timeout)? {
            Some(reason) => sheet.skip(PEERS, reason),
            None => {
                let (peers, mut game) = (peers?, 0);
                let play: Play<'a> = Box::new(move |bytes, count| {
                    game += 1;
                    peers.as_ref().map_or_else(nothing, |peers| peers.play(bytes, count, game))
                });
                rows.push((curve(PEERS), play));
            }
        }
        Ok(rows)
    }
}

/// The baseline: the CPU copies host memory.
struct Memcpy {
    from: Vec<u8>,
    to: Vec<u8>,
}

impl Memcpy {
    /// Copies there and back.
    fn play(&mut self, bytes: usize, count: u64) -> Result<(Samples, u64)> {
        // Many small copies at once, of which the clock would be the larger part.
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
