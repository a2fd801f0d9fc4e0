//! Traffic that several benchmarks share: queue pairs between two ranks, message slots.

use std::cell::Cell;
use std::ops::Range;
use std::time::{Duration, Instant};

use gdasync::app_stream::Placed;
use gdasync::gdsync::memory::Memory;
use gdasync::gdsync::stream::{Batch, Stream};
use gdasync::gdsync::verbs::{Access, Context, Mr, Qp, RecvWr, SendWr};
use gdasync::measure::{Pattern, Samples, connect, poll};
use gdasync::mp::{self, Communicator, Registration, Request};
use gdasync::results::{Checks, Result, Sheet, expected};

/// All rows run in turn, in this many slices: the speed of shared cores changes from second to second.
pub(super) const SLICES: u64 = 5;

/// Runs slices of `slice` iterations of each row, which gives times and counts wrong slots; a tenth of a slice warms up.
pub(super) fn in_slices<R>(
    rows: &mut [R],
    (slices, slice): (u64, u64),
    sheet: &mut Sheet,
    mut run: impl FnMut(&mut R, u64) -> Result<(Samples, u64)>,
) -> Result<Vec<Samples>> {
    let mut samples = vec![Samples::default(); rows.len()];
    for turn in 0..=slices {
        let count = if turn == 0 { slice.div_ceil(10) } else { slice };
        for (row, samples) in rows.iter_mut().zip(&mut samples) {
            let (times, wrong) = run(row, count)?;
            sheet.wrong(wrong);
            if turn > 0 {
                samples.append(&times);
            }
        }
    }
    Ok(samples)
}

/// Sends per queue pair that are queued on a stream before it is synchronized.
const AHEAD: usize = 256;
/// Receive buffers of a queue pair.
const SLOTS: usize = 2;

/// Queue pairs to the other rank, used round-robin below the messaging layer.
pub(super) struct QueuePairs<'a> {
    comm: &'a Communicator,
    checks: &'a Checks,
    qps: Vec<Side>,
    mr: Mr,
    shape: Shape,
    /// Runs so far: each has its own payload.
    run: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) qps: usize,
    /// Messages in flight on each.
    pub(super) outstanding: usize,
    pub(super) bytes: usize,
}

struct Side {
    qp: Qp,
    received: usize,
    posted: usize,
}

impl<'a> QueuePairs<'a> {
    /// Connects the queue pairs; both ranks call this. Without `placed`, queues and payload are in host memory.
    pub(super) fn new(
        comm: &'a Communicator,
        context: &Context,
        checks: &'a Checks,
        shape: Shape,
        placed: Option<&Placed>,
    ) -> Result<Self> {
        let pd = context.alloc_pd()?;
        let slots = shape.qps * SLOTS + 1;
        let len = slots * shape.bytes.next_multiple_of(64);
        let memory = placed.map_or_else(|| Ok(Memory::alloc(len)?), |placed| placed.memory(len))?;
        let mr = pd.register(&memory, Access::all())?;
        let sends = shape.outstanding + if shape.qps <= 64 { AHEAD } else { 0 };
        // As in the messaging layer: a slow rank is not an error.
        let builder =
            pd.build_qp().max_send_wr(sends).max_recv_wr(2 * shape.outstanding + 1).rnr_retry(7).timeout(17);
        let builder = placed.into_iter().fold(builder, |builder, placed| placed.queues(builder));
        let qps =
            (0..shape.qps).map(|_| builder.clone().build()).collect::<std::result::Result<Vec<_>, _>>()?;
        connect(comm, qps.iter())?;
        let qps = qps.into_iter().map(|qp| Side { qp, received: 0, posted: 0 }).collect();
        let mut queue_pairs = Self { comm, checks, qps, mr, shape, run: 0 };
        for at in 0..shape.qps {
            for _ in 0..2 * shape.outstanding {
                queue_pairs.receive(at)?;
            }
        }
        comm.barrier(None)?;
        Ok(queue_pairs)
    }

    pub(super) fn len(&self) -> usize {
        self.qps.len()
    }

    fn is_sender(&self) -> bool {
        self.comm.rank() == 0
    }

    /// Slot 0 is sent, the others belong to the queue pairs.
    fn slot(&self, slot: usize) -> Range<usize> {
        let start = slot * self.shape.bytes.next_multiple_of(64);
        start..start + self.shape.bytes
    }

    fn receive(&mut self, at: usize) -> Result<()> {
        let slot = 1 + at * SLOTS + self.qps[at].posted % SLOTS;
        let sge = self.mr.sge(self.slot(slot).start, self.shape.bytes)?;
        self.qps[at].qp.post_recv(&[RecvWr::new(&[sge])])?;
        self.qps[at].posted += 1;
        Ok(())
    }

