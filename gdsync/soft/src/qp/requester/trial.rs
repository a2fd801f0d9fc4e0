//! Whether the peer gets payload of host memory quicker when it reads it in place, or when it is sent: found out by trying.
//!
//! In place is one copy, by the kernel; sent is two, which overlap. Which is quicker depends on the processor and on how long
//! a message is.

use std::ops::Range;

/// Messages tried each way before the choice.
const TRIES: u32 = 4;
/// Messages after the choice, until the next.
const HOLD: u32 = 1000;
/// Powers of two that are told apart; what is longer counts as the last.
const SIZES: Range<u32> = 16..23;

/// Messages shorter than this are sent.
pub(super) const LEAST: usize = 1 << SIZES.start;

/// How payload of host memory gets to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Sent through the ring.
    Sent,
    /// Read in place by the peer.
    Pulled,
}

/// What was tried with one peer.
#[derive(Debug, Default)]
pub(super) struct Trial([Size; SIZES.end as usize - SIZES.start as usize]);

/// With messages of about one size.
#[derive(Debug, Default)]
struct Size {
    /// Messages since the last choice was void.
    count: u32,
    /// The least time that one took each way. The rest is the noise of threads that were late.
    best: [Option<u32>; 2],
}

impl Trial {
    fn size(len: usize) -> usize {
        (len.max(1).ilog2().clamp(SIZES.start, SIZES.end - 1) - SIZES.start) as usize
    }

    /// The way of a message of so many bytes as far as is known.
    pub(super) fn way(&self, len: usize) -> Way {
        self.0[Self::size(len)].way()
    }

    /// The way of the next message of so many bytes.
    pub(super) fn next(&mut self, len: usize) -> Way {
        let size = &mut self.0[Self::size(len)];
        if size.count >= 2 * TRIES + HOLD {
            *size = Size::default();
        }
        let way = size.way();
        size.count += 1;
        way
    }

    /// A message took so long.
    pub(super) fn took(&mut self, len: usize, way: Way, nanoseconds: u32) {
        let best = &mut self.0[Self::size(len)].best[way as usize];
        *best = Some(best.map_or(nanoseconds, |best| best.min(nanoseconds)));
    }
}

impl Size {
    fn way(&self) -> Way {
        let [sent, pulled] = self.best;
        match () {
            () if self.count < 2 * TRIES && self.count.is_multiple_of(2) => Way::Pulled,
            () if self.count < 2 * TRIES => Way::Sent,
            () if pulled.is_some_and(|pulled| sent.is_none_or(|sent| pulled < sent)) => Way::Pulled,
            () => Way::Sent,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ways of so many messages that take `sent` or `pulled`; `None` is not told.
    fn ways(trial: &mut Trial, len: usize, count: u32, sent: Option<u32>, pulled: Option<u32>) -> Vec<Way> {
        let mut message = || {
            let way = trial.next(len);
            let took = if way == Way::Sent { sent } else { pulled };
            took.into_iter().for_each(|took| trial.took(len, way, took));
            way
        };
        (0..count).map(|_| message()).collect()
    }

    #[test]
    fn what_was_quicker_is_kept_and_looked_at_again() {
        let mut trial = Trial::default();
        for (sent, pulled, choice) in [
            (Some(100), Some(60), Way::Pulled),
            (Some(60), Some(100), Way::Sent),
            (Some(60), None, Way::Sent),
            (None, Some(60), Way::Pulled),
            (None, None, Way::Sent),
        ] {
            let tried = ways(&mut trial, LEAST, 2 * TRIES, sent, pulled);
            assert_eq!(tried.iter().filter(|way| **way == Way::Pulled).count(), TRIES as usize);
            assert!(ways(&mut trial, LEAST, HOLD, sent, pulled).iter().all(|way| *way == choice));
        }
    }

    #[test]
    fn one_late_thread_decides_nothing_and_sizes_are_apart() {
        let mut trial = Trial::default();
        ways(&mut trial, LEAST, 2 * TRIES - 1, Some(50), Some(40));
        ways(&mut trial, LEAST, 1, Some(1), Some(4000));
        ways(&mut trial, 4 * LEAST, 2 * TRIES, Some(40), Some(50));
        assert_eq!(
            [1, 2, 4, 7].map(|n| trial.way(n * LEAST)),
            [Way::Sent, Way::Pulled, Way::Sent, Way::Sent]
        );
        assert_eq!(Trial::size(usize::MAX), Trial::size(1 << 22));
        assert_eq!(Trial::size(0), 0);
    }
}
