//! Payload in GPU memory that the proxy stages in host memory, beside the same in host memory.

use gdasync::out;
use std::io;
use std::time::{Duration, Instant};

use comfy_table::{CellAlignment, Table, presets};
use gdasync::gdsync::cuda::Gpu;
use gdasync::gdsync::memory::Memory;
use gdasync::gdsync::verbs::{Access, Context, Mr, Qp, RecvWr, SendWr, Staging, Transport};
use gdasync::measure::{Micros, Samples, size};
use serde::Serialize;

use super::super::Result;

/// Messages under way in the tests of bandwidth.
const WINDOW: u64 = 8;
/// Bytes of all messages of a test, but of [`FEWEST`] messages at least.
const BYTES: u64 = 1 << 30;
const FEWEST: u64 = 20;

#[derive(Serialize)]
pub(super) struct Row {
    bytes: usize,
    from: &'static str,
    to: &'static str,
    /// From the post to both completions.
    us: Micros,
    /// The p50 over that of host memory.
    ratio: f64,
    /// With several messages under way.
    gigabytes_per_s: f64,
}

/// A queue pair connected to itself, and a region for each end of a message.
struct Loop<'a> {
    qp: Qp,
    from: &'a Mr,
    to: &'a Mr,
    timeout: Duration,
}

impl Loop<'_> {
    fn post(&self, bytes: usize) -> Result<()> {
        self.qp.post_recv(&[RecvWr { wr_id: 0, sges: &[self.to.sge(0, bytes)?] }])?;
        self.qp.post_send(&[SendWr::send(&[self.from.sge(0, bytes)?])])?;
        Ok(())
    }

    /// Takes the completions of the next message.
    fn take(&self) -> Result<()> {
        let (mut sent, mut received) = (false, false);
        let end = Instant::now() + self.timeout;
        while !(sent && received) {
            if !sent && let Some(wc) = self.qp.poll_send() {
                wc.ok()?;
                sent = true;
            }
            if !received && let Some(wc) = self.qp.poll_recv() {
                wc.ok()?;
                received = true;
            }
            if Instant::now() > end {
                return Err("no completion came".into());
            }
        }
        Ok(())
    }

    fn one(&self, bytes: usize, count: u64) -> Result<Samples> {
        let mut samples = Samples::default();
        for _ in 0..count {
            let start = Instant::now();
            self.post(bytes)?;
            self.take()?;
            samples.add(start.elapsed());
        }
        Ok(samples)
    }

    fn many(&self, bytes: usize, count: u64) -> Result<Duration> {
        let start = Instant::now();
        for n in 0..count {
            if n >= WINDOW {
                self.take()?;
            }
            self.post(bytes)?;
        }
        (0..count.min(WINDOW)).try_for_each(|_| self.take())?;
        Ok(start.elapsed())
    }

    /// Whether first and last bytes of a message get there.
    fn carries(&self, bytes: usize) -> Result<bool> {
        let part = bytes.min(8);
        for at in [0, bytes - part] {
            self.from.memory().write(at, &[0xa5; 8][..part])?;
            self.to.memory().write(at, &[0; 8][..part])?;
        }
        self.post(bytes)?;
        self.take()?;
        let mut there = [0; 8];
        for at in [0, bytes - part] {
            self.to.memory().read(at, &mut there[..part])?;
            if there[..part] != [0xa5; 8][..part] {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Measures messages of these sizes between every pair of host memory and staged memory of this GPU.
pub(super) fn measure(
    context: &Context,
    gpu: &Gpu,
    sizes: &[usize],
    rounds: u64,
    timeout: Duration,
) -> Result<Vec<Row>> {
    let most = sizes.iter().copied().max().ok_or("no sizes")?;
    context.stage(Staging::Always);
    let pd = context.alloc_pd()?;
    let region = |memory: Memory| pd.register(&memory, Access::LOCAL_WRITE);
    let host = [region(Memory::alloc(most)?)?, region(Memory::alloc(most)?)?];
    let staged = [region(gpu.alloc(most)?)?, region(gpu.alloc(most)?)?];
    let ends = [
        ("host", &host[0], "host", &host[1]),
        ("GPU", &staged[0], "host", &host[1]),
        ("host", &host[0], "GPU", &staged[1]),
        ("GPU", &staged[0], "GPU", &staged[1]),
    ];
    let mut rows = Vec::new();
    for &bytes in sizes {
        let count = rounds.min((BYTES / bytes as u64).max(FEWEST));
        let mut base = None;
        for (from_name, from, to_name, to) in ends {
            let qp = pd.build_qp().build()?;
            qp.connect(qp.address())?;
            if (from_name == "GPU") != (qp.transfer_path(from, bytes)?.transport() == Transport::Staging) {
                return Err(format!("payload of the {from_name} is not staged as asked").into());
            }
            let it = Loop { qp, from, to, timeout };
            if !it.carries(bytes)? {
                return Err(format!("{bytes} bytes from {from_name} to {to_name}: wrong data arrived").into());
            }
            let us = it.one(bytes, count)?.micros(1);
            let took = it.many(bytes, count)?;
            #[allow(clippy::cast_precision_loss, reason = "a few digits are shown")]
            let gigabytes_per_s = (bytes as u64 * count) as f64 / took.as_secs_f64() / 1e9;
            let ratio = us.p50 / *base.get_or_insert(us.p50);
            rows.push(Row { bytes, from: from_name, to: to_name, us, ratio, gigabytes_per_s });
        }
    }
    Ok(rows)
}

pub(super) fn print(rows: &[Row]) -> io::Result<()> {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["message to itself, GPU memory staged", "p50 us", "p99 us", "min us", "ratio", "GB/s"]);
    for Row { bytes, from, to, us: Micros { min, p50, p99 }, ratio, gigabytes_per_s } in rows {
        let name = format!("{}, {from} to {to}", size(*bytes));
        let numbers = [p50, p99, min].map(|us| format!("{us:.2}"));
        let last = [format!("{ratio:.2}"), format!("{gigabytes_per_s:.3}")];
        table.add_row(std::iter::once(name).chain(numbers).chain(last));
    }
    table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    out!("{table}")
}