    fn send(&self, at: usize) -> Result<()> {
        let sge = self.mr.sge(0, self.shape.bytes)?;
        self.qps[at].qp.post_send(&[SendWr::send(&[sge])])?;
        Ok(())
    }

    /// Waits for a message and posts the next receive.
    pub(super) fn received(&mut self, at: usize) -> Result<()> {
        let wc = self.until(&self.qps[at].qp, || self.qps[at].qp.poll_recv())?;
        let len = wc.ok()?.byte_len;
        if usize::try_from(len)? != self.shape.bytes {
            return Err(format!("a message of {} bytes came with {len}", self.shape.bytes).into());
        }
        self.qps[at].received += 1;
        self.receive(at)
    }

    pub(super) fn sent(&self, at: usize) -> Result<()> {
        self.until(&self.qps[at].qp, || self.qps[at].qp.poll_send())?.ok()?;
        Ok(())
    }

    fn until<T>(&self, qp: &Qp, ask: impl Fn() -> Option<T>) -> Result<T> {
        let mut polls = 0_u32;
        let found = poll(self.comm.timeout(), || {
            polls = polls.wrapping_add(1);
            if polls.is_multiple_of(1 << 8) {
                qp.check()?;
                // The other rank may need this core.
                std::thread::yield_now();
            }
            Result::Ok(ask())
        })?;
        Ok(found.ok_or("no message arrived in time: the other rank has ended, or --timeout is too short")?)
    }

    /// Writes the payload of the next run, and overwrites the receive buffers.
    fn prepare(&mut self) -> Result<()> {
        self.run += 1;
        let (rank, memory) = (self.comm.rank(), self.mr.memory());
        self.checks.sent(rank, self.run).fill(memory, 0, self.shape.bytes)?;
        for slot in 1..=self.qps.len() * SLOTS {
            expected(1 - rank, self.run).spoil(memory, self.slot(slot).start, self.shape.bytes)?;
        }
        memory.flush()?;
        self.qps.iter_mut().for_each(|end| end.received = 0);
        Ok(self.comm.barrier(None)?)
    }

