//! Data stored before a fence is there when a flag stored after it is, for a reader that fences too.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::thread;
use std::time::{Duration, Instant};

use gdrcopy::MappingType;
use gdrcopy::copy::{Copier, Routine, full_fence, load_fence, store_fence};

const KINDS: [MappingType; 3] = [MappingType::WriteCombining, MappingType::Cached, MappingType::Device];
const ROUNDS: u64 = 5_000;
/// Not whole lines of 64 bytes: the last one stays in the core until something makes it leave.
const WORDS: usize = 46;
const DEADLINE: Duration = Duration::from_secs(60);

/// A line of its own.
#[repr(align(64))]
struct Line<T>(T);

/// What the two threads share: the "device".
struct Shared {
    data: Line<[AtomicU64; WORDS]>,
    flag: Line<AtomicU64>,
    seen: Line<AtomicU64>,
}

/// Waits until `word` holds `value`; false if it did not in time.
fn wait(word: &AtomicU64, value: u64) -> bool {
    // The gap between data and flag is short: look often before letting others run.
    let seen = || (0..1000).any(|_| word.load(Ordering::Relaxed) == value);
    let start = Instant::now();
    while !seen() {
        if start.elapsed() > DEADLINE {
            return false;
        }
        thread::yield_now();
    }
    true
}

fn pass_messages(copier: Copier, kind: MappingType, fences: [fn(MappingType); 2]) {
    let shared = Shared {
        data: Line([const { AtomicU64::new(0) }; WORDS]),
        flag: Line(AtomicU64::new(0)),
        seen: Line(AtomicU64::new(0)),
    };
    let len = size_of_val(&shared.data.0);
    thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut wrong = None;
            for round in 1..=ROUNDS {
                assert!(wait(&shared.flag.0, round), "round {round} was never announced");
                fences[1](kind);
                let mut got = [0u64; WORDS];
                let src = shared.data.0.as_ptr().cast::<u8>();
                // SAFETY: the writer leaves the data alone until it is told that they were seen.
                unsafe { copier.from_device(kind, got.as_mut_ptr().cast(), src, len) };
                wrong = wrong.or(Some((round, got)).filter(|_| got != [round; WORDS]));
                shared.seen.0.store(round, Ordering::Release);
            }
            wrong
        });
        for round in 1..=ROUNDS {
            let data = [round; WORDS];
            let dst = shared.data.0.as_ptr().cast_mut().cast::<u8>();
            // SAFETY: the words are atomics, so that they may be written, and the reader waits for the flag.
            unsafe { copier.to_device(kind, dst, data.as_ptr().cast(), len) };
            fences[0](kind);
            let flag = shared.flag.0.as_ptr().cast::<u8>();
            // SAFETY: the word is an atomic that its reader reads whole.
            unsafe { copier.to_device(kind, flag, (&raw const round).cast(), size_of::<u64>()) };
            if !wait(&shared.seen.0, round) {
                break;
            }
            fence(Ordering::Acquire);
        }
        let wrong = reader.join().expect("every round was announced");
        assert_eq!(wrong, None, "{copier:?} {kind:?}: data of another round than announced");
    });
}

fn all(kinds: &[MappingType], fences: [fn(MappingType); 2]) {
    for routine in Routine::ALL {
        let store = Copier::new(routine, Routine::Scalar);
        let load = Copier::new(Routine::Scalar, routine);
        for copier in store.into_iter().chain(load) {
            for &kind in kinds {
                pass_messages(copier, kind, fences);
            }
        }
    }
}

#[test]
fn a_store_fence_and_a_load_fence_pass_a_message() {
    all(&KINDS, [store_fence, load_fence]);
}

#[test]
fn full_fences_pass_a_message() {
    all(&KINDS[..1], [|_| full_fence(); 2]);
}
