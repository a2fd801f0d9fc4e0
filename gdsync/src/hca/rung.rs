//! Which queue pairs had their doorbell rung while another thread was running the HCA, or will have it written by
//! something that cannot tell.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::protocol::note;

/// The most queue pairs of one HCA.
pub(crate) const MAX_QPS: usize = 16 * 1024;

/// A lock-free set of queue pair indices, with one word that says whether it may hold any.
#[derive(Debug)]
pub(crate) struct Rung {
    note: AtomicU32,
    groups: [AtomicU64; MAX_QPS / 64 / 64],
    bits: Box<[AtomicU64]>,
    /// Up to where doorbells will be rung that nobody tells of, by queue pair.
    until: Box<[AtomicU64]>,
}

impl Default for Rung {
    fn default() -> Self {
        Self {
            note: AtomicU32::new(0),
            groups: std::array::from_fn(|_| AtomicU64::new(0)),
            bits: (0..MAX_QPS / 64).map(|_| AtomicU64::new(0)).collect(),
            until: (0..MAX_QPS).map(|_| AtomicU64::new(0)).collect(),
        }
    }
}

impl Rung {
    pub(crate) fn insert(&self, index: usize) {
        self.bits[index / 64].fetch_or(1 << (index % 64), Ordering::Release);
        self.groups[index / 4096].fetch_or(1 << (index / 64 % 64), Ordering::Release);
        note::leave(&self.note);
    }

    /// Puts in a queue pair whose doorbell will be written up to the producer index `until` by something that cannot tell.
    pub(crate) fn announce(&self, index: usize, until: u64) {
        self.until[index].fetch_max(until, Ordering::Relaxed);
        self.insert(index);
    }

    /// Up to where the doorbell of a queue pair that came out of the set will be written.
    pub(crate) fn announced(&self, index: usize) -> u64 {
        self.until[index].load(Ordering::Relaxed)
    }

    /// What was announced of a queue pair will not come.
    pub(crate) fn forget(&self, index: usize) {
        self.until[index].store(0, Ordering::Relaxed);
    }

    /// As [`Rung::is_noted`], for those who only look whether a step is worth while: a note they miss is the holder's.
    pub(crate) fn looks_noted(&self) -> bool {
        self.note.load(Ordering::Relaxed) != 0
    }

    /// Whether there may be any.
    pub(crate) fn is_noted(&self) -> bool {
        note::is_left(&self.note)
    }

    /// Lets the lock under which the set is drained go; while indices were put in meanwhile, takes it again for `work`.
    pub(crate) fn settle<G>(&self, held: G, try_lock: impl Fn() -> Option<G>, work: impl FnMut(&mut G)) {
        note::settle(&self.note, held, try_lock, work);
    }

    /// Empties the set.
    pub(crate) fn drain(&self, mut each: impl FnMut(usize)) {
        if !note::take(&self.note) {
            return;
        }
        for (g, group) in self.groups.iter().enumerate() {
            if group.load(Ordering::Relaxed) == 0 {
                continue;
            }
            for word in bits(group.swap(0, Ordering::AcqRel)) {
                for bit in bits(self.bits[g * 64 + word].swap(0, Ordering::AcqRel)) {
                    each((g * 64 + word) * 64 + bit);
                }
            }
        }
    }
}

/// The set bits of a word.
fn bits(mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = word.trailing_zeros();
        (word != 0).then(|| {
            word &= word - 1;
            bit as usize
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_in_comes_out_once() {
        let rung = Rung::default();
        assert!(!rung.is_noted());
        let all = [0, 1, 63, 64, 4095, 4096, MAX_QPS - 1];
        for index in all.iter().chain(&all) {
            rung.insert(*index);
        }
        assert!(rung.is_noted());
        let mut out = Vec::new();
        rung.drain(|index| out.push(index));
        assert_eq!(out, all);
        rung.drain(|index| panic!("{index} came out again"));
        assert!(!rung.is_noted());
    }
}
