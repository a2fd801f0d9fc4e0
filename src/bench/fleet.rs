//! Queue pairs between two ranks, all in use by turns, below the messaging layer.

use std::ops::Range;
use std::time::{Duration, Instant};

use gdasync::gdsync::memory::Memory;
use gdasync::gdsync::stream::{Batch, Stream};
use gdasync::gdsync::verbs::{Access, Context, Mr, Qp, QpAddress, RecvWr, SendWr};
use gdasync::lane::Placed;
use gdasync::measure::Samples;
use gdasync::mp::Communicator;

use super::Result;
use super::sheet::{Checks, expected};

/// Sends of a queue pair that a stream is given before it runs dry: so many completions are outstanding at most.
const AHEAD: usize = 256;
/// Places where messages of a queue pair arrive.
const SLOTS: usize = 2;

/// So many queue pairs to the other rank.
pub(super) struct Fleet<'a> {
    comm: &'a Communicator,
    checks: &'a Checks,
    qps: Vec<End>,
    mr: Mr,
    shape: Shape,
    /// Games so far: each has bytes of its own.
    game: u64,
}

/// How messages are sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Queue pairs.
    pub(super) qps: usize,
    /// Messages under way of each.
    pub(super) outstanding: usize,
    /// Bytes of a message.
    pub(super) bytes: usize,
}

struct End {
    qp: Qp,
    received: usize,
    posted: usize,
}

impl<'a> Fleet<'a> {
    /// Connects the queue pairs; both ranks call this. Queues and messages are in host memory, or where they are `placed`.
    pub(super) fn new(
        comm: &'a Communicator,
        context: &Context,
        checks: &'a Checks,
        shape: Shape,
        placed: Option<&Placed>,
    ) -> Result<Self> {
        let (timeout, pd) = (checks.timeout(), context.alloc_pd()?);
        let slots = shape.qps * SLOTS + 1;
        let len = slots * shape.bytes.next_multiple_of(64);
        let memory = placed.map_or_else(|| Ok(Memory::alloc(len)?), |placed| placed.memory(len))?;
        let mr = pd.register(&memory, Access::all())?;
        let sends = shape.outstanding + if shape.qps <= 64 { AHEAD } else { 0 };
        // As patient as the messaging layer: a rank that is only slow must not be given up.
        let builder =
            pd.build_qp().max_send_wr(sends).max_recv_wr(2 * shape.outstanding + 1).rnr_retry(7).timeout(17);
        let builder = match placed.and_then(|placed| placed.gpu.as_ref().zip(Some(placed.on_gpu()))) {
            Some((gpu, what)) => builder.on_gpu(gpu, what),
            None => builder,
        };
        let qps =
            (0..shape.qps).map(|_| builder.clone().build()).collect::<std::result::Result<Vec<_>, _>>()?;
        let own: Vec<u8> = qps.iter().flat_map(|qp| qp.address().to_bytes()).collect();
        let all = comm.exchange(&own, timeout)?;
        let (addresses, rest) = all[1 - comm.rank()].as_chunks();
        if addresses.len() != qps.len() || !rest.is_empty() {
            return Err("the other rank has other queue pairs".into());
        }
        for (qp, address) in qps.iter().zip(addresses) {
            qp.connect(QpAddress::from_bytes(address)?)?;
        }
        let qps = qps.into_iter().map(|qp| End { qp, received: 0, posted: 0 }).collect();
        let mut fleet = Self { comm, checks, qps, mr, shape, game: 0 };
        for at in 0..shape.qps {
            for _ in 0..2 * shape.outstanding {
                fleet.receive(at)?;
            }
        }
        comm.barrier(timeout)?;
        Ok(fleet)
    }

    /// The number of queue pairs.
    pub(super) fn len(&self) -> usize {
        self.qps.len()
    }

    fn serves(&self) -> bool {
        self.comm.rank() == 0
    }

    /// Slot 0 is sent, the others belong to the queue pairs.
    fn slot(&self, slot: usize) -> Range<usize> {
        let start = slot * self.shape.bytes.next_multiple_of(64);
        start..start + self.shape.bytes
    }

    /// Posts a receive.
    fn receive(&mut self, at: usize) -> Result<()> {
        let slot = 1 + at * SLOTS + self.qps[at].posted % SLOTS;
        let sge = self.mr.sge(self.slot(slot).start, self.shape.bytes)?;
        self.qps[at].qp.post_recv(&[RecvWr { wr_id: 0, sges: &[sge] }])?;
        self.qps[at].posted += 1;
        Ok(())
    }

    fn send(&self, at: usize) -> Result<()> {
        let sge = self.mr.sge(0, self.shape.bytes)?;
        self.qps[at].qp.post_send(&[SendWr::send(&[sge])])?;
        Ok(())
    }

    /// Waits for a message, and posts the next receive.
    fn received(&mut self, at: usize) -> Result<()> {
        let wc = self.until(&self.qps[at].qp, || self.qps[at].qp.poll_recv())?;
        let len = wc.ok()?.byte_len;
        if usize::try_from(len)? != self.shape.bytes {
            return Err(format!("a message of {} bytes came with {len}", self.shape.bytes).into());
        }
        self.qps[at].received += 1;
        self.receive(at)
    }

