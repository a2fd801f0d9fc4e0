//! Which send of a queue is which message.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use parking_lot::Mutex;

/// Every send of the queue is a message, and their numbers follow its places, but for those that were prepared and not posted:
/// a later one that is posted is the next message, and they keep their place if they are given up then. There are hardly ever
/// any.
#[derive(Debug, Default)]
pub(super) struct Numbers {
    /// The newest message that a stream sends.
    latest: AtomicU32,
    /// Whether any place is no message.
    any: AtomicBool,
    skipped: Mutex<Skipped>,
}

/// Places that are no messages.
#[derive(Debug, Default)]
struct Skipped {
    /// In order.
    places: VecDeque<u64>,
    /// Those before all of these.
    before: u64,
}

/// A count modulo 2^32.
#[expect(clippy::cast_possible_truncation, reason = "counts on the wire go round")]
pub(crate) fn low32(count: u64) -> u32 {
    count as u32
}

impl Numbers {
    /// The number, from 1, of the message that was just put at this place, the last of a queue of `depth` sends.
    #[inline]
    pub(super) fn next(&self, place: u64, depth: usize) -> u32 {
        let mut skipped = 0;
        if self.any.load(Ordering::Acquire) {
            let mut all = self.skipped.lock();
            // The newest were taken back altogether, and their places given again.
            while all.places.pop_back_if(|last| *last >= place).is_some() {}
            skipped = all.before(place, depth);
            self.any.store(skipped > 0, Ordering::Release);
        }
        self.at(place, skipped)
    }

    /// A message is prepared at this place: it has no number before it is posted.
    pub(super) fn prepare(&self, place: u64) {
        let mut all = self.skipped.lock();
        self.any.store(true, Ordering::Release);
        // The newest were taken back, as before.
        while all.places.pop_back_if(|last| *last >= place).is_some() {}
        all.places.push_back(place);
    }

    /// The number of the message that was prepared at this place and is posted now.
    pub(super) fn post(&self, place: u64, depth: usize) -> u32 {
        let mut all = self.skipped.lock();
        all.places.retain(|&other| other != place);
        self.at(place, all.before(place, depth))
    }

    fn at(&self, place: u64, skipped: u64) -> u32 {
        let number = low32((place + 1).wrapping_sub(skipped));
        self.latest.store(number, Ordering::Relaxed);
        number
    }

    pub(super) fn latest(&self) -> u32 {
        self.latest.load(Ordering::Relaxed)
    }
}

impl Skipped {
    /// How many are before this place of a queue of `depth` sends.
    fn before(&mut self, place: u64, depth: usize) -> u64 {
        // What is further back than the queue is deep stays what it is.
        while self.places.pop_front_if(|first| *first + (depth as u64) < place).is_some() {
            self.before += 1;
        }
        self.before + self.places.partition_point(|&other| other < place) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_counted_and_what_is_given_up_is_not() {
        let numbers = Numbers::default();
        assert_eq!([0, 1].map(|place| numbers.next(place, 8)), [1, 2]);
        (2..6).for_each(|place| numbers.prepare(place));
        // 2 and 3 are given up.
        assert_eq!([4, 5].map(|place| numbers.post(place, 8)), [3, 4]);
        assert_eq!([6, 7].map(|place| numbers.next(place, 8)), [5, 6]);
        assert_eq!(numbers.latest(), 6);
    }

    #[test]
    fn what_is_taken_back_gives_its_number_away() {
        let numbers = Numbers::default();
        for place in 0..5 {
            numbers.next(place, 8);
        }
        assert_eq!(numbers.next(3, 8), 4, "3 and 4 were taken back");
        (4..8).for_each(|place| numbers.prepare(place));
        assert_eq!(numbers.post(4, 8), 5);
        // 5 to 7 are taken back.
        assert_eq!(numbers.next(5, 8), 6);
        numbers.prepare(6);
        numbers.prepare(6);
        assert_eq!(numbers.post(6, 8), 7);
        assert_eq!(numbers.next(7, 8), 8);
        assert!(!numbers.any.load(Ordering::Relaxed), "all are messages");
    }

    #[test]
    fn the_count_goes_round_and_memory_does_not_grow() {
        let numbers = Numbers::default();
        let start = u64::from(u32::MAX) - 500;
        // In this queue all before were messages.
        let mut messages = u32::MAX - 500;
        for place in start..start + 1000 {
            numbers.prepare(place);
            if place % 3 > 0 {
                messages = messages.wrapping_add(1);
                assert_eq!(numbers.post(place, 8), messages);
            }
            assert!(numbers.skipped.lock().places.len() <= 4);
        }
        assert_eq!(numbers.next(start + 1000, 8), messages.wrapping_add(1));
    }
}
