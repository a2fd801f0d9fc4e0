//! Event count on two words: sleeping without lost wake-ups, any number of sleepers and notifiers.
//!
//! ```text
//! sleeper                               notifier
//!   ticket = sequence                     publish work
//!   sleepers = 1                          fence(SeqCst)
//!   fence(SeqCst)                         if sleepers was 1: sleepers = 0
//!   is there work? then do not sleep                         sequence += 1
//!   sleep while sequence == ticket                           wake all
//! ```
//!
//! *No wake-up is lost.* The two fences are totally ordered. If the sleeper's is second, its check sees the work. If
//! the notifier's is second, it sees `sleepers == 1`, or 0 from another notifier that cleared it after the sleeper set
//! it; that one then increments `sequence` after the sleeper read its ticket. The sleeper wakes either way. For this, a
//! notifier clears the flag *before* it increments the sequence, and the flag changes only by read-modify-write:
//! whoever clears it synchronizes with every sleeper that set it.
//!
//! *A notifier that dies* between clearing and waking leaves sleepers behind. Whoever detects the death must increment
//! the sequence and wake everybody, regardless of the flag.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};

use super::Atom32;

/// Announces a sleeper. The caller must check for work once more, and if there is none sleep only while `sequence`
/// equals the returned ticket.
pub fn announce<W: Atom32>(sleepers: &W, sequence: &W) -> u32 {
    let ticket = sequence.load(Acquire);
    sleepers.swap(1, AcqRel);
    W::fence(SeqCst);
    ticket
}

/// Notifies after work was published. Returns whether the caller must wake everybody who sleeps on `sequence`. Without
/// sleepers this is one fence and one load.
#[must_use = "the sleepers sleep on unless they are woken"]
pub fn notify<W: Atom32>(sleepers: &W, sequence: &W) -> bool {
    W::fence(SeqCst);
    let take = sleepers.load(Relaxed) != 0 && sleepers.swap(0, AcqRel) != 0;
    if take {
        sequence.fetch_add(1, Release);
    }
    take
}
