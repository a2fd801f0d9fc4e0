//! The C interface: layouts and symbols, C programs, simulated machines, and every interleaving of a copy with an unmapping.

mod c_abi;
mod drivers;
mod library;

// The library's own file, on the atomics of loom.
#[path = "../../src/window.rs"]
mod window;

mod atomic {
    pub(crate) use ::loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
}

use loom::sync::Arc;
use loom::thread;

use window::{View, Window};

const FIRST: View = View { base: 0x1000, len: 1, kind: 1 };
const SECOND: View = View { base: 0x2000, len: 2, kind: 2 };

/// What a copy with handle `reader` sees while the mapping of handle 7 goes and that of `next` comes in its place.
fn explore(reader: u64, next: u64, allowed: &'static [Option<View>]) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let window = Arc::new(Window::new());
        window.open(7, FIRST);
        let seen = {
            let window = window.clone();
            thread::spawn(move || window.view(reader))
        };
        window.close();
        window.open(next, SECOND);
        let seen = seen.join().unwrap();
        assert!(allowed.contains(&seen), "{seen:?}");
        assert_eq!(window.view(next), Some(SECOND));
        window.close();
        assert_eq!((window.view(next), window.view(0)), (None, None));
    });
}

#[test]
fn a_handle_that_is_gone_shows_its_own_mapping_or_none() {
    explore(7, 8, &[None, Some(FIRST)]);
}

#[test]
fn a_new_handle_shows_its_own_mapping_or_none() {
    explore(8, 8, &[None, Some(SECOND)]);
}

#[test]
fn a_handle_that_is_mapped_again_shows_one_mapping_or_the_other() {
    explore(7, 7, &[None, Some(FIRST), Some(SECOND)]);
}

#[test]
fn a_range_is_inside_or_not() {
    let view = View { base: 0x1000, len: 16, kind: 1 };
    for (address, len) in [(0x1000, 0), (0x1000, 16), (0x100f, 1), (0x1010, 0)] {
        assert!(view.holds(address, len), "{address:#x} {len}");
    }
    for (address, len) in [(0x1000, 17), (0x100f, 2), (0x1010, 1), (0xfff, 1), (0x1001, usize::MAX), (0, 0)] {
        assert!(!view.holds(address, len), "{address:#x} {len}");
    }
}
