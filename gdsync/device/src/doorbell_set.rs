//! Doorbells that an engine has to look at: rung by CPU threads while it was locked, or written by something that cannot notify it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use gdsync_shm::{doorbell_watch, pending_flag};
use parking_lot::Mutex;

use crate::memory::Word64;

/// The most queue pairs of one HCA.
pub const MAX_QPS: usize = 16 * 1024;

/// State of a doorbell watch: see `gdsync_shm::doorbell_watch`. Both words share a cache line.
#[derive(Debug, Default)]
#[repr(align(16))]
struct WatchLimits {
    /// Doorbells will be written up to this producer index.
    until: AtomicU64,
    /// The engine polls the doorbell.
    watched: AtomicU32,
}

/// Doorbell watch of one queue pair, for the producer: while the engine polls the doorbell, the producer need not call
/// [`Provider::watch`](crate::Provider::watch).
#[derive(Debug)]
pub struct DoorbellWatch {
    limits: Arc<[WatchLimits]>,
    index: usize,
}

impl DoorbellWatch {
    /// Announces doorbells up to the producer index `until`. The caller holds the lock of the send queue.
    #[inline]
    pub fn publish(&self, until: u64) {
        doorbell_watch::publish(&self.limits[self.index].until, until);
    }

    /// Whether the engine polls the doorbell, so that producers need not notify it. Call it without the lock.
    #[inline]
    pub fn is_watched(&self) -> bool {
        doorbell_watch::is_watched(&self.limits[self.index].watched)
    }

    /// The producer index published last.
    pub fn published(&self) -> u64 {
        self.limits[self.index].until.load(Ordering::SeqCst)
    }

    /// Takes back the announcement of `until`, unless there is a later one; doorbells up to `before` still come.
    pub fn withdraw(&self, until: u64, before: u64) {
        doorbell_watch::withdraw(&self.limits[self.index].until, until, before);
    }
}

/// A lock-free set of queue pair indices with a pending flag, and the doorbell watches of all queue pairs.
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
    /// Adds a queue pair.
    pub fn insert(&self, index: usize) {
        self.bits[index / 64].fetch_or(1 << (index % 64), Ordering::Release);
        self.groups[index / 4096].fetch_or(1 << (index / 64 % 64), Ordering::Release);
        pending_flag::set(&self.pending);
    }

    /// Announces doorbells of a queue pair up to the producer index `until`. Adds the queue pair and returns true unless its doorbell
    /// is already polled.
    #[inline]
    pub fn announce(&self, index: usize, until: u64) -> bool {
        let limits = &self.limits[index];
        let is_new = doorbell_watch::request(&limits.until, &limits.watched, until);
        if is_new {
            self.insert(index);
        }
        is_new
    }

    /// The doorbell watch of a queue pair.
    pub fn doorbell_watch(&self, index: usize) -> DoorbellWatch {
        DoorbellWatch { limits: self.limits.clone(), index }
    }

    /// The engine polls this doorbell rarely from now on: the next announcement must notify it.
    pub fn unwatch(&self, index: usize) {
        self.limits[index].watched.store(0, Ordering::SeqCst);
    }

    /// Whether doorbells beyond the producer index `head` were announced. If not, the engine stops polling, and the next
    /// announcement adds the queue pair again.
    pub fn must_poll(&self, index: usize, head: u64) -> bool {
        doorbell_watch::must_poll(&self.limits[index].until, &self.limits[index].watched, head)
    }

    /// Drops what was announced of a queue pair.
    pub fn forget(&self, index: usize) {
        self.limits[index].until.store(0, Ordering::SeqCst);
        self.limits[index].watched.store(0, Ordering::SeqCst);
    }

    /// Notes that streams of GPUs wait on a completion queue.
    pub fn attend(&self, cqn: u32) {
        self.attended.lock().push(cqn);
        pending_flag::set(&self.pending);
    }

    /// [`DoorbellSet::is_pending`] without a fence: a hint whether a step is worthwhile. The holder of the lock sees what this misses.
    #[inline]
    pub fn seems_pending(&self) -> bool {
        self.pending.load(Ordering::Relaxed) != 0
    }

    /// Whether something was added since the last [`DoorbellSet::drain`].
    pub fn is_pending(&self) -> bool {
        pending_flag::is_set(&self.pending)
    }

    /// Releases the lock under which the set is drained. Takes it again for `work` while something was added meanwhile.
    pub fn unlock<G>(&self, held: G, try_lock: impl Fn() -> Option<G>, work: impl FnMut(&mut G)) {
        pending_flag::unlock(&self.pending, held, try_lock, work);
    }

    /// Empties the set into `each`. Returns the completion queues that streams of GPUs began to wait on.
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

/// Positions of the set bits of a word.
fn bits(mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = word.trailing_zeros();
        (word != 0).then(|| {
            word &= word - 1;
            bit as usize
        })
    })
}

/// Queue pairs whose doorbell the engine polls.
#[derive(Debug, Default)]
pub struct WatchedDoorbells {
    list: Vec<usize>,
    /// The list has changed since [`WatchedDoorbells::changed`].
    changed: bool,
}

impl WatchedDoorbells {
    /// Whether no doorbell is polled.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Number of doorbells polled.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// The queue pair at position `at`.
    pub fn get(&self, at: usize) -> usize {
        self.list[at]
    }

    /// Polls this doorbell from now on.
    pub fn add(&mut self, index: usize) {
        if !self.list.contains(&index) {
            self.list.push(index);
            self.changed = true;
        }
    }

    /// Polls only those for which `keep` is true.
    pub fn retain(&mut self, mut keep: impl FnMut(usize) -> bool) {
        let before = self.list.len();
        self.list.retain(|&index| keep(index));
        self.changed |= self.list.len() != before;
    }

    /// Has the next announcement for each of them notify the engine, which now polls them rarely.
    pub fn unwatch_all(&self, doorbells: &DoorbellSet) {
        self.list.iter().for_each(|&index| doorbells.unwatch(index));
    }

    /// Stops polling this doorbell and drops what was announced of it.
    pub fn forget(&mut self, index: usize, doorbells: &DoorbellSet) {
        doorbells.forget(index);
        self.list.retain(|&other| other != index);
        self.changed = true;
    }

    /// The doorbells polled, if the list has changed since the last call.
    pub fn changed(&mut self, doorbell: impl Fn(usize) -> Option<Word64>) -> Option<Vec<Word64>> {
        std::mem::take(&mut self.changed).then(|| self.list.iter().filter_map(|&i| doorbell(i)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_index_added_is_drained_once() {
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
