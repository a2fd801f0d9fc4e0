//! Which queue pairs had their doorbell rung while another thread was running the HCA, or will have it written by
//! something that cannot tell.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use gdsync_shm::{doorbell_watch, pending_flag};
use parking_lot::Mutex;

use crate::memory::Word64;

/// The most queue pairs of one HCA.
pub const MAX_QPS: usize = 16 * 1024;

/// What of a queue pair will be rung that nobody tells of: who posts looks at both each time, in one line.
#[derive(Debug, Default)]
#[repr(align(16))]
struct WatchLimits {
    /// Doorbells up to here.
    until: AtomicU64,
    /// They are watched, so that what will come need not be told.
    watched: AtomicU32,
}

/// The same of one queue pair, for who posts there: what need not be told the device is told here.
#[derive(Debug)]
pub struct DoorbellWatch {
    limits: Arc<[WatchLimits]>,
    index: usize,
}

impl DoorbellWatch {
    /// Doorbells up to the producer index `until` will be rung: said by who has the sends locked.
    #[inline(always)]
    pub fn publish(&self, until: u64) {
        doorbell_watch::publish(&self.limits[self.index].until, until);
    }

    /// Whether the device sees that they are, now that the caller has let a lock go.
    #[inline(always)]
    pub fn is_watched(&self) -> bool {
        doorbell_watch::is_watched(&self.limits[self.index].watched)
    }

    /// Up to where they are published.
    pub fn published(&self) -> u64 {
        self.limits[self.index].until.load(Ordering::SeqCst)
    }

    /// What was published will not come: only what is before it.
    pub fn withdraw(&self, until: u64, before: u64) {
        doorbell_watch::withdraw(&self.limits[self.index].until, until, before);
    }
}

/// A lock-free set of queue pair indices, with one word that says whether it may hold any.
#[derive(Debug)]
pub struct DoorbellSet {
    pending: AtomicU32,
    groups: [AtomicU64; MAX_QPS / 64 / 64],
    bits: Box<[AtomicU64]>,
    /// By queue pair.
    limits: Arc<[WatchLimits]>,
    /// Completion queues that streams of GPUs began to wait on.
    attended: Mutex<Vec<u32>>,
}

impl Default for DoorbellSet {
    fn default() -> Self {
        Self {
            pending: AtomicU32::new(0),
            groups: std::array::from_fn(|_| AtomicU64::new(0)),
            bits: (0..MAX_QPS / 64).map(|_| AtomicU64::new(0)).collect(),
            limits: (0..MAX_QPS).map(|_| WatchLimits::default()).collect(),
            attended: Mutex::default(),
        }
    }
}

impl DoorbellSet {
    /// Puts the queue pair of this index in.
    pub fn insert(&self, index: usize) {
        self.bits[index / 64].fetch_or(1 << (index % 64), Ordering::Release);
        self.groups[index / 4096].fetch_or(1 << (index / 64 % 64), Ordering::Release);
        pending_flag::set(&self.pending);
    }

    /// Puts in a queue pair whose doorbell will be written up to the producer index `until` by something that cannot tell.
    /// Not where it is watched: returns whether it was put in.
    #[inline]
    pub fn announce(&self, index: usize, until: u64) -> bool {
        let limits = &self.limits[index];
        let must_notify = doorbell_watch::request(&limits.until, &limits.watched, until);
        if must_notify {
            self.insert(index);
        }
        must_notify
    }

    /// For who sends on a queue pair.
    pub fn doorbell_watch(&self, index: usize) -> DoorbellWatch {
        DoorbellWatch { limits: self.limits.clone(), index }
    }

    /// From now on the doorbell of a queue pair is looked at only now and then: the next that is announced must be told.
    pub fn unwatch(&self, index: usize) {
        self.limits[index].watched.store(0, Ordering::SeqCst);
    }

    /// Whether the doorbell of a queue pair will be written beyond the producer index `head`. If not it need not be watched:
    /// the next who announces something puts it in again.
    pub fn must_poll(&self, index: usize, head: u64) -> bool {
        doorbell_watch::must_poll(&self.limits[index].until, &self.limits[index].watched, head)
    }

    /// What was announced of a queue pair will not come.
    pub fn forget(&self, index: usize) {
        self.limits[index].until.store(0, Ordering::SeqCst);
        self.limits[index].watched.store(0, Ordering::SeqCst);
    }

    /// Leaves word that streams of GPUs wait on a completion queue.
    pub fn attend(&self, cqn: u32) {
        self.attended.lock().push(cqn);
        pending_flag::set(&self.pending);
    }

    /// As [`DoorbellSet::is_pending`], for those who only look whether a step is worth while: a note they miss is the holder's.
    pub fn seems_pending(&self) -> bool {
        self.pending.load(Ordering::Relaxed) != 0
    }

    /// Whether there may be any.
    pub fn is_pending(&self) -> bool {
        pending_flag::is_set(&self.pending)
    }

    /// Lets the lock under which the set is drained go; while indices were put in meanwhile, takes it again for `work`.
    pub fn unlock<G>(&self, held: G, try_lock: impl Fn() -> Option<G>, work: impl FnMut(&mut G)) {
        pending_flag::unlock(&self.pending, held, try_lock, work);
    }

    /// Empties the set. Returns the completion queues that were left word of.
    pub fn drain(&self, mut each: impl FnMut(usize)) -> Vec<u32> {
        if !pending_flag::take(&self.pending) {
            return Vec::new();
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
        std::mem::take(&mut *self.attended.lock())
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

/// Their indices. Empty at first.
#[derive(Debug, Default)]
pub struct WatchedDoorbells {
    list: Vec<usize>,
    /// They have changed since they were last told.
    changed: bool,
}

impl WatchedDoorbells {
    /// Whether no doorbell is watched.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// How many are watched.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// The index of the queue pair at this place.
    pub fn get(&self, at: usize) -> usize {
        self.list[at]
    }

    /// Looks at this doorbell from now on.
    pub fn add(&mut self, index: usize) {
        if !self.list.contains(&index) {
            self.list.push(index);
            self.changed = true;
        }
    }

    /// Looks no more at those for which `keep` is false.
    pub fn retain(&mut self, mut keep: impl FnMut(usize) -> bool) {
        let before = self.list.len();
        self.list.retain(|&index| keep(index));
        self.changed |= self.list.len() != before;
    }

    /// Looks at them only now and then, until the next is announced.
    pub fn unwatch_all(&self, doorbells: &DoorbellSet) {
        self.list.iter().for_each(|&index| doorbells.unwatch(index));
    }

    /// Looks at this doorbell no more: what was announced will not be rung.
    pub fn forget(&mut self, index: usize, doorbells: &DoorbellSet) {
        doorbells.forget(index);
        self.list.retain(|&other| other != index);
        self.changed = true;
    }

    /// Their doorbells, if they are others than at the last call.
    pub fn news(&mut self, doorbell: impl Fn(usize) -> Option<Word64>) -> Option<Vec<Word64>> {
        std::mem::take(&mut self.changed).then(|| self.list.iter().filter_map(|&i| doorbell(i)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_in_comes_out_once() {
        let set = DoorbellSet::default();
        assert!(!set.is_pending());
        let all = [0, 1, 63, 64, 4095, 4096, MAX_QPS - 1];
        for index in all.iter().chain(&all) {
            set.insert(*index);
        }
        assert!(set.is_pending());
        let mut out = Vec::new();
        set.drain(|index| out.push(index));
        assert_eq!(out, all);
        set.drain(|index| panic!("{index} came out again"));
        assert!(!set.is_pending());
    }
}
