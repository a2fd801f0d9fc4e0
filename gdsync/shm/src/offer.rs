//! Work that two sides share: one offers a part and does the rest, the other does that part, if it comes in time.
//!
//! ```text
//! offers                                  helps
//!   word = OFFERED n                        hears of n
//!   does its own part                       OFFERED n -> CLAIMED n, or leaves it
//!   OFFERED n -> TAKEN BACK n:              does the part
//!     does the other part, too              word = DONE n, or FAILED n
//! ```
//!
//! *One of the two does it.* Both leave OFFERED by compare-and-swap. So nobody waits for a helper that sleeps, only for one that
//! is at it.
//!
//! *A helper that comes late does nothing*: numbers grow, and no offer is made while one is open or claimed. Nor may one be before
//! the offering side has seen what became of the last: the word has room for one.
//!
//! *What the helper did is there* when DONE is seen: stored with release, loaded with acquire.

use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};

use super::Atom64;

const OFFERED: u64 = 1;
const CLAIMED: u64 = 2;
const DONE: u64 = 3;
const FAILED: u64 = 4;
const TAKEN_BACK: u64 = 5;
/// Bits of the state, below the number.
const BITS: u32 = 3;

/// Who does the part that was offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The side that offered it: it was taken back.
    Ours,
    /// That side as well: the helper tried, and could not.
    Refused,
    /// The helper, which is at it.
    Theirs,
    /// The helper has done it.
    Done,
}

fn word(number: u64, state: u64) -> u64 {
    number << BITS | state
}

/// Makes an offer of this number, which no offer before had. Returns false while the last one is not over.
#[must_use = "nothing may be offered"]
pub fn make(offer: &impl Atom64, number: u64) -> bool {
    let last = offer.load(Acquire) & ((1 << BITS) - 1);
    let is_over = last != OFFERED && last != CLAIMED;
    if is_over {
        offer.store(word(number, OFFERED), Release);
    }
    is_over
}

/// Whether nobody has claimed it yet.
pub fn is_open(offer: &impl Atom64, number: u64) -> bool {
    offer.load(Acquire) == word(number, OFFERED)
}

/// Takes an offer. Whoever gets true must [`finish`].
#[must_use = "a claim must be finished"]
pub fn claim(offer: &impl Atom64, number: u64) -> bool {
    offer.compare_exchange(word(number, OFFERED), word(number, CLAIMED), AcqRel, Acquire).is_ok()
}

/// What was claimed is done, or cannot be done.
pub fn finish(offer: &impl Atom64, number: u64, done: bool) {
    offer.store(word(number, if done { DONE } else { FAILED }), Release);
}

/// Takes the offer back if nobody has claimed it. What is no state of this offer was written by a broken helper, which may be
/// at it.
pub fn settle(offer: &impl Atom64, number: u64) -> Outcome {
    let [offered, taken_back, done, failed] =
        [OFFERED, TAKEN_BACK, DONE, FAILED].map(|state| word(number, state));
    match offer.compare_exchange(offered, taken_back, AcqRel, Acquire) {
        Ok(_) => Outcome::Ours,
        Err(now) if now == taken_back => Outcome::Ours,
        Err(now) if now == done => Outcome::Done,
        Err(now) if now == failed => Outcome::Refused,
        Err(_) => Outcome::Theirs,
    }
}
