//! Many ranks in a circle: each sends to the next.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use gdasync::gdsync::memory::Memory;
use gdasync::measure::Samples;
use gdasync::mp::{self, Communicator, Registration, Request};

use super::Result;
use crate::bench::sheet::{Checks, Sheet, expected};
use crate::bench::slots::Slots;

/// Bytes of a message.
const BYTES: usize = 8;
/// Laps of a token between two checks.
const LAPS: u32 = 10;
/// Messages under way to and from a neighbour.
const UNDER_WAY: u32 = 16;

/// One rank of the circle.
pub(super) struct Circle<'a> {
    comm: &'a Communicator,
    checks: &'a Checks,
    buffer: Registration,
    slots: Slots,
    next: usize,
    before: usize,
    game: u64,
}

impl<'a> Circle<'a> {
    pub(super) fn new(comm: &'a Communicator, checks: &'a Checks) -> Result<Self> {
        let (rank, size) = (comm.rank(), comm.size());
        let slots = Slots::new(BYTES);
        let buffer = comm.register(&Memory::alloc(slots.len())?)?;
        Ok(Self {
            comm,
            checks,
            buffer,
            slots,
            next: (rank + 1) % size,
            before: (rank + size - 1) % size,
            game: 0,
        })
    }

    fn receive(&self, n: u32) -> mp::Result<Request> {
        self.comm.irecv(&self.buffer, self.slots.received(n.into()), self.before)
    }

    fn send(&self) -> mp::Result<Request> {
        self.comm.isend(&self.buffer, self.slots.sent(), self.next)
    }

    fn wait(&self, request: &Request) -> mp::Result<()> {
        self.comm.wait(request, self.checks.timeout()).map(drop)
    }

    /// Before a game: a message of its own to send, none where they arrive, and so many receives.
    fn prepare(&mut self, receives: u32) -> Result<VecDeque<Request>> {
        self.game += 1;
        let memory = self.buffer.memory();
        self.slots.fill(memory, self.checks.sent(self.comm.rank(), self.game))?;
        self.slots.spoil(memory, expected(self.before, self.game), 2)?;
        let receives = (0..receives).map(|n| self.receive(n)).collect::<mp::Result<_>>()?;
        self.comm.barrier(self.checks.timeout())?;
        Ok(receives)
    }

    /// After a game with so many messages: how many slots have wrong data.
    fn wrong(&self, messages: u32) -> Result<u64> {
        self.slots.wrong(self.buffer.memory(), expected(self.before, self.game), messages.into())
    }

    /// A token goes round; the laps as rank 0 sees them.
    pub(super) fn token(&mut self, sheet: &mut Sheet) -> Result<Samples> {
        let receives = self.prepare(LAPS)?;
        let mut samples = Samples::default();
        for receive in &receives {
            let start = Instant::now();
            if self.comm.rank() == 0 {
                let sent = self.send()?;
                self.wait(receive)?;
                samples.add(start.elapsed());
                self.wait(&sent)?;
            } else {
                self.wait(receive)?;
                let sent = self.send()?;
                self.wait(&sent)?;
            }
        }
        sheet.wrong(self.wrong(LAPS)?);
        Ok(samples)
    }

    /// All send at once, so many messages each; the time of the slowest.
    pub(super) fn flood(&mut self, messages: u32, sheet: &mut Sheet) -> Result<Duration> {
        let mut receives = self.prepare(messages.min(UNDER_WAY))?;
        let mut sends = VecDeque::new();
        let start = Instant::now();
        for n in 0..messages {
            sends.push_back(self.send()?);
            if n >= UNDER_WAY {
                sends.pop_front().map(|oldest| self.wait(&oldest)).transpose()?;
            }
            receives.pop_front().map(|oldest| self.wait(&oldest)).transpose()?;
            if n + UNDER_WAY < messages {
                receives.push_back(self.receive(n + UNDER_WAY)?);
            }
        }
        self.comm.wait_all(&sends, self.checks.timeout())?;
        let own = u64::try_from(start.elapsed().as_nanos())?;
        sheet.wrong(self.wrong(messages)?);
        let all = self.comm.exchange(&own.to_be_bytes(), self.checks.timeout())?;
        let slowest =
            all.iter().filter_map(|time| time.first_chunk()).map(|time| u64::from_be_bytes(*time)).max();
        Ok(Duration::from_nanos(slowest.unwrap_or(own)))
    }
}
