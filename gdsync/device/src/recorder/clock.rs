//! Clock of the recorder: the time stamp counter, or the system's monotonic clock.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The clock of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// The time stamp counter of x86, if its rate is invariant. The fastest clock.
    Tsc,
    /// `CLOCK_MONOTONIC`, in nanoseconds.
    Monotonic,
}

impl Clock {
    /// The fastest clock of this machine.
    pub fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        if has_invariant_tsc() {
            return Self::Tsc;
        }
        Self::Monotonic
    }

    /// Ticks of this clock now.
    #[inline]
    pub fn now(self) -> u64 {
        #[cfg(target_arch = "x86_64")]
        if self == Self::Tsc {
            // SAFETY: every x86_64 processor has the counter, and Linux lets programs read it.
            return unsafe { std::arch::x86_64::_rdtsc() };
        }
        monotonic()
    }

    /// Its code in recordings.
    pub fn code(self) -> u64 {
        match self {
            Self::Tsc => 1,
            Self::Monotonic => 2,
        }
    }

    /// The clock with this code.
    pub fn from_code(code: u64) -> Option<Self> {
        [Self::Tsc, Self::Monotonic].into_iter().find(|clock| clock.code() == code)
    }
}

#[cfg(target_arch = "x86_64")]
fn has_invariant_tsc() -> bool {
    use std::arch::x86_64::__cpuid;
    const ADVANCED_POWER: u32 = 0x8000_0007;
    __cpuid(0x8000_0000).eax >= ADVANCED_POWER && __cpuid(ADVANCED_POWER).edx & 1 << 8 != 0
}

/// `CLOCK_MONOTONIC` in nanoseconds.
pub(super) fn monotonic() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writing; this clock is always there.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

/// The time of day in nanoseconds since 1970.
pub(super) fn time_of_day() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// A stamp and the monotonic time, taken together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Moment {
    pub stamp: u64,
    pub monotonic: u64,
}

impl Moment {
    pub(super) fn now(clock: Clock) -> Self {
        let monotonic = monotonic();
        let stamp = if clock == Clock::Monotonic { monotonic } else { clock.now() };
        Self { stamp, monotonic }
    }
}

/// Converts stamps to monotonic nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scale {
    zero: Moment,
    /// Nanoseconds per tick.
    rate: f64,
}

impl Scale {
    /// The scale between two moments; a rate of 1 if they are the same.
    pub(super) fn between(clock: Clock, zero: Moment, later: Moment) -> Self {
        let (ticks, time) =
            (later.stamp.saturating_sub(zero.stamp), later.monotonic.saturating_sub(zero.monotonic));
        #[expect(clippy::cast_precision_loss, reason = "a rate needs no more than 52 bits")]
        let rate = if clock == Clock::Monotonic || ticks == 0 { 1.0 } else { time as f64 / ticks as f64 };
        Self { zero, rate }
    }

    /// Monotonic nanoseconds of a stamp.
    pub(super) fn at(&self, stamp: u64) -> u64 {
        let (ticks, before) = match stamp.checked_sub(self.zero.stamp) {
            Some(ticks) => (ticks, false),
            None => (self.zero.stamp - stamp, true),
        };
        #[expect(clippy::cast_precision_loss, reason = "exact to a nanosecond for months")]
        let time = Duration::try_from_secs_f64(ticks as f64 * self.rate / 1e9).unwrap_or(Duration::MAX);
        let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        if before {
            self.zero.monotonic.saturating_sub(time)
        } else {
            self.zero.monotonic.saturating_add(time)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_become_nanoseconds() {
        let moment = |stamp, monotonic| Moment { stamp, monotonic };
        let scale = Scale::between(Clock::Tsc, moment(1000, 50_000), moment(4000, 51_000));
        assert_eq!([1000, 4000, 7000, 400].map(|stamp| scale.at(stamp)), [50_000, 51_000, 52_000, 49_800]);
        // No rate can be computed, or the clock needs none.
        for (clock, later) in [(Clock::Tsc, moment(5, 7)), (Clock::Monotonic, moment(100, 900))] {
            assert_eq!(Scale::between(clock, moment(5, 7), later).at(105), 107);
        }
        assert_eq!(scale.at(u64::MAX).max(1), scale.at(u64::MAX), "no overflow");
    }

    #[test]
    fn the_clock_of_this_machine_goes_on() {
        let clock = Clock::best();
        let (a, b) = (Moment::now(clock), Moment::now(clock));
        assert!(b.stamp >= a.stamp && b.monotonic >= a.monotonic, "{a:?} {b:?}");
        assert_eq!(Clock::from_code(clock.code()), Some(clock));
        assert_eq!(Clock::from_code(0), None);
    }
}
