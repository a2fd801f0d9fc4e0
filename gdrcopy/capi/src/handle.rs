//! Numbers for pins and opened libraries. None is ever used twice in a process and its children, so one that is stale,
//! doubled or from elsewhere is known as such.

use std::sync::atomic::{AtomicU64, Ordering};

/// Pins at a time: as many as 64 KiB pages in the 256 GiB of an H200's BAR1.
const INDEX_BITS: u32 = 22;
/// Pins at a time.
pub(crate) const MAX_PINS: u32 = 1 << INDEX_BITS;
/// What is left of a handle for counting pins: enough for one each microsecond for 50 days.
const MAX_SERIAL: u64 = u64::MAX >> INDEX_BITS;

/// The next number. A forked child goes on from its parent's.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// A number that nothing had before.
pub(crate) fn new_serial() -> Option<u64> {
    let serial = NEXT.fetch_add(1, Ordering::Relaxed);
    // Far below the wrap of the counter: it stays used up.
    (serial <= MAX_SERIAL).then_some(serial)
}

/// All numbers so far are less.
pub(crate) fn next_serial() -> u64 {
    NEXT.load(Ordering::Relaxed)
}

/// A pin's handle: its slot below, its serial number above.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Handle(u64);

impl Handle {
    pub(crate) fn new(serial: u64, index: u32) -> Self {
        debug_assert!(serial <= MAX_SERIAL && index < MAX_PINS);
        Self(serial << INDEX_BITS | u64::from(index))
    }

    #[inline]
    pub(crate) fn from_number(number: u64) -> Self {
        Self(number)
    }

    #[inline]
    pub(crate) fn number(self) -> u64 {
        self.0
    }

    #[inline]
    pub(crate) fn index(self) -> u32 {
        // The mask leaves 22 bits.
        #[expect(clippy::cast_possible_truncation)]
        let index = (self.0 & u64::from(MAX_PINS - 1)) as u32;
        index
    }

    pub(crate) fn serial(self) -> u64 {
        self.0 >> INDEX_BITS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_keep_both_parts() {
        for serial in [1, 2, MAX_SERIAL] {
            for index in [0, 1, MAX_PINS - 1] {
                let handle = Handle::new(serial, index);
                assert_eq!((handle.serial(), handle.index()), (serial, index));
                assert_ne!(handle.number(), 0);
            }
        }
    }

    #[test]
    fn no_serial_comes_twice() {
        let (first, second) = (new_serial().unwrap(), new_serial().unwrap());
        assert!(0 < first && first < second && second < next_serial());
    }
}
