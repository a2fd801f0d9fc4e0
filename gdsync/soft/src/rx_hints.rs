//! Lock-free check for waiting packets on any link.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use super::wire::Peek;

/// Places of the first shelf; each further one has as many as all before it.
const FIRST: usize = 64;
/// Shelves: for more links than a process has descriptors for.
const SHELVES: usize = 20;

type FreeBlocks = Box<[OnceLock<Arc<Peek>>]>;

/// Receiving ends of all links, by slot number. Slots outlive their links; a free slot shows no packets.
#[derive(Debug, Default)]
pub(crate) struct RxHints {
    count: AtomicUsize,
    shelves: [OnceLock<FreeBlocks>; SHELVES],
}

/// The shelf that a place is on, and how many it has.
fn shelf_of(number: usize) -> (usize, usize) {
    let shelf = (number / FIRST).checked_ilog2().map_or(0, |log| log as usize + 1);
    (shelf, if shelf == 0 { FIRST } else { FIRST << (shelf - 1) })
}

impl RxHints {
    /// Adds slot `number` unless it exists.
    pub(crate) fn add(&self, number: usize, peek: Arc<Peek>) {
        let (at, len) = shelf_of(number);
        let shelf = self.shelves[at].get_or_init(|| (0..len).map(|_| OnceLock::new()).collect());
        shelf[number % len].get_or_init(|| peek);
        self.count.fetch_max(number + 1, Ordering::AcqRel);
    }

    /// Whether a packet may be waiting on any link.
    pub(crate) fn any(&self) -> bool {
        let count = self.count.load(Ordering::Acquire);
        let shelves = self.shelves.iter().map_while(OnceLock::get);
        shelves.flatten().take(count).any(|peek| peek.get().is_some_and(|peek| peek.has_record()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_fill_shelves_one_after_the_other() {
        let mut places = (0..SHELVES).flat_map(|shelf| {
            let len = shelf_of(if shelf == 0 { 0 } else { FIRST << (shelf - 1) }).1;
            (0..len).map(move |at| (shelf, at, len))
        });
        for number in 0..100_000 {
            let (shelf, len) = shelf_of(number);
            assert_eq!(places.next(), Some((shelf, number % len, len)), "place {number}");
        }
    }
}
