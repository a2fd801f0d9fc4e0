//! Waits for words on the CPU. Streams have [`Stream::wait_value32`](gdsync::stream::Stream::wait_value32) and its
//! like for it.

use std::fmt::LowerHex;
use std::thread::sleep;
use std::time::Duration;

use gdsync::memory::{Word32, Word64};
use gdsync::protocol::{Backoff, nap};
use gdsync::stream::Cond;

use crate::deadline::Deadline;
use crate::error::{Error, Result};

/// How long a wait spins before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

/// The longest sleep between two looks: whoever writes the word wakes nobody.
const NAP: Duration = Duration::from_millis(1);

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
/// As [`wait_value32`].
pub fn wait_value64(word: &Word64, value: u64, cond: Cond, timeout: Duration) -> Result<u64> {
    wait_helping(word, value, cond, timeout, || false)
}

/// As [`wait_value64`], and `help` runs meanwhile; it says whether it did anything.
pub(crate) fn wait_helping(
    word: &Word64,
    value: u64,
    cond: Cond,
    timeout: Duration,
    help: impl FnMut() -> bool,
) -> Result<u64> {
    possible(cond, value == 0, value == u64::MAX)?;
    let look = || {
        let now = word.load();
        (now, cond.holds64(now, value))
    };
    until(look, help, timeout, &|now| describe(word.addr(), now, cond, value))
}

fn describe(addr: u64, now: impl LowerHex, cond: Cond, value: impl LowerHex) -> String {
    format!("wait until the word at {addr:#x} is {cond:?} {value:#x} (it is {now:#x})")
}

/// Refuses what would never end.
fn possible(cond: Cond, is_zero: bool, is_full: bool) -> Result<()> {
    let value = match cond {
        Cond::And if is_zero => "AND 0",
        Cond::Nor if is_full => "NOR of all ones",
        _ => return Ok(()),
    };
    let expected = "a condition that some word satisfies";
    Err(Error::Device(gdsync::Error::InvalidArgument { what: "wait", value: value.into(), expected }))
}

/// Looks until the second of what it sees is true, and returns the first.
fn until<T: Copy>(
    look: impl Fn() -> (T, bool),
    mut help: impl FnMut() -> bool,
    timeout: Duration,
    describe: &dyn Fn(T) -> String,
) -> Result<T> {
    let (first, found) = look();
    if found {
        return Ok(first);
    }
    let deadline = Deadline::after(timeout);
    let backoff = Backoff::new(SPIN);
    loop {
        let helped = help();
        let (now, found) = look();
        if found {
            return Ok(now);
        }
        if deadline.is_over() {
            return Err(deadline.error(describe(now)));
        }
        let waited = deadline.elapsed();
        if !helped && !backoff.spin_after(waited) {
            sleep(nap(waited, Duration::ZERO..=NAP).min(deadline.remaining()));
        }
    }
}
