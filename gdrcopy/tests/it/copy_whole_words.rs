//! A naturally aligned word is copied in one access: another thread never sees half of it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use gdrcopy::MappingType;
use gdrcopy::copy::{Copier, Routine};

const KINDS: [MappingType; 3] = [MappingType::WriteCombining, MappingType::Cached, MappingType::Device];
const ROUNDS: u64 = 200_000;

/// Size of a word and its offset in the 8 bytes that the threads share.
const WORDS: [(usize, usize); 5] = [(8, 0), (4, 0), (4, 4), (2, 2), (2, 6)];

/// The bytes of `word` in the shared 8 bytes, in the lowest ones.
fn part(shared: u64, (size, offset): (usize, usize)) -> u64 {
    let bytes = &shared.to_ne_bytes()[offset..][..size];
    bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

/// Every routine of this CPU as a copier that stores, or loads, with it.
fn copiers(pair: fn(Routine) -> Option<Copier>) -> Vec<Copier> {
    Routine::ALL.into_iter().filter_map(pair).collect()
}

#[test]
fn stores_are_seen_whole() {
    for copier in copiers(|store| Copier::new(store, Routine::Scalar)) {
        for (kind, word) in KINDS.into_iter().flat_map(|kind| WORDS.map(|word| (kind, word))) {
            let shared = AtomicU64::new(0);
            let done = AtomicBool::new(false);
            let whole = [0, part(u64::MAX, word)];
            thread::scope(|scope| {
                let reader = scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        let seen = part(shared.load(Ordering::Relaxed), word);
                        assert!(whole.contains(&seen), "{copier:?} {kind:?} {word:?}: torn {seen:#x}");
                    }
                });
                let dst = shared.as_ptr().cast::<u8>().wrapping_add(word.1);
                for round in 0..ROUNDS {
                    let bytes = [if round % 2 == 0 { 0 } else { u8::MAX }; 8];
                    // SAFETY: the word lies in the shared ones, whose other user reads it whole.
                    unsafe { copier.to_device(kind, dst, bytes.as_ptr(), word.0) };
                }
                done.store(true, Ordering::Relaxed);
                reader.join().expect("the reader saw whole words");
            });
        }
    }
}

#[test]
fn loads_see_stores_whole() {
    for copier in copiers(|load| Copier::new(Routine::Scalar, load)) {
        for (kind, word) in KINDS.into_iter().flat_map(|kind| WORDS.map(|word| (kind, word))) {
            let shared = AtomicU64::new(0);
            let done = AtomicBool::new(false);
            let whole = [0, part(u64::MAX, word)];
            thread::scope(|scope| {
                scope.spawn(|| {
                    let mut value = 0;
                    while !done.load(Ordering::Relaxed) {
                        shared.store(value, Ordering::Relaxed);
                        value = !value;
                    }
                });
                let src = shared.as_ptr().cast::<u8>().wrapping_add(word.1);
                let mut torn = None;
                for _ in 0..ROUNDS {
                    let mut bytes = [0; 8];
                    let dst = bytes.as_mut_ptr().wrapping_add(word.1);
                    // SAFETY: the word lies in the shared ones, whose other user writes it whole.
                    unsafe { copier.from_device(kind, dst, src, word.0) };
                    torn = torn
                        .or(Some(part(u64::from_ne_bytes(bytes), word)).filter(|seen| !whole.contains(seen)));
                }
                done.store(true, Ordering::Relaxed);
                assert_eq!(torn, None, "{copier:?} {kind:?} {word:?}: torn");
            });
        }
    }
}
