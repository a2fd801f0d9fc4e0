//! One end of a connection that benchmarks play on, below the messaging layer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gdasync::gdsync::memory::Memory;
use gdasync::gdsync::stream::{Batch, Stream};
use gdasync::gdsync::verbs::{Access, Context, Mr, Qp, RecvWr, SendWr};
use gdasync::measure::Samples;

use super::Result;

/// Receives kept posted, and sends kept under way in the rate test.
const WINDOW: u64 = 64;
/// Iterations posted ahead on a stream.
const AHEAD: u64 = 100;

/// A queue pair and a small buffer.
pub(super) struct Link {
    pub(super) qp: Qp,
    mr: Mr,
    timeout: Duration,
}

impl Link {
    pub(super) fn new(context: &Context, timeout: Duration) -> Result<Self> {
        let pd = context.alloc_pd()?;
        let mr = pd.register(&Memory::alloc(64)?, Access::all())?;
        let qp = pd.build_qp().max_send_wr(256).max_recv_wr(512).rnr_retry(7).timeout(17).build()?;
        Ok(Self { qp, mr, timeout })
    }

    fn receive(&self) -> Result<()> {
        self.qp.post_recv(&[RecvWr { wr_id: 0, sges: &[self.mr.sge(0, 8)?] }])?;
        Ok(())
    }

    /// Polls until a receive is complete.
    fn received(&self) -> Result<()> {
        let deadline = Instant::now() + self.timeout;
        let mut polls = 0u32;
        loop {
            if let Some(wc) = self.qp.poll_recv() {
                wc.ok()?;
                return Ok(());
            }
            polls = polls.wrapping_add(1);
            if polls.is_multiple_of(1 << 16) && Instant::now() > deadline {
                self.qp.check()?;
                return Err("no message came: the other side is gone".into());
            }
        }
    }

    fn send(&self, n: u64) -> Result<()> {
        self.qp.post_send(&[SendWr::send_inline(&n.to_le_bytes())])?;
        Ok(())
    }

    fn recycle(&self) -> Result<()> {
        while let Some(wc) = self.qp.poll_send() {
            wc.ok()?;
        }
        self.receive()
    }

    /// Posts the receives that a game starts with; both sides do this before either begins.
    pub(super) fn prepare(&self, receives: u64) -> Result<()> {
        (0..receives).try_for_each(|_| self.receive())
    }

    /// Ping-pong of 8 bytes, posted and polled by this thread. Call [`Link::prepare`] with 64 before.
    pub(super) fn cpu(&self, serves: bool, rounds: u64) -> Result<Samples> {
        let mut samples = Samples::default();
        for n in 0..rounds {
            let start = Instant::now();
            if serves {
                self.send(n)?;
                self.received()?;
                samples.add(start.elapsed());
            } else {
                self.received()?;
                self.send(n)?;
            }
            self.recycle()?;
        }
        Ok(samples)
    }

    /// Ping-pong of 8 bytes, posted ahead on a stream. Call [`Link::prepare`] with [`Link::stream_receives`] before.
    pub(super) fn stream(&self, stream: &Stream, serves: bool, rounds: u64) -> Result<Samples> {
        let times: Arc<[AtomicU64]> = (0..rounds).map(|_| AtomicU64::new(0)).collect();
        let origin = Instant::now();
        let now = move || u64::try_from(origin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let last = Arc::new(AtomicU64::new(0));
        for first in (0..rounds).step_by(usize::try_from(AHEAD)?) {
            let begin = last.clone();
            stream.host_fn(move || begin.store(now(), Ordering::Relaxed))?;
            for n in first..(first + AHEAD).min(rounds) {
                let mut batch = Batch::new();
                let send = |batch: &mut Batch| batch.send(&self.qp, &SendWr::send_inline(&n.to_le_bytes()));
                if serves {
                    send(&mut batch)?;
                    batch.wait_recv(&self.qp)?;
                } else {
                    batch.wait_recv(&self.qp)?;
                    send(&mut batch)?;
                }
                let (times, last, at) = (times.clone(), last.clone(), usize::try_from(n)?);
                batch.host_fn(move || {
                    let time = now();
                    times[at].store(time - last.swap(time, Ordering::Relaxed), Ordering::Relaxed);
                });
                stream.submit(&mut batch)?;
            }
            let mut batch = Batch::new();
            batch.wait_all_sends(&self.qp)?;
            stream.submit(&mut batch)?;
            stream.synchronize(self.timeout)?;
            let again = (first + 2 * AHEAD..(first + 3 * AHEAD).min(rounds)).count() as u64;
            self.prepare(again)?;
        }
        let mut samples = Samples::default();
        times.iter().for_each(|t| samples.add(Duration::from_nanos(t.load(Ordering::Relaxed))));
        Ok(samples)
    }

    /// Receives a [`Link::stream`] game starts with.
    pub(super) fn stream_receives(rounds: u64) -> u64 {
        rounds.min(2 * AHEAD)
    }

    /// Takes send completions until at most `left` of the `under_way` are left.
    fn drain(&self, under_way: &mut u64, left: u64) -> Result<()> {
        loop {
            match self.qp.poll_send() {
                Some(wc) => {
                    wc.ok()?;
                    *under_way -= 1;
                }
                None if *under_way <= left => return Ok(()),
                None => self.qp.check()?,
            }
        }
    }

    /// Sends (or receives) `count` messages of 8 bytes as fast as the window lets it; returns the time of one.
    pub(super) fn rate(&self, sends: bool, count: u64) -> Result<Duration> {
        let start = Instant::now();
        let mut under_way = 0;
        for n in 0..count {
            if sends {
                self.send(n)?;
                under_way += 1;
                self.drain(&mut under_way, WINDOW - 1)?;
            } else {
                self.received()?;
                self.receive()?;
            }
        }
        // The receiver tells when it has them all.
        if sends {
            self.received()?;
            self.receive()?;
        } else {
            self.send(0)?;
            under_way = 1;
        }
        let time = start.elapsed() / u32::try_from(count)?;
        self.drain(&mut under_way, 0)?;
        Ok(time)
    }
}
