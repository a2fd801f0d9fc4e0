//! Windows of messages between two ranks, timed as a whole and checked afterwards.

use std::cell::Cell;
use std::time::{Duration, Instant};

use gdasync::gdsync::memory::Memory;
use gdasync::gdsync::stream::{Batch, Stream};
use gdasync::measure::{Pattern, Samples};
use gdasync::mp::{self, Communicator, Registration, Request, tagged};

use super::{Mode, Result};
use crate::bench::slots::Slots;

/// Iterations of a window: all receives are posted before it begins.
const WINDOW: u64 = 100;

/// Messages under way when a rate is measured.
const UNDER_WAY: usize = 16;

/// Both ranks' buffers for messages of one size: one to send from, two to receive into by turns.
pub(super) struct Game<'a> {
    comm: &'a Communicator,
    tagged: &'a tagged::Tagged,
    stream: &'a Stream,
    buffer: Registration,
    slots: Slots,
    work: Duration,
    timeout: Duration,
    /// Windows played: each has bytes of its own.
    played: Cell<u64>,
}

impl<'a> Game<'a> {
    pub(super) fn new(
        (comm, tagged): (&'a Communicator, &'a tagged::Tagged),
        stream: &'a Stream,
        bytes: usize,
        work: Duration,
        timeout: Duration,
    ) -> Result<Self> {
        let slots = Slots::new(bytes);
        let buffer = comm.register(&Memory::alloc(slots.len())?)?;
        Ok(Self { comm, tagged, stream, buffer, slots, work, timeout, played: Cell::new(0) })
    }

    fn receive_tagged(&self, n: u64) -> mp::Result<tagged::Request> {
        self.tagged.irecv(&self.buffer, self.slots.received(n), self.peer(), n)
    }

    fn receive(&self, n: u64) -> mp::Result<Request> {
        self.comm.irecv(&self.buffer, self.slots.received(n), self.peer())
    }

    /// Plays `count` iterations; the times of round trips, or of messages for a rate, as means of windows, and how many slots
    /// had wrong data.
    pub(super) fn play(&self, mode: Mode, count: u64) -> Result<(Samples, u64)> {
        let (mut samples, mut wrong, mut left) = (Samples::default(), 0, count);
        while left > 0 {
            let window = left.min(WINDOW);
            let receives = if mode == Mode::Rate && self.serves() { 0 } else { window };
            self.prepare(receives)?;
            // Large windows stay below the depth of the queues, and no message waits for its receive.
            let (plain, tagged) = if mode == Mode::Tagged { (0, receives) } else { (receives, 0) };
            let received: Vec<_> = (0..plain).map(|n| self.receive(n)).collect::<mp::Result<_>>()?;
            let tagged: Vec<_> = (0..tagged).map(|n| self.receive_tagged(n)).collect::<mp::Result<_>>()?;
            self.comm.barrier(self.timeout)?;
            let start = Instant::now();
            match mode {
                Mode::Sync => self.by_cpu(&received, false)?,
                Mode::SyncWork => self.by_cpu(&received, true)?,
                Mode::Async => self.by_stream(&received, false)?,
                Mode::AsyncWork => self.by_stream(&received, true)?,
                Mode::Tagged => self.by_tag(&tagged)?,
                Mode::Rate => self.one_way(&received, window)?,
            }
            samples.add_mean(start.elapsed(), window);
            wrong += self.wrong(receives)?;
            left -= window;
        }
        Ok((samples, wrong))
    }

    fn serves(&self) -> bool {
        self.comm.rank() == 0
    }

    fn peer(&self) -> usize {
        1 - self.comm.rank()
    }

    /// What a rank sends in this window.
    fn pattern(&self, rank: usize) -> Pattern {
        Pattern::new(rank as u64, self.played.get())
    }

    fn prepare(&self, receives: u64) -> Result<()> {
        let memory = self.buffer.memory();
        self.slots.fill(memory, self.pattern(self.comm.rank()))?;
        self.slots.spoil(memory, self.pattern(self.peer()), receives)
    }

    fn wrong(&self, receives: u64) -> Result<u64> {
        let wrong = self.slots.wrong(self.buffer.memory(), self.pattern(self.peer()), receives)?;
        self.played.set(self.played.get() + 1);
        Ok(wrong)
    }

    fn send(&self) -> mp::Result<Request> {
        self.comm.isend(&self.buffer, self.slots.sent(), self.peer())
    }

    /// Work that a stream does: the next send is after it.
    fn work(&self) -> impl FnOnce() + Send + 'static {
        let work = self.work;
        move || {
            let start = Instant::now();
            while start.elapsed() < work {
                std::hint::spin_loop();
            }
        }
    }

    fn by_cpu(&self, received: &[Request], works: bool) -> Result<()> {
        let send = || -> Result<Request> {
            if works {
                self.stream.host_fn(self.work())?;
                self.stream.synchronize(self.timeout)?;
            }
            Ok(self.send()?)
        };
        for receive in received {
            let sent = self.serves().then(send).transpose()?;
            self.comm.wait(receive, self.timeout)?;
            let sent = sent.map_or_else(send, Ok)?;
            self.comm.wait(&sent, self.timeout)?;
        }
        Ok(())
    }

    fn by_tag(&self, received: &[tagged::Request]) -> Result<()> {
        for (tag, receive) in (0..).zip(received) {
            let send = || self.tagged.isend(&self.buffer, self.slots.sent(), self.peer(), tag);
            let sent = self.serves().then(send).transpose()?;
            receive.wait(self.timeout)?;
            sent.map_or_else(send, Ok)?.wait(self.timeout)?;
        }
        Ok(())
    }

    fn by_stream(&self, received: &[Request], works: bool) -> Result<()> {
        let mut batch = Batch::new();
        let mut last = None;
        for receive in received {
            if !self.serves() {
                self.comm.wait_in_batch(&mut batch, receive)?;
            }
            if works {
                batch.host_fn(self.work());
            }
            last =
                Some(self.comm.isend_in_batch(&mut batch, &self.buffer, self.slots.sent(), self.peer())?);
            if self.serves() {
                self.comm.wait_in_batch(&mut batch, receive)?;
            }
            self.stream.submit_within(&mut batch, self.timeout)?;
        }
        if let Some(last) = last {
            self.comm.wait_on_stream(self.stream, &last)?;
        }
        Ok(self.stream.synchronize(self.timeout)?)
    }

    fn one_way(&self, received: &[Request], window: u64) -> Result<()> {
        if self.serves() {
            let mut under_way = std::collections::VecDeque::new();
            for _ in 0..window {
                under_way.push_back(self.send()?);
                if under_way.len() == UNDER_WAY {
                    under_way.pop_front().map(|oldest| self.comm.wait(&oldest, self.timeout)).transpose()?;
                }
            }
            self.comm.wait_all(&under_way, self.timeout)?;
        } else {
            self.comm.wait_all(received, self.timeout)?;
        }
        Ok(())
    }
}