    /// The number of receive buffers with wrong data after a run.
    pub(super) fn wrong(&self) -> Result<u64> {
        let (pattern, mut wrong) = (expected(1 - self.comm.rank(), self.run), 0);
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

    /// Ping-pong over the queue pairs round-robin, by the CPU: round trips at rank 0, and the number of wrong buffers.
    pub(super) fn ping(&mut self, rounds: usize) -> Result<(Samples, u64)> {
        self.prepare()?;
        let mut samples = Samples::default();
        for n in 0..rounds {
            let at = n % self.qps.len();
            let start = Instant::now();
            if self.is_sender() {
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

    /// Sends (rank 0) or receives (rank 1) messages: the time of one at rank 0, and the number of wrong buffers.
    pub(super) fn flood(&mut self, count: usize, stream: Option<&Stream>) -> Result<(Duration, u64)> {
        self.prepare()?;
        let start = Instant::now();
        if !self.is_sender() {
            for n in 0..count {
                self.received(n % self.qps.len())?;
            }
            // Acknowledges the last message.
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

    /// Each batch sends what may be outstanding on all queue pairs and waits for the completions.
    fn flood_by_stream(&self, count: usize, stream: &Stream) -> Result<()> {
        let Shape { qps, outstanding, bytes } = self.shape;
        let (each, timeout) = (qps * outstanding, self.comm.timeout());
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
            stream.with_timeout(timeout).submit(&mut batch)?;
            if (turn + 1) % dry == 0 {
                stream.synchronize(timeout)?;
            }
        }
        Ok(stream.synchronize(timeout)?)
    }
}

/// A buffer of three slots: one to send from, two to receive into in turn. Slots start on cache lines.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slots {
    bytes: usize,
    stride: usize,
}

impl Slots {
    /// For messages of `bytes` bytes.
    pub(super) fn new(bytes: usize) -> Self {
        Self { bytes, stride: bytes.next_multiple_of(64) }
    }

    /// The same slots for smaller messages.
    pub(super) fn of(self, bytes: usize) -> Self {
        Self { bytes, ..self }
    }

    pub(super) fn len(self) -> usize {
        3 * self.stride
    }

    fn slot(self, slot: usize) -> Range<usize> {
        let start = slot * self.stride;
        start..start + self.bytes
    }

    pub(super) fn sent(self) -> Range<usize> {
        self.slot(0)
    }

    pub(super) fn received(self, n: u64) -> Range<usize> {
        self.slot(1 + usize::from(n % 2 == 1))
    }

    pub(super) fn fill(self, memory: &Memory, ours: Pattern) -> Result<()> {
        Ok(ours.fill(memory, self.sent().start, self.bytes)?)
    }

    /// Overwrites the slots that will receive `messages` messages.
    pub(super) fn spoil(self, memory: &Memory, theirs: Pattern, messages: u64) -> Result<()> {
        for n in 0..messages.min(2) {
            theirs.spoil(memory, self.received(n).start, self.bytes)?;
        }
        Ok(())
    }

    /// The number of slots with wrong data after `messages` messages.
    pub(super) fn wrong(self, memory: &Memory, theirs: Pattern, messages: u64) -> Result<u64> {
        let mut wrong = 0;
        for n in 0..messages.min(2) {
            wrong += u64::from(!theirs.check(memory, self.received(n).start, self.bytes)?);
        }
        Ok(wrong)
    }
}

/// A registered buffer of a rank, for messages to one rank and from one rank. Each run has its own payload.
pub(super) struct Endpoint<'a> {
    pub(super) comm: &'a Communicator,
    pub(super) checks: &'a Checks,
    pub(super) buffer: Registration,
    /// Memory of the payload: that of the buffer, or what is copied to it and from it.
    payload: Memory,
    pub(super) slots: Slots,
    pub(super) to: usize,
    pub(super) from: usize,
    run: Cell<u64>,
}

impl<'a> Endpoint<'a> {
    pub(super) fn new(
        comm: &'a Communicator,
        checks: &'a Checks,
        bytes: usize,
        (to, from): (usize, usize),
    ) -> Result<Self> {
        let slots = Slots::new(bytes);
        let memory = Memory::alloc(slots.len())?;
        Self::over(comm, checks, slots, (to, from), (&memory, &memory))
    }

    /// Sends and receives in one memory, what a program writes and reads in the other.
    pub(super) fn over(
        comm: &'a Communicator,
        checks: &'a Checks,
        slots: Slots,
        (to, from): (usize, usize),
        (wire, payload): (&Memory, &Memory),
    ) -> Result<Self> {
        let (buffer, payload) = (comm.register(wire)?, payload.clone());
        Ok(Self { comm, checks, buffer, payload, slots, to, from, run: Cell::new(0) })
    }

    /// Writes the payload of the next run, and overwrites all else, of the slots that receive those for `receives` messages.
    pub(super) fn prepare(&self, receives: u64) -> Result<()> {
        self.run.set(self.run.get() + 1);
        let (run, rank) = (self.run.get(), self.comm.rank());
        for memory in [self.buffer.memory(), &self.payload] {
            expected(rank, run).spoil(memory, self.slots.sent().start, self.slots.bytes)?;
            self.slots.spoil(memory, expected(self.from, run), receives)?;
        }
        self.slots.fill(&self.payload, self.checks.sent(rank, run))?;
        Ok(self.payload.flush()?)
    }

    /// The number of slots with wrong data after `messages` messages.
    pub(super) fn wrong(&self, messages: u64) -> Result<u64> {
        self.slots.wrong(&self.payload, expected(self.from, self.run.get()), messages)
    }

    pub(super) fn receive(&self, n: u64) -> mp::Result<Request> {
        self.comm.irecv(&self.buffer, self.slots.received(n), self.from)
    }

    pub(super) fn send(&self) -> mp::Result<Request> {
        self.comm.isend(&self.buffer, self.slots.sent(), self.to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_messages_are_counted() {
        let (slots, theirs) = (Slots::new(1000).of(100), Pattern::new(1, 7));
        let memory = Memory::alloc(slots.len()).unwrap();
        slots.fill(&memory, Pattern::new(0, 7)).unwrap();
        slots.spoil(&memory, theirs, 5).unwrap();
        assert_eq!(
            (0..4).map(|n| slots.wrong(&memory, theirs, n).unwrap()).collect::<Vec<_>>(),
            [0, 1, 2, 2]
        );
        theirs.fill(&memory, slots.received(1).start, 100).unwrap();
        assert_eq!(slots.wrong(&memory, theirs, 5).unwrap(), 1);
        theirs.fill(&memory, slots.received(4).start, 100).unwrap();
        assert_eq!(slots.wrong(&memory, theirs, 5).unwrap(), 0);
        let ranges = [slots.sent(), slots.received(0), slots.received(1)];
        assert!(ranges.windows(2).all(|two| two[0].end <= two[1].start), "{ranges:?}");
        assert!(ranges[2].end <= slots.len());
    }
}