    /// Takes the completion of a send.
    fn sent(&self, at: usize) -> Result<()> {
        self.until(&self.qps[at].qp, || self.qps[at].qp.poll_send())?.ok()?;
        Ok(())
    }

    fn until<T>(&self, qp: &Qp, poll: impl Fn() -> Option<T>) -> Result<T> {
        let mut polls = 0u32;
        let mut deadline = None;
        loop {
            if let Some(found) = poll() {
                return Ok(found);
            }
            polls = polls.wrapping_add(1);
            if polls.is_multiple_of(1 << 8) {
                qp.check()?;
                if Instant::now() > *deadline.get_or_insert_with(|| Instant::now() + self.checks.timeout()) {
                    return Err(
                        "a message did not come in time: the other rank is gone, or --timeout is too short"
                            .into(),
                    );
                }
                // The other rank may need this core.
                std::thread::yield_now();
            }
        }
    }

    /// Before a game: a message of its own to send, and none of them where they arrive.
    fn prepare(&mut self) -> Result<()> {
        self.game += 1;
        let (rank, memory) = (self.comm.rank(), self.mr.memory());
        self.checks.sent(rank, self.game).fill(memory, 0, self.shape.bytes)?;
        for slot in 1..=self.qps.len() * SLOTS {
            expected(1 - rank, self.game).spoil(memory, self.slot(slot).start, self.shape.bytes)?;
        }
        memory.flush()?;
        self.qps.iter_mut().for_each(|end| end.received = 0);
        Ok(self.comm.barrier(self.checks.timeout())?)
    }

    /// After a game: how many slots that got messages have wrong data.
    fn wrong(&self) -> Result<u64> {
        let (pattern, mut wrong) = (expected(1 - self.comm.rank(), self.game), 0);
        for (at, end) in self.qps.iter().enumerate() {
            // The receives that are posted next are the last 2 * outstanding; what came before them was received.
            let first = end.posted - 2 * self.shape.outstanding - end.received;
            for n in first..first + end.received.min(SLOTS) {
                let start = self.slot(1 + at * SLOTS + n % SLOTS).start;
                wrong += u64::from(!pattern.check(self.mr.memory(), start, self.shape.bytes)?);
            }
        }
        Ok(wrong)
    }

    /// Ping-pong through all queue pairs by turns, posted and polled by the CPU. The round trips as rank 0 sees them, and the
    /// number of wrong slots.
    pub(super) fn ping(&mut self, rounds: usize) -> Result<(Samples, u64)> {
        self.prepare()?;
        let mut samples = Samples::default();
        for n in 0..rounds {
            let at = n % self.qps.len();
            let start = Instant::now();
            if self.serves() {
                self.send(at)?;
                self.received(at)?;
                samples.add(start.elapsed());
            } else {
                self.received(at)?;
                self.send(at)?;
            }
            self.sent(at)?;
        }
        Ok((samples, self.wrong()?))
    }

    /// Sends (rank 0) or receives (rank 1) so many messages. The time of one, which is right for rank 0, and the number of
    /// wrong slots.
    pub(super) fn flood(&mut self, count: usize, stream: Option<&Stream>) -> Result<(Duration, u64)> {
        self.prepare()?;
        let start = Instant::now();
        if !self.serves() {
            for n in 0..count {
                self.received(n % self.qps.len())?;
            }
            // Tells that it has them all.
            self.send(0)?;
            self.sent(0)?;
        } else {
            match stream {
                Some(stream) => self.flood_by_stream(count, stream)?,
                None => self.flood_by_cpu(count)?,
            }
            self.received(0)?;
        }
        Ok((start.elapsed() / u32::try_from(count)?, self.wrong()?))
    }

    fn flood_by_cpu(&self, count: usize) -> Result<()> {
        let Shape { qps, outstanding, .. } = self.shape;
        for n in 0..count {
            if n >= qps * outstanding {
                self.sent(n % qps)?;
            }
            self.send(n % qps)?;
        }
        for n in count.saturating_sub(qps * outstanding)..count {
            self.sent(n % qps)?;
        }
        Ok(())
    }

    /// A batch sends what may be outstanding on all queue pairs, and waits for it.
    fn flood_by_stream(&self, count: usize, stream: &Stream) -> Result<()> {
        let Shape { qps, outstanding, bytes } = self.shape;
        let (each, timeout) = (qps * outstanding, self.checks.timeout());
        let dry = (AHEAD / outstanding).max(1);
        let mut batch = Batch::new();
        for (turn, first) in (0..count).step_by(each).enumerate() {
            let sends = first..count.min(first + each);
            for n in sends.clone() {
                batch.send(&self.qps[n % qps].qp, &SendWr::send(&[self.mr.sge(0, bytes)?]))?;
            }
            for end in &self.qps[..qps.min(sends.len())] {
                batch.wait_all_sends(&end.qp)?;
            }
            stream.submit_within(&mut batch, timeout)?;
            if (turn + 1) % dry == 0 {
                stream.synchronize(timeout)?;
            }
        }
        Ok(stream.synchronize(timeout)?)
    }
}
