//! Waits for words on the CPU. Streams have [`Stream::wait_value32`](gdsync::stream::Stream::wait_value32) and others.

use std::fmt::LowerHex;
use std::time::Duration;

use gdsync::memory::{Word32, Word64};
use gdsync::stream::Cond;

use crate::deadline::{Deadline, back_off};
use crate::error::{Error, Result};

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
    format!("wait until the word at {addr:#x} is {cond:?} {value:#x} (it is {now:#x})")
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
            return Err(deadline.error(describe(now)));
        }
        if !has_progressed {
            back_off(deadline.elapsed(), deadline.remaining());
        }
    }
}
