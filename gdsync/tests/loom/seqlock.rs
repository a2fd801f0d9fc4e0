//! Records that are copied out while they are written over.

use std::sync::atomic::Ordering::{Acquire, Relaxed};

use gdsync::shm::{Atom64, seqlock};
use loom::sync::Arc;
use loom::thread;

use super::common::{L64, explore};

/// What a reader of a file does: one copy after the other, each from the first word to the check.
fn copy(words: &[L64; 3]) -> [u64; 3] {
    let data = [words[0].load(Relaxed), words[1].load(Relaxed)];
    L64::fence(Acquire);
    let check = words[2].load(Acquire);
    [data[0], data[1], check]
}

#[test]
fn a_record_that_is_accepted_is_whole() {
    explore(3, || {
        let words = Arc::new([L64::default(), L64::default(), L64::default()]);
        let writer = words.clone();
        let writer = thread::spawn(move || {
            seqlock::write(&writer, [10, 100, 1]);
            seqlock::write(&writer, [20, 200, 2]);
        });
        let (first, second) = (copy(&words), copy(&words));
        if let Some(record) = seqlock::accept(first, second) {
            assert!([[10, 100, 1], [20, 200, 2]].contains(&record), "{record:?}");
        }
        writer.join().unwrap();
        let last = copy(&words);
        assert_eq!(seqlock::accept(last, copy(&words)), Some([20, 200, 2]));
    });
}
