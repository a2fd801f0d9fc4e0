//! Queue pairs whose doorbell will be written by something that cannot tell.

use crate::doorbell_set::DoorbellSet;
use crate::memory::Word64;

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
