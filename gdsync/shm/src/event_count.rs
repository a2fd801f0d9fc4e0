//! Sleeping without losing a wake-up: an eventcount on two words, any number of sleepers and ringers.
//!
//! ```text
//! sleeper                               ringer
//!   ticket = sequence                     publish work
//!   sleepers = 1                          fence(SeqCst)
//!   fence(SeqCst)                         if sleepers was 1: sleepers = 0
//!   is there work? then do not sleep                         sequence += 1
//!   sleep while sequence == ticket                           wake all
//! ```
//!
//! *No wake-up is lost.* The two fences are totally ordered. If the sleeper's comes second, its check sees
//! the work. If the ringer's comes second, the ringer sees `sleepers == 1`, or the 0 of another ringer who
//! took it after the sleeper set it, and who therefore moves `sequence` after the sleeper read its ticket:
//! the sleeper wakes either way. That last step is why the ringer clears the flag *before* it moves the
//! sequence, and why the flag only changes by read-modify-write: whoever takes the flag has synchronized
//! with every sleeper who set it, not only with the last one.
//!
//! *A ringer who dies* between taking the flag and waking leaves sleepers behind. Whoever learns of such a
//! death must move the sequence and wake everybody, without looking at the flag.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};

use super::Atom32;

/// Says that the caller is about to sleep. It must then look for work once more, and if there is none sleep
/// only while `sequence` is the returned ticket.
pub fn announce<W: Atom32>(sleepers: &W, sequence: &W) -> u32 {
    let ticket = sequence.load(Acquire);
    sleepers.swap(1, AcqRel);
    W::fence(SeqCst);
    ticket
}

/// Called after work was published. Returns whether the caller must wake everybody who sleeps on `sequence`.
/// When nobody sleeps, this is one fence and one load.
#[must_use = "the sleepers sleep on unless they are woken"]
pub fn ring<W: Atom32>(sleepers: &W, sequence: &W) -> bool {
    W::fence(SeqCst);
    let take = sleepers.load(Relaxed) != 0 && sleepers.swap(0, AcqRel) != 0;
    if take {
        sequence.fetch_add(1, Release);
    }
    take
}
