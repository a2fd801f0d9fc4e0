//! The rank of this process in its job, which errors name.

use std::sync::atomic::{AtomicUsize, Ordering};

/// 0 for none yet, else one more; [`SEVERAL`] where threads of the process are several ranks.
static OWN_RANK: AtomicUsize = AtomicUsize::new(0);
const SEVERAL: usize = usize::MAX;

/// The rank, if the process is one.
pub fn get() -> Option<usize> {
    OWN_RANK.load(Ordering::Relaxed).checked_sub(1).filter(|rank| *rank != SEVERAL - 1)
}

/// Sets the rank. With another one than before, the process is several ranks.
pub fn set(rank: usize) {
    let known = OWN_RANK.compare_exchange(0, rank + 1, Ordering::Relaxed, Ordering::Relaxed);
    if known.is_err_and(|known| known != rank + 1) {
        OWN_RANK.store(SEVERAL, Ordering::Relaxed);
    }
}

/// The ranks are numbered anew, and this is the one of a process that is one.
pub fn change(rank: usize) {
    let change = |known| (known != SEVERAL).then_some(rank + 1);
    let _ = OWN_RANK.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change);
}
