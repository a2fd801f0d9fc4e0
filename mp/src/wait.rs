//! Waiting: time limits that cannot overflow, and waits for words of memory.

use std::fmt::LowerHex;
use std::time::{Duration, Instant};

use gdsync::memory::{Word32, Word64};
use gdsync::recorder::NamedWords;
use gdsync::shm::back_off;
use gdsync::stream::Cond;

use crate::error::{Error, Result};

/// A start, and how long it may take from there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    start: Instant,
    limit: Duration,
}

impl Deadline {
    pub(crate) fn after(limit: Duration) -> Self {
        Self { start: Instant::now(), limit }
    }

    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    pub(crate) fn remaining(&self) -> Duration {
        self.limit.saturating_sub(self.start.elapsed())
    }

    pub(crate) fn is_over(&self) -> bool {
        self.remaining().is_zero()
    }

    pub(crate) fn error(&self, what: impl Into<String>, fix: &'static str) -> Error {
        Error::Deadline { what: what.into(), after: self.limit, fix }
    }
}

/// Blocks until a 32-bit word satisfies a condition, and returns the word. What its writer wrote before it is visible
/// then. [`Cond::Geq`] is cyclic, as on streams.
///
/// # Errors
/// [`Error::Deadline`] after `timeout`; [`Error::Device`] for a condition that no word satisfies.
pub fn wait_value32(word: &Word32, value: u32, cond: Cond, timeout: Duration) -> Result<u32> {
    possible(cond, value == 0, value == u32::MAX)?;
    let look = || {
        let now = word.load();
        (now, cond.holds32(now, value))
    };
    until(look, || false, timeout, &|now| describe(word.addr(), now, cond, value))
}

/// As [`wait_value32`], of 64 bits.
///
/// # Errors
/// [`Error::Deadline`] after `timeout`; [`Error::Device`] for a condition that no word satisfies.
pub fn wait_value64(word: &Word64, value: u64, cond: Cond, timeout: Duration) -> Result<u64> {
    wait_value64_and(word, value, cond, timeout, || false)
}

/// As [`wait_value64`], and calls `progress` between polls, which returns whether it did anything.
pub(crate) fn wait_value64_and(
    word: &Word64,
    value: u64,
    cond: Cond,
    timeout: Duration,
    progress: impl FnMut() -> bool,
) -> Result<u64> {
    possible(cond, value == 0, value == u64::MAX)?;
    let look = || {
        let now = word.load();
        (now, cond.holds64(now, value))
    };
    until(look, progress, timeout, &|now| describe(word.addr(), now, cond, value))
}

fn describe(addr: u64, now: impl LowerHex, cond: Cond, value: impl LowerHex) -> String {
    let what = NamedWords::find(addr).map(|words| words.awaited(addr, 0));
    let what = what.unwrap_or_else(|| format!("the word at {addr:#x}"));
    format!("wait until {what} is {cond:?} {value:#x} (it is {now:#x})")
}

/// Refuses waits that would never end.
fn possible(cond: Cond, is_zero: bool, is_full: bool) -> Result<()> {
    let value = match cond {
        Cond::And if is_zero => "AND 0",
        Cond::Nor if is_full => "NOR of all ones",
        _ => return Ok(()),
    };
    let expected = "a condition that some word satisfies";
    Err(Error::Device(gdsync::Error::InvalidArgument { what: "wait", value: value.into(), expected }))
}

/// Polls until `look` finds its word, and returns it.
fn until<T: Copy>(
    look: impl Fn() -> (T, bool),
    mut progress: impl FnMut() -> bool,
    timeout: Duration,
    describe: &dyn Fn(T) -> String,
) -> Result<T> {
    let (first, found) = look();
    if found {
        return Ok(first);
    }
    let deadline = Deadline::after(timeout);
    loop {
        let has_progressed = progress();
        let (now, found) = look();
        if found {
            return Ok(now);
        }
        if deadline.is_over() {
            return Err(deadline.error(describe(now), "see that its writer lives and writes it"));
        }
        if !has_progressed {
            back_off(deadline.elapsed(), deadline.remaining());
        }
    }
}
