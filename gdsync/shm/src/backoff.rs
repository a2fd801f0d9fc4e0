//! Backoff for polling loops: spin, then yield, then sleep.
//!
//! On a core with other work a yield costs a whole time slice (3 ms), and a thread that spins loses its claim to run at once
//! when it is needed; a thread that sleeps keeps it. So a yield that took long is remembered: for a while no thread of the
//! process yields, and each sleeps after the short spin. Waits amid bulk copies poll longer, without a yield.

use std::ops::RangeInclusive;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Nanoseconds of a yield that gave the core to other work, not to another waiting thread.
const LONG: u64 = 500_000;
/// For how many times as long it is remembered: on busy cores yields take a tenth of the time, and after a single one waits soon poll
/// again, which is ten times as fast as sleep.
const TIMES: u64 = 10;
/// At most this many nanoseconds.
const MEMORY: u64 = 100_000_000;

/// End of the time in which the cores count as busy, on the clock of [`now`].
static BUSY_UNTIL: AtomicU64 = AtomicU64::new(0);

/// Nanoseconds since the first call.
fn now() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    u64::try_from(START.get_or_init(Instant::now).elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Until when the cores count as busy after a yield, if it took long.
fn busy_until(before: u64, after: u64) -> Option<u64> {
    let took = after.saturating_sub(before);
    (took >= LONG).then(|| after.saturating_add(took.saturating_mul(TIMES).min(MEMORY)))
}

fn note_yield(before: u64, after: u64) {
    if let Some(until) = busy_until(before, after) {
        BUSY_UNTIL.fetch_max(until, Ordering::Relaxed);
    }
}

/// Whether the cores had other work a moment ago: a waiting thread should sleep.
pub fn cores_are_busy() -> bool {
    let until = BUSY_UNTIL.load(Ordering::Relaxed);
    until > 0 && now() < until
}

/// Yields the core, and remembers a yield that took long: for a while after one it only spins.
pub fn yield_core() {
    if cores_are_busy() {
        return std::hint::spin_loop();
    }
    let before = now();
    std::thread::yield_now();
    note_yield(before, now());
}

/// State of one wait. The caller polls, then calls [`Backoff::spin`], and sleeps when that returns false.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    since: Instant,
    spin: Duration,
}

impl Backoff {
    /// A wait that starts now and sleeps after `spin`.
    pub fn new(spin: Duration) -> Self {
        Self::since(Instant::now(), spin)
    }

    /// A wait that started at `since`.
    pub fn since(since: Instant, spin: Duration) -> Self {
        Self { since, spin }
    }

    /// Time since the start.
    pub fn waited(&self) -> Duration {
        self.since.elapsed()
    }

    /// Between two polls: spins during the first eighth of the time, then yields. Returns false at once when the caller
    /// should sleep.
    pub fn spin(&self) -> bool {
        self.spin_after(self.waited())
    }

    /// As [`Backoff::spin`], with the time since the start.
    pub fn spin_after(&self, waited: Duration) -> bool {
        if waited < self.spin / 8 {
            std::hint::spin_loop();
        } else if waited >= self.spin || cores_are_busy() {
            return false;
        } else {
            yield_core();
        }
        true
    }
}

/// How long [`back_off`] spins.
const SPIN: Duration = Duration::from_micros(5);
/// How long [`back_off`] yields before it sleeps.
pub const BACK_OFF_YIELDS: Duration = Duration::from_millis(10);
const SLEEPS: RangeInclusive<Duration> = Duration::from_micros(50)..=Duration::from_millis(1);
/// Part of the time waited that it sleeps in long waits, and the longest such sleep: those who wait for seconds use no CPU.
const LONG_SLEEP: u32 = 256;
const LONGEST_SLEEP: Duration = Duration::from_millis(20);

/// Pauses a wait that polls, `waited` after its start: spins, then yields, then sleeps a small part of the time waited, at most
/// `limit`.
pub fn back_off(waited: Duration, limit: Duration) {
    if waited < SPIN {
        std::hint::spin_loop();
    } else if waited < BACK_OFF_YIELDS {
        std::thread::yield_now();
    } else {
        let long = (waited / LONG_SLEEP).min(LONGEST_SLEEP);
        std::thread::sleep(sleep_time(waited / 8, SLEEPS).max(long).min(limit));
    }
}

/// Sleep until the next poll: an eighth of `waited`, within `range`.
pub fn sleep_time(waited: Duration, range: RangeInclusive<Duration>) -> Duration {
    (waited / 8).clamp(*range.start(), *range.end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_yield_makes_waits_sleep_after_the_short_spin() {
        const SPIN: Duration = Duration::from_micros(80);
        let (start, backoff) = (now(), Backoff::new(SPIN));
        note_yield(start, start + LONG);
        let is_over = || now() >= start + LONG * (1 + TIMES);
        assert!(cores_are_busy() || is_over());
        assert!(backoff.spin_after(Duration::ZERO), "the short spin stays");
        assert!(!backoff.spin_after(SPIN / 2) || is_over(), "it does not yield");
    }

    #[test]
    fn a_long_yield_is_remembered_ten_times_as_long_within_a_limit() {
        assert_eq!(busy_until(7, 6 + LONG), None);
        assert_eq!(busy_until(0, 3_000_000), Some(33_000_000));
        assert_eq!(busy_until(0, 1 << 50), Some((1 << 50) + MEMORY), "the process was stopped");
    }

    #[test]
    fn backoff_spins_then_yields_then_sleeps() {
        let ms = Duration::from_millis;
        let backoff = Backoff::new(ms(8));
        assert!(backoff.spin_after(ms(0)));
        assert!(!backoff.spin_after(ms(8)));
        assert!(!Backoff::new(Duration::ZERO).spin());
        assert_eq!(
            [1, 80, 800].map(|waited| sleep_time(ms(waited), ms(1)..=ms(20))),
            [ms(1), ms(10), ms(20)]
        );
    }
}
