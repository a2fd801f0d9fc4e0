//! The floor: two threads, or two processes, that bounce a cache line. No message can be faster.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gdasync::gdsync::memory::Memory;
use gdasync::measure::{Samples, shared_page};
use gdasync::mp::Communicator;

use super::Result;
use super::sheet::{Checks, expected};

/// Two ranks that bounce a cache line of shared memory.
pub(super) struct Floor<'a> {
    comm: &'a Communicator,
    line: Memory,
    timeout: Duration,
}

impl<'a> Floor<'a> {
    pub(super) fn new(comm: &'a Communicator, timeout: Duration) -> Result<Self> {
        Ok(Self { comm, line: shared_page::share(comm, shared_page::SIZE, timeout)?, timeout })
    }

    /// Round trips, as rank 0 sees them.
    pub(super) fn bounce(&self, rounds: u64) -> Result<Samples> {
        let line = self.line.atomic64(0)?;
        self.comm.barrier(self.timeout)?;
        let samples = bounce(line, self.comm.rank() == 0, rounds, self.timeout)?;
        self.comm.barrier(self.timeout)?;
        line.store(0, Ordering::Release);
        Ok(samples)
    }
}

/// Places of a ring.
const PLACES: usize = 64;
/// Before each place is the word that says what is in it, on a line of its own.
const WORD: usize = 64;

/// A ring of places in shared memory, into which rank 0 copies messages for rank 1: no rate of messages can be higher.
pub(super) struct Ring<'a> {
    comm: &'a Communicator,
    checks: &'a Checks,
    shared: Memory,
    /// What is sent, or where it arrives.
    own: Memory,
    bytes: usize,
    game: u64,
}

impl<'a> Ring<'a> {
    pub(super) fn new(comm: &'a Communicator, checks: &'a Checks, bytes: usize) -> Result<Self> {
        let len = PLACES * (WORD + bytes.next_multiple_of(WORD));
        let shared = shared_page::share(comm, len, checks.timeout())?;
        Ok(Self { comm, checks, shared, own: Memory::alloc(bytes)?, bytes, game: 0 })
    }

    fn place(&self, n: usize) -> usize {
        n % PLACES * (WORD + self.bytes.next_multiple_of(WORD))
    }

    /// Waits until the word of place `n` has this value.
    fn until(&self, n: usize, value: u64, since: Instant) -> Result<&AtomicU64> {
        let word = self.shared.atomic64(self.place(n))?;
        await_value(word, value, since, self.checks.timeout())?;
        Ok(word)
    }

    /// Moves so many messages. The time of one, and whether the last was wrong.
    pub(super) fn flood(&mut self, count: usize) -> Result<(Duration, u64)> {
        self.game += 1;
        let (timeout, rank) = (self.checks.timeout(), self.comm.rank());
        self.checks.sent(rank, self.game).fill(&self.own, 0, self.bytes)?;
        self.comm.barrier(timeout)?;
        let start = Instant::now();
        for n in 0..count {
            let at = self.place(n) + WORD;
            if rank == 0 {
                let word = self.until(n, 0, start)?;
                self.shared.copy_from(at, &self.own, 0, self.bytes)?;
                word.store(1, Ordering::Release);
            } else {
                let word = self.until(n, 1, start)?;
                self.own.copy_from(0, &self.shared, at, self.bytes)?;
                word.store(0, Ordering::Release);
            }
        }
        // Rank 0 sees that the last was taken.
        self.until(count - 1, 0, start)?;
        let time = start.elapsed() / u32::try_from(count)?;
        let right = expected(0, self.game).check(&self.own, 0, self.bytes)?;
        Ok((time, u64::from(!right)))
    }
}

/// Spins until the word has this value, for `timeout` at most. On a core that the other side needs, it steps aside.
fn await_value(word: &AtomicU64, value: u64, since: Instant, timeout: Duration) -> Result<()> {
    let mut spins = 0u32;
    while word.load(Ordering::Acquire) != value {
        spins = spins.wrapping_add(1);
        if spins.is_multiple_of(1 << 12) {
            if since.elapsed() > timeout {
                return Err("the other side of the floor is gone".into());
            }
            std::thread::yield_now();
        }
    }
    Ok(())
}

/// Bounces the line `rounds` times; the side that serves times each round trip, which `timeout` bounds.
pub(super) fn bounce(line: &AtomicU64, serves: bool, rounds: u64, timeout: Duration) -> Result<Samples> {
    let mut samples = Samples::default();
    for n in 0..rounds {
        let (mine, theirs) = if serves { (2 * n + 1, 2 * n + 2) } else { (2 * n + 2, 2 * n + 1) };
        let start = Instant::now();
        if serves {
            line.store(mine, Ordering::Release);
        }
        await_value(line, theirs, start, timeout)?;
        if serves {
            samples.add(start.elapsed());
        } else {
            line.store(mine, Ordering::Release);
        }
    }
    Ok(samples)
}
